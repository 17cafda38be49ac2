package pullsvc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// TestRecord: the record keeps the least cursor of the active subscriptions (§4.5),
// the subscription list and the wire version (§8.1).
func TestRecord(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 6 {
		b.commit(t, item("i", "x", ""), item("j", "y", ""))
	}
	b.prune(t, 2)
	bootstrapping := sub("t", "items", 4, project("x"))
	bootstrapping.BootstrapState = token(3, "items", nil)
	for _, tc := range []struct {
		name   string
		limit  int32
		subs   []ssp2.Subscription
		cursor *int64
	}{
		{"a window that is read to its end", 0, []ssp2.Subscription{sub("a", "items", 3, project("x"))}, new(int64(6))},
		{"the least of several windows", 1, []ssp2.Subscription{sub("a", "items", 3, project("x")), sub("b", "items", 5, project("x"))}, new(int64(4))},
		{"a fresh bootstrap counts with its pin", 1, []ssp2.Subscription{sub("a", "items", -1, project("x"))}, new(int64(6))},
		{"a resumed bootstrap counts with its pin", 1, []ssp2.Subscription{sub("a", "items", 5, project("x")), bootstrapping}, new(int64(3))},
		{"a client from the future counts with the pin it gets", 0, []ssp2.Subscription{sub("a", "items", 99, project("x"))}, new(int64(6))},
		{"reset and revoked ones do not count", 0, []ssp2.Subscription{sub("a", "items", 1, project("x")), sub("b", "items", 5, ssp2.ScopeMap{}), sub("c", "items", 6, project("x"))}, new(int64(6))},
		{"none is active", 0, []ssp2.Subscription{sub("a", "items", 1, project("x")), sub("b", "items", 5, ssp2.ScopeMap{})}, nil},
		{"no subscription at all", 0, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			req := request(tc.subs...)
			req.ClientID, req.Header.LimitCommits = t.Name(), tc.limit
			b.pull(t, req)
			got := b.record(t, req.ClientID)
			require.Equal(t, "alice", got.Actor)
			require.Equal(t, new(int16(2)), got.Wire)
			require.Equal(t, tc.cursor, got.Cursor)
			require.Equal(t, b.now.UnixMilli(), got.Updated)
			var list []struct {
				ID, Table string
				Scopes    ssp2.ScopeMap
			}
			require.NoError(t, json.Unmarshal([]byte(*got.Subscriptions), &list))
			require.Len(t, list, len(tc.subs))
			for i, s := range tc.subs {
				require.Equal(t, s.ID, list[i].ID)
				require.Equal(t, s.Table, list[i].Table)
				require.Empty(t, cmp.Diff(s.Scopes, list[i].Scopes))
			}
		})
	}
}

