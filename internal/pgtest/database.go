package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/migrations"
)

// Names of databases: prefix, seconds since 1970 in base 36, what tells it from others.
const (
	databasePrefix = "syncpg_test_"
	templatePrefix = "syncpg_tmpl_"
	leftoverAge    = 24 * time.Hour
)

const (
	defaultMaxConns = 4
	sessionLooks    = 25
)

// Options says what a database holds and how the test talks to it. The zero value gives a migrated database.
type Options struct {
	// Setup runs once in a migrated database, before the test's pool exists: it installs what the tests need besides
	// the migrations. Nil: nothing more.
	Setup func(ctx context.Context, conn *pgx.Conn) error

	// TemplateKey names what Setup does: databases of equal keys are cloned from one template, in which Setup ran once.
	// Two binaries never share such a template. Empty: Setup runs in each database anew.
	TemplateKey string

	// Empty leaves the migrations out.
	Empty bool

	// MaxConns is the size of the pool. 0: 4.
	MaxConns int32

	// Tracer is the tracer of the pool's connections. Nil: none.
	Tracer pgx.QueryTracer

	// Counter counts what the pool's connections send. Nil: nothing is counted.
	Counter *Counter

	// Configure changes the configuration of the pool last. Nil: it stays as it is.
	Configure func(*pgxpool.Config)
}

// DB is a database of one test.
type DB struct {
	Name string        // its name
	DSN  string        // its connection string
	Pool *pgxpool.Pool // connects lazily; closed by Close

	cluster *Cluster
}

// Create makes a database. The caller closes it.
func (c *Cluster) Create(ctx context.Context, opts Options) (*DB, error) {
	name, err := c.clone(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("pgtest: create a database: %w", err)
	}
	db := &DB{Name: name, cluster: c}
	if err := db.open(ctx, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("pgtest: open a database: %w", err), db.Close(ctx))
	}
	return db, nil
}

func (db *DB) open(ctx context.Context, opts Options) error {
	var err error
	if db.DSN, err = db.cluster.DSN(db.Name); err != nil {
		return err
	}
	if opts.Setup != nil && opts.TemplateKey == "" {
		if err := withConn(ctx, db.DSN, func(conn *pgx.Conn) error { return opts.Setup(ctx, conn) }); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
	}
	cfg, err := pgxpool.ParseConfig(db.DSN)
	if err != nil {
		return err
	}
	cfg.MaxConns = defaultMaxConns
	if opts.MaxConns > 0 {
		cfg.MaxConns = opts.MaxConns
	}
	if opts.Tracer != nil {
		cfg.ConnConfig.Tracer = opts.Tracer
	}
	if opts.Counter != nil {
		opts.Counter.Attach(&cfg.ConnConfig.Config)
	}
	if opts.Configure != nil {
		opts.Configure(cfg)
	}
	db.Pool, err = pgxpool.NewWithConfig(ctx, cfg)
	return err
}

// Copy makes another database that holds what db holds now, as a backup of it does. Nobody else may be connected to db; the
// idle connections of its pool are closed. Of opts, what says how to talk to the copy counts. The caller closes it.
func (db *DB) Copy(ctx context.Context, opts Options) (*DB, error) {
	db.Pool.Reset()
	name := newName()
	err := db.cluster.admin(ctx, func(conn *pgx.Conn) error {
		if err := awaitSessions(ctx, conn, db.Name); err != nil {
			return err
		}
		return makeFrom(ctx, conn, name, db.Name)
	})
	if err != nil {
		return nil, fmt.Errorf("pgtest: copy database %s: %w", db.Name, err)
	}
	made := &DB{Name: name, cluster: db.cluster}
	opts.Setup = nil
	if err := made.open(ctx, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("pgtest: open a copy: %w", err), made.Close(ctx))
	}
	return made, nil
}

// Close closes the pool and drops the database, whoever is still connected to it. A connection of the pool that is not
// released within ten seconds is an error.
func (db *DB) Close(ctx context.Context) error {
	var err error
	if db.Pool != nil {
		err = closePool(ctx, db.Pool)
	}
	return errors.Join(err, db.cluster.drop(ctx, db.Name))
}

// closePool closes a pool, and does not wait for ever for a connection that is never released.
func closePool(ctx context.Context, pool *pgxpool.Pool) error {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgtest: close the pool: %d connections were not released: %w", pool.Stat().AcquiredConns(), ctx.Err())
	}
}

func (c *Cluster) drop(ctx context.Context, name string) error {
	err := c.admin(ctx, func(conn *pgx.Conn) error {
		if err := awaitSessions(ctx, conn, name); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `drop database if exists `+quote(name)+` with (force)`)
		return err
	})
	if err != nil {
		return fmt.Errorf("pgtest: drop database %s: %w", name, err)
	}
	return nil
}

// awaitSessions gives sessions time to end: they do a moment after their connections, and a server asked to drop the
// database meanwhile looks again only after a tenth of a second.
func awaitSessions(ctx context.Context, conn *pgx.Conn, database string) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for range sessionLooks {
		var gone bool
		err := conn.QueryRow(ctx, `select not exists (select from pg_stat_activity where datname = $1)`, database).Scan(&gone)
		if err != nil || gone {
			return err
		}
		<-tick.C
	}
	return nil
}

// clone makes a database from the template that opts ask for.
func (c *Cluster) clone(ctx context.Context, opts Options) (string, error) {
	template, err := c.template(ctx, opts)
	if err != nil {
		return "", err
	}
	name := newName()
	return name, c.admin(ctx, func(conn *pgx.Conn) error { return makeFrom(ctx, conn, name, template) })
}

// newName is the name of a new database.
func newName() string {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	return databasePrefix + stamp() + "_" + hex.EncodeToString(random[:])
}

