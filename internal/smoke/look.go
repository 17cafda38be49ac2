package smoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/ssp2"
)

// notReadyError is a server that says it cannot serve.
type notReadyError struct {
	failed   []string
	database bool // which the server cannot reach
}

func (e *notReadyError) Error() string {
	if len(e.failed) == 0 {
		return "the server says that it is not ready"
	}
	return "the server says that it is not ready: " + strings.Join(e.failed, "; ")
}

// maxReadyBody bounds what is read of an answer to GET /readyz.
const maxReadyBody = 64 << 10

// checkReady asks GET /readyz. A server without that route passes.
func checkReady(ctx context.Context, o Options) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, o.URL+"/readyz", nil)
	if err != nil {
		return "", fmt.Errorf("make the request: %w", err)
	}
	maps.Copy(r.Header, o.Header)
	res, err := o.HTTP.Do(r)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	var body struct {
		Checks []struct {
			Name   string `json:"name"`
			Status string `json:"status"`
			Help   string `json:"help"`
		} `json:"checks"`
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxReadyBody))
	if err != nil {
		return "", fmt.Errorf("read the answer: %w", err)
	}
	isJSON := json.Unmarshal(text, &body) == nil
	switch {
	case res.StatusCode == http.StatusOK:
		return "", nil
	case res.StatusCode == http.StatusServiceUnavailable && isJSON:
		e := &notReadyError{}
		for _, c := range body.Checks {
			if c.Status != "ok" {
				what := c.Name + " " + c.Status
				if c.Help != "" {
					what += ": " + c.Help
				}
				e.failed = append(e.failed, what)
				e.database = e.database || c.Name == "database"
			}
		}
		return "", e
	case res.StatusCode == http.StatusNotFound, res.StatusCode == http.StatusMethodNotAllowed:
		return "not asked: there is no /readyz here", nil
	}
	return "", &client.StatusError{
		URL: r.URL.Redacted(), Status: res.StatusCode, ContentType: res.Header.Get("Content-Type"),
		Body: strings.TrimSpace(string(text[:min(len(text), 200)])),
	}
}

// errNoDelta reports that a commit did not come over a socket.
var errNoDelta = errors.New("nothing on the socket of a commit that was pushed")

// whatToLookAt proposes what to do about a failed step.
func whatToLookAt(err error) string {
	var (
		server   *client.ServerError
		status   *client.StatusError
		floor    *client.FloorError
		revoked  *client.RevokedError
		outcome  *OutcomeError
		network  *net.OpError
		notReady *notReadyError
		dns      *net.DNSError
	)
	switch {
	case errors.Is(err, errNoDelta):
		return "is the server started (Server.Start), and does its log say that it cannot listen? Or does something in between hold messages back?"
	case errors.As(err, &notReady) && notReady.database:
		return "is the server's database running, and can the server reach it? The server's log has the cause"
	case errors.As(err, &notReady):
		return "run `syncpg migrate status` and `syncpg schema check` against the server's database, and read the server's log"
	case errors.As(err, &floor):
		return "give the schema that the server serves with --schema FILE"
	case errors.As(err, &revoked):
		return "the actor may not read these scopes: give values it is allowed with --scope VARIABLE=VALUE, or another token"
	case errors.As(err, &server):
		return lookAtCode(server.Code)
	case errors.As(err, &outcome):
		for _, r := range outcome.Got.Results {
			if r.Code != "" {
				return lookAtCode(ssp2.Code(r.Code))
			}
		}
	case errors.As(err, &status) && status.Status == http.StatusNotFound:
		return "--url is the address that the server is mounted at, without /sync; is a path prefix missing or too much?"
	case errors.As(err, &status) && (status.Status == http.StatusUnauthorized || status.Status == http.StatusForbidden):
		return "something in front of the server refuses the request: give what it asks for with --token or --header"
	case errors.As(err, &status):
		return "something else than a sync server answers at this address, perhaps a proxy: look at its log and at what is behind it"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "the address does not speak TLS: use http:// instead of https://"
	case errors.As(err, &dns):
		return "the host name of --url is not known: is it spelt right?"
	case errors.As(err, &network):
		return "is the server running, and is this its address? `syncpg dev` starts one on http://127.0.0.1:8787"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection was closed before an answer was there: does this port speak HTTP? If it does, look at the server's log"
	case errors.Is(err, context.DeadlineExceeded):
		return "the server is slow or hangs: look at its log and at pg_stat_activity, or allow more with --timeout"
	case errors.Is(err, client.ErrProtocol):
		return "this is a fault of the server, or of a proxy that changes answers: compare its version with this one's and report it"
	}
	return ""
}

func lookAtCode(code ssp2.Code) string {
	switch code {
	case ssp2.CodeAuthRequired:
		return "the server does not accept the credentials: give others with --token or --header; at --log-level debug its log says why"
	case ssp2.CodeAuthLeaseRequired, ssp2.CodeAuthLeaseRevoked:
		return "what the actor may do cannot be found out now, and smoke has no lease: is the directory behind the server or its proxy there?"
	case ssp2.CodeForbidden, ssp2.CodeScopeRevoked:
		return "the actor may not write these scopes: give values it is allowed with --scope VARIABLE=VALUE, or another token"
	case ssp2.CodeUnknownTable, ssp2.CodeSchemaMismatch, ssp2.CodeInvalidSubscription:
		return "the server serves another schema: give the same with --schema FILE"
	case ssp2.CodeSchemaNotReady:
		return "run `syncpg schema check` against the server's database"
	case ssp2.CodeVersionConflict:
		return "a row of this id is already there: an earlier run with the same --scope may not have finished"
	case ssp2.CodeConstraintViolation:
		return "a constraint of the database refuses made-up values: choose a table without it with --table"
	case ssp2.CodeClientWireUnsupported:
		return "the server does not serve this wire version for the partition"
	default:
		if info, ok := ssp2.Lookup(code); !ok || info.Category == ssp2.CategoryInternal {
			return "the server's log has the cause"
		}
		return ""
	}
}
