package ssp2

// ResponseHeader is RESP_HEADER (§1.6).
type ResponseHeader struct {
	RequiredSchemaVersion *int32
	LatestSchemaVersion   *int32
	LogEpoch              string // wire versions 2 and 3, non-empty; not written in version 1
	ResetRequired         bool   // wire versions 2 and 3; not written in version 1
}

// FrameType implements [Frame].
func (*ResponseHeader) FrameType() FrameType { return FrameRespHeader }

func (f *ResponseHeader) encode(e *encoder, v WireVersion) {
	e.optI32(f.RequiredSchemaVersion)
	e.optI32(f.LatestSchemaVersion)
	if v >= WireV2 {
		if f.LogEpoch == "" {
			e.fail("logEpoch is empty")
		}
		e.str(f.LogEpoch, "logEpoch")
		e.bool(f.ResetRequired)
	}
}

func (f *ResponseHeader) decode(c *cursor, v WireVersion) {
	f.RequiredSchemaVersion = c.optI32("requiredSchemaVersion")
	f.LatestSchemaVersion = c.optI32("latestSchemaVersion")
	if v >= WireV2 {
		if f.LogEpoch = c.str("logEpoch"); f.LogEpoch == "" {
			c.fail("logEpoch is empty")
		}
		f.ResetRequired = c.bool("resetRequired")
	}
}

// Lease is LEASE (§7.3.2).
type Lease struct {
	LeaseID     string // non-empty
	ExpiresAtMs int64  // epoch milliseconds
}

// FrameType implements [Frame].
func (*Lease) FrameType() FrameType { return FrameLease }

func (f *Lease) encode(e *encoder, _ WireVersion) {
	if f.LeaseID == "" {
		e.fail("leaseId is empty")
	}
	e.str(f.LeaseID, "leaseId")
	e.i64(f.ExpiresAtMs, "expiresAtMs")
}

func (f *Lease) decode(c *cursor, _ WireVersion) {
	if f.LeaseID = c.str("leaseId"); f.LeaseID == "" {
		c.fail("leaseId is empty")
	}
	f.ExpiresAtMs = c.i64("expiresAtMs")
}

// SubStatus is the status of a SUB_START (§4.4).
type SubStatus uint8

// Subscription statuses.
const (
	SubActive  SubStatus = 1
	SubRevoked SubStatus = 2
	SubReset   SubStatus = 3
)

// String returns the name the debug rendering uses (§11.1).
func (s SubStatus) String() string {
	switch s {
	case SubActive:
		return "active"
	case SubRevoked:
		return "revoked"
	case SubReset:
		return "reset"
	}
	return "unknown"
}

// SubStart is SUB_START (§4.4).
type SubStart struct {
	ID              string
	Status          SubStatus
	ReasonCode      string // a code of the catalogue; empty for an active subscription
	EffectiveScopes ScopeMap
	Bootstrap       bool // this response carries segments of the subscription
}

// FrameType implements [Frame].
func (*SubStart) FrameType() FrameType { return FrameSubStart }

func (f *SubStart) encode(e *encoder, _ WireVersion) {
	if f.Status < SubActive || f.Status > SubReset {
		e.fail("status %d is unknown", f.Status)
	}
	e.str(f.ID, "id")
	e.u8(uint8(f.Status))
	e.str(f.ReasonCode, "reasonCode")
	e.scopeMap(f.EffectiveScopes, "effectiveScopes")
	e.bool(f.Bootstrap)
}

func (f *SubStart) decode(c *cursor, _ WireVersion) {
	f.ID = c.str("id")
	f.Status = SubStatus(c.u8("status"))
	if f.Status < SubActive || f.Status > SubReset {
		c.fail("status byte 0x%02x is unknown", uint8(f.Status))
	}
	f.ReasonCode = c.str("reasonCode")
	f.EffectiveScopes = c.scopeMap("effectiveScopes")
	f.Bootstrap = c.bool("bootstrap")
}

// SubEnd is SUB_END (§4.4).
type SubEnd struct {
	NextCursor     int64
	BootstrapState *string // raw JSON document; present while a bootstrap is incomplete
}

// FrameType implements [Frame].
func (*SubEnd) FrameType() FrameType { return FrameSubEnd }

func (f *SubEnd) encode(e *encoder, _ WireVersion) {
	e.i64(f.NextCursor, "nextCursor")
	e.optJSON(f.BootstrapState, "bootstrapState")
}

func (f *SubEnd) decode(c *cursor, _ WireVersion) {
	f.NextCursor = c.i64("nextCursor")
	f.BootstrapState = c.optJSON("bootstrapState")
}

// MediaType is the format of a segment (§5.4).
type MediaType uint8

// Segment formats.
const (
	MediaRows   MediaType = 1
	MediaSQLite MediaType = 2
)

