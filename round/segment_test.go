package round_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// library is an engine whose partition has one segment, for one scope map.
type library struct {
	*world
	engine *round.Engine
	store  segment.Store
	signer *segment.Signer
	now    time.Time
	meta   segment.Meta
	opened int
}

// counting counts what is looked up.
type counting struct {
	segment.Store
	opened *int
	err    error
}

func (c *counting) Open(ctx context.Context, r segment.Ref) (segment.Meta, io.ReadCloser, error) {
	*c.opened++
	if c.err != nil {
		return segment.Meta{}, nil, c.err
	}
	return c.Store.Open(ctx, r)
}

const segmentBody = "a segment"

func newLibrary(t *testing.T) *library {
	t.Helper()
	l := &library{world: newWorld(t), now: time.UnixMilli(1_800_000_000_000)}
	clock := func() time.Time { return l.now }
	memory, err := segment.NewMemory(segment.MemoryConfig{Clock: clock, TTL: time.Hour})
	require.NoError(t, err)
	l.store = &counting{Store: memory, opened: &l.opened}
	l.signer, err = segment.NewSigner(segment.SignerConfig{BaseURL: "https://x", Key: []byte(strings.Repeat("k", 32)), Clock: clock})
	require.NoError(t, err)
	l.meta = segment.Meta{
		Key: segment.Key{
			Partition: "acme", LogEpoch: "epoch-1", Table: l.schema.Tables[0].Name, MediaType: ssp2.MediaRows,
			SchemaVersion: l.schema.Version, ScopeDigest: ssp2.ScopeDigest(map[string][]string{l.variable(): {"a", "b"}}),
		},
		ID: segment.ID([]byte(segmentBody)), ByteLength: int64(len(segmentBody)),
	}
	require.NoError(t, memory.Put(t.Context(), l.meta, strings.NewReader(segmentBody)))
	l.engine = round.NewWith(round.Config{
		Schema: l.schema, Segments: l.store, URLs: l.signer, Logger: slog.New(slog.NewTextHandler(&l.logged, nil)),
		ResolveScopes: func(ctx context.Context, req round.ScopeRequest) (scope.Allowed, error) {
			l.note("resolve")
			l.asked = req
			if l.resolve != nil {
				return l.resolve(ctx, req)
			}
			return l.allowed, nil
		},
	}, pushFake{l.world}, pullFake{l.world}, gateFake{l.world})
	return l
}

// variable is a scope variable of the first table.
func (l *library) variable() string { return l.schema.Tables[0].Scopes[0].Variable }

func (l *library) open(t *testing.T, id string, requested map[string][]string) (string, error) {
	t.Helper()
	return read(l.engine.OpenSegment(t.Context(), round.Identity{Actor: "ada", Partition: "acme"}, id, requested))
}

func read(_ segment.Meta, body io.ReadCloser, err error) (string, error) {
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(body)
	return string(b), errors.Join(err, body.Close())
}

// TestDownloadIsAuthorizedEveryTime: the effective scopes of the moment must be those the
// segment was built for (§5.5); what is refused before says nothing of what there is.
func TestDownloadIsAuthorizedEveryTime(t *testing.T) {
	t.Parallel()
	v := newLibrary(t).variable()
	unknown := segment.ID([]byte("unknown"))
	all := scope.Allowed{v: {"*"}}
	for _, tc := range []struct {
		name      string
		allowed   scope.Allowed
		fails     error
		requested map[string][]string
		id        string
		want      ssp2.Code
		lookups   int
	}{
		{name: "the same scopes", allowed: all, requested: map[string][]string{v: {"a", "b"}}, lookups: 1},
		{name: "in another order, twice", allowed: scope.Allowed{v: {"b", "a", "z"}}, requested: map[string][]string{v: {"b", "a", "b"}}, lookups: 1},
		{name: "more was asked for, the same held", allowed: scope.Allowed{v: {"a", "b"}}, requested: map[string][]string{v: {"a", "b", "c"}}, lookups: 1},
		{name: "less is held now", allowed: scope.Allowed{v: {"a"}}, requested: map[string][]string{v: {"a", "b"}}, want: ssp2.CodeForbidden, lookups: 1},
		{name: "more is held", allowed: all, requested: map[string][]string{v: {"a", "b", "c"}}, want: ssp2.CodeForbidden, lookups: 1},
		{name: "an unknown segment", allowed: all, requested: map[string][]string{v: {"a", "b"}}, id: unknown, want: ssp2.CodeNotFound, lookups: 1},
		{name: "no id at all", allowed: all, requested: map[string][]string{v: {"a", "b"}}, id: "../etc", want: ssp2.CodeNotFound},
		{name: "nothing is held, known", allowed: scope.Allowed{}, requested: map[string][]string{v: {"a", "b"}}, want: ssp2.CodeForbidden},
		{name: "nothing is held, unknown", allowed: scope.Allowed{}, requested: map[string][]string{v: {"a", "b"}}, id: unknown, want: ssp2.CodeForbidden},
		{name: "nothing is asked for", allowed: all, requested: nil, want: ssp2.CodeForbidden},
		{name: "the resolver fails, known", fails: errors.New("bug"), requested: map[string][]string{v: {"a", "b"}}, want: ssp2.CodeForbidden},
		{name: "the resolver fails, unknown", fails: errors.New("bug"), requested: map[string][]string{v: {"a", "b"}}, id: unknown, want: ssp2.CodeForbidden},
		{name: "the resolver has a bug", allowed: scope.Allowed{"nonsense": {"x"}}, requested: map[string][]string{v: {"a", "b"}}, want: ssp2.CodeForbidden},
		{name: "the resolver is out of reach", fails: round.ErrOutage, requested: map[string][]string{v: {"a", "b"}}, want: ssp2.CodeAuthLeaseRequired},
		{name: "no variable of any table", allowed: all, requested: map[string][]string{"nonsense": {"a"}}, want: ssp2.CodeInvalidSubscription},
		{name: "a wildcard", allowed: all, requested: map[string][]string{v: {"*"}}, want: ssp2.CodeInvalidSubscription},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := newLibrary(t)
			l.allowed = tc.allowed
			if tc.fails != nil {
				l.resolve = func(context.Context, round.ScopeRequest) (scope.Allowed, error) { return nil, tc.fails }
			}
			id := tc.id
			if id == "" {
				id = l.meta.ID
			}
			body, err := l.open(t, id, tc.requested)
			require.Equal(t, tc.want, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, tc.lookups, l.opened)
			if tc.want == "" {
				require.Equal(t, segmentBody, body)
				require.Equal(t, round.Identity{Actor: "ada", Partition: "acme"}, l.asked.Identity)
			}
		})
	}
}

