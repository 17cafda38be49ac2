package ssp2

import (
	"encoding/binary"
	"strings"
	"unicode/utf8"
)

// Commit is COMMIT (§4.5).
type Commit struct {
	CommitSeq   int64
	CreatedAtMs int64 // epoch milliseconds
	ActorID     string
	Tables      []string
	Changes     []Change
}

// Change is one change record of a COMMIT (§4.5).
type Change struct {
	TableIndex uint16 // into Commit.Tables
	RowID      string
	Op         Op
	RowVersion *int64            // upsert
	Scopes     map[string]string // variable to value (§3.1)
	Row        []byte            // upsert: full row, not looked into
}

// FrameType implements [Frame].
func (*Commit) FrameType() FrameType { return FrameCommit }

// problem states the rules of §4.5 for one change.
func (ch *Change) problem(tables int) string {
	switch {
	case int(ch.TableIndex) >= tables:
		return "tableIndex is out of range"
	case ch.Op == OpUpsert && (ch.RowVersion == nil || ch.Row == nil):
		return "an upsert without rowVersion and row"
	case ch.Op == OpDelete && (ch.RowVersion != nil || ch.Row != nil):
		return "a delete with rowVersion or row"
	}
	return ""
}

func (f *Commit) encode(e *encoder, _ WireVersion) {
	e.i64(f.CommitSeq, "commitSeq")
	e.i64(f.CreatedAtMs, "createdAtMs")
	e.str(f.ActorID, "actorId")
	e.count(len(f.Tables), "tables")
	for _, table := range f.Tables {
		e.str(table, "tables")
	}
	e.count(len(f.Changes), "changes")
	for i := range f.Changes {
		ch := &f.Changes[i]
		if ch.Op != OpUpsert && ch.Op != OpDelete {
			e.fail("change %d: op %d is unknown", i, ch.Op)
		}
		if p := ch.problem(len(f.Tables)); p != "" {
			e.fail("change %d: %s", i, p)
		}
		e.u16(ch.TableIndex)
		e.str(ch.RowID, "rowId")
		e.u8(uint8(ch.Op))
		e.optI64(ch.RowVersion, "rowVersion")
		e.count(len(ch.Scopes), "scopes")
		for _, key := range sortedKeys(ch.Scopes) {
			e.str(key, "scopes")
			e.str(ch.Scopes[key], "scopes")
		}
		e.optBytes(ch.Row, "row")
	}
}

// leastChange is the size of the smallest change record.
const leastChange = 2 + 4 + 1 + 1 + 4 + 1

func (f *Commit) decode(c *cursor, _ WireVersion) {
	f.CommitSeq = c.i64("commitSeq")
	f.CreatedAtMs = c.i64("createdAtMs")
	f.ActorID = c.str("actorId")
	tables := c.count(4, "tables")
	for i := 0; i < tables && c.ok("table", i); i++ {
		f.Tables = append(f.Tables, c.str("name"))
	}
	c.leave()
	n := c.count(leastChange, "changes")
	f.Changes = make([]Change, n)
	for i := range f.Changes {
		if !c.ok("change", i) {
			return
		}
		ch := &f.Changes[i]
		ch.TableIndex = c.u16("tableIndex")
		ch.RowID = c.str("rowId")
		ch.Op = c.op()
		ch.RowVersion = c.optI64("rowVersion")
		ch.Scopes = c.scopes()
		ch.Row = c.optBytes("row")
		if p := ch.problem(len(f.Tables)); p != "" {
			c.fail("%s", p)
		}
	}
	c.leave()
}

// scopes reads the stored scopes of a change. An empty map is non-nil.
func (c *cursor) scopes() map[string]string {
	n := c.count(8, "scopes")
	m := make(map[string]string, n)
	prev := ""
	for i := 0; i < n && c.err == nil; i++ {
		key := c.str("scopes")
		c.key(i, prev, key)
		prev = key
		m[key] = c.str("scopes")
	}
	return m
}

