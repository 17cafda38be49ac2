package syncpg

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schemaddl"
)

// Check is one condition of serving rounds: its name, why it fails, and what to do
// then.
type Check = httpsync.Check

// Names of the checks, in the order they are made. Each needs the one before it.
const (
	CheckDatabase   = "database"   // a connection of the pool answers
	CheckMigrations = "migrations" // the schema "syncpg" has a version this build works with
	CheckSchema     = "schema"     // the app schema is installed, in this version and layout
)

// NotReadyError says why rounds cannot be served.
type NotReadyError struct {
	Failing []Check // never empty
}

// Error lists the failing checks and what to do.
func (e *NotReadyError) Error() string {
	var b strings.Builder
	b.WriteString("syncpg: not ready")
	for _, c := range e.Failing {
		fmt.Fprintf(&b, "; %s: %v", c.Name, c.Err)
		if !strings.Contains(c.Err.Error(), c.Help) {
			fmt.Fprintf(&b, " (%s)", c.Help)
		}
	}
	return b.String()
}

// Unwrap returns the errors of the failing checks: of the driver, of package
// migrations, of package schemaddl.
func (e *NotReadyError) Unwrap() []error {
	errs := make([]error, len(e.Failing))
	for i, c := range e.Failing {
		errs[i] = c.Err
	}
	return errs
}

// Ready reports whether rounds can be served: the database answers, its migrations
// fit this build, and the schema is installed. The error is a *[NotReadyError]. It
// takes one connection of the pool and writes nothing. A program calls it once
// before it listens; GET /readyz calls it for every probe.
func (s *Server) Ready(ctx context.Context) error {
	var e NotReadyError
	for _, c := range s.checks(ctx) {
		if c.Err != nil {
			e.Failing = append(e.Failing, c)
		}
	}
	if e.Failing != nil {
		return &e
	}
	return nil
}

// checks makes the checks up to the first that fails, which the others need.
func (s *Server) checks(ctx context.Context) []Check {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return []Check{databaseCheck(err)}
	}
	defer conn.Release()
	done := []Check{databaseCheck(conn.Ping(ctx))}
	if done[0].Err != nil {
		return done
	}
	found, err := migrations.Check(ctx, conn)
	done = append(done, Check{Name: CheckMigrations, Err: err, Help: migrationsHelp(err)})
	if err != nil {
		return done
	}
	if found.Newer {
		s.newer.Do(func() {
			s.log.WarnContext(ctx, "the database was migrated by a newer version of syncpg",
				"database", found.Current, "build", found.Target)
		})
	}
	err = schemaddl.Check(ctx, conn, s.schema, s.ddl)
	return append(done, Check{
		Name: CheckSchema,
		Err:  err,
		Help: schemaHelp(err),
	})
}

func databaseCheck(err error) Check {
	return Check{Name: CheckDatabase, Err: err, Help: "check the connection settings and the database server"}
}

// causeHelp is for what only the error itself can tell.
const causeHelp = "the log of the server has the cause"

func migrationsHelp(err error) string {
	switch {
	case err == nil, errors.Is(err, migrations.ErrTooOld):
		return "run `syncpg migrate up`"
	case errors.Is(err, migrations.ErrTooNew):
		return "use a newer version of syncpg"
	}
	return causeHelp
}

func schemaHelp(err error) string {
	switch {
	case err == nil, errors.Is(err, schemaddl.ErrNotInstalled), errors.Is(err, schemaddl.ErrFunctionsStale):
		return "run `syncpg schema apply`"
	case errors.As(err, new(*schemaddl.OlderError)):
		return "leave this version out, so that its clients are told to upgrade"
	case errors.As(err, new(*schemaddl.LayoutError)), errors.As(err, new(*schemaddl.VersionError)):
		return "compare with `syncpg schema check`"
	}
	return causeHelp
}
