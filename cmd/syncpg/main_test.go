package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// envMain makes the test binary be the command.
const envMain = "SYNCPG_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(envMain) != "" {
		main()
	}
	flag.Parse()
	// Help is as wide as the terminal says, and the driver reads PG variables.
	for _, name := range []string{"COLUMNS", "PGHOST", "PGPORT", "PGDATABASE", "PGSERVICE", "PGUSER", "PGPASSWORD"} {
		_ = os.Unsetenv(name)
	}
	goleak.VerifyTestMain(m)
}

// result is what a run of the command leaves.
type result struct {
	code           int
	stdout, stderr string
}

// invocation is a run of the command that a test describes.
type invocation struct {
	args  []string
	env   []string
	stdin string
}

func (i invocation) run(t *testing.T) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), i.args, i.env, strings.NewReader(i.stdin), &stdout, &stderr)
	return result{code, stdout.String(), stderr.String()}
}

func runCommand(t *testing.T, args ...string) result {
	t.Helper()
	return invocation{args: args}.run(t)
}

// golden compares a text with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run the test with -update to make the file")
	require.Empty(t, cmp.Diff(string(want), got))
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// emptyDatabase returns the URL of a database without migrations.
func emptyDatabase(t *testing.T) string {
	t.Helper()
	return pgtest.New(t, pgtest.Options{Empty: true}).DSN
}

func TestHelpOfEveryCommand(t *testing.T) {
	t.Parallel()
	for _, command := range []string{
		"", "dev", "serve", "migrate", "migrate up", "migrate down", "migrate status", "schema", "schema check", "schema plan", "schema apply",
		"prune", "epoch", "epoch rotate", "lease", "lease list", "lease revoke", "seed", "smoke", "render", "version",
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			r := runCommand(t, append(strings.Fields(command), "--help")...)
			require.Zero(t, r.code)
			require.Empty(t, r.stderr)
			name := "syncpg"
			if command != "" {
				name += "-" + strings.ReplaceAll(command, " ", "-")
			}
			golden(t, filepath.Join("help", name+".txt"), r.stdout)
			for line := range strings.SplitSeq(r.stdout, "\n") {
				require.LessOrEqual(t, len([]rune(line)), 80, "line %q", line)
			}
		})
	}
}

