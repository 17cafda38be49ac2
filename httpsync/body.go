package httpsync

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"

	"github.com/syncpg/syncpg/ssp2"
)

// ContentType is the media type of SSP2 messages (§1.1).
const ContentType = "application/vnd.syncular.sync.v2"

// checkContentType refuses every media type but [ContentType].
func checkContentType(header http.Header) error {
	// The media type counts even when a parameter is malformed.
	got, _, err := mime.ParseMediaType(header.Get("Content-Type"))
	if got == ContentType && (err == nil || errors.Is(err, mime.ErrInvalidMediaParameter)) {
		return nil
	}
	return &statusError{
		status: http.StatusUnsupportedMediaType,
		err:    ssp2.Errorf(ssp2.CodeInvalidRequest, "the content type must be %s", ContentType),
	}
}

// gzipReaders holds *gzip.Reader.
var gzipReaders sync.Pool

// readRequest decodes the body of a request.
func (h *handler) readRequest(w http.ResponseWriter, r *http.Request) (*ssp2.Request, error) {
	limit := h.cfg.MaxRequestBytes
	if limit >= 0 && r.ContentLength > limit {
		return nil, tooLarge(limit, nil)
	}
	var body io.Reader = r.Body
	if limit >= 0 {
		body = http.MaxBytesReader(w, r.Body, limit)
	}
	compressed, err := compressedBody(w, r.Header["Content-Encoding"])
	if err != nil {
		return nil, err
	}
	if compressed {
		z, pooled := gzipReaders.Get().(*gzip.Reader)
		if !pooled {
			z = new(gzip.Reader)
		}
		defer func() {
			// The pool must not keep the body alive.
			_ = z.Reset(http.NoBody)
			gzipReaders.Put(z)
		}()
		body = &gzipBody{src: body, z: z}
	}
	req, err := ssp2.ReadRequest(body, ssp2.Limits{MaxMessageBytes: limit, MaxFrameBytes: limit})
	if err == nil {
		return req, nil
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, tooLarge(limit, err)
	}
	if _, ok := errors.AsType[*ssp2.LimitError](err); ok {
		return nil, tooLarge(limit, err)
	}
	if ssp2.CodeOf(err) != "" {
		return nil, err
	}
	return nil, &ssp2.Error{
		Code:    ssp2.CodeInvalidRequest,
		Message: "the request body cannot be read",
		Err:     err,
	}
}

// compressedBody reports whether a body is gzip, and refuses other codings.
func compressedBody(w http.ResponseWriter, encodings []string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(strings.Join(encodings, ","))) {
	case "", "identity":
		return false, nil
	case "gzip", "x-gzip":
		return true, nil
	}
	w.Header().Set("Accept-Encoding", "gzip")
	return false, &statusError{
		status: http.StatusUnsupportedMediaType,
		err:    ssp2.Errorf(ssp2.CodeInvalidRequest, "the content encoding of a request must be gzip or none"),
	}
}

// gzipBody reads the gzip header with the first byte that is asked for, so that
// its errors come where those of the content come.
type gzipBody struct {
	src     io.Reader
	z       *gzip.Reader
	started bool
}

func (b *gzipBody) Read(p []byte) (int, error) {
	if !b.started {
		if err := b.z.Reset(b.src); err != nil {
			return 0, fmt.Errorf("gzip header: %w", err)
		}
		b.started = true
	}
	return b.z.Read(p) //nolint:wrapcheck // a Reader passes io.EOF on as it is
}

// counted counts the bytes of a body.
type counted struct {
	io.ReadCloser
	bytes int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.bytes += int64(n)
	return n, err //nolint:wrapcheck // a Reader passes io.EOF on as it is
}

func tooLarge(limit int64, cause error) error {
	return &statusError{
		status: http.StatusRequestEntityTooLarge,
		err: &ssp2.Error{
			Code:    ssp2.CodeInvalidRequest,
			Message: fmt.Sprintf("the request body is larger than the limit of %d bytes", limit),
			Err:     cause,
		},
	}
}
