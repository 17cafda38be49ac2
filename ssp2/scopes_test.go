package ssp2_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

func TestCanonicalScopes(t *testing.T) {
	t.Parallel()

	for _, c := range []struct {
		rule string
		in   map[string][]string
		want string
	}{
		{"empty map", nil, `{}`},
		{"empty list", map[string][]string{"a": nil}, `{"a":[]}`},
		{"keys and values sorted", map[string][]string{"b": {"2", "10", "1"}, "a": {"x"}}, `{"a":["x"],"b":["1","10","2"]}`},
		{"values deduplicated", map[string][]string{"a": {"x", "y", "x", "x"}}, `{"a":["x","y"]}`},
		{"UTF-16 order", map[string][]string{"\uffee": {}, "\U0001F9EA": {"\uffee", "\U0001F9EA"}}, "{\"\U0001F9EA\":[\"\U0001F9EA\",\"\uffee\"],\"\uffee\":[]}"},
		{"escapes", map[string][]string{`a"`: {"\n\u2028"}}, "{\"a\\\"\":[\"\\n\u2028\"]}"},
	} {
		t.Run(c.rule, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, "x"+c.want, string(ssp2.AppendCanonicalScopes([]byte("x"), c.in)))
		})
	}
}

func TestScopeDigest(t *testing.T) {
	t.Parallel()

	// printf '{"a":["x","y"]}' | sha256sum
	require.Equal(t, "77cc9dceb791e1768cc9294ea3c46e866e65fd83edb57e37e4d411748642a3d3",
		ssp2.ScopeDigest(map[string][]string{"a": {"y", "x", "y"}}))
}

func TestScopeDigestIgnoresOrder(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.String(), 1, 6).Draw(t, "values")
		shuffled := rapid.Permutation(values).Draw(t, "shuffled")
		before := append([]string(nil), shuffled...)
		require.Equal(t,
			ssp2.ScopeDigest(map[string][]string{"k": values}),
			ssp2.ScopeDigest(ssp2.ScopeMap{"k": append(shuffled, shuffled[0])}))
		require.Equal(t, before, shuffled, "the caller's map is left alone")
	})
}
