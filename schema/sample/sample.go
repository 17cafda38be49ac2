// Package sample holds the schema that syncpg dev serves when it is given none:
// a to-do app for several teams. It has every column type but crdt, two
// references and a unique index.
package sample

import (
	"bytes"
	_ "embed" // for the document
)

//go:embed sample.ir.json
var ir []byte

// IR returns the schema IR of the sample, for schema.Parse.
func IR() []byte { return bytes.Clone(ir) }
