package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// worldIR has a table of every kind: one with a unique index, two with scope
// variables and keys of other types than text, one without typed columns.
const worldIR = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [
    {
      "name": "items", "primaryKey": "id",
      "columns": [
        {"name": "id", "type": "string", "nullable": false},
        {"name": "team", "type": "string", "nullable": false},
        {"name": "title", "type": "string", "nullable": false},
        {"name": "slug", "type": "string", "nullable": true},
        {"name": "rank", "type": "float", "nullable": false},
        {"name": "done", "type": "boolean", "nullable": false},
        {"name": "due", "type": "integer", "nullable": true},
        {"name": "labels", "type": "json", "nullable": true},
        {"name": "sketch", "type": "bytes", "nullable": true}
      ],
      "scopes": [{"pattern": "team:{team}", "column": "team"}],
      "indexes": [{"name": "items_by_slug", "columns": ["team", "slug"], "unique": true}]
    },
    {
      "name": "cells", "primaryKey": "id",
      "columns": [
        {"name": "id", "type": "integer", "nullable": false},
        {"name": "board", "type": "integer", "nullable": false},
        {"name": "open", "type": "boolean", "nullable": false},
        {"name": "note", "type": "string", "nullable": true}
      ],
      "scopes": [{"pattern": "board:{board}", "column": "board"}, {"pattern": "open:{open}", "column": "open"}]
    },
    {
      "name": "vault", "primaryKey": "id", "materialize": false,
      "columns": [
        {"name": "id", "type": "string", "nullable": false},
        {"name": "owner", "type": "string", "nullable": false},
        {"name": "body", "type": "bytes", "nullable": true}
      ],
      "scopes": [{"pattern": "owner:{owner}", "column": "owner"}]
    },
    {
      "name": "gauges", "primaryKey": "id",
      "columns": [
        {"name": "id", "type": "float", "nullable": false},
        {"name": "level", "type": "float", "nullable": false},
        {"name": "kind", "type": "json", "nullable": false},
        {"name": "value", "type": "float", "nullable": true}
      ],
      "scopes": [{"pattern": "level:{level}", "column": "level"}, {"pattern": "kind:{kind}", "column": "kind"}]
    }
  ]
}`

// worldScopes are the values that the scope variables take.
var worldScopes = scope.Allowed{
	"team": {"red", "blue", "grün"}, "board": {"1", "2", "-3"}, "open": {"true", "false"}, "owner": {"ada", `b"o\b`, "eve=x"},
	"level": {"0", "-1.5e-7", "1e+21", "NaN", "Infinity"}, "kind": {`"a"`, ` {"b": [1]} `, "0"},
}

func worldSchema(t testing.TB) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(worldIR))
	require.NoError(t, err)
	return s
}

// installWorld installs the schema in a migrated database.
func installWorld(s *schema.Schema) func(context.Context, *pgx.Conn) error {
	return func(ctx context.Context, conn *pgx.Conn) error {
		return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
	}
}

// Headers by which the servers of these tests tell who asks: nobody is refused. The
// first two are escaped like a query.
const (
	headerActor     = "X-Actor"
	headerPartition = "X-Partition"
	headerAllowed   = "X-Allowed" // JSON; without it everything is allowed
)

type allowedKey struct{}

// worldConfig is the configuration of such a server.
func worldConfig(s *schema.Schema) syncpg.Config {
	return syncpg.Config{
		Schema: s,
		Authenticate: func(r *http.Request) (syncpg.Identity, error) {
			actor, err := url.QueryUnescape(r.Header.Get(headerActor))
			if err != nil {
				return syncpg.Identity{}, err
			}
			partition, err := url.QueryUnescape(r.Header.Get(headerPartition))
			return syncpg.Identity{Actor: actor, Partition: partition}, err
		},
		ResolveScopes: func(ctx context.Context, _ syncpg.ScopeRequest) (scope.Allowed, error) {
			allowed := scope.Allowed{}
			for variable := range worldScopes {
				allowed[variable] = []string{"*"}
			}
			if text, ok := ctx.Value(allowedKey{}).(string); ok && text != "" {
				clear(allowed)
				return allowed, json.Unmarshal([]byte(text), &allowed)
			}
			return allowed, nil
		},
	}
}

// withAllowed carries the header of the allowed scopes to the resolver.
func withAllowed(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), allowedKey{}, r.Header.Get(headerAllowed))))
	})
}

// node is one process that serves: a pool, a server and a port of its own.
type node struct {
	pool   *pgxpool.Pool
	server *syncpg.Server
	addr   string

	http   *http.Server
	cancel context.CancelFunc
	served chan error
}

