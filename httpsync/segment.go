package httpsync

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// ScopesHeader carries the requested scopes of the subscription that a segment is
// downloaded for, as JSON (§5.5).
const ScopesHeader = "X-Syncular-Scopes"

// Downloads opens segments; see [round.Engine], whose contract it has.
type Downloads interface {
	OpenSegment(ctx context.Context, id round.Identity, segmentID string, requested map[string][]string) (segment.Meta, io.ReadCloser, error)
	OpenSigned(ctx context.Context, segmentID, token string) (segment.Meta, io.ReadCloser, error)
}

// segment is GET /segments/{id}: with host authentication (§5.5), or with a token that is
// the whole grant (§5.4).
func (h *handler) segment(w http.ResponseWriter, r *http.Request) {
	token, signed := signedToken(r.URL)
	accepted := negotiate(r.Header["Accept-Encoding"])
	if signed {
		// Such URLs point at hosts that serve stored bytes as they are (§5.8), for pages of
		// any origin, without credentials.
		accepted = identity
		if w.Header().Get("Access-Control-Allow-Origin") == "" {
			w.Header().Set("Access-Control-Allow-Origin", "*")
		}
	} else {
		w.Header().Add("Vary", "Authorization, "+ScopesHeader+", Accept-Encoding")
	}
	out := h.newResponse(w, accepted)
	told := &events.SegmentServed{Signed: signed}
	if id := r.PathValue("id"); segment.ValidID(id) {
		told.SegmentID = id
	}
	defer h.tell(r, out, told, time.Now())
	defer out.release()
	defer h.contain(w, r, out)

	if !h.allow(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	told.Code = ssp2.CodeInternalError // unless it comes to something else
	m, body, err := h.open(r, token, told)
	if err != nil {
		told.Code = h.refuse(w, r, err)
		return
	}
	defer func() { _ = body.Close() }()
	told.Code, told.Broken = "", true // until it is out
	told.Partition, told.Table, told.MediaType, told.Bytes = m.Partition, m.Table, m.MediaType, m.ByteLength
	if m.ByteLength < holdBytes {
		out.coding = identity
	}
	out.describe = func(header http.Header) { describeSegment(header, m) }
	switch {
	case matches(r.Header["If-None-Match"], etag(m)):
		describeSegment(w.Header(), m)
		w.Header().Del("Content-Type")
		w.WriteHeader(http.StatusNotModified)
		told.Broken, told.NotModified = false, true
		return
	case r.Method == http.MethodHead:
		describeSegment(w.Header(), m)
		if out.coding == identity {
			w.Header().Set("Content-Length", strconv.FormatInt(m.ByteLength, 10))
		} else {
			w.Header().Set("Content-Encoding", string(out.coding))
		}
		w.WriteHeader(http.StatusOK)
		return
	case out.coding == identity:
		w.Header().Set("Content-Length", strconv.FormatInt(m.ByteLength, 10))
	}
	if _, err = io.Copy(out, body); err == nil {
		err = out.finish()
	}
	switch {
	case err == nil:
		told.Broken = false
	case out.committed:
		h.cfg.Logger.DebugContext(r.Context(), "segment cut short", "segment", m.ID, "error", err)
		panic(http.ErrAbortHandler)
	default:
		told.Code, told.Broken = h.refuse(w, r, err), false
	}
}

// tell tells of a download that began then and is over.
func (h *handler) tell(r *http.Request, out *response, told *events.SegmentServed, began time.Time) {
	if h.cfg.Events == nil || r.Method != http.MethodGet {
		return
	}
	told.Duration, told.BytesSent = time.Since(began), out.out.written
	events.Emit(context.WithoutCancel(r.Context()), h.cfg.Events, *told) // the client may have left
}

// signedToken returns the token of a signed URL, whatever else is in its query.
func signedToken(u *url.URL) (token string, signed bool) {
	if u.RawQuery == "" {
		return "", false
	}
	q := u.Query()
	return q.Get("st"), q.Has("st")
}

// open opens the segment that was asked for, and notes who asked.
func (h *handler) open(r *http.Request, token string, told *events.SegmentServed) (segment.Meta, io.ReadCloser, error) {
	id := r.PathValue("id")
	if told.Signed {
		if h.cfg.Segments == nil {
			return segment.Meta{}, nil, ssp2.Errorf(ssp2.CodeNotFound, "there is no such segment")
		}
		return h.cfg.Segments.OpenSigned(r.Context(), id, token)
	}
	who, err := h.authenticate(r)
	if err != nil {
		return segment.Meta{}, nil, err
	}
	told.Partition, told.Actor = who.Partition, who.Actor
	requested, err := requestedScopes(r.Header)
	if err != nil {
		return segment.Meta{}, nil, err
	}
	if h.cfg.Segments == nil {
		return segment.Meta{}, nil, ssp2.Errorf(ssp2.CodeNotFound, "there is no such segment")
	}
	return h.cfg.Segments.OpenSegment(r.Context(), who, id, requested)
}

// requestedScopes reads the scopes header.
func requestedScopes(header http.Header) (map[string][]string, error) {
	lines := header.Values(ScopesHeader)
	if len(lines) != 1 {
		return nil, ssp2.Errorf(ssp2.CodeInvalidRequest, "a download needs one header %s with the requested scopes", ScopesHeader)
	}
	text := []byte(lines[0])
	if !utf8.Valid(text) {
		// Browsers send each character of a header as one byte.
		latin1 := make([]rune, len(text))
		for i, b := range text {
			latin1[i] = rune(b)
		}
		text = []byte(string(latin1))
	}
	var requested map[string][]string
	if err := json.Unmarshal(text, &requested); err != nil {
		return nil, &ssp2.Error{Code: ssp2.CodeInvalidRequest, Message: "the header " + ScopesHeader + " must be a JSON object of scope variables to lists of values", Err: err}
	}
	return requested, nil
}

func describeSegment(header http.Header, m segment.Meta) {
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Cache-Control", "private, max-age=0")
	header.Set("ETag", etag(m))
	header.Set("X-Content-Type-Options", "nosniff")
}

// etag is the id of a segment, which is the hash of its bytes.
func etag(m segment.Meta) string { return `"` + m.ID + `"` }

// matches says whether the lines of an If-None-Match name a tag (RFC 9110 §13.1.2).
func matches(lines []string, tag string) bool {
	for element := range strings.SplitSeq(strings.Join(lines, ","), ",") {
		element = strings.TrimSpace(element)
		if element == "*" || strings.TrimPrefix(element, "W/") == tag {
			return true
		}
	}
	return false
}
