package realtime_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
)

// FuzzClientMessages sends what a client may not: whatever it is, the connection goes on or
// ends, and nothing is left of it. An input is messages, each a kind, a length and bytes.
func FuzzClientMessages(f *testing.F) {
	w := newWorld(f, realtime.Options{})
	w.engine.run = pulls(0)
	w.record("a", "ada", 0, orgSub("o1"))
	message := func(kind byte, payload ...byte) []byte {
		return append(binary.LittleEndian.AppendUint16([]byte{kind}, uint16(len(payload))), payload...)
	}
	good := append([]byte{1}, pullRequest("a", orgSub("o1"))...)
	f.Add(message(1, good...))
	f.Add(append(message(1, good[:9]...), message(1, append([]byte{1}, good[9:]...)...)...))
	f.Add(append(message(1, good...), message(1, good...)...))
	text := func(s string) []byte { return message(0, []byte(s)...) }
	f.Add(slices.Concat( // texts between the chunks of a request
		message(1, good[:3]...), text(`{"type":"ack","cursor":1}`),
		message(1, append([]byte{1}, good[3:20]...)...), text(`{"event":"presence","data":{"scopeKey":"org:o1","doc":{"a":1}}}`),
		message(1, 1), message(1, append([]byte{1}, good[20:]...)...),
	))
	f.Add(slices.Concat(message(1, good[:20]...), text(`{`)))                  // what ends a connection in a request
	f.Add(message(1, append(bytes.Clone(good), 1)...))                         // a byte too many
	f.Add(message(1, append(append([]byte{1}, pullRequest("b")...), 0)...))    // likewise, of a request that fails
	f.Add(slices.Concat(message(1, 1), message(1, 1), message(1, 0)))          // the tag of deltas
	f.Add(slices.Concat(message(1), message(1, 0x7f), message(1, 0xff, 1, 2))) // no tag, and unknown ones
	for _, doc := range []string{`1`, `[]`, `"x"`, `{"a":"\ud800"}`, `{"a":1,"a":2}`, strings.Repeat(`{"a":`, 5000) + `1`} {
		f.Add(text(`{"event":"presence","data":{"scopeKey":"org:o1","doc":` + doc + `}}`))
	}
	for _, text := range []string{
		`{"event":"presence","data":{"scopeKey":"org:o2","doc":{}}}`, `{"event":"presence","data":{"scopeKey":"","doc":{}}}`,
		`{"event":"presence"}`, `{"event":"presence","data":[]}`, `{"event":"new","data":1}`, `{"type":"ack","cursor":1.5}`,
		`{"type":"ack","cursor":-1}`, `{"type":"ack","cursor":9007199254740992}`, `{"type":"ack","event":"presence"}`, "\xff", `null`,
		`{"type":"ack","cursor":1}`, `{"event":"presence","data":{"scopeKey":"org:o1","doc":{}}}`,
		`{"event":"presence","data":{"scopeKey":"org:o1","doc":null}}`, `{"type":1}`, `{`, ``,
	} {
		f.Add(message(0, []byte(text)...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		w.t = t
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c, _, err := w.dial("a", "ada") //nolint:bodyclose // the library has read it
		require.NoError(t, err)
		for len(data) >= 3 {
			kind, n := websocket.MessageText, min(int(binary.LittleEndian.Uint16(data[1:])), len(data)-3)
			if data[0]%2 == 1 {
				kind = websocket.MessageBinary
			}
			if c.ws.Write(ctx, kind, data[3:3+n]) != nil {
				break // it was closed
			}
			data = data[3+n:]
		}
		_ = c.ws.Close(websocket.StatusNormalClosure, "")
		require.NoError(t, w.hub.Settle(ctx, 0, nil))
		require.NotContains(t, w.logged.String(), "panic")
	})
}
