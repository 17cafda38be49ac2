package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

type seedCmd struct {
	schemaFlags
	File string `name:"file" required:"" placeholder:"FILE" help:"What to write, see above; - is the standard input."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*seedCmd) Help() string {
	return `Pushes the commits of a file into a database, in order, each in a transaction of its own and at most once: a commit ` +
		`that was applied before is skipped, by its id, so that the same file can be run again, also after it was ` +
		`interrupted. The file is JSON:

{"partitions": [{"partition": "acme", "actor": "system", "clientId": "seed", "commits": [{"id": "1", "operations": [` +
		`{"table": "lists", "values": {"id": "l1", "team_id": "t1", "title": "Groceries", "rank": 1, "archived": false}}, ` +
		`{"op": "delete", "table": "lists", "rowId": "l2"}]}]}]}

An upsert names the columns that it writes; those that it leaves out keep their value, or are NULL in a new row. ` +
		`"baseVersion" says which version of the row it is based on (0: it must be new). Values of json columns may be ` +
		`written as they are, except strings, which hold JSON text; bytes are base64. A commit has at most 500 operations.

The rules of your program (validators and the like) are not known here and are not asked: seed with ` +
		`pushsvc.Service.Apply where they matter. A commit that is rejected stays so: correct it and give it a new id. ` +
		`Stops at the first commit that cannot be applied, with exit code 1; the commits before it stay.`
}

// seedFile is what --file holds.
type seedFile struct {
	Partitions []seedPartition `json:"partitions"`
}

type seedPartition struct {
	Partition string       `json:"partition"`
	Actor     string       `json:"actor"`
	ClientID  string       `json:"clientId"`
	Commits   []seedCommit `json:"commits"`
}

type seedCommit struct {
	ID         string          `json:"id"`
	Operations []seedOperation `json:"operations"`
}

type seedOperation struct {
	Op          string         `json:"op"`
	Table       string         `json:"table"`
	RowID       string         `json:"rowId"`
	Values      map[string]any `json:"values"`
	BaseVersion *int64         `json:"baseVersion"`
}

// seedReport is what --json prints.
type seedReport struct {
	OK         bool         `json:"ok"`
	Commits    int          `json:"commits"`    // in the file
	Applied    int          `json:"applied"`    // by this run
	Skipped    int          `json:"skipped"`    // applied before
	Operations int          `json:"operations"` // of the applied ones
	Millis     int64        `json:"ms"`
	Failure    *seedFailure `json:"failure,omitempty"`
}

// seedFailure is the commit that ended the run.
type seedFailure struct {
	Partition  string     `json:"partition"`
	Commit     string     `json:"commit"`
	OpIndex    *int       `json:"opIndex,omitempty"`
	Code       string     `json:"code,omitempty"`
	Message    string     `json:"message"`
	Details    string     `json:"details,omitempty"`
	Replay     bool       `json:"replay,omitempty"` // it was rejected by an earlier run
	RecordedAt *time.Time `json:"recordedAt,omitempty"`
	OutcomeID  string     `json:"outcomeId,omitempty"`
	Next       string     `json:"next"`
}

// Run seeds a database.
func (c *seedCmd) Run(ctx context.Context, p *program) error {
	s, _, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	requests, err := c.read(p)
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, p)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := checkInstalled(ctx, pool, s, c.options()); err != nil {
		return err
	}
	push, err := pushsvc.New(pool, pushsvc.Config{Schema: s, Logger: p.log})
	if err != nil {
		return fmt.Errorf("set up the push service: %w", err)
	}
	defer push.Wait()

	report := seedReport{Commits: len(requests)}
	err = p.seed(ctx, push, requests, &report)
	report.OK = report.Failure == nil && err == nil
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		if err := p.printJSON(report); err != nil {
			return err
		}
	case report.OK:
		p.printf("applied %s with %s in %s, skipped %d that were applied before\n", plural(report.Applied, "commit"),
			plural(report.Operations, "operation"), duration(time.Duration(report.Millis)*time.Millisecond), report.Skipped)
	default:
		f := report.Failure
		p.printf("failed:  partition %q, commit %q: %s\n", f.Partition, f.Commit, f.Message)
		p.printf("next:    %s\n", f.Next)
		p.printf("so far:  applied %s, skipped %d that were applied before, of %d in the file\n", plural(report.Applied, "commit"), report.Skipped, report.Commits)
	}
	if !report.OK {
		return errReported
	}
	return nil
}

// read returns the commits of the file.
func (c *seedCmd) read(p *program) ([]pushsvc.ApplyRequest, error) {
	var text []byte
	var err error
	if c.File == "-" {
		text, err = io.ReadAll(p.stdin)
	} else {
		text, err = os.ReadFile(c.File)
	}
	if err != nil {
		return nil, usagef("read the seed: %w", err)
	}
	var file seedFile
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	d.UseNumber() // integers are not to pass through floats
	if err := d.Decode(&file); err != nil {
		return nil, usagef("%s, line %d: %w", c.File, lineOf(text, d.InputOffset(), err), err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, usagef("%s: something follows the document", c.File)
	}
	var requests []pushsvc.ApplyRequest
	for i, part := range file.Partitions {
		if part.Partition == "" || part.Actor == "" || part.ClientID == "" {
			return nil, usagef("%s: partition %d: it needs \"partition\", \"actor\" and \"clientId\"", c.File, i)
		}
		seen := make(map[string]bool, len(part.Commits))
		for j, k := range part.Commits {
			if k.ID == "" || len(k.Operations) == 0 {
				return nil, usagef("%s: partition %q: commit %d: it needs \"id\" and \"operations\"", c.File, part.Partition, j)
			}
			if seen[k.ID] {
				return nil, usagef("%s: partition %q: commit %q is there twice: the second would be skipped", c.File, part.Partition, k.ID)
			}
			seen[k.ID] = true
			req := pushsvc.ApplyRequest{Partition: part.Partition, Actor: part.Actor, ClientID: part.ClientID, ClientCommitID: k.ID}
			for l, o := range k.Operations {
				op := pushsvc.Operation{Op: ssp2.OpUpsert, Table: o.Table, RowID: o.RowID, Values: o.Values, BaseVersion: o.BaseVersion}
				switch o.Op {
				case "", "upsert":
				case "delete":
					op.Op = ssp2.OpDelete
				default:
					return nil, usagef("%s: partition %q: commit %q: operation %d: \"op\" is %q, not upsert or delete", c.File, part.Partition, k.ID, l, o.Op)
				}
				req.Operations = append(req.Operations, op)
			}
			requests = append(requests, req)
		}
	}
	return requests, nil
}

// lineOf is the line of an error of encoding/json, which was found behind an offset.
func lineOf(text []byte, offset int64, err error) int {
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		offset = syntax.Offset
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		offset = wrong.Offset
	}
	return 1 + bytes.Count(text[:min(offset, int64(len(text)))], []byte("\n"))
}

// progressEvery is how often a long run says how far it is.
const progressEvery = 2 * time.Second

// seed applies commits until one fails, and fills in the report.
func (p *program) seed(ctx context.Context, push *pushsvc.Service, requests []pushsvc.ApplyRequest, report *seedReport) error {
	start := time.Now()
	told := start
	for i := range requests {
		applied, err := push.Apply(ctx, requests[i])
		report.Millis = time.Since(start).Milliseconds()
		switch {
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("seeding: %w", err)
		case err != nil:
			report.Failure = seedFailureOf(&requests[i], err)
			return nil
		case applied.Status == ssp2.PushCached:
			report.Skipped++
		default:
			report.Applied++
			report.Operations += len(requests[i].Operations)
		}
		if now := time.Now(); now.Sub(told) >= progressEvery {
			told = now
			_, _ = fmt.Fprintln(p.stderr, seedProgress(i+1, len(requests), now.Sub(start)))
		}
	}
	return nil
}

// seedProgress says how far a run is.
func seedProgress(done, all int, spent time.Duration) string {
	rate := float64(done) / spent.Seconds()
	left := time.Duration(float64(all-done) / rate * float64(time.Second)).Round(time.Second)
	return fmt.Sprintf("%d of %s (%d %%), %.0f commits/s, about %v left", done, plural(all, "commit"), done*100/all, rate, left)
}

// seedFailureOf says what is wrong with a commit, and what to do about it.
func seedFailureOf(req *pushsvc.ApplyRequest, err error) *seedFailure {
	f := &seedFailure{Partition: req.Partition, Commit: req.ClientCommitID, Message: explain(err).Error(), Next: "run the same file again: what was applied is skipped"}
	var rejected *pushsvc.RejectedError
	var operation *pushsvc.OperationError
	switch code := ssp2.CodeOf(err); {
	case errors.As(err, &rejected):
		f.OpIndex, f.Code, f.Details = &rejected.OpIndex, string(rejected.Code), rejected.Details
		f.Message = fmt.Sprintf("rejected at operation %d: %s: %s", rejected.OpIndex, rejected.Code, rejected.Message)
		f.Replay, f.RecordedAt, f.OutcomeID = rejected.Replay, &rejected.RecordedAt, rejected.OutcomeID.String()
		f.Next = "the rejection is recorded under this id: correct the commit and give it a new one"
	case errors.As(err, &operation):
		f.OpIndex = &operation.OpIndex
		f.Message = operation.Error()
		f.Next = "nothing is recorded of this commit: correct it in the file and run again"
	case code == ssp2.CodeInvalidClientID:
		f.Code = string(code)
		f.Next = "a client id belongs to the actor that used it first: name that actor, or another clientId"
	case code == ssp2.CodeTooManyOperations:
		f.Code = string(code)
		f.Next = "split the commit into several"
	case code != "":
		f.Code = string(code)
	}
	return f
}
