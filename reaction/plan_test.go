package reaction_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/reaction"
)

// nested is n arrays inside each other around a number.
func nested(n int) json.RawMessage {
	return json.RawMessage(strings.Repeat("[", n) + "1" + strings.Repeat("]", n))
}

// text is a JSON string of n bytes.
func text(n int) json.RawMessage { return json.RawMessage(`"` + strings.Repeat("x", n-2) + `"`) }

func TestLimitsOfAPlan(t *testing.T) {
	t.Parallel()
	valid := reaction.Plan{Key: "k", Type: "mail", Version: 1, Payload: json.RawMessage(`{}`), MaxAttempts: 3}
	for _, c := range []struct {
		name   string
		change func(*reaction.Plan)
		ok     bool
	}{
		{"valid", func(*reaction.Plan) {}, true},
		{"key empty", func(p *reaction.Plan) { p.Key = "" }, false},
		{"key of 256 bytes", func(p *reaction.Plan) { p.Key = strings.Repeat("ü", 128) }, true},
		{"key of 257 bytes", func(p *reaction.Plan) { p.Key = strings.Repeat("ü", 128) + "x" }, false},
		{"key with U+0000", func(p *reaction.Plan) { p.Key = "a\x00" }, false},
		{"key not UTF-8", func(p *reaction.Plan) { p.Key = "\xff" }, false},
		{"type empty", func(p *reaction.Plan) { p.Type = "" }, false},
		{"type of all characters", func(p *reaction.Plan) { p.Type = "Az09._:-" }, true},
		{"type that begins with a digit", func(p *reaction.Plan) { p.Type = "1a" }, false},
		{"type with a space", func(p *reaction.Plan) { p.Type = "send mail" }, false},
		{"type with a line end", func(p *reaction.Plan) { p.Type = "mail\n" }, false},
		{"type of 128 bytes", func(p *reaction.Plan) { p.Type = strings.Repeat("a", 128) }, true},
		{"type of 129 bytes", func(p *reaction.Plan) { p.Type = strings.Repeat("a", 129) }, false},
		{"version 0", func(p *reaction.Plan) { p.Version = 0 }, false},
		{"version negative", func(p *reaction.Plan) { p.Version = -1 }, false},
		{"version the greatest", func(p *reaction.Plan) { p.Version = math.MaxInt32 }, true},
		{"payload not JSON", func(p *reaction.Plan) { p.Payload = json.RawMessage(`{a:1}`) }, false},
		{"payload empty", func(p *reaction.Plan) { p.Payload = json.RawMessage(``) }, false},
		{"payload two values", func(p *reaction.Plan) { p.Payload = json.RawMessage(`1 2`) }, false},
		{"payload not UTF-8", func(p *reaction.Plan) { p.Payload = json.RawMessage("\"\xff\"") }, false},
		{"payload NaN", func(p *reaction.Plan) { p.Payload = json.RawMessage(`NaN`) }, false},
		{"payload number beyond a double", func(p *reaction.Plan) { p.Payload = json.RawMessage(`[1e999]`) }, false},
		{"payload greatest double", func(p *reaction.Plan) { p.Payload = json.RawMessage(`1.7976931348623157e308`) }, true},
		{"payload 16 levels deep", func(p *reaction.Plan) { p.Payload = nested(16) }, true},
		{"payload 17 levels deep", func(p *reaction.Plan) { p.Payload = nested(17) }, false},
		{"payload wide, not deep", func(p *reaction.Plan) { p.Payload = json.RawMessage(`[` + strings.Repeat(`[],{},`, 100) + `[]]`) }, true},
		{"payload of 65,536 bytes", func(p *reaction.Plan) { p.Payload = text(65536) }, true},
		{"payload of 65,537 bytes", func(p *reaction.Plan) { p.Payload = text(65537) }, false},
		{"payload of 65,536 bytes and white space", func(p *reaction.Plan) { p.Payload = append([]byte(" \n"), text(65536)...) }, true},
		{"attempts by default", func(p *reaction.Plan) { p.MaxAttempts = 0 }, true},
		{"attempts negative", func(p *reaction.Plan) { p.MaxAttempts = -1 }, false},
		{"attempts 1", func(p *reaction.Plan) { p.MaxAttempts = 1 }, true},
		{"attempts 100", func(p *reaction.Plan) { p.MaxAttempts = 100 }, true},
		{"attempts 101", func(p *reaction.Plan) { p.MaxAttempts = 101 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := valid
			c.change(&p)
			records, err := reaction.Normalize("p", "c", "k", []reaction.Plan{p})
			if c.ok {
				require.NoError(t, err)
				require.Len(t, records, 1)
			} else {
				require.ErrorIs(t, err, reaction.ErrInvalidPlan)
				require.Nil(t, records)
			}
		})
	}
}

