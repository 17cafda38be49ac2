package pushsvc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// validated is what a validator was asked, for comparing.
type validated struct {
	Op          ssp2.Op
	RowID       string
	Row, Stored map[string]any
}

// rowMap is Map without the NULL columns, nil for no row.
func rowMap(r *pushsvc.Row) map[string]any {
	if r == nil {
		return nil
	}
	m := r.Map()
	for name, v := range m {
		if v == nil {
			delete(m, name)
		}
	}
	return m
}

// journal is a validator that writes down what it is asked, and then answers.
type journal struct {
	mu     sync.Mutex
	seen   []validated
	answer func(ctx context.Context, v *pushsvc.RowValidation) error
}

func (j *journal) validate(ctx context.Context, v *pushsvc.RowValidation) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.seen = append(j.seen, validated{v.Op, v.RowID, rowMap(v.Row), rowMap(v.Stored)})
	if j.answer != nil {
		return j.answer(ctx, v)
	}
	return nil
}

// take returns what was asked since the last time.
func (j *journal) take() []validated {
	j.mu.Lock()
	defer j.mu.Unlock()
	seen := j.seen
	j.seen = nil
	return seen
}

// say sets the answer of the validator.
func (j *journal) say(answer func(ctx context.Context, v *pushsvc.RowValidation) error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answer = answer
}

// validating returns a bundle whose notes have a validator.
func validating(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) (*bundle, *journal) {
	t.Helper()
	j := &journal{}
	return setup(t, append(change, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": j.validate}
	})...), j
}

func TestValidatorSeesTheRowAsItWillBeStored(t *testing.T) {
	t.Parallel()
	b, j := validating(t)
	v3 := b.client(t, ssp2.WireV3)
	v2 := v3.as(ssp2.WireV2)
	row := func(title string) map[string]any {
		return map[string]any{"id": "n", "project_id": "pr1", "title": title}
	}
	for _, tc := range []struct {
		name string
		c    *client
		ops  []ssp2.Operation
		want []validated
	}{
		{
			"an insert has no stored row, and a table without a validator is not asked about", v2,
			[]ssp2.Operation{b.upsert(t, "notes", note("n", "a")), b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1"})},
			[]validated{{ssp2.OpUpsert, "n", row("a"), nil}},
		},
		{
			"an update has the stored scope column, whatever was sent", v2,
			[]ssp2.Operation{b.upsert(t, "notes", changed(note("n", "b"), map[string]any{"project_id": "other"}))},
			[]validated{{ssp2.OpUpsert, "n", row("b"), row("a")}},
		},
		{
			"a sparse update has the columns that it leaves out", v3,
			[]ssp2.Operation{b.patch(t, "notes", map[string]any{"id": "n", "rank": 4})},
			[]validated{{ssp2.OpUpsert, "n", map[string]any{"id": "n", "project_id": "pr1", "title": "b", "rank": int64(4)}, row("b")}},
		},
		{
			"each operation sees what those before it left", v2,
			[]ssp2.Operation{b.upsert(t, "notes", note("n", "c")), remove("notes", "n"), b.upsert(t, "notes", note("n", "d"))},
			[]validated{
				{ssp2.OpUpsert, "n", row("c"), map[string]any{"id": "n", "project_id": "pr1", "title": "b", "rank": int64(4)}},
				{ssp2.OpDelete, "n", nil, row("c")},
				{ssp2.OpUpsert, "n", row("d"), nil},
			},
		},
		{"a delete of an absent row is not asked about", v2, []ssp2.Operation{remove("notes", "absent")}, nil},
	} {
		requireApplied(t, tc.c.push(t, tc.ops...))
		require.Empty(t, cmp.Diff(tc.want, j.take()), tc.name)
	}
}

func TestValidatorIsToldWhoAsks(t *testing.T) {
	t.Parallel()
	type key struct{}
	var got pushsvc.RowValidation
	var value any
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(ctx context.Context, v *pushsvc.RowValidation) error {
			got, value = *v, ctx.Value(key{})
			return nil
		}}
	})
	c := b.client(t, ssp2.WireV2)
	resp, err := b.Push(context.WithValue(t.Context(), key{}, "of the caller"), c.request(c.commit(b.upsert(t, "notes", note("n", "a")))))
	require.NoError(t, err)
	requireApplied(t, resp.Results...)
	got.Row, got.Stored = nil, nil
	require.Equal(t, pushsvc.RowValidation{Partition: c.req.Partition, Actor: "alice", ClientID: "c1", Op: ssp2.OpUpsert, Table: "notes", RowID: "n"}, got)
	require.Equal(t, "of the caller", value)
}

