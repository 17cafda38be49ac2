package client

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/syncpg/syncpg/ssp2"
)

// contentType is that of SSP2 bodies (§1.1).
const contentType = "application/vnd.syncular.sync.v2"

// bodyExcerpt bounds what is read of a body that is no answer of a sync server.
const bodyExcerpt = 4 << 10

// answer takes what one response brings.
type answer struct {
	commits  []ssp2.PushCommit // pushed
	results  []Result
	subs     []*subscription // pulled
	revoked  *RevokedError   // the first one
	progress Progress

	delta   bool  // no answer to a request: it has the subscriptions that a commit concerns (§8.2)
	reached int64 // by a delta: its highest nextCursor
}

// round sends one request and applies its response as it arrives.
func (c *Client) round(ctx context.Context, req *ssp2.Request, a *answer) error {
	req.WireVersion = c.cfg.Wire
	req.Header = ssp2.RequestHeader{ClientID: c.cfg.ClientID, SchemaVersion: c.cfg.Schema.Version}
	if c.epoch != "" {
		req.Header.LogEpoch = &c.epoch
	}
	body, err := ssp2.AppendMessage(nil, req.Message())
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	if c.cfg.Round != nil {
		stream, err := c.cfg.Round(ctx, body)
		if err != nil {
			return err // It says where.
		}
		defer stream.Close()
		return c.apply(ctx, ssp2.NewReader(stream, ssp2.Limits{MaxMessageBytes: -1}), a)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.cfg.URL+"/sync", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make the request: %w", err)
	}
	r.Header.Set("Content-Type", contentType)
	stream, err := c.send(r, contentType)
	if err != nil {
		return err
	}
	defer stream.Close()
	return c.apply(ctx, ssp2.NewReader(stream, ssp2.Limits{MaxMessageBytes: -1}), a)
}

// send sends a request of the client and returns the decompressed body of an answer of the wanted type.
func (c *Client) send(r *http.Request, wanted string) (io.ReadCloser, error) {
	maps.Copy(r.Header, c.cfg.Header)
	r.Header.Set("Accept-Encoding", "zstd, gzip")
	return c.do(r, wanted)
}

// do sends a request as it is. Any type of answer is wanted when wanted is empty.
func (c *Client) do(r *http.Request, wanted string) (io.ReadCloser, error) {
	res, err := c.http.Do(r)
	if err != nil {
		return nil, err // It names method and URL.
	}
	body, err := decompress(res)
	if err != nil {
		res.Body.Close()
		return nil, err
	}
	mediaType, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if res.StatusCode == http.StatusOK && (mediaType == wanted || wanted == "") {
		return body, nil
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, bodyExcerpt))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", r.URL.Redacted(), err)
	}
	return nil, answeredError(r, res, mediaType, text)
}

// answeredError reads a JSON error (§10.1), or reports that the answer is none.
func answeredError(r *http.Request, res *http.Response, mediaType string, text []byte) error {
	var e struct {
		Code              ssp2.Code   `json:"code"`
		Message           string      `json:"message"`
		Retryable         bool        `json:"retryable"`
		RecommendedAction ssp2.Action `json:"recommendedAction"`
	}
	if mediaType == "application/json" && json.Unmarshal(text, &e) == nil && e.Code != "" {
		return &ServerError{
			Status: res.StatusCode, Code: e.Code, Message: e.Message, Retryable: e.Retryable, Action: e.RecommendedAction,
		}
	}
	return &StatusError{
		URL: r.URL.Redacted(), Status: res.StatusCode, ContentType: res.Header.Get("Content-Type"),
		Body: strings.TrimSpace(string(text[:min(len(text), 200)])),
	}
}

// decompressed closes the decompressor and the body under it.
type decompressed struct {
	io.Reader
	closeReader func()
	body        io.Closer
}

func (d decompressed) Close() error {
	d.closeReader()
	return d.body.Close()
}

// decompress undoes the Content-Encoding (§1.3).
func decompress(res *http.Response) (io.ReadCloser, error) {
	switch encoding := res.Header.Get("Content-Encoding"); encoding {
	case "", "identity":
		return res.Body, nil
	case "gzip":
		z, err := gzip.NewReader(res.Body)
		if err != nil {
			return nil, fmt.Errorf("decompress the answer: %w", err)
		}
		return decompressed{z, func() { z.Close() }, res.Body}, nil
	case "zstd":
		z, err := zstd.NewReader(res.Body, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, fmt.Errorf("decompress the answer: %w", err)
		}
		return decompressed{z, z.Close, res.Body}, nil
	default:
		return nil, protocolError("the answer has the content encoding %q, which was not asked for", encoding)
	}
}