// TestDownloadEnds: with the segment's life, and with its log epoch, also when this process
// remembers the one before.
func TestDownloadEnds(t *testing.T) {
	t.Parallel()
	l := newLibrary(t)
	l.allowed = scope.Allowed{l.variable(): {"*"}}
	requested := map[string][]string{l.variable(): {"a", "b"}}
	_, err := l.open(t, l.meta.ID, requested)
	require.NoError(t, err)

	l.epoch = gate.Epoch{LogEpoch: "epoch-2"}
	l.known = &gate.Epoch{LogEpoch: "epoch-2"}
	l.opened = 0
	_, err = l.open(t, l.meta.ID, requested)
	require.Equal(t, ssp2.CodeSegmentExpired, ssp2.CodeOf(err))
	require.Equal(t, 1, l.opened, "the epoch that is remembered is the current one")
	_, err = l.openToken(t, l.meta.ID)
	require.Equal(t, ssp2.CodeSegmentExpired, ssp2.CodeOf(err))

	// The segment is neither of the epoch that this process remembers nor of the new one.
	l.known = &gate.Epoch{LogEpoch: "epoch-0"}
	_, err = l.open(t, l.meta.ID, requested)
	require.Equal(t, ssp2.CodeSegmentExpired, ssp2.CodeOf(err))

	// The segment is of the new epoch, which this process has not heard of.
	l.epoch = gate.Epoch{LogEpoch: "epoch-1"}
	l.known = &gate.Epoch{LogEpoch: "epoch-0"}
	_, err = l.open(t, l.meta.ID, requested)
	require.NoError(t, err)

	l.now = l.now.Add(time.Hour)
	_, err = l.open(t, l.meta.ID, requested)
	require.Equal(t, ssp2.CodeSegmentExpired, ssp2.CodeOf(err))
}

func (l *library) openToken(t *testing.T, id string) (string, error) {
	t.Helper()
	signed, _, err := l.signer.SignURL(t.Context(), l.meta)
	require.NoError(t, err)
	_, token, _ := strings.Cut(signed, "st=")
	return read(l.engine.OpenSigned(t.Context(), id, token))
}

