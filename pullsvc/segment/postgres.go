package segment

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// chunkBytes is the size of all chunks of a segment but the last. It is part of what
	// is stored: a reader relies on it to find a chunk by its index.
	chunkBytes = 1 << 20
	// passBytes and passPartitions bound one pass of DeleteExpired beside its limit.
	passBytes      = 256 << 20
	passPartitions = 1000
)

// PostgresConfig configures a [Postgres]. Every field has a default.
type PostgresConfig struct {
	// TTL is how long a segment lives after it was last stored. Default 24 h.
	TTL time.Duration
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
}

// Postgres is a store in the tables sync_segments and sync_segment_chunks, which are
// unlogged: they survive restarts, not crashes of the database, and are not replicated.
// All servers of the database share it.
type Postgres struct {
	pool  *pgxpool.Pool
	ttl   time.Duration
	clock func() time.Time

	passes sync.Mutex
	after  string // where the next pass of DeleteExpired goes on
}

// NewPostgres returns the store of the pool's database, whose migrations are applied. The
// pool stays the caller's. NewPostgres does no I/O.
func NewPostgres(pool *pgxpool.Pool, cfg PostgresConfig) (*Postgres, error) {
	switch {
	case pool == nil:
		return nil, errors.New("segment: a pool is required")
	case cfg.TTL < 0:
		return nil, fmt.Errorf("segment: PostgresConfig.TTL is %v; it must be positive, or 0 for the default of %v", cfg.TTL, DefaultTTL)
	}
	s := &Postgres{pool: pool, ttl: cfg.TTL, clock: cfg.Clock}
	if s.ttl == 0 {
		s.ttl = DefaultTTL
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	return s, nil
}

// Put implements [Store]. A segment of up to 1 MiB costs one round trip, a larger one a
// round trip per MiB and two.
func (s *Postgres) Put(ctx context.Context, m Meta, body io.Reader) error {
	if err := m.check(); err != nil {
		return err
	}
	if err := s.put(ctx, m, body); err != nil {
		return fmt.Errorf("storing segment %s: %w", m.ID, err)
	}
	return nil
}

func (s *Postgres) put(ctx context.Context, m Meta, body io.Reader) error {
	chunk := make([]byte, min(m.ByteLength, chunkBytes))
	if err := readFull(body, chunk); err != nil {
		return fmt.Errorf("reading the body of %d bytes: %w", m.ByteLength, err)
	}
	p := db.SegmentPutParams{
		Partition: m.Partition, SegmentID: m.ID, ScopeDigest: m.ScopeDigest, Description: m.describe(),
		LogEpoch: m.LogEpoch, TableName: m.Table, MediaType: int16(m.MediaType), SchemaVersion: m.SchemaVersion,
		AsOfCommitSeq: m.AsOfCommitSeq, RowCursor: m.RowCursor, NextRowCursor: m.NextRowCursor,
		Page: m.Page, RowCount: m.RowCount, ByteLength: m.ByteLength,
		ExpiresAt: s.clock().Add(s.ttl).UnixMilli(), FirstChunk: chunk,
	}
	if m.ByteLength <= chunkBytes {
		if err := atEnd(body); err != nil {
			return err
		}
		_, err := db.New(s.pool).SegmentPut(ctx, p)
		return err
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("acquiring a connection: %w", err)
	}
	defer pgtx.Finish(ctx, conn)
	if _, err := conn.Exec(ctx, pgtx.Begin.SQL); err != nil {
		return fmt.Errorf("beginning: %w", err)
	}
	q := db.New(conn)
	fresh, err := q.SegmentPut(ctx, p)
	if err != nil {
		return err
	}
	if fresh {
		if err := appendChunks(ctx, q, m, body, chunk); err != nil {
			return err
		}
	}
	if _, err := conn.Exec(ctx, pgtx.Commit.SQL); err != nil {
		return fmt.Errorf("committing: %w", err)
	}
	return nil
}

// appendChunks stores what follows the first chunk. It uses buf for it.
func appendChunks(ctx context.Context, q *db.Queries, m Meta, body io.Reader, buf []byte) error {
	index := int32(1)
	for left := m.ByteLength - chunkBytes; left > 0; left -= chunkBytes {
		chunk := buf[:min(left, chunkBytes)]
		if err := readFull(body, chunk); err != nil {
			return fmt.Errorf("reading the body of %d bytes: %w", m.ByteLength, err)
		}
		if err := q.SegmentAppendChunk(ctx, db.SegmentAppendChunkParams{
			Partition: m.Partition, SegmentID: m.ID, ChunkIndex: index, Body: chunk,
		}); err != nil {
			return err
		}
		index++
	}
	return atEnd(body)
}

// describe hashes what tells descriptions of the same bytes for the same scopes apart.
func (m *Meta) describe() []byte {
	h := sha256.New()
	var n [8]byte
	number := func(v int64) {
		binary.BigEndian.PutUint64(n[:], uint64(v))
		h.Write(n[:])
	}
	text := func(s string) {
		number(int64(len(s)))
		h.Write([]byte(s))
	}
	optional := func(s *string) {
		if s == nil {
			number(-1)
			return
		}
		text(*s)
	}
	text(m.LogEpoch)
	text(m.Table)
	number(int64(m.MediaType))
	number(int64(m.SchemaVersion))
	number(m.AsOfCommitSeq)
	optional(m.RowCursor)
	optional(m.NextRowCursor)
	number(m.RowCount)
	return h.Sum(nil)[:16]
}

// Open implements [Store]. It costs one round trip, and one more for each MiB behind the
// first, when the reader gets there.
func (s *Postgres) Open(ctx context.Context, r Ref) (Meta, io.ReadCloser, error) {
	row, err := db.New(s.pool).SegmentOpen(ctx, db.SegmentOpenParams{
		Partition: r.Partition, SegmentID: r.ID, ScopeDigest: r.ScopeDigest, LogEpoch: r.LogEpoch, Now: s.clock().UnixMilli(),
	})
	switch {
	case err != nil:
		return Meta{}, nil, fmt.Errorf("opening segment %s: %w", r.ID, err)
	case !row.Known:
		return Meta{}, nil, ErrNotFound
	case !row.Described:
		return Meta{}, nil, ErrForbidden
	case row.MediaType == 0:
		return Meta{}, nil, ErrExpired
	}
	m := Meta{
		Key: Key{
			Partition: r.Partition, LogEpoch: row.LogEpoch, Table: row.TableName, MediaType: ssp2.MediaType(row.MediaType),
			SchemaVersion: row.SchemaVersion, ScopeDigest: r.ScopeDigest,
		},
		ID: r.ID, AsOfCommitSeq: row.AsOfCommitSeq, RowCursor: cursor(row.RowCursor), NextRowCursor: cursor(row.NextRowCursor),
		Page: row.Page, RowCount: row.RowCount, ByteLength: row.ByteLength, ExpiresAt: row.ExpiresAtMs,
	}
	return m, &chunkReader{ctx: ctx, pool: s.pool, ref: r, chunk: row.FirstChunk, left: m.ByteLength}, nil
}

// cursor is a cursor as a query returns it, where an empty one is none.
func cursor(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// chunkReader reads a segment chunk by chunk.
type chunkReader struct {
	ctx   context.Context //nolint:containedctx // Open's ctx covers the reading
	pool  *pgxpool.Pool
	ref   Ref
	index int32
	chunk []byte // what is left of the current chunk
	left  int64  // bytes to the end of the segment
	err   error
}

func (r *chunkReader) Read(p []byte) (int, error) {
	if r.err == nil && len(r.chunk) == 0 {
		r.err = r.next()
	}
	if r.err != nil {
		return 0, r.err
	}
	n := copy(p, r.chunk)
	r.chunk = r.chunk[n:]
	r.left -= int64(n)
	return n, nil
}

// WriteTo hands chunks on without copying them.
func (r *chunkReader) WriteTo(w io.Writer) (written int64, err error) {
	for {
		if r.err == nil && len(r.chunk) == 0 {
			r.err = r.next()
		}
		switch {
		case r.err == io.EOF: //nolint:errorlint // ours
			return written, nil
		case r.err != nil:
			return written, r.err
		}
		n, err := w.Write(r.chunk)
		written += int64(n)
		r.chunk = r.chunk[n:]
		r.left -= int64(n)
		if err != nil {
			return written, err //nolint:wrapcheck // the writer's
		}
	}
}

func (r *chunkReader) next() error {
	if r.left == 0 {
		return io.EOF
	}
	r.index++
	chunk, err := db.New(r.pool).SegmentReadChunk(r.ctx, db.SegmentReadChunkParams{
		Partition: r.ref.Partition, SegmentID: r.ref.ID, ChunkIndex: r.index,
	})
	switch {
	case err != nil:
		return fmt.Errorf("reading segment %s: %w", r.ref.ID, err)
	case int64(len(chunk)) != min(r.left, chunkBytes):
		return fmt.Errorf("reading segment %s: %w", r.ref.ID, ErrCutShort)
	}
	r.chunk = chunk
	return nil
}

// Close ends the reading.
func (r *chunkReader) Close() error {
	r.chunk, r.err = nil, errClosed
	return nil
}

var errClosed = errors.New("segment: read after close")

// Find implements [Store]. It costs one round trip.
func (s *Postgres) Find(ctx context.Context, k Key) ([]Meta, error) {
	rows, err := db.New(s.pool).SegmentFind(ctx, db.SegmentFindParams{
		Partition: k.Partition, ScopeDigest: k.ScopeDigest, TableName: k.Table, LogEpoch: k.LogEpoch,
		MediaType: int16(k.MediaType), SchemaVersion: k.SchemaVersion, Now: s.clock().UnixMilli(), MaxRows: MaxFound,
	})
	if err != nil {
		return nil, fmt.Errorf("finding segments: %w", err)
	}
	found := make([]Meta, len(rows))
	for i, row := range rows {
		found[i] = Meta{
			Key: k, ID: row.SegmentID, AsOfCommitSeq: row.AsOfCommitSeq,
			RowCursor: cursor(row.RowCursor), NextRowCursor: cursor(row.NextRowCursor),
			Page: row.Page, RowCount: row.RowCount, ByteLength: row.ByteLength, ExpiresAt: row.ExpiresAtMs,
		}
	}
	Sort(found)
	return found, nil
}

// DeleteExpired implements [Store]. One call is one transaction over at most 1000
// partitions and about 256 MiB of segments; the next one goes on behind it. Several
// processes may do it at once, each past the rows that the others hold.
func (s *Postgres) DeleteExpired(ctx context.Context, limit int) (deleted int, more bool, err error) {
	s.passes.Lock()
	defer s.passes.Unlock()
	pass, err := db.New(s.pool).SegmentDeleteExpired(ctx, db.SegmentDeleteExpiredParams{
		After: s.after, Now: s.clock().UnixMilli(), Batch: int32(min(limit, 1<<30)),
		MaxBytes: passBytes, MaxPartitions: passPartitions,
	})
	if err != nil {
		return 0, false, fmt.Errorf("deleting expired segments: %w", err)
	}
	s.after = pass.NextAfter
	return int(pass.Deleted), pass.More, nil
}
