package ssp2

import (
	"encoding/base64"
	"math"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Render returns the canonical JSON rendering (§11.1) of a message or of a rows
// segment, told apart by their magic. It is a developer's tool: nothing may parse
// its output in production. Numbers and strings are written as JavaScript writes
// them, and so are embedded JSON documents: parsed and written anew, not copied.
// The rendering has no white space.
//
// The field detailsJson of PUSH_RESULT_DETAILS is rendered as "details", an
// object. Errors are those of [DecodeMessage] and [DecodeSegment].
func Render(b []byte) ([]byte, error) {
	var w jsonWriter
	if len(b) >= 4 && string(b[:4]) == "SSG2" {
		s, err := DecodeSegment(b)
		if err != nil {
			return nil, err
		}
		if err := s.render(&w); err != nil {
			return nil, err
		}
		return w.buf, nil
	}
	m, err := DecodeMessage(b)
	if err != nil {
		return nil, err
	}
	m.render(&w)
	return w.buf, nil
}

// jsonWriter writes compact JSON.
type jsonWriter struct {
	buf  []byte
	more bool // a comma is due before the next member or element
}

// comma separates from what came before.
func (w *jsonWriter) comma() {
	if w.more {
		w.buf = append(w.buf, ',')
	}
	w.more = true
}

func (w *jsonWriter) begin(bracket byte) { w.buf, w.more = append(w.buf, bracket), false }
func (w *jsonWriter) end(bracket byte)   { w.buf, w.more = append(w.buf, bracket), true }

func (w *jsonWriter) key(name string) {
	w.comma()
	w.buf = append(AppendJSONString(w.buf, name), ':')
}

func (w *jsonWriter) str(name, v string) {
	w.key(name)
	w.buf = AppendJSONString(w.buf, v)
}

func (w *jsonWriter) optStr(name string, v *string) {
	if v != nil {
		w.str(name, *v)
	}
}

func (w *jsonWriter) integer(name string, v int64) {
	w.key(name)
	w.buf = strconv.AppendInt(w.buf, v, 10)
}

func (w *jsonWriter) optInteger(name string, v *int64) {
	if v != nil {
		w.integer(name, *v)
	}
}

func (w *jsonWriter) boolean(name string, v bool) {
	w.key(name)
	w.buf = strconv.AppendBool(w.buf, v)
}

func (w *jsonWriter) base64(name string, v []byte) {
	w.key(name)
	w.buf = appendBase64(w.buf, v)
}

func (w *jsonWriter) optJSON(name string, v *string) {
	if v != nil {
		w.key(name)
		w.buf = appendParsedJSON(w.buf, []byte(*v))
	}
}

func (w *jsonWriter) scopeMap(name string, m ScopeMap) {
	w.key(name)
	w.begin('{')
	for _, key := range sortedKeys(m) {
		w.key(key)
		w.strings(m[key])
	}
	w.end('}')
}

func (w *jsonWriter) strings(list []string) {
	w.begin('[')
	for _, s := range list {
		w.comma()
		w.buf = AppendJSONString(w.buf, s)
	}
	w.end(']')
}

// list writes one object per element.
func (w *jsonWriter) list(name string, n int, element func(i int)) {
	w.key(name)
	w.begin('[')
	for i := range n {
		w.comma()
		w.begin('{')
		element(i)
		w.end('}')
	}
	w.end(']')
}

func appendBase64(dst, v []byte) []byte {
	dst = append(dst, '"')
	return append(base64.StdEncoding.AppendEncode(dst, v), '"')
}

func (m *Message) render(w *jsonWriter) {
	w.begin('{')
	w.str("magic", "SSP2")
	w.integer("wireVersion", int64(m.WireVersion))
	w.str("msgKind", m.Kind.String())
	w.list("frames", len(m.Frames), func(i int) { renderFrame(w, m.Frames[i], m.WireVersion) })
	w.end('}')
}

func renderFrame(w *jsonWriter, f Frame, v WireVersion) {
	if f, unknown := f.(*UnknownFrame); unknown {
		w.str("type", "UNKNOWN")
		w.integer("frameType", int64(f.Type))
		w.base64("payload", f.Payload)
		return
	}
	w.str("type", f.FrameType().String())
	switch f := f.(type) {
	case *RequestHeader:
		w.str("clientId", f.ClientID)
		w.integer("schemaVersion", int64(f.SchemaVersion))
		w.optStr("logEpoch", f.LogEpoch)
	case *PushCommit:
		f.render(w)
	case *PullHeader:
		w.integer("limitCommits", int64(f.LimitCommits))
		w.integer("limitSnapshotRows", int64(f.LimitSnapshotRows))
		w.integer("maxSnapshotPages", int64(f.MaxSnapshotPages))
		w.integer("accept", int64(f.Accept))
	case *Subscription:
		w.str("id", f.ID)
		w.str("table", f.Table)
		w.scopeMap("scopes", f.Scopes)
		w.optJSON("params", f.Params)
		w.integer("cursor", f.Cursor)
		w.optJSON("bootstrapState", f.BootstrapState)
	case *ResponseHeader:
		if f.RequiredSchemaVersion != nil {
			w.integer("requiredSchemaVersion", int64(*f.RequiredSchemaVersion))
		}
		if f.LatestSchemaVersion != nil {
			w.integer("latestSchemaVersion", int64(*f.LatestSchemaVersion))
		}
		if v >= WireV2 {
			w.str("logEpoch", f.LogEpoch)
			w.boolean("resetRequired", f.ResetRequired)
		}
	case *Lease:
		w.str("leaseId", f.LeaseID)
		w.integer("expiresAtMs", f.ExpiresAtMs)
	case *PushResult:
		f.render(w, v)
	case *PushResultDetails:
		w.str("clientCommitId", f.ClientCommitID)
		w.list("entries", len(f.Entries), func(i int) {
			w.integer("opIndex", int64(f.Entries[i].OpIndex))
			w.optJSON("details", &f.Entries[i].DetailsJSON)
		})
	case *SubStart:
		w.str("id", f.ID)
		w.str("status", f.Status.String())
		w.str("reasonCode", f.ReasonCode)
		w.scopeMap("effectiveScopes", f.EffectiveScopes)
		w.boolean("bootstrap", f.Bootstrap)
	case *Commit:
		f.render(w)
	case *SegmentRef:
		f.render(w)
	case *SegmentInline:
		w.base64("payload", f.Payload)
	case *SubEnd:
		w.integer("nextCursor", f.NextCursor)
		w.optJSON("bootstrapState", f.BootstrapState)
	case *ErrorFrame:
		w.str("code", f.Code)
		w.str("message", f.Message)
		w.str("category", f.Category)
		w.boolean("retryable", f.Retryable)
		w.str("recommendedAction", f.RecommendedAction)
		w.optJSON("details", f.Details)
	}
}

func (f *PushCommit) render(w *jsonWriter) {
	w.str("clientCommitId", f.ClientCommitID)
	w.list("operations", len(f.Operations), func(i int) {
		op := &f.Operations[i]
		w.str("table", op.Table)
		w.str("rowId", op.RowID)
		w.str("op", op.Op.String())
		w.optInteger("baseVersion", op.BaseVersion)
		if op.Payload != nil {
			w.base64("payload", op.Payload)
		}
	})
}

func (f *PushResult) render(w *jsonWriter, v WireVersion) {
	w.str("clientCommitId", f.ClientCommitID)
	w.str("status", f.Status.String())
	w.optInteger("commitSeq", f.CommitSeq)
	w.list("results", len(f.Results), func(i int) {
		r := &f.Results[i]
		w.integer("opIndex", int64(r.OpIndex))
		w.str("status", r.Status.String())
		if r.Status == OpApplied {
			return
		}
		w.str("code", r.Code)
		w.str("message", r.Message)
		if r.Status == OpError {
			w.boolean("retryable", r.Retryable)
			return
		}
		w.integer("serverVersion", r.ServerVersion)
		w.base64("serverRow", r.ServerRow)
		if v >= WireV3 {
			w.base64("conflictColumns", r.ConflictColumns)
		}
	})
}

func (f *Commit) render(w *jsonWriter) {
	w.integer("commitSeq", f.CommitSeq)
	w.integer("createdAtMs", f.CreatedAtMs)
	w.str("actorId", f.ActorID)
	w.key("tables")
	w.strings(f.Tables)
	w.list("changes", len(f.Changes), func(i int) {
		ch := &f.Changes[i]
		w.integer("tableIndex", int64(ch.TableIndex))
		w.str("rowId", ch.RowID)
		w.str("op", ch.Op.String())
		w.optInteger("rowVersion", ch.RowVersion)
		w.key("scopes")
		w.begin('{')
		for _, key := range sortedKeys(ch.Scopes) {
			w.str(key, ch.Scopes[key])
		}
		w.end('}')
		if ch.Row != nil {
			w.base64("row", ch.Row)
		}
	})
}

func (f *SegmentRef) render(w *jsonWriter) {
	w.str("segmentId", f.SegmentID)
	w.str("mediaType", f.MediaType.String())
	w.str("table", f.Table)
	w.integer("byteLength", f.ByteLength)
	w.integer("rowCount", f.RowCount)
	w.integer("asOfCommitSeq", f.AsOfCommitSeq)
	w.str("scopeDigest", f.ScopeDigest)
	w.optStr("rowCursor", f.RowCursor)
	w.optStr("nextRowCursor", f.NextRowCursor)
	w.optStr("url", f.URL)
	w.optInteger("urlExpiresAtMs", f.URLExpiresAtMs)
}

func (s *Segment) render(w *jsonWriter) error {
	w.begin('{')
	w.str("magic", "SSG2")
	w.integer("formatVersion", segmentFormat)
	w.str("table", s.Table)
	w.integer("schemaVersion", int64(s.SchemaVersion))
	w.list("columns", len(s.Columns), func(i int) {
		w.str("name", s.Columns[i].Name)
		w.str("type", s.Columns[i].Type.String())
		w.boolean("nullable", s.Columns[i].Nullable)
	})
	w.key("blocks")
	w.begin('[')
	vals := make([]Value, 0, len(s.Columns))
	for _, block := range s.Blocks {
		w.comma()
		w.begin('[')
		for i := range block {
			var err error
			if vals, err = DecodeRow(s.Columns, block[i].Row, vals); err != nil {
				return err
			}
			w.comma()
			w.begin('{')
			w.integer("serverVersion", block[i].ServerVersion)
			w.key("values")
			w.begin('{')
			for j := range vals {
				w.key(s.Columns[j].Name)
				w.buf = appendRenderedValue(w.buf, s.Columns[j].Type, &vals[j])
			}
			w.end('}')
			w.end('}')
		}
		w.end(']')
	}
	w.end(']')
	w.end('}')
	return nil
}

func appendRenderedValue(dst []byte, t ColumnType, v *Value) []byte {
	if v.Null {
		return append(dst, "null"...)
	}
	switch t {
	case TypeString:
		return AppendJSONString(dst, string(v.Bytes))
	case TypeInteger:
		return strconv.AppendInt(dst, v.Int, 10)
	case TypeFloat:
		return appendJSONNumber(dst, v.Float)
	case TypeBoolean:
		return strconv.AppendBool(dst, v.Int == 1)
	case TypeJSON, TypeBlobRef:
		return appendParsedJSON(dst, v.Bytes)
	default:
		return appendBase64(dst, v.Bytes)
	}
}

// appendJSONNumber is AppendNumber for a JSON document, which has no word for
// what is not finite (§11.1 rule 10).
func appendJSONNumber(dst []byte, f float64) []byte {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return append(dst, "null"...)
	}
	return AppendNumber(dst, f)
}

