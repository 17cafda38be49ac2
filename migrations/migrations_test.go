package migrations_test

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/migrations"
)

// connect returns a connection to an empty database of t's own.
func connect(t *testing.T) *pgx.Conn {
	t.Helper()
	return connectTo(t, pgtest.New(t, pgtest.Options{Empty: true}).DSN)
}

func connectTo(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	return conn
}

func migrator(t *testing.T, conn *pgx.Conn, opts migrations.Options) *migrations.Migrator {
	t.Helper()
	m, err := migrations.New(conn, opts)
	require.NoError(t, err)
	return m
}

// files returns the first n migrations.
func files(t *testing.T, n int) fstest.MapFS {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	m := fstest.MapFS{}
	for _, name := range names[:n] {
		b, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		m[name] = &fstest.MapFile{Data: b}
	}
	return m
}

func count(t *testing.T) int {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	return len(names)
}

// fingerprint describes every object of the schema, one a line.
func fingerprint(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		select format('%s %s persistence=%s options=%s acl=%s comment=%s', c.relkind, c.relname, c.relpersistence, c.reloptions, c.relacl, obj_description(c.oid, 'pg_class'))
		  from pg_class as c where c.relnamespace = 'syncpg'::regnamespace
		union all
		select format('column %s.%s %s not null=%s default=%s collation=%s storage=%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attcollation::regcollation, a.attstorage)
		  from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
		  left join pg_attrdef as d on d.adrelid = c.oid and d.adnum = a.attnum
		 where c.relnamespace = 'syncpg'::regnamespace and c.relkind in ('r', 'v')
		union all
		select 'index ' || i.indexdef from pg_indexes as i where i.schemaname = 'syncpg'
		union all
		select format('constraint %s %s %s', c.conrelid::regclass, c.conname, pg_get_constraintdef(c.oid))
		  from pg_constraint as c where c.connamespace = 'syncpg'::regnamespace
		union all
		select 'trigger ' || pg_get_triggerdef(t.oid)
		  from pg_trigger as t join pg_class as c on c.oid = t.tgrelid where c.relnamespace = 'syncpg'::regnamespace
		union all
		select format('function %s acl=%s comment=%s', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'))
		  from pg_proc as p where p.pronamespace = 'syncpg'::regnamespace
		union all
		select format('type %s', t.typname)
		  from pg_type as t where t.typnamespace = 'syncpg'::regnamespace and t.typtype <> 'c' and t.typelem = 0
		order by 1`)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

// rows fills every table, by version of the migration that made it.
var rows = map[int]string{
	1: `
	insert into syncpg.sync_schema_meta (schema_version, layout, index_signatures, functions_digest, installed_at_ms) values (1, '{}', '[]', 'd', 1);
	insert into syncpg.sync_schema_layouts (schema_version, layout, installed_at_ms) values (1, '{}', 1);
	insert into syncpg.sync_partitions (partition, max_commit_seq) values ('p', 1);
	insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) values ('p', 'e', 1, 1);
	insert into syncpg.sync_epoch_rule (required_since_ms) values (1);
	insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count) values ('p', 1, 'c', 'k', 'a', 1, 1);
	insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload) values ('p', 1, 0, 't', 'r', 1, 1, '{v=1}', '');
	insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq) values ('p', 't', 'v=1', 1);
	insert into syncpg.sync_push_results (partition, client_id, client_commit_id, status, commit_seq, results, recorded_at_ms, outcome_id, schema_version) values ('p', 'c', 'k', 1, 1, '', 1, gen_random_uuid(), 1);
	insert into syncpg.sync_clients (partition, client_id, actor_id, created_at_ms, updated_at_ms) values ('p', 'c', 'a', 1, 1);
	insert into syncpg.sync_tombstones (partition, table_name, row_id, commit_seq) values ('p', 't', 'r', 1);
	insert into syncpg.sync_blob_refs (partition, table_name, row_id, blob_id) values ('p', 't', 'r', 'b');
	insert into syncpg.sync_blobs (partition, blob_id, byte_length, media_type, created_at_ms, body) values ('p', 'b', 0, 'text/plain', 1, '');
	insert into syncpg.sync_segments (partition, segment_id, scope_digest, description, log_epoch, table_name, media_type, schema_version, as_of_commit_seq, page, row_count, byte_length, expires_at_ms)
	values ('p', 's', 'd', '', 'e', 't', 1, 1, 1, 0, 0, 0, 1);
	insert into syncpg.sync_segment_chunks (partition, segment_id, chunk_index, body) values ('p', 's', 0, '');
	insert into syncpg.sync_writer_fence (partition, required_writer_version) values ('p', 1);
	insert into syncpg.sync_backfill_checkpoints (partition, name, schema_version, state, updated_at_ms) values ('p', 'n', 1, 'declared', 1);
	insert into syncpg.sync_leases (partition, client_id, lease_id, actor_id, allowed_scopes, issued_at_ms, expires_at_ms, signature) values ('p', 'c', 'l', 'a', '{}', 1, 1, '');
	insert into syncpg.sync_reactions (partition, client_id, client_commit_id, reaction_key, idempotency_key, commit_seq, reaction_type, reaction_version, payload, max_attempts, due_at_ms, created_at_ms)
	values ('p', 'c', 'k', 'r', '["p","c","k","r"]', 1, 't', 1, '{}', 1, 1, 1);`,
}

// fill puts rows into the tables that the migrations from one version to another made, and verifies that none was missed.
func fill(t *testing.T, conn *pgx.Conn, from, to int) {
	t.Helper()
	for v := from; v <= to; v++ {
		_, err := conn.Exec(t.Context(), rows[v])
		require.NoError(t, err)
	}
	names, err := conn.Query(t.Context(), `select relname from pg_class where relnamespace = 'syncpg'::regnamespace and relkind = 'r'`)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(names, pgx.RowTo[string])
	require.NoError(t, err)
	for _, table := range tables {
		var filled bool
		require.NoError(t, conn.QueryRow(t.Context(), `select exists (select from `+pgx.Identifier{"syncpg", table}.Sanitize()+`)`).Scan(&filled))
		require.True(t, filled, "no row for table %s: add one to this test", table)
	}
}

func TestEveryVersionGoesUpAndDownWithRowsInTheTables(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for v := 1; v <= count(t); v++ {
		t.Run(slices.Sorted(maps.Keys(files(t, v)))[v-1], func(t *testing.T) {
			t.Parallel()
			fresh := connect(t)
			require.NoError(t, migrator(t, fresh, migrations.Options{FS: files(t, v)}).Up(ctx))
			want := fingerprint(t, fresh)

			conn := connect(t)
			m := migrator(t, conn, migrations.Options{FS: files(t, v)})
			if v > 1 {
				require.NoError(t, migrator(t, conn, migrations.Options{FS: files(t, v-1)}).Up(ctx))
				fill(t, conn, 1, v-1)
			} else {
				require.NoError(t, m.Up(ctx))
				require.NoError(t, m.Down(ctx, 0))
			}
			before := fingerprint(t, conn)

			require.NoError(t, m.Up(ctx))
			require.Empty(t, cmp.Diff(want, fingerprint(t, conn)))
			fill(t, conn, v, v)
			require.NoError(t, m.Down(ctx, v-1))
			require.Empty(t, cmp.Diff(before, fingerprint(t, conn)))
			require.NoError(t, m.Up(ctx))
			require.Empty(t, cmp.Diff(want, fingerprint(t, conn)))

			require.NoError(t, m.Down(ctx, 0))
			require.Len(t, fingerprint(t, conn), 2, "only the version table and its column are left")
			require.NoError(t, m.Up(ctx))
			require.Empty(t, cmp.Diff(want, fingerprint(t, conn)))
		})
	}
}

func TestTernRunsTheSameFiles(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	ours := connect(t)
	require.NoError(t, migrator(t, ours, migrations.Options{}).Up(ctx))

	theirs := connect(t)
	_, err := theirs.Exec(ctx, `create schema syncpg`)
	require.NoError(t, err)
	tern, err := migrate.NewMigrator(ctx, theirs, migrations.VersionTable)
	require.NoError(t, err)
	require.NoError(t, tern.LoadMigrations(os.DirFS(".")))
	require.NoError(t, tern.Migrate(ctx))
	require.Empty(t, cmp.Diff(fingerprint(t, ours), fingerprint(t, theirs)))

	require.NoError(t, migrator(t, theirs, migrations.Options{}).Down(ctx, 0))
	require.NoError(t, tern.Migrate(ctx))
	require.NoError(t, tern.MigrateTo(ctx, 0))
	require.Len(t, fingerprint(t, theirs), 2)
}

func TestFilesHaveNoTemplateActions(t *testing.T) {
	t.Parallel()
	for name, file := range files(t, count(t)) {
		require.NotContains(t, string(file.Data), "{{", name)
	}
}

func TestManyMigratorsAtOnce(t *testing.T) {
	t.Parallel()
	const migrators = 20
	db := pgtest.New(t, pgtest.Options{Empty: true})
	var mu sync.Mutex
	var steps []migrations.Step
	errs := make(chan error, migrators)
	start := make(chan struct{})
	for range migrators {
		conn := connectTo(t, db.DSN)
		m := migrator(t, conn, migrations.Options{LockTimeout: time.Minute, OnStep: func(s migrations.Step) {
			mu.Lock()
			defer mu.Unlock()
			steps = append(steps, s)
		}})
		go func() {
			<-start
			errs <- m.Up(t.Context())
		}()
	}
	close(start)
	for range migrators {
		require.NoError(t, <-errs)
	}
	require.Len(t, steps, count(t), "each migration runs once")
	for i, s := range steps {
		require.Equal(t, i+1, s.Version)
		require.False(t, s.Down)
	}
	checked, err := migrations.Check(t.Context(), db.Pool)
	require.NoError(t, err)
	require.Equal(t, migrations.Checked{Current: count(t), Target: count(t)}, checked)
}

func TestStatusAndCheckOfAnOlderDatabase(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	conn := connect(t)
	m := migrator(t, conn, migrations.Options{})
	n := count(t)
	for version := range n {
		if version > 0 {
			require.NoError(t, migrator(t, conn, migrations.Options{FS: files(t, version)}).Up(ctx))
		}
		status, err := m.Status(ctx)
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(migrations.Status{Current: version, Target: n, Pending: m.List()[version:]}, status))

		_, err = migrations.Check(ctx, conn)
		require.ErrorIs(t, err, migrations.ErrTooOld)
		require.ErrorContains(t, err, "syncpg migrate up")
		var v *migrations.VersionError
		require.ErrorAs(t, err, &v)
		require.Equal(t, []int{version, n}, []int{v.Current, v.Target})
	}
	require.NoError(t, m.Up(ctx))
	status, err := m.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, migrations.Status{Current: n, Target: n}, status)

	require.NoError(t, m.Down(ctx, 0))
	_, err = migrations.Check(ctx, conn)
	require.ErrorIs(t, err, migrations.ErrTooOld)
}

// next adds a migration of a later build.
func next(t *testing.T, breaking string) fstest.MapFS {
	t.Helper()
	m := files(t, count(t))
	name := fmt.Sprintf("%03d_later.sql", count(t)+1)
	m[name] = &fstest.MapFile{Data: []byte(strings.NewReplacer("YES", breaking, "TRUE", map[string]string{"yes": "true", "no": "false"}[breaking]).Replace(`-- A later build.
