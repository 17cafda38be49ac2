package scope_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// fixture has a table "tasks" with the variables project and org, and a table
// "notes" with the variable note.
func fixture(tb testing.TB) *schema.Schema {
	tb.Helper()
	s, err := schema.Parse([]byte(`{"irVersion": 1, "schemaVersion": 1, "tables": [
		{"name": "tasks", "primaryKey": "id",
			"columns": [
				{"name": "id", "type": "string", "nullable": false},
				{"name": "project", "type": "string", "nullable": false},
				{"name": "org", "type": "integer", "nullable": false}],
			"scopes": [{"pattern": "project:{project}"}, {"pattern": "org:{org}"}]},
		{"name": "notes", "primaryKey": "id",
			"columns": [{"name": "id", "type": "string", "nullable": false}],
			"scopes": [{"pattern": "note:{note}", "column": "id"}]}]}`))
	require.NoError(tb, err)
	return s
}

func requireInvalid(t *testing.T, err error, names string) {
	t.Helper()
	var protocol *ssp2.Error
	require.ErrorAs(t, err, &protocol)
	require.Equal(t, ssp2.CodeInvalidSubscription, protocol.Code)
	require.Contains(t, protocol.Message, names)
}

func TestValidateRequested(t *testing.T) {
	t.Parallel()

	tasks, ok := fixture(t).Table("tasks")
	require.True(t, ok)
	for _, tt := range []struct {
		name  string
		req   scope.Requested
		names string // "": valid
	}{
		{"declared variables", scope.Requested{"project": {"p1", "p2"}, "org": {"7"}}, ""},
		{"some of them", scope.Requested{"org": {"7"}}, ""},
		{"nothing", scope.Requested{}, ""},
		{"no values", scope.Requested{"org": {}}, ""},
		{"a value with a star in it", scope.Requested{"org": {"*7", "**"}}, ""},
		{"unknown variable", scope.Requested{"org": {"7"}, "team": {"t"}}, `"team"`},
		{"variable of another table", scope.Requested{"note": {"n"}}, `"note"`},
		{"variable in another case", scope.Requested{"Org": {"7"}}, `"Org"`},
		{"wildcard", scope.Requested{"project": {"p1", "*"}}, `"project"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			err := scope.ValidateRequested(tasks, tt.req)
			if tt.names == "" {
				require.NoError(t, err)
				return
			}
			requireInvalid(t, err, tt.names)
		})
	}
}

func TestValidateRequestedKeepsMessagesShort(t *testing.T) {
	t.Parallel()

	tasks, _ := fixture(t).Table("tasks")
	err := scope.ValidateRequested(tasks, scope.Requested{strings.Repeat("ü", 100_000): {"x"}})
	requireInvalid(t, err, "üü")
	require.Less(t, len(err.Error()), 300)
}

func TestValidateAllowed(t *testing.T) {
	t.Parallel()

	s := fixture(t)
	require.NoError(t, scope.ValidateAllowed(s, nil))
	require.NoError(t, scope.ValidateAllowed(s, scope.Allowed{"project": {"*"}, "org": nil, "note": {"n"}}))
	requireInvalid(t, scope.ValidateAllowed(s, scope.Allowed{"project": {"*"}, "team": {"t"}}), `"team"`)
}

func TestPermits(t *testing.T) {
	t.Parallel()

	g := scope.Compile(scope.Allowed{"any": {"a", "*"}, "some": {"a", "b"}, "none": {}})
	for _, tt := range []struct {
		variable, value string
		want            bool
	}{
		{"any", "a", true},
		{"any", "whatever", true},
		{"any", "*", true},
		{"any", "", false},
		{"some", "a", true},
		{"some", "c", false},
		{"some", "*", false},
		{"some", "", false},
		{"none", "a", false},
		{"absent", "a", false},
	} {
		require.Equal(t, tt.want, g.Permits(tt.variable, tt.value), "%s=%s", tt.variable, tt.value)
	}
}

func TestEffective(t *testing.T) {
	t.Parallel()

	allowed := scope.Allowed{"any": {"*"}, "some": {"a", "b", "c"}, "none": {}}
	for _, tt := range []struct {
		name string
		req  scope.Requested
		want scope.Requested // nil: revoked
	}{
		{"intersection in requested order", scope.Requested{"some": {"c", "x", "a"}}, scope.Requested{"some": {"c", "a"}}},
		{"wildcard passes through", scope.Requested{"any": {"z", "y"}}, scope.Requested{"any": {"z", "y"}}},
		{"duplicates once", scope.Requested{"some": {"a", "b", "a"}, "any": {"z", "z"}}, scope.Requested{"some": {"a", "b"}, "any": {"z"}}},
		{"only requested variables", scope.Requested{"some": {"a"}}, scope.Requested{"some": {"a"}}},
		{"variable not allowed", scope.Requested{"some": {"a"}, "absent": {"a"}}, nil},
		{"variable allowed without values", scope.Requested{"some": {"a"}, "none": {"a"}}, nil},
		{"empty intersection", scope.Requested{"some": {"x"}, "any": {"z"}}, nil},
		{"no values requested", scope.Requested{"any": {}}, nil},
		{"nothing requested", scope.Requested{}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			eff, active := scope.Compile(allowed).Effective(tt.req)
			require.Equal(t, tt.want != nil, active)
			require.Equal(t, tt.want, eff)
		})
	}
}

func TestNoGrantsDenyEverything(t *testing.T) {
	t.Parallel()

	failed := scope.Resolution{Err: errors.New("directory is down")}
	_, active := failed.Grants.Effective(scope.Requested{"org": {"7"}})
	require.False(t, active)
	require.False(t, failed.Grants.Permits("org", "7"))
	require.False(t, failed.Grants.AuthorizeRow([]string{"org=7"}))
}

func TestAuthorizeRow(t *testing.T) {
	t.Parallel()

	g := scope.Compile(scope.Allowed{"org": {"7", "a=b"}, "project": {"*"}})
	for _, tt := range []struct {
		name   string
		scopes []string
		want   bool
	}{
		{"all permitted", []string{"org=7", "project=p"}, true},
		{"value with =", []string{"org=a=b"}, true},
		{"one denied", []string{"org=8", "project=p"}, false},
		{"variable not held", []string{"org=7", "project=p", "team=t"}, false},
		{"empty value", []string{"org=7", "project="}, false},
		{"no value", []string{"org=7", "project"}, false},
		{"no scopes", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, tt.want, g.AuthorizeRow(tt.scopes))
		})
	}
}

func TestCompileKeepsItsOwnCopy(t *testing.T) {
	t.Parallel()

	values := []string{"a"}
	allowed := scope.Allowed{"x": values}
	g := scope.Compile(allowed)
	values[0] = "*"
	allowed["y"] = []string{"b"}
	require.True(t, g.Permits("x", "a"))
	require.False(t, g.Permits("x", "b"))
	require.False(t, g.Permits("y", "b"))

	req := scope.Requested{"x": {"a"}}
	eff, active := g.Effective(req)
	require.True(t, active)
	req["x"][0] = "changed"
	require.Equal(t, scope.Requested{"x": {"a"}}, eff)
}

// scopeMaps draws maps over few variables and values, so that they often meet.
func scopeMaps(values ...string) *rapid.Generator[map[string][]string] {
	return rapid.MapOfN(
		rapid.SampledFrom([]string{"u", "v", "w"}),
		rapid.SliceOfN(rapid.SampledFrom(values), 0, 5),
		0, 3,
	)
}

func TestEffectiveProperties(t *testing.T) {
	t.Parallel()

	requests, answers := scopeMaps("a", "b", "c", "d"), scopeMaps("a", "b", "c", "*")
	rapid.Check(t, func(t *rapid.T) {
		req, allowed := requests.Draw(t, "requested"), answers.Draw(t, "allowed")
		g := scope.Compile(allowed)
		eff, active := g.Effective(req)

		// §3.2 rules 4 and 5, spelled out value by value.
		wantActive := len(req) > 0
		for variable, values := range req {
			wild := slices.Contains(allowed[variable], "*")
			survives := slices.ContainsFunc(values, func(value string) bool {
				return wild || slices.Contains(allowed[variable], value)
			})
			wantActive = wantActive && survives
		}
		require.Equal(t, wantActive, active)
		if !active {
			require.Nil(t, eff)
			return
		}
		require.ElementsMatch(t, slices.Collect(maps.Keys(req)), slices.Collect(maps.Keys(eff)))
		for variable, kept := range eff {
			wild := slices.Contains(allowed[variable], "*")
			require.NotEmpty(t, kept)
			for _, value := range kept {
				require.Contains(t, req[variable], value)
				require.True(t, wild || slices.Contains(allowed[variable], value))
				require.True(t, g.Permits(variable, value))
			}
			if wild {
				require.Subset(t, kept, req[variable])
			}
			first := func(value string) int { return slices.Index(req[variable], value) }
			require.True(t, slices.IsSortedFunc(kept, func(a, b string) int { return first(a) - first(b) }))
			require.Len(t, slices.Compact(slices.Sorted(slices.Values(kept))), len(kept))
		}
	})
}

func TestEffectiveIsMonotone(t *testing.T) {
	t.Parallel()

	requests, answers := scopeMaps("a", "b", "c", "d"), scopeMaps("a", "b", "c", "*")
	rapid.Check(t, func(t *rapid.T) {
		req := requests.Draw(t, "requested")
		less, more := answers.Draw(t, "allowed"), answers.Draw(t, "more")
		union := scope.Allowed{}
		for _, m := range []map[string][]string{less, more} {
			for variable, values := range m {
				union[variable] = append(union[variable], values...)
			}
		}
		eff, active := scope.Compile(less).Effective(req)
		wider, widerActive := scope.Compile(union).Effective(req)
		if !active {
			return
		}
		require.True(t, widerActive)
		for variable, values := range eff {
			require.Subset(t, wider[variable], values)
		}
	})
}

func TestAuthorizeRowRequiresAll(t *testing.T) {
	t.Parallel()

	answers := scopeMaps("a", "b", "c", "*")
	rapid.Check(t, func(t *rapid.T) {
		allowed := answers.Draw(t, "allowed")
		row := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
			return rapid.SampledFrom([]string{"u", "v", "w"}).Draw(t, "variable") + "=" +
				rapid.SampledFrom([]string{"a", "b", "d", ""}).Draw(t, "value")
		}), 0, 4).Draw(t, "row")
		g := scope.Compile(allowed)
		want := len(row) > 0
		for _, entry := range row {
			variable, value, _ := strings.Cut(entry, "=")
			want = want && value != "" &&
				(slices.Contains(allowed[variable], "*") || slices.Contains(allowed[variable], value))
		}
		require.Equal(t, want, g.AuthorizeRow(row))
		if want {
			require.False(t, g.AuthorizeRow(append(row, "absent=a")))
		}
	})
}

func BenchmarkAuthorizeRow(b *testing.B) {
	values := make([]string, 10_000)
	for i := range values {
		values[i] = strings.Repeat("x", 8) + string(rune('0'+i))
	}
	g := scope.Compile(scope.Allowed{"org": values})
	row := []string{"org=" + values[9_999]}
	for b.Loop() {
		g.AuthorizeRow(row)
	}
}
