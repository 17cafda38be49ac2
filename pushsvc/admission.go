package pushsvc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// errPartitionGone says that the partition was there on entry and is not any more.
var errPartitionGone = errors.New("the partition is not registered")

// errPanicked is all a caller learns of a panic; the log has the rest.
var errPanicked = errors.New("the push panicked")

// request is a Request on its way.
type request struct {
	Request
	ctx        context.Context //nolint:containedctx // of the caller, whom the transaction outlives
	operations int
	bytes      int           // of payload
	done       chan struct{} // closed when resp or err is final
	answered   bool
	// pushed turns payloads into rows of the newest schema version, whose layout is schema;
	// nil when it is the newest itself.
	pushed *schema.View
	schema *schema.Schema
	// versions are those of the service.
	versions *schema.Versions
	past     *sync.Map
	// trusted says that host code made it (SEMANTICS §5): it knows no log epoch, and
	// columns that it leaves out of a new row are NULL.
	trusted bool

	// Of the present attempt.
	commits []*commit // distinct and storable, in request order
	byID    map[string]*commit
	actor   string // owner of the client, "" when it is new
	resp    *Response
	err     error
	noted   []events.Event // to tell when it is answered
}

func (s *Service) newRequest(ctx context.Context, req Request) *request {
	r := &request{Request: req, ctx: ctx, done: make(chan struct{}), schema: s.schema, versions: s.versions, past: &s.past}
	if v := req.SchemaVersion; v != 0 && v != s.schema.Version {
		r.schema, _ = s.versions.Schema(v) // validated before
		r.pushed = s.versions.View(v, s.schema.Version)
	}
	for i := range req.Commits {
		r.operations += len(req.Commits[i].Operations)
		for j := range req.Commits[i].Operations {
			r.bytes += len(req.Commits[i].Operations[j].Payload)
		}
	}
	return r
}

// begin prepares the request for another attempt.
func (r *request) begin() {
	r.commits, r.byID = nil, make(map[string]*commit, len(r.Commits))
	r.resp, r.err, r.noted = nil, nil, nil
	for i := range r.Commits {
		c := &r.Commits[i]
		if r.byID[c.ClientCommitID] != nil {
			continue // answered like a replay (§6.3)
		}
		entry := &commit{req: r, id: c.ClientCommitID, ops: c.Operations}
		r.byID[c.ClientCommitID] = entry
		if !gate.StorableID(c.ClientCommitID) {
			// Depends on nothing but the bytes, so it needs no record to be the
			// same on every replay.
			entry.outcome = rejection(opError(0, ssp2.CodeInvalidRequest,
				fmt.Sprintf("a commit id has 1 to %d bytes and no U+0000", gate.MaxIDBytes)))
			continue
		}
		r.commits = append(r.commits, entry)
	}
}

// refused says that the request has its answer already.
func (r *request) refused() bool { return r.resp != nil || r.err != nil }

// commit is one distinct commit of a request.
type commit struct {
	req *request
	id  string
	ops []ssp2.Operation
	// decoded has the payloads of upserts that may refer to other rows; nil when no
	// table does.
	decoded []*incoming

	outcome   *outcome
	reactions []reaction.Record // of an applied commit
	// known says that the outcome was stored before this transaction.
	known bool
}

// admitted is what admission read.
type admitted struct {
	locked bool
	// oversized says that outcomes and rows were too much to return.
	oversized bool
	// moving says that the schema is being moved to another version, and nothing was read
	// but known outcomes.
	moving  bool
	epoch   gate.Epoch
	version int32 // installed schema version
	pending string
	lastSeq int64 // newest seq
	// single marks the tables, by index, of which every operation needs a statement
	// of its own; nil when there are none.
	single []bool
}

// connection is what a transaction runs on: a connection of the pool, or a transaction of
// the host.
type connection interface {
	db.DBTX
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	Conn() *pgx.Conn
}

// transaction is one attempt to push requests of distinct clients of a partition.
type transaction struct {
	s         *Service
	conn      connection
	session   pgtx.Session
	partition string
	requests  []*request
	now       int64

	commits  []*commit // of all requests, in order
	admitted admitted
	state    *rowStates

	lastSeq   int64     // newest seq so far
	rejected  []*commit // not recorded yet
	saved     bool      // the savepoint is set
	dirty     bool      // what was done since the savepoint has to be taken back first
	children  children
	committed bool
	// joined says that the transaction is one of the host, to be left instead of
	// committed, and entered that its savepoint is set.
	joined, entered bool
}

