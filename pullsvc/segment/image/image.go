package image

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// MaxBytes is the most an image can have: what lies behind is a page that SQLite
// keeps for its locks.
const MaxBytes = 1 << 30

// sortMemory is what the keys, or the rows when their order is not the table's, may
// take before they go to disk.
const sortMemory = 8 << 20

var (
	// ErrUnsupported says that a table, or a row of it, has no image that holds the
	// same. The rows lane serves it.
	ErrUnsupported = errors.New("image: not representable in SQLite")
	// ErrTooLarge says that an image would pass Spec.MaxBytes. The rows lane serves
	// the table.
	ErrTooLarge = errors.New("image: too large")
	// ErrRepeated says that a row came twice.
	ErrRepeated = errors.New("image: two rows have the same key")
)

// Spec says what an image is of. All but Dir and MaxBytes stands in the image (§5.3).
type Spec struct {
	// Table is the table in the schema version of the rows.
	Table         *schema.Table
	SchemaVersion int32
	AsOfCommitSeq int64
	ScopeDigest   string // §3.5
	// Dir is where temporary files are made; empty: os.TempDir.
	Dir string
	// MaxBytes bounds the image; 0, and everything above it, stands for MaxBytes.
	MaxBytes int64
}

// Build writes the image of all rows that come, in any order, each once. A row is
// valid until the next one is asked for. The first error ends the build and is
// returned, as it is when the rows had it; nothing is left on disk then.
//
// The caller closes the file. Errors: [ErrUnsupported], [ErrTooLarge], [ErrRepeated],
// those of ctx and of the file system, and others for rows that are no rows of the table.
func Build(ctx context.Context, spec Spec, rows iter.Seq2[ssp2.SegmentRow, error]) (*File, error) {
	if err := Check(spec.Table); err != nil {
		return nil, err
	}
	f, err := newFile(spec.Dir)
	if err != nil {
		return nil, err
	}
	if err := f.build(ctx, &spec, rows); err != nil {
		_ = f.Close() // the build's error is the one to tell
		return nil, err
	}
	return f, nil
}

func (f *File) build(ctx context.Context, spec *Spec, rows iter.Seq2[ssp2.SegmentRow, error]) error {
	b := newBuild(spec, f.file)
	defer b.close()
	n := 0
	for row, err := range rows {
		if err != nil {
			return err
		}
		if n%1024 == 0 && ctx.Err() != nil {
			return context.Cause(ctx) //nolint:wrapcheck // the caller's own
		}
		n++
		if err := b.add(row); err != nil {
			return err
		}
	}
	if err := b.finish(ctx); err != nil {
		return err
	}
	f.size, f.rows = b.out.size(), b.rows
	return f.sum(ctx)
}

// build is an image in the making.
type build struct {
	spec  *Spec
	enc   *encoder
	out   *pager
	table *tableTree
	rows  int64
	// sorted holds the index entries of the key, or, when the key is the rowid, the
	// rows themselves.
	sorted *sorter
}

func newBuild(spec *Spec, out *os.File) *build {
	limit := spec.MaxBytes
	if limit <= 0 || limit > MaxBytes {
		limit = MaxBytes
	}
	b := &build{spec: spec, enc: newEncoder(spec.Table), out: newPager(out, limit)}
	b.table = newTableTree(b.out)
	b.sorted = newSorter(spec.Dir, sortMemory)
	return b
}

func (b *build) close() { b.sorted.close() }

func (b *build) add(row ssp2.SegmentRow) error {
	if row.ServerVersion < 1 {
		return fmt.Errorf("image: server version %d of a row", row.ServerVersion)
	}
	record, key, err := b.enc.encode(row)
	if err != nil {
		return err
	}
	b.rows++
	if b.enc.rowid {
		return b.sorted.add(key, record)
	}
	var rowid [8]byte
	binary.BigEndian.PutUint64(rowid[:], uint64(b.rows))
	if err := b.sorted.add(key, rowid[:]); err != nil {
		return err
	}
	return b.table.add(b.rows, record)
}

