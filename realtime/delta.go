package realtime

import (
	"slices"

	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/ssp2"
)

// Commits implements [fanout.Sink].
func (h *Hub) Commits(name string, from int64, commits []fanout.Commit) {
	p := h.existing(name)
	if p == nil {
		return
	}
	defer h.release(p)
	defer h.activity.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watchers == 0 {
		return
	}
	if !p.known {
		p.begin(from)
	}
	for i := range commits {
		c := &commits[i]
		switch {
		case c.Seq <= p.head:
			continue
		case c.Seq > p.head+1:
			h.lost(p, c.Seq-1) // never, as a fanout promises
		}
		h.dispatch(p, c)
	}
}

// Lost implements [fanout.Sink].
func (h *Hub) Lost(name string, seq int64) {
	p := h.existing(name)
	if p == nil {
		return
	}
	defer h.release(p)
	defer h.activity.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watchers > 0 && (!p.known || seq > p.head) {
		h.lost(p, seq)
	}
}

// lost skips to seq: nobody knows what they missed.
func (h *Hub) lost(p *partition, seq int64) {
	p.begin(seq)
	for _, c := range p.registered() {
		c.miss(seq, ssp2.WakeCatchupRequired)
	}
	clear(p.told)
}

// begin says that the connections of a partition are offered what comes after seq.
func (p *partition) begin(seq int64) {
	p.head, p.known = seq, true
	p.latest.Store(seq)
	p.recent.clear(seq)
}

// Reset implements [fanout.Sink].
func (h *Hub) Reset(name string, seq int64) {
	h.cfg.Gate.Forget(name)
	h.acks.forget(name)
	p := h.existing(name)
	if p == nil {
		return
	}
	defer h.release(p)
	defer h.activity.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watchers == 0 {
		return
	}
	p.begin(seq)
	p.resets++
	for _, c := range p.registered() {
		c.reset(seq, p.resets)
	}
	clear(p.told)
}

// Rotated implements [fanout.Sink].
func (h *Hub) Rotated(name string) {
	if name == "" {
		h.cfg.Gate.ForgetAll()
		return
	}
	h.cfg.Gate.Forget(name)
}

// registered returns the connections that have registrations.
func (p *partition) registered() []*conn {
	p.tick++
	p.told = p.told[:0]
	for _, g := range p.index.groups {
		for _, r := range g.members {
			if r.conn.mark != p.tick {
				r.conn.mark = p.tick
				p.told = append(p.told, r.conn)
			}
		}
	}
	return p.told
}

// hit is what a commit has for a registration.
type hit struct {
	of    *registration
	frame *frame
}

// dispatch offers a commit to every connection that it matches.
func (h *Hub) dispatch(p *partition, commit *fanout.Commit) {
	p.tick++
	p.head = commit.Seq
	p.latest.Store(max(p.latest.Load(), commit.Seq))
	p.recent.add(commit)
	p.found, p.told = p.found[:0], p.told[:0]
	for i := range commit.Changes {
		change := &commit.Changes[i]
		p.key = p.index.find(change.Table, change.Scopes, p.key, func(g *group) {
			if len(g.hit) == 0 {
				p.found = append(p.found, g)
			}
			g.hit = append(g.hit, int32(i))
		})
	}
	if len(p.found) == 0 {
		return
	}
	frames := map[string]*frame{}
	for _, g := range p.found {
		p.key = g.hitKey(p.key[:0])
		f := frames[string(p.key)]
		if f == nil {
			f = &frame{commit: commit, table: g.table.Name, of: g.table, changes: slices.Clone(g.hit)}
			frames[string(p.key)] = f
		}
		g.hit = g.hit[:0]
		for _, r := range g.members {
			c := r.conn
			if c.mark != p.tick {
				c.mark = p.tick
				c.hits = c.hits[:0]
				p.told = append(p.told, c)
			}
			c.hits = append(c.hits, hit{r, f})
		}
	}
	var b batch
	for i, c := range p.told {
		c.offer(commit, c.hits, &b)
		if clear(c.hits); cap(c.hits) > 4 {
			c.hits = nil
		}
		p.told[i] = nil
	}
	clear(p.found)
	b.flush()
}

