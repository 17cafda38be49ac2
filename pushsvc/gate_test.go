package pushsvc_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// failure pushes a request that must fail as a whole.
func (c *client) failure(t testing.TB, commits ...ssp2.PushCommit) *ssp2.Error {
	t.Helper()
	resp, err := c.b.Push(t.Context(), c.request(commits...))
	require.Nil(t, resp)
	var perr *ssp2.Error
	require.ErrorAs(t, err, &perr)
	return perr
}

// refused pushes a request that must fail as a whole with this code.
func (c *client) refused(t testing.TB, code ssp2.Code, commits ...ssp2.PushCommit) {
	t.Helper()
	require.Equal(t, code, c.failure(t, commits...).Code)
}

// contents counts what the partition has besides its registration.
func (c *client) contents(t testing.TB) int {
	t.Helper()
	return scalar[int](t, c.b, `
		select (select count(*) from syncpg.sync_commits where partition = $1) + (select count(*) from syncpg.sync_changes where partition = $1)
		     + (select count(*) from syncpg.sync_push_results where partition = $1) + (select count(*) from syncpg.sync_clients where partition = $1)
		     + (select count(*) from syncpg.sync_tombstones where partition = $1) + (select count(*) from public.notes where _sync_partition = $1)
		     + (select max_commit_seq from syncpg.sync_partitions where partition = $1)`, c.req.Partition)
}

// TestClientBinding: a client belongs to its first actor within a partition (§1.5).
func TestClientBinding(t *testing.T) {
	t.Parallel()
	b := shared(t)
	bob := func(c *client) *client { return c.with(func(r *pushsvc.Request) { r.Actor = "bob" }) }
	for _, tc := range []struct {
		name  string
		first func(t *testing.T, c *client) ssp2.PushCommit
	}{
		{"bound by an applied commit", func(t *testing.T, c *client) ssp2.PushCommit {
			k := c.commit(b.upsert(t, "notes", note("n", "a")))
			requireApplied(t, c.send(t, k)...)
			return k
		}},
		{"bound by a rejected commit", func(t *testing.T, c *client) ssp2.PushCommit {
			k := c.commit(base(b.upsert(t, "notes", note("n", "a")), 3))
			requireRejected(t, c.send(t, k)[0], 0, ssp2.CodeRowMissing)
			return k
		}},
		{"bound by a commit the database refused", func(t *testing.T, c *client) ssp2.PushCommit {
			k := c.commit(b.upsert(t, "notes", changed(note("n", "a"), map[string]any{"meta": `"\u0000"`})))
			requireRejected(t, c.send(t, k)[0], 0, ssp2.CodeConstraintViolation)
			return k
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			known := tc.first(t, c)
			before := c.contents(t)
			bob(c).refused(t, ssp2.CodeInvalidClientID, c.commit(b.upsert(t, "notes", note("m", "a"))))
			bob(c).refused(t, ssp2.CodeInvalidClientID, known) // nor is an outcome told
			require.Equal(t, before, c.contents(t))

			requireApplied(t, c.push(t, b.upsert(t, "notes", note("m", "a"))))
			other := bob(c).with(func(r *pushsvc.Request) { r.ClientID = "c2" })
			requireApplied(t, other.push(t, b.upsert(t, "notes", note("m", "b"))))
		})
	}
	t.Run("another partition is another client", func(t *testing.T) {
		t.Parallel()
		requireApplied(t, bob(b.client(t, ssp2.WireV2)).push(t, b.upsert(t, "notes", note("m", "a"))))
	})
}

