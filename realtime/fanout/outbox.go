package fanout

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtx"
)

const (
	// maxCommitPayloads is up to how many notifications name commits at a time, and
	// maxPendingCommits up to how many partitions are remembered; above, everybody looks.
	maxCommitPayloads = 16
	maxPendingCommits = 4096
	// maxPendingPresence is up to how many keys with news are remembered; above,
	// everything is told again.
	maxPendingPresence = 16384
	// maxDocumentBytes bounds a document; hosts bound it lower (§8.6.2).
	maxDocumentBytes = 1 << 20
	// classData is the class of the SQLSTATEs about data that cannot be.
	classData = "22"
	// maxMessageBytes is about how many bytes of documents share a message.
	maxMessageBytes = 256 << 10
)

// document is what a client of this process published.
type document struct {
	doc     []byte
	version int64
}

// outbox is what this process has to tell the others, and how much of it they were told.
type outbox struct {
	instance string
	presence bool // presence leaves the process
	wake     chan struct{}

	mu        sync.Mutex
	commits   map[string]int64 // newest seq by partition
	look      bool             // everybody is to look
	documents map[PresenceKey]document
	version   int64
	changed   map[PresenceKey]struct{} // documents to tell of
	announce  bool                     // tell everything
	announced []PresenceKey            // what remains of doing so
	asks      map[string]struct{}      // instances to ask; "" for all
	beating   bool                     // tell that this process lives

	tell       []*told // notices to tell, ascending by version
	remembered []*told // those that are told again to who asks, likewise

	number int64 // of the newest message
}

func newOutbox(instance string, presence bool) outbox {
	return outbox{
		instance: instance, presence: presence, wake: make(chan struct{}, 1),
		commits: map[string]int64{}, documents: map[PresenceKey]document{},
		changed: map[PresenceKey]struct{}{}, asks: map[string]struct{}{},
	}
}

func (o *outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outbox) committed(partition string, seq int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.commits) >= maxPendingCommits {
		clear(o.commits)
		o.look = true
	}
	if !o.look {
		o.commits[partition] = max(o.commits[partition], seq)
	}
	o.signal()
}

// PublishPresence tells the other processes of the newest document of a client of this
// process on a scope key, or with nil that it left the key. doc is kept and must not
// change; it is a JSON object of at most 1 MiB. It never waits, and of documents that follow each other quickly only the last
// is told. What is published lives until it is left or the Fanout is stopped.
func (f *Fanout) PublishPresence(key PresenceKey, doc []byte) {
	o := &f.outbox
	if !o.presence {
		return
	}
	if doc != nil && (len(doc) > maxDocumentBytes || !utf8.Valid(doc) || !json.Valid(doc)) {
		f.log.Error("a presence document that cannot be told to other processes", "partition", key.Partition, "bytes", len(doc))
		doc = nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if doc == nil {
		if _, ok := o.documents[key]; !ok {
			return
		}
		delete(o.documents, key)
	} else {
		o.version++
		o.documents[key] = document{doc: doc, version: o.version}
	}
	if len(o.changed) >= maxPendingPresence {
		clear(o.changed)
		o.announce = true
	}
	if !o.announce {
		o.changed[key] = struct{}{}
	}
	o.signal()
}

// ask asks an instance, or all with "", to tell everything.
func (o *outbox) ask(instance string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asks[instance] = struct{}{}
	o.signal()
}

// asked answers somebody who asked.
func (o *outbox) asked() {
	o.mu.Lock()
	defer o.mu.Unlock()
	// Who never told anything has nothing to take back.
	if o.number == 0 && len(o.documents) == 0 {
		return
	}
	o.announce = true
	o.signal()
}

// beat tells that the process lives, if somebody may know a client of it.
func (o *outbox) beat() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forget()
	if len(o.documents) > 0 {
		o.beating = true
		o.signal()
	}
}

// parcel is what there is to tell.
type parcel struct {
	look    bool
	commits map[string]int64
	asks    map[string]struct{}
	message *message
	number  int64 // of the message, or of the one before
	beating bool
}

// take returns what to tell next. more says that there is more than that.
func (o *outbox) take() (p parcel, more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p = parcel{look: o.look, commits: o.commits, asks: o.asks, beating: o.beating, message: o.takeMessage()}
	o.look, o.beating = false, false
	o.commits, o.asks = map[string]int64{}, map[string]struct{}{}
	if p.message != nil {
		o.number++
	}
	p.number = o.number
	return p, len(o.changed) > 0 || len(o.announced) > 0 || o.announce || len(o.tell) > 0
}

