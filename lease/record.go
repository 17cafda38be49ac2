package lease

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// record is a lease at rest (§7.3.1), its scopes as the SHA-256 of their JSON.
type record struct {
	partition, client   string
	id, actor           string
	digest              []byte
	issuedAt, expiresAt int64 // epoch ms
	revokedAt           int64 // epoch ms; negative: not revoked
	signature           []byte
}

func recordOf(c Client, row db.LeaseFindRow) record {
	return record{
		partition: c.Partition, client: c.ID, id: row.LeaseID, actor: row.ActorID, digest: row.AllowedDigest,
		issuedAt: row.IssuedAtMs, expiresAt: row.ExpiresAtMs, revokedAt: row.RevokedAtMs, signature: row.Signature,
	}
}

// message is what is signed: every field, each text with its length in front.
func (r *record) message() []byte {
	b := []byte("syncpg auth lease 1")
	for _, field := range []string{r.partition, r.client, r.id, r.actor, string(r.digest)} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(field)))
		b = append(b, field...)
	}
	for _, n := range []int64{r.issuedAt, r.expiresAt, r.revokedAt} {
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	return b
}

func mac(key, message []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(message)
	return h.Sum(nil)
}

func (s *Store) sign(r *record) []byte { return mac(s.keys[0], r.message()) }

func (s *Store) verify(r *record) bool {
	message := r.message()
	for _, key := range s.keys {
		if hmac.Equal(mac(key, message), r.signature) {
			return true
		}
	}
	return false
}

// newID is a lease id that nobody can guess.
func newID() string {
	var b [18]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// renderScopes renders allowed scopes for the record. Text that is not UTF-8 can match
// nothing that a client sends, and the database would not take it.
func renderScopes(allowed scope.Allowed) string {
	clean := make(map[string][]string, len(allowed))
	for variable, values := range allowed {
		if !utf8.ValidString(variable) {
			continue
		}
		clean[variable] = []string{}
		for _, value := range values {
			if utf8.ValidString(value) {
				clean[variable] = append(clean[variable], value)
			}
		}
	}
	return string(ssp2.AppendCanonicalScopes(nil, clean))
}

func parseScopes(text string) (scope.Allowed, error) {
	var allowed scope.Allowed
	if err := json.Unmarshal([]byte(text), &allowed); err != nil {
		return nil, fmt.Errorf("its scopes: %w", err)
	}
	return allowed, nil
}
