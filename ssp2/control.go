package ssp2

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// ChannelTag is the first byte of every binary message on the realtime channel
// (§8.7).
type ChannelTag byte

// The channel tags of §8.7.
const (
	TagDelta ChannelTag = 0x00 // one whole response message, server to client
	TagRound ChannelTag = 0x01 // a chunk of the round in flight, both directions
)

// ControlEvent is one JSON text message of the realtime channel (§8). Times are
// epoch milliseconds; all integers are within ±[MaxSafeInteger].
type ControlEvent interface {
	appendTo(w *jsonWriter) error
}

// Hello is the first event of a connection (§8.1), server to client.
type Hello struct {
	ProtocolVersion int64
	SessionID       string
	ActorID         string
	ClientID        string
	Cursor          int64 // last acknowledged
	LatestCursor    int64
	RequiresSync    bool
	TimestampMs     int64
}

// WakeReason is why a wake-up was sent (§8.3), a closed set.
type WakeReason string

// The wake reasons of §8.3.
const (
	WakeDeltaTooLarge   WakeReason = "delta-too-large"
	WakeCatchupRequired WakeReason = "catchup-required"
	WakeResetRequired   WakeReason = "reset-required"
)

// Wake is a wake-up, the event "sync" (§8.3), server to client. Its requiresPull
// is always true.
type Wake struct {
	Cursor      int64
	Reason      WakeReason
	TimestampMs int64
}

// Heartbeat is the keep-alive event (§8.5), server to client.
type Heartbeat struct {
	TimestampMs int64
}

// PresenceKind is what happened to the presence of a peer (§8.6.2), a closed set.
type PresenceKind string

// The presence kinds of §8.6.2.
const (
	PresenceJoin   PresenceKind = "join"
	PresenceUpdate PresenceKind = "update"
	PresenceLeave  PresenceKind = "leave"
)

// Presence tells that the presence of a peer changed (§8.6.2), server to client.
type Presence struct {
	ScopeKey    string // non-empty
	Kind        PresenceKind
	ActorID     string
	ClientID    string
	Doc         []byte // raw JSON object; nil for a leave and only then
	TimestampMs int64
}

// The codes of a PresenceError, a closed set outside the catalogue (§8.6.2).
const (
	PresenceTooLarge  Code = "presence.too_large"
	PresenceForbidden Code = "presence.forbidden"
)

// PresenceError tells a client that its publish was refused (§8.6.2), server to
// client.
type PresenceError struct {
	ScopeKey    string // non-empty
	Code        Code
	TimestampMs int64
}

// PresencePublish publishes or clears a presence document (§8.6.2), client to
// server.
type PresencePublish struct {
	ScopeKey string // non-empty
	Doc      []byte // raw JSON object, nil to leave
}

// Ack acknowledges the deltas up to a cursor (§8.2), client to server.
type Ack struct {
	Cursor int64
}

// UnknownEvent is an event or message whose name this package does not know. It
// is tolerated (§8.1) and kept as it is.
type UnknownEvent struct {
	Name string
	Raw  []byte // the whole text
}

// ParseServerEvent parses a control event that a server sent to a client: Hello,
// Wake, Heartbeat, Presence, PresenceError or UnknownEvent, as pointers. Names are
// matched exactly, members the protocol does not define are ignored, and of a
// member named twice the last counts. Raw documents alias text.
//
// A text that is no event, and an event of these without the data that belongs to
// it, give an [*Error] with the code sync.invalid_request (§8.1).
func ParseServerEvent(text []byte) (ControlEvent, error) {
	root, err := controlRoot(text)
	if err != nil {
		return nil, err
	}
	name := root.str("event")
	if root.err != nil {
		return nil, root.err
	}
	data := func() *controlFields { return root.object("data", name+".data") }
	var d *controlFields
	var ev ControlEvent
	switch name {
	case "hello":
		d = data()
		ev = &Hello{
			ProtocolVersion: d.integer("protocolVersion"),
			SessionID:       d.str("sessionId"),
			ActorID:         d.str("actorId"),
			ClientID:        d.str("clientId"),
			Cursor:          d.integer("cursor"),
			LatestCursor:    d.integer("latestCursor"),
			RequiresSync:    d.boolean("requiresSync"),
			TimestampMs:     d.integer("timestamp"),
		}
	case "sync":
		d = data()
		wake := &Wake{
			Cursor:      d.integer("cursor"),
			Reason:      WakeReason(d.str("reason")),
			TimestampMs: d.integer("timestamp"),
		}
		if !d.boolean("requiresPull") {
			d.fail("requiresPull is not true")
		}
		d.check(wake.problem())
		ev = wake
	case "heartbeat":
		d = data()
		ev = &Heartbeat{TimestampMs: d.integer("timestamp")}
	case "presence":
		d = data()
		ev = d.presence()
	default:
		return &UnknownEvent{Name: name, Raw: text}, nil
	}
	if d.err != nil {
		return nil, d.err
	}
	return ev, nil
}