// apply reads a response frame by frame.
func (c *Client) apply(ctx context.Context, r *ssp2.Reader, a *answer) error {
	version, kind, err := r.Header()
	switch {
	case err != nil:
		return readError(err)
	case version != c.cfg.Wire || kind != ssp2.KindResponse:
		return protocolError("a %v of wire version %d where a response of version %d is due", kind, version, c.cfg.Wire)
	}
	s := section{client: c, answer: a}
	reset := false
	for {
		f, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return readError(err)
		}
		switch f := f.(type) {
		case *ssp2.ResponseHeader:
			if reset, err = c.header(f); err != nil {
				return err
			}
		case *ssp2.Lease:
			c.lease = f
		case *ssp2.PushResult:
			err = a.result(f)
		case *ssp2.PushResultDetails:
			a.results[len(a.results)-1].Details = f
		case *ssp2.ErrorFrame:
			return &ServerError{
				Status: http.StatusOK, Code: ssp2.Code(f.Code), Message: f.Message, Retryable: f.Retryable,
				Action: ssp2.Action(f.RecommendedAction),
			}
		default:
			err = s.frame(ctx, f)
		}
		if err != nil {
			return err
		}
		if reset && f.FrameType() != ssp2.FrameRespHeader {
			return protocolError("%v after a RESP_HEADER with resetRequired (§1.6)", f.FrameType())
		}
	}
	switch {
	case reset:
		return ErrReset
	case len(a.results) != len(a.commits):
		return protocolError("%d commits were pushed, %d were answered", len(a.commits), len(a.results))
	case !a.delta && s.next != len(a.subs):
		return protocolError("%d subscriptions were pulled, %d were answered", len(a.subs), s.next)
	}
	return nil
}

