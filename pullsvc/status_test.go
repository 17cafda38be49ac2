package pullsvc_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// TestStatus fixes how a subscription is answered by where its cursor stands: the
// log of the test has commits up to 8 and is pruned up to 3.
func TestStatus(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 8 {
		b.commit(t, item(string(rune('a'+i)), "x", "body"))
	}
	b.prune(t, 3)
	for _, tc := range []struct {
		name      string
		cursor    int64
		token     *string
		status    ssp2.SubStatus
		bootstrap bool
		next      int64
		commits   int // COMMIT frames
		rows      int // rows of segments
	}{
		{"never synced: bootstrap (§4.7)", -1, nil, ssp2.SubActive, true, 8, 0, 8},
		{"below -1: bootstrap", -5, nil, ssp2.SubActive, true, 8, 0, 8},
		{"0 behind the horizon: reset (§4.6)", 0, nil, ssp2.SubReset, false, 0, 0, 0},
		{"horizon-1: reset", 2, nil, ssp2.SubReset, false, 2, 0, 0},
		{"horizon: window (§4.5)", 3, nil, ssp2.SubActive, false, 8, 5, 0},
		{"max-1: window", 7, nil, ssp2.SubActive, false, 8, 1, 0},
		{"max: empty window", 8, nil, ssp2.SubActive, false, 8, 0, 0},
		{"max+1: bootstrap, corrupt client state", 9, nil, ssp2.SubActive, true, 8, 0, 8},
		{"token: resume at the pin", 5, token(5, "items", new("1:xd")), ssp2.SubActive, true, 5, 0, 4},
		{"token without a row: resume from the start", 5, token(5, "items", nil), ssp2.SubActive, true, 5, 0, 8},
		{"token at the horizon: resume", 3, token(3, "items", new("1:xg")), ssp2.SubActive, true, 3, 0, 1},
		{"token below the horizon: reset, for the client clears nothing while it resumes", 2, token(2, "items", new("1:xd")), ssp2.SubReset, false, 2, 0, 0},
		{"token above the newest commit: restart", 9, token(9, "items", new("1:xd")), ssp2.SubActive, true, 8, 0, 8},
		{"token of another table: restart", 5, token(5, "docs", new("1:xd")), ssp2.SubActive, true, 8, 0, 8},
		{"token with a row cursor that is none: restart", 5, token(5, "items", new("d")), ssp2.SubActive, true, 8, 0, 8},
		{"token with a row cursor cut short: restart", 5, token(5, "items", new("9:xd")), ssp2.SubActive, true, 8, 0, 8},
		{"token with U+0000: restart", 5, token(5, "items", new("1:x\x00")), ssp2.SubActive, true, 8, 0, 8},
		{"token of another shape: restart", 5, new(`{"asOfCommitSeq":"5"}`), ssp2.SubActive, true, 8, 0, 8},
		{"token with a table index: restart", 5, new(`{"asOfCommitSeq":5,"tables":["items"],"tableIndex":1,"rowCursor":null}`), ssp2.SubActive, true, 8, 0, 8},
		{"token with two tables: restart", 5, new(`{"asOfCommitSeq":5,"tables":["items","docs"],"tableIndex":0,"rowCursor":null}`), ssp2.SubActive, true, 8, 0, 8},
		{"token that is no object: restart", 5, new(`7`), ssp2.SubActive, true, 8, 0, 8},
		{"token null: restart", 5, new(`null`), ssp2.SubActive, true, 8, 0, 8},
		{"an unusable token wins over an expired cursor", 1, new(`[]`), ssp2.SubActive, true, 8, 0, 8},
		{"a token in a subscription that never synced resumes", -1, token(8, "items", new("1:xg")), ssp2.SubActive, true, 8, 0, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := sub("s", "items", tc.cursor, project("x"))
			s.BootstrapState = tc.token
			req := request(s)
			req.ClientID = t.Name()
			got := b.pull(t, req)[0]
			require.Equal(t, tc.status, got.Start.Status)
			require.Equal(t, tc.bootstrap, got.Start.Bootstrap)
			require.Equal(t, ssp2.SubEnd{NextCursor: tc.next}, got.End)
			require.Len(t, got.Commits, tc.commits)
			table, _ := b.schema.Table("items")
			require.Len(t, got.ids(t, table), tc.rows)
			if tc.bootstrap {
				require.NotEmpty(t, got.Segments)
			}
			if tc.status == ssp2.SubReset {
				require.Equal(t, string(ssp2.CodeCursorExpired), got.Start.ReasonCode)
				require.Empty(t, got.Start.EffectiveScopes)
			} else {
				require.Empty(t, got.Start.ReasonCode)
				require.Equal(t, project("x"), got.Start.EffectiveScopes)
			}
		})
	}
}

