package pullsvc_test

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// instance is a server process: its service, and the store that it may have in common
// with others.
type instance struct {
	*pullsvc.Service
	store segment.Store
}

// replica is what a client keeps of one subscription, by the rules of §4 and §5.6.
type replica struct {
	sub  ssp2.Subscription // cursor and resume token included
	rows map[string]row
}

// apply applies the frames of a section as they arrive; without its SUB_END when the
// stream was cut.
func (r *replica) apply(t require.TestingT, b *bundle, store segment.Store, frames []ssp2.Frame) {
	table, _ := b.schema.Table(r.sub.Table)
	fresh := r.sub.Cursor < 0 && r.sub.BootstrapState == nil
	status := ssp2.SubActive
	for _, f := range frames {
		switch f := f.(type) {
		case *ssp2.SubStart:
			status = f.Status
		case *ssp2.SegmentInline:
			if fresh {
				r.rows, fresh = map[string]row{}, false
			}
			segmentOf(t, table, ssp2.MediaRows, f.Payload, r.rows)
		case *ssp2.SegmentRef:
			if fresh && f.RowCursor == nil {
				r.rows, fresh = map[string]row{}, false
			}
			segmentOf(t, table, f.MediaType, body(t, store, b.partition, *f), r.rows)
		case *ssp2.Commit:
			for _, ch := range f.Changes {
				if ch.Op == ssp2.OpDelete {
					delete(r.rows, ch.RowID)
				} else {
					r.rows[ch.RowID] = row{version: *ch.RowVersion, payload: bytes.Clone(ch.Row)}
				}
			}
		case *ssp2.SubEnd:
			r.sub.Cursor, r.sub.BootstrapState = f.NextCursor, f.BootstrapState
			if status == ssp2.SubReset {
				r.sub.Cursor, r.sub.BootstrapState = -1, nil
			}
		}
	}
}

// want is what the server holds for the subscription.
func (r *replica) want(b *bundle) map[string]row {
	want := map[string]row{}
	for id, have := range b.rows[r.sub.Table] {
		matches := true
		for variable, values := range r.sub.Scopes {
			found := false
			for _, v := range values {
				for _, s := range have.scopes {
					found = found || s == variable+"="+v
				}
			}
			matches = matches && found
		}
		if matches {
			want[id] = row{version: have.version, payload: have.payload}
		}
	}
	return want
}

// TestReplicasConverge: whatever is written, moved between scopes and pruned
// meanwhile, and wherever streams are cut, a client that follows the protocol ends
// with the rows of the server.
func TestReplicasConverge(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 2 }))
	memory, err := segment.NewMemory(segment.MemoryConfig{})
	require.NoError(t, err)
	postgres, err := segment.NewPostgres(b.db.Pool, segment.PostgresConfig{})
	require.NoError(t, err)
	configs := []pullsvc.Config{
		{BufferBytes: 1, CatchUpChanges: -1},
		{BufferBytes: 400, CatchUpChanges: 4},
		{},
		{Segments: memory, InlineSegmentMaxBytes: -1},
		{Segments: memory, BufferBytes: 150},
		{Segments: postgres, InlineSegmentMaxBytes: 100},
		{Segments: postgres, InlineSegmentMaxBytes: -1},
	}
	services := make([]*instance, len(configs))
	start := func(i int) {
		configs[i].Schema = b.schema
		s, err := pullsvc.New(b.db.Pool, configs[i])
		require.NoError(t, err)
		services[i] = &instance{s, configs[i].Segments}
	}
	for i := range configs {
		start(i)
	}
	var histories atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		b.inPartition(fmt.Sprint("history-", histories.Add(1)))
		b.exec(t, `select syncpg.sync_open_partition($1, $2, 0)`, b.partition, epoch)
		replicas := []*replica{
			{sub: sub("ab", "items", -1, project("a", "b"))},
			{sub: sub("c", "items", -1, project("c"))},
			{sub: sub("doc", "docs", -1, docScopes([]string{"a", "b"}, []string{"1", "2"}))},
			{sub: sub("folder", "docs", -1, docScopes(nil, []string{"2", "3"}))},
		}
		for _, r := range replicas {
			r.rows = map[string]row{}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"commit":  func(rt *rapid.T) { b.commit(t, randomChanges(rt, b)...) },
			"pull":    func(rt *rapid.T) { randomPull(t, rt, b, services, replicas) },
			"restart": func(rt *rapid.T) { start(rapid.IntRange(0, len(services)-1).Draw(rt, "instance")) },
			"prune": func(rt *rapid.T) {
				b.prune(t, rapid.Int64Range(b.horizon, b.seq).Draw(rt, "horizon"))
			},
			"forget": func(rt *rapid.T) {
				r := rapid.SampledFrom(replicas).Draw(rt, "replica")
				r.sub.Cursor, r.sub.BootstrapState = -1, nil
			},
		})
		for rounds := 0; !caughtUp(b, replicas); rounds++ {
			require.Less(rt, rounds, 200)
			pullInto(t, rt, b, services[2], replicas, ssp2.PullHeader{Accept: 3}, -1)
		}
		for _, r := range replicas {
			if d := cmp.Diff(r.want(b), r.rows, cmp.AllowUnexported(row{})); d != "" {
				rt.Fatalf("subscription %s: %s", r.sub.ID, d)
			}
		}
	})
}

