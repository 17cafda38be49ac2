package ssp2_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

var update = flag.Bool("update", false, "write the vectors in testdata anew")

// vector is one case of our own golden vectors. One of message, segment,
// event, sparse, bin and text says what it is.
type vector struct {
	kind, name string
	covers     string
	message    *ssp2.Message
	segment    *ssp2.Segment
	event      ssp2.ControlEvent
	sparse     []byte    // a sparse row of specimenColumns, without rendering
	bin        []byte    // an invalid binary case
	text       string    // an invalid control event
	code       ssp2.Code // what decoding it gives
}

// specimenColumns has a column of every type.
var specimenColumns = []ssp2.Column{
	{Name: "specimen_id", Type: ssp2.TypeString},
	{Name: "found", Type: ssp2.TypeInteger},
	{Name: "weight", Type: ssp2.TypeFloat, Nullable: true},
	{Name: "sealed", Type: ssp2.TypeBoolean},
	{Name: "labels", Type: ssp2.TypeJSON, Nullable: true},
	{Name: "thumb", Type: ssp2.TypeBytes, Nullable: true},
	{Name: "scan", Type: ssp2.TypeBlobRef, Nullable: true},
	{Name: "remarks", Type: ssp2.TypeCRDT, Nullable: true},
	{Name: "place", Type: ssp2.TypeString, Nullable: true},
}

const blobRefText = `{"blobId":"sha256:` +
	`00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff` +
	`","byteLength":20480,"mediaType":"image/tiff","name":"côté A.tif"}`

func text(s string) ssp2.Value   { return ssp2.Value{Bytes: []byte(s)} }
func raw(b ...byte) ssp2.Value   { return ssp2.Value{Bytes: b} }
func integer(i int64) ssp2.Value { return ssp2.Value{Int: i} }
func float(f float64) ssp2.Value { return ssp2.Value{Float: f} }
func null() ssp2.Value           { return ssp2.Value{Null: true} }

// fullSpecimen, bareSpecimen and edgeSpecimen are rows of specimenColumns: every
// column set, every nullable one NULL, and values at the edges.
func fullSpecimen() []ssp2.Value {
	return []ssp2.Value{
		text("sp-7"), integer(-12), float(0.375), integer(1), text(`{"era" : ["J","K"],  "n": 1e2}`),
		raw(0, 1, 254, 255), text(blobRefText), raw(9, 8, 7), text("Čachtice 𝛼"),
	}
}

func bareSpecimen() []ssp2.Value {
	return []ssp2.Value{
		text("sp-8"), integer(0), null(), integer(0), null(), null(), null(), null(), null(),
	}
}

func edgeSpecimen() []ssp2.Value {
	return []ssp2.Value{
		text(""), integer(ssp2.MaxSafeInteger), float(math.Inf(-1)), integer(0), text(`"\ud83d\udcdd\u0041"`),
		raw(), text(blobRefText), raw(), text("\u2028\U0001F9EA\ufffd"),
	}
}

func mustRow(cols []ssp2.Column, vals []ssp2.Value) []byte {
	row, err := ssp2.AppendRow(nil, cols, vals)
	if err != nil {
		panic(err)
	}
	return row
}

// sparseSpecimen is a sparse row of specimenColumns: key, a NULL, a json and an
// empty crdt.
func sparseSpecimen() []byte {
	present := ssp2.NewBitmap(len(specimenColumns))
	for _, i := range []int{0, 2, 4, 7} {
		present.Set(i)
	}
	vals := bareSpecimen()
	vals[4], vals[7] = text(`[1.50, null]`), raw()
	row, err := ssp2.AppendSparseRow(nil, specimenColumns, 0, present, vals)
	if err != nil {
		panic(err)
	}
	return row
}

