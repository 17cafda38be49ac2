package schema_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/schema"
)

func layoutOf(tb testing.TB, ir object) string {
	tb.Helper()
	s, err := schema.Parse(marshal(tb, ir))
	require.NoError(tb, err)
	return string(s.Layout())
}

// layoutFixture is built anew for each use, since the helpers change it.
func layoutFixture() object {
	return document(
		table("parents"),
		with(with(table("t<",
			nullable("a", "string"), encrypted("b", "string"), nullable("c", "crdt", object{"crdtType": "yjs-doc"}),
		), "indexes", list{index("i", "a", "id"), with(index("u", "a"), "unique", true)}),
			"references", list{reference("a", "parents", "SET NULL")}),
	)
}

func tableOf(ir object, i int) object {
	return ir["tables"].(list)[i].(object)
}

func columnOf(ir object, i, j int) object {
	return tableOf(ir, i)["columns"].(list)[j].(object)
}

func TestLayoutIsCanonical(t *testing.T) {
	t.Parallel()

	got := layoutOf(t, layoutFixture())
	require.JSONEq(t, `{"tables":[`+
		`{"columns":[{"name":"id","nullable":false,"type":"string"},{"name":"org_id","nullable":false,"type":"string"}],`+
		`"indexes":[],"materialize":true,"name":"parents","primaryKey":"id","references":[],`+
		`"scopes":[{"column":"org_id","pattern":"org:{org_id}","variable":"org_id"}]},`+
		`{"columns":[{"name":"id","nullable":false,"type":"string"},{"name":"org_id","nullable":false,"type":"string"},`+
		`{"name":"a","nullable":true,"type":"string"},{"name":"b","nullable":false,"type":"bytes"},{"name":"c","nullable":true,"type":"crdt"}],`+
		`"indexes":[{"columns":["a","id"],"name":"i","unique":false},{"columns":["a"],"name":"u","unique":true}],`+
		`"materialize":true,"name":"t<","primaryKey":"id",`+
		`"references":[{"column":"a","onDelete":"SET NULL","parentTable":"parents"}],`+
		`"scopes":[{"column":"org_id","pattern":"org:{org_id}","variable":"org_id"}]}],"version":1}`, got)

	var generic any
	require.NoError(t, json.Unmarshal([]byte(got), &generic))
	require.Equal(t, got, layoutOf(t, layoutFixture()))
}

func TestLayoutChangesWithWhatIsStored(t *testing.T) {
	t.Parallel()

	before := layoutOf(t, layoutFixture())
	for name, change := range map[string]func(ir object){
		"version":     func(ir object) { ir["schemaVersion"] = 2 },
		"table name":  func(ir object) { tableOf(ir, 1)["name"] = "u" },
		"table order": func(ir object) { l := ir["tables"].(list); l[0], l[1] = l[1], l[0] },
		"column name": func(ir object) { columnOf(ir, 1, 3)["name"] = "z" },
		"column type": func(ir object) { columnOf(ir, 1, 4)["type"] = "json"; delete(columnOf(ir, 1, 4), "crdtType") },
		"nullability": func(ir object) { columnOf(ir, 1, 3)["nullable"] = true },
		"key":         func(ir object) { tableOf(ir, 0)["primaryKey"] = "org_id" },
		"index":       func(ir object) { tableOf(ir, 1)["indexes"] = list{} },
		"references":  func(ir object) { delete(tableOf(ir, 1), "references") },
		"onDelete":    func(ir object) { tableOf(ir, 1)["references"] = list{reference("a", "parents", "CASCADE")} },
		"materialize": func(ir object) { tableOf(ir, 0)["materialize"] = false },
		"scope": func(ir object) {
			for i := range 2 {
				tableOf(ir, i)["scopes"] = list{object{"pattern": "o:{org_id}"}}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ir := layoutFixture()
			change(ir)
			require.NotEqual(t, before, layoutOf(t, ir))
		})
	}
}

func TestLayoutIgnoresWhatIsNotStored(t *testing.T) {
	t.Parallel()

	before := layoutOf(t, layoutFixture())
	for name, change := range map[string]func(ir object){
		"defaults written out": func(ir object) {
			tableOf(ir, 0)["scopes"] = list{object{"pattern": "org:{org_id}", "variable": "org_id", "column": "org_id"}}
			tableOf(ir, 0)["materialize"] = true
		},
		"declaredType":  func(ir object) { columnOf(ir, 1, 3)["declaredType"] = "json" },
		"subscriptions": func(ir object) { ir["subscriptions"] = list{} },
		"client index": func(ir object) {
			tableOf(ir, 1)["indexes"] = append(tableOf(ir, 1)["indexes"].(list), index("local", "b"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ir := layoutFixture()
			change(ir)
			require.Equal(t, before, layoutOf(t, ir))
		})
	}
}
