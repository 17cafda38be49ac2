package segment_test

import (
	"bytes"
	"encoding/base64"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

var (
	keyA = bytes.Repeat([]byte("a"), 32)
	keyB = bytes.Repeat([]byte("b"), 40)
)

func signer(t testing.TB, clock *testClock, key, previous []byte) *segment.Signer {
	t.Helper()
	s, err := segment.NewSigner(segment.SignerConfig{
		BaseURL: "https://cdn.example.com/v1/", Key: key, PreviousKey: previous, Clock: clock.Now,
	})
	require.NoError(t, err)
	return s
}

// token signs and returns the st parameter of the URL.
func token(t testing.TB, s *segment.Signer, m segment.Meta) string {
	t.Helper()
	signed, _, err := s.SignURL(t.Context(), m)
	require.NoError(t, err)
	u, err := url.Parse(signed)
	require.NoError(t, err)
	return u.Query().Get("st")
}

// TestSignedURL: the URL is that of the direct endpoint with a token whose claims are as
// §5.4 writes them, and ends when it says.
func TestSignedURL(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s := signer(t, clock, keyA, nil)
	m := describe("body", "digest")
	signed, expires, err := s.SignURL(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, clock.Now().Add(15*time.Minute).UnixMilli(), expires)
	require.True(t, strings.HasPrefix(signed, "https://cdn.example.com/v1/segments/"+m.ID+"?st="))
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(token(t, s, m), ".")[0])
	require.NoError(t, err)
	require.Regexp(t, `^\{"v":1,"seg":"`+m.ID+`","sd":"digest","aud":"[A-Za-z0-9_-]{64}","exp":1800000900\}$`, string(payload))
	require.NotContains(t, string(payload), `"`+m.Partition)

	claims, err := s.Verify(token(t, s, m), m.ID)
	require.NoError(t, err)
	require.Equal(t, segment.Claims{SegmentID: m.ID, Partition: m.Partition, ScopeDigest: "digest"}, claims)
}

// TestShortURLs: a URL lives as long as it is configured to.
func TestShortURLs(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s, err := segment.NewSigner(segment.SignerConfig{BaseURL: "https://x", Key: keyA, TTL: time.Minute, Clock: clock.Now})
	require.NoError(t, err)
	m := describe("body", "d")
	_, expires, err := s.SignURL(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, clock.Now().Add(time.Minute).UnixMilli(), expires)
	tok := token(t, s, m)
	clock.advance(2*time.Minute + time.Second)
	_, err = s.Verify(tok, m.ID)
	require.ErrorIs(t, err, segment.ErrToken)
}

// TestTokenEnds: a token is taken until a minute after its end, and not a second longer.
func TestTokenEnds(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s := signer(t, clock, keyA, nil)
	m := describe("body", "d")
	tok := token(t, s, m)
	clock.advance(16*time.Minute + 999*time.Millisecond)
	_, err := s.Verify(tok, m.ID)
	require.NoError(t, err)
	clock.advance(time.Millisecond)
	_, err = s.Verify(tok, m.ID)
	require.ErrorIs(t, err, segment.ErrToken)
}

// TestTokenGrantsOneSegment: to whom it was issued for, signed by the current key or the
// one before, and nothing else.
func TestTokenGrantsOneSegment(t *testing.T) {
	t.Parallel()
	clock := newClock()
	m := describe("body", "d")
	old := token(t, signer(t, clock, keyA, nil), m)

	rotated := signer(t, clock, keyB, keyA)
	claims, err := rotated.Verify(old, m.ID)
	require.NoError(t, err)
	require.Equal(t, m.Partition, claims.Partition)
	fresh := token(t, rotated, m)
	_, err = signer(t, clock, keyA, nil).Verify(fresh, m.ID)
	require.ErrorIs(t, err, segment.ErrToken, "signs with the previous key")

	gone := signer(t, clock, keyB, nil)
	_, err = gone.Verify(fresh, m.ID)
	require.NoError(t, err)
	_, err = gone.Verify(old, m.ID)
	require.ErrorIs(t, err, segment.ErrToken)
	_, err = rotated.Verify(fresh, segment.ID([]byte("other")))
	require.ErrorIs(t, err, segment.ErrToken)
}