func specimenSegment() *ssp2.Segment {
	row := func(version int64, vals []ssp2.Value) ssp2.SegmentRow {
		return ssp2.SegmentRow{ServerVersion: version, Row: mustRow(specimenColumns, vals)}
	}
	return &ssp2.Segment{
		SegmentHeader: ssp2.SegmentHeader{Table: "specimens", SchemaVersion: 4, Columns: specimenColumns},
		Blocks: [][]ssp2.SegmentRow{
			{row(1, fullSpecimen()), row(19, bareSpecimen())},
			{row(ssp2.MaxSafeInteger, edgeSpecimen())},
		},
	}
}

func mustSegment(s *ssp2.Segment) []byte {
	b, err := ssp2.AppendSegment(nil, s)
	if err != nil {
		panic(err)
	}
	return b
}

func mustMessage(m *ssp2.Message) []byte {
	b, err := ssp2.AppendMessage(nil, m)
	if err != nil {
		panic(err)
	}
	return b
}

func request(v ssp2.WireVersion, frames ...ssp2.Frame) *ssp2.Message {
	return &ssp2.Message{WireVersion: v, Kind: ssp2.KindRequest, Frames: frames}
}

func response(v ssp2.WireVersion, frames ...ssp2.Frame) *ssp2.Message {
	return &ssp2.Message{WireVersion: v, Kind: ssp2.KindResponse, Frames: frames}
}

func section(start *ssp2.SubStart, frames ...ssp2.Frame) []ssp2.Frame {
	return append([]ssp2.Frame{start}, frames...)
}

func respond(v ssp2.WireVersion, header *ssp2.ResponseHeader, frames ...ssp2.Frame) *ssp2.Message {
	return response(v, append([]ssp2.Frame{header}, frames...)...)
}