// TestRecordOnChange: the record is written when it changes or is a minute old;
// what only moves cursor and time does not wait for the disk.
func TestRecordOnChange(t *testing.T) {
	t.Parallel()
	listed := 0
	b := setup(t, func(_ *pgtest.Options, cfg *pullsvc.Config) {
		cfg.Listed = func(_, clientID string, version int32) {
			require.Equal(t, []any{"c1", cfg.Schema.Version}, []any{clientID, version})
			listed++
		}
	})
	for _, sql := range []string{
		`create table public.written (synchronous_commit text)`,
		`create function public.note_written() returns trigger language plpgsql as $$
		begin insert into public.written values (current_setting('synchronous_commit')); return null; end $$`,
		`create trigger note_written after insert or update on syncpg.sync_clients for each row execute function public.note_written()`,
	} {
		_, err := b.db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	first := sub("a", "items", 0, project("x"))
	second := sub("b", "items", 0, project("x", "y"))
	v3 := func(r *pullsvc.Request) { r.WireVersion = ssp2.WireV3 }
	for _, step := range []struct {
		name    string
		before  func()
		subs    []ssp2.Subscription
		edit    func(*pullsvc.Request)
		written string // "", relaxed or durable
	}{
		{"a new client", nil, []ssp2.Subscription{first}, nil, "durable"},
		{"the same again", nil, []ssp2.Subscription{first}, nil, ""},
		{"just under a minute later", func() { b.now = b.now.Add(time.Minute - time.Millisecond) }, []ssp2.Subscription{first}, nil, ""},
		{"a minute later", func() { b.now = b.now.Add(time.Millisecond) }, []ssp2.Subscription{first}, nil, "relaxed"},
		{"the cursor moves", func() { b.commit(t, item("i", "other", "")) }, []ssp2.Subscription{first}, nil, "relaxed"},
		{"the same again", nil, []ssp2.Subscription{first}, nil, ""},
		{"a subscription more", nil, []ssp2.Subscription{first, second}, nil, "durable"},
		{"in another order", nil, []ssp2.Subscription{second, first}, nil, "durable"},
		{"its scopes spelled in another order", nil, []ssp2.Subscription{sub("b", "items", 0, project("y", "x")), first}, nil, ""},
		{"a subscription less", nil, []ssp2.Subscription{first}, nil, "durable"},
		{"another wire version", nil, []ssp2.Subscription{first}, v3, "durable"},
		{"the same again", nil, []ssp2.Subscription{first}, v3, ""},
	} {
		if step.before != nil {
			step.before()
		}
		req := request(step.subs...)
		if step.edit != nil {
			step.edit(&req)
		}
		before, lists := b.record(t, "c1"), listed
		b.counter.Reset()
		p, err := b.Begin(t.Context(), req)
		require.NoError(t, err, step.name)
		p.Close()
		wrote := b.counter.Autocommits()
		after := b.record(t, "c1")
		require.Equal(t, step.written == "durable", listed > lists, "%s: who asks is told of another list", step.name)
		if step.written == "" {
			require.Zero(t, wrote, step.name)
			require.Equal(t, before, after, step.name)
			continue
		}
		require.Equal(t, 1, wrote, step.name)
		require.Equal(t, b.now.UnixMilli(), after.Updated, step.name)
		var setting string
		require.NoError(t, b.db.Pool.QueryRow(t.Context(), `delete from public.written returning synchronous_commit`).Scan(&setting), step.name)
		require.Equal(t, map[string]string{"relaxed": "off", "durable": "on"}[step.written], setting, step.name)
		require.Equal(t, step.written == "durable", before == nil || *before.Subscriptions != *after.Subscriptions || *before.Wire != *after.Wire, step.name)
	}
}

// TestRecordRelaxed: the relaxed form turns synchronous_commit off for its own
// transaction only.
func TestRecordRelaxed(t *testing.T) {
	t.Parallel()
	tx := pgtest.Tx(t)
	var inside string
	for _, relaxed := range []bool{false, true} {
		nested, err := tx.Begin(t.Context())
		require.NoError(t, err)
		_, err = nested.Exec(t.Context(), `select syncpg.sync_open_partition('p', 'e', 0)`)
		require.NoError(t, err)
		_, err = nested.Exec(t.Context(), `select syncpg.sync_record_client('p', 'e', 'c', 'a', 2::smallint, 1, '[]', 0, $1)`, relaxed)
		require.NoError(t, err)
		require.NoError(t, nested.QueryRow(t.Context(), `show synchronous_commit`).Scan(&inside))
		require.Equal(t, relaxed, inside == "off")
		require.NoError(t, nested.Rollback(t.Context()))
	}
}

// TestClientOfAnotherActor: a client id belongs to its first actor (§1.5).
func TestClientOfAnotherActor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("i", "x", ""))
	req := request(sub("s", "items", 0, project("x")))
	b.pull(t, req)
	before := b.record(t, "c1")
	req.Actor = "mallory"
	for _, later := range []time.Duration{0, time.Hour} { // at once there would be nothing to record
		b.now = b.now.Add(later)
		_, err := b.Begin(t.Context(), req)
		require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(err))
		require.Equal(t, before, b.record(t, "c1"))
	}

	// Both are new at the same time: the one that records first has it.
	blocker, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = blocker.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = blocker.Exec(t.Context(), `select syncpg.sync_record_client($1, 'epoch-1', 'c2', 'alice', 2::smallint, null, '[]', 0, false)`, partition)
	require.NoError(t, err)
	req.ClientID = "c2"
	failed := make(chan error)
	go func() {
		_, err := b.Begin(t.Context(), req)
		failed <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	require.NoError(t, blocker.Commit(t.Context()))
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(<-failed))
	kept := b.record(t, "c2")
	require.Equal(t, "alice", kept.Actor)
	require.Nil(t, kept.Cursor, "nothing of the other's pull is recorded")
	require.Equal(t, "[]", *kept.Subscriptions)
}

