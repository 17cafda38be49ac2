package image

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
)

const (
	pageSize   = 4096
	headerSize = 100 // of the file, at the head of page 1

	kindIndexInner = 0x02
	kindTableInner = 0x05
	kindIndexLeaf  = 0x0a
	kindTableLeaf  = 0x0d

	// How much of a payload stays in its cell; the rest goes to overflow pages.
	maxLocalTable = pageSize - 35
	maxLocalIndex = (pageSize-12)*64/255 - 23
	minLocal      = (pageSize-12)*32/255 - 23
)

// pager appends pages to the file. The first error is repeated.
type pager struct {
	file *os.File
	w    *bufio.Writer
	next uint32 // number of the page appended next; the first page has number 1
	max  uint32
	err  error
}

func newPager(file *os.File, maxBytes int64) *pager {
	p := &pager{file: file, w: bufio.NewWriterSize(file, 256<<10), next: 1, max: uint32(maxBytes / pageSize)}
	// Page 1 says where the trees are, so it is known last.
	_, _ = p.append(make([]byte, pageSize))
	return p
}

func (p *pager) size() int64 { return int64(p.next-1) * pageSize }

// append writes a page and returns its number.
func (p *pager) append(page []byte) (uint32, error) {
	if p.err == nil && p.next > p.max {
		p.err = fmt.Errorf("%w: over %d bytes", ErrTooLarge, int64(p.max)*pageSize)
	}
	if p.err == nil {
		if _, err := p.w.Write(page); err != nil {
			p.err = fmt.Errorf("image: writing it: %w", err)
		}
	}
	if p.err != nil {
		return 0, p.err
	}
	p.next++
	return p.next - 1, nil
}

