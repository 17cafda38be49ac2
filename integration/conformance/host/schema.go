package host

import (
	"encoding/json"
	"fmt"

	"github.com/syncpg/syncpg/schema"
)

// schemaSpec is the schema of a create request: a subset of the schema IR under
// other names.
type schemaSpec struct {
	Version int32       `json:"version"`
	Tables  []tableSpec `json:"tables"`
}

// tableSpec, columnSpec and scopeSpec have the form of the IR already.
type tableSpec struct {
	Name       string       `json:"name"`
	PrimaryKey string       `json:"primaryKey"`
	Columns    []columnSpec `json:"columns"`
	Scopes     []scopeSpec  `json:"scopes"`
}

type columnSpec struct {
	Name         string `json:"name"`
	Type         string `json:"type"`
	Nullable     bool   `json:"nullable"`
	CRDTType     string `json:"crdtType,omitempty"`
	Encrypted    bool   `json:"encrypted,omitempty"`
	DeclaredType string `json:"declaredType,omitempty"`
}

type scopeSpec struct {
	Pattern string `json:"pattern"`
	Column  string `json:"column,omitempty"`
}

type irDocument struct {
	IRVersion     int         `json:"irVersion"`
	SchemaVersion int32       `json:"schemaVersion"`
	Tables        []tableSpec `json:"tables"`
}

// defaultCRDTType is the merger of a crdt column that names none (§5.10.1).
const defaultCRDTType = "yjs-doc"

// compile turns the spec into a compiled schema. It completes what the spec may
// leave out and judges nothing: refusing a bad schema is the compiler's work.
func (s schemaSpec) compile() (*schema.Schema, error) {
	doc := irDocument{IRVersion: 1, SchemaVersion: s.Version, Tables: s.Tables}
	for _, table := range doc.Tables {
		for i := range table.Columns {
			column := &table.Columns[i]
			if column.Type == "crdt" && column.CRDTType == "" {
				column.CRDTType = defaultCRDTType
			}
		}
	}
	ir, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("encode the schema: %w", err)
	}
	compiled, err := schema.Parse(ir)
	if err != nil {
		return nil, fmt.Errorf("compile the schema: %w", err)
	}
	return compiled, nil
}
