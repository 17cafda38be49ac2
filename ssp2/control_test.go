package ssp2_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

const (
	helloText = `{"event":"hello","data":{"protocolVersion":1,"sessionId":"s","actorId":"a","clientId":"c","cursor":-1,` +
		`"latestCursor":9,"requiresSync":false,"timestamp":5}}`
	wakeText      = `{"event":"sync","data":{"cursor":9,"requiresPull":true,"reason":"reset-required","timestamp":5}}`
	heartbeatText = `{"event":"heartbeat","data":{"timestamp":5}}`
	joinText      = `{"event":"presence","data":{"scopeKey":"k","kind":"join","actorId":"a","clientId":"c","doc":{"x": 1},"timestamp":5}}`
	leaveText     = `{"event":"presence","data":{"scopeKey":"k","kind":"leave","actorId":"a","clientId":"c","doc":null,"timestamp":5}}`
	refusalText   = `{"event":"presence","data":{"scopeKey":"k","error":"presence.too_large","timestamp":5}}`
	publishText   = `{"event":"presence","data":{"scopeKey":"k","doc":{}}}`
	clearText     = `{"event":"presence","data":{"scopeKey":"k","doc":null}}`
	ackText       = `{"type":"ack","cursor":9}`
)

func TestServerEvents(t *testing.T) {
	t.Parallel()

	for text, want := range map[string]ssp2.ControlEvent{
		helloText:     &ssp2.Hello{ProtocolVersion: 1, SessionID: "s", ActorID: "a", ClientID: "c", Cursor: -1, LatestCursor: 9, TimestampMs: 5},
		wakeText:      &ssp2.Wake{Cursor: 9, Reason: ssp2.WakeResetRequired, TimestampMs: 5},
		heartbeatText: &ssp2.Heartbeat{TimestampMs: 5},
		joinText:      &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceJoin, ActorID: "a", ClientID: "c", Doc: []byte(`{"x": 1}`), TimestampMs: 5},
		leaveText:     &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceLeave, ActorID: "a", ClientID: "c", TimestampMs: 5},
		refusalText:   &ssp2.PresenceError{ScopeKey: "k", Code: ssp2.PresenceTooLarge, TimestampMs: 5},
	} {
		ev, err := ssp2.ParseServerEvent([]byte(text))
		require.NoError(t, err, text)
		require.Equal(t, want, ev)
		again, err := ssp2.AppendControl([]byte("x"), ev)
		require.NoError(t, err)
		require.Equal(t, "x"+text, string(again))
	}
}

func TestClientEvents(t *testing.T) {
	t.Parallel()

	for text, want := range map[string]ssp2.ControlEvent{
		publishText: &ssp2.PresencePublish{ScopeKey: "k", Doc: []byte("{}")},
		clearText:   &ssp2.PresencePublish{ScopeKey: "k"},
		ackText:     &ssp2.Ack{Cursor: 9},
	} {
		ev, err := ssp2.ParseClientEvent([]byte(text))
		require.NoError(t, err, text)
		require.Equal(t, want, ev)
		again, err := ssp2.AppendControl([]byte("x"), ev)
		require.NoError(t, err)
		require.Equal(t, "x"+text, string(again))
	}
}

func TestTolerantControlParsing(t *testing.T) {
	t.Parallel()

	for rule, text := range map[string]string{
		"white space":             " { \"event\" : \"heartbeat\" ,\n\"data\" : { \"timestamp\" : 5 } } ",
		"member unknown":          `{"v":2,"event":"heartbeat","data":{"timestamp":5,"extra":[{}]}}`,
		"last of two counts":      `{"event":"hello","event":"heartbeat","data":null,"data":{"timestamp":4,"timestamp":5}}`,
		"escaped name":            `{"\u0065vent":"heartbe\u0061t","data":{"timestamp":5}}`,
		"integer with a fraction": `{"event":"heartbeat","data":{"timestamp":5.0}}`,
		"integer with exponent":   `{"event":"heartbeat","data":{"timestamp":50e-1}}`,
	} {
		ev, err := ssp2.ParseServerEvent([]byte(text))
		require.NoError(t, err, rule)
		require.Equal(t, &ssp2.Heartbeat{TimestampMs: 5}, ev, rule)
	}
}

