-- Durable reactions in SQL: enqueue, claim, lease, outcome, retention.
-- Why: a push stores its reactions in its own transaction; a runner's every step is
--   one statement that decides for itself whether the lease is still held.
-- Locks: none (new functions). Duration: milliseconds.
-- breaking: no
--
-- A claim and a retention pass first lock the rows they take, in the order of an
-- index and past the rows that others hold, then change them by ctid in a statement
-- of its own, which sees what it locked.
--
-- Their plans are generic and pinned to indexes for the reason that 003_push.sql
-- gives: the order asked for is the one of the index that must be used, if need be in
-- a subquery, which the planner does not merge into its surroundings. A list turns
-- sorting off, so that only rows of one time are sorted, and compilation, which the
-- price of a sort that cannot be helped would set off. What asks for no order names
-- the whole primary key, and none of the two times that the other indexes are about.

create function syncpg.sync_enqueue_reactions(
  p_partition text, p_now bigint,
  p_client_ids text[], p_commit_ids text[], p_commit_seqs bigint[],
  p_keys text[], p_idempotency_keys text[], p_types text[], p_versions integer[], p_payloads text[], p_max_attempts integer[])
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
  v_inserted integer;
begin
  insert into syncpg.sync_reactions
    (partition, client_id, client_commit_id, reaction_key, idempotency_key, commit_seq,
     reaction_type, reaction_version, payload, max_attempts, due_at_ms, created_at_ms)
  select p_partition, r.client_id, r.commit_id, r.key, r.idempotency_key, r.commit_seq,
         r.type, r.version, r.payload::json, r.max_attempts, p_now, p_now
    from unnest(p_client_ids, p_commit_ids, p_commit_seqs, p_keys, p_idempotency_keys, p_types, p_versions, p_payloads, p_max_attempts)
         as r(client_id, commit_id, commit_seq, key, idempotency_key, type, version, payload, max_attempts)
  on conflict (partition, client_id, client_commit_id, reaction_key) do nothing;
  get diagnostics v_inserted = row_count;
  return v_inserted;
end
$$;
comment on function syncpg.sync_enqueue_reactions(text, bigint, text[], text[], bigint[], text[], text[], text[], integer[], text[], integer[]) is
  'Stores the reactions of accepted commits (§6.9), due at once; one that is stored already stays as it is. Returns how many are new. The caller holds the partition lock.';

create function syncpg.sync_claim_reactions(
  p_partition text, p_types text[], p_owner text, p_now bigint, p_lease_until bigint, p_limit integer)
returns table (
  client_id text, client_commit_id text, reaction_key text, idempotency_key text, commit_seq bigint,
  reaction_type text, reaction_version integer, payload text, attempts integer, max_attempts integer)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_type text;
  v_taken tid[];
  v_left integer := p_limit;
begin
  for v_type in
    select k.reaction_type
      from (select distinct u.reaction_type from unnest(p_types) as u(reaction_type)) as k
      cross join lateral (
        select x.due_at_ms
          from syncpg.sync_reactions as x
         where x.partition = p_partition and x.reaction_type = k.reaction_type and x.due_at_ms <= p_now
         order by x.due_at_ms
         limit 1
      ) as oldest
     order by oldest.due_at_ms, k.reaction_type
  loop
    v_taken := array(
      select x.ctid
        from syncpg.sync_reactions as x
       where x.partition = p_partition and x.reaction_type = v_type and x.due_at_ms <= p_now
       order by x.due_at_ms
       limit v_left
         for update skip locked);
    return query
    with claimed as (
      update syncpg.sync_reactions as r
         set state = 'leased', lease_owner = p_owner, due_at_ms = p_lease_until, attempts = r.attempts + 1
        from unnest(v_taken) with ordinality as k(ctid, ord)
       where r.ctid = k.ctid
      returning k.ord, r.*
    )
    select c.client_id, c.client_commit_id, c.reaction_key, c.idempotency_key, c.commit_seq,
           c.reaction_type, c.reaction_version, c.payload::text, c.attempts, c.max_attempts
      from claimed as c
     order by c.ord;
    v_left := v_left - cardinality(v_taken);
    exit when v_left <= 0;
  end loop;
end
$$;
comment on function syncpg.sync_claim_reactions(text, text[], text, bigint, bigint, integer) is
  'Leases up to p_limit reactions of the types to p_owner until p_lease_until and counts the attempt: pending ones that are due and leased ones whose lease has expired at p_now. Oldest first within a type; the type with the oldest comes first. Meant for READ COMMITTED; other levels fail (40001) where this one passes over. Locks: the reactions it returns; never waits for one.';

