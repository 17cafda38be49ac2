package config_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/config"
)

// Not parallel: the driver reads the PG* variables of the process.
func TestPGVariablesRankBetweenFlagsAndFile(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		env  map[string]string
		file string
		want string
		err  error
	}{
		{
			name: "connection string alone",
			args: []string{"--database-url=postgres://u:p@flag:1/d"},
			want: `database "d" on flag:1 as user "u"`,
		},
		{
			name: "the variables alone",
			env:  map[string]string{"PGHOST": "pg", "PGPORT": "2", "PGDATABASE": "e", "PGUSER": "v"},
			want: `database "e" on pg:2 as user "v"`,
		},
		{
			name: "flag over the variables",
			args: []string{"--database-url=postgres://u@flag:1/d"},
			env:  map[string]string{"PGHOST": "pg", "PGUSER": "v"},
			want: `database "d" on flag:1 as user "u"`,
		},
		{
			name: "the variables complete a connection string",
			args: []string{"--database-url=postgres://flag/"},
			env:  map[string]string{"PGPORT": "2", "PGUSER": "v", "PGDATABASE": "e"},
			want: `database "e" on flag:2 as user "v"`,
		},
		{
			name: "DATABASE_URL over the variables",
			env:  map[string]string{"DATABASE_URL": "postgres://u@url:1/d", "PGHOST": "pg"},
			want: `database "d" on url:1 as user "u"`,
		},
		{
			name: "the variables over the file",
			env:  map[string]string{"PGHOST": "pg", "PGPORT": "2", "PGUSER": "v"},
			file: "database-url: postgres://u@file:1/d",
			want: `database "v" on pg:2 as user "v"`,
		},
		{
			name: "a user does not say where the database is",
			env:  map[string]string{"PGUSER": "v"},
			file: "database-url: postgres://file:1/d",
			want: `database "d" on file:1 as user "v"`,
		},
		{
			name: "a socket directory",
			args: []string{"--database-url=host=/run/pg dbname=d user=u"},
			want: `database "d" on /run/pg as user "u"`,
		},
		{name: "nothing", err: config.ErrNoDatabase},
		{name: "only a user", env: map[string]string{"PGUSER": "v"}, err: config.ErrNoDatabase},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var env []string
			for _, name := range []string{"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE", "PGPASSWORD"} {
				t.Setenv(name, tc.env[name])
			}
			for name, value := range tc.env {
				env = append(env, name+"="+value)
			}
			p, err := parse(t, append([]string{"serve"}, tc.args...), env, tc.file)
			require.NoError(t, err)
			cfg, err := p.settings.Database("database-url", p.Serve.Database)
			if tc.err != nil {
				require.ErrorIs(t, err, tc.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.want, config.Target(&cfg.ConnConfig.Config))
		})
	}
}

func TestErrorsShowNoPartOfAConnectionString(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"postgres://u:hunter2@h:port/d",
		"postgres://u:hun/ter2@h/d",
		"postgres://u:hun ter2%@h/d",
		"postgres://u:hunter2@h/d?sslmode=sometimes",
		"postgres://u@h/d?password=hunter2&sslmode=sometimes",
		"postgres://u:hunter2@h/d?pool_max_conns=many",
		"host=h password = 'hunter2' sslmode=sometimes",
		`host=h password='hun\'ter2' sslmode=sometimes`,
		"hunter2",
		"postgres://u:hun@ter2@h/d",
		"host=h sslpassword=hunter2 sslmode=sometimes",
		"postgres://u:hunter2@h/d`: x?sslmode=sometimes",
	} {
		_, err := config.New(nil).Database("database-url", url)
		requireMasked(t, err, url)
		// Settings of the pool are none of a connection.
		if _, err = config.Connection(url); !strings.Contains(url, "pool_max_conns") {
			requireMasked(t, err, url)
		}
	}
}

func requireMasked(t *testing.T, err error, url string) {
	t.Helper()
	require.ErrorContains(t, err, "the connection string of the database cannot be used", url)
	require.NotContains(t, err.Error(), "hun")
	require.NotContains(t, err.Error(), "ter2")
}
