package pushsvc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/ssp2"
)

// ApplyRequest is one commit of the host's own code.
type ApplyRequest struct {
	Partition string
	// Actor is whom the log and the hooks name as the author.
	Actor string
	// ClientID and ClientCommitID identify the commit for good: the outcome that it gets
	// first is the one that every later call gets. A client id belongs to its first actor
	// in a partition. Take a client id that no device uses.
	ClientID, ClientCommitID string
	// Operations has at least one entry, and at most Config.MaxOperations.
	Operations []Operation
}

// Operation is one operation of an [ApplyRequest]. [Upsert] and [Delete] make it.
type Operation struct {
	Op    ssp2.Op
	Table string
	// RowID is the text of the primary key (§2.2). An upsert may leave it to Values.
	RowID string
	// Values holds the columns that an upsert writes, by name, as the Go type that
	// [Row.Value] returns or one that converts to it without loss:
	//
	//   - string: a string
	//   - integer: an integer of any size, a json.Number or a float64 that is whole; ±(2^53−1)
	//   - float: a float, an integer or a json.Number
	//   - boolean: a bool
	//   - json, blob_ref: the JSON text as a string, []byte or json.RawMessage; anything
	//     else is rendered by encoding/json
	//   - bytes, crdt: []byte, or a string of standard base64
	//
	// Pointers stand for what they point to, and nil of any type for NULL. A column that is left out keeps
	// its value when the row is there, and is NULL when the row is new.
	Values map[string]any
	// BaseVersion is the server version that an upsert is based on (§6.2): it conflicts
	// when a column that it writes was written after it. 0 wants the row to be new, which
	// a row that was deleted is again. nil writes over what is there, but does not bring
	// back a deleted row (sync.row_deleted).
	BaseVersion *int64
}

// Upsert is an operation that writes columns of a row, and makes the row unless it is
// there.
func Upsert(table string, values map[string]any) Operation {
	return Operation{Op: ssp2.OpUpsert, Table: table, Values: values}
}

// Delete is an operation that deletes a row. That it is not there is no error (§6.2).
func Delete(table, rowID string) Operation {
	return Operation{Op: ssp2.OpDelete, Table: table, RowID: rowID}
}

// At returns the operation based on a version; see [Operation].
func (o Operation) At(baseVersion int64) Operation {
	o.BaseVersion = &baseVersion
	return o
}

// Applied is the outcome of a commit that is applied.
type Applied struct {
	// Status is applied, or cached when it was so before this call, which then wrote
	// nothing.
	Status ssp2.PushStatus
	Seq    int64 // of the commit in its partition (§2.1)
	// RecordedAt and OutcomeID are the time and the identity of the record, the same for
	// every call.
	RecordedAt time.Time
	OutcomeID  events.OutcomeID
}

// RejectedError is the outcome of a commit that is rejected, for good: a corrected one
// takes another ClientCommitID.
type RejectedError struct {
	ClientCommitID string
	// Code and Message are of the protocol, or of a hook that rejected.
	Code    ssp2.Code
	Message string
	OpIndex int    // the operation to blame
	Details string // JSON as §6.3.1 bounds it, "" for none

	// Of a conflict (sync.version_conflict): the row that stood against the operation,
	// and its version. The row is nil otherwise, and when the schema has changed since.
	ServerVersion int64
	ServerRow     *Row

	// Replay says that it was rejected before this call.
	Replay     bool
	RecordedAt time.Time
	OutcomeID  events.OutcomeID
}

// Error names the commit, the operation, the code and the message.
func (e *RejectedError) Error() string {
	replay := ""
	if e.Replay {
		replay = " already, on " + e.RecordedAt.Format(time.RFC3339)
	}
	return fmt.Sprintf("pushsvc: commit %q was rejected%s: operation %d: %s: %s", e.ClientCommitID, replay, e.OpIndex, e.Code, e.Message)
}

// OperationError says that an operation of an [ApplyRequest] cannot be made from what it
// holds. Nothing was done and nothing is recorded.
type OperationError struct {
	OpIndex int
	Table   string
	Column  string // "" when it is about the operation as a whole
	Problem string
}

// Error names the operation, the column and the problem.
func (e *OperationError) Error() string {
	about := fmt.Sprintf("pushsvc: operation %d on table %q", e.OpIndex, e.Table)
	if e.Column != "" {
		about += fmt.Sprintf(", column %q", e.Column)
	}
	return about + ": " + e.Problem
}