func TestWrongUsageExitsWith2AndSaysWhereToLook(t *testing.T) {
	t.Parallel()
	sample := filepath.Join("..", "..", "schema", "sample", "sample.ir.json")
	typo := writeFile(t, "syncpg.yaml", "listen: 127.0.0.1:0\nlistn: x\n")
	broken := writeFile(t, "broken.json", `{"irVersion": 1, "schemaVersion": 1, "tables": [{"name": "sync_x"}]}`)
	for _, tc := range []struct {
		name string
		invocation
		want []string
	}{
		{"no command", invocation{}, []string{`expected one of "dev"`, `Run "syncpg --help"`}},
		{"unknown command", invocation{args: []string{"frobnicate"}}, []string{"unexpected argument frobnicate", `Run "syncpg --help"`}},
		{"unknown flag", invocation{args: []string{"migrate", "up", "--nope"}}, []string{"unknown flag --nope", `Run "syncpg migrate up --help"`}},
		{"missing flag", invocation{args: []string{"smoke"}}, []string{"missing flags: --url", `Run "syncpg smoke --help"`}},
		{"flag without its value", invocation{args: []string{"smoke", "--url"}}, []string{"syncpg: --url needs a value\n"}},
		{"wrong log level", invocation{args: []string{"version", "--log-level=loud"}}, []string{"--log-level", `"loud"`}},
		{"wrong log level in the environment", invocation{args: []string{"version"}, env: []string{"SYNCPG_LOG_LEVEL=loud"}}, []string{`"loud"`, "value from SYNCPG_LOG_LEVEL"}},
		{"unknown key of the file", invocation{args: []string{"version", "--config", typo}}, []string{`syncpg.yaml:2: unknown key "listn", did you mean listen?`}},
		{"unknown key of a file named by the environment", invocation{args: []string{"version"}, env: []string{"SYNCPG_CONFIG=" + typo}}, []string{`unknown key "listn"`}},
		{"unknown variable", invocation{args: []string{"version"}, env: []string{"SYNCPG_LISTN=x"}}, []string{"unknown environment variable SYNCPG_LISTN, did you mean SYNCPG_LISTEN?"}},
		{"missing file", invocation{args: []string{"version", "--config", "none.yaml"}}, []string{"none.yaml"}},
		{"no database", invocation{args: []string{"migrate", "status"}}, []string{"no database given: use --database-url, DATABASE_URL or the PG* variables", `Run "syncpg migrate status --help"`}},
		{"unreadable connection string", invocation{args: []string{"migrate", "up", "--database-url=postgres://u:hunter2@h:port/d"}}, []string{"the connection string of the database cannot be used"}},
		{"missing schema", invocation{args: []string{"schema", "check", "--schema", "none.json"}}, []string{"read the schema: open none.json"}},
		{"wrong schema", invocation{args: []string{"schema", "check", "--schema", broken}}, []string{"broken.json: schema: table \"sync_x\"", "reserved_name"}},
		{"prune of nothing", invocation{args: []string{"prune"}}, []string{"say which partitions: --partition NAME", `Run "syncpg prune --help"`}},
		{"prune of some and all", invocation{args: []string{"prune", "--all", "--partition=p"}}, []string{"say which partitions"}},
		{"prune that keeps too little", invocation{args: []string{"prune", "--all", "--keep-commits=999"}}, []string{"999 commits are kept; the protocol wants 1000 at least"}},
		{"prune that waits for no client", invocation{args: []string{"prune", "--all", "--active-window=0s"}}, []string{"--active-window is 0, which the protocol does not allow"}},
		{"prune that waits too short", invocation{args: []string{"prune", "--all"}, env: []string{"SYNCPG_ACTIVE_WINDOW=1h"}}, []string{"the active window is 1h0m0s; the protocol wants 14 days at least"}},
		{"prune of young commits", invocation{args: []string{"prune", "--all", "--force-age=24h"}}, []string{"the protocol wants 30 days at least"}},
		{"prune in no batches", invocation{args: []string{"prune", "--all", "--batch-rows=0"}}, []string{"--batch-rows is 0"}},
		{"serve that keeps too little", invocation{args: []string{"serve", "--schema", sample, "--dev-auth", "--keep-commits=1"}}, []string{"1 commits are kept"}},
		{"serve that prunes all the time", invocation{args: []string{"serve", "--schema", sample, "--dev-auth", "--prune-interval=1ms"}}, []string{"--prune-interval is 1ms"}},
		{"epoch of nothing", invocation{args: []string{"epoch", "rotate"}}, []string{"say which partitions", `Run "syncpg epoch rotate --help"`}},
		{"revocation of nothing", invocation{args: []string{"lease", "revoke", "--partition=p", "--lease-key=" + strings.Repeat("QUJD", 20)}}, []string{"--lease-id", "--actor", "--client"}},
		{"revocation of two things", invocation{args: []string{"lease", "revoke", "--partition=p", "--actor=a", "--client=c", "--lease-key=" + strings.Repeat("QUJD", 20)}}, []string{"can't be used together"}},
		{"revocation without a key", invocation{args: []string{"lease", "revoke", "--partition=p", "--actor=a"}}, []string{"--lease-key"}},
		{"revocation with a short key", invocation{args: []string{"lease", "revoke", "--partition=p", "--actor=a", "--lease-key=aHVudGVyMg=="}}, []string{"--lease-key has 7 bytes"}},
		{"smoke without a scheme", invocation{args: []string{"smoke", "--url", "localhost:8787"}}, []string{"--url must be an address such as http://127.0.0.1:8787"}},
		{"smoke with half a header", invocation{args: []string{"smoke", "--url", "http://h", "--header", "x"}}, []string{`--header must have the form "NAME: VALUE"`}},
		{"smoke with an unknown table", invocation{args: []string{"smoke", "--url", "http://h", "--table", "x"}}, []string{`the schema has no table "x"`}},
		{"smoke with an unknown scope", invocation{args: []string{"smoke", "--url", "http://h", "--scope", "x=y"}}, []string{`no scope variable "x"`}},
		{"app tables among ours", invocation{args: []string{"schema", "apply", "--schema", sample, "--app-schema", "syncpg"}}, []string{"--app-schema", `"syncpg" is not for app tables`}},
		{"app tables among ours by the environment", invocation{args: []string{"dev"}, env: []string{"SYNCPG_APP_SCHEMA=pg_app"}}, []string{"is not for app tables", "value from SYNCPG_APP_SCHEMA"}},
		{"a port that does not exist", invocation{args: []string{"dev", "--listen", "127.0.0.1:80000"}}, []string{"--listen: ", "invalid port"}},
		{"serve with a wrong header", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=X Actor", "--auth-header-partition=P", "--allow-all-scopes"}}, []string{`--auth-header-actor: "X Actor" is no name of a header`}},
		{"dev for everybody", invocation{args: []string{"dev", "--listen", "0.0.0.0:0"}}, []string{"loopback addresses only", "give --allow-remote"}},
		{"dev on every address", invocation{args: []string{"dev", "--listen", ":0"}}, []string{"give --allow-remote"}},
		{"dev on no address", invocation{args: []string{"dev", "--listen", "here"}}, []string{"--listen: address here: missing port"}},
		{"serve without authentication", invocation{args: []string{"serve", "--schema", sample}}, []string{"it is not said how to tell who asks", "--auth-header-actor", "--dev-auth"}},
		{"serve with half of the headers", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=A"}}, []string{"are needed both"}},
		{"serve without scopes", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=A", "--auth-header-partition=P"}}, []string{"it is not said what an actor may read and write"}},
		{"serve with scopes twice", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=A", "--auth-header-partition=P", "--auth-header-scopes=S", "--allow-all-scopes"}}, []string{"exclude each other"}},
		{"serve with both kinds", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=A", "--dev-auth"}}, []string{"no other flag of authentication"}},
		{"serve for everybody", invocation{args: []string{"serve", "--schema", sample, "--dev-auth", "--listen=192.0.2.1:0"}}, []string{"give --dev-auth-remote"}},
		{"serve with a wrong proxy", invocation{args: []string{"serve", "--schema", sample, "--auth-header-actor=A", "--auth-header-partition=P", "--allow-all-scopes", "--trusted-proxy=proxy.example"}}, []string{"neither an address nor a network"}},
		{"serve without a database", invocation{args: []string{"serve", "--schema", sample, "--dev-auth"}}, []string{"no database given"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := tc.run(t)
			require.Equal(t, exitUsage, r.code, r.stderr)
			require.Empty(t, r.stdout)
			for _, want := range tc.want {
				require.Contains(t, r.stderr, want)
			}
			require.NotContains(t, r.stderr, "hunter2")
		})
	}
}

func TestUnreachableDatabaseIsNamedWithoutItsPassword(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"migrate", "up"},
		{"migrate", "status"},
		{"schema", "check", "--schema", filepath.Join("..", "..", "schema", "sample", "sample.ir.json")},
		{"serve", "--dev-auth", "--schema", filepath.Join("..", "..", "schema", "sample", "sample.ir.json")},
	} {
		r := invocation{args: args, env: []string{"DATABASE_URL=postgres://u:hunter2@127.0.0.1:1/d"}}.run(t)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, `cannot connect to database "d" on 127.0.0.1:1 as user "u"`)
		require.Contains(t, r.stderr, "is the server running there")
		require.NotContains(t, r.stdout+r.stderr, "hunter2")
	}
}

func TestInterruptedCommandSaysSo(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var stdout, stderr bytes.Buffer
	code := run(ctx, []string{"migrate", "up", "--database-url", emptyDatabase(t)}, nil, strings.NewReader(""), &stdout, &stderr)
	require.Equal(t, exitFailed, code)
	require.Equal(t, "syncpg: interrupted\n", stderr.String())
}

func TestVersion(t *testing.T) {
	t.Parallel()
	r := runCommand(t, "version")
	require.Zero(t, r.code)
	require.Contains(t, r.stdout, "wire versions  1, 2, 3\n")
	require.Equal(t, r, runCommand(t, "--version"))
	r = runCommand(t, "version", "--json")
	require.Zero(t, r.code)
	require.Contains(t, r.stdout, `"wireVersions": [`)
}
