package pushsvc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// Bounds of a scan of candidate rows (§6.8).
const (
	// DefaultScanLimit is the limit of a scan that names none.
	DefaultScanLimit = 100
	// MaxScanLimit is the largest limit.
	MaxScanLimit = 1000
)

// Codes of reads that ask for something there is not (§6.8), beside
// [ssp2.CodeStorageScanRequiresScope]. They are for the host and mean a mistake in its
// code; none crosses the wire.
const (
	CodeTableNotFound           ssp2.Code = "sync.storage.table_not_found"
	CodeScopeNotFound           ssp2.Code = "sync.storage.scope_not_found"
	CodeIndexNotFound           ssp2.Code = "sync.storage.index_not_found"
	CodeIndexNotMaterialized    ssp2.Code = "sync.storage.index_not_materialized"
	CodeIndexValueCountMismatch ssp2.Code = "sync.storage.index_value_count_mismatch"
	CodeIndexValueTypeMismatch  ssp2.Code = "sync.storage.index_value_type_mismatch"
	CodeInvalidLimit            ssp2.Code = "sync.storage.invalid_limit"
)

// CandidateRow is a row of the candidate state.
type CandidateRow struct {
	RowID   string
	Version int64 // server version
	Row     *Row
}

// ScopeScan asks for rows by scope.
type ScopeScan struct {
	Table string
	// Scopes is variable to values: a row matches when, for each variable, its scope is
	// one of the values, as text (§3.1). Neither may be empty.
	Scopes map[string][]string
	// After is the row id after which the scan begins, "" for the first row.
	After string
	// Limit is how many rows are returned at most, 1 to 1000; 0 is 100.
	Limit int
}

// IndexScan asks for rows by a declared index.
type IndexScan struct {
	Table, Index string
	// Values has one value for every column of the index, in its order, each of the type
	// that [Row.Value] returns (an int will do for an int64); nil finds NULL.
	Values []any
	// After and Limit are those of a ScopeScan.
	After string
	Limit int
}

// judgeStatements are those that hooks for whole commits need.
var (
	readRow         = pgtx.NewStatement(schemaddl.FindRowSQL)
	readByScope     = pgtx.NewStatement(schemaddl.ScanByScopeSQL)
	readByIndex     = pgtx.NewStatement(schemaddl.ScanByIndexSQL)
	judgeStatements = []pgtx.Statement{readRow, readByScope, readByIndex, pushEnqueue}
)

// errReaderClosed says that a hook kept its Candidate for too long.
var errReaderClosed = errors.New("pushsvc: a Candidate serves until the hook returns")

// reader reads candidate rows for the hooks of one commit.
type reader struct {
	t      *transaction
	ctx    context.Context //nolint:containedctx // of the transaction: a read must not end with the caller
	plan   *planned
	commit appliedCommit
	mark   int // the candidate state before the commit

	mu     sync.Mutex
	closed bool
	ready  bool  // the database has the rows of the commit
	broken error // what the database said; it decides, whatever the hook says
	err    error // of those, one that leaves the commit undecided
}

// failed returns what decides about the commit in place of the hooks, if anything.
func (r *reader) failed() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.broken
}

// close ends the reads of the hooks, and returns what failed does.
func (r *reader) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return r.broken
}

// GetRow returns a row, nil when there is none. Errors: [*ssp2.Error] with
// [CodeTableNotFound]; any other must be returned by the hook, which cannot go on.
func (c *Candidate) GetRow(ctx context.Context, table, rowID string) (*CandidateRow, error) {
	t, err := c.read.t.s.table(table)
	if err != nil {
		return nil, err
	}
	key := rowKey{t.Index, rowID}
	state, known := c.read.known(key)
	if known || !storableText(rowID) {
		if state == nil || !state.exists() {
			return nil, nil
		}
		return &CandidateRow{rowID, state.version, view(t, state)}, nil
	}
	rows, err := c.read.rows(ctx, t, readRow, []string{table}, []string{rowID})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	return &rows[0], nil
}

