package pushsvc_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
)

// An app with a pool, a table and a handler of its own writes what devices sync in the
// transaction of its own rows.
func Example() {
	pool, appSchema, closeDatabase := exampleDatabase()
	defer closeDatabase()

	push, err := pushsvc.New(pool, pushsvc.Config{
		Schema:    appSchema,
		Committed: func(partition string, seq int64) { fmt.Println("to deliver:", partition, seq) },
	})
	if err != nil {
		panic(err)
	}
	app := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, order := r.Context(), r.FormValue("order")
		var n pushsvc.Notification
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			if _, err = tx.Exec(ctx, `insert into public.orders (id) values ($1)`, order); err != nil {
				return err
			}
			_, n, err = push.ApplyTx(ctx, tx, pushsvc.ApplyRequest{
				Partition: "acme", Actor: "shop", ClientID: "shop", ClientCommitID: "order " + order,
				Operations: []pushsvc.Operation{pushsvc.Upsert("notes", map[string]any{"id": order, "project_id": "orders", "title": "New order"})},
			})
			return err // rolls back both
		})
		if err != nil {
			http.Error(w, "the order was not taken", http.StatusInternalServerError)
			return
		}
		push.Notify(ctx, n)
		w.WriteHeader(http.StatusCreated)
	})

	for _, order := range []string{"1", "2", "2"} {
		w := httptest.NewRecorder()
		app.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/orders?order="+order, nil))
		fmt.Println(w.Code)
	}
	// Output:
	// to deliver: acme 1
	// 201
	// to deliver: acme 2
	// 201
	// 500
}

// exampleDatabase is the database that an app has already.
func exampleDatabase() (*pgxpool.Pool, *schema.Schema, func()) {
	ctx := context.Background()
	s, err := schema.Parse([]byte(testIR))
	if err != nil {
		panic(err)
	}
	cluster, err := pgtest.Open(ctx)
	if err != nil {
		panic(err)
	}
	db, err := cluster.Create(ctx, pgtest.Options{Setup: func(ctx context.Context, conn *pgx.Conn) error {
		if err := schemaddl.Install(ctx, conn, s, schemaddl.Options{}); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `create table public.orders (id text primary key)`)
		return err
	}, TemplateKey: "pushsvc example"})
	if err != nil {
		panic(err)
	}
	return db.Pool, s, func() {
		if err := db.Close(ctx); err != nil {
			panic(err)
		}
	}
}
