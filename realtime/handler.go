package realtime

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// openWithin bounds what is asked of the database and the host before a connection.
const openWithin = 30 * time.Second

// refusal is an error under a status that is not the catalogue's.
type refusal struct {
	status int
	err    *ssp2.Error
}

func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// ServeHTTP serves GET /realtime?clientId=… (§8.1). Errors before the upgrade are those of
// the HTTP binding: JSON (§10.1) under the status of the catalogue.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer h.contain(w, r)
	if err := h.connect(w, r); err != nil {
		h.refuse(w, r, err)
	}
}

// contain answers for a panic of a host callback.
func (h *Hub) contain(w http.ResponseWriter, r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v)
	}
	h.log.ErrorContext(r.Context(), "panic while opening a connection", "panic", v, "stack", string(debug.Stack()))
	h.refuse(w, r, &ssp2.Error{Code: ssp2.CodeInternalError, Message: "the server failed to process the request"})
}

func (h *Hub) refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := round.Failure(err)
	status := e.HTTPStatus()
	if s, ok := errors.AsType[*refusal](err); ok {
		status = s.status
	}
	h.log.DebugContext(r.Context(), "connection refused", "status", status, "error", err)
	body := append(ssp2.AppendErrorJSON(nil, e), '\n')
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body) //nolint:gosec // JSON, and announced as such
}

// connect opens a connection, or returns why it does not.
func (h *Hub) connect(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		return &refusal{http.StatusMethodNotAllowed, ssp2.Errorf(ssp2.CodeInvalidRequest, "the method must be GET")}
	}
	if !isUpgrade(r) {
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		return &refusal{http.StatusUpgradeRequired, ssp2.Errorf(ssp2.CodeInvalidRequest, "the request must be an upgrade to a WebSocket of version 13")}
	}
	if !h.admitsOrigin(r) {
		return ssp2.Errorf(ssp2.CodeForbidden, "pages of this origin may not connect")
	}
	id, err := h.authenticate(r)
	if err != nil {
		return err
	}
	name := r.URL.Query().Get("clientId")
	if err := gate.CheckClientID(name); err != nil {
		return err
	}
	of := client{id.Partition, name}
	if err := h.takeSlot(of); err != nil {
		return err
	}
	defer h.activity.end() // its hello is on its way, or it is refused
	c, err := h.upgrade(w, r, id, name)
	if err != nil {
		h.freeSlot(of)
		return err
	}
	if c == nil {
		h.freeSlot(of) // the upgrade failed and said so
	}
	return nil
}

// isUpgrade checks what a WebSocket handshake needs (RFC 6455 §4.2.1).
func isUpgrade(r *http.Request) bool {
	return r.ProtoAtLeast(1, 1) && hasToken(r.Header, "Connection", "upgrade") && hasToken(r.Header, "Upgrade", "websocket") &&
		r.Header.Get("Sec-Websocket-Version") == "13" && len(r.Header.Values("Sec-Websocket-Key")) == 1
}

func hasToken(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

// admitsOrigin says whether the page that asks, if it is one, may connect.
func (h *Hub) admitsOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	if err != nil || u.Host == "" {
		return false
	}
	if strings.EqualFold(u.Host, r.Host) {
		return true
	}
	for _, pattern := range h.cfg.Origins {
		got := u.Host
		if strings.Contains(pattern, "://") {
			got = u.Scheme + "://" + u.Host
		}
		if ok, _ := path.Match(strings.ToLower(pattern), strings.ToLower(got)); ok {
			return true
		}
	}
	return false
}

// authenticate asks the host who asks, as the HTTP binding does.
func (h *Hub) authenticate(r *http.Request) (round.Identity, error) {
	id, err := h.cfg.Authenticate(r)
	if err == nil {
		if err = gate.CheckIdentity(id.Partition, id.Actor); err == nil {
			return id, nil
		}
		h.log.ErrorContext(r.Context(), "host callback failed", "callback", "Authenticate", "error", err)
	}
	switch {
	case ssp2.CodeOf(err) != "":
		return round.Identity{}, err
	case errors.Is(err, round.ErrOutage):
		return round.Identity{}, &ssp2.Error{
			Code: ssp2.CodeStorageUnavailable, Message: "requests cannot be authenticated at the moment; retry later", Err: err,
		}
	default:
		return round.Identity{}, &ssp2.Error{Code: ssp2.CodeAuthRequired, Message: "the request is not authenticated", Err: err}
	}
}