// TestClientAndCommitIDs: what cannot be a key, and what is reserved.
//
//nolint:paralleltest // the cases share a client
func TestClientAndCommitIDs(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	op := b.upsert(t, "notes", note("n", "a"))
	for name, id := range map[string]string{
		"reserved": `["remote-command","x"]`, "reserved prefix": `["remote-command",`, "empty": "", "U+0000": "a\x00", "too long": strings.Repeat("x", 513),
	} {
		t.Run("client/"+name, func(t *testing.T) {
			other := c.with(func(r *pushsvc.Request) { r.ClientID = id })
			other.refused(t, ssp2.CodeInvalidClientID, c.commit(op))
			require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(b.Validate(other.request())))
		})
	}
	for name, id := range map[string]string{"empty": "", "U+0000": "a\x00", "too long": strings.Repeat("x", 513)} {
		t.Run("commit/"+name, func(t *testing.T) {
			for range 2 {
				requireRejected(t, c.send(t, commit(id, op))[0], 0, ssp2.CodeInvalidRequest)
			}
		})
	}
	require.Zero(t, c.contents(t))

	longest := strings.Repeat("😀", 128)
	for _, id := range []string{longest, `["remote-commands"]`, "ünï \" \\ {} '", strings.Repeat("x", 512)} {
		other := c.with(func(r *pushsvc.Request) { r.ClientID = id })
		k := commit(id, op)
		requireApplied(t, other.send(t, k)[0])
		require.Equal(t, ssp2.PushCached, other.send(t, k)[0].Status)
	}
}

// TestOperationCap counts the operations of all commits (§6.1).
func TestOperationCap(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ *pgtest.Options, c *pushsvc.Config) { c.MaxOperations = 5 })
	c := b.client(t, ssp2.WireV2)
	ops := func(n int) []ssp2.Operation {
		list := make([]ssp2.Operation, n)
		for i := range list {
			list[i] = b.upsert(t, "notes", note("n", "a"))
		}
		return list
	}
	known := c.commit(ops(3)...)
	requireApplied(t, c.send(t, known)...)
	before := c.contents(t)
	c.refused(t, ssp2.CodeEmptyCommit, c.commit(ops(2)...), c.commit())
	c.refused(t, ssp2.CodeTooManyOperations, c.commit(ops(6)...))
	c.refused(t, ssp2.CodeTooManyOperations, known, c.commit(ops(3)...))
	require.Equal(t, before, c.contents(t))
	requireApplied(t, c.send(t, c.commit(ops(2)...), c.commit(ops(3)...))...)
}

// rotate replaces the partition's log epoch, as an operator does after a restore.
func (c *client) rotate(t testing.TB, epoch string) {
	t.Helper()
	_, err := c.b.db.Pool.Exec(t.Context(), `update syncpg.sync_partition_registry set log_epoch = $2, epoch_required = true where partition = $1`, c.req.Partition, epoch)
	require.NoError(t, err)
}

// TestLogEpoch (§2.1): an absent or different epoch resets and does nothing else;
// version 1, which has none, is refused once the epoch has been rotated. Whether the
// process remembers the right epoch, an old one or none makes no difference.
func TestLogEpoch(t *testing.T) {
	t.Parallel()
	b := shared(t)
	const matching, absent, different = "matching", "absent", "different"
	for _, tc := range []struct {
		name    string
		epoch   string
		rotated bool
		wire    []ssp2.WireVersion
		reset   bool
		code    ssp2.Code
	}{
		{"matching", matching, false, []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3}, false, ""},
		{"absent", absent, false, []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3}, true, ""},
		{"different", different, false, []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3}, true, ""},
		{"version 1 has none", absent, false, []ssp2.WireVersion{ssp2.WireV1}, false, ""},
		{"rotated", matching, true, []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3}, true, ""},
		{"rotated, version 1", absent, true, []ssp2.WireVersion{ssp2.WireV1}, false, ssp2.CodeClientWireUnsupported},
	} {
		for _, wire := range tc.wire {
			for _, remembered := range []bool{true, false} {
				t.Run(tc.name+"/"+string('0'+rune(wire))+map[bool]string{true: "/remembered", false: "/cold"}[remembered], func(t *testing.T) {
					t.Parallel()
					c := b.client(t, wire)
					want := *c.req.LogEpoch
					if tc.rotated {
						want = "rotated " + t.Name()
						c.rotate(t, want)
					}
					switch tc.epoch {
					case absent:
						c.req.LogEpoch = nil
					case different:
						c.req.LogEpoch = new("another")
					}
					push := b.Push
					if !remembered {
						cold, err := pushsvc.New(b.db.Pool, pushsvc.Config{Schema: b.schema})
						require.NoError(t, err)
						push = cold.Push
					}
					op := b.upsert(t, "notes", note("n", "a"))
					if wire == ssp2.WireV3 {
						op = b.patch(t, "notes", fullNote("n", "a"))
					}
					resp, err := push(t.Context(), c.request(c.commit(op)))
					if tc.code != "" {
						require.Equal(t, tc.code, ssp2.CodeOf(err))
					} else {
						require.NoError(t, err)
						require.Equal(t, tc.reset, resp.Reset)
					}
					if !tc.reset && tc.code == "" {
						requireApplied(t, resp.Results...)
						return
					}
					if tc.reset {
						require.Equal(t, &pushsvc.Response{Reset: true, LogEpoch: want}, resp)
					}
					require.Zero(t, c.contents(t))
				})
			}
		}
	}
}