// vectors are the cases of Appendix A that are wire messages, segments or control
// events, and those of wire version 3, with values of our own.
func vectors() []vector {
	header := func() *ssp2.RequestHeader { return &ssp2.RequestHeader{ClientID: "tablet-3", SchemaVersion: 4} }
	epochHeader := func() *ssp2.RequestHeader {
		return &ssp2.RequestHeader{ClientID: "tablet-3", SchemaVersion: 4, LogEpoch: new("epoch:k4t9")}
	}
	specimens := func(cursor int64) *ssp2.Subscription {
		return &ssp2.Subscription{
			ID: "s/specimens", Table: "specimens",
			Scopes: ssp2.ScopeMap{"dig": {"north", "south"}, "museum": {"m-1"}}, Cursor: cursor,
		}
	}
	active := func(bootstrap bool) *ssp2.SubStart {
		return &ssp2.SubStart{
			ID: "s/specimens", Status: ssp2.SubActive,
			EffectiveScopes: ssp2.ScopeMap{"dig": {"north"}, "museum": {"m-1"}}, Bootstrap: bootstrap,
		}
	}
	scopes := func() map[string]string { return map[string]string{"dig": "north", "museum": "m-1"} }
	upsert := func(rowID string, vals []ssp2.Value) ssp2.Operation {
		return ssp2.Operation{
			Table: "specimens", RowID: rowID, Op: ssp2.OpUpsert, Payload: mustRow(specimenColumns, vals),
		}
	}
	based := func(op ssp2.Operation, version int64) ssp2.Operation {
		op.BaseVersion = &version
		return op
	}
	applied := func(status ssp2.PushStatus) *ssp2.PushResult {
		return &ssp2.PushResult{
			ClientCommitID: "cc-100", Status: status, CommitSeq: new(int64(4096)),
			Results: []ssp2.OpResult{{OpIndex: 0, Status: ssp2.OpApplied}, {OpIndex: 1, Status: ssp2.OpApplied}},
		}
	}
	conflict := func() *ssp2.PushResult {
		return &ssp2.PushResult{
			ClientCommitID: "cc-101", Status: ssp2.PushRejected,
			Results: []ssp2.OpResult{{
				OpIndex: 3, Status: ssp2.OpConflict, Code: string(ssp2.CodeVersionConflict), Message: "the row moved on",
				ServerVersion: 12, ServerRow: mustRow(specimenColumns, fullSpecimen()),
			}},
		}
	}
	columnConflict := conflict()
	columnConflict.Results[0].ConflictColumns = []byte{0b0001_0100, 0b1}

	const hexDigest = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4"
	notes := []ssp2.Column{
		{Name: "page", Type: ssp2.TypeString},
		{Name: "ink", Type: ssp2.TypeCRDT, Nullable: true},
	}
	crdtRow := func(page string, ink ssp2.Value) []byte { return mustRow(notes, []ssp2.Value{text(page), ink}) }

	return []vector{
		{
			kind: "request", name: "pull-minimal", covers: "A header, a pull and one caught-up subscription",
			message: request(ssp2.WireV1, header(),
				&ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows}, specimens(8)),
		},
		{
			kind: "request", name: "pull-bootstrap",
			covers: "A fresh bootstrap with params and a resumed one with its state, every accept bit",
			message: request(ssp2.WireV1, header(),
				&ssp2.PullHeader{LimitCommits: 250, LimitSnapshotRows: 5000, MaxSnapshotPages: 2, Accept: 0x0F},
				&ssp2.Subscription{
					ID: "s/new", Table: "specimens", Scopes: ssp2.ScopeMap{"dig": {"*x", ""}, "museum": {}},
					Params: new(` { "season" : [2021, 2022] } `), Cursor: -1,
				},
				&ssp2.Subscription{
					ID: "s/again", Table: "layers", Scopes: ssp2.ScopeMap{"dig": {"north"}}, Cursor: 77,
					BootstrapState: new(`{"pin":77,"after":"lay-0900"}`),
				}),
		},
		{
			kind: "request", name: "push-multi-commit",
			covers: "Two commits: base versions, NULLs, empty and non-BMP strings, raw JSON; a delete with a base version",
			message: request(ssp2.WireV1, header(),
				&ssp2.PushCommit{ClientCommitID: "cc-100", Operations: []ssp2.Operation{
					based(upsert("sp-7", fullSpecimen()), 0), upsert("sp-8", bareSpecimen()), upsert("", edgeSpecimen()),
				}},
				&ssp2.PushCommit{ClientCommitID: "cc-101", Operations: []ssp2.Operation{
					{Table: "layers", RowID: "lay-1", Op: ssp2.OpDelete},
					based(ssp2.Operation{Table: "specimens", RowID: "sp-9", Op: ssp2.OpDelete}, 6),
				}}),
		},
		{
			kind: "request", name: "combined", covers: "Push and pull in one envelope",
			message: request(ssp2.WireV1, header(),
				&ssp2.PushCommit{ClientCommitID: "cc-102", Operations: []ssp2.Operation{upsert("sp-8", bareSpecimen())}},
				&ssp2.PullHeader{Accept: ssp2.AcceptInlineRows}, specimens(4096)),
		},
		{
			kind: "request", name: "epoch-bound", covers: "Wire version 2 with the log epoch of the client",
			message: request(ssp2.WireV2, epochHeader(), &ssp2.PullHeader{Accept: 0x07}, specimens(4096)),
		},
		{
			kind: "request", name: "epoch-acquisition", covers: "Wire version 2 without a log epoch",
			message: request(ssp2.WireV2, header(), &ssp2.PullHeader{Accept: 0x03}),
		},
		{
			kind: "response", name: "pull-empty", covers: "An active subscription whose cursor moves without commits",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{LatestSchemaVersion: new(int32(5))},
				section(active(false), &ssp2.SubEnd{NextCursor: 4100})...),
		},
		{
			kind: "response", name: "commits-incremental",
			covers: "Two COMMIT frames with every column type, NULLs, two tables and a delete",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				section(active(false),
					&ssp2.Commit{
						CommitSeq: 4097, CreatedAtMs: 1_700_000_000_000, ActorID: "ada", Tables: []string{"specimens"},
						Changes: []ssp2.Change{{
							RowID: "sp-7", Op: ssp2.OpUpsert, RowVersion: new(int64(2)), Scopes: scopes(),
							Row: mustRow(specimenColumns, fullSpecimen()),
						}},
					},
					&ssp2.Commit{
						CommitSeq: 4099, CreatedAtMs: 1_700_000_000_250, ActorID: "grace", Tables: []string{"layers", "specimens"},
						Changes: []ssp2.Change{
							{TableIndex: 1, RowID: "", Op: ssp2.OpUpsert, RowVersion: new(int64(1)), Scopes: scopes(), Row: mustRow(specimenColumns, edgeSpecimen())},
							{TableIndex: 0, RowID: "lay-1", Op: ssp2.OpDelete, Scopes: map[string]string{"dig": "north"}},
						},
					},
					&ssp2.SubEnd{NextCursor: 4099})...),
		},
		{
			kind: "response", name: "bootstrap-segments",
			covers: "SEGMENT_REF with and without a URL, SEGMENT_INLINE, an incomplete bootstrap",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				section(active(true),
					&ssp2.SegmentRef{
						SegmentID: "sha256:" + hexDigest, MediaType: ssp2.MediaSQLite, Table: "specimens", ByteLength: 40960,
						RowCount: 1200, AsOfCommitSeq: 77, ScopeDigest: hexDigest,
						URL: new("https://cdn.example.org/seg?st=opaque"), URLExpiresAtMs: new(int64(1_700_000_900_000)),
					},
					&ssp2.SegmentRef{
						SegmentID: "sha256:" + hexDigest, MediaType: ssp2.MediaRows, Table: "specimens", ByteLength: 300000,
						RowCount: 1000, AsOfCommitSeq: 77, ScopeDigest: hexDigest,
						RowCursor: new("sp-1000"), NextRowCursor: new("sp-2000"),
					},
					&ssp2.SegmentInline{Payload: mustSegment(specimenSegment())},
					&ssp2.SubEnd{NextCursor: 77, BootstrapState: new(`["layers",1]`)})...),
		},
		{
			kind: "response", name: "push-applied", covers: "Every operation applied",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{}, applied(ssp2.PushApplied)),
		},
		{
			kind: "response", name: "push-conflict", covers: "A rejected commit with the server's row",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{}, conflict()),
		},
		{
			kind: "response", name: "push-cached", covers: "A replay of an applied commit",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{}, applied(ssp2.PushCached)),
		},
		{
			kind: "response", name: "push-details", covers: "An error result and its PUSH_RESULT_DETAILS",
			message: respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "epoch:k4t9"},
				&ssp2.PushResult{ClientCommitID: "cc-103", Status: ssp2.PushRejected, Results: []ssp2.OpResult{{
					OpIndex: 1, Status: ssp2.OpError, Code: "museum.closed", Message: "closed on Mondays", Retryable: true,
				}}},
				&ssp2.PushResultDetails{ClientCommitID: "cc-103", Entries: []ssp2.DetailEntry{{
					OpIndex:     1,
					DetailsJSON: `{"fieldPaths":["opening.day"],"reason":"closed_day","requiredAction":"pick-other.day","references":{"rule":"R 12"}}`,
				}}}),
		},
		{
			kind: "response", name: "subscription-revoked", covers: "SUB_START with status revoked",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				&ssp2.SubStart{ID: "s/specimens", Status: ssp2.SubRevoked, ReasonCode: string(ssp2.CodeScopeRevoked)},
				&ssp2.SubEnd{NextCursor: 8}),
		},
		{
			kind: "response", name: "cursor-reset", covers: "SUB_START with status reset",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				&ssp2.SubStart{ID: "s/specimens", Status: ssp2.SubReset, ReasonCode: string(ssp2.CodeCursorExpired)},
				&ssp2.SubEnd{NextCursor: 8}),
		},
		{
			kind: "response", name: "error-mid-stream", covers: "ERROR inside an open subscription",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				section(active(false), (&ssp2.Error{
					Code: ssp2.CodeMissingScopes, Message: "a change has no scopes", Details: `{"table":"specimens"}`,
				}).Frame())...),
		},
		{
			kind: "response", name: "unknown-frame-skip", covers: "Frames without a layout, kept in place",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				&ssp2.UnknownFrame{Type: 0x18, Payload: []byte("from the future")},
				active(false),
				&ssp2.UnknownFrame{Type: 0x2A, Payload: []byte{}},
				&ssp2.SubEnd{NextCursor: 9},
				&ssp2.UnknownFrame{Type: 0xFE, Payload: []byte{0, 255}}),
		},
		{
			kind: "response", name: "schema-floor", covers: "Both schema versions, nothing else",
			message: respond(ssp2.WireV1,
				&ssp2.ResponseHeader{RequiredSchemaVersion: new(int32(6)), LatestSchemaVersion: new(int32(9))}),
		},
		{
			kind: "response", name: "commit-crdt-merge", covers: "A COMMIT with a merged crdt column",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				section(active(false), &ssp2.Commit{
					CommitSeq: 4101, CreatedAtMs: 1_700_000_001_000, ActorID: "ada", Tables: []string{"notes"},
					Changes: []ssp2.Change{{
						RowID: "p-1", Op: ssp2.OpUpsert, RowVersion: new(int64(5)), Scopes: scopes(), Row: crdtRow("p-1", raw(1, 0, 250)),
					}},
				}, &ssp2.SubEnd{NextCursor: 4101})...),
		},
		{
			kind: "response", name: "lease-issued", covers: "LEASE directly behind RESP_HEADER",
			message: respond(ssp2.WireV1, &ssp2.ResponseHeader{},
				append([]ssp2.Frame{&ssp2.Lease{LeaseID: "lease-00af", ExpiresAtMs: 1_700_003_600_000}},
					section(active(false), &ssp2.SubEnd{NextCursor: 9})...)...),
		},
		{
			kind: "response", name: "epoch-reset", covers: "Wire version 2, header only, with resetRequired",
			message: respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "epoch:m0x2", ResetRequired: true}),
		},
		{
			kind: "segment", name: "rows-two-blocks", covers: "Two blocks, every column type, versions up to 2^53−1",
			segment: specimenSegment(),
		},
		{
			kind: "segment", name: "crdt-column", covers: "A crdt column with bytes, empty and NULL",
			segment: &ssp2.Segment{
				SegmentHeader: ssp2.SegmentHeader{Table: "notes", SchemaVersion: 4, Columns: notes},
				Blocks: [][]ssp2.SegmentRow{{
					{ServerVersion: 5, Row: crdtRow("p-1", raw(1, 0, 250))},
					{ServerVersion: 1, Row: crdtRow("p-2", raw())},
					{ServerVersion: 2, Row: crdtRow("p-3", null())},
				}},
			},
		},
		{
			kind: "segment", name: "no-rows", covers: "A header and the end marker",
			segment: &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{Table: "notes", SchemaVersion: 1, Columns: notes}},
		},
		{
			kind: "realtime", name: "hello", covers: "The handshake event",
			event: &ssp2.Hello{
				ProtocolVersion: 1, SessionID: "ses-9", ActorID: "ada", ClientID: "tablet-3", Cursor: -1, LatestCursor: 4101,
				RequiresSync: true, TimestampMs: 1_700_000_002_000,
			},
		},
		{
			kind: "realtime", name: "wake", covers: "A wake-up",
			event: &ssp2.Wake{Cursor: 4101, Reason: ssp2.WakeDeltaTooLarge, TimestampMs: 1_700_000_002_500},
		},
		{
			kind: "realtime", name: "heartbeat", covers: "The keep-alive event",
			event: &ssp2.Heartbeat{TimestampMs: 1_700_000_003_000},
		},
		{
			kind: "realtime", name: "ack", covers: "An acknowledgement",
			event: &ssp2.Ack{Cursor: 4101},
		},
		{
			kind: "realtime", name: "presence-publish", covers: "A published document",
			event: &ssp2.PresencePublish{ScopeKey: "dig:north", Doc: []byte(`{"at":[3,4],"name":"Ada"}`)},
		},
		{
			kind: "realtime", name: "presence-fanout", covers: "A peer that joins",
			event: &ssp2.Presence{
				ScopeKey: "dig:north", Kind: ssp2.PresenceJoin, ActorID: "ada", ClientID: "tablet-3",
				Doc: []byte(`{"at":[3,4],"name":"Ada"}`), TimestampMs: 1_700_000_004_000,
			},
		},
		{
			kind: "realtime", name: "presence-leave", covers: "A peer that leaves",
			event: &ssp2.Presence{
				ScopeKey: "dig:north", Kind: ssp2.PresenceLeave, ActorID: "ada", ClientID: "tablet-3",
				TimestampMs: 1_700_000_005_000,
			},
		},
		{
			kind: "realtime", name: "presence-error", covers: "A publish that was refused",
			event: &ssp2.PresenceError{ScopeKey: "dig:south", Code: ssp2.PresenceForbidden, TimestampMs: 1_700_000_006_000},
		},
		{
			kind: "v3", name: "push-sparse", covers: "A sparse payload, header as in version 2",
			message: request(ssp2.WireV3, epochHeader(),
				&ssp2.PushCommit{ClientCommitID: "cc-104", Operations: []ssp2.Operation{
					based(ssp2.Operation{Table: "specimens", RowID: "sp-8", Op: ssp2.OpUpsert, Payload: sparseSpecimen()}, 19),
				}}),
		},
		{kind: "v3", name: "sparse-row", covers: "Key, NULL, json and an empty crdt", sparse: sparseSpecimen()},
		{
			kind: "v3", name: "sparse-row-full", covers: "Every column present",
			sparse: func() []byte {
				present := ssp2.Bitmap{0xFF, 0x01}
				row, err := ssp2.AppendSparseRow(nil, specimenColumns, 0, present, fullSpecimen())
				if err != nil {
					panic(err)
				}
				return row
			}(),
		},
		{
			kind: "v3", name: "push-conflict", covers: "A conflict that names its columns",
			message: respond(ssp2.WireV3, &ssp2.ResponseHeader{LogEpoch: "epoch:k4t9"}, columnConflict),
		},
		{
			kind: "v3", name: "pull-combined", covers: "Push results and commits in version 3: full rows",
			message: respond(ssp2.WireV3, &ssp2.ResponseHeader{LogEpoch: "epoch:k4t9"},
				append([]ssp2.Frame{applied(ssp2.PushApplied)},
					section(active(false), &ssp2.Commit{
						CommitSeq: 4102, CreatedAtMs: 1_700_000_007_000, ActorID: "ada", Tables: []string{"specimens"},
						Changes: []ssp2.Change{{
							RowID: "sp-8", Op: ssp2.OpUpsert, RowVersion: new(int64(20)), Scopes: scopes(),
							Row: mustRow(specimenColumns, bareSpecimen()),
						}},
					}, &ssp2.SubEnd{NextCursor: 4102})...)...),
		},
	}
}

