package host_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func TestInstalledRulesCountForTheNextRound(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", tasks)
	push := func(id, row, title string) ssp2.PushResult {
		results, err := ada.Push(t.Context(), task(t, id, row, "p1", title))
		require.NoError(t, err)
		return results[0].PushResult
	}
	code := func(r ssp2.PushResult) string { return r.Results[0].Code }

	h.call(base, "installValidators", `{"specs": [
		{"table": "tasks", "rule": {"kind": "maxLength", "column": "title", "max": 3, "code": "app.long"}},
		{"table": "tasks", "rule": {"kind": "immutableWhen", "column": "title", "guardColumn": "title", "guardValue": "end", "code": "app.closed"}}]}`)
	require.Equal(t, "app.long", code(push("c1", "t1", "four")))
	require.Equal(t, "app.long", code(push("c2", "t1", "\U0001F600\U0001F600")), "UTF-16 code units")
	require.Equal(t, ssp2.PushApplied, push("c3", "t1", "end").Status)
	require.Equal(t, ssp2.PushApplied, push("c4", "t1", "end").Status)
	require.Equal(t, "app.closed", code(push("c5", "t1", "new")))

	h.call(base, "installValidators", `{"specs": []}`)
	h.call(base, "installCommitValidator", `{"spec": {"kind": "requireSiblingWhen", "table": "tasks",
		"column": "title", "equals": "done", "siblingRowIdSuffix": "-event", "code": "app.sibling"}}`)
	require.Equal(t, ssp2.PushApplied, push("c6", "t1", "four").Status)
	require.Equal(t, "app.sibling", code(push("c7", "t1", "done")))
	both := task(t, "c8", "t1", "p1", "done")
	both.Operations = append(both.Operations, task(t, "", "t1-event", "p1", "x").Operations...)
	results, err := ada.Push(t.Context(), both)
	require.NoError(t, err)
	require.Equal(t, ssp2.PushApplied, results[0].Status)

	h.call(base, "installCommitValidator", `{"spec": null}`)
	require.Equal(t, ssp2.PushApplied, push("c9", "t2", "done").Status)

	for _, body := range []string{
		`{"specs": [{"table": "tasks", "rule": {"kind": "nope", "column": "title", "code": "app.x"}}]}`,
		`{"specs": [{"table": "nope", "rule": {"kind": "maxLength", "column": "title", "code": "app.x"}}]}`,
		`{"specs": [{"table": "tasks", "rule": {"kind": "maxLength", "column": "nope", "code": "app.x"}}]}`,
		`{"specs": [{"table": "tasks", "rule": {"kind": "maxLength", "column": "title"}}]}`,
	} {
		status, answer := h.post(base+"/control/installValidators", body)
		require.Equal(t, http.StatusBadRequest, status, answer)
	}
	status, answer := h.post(base+"/control/installCommitValidator", `{"spec": {"kind": "nope", "table": "tasks"}}`)
	require.Equal(t, http.StatusBadRequest, status, answer)
}
