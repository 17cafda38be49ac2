package pushsvc_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// step is one commit of a request and what becomes of it.
type step struct {
	ops []ssp2.Operation
	bad int // index of the refused operation; -1: applied
}

func ok(ops ...ssp2.Operation) step          { return step{ops, -1} }
func bad(at int, ops ...ssp2.Operation) step { return step{ops, at} }

// requireSteps pushes the steps in one request, then one by one into another
// partition: both must come out as the steps say.
func requireSteps(t *testing.T, b *bundle, steps ...step) {
	t.Helper()
	check := func(t *testing.T, s step, r ssp2.PushResult) {
		t.Helper()
		if s.bad < 0 {
			requireApplied(t, r)
			return
		}
		requireRejected(t, r, s.bad, ssp2.CodeConstraintViolation)
		require.Equal(t, "the database cannot hold this row", r.Results[0].Message, "nothing of the database is told")
	}
	for _, together := range []bool{true, false} {
		t.Run(map[bool]string{true: "one request", false: "a request per commit"}[together], func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			var commits []ssp2.PushCommit
			for _, s := range steps {
				commits = append(commits, c.commit(s.ops...))
			}
			if together {
				for i, r := range c.send(t, commits...) {
					check(t, steps[i], r)
				}
				return
			}
			for i, s := range steps {
				check(t, s, c.send(t, commits[i])[0])
			}
		})
	}
}

