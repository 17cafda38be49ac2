package round_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func TestFailure(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return &pgconn.PgError{Code: code, Message: "secret"} }
	for _, tc := range []struct {
		err  error
		code ssp2.Code
	}{
		{ssp2.Errorf(ssp2.CodeForbidden, "no"), ssp2.CodeForbidden},
		{ssp2.Errorf("app.own_code", "no"), "app.own_code"},
		{errors.New("secret"), ssp2.CodeInternalError},
		{context.Canceled, ssp2.CodeStorageUnavailable},
		{context.DeadlineExceeded, ssp2.CodeStorageUnavailable},
		{&net.OpError{Op: "dial", Err: errors.New("secret")}, ssp2.CodeStorageUnavailable},
		{net.ErrClosed, ssp2.CodeStorageUnavailable},
		{io.ErrUnexpectedEOF, ssp2.CodeStorageUnavailable},
		{pgconn.ErrConnClosed, ssp2.CodeStorageUnavailable},
		{&pgconn.ConnectError{}, ssp2.CodeStorageUnavailable},
		{state("08006"), ssp2.CodeStorageUnavailable},
		{state("25006"), ssp2.CodeStorageUnavailable},
		{state("25P03"), ssp2.CodeStorageUnavailable},
		{state("25P04"), ssp2.CodeStorageUnavailable},
		{state("40001"), ssp2.CodeStorageUnavailable},
		{state("40P01"), ssp2.CodeStorageUnavailable},
		{state("53300"), ssp2.CodeStorageUnavailable},
		{state("55P03"), ssp2.CodeStorageUnavailable},
		{state("57014"), ssp2.CodeStorageUnavailable},
		{state("57P01"), ssp2.CodeStorageUnavailable},
		{state("57P03"), ssp2.CodeStorageUnavailable},
		{state("23505"), ssp2.CodeInternalError},
		{state("42P01"), ssp2.CodeInternalError},
		{state("XX000"), ssp2.CodeInternalError},
		{state(""), ssp2.CodeInternalError},
	} {
		err := fmt.Errorf("doing secret things: %w", tc.err)
		f := round.Failure(err)
		require.Equal(t, tc.code, f.Code, "%v", tc.err)
		require.NotContains(t, f.Message, "secret")
		require.NotContains(t, string(ssp2.AppendErrorJSON(nil, f)), "secret")
		require.True(t, errors.Is(err, f) || errors.Is(f, tc.err), "the cause is kept for logs")
	}
	require.Nil(t, round.Failure(nil))
}
