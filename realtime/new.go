package realtime

import (
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/realtime/fanout"
)

// New returns a hub over the caller's pool, which it never closes. It does no I/O and
// accepts no connection before Start.
func New(pool *pgxpool.Pool, cfg Config) (*Hub, error) {
	if err := cfg.check(pool); err != nil {
		return nil, err
	}
	h := newHub(cfg, db.New(pool), nil)
	listen := cfg.Listen
	if listen == nil && !cfg.PollOnly {
		listen = fanout.FromPool(pool)
	}
	fan, err := fanout.New(pool, fanout.Config{
		Sink: h, SchemaVersion: cfg.Schema.Version, Listen: listen, PollInterval: cfg.PollInterval, Events: cfg.Events,
		Logger: cfg.Logger, MaxCommitBytes: int64(cfg.MaxDeltaBytes),
	})
	if err != nil {
		return nil, fmt.Errorf("realtime: %w", err)
	}
	h.fan = fan
	return h, nil
}
