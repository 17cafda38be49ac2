package reaction

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/syncpg/syncpg/ssp2"
)

// The limits of §6.9. Bytes are those of UTF-8.
const (
	MaxPerCommit        = 100
	MaxKeyBytes         = 256
	MaxTypeBytes        = 128
	MaxPayloadBytes     = 65536 // normalized
	MaxPayloadDepth     = 16    // arrays and objects inside each other
	MaxAttempts         = 100
	DefaultMaxAttempts  = 10
	MaxFailureCodeBytes = 128
	MaxDetailsBytes     = 8192 // normalized
)

// ErrInvalidPlan is wrapped by the errors of [Normalize].
var ErrInvalidPlan = errors.New("invalid reaction plan")

// Plan is one planned record (§6.9).
type Plan struct {
	// Key tells the reactions of one commit apart: not empty, at most 256 bytes, no
	// U+0000.
	Key string
	// Type names the handler: a letter, then letters, digits and ". _ : -", at most 128
	// bytes.
	Type string
	// Version is the version of the payload's meaning, from 1 on. A handler says which
	// ones it supports.
	Version int32
	// Payload is one JSON value, at most 65,536 bytes without insignificant white space
	// and 16 levels deep, with numbers that a double can hold. Nil: null.
	Payload json.RawMessage
	// MaxAttempts is how many deliveries may fail, 1 to 100. 0: 10.
	MaxAttempts int
}

// Record is a plan as it is stored: normalized, with the identity of its commit.
type Record struct {
	Plan
	ClientID, ClientCommitID string
	// IdempotencyKey is the JSON array [partition, client id, commit id, key]: the same
	// for every delivery, and of no other reaction.
	IdempotencyKey string
	// CommitSeq is the commit's, for the caller to fill in before [InsertParams].
	CommitSeq int64
}

// Normalize checks the plans of one commit against the limits of §6.9 and returns what
// is to be stored, in their order. Any error, one of [ErrInvalidPlan], is to fail the
// push.
func Normalize(partition, clientID, clientCommitID string, plans []Plan) ([]Record, error) {
	if len(plans) > MaxPerCommit {
		return nil, fmt.Errorf("%w: a commit may plan %d reactions, this one plans %d", ErrInvalidPlan, MaxPerCommit, len(plans))
	}
	records := make([]Record, len(plans))
	keys := make(map[string]struct{}, len(plans))
	for i, p := range plans {
		if err := p.normalize(); err != nil {
			return nil, fmt.Errorf("%w: reaction %d (type %.64q): %w", ErrInvalidPlan, i, p.Type, err)
		}
		if _, twice := keys[p.Key]; twice {
			return nil, fmt.Errorf("%w: reaction %d (type %.64q): its key is used twice", ErrInvalidPlan, i, p.Type)
		}
		keys[p.Key] = struct{}{}
		records[i] = Record{
			Plan: p, ClientID: clientID, ClientCommitID: clientCommitID,
			IdempotencyKey: idempotencyKey(partition, identity{clientID, clientCommitID, p.Key}),
		}
	}
	return records, nil
}

func (p *Plan) normalize() error {
	switch {
	case p.Key == "" || len(p.Key) > MaxKeyBytes || strings.IndexByte(p.Key, 0) >= 0 || !utf8.ValidString(p.Key):
		return fmt.Errorf("a key is UTF-8 of 1 to %d bytes without U+0000", MaxKeyBytes)
	case !codeLike(p.Type, MaxTypeBytes):
		return fmt.Errorf("a type is a letter, then letters, digits and the characters . _ : - in at most %d bytes", MaxTypeBytes)
	case p.Version < 1:
		return errors.New("a version is at least 1")
	case p.MaxAttempts < 0 || p.MaxAttempts > MaxAttempts:
		return fmt.Errorf("the number of attempts is 1 to %d, or 0 for %d", MaxAttempts, DefaultMaxAttempts)
	}
	if p.MaxAttempts == 0 {
		p.MaxAttempts = DefaultMaxAttempts
	}
	payload, err := normalizeJSON(p.Payload, MaxPayloadBytes)
	if err != nil {
		return fmt.Errorf("payload: %w", err)
	}
	p.Payload = payload
	return nil
}

