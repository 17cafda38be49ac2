package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/internal/config"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
)

type schemaCmd struct {
	Check schemaCheckCmd `cmd:"" help:"Compile a schema and compare a database with it."`
	Apply schemaApplyCmd `cmd:"" help:"Install a schema in a database."`
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
	if err := checkInstalled(ctx, pool, s, c.options()); err != nil {
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
	if errors.Is(err, schemaddl.ErrNotInstalled) || errors.Is(err, schemaddl.ErrFunctionsStale) ||
		errors.As(err, &layout) || errors.As(err, &version) || errors.As(err, &migration) {
		return stateError{err}
	}
	return err
}

type schemaApplyCmd struct {
	schemaFlags
	DryRun bool `name:"dry-run" help:"Print the statements and run none of them."`
}

// Help explains the command.
func (*schemaApplyCmd) Help() string {
	return "Creates the app's tables, their indexes and the generated functions, in one transaction. Applying the installed " +
		"schema again changes nothing, except that generated functions of another build are replaced. Moving an installed " +
		"schema to another version is not supported yet."
}

// Run installs a schema.
func (c *schemaApplyCmd) Run(ctx context.Context, p *program) error {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	plan, err := schemaddl.Plan(s, c.options())
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, p)
	if c.DryRun && errors.Is(err, config.ErrNoDatabase) {
		// The statements do not depend on the database.
		printStatements(p, plan)
		return nil
	}
	if err != nil {
		return err
	}
	defer pool.Close()
	found := checkInstalled(ctx, pool, s, c.options())
	stale, missing := errors.Is(found, schemaddl.ErrFunctionsStale), errors.Is(found, schemaddl.ErrNotInstalled)
	switch {
	case found == nil:
		p.printf("nothing to do: the database has %s, version %d\n", name, s.Version)
		return nil
	case !stale && !missing:
		return found
	case !c.DryRun:
		if err := schemaddl.Install(ctx, pool, s, c.options()); err != nil {
			return asState(err)
		}
	}
	// What was done, once it stands, or else what would be.
	switch {
	case stale:
		p.printf("replace the generated functions, which are of another build\n")
	case c.DryRun:
		printStatements(p, plan)
	default:
		printPlan(p, plan)
	}
	if c.DryRun {
		return nil
	}
	p.printf("installed %s, version %d\n", name, s.Version)
	return nil
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
