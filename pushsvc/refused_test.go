package pushsvc_test

import (
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// incompressible returns text that an index entry cannot make smaller.
func incompressible(n int) string {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return base64.RawURLEncoding.EncodeToString(b)[:n]
}

// poison lists rows that the database cannot hold, however often they are pushed.
var poison = []struct {
	name, table string
	row         map[string]any
	code        ssp2.Code
}{
	{"U+0000 in a string", "notes", note("p", "a\x00b"), ssp2.CodeConstraintViolation},
	{"U+0000 in the row id", "notes", note("p\x00", "a"), ssp2.CodeConstraintViolation},
	{"U+0000 in a scope value", "notes", map[string]any{"id": "p", "project_id": "a\x00b"}, ssp2.CodeConstraintViolation},
	{"an escape jsonb refuses", "notes", meta(`{"a":"\u0000"}`), ssp2.CodeConstraintViolation},
	{"the same in a key", "notes", meta(`{"\u0000":1}`), ssp2.CodeConstraintViolation},
	{"a lone surrogate", "notes", meta(`"\ud800"`), ssp2.CodeConstraintViolation},
	{"a number out of jsonb's range", "notes", meta(`1e400000`), ssp2.CodeConstraintViolation},
	{"a 10 KB row id", "notes", note(incompressible(10_000), "a"), ssp2.CodeConstraintViolation},
	{"a 10 KB row id that compresses", "notes", note(strings.Repeat("x", 10_000), "a"), ssp2.CodeConstraintViolation},
	{"a 10 KB scope value", "notes", map[string]any{"id": "p", "project_id": incompressible(10_000)}, ssp2.CodeConstraintViolation},
	{"text over index size in a unique column", "slugs", map[string]any{"id": "p", "project_id": "pr1", "slug": incompressible(10_000)}, ssp2.CodeConstraintViolation},
	{"a unique value that is taken", "slugs", map[string]any{"id": "p", "project_id": "pr1", "slug": "taken"}, ssp2.CodeConstraintViolation},
}

// meta is a note with this JSON.
func meta(json string) map[string]any { return changed(note("p", "a"), map[string]any{"meta": json}) }

// TestPoison: what the row itself makes impossible is a rejection of exactly its
// commit, at exactly its operation, for good; everything around it is applied. It is
// the same whether the tables have triggers or not.
func TestPoison(t *testing.T) {
	t.Parallel()
	for _, triggers := range []bool{false, true} {
		b := setup(t)
		if triggers {
			b.exec(t, `create function public.watch() returns trigger language plpgsql as $$ begin return new; end $$`,
				`create trigger watch after insert or update on public.notes for each row execute function public.watch()`,
				`create trigger watch after insert on public.slugs for each statement execute function public.watch()`)
		}
		for _, p := range poison {
			t.Run(fmt.Sprintf("%s/triggers %t", p.name, triggers), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, ssp2.WireV2)
				c.apply(t, b.upsert(t, "slugs", map[string]any{"id": "first", "project_id": "pr1", "slug": "taken"}))
				bad := b.upsert(t, p.table, p.row)
				fine := func(n int) []ssp2.Operation {
					id := fmt.Sprint("fine", n)
					return []ssp2.Operation{b.upsert(t, "notes", note(id, "a")), b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": id})}
				}
				for name, commits := range map[string][]ssp2.PushCommit{
					"alone":                     {commit("alone", bad)},
					"first among others":        {commit("first", append([]ssp2.Operation{bad}, fine(1)...)...)},
					"in the middle":             {commit("middle", append(append(fine(2), bad), fine(3)...)...)},
					"last":                      {commit("last", append(fine(4), bad)...)},
					"after the others' deletes": {commit("deletes", append(fine(5), remove("notes", "fine5"), remove("slugs", "fine5"), bad)...)},
				} {
					bad := len(commits[0].Operations) - 1
					switch name {
					case "first among others":
						bad = 0
					case "in the middle":
						bad = 2
					}
					c.requirePoisoned(t, bad, p.code, commits[0])
				}
				// Among other commits of one request, none of which is affected.
				seq := c.seq(t)
				results := c.send(t, commit("r1", fine(10)...), commit("r2", append(fine(11), bad)...), commit("r3", fine(12)...),
					commit("r4", bad), commit("r5", fine(13)...), commit("r6", base(fine(14)[0], 3)))
				requireApplied(t, results[0], results[2], results[4])
				requireRejected(t, results[1], 2, p.code)
				requireRejected(t, results[3], 0, p.code)
				requireRejected(t, results[5], 0, ssp2.CodeRowMissing)
				for i, at := range []int{0, 2, 4} {
					require.Equal(t, seq+1+int64(i), *results[at].CommitSeq)
				}
				require.Nil(t, c.stored(t, "notes", "fine11"))
				require.NotNil(t, c.stored(t, "notes", "fine13"))
			})
		}
	}
}

