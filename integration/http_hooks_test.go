package integration_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/ssp2"
)

// TestHooksOverHTTP: rejections of hooks arrive with their code and their details, in a
// frame behind the result, and again on every replay; what has none has no such frame.
func TestHooksOverHTTP(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(cfg *syncpg.Config) {
		cfg.Validators = map[string]syncpg.Validator{"lists": func(_ context.Context, v *pushsvc.RowValidation) error {
			switch title, _ := v.Row.Text("title"); title {
			case "too long":
				return pushsvc.Reject("app.title_too_long", "shorten it", &ssp2.Details{FieldPaths: []string{"title"}, Reason: "too_long"})
			case "plain":
				return pushsvc.Reject("app.plain", "", nil)
			}
			return nil
		}}
		cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error {
			rows, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "lists", Scopes: map[string][]string{"team_id": {"team-1"}}})
			if err == nil && len(rows) > 2 {
				err = pushsvc.RejectOperation(1, "app.too_many", "", &ssp2.Details{References: map[string]string{"team": "team-1"}})
			}
			return err
		}
		cfg.PlanReactions = func(_ context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			return []reaction.Plan{{Key: "k", Type: "mail", Version: 1}}, nil
		}
	})
	req := s.request(s.epoch(t))
	req.Commits = []ssp2.PushCommit{
		s.putLists(t, "good", "fine", "a"),
		s.putLists(t, "long", "too long", "b"),
		s.putLists(t, "plain", "plain", "b"),
		s.putLists(t, "many", "fine", "b", "c"),
	}
	answers := func() []ssp2.Frame {
		var frames []ssp2.Frame
		for _, f := range s.sync(t, req) {
			switch f := f.(type) {
			case *ssp2.PushResult, *ssp2.PushResultDetails:
				frames = append(frames, f)
			}
		}
		return frames
	}
	rejected := func(id string, op int32, code, message string) *ssp2.PushResult {
		return &ssp2.PushResult{
			ClientCommitID: id, Status: ssp2.PushRejected,
			Results: []ssp2.OpResult{{OpIndex: op, Status: ssp2.OpError, Code: code, Message: message}},
		}
	}
	details := func(id string, op int32, json string) *ssp2.PushResultDetails {
		return &ssp2.PushResultDetails{ClientCommitID: id, Entries: []ssp2.DetailEntry{{OpIndex: op, DetailsJSON: json}}}
	}
	want := []ssp2.Frame{
		rejected("long", 0, "app.title_too_long", "shorten it"),
		details("long", 0, `{"fieldPaths":["title"],"reason":"too_long"}`),
		rejected("plain", 0, "app.plain", "app.plain"),
		rejected("many", 1, "app.too_many", "app.too_many"),
		details("many", 1, `{"references":{"team":"team-1"}}`),
	}
	first := answers()
	require.Empty(t, cmp.Diff(want, first[1:]))
	require.Empty(t, cmp.Diff(want, answers()[1:]), "a replay")
	require.Equal(t, 1, s.count(t, `select count(*) from syncpg.sync_reactions`))
	require.Equal(t, 1, s.count(t, `select count(*) from public.lists`))
}