// errNotServing is for a hub that is not started, or stops.
func errNotServing() error {
	return ssp2.Errorf(ssp2.CodeStorageUnavailable, "no realtime connections are served at the moment; retry later")
}

// takeSlot counts a connection, within the caps. The connection exists from here on.
func (h *Hub) takeSlot(of client) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.state != serving:
		return errNotServing()
	case h.slots >= h.cfg.MaxConnections:
		return ssp2.Errorf(ssp2.CodeWebSocketConnectionLimit, "this server has all the realtime connections it takes")
	case h.perClient[of] >= h.cfg.MaxConnectionsPerClient:
		return ssp2.Errorf(ssp2.CodeWebSocketConnectionLimit, "this client has all the realtime connections it may have")
	}
	h.slots++
	h.perClient[of]++
	h.serving.Add(1)
	h.activity.begin()
	return nil
}

func (h *Hub) freeSlot(of client) {
	h.mu.Lock()
	h.slots--
	if h.perClient[of]--; h.perClient[of] == 0 {
		delete(h.perClient, of)
		delete(h.relisted, of)
	}
	h.mu.Unlock()
	h.serving.Done()
	h.activity.changed()
}

// upgrade upgrades a request for which there is a slot. nil: the upgrade failed and has
// answered.
func (h *Hub) upgrade(w http.ResponseWriter, r *http.Request, id round.Identity, name string) (_ *conn, err error) { //nolint:contextcheck // it ends with the request or the hub
	ctx, cancel := context.WithTimeout(r.Context(), openWithin)
	defer cancel()
	h.mu.Lock()
	base, before := h.base, opening{era: h.era, relisted: h.relisted[client{id.Partition, name}]}
	h.mu.Unlock()
	defer context.AfterFunc(base, cancel)() //nolint:contextcheck // it ends with either
	defer func() {
		if err != nil && base.Err() != nil {
			err = errNotServing() // when the time to stop is up, nobody waits for answers
		}
	}()
	c := &conn{hub: h, id: id, name: name, session: rand.Text(), opened: time.Now(), values: context.WithoutCancel(r.Context())}
	c.p = h.partition(id.Partition)
	c.p.mu.Lock()
	c.p.watchers++
	before.resets = c.p.resets
	c.p.mu.Unlock()
	epoch, err := h.cfg.Gate.Enter(ctx, id.Partition)
	if err != nil {
		h.abandon(c, false)
		return nil, err
	}
	c.epoch = epoch.LogEpoch
	latest, err := h.fan.Watch(ctx, id.Partition)
	if err != nil {
		h.abandon(c, false)
		return nil, err
	}
	state, err := h.load(ctx, id, name)
	if err != nil {
		h.abandon(c, true)
		return nil, err
	}
	c.wire, c.version = state.wire, state.version
	c.part = int(c.session[0]+c.session[1]) % beatParts

	c.net = &netConn{}
	c.net.timeout.Store(int64(h.cfg.WriteTimeout))
	c.heard.Store(true)
	c.ws, err = websocket.Accept(&hijacker{w, c.net}, r, &websocket.AcceptOptions{
		InsecureSkipVerify: true, // the origin is checked
		CompressionMode:    websocket.CompressionDisabled,
		OnPingReceived:     func(context.Context, []byte) bool { c.heard.Store(true); return true },
		OnPongReceived:     func(context.Context, []byte) { c.heard.Store(true) },
	})
	if err != nil {
		h.abandon(c, true)
		h.log.DebugContext(r.Context(), "upgrade failed", "error", err)
		return nil, nil
	}
	c.ws.SetReadLimit(-1) // bounds depend on the kind of message
	h.start(c, state, max(latest, state.latest), before)
	return c, nil
}

// opening is what may change while a connection is opened.
type opening struct{ era, relisted, resets int }

// start lets an upgraded connection begin.
func (h *Hub) start(c *conn, state clientState, latest int64, before opening) {
	h.mu.Lock()
	base, going := h.base, h.state == serving && h.era == before.era
	if going {
		h.conns[c] = struct{}{}
	}
	if h.relisted[c.client()] != before.relisted {
		c.version = 0 // the record that was read is not that of its newest pull
	}
	h.mu.Unlock()
	n, seq, err := h.enter(c, state.subs, state.cursor, latest, state.synced, before.resets)
	switch {
	case err != nil:
		h.logFailure("opening a connection failed", c, err)
		c.kill()
	case !going:
		c.goAway()
	}
	events.Emit(c.values, h.cfg.Events, events.RealtimeConnected{
		Session: c.eventSession(), Registrations: n, Cursor: state.cursor, LatestSeq: seq,
	})
	go c.serve(base)
}

