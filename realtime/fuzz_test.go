package realtime_test

import (
	"context"
	"encoding/binary"
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
	for _, text := range []string{
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
