package ssp2_test

import (
	"bytes"
	"maps"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

func sortedVariables(m map[string]string) []string {
	return slices.SortedFunc(maps.Keys(m), ssp2.CompareUTF16)
}

func drawBytes(t *rapid.T, name string) []byte {
	return rapid.SliceOfN(rapid.Byte(), 0, 12).Draw(t, name)
}

func drawI64(t *rapid.T, name string) int64 {
	return rapid.OneOf(
		rapid.SampledFrom([]int64{0, -1, ssp2.MaxSafeInteger, -ssp2.MaxSafeInteger}),
		rapid.Int64Range(-ssp2.MaxSafeInteger, ssp2.MaxSafeInteger),
	).Draw(t, name)
}

// some draws nothing or a value.
func some[T any](t *rapid.T, name string, draw func(*rapid.T, string) T) *T {
	if !rapid.Bool().Draw(t, name+" present") {
		return nil
	}
	return new(draw(t, name))
}

func drawStr(t *rapid.T, name string) string { return rapid.StringN(0, 8, -1).Draw(t, name) }

func drawID(t *rapid.T, name string) string { return rapid.StringN(1, 8, -1).Draw(t, name) }

func drawI32(t *rapid.T, name string) int32 { return rapid.Int32().Draw(t, name) }

func drawDoc(t *rapid.T, name string) string { return drawJSON(t, 2) }

// variable draws scope variables that may stand in the form variable=value.
var variable = rapid.StringOfN(rapid.Rune().Filter(func(r rune) bool { return r != '=' }), 0, 4, -1)

func drawScopeMap(t *rapid.T) ssp2.ScopeMap {
	return rapid.MapOfN(rapid.StringN(0, 4, -1), rapid.SliceOfN(rapid.StringN(0, 4, -1), 0, 3), 0, 3).Draw(t, "scopes")
}

func drawCommit(t *rapid.T) *ssp2.Commit {
	c := &ssp2.Commit{
		CommitSeq: drawI64(t, "seq"), CreatedAtMs: drawI64(t, "at"), ActorID: drawStr(t, "actor"),
		Tables: rapid.SliceOfN(rapid.StringN(0, 5, -1), 0, 3).Draw(t, "tables"),
	}
	if len(c.Tables) == 0 {
		return c
	}
	for range rapid.IntRange(0, 4).Draw(t, "changes") {
		ch := ssp2.Change{
			TableIndex: uint16(rapid.IntRange(0, len(c.Tables)-1).Draw(t, "table")), RowID: drawStr(t, "row"), Op: ssp2.OpDelete,
			Scopes: rapid.MapOfN(variable, rapid.StringN(0, 5, -1), 0, 3).Draw(t, "scopes"),
		}
		if rapid.Bool().Draw(t, "upsert") {
			ch.Op, ch.RowVersion, ch.Row = ssp2.OpUpsert, new(drawI64(t, "version")), drawBytes(t, "row")
		}
		c.Changes = append(c.Changes, ch)
	}
	return c
}

func drawUnknown(t *rapid.T) []ssp2.Frame {
	if rapid.IntRange(0, 3).Draw(t, "unknown") > 0 {
		return nil
	}
	types := []ssp2.FrameType{0x05, 0x17, 0x18, 0x1A, 0x1C, 0x20, 0x80, 0xFF}
	return []ssp2.Frame{&ssp2.UnknownFrame{Type: rapid.SampledFrom(types).Draw(t, "type"), Payload: drawBytes(t, "payload")}}
}

func drawVersion(t *rapid.T) ssp2.WireVersion {
	return rapid.SampledFrom([]ssp2.WireVersion{1, 2, 3}).Draw(t, "wire version")
}

func drawRequest(t *rapid.T) *ssp2.Message {
	m := &ssp2.Message{WireVersion: drawVersion(t), Kind: ssp2.KindRequest}
	header := &ssp2.RequestHeader{ClientID: drawID(t, "client"), SchemaVersion: rapid.Int32Min(1).Draw(t, "schema")}
	if m.WireVersion >= ssp2.WireV2 {
		header.LogEpoch = some(t, "epoch", drawID)
	}
	m.Frames = append(m.Frames, header)
	commits := rapid.IntRange(0, 2).Draw(t, "commits")
	for range commits {
		c := &ssp2.PushCommit{ClientCommitID: drawID(t, "commit")}
		for range rapid.IntRange(1, 4).Draw(t, "operations") {
			op := ssp2.Operation{
				Table: drawStr(t, "table"), RowID: drawStr(t, "row"), Op: ssp2.OpDelete, BaseVersion: some(t, "base", drawI64),
			}
			if rapid.Bool().Draw(t, "upsert") {
				op.Op, op.Payload = ssp2.OpUpsert, drawBytes(t, "payload")
			}
			c.Operations = append(c.Operations, op)
		}
		m.Frames = append(append(m.Frames, drawUnknown(t)...), c)
	}
	if commits == 0 || rapid.Bool().Draw(t, "pull") {
		m.Frames = append(append(m.Frames, drawUnknown(t)...), &ssp2.PullHeader{
			LimitCommits: drawI32(t, "limit"), LimitSnapshotRows: drawI32(t, "rows"), MaxSnapshotPages: drawI32(t, "pages"),
			Accept: ssp2.Accept(rapid.IntRange(0, 15).Draw(t, "accept")),
		})
		for range rapid.IntRange(0, 2).Draw(t, "subscriptions") {
			m.Frames = append(append(m.Frames, drawUnknown(t)...), &ssp2.Subscription{
				ID: drawStr(t, "id"), Table: drawStr(t, "table"), Scopes: drawScopeMap(t), Params: some(t, "params", drawDoc),
				Cursor: drawI64(t, "cursor"), BootstrapState: some(t, "state", drawDoc),
			})
		}
	}
	return m
}

func drawResults(t *rapid.T, v ssp2.WireVersion) []ssp2.OpResult {
	var results []ssp2.OpResult
	for range rapid.IntRange(0, 3).Draw(t, "results") {
		r := ssp2.OpResult{OpIndex: drawI32(t, "op"), Status: ssp2.OpStatus(rapid.IntRange(1, 3).Draw(t, "status"))}
		switch r.Status {
		case ssp2.OpApplied:
		case ssp2.OpConflict:
			r.Code, r.Message = drawStr(t, "code"), drawStr(t, "message")
			r.ServerVersion, r.ServerRow = drawI64(t, "version"), drawBytes(t, "row")
			if v >= ssp2.WireV3 {
				r.ConflictColumns = drawBytes(t, "columns")
			}
		case ssp2.OpError:
			r.Code, r.Message, r.Retryable = drawStr(t, "code"), drawStr(t, "message"), rapid.Bool().Draw(t, "retryable")
		}
		results = append(results, r)
	}
	return results
}

func drawSegmentRef(t *rapid.T) *ssp2.SegmentRef {
	ref := &ssp2.SegmentRef{
		SegmentID: drawStr(t, "segment"), MediaType: ssp2.MediaType(rapid.IntRange(1, 2).Draw(t, "media")),
		Table: drawStr(t, "table"), ByteLength: drawI64(t, "bytes"), RowCount: drawI64(t, "rows"), AsOfCommitSeq: drawI64(t, "seq"),
		ScopeDigest: drawStr(t, "digest"), RowCursor: some(t, "from", drawStr), NextRowCursor: some(t, "to", drawStr),
	}
	if rapid.Bool().Draw(t, "signed") {
		ref.URL, ref.URLExpiresAtMs = new(drawStr(t, "url")), new(drawI64(t, "expires"))
	}
	return ref
}

func drawResponse(t *rapid.T) *ssp2.Message {
	m := &ssp2.Message{WireVersion: drawVersion(t), Kind: ssp2.KindResponse}
	header := &ssp2.ResponseHeader{
		RequiredSchemaVersion: some(t, "required", drawI32), LatestSchemaVersion: some(t, "latest", drawI32),
	}
	if m.WireVersion >= ssp2.WireV2 {
		header.LogEpoch, header.ResetRequired = drawID(t, "epoch"), rapid.Bool().Draw(t, "reset")
	}
	add := func(f ssp2.Frame) { m.Frames = append(append(m.Frames, drawUnknown(t)...), f) }
	m.Frames = append(m.Frames, header)
	if rapid.Bool().Draw(t, "lease") {
		add(&ssp2.Lease{LeaseID: drawID(t, "lease"), ExpiresAtMs: drawI64(t, "expires")})
	}
	for range rapid.IntRange(0, 2).Draw(t, "push results") {
		r := &ssp2.PushResult{ClientCommitID: drawID(t, "commit"), Status: ssp2.PushRejected, Results: drawResults(t, m.WireVersion)}
		if rapid.Bool().Draw(t, "applied") {
			r.Status, r.CommitSeq = ssp2.PushStatus(rapid.IntRange(1, 2).Draw(t, "status")), new(drawI64(t, "seq"))
		}
		add(r)
		for _, result := range r.Results {
			if r.Status == ssp2.PushRejected && result.Status == ssp2.OpError && result.OpIndex >= 0 {
				add(&ssp2.PushResultDetails{ClientCommitID: r.ClientCommitID, Entries: []ssp2.DetailEntry{
					{OpIndex: result.OpIndex, DetailsJSON: ` {"reason":"r","references":{"k":"v"}}`},
				}})
				break
			}
		}
	}
	failed := false
	for range rapid.IntRange(0, 2).Draw(t, "subscriptions") {
		add(&ssp2.SubStart{
			ID: drawStr(t, "id"), Status: ssp2.SubStatus(rapid.IntRange(1, 3).Draw(t, "status")), ReasonCode: drawStr(t, "reason"),
			EffectiveScopes: drawScopeMap(t), Bootstrap: rapid.Bool().Draw(t, "bootstrap"),
		})
		commits := rapid.Bool().Draw(t, "commits")
		for range rapid.IntRange(0, 2).Draw(t, "parts") {
			switch {
			case commits:
				add(drawCommit(t))
			case rapid.Bool().Draw(t, "inline"):
				add(&ssp2.SegmentInline{Payload: mustSegment(drawSegment(t))})
			default:
				add(drawSegmentRef(t))
			}
		}
		if failed = rapid.IntRange(0, 4).Draw(t, "failed") == 0; failed {
			break
		}
		add(&ssp2.SubEnd{NextCursor: drawI64(t, "cursor"), BootstrapState: some(t, "state", drawDoc)})
	}
	if failed || rapid.IntRange(0, 4).Draw(t, "error") == 0 {
		add(&ssp2.ErrorFrame{
			Code: drawStr(t, "code"), Message: drawStr(t, "message"), Category: drawStr(t, "category"),
			Retryable: rapid.Bool().Draw(t, "retryable"), RecommendedAction: drawStr(t, "action"), Details: some(t, "details", drawDoc),
		})
		return m
	}
	m.Frames = append(m.Frames, drawUnknown(t)...)
	return m
}

func drawColumns(t *rapid.T) []ssp2.Column {
	var cols []ssp2.Column
	for range rapid.IntRange(0, 18).Draw(t, "columns") {
		cols = append(cols, ssp2.Column{
			Name: drawStr(t, "name"), Type: ssp2.ColumnType(rapid.IntRange(1, 8).Draw(t, "type")), Nullable: rapid.Bool().Draw(t, "nullable"),
		})
	}
	return cols
}

func drawValue(t *rapid.T, col ssp2.Column) ssp2.Value {
	if col.Nullable && rapid.Bool().Draw(t, "null") {
		return null()
	}
	switch col.Type {
	case ssp2.TypeString:
		return text(drawStr(t, "string"))
	case ssp2.TypeInteger:
		return integer(drawI64(t, "integer"))
	case ssp2.TypeFloat:
		return float(rapid.Float64().Draw(t, "float"))
	case ssp2.TypeBoolean:
		return integer(rapid.Int64Range(0, 1).Draw(t, "boolean"))
	case ssp2.TypeJSON:
		return text(drawJSON(t, 2))
	case ssp2.TypeBlobRef:
		return text(blobRefText)
	default:
		return raw(drawBytes(t, "bytes")...)
	}
}

func drawRow(t *rapid.T, cols []ssp2.Column) []ssp2.Value {
	vals := make([]ssp2.Value, len(cols))
	for i := range cols {
		vals[i] = drawValue(t, cols[i])
	}
	return vals
}

func drawSegment(t *rapid.T) *ssp2.Segment {
	s := &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{
		Table: drawStr(t, "table"), SchemaVersion: drawI32(t, "schema"), Columns: drawColumns(t),
	}}
	for range rapid.IntRange(0, 2).Draw(t, "blocks") {
		var block []ssp2.SegmentRow
		for range rapid.IntRange(1, 3).Draw(t, "rows") {
			block = append(block, ssp2.SegmentRow{
				ServerVersion: rapid.Int64Range(1, ssp2.MaxSafeInteger).Draw(t, "version"), Row: mustRow(s.Columns, drawRow(t, s.Columns)),
			})
		}
		s.Blocks = append(s.Blocks, block)
	}
	return s
}

