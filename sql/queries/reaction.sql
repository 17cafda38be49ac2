-- Durable reactions (§6.9). ReactionEnqueue belongs into the flush of a push; each of
-- the others is a transaction of its own, or part of the host's.

-- ReactionEnqueue stores the reactions (keys[i], types[i], …) of the commits
-- (client_ids[i], commit_ids[i], commit_seqs[i]), due at once, and returns how many
-- are new. Guarantees: a reaction that is stored already stays as it is. Locks: the
-- caller's partition lock.
-- name: ReactionEnqueue :one
select syncpg.sync_enqueue_reactions(
         p_partition => @partition::text, p_now => @now::bigint,
         p_client_ids => @client_ids::text[], p_commit_ids => @commit_ids::text[], p_commit_seqs => @commit_seqs::bigint[],
         p_keys => @keys::text[], p_idempotency_keys => @idempotency_keys::text[], p_types => @types::text[],
         p_versions => @versions::integer[], p_payloads => @payloads::text[], p_max_attempts => @max_attempts::integer[])::integer as inserted;

-- ReactionClaim leases up to batch reactions of the types to owner and counts the
-- attempt. Guarantees: each was pending and due, or leased and its lease expired;
-- nobody else gets it before lease_until. Locks: the reactions it returns; waits for
-- none.
-- name: ReactionClaim :many
select r.client_id::text as client_id, r.client_commit_id::text as client_commit_id, r.reaction_key::text as reaction_key,
       r.idempotency_key::text as idempotency_key, r.commit_seq::bigint as commit_seq,
       r.reaction_type::text as reaction_type, r.reaction_version::integer as reaction_version, r.payload::text as payload,
       r.attempts::integer as attempts, r.max_attempts::integer as max_attempts
  from syncpg.sync_claim_reactions(
         p_partition => @partition::text, p_types => @types::text[], p_owner => @owner::text,
         p_now => @now::bigint, p_lease_until => @lease_until::bigint, p_limit => @batch::integer)
       as r(client_id, client_commit_id, reaction_key, idempotency_key, commit_seq,
            reaction_type, reaction_version, payload, attempts, max_attempts);

-- ReactionExtend extends a lease. Guarantees: false, and nothing changed, when owner
-- does not hold it any more. Locks: the reaction.
-- name: ReactionExtend :one
select syncpg.sync_extend_reaction(
         p_partition => @partition::text, p_client_id => @client_id::text, p_commit_id => @commit_id::text, p_key => @key::text,
         p_owner => @owner::text, p_lease_until => @lease_until::bigint)::boolean as held;

-- ReactionSettle ends a lease: state says how. Guarantees: false, and nothing changed,
-- when owner does not hold it any more. Locks: the reaction.
-- name: ReactionSettle :one
select syncpg.sync_settle_reaction(
         p_partition => @partition::text, p_client_id => @client_id::text, p_commit_id => @commit_id::text, p_key => @key::text,
         p_owner => @owner::text, p_now => @now::bigint, p_state => @state::text, p_due_at => @due_at::bigint,
         p_failure_code => sqlc.narg(failure_code)::text, p_failure_details => sqlc.narg(failure_details)::text)::boolean as held;

-- ReactionRetry makes a dead letter due at once. Guarantees: false, and nothing
-- changed, when there is no such dead letter. Locks: the reaction.
-- name: ReactionRetry :one
select syncpg.sync_retry_reaction(
         p_partition => @partition::text, p_client_id => @client_id::text, p_commit_id => @commit_id::text, p_key => @key::text,
         p_now => @now::bigint)::boolean as reset;

-- ReactionPrune deletes finished reactions and returns how many. Guarantees: at most
-- batch, completed ones first; only those finished before their cutoff. Locks: the
-- reactions it deletes; waits for none.
-- name: ReactionPrune :one
select p.completed::integer as completed, p.dead_letters::integer as dead_letters
  from syncpg.sync_prune_reactions(
         p_partition => @partition::text, p_completed_before => sqlc.narg(completed_before)::bigint,
         p_dead_letter_before => sqlc.narg(dead_letter_before)::bigint, p_limit => @batch::integer)
       as p(completed, dead_letters);

-- ReactionListDuePartitions returns the first partitions after one that have something
-- to claim. Guarantees: in byte order. Locks: none.
-- name: ReactionListDuePartitions :many
select p.partition::text as partition
  from syncpg.sync_list_due_partitions(p_types => @types::text[], p_now => @now::bigint, p_after => @after::text, p_limit => @batch::integer)
       as p(partition);

-- ReactionList returns a page of the reactions of a state. Guarantees: unfinished
-- ones by due time, finished ones newest first; what does not exist of one is 0 or
-- empty. Locks: none.
-- name: ReactionList :many
select r.client_id::text as client_id, r.client_commit_id::text as client_commit_id, r.reaction_key::text as reaction_key,
       r.idempotency_key::text as idempotency_key, r.commit_seq::bigint as commit_seq,
       r.reaction_type::text as reaction_type, r.reaction_version::integer as reaction_version, r.payload::text as payload,
       r.state::text as state, r.attempts::integer as attempts, r.max_attempts::integer as max_attempts,
       coalesce(r.due_at_ms, 0)::bigint as due_at_ms, coalesce(r.lease_owner, '')::text as lease_owner,
       coalesce(r.failure_code, '')::text as failure_code, coalesce(r.failure_details, '')::text as failure_details,
       coalesce(r.failed_at_ms, 0)::bigint as failed_at_ms,
       r.created_at_ms::bigint as created_at_ms, coalesce(r.finished_at_ms, 0)::bigint as finished_at_ms
  from syncpg.sync_list_reactions(
         p_partition => @partition::text, p_state => @state::text, p_after_ms => sqlc.narg(after_ms)::bigint,
         p_after_client => @after_client::text, p_after_commit => @after_commit::text, p_after_key => @after_key::text,
         p_limit => @batch::integer)
       as r(client_id, client_commit_id, reaction_key, idempotency_key, commit_seq,
            reaction_type, reaction_version, payload, state, attempts, max_attempts,
            due_at_ms, lease_owner, failure_code, failure_details, failed_at_ms, created_at_ms, finished_at_ms);
