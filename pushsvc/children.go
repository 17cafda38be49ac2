package pushsvc

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// The children of deleted rows come from the database, which is asked once for a whole
// transaction: with the admission about all rows that its commits delete, and then, when
// a commit needs what is not known yet, also about all rows that the answers so far may
// cause to be deleted. A level of children costs one round trip, however many commits
// delete something.
//
// An answer stays right until the transaction ends, whatever is written or taken back in
// between. Nobody else writes under the partition's lock; and of the rows that the
// transaction changes, rowStates.referring has each parent that they had before or after.
// So what refers to a row is among the rows found, whenever that was, and those noted;
// of both the candidate state says whether they refer to it now.

const (
	// maxAheadBytes bounds the rows that a transaction reads before one of its commits
	// turns out to need them.
	maxAheadBytes = 16 << 20
	// maxAheadRows bounds them at a time, by one reference. Of references that restrict no
	// bytes are read.
	maxAheadRows = 10_000
	// maxAheadParents bounds the rows asked about at a time.
	maxAheadParents = 10_000
)

var findChildren = pgtx.NewStatement(schemaddl.FindChildrenSQL)

// children is what a transaction knows of rows that refer to others.
type children struct {
	found map[referringKey]lookup
	// foundBytes is what rows hold that commits needed, and aheadBytes those read ahead.
	foundBytes, aheadBytes int64
	// ahead has what may be asked ahead, in the order of the commits, and noted all that
	// was ever in it.
	ahead []referringKey
	noted map[referringKey]bool
}

// lookup is what the database said about the rows that refer to a parent.
type lookup struct {
	rows []string // row ids
	cut  bool     // there may be more
}

// probe asks for the rows that refer to a parent.
type probe struct {
	parent
	ref *reference
}

func (p *probe) at() referringKey { return referringKey{p.ref, p.key.id} }

// expect notes that a row may be deleted.
func (t *transaction) expect(key rowKey) {
	c := &t.children
	for _, ref := range t.s.references.to[key.table] {
		at := referringKey{ref, key.id}
		if c.noted[at] {
			continue
		}
		if c.noted == nil {
			c.noted = map[referringKey]bool{}
		}
		c.noted[at] = true
		c.ahead = append(c.ahead, at)
	}
}

// question asks the database for children.
type question struct {
	t     *transaction
	asked []referringKey
	// At most limit rows of each parent, most of each reference, and so many bytes.
	limit, most int
	bytes       int64

	rows  [][]string // by asked
	short []bool     // by asked: not all of its rows were returned
	read  int64      // bytes of the rows that were taken over
}

// queue queues the question, of which then is called with the answer.
func (q *question) queue(f *flush, then func()) {
	n := len(q.asked)
	tables, columns, parents := make([]string, n), make([]string, n), make([]string, n)
	for i, at := range q.asked {
		tables[i], columns[i], parents[i] = at.ref.child.Name, at.ref.column, at.parent
	}
	f.add(statement{what: "finding children", rows: func(rows pgx.Rows) error {
		if err := q.take(rows); err != nil {
			return err
		}
		then()
		return nil
	}}, findChildren, q.t.partition, tables, columns, parents, bounded(q.limit), bounded(q.most), q.bytes)
}

func bounded(n int) int32 { return int32(min(n, 1<<30)) }

// take reads the answer, and takes over the rows that the transaction does not know yet,
// except where the reference restricts.
func (q *question) take(rows pgx.Rows) error {
	q.rows, q.short = make([][]string, len(q.asked)), make([]bool, len(q.asked))
	state := q.t.state
	var ord int
	var id, literal string
	var version int64
	var payload []byte
	_, err := pgx.ForEachRow(rows, []any{&ord, &id, &version, &payload, &literal}, func() error {
		i := ord - 1
		ref := q.asked[i].ref
		q.rows[i] = append(q.rows[i], id)
		key := rowKey{ref.child.Index, id}
		switch {
		case ref.OnDelete == schema.Restrict || state.known[key]:
			return nil
		case payload == nil:
			q.short[i] = true
			return nil
		}
		versions, err := parseVersions(literal)
		if err != nil {
			return fmt.Errorf("reading the column versions of a row: %w", err)
		}
		state.known[key] = true
		state.load(key, version, payload, versions)
		q.read += int64(len(payload))
		return nil
	})
	return err //nolint:wrapcheck // run says what it was doing
}

// cut says that a parent has more children than were asked for, perhaps.
func (q *question) cut(i int) bool { return len(q.rows[i]) >= q.limit }