// makeFrom makes a database from another one.
func makeFrom(ctx context.Context, conn *pgx.Conn, name, template string) error {
	if _, err := conn.Exec(ctx, `create database `+quote(name)+` template `+quote(template)); err != nil {
		return fmt.Errorf("clone %s: %w", template, err)
	}
	// Belongs to the database and is not cloned with it.
	if _, err := conn.Exec(ctx, `alter database `+quote(name)+` set search_path to ''`); err != nil {
		return fmt.Errorf("empty the search_path: %w", err)
	}
	return nil
}

// template returns the name of the template for opts, and makes it if it does not exist.
func (c *Cluster) template(ctx context.Context, opts Options) (string, error) {
	key, err := templateKey(opts)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if name, ok := c.templates[key]; ok {
		return name, nil
	}
	var name string
	err = c.admin(ctx, func(conn *pgx.Conn) error {
		// One process makes it, the others wait. The lock ends with the connection.
		if _, err := conn.Exec(ctx, `select pg_advisory_lock(hashtextextended($1, 0))`, templatePrefix+key); err != nil {
			return err
		}
		like := strings.ReplaceAll(templatePrefix, "_", `\_`) + `%\_` + key
		err := conn.QueryRow(ctx, `select datname from pg_database where datname like $1 order by datname desc limit 1`, like).Scan(&name)
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		name = templatePrefix + stamp() + "_" + key
		return c.makeTemplate(ctx, conn, name, opts)
	})
	if err != nil {
		return "", fmt.Errorf("make a template: %w", err)
	}
	c.templates[key] = name
	return name, nil
}

// makeTemplate makes a template under another name, which it loses when it is complete: an interrupted one is never taken
// for a template.
func (c *Cluster) makeTemplate(ctx context.Context, conn *pgx.Conn, name string, opts Options) error {
	locale := ""
	var icu bool
	err := conn.QueryRow(ctx, `select current_setting('server_version_num')::int >= 150000
		and exists (select from pg_collation where collprovider = 'i')`).Scan(&icu)
	if err != nil {
		return err
	}
	if icu {
		locale = ` locale_provider icu icu_locale 'en-US'`
	}
	draft := databasePrefix + strings.TrimPrefix(name, templatePrefix)
	if _, err := conn.Exec(ctx, `drop database if exists `+quote(draft)+` with (force)`); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `create database `+quote(draft)+` template template0 encoding 'UTF8'`+locale); err != nil {
		return err
	}
	if err := c.fill(ctx, draft, opts); err != nil {
		_, dropErr := conn.Exec(ctx, `drop database if exists `+quote(draft)+` with (force)`)
		return errors.Join(err, dropErr)
	}
	// Nobody may connect to a template, or it cannot be cloned.
	if _, err := conn.Exec(ctx, `alter database `+quote(draft)+` with allow_connections false`); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, `alter database `+quote(draft)+` rename to `+quote(name))
	return err
}

// fill migrates and sets up a template.
func (c *Cluster) fill(ctx context.Context, database string, opts Options) error {
	dsn, err := c.DSN(database)
	if err != nil {
		return err
	}
	return withConn(ctx, dsn, func(conn *pgx.Conn) error {
		if !opts.Empty {
			m, err := migrations.New(conn, migrations.Options{})
			if err != nil {
				return err
			}
			if err := m.Up(ctx); err != nil {
				return err
			}
		}
		if opts.Setup == nil || opts.TemplateKey == "" {
			return nil
		}
		if _, err := conn.Exec(ctx, `select set_config('search_path', '', false)`); err != nil {
			return err
		}
		if err := opts.Setup(ctx, conn); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
		return nil
	})
}

// templateKey digests what a template holds.
func templateKey(opts Options) (string, error) {
	if opts.Empty && (opts.Setup == nil || opts.TemplateKey == "") {
		return "empty", nil
	}
	h := sha256.New()
	if !opts.Empty {
		digest, err := migrationsDigest()
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "migrations %s\n", digest)
	}
	if opts.Setup != nil && opts.TemplateKey != "" {
		// Setup is code of this binary; another one, or this one built again, may do something else.
		binary, err := binaryIdentity()
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "setup %q by %s\n", opts.TemplateKey, binary)
	}
	return hex.EncodeToString(h.Sum(nil)[:12]), nil
}

var migrationsDigest = sync.OnceValues(func() (string, error) {
	h := sha256.New()
	err := fs.WalkDir(migrations.FS, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintf(h, "%q %d\n%s", path, len(b), b)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)), err
})

var binaryIdentity = sync.OnceValues(func() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %d %d", path, info.Size(), info.ModTime().UnixNano()), nil
})

// dropLeftovers drops what runs that were killed left on a server that outlives them.
func (c *Cluster) dropLeftovers(ctx context.Context) error {
	return c.admin(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `select datname from pg_database where datname like 'syncpg\_test\_%' or datname like 'syncpg\_tmpl\_%'`)
		if err != nil {
			return err
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		for _, name := range names {
			if time.Since(madeAt(name)) < leftoverAge {
				continue
			}
			if _, err := conn.Exec(ctx, `drop database if exists `+quote(name)+` with (force)`); err != nil {
				return err
			}
		}
		return nil
	})
}

// stamp is the present as part of a name.
func stamp() string { return strconv.FormatInt(time.Now().Unix(), 36) }

// madeAt reads the stamp of a name. A name without one was made long ago.
func madeAt(name string) time.Time {
	rest := strings.TrimPrefix(strings.TrimPrefix(name, databasePrefix), templatePrefix)
	text, _, _ := strings.Cut(rest, "_")
	seconds, err := strconv.ParseInt(text, 36, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(seconds, 0)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
