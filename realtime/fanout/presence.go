package fanout

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
)

// maxMissed is how many beats of an instance may be missing before it is gone.
const maxMissed = 4

// Presence between processes. Each process numbers its messages, which say what changed
// among its own clients, and remembers of every other process the number of its newest
// message and the documents it has. Whoever finds a number missing, or does not know the
// process, asks it; the process then tells everything, between Begin and End, and what is
// not in there is gone. Documents have versions, so nothing is told to the sink twice.
//
// Notifications of one process arrive in the order in which it sent them, since it sends
// one at a time. None are lost while a session listens; so all are asked when it begins to.

// peer is another process.
type peer struct {
	number    int64
	synced    bool                     // all up to number is known
	asked     bool                     // since the last beat of this process
	missed    int                      // beats of this process since it was heard of
	versions  map[PresenceKey]int64    // of its documents
	noticed   int64                    // version of its newest notice
	unsettled map[PresenceKey]struct{} // those that were not told again since Begin; nil: not telling

	// The message that is being put together.
	assembling int64
	got        int
	pieces     strings.Builder
}

// peers are the other processes.
type peers struct {
	instance string
	sink     Sink
	ask      func(instance string)

	mu         sync.Mutex
	byInstance map[string]*peer
	listening  bool
}

func newPeers(instance string, sink Sink, ask func(string)) peers {
	return peers{instance: instance, sink: sink, ask: ask, byInstance: map[string]*peer{}}
}

// connected begins anew: messages may have been missed.
func (ps *peers) connected() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.listening = true
	for _, p := range ps.byInstance {
		p.synced, p.asked, p.missed = false, true, 0
		p.dropMessage()
	}
	ps.ask("")
}

// disconnected stops the count of missing beats, which would be missed.
func (ps *peers) disconnected() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.listening = false
}

// close forgets what the sink was told, which it forgets as well.
func (ps *peers) close() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	clear(ps.byInstance)
}

// beat counts a missing beat of every process, and lets those leave that miss too many.
func (ps *peers) beat() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if !ps.listening {
		return
	}
	for instance, p := range ps.byInstance {
		p.asked = false
		if p.missed++; p.missed > maxMissed {
			for key := range p.versions {
				ps.tell(instance, key, nil)
			}
			delete(ps.byInstance, instance)
		}
	}
}

// heard returns the process that a message came from, nil for this one.
func (ps *peers) heard(instance string) *peer {
	if instance == ps.instance {
		return nil
	}
	p := ps.byInstance[instance]
	if p == nil {
		p = &peer{versions: map[PresenceKey]int64{}}
		ps.byInstance[instance] = p
	}
	p.missed = 0
	return p
}

// lost says that messages of a process are missing.
func (ps *peers) lost(instance string, p *peer) {
	p.synced = false
	if !p.asked {
		p.asked = true
		ps.ask(instance)
	}
}

// onBeat takes the payload of a beat.
func (ps *peers) onBeat(text string) error {
	instance, numbers, _, ok := fields(text+" ", 2)
	if !ok {
		return fmt.Errorf("not a beat: %.40q", text)
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.heard(instance); p != nil && (!p.synced || p.number != numbers[0]) {
		ps.lost(instance, p)
	}
	return nil
}

// onPiece takes a piece of a message.
func (ps *peers) onPiece(text string) error {
	instance, numbers, rest, ok := fields(text, 4)
	if !ok || numbers[2] > maxPieces || numbers[1] > numbers[2] {
		return fmt.Errorf("not a piece of presence: %.40q", text)
	}
	number, piece, of := numbers[0], int(numbers[1]), int(numbers[2])
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.heard(instance)
	if p == nil || number <= p.number {
		return nil // ours, or known: it was sent twice
	}
	if piece == 1 {
		p.dropMessage()
		p.assembling = number
	}
	if number != p.assembling || piece != p.got+1 {
		p.dropMessage()
		ps.lost(instance, p)
		return nil
	}
	p.got = piece
	p.pieces.WriteString(rest)
	if piece < of {
		return nil
	}
	var m message
	err := json.Unmarshal([]byte(p.pieces.String()), &m)
	p.dropMessage()
	if err != nil {
		ps.lost(instance, p)
		return fmt.Errorf("reading presence: %w", err)
	}
	ps.apply(instance, p, number, &m)
	return nil
}

func (p *peer) dropMessage() {
	p.assembling, p.got = 0, 0
	p.pieces.Reset()
}

// apply takes a message. The lock is held.
func (ps *peers) apply(instance string, p *peer, number int64, m *message) {
	switch {
	case m.Begin:
		p.synced, p.asked = true, false
		p.unsettled = make(map[PresenceKey]struct{}, len(p.versions))
		for key := range p.versions {
			p.unsettled[key] = struct{}{}
		}
	case !p.synced || number != p.number+1:
		ps.early(m.Notices)
		ps.lost(instance, p)
		return
	}
	p.number = number
	ps.notices(p, m.Notices)
	for i := range m.Entries {
		e := &m.Entries[i]
		key := e.key()
		version, known := p.versions[key]
		delete(p.unsettled, key)
		switch {
		case e.Doc == nil && known:
			delete(p.versions, key)
			ps.tell(instance, key, nil)
		case e.Doc != nil && (!known || version != e.Version):
			p.versions[key] = e.Version
			ps.tell(instance, key, e.Doc)
		}
	}
	if m.End {
		for key := range p.unsettled {
			delete(p.versions, key)
			ps.tell(instance, key, nil)
		}
		p.unsettled = nil
	}
}

// tell gives the sink the presence of a client. The lock keeps the order.
func (ps *peers) tell(instance string, key PresenceKey, doc []byte) {
	ps.sink.Presence(Presence{PresenceKey: key, Instance: instance, Doc: doc})
}

// beat tells the others that this process lives, and counts their beats.
func (f *Fanout) beat(ctx context.Context) {
	ticks, stop := f.timing.ticks(f.cfg.PresenceInterval)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
			f.outbox.beat()
			f.presence.beat()
		}
	}
}

// onNotification takes a notification.
func (f *Fanout) onNotification(ctx context.Context, payload string) {
	if payload == "" {
		f.Look()
		return
	}
	kind, rest := payload[0], payload[1:]
	var err error
	switch kind {
	case kindCommits:
		var pairs []pair
		if err = json.Unmarshal([]byte(rest), &pairs); err != nil {
			break
		}
		for _, p := range pairs {
			f.watched.news(p.partition, p.seq)
		}
	case kindEpochs:
		err = f.onEpochs(rest)
	case kindAsk:
		if rest == "" || rest == f.outbox.instance {
			f.outbox.asked()
		}
	case kindBeat:
		err = f.presence.onBeat(rest)
	case kindPiece:
		err = f.presence.onPiece(rest)
	default:
		f.log.DebugContext(ctx, "a notification of an unknown kind", "kind", string(rune(kind)))
	}
	if err != nil {
		f.log.LogAttrs(ctx, slog.LevelWarn, "a notification that cannot be read", slog.Any("error", err))
	}
}
