package ssp2

// Op is the kind of an operation or change (§6.1, §4.5).
type Op uint8

// The two operations.
const (
	OpUpsert Op = 1
	OpDelete Op = 2
)

// String returns the name the debug rendering uses (§11.1).
func (op Op) String() string {
	switch op {
	case OpUpsert:
		return "upsert"
	case OpDelete:
		return "delete"
	}
	return "unknown"
}

func (c *cursor) op() Op {
	b := c.u8("op")
	if op := Op(b); op == OpUpsert || op == OpDelete {
		return op
	}
	c.fail("op byte 0x%02x is neither 1 (upsert) nor 2 (delete)", b)
	return 0
}

// PushCommit is PUSH_COMMIT (§6.1).
type PushCommit struct {
	ClientCommitID string      // non-empty
	Operations     []Operation // at least one
}

// Operation is one operation record of a PUSH_COMMIT (§6.1).
type Operation struct {
	Table       string
	RowID       string
	Op          Op
	BaseVersion *int64
	Payload     []byte // upsert: full row (v1, v2) or sparse row (v3), not looked into; delete: nil
}

// FrameType implements [Frame].
func (*PushCommit) FrameType() FrameType { return FramePushCommit }

// payloadProblem states the presence tie of §6.1.
func (op *Operation) payloadProblem() string {
	switch {
	case op.Op == OpUpsert && op.Payload == nil:
		return "an upsert without a payload"
	case op.Op == OpDelete && op.Payload != nil:
		return "a delete with a payload"
	}
	return ""
}

func (f *PushCommit) encode(e *encoder, _ WireVersion) {
	if f.ClientCommitID == "" {
		e.fail("clientCommitId is empty")
	}
	if len(f.Operations) == 0 && e.err == nil {
		e.err = Errorf(CodeEmptyCommit, "%s: no operations", e.name)
	}
	e.str(f.ClientCommitID, "clientCommitId")
	e.count(len(f.Operations), "operations")
	for i := range f.Operations {
		op := &f.Operations[i]
		if op.Op != OpUpsert && op.Op != OpDelete {
			e.fail("operation %d: op %d is unknown", i, op.Op)
		}
		if p := op.payloadProblem(); p != "" {
			e.fail("operation %d: %s", i, p)
		}
		e.str(op.Table, "table")
		e.str(op.RowID, "rowId")
		e.u8(uint8(op.Op))
		e.optI64(op.BaseVersion, "baseVersion")
		e.optBytes(op.Payload, "payload")
	}
}

// leastOperation is the size of the smallest operation record.
const leastOperation = 4 + 4 + 1 + 1 + 1

func (f *PushCommit) decode(c *cursor, _ WireVersion) {
	f.ClientCommitID = c.str("clientCommitId")
	if f.ClientCommitID == "" {
		c.fail("clientCommitId is empty")
	}
	n := c.count(leastOperation, "operations")
	if n == 0 {
		c.failCode(CodeEmptyCommit, "no operations")
		return
	}
	f.Operations = make([]Operation, n)
	var (
		bases []int64 // one allocation for all base versions
		table string
	)
	for i := range f.Operations {
		if !c.ok("operation", i) {
			return
		}
		op := &f.Operations[i]
		// Runs of operations name the same table; they share one string.
		if name := c.text("table"); string(name) != table || i == 0 {
			table = string(name)
		}
		op.Table = table
		op.RowID = c.str("rowId")
		op.Op = c.op()
		if c.present("baseVersion") {
			if bases == nil {
				bases = make([]int64, 0, n-i)
			}
			bases = append(bases, c.i64("baseVersion"))
			op.BaseVersion = &bases[len(bases)-1]
		}
		op.Payload = c.optBytes("payload")
		if p := op.payloadProblem(); p != "" {
			c.fail("%s", p)
		}
	}
	c.leave()
}

// PushStatus is the status of a PUSH_RESULT (§6.3).
type PushStatus uint8

// Push statuses.
const (
	PushApplied  PushStatus = 1
	PushCached   PushStatus = 2
	PushRejected PushStatus = 3
)

// String returns the name the debug rendering uses (§11.1).
func (s PushStatus) String() string {
	switch s {
	case PushApplied:
		return "applied"
	case PushCached:
		return "cached"
	case PushRejected:
		return "rejected"
	}
	return "unknown"
}

// PushResult is PUSH_RESULT (§6.3).
type PushResult struct {
	ClientCommitID string
	Status         PushStatus
	CommitSeq      *int64 // present for applied and cached
	Results        []OpResult
}

// OpStatus is the tag of an OpResult (§6.3).
type OpStatus uint8

// Operation statuses.
const (
	OpApplied  OpStatus = 1
	OpConflict OpStatus = 2
	OpError    OpStatus = 3
)

