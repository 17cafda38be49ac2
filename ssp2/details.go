package ssp2

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// PushResultDetails is PUSH_RESULT_DETAILS (§6.3.1): recovery hints of the
// rejected PUSH_RESULT before it.
type PushResultDetails struct {
	ClientCommitID string        // that of the PUSH_RESULT
	Entries        []DetailEntry // at least one
}

// DetailEntry is one entry of a PushResultDetails: bounded JSON of §6.3.1.
type DetailEntry struct {
	OpIndex     int32  // unique, not negative, names an error record of the PUSH_RESULT
	DetailsJSON string // an object that [ParseDetails] accepts, kept byte for byte
}

// FrameType implements [Frame].
func (*PushResultDetails) FrameType() FrameType { return FramePushResultDetails }

func (f *PushResultDetails) encode(e *encoder, _ WireVersion) {
	if f.ClientCommitID == "" || len(f.Entries) == 0 {
		e.fail("clientCommitId or entries are empty")
	}
	e.str(f.ClientCommitID, "clientCommitId")
	e.count(len(f.Entries), "entries")
	seen := make(map[int32]bool, len(f.Entries))
	for i := range f.Entries {
		entry := &f.Entries[i]
		if entry.OpIndex < 0 || seen[entry.OpIndex] {
			e.fail("entry %d: opIndex %d is negative or was there before", i, entry.OpIndex)
		}
		seen[entry.OpIndex] = true
		if _, err := ParseDetails(entry.DetailsJSON); err != nil {
			e.fail("entry %d: %v", i, err)
		}
		e.i32(entry.OpIndex)
		e.str(entry.DetailsJSON, "detailsJson")
	}
}

func (f *PushResultDetails) decode(c *cursor, _ WireVersion) {
	f.ClientCommitID = c.str("clientCommitId")
	if f.ClientCommitID == "" {
		c.fail("clientCommitId is empty")
	}
	n := c.count(8, "entries")
	if n == 0 {
		c.fail("no entries")
	}
	seen := make(map[int32]bool)
	for i := 0; i < n && c.ok("entry", i); i++ {
		entry := DetailEntry{OpIndex: c.i32("opIndex"), DetailsJSON: c.str("detailsJson")}
		if c.err != nil {
			return
		}
		if entry.OpIndex < 0 || seen[entry.OpIndex] {
			c.fail("opIndex %d is negative or was there before", entry.OpIndex)
		}
		seen[entry.OpIndex] = true
		if _, err := ParseDetails(entry.DetailsJSON); err != nil {
			c.fail("%v", err)
		}
		f.Entries = append(f.Entries, entry)
	}
	c.leave()
}

// Bounds of §6.3.1. Lengths of paths and tokens are in characters, which are
// ASCII; the others are UTF-8 bytes.
const (
	MaxDetailsBytes          = 4096
	MaxDetailsPaths          = 32
	MaxDetailsPathLength     = 160
	MaxDetailsTokenLength    = 96
	MaxDetailsReferences     = 16
	MaxDetailsReferenceKey   = 64
	MaxDetailsReferenceValue = 256
)

// Details is the bounded object of §6.3.1. At least one member is set.
type Details struct {
	FieldPaths     []string          // identifier(.identifier)*, unique
	Reason         string            // token
	RequiredAction string            // token
	References     map[string]string // token to trimmed text without control characters
}

// DetailsError is the cause of a refusal of [ParseDetails] and [Details.JSON].
type DetailsError struct{ Problem string }

// Error names the rule that was broken, never the offending value.
func (e *DetailsError) Error() string { return "details: " + e.Problem }

func detailsError(format string, args ...any) error {
	return &DetailsError{Problem: fmt.Sprintf(format, args...)}
}

// ParseDetails parses details as §6.3.1 bounds them. Unknown members, members
// named twice and values over a limit are refused with a [*DetailsError].
func ParseDetails(raw string) (Details, error) {
	doc := []byte(raw)
	if !ValidJSON(doc) {
		return Details{}, detailsError("not a JSON document")
	}
	members, ok := jsonObject(doc)
	if !ok {
		return Details{}, detailsError("not an object")
	}
	var d Details
	seen := make(map[string]bool, len(members))
	for _, m := range members {
		if seen[m.key] {
			return Details{}, detailsError("a member is named twice")
		}
		seen[m.key] = true
		if problem := d.set(m); problem != "" {
			return Details{}, detailsError("%s", problem)
		}
	}
	if _, err := d.JSON(); err != nil {
		return Details{}, err
	}
	return d, nil
}

// set takes over one member. An empty value is a problem here, since an unset
// one looks like it.
func (d *Details) set(m jsonMember) string {
	var ok bool
	switch m.key {
	case "fieldPaths":
		paths, isArray := jsonArray(m.value)
		if !isArray || len(paths) == 0 {
			return "fieldPaths is not a list of paths"
		}
		for _, path := range paths {
			s, isString := jsonString(path)
			if !isString {
				return "fieldPaths is not a list of paths"
			}
			d.FieldPaths = append(d.FieldPaths, s)
		}
	case "reason":
		if d.Reason, ok = jsonString(m.value); !ok || d.Reason == "" {
			return "reason is not a token"
		}
	case "requiredAction":
		if d.RequiredAction, ok = jsonString(m.value); !ok || d.RequiredAction == "" {
			return "requiredAction is not a token"
		}
	case "references":
		references, isObject := jsonObject(m.value)
		if !isObject || len(references) == 0 {
			return "references is not an object of strings"
		}
		d.References = make(map[string]string, len(references))
		for _, r := range references {
			s, isString := jsonString(r.value)
			if _, twice := d.References[r.key]; !isString || twice {
				return "references is not an object of strings with distinct keys"
			}
			d.References[r.key] = s
		}
	default:
		return "a member is unknown"
	}
	return ""
}