create function syncpg.sync_extend_reaction(
  p_partition text, p_client_id text, p_commit_id text, p_key text, p_owner text, p_lease_until bigint)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  update syncpg.sync_reactions as r set due_at_ms = greatest(r.due_at_ms, p_lease_until)
   where r.partition = p_partition and r.client_id = p_client_id and r.client_commit_id = p_commit_id
     and r.reaction_key = p_key
     and r.lease_owner = p_owner;
  return found;
end
$$;
comment on function syncpg.sync_extend_reaction(text, text, text, text, text, bigint) is
  'Extends the lease that p_owner holds on a reaction, never shortens it. False: p_owner does not hold it any more. Locks: the reaction.';

create function syncpg.sync_settle_reaction(
  p_partition text, p_client_id text, p_commit_id text, p_key text, p_owner text, p_now bigint,
  p_state text, p_due_at bigint, p_failure_code text, p_failure_details text)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  update syncpg.sync_reactions as r
     set state = p_state, lease_owner = null,
         due_at_ms = case when p_state = 'pending' then p_due_at end,
         finished_at_ms = case when p_state <> 'pending' then p_now end,
         attempts = case when p_state = 'pending' and p_failure_code is null then r.attempts - 1 else r.attempts end,
         failure_code = coalesce(p_failure_code, r.failure_code),
         failure_details = case when p_failure_code is null then r.failure_details else p_failure_details::json end,
         failed_at_ms = case when p_failure_code is null then r.failed_at_ms else p_now end
   where r.partition = p_partition and r.client_id = p_client_id and r.client_commit_id = p_commit_id
     and r.reaction_key = p_key
     and r.lease_owner = p_owner;
  return found;
end
$$;
comment on function syncpg.sync_settle_reaction(text, text, text, text, text, bigint, text, bigint, text, text) is
  'Ends the lease that p_owner holds on a reaction. p_state says how: completed; dead-letter, with a failure; pending with a failure, to run again at p_due_at; pending without one, given back before it was started, so that the attempt does not count. False: p_owner does not hold it any more, and nothing changed. Locks: the reaction.';

create function syncpg.sync_retry_reaction(p_partition text, p_client_id text, p_commit_id text, p_key text, p_now bigint)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  update syncpg.sync_reactions as r
     set state = 'pending', due_at_ms = p_now, finished_at_ms = null, attempts = 0,
         failure_code = null, failure_details = null, failed_at_ms = null
   where r.partition = p_partition and r.client_id = p_client_id and r.client_commit_id = p_commit_id
     and r.reaction_key = p_key
     and r.state = 'dead-letter';
  return found;
end
$$;
comment on function syncpg.sync_retry_reaction(text, text, text, text, bigint) is
  'Makes a dead letter due at once, its attempts and failure forgotten. False: there is no such dead letter. Locks: the reaction; waits for a retention pass that has it.';

create function syncpg.sync_prune_reactions(
  p_partition text, p_completed_before bigint, p_dead_letter_before bigint, p_limit integer)
returns table (completed integer, dead_letters integer)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_state text;
  v_before bigint;
  v_taken tid[];
begin
  completed := 0;
  dead_letters := 0;
  foreach v_state in array array['completed', 'dead-letter'] loop
    v_before := case v_state when 'completed' then p_completed_before else p_dead_letter_before end;
    v_taken := array(
      select x.ctid
        from syncpg.sync_reactions as x
       where x.partition = p_partition and x.state = v_state and x.finished_at_ms < v_before
       order by x.finished_at_ms
       limit p_limit - completed
         for update skip locked);
    delete from syncpg.sync_reactions as r
     using unnest(v_taken) as k(ctid)
     where r.ctid = k.ctid;
    if v_state = 'completed' then
      completed := cardinality(v_taken);
    else
      dead_letters := cardinality(v_taken);
    end if;
  end loop;
  return next;
end
$$;
comment on function syncpg.sync_prune_reactions(text, bigint, bigint, integer) is
  'Deletes up to p_limit finished reactions, oldest first: completed ones finished before p_completed_before, then dead letters that failed before p_dead_letter_before; NULL keeps all of them. Returns how many of each. Meant for READ COMMITTED, as the claim is. Locks: the reactions it deletes; passes over those that others hold.';