func TestRowGetters(t *testing.T) {
	t.Parallel()
	var row *pushsvc.Row
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
			row = v.Row
			return nil
		}}
	})
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.push(t, b.upsert(t, "notes", map[string]any{
		"id": "n", "project_id": "pr1", "rank": 7, "weight": 0.5, "done": true, "meta": `{"a": 1}`, "thumb": "\x00\xff",
	})))
	text, ok := row.Text("meta")
	require.True(t, ok)
	require.Equal(t, `{"a": 1}`, text, "as it was written")
	n, ok := row.Int("rank")
	require.True(t, ok)
	require.EqualValues(t, 7, n)
	f, ok := row.Float("weight")
	require.True(t, ok)
	require.InDelta(t, 0.5, f, 0)
	done, ok := row.Bool("done")
	require.True(t, ok)
	require.True(t, done)
	thumb, ok := row.Bytes("thumb")
	require.True(t, ok)
	require.Equal(t, []byte("\x00\xff"), thumb)
	thumb[0] = 1
	require.Equal(t, []byte("\x00\xff"), row.Value("thumb"), "a copy")
	_, ok = row.Text("title")
	require.False(t, ok, "NULL")
	require.Nil(t, row.Value("title"))
	require.Equal(t, map[string]any{
		"id": "n", "project_id": "pr1", "rank": int64(7), "weight": 0.5, "done": true, "meta": `{"a": 1}`, "thumb": []byte("\x00\xff"),
		"title": nil, "file": nil, "body": nil,
	}, row.Map())
	require.Panics(t, func() { row.Text("rank") }, "another type")
	require.Panics(t, func() { row.Int("nope") })
	require.Panics(t, func() { row.Value("nope") })
}

// hint is what a client may be told.
var hint = &ssp2.Details{FieldPaths: []string{"title"}, Reason: "too_long", References: map[string]string{"rule": "r1"}}

const hintJSON = `{"fieldPaths":["title"],"reason":"too_long","references":{"rule":"r1"}}`

func TestValidatorRejects(t *testing.T) {
	t.Parallel()
	b, j := validating(t)
	j.say(func(_ context.Context, v *pushsvc.RowValidation) error {
		if title, _ := v.Row.Text("title"); title == "bad" {
			return fmt.Errorf("wrapped: %w", pushsvc.Reject("app.title_too_long", "", hint))
		}
		return nil
	})
	for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} {
		c := b.client(t, wire)
		insert := func(id, title string) ssp2.Operation {
			if wire == ssp2.WireV3 {
				return b.patch(t, "notes", fullNote(id, title))
			}
			return b.upsert(t, "notes", note(id, title))
		}
		req := c.request(
			c.commit(insert("a", "good")),
			c.commit(insert("b", "good"), insert("c", "bad"), insert("d", "good")),
			c.commit(insert("c", "good")))
		first := b.push(t, req)
		requireApplied(t, first.Results[0], first.Results[2])
		require.Equal(t, ssp2.PushRejected, first.Results[1].Status)
		require.Equal(t, []ssp2.OpResult{{OpIndex: 1, Status: ssp2.OpError, Code: "app.title_too_long", Message: "app.title_too_long"}}, first.Results[1].Results)
		require.Equal(t, []*ssp2.PushResultDetails{nil, {ClientCommitID: req.Commits[1].ClientCommitID, Entries: []ssp2.DetailEntry{{OpIndex: 1, DetailsJSON: hintJSON}}}, nil}, first.Details)
		require.Nil(t, c.stored(t, "notes", "b"), "nothing of a rejected commit is written")
		require.Equal(t, "good", c.stored(t, "notes", "c").Values["title"])
		j.take()
		again := b.push(t, req)
		require.Empty(t, j.take(), "a known outcome asks nobody")
		require.Equal(t, encoded(t, wire, first.Results[1]), encoded(t, wire, again.Results[1]))
		require.Equal(t, first.Details, again.Details)
	}
	requireSoundLog(t, b)
}