// TestNoRecordOfAnEpochThatIsOver: a rotation deletes what pulls have left of their clients
// (§2.1). A pull that was read before it leaves nothing behind it, whether its client was known
// or is new, and whatever isolation level sessions default to.
func TestNoRecordOfAnEpochThatIsOver(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read"} {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprint(level, ", known ", known), func(t *testing.T) {
				t.Parallel()
				b := setup(t, withDatabase(func(o *pgtest.Options) {
					o.Configure = func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level }
				}))
				req := request(sub("s", "items", 0, project("x")))
				if known {
					b.pull(t, req)
					b.commit(t, item("i", "x", ""))
				}
				rotation, err := b.db.Pool.Begin(t.Context())
				require.NoError(t, err)
				defer func() { _ = rotation.Rollback(context.WithoutCancel(t.Context())) }()
				_, err = rotation.Exec(t.Context(), `select syncpg.sync_rotate_epoch($1)`, partition)
				require.NoError(t, err)
				ended := make(chan error, 1)
				go func() {
					p, err := b.Begin(t.Context(), req)
					if err == nil {
						p.Close()
					}
					ended <- err
				}()
				require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
				require.NoError(t, rotation.Commit(t.Context()))
				require.Equal(t, ssp2.CodeStorageStaleRead, ssp2.CodeOf(<-ended))
				if kept := b.record(t, "c1"); known {
					require.Nil(t, kept.Cursor)
					require.Nil(t, kept.Subscriptions)
				} else {
					require.Nil(t, kept)
				}
				p, err := b.Begin(t.Context(), req)
				require.NoError(t, err)
				require.True(t, p.Reset)
			})
		}
	}
}

// TestRecordAtOnce: two pulls of one client at the same time both succeed, whatever
// isolation level sessions default to.
func TestRecordAtOnce(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			b := setup(t, withDatabase(func(o *pgtest.Options) {
				o.Configure = func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level }
			}))
			req := request(sub("s", "items", 0, project("x")))
			b.pull(t, req)
			b.commit(t, item("i", "x", ""))
			other, err := b.db.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }()
			_, err = other.Exec(t.Context(), `select syncpg.sync_record_client($1, 'epoch-1', 'c1', 'alice', 2::smallint, 0, null, 0, false)`, partition)
			require.NoError(t, err)
			ended := make(chan error)
			go func() {
				_, err := b.Begin(t.Context(), req)
				ended <- err
			}()
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
			require.NoError(t, other.Commit(t.Context()))
			require.NoError(t, <-ended)
			require.Equal(t, new(int64(1)), b.record(t, "c1").Cursor)
		})
	}
}

// TestEpoch: a request whose epoch is not the partition's is told to reset, and
// wire version 1 is refused once an epoch was rotated (§2.1).
func TestEpoch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("i", "x", ""))
	req := request(sub("s", "items", 0, project("x")))
	v1 := req
	v1.WireVersion, v1.LogEpoch, v1.ClientID = ssp2.WireV1, nil, "old"
	require.Len(t, b.pull(t, v1)[0].Commits, 1)

	none, other := req, req
	none.LogEpoch, other.LogEpoch = nil, new("epoch-0")
	for _, req := range []pullsvc.Request{none, other} {
		p, err := b.Begin(t.Context(), req)
		require.NoError(t, err)
		require.True(t, p.Reset)
		require.Equal(t, epoch, p.LogEpoch)
		require.Empty(t, collect(t, p))
		p.Close()
		require.Nil(t, b.record(t, "c1"))
	}

	b.exec(t, `update syncpg.sync_partition_registry set log_epoch = 'epoch-2', epoch_required = true`)
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	require.True(t, p.Reset)
	require.Equal(t, "epoch-2", p.LogEpoch)
	_, err = b.Begin(t.Context(), v1)
	require.Equal(t, ssp2.CodeClientWireUnsupported, ssp2.CodeOf(err))
	req.LogEpoch = new("epoch-2")
	require.Len(t, b.pull(t, req)[0].Commits, 1)
}

