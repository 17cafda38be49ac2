package config_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/config"
)

// app has a flag of every kind that the command uses.
type app struct {
	Config string `name:"config"`
	Serve  struct {
		Listen   string   `name:"listen" default:"127.0.0.1:1" setting:""`
		PGPort   int      `name:"pg-port" setting:""`
		Database string   `name:"database-url" setting:"DATABASE_URL"`
		DevAuth  bool     `name:"dev-auth" setting:""`
		Proxies  []string `name:"trusted-proxy" setting:""`
		JSON     bool     `name:"json"`
	} `cmd:""`
	Check struct {
		Schema string `name:"schema" required:"" setting:""`
	} `cmd:""`
}

type parsed struct {
	app
	settings *config.Settings
}

// parse runs kong as the command does. A file of "" writes none.
func parse(t *testing.T, args, env []string, file string) (parsed, error) {
	t.Helper()
	p := parsed{settings: config.New(env)}
	if file != "" {
		path := filepath.Join(t.TempDir(), "syncpg.yaml")
		require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config", path)
	}
	k, err := kong.New(&p.app, p.settings.Options(), kong.Exit(func(int) { t.Error("kong wanted to exit") }))
	require.NoError(t, err)
	_, err = k.Parse(args)
	return p, err
}

func TestPrecedenceIsFlagEnvironmentFileDefault(t *testing.T) {
	t.Parallel()
	const file = "listen: file:1\npg-port: 11\ndatabase-url: file-url\ndev-auth: true\ntrusted-proxy: [f1, 'f,2']\n"
	for _, tc := range []struct {
		name string
		args []string
		env  []string
		file string
		want app
	}{
		{
			name: "nothing given: the defaults",
			want: func() (a app) { a.Serve.Listen = "127.0.0.1:1"; return }(),
		},
		{
			name: "file over default",
			file: file,
			want: func() (a app) {
				a.Serve.Listen, a.Serve.PGPort, a.Serve.Database, a.Serve.DevAuth = "file:1", 11, "file-url", true
				a.Serve.Proxies = []string{"f1", "f,2"}
				return
			}(),
		},
		{
			name: "environment over file",
			env: []string{
				"SYNCPG_LISTEN=env:1", "SYNCPG_PG_PORT=22", "DATABASE_URL=env-url", "SYNCPG_DEV_AUTH=false",
				"SYNCPG_TRUSTED_PROXY=e1,e2",
			},
			file: file,
			want: func() (a app) {
				a.Serve.Listen, a.Serve.PGPort, a.Serve.Database, a.Serve.DevAuth = "env:1", 22, "env-url", false
				a.Serve.Proxies = []string{"e1", "e2"}
				return
			}(),
		},
		{
			name: "flag over environment and file",
			args: []string{"--listen=flag:1", "--pg-port=33", "--database-url=flag-url", "--dev-auth", "--trusted-proxy=x"},
			env: []string{
				"SYNCPG_LISTEN=env:1", "SYNCPG_PG_PORT=22", "DATABASE_URL=env-url", "SYNCPG_DEV_AUTH=false",
				"SYNCPG_TRUSTED_PROXY=e1,e2",
			},
			file: file,
			want: func() (a app) {
				a.Serve.Listen, a.Serve.PGPort, a.Serve.Database, a.Serve.DevAuth = "flag:1", 33, "flag-url", true
				a.Serve.Proxies = []string{"x"}
				return
			}(),
		},
		{
			name: "flag over file, without the environment",
			args: []string{"--listen", "flag:1"},
			file: "listen: file:1",
			want: func() (a app) { a.Serve.Listen = "flag:1"; return }(),
		},
		{
			name: "our own variable over the common one",
			env:  []string{"DATABASE_URL=common", "SYNCPG_DATABASE_URL=ours"},
			want: func() (a app) { a.Serve.Listen, a.Serve.Database = "127.0.0.1:1", "ours"; return }(),
		},
		{
			name: "an empty variable is not set",
			env:  []string{"SYNCPG_LISTEN=", "SYNCPG_PG_PORT="},
			file: "listen: file:1",
			want: func() (a app) { a.Serve.Listen = "file:1"; return }(),
		},
		{
			name: "a key of another command is no error",
			file: "schema: some.json",
			want: func() (a app) { a.Serve.Listen = "127.0.0.1:1"; return }(),
		},
		{
			name: "a file of comments",
			file: "# nothing yet\n",
			want: func() (a app) { a.Serve.Listen = "127.0.0.1:1"; return }(),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p, err := parse(t, append([]string{"serve"}, tc.args...), tc.env, tc.file)
			require.NoError(t, err)
			tc.want.Config = p.Config
			require.Equal(t, tc.want, p.app)
		})
	}
}