func TestRejectRefuses(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{
		"no code":               pushsvc.Reject("", "m", nil),
		"a code of sync":        pushsvc.Reject("sync.forbidden", "m", nil),
		"a code of blob":        pushsvc.Reject("blob.mine", "m", nil),
		"a code of operation":   pushsvc.Reject("operation.mine", "m", nil),
		"a code of presence":    pushsvc.Reject("presence.mine", "m", nil),
		"a code of client":      pushsvc.Reject("client.mine", "m", nil),
		"a code with a space":   pushsvc.Reject("not good", "m", nil),
		"a code that ends in .": pushsvc.Reject("app.", "m", nil),
		"a code beyond ASCII":   pushsvc.Reject("app.ü", "m", nil),
		"a code too long":       pushsvc.Reject(strings.Repeat("a", pushsvc.MaxRejectionCodeBytes+1), "m", nil),
		"a message too long":    pushsvc.Reject("app.x", strings.Repeat("a", pushsvc.MaxRejectionMessageBytes+1), nil),
		"a message not UTF-8":   pushsvc.Reject("app.x", "\xff", nil),
		"details of nothing":    pushsvc.Reject("app.x", "m", &ssp2.Details{}),
		"details out of bounds": pushsvc.Reject("app.x", "m", &ssp2.Details{Reason: "Not A Token"}),
		"a negative operation":  pushsvc.RejectOperation(-1, "app.x", "m", nil),
	} {
		require.Error(t, err, name)
		var r *pushsvc.Rejection
		require.NotErrorAs(t, err, &r, name)
	}
	for _, code := range []string{"app.x", "TITLE_TOO_LONG", "a", "synchronous", "sync", "Sync-7.b"} {
		var r *pushsvc.Rejection
		require.ErrorAs(t, pushsvc.Reject(code, "m", hint), &r, code)
		require.Equal(t, code, r.Code())
		require.Equal(t, code+": m", r.Error())
	}
}