// TestEpochNoted: what a pull reads of the epoch is what the gate then says.
func TestEpochNoted(t *testing.T) {
	t.Parallel()
	var g *gate.Gate
	b := setup(t)
	g = gate.New(b.db.Pool, func() time.Time { return b.now })
	s, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Gate: g, Clock: func() time.Time { return b.now }})
	require.NoError(t, err)
	_, err = g.Enter(t.Context(), partition)
	require.NoError(t, err)
	b.exec(t, `update syncpg.sync_partition_registry set log_epoch = 'epoch-2', epoch_required = true`)
	p, err := s.Begin(t.Context(), request(sub("s", "items", 0, project("x"))))
	require.NoError(t, err)
	require.True(t, p.Reset)
	e, err := g.Enter(t.Context(), partition)
	require.NoError(t, err)
	require.Equal(t, gate.Epoch{LogEpoch: "epoch-2", Required: true}, e)
}

// TestNewPartition: a partition that nobody has opened yet is created.
func TestNewPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	req := request(sub("s", "items", -1, project("x")))
	req.Partition = "fresh"
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	require.True(t, p.Reset)
	require.NotEmpty(t, p.LogEpoch)
	req.LogEpoch = &p.LogEpoch
	require.Equal(t, int64(0), b.pull(t, req)[0].End.NextCursor)
}

// TestServeGate: a database of another schema version, or with a projection that is
// not activated, serves nothing (SEMANTICS §2).
func TestServeGate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	req := request(sub("s", "items", 0, project("x")))
	b.exec(t, `insert into syncpg.sync_backfill_checkpoints (partition, name, schema_version, state, updated_at_ms) values
		($1, 'late', 3, 'backfilling', 0), ($1, 'done', 3, 'activated', 0), ($1, 'next', 4, 'declared', 0), ('other', 'early', 3, 'declared', 0)`, partition)
	_, err := b.Begin(t.Context(), req)
	require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(err))
	require.Contains(t, details(t, err), "late")
	b.exec(t, `update syncpg.sync_backfill_checkpoints set state = 'activated' where name = 'late'`)
	b.pull(t, req)
	b.exec(t, `update syncpg.sync_schema_meta set schema_version = 4`)
	_, err = b.Begin(t.Context(), req)
	require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(err))
	require.Contains(t, details(t, err), "4")
}

func details(t *testing.T, err error) string {
	t.Helper()
	var e *ssp2.Error
	require.ErrorAs(t, err, &e)
	return e.Details
}

// TestStaleRead: a database behind the push of the same request, or behind itself,
// does not answer (SEMANTICS §3).
func TestStaleRead(t *testing.T) {
	t.Parallel()
	b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = 1 }))
	b.commit(t, item("i", "x", ""))
	b.commit(t, item("i", "x", ""))
	req := request(sub("s", "items", 0, project("x")), sub("t", "items", 0, project("x")))
	req.AfterSeq = 2
	b.pull(t, req)
	req.AfterSeq = 3
	_, err := b.Begin(t.Context(), req)
	require.Equal(t, ssp2.CodeStorageStaleRead, ssp2.CodeOf(err))

	req.AfterSeq = 0
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	defer p.Close()
	b.exec(t, `update syncpg.sync_partitions set max_commit_seq = 1`)
	err = p.Stream(t.Context(), func([]byte) error { return nil })
	require.Equal(t, ssp2.CodeStorageStaleRead, ssp2.CodeOf(err))
}

// TestAChainIsNotReadFromBeforeItsPin: neither what is built for several nor what one of them
// reads on its own behind that comes from a database that is behind the pin, since its client
// would never be sent what is missing.
func TestAChainIsNotReadFromBeforeItsPin(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, _ := shared(t)
		b.fill(t, "x", 2500)
		b.commit(t, item("late", "x", ""))
		p, err := b.Begin(t.Context(), bootstrapping("c1", accept, 1000))
		require.NoError(t, err)
		defer p.Close()
		b.exec(t, `update syncpg.sync_partitions set max_commit_seq = 1`)
		if accept == imageLane { // pages stand in for the image, at a pin of their own
			require.Equal(t, int64(1), decode(t, bootstrapping("c1", accept, 1000), collect(t, p))[0].End.NextCursor)
			return
		}
		err = p.Stream(t.Context(), func([]byte) error { return nil })
		require.Equal(t, ssp2.CodeStorageStaleRead, ssp2.CodeOf(err))
	})
	t.Run("behind a newer chain", func(t *testing.T) {
		t.Parallel()
		b, _ := shared(t, with(func(c *pullsvc.Config) { c.BufferBytes = 96 << 10 }))
		b.fill(t, "x", 2500)
		req := bootstrapping("c1", rowsLane, 1000)
		req.Header.MaxSnapshotPages = 1
		b.pull(t, req) // so that the scope is known to be large
		p, err := b.Begin(t.Context(), bootstrapping("c2", rowsLane, 1000))
		require.NoError(t, err)
		defer p.Close()
		req.AfterSeq = b.commit(t, item("late", "x", ""))
		b.pull(t, req)
		b.exec(t, `update syncpg.sync_partitions set max_commit_seq = 1`)
		err = p.Stream(t.Context(), func([]byte) error { return nil })
		require.Equal(t, ssp2.CodeStorageStaleRead, ssp2.CodeOf(err))
	})
}