// presence reads the data of a presence event from a server.
func (d *controlFields) presence() ControlEvent {
	if d.has("error") {
		ev := &PresenceError{
			ScopeKey:    d.str("scopeKey"),
			Code:        Code(d.str("error")),
			TimestampMs: d.integer("timestamp"),
		}
		d.check(ev.problem())
		return ev
	}
	ev := &Presence{
		ScopeKey:    d.str("scopeKey"),
		Kind:        PresenceKind(d.str("kind")),
		ActorID:     d.str("actorId"),
		ClientID:    d.str("clientId"),
		Doc:         d.doc(),
		TimestampMs: d.integer("timestamp"),
	}
	d.check(ev.problem())
	return ev
}

// ParseClientEvent parses a control message that a client sent to a server: Ack,
// PresencePublish or UnknownEvent, as pointers. An ack is told by its member
// "type", a publish by its member "event". Rules and errors are those of
// [ParseServerEvent].
func ParseClientEvent(text []byte) (ControlEvent, error) {
	root, err := controlRoot(text)
	if err != nil {
		return nil, err
	}
	key, known := "event", "presence"
	if root.has("type") {
		key, known = "type", "ack"
	}
	name := root.str(key)
	switch {
	case root.err != nil:
		return nil, root.err
	case name != known:
		return &UnknownEvent{Name: name, Raw: text}, nil
	case key == "type":
		ack := &Ack{Cursor: root.integer("cursor")}
		if root.err != nil {
			return nil, root.err
		}
		return ack, nil
	}
	d := root.object("data", "presence.data")
	publish := &PresencePublish{ScopeKey: d.str("scopeKey"), Doc: d.doc()}
	d.check(publish.problem())
	if d.err != nil {
		return nil, d.err
	}
	return publish, nil
}

// AppendControl appends the JSON text of a control event. It refuses what a
// parser would refuse with an [*Error], and then returns dst as it was.
func AppendControl(dst []byte, ev ControlEvent) ([]byte, error) {
	w := jsonWriter{buf: dst}
	if err := ev.appendTo(&w); err != nil {
		return dst, err
	}
	return w.buf, nil
}

func badControl(format string, args ...any) *Error {
	return invalid("control event: %s", fmt.Sprintf(format, args...))
}

// checkControl turns a problem into an error, and so does an integer outside the
// range of the protocol.
func checkControl(problem string, integers ...int64) error {
	if problem != "" {
		return badControl("%s", problem)
	}
	for _, v := range integers {
		if !safeInteger(v) {
			return badControl("%d is outside ±(2^53−1)", v)
		}
	}
	return nil
}

func (ev *Hello) appendTo(w *jsonWriter) error {
	w.event("hello")
	w.integer("protocolVersion", ev.ProtocolVersion)
	w.str("sessionId", ev.SessionID)
	w.str("actorId", ev.ActorID)
	w.str("clientId", ev.ClientID)
	w.integer("cursor", ev.Cursor)
	w.integer("latestCursor", ev.LatestCursor)
	w.boolean("requiresSync", ev.RequiresSync)
	w.integer("timestamp", ev.TimestampMs)
	w.endEvent()
	return checkControl("", ev.ProtocolVersion, ev.Cursor, ev.LatestCursor, ev.TimestampMs)
}

func (ev *Wake) problem() string {
	switch ev.Reason {
	case WakeDeltaTooLarge, WakeCatchupRequired, WakeResetRequired:
		return ""
	}
	return "the wake reason is unknown"
}

func (ev *Wake) appendTo(w *jsonWriter) error {
	w.event("sync")
	w.integer("cursor", ev.Cursor)
	w.boolean("requiresPull", true)
	w.str("reason", string(ev.Reason))
	w.integer("timestamp", ev.TimestampMs)
	w.endEvent()
	return checkControl(ev.problem(), ev.Cursor, ev.TimestampMs)
}

func (ev *Heartbeat) appendTo(w *jsonWriter) error {
	w.event("heartbeat")
	w.integer("timestamp", ev.TimestampMs)
	w.endEvent()
	return checkControl("", ev.TimestampMs)
}

func (ev *Presence) problem() string {
	switch ev.Kind {
	case PresenceJoin, PresenceUpdate:
		if ev.Doc == nil {
			return "a join or update without a doc"
		}
	case PresenceLeave:
		if ev.Doc != nil {
			return "a leave with a doc"
		}
	default:
		return "the presence kind is unknown"
	}
	return presenceProblem(ev.ScopeKey, ev.Doc)
}

func (ev *Presence) appendTo(w *jsonWriter) error {
	w.event("presence")
	w.str("scopeKey", ev.ScopeKey)
	w.str("kind", string(ev.Kind))
	w.str("actorId", ev.ActorID)
	w.str("clientId", ev.ClientID)
	w.doc(ev.Doc)
	w.integer("timestamp", ev.TimestampMs)
	w.endEvent()
	return checkControl(ev.problem(), ev.TimestampMs)
}

