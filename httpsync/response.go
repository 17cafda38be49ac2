package httpsync

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

const (
	// holdBytes is how much of a response is held back before its headers are
	// decided. What ends below it is not worth compressing.
	holdBytes = 1024
	// writeStep is how much a client must take within the write timeout.
	writeStep = 64 << 10
)

// response is the body of one HTTP response, and the [round.Writer] of a round.
type response struct {
	w         http.ResponseWriter
	out       deadlineWriter
	coding    coding
	held      []byte
	enc       encoder // nil: not compressed, or not begun
	limit     *compressions
	committed bool // the status is out
	describe  func(header http.Header)

	received int64 // bytes of the request's body
	report   func(received, sent int64)
}

func (h *handler) newResponse(w http.ResponseWriter, c coding) *response {
	return &response{
		w:      w,
		out:    newDeadlineWriter(w, h.cfg.WriteTimeout),
		coding: c,
		limit:  &h.compressing,
		describe: func(header http.Header) {
			header.Set("Content-Type", ContentType)
			header.Set("Cache-Control", "no-store")
			header.Set("X-Content-Type-Options", "nosniff")
		},
	}
}

// Write implements [round.Writer].
func (r *response) Write(frames []byte) (int, error) {
	if !r.committed {
		if len(r.held)+len(frames) < holdBytes {
			r.held = append(r.held, frames...)
			return len(frames), nil
		}
		if err := r.begin(); err != nil {
			return 0, err
		}
	}
	if err := r.send(frames); err != nil {
		return 0, err
	}
	return len(frames), nil
}

// Flush implements [round.Writer].
func (r *response) Flush() error {
	if !r.committed {
		if err := r.begin(); err != nil {
			return err
		}
	}
	if r.enc != nil {
		if err := r.enc.Flush(); err != nil {
			return fmt.Errorf("compression: %w", err)
		}
	}
	return r.out.flush()
}

// finish ends the body.
func (r *response) finish() error {
	if !r.committed {
		r.coding = identity
		r.w.Header().Set("Content-Length", strconv.Itoa(len(r.held)))
		if err := r.begin(); err != nil {
			return err
		}
	}
	if r.enc != nil {
		if err := r.enc.Close(); err != nil {
			return fmt.Errorf("compression: %w", err)
		}
	}
	return r.out.flush()
}

// begin decides the headers and writes what was held back.
func (r *response) begin() error {
	header := r.w.Header()
	r.describe(header)
	if r.coding != identity && !r.limit.begin() {
		r.coding = identity
	}
	if r.coding != identity {
		header.Set("Content-Encoding", string(r.coding))
		r.enc = encoders[r.coding].get(&r.out)
	}
	r.committed = true
	r.w.WriteHeader(http.StatusOK)
	held := r.held
	r.held = nil
	return r.send(held)
}

// send writes to a body that has begun.
func (r *response) send(frames []byte) error {
	if r.enc == nil {
		_, err := r.out.Write(frames)
		return err
	}
	if _, err := r.enc.Write(frames); err != nil {
		return fmt.Errorf("compression: %w", err)
	}
	return nil
}

// WhenFinished implements [round.Finisher].
func (r *response) WhenFinished(report func(received, sent int64)) { r.report = report }

// finished reports the round, if there is anybody to report it to.
func (r *response) finished() {
	if r.report != nil {
		r.report(r.received, r.out.written)
	}
}

// release gives the encoder back and leaves the connection without a deadline,
// as the next request on it expects.
func (r *response) release() {
	if r.enc != nil {
		encoders[r.coding].put(r.enc)
		r.enc = nil
		r.limit.end()
	}
	r.out.clear()
}

// deadlineWriter writes with a deadline per step, where the connection has any.
type deadlineWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration // negative: none
	set     bool
	written int64
}

func newDeadlineWriter(w http.ResponseWriter, timeout time.Duration) deadlineWriter {
	return deadlineWriter{w: w, control: http.NewResponseController(w), timeout: timeout}
}

func (d *deadlineWriter) extend() {
	if d.timeout < 0 {
		return
	}
	d.set = d.control.SetWriteDeadline(time.Now().Add(d.timeout)) == nil
}

func (d *deadlineWriter) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		d.extend()
		n, err := d.w.Write(p[written:min(written+writeStep, len(p))]) //nolint:gosec // frames and JSON, and announced as such
		written += n
		d.written += int64(n)
		if err != nil {
			return written, fmt.Errorf("connection: %w", err)
		}
	}
	return written, nil
}

// flush pushes everything to the peer. A wrapper of the host that cannot flush
// does so when the handler returns.
func (d *deadlineWriter) flush() error {
	d.extend()
	if err := d.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("connection: %w", err)
	}
	return nil
}

func (d *deadlineWriter) clear() {
	if d.set {
		_ = d.control.SetWriteDeadline(time.Time{})
	}
}
