package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// The IR as decoded, before any rule about its meaning is checked. Fields that
// were absent or of the wrong JSON type have been reported already and are nil.

type irDocument struct {
	version   *int32
	tables    []*irTable
	badTables bool // tables is no array
}

type irTable struct {
	path        string
	name        *string
	primaryKey  *string
	columns     []*irColumn
	scopes      []*irScope
	indexes     []*irIndex
	references  []*irReference
	materialize *bool
	badScopes   bool // no array, or no table to hold one
}

type irColumn struct {
	path         string
	name         *string
	typ          *string
	nullable     *bool
	crdtType     *string
	encrypted    *bool
	declaredType *string
}

type irScope struct {
	path     string
	pattern  *string
	variable *string
	column   *string
}

type irIndex struct {
	path    string
	name    *string
	columns []*string // nil: absent or no array
	unique  *bool
}

type irReference struct {
	path     string
	column   *string
	parent   *string
	onDelete *string
}

// decoder reads the document. It goes on after a problem, so that all are
// reported at once; table is the one it is in.
type decoder struct {
	problems []Problem
	table    string
}

// field reads the value of one field of an object.
type field struct {
	name     string
	required bool
	read     func(path string, raw json.RawMessage)
}

// Anything may stand in these, anywhere: they are for clients and generators.
var ignoredFields = map[string]bool{
	"subscriptions": true,
	"ftsIndexes":    true,
	"extensions":    true,
}

func (d *decoder) problem(path string, rule Rule, format string, args ...any) {
	d.problems = append(d.problems, Problem{
		Path: path, Table: d.table, Rule: rule, Message: fmt.Sprintf(format, args...),
	})
}

// document returns nil when the document is not an object in JSON.
func (d *decoder) document(ir []byte) *irDocument {
	doc := &irDocument{}
	if !utf8.Valid(ir) {
		d.problem("", RuleSyntax, "the document is not UTF-8")
		return nil
	}
	var raw json.RawMessage
	if err := json.Unmarshal(ir, &raw); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			d.problem("", RuleSyntax, "not JSON: %v at byte %d", syntax, syntax.Offset)
		} else {
			d.problem("", RuleSyntax, "not JSON: %v", err)
		}
		return nil
	}
	var irVersion *int32
	versions := []int32{}
	if !d.object("", raw, []field{
		{"irVersion", true, d.integer(&irVersion)},
		{"schemaVersion", true, d.integer(&doc.version)},
		{"schemaVersions", false, func(path string, raw json.RawMessage) {
			d.array(path, raw, func(path string, raw json.RawMessage) {
				if v := d.schemaVersion(path, raw); v != nil {
					versions = append(versions, *v)
				}
			})
		}},
		{"tables", false, func(path string, raw json.RawMessage) {
			doc.badTables = !d.array(path, raw, func(path string, raw json.RawMessage) {
				doc.tables = append(doc.tables, d.irTable(path, raw))
			})
			d.table = ""
		}},
	}) {
		return nil
	}
	if irVersion != nil && *irVersion != 1 {
		d.problem("irVersion", RuleIRVersion, "irVersion is %d, this server reads 1", *irVersion)
	}
	d.checkVersions(doc.version, versions)
	return doc
}

func (d *decoder) checkVersions(version *int32, history []int32) {
	if version == nil {
		return
	}
	if *version < 1 {
		d.problem("schemaVersion", RuleVersion, "schemaVersion is %d, the first version is 1", *version)
	}
	for i, v := range history {
		switch {
		case v < 1:
			d.problem("schemaVersions", RuleVersion, "version %d: the first version is 1", v)
		case i > 0 && v <= history[i-1]:
			d.problem("schemaVersions", RuleVersion, "version %d does not come after version %d", v, history[i-1])
		}
	}
	if n := len(history); n > 0 && history[n-1] != *version {
		d.problem("schemaVersions", RuleVersion,
			"the last version listed is %d, schemaVersion is %d", history[n-1], *version)
	}
}

func (d *decoder) schemaVersion(path string, raw json.RawMessage) (version *int32) {
	d.object(path, raw, []field{
		{"version", true, d.integer(&version)},
		{"migrations", false, func(path string, raw json.RawMessage) {
			d.array(path, raw, func(path string, raw json.RawMessage) {
				var name *string
				d.text(&name)(path, raw)
			})
		}},
	})
	return version
}

func (d *decoder) irTable(path string, raw json.RawMessage) *irTable {
	t := &irTable{path: path}
	d.table = nameOf(raw)
	if !d.object(path, raw, []field{
		{"name", true, d.text(&t.name)},
		{"primaryKey", true, d.text(&t.primaryKey)},
		{"columns", true, func(path string, raw json.RawMessage) {
			d.array(path, raw, func(path string, raw json.RawMessage) {
				t.columns = append(t.columns, d.column(path, raw))
			})
		}},
		{"scopes", false, func(path string, raw json.RawMessage) {
			t.badScopes = !d.array(path, raw, func(path string, raw json.RawMessage) {
				t.scopes = append(t.scopes, d.scope(path, raw))
			})
		}},
		{"indexes", false, func(path string, raw json.RawMessage) {
			d.array(path, raw, func(path string, raw json.RawMessage) {
				t.indexes = append(t.indexes, d.index(path, raw))
			})
		}},
		{"references", false, func(path string, raw json.RawMessage) {
			d.array(path, raw, func(path string, raw json.RawMessage) {
				t.references = append(t.references, d.reference(path, raw))
			})
		}},
		{"materialize", false, d.boolean(&t.materialize)},
	}) {
		t.badScopes = true
	}
	return t
}

