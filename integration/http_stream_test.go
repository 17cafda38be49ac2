package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

// decoded undoes the compression of a body as it arrives.
func decoded(t *testing.T, coding string, body io.Reader) io.Reader {
	t.Helper()
	switch coding {
	case "zstd":
		z, err := zstd.NewReader(body, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20))
		require.NoError(t, err)
		t.Cleanup(z.Close)
		return z
	case "gzip":
		z, err := gzip.NewReader(body)
		require.NoError(t, err)
		return z
	}
	return body
}

// fill writes n lists with titles of a size.
func (s *site) fill(t *testing.T, epoch *string, n, size int) {
	t.Helper()
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("list-%03d", i)
	}
	req := s.request(epoch)
	req.Commits = []ssp2.PushCommit{s.putLists(t, "fill", strings.Repeat("x", size), ids...)}
	frames := s.sync(t, req)
	require.Equal(t, ssp2.PushApplied, frames[1].(*ssp2.PushResult).Status)
}

func TestCompressionRoundTrips(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	epoch := s.epoch(t)
	push := s.request(epoch)
	push.Commits = []ssp2.PushCommit{s.putLists(t, "c1", strings.Repeat("Groceries ", 50), "l1", "l2", "l3", "l4")}
	r := s.post(t, bytes.NewReader(gz(t, encode(t, push))), http.Header{"Content-Encoding": {"gzip"}})
	require.Equal(t, http.StatusOK, r.status, "body: %q", r.body)
	require.Empty(t, r.header.Get("Content-Encoding"), "an acknowledgement is too small")
	m, err := ssp2.DecodeMessage(r.body)
	require.NoError(t, err)
	require.Equal(t, ssp2.PushApplied, m.Frames[1].(*ssp2.PushResult).Status)

	pull := s.request(epoch)
	pull.Pull, pull.Subscriptions = rowsPull(), []ssp2.Subscription{fresh("s1", "lists"), fresh("s2", "members")}
	answers := map[string][]byte{}
	for _, coding := range []string{"identity", "gzip", "zstd"} {
		r := s.post(t, bytes.NewReader(encode(t, pull)), http.Header{"Accept-Encoding": {coding}})
		require.Equal(t, http.StatusOK, r.status)
		require.Equal(t, strings.TrimPrefix(coding, "identity"), r.header.Get("Content-Encoding"))
		plain, err := io.ReadAll(decoded(t, coding, bytes.NewReader(r.body)))
		require.NoError(t, err)
		_, err = ssp2.DecodeMessage(plain)
		require.NoError(t, err)
		answers[coding] = plain
		if coding != "identity" {
			require.Less(t, len(r.body), len(plain)/2)
		}
	}
	require.Equal(t, answers["identity"], answers["gzip"])
	require.Equal(t, answers["identity"], answers["zstd"])
}

// halfway is a pull whose first subscriptions have arrived and whose last one waits in the
// database for a lock.
type halfway struct {
	*site
	frames <-chan ssp2.Frame // as they come, closed at the end of the body
	ended  error             // how it ended; to be read then
	unlock func()
	leave  func() // the client goes away
}

