package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// logs is a site of any number of partitions, with leases and external segments, that counts
// how often it asks its resolver.
type logs struct {
	*site
	now      atomic.Int64
	resolved atomic.Int64
}

func newLogs(t *testing.T) *logs {
	t.Helper()
	l := &logs{}
	l.now.Store(1_800_000_000_000)
	l.site = newSite(t, func(cfg *syncpg.Config) {
		cfg.Clock = func() time.Time { return time.UnixMilli(l.now.Load()) }
		cfg.InlineSegmentMaxBytes = -1
		cfg.Leases = &syncpg.Leases{Keys: [][]byte{bytes.Repeat([]byte("k"), 32)}}
		authenticate, resolve := cfg.Authenticate, cfg.ResolveScopes
		cfg.Authenticate = func(r *http.Request) (syncpg.Identity, error) {
			id, err := authenticate(r)
			if p := r.Header.Get("X-Partition"); p != "" {
				id.Partition = p
			}
			return id, err
		}
		cfg.ResolveScopes = func(ctx context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
			l.resolved.Add(1)
			return resolve(ctx, req)
		}
	})
	return l
}

// in runs a round in a partition.
func (l *logs) in(t *testing.T, partition string, req *ssp2.Request) []ssp2.Frame {
	t.Helper()
	r := l.post(t, bytes.NewReader(encode(t, req)), http.Header{"X-Partition": {partition}})
	require.Equal(t, http.StatusOK, r.status, "%s", r.body)
	m, err := ssp2.DecodeMessage(r.body)
	require.NoError(t, err)
	return m.Frames
}

// epochOf acquires the log epoch of a partition.
func (l *logs) epochOf(t *testing.T, partition string) *string {
	t.Helper()
	req := l.request(nil)
	req.Pull = rowsPull()
	header, ok := l.in(t, partition, req)[0].(*ssp2.ResponseHeader)
	require.True(t, ok)
	require.True(t, header.ResetRequired)
	return &header.LogEpoch
}

func framesOf[T ssp2.Frame](frames []ssp2.Frame) (of []T) {
	for _, f := range frames {
		if f, ok := f.(T); ok {
			of = append(of, f)
		}
	}
	return of
}

// TestPartitionsShareNothing: logs, cursors, idempotency keys, horizons, epochs and segments
// are of one partition, and no frame names it (§2.1). A commit has one seq, the server's time
// and the actor that was authenticated.
func TestPartitionsShareNothing(t *testing.T) {
	t.Parallel()
	l := newLogs(t)
	const one, two = "partition one", "partition two"
	epochs := map[string]*string{one: l.epochOf(t, one), two: l.epochOf(t, two)}
	require.NotEqual(t, *epochs[one], *epochs[two])
	push := func(partition, commitID, title string, rows ...string) *ssp2.PushResult {
		req := l.request(epochs[partition])
		req.Commits = []ssp2.PushCommit{l.putLists(t, commitID, title, rows...)}
		results := framesOf[*ssp2.PushResult](l.in(t, partition, req))
		require.Len(t, results, 1)
		return results[0]
	}
	// The same client and commit id, another log: another commit.
	for _, partition := range []string{one, two} {
		first := push(partition, "c1", "of "+partition, "a", "b")
		require.Equal(t, ssp2.PushApplied, first.Status)
		require.Equal(t, int64(1), *first.CommitSeq)
		require.Equal(t, ssp2.PushCached, push(partition, "c1", "of "+partition, "a", "b").Status)
	}
	l.now.Add(time.Second.Milliseconds())
	require.Equal(t, int64(2), *push(one, "c2", "again", "a", "b", "c").CommitSeq)

	window := func(partition string, cursor int64) []ssp2.Frame {
		req := l.request(epochs[partition])
		req.Pull = rowsPull()
		sub := fresh("s", "lists")
		sub.Cursor = cursor
		req.Subscriptions = []ssp2.Subscription{sub}
		return l.in(t, partition, req)
	}
	commits := framesOf[*ssp2.Commit](window(one, 0))
	require.Len(t, commits, 2)
	require.Len(t, commits[1].Changes, 3)
	require.Equal(t, l.now.Load(), commits[1].CreatedAtMs)
	require.Equal(t, l.now.Load()-1000, commits[0].CreatedAtMs)
	require.Equal(t, "ada", commits[0].ActorID)
	require.Len(t, framesOf[*ssp2.Commit](window(two, 0)), 1)

	// Segments, by id; and the horizon.
	refs := framesOf[*ssp2.SegmentRef](window(one, -1))
	require.Len(t, refs, 1)
	for partition, code := range map[string]ssp2.Code{one: "", two: ssp2.CodeNotFound} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, l.url+"/segments/"+refs[0].SegmentID, nil)
		require.NoError(t, err)
		maps.Copy(r.Header, as("ada", "team-1"))
		r.Header.Set("X-Partition", partition)
		res, err := l.client.Do(r)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		info, ok := ssp2.Lookup(code)
		if !ok {
			info.HTTPStatus = http.StatusOK
		}
		require.Equal(t, info.HTTPStatus, res.StatusCode)
	}
	keeper, err := retention.New(l.db.Pool, retention.Config{Policy: retention.Policy{KeepCommits: -1, ActiveWindow: -1}})
	require.NoError(t, err)
	result, err := keeper.Prune(t.Context(), one, nil)
	require.NoError(t, err)
	require.Equal(t, int64(2), result.Horizon)
	require.Equal(t, ssp2.SubReset, framesOf[*ssp2.SubStart](window(one, 0))[0].Status)
	require.Equal(t, ssp2.SubActive, framesOf[*ssp2.SubStart](window(two, 0))[0].Status)
	// And the epoch.
	_, err = keeper.RotateEpoch(t.Context(), one)
	require.NoError(t, err)
	require.True(t, framesOf[*ssp2.ResponseHeader](window(one, 0))[0].ResetRequired)
	require.False(t, framesOf[*ssp2.ResponseHeader](window(two, 0))[0].ResetRequired)

	for _, partition := range []string{one, two} {
		r := l.post(t, bytes.NewReader(encode(t, &ssp2.Request{
			WireVersion: ssp2.WireV2, Header: ssp2.RequestHeader{ClientID: "device", SchemaVersion: l.schema.Version, LogEpoch: epochs[two]},
			Pull: rowsPull(), Subscriptions: []ssp2.Subscription{fresh("s", "lists")},
		})), http.Header{"X-Partition": {partition}})
		require.NotContains(t, string(r.body), partition)
	}
}