func (d *decoder) column(path string, raw json.RawMessage) *irColumn {
	c := &irColumn{path: path}
	first, name := len(d.problems), nameOf(raw)
	d.object(path, raw, []field{
		{"name", true, d.text(&c.name)},
		{"type", true, d.text(&c.typ)},
		{"nullable", true, d.boolean(&c.nullable)},
		{"crdtType", false, d.text(&c.crdtType)},
		{"encrypted", false, d.boolean(&c.encrypted)},
		{"declaredType", false, d.text(&c.declaredType)},
	})
	for i := first; i < len(d.problems); i++ {
		d.problems[i].Column = name
	}
	return c
}

func (d *decoder) scope(path string, raw json.RawMessage) *irScope {
	s := &irScope{path: path}
	d.object(path, raw, []field{
		{"pattern", true, d.text(&s.pattern)},
		{"variable", false, d.text(&s.variable)},
		{"column", false, d.text(&s.column)},
	})
	return s
}

func (d *decoder) index(path string, raw json.RawMessage) *irIndex {
	x := &irIndex{path: path}
	d.object(path, raw, []field{
		{"name", true, d.text(&x.name)},
		{"columns", true, func(path string, raw json.RawMessage) {
			names := []*string{}
			if d.array(path, raw, func(path string, raw json.RawMessage) {
				var name *string
				d.text(&name)(path, raw)
				names = append(names, name)
			}) {
				x.columns = names
			}
		}},
		{"unique", false, d.boolean(&x.unique)},
	})
	return x
}

func (d *decoder) reference(path string, raw json.RawMessage) *irReference {
	r := &irReference{path: path}
	d.object(path, raw, []field{
		{"column", true, d.text(&r.column)},
		{"parentTable", true, d.text(&r.parent)},
		{"onDelete", true, d.text(&r.onDelete)},
	})
	return r
}

// object reads a JSON object field by field and says whether it was one. The
// document is known to be well-formed.
func (d *decoder) object(path string, raw json.RawMessage, fields []field) bool {
	if raw[0] != '{' {
		d.problem(path, RuleFieldType, "must be an object, is %s", jsonType(raw))
		return false
	}
	seen := make(map[string]bool, len(fields))
	eachMember(raw, func(name string, value json.RawMessage) {
		at := join(path, name)
		if seen[name] {
			d.problem(at, RuleDuplicateField, "the field %q occurs twice", name)
			return
		}
		seen[name] = true
		for _, f := range fields {
			if f.name == name {
				f.read(at, value)
				return
			}
		}
		if !ignoredFields[name] {
			d.problem(at, RuleUnknownField, "the field %q is unknown", name)
		}
	})
	for _, f := range fields {
		if f.required && !seen[f.name] {
			d.problem(path, RuleMissingField, "the field %q is missing", f.name)
		}
	}
	return true
}

// eachMember calls fn for the members of a well-formed object, in order.
func eachMember(object json.RawMessage, fn func(name string, value json.RawMessage)) {
	dec := json.NewDecoder(bytes.NewReader(object))
	if _, err := dec.Token(); err != nil {
		return
	}
	for dec.More() {
		var value json.RawMessage
		key, err := dec.Token()
		if err != nil || dec.Decode(&value) != nil {
			return
		}
		fn(fmt.Sprint(key), value)
	}
}

// nameOf reads ahead the name of an object, so that the problems of what stands
// before it carry it too. It is empty when there is none.
func nameOf(raw json.RawMessage) (name string) {
	if raw[0] != '{' {
		return ""
	}
	eachMember(raw, func(member string, value json.RawMessage) {
		if member == "name" && name == "" && json.Unmarshal(value, &name) != nil {
			name = ""
		}
	})
	return name
}

// array reads a JSON array and says whether it was one.
func (d *decoder) array(path string, raw json.RawMessage, read func(path string, raw json.RawMessage)) bool {
	var items []json.RawMessage
	if raw[0] != '[' || json.Unmarshal(raw, &items) != nil {
		d.problem(path, RuleFieldType, "must be an array, is %s", jsonType(raw))
		return false
	}
	for i, item := range items {
		read(path+"["+strconv.Itoa(i)+"]", item)
	}
	return true
}

func (d *decoder) text(to **string) func(string, json.RawMessage) {
	return func(path string, raw json.RawMessage) {
		var s string
		if raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
			d.problem(path, RuleFieldType, "must be a string, is %s", jsonType(raw))
			return
		}
		*to = &s
	}
}

func (d *decoder) boolean(to **bool) func(string, json.RawMessage) {
	return func(path string, raw json.RawMessage) {
		b, err := strconv.ParseBool(string(raw))
		if err != nil || (raw[0] != 't' && raw[0] != 'f') {
			d.problem(path, RuleFieldType, "must be true or false, is %s", jsonType(raw))
			return
		}
		*to = &b
	}
}

func (d *decoder) integer(to **int32) func(string, json.RawMessage) {
	return func(path string, raw json.RawMessage) {
		n, err := strconv.ParseInt(string(raw), 10, 32)
		if err != nil {
			d.problem(path, RuleFieldType, "must be an integer of 32 bits, is %s", jsonType(raw))
			return
		}
		v := int32(n)
		*to = &v
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// jsonType describes a JSON value for a message.
func jsonType(raw json.RawMessage) string {
	switch raw[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	default:
		return "the number " + string(raw[:min(len(raw), 40)])
	}
}