func drawMessage(t *rapid.T) *ssp2.Message {
	if rapid.Bool().Draw(t, "request") {
		return drawRequest(t)
	}
	return drawResponse(t)
}

func TestMessageRoundTrip(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		m := drawMessage(t)
		bin, err := ssp2.AppendMessage([]byte("before"), m)
		require.NoError(t, err)
		require.Equal(t, "before", string(bin[:6]))
		bin = bin[6:]

		got, err := ssp2.DecodeMessage(bin)
		require.NoError(t, err)
		require.Empty(t, diff(m, got))
		streamed, err := readAll(ssp2.NewReader(iotest.OneByteReader(bytes.NewReader(bin)), ssp2.Limits{}))
		require.NoError(t, err)
		require.Empty(t, diff(m, streamed))
		require.Equal(t, bin, mustMessage(got))

		rendered, err := ssp2.Render(bin)
		require.NoError(t, err)
		require.True(t, ssp2.ValidJSON(rendered))

		if m.Kind == ssp2.KindRequest {
			req, err := m.Request()
			require.NoError(t, err)
			decoded, err := ssp2.DecodeRequest(bin)
			require.NoError(t, err)
			require.Empty(t, diff(req, decoded))
			read, err := ssp2.ReadRequest(bytes.NewReader(bin), ssp2.Limits{})
			require.NoError(t, err)
			require.Empty(t, diff(req, read))
			again, err := ssp2.DecodeRequest(mustMessage(req.Message()))
			require.NoError(t, err)
			require.Empty(t, diff(req, again))
		}
	})
}