// appendParsedJSON appends a valid JSON document as JavaScript would write it
// after parsing it.
func appendParsedJSON(dst, doc []byte) []byte {
	i := skipSpace(doc, 0)
	switch doc[i] {
	case '{':
		return appendParsedObject(dst, doc[i:])
	case '[':
		elements, _ := jsonArray(doc[i:])
		dst = append(dst, '[')
		for j, element := range elements {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = appendParsedJSON(dst, element)
		}
		return append(dst, ']')
	case '"':
		end, _ := scanString(doc, i)
		return appendParsedString(dst, doc[i:end])
	case 't', 'f', 'n':
		end, _ := scanJSON(doc, i)
		return append(dst, doc[i:end]...)
	}
	end, _ := scanNumber(doc, i)
	f, _ := strconv.ParseFloat(string(doc[i:end]), 64) // out of range is ±Inf, as in JavaScript
	return appendJSONNumber(dst, f)
}

// appendParsedObject orders members as a JavaScript object does: array indexes
// first, in numeric order, then the other keys as they came; of a key that comes
// twice the first place and the last value count.
func appendParsedObject(dst, doc []byte) []byte {
	members, _ := jsonObject(doc)
	place := make(map[string]int, len(members))
	kept := members[:0]
	for _, m := range members {
		if at, twice := place[m.key]; twice {
			kept[at].value = m.value
			continue
		}
		place[m.key] = len(kept)
		kept = append(kept, m)
	}
	slices.SortStableFunc(kept, func(a, b jsonMember) int {
		x, isIndexA := arrayIndex(a.key)
		y, isIndexB := arrayIndex(b.key)
		switch {
		case isIndexA && isIndexB:
			return int(x - y)
		case isIndexA:
			return -1
		case isIndexB:
			return 1
		}
		return 0
	})
	dst = append(dst, '{')
	for i, m := range kept {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(AppendJSONString(dst, m.key), ':')
		dst = appendParsedJSON(dst, m.value)
	}
	return append(dst, '}')
}

