package pushsvc_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// referringIR has a reference of each kind to lists and to items, references from a table
// to itself, by an integer, and by a column that also scopes the row.
const referringIR = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [
    {"name": "lists", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "title", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}]},
    {"name": "items", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "list", "type": "string", "nullable": true},
       {"name": "up", "type": "string", "nullable": true},
       {"name": "title", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [
       {"column": "list", "parentTable": "lists", "onDelete": "CASCADE"},
       {"column": "up", "parentTable": "items", "onDelete": "CASCADE"}]},
    {"name": "pins", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "list", "type": "string", "nullable": true},
       {"name": "item", "type": "string", "nullable": true},
       {"name": "beside", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [
       {"column": "list", "parentTable": "lists", "onDelete": "SET NULL"},
       {"column": "item", "parentTable": "items", "onDelete": "CASCADE"},
       {"column": "beside", "parentTable": "items", "onDelete": "SET NULL"}]},
    {"name": "locks", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "list", "type": "string", "nullable": true},
       {"name": "item", "type": "string", "nullable": true},
       {"name": "beside", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "references": [
       {"column": "list", "parentTable": "lists", "onDelete": "RESTRICT"},
       {"column": "item", "parentTable": "items", "onDelete": "RESTRICT"},
       {"column": "beside", "parentTable": "items", "onDelete": "SET NULL"}]},
    {"name": "rooms", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "integer", "nullable": false},
       {"name": "org", "type": "integer", "nullable": false}],
     "scopes": [{"pattern": "org:{org}"}],
     "references": [{"column": "org", "parentTable": "rooms", "onDelete": "CASCADE"}]}
  ]}`

// referring returns a bundle whose schema has references.
func referring(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) *bundle {
	t.Helper()
	s, err := schema.Parse([]byte(referringIR))
	require.NoError(t, err)
	return setup(t, append([]func(*pgtest.Options, *pushsvc.Config){func(o *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Schema = s
		o.TemplateKey = "pushsvc-references"
		o.Setup = func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
		}
	}}, change...)...).over(s)
}

func (b *bundle) over(s *schema.Schema) *bundle {
	b.schema = s
	return b
}

// row is an upsert of a whole row in the project pr1, from pairs of column and value.
func (c *client) row(t testing.TB, table, id string, pairs ...string) ssp2.Operation {
	t.Helper()
	named := map[string]any{"id": id, "project_id": "pr1"}
	for i := 0; i < len(pairs); i += 2 {
		named[pairs[i]] = pairs[i+1]
	}
	return c.upsertRow(t, table, named)
}

// upsertRow is an upsert in the client's wire version.
func (c *client) upsertRow(t testing.TB, table string, named map[string]any) ssp2.Operation {
	t.Helper()
	if c.req.WireVersion != ssp2.WireV3 {
		return c.b.upsert(t, table, named)
	}
	tab, ok := c.b.schema.Table(table)
	require.True(t, ok)
	for _, col := range tab.Columns {
		if _, ok := named[col.Name]; !ok {
			named[col.Name] = nil
		}
	}
	return c.b.patch(t, table, named)
}

// violated checks a rejection because of a reference, with its details.
func (c *client) violated(t testing.TB, op int, details string, ops ...ssp2.Operation) {
	t.Helper()
	k := c.commit(ops...)
	resp := c.b.push(t, c.request(k))
	requireRejected(t, resp.Results[0], op, ssp2.CodeReferenceViolation)
	require.NotNil(t, resp.Details[0])
	require.Equal(t, []ssp2.DetailEntry{{OpIndex: int32(op), DetailsJSON: details}}, resp.Details[0].Entries)
	again := c.b.push(t, c.request(k))
	require.Equal(t, resp, again, "a replay is the same, details included")
}

// eachWire runs a test for every wire version, in a partition each.
func eachWire(t *testing.T, b *bundle, test func(t *testing.T, c *client)) {
	t.Helper()
	for _, wire := range wires {
		t.Run(fmt.Sprint("wire version ", wire), func(t *testing.T) {
			c := b.client(t, wire)
			test(t, c)
			requireSoundLog(t, b)
		})
	}
}

func TestReferenceMissingParent(t *testing.T) {
	t.Parallel()
	b := referring(t)
	long := strings.Repeat("x", 256)
	eachWire(t, b, func(t *testing.T, c *client) {
		missing := func(row string) string {
			if row != "" {
				row = `,"row":"` + row + `"`
			}
			return `{"fieldPaths":["list"],"reason":"missing_parent","references":{"parent":"lists"` + row + `}}`
		}
		c.violated(t, 0, missing("nowhere"), c.row(t, "items", "i", "list", "nowhere"))
		c.violated(t, 1, missing("nowhere"), c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "nowhere"), c.row(t, "items", "j", "list", "elsewhere"))
		c.violated(t, 0, missing(long), c.row(t, "items", "i", "list", long))
		c.violated(t, 0, missing(""), c.row(t, "items", "i", "list", long+"x"))
		c.violated(t, 0, missing(""), c.row(t, "items", "i", "list", strings.Repeat("x", 5000)))
		c.violated(t, 0, missing(""), c.row(t, "items", "i", "list", " untrimmed"))
		c.violated(t, 0, missing(""), c.row(t, "items", "i", "list", ""))
		require.Zero(t, c.seq(t))

		requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l")))
		requireApplied(t, c.push(t, c.row(t, "items", "j", "list", "m", "up", "k"), c.row(t, "lists", "m"), c.row(t, "items", "k", "up", "k")))
		requireApplied(t, c.push(t, c.row(t, "items", "free")))
		c.violated(t, 0, missing("n"), c.row(t, "items", "i", "list", "n"))
		c.violated(t, 1, missing("n"), c.row(t, "items", "i", "list", "n"), c.row(t, "items", "i", "list", "n"))
		c.violated(t, 1, missing("m"), remove("lists", "m"), c.row(t, "items", "j", "list", "m"))
		c.violated(t, 0, missing("m"), c.row(t, "items", "i", "list", "m"), remove("lists", "m"))
		requireApplied(t, c.push(t, c.row(t, "items", "i", "list", "n"), c.row(t, "items", "i", "list", "m")))
		requireApplied(t, c.push(t, c.row(t, "items", "z", "list", "n"), remove("items", "z")))
		require.Equal(t, "m", c.stored(t, "items", "i").Values["list"])

		// In one request, a commit sees what those before it leave.
		results := c.send(t,
			c.commit(c.row(t, "lists", "n")), c.commit(c.row(t, "items", "n1", "list", "n")),
			c.commit(remove("lists", "n")), c.commit(c.row(t, "items", "n2", "list", "n")))
		requireApplied(t, results[:3]...)
		requireRejected(t, results[3], 0, ssp2.CodeReferenceViolation)
		require.Nil(t, c.stored(t, "items", "n1"))
	})
}

// TestReferencesByOtherKeys: a key that is an integer, a row that is its own parent, and
// a column that also scopes the row, which an update does not change.
func TestReferencesByOtherKeys(t *testing.T) {
	t.Parallel()
	eachWire(t, referring(t), func(t *testing.T, c *client) {
		room := func(id, org int) ssp2.Operation { return c.upsertRow(t, "rooms", map[string]any{"id": id, "org": org}) }
		c.violated(t, 0, `{"fieldPaths":["org"],"reason":"missing_parent","references":{"parent":"rooms","row":"1"}}`, room(2, 1))
		requireApplied(t, c.push(t, room(1, 1)), c.push(t, room(2, 1), room(3, 2)))
		if c.req.WireVersion != ssp2.WireV3 {
			requireApplied(t, c.push(t, room(3, 9))) // stripped, so that it refers to nothing new
		}
		requireApplied(t, c.push(t, remove("rooms", "1")))
		require.Equal(t, []string{"delete 1", "delete 2", "delete 3"}, c.lastChanges(t))
	})
}

// lastChanges renders the changes of the newest commit.
func (c *client) lastChanges(t testing.TB) []string {
	t.Helper()
	var last []string
	prefix := fmt.Sprint(c.seq(t), " ")
	for _, line := range c.log(t) {
		if strings.HasPrefix(line, prefix) {
			fields := strings.Fields(line)
			if fields[2] == "delete" {
				fields = fields[:4]
			}
			last = append(last, strings.Join(fields[2:], " "))
		}
	}
	return last
}

func TestReferenceRestrict(t *testing.T) {
	t.Parallel()
	eachWire(t, referring(t), func(t *testing.T, c *client) {
		const restricted = `{"reason":"restricted_delete","references":{"child":"locks"}}`
		requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "lists", "m"), c.row(t, "items", "i", "list", "m"),
			c.row(t, "locks", "k", "list", "l"), c.row(t, "locks", "n", "item", "i")))
		c.violated(t, 0, restricted, remove("lists", "l"))
		c.violated(t, 1, restricted, remove("lists", "absent"), remove("lists", "m")) // by way of the item
		require.NotNil(t, c.stored(t, "lists", "l"))
		require.EqualValues(t, 1, c.seq(t))

		requireApplied(t, c.push(t, remove("lists", "l"), remove("locks", "k")))
		requireApplied(t, c.push(t, c.row(t, "locks", "n", "list", "m"), remove("items", "i")))
		c.violated(t, 0, restricted, remove("lists", "m"))
		requireApplied(t, c.push(t, remove("lists", "m"), c.row(t, "locks", "n")))

		// A row that loses one parent still refers to another.
		requireApplied(t, c.push(t, c.row(t, "lists", "u"), c.row(t, "items", "v"), c.row(t, "locks", "w", "list", "u", "beside", "v")))
		c.violated(t, 1, restricted, remove("items", "v"), remove("lists", "u"))
		requireApplied(t, c.push(t, remove("items", "v")))
		require.Equal(t, map[string]any{"id": "w", "project_id": "pr1", "list": "u"}, c.stored(t, "locks", "w").Values)

		// A row that is deleted and comes back has its children still.
		requireApplied(t, c.push(t, c.row(t, "lists", "o"), c.row(t, "locks", "r", "list", "o")))
		requireApplied(t, c.push(t, remove("lists", "o"), c.row(t, "lists", "o")))

		// Of one request: a child staged before counts, one staged away does not.
		results := c.send(t, c.commit(c.row(t, "lists", "p")), c.commit(c.row(t, "locks", "q", "list", "p")), c.commit(remove("lists", "p")),
			c.commit(remove("locks", "q")), c.commit(remove("lists", "p")))
		requireApplied(t, results[0], results[1], results[3], results[4])
		requireRejected(t, results[2], 0, ssp2.CodeReferenceViolation)
	})
}

func TestReferenceCascade(t *testing.T) {
	t.Parallel()
	eachWire(t, referring(t), func(t *testing.T, c *client) {
		// Levels, two ways to one row (item d and pin p), and a cycle.
		requireApplied(t, c.push(t,
			c.row(t, "lists", "l"), c.row(t, "lists", "other"),
			c.row(t, "items", "b", "list", "l", "up", "c"), c.row(t, "items", "a", "list", "l"),
			c.row(t, "items", "c", "up", "a"), c.row(t, "items", "d", "up", "b", "list", "l"),
			c.row(t, "pins", "p", "item", "d", "list", "l"), c.row(t, "pins", "q", "beside", "c", "list", "l"),
			c.row(t, "items", "stays", "list", "other")))
		requireApplied(t, c.push(t, remove("lists", "l")))
		require.Equal(t, []string{"delete l", "delete a", "delete b", "delete d", "delete p", "upsert q 2", "delete c"}, c.lastChanges(t))
		require.Equal(t, 6, c.tombstones(t))
		require.Equal(t, map[string]any{"id": "q", "project_id": "pr1"}, c.stored(t, "pins", "q").Values)
		require.NotNil(t, c.stored(t, "items", "stays"))

		requireApplied(t, c.push(t, c.row(t, "items", "x"), c.row(t, "items", "y", "up", "x"), c.row(t, "items", "x", "up", "y"), c.row(t, "items", "z", "up", "z")))
		requireApplied(t, c.push(t, remove("items", "x"), remove("items", "z")))
		require.Equal(t, []string{"delete x", "delete z", "delete y"}, c.lastChanges(t))
		requireApplied(t, c.push(t, c.row(t, "lists", "l2"), c.row(t, "items", "o", "list", "l2")))
		requireApplied(t, c.push(t, remove("lists", "l2"), remove("items", "o")))
		require.Equal(t, []string{"delete l2", "delete o"}, c.lastChanges(t), "what the client deleted is deleted once")
		requireApplied(t, c.push(t, c.row(t, "lists", "l3"), c.row(t, "items", "r", "list", "l3")))
		requireApplied(t, c.push(t, c.row(t, "items", "r", "list", "other"), remove("lists", "l3")))
		require.Equal(t, []string{"upsert r 2", "delete l3"}, c.lastChanges(t), "what the client moved away stays")

		// Over the staged rows of one request.
		results := c.send(t, c.commit(c.row(t, "lists", "s")), c.commit(c.row(t, "items", "t", "list", "s")), c.commit(remove("lists", "s")))
		requireApplied(t, results...)
		require.Nil(t, c.stored(t, "items", "t"))
		requireApplied(t, c.push(t, c.row(t, "lists", "w"), c.row(t, "items", "w2", "list", "w"), c.row(t, "items", "w0"), c.row(t, "items", "w3", "list", "w", "up", "w0")))
		results = c.send(t, c.commit(c.row(t, "items", "w1", "list", "w")), c.commit(remove("lists", "w")), c.commit(remove("items", "w0")))
		requireApplied(t, results...)
		require.Equal(t, []string{"delete w0"}, c.lastChanges(t), "what a commit before it deleted is no child")
		log := c.log(t)
		require.Equal(t, []string{"w", "w1", "w2", "w3"}, rowsOf(log[len(log)-5:len(log)-1]), "by row id, staged or not")
		if c.req.WireVersion == ssp2.WireV3 {
			requireApplied(t, c.push(t, c.row(t, "lists", "u"), c.row(t, "items", "v", "list", "u")))
			requireApplied(t, c.push(t, c.b.patch(t, "items", map[string]any{"id": "v", "title": "new"}), remove("lists", "u")))
			require.Equal(t, []string{"upsert v 2", "delete u", "delete v"}, c.lastChanges(t), "an upsert that does not name the parent does not need it")
			requireRejected(t, c.push(t, c.b.patch(t, "items", map[string]any{"id": "v", "title": "new"})), 0, ssp2.CodeRowDeleted)
		}
	})
}

// rowsOf returns the row ids of lines of a log.
func rowsOf(log []string) []string {
	var ids []string
	for _, line := range log {
		ids = append(ids, strings.Fields(line)[3])
	}
	return ids
}

func TestReferenceSetNull(t *testing.T) {
	t.Parallel()
	eachWire(t, referring(t), func(t *testing.T, c *client) {
		requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "items", "i"), c.row(t, "pins", "p", "list", "l", "beside", "i")))
		requireApplied(t, c.push(t, c.row(t, "lists", "m")))
		requireApplied(t, c.push(t, remove("lists", "l")))
		require.Equal(t, []string{"delete l", "upsert p 2"}, c.lastChanges(t))
		require.Equal(t, &storedRow{
			Version: 2, Columns: []int64{1, 1, 2, 1, 1},
			Values: map[string]any{"id": "p", "project_id": "pr1", "beside": "i"},
		}, c.stored(t, "pins", "p"), "sparse: only the reference is written")
		require.Equal(t, 1, scalar[int](t, c.b, `select count(*) from public.pins where _sync_partition = $1 and list is null and beside = 'i'`, c.req.Partition))

		requireApplied(t, c.push(t, c.row(t, "pins", "q", "list", "m", "beside", "i")))
		requireApplied(t, c.push(t, remove("lists", "m"), remove("items", "i")))
		require.Equal(t, []string{"delete m", "delete i", "upsert q 2", "upsert p 3"}, c.lastChanges(t), "both columns in one upsert")
		require.Equal(t, map[string]any{"id": "q", "project_id": "pr1"}, c.stored(t, "pins", "q").Values)
		require.Equal(t, 3, c.tombstones(t))
	})
}

func TestReferenceCascadeLimit(t *testing.T) {
	t.Parallel()
	b := referring(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.MaxCascade = 3 })
	eachWire(t, b, func(t *testing.T, c *client) {
		fill := func(list string, items int) {
			ops := []ssp2.Operation{c.row(t, "lists", list)}
			for i := range items {
				ops = append(ops, c.row(t, "items", fmt.Sprint(list, i), "list", list))
			}
			requireApplied(t, c.push(t, ops...))
		}
		fill("l", 3)
		fill("m", 4)
		c.violated(t, 0, `{"reason":"cascade_limit"}`, remove("lists", "m"))
		fill("n", 1)
		c.violated(t, 1, `{"reason":"cascade_limit"}`, remove("lists", "l"), remove("lists", "n"))
		requireApplied(t, c.push(t, remove("lists", "l")), c.push(t, remove("lists", "m"), remove("items", "m2")), c.push(t, remove("lists", "n")))
		requireApplied(t, c.push(t, c.row(t, "items", "i0"), c.row(t, "items", "i1", "up", "i0"), c.row(t, "items", "i2", "up", "i1"),
			c.row(t, "items", "i3", "up", "i2"), c.row(t, "pins", "p", "beside", "i2")))
		c.violated(t, 0, `{"reason":"cascade_limit"}`, remove("items", "i0"))
		requireApplied(t, c.push(t, remove("items", "i1")))
	})
	_, err := pushsvc.New(b.db.Pool, pushsvc.Config{Schema: b.schema, MaxCascade: -1})
	require.ErrorContains(t, err, "MaxCascade")
}

// TestAppendedOperationsAreAuthorized: who may delete a parent may not by that write the
// children that the actor may not write.
func TestAppendedOperationsAreAuthorized(t *testing.T) {
	t.Parallel()
	c := referring(t).client(t, ssp2.WireV2)
	hidden := c.b.upsert(t, "items", map[string]any{"id": "i", "project_id": "pr2", "list": "l"})
	requireApplied(t, c.push(t, c.row(t, "lists", "l"), hidden, c.row(t, "lists", "m")))
	requireApplied(t, c.push(t, c.b.upsert(t, "pins", map[string]any{"id": "p", "project_id": "pr2", "list": "m"})))
	bob := c.with(func(r *pushsvc.Request) {
		r.ClientID, r.Actor, r.Scopes = "bob", "bob", allow(scope.Allowed{"project_id": {"pr1"}})
	})
	requireRejected(t, bob.push(t, remove("lists", "absent"), remove("lists", "l")), 1, ssp2.CodeForbidden)
	requireRejected(t, bob.push(t, remove("lists", "m")), 0, ssp2.CodeForbidden)
	requireApplied(t, c.push(t, remove("lists", "l"), remove("lists", "m")))
}

// TestAppendedOperationsMeetTheHooks: row validators run on them, they are evidence, and
// reads of the candidate state see what they leave. A rejection names the operation of
// the client that caused them.
func TestAppendedOperationsMeetTheHooks(t *testing.T) {
	t.Parallel()
	j := &court{}
	var rows []string
	no := false
	validate := func(_ context.Context, v *pushsvc.RowValidation) error {
		rows = append(rows, fmt.Sprint(v.Op == ssp2.OpDelete, " ", v.RowID, " ", rowMap(v.Row)["list"], " ", rowMap(v.Stored)["list"]))
		if no && v.Op == ssp2.OpDelete {
			return pushsvc.Reject("app.kept", "", nil)
		}
		return nil
	}
	b := referring(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"items": validate, "pins": validate}
		cfg.ValidateCommit = j.validate
	})
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l"), c.row(t, "pins", "p", "list", "l"), c.row(t, "lists", "m")))

	rows, no = nil, true
	result := c.push(t, remove("lists", "m"), remove("lists", "l"))
	require.Equal(t, ssp2.PushRejected, result.Status)
	require.Equal(t, []ssp2.OpResult{{OpIndex: 1, Status: ssp2.OpError, Code: "app.kept", Message: "app.kept"}}, result.Results)
	rows, no = nil, false
	var got []string
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		for _, e := range cand.Operations {
			got = append(got, fmt.Sprint(e.OpIndex, " ", e.Appended, " ", e.Table, " ", e.RowID, " ", e.Op == ssp2.OpDelete, " ", e.StoredVersion, " ", e.NextVersion, " ", rowMap(e.Row)["list"], " ", rowMap(e.Stored)["list"]))
		}
		for _, table := range []string{"items", "pins"} {
			scanned, err := cand.ScanRows(ctx, pushsvc.ScopeScan{Table: table, Scopes: map[string][]string{"project_id": {"pr1"}}})
			if err != nil {
				return err
			}
			for _, row := range scanned {
				got = append(got, fmt.Sprint(table, " ", row.RowID, " ", rowMap(row.Row)["list"]))
			}
			row, err := cand.GetRow(ctx, table, map[string]string{"items": "i", "pins": "p"}[table])
			if err != nil || (row == nil) != (table == "items") {
				return fmt.Errorf("GetRow in %s: %v, %w", table, row, err)
			}
		}
		return nil
	})
	requireApplied(t, c.push(t, remove("lists", "absent"), remove("lists", "l")))
	require.Equal(t, []string{"true i <nil> l", "false p <nil> l"}, rows)
	require.Equal(t, []string{
		"0 false lists absent true 0 0 <nil> <nil>", "1 false lists l true 1 0 <nil> <nil>",
		"1 true items i true 1 0 <nil> l", "1 true pins p false 1 2 <nil> l", "pins p <nil>",
	}, got)

	// A row that loses a parent by one operation and is deleted by another is there once.
	requireApplied(t, c.push(t, c.row(t, "items", "x"), c.row(t, "items", "y"), c.row(t, "items", "z", "up", "y"), c.row(t, "pins", "q", "beside", "x", "item", "z")))
	got = nil
	requireApplied(t, c.push(t, remove("items", "x"), remove("items", "y")))
	require.Equal(t, []string{"1 true pins q true 1 0 <nil> <nil>", "1 true items z true 1 0 <nil> <nil>", "pins p <nil>"}, got[2:])
	requireSoundLog(t, b)
}

// TestTheDatabaseRefusesAnAppendedOperation: the commit is rejected at the operation of
// the client that led to it, and the commits around it are not.
func TestTheDatabaseRefusesAnAppendedOperation(t *testing.T) {
	t.Parallel()
	b := referring(t)
	b.exec(t,
		`create function public.keep() returns trigger language plpgsql as $$ begin if old.title = 'keep' then raise exception 'kept' using errcode = '23514'; end if; return old; end $$`,
		`create trigger keep before delete on public.items for each row execute function public.keep()`)
	eachWire(t, b, func(t *testing.T, c *client) {
		requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "lists", "m"), c.row(t, "lists", "n"), c.row(t, "items", "i", "list", "l", "title", "keep"), c.row(t, "items", "j", "list", "m")))
		results := c.send(t, c.commit(remove("lists", "m")), c.commit(remove("lists", "n"), remove("lists", "l")), c.commit(remove("lists", "n")))
		requireApplied(t, results[0], results[2])
		requireRejected(t, results[1], 1, ssp2.CodeConstraintViolation)
		require.NotNil(t, c.stored(t, "items", "i"))
		require.Nil(t, c.stored(t, "items", "j"))
	})
}

// TestDeferredChecksOfAppendedOperations: a constraint that the host defers rejects the
// commit whose delete led to the write that breaks it.
func TestDeferredChecksOfAppendedOperations(t *testing.T) {
	t.Parallel()
	b := referring(t)
	b.exec(t,
		`create function public.pinned() returns trigger language plpgsql as $$ begin if new.list is null then raise exception 'no list' using errcode = '23514'; end if; return null; end $$`,
		`create constraint trigger pinned after update on public.pins deferrable initially deferred for each row execute function public.pinned()`)
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "lists", "m"), c.row(t, "lists", "n"), c.row(t, "pins", "p", "list", "m")))
	results := c.send(t, c.commit(remove("lists", "l")), c.commit(c.row(t, "lists", "n"), remove("lists", "m")), c.commit(remove("lists", "n")))
	requireApplied(t, results[0], results[2])
	requireRejected(t, results[1], 1, ssp2.CodeConstraintViolation)
	requireSoundLog(t, b)
}

// TestCascadeOfANewConnection: nothing is left to prepare when a push goes on behind a
// commit that the database refused.
func TestCascadeOfANewConnection(t *testing.T) {
	t.Parallel()
	b := referring(t)
	b.exec(t, `alter table public.lists add constraint short check (length(title) < 5)`)
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l"), c.row(t, "pins", "p", "item", "i")))
	beside := b.beside(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.Schema = b.schema })
	resp := beside.push(t, c.request(c.commit(c.row(t, "lists", "m", "title", "too long")), c.commit(remove("lists", "l"))))
	requireRejected(t, resp.Results[0], 0, ssp2.CodeConstraintViolation)
	requireApplied(t, resp.Results[1])
	require.Nil(t, c.stored(t, "pins", "p"))
}

// TestReferenceRaces: one client deletes the parent while another adds a child: whoever
// comes first decides, and no child is left without its parent.
//
//nolint:paralleltest // blocked sessions are counted in the whole database
func TestReferenceRaces(t *testing.T) {
	t.Parallel()
	b := referring(t)
	beside := b.beside(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.Schema = b.schema })
	for _, table := range []string{"items", "pins", "locks"} {
		for _, deleteFirst := range []bool{true, false} {
			t.Run(fmt.Sprint(table, ", the delete first: ", deleteFirst), func(t *testing.T) {
				c := b.client(t, ssp2.WireV2)
				requireApplied(t, c.push(t, c.row(t, "lists", "l")))
				other := c.with(func(r *pushsvc.Request) { r.ClientID, r.Actor = "c2", "bob" })
				commits := []ssp2.PushCommit{c.commit(remove("lists", "l")), c.commit(c.row(t, table, "x", "list", "l"))}
				if !deleteFirst {
					slices.Reverse(commits)
				}
				release := c.hold(t)
				first := c.pushing(t.Context(), b.Service, commits[0])
				require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
				second := other.pushing(t.Context(), beside.Service, commits[1])
				require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
				release()
				requireApplied(t, (<-first).resp.Results...)
				late := (<-second).resp.Results[0]
				if deleteFirst || table == "locks" {
					requireRejected(t, late, 0, ssp2.CodeReferenceViolation)
				} else {
					requireApplied(t, late)
				}
				require.Equal(t, !deleteFirst && table == "locks", c.stored(t, "lists", "l") != nil)
				require.Equal(t, !deleteFirst && table != "items", c.stored(t, table, "x") != nil)
				requireSoundLog(t, b)
			})
		}
	}
}

// TestRoundTripsOfReferences: what a commit refers to, and the children of the rows that
// it deletes, come with its admission; those of the children cost one round trip for each
// level of them, however many commits of a request delete something.
func TestRoundTripsOfReferences(t *testing.T) {
	t.Parallel()
	b := referring(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	many := func(n int, f func(i int) ssp2.Operation) []ssp2.Operation {
		ops := make([]ssp2.Operation, n)
		for i := range ops {
			ops[i] = f(i)
		}
		return ops
	}
	each := func(ops ...ssp2.Operation) []ssp2.PushCommit {
		commits := make([]ssp2.PushCommit, len(ops))
		for i := range ops {
			commits[i] = c.commit(ops[i])
		}
		return commits
	}
	together := func(ops ...ssp2.Operation) []ssp2.PushCommit { return []ssp2.PushCommit{c.commit(ops...)} }
	requireApplied(t, c.push(t, c.row(t, "lists", "warm"), c.row(t, "items", "warm", "list", "warm"), c.row(t, "pins", "warm", "list", "warm"), c.row(t, "locks", "warm")))
	requireApplied(t, c.push(t, remove("lists", "warm"), remove("locks", "warm"), remove("pins", "warm")))
	requireApplied(t, c.push(t, c.row(t, "lists", "l"), c.row(t, "lists", "wide"), c.row(t, "items", "parent"), c.row(t, "lists", "alone")))
	requireApplied(t, c.push(t, c.row(t, "lists", "deep"), c.row(t, "items", "d0", "list", "deep"), c.row(t, "items", "d1", "up", "d0"), c.row(t, "items", "d2", "up", "d1")))
	for _, half := range []string{"a", "b"} {
		requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation {
			return c.row(t, "pins", fmt.Sprint(half, i), "item", "parent", "beside", "d2")
		})...))
		requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation { return c.row(t, "items", fmt.Sprint(half, i), "list", "wide") })...))
	}
	// Lists without children, items with pins, and lists with items that have pins.
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation { return c.row(t, "lists", fmt.Sprint("bare", i)) })...))
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation { return c.row(t, "items", fmt.Sprint("leafy", i)) })...))
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation {
		return c.row(t, "pins", fmt.Sprint("leaf", i), "item", fmt.Sprint("leafy", i))
	})...))
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation { return c.row(t, "lists", fmt.Sprint("tall", i)) })...))
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation {
		return c.row(t, "items", fmt.Sprint("stem", i), "list", fmt.Sprint("tall", i))
	})...))
	requireApplied(t, c.push(t, many(500, func(i int) ssp2.Operation {
		return c.row(t, "pins", fmt.Sprint("tip", i), "item", fmt.Sprint("stem", i))
	})...))
	deletes := func(table, name string) []ssp2.PushCommit {
		return each(many(500, func(i int) ssp2.Operation { return remove(table, fmt.Sprint(name, i)) })...)
	}
	for _, tc := range []struct {
		name    string
		commits []ssp2.PushCommit
		trips   int
	}{
		{"insert of a hundred children", together(many(100, func(i int) ssp2.Operation { return c.row(t, "items", fmt.Sprint("i", i), "list", "l", "up", "i0") })...), 2},
		{"insert of a parent and its children", together(c.row(t, "locks", "k", "list", "m", "item", "n"), c.row(t, "items", "n", "list", "m"), c.row(t, "lists", "m")), 2},
		{"delete of a row that nothing may refer to", together(remove("pins", "absent"), remove("locks", "k")), 2},
		{"delete of a row that nothing refers to", together(remove("lists", "alone")), 2},
		{"cascade of a thousand children", together(remove("items", "parent")), 2},
		{"cascade of a thousand children that may have some", together(remove("lists", "wide")), 3},
		{"cascade of three levels, and what loses its parent", together(remove("lists", "deep")), 5},
		{"500 commits that delete a row without children", deletes("lists", "bare"), 2},
		{"500 commits that delete a row with one child", deletes("items", "leafy"), 2},
		{"500 commits that delete a row with two levels of children", deletes("lists", "tall"), 3},
	} {
		b.Wait()
		b.counter.Reset()
		results := c.send(t, tc.commits...)
		b.Wait()
		requireApplied(t, results...)
		require.Zero(t, b.counter.PrepareRoundTrips(), tc.name)
		require.Equal(t, tc.trips, b.counter.RoundTrips(), "%s: %v", tc.name, b.counter.Statements())
	}
	require.Zero(t, scalar[int](t, b, `select count(*) from public.pins where _sync_row_id like 'leaf%' or _sync_row_id like 'tip%'`))
	requireSoundLog(t, b)
}

// TestChildrenReadAheadAreBounded: what does not fit is asked for later, in rounds while
// there is something left of the bytes, and then by each commit for itself.
func TestChildrenReadAheadAreBounded(t *testing.T) {
	t.Parallel()
	b := referring(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	for _, tc := range []struct { //nolint:paralleltest // they change the service
		name  string
		rows  int
		bytes int64
		trips int
	}{
		{"warm", 100, 1 << 20, 0},
		{"everything fits", 100, 1 << 20, 2},
		{"half of the rows, of which the last may not be all", 4, 1 << 20, 4}, // for the 4th and the 8th
		{"no bytes", 100, 0, 10},
		{"the bytes of half of the rows", 100, 320, 6}, // for each from the 5th on
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			var commits []ssp2.PushCommit
			for i := range 8 {
				item := fmt.Sprint("i", i)
				requireApplied(t, c.push(t, c.row(t, "items", item), c.row(t, "pins", fmt.Sprint("p", strings.Repeat("x", 50), i), "item", item)))
				commits = append(commits, c.commit(remove("items", item)))
			}
			b.ReadAheadAtMost(tc.rows, tc.bytes)
			b.Wait()
			b.counter.Reset()
			results := c.send(t, commits...)
			b.Wait()
			requireApplied(t, results...)
			if tc.trips > 0 {
				require.Equal(t, tc.trips, b.counter.RoundTrips())
			}
			requireSoundLog(t, b)
		})
	}
}

// TestMoreChildrenThanATransactionReads: deletes whose children are too large together
// get transactions of their own, and one that is so alone is rejected for good.
func TestMoreChildrenThanATransactionReads(t *testing.T) {
	t.Parallel()
	b := referring(t)
	c := b.client(t, ssp2.WireV2)
	big := strings.Repeat("x", 40_000)
	for _, list := range []string{"l", "m"} {
		requireApplied(t, c.push(t, c.row(t, "lists", list), c.row(t, "items", list+"1", "list", list, "title", big), c.row(t, "items", list+"2", "list", list, "title", big)))
	}
	requireApplied(t, c.push(t, c.row(t, "items", "l3", "list", "l", "title", big)))
	b.AdmitAtMost(100_000)
	b.ReadAheadAtMost(100, 50_000) // one of them
	commits := []ssp2.PushCommit{
		c.commit(c.row(t, "items", "m3", "list", "m")), c.commit(c.row(t, "lists", "n"), remove("lists", "l")), c.commit(remove("lists", "m")),
	}
	results := c.send(t, commits...)
	requireApplied(t, results[0], results[2])
	requireRejected(t, results[1], 1, ssp2.CodeConstraintViolation)
	require.NotNil(t, c.stored(t, "items", "l1"))
	require.Nil(t, c.stored(t, "items", "m3"))
	require.Equal(t, results[1], c.send(t, commits[1])[0], "on every replay")
	requireApplied(t, c.push(t, remove("items", "l3")), c.push(t, remove("lists", "l")))
	requireSoundLog(t, b)
}

// TestReferencesInExecModes: whatever way the owner of the pool lets pgx run statements,
// references come to the same, also behind a commit that has to be taken back.
func TestReferencesInExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b := referring(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
				o.MaxConns = 1
				o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
				cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error {
					if c.Operations[0].RowID != "refused" {
						return nil
					}
					if rows, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "lists", Scopes: map[string][]string{"project_id": {"pr1"}}}); err != nil || len(rows) == 0 {
						return fmt.Errorf("scanning: %v, %w", rows, err)
					}
					return pushsvc.Reject("app.no", "", nil)
				}
			})
			c := b.client(t, ssp2.WireV2)
			for round := range 2 {
				l, i, j := fmt.Sprint(`l"\'ü`, round), fmt.Sprint("i", round), fmt.Sprint("j", round)
				results := c.send(t,
					c.commit(c.row(t, "lists", l), c.row(t, "items", i, "list", l), c.row(t, "pins", "p", "list", l)),
					c.commit(c.row(t, "lists", "refused"), c.row(t, "items", j, "list", l)),
					c.commit(remove("lists", l)),
					c.commit(c.row(t, "items", j, "list", l)))
				requireApplied(t, results[0], results[2])
				require.Equal(t, "app.no", results[1].Results[0].Code)
				requireRejected(t, results[3], 0, ssp2.CodeReferenceViolation)
				require.JSONEq(t, fmt.Sprintf(`{"fieldPaths":["list"],"reason":"missing_parent","references":{"parent":"lists","row":%s}}`, strconv.Quote(l)),
					scalar[string](t, b, `select details::jsonb #>> '{0,details}' from syncpg.sync_push_results where details like '%missing%' order by recorded_at_ms, client_commit_id desc limit 1`))
				require.Nil(t, c.stored(t, "items", i))
				require.Nil(t, c.stored(t, "items", j))
			}
			requireSoundLog(t, b)
		})
	}
}