func TestControlStringsAreUnescaped(t *testing.T) {
	t.Parallel()

	ev, err := ssp2.ParseServerEvent([]byte(strings.Replace(helloText, `"s"`,
		`"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00 \ud83d\u0041\ude00\ud83d"`, 1)))
	require.NoError(t, err)
	require.Equal(t, "\"\\/\b\f\n\r\té😀 \ufffdA\ufffd\ufffd", ev.(*ssp2.Hello).SessionID)
}

func TestUnknownEventsAreTolerated(t *testing.T) {
	t.Parallel()

	for text, name := range map[string]string{
		`{"event":"party","data":7}`: "party",
		`{"event":"Hello"}`:          "Hello",
		"{\"event\":\"\"}\n":         "",
	} {
		for _, parse := range []func([]byte) (ssp2.ControlEvent, error){ssp2.ParseServerEvent, ssp2.ParseClientEvent} {
			ev, err := parse([]byte(text))
			require.NoError(t, err)
			require.Equal(t, &ssp2.UnknownEvent{Name: name, Raw: []byte(text)}, ev)
			again, err := ssp2.AppendControl(nil, ev)
			require.NoError(t, err)
			require.Equal(t, text, string(again))
		}
	}
	ev, err := ssp2.ParseClientEvent([]byte(`{"type":"nack","event":"presence"}`))
	require.NoError(t, err)
	require.Equal(t, "nack", ev.(*ssp2.UnknownEvent).Name)
	ev, err = ssp2.ParseClientEvent([]byte(helloText))
	require.NoError(t, err, "a server's event is unknown from a client")
	require.Equal(t, "hello", ev.(*ssp2.UnknownEvent).Name)
}

