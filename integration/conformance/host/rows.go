package host

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// row is one stored row as readRows answers it.
type row struct {
	RowID   string            `json:"rowId"`
	Version int64             `json:"version"`
	Values  map[string]any    `json:"values"`
	Scopes  map[string]string `json:"scopes"`
}

// readRows returns every stored row of the table, ordered by row id as bytes.
// The values come from the payload that clients are served, the scopes from the
// columns that authorization and windows use.
func (i *instance) readRows(ctx context.Context, tableName string) ([]row, error) {
	table, exists := i.schema.Table(tableName)
	if !exists {
		return nil, badRequest("the schema has no table %q", tableName)
	}
	rows, err := i.pool.Query(ctx, selectRows(table), i.partition)
	if err != nil {
		return nil, fmt.Errorf("read the rows of %q: %w", tableName, err)
	}
	read, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (row, error) {
		return scanRow(table, r)
	})
	if err != nil {
		return nil, fmt.Errorf("read the rows of %q: %w", tableName, err)
	}
	return read, nil
}

// selectRows reads the stored columns by name, so that the host sees what is in
// the table and not what the server would make of it.
func selectRows(table *schema.Table) string {
	var sql strings.Builder
	sql.WriteString(`select "_sync_row_id", "_sync_server_version", "_sync_payload"`)
	for _, s := range table.Scopes {
		sql.WriteString(", " + schemaddl.QuoteIdent(table.Columns[s.Column].Name))
	}
	sql.WriteString(" from " + schemaddl.QuoteIdent(schemaddl.DefaultAppSchema) + "." + schemaddl.QuoteIdent(table.Name))
	sql.WriteString(` where "_sync_partition" = $1 order by "_sync_row_id" collate "C"`)
	return sql.String()
}

func scanRow(table *schema.Table, r pgx.CollectableRow) (row, error) {
	read := row{Scopes: map[string]string{}}
	var payload []byte
	stored := make([]any, len(table.Scopes))
	into := make([]any, 3, 3+len(stored))
	into[0], into[1], into[2] = &read.RowID, &read.Version, &payload
	for n := range stored {
		into = append(into, &stored[n])
	}
	if err := r.Scan(into...); err != nil {
		return row{}, fmt.Errorf("scan: %w", err)
	}
	for n, s := range table.Scopes {
		text, ok := scopeText(table.Columns[s.Column].Type, stored[n])
		if ok {
			read.Scopes[s.Variable] = text
		}
	}
	decoded, err := ssp2.DecodeRow(table.Wire, payload, nil)
	if err != nil {
		return row{}, fmt.Errorf("decode the payload of %q: %w", read.RowID, err)
	}
	read.Values, err = rowValues(table.Columns, decoded)
	if err != nil {
		return row{}, fmt.Errorf("row %q: %w", read.RowID, err)
	}
	return read, nil
}

// scopeText renders a stored scope column as text (§3.1).
func scopeText(columnType ssp2.ColumnType, stored any) (string, bool) {
	var value ssp2.Value
	switch stored := stored.(type) {
	case string:
		value.Bytes = []byte(stored)
	case int64:
		value.Int = stored
	case float64:
		value.Float = stored
	case bool:
		if stored {
			value.Int = 1
		}
	default:
		value.Null = true
	}
	return schema.ScopeText(columnType, value)
}
