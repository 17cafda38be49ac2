package round

// Writer takes the bytes of a response as they are made (§1.4). Write is called
// with whole frames, at any size; the bytes may be kept until Flush, which is
// called when a client should have what was written, once per subscription or
// bounded piece of one. Both fail when the peer is gone, and are not called again
// then.
type Writer interface {
	Write(frames []byte) (int, error)
	Flush() error
}

// StreamError is what [Engine.Run] returns when a round failed after its first
// byte.
type StreamError struct {
	// Reported tells that the client was told: ERROR and END are written. When
	// false the peer could not be written to any more.
	Reported bool
	// Err is why the round failed.
	Err error
}

// Error says where and why.
func (e *StreamError) Error() string {
	return "the round failed after its first byte: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *StreamError) Unwrap() error { return e.Err }
