package httpsync

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// Defaults of [Config].
const (
	DefaultMaxRequestBytes = 16 << 20
	DefaultWriteTimeout    = 30 * time.Second
	DefaultMaxCompressed   = 128
)

// Runner runs one sync round; see [round.Engine.Run], whose contract it has.
type Runner interface {
	Run(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error
}

// Config is what a handler needs. It is not changed and must not change while the
// handler serves.
type Config struct {
	// Rounds runs the rounds. Required.
	Rounds Runner
	// Segments opens segments for downloads. nil: there are none.
	Segments Downloads
	// Authenticate says who sent a request, from its headers; the body is not to
	// be read. Required. An [*ssp2.Error] is answered as it is, an error that is
	// round.ErrOutage as sync.storage_unavailable (503), and every other one as
	// sync.auth_required (401) without its text.
	Authenticate func(*http.Request) (round.Identity, error)
	// Ready runs the checks of GET /readyz. One call is under way at a time, and
	// answers every probe that comes meanwhile. nil: there are no checks, and the
	// answer is always ready.
	Ready func(context.Context) []Check
	// MaxRequestBytes bounds a request body in bytes, both as sent and as
	// decompressed. A request made to waste memory takes about ten times its size.
	// 0: 16 MiB. Negative: no bound.
	MaxRequestBytes int64
	// WriteTimeout is how long a client may take for the next 64 KiB of a
	// response, an error's too, before the request is given up; until then it
	// holds the memory of what was read for it. 0: 30 s. Negative: no limit. It
	// replaces the WriteTimeout of the http.Server, which bounds a whole response.
	WriteTimeout time.Duration
	// MaxCompressed is how many responses are compressed at once, each of which holds about
	// 1 MiB for as long as its client takes; further ones go out as they are. 0: 128.
	// Negative: no bound.
	MaxCompressed int
	// Events receives events.SegmentServed for every GET of a segment. nil: nobody is told.
	Events events.Sink
	// Logger gets failures, and refused requests at debug level. nil: nothing is
	// logged.
	Logger *slog.Logger
}

type handler struct {
	cfg         Config
	compressing compressions

	mu    sync.Mutex
	probe *probe // the one that runs, nil for none
}

// New returns the handler. It fails when a required field is missing.
func New(cfg Config) (http.Handler, error) {
	if cfg.Rounds == nil {
		return nil, errors.New("httpsync: Config.Rounds is nil")
	}
	if cfg.Authenticate == nil {
		return nil, errors.New("httpsync: Config.Authenticate is nil")
	}
	if cfg.MaxRequestBytes == 0 {
		cfg.MaxRequestBytes = DefaultMaxRequestBytes
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = DefaultWriteTimeout
	}
	if cfg.MaxCompressed == 0 {
		cfg.MaxCompressed = DefaultMaxCompressed
	}
	if cfg.Ready == nil {
		cfg.Ready = func(context.Context) []Check { return nil }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Events = events.Safe(cfg.Events, cfg.Logger)
	h := &handler{cfg: cfg}
	h.compressing.most = int64(cfg.MaxCompressed)
	mux := http.NewServeMux()
	mux.HandleFunc("/sync", h.sync)
	mux.HandleFunc("/segments/{id}", h.segment)
	mux.HandleFunc("/healthz", h.healthz)
	mux.HandleFunc("/readyz", h.readyz)
	return mux, nil
}

// allow answers 405 unless the request has one of the methods.
func (h *handler) allow(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if slices.Contains(methods, r.Method) {
		return true
	}
	allowed := strings.Join(methods, ", ")
	w.Header().Set("Allow", allowed)
	h.writeError(w, http.StatusMethodNotAllowed, ssp2.Errorf(ssp2.CodeInvalidRequest, "the method must be %s", allowed))
	return false
}

// sync is POST /sync.
func (h *handler) sync(w http.ResponseWriter, r *http.Request) {
	w.Header().Add("Vary", "Accept-Encoding")
	out := h.newResponse(w, negotiate(r.Header["Accept-Encoding"]))
	defer out.finished()
	defer out.release()
	defer h.contain(w, r, out)

	if !h.allow(w, r, http.MethodPost) {
		return
	}
	err := h.round(w, r, out)
	if err == nil {
		err = out.finish()
	}
	var stream *round.StreamError
	switch {
	case err == nil:
	case errors.As(err, &stream) && stream.Reported:
		// The client knows; what is left is the end of the body.
		_ = out.finish()
	case out.committed:
		h.cfg.Logger.DebugContext(r.Context(), "response cut short", "error", err)
		panic(http.ErrAbortHandler)
	default:
		h.refuse(w, r, err)
	}
}

// round answers a request with out. An error means that nothing is written, or
// it is a [round.StreamError].
func (h *handler) round(w http.ResponseWriter, r *http.Request, out *response) error {
	if err := checkContentType(r.Header); err != nil {
		return err
	}
	id, err := h.authenticate(r)
	if err != nil {
		return err
	}
	body := &counted{ReadCloser: r.Body}
	r.Body = body
	req, err := h.readRequest(w, r)
	out.received = body.bytes
	if err != nil {
		return err
	}
	return h.cfg.Rounds.Run(r.Context(), id, req, out)
}

func (h *handler) authenticate(r *http.Request) (round.Identity, error) {
	id, err := h.cfg.Authenticate(r)
	if err == nil {
		// What no database holds is nobody either, now and when it is tried again.
		if err = gate.CheckIdentity(id.Partition, id.Actor); err == nil {
			return id, nil
		}
		h.cfg.Logger.ErrorContext(r.Context(), "host callback failed", "callback", "Authenticate", "error", err)
	}
	switch {
	case ssp2.CodeOf(err) != "":
		return round.Identity{}, err
	case errors.Is(err, round.ErrOutage):
		return round.Identity{}, &ssp2.Error{
			Code:    ssp2.CodeStorageUnavailable,
			Message: "requests cannot be authenticated at the moment; retry later",
			Err:     err,
		}
	default:
		return round.Identity{}, &ssp2.Error{
			Code:    ssp2.CodeAuthRequired,
			Message: "the request is not authenticated",
			Err:     err,
		}
	}
}

// contain answers for a panic, of a host callback or of ours: with an error when
// nothing is written, else by cutting the response off.
func (h *handler) contain(w http.ResponseWriter, r *http.Request, out *response) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v)
	}
	h.cfg.Logger.ErrorContext(r.Context(), "panic while serving a request", "panic", v, "stack", string(debug.Stack()))
	if out.committed {
		panic(http.ErrAbortHandler)
	}
	e := &ssp2.Error{Code: ssp2.CodeInternalError, Message: "the server failed to process the request"}
	h.writeError(w, e.HTTPStatus(), e)
}
