package gate_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

func TestDecide(t *testing.T) {
	t.Parallel()
	text := func(s string) *string { return &s }
	epoch := gate.Epoch{LogEpoch: "e1"}
	rotated := gate.Epoch{LogEpoch: "e1", Required: true}
	for _, tc := range []struct {
		name  string
		wire  ssp2.WireVersion
		sent  *string
		epoch gate.Epoch
		reset bool
		code  ssp2.Code
	}{
		{"the epoch matches", ssp2.WireV2, text("e1"), epoch, false, ""},
		{"the epoch matches after a rotation", ssp2.WireV3, text("e1"), rotated, false, ""},
		{"no epoch asks for it", ssp2.WireV2, nil, epoch, true, ""},
		{"another epoch is a discontinuity", ssp2.WireV3, text("e0"), epoch, true, ""},
		{"wire version 1 carries none", ssp2.WireV1, nil, epoch, false, ""},
		{"wire version 1 after a rotation", ssp2.WireV1, nil, rotated, false, ssp2.CodeClientWireUnsupported},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			reset, err := gate.Decide(tc.wire, tc.sent, tc.epoch)
			require.Equal(t, tc.code, ssp2.CodeOf(err))
			require.Equal(t, tc.reset, reset)
		})
	}
}

func TestReady(t *testing.T) {
	t.Parallel()
	require.NoError(t, gate.Ready(2, 2, ""))
	for _, tc := range []struct {
		installed int32
		pending   string
		details   string
	}{
		{1, "", `{"installedVersion":1,"runningVersion":2}`},
		{3, "p", `{"installedVersion":3,"runningVersion":2}`},
		{2, `a "b"`, `{"projection":"a \"b\""}`},
	} {
		var perr *ssp2.Error
		require.ErrorAs(t, gate.Ready(2, tc.installed, tc.pending), &perr)
		require.Equal(t, ssp2.CodeSchemaNotReady, perr.Code)
		require.JSONEq(t, tc.details, perr.Details)
	}
}

func TestCheckClientID(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"c", strings.Repeat("x", gate.MaxIDBytes), `["other",1]`} {
		require.NoError(t, gate.CheckClientID(id))
	}
	for _, id := range []string{"", "a\x00b", strings.Repeat("x", gate.MaxIDBytes+1), `["remote-command","x"]`} {
		require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(gate.CheckClientID(id)), "%q", id)
	}
}

// A remembered epoch costs nothing, an unknown or old one a round trip, and the
// registry is written at most once a minute.
func TestEnter(t *testing.T) {
	t.Parallel()
	counter := &pgtest.Counter{}
	pool := pgtest.New(t, pgtest.Options{Counter: counter, MaxConns: 1}).Pool
	now := time.UnixMilli(1_750_000_000_000)
	g := gate.New(pool, func() time.Time { return now })
	enter := func(trips int) gate.Epoch {
		t.Helper()
		counter.Reset()
		e, err := g.Enter(t.Context(), "p1")
		require.NoError(t, err)
		require.Equal(t, trips, counter.RoundTrips()-counter.PrepareRoundTrips())
		return e
	}
	seen := func() (ms int64) {
		t.Helper()
		require.NoError(t, pool.QueryRow(t.Context(), `select last_seen_ms from syncpg.sync_partition_registry where partition = 'p1'`).Scan(&ms))
		return ms
	}

	first := enter(1)
	require.NotEmpty(t, first.LogEpoch)
	require.Equal(t, first, enter(0))
	require.Equal(t, now.UnixMilli(), seen())

	other, err := gate.New(pool, func() time.Time { return now }).Enter(t.Context(), "p1")
	require.NoError(t, err)
	require.Equal(t, first, other, "whoever comes first names the epoch")

	now = now.Add(59 * time.Second)
	enter(0)
	before := seen()
	now = now.Add(2 * time.Second)
	require.Equal(t, first, enter(1))
	require.Greater(t, seen(), before)

	g.Note("p1", first)
	require.Equal(t, first, enter(0))
	g.Note("p1", gate.Epoch{LogEpoch: "of another read", Required: true})
	require.Equal(t, first, enter(1), "which may be older")
	g.Forget("p1")
	require.Equal(t, first, enter(1))

	now = now.Add(-time.Hour) // a clock set back remembers nothing
	enter(1)
}

// TestForgettingDuringARead: an epoch that was read before it was rotated is not remembered
// when the rotation became known meanwhile.
func TestForgettingDuringARead(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 4})
	g := gate.New(db.Pool, nil)
	_, err := db.Pool.Exec(t.Context(), `select syncpg.sync_open_partition('p1', 'old', 0)`)
	require.NoError(t, err)
	for name, forget := range map[string]func(){"one": func() { g.Forget("p1") }, "all": g.ForgetAll} {
		_, err := db.Pool.Exec(t.Context(), `update syncpg.sync_partition_registry set log_epoch = 'old', last_seen_ms = 0`)
		require.NoError(t, err)
		g.ForgetAll()
		// The read of the epoch waits for this row, which it refreshes.
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `select from syncpg.sync_partition_registry for update`)
		require.NoError(t, err)
		read := make(chan gate.Epoch, 1)
		go func() {
			e, _ := g.Enter(t.Context(), "p1")
			read <- e
		}()
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), db.Pool, 1))
		forget()
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, "old", (<-read).LogEpoch)
		_, err = db.Pool.Exec(t.Context(), `update syncpg.sync_partition_registry set log_epoch = 'new'`)
		require.NoError(t, err)
		e, err := g.Enter(t.Context(), "p1")
		require.NoError(t, err)
		require.Equal(t, "new", e.LogEpoch, name)
	}
}

// TestEnterDuringABump: a partition that is known is entered while the schema is moved, and
// one that is new is refused: it would wait with its connection.
func TestEnterDuringABump(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 4})
	g := gate.New(db.Pool, nil)
	known, err := g.Enter(t.Context(), "known")
	require.NoError(t, err)
	g.ForgetAll()
	bump, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = bump.Rollback(context.WithoutCancel(t.Context())) }()
	for _, sql := range []string{`select pg_advisory_xact_lock(1937337955, 2)`, `lock table syncpg.sync_partitions in exclusive mode`} {
		_, err = bump.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e, err := g.Enter(ctx, "known")
	require.NoError(t, err)
	require.Equal(t, known, e)
	_, err = g.Enter(ctx, "new")
	require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(err), "%v", err)
	require.NoError(t, bump.Rollback(t.Context()))
	_, err = g.Enter(t.Context(), "new")
	require.NoError(t, err)
}
