package pullsvc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// maxRemembered bounds what a process remembers of scopes.
	maxRemembered = 16384
	// leastLife is how long a stored segment must have to live to be handed out:
	// the client has to get round to it.
	leastLife = 10 * time.Minute
	// readAhead is how many pages are built at most for a client that takes them: the one
	// that it waits for, one that is read while that is stored, and one behind it, since the
	// client has to be told of the first before it asks for more.
	readAhead = 3
)

// chainKey is what a chain of segments answers: bootstraps of a scope by clients that
// take pages of up to rows rows; rows is 0 for an image.
type chainKey struct {
	segment.Key
	rows int64
}

// probe is a first page that is being read, for all who want the same. What came of it
// is set when done is closed: page when that is all there is, large when more follows,
// neither when nothing came of it.
type probe struct {
	done  chan struct{}
	page  *page
	pin   int64
	epoch string
	large bool
}

// shared is what pulls of a process share of their bootstraps, so that a scope is read
// once however many ask for it. The segments themselves are in the store, where other
// processes find them.
type shared struct {
	mu     sync.Mutex
	probes map[chainKey]*probe
	fresh  map[chainKey]*chain           // begun here, by scope; none that has failed
	pinned map[chainKey]map[int64]*chain // all, by scope and pin
	// large are scopes that were seen to have more than a first page, which is therefore
	// not worth reading; unfit are those that no image holds.
	large, unfit map[chainKey]struct{}

	images  int                    // in the making
	lingers bool                   // builds may go on without a client
	orphans map[*chain]*time.Timer // those that do, and what ends them
}

func newShared() *shared {
	return &shared{
		probes: map[chainKey]*probe{}, fresh: map[chainKey]*chain{}, pinned: map[chainKey]map[int64]*chain{},
		large: map[chainKey]struct{}{}, unfit: map[chainKey]struct{}{}, orphans: map[*chain]*time.Timer{},
	}
}

// remember adds a key to one of the sets of keys.
func remember(set map[chainKey]struct{}, key chainKey) {
	if len(set) >= maxRemembered {
		clear(set)
	}
	set[key] = struct{}{}
}

// first says how the first page of a scope is to be had: known is true when the scope is
// known to be large; lead is true when the caller is to read it and settle the probe.
func (sh *shared) first(key chainKey) (pr *probe, lead, known bool) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if _, known := sh.large[key]; known {
		return nil, false, true
	}
	if pr := sh.probes[key]; pr != nil {
		return pr, false, false
	}
	pr = &probe{done: make(chan struct{})}
	sh.probes[key] = pr
	return pr, true, false
}

// settle tells the others what came of a probe.
func (sh *shared) settle(key chainKey, pr *probe) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	delete(sh.probes, key)
	if pr.large {
		remember(sh.large, key)
	}
	close(pr.done)
}

func (sh *shared) isUnfit(key chainKey) bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	_, unfit := sh.unfit[key]
	return unfit
}

// chain is the stored segments of one scope at one pin, from the first page on, and who
// adds to them. It grows as far as somebody waits for, in a goroutine that no request
// owns alone: it ends when nobody wants more. When everybody who did has gone, what is
// being read is finished and stored, see linger; otherwise the goroutine ends before the
// last of them is done. Of pages that somebody waits for, one is stored while the next is
// read. All fields are guarded by shared.mu, but scan and storing, which are the goroutine's.
type chain struct {
	s   *Service
	key chainKey
	sub subscription // table and scopes
	at  position     // where it begins

	pages    []segment.Meta
	pin      int64 // negative: not known yet
	complete bool
	failed   error

	users   int
	want    int           // how many pages are waited for
	changed chan struct{} // closed when one of the above has changed
	cancel  context.CancelFunc
	running chan struct{} // closed when the goroutine has ended; nil: there is none

	scan    *scan    // of an image: what a probe has read of it, nil for nothing
	storing *storing // nil for nothing
}

// storing is pages on their way to the store.
type storing struct {
	pages []*page
	done  chan struct{}
	err   error // once done is closed
}

// claim makes the caller a user of a chain.
func (sh *shared) claim(c *chain) *chain {
	c.users++
	if timer := sh.orphans[c]; timer != nil {
		timer.Stop()
		delete(sh.orphans, c)
	}
	return c
}

