package segment

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/syncpg/syncpg/ssp2"
)

// What [Store.Open] says of a segment that it does not open. Each may come wrapped.
var (
	// ErrNotFound says that the partition has no segment of this id, or has forgotten it.
	ErrNotFound = errors.New("segment: not found")
	// ErrForbidden says that the partition has the segment, for holders of other scopes.
	ErrForbidden = errors.New("segment: stored for other scopes")
	// ErrExpired says that the segment was stored for these scopes, and its time is over
	// or its log epoch is (§5.1, §2.1).
	ErrExpired = errors.New("segment: expired")
)

// ErrTooLarge is what Put returns of a segment that is larger than the whole store.
var ErrTooLarge = errors.New("segment: larger than the store")

// ErrCutShort is what a body's Read returns when the segment is gone before its end: it
// expired, or was pushed out, under its reader. Whoever serves it must break off, since
// what was read so far looks like a whole segment to nobody but a client that checks.
var ErrCutShort = errors.New("segment: gone while it was read")

// DefaultTTL is how long a segment lives after it was last stored (§5.1).
const DefaultTTL = 24 * time.Hour

// MaxFound bounds how many segments [Store.Find] returns.
const MaxFound = 4096

// Key is what a segment was built for: all segments of a key answer the same bootstrap,
// at different pins (§5.1).
type Key struct {
	Partition     string
	LogEpoch      string
	Table         string
	MediaType     ssp2.MediaType
	SchemaVersion int32
	ScopeDigest   string // of the effective scopes, §3.5
}

// Meta describes a stored segment, as its descriptor does (§5.4).
//
// The same bytes can have several descriptions: a page that has not changed between two
// pins, the empty table under the digests of two actors. A store keeps the bytes once and
// every description with a life of its own, so what one actor was given never opens the
// segment to another.
type Meta struct {
	Key
	ID            string // "sha256:" and the hash of the body in hex, §5.1
	AsOfCommitSeq int64
	RowCursor     *string // nil: the first page of the table
	NextRowCursor *string // nil: the last one
	// Page is which page of its table it is, counted from 0; -1 for one that answers only
	// the request that it was made for, and is not found. It tells no two descriptions apart.
	Page       int32
	RowCount   int64
	ByteLength int64 // of the body, which is not compressed
	ExpiresAt  int64 // epoch milliseconds; the store decides it
}

// Ref is what a requester has of a segment: its id, and the digest of the scopes that it
// was found to hold.
type Ref struct {
	Partition   string
	LogEpoch    string // the partition's current one
	ID          string
	ScopeDigest string
}

// Store keeps segments. It is safe for concurrent use, and so is any number of stores
// over the same database or bucket. Its errors are not for clients.
type Store interface {
	// Put reads exactly m.ByteLength bytes from body and keeps them as the segment m.ID.
	// When it returns nil, the segment can be opened and found, whole; otherwise nothing
	// of it can. The hash is the caller's word: a client that is given other bytes
	// refuses them. m.ExpiresAt is ignored, the store counts its TTL from now; storing
	// the same description again extends its life and may leave body unread. Memory is
	// bounded whatever the length, except in [Memory]. body is read while a connection
	// of the store's pool may be held, so it must not wait for another one.
	Put(ctx context.Context, m Meta, body io.Reader) error
	// Open returns a segment that was stored for r.ScopeDigest, or [ErrNotFound],
	// [ErrForbidden] or [ErrExpired]. The body is read in pieces and holds no connection
	// of a pool in between, so a slow reader costs nothing; its Read fails with
	// [ErrCutShort] when the segment goes away meanwhile. ctx covers the reading too. The
	// caller closes the body. Cursors of more than some hundred bytes may be missing in what
	// is returned.
	Open(ctx context.Context, r Ref) (Meta, io.ReadCloser, error)
	// Find returns the segments of a key that have not expired: newest pin first, and
	// those of a pin in the order of their pages, see [Sort]. Pages may be missing, or be
	// there twice with other ends. It returns at most [MaxFound], of the newest pins, and
	// the first pages of the last one of these. ExpiresAt may be a second early. A
	// caller that hands them out should leave alone those about to expire; building and
	// storing them again extends their life.
	Find(ctx context.Context, k Key) ([]Meta, error)
	// DeleteExpired forgets up to limit expired descriptions, and the bytes of segments
	// that have none left. It says how many, and whether it should be called again soon.
	DeleteExpired(ctx context.Context, limit int) (deleted int, more bool, err error)
}

// URLSigner issues the URLs of descriptors (§5.4), each the whole grant to one segment.
type URLSigner interface {
	// SignURL returns the URL and when it ends, in epoch milliseconds. It must be asked
	// only where scopes were resolved just now and gave m.ScopeDigest.
	SignURL(ctx context.Context, m Meta) (url string, expiresAtMs int64, err error)
}

// URLVerifier verifies the tokens of URLs that this server issued, see [Signer.Verify]. A
// signer whose URLs lead elsewhere is none.
type URLVerifier interface {
	Verify(token, segmentID string) (Claims, error)
}

// ID returns the id of a segment of these bytes (§5.1).
func ID(body []byte) string {
	sum := sha256.Sum256(body)
	return idPrefix + hex.EncodeToString(sum[:])
}

const idPrefix = "sha256:"

// ValidID says that s has the form of a segment id.
func ValidID(s string) bool {
	digits, found := strings.CutPrefix(s, idPrefix)
	if !found || len(digits) != 2*sha256.Size {
		return false
	}
	for _, c := range []byte(digits) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// check says what is wrong with a description.
func (m *Meta) check() error {
	switch {
	case !ValidID(m.ID):
		return fmt.Errorf("segment: the id %q is none", m.ID)
	case m.Partition == "" || m.LogEpoch == "" || m.Table == "" || m.ScopeDigest == "":
		return fmt.Errorf("segment %s: the key %+v is not complete", m.ID, m.Key)
	case m.Page < -1 || m.ByteLength < 0 || m.RowCount < 0 || m.AsOfCommitSeq < 0:
		return fmt.Errorf("segment %s: negative numbers", m.ID)
	case m.RowCursor != nil && *m.RowCursor == "" || m.NextRowCursor != nil && *m.NextRowCursor == "":
		return fmt.Errorf("segment %s: an empty cursor, where nil is for none", m.ID)
	}
	return nil
}
