// Package gate is the entry gate of a request: whether the client's log epoch is
// the partition's (§2.1). It remembers epochs per process, so that a request
// whose epoch is right pays no round trip for it; the remembered value only lets a
// request in or sends it away early, and the reads that follow decide.
package gate

import (
	"container/list"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

// Epoch is the identity of a partition's log.
type Epoch struct {
	LogEpoch string
	// Required says that wire version 1, which carries no epoch, is refused.
	Required bool
}

const (
	// refreshAfter is how old a remembered epoch may be. It bounds the age of the registry's
	// last-seen time, and where nobody listens for notifications also how long a rotation
	// goes unnoticed by requests that do nothing else.
	refreshAfter = time.Minute
	// maxRemembered bounds the memory of a process that serves many partitions.
	maxRemembered = 65536
)

type entry struct {
	partition string
	epoch     Epoch
	at        time.Time
}

// entryOf returns what an element of Gate.recent holds.
func entryOf(el *list.Element) *entry {
	e, _ := el.Value.(*entry)
	return e
}

// Gate remembers the epochs of the partitions a process serves. It is safe for
// concurrent use.
type Gate struct {
	pool  *pgxpool.Pool
	clock func() time.Time

	mu     sync.Mutex
	forgot uint64 // how often something was forgotten
	byName map[string]*list.Element
	recent *list.List // of *entry, most recent first
}

// New returns a gate over a pool. A nil clock is time.Now.
func New(pool *pgxpool.Pool, clock func() time.Time) *Gate {
	if clock == nil {
		clock = time.Now
	}
	return &Gate{pool: pool, clock: clock, byName: map[string]*list.Element{}, recent: list.New()}
}

// Enter returns the epoch of a partition. It costs one round trip when the
// partition is not remembered or was last read over a minute ago; then it also
// creates a partition that is new and refreshes its last-seen time. Error: sync.schema_not_ready
// for a new one while the schema is moved, besides what the database said.
func (g *Gate) Enter(ctx context.Context, partition string) (Epoch, error) {
	now := g.clock()
	e, forgot, ok := g.recall(partition, now)
	if ok {
		return e, nil
	}
	row, err := db.New(g.pool).PartitionOpen(ctx, db.PartitionOpenParams{
		Partition: partition, LogEpoch: NewLogEpoch(), Now: now.UnixMilli(),
	})
	if err != nil {
		return Epoch{}, fmt.Errorf("opening the partition: %w", err)
	}
	if row.LogEpoch == "" {
		return Epoch{}, Moving()
	}
	e = Epoch{LogEpoch: row.LogEpoch, Required: row.EpochRequired}
	g.remember(partition, e, now, forgot)
	return e, nil
}

// Note takes what another read of the database said of a partition. When that is not what
// is remembered, nothing is any more: either of the two may be the older one.
func (g *Gate) Note(partition string, e Epoch) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if el, ok := g.byName[partition]; ok && entryOf(el).epoch != e {
		g.drop(el)
	}
}

// Forget drops what is remembered of a partition.
func (g *Gate) Forget(partition string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgot++ // also what is being read
	if el, ok := g.byName[partition]; ok {
		g.drop(el)
	}
}

// ForgetAll drops what is remembered.
func (g *Gate) ForgetAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgot++
	g.recent.Init()
	clear(g.byName)
}

// recall returns what is remembered of a partition, or else how often something was
// forgotten, for remember.
func (g *Gate) recall(partition string, now time.Time) (_ Epoch, forgot uint64, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	el, ok := g.byName[partition]
	if !ok {
		return Epoch{}, g.forgot, false
	}
	e := entryOf(el)
	if age := now.Sub(e.at); age < 0 || age >= refreshAfter {
		return Epoch{}, g.forgot, false
	}
	g.recent.MoveToFront(el)
	return e.epoch, g.forgot, true
}

// remember keeps what was read, unless something was forgotten since the recall: the read
// may be of before that.
func (g *Gate) remember(partition string, epoch Epoch, now time.Time, forgot uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.forgot != forgot {
		return
	}
	if el, ok := g.byName[partition]; ok {
		*entryOf(el) = entry{partition, epoch, now}
		g.recent.MoveToFront(el)
		return
	}
	g.byName[partition] = g.recent.PushFront(&entry{partition, epoch, now})
	if g.recent.Len() > maxRemembered {
		g.drop(g.recent.Back())
	}
}

// drop forgets an entry. The lock is held.
func (g *Gate) drop(el *list.Element) {
	g.recent.Remove(el)
	delete(g.byName, entryOf(el).partition)
}

// NewLogEpoch proposes an epoch nobody can guess.
func NewLogEpoch() string {
	var b [18]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// Decide applies §2.1 to a request: reset when it carries no epoch or another
// one; sync.client_wire_unsupported for wire version 1 on a partition whose epoch
// has been rotated.
func Decide(wire ssp2.WireVersion, logEpoch *string, e Epoch) (reset bool, err error) {
	if wire == ssp2.WireV1 {
		if e.Required {
			return false, ssp2.Errorf(ssp2.CodeClientWireUnsupported, "this partition's log was replaced; wire version 1 cannot tell, so it is no longer served here")
		}
		return false, nil
	}
	return logEpoch == nil || *logEpoch != e.LogEpoch, nil
}

// Moving is what a push, or who comes to a new partition, is told while the schema is being moved to another version.
func Moving() error {
	return &ssp2.Error{
		Code:    ssp2.CodeSchemaNotReady,
		Message: "the database is being moved to another schema version",
		Details: `{"moving":true}`,
	}
}

// Moved turns the error of a statement that names objects of the schema which are not there
// into sync.schema_not_ready: another version was installed, of which the stored version
// would tell if it had been read first.
func Moved(err error) error {
	switch pgtx.SQLState(err) {
	case "42883", "42P01", "42703": // undefined function, table, column
		return &ssp2.Error{Code: ssp2.CodeSchemaNotReady, Message: "the database has another schema version than this server", Err: err}
	}
	return err
}

// Ready applies the serve gate: the installed schema version must be the running
// one and none of its projections may be missing. The error is
// sync.schema_not_ready and its details name what is.
func Ready(running, installed int32, pending string) error {
	switch {
	case installed != running:
		return &ssp2.Error{
			Code:    ssp2.CodeSchemaNotReady,
			Message: "the database has another schema version than this server",
			Details: fmt.Sprintf(`{"installedVersion":%d,"runningVersion":%d}`, installed, running),
		}
	case pending != "":
		details := append([]byte(`{"projection":`), ssp2.AppendJSONString(nil, pending)...)
		return &ssp2.Error{
			Code:    ssp2.CodeSchemaNotReady,
			Message: "a projection of this schema version is not activated yet",
			Details: string(append(details, '}')),
		}
	}
	return nil
}
