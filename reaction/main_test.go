package reaction_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/reaction"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	partition = "p1"
	lease     = 10 * time.Second
)

// clock is a clock that stands still until it is told.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bundle is a database of one test and what it sees of it.
type bundle struct {
	db *pgtest.DB
	// partitions are those that runners work on; nil: all.
	partitions []string
	partition  string
	clock      *clock
	ring       *events.Ring
	seq        int64 // newest commit
}

func setup(t testing.TB, change ...func(*pgtest.Options)) *bundle {
	t.Helper()
	var options pgtest.Options
	for _, f := range change {
		f(&options)
	}
	return &bundle{
		db: pgtest.New(t, options), partition: partition, clock: &clock{now: time.UnixMilli(1_750_000_000_000)}, ring: events.NewRing(100_000),
	}
}

// beside returns a bundle that works in a partition of its own of the same database.
func (b *bundle) beside(partition string) *bundle {
	return &bundle{
		db: b.db, partition: partition, partitions: []string{partition},
		clock: &clock{now: b.clock.Now()}, ring: events.NewRing(1000),
	}
}

// handle is a function as the handler of version 1.
func handle(f func(ctx context.Context, d *reaction.Delivery) error) reaction.Handler {
	return reaction.Handler{Versions: []int32{1}, Handle: f}
}

// fails is a handler that returns an error.
func fails(err error) reaction.Handler {
	return handle(func(context.Context, *reaction.Delivery) error { return err })
}

// runner returns a runner of the type "mail".
func (b *bundle) runner(t testing.TB, mail reaction.Handler, change ...func(*reaction.Config)) *reaction.Runner {
	t.Helper()
	cfg := reaction.Config{
		Handlers: map[string]reaction.Handler{"mail": mail}, Lease: lease, Clock: b.clock.Now, Events: b.ring,
		Partitions: b.partitions,
	}
	for _, f := range change {
		f(&cfg)
	}
	r, err := reaction.New(b.db.Pool, cfg)
	require.NoError(t, err)
	return r
}

// mail is a plan of the type "mail".
func mail(key string) reaction.Plan { return reaction.Plan{Key: key, Type: "mail", Version: 1} }

// queue stores the reactions of one commit and returns their idempotency keys.
func (b *bundle) queue(t testing.TB, plans ...reaction.Plan) []string {
	t.Helper()
	return b.queueIn(t, b.partition, plans...)
}

func (b *bundle) queueIn(t testing.TB, partition string, plans ...reaction.Plan) []string {
	t.Helper()
	b.seq++
	records, err := reaction.Normalize(partition, "client", "commit-"+strconv.FormatInt(b.seq, 10), plans)
	require.NoError(t, err)
	keys := make([]string, len(records))
	for i := range records {
		records[i].CommitSeq = b.seq
		keys[i] = records[i].IdempotencyKey
	}
	require.Equal(t, len(records), enqueue(t, b.db.Pool, b.clock.Now(), partition, records))
	return keys
}

// enqueue stores records as a push does and returns how many were new.
func enqueue(t testing.TB, q reaction.Querier, now time.Time, partition string, records []reaction.Record) int {
	t.Helper()
	var inserted int
	require.NoError(t, q.QueryRow(t.Context(), db.ReactionEnqueue, reaction.InsertParams(partition, now, records)...).Scan(&inserted))
	return inserted
}

// run makes one pass.
func run(t testing.TB, r *reaction.Runner) reaction.Result {
	t.Helper()
	result, err := r.RunOnce(t.Context())
	require.NoError(t, err)
	return result
}

// dead queues one reaction and lets it become a dead letter.
func (b *bundle) dead(t testing.TB, plan reaction.Plan) string {
	t.Helper()
	key := b.queue(t, plan)[0]
	r := b.runner(t, fails(&reaction.PermanentError{Code: "mail.bounced", Details: json.RawMessage(`{"why": 1}`)}))
	require.Equal(t, reaction.Result{Claimed: 1, DeadLettered: 1}, run(t, r))
	return key
}

// list returns the reactions of a partition in a state, by key.
func (b *bundle) list(t testing.TB, state reaction.State) map[string]reaction.Reaction {
	t.Helper()
	page, err := reaction.List(t.Context(), b.db.Pool, b.partition, reaction.ListOptions{State: state, Limit: reaction.MaxListLimit})
	require.NoError(t, err)
	require.Empty(t, page.Next)
	found := map[string]reaction.Reaction{}
	for _, r := range page.Reactions {
		found[r.Key] = r
	}
	return found
}

// states counts reactions by state.
func (b *bundle) states(t testing.TB) map[string]int {
	t.Helper()
	rows, err := b.db.Pool.Query(t.Context(), `select state, count(*)::int from syncpg.sync_reactions where $1::text[] is null or partition = any($1) group by state`, b.partitions)
	require.NoError(t, err)
	counts := map[string]int{}
	var state string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&state, &n}, func() error { counts[state] = n; return nil })
	require.NoError(t, err)
	return counts
}

// happened returns the names of the events about reactions, oldest first.
func (b *bundle) happened() []string {
	var names []string
	for _, r := range b.ring.Query(events.Filter{}) {
		names = append([]string{r.Event.EventName()}, names...)
	}
	return names
}

func keysOf(prefix string, n int) []reaction.Plan {
	plans := make([]reaction.Plan, n)
	for i := range plans {
		plans[i] = mail(fmt.Sprint(prefix, i))
	}
	return plans
}
