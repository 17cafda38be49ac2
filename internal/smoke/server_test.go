package smoke_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/coder/websocket"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// model is a sync server in memory: enough of §4 to §6 for a smoke run, without authorization. A test changes what it
// answers with tamper.
type model struct {
	t      *testing.T
	schema *schema.Schema
	epoch  string
	// tamper may change the frames of a response. request counts from 1.
	tamper func(request int, req *ssp2.Request, frames []ssp2.Frame) []ssp2.Frame
	// intercept may answer a request itself.
	intercept func(w http.ResponseWriter, r *http.Request) bool
	// onSocket makes the message about a commit from its delta, "" for none.
	onSocket func(delta string) string
	// hello changes the greeting of a socket.
	hello func(string) string

	mu       sync.Mutex
	requests int
	rows     map[string]map[string]stored
	log      []*ssp2.Commit
	outcomes map[string]*ssp2.PushResult
	pulled   map[string]*ssp2.Request // newest pull of each client
	sockets  map[string]chan string   // to each client that has one: deltas, or control messages
	wires    map[ssp2.WireVersion]int
}

type stored struct {
	version int64
	columns []int64
	values  []ssp2.Value
}

func newModel(t *testing.T, s *schema.Schema) (*model, *httptest.Server) {
	t.Helper()
	m := &model{
		onSocket: func(delta string) string { return delta },
		hello:    func(hello string) string { return hello },
		t:        t, schema: s, epoch: "e1", rows: map[string]map[string]stored{}, outcomes: map[string]*ssp2.PushResult{},
		pulled: map[string]*ssp2.Request{}, sockets: map[string]chan string{},
		wires: map[ssp2.WireVersion]int{},
	}
	for _, table := range s.Tables {
		m.rows[table.Name] = map[string]stored{}
	}
	server := httptest.NewServer(m)
	t.Cleanup(server.Close)
	return m, server
}

