package schema

import (
	"errors"
	"fmt"
	"iter"
	"maps"

	"github.com/syncpg/syncpg/ssp2"
)

// Versions are the schema versions that a server serves (§9): the newest, which is the
// installed one, and older ones, whose clients get and send the rows of the newest in the
// row codec of theirs (§2.4). It never changes.
type Versions struct {
	newest *Schema
	served map[int32]*Schema
	views  map[[2]int32]*View
}

// View is the rows of one schema version as another one has them. For the tables that
// both have, columns are matched by name.
type View struct {
	// Schema is the version that rows are turned into.
	Schema *Schema

	rows []*ssp2.Projection // by Table.Index of the other version; nil: no such table
}

// NewVersions checks that the older versions can be served from the newest, and works out
// how. Versions must differ and be lower than the newest. Each table of an older one must
// be in the newest, with the same primary key and the same scopes; its columns too, with
// type, nullability and what only clients look at (crdtType, encrypted, declaredType) as
// they are there; and the columns it lacks must be nullable. Tables may be missing.
func NewVersions(newest *Schema, older ...*Schema) (*Versions, error) {
	v := &Versions{newest: newest, served: map[int32]*Schema{newest.Version: newest}, views: map[[2]int32]*View{}}
	for i, s := range older {
		switch {
		case s == nil:
			return nil, fmt.Errorf("schema: older schema %d is nil", i)
		case v.served[s.Version] != nil && s.Version != newest.Version:
			return nil, fmt.Errorf("schema: version %d is among the older schemas twice", s.Version)
		case s.Version >= newest.Version:
			return nil, fmt.Errorf("schema: version %d is not older than version %d", s.Version, newest.Version)
		}
		if err := servable(newest, s); err != nil {
			return nil, fmt.Errorf("schema: version %d cannot be served from version %d: %w", s.Version, newest.Version, err)
		}
		v.served[s.Version] = s
	}
	for from, a := range v.served {
		for to, b := range v.served {
			if from == to {
				continue
			}
			view, err := newView(a, b)
			if err != nil {
				return nil, fmt.Errorf("schema: version %d cannot be served from version %d: %w", to, from, err)
			}
			v.views[[2]int32{from, to}] = view
		}
	}
	return v, nil
}

// VersionsOf returns v, or without one the versions that consist of newest alone. It fails
// when newest is not the newest of v.
func VersionsOf(v *Versions, newest *Schema) (*Versions, error) {
	switch {
	case v == nil:
		return NewVersions(newest)
	case v.newest != newest:
		return nil, fmt.Errorf("schema: the newest of the versions is %d, and not the schema %d", v.newest.Version, newest.Version)
	}
	return v, nil
}

// servable says why clients of an older version cannot be served.
func servable(newest, older *Schema) error {
	for _, o := range older.Tables {
		t, ok := newest.Table(o.Name)
		if !ok {
			return fmt.Errorf("there is no table %q any more", o.Name)
		}
		if err := servableTable(t, o); err != nil {
			return fmt.Errorf("table %q: %w", o.Name, err)
		}
	}
	return nil
}

func servableTable(t, o *Table) error {
	if now, then := t.Columns[t.PrimaryKey].Name, o.Columns[o.PrimaryKey].Name; now != then {
		return fmt.Errorf("its primary key was %q and is %q", then, now)
	}
	if !samePatterns(t, o) {
		return errors.New("its scope patterns are others")
	}
	for i := range o.Scopes {
		if now, then := t.Columns[t.Scopes[i].Column].Name, o.Columns[o.Scopes[i].Column].Name; now != then {
			return fmt.Errorf("the scope %q was of column %q and is of %q", o.Scopes[i].Pattern, then, now)
		}
	}
	for i := range o.Columns {
		then := &o.Columns[i]
		j, ok := t.ColumnIndex(then.Name)
		if !ok {
			return fmt.Errorf("there is no column %q any more", then.Name)
		}
		switch now := &t.Columns[j]; {
		case now.Type != then.Type:
			return fmt.Errorf("column %q: its type was %v and is %v", then.Name, then.Type, now.Type)
		case now.Nullable && !then.Nullable:
			return fmt.Errorf("column %q: it may be NULL now, which its older clients cannot be sent", then.Name)
		case then.Nullable && !now.Nullable:
			return fmt.Errorf("column %q: it may not be NULL any more, and its older clients may send that", then.Name)
		case *now != *then:
			return fmt.Errorf("column %q: its crdtType, encrypted or declaredType are others", then.Name)
		}
	}
	for i := range t.Columns {
		if _, known := o.ColumnIndex(t.Columns[i].Name); !known && !t.Columns[i].Nullable {
			return fmt.Errorf("column %q: it is new and not nullable, so that older clients could insert no row", t.Columns[i].Name)
		}
	}
	return nil
}

func newView(from, to *Schema) (*View, error) {
	v := &View{Schema: to, rows: make([]*ssp2.Projection, len(from.Tables))}
	for _, t := range from.Tables {
		other, ok := to.Table(t.Name)
		if !ok {
			continue
		}
		var err error
		if v.rows[t.Index], err = ssp2.NewProjection(t.Wire, other.Wire); err != nil {
			return nil, fmt.Errorf("table %q: %w", t.Name, err)
		}
	}
	return v, nil
}

// Single says that one version is served.
func (v *Versions) Single() bool { return len(v.served) == 1 }

// Newest returns the newest version.
func (v *Versions) Newest() *Schema { return v.newest }

// All returns all versions, in no order.
func (v *Versions) All() iter.Seq[*Schema] { return maps.Values(v.served) }

// Schema returns a version, false when it is not served.
func (v *Versions) Schema(version int32) (*Schema, bool) {
	s, ok := v.served[version]
	return s, ok
}

// Required is what a client of a version that is not served is told to have (§1.6): the
// lowest version served above its own, or the newest when there is none.
func (v *Versions) Required(version int32) int32 {
	required := v.newest.Version
	for served := range v.served {
		if served > version {
			required = min(required, served)
		}
	}
	return required
}

// View returns the view of one version's rows in another one, nil when both are the same
// or one of them is not served.
func (v *Versions) View(from, to int32) *View { return v.views[[2]int32{from, to}] }

// Rows returns what turns rows of a table into those of the view's schema, and their table
// there; nil when it has no such table. The projection is nil when rows are the same. A nil
// View changes nothing.
func (v *View) Rows(t *Table) (*Table, *ssp2.Projection) {
	if v == nil {
		return t, nil
	}
	p := v.rows[t.Index]
	if p == nil {
		return nil, nil
	}
	other, _ := v.Schema.Table(t.Name)
	if p.Identical() {
		p = nil
	}
	return other, p
}
