//go:build vectors

package ssp2_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func readPublished(t *testing.T, path ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{publishedDir}, path...)...))
	require.NoError(t, err)
	return b
}

// manifest is what a manifest.json of the published vectors lists.
type manifest struct {
	Cases []struct {
		Name, Bin, JSON string
	}
	Invalid []struct {
		Name, Bin, JSON string
		Error           ssp2.Code
	}
}

func readManifest(t *testing.T, kind string) manifest {
	t.Helper()
	var m manifest
	require.NoError(t, json.Unmarshal(readPublished(t, kind, "manifest.json"), &m))
	require.NotEmpty(t, m.Cases)
	require.NotEmpty(t, m.Invalid)
	return m
}

func TestPublishedMessagesAndSegments(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"request", "response", "segment"} {
		m := readManifest(t, kind)
		for _, c := range m.Cases {
			t.Run(kind+"/"+c.Name, func(t *testing.T) {
				t.Parallel()
				bin := readPublished(t, kind, c.Bin)
				requireRendering(t, readPublished(t, kind, c.JSON), bin)
				require.Equal(t, bin, encodeAgain(t, kind, bin))
			})
		}
		for _, c := range m.Invalid {
			t.Run(kind+"/invalid/"+c.Name, func(t *testing.T) {
				t.Parallel()
				bin := readPublished(t, kind, c.Bin)
				require.Equal(t, c.Error, decodeCode(kind, bin))
				_, err := ssp2.Render(bin)
				require.Equal(t, c.Error, ssp2.CodeOf(err))
				if kind == "segment" {
					_, err = readSegment(bin)
				} else {
					_, err = readBytes(bin)
				}
				require.Equal(t, c.Error, ssp2.CodeOf(err), "streaming")
			})
		}
	}
}

// encodeAgain decodes a binary vector both ways and encodes it again.
func encodeAgain(t *testing.T, kind string, bin []byte) []byte {
	t.Helper()
	if kind == "segment" {
		s, err := ssp2.DecodeSegment(bin)
		require.NoError(t, err)
		streamed, err := readSegment(bin)
		require.NoError(t, err)
		require.Empty(t, diff(s, streamed))
		return mustSegment(s)
	}
	m, err := ssp2.DecodeMessage(bin)
	require.NoError(t, err)
	streamed, err := readBytes(bin)
	require.NoError(t, err)
	require.Empty(t, diff(m, streamed))
	return mustMessage(m)
}

// requireRendering compares the rendering of bin with the published one: the same
// values in the same order.
func requireRendering(t *testing.T, want, bin []byte) {
	t.Helper()
	got, err := ssp2.Render(bin)
	require.NoError(t, err)
	require.JSONEq(t, string(want), string(got))
	require.Equal(t, jsonTokens(t, want), jsonTokens(t, got), "field order")
}

// jsonTokens returns a document as its tokens, white space and escapes resolved.
func jsonTokens(t *testing.T, doc []byte) []json.Token {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	var tokens []json.Token
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return tokens
		}
		require.NoError(t, err)
		tokens = append(tokens, tok)
	}
}

func TestPublishedControlEvents(t *testing.T) {
	t.Parallel()
	m := readManifest(t, "realtime")
	for _, c := range m.Cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			text := readPublished(t, "realtime", c.JSON)
			ev, err := parseEvent(text)
			require.NoError(t, err)
			_, unknown := ev.(*ssp2.UnknownEvent)
			require.False(t, unknown)
			again, err := ssp2.AppendControl(nil, ev)
			require.NoError(t, err)
			require.JSONEq(t, string(text), string(again))
			require.Equal(t, jsonTokens(t, text), jsonTokens(t, again), "field order")
		})
	}
	for _, c := range m.Invalid {
		t.Run("invalid/"+c.Name, func(t *testing.T) {
			t.Parallel()
			_, err := parseEvent(readPublished(t, "realtime", c.JSON))
			require.Equal(t, c.Error, ssp2.CodeOf(err))
		})
	}
}

