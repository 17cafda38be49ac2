package pullsvc_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func docScopes(org, folder []string) ssp2.ScopeMap {
	m := ssp2.ScopeMap{}
	if org != nil {
		m["org"] = org
	}
	if folder != nil {
		m["folderId"] = folder
	}
	return m
}

// TestBootstrapPages: pages hold up to limitSnapshotRows rows and a response up to
// maxSnapshotPages of them; the token goes on behind the last row (§4.7).
func TestBootstrapPages(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var changes []change
	for i := range 10 {
		changes = append(changes, doc(fmt.Sprintf("a%d", i), "o1", i%2), doc(fmt.Sprintf("b%d", i), "o2", i%2), doc(fmt.Sprintf("c%d", i), "o3", 7))
	}
	b.commit(t, changes...)
	all := map[string][]string{}
	for _, prefix := range []string{"a", "b", "c"} {
		for i := range 10 {
			all[prefix] = append(all[prefix], fmt.Sprintf("%s%d", prefix, i))
		}
	}
	table, _ := b.schema.Table("docs")
	for _, tc := range []struct {
		name        string
		scopes      ssp2.ScopeMap
		rows, pages int32
		want        []string // in scan order
		segments    []int    // of each response
	}{
		{"all in one page", docScopes([]string{"o1"}, nil), 10, 1, all["a"], []int{1}},
		{"one row more than a page", docScopes([]string{"o1"}, nil), 9, 1, all["a"], []int{1, 1}},
		{"several pages in one response", docScopes([]string{"o1"}, nil), 3, 4, all["a"], []int{4}},
		{"pages over several responses", docScopes([]string{"o1"}, nil), 3, 3, all["a"], []int{3, 1}},
		{"a page ends exactly with the rows", docScopes([]string{"o1"}, nil), 5, 1, all["a"], []int{1, 1}},
		{"one row at a time", docScopes([]string{"o1"}, nil), 1, 1, all["a"], []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
		{"several values, in their order", docScopes([]string{"o2", "none", "o1"}, nil), 4, 2, append(append([]string{}, all["a"]...), all["b"]...), []int{2, 2, 1}},
		{
			"two variables", docScopes([]string{"o1", "o3"}, []string{"7", "1"}), 4, 2,
			[]string{"a1", "a3", "a5", "a7", "a9", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9"},
			[]int{2, 2},
		},
		{"no row matches", docScopes([]string{"o9"}, nil), 4, 2, []string{}, []int{1}},
		{"no row can match", docScopes([]string{"o1"}, []string{"seven"}), 4, 2, []string{}, []int{1}},
		{"the defaults", docScopes([]string{"o1", "o2", "o3"}, nil), 0, 0, append(append(append([]string{}, all["a"]...), all["b"]...), all["c"]...), []int{1}},
		{"limits below their range", docScopes([]string{"o1"}, nil), -1, -1, all["a"], []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
		{"limits above their range", docScopes([]string{"o1"}, nil), 1 << 30, 1 << 30, all["a"], []int{1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := sub("s", "docs", -1, tc.scopes)
			ids, segments := []string{}, []int{}
			for {
				req := request(s)
				req.ClientID = t.Name()
				req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = tc.rows, tc.pages
				got := b.pull(t, req)[0]
				require.True(t, got.Start.Bootstrap)
				require.Equal(t, int64(1), got.End.NextCursor)
				ids = append(ids, got.ids(t, table)...)
				segments = append(segments, len(got.Segments))
				for _, segment := range got.Segments {
					require.Equal(t, ssp2.SegmentHeader{Table: "docs", SchemaVersion: 3, Columns: table.Wire}, segment.SegmentHeader)
				}
				if s.BootstrapState = got.End.BootstrapState; s.BootstrapState == nil {
					break
				}
				s.Cursor = got.End.NextCursor
			}
			require.ElementsMatch(t, tc.want, ids)
			if len(tc.scopes) == 1 {
				require.Equal(t, tc.want, ids)
			}
			require.Equal(t, tc.segments, segments)
		})
	}
}

// TestTokenShape: the resume token is the JSON document of §4.7.
func TestTokenShape(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("a", "p\"1", ""), item("b", "p\"1", ""))
	req := request(sub("s", "items", -1, project("p\"1")))
	req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = 1, 1
	got := b.pull(t, req)[0]
	require.NotNil(t, got.End.BootstrapState)
	require.Equal(t, //nolint:testifylint // clients keep it byte for byte
		`{"asOfCommitSeq":1,"tables":["items"],"tableIndex":0,"rowCursor":"3:p\"1a"}`, *got.End.BootstrapState)
}

// TestSegmentRows: rows are as they are stored, with their server version (§5.2).
func TestSegmentRows(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("a", "x", "1"), item("b", "x", "1"))
	b.commit(t, item("a", "x", "2"))
	got := b.one(t, sub("s", "items", -1, project("x")))
	require.Empty(t, cmp.Diff([][]ssp2.SegmentRow{{
		{ServerVersion: 2, Row: b.rows["items"]["a"].payload}, {ServerVersion: 1, Row: b.rows["items"]["b"].payload},
	}}, got.Segments[0].Blocks))
}

// TestResumeAfterScopesChanged: a value that was granted or withdrawn while a
// bootstrap goes on moves no other value's place.
func TestResumeAfterScopesChanged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("a1", "a", ""), item("a2", "a", ""), item("b1", "b", ""), item("b2", "b", ""), item("c1", "c", ""), item("d1", "d", ""))
	table, _ := b.schema.Table("items")
	for _, tc := range []struct {
		granted []string
		want    []string
	}{
		{[]string{"a", "b", "c"}, []string{"b2", "c1"}},
		{[]string{"b", "c"}, []string{"b2", "c1"}},
		{[]string{"a", "c"}, []string{"c1"}},
		{[]string{"a", "b", "c", "d"}, []string{"b2", "c1", "d1"}},
		{[]string{"a"}, []string{}},
	} {
		s := sub("s", "items", 1, project("a", "b", "c", "d"))
		s.BootstrapState = token(1, "items", new("1:bb1"))
		req := request(s)
		req.Scopes = granted(scope.Allowed{"project": tc.granted})
		require.Equal(t, tc.want, b.pull(t, req)[0].ids(t, table), "granted %v", tc.granted)
	}
}

