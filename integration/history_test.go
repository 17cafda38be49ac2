package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// ownHistories is how many histories are run when the flag rapid.checks does not say.
const ownHistories = 30

// historyDevice is a device with what it may see, and a network of its own.
type historyDevice struct {
	*device
	cfg       deviceConfig
	network   *network
	requested map[string]ssp2.ScopeMap // by table
}

// accepts are the sets of accept bits that devices have: each takes rows somehow (§4.2).
var accepts = []ssp2.Accept{
	ssp2.AcceptInlineRows, ssp2.AcceptExternalRows, rowsSegments, imageSegments, imageSegments,
	ssp2.AcceptExternalRows | ssp2.AcceptSQLite, ssp2.AcceptExternalRows | ssp2.AcceptSignedURLs,
	rowsSegments | ssp2.AcceptSignedURLs, imageSegments | ssp2.AcceptSignedURLs, imageSegments | ssp2.AcceptSignedURLs,
}

func newHistoryDevice(rt *rapid.T, h *history, cfg deviceConfig) *historyDevice {
	roll := rolling(rt)
	d := &historyDevice{network: &network{places: h.places, t: rt, after: -1}, requested: map[string]ssp2.ScopeMap{}}
	cfg.transport, cfg.clock = d.network, h.places.clock
	cfg.wire = ssp2.WireVersion(1 + roll(3))
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
	for _, t := range h.schema.Tables {
		scopes := ssp2.ScopeMap{}
		first := roll(len(t.Scopes)) // at least this one
		for i, sc := range t.Scopes {
			if i == first || roll(2) == 0 {
				scopes[sc.Variable] = some(roll, worldScopes[sc.Variable])
			}
		}
		d.requested[t.Name] = scopes
	}
	d.install(rt, one(roll, []*schema.Schema{h.schema, h.schema, h.older}))
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

// install makes the device forget its replica, not its outbox. It comes back with other
// limits and another way to take segments.
func (d *historyDevice) install(rt *rapid.T, s *schema.Schema) {
	roll := rolling(rt)
	d.cfg.limits = [3]int32{int32(1 + roll(6)), int32(1 + roll(4)), int32(1 + roll(3))}
	d.cfg.accept = one(roll, accepts)
	next, err := newDevice(s, d.cfg)
	require.NoError(rt, err)
	if d.device != nil {
		next.sent, next.made = d.sent, d.made
	}
	d.device = next
	for _, table := range s.Tables {
		require.NoError(rt, d.Subscribe(table.Name, table.Name, d.requested[table.Name]))
	}
	require.NoError(rt, d.Acquire(context.Background()))
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

// history is one partition, and the devices that sync it.
type history struct {
	pool      *pgxpool.Pool
	schema    *schema.Schema
	older     *schema.Schema
	partition string
	places    *places
	ledger    *audit
	backup    *audit // what the ledger knew when the backup was made; nil: none was
	devices   []*historyDevice
	rotated   bool
	moves     int
	seen      seen
}

// seen counts what histories have gone through, so that a test of nothing shows.
type seen struct {
	client.Progress

	revoked, reset, refused, gone, cutDownloads, rotations, pruned, compacted, moves, restarts, restored, compared, older int
}

// worldOfTwoVersions is the world's schema as the older version, and a newest one with
// columns in between.
func worldOfTwoVersions(t *testing.T) (newest, older *schema.Schema) {
	t.Helper()
	ir := strings.NewReplacer(
		`"schemaVersion": 1`, `"schemaVersion": 2`,
		`{"name": "title",`, `{"name": "color", "type": "string", "nullable": true}, {"name": "title",`,
		`{"name": "note",`, `{"name": "weight", "type": "float", "nullable": true}, {"name": "note",`,
	).Replace(worldIR)
	newest, err := schema.Parse([]byte(ir))
	require.NoError(t, err)
	return newest, worldSchema(t)
}

// TestReplicasEqualTheServer: whatever clients of all wire versions and two schema versions
// push, deliver twice, pull in pieces, download and lose on the way, at any of several
// servers of one database; whatever the host moves, and prunes, compacts, expires, rotates
// and restores: in the end every client has the rows of the server that it may see, as its
// schema version has them, at their versions, and all that the database says of the
// partition agrees.
func TestReplicasEqualTheServer(t *testing.T) {
	t.Parallel()
	newest, older := worldOfTwoVersions(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(newest), TemplateKey: "two versions of the world"})
	p := newPlaces(t, db.DSN, newest, older)
	own := true
	flag.Visit(func(f *flag.Flag) { own = own && f.Name != "rapid.checks" })

	(&history{pool: db.Pool, schema: newest}).makeKeepsakes(t)
	histories, done := 0, 0
	var total seen
	rapid.Check(t, func(rt *rapid.T) {
		if own && done == ownHistories {
			return
		}
		histories++
		h := &history{
			pool: db.Pool, schema: newest, older: older, partition: fmt.Sprint("history ", histories),
			places: p, seen: total,
		}
		h.ledger = newAudit(newest, h.partition)
		for i := range 3 {
			d := newHistoryDevice(rt, h, deviceConfig{
				url: anyPlace, partition: h.partition, actor: fmt.Sprint("actor ", i), id: fmt.Sprint("device ", i),
			})
			h.devices = append(h.devices, d)
		}
		pull := func(rt *rapid.T) {
			d := rapid.SampledFrom(h.devices).Draw(rt, "device")
			h.with(rt, d, func() error {
				p, err := d.Pull(t.Context())
				h.seen.add(p)
				return err
			})
		}
		rt.Repeat(map[string]func(*rapid.T){
			"pull": pull, "pull again": pull, "pull once more": pull,
			"push": func(rt *rapid.T) {
				roll := rolling(rt)
				d := one(roll, h.devices)
				c, err := d.newCommit(roll)
				require.NoError(rt, err)
				h.with(rt, d, func() error { return d.deliver(t.Context(), c) })
			},
			"push much": func(rt *rapid.T) {
				roll := rolling(rt)
				d := one(roll, h.devices)
				for range 4 {
					_, err := d.newCommit(roll)
					require.NoError(rt, err)
				}
				h.with(rt, d, func() error { return d.deliver(t.Context(), d.sent[len(d.sent)-4:]...) })
			},
			"redeliver": func(rt *rapid.T) {
				d := rapid.SampledFrom(h.devices).Draw(rt, "device")
				if len(d.sent) == 0 {
					return
				}
				again := rapid.SliceOfN(rapid.SampledFrom(d.sent), 1, 4).Draw(rt, "commits")
				h.with(rt, d, func() error { return d.deliver(t.Context(), again...) })
			},
			"move": func(rt *rapid.T) {
				if roll := rolling(rt); roll(2) == 0 {
					require.NoError(rt, h.move(t.Context(), roll))
				} else {
					require.NoError(rt, h.applyMove(t.Context(), roll))
				}
			},
			"keep": func(rt *rapid.T) { h.keep(t.Context(), rt) },
			"time": func(rt *rapid.T) {
				p.pass(rapid.SampledFrom([]time.Duration{time.Second, 6 * time.Minute, 14 * time.Minute, 25 * time.Hour, 20 * 24 * time.Hour}).Draw(rt, "time"))
			},
			"restart": func(rt *rapid.T) {
				p.restart(rapid.IntRange(0, len(p.all)-1).Draw(rt, "place"))
				h.seen.restarts++
			},
			"rotate": func(rt *rapid.T) {
				if rapid.IntRange(0, 4).Draw(rt, "rotate") == 0 {
					h.rotate(t.Context(), rt)
				}
			},
			"restore": func(rt *rapid.T) {
				switch n := rapid.IntRange(0, 2).Draw(rt, "restore"); {
				case n == 0 && h.ledger.maxSeq > 0:
					h.save(t.Context(), rt)
				case n == 1 && h.backup != nil:
					h.restore(t.Context(), rt)
				}
			},
			"reinstall": func(rt *rapid.T) {
				if rapid.IntRange(0, 3).Draw(rt, "reinstall") == 0 {
					d := rapid.SampledFrom(h.devices).Draw(rt, "device")
					d.install(rt, d.schema)
				}
			},
			"rest": func(rt *rapid.T) {
				if rapid.IntRange(0, 3).Draw(rt, "rest") == 0 {
					h.read(t.Context(), rt)
					h.compare(t.Context(), rt, rapid.SampledFrom(h.devices).Draw(rt, "device"))
				}
			},
		})
		h.end(t.Context(), rt)
		total = h.seen
		done++
	})
	t.Logf("%+v", total)
	if done >= ownHistories && !t.Failed() {
		for what, n := range map[string]int{
			"image": total.Images, "download": total.Downloads, "fetch": total.Fetches, "commit": total.Commits,
			"reset": total.reset, "revocation": total.revoked, "rotation": total.rotations, "commit pruned": total.pruned,
			"move": total.moves, "restart": total.restarts, "older device": total.older,
			"rare thing": total.gone + total.cutDownloads + total.refused + total.compacted + total.restored,
		} {
			require.Positive(t, n, "no history had a %s", what)
		}
	}
}

// with does something at some place that may go wrong on the way.
func (h *history) with(rt *rapid.T, d *historyDevice, do func() error) {
	roll := rolling(rt)
	n := d.network
	n.to, n.cdn, n.after, n.skip, n.before = roll(len(h.places.all)), roll(len(h.places.all)), -1, 0, nil
	n.fired, n.rotated = false, false
	defer func() { n.after, n.before = -1, nil }()
	switch roll(9) {
	case 0, 1:
		n.after, n.path = rapid.IntRange(0, 1500).Draw(rt, "after"), "/sync"
	case 2, 3:
		n.after, n.path, n.skip = rapid.IntRange(0, 400).Draw(rt, "after"), "/segments/", roll(3)/2
	case 4, 5, 6:
		n.path, n.skip = "/segments/", roll(3)/2
		n.before = one(roll, []func(){
			func() { h.places.pass(16 * time.Minute) },
			func() { h.places.pass(25 * time.Hour) },
			func() { h.places.pass(25 * time.Hour); h.places.deleteExpired(rt) },
			func() { h.rotate(context.Background(), rt); n.rotated = true },
			func() { h.prune(context.Background(), rt, retention.Policy{KeepCommits: -1, ActiveWindow: -1}) },
			func() { h.places.restart(n.to) },
		})
	}
	h.expect(rt, d, do())
}

// expect fails unless an error is one that the history may cause.
func (h *history) expect(rt *rapid.T, d *historyDevice, err error) {
	server, _ := errors.AsType[*client.ServerError](err)
	revoked, _ := errors.AsType[*client.RevokedError](err)
	n := d.network
	switch {
	case err == nil:
	case errors.Is(err, errCut) && n.path == "/segments/":
		h.seen.cutDownloads++
	case errors.Is(err, errCut), errors.Is(err, client.ErrProtocol) && n.path == "/sync" && n.after >= 0 && tolerable(err): // in the middle of a frame
	case revoked != nil:
		require.Nil(rt, d.effective(revoked.Subscription))
		h.seen.revoked++
	case errors.Is(err, client.ErrReset):
		require.True(rt, h.rotated)
		h.seen.reset++
	case errors.Is(err, client.ErrURLEnded) && n.fired:
		h.seen.gone++
	case server == nil:
		rt.Fatal(err)
	case server.Code == ssp2.CodeClientWireUnsupported && d.wire == ssp2.WireV1 && h.rotated:
		h.seen.refused++
		d.cfg.wire = ssp2.WireV2
		d.install(rt, d.schema)
	case (server.Code == ssp2.CodeSegmentExpired || server.Code == ssp2.CodeNotFound || server.Code == ssp2.CodeForbidden && d.cfg.accept&ssp2.AcceptSignedURLs != 0) && n.fired:
		h.seen.gone++
	case server.Code == ssp2.CodeStorageStaleRead && n.rotated:
	default:
		rt.Fatal(err)
	}
}

// read takes the newest part of the log into the ledger, and checks it with the rest.
func (h *history) read(ctx context.Context, rt *rapid.T) {
	require.NoError(rt, h.ledger.read(ctx, h.pool))
}

// keep prunes, compacts or lets segments go.
func (h *history) keep(ctx context.Context, rt *rapid.T) {
	switch rapid.IntRange(0, 4).Draw(rt, "keep") {
	case 0:
		h.places.deleteExpired(rt)
	case 1: // as far as everybody is
		h.prune(ctx, rt, retention.Policy{KeepCommits: -1})
	case 2: // further than the protocol allows
		h.prune(ctx, rt, retention.Policy{KeepCommits: -1, ActiveWindow: -1})
	case 3:
		h.prune(ctx, rt, retention.Policy{KeepCommits: 5, ActiveWindow: -1, CompactAfter: time.Second})
	default:
		h.prune(ctx, rt, retention.Policy{CompactAfter: time.Second})
	}
}

func (h *history) prune(ctx context.Context, rt *rapid.T, policy retention.Policy) {
	h.read(ctx, rt)
	keeper, err := retention.New(h.pool, retention.Config{Policy: policy, Clock: h.places.clock, BatchRows: 7})
	require.NoError(rt, err)
	result, err := keeper.Prune(ctx, h.partition, nil)
	if ssp2.CodeOf(err) == ssp2.CodeStoragePartitionUnregistered {
		return // nobody has come yet
	}
	require.NoError(rt, err)
	h.seen.pruned += int(result.Commits)
	h.seen.compacted += int(result.Compacted)
}

// rotate gives the partition another log epoch, which no server is told of.
func (h *history) rotate(ctx context.Context, rt *rapid.T) {
	keeper, err := retention.New(h.pool, retention.Config{Clock: h.places.clock})
	require.NoError(rt, err)
	_, err = keeper.RotateEpoch(ctx, h.partition)
	if ssp2.CodeOf(err) == ssp2.CodeStoragePartitionUnregistered {
		return
	}
	require.NoError(rt, err)
	h.rotated = true
	h.seen.rotations++
}

// end brings everything to an end and compares.
func (h *history) end(ctx context.Context, rt *rapid.T) {
	for _, d := range h.devices {
		for open := d.unanswered(); len(open) > 0; open = d.unanswered() {
			h.expect(rt, d, d.deliver(ctx, open...))
		}
	}
	h.read(ctx, rt)
	for _, d := range h.devices {
		require.NoError(rt, h.ledger.device(d.device))
		h.compare(ctx, rt, d)
	}
}

// compare has a device catch up and compares its replica with the rows of the ledger.
func (h *history) compare(ctx context.Context, rt *rapid.T, d *historyDevice) {
	for errs := 0; ; errs++ {
		p, err := d.CatchUp(ctx)
		h.seen.add(p)
		if err == nil {
			break
		}
		h.expect(rt, d, err)
		require.Less(rt, errs, len(h.schema.Tables)+4)
	}
	for _, t := range h.schema.Tables {
		effective := d.effective(t.Name)
		if effective == nil {
			require.Empty(rt, d.Rows(t.Name), "rows of a revoked subscription")
			continue
		}
		require.NoError(rt, h.ledger.replica(d.device, t.Name, effective))
		cursor, complete := d.Cursor(t.Name)
		require.True(rt, complete)
		require.Equal(rt, h.ledger.maxSeq, cursor)
	}
	h.seen.compared++
	if d.schema == h.older {
		h.seen.older++
	}
}

func (s *seen) add(p client.Progress) {
	s.Rounds += p.Rounds
	s.Commits += p.Commits
	s.Changes += p.Changes
	s.Segments += p.Segments
	s.SegmentRows += p.SegmentRows
	s.Images += p.Images
	s.Downloads += p.Downloads
	s.Fetches += p.Fetches
}

// applyMove moves a row to another scope by a push of the host: a delete and an upsert.
func (h *history) applyMove(ctx context.Context, roll dice) error {
	table := h.schema.Tables[roll(len(h.schema.Tables))]
	values := randomValues(roll, table)
	id, _ := table.RowID(values)
	h.moves++
	_, err := h.places.all[0].server.Push().Apply(ctx, pushsvc.ApplyRequest{
		Partition: h.partition, Actor: hostClient, ClientID: "a host that pushes", ClientCommitID: fmt.Sprint("move ", h.moves),
		Operations: []pushsvc.Operation{pushsvc.Delete(table.Name, id), pushsvc.Upsert(table.Name, goValues(table, values))},
	})
	if errors.As(err, new(*pushsvc.RejectedError)) {
		return nil
	}
	h.seen.moves++
	return err
}

// goValues are the values of a row by column, as the host's code has them.
func goValues(table *schema.Table, values []ssp2.Value) map[string]any {
	into := map[string]any{}
	for i, c := range table.Columns {
		switch v := values[i]; {
		case v.Null:
			into[c.Name] = nil
		case c.Type == ssp2.TypeInteger:
			into[c.Name] = v.Int
		case c.Type == ssp2.TypeBoolean:
			into[c.Name] = v.Int != 0
		case c.Type == ssp2.TypeFloat:
			into[c.Name] = v.Float
		case c.Type == ssp2.TypeString:
			into[c.Name] = string(v.Bytes)
		case c.Type == ssp2.TypeJSON:
			into[c.Name] = json.RawMessage(v.Bytes)
		default:
			into[c.Name] = v.Bytes
		}
	}
	return into
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
		  values ($1, $2, $3, $4, $3, $5, 1, 2)`, []any{h.partition, seq, hostClient, fmt.Sprint("move ", h.moves), h.milliseconds()}},
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

// milliseconds is the time of the history.
func (h *history) milliseconds() int64 {
	if h.places == nil {
		return 0
	}
	return h.places.now.Load()
}

func uniqueViolation(err error) bool {
	pg, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	return ok && pg.SQLState() == "23505"
}
