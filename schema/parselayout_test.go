package schema_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
)

func TestParseLayoutReadsWhatLayoutWrote(t *testing.T) {
	t.Parallel()
	s, err := schema.Parse(sample.IR())
	require.NoError(t, err)
	got, err := schema.ParseLayout(s.Layout())
	require.NoError(t, err)
	require.Equal(t, string(s.Layout()), string(got.Layout()))
	for i, table := range s.Tables {
		require.Equal(t, table.Wire, got.Tables[i].Wire)
		require.Equal(t, table.Scopes, got.Tables[i].Scopes)
		require.Equal(t, table.PrimaryKey, got.Tables[i].PrimaryKey)
		found, ok := got.Table(table.Name)
		require.True(t, ok)
		require.Same(t, got.Tables[i], found)
	}
}

func TestParseLayoutRefusesWhatItDoesNotUnderstand(t *testing.T) {
	t.Parallel()
	const table = `{"columns":[{"name":"id","nullable":false,"type":%q}],"indexes":[],"materialize":true,"name":"a","primaryKey":%q,"references":[%s],"scopes":[{"column":%q,"pattern":"t:{id}","variable":"id"}]}`
	good := fmt.Sprintf(table, "string", "id", "", "id")
	whole := func(tables string) string { return `{"tables":[` + tables + `],"version":1}` }
	_, err := schema.ParseLayout([]byte(whole(good)))
	require.NoError(t, err)
	for name, text := range map[string]string{
		"no JSON":           `{`,
		"another member":    `{"tables":[],"version":1,"more":true}`,
		"another order":     `{"version":1,"tables":[` + good + `]}`,
		"more behind it":    whole(good) + ` `,
		"a type":            whole(fmt.Sprintf(table, "number", "id", "", "id")),
		"a key":             whole(fmt.Sprintf(table, "string", "no", "", "id")),
		"a scope":           whole(fmt.Sprintf(table, "string", "id", "", "no")),
		"a table twice":     whole(good + "," + good),
		"a reference":       whole(fmt.Sprintf(table, "string", "id", `{"column":"id","onDelete":"RESTRICT","parentTable":"no"}`, "id")),
		"what a child does": whole(fmt.Sprintf(table, "string", "id", `{"column":"id","onDelete":"LEAVE","parentTable":"a"}`, "id")),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.ParseLayout([]byte(text))
			require.Error(t, err)
		})
	}
}

// A version that was installed in between decides too: what it could not hold is gone.
func TestOlderClientsGoOnOnlyIfEveryVersionSinceCouldServeThem(t *testing.T) {
	t.Parallel()
	version := func(n int, columns string) *schema.Schema {
		s, err := schema.Parse(fmt.Appendf(nil, `{"irVersion":1,"schemaVersion":%d,"tables":[{"name":"a","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}%s],"scopes":[{"pattern":"t:{team}"}]}]}`, n, columns))
		require.NoError(t, err)
		return s
	}
	const (
		note  = `,{"name":"note","type":"string","nullable":true}`
		other = `,{"name":"other","type":"string","nullable":true}`
	)
	v1, v3 := version(1, note), version(3, note)
	require.NoError(t, schema.CheckHistory(v1, nil))
	require.NoError(t, schema.CheckHistory(v1, []*schema.Schema{v1, version(2, other+note), v3}))
	require.NoError(t, schema.CheckHistory(v3, []*schema.Schema{v1, version(2, ""), v3}), "what was before it does not matter")
	require.ErrorContains(t, schema.CheckHistory(v1, []*schema.Schema{v1, version(2, ""), v3}), `version 2, which was installed since, could not serve them: table "a": there is no column "note" any more`)
	require.ErrorContains(t, schema.CheckHistory(v1, []*schema.Schema{version(1, "")}), "is not the one that was installed")
}