func newTransaction(s *Service, conn connection, partition string, requests []*request) *transaction {
	t := &transaction{
		s: s, conn: conn, session: pgtx.On(conn.Conn()), partition: partition, requests: requests,
		now: s.clock().UnixMilli(), state: newRowStates(),
	}
	for _, r := range requests {
		r.begin()
		t.commits = append(t.commits, r.commits...)
	}
	return t
}

// admit begins the transaction and reads what the commits need: one round trip.
func (t *transaction) admit(ctx context.Context) (err error) {
	ctx, span := trace.Start(ctx, "syncpg.push.admit")
	defer span.End(&err)
	params := db.PushAdmitParams{
		Partition: t.partition, Now: t.now,
		ClientIds:     make([]string, len(t.requests)),
		CommitClients: make([]int32, 0, len(t.commits)), CommitIds: make([]string, 0, len(t.commits)),
		Tables: []string{}, RowIds: []string{}, MaxBytes: t.s.maxAdmittedBytes,
	}
	var keys []rowKey
	named := t.state.known
	written := make([]bool, len(t.s.schema.Tables))
	for i, r := range t.requests {
		params.ClientIds[i] = r.ClientID
		for _, c := range r.commits {
			params.CommitClients = append(params.CommitClients, int32(i+1))
			params.CommitIds = append(params.CommitIds, c.id)
			for j := range c.ops {
				op := &c.ops[j]
				table, ok := t.s.schema.Table(op.Table)
				if !ok || strings.IndexByte(op.RowID, 0) >= 0 {
					continue // cannot be stored, so there is nothing to read
				}
				written[table.Index] = true
				key := rowKey{table.Index, op.RowID}
				if !named[key] {
					named[key] = true
					keys = append(keys, key)
					params.Tables = append(params.Tables, op.Table)
					params.RowIds = append(params.RowIds, op.RowID)
				}
			}
		}
	}

	parents := t.askReferences(&params, written)
	if err := t.prepare(ctx, written); err != nil {
		return gate.Moved(err)
	}
	f := t.newFlush()
	if t.joined {
		t.queueJoin(f)
	} else {
		f.queue("beginning the push", pgtx.Begin)
	}
	var row db.PushAdmitRow
	f.queueAdmit(&params, func(rows pgx.Rows) (err error) {
		row, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[db.PushAdmitRow])
		return err //nolint:wrapcheck // run says what it was doing
	})
	t.queueAhead(f, nil)
	if _, err := t.run(ctx, f); err != nil {
		return err
	}
	for _, ord := range row.ParentOrds {
		t.state.parents[parents[ord-1]] = true
	}
	if err := t.readLayouts(ctx, row.OutcomeVersions); err != nil {
		return err
	}
	return t.read(&row, keys)
}

// readLayouts sees to it that rows in stored outcomes can be read, whose schema version may
// not be served any more: one round trip, the first time that one is met.
func (t *transaction) readLayouts(ctx context.Context, versions []int32) error {
	var missing []int32
	for _, v := range versions {
		if _, served := t.s.versions.Schema(v); served || slices.Contains(missing, v) {
			continue
		}
		if _, known := t.s.past.Load(v); !known {
			missing = append(missing, v)
		}
	}
	if missing == nil {
		return nil
	}
	layouts, err := db.New(t.conn).PushReadLayouts(ctx, db.PushReadLayoutsParams{SchemaVersions: missing})
	if err != nil {
		return fmt.Errorf("reading the layouts of stored outcomes: %w", err)
	}
	for _, v := range missing {
		t.s.past.Store(v, (*schema.Schema)(nil))
	}
	for _, text := range layouts {
		s, err := schema.ParseLayout([]byte(text))
		if err != nil {
			return internal("reading the layouts of stored outcomes", err)
		}
		t.s.past.Store(s.Version, s)
	}
	return nil
}