// TestMessageTruncated cuts messages at every byte.
func TestMessageTruncated(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		bin := mustMessage(drawMessage(t))
		for n := range bin {
			_, err := ssp2.DecodeMessage(bin[:n])
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		}
		_, err := readBytes(bin[:rapid.IntRange(0, len(bin)-1).Draw(t, "cut")])
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	})
}

// TestMessageDamaged changes one byte of a message: what still decodes encodes
// to the same bytes again.
func TestMessageDamaged(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		bin := mustMessage(drawMessage(t))
		bin[rapid.IntRange(0, len(bin)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		requireCanonical(t, bin)
	})
}

// requireCanonical checks what holds for every input: either all ways to decode
// refuse it with the same error, or it encodes to the very same bytes.
func requireCanonical(t require.TestingT, bin []byte) {
	m, err := ssp2.DecodeMessage(bin)
	streamed, streamErr := readBytes(bin)
	if err != nil {
		require.NotEmpty(t, ssp2.CodeOf(err))
		require.Equal(t, ssp2.CodeOf(err), ssp2.CodeOf(streamErr))
		return
	}
	require.NoError(t, streamErr)
	for _, decoded := range []*ssp2.Message{m, streamed} {
		again, err := ssp2.AppendMessage(nil, decoded)
		require.NoError(t, err)
		require.Equal(t, bin, again)
	}
	rendered, err := ssp2.Render(bin)
	require.NoError(t, err)
	require.True(t, ssp2.ValidJSON(rendered))
}