-- breaking: YES
create table syncpg.later ();
insert into syncpg.sync_migrations (version, breaking) select max(version) + 1, TRUE from syncpg.sync_migrations;
---- create above / drop below ----
drop table syncpg.later;
delete from syncpg.sync_migrations where version = (select max(version) from syncpg.sync_migrations);
`))}
	return m
}

func TestOlderBuildOnANewerDatabase(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	n := count(t)
	for _, tc := range []struct {
		breaking string
		checkErr error
	}{{"no", nil}, {"yes", migrations.ErrTooNew}} {
		t.Run("breaking "+tc.breaking, func(t *testing.T) {
			t.Parallel()
			conn := connect(t)
			require.NoError(t, migrator(t, conn, migrations.Options{FS: next(t, tc.breaking)}).Up(ctx))
			newer := fingerprint(t, conn)

			checked, err := migrations.Check(ctx, conn)
			require.ErrorIs(t, err, tc.checkErr)
			if tc.checkErr == nil {
				require.Equal(t, migrations.Checked{Current: n + 1, Target: n, Newer: true}, checked)
			}

			m := migrator(t, conn, migrations.Options{})
			status, err := m.Status(ctx)
			require.NoError(t, err)
			require.Equal(t, migrations.Status{Current: n + 1, Target: n}, status)
			for _, err := range []error{m.Up(ctx), m.Down(ctx, 0)} {
				require.ErrorIs(t, err, migrations.ErrTooNew)
				var v *migrations.VersionError
				require.ErrorAs(t, err, &v)
				require.Equal(t, []int{n + 1, n}, []int{v.Current, v.Target})
			}
			require.Empty(t, cmp.Diff(newer, fingerprint(t, conn)))
		})
	}
}

func TestFilesSayWhatTheirRowsSay(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	m := migrator(t, conn, migrations.Options{})
	require.NoError(t, m.Up(t.Context()))
	rows, err := conn.Query(t.Context(), `select version, breaking from syncpg.sync_migrations order by version`)
	require.NoError(t, err)
	type row struct {
		Version  int
		Breaking bool
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	var want []row
	for _, f := range m.List() {
		want = append(want, row{f.Version, f.Breaking})
	}
	require.Empty(t, cmp.Diff(want, got))
}

func TestFailedStepNamesItsPlace(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const good = `-- breaking: no
create table syncpg.sync_migrations (version int, breaking boolean);
---- create above / drop below ----
drop table syncpg.sync_migrations;
`
	bad := func(text string) fstest.MapFS {
		return fstest.MapFS{"001_good.sql": {Data: []byte(good)}, "002_bad.sql": {Data: []byte(text)}}
	}
	for _, tc := range []struct {
		name, text string
		down       bool
		line       int
		code       string
	}{
		{
			name: "on the way up",
			text: "\n\n-- breaking: no, ä\n-- breaking: no\nselect 'äöü';\nselect\n  nothing;\n",
			line: 7,
			code: "42703",
		},
		{
			name: "on the way down",
			text: "-- breaking: no\nselect 1;\n---- create above / drop below ----\n\nselect 1;\ndrop table syncpg.gone;\n",
			down: true,
			code: "42P01", // DROP does not tell the position
		},
		{
			name: "on the way down, with a position",
			text: "-- breaking: no\nselect 1;\n---- create above / drop below ----\n\nselect 1;\nselect * from syncpg.gone;\n",
			down: true,
			line: 6,
			code: "42P01",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			conn := connect(t)
			m := migrator(t, conn, migrations.Options{FS: bad(tc.text)})
			err := m.Up(ctx)
			if tc.down {
				require.NoError(t, err)
				err = m.Down(ctx, 0)
			}
			var step *migrations.StepError
			require.ErrorAs(t, err, &step)
			require.Equal(t, "002_bad.sql", step.Name)
			require.Equal(t, tc.line, step.Line)
			require.Equal(t, tc.code, step.Code)
			require.ErrorContains(t, err, "SQLSTATE "+tc.code)
			var pg *pgconn.PgError
			require.ErrorAs(t, err, &pg)

			status, err := m.Status(ctx)
			require.NoError(t, err)
			require.Equal(t, map[bool]int{false: 1, true: 2}[tc.down], status.Current, "the failed step left nothing")
		})
	}
}

func TestBadFilesAreRefused(t *testing.T) {
	t.Parallel()
	for name, fsys := range map[string]fstest.MapFS{
		"no mark":   {"001_a.sql": {Data: []byte("select 1;")}},
		"two marks": {"001_a.sql": {Data: []byte("-- breaking: no\n-- breaking: yes\nselect 1;")}},
		"odd mark":  {"001_a.sql": {Data: []byte("-- breaking: perhaps\nselect 1;")}},
		"gap":       {"001_a.sql": {Data: []byte("-- breaking: no\nselect 1;")}, "003_c.sql": {Data: []byte("-- breaking: no\nselect 1;")}},
		"duplicate": {"001_a.sql": {Data: []byte("-- breaking: no\nselect 1;")}, "001_b.sql": {Data: []byte("-- breaking: no\nselect 1;")}},
	} {
		_, err := migrations.New(nil, migrations.Options{FS: fsys})
		require.Error(t, err, name)
	}
}

func TestDownTakesOnlyVersionsThatExist(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m := migrator(t, connect(t), migrations.Options{})
	require.Error(t, m.Down(ctx, -1))
	require.Error(t, m.Down(ctx, count(t)+1))
	require.NoError(t, m.Down(ctx, 0), "nothing is installed")
	require.NoError(t, m.Up(ctx))
	require.NoError(t, m.Down(ctx, count(t)), "it is there already")
	status, err := m.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, count(t), status.Current)
}

func TestLockThatIsNotFreeIsReported(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t, pgtest.Options{Empty: true})
	running, resume := make(chan struct{}), make(chan struct{})
	var once sync.Once
	first := migrator(t, connectTo(t, db.DSN), migrations.Options{OnStep: func(migrations.Step) {
		once.Do(func() {
			close(running)
			<-resume
		})
	}})
	done := make(chan error, 1)
	go func() { done <- first.Up(ctx) }()
	<-running
	err := migrator(t, connectTo(t, db.DSN), migrations.Options{LockTimeout: 20 * time.Millisecond}).Up(ctx)
	close(resume)
	require.ErrorIs(t, err, migrations.ErrLocked)
	require.NoError(t, <-done)

	// A lock inside of a step counts too, in every step: tern resets the setting after each.
	conn := connectTo(t, db.DSN)
	require.NoError(t, migrator(t, conn, migrations.Options{}).Down(ctx, 1))
	holder, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	_, err = holder.Exec(ctx, `lock table syncpg.sync_migrations`)
	require.NoError(t, err)
	err = migrator(t, conn, migrations.Options{LockTimeout: 20 * time.Millisecond}).Up(ctx)
	require.ErrorIs(t, err, migrations.ErrLocked)
	require.NoError(t, holder.Rollback(ctx))
}

func TestRoleThatMayNotCreateSchemas(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t, pgtest.Options{Empty: true})
	role := pgx.Identifier{"role of " + db.Name}.Sanitize()
	admin, conn := connectTo(t, db.DSN), connectTo(t, db.DSN)
	_, err := admin.Exec(ctx, `create role `+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		_, err := admin.Exec(ctx, `drop owned by `+role+` cascade; drop role `+role)
		require.NoError(t, err)
	})
	_, err = conn.Exec(ctx, `set session authorization `+role)
	require.NoError(t, err)
	m := migrator(t, conn, migrations.Options{})
	require.ErrorContains(t, m.Up(ctx), "42501")

	_, err = admin.Exec(ctx, `create schema syncpg; grant usage, create on schema syncpg to `+role)
	require.NoError(t, err)
	require.NoError(t, m.Up(ctx))
	require.NoError(t, m.Down(ctx, 0))
	_, err = conn.Exec(ctx, `reset session authorization`)
	require.NoError(t, err)
}

func TestDatabaseOfAnotherEncodingIsRefused(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t, pgtest.Options{Empty: true})
	name := db.Name + "_ascii"
	admin := connectTo(t, db.DSN)
	_, err := admin.Exec(ctx, `create database `+pgx.Identifier{name}.Sanitize()+` template template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'`)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.WithoutCancel(ctx), `drop database `+pgx.Identifier{name}.Sanitize()+` with (force)`)
		require.NoError(t, err)
	})
	cfg, err := pgx.ParseConfig(db.DSN)
	require.NoError(t, err)
	cfg.Database = name
	conn, err := pgx.ConnectConfig(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(ctx))) })

	err = migrator(t, conn, migrations.Options{}).Up(ctx)
	var step *migrations.StepError
	require.ErrorAs(t, err, &step)
	require.Equal(t, "0A000", step.Code)
	require.ErrorContains(t, err, "SQL_ASCII")
}
