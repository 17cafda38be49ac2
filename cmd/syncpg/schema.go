package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/internal/config"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
)

type schemaCmd struct {
	Check schemaCheckCmd `cmd:"" help:"Compile a schema and compare a database with it."`
	Plan  schemaPlanCmd  `cmd:"" help:"Show what a database lacks of a schema."`
	Apply schemaApplyCmd `cmd:"" help:"Install a schema in a database, or move it to a later version."`
}

// sampleName is what stands for the compiled-in schema in messages.
const sampleName = "the compiled-in sample"

// loadSchema reads and compiles a schema; a path of "" is the sample.
func loadSchema(path string) (s *schema.Schema, name string, err error) {
	ir, name := sample.IR(), sampleName
	if path != "" {
		name = path
		if ir, err = os.ReadFile(path); err != nil {
			return nil, "", usagef("read the schema: %w", err)
		}
	}
	if s, err = schema.Parse(ir); err != nil {
		return nil, "", usagef("%s: %w", name, err)
	}
	return s, name, nil
}

// appSchema is the name of a database schema for the app's tables.
type appSchema string

// Validate is called when the flags are parsed.
func (s appSchema) Validate() error { return schemaddl.CheckAppSchema(string(s)) }

type appSchemaFlag struct {
	AppSchema appSchema `name:"app-schema" default:"public" setting:"" help:"Database schema of the app's tables."`
}

type schemaFlags struct {
	databaseFlags
	appSchemaFlag
	Schema string `name:"schema" required:"" placeholder:"FILE" setting:"" help:"Schema IR, the JSON document that the app's code generator writes."`
}

// olderFlags name versions of the schema before the newest one.
type olderFlags struct {
	OlderSchema []string `name:"older-schema" placeholder:"FILE" setting:"" help:"Schema IR of an earlier version whose clients are served, too; may be repeated. Clients of versions that are not given are told to upgrade."`
}

// load reads the older versions of a schema, and checks that each can be served from it.
func (f olderFlags) load(newest *schema.Schema, name string) ([]*schema.Schema, error) {
	older := make([]*schema.Schema, 0, len(f.OlderSchema))
	files := map[int32]string{newest.Version: name}
	for _, path := range f.OlderSchema {
		s, _, err := loadSchema(path)
		if err != nil {
			return nil, fmt.Errorf("--older-schema: %w", err)
		}
		if other, ok := files[s.Version]; ok {
			return nil, usagef("--older-schema %s is of version %d, and so is %s", path, s.Version, other)
		}
		if _, err := schema.NewVersions(newest, s); err != nil {
			if s.Version < newest.Version {
				err = fmt.Errorf("%w; leave it out when its devices may be told to upgrade, or give version %d what they need", err, newest.Version)
			}
			return nil, usagef("--older-schema %s: %w", path, err)
		}
		files[s.Version] = path
		older = append(older, s)
	}
	return older, nil
}

// describeOlder lists older versions for people.
func describeOlder(older []*schema.Schema) string {
	texts := make([]string, len(older))
	for i, s := range older {
		texts[i] = strconv.Itoa(int(s.Version))
	}
	return strings.Join(texts, ", ")
}

type schemaCheckCmd struct {
	schemaFlags
	olderFlags
}

// Help explains the command.
func (*schemaCheckCmd) Help() string {
	return "Without a database only the files are checked, which with --older-schema tells before a release whether devices that are " +
		"not updated yet can be served. With a database, exit code 3 says that it differs. Nothing is written."
}

// Run checks a schema.
func (c *schemaCheckCmd) Run(ctx context.Context, p *program) error {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	older, err := c.load(s, name)
	if err != nil {
		return err
	}
	if err := printSchema(p, s, name); err != nil {
		return err
	}
	if len(older) > 0 {
		p.printf("\nclients of %s can be served, too: %s\n", plural(len(older), "older version"), describeOlder(older))
	}
	pool, err := c.pool(ctx, p)
	if errors.Is(err, config.ErrNoDatabase) {
		p.printf("\nno database given: only the %s checked\n", map[bool]string{true: "file was", false: "files were"}[len(older) == 0])
		return nil
	}
	if err != nil {
		return err
	}
	defer pool.Close()
	o := c.options()
	o.Older = older
	if err := checkInstalled(ctx, pool, s, o); err != nil {
		return err
	}
	p.printf("\nthe database has this schema\n")
	return nil
}

func (f appSchemaFlag) options() schemaddl.Options {
	return schemaddl.Options{AppSchema: string(f.AppSchema)}
}

// checkInstalled compares a database with a schema, its migrations first.
func checkInstalled(ctx context.Context, pool *pgxpool.Pool, s *schema.Schema, o schemaddl.Options) error {
	if _, err := migrations.Check(ctx, pool); err != nil {
		return asState(err)
	}
	return asState(schemaddl.Check(ctx, pool, s, o))
}