// TestPageBytes: a page ends once it holds BufferBytes; the first row always fits.
func TestPageBytes(t *testing.T) {
	t.Parallel()
	b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = 1000 }))
	table, _ := b.schema.Table("items")
	var changes []change
	for i := range 9 {
		changes = append(changes, item(strconv.Itoa(i), "x", strings.Repeat("x", 300)))
	}
	b.commit(t, append(changes, item("9", "x", strings.Repeat("x", 5000)))...)
	got := b.pull(t, request(sub("s", "items", -1, project("x")), sub("s2", "items", -1, project("x"))))
	for _, s := range got {
		require.Len(t, s.Segments, 3)
		require.Equal(t, []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}, s.ids(t, table))
		require.Nil(t, s.End.BootstrapState)
	}
}

// TestUnevenRows: however much rows differ in size, each comes once and in order, pages
// keep their limits, and one page after another fits in what a response may hold.
func TestUnevenRows(t *testing.T) {
	t.Parallel()
	const buffer = 20_000
	sizes := map[string]func(i int) int{
		"small, then large":        func(i int) int { return map[bool]int{true: 10, false: 30_000}[i < 200] },
		"large, then small":        func(i int) int { return map[bool]int{true: 30_000, false: 10}[i < 5] },
		"a large one now and then": func(i int) int { return map[bool]int{true: 50_000, false: 10}[i%70 == 69] },
		"larger and larger":        func(i int) int { return i * 150 },
		"all alike":                func(int) int { return 90 },
	}
	for name, size := range sizes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = buffer }))
			table, _ := b.schema.Table("items")
			var want []string
			var changes []change
			for _, project := range []string{"x", "y"} {
				for i := range 220 {
					want = append(want, fmt.Sprintf("%s%03d", project, i))
					changes = append(changes, item(want[len(want)-1], project, strings.Repeat("x", size(i))))
				}
			}
			b.commit(t, changes...)
			for _, limit := range []int32{1, 7, 100, 1000} {
				s := sub("s", "items", -1, project("x", "y"))
				ids := []string{}
				for {
					req := request(s)
					req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = limit, 50
					got := b.pull(t, req)[0]
					ids = append(ids, got.ids(t, table)...)
					for i, segment := range got.Segments {
						rows, bytes, last := 0, 0, 0
						for _, block := range segment.Blocks {
							for _, r := range block {
								rows++
								last = len(r.Row)
								bytes += last
							}
						}
						require.LessOrEqual(t, rows, int(limit))
						require.Less(t, bytes-last, buffer, "a page goes on though it is full")
						if i < len(got.Segments)-1 {
							require.True(t, rows == int(limit) || bytes >= buffer, "a page of %d rows and %d bytes ends early", rows, bytes)
						}
					}
					if s.BootstrapState = got.End.BootstrapState; s.BootstrapState == nil {
						break
					}
					s.Cursor = got.End.NextCursor
				}
				require.Equal(t, want, ids, "pages of %d", limit)
			}
		})
	}
}

