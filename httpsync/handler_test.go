package httpsync_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// runner is a round made of one function.
type runner func(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error

func (f runner) Run(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error {
	return f(ctx, id, req, w)
}

// noRound fails the test when a round runs.
func noRound(t *testing.T) runner {
	t.Helper()
	return func(context.Context, round.Identity, *ssp2.Request, round.Writer) error {
		t.Error("a round ran")
		return errors.New("not reached")
	}
}

// answer is a round that writes a response of n subscriptions and flushes none.
func answer(n int) runner {
	return func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
		_, err := w.Write(response(n))
		return err
	}
}

// response is a whole response with n empty subscriptions.
func response(n int) []byte {
	m := &ssp2.Message{
		WireVersion: ssp2.WireV2, Kind: ssp2.KindResponse,
		Frames: []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: "epoch"}},
	}
	for i := range n {
		m.Frames = append(m.Frames,
			&ssp2.SubStart{ID: fmt.Sprintf("subscription-%d", i), Status: ssp2.SubActive, EffectiveScopes: ssp2.ScopeMap{}},
			&ssp2.SubEnd{NextCursor: int64(i)})
	}
	b, err := ssp2.AppendMessage(nil, m)
	if err != nil {
		panic(err)
	}
	return b
}

// request is a whole pull request.
func request(t *testing.T) []byte {
	t.Helper()
	epoch := "epoch"
	req := &ssp2.Request{
		WireVersion: ssp2.WireV2,
		Header:      ssp2.RequestHeader{ClientID: "device", SchemaVersion: 1, LogEpoch: &epoch},
		Pull:        &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows},
	}
	b, err := ssp2.AppendMessage(nil, req.Message())
	require.NoError(t, err)
	return b
}

func gz(t *testing.T, parts ...[]byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	for _, p := range parts {
		w := gzip.NewWriter(&buf)
		_, err := w.Write(p)
		require.NoError(t, err)
		require.NoError(t, w.Close())
	}
	return buf.Bytes()
}

func ada(*http.Request) (round.Identity, error) {
	return round.Identity{Actor: "ada", Partition: "acme"}, nil
}

func newHandler(t *testing.T, cfg httpsync.Config) http.Handler {
	t.Helper()
	if cfg.Authenticate == nil {
		cfg.Authenticate = ada
	}
	h, err := httpsync.New(cfg)
	require.NoError(t, err)
	return h
}

// post sends a body straight to a handler.
func post(h http.Handler, body io.Reader, header http.Header) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/sync", body)
	r.Header.Set("Content-Type", httpsync.ContentType)
	maps.Copy(r.Header, header)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// protocolError is the JSON body of §10.1.
type protocolError struct {
	Code              string          `json:"code"`
	Category          string          `json:"category"`
	Retryable         bool            `json:"retryable"`
	RecommendedAction string          `json:"recommendedAction"`
	Message           string          `json:"message"`
	Details           json.RawMessage `json:"details"`
}

// requireError checks status, code and form of an error answer, and returns it.
func requireError(t *testing.T, w *httptest.ResponseRecorder, status int, code ssp2.Code) protocolError {
	t.Helper()
	require.Equal(t, status, w.Code, "body: %s", w.Body)
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	var e protocolError
	dec := json.NewDecoder(w.Body)
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&e))
	require.Equal(t, string(code), e.Code)
	info, ok := ssp2.Lookup(code)
	require.True(t, ok)
	require.Equal(t, string(info.Category), e.Category)
	require.Equal(t, info.Retryable, e.Retryable)
	require.Equal(t, string(info.Action), e.RecommendedAction)
	require.NotEmpty(t, e.Message)
	return e
}

func TestNewRefusesAnIncompleteConfig(t *testing.T) {
	t.Parallel()
	_, err := httpsync.New(httpsync.Config{Authenticate: ada})
	require.ErrorContains(t, err, "Config.Rounds")
	_, err = httpsync.New(httpsync.Config{Rounds: answer(0)})
	require.ErrorContains(t, err, "Config.Authenticate")
}

func TestMethodMustBePost(t *testing.T) {
	t.Parallel()
	h := newHandler(t, httpsync.Config{Rounds: noRound(t)})
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(method, "/sync", nil))
			require.Equal(t, "POST", w.Header().Get("Allow"))
			requireError(t, w, http.StatusMethodNotAllowed, ssp2.CodeInvalidRequest)
		})
	}
}

