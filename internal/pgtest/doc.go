// Package pgtest gives every test a PostgreSQL database of its own.
//
// # The cluster
//
// All test binaries of one run share one server. It is, in this order: the one that [EnvDatabaseURL] names; one started
// from the server binaries of the machine (see package devpg); one in a container, where Docker runs. If there is none a
// test fails, it does not skip.
//
// The first process that needs the server starts a supervisor, a copy of its own program that runs the server and nothing
// else. Every process holds a shared lock on a file for as long as it lives. The kernel releases that lock however the
// process ends; when nobody has held it for a few seconds the supervisor stops the server, removes its data and ends.
//
// The server keeps its promises to transactions but not across a crash of the machine (fsync is off), and it neither
// vacuums nor analyzes by itself, so plans do not depend on when a test ran.
//
// # The databases
//
// [New] clones a template that holds the migrations, and whatever [Options.Setup] installs, and drops the clone when the
// test ends. A template is made once per run. Text is ordered by a natural language there, as in most databases and
// unlike "C", so that a missing COLLATE shows. No session has a search_path, so that a missing qualifier fails.
// Where one transaction is enough, [Tx] is faster: it is rolled back in a database that the tests of a package share.
//
// # Races
//
// No test sleeps to wait. [WaitBlocked] and [WaitAnyBlocked] return when a session waits for a lock. [Counter] counts
// round trips.
package pgtest
