package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// described checks a descriptor before anything is fetched by it (§5.3, §5.4).
func (s *section) described(f *ssp2.SegmentRef) error {
	accept := s.client.cfg.Accept
	before := s.ref
	s.ref = f
	switch {
	case !s.start.Bootstrap || s.start.Status != ssp2.SubActive:
		return protocolError("a segment for subscription %q, which does not bootstrap", s.sub.id)
	case f.MediaType == ssp2.MediaRows && accept&ssp2.AcceptExternalRows == 0,
		f.MediaType == ssp2.MediaSQLite && accept&ssp2.AcceptSQLite == 0,
		f.URL != nil && accept&ssp2.AcceptSignedURLs == 0:
		return protocolError("a %v segment or a signed URL, which the client did not accept (§4.2)", f.MediaType)
	case f.Table != s.sub.table.Name || f.ScopeDigest != ssp2.ScopeDigest(s.sub.effective):
		return protocolError("a segment of table %q, or of other scopes, for subscription %q", f.Table, s.sub.id)
	case f.MediaType == ssp2.MediaSQLite && (f.RowCursor != nil || f.NextRowCursor != nil):
		return protocolError("an image of table %q with a row cursor (§5.3)", f.Table)
	case f.MediaType == ssp2.MediaSQLite && !s.clear && s.sub.bootstrapState != nil:
		return protocolError("an image of table %q in the middle of its bootstrap (§5.3)", f.Table)
	case s.clear && f.RowCursor != nil:
		return protocolError("the bootstrap of subscription %q begins at row cursor %q", s.sub.id, *f.RowCursor)
	case before != nil && (f.AsOfCommitSeq != before.AsOfCommitSeq || before.NextRowCursor == nil || f.RowCursor == nil ||
		*f.RowCursor != *before.NextRowCursor):
		return protocolError("the segments of subscription %q do not follow each other, or not at one pin (§4.7)", s.sub.id)
	}
	return nil
}

// download fetches an external segment, by its URL if it has one (§5.4), and checks its content address (§5.1).
func (s *section) download(ctx context.Context, f *ssp2.SegmentRef) ([]byte, error) {
	open := s.client.byID
	if f.URL != nil {
		open = s.client.byURL
		s.answer.progress.Fetches++
	} else {
		s.answer.progress.Downloads++
	}
	body, err := open(ctx, s.sub, f)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	payload, err := io.ReadAll(io.LimitReader(body, f.ByteLength+1))
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	sum := sha256.Sum256(payload)
	if got := "sha256:" + hex.EncodeToString(sum[:]); got != f.SegmentID || int64(len(payload)) != f.ByteLength {
		return nil, protocolError("the bytes downloaded are %d with address %s", len(payload), got)
	}
	return payload, nil
}

// byID asks the server for a segment, with the scopes of its subscription (§5.5).
func (c *Client) byID(ctx context.Context, s *subscription, f *ssp2.SegmentRef) (io.ReadCloser, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.cfg.URL+"/segments/"+url.PathEscape(f.SegmentID), nil)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	r.Header.Set("X-Syncular-Scopes", string(ssp2.AppendCanonicalScopes(nil, s.requested)))
	return c.send(r, "application/octet-stream")
}

// byURL fetches a URL, which is the whole grant: nothing of this client's goes with it, and when it fails there is no other
// way than the next pull (§5.4).
func (c *Client) byURL(ctx context.Context, _ *subscription, f *ssp2.SegmentRef) (io.ReadCloser, error) {
	if c.cfg.Clock().UnixMilli() >= *f.URLExpiresAtMs {
		return nil, ErrURLEnded
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, *f.URL, nil)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	return c.do(r, "")
}

// Image is what a SQLite image holds (§5.3). Cells are as SQLite has them: nil, int64, float64, string or []byte.
type Image struct {
	Tables  []string         // all tables of the file
	Segment []map[string]any // rows of _syncular_segment, by column
	Columns []string         // of the data table
	Rows    [][]any          // of the data table
}

// versionColumn is the last column of an image's data table.
const versionColumn = "_syncular_version"

