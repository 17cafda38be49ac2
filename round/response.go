package round

import (
	"fmt"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// bufferBytes is how much of what the engine itself encodes is gathered before it
// is written.
const bufferBytes = 32 << 10

// response writes the frames of one response.
type response struct {
	w     Writer
	wire  ssp2.WireVersion
	buf   []byte // whole frames, not written yet
	begun bool   // something was written
	gone  bool   // writing failed
}

// frame encodes a frame.
func (r *response) frame(f ssp2.Frame) error {
	var err error
	if r.buf, err = ssp2.AppendFrame(r.buf, r.wire, f); err != nil {
		// Not the client's doing: the code of an encoder must not reach it.
		return fmt.Errorf("encoding %v: %s", f.FrameType(), err.Error())
	}
	if len(r.buf) >= bufferBytes {
		return r.write()
	}
	return nil
}

// write writes what is gathered.
func (r *response) write() error {
	frames := r.buf
	r.buf = r.buf[:0]
	if len(frames) == 0 {
		return nil
	}
	r.begun = true
	if _, err := r.w.Write(frames); err != nil {
		r.gone = true
		return fmt.Errorf("writing the response: %w", err)
	}
	return nil
}

// open begins a response that goes on: the header, the auth lease and the results of a
// push; nil for none.
func (r *response) open(header *ssp2.ResponseHeader, lease *ssp2.Lease, results *pushsvc.Response) error {
	r.buf = ssp2.AppendEnvelope(r.buf, r.wire, ssp2.KindResponse)
	if err := r.frame(header); err != nil {
		return err
	}
	if lease != nil {
		if err := r.frame(lease); err != nil {
			return err
		}
	}
	if results == nil {
		return nil
	}
	for i := range results.Results {
		if err := r.frame(&results.Results[i]); err != nil {
			return err
		}
		if details := results.Details[i]; details != nil {
			if err := r.frame(details); err != nil {
				return err
			}
		}
	}
	return nil
}

// emit writes encoded frames and lets the client have everything so far.
func (r *response) emit(frames []byte) error {
	if err := r.write(); err != nil {
		return err
	}
	r.begun = true
	_, err := r.w.Write(frames)
	if err == nil {
		err = r.w.Flush()
	}
	if err != nil {
		r.gone = true
		return fmt.Errorf("writing the response: %w", err)
	}
	return nil
}

// end ends the response.
func (r *response) end() error {
	r.buf = ssp2.AppendEnd(r.buf)
	return r.write()
}

// only is a response of the header alone.
func (r *response) only(header *ssp2.ResponseHeader) error {
	if err := r.open(header, nil, nil); err != nil {
		return err
	}
	return r.end()
}

// fail ends a response that has begun with an error (§1.6).
func (r *response) fail(e *ssp2.Error) error {
	if r.gone {
		return e
	}
	if err := r.frame(e.Frame()); err != nil {
		return err
	}
	return r.end()
}
