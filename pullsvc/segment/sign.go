package segment

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/syncpg/syncpg/ssp2"
)

// ErrToken says that a token grants nothing: it is not one of ours, is for something else,
// or its time is over. Clients are not told which.
var ErrToken = errors.New("segment: the token does not grant this")

const (
	// DefaultURLTTL is the guidance of §5.4: for so long a URL outlives the scopes it was
	// issued for.
	DefaultURLTTL = 15 * time.Minute
	// MaxURLTTL is the most that a signer takes.
	MaxURLTTL = 15 * time.Minute
	// MinKeyBytes is the least length of a key, and of what a hash of it can be worth.
	MinKeyBytes = 32

	urlSkew       = 60 // seconds that a token is taken after its end, §5.4
	maxTokenBytes = 4096
)

// SignerConfig configures a [Signer]. BaseURL and Key are required.
type SignerConfig struct {
	// BaseURL is the URL under which clients reach this server's, or a CDN's, copy of
	// /segments/, such as https://sync.example.com/v1. It has no query.
	BaseURL string
	// Key signs: at least 32 random bytes, the same in all instances of a service.
	Key []byte
	// PreviousKey is one that signed until lately. Its URLs are still taken, so a key is
	// replaced by moving it here for as long as a URL lives. nil: none.
	PreviousKey []byte
	// TTL is how long a URL lives. Default and most: 15 min.
	TTL time.Duration
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
}

// Signer issues and verifies the URLs of the native scheme (§5.4). It is safe for
// concurrent use.
type Signer struct {
	base  string
	keys  []signKeys // the current ones first
	ttl   time.Duration
	clock func() time.Time
}