// image applies a SQLite image.
func (s *section) image(payload []byte, f *ssp2.SegmentRef) error {
	c, t := s.client, s.sub.table
	image, err := c.cfg.OpenImage(payload, t.Name)
	if err != nil {
		return protocolError("the image of table %q does not open: %v", t.Name, err)
	}
	if err := c.checkImage(image, t, f); err != nil {
		return err
	}
	writes := make([]write, 0, len(image.Rows))
	for _, cells := range image.Rows {
		w, err := c.imageWrite(s.sub, cells)
		if err != nil {
			return err
		}
		writes = append(writes, w)
	}
	s.firstPage()
	c.replica.apply(writes)
	s.answer.progress.SegmentRows += len(writes)
	s.answer.progress.Segments++
	s.answer.progress.Images++
	return nil
}

// checkImage compares an image with its descriptor and with the schema.
func (c *Client) checkImage(image *Image, t *schema.Table, f *ssp2.SegmentRef) error {
	slices.Sort(image.Tables)
	want := []string{"_syncular_segment", t.Name}
	if slices.Sort(want); !slices.Equal(image.Tables, want) {
		return protocolError("the image of table %q has the tables %q (§5.3)", t.Name, image.Tables)
	}
	says := map[string]any{
		"format": int64(1), "table": t.Name, "schemaVersion": int64(c.cfg.Schema.Version),
		"asOfCommitSeq": f.AsOfCommitSeq, "scopeDigest": f.ScopeDigest, "rowCount": f.RowCount,
	}
	if len(image.Segment) != 1 || len(image.Segment[0]) != len(says) {
		return protocolError("the image of table %q says of itself %v (§5.3)", t.Name, image.Segment)
	}
	for name, value := range says {
		if got := image.Segment[0][name]; got != value {
			return protocolError("the image of table %q has %v as %s, its descriptor %v", t.Name, got, name, value)
		}
	}
	columns := make([]string, 0, len(t.Wire)+1)
	for _, column := range t.Wire {
		columns = append(columns, column.Name)
	}
	if !slices.Equal(image.Columns, append(columns, versionColumn)) {
		return protocolError("the image of table %q has the columns %q (sync.schema_mismatch)", t.Name, image.Columns)
	}
	if int64(len(image.Rows)) != f.RowCount {
		return protocolError("the image of table %q has %d rows, where its descriptor says %d", t.Name, len(image.Rows), f.RowCount)
	}
	return nil
}

// imageWrite makes a write of a row of an image.
func (c *Client) imageWrite(s *subscription, cells []any) (write, error) {
	t := s.table
	values := make([]ssp2.Value, len(t.Wire))
	version, ok := cells[len(t.Wire)].(int64)
	for i, column := range t.Wire {
		fits := imageValue(column, cells[i], &values[i])
		ok = ok && fits
	}
	if !ok || version < 1 {
		return write{}, protocolError("the image of table %q has the row %v", t.Name, cells)
	}
	row, err := ssp2.AppendRow(nil, t.Wire, values)
	if err != nil {
		return write{}, protocolError("the image of table %q has the row %v: %v", t.Name, cells, err)
	}
	if values, err = c.decodeRow(s, "", row); err != nil {
		return write{}, err
	}
	id, _ := t.RowID(values)
	return write{table: t.Name, id: id, row: &Row{Version: version, Values: values}}, nil
}

// imageValue reads a cell (§5.3), and says whether it is one of its column.
func imageValue(column ssp2.Column, cell any, into *ssp2.Value) bool {
	if cell == nil {
		into.Null = true
		return column.Nullable
	}
	var ok bool
	switch column.Type {
	case ssp2.TypeInteger:
		into.Int, ok = cell.(int64)
	case ssp2.TypeBoolean:
		into.Int, ok = cell.(int64)
		ok = ok && (into.Int == 0 || into.Int == 1)
	case ssp2.TypeFloat:
		into.Float, ok = cell.(float64)
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		into.Bytes, ok = cell.([]byte)
		into.Bytes = bytes.Clone(into.Bytes)
	case ssp2.TypeString, ssp2.TypeJSON, ssp2.TypeBlobRef:
		var text string
		text, ok = cell.(string)
		into.Bytes = []byte(text)
	}
	return ok
}