// TestLogEpochOfReplays: known outcomes are not told across a rotation either, and
// the epoch that was read under way is remembered.
func TestLogEpochOfReplays(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	known := c.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, c.send(t, known)...)
	c.rotate(t, "next")
	for range 2 {
		resp, err := b.Push(t.Context(), c.request(known))
		require.NoError(t, err)
		require.Equal(t, &pushsvc.Response{Reset: true, LogEpoch: "next"}, resp)
	}
	c.req.LogEpoch = new("next")
	require.Equal(t, ssp2.PushCached, c.send(t, known)[0].Status)
}

// TestPartitionGone: a partition that is removed while a process remembers it comes
// back as a new one, with a new epoch.
func TestPartitionGone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	b.exec(t, `delete from syncpg.sync_partitions`, `delete from syncpg.sync_partition_registry`)
	resp, err := b.Push(t.Context(), c.request(c.commit(b.upsert(t, "notes", note("n", "a")))))
	require.NoError(t, err)
	require.True(t, resp.Reset)
	require.NotEqual(t, *c.req.LogEpoch, resp.LogEpoch)
	c.req.LogEpoch = &resp.LogEpoch
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "a"))))
}

// TestServeGate: another installed version, or a backfill of this one that is not
// activated, closes the gate to every push, replays included; nothing is written.
//
//nolint:paralleltest // the cases change the whole database
func TestServeGate(t *testing.T) {
	t.Parallel()
	checkpoint := func(version, state string) string {
		return `insert into syncpg.sync_backfill_checkpoints (partition, name, schema_version, state, updated_at_ms)
			values ('TestServeGate', 'by_title', ` + version + `, '` + state + `', 0)`
	}
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	c.req.Partition = t.Name()
	known := c.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, c.send(t, known)...)
	open := []string{`update syncpg.sync_schema_meta set schema_version = 1`, `delete from syncpg.sync_backfill_checkpoints`}
	for _, tc := range []struct {
		name    string
		host    string
		details string // "": open
	}{
		{"a newer schema", `update syncpg.sync_schema_meta set schema_version = 2`, `{"installedVersion":2,"runningVersion":1}`},
		{"no schema", `delete from syncpg.sync_schema_meta`, `{"installedVersion":0,"runningVersion":1}`},
		{"declared", checkpoint("1", "declared"), `{"projection":"by_title"}`},
		{"backfilling", checkpoint("1", "backfilling"), `{"projection":"by_title"}`},
		{"activated", checkpoint("1", "activated"), ""},
		{"of another version", checkpoint("2", "declared"), ""},
		{"of another partition", `insert into syncpg.sync_backfill_checkpoints (partition, name, schema_version, state, updated_at_ms) values ('other', 'x', 1, 'declared', 0)`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			meta := scalar[string](t, b, `select to_jsonb(m)::text from syncpg.sync_schema_meta as m`)
			b.exec(t, tc.host)
			if tc.details == "" {
				requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "b"))))
			} else {
				before := c.contents(t)
				for _, k := range []ssp2.PushCommit{c.commit(b.upsert(t, "notes", note("m", "x"))), c.commit(remove("notes", "n")), known} {
					perr := c.failure(t, k)
					require.Equal(t, ssp2.CodeSchemaNotReady, perr.Code)
					require.True(t, perr.Retryable())
					require.Equal(t, 503, perr.HTTPStatus())
					require.JSONEq(t, tc.details, perr.Details)
				}
				require.Equal(t, before, c.contents(t))
			}
			b.exec(t, open...)
			_, err := b.db.Pool.Exec(t.Context(), `insert into syncpg.sync_schema_meta select * from jsonb_populate_record(null::syncpg.sync_schema_meta, $1::jsonb) on conflict do nothing`, meta)
			require.NoError(t, err)
		})
	}
}

