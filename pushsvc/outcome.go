package pushsvc

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// outcome is the result of one commit.
type outcome struct {
	status  ssp2.PushStatus // applied or rejected
	seq     int64           // applied
	results []ssp2.OpResult
	details []ssp2.DetailEntry

	// Of its record, if it has one.
	id           pgtype.UUID
	recordedAtMs int64
	// schemaVersion is that of the rows in results; 0: the newest.
	schemaVersion int32
}

// opError is a terminating error result.
func opError(op int, code ssp2.Code, message string) ssp2.OpResult {
	info, _ := ssp2.Lookup(code)
	return ssp2.OpResult{
		OpIndex: int32(op), Status: ssp2.OpError,
		Code: string(code), Message: message, Retryable: info.Retryable,
	}
}

func rejection(result ssp2.OpResult) *outcome {
	return &outcome{status: ssp2.PushRejected, results: []ssp2.OpResult{result}}
}

// outcome is the rejection of the commit, with its details.
func (r *refusal) outcome() *outcome {
	o := rejection(r.result)
	if r.details != "" {
		o.details = []ssp2.DetailEntry{{OpIndex: r.result.OpIndex, DetailsJSON: r.details}}
	}
	return o
}

func appliedOutcome(seq int64, operations int) *outcome {
	results := make([]ssp2.OpResult, operations)
	for i := range results {
		results[i] = ssp2.OpResult{OpIndex: int32(i), Status: ssp2.OpApplied}
	}
	return &outcome{status: ssp2.PushApplied, seq: seq, results: results}
}

// storedOutcome reads an outcome record. One that cannot be read is answered as a
// rejection, which is never stored (§6.3).
func storedOutcome(status int16, seq int64, results []byte, details string) *outcome {
	o := &outcome{status: ssp2.PushStatus(status), seq: seq}
	var err error
	if o.results, err = ssp2.DecodeResults(results); err == nil {
		o.details, err = decodeDetails(details)
	}
	if err != nil {
		return rejection(opError(0, ssp2.CodeIdempotencyCacheMiss, "the stored result of this commit cannot be read"))
	}
	return o
}

// encode renders the outcome record: results, and details as JSON or "".
func (o *outcome) encode() (results []byte, details string, err error) {
	if results, err = ssp2.AppendResults(nil, o.results); err != nil {
		return nil, "", internal("encoding an outcome", err)
	}
	details, err = encodeDetails(o.details)
	return results, details, err
}

// storedDetail is a detail entry as outcome records hold it.
type storedDetail struct {
	OpIndex int32  `json:"op_index"`
	Details string `json:"details"`
}

func encodeDetails(entries []ssp2.DetailEntry) (string, error) {
	if len(entries) == 0 {
		return "", nil
	}
	stored := make([]storedDetail, len(entries))
	for i, e := range entries {
		stored[i] = storedDetail{OpIndex: e.OpIndex, Details: e.DetailsJSON}
	}
	encoded, err := json.Marshal(stored)
	if err != nil {
		return "", fmt.Errorf("encoding the details of an outcome: %w", err)
	}
	return string(encoded), nil
}

func decodeDetails(encoded string) ([]ssp2.DetailEntry, error) {
	if encoded == "" {
		return nil, nil
	}
	var stored []storedDetail
	if err := json.Unmarshal([]byte(encoded), &stored); err != nil {
		return nil, fmt.Errorf("decoding the details of an outcome: %w", err)
	}
	entries := make([]ssp2.DetailEntry, len(stored))
	for i, d := range stored {
		entries[i] = ssp2.DetailEntry{OpIndex: d.OpIndex, DetailsJSON: d.Details}
	}
	return entries, nil
}

// identify identifies the record that the outcome is about to get, by a random (version 4)
// UUID.
func (o *outcome) identify(nowMs int64) pgtype.UUID {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails
	id.Bytes[6] = id.Bytes[6]&0x0f | 0x40
	id.Bytes[8] = id.Bytes[8]&0x3f | 0x80
	o.id, o.recordedAtMs = id, nowMs
	return id
}

// recordedAt is when the outcome was recorded, the zero time when it has no record.
func (o *outcome) recordedAt() time.Time {
	if !o.id.Valid {
		return time.Time{}
	}
	return time.UnixMilli(o.recordedAtMs).UTC()
}

