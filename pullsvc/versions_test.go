package pullsvc_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// olderIR has items of fewer columns in another order.
const olderIR = `{"irVersion": 1, "schemaVersion": 2, "tables": [
	{"name": "items", "primaryKey": "id",
	 "columns": [
		{"name": "project", "type": "string", "nullable": false},
		{"name": "id", "type": "string", "nullable": false}],
	 "scopes": [{"pattern": "project:{project}"}]}]}`

// TestBootstrapsOfAnOlderVersion: rows segments and images are made for the schema version
// of the client, and shared by clients of that version only (§5.1, §9).
func TestBootstrapsOfAnOlderVersion(t *testing.T) {
	t.Parallel()
	var older *schema.Schema
	b, kept := shared(t, func(_ *pgtest.Options, c *pullsvc.Config) {
		var err error
		older, err = schema.Parse([]byte(olderIR))
		require.NoError(t, err)
		c.Schema, err = schema.Parse([]byte(testIR))
		require.NoError(t, err)
		c.Versions, err = schema.NewVersions(c.Schema, older)
		require.NoError(t, err)
	})
	b.fill(t, "x", 2500)
	items, _ := older.Table("items")
	for _, accept := range []ssp2.Accept{rowsLane, imageLane} {
		ids := map[int32]string{}
		for _, version := range []int32{older.Version, 0, older.Version} {
			req := bootstrapping(fmt.Sprint("client of ", version, " ", accept), accept, 1000)
			req.SchemaVersion = version
			got := b.pull(t, req)[0]
			if accept == imageLane {
				require.Len(t, got.Refs, 1)
				require.Equal(t, ssp2.MediaSQLite, got.Refs[0].MediaType)
			}
			if first, again := ids[version]; again {
				require.Equal(t, first, got.Refs[0].SegmentID, "shared")
			}
			ids[version] = got.Refs[0].SegmentID
			if version == 0 {
				require.Len(t, got.rows(t, b, kept, "items"), 2500)
				continue
			}
			rows := map[string]row{}
			for _, ref := range got.Refs {
				segmentOf(t, items, ref.MediaType, body(t, kept, b.partition, ref), rows)
			}
			require.Len(t, rows, 2500)
			values, err := ssp2.DecodeRow(items.Wire, rows["x0000007"].payload, nil)
			require.NoError(t, err)
			require.Equal(t, "x", string(values[0].Bytes))
			require.Equal(t, "x0000007", string(values[1].Bytes))
		}
		require.NotEqual(t, ids[0], ids[older.Version])
	}
}