// abandon takes back what a connection that does not come about was counted for.
func (h *Hub) abandon(c *conn, watched bool) {
	c.p.mu.Lock()
	if c.p.watchers--; c.p.watchers == 0 {
		c.p.known = false
	}
	c.p.mu.Unlock()
	if watched {
		h.fan.Unwatch(c.p.name)
	}
	h.release(c.p)
}

// clientState is what is known of a client when it connects.
type clientState struct {
	wire ssp2.WireVersion
	// version is the schema version that deltas may be in; 0: not known.
	version int32
	cursor  int64 // -1: none
	latest  int64 // newest commit of the partition
	synced  bool  // what it registered holds, so that it need not pull for that
	subs    []registered
}

// load reads the record that the newest pull of the client left (§8.1), and resolves what
// it may see of it now.
func (h *Hub) load(ctx context.Context, id round.Identity, name string) (clientState, error) {
	row, err := h.store.RealtimeReadClient(ctx, db.RealtimeReadClientParams{Partition: id.Partition, ClientID: name})
	if err != nil {
		return clientState{}, err
	}
	state := clientState{wire: ssp2.WireV1, cursor: row.Cursor, latest: row.MaxCommitSeq}
	switch {
	case row.ActorID == "":
		return state, nil
	case row.ActorID != id.Actor:
		return clientState{}, ssp2.Errorf(ssp2.CodeInvalidClientID, "this client id belongs to another actor")
	}
	if row.WireVersion > 0 {
		state.wire = ssp2.WireVersion(row.WireVersion)
	}
	if cursor, ok := h.acks.newest(client{id.Partition, name}, id.Actor); ok {
		state.cursor = max(state.cursor, cursor)
	}
	var list []storedSubscription
	if row.Subscriptions != "" {
		if err := json.Unmarshal([]byte(row.Subscriptions), &list); err != nil {
			h.log.ErrorContext(ctx, "the record of a client is unreadable", "partition", id.Partition, "client", name, "error", err)
			list = nil
		}
	}
	if len(list) == 0 || state.cursor < 0 {
		return state, nil // nothing to bridge from: it pulls first
	}
	resolution, err := h.cfg.Rounds.Resolve(ctx, round.ScopeRequest{Identity: id, ClientID: name})
	if err != nil {
		return clientState{}, err
	}
	state.synced, state.version = true, h.recordedVersion(list)
	for i, s := range list {
		effective, active := h.effective(resolution.Grants, s)
		if !active {
			state.synced = false // it is to learn that it lost something
			continue
		}
		state.subs = append(state.subs, registered{
			id: s.ID, table: s.Table, order: i, scopes: effective, from: min(state.cursor, state.latest),
		})
	}
	return state, nil
}

// storedSubscription is one of the list in a client's record.
type storedSubscription struct {
	ID            string              `json:"id"`
	SchemaVersion int32               `json:"schemaVersion"`
	Table         string              `json:"table"`
	Scopes        map[string][]string `json:"scopes"`
}

// recordedVersion is the schema version that a client can be taken to have: that of its
// newest pull, if that is the newest served. A device that pulled in an older one may have
// been upgraded since, and may pull over HTTP, which this connection does not see: it gets
// wake-ups until a round of this connection tells its version.
func (h *Hub) recordedVersion(list []storedSubscription) int32 {
	newest := h.cfg.Schema.Version
	for _, s := range list {
		if s.SchemaVersion != newest {
			return 0
		}
	}
	return newest
}

func (h *Hub) effective(grants *scope.Grants, s storedSubscription) (ssp2.ScopeMap, bool) {
	served, ok := h.cfg.Versions.Schema(s.SchemaVersion)
	if !ok {
		return nil, false
	}
	table, ok := served.Table(s.Table)
	if !ok || scope.ValidateRequested(table, s.Scopes) != nil {
		return nil, false // of another schema version
	}
	return grants.Effective(s.Scopes)
}

// hijacker gives a WebSocket a connection whose writes are bounded.
type hijacker struct {
	http.ResponseWriter
	conn *netConn
}

// Unwrap is for http.ResponseController.
func (j *hijacker) Unwrap() http.ResponseWriter { return j.ResponseWriter }

// Hijack implements [http.Hijacker].
func (j *hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(j.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err //nolint:wrapcheck // passed on
	}
	// Bounds that were for the request are over.
	_ = conn.SetDeadline(time.Time{})
	j.conn.use(conn)
	rw.Writer.Reset(j.conn)
	return j.conn, rw, nil
}
