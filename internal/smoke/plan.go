package smoke

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// ErrNoTable reports that a schema has no table that a run could write to.
var ErrNoTable = errors.New("no table to write to")

// targetRows is how many rows of the target table a run writes.
const targetRows = 4

// plan is what one pass of a run works with. Every pass has rows of its own.
type plan struct {
	target  *schema.Table
	mutable []int // columns of the target that updates change, never empty
	tables  []tablePlan
	rows    []row // of the target
	parents []row // in an order in which they can be inserted
}

// tablePlan is one table that the pass writes to, with the scopes that hold all it writes there.
type tablePlan struct {
	table  *schema.Table
	scopes ssp2.ScopeMap
}

// row is one row of the pass.
type row struct {
	table  *schema.Table
	id     string
	values []ssp2.Value
}

// Choose returns the table that a run writes to: the one with this name, or, for "", the first of those whose columns
// have most types.
func Choose(s *schema.Schema, name string) (*schema.Table, error) {
	if name != "" {
		t, ok := s.Table(name)
		if !ok {
			return nil, fmt.Errorf("%w: the schema has no table %q", ErrNoTable, name)
		}
		if problem := unfit(t, nil); problem != "" {
			return nil, fmt.Errorf("%w: table %q: %s", ErrNoTable, name, problem)
		}
		if len(mutableColumns(t)) == 0 {
			return nil, fmt.Errorf("%w: table %q has no column that an update could change", ErrNoTable, name)
		}
		return t, nil
	}
	var best *schema.Table
	most := 0
	var problems []string
	for _, t := range s.Tables {
		if problem := unfit(t, nil); problem != "" {
			problems = append(problems, fmt.Sprintf("%s: %s", t.Name, problem))
			continue
		}
		types := map[ssp2.ColumnType]bool{}
		for _, c := range mutableColumns(t) {
			types[t.Columns[c].Type] = true
		}
		if len(types) > most {
			best, most = t, len(types)
		}
	}
	if best == nil {
		return nil, fmt.Errorf("%w: every table has a column that cannot be made up, or none to change (%s)",
			ErrNoTable, strings.Join(problems, "; "))
	}
	return best, nil
}

// unfit says why rows of a table cannot be made up, "" when they can. The path holds the tables that need this one.
func unfit(t *schema.Table, path []*schema.Table) string {
	if slices.Contains(path, t) {
		return "its references form a cycle"
	}
	if t.Columns[t.PrimaryKey].Type == ssp2.TypeBoolean {
		return "its primary key is a boolean"
	}
	for i, c := range t.Columns {
		if c.Nullable {
			continue
		}
		if c.Type == ssp2.TypeBlobRef || c.Type == ssp2.TypeCRDT {
			return fmt.Sprintf("column %q is a %v that is not nullable", c.Name, c.Type)
		}
		if parent := parentOf(t, i); parent != nil {
			if i == t.PrimaryKey {
				return "its primary key is a reference"
			}
			if problem := unfit(parent, append(path, t)); problem != "" {
				return fmt.Sprintf("column %q references table %q: %s", c.Name, parent.Name, problem)
			}
		}
	}
	return ""
}

// parentOf returns the table that a column references, nil for none.
func parentOf(t *schema.Table, column int) *schema.Table {
	for _, r := range t.References {
		if r.Column == column {
			return r.Parent
		}
	}
	return nil
}

func mutableColumns(t *schema.Table) []int {
	var columns []int
	for i, c := range t.Columns {
		if i == t.PrimaryKey || t.IsScope(i) || parentOf(t, i) != nil || c.Type == ssp2.TypeBlobRef || c.Type == ssp2.TypeCRDT {
			continue
		}
		columns = append(columns, i)
	}
	return columns
}

// maker makes up the rows of one pass.
type maker struct {
	target *schema.Table
	rand   *rand.Rand
	prefix string // of made-up texts
	scopes map[string]string
	made   map[*schema.Table]row // parents
	order  []row
}

// newPlan makes up a pass. The texts of the scope variables in fixed are used as they are.
func newPlan(target *schema.Table, fixed map[string]string, r *rand.Rand) (*plan, *maker, error) {
	m := &maker{
		target: target, rand: r, prefix: fmt.Sprintf("smoke-%08x", r.Uint32()),
		scopes: map[string]string{}, made: map[*schema.Table]row{},
	}
	if s := scopeOf(target, target.PrimaryKey); s != nil && fixed[s.Variable] != "" {
		return nil, nil, fmt.Errorf("the scope variable %q is the primary key of table %q, so it cannot have one value for all rows",
			s.Variable, target.Name)
	}
	tables := requiredTables(target, nil)
	if err := m.chooseScopes(tables, fixed); err != nil {
		return nil, nil, err
	}
	p := &plan{target: target, mutable: mutableColumns(target)}
	if err := m.makeParents(target); err != nil {
		return nil, nil, err
	}
	p.parents = m.order
	for i := range targetRows {
		made, err := m.row(target, i)
		if err != nil {
			return nil, nil, err
		}
		p.rows = append(p.rows, made)
	}
	for _, t := range tables {
		scopes := ssp2.ScopeMap{}
		for _, made := range slices.Concat(p.parents, p.rows) {
			if made.table != t {
				continue
			}
			for _, s := range t.Scopes {
				text, _ := schema.ScopeText(t.Columns[s.Column].Type, made.values[s.Column])
				if !slices.Contains(scopes[s.Variable], text) {
					scopes[s.Variable] = append(scopes[s.Variable], text)
				}
			}
		}
		p.tables = append(p.tables, tablePlan{t, scopes})
	}
	return p, m, nil
}

