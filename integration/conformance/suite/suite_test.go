package suite_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/integration/conformance/suite"
)

const report = `<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="bun test" tests="4" failures="2" skipped="1">
  <testsuite name="runner.test.ts">
    <testsuite name="conformance">
      <testcase name="convergence/basic (§2.2 B.1)" classname="conformance" />
      <testcase name="scopes/denied (§3.4)" classname="conformance">
        <failure type="Error" message="http://127.0.0.1:4711/instances/i7/sync: HTTP 500&#10;  expected: a|b">Error</failure>
      </testcase>
      <testcase name="cursor/horizon (§4.6)" classname="conformance">
        <failure type="Error" message="Error: http://127.0.0.1:4711/instances/i8/control/prune: HTTP 501: {&quot;code&quot;:&quot;host.not_supported&quot;,&quot;category&quot;:&quot;internal&quot;,&quot;message&quot;:&quot;the server does not support pruning&quot;}" />
      </testcase>
      <testcase name="blobs/upload (§5.9) needs blobs, blob-presign" classname="conformance"><skipped /></testcase>
      <testcase name="realtime/hangs (§8.1)" classname="conformance">
        <failure type="TimeoutError" message="test timed out" />
      </testcase>
    </testsuite>
  </testsuite>
</testsuites>`

// asBun makes the test binary behave like bun: it writes a report that shows what
// it was called with.
const asBun = "SYNCPG_TEST_AS_BUN"

func TestMain(m *testing.M) {
	if os.Getenv(asBun) == "" {
		os.Exit(m.Run())
	}
	file, found := strings.CutPrefix(os.Args[len(os.Args)-1], "--reporter-outfile=")
	if !found {
		os.Exit(0)
	}
	working, _ := os.Getwd()
	report := fmt.Sprintf(`<testsuites><testcase name="group/called (%s)"><failure message="%s %s %s" /></testcase></testsuites>`,
		strings.Join(os.Args[1:len(os.Args)-1], " "), filepath.Base(working),
		os.Getenv("SYNCPG_ONLY"), filepath.Base(os.Getenv("SYNCPG_CATALOG")))
	if os.Getenv(asBun) == "report" && os.WriteFile(file, []byte(report), 0o600) != nil {
		os.Exit(2)
	}
	os.Exit(1) // as bun does when a scenario has failed
}

func TestRunStartsTheRunnerInItsDirectory(t *testing.T) {
	t.Setenv(asBun, "report")
	program, err := os.Executable()
	require.NoError(t, err)
	driver := filepath.Join(t.TempDir(), "driver")
	require.NoError(t, os.Mkdir(driver, 0o700))

	got, err := suite.Run(t.Context(), suite.Options{
		Host: "http://127.0.0.1:1", Bun: program, Driver: driver, Catalog: "some/catalog.ts", Only: "conflict/",
	})
	require.NoError(t, err)
	want := []suite.Result{{
		Scenario: "group/called", Refs: "test ./runner.test.ts --reporter=junit", Status: suite.Failed,
		Note: "driver conflict/ catalog.ts",
	}}
	require.Empty(t, cmp.Diff(want, got))
}

func TestRunFailsWhenTheRunnerReportsNothing(t *testing.T) {
	t.Setenv(asBun, "nothing")
	program, err := os.Executable()
	require.NoError(t, err)

	_, err = suite.Run(t.Context(), suite.Options{Bun: program, Driver: t.TempDir()})
	require.ErrorIs(t, err, suite.ErrNoResults)

	_, err = suite.Run(t.Context(), suite.Options{Bun: filepath.Join(t.TempDir(), "missing"), Driver: t.TempDir()})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestParseJUnit(t *testing.T) {
	t.Parallel()

	got, err := suite.ParseJUnit(strings.NewReader(report))
	require.NoError(t, err)
	want := []suite.Result{
		{Scenario: "convergence/basic", Refs: "§2.2 B.1", Status: suite.Passed},
		{
			Scenario: "scopes/denied", Refs: "§3.4", Status: suite.Failed,
			Note: "/sync: HTTP 500\n  expected: a|b",
		},
		{Scenario: "cursor/horizon", Refs: "§4.6", Status: suite.Failed, Note: "the server does not support pruning"},
		{Scenario: "blobs/upload", Refs: "§5.9", Status: suite.Skipped, Note: "needs blobs, blob-presign"},
		{Scenario: "realtime/hangs", Refs: "§8.1", Status: suite.Failed, Note: "test timed out"},
	}
	require.Empty(t, cmp.Diff(want, got))
}

func TestParseJUnitRefusesAReportWithoutScenarios(t *testing.T) {
	t.Parallel()

	_, err := suite.ParseJUnit(strings.NewReader(`<testsuites name="bun test"></testsuites>`))
	require.ErrorIs(t, err, suite.ErrNoResults)

	_, err = suite.ParseJUnit(strings.NewReader("not xml"))
	require.Error(t, err)
}

func TestSummaryCountsAScenarioAsPassedOnlyIfEveryRunPassed(t *testing.T) {
	t.Parallel()

	stable := suite.Result{Scenario: "a/stable", Refs: "§1", Status: suite.Passed}
	shaky := suite.Result{Scenario: "a/shaky", Refs: "§2", Status: suite.Passed}
	shakyFails := suite.Result{Scenario: "a/shaky", Refs: "§2", Status: suite.Failed, Note: "late\n  x|y"}
	skipped := suite.Result{Scenario: "b/skipped", Refs: "§3", Status: suite.Skipped, Note: "needs crdt"}
	summary := suite.Summarize([][]suite.Result{
		{stable, shaky, skipped},
		{stable, shakyFails, skipped},
	})

	require.Equal(t, 1, summary.Count(suite.Passed))
	require.Equal(t, 1, summary.Count(suite.Failed))
	require.Equal(t, 1, summary.Count(suite.Skipped))

	var page strings.Builder
	require.NoError(t, summary.WriteMarkdown(&page, []string{"idempotency-fault"}))
	for _, line := range []string{
		"Runs: 2. Capabilities of the host: `idempotency-fault`.",
		"**3 scenarios: 1 pass in every run, 1 fail, 1 skipped.**",
		"| a | 1 | 1 | 0 |",
		"| b | 0 | 0 | 1 |",
		"| a/stable | §1 | pass |  |",
		`| a/shaky | §2 | fail (1 of 2 runs pass) | late x\|y |`,
		"| b/skipped | §3 | skipped | needs crdt |",
	} {
		require.Contains(t, page.String(), line)
	}

	require.Equal(t, []string{"a/shaky"}, summary.Regressions(
		"| scenario | protocol | result | note |\n"+
			"| a/stable | §1 | pass |  |\n| a/shaky | §2 | pass |  |\n| b/skipped | §3 | fail | x |\n"))
	require.Empty(t, summary.Regressions(page.String()))

	var again strings.Builder
	require.NoError(t, summary.WriteMarkdown(&again, []string{"idempotency-fault"}))
	require.Equal(t, page.String(), again.String())
}
