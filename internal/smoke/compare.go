package smoke

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// expectation is what a replica should hold, by table name and row id.
type expectation map[string]map[string]client.Row

func (e expectation) row(r row) client.Row { return e[r.table.Name][r.id] }

func (e expectation) insert(r row) {
	if e[r.table.Name] == nil {
		e[r.table.Name] = map[string]client.Row{}
	}
	e[r.table.Name][r.id] = client.Row{Version: 1, Values: r.values}
}

func (e expectation) update(r row, u update) {
	e[r.table.Name][r.id] = client.Row{Version: e.row(r).Version + 1, Values: u.values}
}

func (e expectation) remove(r row) { delete(e[r.table.Name], r.id) }

// compare compares the rows of a client with the expectation, table by table.
func (e expectation) compare(tables []tablePlan, c *client.Client) error {
	for _, t := range tables {
		want, got := e[t.table.Name], c.Rows(t.table.Name)
		for _, id := range sortedKeys(want) {
			row, ok := got[id]
			if !ok {
				return fmt.Errorf("table %q: the client lacks row %q", t.table.Name, id)
			}
			if diff := diffRow(t.table, want[id], row); diff != "" {
				return fmt.Errorf("table %q, row %q: %s", t.table.Name, id, diff)
			}
		}
		for _, id := range sortedKeys(got) {
			if _, ok := want[id]; !ok {
				return fmt.Errorf("table %q: the client has row %q, which should not be there", t.table.Name, id)
			}
		}
	}
	return nil
}

// diffRow says how a row differs from the expected one, "" when it does not.
func diffRow(t *schema.Table, want, got client.Row) string {
	if want.Version != got.Version {
		return fmt.Sprintf("the version is %d, should be %d", got.Version, want.Version)
	}
	for i, c := range t.Columns {
		w, g := want.Values[i], got.Values[i]
		if w.Null != g.Null || w.Int != g.Int || math.Float64bits(w.Float) != math.Float64bits(g.Float) || !bytes.Equal(w.Bytes, g.Bytes) {
			return fmt.Sprintf("column %q is %s, should be %s", c.Name, show(c.Type, g), show(c.Type, w))
		}
	}
	return ""
}

func show(t ssp2.ColumnType, v ssp2.Value) string {
	switch {
	case v.Null:
		return "NULL"
	case t == ssp2.TypeInteger:
		return strconv.FormatInt(v.Int, 10)
	case t == ssp2.TypeBoolean:
		return strconv.FormatBool(v.Int != 0)
	case t == ssp2.TypeFloat:
		return fmt.Sprint(v.Float)
	case t != ssp2.TypeBytes && t != ssp2.TypeCRDT && utf8.Valid(v.Bytes):
		return fmt.Sprintf("%q", v.Bytes)
	}
	return fmt.Sprintf("0x%x", v.Bytes)
}

func columnNames(t *schema.Table, set ssp2.Bitmap) []string {
	names := []string{}
	for i, c := range t.Columns {
		if set.Has(i) {
			names = append(names, c.Name)
		}
	}
	return names
}

// OutcomeError is an outcome of a push that is not the expected one.
type OutcomeError struct {
	Want string
	Got  client.Result
}

func outcomeError(want string, got client.Result) error { return &OutcomeError{want, got} }

func (e *OutcomeError) Error() string {
	return fmt.Sprintf("the commit is %s, should be %s", outcome(e.Got), e.Want)
}

// outcome describes an outcome in words.
func outcome(r client.Result) string {
	var b strings.Builder
	b.WriteString(r.Status.String())
	if r.CommitSeq != nil {
		fmt.Fprintf(&b, " as commit %d", *r.CommitSeq)
	}
	for _, op := range r.Results {
		if op.Status != ssp2.OpApplied {
			fmt.Fprintf(&b, ", operation %d: %s (%s)", op.OpIndex, op.Code, op.Message)
		}
	}
	return b.String()
}

// sameOutcome compares outcomes byte by byte, details included (§2.3).
func sameOutcome(a, b client.Result) bool {
	encode := func(r client.Result) string {
		buf, err := ssp2.AppendFrame(nil, ssp2.WireV3, &r.PushResult)
		if err == nil && r.Details != nil {
			buf, err = ssp2.AppendFrame(buf, ssp2.WireV3, r.Details)
		}
		if err != nil {
			panic(fmt.Sprintf("smoke: a decoded outcome cannot be encoded: %v", err))
		}
		return string(buf)
	}
	return encode(a) == encode(b)
}
