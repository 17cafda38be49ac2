package segment

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestClaimsAreStrict: a token of our own key that says anything else than our tokens do
// grants nothing.
func TestClaimsAreStrict(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_800_000_000_000)
	signer := func(key byte) *Signer {
		s, err := NewSigner(SignerConfig{BaseURL: "https://x", Key: bytes.Repeat([]byte{key}, 32), Clock: func() time.Time { return now }})
		require.NoError(t, err)
		return s
	}
	s, other := signer('a'), signer('b')
	id, exp := ID([]byte("body")), now.Unix()+60
	aud := s.keys[0].seal("p1")
	verify := func(payload string) error {
		tok := base64.RawURLEncoding.EncodeToString([]byte(payload)) + "." +
			base64.RawURLEncoding.EncodeToString(mac(s.keys[0].token, []byte(payload)))
		claims, err := s.Verify(tok, id)
		if err == nil {
			require.Equal(t, Claims{SegmentID: id, Partition: "p1", ScopeDigest: "d"}, claims)
		}
		return err
	}
	good := fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d`, id, aud, exp)
	require.NoError(t, verify(good+"}"))
	sealed, err := base64.RawURLEncoding.DecodeString(aud)
	require.NoError(t, err)
	for name, payload := range map[string]string{
		"another version":          fmt.Sprintf(`{"v":2,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, aud, exp),
		"no version":               fmt.Sprintf(`{"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, aud, exp),
		"another segment":          fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, ID(nil), aud, exp),
		"an end that is over":      fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, aud, now.Unix()-61),
		"no end":                   fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q}`, id, aud),
		"a claim more":             good + `,"x":1}`,
		"something behind":         good + `} {}`,
		"no end of the claims":     good,
		"an audience of another":   fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, other.keys[0].seal("p1"), exp),
		"a part of an audience":    fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, base64.RawURLEncoding.EncodeToString(sealed[:8]), exp),
		"an audience of no length": fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":"","exp":%d}`, id, exp),
		"another audience":         fmt.Sprintf(`{"v":1,"seg":%q,"sd":"d","aud":%q,"exp":%d}`, id, base64.RawURLEncoding.EncodeToString(append(bytes.Clone(sealed[:len(sealed)-1]), sealed[len(sealed)-1]^1)), exp),
	} {
		require.ErrorIs(t, verify(payload), ErrToken, name)
	}
	require.NotEqual(t, aud, other.keys[0].seal("p1"))
}

// TestSealedText: is opened for what it belongs to, by its key, whole.
func TestSealedText(t *testing.T) {
	t.Parallel()
	a, err := newSIV(bytes.Repeat([]byte("a"), 32), "use")
	require.NoError(t, err)
	for _, use := range []string{"use", "other"} {
		b, err := newSIV(bytes.Repeat([]byte("a"), 32), use)
		require.NoError(t, err)
		plain, ours := b.open(a.seal([]byte("text"), "of"), "of")
		require.Equal(t, use == "use", ours)
		require.Equal(t, ours, string(plain) == "text")
	}
	sealed := a.seal([]byte("text"), "of")
	require.Equal(t, sealed, a.seal([]byte("text"), "of"))
	require.NotContains(t, string(sealed), "text")
	_, ours := a.open(sealed, "off")
	require.False(t, ours)
	for n := range sealed {
		_, ours := a.open(sealed[:n], "of")
		require.False(t, ours)
		changed := bytes.Clone(sealed)
		changed[n] ^= 1
		_, ours = a.open(changed, "of")
		require.False(t, ours)
	}
}
