package pushsvc_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/ssp2"
)

// seed makes a commit of the host's in the client's partition.
func (c *client) seed(id string, ops ...pushsvc.Operation) pushsvc.ApplyRequest {
	return pushsvc.ApplyRequest{Partition: c.req.Partition, Actor: "system", ClientID: "seed", ClientCommitID: id, Operations: ops}
}

func seedNote(id, title string) pushsvc.Operation { return pushsvc.Upsert("notes", note(id, title)) }

// writtenRows counts what pushes write.
func writtenRows(t testing.TB, b *bundle) (n int) {
	t.Helper()
	return scalar[int](t, b, `select (select count(*) from syncpg.sync_commits) + (select count(*) from syncpg.sync_changes)
		+ (select count(*) from syncpg.sync_push_results) + (select count(*) from syncpg.sync_clients) + (select count(*) from public.notes)`)
}

func TestApplyingAgainWritesNothing(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(10)
	var told []string
	b := setup(t, withEvents(ring), withCommitted(&told))
	c := b.client(t, ssp2.WireV2)
	first, err := b.Apply(t.Context(), c.seed("seed-1", seedNote("a", "one"), seedNote("b", "two")))
	require.NoError(t, err)
	id, at := c.with(func(r *pushsvc.Request) { r.ClientID = "seed" }).outcomeRecord(t, "seed-1")
	require.Equal(t, pushsvc.Applied{Status: ssp2.PushApplied, Seq: 1, RecordedAt: at, OutcomeID: id}, first)
	require.Equal(t, map[string]any{"id": "a", "project_id": "pr1", "title": "one"}, c.stored(t, "notes", "a").Values)
	require.Equal(t, []string{c.req.Partition + " 1"}, told)

	written := writtenRows(t, b)
	b.now = b.now.Add(time.Hour)
	b.Wait()
	b.counter.Reset()
	again, err := b.Apply(t.Context(), c.seed("seed-1", seedNote("a", "something else"), pushsvc.Delete("notes", "b")))
	require.NoError(t, err)
	require.Equal(t, pushsvc.Applied{Status: ssp2.PushCached, Seq: 1, RecordedAt: at, OutcomeID: id}, again)
	b.Wait()
	require.Zero(t, b.counter.Commits())
	require.Equal(t, written, writtenRows(t, b))
	require.Len(t, told, 1)
	require.Len(t, ring.Query(events.Filter{}), 2, "the answer and its replay")
	requireSoundLog(t, b)
}

// TestApplyGoesTheWayOfAPush: hooks are asked, and may refuse; only authorization is not.
func TestApplyGoesTheWayOfAPush(t *testing.T) {
	t.Parallel()
	var asked []string
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
			asked = append(asked, "row "+v.Actor+" "+v.ClientID+" "+v.RowID)
			if title, _ := v.Row.Text("title"); title == "bad" {
				return pushsvc.Reject("app.bad_title", "titles must be good", &ssp2.Details{Reason: "bad", FieldPaths: []string{"title"}})
			}
			return nil
		}}
		cfg.ValidateCommit = func(_ context.Context, c *pushsvc.Candidate) error {
			asked = append(asked, "commit "+c.ClientCommitID)
			return nil
		}
		cfg.PlanReactions = func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) {
			return []reaction.Plan{{Key: "k", Type: "mail", Version: 1, Payload: json.RawMessage(`{}`)}}, nil
		}
	})
	c := b.client(t, ssp2.WireV2)
	_, err := b.Apply(t.Context(), c.seed("1", seedNote("a", "good")))
	require.NoError(t, err)
	require.Equal(t, []string{"row system seed a", "commit 1"}, asked)
	require.Equal(t, 1, scalar[int](t, b, `select count(*) from syncpg.sync_reactions`))

	bad := c.seed("2", seedNote("b", "good"), seedNote("c", "bad"))
	_, err = b.Apply(t.Context(), bad)
	first := requireRejection(t, err, "app.bad_title", 1)
	require.Equal(t, "titles must be good", first.Message)
	require.JSONEq(t, `{"reason":"bad","fieldPaths":["title"]}`, first.Details)
	require.False(t, first.Replay)
	require.True(t, b.now.Equal(first.RecordedAt))
	require.NotZero(t, first.OutcomeID)
	require.Nil(t, c.stored(t, "notes", "b"))

	b.now = b.now.Add(time.Hour)
	bad.Operations = bad.Operations[:1] // corrected, under the old id
	_, err = b.Apply(t.Context(), bad)
	again := requireRejection(t, err, "app.bad_title", 1)
	require.True(t, again.Replay)
	again.Replay = false
	require.Equal(t, first, again, "the outcome stays")
	require.Len(t, asked, 4)
	bad.ClientCommitID = "2b"
	_, err = b.Apply(t.Context(), bad)
	require.NoError(t, err, "under a new id it is applied")
}

