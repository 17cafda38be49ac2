package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// errCut is the end of a response that was cut.
var errCut = fmt.Errorf("the response was cut: %w", io.ErrUnexpectedEOF)

// scissors is a transport that cuts the next response behind some bytes. Bodies are
// not compressed, so that the cut falls anywhere between and in frames.
type scissors struct {
	http.RoundTripper
	after int // negative: the response comes whole
}

func (s *scissors) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Accept-Encoding", "identity")
	res, err := s.RoundTripper.RoundTrip(r)
	if err == nil && s.after >= 0 {
		res.Body = &cutBody{ReadCloser: res.Body, left: s.after}
	}
	return res, err
}

type cutBody struct {
	io.ReadCloser
	left int
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errCut
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// historyDevice is a device with what it may see, and a transport of its own.
type historyDevice struct {
	*device
	cfg       deviceConfig
	scissors  *scissors
	requested map[string]ssp2.ScopeMap // by table
}

func newHistoryDevice(rt *rapid.T, s *schema.Schema, cfg deviceConfig, base http.RoundTripper) *historyDevice {
	roll := rolling(rt)
	d := &historyDevice{scissors: &scissors{RoundTripper: base, after: -1}, requested: map[string]ssp2.ScopeMap{}}
	cfg.transport = d.scissors
	cfg.wire = ssp2.WireVersion(1 + roll(3))
	cfg.limits = [3]int32{int32(1 + roll(6)), int32(1 + roll(4)), int32(1 + roll(3))}
	cfg.allowed = scope.Allowed{}
	for _, variable := range slices.Sorted(maps.Keys(worldScopes)) {
		values := worldScopes[variable]
		if roll(2) == 0 {
			cfg.allowed[variable] = []string{"*"}
		} else {
			cfg.allowed[variable] = some(roll, values)
		}
	}
	d.cfg = cfg
	for _, t := range s.Tables {
		scopes := ssp2.ScopeMap{}
		first := roll(len(t.Scopes)) // at least this one
		for i, sc := range t.Scopes {
			if i == first || roll(2) == 0 {
				scopes[sc.Variable] = some(roll, worldScopes[sc.Variable])
			}
		}
		d.requested[t.Name] = scopes
	}
	d.install(rt, s)
	return d
}

// rolling makes dice of a rapid test.
func rolling(rt *rapid.T) dice {
	return func(n int) int { return rapid.IntRange(0, n-1).Draw(rt, "roll") }
}

// some is a part of values, and never nothing.
func some(roll dice, values []string) []string {
	first := roll(len(values))
	part := []string{}
	for i, v := range values {
		if i == first || roll(2) == 0 {
			part = append(part, v)
		}
	}
	return part
}

// install makes the device forget its replica, not its outbox.
func (d *historyDevice) install(t require.TestingT, s *schema.Schema) {
	next, err := newDevice(s, d.cfg)
	require.NoError(t, err)
	if d.device != nil {
		next.sent = d.sent
	}
	d.device = next
	for _, table := range s.Tables {
		require.NoError(t, d.Subscribe(table.Name, table.Name, d.requested[table.Name]))
	}
}

// effective is what a subscription of the device sees (§3.2), nil for nothing.
func (d *historyDevice) effective(table string) ssp2.ScopeMap {
	effective := ssp2.ScopeMap{}
	for variable, values := range d.requested[table] {
		allowed := d.cfg.allowed[variable]
		kept := slices.DeleteFunc(slices.Clone(values), func(v string) bool {
			return !slices.Contains(allowed, v) && !slices.Contains(allowed, "*")
		})
		if len(kept) == 0 {
			return nil
		}
		effective[variable] = kept
	}
	return effective
}

// expect fails unless an error is one that the history may cause.
func expect(rt *rapid.T, err error) {
	if err == nil || errors.Is(err, errCut) || errors.As(err, new(*client.RevokedError)) {
		return
	}
	if errors.Is(err, client.ErrProtocol) && tolerable(err) {
		return // cut in the middle of a frame
	}
	rt.Fatal(err)
}

// history is one partition, and the devices that sync it.
type history struct {
	pool      *pgxpool.Pool
	schema    *schema.Schema
	partition string
	devices   []*historyDevice
	moves     int
}

// TestReplicasEqualTheServer: whatever clients of all wire versions push, deliver
// twice, pull in pieces and lose on the way, and wherever the host moves rows, in the
// end every client has the rows of the server that it may see, at their versions, and
// all that the database says of the partition agrees.
func TestReplicasEqualTheServer(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	// Two processes serve the same database.
	var urls []string
	for range 2 {
		n, err := startNode(db.DSN, 2, worldConfig(s))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, n.stop()) })
		urls = append(urls, "http://"+n.addr)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)

	var histories atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		h := &history{pool: db.Pool, schema: s, partition: fmt.Sprint("history ", histories.Add(1))}
		for i := range 3 {
			d := newHistoryDevice(rt, s, deviceConfig{
				url: urls[i%2], partition: h.partition, actor: fmt.Sprint("actor ", i), id: fmt.Sprint("device ", i),
			}, transport)
			require.NoError(rt, d.Acquire(t.Context()))
			h.devices = append(h.devices, d)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"push": func(rt *rapid.T) {
				roll := rolling(rt)
				d := one(roll, h.devices)
				c, err := d.newCommit(roll)
				require.NoError(rt, err)
				expect(rt, d.cut(rt, func() error { return d.deliver(t.Context(), c) }))
			},
			"redeliver": func(rt *rapid.T) {
				d := rapid.SampledFrom(h.devices).Draw(rt, "device")
				if len(d.sent) == 0 {
					return
				}
				again := rapid.SliceOfN(rapid.SampledFrom(d.sent), 1, 4).Draw(rt, "commits")
				expect(rt, d.cut(rt, func() error { return d.deliver(t.Context(), again...) }))
			},
			"pull": func(rt *rapid.T) {
				d := rapid.SampledFrom(h.devices).Draw(rt, "device")
				expect(rt, d.cut(rt, func() error { _, err := d.Pull(t.Context()); return err }))
			},
			"move": func(rt *rapid.T) { require.NoError(rt, h.move(t.Context(), rolling(rt))) },
			"reinstall": func(rt *rapid.T) {
				if rapid.IntRange(0, 4).Draw(rt, "reinstall") == 0 {
					d := rapid.SampledFrom(h.devices).Draw(rt, "device")
					d.install(rt, s)
					require.NoError(rt, d.Acquire(t.Context()))
				}
			},
		})
		h.check(t.Context(), rt)
	})
}

