package schema_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/schema"
)

const (
	versionID    = `{"name":"id","type":"string","nullable":false}`
	versionTeam  = `{"name":"team_id","type":"string","nullable":false}`
	versionTitle = `{"name":"title","type":"string","nullable":false}`
	versionNote  = `{"name":"note","type":"string","nullable":true}`
)

// version is a schema with one table of these columns.
func version(t *testing.T, v int, key, pattern string, columns ...string) *schema.Schema {
	t.Helper()
	s, err := schema.Parse(fmt.Appendf(nil, `{"irVersion":1,"schemaVersion":%d,"tables":[
		{"name":"tasks","primaryKey":%q,"columns":[%s],"scopes":[%s]}]}`, v, key, strings.Join(columns, ","), pattern))
	require.NoError(t, err)
	return s
}

const byTeam = `{"pattern":"team:{team_id}"}`

// TestOlderVersionsThatCannotBeServed: what a client of an older version could not be
// sent, or could not send, is refused when a server is made (§2.4: no degraded encoding).
func TestOlderVersionsThatCannotBeServed(t *testing.T) {
	t.Parallel()
	newest := version(t, 3, "id", byTeam, versionID, versionTeam, versionTitle, versionNote)
	for name, tc := range map[string]struct {
		older []*schema.Schema
		want  string
	}{
		"none":                        {[]*schema.Schema{nil}, "older schema 0 is nil"},
		"the newest itself":           {[]*schema.Schema{version(t, 3, "id", byTeam, versionID, versionTeam, versionTitle)}, "version 3 is not older than version 3"},
		"a newer one":                 {[]*schema.Schema{version(t, 4, "id", byTeam, versionID, versionTeam, versionTitle)}, "version 4 is not older"},
		"one twice":                   {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam, versionTitle), version(t, 1, "id", byTeam, versionID, versionTeam, versionTitle)}, "version 1 is among the older schemas twice"},
		"another primary key":         {[]*schema.Schema{version(t, 1, "title", byTeam, versionID, versionTeam, versionTitle)}, `table "tasks": its primary key was "title" and is "id"`},
		"another scope":               {[]*schema.Schema{version(t, 1, "id", `{"pattern":"org:{team_id}"}`, versionID, versionTeam, versionTitle)}, "its scope patterns are others"},
		"another scope column":        {[]*schema.Schema{version(t, 1, "id", `{"pattern":"team:{team_id}","column":"title"}`, versionID, versionTeam, versionTitle)}, `was of column "title" and is of "team_id"`},
		"a dropped column":            {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam, versionTitle, `{"name":"gone","type":"string","nullable":true}`)}, `there is no column "gone" any more`},
		"another type":                {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam, `{"name":"title","type":"integer","nullable":false}`)}, `column "title": its type was integer and is string`},
		"NULL that it cannot be sent": {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam, versionTitle, `{"name":"note","type":"string","nullable":false}`)}, `column "note": it may be NULL now`},
		"NULL that it may send":       {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam, `{"name":"title","type":"string","nullable":true}`)}, `column "title": it may not be NULL any more`},
		"what it cannot insert":       {[]*schema.Schema{version(t, 1, "id", byTeam, versionID, versionTeam)}, `column "title": it is new and not nullable`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.NewVersions(newest, tc.older...)
			require.ErrorContains(t, err, tc.want)
		})
	}
	v, err := schema.NewVersions(newest)
	require.NoError(t, err)
	_, err = schema.VersionsOf(v, version(t, 4, "id", byTeam, versionID, versionTeam, versionTitle))
	require.Error(t, err)
}

func TestADroppedTableCannotBeServed(t *testing.T) {
	t.Parallel()
	empty, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":2,"tables":[
		{"name":"other","primaryKey":"id","columns":[` + versionID + `,` + versionTeam + `],"scopes":[` + byTeam + `]}]}`))
	require.NoError(t, err)
	_, err = schema.NewVersions(empty, version(t, 1, "id", byTeam, versionID, versionTeam))
	require.ErrorContains(t, err, `version 1 cannot be served from version 2: there is no table "tasks" any more`)
}

// TestViews: every served version has a view of every other one, and tables with the same
// layout need no projection.
func TestViews(t *testing.T) {
	t.Parallel()
	newest := version(t, 3, "id", byTeam, versionID, versionTeam, versionTitle, versionNote)
	second := version(t, 2, "id", byTeam, versionID, versionTeam, versionTitle, versionNote)
	first := version(t, 1, "id", byTeam, versionTitle, versionTeam, versionID)
	v, err := schema.NewVersions(newest, first, second)
	require.NoError(t, err)
	require.Same(t, newest, v.Newest())
	s, ok := v.Schema(1)
	require.True(t, ok)
	require.Same(t, first, s)
	_, ok = v.Schema(4)
	require.False(t, ok)
	require.Nil(t, v.View(3, 3))
	require.Nil(t, v.View(3, 4))

	table, rows := v.View(3, 2).Rows(newest.Tables[0])
	require.Same(t, second.Tables[0], table)
	require.Nil(t, rows, "the layout is the same")
	table, rows = v.View(3, 1).Rows(newest.Tables[0])
	require.Same(t, first.Tables[0], table)
	require.NotNil(t, rows)
	_, rows = v.View(1, 2).Rows(first.Tables[0])
	require.NotNil(t, rows)
	var none *schema.View
	table, rows = none.Rows(newest.Tables[0])
	require.Same(t, newest.Tables[0], table)
	require.Nil(t, rows)
}