// invalidVectors are the invalid cases of Appendix A.
func invalidVectors() []vector {
	commit := func(op byte, rest payload) []byte {
		p := payload{}.str("k").u32(1).str("t").str("r").u8(op)
		return wireFrame(ssp2.FramePushCommit, append(p, rest...))
	}
	push := requestOf(commit(1, payload{}.none().some().bytes(0)))
	cols := []ssp2.Column{{Name: "k", Type: ssp2.TypeString}, {Name: "j", Type: ssp2.TypeJSON}}
	segment := func(rows payload) payload {
		p := payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(uint16(len(cols)))
		for _, col := range cols {
			p = p.str(col.Name).u8(byte(col.Type), 0)
		}
		return p.u32(1).bytes(rows...)
	}
	row := payload(mustRow(cols, []ssp2.Value{text("a"), text("{}")}))
	patch := func(b []byte, at int, with ...byte) []byte {
		b = bytes.Clone(b)
		copy(b[at:], with)
		return b
	}
	invalid := func(kind, name, covers string, bin []byte) vector {
		return vector{kind: kind, name: name, covers: covers, bin: bin, code: ssp2.CodeInvalidRequest}
	}
	event := func(name, covers, text string) vector {
		return vector{kind: "realtime", name: name, covers: covers, text: text + "\n", code: ssp2.CodeInvalidRequest}
	}
	empty := invalid("request", "empty-commit", "A PUSH_COMMIT without operations",
		requestOf(wireFrame(ssp2.FramePushCommit, payload{}.str("k").u32(0))))
	empty.code = ssp2.CodeEmptyCommit
	return []vector{
		empty,
		invalid("request", "truncated-no-end", "The body ends without END", push[:len(push)-5]),
		invalid("request", "bad-magic", "The magic is not SSP2", patch(push, 0, 'X')),
		invalid("request", "unsupported-wire-version", "Wire version 4", patch(push, 4, 4)),
		invalid("request", "nonzero-flags", "A flag in the envelope", patch(push, 7, 0x80)),
		invalid("request", "overlong-frame-length", "A frame of 4 GiB that is not there",
			patch(push, 9, 255, 255, 255, 255)),
		invalid("request", "op-enum-out-of-range", "An op byte of 3", requestOf(commit(3, payload{}.none().none()))),
		invalid("request", "upsert-without-payload", "An upsert whose payload is absent",
			requestOf(commit(1, payload{}.none().none()))),
		invalid("response", "bool-byte-out-of-range", "A bool byte of 2", responseOf(
			wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(1).str("").u32(0).u8(2)),
			wireFrame(ssp2.FrameSubEnd, payload{}.i64(1).none()))),
		invalid("segment", "null-bit-on-non-nullable", "NULL in a column that is not nullable",
			segment(payload{}.i64(1).u8(2).str("a")).u32(0)),
		invalid("segment", "missing-end-marker", "No end marker", segment(append(payload{}.i64(1), row...))),
		invalid("segment", "json-column-not-json", "A json value that does not parse",
			segment(payload{}.i64(1).u8(0).str("a").str("{]")).u32(0)),
		invalid("segment", "server-version-zero", "A server version of 0",
			segment(append(payload{}.i64(0), row...)).u32(0)),
		event("wake-requires-pull-false", "requiresPull is false",
			`{"event":"sync","data":{"cursor":1,"requiresPull":false,"reason":"reset-required","timestamp":2}}`),
		event("heartbeat-fractional", "A fraction where an integer belongs",
			`{"event":"heartbeat","data":{"timestamp":1.5}}`),
		event("presence-unknown-kind", "A presence kind outside the closed set",
			`{"event":"presence","data":{"scopeKey":"k","kind":"gone","actorId":"a","clientId":"c","doc":null,"timestamp":2}}`),
		event("presence-scalar-doc", "A published document that is no object",
			`{"event":"presence","data":{"scopeKey":"k","doc":[]}}`),
		invalid("v3", "epoch-missing", "Wire version 3 without the presence byte of the log epoch",
			build(ssp2.WireV3, ssp2.KindRequest, wireFrame(ssp2.FrameReqHeader, payload{}.str("c").i32(1)))),
	}
}

