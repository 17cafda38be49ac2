// Package ssp2 reads and writes the SSP2 wire format: messages and their
// frames in wire versions 1, 2 and 3, full and sparse rows, rows segments
// (SSG2), realtime control events, the error catalogue, canonical JSON and the
// debug rendering. Section numbers (§n) are those of the protocol text.
//
// Decoding trusts nothing. It never panics, and memory grows with the bytes
// that have arrived, never with a length that a peer merely claims. Every
// malformed input is an [*Error] with a code of the catalogue; an error of the
// underlying reader is returned wrapped and is not an [*Error].
//
// Encoding appends to a buffer of the caller and returns it, like the append
// built-in. The typed encoders ([AppendFrame], [AppendMessage], [AppendRow],
// [AppendSegment], …) refuse every value that a decoder would refuse. The
// low-level ones ([BeginFrame], [AppendStr], [BeginCommitFrame], …) are for the hot
// path of a server and say what they leave to the caller.
package ssp2