// TestARequestOfAnotherLogDoesNothing: without an epoch, or with another one, a request gets
// RESP_HEADER and the end of the message, and no other work is done for it (§2.1): scopes are
// not resolved, no lease is issued, nothing is pushed, read or recorded. One without an epoch
// must not push at all.
func TestARequestOfAnotherLogDoesNothing(t *testing.T) {
	t.Parallel()
	l := newLogs(t)
	for i, wire := range []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3} {
		for j, epoch := range []*string{nil, new("of another log")} {
			partition := fmt.Sprint("partition ", i, j)
			req := l.request(epoch)
			req.WireVersion = wire
			commits := []ssp2.PushCommit{{ClientCommitID: "c1", Operations: []ssp2.Operation{{Table: "lists", RowID: "a", Op: ssp2.OpDelete}}}}
			if epoch != nil {
				req.Commits = commits
			}
			req.Pull, req.Subscriptions = rowsPull(), []ssp2.Subscription{fresh("s", "lists")}
			for range 2 { // not even when the partition is there already
				frames := l.in(t, partition, req)
				require.Len(t, frames, 1)
				header, ok := frames[0].(*ssp2.ResponseHeader)
				require.True(t, ok)
				require.True(t, header.ResetRequired)
				require.NotEmpty(t, header.LogEpoch)
				require.NotEqual(t, epoch, &header.LogEpoch)
			}
			if epoch == nil {
				req.Commits = commits
				l.requireError(t, bytes.NewReader(encode(t, req)), http.Header{"X-Partition": {partition}}, http.StatusBadRequest, ssp2.CodeInvalidRequest)
			}
		}
	}
	require.Zero(t, l.resolved.Load())
	for _, table := range []string{"sync_clients", "sync_leases", "sync_commits", "sync_push_results", "sync_segments"} {
		require.Zero(t, l.count(t, "select count(*) from syncpg."+table), table)
	}
	require.Equal(t, 4, l.count(t, `select count(*) from syncpg.sync_partition_registry where not epoch_required`))
}

