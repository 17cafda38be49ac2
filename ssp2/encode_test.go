package ssp2_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// foreign is a frame of another package.
type foreign struct{}

func (foreign) FrameType() ssp2.FrameType { return ssp2.FrameLease }

// TestAppendFrameRefuses has what a decoder would refuse of a single frame.
func TestAppendFrameRefuses(t *testing.T) {
	t.Parallel()

	const tooLarge = int64(1 << 53)
	op := func(op ssp2.Operation) ssp2.Frame {
		return &ssp2.PushCommit{ClientCommitID: "k", Operations: []ssp2.Operation{op}}
	}
	change := func(ch ssp2.Change) ssp2.Frame {
		return &ssp2.Commit{Tables: []string{"t"}, Changes: []ssp2.Change{ch}}
	}
	result := func(r ssp2.OpResult) ssp2.Frame {
		return &ssp2.PushResult{Status: ssp2.PushRejected, Results: []ssp2.OpResult{r}}
	}
	details := func(entries ...ssp2.DetailEntry) ssp2.Frame {
		return &ssp2.PushResultDetails{ClientCommitID: "k", Entries: entries}
	}
	hint := ssp2.DetailEntry{DetailsJSON: `{"reason":"a"}`}
	for rule, f := range map[string]ssp2.Frame{
		"clientId empty":                &ssp2.RequestHeader{SchemaVersion: 1},
		"clientId not UTF-8":            &ssp2.RequestHeader{ClientID: "\xff", SchemaVersion: 1},
		"schemaVersion 0":               &ssp2.RequestHeader{ClientID: "c"},
		"request logEpoch empty":        &ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1, LogEpoch: new("")},
		"clientCommitId empty":          &ssp2.PushCommit{Operations: []ssp2.Operation{{Op: ssp2.OpDelete}}},
		"operation op 0":                op(ssp2.Operation{}),
		"upsert without payload":        op(ssp2.Operation{Op: ssp2.OpUpsert}),
		"delete with payload":           op(ssp2.Operation{Op: ssp2.OpDelete, Payload: []byte{}}),
		"baseVersion above 2^53−1":      op(ssp2.Operation{Op: ssp2.OpDelete, BaseVersion: new(tooLarge)}),
		"rowId not UTF-8":               op(ssp2.Operation{Op: ssp2.OpDelete, RowID: "\xff"}),
		"accept bit 4":                  &ssp2.PullHeader{Accept: 0x10},
		"params no JSON":                &ssp2.Subscription{Params: new("")},
		"subscription cursor":           &ssp2.Subscription{Cursor: -tooLarge},
		"request state no JSON":         &ssp2.Subscription{BootstrapState: new("x")},
		"scope key not UTF-8":           &ssp2.Subscription{Scopes: ssp2.ScopeMap{"\xff": nil}},
		"scope value not UTF-8":         &ssp2.Subscription{Scopes: ssp2.ScopeMap{"k": {"\xff"}}},
		"response logEpoch empty":       &ssp2.ResponseHeader{},
		"leaseId empty":                 &ssp2.Lease{},
		"expiresAtMs above 2^53−1":      &ssp2.Lease{LeaseID: "l", ExpiresAtMs: tooLarge},
		"push status 0":                 &ssp2.PushResult{},
		"applied without commitSeq":     &ssp2.PushResult{Status: ssp2.PushApplied},
		"cached without commitSeq":      &ssp2.PushResult{Status: ssp2.PushCached},
		"rejected with commitSeq":       &ssp2.PushResult{Status: ssp2.PushRejected, CommitSeq: new(int64(1))},
		"result status 0":               result(ssp2.OpResult{}),
		"serverVersion above 2^53−1":    result(ssp2.OpResult{Status: ssp2.OpConflict, ServerVersion: tooLarge}),
		"result message not UTF-8":      result(ssp2.OpResult{Status: ssp2.OpError, Message: "\xff"}),
		"details without entries":       details(),
		"details without commit id":     &ssp2.PushResultDetails{Entries: []ssp2.DetailEntry{hint}},
		"details with opIndex -1":       details(ssp2.DetailEntry{OpIndex: -1, DetailsJSON: hint.DetailsJSON}),
		"details with an opIndex twice": details(hint, hint),
		"details out of bounds":         details(ssp2.DetailEntry{DetailsJSON: `{}`}),
		"sub status 0":                  &ssp2.SubStart{},
		"reasonCode not UTF-8":          &ssp2.SubStart{Status: ssp2.SubReset, ReasonCode: "\xff"},
		"nextCursor above 2^53−1":       &ssp2.SubEnd{NextCursor: tooLarge},
		"response state no JSON":        &ssp2.SubEnd{BootstrapState: new("{")},
		"commitSeq above 2^53−1":        &ssp2.Commit{CommitSeq: tooLarge},
		"table not UTF-8":               &ssp2.Commit{Tables: []string{"\xff"}},
		"tableIndex out of range":       change(ssp2.Change{TableIndex: 1, Op: ssp2.OpDelete}),
		"change op 0":                   change(ssp2.Change{}),
		"upsert without row":            change(ssp2.Change{Op: ssp2.OpUpsert, RowVersion: new(int64(1))}),
		"upsert without rowVersion":     change(ssp2.Change{Op: ssp2.OpUpsert, Row: []byte{}}),
		"delete with row":               change(ssp2.Change{Op: ssp2.OpDelete, Row: []byte{}}),
		"delete with rowVersion":        change(ssp2.Change{Op: ssp2.OpDelete, RowVersion: new(int64(1))}),
		"mediaType 0":                   &ssp2.SegmentRef{},
		"url without expiry":            &ssp2.SegmentRef{MediaType: ssp2.MediaRows, URL: new("u")},
		"expiry without url":            &ssp2.SegmentRef{MediaType: ssp2.MediaRows, URLExpiresAtMs: new(int64(1))},
		"inline segment that is none":   &ssp2.SegmentInline{Payload: []byte("SSG2")},
		"error details no JSON":         &ssp2.ErrorFrame{Details: new("oops")},
		"unknown frame as END":          &ssp2.UnknownFrame{},
		"unknown frame as COMMIT":       &ssp2.UnknownFrame{Type: ssp2.FrameCommit},
		"a frame of another package":    foreign{},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendFrame([]byte("kept"), ssp2.WireV3, f)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
	_, err := ssp2.AppendFrame(nil, ssp2.WireV1, &ssp2.PushCommit{ClientCommitID: "k"})
	require.Equal(t, ssp2.CodeEmptyCommit, ssp2.CodeOf(err))
	_, err = ssp2.AppendFrame(nil, ssp2.WireV1, &ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1, LogEpoch: new("e")})
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "version 1 cannot say it")
	_, err = ssp2.AppendFrame(nil, 4, &ssp2.PullHeader{})
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
}

