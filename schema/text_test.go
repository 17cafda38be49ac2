package schema_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

func text(s string) ssp2.Value   { return ssp2.Value{Bytes: []byte(s)} }
func integer(n int64) ssp2.Value { return ssp2.Value{Int: n} }
func float(f float64) ssp2.Value { return ssp2.Value{Float: f} }
func null() ssp2.Value           { return ssp2.Value{Null: true} }
func sameValue(a, b ssp2.Value) bool {
	return cmp.Equal(a, b, cmpopts.EquateNaNs(), cmpopts.EquateEmpty())
}

func TestScopeText(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name  string
		typ   ssp2.ColumnType
		value ssp2.Value
		want  string
	}{
		{"string", ssp2.TypeString, text("o1"), "o1"},
		{"string with spaces", ssp2.TypeString, text(" Ünï "), " Ünï "},
		{"integer", ssp2.TypeInteger, integer(42), "42"},
		{"negative integer", ssp2.TypeInteger, integer(-9007199254740991), "-9007199254740991"},
		{"true", ssp2.TypeBoolean, integer(1), "true"},
		{"false", ssp2.TypeBoolean, integer(0), "false"},
		{"json verbatim", ssp2.TypeJSON, text(`{"b": 1, "a":1e0}`), `{"b": 1, "a":1e0}`},
		{"whole float", ssp2.TypeFloat, float(3), "3"},
		{"fraction", ssp2.TypeFloat, float(-0.1), "-0.1"},
		{"negative zero", ssp2.TypeFloat, float(math.Copysign(0, -1)), "0"},
		{"greatest plain float", ssp2.TypeFloat, float(999999999999999900000), "999999999999999900000"},
		{"least exponent", ssp2.TypeFloat, float(1e21), "1e+21"},
		{"digits and exponent", ssp2.TypeFloat, float(-1.5e300), "-1.5e+300"},
		{"least plain fraction", ssp2.TypeFloat, float(0.000001), "0.000001"},
		{"least negative exponent", ssp2.TypeFloat, float(0.0000001), "1e-7"},
		{"least float", ssp2.TypeFloat, float(math.SmallestNonzeroFloat64), "5e-324"},
		{"greatest float", ssp2.TypeFloat, float(math.MaxFloat64), "1.7976931348623157e+308"},
		{"not a number", ssp2.TypeFloat, float(math.NaN()), "NaN"},
		{"infinity", ssp2.TypeFloat, float(math.Inf(1)), "Infinity"},
		{"negative infinity", ssp2.TypeFloat, float(math.Inf(-1)), "-Infinity"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := schema.ScopeText(tt.typ, tt.value)
			require.True(t, ok)
			require.Equal(t, tt.want, got)

			back, ok := schema.ParseScopeText(tt.typ, got)
			require.True(t, ok)
			require.True(t, sameValue(tt.value, back), "%v", back)
		})
	}
}

func TestScopeTextIsMissing(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name  string
		typ   ssp2.ColumnType
		value ssp2.Value
	}{
		{"NULL", ssp2.TypeInteger, null()},
		{"NULL string", ssp2.TypeString, ssp2.Value{Null: true, Bytes: []byte("x")}},
		{"empty string", ssp2.TypeString, text("")},
		{"bytes", ssp2.TypeBytes, text("x")},
		{"blob_ref", ssp2.TypeBlobRef, text("x")},
		{"crdt", ssp2.TypeCRDT, text("x")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, ok := schema.ScopeText(tt.typ, tt.value)
			require.False(t, ok)
		})
	}
}

