package ssp2

import (
	"cmp"
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// MaxJSONDepth is how deeply arrays and objects of a JSON document may nest.
// RFC 8259 §9 lets a parser set such a limit; this one keeps every accepted
// document within the stack of the parsers behind it (jsonb among them).
const MaxJSONDepth = 1024

// ValidJSON reports whether b is one JSON document as RFC 8259 defines it:
// well-formed UTF-8, any kind of value at the top, nothing but white space
// around it, nesting of at most [MaxJSONDepth]. Escaped lone surrogates are
// allowed, as the grammar allows them.
func ValidJSON(b []byte) bool {
	end, ok := scanJSON(b, skipSpace(b, 0))
	return ok && skipSpace(b, end) == len(b) && utf8.Valid(b)
}

// skipSpace returns the offset of the first byte at or after i that is not
// insignificant white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// jsonStack remembers for every open container whether it is an object.
type jsonStack struct {
	bits  [MaxJSONDepth / 64]uint64
	depth int
}

func (s *jsonStack) push(object bool) bool {
	if s.depth == MaxJSONDepth {
		return false
	}
	word, bit := s.depth/64, uint64(1)<<(s.depth%64)
	s.bits[word] &^= bit
	if object {
		s.bits[word] |= bit
	}
	s.depth++
	return true
}

func (s *jsonStack) object() bool {
	top := s.depth - 1
	return s.bits[top/64]>>(top%64)&1 == 1
}

// scanJSON returns the offset behind the JSON value that begins at i. It is a
// loop with a fixed stack, so a hostile document costs neither memory nor
// goroutine stack. It does not look at UTF-8 inside strings.
func scanJSON(b []byte, i int) (int, bool) {
	var open jsonStack
	for {
		// One value begins at i.
		if i >= len(b) {
			return 0, false
		}
		var ok bool
		switch ch := b[i]; ch {
		case '{', '[':
			if !open.push(ch == '{') {
				return 0, false
			}
			i = skipSpace(b, i+1)
			if i < len(b) && b[i] == ch+2 { // '}' and ']' are two behind their openers
				break
			}
			if ch == '[' {
				continue
			}
			if i, ok = scanKey(b, i); !ok {
				return 0, false
			}
			continue
		case '"':
			if i, ok = scanString(b, i); !ok {
				return 0, false
			}
		case 't':
			if i, ok = scanWord(b, i, "true"); !ok {
				return 0, false
			}
		case 'f':
			if i, ok = scanWord(b, i, "false"); !ok {
				return 0, false
			}
		case 'n':
			if i, ok = scanWord(b, i, "null"); !ok {
				return 0, false
			}
		default:
			if i, ok = scanNumber(b, i); !ok {
				return 0, false
			}
		}
		// A value ended at i; close containers until one goes on.
		for {
			if open.depth == 0 {
				return i, true
			}
			i = skipSpace(b, i)
			if i >= len(b) {
				return 0, false
			}
			object := open.object()
			if b[i] == ',' {
				i = skipSpace(b, i+1)
				if object {
					if i, ok = scanKey(b, i); !ok {
						return 0, false
					}
				}
				break
			}
			if (object && b[i] != '}') || (!object && b[i] != ']') {
				return 0, false
			}
			open.depth--
			i++
		}
	}
}

// scanKey reads an object key and its colon, up to the value.
func scanKey(b []byte, i int) (int, bool) {
	i, ok := scanString(b, i)
	if !ok {
		return 0, false
	}
	if i = skipSpace(b, i); i >= len(b) || b[i] != ':' {
		return 0, false
	}
	return skipSpace(b, i+1), true
}

func scanWord(b []byte, i int, word string) (int, bool) {
	end := i + len(word)
	return end, end <= len(b) && string(b[i:end]) == word
}

// scanString returns the offset behind the string literal that begins at i.
func scanString(b []byte, i int) (int, bool) {
	if i >= len(b) || b[i] != '"' {
		return 0, false
	}
	for i++; i < len(b); i++ {
		switch ch := b[i]; {
		case ch == '"':
			return i + 1, true
		case ch < 0x20:
			return 0, false
		case ch == '\\':
			i++
			if i >= len(b) {
				return 0, false
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				if _, ok := hex4(b, i+1); !ok {
					return 0, false
				}
				i += 4
			default:
				return 0, false
			}
		}
	}
	return 0, false
}

// hex4 reads the four digits of a \u escape.
func hex4(b []byte, i int) (uint16, bool) {
	if i+4 > len(b) {
		return 0, false
	}
	var v uint16
	for _, ch := range b[i : i+4] {
		switch {
		case ch >= '0' && ch <= '9':
			v = v<<4 | uint16(ch-'0')
		case ch >= 'a' && ch <= 'f':
			v = v<<4 | uint16(ch-'a'+10)
		case ch >= 'A' && ch <= 'F':
			v = v<<4 | uint16(ch-'A'+10)
		default:
			return 0, false
		}
	}
	return v, true
}

// scanNumber returns the offset behind the number that begins at i.
func scanNumber(b []byte, i int) (int, bool) {
	if i < len(b) && b[i] == '-' {
		i++
	}
	switch {
	case i >= len(b):
		return 0, false
	case b[i] == '0':
		i++
	default:
		var ok bool
		if i, ok = scanDigits(b, i); !ok {
			return 0, false
		}
	}
	if i < len(b) && b[i] == '.' {
		var ok bool
		if i, ok = scanDigits(b, i+1); !ok {
			return 0, false
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		return scanDigits(b, i)
	}
	return i, true
}

// scanDigits skips one digit or more.
func scanDigits(b []byte, i int) (int, bool) {
	start := i
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i, i > start
}

// AppendJSONString appends s as a JSON string literal exactly as JavaScript's
// JSON.stringify writes it: short escapes where they exist, \u00xx for the other
// control characters, everything else as it is (HTML characters, U+2028 and
// U+2029 included). Bytes that are not UTF-8 become U+FFFD.
func AppendJSONString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		ch := s[i]
		if ch >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				dst = append(dst, s[start:i]...)
				dst = utf8.AppendRune(dst, utf8.RuneError)
				start = i + 1
			}
			i += n
			continue
		}
		if ch >= 0x20 && ch != '"' && ch != '\\' {
			i++
			continue
		}
		dst = appendEscape(append(dst, s[start:i]...), uint16(ch))
		i++
		start = i
	}
	return append(append(dst, s[start:]...), '"')
}