// encode returns the COMMIT frame in a schema version, nil when it cannot be made. It is
// made once for all who have that version.
func (h *Hub) encode(f *frame, version int32) []byte {
	newest := h.cfg.Schema.Version
	if version == newest {
		return h.encodeAs(f, nil)
	}
	view := h.cfg.Versions.View(newest, version)
	if view == nil {
		return nil // not known, or not served
	}
	to, rows := view.Rows(f.of)
	switch {
	case to == nil:
		return nil
	case rows == nil:
		return h.encodeAs(f, nil)
	}
	own := f.older[version]
	if own == nil {
		own = &frame{commit: f.commit, table: f.table, changes: f.changes}
		if f.older == nil {
			f.older = map[int32]*frame{}
		}
		f.older[version] = own
	}
	return h.encodeAs(own, rows)
}

// encodeAs makes a frame of projected rows; nil leaves them as they are.
func (h *Hub) encodeAs(f *frame, rows *ssp2.Projection) []byte {
	if f.bytes != nil || f.failed {
		return f.bytes
	}
	h.encodes.Add(1)
	size := 64
	for _, i := range f.changes {
		ch := &f.commit.Changes[i]
		size += 40 + len(ch.RowID) + len(ch.Payload)
		for _, s := range ch.Scopes {
			size += 8 + len(s)
		}
	}
	buf, w := ssp2.BeginCommitFrame(make([]byte, 0, size), f.commit.Seq, f.commit.CreatedAtMs, f.commit.ActorID, []string{f.table})
	var row []byte
	var err error
	for _, i := range f.changes {
		ch := &f.commit.Changes[i]
		payload := ch.Payload
		if rows != nil && payload != nil {
			if row, err = rows.AppendRow(row[:0], payload); err != nil {
				break
			}
			payload = row
		}
		buf = w.AppendChange(buf, 0, ch.RowID, ch.Op, ch.RowVersion, ch.Scopes, payload)
	}
	if err == nil {
		buf, err = w.End(buf)
	}
	if err != nil {
		f.failed = true
		h.log.Error("encoding a delta failed", "seq", f.commit.Seq, "error", err.Error())
		return nil
	}
	f.bytes = buf
	return buf
}

// offer gives a commit to a connection (§8.2): as a delta when it bridges from what the
// client was given, else as a wake-up.
func (c *conn) offer(commit *fanout.Commit, hits []hit, b *batch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.batch = b
	defer func() { c.batch = nil }()
	seq := commit.Seq
	wanted, news := 0, false
	for _, hit := range hits {
		if !hit.of.quiet {
			wanted++
			news = news || hit.of.from < seq
		}
	}
	switch {
	case wanted == 0:
		// Its client would skip it, and pulls anyway.
	case c.inRound || c.stale || seq <= c.ownSeq && seq > c.acked:
		// §8.7: no delta while a response is under way. The commits of a round are during
		// it, whenever they arrive here.
		c.suppress(seq, ssp2.WakeCatchupRequired)
	case seq <= c.ownSeq:
		c.wake(ssp2.WakeCatchupRequired)
	case !news || seq <= c.acked:
	case c.suppressed:
		c.suppress(seq, ssp2.WakeCatchupRequired)
	case len(c.unacked) >= c.hub.cfg.MaxUnacked:
		c.suppress(seq, ssp2.WakeCatchupRequired)
	case commit.Oversize:
		c.suppress(seq, ssp2.WakeDeltaTooLarge)
	default:
		c.deliver(seq, hits)
	}
}

