package client

import (
	"errors"
	"fmt"

	"github.com/syncpg/syncpg/ssp2"
)

var (
	// ErrProtocol reports an answer that the protocol does not allow.
	ErrProtocol = errors.New("the server breaks the protocol")

	// ErrReset reports that the server answered nothing but a new log epoch (§2.1). The client has taken it over and has
	// dropped its rows and cursors; what was pushed has not been processed and may be pushed again.
	ErrReset = errors.New("the log of the partition was reset")

	// ErrURLEnded reports a segment whose URL had ended before it was fetched (§5.4). The next pull brings another one.
	ErrURLEnded = errors.New("the URL of a segment has ended")
)

func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// FloorError reports that the server does not serve the client's schema version (§1.6). Nothing was processed.
type FloorError struct {
	Version  int32 // of the client's schema
	Required int32 // lowest version served
	Latest   int32 // newest version known
}

func (e *FloorError) Error() string {
	if e.Required == e.Latest {
		return fmt.Sprintf("the server serves schema version %d, not %d", e.Latest, e.Version)
	}
	return fmt.Sprintf("the server serves schema versions %d to %d, not %d", e.Required, e.Latest, e.Version)
}

// ServerError is an error that the server answered: over HTTP as JSON (§10.1), or inside a response (§1.6).
type ServerError struct {
	Status    int // HTTP status; 200 for an error inside a response
	Code      ssp2.Code
	Message   string
	Retryable bool
	Action    ssp2.Action
}

func (e *ServerError) Error() string {
	if e.Status == 200 {
		return fmt.Sprintf("the server answered %s in the middle of its response: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("the server answered %s (HTTP %d): %s", e.Code, e.Status, e.Message)
}

// StatusError is an HTTP answer that is not one of an SSP2 server: some other program's, such as a proxy's.
type StatusError struct {
	URL         string
	Status      int
	ContentType string
	Body        string // its beginning
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s answered HTTP %d with content type %q, which is not an answer of a sync server",
		e.URL, e.Status, e.ContentType)
	if e.Body != "" {
		text += fmt.Sprintf("; it begins with %q", e.Body)
	}
	return text
}

// RevokedError reports a subscription that the server does not or no longer allow (§3.3). Its rows have been purged.
type RevokedError struct {
	Subscription string
	Reason       ssp2.Code
}

func (e *RevokedError) Error() string {
	return fmt.Sprintf("the server revoked subscription %q: %s", e.Subscription, e.Reason)
}
