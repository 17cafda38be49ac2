package pullsvc

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/ssp2"
)

// Statements of the pull path besides transaction control.
var (
	readGate    = pgtx.NewStatement(db.PullReadGate)
	readWindows = pgtx.NewStatement(db.PullReadWindows)
	scanRows    = pgtx.NewStatement(db.PullScanRows)
	pinPlans    = pgtx.NewStatement(db.PullPinPlans)

	statements = []pgtx.Statement{pgtx.BeginSnapshot, pgtx.HoldSchema, readGate, readWindows, scanRows, pinPlans, pgtx.Commit}
)

// sqlStateUnscoped is raised for a scan without a scope (004_pull.sql).
const sqlStateUnscoped = "SY005"

var errPartitionUnknown = errors.New("the partition is not registered")

// gateRow is what a pull knows of partition and client.
type gateRow db.PullReadGateRow

// sameCursor says that the client's record has this cursor, nil for none.
func (g *gateRow) sameCursor(cursor *int64) bool {
	if cursor == nil {
		return g.ClientCursor < 0
	}
	return g.ClientCursor == *cursor
}

// pageTask asks for the next page of a subscription, in a round trip with others.
type pageTask struct {
	sub *subscription
	// pinned: the page follows one already sent, so it is read whatever the horizon
	// has become.
	pinned bool
}

// work is what one round trip reads besides the gate.
type work struct {
	windows []*subscription
	pages   []pageTask
	// rows and bytes bound each of the pages.
	rows, bytes int64
	stream      *subscription // to go on with
	// all takes the rows of the stream, instead of its scan: up to rows of them, whose
	// payloads are left out when they have over bytes.
	all func(iter.Seq2[ssp2.SegmentRow, error]) error
}

// read reads gate and log in one round trip, and answers those of subs that are
// not answered yet: all of them, or as many as fit in memory.
func (p *Pull) read(ctx context.Context, subs []*subscription) error {
	w := work{rows: int64(p.pageRows), bytes: min(probeBytes, p.s.bufferBytes)}
	for _, sub := range subs {
		switch {
		case sub.answered || sub.scopes == "":
		case sub.mode == modeWindow:
			w.windows = append(w.windows, sub)
		case sub.mode == modeBootstrap && p.wants(sub):
			p.begin(sub)
			w.pages = append(w.pages, pageTask{sub: sub})
		}
	}
	defer p.settle(subs)
	return p.flush(ctx, w, func() error {
		bootstraps := false
		for _, sub := range subs {
			if sub.answered {
				continue
			}
			if err := p.classify(ctx, sub); err != nil {
				return err
			}
			bootstraps = bootstraps || sub.mode == modeBootstrap
		}
		if bootstraps && p.req.Header.Accept&ssp2.AcceptInlineRows == 0 && p.s.segments == nil {
			return ssp2.Errorf(ssp2.CodeInvalidRequest, "a bootstrap needs accept bit 0: this server delivers rows segments inline only")
		}
		return nil
	})
}

// wants says whether the first page of a bootstrap is to be read along with all the rest,
// because nobody else does and nothing is known of its scope.
func (p *Pull) wants(sub *subscription) bool {
	if !p.shares() {
		return true
	}
	if sub.resume != nil {
		sub.shared = true
		return false
	}
	pr, lead, _ := p.s.shared.first(p.probeKey(sub))
	if lead {
		sub.leads = pr
		return true
	}
	sub.shared, sub.follows = true, pr
	return false
}

// begin makes the scan of a bootstrap, where it does not go on from an earlier one.
func (p *Pull) begin(sub *subscription) {
	sub.scan = p.s.newScan(sub, int64(p.pageRows))
	if sub.resume != nil {
		sub.scan.start = sub.resume.at
	}
}

// more reads on until a page of the bootstrap is complete.
func (p *Pull) more(ctx context.Context, sub *subscription) error {
	sc := sub.scan
	for len(sc.pages) == 0 {
		before := sc.n
		w := work{stream: sub}
		if sc.tooLarge {
			sc.tooLarge = false
			w = work{pages: []pageTask{{sub: sub, pinned: true}}, rows: sc.rows, bytes: sc.bytes}
			if sc.open != nil {
				w.rows -= sc.open.rows
				w.bytes -= sc.open.bytes
			}
		}
		err := p.flush(ctx, w, func() error { return nil })
		switch {
		case err != nil:
			return err
		case p.Reset:
			return errReplaced()
		case len(sc.pages) == 0 && sc.n == before && !sc.tooLarge:
			return errUnanswered(sub)
		}
	}
	return nil
}

func errUnanswered(sub *subscription) error {
	return fmt.Errorf("the database does not answer for the subscription %q", sub.req.ID)
}

