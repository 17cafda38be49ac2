package pullsvc

import (
	"context"
	"fmt"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// external says that a page is to be delivered as a descriptor.
func (p *Pull) external(pg *page) bool {
	return p.shares() && p.isExternal(int64(len(pg.segment())))
}

// isExternal says that a rows segment of that size is to be delivered as a descriptor to
// a client that takes those (§4.2, §5.7).
func (p *Pull) isExternal(size int64) bool {
	return p.req.Header.Accept&ssp2.AcceptInlineRows == 0 || size > int64(p.s.inlineMax)
}

// store hands a page to the store and appends its descriptor. It is for this pull only:
// what others are to find is the chains' to store.
func (p *Pull) store(ctx context.Context, sub *subscription, pg *page) ([]byte, error) {
	m, err := p.s.put(ctx, p.chainKey(sub, ssp2.MediaRows).Key, sub.pin, -1, pg)
	if err != nil {
		return nil, err
	}
	return p.descriptor(ctx, m)
}

// descriptor returns the SEGMENT_REF of a stored segment (§5.4), with its URL for a client
// that fetches URLs. Its scopes were resolved for this pull.
func (p *Pull) descriptor(ctx context.Context, m segment.Meta) ([]byte, error) {
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
	return p.frame(nil, ref)
}