// CommitFrame writes one COMMIT frame without building a [Commit]: change by
// change, from the form in which the log stores it. It writes the bytes that
// [AppendFrame] writes for the same commit.
//
//	buf, frame := ssp2.BeginCommitFrame(buf, seq, createdAtMs, actorID, tables)
//	for … {
//		buf = frame.AppendChange(buf, …)
//	}
//	buf, err := frame.End(buf)
//
// Between these calls nothing else may be appended to the buffer or taken off
// its front. A change that breaks a rule is remembered and reported by End.
type CommitFrame struct {
	mark    Mark
	countAt int // offset of the change count
	changes uint32
	tables  int
	err     *Error
}

// BeginCommitFrame begins a COMMIT frame. Numbers must be within
// ±[MaxSafeInteger]; strings must be UTF-8, here and in AppendChange: what comes
// from a text column is.
func BeginCommitFrame(dst []byte, seq, createdAtMs int64, actorID string, tables []string) ([]byte, CommitFrame) {
	start := len(dst)
	dst, mark := BeginFrame(dst, FrameCommit)
	e := encoder{buf: dst, name: FrameCommit.String()}
	e.i64(seq, "commitSeq")
	e.i64(createdAtMs, "createdAtMs")
	e.str(actorID, "actorId")
	e.count(len(tables), "tables")
	for _, table := range tables {
		e.str(table, "tables")
	}
	f := CommitFrame{mark: mark, countAt: len(e.buf), tables: len(tables), err: e.err}
	if f.err != nil {
		return dst[:start], f
	}
	return AppendU32(e.buf, 0), f
}

// AppendChange appends one change record. Each of scopes is "variable=value",
// ascending by variable in UTF-16 code units, as the log stores them. For a
// delete row is nil and rowVersion is not looked at. After the first change that
// breaks a rule the buffer stays as it is.
func (f *CommitFrame) AppendChange(
	dst []byte, tableIndex uint16, rowID string, op Op, rowVersion int64, scopes []string, row []byte,
) []byte {
	if f.err != nil {
		return dst
	}
	switch {
	case int(tableIndex) >= f.tables:
		return f.fail(dst, "tableIndex %d is out of range", tableIndex)
	case op == OpUpsert && row == nil:
		return f.fail(dst, "an upsert without row")
	case op == OpDelete && row != nil:
		return f.fail(dst, "a delete with row")
	case op != OpUpsert && op != OpDelete:
		return f.fail(dst, "op %d is unknown", op)
	case op == OpUpsert && !safeInteger(rowVersion):
		return f.fail(dst, "rowVersion %d is outside ±(2^53−1)", rowVersion)
	case !utf8.ValidString(rowID):
		return f.fail(dst, "rowId is not well-formed UTF-8")
	case uint64(len(row)) > maxLength:
		return f.fail(dst, "row of %d bytes", len(row))
	}
	undo := dst
	dst = AppendStr(AppendU16(dst, tableIndex), rowID)
	dst = append(dst, byte(op))
	if op == OpUpsert {
		dst = AppendI64(append(dst, 1), rowVersion)
	} else {
		dst = append(dst, 0)
	}
	dst = AppendU32(dst, uint32(len(scopes)))
	prev := ""
	for i, scope := range scopes {
		variable, value, found := strings.Cut(scope, "=")
		if !found || !utf8.ValidString(scope) {
			return f.fail(undo, "scope %q is not variable=value", scope)
		}
		if i > 0 && CompareUTF16(prev, variable) >= 0 {
			return f.fail(undo, "scope %q after %q: variables are unique and ascending", variable, prev)
		}
		prev = variable
		dst = AppendStr(AppendStr(dst, variable), value)
	}
	if op == OpUpsert {
		dst = AppendBytes(append(dst, 1), row)
	} else {
		dst = append(dst, 0)
	}
	f.changes++
	return dst
}

func (f *CommitFrame) fail(dst []byte, format string, args ...any) []byte {
	f.err = invalid("COMMIT: change %d: "+format, append([]any{f.changes}, args...)...)
	return dst
}

// Changes returns how many changes the frame holds so far.
func (f *CommitFrame) Changes() int { return int(f.changes) }

// End completes the frame. On error the frame is taken off the buffer again.
func (f *CommitFrame) End(dst []byte) ([]byte, error) {
	if f.err != nil {
		return dst[:f.mark], f.err
	}
	binary.LittleEndian.PutUint32(dst[f.countAt:], f.changes)
	return EndFrame(dst, f.mark)
}
