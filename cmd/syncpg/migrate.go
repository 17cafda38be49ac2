package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/migrations"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply every migration that the database lacks."`
	Down   migrateDownCmd   `cmd:"" help:"Take migrations back. What they hold is lost."`
	Status migrateStatusCmd `cmd:"" help:"Show which migrations the database has."`
}

// Help explains the group.
func (*migrateCmd) Help() string {
	return "The migrations make the schema \"syncpg\" with everything the server keeps beside the app's own tables. They are " +
		"compiled in, and work one after the other, each in a transaction, over one connection, which must go to the server " +
		"directly and not through a pooler in transaction mode."
}

type migrateFlags struct {
	databaseFlags
	JSON bool `name:"json" help:"Print JSON."`
}

// migrator returns a migrator over a connection of its own, which the caller closes.
func (f migrateFlags) migrator(ctx context.Context, p *program, onStep func(migrations.Step)) (*migrations.Migrator, *pgx.Conn, error) {
	conn, err := f.connect(ctx, p)
	if err != nil {
		return nil, nil, err
	}
	m, err := migrations.New(conn, migrations.Options{OnStep: onStep})
	if err != nil {
		closeConn(ctx, conn)
		return nil, nil, err
	}
	return m, conn, nil
}

func closeConn(ctx context.Context, conn *pgx.Conn) { _ = conn.Close(context.WithoutCancel(ctx)) }

// moved is what `migrate up` and `migrate down` print as JSON.
type moved struct {
	From  int      `json:"from"`
	To    int      `json:"to"`
	Steps []string `json:"steps"` // file names, in the order they ran
}

// move runs up or down and prints what it does.
func (f migrateFlags) move(ctx context.Context, p *program, verb string, run func(*migrations.Migrator) error) error {
	result := moved{Steps: []string{}}
	m, conn, err := f.migrator(ctx, p, func(s migrations.Step) {
		result.Steps = append(result.Steps, s.Name)
		if !f.JSON {
			p.printf("%s %s\n", verb, s.Name)
		}
	})
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)
	before, err := m.Status(ctx)
	if err != nil {
		return err
	}
	if err := run(m); err != nil {
		if errors.Is(err, migrations.ErrTooNew) {
			return stateError{err}
		}
		return err
	}
	after, err := m.Status(ctx)
	if err != nil {
		return err
	}
	result.From, result.To = before.Current, after.Current
	if f.JSON {
		return p.printJSON(result)
	}
	if len(result.Steps) == 0 {
		p.printf("nothing to do: the database is at version %d\n", after.Current)
		return nil
	}
	p.printf("the database is at version %d (was %d)\n", after.Current, before.Current)
	return nil
}

type migrateUpCmd struct{ migrateFlags }

// Run applies migrations.
func (c *migrateUpCmd) Run(ctx context.Context, p *program) error {
	return c.move(ctx, p, "apply", func(m *migrations.Migrator) error { return m.Up(ctx) })
}

type migrateDownCmd struct {
	migrateFlags
	To int `name:"to" required:"" placeholder:"VERSION" help:"Version to go back to. 0 removes everything, all rows of the log included."`
}

// Help explains the command.
func (*migrateDownCmd) Help() string {
	return "The app's own tables stay, without the history that clients need to go on. Before the schema can be applied again " +
		"they have to be renamed or dropped."
}

// Run takes migrations back.
func (c *migrateDownCmd) Run(ctx context.Context, p *program) error {
	return c.move(ctx, p, "take back", func(m *migrations.Migrator) error {
		if c.To < 0 || c.To > len(m.List()) {
			return usagef("--to is %d, and the versions are 0 to %d", c.To, len(m.List()))
		}
		return m.Down(ctx, c.To)
	})
}

type migrateStatusCmd struct{ migrateFlags }

// Help explains the command.
func (*migrateStatusCmd) Help() string {
	return "Exit code 3 says that migrations are pending, or that the database is newer than this program."
}

// migrationStatus is what `migrate status` prints as JSON.
type migrationStatus struct {
	Current    int               `json:"current"`
	Target     int               `json:"target"`
	Migrations []migrationRecord `json:"migrations"`
}

type migrationRecord struct {
	Version  int    `json:"version"`
	Name     string `json:"name"`
	Breaking bool   `json:"breaking"`
	Applied  bool   `json:"applied"`
}

// Run shows the migrations.
func (c *migrateStatusCmd) Run(ctx context.Context, p *program) error {
	m, conn, err := c.migrator(ctx, p, nil)
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)
	status, err := m.Status(ctx)
	if err != nil {
		return err
	}
	out := migrationStatus{Current: status.Current, Target: status.Target}
	for _, one := range m.List() {
		out.Migrations = append(out.Migrations, migrationRecord{one.Version, one.Name, one.Breaking, one.Version <= status.Current})
	}
	if err := c.print(p, out); err != nil {
		return err
	}
	switch {
	case len(status.Pending) > 0:
		return stateError{fmt.Errorf("%s pending: run `syncpg migrate up`", plural(len(status.Pending), "migration"))}
	case status.Current > status.Target:
		return stateError{fmt.Errorf("the database is at version %d, and this program knows %d: use a newer one",
			status.Current, status.Target)}
	}
	return nil
}

func (c *migrateStatusCmd) print(p *program, s migrationStatus) error {
	if c.JSON {
		return p.printJSON(s)
	}
	rows := [][]string{{"VERSION", "STATE", "BREAKING", "NAME"}}
	for _, r := range s.Migrations {
		state, breaking := "pending", "no"
		if r.Applied {
			state = "applied"
		}
		if r.Breaking {
			breaking = "yes"
		}
		rows = append(rows, []string{strconv.Itoa(r.Version), state, breaking, r.Name})
	}
	return table(p.stdout, "", rows)
}