// requirePoisoned pushes a commit that must be rejected at an operation, leave
// nothing behind, consume no seq, and be answered with the same bytes again.
func (c *client) requirePoisoned(t *testing.T, op int, code ssp2.Code, k ssp2.PushCommit) {
	t.Helper()
	before, seq := c.contents(t), c.seq(t)
	first := c.send(t, k)[0]
	requireRejected(t, first, op, code)
	require.Equal(t, seq, c.seq(t))
	require.Equal(t, before+1, c.contents(t), "the outcome and nothing else")
	for _, wire := range wires {
		require.Equal(t, encoded(t, wire, first), encoded(t, wire, c.as(wire).send(t, k)[0]))
	}
}

// TestPoisonIsNotHidden: a state that the database refuses is refused even if a later
// write of the same request would have replaced it.
func TestPoisonIsNotHidden(t *testing.T) {
	t.Parallel()
	b := shared(t)
	bad, good := b.upsert(t, "notes", meta(`"\u0000"`)), b.upsert(t, "notes", note("p", "fine"))
	for _, tc := range []struct {
		name    string
		commits [][]ssp2.Operation
		want    []int // index of the refused operation; -1: applied
		version int64 // of the row in the end, 0: absent
	}{
		{"replaced in the same commit", [][]ssp2.Operation{{bad, good}}, []int{0}, 0},
		{"deleted in the same commit", [][]ssp2.Operation{{bad, remove("notes", "p")}}, []int{0}, 0},
		{"replaced by the next commit", [][]ssp2.Operation{{bad}, {good}}, []int{0, -1}, 1},
		{"deleted by the next commit", [][]ssp2.Operation{{bad}, {remove("notes", "p")}}, []int{0, -1}, 0},
		{"between two good ones", [][]ssp2.Operation{{good}, {bad}, {good}}, []int{-1, 0, -1}, 2},
		{"an update, replaced", [][]ssp2.Operation{{good, bad, good}}, []int{1}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			var commits []ssp2.PushCommit
			for _, ops := range tc.commits {
				commits = append(commits, c.commit(ops...))
			}
			for i, r := range c.send(t, commits...) {
				if tc.want[i] < 0 {
					requireApplied(t, r)
				} else {
					requireRejected(t, r, tc.want[i], ssp2.CodeConstraintViolation)
				}
			}
			if tc.version == 0 {
				require.Nil(t, c.stored(t, "notes", "p"))
			} else {
				require.Equal(t, tc.version, c.stored(t, "notes", "p").Version)
			}
		})
	}
}

// TestRejectionDependsOnARefusedCommit: what a commit was refused for in Go may be the
// work of one that the database refuses afterwards.
func TestRejectionDependsOnARefusedCommit(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	results := c.send(t,
		c.commit(b.upsert(t, "notes", note("n", "a")), b.upsert(t, "notes", meta(`"\u0000"`))),
		c.commit(base(b.upsert(t, "notes", note("n", "b")), 0)), // a conflict, had the first one been applied
		c.commit(base(b.upsert(t, "notes", note("n", "c")), 0)), // a conflict now
		c.commit(base(b.upsert(t, "notes", note("n", "d")), 1)))
	requireRejected(t, results[0], 1, ssp2.CodeConstraintViolation)
	requireApplied(t, results[1], results[3])
	requireRejected(t, results[2], 0, ssp2.CodeVersionConflict)
	require.EqualValues(t, 2, c.seq(t))
	require.Equal(t, 4, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1`, c.req.Partition))
}

// TestManyRefusedCommits: every second commit of a large request is refused.
func TestManyRefusedCommits(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	var commits []ssp2.PushCommit
	for i := range 64 {
		id := strconv.Itoa(i)
		row := map[string]any{"id": id, "project_id": "pr1", "slug": strconv.Itoa(i / 2)}
		commits = append(commits, c.commit(b.upsert(t, "notes", note(id, "a")), b.upsert(t, "slugs", row)))
	}
	for i, r := range c.send(t, commits...) {
		if i%2 == 1 {
			requireRejected(t, r, 1, ssp2.CodeConstraintViolation)
			continue
		}
		requireApplied(t, r)
		require.EqualValues(t, i/2+1, *r.CommitSeq)
	}
	require.Equal(t, 32, scalar[int](t, b, `select count(*) from public.notes where _sync_partition = $1`, c.req.Partition))
	require.Equal(t, 64, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1`, c.req.Partition))
	for i, r := range c.send(t, commits...) {
		require.Equal(t, i%2 == 0, r.Status == ssp2.PushCached)
	}
}