// cut does something that may lose its response.
func (d *historyDevice) cut(rt *rapid.T, do func() error) error {
	if rapid.IntRange(0, 2).Draw(rt, "cut") == 0 {
		d.scissors.after = rapid.IntRange(0, 1500).Draw(rt, "after")
		defer func() { d.scissors.after = -1 }()
	}
	return do()
}

// check brings everything to an end and compares.
func (h *history) check(ctx context.Context, rt *rapid.T) {
	for _, d := range h.devices {
		if open := d.unanswered(); len(open) > 0 {
			require.NoError(rt, d.deliver(ctx, open...))
		}
	}
	a, err := auditPartition(ctx, h.pool, h.schema, h.partition)
	require.NoError(rt, err)
	for _, d := range h.devices {
		for revoked := 0; ; revoked++ {
			_, err := d.CatchUp(ctx)
			if err == nil {
				break
			}
			require.ErrorAs(rt, err, new(*client.RevokedError))
			require.Less(rt, revoked, len(h.schema.Tables))
		}
		require.NoError(rt, a.device(d.device))
		for _, t := range h.schema.Tables {
			effective := d.effective(t.Name)
			if effective == nil {
				require.Empty(rt, d.Rows(t.Name), "rows of a revoked subscription")
				continue
			}
			require.NoError(rt, a.replica(d.device, t.Name, effective))
		}
	}
}