func TestLimitsOfACommit(t *testing.T) {
	t.Parallel()
	records, err := reaction.Normalize("p", "c", "k", nil)
	require.NoError(t, err)
	require.Empty(t, records)
	records, err = reaction.Normalize("p", "c", "k", keysOf("k", 100))
	require.NoError(t, err)
	require.Len(t, records, 100)
	_, err = reaction.Normalize("p", "c", "k", keysOf("k", 101))
	require.ErrorIs(t, err, reaction.ErrInvalidPlan)
	_, err = reaction.Normalize("p", "c", "k", []reaction.Plan{mail("a"), mail("b"), mail("a")})
	require.ErrorIs(t, err, reaction.ErrInvalidPlan, "a key used twice")
}

func TestNormalize(t *testing.T) {
	t.Parallel()
	plans := []reaction.Plan{
		{Key: `say "hi"`, Type: "mail", Version: 2, Payload: json.RawMessage("{ \"b\": [1, 2.50],\n \"a\": \"<\\u0000\u2028>\" }")},
		{Key: "2", Type: "hook", Version: 1, MaxAttempts: 4},
	}
	records, err := reaction.Normalize("p/1", "c,1", "k\n", plans)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff([]reaction.Record{
		{
			Plan:     reaction.Plan{Key: `say "hi"`, Type: "mail", Version: 2, Payload: json.RawMessage("{\"b\":[1,2.50],\"a\":\"<\\u0000\u2028>\"}"), MaxAttempts: 10},
			ClientID: "c,1", ClientCommitID: "k\n", IdempotencyKey: `["p/1","c,1","k\n","say \"hi\""]`,
		},
		{
			Plan:     reaction.Plan{Key: "2", Type: "hook", Version: 1, Payload: json.RawMessage("null"), MaxAttempts: 4},
			ClientID: "c,1", ClientCommitID: "k\n", IdempotencyKey: `["p/1","c,1","k\n","2"]`,
		},
	}, records))
	require.Zero(t, plans[0].MaxAttempts, "what the planner returned stays as it is")
}

// The key stands for its tuple and for no other, whatever characters are in it.
func TestIdempotencyKeysHaveNoAmbiguousDelimiter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.OneOf(rapid.StringOfN(rapid.SampledFrom([]rune(`",\[]a<`+"\n\u2028")), 0, 6, -1), rapid.String())
		tuple := func(name string) [4]string {
			return [4]string{part.Draw(t, name), part.Draw(t, name), part.Draw(t, name), part.Draw(t, name)}
		}
		a, b := tuple("a"), tuple("b")
		ka, kb := reaction.IdempotencyKey(a[0], a[1], a[2], a[3]), reaction.IdempotencyKey(b[0], b[1], b[2], b[3])
		require.Equal(t, a == b, ka == kb)
		parts, ok := reaction.ParseKey(a[0], ka)
		require.True(t, ok)
		require.Equal(t, [3]string{a[1], a[2], a[3]}, parts)
		_, ok = reaction.ParseKey(a[0]+"x", ka)
		require.False(t, ok, "of another partition")
		_, ok = reaction.ParseKey(a[0], ka+" ")
		require.False(t, ok, "written otherwise")
	})
}

func TestBackoffIsExponentialAndBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		initial, most time.Duration
		attempt       int
		want          time.Duration
	}{
		{time.Second, 5 * time.Minute, 1, time.Second},
		{time.Second, 5 * time.Minute, 2, 2 * time.Second},
		{time.Second, 5 * time.Minute, 9, 256 * time.Second},
		{time.Second, 5 * time.Minute, 10, 5 * time.Minute},
		{time.Second, 5 * time.Minute, 1_000_000, 5 * time.Minute},
		{time.Hour, time.Minute, 1, time.Minute},
		{time.Minute, time.Minute, 3, time.Minute},
		{1, math.MaxInt64, 100, math.MaxInt64},
	} {
		require.Equal(t, c.want, reaction.Backoff(c.initial, c.most, c.attempt), "%v", c)
	}
}