// ScanRows returns rows by scope, ascending by row id as bytes. Errors: [*ssp2.Error]
// with [CodeTableNotFound], [CodeScopeNotFound], [CodeInvalidLimit], or
// [ssp2.CodeStorageScanRequiresScope] when Scopes or the values of a variable are
// empty; any other must be returned by the hook, which cannot go on.
func (c *Candidate) ScanRows(ctx context.Context, scan ScopeScan) ([]CandidateRow, error) {
	t, err := c.read.t.s.table(scan.Table)
	if err != nil {
		return nil, err
	}
	limit, err := scanLimit(scan.Limit)
	if err != nil {
		return nil, err
	}
	if len(scan.Scopes) == 0 {
		return nil, ssp2.Errorf(ssp2.CodeStorageScanRequiresScope, "a scan needs a scope")
	}
	scopes := make(map[string][]string, len(scan.Scopes))
	matches := true
	for variable, values := range scan.Scopes {
		sc, ok := t.Scope(variable)
		switch {
		case !ok:
			return nil, ssp2.Errorf(CodeScopeNotFound, "the table has no such scope")
		case len(values) == 0:
			return nil, ssp2.Errorf(ssp2.CodeStorageScanRequiresScope, "a scan needs values for its scopes")
		}
		possible := []string{}
		for _, v := range values {
			if _, ok := schema.ParseScopeText(t.Columns[sc.Column].Type, v); ok && utf8.ValidString(v) {
				possible = append(possible, v)
			}
		}
		scopes[variable] = possible
		matches = matches && len(possible) > 0
	}
	if !matches {
		return nil, nil // no row can have them
	}
	encoded, err := json.Marshal(scopes)
	if err != nil {
		return nil, fmt.Errorf("pushsvc: encoding the scopes of a scan: %w", err)
	}
	return c.read.rows(ctx, t, readByScope, scan.Table, string(encoded), scanAfter(scan.After), limit)
}

// ScanRowsByIndex returns the rows whose indexed columns have exactly these values,
// ascending by row id as bytes. Errors: [*ssp2.Error] with [CodeTableNotFound],
// [CodeIndexNotFound], [CodeIndexNotMaterialized] (the table keeps no typed columns),
// [CodeIndexValueCountMismatch], [CodeIndexValueTypeMismatch] or [CodeInvalidLimit]; any
// other must be returned by the hook, which cannot go on.
func (c *Candidate) ScanRowsByIndex(ctx context.Context, scan IndexScan) ([]CandidateRow, error) {
	t, args, err := c.read.t.s.indexScan(scan)
	if err != nil || args == nil {
		return nil, err
	}
	return c.read.rows(ctx, t, readByIndex, args...)
}

// indexScan returns the arguments of readByIndex after the partition, nil when no row can
// match.
func (s *Service) indexScan(scan IndexScan) (*schema.Table, []any, error) {
	t, err := s.table(scan.Table)
	if err != nil {
		return nil, nil, err
	}
	limit, err := scanLimit(scan.Limit)
	if err != nil {
		return nil, nil, err
	}
	if !t.Materialize {
		return nil, nil, ssp2.Errorf(CodeIndexNotMaterialized, "the table is not materialized")
	}
	i := slices.IndexFunc(t.Indexes, func(x schema.Index) bool { return x.Name == scan.Index })
	if i < 0 {
		return nil, nil, ssp2.Errorf(CodeIndexNotFound, "the table has no such index")
	}
	columns := t.Indexes[i].Columns
	if len(scan.Values) != len(columns) {
		return nil, nil, ssp2.Errorf(CodeIndexValueCountMismatch, "the index has %d columns, and %d values were given", len(columns), len(scan.Values))
	}
	values := make(pgtype.FlatArray[pgtype.Text], len(columns))
	for j, col := range columns {
		text, ok, err := indexText(t.Columns[col].Type, scan.Values[j])
		switch {
		case err != nil:
			return nil, nil, err
		case !ok:
			return t, nil, nil // no row can have it
		}
		values[j] = text
	}
	return t, []any{scan.Table, scan.Index, values, scanAfter(scan.After), limit}, nil
}

func (s *Service) table(name string) (*schema.Table, error) {
	t, ok := s.schema.Table(name)
	if !ok {
		return nil, ssp2.Errorf(CodeTableNotFound, "the schema has no such table")
	}
	return t, nil
}

func scanLimit(limit int) (int32, error) {
	switch {
	case limit == 0:
		return DefaultScanLimit, nil
	case limit < 1 || limit > MaxScanLimit:
		return 0, ssp2.Errorf(CodeInvalidLimit, "the limit of a scan must be 1 to %d", MaxScanLimit)
	}
	return int32(limit), nil
}

// scanAfter cuts a cursor where no row id goes on: what follows it in the order of
// bytes stays the same.
func scanAfter(after string) string {
	for i := 0; i < len(after); {
		r, size := utf8.DecodeRuneInString(after[i:])
		if r == 0 || r == utf8.RuneError && size == 1 {
			return after[:i]
		}
		i += size
	}
	return after
}

// storableText says whether the database can hold a text.
func storableText(s string) bool { return strings.IndexByte(s, 0) < 0 && utf8.ValidString(s) }