func TestParseScopeTextMatchesNothing(t *testing.T) {
	t.Parallel()

	for name, tt := range map[string]struct {
		typ  ssp2.ColumnType
		text string
	}{
		"empty":                 {ssp2.TypeString, ""},
		"NUL in a string":       {ssp2.TypeString, "a\x00b"},
		"NUL in json":           {ssp2.TypeJSON, "\"\x00\""},
		"plus sign":             {ssp2.TypeInteger, "+1"},
		"leading zero":          {ssp2.TypeInteger, "01"},
		"negative zero":         {ssp2.TypeInteger, "-0"},
		"space":                 {ssp2.TypeInteger, " 1"},
		"fraction":              {ssp2.TypeInteger, "1.0"},
		"beyond 2^53-1":         {ssp2.TypeInteger, "9007199254740992"},
		"below -(2^53-1)":       {ssp2.TypeInteger, "-9007199254740992"},
		"beyond 64 bits":        {ssp2.TypeInteger, "99999999999999999999"},
		"word for an integer":   {ssp2.TypeInteger, "one"},
		"True":                  {ssp2.TypeBoolean, "True"},
		"1 for a boolean":       {ssp2.TypeBoolean, "1"},
		"float with a tail":     {ssp2.TypeFloat, "1.50"},
		"float, negative zero":  {ssp2.TypeFloat, "-0"},
		"float, plain exponent": {ssp2.TypeFloat, "1e21"},
		"float, small exponent": {ssp2.TypeFloat, "1e+2"},
		"float, hexadecimal":    {ssp2.TypeFloat, "0x1p-2"},
		"float, underscore":     {ssp2.TypeFloat, "1_0"},
		"float, nan":            {ssp2.TypeFloat, "nan"},
		"float, +Infinity":      {ssp2.TypeFloat, "+Infinity"},
		"float, inf":            {ssp2.TypeFloat, "Inf"},
		"float out of range":    {ssp2.TypeFloat, "1e+999"},
		"float, more digits":    {ssp2.TypeFloat, "0.1000000000000000055"},
		"float, word":           {ssp2.TypeFloat, "zero"},
		"json not a document":   {ssp2.TypeJSON, "{"},
		"json not UTF-8":        {ssp2.TypeJSON, "\"\xff\""},
		"bytes":                 {ssp2.TypeBytes, "x"},
		"blob_ref":              {ssp2.TypeBlobRef, "x"},
		"crdt":                  {ssp2.TypeCRDT, "x"},
		"no type":               {0, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, ok := schema.ParseScopeText(tt.typ, tt.text)
			require.False(t, ok)
		})
	}
}

func TestParseScopeTextCopies(t *testing.T) {
	t.Parallel()

	v, ok := schema.ParseScopeText(ssp2.TypeString, "abc")
	require.True(t, ok)
	v.Bytes[0] = 'x'
	again, _ := schema.ParseScopeText(ssp2.TypeString, "abc")
	require.Equal(t, "abc", string(again.Bytes))
}

// valueOf generates the values a row can hold in a column that can be a scope.
func valueOf(t *rapid.T, typ ssp2.ColumnType) ssp2.Value {
	switch typ {
	case ssp2.TypeInteger:
		return integer(rapid.Int64Range(-(1<<53-1), 1<<53-1).Draw(t, "integer"))
	case ssp2.TypeFloat:
		return float(math.Float64frombits(rapid.Uint64().Draw(t, "float bits")))
	case ssp2.TypeBoolean:
		return integer(int64(rapid.IntRange(0, 1).Draw(t, "boolean")))
	case ssp2.TypeJSON:
		return text(rapid.SampledFrom([]string{`null`, `"a"`, ` [1, 2]`, `1e5`, `{"a": {}}`}).Draw(t, "json"))
	default:
		return text(rapid.String().Draw(t, "string"))
	}
}

var scopeTypes = []ssp2.ColumnType{
	ssp2.TypeString, ssp2.TypeInteger, ssp2.TypeFloat, ssp2.TypeBoolean, ssp2.TypeJSON,
}