func startNode(dsn string, conns int32, cfg syncpg.Config) (*node, error) {
	poolConfig, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	poolConfig.MaxConns = conns
	// Requests outlive the test's context; the node ends when it is stopped.
	ctx, cancel := context.WithCancel(context.Background())
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		cancel()
		return nil, err
	}
	n := &node{pool: pool, cancel: cancel, served: make(chan error, 1)}
	if n.server, err = syncpg.New(pool, cfg); err != nil {
		cancel()
		pool.Close()
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		cancel()
		pool.Close()
		return nil, err
	}
	n.addr = l.Addr().String()
	n.http = &http.Server{
		Handler:           withAllowed(n.server.Handler()),
		ReadHeaderTimeout: patience,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	go func() { n.served <- n.http.Serve(l) }()
	return n, nil
}

// stop ends the node in the middle of whatever it does, and reports connections
// that do not come back to the pool.
func (n *node) stop() error {
	n.cancel()
	err := n.http.Close()
	if served := <-n.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	n.server.Push().Wait()
	return errors.Join(err, n.atRest(), closePool(n.pool))
}

// atRest waits until no connection of the pool is in use.
func (n *node) atRest() error {
	return await(func() error {
		if used := n.pool.Stat().AcquiredConns(); used > 0 {
			return fmt.Errorf("%d connections of the pool are still in use", used)
		}
		return nil
	})
}

// closePool closes a pool, and does not wait for ever.
func closePool(pool *pgxpool.Pool) error {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
		return nil
	case <-time.After(patience):
		return errors.New("the pool does not close")
	}
}

// await asks until the answer is nil, and returns the last answer when that takes
// too long.
func await(ask func() error) error {
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := ask()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-time.After(pause)
	}
}

// dice chooses one of n.
type dice func(n int) int

func one[T any](roll dice, of []T) T { return of[roll(len(of))] }

// sentCommit is a commit a device has sent, and its first answer.
type sentCommit struct {
	commit ssp2.PushCommit
	answer *ssp2.PushResult
}

// device is a client with an outbox that never forgets.
type device struct {
	*client.Client
	schema    *schema.Schema
	wire      ssp2.WireVersion
	partition string
	id        string
	sent      []*sentCommit
	made      int // commits, of which some may be forgotten
	resets    int // log resets it has gone through
}

// deviceConfig says which device it is.
type deviceConfig struct {
	url, partition, actor, id string
	allowed                   scope.Allowed // nil: everything
	wire                      ssp2.WireVersion
	transport                 http.RoundTripper
	limits                    [3]int32 // changes, snapshot rows, snapshot pages
	accept                    ssp2.Accept
	clock                     func() time.Time
}

func newDevice(s *schema.Schema, cfg deviceConfig) (*device, error) {
	header := http.Header{headerActor: {url.QueryEscape(cfg.actor)}, headerPartition: {url.QueryEscape(cfg.partition)}}
	if cfg.allowed != nil {
		text, err := json.Marshal(cfg.allowed)
		if err != nil {
			return nil, err
		}
		header.Set(headerAllowed, string(text))
	}
	c, err := client.New(client.Config{
		URL: cfg.url, Header: header, ClientID: cfg.id, Schema: s, Wire: cfg.wire,
		HTTP:         &http.Client{Transport: cfg.transport},
		LimitCommits: cfg.limits[0], LimitSnapshotRows: cfg.limits[1], MaxSnapshotPages: cfg.limits[2],
		Accept: cfg.accept, OpenImage: openImage, Clock: cfg.clock,
	})
	if err != nil {
		return nil, err
	}
	return &device{Client: c, schema: s, wire: cfg.wire, partition: cfg.partition, id: cfg.id}, nil
}

// openImage opens an image in a SQLite that is not ours.
func openImage(image []byte, table string) (_ *client.Image, err error) {
	conn, err := sqlite.OpenConn(":memory:", sqlite.OpenReadWrite)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.Deserialize("main", image); err != nil {
		return nil, err
	}
	into := &client.Image{}
	rows := func(sql string, take func(columns []string, cells []any), args ...any) {
		if err == nil {
			err = sqlitex.ExecuteTransient(conn, sql, &sqlitex.ExecOptions{Args: args, ResultFunc: func(s *sqlite.Stmt) error {
				var columns []string
				var cells []any
				for i := range s.ColumnCount() {
					columns, cells = append(columns, s.ColumnName(i)), append(cells, cellOf(s, i))
				}
				take(columns, cells)
				return nil
			}})
		}
	}
	rows(`pragma integrity_check`, func(_ []string, cells []any) {
		if cells[0] != "ok" {
			err = fmt.Errorf("the image is not sound: %v", cells[0])
		}
	})
	rows(`select name from sqlite_schema where type = 'table'`, func(_ []string, cells []any) { into.Tables = append(into.Tables, fmt.Sprint(cells[0])) })
	rows(`select * from _syncular_segment`, func(columns []string, cells []any) {
		row := map[string]any{}
		for i, name := range columns {
			row[name] = cells[i]
		}
		into.Segment = append(into.Segment, row)
	})
	rows(`select name from pragma_table_info(?) order by cid`, func(_ []string, cells []any) {
		into.Columns = append(into.Columns, fmt.Sprint(cells[0]))
	}, table)
	rows(`select * from `+schemaddl.QuoteIdent(table), func(_ []string, cells []any) { into.Rows = append(into.Rows, cells) })
	return into, err
}