// appendEscape appends the escape of a code unit that JSON text cannot hold as
// it is.
func appendEscape(dst []byte, unit uint16) []byte {
	switch unit {
	case '"', '\\':
		return append(dst, '\\', byte(unit))
	case '\b':
		return append(dst, '\\', 'b')
	case '\f':
		return append(dst, '\\', 'f')
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	}
	const digits = "0123456789abcdef"
	return append(dst, '\\', 'u', digits[unit>>12], digits[unit>>8&15], digits[unit>>4&15], digits[unit&15])
}

// AppendNumber appends f as JavaScript's String(f) writes it: the shortest
// digits that read back as f, an exponent only below 1e-6 and from 1e21 on,
// "0" for negative zero, and NaN, Infinity or -Infinity.
func AppendNumber(dst []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "NaN"...)
	case f == 0:
		return append(dst, '0')
	case math.IsInf(f, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(f, -1):
		return append(dst, "-Infinity"...)
	}
	abs := f
	if f < 0 {
		abs = -f
	}
	if abs >= 1e-6 && abs < 1e21 {
		return strconv.AppendFloat(dst, f, 'f', -1, 64)
	}
	// Go pads the exponent to two digits, JavaScript does not.
	dst = strconv.AppendFloat(dst, f, 'e', -1, 64)
	if n := len(dst); dst[n-2] == '0' && (dst[n-3] == '-' || dst[n-3] == '+') {
		dst[n-2] = dst[n-1]
		dst = dst[:n-1]
	}
	return dst
}

