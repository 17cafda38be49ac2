package round

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/syncpg/syncpg/ssp2"
)

// Failure returns what a client may know of an error: the first [*ssp2.Error] of
// its chain as it is, and for everything else one of two errors with a fixed text,
// which hold the cause for logs.
//
//   - sync.storage_unavailable (503) when the same request may succeed in a
//     moment: the database is out of reach, overloaded, shutting down or read-only,
//     it gave the transaction up to another one, or a deadline has passed.
//   - sync.internal_error (500) otherwise.
//
// Both are retryable: neither says that anything is wrong with the request.
func Failure(err error) *ssp2.Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*ssp2.Error](err); ok {
		return e
	}
	if transient(err) {
		return &ssp2.Error{
			Code:    ssp2.CodeStorageUnavailable,
			Message: "the storage is unavailable at the moment; retry later",
			Err:     err,
		}
	}
	return &ssp2.Error{Code: ssp2.CodeInternalError, Message: "the server failed to process the request", Err: err}
}

// transient reports whether a retry of the whole request may get by.
func transient(err error) bool {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return transientState(pg.Code)
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || pgconn.SafeToRetry(err)
}

// transientState knows the SQLSTATEs of a database that cannot serve now.
func transientState(code string) bool {
	switch code {
	case "25006", // read_only_sql_transaction: a standby, or a failover that is not over
		"25P03", // idle_in_transaction_session_timeout: this process was too slow
		"25P04", // transaction_timeout
		"55P03", // lock_not_available
		"57014", // query_canceled, by a timeout of the database
		"57P01", // admin_shutdown
		"57P02", // crash_shutdown
		"57P03", // cannot_connect_now
		"57P05": // idle_session_timeout
		return true
	}
	return strings.HasPrefix(code, "08") || // connection exceptions
		strings.HasPrefix(code, "40") || // the transaction was rolled back: serialization, deadlock
		strings.HasPrefix(code, "53") // insufficient resources
}
