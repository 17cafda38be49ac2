package syncpg_test

import (
	"context"
	"io"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

func sampleSchema() *syncpg.Schema {
	return must(syncpg.ParseSchema(sample.IR()))
}

// installed is a migrated database with the sample schema.
var installed = pgtest.Options{
	TemplateKey: "sample schema and memberships",
	Setup: func(ctx context.Context, conn *pgx.Conn) error {
		if err := schemaddl.Install(ctx, conn, sampleSchema(), schemaddl.Options{}); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `
			create table public.memberships (actor text, team text, primary key (actor, team));
			insert into public.memberships values ('ada', 'team-1'), ('ada', 'team-2'), ('bob', 'team-1');`)
		return err
	},
}

// exampleDatabase is the database that an app of the examples has already.
func exampleDatabase(ctx context.Context) (*pgxpool.Pool, *syncpg.Schema, func()) {
	db := must(must(pgtest.Open(ctx)).Create(ctx, installed))
	return db.Pool, sampleSchema(), func() {
		if err := db.Close(ctx); err != nil {
			panic(err)
		}
	}
}

// device is a client that has taken up the log epoch and subscribes to the lists
// of team-1.
func device(url string, s *syncpg.Schema, actor string) *client.Client {
	c := must(client.New(client.Config{
		URL: url, ClientID: actor + "'s device", Schema: s, Wire: ssp2.WireV2,
		Header: http.Header{"Authorization": {"Bearer " + actor}},
		HTTP:   &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}))
	if err := c.Acquire(context.Background()); err != nil {
		panic(err)
	}
	if err := c.Subscribe("lists", "lists", ssp2.ScopeMap{"team_id": {"team-1"}}); err != nil {
		panic(err)
	}
	return c
}

// newList is a commit that inserts a row of the table lists.
func newList(id, team, title string) ssp2.PushCommit {
	s := sampleSchema()
	t, ok := s.Table("lists")
	if !ok {
		panic("the sample has no lists")
	}
	text := func(s string) ssp2.Value { return ssp2.Value{Bytes: []byte(s)} }
	row := must(ssp2.AppendRow(nil, t.Wire, []ssp2.Value{
		text(id), text(team), text(title), {Null: true}, {Float: 1}, {Int: 0},
	}))
	return ssp2.PushCommit{
		ClientCommitID: "insert " + id,
		Operations:     []ssp2.Operation{{Table: "lists", RowID: id, Op: ssp2.OpUpsert, Payload: row}},
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func get(url string) string {
	r := must(http.NewRequestWithContext(context.Background(), http.MethodGet, url, nil))
	r.Close = true // leave no connection behind
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		panic(err)
	}
	defer func() { _ = res.Body.Close() }()
	return string(must(io.ReadAll(res.Body)))
}
