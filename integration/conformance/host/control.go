package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// codeNotSupported marks a control call or an endpoint of a feature that the
// server does not have. It is none of §10.2.
const codeNotSupported ssp2.Code = "host.not_supported"

// codeFailed marks a control call that the host itself could not carry out.
const codeFailed ssp2.Code = "host.failed"

func badRequest(format string, args ...any) error {
	return ssp2.Errorf(ssp2.CodeInvalidRequest, format, args...)
}

func notFound(format string, args ...any) error {
	return ssp2.Errorf(ssp2.CodeNotFound, format, args...)
}

func notSupported(what string) error {
	return ssp2.Errorf(codeNotSupported, "the server does not support %s", what)
}

// statusError gives an error another HTTP status than its code has.
type statusError struct {
	status int
	err    error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

// method is one control call on an instance.
type method func(ctx context.Context, h *Host, i *instance, body []byte) (any, error)

// call adapts a function over a typed body.
func call[T any](run func(ctx context.Context, i *instance, body T) (any, error)) method {
	return func(ctx context.Context, _ *Host, i *instance, raw []byte) (any, error) {
		var body T
		if err := decodeBody(raw, &body); err != nil {
			return nil, err
		}
		return run(ctx, i, body)
	}
}

func unsupported(what string) method {
	return func(context.Context, *Host, *instance, []byte) (any, error) {
		return nil, notSupported(what)
	}
}

type noFields struct{}

// methods are the calls under {baseUrl}/control/.
var methods = map[string]method{
	"setAllowedScopes": call(func(_ context.Context, i *instance, body struct {
		ActorID string        `json:"actorId"`
		Allowed scope.Allowed `json:"allowed"`
	},
	) (any, error) {
		if body.ActorID == "" {
			return nil, badRequest("actorId is missing")
		}
		i.authority.setAllowed(body.ActorID, body.Allowed)
		return nil, nil
	}),
	"setResolverFailing": call(func(_ context.Context, i *instance, body struct {
		Failing bool `json:"failing"`
	},
	) (any, error) {
		i.authority.setFailing(body.Failing)
		return nil, nil
	}),
	"advanceClock": call(func(_ context.Context, i *instance, body struct {
		Ms int64 `json:"ms"`
	},
	) (any, error) {
		if body.Ms < 0 {
			return nil, badRequest("the clock does not go back: ms is %d", body.Ms)
		}
		i.clock.advance(body.Ms)
		return nil, nil
	}),
	"nowMs": call(func(_ context.Context, i *instance, _ noFields) (any, error) {
		return i.clock.nowMs(), nil
	}),
	"getMaxCommitSeq": call(func(ctx context.Context, i *instance, _ noFields) (any, error) {
		position, err := i.position(ctx)
		return position.maxCommitSeq, err
	}),
	"getHorizonSeq": call(func(ctx context.Context, i *instance, _ noFields) (any, error) {
		position, err := i.position(ctx)
		return position.horizonSeq, err
	}),
	"readRows": call(func(ctx context.Context, i *instance, body struct {
		Table string `json:"table"`
	},
	) (any, error) {
		return i.readRows(ctx, body.Table)
	}),
	"failNextIdempotencyLookup": call(func(_ context.Context, i *instance, _ noFields) (any, error) {
		i.unreadable.Store(true)
		return nil, nil
	}),
	"installValidators": call(func(_ context.Context, i *instance, body struct {
		Specs []rowRule `json:"specs"`
	},
	) (any, error) {
		return nil, i.rules.installRows(i.schema, body.Specs)
	}),
	"installCommitValidator": call(func(_ context.Context, i *instance, body struct {
		Spec *commitRule `json:"spec"`
	},
	) (any, error) {
		return nil, i.rules.installCommit(i.schema, body.Spec)
	}),
	"setResolverOutage": call(func(_ context.Context, i *instance, body struct {
		Outage bool `json:"outage"`
	},
	) (any, error) {
		i.authority.setOutage(body.Outage)
		return nil, nil
	}),
	"revokeLease": call(func(ctx context.Context, i *instance, body struct {
		LeaseID string `json:"leaseId"`
	},
	) (any, error) {
		err := i.server.RevokeLease(ctx, i.partition, body.LeaseID)
		if errors.Is(err, syncpg.ErrLeaseNotFound) {
			return nil, notFound("there is no lease %q", body.LeaseID)
		}
		return nil, err
	}),
	"setSignedUrlTtlSeconds": call(func(_ context.Context, i *instance, body struct {
		TTLSeconds int64 `json:"ttlSeconds"`
	},
	) (any, error) {
		if i.urls == nil {
			return nil, badRequest("the instance issues no URLs")
		}
		return nil, i.urls.setTTL(body.TTLSeconds)
	}),
	"fetchSegmentUrl": call(func(ctx context.Context, i *instance, body struct {
		URL string `json:"url"`
	},
	) (any, error) {
		return i.fetchSegment(ctx, body.URL)
	}),
	"prune": call(func(ctx context.Context, i *instance, body pruneSpec) (any, error) {
		return i.prune(ctx, body)
	}),
	"captureBackup": call(func(ctx context.Context, i *instance, _ noFields) (any, error) {
		return nil, i.captureBackup(ctx)
	}),
	"restoreBackup": call(func(ctx context.Context, i *instance, _ noFields) (any, error) {
		return nil, i.restoreBackup(ctx)
	}),
	"quiesce": call(func(ctx context.Context, i *instance, body struct {
		Connections int `json:"connections"`
	},
	) (any, error) {
		if body.Connections < 0 {
			return nil, badRequest("connections is %d", body.Connections)
		}
		return nil, i.quiesce(ctx, body.Connections)
	}),
	"close": func(ctx context.Context, h *Host, i *instance, _ []byte) (any, error) {
		return nil, h.discard(ctx, i)
	},

	"setBlobPresign": unsupported("presigned blob URLs"),
	"fetchBlobUrl":   unsupported("presigned blob URLs"),
	"putBlobUrl":     unsupported("presigned blob URLs"),
}

// Capabilities returns the optional features that the host supports.
func Capabilities() []string {
	return []string{"backup-restore", "idempotency-fault", "leases", "signed-urls", "validators", "commit-validators"}
}

// Handler serves the control API and, under each instance's base URL, the
// protocol.
func (h *Host) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /control/capabilities", func(w http.ResponseWriter, _ *http.Request) {
		writeResult(w, Capabilities(), nil)
	})
	mux.HandleFunc("POST /control/instances", h.serveCreate)
	mux.HandleFunc("POST /instances/{id}/control/{method}", h.serveControl)
	mux.HandleFunc("/instances/{id}/", h.serveProtocol)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, notFound("nothing is served at %s %s", r.Method, r.URL.Path))
	})
	return mux
}

