package schema

import (
	"slices"
	"strconv"
	"strings"

	"github.com/syncpg/syncpg/ssp2"
)

const (
	maxIdentifierBytes = 63   // NAMEDATALEN - 1
	maxColumns         = 1590 // 1,600 of Postgres less ours
	maxIndexColumns    = 31   // 32 of Postgres less the partition
)

// columnTypes are the types by the names the IR gives them (§2.4).
var columnTypes = func() map[string]ssp2.ColumnType {
	types := make(map[string]ssp2.ColumnType)
	for t := ssp2.TypeString; t <= ssp2.TypeCRDT; t++ {
		types[t.String()] = t
	}
	return types
}()

// Every table of Postgres has these columns already.
var systemColumns = []string{"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}

// ParseOptions is what a host adds to the language of the IR. The zero value
// adds nothing.
type ParseOptions struct {
	// CRDTTypes are the crdtType names the host has mergers for, beside yjs-doc
	// (§5.10.1).
	CRDTTypes []string
}

// Parse reads and compiles a schema IR. A document that violates a rule gives an
// *Errors with every problem found.
func Parse(ir []byte) (*Schema, error) { return ParseOptions{}.Parse(ir) }

// Parse is the function Parse with the options applied.
func (o ParseOptions) Parse(ir []byte) (*Schema, error) {
	d := &decoder{}
	doc := d.document(ir)
	c := &compiler{decoder: d, crdtTypes: append([]string{"yjs-doc"}, o.CRDTTypes...)}
	var s *Schema
	if doc != nil {
		s = c.schema(doc)
	}
	if len(d.problems) > 0 {
		return nil, &Errors{Problems: d.problems}
	}
	return s, nil
}

// compiler checks the meaning of a decoded IR. It goes on after a problem; what
// it then builds is never handed out.
type compiler struct {
	*decoder
	crdtTypes []string
	indexes   map[string]string // name to table
}

// columnProblem is a problem that concerns one column.
func (c *compiler) columnProblem(path, column string, rule Rule, format string, args ...any) {
	c.problem(path, rule, format, args...)
	c.problems[len(c.problems)-1].Column = column
}

func (c *compiler) schema(doc *irDocument) *Schema {
	s := &Schema{
		byName:    make(map[string]*Table, len(doc.tables)),
		variables: make(map[string]struct{}),
	}
	if doc.version != nil {
		s.Version = *doc.version
	}
	if len(doc.tables) == 0 && !doc.badTables {
		c.problem("tables", RuleNoTables, "a schema needs at least one table")
	}
	c.indexes = make(map[string]string)
	for i, ir := range doc.tables {
		t := c.compileTable(ir)
		t.Index = i
		s.Tables = append(s.Tables, t)
		for _, scope := range t.Scopes {
			s.variables[scope.Variable] = struct{}{}
		}
		if ir.name == nil {
			continue
		}
		if _, ok := s.byName[t.Name]; ok {
			c.problem(ir.path, RuleDuplicateTable, "there is another table of this name")
			continue
		}
		s.byName[t.Name] = t
	}
	// Parents may be declared after their children.
	for i, ir := range doc.tables {
		c.table = s.Tables[i].Name
		c.compileReferences(s, s.Tables[i], ir)
	}
	return s
}

func (c *compiler) compileTable(ir *irTable) *Table {
	t := &Table{PrimaryKey: -1, columns: make(map[string]int, len(ir.columns))}
	c.table = ""
	if ir.name != nil {
		t.Name = *ir.name
		c.table = t.Name
		c.checkName(ir.path, "", "table", t.Name, "sync_")
	}
	if n := len(ir.columns); n > maxColumns {
		c.problem(ir.path, RuleTooManyColumns, "%d columns, Postgres leaves room for %d", n, maxColumns)
	}
	for i, column := range ir.columns {
		c.compileColumn(t, column)
		name := t.Columns[i].Name
		if column.name == nil {
			continue
		}
		if _, ok := t.columns[name]; ok {
			c.columnProblem(column.path, name, RuleDuplicateColumn, "the table has another column of this name")
			continue
		}
		t.columns[name] = i
	}
	c.compileKey(t, ir)
	c.compileScopes(t, ir)
	t.Materialize = materialize(t, ir)
	for _, index := range ir.indexes {
		c.compileIndex(t, index)
	}
	return t
}

// checkName checks a table or column name; column is empty for a table's.
func (c *compiler) checkName(path, column, kind, name string, reserved ...string) {
	if !c.checkIdentifier(path, column, kind, name) {
		return
	}
	if n := len(name); n > maxIdentifierBytes {
		c.columnProblem(path, column, RuleIdentifierTooLong,
			"the %s name has %d bytes, Postgres keeps %d", kind, n, maxIdentifierBytes)
	}
	// In any case, since SQLite ignores case and images carry these names (§5.3).
	lower := strings.ToLower(name)
	for _, prefix := range reserved {
		if strings.HasPrefix(lower, prefix) {
			c.columnProblem(path, column, RuleReservedName, "%s names that begin with %s are reserved", kind, prefix)
		}
	}
}

// checkIdentifier checks what holds for every name.
func (c *compiler) checkIdentifier(path, column, kind, name string) bool {
	switch {
	case name == "":
		c.columnProblem(path, column, RuleIdentifier, "the %s name is empty", kind)
	case strings.IndexByte(name, 0) >= 0:
		c.columnProblem(path, column, RuleIdentifier, "the %s name %q holds U+0000", kind, name)
	default:
		return true
	}
	return false
}

// compileColumn appends the column to the table.
func (c *compiler) compileColumn(t *Table, ir *irColumn) {
	var col Column
	if ir.name != nil {
		col.Name = *ir.name
		c.checkName(ir.path, col.Name, "column", col.Name, "_sync_", "_syncular_")
		if slices.Contains(systemColumns, col.Name) {
			c.columnProblem(ir.path, col.Name, RuleReservedName, "every table of Postgres has a system column of this name")
		}
	}
	report := func(rule Rule, format string, args ...any) {
		c.columnProblem(ir.path, col.Name, rule, format, args...)
	}
	if ir.typ != nil {
		typ, ok := columnTypes[*ir.typ]
		if !ok {
			report(RuleColumnType, "there is no column type %q", *ir.typ)
		}
		col.Type = typ
	}
	if ir.nullable != nil {
		col.Nullable = *ir.nullable
	}
	switch {
	case col.Type == 0: // unknown
	case col.Type != ssp2.TypeCRDT && ir.crdtType != nil:
		report(RuleCRDTType, "only a crdt column has a crdtType")
	case col.Type == ssp2.TypeCRDT && ir.crdtType == nil:
		report(RuleCRDTType, "a crdt column needs a crdtType")
	case col.Type == ssp2.TypeCRDT && !slices.Contains(c.crdtTypes, *ir.crdtType):
		report(RuleCRDTType, "there is no merger for crdtType %q", *ir.crdtType)
	case col.Type == ssp2.TypeCRDT:
		col.CRDTType = *ir.crdtType
	}
	c.compileEncryption(&col, ir, report)
	t.Columns = append(t.Columns, col)
	t.Wire = append(t.Wire, ssp2.Column{Name: col.Name, Type: col.Type, Nullable: col.Nullable})
}

func (c *compiler) compileEncryption(col *Column, ir *irColumn, report func(Rule, string, ...any)) {
	col.Encrypted = ir.encrypted != nil && *ir.encrypted
	if !col.Encrypted {
		if ir.declaredType != nil {
			report(RuleDeclaredType, "only an encrypted column has a declaredType")
		}
		return
	}
	switch col.Type {
	case 0, ssp2.TypeBytes:
	case ssp2.TypeCRDT:
		report(RuleEncryptedCRDT, "the server merges a crdt column, so it cannot be encrypted")
	default:
		report(RuleEncryptedType, "an encrypted column has type bytes, this one %s", *ir.typ)
	}
	switch {
	case ir.declaredType == nil:
		report(RuleDeclaredType, "an encrypted column needs a declaredType")
	case *ir.declaredType == "crdt":
		report(RuleEncryptedCRDT, "the server merges a crdt column, so it cannot be encrypted")
	case columnTypes[*ir.declaredType] == 0:
		report(RuleDeclaredType, "there is no column type %q", *ir.declaredType)
	default:
		col.DeclaredType = *ir.declaredType
	}
}

// column finds a column that something of the table names.
func (c *compiler) column(t *Table, path, what, name string) (int, bool) {
	i, ok := t.columns[name]
	if !ok {
		c.columnProblem(path, name, RuleUnknownColumn, "%s names a column that the table does not have", what)
	}
	return i, ok
}

// hasText says whether values of the type can be a key or a scope value.
func hasText(t ssp2.ColumnType) bool {
	return t != ssp2.TypeBytes && t != ssp2.TypeBlobRef && t != ssp2.TypeCRDT
}

func (c *compiler) compileKey(t *Table, ir *irTable) {
	if ir.primaryKey == nil {
		return
	}
	i, ok := c.column(t, ir.path+".primaryKey", "the primary key", *ir.primaryKey)
	if !ok {
		return
	}
	t.PrimaryKey = i
	col, path := t.Columns[i], ir.columns[i].path
	switch {
	case col.Encrypted:
		c.columnProblem(path, col.Name, RuleKeyEncrypted, "the primary key is the row id, so it cannot be encrypted")
	case !hasText(col.Type):
		c.columnProblem(path, col.Name, RuleKeyType, "the primary key cannot be of type %s", col.Type)
	}
	if col.Nullable {
		c.columnProblem(path, col.Name, RuleKeyNullable, "the primary key cannot be nullable")
	}
}

func (c *compiler) compileScopes(t *Table, ir *irTable) {
	if len(ir.scopes) == 0 && !ir.badScopes {
		c.problem(ir.path, RuleNoScope, "a table needs at least one scope pattern")
	}
	columns := make(map[string]int, len(ir.scopes))
	for _, scope := range ir.scopes {
		if scope.pattern == nil {
			continue
		}
		prefix, variable, ok := splitPattern(*scope.pattern)
		if !ok {
			c.problem(scope.path, RuleScopePattern, "the scope pattern %q is not prefix:{variable}", *scope.pattern)
			continue
		}
		if scope.variable != nil && *scope.variable != variable {
			c.problem(scope.path, RuleScopeVariable,
				"the variable is %q, the scope pattern %q has %q", *scope.variable, *scope.pattern, variable)
		}
		name := variable
		if scope.column != nil {
			name = *scope.column
		}
		i, ok := c.column(t, scope.path, "the scope pattern "+strconv.Quote(*scope.pattern), name)
		if !ok {
			continue
		}
		c.checkScopeColumn(scope.path, t.Columns[i])
		switch other, twice := columns[variable]; {
		case twice && other != i:
			c.columnProblem(scope.path, name, RuleScopeTwoColumns,
				"the scope variable %q stands for the column %q already", variable, t.Columns[other].Name)
			continue
		case twice:
			c.columnProblem(scope.path, name, RuleDuplicateScope, "the scope variable %q is declared twice", variable)
			continue
		}
		columns[variable] = i
		t.Scopes = append(t.Scopes, Scope{Pattern: *scope.pattern, Prefix: prefix, Variable: variable, Column: i})
	}
	slices.SortFunc(t.Scopes, func(a, b Scope) int { return ssp2.CompareUTF16(a.Variable, b.Variable) })
}

func (c *compiler) checkScopeColumn(path string, col Column) {
	switch {
	case col.Encrypted:
		c.columnProblem(path, col.Name, RuleScopeEncrypted, "the server reads scope values, so they cannot be encrypted")
	case !hasText(col.Type):
		c.columnProblem(path, col.Name, RuleScopeType, "a scope column cannot be of type %s", col.Type)
	}
}

// splitPattern takes a scope pattern apart. '=' separates variable and value in
// the log's scope index, and no name of Postgres or text value holds U+0000.
func splitPattern(pattern string) (prefix, variable string, ok bool) {
	rest, closed := strings.CutSuffix(pattern, "}")
	prefix, variable, found := strings.Cut(rest, ":{")
	ok = closed && found && prefix != "" && variable != "" &&
		!strings.ContainsAny(prefix, "{}\x00") && !strings.ContainsAny(variable, "{}:=\x00")
	return prefix, variable, ok
}

// materialize applies the default of SEMANTICS §4: a table whose every column
// beyond key and scopes is encrypted has nothing to read in typed columns.
func materialize(t *Table, ir *irTable) bool {
	if ir.materialize != nil {
		return *ir.materialize
	}
	encrypted := false
	for i, col := range t.Columns {
		if i == t.PrimaryKey || t.IsScope(i) {
			continue
		}
		if !col.Encrypted {
			return true
		}
		encrypted = true
	}
	return !encrypted
}

func (c *compiler) compileIndex(t *Table, ir *irIndex) {
	name := ""
	if ir.name != nil {
		name = *ir.name
		c.checkIdentifier(ir.path, "", "index", name)
		if table, ok := c.indexes[name]; ok {
			c.problem(ir.path, RuleDuplicateIndex, "the table %q has an index of the name %q", table, name)
		}
		c.indexes[name] = t.Name
	}
	if n := len(ir.columns); ir.columns != nil && (n == 0 || n > maxIndexColumns) {
		c.problem(ir.path, RuleIndexColumns, "the index %q has %d columns, must have 1 to %d", name, n, maxIndexColumns)
	}
	index := Index{Name: name, Unique: ir.unique != nil && *ir.unique}
	clientOnly := false
	what := "the index " + strconv.Quote(name)
	for _, column := range ir.columns {
		if column == nil {
			continue
		}
		i, ok := c.column(t, ir.path, what, *column)
		if !ok {
			continue
		}
		col := t.Columns[i]
		switch {
		case slices.Contains(index.Columns, i):
			c.columnProblem(ir.path, col.Name, RuleIndexColumns, "%s has the column twice", what)
		case col.Type == ssp2.TypeCRDT:
			c.columnProblem(ir.path, col.Name, RuleIndexCRDT, "%s has a crdt column", what)
		case col.Encrypted && index.Unique:
			c.columnProblem(ir.path, col.Name, RuleIndexEncrypted,
				"%s is unique over an encrypted column: the server cannot compare the plaintexts", what)
		}
		clientOnly = clientOnly || col.Encrypted
		index.Columns = append(index.Columns, i)
	}
	if !clientOnly {
		t.Indexes = append(t.Indexes, index)
	}
}

func (c *compiler) compileReferences(s *Schema, t *Table, ir *irTable) {
	for _, ref := range ir.references {
		var r Reference
		var column Column
		hasColumn := false
		if ref.column != nil {
			if r.Column, hasColumn = c.column(t, ref.path, "the reference", *ref.column); hasColumn {
				column = t.Columns[r.Column]
			}
		}
		name := column.Name
		if ref.parent != nil {
			r.Parent = s.byName[*ref.parent]
			if r.Parent == nil {
				c.columnProblem(ref.path, name, RuleReferenceParent, "the parent table %q does not exist", *ref.parent)
			}
		}
		if ref.onDelete != nil {
			r.OnDelete = onDeleteOf(*ref.onDelete)
			if r.OnDelete == 0 {
				c.columnProblem(ref.path, name, RuleReferenceAction,
					"onDelete is %q, must be RESTRICT, CASCADE or SET NULL", *ref.onDelete)
			}
		}
		if hasColumn {
			c.checkReferenceColumn(t, ref.path, r)
		}
		if r.Parent != nil {
			c.checkReferenceParent(t, ref.path, r, hasColumn)
		}
		t.References = append(t.References, r)
	}
}

func (c *compiler) checkReferenceColumn(t *Table, path string, r Reference) {
	column := t.Columns[r.Column]
	if slices.ContainsFunc(t.References, func(other Reference) bool { return other.Column == r.Column }) {
		c.columnProblem(path, column.Name, RuleDuplicateReference, "the column has another reference")
	}
	if !t.Materialize && !t.IsScope(r.Column) {
		c.columnProblem(path, column.Name, RuleReferenceStored,
			"the table does not materialize its columns, so children could not be found")
	}
	if r.OnDelete != SetNull {
		return
	}
	if !column.Nullable {
		c.columnProblem(path, column.Name, RuleReferenceSetNull, "SET NULL needs a nullable column")
	}
	if t.IsScope(r.Column) {
		c.columnProblem(path, column.Name, RuleReferenceSetNull, "SET NULL would change a scope column")
	}
}

func (c *compiler) checkReferenceParent(t *Table, path string, r Reference, hasColumn bool) {
	name := ""
	if hasColumn {
		name = t.Columns[r.Column].Name
		c.checkReferenceType(t.Columns[r.Column], path, r.Parent)
	}
	if !samePatterns(t, r.Parent) {
		c.columnProblem(path, name, RuleReferenceScopes,
			"the parent table %q has other scope patterns", r.Parent.Name)
	}
}

func (c *compiler) checkReferenceType(column Column, path string, parent *Table) {
	if parent.PrimaryKey < 0 {
		return // reported with the parent
	}
	key := parent.Columns[parent.PrimaryKey].Type
	switch {
	case column.Type == 0 || key == 0: // reported with the column
	case column.Type != key:
		c.columnProblem(path, column.Name, RuleReferenceType, "the column is of type %s, the key of table %q of type %s",
			column.Type, parent.Name, key)
	case key == ssp2.TypeJSON:
		c.columnProblem(path, column.Name, RuleReferenceType, "a json key cannot be referenced")
	}
}

func onDeleteOf(name string) OnDelete {
	for action, n := range onDeleteNames {
		if n == name {
			return action
		}
	}
	return 0
}