// linger lets the build of a chain that lost its last user go on, if it may.
func (sh *shared) linger(c *chain) bool {
	if !sh.lingers || c.running == nil || len(sh.orphans) >= c.s.maxBuilds {
		return false
	}
	sh.orphans[c] = time.AfterFunc(c.s.buildTime, c.cancel)
	return true
}

// join makes the caller a user of the chain of a pin, which is made of pages if there is
// none. A chain that there is goes on with pages only where they begin as it does: what
// its users were sent ends where its own pages end.
func (sh *shared) join(s *Service, key chainKey, sub *subscription, pages []segment.Meta, complete bool) *chain {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	pin := pages[0].AsOfCommitSeq
	c := sh.pinned[key][pin]
	if c == nil {
		c = s.newChain(key, sub)
		c.pin = pin
		sh.pin(c)
	}
	if c.running == nil && len(c.pages) < len(pages) && begins(pages, c.pages) {
		c.pages, c.complete, c.scan = pages, complete, nil
		if end := pages[len(pages)-1].NextRowCursor; end != nil {
			c.at, _ = parseCursor(*end)
		}
		c.tell()
	}
	return sh.claim(c)
}

// begins says whether pages begin with those of first.
func begins(pages, first []segment.Meta) bool {
	for i := range first {
		if pages[i].ID != first[i].ID || !sameCursor(pages[i].RowCursor, first[i].RowCursor) || !sameCursor(pages[i].NextRowCursor, first[i].NextRowCursor) {
			return false
		}
	}
	return true
}

func sameCursor(a, b *string) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// begin makes the caller a user of the chain that is being built for bootstraps from the
// start on. One whose pin is below least does not do, and is left to its users. So is one
// that is complete: the store says whether its segments still serve. Then begin returns
// nil, for the caller to look there, unless it did so again.
func (sh *shared) begin(s *Service, key chainKey, sub *subscription, least int64, again bool) *chain {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	c := sh.fresh[key]
	if c != nil && c.complete && c.pin >= least && !again {
		return nil
	}
	if c == nil || c.complete || c.pin >= 0 && c.pin < least {
		c = s.newChain(key, sub)
		sh.fresh[key] = c
	}
	return sh.claim(c)
}

// adopt makes the caller a user of a new chain that goes on with what a probe has read,
// unless there is one in the making that is as fresh as least: probes of other sizes lead
// to the same image.
func (sh *shared) adopt(s *Service, key chainKey, sub *subscription, sc *scan, pin, least int64) *chain {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if c := sh.fresh[key]; c != nil && !c.complete && (c.pin < 0 || c.pin >= least) {
		return sh.claim(c)
	}
	c := s.newChain(key, sub)
	c.scan, c.pin = sc, pin
	sh.fresh[key] = c
	sh.pin(c)
	return sh.claim(c)
}

func (s *Service) newChain(key chainKey, sub *subscription) *chain {
	return &chain{
		s: s, key: key, pin: -1, changed: make(chan struct{}),
		sub: subscription{req: &ssp2.Subscription{ID: "segments"}, table: sub.table, as: sub.as, scopes: sub.scopes, values: sub.values, driver: sub.driver, pages: math.MaxInt32},
	}
}

func (sh *shared) pin(c *chain) {
	if sh.pinned[c.key] == nil {
		sh.pinned[c.key] = map[int64]*chain{}
	}
	if sh.pinned[c.key][c.pin] == nil {
		sh.pinned[c.key][c.pin] = c
	}
}

// forget takes a chain out of the maps, so that nobody joins it any more.
func (sh *shared) forget(c *chain) {
	if sh.fresh[c.key] == c {
		delete(sh.fresh, c.key)
	}
	if sh.pinned[c.key][c.pin] == c {
		delete(sh.pinned[c.key], c.pin)
		if len(sh.pinned[c.key]) == 0 {
			delete(sh.pinned, c.key)
		}
	}
}