// requiredTables returns the tables that rows of t need, parents first, and t.
func requiredTables(t *schema.Table, tables []*schema.Table) []*schema.Table {
	for i, c := range t.Columns {
		if parent := parentOf(t, i); parent != nil && !c.Nullable {
			tables = requiredTables(parent, tables)
		}
	}
	if !slices.Contains(tables, t) {
		tables = append(tables, t)
	}
	return tables
}

// chooseScopes picks one text per scope variable that every column of the variable can hold.
func (m *maker) chooseScopes(tables []*schema.Table, fixed map[string]string) error {
	for _, t := range tables {
		for _, s := range t.Scopes {
			if _, ok := m.scopes[s.Variable]; ok {
				continue
			}
			candidates := []string{m.prefix, strconv.Itoa(m.rand.IntN(1 << 40)), "true"}
			if text, ok := fixed[s.Variable]; ok {
				candidates = []string{text}
			}
			i := slices.IndexFunc(candidates, func(text string) bool { return fits(tables, s.Variable, text) })
			if i < 0 {
				return fmt.Errorf("the scope variable %q has no value that suits all its columns (tried %s)",
					s.Variable, strings.Join(candidates, ", "))
			}
			m.scopes[s.Variable] = candidates[i]
		}
	}
	for variable := range fixed {
		if _, ok := m.scopes[variable]; !ok {
			return fmt.Errorf("no scope variable %q in the tables written to; there are %s",
				variable, strings.Join(sortedKeys(m.scopes), ", "))
		}
	}
	return nil
}

func fits(tables []*schema.Table, variable, text string) bool {
	for _, t := range tables {
		if s, ok := t.Scope(variable); ok {
			if _, ok := schema.ParseScopeText(t.Columns[s.Column].Type, text); !ok {
				return false
			}
		}
	}
	return true
}

// makeParents makes one row of every table that rows of t need.
func (m *maker) makeParents(t *schema.Table) error {
	for i, c := range t.Columns {
		parent := parentOf(t, i)
		if parent == nil || c.Nullable {
			continue
		}
		if _, ok := m.made[parent]; ok {
			continue
		}
		if err := m.makeParents(parent); err != nil {
			return err
		}
		made, err := m.row(parent, 0)
		if err != nil {
			return err
		}
		// A reference that is a scope column has the scope's value, so its parent has it as its key.
		if s := scopeOf(t, i); s != nil {
			key, ok := schema.ParseScopeText(parent.Columns[parent.PrimaryKey].Type, m.scopes[s.Variable])
			if !ok {
				return fmt.Errorf("the scope value %q cannot be a key of table %q", m.scopes[s.Variable], parent.Name)
			}
			made.values[parent.PrimaryKey], made.id = key, m.scopes[s.Variable]
		}
		m.made[parent] = made
		m.order = append(m.order, made)
	}
	return nil
}

func scopeOf(t *schema.Table, column int) *schema.Scope {
	for i := range t.Scopes {
		if t.Scopes[i].Column == column {
			return &t.Scopes[i]
		}
	}
	return nil
}

// row makes up a row. In every second one what may be NULL is NULL.
func (m *maker) row(t *schema.Table, n int) (row, error) {
	r := row{table: t, values: make([]ssp2.Value, len(t.Columns))}
	for i := range t.Columns {
		c := &t.Columns[i]
		v := &r.values[i]
		parent, scope := parentOf(t, i), scopeOf(t, i)
		switch {
		case i == t.PrimaryKey && (scope == nil || t == m.target):
			*v = m.value(c)
		case scope != nil:
			*v, _ = schema.ParseScopeText(c.Type, m.scopes[scope.Variable])
		case parent != nil && !c.Nullable:
			made := m.made[parent]
			*v = made.values[parent.PrimaryKey]
		case parent != nil || c.Type == ssp2.TypeBlobRef || c.Type == ssp2.TypeCRDT || c.Nullable && n%2 == 1:
			v.Null = true
		default:
			*v = m.value(c)
		}
	}
	var ok bool
	if r.id, ok = t.RowID(r.values); !ok {
		return row{}, fmt.Errorf("table %q: a made-up row has no id", t.Name)
	}
	return r, nil
}

// value makes up a value that no other row has, where the type has room for that.
func (m *maker) value(c *schema.Column) ssp2.Value {
	switch c.Type {
	case ssp2.TypeInteger:
		return ssp2.Value{Int: 1 + m.rand.Int64N(1<<40)}
	case ssp2.TypeFloat:
		return ssp2.Value{Float: float64(1+m.rand.Int64N(1<<30)) + 0.25}
	case ssp2.TypeBoolean:
		return ssp2.Value{Int: m.rand.Int64N(2)}
	case ssp2.TypeJSON:
		// The order of keys and the space must come back as they are.
		return ssp2.Value{Bytes: fmt.Appendf(nil, `{"text": "%s ✓","nr":%d}`, m.prefix, m.rand.Uint32())}
	case ssp2.TypeBytes:
		return ssp2.Value{Bytes: []byte("\x00\xff" + m.token())}
	default:
		return ssp2.Value{Bytes: []byte(m.prefix + "-" + m.token())}
	}
}

func (m *maker) token() string {
	var b [6]byte
	for i := range b {
		b[i] = byte(m.rand.Uint32())
	}
	return hex.EncodeToString(b[:])
}

// other returns a value that differs from the given one.
func (m *maker) other(c *schema.Column, v ssp2.Value) ssp2.Value {
	if c.Type == ssp2.TypeBoolean {
		return ssp2.Value{Int: 1 - v.Int}
	}
	return m.value(c)
}