// TestHostConstraints: constraints the host adds to the app's tables reject the
// commit that breaks them and no other.
func TestHostConstraints(t *testing.T) {
	t.Parallel()
	at := func(t *testing.T, b *bundle, id, position int) ssp2.Operation {
		return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
	}
	for _, tc := range []struct {
		name  string
		host  []string
		steps func(t *testing.T, b *bundle) []step
	}{
		{
			"check",
			[]string{`alter table public.guarded add constraint small check (position < 10)`},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(at(t, b, 1, 1)), bad(1, at(t, b, 1, 2), at(t, b, 2, 10), at(t, b, 3, 11)),
					bad(0, at(t, b, 1, 10), at(t, b, 1, 3)), ok(at(t, b, 1, 3)),
				}
			},
		},
		{
			"check that looks at other rows",
			[]string{
				`create function public.room(p text) returns boolean language sql as $$ select count(*) < 2 from public.guarded where _sync_partition = p $$`,
				`alter table public.guarded add constraint room check (public.room(_sync_partition))`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					bad(2, at(t, b, 1, 1), at(t, b, 2, 2), at(t, b, 3, 3)), ok(at(t, b, 1, 1), at(t, b, 2, 2)),
					bad(0, at(t, b, 3, 3), remove("guarded", "1")), ok(remove("guarded", "1"), at(t, b, 3, 3)),
				}
			},
		},
		{
			"exclude",
			[]string{`alter table public.guarded add constraint lone exclude (_sync_partition with =, position with =)`},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(at(t, b, 1, 1), at(t, b, 2, 2)), bad(0, at(t, b, 1, 2), at(t, b, 2, 1)),
					bad(2, at(t, b, 3, 3), at(t, b, 4, 4), at(t, b, 5, 3)), ok(at(t, b, 1, 3), at(t, b, 2, 1)),
				}
			},
		},
		{
			"unique, deferred",
			[]string{`alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable initially deferred`},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(at(t, b, 1, 1), at(t, b, 2, 2), at(t, b, 3, 3)),
					ok(at(t, b, 1, 2), at(t, b, 2, 1)),                                     // swapped
					ok(at(t, b, 1, 3), at(t, b, 2, 2), at(t, b, 3, 1)),                     // rotated
					bad(0, at(t, b, 4, 1)),                                                 // taken for good
					bad(2, at(t, b, 1, 2), at(t, b, 2, 3), at(t, b, 4, 1)),                 // after a swap
					bad(0, at(t, b, 4, 1), at(t, b, 1, 2), at(t, b, 2, 3)),                 // before a swap
					bad(3, at(t, b, 1, 2), at(t, b, 5, 5), at(t, b, 2, 3), at(t, b, 6, 5)), // with an own sibling
					bad(1, at(t, b, 5, 5), at(t, b, 5, 1), at(t, b, 6, 6)),                 // the same row twice
					ok(at(t, b, 4, 1), remove("guarded", "3")),                             // given up in the end
				}
			},
		},
		{
			"unique, deferrable but immediate",
			[]string{`alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable`},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1), at(t, b, 2, 2)), bad(0, at(t, b, 1, 2), at(t, b, 2, 1)), ok(at(t, b, 1, 3), at(t, b, 2, 1))}
			},
		},
		{
			"a foreign key to a table of the host",
			[]string{
				`create table public.positions (position bigint primary key)`, `insert into public.positions values (1), (2)`,
				`alter table public.guarded add constraint known foreign key (position) references public.positions`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1)), bad(1, at(t, b, 2, 2), at(t, b, 1, 3)), bad(0, at(t, b, 1, 3), at(t, b, 1, 2)), ok(at(t, b, 1, 2))}
			},
		},
		{
			"a foreign key from a table of the host",
			[]string{
				`create table public.badges (partition text collate "C", note text collate "C", foreign key (partition, note) references public.notes)`,
				`create function public.badge() returns trigger language plpgsql as $$ begin insert into public.badges values (new._sync_partition, new._sync_row_id); return null; end $$`,
				`create trigger badge after insert on public.notes for each row when (new.title = 'keep') execute function public.badge()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(b.upsert(t, "notes", note("a", "keep")), b.upsert(t, "notes", note("b", "drop"))),
					bad(1, remove("notes", "b"), remove("notes", "a")), ok(remove("notes", "b")),
				}
			},
		},
		{
			"a foreign key between two tables",
			[]string{
				`alter table public.slugs add constraint note foreign key (_sync_partition, slug) references public.notes on delete restrict`,
			},
			func(t *testing.T, b *bundle) []step {
				child := b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1", "slug": "n"})
				parent := b.upsert(t, "notes", note("n", "a"))
				return []step{
					bad(0, child, parent), bad(0, child), ok(parent), ok(child), bad(1, parent, remove("notes", "n")),
					bad(0, remove("notes", "n"), remove("slugs", "s")), ok(remove("slugs", "s"), remove("notes", "n")), bad(0, child),
				}
			},
		},
		{
			"a foreign key between two tables, deferred",
			[]string{
				`alter table public.slugs add constraint note foreign key (_sync_partition, slug) references public.notes deferrable initially deferred`,
			},
			func(t *testing.T, b *bundle) []step {
				child := b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1", "slug": "n"})
				parent := b.upsert(t, "notes", note("n", "a"))
				return []step{bad(0, child), ok(child, parent), bad(0, remove("notes", "n")), ok(remove("notes", "n"), remove("slugs", "s")), bad(0, child)}
			},
		},
		{
			"a column of the host that must not be NULL",
			[]string{`alter table public.guarded add column owner text not null`},
			func(t *testing.T, b *bundle) []step {
				return []step{bad(0, at(t, b, 1, 1), remove("guarded", "1")), bad(1, b.upsert(t, "notes", note("n", "a")), at(t, b, 1, 1)), ok(b.upsert(t, "notes", note("n", "a")))}
			},
		},
		{
			"a column of the host with a default",
			[]string{`alter table public.guarded add column owner text not null default 'me'`},
			func(t *testing.T, b *bundle) []step { return []step{ok(at(t, b, 1, 1)), ok(at(t, b, 1, 2))} },
		},
		{
			"a generated column that fails",
			[]string{`alter table public.guarded add column share bigint generated always as (100 / position) stored`},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1)), bad(1, at(t, b, 2, 2), at(t, b, 1, 0)), bad(0, at(t, b, 1, 0), at(t, b, 1, 3)), ok(at(t, b, 1, 3))}
			},
		},
		{
			"an index on an expression that fails",
			[]string{`create index on public.guarded ((100 / position))`},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1)), bad(0, at(t, b, 1, 0), remove("guarded", "1")), ok(at(t, b, 1, 2))}
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec(t, tc.host...)
			requireSteps(t, b, tc.steps(t, b)...)
		})
	}
}

// TestHostTriggers: triggers run operation by operation, whatever the request is.
func TestHostTriggers(t *testing.T) {
	t.Parallel()
	at := func(t *testing.T, b *bundle, id, position int) ssp2.Operation {
		return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
	}
	nt := func(t *testing.T, b *bundle, id, title string) ssp2.Operation {
		return b.upsert(t, "notes", note(id, title))
	}
	const ledger = `create table public.ledger (n bigint generated always as identity, partition text, entry text)`
	for _, tc := range []struct {
		name   string
		host   []string
		steps  func(t *testing.T, b *bundle) []step
		ledger string // entries in order; "-": there is no ledger
	}{
		{
			"a row trigger that refuses",
			[]string{
				`create function public.refuse() returns trigger language plpgsql as $$ begin
					if new.position = 13 then raise exception 'secret of %', tg_table_name using errcode = 'check_violation'; end if; return new; end $$`,
				`create trigger refuse before insert or update on public.guarded for each row execute function public.refuse()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1)), bad(2, at(t, b, 1, 2), at(t, b, 2, 2), at(t, b, 3, 13), at(t, b, 4, 13)), bad(0, at(t, b, 1, 13), at(t, b, 1, 3)), ok(at(t, b, 1, 3))}
			}, "-",
		},
		{
			"a row trigger sees every state in order",
			[]string{
				ledger,
				`create function public.note_it() returns trigger language plpgsql as $$ begin
					insert into public.ledger (partition, entry) values (coalesce(new._sync_partition, old._sync_partition),
						lower(left(tg_op, 1)) || coalesce(new._sync_row_id, old._sync_row_id) || coalesce(new.position::text, '')); return null; end $$`,
				`create trigger note_it after insert or update or delete on public.guarded for each row execute function public.note_it()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(at(t, b, 1, 1), at(t, b, 1, 2), at(t, b, 2, 1)), ok(at(t, b, 1, 3), remove("guarded", "1"), at(t, b, 1, 4)),
					bad(1, at(t, b, 9, 9), nt(t, b, "p", "a\x00")), ok(remove("guarded", "2"), remove("guarded", "7")),
				}
			}, "i11 u12 i21 u13 d1 i14 d2",
		},
		{
			"a statement trigger runs once per operation",
			[]string{
				ledger,
				`create function public.note_it() returns trigger language plpgsql as $$ begin
					insert into public.ledger (partition, entry) select _sync_partition, count(*)::text from added group by 1; return null; end $$`,
				`create trigger note_it after insert on public.guarded referencing new table as added for each statement execute function public.note_it()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1), at(t, b, 2, 1)), ok(at(t, b, 3, 1))}
			}, "1 1 1",
		},
		{
			"a trigger finds the other tables as they were then",
			[]string{
				`create function public.needs_note() returns trigger language plpgsql as $$ begin
					if not exists (select from public.notes where _sync_partition = new._sync_partition and _sync_row_id = new.position::text)
					then raise exception 'no note' using errcode = 'foreign_key_violation'; end if; return new; end $$`,
				`create trigger needs_note before insert on public.guarded for each row execute function public.needs_note()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					bad(0, at(t, b, 1, 1), nt(t, b, "1", "a")), bad(0, at(t, b, 1, 1)), ok(nt(t, b, "1", "a"), at(t, b, 1, 1)),
					bad(1, remove("notes", "1"), at(t, b, 2, 1)), ok(at(t, b, 2, 1), remove("notes", "1")), bad(0, at(t, b, 3, 1)),
				}
			}, "-",
		},
		{
			"a deferred constraint trigger",
			[]string{
				`create function public.even() returns trigger language plpgsql as $$ begin
					if (select count(*) % 2 from public.guarded where _sync_partition = new._sync_partition) = 1
					then raise exception 'odd' using errcode = 'check_violation'; end if; return null; end $$`,
				`create constraint trigger even after insert on public.guarded deferrable initially deferred for each row execute function public.even()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					bad(0, at(t, b, 1, 1)), ok(at(t, b, 1, 1), at(t, b, 2, 2)), bad(2, at(t, b, 3, 3), at(t, b, 4, 4), at(t, b, 5, 5)),
					ok(at(t, b, 3, 3), nt(t, b, "n", "a"), at(t, b, 4, 4)),
				}
			}, "-",
		},
		{
			"a trigger that skips a row",
			[]string{
				`create function public.skip() returns trigger language plpgsql as $$ begin return null; end $$`,
				`create trigger skip_write before insert or update on public.guarded for each row when (new.position = 13) execute function public.skip()`,
				`create trigger skip_delete before delete on public.guarded for each row when (old.position = 1) execute function public.skip()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{
					ok(at(t, b, 1, 1), at(t, b, 2, 2)), bad(1, at(t, b, 1, 3), at(t, b, 3, 13)), bad(0, at(t, b, 1, 13)),
					bad(1, remove("guarded", "2"), remove("guarded", "1")), ok(remove("guarded", "2")),
				}
			}, "-",
		},
		{
			"tables of the app schema need no qualifier",
			[]string{
				ledger,
				`create function public.note_it() returns trigger language plpgsql as $$ begin
					insert into ledger (partition, entry) select new._sync_partition, count(*)::text from guarded where _sync_partition = new._sync_partition; return null; end $$`,
				`create trigger note_it after insert on public.guarded for each row execute function public.note_it()`,
			},
			func(t *testing.T, b *bundle) []step {
				return []step{ok(at(t, b, 1, 1)), ok(at(t, b, 2, 1), at(t, b, 3, 1))}
			}, "1 2 3",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec(t, tc.host...)
			requireSteps(t, b, tc.steps(t, b)...)
			if tc.ledger == "-" {
				return
			}
			for _, part := range []string{"one_request", "a_request_per_commit"} {
				require.Equal(t, tc.ledger, scalar[string](t, b, `select string_agg(entry, ' ' order by n) from public.ledger where partition = $1`, t.Name()+"/"+part))
			}
		})
	}
}

// TestHostErrorIsAFailure: what a trigger raises without saying that it is about the
// row fails the request; nothing is recorded, and a retry may succeed.
func TestHostErrorIsAFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `create function public.fail() returns trigger language plpgsql as $$ begin raise exception 'not today'; end $$`,
		`create trigger fail before insert on public.guarded for each row execute function public.fail()`)
	c := b.client(t, ssp2.WireV2)
	fine := c.commit(b.upsert(t, "notes", note("n", "a")))
	failing := c.commit(b.upsert(t, "guarded", map[string]any{"id": 1, "project_id": "pr1", "org": 1}))
	_, err := b.Push(t.Context(), c.request(fine, failing))
	require.Equal(t, "P0001", pgtx.SQLState(err))
	require.Empty(t, ssp2.CodeOf(err))
	require.Zero(t, c.contents(t))
	b.exec(t, `drop trigger fail on public.guarded`)
	requireApplied(t, c.send(t, fine, failing)...)
}

// TestConstraintAddedBetweenPushes: every admission looks at the tables anew, over
// connections on which everything is prepared.
func TestConstraintAddedBetweenPushes(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	at := func(id, position int) ssp2.Operation {
		return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
	}
	for range 8 { // plans are generic by then
		requireApplied(t, c.push(t, at(1, 1), at(2, 1), remove("guarded", "2")))
	}
	b.exec(t, `alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable initially deferred`)
	requireRejected(t, c.push(t, at(3, 3), at(2, 1)), 1, ssp2.CodeConstraintViolation)
	requireApplied(t, c.push(t, at(2, 2)), c.push(t, at(1, 2), at(2, 1)))
	b.exec(t, `alter table public.guarded drop constraint lone`, `alter table public.guarded add constraint low check (position < 5)`)
	requireRejected(t, c.push(t, at(2, 2), at(2, 5), at(2, 3)), 1, ssp2.CodeConstraintViolation)
	b.exec(t, `alter table public.guarded drop constraint low`)
	requireApplied(t, c.push(t, at(2, 2), at(2, 5), at(2, 3)))
}

// TestAppSchema: the app's tables may live anywhere.
func TestAppSchema(t *testing.T) {
	t.Parallel()
	const appSchema = `The "App"`
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) {
		o.TemplateKey = "pushsvc app schema"
		o.Setup = func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, testSchema(t), schemaddl.Options{AppSchema: appSchema})
		}
	})
	b.exec(t, `create table "The ""App""".ledger (entry text)`,
		`create function public.note_it() returns trigger language plpgsql as $$ begin insert into ledger values (new.title); return null; end $$`,
		`create trigger note_it after insert on "The ""App""".notes for each row execute function public.note_it()`)
	c := b.client(t, ssp2.WireV2)
	results := c.send(t, c.commit(b.upsert(t, "notes", note("n", "a"))), c.commit(b.upsert(t, "notes", meta(`"\u0000"`))), c.commit(remove("notes", "n")))
	requireApplied(t, results[0], results[2])
	requireRejected(t, results[1], 0, ssp2.CodeConstraintViolation)
	require.Equal(t, "a", scalar[string](t, b, `select string_agg(entry, ' ') from "The ""App""".ledger`))
}