// leave ends the use of a chain. The last one out waits for a goroutine that may not go
// on alone, and stops it when gone is true: then nobody wants what is being read.
func (c *chain) leave(gone bool) {
	sh := c.s.shared
	sh.mu.Lock()
	c.users--
	var wait chan struct{}
	if c.users == 0 && !sh.linger(c) {
		sh.forget(c)
		if wait = c.running; wait != nil && gone {
			c.cancel()
		}
	}
	sh.mu.Unlock()
	if wait != nil {
		<-wait
	}
}

// page returns the i-th page, and waits for it to be built; false when the chain ends
// before it. The caller takes up to pages pages from there on. Pages that the store would
// not find are not shared: whoever has come so far reads on by itself.
func (c *chain) page(ctx context.Context, i int, pages int32) (segment.Meta, bool, error) {
	sh := c.s.shared
	for {
		sh.mu.Lock()
		switch {
		case i < len(c.pages):
			m := c.pages[i]
			sh.mu.Unlock()
			return m, true, nil
		case c.complete || c.failed != nil || i >= segment.MaxFound:
			err := c.failed
			sh.mu.Unlock()
			return segment.Meta{}, false, err
		}
		c.want = max(c.want, min(i+int(min(pages, readAhead)), segment.MaxFound))
		if c.running == nil {
			// Its end is with those who use the chain, not with who came first.
			ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
			c.cancel, c.running = cancel, make(chan struct{})
			go c.run(ctx)
		}
		changed := c.changed
		sh.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return segment.Meta{}, false, fmt.Errorf("waiting for a segment: %w", context.Cause(ctx))
		}
	}
}

// find returns the index of the page that begins at a cursor; it may be the next one to
// be built.
func (c *chain) find(cursor *string) (int, bool) {
	sh := c.s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if cursor == nil {
		return 0, true
	}
	for i := range c.pages {
		if next := c.pages[i].NextRowCursor; next != nil && *next == *cursor {
			return i + 1, true
		}
	}
	return 0, false
}

// run builds what is waited for.
func (c *chain) run(ctx context.Context) {
	sh := c.s.shared
	for {
		err := c.step(ctx)
		stopped := ctx.Err() != nil
		if err != nil || stopped {
			err = errors.Join(err, c.stored())
		}
		sh.mu.Lock()
		if err != nil && !stopped {
			c.failed = err
			sh.forget(c)
		}
		if stopped {
			c.scan = nil // what was read and not stored is read again, if somebody goes on
		}
		if stopped || c.failed != nil || c.complete || len(c.pages) >= c.want {
			c.cancel()
			close(c.running)
			c.running = nil
			if timer := sh.orphans[c]; timer != nil {
				timer.Stop()
				delete(sh.orphans, c)
				sh.forget(c)
			}
			c.tell()
			sh.mu.Unlock()
			return
		}
		sh.mu.Unlock()
	}
}

// step reads on and stores what it has read, or begins to, when there is more to do
// meanwhile.
func (c *chain) step(ctx context.Context) (err error) {
	defer contain(&err)
	if c.key.MediaType == ssp2.MediaSQLite {
		return c.image(ctx)
	}
	return c.read(ctx)
}

// contain makes a panic an error. It must not end the process: no request's recovery is
// around a goroutine of a chain.
func contain(err *error) {
	if v := recover(); v != nil {
		*err = fmt.Errorf("building segments: panic: %v", v)
	}
}

// tell wakes everybody who waits; shared.mu is held.
func (c *chain) tell() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// add makes pages part of the chain.
func (c *chain) add(complete bool, pages ...segment.Meta) {
	sh := c.s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	c.pages = append(c.pages, pages...)
	c.complete = complete
	if end := c.pages[len(c.pages)-1].NextRowCursor; end != nil {
		c.at, _ = parseCursor(*end)
	}
	c.tell()
}

// reader returns a pull that belongs to no client, for reading a chain's rows: of no database
// that does not have the pin yet.
func (c *chain) reader() *Pull {
	epoch := c.key.LogEpoch
	return &Pull{
		s: c.s, pageRows: int32(c.key.rows), digest: []byte{},
		req: Request{Partition: c.key.Partition, WireVersion: ssp2.WireV2, LogEpoch: &epoch, AfterSeq: max(c.pin, 0)},
	}
}