// overflow writes what does not fit into a cell as a chain of pages and returns the
// first.
func (p *pager) overflow(rest []byte) (uint32, error) {
	first := p.next
	var page [pageSize]byte
	for len(rest) > 0 {
		n := copy(page[4:], rest)
		clear(page[4+n:])
		rest = rest[n:]
		next := uint32(0)
		if len(rest) > 0 {
			next = p.next + 1
		}
		binary.BigEndian.PutUint32(page[:], next)
		if _, err := p.append(page[:]); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// appendPayload appends a payload to a cell: its local part and, if there is more,
// the number of the first overflow page.
func (p *pager) appendPayload(cell, payload []byte, maxLocal int) ([]byte, error) {
	local := localLen(len(payload), maxLocal)
	cell = append(cell, payload[:local]...)
	if local == len(payload) {
		return cell, nil
	}
	first, err := p.overflow(payload[local:])
	return binary.BigEndian.AppendUint32(cell, first), err
}

func localLen(payload, maxLocal int) int {
	if payload <= maxLocal {
		return payload
	}
	if k := minLocal + (payload-minLocal)%(pageSize-4); k <= maxLocal {
		return k
	}
	return minLocal
}

// page is a b-tree page in the making.
type page struct {
	buf  [pageSize]byte
	kind byte
	base int // where its header begins
	n    int // cells
	top  int // where the content of cells begins
}

func (p *page) init(kind byte, base int) {
	clear(p.buf[:])
	p.kind, p.base, p.n, p.top = kind, base, 0, pageSize
}

func (p *page) inner() bool { return p.kind == kindIndexInner || p.kind == kindTableInner }

// pointers is where the array of cell pointers begins.
func (p *page) pointers() int {
	if p.inner() {
		return p.base + 12
	}
	return p.base + 8
}

func (p *page) fits(cell int) bool { return p.pointers()+2*(p.n+1) <= p.top-cell }

// add adds a cell behind the others and returns its bytes, to be filled in.
func (p *page) add(size int) []byte {
	p.top -= size
	binary.BigEndian.PutUint16(p.buf[p.pointers()+2*p.n:], uint16(p.top))
	p.n++
	return p.buf[p.top : p.top+size]
}

// pop takes the last cell off the page.
func (p *page) pop() []byte {
	p.n--
	pointer := p.buf[p.pointers()+2*p.n:]
	start, end := p.top, pageSize
	if p.n > 0 {
		end = int(binary.BigEndian.Uint16(p.buf[p.pointers()+2*(p.n-1):]))
	}
	cell := append([]byte(nil), p.buf[start:end]...)
	clear(p.buf[start:end])
	pointer[0], pointer[1] = 0, 0
	p.top = end
	return cell
}

// bytes completes the page; right is the child behind all cells of an inner page.
func (p *page) bytes(right uint32) []byte {
	h := p.buf[p.base:]
	h[0] = p.kind
	binary.BigEndian.PutUint16(h[3:], uint16(p.n))
	binary.BigEndian.PutUint16(h[5:], uint16(p.top))
	if p.inner() {
		binary.BigEndian.PutUint32(h[8:], right)
	}
	return p.buf[:]
}

// object is a line of the schema table.
type object struct {
	kind, name, table string
	root              uint32
	sql               string // empty: NULL
}

// finish writes the schema table and the header of the file, and sees that all of it
// is in the file.
func (p *pager) finish(objects []object) error {
	cells := make([][]byte, len(objects))
	fit := headerSize + 8
	for i, o := range objects {
		var sql any
		if o.sql != "" {
			sql = o.sql
		}
		record := appendRecord(nil, o.kind, o.name, o.table, int64(o.root), sql)
		cell := appendVarint(nil, uint64(len(record)))
		cell = appendVarint(cell, uint64(i+1))
		var err error
		if cells[i], err = p.appendPayload(cell, record, maxLocalTable); err != nil {
			return err
		}
		fit += len(cells[i]) + 2
	}
	var first page
	right := uint32(0)
	if fit <= pageSize {
		first.init(kindTableLeaf, headerSize)
		for _, cell := range cells {
			copy(first.add(len(cell)), cell)
		}
	} else {
		// A page for each, since page 1 may have no room for one of them.
		first.init(kindTableInner, headerSize)
		for i, cell := range cells {
			var leaf page
			leaf.init(kindTableLeaf, 0)
			copy(leaf.add(len(cell)), cell)
			number, err := p.append(leaf.bytes(0))
			if err != nil {
				return err
			}
			if i == len(cells)-1 {
				right = number
				break
			}
			key := appendVarint(nil, uint64(i+1))
			c := first.add(4 + len(key))
			binary.BigEndian.PutUint32(c, number)
			copy(c[4:], key)
		}
	}
	if err := p.w.Flush(); err != nil {
		return fmt.Errorf("image: writing it: %w", err)
	}
	content := first.bytes(right)
	writeFileHeader(content, p.next-1)
	if _, err := p.file.WriteAt(content, 0); err != nil {
		return fmt.Errorf("image: writing it: %w", err)
	}
	return nil
}

// writeFileHeader fills in the header of a file of that many pages.
func writeFileHeader(h []byte, pages uint32) {
	copy(h, "SQLite format 3\x00")
	binary.BigEndian.PutUint16(h[16:], pageSize)
	h[18], h[19] = 1, 1                           // written and read with a rollback journal
	h[21], h[22], h[23] = 64, 32, 32              // payload fractions, fixed
	binary.BigEndian.PutUint32(h[24:], 1)         // change counter
	binary.BigEndian.PutUint32(h[28:], pages)     // size of the file
	binary.BigEndian.PutUint32(h[40:], 1)         // schema cookie
	binary.BigEndian.PutUint32(h[44:], 4)         // schema format
	binary.BigEndian.PutUint32(h[56:], 1)         // UTF-8
	binary.BigEndian.PutUint32(h[92:], 1)         // the change counter for which the size holds
	binary.BigEndian.PutUint32(h[96:], 3_007_000) // the oldest SQLite that has the two lines above
}