// TestStreamsReadOnce: a bootstrap reads hardly more rows of the table than it sends.
func TestStreamsReadOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 1 })) // whose statistics are flushed
	b.exec(t, `insert into public.items (id, project, body, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		select i::text, 'x', '', 'p1', lpad(i::text, 6, '0'), 1, decode('00' || '06000000' || encode(lpad(i::text, 6, '0')::bytea, 'hex') || '01000000' || '78' || '50000000' || repeat('61', 80), 'hex')
		  from generate_series(1, 30000) as i`)
	b.exec(t, `update syncpg.sync_partitions set max_commit_seq = 1`)
	fetched := func() (n int64) {
		b.exec(t, `select pg_stat_force_next_flush()`)
		require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select idx_tup_fetch from pg_stat_user_tables where relname = 'items'`).Scan(&n))
		return n
	}
	for _, limit := range []int32{1000, 50000} {
		before := fetched()
		req := request(sub("s", "items", -1, project("x")))
		req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = limit, 50
		got := b.pull(t, req)[0]
		require.Nil(t, got.End.BootstrapState)
		require.InDelta(t, 30000, fetched()-before, 1500)
	}
}

// TestPruneBetweenPages: a horizon that passes the pin while a response is being
// sent neither repeats nor loses a row of that response.
func TestPruneBetweenPages(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		b.commit(t, item(id, "x", ""))
	}
	table, _ := b.schema.Table("items")
	s := sub("s", "items", 2, project("x"))
	s.BootstrapState = token(2, "items", new("1:xa"))
	req := request(s)
	req.Header.LimitSnapshotRows = 1
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	defer p.Close()
	var frames []byte
	require.NoError(t, p.Stream(t.Context(), func(piece []byte) error {
		frames = append(frames, piece...)
		b.prune(t, 4)
		return nil
	}))
	got := decode(t, req, frames)[0]
	require.Equal(t, []string{"b", "c", "d", "e"}, got.ids(t, table))
	require.Equal(t, ssp2.SubEnd{NextCursor: 2}, got.End)
}

// store is a segment store in memory that tells what it was given.
type store struct {
	segment.Store
	err error

	mu   sync.Mutex
	kept map[string]storedSegment // by id
	puts int
}

type storedSegment struct {
	segment.Meta
	bytes []byte
}

func newStore(t testing.TB, clock func() time.Time) *store {
	t.Helper()
	memory, err := segment.NewMemory(segment.MemoryConfig{Clock: clock})
	require.NoError(t, err)
	return &store{Store: memory, kept: map[string]storedSegment{}}
}

func (s *store) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	b, err := io.ReadAll(body)
	if err = errors.Join(err, s.err); err != nil {
		return err
	}
	s.mu.Lock()
	s.kept[m.ID] = storedSegment{m, b}
	s.puts++
	s.mu.Unlock()
	return s.Store.Put(ctx, m, bytes.NewReader(b))
}

// TestDelivery: which segments are inline follows from the accept bits and their
// size (§4.2, §5.7).
func TestDelivery(t *testing.T) {
	t.Parallel()
	const inline, external = ssp2.AcceptInlineRows, ssp2.AcceptExternalRows
	b := setup(t)
	b.commit(t, item("a", "x", strings.Repeat("x", 2000)), item("b", "x", ""))
	for _, tc := range []struct {
		name   string
		accept ssp2.Accept
		store  bool
		max    int
		want   string // one letter per page
	}{
		{"both bits: by size", inline | external, true, 1000, "ei"},
		{"both bits, default size", inline | external, true, 0, "ii"},
		{"both bits, nothing is small enough", inline | external, true, -1, "ee"},
		{"inline only: whatever the size", inline, true, -1, "ii"},
		{"external only: whatever the size", external, true, 1 << 20, "ee"},
		{"signed URLs change nothing where nobody issues them", inline | external | ssp2.AcceptSignedURLs, true, 1000, "ei"},
		{"images are for tables that are larger than a page", inline | external | ssp2.AcceptSQLite, true, 1000, "e"},
		{"both bits, no store", inline | external, false, -1, "ii"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			kept := newStore(t, nil)
			cfg := pullsvc.Config{Schema: b.schema, InlineSegmentMaxBytes: tc.max}
			if tc.store {
				cfg.Segments = kept
			}
			s, err := pullsvc.New(b.db.Pool, cfg)
			require.NoError(t, err)
			req := request(sub("s", "items", -1, project("x")))
			req.Header.Accept, req.Header.LimitSnapshotRows, req.ClientID = tc.accept, 1, t.Name()
			got := (&bundle{Service: s}).pull(t, req)[0]
			require.Len(t, got.Segments, strings.Count(tc.want, "i"))
			require.Len(t, got.Refs, strings.Count(tc.want, "e"))
			if tc.accept&ssp2.AcceptSQLite != 0 {
				require.Equal(t, ssp2.MediaSQLite, got.Refs[0].MediaType)
				return
			}
			for _, ref := range got.Refs {
				require.Contains(t, kept.kept, ref.SegmentID)
				k := kept.kept[ref.SegmentID]
				sum := sha256.Sum256(k.bytes)
				require.Equal(t, "sha256:"+hex.EncodeToString(sum[:]), ref.SegmentID)
				require.NoError(t, ssp2.CheckSegment(k.bytes))
				require.Empty(t, cmp.Diff(ssp2.SegmentRef{
					SegmentID: k.ID, MediaType: ssp2.MediaRows, Table: "items", ByteLength: int64(len(k.bytes)), RowCount: 1,
					AsOfCommitSeq: 1, ScopeDigest: ssp2.ScopeDigest(project("x")), RowCursor: k.RowCursor, NextRowCursor: k.NextRowCursor,
				}, ref))
				require.Equal(t, partition, k.Partition)
				require.Equal(t, epoch, k.LogEpoch)
				require.Equal(t, int32(3), k.SchemaVersion)
			}
			if len(got.Refs) == 2 {
				require.Nil(t, got.Refs[0].RowCursor)
				require.Equal(t, got.Refs[0].NextRowCursor, got.Refs[1].RowCursor)
				require.Nil(t, got.Refs[1].NextRowCursor)
			}
		})
	}
}

// TestExternalWithoutStore: a client that takes no inline segments cannot
// bootstrap where there is no store, and is told before the first byte; catching up
// needs no segment.
func TestExternalWithoutStore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("a", "x", ""))
	for _, cursor := range []int64{-1, 5} {
		req := request(sub("s", "items", cursor, project("x")))
		req.Header.Accept = ssp2.AcceptExternalRows
		_, err := b.Begin(t.Context(), req)
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		require.Nil(t, b.record(t, "c1"))
	}
	req := request(sub("s", "items", 0, project("x")))
	req.Header.Accept = ssp2.AcceptExternalRows
	require.Len(t, b.pull(t, req)[0].Commits, 1)
}

// TestStoreFails: a client that takes inline segments does without the store, of which it
// hears nothing; for one that takes none the stream ends with the store's error, and nothing
// of the failed segment was sent.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("disk full")
	kept := newStore(t, nil)
	kept.err = broken
	b := setup(t, with(func(c *pullsvc.Config) { c.Segments, c.InlineSegmentMaxBytes = kept, -1 }))
	b.commit(t, item("a", "x", ""))
	req := request(sub("s", "items", -1, project("x")))
	got := b.pull(t, req)[0]
	require.Empty(t, got.Refs)
	require.Len(t, got.rows(t, b, kept, "items"), 1)

	req.Header.Accept = ssp2.AcceptExternalRows
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	defer p.Close()
	var frames []byte
	err = p.Stream(t.Context(), func(piece []byte) error { frames = append(frames, piece...); return nil })
	require.ErrorIs(t, err, broken)
	want, err := ssp2.AppendFrame(nil, ssp2.WireV2, &ssp2.SubStart{ID: "s", Status: ssp2.SubActive, EffectiveScopes: project("x"), Bootstrap: true})
	require.NoError(t, err)
	require.Equal(t, want, frames)
}