func caughtUp(b *bundle, replicas []*replica) bool {
	for _, r := range replicas {
		if r.sub.BootstrapState != nil || r.sub.Cursor != b.seq {
			return false
		}
	}
	return true
}

// randomChanges makes one commit: new rows, new versions, deletes, and moves to
// another scope, which are a delete and an upsert (§2.2).
func randomChanges(rt *rapid.T, b *bundle) []change {
	var changes []change
	used := map[string]bool{}
	for range rapid.IntRange(1, 4).Draw(rt, "changes") {
		table := rapid.SampledFrom([]string{"items", "docs"}).Draw(rt, "table")
		id := fmt.Sprint("r", rapid.IntRange(0, 9).Draw(rt, "id"))
		if used[table+id] {
			continue
		}
		used[table+id] = true
		scope := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "scope")
		next := item(id, scope, rapid.StringN(0, 60, -1).Filter(storable).Draw(rt, "body"))
		if table == "docs" {
			next = doc(id, scope, rapid.IntRange(1, 4).Draw(rt, "folder"))
		}
		old := b.rows[table][id]
		switch {
		case old != nil && rapid.IntRange(0, 2).Draw(rt, "delete") == 0:
			changes = append(changes, remove(table, id))
		case old != nil:
			changes = append(changes, change{table: table, id: id, scopes: old.scopes}, next)
		default:
			changes = append(changes, next)
		}
	}
	return changes
}

func storable(s string) bool { return !bytes.ContainsRune([]byte(s), 0) }

func randomPull(t *testing.T, rt *rapid.T, b *bundle, services []*instance, replicas []*replica) {
	some := rapid.SliceOfDistinct(rapid.SampledFrom(replicas), func(r *replica) string { return r.sub.ID }).Draw(rt, "subscriptions")
	header := ssp2.PullHeader{
		LimitCommits:      rapid.Int32Range(1, 5).Draw(rt, "limitCommits"),
		LimitSnapshotRows: rapid.Int32Range(1, 4).Draw(rt, "limitSnapshotRows"),
		MaxSnapshotPages:  rapid.Int32Range(1, 3).Draw(rt, "maxSnapshotPages"),
		Accept:            ssp2.AcceptInlineRows,
	}
	cut := rapid.IntRange(-1, 12).Draw(rt, "cut")
	s := rapid.SampledFrom(services).Draw(rt, "service")
	if s.store != nil {
		header.Accept = rapid.SampledFrom([]ssp2.Accept{ssp2.AcceptInlineRows, ssp2.AcceptExternalRows, rowsLane, imageLane}).Draw(rt, "accept")
	}
	pullInto(t, rt, b, s, some, header, cut)
}

// pullInto pulls the subscriptions of replicas and applies the first frames of the
// response, all when cut is negative.
func pullInto(t *testing.T, rt *rapid.T, b *bundle, s *instance, replicas []*replica, header ssp2.PullHeader, cut int) {
	var subs []ssp2.Subscription
	for _, r := range replicas {
		subs = append(subs, r.sub)
	}
	req := request(subs...)
	req.Partition, req.Header = b.partition, header
	p, err := s.Begin(t.Context(), req)
	require.NoError(rt, err)
	defer p.Close()
	message := ssp2.AppendEnvelope(nil, req.WireVersion, ssp2.KindResponse)
	message, err = ssp2.AppendFrame(message, req.WireVersion, &ssp2.ResponseHeader{LogEpoch: epoch})
	require.NoError(rt, err)
	require.NoError(rt, p.Stream(t.Context(), func(piece []byte) error { message = append(message, piece...); return nil }))
	decoded, err := ssp2.DecodeMessage(ssp2.AppendEnd(message))
	require.NoError(rt, err)
	frames := decoded.Frames[1:]
	if cut >= 0 && cut < len(frames) {
		frames = frames[:cut]
	}
	for at := -1; len(frames) > 0; {
		n := 1
		for n < len(frames) && frames[n].FrameType() != ssp2.FrameSubStart {
			n++
		}
		at++
		replicas[at].apply(rt, b, s.store, frames[:n])
		frames = frames[n:]
	}
}