// payloads returns the notifications that carry it.
func (p *parcel) payloads(instance string) ([]string, error) {
	var all []string
	if p.look {
		all = append(all, "")
	} else {
		pairs := make([]pair, 0, len(p.commits))
		for name, seq := range p.commits {
			pairs = append(pairs, pair{name, seq})
		}
		all = append(all, commitPayloads(pairs, maxCommitPayloads)...)
	}
	if _, everybody := p.asks[""]; everybody {
		all = append(all, askPayload(""))
	} else {
		for asked := range p.asks {
			all = append(all, askPayload(asked))
		}
	}
	var err error
	if p.message != nil {
		var cut []string
		cut, err = pieces(instance, p.number, p.message)
		all = append(all, cut...)
	}
	if p.beating {
		all = append(all, beatPayload(instance, p.number))
	}
	return all, err
}

// takeMessage returns the next message about presence, nil when there is nothing to tell.
// The lock is held.
func (o *outbox) takeMessage() *message {
	var m message
	size := 0
	add := func(key PresenceKey) {
		d, ok := o.documents[key]
		delete(o.changed, key)
		e := entry{Partition: key.Partition, ScopeKey: key.ScopeKey, ActorID: key.ActorID, ClientID: key.ClientID}
		if ok {
			e.Version, e.Doc = d.version, d.doc
		}
		size += 100 + len(e.Doc) + len(e.Partition) + len(e.ScopeKey) + len(e.ActorID) + len(e.ClientID)
		m.Entries = append(m.Entries, e)
	}
	switch {
	case o.announce:
		o.announce, m.Begin = false, true
		o.announced = slices.Collect(maps.Keys(o.documents))
		// All of it is told anyway, and what left is not.
		clear(o.changed)
		o.retell()
	case len(o.announced) == 0 && len(o.changed) == 0 && len(o.tell) == 0:
		return nil
	}
	size = o.takeNotices(&m)
	announcing := m.Begin || len(o.announced) > 0
	for len(o.announced) > 0 && size < maxMessageBytes {
		key := o.announced[len(o.announced)-1]
		o.announced = o.announced[:len(o.announced)-1]
		if _, ok := o.documents[key]; ok {
			add(key)
		}
	}
	m.End = announcing && len(o.announced) == 0
	for key := range o.changed {
		if size >= maxMessageBytes {
			break
		}
		add(key)
	}
	return &m
}

// send tells the others, until ctx ends.
func (f *Fanout) send(ctx context.Context) {
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.outbox.wake:
		}
		next, more := f.outbox.take()
		if more {
			f.outbox.signal()
		}
		payloads, err := next.payloads(f.outbox.instance)
		if err != nil {
			// The others miss its number and ask.
			f.log.ErrorContext(ctx, "cannot tell other processes of presence", "error", err)
		}
		// Whether the others heard of it is not known when this fails, so it is sent again:
		// they know what they have heard already.
		for len(payloads) > 0 {
			err := f.notify(ctx, payloads)
			if err == nil {
				failures = 0
				break
			}
			if ctx.Err() != nil {
				return
			}
			if strings.HasPrefix(pgtx.SQLState(err), classData) {
				// It would be refused for ever, and everything else would wait behind it.
				f.log.ErrorContext(ctx, "the database refuses a notification", "error", err)
				break
			}
			failures++
			f.log.WarnContext(ctx, "cannot notify other processes, and will try again", "failures", failures, "error", err)
			if !f.timing.wait(ctx, backoff(failures)) {
				return
			}
		}
		if !f.timing.wait(ctx, f.cfg.Coalesce) {
			return
		}
	}
}

func (f *Fanout) notify(ctx context.Context, payloads []string) error {
	ctx, cancel := context.WithTimeout(ctx, queryWithin)
	defer cancel()
	err := f.queries.RealtimeNotify(ctx, db.RealtimeNotifyParams{Payloads: payloads})
	if err == nil {
		events.Emit(ctx, f.cfg.Events, events.FanoutNotified{Notifications: len(payloads)})
	}
	return err
}

// sayGoodbye tells the others that no client is left. Who does not hear it finds out by
// the missing beats.
func (f *Fanout) sayGoodbye(ctx context.Context) {
	o := &f.outbox
	o.mu.Lock()
	clear(o.documents)
	clear(o.changed)
	clear(o.asks)
	o.announced, o.beating = nil, false
	o.announce = o.number > 0
	o.mu.Unlock()
	next, _ := o.take()
	payloads, err := next.payloads(o.instance)
	if err != nil || len(payloads) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, closeWithin)
	defer cancel()
	if err := f.notify(ctx, payloads); err != nil {
		f.log.WarnContext(ctx, "cannot tell other processes that this one stops", "error", err)
	}
}