// TestMalformedControlEvents has one case for every rule of §8: each member of
// each known event missing and of a wrong type, and the closed sets.
func TestMalformedControlEvents(t *testing.T) {
	t.Parallel()

	requireMalformed := func(t *testing.T, parse func([]byte) (ssp2.ControlEvent, error), text string) {
		t.Helper()
		ev, err := parse([]byte(text))
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%s: %v", text, err)
		require.Nil(t, ev)
	}
	for text, members := range map[string][]string{
		helloText: {
			`"protocolVersion":1`, `"sessionId":"s"`, `"actorId":"a"`, `"clientId":"c"`, `"cursor":-1`, `"latestCursor":9`,
			`"requiresSync":false`, `"timestamp":5`,
		},
		wakeText:      {`"cursor":9`, `"requiresPull":true`, `"reason":"reset-required"`, `"timestamp":5`},
		heartbeatText: {`"timestamp":5`},
		joinText:      {`"scopeKey":"k"`, `"kind":"join"`, `"actorId":"a"`, `"clientId":"c"`, `"doc":{"x": 1}`, `"timestamp":5`},
		refusalText:   {`"scopeKey":"k"`, `"error":"presence.too_large"`, `"timestamp":5`},
		publishText:   {`"scopeKey":"k"`, `"doc":{}`},
		ackText:       {`"cursor":9`},
	} {
		parse := ssp2.ParseServerEvent
		if text == publishText || text == ackText {
			parse = ssp2.ParseClientEvent
		}
		_, err := parse([]byte(text))
		require.NoError(t, err)
		for _, member := range members {
			name, _, _ := strings.Cut(member, ":")
			for _, instead := range []string{`"other":1`, name + `:[]`, name + `:"1x"`, name + `:7.5`, name + `:9007199254740992`, name + `:1e400`} {
				if strings.HasSuffix(instead, `"1x"`) && strings.HasSuffix(member, `"`) && name != `"reason"` && name != `"kind"` && name != `"error"` {
					continue // any string will do
				}
				requireMalformed(t, parse, strings.Replace(text, member, instead, 1))
			}
		}
	}
	for rule, text := range map[string]string{
		"nothing":                `  `,
		"not JSON":               `{"event":"heartbeat"`,
		"not an object":          `["heartbeat"]`,
		"not UTF-8":              "{\"event\":\"\xff\"}",
		"no event":               `{"data":{}}`,
		"event not a string":     `{"event":7,"data":{}}`,
		"no data":                `{"event":"hello"}`,
		"data null":              `{"event":"hello","data":null}`,
		"data a list":            `{"event":"heartbeat","data":[5]}`,
		"requiresPull false":     strings.Replace(wakeText, `Pull":true`, `Pull":false`, 1),
		"wake reason unknown":    strings.Replace(wakeText, `reset-required`, `because`, 1),
		"presence kind unknown":  strings.Replace(joinText, `join`, `snapshot`, 1),
		"scopeKey empty":         strings.Replace(joinText, `"k"`, `""`, 1),
		"join without a doc":     strings.Replace(joinText, `{"x": 1}`, `null`, 1),
		"leave with a doc":       strings.Replace(leaveText, `null`, `{}`, 1),
		"leave without doc":      strings.Replace(leaveText, `"doc":null,`, ``, 1),
		"presence error unknown": strings.Replace(refusalText, `too_large`, `too_small`, 1),
		"error: scopeKey empty":  strings.Replace(refusalText, `"k"`, `""`, 1),
		"publish to a client":    publishText,
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			requireMalformed(t, ssp2.ParseServerEvent, text)
		})
	}
	for rule, text := range map[string]string{
		"nothing":             ``,
		"not an object":       `7`,
		"neither key":         `{"cursor":9}`,
		"type not a string":   `{"type":null,"event":"presence"}`,
		"cursor fractional":   `{"type":"ack","cursor":1.5}`,
		"scopeKey empty":      strings.Replace(publishText, `"k"`, `""`, 1),
		"doc a list":          strings.Replace(publishText, `{}`, `[]`, 1),
		"doc a string":        strings.Replace(publishText, `{}`, `"online"`, 1),
		"publish without doc": `{"event":"presence","data":{"scopeKey":"k"}}`,
		"publish: no data":    `{"event":"presence"}`,
	} {
		t.Run("client: "+rule, func(t *testing.T) {
			t.Parallel()
			requireMalformed(t, ssp2.ParseClientEvent, text)
		})
	}
}

func TestAppendControlRefuses(t *testing.T) {
	t.Parallel()

	for rule, ev := range map[string]ssp2.ControlEvent{
		"hello: cursor above 2^53−1": &ssp2.Hello{Cursor: 1 << 53},
		"wake: no reason":            &ssp2.Wake{},
		"wake: cursor":               &ssp2.Wake{Reason: ssp2.WakeCatchupRequired, Cursor: -1 << 53},
		"heartbeat: timestamp":       &ssp2.Heartbeat{TimestampMs: 1 << 60},
		"presence: no kind":          &ssp2.Presence{ScopeKey: "k", Doc: []byte("{}")},
		"presence: join without doc": &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceJoin},
		"presence: leave with doc":   &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceLeave, Doc: []byte("{}")},
		"presence: doc no object":    &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceUpdate, Doc: []byte("[]")},
		"presence: doc no JSON":      &ssp2.Presence{ScopeKey: "k", Kind: ssp2.PresenceUpdate, Doc: []byte("{")},
		"presence: no scopeKey":      &ssp2.Presence{Kind: ssp2.PresenceUpdate, Doc: []byte("{}")},
		"presence error: no code":    &ssp2.PresenceError{ScopeKey: "k"},
		"publish: no scopeKey":       &ssp2.PresencePublish{},
		"publish: doc no object":     &ssp2.PresencePublish{ScopeKey: "k", Doc: []byte("null")},
		"ack: cursor":                &ssp2.Ack{Cursor: 1 << 53},
		"unknown: no JSON":           &ssp2.UnknownEvent{Name: "x", Raw: []byte("x")},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendControl([]byte("kept"), ev)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
}
