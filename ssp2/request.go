package ssp2

import (
	"maps"
	"slices"
)

// RequestHeader is REQ_HEADER (§1.5).
type RequestHeader struct {
	ClientID      string  // non-empty
	SchemaVersion int32   // at least 1
	LogEpoch      *string // wire versions 2 and 3, non-empty; nil asks for the epoch
}

// FrameType implements [Frame].
func (*RequestHeader) FrameType() FrameType { return FrameReqHeader }

func (f *RequestHeader) problem() string {
	switch {
	case f.ClientID == "":
		return "clientId is empty"
	case f.SchemaVersion < 1:
		return "schemaVersion is below 1"
	case f.LogEpoch != nil && *f.LogEpoch == "":
		return "logEpoch is empty"
	}
	return ""
}

func (f *RequestHeader) encode(e *encoder, v WireVersion) {
	if p := f.problem(); p != "" {
		e.fail("%s", p)
	}
	e.str(f.ClientID, "clientId")
	e.i32(f.SchemaVersion)
	if v >= WireV2 {
		e.optStr(f.LogEpoch, "logEpoch")
	} else if f.LogEpoch != nil {
		e.fail("wire version 1 has no logEpoch")
	}
}

func (f *RequestHeader) decode(c *cursor, v WireVersion) {
	f.ClientID = c.str("clientId")
	f.SchemaVersion = c.i32("schemaVersion")
	if v >= WireV2 {
		f.LogEpoch = c.optStr("logEpoch")
	}
	if p := f.problem(); p != "" {
		c.fail("%s", p)
	}
}

// Accept is the bitmask of segment delivery a client can take (§4.2).
type Accept uint8

// Bits of Accept.
const (
	AcceptInlineRows   Accept = 1 << 0
	AcceptExternalRows Accept = 1 << 1
	AcceptSQLite       Accept = 1 << 2
	AcceptSignedURLs   Accept = 1 << 3

	acceptReserved Accept = 0xF0
)

// PullHeader is PULL_HEADER (§4.2). The numbers are as requested; clamping them
// is up to the server.
type PullHeader struct {
	LimitCommits      int32
	LimitSnapshotRows int32
	MaxSnapshotPages  int32
	Accept            Accept // bits 4 to 7 are zero
}

// FrameType implements [Frame].
func (*PullHeader) FrameType() FrameType { return FramePullHeader }

func (f *PullHeader) encode(e *encoder, _ WireVersion) {
	if f.Accept&acceptReserved != 0 {
		e.fail("accept 0x%02x sets a bit of 4 to 7", uint8(f.Accept))
	}
	e.i32(f.LimitCommits)
	e.i32(f.LimitSnapshotRows)
	e.i32(f.MaxSnapshotPages)
	e.u8(uint8(f.Accept))
}

func (f *PullHeader) decode(c *cursor, _ WireVersion) {
	f.LimitCommits = c.i32("limitCommits")
	f.LimitSnapshotRows = c.i32("limitSnapshotRows")
	f.MaxSnapshotPages = c.i32("maxSnapshotPages")
	f.Accept = Accept(c.u8("accept"))
	if f.Accept&acceptReserved != 0 {
		c.fail("accept 0x%02x sets a bit of 4 to 7", uint8(f.Accept))
	}
}

// ScopeMap maps a scope variable to its values (§3.2). Encoders write keys in
// ascending order of UTF-16 code units; value order is kept as it is.
type ScopeMap map[string][]string

// sortedKeys returns the keys of m in wire order.
func sortedKeys[V any](m map[string]V) []string {
	return slices.SortedFunc(maps.Keys(m), CompareUTF16)
}

func (e *encoder) scopeMap(m ScopeMap, what string) {
	e.count(len(m), what)
	for _, key := range sortedKeys(m) {
		e.str(key, what)
		e.count(len(m[key]), what)
		for _, value := range m[key] {
			e.str(value, what)
		}
	}
}

// scopeMap reads a map of lists. An empty one is an empty, non-nil map.
func (c *cursor) scopeMap(what string) ScopeMap {
	n := c.count(8, what)
	m := make(ScopeMap, n)
	prev := ""
	for i := 0; i < n && c.err == nil; i++ {
		key := c.str(what)
		c.key(i, prev, key)
		prev = key
		count := c.count(4, what)
		values := make([]string, 0, count)
		for j := 0; j < count && c.err == nil; j++ {
			values = append(values, c.str(what))
		}
		m[key] = values
	}
	return m
}

// Subscription is SUBSCRIPTION (§4.3).
type Subscription struct {
	ID             string
	Table          string
	Scopes         ScopeMap
	Params         *string // raw JSON document, kept byte for byte
	Cursor         int64   // -1 for a subscription that was never synced
	BootstrapState *string // raw JSON document, kept byte for byte
}

// FrameType implements [Frame].
func (*Subscription) FrameType() FrameType { return FrameSubscription }

func (f *Subscription) encode(e *encoder, _ WireVersion) {
	e.str(f.ID, "id")
	e.str(f.Table, "table")
	e.scopeMap(f.Scopes, "scopes")
	e.optJSON(f.Params, "params")
	e.i64(f.Cursor, "cursor")
	e.optJSON(f.BootstrapState, "bootstrapState")
}

func (f *Subscription) decode(c *cursor, _ WireVersion) {
	f.ID = c.str("id")
	f.Table = c.str("table")
	f.Scopes = c.scopeMap("scopes")
	f.Params = c.optJSON("params")
	f.Cursor = c.i64("cursor")
	f.BootstrapState = c.optJSON("bootstrapState")
}
