package image

import (
	"bufio"
	"bytes"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// sorter sorts pairs of key and value by key. What passes its memory goes to a
// temporary file in sorted runs, which are merged in the end.
type sorter struct {
	dir    string
	memory int

	arena    []byte // keys and values
	items    []item
	unsorted bool

	spill *File
	off   int64
	runs  []int64 // where each ends
}

type item struct {
	prefix           uint64 // the first bytes of the key
	start, key, size uint32 // in arena: where it begins, of the key, of both
}

const itemSize = 24

func newSorter(dir string, memory int) *sorter { return &sorter{dir: dir, memory: memory} }

func (s *sorter) close() {
	if s.spill != nil {
		_ = s.spill.Close() // nobody reads it any more
	}
}

func (s *sorter) key(i *item) []byte { return s.arena[i.start : i.start+i.key] }

func (s *sorter) compare(a, b item) int {
	if c := cmp.Compare(a.prefix, b.prefix); c != 0 {
		return c
	}
	return bytes.Compare(s.key(&a), s.key(&b))
}

// add copies key and value.
func (s *sorter) add(key, value []byte) error {
	if n := len(s.items); n > 0 && len(s.arena)+n*itemSize+len(key)+len(value) > s.memory {
		if err := s.flush(); err != nil {
			return err
		}
	}
	var head [8]byte
	copy(head[:], key)
	it := item{binary.BigEndian.Uint64(head[:]), uint32(len(s.arena)), uint32(len(key)), uint32(len(key) + len(value))}
	s.arena = append(append(s.arena, key...), value...)
	if n := len(s.items); n > 0 && !s.unsorted {
		s.unsorted = s.compare(s.items[n-1], it) > 0
	}
	s.items = append(s.items, it)
	return nil
}

// sort sorts what is in memory. Rows often come in the order of their keys.
func (s *sorter) sort() {
	if s.unsorted {
		slices.SortFunc(s.items, s.compare)
	}
	s.unsorted = false
}

// flush writes what is in memory as one run.
func (s *sorter) flush() error {
	s.sort()
	if s.spill == nil {
		var err error
		if s.spill, err = newFile(s.dir); err != nil {
			return err
		}
	}
	w := bufio.NewWriterSize(s.spill.file, 256<<10)
	for i := range s.items {
		it := &s.items[i]
		var head [8]byte
		binary.LittleEndian.PutUint32(head[:], it.key)
		binary.LittleEndian.PutUint32(head[4:], it.size)
		_, _ = w.Write(head[:]) // the error stays with w
		_, _ = w.Write(s.arena[it.start : it.start+it.size])
		s.off += 8 + int64(it.size)
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("image: sorting: %w", err)
	}
	s.runs = append(s.runs, s.off)
	s.arena, s.items = s.arena[:0], s.items[:0]
	return nil
}

// each hands out all pairs in order, equal keys in any. A pair is valid until the
// next one. It is called once.
func (s *sorter) each(yield func(key, value []byte) error) error {
	if len(s.runs) == 0 {
		s.sort()
		for i := range s.items {
			it := &s.items[i]
			if err := yield(s.key(it), s.arena[it.start+it.key:it.start+it.size]); err != nil {
				return err
			}
		}
		return nil
	}
	if err := s.flush(); err != nil {
		return err
	}
	s.arena, s.items = nil, nil
	return s.merge(yield)
}

func (s *sorter) merge(yield func(key, value []byte) error) error {
	runs := make(runHeap, 0, len(s.runs))
	start := int64(0)
	for _, end := range s.runs {
		r := &run{r: bufio.NewReaderSize(io.NewSectionReader(s.spill.file, start, end-start), 32<<10)}
		start = end
		more, err := r.next()
		if err != nil {
			return err
		}
		if more {
			runs = append(runs, r)
		}
	}
	heap.Init(&runs)
	for len(runs) > 0 {
		r := runs[0]
		if err := yield(r.buf[:r.key], r.buf[r.key:]); err != nil {
			return err
		}
		more, err := r.next()
		if err != nil {
			return err
		}
		if more {
			heap.Fix(&runs, 0)
		} else {
			heap.Pop(&runs)
		}
	}
	return nil
}

// run reads one sorted run.
type run struct {
	r   *bufio.Reader
	buf []byte // key and value
	key int
}

func (r *run) next() (bool, error) {
	var head [8]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		return false, fmt.Errorf("image: sorting: %w", err)
	}
	r.key = int(binary.LittleEndian.Uint32(head[:]))
	size := int(binary.LittleEndian.Uint32(head[4:]))
	r.buf = slices.Grow(r.buf[:0], size)[:size]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return false, fmt.Errorf("image: sorting: %w", err)
	}
	return true, nil
}

type runHeap []*run //nolint:recvcheck // as container/heap shows it

func (h runHeap) Len() int { return len(h) }
func (h runHeap) Less(i, j int) bool {
	return bytes.Compare(h[i].buf[:h[i].key], h[j].buf[:h[j].key]) < 0
}
func (h runHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *runHeap) Push(x any)   { *h = append(*h, x.(*run)) } //nolint:forcetypeassert // only runs are pushed
func (h *runHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