func TestRowRoundTrip(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		cols := drawColumns(t)
		vals := drawRow(t, cols)
		row := mustRow(cols, vals)
		got, err := ssp2.DecodeRow(cols, row, nil)
		require.NoError(t, err)
		require.Empty(t, diff(vals, got))
		require.Equal(t, row, mustRow(cols, got))

		n, err := ssp2.ScanRow(cols, append(bytes.Clone(row), drawBytes(t, "tail")...))
		require.NoError(t, err)
		require.Equal(t, len(row), n)
		for cut := range row {
			_, err := ssp2.DecodeRow(cols, row[:cut], nil)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		}
	})
}

func TestSparseRowRoundTrip(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		cols := append(drawColumns(t), ssp2.Column{Name: "key", Type: ssp2.TypeString})
		key := len(cols) - 1
		vals := drawRow(t, cols)
		present := ssp2.NewBitmap(len(cols))
		present.Set(key)
		for i := range vals {
			if rapid.Bool().Draw(t, "present") {
				present.Set(i)
			} else if i != key {
				vals[i] = ssp2.Value{}
			}
		}
		row, err := ssp2.AppendSparseRow(nil, cols, key, present, vals)
		require.NoError(t, err)
		got, has, err := ssp2.DecodeSparseRow(cols, key, row, nil)
		require.NoError(t, err)
		require.Equal(t, present, has)
		require.Empty(t, diff(vals, got))
		for cut := range row {
			_, _, err := ssp2.DecodeSparseRow(cols, key, row[:cut], nil)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		}
	})
}

