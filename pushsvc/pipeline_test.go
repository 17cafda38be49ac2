package pushsvc_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// steps is a tracer that writes down what a push does, in order.
type steps struct {
	hooks
	mu   sync.Mutex
	list []string
}

func (s *steps) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, what)
}

func (s *steps) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

// stepNames are the names of statements by what they contain.
var stepNames = []struct{ contains, name string }{
	{"begin isolation level", "begin"},
	{"rollback to savepoint", "rollback to savepoint"},
	{"savepoint syncpg_push", "savepoint"},
	{"sync_admit_push", "admit"},
	{"sync_find_children", "references"},
	{"sync_write_rows_", "write rows"},
	{"sync_append_commits", "append"},
	{"sync_record_outcomes", "record outcomes"},
	{"sync_scan_by_scope", "read"},
	{"sync_enqueue_reactions", "store reactions"},
	{"commit", "commit"},
}

func (s *steps) statement(sql string) {
	for _, step := range stepNames {
		if strings.Contains(sql, step.contains) {
			s.note(step.name)
			return
		}
	}
}

// TraceBatchQuery runs when the answer to a statement has arrived.
func (s *steps) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s.statement(data.SQL)
}

func (s *steps) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.statement(data.SQL)
	return ctx
}

// TestPipelineOrder asserts the order of the pipeline (SEMANTICS §2) step by step.
func TestPipelineOrder(t *testing.T) {
	t.Parallel()
	trace := &steps{}
	reads := false
	var verdict error
	tracing := func(o *pgtest.Options, cfg *pushsvc.Config) {
		o.MaxConns, o.Tracer = 1, trace
		o.Configure = func(cfg *pgxpool.Config) { // the tracer is told the text of statements
			cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		}
		validate := func(_ context.Context, v *pushsvc.RowValidation) error {
			trace.note("validate row " + v.RowID)
			if v.Row != nil && v.Row.Value("title") == "bad" {
				return pushsvc.Reject("app.bad_row", "", nil)
			}
			return nil
		}
		cfg.Validators = map[string]pushsvc.Validator{cfg.Schema.Tables[0].Name: validate}
		if items, ok := cfg.Schema.Table("items"); ok {
			cfg.Validators[items.Name] = validate
		}
		cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error {
			trace.note("validate commit")
			if reads {
				if _, err := c.ScanRows(ctx, inProject("pr1")); err != nil {
					return err
				}
				trace.note("after the read")
			}
			return verdict
		}
		cfg.PlanReactions = func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			trace.note("plan reactions")
			return mail(ctx, c)
		}
	}
	b := setup(t, tracing)
	c := b.client(t, ssp2.WireV2)
	push := func(ops ...ssp2.Operation) (ssp2.PushCommit, ssp2.PushResult) {
		k := c.commit(ops...)
		b.Wait()
		trace.take()
		result := c.send(t, k)[0]
		b.Wait()
		return k, result
	}

	k, result := push(b.upsert(t, "notes", note("a", "x")), b.upsert(t, "notes", note("b", "x")))
	requireApplied(t, result)
	require.Equal(t, []string{
		"begin", "admit",
		"validate row a", "validate row b", "validate commit", "plan reactions",
		"savepoint", "write rows", "append", "store reactions", "record outcomes", "commit",
	}, trace.take())

	c.send(t, k)
	b.Wait()
	require.Equal(t, []string{"begin", "admit"}, trace.take(), "a replay runs nothing else")

	reads = true
	_, result = push(b.upsert(t, "notes", note("a", "y")), remove("notes", "absent"))
	requireApplied(t, result)
	require.Equal(t, []string{
		"begin", "admit",
		"validate row a", "validate commit",
		"savepoint", "write rows", "read", "after the read",
		"plan reactions", "append", "store reactions", "record outcomes", "commit",
	}, trace.take())

	verdict = pushsvc.Reject("app.no", "", nil)
	_, result = push(b.upsert(t, "notes", note("a", "z")))
	require.Equal(t, "app.no", result.Results[0].Code)
	require.Equal(t, []string{
		"begin", "admit", "validate row a", "validate commit", "savepoint", "write rows", "read", "after the read",
		"rollback to savepoint", "record outcomes", "commit",
	}, trace.take(), "the lock is kept from the rollback to the outcome")

	reads = false
	_, result = push(b.upsert(t, "notes", note("a", "bad")), b.upsert(t, "notes", note("b", "z")))
	require.Equal(t, "app.bad_row", result.Results[0].Code)
	require.Equal(t, []string{"begin", "admit", "validate row a", "record outcomes", "commit"}, trace.take(), "nothing was written: no savepoint")

	b = referring(t, tracing)
	c = b.client(t, ssp2.WireV2)
	verdict = nil
	_, result = push(c.row(t, "lists", "l"), c.row(t, "items", "i", "list", "l"))
	requireApplied(t, result)
	require.Equal(t, []string{
		"begin", "admit", "validate row l", "validate row i", "validate commit", "plan reactions",
		"savepoint", "write rows", "write rows", "append", "store reactions", "record outcomes", "commit",
	}, trace.take(), "what a row refers to comes with the admission")

	_, result = push(remove("lists", "l"), c.row(t, "lists", "m"))
	requireApplied(t, result)
	require.Equal(t, []string{
		"begin", "admit", "references", // of the list
		"validate row l", "validate row m",
		"references", "validate row i", // of the item
		"validate commit", "plan reactions",
		"savepoint", "write rows", "write rows", "append", "store reactions", "record outcomes", "commit",
	}, trace.take())

	verdict = pushsvc.Reject("app.no", "", nil)
	_, result = push(c.row(t, "lists", "m"), c.row(t, "items", "i", "list", "l"))
	requireRejected(t, result, 1, ssp2.CodeReferenceViolation)
	require.Equal(t, []string{"begin", "admit", "validate row m", "validate row i", "record outcomes", "commit"}, trace.take(), "references come before the validator of the commit")
}

