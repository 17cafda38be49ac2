package httpsync_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func TestAClientThatLeavesCancelsTheRound(t *testing.T) {
	t.Parallel()
	started, ended := make(chan struct{}), make(chan error, 1)
	server := serve(t, httpsync.Config{
		Rounds: runner(func(ctx context.Context, _ round.Identity, _ *ssp2.Request, _ round.Writer) error {
			close(started)
			<-ctx.Done()
			ended <- ctx.Err()
			return ctx.Err()
		}),
	})
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/sync", bytes.NewReader(request(t)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", httpsync.ContentType)
	go func() {
		<-started
		cancel()
	}()
	res, err := server.Client().Do(r)
	if err == nil {
		require.NoError(t, res.Body.Close())
	}
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, <-ended, context.Canceled)
}

func TestAClientThatDoesNotReadIsGivenUp(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	server := serve(t, httpsync.Config{
		WriteTimeout: 20 * time.Millisecond,
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			for {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					ended <- err
					return &round.StreamError{Err: err}
				}
			}
		}),
	})
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/sync", bytes.NewReader(request(t)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", httpsync.ContentType)
	require.NoError(t, r.Write(conn))
	require.ErrorIs(t, <-ended, os.ErrDeadlineExceeded)
}

// A client that asks and asks and reads no answer is given up as well, whatever it
// asks for.
func TestAClientThatReadsNoErrorIsGivenUp(t *testing.T) {
	t.Parallel()
	server := serve(t, httpsync.Config{Rounds: noRound(t), WriteTimeout: 20 * time.Millisecond})
	for _, target := range []string{"GET /sync", "GET /healthz", "POST /sync"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
			asking := bytes.Repeat([]byte(target+" HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"), 1000)
			for err == nil {
				_, err = conn.Write(asking)
			}
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the server has not closed the connection")
		})
	}
}

// recorder is a ResponseWriter with write deadlines.
type recorder struct {
	*httptest.ResponseRecorder
	deadlines []time.Time
	flushes   int
	flushErr  error
}

func (r *recorder) SetWriteDeadline(t time.Time) error {
	r.deadlines = append(r.deadlines, t)
	return nil
}

func (r *recorder) FlushError() error {
	r.flushes++
	return r.flushErr
}

func (r *recorder) post(t *testing.T, cfg httpsync.Config) {
	t.Helper()
	req := httptest.NewRequest(http.MethodPost, "/sync", bytes.NewReader(request(t)))
	req.Header.Set("Content-Type", httpsync.ContentType)
	r.ResponseRecorder = httptest.NewRecorder()
	newHandler(t, cfg).ServeHTTP(r, req)
}

func TestWriteDeadlinesMoveAndEndWithTheResponse(t *testing.T) {
	t.Parallel()
	before := time.Now()
	var r recorder
	r.post(t, httpsync.Config{
		WriteTimeout: time.Hour,
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			_, err := w.Write(make([]byte, 3*64<<10+1))
			return err
		}),
	})
	require.Len(t, r.deadlines, 4+1+1, "one per 64 KiB, one for the flush, one to clear them")
	for _, d := range r.deadlines[:5] {
		require.WithinRange(t, d, before.Add(time.Hour), time.Now().Add(time.Hour))
	}
	require.True(t, r.deadlines[5].IsZero())

	var off recorder
	off.post(t, httpsync.Config{Rounds: answer(1), WriteTimeout: -1})
	require.Empty(t, off.deadlines)

	var refused recorder
	refused.post(t, httpsync.Config{
		WriteTimeout: time.Hour,
		Rounds: runner(func(context.Context, round.Identity, *ssp2.Request, round.Writer) error {
			return ssp2.Errorf(ssp2.CodeInvalidSubscription, "no")
		}),
	})
	require.Len(t, refused.deadlines, 3, "one to write, one to flush, one to clear them")
	require.True(t, refused.deadlines[2].IsZero())
}

func TestFlush(t *testing.T) {
	t.Parallel()
	flushTwice := runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
		for range 2 {
			if _, err := w.Write([]byte("frames")); err != nil {
				return err
			}
			if err := w.Flush(); err != nil {
				return &round.StreamError{Err: err}
			}
		}
		return nil
	})
	t.Run("reaches the connection", func(t *testing.T) {
		t.Parallel()
		var r recorder
		r.post(t, httpsync.Config{Rounds: flushTwice})
		require.Equal(t, 3, r.flushes, "two of the round and the last one")
		require.Equal(t, "framesframes", r.Body.String())
	})
	t.Run("is left out where a wrapper of the host has none", func(t *testing.T) {
		t.Parallel()
		r := recorder{flushErr: http.ErrNotSupported}
		r.post(t, httpsync.Config{Rounds: flushTwice})
		require.Equal(t, "framesframes", r.Body.String())
	})
	t.Run("fails when the peer is gone", func(t *testing.T) {
		t.Parallel()
		r := recorder{flushErr: errors.New("peer gone")}
		require.PanicsWithError(t, http.ErrAbortHandler.Error(), func() {
			r.post(t, httpsync.Config{Rounds: flushTwice})
		})
		require.Equal(t, 1, r.flushes)
	})
}