// encode returns the binary form of a case and its rendering, nil where there is
// none.
func (v *vector) encode(t *testing.T) (bin, rendering []byte) {
	t.Helper()
	var err error
	switch {
	case v.message != nil:
		bin, err = ssp2.AppendMessage(nil, v.message)
	case v.segment != nil:
		bin, err = ssp2.AppendSegment(nil, v.segment)
	case v.event != nil:
		rendering, err = ssp2.AppendControl(nil, v.event)
	case v.text != "":
		return nil, []byte(v.text)
	default:
		return append(v.bin, v.sparse...), nil
	}
	require.NoError(t, err)
	if bin != nil {
		rendering, err = ssp2.Render(bin)
		require.NoError(t, err)
	}
	var indented bytes.Buffer
	require.NoError(t, json.Indent(&indented, rendering, "", "  "))
	return bin, append(indented.Bytes(), '\n')
}

func (v *vector) path(ext string) string {
	if v.code != "" {
		return filepath.Join("testdata", v.kind, "invalid", v.name+ext)
	}
	return filepath.Join("testdata", v.kind, v.name+ext)
}

// TestVectors checks that the committed vectors are what the encoder writes now,
// that they decode, and that decoding and encoding again gives the same bytes.
// With -update it writes them.
func TestVectors(t *testing.T) {
	t.Parallel()

	for _, v := range append(vectors(), invalidVectors()...) {
		t.Run(v.kind+"/"+v.name, func(t *testing.T) {
			t.Parallel()
			bin, rendering := v.encode(t)
			for ext, content := range map[string][]byte{".bin": bin, ".json": rendering} {
				if content == nil {
					continue
				}
				if *update {
					require.NoError(t, os.MkdirAll(filepath.Dir(v.path(ext)), 0o755))
					require.NoError(t, os.WriteFile(v.path(ext), content, 0o644))
				}
				stored, err := os.ReadFile(v.path(ext))
				require.NoError(t, err)
				require.Equal(t, stored, content, "stale: go test ./ssp2 -run TestVectors -update")
			}
			switch {
			case v.text != "":
				_, err := parseEvent(rendering)
				require.Equal(t, v.code, ssp2.CodeOf(err))
			case v.code != "":
				require.Equal(t, v.code, decodeCode(v.kind, bin))
			case v.message != nil:
				m, err := ssp2.DecodeMessage(bin)
				require.NoError(t, err)
				require.Empty(t, diff(v.message, m))
				require.Equal(t, bin, mustMessage(m))
			case v.segment != nil:
				s, err := ssp2.DecodeSegment(bin)
				require.NoError(t, err)
				require.Empty(t, diff(v.segment, s))
				require.Equal(t, bin, mustSegment(s))
			case v.sparse != nil:
				vals, present, err := ssp2.DecodeSparseRow(specimenColumns, 0, bin, nil)
				require.NoError(t, err)
				again, err := ssp2.AppendSparseRow(nil, specimenColumns, 0, present, vals)
				require.NoError(t, err)
				require.Equal(t, bin, again)
			default:
				ev, err := parseEvent(rendering)
				require.NoError(t, err)
				again, err := ssp2.AppendControl(nil, ev)
				require.NoError(t, err)
				require.JSONEq(t, string(rendering), string(again))
			}
		})
	}
}

