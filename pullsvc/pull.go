package pullsvc

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// Limits of PULL_HEADER (§4.2).
const (
	defaultChanges, maxChanges   = 1000, 1000
	defaultPageRows, maxPageRows = 1000, 50000
	defaultPages, maxPages       = 4, 50
)

const (
	// pieceBytes is up to where small sections are sent together.
	pieceBytes = 16 << 10
	// maxReads is how often a subscription is read before the database is given up:
	// once, and once more for a cursor that turns out to be from the future.
	maxReads = 2
)

// Pull is a pull that has begun. It is for one goroutine.
type Pull struct {
	// Reset says that the partition's log epoch is not the request's: nothing was
	// read, and LogEpoch is the one to take up (§2.1).
	Reset    bool
	LogEpoch string

	s        *Service
	req      Request
	version  int32        // schema version of the client
	view     *schema.View // of the newest version in that; nil: it is the newest
	changes  int32        // limitCommits, clamped
	pageRows int32        // limitSnapshotRows, clamped
	subs     []*subscription
	gate     gateRow  // as of the newest read
	chains   []*chain // that subscriptions use
	whole    bool     // the stream came to its end
	list     []byte   // the subscription list for the client's record
	digest   []byte   // SHA-256 of list

	leaseRead bool // the auth lease of the request
}

// mode is how a subscription is answered.
type mode uint8

const (
	modeWindow mode = iota
	modeBootstrap
	modeReset
	modeRevoked
)

// layout is how rows of a table are sent.
type layout struct {
	version int32
	table   *schema.Table    // of that version
	rows    *ssp2.Projection // what turns stored rows into it; nil: they are sent as they are
}

// row returns a stored row as it is sent. It may use the memory of buf.
func (l *layout) row(buf, stored []byte) ([]byte, error) {
	if l.rows == nil || stored == nil {
		return stored, nil
	}
	row, err := l.rows.AppendRow(buf[:0], stored)
	if err != nil {
		return nil, encoding(err)
	}
	return row, nil
}

// subscription is one subscription and what it is answered with.
type subscription struct {
	req       *ssp2.Subscription
	table     *schema.Table
	as        layout          // how the client has its rows
	effective scope.Requested // nil when revoked
	// scopes is the JSON of the effective scopes, without the values that no row
	// can have; "" when that leaves a variable without any, so that no row matches.
	scopes string
	values []string // of the driving variable within scopes, in scan order
	driver int      // its index in the scopes of the table
	resume *token   // nil: none, or an unusable one
	pages  int32    // how many more may be sent

	mode mode
	// answered says that frames, or scan, holds all of the answer that fits.
	answered bool
	frames   []byte // SUB_START and what follows
	next     int64  // nextCursor
	cut      bool   // the window does not reach the newest commit
	pin      int64  // of a bootstrap
	scan     *scan  // of a bootstrap that this pull reads by itself

	// Of a bootstrap that shares what it reads, see shared.
	shared  bool
	leads   *probe // the first page is read for others too
	follows *probe // it is read by somebody else
	chain   *chain
	from    int // index of the first page of it to send

	// What was sent, for its event.
	commits, changes, inline, stored int
	rows, bytes                      int64
}

func clamp(v, preset, most int32) int32 {
	if v == 0 {
		return preset
	}
	return min(max(v, 1), most)
}

func (s *Service) newPull(req Request) *Pull {
	p := &Pull{
		s: s, req: req,
		changes:  clamp(req.Header.LimitCommits, defaultChanges, maxChanges),
		pageRows: clamp(req.Header.LimitSnapshotRows, defaultPageRows, maxPageRows),
		subs:     make([]*subscription, len(req.Subscriptions)),
	}
	p.version = cmp.Or(req.SchemaVersion, s.schema.Version)
	p.view = s.versions.View(s.schema.Version, p.version)
	p.list = subscriptionList(p.version, req.Subscriptions)
	digest := sha256.Sum256(p.list)
	p.digest = digest[:]
	for i := range req.Subscriptions {
		p.subs[i] = p.newSubscription(&req.Subscriptions[i])
	}
	return p
}

func (p *Pull) newSubscription(req *ssp2.Subscription) *subscription {
	sub := &subscription{req: req, pages: clamp(p.req.Header.MaxSnapshotPages, defaultPages, maxPages)}
	sub.table, _ = p.s.schema.Table(req.Table)
	sub.as.version = p.version
	sub.as.table, sub.as.rows = p.view.Rows(sub.table)
	effective, active := p.req.Scopes.Grants.Effective(req.Scopes)
	if !active {
		sub.mode = modeRevoked
		return sub
	}
	sub.effective = effective
	sub.scopes, sub.values, sub.driver = matchable(sub.table, effective)
	if req.BootstrapState != nil || req.Cursor < 0 {
		sub.mode = modeBootstrap
	}
	if req.BootstrapState != nil {
		if t, ok := parseToken(*req.BootstrapState, req.Table); ok {
			sub.resume = &t
		}
	}
	return sub
}

// matchable returns the scopes a row can have, as canonical JSON, and the values
// of the first variable, whose index in the scopes of the table is driver. A value that
// is not the text of any column value matches nothing (§3.1).
func matchable(t *schema.Table, effective scope.Requested) (scopes string, driving []string, driver int) {
	kept := make(map[string][]string, len(effective))
	for i, sc := range t.Scopes {
		requested, ok := effective[sc.Variable]
		if !ok {
			continue
		}
		values := make([]string, 0, len(requested))
		for _, value := range requested {
			if _, ok := schema.ParseScopeText(t.Columns[sc.Column].Type, value); ok {
				values = append(values, value)
			}
		}
		if len(values) == 0 {
			return "", nil, 0
		}
		kept[sc.Variable] = values
		if driving == nil {
			driving, driver = values, i
		}
	}
	scopes = string(ssp2.AppendCanonicalScopes(nil, kept))
	slices.SortFunc(driving, ssp2.CompareUTF16)
	return scopes, driving, driver
}

