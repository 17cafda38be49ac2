package realtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/schema"
)

// Defaults of [Options].
const (
	DefaultHeartbeat               = 30 * time.Second
	DefaultMaxConnections          = 50_000
	DefaultMaxConnectionsPerClient = 8
	DefaultMaxDeltaBytes           = 1 << 20
	DefaultMaxUnacked              = 64
	DefaultMaxBufferedBytes        = 1 << 20
	DefaultMaxPresenceBytes        = 16 << 10
	DefaultAckInterval             = time.Second
	DefaultWriteTimeout            = 90 * time.Second
)

// Options are what a host may choose about the realtime channel. The zero value of every
// field is its default.
type Options struct {
	// Origins are the web origins, besides the server's own, whose pages may connect:
	// "https://app.example.com", or a host alone for any scheme; * stands for a part of a
	// name, as in path.Match. There is no path behind it. Clients that are no browsers send
	// none and are not asked.
	// Default: none.
	Origins []string
	// Heartbeat is the time between two heartbeats of a connection (§8.5), which come with
	// a ping. A client that was not heard of for three of them is gone. Default 30 s.
	Heartbeat time.Duration
	// MaxConnections caps the connections of the process, and MaxConnectionsPerClient
	// those of one client id; one more is refused with sync.websocket_connection_limit.
	// Defaults: 50,000 and 8.
	MaxConnections          int
	MaxConnectionsPerClient int
	// MaxDeltaBytes bounds a delta; a commit that needs more is a wake-up
	// (delta-too-large). Default 1 MiB.
	MaxDeltaBytes int
	// MaxUnacked is how many deltas may be under way to a client that has not acknowledged
	// them; one more is a wake-up. Default 64.
	MaxUnacked int
	// MaxBufferedBytes bounds the deltas that wait for the socket of a client; one more is a
	// wake-up. Default 1 MiB.
	MaxBufferedBytes int
	// MaxPresenceBytes bounds a presence document (§8.6.2). Default 16 KiB.
	MaxPresenceBytes int
	// PresenceInterval is the least time between two presence documents of a client on one
	// scope key that others get to see; of those in between they see the last (§8.6.4).
	// Default 0: they see all.
	PresenceInterval time.Duration
	// AckInterval is the time between two writes of what clients acknowledged, which are
	// one statement for all of them. Default 1 s.
	AckInterval time.Duration
	// WriteTimeout is how long a client may take nothing of what is being written before it
	// is given up. Default 90 s.
	WriteTimeout time.Duration
	// Listen opens the connection on which other processes tell of commits and presence;
	// it must not lead through a pooler in transaction mode. Default: as the pool
	// connects.
	Listen func(ctx context.Context) (*pgx.Conn, error)
	// PollOnly: nothing is listened to. Commits of other processes arrive with the poll,
	// and presence stays in the process.
	PollOnly bool
	// PollInterval is how often the partitions that have connections are looked at for
	// commits that nobody told of. Default 5 s.
	PollInterval time.Duration
}

// Config is what a hub is made of. All but Options, Events, Clock and Logger is required.
type Config struct {
	Options
	// Schema is the newest schema version served, the installed one.
	Schema *schema.Schema
	// Versions are the schema versions served, of which Schema is the newest. nil: Schema
	// alone.
	Versions *schema.Versions
	// Rounds runs the rounds and asks the host's resolver.
	Rounds Engine
	// Gate is the one that Rounds uses.
	Gate Gate
	// Authenticate says who asks for a connection, as for POST /sync.
	Authenticate func(*http.Request) (round.Identity, error)
	// MaxRequestBytes bounds the request of a round. 0: 16 MiB. Negative: no bound.
	MaxRequestBytes int64
	// Events gets events.RealtimeConnected and its like. nil: nobody.
	Events events.Sink
	// Clock is where timestamps come from. nil: time.Now.
	Clock func() time.Time
	// Logger gets what clients are not told. nil: nothing is logged.
	Logger *slog.Logger
}

const defaultMaxRequestBytes = 16 << 20

// check says what is wrong with a Config, and fills in the defaults.
func (c *Config) check(pool *pgxpool.Pool) error {
	for _, required := range []struct {
		field   string
		missing bool
	}{
		{"the pool", pool == nil},
		{"Config.Schema", c.Schema == nil},
		{"Config.Rounds", c.Rounds == nil},
		{"Config.Gate", c.Gate == nil},
		{"Config.Authenticate", c.Authenticate == nil},
	} {
		if required.missing {
			return fmt.Errorf("realtime: %s is nil", required.field)
		}
	}
	versions, err := schema.VersionsOf(c.Versions, c.Schema)
	if err != nil {
		return fmt.Errorf("realtime: Config.Versions: %w", err)
	}
	c.Versions = versions
	o := &c.Options
	for _, n := range []struct {
		field    string
		value    *int
		standard int
	}{
		{"MaxConnections", &o.MaxConnections, DefaultMaxConnections},
		{"MaxConnectionsPerClient", &o.MaxConnectionsPerClient, DefaultMaxConnectionsPerClient},
		{"MaxDeltaBytes", &o.MaxDeltaBytes, DefaultMaxDeltaBytes},
		{"MaxUnacked", &o.MaxUnacked, DefaultMaxUnacked},
		{"MaxBufferedBytes", &o.MaxBufferedBytes, DefaultMaxBufferedBytes},
		{"MaxPresenceBytes", &o.MaxPresenceBytes, DefaultMaxPresenceBytes},
	} {
		if *n.value < 0 {
			return fmt.Errorf("realtime: Options.%s is %d; it must be positive, or 0 for the default of %d", n.field, *n.value, n.standard)
		}
		*n.value = cmp.Or(*n.value, n.standard)
	}
	for _, d := range []struct {
		field    string
		value    *time.Duration
		standard time.Duration
	}{
		{"Heartbeat", &o.Heartbeat, DefaultHeartbeat},
		{"AckInterval", &o.AckInterval, DefaultAckInterval},
		{"WriteTimeout", &o.WriteTimeout, DefaultWriteTimeout},
	} {
		*d.value = cmp.Or(*d.value, d.standard)
		if *d.value < time.Millisecond {
			return fmt.Errorf("realtime: Options.%s is %v; it must be at least a millisecond, or 0 for the default of %v", d.field, *d.value, d.standard)
		}
	}
	if o.PresenceInterval < 0 || o.PresenceInterval > 0 && o.PresenceInterval < time.Millisecond {
		return fmt.Errorf("realtime: Options.PresenceInterval is %v; it must be at least a millisecond, or 0 for none", o.PresenceInterval)
	}
	for _, pattern := range o.Origins {
		if _, err := path.Match(pattern, ""); err != nil {
			return fmt.Errorf("realtime: Options.Origins: %q: %w", pattern, err)
		}
		host := pattern
		if _, after, ok := strings.Cut(pattern, "://"); ok {
			host = after
		}
		if host == "" || strings.Contains(host, "/") { // what no browser sends
			return fmt.Errorf("realtime: Options.Origins: %q is no origin, which has no path and no slash at its end, as in https://app.example.com", pattern)
		}
	}
	if o.PollOnly && o.Listen != nil {
		return errors.New("realtime: Options.PollOnly and Options.Listen exclude each other")
	}
	c.MaxRequestBytes = cmp.Or(c.MaxRequestBytes, defaultMaxRequestBytes)
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Events = events.Safe(c.Events, c.Logger)
	return nil
}