// String returns the name the debug rendering uses (§11.1).
func (m MediaType) String() string {
	switch m {
	case MediaRows:
		return "rows"
	case MediaSQLite:
		return "sqlite"
	}
	return "unknown"
}

// SegmentRef is SEGMENT_REF (§5.4).
type SegmentRef struct {
	SegmentID      string // "sha256:" and 64 hex digits (§5.1)
	MediaType      MediaType
	Table          string
	ByteLength     int64 // uncompressed
	RowCount       int64
	AsOfCommitSeq  int64
	ScopeDigest    string  // §3.5
	RowCursor      *string // nil for the first page of the table
	NextRowCursor  *string // nil for the last page of the table
	URL            *string // signed URL
	URLExpiresAtMs *int64  // epoch milliseconds; present with URL and only then
}

// FrameType implements [Frame].
func (*SegmentRef) FrameType() FrameType { return FrameSegmentRef }

func (f *SegmentRef) problem() string {
	switch {
	case f.MediaType != MediaRows && f.MediaType != MediaSQLite:
		return "the mediaType is unknown"
	case (f.URL == nil) != (f.URLExpiresAtMs == nil):
		return "url and urlExpiresAtMs come together or not at all"
	}
	return ""
}

func (f *SegmentRef) encode(e *encoder, _ WireVersion) {
	if p := f.problem(); p != "" {
		e.fail("%s", p)
	}
	e.str(f.SegmentID, "segmentId")
	e.u8(uint8(f.MediaType))
	e.str(f.Table, "table")
	e.i64(f.ByteLength, "byteLength")
	e.i64(f.RowCount, "rowCount")
	e.i64(f.AsOfCommitSeq, "asOfCommitSeq")
	e.str(f.ScopeDigest, "scopeDigest")
	e.optStr(f.RowCursor, "rowCursor")
	e.optStr(f.NextRowCursor, "nextRowCursor")
	e.optStr(f.URL, "url")
	e.optI64(f.URLExpiresAtMs, "urlExpiresAtMs")
}

func (f *SegmentRef) decode(c *cursor, _ WireVersion) {
	f.SegmentID = c.str("segmentId")
	f.MediaType = MediaType(c.u8("mediaType"))
	f.Table = c.str("table")
	f.ByteLength = c.i64("byteLength")
	f.RowCount = c.i64("rowCount")
	f.AsOfCommitSeq = c.i64("asOfCommitSeq")
	f.ScopeDigest = c.str("scopeDigest")
	f.RowCursor = c.optStr("rowCursor")
	f.NextRowCursor = c.optStr("nextRowCursor")
	f.URL = c.optStr("url")
	f.URLExpiresAtMs = c.optI64("urlExpiresAtMs")
	if p := f.problem(); p != "" {
		c.fail("%s", p)
	}
}

// SegmentInline is SEGMENT_INLINE (§5.7): one complete rows segment, checked as
// [CheckSegment] checks it.
type SegmentInline struct {
	Payload []byte
}

// FrameType implements [Frame].
func (*SegmentInline) FrameType() FrameType { return FrameSegmentInline }

func (f *SegmentInline) encode(e *encoder, _ WireVersion) {
	if err := CheckSegment(f.Payload); err != nil {
		e.fail("%v", err)
	}
	e.buf = append(e.buf, f.Payload...)
}

func (f *SegmentInline) decode(c *cursor, _ WireVersion) {
	f.Payload = c.take(c.left(), "segment")
	if err := CheckSegment(f.Payload); err != nil {
		c.fail("%v", err)
	}
}

// ErrorFrame is ERROR (§1.6).
type ErrorFrame struct {
	Code              string
	Message           string
	Category          string
	Retryable         bool
	RecommendedAction string
	Details           *string // raw JSON document
}

// FrameType implements [Frame].
func (*ErrorFrame) FrameType() FrameType { return FrameError }

// Err returns the frame as an [*Error].
func (f *ErrorFrame) Err() *Error {
	e := &Error{Code: Code(f.Code), Message: f.Message}
	if f.Details != nil {
		e.Details = *f.Details
	}
	return e
}

func (f *ErrorFrame) encode(e *encoder, _ WireVersion) {
	e.str(f.Code, "code")
	e.str(f.Message, "message")
	e.str(f.Category, "category")
	e.bool(f.Retryable)
	e.str(f.RecommendedAction, "recommendedAction")
	e.optJSON(f.Details, "details")
}

func (f *ErrorFrame) decode(c *cursor, _ WireVersion) {
	f.Code = c.str("code")
	f.Message = c.str("message")
	f.Category = c.str("category")
	f.Retryable = c.bool("retryable")
	f.RecommendedAction = c.str("recommendedAction")
	f.Details = c.optJSON("details")
}