create function syncpg.sync_list_due_partitions(p_types text[], p_now bigint, p_after text, p_limit integer)
returns table (partition text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  v_partition text := p_after;
  v_left integer := p_limit;
begin
  while v_left > 0 loop
    select x.partition into v_partition
      from syncpg.sync_reactions as x
     where x.partition > v_partition and x.due_at_ms is not null
     order by x.partition, x.reaction_type, x.due_at_ms
     limit 1;
    exit when not found;
    if exists (
      select 1
        from unnest(p_types) as k(reaction_type)
        cross join lateral (
          select 1
            from syncpg.sync_reactions as x
           where x.partition = v_partition and x.reaction_type = k.reaction_type and x.due_at_ms <= p_now
           order by x.due_at_ms
           limit 1
        ) as due
    ) then
      sync_list_due_partitions.partition := v_partition;
      v_left := v_left - 1;
      return next;
    end if;
  end loop;
end
$$;
comment on function syncpg.sync_list_due_partitions(text[], bigint, text, integer) is
  'The first p_limit partitions after p_after, in byte order, that have a reaction of the types to claim at p_now. Takes no locks.';

create function syncpg.sync_list_reactions(
  p_partition text, p_state text, p_after_ms bigint, p_after_client text, p_after_commit text, p_after_key text, p_limit integer)
returns table (
  client_id text, client_commit_id text, reaction_key text, idempotency_key text, commit_seq bigint,
  reaction_type text, reaction_version integer, payload text, state text, attempts integer, max_attempts integer,
  due_at_ms bigint, lease_owner text, failure_code text, failure_details text, failed_at_ms bigint,
  created_at_ms bigint, finished_at_ms bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
begin
  if p_state in ('pending', 'leased') then
    return query
    select x.client_id, x.client_commit_id, x.reaction_key, x.idempotency_key, x.commit_seq,
           x.reaction_type, x.reaction_version, x.payload::text, x.state, x.attempts, x.max_attempts,
           x.due_at_ms, x.lease_owner, x.failure_code, x.failure_details::text, x.failed_at_ms,
           x.created_at_ms, x.finished_at_ms
      from (
        select y.*
          from syncpg.sync_reactions as y
         where y.partition = p_partition and y.due_at_ms is not null and y.state = p_state
         order by y.reaction_type, y.due_at_ms
      ) as x
     where p_after_ms is null
        or (x.due_at_ms, x.client_id, x.client_commit_id, x.reaction_key) > (p_after_ms, p_after_client, p_after_commit, p_after_key)
     order by x.due_at_ms, x.client_id, x.client_commit_id, x.reaction_key
     limit p_limit;
  else
    return query
    select x.client_id, x.client_commit_id, x.reaction_key, x.idempotency_key, x.commit_seq,
           x.reaction_type, x.reaction_version, x.payload::text, x.state, x.attempts, x.max_attempts,
           x.due_at_ms, x.lease_owner, x.failure_code, x.failure_details::text, x.failed_at_ms,
           x.created_at_ms, x.finished_at_ms
      from (
        select y.*
          from syncpg.sync_reactions as y
         where y.partition = p_partition and y.state = p_state
           and y.finished_at_ms <= coalesce(p_after_ms, 9223372036854775807)
         order by y.finished_at_ms desc
      ) as x
     where p_after_ms is null
        or (x.finished_at_ms, x.client_id, x.client_commit_id, x.reaction_key) < (p_after_ms, p_after_client, p_after_commit, p_after_key)
     order by x.finished_at_ms desc, x.client_id desc, x.client_commit_id desc, x.reaction_key desc
     limit p_limit;
  end if;
end
$$;
comment on function syncpg.sync_list_reactions(text, text, bigint, text, text, text, integer) is
  'One page of a partition''s reactions of a state, after the position p_after_*. Pending and leased ones: the one due first comes first, and all unfinished ones are looked at; completed ones and dead letters: the newest comes first. Takes no locks.';

revoke execute on all functions in schema syncpg from public;

insert into syncpg.sync_migrations (version, breaking) values (5, false);

---- create above / drop below ----

drop function syncpg.sync_list_reactions(text, text, bigint, text, text, text, integer);
drop function syncpg.sync_list_due_partitions(text[], bigint, text, integer);
drop function syncpg.sync_prune_reactions(text, bigint, bigint, integer);
drop function syncpg.sync_retry_reaction(text, text, text, text, bigint);
drop function syncpg.sync_settle_reaction(text, text, text, text, text, bigint, text, bigint, text, text);
drop function syncpg.sync_extend_reaction(text, text, text, text, text, bigint);
drop function syncpg.sync_claim_reactions(text, text[], text, bigint, bigint, integer);
drop function syncpg.sync_enqueue_reactions(text, bigint, text[], text[], bigint[], text[], text[], text[], integer[], text[], integer[]);
delete from syncpg.sync_migrations where version = 5;