// Stream sends the answer to every subscription, in request order. emit is called
// with one or more whole frames, which are valid only during the call, and should
// pass them on at once; its error ends the stream. Errors are like those of
// [Service.Begin]; whatever was emitted by then stays valid (§1.4).
func (p *Pull) Stream(ctx context.Context, emit func(frames []byte) error) (err error) {
	ctx, span := trace.Start(ctx, "syncpg.pull.stream")
	defer span.End(&err)
	out := &pieces{emit: emit}
	defer p.tell(ctx, out)
	for i, sub := range p.subs {
		for reads := 0; !sub.answered; reads++ {
			if reads == maxReads {
				return errUnanswered(sub)
			}
			if err := out.flush(); err != nil {
				return err
			}
			if err := p.read(ctx, p.subs[i:]); err != nil {
				return fmt.Errorf("pulling: %w", err)
			}
			if p.Reset {
				return errReplaced()
			}
		}
		if sub.mode == modeWindow && sub.cut {
			if err := p.shorten(ctx, out, sub); err != nil {
				return err
			}
		}
		if err := p.send(ctx, out, sub); err != nil {
			return err
		}
		p.note(out, sub)
		p.subs[i] = nil
	}
	p.whole = true
	return out.flush()
}

// send sends what a subscription is answered with, reading further pages of a
// bootstrap as it goes.
func (p *Pull) send(ctx context.Context, out *pieces, sub *subscription) error {
	if err := out.add(sub.frames); err != nil || sub.mode != modeBootstrap {
		return err
	}
	if sub.shared {
		if done, err := p.sendShared(ctx, out, sub); err != nil || done {
			return err
		}
	}
	for {
		pg := sub.scan.take()
		if pg == nil {
			if err := out.flush(); err != nil {
				return err
			}
			if err := p.more(ctx, sub); err != nil {
				return fmt.Errorf("pulling: %w", err)
			}
			continue
		}
		if err := p.deliver(ctx, out, sub, pg); err != nil {
			return err
		}
		sub.pages--
		sub.scan.release(pg)
		if !pg.more || sub.pages == 0 {
			sub.scan = nil
			var next *string
			if pg.more {
				next = pg.next.cursor()
			}
			return p.endBootstrap(out, sub, next)
		}
	}
}

// endBootstrap sends the SUB_END of a bootstrap that goes on at a row cursor, or is
// complete.
func (p *Pull) endBootstrap(out *pieces, sub *subscription, next *string) error {
	end := &ssp2.SubEnd{NextCursor: sub.pin}
	if next != nil {
		at, _ := parseCursor(*next)
		end.BootstrapState = token{sub.pin, at}.render(sub.table.Name)
	}
	trailer, err := p.frame(nil, end)
	if err != nil {
		return err
	}
	return out.add(trailer)
}

// deliver sends a page, as it is or by its descriptor. A store that fails holds up only
// clients that take no page as it is.
func (p *Pull) deliver(ctx context.Context, out *pieces, sub *subscription, pg *page) error {
	sub.rows += pg.rows
	if p.external(pg) {
		if err := out.flush(); err != nil {
			return err
		}
		ref, err := p.store(ctx, sub, pg)
		if err == nil {
			sub.stored++
			return out.add(ref)
		}
		if ctx.Err() != nil || p.req.Header.Accept&ssp2.AcceptInlineRows == 0 {
			return err
		}
		p.s.log.WarnContext(ctx, "a segment is sent inline: it cannot be stored", "table", sub.table.Name, "error", err)
	}
	sub.inline++
	sub.bytes += int64(len(pg.inline))
	return out.add(pg.inline)
}

// Close gives up what the pull holds. It may be called more than once.
func (p *Pull) Close() {
	p.subs = nil
	for _, c := range p.chains {
		c.leave(!p.whole)
	}
	p.chains = nil
}

// frame appends a frame. An encoder's complaint is about the server's own data, so
// its code must not reach the client.
func (p *Pull) frame(dst []byte, f ssp2.Frame) ([]byte, error) {
	dst, err := ssp2.AppendFrame(dst, p.req.WireVersion, f)
	if err != nil {
		return dst, encoding(err)
	}
	return dst, nil
}

func encoding(err error) error { return errors.New("encoding the response: " + err.Error()) }

// pieces gathers small sections, so that many quiet subscriptions are one write.
type pieces struct {
	emit func([]byte) error
	buf  []byte

	noted []events.PullServed // of sections that were added
	out   int                 // how many of them are out
}

func (o *pieces) add(frames []byte) error {
	if len(o.buf)+len(frames) > pieceBytes {
		if err := o.flush(); err != nil {
			return err
		}
		if len(frames) > pieceBytes {
			return o.emit(frames)
		}
	}
	o.buf = append(o.buf, frames...)
	return nil
}

func (o *pieces) flush() error {
	if len(o.buf) > 0 {
		err := o.emit(o.buf)
		o.buf = o.buf[:0]
		if err != nil {
			return err
		}
	}
	o.out = len(o.noted)
	return nil
}
