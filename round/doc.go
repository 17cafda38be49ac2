// Package round runs one sync round: a push, a pull or both in one request
// (§1.5), answered as a stream of frames (§1.6).
//
// It is the one handler behind every transport binding (§1.1). A binding reads
// the request with ssp2, authenticates whoever sent it, hands both to
// [Engine.Run] together with a [Writer], and turns the error that Run returns
// into the form of its own: package httpsync into an HTTP status with a JSON
// body, a socket into RESP_HEADER, ERROR and END (§8.7). [Failure] says what a
// client may know of an error.
package round
