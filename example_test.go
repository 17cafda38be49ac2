package syncpg_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
)

// An app with a pool, a table and handlers of its own takes the sync server in
// beside them.
func Example() {
	ctx := context.Background()
	pool, appSchema, closeDatabase := exampleDatabase(ctx)
	defer closeDatabase()

	server, err := syncpg.New(pool, syncpg.Config{
		Schema: appSchema,
		Authenticate: func(r *http.Request) (syncpg.Identity, error) {
			user, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			if !ok {
				return syncpg.Identity{}, errors.New("no token")
			}
			return syncpg.Identity{Actor: user, Partition: "acme"}, nil
		},
		ResolveScopes: func(ctx context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
			teams, err := teamsOf(ctx, pool, req.Actor) // from the app's own table
			if err != nil {
				return nil, fmt.Errorf("%w: %w", syncpg.ErrOutage, err)
			}
			return scope.Allowed{"team_id": teams}, nil
		},
	})
	if err != nil {
		panic(err)
	}
	if err := server.Ready(ctx); err != nil {
		panic(err)
	}

	mux := http.NewServeMux()
	mux.Handle("/sync-api/", http.StripPrefix("/sync-api", server.Handler()))
	mux.HandleFunc("GET /lists", func(w http.ResponseWriter, r *http.Request) {
		// What devices write are rows, to be read with SQL.
		var titles string
		err := pool.QueryRow(r.Context(),
			`select string_agg(title, ', ' order by title) from public.lists where _sync_partition = 'acme'`).Scan(&titles)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, titles)
	})
	app := httptest.NewServer(mux)
	defer app.Close()

	// Ada's phone writes, Bob's laptop reads.
	phone, laptop := device(app.URL+"/sync-api", appSchema, "ada"), device(app.URL+"/sync-api", appSchema, "bob")
	must(phone.Push(ctx, newList("list-1", "team-1", "Groceries"), newList("list-2", "team-2", "Not Bob's")))
	must(laptop.CatchUp(ctx))
	fmt.Println("laptop:", len(laptop.Rows("lists")), "list")
	fmt.Println("app:", get(app.URL+"/lists"))
	// Output:
	// laptop: 1 list
	// app: Groceries, Not Bob's
}

func teamsOf(ctx context.Context, pool *pgxpool.Pool, actor string) ([]string, error) {
	rows, err := pool.Query(ctx, `select team from public.memberships where actor = $1`, actor)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