// asState marks the errors that say in which state a database is.
func asState(err error) error {
	var layout *schemaddl.LayoutError
	var version *schemaddl.VersionError
	var migration *migrations.VersionError
	var bump *schemaddl.BumpError
	var older *schemaddl.OlderError
	if errors.As(err, &bump) || errors.As(err, &older) || errors.Is(err, schemaddl.ErrNotInstalled) || errors.Is(err, schemaddl.ErrFunctionsStale) ||
		errors.As(err, &layout) || errors.As(err, &version) || errors.As(err, &migration) {
		return stateError{err}
	}
	return err
}

type dropFlag struct {
	Drop bool `name:"drop" help:"Delete the columns and tables that the new version does not have, with their values. Without it they stay in the database, nothing reads or writes them any more, and no later --drop deletes them."`
}

func (f schemaFlags) bump(drop dropFlag) schemaddl.BumpOptions {
	return schemaddl.BumpOptions{Options: f.options(), Drop: drop.Drop}
}

type schemaPlanCmd struct {
	schemaFlags
	dropFlag
	JSON bool `name:"json" help:"As JSON: from, to, steps, rewrites, logChanges, logBytes. null: nothing is to be done."`
}

// Help explains the command.
func (*schemaPlanCmd) Help() string {
	return "Shows what `schema apply` would do, and whether something stands in the way: exit code 3. It looks at schemas and " +
		"rows, and writes nothing."
}

// Run shows a plan.
func (c *schemaPlanCmd) Run(ctx context.Context, p *program) error {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, p)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := migrations.Check(ctx, pool); err != nil {
		return asState(err)
	}
	plan, err := schemaddl.PlanBump(ctx, pool, s, c.bump(c.dropFlag))
	switch {
	case err != nil:
		return asState(err)
	case c.JSON:
		return p.printJSON(plan)
	case plan == nil:
		p.printf("nothing to do: the database has %s, version %d\n", name, s.Version)
		return nil
	}
	return printBump(p, plan)
}

type schemaApplyCmd struct {
	schemaFlags
	dropFlag
	DryRun bool `name:"dry-run" help:"Show what is to be done, and do nothing."`
}

// Help explains the command.
func (*schemaApplyCmd) Help() string {
	return "Creates the app's tables, their indexes and the generated functions; or moves an installed schema to a later version, " +
		"which may rewrite rows and log. All of it is one transaction: after an error or an interruption nothing has changed. " +
		"While it moves, pushes are answered with an error that clients retry; pulls go on, and wait while tables are changed. " +
		"Applying the installed schema again changes nothing, except that generated functions of another build are replaced. " +
		"`schema plan` shows what is to be done."
}

// Run installs a schema, or moves it to a later version.
func (c *schemaApplyCmd) Run(ctx context.Context, p *program) error {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	statements, err := schemaddl.Plan(s, c.options())
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, p)
	if c.DryRun && errors.Is(err, config.ErrNoDatabase) {
		// The statements of an installation do not depend on the database.
		printStatements(p, statements)
		return nil
	}
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := migrations.Check(ctx, pool); err != nil {
		return asState(err)
	}
	var done *schemaddl.Bump
	if o := c.bump(c.dropFlag); c.DryRun {
		done, err = schemaddl.PlanBump(ctx, pool, s, o)
	} else {
		o.Progress = newProgress(p.stderr, time.Now).tell
		done, err = schemaddl.Apply(ctx, pool, s, o)
	}
	if err != nil {
		return asState(err)
	}
	// What was done, once it stands, or else what would be.
	switch {
	case done == nil:
		p.printf("nothing to do: the database has %s, version %d\n", name, s.Version)
		return nil
	case done.From == done.To:
		p.printf("replace the generated functions, which are of another build\n")
	case done.From > 0:
		if err := printBump(p, done); err != nil {
			return err
		}
	case c.DryRun:
		printStatements(p, statements)
	default:
		printPlan(p, statements)
	}
	if c.DryRun {
		return nil
	}
	p.printf("installed %s, version %d\n", name, s.Version)
	return nil
}