// requireRejection checks and returns a rejection.
func requireRejection(t testing.TB, err error, code ssp2.Code, op int) pushsvc.RejectedError {
	t.Helper()
	r := new(pushsvc.RejectedError)
	require.ErrorAs(t, err, &r)
	require.Equal(t, code, r.Code, r.Message)
	require.Equal(t, op, r.OpIndex)
	require.ErrorContains(t, err, r.ClientCommitID)
	return *r
}

func TestApplyRejections(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	_, err := b.Apply(t.Context(), c.seed("fill", seedNote("a", "one"), seedNote("gone", "x")))
	require.NoError(t, err)
	_, err = b.Apply(t.Context(), c.seed("delete", pushsvc.Delete("notes", "gone"), pushsvc.Delete("notes", "never")))
	require.NoError(t, err)
	for _, tc := range []struct {
		name string
		op   pushsvc.Operation
		code ssp2.Code
	}{
		{"a new row is missing columns that are not nullable", pushsvc.Upsert("notes", map[string]any{"id": "n", "title": "x"}), ssp2.CodeRowMissing},
		{"a row of this version is not there", seedNote("n", "x").At(3), ssp2.CodeRowMissing},
		{"a deleted row does not come back by itself", seedNote("gone", "x"), ssp2.CodeRowDeleted},
		{"the row is there already", seedNote("a", "x").At(0), ssp2.CodeVersionConflict},
		{"a scope column stays what it is", pushsvc.Upsert("notes", map[string]any{"id": "a", "project_id": "pr2"}), ssp2.CodeInvalidRequest},
		{"a scope is empty", pushsvc.Upsert("notes", map[string]any{"id": "n", "project_id": ""}), ssp2.CodeForbidden},
		{"the database refuses", pushsvc.Upsert("notes", map[string]any{"id": "n", "project_id": "pr1", "meta": `"\u0000"`}), ssp2.CodeConstraintViolation},
	} {
		t.Log(tc.name)
		_, err := b.Apply(t.Context(), c.seed(tc.name, seedNote("a", "two"), tc.op))
		r := requireRejection(t, err, tc.code, 1)
		require.Equal(t, "one", c.stored(t, "notes", "a").Values["title"], "nothing of it is applied")
		if tc.code == ssp2.CodeVersionConflict {
			require.EqualValues(t, 2, r.ServerVersion, "as the operation before it left the row")
			title, _ := r.ServerRow.Text("title")
			require.Equal(t, "two", title)
		} else {
			require.Nil(t, r.ServerRow)
		}
	}
	_, err = b.Apply(t.Context(), c.seed("back", seedNote("gone", "again").At(0), pushsvc.Upsert("notes", map[string]any{"title": "three", "id": "a"})))
	require.NoError(t, err)
	require.Equal(t, map[string]any{"id": "a", "project_id": "pr1", "title": "three"}, c.stored(t, "notes", "a").Values)
	require.NotNil(t, c.stored(t, "notes", "gone"))
}