// deliver queues a commit as a delta.
func (c *conn) deliver(seq int64, hits []hit) {
	d := &delta{wire: c.wire, epoch: c.epoch, seq: seq}
	slices.SortFunc(hits, func(a, b hit) int { return a.of.order - b.of.order })
	size := 1 + deltaFrame + len(c.epoch)
	var only hit
	for _, hit := range hits {
		if hit.of.quiet || hit.of.from >= seq {
			continue
		}
		bytes := c.hub.encode(hit.frame, c.version)
		if bytes == nil {
			c.suppress(seq, ssp2.WakeCatchupRequired)
			return
		}
		s := section{id: hit.of.id, start: hit.of.group.start, commit: bytes}
		size += s.size()
		d.changes += len(hit.frame.changes)
		d.sections, only = append(d.sections, s), hit
	}
	d.size = size
	switch {
	case size > c.hub.cfg.MaxDeltaBytes:
		c.suppress(seq, ssp2.WakeDeltaTooLarge)
	case c.deltaBytes > 0 && c.deltaBytes+size > c.hub.cfg.MaxBufferedBytes:
		c.suppress(seq, ssp2.WakeCatchupRequired)
	default:
		c.unacked = append(c.unacked, seq)
		c.deltaBytes += size
		if len(d.sections) == 1 {
			d.framed = only.frame.message(c, d, only.of)
		}
		c.push(item{delta: d})
	}
}

// sharedMessages is how many messages of a commit are remembered: devices of one program
// name their subscriptions alike.
const sharedMessages = 4

// sharedMessage is a delta as those get it who have all of this in common.
type sharedMessage struct {
	wire    ssp2.WireVersion
	version int32
	epoch   string
	id      string
	group   *group
	framed  []byte
}

// message returns the frame of a delta that has one section, nil when it is not shared.
func (f *frame) message(c *conn, d *delta, of *registration) []byte {
	for i := range f.messages {
		m := &f.messages[i]
		if m.group == of.group && m.id == of.id && m.wire == c.wire && m.version == c.version && m.epoch == c.epoch {
			return m.framed
		}
	}
	if len(f.messages) == sharedMessages {
		return nil
	}
	message, err := d.append(make([]byte, maxFrameHeader, maxFrameHeader+d.size), c.hub.cfg.Schema.Version)
	if err != nil {
		return nil
	}
	m := sharedMessage{c.wire, c.version, c.epoch, of.id, of.group, framed(message, binaryFrame)}
	f.messages = append(f.messages, m)
	return m.framed
}

// suppress holds deltas back until the client has acknowledged seq, and wakes it.
func (c *conn) suppress(seq int64, reason ssp2.WakeReason) {
	c.suppressed = true
	c.observed = max(c.observed, seq)
	c.wake(reason)
}

// miss is suppress for a connection that may be closed.
func (c *conn) miss(seq int64, reason ssp2.WakeReason) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.suppress(seq, reason)
	}
}

// reset tells that the log is another one: what the client acknowledges from here on may
// be of the old one, so only a round, or the next connection, starts deltas again.
func (c *conn) reset(seq int64, resets int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.restart(seq, resets)
	}
}

// restart is reset for who holds c.mu.
func (c *conn) restart(seq int64, resets int) {
	c.resets, c.stale, c.acked, c.observed, c.ownSeq, c.pulled, c.unacked = resets, true, -1, seq, 0, 0, nil
	c.suppress(seq, ssp2.WakeResetRequired)
}

// wake queues a wake-up (§8.3), unless one waits already.
func (c *conn) wake(reason ssp2.WakeReason) {
	if c.wakeReason != "" {
		if reason == ssp2.WakeResetRequired {
			c.wakeReason = reason
		}
		return
	}
	c.wakeReason = reason
	c.push(item{wake: new(ssp2.Wake)})
}

// ack takes an acknowledgement (§8.2). One of commits that nobody knows of is one of the
// newest that is known: taken at its word, or of another log, it would keep every delta up
// to there from the client.
func (c *conn) ack(cursor int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.stale || cursor < 0 {
		return
	}
	cursor = min(cursor, max(c.p.latest.Load(), c.ownSeq, c.pulled))
	kept := 0
	for _, seq := range c.unacked {
		if seq > cursor {
			c.unacked[kept] = seq
			kept++
		}
	}
	if c.unacked = c.unacked[:kept]; kept == 0 && cap(c.unacked) > 8 {
		c.unacked = nil
	}
	if cursor >= c.observed {
		c.suppressed = false
	}
	if cursor > c.acked {
		c.acked = cursor
		c.hub.acks.note(c.client(), c.id.Actor, cursor)
	}
}