// TestReferencesOfTrustedWrites: the host's own commits keep them too, also several in
// one transaction of the host.
func TestReferencesOfTrustedWrites(t *testing.T) {
	t.Parallel()
	b := referring(t)
	c := b.client(t, ssp2.WireV3)
	list := func(id string) pushsvc.Operation {
		return pushsvc.Upsert("lists", map[string]any{"id": id, "project_id": "pr1"})
	}
	item := func(id, list string) pushsvc.Operation {
		return pushsvc.Upsert("items", map[string]any{"id": id, "project_id": "pr1", "list": list})
	}
	tx, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	for id, ops := range [][]pushsvc.Operation{{list("l"), list("m")}, {item("i", "l"), item("j", "m")}, {pushsvc.Delete("lists", "l")}} {
		_, _, err := b.ApplyTx(t.Context(), tx, c.seed(strconv.Itoa(id), ops...))
		require.NoError(t, err)
	}
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("bad", item("k", "l")))
	var rejected *pushsvc.RejectedError
	require.ErrorAs(t, err, &rejected)
	require.Equal(t, ssp2.CodeReferenceViolation, rejected.Code)
	require.Contains(t, rejected.Details, "missing_parent")
	require.NoError(t, tx.Commit(t.Context()))
	require.Nil(t, c.stored(t, "items", "i"))

	_, err = b.Apply(t.Context(), c.seed("good", pushsvc.Delete("lists", "m")))
	require.NoError(t, err)
	require.Equal(t, []string{"delete m", "delete j"}, c.lastChanges(t))
	requireSoundLog(t, b)
}