func TestAppendMessageRefuses(t *testing.T) {
	t.Parallel()

	header := &ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1}
	for rule, m := range map[string]*ssp2.Message{
		"wire version 0":          {Kind: ssp2.KindRequest, Frames: []ssp2.Frame{header, &ssp2.PullHeader{}}},
		"kind 0":                  {WireVersion: 1, Frames: []ssp2.Frame{header, &ssp2.PullHeader{}}},
		"no frames":               request(1),
		"no content":              request(1, header),
		"frames out of order":     request(1, header, &ssp2.PullHeader{}, header),
		"frame of another kind":   request(1, header, &ssp2.PullHeader{}, &ssp2.SubEnd{}),
		"a frame that is refused": request(1, header, &ssp2.PullHeader{Accept: 0xF0}),
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendMessage([]byte("kept"), m)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
}

// TestStoredResultsInEveryVersion renders one stored outcome in the layout of each
// version: older ones leave out what they have no field for.
func TestStoredResultsInEveryVersion(t *testing.T) {
	t.Parallel()

	stored, err := ssp2.AppendResults(nil, []ssp2.OpResult{
		{OpIndex: 1, Status: ssp2.OpConflict, Code: "c", Message: "m", ServerVersion: 3, ServerRow: []byte{1}, ConflictColumns: []byte{2}},
	})
	require.NoError(t, err)
	for v, columns := range map[ssp2.WireVersion][]byte{1: nil, 2: nil, 3: {2}} {
		results, err := ssp2.DecodeResults(stored)
		require.NoError(t, err)
		header := &ssp2.ResponseHeader{LogEpoch: "e"}
		m, err := ssp2.DecodeMessage(mustMessage(respond(v, header, &ssp2.PushResult{Status: ssp2.PushRejected, Results: results})))
		require.NoError(t, err)
		require.Equal(t, columns, m.Frames[1].(*ssp2.PushResult).Results[0].ConflictColumns, "version %d", v)
	}
}

func TestDecodeResultsRefuses(t *testing.T) {
	t.Parallel()

	for rule, b := range map[string][]byte{
		"nothing":         nil,
		"another format":  payload{2}.u32(0),
		"no count":        {1},
		"bytes left over": payload{1}.u32(0).u8(0),
		"status 0":        payload{1}.u32(1).i32(0).u8(0),
	} {
		_, err := ssp2.DecodeResults(b)
		require.Equal(t, ssp2.CodeIdempotencyCacheMiss, ssp2.CodeOf(err), rule)
	}
	dst, err := ssp2.AppendResults([]byte("kept"), []ssp2.OpResult{{}})
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	require.Equal(t, "kept", string(dst))
}

func TestNamesOfTheWire(t *testing.T) {
	t.Parallel()

	require.Equal(t, "SUB_START", ssp2.FrameSubStart.String())
	require.Equal(t, "END", ssp2.FrameEnd.String())
	require.Equal(t, "UNKNOWN(0x17)", ssp2.FrameType(0x17).String())
	require.Equal(t, "response", ssp2.KindResponse.String())
	require.Equal(t, "Kind(9)", ssp2.Kind(9).String())
	require.Equal(t, "blob_ref", ssp2.TypeBlobRef.String())
	require.Equal(t, "ColumnType(9)", ssp2.ColumnType(9).String())
	require.Equal(t, "unknown", ssp2.Op(9).String())
	require.Equal(t, "unknown", ssp2.PushStatus(9).String())
	require.Equal(t, "unknown", ssp2.OpStatus(9).String())
	require.Equal(t, "unknown", ssp2.SubStatus(9).String())
	require.Equal(t, "unknown", ssp2.MediaType(9).String())
}
