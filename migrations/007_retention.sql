-- Looking after the log in SQL: pruning, compaction, log epochs.
-- Why: the log would grow for ever; and after a backup was restored it is another log,
--   which clients have to be told (§2.1).
-- Locks: none (new functions). Duration: milliseconds.
-- breaking: no
--
-- One call is one batch in a transaction of its own. Locks are taken in this order:
--   1. advisory (0x73796e63, 1), tried: the schedule of one process at a time;
--   2. advisory, by the hash of 'syncpg log ' and the partition: pruning and compacting a
--      partition exclude each other, and whoever waits here holds nothing that a push needs;
--   3. the partition's row of sync_partitions FOR UPDATE, for pruning and rotating.
-- All end with the transaction: nothing is left in a session.
--
-- Their plans are generic and pinned to indexes for the reason that 003_push.sql gives.
-- A range of the log is read between two seqs, never only below one: what earlier batches
-- deleted stays in the index until a vacuum, and every batch would read past all of it.

create function syncpg.sync_plan_prune(p_partition text, p_active_since bigint, p_older_than bigint, p_keep bigint)
returns table (
  log_epoch text, max_commit_seq bigint, horizon_seq bigint,
  active_clients bigint, least_cursor bigint, target_seq bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  v_free   bigint;
  v_forced bigint;
begin
  select r.log_epoch, p.max_commit_seq, p.horizon_seq
    into sync_plan_prune.log_epoch, sync_plan_prune.max_commit_seq, sync_plan_prune.horizon_seq
    from syncpg.sync_partitions as p
    join syncpg.sync_partition_registry as r on r.partition = p.partition
   where p.partition = p_partition;
  if not found then
    return next;
    return;
  end if;
  select count(*), min(c.cursor) into active_clients, least_cursor
    from syncpg.sync_clients as c
   where c.partition = p_partition and c.cursor is not null and c.updated_at_ms >= p_active_since;
  v_free := greatest(horizon_seq, coalesce(least(least_cursor, max_commit_seq), max_commit_seq));
  if p_older_than is not null then
    select y.commit_seq - 1 into v_forced
      from syncpg.sync_commits as y
     where y.partition = p_partition and y.commit_seq > v_free and y.commit_seq <= max_commit_seq - p_keep
       and y.created_at_ms >= p_older_than
     order by y.commit_seq
     limit 1;
    v_forced := coalesce(v_forced, max_commit_seq);
  end if;
  target_seq := greatest(horizon_seq, least(max_commit_seq - p_keep, greatest(v_free, v_forced)));
  return next;
end
$$;
comment on function syncpg.sync_plan_prune(text, bigint, bigint, bigint) is
  'Up to where the log of a partition could be pruned now (§4.6), always one row, of NULLs when the partition does not exist: its newest commit and horizon, the clients with a cursor that pulled at p_active_since or later and the least of their cursors, and the horizon that would result: that cursor, or past it over commits made before p_older_than, and never above the newest p_keep commits. NULL for p_active_since: no client counts; for p_older_than: no cursor is passed. Takes no locks.';

create function syncpg.sync_prune_log(
  p_partition text, p_log_epoch text, p_active_since bigint, p_older_than bigint, p_keep bigint,
  p_limit integer, p_alone boolean)
returns table (
  busy boolean, log_epoch text, previous_seq bigint, horizon_seq bigint,
  commits bigint, changes bigint, tombstones bigint, waited_for boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_max    bigint;
  v_free   bigint;
  v_end    bigint;
  v_commit record;
  v_rows   bigint := 0;
  v_dead   tid[];
  v_tables text[];
  v_keys   text[];
begin
  busy := p_alone and not pg_try_advisory_xact_lock(1937337955, 1);
  commits := 0;
  changes := 0;
  tombstones := 0;
  waited_for := false;
  if busy then
    return next;
    return;
  end if;
  perform pg_advisory_xact_lock(hashtextextended('syncpg log ' || p_partition, 0));

  select p.max_commit_seq, p.horizon_seq into v_max, previous_seq
    from syncpg.sync_partitions as p where p.partition = p_partition for update;
  select r.log_epoch into sync_prune_log.log_epoch
    from syncpg.sync_partition_registry as r where r.partition = p_partition;
  horizon_seq := previous_seq;
  if v_max is null or log_epoch is distinct from p_log_epoch then
    return next;
    return;
  end if;

  -- Under the lock: a client that came back while this waited for it counts.
  select min(c.cursor) into v_free
    from syncpg.sync_clients as c
   where c.partition = p_partition and c.cursor is not null and c.updated_at_ms >= p_active_since;

  -- A loop and no query with a window, which would read p_limit commits, whatever their size.
  for v_commit in
    select y.commit_seq, y.change_count, y.created_at_ms
      from syncpg.sync_commits as y
     where y.partition = p_partition and y.commit_seq > previous_seq and y.commit_seq <= v_max - p_keep
     order by y.commit_seq
     limit p_limit
  loop
    exit when v_rows >= p_limit
           or v_commit.commit_seq > coalesce(v_free, v_max) and not coalesce(v_commit.created_at_ms < p_older_than, false);
    v_end := v_commit.commit_seq;
    v_rows := v_rows + 1 + v_commit.change_count;
  end loop;
  if v_end is null then
    return next;
    return;
  end if;

  with gone as (
    delete from syncpg.sync_changes as x
     where x.partition = p_partition and x.commit_seq > previous_seq and x.commit_seq <= v_end
    returning x.table_name, x.scopes
  ), keys as (
    select distinct g.table_name, k.scope_key
      from (select distinct g.table_name, g.scopes from gone as g) as g
      cross join lateral unnest(g.scopes) as k(scope_key)
  )
  select (select count(*) from gone), array_agg(k.table_name), array_agg(k.scope_key)
    into changes, v_tables, v_keys
    from keys as k;

  -- A scope has all its entries of the batch next to each other. By array of ctids what was
  -- found is deleted in the order of the table, without a second look for each row.
  v_dead := array(
    select x.ctid
      from unnest(v_tables, v_keys) as k(table_name, scope_key)
      cross join lateral (
        select e.ctid from syncpg.sync_change_scopes as e
         where e.partition = p_partition and e.table_name = k.table_name and e.scope_key = k.scope_key
           and e.commit_seq > previous_seq and e.commit_seq <= v_end
        offset 0
      ) as x);
  delete from syncpg.sync_change_scopes as s where s.ctid = any (v_dead);

  v_dead := array(
    select x.ctid from syncpg.sync_tombstones as x
     where x.partition = p_partition and x.commit_seq > previous_seq and x.commit_seq <= v_end
     order by x.commit_seq);
  delete from syncpg.sync_tombstones as t where t.ctid = any (v_dead);
  get diagnostics tombstones = row_count;

  delete from syncpg.sync_commits as y
   where y.partition = p_partition and y.commit_seq > previous_seq and y.commit_seq <= v_end;
  get diagnostics commits = row_count;

  update syncpg.sync_partitions as p set horizon_seq = v_end where p.partition = p_partition;
  horizon_seq := v_end;

  waited_for := exists (
    select 1 from pg_locks as l
     where l.locktype = 'transactionid' and not l.granted and l.transactionid = pg_current_xact_id()::xid);
  return next;
end
$$;
comment on function syncpg.sync_prune_log(text, text, bigint, bigint, bigint, integer, boolean) is
  'One batch of pruning (§4.6): advances the horizon of a partition and deletes the commits up to it with their changes, scope entries and tombstones. How far it may go is decided under the partition lock, as sync_plan_prune says; one batch ends with the commit that makes it reach p_limit rows of commits and changes. Nothing is done when log_epoch, the epoch found, is not p_log_epoch (NULL: no such partition), or when another process prunes (busy, only with p_alone). waited_for: somebody waits for the partition by now. READ COMMITTED only. Locks: see the head of this file; then the rows it deletes.';

create function syncpg.sync_compact_log(
  p_partition text, p_log_epoch text, p_after bigint, p_older_than bigint, p_limit integer, p_alone boolean)
returns table (busy boolean, log_epoch text, compacted_seq bigint, changes bigint, finished boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_from   bigint;
  v_end    bigint;
  v_young  bigint;
  v_seqs   bigint[];
  v_tables text[];
  v_keys   text[];
begin
  busy := p_alone and not pg_try_advisory_xact_lock(1937337955, 1);
  changes := 0;
  finished := true;
  if busy then
    return next;
    return;
  end if;
  perform pg_advisory_xact_lock(hashtextextended('syncpg log ' || p_partition, 0));

  select r.log_epoch, greatest(p.horizon_seq, p_after), p.max_commit_seq
    into sync_compact_log.log_epoch, v_from, v_end
    from syncpg.sync_partitions as p
    join syncpg.sync_partition_registry as r on r.partition = p.partition
   where p.partition = p_partition;
  compacted_seq := v_from;
  if log_epoch is distinct from p_log_epoch then
    return next;
    return;
  end if;

  select x.commit_seq, false into v_end, finished
    from syncpg.sync_changes as x
   where x.partition = p_partition and x.commit_seq > v_from and x.commit_seq <= v_end
   order by x.commit_seq, x.change_index
  offset p_limit limit 1;
  if not found then
    select p.max_commit_seq, true into v_end, finished
      from syncpg.sync_partitions as p where p.partition = p_partition;
  end if;
  select y.commit_seq into v_young
    from syncpg.sync_commits as y
   where y.partition = p_partition and y.commit_seq > v_from and y.commit_seq <= v_end
     and y.created_at_ms >= p_older_than
   order by y.commit_seq
   limit 1;
  if found then
    v_end := v_young - 1;
    finished := true;
  end if;
  compacted_seq := v_end;

  with gone as (
    delete from syncpg.sync_changes as c
     using (
       select x.ctid,
              row_number() over (partition by x.table_name, x.row_id, x.scopes
                                 order by x.commit_seq desc, x.change_index desc) as newest
         from syncpg.sync_changes as x
        where x.partition = p_partition and x.commit_seq > v_from and x.commit_seq <= v_end
     ) as s
     where s.newest > 1 and c.ctid = s.ctid
    returning c.commit_seq, c.table_name, c.scopes
  ), entries as (
    select distinct g.commit_seq, g.table_name, k.scope_key
      from (select distinct g.commit_seq, g.table_name, g.scopes from gone as g) as g
      cross join lateral unnest(g.scopes) as k(scope_key)
  )
  select (select count(*) from gone), array_agg(e.commit_seq), array_agg(e.table_name), array_agg(e.scope_key)
    into changes, v_seqs, v_tables, v_keys
    from entries as e;

  delete from syncpg.sync_change_scopes as s
   using unnest(v_seqs, v_tables, v_keys) as e(commit_seq, table_name, scope_key)
   cross join lateral (
     select x.ctid from syncpg.sync_change_scopes as x
      where x.partition = p_partition and x.table_name = e.table_name and x.scope_key = e.scope_key
        and x.commit_seq = e.commit_seq
      limit 1
   ) as x
   where s.ctid = x.ctid
     and not exists (
       select 1 from syncpg.sync_changes as c
        where c.partition = p_partition and c.commit_seq = e.commit_seq
          and c.table_name = e.table_name and e.scope_key = any (c.scopes));
  return next;
end
$$;
comment on function syncpg.sync_compact_log(text, text, bigint, bigint, integer, boolean) is
  'One batch of compaction (§4.6): of the changes after p_after in commits made before p_older_than, about p_limit of them, deletes each that a later one of these, of the same row under the same scopes, supersedes, and the scope entries that lead to none any more. A change under other scopes supersedes nothing: who sees the one may not see the other. Commits stay. compacted_seq is where the next batch begins, finished that there is none. Nothing is done when log_epoch, the epoch found, is not p_log_epoch (NULL: no such partition), or when another process prunes (busy, only with p_alone). READ COMMITTED only. Locks: see the head of this file, the partition''s row not among them; then the rows it deletes.';

create function syncpg.sync_list_prunable_partitions(p_after text, p_more_than bigint, p_limit integer)
returns table (partition text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
  return query
  select r.partition
    from syncpg.sync_partition_registry as r
    cross join lateral (
      select p.max_commit_seq - p.horizon_seq as commits from syncpg.sync_partitions as p where p.partition = r.partition limit 1
    ) as p
   where r.partition > p_after and p.commits > p_more_than
   order by r.partition
   limit p_limit;
end
$$;
comment on function syncpg.sync_list_prunable_partitions(text, bigint, integer) is
  'The first p_limit partitions after p_after, in byte order, whose log holds more than p_more_than commits. Takes no locks.';

create function syncpg.sync_renew_epoch(p_partition text)
returns table (previous_epoch text, log_epoch text, clients bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
begin
  clients := 0;
  perform 1 from syncpg.sync_partitions as p where p.partition = p_partition for update;
  select r.log_epoch into previous_epoch
    from syncpg.sync_partition_registry as r where r.partition = p_partition for update;
  if not found then
    return next;
    return;
  end if;
  update syncpg.sync_partition_registry as r
     set log_epoch = replace(gen_random_uuid()::text, '-', ''), epoch_required = true
   where r.partition = p_partition
  returning r.log_epoch into sync_renew_epoch.log_epoch;
  update syncpg.sync_clients as c set cursor = null, subscriptions = null, wire_version = null
   where c.partition = p_partition and (c.cursor is not null or c.subscriptions is not null or c.wire_version is not null);
  get diagnostics clients = row_count;
  -- A backup may hold leases from before they were revoked.
  delete from syncpg.sync_leases as l where l.partition = p_partition;
  return next;
end
$$;
comment on function syncpg.sync_renew_epoch(text) is
  'For sync_rotate_epoch and sync_rotate_epochs: gives a partition a new log epoch that nobody can guess, requires it from now on, so that wire version 1 is refused, and deletes what its clients'' pulls left: cursor, subscriptions, wire version (§2.1), auth lease (§7.3). The actor that a client belongs to stays, since nobody else may ask for its outcomes. Returns the epochs, NULL when there is no such partition, and the number of clients. Locks: the partition''s row of sync_partitions FOR UPDATE, the registry row, the clients, their leases.';

create function syncpg.sync_rotate_epoch(p_partition text)
returns table (previous_epoch text, log_epoch text, clients bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  select e.previous_epoch, e.log_epoch, e.clients
    into sync_rotate_epoch.previous_epoch, sync_rotate_epoch.log_epoch, sync_rotate_epoch.clients
    from syncpg.sync_renew_epoch(p_partition) as e;
  if log_epoch is not null then
    perform pg_notify('syncpg', 'e' || json_build_array(p_partition)::text);
  end if;
  return next;
end
$$;
comment on function syncpg.sync_rotate_epoch(text) is
  'Gives a partition a new log epoch (sync_renew_epoch), and tells the servers that listen, once it is committed. Returns the epochs, NULL when there is no such partition, and the number of clients. Locks: those of sync_renew_epoch, and at the commit the notification queue of the database.';

create function syncpg.sync_rotate_epochs(p_now bigint)
returns table (partitions bigint, clients bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_partition text;
  v_clients bigint;
begin
  partitions := 0;
  clients := 0;
  insert into syncpg.sync_epoch_rule (required_since_ms) values (p_now)
  on conflict (partition) do nothing;
  lock table syncpg.sync_partition_registry in share row exclusive mode;
  for v_partition in select r.partition from syncpg.sync_partition_registry as r order by r.partition loop
    select e.clients into v_clients from syncpg.sync_renew_epoch(v_partition) as e;
    partitions := partitions + 1;
    clients := clients + v_clients;
  end loop;
  perform pg_notify('syncpg', 'e');
  return next;
end
$$;
comment on function syncpg.sync_rotate_epochs(bigint) is
  'Rotates the epoch of every partition (sync_renew_epoch), all or none, tells the servers that listen once that is committed, and requires it of the partitions that are made from now on: one that a restored backup does not know has clients too. Returns how many partitions, and clients with a cursor, there were. Locks: the registry, SHARE ROW EXCLUSIVE, so that none is made meanwhile; then every partition; at the commit the notification queue of the database.';

revoke execute on all functions in schema syncpg from public;
insert into syncpg.sync_migrations (version, breaking) values (7, false);

---- create above / drop below ----

drop function syncpg.sync_rotate_epochs(bigint);
drop function syncpg.sync_rotate_epoch(text);
drop function syncpg.sync_renew_epoch(text);
drop function syncpg.sync_list_prunable_partitions(text, bigint, integer);
drop function syncpg.sync_compact_log(text, text, bigint, bigint, integer, boolean);
drop function syncpg.sync_prune_log(text, text, bigint, bigint, bigint, integer, boolean);
drop function syncpg.sync_plan_prune(text, bigint, bigint, bigint);
delete from syncpg.sync_migrations where version = 7;
