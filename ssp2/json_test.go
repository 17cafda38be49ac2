package ssp2_test

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

func TestValidJSON(t *testing.T) {
	t.Parallel()

	for _, doc := range []string{
		`true`, `false`, `null`, `0`, `-0`, `7`, `-12.50e+3`, `1E400`, `0.1e-9`, `""`, `"\u0000"`, `"\ud800"`, `"\udc00\ud800"`,
		`{}`, `[]`, ` [ ] `, "\t\r\n{ }\n", `[[],{},[{}]]`, `{"a":1,"a":2}`, `{"":{"":[]}}`, `"\"\\\/\b\f\n\r\t"`, "\"\u2028\x7f\"",
		`[1,[2,[3]],"4",{"5":[6]}]`, strings.Repeat("[", ssp2.MaxJSONDepth) + strings.Repeat("]", ssp2.MaxJSONDepth),
		strings.Repeat(`{"a":`, ssp2.MaxJSONDepth) + "1" + strings.Repeat("}", ssp2.MaxJSONDepth),
	} {
		require.True(t, ssp2.ValidJSON([]byte(doc)), "%.80q", doc)
		require.True(t, json.Valid([]byte(doc)), "%.80q", doc)
	}
	for _, doc := range []string{
		``, ` `, `tru`, `truex`, `nul`, `True`, `NaN`, `Infinity`, `+1`, `-`, `01`, `-01`, `1.`, `.5`, `1e`, `1e+`, `0x1`, `1 2`,
		`"`, `"\`, `"\x"`, `"\u12"`, `"\u12g4"`, "\"\n\"", "\"\x00\"", `'a'`, `[`, `]`, `[1`, `[1,`, `[1,]`, `[,1]`, `[1 2]`, `[1}`,
		`{`, `}`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{,}`, `{1:2}`, `{"a" 1}`, `{"a":1]`, `{"a":}`, `{}{}`, `{"a":1 "b":2}`,
		"\ufeff1", "\u00a01", "//\n1", "1\x00",
	} {
		require.False(t, ssp2.ValidJSON([]byte(doc)), "%q", doc)
		require.False(t, json.Valid([]byte(doc)), "%q", doc)
	}
	// What the decoder of the standard library lets through.
	for _, doc := range []string{"\"\xff\"", "\"\xed\xa0\x80\"", "{\"\xc3\":1}"} {
		require.False(t, ssp2.ValidJSON([]byte(doc)), "%q", doc)
		require.True(t, json.Valid([]byte(doc)), "%q", doc)
	}
	deep := strings.Repeat("[", ssp2.MaxJSONDepth+1) + strings.Repeat("]", ssp2.MaxJSONDepth+1)
	require.False(t, ssp2.ValidJSON([]byte(deep)))
	require.False(t, ssp2.ValidJSON([]byte(strings.Repeat("[", 1<<20))))
}

// TestValidJSONAgreesWithTheStandardLibrary compares on texts that are JSON, or
// nearly.
func TestValidJSONAgreesWithTheStandardLibrary(t *testing.T) {
	t.Parallel()

	token := rapid.SampledFrom([]string{
		`{`, `}`, `[`, `]`, `,`, `:`, ` `, "\n", `"a"`, `"\u00e9"`, `"é𝄞"`, `"\ud83d"`, `"`, `\`, `0`, `12`, `-`, `.`, `e`, `+`,
		`true`, `null`, `fals`, `1e5`, `-0.5`, "\x00", "\xff",
	})
	rapid.Check(t, func(t *rapid.T) {
		doc := []byte(strings.Join(rapid.SliceOfN(token, 0, 24).Draw(t, "tokens"), ""))
		require.Equal(t, json.Valid(doc) && utf8.Valid(doc), ssp2.ValidJSON(doc), "%q", doc)
	})
	rapid.Check(t, func(t *rapid.T) {
		doc := drawJSON(t, 4)
		require.True(t, json.Valid([]byte(doc)), "%q", doc)
		require.True(t, ssp2.ValidJSON([]byte(doc)), "%q", doc)
	})
}

// drawJSON draws a JSON document with white space and escapes.
func drawJSON(t *rapid.T, depth int) string {
	space := rapid.SampledFrom([]string{"", "", " ", "\n\t"})
	kinds := 4
	if depth > 0 {
		kinds = 6
	}
	pad := space.Draw(t, "space")
	var doc string
	switch rapid.IntRange(0, kinds-1).Draw(t, "kind") {
	case 0:
		doc = rapid.SampledFrom([]string{"true", "false", "null"}).Draw(t, "word")
	case 1:
		doc = rapid.StringMatching(`-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,6})?([eE][+-]?[0-9]{1,3})?`).Draw(t, "number")
	case 2:
		doc = string(ssp2.AppendJSONString(nil, rapid.String().Draw(t, "string")))
	case 3:
		doc = rapid.StringMatching(`"(a|\\u[0-9a-fA-F]{4}|\\[bfnrt/\\"])*"`).Draw(t, "escapes")
	case 4:
		n := rapid.IntRange(0, 3).Draw(t, "elements")
		elements := make([]string, n)
		for i := range elements {
			elements[i] = drawJSON(t, depth-1)
		}
		doc = "[" + strings.Join(elements, ",") + pad + "]"
	default:
		n := rapid.IntRange(0, 3).Draw(t, "members")
		members := make([]string, n)
		for i := range members {
			key := ssp2.AppendJSONString(nil, rapid.StringN(0, 4, -1).Draw(t, "key"))
			members[i] = pad + string(key) + pad + ":" + drawJSON(t, depth-1)
		}
		doc = "{" + strings.Join(members, ",") + pad + "}"
	}
	return pad + doc + pad
}