// TestUniqueValueMoves: operations keep their order, so that a unique value is free
// once its row gave it up, and not before.
func TestUniqueValueMoves(t *testing.T) {
	t.Parallel()
	b := shared(t)
	slug := func(id, v string) ssp2.Operation {
		return b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": v})
	}
	for _, tc := range []struct {
		name string
		ops  []ssp2.Operation // on rows 1 with slug a and 2 with slug b
		bad  int              // -1: applied
	}{
		{"given up, then taken", []ssp2.Operation{slug("1", "c"), slug("2", "a")}, -1},
		{"taken, then given up", []ssp2.Operation{slug("2", "a"), slug("1", "c")}, 0},
		{"swapped over a third value", []ssp2.Operation{slug("1", "x"), slug("2", "a"), slug("1", "b")}, -1},
		{"swapped at once", []ssp2.Operation{slug("1", "b"), slug("2", "a")}, 0},
		{"deleted, then taken", []ssp2.Operation{remove("slugs", "1"), slug("3", "a")}, -1},
		{"taken, then deleted", []ssp2.Operation{slug("3", "a"), remove("slugs", "1")}, 0},
		{"deleted and inserted again", []ssp2.Operation{remove("slugs", "1"), slug("3", "a"), remove("slugs", "3"), slug("1", "a")}, -1},
		{"NULL is no value", []ssp2.Operation{b.upsert(t, "slugs", map[string]any{"id": "3", "project_id": "pr1"}), b.upsert(t, "slugs", map[string]any{"id": "4", "project_id": "pr1"})}, -1},
		{"the third operation", []ssp2.Operation{slug("3", "c"), slug("4", "d"), slug("5", "c"), slug("6", "e")}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			c.apply(t, slug("1", "a"), slug("2", "b"))
			k := c.commit(tc.ops...)
			if tc.bad >= 0 {
				c.requirePoisoned(t, tc.bad, ssp2.CodeConstraintViolation, k)
				// The next commit of the same request is applied.
				results := c.send(t, c.commit(tc.ops...), c.commit(slug("9", "z")))
				requireRejected(t, results[0], tc.bad, ssp2.CodeConstraintViolation)
				requireApplied(t, results[1])
				return
			}
			requireApplied(t, c.send(t, k)...)
		})
		t.Run(tc.name+"/a commit per operation", func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			c.apply(t, slug("1", "a"), slug("2", "b"))
			var commits []ssp2.PushCommit
			for _, op := range tc.ops {
				commits = append(commits, c.commit(op))
			}
			together := c.send(t, commits...)
			one := b.client(t, ssp2.WireV2).with(func(r *pushsvc.Request) { r.Partition += " one by one" })
			resp, err := b.Push(t.Context(), one.with(func(r *pushsvc.Request) { r.LogEpoch = nil }).request())
			require.NoError(t, err)
			one.req.LogEpoch = &resp.LogEpoch
			one.apply(t, slug("1", "a"), slug("2", "b"))
			for i, k := range commits {
				require.Equal(t, one.send(t, k)[0], together[i])
			}
		})
	}
}