func cellOf(s *sqlite.Stmt, i int) any {
	switch s.ColumnType(i) {
	case sqlite.TypeInteger:
		return s.ColumnInt64(i)
	case sqlite.TypeFloat:
		return s.ColumnFloat(i)
	case sqlite.TypeText:
		return s.ColumnText(i)
	case sqlite.TypeBlob:
		b := make([]byte, s.ColumnLen(i))
		s.ColumnBytes(i, b)
		return b
	case sqlite.TypeNull:
	}
	return nil
}

// Ids and texts that these tests write.
var (
	itemIDs = []string{"i0", "i1", "i2", "i3", "i4", "ϊ\u0301", "🙂", " "}
	titles  = []string{"", "x", "Grüße", "日本語", "a\tb\nc", `"quoted" \ and 'so'`, "\u202eRTL", "e\u0301", "\uffff"}
	labels  = []string{`null`, `[]`, `{"a": 1, "bb": [true, null]}`, `"text"`, `-0.5`, `[{"k": "ü"}, 12345678901234567890]`}
	numbers = []float64{0, math.Copysign(0, -1), 1.5, -1e-7, 1e300, math.MaxFloat64, math.Inf(1)}
	levels  = []float64{0, math.Copysign(0, -1), -1.5e-7, 1e21, math.NaN(), math.Inf(1)}
)

// newCommit makes a commit of one to three operations and puts it into the outbox.
func (d *device) newCommit(roll dice) (*sentCommit, error) {
	c := &sentCommit{commit: ssp2.PushCommit{ClientCommitID: fmt.Sprint("c", d.made)}}
	d.made++
	for range 1 + roll(3) {
		op, err := d.operation(roll)
		if err != nil {
			return nil, err
		}
		c.commit.Operations = append(c.commit.Operations, op)
	}
	d.sent = append(d.sent, c)
	return c, nil
}

func (d *device) operation(roll dice) (ssp2.Operation, error) {
	table := d.schema.Tables[roll(len(d.schema.Tables))]
	values := randomValues(roll, table)
	id, _ := table.RowID(values)
	op := ssp2.Operation{Table: table.Name, RowID: id, Op: ssp2.OpUpsert}
	if roll(6) == 0 {
		op.Op = ssp2.OpDelete
		return op, nil
	}
	have, known := d.Rows(table.Name)[id]
	base := have.Version
	switch roll(12) {
	case 0:
		base = 0
		op.BaseVersion = &base
	case 1: // stale, or from nowhere
		base = max(0, base+int64(roll(3))-1)
		op.BaseVersion = &base
	case 2, 3, 4, 5:
		op.BaseVersion = &base
	}
	if known && roll(8) > 0 {
		for _, sc := range table.Scopes { // a push cannot move a row
			values[sc.Column] = have.Values[sc.Column]
		}
	}
	var err error
	if d.wire < ssp2.WireV3 {
		op.Payload, err = ssp2.AppendRow(nil, table.Wire, values)
		return op, err
	}
	present := ssp2.NewBitmap(len(values))
	for i := range values {
		if i == table.PrimaryKey || !known || roll(3) > 0 {
			present.Set(i)
		}
	}
	op.Payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values)
	return op, err
}

