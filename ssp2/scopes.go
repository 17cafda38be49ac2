package ssp2

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
)

// AppendCanonicalScopes appends the canonical JSON of a scope map (§11.2): keys
// and values sorted by UTF-16 code units, values deduplicated, no white space.
// It does not change m.
func AppendCanonicalScopes(dst []byte, m map[string][]string) []byte {
	dst = append(dst, '{')
	for i, key := range sortedKeys(m) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(AppendJSONString(dst, key), ':', '[')
		values := slices.Clone(m[key])
		slices.SortFunc(values, CompareUTF16)
		for j, value := range slices.Compact(values) {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = AppendJSONString(dst, value)
		}
		dst = append(dst, ']')
	}
	return append(dst, '}')
}

// ScopeDigest returns the scope digest of an effective-scope map (§3.5): the
// SHA-256 of its canonical JSON, 64 lowercase hex digits.
func ScopeDigest(m map[string][]string) string {
	sum := sha256.Sum256(AppendCanonicalScopes(nil, m))
	return hex.EncodeToString(sum[:])
}