func TestContentTypeIsTheProtocols(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		contentType string
		ok          bool
	}{
		{httpsync.ContentType, true},
		{"Application/Vnd.Syncular.Sync.V2", true},
		{httpsync.ContentType + "; charset=binary", true},
		{httpsync.ContentType + "; broken", true},
		{"", false},
		{"application/octet-stream", false},
		{"application/vnd.syncular.sync.v1", false},
		{"application/vnd.syncular.sync.v22", false},
		{"application/json", false},
		{";", false},
	} {
		t.Run(tc.contentType, func(t *testing.T) {
			t.Parallel()
			rounds := answer(0)
			if !tc.ok {
				rounds = noRound(t)
			}
			h := newHandler(t, httpsync.Config{Rounds: rounds})
			w := post(h, bytes.NewReader(request(t)), http.Header{"Content-Type": {tc.contentType}})
			if tc.ok {
				require.Equal(t, http.StatusOK, w.Code)
				return
			}
			e := requireError(t, w, http.StatusUnsupportedMediaType, ssp2.CodeInvalidRequest)
			require.Contains(t, e.Message, httpsync.ContentType)
		})
	}
}

func TestAuthentication(t *testing.T) {
	t.Parallel()
	secret := errors.New("secret: token 4711 of table users")
	for _, tc := range []struct {
		name    string
		err     error
		id      round.Identity
		status  int
		code    ssp2.Code
		message string
	}{
		{"an ordinary error is 401", secret, round.Identity{}, 401, ssp2.CodeAuthRequired, ""},
		{"an error wins over an identity", secret, round.Identity{Actor: "a", Partition: "p"}, 401, ssp2.CodeAuthRequired, ""},
		{"a protocol error keeps its code", fmt.Errorf("x: %w", ssp2.Errorf(ssp2.CodeRateLimited, "slow down")), round.Identity{}, 429, ssp2.CodeRateLimited, "slow down"},
		{"an outage is no refusal", fmt.Errorf("idp: %w", round.ErrOutage), round.Identity{}, 503, ssp2.CodeStorageUnavailable, ""},
		{"no actor is no identity", nil, round.Identity{Partition: "p"}, 401, ssp2.CodeAuthRequired, ""},
		{"no partition is no identity", nil, round.Identity{Actor: "a"}, 401, ssp2.CodeAuthRequired, ""},
		{"U+0000 is in no identity", nil, round.Identity{Actor: "a\x00", Partition: "p"}, 401, ssp2.CodeAuthRequired, ""},
		{"what is not UTF-8 is no identity", nil, round.Identity{Actor: "a", Partition: "\xff"}, 401, ssp2.CodeAuthRequired, ""},
		{"no key holds the name of this partition", nil, round.Identity{Actor: "a", Partition: strings.Repeat("p", 513)}, 401, ssp2.CodeAuthRequired, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newHandler(t, httpsync.Config{
				Rounds:       noRound(t),
				Authenticate: func(*http.Request) (round.Identity, error) { return tc.id, tc.err },
			})
			e := requireError(t, post(h, unreadable{t}, nil), tc.status, tc.code)
			require.NotContains(t, e.Message, "secret")
			if tc.message != "" {
				require.Equal(t, tc.message, e.Message)
			}
		})
	}
}

// unreadable is a body that must not be read.
type unreadable struct{ t *testing.T }

func (u unreadable) Read([]byte) (int, error) {
	u.t.Error("the body was read")
	return 0, io.EOF
}

func TestTheRoundGetsIdentityRequestAndContext(t *testing.T) {
	t.Parallel()
	type key struct{}
	var got *ssp2.Request
	h := newHandler(t, httpsync.Config{
		Rounds: runner(func(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error {
			require.Equal(t, "value", ctx.Value(key{}))
			require.Equal(t, round.Identity{Actor: "ada", Partition: "acme"}, id)
			got = req
			return answer(0)(ctx, id, req, w)
		}),
	})
	r := httptest.NewRequest(http.MethodPost, "/sync", bytes.NewReader(request(t)))
	r.Header.Set("Content-Type", httpsync.ContentType)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), key{}, "value")))
	require.Equal(t, http.StatusOK, w.Code)
	want, err := ssp2.ReadRequest(bytes.NewReader(request(t)), ssp2.Limits{})
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(want, got))
}