func TestApplyRefusesAnIdentity(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	_, err := b.Apply(t.Context(), c.seed("1", seedNote("a", "one")))
	require.NoError(t, err)
	c.apply(t, b.upsert(t, "notes", note("device", "x")))
	for _, tc := range []struct {
		name   string
		change func(*pushsvc.ApplyRequest)
		code   ssp2.Code // "": a mistake of the host
	}{
		{"another actor", func(r *pushsvc.ApplyRequest) { r.Actor = "mallory" }, ssp2.CodeInvalidClientID},
		{"the client of a device", func(r *pushsvc.ApplyRequest) { r.ClientID = c.req.ClientID }, ssp2.CodeInvalidClientID},
		{"a reserved client", func(r *pushsvc.ApplyRequest) { r.ClientID = `["remote-command","x"]` }, ssp2.CodeInvalidClientID},
		{"no client", func(r *pushsvc.ApplyRequest) { r.ClientID = "" }, ssp2.CodeInvalidClientID},
		{"no operations", func(r *pushsvc.ApplyRequest) { r.Operations = nil }, ssp2.CodeEmptyCommit},
		{"too many operations", func(r *pushsvc.ApplyRequest) { r.Operations = make([]pushsvc.Operation, 501) }, ssp2.CodeTooManyOperations},
		{"no actor", func(r *pushsvc.ApplyRequest) { r.Actor = "" }, ""},
		{"no partition", func(r *pushsvc.ApplyRequest) { r.Partition = "" }, ""},
		{"no commit id", func(r *pushsvc.ApplyRequest) { r.ClientCommitID = "" }, ""},
		{"an operation that is none", func(r *pushsvc.ApplyRequest) { r.Operations = []pushsvc.Operation{{Table: "notes", RowID: "a"}} }, ""},
	} {
		t.Log(tc.name)
		for _, id := range []string{"1", "other"} {
			req := c.seed(id, seedNote("a", "two"))
			tc.change(&req)
			_, err := b.Apply(t.Context(), req)
			require.Error(t, err)
			require.Equal(t, tc.code, ssp2.CodeOf(err))
			require.NotErrorAs(t, err, new(*pushsvc.RejectedError))
		}
	}
	require.Equal(t, "one", c.stored(t, "notes", "a").Values["title"])
	require.Equal(t, 1, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1 and client_id = 'seed'`, c.req.Partition))
}

// TestApplyMakesItsPartition: no device has been there.
func TestApplyMakesItsPartition(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := &client{b: b, ids: new(int), req: pushsvc.Request{Partition: b.partition(t)}}
	_, err := b.Apply(t.Context(), c.seed("1", seedNote("a", "one")))
	require.NoError(t, err)
	require.NotNil(t, c.stored(t, "notes", "a"))
}

type named string

func TestValuesOfTheHost(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	for i, tc := range []struct {
		column string
		given  any
		want   any // nil: NULL; error text: refused
	}{
		{"title", "x", "x"},
		{"title", named("x"), "x"},
		{"title", new("x"), "x"},
		{"title", "", ""},
		{"title", nil, nil},
		{"title", (*string)(nil), nil},
		{"title", 1, errors.New("string cannot be made of the int")},
		{"title", json.Number("1"), errors.New("string cannot be made of the json.Number")},
		{"title", "\xff", errors.New("not well-formed UTF-8")},
		{"rank", 7, 7},
		{"rank", uint8(7), 7},
		{"rank", int64(-7), -7},
		{"rank", 7.0, 7},
		{"rank", json.Number("7"), 7},
		{"rank", json.Number("7e2"), 700},
		{"rank", 7.5, errors.New("integer cannot be made of the float64")},
		{"rank", math.NaN(), errors.New("integer cannot be made of")},
		{"rank", json.Number("7.5"), errors.New("integer cannot be made of")},
		{"rank", int64(1) << 53, errors.New("outside")},
		{"rank", uint64(1) << 63, errors.New("integer cannot be made of")},
		{"rank", "7", errors.New("integer cannot be made of the string")},
		{"rank", true, errors.New("integer cannot be made of the bool")},
		{"weight", 1.5, 1.5},
		{"weight", float32(1.5), 1.5},
		{"weight", 2, 2.0},
		{"weight", json.Number("0.1"), 0.1},
		{"weight", int64(1)<<53 + 1, errors.New("float cannot be made of")},
		{"done", true, true},
		{"done", false, false},
		{"done", 1, errors.New("boolean cannot be made of the int")},
		{"meta", `{"a": 1}`, `{"a": 1}`},
		{"meta", json.RawMessage(`{"a": 1}`), `{"a": 1}`},
		{"meta", []byte(`null`), `null`},
		{"meta", json.RawMessage(nil), nil},
		{"meta", map[string]any{"a": []any{1, "<"}}, `{"a":[1,"<"]}`},
		{"meta", true, `true`},
		{"meta", json.Number("1.50"), `1.50`},
		{"meta", `hello`, errors.New("quotes of its own")},
		{"meta", math.NaN(), errors.New("json cannot be made of")},
		{"thumb", []byte("\x00\xff"), "\x00\xff"},
		{"thumb", []byte{}, ""},
		{"thumb", []byte(nil), nil},
		{"thumb", "AP8=", "\x00\xff"},
		{"thumb", "not base64", errors.New("bytes cannot be made of")},
		{"thumb", []int{1}, errors.New("bytes cannot be made of")},
		{"project_id", nil, errors.New("not nullable")},
		{"nothing", 1, errors.New("no such column")},
	} {
		t.Run(tc.column, func(t *testing.T) {
			t.Parallel()
			id := string(rune('a'+i%26)) + string(rune('a'+i/26))
			row := note(id, "")
			row[tc.column] = tc.given
			_, err := b.Apply(t.Context(), c.seed(id, pushsvc.Upsert("notes", row)))
			if problem, refused := tc.want.(error); refused {
				var o *pushsvc.OperationError
				require.ErrorAs(t, err, &o)
				require.ErrorContains(t, err, problem.Error())
				require.ErrorContains(t, err, tc.column)
				require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1 and client_commit_id = $2`, c.req.Partition, id))
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.want, c.stored(t, "notes", id).Values[tc.column])
		})
	}
}

