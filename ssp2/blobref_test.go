package ssp2_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

const blobID = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

func TestBlobRef(t *testing.T) {
	t.Parallel()

	head := `{"blobId":"` + blobID + `","byteLength":`
	for doc, want := range map[string]ssp2.BlobRef{
		head + `0}`:                       {BlobID: blobID},
		head + `9007199254740991}`:        {BlobID: blobID, ByteLength: ssp2.MaxSafeInteger},
		head + `12,"mediaType":""}`:       {BlobID: blobID, ByteLength: 12, MediaType: new("")},
		head + `12,"name":"a \u00e9 \""}`: {BlobID: blobID, ByteLength: 12, Name: new(`a é "`)},
		blobRefText:                       {BlobID: blobID, ByteLength: 20480, MediaType: new("image/tiff"), Name: new("côté A.tif")},
	} {
		require.True(t, ssp2.ValidBlobRef([]byte(doc)), doc)
		require.True(t, ssp2.ValidJSON([]byte(doc)), doc)
		ref, err := ssp2.ParseBlobRef([]byte(doc))
		require.NoError(t, err)
		require.Empty(t, diff(want, ref))
	}
}

func TestBlobRefNotCanonical(t *testing.T) {
	t.Parallel()

	upper := strings.ToUpper(blobID[7:])
	for rule, doc := range map[string]string{
		"empty":                       ``,
		"not an object":               `"` + blobID + `"`,
		"no members":                  `{}`,
		"blobId missing":              `{"byteLength":1}`,
		"blobId not a string":         `{"blobId":1,"byteLength":1}`,
		"blobId without prefix":       `{"blobId":"` + blobID[7:] + `","byteLength":1}`,
		"blobId in capitals":          `{"blobId":"sha256:` + upper + `","byteLength":1}`,
		"blobId short":                `{"blobId":"` + blobID[:70] + `","byteLength":1}`,
		"blobId long":                 `{"blobId":"` + blobID + `0","byteLength":1}`,
		"blobId escaped":              `{"blobId":"\u0073ha256:` + blobID[7:] + `","byteLength":1}`,
		"byteLength missing":          `{"blobId":"` + blobID + `"}`,
		"byteLength negative":         `{"blobId":"` + blobID + `","byteLength":-1}`,
		"byteLength fractional":       `{"blobId":"` + blobID + `","byteLength":1.5}`,
		"byteLength with an exponent": `{"blobId":"` + blobID + `","byteLength":1e3}`,
		"byteLength with a zero":      `{"blobId":"` + blobID + `","byteLength":01}`,
		"byteLength a string":         `{"blobId":"` + blobID + `","byteLength":"1"}`,
		"byteLength above 2^53−1":     `{"blobId":"` + blobID + `","byteLength":9007199254740992}`,
		"byteLength of 30 digits":     `{"blobId":"` + blobID + `","byteLength":` + strings.Repeat("1", 30) + `}`,
		"mediaType null":              `{"blobId":"` + blobID + `","byteLength":1,"mediaType":null}`,
		"name a number":               `{"blobId":"` + blobID + `","byteLength":1,"name":1}`,
		"name not UTF-8":              `{"blobId":"` + blobID + `","byteLength":1,"name":"` + "\xff" + `"}`,
		"unknown key":                 `{"blobId":"` + blobID + `","byteLength":1,"size":2}`,
		"key twice":                   `{"blobId":"` + blobID + `","byteLength":1,"name":"a","name":"a"}`,
		"keys in another order":       `{"byteLength":1,"blobId":"` + blobID + `"}`,
		"optional keys swapped":       `{"blobId":"` + blobID + `","byteLength":1,"name":"a","mediaType":"b"}`,
		"white space inside":          `{"blobId":"` + blobID + `", "byteLength":1}`,
		"white space before":          ` {"blobId":"` + blobID + `","byteLength":1}`,
		"white space behind":          `{"blobId":"` + blobID + `","byteLength":1} `,
		"not closed":                  `{"blobId":"` + blobID + `","byteLength":1`,
		"string not closed":           `{"blobId":"` + blobID + `","byteLength":1,"name":"}`,
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			require.False(t, ssp2.ValidBlobRef([]byte(doc)), doc)
			_, err := ssp2.ParseBlobRef([]byte(doc))
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		})
	}
}

func TestAppendBlobRef(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		ref := ssp2.BlobRef{BlobID: blobID, ByteLength: rapid.Int64Range(0, ssp2.MaxSafeInteger).Draw(t, "byteLength")}
		if rapid.Bool().Draw(t, "typed") {
			ref.MediaType = new(rapid.String().Draw(t, "mediaType"))
		}
		if rapid.Bool().Draw(t, "named") {
			ref.Name = new(rapid.String().Draw(t, "name"))
		}
		doc, err := ssp2.AppendBlobRef(nil, ref)
		require.NoError(t, err)
		back, err := ssp2.ParseBlobRef(doc)
		require.NoError(t, err)
		require.Empty(t, diff(ref, back))
	})
	for _, ref := range []ssp2.BlobRef{{}, {BlobID: blobID, ByteLength: -1}, {BlobID: blobID, ByteLength: 1 << 53}} {
		_, err := ssp2.AppendBlobRef(nil, ref)
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	}
}