func errReplaced() error {
	return ssp2.Errorf(ssp2.CodeStorageStaleRead, "the partition's log was replaced while the pull was being answered")
}

// flush is the one round trip. classify runs when the gate is known and before
// what was read is looked at; not at all when the gate says reset.
func (p *Pull) flush(ctx context.Context, w work, classify func() error) error {
	conn, err := p.s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("waiting for a connection: %w", err)
	}
	defer pgtx.Finish(ctx, conn)
	session := pgtx.On(conn.Conn())
	if err := session.Prepare(ctx, statements...); err != nil {
		return err
	}
	if p.req.Lease != nil {
		if err := session.Prepare(ctx, lease.Find); err != nil {
			return err
		}
	}
	batch := &pgx.Batch{}
	queue := func(s pgtx.Statement, args ...any) { session.Queue(batch, s, args...) }
	queue(pgtx.BeginSnapshot)
	queue(pgtx.HoldSchema)
	queue(readGate, p.req.Partition, p.req.ClientID, p.digest)
	readLease := p.req.Lease != nil && !p.leaseRead
	if readLease {
		queue(lease.Find, p.req.Lease.Args()...)
	}
	if len(w.windows) > 0 {
		p.queueWindows(queue, w.windows)
	}
	if len(w.pages) > 0 {
		p.queuePages(queue, w)
	}
	var asked int64
	if w.stream != nil {
		sc := w.stream.scan
		if err := session.Prepare(ctx, sc.stream); err != nil {
			return gate.Moved(err)
		}
		var most int64
		asked, most = sc.ask(w.stream.pages)
		if w.all != nil {
			asked, most = w.rows, w.bytes
		}
		queue(pinPlans)
		sc.queueStream(queue, p.req.Partition, asked, most)
	}
	queue(pgtx.Commit)

	results := conn.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }() // a failure shows in what is read
	if _, err := results.Exec(); err != nil {
		return fmt.Errorf("beginning: %w", err)
	}
	if _, err := results.Exec(); err != nil {
		return fmt.Errorf("waiting for the schema: %w", err)
	}
	if err := p.readGate(results); err != nil || p.Reset {
		return err
	}
	if readLease {
		if err := p.readLease(ctx, results); err != nil {
			return err
		}
	}
	if err := classify(); err != nil {
		return err
	}
	if len(w.windows) > 0 {
		if err := p.readWindows(results, w.windows); err != nil {
			return err
		}
	}
	if len(w.pages) > 0 {
		if err := p.readPages(results, w.pages); err != nil {
			return err
		}
	}
	if w.stream != nil {
		if _, err := results.Exec(); err != nil {
			return fmt.Errorf("pinning plans: %w", err)
		}
		if err := w.readStream(results, asked); err != nil {
			return err
		}
	}
	if _, err := results.Exec(); err != nil {
		return fmt.Errorf("ending: %w", err)
	}
	return nil
}

func (w *work) readStream(results pgx.BatchResults, asked int64) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading rows: %w", err)
	}
	defer rows.Close()
	if w.all != nil {
		return w.all(segmentRows(rows))
	}
	return w.stream.scan.readStream(rows, asked)
}

// unscoped names the failure that a scan without a scope is (SEMANTICS §3).
func unscoped(err error) error {
	if pgtx.SQLState(err) != sqlStateUnscoped {
		return err
	}
	return &ssp2.Error{Code: ssp2.CodeStorageScanRequiresScope, Message: "a scan by scope needs a scope", Err: err}
}

// readGate reads the gate and applies it.
func (p *Pull) readGate(results pgx.BatchResults) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading the gate: %w", err)
	}
	g, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[gateRow])
	if err != nil {
		return fmt.Errorf("reading the gate: %w", err)
	}
	if g.LogEpoch == "" {
		return errPartitionUnknown
	}
	epoch := gate.Epoch{LogEpoch: g.LogEpoch, Required: g.EpochRequired}
	p.s.gate.Note(p.req.Partition, epoch)
	p.LogEpoch = epoch.LogEpoch
	if p.Reset, err = gate.Decide(p.req.WireVersion, p.req.LogEpoch, epoch); err != nil || p.Reset {
		return err
	}
	if err := gate.Ready(p.s.schema.Version, g.SchemaVersion, g.PendingProjection); err != nil {
		return err
	}
	if g.ClientActor != "" && g.ClientActor != p.req.Actor {
		return errOtherActor()
	}
	if g.MaxCommitSeq < max(p.req.AfterSeq, p.gate.MaxCommitSeq) {
		return ssp2.Errorf(ssp2.CodeStorageStaleRead, "the database answers from before a commit that it has already accepted")
	}
	p.gate = g
	return nil
}

