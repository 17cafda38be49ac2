package pgtest

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// EnvDatabaseURL names the environment variable with the URL (or the keywords) of a server to test on. Its role must be
// allowed to create databases.
const EnvDatabaseURL = "SYNCPG_TEST_DATABASE_URL"

// EnvLinger names the environment variable that says how long the shared server is kept when nobody uses it, such as
// "10m". Default: ten seconds, since between two packages of one run there may be no user for a moment. It counts for a
// server that is not running yet.
const EnvLinger = "SYNCPG_TEST_LINGER"

// startTimeout bounds the wait for the shared server, the download of a container image included.
const startTimeout = 5 * time.Minute

// Cluster is the server that the tests of a run share.
type Cluster struct {
	dsn      string   // of its maintenance database
	external bool     // not ours: it stays when the run is over, and so must not gather leftovers
	place    *os.File // among the users of the server; open for as long as this process lives

	mu        sync.Mutex
	templates map[string]string // name of the template by key
}

var shared struct {
	sync.Mutex
	cluster *Cluster
	err     error // why there is none: the next test would find the same
}

// Open returns the shared server, and starts it if this process is the first to ask.
func Open(ctx context.Context) (*Cluster, error) {
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster != nil || shared.err != nil {
		return shared.cluster, shared.err
	}
	cluster, err := open(ctx)
	if ctx.Err() == nil {
		shared.err = err
	}
	shared.cluster = cluster
	return cluster, err
}

func open(ctx context.Context) (*Cluster, error) {
	c := &Cluster{templates: map[string]string{}}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if c.dsn = os.Getenv(EnvDatabaseURL); c.dsn != "" {
		c.external = true
		if err := c.dropLeftovers(ctx); err != nil {
			return nil, fmt.Errorf("pgtest: use the server of %s: %w", EnvDatabaseURL, err)
		}
	} else {
		var err error
		if c.dsn, c.place, err = attach(ctx); err != nil {
			return nil, fmt.Errorf("pgtest: start a server: %w", err)
		}
	}
	return c, nil
}

// DSN returns the connection string of a database of the server.
func (c *Cluster) DSN(database string) (string, error) {
	if !strings.HasPrefix(c.dsn, "postgres://") && !strings.HasPrefix(c.dsn, "postgresql://") {
		quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(database)
		return c.dsn + " dbname='" + quoted + "'", nil
	}
	u, err := url.Parse(c.dsn)
	if err != nil {
		return "", fmt.Errorf("pgtest: read the connection URL: %w", err)
	}
	u.Path = "/" + database
	return u.String(), nil
}

// admin runs f with a connection to the maintenance database.
func (c *Cluster) admin(ctx context.Context, f func(*pgx.Conn) error) (err error) {
	return withConn(ctx, c.dsn, f)
}

func withConn(ctx context.Context, dsn string, f func(*pgx.Conn) error) (err error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() {
		closeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = cmp.Or(err, conn.Close(closeCtx))
	}()
	return f(conn)
}