// randomValues are the values of a row, in any version of the schema.
func randomValues(roll dice, table *schema.Table) []ssp2.Value {
	text := func(of []string) ssp2.Value { return ssp2.Value{Bytes: []byte(one(roll, of))} }
	maybe := func(v ssp2.Value) ssp2.Value {
		if roll(4) == 0 {
			return ssp2.Value{Null: true}
		}
		return v
	}
	cells := map[string]func() ssp2.Value{}
	boolean := func() ssp2.Value { return ssp2.Value{Int: int64(roll(2))} }
	number := func() ssp2.Value { return ssp2.Value{Float: one(roll, numbers)} }
	level := func() ssp2.Value { return ssp2.Value{Float: one(roll, levels)} }
	switch table.Name {
	case "items":
		cells["id"] = func() ssp2.Value { return text(itemIDs) }
		cells["team"] = func() ssp2.Value { return text(worldScopes["team"]) }
		cells["title"] = func() ssp2.Value { return text(titles) }
		cells["slug"] = func() ssp2.Value { return maybe(ssp2.Value{Bytes: fmt.Append(nil, "slug", roll(40))}) }
		cells["rank"], cells["done"] = number, boolean
		cells["due"] = func() ssp2.Value { return maybe(ssp2.Value{Int: int64(roll(3)-1) * ssp2.MaxSafeInteger}) }
		cells["labels"] = func() ssp2.Value { return maybe(text(labels)) }
		cells["sketch"] = func() ssp2.Value { return maybe(ssp2.Value{Bytes: make([]byte, roll(9))}) }
		cells["color"] = func() ssp2.Value { return maybe(text(titles)) } // of a later version
	case "cells":
		cells["id"] = func() ssp2.Value { return ssp2.Value{Int: int64(roll(8)) - 3} }
		cells["board"] = func() ssp2.Value { return ssp2.Value{Int: one(roll, []int64{1, 2, -3})} }
		cells["open"] = boolean
		cells["note"] = func() ssp2.Value { return maybe(text(titles)) }
		cells["weight"] = func() ssp2.Value { return maybe(number()) } // of a later version
	case "gauges":
		cells["id"], cells["level"] = level, level
		cells["kind"] = func() ssp2.Value { return text(worldScopes["kind"]) }
		cells["value"] = func() ssp2.Value { return maybe(number()) }
	default:
		cells["id"] = func() ssp2.Value { return text(itemIDs) }
		cells["owner"] = func() ssp2.Value { return text(worldScopes["owner"]) }
		cells["body"] = func() ssp2.Value { return maybe(ssp2.Value{Bytes: []byte(one(roll, titles))}) }
	}
	values := make([]ssp2.Value, len(table.Columns))
	for i, c := range table.Columns {
		values[i] = cells[c.Name]()
	}
	return values
}

// deliver pushes commits of the outbox, new ones or not, and remembers the answers.
// An answer that differs from an earlier one is an error that is not tolerable.
func (d *device) deliver(ctx context.Context, commits ...*sentCommit) error {
	frames := make([]ssp2.PushCommit, len(commits))
	for i, c := range commits {
		frames[i] = c.commit
	}
	results, err := d.Push(ctx, frames...)
	if errors.Is(err, client.ErrReset) {
		d.resets++
	}
	if err != nil {
		return err
	}
	for i, c := range commits {
		if err := c.answered(results[i].PushResult); err != nil {
			return fmt.Errorf("device %s: %w", d.id, err)
		}
	}
	return nil
}

// answered takes an answer. A replay says cached where the first answer said
// applied, and is the same otherwise (§2.3).
func (c *sentCommit) answered(got ssp2.PushResult) error {
	if got.Status == ssp2.PushRejected && got.Results[0].Retryable {
		return fmt.Errorf("commit %s has no outcome: %v", c.commit.ClientCommitID, got.Results[0])
	}
	if c.answer == nil {
		c.answer = &got
		return nil
	}
	want := *c.answer
	if want.Status == ssp2.PushApplied {
		want.Status = ssp2.PushCached
	}
	if d := cmp.Diff(want, got); d != "" {
		return fmt.Errorf("commit %s is answered differently: %s", c.commit.ClientCommitID, d)
	}
	return nil
}

// unanswered are the commits without an answer.
func (d *device) unanswered() []*sentCommit {
	return slices.DeleteFunc(slices.Clone(d.sent), func(c *sentCommit) bool { return c.answer != nil })
}

// subscribeAll subscribes to every table, with every value of its scopes.
func (d *device) subscribeAll() error {
	for _, t := range d.schema.Tables {
		scopes := ssp2.ScopeMap{}
		for _, sc := range t.Scopes {
			scopes[sc.Variable] = worldScopes[sc.Variable]
		}
		if err := d.Subscribe(t.Name, t.Name, scopes); err != nil {
			return err
		}
	}
	return nil
}

// tolerable says that an error is what becomes of a request when something breaks:
// the connection does, or the server says that its database does, or that the
// partition has been busy for too long, as while a database starts.
func tolerable(err error) bool {
	if e, ok := errors.AsType[*client.ServerError](err); ok {
		return e.Code == ssp2.CodeStorageUnavailable || e.Code == ssp2.CodeRateLimited
	}
	if errors.Is(err, client.ErrProtocol) {
		return strings.Contains(err.Error(), "is truncated")
	}
	if _, ok := errors.AsType[*url.Error](err); ok {
		return true
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
