-- The push path in SQL: admission, append, outcomes.
-- Why: a push is two round trips; each is one flush of calls to these functions.
-- Locks: none (new functions and a trigger on an empty table). Duration: milliseconds.
-- breaking: no
--
-- SQLSTATEs raised, all of class SY:
--   SY001  writer fence: this server's schema version may no longer append
--   SY002  the log moved although the partition lock should have held it still
--   SY003  a client id was bound to another actor in the meantime
--
-- Every function that probes by key plans its statements once per connection, since
-- planning costs more than a probe does, and turns sequential scans, hash joins and
-- merge joins off for itself: a plan made while the tables were empty must not become
-- a scan when they have filled up.
-- On an empty table all indexes cost the same, one that only shares the partition
-- too. So where a table has more than its primary key, the last column of the key
-- is not compared with = but with >= and <=, in its order: any other index would
-- have to sort. A delete finds its rows like this first and takes them by ctid,
-- since a join over the key itself may begin with the whole partition.

create function syncpg.sync_open_partition(p_partition text, p_log_epoch text, p_now bigint)
returns table (log_epoch text, epoch_required boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_last_seen bigint;
begin
  select r.log_epoch, r.epoch_required, r.last_seen_ms
    into sync_open_partition.log_epoch, sync_open_partition.epoch_required, v_last_seen
    from syncpg.sync_partition_registry as r
   where r.partition = p_partition;
  if not found then
    -- As in sync_admit_push: a new partition would wait with its connection.
    if not pg_try_advisory_xact_lock_shared(1937337955, 2) then
      log_epoch := '';
      epoch_required := false;
      return next;
      return;
    end if;
    insert into syncpg.sync_partition_registry (partition, log_epoch, epoch_required, created_at_ms, last_seen_ms)
    values (p_partition, p_log_epoch, exists (select 1 from syncpg.sync_epoch_rule as e where e.partition = ''), p_now, p_now)
    on conflict (partition) do nothing;
    insert into syncpg.sync_partitions (partition) values (p_partition)
    on conflict (partition) do nothing;
    select r.log_epoch, r.epoch_required
      into sync_open_partition.log_epoch, sync_open_partition.epoch_required
      from syncpg.sync_partition_registry as r
     where r.partition = p_partition;
  elsif v_last_seen < p_now - 60000 then
    -- Losing this refresh in a crash is harmless, so it does not wait for the disk.
    perform set_config('synchronous_commit', 'off', true);
    update syncpg.sync_partition_registry as r set last_seen_ms = p_now
     where r.partition = p_partition and r.last_seen_ms < p_now - 60000;
  end if;
  return next;
end
$$;
comment on function syncpg.sync_open_partition(text, text, bigint) is
  'The log epoch of a partition (§2.1), creating the partition with the proposed epoch when it is new (wire version 1 is refused there once all epochs were rotated, see sync_epoch_rule); '''' when it is new and the schema is being moved to another version, and then nothing is written. Refreshes last_seen_ms when it is over a minute old. Call it in a transaction of its own: it may turn synchronous_commit off for it. Locks: for a new partition advisory (0x73796e63, 2), shared and tried; the registry row, only when it writes.';

create function syncpg.sync_check_writer_fence() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  if exists (
    select 1
      from appended as a
      cross join lateral (
        select f.required_writer_version
          from syncpg.sync_writer_fence as f
         where f.partition = a.partition
         limit 1
      ) as f
     where a.writer_version is null or a.writer_version < f.required_writer_version
  ) then
    raise exception 'writer version is below the fence of the partition' using errcode = 'SY001';
  end if;
  return null;
end
$$;
comment on function syncpg.sync_check_writer_fence() is
  'Statement trigger of sync_commits: refuses commits of a writer older than the partition''s fence (SQLSTATE SY001). Takes no locks.';

create trigger sync_commits_writer_fence
  after insert on syncpg.sync_commits
  referencing new table as appended
  for each statement execute function syncpg.sync_check_writer_fence();

create function syncpg.sync_prefetch_rows(p_partition text, p_tables text[], p_row_ids text[])
returns table (ord integer, server_version bigint, payload bytea, column_versions bigint[])
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return;
end
$$;
comment on function syncpg.sync_prefetch_rows(text, text[], text[]) is
  'The current rows named by (p_tables[i], p_row_ids[i]); ord is i. Body generated from the installed schema: one branch per table. Takes no locks.';

create function syncpg.sync_live_rows(p_partition text, p_tables text[], p_row_ids text[])
returns integer[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return '{}';
end
$$;
comment on function syncpg.sync_live_rows(text, text[], text[]) is
  'The i for which (p_tables[i], p_row_ids[i]) is a row, of tables that a reference names as parent. Body generated from the installed schema: one branch per parent table. Takes no locks.';

create function syncpg.sync_find_children(
  p_partition text, p_tables text[], p_columns text[], p_parents text[], p_limit integer, p_most integer)
returns table (ord integer, row_id text, server_version bigint, payload bytea, column_versions bigint[])
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return;
end
$$;
comment on function syncpg.sync_find_children(text, text[], text[], text[], integer, integer) is
  'The rows whose reference p_columns[i] of table p_tables[i] names the row p_parents[i], at most p_limit of each parent and p_most of each reference; ord is i. Body generated from the installed schema: one branch per reference. Takes no locks.';

create function syncpg.sync_writes_singly(p_table regclass)
returns boolean
language plpgsql stable strict
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
  v_class record;
begin
  select c.relkind <> 'r' or c.relhassubclass or c.relhasrules as single, c.relhastriggers, c.relchecks
    into v_class
    from pg_class as c where c.oid = p_table;
  if v_class.single then
    return true;
  end if;
  if v_class.relhastriggers and exists (select 1 from pg_trigger as t where t.tgrelid = p_table) then
    return true;
  end if;
  return v_class.relchecks > 0 and exists (
    select 1
      from pg_constraint as k
      join pg_depend as d on d.classid = 'pg_constraint'::regclass and d.objid = k.oid
     where k.conrelid = p_table and k.contype = 'c' and d.refclassid = 'pg_proc'::regclass);
end
$$;
comment on function syncpg.sync_writes_singly(regclass) is
  'Whether each operation on a table needs a statement of its own, since what it does may look beyond its row: triggers (those of foreign keys and deferrable constraints included), rules, inheritance, checks that call a function of the host. Unique indexes, exclusion constraints and other checks are tested row by row, so rows can share a statement. Takes no locks.';

create function syncpg.sync_lock_tables(p_tables text[])
returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return '{}';
end
$$;
comment on function syncpg.sync_lock_tables(text[]) is
  'Returns those of the app tables named in p_tables whose operations need a statement each (sync_writes_singly); the answer holds until the transaction ends. Body generated from the installed schema. Locks: the tables named, ROW EXCLUSIVE.';

create function syncpg.sync_find_outcomes(p_partition text, p_client_ids text[], p_commit_clients integer[], p_commit_ids text[])
returns table (ord integer, status smallint, commit_seq bigint, results bytea, details text, recorded_at_ms bigint, outcome_id uuid, schema_version integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  return query
  select k.ord::integer, r.status, r.commit_seq, r.results, r.details, r.recorded_at_ms, r.outcome_id, r.schema_version
    from unnest(p_commit_clients, p_commit_ids) with ordinality as k(client, commit_id, ord)
    cross join lateral (
      select o.status, o.commit_seq, o.results, o.details, o.recorded_at_ms, o.outcome_id, o.schema_version
        from syncpg.sync_push_results as o
       where o.partition = p_partition
         and o.client_id = p_client_ids[k.client]
         and o.client_commit_id = k.commit_id
       limit 1
    ) as r
   order by k.ord;
end
$$;
comment on function syncpg.sync_find_outcomes(text, text[], integer[], text[]) is
  'The stored outcomes of the commits (p_client_ids[p_commit_clients[i]], p_commit_ids[i]); ord is i. Takes no locks.';

create function syncpg.sync_admit_push(
  p_partition text, p_now bigint,
  p_client_ids text[], p_commit_clients integer[], p_commit_ids text[],
  p_tables text[], p_row_ids text[], p_max_bytes bigint,
  p_parent_tables text[], p_parent_rows text[], p_reached_tables text[])
returns table (
  locked boolean, oversized boolean, moving boolean,
  log_epoch text, epoch_required boolean,
  schema_version integer, pending_projection text,
  max_commit_seq bigint, horizon_seq bigint,
  client_actors text[],
  outcome_ords integer[], outcome_statuses smallint[], outcome_seqs bigint[], outcome_results bytea[],
  outcome_details text[], outcome_recorded bigint[], outcome_ids uuid[], outcome_versions integer[],
  row_ords integer[], row_versions bigint[], row_payloads bytea[], row_column_versions text[],
  tombstone_ords integer[], tombstone_seqs bigint[],
  single_tables text[], parent_ords integer[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  locked := false;
  oversized := false;
  moving := false;
  loop
    select array_agg(o.ord), array_agg(o.status), array_agg(coalesce(o.commit_seq, 0)),
           array_agg(o.results) filter (where o.bytes <= p_max_bytes),
           array_agg(coalesce(o.details, '')), array_agg(o.recorded_at_ms), array_agg(o.outcome_id), array_agg(o.schema_version),
           coalesce(bool_or(o.bytes > p_max_bytes), false)
      into outcome_ords, outcome_statuses, outcome_seqs, outcome_results,
           outcome_details, outcome_recorded, outcome_ids, outcome_versions, oversized
      from (select f.*, sum(octet_length(f.results)) over (rows unbounded preceding) as bytes
              from syncpg.sync_find_outcomes(p_partition, p_client_ids, p_commit_clients, p_commit_ids) as f) as o;
    exit when locked or coalesce(cardinality(outcome_ords), 0) = cardinality(p_commit_ids);
    -- Whoever moves the schema waits for this lock, or has it for as long as that takes:
    -- too long for a connection to wait.
    moving := not pg_try_advisory_xact_lock_shared(1937337955, 2);
    exit when moving;
    -- Everything below is a statement of its own, with a snapshot taken after
    -- this lock was granted: it sees what the previous holder committed.
    select p.max_commit_seq, p.horizon_seq
      into sync_admit_push.max_commit_seq, sync_admit_push.horizon_seq
      from syncpg.sync_partitions as p where p.partition = p_partition for update;
    locked := true;
    if not found then
      return next; -- nothing was locked, as the absent epoch tells
      return;
    end if;
  end loop;

  if moving then
    -- The stored version cannot be read before the move is over.
    select r.log_epoch, r.epoch_required
      into sync_admit_push.log_epoch, sync_admit_push.epoch_required
      from syncpg.sync_partition_registry as r
     where r.partition = p_partition;
  else
    select r.log_epoch, r.epoch_required, m.schema_version, b.name
      into sync_admit_push.log_epoch, sync_admit_push.epoch_required, sync_admit_push.schema_version, pending_projection
      from syncpg.sync_partition_registry as r
      left join lateral (
        select x.schema_version from syncpg.sync_schema_meta as x where x.partition = '' limit 1
      ) as m on true
      left join lateral (
        select x.name from syncpg.sync_backfill_checkpoints as x
         where x.partition = p_partition and x.schema_version = m.schema_version and x.state <> 'activated'
         order by x.name limit 1
      ) as b on true
     where r.partition = p_partition;
  end if;

  client_actors := array(
    select coalesce(c.actor_id, '')
      from unnest(p_client_ids) with ordinality as k(client_id, ord)
      left join lateral (
        select x.actor_id from syncpg.sync_clients as x
         where x.partition = p_partition and x.client_id = k.client_id limit 1
      ) as c on true
     order by k.ord);

  if locked then
    single_tables := syncpg.sync_lock_tables(p_tables || p_reached_tables);
    if cardinality(p_parent_rows) > 0 then
      parent_ords := syncpg.sync_live_rows(p_partition, p_parent_tables, p_parent_rows);
    end if;

    select array_agg(r.ord), array_agg(r.server_version),
           array_agg(r.payload) filter (where r.bytes <= p_max_bytes),
           array_agg(coalesce(r.column_versions::text, '')),
           oversized or coalesce(bool_or(r.bytes > p_max_bytes), false)
      into row_ords, row_versions, row_payloads, row_column_versions, oversized
      from (select f.*, sum(octet_length(f.payload)) over (rows unbounded preceding) as bytes
              from syncpg.sync_prefetch_rows(p_partition, p_tables, p_row_ids) as f) as r;

    select array_agg(k.ord::integer), array_agg(t.commit_seq) into tombstone_ords, tombstone_seqs
      from unnest(p_tables, p_row_ids) with ordinality as k(table_name, row_id, ord)
      cross join lateral (
        select x.commit_seq from syncpg.sync_tombstones as x
         where x.partition = p_partition and x.table_name = k.table_name
           and x.row_id >= k.row_id and x.row_id <= k.row_id
         order by x.row_id limit 1
      ) as t;
  end if;
  return next;
end
$$;
comment on function syncpg.sync_admit_push(text, bigint, text[], integer[], text[], text[], text[], bigint, text[], text[], text[]) is
  'Admission of a push: known outcomes; if one is missing, takes the partition lock, then reads again: the serve gate (epoch, schema version, first projection not activated), outcomes, owners of the clients, current rows and tombstones of every row named, the tables that need a statement per operation (sync_lock_tables), those of p_reached_tables included, and which of the parents (p_parent_tables[i], p_parent_rows[i]) are rows. In arrays, 0 and '''' stand for no seq, no details, no owner, no column versions. Outcomes or rows of more than p_max_bytes are not returned: oversized. moving: the schema is being moved to another version, and nothing was locked or read beside the known outcomes. READ COMMITTED only. Locks, unless every outcome is known: advisory (0x73796e63, 2), shared and tried, then the partition''s row of sync_partitions FOR UPDATE; then the app tables named and reached, ROW EXCLUSIVE.';

create function syncpg.sync_append_commits(
  p_partition text, p_base_seq bigint, p_now bigint, p_writer_version integer,
  p_client_ids text[], p_commit_ids text[], p_actor_ids text[], p_change_counts integer[],
  p_change_commits integer[], p_change_indexes integer[], p_change_tables text[], p_change_rows text[],
  p_change_ops smallint[], p_change_versions bigint[], p_change_payloads bytea[], p_change_scope_sets integer[],
  p_scope_sets text[],
  p_tombstone_commits integer[], p_tombstone_tables text[], p_tombstone_rows text[],
  p_cleared_tables text[], p_cleared_rows text[])
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_last bigint := p_base_seq + cardinality(p_commit_ids);
begin
  update syncpg.sync_partitions as p set max_commit_seq = v_last
   where p.partition = p_partition and p.max_commit_seq = p_base_seq;
  if not found then
    raise exception 'the log of the partition moved' using errcode = 'SY002';
  end if;

  insert into syncpg.sync_commits
    (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count)
  select p_partition, p_base_seq + c.ord, c.client_id, c.commit_id, c.actor_id, p_now, p_writer_version, c.change_count
    from unnest(p_client_ids, p_commit_ids, p_actor_ids, p_change_counts)
         with ordinality as c(client_id, commit_id, actor_id, change_count, ord);

  insert into syncpg.sync_changes
    (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
  select p_partition, p_base_seq + c.commit_ord, c.change_index, c.table_name, c.row_id, c.op, nullif(c.row_version, 0),
         (p_scope_sets[c.scope_set])::text[], c.payload
    from unnest(p_change_commits, p_change_indexes, p_change_tables, p_change_rows, p_change_ops,
                p_change_versions, p_change_payloads, p_change_scope_sets)
         as c(commit_ord, change_index, table_name, row_id, op, row_version, payload, scope_set);

  insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
  select distinct p_partition, d.table_name, k.scope_key, p_base_seq + d.commit_ord
    from (select distinct c.commit_ord, c.table_name, c.scope_set
            from unnest(p_change_commits, p_change_tables, p_change_scope_sets) as c(commit_ord, table_name, scope_set)) as d
    cross join lateral unnest((p_scope_sets[d.scope_set])::text[]) as k(scope_key);

  if cardinality(p_tombstone_rows) > 0 then
    insert into syncpg.sync_tombstones as t (partition, table_name, row_id, commit_seq)
    select p_partition, d.table_name, d.row_id, p_base_seq + d.commit_ord
      from unnest(p_tombstone_commits, p_tombstone_tables, p_tombstone_rows) as d(commit_ord, table_name, row_id)
    on conflict (partition, table_name, row_id) do update set commit_seq = excluded.commit_seq;
  end if;
  if cardinality(p_cleared_rows) > 0 then
    delete from syncpg.sync_tombstones as t
     using unnest(p_cleared_tables, p_cleared_rows) as d(table_name, row_id)
     cross join lateral (
       select x.ctid from syncpg.sync_tombstones as x
        where x.partition = p_partition and x.table_name = d.table_name
          and x.row_id >= d.row_id and x.row_id <= d.row_id
        order by x.row_id limit 1
     ) as x
     where t.ctid = x.ctid;
  end if;
  return v_last;
end
$$;
comment on function syncpg.sync_append_commits(text, bigint, bigint, integer, text[], text[], text[], integer[], integer[], integer[], text[], text[], smallint[], bigint[], bytea[], integer[], text[], integer[], text[], text[], text[], text[]) is
  'Appends commits to the log under consecutive seqs after p_base_seq: commit rows, changes, scope index, tombstones (p_tombstone_*) and their removal (p_cleared_*). A change version of 0 stands for none (a delete). Returns the new newest seq. The caller holds the partition lock; SQLSTATE SY002 when the log is not at p_base_seq, SY001 from the writer fence.';

create function syncpg.sync_record_outcomes(
  p_partition text, p_now bigint, p_schema_version integer,
  p_client_ids text[], p_commit_ids text[], p_statuses smallint[], p_commit_seqs bigint[],
  p_results bytea[], p_details text[], p_outcome_ids uuid[],
  p_new_clients text[], p_new_actors text[])
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  if cardinality(p_new_clients) > 0 then
    insert into syncpg.sync_clients (partition, client_id, actor_id, created_at_ms, updated_at_ms)
    select p_partition, c.client_id, c.actor_id, p_now, p_now
      from unnest(p_new_clients, p_new_actors) as c(client_id, actor_id)
    on conflict (partition, client_id) do nothing;
    if exists (
      select 1
        from unnest(p_new_clients, p_new_actors) as k(client_id, actor_id)
        cross join lateral (
          select c.actor_id from syncpg.sync_clients as c
           where c.partition = p_partition and c.client_id = k.client_id limit 1
        ) as c
       where c.actor_id <> k.actor_id
    ) then
      raise exception 'a client id belongs to another actor' using errcode = 'SY003';
    end if;
  end if;

  insert into syncpg.sync_push_results
    (partition, client_id, client_commit_id, status, commit_seq, results, details, recorded_at_ms, outcome_id, schema_version)
  select p_partition, o.client_id, o.commit_id, o.status, nullif(o.commit_seq, 0), o.results, nullif(o.details, ''), p_now, o.outcome_id, p_schema_version
    from unnest(p_client_ids, p_commit_ids, p_statuses, p_commit_seqs, p_results, p_details, p_outcome_ids)
         as o(client_id, commit_id, status, commit_seq, results, details, outcome_id);
end
$$;
comment on function syncpg.sync_record_outcomes(text, bigint, integer, text[], text[], smallint[], bigint[], bytea[], text[], uuid[], text[], text[]) is
  'Records outcomes, whose rows are of p_schema_version (a seq of 0 and details of '''' stand for none), and binds clients seen for the first time to their actor (§1.5). The first outcome of a commit stands: SQLSTATE 23505 when there is one, SY003 when a client belongs to another actor. The caller holds the partition lock.';

revoke execute on all functions in schema syncpg from public;

insert into syncpg.sync_migrations (version, breaking) values (3, false);

---- create above / drop below ----

-- Functions generated for an installed app schema call these; they go first. Of those
-- that this migration made, their bodies may be generated too.
do $$
declare
  v_function regprocedure;
begin
  for v_function in
    select p.oid::regprocedure
      from pg_catalog.pg_proc as p
     where p.pronamespace = 'syncpg'::regnamespace
       and pg_catalog.obj_description(p.oid, 'pg_proc') like '%Generated from the installed schema.%'
       and p.proname not in ('sync_prefetch_rows', 'sync_live_rows', 'sync_find_children', 'sync_lock_tables')
  loop
    execute format('drop function %s', v_function);
  end loop;
end
$$;
drop function syncpg.sync_record_outcomes(text, bigint, integer, text[], text[], smallint[], bigint[], bytea[], text[], uuid[], text[], text[]);
drop function syncpg.sync_append_commits(text, bigint, bigint, integer, text[], text[], text[], integer[], integer[], integer[], text[], text[], smallint[], bigint[], bytea[], integer[], text[], integer[], text[], text[], text[], text[]);
drop function syncpg.sync_admit_push(text, bigint, text[], integer[], text[], text[], text[], bigint, text[], text[], text[]);
drop function syncpg.sync_find_outcomes(text, text[], integer[], text[]);
drop function syncpg.sync_lock_tables(text[]);
drop function syncpg.sync_writes_singly(regclass);
drop function syncpg.sync_find_children(text, text[], text[], text[], integer, integer);
drop function syncpg.sync_live_rows(text, text[], text[]);
drop function syncpg.sync_prefetch_rows(text, text[], text[]);
drop trigger sync_commits_writer_fence on syncpg.sync_commits;
drop function syncpg.sync_check_writer_fence();
drop function syncpg.sync_open_partition(text, text, bigint);
delete from syncpg.sync_migrations where version = 3;