// read reads the next pages and stores them.
func (c *chain) read(ctx context.Context) error {
	p, sub := c.reader(), c.sub
	if c.scan == nil {
		c.scan = c.s.newScan(&sub, c.key.rows)
		c.scan.start = c.at
	}
	sub.scan = c.scan
	if c.pin < 0 {
		if err := p.flush(ctx, work{stream: &sub}, func() error { return nil }); err != nil {
			return err
		}
		if p.Reset {
			return errReplaced()
		}
		c.pinAt(p.gate.MaxCommitSeq)
	}
	if err := p.more(ctx, &sub); err != nil {
		return err
	}
	if err := c.stored(); err != nil {
		return err
	}
	// Another process may have been at it too: its pages are as good, and clients that
	// were given them are many.
	if others, complete, err := c.others(ctx); err != nil {
		return err
	} else if len(others) > 0 {
		c.add(complete, others...)
		c.scan.restart(c.at)
		return nil
	}
	if c.store(ctx) {
		return nil
	}
	return c.stored()
}

// store begins to store the pages that were read. It says whether somebody waits for what
// follows them.
func (c *chain) store(ctx context.Context) (more bool) {
	first := len(c.pages)
	st := &storing{done: make(chan struct{})}
	for first+len(st.pages) < segment.MaxFound {
		pg := c.scan.take()
		if pg == nil {
			break
		}
		st.pages = append(st.pages, pg)
	}
	c.storing = st
	go func() {
		defer close(st.done)
		defer contain(&st.err)
		for i, pg := range st.pages {
			m, err := c.s.put(ctx, c.key.Key, c.pin, int32(first+i), pg)
			if err != nil {
				st.err = err
				return
			}
			c.add(!pg.more, m)
		}
	}()
	end := first + len(st.pages)
	sh := c.s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return !c.scan.ended && end < c.want
}

// stored waits for what is being stored, and takes back its memory.
func (c *chain) stored() error {
	st := c.storing
	if st == nil {
		return nil
	}
	c.storing = nil
	<-st.done
	for _, pg := range st.pages {
		c.scan.release(pg)
	}
	return st.err
}

func (c *chain) pinAt(seq int64) {
	sh := c.s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	c.pin = seq
	if sh.fresh[c.key] == c {
		sh.pin(c)
	}
}

// others returns pages of the store that go on where the chain ends.
func (c *chain) others(ctx context.Context) ([]segment.Meta, bool, error) {
	found, err := c.s.segments.Find(ctx, c.key.Key)
	if err != nil {
		return nil, false, fmt.Errorf("finding segments: %w", err)
	}
	var from *string
	if n := len(c.pages); n > 0 {
		from = c.pages[n-1].NextRowCursor
	}
	pages, complete := chainOf(found, c.pin, c.key.rows, from, c.s.clock().Add(leastLife).UnixMilli())
	return pages, complete, nil
}

// chainOf picks of the segments of a key those of a pin that follow each other, from a
// cursor on. Of pages that begin at the same place it takes the longest that has no more
// than rows rows; those that end before expires are left alone. It says whether they reach
// the end of the table.
func chainOf(found []segment.Meta, pin, rows int64, from *string, expires int64) (pages []segment.Meta, complete bool) {
	const start = ""
	cursor := func(c *string) string {
		if c == nil {
			return start
		}
		return *c
	}
	best := map[string]segment.Meta{}
	for _, m := range found {
		if m.AsOfCommitSeq != pin || m.ExpiresAt < expires || rows > 0 && m.RowCount > rows {
			continue
		}
		if have, ok := best[cursor(m.RowCursor)]; !ok || m.RowCount > have.RowCount {
			best[cursor(m.RowCursor)] = m
		}
	}
	for at := cursor(from); ; {
		m, ok := best[at]
		if !ok {
			return pages, false
		}
		delete(best, at) // so that a circle ends
		pages = append(pages, m)
		if m.NextRowCursor == nil {
			return pages, true
		}
		at = *m.NextRowCursor
	}
}

