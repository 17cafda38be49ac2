package schema_test

import (
	"errors"
	"testing"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/ssp2"
)

func FuzzParse(f *testing.F) {
	f.Add(sample.IR())
	f.Add(marshal(f, layoutFixture()))
	f.Add([]byte(`{"irVersion":1,"schemaVersion":1,"tables":[{"name":"t","primaryKey":"k",` +
		`"columns":[{"name":"k","type":"float","nullable":false}],"scopes":[{"pattern":"x:{k}"}],"materialize":false}]}`))
	f.Add([]byte(`{"tables":[{"columns":[null,{"name":1}],"scopes":[[]],"indexes":{},"references":[{"column":"a"}]}]}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, ir []byte) {
		s, err := schema.Parse(ir)
		if err != nil {
			var errs *schema.Errors
			if !errors.As(err, &errs) || len(errs.Problems) == 0 || err.Error() == "" {
				t.Fatalf("not a list of problems: %v", err)
			}
			return
		}
		if s.Version < 1 || len(s.Tables) == 0 {
			t.Fatalf("version %d, %d tables", s.Version, len(s.Tables))
		}
		for i, table := range s.Tables {
			checkTable(t, s, i, table)
		}
		if len(s.Layout()) == 0 {
			t.Fatal("no layout")
		}
	})
}

// checkTable checks what the other rooms rely on without looking.
func checkTable(t *testing.T, s *schema.Schema, i int, table *schema.Table) {
	t.Helper()
	if found, ok := s.Table(table.Name); !ok || found != table || table.Index != i {
		t.Fatalf("table %q is not found", table.Name)
	}
	column := func(j int) schema.Column {
		if j < 0 || j >= len(table.Columns) {
			t.Fatalf("column %d of %d", j, len(table.Columns))
		}
		return table.Columns[j]
	}
	if len(table.Wire) != len(table.Columns) || len(table.Scopes) == 0 || column(table.PrimaryKey).Nullable {
		t.Fatalf("table %q is incomplete", table.Name)
	}
	for j, c := range table.Columns {
		if at, ok := table.ColumnIndex(c.Name); !ok || at != j || c.Type < ssp2.TypeString || c.Type > ssp2.TypeCRDT {
			t.Fatalf("column %q is not found", c.Name)
		}
	}
	for j, scope := range table.Scopes {
		column(scope.Column)
		if !s.HasVariable(scope.Variable) || scope.Pattern != scope.Prefix+":{"+scope.Variable+"}" {
			t.Fatalf("scope %q is wrong", scope.Pattern)
		}
		if j > 0 && ssp2.CompareUTF16(table.Scopes[j-1].Variable, scope.Variable) >= 0 {
			t.Fatalf("scope %q is out of order", scope.Pattern)
		}
	}
	for _, index := range table.Indexes {
		if len(index.Columns) == 0 {
			t.Fatalf("index %q is empty", index.Name)
		}
		for _, j := range index.Columns {
			column(j)
		}
	}
	for _, ref := range table.References {
		if parent, ok := s.Table(ref.Parent.Name); !ok || parent != ref.Parent || ref.OnDelete.String() == "" ||
			column(ref.Column).Type != parent.Columns[parent.PrimaryKey].Type {
			t.Fatal("a reference is wrong")
		}
	}
}