// printBump lists what a bump does.
func printBump(p *program, b *schemaddl.Bump) error {
	if b.From == 0 {
		p.printf("install version %d\n\n", b.To)
	} else {
		p.printf("from version %d to version %d\n\n", b.From, b.To)
	}
	rows := make([][]string, 1, 1+len(b.Steps))
	rows[0] = []string{"ACTION", "TABLE", "NAME", ""}
	for _, s := range b.Steps {
		rows = append(rows, []string{string(s.Action), s.Table, s.Name, s.Note})
	}
	if len(b.Steps) > 0 {
		if err := table(p.stdout, "", rows); err != nil {
			return err
		}
		p.printf("\n")
	} else {
		p.printf("no table changes\n\n")
	}
	for _, r := range b.Rows {
		p.printf("rewrites about %s of %s (%s)\n", plural(int(r.Rows), "row"), r.Table, size(r.Bytes))
	}
	if b.LogBytes > 0 {
		p.printf("looks at about %s of the log (%s), and rewrites those of these tables\n", plural(int(b.LogChanges), "change"), size(b.LogBytes))
	}
	if len(b.Rows) > 0 {
		p.printf("What is rewritten takes its room twice until the next vacuum, and goes through the write-ahead log. `syncpg prune` makes the log smaller.\n\n")
	}
	return nil
}

// size shows a number of bytes.
func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}

// bumpProgressEvery is the least time between two lines about the same stage.
const bumpProgressEvery = 2 * time.Second

// progress writes lines about a bump.
type progress struct {
	w       io.Writer
	now     func() time.Time
	stage   string // with the table
	begun   time.Time
	written time.Time
}

func newProgress(w io.Writer, now func() time.Time) *progress { return &progress{w: w, now: now} }

func (p *progress) tell(at schemaddl.Progress) {
	now, stage := p.now(), at.Stage+" "+at.Table
	first := p.stage != stage
	if first {
		p.stage, p.begun, p.written = stage, now, now
	} else if now.Sub(p.written) < bumpProgressEvery {
		return
	}
	p.written = now
	var line string
	switch at.Stage {
	case schemaddl.StageWaiting:
		line = "waiting for pushes under way"
	case schemaddl.StageLocking:
		line = "waiting for who uses the tables"
	case schemaddl.StageTables:
		line = "changing tables"
	case schemaddl.StageIndexes:
		line = "building indexes and functions"
	case schemaddl.StageRows:
		line = fmt.Sprintf("rewriting about %s of %s", plural(int(at.Total), "row"), at.Table)
	case schemaddl.StageChanges:
		line = "rewriting the log, of about " + plural(int(at.Total), "change")
	}
	if took := now.Sub(p.begun).Seconds(); !first && at.Done > 0 && took > 0 {
		rate := float64(at.Done) / took
		line += fmt.Sprintf(": %d done, %.0f/s", at.Done, rate)
		if at.Total > at.Done {
			line += ", at most " + duration(time.Duration(float64(at.Total-at.Done)/rate*float64(time.Second))) + " left"
		}
	}
	_, _ = fmt.Fprintln(p.w, line)
}

// printSchema lists the tables of a schema.
func printSchema(p *program, s *schema.Schema, name string) error {
	p.printf("%s: schema version %d, %s\n\n", name, s.Version, plural(len(s.Tables), "table"))
	rows := make([][]string, 1, 1+len(s.Tables))
	rows[0] = []string{"TABLE", "COLUMNS", "KEY", "SCOPES", "INDEXES", "REFERENCES"}
	for _, t := range s.Tables {
		var scopes, references []string
		for _, sc := range t.Scopes {
			scopes = append(scopes, sc.Pattern)
		}
		for _, r := range t.References {
			references = append(references, fmt.Sprintf("%s → %s", t.Columns[r.Column].Name, r.Parent.Name))
		}
		rows = append(rows, []string{
			t.Name, strconv.Itoa(len(t.Columns)), t.Columns[t.PrimaryKey].Name, strings.Join(scopes, ", "),
			strconv.Itoa(len(t.Indexes)), strings.Join(references, ", "),
		})
	}
	return table(p.stdout, "", rows)
}

// printPlan lists what an installation makes: tables and indexes one by one, functions by their number.
func printPlan(p *program, statements []string) {
	functions := 0
	for _, sql := range statements {
		line, _, _ := strings.Cut(sql, "\n")
		if kind, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(line, "create "), "or replace "), " "); kind == "function" {
			functions++
			continue
		}
		if !strings.HasPrefix(line, "create ") {
			continue // comments, revokes and the like belong to what they are about
		}
		p.printf("%s\n", strings.TrimSuffix(strings.TrimSpace(line), " ("))
	}
	if functions > 0 {
		p.printf("create %s\n", plural(functions, "generated function"))
	}
}

// printStatements prints a plan as a script.
func printStatements(p *program, statements []string) {
	p.printf("-- What `syncpg schema apply` runs. It also records the schema as installed, which this script does not.\nbegin;\n\n")
	for _, sql := range statements {
		p.printf("%s;\n\n", strings.TrimRight(strings.TrimSpace(sql), ";"))
	}
	p.printf("commit;\n")
}
