// Package syncpg is a sync server for offline-first apps that lives inside
// PostgreSQL. Phones, browsers and desktops keep a SQLite replica and speak the
// sync protocol SSP2, wire versions 1 to 3, with it; §n in this documentation are
// sections of the protocol's text.
//
// What is synced stays in ordinary tables with typed columns, next to the app's
// other tables, to be read with SQL. Writes come in as commits: each is applied
// whole or refused whole, once, however often it is sent, and gets its place in a
// log per partition. Devices follow that log, each within the scopes its actor may
// read.
//
// # Embedding
//
// A program that owns a *pgxpool.Pool makes a [Server] and mounts its
// [Server.Handler] where it likes:
//
//	server, err := syncpg.New(pool, syncpg.Config{
//		Schema:        appSchema,      // syncpg.ParseSchema(ir)
//		Authenticate:  authenticate,   // *http.Request → Identity
//		ResolveScopes: resolveScopes,  // ScopeRequest → scope.Allowed
//	})
//	if err != nil {
//		return err
//	}
//	if err := server.Ready(ctx); err != nil {
//		return err // says what is missing and the command that installs it
//	}
//	if err := server.Start(ctx); err != nil { // and server.Stop before the pool is closed
//		return err
//	}
//	mux.Handle("/sync-api/", http.StripPrefix("/sync-api", server.Handler()))
//
// The database needs two things before, in this order: the migrations of package
// migrations (`syncpg migrate up`, or the tern command), which make the schema
// "syncpg", and the app's own schema (`syncpg schema apply`, or package schemaddl),
// which makes the app's tables. A server never does either by itself; it compares
// and refuses, see [Server.Ready].
//
// # Who may do what
//
// Authenticate turns a request into an [Identity]: an actor and a partition. A
// partition is one log, such as one tenant; nothing is ever read or written across
// two. ResolveScopes then says, once per round, what the actor holds: values of
// the scope variables that the schema declares. A device gets rows whose scope
// columns match, and may write rows whose scope columns match. There is no other
// rule and no other place for one.
//
// A resolver that cannot find out must say [ErrOutage]. Any other error means that
// the actor holds nothing: devices drop the rows of revoked subscriptions, and a
// refused write is refused for good. With [Config].Leases an outage is served, for a
// while, from what the resolver answered last (§7.3).
//
// Both callbacks run without a connection of the pool being held, so they may use
// it, however small it is.
//
// # HTTP
//
// POST /sync takes one round. Requests and responses are streams: no response is
// held in memory, and a device has the rows of one subscription while the next is
// read. Bodies may be compressed both ways. A client that goes away cancels its
// database work. GET /segments/{id} serves what is too large for a response (§5.5).
//
// GET /realtime opens a WebSocket (§8): rounds as over POST /sync, commits as they
// happen, and presence. Config.Realtime bounds it; DisableRealtime takes it away.
//
// GET /healthz answers while the process runs. GET /readyz answers 200 when rounds
// can be served and otherwise 503, with the state of each check; it is safe to
// expose.
//
// The host's part: TLS, CORS, limits on rate and connections, ReadHeaderTimeout and
// ReadTimeout of the http.Server. Leave its WriteTimeout at zero, or rely on
// Config.WriteTimeout, which replaces it for rounds. Proxies must not buffer
// responses.
//
// # Failures
//
// An error that a client sees has a code of the protocol's catalogue (§10.2), or
// one of those that package ssp2 adds. What went wrong inside is logged and never
// shown: sync.storage_unavailable (503) when the database cannot be reached or gave
// up, sync.internal_error (500) for all else. Both may be retried, as may every
// request whose answer was lost: commits are applied once.
//
// # Several processes
//
// Any number of servers may run over one database, behind any balancer, and behind
// a connection pooler in transaction mode: what the pool's connections do leaves no
// state in a session. For the pooler set the pool's ConnConfig.DefaultQueryExecMode to
// pgx.QueryExecModeExec, or default_query_exec_mode=exec in its URL, so that statements
// are not prepared, and give Config.Realtime.Listen a way around it: a started server
// listens, on a connection of its own, for what the others commit. A process remembers
// the log epoch of its partitions for a minute, and its sockets; every answer is decided
// by what the database says.
package syncpg