// Apply pushes a commit of the host's own code. It goes the way of every push (queue,
// validators, references, reactions, one durable outcome), except that nobody is asked
// what the actor may write, and that it needs no log epoch. Calling it again with the
// same ids writes nothing, whatever the operations are, and returns the same outcome. So
// when the outcome is unknown, because of an error of another kind than those below or of
// a process that died, call it again with the same ids.
//
// Errors: [*RejectedError]; [*OperationError]; [*ssp2.Error], among them
// sync.invalid_client_id (the client id belongs to another actor, or is reserved),
// sync.too_many_operations, sync.schema_not_ready and sync.rate_limited. Those of ctx
// leave the outcome unknown.
func (s *Service) Apply(ctx context.Context, req ApplyRequest) (Applied, error) {
	r, err := s.trust(ctx, req)
	if err != nil {
		return Applied{}, err
	}
	if _, err := s.submit(ctx, r); err != nil {
		return Applied{}, fmt.Errorf("applying: %w", err)
	}
	return s.decided(r)
}

// trust makes a request of the host's, after the checks that need no database.
func (s *Service) trust(ctx context.Context, req ApplyRequest) (*request, error) {
	if err := gate.CheckIdentity(req.Partition, req.Actor); err != nil {
		return nil, fmt.Errorf("applying: %w", err)
	}
	if !gate.StorableID(req.ClientCommitID) {
		return nil, fmt.Errorf("applying: a commit id has 1 to %d bytes and no U+0000, this one has %d", gate.MaxIDBytes, len(req.ClientCommitID))
	}
	ops := make([]ssp2.Operation, len(req.Operations))
	push := Request{
		Partition: req.Partition, Actor: req.Actor, ClientID: req.ClientID, WireVersion: ssp2.WireV3, Scopes: s.everything,
		Commits: []ssp2.PushCommit{{ClientCommitID: req.ClientCommitID, Operations: ops}},
	}
	if err := s.Validate(push); err != nil {
		return nil, fmt.Errorf("applying: %w", err)
	}
	for i := range req.Operations {
		var err error
		if ops[i], err = s.encode(i, &req.Operations[i]); err != nil {
			return nil, err
		}
	}
	r := s.newRequest(ctx, push)
	r.trusted = true
	return r, nil
}

// decided returns the outcome of a request of the host's.
func (s *Service) decided(r *request) (Applied, error) {
	c := r.commits[0]
	o := c.outcome
	if o == nil {
		return Applied{}, fmt.Errorf("commit %q was not answered", c.id)
	}
	if o.status == ssp2.PushApplied {
		a := Applied{Status: o.status, Seq: o.seq, RecordedAt: o.recordedAt(), OutcomeID: o.id.Bytes}
		if c.known {
			a.Status = ssp2.PushCached
		}
		return a, nil
	}
	results := r.results(c)
	i := slices.IndexFunc(results, func(r ssp2.OpResult) bool { return r.Status != ssp2.OpApplied })
	if i < 0 {
		return Applied{}, errors.New("pushsvc: a recorded rejection names no operation")
	}
	result := &results[i]
	if ssp2.Code(result.Code) == ssp2.CodeIdempotencyCacheMiss { // no outcome
		return Applied{}, ssp2.Errorf(ssp2.CodeIdempotencyCacheMiss, "%s", result.Message)
	}
	e := &RejectedError{
		ClientCommitID: c.id, Code: ssp2.Code(result.Code), Message: result.Message, OpIndex: int(result.OpIndex),
		ServerVersion: result.ServerVersion, ServerRow: s.conflictRow(c, result),
		Replay: c.known, RecordedAt: o.recordedAt(), OutcomeID: o.id.Bytes,
	}
	for _, d := range o.details {
		if d.OpIndex == result.OpIndex {
			e.Details = d.DetailsJSON
		}
	}
	return Applied{}, e
}

// conflictRow is the row of a conflict, nil when there is none that can be read. A replay
// may have other operations than the commit that conflicted.
func (s *Service) conflictRow(c *commit, result *ssp2.OpResult) *Row {
	if result.Status != ssp2.OpConflict || int(result.OpIndex) >= len(c.ops) {
		return nil
	}
	table, ok := s.schema.Table(c.ops[result.OpIndex].Table)
	if !ok {
		return nil
	}
	values, err := ssp2.DecodeRow(table.Wire, result.ServerRow, nil)
	if err != nil {
		return nil
	}
	if id, ok := table.RowID(values); !ok || id != c.ops[result.OpIndex].RowID {
		return nil
	}
	return &Row{table, values}
}