func (ev *PresenceError) problem() string {
	if ev.Code != PresenceTooLarge && ev.Code != PresenceForbidden {
		return "the presence error is unknown"
	}
	return presenceProblem(ev.ScopeKey, nil)
}

func (ev *PresenceError) appendTo(w *jsonWriter) error {
	w.event("presence")
	w.str("scopeKey", ev.ScopeKey)
	w.str("error", string(ev.Code))
	w.integer("timestamp", ev.TimestampMs)
	w.endEvent()
	return checkControl(ev.problem(), ev.TimestampMs)
}

func (ev *PresencePublish) problem() string { return presenceProblem(ev.ScopeKey, ev.Doc) }

func (ev *PresencePublish) appendTo(w *jsonWriter) error {
	w.event("presence")
	w.str("scopeKey", ev.ScopeKey)
	w.doc(ev.Doc)
	w.endEvent()
	return checkControl(ev.problem())
}

// presenceProblem checks what all presence events share.
func presenceProblem(scopeKey string, doc []byte) string {
	if scopeKey == "" {
		return "scopeKey is empty"
	}
	if doc == nil {
		return ""
	}
	if !ValidJSON(doc) || doc[skipSpace(doc, 0)] != '{' {
		return "doc is neither an object nor null"
	}
	return ""
}

func (ev *Ack) appendTo(w *jsonWriter) error {
	w.begin('{')
	w.str("type", "ack")
	w.integer("cursor", ev.Cursor)
	w.end('}')
	return checkControl("", ev.Cursor)
}

func (ev *UnknownEvent) appendTo(w *jsonWriter) error {
	if !ValidJSON(ev.Raw) {
		return badControl("not a JSON document")
	}
	w.buf = append(w.buf, ev.Raw...)
	return nil
}

func (w *jsonWriter) event(name string) {
	w.begin('{')
	w.str("event", name)
	w.key("data")
	w.begin('{')
}

func (w *jsonWriter) endEvent() {
	w.end('}')
	w.end('}')
}

// doc writes a presence document as it is.
func (w *jsonWriter) doc(doc []byte) {
	w.key("doc")
	if doc == nil {
		doc = []byte("null")
	}
	w.buf = append(w.buf, doc...)
	w.more = true
}

// controlFields reads the members of an object. The first failure sticks.
type controlFields struct {
	name    string
	members []jsonMember
	err     *Error
}

func controlRoot(text []byte) (*controlFields, error) {
	if !ValidJSON(text) {
		return nil, badControl("not a JSON document")
	}
	members, ok := jsonObject(text)
	if !ok {
		return nil, badControl("not an object")
	}
	return &controlFields{name: "message", members: members}, nil
}

func (f *controlFields) fail(format string, args ...any) {
	if f.err == nil {
		f.err = badControl("%s: %s", f.name, fmt.Sprintf(format, args...))
	}
}

func (f *controlFields) check(problem string) {
	if problem != "" {
		f.fail("%s", problem)
	}
}

// get returns the last member of a name.
func (f *controlFields) get(name string) ([]byte, bool) {
	for _, m := range slices.Backward(f.members) {
		if m.key == name {
			return m.value, true
		}
	}
	return nil, false
}

func (f *controlFields) has(name string) bool {
	_, ok := f.get(name)
	return ok
}

func (f *controlFields) str(name string) string {
	if value, ok := f.get(name); ok {
		if s, isString := jsonString(value); isString {
			return s
		}
	}
	f.fail("%s is not a string", name)
	return ""
}

func (f *controlFields) boolean(name string) bool {
	value, _ := f.get(name)
	switch string(value) {
	case "true":
		return true
	case "false":
		return false
	}
	f.fail("%s is not a boolean", name)
	return false
}

// integer reads an integer in any spelling JSON has for it, as JavaScript does.
func (f *controlFields) integer(name string) int64 {
	value, _ := f.get(name)
	if v, err := strconv.ParseInt(string(value), 10, 64); err == nil && safeInteger(v) {
		return v
	}
	if _, isNumber := scanNumber(value, 0); isNumber {
		v, err := strconv.ParseFloat(string(value), 64)
		if err == nil && v == math.Trunc(v) && math.Abs(v) <= MaxSafeInteger {
			return int64(v)
		}
	}
	f.fail("%s is not an integer within ±(2^53−1)", name)
	return 0
}

// object reads a member that is an object, called what in messages.
func (f *controlFields) object(name, what string) *controlFields {
	d := &controlFields{name: what, err: f.err}
	if value, ok := f.get(name); ok {
		if members, isObject := jsonObject(value); isObject {
			d.members = members
			return d
		}
	}
	d.fail("not an object")
	return d
}

// doc reads a presence document: its text, nil for null.
func (f *controlFields) doc() []byte {
	value, ok := f.get("doc")
	switch {
	case ok && string(value) == "null":
		return nil
	case ok && value[0] == '{':
		return value
	}
	f.fail("doc is neither an object nor null")
	return nil
}
