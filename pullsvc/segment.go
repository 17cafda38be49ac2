package pullsvc

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/syncpg/syncpg/ssp2"
)

// SegmentStore keeps the segments that clients download by themselves (§5.5). Its
// methods are called from several goroutines.
type SegmentStore interface {
	// Put keeps a segment. When it returns nil the segment can be downloaded.
	Put(ctx context.Context, s StoredSegment) error
}

// StoredSegment is a segment with what a store has to know of it: to whom it may be
// given (§5.5) and for what else it may serve (§5.1).
type StoredSegment struct {
	ID            string // §5.1
	Partition     string
	LogEpoch      string
	Table         string
	MediaType     ssp2.MediaType
	SchemaVersion int32
	ScopeDigest   string // §3.5
	AsOfCommitSeq int64
	RowCursor     *string // nil: the first page of the table
	NextRowCursor *string // nil: the last one
	RowCount      int64
	Bytes         []byte // uncompressed; valid only during Put
}

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
	sum := sha256.Sum256(pg.segment())
	s := StoredSegment{
		ID:        "sha256:" + hex.EncodeToString(sum[:]),
		Partition: p.req.Partition, LogEpoch: p.LogEpoch, Table: sub.table.Name,
		MediaType: ssp2.MediaRows, SchemaVersion: p.s.schema.Version,
		ScopeDigest: ssp2.ScopeDigest(sub.effective), AsOfCommitSeq: sub.pin,
		RowCursor: pg.from.cursor(), RowCount: pg.rows, Bytes: pg.segment(),
	}
	if pg.more {
		s.NextRowCursor = pg.next.cursor()
	}
	if err := p.s.segments.Put(ctx, s); err != nil {
		return dst, fmt.Errorf("storing a segment: %w", err)
	}
	return p.frame(dst, &ssp2.SegmentRef{
		SegmentID: s.ID, MediaType: s.MediaType, Table: s.Table,
		ByteLength: int64(len(s.Bytes)), RowCount: s.RowCount, AsOfCommitSeq: s.AsOfCommitSeq,
		ScopeDigest: s.ScopeDigest, RowCursor: s.RowCursor, NextRowCursor: s.NextRowCursor,
	})
}