// put stores a page, of which index says which one it is.
func (s *Service) put(ctx context.Context, key segment.Key, pin int64, index int32, pg *page) (segment.Meta, error) {
	body := pg.segment()
	m := segment.Meta{
		Key: key, ID: segment.ID(body), AsOfCommitSeq: pin,
		RowCursor: pg.from.cursor(), Page: index, RowCount: pg.rows, ByteLength: int64(len(body)),
	}
	if pg.more {
		m.NextRowCursor = pg.next.cursor()
	}
	if err := s.segments.Put(ctx, m, bytes.NewReader(body)); err != nil {
		return segment.Meta{}, fmt.Errorf("storing a segment: %w", err)
	}
	return m, nil
}

// chainKey returns the key of the chain that a fresh bootstrap would be answered with.
func (p *Pull) chainKey(sub *subscription, media ssp2.MediaType) chainKey {
	key := chainKey{
		Key: segment.Key{
			Partition: p.req.Partition, LogEpoch: p.LogEpoch, Table: sub.table.Name, MediaType: media,
			SchemaVersion: p.version, ScopeDigest: ssp2.ScopeDigest(sub.effective),
		},
		rows: int64(p.pageRows),
	}
	if media == ssp2.MediaSQLite {
		key.rows = 0
	}
	return key
}

// probeKey is the key under which the first page of a bootstrap is read, before the
// epoch is known for sure.
func (p *Pull) probeKey(sub *subscription) chainKey {
	key := p.chainKey(sub, p.lane(sub))
	key.rows, key.LogEpoch = int64(p.pageRows), ""
	if p.req.LogEpoch != nil {
		key.LogEpoch = *p.req.LogEpoch
	}
	return key
}

// lane is what a client is given of a large scope, from its start on (§5.3).
func (p *Pull) lane(sub *subscription) ssp2.MediaType {
	if p.req.Header.Accept&ssp2.AcceptSQLite == 0 || !p.s.images[sub.as.table] {
		return ssp2.MediaRows
	}
	return ssp2.MediaSQLite
}

// shares says whether segments of others may answer the client.
func (p *Pull) shares() bool {
	return p.s.segments != nil && p.req.Header.Accept&ssp2.AcceptExternalRows != 0
}

// settle tells those who wait what came of the first pages that this pull has read, and
// makes those that more follows the begin of a chain.
func (p *Pull) settle(subs []*subscription) {
	for _, sub := range subs {
		pr := sub.leads
		if pr == nil {
			continue
		}
		key := p.probeKey(sub)
		sub.leads = nil
		if sub.answered && sub.mode == modeBootstrap && sub.resume == nil {
			pr.pin, pr.epoch = sub.pin, p.LogEpoch
			if sc := sub.scan; sc.ended && len(sc.pages) == 1 {
				pg := *sc.pages[0] // the scan ends with it, and leaves its memory alone
				pr.page = &pg
			} else {
				pr.large = true
				sub.shared, sub.scan = true, nil
				p.use(sub, p.s.shared.adopt(p.s, p.freshKey(sub), sub, sc, sub.pin, p.least(0)))
			}
		}
		p.s.shared.settle(key, pr)
	}
}

// use makes a chain, which was joined, the one of a subscription.
func (p *Pull) use(sub *subscription, c *chain) {
	sub.chain = c
	p.chains = append(p.chains, c)
}

// await waits for the first page that somebody else reads, and takes it when it is all
// there is.
func (p *Pull) await(ctx context.Context, sub *subscription) error {
	pr := sub.follows
	sub.follows = nil
	select {
	case <-pr.done:
	case <-ctx.Done():
		return fmt.Errorf("waiting for a page: %w", context.Cause(ctx))
	}
	if pr.page == nil || pr.epoch != p.LogEpoch {
		return nil // a chain answers, also when the other one failed
	}
	sub.shared = false
	p.begin(sub)
	if pr.pin >= p.least(p.gate.MaxCommitSeq) {
		pg := *pr.page
		sub.pin = pr.pin
		sub.scan.pages, sub.scan.ended = []*page{&pg}, true
	}
	return nil
}

// least is the least pin that answers a bootstrap for which seq would do.
func (p *Pull) least(seq int64) int64 { return max(seq, p.req.AfterSeq, p.gate.HorizonSeq) }

// attach finds the chain that answers a subscription, from the store or in the making.
// When there is none, the subscription is answered by this pull alone.
func (p *Pull) attach(ctx context.Context, sub *subscription) error {
	if sub.resume != nil {
		return p.attachTo(ctx, sub, p.chainKey(sub, ssp2.MediaRows))
	}
	return p.attachTo(ctx, sub, p.freshKey(sub))
}