// CompareUTF16 compares a and b by their UTF-16 code units, the order in which
// the wire writes map keys and digests sort (Conventions, §11.2). It returns -1,
// 0 or 1. UTF-8 byte order differs exactly where U+E000 to U+FFFF meets a
// supplementary character.
func CompareUTF16(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		x, y := a[i], b[i]
		if x == y {
			continue
		}
		// A lead byte of 0xF0 or more begins a surrogate pair, which sorts below
		// U+E000 to U+FFFF, whose lead bytes are 0xEE and 0xEF.
		if x >= 0xEE && y >= 0xEE && (x >= 0xF0) != (y >= 0xF0) {
			x, y = y, x
		}
		if x < y {
			return -1
		}
		return 1
	}
	return cmp.Compare(len(a), len(b))
}

// unquoteJSON returns the string that a valid string literal stands for. A lone
// surrogate, which UTF-8 cannot hold, becomes U+FFFD.
func unquoteJSON(literal []byte) string {
	body := literal[1 : len(literal)-1]
	out := make([]byte, 0, len(body))
	for i := 0; i < len(body); i++ {
		if body[i] != '\\' {
			out = append(out, body[i])
			continue
		}
		i++
		switch body[i] {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			unit, _ := hex4(body, i+1)
			i += 4
			r := rune(unit)
			if utf16.IsSurrogate(r) {
				low, paired := lowSurrogate(body, i+1)
				if r = utf16.DecodeRune(r, low); paired && r != utf8.RuneError {
					i += 6
				}
			}
			out = utf8.AppendRune(out, r)
		default: // '"', '\\', '/'
			out = append(out, body[i])
		}
	}
	return string(out)
}

// lowSurrogate reads the \u escape at i, if there is one.
func lowSurrogate(b []byte, i int) (rune, bool) {
	if i+6 > len(b) || b[i] != '\\' || b[i+1] != 'u' {
		return 0, false
	}
	unit, ok := hex4(b, i+2)
	return rune(unit), ok
}

// jsonMember is one member of an object.
type jsonMember struct {
	key   string
	value []byte // its JSON text
}

// jsonObject returns the members of a valid JSON document that is an object, in
// the order of the text, and false for one that is not.
func jsonObject(doc []byte) ([]jsonMember, bool) {
	i := skipSpace(doc, 0)
	if doc[i] != '{' {
		return nil, false
	}
	var members []jsonMember
	for i = skipSpace(doc, i+1); doc[i] != '}'; i = skipSpace(doc, i) {
		if doc[i] == ',' {
			i = skipSpace(doc, i+1)
		}
		end, _ := scanString(doc, i)
		key := unquoteJSON(doc[i:end])
		i, _ = scanKey(doc, i)
		end, _ = scanJSON(doc, i)
		members = append(members, jsonMember{key, doc[i:end]})
		i = end
	}
	return members, true
}

// jsonArray returns the elements of a valid JSON document that is an array, and
// false for one that is not.
func jsonArray(doc []byte) ([][]byte, bool) {
	i := skipSpace(doc, 0)
	if doc[i] != '[' {
		return nil, false
	}
	var elements [][]byte
	for i = skipSpace(doc, i+1); doc[i] != ']'; i = skipSpace(doc, i) {
		if doc[i] == ',' {
			i = skipSpace(doc, i+1)
		}
		end, _ := scanJSON(doc, i)
		elements = append(elements, doc[i:end])
		i = end
	}
	return elements, true
}

// jsonString returns the value of a valid JSON document that is a string.
func jsonString(doc []byte) (string, bool) {
	i := skipSpace(doc, 0)
	if doc[i] != '"' {
		return "", false
	}
	end, _ := scanString(doc, i)
	return unquoteJSON(doc[i:end]), true
}