// NewSigner returns a signer, or says what is wrong with its configuration.
func NewSigner(cfg SignerConfig) (*Signer, error) {
	s := &Signer{ttl: cfg.TTL, clock: cfg.Clock}
	u, err := url.Parse(cfg.BaseURL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("segment: SignerConfig.BaseURL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil:
		return nil, fmt.Errorf("segment: SignerConfig.BaseURL is %q; it must be an http or https URL without user, query and fragment", cfg.BaseURL)
	case s.ttl < 0 || s.ttl > MaxURLTTL:
		return nil, fmt.Errorf("segment: SignerConfig.TTL is %v; it must be positive and at most %v, or 0 for that", s.ttl, MaxURLTTL)
	}
	s.base = strings.TrimRight(u.String(), "/") + "/segments/"
	for _, key := range [][]byte{cfg.Key, cfg.PreviousKey} {
		if len(s.keys) > 0 && key == nil {
			break
		}
		if len(key) < MinKeyBytes {
			return nil, fmt.Errorf("segment: a key of SignerConfig has %d bytes; it must have %d at least", len(key), MinKeyBytes)
		}
		k, err := deriveKeys(key)
		if err != nil {
			return nil, err
		}
		s.keys = append(s.keys, k)
	}
	if s.ttl == 0 {
		s.ttl = DefaultURLTTL
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	return s, nil
}

// signKeys are what is made of one key: each use has its own.
type signKeys struct {
	token    []byte
	audience siv
}

func deriveKeys(key []byte) (k signKeys, err error) {
	if k.token, err = derive(key, "syncpg segment url v1: token"); err != nil {
		return signKeys{}, err
	}
	k.audience, err = newSIV(key, "syncpg segment url v1: audience")
	return k, err
}

// SignURL implements [URLSigner]. It costs no I/O.
func (s *Signer) SignURL(_ context.Context, m Meta) (string, int64, error) {
	if err := m.check(); err != nil {
		return "", 0, err
	}
	exp := s.clock().Add(s.ttl).Unix()
	return s.base + m.ID + "?st=" + s.keys[0].sign(m, exp), exp * 1000, nil
}

func (k *signKeys) sign(m Meta, exp int64) string {
	payload := append([]byte(`{"v":1,"seg":`), ssp2.AppendJSONString(nil, m.ID)...)
	payload = ssp2.AppendJSONString(append(payload, `,"sd":`...), m.ScopeDigest)
	payload = ssp2.AppendJSONString(append(payload, `,"aud":`...), k.seal(m.Partition))
	payload = append(strconv.AppendInt(append(payload, `,"exp":`...), exp, 10), '}')
	return base64.RawURLEncoding.EncodeToString(payload) + "." + base64.RawURLEncoding.EncodeToString(mac(k.token, payload))
}

// Claims are what a token grants: the segment to whoever has it, as it was granted to the
// holder of the scopes.
type Claims struct {
	SegmentID   string
	Partition   string
	ScopeDigest string
}

// Verify returns the claims of a token that was presented for a segment. Its error is
// [ErrToken], which may come wrapped.
func (s *Signer) Verify(token, segmentID string) (Claims, error) {
	if len(token) > maxTokenBytes {
		return Claims{}, fmt.Errorf("%w: %d bytes", ErrToken, len(token))
	}
	left, right, _ := strings.Cut(token, ".")
	payload, err := tokenEncoding.DecodeString(left)
	if err != nil {
		return Claims{}, fmt.Errorf("%w: %w", ErrToken, err)
	}
	sum, err := tokenEncoding.DecodeString(right)
	if err != nil {
		return Claims{}, fmt.Errorf("%w: %w", ErrToken, err)
	}
	for i := range s.keys {
		if hmac.Equal(mac(s.keys[i].token, payload), sum) {
			return s.claims(&s.keys[i], payload, segmentID)
		}
	}
	return Claims{}, fmt.Errorf("%w: signed with none of the keys", ErrToken)
}

var tokenEncoding = base64.RawURLEncoding.Strict()

// claims reads a payload that is ours.
func (s *Signer) claims(k *signKeys, payload []byte, segmentID string) (Claims, error) {
	var p struct {
		V   int    `json:"v"`
		Seg string `json:"seg"`
		SD  string `json:"sd"`
		Aud string `json:"aud"`
		Exp int64  `json:"exp"`
	}
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return Claims{}, fmt.Errorf("%w: %w", ErrToken, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return Claims{}, fmt.Errorf("%w: something follows the claims", ErrToken)
	}
	partition, ours := k.open(p.Aud)
	switch {
	case p.V != 1:
		return Claims{}, fmt.Errorf("%w: version %d", ErrToken, p.V)
	case s.clock().Unix() > p.Exp+urlSkew:
		return Claims{}, fmt.Errorf("%w: it ended at %d", ErrToken, p.Exp)
	case subtle.ConstantTimeCompare([]byte(p.Seg), []byte(segmentID)) == 0:
		return Claims{}, fmt.Errorf("%w: for another segment", ErrToken)
	case !ours:
		return Claims{}, fmt.Errorf("%w: its audience is none of ours", ErrToken)
	}
	return Claims{SegmentID: p.Seg, Partition: partition, ScopeDigest: p.SD}, nil
}

func mac(key, message []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(message)
	return h.Sum(nil)
}

// audienceBlock is what the length of a partition's id is rounded up to.
const audienceBlock = 32

// seal makes the audience of a partition: an encryption of its id, which is the same every
// time and leads whoever has the key to the partition, without a list of which audience is
// whose.
func (k *signKeys) seal(partition string) string {
	plain := make([]byte, (len(partition)+audienceBlock-1)/audienceBlock*audienceBlock)
	copy(plain, partition) // ids hold no U+0000
	return base64.RawURLEncoding.EncodeToString(k.audience.seal(plain, ""))
}

// open returns the partition of an audience, false when it is not one of this key.
func (k *signKeys) open(audience string) (partition string, ours bool) {
	sealed, err := tokenEncoding.DecodeString(audience)
	if err != nil {
		return "", false
	}
	plain, ours := k.audience.open(sealed, "")
	return string(bytes.TrimRight(plain, "\x00")), ours
}
