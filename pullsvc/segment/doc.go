// Package segment keeps bootstrap segments (§5.1): immutable, addressed by the hash of
// their bytes, bound to the scopes they were built for.
//
// A segment is a cache entry. A store may lose it at any time; a client whose download
// fails pulls again and gets fresh descriptors (§5.5).
package segment
