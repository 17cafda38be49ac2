package pushsvc_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// tangledIR declares children before their parents, two ways from tops to mids, a row
// that is known by the id of another, tables that refer to each other, a unique index, a
// number as a key, and a column name that details cannot hold.
const tangledIR = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [
    {"name": "leaves", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "mid", "type": "string", "nullable": true},
       {"name": "slug", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "indexes": [{"name": "leaves_by_slug", "columns": ["slug"], "unique": true}],
     "references": [{"column": "mid", "parentTable": "mids", "onDelete": "CASCADE"}]},
    {"name": "mids", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "beside", "type": "string", "nullable": true},
       {"name": "top", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [
       {"column": "beside", "parentTable": "tops", "onDelete": "SET NULL"},
       {"column": "top", "parentTable": "tops", "onDelete": "CASCADE"}]},
    {"name": "tops", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "leaf", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [{"column": "leaf", "parentTable": "leaves", "onDelete": "CASCADE"}]},
    {"name": "halves", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "title", "type": "string", "nullable": true},
       {"name": "über", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [
       {"column": "id", "parentTable": "tops", "onDelete": "CASCADE"},
       {"column": "über", "parentTable": "tops", "onDelete": "RESTRICT"}]},
    {"name": "numbers", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "integer", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "of", "type": "integer", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [{"column": "of", "parentTable": "numbers", "onDelete": "CASCADE"}]}
  ]}`

func tangled(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) *bundle {
	t.Helper()
	s, err := schema.Parse([]byte(tangledIR))
	require.NoError(t, err)
	return setup(t, append([]func(*pgtest.Options, *pushsvc.Config){func(o *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Schema = s
		o.TemplateKey = "pushsvc-tangled"
		o.Setup = func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
		}
	}}, change...)...).over(s)
}

// TestCascadeBehindTwoReferences: a table to which one reference leads by SET NULL and
// another by CASCADE has children of its own: they are written with what its tables need
// prepared, locked, and known of their triggers.
func TestCascadeBehindTwoReferences(t *testing.T) {
	t.Parallel()
	b := tangled(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	// A trigger of the host makes each operation need a statement of its own.
	b.exec(t,
		`create function public.lone() returns trigger language plpgsql as $$ begin
			if (select count(*) from gone) > 1 then raise exception 'two at once' using errcode = '23514'; end if; return null; end $$`,
		`create trigger lone after delete on public.leaves referencing old table as gone for each statement execute function public.lone()`)
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.push(t, c.row(t, "tops", "t"), c.row(t, "mids", "m", "top", "t"), c.row(t, "leaves", "a", "mid", "m"), c.row(t, "leaves", "b", "mid", "m")))
	fresh := b.beside(t, func(o *pgtest.Options, cfg *pushsvc.Config) { cfg.Schema, o.MaxConns = b.schema, 1 })
	requireApplied(t, fresh.push(t, c.request(c.commit(c.row(t, "tops", "warm")))).Results...)
	requireApplied(t, fresh.push(t, c.request(c.commit(remove("tops", "t")))).Results...)
	require.Equal(t, []string{"delete t", "delete m", "delete a", "delete b"}, c.lastChanges(t))
	requireSoundLog(t, b)
}

// TestTablesThatReferToEachOther: a circle of tables, and of rows, ends.
func TestTablesThatReferToEachOther(t *testing.T) {
	t.Parallel()
	eachWire(t, tangled(t), func(t *testing.T, c *client) {
		requireApplied(t, c.push(t, c.row(t, "tops", "t", "leaf", "l"), c.row(t, "leaves", "l", "mid", "m"), c.row(t, "mids", "m", "top", "t", "beside", "u"), c.row(t, "tops", "u", "leaf", "l")))
		requireApplied(t, c.push(t, remove("tops", "t")))
		require.Equal(t, []string{"delete t", "delete m", "delete l", "delete u"}, c.lastChanges(t))
	})
}

// TestReferenceByTheKey: a row whose key is a reference goes with the other, and every
// upsert names it.
func TestReferenceByTheKey(t *testing.T) {
	t.Parallel()
	eachWire(t, tangled(t), func(t *testing.T, c *client) {
		c.violated(t, 0, `{"fieldPaths":["id"],"reason":"missing_parent","references":{"parent":"tops","row":"t"}}`, c.row(t, "halves", "t"))
		c.violated(t, 1, `{"reason":"missing_parent","references":{"parent":"tops","row":"v"}}`, c.row(t, "tops", "t"), c.row(t, "halves", "t", "über", "v"))
		requireApplied(t, c.push(t, c.row(t, "tops", "t"), c.row(t, "halves", "t"), c.row(t, "tops", "u"), c.row(t, "halves", "u", "über", "t")))
		c.violated(t, 0, `{"reason":"restricted_delete","references":{"child":"halves"}}`, remove("tops", "t"))
		requireApplied(t, c.push(t, remove("tops", "t"), remove("tops", "u")))
		require.Equal(t, []string{"delete t", "delete u", "delete t", "delete u"}, c.lastChanges(t))
	})
}

// TestDeletesOfWhatIsNoKey: ids that no row of the table can have are absent rows, also
// where the database would be asked for their children.
func TestDeletesOfWhatIsNoKey(t *testing.T) {
	t.Parallel()
	eachWire(t, tangled(t), func(t *testing.T, c *client) {
		requireApplied(t, c.push(t, c.upsertRow(t, "numbers", map[string]any{"id": 7, "project_id": "pr1"}),
			c.upsertRow(t, "numbers", map[string]any{"id": 8, "project_id": "pr1", "of": 7})))
		var ops []ssp2.Operation
		for _, id := range []string{"seven", "07", "7.0", "+7", " 7", "", "-", "9007199254740993", "99999999999999999999", "1e2", "7\x00", "NaN", strings.Repeat("7", 5000)} {
			ops = append(ops, remove("numbers", id))
		}
		requireApplied(t, c.push(t, ops...))
		for _, table := range []string{"tops", "mids"} {
			requireApplied(t, c.push(t, remove(table, ""), remove(table, "\x00"), remove(table, strings.Repeat("x", 5000))))
		}
		requireApplied(t, c.push(t, remove("numbers", "7")))
		require.Equal(t, []string{"delete 7", "delete 8"}, c.lastChanges(t))
	})
}

// TestUniqueValuesOfAppendedOperations: a value that a cascade sets free is free for the
// commits after it, and not for operations before it in the commit that leads to it: they
// come first.
func TestUniqueValuesOfAppendedOperations(t *testing.T) {
	t.Parallel()
	eachWire(t, tangled(t), func(t *testing.T, c *client) {
		requireApplied(t, c.push(t, c.row(t, "mids", "m"), c.row(t, "leaves", "a", "mid", "m", "slug", "s"), c.row(t, "mids", "n"), c.row(t, "leaves", "b", "mid", "n", "slug", "r")))
		results := c.send(t, c.commit(remove("mids", "m")), c.commit(c.row(t, "leaves", "c", "slug", "s")),
			c.commit(remove("mids", "n"), c.row(t, "leaves", "d", "slug", "r")), c.commit(remove("leaves", "c"), c.row(t, "leaves", "e", "slug", "s")))
		requireApplied(t, results[0], results[1], results[3])
		requireRejected(t, results[2], 1, ssp2.CodeConstraintViolation)
		require.NotNil(t, c.stored(t, "leaves", "b"))
	})
}

// TestMovedRowsKeepTheirChildren: a row that is deleted and inserted again in one commit,
// in another scope perhaps, is there all the time for those that refer to it; one that
// moves in a later commit is not.
func TestMovedRowsKeepTheirChildren(t *testing.T) {
	t.Parallel()
	eachWire(t, referring(t), func(t *testing.T, c *client) {
		move := c.upsertRow(t, "lists", map[string]any{"id": "l", "project_id": "pr2"})
		requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l"), c.row(t, "pins", "p", "list", "l"), c.row(t, "locks", "k", "list", "l")))
		requireApplied(t, c.push(t, remove("lists", "l"), move))
		require.Equal(t, []string{"delete l", "upsert l 1"}, c.lastChanges(t))
		require.Zero(t, c.tombstones(t))
		// The child moves, with its parent and to another.
		requireApplied(t, c.push(t, remove("items", "i"), remove("lists", "l"), c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l")))
		requireApplied(t, c.push(t, remove("lists", "l"), remove("items", "i"), c.row(t, "items", "i"), remove("locks", "k")))
		require.Equal(t, []string{"delete l", "delete i", "upsert i 1", "delete k", "upsert p 2"}, c.lastChanges(t))
		require.Equal(t, 2, c.tombstones(t))
	})
}

// TestAnswersAboutChildrenOutliveWhatIsTakenBack: a child that a commit moves away, and
// that is back when the database refuses the commit, is found by deletes after it,
// whenever they asked for it.
func TestAnswersAboutChildrenOutliveWhatIsTakenBack(t *testing.T) {
	t.Parallel()
	for _, ahead := range []bool{true, false} {
		t.Run(fmt.Sprint("asked ahead: ", ahead), func(t *testing.T) {
			t.Parallel()
			reads := func(ctx context.Context, c *pushsvc.Candidate) error {
				_, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "pins", Scopes: map[string][]string{"project_id": {"pr1"}}})
				return err
			}
			b := referring(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.ValidateCommit = reads })
			if !ahead {
				b.ReadAheadAtMost(0, 0)
			}
			// Refuses a commit when its entry of the log is written, which is after the hook
			// has read over its rows.
			b.exec(t,
				`create function public.no_moves() returns trigger language plpgsql as $$ begin
					if new.client_commit_id = 'refused' then raise exception 'no' using errcode = '23514'; end if; return new; end $$`,
				`create trigger no_moves before insert on syncpg.sync_commits for each row execute function public.no_moves()`)
			c := b.client(t, ssp2.WireV2)
			requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "lists", "m"), c.row(t, "items", "i", "list", "l"), c.row(t, "locks", "k", "list", "l")))
			refused := commit("refused", c.row(t, "items", "i", "list", "m"), c.row(t, "locks", "k", "list", "m"))
			results := c.send(t, refused, c.commit(remove("lists", "l")), c.commit(remove("locks", "k")), c.commit(remove("lists", "l")))
			requireRejected(t, results[0], 0, ssp2.CodeConstraintViolation)
			requireRejected(t, results[1], 0, ssp2.CodeReferenceViolation)
			requireApplied(t, results[2:]...)
			require.Nil(t, c.stored(t, "items", "i"))
			requireSoundLog(t, b)
		})
	}
}

// TestSetNullWithinTheSizeOfACommit: rows that lose their parent are written whole, and
// count; those that are deleted do not.
func TestSetNullWithinTheSizeOfACommit(t *testing.T) {
	t.Parallel()
	b := referring(t)
	c := b.client(t, ssp2.WireV2)
	long := strings.Repeat("x", 300)
	requireApplied(t, c.push(t, c.row(t, "lists", "absent"), c.row(t, "lists", "l"), c.row(t, "lists", "m")))
	for i := range 3 {
		requireApplied(t, c.push(t, c.row(t, "items", fmt.Sprint("i", long, i), "list", "l")), c.push(t, c.row(t, "pins", fmt.Sprint("p", long, i), "list", "m")))
	}
	b.CommitAtMost(800)
	requireRejected(t, c.push(t, remove("lists", "absent"), remove("lists", "m")), 1, ssp2.CodeConstraintViolation)
	require.NotNil(t, c.stored(t, "lists", "m"))
	requireApplied(t, c.push(t, remove("lists", "l")))
	b.CommitAtMost(24 << 20)
	requireApplied(t, c.push(t, remove("lists", "m")))
	requireSoundLog(t, b)
}

// TestServerOfASchemaWithReferences refuses pushes to a database whose schema is another,
// as any server does.
func TestServerOfASchemaWithReferences(t *testing.T) {
	t.Parallel()
	old, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":1,"tables":[{"name":"tops","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"project_id","type":"string","nullable":false}],"scopes":[{"pattern":"project:{project_id}"}]}]}`))
	require.NoError(t, err)
	next, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":2,"tables":[{"name":"tops","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"project_id","type":"string","nullable":false},{"name":"up","type":"string","nullable":true}],
		"scopes":[{"pattern":"project:{project_id}"}],"references":[{"column":"up","parentTable":"tops","onDelete":"CASCADE"}]}]}`))
	require.NoError(t, err)
	b := setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Schema = next
		o.TemplateKey = "pushsvc-before-references"
		o.Setup = func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, old, schemaddl.Options{})
		}
	}).over(next)
	c := b.client(t, ssp2.WireV2)
	_, err = b.Push(t.Context(), c.request(c.commit(remove("tops", "t"))))
	require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(err), "%v", err)
}

// TestMoreChildrenThanWereAskedFor: an answer that was cut refuses a commit only while
// enough of the rows in it are children still.
func TestMoreChildrenThanWereAskedFor(t *testing.T) {
	t.Parallel()
	b := referring(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.MaxCascade = 3 })
	c := b.client(t, ssp2.WireV2)
	ops := []ssp2.Operation{c.row(t, "lists", "l"), c.row(t, "items", "r0"), c.row(t, "items", "r1"), c.row(t, "items", "r2"), c.row(t, "items", "r3")}
	for i := range 11 {
		ops = append(ops, c.row(t, "items", fmt.Sprintf("i%02d", i), "list", "l", "up", fmt.Sprint("r", i/3)))
	}
	requireApplied(t, c.push(t, ops...))
	c.violated(t, 0, `{"reason":"cascade_limit"}`, remove("lists", "l"))
	// The first eight are asked for, nine are gone by the time, and two are left.
	results := c.send(t, c.commit(remove("items", "r0")), c.commit(remove("items", "r1")), c.commit(remove("items", "r2")), c.commit(remove("lists", "l")))
	requireApplied(t, results...)
	require.Equal(t, []string{"delete l", "delete i09", "delete i10"}, c.lastChanges(t))
	requireSoundLog(t, b)
}
