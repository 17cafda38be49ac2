package schema_test

import (
	"errors"
	"fmt"

	"github.com/syncpg/syncpg/schema"
)

func ExampleParse() {
	_, err := schema.Parse([]byte(`{
		"irVersion": 1,
		"schemaVersion": 1,
		"tables": [{
			"name": "notes",
			"primaryKey": "id",
			"columns": [
				{"name": "id", "type": "string", "nullable": true},
				{"name": "_sync_owner", "type": "string", "nullable": false}
			],
			"scopes": [{"pattern": "owner:{owner}", "column": "_sync_owner"}]
		}]
	}`))

	if errs, ok := errors.AsType[*schema.Errors](err); ok {
		for _, p := range errs.Problems {
			fmt.Println(p.Table, p.Column, p.Rule)
		}
	}
	// Output:
	// notes _sync_owner reserved_name
	// notes id key_nullable
}