// readError tells what the server sent from what the connection did.
func readError(err error) error {
	if ssp2.CodeOf(err) != "" {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return err
}

// header takes RESP_HEADER and reports whether the log was reset.
func (c *Client) header(f *ssp2.ResponseHeader) (reset bool, err error) {
	switch {
	case f.RequiredSchemaVersion != nil && f.LatestSchemaVersion != nil:
		return false, &FloorError{
			Version: c.cfg.Schema.Version, Required: *f.RequiredSchemaVersion, Latest: *f.LatestSchemaVersion,
		}
	case f.RequiredSchemaVersion != nil:
		return false, protocolError("requiredSchemaVersion without latestSchemaVersion (§1.6)")
	case c.cfg.Wire == ssp2.WireV1:
		return false, nil
	case f.ResetRequired:
		c.reset(f.LogEpoch)
		return true, nil
	case f.LogEpoch != c.epoch:
		return false, protocolError("the answer carries log epoch %q, the request %q, without resetRequired", f.LogEpoch, c.epoch)
	}
	return false, nil
}

// result takes the next PUSH_RESULT.
func (a *answer) result(f *ssp2.PushResult) error {
	i := len(a.results)
	if i >= len(a.commits) || f.ClientCommitID != a.commits[i].ClientCommitID {
		return protocolError("result %d is of commit %q, which is not the one pushed at that place", i+1, f.ClientCommitID)
	}
	if err := checkResults(f, len(a.commits[i].Operations)); err != nil {
		return err
	}
	a.results = append(a.results, Result{PushResult: *f})
	return nil
}

// checkResults checks the number and kind of result records (§6.3).
func checkResults(f *ssp2.PushResult, operations int) error {
	rejected := f.Status == ssp2.PushRejected
	if !rejected && len(f.Results) != operations || rejected && len(f.Results) == 0 {
		return protocolError("commit %q of %d operations is %v with %d results (§6.3)",
			f.ClientCommitID, operations, f.Status, len(f.Results))
	}
	for i, r := range f.Results {
		inPlace := int(r.OpIndex) == i
		if rejected {
			inPlace = r.OpIndex >= 0 && int(r.OpIndex) < operations && r.OpIndex == f.Results[0].OpIndex
		}
		if !inPlace || rejected == (r.Status == ssp2.OpApplied) {
			return protocolError("commit %q is %v with a result that operation %d is %v (§6.3)",
				f.ClientCommitID, f.Status, r.OpIndex, r.Status)
		}
	}
	return nil
}

// section is the state of reading the subscriptions of a response (§1.4 rule 3).
type section struct {
	client *Client
	answer *answer
	next   int           // index of the subscription that is due
	sub    *subscription // the open one
	start  *ssp2.SubStart
	clear  bool             // the first page of a fresh bootstrap is still to come (§5.6)
	ref    *ssp2.SegmentRef // the last one of the section, nil when no descriptor came or an inline page followed
}

// frame takes a frame that belongs to a subscription; others mean nothing to this client.
func (s *section) frame(ctx context.Context, f ssp2.Frame) error {
	switch f := f.(type) {
	case *ssp2.SubStart:
		return s.begin(f)
	case *ssp2.Commit:
		if s.start.Status != ssp2.SubActive {
			return protocolError("a COMMIT for subscription %q, which is %v", s.sub.id, s.start.Status)
		}
		writes, err := s.client.commitWrites(s.sub, f)
		if err != nil {
			return err
		}
		s.client.replica.apply(writes)
		s.answer.progress.Commits++
		s.answer.progress.Changes += len(f.Changes)
	case *ssp2.SegmentInline:
		s.ref = nil
		return s.segment(f.Payload, nil)
	case *ssp2.SegmentRef:
		if err := s.described(f); err != nil {
			return err
		}
		payload, err := s.download(ctx, f)
		if err != nil {
			return fmt.Errorf("download segment %s: %w", f.SegmentID, err)
		}
		if f.MediaType == ssp2.MediaSQLite {
			return s.image(payload, f)
		}
		return s.segment(payload, f)
	case *ssp2.SubEnd:
		return s.end(f)
	}
	return nil
}

func (s *section) begin(f *ssp2.SubStart) error {
	if s.answer.delta {
		i := slices.IndexFunc(s.client.subs, func(sub *subscription) bool { return sub.id == f.ID })
		if i < 0 || s.client.subs[i].pending() || f.Bootstrap || f.Status != ssp2.SubActive {
			return protocolError("a delta for subscription %q, which is not to follow the log", f.ID)
		}
		s.answer.subs = append(s.answer.subs, s.client.subs[i])
	}
	if s.next >= len(s.answer.subs) || s.answer.subs[s.next].id != f.ID {
		return protocolError("subscription %q is answered out of order", f.ID)
	}
	s.sub, s.start = s.answer.subs[s.next], f
	s.next++
	s.clear, s.ref = false, nil
	if f.Status != ssp2.SubActive {
		return nil
	}
	for variable, values := range f.EffectiveScopes {
		for _, value := range values {
			if !slices.Contains(s.sub.requested[variable], value) {
				return protocolError("subscription %q is granted %s=%q, which it did not ask for", f.ID, variable, value)
			}
		}
	}
	if len(f.EffectiveScopes) != len(s.sub.requested) {
		return protocolError("subscription %q is active without all of its scopes (§3.2 rule 5)", f.ID)
	}
	s.sub.effective = f.EffectiveScopes
	s.clear = f.Bootstrap && s.sub.cursor < 0 && s.sub.bootstrapState == nil
	return nil
}

// segment applies a rows segment, which f describes unless it came inline.
func (s *section) segment(payload []byte, f *ssp2.SegmentRef) error {
	if !s.start.Bootstrap || s.start.Status != ssp2.SubActive {
		return protocolError("a segment for subscription %q, which does not bootstrap", s.sub.id)
	}
	seg, err := ssp2.DecodeSegment(payload)
	if err != nil {
		return readError(err)
	}
	if err := s.client.checkColumns(s.sub.table, &seg.SegmentHeader); err != nil {
		return err
	}
	rows := 0
	for _, block := range seg.Blocks {
		rows += len(block)
	}
	if f != nil && f.RowCount != int64(rows) {
		return protocolError("a segment of %d rows, where the descriptor says %d", rows, f.RowCount)
	}
	s.firstPage()
	for _, block := range seg.Blocks {
		writes, err := s.client.blockWrites(s.sub, block)
		if err != nil {
			return err
		}
		s.client.replica.apply(writes)
	}
	s.answer.progress.SegmentRows += rows
	s.answer.progress.Segments++
	return nil
}

// firstPage drops what a fresh bootstrap replaces.
func (s *section) firstPage() {
	if s.clear {
		s.clear = false
		s.client.replica.purge(s.sub.table, s.sub.effective)
	}
}

// end takes SUB_END. Only here the subscription makes progress (§1.4 rule 5).
func (s *section) end(f *ssp2.SubEnd) error {
	if s.ref != nil && (s.ref.AsOfCommitSeq != f.NextCursor || (s.ref.NextRowCursor == nil) != (f.BootstrapState == nil)) {
		return protocolError("the bootstrap of subscription %q ends at %d behind a segment as of %d, or not where the segment does (§4.7)",
			s.sub.id, f.NextCursor, s.ref.AsOfCommitSeq)
	}
	switch s.start.Status {
	case ssp2.SubActive:
		s.firstPage() // of a bootstrap without rows
		if s.answer.delta {
			s.answer.reached = max(s.answer.reached, f.NextCursor)
			f.NextCursor = max(s.sub.cursor, f.NextCursor) // it may be one that a pull has brought already
		}
		s.sub.cursor, s.sub.bootstrapState = f.NextCursor, f.BootstrapState
	case ssp2.SubReset:
		s.sub.cursor, s.sub.bootstrapState = -1, nil
	case ssp2.SubRevoked:
		s.sub.revoked = true
		s.client.replica.purge(s.sub.table, s.sub.effective)
		if s.answer.revoked == nil {
			s.answer.revoked = &RevokedError{Subscription: s.sub.id, Reason: ssp2.Code(s.start.ReasonCode)}
		}
	}
	return nil
}
