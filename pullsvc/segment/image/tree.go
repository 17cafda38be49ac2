package image

import (
	"encoding/binary"
	"errors"
)

// inner builds the inner levels of a b-tree from the bottom up, as pages below are
// finished, left to right. A page is written when the next one of its level begins.
//
// SQLite takes an inner page without cells for corruption. So a cell for which a page
// has no room is held until another one follows it on its level: if none does, the
// page gives up its own last cell instead.
type inner struct {
	out    *pager
	kind   byte
	levels []*level
}

type level struct {
	page  page
	held  []byte // a cell, its left child in front; empty: none
	stash [4 + maxLocalIndex + maxVarint + 4]byte
}

// push adds a cell: a child, finished, and what separates it from the next one. Both
// are copied.
func (t *inner) push(depth int, child uint32, cell []byte) error {
	if depth == len(t.levels) {
		l := &level{}
		l.page.init(t.kind, 0)
		t.levels = append(t.levels, l)
	}
	l := t.levels[depth]
	if len(l.held) > 0 {
		number, err := t.out.append(l.page.bytes(binary.BigEndian.Uint32(l.held)))
		if err != nil {
			return err
		}
		if err := t.push(depth+1, number, l.held[4:]); err != nil {
			return err
		}
		l.held = l.held[:0]
		l.page.init(t.kind, 0)
	}
	var c []byte
	if l.page.fits(4 + len(cell)) {
		c = l.page.add(4 + len(cell))
	} else {
		l.held = l.stash[:4+len(cell)]
		c = l.held
	}
	binary.BigEndian.PutUint32(c, child)
	copy(c[4:], cell)
	return nil
}

// finish closes all levels over the last page of the lowest and returns the root.
func (t *inner) finish(right uint32) (uint32, error) {
	for depth := 0; depth < len(t.levels); depth++ { //nolint:intrange // levels are added on the way
		l := t.levels[depth]
		if len(l.held) > 0 {
			last := l.page.pop()
			number, err := t.out.append(l.page.bytes(binary.BigEndian.Uint32(last)))
			if err != nil {
				return 0, err
			}
			if err := t.push(depth+1, number, last[4:]); err != nil {
				return 0, err
			}
			l.page.init(t.kind, 0)
			copy(l.page.add(len(l.held)), l.held)
		}
		var err error
		if right, err = t.out.append(l.page.bytes(right)); err != nil {
			return 0, err
		}
	}
	return right, nil
}

// tableTree is a table in the making.
type tableTree struct {
	out   *pager
	inner inner
	leaf  page
	cell  []byte
	last  int64 // rowid
}

func newTableTree(out *pager) *tableTree {
	t := &tableTree{out: out, inner: inner{out: out, kind: kindTableInner}}
	t.leaf.init(kindTableLeaf, 0)
	return t
}

// add adds a row; rowids ascend.
func (t *tableTree) add(rowid int64, record []byte) error {
	if t.leaf.n > 0 && rowid <= t.last {
		return errors.New("image: rowids do not ascend")
	}
	t.cell = appendVarint(t.cell[:0], uint64(len(record)))
	t.cell = appendVarint(t.cell, uint64(rowid))
	var err error
	if t.cell, err = t.out.appendPayload(t.cell, record, maxLocalTable); err != nil {
		return err
	}
	if !t.leaf.fits(len(t.cell)) {
		number, err := t.out.append(t.leaf.bytes(0))
		if err != nil {
			return err
		}
		var key [maxVarint]byte
		if err := t.inner.push(0, number, appendVarint(key[:0], uint64(t.last))); err != nil {
			return err
		}
		t.leaf.init(kindTableLeaf, 0)
	}
	copy(t.leaf.add(len(t.cell)), t.cell)
	t.last = rowid
	return nil
}

// finish returns the root of the table.
func (t *tableTree) finish() (uint32, error) {
	number, err := t.out.append(t.leaf.bytes(0))
	if err != nil {
		return 0, err
	}
	return t.inner.finish(number)
}

// indexTree is an index in the making. Its entries are in inner pages too: the one
// that begins a new leaf becomes the cell between both, and as above only when
// another one follows.
type indexTree struct {
	out   *pager
	inner inner
	leaf  page
	held  []byte
	cell  []byte
}

func newIndexTree(out *pager) *indexTree {
	t := &indexTree{out: out, inner: inner{out: out, kind: kindIndexInner}}
	t.leaf.init(kindIndexLeaf, 0)
	return t
}

// add adds an entry; records ascend.
func (t *indexTree) add(record []byte) error {
	t.cell = appendVarint(t.cell[:0], uint64(len(record)))
	var err error
	if t.cell, err = t.out.appendPayload(t.cell, record, maxLocalIndex); err != nil {
		return err
	}
	if len(t.held) > 0 {
		if err := t.split(t.held); err != nil {
			return err
		}
		t.held = t.held[:0]
	}
	if !t.leaf.fits(len(t.cell)) {
		t.held = append(t.held, t.cell...)
		return nil
	}
	copy(t.leaf.add(len(t.cell)), t.cell)
	return nil
}

// split writes the leaf, with an entry between it and the next one, which begins.
func (t *indexTree) split(between []byte) error {
	number, err := t.out.append(t.leaf.bytes(0))
	if err != nil {
		return err
	}
	t.leaf.init(kindIndexLeaf, 0)
	return t.inner.push(0, number, between)
}

// finish returns the root of the index.
func (t *indexTree) finish() (uint32, error) {
	if len(t.held) > 0 {
		if err := t.split(t.leaf.pop()); err != nil {
			return 0, err
		}
		copy(t.leaf.add(len(t.held)), t.held)
	}
	number, err := t.out.append(t.leaf.bytes(0))
	if err != nil {
		return 0, err
	}
	return t.inner.finish(number)
}