// freshKey is the key of the chain that answers a large scope from its start on.
func (p *Pull) freshKey(sub *subscription) chainKey {
	if key := p.chainKey(sub, p.lane(sub)); key.MediaType == ssp2.MediaRows || !p.s.shared.isUnfit(key) {
		return key
	}
	return p.chainKey(sub, ssp2.MediaRows)
}

func (p *Pull) attachTo(ctx context.Context, sub *subscription, key chainKey) error {
	found, err := p.s.segments.Find(ctx, key.Key)
	if err != nil {
		return fmt.Errorf("finding segments: %w", err)
	}
	expires := p.s.clock().Add(leastLife).UnixMilli()
	if sub.resume != nil {
		if pages, complete := chainOf(found, sub.pin, key.rows, nil, expires); len(pages) > 0 {
			c := p.s.shared.join(p.s, key, sub, pages, complete)
			p.use(sub, c)
			if i, ok := c.find(sub.resume.at.cursor()); ok {
				sub.from = i
				return nil
			}
			sub.chain = nil
		}
		return nil
	}
	least := p.least(0)
	for again := false; ; again = true {
		stale, err := p.reuse(ctx, sub, key, found, expires)
		if err != nil || stale < 0 {
			return err
		}
		if sub.chain != nil && sub.chain.key == key {
			return nil
		}
		// A chain that is still in use is not fresher than what the store has of it.
		if c := p.s.shared.begin(p.s, key, sub, max(least, stale+1), again); c != nil {
			p.use(sub, c)
			return nil
		}
		if found, err = p.s.segments.Find(ctx, key.Key); err != nil {
			return fmt.Errorf("finding segments: %w", err)
		}
	}
}

// reuse answers a fresh bootstrap with segments that were found, if any of them serve: then
// it returns -1, else the newest pin that does not serve, 0 for none.
func (p *Pull) reuse(ctx context.Context, sub *subscription, key chainKey, found []segment.Meta, expires int64) (stale int64, err error) {
	last := int64(-1)
	for _, m := range found {
		if m.AsOfCommitSeq == last || m.RowCursor != nil {
			continue
		}
		last = m.AsOfCommitSeq
		pages, complete := chainOf(found, last, key.rows, nil, expires)
		if len(pages) == 0 {
			continue
		}
		serves, err := p.serves(ctx, sub, last)
		if err != nil || !serves {
			return last, err // older ones serve less
		}
		c := p.s.shared.join(p.s, key, sub, pages, complete)
		if sub.chain != nil && sub.chain != c {
			p.drop(sub.chain) // what was begun is not needed
		}
		p.use(sub, c)
		return -1, nil
	}
	return 0, nil
}

// drop ends the use of a chain.
func (p *Pull) drop(c *chain) {
	for i := range p.chains {
		if p.chains[i] == c {
			p.chains = append(p.chains[:i], p.chains[i+1:]...)
			c.leave(false)
			return
		}
	}
}

// serves says whether segments of a pin answer a bootstrap: the log must reach back to
// it, and what follows must fit in one window, and not be so much that the next pull would
// tell the client to begin anew, see shorten.
func (p *Pull) serves(ctx context.Context, sub *subscription, pin int64) (bool, error) {
	if pin < p.least(0) {
		return false, nil
	}
	if pin >= p.gate.MaxCommitSeq {
		return true, nil
	}
	most := p.changes
	if p.s.catchUp >= 0 {
		most = min(most, p.s.catchUp)
	}
	n, err := p.s.countChanges(ctx, p.req.Partition, sub, pin, most)
	if err != nil {
		return false, err
	}
	return n <= int64(most), nil
}