// indexText renders a value for an index lookup as Postgres reads it; ok is false when
// no row can have it.
func indexText(t ssp2.ColumnType, value any) (text pgtype.Text, ok bool, err error) {
	var s string
	var fits bool
	switch v := value.(type) {
	case nil:
		return pgtype.Text{}, true, nil
	case string:
		fits = t == ssp2.TypeString || t == ssp2.TypeJSON || t == ssp2.TypeBlobRef
		s = v
	case int:
		fits = t == ssp2.TypeInteger
		s = strconv.Itoa(v)
	case int64:
		fits = t == ssp2.TypeInteger
		s = strconv.FormatInt(v, 10)
	case float64:
		fits = t == ssp2.TypeFloat
		s = strconv.FormatFloat(v, 'g', -1, 64)
	case bool:
		fits = t == ssp2.TypeBoolean
		s = strconv.FormatBool(v)
	case []byte:
		fits = t == ssp2.TypeBytes
		s = fmt.Sprintf(`\x%x`, v)
	}
	if !fits {
		return pgtype.Text{}, false, ssp2.Errorf(CodeIndexValueTypeMismatch, "a value is not of the type of its column")
	}
	ok = storableText(s) && (t != ssp2.TypeJSON || ssp2.ValidJSON([]byte(s)))
	return pgtype.Text{String: s, Valid: true}, ok, nil
}

// known returns the candidate state of a row that the push names.
func (r *reader) known(key rowKey) (*rowState, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || !r.t.state.known[key] {
		return nil, false
	}
	state := r.t.state.get(key)
	if state.exists() {
		if err := state.decode(r.t.s.schema.Tables[key.table]); err != nil {
			return nil, false // reading it says why
		}
	}
	return state, true
}

// rows reads rows of a table from the database: row id, version and payload.
func (r *reader) rows(ctx context.Context, t *schema.Table, s pgtx.Statement, args ...any) ([]CandidateRow, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, errReaderClosed
	case r.broken != nil:
		return nil, r.broken
	case ctx.Err() != nil:
		return nil, fmt.Errorf("reading candidate rows: %w", context.Cause(ctx))
	}
	var read []CandidateRow
	err := r.lookAhead(s, func(rows pgx.Rows) error {
		var err error
		read, err = pgx.CollectRows(rows, candidateOf(t))
		return err //nolint:wrapcheck // run says what it was doing
	}, append([]any{r.t.partition}, args...)...)
	if err != nil {
		r.broken = err
		return nil, err
	}
	return read, nil
}

// candidateOf reads a row of a table: row id, version and payload.
func candidateOf(t *schema.Table) pgx.RowToFunc[CandidateRow] {
	return func(row pgx.CollectableRow) (CandidateRow, error) {
		c := CandidateRow{Row: &Row{table: t}}
		var payload []byte
		if err := row.Scan(&c.RowID, &c.Version, &payload); err != nil {
			return c, err //nolint:wrapcheck // the caller says what it was doing
		}
		var err error
		if c.Row.values, err = ssp2.DecodeRow(t.Wire, payload, nil); err != nil {
			return c, internal(fmt.Sprintf("decoding a stored row of table %q", t.Name), err)
		}
		return c, nil
	}
}

// lookAhead runs a query over the state that the commit would leave. The first one of a
// commit takes along what the database does not have yet: the plan, which is settled by
// that, and behind the savepoint the rows of the commit.
func (r *reader) lookAhead(s pgtx.Statement, take func(pgx.Rows) error, args ...any) error {
	t, p := r.t, r.plan
	f, err := t.startFlush(r.ctx)
	if err != nil {
		return r.fail(err)
	}
	saved, settles := t.saved, !r.ready && len(p.applied) > 0
	if settles {
		if err := t.queuePlan(f, p); err != nil {
			return r.fail(err)
		}
		f.queue("releasing the savepoint", pgtx.Release)
		saved = false
	}
	f.phase = ofCommit
	if !saved {
		f.queue("setting the savepoint", pgtx.Savepoint)
	}
	if !r.ready {
		t.queueWrites(f, []appliedCommit{r.commit})
	}
	f.phase = ofRead
	f.add(statement{what: "reading candidate rows", row: true, rows: take}, s, args...)

	failed, err := t.run(r.ctx, f)
	if settles && (err == nil || failed != nil && failed.phase != ofPlan) {
		t.settle(p)
		*p = planned{mark: r.mark}
	}
	t.saved, t.dirty = true, err != nil
	switch {
	case err == nil:
		r.ready = true
		return nil
	case !refused(failed, err):
		return r.fail(rowError(failed, err))
	case failed.phase == ofPlan:
		t.s.log.DebugContext(r.ctx, "the database refused a push", "commits", len(p.commits), "error", err)
		return r.fail(errPlanRefused)
	case failed.phase == ofRead: // a value that the database cannot even look for
		t.s.log.ErrorContext(r.ctx, "a hook failed", "doing", "reading candidate rows", "error", err)
		return &refusal{result: opError(0, ssp2.CodeConstraintViolation, refusedByHook)}
	}
	t.s.log.DebugContext(r.ctx, "the database refused a push", "commits", 1, "error", err)
	refusal, err := t.blame(r.ctx, &r.commit)
	if err != nil {
		return r.fail(err)
	}
	return refusal
}

// fail notes an error that leaves the commit undecided.
func (r *reader) fail(err error) error {
	r.err = err
	return err
}