func newHalfway(t *testing.T, coding string) *halfway {
	t.Helper()
	s := newSite(t, nil)
	epoch := s.epoch(t)
	// More than is read ahead of the first byte.
	s.fill(t, epoch, 48, 64<<10)
	h := &halfway{site: s, unlock: s.lock(t, "public.todos")}
	req := s.request(epoch)
	// Pages that go to the store leave the response too small for it to begin early.
	req.Pull = &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows}
	// The first pages of as many subscriptions as fit in memory are read together.
	const ahead = 12
	for i := range ahead {
		req.Subscriptions = append(req.Subscriptions, fresh(fmt.Sprint("s1-", i), "lists"))
	}
	req.Subscriptions = append(req.Subscriptions, fresh("s2", "todos"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	res, err := s.send(ctx, bytes.NewReader(encode(t, req)), http.Header{"Accept-Encoding": {coding}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = res.Body.Close() })
	h.leave = cancel
	require.Equal(t, http.StatusOK, res.StatusCode)
	body := ssp2.NewReader(decoded(t, res.Header.Get("Content-Encoding"), res.Body), ssp2.Limits{})
	frames := make(chan ssp2.Frame, 10_000) // more than there are
	h.frames = frames
	reading := make(chan struct{})
	go func() { // a server whose client does not read on would not get to the last subscription
		defer close(reading)
		defer close(frames)
		for {
			var f ssp2.Frame
			if f, h.ended = body.Next(); h.ended != nil {
				return
			}
			frames <- f
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-reading
	})
	for f := range frames {
		if f.FrameType() == ssp2.FrameSubEnd {
			break
		}
	}
	require.NoError(t, pgtest.WaitAnyBlocked(ctx, s.db.Pool, 1))
	return h
}

// rest reads the frames up to END.
func (h *halfway) rest(t *testing.T) (rest []ssp2.Frame) {
	t.Helper()
	for f := range h.frames {
		rest = append(rest, f)
	}
	require.ErrorIs(t, h.ended, io.EOF)
	return rest
}

// §1.4: a client has what was read before what does not fit in memory with it is read.
func TestTheFirstSubscriptionArrivesBeforeTheLastIsRead(t *testing.T) {
	t.Parallel()
	for _, coding := range []string{"identity", "gzip", "zstd"} {
		t.Run(coding, func(t *testing.T) {
			t.Parallel()
			h := newHalfway(t, coding)
			h.unlock()
			rest := h.rest(t)
			last := ""
			for _, f := range rest {
				if start, ok := f.(*ssp2.SubStart); ok {
					last = start.ID
				}
			}
			require.Equal(t, "s2", last)
			require.Equal(t, ssp2.FrameSubEnd, rest[len(rest)-1].FrameType())
		})
	}
}

func TestAClientThatLeavesMidStreamCancelsTheQuery(t *testing.T) {
	t.Parallel()
	h := newHalfway(t, "zstd")
	h.leave()
	require.NoError(t, pgtest.WaitFor(t.Context(), h.db.Pool, "select not ("+blocked+")"))
	h.unlock()
}

// §1.6: an error after the first byte is an ERROR frame, then END.
func TestADatabaseThatDiesMidStreamIsAnErrorFrame(t *testing.T) {
	t.Parallel()
	h := newHalfway(t, "gzip")
	defer h.unlock()
	h.killBlocked(t)
	rest := h.rest(t)
	for _, f := range rest {
		if start, ok := f.(*ssp2.SubStart); ok {
			require.NotEqual(t, "s2", start.ID)
		}
	}
	failed, ok := rest[len(rest)-1].(*ssp2.ErrorFrame)
	require.True(t, ok)
	require.Equal(t, string(ssp2.CodeStorageUnavailable), failed.Code)
	require.True(t, failed.Retryable)
	require.NotContains(t, failed.Message, "57P01")
}

// killBlocked ends the sessions that wait for a lock.
func (s *site) killBlocked(t *testing.T) {
	t.Helper()
	require.NotZero(t, s.count(t, `select count(*) filter (where pg_terminate_backend(pid)) from pg_catalog.pg_stat_activity
		where datname = current_database() and wait_event_type = 'Lock'`))
}

// outcome is what comes of a request.
type outcome struct {
	reply
	err error
}

// blockedRound starts a round that waits for a lock on lists, and returns when it
// does.
func (s *site) blockedRound(t *testing.T, req *ssp2.Request) (answer <-chan outcome, leave, unlock func()) {
	t.Helper()
	unlock = s.lock(t, "public.lists")
	ctx, leave := context.WithTimeout(t.Context(), patience)
	done := make(chan outcome, 1)
	body := encode(t, req)
	go func() {
		res, err := s.send(ctx, bytes.NewReader(body), nil)
		if err != nil {
			done <- outcome{err: err}
			return
		}
		answer, err := io.ReadAll(res.Body)
		done <- outcome{reply{res.StatusCode, res.Header, answer}, errors.Join(err, res.Body.Close())}
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(ctx, s.db.Pool, 1))
	return done, leave, unlock
}

// halves are a push and a pull that read the table lists.
func (s *site) halves(t *testing.T, epoch *string) map[string]*ssp2.Request {
	t.Helper()
	push, pull := s.request(epoch), s.request(epoch)
	push.Commits = []ssp2.PushCommit{s.putLists(t, "c1", "Groceries", "l1")}
	pull.Pull, pull.Subscriptions = rowsPull(), []ssp2.Subscription{fresh("s1", "lists")}
	return map[string]*ssp2.Request{"push": push, "pull": pull}
}

func TestAClientThatLeavesCancelsTheQuery(t *testing.T) {
	t.Parallel()
	for _, half := range []string{"push", "pull"} {
		t.Run(half, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, nil)
			answer, leave, unlock := s.blockedRound(t, s.halves(t, s.epoch(t))[half])
			leave()
			require.ErrorIs(t, (<-answer).err, context.Canceled)
			require.NoError(t, pgtest.WaitFor(t.Context(), s.db.Pool, "select not ("+blocked+")"))
			unlock()
			require.Zero(t, s.count(t, `select count(*) from public.lists`))
			require.Zero(t, s.count(t, `select count(*) from syncpg.sync_push_results`))
		})
	}
}

func TestADatabaseThatDiesBeforeTheFirstByteIs503(t *testing.T) {
	t.Parallel()
	for _, half := range []string{"push", "pull"} {
		t.Run(half, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, nil)
			answer, leave, unlock := s.blockedRound(t, s.halves(t, s.epoch(t))[half])
			defer leave()
			defer unlock()
			s.killBlocked(t)
			r := <-answer
			require.NoError(t, r.err)
			message := r.requireError(t, 503, ssp2.CodeStorageUnavailable)
			require.NotContains(t, message, "57P01")
		})
	}
}