// sendShared sends pages of a chain. It returns false when the chain does not go on, and
// sub.scan is then where this pull has to go on alone.
func (p *Pull) sendShared(ctx context.Context, out *pieces, sub *subscription) (done bool, err error) {
	if sub.follows != nil {
		if err := out.flush(); err != nil {
			return false, err
		}
		if err := p.await(ctx, sub); err != nil || !sub.shared {
			return false, err
		}
	}
	at := position{}
	if sub.resume != nil {
		at = sub.resume.at
	}
	// orWithout goes on without stored segments after an error, unless the client has left.
	orWithout := func(err error) error {
		if err == nil || ctx.Err() != nil {
			return err
		}
		p.s.log.WarnContext(ctx, "a bootstrap does without stored segments", "table", sub.table.Name, "error", err)
		sub.chain = nil
		return nil
	}
	if err := orWithout(p.attach(ctx, sub)); err != nil {
		return false, err
	}
	first := true
	for i := sub.from; sub.chain != nil; i++ {
		c := sub.chain
		if err := out.flush(); err != nil {
			return false, err
		}
		m, ok, err := c.page(ctx, i, sub.pages)
		switch {
		case err != nil && ctx.Err() != nil:
			return false, err
		case err != nil:
			level := slog.LevelWarn
			if errors.Is(err, errBusy) {
				level = slog.LevelDebug
			}
			p.s.log.Log(ctx, level, "a bootstrap goes on without its segments", "table", sub.table.Name, "error", err)
			if first && c.key.MediaType == ssp2.MediaSQLite {
				// No image, whatever the reason: the rows lane is shared as well.
				if err := orWithout(p.attachTo(ctx, sub, p.chainKey(sub, ssp2.MediaRows))); err != nil {
					return false, err
				}
				i--
				continue
			}
		}
		if !ok || first && sub.resume == nil && m.AsOfCommitSeq < p.least(0) || !sameCursor(m.RowCursor, at.cursor()) {
			break
		}
		if sent, err := p.deliverStored(ctx, out, sub, m); err != nil {
			return false, err
		} else if !sent {
			break
		}
		first = false
		sub.pin = m.AsOfCommitSeq
		sub.pages--
		if m.NextRowCursor == nil || sub.pages == 0 {
			return true, p.endBootstrap(out, sub, m.NextRowCursor)
		}
		at, _ = parseCursor(*m.NextRowCursor)
	}
	sub.shared = false
	p.gate.MaxCommitSeq = max(p.gate.MaxCommitSeq, sub.pin) // the log reaches as far as the chain has seen
	p.begin(sub)
	sub.scan.start = at
	return false, nil
}

// deliverStored sends a stored page: its descriptor, or the page when it is small. It
// returns false when the store does not have it any more.
func (p *Pull) deliverStored(ctx context.Context, out *pieces, sub *subscription, m segment.Meta) (bool, error) {
	if m.MediaType == ssp2.MediaSQLite || p.isExternal(m.ByteLength) {
		ref, err := p.descriptor(ctx, m)
		if err != nil {
			return false, err
		}
		sub.stored++
		sub.rows += m.RowCount
		return true, out.add(ref)
	}
	frame, err := p.inline(ctx, m)
	if err != nil {
		if ctx.Err() != nil {
			return false, err
		}
		p.s.log.WarnContext(ctx, "a stored segment cannot be read", "segment", m.ID, "error", err)
		return false, nil
	}
	sub.inline++
	sub.rows += m.RowCount
	sub.bytes += int64(len(frame))
	return true, out.add(frame)
}

// inline reads a stored page as a SEGMENT_INLINE frame.
func (p *Pull) inline(ctx context.Context, m segment.Meta) ([]byte, error) {
	_, body, err := p.s.segments.Open(ctx, segment.Ref{Partition: m.Partition, LogEpoch: m.LogEpoch, ID: m.ID, ScopeDigest: m.ScopeDigest})
	if err != nil {
		return nil, fmt.Errorf("opening a segment: %w", err)
	}
	defer func() { _ = body.Close() }()
	frame, mark := ssp2.BeginFrame(make([]byte, 0, m.ByteLength+16), ssp2.FrameSegmentInline)
	at := len(frame)
	frame = frame[:at+int(m.ByteLength)]
	if _, err := io.ReadFull(body, frame[at:]); err != nil {
		return nil, fmt.Errorf("reading a segment: %w", err)
	}
	if segment.ID(frame[at:]) != m.ID {
		return nil, errors.New("a stored segment is not what its id says")
	}
	return ssp2.EndFrame(frame, mark)
}