// delta is one message to a client: a whole response with one commit for each of the
// subscriptions that it matches.
type delta struct {
	wire     ssp2.WireVersion
	epoch    string
	seq      int64
	changes  int
	size     int
	sections []section
	framed   []byte // the message as a frame, when others have the same one
}

// section is SUB_START, COMMIT and SUB_END of a subscription. start and commit are shared.
type section struct {
	id            string
	start, commit []byte
}

const (
	deltaFrame   = 8 + 5 + 2*5 + 4 + 1 + 5 // envelope, RESP_HEADER without the epoch, END
	sectionFrame = 5 + 4 + 5 + 8 + 1       // SUB_START without id and rest, SUB_END
)

func (s *section) size() int { return sectionFrame + len(s.id) + len(s.start) + len(s.commit) }

// append appends the message with its tag.
func (d *delta) append(dst []byte, version int32) ([]byte, error) {
	dst = append(dst, byte(ssp2.TagDelta))
	dst = ssp2.AppendEnvelope(dst, d.wire, ssp2.KindResponse)
	dst, err := ssp2.AppendFrame(dst, d.wire, &ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: d.epoch})
	if err != nil {
		return nil, err
	}
	for i := range d.sections {
		s := &d.sections[i]
		var mark ssp2.Mark
		dst, mark = ssp2.BeginFrame(dst, ssp2.FrameSubStart)
		dst = append(ssp2.AppendStr(dst, s.id), s.start...)
		if dst, err = ssp2.EndFrame(dst, mark); err != nil {
			return nil, err
		}
		dst = append(dst, s.commit...)
		if dst, err = ssp2.AppendFrame(dst, d.wire, &ssp2.SubEnd{NextCursor: d.seq}); err != nil {
			return nil, err
		}
	}
	return ssp2.AppendEnd(dst), nil
}

// Bounds of recent.
const (
	recentCommits = 256
	recentChanges = 4096
	// maxLookups bounds what is compared for one connection that registers, which happens
	// under the lock of the partition.
	maxLookups = 16 << 10
)

// recent remembers what the last commits touched, so that a connection that registers
// something is known to have missed none of them, or which.
type recent struct {
	after   int64    // the commits after this one are in it
	touched [][]spot // by commit
	changes int
}

// spot is where a change was.
type spot struct {
	table  string
	scopes []string
}

func (r *recent) clear(seq int64) { *r = recent{after: seq} }

func (r *recent) add(c *fanout.Commit) {
	if len(c.Changes) > recentChanges || c.Seq != r.after+int64(len(r.touched))+1 {
		r.clear(c.Seq)
		return
	}
	spots := make([]spot, len(c.Changes))
	for i := range c.Changes {
		spots[i] = spot{c.Changes[i].Table, c.Changes[i].Scopes}
	}
	r.touched = append(r.touched, spots)
	r.changes += len(spots)
	for len(r.touched) > recentCommits || r.changes > recentChanges {
		r.changes -= len(r.touched[0])
		r.touched[0] = nil
		r.touched = r.touched[1:]
		r.after++
	}
}

// missed returns the newest commit above from that a group matches, or that may, 0 for
// none. head is the newest commit there is. When the budget of comparisons is used up, the
// newest may.
func (r *recent) missed(g *group, from, head int64, budget *int) int64 {
	if from >= head {
		return 0
	}
	if from < r.after {
		return head
	}
	for i, spots := range slices.Backward(r.touched) {
		seq := r.after + int64(i) + 1
		if seq <= from {
			break
		}
		if *budget -= len(spots); *budget < 0 {
			return head
		}
		for _, s := range spots {
			if s.table == g.table.Name && g.matches(s.scopes) {
				return seq
			}
		}
	}
	return 0
}
