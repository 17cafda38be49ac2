-- The pull path in SQL: gate, commit windows, first pages, client record.
-- Why: a pull is one flush of calls to these functions inside one REPEATABLE READ
--   transaction, so that horizon, log and rows are one snapshot; a second,
--   autonomous call records what the client was answered, when that changed.
-- Locks: none (new functions). Duration: milliseconds.
-- breaking: no
--
-- SQLSTATEs raised, of class SY (003_push.sql has the others):
--   SY005  a scan by scope was asked for without a scope value
--   SY006  the log was replaced after the pull that is to be recorded
--
-- The functions that read many subscriptions decide by themselves which of them are
-- in range, since the caller learns horizon and newest commit in the same flush.
-- What they return is bounded: the bytes of a window or page, and the bytes of all
-- after which no further subscription is begun. Each subscription that was read
-- ends with one row whose row_id is NULL; one without such a row was not read.
--
-- Their plans are generic and pinned to indexes for the reason that 003_push.sql
-- gives. What must not be reordered is a subquery with ORDER BY or LIMIT, which the
-- planner does not merge into its surroundings.

create function syncpg.sync_read_pull_gate(p_partition text, p_client_id text, p_subscriptions_digest bytea)
returns table (
  log_epoch text, epoch_required boolean,
  schema_version integer, pending_projection text,
  max_commit_seq bigint, horizon_seq bigint,
  client_actor text, client_wire_version smallint, client_cursor bigint,
  same_subscriptions boolean, client_updated_at_ms bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  select r.log_epoch, r.epoch_required
    into sync_read_pull_gate.log_epoch, sync_read_pull_gate.epoch_required
    from syncpg.sync_partition_registry as r
   where r.partition = p_partition;

  select p.max_commit_seq, p.horizon_seq
    into sync_read_pull_gate.max_commit_seq, sync_read_pull_gate.horizon_seq
    from syncpg.sync_partitions as p
   where p.partition = p_partition;

  select m.schema_version into sync_read_pull_gate.schema_version
    from syncpg.sync_schema_meta as m where m.partition = '';

  select b.name into pending_projection
    from syncpg.sync_backfill_checkpoints as b
   where b.partition = p_partition
     and b.schema_version = sync_read_pull_gate.schema_version
     and b.state <> 'activated'
   order by b.name limit 1;

  select c.actor_id, c.wire_version, c.cursor,
         c.subscriptions is not null and sha256(convert_to(c.subscriptions, 'UTF8')) = p_subscriptions_digest,
         c.updated_at_ms
    into client_actor, client_wire_version, client_cursor, same_subscriptions, client_updated_at_ms
    from syncpg.sync_clients as c
   where c.partition = p_partition and c.client_id = p_client_id;
  return next;
end
$$;
comment on function syncpg.sync_read_pull_gate(text, text, bytea) is
  'What a pull has to know before it answers, always one row: the serve gate (epoch, schema version, first projection not activated), newest commit and horizon, and the client''s record, its subscription list compared by SHA-256. Columns of what does not exist are NULL. Takes no locks.';

create function syncpg.sync_read_windows(
  p_partition text, p_tables text[], p_scopes text[], p_cursors bigint[],
  p_limit integer, p_window_bytes bigint, p_max_bytes bigint)
returns table (
  ord integer, commit_seq bigint, created_at_ms bigint, actor_id text,
  row_id text, op smallint, row_version bigint, scopes text[], payload bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_max     bigint;
  v_horizon bigint;
  v_total   bigint := 0;  -- payload bytes of all windows
  v_sub     record;
  v_keys    jsonb;        -- variable=value of all variables, as keys
  v_batch   integer;      -- how many commits to look for under each key
  v_from    bigint;       -- commits up to here have been looked for
  v_bound   bigint;       -- and up to here their list is complete
  v_seqs    bigint[];
  v_open    bigint;       -- the commit being returned
  v_last    bigint;       -- the newest one returned whole
  v_rows    integer;
  v_bytes   bigint;
begin
  select p.max_commit_seq, p.horizon_seq into v_max, v_horizon
    from syncpg.sync_partitions as p where p.partition = p_partition;

  for v_sub in
    select u.ord, u.table_name, j.scopes, u.cursor, d.variables, d.unscoped, k.driving,
           exists (
             select 1
               from unnest(k.driving) as s(scope_key)
               cross join lateral (
                 select 1
                   from syncpg.sync_change_scopes as x
                  where x.partition = p_partition and x.table_name = u.table_name and x.scope_key = s.scope_key
                    and x.commit_seq > u.cursor and x.commit_seq <= v_max
                  limit 1
               ) as x
           ) as any_commit
      from unnest(p_tables, p_scopes, p_cursors) with ordinality as u(table_name, scopes, cursor, ord)
      cross join lateral (select u.scopes::jsonb as scopes offset 0) as j
      cross join lateral (
        select count(*) as variables, min(s.variable collate "C") as driver, bool_or(jsonb_array_length(s.list) = 0) as unscoped
          from jsonb_each(j.scopes) as s(variable, list)
      ) as d
      cross join lateral (
        select array(select d.driver || '=' || s.value from jsonb_array_elements_text(j.scopes -> d.driver) as s(value)) as driving
      ) as k
     where u.cursor >= v_horizon and u.cursor < v_max
     order by u.ord
  loop
    exit when v_total >= p_max_bytes;
    if coalesce(v_sub.unscoped, true) then
      raise exception 'a window needs a scope' using errcode = 'SY005';
    end if;
    ord := v_sub.ord;
    v_from := case when v_sub.any_commit then v_sub.cursor else v_max end;
    v_last := v_from;
    v_open := null;
    v_rows := 0;
    v_bytes := 0;
    v_keys := null;
    v_batch := least(p_limit, greatest(2 * p_limit / cardinality(v_sub.driving), 4));

    <<reading>>
    while v_from < v_max loop
      -- The next commits under each key. Where one key has more, the others' commits
      -- beyond its last one have to wait for the next turn, which looks for more: most
      -- windows of many keys need few commits of each.
      with hits as materialized (
        select h.seqs, case when cardinality(h.seqs) > v_batch then h.seqs[v_batch + 1] else v_max end as bound
          from unnest(v_sub.driving) as k(scope_key)
          cross join lateral (
            select array(
              select x.commit_seq
                from syncpg.sync_change_scopes as x
               where x.partition = p_partition and x.table_name = v_sub.table_name and x.scope_key = k.scope_key
                 and x.commit_seq > v_from and x.commit_seq <= v_max
               order by x.commit_seq
               limit v_batch + 1) as seqs
          ) as h
      ), bound as materialized (
        select min(h.bound) as seq from hits as h
      )
      select b.seq, array(select distinct s.seq from hits as h cross join lateral unnest(h.seqs) as s(seq)
                           where s.seq <= b.seq order by s.seq)
        into v_bound, v_seqs
        from bound as b;
      if v_keys is null then
        select jsonb_object_agg(s.variable || '=' || v.value, 0) into v_keys
          from jsonb_each(v_sub.scopes) as s(variable, list)
          cross join lateral jsonb_array_elements_text(s.list) as v(value);
      end if;

      for commit_seq, created_at_ms, actor_id, row_id, op, row_version, scopes, payload in
        select s.seq, k.created_at_ms, k.actor_id, c.row_id, c.op, c.row_version, c.scopes, c.payload
          from unnest(v_seqs) with ordinality as s(seq, ord)
          cross join lateral (
            select y.created_at_ms, y.actor_id
              from syncpg.sync_commits as y
             where y.partition = p_partition and y.commit_seq = s.seq
             limit 1
          ) as k
          cross join lateral (
            select z.change_index, z.row_id, z.op, z.row_version, z.scopes, z.payload
              from syncpg.sync_changes as z
             where z.partition = p_partition and z.commit_seq = s.seq and z.table_name = v_sub.table_name
               and v_keys ?| z.scopes
               and (v_sub.variables = 1
                    or (select count(*) from unnest(z.scopes) as e(scope_key) where v_keys ? e.scope_key) = v_sub.variables)
             order by z.change_index
          ) as c
         order by s.ord, c.change_index
      loop
        if commit_seq is distinct from v_open then
          v_last := coalesce(v_open, v_last);
          v_open := commit_seq;
          exit reading when v_rows >= p_limit or v_bytes >= p_window_bytes;
        elsif v_rows >= p_limit and v_last > v_sub.cursor then
          exit reading;
        end if;
        v_rows := v_rows + 1;
        v_bytes := v_bytes + coalesce(octet_length(payload), 0);
        return next;
      end loop;
      v_from := v_bound;
      v_batch := least(p_limit, 2 * v_batch);
      if v_from = v_max then
        v_last := v_max;
      end if;
    end loop;

    v_total := v_total + v_bytes;
    commit_seq := v_last;
    created_at_ms := null; actor_id := null; row_id := null; op := null;
    row_version := null; scopes := null; payload := null;
    return next;
  end loop;
end
$$;
comment on function syncpg.sync_read_windows(text, text[], text[], bigint[], integer, bigint, bigint) is
  'The commit windows (§4.5) of the subscriptions i: changes of p_tables[i] after p_cursors[i] that match every variable of p_scopes[i] (a JSON object of variable to values, neither empty; SQLSTATE SY005), oldest first. Passed over: a cursor below the horizon, and one from the newest commit on, which has no window. A window ends before the commit that would make it hold over p_limit changes, or after the one that makes its payloads reach p_window_bytes; its first commit always comes whole. No window is begun after p_max_bytes. Each ends with a row whose row_id is NULL and whose commit_seq is the next cursor; changes returned of a commit above it are to be dropped. Takes no locks.';

create function syncpg.sync_read_news(
  p_partitions text[], p_seqs bigint[], p_max_behind bigint, p_max_commits integer,
  p_commit_bytes bigint, p_max_bytes bigint)
returns table (
  ord integer, commit_seq bigint, created_at_ms bigint, actor_id text, bytes bigint,
  table_name text, row_id text, op smallint, row_version bigint, scopes text[], payload bytea,
  max_commit_seq bigint, horizon_seq bigint, log_epoch text, schema_version integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_partition text;
  v_from      bigint;
  v_max       bigint;
  v_horizon   bigint;
  v_epoch     text;
  v_schema    integer;
  v_changes   integer;
  v_cost      bigint;
  v_total     bigint := 0;  -- bytes returned, with an allowance for what is not payload
  v_any       boolean := false;
begin
  select m.schema_version into v_schema from syncpg.sync_schema_meta as m where m.partition = '';
  <<reading>>
  for ord, v_partition, v_from in
    select u.ord, u.partition, u.seq from unnest(p_partitions, p_seqs) with ordinality as u(partition, seq, ord)
  loop
    exit when v_total >= p_max_bytes;
    select p.max_commit_seq, p.horizon_seq into v_max, v_horizon
      from syncpg.sync_partitions as p where p.partition = v_partition;
    select r.log_epoch into v_epoch
      from syncpg.sync_partition_registry as r where r.partition = v_partition;
    if v_from >= v_horizon and v_from < v_max and v_max - v_from <= p_max_behind then
      for commit_seq, created_at_ms, actor_id, v_changes, bytes in
        select k.commit_seq, k.created_at_ms, k.actor_id, k.change_count,
               (select coalesce(sum(octet_length(c.payload)), 0)
                  from syncpg.sync_changes as c
                 where c.partition = v_partition and c.commit_seq = k.commit_seq)
          from syncpg.sync_commits as k
         where k.partition = v_partition and k.commit_seq > v_from and k.commit_seq <= v_max
         order by k.commit_seq
         limit p_max_commits
      loop
        v_cost := 128 * v_changes + case when bytes > p_commit_bytes then 0 else bytes end;
        if v_any and v_total + v_cost > p_max_bytes then
          -- A partition of which nothing is returned is one that was not looked at.
          exit reading when commit_seq = v_from + 1;
          exit;
        end if;
        v_any := true;
        v_total := v_total + v_cost;
        table_name := null; row_id := null; op := null; row_version := null; scopes := null; payload := null;
        return next;
        for table_name, row_id, op, row_version, scopes, payload in
          select c.table_name, c.row_id, c.op, c.row_version, c.scopes,
                 case when sync_read_news.bytes <= p_commit_bytes then c.payload end
            from syncpg.sync_changes as c
           where c.partition = v_partition and c.commit_seq = sync_read_news.commit_seq
           order by c.change_index
        loop
          return next;
        end loop;
      end loop;
    end if;
    commit_seq := null; created_at_ms := null; actor_id := null; bytes := null;
    table_name := null; row_id := null; op := null; row_version := null; scopes := null; payload := null;
    max_commit_seq := coalesce(v_max, 0);
    horizon_seq := coalesce(v_horizon, 0);
    log_epoch := coalesce(v_epoch, '');
    schema_version := coalesce(v_schema, 0);
    return next;
    max_commit_seq := null; horizon_seq := null; log_epoch := null; schema_version := null;
  end loop;
end
$$;
comment on function syncpg.sync_read_news(text[], bigint[], bigint, integer, bigint, bigint) is
  'The commits of the partitions p_partitions[i] after p_seqs[i], oldest first, at most p_max_commits of each, for those who deliver them (§8.2). Each commit is a row whose row_id is NULL, then its changes; payloads are NULL in a commit that has more than p_commit_bytes of them. A commit that would make what is returned exceed p_max_bytes (128 bytes a change, and payloads) is left out, with all that follow it in its partition, except the first of all. A partition ends with a row whose commit_seq is NULL, with its newest commit, its horizon, its epoch ('''' when it has none) and the installed schema version; one without such a row was not looked at. No commits are returned for a partition whose log does not go on from p_seqs[i] (it is below the horizon or above the newest) or that is more than p_max_behind behind. Takes no locks.';

create function syncpg.sync_find_news(p_partitions text[], p_seqs bigint[], p_epochs text[], p_schema_version integer)
returns table (ord integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
  return query
    select u.ord::integer
      from unnest(p_partitions, p_seqs, p_epochs) with ordinality as u(partition, seq, epoch, ord)
      left join lateral (
        select p.max_commit_seq from syncpg.sync_partitions as p where p.partition = u.partition limit 1
      ) as p on true
      left join lateral (
        select r.log_epoch from syncpg.sync_partition_registry as r where r.partition = u.partition limit 1
      ) as r on true
     where coalesce(p.max_commit_seq, 0) <> u.seq
        or coalesce(r.log_epoch, '') <> u.epoch
        or coalesce((select m.schema_version from syncpg.sync_schema_meta as m where m.partition = ''), 0) <> p_schema_version;
end
$$;
comment on function syncpg.sync_find_news(text[], bigint[], text[], integer) is
  'Which i have news: the newest commit of the partition p_partitions[i] is not p_seqs[i], or its epoch is not p_epochs[i] ('''': it has none), or another schema version than p_schema_version (0: none) is installed. Takes no locks.';

create function syncpg.sync_count_changes(p_partition text, p_table text, p_scopes text, p_from bigint, p_limit integer)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_scopes jsonb := p_scopes::jsonb;
  v_driver text;
begin
  select min(s.variable collate "C") into v_driver from jsonb_object_keys(v_scopes) as s(variable);
  return (
    select coalesce(sum(k.change_count), 0)
      from (
        select x.commit_seq
          from jsonb_array_elements_text(v_scopes -> v_driver) as s(value)
          cross join lateral (
            select y.commit_seq
              from syncpg.sync_change_scopes as y
             where y.partition = p_partition and y.table_name = p_table and y.scope_key = v_driver || '=' || s.value
               and y.commit_seq > p_from
             order by y.commit_seq
             limit p_limit + 1
          ) as x
         limit p_limit + 1
      ) as x
      cross join lateral (
        select z.change_count from syncpg.sync_commits as z
         where z.partition = p_partition and z.commit_seq = x.commit_seq
         limit 1
      ) as k);
end
$$;
comment on function syncpg.sync_count_changes(text, text, text, bigint, integer) is
  'At most how many changes a window of p_table and p_scopes (a JSON object of variable to values) would have to hold after p_from: those of all commits that the values of the first variable name, each value by itself. Exact enough up to p_limit, behind which it stops counting commits. Takes no locks.';

create function syncpg.sync_scan_rows(
  p_partition text, p_tables text[], p_scopes text[], p_pins bigint[], p_firsts integer[], p_afters text[],
  p_limit integer, p_page_bytes bigint, p_max_bytes bigint)
returns table (ord integer, value_ord integer, row_id text, server_version bigint, payload bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return;
end
$$;
comment on function syncpg.sync_scan_rows(text, text[], text[], bigint[], integer[], text[], integer, bigint, bigint) is
  'One bootstrap page (§4.7) of each subscription. Body generated from the installed schema: one branch per table and scope variable. Takes no locks.';

create function syncpg.sync_record_client(
  p_partition text, p_log_epoch text, p_client_id text, p_actor_id text, p_wire_version smallint,
  p_cursor bigint, p_subscriptions text, p_now bigint, p_relaxed boolean)
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
  v_actor_id text;
  v_new boolean;
begin
  if p_relaxed then
    perform set_config('synchronous_commit', 'off', true);
  end if;
  insert into syncpg.sync_clients as c
    (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
  values (p_partition, p_client_id, p_actor_id, p_wire_version, p_cursor, p_subscriptions, p_now, p_now)
  on conflict (partition, client_id) do update
     set wire_version = excluded.wire_version, cursor = excluded.cursor,
         subscriptions = coalesce(excluded.subscriptions, c.subscriptions), updated_at_ms = excluded.updated_at_ms
   where c.actor_id = excluded.actor_id
  returning c.actor_id, c.xmax = 0 into v_actor_id, v_new;
  if not found then
    select c.actor_id into v_actor_id
      from syncpg.sync_clients as c
     where c.partition = p_partition and c.client_id = p_client_id;
    return v_actor_id;
  end if;
  -- A rotation deletes what there is of clients. It waits for the row when that was there
  -- before; a new one it does not see, so that it is made to wait by the registry.
  if v_new then
    perform from syncpg.sync_partition_registry as r
      where r.partition = p_partition and r.log_epoch = p_log_epoch
        for key share;
  else
    perform from syncpg.sync_partition_registry as r
      where r.partition = p_partition and r.log_epoch = p_log_epoch;
  end if;
  if not found then
    raise exception 'the log of the partition was replaced' using errcode = 'SY006';
  end if;
  return v_actor_id;
end
$$;
comment on function syncpg.sync_record_client(text, text, text, text, smallint, bigint, text, bigint, boolean) is
  'Records what a pull left of its client: wire version, cursor (§4.5), subscription list (§8.1; NULL keeps the stored one); binds a new client to the actor (§1.5). Returns the actor the client belongs to; nothing was written when that is another one. SQLSTATE SY006 when the epoch is not p_log_epoch (any more), as after a rotation, which deletes such records (§2.1). p_relaxed: losing this in a crash is harmless, so do not wait for the disk; call it in a transaction of its own then, which it turns synchronous_commit off for. Locks: the client''s row; of a new client then the partition''s registry row FOR KEY SHARE.';

create function syncpg.sync_read_client(p_partition text, p_client_id text)
returns table (actor_id text, wire_version smallint, cursor bigint, subscriptions text, max_commit_seq bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  return query
  select c.actor_id, c.wire_version, c.cursor, c.subscriptions, p.max_commit_seq
    from (values (true)) as one(row)
    left join syncpg.sync_clients as c on c.partition = p_partition and c.client_id = p_client_id
    left join syncpg.sync_partitions as p on p.partition = p_partition;
end
$$;
comment on function syncpg.sync_read_client(text, text) is
  'What the newest pull of a client left (§8.1): actor, wire version, cursor and subscription list, NULL where there is none; and the newest commit of the partition. Always one row. Locks: none.';

create function syncpg.sync_record_acks(
  p_partitions text[], p_client_ids text[], p_actor_ids text[], p_cursors bigint[], p_at_ms bigint[])
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_recorded integer;
begin
  perform set_config('synchronous_commit', 'off', true);
  -- The rows are locked one after the other, so that two callers that bring them in the
  -- same order do not wait for each other.
  with acked as materialized (
    select c.partition, c.client_id, least(a.cursor, p.max_commit_seq) as cursor, a.at_ms
      from unnest(p_partitions, p_client_ids, p_actor_ids, p_cursors, p_at_ms)
             as a(partition, client_id, actor_id, cursor, at_ms)
     cross join lateral (
             select k.partition, k.client_id
               from syncpg.sync_clients as k
              where k.partition = a.partition and k.client_id = a.client_id and k.actor_id = a.actor_id
                and k.cursor < a.cursor and k.updated_at_ms <= a.at_ms
                for no key update) as c
     cross join lateral (
             select s.max_commit_seq from syncpg.sync_partitions as s where s.partition = a.partition limit 1) as p
  )
  update syncpg.sync_clients as c
     set cursor = a.cursor, updated_at_ms = a.at_ms
    from acked as a
   where c.partition = a.partition and c.client_id = a.client_id and c.cursor < a.cursor;
  get diagnostics v_recorded = row_count;
  return v_recorded;
end
$$;
comment on function syncpg.sync_record_acks(text[], text[], text[], bigint[], bigint[]) is
  'Moves the cursors of clients to what they acknowledged (§8.2), never back and never past the log. Left alone: a client of another actor, one without a cursor, and one whose record is newer than the acknowledgement, which a pull has made. Returns how many moved. Losing this in a crash is harmless, so it does not wait for the disk: call it in a transaction of its own. Locks: the rows of the clients, in the order given.';

revoke execute on all functions in schema syncpg from public;
insert into syncpg.sync_migrations (version, breaking) values (4, false);

---- create above / drop below ----

drop function syncpg.sync_record_acks(text[], text[], text[], bigint[], bigint[]);
drop function syncpg.sync_read_client(text, text);
drop function syncpg.sync_record_client(text, text, text, text, smallint, bigint, text, bigint, boolean);
drop function syncpg.sync_count_changes(text, text, text, bigint, integer);
drop function syncpg.sync_scan_rows(text, text[], text[], bigint[], integer[], text[], integer, bigint, bigint);
drop function syncpg.sync_find_news(text[], bigint[], text[], integer);
drop function syncpg.sync_read_news(text[], bigint[], bigint, integer, bigint, bigint);
drop function syncpg.sync_read_windows(text, text[], text[], bigint[], integer, bigint, bigint);
drop function syncpg.sync_read_pull_gate(text, text, bytea);
delete from syncpg.sync_migrations where version = 4;