func TestVectorsHaveNoStrays(t *testing.T) {
	t.Parallel()

	files := map[string]bool{}
	for _, v := range append(vectors(), invalidVectors()...) {
		files[v.path(".bin")], files[v.path(".json")] = true, true
	}
	for _, path := range committedVectors(t) {
		require.True(t, files[path], "%s belongs to no case", path)
	}
}

// committedVectors returns the paths of all vectors in testdata.
func committedVectors(t testing.TB) []string {
	t.Helper()
	var paths []string
	for _, kind := range []string{"request", "response", "segment", "realtime", "v3"} {
		for _, pattern := range []string{"*.bin", "*.json", "invalid/*"} {
			found, err := filepath.Glob(filepath.Join("testdata", kind, pattern))
			require.NoError(t, err)
			paths = append(paths, found...)
		}
	}
	return paths
}

// decodeCode decodes a binary vector and returns the code of the error.
func decodeCode(kind string, bin []byte) ssp2.Code {
	var err error
	if kind == "segment" {
		_, err = ssp2.DecodeSegment(bin)
	} else {
		_, err = ssp2.DecodeMessage(bin)
	}
	return ssp2.CodeOf(err)
}

// parseEvent parses a control event of either direction.
func parseEvent(text []byte) (ssp2.ControlEvent, error) {
	var shape struct {
		Type string `json:"type"`
		Data struct {
			Kind, Error *string
		} `json:"data"`
		Event string `json:"event"`
	}
	if err := json.Unmarshal(text, &shape); err != nil {
		return nil, err
	}
	publish := shape.Event == "presence" && shape.Data.Kind == nil && shape.Data.Error == nil
	if shape.Type != "" || publish {
		return ssp2.ParseClientEvent(text)
	}
	return ssp2.ParseServerEvent(text)
}
