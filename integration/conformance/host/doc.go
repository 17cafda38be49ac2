// Package host serves the conformance control API: an HTTP interface through
// which the scenarios of the protocol's own repository create isolated servers,
// move their clocks, change what their actors may see, and look into their
// tables.
//
// The server under test runs unchanged. What a scenario varies reaches it through
// its public configuration (clock, authentication, scope resolver, validators, limits) or
// through its database. Each instance has a database of its own, cloned from a
// migrated template, so instances share nothing.
//
// A control call for a feature the server does not have answers 501 with the code
// host.not_supported, and the feature's capability is not listed.
package host