// finish writes the index, or the rows, and what the file has to say of itself.
func (b *build) finish(ctx context.Context) error {
	var index *indexTree
	if !b.enc.rowid {
		index = newIndexTree(b.out)
	}
	n, last := 0, []byte(nil)
	err := b.sorted.each(func(key, value []byte) error {
		if n > 0 && string(key) == string(last) {
			return ErrRepeated
		}
		if n%1024 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n++
		last = append(last[:0], key...)
		if index == nil {
			return b.table.add(keyInteger(key), value)
		}
		return index.add(b.enc.indexRecord(key, int64(binary.BigEndian.Uint64(value))))
	})
	if err != nil {
		return err
	}
	tableRoot, err := b.table.finish()
	if err != nil {
		return err
	}
	objects := []object{{kind: "table", name: b.spec.Table.Name, table: b.spec.Table.Name, root: tableRoot, sql: tableSQL(b.spec.Table)}}
	if index != nil {
		root, err := index.finish()
		if err != nil {
			return err
		}
		objects = append(objects, object{
			kind: "index", name: "sqlite_autoindex_" + b.spec.Table.Name + "_1", table: b.spec.Table.Name, root: root,
		})
	}
	meta := newTableTree(b.out)
	if err := meta.add(1, b.metaRecord()); err != nil {
		return err
	}
	metaRoot, err := meta.finish()
	if err != nil {
		return err
	}
	objects = append(objects, object{kind: "table", name: metaTable, table: metaTable, root: metaRoot, sql: metaSQL})
	return b.out.finish(objects)
}

func (b *build) metaRecord() []byte {
	return appendRecord(nil,
		int64(1), b.spec.Table.Name, int64(b.spec.SchemaVersion), b.spec.AsOfCommitSeq, b.spec.ScopeDigest, b.rows)
}

// File is a finished image. It may be read from several goroutines.
type File struct {
	file   *os.File
	remove bool // Close removes the file, which still has its name
	size   int64
	rows   int64
	hash   [sha256.Size]byte
}

// newFile makes a file that is gone when it is closed, and where the system allows
// it, when the process ends.
func newFile(dir string) (*File, error) {
	file, err := os.CreateTemp(dir, "syncpg-image-*")
	if err != nil {
		return nil, fmt.Errorf("image: making a temporary file: %w", err)
	}
	return &File{file: file, remove: os.Remove(file.Name()) != nil}, nil
}

func (f *File) sum(ctx context.Context) error {
	h := sha256.New()
	buf := make([]byte, 256<<10)
	for off := int64(0); off < f.size; {
		if ctx.Err() != nil {
			return context.Cause(ctx) //nolint:wrapcheck // the caller's own
		}
		n, err := f.file.ReadAt(buf[:min(int64(len(buf)), f.size-off)], off)
		if err != nil {
			return fmt.Errorf("image: reading it back: %w", err)
		}
		h.Write(buf[:n])
		off += int64(n)
	}
	h.Sum(f.hash[:0])
	return nil
}

// ReadAt reads the image, as [io.ReaderAt] describes.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	return io.NewSectionReader(f.file, 0, f.size).ReadAt(p, off) //nolint:wrapcheck // io.EOF has to stay what it is
}

// Size returns the length of the image in bytes.
func (f *File) Size() int64 { return f.size }

// Rows returns the number of its rows.
func (f *File) Rows() int64 { return f.rows }

// ID returns the segment id of the image (§5.1).
func (f *File) ID() string { return "sha256:" + hex.EncodeToString(f.hash[:]) }

// Close removes the image.
func (f *File) Close() error {
	err := f.file.Close()
	if f.remove {
		err = errors.Join(err, os.Remove(f.file.Name()))
	}
	if err != nil {
		return fmt.Errorf("image: closing it: %w", err)
	}
	return nil
}

// keyInteger and keyFloat undo what integerKey and floatKey did.
func keyInteger(key []byte) int64 { return int64(binary.BigEndian.Uint64(key) ^ 1<<63) }

func keyFloat(key []byte) float64 {
	u := binary.BigEndian.Uint64(key)
	if u>>63 == 1 {
		return math.Float64frombits(u ^ 1<<63)
	}
	return math.Float64frombits(^u)
}

// integerKey and floatKey append numbers so that bytes sort as they do.
func integerKey(dst []byte, n int64) []byte {
	return binary.BigEndian.AppendUint64(dst, uint64(n)^1<<63)
}

func floatKey(dst []byte, f float64) []byte {
	u := math.Float64bits(f + 0) // one zero only, as SQLite compares them
	if u>>63 == 1 {
		return binary.BigEndian.AppendUint64(dst, ^u)
	}
	return binary.BigEndian.AppendUint64(dst, u^1<<63)
}
