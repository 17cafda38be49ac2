package segment

import (
	"bytes"
	"container/list"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// DefaultMemoryBytes is the size of a [Memory] store.
const DefaultMemoryBytes = 256 << 20

// MemoryConfig configures a [Memory]. Every field has a default.
type MemoryConfig struct {
	// MaxBytes bounds the store; the segments used longest ago make room. Bodies that
	// are being read count as gone once they are pushed out. Default 256 MiB.
	MaxBytes int64
	// TTL is how long a segment lives after it was last stored. Default 24 h.
	TTL time.Duration
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
}

// Memory is a store in the memory of one process: for tests, development and servers of
// one process. A client that is sent to another process does not find its segments there.
type Memory struct {
	maxBytes int64
	ttl      time.Duration
	clock    func() time.Time

	mu     sync.Mutex
	size   int64
	bodies map[bodyKey]*memoryBody
	byKey  map[Key]map[*description]struct{}
	used   list.List // of *memoryBody, the one used last in front
	expiry list.List // of *description, the next to expire in front
}

type bodyKey struct{ partition, id string }

type memoryBody struct {
	key          bodyKey
	bytes        []byte
	used         *list.Element
	descriptions map[identity]*description
}

// description is what one Meta said of a body.
type description struct {
	meta   Meta
	body   *memoryBody
	expiry *list.Element
}

// identity tells the descriptions of a body apart.
type identity struct {
	key            Key
	asOf           int64
	first, last    bool
	cursor, follow string
	rows           int64
}

func (m *Meta) identity() identity {
	id := identity{key: m.Key, asOf: m.AsOfCommitSeq, first: m.RowCursor == nil, last: m.NextRowCursor == nil, rows: m.RowCount}
	if !id.first {
		id.cursor = *m.RowCursor
	}
	if !id.last {
		id.follow = *m.NextRowCursor
	}
	return id
}

// NewMemory returns an empty store.
func NewMemory(cfg MemoryConfig) (*Memory, error) {
	switch {
	case cfg.MaxBytes < 0:
		return nil, fmt.Errorf("segment: MemoryConfig.MaxBytes is %d; it must be positive, or 0 for the default of %d", cfg.MaxBytes, DefaultMemoryBytes)
	case cfg.TTL < 0:
		return nil, fmt.Errorf("segment: MemoryConfig.TTL is %v; it must be positive, or 0 for the default of %v", cfg.TTL, DefaultTTL)
	}
	m := &Memory{
		maxBytes: cfg.MaxBytes, ttl: cfg.TTL, clock: cfg.Clock,
		bodies: map[bodyKey]*memoryBody{}, byKey: map[Key]map[*description]struct{}{},
	}
	if m.maxBytes == 0 {
		m.maxBytes = DefaultMemoryBytes
	}
	if m.ttl == 0 {
		m.ttl = DefaultTTL
	}
	if m.clock == nil {
		m.clock = time.Now
	}
	return m, nil
}

// descriptionBytes is about what a description takes beside its strings.
const descriptionBytes = 1024

func (m *Meta) memory() int64 {
	n := descriptionBytes + len(m.Partition) + len(m.Table)
	if m.RowCursor != nil {
		n += 2 * len(*m.RowCursor)
	}
	if m.NextRowCursor != nil {
		n += 2 * len(*m.NextRowCursor)
	}
	return int64(n)
}

// Put implements [Store]. It holds the whole segment in memory.
func (s *Memory) Put(ctx context.Context, m Meta, body io.Reader) error {
	if err := m.check(); err != nil {
		return err
	}
	if m.ByteLength+m.memory() > s.maxBytes {
		return fmt.Errorf("%w: %d bytes into a store of %d", ErrTooLarge, m.ByteLength, s.maxBytes)
	}
	m.ExpiresAt = s.clock().Add(s.ttl).UnixMilli()
	m.RowCursor, m.NextRowCursor = cloned(m.RowCursor), cloned(m.NextRowCursor)
	if s.describe(m, nil) {
		return nil
	}
	b := make([]byte, m.ByteLength)
	if err := readWhole(ctx, body, b); err != nil {
		return fmt.Errorf("storing segment %s: %w", m.ID, err)
	}
	s.describe(m, b)
	return nil
}

// readWhole fills b from a body that must end there.
func readWhole(ctx context.Context, body io.Reader, b []byte) error {
	if err := readFull(body, b); err != nil {
		return fmt.Errorf("reading the body of %d bytes: %w", len(b), err)
	}
	if err := atEnd(body); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("reading the body: %w", err)
	}
	return nil
}

