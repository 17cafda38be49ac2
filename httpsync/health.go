package httpsync

import (
	"context"
	"encoding/json"
	"net/http"
	"time"
)

// readyTimeout bounds one readiness probe.
const readyTimeout = 5 * time.Second

// Check is one condition of serving rounds.
type Check struct {
	// Name is what was checked, one word.
	Name string
	// Err is why the check failed, nil when it passed. It is logged and not
	// shown: probes come without authentication.
	Err error
	// Help says what to do when the check failed. It is shown.
	Help string
}

// health is the body of both health routes.
type health struct {
	Status string        `json:"status"` // ok, ready or unavailable
	Checks []checkStatus `json:"checks,omitempty"`
}

type checkStatus struct {
	Name   string `json:"name"`
	Status string `json:"status"` // ok or failed
	Help   string `json:"help,omitempty"`
}

// healthz is GET /healthz.
func (h *handler) healthz(w http.ResponseWriter, r *http.Request) {
	if allow(w, r, http.MethodGet, http.MethodHead) {
		writeHealth(w, http.StatusOK, health{Status: "ok"})
	}
}

// readyz is GET /readyz.
func (h *handler) readyz(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	// Anybody may probe; all of them together take one connection of the pool.
	select {
	case h.probe <- struct{}{}:
		defer func() { <-h.probe }()
	case <-ctx.Done():
		writeHealth(w, http.StatusServiceUnavailable, health{Status: "unavailable"})
		return
	}
	status, body := http.StatusOK, health{Status: "ready"}
	for _, c := range h.cfg.Ready(ctx) {
		s := checkStatus{Name: c.Name, Status: "ok"}
		if c.Err != nil {
			s.Status, s.Help = "failed", c.Help
			status, body.Status = http.StatusServiceUnavailable, "unavailable"
			h.cfg.Logger.WarnContext(ctx, "not ready", "check", c.Name, "error", c.Err)
		}
		body.Checks = append(body.Checks, s)
	}
	writeHealth(w, status, body)
}

func writeHealth(w http.ResponseWriter, status int, body health) {
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings only
	}
	writeJSON(w, status, b)
}
