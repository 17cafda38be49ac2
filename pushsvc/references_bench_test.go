package pushsvc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// BenchmarkReferences: what declared references add to a push, over the same push with a
// schema that declares none, by turns in one run (x_none).
func BenchmarkReferences(b *testing.B) {
	var ir map[string]any
	require.NoError(b, json.Unmarshal([]byte(referringIR), &ir))
	for _, table := range ir["tables"].([]any) {
		delete(table.(map[string]any), "references")
	}
	stripped, err := json.Marshal(ir)
	require.NoError(b, err)
	none, err := schema.Parse(stripped)
	require.NoError(b, err)
	for _, bm := range []struct {
		name     string
		commits  int
		children bool
		remove   bool
	}{
		{"1 upsert of a table without", 1, false, false},
		{"1 insert of a child", 1, true, false},
		{"1 delete of a row without children", 1, false, true},
		{"500 commits that delete a row without children", 500, false, true},
	} {
		b.Run(bm.name, func(b *testing.B) {
			with := referring(b, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
			without := setup(b, func(o *pgtest.Options, cfg *pushsvc.Config) {
				cfg.Schema, o.MaxConns = none, 1
				o.TemplateKey = "pushsvc-no-references"
				o.Setup = func(ctx context.Context, conn *pgx.Conn) error {
					return schemaddl.Install(ctx, conn, none, schemaddl.Options{})
				}
			}).over(none)
			sides := [2]*client{with.client(b, ssp2.WireV2), without.client(b, ssp2.WireV2)}
			var spent [2]time.Duration
			turn := func(i, at int) {
				c := sides[at]
				var adds, pushes []ssp2.PushCommit
				for k := range bm.commits {
					id := fmt.Sprint("r", i, " ", k)
					switch {
					case bm.children:
						pushes = append(pushes, c.commit(c.row(b, "items", id, "list", "l")))
					case bm.remove:
						adds = append(adds, c.commit(c.row(b, "lists", id)))
						pushes = append(pushes, c.commit(remove("lists", id)))
					default:
						pushes = append(pushes, c.commit(c.row(b, "lists", id)))
					}
				}
				if adds != nil {
					requireApplied(b, c.send(b, adds...)...)
				}
				req := c.request(pushes...)
				c.b.Wait()
				spent[at] += timed(func() { requireApplied(b, c.b.push(b, req).Results...) })
			}
			for at := range sides {
				requireApplied(b, sides[at].push(b, sides[at].row(b, "lists", "l")))
				turn(-1, at)
			}
			spent = [2]time.Duration{}
			i := 0
			for b.Loop() {
				turn(i, i%2)
				turn(i, 1-i%2)
				i++
			}
			b.ReportMetric(float64(spent[0])/float64(i), "ns/op")
			b.ReportMetric(float64(spent[0])/float64(spent[1]), "x_none")
		})
	}
}
