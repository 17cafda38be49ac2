package image

import (
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	metaTable     = "_syncular_segment"
	versionColumn = "_syncular_version"
	metaSQL       = `CREATE TABLE "_syncular_segment" ("format" INTEGER NOT NULL, "table" TEXT NOT NULL, ` +
		`"schemaVersion" INTEGER NOT NULL, "asOfCommitSeq" INTEGER NOT NULL, "scopeDigest" TEXT NOT NULL, ` +
		`"rowCount" INTEGER NOT NULL)`
	// maxColumns is what SQLite takes as it is usually built.
	maxColumns = 2000
)

// Check says whether a table has an image; if not it returns [ErrUnsupported] with
// the reason. A table with an encrypted column has none, since what clients keep of
// it is not what the server has (§5.11), and neither has one whose names SQLite does
// not take: it ignores the case of ASCII letters, and has names of its own.
func Check(t *schema.Table) error {
	name := foldCase(t.Name)
	if strings.HasPrefix(name, "sqlite_") || name == metaTable {
		return fmt.Errorf("%w: the name of table %q is SQLite's or the image's own", ErrUnsupported, t.Name)
	}
	if len(t.Columns)+1 > maxColumns {
		return fmt.Errorf("%w: table %q has %d columns", ErrUnsupported, t.Name, len(t.Columns))
	}
	names := make(map[string]bool, len(t.Columns))
	for i := range t.Columns {
		c := &t.Columns[i]
		if c.Encrypted {
			return fmt.Errorf("%w: column %q of table %q is encrypted", ErrUnsupported, c.Name, t.Name)
		}
		folded := foldCase(c.Name)
		if names[folded] {
			return fmt.Errorf("%w: table %q has two columns %q", ErrUnsupported, t.Name, c.Name)
		}
		names[folded] = true
	}
	return nil
}

// foldCase lowers what SQLite compares without case: ASCII letters only.
func foldCase(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

func tableSQL(t *schema.Table) string {
	var b strings.Builder
	b.WriteString("CREATE TABLE " + quote(t.Name) + " (")
	for i := range t.Columns {
		c := &t.Columns[i]
		b.WriteString(quote(c.Name) + " " + affinity(c.Type))
		if !c.Nullable {
			b.WriteString(" NOT NULL")
		}
		if i == t.PrimaryKey {
			b.WriteString(" PRIMARY KEY")
		}
		b.WriteString(", ")
	}
	b.WriteString(quote(versionColumn) + " INTEGER NOT NULL)")
	return b.String()
}

func quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

func affinity(t ssp2.ColumnType) string {
	switch t {
	case ssp2.TypeInteger, ssp2.TypeBoolean:
		return "INTEGER"
	case ssp2.TypeFloat:
		return "REAL"
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return "BLOB"
	case ssp2.TypeString, ssp2.TypeJSON, ssp2.TypeBlobRef:
	}
	return "TEXT"
}
