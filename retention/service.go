package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
)

// Defaults of Config.
const (
	// DefaultBatchRows is what takes some tens of milliseconds to delete.
	DefaultBatchRows = 2000
	DefaultInterval  = time.Hour
)

// compactRows is how many changes one batch of compaction looks at. Nobody waits for it.
const compactRows = 200_000

// partitionsPerPage bounds one look for partitions.
const partitionsPerPage = 1000

// Config configures a Service. The zero value is usable.
type Config struct {
	// Policy says how much of a log is kept. One below the floors of §4.6 is taken as it
	// is: [Policy.Check] tells.
	Policy Policy
	// BatchRows is how many commits and changes, counted together, one batch of pruning
	// deletes, as long as a commit does not have more by itself; a push to the partition
	// waits for no more than that. Default 2000.
	BatchRows int
	// Interval is how often the schedule prunes, see [Service.Start]. Default 1 hour.
	// Negative: never.
	Interval time.Duration
	// Gate is shared with the other services of a server, which so learn of a rotation
	// before it returns. Default: those that listen hear of it right after, all others
	// with what they read next.
	Gate *gate.Gate
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
	// Events receives events.Pruned for every pruning of a partition. Default: nobody.
	Events events.Sink
	// Logger receives what the schedule does. Default: nothing is logged.
	Logger *slog.Logger
}

// Service prunes logs and rotates epochs. It is safe for concurrent use.
type Service struct {
	pool *pgxpool.Pool
	cfg  Config

	compactRows, page int
	// rest waits between two batches when somebody waits for the partition.
	rest func(ctx context.Context, d time.Duration)
	// ticks returns a channel of ticks and what stops them.
	ticks func(every time.Duration) (<-chan time.Time, func())

	mu   sync.Mutex
	stop context.CancelFunc // of the schedule; nil: it is not running
	done chan struct{}      // closed when it has ended
}

// New returns a service over the caller's pool, which it never closes. It does no I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Service, error) {
	switch {
	case pool == nil:
		return nil, errors.New("retention: a pool is required")
	case cfg.BatchRows < 0 || cfg.BatchRows > 1_000_000:
		return nil, fmt.Errorf("retention: Config.BatchRows is %d; it must be 1 to 1,000,000, or 0 for the default of %d", cfg.BatchRows, DefaultBatchRows)
	case cfg.Interval > 0 && cfg.Interval < time.Second:
		return nil, fmt.Errorf("retention: Config.Interval is %v; it must be at least a second, or 0 for the default of %v", cfg.Interval, DefaultInterval)
	}
	if err := cfg.Policy.valid(); err != nil {
		return nil, fmt.Errorf("retention: Config.Policy: %w", err)
	}
	cfg.Policy = cfg.Policy.withDefaults()
	cfg.BatchRows = cmp.Or(cfg.BatchRows, DefaultBatchRows)
	cfg.Interval = cmp.Or(cfg.Interval, DefaultInterval)
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Events = events.Safe(cfg.Events, cfg.Logger)
	return &Service{pool: pool, cfg: cfg, compactRows: compactRows, page: partitionsPerPage, rest: rest, ticks: newTicks}, nil
}

// Statements that write, each in a transaction of its own.
var (
	pruneLog     = pgtx.NewStatement(db.RetentionPruneLog)
	compactLog   = pgtx.NewStatement(db.RetentionCompactLog)
	rotateEpoch  = pgtx.NewStatement(db.RetentionRotateEpoch)
	rotateEpochs = pgtx.NewStatement(db.RetentionRotateEpochs)
)

// call runs a statement of one row in a transaction, in one round trip, whatever the
// isolation level of the session is.
func call[T any](ctx context.Context, pool *pgxpool.Pool, st pgtx.Statement, args ...any) (row T, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return row, fmt.Errorf("waiting for a connection: %w", err)
	}
	defer pgtx.Finish(ctx, conn)
	session := pgtx.On(conn.Conn())
	if err := session.Prepare(ctx, pgtx.Begin, st, pgtx.Commit); err != nil {
		return row, err
	}
	batch := &pgx.Batch{}
	session.Queue(batch, pgtx.Begin)
	session.Queue(batch, st, args...)
	session.Queue(batch, pgtx.Commit)
	results := conn.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }() // a failure shows in what is read
	if _, err := results.Exec(); err != nil {
		return row, fmt.Errorf("beginning: %w", err)
	}
	rows, err := results.Query()
	if err != nil {
		return row, err //nolint:wrapcheck // the caller says what was done
	}
	if row, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[T]); err != nil {
		return row, err //nolint:wrapcheck // likewise
	}
	if _, err := results.Exec(); err != nil {
		return row, fmt.Errorf("committing: %w", err)
	}
	return row, nil
}
