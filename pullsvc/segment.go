package pullsvc

import (
	"bytes"
	"context"
	"fmt"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// external says that a page is to be delivered as a descriptor (§4.2, §5.7).
func (p *Pull) external(pg *page) bool {
	accept := p.req.Header.Accept
	if p.s.segments == nil || accept&ssp2.AcceptExternalRows == 0 {
		return false
	}
	return accept&ssp2.AcceptInlineRows == 0 || len(pg.segment()) > p.s.inlineMax
}

// store hands a page to the store and appends its descriptor (§5.4).
func (p *Pull) store(ctx context.Context, dst []byte, sub *subscription, pg *page) ([]byte, error) {
	m := segment.Meta{
		Key: segment.Key{
			Partition: p.req.Partition, LogEpoch: p.LogEpoch, Table: sub.table.Name,
			MediaType: ssp2.MediaRows, SchemaVersion: p.s.schema.Version,
			ScopeDigest: ssp2.ScopeDigest(sub.effective),
		},
		ID: segment.ID(pg.segment()), AsOfCommitSeq: sub.pin,
		RowCursor: pg.from.cursor(), RowCount: pg.rows, ByteLength: int64(len(pg.segment())),
	}
	if pg.more {
		m.NextRowCursor = pg.next.cursor()
	}
	if err := p.s.segments.Put(ctx, m, bytes.NewReader(pg.segment())); err != nil {
		return dst, fmt.Errorf("storing a segment: %w", err)
	}
	ref := &ssp2.SegmentRef{
		SegmentID: m.ID, MediaType: m.MediaType, Table: m.Table,
		ByteLength: m.ByteLength, RowCount: m.RowCount, AsOfCommitSeq: m.AsOfCommitSeq,
		ScopeDigest: m.ScopeDigest, RowCursor: m.RowCursor, NextRowCursor: m.NextRowCursor,
	}
	if p.s.urls != nil && p.req.Header.Accept&ssp2.AcceptSignedURLs != 0 {
		url, expires, err := p.s.urls.SignURL(ctx, m)
		if err != nil {
			return nil, fmt.Errorf("signing the URL of a segment: %w", err)
		}
		ref.URL, ref.URLExpiresAtMs = &url, &expires
	}
	return p.frame(dst, ref)
}
