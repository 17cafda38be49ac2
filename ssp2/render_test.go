package ssp2_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// TestRenderWritesJSONLikeJavaScript renders documents through the params of a
// subscription.
func TestRenderWritesJSONLikeJavaScript(t *testing.T) {
	t.Parallel()

	for doc, want := range map[string]string{
		` [ 1 , 2.50 , -0 , 1e21 , 1E-7, 1e400 ] `:   `[1,2.5,0,1e+21,1e-7,null]`,
		`9007199254740993`:                           `9007199254740992`,
		`{"b":1,"a":2,"10":3,"9":4,"01":5}`:          `{"9":4,"10":3,"b":1,"a":2,"01":5}`,
		`{"a":1,"b":2,"a":{"c":[]}}`:                 `{"a":{"c":[]},"b":2}`,
		`"\u0041\/\u00e9\u2028\u001F\b\u0008\uD83D"`: "\"A/é\u2028\\u001f\\b\\b\\ud83d\"",
		`"\ud83d\ude00\ud83d\u0041\udc00"`:           `"😀\ud83dA\udc00"`,
		`"\\\"\u0022\u005c"`:                         `"\\\"\"\\"`,
		` true `:                                     `true`,
		`null`:                                       `null`,
	} {
		bin := mustMessage(request(ssp2.WireV1, &ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1},
			&ssp2.PullHeader{}, &ssp2.Subscription{ID: "s", Table: "t", Params: &doc, Cursor: 5}))
		got, err := ssp2.Render(bin)
		require.NoError(t, err)
		require.Equal(t,
			`{"magic":"SSP2","wireVersion":1,"msgKind":"request","frames":[{"type":"REQ_HEADER","clientId":"c","schemaVersion":1},`+
				`{"type":"PULL_HEADER","limitCommits":0,"limitSnapshotRows":0,"maxSnapshotPages":0,"accept":0},`+
				`{"type":"SUBSCRIPTION","id":"s","table":"t","scopes":{},"params":`+want+`,"cursor":5}]}`,
			string(got))
	}
}

func TestRenderValues(t *testing.T) {
	t.Parallel()

	for want, c := range map[string]struct {
		t ssp2.ColumnType
		v ssp2.Value
	}{
		`"<\"é>"`:           {ssp2.TypeString, text(`<"é>`)},
		`-9007199254740991`: {ssp2.TypeInteger, integer(-ssp2.MaxSafeInteger)},
		`0.1`:               {ssp2.TypeFloat, float(0.1)},
		`0`:                 {ssp2.TypeFloat, float(math.Copysign(0, -1))},
		`null`:              {ssp2.TypeFloat, float(math.NaN())},
		`true`:              {ssp2.TypeBoolean, integer(1)},
		`false`:             {ssp2.TypeBoolean, integer(0)},
		`{"a":1}`:           {ssp2.TypeJSON, text(` {"a" : 1.0}`)},
		`"AP8="`:            {ssp2.TypeBytes, raw(0, 255)},
		`""`:                {ssp2.TypeCRDT, raw()},
		`{"blobId":"` + blobID + `","byteLength":0}`: {ssp2.TypeBlobRef, text(`{"blobId":"` + blobID + `","byteLength":0}`)},
	} {
		cols := []ssp2.Column{{Name: "c", Type: c.t}}
		got, err := ssp2.Render(mustSegment(&ssp2.Segment{
			SegmentHeader: ssp2.SegmentHeader{Table: "t", SchemaVersion: 3, Columns: cols},
			Blocks:        [][]ssp2.SegmentRow{{{ServerVersion: 7, Row: mustRow(cols, []ssp2.Value{c.v})}}},
		}))
		require.NoError(t, err)
		require.Equal(t,
			`{"magic":"SSG2","formatVersion":1,"table":"t","schemaVersion":3,"columns":[{"name":"c","type":"`+c.t.String()+
				`","nullable":false}],"blocks":[[{"serverVersion":7,"values":{"c":`+want+`}}]]}`,
			string(got))
	}
}

func TestRenderRefusesWhatIsNeither(t *testing.T) {
	t.Parallel()

	for _, b := range [][]byte{nil, []byte("SSG"), []byte("SQLite format 3"), []byte("SSG2"), []byte("SSP2")} {
		_, err := ssp2.Render(b)
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	}
}
