package fanout

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
)

// Defaults of Config.
const (
	DefaultPollInterval     = 5 * time.Second
	DefaultPresenceInterval = 10 * time.Second
	DefaultCoalesce         = 3 * time.Millisecond
	DefaultMaxBehind        = 1000
	DefaultMaxCommitBytes   = 4 << 20
	DefaultReaders          = 2
)

const (
	// maxReadCommits bounds the commits of one partition in one read, and maxReadBytes
	// the bytes of a read.
	maxReadCommits = 256
	maxReadBytes   = 8 << 20
	// queryWithin is how long one statement may take.
	queryWithin = 30 * time.Second
	// pingWithin is how long the listener's connection may take to answer.
	pingWithin = 10 * time.Second
	// closeWithin is how long saying good-bye may take.
	closeWithin = 2 * time.Second

	minBackoff = 50 * time.Millisecond
	maxBackoff = 5 * time.Second
)

var (
	// ErrStarted says that a Fanout is started already.
	ErrStarted = errors.New("fanout: started already")
	// ErrClosed says that a Fanout is stopped.
	ErrClosed = errors.New("fanout: stopped")
)

// Config configures a Fanout. Only Sink is required.
type Config struct {
	// Sink receives what happened.
	Sink Sink
	// SchemaVersion is the version whose rows the sink can read. While another one is
	// installed no commits are given: Reset says that there are some. Default: any.
	SchemaVersion int32
	// Listen opens the connection that notifications arrive on. It is the Fanout's own,
	// and is opened again when it breaks. It must not lead through a pooler in transaction
	// mode. See [FromPool]. Nil: nothing is listened to; commits of other processes arrive
	// with the poll, and presence does not leave the process.
	Listen func(ctx context.Context) (*pgx.Conn, error)
	// PollInterval is how often the watched partitions are looked at for commits that
	// nobody told of. Default 5 seconds.
	PollInterval time.Duration
	// PresenceInterval is how often a process with presence says that it is alive, and the
	// clients of one that was not heard of for four of these have left. It must be the same
	// in all processes. Default 10 seconds.
	PresenceInterval time.Duration
	// Coalesce is the least time between two notifications; what happens in between
	// shares one. Default 3 milliseconds.
	Coalesce time.Duration
	// MaxBehind is how many commits of a partition are caught up with; when there are
	// more they are lost. Default 1000.
	MaxBehind int64
	// MaxCommitBytes is up to how many bytes of payload a commit is given with its
	// payloads. Default 4 MiB.
	MaxCommitBytes int64
	// Readers is how many reads of the log, of different partitions, may be under way at a
	// time, each with a connection of the pool. Default 2.
	Readers int
	// Events gets events.FanoutRead and its like. Default: nobody.
	Events events.Sink
	// Logger receives what goes wrong. Default: nothing is logged.
	Logger *slog.Logger
}

// Fanout is the part of one process. It is safe for concurrent use.
type Fanout struct {
	queries *db.Queries
	cfg     Config
	log     *slog.Logger
	timing  timing

	pingWithin time.Duration

	watched  watched
	outbox   outbox
	presence peers
	looks    chan struct{} // has a token when the watched partitions are to be looked at

	life    sync.Mutex
	cancel  context.CancelFunc // nil: not started
	running sync.WaitGroup
	ended   chan struct{} // closed when what Start started has ended
}

// timing is where time comes from.
type timing struct {
	ticks func(every time.Duration) (ticks <-chan time.Time, stop func())
	pings func(every time.Duration) (ticks <-chan time.Time, stop func()) // of the listener
	after func(d time.Duration) (elapsed <-chan time.Time, stop func())
}

func realTiming() timing {
	ticks := func(every time.Duration) (<-chan time.Time, func()) {
		t := time.NewTicker(every)
		return t.C, t.Stop
	}
	return timing{
		ticks: ticks, pings: ticks,
		after: func(d time.Duration) (<-chan time.Time, func()) {
			t := time.NewTimer(d)
			return t.C, func() { t.Stop() }
		},
	}
}

// wait returns when d has elapsed, or false when ctx ends first.
func (t timing) wait(ctx context.Context, d time.Duration) bool {
	elapsed, stop := t.after(d)
	defer stop()
	select {
	case <-ctx.Done():
		return false
	case <-elapsed:
		return true
	}
}