// TestChangesDuringStream: what is read after the first byte is judged by the gate
// as it is then.
func TestChangesDuringStream(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		meddle func(b *bundle)
		code   ssp2.Code
		check  func(t *testing.T, got []section)
	}{
		{"a new commit: a bootstrap keeps the pin it began with", func(b *bundle) { b.commit(t, item("k", "x", "")) }, "", func(t *testing.T, got []section) {
			require.Equal(t, int64(2), got[2].End.NextCursor)
			require.Len(t, got[2].Segments, 3) // rows newer than the pin do no harm: their commits follow
			require.Equal(t, int64(3), got[3].End.NextCursor)
			require.Len(t, got[3].Segments, 3)
		}},
		{"the horizon passes the cursor: reset, never a gap", func(b *bundle) { b.prune(t, 2) }, "", func(t *testing.T, got []section) {
			require.Equal(t, ssp2.SubReset, got[1].Start.Status)
			require.Equal(t, int64(0), got[1].End.NextCursor)
		}},
		{"the log is replaced", func(b *bundle) { b.exec(t, `update syncpg.sync_partition_registry set log_epoch = 'e2'`) }, ssp2.CodeStorageStaleRead, nil},
		{"the schema is replaced", func(b *bundle) { b.exec(t, `update syncpg.sync_schema_meta set schema_version = 9`) }, ssp2.CodeSchemaNotReady, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = 1 }))
			b.commit(t, item("i", "x", ""))
			b.commit(t, item("j", "x", ""))
			req := request(sub("a", "items", 0, project("x")), sub("b", "items", 0, project("x")),
				sub("c", "items", -1, project("x", "only")), sub("d", "items", -1, project("x")))
			p, err := b.Begin(t.Context(), req)
			require.NoError(t, err)
			defer p.Close()
			tc.meddle(b)
			var frames []byte
			err = p.Stream(t.Context(), func(piece []byte) error { frames = append(frames, piece...); return nil })
			require.Equal(t, tc.code, ssp2.CodeOf(err))
			if tc.check != nil {
				require.NoError(t, err)
				tc.check(t, decode(t, req, frames))
			}
		})
	}
}

// TestScanRequiresScope: the functions that scan by scope refuse to do it without
// (SEMANTICS §3).
func TestScanRequiresScope(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, doc("d", "o", 1))
	for _, scopes := range []string{`{}`, `{"org":[]}`, `{"org":["o"],"folderId":[]}`, `{"folderId":[],"org":["o"]}`} {
		_, err := b.db.Pool.Exec(t.Context(), `select * from syncpg.sync_read_windows($1, '{docs}', array[$2], '{0}', 10, 1000, 1000)`, partition, scopes)
		require.ErrorContains(t, err, "SY005", scopes)
		_, err = b.db.Pool.Exec(t.Context(), `select * from syncpg.sync_scan_rows($1, '{docs}', array[$2], array[null::bigint], '{1}', '{""}', 10, 1000, 1000)`, partition, scopes)
		require.ErrorContains(t, err, "SY005", scopes)
	}
	for table, scopes := range map[string]string{"docs": `{"org":["o"],"project":["x"]}`, "items": `{"org":["o"]}`} {
		_, err := b.db.Pool.Exec(t.Context(), `select * from syncpg.sync_scan_rows($1, array[$2], array[$3], array[null::bigint], '{1}', '{""}', 10, 1000, 1000)`, partition, table, scopes)
		require.ErrorContains(t, err, "SY005", "a variable of another table must not widen the scan")
	}
}