// response puts the outcomes in request order. A commit answered before is cached
// (applied) or rejected again, and so is one that stands in the request twice.
func (r *request) response() (*Response, error) {
	resp := &Response{
		Results: make([]ssp2.PushResult, len(r.Commits)),
		Details: make([]*ssp2.PushResultDetails, len(r.Commits)),
	}
	answered := make(map[string]bool, len(r.Commits))
	for i := range r.Commits {
		id := r.Commits[i].ClientCommitID
		c := r.byID[id]
		o := c.outcome
		if o == nil {
			return nil, fmt.Errorf("commit %q was not answered", id)
		}
		result := ssp2.PushResult{ClientCommitID: id, Status: o.status, Results: r.results(c)}
		if o.status == ssp2.PushApplied {
			seq := o.seq
			result.CommitSeq = &seq
			resp.LastSeq = max(resp.LastSeq, seq)
			if c.known || answered[id] {
				result.Status = ssp2.PushCached
			}
		}
		answered[id] = true
		resp.Results[i] = result
		if len(o.details) > 0 {
			resp.Details[i] = &ssp2.PushResultDetails{ClientCommitID: id, Entries: o.details}
		}
	}
	return resp, nil
}

// results returns the results of a commit with the rows of conflicts in the row codec of
// the client's schema version (§6.3). They are stored in that of the newest version, so
// that a replay can be answered whatever version the client, or the server, has come to.
func (r *request) results(c *commit) []ssp2.OpResult {
	o, own := c.outcome, false
	from := cmp.Or(o.schemaVersion, r.versions.Newest().Version)
	results := o.results
	for i := range results {
		if results[i].Status != ssp2.OpConflict || from == r.schema.Version {
			continue
		}
		if !own {
			results, own = slices.Clone(results), true
		}
		if !r.translate(c, from, &results[i]) {
			results[i] = opError(int(results[i].OpIndex), ssp2.CodeVersionConflict,
				"the row is not at the base version; its state then was recorded in a schema version that cannot be read any more")
		}
	}
	return results
}

// translate turns row and columns of a conflict from one schema version into the
// client's. It is false when they cannot be read: the client's version has no place for
// what is in them, or the commit is not the one that conflicted.
func (r *request) translate(c *commit, from int32, result *ssp2.OpResult) bool {
	if int(result.OpIndex) >= len(c.ops) {
		return false
	}
	op := &c.ops[result.OpIndex]
	stored, served := r.versions.Schema(from)
	if !served {
		if stored, served = r.pastSchema(from); !served {
			stored = r.versions.Newest()
		}
	}
	table, ok := stored.Table(op.Table)
	if !ok {
		return false
	}
	values, err := ssp2.DecodeRow(table.Wire, result.ServerRow, nil)
	if err != nil {
		return false
	}
	if id, ok := table.RowID(values); !ok || id != op.RowID {
		return false
	}
	if stored == r.schema {
		return true
	}
	rows, ok := r.project(stored, table)
	if !ok || rows == nil {
		return ok
	}
	if result.ServerRow, err = rows.AppendRow(nil, result.ServerRow); err != nil {
		return false
	}
	if result.ConflictColumns != nil {
		result.ConflictColumns = rows.Columns(result.ConflictColumns)
	}
	return true
}

// pastSchema returns a schema that was installed before, as far as its layout tells.
func (r *request) pastSchema(version int32) (*schema.Schema, bool) {
	v, _ := r.past.Load(version)
	s, _ := v.(*schema.Schema)
	return s, s != nil
}

// project returns what turns rows of a table of a schema into the client's, nil when they
// are the same. It is false when nothing does.
func (r *request) project(from *schema.Schema, table *schema.Table) (*ssp2.Projection, bool) {
	if view := r.versions.View(from.Version, r.schema.Version); view != nil {
		to, rows := view.Rows(table)
		return rows, to != nil
	}
	to, ok := r.schema.Table(table.Name)
	if !ok {
		return nil, false
	}
	rows, err := ssp2.NewProjection(table.Wire, to.Wire)
	if err != nil {
		return nil, false
	}
	if rows.Identical() {
		rows = nil
	}
	return rows, true
}