// New returns a Fanout over the caller's pool, which it never closes. It does no I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Fanout, error) {
	switch {
	case pool == nil:
		return nil, errors.New("fanout: a pool is required")
	case cfg.Sink == nil:
		return nil, errors.New("fanout: Config.Sink is required")
	case cfg.MaxBehind < 0 || cfg.MaxCommitBytes < 0 || cfg.Readers < 0:
		return nil, errors.New("fanout: Config.MaxBehind, MaxCommitBytes and Readers must be positive, or 0 for their defaults")
	}
	for _, d := range []struct {
		field    string
		value    *time.Duration
		standard time.Duration
	}{
		{"PollInterval", &cfg.PollInterval, DefaultPollInterval},
		{"PresenceInterval", &cfg.PresenceInterval, DefaultPresenceInterval},
		{"Coalesce", &cfg.Coalesce, DefaultCoalesce},
	} {
		*d.value = cmp.Or(*d.value, d.standard)
		if *d.value < time.Millisecond {
			return nil, fmt.Errorf("fanout: Config.%s is %v; it must be at least a millisecond, or 0 for the default of %v", d.field, *d.value, d.standard)
		}
	}
	cfg.MaxBehind = cmp.Or(cfg.MaxBehind, DefaultMaxBehind)
	cfg.MaxCommitBytes = cmp.Or(cfg.MaxCommitBytes, DefaultMaxCommitBytes)
	cfg.Readers = cmp.Or(cfg.Readers, DefaultReaders)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Events = events.Safe(cfg.Events, cfg.Logger)
	f := &Fanout{
		queries: db.New(pool), cfg: cfg, log: cfg.Logger, timing: realTiming(), pingWithin: pingWithin,
		watched: newWatched(),
		outbox:  newOutbox(rand.Text(), cfg.Listen != nil),
		looks:   make(chan struct{}, 1),
	}
	f.presence = newPeers(f.outbox.instance, cfg.Sink, f.outbox.ask)
	return f, nil
}

// ApplicationName is what pg_stat_activity calls the session of a listener from [FromPool],
// unless the pool gives its sessions a name.
const ApplicationName = "syncpg listener"

// FromPool returns a Config.Listen that connects as the connections of a pool do.
func FromPool(pool *pgxpool.Pool) func(ctx context.Context) (*pgx.Conn, error) {
	return func(ctx context.Context) (*pgx.Conn, error) {
		cfg := pool.Config()
		connConfig := cfg.ConnConfig.Copy()
		connConfig.OnNotification = nil // else they would go there
		if connConfig.RuntimeParams["application_name"] == "" {
			connConfig.RuntimeParams["application_name"] = ApplicationName
		}
		if cfg.BeforeConnect != nil {
			if err := cfg.BeforeConnect(ctx, connConfig); err != nil {
				return nil, fmt.Errorf("before connecting: %w", err)
			}
		}
		conn, err := pgx.ConnectConfig(ctx, connConfig)
		if err != nil {
			return nil, err //nolint:wrapcheck // It says that it is about connecting; the caller adds the rest.
		}
		return conn, nil
	}
}

// Start starts reading, notifying and listening, and returns. It waits for nothing: what
// the database does not answer is tried again until it does. The end of ctx ends nothing
// of it. The error is [ErrStarted].
func (f *Fanout) Start(ctx context.Context) error {
	f.life.Lock()
	defer f.life.Unlock()
	if f.cancel != nil {
		return ErrStarted
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f.cancel, f.ended = cancel, make(chan struct{})
	f.watched.open()
	for range f.cfg.Readers {
		f.running.Go(func() { f.read(ctx) })
	}
	f.running.Go(func() { f.poll(ctx) })
	f.running.Go(func() { f.send(ctx) })
	if f.cfg.Listen != nil {
		f.running.Go(func() { f.listen(ctx) })
		f.running.Go(func() { f.beat(ctx) })
	}
	go func(ended chan struct{}) {
		f.running.Wait()
		close(ended)
	}(f.ended)
	return nil
}

// Stop ends what Start started: what was not delivered yet is not, watched partitions
// are not any more, the presence of other processes is forgotten, and they are told that the
// clients of this one left. It waits for all of it, or until ctx ends. Stopping what was not
// started does nothing.
func (f *Fanout) Stop(ctx context.Context) error {
	f.life.Lock()
	defer f.life.Unlock()
	if f.cancel == nil {
		return nil
	}
	f.cancel()
	select {
	case <-f.ended:
	case <-ctx.Done():
		return fmt.Errorf("fanout: stop: %w", ctx.Err())
	}
	f.cancel = nil
	f.watched.close()
	f.presence.close()
	f.sayGoodbye(ctx)
	return nil
}

// Committed says that commits of this process, up to seq, are committed. It never waits.
// For pushsvc.Config.Committed.
func (f *Fanout) Committed(partition string, seq int64) {
	f.watched.news(partition, seq)
	f.outbox.committed(partition, seq)
}

// Look makes the watched partitions be looked at now. It never waits.
func (f *Fanout) Look() {
	select {
	case f.looks <- struct{}{}:
	default:
	}
}

// backoff is how long to wait after a number of failures in a row, with a jitter of half
// of it.
func backoff(failures int) time.Duration {
	d := min(minBackoff<<min(failures-1, 16), maxBackoff)
	var b [1]byte
	_, _ = rand.Read(b[:])
	return d/2 + d/2*time.Duration(b[0])/255
}
