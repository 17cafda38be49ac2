// Package httpsync serves sync rounds and segments over HTTP (§1.1, §5.5).
//
// [New] returns one http.Handler with
//
//   - POST /sync: a round (§1.5, §1.6),
//   - GET /segments/{id}: a bootstrap segment (§5.5), also by signed URL (§5.4),
//   - GET /healthz: the process runs,
//   - GET /readyz: rounds can be served, with the state of each check.
//
// Its paths begin at the root: mount it with http.StripPrefix under any other.
//
// # Requests
//
// The content type is application/vnd.syncular.sync.v2 and nothing else (415);
// parameters are ignored. A body may be compressed with Content-Encoding: gzip.
// It is read as a stream, after authentication, and bounded twice: as sent and as
// decoded, so that a small body cannot become a large one (413).
//
// # Responses
//
// The frames of a response are written as they are made and flushed once per
// subscription. They are compressed with zstd or gzip as Accept-Encoding asks
// (§1.3); a response that ends before its first flush and is small goes out as it
// is. Each flush pushes the compressor's bytes out too.
//
// An error before the first byte is a JSON object (§10.1) under the status of the
// catalogue; after it, it is an ERROR frame and the status is 200 (§1.6).
//
// # Segments
//
// A download is authenticated and authorized anew, with the scopes in X-Syncular-Scopes.
// It is compressed like any response, streamed, and never cut short in a way that looks
// like its end: when a segment goes away meanwhile, the connection does too. One by signed
// URL has its grant in the query (st); headers of authentication are not looked at, and
// any origin may ask.
//
// # What the host does
//
// Timeouts for reading requests are those of the http.Server. CORS is the host's:
// a wrapper around this handler answers preflights and adds the headers, before
// authentication. A proxy in between must not buffer responses, or streaming
// ends there.
package httpsync
