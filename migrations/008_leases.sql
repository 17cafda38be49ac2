-- Auth leases in SQL: find one, issue one (§7.3).
-- Why: they travel in the round trips of a pull, whose plans must stay on the index.
-- Locks: none (new functions). Duration: milliseconds.
-- breaking: no

create function syncpg.sync_find_lease(p_partition text, p_client_id text, p_with_scopes boolean)
returns table (
  lease_id text, actor_id text, allowed_digest bytea, allowed_scopes text,
  issued_at_ms bigint, expires_at_ms bigint, revoked_at_ms bigint, signature bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  select l.lease_id, l.actor_id, sha256(convert_to(l.allowed_scopes, 'UTF8')),
         case when p_with_scopes then l.allowed_scopes end,
         l.issued_at_ms, l.expires_at_ms, l.revoked_at_ms, l.signature
    into lease_id, actor_id, allowed_digest, allowed_scopes, issued_at_ms, expires_at_ms, revoked_at_ms, signature
    from syncpg.sync_leases as l
   where l.partition = p_partition and l.client_id = p_client_id;
  return next;
end
$$;
comment on function syncpg.sync_find_lease(text, text, boolean) is
  'The auth lease of a client (§7.3), always one row, NULL when there is none. The scopes come as their SHA-256, and as text only when p_with_scopes. Takes no locks.';

create function syncpg.sync_issue_lease(
  p_partition text, p_client_id text, p_actor_id text, p_previous text, p_lease_id text, p_allowed_scopes text,
  p_issued_at bigint, p_expires_at bigint, p_signature bytea, p_relaxed boolean)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  if p_relaxed then
    perform set_config('synchronous_commit', 'off', true);
  end if;
  perform from syncpg.sync_clients as c
    where c.partition = p_partition and c.client_id = p_client_id and c.actor_id = p_actor_id;
  if not found then
    return false;
  end if;
  if p_previous is null then
    insert into syncpg.sync_leases
      (partition, client_id, lease_id, actor_id, allowed_scopes, issued_at_ms, expires_at_ms, signature)
    values
      (p_partition, p_client_id, p_lease_id, p_actor_id, p_allowed_scopes, p_issued_at, p_expires_at, p_signature)
    on conflict (partition, client_id) do nothing;
  else
    update syncpg.sync_leases as l
       set lease_id = p_lease_id, actor_id = p_actor_id, allowed_scopes = p_allowed_scopes,
           issued_at_ms = p_issued_at, expires_at_ms = p_expires_at, revoked_at_ms = null, signature = p_signature
     where l.partition = p_partition and l.client_id = p_client_id and l.lease_id = p_previous
       and (l.revoked_at_ms is null or p_lease_id <> p_previous);
  end if;
  return found;
end
$$;
comment on function syncpg.sync_issue_lease(text, text, text, text, text, text, bigint, bigint, bytea, boolean) is
  'Stores the auth lease of a client in place of the one with the id p_previous, NULL for none (§7.3.3). False, and nothing changed: another one is there by now, the one there was revoked and would keep its id, or the client does not belong to p_actor_id. p_relaxed: losing this in a crash is harmless, so do not wait for the disk, which turns synchronous_commit off for the transaction. Locks: the lease.';

revoke execute on all functions in schema syncpg from public;
insert into syncpg.sync_migrations (version, breaking) values (8, false);

---- create above / drop below ----

drop function syncpg.sync_issue_lease(text, text, text, text, text, text, bigint, bigint, bytea, boolean);
drop function syncpg.sync_find_lease(text, text, boolean);
delete from syncpg.sync_migrations where version = 8;
