package host

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"sync"
	"unicode/utf16"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// rules are the validators that a scenario installed. The server always has hooks;
// these say what they do.
type rules struct {
	mu     sync.RWMutex
	rows   []rowRule
	commit *commitRule
}

// rowRule is a row validator (§6.7).
type rowRule struct {
	Table string `json:"table"`
	Rule  struct {
		Kind        string `json:"kind"`
		Column      string `json:"column"`
		Max         int    `json:"max"`
		GuardColumn string `json:"guardColumn"`
		GuardValue  any    `json:"guardValue"`
		Code        string `json:"code"`
	} `json:"rule"`
}

// commitRule is the validator of whole commits (§6.8).
type commitRule struct {
	Kind               string `json:"kind"`
	Table              string `json:"table"`
	Column             string `json:"column"`
	Equals             any    `json:"equals"`
	SiblingRowIDSuffix string `json:"siblingRowIdSuffix"`
	Code               string `json:"code"`
}

// installRows replaces all row validators.
func (r *rules) installRows(s *schema.Schema, specs []rowRule) error {
	for _, spec := range specs {
		columns := []string{spec.Rule.Column}
		switch spec.Rule.Kind {
		case "maxLength":
		case "immutableWhen":
			columns = append(columns, spec.Rule.GuardColumn)
		default:
			return badRequest("there is no row rule %q", spec.Rule.Kind)
		}
		if err := checkRule(s, spec.Table, spec.Rule.Code, columns...); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows = specs
	return nil
}

// installCommit replaces the validator of whole commits; nil removes it.
func (r *rules) installCommit(s *schema.Schema, spec *commitRule) error {
	if spec != nil {
		if spec.Kind != "requireSiblingWhen" {
			return badRequest("there is no commit rule %q", spec.Kind)
		}
		if err := checkRule(s, spec.Table, spec.Code, spec.Column); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.commit = spec
	return nil
}

func checkRule(s *schema.Schema, table, code string, columns ...string) error {
	t, ok := s.Table(table)
	if !ok {
		return badRequest("the schema has no table %q", table)
	}
	for _, column := range columns {
		if _, ok := t.ColumnIndex(column); !ok {
			return badRequest("table %q has no column %q", table, column)
		}
	}
	if code == "" {
		return badRequest("code is missing")
	}
	return nil
}

func (r *rules) validateRow(_ context.Context, v *pushsvc.RowValidation) error {
	r.mu.RLock()
	specs := r.rows
	r.mu.RUnlock()
	for _, spec := range specs {
		rule := spec.Rule
		if spec.Table != v.Table || v.Op != ssp2.OpUpsert {
			continue
		}
		details := &ssp2.Details{FieldPaths: []string{rule.Column}}
		switch rule.Kind {
		case "maxLength":
			text, _ := v.Row.Text(rule.Column)
			if len(utf16.Encode([]rune(text))) <= rule.Max {
				continue
			}
			details.Reason, details.RequiredAction = "max_length_exceeded", "edit_fields"
		case "immutableWhen":
			if v.Stored == nil || !sameValue(v.Stored.Value(rule.GuardColumn), rule.GuardValue) ||
				sameValue(v.Stored.Value(rule.Column), v.Row.Value(rule.Column)) {
				continue
			}
			details.Reason, details.RequiredAction = "immutable_state", "keep_server"
		}
		return pushsvc.Reject(rule.Code, "", details)
	}
	return nil
}

func (r *rules) validateCommit(_ context.Context, c *pushsvc.Candidate) error {
	r.mu.RLock()
	spec := r.commit
	r.mu.RUnlock()
	if spec == nil {
		return nil
	}
	on := func(e pushsvc.Evidence) bool { return e.Table == spec.Table }
	i := slices.IndexFunc(c.Operations, func(e pushsvc.Evidence) bool {
		return on(e) && e.Row != nil && sameValue(e.Row.Value(spec.Column), spec.Equals)
	})
	if i < 0 {
		return nil
	}
	sibling := c.Operations[i].RowID + spec.SiblingRowIDSuffix
	if slices.ContainsFunc(c.Operations, func(e pushsvc.Evidence) bool { return on(e) && e.RowID == sibling }) {
		return nil
	}
	return pushsvc.RejectOperation(i, spec.Code, "", &ssp2.Details{
		FieldPaths: []string{spec.Column}, Reason: "missing_sibling_operation", RequiredAction: "repair_aggregate",
	})
}

// sameValue compares values in the form of readRows, by type and value.
func sameValue(a, b any) bool {
	left, err := json.Marshal(rowForm(a))
	if err != nil {
		return false
	}
	right, err := json.Marshal(rowForm(b))
	return err == nil && bytes.Equal(left, right)
}

// rowForm gives bytes and integers of a row the form that values from JSON have: there
// is one type of numbers, exact within ±(2^53−1).
func rowForm(v any) any {
	switch v := v.(type) {
	case []byte:
		return hexBytes(v)
	case int64:
		return float64(v)
	}
	return v
}