func TestSegmentRoundTrip(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		s := drawSegment(t)
		bin := mustSegment(s)
		got, err := ssp2.DecodeSegment(bin)
		require.NoError(t, err)
		require.Empty(t, diff(s, got))
		require.NoError(t, ssp2.CheckSegment(bin))
		streamed, err := readSegment(bin)
		require.NoError(t, err)
		require.Empty(t, diff(s, streamed))
		require.Equal(t, bin, mustSegment(got))
		rendered, err := ssp2.Render(bin)
		require.NoError(t, err)
		require.True(t, ssp2.ValidJSON(rendered))
		for cut := range bin {
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(ssp2.CheckSegment(bin[:cut])))
		}
		_, err = readSegment(bin[:rapid.IntRange(0, len(bin)-1).Draw(t, "cut")])
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	})
}

func TestResultsRoundTrip(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		results := drawResults(t, ssp2.WireV3)
		bin, err := ssp2.AppendResults([]byte("before"), results)
		require.NoError(t, err)
		require.Equal(t, "before\x01", string(bin[:7]))
		got, err := ssp2.DecodeResults(bin[6:])
		require.NoError(t, err)
		require.Empty(t, diff(results, got))
		for cut := 6; cut < len(bin); cut++ {
			_, err := ssp2.DecodeResults(bin[6:cut])
			require.Equal(t, ssp2.CodeIdempotencyCacheMiss, ssp2.CodeOf(err))
		}
	})
}

// TestRandomBytes throws noise at every decoder.
func TestRandomBytes(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		noise := rapid.SliceOfN(rapid.Byte(), 0, 64).Draw(t, "noise")
		prefix := rapid.SampledFrom([]string{"", "SSP2\x01\x00\x01\x00", "SSP2\x03\x00\x02\x00", "SSG2\x01\x00\x00\x00", "{"}).Draw(t, "prefix")
		b := append([]byte(prefix), noise...)
		requireCanonical(t, b)
		_, _ = ssp2.DecodeSegment(b)
		_, _ = ssp2.Render(b)
		_, _ = ssp2.DecodeResults(b)
		_, _ = ssp2.ParseServerEvent(b)
		_, _ = ssp2.ParseClientEvent(b)
		_, _ = ssp2.ParseDetails(string(b))
		_, _ = ssp2.ParseBlobRef(b)
		cols := drawColumns(t)
		_, _ = ssp2.DecodeRow(cols, b, nil)
		_, _, _ = ssp2.DecodeSparseRow(cols, 0, b, nil)
	})
}