func TestPublishedVersion3Conflict(t *testing.T) {
	t.Parallel()
	bin, err := hex.DecodeString(strings.TrimSpace(string(readPublished(t, "v3", "push-conflict.hex"))))
	require.NoError(t, err)
	requireRendering(t, readPublished(t, "v3", "push-conflict.json"), bin)
	require.Equal(t, bin, encodeAgain(t, "response", bin))
}

// sparseFixture is the form of the published sparse rows.
type sparseFixture struct {
	Columns []struct {
		Name, Type string
		Nullable   bool
	}
	Values     map[string]json.RawMessage
	Hex        string
	PrimaryKey string
	Error      ssp2.Code
	Cases      map[string]string
}

func readSparseFixture(t *testing.T, name string) (sparseFixture, []ssp2.Column) {
	t.Helper()
	var f sparseFixture
	require.NoError(t, json.Unmarshal(readPublished(t, "v3", name), &f))
	var cols []ssp2.Column
	for _, c := range f.Columns {
		col := ssp2.Column{Name: c.Name, Nullable: c.Nullable}
		for col.Type = ssp2.TypeString; col.Type.String() != c.Type; col.Type++ {
			require.LessOrEqual(t, col.Type, ssp2.TypeCRDT, "type %s", c.Type)
		}
		cols = append(cols, col)
	}
	require.NotEmpty(t, cols)
	return f, cols
}

func TestPublishedSparseRows(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"sparse-row.json", "sparse-row-full.json"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, cols := readSparseFixture(t, name)
			bin, err := hex.DecodeString(f.Hex)
			require.NoError(t, err)
			vals, present, err := ssp2.DecodeSparseRow(cols, 0, bin, nil)
			require.NoError(t, err)
			require.Equal(t, len(f.Values), present.Count())
			for i, col := range cols {
				want, has := f.Values[col.Name]
				require.Equal(t, has, present.Has(i), col.Name)
				if has {
					requireValue(t, col, want, vals[i])
				}
			}
			again, err := ssp2.AppendSparseRow(nil, cols, 0, present, vals)
			require.NoError(t, err)
			require.Equal(t, bin, again)
		})
	}
	t.Run("invalid", func(t *testing.T) {
		t.Parallel()
		f, cols := readSparseFixture(t, "sparse-row-invalid.json")
		key := slices.IndexFunc(cols, func(c ssp2.Column) bool { return c.Name == f.PrimaryKey })
		require.NotEmpty(t, f.Cases)
		for name, text := range f.Cases {
			bin, err := hex.DecodeString(text)
			require.NoError(t, err)
			_, _, err = ssp2.DecodeSparseRow(cols, key, bin, nil)
			require.Equal(t, f.Error, ssp2.CodeOf(err), name)
		}
	})
}

// requireValue compares a decoded value with its published rendering: bytes are
// base64.
func requireValue(t *testing.T, col ssp2.Column, want json.RawMessage, got ssp2.Value) {
	t.Helper()
	if string(want) == "null" {
		require.True(t, got.Null, col.Name)
		return
	}
	require.False(t, got.Null, col.Name)
	switch col.Type {
	case ssp2.TypeInteger:
		require.JSONEq(t, string(want), string(ssp2.AppendNumber(nil, float64(got.Int))), col.Name)
	case ssp2.TypeFloat:
		require.JSONEq(t, string(want), string(ssp2.AppendNumber(nil, got.Float)), col.Name)
	case ssp2.TypeBoolean:
		require.Equal(t, string(want) == "true", got.Int == 1, col.Name)
	case ssp2.TypeJSON, ssp2.TypeBlobRef:
		require.JSONEq(t, string(want), string(got.Bytes), col.Name)
	case ssp2.TypeString:
		require.JSONEq(t, string(want), string(ssp2.AppendJSONString(nil, string(got.Bytes))), col.Name)
	default:
		var b []byte // base64
		require.NoError(t, json.Unmarshal(want, &b))
		require.Equal(t, b, got.Bytes, col.Name)
	}
}