// readFull fills b. A body that ends before is cut short, wherever it ends.
func readFull(body io.Reader, b []byte) error {
	_, err := io.ReadFull(body, b)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// atEnd checks that a body is not longer than it was said to be.
func atEnd(body io.Reader) error {
	var one [1]byte
	switch n, err := io.ReadFull(body, one[:]); {
	case n > 0:
		return errors.New("reading the body: it is longer than its length says")
	case err != io.EOF:
		return fmt.Errorf("reading the end of the body: %w", err)
	}
	return nil
}

// describe stores a description and its body. Without a body it does so only when the
// body is there already, and says whether it was.
func (s *Memory) describe(m Meta, bytes []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := bodyKey{m.Partition, m.ID}
	b, there := s.bodies[at]
	if !there {
		if bytes == nil {
			return false
		}
		b = &memoryBody{key: at, bytes: bytes, descriptions: map[identity]*description{}}
		b.used = s.used.PushFront(b)
		s.bodies[at] = b
		s.size += m.ByteLength
	}
	s.used.MoveToFront(b.used)
	id := m.identity()
	d, there := b.descriptions[id]
	if !there {
		d = &description{meta: m, body: b}
		d.expiry = s.expiry.PushBack(d)
		b.descriptions[id] = d
		if s.byKey[m.Key] == nil {
			s.byKey[m.Key] = map[*description]struct{}{}
		}
		s.byKey[m.Key][d] = struct{}{}
		s.size += m.memory()
	}
	s.expiry.MoveToBack(d.expiry)
	m.Page = max(m.Page, d.meta.Page)
	d.meta = m
	for s.size > s.maxBytes {
		oldest := s.used.Back().Value.(*memoryBody) //nolint:forcetypeassert // the list holds nothing else
		if oldest == b {
			s.shrink(b, d)
			break
		}
		for _, d := range oldest.descriptions {
			s.forget(d)
		}
	}
	return true
}

// shrink takes descriptions other than the newest from a body that has grown to the whole
// store.
func (s *Memory) shrink(b *memoryBody, newest *description) {
	for _, d := range b.descriptions {
		if s.size <= s.maxBytes {
			return
		}
		if d != newest {
			s.forget(d)
		}
	}
}

// forget removes a description, and its body with the last one.
func (s *Memory) forget(d *description) {
	delete(d.body.descriptions, d.meta.identity())
	s.expiry.Remove(d.expiry)
	s.size -= d.meta.memory()
	of := s.byKey[d.meta.Key]
	delete(of, d)
	if len(of) == 0 {
		delete(s.byKey, d.meta.Key)
	}
	if len(d.body.descriptions) == 0 {
		s.used.Remove(d.body.used)
		delete(s.bodies, d.body.key)
		s.size -= int64(len(d.body.bytes))
	}
}

// Open implements [Store].
func (s *Memory) Open(_ context.Context, r Ref) (Meta, io.ReadCloser, error) {
	now := s.clock().UnixMilli()
	s.mu.Lock()
	defer s.mu.Unlock()
	b, there := s.bodies[bodyKey{r.Partition, r.ID}]
	if !there {
		return Meta{}, nil, ErrNotFound
	}
	found := ErrForbidden
	var best *description
	for _, d := range b.descriptions {
		switch {
		case subtle.ConstantTimeCompare([]byte(d.meta.ScopeDigest), []byte(r.ScopeDigest)) == 0:
		case d.meta.LogEpoch != r.LogEpoch || d.meta.ExpiresAt <= now:
			found = ErrExpired
		case best == nil || best.meta.ExpiresAt < d.meta.ExpiresAt:
			best = d
		}
	}
	if best == nil {
		return Meta{}, nil, found
	}
	s.used.MoveToFront(b.used)
	return best.meta, io.NopCloser(bytes.NewReader(b.bytes)), nil
}

// Find implements [Store].
func (s *Memory) Find(_ context.Context, k Key) ([]Meta, error) {
	now := s.clock().UnixMilli()
	s.mu.Lock()
	var found []Meta
	for d := range s.byKey[k] {
		if d.meta.ExpiresAt > now && d.meta.Page >= 0 {
			found = append(found, d.meta)
		}
	}
	s.mu.Unlock()
	Sort(found)
	return found[:min(len(found), MaxFound)], nil
}

// DeleteExpired implements [Store].
func (s *Memory) DeleteExpired(_ context.Context, limit int) (deleted int, more bool, err error) {
	now := s.clock().UnixMilli()
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		front := s.expiry.Front()
		if front == nil {
			return deleted, false, nil
		}
		d := front.Value.(*description) //nolint:forcetypeassert // the list holds nothing else
		switch {
		case d.meta.ExpiresAt > now:
			return deleted, false, nil
		case deleted == limit:
			return deleted, true, nil
		}
		s.forget(d)
		deleted++
	}
}

func cloned(s *string) *string {
	if s == nil {
		return nil
	}
	c := *s
	return &c
}