// TestTamperedToken: whatever byte is changed, left out or added, nothing is granted.
func TestTamperedToken(t *testing.T) {
	t.Parallel()
	s := signer(t, newClock(), keyA, keyB)
	m := describe("body", "d")
	tok := token(t, s, m)
	for i := range tok {
		for _, c := range []byte("A_z.=") {
			if tok[i] == c {
				continue
			}
			_, err := s.Verify(tok[:i]+string(c)+tok[i+1:], m.ID)
			require.ErrorIs(t, err, segment.ErrToken, "%c at %d", c, i)
		}
		_, err := s.Verify(tok[:i]+tok[i+1:], m.ID)
		require.ErrorIs(t, err, segment.ErrToken, "without %d", i)
	}
	// The last character of a hash has two bits that say nothing.
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") {
		if other := tok[:len(tok)-1] + string(c); other != tok {
			_, err := s.Verify(other, m.ID)
			require.ErrorIs(t, err, segment.ErrToken)
		}
	}
	claims, sum, _ := strings.Cut(tok, ".")
	hash, err := base64.RawURLEncoding.DecodeString(sum)
	require.NoError(t, err)
	for n := range hash {
		_, err := s.Verify(claims+"."+base64.RawURLEncoding.EncodeToString(hash[:n]), m.ID)
		require.ErrorIs(t, err, segment.ErrToken, "%d bytes of the hash", n)
	}
	for _, bad := range []string{"", ".", tok + "A", tok + ".", tok + "=", "A" + tok, strings.Repeat("A", 5000) + "." + tok} {
		_, err := s.Verify(bad, m.ID)
		require.ErrorIs(t, err, segment.ErrToken)
	}
}

// TestAudience: it is stable, differs between partitions and keys, does not tell the length
// of an id to the byte, and leads back to its partition.
func TestAudience(t *testing.T) {
	t.Parallel()
	s, other := signer(t, newClock(), keyA, nil), signer(t, newClock(), keyB, nil)
	audience := func(s *segment.Signer, partition string) string {
		m := describe("body", "d")
		m.Partition = partition
		payload, err := base64.RawURLEncoding.DecodeString(strings.Split(token(t, s, m), ".")[0])
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(payload), `"aud":"`)
		aud, _, _ := strings.Cut(rest, `"`)
		return aud
	}
	stable := audience(s, "p")
	require.Equal(t, stable, audience(signer(t, newClock(), keyA, keyB), "p"))
	require.NotEqual(t, audience(s, "p"), audience(other, "p"))
	require.Len(t, audience(s, "p"), len(audience(s, strings.Repeat("p", 32))))
	rapid.Check(t, func(rt *rapid.T) {
		ids := rapid.StringOfN(rapid.Rune().Filter(func(r rune) bool { return r != 0 }), 1, 300, 512)
		a, b := ids.Draw(rt, "a"), ids.Draw(rt, "b")
		require.Equal(rt, a == b, audience(s, a) == audience(s, b))
		m := describe("body", "d")
		m.Partition = a
		claims, err := s.Verify(token(t, s, m), m.ID)
		require.NoError(rt, err)
		require.Equal(rt, a, claims.Partition)
	})
}

func TestSignerConfig(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]segment.SignerConfig{
		"no URL":             {Key: keyA},
		"a relative URL":     {BaseURL: "/v1", Key: keyA},
		"another scheme":     {BaseURL: "ftp://x", Key: keyA},
		"a query":            {BaseURL: "https://x?y", Key: keyA},
		"a user":             {BaseURL: "https://u:p@x", Key: keyA},
		"no key":             {BaseURL: "https://x"},
		"a short key":        {BaseURL: "https://x", Key: keyA[:31]},
		"a short key before": {BaseURL: "https://x", Key: keyA, PreviousKey: []byte("x")},
		"a long life":        {BaseURL: "https://x", Key: keyA, TTL: 16 * time.Minute},
		"a negative one":     {BaseURL: "https://x", Key: keyA, TTL: -1},
	} {
		_, err := segment.NewSigner(cfg)
		require.ErrorContains(t, err, "SignerConfig", name)
	}
}

// FuzzVerify: no token makes the verifier panic, and one that it takes is one it issued.
func FuzzVerify(f *testing.F) {
	s := signer(f, newClock(), keyA, keyB)
	m := describe("body", "d")
	issued := token(f, s, m)
	f.Add(issued)
	f.Add("e30.e30")
	f.Add(".")
	f.Fuzz(func(t *testing.T, tok string) {
		if _, err := s.Verify(tok, m.ID); err == nil {
			require.Equal(t, issued, tok)
		}
	})
}
