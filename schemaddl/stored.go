package schemaddl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/syncpg/syncpg/ssp2"
)

// member is a table or a column of a stored layout, its values canonical JSON.
type member map[string]json.RawMessage

func (m member) name() string {
	name, err := strconv.Unquote(string(m["name"]))
	if err != nil {
		return string(m["name"])
	}
	return name
}

// String renders a column as it is stored; nil is none.
func (m member) String() string {
	if m == nil {
		return "none"
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func equal(a, b member) bool {
	return maps.EqualFunc(a, b, func(x, y json.RawMessage) bool { return bytes.Equal(x, y) })
}

// storedMismatch says where a schema departs from the layout that was recorded at
// its installation: in the first table, there in the first column or else in the
// first of the other members.
func storedMismatch(want, stored string) *LayoutError {
	e := &LayoutError{
		Code: ssp2.CodeStorageStoredLayoutMismatch, Reason: "the schema changed without a new version",
		Expected: difference(want, stored), Actual: difference(stored, want),
	}
	var a, b struct {
		Tables []member `json:"tables"`
	}
	if json.Unmarshal([]byte(want), &a) != nil || json.Unmarshal([]byte(stored), &b) != nil {
		return e
	}
	x, y := firstDifference(a.Tables, b.Tables)
	switch {
	case x == nil && y == nil: // other order
		return e
	case x == nil:
		e.Table, e.Expected, e.Actual = y.name(), "none", "a table"
		return e
	case y == nil:
		e.Table, e.Expected, e.Actual = x.name(), "a table", "none"
		return e
	}
	e.Table = x.name()
	var columns, had []member
	if json.Unmarshal(x["columns"], &columns) == nil && json.Unmarshal(y["columns"], &had) == nil {
		switch c, h := firstDifference(columns, had); {
		case c != nil:
			e.Column, e.Expected, e.Actual = c.name(), c.String(), h.String()
			return e
		case h != nil:
			e.Column, e.Expected, e.Actual = h.name(), c.String(), h.String()
			return e
		}
	}
	for _, key := range slices.Sorted(maps.Keys(x)) {
		if !bytes.Equal(x[key], y[key]) {
			e.Expected, e.Actual = fmt.Sprintf("%s %s", key, x[key]), fmt.Sprintf("%s %s", key, y[key])
			return e
		}
	}
	return e
}

// firstDifference returns the first pair of one name that is not equal; nil stands
// for what one of the lists does not have.
func firstDifference(a, b []member) (x, y member) {
	named := func(list []member, name string) member {
		i := slices.IndexFunc(list, func(m member) bool { return m.name() == name })
		if i < 0 {
			return nil
		}
		return list[i]
	}
	for _, x := range a {
		if y := named(b, x.name()); !equal(x, y) {
			return x, y
		}
	}
	for _, y := range b {
		if named(a, y.name()) == nil {
			return nil, y
		}
	}
	return nil, nil
}

// difference returns the part of a that begins where it departs from b.
func difference(a, b string) string {
	const before, length = 20, 80
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	start := max(0, i-before)
	return fmt.Sprintf("…%s…", a[start:min(len(a), i+length)])
}