// settle keeps what the answer says, and expects the deletes that it may lead to. It
// returns what was not answered.
func (q *question) settle() (unanswered []referringKey) {
	total, last := map[*reference]int{}, map[*reference]int{}
	for i, at := range q.asked {
		if n := len(q.rows[i]); n > 0 {
			total[at.ref] += n
			last[at.ref] = i
		}
	}
	c := &q.t.children
	for i, at := range q.asked {
		ended := total[at.ref] >= q.most && i >= last[at.ref]
		if !q.cut(i) && (q.short[i] || ended) {
			unanswered = append(unanswered, at)
			continue
		}
		if c.found == nil {
			c.found = map[referringKey]lookup{}
		}
		c.found[at] = lookup{q.rows[i], q.cut(i)}
		if at.ref.OnDelete == schema.Cascade && !q.cut(i) {
			for _, id := range q.rows[i] {
				q.t.expect(rowKey{at.ref.child.Index, id})
			}
		}
	}
	return unanswered
}

// childLimit is how many children of a row are asked for. More than these are more than
// may be appended, since rows of the database that are not children any more are rows that
// the transaction knows.
func (t *transaction) childLimit() int { return t.s.maxCascade + len(t.state.known) + 1 }

// queueAhead asks about rows that may be deleted, except those asked about anyway. What
// is not answered is asked again with the next, but for the first: it may be what does
// not fit.
func (t *transaction) queueAhead(f *flush, anyway []referringKey) {
	c := &t.children
	if len(c.ahead) == 0 || c.aheadBytes >= t.s.maxAheadBytes {
		return
	}
	asking := make(map[referringKey]bool, len(anyway))
	for _, at := range anyway {
		asking[at] = true
	}
	q := &question{t: t, limit: t.childLimit(), most: t.s.maxAheadRows, bytes: t.s.maxAheadBytes - c.aheadBytes}
	rest := c.ahead
	for len(rest) > 0 && len(q.asked) < maxAheadParents {
		if _, known := c.found[rest[0]]; !known && !asking[rest[0]] {
			q.asked = append(q.asked, rest[0])
		}
		rest = rest[1:]
	}
	c.ahead = nil
	if len(q.asked) == 0 {
		return
	}
	q.queue(f, func() {
		c.aheadBytes += q.read
		later := c.ahead // by the answer before this one
		c.ahead = nil
		unanswered := q.settle()
		if len(unanswered) > 0 {
			unanswered = unanswered[1:]
		}
		c.ahead = slices.Concat(unanswered, rest, later, c.ahead)
	})
}

// findChildren returns the rows that refer to parents in the candidate state, by probe.
func (t *transaction) findChildren(ctx context.Context, probes []probe) ([][]rowKey, error) {
	c := &t.children
	found := make([][]rowKey, len(probes))
	q := &question{t: t, limit: t.childLimit(), most: t.childLimit(), bytes: t.s.maxAdmittedBytes - c.foundBytes}
	var missing []int // of probes, by q.asked
	for i := range probes {
		at := probes[i].at()
		a, known := c.found[at]
		if known {
			var err error
			if found[i], err = t.referring(at, a.rows); err != nil {
				return nil, err
			}
			// More than may be appended are enough to refuse the commit.
			known = !a.cut || len(found[i]) > t.s.maxCascade
		}
		if !known {
			missing = append(missing, i)
			q.asked = append(q.asked, at)
		}
	}
	if len(missing) == 0 {
		return found, nil
	}
	f, err := t.startFlush(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errTransaction, err)
	}
	q.queue(f, func() {
		c.foundBytes += q.read
		q.settle()
	})
	t.queueAhead(f, q.asked)
	if _, err := t.run(ctx, f); err != nil {
		return nil, fmt.Errorf("%w: %w", errTransaction, err)
	}
	t.dirty = false
	for j, i := range missing {
		switch {
		case !q.short[j] || q.cut(j):
		case len(t.commits) > 1:
			return nil, fmt.Errorf("%w: %w", errTransaction, errOversized)
		default:
			return nil, &refusal{result: opError(probes[i].op, ssp2.CodeConstraintViolation, tooLarge)}
		}
		if found[i], err = t.referring(q.asked[j], q.rows[j]); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// referring returns the rows that refer to a parent in the candidate state, by row id, of
// those found in the database and those noted.
func (t *transaction) referring(at referringKey, found []string) ([]rowKey, error) {
	parent := rowKey{at.ref.Parent.Index, at.parent}
	var refer []rowKey
	for _, ids := range [][]string{found, t.state.referring[at]} {
		for _, id := range ids {
			key := rowKey{at.ref.child.Index, id}
			if t.state.known[key] {
				state := t.state.get(key)
				if !state.exists() {
					continue
				}
				if err := state.decode(at.ref.child); err != nil {
					return nil, err
				}
				if named, null := at.ref.parentKey(state.values[at.ref.Column]); null || named != parent {
					continue
				}
			}
			refer = append(refer, key)
		}
	}
	slices.SortFunc(refer, func(a, b rowKey) int { return cmp.Compare(a.id, b.id) })
	return slices.Compact(refer), nil
}