// InsertParams returns the arguments of db.ReactionEnqueue, which stores records, of
// one commit or of several, in a flush of the push that holds the partition's lock.
// All of them are due at now.
func InsertParams(partition string, now time.Time, records []Record) []any {
	n := len(records)
	var (
		clientIDs, commitIDs, keys    = make([]string, n), make([]string, n), make([]string, n)
		idempotency, types, payloads  = make([]string, n), make([]string, n), make([]string, n)
		seqs, versions, attemptLimits = make([]int64, n), make([]int32, n), make([]int32, n)
	)
	for i, r := range records {
		clientIDs[i], commitIDs[i], seqs[i] = r.ClientID, r.ClientCommitID, r.CommitSeq
		keys[i], idempotency[i] = r.Key, r.IdempotencyKey
		types[i], versions[i], payloads[i] = r.Type, r.Version, string(r.Payload)
		attemptLimits[i] = int32(r.MaxAttempts)
	}
	return []any{partition, now.UnixMilli(), clientIDs, commitIDs, seqs, keys, idempotency, types, versions, payloads, attemptLimits}
}

var codePattern = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._:-]*$`)

// codeLike says whether s has the form that §6.9 wants of types and failure codes.
func codeLike(s string, maxBytes int) bool { return len(s) <= maxBytes && codePattern.MatchString(s) }

// normalizeJSON returns a JSON value without insignificant white space. Nil is null.
func normalizeJSON(raw json.RawMessage, maxBytes int) (json.RawMessage, error) {
	if raw == nil {
		return json.RawMessage("null"), nil
	}
	if !ssp2.ValidJSON(raw) {
		return nil, errors.New("it is not one JSON value in UTF-8")
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, fmt.Errorf("it is not one JSON value: %w", err)
	}
	if compact.Len() > maxBytes {
		return nil, fmt.Errorf("it has %d bytes, and at most %d are allowed", compact.Len(), maxBytes)
	}
	depth := 0
	tokens := json.NewDecoder(bytes.NewReader(compact.Bytes()))
	tokens.UseNumber()
	for tokens.InputOffset() < int64(compact.Len()) {
		token, err := tokens.Token()
		if err != nil {
			return nil, fmt.Errorf("it is not one JSON value: %w", err)
		}
		switch token := token.(type) {
		case json.Delim:
			if token == ']' || token == '}' {
				depth--
			} else if depth++; depth > MaxPayloadDepth {
				return nil, fmt.Errorf("it is more than %d levels deep", MaxPayloadDepth)
			}
		case json.Number:
			if f, err := token.Float64(); err != nil || math.IsInf(f, 0) {
				return nil, errors.New("it has a number that is not finite as a double")
			}
		}
	}
	return compact.Bytes(), nil
}

// identity names a reaction within its partition.
type identity struct{ clientID, clientCommitID, key string }

func idempotencyKey(partition string, id identity) string {
	b := []byte{'['}
	for i, part := range [...]string{partition, id.clientID, id.clientCommitID, id.key} {
		if i > 0 {
			b = append(b, ',')
		}
		b = ssp2.AppendJSONString(b, part)
	}
	return string(append(b, ']'))
}

// parseKey is the reverse of idempotencyKey, and false for a key of any other form or
// partition.
func parseKey(partition, key string) (identity, bool) {
	var parts []string
	if json.Unmarshal([]byte(key), &parts) != nil || len(parts) != 4 || parts[0] != partition {
		return identity{}, false
	}
	id := identity{parts[1], parts[2], parts[3]}
	return id, idempotencyKey(partition, id) == key
}