// readLease reads the client's auth lease, once: what the round needs of it is known then.
func (p *Pull) readLease(ctx context.Context, results pgx.BatchResults) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading the auth lease: %w", err)
	}
	if err := p.req.Lease.Read(ctx, rows); err != nil {
		return err
	}
	p.leaseRead = true
	return nil
}

// classify decides how a subscription is answered, now that horizon and newest
// commit are known, and answers it where that needs no more reading.
func (p *Pull) classify(ctx context.Context, sub *subscription) error {
	cursor := sub.req.Cursor
	if sub.mode == modeWindow {
		switch {
		case cursor < p.gate.HorizonSeq:
			sub.mode = modeReset
		case cursor > p.gate.MaxCommitSeq:
			sub.mode = modeBootstrap
		}
	}
	// A bootstrap whose pin the horizon has passed begins anew (§4.7), by way of a reset
	// (§4.6): its client clears nothing while it holds a token (§5.6), and would keep the
	// rows of its earlier pages whose deletes are pruned.
	if sub.mode == modeBootstrap && sub.resume != nil && cursor >= 0 && sub.resume.pin < p.gate.HorizonSeq {
		sub.mode, sub.shared = modeReset, false
	}
	start := &ssp2.SubStart{ID: sub.req.ID, Status: ssp2.SubActive, EffectiveScopes: sub.effective}
	switch sub.mode {
	case modeRevoked:
		start.Status, start.ReasonCode, start.EffectiveScopes = ssp2.SubRevoked, string(ssp2.CodeScopeRevoked), nil
	case modeReset:
		start.Status, start.ReasonCode, start.EffectiveScopes = ssp2.SubReset, string(ssp2.CodeCursorExpired), nil
	case modeBootstrap:
		start.Bootstrap = true
		sub.pin = p.gate.MaxCommitSeq
		switch {
		case sub.resume != nil && sub.resume.pin >= p.gate.HorizonSeq && sub.resume.pin <= p.gate.MaxCommitSeq:
			sub.pin = sub.resume.pin
		case sub.req.BootstrapState != nil:
			sub.resume = nil
			if sub.scan != nil {
				sub.scan.restart(position{})
			}
			p.s.log.DebugContext(ctx, "a bootstrap starts anew: its resume token is unusable", "subscription", sub.req.ID)
		}
	case modeWindow:
	}
	sub.commits, sub.changes, sub.bytes = 0, 0, 0
	var err error
	if sub.frames, err = p.frame(sub.frames[:0], start); err != nil {
		return err
	}
	switch {
	case sub.mode == modeRevoked || sub.mode == modeReset:
		return p.finish(sub, cursor)
	case sub.mode == modeWindow && (sub.scopes == "" || cursor == p.gate.MaxCommitSeq):
		return p.finish(sub, p.gate.MaxCommitSeq)
	case sub.mode == modeBootstrap && sub.shared:
		sub.answered = true
	case sub.mode == modeBootstrap && sub.scopes == "":
		p.begin(sub)
		sub.answered = true
		return sub.scan.end(false)
	}
	return nil
}

// finish ends the section of a subscription that does not bootstrap.
func (p *Pull) finish(sub *subscription, next int64) (err error) {
	sub.answered, sub.next = true, next
	sub.frames, err = p.frame(sub.frames, &ssp2.SubEnd{NextCursor: next})
	return err
}

func (p *Pull) queueWindows(queue func(pgtx.Statement, ...any), subs []*subscription) {
	tables, scopes, cursors := make([]string, len(subs)), make([]string, len(subs)), make([]int64, len(subs))
	for i, sub := range subs {
		tables[i], scopes[i], cursors[i] = sub.table.Name, sub.scopes, sub.req.Cursor
	}
	queue(readWindows, p.req.Partition, tables, scopes, cursors, p.changes, p.s.bufferBytes, p.s.bufferBytes)
}

func (p *Pull) queuePages(queue func(pgtx.Statement, ...any), w work) {
	n := len(w.pages)
	tables, scopes := make([]string, n), make([]string, n)
	pins, firsts, afters := make([]*int64, n), make([]int32, n), make([]string, n)
	for i := range w.pages {
		t := &w.pages[i]
		sc := t.sub.scan
		first, after := sc.place().after(sc.values)
		sc.first = 0
		tables[i], scopes[i] = t.sub.table.Name, sc.scopes
		firsts[i], afters[i] = int32(first)+1, after
		if t.sub.resume != nil && !t.pinned {
			pins[i] = &t.sub.resume.pin
		}
	}
	queue(scanRows, p.req.Partition, tables, scopes, pins, firsts, afters, int32(w.rows), w.bytes, p.s.bufferBytes)
}
