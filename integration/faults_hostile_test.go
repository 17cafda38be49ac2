package integration_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// oddTexts are texts that some layer between a client and the disk might not take
// for what they are.
var oddTexts = []string{
	"=", "a=b", "team=red", `"`, `\`, `\\"`, "'", `'';--`, "{}", "{a,b}", "[1]", "null", "NULL", "true", "0", "-0", "1e3", "**",
	"$1", "%s%n", "\u00a0", " ", "  ", "\t", "\n", "\r\n", "\v\f", "\x01", "\x7f", "\u0085", "\u2028", "\u200b", "\ufeff", "\u202eabc", "\u2066",
	"é", "e\u0301", "ﬁ", "ẞ", "ß", "ss", "İ", "ı", "Å", "\u212b", "가", "\u1100\u1161", "\ufffd", "\ufffe", "\uffff", "\ue000", "\U0001f600",
	"\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0010ffff", "\U000e0001", "\U0001d15e", "\ud7ff", "3:abc", ":",
	strings.Repeat("x", 500), strings.Repeat("界", 166), strings.Repeat("\U0001f600", 125), strings.Repeat("\u0301", 250), strings.Repeat(`\`, 500),
}

// hostileWorld is a server on a database of its own.
type hostileWorld struct {
	schema    *schema.Schema
	db        *pgtest.DB
	url       string
	transport *http.Transport
}

func newHostileWorld(t *testing.T) *hostileWorld {
	t.Helper()
	w := &hostileWorld{schema: worldSchema(t), transport: &http.Transport{}}
	w.db = pgtest.New(t, pgtest.Options{Setup: installWorld(w.schema), TemplateKey: "the schema of the world"})
	n, err := startNode(w.db.DSN, 4, worldConfig(w.schema))
	require.NoError(t, err)
	t.Cleanup(func() {
		w.transport.CloseIdleConnections()
		require.NoError(t, n.stop())
	})
	w.url = "http://" + n.addr
	return w
}

// device is a device that has acquired its epoch.
func (w *hostileWorld) device(t *testing.T, cfg deviceConfig) *device {
	t.Helper()
	cfg.url, cfg.transport = w.url, w.transport
	d, err := newDevice(w.schema, cfg)
	require.NoError(t, err)
	require.NoError(t, d.Acquire(t.Context()))
	return d
}

// item is an upsert of a row of items.
func (d *device) item(t *testing.T, id, team, title string, labels ssp2.Value) ssp2.Operation {
	t.Helper()
	table, ok := d.schema.Table("items")
	require.True(t, ok)
	return d.upsert(t, table, id, nil, []ssp2.Value{
		{Bytes: []byte(id)}, {Bytes: []byte(team)}, {Bytes: []byte(title)}, {Null: true}, {Float: 1}, {}, {Null: true}, labels, {Null: true},
	})
}

// upsert is an upsert of the columns named, all when there are none.
func (d *device) upsert(t *testing.T, table *schema.Table, id string, columns []string, values []ssp2.Value) ssp2.Operation {
	t.Helper()
	op := ssp2.Operation{Table: table.Name, RowID: id, Op: ssp2.OpUpsert}
	var err error
	if d.wire < ssp2.WireV3 {
		require.Empty(t, columns)
		op.Payload, err = ssp2.AppendRow(nil, table.Wire, values)
	} else {
		present := ssp2.NewBitmap(len(values))
		for i, c := range table.Columns {
			if i == table.PrimaryKey || len(columns) == 0 || slices.Contains(columns, c.Name) {
				present.Set(i)
			}
		}
		op.Payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values)
	}
	require.NoError(t, err)
	return op
}

// push pushes one commit and returns its outcome, which a second delivery repeats.
func (d *device) push(t *testing.T, id string, ops ...ssp2.Operation) ssp2.PushResult {
	t.Helper()
	c := &sentCommit{commit: ssp2.PushCommit{ClientCommitID: id, Operations: ops}}
	require.NoError(t, d.deliver(t.Context(), c), "commit %q", id)
	require.NoError(t, d.deliver(t.Context(), c), "commit %q again", id)
	d.sent = append(d.sent, c)
	return *c.answer
}

// Row ids, scope values and commit ids are texts, and every text comes back as it went
// in: through a bootstrap in pages, through the log, and from the columns.
func TestEveryTextIsItself(t *testing.T) {
	t.Parallel()
	w := newHostileWorld(t)
	for _, wire := range []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3} {
		t.Run(fmt.Sprint("wire ", wire), func(t *testing.T) {
			t.Parallel()
			partition := fmt.Sprint("texts ", wire)
			writer := w.device(t, deviceConfig{partition: partition, actor: "ada", id: "writer", wire: wire})
			write := func(round string, ops func(odd string) ssp2.Operation) {
				commits := make([]*sentCommit, len(oddTexts))
				for i, odd := range oddTexts {
					commits[i] = &sentCommit{commit: ssp2.PushCommit{
						ClientCommitID: odd + round + strconv.Itoa(i), Operations: []ssp2.Operation{ops(odd)},
					}}
				}
				require.NoError(t, writer.deliver(t.Context(), commits...))
				for _, c := range commits {
					require.Equal(t, ssp2.PushApplied, c.answer.Status, "%+v", c.answer.Results)
				}
				require.NoError(t, writer.deliver(t.Context(), commits...))
				writer.sent = append(writer.sent, commits...)
			}
			write("insert", func(odd string) ssp2.Operation { return writer.item(t, odd, odd, odd, ssp2.Value{Null: true}) })

			requested := slices.Concat(oddTexts, []string{"", "a\x00b", strings.Repeat("long", 1<<18)})
			reader := w.device(t, deviceConfig{partition: partition, actor: "bob", id: "reader", wire: wire, limits: [3]int32{7, 3, 2}})
			require.NoError(t, reader.Subscribe("\U0001f600\n\"\x00", "items", ssp2.ScopeMap{"team": requested}))
			compare := func() {
				_, err := reader.CatchUp(t.Context())
				require.NoError(t, err)
				a, err := auditPartition(t.Context(), w.db.Pool, w.schema, partition)
				require.NoError(t, err)
				require.NoError(t, a.device(writer))
				require.NoError(t, a.replica(reader, "items", nil))
			}
			compare()
			require.ElementsMatch(t, oddTexts, slices.Collect(maps.Keys(reader.Rows("items"))))
			for id, row := range reader.Rows("items") {
				require.Equal(t, [2]string{id, id}, [2]string{string(row.Values[1].Bytes), string(row.Values[2].Bytes)})
			}
			write("update", func(odd string) ssp2.Operation { return writer.item(t, odd, odd, odd+odd, ssp2.Value{Null: true}) })
			compare()
			write("delete", func(odd string) ssp2.Operation { return ssp2.Operation{Table: "items", RowID: odd, Op: ssp2.OpDelete} })
			compare()
			require.Empty(t, reader.Rows("items"))
		})
	}
}

// Partitions, actors, client and subscription ids are texts as well, and partitions
// never meet.
func TestEveryIdentityIsItself(t *testing.T) {
	t.Parallel()
	w := newHostileWorld(t)
	for i, odd := range oddTexts {
		d := w.device(t, deviceConfig{partition: odd, actor: odd, id: odd, wire: ssp2.WireVersion(2 + i%2)})
		require.NoError(t, d.Subscribe(odd, "items", ssp2.ScopeMap{"team": {"red"}}))
		result := d.push(t, "c", d.item(t, "i", "red", odd, ssp2.Value{Null: true}))
		require.Equal(t, int64(1), *result.CommitSeq, "partition %q", odd)
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		require.Equal(t, odd, string(d.Rows("items")["i"].Values[2].Bytes))
		a, err := auditPartition(t.Context(), w.db.Pool, w.schema, odd)
		require.NoError(t, err)
		require.NoError(t, a.device(d))
	}
	for _, bad := range []string{"", "a\x00b", "\xff", strings.Repeat("x", 513), strings.Repeat("y", 100_000)} {
		c, err := newDevice(w.schema, deviceConfig{url: w.url, partition: bad, actor: "ada", id: "d", wire: ssp2.WireV3, transport: w.transport})
		require.NoError(t, err)
		var e *client.ServerError
		require.ErrorAs(t, c.Acquire(t.Context()), &e, "partition %.10q", bad)
		require.Equal(t, ssp2.CodeAuthRequired, e.Code)
	}
}

// What a JSON column is given comes back byte for byte, or is refused for good when
// the database's jsonb cannot hold it. Nothing fails for ever.
func TestJSONComesBackByteForByte(t *testing.T) {
	t.Parallel()
	w := newHostileWorld(t)
	nested := func(depth int, open, end string) string {
		return strings.Repeat(open, depth) + strings.Repeat(end, depth)
	}
	keys := make([]string, 20_000)
	for i := range keys {
		keys[i] = fmt.Sprintf("\"%x\":%d", i%19_999, i)
	}
	documents := map[string]struct {
		text string
		code ssp2.Code // of the rejection, "" when it is applied
	}{
		"duplicate keys":             {`{"a":1,"a":2,"\u0061":3}`, ""},
		"white space":                {" \t\r\n{ \"a\" :\n[ 1 , 2 ]\t}\r\n", ""},
		"escapes":                    {`"\u00e9\/\b\f\n\r\t\"\\\ud83d\ude00"`, ""},
		"number as written":          {`[-0,0.10,1E+2,1e-7,100000000000000000000000000000000000001,0.1234567890123456789012345678901234567890]`, ""},
		"a large exponent":           {`1e308`, ""},
		"deep arrays":                {nested(ssp2.MaxJSONDepth, "[", "]"), ""},
		"deep objects":               {nested(ssp2.MaxJSONDepth/2, `{"":[`, "]}"), ""},
		"many keys":                  {"{" + strings.Join(keys, ",") + "}", ""},
		"an empty key":               {`{"":"","\ufffe":null}`, ""},
		"a long text":                {`"` + strings.Repeat("\U0001f600", 1<<17) + `"`, ""},
		"a digit too many":           {"1" + strings.Repeat("0", 131_072), ssp2.CodeConstraintViolation},
		"an exponent too many":       {"1e131073", ssp2.CodeConstraintViolation},
		"an exponent beyond integer": {"1e99999999999", ssp2.CodeConstraintViolation},
		"U+0000":                     {`{"a":"\u0000"}`, ssp2.CodeConstraintViolation},
		"U+0000 in a key":            {`{"\u0000":1}`, ssp2.CodeConstraintViolation},
		"a lone high surrogate":      {`"\ud800"`, ssp2.CodeConstraintViolation},
		"a lone low surrogate":       {`"\udc00"`, ssp2.CodeConstraintViolation},
		"surrogates in wrong order":  {`"\udc00\ud800"`, ssp2.CodeConstraintViolation},
	}
	writer := w.device(t, deviceConfig{partition: "json", actor: "ada", id: "writer", wire: ssp2.WireV3})
	byLog := w.device(t, deviceConfig{partition: "json", actor: "ada", id: "by log", wire: ssp2.WireV1})
	everything := ssp2.ScopeMap{"team": {"red"}}
	require.NoError(t, byLog.Subscribe("s", "items", everything))
	_, err := byLog.CatchUp(t.Context())
	require.NoError(t, err)

	table, _ := w.schema.Table("items")
	for name, doc := range documents {
		result := writer.push(t, name, writer.item(t, name, "red", "one", ssp2.Value{Bytes: []byte(doc.text)}))
		if doc.code != "" {
			require.Equal(t, ssp2.PushRejected, result.Status, name)
			require.Equal(t, string(doc.code), result.Results[0].Code, name)
			continue
		}
		require.Equal(t, ssp2.PushApplied, result.Status, "%s: %+v", name, result.Results)
		// A write of another column leaves it as it is.
		values := make([]ssp2.Value, len(table.Columns))
		values[0].Bytes, values[2].Bytes = []byte(name), []byte("two")
		result = writer.push(t, name+", updated", writer.upsert(t, table, name, []string{"title"}, values))
		require.Equal(t, ssp2.PushApplied, result.Status, "%s: %+v", name, result.Results)
	}
	byRows := w.device(t, deviceConfig{partition: "json", actor: "ada", id: "by rows", wire: ssp2.WireV2})
	require.NoError(t, byRows.Subscribe("s", "items", everything))
	for _, d := range []*device{byLog, byRows} {
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		for name, doc := range documents {
			row, ok := d.Rows("items")[name]
			require.Equal(t, doc.code == "", ok, name)
			if ok {
				require.Equal(t, doc.text, string(row.Values[7].Bytes), "%s, %s", d.id, name)
				require.Equal(t, "two", string(row.Values[2].Bytes))
			}
		}
	}
}
