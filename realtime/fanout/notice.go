package fanout

import (
	"cmp"
	"slices"
	"time"
)

const (
	// maxNotices is up to how many notices wait to be told, and are remembered.
	maxNotices = 1024
	// rememberBeats is for how many beats a notice is remembered: ten minutes at the
	// default interval.
	rememberBeats = 60
)

// Notice is something that the processes which a client may be connected to are to know
// at once. It is in no log.
type Notice struct {
	Partition string
	// Actor: the connections of this actor are to end, if they are older than At. Empty,
	// with a Partition: the notice is about Client. Empty without: the notices were too
	// many, and every connection that is older than At is to end.
	Actor string
	// Client: deltas for it are not to be in another schema version than SchemaVersion,
	// which it pulls in.
	Client        string
	SchemaVersion int32
	// At is when it was told, on the clock of this process. It may be late, by what it took
	// to arrive, and is never early.
	At time.Time
}

// told is a notice of this process.
type told struct {
	Notice
	version int64
	beats   int  // since
	kept    bool // it is remembered
}

// notice is how a [Notice] travels: in a message about presence, so that it is numbered as
// those are, and asked for again when it is missed.
type notice struct {
	Partition     string `json:"p,omitempty"`
	Actor         string `json:"a,omitempty"`
	Client        string `json:"c,omitempty"`
	SchemaVersion int32  `json:"s,omitempty"`
	Version       int64  `json:"v"` // ascending, per instance
	AgoMs         int64  `json:"ago,omitempty"`
}

// Notify tells the other processes. It never waits. A process that cannot be reached at the
// moment hears of notices about actors later, for about ten minutes. Without a listener
// nothing leaves the process.
func (f *Fanout) Notify(n Notice) {
	o := &f.outbox
	if !o.presence {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.version++
	t := &told{Notice: n, version: o.version}
	if len(o.tell) >= maxNotices {
		if n.Actor == "" {
			return // of clients that change their version in masses, some are asked too late
		}
		t.Notice = Notice{At: n.At}
		o.tell, o.remembered = nil, nil
	}
	o.tell = append(o.tell, t)
	if n.Actor != "" {
		t.kept = true
		if o.remembered = append(o.remembered, t); len(o.remembered) > maxNotices {
			o.remembered = o.remembered[1:]
		}
	}
	o.signal()
}

// retell makes all that is remembered be told again. The lock is held.
func (o *outbox) retell() {
	o.tell = slices.DeleteFunc(o.tell, func(t *told) bool { return t.kept })
	o.tell = append(o.tell, o.remembered...)
	slices.SortFunc(o.tell, func(a, b *told) int { return cmp.Compare(a.version, b.version) })
}

// forget drops what has been remembered for long enough. The lock is held.
func (o *outbox) forget() {
	for _, t := range o.remembered {
		t.beats++
	}
	for len(o.remembered) > 0 && o.remembered[0].beats >= rememberBeats {
		o.remembered = o.remembered[1:]
	}
}

// takeNotices adds what is to be told to a message. The lock is held.
func (o *outbox) takeNotices(m *message) (size int) {
	for len(o.tell) > 0 && size < maxMessageBytes {
		t := o.tell[0]
		o.tell = o.tell[1:]
		m.Notices = append(m.Notices, notice{
			t.Partition, t.Actor, t.Client, t.SchemaVersion, t.version, time.Since(t.At).Milliseconds(),
		})
		size += 100 + len(t.Partition) + len(t.Actor) + len(t.Client)
	}
	return size
}

// early gives the sink what a message has that others should have come before. They are not
// waited for: what is missing is told again, and so is this. The lock is held.
func (ps *peers) early(all []notice) { ps.notices(new(peer), all) }

// notices gives the sink what it was not told yet. The lock is held.
func (ps *peers) notices(p *peer, all []notice) {
	for _, n := range all {
		if n.Version <= p.noticed {
			continue
		}
		p.noticed = n.Version
		ps.sink.Notice(Notice{
			Partition: n.Partition, Actor: n.Actor, Client: n.Client, SchemaVersion: n.SchemaVersion,
			At: time.Now().Add(-time.Duration(n.AgoMs) * time.Millisecond),
		})
	}
}
