package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func TestRenderShowsMessagesAndSegments(t *testing.T) {
	t.Parallel()
	epoch := "e1"
	message, err := ssp2.AppendMessage(nil, &ssp2.Message{
		WireVersion: ssp2.WireV2, Kind: ssp2.KindRequest,
		Frames: []ssp2.Frame{
			&ssp2.RequestHeader{ClientID: "c1", SchemaVersion: 1, LogEpoch: &epoch},
			&ssp2.PullHeader{Accept: ssp2.AcceptInlineRows},
			&ssp2.Subscription{ID: "s", Table: "notes", Scopes: ssp2.ScopeMap{"team_id": {"red"}}, Cursor: -1},
		},
	})
	require.NoError(t, err)
	segment, err := ssp2.AppendSegment(nil, &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{
		Table: "notes", SchemaVersion: 1, Columns: []ssp2.Column{{Name: "id", Type: ssp2.TypeString}},
	}})
	require.NoError(t, err)
	for name, in := range map[string][]byte{"message": message, "segment": segment} {
		pretty := runCommand(t, "render", writeFile(t, "in.bin", string(in)))
		require.Zero(t, pretty.code, pretty.stderr)
		golden(t, "render-"+name+".txt", pretty.stdout)

		piped := invocation{args: []string{"render", "-"}, stdin: string(in)}.run(t)
		require.Equal(t, pretty, piped)

		compact := invocation{args: []string{"render", "--compact", "-"}, stdin: string(in)}.run(t)
		require.Zero(t, compact.code)
		want, err := ssp2.Render(in)
		require.NoError(t, err)
		require.Equal(t, string(want)+"\n", compact.stdout)
	}
}

func TestRenderSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ in, want string }{
		"empty":   {"", "sync.invalid_request"},
		"gzip":    {"\x1f\x8b\x08\x00xxxx", "compressed with gzip: decompress it first"},
		"zstd":    {"\x28\xb5\x2f\xfdxxxx", "compressed with zstd: decompress it first"},
		"sqlite":  {"SQLite format 3\x00", "SQLite image"},
		"JSON":    {`{"code":"sync.forbidden"}`, "the input is JSON"},
		"cut off": {"SSP2\x02\x00\x01\x00", "truncated"},
	} {
		r := invocation{args: []string{"render", "-"}, stdin: tc.in}.run(t)
		require.Equal(t, exitFailed, r.code, name)
		require.Contains(t, r.stderr, tc.want, name)
		require.Empty(t, r.stdout)
	}
	r := runCommand(t, "render", "none.bin")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "none.bin")
}