// TestSignedDownload: the token is the whole grant, of one segment, and nobody is asked.
func TestSignedDownload(t *testing.T) {
	t.Parallel()
	l := newLibrary(t)
	body, err := l.openToken(t, l.meta.ID)
	require.NoError(t, err)
	require.Equal(t, segmentBody, body)
	require.NotContains(t, l.trace, "resolve")

	_, err = l.openToken(t, segment.ID([]byte("another")))
	require.Equal(t, ssp2.CodeForbidden, ssp2.CodeOf(err), "a token for another segment")
	_, err = read(l.engine.OpenSigned(t.Context(), l.meta.ID, "x.y"))
	require.Equal(t, ssp2.CodeForbidden, ssp2.CodeOf(err))

	// Signed for scopes under which the bytes were never stored, and for what is gone.
	other := l.meta
	other.ScopeDigest = "other"
	l.meta = other
	_, err = l.openToken(t, other.ID)
	require.Equal(t, ssp2.CodeForbidden, ssp2.CodeOf(err))
	l.meta.ID = segment.ID([]byte("gone"))
	_, err = l.openToken(t, l.meta.ID)
	require.Equal(t, ssp2.CodeNotFound, ssp2.CodeOf(err))

	l.now = l.now.Add(time.Hour)
	_, err = l.openToken(t, l.meta.ID)
	require.Equal(t, ssp2.CodeNotFound, ssp2.CodeOf(err))

	none := round.NewWith(round.Config{Schema: l.schema, Segments: l.store}, pushFake{l.world}, pullFake{l.world}, gateFake{l.world})
	_, err = read(none.OpenSigned(t.Context(), l.meta.ID, "x.y"))
	require.Equal(t, ssp2.CodeForbidden, ssp2.CodeOf(err), "a server that issues no URLs takes none")
}

// TestNobodysDownload: an identity that no database holds asks for nothing.
func TestNobodysDownload(t *testing.T) {
	t.Parallel()
	l := newLibrary(t)
	l.allowed = scope.Allowed{l.variable(): {"*"}}
	for _, id := range []round.Identity{{}, {Actor: "ada"}, {Partition: "acme"}, {Actor: "a\x00", Partition: "acme"}} {
		_, err := read(l.engine.OpenSegment(t.Context(), id, l.meta.ID, map[string][]string{l.variable(): {"a", "b"}}))
		require.Equal(t, ssp2.CodeInternalError, round.Failure(err).Code)
	}
	require.Empty(t, l.trace)
	require.Zero(t, l.opened)
}

// TestDownloadWithoutAStore: there are no segments then.
func TestDownloadWithoutAStore(t *testing.T) {
	t.Parallel()
	l := newLibrary(t)
	none := round.NewWith(round.Config{
		Schema: l.schema,
		ResolveScopes: func(context.Context, round.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{l.variable(): {"*"}}, nil
		},
	}, pushFake{l.world}, pullFake{l.world}, gateFake{l.world})
	_, err := read(none.OpenSegment(t.Context(), round.Identity{Actor: "ada", Partition: "acme"}, l.meta.ID, map[string][]string{l.variable(): {"a"}}))
	require.Equal(t, ssp2.CodeNotFound, ssp2.CodeOf(err))
}

// lying is a store that answers with a segment that nobody asked for.
type lying struct {
	segment.Store
	meta   segment.Meta
	closed bool
}

func (s *lying) Open(context.Context, segment.Ref) (segment.Meta, io.ReadCloser, error) {
	return s.meta, s, nil
}

func (*lying) Read([]byte) (int, error) { return 0, io.EOF }

func (s *lying) Close() error {
	s.closed = true
	return nil
}

// TestDownloadDoesNotTrustTheStore: what it opens must be the partition's, and of the scopes
// that were found to be held.
func TestDownloadDoesNotTrustTheStore(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*segment.Meta){
		"other scopes":      func(m *segment.Meta) { m.ScopeDigest = "other" },
		"another partition": func(m *segment.Meta) { m.Partition = "other" },
	} {
		l := newLibrary(t)
		store := &lying{meta: l.meta}
		change(&store.meta)
		e := round.NewWith(round.Config{Schema: l.schema, Segments: store, URLs: l.signer}, pushFake{l.world}, pullFake{l.world}, gateFake{l.world})
		signed, _, err := l.signer.SignURL(t.Context(), l.meta)
		require.NoError(t, err)
		_, token, _ := strings.Cut(signed, "st=")
		_, err = read(e.OpenSigned(t.Context(), l.meta.ID, token))
		require.Equal(t, ssp2.CodeForbidden, ssp2.CodeOf(err), name)
		require.True(t, store.closed, name)
	}
}

// TestDownloadFails: what is wrong with a store is not told.
func TestDownloadFails(t *testing.T) {
	t.Parallel()
	l := newLibrary(t)
	l.allowed = scope.Allowed{l.variable(): {"*"}}
	store, ok := l.store.(*counting)
	require.True(t, ok)
	store.err = errors.New("relation sync_segments is on fire")
	_, err := l.open(t, l.meta.ID, map[string][]string{l.variable(): {"a", "b"}})
	require.Equal(t, ssp2.CodeInternalError, round.Failure(err).Code)
	require.NotContains(t, round.Failure(err).Message, "sync_segments")
	require.Contains(t, l.logged.String(), "on fire")

	// A client that has left is no failure of the server.
	l.logged.Reset()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = read(l.engine.OpenSegment(ctx, round.Identity{Actor: "ada", Partition: "acme"}, l.meta.ID, map[string][]string{l.variable(): {"a", "b"}}))
	require.Error(t, err)
	require.Empty(t, l.logged.String())
}