// arrayIndex reads a key that JavaScript takes for an array index.
func arrayIndex(key string) (int64, bool) {
	n, err := strconv.ParseUint(key, 10, 32)
	if err != nil || n == 1<<32-1 || strconv.FormatUint(n, 10) != key {
		return 0, false
	}
	return int64(n), true
}

// appendParsedString rewrites a valid string literal: escapes that JavaScript
// would not write are resolved, lone surrogates stay escaped.
func appendParsedString(dst, literal []byte) []byte {
	dst = append(dst, '"')
	body := literal[1 : len(literal)-1]
	for i := 0; i < len(body); i++ {
		if body[i] != '\\' {
			dst = append(dst, body[i])
			continue
		}
		i++
		if body[i] != 'u' {
			if body[i] == '/' {
				dst = append(dst, '/')
			} else {
				dst = append(dst, '\\', body[i])
			}
			continue
		}
		unit, _ := hex4(body, i+1)
		i += 4
		switch r := rune(unit); {
		case utf16.IsSurrogate(r):
			low, _ := lowSurrogate(body, i+1)
			if pair := utf16.DecodeRune(r, low); pair != utf8.RuneError {
				dst = utf8.AppendRune(dst, pair)
				i += 6
			} else {
				dst = appendEscape(dst, unit)
			}
		case unit < 0x20 || unit == '"' || unit == '\\':
			dst = appendEscape(dst, unit)
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
