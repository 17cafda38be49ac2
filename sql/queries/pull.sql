-- The pull path: gate, windows and pages in one REPEATABLE READ transaction, then
-- the client's record in one of its own.

-- PullReadGate returns what a pull must know before it answers. Guarantees: always
-- one row; log_epoch is empty for a partition that does not exist, client_actor for
-- a client that does not. Locks: none.
-- name: PullReadGate :one
select coalesce(g.log_epoch, '')::text as log_epoch,
       coalesce(g.epoch_required, false)::boolean as epoch_required,
       coalesce(g.schema_version, 0)::integer as schema_version,
       coalesce(g.pending_projection, '')::text as pending_projection,
       coalesce(g.max_commit_seq, 0)::bigint as max_commit_seq,
       coalesce(g.horizon_seq, 0)::bigint as horizon_seq,
       coalesce(g.client_actor, '')::text as client_actor,
       coalesce(g.client_wire_version, 0)::smallint as client_wire_version,
       coalesce(g.client_cursor, -1)::bigint as client_cursor,
       coalesce(g.same_subscriptions, false)::boolean as same_subscriptions,
       coalesce(g.client_updated_at_ms, 0)::bigint as client_updated_at_ms
  from syncpg.sync_read_pull_gate(
         p_partition => @partition::text, p_client_id => @client_id::text,
         p_subscriptions_digest => @subscriptions_digest::bytea)
       as g(log_epoch, epoch_required, schema_version, pending_projection, max_commit_seq, horizon_seq,
            client_actor, client_wire_version, client_cursor, same_subscriptions, client_updated_at_ms);

-- PullReadWindows returns the commit windows of the subscriptions (tables[i],
-- scopes[i], cursors[i]). Guarantees: in the order of the arguments, then of the
-- log; a subscription that was read ends with a row whose row_id is empty and whose
-- commit_seq is the next cursor. Locks: none.
-- name: PullReadWindows :many
select w.ord::integer as ord, w.commit_seq::bigint as commit_seq, coalesce(w.created_at_ms, 0)::bigint as created_at_ms,
       coalesce(w.actor_id, '')::text as actor_id, coalesce(w.row_id, '')::text as row_id, coalesce(w.op, 0)::smallint as op,
       coalesce(w.row_version, 0)::bigint as row_version, w.scopes::text[] as scopes, w.payload::bytea as payload
  from syncpg.sync_read_windows(
         p_partition => @partition::text, p_tables => @tables::text[], p_scopes => @scopes::text[], p_cursors => @cursors::bigint[],
         p_limit => @change_limit::integer, p_window_bytes => @window_bytes::bigint, p_max_bytes => @max_bytes::bigint)
       as w(ord, commit_seq, created_at_ms, actor_id, row_id, op, row_version, scopes, payload);

-- PullScanRows returns one bootstrap page of each of the subscriptions (tables[i],
-- scopes[i]), from row afters[i] of value firsts[i] on. Guarantees: in the order of
-- the arguments, then of values, then of row ids; a page that was read ends with a
-- row whose row_id is empty and whose value_ord is 0 when nothing follows. Locks:
-- none.
-- name: PullScanRows :many
select r.ord::integer as ord, coalesce(r.value_ord, 0)::integer as value_ord, coalesce(r.row_id, '')::text as row_id,
       coalesce(r.server_version, 0)::bigint as server_version, r.payload::bytea as payload
  from syncpg.sync_scan_rows(
         p_partition => @partition::text, p_tables => @tables::text[], p_scopes => @scopes::text[], p_pins => @pins::bigint[],
         p_firsts => @firsts::integer[], p_afters => @afters::text[],
         p_limit => @row_limit::integer, p_page_bytes => @page_bytes::bigint, p_max_bytes => @max_bytes::bigint)
       as r(ord, value_ord, row_id, server_version, payload);

-- PullPinPlans makes the plans of the rest of the transaction such that they read
-- tables by an index, in the order of the index, and do not depend on statistics. For
-- plain queries; functions have settings of their own. Guarantees: nothing of it is
-- left when the transaction ends. Locks: none.
-- name: PullPinPlans :exec
select set_config(s.name, s.value, true)
  from (values ('plan_cache_mode', 'force_generic_plan'), ('jit', 'off'),
               ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_sort', 'off'),
               ('enable_incremental_sort', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'),
               ('enable_material', 'off'), ('enable_memoize', 'off'),
               ('max_parallel_workers_per_gather', '0')) as s(name, value);

-- PullCountChanges returns at most how many changes a subscription has after a seq, from
-- the scope index and the sizes of commits. Guarantees: over max_changes when there are
-- more commits than that. Locks: none.
-- name: PullCountChanges :one
select syncpg.sync_count_changes(
         p_partition => @partition::text, p_table => @table_name::text, p_scopes => @scopes::text,
         p_from => @from_seq::bigint, p_limit => @max_changes::integer)::bigint as changes;

-- PullRecordClient records what a pull left of its client and returns the actor the
-- client belongs to. Guarantees: nothing is written when that is another actor, nor when the
-- pull was of another log epoch (SQLSTATE SY006); a NULL subscription list keeps the stored
-- one. Locks: the client's row; the partition's registry row FOR KEY SHARE for a new client.
-- A relaxed one must be a transaction of its own.
-- name: PullRecordClient :one
select syncpg.sync_record_client(
         p_partition => @partition::text, p_log_epoch => @log_epoch::text, p_client_id => @client_id::text, p_actor_id => @actor_id::text,
         p_wire_version => @wire_version::smallint, p_cursor => sqlc.narg(cursor)::bigint,
         p_subscriptions => sqlc.narg(subscriptions)::text, p_now => @now::bigint,
         p_relaxed => @relaxed::boolean)::text as actor_id;
