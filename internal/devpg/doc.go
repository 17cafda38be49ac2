// Package devpg runs a private PostgreSQL server for development and tests from the server binaries of the machine.
//
// [Start] initializes a cluster in a data directory, or takes up the one that is already there, and runs the server as a
// child of this process until [Server.Stop]. PostgreSQL refuses to run as root: a root process hands the server to the
// owner of the data directory, or for a new one to the account "postgres" or else "nobody".
//
// The server listens on the loopback interface, with a password made at initialization, and on a Unix socket in a
// private directory, without one. On Linux it also ends when this process dies without calling Stop; elsewhere the next
// Start of the same directory reports it as a [RunningError].
package devpg