func TestRowIDsOfTheHost(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	row := func(more map[string]any) map[string]any {
		values := map[string]any{"project_id": "pr1", "org": 1}
		maps.Copy(values, more)
		return values
	}
	for i, tc := range []struct {
		op      pushsvc.Operation
		problem string
	}{
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", Values: row(map[string]any{"id": 7})}, ""},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", RowID: "7", Values: row(nil)}, ""},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", RowID: "7", Values: row(map[string]any{"id": 7})}, ""},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", RowID: "8", Values: row(map[string]any{"id": 7})}, "is not the row id"},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", RowID: "07", Values: row(nil)}, "is no integer"},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "guarded", Values: row(nil)}, "needs the primary key"},
		{pushsvc.Operation{Op: ssp2.OpUpsert, Table: "nowhere", RowID: "7"}, "no such table"},
		{pushsvc.Upsert("notes", note("", "x")), "is empty"},
		{pushsvc.Upsert("guarded", row(map[string]any{"id": 7})).At(-1), "which no row has"},
		{pushsvc.Delete("guarded", ""), "needs a row id"},
		{pushsvc.Delete("guarded", "7").At(1), "neither values nor a base version"},
		{pushsvc.Delete("nowhere", "7"), "no such table"},
		{pushsvc.Delete("guarded", "7"), ""},
	} {
		_, err := b.Apply(t.Context(), c.seed(string(rune('a'+i)), tc.op))
		if tc.problem == "" {
			require.NoError(t, err, "%d", i)
			continue
		}
		require.ErrorAs(t, err, new(*pushsvc.OperationError), "%d", i)
		require.ErrorContains(t, err, tc.problem)
	}
	require.Equal(t, []string{"1 0 upsert 7 1", "2 0 upsert 7 2", "3 0 upsert 7 3", "4 0 delete 7 -"}, c.log(t))
}

// TestWhatAHookReadsCanBeWritten: a row that is read as a map comes back as itself.
func TestWhatAHookReadsCanBeWritten(t *testing.T) {
	t.Parallel()
	var seen map[string]any
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
			seen = v.Row.Map()
			return nil
		}}
	})
	c := b.client(t, ssp2.WireV2)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		optional := func(g *rapid.Generator[any], label string) any {
			if rapid.Bool().Draw(rt, label+" is NULL") {
				return nil
			}
			return g.Draw(rt, label)
		}
		row := map[string]any{
			"id": "r", "project_id": "pr1",
			"title":  optional(rapid.StringMatching(`[a-zé"\\]{0,8}`).AsAny(), "title"),
			"rank":   optional(rapid.Int64Range(-ssp2.MaxSafeInteger, ssp2.MaxSafeInteger).AsAny(), "rank"),
			"weight": optional(rapid.Float64Range(-1e9, 1e9).AsAny(), "weight"),
			"done":   optional(rapid.Bool().AsAny(), "done"),
			"meta":   optional(rapid.SampledFrom([]string{`{"a":1}`, `"x"`, `null`, `[1, 2]`}).AsAny(), "meta"),
			"thumb":  optional(rapid.SliceOfN(rapid.Byte(), 0, 8).AsAny(), "thumb"),
			"file":   nil, "body": nil,
		}
		apply := func(id string, values map[string]any) map[string]any {
			_, err := b.Apply(t.Context(), c.seed(fmt.Sprint(id, n), pushsvc.Upsert("notes", values)))
			require.NoError(rt, err)
			return seen
		}
		first := apply("first", row)
		require.Equal(rt, row, first)
		require.Equal(rt, first, apply("again", first))
	})
}