func TestScopeTextRoundTrips(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		typ := rapid.SampledFrom(scopeTypes).Draw(t, "type")
		v := valueOf(t, typ)
		s, ok := schema.ScopeText(typ, v)
		if !ok || strings.Contains(s, "\x00") {
			_, parsed := schema.ParseScopeText(typ, s)
			require.False(t, parsed)
			return
		}
		back, ok := schema.ParseScopeText(typ, s)
		require.True(t, ok)
		require.True(t, sameValue(v, back) || v.Float == 0 && back.Float == 0)
	})
}

func TestParseScopeTextRendersBack(t *testing.T) {
	t.Parallel()

	// Texts near those of numbers, where a lax parser would accept too much.
	texts := rapid.OneOf(
		rapid.String(),
		rapid.StringMatching(`[+-]?(0x)?[0-9]{0,25}(\.[0-9]{0,8})?(e[+-]?[0-9]{1,3})?`),
		rapid.SampledFrom([]string{"true", "TRUE", "t", "false", "NaN", "Inf", "infinity", "Infinity", "-Infinity"}),
	)
	rapid.Check(t, func(t *rapid.T) {
		typ := rapid.SampledFrom(scopeTypes).Draw(t, "type")
		s := texts.Draw(t, "text")
		v, ok := schema.ParseScopeText(typ, s)
		if !ok {
			return
		}
		back, ok := schema.ScopeText(typ, v)
		require.True(t, ok)
		require.Equal(t, s, back)
	})
}

func TestScopeTextSeparatesValues(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		typ := rapid.SampledFrom(scopeTypes).Draw(t, "type")
		a, b := valueOf(t, typ), valueOf(t, typ)
		textA, okA := schema.ScopeText(typ, a)
		textB, okB := schema.ScopeText(typ, b)
		if okA && okB && textA == textB {
			require.True(t, sameValue(a, b) || a.Float == 0 && b.Float == 0)
		}
	})
}

func TestRowScopesAndRowID(t *testing.T) {
	t.Parallel()

	s, err := schema.Parse(marshal(t, document(with(
		table("t", nullable("folder", "integer"), column("weight", "float")),
		"scopes", list{
			object{"pattern": "org:{org_id}"},
			object{"pattern": "folder:{folderId}", "column": "folder"},
			object{"pattern": "weight:{weight}"},
		},
	))))
	require.NoError(t, err)
	tbl := s.Tables[0]

	for _, tt := range []struct {
		name string
		row  []ssp2.Value
		want []string
	}{
		{"all present", []ssp2.Value{text("r"), text("o=1"), integer(7), float(1e21)}, []string{"folderId=7", "org_id=o=1", "weight=1e+21"}},
		{"NULL", []ssp2.Value{text("r"), text("o"), null(), float(1)}, nil},
		{"empty", []ssp2.Value{text("r"), text(""), integer(7), float(1)}, nil},
		{"longer than any buffer", []ssp2.Value{text("r"), text(strings.Repeat("o", 500)), integer(7), float(1)}, []string{"folderId=7", "org_id=" + strings.Repeat("o", 500), "weight=1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := tbl.RowScopes(tt.row, []string{"before"})
			require.Equal(t, tt.want != nil, ok)
			if ok {
				require.Equal(t, append([]string{"before"}, tt.want...), got)
			}
		})
	}

	id, ok := tbl.RowID([]ssp2.Value{text("r1"), text("o"), null(), float(1)})
	require.True(t, ok)
	require.Equal(t, "r1", id)
	_, ok = tbl.RowID([]ssp2.Value{text(""), text("o"), null(), float(1)})
	require.False(t, ok)
}

func BenchmarkRowScopes(b *testing.B) {
	s, err := schema.Parse(marshal(b, document(table("t"))))
	require.NoError(b, err)
	row := []ssp2.Value{text("r1"), text("3f2504e0-4f89-11d3-9a0c-0305e82c3301")}
	var dst []string
	for b.Loop() {
		dst, _ = s.Tables[0].RowScopes(row, dst[:0])
	}
}
