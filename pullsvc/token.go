package pullsvc

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/syncpg/syncpg/ssp2"
)

// position is where a scan goes on: after a row, among the rows of a value of the
// driving scope variable. The zero position is the start.
type position struct {
	value string
	row   string
}

// cursor renders a position as the row cursor of tokens and descriptors (§4.7,
// §5.4): the value's length in bytes, a colon, the value, the row id.
func (p position) cursor() *string {
	if p.row == "" {
		return nil
	}
	s := strconv.Itoa(len(p.value)) + ":" + p.value + p.row
	return &s
}

func parseCursor(s string) (position, bool) {
	digits, rest, found := strings.Cut(s, ":")
	n, err := strconv.Atoi(digits)
	if !found || err != nil || n < 0 || n >= len(rest) || strings.IndexByte(rest, 0) >= 0 {
		return position{}, false
	}
	return position{value: rest[:n], row: rest[n:]}, true
}

// token is the resume token of a bootstrap (§4.7). A subscription has one table.
type token struct {
	pin int64
	at  position
}

// parseToken reads a resume token. A token that is not one of this table's is
// unusable, and then the bootstrap restarts.
func parseToken(raw, table string) (token, bool) {
	var t struct {
		AsOfCommitSeq *int64   `json:"asOfCommitSeq"`
		Tables        []string `json:"tables"`
		TableIndex    *int     `json:"tableIndex"`
		RowCursor     *string  `json:"rowCursor"`
	}
	if err := json.Unmarshal([]byte(raw), &t); err != nil {
		return token{}, false
	}
	if t.AsOfCommitSeq == nil || t.TableIndex == nil || *t.TableIndex != 0 || len(t.Tables) != 1 || t.Tables[0] != table {
		return token{}, false
	}
	parsed := token{pin: *t.AsOfCommitSeq}
	if t.RowCursor != nil {
		at, ok := parseCursor(*t.RowCursor)
		if !ok {
			return token{}, false
		}
		parsed.at = at
	}
	return parsed, true
}

func (t token) render(table string) *string {
	b := append([]byte(nil), `{"asOfCommitSeq":`...)
	b = strconv.AppendInt(b, t.pin, 10)
	b = ssp2.AppendJSONString(append(b, `,"tables":[`...), table)
	b = append(b, `],"tableIndex":0,"rowCursor":`...)
	if c := t.at.cursor(); c != nil {
		b = ssp2.AppendJSONString(b, *c)
	} else {
		b = append(b, "null"...)
	}
	s := string(append(b, '}'))
	return &s
}