func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.intercept != nil && m.intercept(w, r) {
		return
	}
	if r.URL.Path == "/realtime" {
		m.mu.Unlock()
		m.realtime(w, r)
		m.mu.Lock()
		return
	}
	if r.URL.Path == "/readyz" {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"status":"ready"}`)
		return
	}
	req, err := ssp2.ReadRequest(r.Body, ssp2.Limits{})
	if err != nil {
		m.t.Errorf("read the request: %v", err)
		return
	}
	m.requests++
	m.wires[req.WireVersion]++
	frames := m.answer(req)
	if m.tamper != nil {
		frames = m.tamper(m.requests, req, frames)
	}
	m.deliver(req)
	body, err := ssp2.AppendMessage(nil, &ssp2.Message{WireVersion: req.WireVersion, Kind: ssp2.KindResponse, Frames: frames})
	if err != nil {
		m.t.Errorf("encode the response: %v", err)
		return
	}
	w.Header().Set("Content-Type", "application/vnd.syncular.sync.v2")
	_, _ = w.Write(body)
}

// realtime serves a socket that is told of commits until the client goes.
func (m *model) realtime(w http.ResponseWriter, r *http.Request) {
	ws, err := websocket.Accept(w, r, nil)
	if err != nil {
		m.t.Errorf("accept a socket: %v", err)
		return
	}
	id, out := r.URL.Query().Get("clientId"), make(chan string, 100)
	m.mu.Lock()
	m.sockets[id] = out
	out <- m.hello(fmt.Sprintf(`{"event":"hello","data":{"protocolVersion":1,"clientId":%q,"requiresSync":false}}`, id))
	m.mu.Unlock()
	ctx, cancel := context.WithCancel(r.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		defer cancel()
		for {
			if _, _, err := ws.Read(ctx); err != nil {
				return
			}
		}
	}()
	for ctx.Err() == nil {
		select {
		case message := <-out:
			kind := websocket.MessageText
			if message[0] == 0 {
				kind = websocket.MessageBinary
			}
			if ws.Write(ctx, kind, []byte(message)) != nil {
				cancel()
			}
		case <-ctx.Done():
		}
	}
	_ = ws.CloseNow()
	<-gone
}

// deliver sends the newest commit of a request to the sockets.
func (m *model) deliver(req *ssp2.Request) {
	if len(req.Commits) == 0 {
		return
	}
	for id, out := range m.sockets {
		last := m.pulled[id]
		frames := []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: m.epoch}}
		for _, sub := range last.Subscriptions {
			sub.Cursor, sub.BootstrapState = int64(len(m.log)-1), nil
			if section := m.pull(last.Pull, sub); len(section) > 2 {
				frames = append(frames, section...)
			}
		}
		delta, err := ssp2.AppendMessage([]byte{0}, &ssp2.Message{WireVersion: last.WireVersion, Kind: ssp2.KindResponse, Frames: frames})
		if err != nil {
			m.t.Errorf("encode a delta: %v", err)
			return
		}
		if message := m.onSocket(string(delta)); message != "" {
			out <- message
		}
	}
}

func (m *model) answer(req *ssp2.Request) []ssp2.Frame {
	header := &ssp2.ResponseHeader{LogEpoch: m.epoch}
	frames := []ssp2.Frame{header}
	if req.Header.SchemaVersion != m.schema.Version {
		header.RequiredSchemaVersion, header.LatestSchemaVersion = &m.schema.Version, &m.schema.Version
		return frames
	}
	if req.Header.LogEpoch == nil || *req.Header.LogEpoch != m.epoch {
		header.ResetRequired = true
		return frames
	}
	for _, commit := range req.Commits {
		frames = append(frames, m.push(req.WireVersion, req.Header.ClientID, commit))
	}
	if req.Pull != nil {
		m.pulled[req.Header.ClientID] = req
	}
	for _, sub := range req.Subscriptions {
		frames = append(frames, m.pull(req.Pull, sub)...)
	}
	return frames
}

func (m *model) push(wire ssp2.WireVersion, clientID string, commit ssp2.PushCommit) *ssp2.PushResult {
	key := clientID + " " + commit.ClientCommitID
	if known, ok := m.outcomes[key]; ok {
		again := *known
		if again.Status == ssp2.PushApplied {
			again.Status = ssp2.PushCached
		}
		return &again
	}
	rows := map[string]map[string]stored{}
	for table, byID := range m.rows {
		rows[table] = maps.Clone(byID)
	}
	seq := int64(len(m.log) + 1)
	entry := &ssp2.Commit{CommitSeq: seq, CreatedAtMs: 1, ActorID: "a"}
	result := &ssp2.PushResult{ClientCommitID: commit.ClientCommitID, Status: ssp2.PushApplied, CommitSeq: &seq}
	for i, op := range commit.Operations {
		r := m.apply(wire, rows, entry, op)
		r.OpIndex = int32(i)
		if r.Status != ssp2.OpApplied {
			result.Status, result.CommitSeq, result.Results = ssp2.PushRejected, nil, []ssp2.OpResult{r}
			break
		}
		result.Results = append(result.Results, r)
	}
	if result.Status == ssp2.PushApplied {
		m.rows, m.log = rows, append(m.log, entry)
	}
	m.outcomes[key] = result
	return result
}

func (m *model) apply(wire ssp2.WireVersion, rows map[string]map[string]stored, entry *ssp2.Commit, op ssp2.Operation) ssp2.OpResult {
	table, ok := m.schema.Table(op.Table)
	if !ok {
		return ssp2.OpResult{Status: ssp2.OpError, Code: string(ssp2.CodeUnknownTable)}
	}
	old, exists := rows[op.Table][op.RowID]
	if op.Op == ssp2.OpDelete {
		if exists {
			delete(rows[op.Table], op.RowID)
			m.change(entry, table, op.RowID, old, false)
		}
		return ssp2.OpResult{Status: ssp2.OpApplied}
	}
	values, present, err := decode(wire, table, op.Payload)
	if err != nil {
		return ssp2.OpResult{Status: ssp2.OpError, Code: string(ssp2.CodeInvalidRequest), Message: err.Error()}
	}
	row := stored{version: old.version + 1, columns: make([]int64, len(values)), values: make([]ssp2.Value, len(values))}
	conflicts := ssp2.NewBitmap(len(values))
	for i := range values {
		if !present.Has(i) {
			row.values[i], row.columns[i] = old.values[i], old.columns[i]
			continue
		}
		row.values[i], row.columns[i] = values[i], row.version
		if exists && i == table.PrimaryKey {
			row.columns[i] = old.columns[i]
		}
		if exists && op.BaseVersion != nil && (wire < ssp2.WireV3 && old.version != *op.BaseVersion ||
			wire >= ssp2.WireV3 && old.columns[i] > *op.BaseVersion) {
			conflicts.Set(i)
		}
	}
	if conflicts.Count() > 0 {
		r := ssp2.OpResult{Status: ssp2.OpConflict, Code: string(ssp2.CodeVersionConflict), ServerVersion: old.version}
		r.ServerRow = m.encode(table, old.values)
		if wire >= ssp2.WireV3 {
			r.ConflictColumns = conflicts
		}
		return r
	}
	rows[op.Table][op.RowID] = row
	m.change(entry, table, op.RowID, row, true)
	return ssp2.OpResult{Status: ssp2.OpApplied}
}

func decode(wire ssp2.WireVersion, t *schema.Table, payload []byte) ([]ssp2.Value, ssp2.Bitmap, error) {
	if wire >= ssp2.WireV3 {
		return ssp2.DecodeSparseRow(t.Wire, t.PrimaryKey, payload, nil)
	}
	values, err := ssp2.DecodeRow(t.Wire, payload, nil)
	all := ssp2.NewBitmap(len(t.Wire))
	for i := range t.Wire {
		all.Set(i)
	}
	return values, all, err
}

func (m *model) encode(t *schema.Table, values []ssp2.Value) []byte {
	row, err := ssp2.AppendRow(nil, t.Wire, values)
	if err != nil {
		m.t.Errorf("encode a row: %v", err)
	}
	return row
}

func (m *model) change(entry *ssp2.Commit, t *schema.Table, id string, row stored, upsert bool) {
	index := slices.Index(entry.Tables, t.Name)
	if index < 0 {
		index = len(entry.Tables)
		entry.Tables = append(entry.Tables, t.Name)
	}
	c := ssp2.Change{TableIndex: uint16(index), RowID: id, Op: ssp2.OpDelete, Scopes: map[string]string{}}
	for _, s := range t.Scopes {
		c.Scopes[s.Variable], _ = schema.ScopeText(t.Columns[s.Column].Type, row.values[s.Column])
	}
	if upsert {
		c.Op, c.RowVersion, c.Row = ssp2.OpUpsert, &row.version, m.encode(t, row.values)
	}
	entry.Changes = append(entry.Changes, c)
}

func (m *model) pull(header *ssp2.PullHeader, sub ssp2.Subscription) []ssp2.Frame {
	table, _ := m.schema.Table(sub.Table)
	start := &ssp2.SubStart{ID: sub.ID, Status: ssp2.SubActive, EffectiveScopes: sub.Scopes}
	frames := []ssp2.Frame{start}
	if sub.Cursor >= 0 && sub.BootstrapState == nil {
		for _, entry := range m.log[sub.Cursor:] {
			part := &ssp2.Commit{CommitSeq: entry.CommitSeq, CreatedAtMs: entry.CreatedAtMs, ActorID: entry.ActorID, Tables: []string{table.Name}}
			for _, c := range entry.Changes {
				if entry.Tables[c.TableIndex] == table.Name && matches(sub.Scopes, func(v string) string { return c.Scopes[v] }) {
					c.TableIndex = 0
					part.Changes = append(part.Changes, c)
				}
			}
			if len(part.Changes) > 0 {
				frames = append(frames, part)
			}
		}
		return append(frames, &ssp2.SubEnd{NextCursor: int64(len(m.log))})
	}
	start.Bootstrap = true
	after := ""
	if sub.BootstrapState != nil {
		if err := json.Unmarshal([]byte(*sub.BootstrapState), &after); err != nil {
			m.t.Errorf("resume token: %v", err)
		}
	}
	end := &ssp2.SubEnd{NextCursor: int64(len(m.log))}
	segment := &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{Table: table.Name, SchemaVersion: m.schema.Version, Columns: table.Wire}}
	limit := int(cmp.Or(header.LimitSnapshotRows, 1000))
	for _, id := range slices.Sorted(maps.Keys(m.rows[table.Name])) {
		row := m.rows[table.Name][id]
		if id <= after || !matches(sub.Scopes, func(v string) string {
			s, _ := table.Scope(v)
			text, _ := schema.ScopeText(table.Columns[s.Column].Type, row.values[s.Column])
			return text
		}) {
			continue
		}
		if len(segment.Blocks) == limit {
			state := string(ssp2.AppendJSONString(nil, after))
			end.BootstrapState = &state
			break
		}
		segment.Blocks = append(segment.Blocks, []ssp2.SegmentRow{{ServerVersion: row.version, Row: m.encode(table, row.values)}})
		after = id
	}
	payload, err := ssp2.AppendSegment(nil, segment)
	if err != nil {
		m.t.Error(errors.Join(errors.New("encode a segment"), err))
	}
	return append(frames, &ssp2.SegmentInline{Payload: payload}, end)
}

func matches(scopes ssp2.ScopeMap, value func(variable string) string) bool {
	for variable, values := range scopes {
		if !slices.Contains(values, value(variable)) {
			return false
		}
	}
	return true
}
