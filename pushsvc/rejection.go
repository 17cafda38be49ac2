package pushsvc

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/syncpg/syncpg/ssp2"
)

// Bounds of a rejection.
const (
	// MaxRejectionCodeBytes bounds the code of a host.
	MaxRejectionCodeBytes = 96
	// MaxRejectionMessageBytes bounds the message, which every replay repeats.
	MaxRejectionMessageBytes = 1024
)

// reservedPrefixes are the protocol's own families of codes (§6.7).
var reservedPrefixes = [...]string{"sync.", "blob.", "operation.", "presence.", "client."}

var rejectionCode = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*([._-][A-Za-z0-9]+)*$`)

// Rejection is the deliberate "no" of a hook. [Reject] and [RejectOperation] make it;
// a hook that returns one, wrapped or not, rejects the commit for good: code, message
// and details are stored with the outcome and go to the client, now and on every
// replay (§6.7, §6.8).
type Rejection struct { //nolint:errname // a verdict, which travels as an error
	code, message string
	details       string // in normal form, "" for none
	op            int    // -1: not named
}

// Error returns code and message.
func (r *Rejection) Error() string {
	if r == nil {
		return "pushsvc: a nil *Rejection" // an easy mistake, which must reach the log
	}
	return r.code + ": " + r.message
}

// Code returns the code of the host.
func (r *Rejection) Code() string { return r.code }

// Reject makes the error that rejects a commit. The code is the host's own: letters and
// digits in parts joined by ".", "_" or "-", which begins with a letter, at most 96
// bytes, and none of the protocol's families (sync. blob. operation. presence. client.).
// The message, at most 1,024 bytes, is for developers ("" repeats the code); details,
// nil for none, are bounded as §6.3.1 says. Both reach a client that may be anybody who
// may write the row, so neither may hold what such a one must not see.
//
// When an argument breaks a rule, Reject returns an error that is no [*Rejection] and
// says which: for a hook that returns it, a mistake like any other.
func Reject(code, message string, details *ssp2.Details) error {
	return reject(-1, code, message, details)
}

// RejectOperation is Reject for a validator of whole commits that knows which operation
// is to blame, by its index in the commit, counted from 0 (§6.8). One that the commit does not
// have is a mistake of the hook: sync.constraint_violation.
func RejectOperation(opIndex int, code, message string, details *ssp2.Details) error {
	if opIndex < 0 || opIndex > math.MaxInt32 {
		return fmt.Errorf("pushsvc: rejecting operation %d: there is none of that index", opIndex)
	}
	return reject(opIndex, code, message, details)
}

func reject(op int, code, message string, details *ssp2.Details) error {
	for _, prefix := range reservedPrefixes {
		if strings.HasPrefix(code, prefix) {
			return fmt.Errorf("pushsvc: rejecting with code %q: codes that begin with %q are the protocol's", code, prefix)
		}
	}
	switch {
	case len(code) > MaxRejectionCodeBytes || !rejectionCode.MatchString(code):
		return fmt.Errorf("pushsvc: rejecting with code %q: a code has at most %d bytes, letters and digits in parts joined by one of . _ -", code, MaxRejectionCodeBytes)
	case len(message) > MaxRejectionMessageBytes || !utf8.ValidString(message):
		return fmt.Errorf("pushsvc: rejecting with code %q: the message must be UTF-8 of at most %d bytes", code, MaxRejectionMessageBytes)
	case message == "":
		message = code
	}
	r := &Rejection{code: code, message: message, op: op}
	if details != nil {
		var err error
		if r.details, err = details.JSON(); err != nil {
			return fmt.Errorf("pushsvc: rejecting with code %q: %w", code, err)
		}
	}
	return r
}

// rejectionIn returns the rejection in an error of a hook, nil when there is none.
func rejectionIn(err error) *Rejection {
	if r, ok := errors.AsType[*Rejection](err); ok && r != nil && r.code != "" {
		return r
	}
	return nil
}