func TestRequiredFlagMayComeFromAnySource(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args, env []string
		file      string
	}{
		"flag":        {args: []string{"--schema=s.json"}},
		"environment": {env: []string{"SYNCPG_SCHEMA=s.json"}},
		"file":        {file: "schema: s.json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := parse(t, append([]string{"check"}, tc.args...), tc.env, tc.file)
			require.NoError(t, err)
			require.Equal(t, "s.json", p.Check.Schema)
		})
	}
	_, err := parse(t, []string{"check"}, nil, "")
	require.ErrorContains(t, err, "--schema")
}

func TestConfigFileMayComeFromTheEnvironment(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	byEnv, byFlag := filepath.Join(dir, "env.yaml"), filepath.Join(dir, "flag.yaml")
	require.NoError(t, os.WriteFile(byEnv, []byte("listen: by-env"), 0o600))
	require.NoError(t, os.WriteFile(byFlag, []byte("listen: by-flag"), 0o600))

	p, err := parse(t, []string{"serve"}, []string{"SYNCPG_CONFIG=" + byEnv}, "")
	require.NoError(t, err)
	require.Equal(t, "by-env", p.Serve.Listen)

	p, err = parse(t, []string{"serve", "--config", byFlag}, []string{"SYNCPG_CONFIG=" + byEnv}, "")
	require.NoError(t, err)
	require.Equal(t, "by-flag", p.Serve.Listen)

	_, err = parse(t, []string{"serve", "--config", filepath.Join(dir, "none.yaml")}, nil, "")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "read the configuration file")
}

func TestUnknownKeysAreErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		env  []string
		file string
		want []string
	}{
		{"misspelt key", nil, "listen: a\nlistn: b\n", []string{`syncpg.yaml:2: unknown key "listn", did you mean listen?`}},
		{"every misspelt key is named", nil, "listn: a\nshema: b\n", []string{`:1: unknown key "listn"`, `:2: unknown key "shema"`}},
		{
			"far from every key", nil, "colour: red",
			[]string{`unknown key "colour"; known are database-url, dev-auth, listen, pg-port, schema, trusted-proxy`},
		},
		{"underscores are not dashes", nil, "pg_port: 1", []string{`unknown key "pg_port", did you mean pg-port?`}},
		{"a flag of the command line only", nil, "json: true", []string{`unknown key "json"`}},
		{"the file does not name itself", nil, "config: other.yaml", []string{`unknown key "config"`}},
		{"key twice", nil, "listen: a\npg-port: 1\nlisten: b", []string{`:3: key "listen" stands already in line 1`}},
		{"key without value", nil, "listen:", []string{`key "listen" has no value`}},
		{"nested value", nil, "listen:\n  host: a", []string{`key "listen" must be a plain value or a list`}},
		{"nested list", nil, "trusted-proxy: [[a]]", []string{`key "trusted-proxy" must be a list of plain values`}},
		{"not a mapping", nil, "- listen", []string{`must be a mapping of keys to values`}},
		{"two documents", nil, "listen: a\n---\nlisten: b", []string{`more than one YAML document`}},
		{"not YAML", nil, "listen: [", []string{"syncpg.yaml: yaml:"}},
		{"variable like no other", []string{"SYNCPG_FOO=a"}, "", []string{"unknown environment variable SYNCPG_FOO; known are "}},
		{"misspelt variable", []string{"SYNCPG_LISTN=a"}, "", []string{"unknown environment variable SYNCPG_LISTN, did you mean SYNCPG_LISTEN?"}},
		{"a flag of the command line only, as variable", []string{"SYNCPG_JSON=1"}, "", []string{"unknown environment variable SYNCPG_JSON"}},
		{"a wrong value names its place", nil, "\npg-port: many", []string{"--pg-port", "value from", "syncpg.yaml:2"}},
		{"a wrong value names its variable", []string{"SYNCPG_PG_PORT=many"}, "", []string{"--pg-port", "value from SYNCPG_PG_PORT"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p, err := parse(t, []string{"serve"}, tc.env, tc.file)
			require.Error(t, err)
			err = p.settings.Explain(err)
			for _, want := range tc.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestVariablesOfOthersAreNoErrors(t *testing.T) {
	t.Parallel()
	_, err := parse(t, []string{"serve"}, []string{
		"HOME=/root", "PGHOST=db", "SYNCPG_PG_BIN=/bin", "SYNCPG_TEST_DATABASE_URL=x",
		"SYNCPG_SERVICE_HOST=10.0.0.1", "SYNCPG_SERVICE_PORT=8787", "SYNCPG_SERVICE_PORT_HTTP=8787",
		"SYNCPG_PORT=tcp://10.0.0.1:8787", "SYNCPG_PORT_8787_TCP=tcp://10.0.0.1:8787", "SYNCPG_PORT_8787_TCP_ADDR=10.0.0.1",
		"SYNCPG_POOLER_SERVICE_HOST=10.0.0.2", "SYNCPG_POOLER_PORT=tcp://10.0.0.2:6432",
	}, "")
	require.NoError(t, err)
}
