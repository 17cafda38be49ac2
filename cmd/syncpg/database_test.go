package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

func TestConnectErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	cfg, err := pgx.ParseConfig("postgres://u:hunter2@h:1/d")
	require.NoError(t, err)
	noHost := &net.DNSError{Err: "no such host", Name: "h", IsNotFound: true}
	for _, tc := range []struct {
		err  error
		want string
	}{
		{&pgconn.PgError{Code: "28P01", Message: "no"}, "check user and password"},
		{&pgconn.PgError{Code: "3D000", Message: "no"}, "create it with `createdb d`"},
		{&pgconn.PgError{Code: "53300", Message: "no"}, "raise max_connections"},
		{
			errors.Join(fmt.Errorf("hostname resolving error: %w", noHost), noHost),
			"user \"u\": lookup h: no such host; is the name of the host spelt right?",
		},
		{errors.New("tls error: server refused TLS connection"), "sslmode=disable"},
		{
			errors.Join(errors.New("tls error: server refused TLS connection"), &pgconn.PgError{Code: "28P01", Message: "no"}),
			"check user and password", // of the second attempt, without TLS
		},
		{errors.New("first line\n\tsecond line\n\tsecond line"), "first line, second line; is the server running there"},
	} {
		err := connectError(cfg, tc.err)
		require.ErrorContains(t, err, `cannot connect to database "d" on h:1 as user "u"`)
		require.ErrorContains(t, err, tc.want)
		require.ErrorIs(t, err, tc.err)
		require.NotContains(t, err.Error(), "hunter2")
	}
	require.ErrorIs(t, connectError(cfg, fmt.Errorf("dial: %w", context.Canceled)), context.Canceled)
}

func TestDatabaseThatIsNotThereIsNamed(t *testing.T) {
	t.Parallel()
	u, err := url.Parse(pgtest.DSN(t))
	require.NoError(t, err)
	u.Path = "/syncpg_no_such_database"
	for _, args := range [][]string{{"migrate", "up"}, {"schema", "check", "--schema", sampleFile}} {
		r := runCommand(t, append(args, "--database-url", u.String())...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "create it with `createdb syncpg_no_such_database`")
	}
}

func TestMissingRightsAreExplained(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, explain(&pgconn.PgError{Code: "42501"}), "use the owner, or grant it as the chapter Rights of OPERATING.md says")
	require.ErrorContains(t, explain(&pgconn.PgError{Code: "42P05"}), "default_query_exec_mode=exec")
	other := &pgconn.PgError{Code: "42P01"}
	require.Equal(t, error(other), explain(other))
}