// TestValidatorMistakes: what is not a rejection refuses the commit without a word of
// it, and is logged.
func TestValidatorMistakes(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	var mu sync.Mutex
	b, j := validating(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Logger = slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(p)
		}), nil))
	})
	c := b.client(t, ssp2.WireV2)
	for name, answer := range map[string]func(*pushsvc.RowValidation) error{
		"an error":                 func(*pushsvc.RowValidation) error { return errors.New("secret") },
		"an error of the protocol": func(*pushsvc.RowValidation) error { return ssp2.Errorf(ssp2.CodeForbidden, "secret") },
		"a refused rejection":      func(*pushsvc.RowValidation) error { return pushsvc.Reject("sync.secret", "secret", nil) },
		"a rejection made by hand": func(*pushsvc.RowValidation) error { return errors.Join(&pushsvc.Rejection{}, errors.New("secret")) },
		"no rejection at all": func(*pushsvc.RowValidation) error {
			return errors.Join((*pushsvc.Rejection)(nil), errors.New("secret"))
		},
		"a panic":           func(*pushsvc.RowValidation) error { panic("secret") },
		"a column misspelt": func(v *pushsvc.RowValidation) error { v.Row.Text("secret"); return nil },
	} {
		mu.Lock()
		log.Reset()
		mu.Unlock()
		j.say(func(_ context.Context, v *pushsvc.RowValidation) error {
			if v.RowID == "bad" {
				return answer(v)
			}
			return nil
		})
		req := c.request(c.commit(b.upsert(t, "notes", note("a", "a")), b.upsert(t, "notes", note("bad", "b"))), c.commit(b.upsert(t, "notes", note("c", "c"))))
		resp := b.push(t, req)
		requireRejected(t, resp.Results[0], 1, ssp2.CodeConstraintViolation)
		require.NotContains(t, resp.Results[0].Results[0].Message, "secret", name)
		require.Nil(t, resp.Details[0], name)
		requireApplied(t, resp.Results[1])
		mu.Lock()
		require.Contains(t, log.String(), "secret", name)
		mu.Unlock()
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestValidatorRunsLast: it sees nothing that another rule refuses.
func TestValidatorRunsLast(t *testing.T) {
	t.Parallel()
	b, j := validating(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "a")))
	j.take()
	refused := c.with(func(r *pushsvc.Request) { r.Scopes = allow(scope.Allowed{"project_id": {"mine"}}) })
	for name, result := range map[string]ssp2.PushResult{
		"a payload that does not decode": c.push(t, ssp2.Operation{Table: "notes", RowID: "n", Op: ssp2.OpUpsert, Payload: []byte{1}}),
		"a row of others":                refused.push(t, b.upsert(t, "notes", note("n", "b"))),
		"a delete of others":             refused.push(t, remove("notes", "n")),
		"a conflict":                     c.push(t, base(b.upsert(t, "notes", note("n", "b")), 7)),
		"a blob that is not there":       c.push(t, b.upsert(t, "notes", changed(note("n", "b"), map[string]any{"file": `{"blobId":"sha256:` + strings.Repeat("a", 64) + `","byteLength":1,"mediaType":"text/plain"}`}))),
		"text no database holds":         c.push(t, b.upsert(t, "notes", note("n", "\x00"))),
	} {
		require.Equal(t, ssp2.PushRejected, result.Status, name)
		require.Empty(t, j.take(), name)
	}
}

// TestValidatorCutShort: a validator that never returns ends with the caller, who gets
// no outcome and may try again; the pushes behind it go on.
func TestValidatorCutShort(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprint("alone in its transaction: ", own), func(t *testing.T) {
			t.Parallel()
			b, j := validating(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 2 })
			c := b.client(t, ssp2.WireV2)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			j.say(func(hook context.Context, v *pushsvc.RowValidation) error {
				if v.RowID == "stuck" && ctx.Err() == nil {
					cancel()
					<-hook.Done()
				}
				return hook.Err()
			})
			stuck := c.with(func(r *pushsvc.Request) { r.ClientID, r.Actor = "stuck", "bob" })
			k := stuck.commit(b.upsert(t, "notes", note("stuck", "a")))
			push := func() <-chan answer { return stuck.pushing(ctx, b.Service, k) }
			if own {
				require.ErrorIs(t, (<-push()).err, context.Canceled)
			} else {
				clients := c.fleet(2)
				neighbour := func(i int) func() <-chan answer {
					return func() <-chan answer {
						return clients[i].pushing(t.Context(), b.Service, clients[i].commit(b.upsert(t, "notes", note(fmt.Sprint("n", i), "x"))))
					}
				}
				first, rest, release := c.behind(t, b, neighbour(0), push, neighbour(1))
				release()
				requireApplied(t, (<-first).resp.Results...)
				requireApplied(t, (<-rest[0]).resp.Results...)
				require.ErrorIs(t, (<-rest[1]).err, context.Canceled)
				requireApplied(t, (<-rest[2]).resp.Results...)
			}
			b.Wait()
			require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where client_id = 'stuck'`), "no outcome")
			require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_clients where client_id = 'stuck'`))
			requireConnectionsBack(t, b)
			requireApplied(t, stuck.send(t, k)...)
			requireSoundLog(t, b)
		})
	}
}

func TestNewChecksTheValidators(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for name, v := range map[string]map[string]pushsvc.Validator{
		"of an unknown table": {"nope": (&journal{}).validate},
		"nil":                 {"notes": nil},
	} {
		_, err := pushsvc.New(b.db.Pool, pushsvc.Config{Schema: b.schema, Validators: v})
		require.ErrorContains(t, err, "Config.Validators", name)
	}
}