// TestValuesAreKept: values at the edges of their types come back as they went in,
// typed as well.
func TestValuesAreKept(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for name, row := range map[string]map[string]any{
		"the largest integers":         {"rank": ssp2.MaxSafeInteger},
		"the smallest integers":        {"rank": -ssp2.MaxSafeInteger},
		"JSON as deep as it may be":    {"meta": strings.Repeat("[", ssp2.MaxJSONDepth) + strings.Repeat("]", ssp2.MaxJSONDepth)},
		"JSON as it was written":       {"meta": " { \"b\" : 1.0 , \"a\":1e2,\"a\":2 } "},
		"JSON null is not NULL":        {"meta": "null"},
		"a number only numeric holds":  {"meta": "123456789012345678901234567890.5"},
		"empty values":                 {"title": "", "thumb": ""},
		"bytes that are not text":      {"thumb": "\x00\xff\xfe"},
		"text of every plane":          {"title": "a\u0301ü\u2028😀\U0010FFFF\x01\x7f"},
		"1 MB":                         {"title": incompressible(1 << 20), "thumb": strings.Repeat("x", 1<<20)},
		"the longest row id":           {"id": incompressible(2000)},
		"a long scope that compresses": {"project_id": strings.Repeat("x", 10_000)},
		"quotes and backslashes":       {"id": `"\{},'NULL`, "title": `"\{},'NULL`, "project_id": `"\{},'NULL`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			row := changed(note("n", "a"), row)
			c.apply(t, b.upsert(t, "notes", row))
			if rank, ok := row["rank"].(int64); ok {
				row["rank"] = int(rank)
			}
			id := row["id"].(string)
			require.Equal(t, row, c.stored(t, "notes", id).Values)
			require.Equal(t, b.full(t, "notes", row), scalar[[]byte](t, b, `select payload from syncpg.sync_changes where partition = $1`, c.req.Partition))
			c.apply(t, remove("notes", id))
			require.Nil(t, c.stored(t, "notes", id))
		})
	}
}

// TestIndexEntryBoundary: around the size of an index entry, which the rows, the scope
// index of the log and tombstones reach at different lengths, a row is refused at its
// operation, or applied, and then it can be deleted.
//
//nolint:paralleltest // the cases share a client
func TestIndexEntryBoundary(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	for name, tc := range map[string]struct {
		table  string
		column string
		from   int
	}{
		"row id":        {"notes", "id", 1990},
		"scope value":   {"notes", "project_id", 2590},
		"unique column": {"slugs", "slug", 2630},
	} {
		t.Run(name, func(t *testing.T) {
			c := c.with(func(r *pushsvc.Request) { r.ClientID = name })
			applied, refused := 0, 0
			for n := tc.from; n < tc.from+80; n += 3 {
				row := changed(map[string]any{"id": "edge", "project_id": "pr1"}, map[string]any{tc.column: incompressible(n)})
				result := c.push(t, b.upsert(t, "notes", note("fine1", "a")), b.upsert(t, tc.table, row), b.upsert(t, "notes", note("fine2", "a")))
				if result.Status != ssp2.PushApplied {
					requireRejected(t, result, 1, ssp2.CodeConstraintViolation)
					refused++
					continue
				}
				applied++
				requireApplied(t, c.push(t, remove(tc.table, row["id"].(string))))
			}
			require.Positive(t, applied)
			require.Positive(t, refused)
		})
	}
}

// TestValuesNobodyMayWrite do not pass the codec.
//
//nolint:paralleltest // the cases share a client
func TestValuesNobodyMayWrite(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("first", "a")))
	text := func(s string) []byte { return append(ssp2.AppendU32(nil, uint32(len(s))), s...) }
	with := func(nulls uint16, value []byte) []byte {
		row := append([]byte{byte(nulls), byte(nulls >> 8)}, text("n")...)
		return append(append(row, text("pr1")...), value...)
	}
	const all = 0x3ff &^ 3
	for name, payload := range map[string][]byte{
		"an integer above 2^53-1":    with(all&^(1<<3), ssp2.AppendI64(nil, ssp2.MaxSafeInteger+1)),
		"an integer below":           with(all&^(1<<3), ssp2.AppendI64(nil, -ssp2.MaxSafeInteger-1)),
		"a boolean of 2":             with(all&^(1<<5), []byte{2}),
		"text that is not UTF-8":     with(all&^(1<<2), text("\xff")),
		"JSON that is none":          with(all&^(1<<6), text("{")),
		"JSON nested 20,000 deep":    with(all&^(1<<6), text(strings.Repeat("[", 20_000)+strings.Repeat("]", 20_000))),
		"a blob reference of no use": with(all&^(1<<8), text("{}")),
		"4 GiB announced":            with(all&^(1<<2), []byte{0xff, 0xff, 0xff, 0xff}),
	} {
		t.Run(name, func(t *testing.T) {
			k := c.commit(b.upsert(t, "notes", note("fine", "a")), ssp2.Operation{Table: "notes", RowID: "n", Op: ssp2.OpUpsert, Payload: payload})
			c.requirePoisoned(t, 1, ssp2.CodeInvalidRequest, k)
		})
	}
}