func TestErrorsBeforeTheFirstByteAreJSON(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		err    error
		status int
		code   ssp2.Code
	}{
		{"protocol error", ssp2.Errorf(ssp2.CodeUnknownTable, "no such table"), 400, ssp2.CodeUnknownTable},
		{"wrapped protocol error", fmt.Errorf("pull: %w", ssp2.Errorf(ssp2.CodeSchemaNotReady, "wait")), 503, ssp2.CodeSchemaNotReady},
		{"cause stays behind", &ssp2.Error{Code: ssp2.CodeStorageStaleRead, Message: "stale", Err: errors.New("secret")}, 503, ssp2.CodeStorageStaleRead},
		{"internal failure", errors.New("secret"), 500, ssp2.CodeInternalError},
		{"deadline", fmt.Errorf("secret: %w", context.DeadlineExceeded), 503, ssp2.CodeStorageUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newHandler(t, httpsync.Config{
				Rounds: runner(func(context.Context, round.Identity, *ssp2.Request, round.Writer) error { return tc.err }),
			})
			w := post(h, bytes.NewReader(request(t)), http.Header{"Accept-Encoding": {"gzip"}})
			require.NotContains(t, w.Body.String(), "secret")
			require.Empty(t, w.Header().Get("Content-Encoding"))
			requireError(t, w, tc.status, tc.code)
		})
	}
}

func TestErrorsAfterTheFirstByteLeaveTheStatus(t *testing.T) {
	t.Parallel()
	h := newHandler(t, httpsync.Config{
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			_, err := w.Write([]byte("frames, ERROR, END"))
			require.NoError(t, err)
			return &round.StreamError{Reported: true, Err: errors.New("database gone")}
		}),
	})
	w := post(h, bytes.NewReader(request(t)), nil)
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "frames, ERROR, END", w.Body.String())
}

func TestAResponseThatCannotBeFinishedIsCutOff(t *testing.T) {
	t.Parallel()
	h := newHandler(t, httpsync.Config{
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			_, err := w.Write([]byte("frames"))
			require.NoError(t, err)
			require.NoError(t, w.Flush())
			return &round.StreamError{Err: errors.New("peer gone")}
		}),
	})
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	res, err := server.Client().Post(server.URL+"/sync", httpsync.ContentType, bytes.NewReader(request(t)))
	require.NoError(t, err)
	_, err = io.ReadAll(res.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.NoError(t, res.Body.Close())
}

func TestPanicsAreContained(t *testing.T) {
	t.Parallel()
	var logged bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&logged, nil))
	h := newHandler(t, httpsync.Config{
		Rounds:       noRound(t),
		Authenticate: func(*http.Request) (round.Identity, error) { panic("secret of the host") },
		Logger:       logger,
	})
	w := post(h, bytes.NewReader(request(t)), nil)
	require.NotContains(t, w.Body.String(), "secret")
	requireError(t, w, http.StatusInternalServerError, ssp2.CodeInternalError)
	require.Contains(t, logged.String(), "secret of the host")

	h = newHandler(t, httpsync.Config{
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			_, err := w.Write(response(100))
			require.NoError(t, err)
			panic("late")
		}),
		Logger: logger,
	})
	require.PanicsWithError(t, http.ErrAbortHandler.Error(), func() { post(h, bytes.NewReader(request(t)), nil) })
	require.Contains(t, logged.String(), "late")
}

func TestMountedUnderAPrefix(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.Handle("/api/v1/", http.StripPrefix("/api/v1", newHandler(t, httpsync.Config{Rounds: answer(1)})))
	r := httptest.NewRequest(http.MethodPost, "/api/v1/sync", bytes.NewReader(request(t)))
	r.Header.Set("Content-Type", httpsync.ContentType)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, response(1), w.Body.Bytes())

	w = httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/v1/unknown", nil))
	require.Equal(t, http.StatusNotFound, w.Code)
}

func TestTheCallersConfigIsNotChanged(t *testing.T) {
	t.Parallel()
	cfg := httpsync.Config{Rounds: answer(0), Authenticate: ada}
	newHandler(t, cfg)
	require.Zero(t, cfg.MaxRequestBytes)
	require.Zero(t, cfg.WriteTimeout)
	require.Nil(t, cfg.Logger)
	require.Nil(t, cfg.Ready)
}

func TestNothingIsLoggedAboveDebugForARefusedRequest(t *testing.T) {
	t.Parallel()
	var logged bytes.Buffer
	h := newHandler(t, httpsync.Config{
		Rounds: noRound(t),
		Logger: slog.New(slog.NewTextHandler(&logged, nil)),
	})
	requireError(t, post(h, strings.NewReader("SSP1"), nil), http.StatusBadRequest, ssp2.CodeInvalidRequest)
	require.Empty(t, logged.String())
}
