package httpsync

import (
	"errors"
	"net/http"
	"strconv"

	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// statusError is a protocol error under a status that is not the catalogue's.
type statusError struct {
	status int
	err    *ssp2.Error
}

func (e *statusError) Error() string { return e.err.Error() }

func (e *statusError) Unwrap() error { return e.err }

// refuse answers with an error before anything else is written, and returns its code.
func (h *handler) refuse(w http.ResponseWriter, r *http.Request, err error) ssp2.Code {
	e := round.Failure(err)
	status := e.HTTPStatus()
	if s, ok := errors.AsType[*statusError](err); ok {
		status = s.status
	}
	h.cfg.Logger.DebugContext(r.Context(), "request refused", "status", status, "error", e)
	h.writeError(w, status, e)
	return e.Code
}

// writeError writes the whole response: an error as JSON (§10.1).
func (h *handler) writeError(w http.ResponseWriter, status int, e *ssp2.Error) {
	h.writeJSON(w, status, ssp2.AppendErrorJSON(nil, e))
}

func (h *handler) writeJSON(w http.ResponseWriter, status int, body []byte) {
	body = append(body, '\n')
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	// Not even an error waits for ever for a peer that asks and does not listen. One
	// that is gone has no use for the rest.
	out := newDeadlineWriter(w, h.cfg.WriteTimeout)
	defer out.clear()
	w.WriteHeader(status)
	if _, err := out.Write(body); err == nil {
		_ = out.flush()
	}
}