// TestWriterFence: a writer below the fence appends nothing; replays and rejections
// append nothing anyway.
func TestWriterFence(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	fence := func(version string) string {
		return `insert into syncpg.sync_writer_fence (partition, required_writer_version) values ('` + c.req.Partition + `', ` + version + `)
			on conflict (partition) do update set required_writer_version = excluded.required_writer_version`
	}
	known := c.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, c.send(t, known)...)
	b.exec(t, fence("1"))
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "b"))))

	b.exec(t, fence("2"))
	before := c.contents(t)
	c.refused(t, ssp2.CodeStorageWriterFenceRejected, c.commit(b.upsert(t, "notes", note("n", "c"))))
	c.refused(t, ssp2.CodeStorageWriterFenceRejected, c.commit(base(b.upsert(t, "notes", note("n", "c")), 9)), c.commit(remove("notes", "n")))
	require.Equal(t, before, c.contents(t))
	require.Equal(t, ssp2.PushCached, c.send(t, known)[0].Status)
	requireRejected(t, c.push(t, base(b.upsert(t, "notes", note("n", "c")), 9)), 0, ssp2.CodeVersionConflict)

	b.exec(t, `delete from syncpg.sync_writer_fence where partition = '`+c.req.Partition+`'`)
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "c"))))
}

// TestLastSeen: pushes refresh the partition's last-seen time, at most once a minute
// (§2.1).
func TestLastSeen(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	start := b.now
	for _, tc := range []struct{ after, want time.Duration }{
		{0, 0}, {59 * time.Second, 0}, {61 * time.Second, 61 * time.Second}, {100 * time.Second, 61 * time.Second}, {time.Hour, time.Hour},
	} {
		b.now = start.Add(tc.after)
		c.apply(t, b.upsert(t, "notes", note("n", "a")))
		require.Equal(t, start.Add(tc.want).UnixMilli(), scalar[int64](t, b, `select last_seen_ms from syncpg.sync_partition_registry where partition = $1`, t.Name()))
	}
}

// TestNew refuses a configuration that cannot work.
func TestNew(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for name, f := range map[string]func() (*pushsvc.Service, error){
		"no pool":   func() (*pushsvc.Service, error) { return pushsvc.New(nil, pushsvc.Config{Schema: b.schema}) },
		"no schema": func() (*pushsvc.Service, error) { return pushsvc.New(b.db.Pool, pushsvc.Config{}) },
		"negative cap": func() (*pushsvc.Service, error) {
			return pushsvc.New(b.db.Pool, pushsvc.Config{Schema: b.schema, MaxOperations: -1})
		},
	} {
		_, err := f()
		require.Error(t, err, name)
	}
	shared := gate.New(b.db.Pool, nil)
	s, err := pushsvc.New(b.db.Pool, pushsvc.Config{Schema: b.schema, Gate: shared})
	require.NoError(t, err)
	resp, err := s.Push(t.Context(), pushsvc.Request{Partition: "p", ClientID: "c", Actor: "a", WireVersion: ssp2.WireV2})
	require.NoError(t, err)
	e, err := shared.Enter(t.Context(), "p")
	require.NoError(t, err)
	require.Equal(t, resp.LogEpoch, e.LogEpoch)
}
