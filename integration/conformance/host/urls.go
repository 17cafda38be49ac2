package host

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// segmentBase is where the URLs of segments point. Nothing listens there: the driver hands
// them back to fetchSegmentUrl.
const segmentBase = "https://segments.invalid/v1"

// segmentURLs issues and verifies URLs of segments, with a life that scenarios change.
type segmentURLs struct {
	key   []byte
	clock func() time.Time

	mu     sync.Mutex
	signer *segment.Signer
}

func newSegmentURLs(ttlSeconds *int64, clock func() time.Time) (*segmentURLs, error) {
	u := &segmentURLs{key: make([]byte, segment.MinKeyBytes), clock: clock}
	if _, err := rand.Read(u.key); err != nil {
		return nil, fmt.Errorf("choose a key: %w", err)
	}
	ttl := int64(segment.DefaultURLTTL / time.Second)
	if ttlSeconds != nil {
		ttl = *ttlSeconds
	}
	return u, u.setTTL(ttl)
}

func (u *segmentURLs) setTTL(seconds int64) error {
	ttl := time.Duration(seconds) * time.Second
	if seconds == 0 {
		ttl = 1 // ends at once
	}
	signer, err := segment.NewSigner(segment.SignerConfig{BaseURL: segmentBase, Key: u.key, TTL: ttl, Clock: u.clock})
	if err != nil {
		return badRequest("ttlSeconds is %d: %v", seconds, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.signer = signer
	return nil
}

func (u *segmentURLs) current() *segment.Signer {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.signer
}

func (u *segmentURLs) SignURL(ctx context.Context, m segment.Meta) (string, int64, error) {
	return u.current().SignURL(ctx, m)
}

func (u *segmentURLs) Verify(token, segmentID string) (segment.Claims, error) {
	return u.current().Verify(token, segmentID)
}

// fetchSegment answers for the store that URLs point at: what the server under test answers
// to the URL alone.
func (i *instance) fetchSegment(ctx context.Context, raw string) (any, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, badRequest("the URL: %v", err)
	}
	path, ours := strings.CutPrefix(u.Path, "/v1/segments/")
	if !ours || u.Scheme+"://"+u.Host+"/v1" != segmentBase {
		return nil, notFound("no segments are served at %s", u.Redacted())
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "/segments/"+url.PathEscape(path)+"?"+u.RawQuery, nil)
	if err != nil {
		return nil, badRequest("the URL: %v", err)
	}
	if !u.Query().Has("st") {
		return nil, ssp2.Errorf(ssp2.CodeForbidden, "the URL has no token")
	}
	answer := httptest.NewRecorder()
	i.protocol.ServeHTTP(answer, request)
	if answer.Code == http.StatusOK {
		return map[string]string{"$bytes": hex.EncodeToString(answer.Body.Bytes())}, nil
	}
	var failure struct {
		Code    ssp2.Code `json:"code"`
		Message string    `json:"message"`
	}
	if err := json.Unmarshal(answer.Body.Bytes(), &failure); err != nil {
		return nil, fmt.Errorf("status %d without a protocol error: %w", answer.Code, err)
	}
	return nil, &ssp2.Error{Code: failure.Code, Message: failure.Message}
}
