package db_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// queries returns the text of every generated query by its name.
func queries(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("*.sql.go")
	require.NoError(t, err)
	found := map[string]string{}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok || gen.Tok != token.CONST {
				continue
			}
			for _, spec := range gen.Specs {
				value, ok := spec.(*ast.ValueSpec)
				require.True(t, ok)
				text, ok := value.Values[0].(*ast.BasicLit)
				require.True(t, ok)
				found[value.Names[0].Name], err = strconv.Unquote(text.Value)
				require.NoError(t, err)
			}
		}
	}
	require.NotEmpty(t, found)
	return found
}

// sqlc parses the queries but asks no server; a name that is ambiguous or a type that does not fit shows only there.
func TestServerAcceptsEveryQuery(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, text := range queries(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.NoError(t, pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
				_, err := conn.Conn().Prepare(t.Context(), name, text)
				return err
			}))
		})
	}
}
