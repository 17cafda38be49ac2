package host

import (
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// hexBytes are bytes inside JSON: {"$bytes": "<lowercase hex>"}.
type hexBytes []byte

// MarshalJSON implements json.Marshaler.
func (b hexBytes) MarshalJSON() ([]byte, error) {
	encoded, err := json.Marshal(map[string]string{"$bytes": hex.EncodeToString(b)})
	if err != nil {
		return nil, fmt.Errorf("encode bytes: %w", err)
	}
	return encoded, nil
}

// rowValues turns a decoded row into the form readRows uses: column name to
// JSON value.
func rowValues(columns []schema.Column, row []ssp2.Value) (map[string]any, error) {
	if len(row) != len(columns) {
		return nil, fmt.Errorf("the row has %d values, the table %d columns", len(row), len(columns))
	}
	values := make(map[string]any, len(columns))
	for i, column := range columns {
		value, err := rowValue(column.Type, row[i])
		if err != nil {
			return nil, fmt.Errorf("column %q: %w", column.Name, err)
		}
		values[column.Name] = value
	}
	return values, nil
}

func rowValue(columnType ssp2.ColumnType, value ssp2.Value) (any, error) {
	if value.Null {
		return nil, nil //nolint:nilnil // A null is a value here.
	}
	switch columnType {
	case ssp2.TypeString, ssp2.TypeJSON, ssp2.TypeBlobRef:
		return string(value.Bytes), nil
	case ssp2.TypeInteger:
		return value.Int, nil
	case ssp2.TypeFloat:
		return value.Float, nil
	case ssp2.TypeBoolean:
		return value.Int != 0, nil
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return hexBytes(value.Bytes), nil
	default:
		return nil, fmt.Errorf("unknown column type %d", columnType)
	}
}
