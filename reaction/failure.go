package reaction

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// The failure codes that a runner gives by itself. They and the details of
// [RetryableError] and [PermanentError] are all that is stored of a failure: the text
// of an error may quote what must not be kept.
const (
	// CodeHandlerFailed is of an error without a code of its own.
	CodeHandlerFailed = "reaction.handler_failed"
	// CodeHandlerPanicked is of a panic; it is retried like an error.
	CodeHandlerPanicked = "reaction.handler_panicked"
	// CodeVersionUnsupported is of a version that the handler does not list; it is
	// permanent.
	CodeVersionUnsupported = "reaction.version_unsupported"
)

var (
	// ErrLeaseLost says that a lease expired and the reaction is somebody else's, or
	// done. The handler should stop: its outcome counts no more.
	ErrLeaseLost = errors.New("the lease of the reaction is lost")
	// ErrNotDeadLetter says that there is no dead letter of a key.
	ErrNotDeadLetter = errors.New("there is no such dead-lettered reaction")
	// ErrRunning is returned by a second Run of one runner.
	ErrRunning = errors.New("the reaction runner is running")
)

// RetryableError is a failure that is retried, like any other error, with a code to be
// stored.
type RetryableError struct {
	Code    string          // of the form of Plan.Type; else CodeHandlerFailed is stored
	Details json.RawMessage // at most 8,192 bytes of JSON, 16 levels deep; else nothing is stored. Nil: none
	Err     error           // cause, for logs only
}

// Error returns code and cause, for logs.
func (e *RetryableError) Error() string { return failureText("retryable", e.Code, e.Err) }

// Unwrap returns the cause.
func (e *RetryableError) Unwrap() error { return e.Err }

// PermanentError is a failure that no retry can help: the reaction is dead-lettered
// whatever attempts it has left.
type PermanentError struct {
	Code    string          // of the form of Plan.Type; else CodeHandlerFailed is stored
	Details json.RawMessage // at most 8,192 bytes of JSON, 16 levels deep; else nothing is stored. Nil: none
	Err     error           // cause, for logs only
}

// Error returns code and cause, for logs.
func (e *PermanentError) Error() string { return failureText("permanent", e.Code, e.Err) }

// Unwrap returns the cause.
func (e *PermanentError) Unwrap() error { return e.Err }

func failureText(kind, code string, cause error) string {
	if cause == nil {
		return fmt.Sprintf("%s failure %s", kind, code)
	}
	return fmt.Sprintf("%s failure %s: %v", kind, code, cause)
}

// panicError is the panic of a handler.
type panicError struct{ cause any }

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.cause) }

// failure is what is stored of an error.
type failure struct {
	permanent bool
	code      string
	details   *string
}

func failureOf(err error) failure {
	f := failure{code: CodeHandlerFailed}
	var details json.RawMessage
	var code string
	if e, ok := errors.AsType[*PermanentError](err); ok {
		f.permanent, code, details = true, e.Code, e.Details
	} else if e, ok := errors.AsType[*RetryableError](err); ok {
		code, details = e.Code, e.Details
	} else if _, ok := errors.AsType[*panicError](err); ok {
		code = CodeHandlerPanicked
	}
	if codeLike(code, MaxFailureCodeBytes) {
		f.code = code
	}
	if details != nil {
		if normalized, err := normalizeJSON(details, MaxDetailsBytes); err == nil {
			text := string(normalized)
			f.details = &text
		}
	}
	return f
}

// backoff returns min(most, initial × 2^(attempt - 1)).
func backoff(initial, most time.Duration, attempt int) time.Duration {
	delay := initial
	for range attempt - 1 {
		if delay > most/2 {
			return most
		}
		delay *= 2
	}
	return min(delay, most)
}