// TestWhoeverAsksIsSeen: the registry learns of a partition by the first request that names
// it, and when it was last asked for, whatever the request was (§2.1); at most once a minute.
func TestWhoeverAsksIsSeen(t *testing.T) {
	t.Parallel()
	l := newLogs(t)
	epoch := l.epochOf(t, "seen")
	seen := func() int64 {
		return int64(l.count(t, `select last_seen_ms from syncpg.sync_partition_registry where partition = 'seen'`))
	}
	began := l.now.Load()
	require.Equal(t, began, seen())
	for name, ask := range map[string]func(){
		"acquisition": func() { l.epochOf(t, "seen") },
		"quiet pull": func() {
			req := l.request(epoch)
			req.Pull = rowsPull()
			l.in(t, "seen", req)
		},
		"another log": func() {
			req := l.request(new("another"))
			req.Pull = rowsPull()
			l.in(t, "seen", req)
		},
		"replay": func() {
			req := l.request(epoch)
			req.Commits = []ssp2.PushCommit{l.putLists(t, "c1", "t", "a")}
			l.in(t, "seen", req)
		},
		"download": func() {
			header := as("ada", "team-1")
			header.Set("X-Partition", "seen")
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, l.url+"/segments/sha256:"+fmt.Sprintf("%064d", 0), nil)
			require.NoError(t, err)
			maps.Copy(r.Header, header)
			res, err := l.client.Do(r)
			require.NoError(t, err)
			require.NoError(t, res.Body.Close())
			require.Equal(t, http.StatusNotFound, res.StatusCode)
		},
	} {
		l.now.Add((61 * time.Second).Milliseconds())
		ask()
		require.Equal(t, l.now.Load(), seen(), name)
		l.now.Add((59 * time.Second).Milliseconds())
		ask()
		require.Equal(t, l.now.Load()-59_000, seen(), "%s: not yet again", name)
	}
}

// TestARotationIsANewLog: it makes a value that nobody can know, wants it from everybody, and
// forgets who had pulled (§2.1); segments of before are neither served nor used again, though
// the bytes, the pin and the scopes are the same.
func TestARotationIsANewLog(t *testing.T) {
	t.Parallel()
	l := newLogs(t)
	epoch := l.epochOf(t, "rotated")
	c, err := client.New(client.Config{
		URL: l.url, ClientID: "device", Schema: l.schema, Wire: ssp2.WireV3, HTTP: l.client, Accept: ssp2.AcceptExternalRows, LimitSnapshotRows: 1,
		Header: http.Header{"X-Actor": {"ada"}, "X-Partition": {"rotated"}},
	})
	require.NoError(t, err)
	require.NoError(t, c.Acquire(t.Context()))
	require.Equal(t, *epoch, c.Epoch())
	require.NoError(t, c.Subscribe("s", "lists", ssp2.ScopeMap{"team_id": {"team-1"}}))
	req := l.request(epoch)
	req.Header.ClientID = "writer"
	req.Commits = []ssp2.PushCommit{l.putLists(t, "c1", "t", "a", "b", "c")}
	l.in(t, "rotated", req)
	_, err = c.CatchUp(t.Context())
	require.NoError(t, err)
	before := maps.Clone(c.Rows("lists"))
	require.Len(t, before, 3)

	keeper, err := retention.New(l.db.Pool, retention.Config{})
	require.NoError(t, err)
	values := map[string]bool{*epoch: true}
	for range 3 {
		rotation, err := keeper.RotateEpoch(t.Context(), "rotated")
		require.NoError(t, err)
		require.Equal(t, 1, l.count(t, `select count(*) from syncpg.sync_partition_registry where epoch_required and log_epoch <> '' and partition = 'rotated'`))
		require.Zero(t, l.count(t, `select count(*) from syncpg.sync_clients where cursor is not null or subscriptions is not null`))
		var now string
		require.NoError(t, l.db.Pool.QueryRow(t.Context(), `select log_epoch from syncpg.sync_partition_registry where partition = 'rotated'`).Scan(&now))
		require.False(t, values[now])
		require.GreaterOrEqual(t, len(now), 20, "%v", rotation)
		values[now] = true
	}
	segments := `select count(*) from syncpg.sync_segments where log_epoch = '` + *epoch + `'`
	old := l.count(t, segments)
	require.Positive(t, old)
	_, err = c.Pull(t.Context())
	require.ErrorIs(t, err, client.ErrReset)
	require.Empty(t, c.Rows("lists"))
	_, err = c.CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, before, c.Rows("lists"))
	require.Equal(t, old, l.count(t, segments))
	require.Equal(t, old, l.count(t, `select count(*) from syncpg.sync_segments where log_epoch = (
		select log_epoch from syncpg.sync_partition_registry where partition = 'rotated')`), "built anew")
	v1 := l.request(nil)
	v1.WireVersion, v1.Pull = ssp2.WireV1, rowsPull()
	l.post(t, bytes.NewReader(encode(t, v1)), http.Header{"X-Partition": {"rotated"}}).requireError(t, http.StatusConflict, ssp2.CodeClientWireUnsupported)
}