// TestEmptyLog: an empty partition has horizon and newest commit 0.
func TestEmptyLog(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for cursor, bootstrap := range map[int64]bool{-1: true, 0: false, 1: true} {
		got := b.one(t, sub("s", "items", cursor, project("x")))
		require.Equal(t, bootstrap, got.Start.Bootstrap, "cursor %d", cursor)
		require.Equal(t, ssp2.SubEnd{NextCursor: 0}, got.End)
		require.Len(t, got.Segments, map[bool]int{true: 1}[bootstrap])
	}
}

func TestRevoked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, doc("d", "o1", 7))
	both := ssp2.ScopeMap{"org": {"o1"}, "folderId": {"7"}}
	for _, tc := range []struct {
		name      string
		scopes    scope.Resolution
		requested ssp2.ScopeMap
		effective ssp2.ScopeMap // nil: revoked
	}{
		{"every key granted: active", granted(scope.Allowed{"org": {"o1"}, "folderId": {"7"}}), both, both},
		{"granted by *: active", granted(scope.Allowed{"org": {"*"}, "folderId": {"*"}}), both, both},
		{"only one variable requested and granted: active", granted(scope.Allowed{"folderId": {"7"}}), ssp2.ScopeMap{"folderId": {"7"}}, ssp2.ScopeMap{"folderId": {"7"}}},
		{"some values granted: active with those", granted(scope.Allowed{"org": {"o1"}}), ssp2.ScopeMap{"org": {"o2", "o1"}}, ssp2.ScopeMap{"org": {"o1"}}},
		{"the resolver failed (§3.2 rule 5)", scope.Resolution{Err: errors.New("down")}, both, nil},
		{"a key is not granted", granted(scope.Allowed{"org": {"o1"}}), both, nil},
		{"no value of a key is granted", granted(scope.Allowed{"org": {"o1"}, "folderId": {"8"}}), both, nil},
		{"a key is granted with no value", granted(scope.Allowed{"org": {"o1"}, "folderId": {}}), both, nil},
		{"nothing requested", granted(everything), ssp2.ScopeMap{}, nil},
		{"a key requested without a value", granted(everything), ssp2.ScopeMap{"org": {}}, nil},
		{"nothing granted", granted(nil), both, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := sub("s", "docs", 0, tc.requested)
			s.BootstrapState = nil
			req := request(s, sub("again", "docs", -1, tc.requested))
			req.Scopes, req.ClientID = tc.scopes, t.Name()
			got := b.pull(t, req)
			if tc.effective != nil {
				require.Equal(t, ssp2.SubStart{ID: "s", Status: ssp2.SubActive, EffectiveScopes: tc.effective}, got[0].Start)
				require.Len(t, got[0].Commits, 1)
				require.Len(t, got[1].Segments, 1)
				return
			}
			for i, cursor := range []int64{0, -1} {
				require.Equal(t, ssp2.SubRevoked, got[i].Start.Status)
				require.Equal(t, string(ssp2.CodeScopeRevoked), got[i].Start.ReasonCode)
				require.Empty(t, got[i].Start.EffectiveScopes)
				require.False(t, got[i].Start.Bootstrap)
				require.Equal(t, ssp2.SubEnd{NextCursor: cursor}, got[i].End)
				require.Empty(t, got[i].Commits)
				require.Empty(t, got[i].Segments)
			}
			require.Nil(t, b.record(t, t.Name()).Cursor)
		})
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	s, err := pullsvc.New(setup(t).db.Pool, pullsvc.Config{Schema: testSchema(t), MaxSubscriptions: 3, MaxScopeValues: 6})
	require.NoError(t, err)
	x := sub("s", "items", 0, project("x"))
	named := func(id string) ssp2.Subscription { return sub(id, "items", 0, project("x")) }
	for _, tc := range []struct {
		name string
		code ssp2.Code
		subs []ssp2.Subscription
		edit func(*pullsvc.Request)
	}{
		{"no subscription", "", nil, nil},
		{"as many as allowed", "", []ssp2.Subscription{named("a"), named("b"), named("c")}, nil},
		{"too many", ssp2.CodeInvalidSubscription, []ssp2.Subscription{named("a"), named("b"), named("c"), named("d")}, nil},
		{"an id twice (§4.1)", ssp2.CodeInvalidSubscription, []ssp2.Subscription{named("a"), named("b"), named("a")}, nil},
		{"an unknown table (§4.3)", ssp2.CodeUnknownTable, []ssp2.Subscription{sub("a", "nope", 0, project("x"))}, nil},
		{"an undeclared scope key (§3.2)", ssp2.CodeInvalidSubscription, []ssp2.Subscription{sub("a", "items", 0, ssp2.ScopeMap{"org": {"x"}})}, nil},
		{"as many scope values as allowed", "", []ssp2.Subscription{
			sub("a", "items", 0, project("x", "y")), sub("b", "docs", 0, docScopes([]string{"x"}, []string{"1", "2", "3"})),
		}, nil},
		{"too many scope values", ssp2.CodeInvalidSubscription, []ssp2.Subscription{
			sub("a", "items", 0, project("x", "y")), sub("b", "docs", 0, docScopes([]string{"x", "x"}, []string{"1", "2", "3"})),
		}, nil},
		{"a requested * (§3.2)", ssp2.CodeInvalidSubscription, []ssp2.Subscription{sub("a", "items", 0, project("x", "*"))}, nil},
		{"inline segments only (§4.2)", "", []ssp2.Subscription{x}, func(r *pullsvc.Request) { r.Header.Accept = ssp2.AcceptInlineRows }},
		{"neither kind of rows segment (§4.2)", ssp2.CodeInvalidRequest, []ssp2.Subscription{x}, func(r *pullsvc.Request) {
			r.Header.Accept = ssp2.AcceptSQLite | ssp2.AcceptSignedURLs
		}},
		{"no client id", ssp2.CodeInvalidClientID, []ssp2.Subscription{x}, func(r *pullsvc.Request) { r.ClientID = "" }},
		{"a client id the database cannot hold", ssp2.CodeInvalidClientID, []ssp2.Subscription{x}, func(r *pullsvc.Request) { r.ClientID = "a\x00b" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			req := request(tc.subs...)
			if tc.edit != nil {
				tc.edit(&req)
			}
			err := s.Validate(req)
			require.Equal(t, tc.code, ssp2.CodeOf(err))
			if tc.code != "" {
				_, beginErr := s.Begin(t.Context(), req)
				require.Equal(t, err, beginErr)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	pool, schema := setup(t).db.Pool, testSchema(t)
	for name, cfg := range map[string]pullsvc.Config{
		"no schema":                   {},
		"a negative subscription cap": {Schema: schema, MaxSubscriptions: -1},
		"a negative cap of values":    {Schema: schema, MaxScopeValues: -1},
		"a negative size for buffers": {Schema: schema, BufferBytes: -1},
	} {
		_, err := pullsvc.New(pool, cfg)
		require.Error(t, err, name)
	}
	_, err := pullsvc.New(nil, pullsvc.Config{Schema: schema})
	require.Error(t, err)
}