func TestAppendJSONString(t *testing.T) {
	t.Parallel()

	for s, want := range map[string]string{
		"":                      `""`,
		"plain é 𝄞 \u2028 \x7f": "\"plain é 𝄞 \u2028 \x7f\"",
		"<a href='x'>&</a>":     `"<a href='x'>&</a>"`,
		"\"\\/":                 `"\"\\/"`,
		"\b\f\n\r\t":            `"\b\f\n\r\t"`,
		"\x00\x01\x0b\x1f":      `"\u0000\u0001\u000b\u001f"`,
		"a\xffb\xc3":            "\"a\ufffdb\ufffd\"",
		"\ufffd":                "\"\ufffd\"",
	} {
		require.Equal(t, "x"+want, string(ssp2.AppendJSONString([]byte("x"), s)), "%q", s)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s")
		literal := ssp2.AppendJSONString(nil, s)
		require.True(t, ssp2.ValidJSON(literal))
		var back string
		require.NoError(t, json.Unmarshal(literal, &back))
		require.Equal(t, s, back)
	})
}

func TestAppendNumber(t *testing.T) {
	t.Parallel()

	// The values on the right are what JavaScript prints.
	for want, f := range map[string]float64{
		"0": math.Copysign(0, -1), "1": 1, "-1.5": -1.5, "0.1": 0.1, "100": 100, "123456789012345680000": 123456789012345680000,
		"1e+21": 1e21, "-1.25e+21": -1.25e21, "999999999999999900000": 999999999999999900000, "0.000001": 1e-6, "1e-7": 1e-7,
		"1.5e-10": 1.5e-10, "5e-324": 5e-324, "1.7976931348623157e+308": math.MaxFloat64, "9007199254740991": ssp2.MaxSafeInteger,
		"0.30000000000000004": 0.30000000000000004, "NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1),
	} {
		require.Equal(t, "x"+want, string(ssp2.AppendNumber([]byte("x"), f)))
	}
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.Float64().Draw(t, "f")
		var back float64
		require.NoError(t, json.Unmarshal(ssp2.AppendNumber(nil, f), &back))
		require.InDelta(t, f, back, 0)
	})
}

func TestCompareUTF16(t *testing.T) {
	t.Parallel()

	// In this order by UTF-16 code units; the bytes of UTF-8 would put the
	// supplementary ones last.
	ascending := []string{
		"", "\x00", "a", "a\x00", "ab", "b", "é", "\ud7ff", "\U00010000", "\U00010000a", "\U0001F9EA", "\U0010FFFF", "\ue000", "\ufffd", "\uffff",
	}
	for i, a := range ascending {
		for j, b := range ascending {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			require.Equal(t, want, ssp2.CompareUTF16(a, b), "%q %q", a, b)
			require.Equal(t, want, ssp2.CompareUTF16("\U0001F9EA"+a, "\U0001F9EA"+b), "%q %q", a, b)
		}
	}
	mixed := rapid.StringOfN(rapid.OneOf(
		rapid.RuneFrom([]rune("ab")), rapid.Int32Range(0xD7F0, 0xD7FF), rapid.Int32Range(0xE000, 0xE003),
		rapid.Int32Range(0xFFF0, 0xFFFF), rapid.Int32Range(0x10000, 0x10003), rapid.Int32Range(0x10FFF0, 0x10FFFF),
	), 0, 5, -1)
	rapid.Check(t, func(t *rapid.T) {
		a, b := mixed.Draw(t, "a"), mixed.Draw(t, "b")
		require.Equal(t, slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b))), ssp2.CompareUTF16(a, b), "%q %q", a, b)
	})
}