// NormalizeDetails checks details and returns them in their normal form: known
// members in the order of §6.3.1, reference keys sorted, no white space. Errors
// are [*DetailsError].
func NormalizeDetails(raw string) (string, error) {
	d, err := ParseDetails(raw)
	if err != nil {
		return "", err
	}
	return d.JSON()
}

// JSON returns the normal form of the details (see [NormalizeDetails]), or a
// [*DetailsError] when they break a bound.
func (d *Details) JSON() (string, error) {
	if problem := d.problem(); problem != "" {
		return "", detailsError("%s", problem)
	}
	var dst []byte
	member := func(name string) {
		sep := byte(',')
		if len(dst) == 0 {
			sep = '{'
		}
		dst = append(AppendJSONString(append(dst, sep), name), ':')
	}
	if len(d.FieldPaths) > 0 {
		member("fieldPaths")
		for i, path := range d.FieldPaths {
			sep := byte(',')
			if i == 0 {
				sep = '['
			}
			dst = AppendJSONString(append(dst, sep), path)
		}
		dst = append(dst, ']')
	}
	if d.Reason != "" {
		member("reason")
		dst = AppendJSONString(dst, d.Reason)
	}
	if d.RequiredAction != "" {
		member("requiredAction")
		dst = AppendJSONString(dst, d.RequiredAction)
	}
	if len(d.References) > 0 {
		member("references")
		for i, key := range slices.Sorted(maps.Keys(d.References)) {
			sep := byte(',')
			if i == 0 {
				sep = '{'
			}
			dst = append(AppendJSONString(append(dst, sep), key), ':')
			dst = AppendJSONString(dst, d.References[key])
		}
		dst = append(dst, '}')
	}
	if len(dst) == 0 {
		return "", detailsError("no member is set")
	}
	dst = append(dst, '}')
	if len(dst) > MaxDetailsBytes {
		return "", detailsError("larger than %d bytes", MaxDetailsBytes)
	}
	return string(dst), nil
}

// problem checks every bound that is not about the object as a whole.
func (d *Details) problem() string {
	if len(d.FieldPaths) > MaxDetailsPaths {
		return fmt.Sprintf("more than %d fieldPaths", MaxDetailsPaths)
	}
	seen := make(map[string]bool, len(d.FieldPaths))
	for _, path := range d.FieldPaths {
		if seen[path] {
			return "a field path is named twice"
		}
		seen[path] = true
		if len(path) > MaxDetailsPathLength || !isFieldPath(path) {
			return "a field path is malformed or too long"
		}
	}
	for _, token := range []string{d.Reason, d.RequiredAction} {
		if token != "" && (len(token) > MaxDetailsTokenLength || !isToken(token)) {
			return "reason or requiredAction is not a token or too long"
		}
	}
	if len(d.References) > MaxDetailsReferences {
		return fmt.Sprintf("more than %d references", MaxDetailsReferences)
	}
	for key, value := range d.References {
		if len(key) > MaxDetailsReferenceKey || !isToken(key) {
			return "a reference key is not a token or too long"
		}
		if len(value) > MaxDetailsReferenceValue || !isReferenceValue(value) {
			return "a reference value is empty, too long, not trimmed or has control characters"
		}
	}
	return ""
}

// isFieldPath matches identifier(.identifier)*.
func isFieldPath(s string) bool {
	for identifier := range strings.SplitSeq(s, ".") {
		if identifier == "" || isDigit(identifier[0]) {
			return false
		}
		for i := range len(identifier) {
			ch := identifier[i]
			if !isLower(ch) && !isDigit(ch) && (ch < 'A' || ch > 'Z') && ch != '_' {
				return false
			}
		}
	}
	return true
}

// isToken matches [a-z][a-z0-9]*([._-][a-z0-9]+)*.
func isToken(s string) bool {
	if s == "" || !isLower(s[0]) {
		return false
	}
	separator := false
	for i := range len(s) {
		switch ch := s[i]; {
		case isLower(ch) || isDigit(ch):
			separator = false
		case (ch == '.' || ch == '_' || ch == '-') && !separator:
			separator = true
		default:
			return false
		}
	}
	return !separator
}

func isLower(ch byte) bool { return ch >= 'a' && ch <= 'z' }
func isDigit(ch byte) bool { return ch >= '0' && ch <= '9' }

// isReferenceValue accepts non-empty text that JavaScript's trim() would leave
// alone and that has no control characters.
func isReferenceValue(s string) bool {
	if s == "" || !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return false
	}
	space := func(r rune) bool { return unicode.IsSpace(r) || r == 0xFEFF }
	return strings.TrimFunc(s, space) == s
}
