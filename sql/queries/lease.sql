-- Auth leases (§7.3). LeaseFind and LeaseIssue travel in the round trips of a pull.

-- LeaseFind returns the lease of a client. Guarantees: always one row; found is false
-- when there is none; the scopes come as their SHA-256, and as text only when
-- with_scopes. Locks: none.
-- name: LeaseFind :one
select (l.lease_id is not null)::boolean as found, coalesce(l.lease_id, '')::text as lease_id, coalesce(l.actor_id, '')::text as actor_id,
       coalesce(l.allowed_digest, '')::bytea as allowed_digest, coalesce(l.allowed_scopes, '')::text as allowed_scopes,
       coalesce(l.issued_at_ms, 0)::bigint as issued_at_ms, coalesce(l.expires_at_ms, 0)::bigint as expires_at_ms,
       coalesce(l.revoked_at_ms, -1)::bigint as revoked_at_ms, coalesce(l.signature, '')::bytea as signature
  from syncpg.sync_find_lease(
         p_partition => @partition::text, p_client_id => @client_id::text, p_with_scopes => @with_scopes::boolean)
       as l(lease_id, actor_id, allowed_digest, allowed_scopes, issued_at_ms, expires_at_ms, revoked_at_ms, signature);

-- LeaseIssue stores the lease of a client in place of the one with the id previous, NULL
-- for none. Guarantees: false, and nothing changed, when another one is there by now,
-- when it would keep the id of a revoked one, and when the client is not the actor's.
-- Locks: the lease. A relaxed one must be a transaction of its own, or of what may be
-- lost as well.
-- name: LeaseIssue :one
select syncpg.sync_issue_lease(
         p_partition => @partition::text, p_client_id => @client_id::text, p_actor_id => @actor_id::text,
         p_previous => sqlc.narg(previous)::text, p_lease_id => @lease_id::text, p_allowed_scopes => @allowed_scopes::text,
         p_issued_at => @issued_at::bigint, p_expires_at => @expires_at::bigint, p_signature => @signature::bytea,
         p_relaxed => @relaxed::boolean)::boolean as issued;

-- LeaseLock locks a lease by its id and returns it. Guarantees: no row when there is
-- none; nobody changes it before the transaction ends. Locks: the lease.
-- name: LeaseLock :one
select l.client_id, l.actor_id, sha256(convert_to(l.allowed_scopes, 'UTF8'))::bytea as allowed_digest,
       l.issued_at_ms, l.expires_at_ms, coalesce(l.revoked_at_ms, -1)::bigint as revoked_at_ms, l.signature
  from syncpg.sync_leases as l
 where l.partition = @partition::text and l.lease_id = @lease_id::text
   for no key update;

-- LeaseRevoke marks a lease as revoked. Guarantees: none beyond the row, which LeaseLock
-- has locked. Locks: the lease.
-- name: LeaseRevoke :exec
update syncpg.sync_leases as l
   set revoked_at_ms = @revoked_at::bigint, signature = @signature::bytea
 where l.partition = @partition::text and l.lease_id = @lease_id::text;

-- LeaseClear deletes a revoked lease. Guarantees: zero when it is not revoked or there is
-- none. Locks: the lease.
-- name: LeaseClear :execrows
delete from syncpg.sync_leases as l
 where l.partition = @partition::text and l.lease_id = @lease_id::text and l.revoked_at_ms is not null;

-- LeaseList returns leases in the order of partition and client, after a place in it and up
-- to another; an actor, client or lease id that is NULL stands for any.
-- Guarantees: at most batch, none of which is locked. Locks: none.
-- name: LeaseList :many
select l.partition, l.client_id, l.lease_id, l.actor_id, sha256(convert_to(l.allowed_scopes, 'UTF8'))::bytea as allowed_digest,
       l.issued_at_ms, l.expires_at_ms, coalesce(l.revoked_at_ms, -1)::bigint as revoked_at_ms, l.signature
  from syncpg.sync_leases as l
 where (l.partition, l.client_id) > (@after_partition::text, @after_client::text)
   and (l.partition, l.client_id) <= (@up_to_partition::text, @up_to_client::text)
   and l.client_id = coalesce(sqlc.narg('client_id')::text, l.client_id)
   and l.lease_id = coalesce(sqlc.narg('lease_id')::text, l.lease_id)
   and l.actor_id = coalesce(sqlc.narg('actor_id')::text, l.actor_id)
 order by l.partition, l.client_id
 limit @batch::integer;
