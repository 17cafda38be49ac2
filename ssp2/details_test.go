package ssp2_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func TestNormalizeDetails(t *testing.T) {
	t.Parallel()

	for raw, want := range map[string]string{
		`{"reason":"a"}`: `{"reason":"a"}`,
		` { "references" : { "b" : "2" , "a.b-c_9" : "1 é" } , "requiredAction":"do-it", "reason" : "a1.b2", "fieldPaths":["_a.B9","x"] } `: `{"fieldPaths":["_a.B9","x"],"reason":"a1.b2","requiredAction":"do-it","references":{"a.b-c_9":"1 é","b":"2"}}`,
		`{"\u0072eason":"\u0061"}`:        `{"reason":"a"}`,
		`{"references":{"a":"\"\\\/ x"}}`: `{"references":{"a":"\"\\/ x"}}`,
	} {
		got, err := ssp2.NormalizeDetails(raw)
		require.NoError(t, err)
		require.Equal(t, want, got)
		again, err := ssp2.NormalizeDetails(got)
		require.NoError(t, err)
		require.Equal(t, want, again)
	}
}

func TestDetailsAtTheirLimits(t *testing.T) {
	t.Parallel()

	d := ssp2.Details{Reason: strings.Repeat("r", 96), RequiredAction: strings.Repeat("a", 96), References: map[string]string{}}
	for i := range 32 {
		d.FieldPaths = append(d.FieldPaths, fmt.Sprintf("p%d", i))
	}
	d.FieldPaths[0] = strings.Repeat("p", 160)
	for i := range 10 {
		d.References[fmt.Sprintf("%s%d", strings.Repeat("k", 63), i)] = strings.Repeat("é", 128)
	}
	raw, err := d.JSON()
	require.NoError(t, err)
	require.LessOrEqual(t, len(raw), ssp2.MaxDetailsBytes)
	back, err := ssp2.ParseDetails(raw)
	require.NoError(t, err)
	require.Equal(t, d, back)

	for i := range 6 {
		d.References[fmt.Sprintf("%s%d", strings.Repeat("m", 63), i)] = strings.Repeat("v", 256)
	}
	_, err = d.JSON()
	require.ErrorContains(t, err, "4096")
}

func TestDetailsOutsideTheirBounds(t *testing.T) {
	t.Parallel()

	list := func(n int, format string) string {
		var parts []string
		for i := range n {
			parts = append(parts, fmt.Sprintf(format, i))
		}
		return strings.Join(parts, ",")
	}
	for rule, raw := range map[string]string{
		"not JSON":                          `{"reason":`,
		"array":                             `[]`,
		"string":                            `"reason"`,
		"no member":                         `{}`,
		"unknown member":                    `{"reason":"a","message":"b"}`,
		"member in another case":            `{"Reason":"a"}`,
		"member twice":                      `{"reason":"a","reason":"a"}`,
		"member twice, escaped":             `{"reason":"a","\u0072eason":"a"}`,
		"null member":                       `{"reason":null}`,
		"reason not a string":               `{"reason":1}`,
		"reason empty":                      `{"reason":""}`,
		"reason with capitals":              `{"reason":"Aa"}`,
		"reason with a digit first":         `{"reason":"1a"}`,
		"reason with a separator last":      `{"reason":"a-"}`,
		"reason with two separators":        `{"reason":"a._b"}`,
		"reason with a space":               `{"reason":"a b"}`,
		"reason of 97 characters":           `{"reason":"` + strings.Repeat("a", 97) + `"}`,
		"requiredAction not a token":        `{"requiredAction":"Retry"}`,
		"requiredAction empty":              `{"requiredAction":""}`,
		"fieldPaths not a list":             `{"fieldPaths":"a"}`,
		"fieldPaths empty":                  `{"fieldPaths":[]}`,
		"fieldPaths with a number":          `{"fieldPaths":[1]}`,
		"fieldPaths with an empty path":     `{"fieldPaths":[""]}`,
		"fieldPaths with an empty part":     `{"fieldPaths":["a..b"]}`,
		"fieldPaths with a digit first":     `{"fieldPaths":["a.1"]}`,
		"fieldPaths with an index":          `{"fieldPaths":["a[0]"]}`,
		"fieldPaths with a letter beyond":   `{"fieldPaths":["é"]}`,
		"fieldPaths twice":                  `{"fieldPaths":["a","a"]}`,
		"fieldPaths of 161 characters":      `{"fieldPaths":["` + strings.Repeat("a", 161) + `"]}`,
		"33 fieldPaths":                     `{"fieldPaths":[` + list(33, `"p%d"`) + `]}`,
		"references not an object":          `{"references":[]}`,
		"references empty":                  `{"references":{}}`,
		"references with a number":          `{"references":{"a":1}}`,
		"references with a key twice":       `{"references":{"a":"1","a":"1"}}`,
		"references with a key of capitals": `{"references":{"A":"1"}}`,
		"references with an empty key":      `{"references":{"":"1"}}`,
		"references with a key of 65":       `{"references":{"` + strings.Repeat("k", 65) + `":"1"}}`,
		"references with an empty value":    `{"references":{"a":""}}`,
		"references with a value of 257":    `{"references":{"a":"` + strings.Repeat("v", 257) + `"}}`,
		"references not trimmed":            `{"references":{"a":" x"}}`,
		"references not trimmed, U+FEFF":    `{"references":{"a":"x\ufeff"}}`,
		"references not trimmed, U+3000":    `{"references":{"a":"x\u3000"}}`,
		"references with a control":         `{"references":{"a":"x\u0000y"}}`,
		"references with a C1 control":      `{"references":{"a":"x\u0085y"}}`,
		"17 references":                     `{"references":{` + list(17, `"k%d":"v"`) + `}}`,
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			d, err := ssp2.ParseDetails(raw)
			require.Empty(t, d)
			var problem *ssp2.DetailsError
			require.ErrorAs(t, err, &problem)
			_, err = ssp2.NormalizeDetails(raw)
			require.Equal(t, problem, err)

			// The same at decode, and an encoder refuses it.
			requireRefused(t, responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("k", 4, raw))), ssp2.CodeInvalidRequest)
			_, err = ssp2.AppendFrame(nil, ssp2.WireV1, &ssp2.PushResultDetails{
				ClientCommitID: "k", Entries: []ssp2.DetailEntry{{DetailsJSON: raw}},
			})
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		})
	}
}

func TestDetailsErrorNamesNoValue(t *testing.T) {
	t.Parallel()

	_, err := ssp2.ParseDetails(`{"reason":"SECRET"}`)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "SECRET")
}

func TestDetailsTextIsKept(t *testing.T) {
	t.Parallel()

	raw := ` {"reason" : "why"} `
	m, err := ssp2.DecodeMessage(responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("k", 4, raw))))
	require.NoError(t, err)
	last, ok := m.Frames[2].(*ssp2.PushResultDetails)
	require.True(t, ok)
	require.Equal(t, raw, last.Entries[0].DetailsJSON)
	rendered, err := ssp2.Render(mustMessage(m))
	require.NoError(t, err)
	require.True(t, json.Valid(rendered))
	require.Contains(t, string(rendered), `"entries":[{"opIndex":4,"details":{"reason":"why"}}]`)
}