func (h *Host) serveCreate(w http.ResponseWriter, r *http.Request) {
	raw, err := readBody(w, r)
	if err != nil {
		writeError(w, err)
		return
	}
	var spec instanceSpec
	if err := decodeBody(raw, &spec); err != nil {
		writeError(w, err)
		return
	}
	i, err := h.create(r.Context(), spec)
	if err != nil {
		h.logFailure(r, err)
		writeError(w, err)
		return
	}
	writeResult(w, map[string]string{
		"instanceId": i.id,
		"baseUrl":    "http://" + r.Host + i.path(),
	}, nil)
}

func (h *Host) serveControl(w http.ResponseWriter, r *http.Request) {
	run, known := methods[r.PathValue("method")]
	if !known {
		writeError(w, notFound("there is no control method %q", r.PathValue("method")))
		return
	}
	i, err := h.instance(r.PathValue("id"))
	if err != nil {
		writeError(w, err)
		return
	}
	raw, err := readBody(w, r)
	if err != nil {
		writeError(w, err)
		return
	}
	result, err := run(r.Context(), h, i, raw)
	if err != nil {
		h.logFailure(r, err)
	}
	writeResult(w, result, err)
}

func (h *Host) serveProtocol(w http.ResponseWriter, r *http.Request) {
	i, err := h.instance(r.PathValue("id"))
	if err != nil {
		writeError(w, err)
		return
	}
	http.StripPrefix(i.path(), *i.handler.Load()).ServeHTTP(w, r)
}

// maxControlBody bounds a control call; the largest carries a schema or a blob.
const maxControlBody = 64 << 20

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || mediaType != "application/json" {
		return nil, &statusError{
			http.StatusUnsupportedMediaType, badRequest("the Content-Type must be application/json"),
		}
	}
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxControlBody))
	if err != nil {
		if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
			return nil, &statusError{http.StatusRequestEntityTooLarge, badRequest("%v", err)}
		}
		return nil, badRequest("read the body: %v", err)
	}
	return raw, nil
}

// decodeBody reads one JSON object and refuses fields it does not know, so that
// a request is never obeyed in part.
func decodeBody(raw []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return badRequest("the body is no such object: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return badRequest("the body goes on after the object")
	}
	return nil
}

func writeResult(w http.ResponseWriter, result any, err error) {
	if err != nil {
		writeError(w, err)
		return
	}
	body, err := json.Marshal(map[string]any{"result": result})
	if err != nil {
		writeError(w, fmt.Errorf("encode the result: %w", err))
		return
	}
	writeJSON(w, http.StatusOK, body)
}

func writeError(w http.ResponseWriter, err error) {
	failure, refused := errors.AsType[*ssp2.Error](err)
	if !refused {
		failure = &ssp2.Error{Code: codeFailed, Message: err.Error()}
	}
	status := failure.HTTPStatus()
	if failure.Code == codeNotSupported {
		status = http.StatusNotImplemented
	}
	if override, set := errors.AsType[*statusError](err); set {
		status = override.status
	}
	writeJSON(w, status, ssp2.AppendErrorJSON(nil, failure))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body) //nolint:gosec // JSON, and declared as JSON.
}