// TestRulesInOrder: an operation that breaks several rules is refused by the first of
// them in the order of the pipeline.
func TestRulesInOrder(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
			if v.ClientID == "seed" {
				return nil
			}
			return pushsvc.Reject("app.row", "", nil)
		}}
		cfg.ValidateCommit = func(_ context.Context, c *pushsvc.Candidate) error {
			if c.ClientID == "seed" {
				return nil
			}
			return pushsvc.Reject("app.commit", "", nil)
		}
	})
	seed := b.client(t, ssp2.WireV2).with(func(r *pushsvc.Request) { r.ClientID = "seed" })
	seed.apply(t, b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1", "slug": "taken"}), b.upsert(t, "notes", note("n", "a")))
	mallory := seed.with(func(r *pushsvc.Request) { r.ClientID, r.Actor, r.Scopes = "m", "mallory", allow(scope.Allowed{}) })
	alice := seed.with(func(r *pushsvc.Request) { r.ClientID = "a" })
	blob := `{"blobId":"sha256:` + strings.Repeat("a", 64) + `","byteLength":1,"mediaType":"text/plain"}`
	all := base(b.upsert(t, "notes", changed(note("n", "b"), map[string]any{"file": blob})), 7)
	garbage, fresh, plain := all, all, b.upsert(t, "notes", note("n", "b"))
	garbage.Payload = garbage.Payload[:len(garbage.Payload)-1]
	fresh.BaseVersion = nil
	dup := b.upsert(t, "slugs", map[string]any{"id": "s2", "project_id": "pr1", "slug": "taken"})
	for _, tc := range []struct {
		rule string
		c    *client
		op   ssp2.Operation
		code ssp2.Code
	}{
		{"decode", mallory, garbage, ssp2.CodeInvalidRequest},
		{"authorize", mallory, all, ssp2.CodeForbidden},
		{"conflict", alice, all, ssp2.CodeVersionConflict},
		{"blob check", alice, fresh, ssp2.CodeBlobNotFound},
		{"row validator", alice, plain, "app.row"},
		{"commit validator", alice, dup, "app.commit"},
		{"the database", seed, dup, ssp2.CodeConstraintViolation},
	} {
		result := tc.c.push(t, tc.op)
		require.Equal(t, ssp2.PushRejected, result.Status, tc.rule)
		require.Equal(t, string(tc.code), result.Results[0].Code, tc.rule)
	}
	requireSoundLog(t, b)
}