// String returns the name the debug rendering uses (§11.1).
func (s OpStatus) String() string {
	switch s {
	case OpApplied:
		return "applied"
	case OpConflict:
		return "conflict"
	case OpError:
		return "error"
	}
	return "unknown"
}

// OpResult is one result record of a PUSH_RESULT (§6.3), a union by Status.
type OpResult struct {
	OpIndex int32
	Status  OpStatus

	Code    string // conflict, error
	Message string // conflict, error

	ServerVersion   int64  // conflict
	ServerRow       []byte // conflict: full row, not looked into
	ConflictColumns []byte // conflict, wire version 3: presence-bitmap layout; not written in older versions

	Retryable bool // error
}

// FrameType implements [Frame].
func (*PushResult) FrameType() FrameType { return FramePushResult }

func (f *PushResult) problem() string {
	switch {
	case f.Status < PushApplied || f.Status > PushRejected:
		return "the status is unknown"
	case f.Status == PushRejected && f.CommitSeq != nil:
		return "a rejected result with a commitSeq"
	case f.Status != PushRejected && f.CommitSeq == nil:
		return "an applied or cached result without a commitSeq"
	}
	return ""
}

func (f *PushResult) encode(e *encoder, v WireVersion) {
	if p := f.problem(); p != "" {
		e.fail("%s", p)
	}
	e.str(f.ClientCommitID, "clientCommitId")
	e.u8(uint8(f.Status))
	e.optI64(f.CommitSeq, "commitSeq")
	e.results(f.Results, v)
}

func (f *PushResult) decode(c *cursor, v WireVersion) {
	f.ClientCommitID = c.str("clientCommitId")
	f.Status = PushStatus(c.u8("status"))
	f.CommitSeq = c.optI64("commitSeq")
	if p := f.problem(); p != "" {
		c.fail("%s", p)
	}
	f.Results = c.results(v)
}

func (e *encoder) results(results []OpResult, v WireVersion) {
	e.count(len(results), "results")
	for i := range results {
		r := &results[i]
		e.i32(r.OpIndex)
		e.u8(uint8(r.Status))
		switch r.Status {
		case OpApplied:
		case OpConflict:
			e.str(r.Code, "code")
			e.str(r.Message, "message")
			e.i64(r.ServerVersion, "serverVersion")
			e.bytes(r.ServerRow, "serverRow")
			if v >= WireV3 {
				e.bytes(r.ConflictColumns, "conflictColumns")
			}
		case OpError:
			e.str(r.Code, "code")
			e.str(r.Message, "message")
			e.bool(r.Retryable)
		default:
			e.fail("result %d: status %d is unknown", i, r.Status)
		}
	}
}

// leastResult is the size of the smallest result record.
const leastResult = 4 + 1

func (c *cursor) results(v WireVersion) []OpResult {
	n := c.count(leastResult, "results")
	// Result records differ much in size: grow with the records, not with n.
	var results []OpResult
	for i := 0; i < n && c.ok("result", i); i++ {
		r := OpResult{OpIndex: c.i32("opIndex"), Status: OpStatus(c.u8("status"))}
		switch r.Status {
		case OpApplied:
		case OpConflict:
			r.Code = c.str("code")
			r.Message = c.str("message")
			r.ServerVersion = c.i64("serverVersion")
			r.ServerRow = c.bytes("serverRow")
			if v >= WireV3 {
				r.ConflictColumns = c.bytes("conflictColumns")
			}
		case OpError:
			r.Code = c.str("code")
			r.Message = c.str("message")
			r.Retryable = c.bool("retryable")
		default:
			c.fail("status byte 0x%02x is unknown", uint8(r.Status))
		}
		results = append(results, r)
	}
	c.leave()
	return results
}

// resultsFormat is the first byte of stored results.
const resultsFormat = 0x01

// AppendResults appends the form in which an outcome is stored: a format byte
// and the records in the layout of wire version 3, which every version can be
// answered from.
func AppendResults(dst []byte, results []OpResult) ([]byte, error) {
	e := encoder{buf: append(dst, resultsFormat), name: "results"}
	e.results(results, WireV3)
	if e.err != nil {
		return dst, e.err
	}
	return e.buf, nil
}

// DecodeResults reads what [AppendResults] wrote. Row and column bytes alias b.
// Anything else is sync.idempotency_cache_miss: the stored outcome cannot be
// read (§6.3).
func DecodeResults(b []byte) ([]OpResult, error) {
	c := cursor{buf: b, name: "stored results"}
	if format := c.u8("format"); format != resultsFormat {
		c.fail("format 0x%02x is unknown", format)
	}
	results := c.results(WireV3)
	if err := c.done(); err != nil {
		return nil, &Error{Code: CodeIdempotencyCacheMiss, Message: "the stored outcome cannot be read", Err: err}
	}
	return results, nil
}