// move moves a row to another scope the way a host does in SQL (§2.2): in one commit,
// a delete under the old scopes and an upsert under the new ones.
func (h *history) move(ctx context.Context, roll dice) error {
	table := h.schema.Tables[roll(len(h.schema.Tables))]
	values := randomValues(roll, table)
	id, _ := table.RowID(values)
	err := pgx.BeginFunc(ctx, h.pool, func(tx pgx.Tx) error { return h.moveTx(ctx, tx, table, id, values) })
	if errors.Is(err, pgx.ErrNoRows) || uniqueViolation(err) {
		return nil // there is no such row, or there is no room for it
	}
	return err
}

// scopeTypes are the database types of scope columns.
var scopeTypes = map[ssp2.ColumnType]string{
	ssp2.TypeString: "text", ssp2.TypeInteger: "bigint", ssp2.TypeFloat: "double precision", ssp2.TypeBoolean: "boolean", ssp2.TypeJSON: "text",
}

func (h *history) moveTx(ctx context.Context, tx pgx.Tx, table *schema.Table, id string, to []ssp2.Value) error {
	var seq, version int64
	var payload []byte
	if err := tx.QueryRow(ctx, `select max_commit_seq + 1 from syncpg.sync_partitions where partition = $1 for update`,
		h.partition).Scan(&seq); err != nil {
		return err
	}
	name := "public." + schemaddl.QuoteIdent(table.Name)
	if err := tx.QueryRow(ctx, `select _sync_server_version + 1, _sync_payload from `+name+` where _sync_partition = $1 and _sync_row_id = $2`,
		h.partition, id).Scan(&version, &payload); err != nil {
		return err
	}
	values, err := ssp2.DecodeRow(table.Wire, payload, nil)
	if err != nil {
		return err
	}
	from, _ := table.RowScopes(values, nil)
	for _, sc := range table.Scopes {
		values[sc.Column] = to[sc.Column]
		text, _ := schema.ScopeText(table.Columns[sc.Column].Type, values[sc.Column])
		if _, err := tx.Exec(ctx, `update `+name+` set `+schemaddl.QuoteIdent(table.Columns[sc.Column].Name)+` = ($3::text)::`+
			scopeTypes[table.Columns[sc.Column].Type]+
			` where _sync_partition = $1 and _sync_row_id = $2`, h.partition, id, text); err != nil {
			return err
		}
	}
	if payload, err = ssp2.AppendRow(nil, table.Wire, values); err != nil {
		return err
	}
	encoded := "$4::bytea"
	if table.Materialize {
		encoded = "syncpg." + schemaddl.QuoteIdent("sync_encode_"+table.Name) + "(x)"
	}
	if err := tx.QueryRow(ctx, `update `+name+` as x set _sync_server_version = $3, _sync_payload = `+encoded+`, _sync_column_versions = null
		where _sync_partition = $1 and _sync_row_id = $2 and $4::bytea is not null returning _sync_payload`,
		h.partition, id, version, payload).Scan(&payload); err != nil {
		return err
	}
	scopes, _ := table.RowScopes(values, nil)
	h.moves++
	for _, statement := range []struct {
		sql  string
		args []any
	}{
		{`update syncpg.sync_partitions set max_commit_seq = $2 where partition = $1`, []any{h.partition, seq}},
		{`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count)
		  values ($1, $2, $3, $4, $3, 0, 1, 2)`, []any{h.partition, seq, hostClient, fmt.Sprint("move ", h.moves)}},
		{
			`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		  values ($1, $2, 0, $3, $4, 2, null, $5, null), ($1, $2, 1, $3, $4, 1, $6, $7, $8)`,
			[]any{h.partition, seq, table.Name, id, from, version, scopes, payload},
		},
		{`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
		  select distinct $1, $3, k, $2::bigint from unnest($4::text[] || $5::text[]) as k`, []any{h.partition, seq, table.Name, from, scopes}},
	} {
		if _, err := tx.Exec(ctx, statement.sql, statement.args...); err != nil {
			return err
		}
	}
	return nil
}

func uniqueViolation(err error) bool {
	pg, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	return ok && pg.SQLState() == "23505"
}