// prepare makes the statements of a push that writes these tables, by index, ready on
// the connection: a failed transaction, in which a push may have to go on, refuses to
// prepare any.
func (t *transaction) prepare(ctx context.Context, written []bool) error {
	if err := t.session.Prepare(ctx, statements...); err != nil {
		return err
	}
	if t.joined {
		if err := t.session.Prepare(ctx, joinStatements...); err != nil {
			return err
		}
	}
	if t.s.judgesCommits() {
		if err := t.session.Prepare(ctx, judgeStatements...); err != nil {
			return err
		}
	}
	if t.s.references != nil {
		if err := t.session.Prepare(ctx, findChildren); err != nil {
			return err
		}
	}
	for i, used := range written {
		if !used {
			continue
		}
		if err := t.session.Prepare(ctx, t.s.write[i]); err != nil {
			return err
		}
	}
	return nil
}

// read takes over what admission returned.
func (t *transaction) read(row *db.PushAdmitRow, keys []rowKey) error {
	if row.LogEpoch == "" {
		if !t.joined {
			t.s.gate.Forget(t.partition)
		}
		return errPartitionGone
	}
	t.admitted = admitted{
		locked: row.Locked, oversized: row.Oversized, moving: row.Moving, epoch: gate.Epoch{LogEpoch: row.LogEpoch, Required: row.EpochRequired},
		version: row.SchemaVersion, pending: row.PendingProjection, lastSeq: row.MaxCommitSeq,
	}
	for i, r := range t.requests {
		r.actor = row.ClientActors[i]
	}
	t.lastSeq = row.MaxCommitSeq
	if !t.joined { // where it may be of a partition that is never committed
		t.s.gate.Note(t.partition, t.admitted.epoch)
	}
	for _, name := range row.SingleTables {
		if table, ok := t.s.schema.Table(name); ok {
			if t.admitted.single == nil {
				t.admitted.single = make([]bool, len(t.s.schema.Tables))
			}
			t.admitted.single[table.Index] = true
		}
	}
	if row.Oversized {
		return nil
	}
	for i, ord := range row.OutcomeOrds {
		c := t.commits[ord-1]
		c.known = true
		c.outcome = storedOutcome(row.OutcomeStatuses[i], row.OutcomeSeqs[i], row.OutcomeResults[i], row.OutcomeDetails[i])
		c.outcome.id, c.outcome.recordedAtMs = row.OutcomeIds[i], row.OutcomeRecorded[i]
		c.outcome.schemaVersion = row.OutcomeVersions[i]
	}
	for i, ord := range row.RowOrds {
		versions, err := parseVersions(row.RowColumnVersions[i])
		if err != nil {
			return fmt.Errorf("reading the column versions of a row: %w", err)
		}
		t.state.load(keys[ord-1], row.RowVersions[i], row.RowPayloads[i], versions)
	}
	for i, ord := range row.TombstoneOrds {
		t.state.loadTombstone(keys[ord-1], row.TombstoneSeqs[i] > row.HorizonSeq)
	}
	return nil
}

// checkGate applies the serve gate as it was read under the lock, and answers the
// requests that it refuses.
func (t *transaction) checkGate() {
	for _, r := range t.requests {
		reset, err := false, error(nil)
		if !r.trusted {
			reset, err = gate.Decide(r.WireVersion, r.LogEpoch, t.admitted.epoch)
		}
		switch {
		case err != nil:
			r.err = err
		case reset: // the epoch moved since entry
			r.resp = &Response{Reset: true, LogEpoch: t.admitted.epoch.LogEpoch}
		case r.actor != "" && r.actor != r.Actor:
			r.err = ssp2.Errorf(ssp2.CodeInvalidClientID, "this client id belongs to another actor")
		case t.admitted.moving:
			r.err = gate.Moving()
		default:
			r.err = gate.Ready(t.s.schema.Version, t.admitted.version, t.admitted.pending)
		}
	}
}

// parseVersions reads column versions from their array literal; "" is none.
func parseVersions(literal string) ([]int64, error) {
	if literal == "" {
		return nil, nil
	}
	fields := strings.Split(strings.Trim(literal, "{}"), ",")
	versions := make([]int64, len(fields))
	for i, f := range fields {
		v, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("column version %q: %w", f, err)
		}
		versions[i] = v
	}
	return versions, nil
}
