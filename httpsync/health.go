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
	if h.allow(w, r, http.MethodGet, http.MethodHead) {
		h.writeHealth(w, http.StatusOK, health{Status: "ok"})
	}
}

// readyz is GET /readyz.
func (h *handler) readyz(w http.ResponseWriter, r *http.Request) {
	if !h.allow(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	checks, ok := h.check(r.Context())
	if !ok {
		h.writeHealth(w, http.StatusServiceUnavailable, health{Status: "unavailable"})
		return
	}
	status, body := http.StatusOK, health{Status: "ready"}
	for _, c := range checks {
		s := checkStatus{Name: c.Name, Status: "ok"}
		if c.Err != nil {
			s.Status, s.Help = "failed", c.Help
			status, body.Status = http.StatusServiceUnavailable, "unavailable"
		}
		body.Checks = append(body.Checks, s)
	}
	h.writeHealth(w, status, body)
}

// probe is one run of the readiness checks.
type probe struct {
	done   chan struct{}
	checks []Check // once done is closed, if it ended as it should
	ended  bool
}

// check runs the readiness checks, or takes part in the run that is under way: anybody
// may probe, and all of them together take one connection of the pool and wait no
// longer than for one run. It is false when there is no answer in time.
func (h *handler) check(ctx context.Context) (checks []Check, ok bool) {
	h.mu.Lock()
	p := h.probe
	if p == nil {
		p = &probe{done: make(chan struct{})}
		h.probe = p
		h.mu.Unlock()
		h.run(ctx, p)
		return p.checks, p.ended
	}
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	select {
	case <-p.done:
		return p.checks, p.ended
	case <-ctx.Done():
		return nil, false
	}
}

// run runs the checks for whoever waits, also when the first of them goes away.
func (h *handler) run(ctx context.Context, p *probe) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readyTimeout)
	defer cancel()
	defer func() {
		h.mu.Lock()
		h.probe = nil
		h.mu.Unlock()
		close(p.done)
	}()
	p.checks = h.cfg.Ready(ctx)
	p.ended = true
	for _, c := range p.checks {
		if c.Err != nil {
			h.cfg.Logger.WarnContext(ctx, "not ready", "check", c.Name, "error", c.Err)
		}
	}
}

func (h *handler) writeHealth(w http.ResponseWriter, status int, body health) {
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings only
	}
	h.writeJSON(w, status, b)
}
