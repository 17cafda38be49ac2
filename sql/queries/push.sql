-- The push path: admission, append, outcomes. All of it under the partition lock
-- that PushAdmit takes; nothing here is called without it, except a replay.

-- PushAdmit admits the commits (client_ids[commit_clients[i]], commit_ids[i]); the
-- rows they touch are (tables[i], row_ids[i]); they refer to the rows
-- (parent_tables[i], parent_rows[i]), and what they delete may lead to writes of
-- reached_tables. Guarantees: locked is false exactly
-- when every outcome is known or the schema is moving; otherwise everything returned
-- was read after the lock was granted, and no constraint or trigger is added to the
-- tables, and no other schema installed, before the transaction ends. Locks: advisory
-- (0x73796e63, 2), shared; the partition's row of sync_partitions FOR UPDATE; the app
-- tables named and reached, ROW EXCLUSIVE.
-- name: PushAdmit :one
select a.locked::boolean as locked,
       a.oversized::boolean as oversized,
       coalesce(a.moving, false)::boolean as moving,
       coalesce(a.log_epoch, '')::text as log_epoch,
       coalesce(a.epoch_required, false)::boolean as epoch_required,
       coalesce(a.schema_version, 0)::integer as schema_version,
       coalesce(a.pending_projection, '')::text as pending_projection,
       coalesce(a.max_commit_seq, 0)::bigint as max_commit_seq,
       coalesce(a.horizon_seq, 0)::bigint as horizon_seq,
       a.client_actors::text[] as client_actors,
       a.outcome_ords::integer[] as outcome_ords,
       a.outcome_statuses::smallint[] as outcome_statuses,
       a.outcome_seqs::bigint[] as outcome_seqs,
       a.outcome_results::bytea[] as outcome_results,
       a.outcome_details::text[] as outcome_details,
       a.outcome_recorded::bigint[] as outcome_recorded,
       a.outcome_ids::uuid[] as outcome_ids,
       a.outcome_versions::integer[] as outcome_versions,
       a.row_ords::integer[] as row_ords,
       a.row_versions::bigint[] as row_versions,
       a.row_payloads::bytea[] as row_payloads,
       a.row_column_versions::text[] as row_column_versions,
       a.tombstone_ords::integer[] as tombstone_ords,
       a.tombstone_seqs::bigint[] as tombstone_seqs,
       a.single_tables::text[] as single_tables,
       a.parent_ords::integer[] as parent_ords
  from syncpg.sync_admit_push(
         p_partition => @partition::text, p_now => @now::bigint,
         p_client_ids => @client_ids::text[], p_commit_clients => @commit_clients::integer[], p_commit_ids => @commit_ids::text[],
         p_tables => @tables::text[], p_row_ids => @row_ids::text[], p_max_bytes => @max_bytes::bigint,
         p_parent_tables => @parent_tables::text[], p_parent_rows => @parent_rows::text[], p_reached_tables => @reached_tables::text[])
       as a(locked, oversized, moving, log_epoch, epoch_required, schema_version, pending_projection, max_commit_seq, horizon_seq,
            client_actors, outcome_ords, outcome_statuses, outcome_seqs, outcome_results, outcome_details,
            outcome_recorded, outcome_ids, outcome_versions, row_ords, row_versions, row_payloads, row_column_versions,
            tombstone_ords, tombstone_seqs, single_tables, parent_ords);

-- PushAppend appends commits under consecutive seqs after base_seq. Guarantees: no
-- gap and no number used twice (SQLSTATE SY002 when the log is elsewhere), and
-- commit, changes, scope index and tombstones together or not at all. Locks: the
-- caller's partition lock.
-- name: PushAppend :one
select syncpg.sync_append_commits(
         p_partition => @partition::text, p_base_seq => @base_seq::bigint, p_now => @now::bigint, p_writer_version => @writer_version::integer,
         p_client_ids => @client_ids::text[], p_commit_ids => @commit_ids::text[], p_actor_ids => @actor_ids::text[],
         p_change_counts => @change_counts::integer[],
         p_change_commits => @change_commits::integer[], p_change_indexes => @change_indexes::integer[],
         p_change_tables => @change_tables::text[], p_change_rows => @change_rows::text[], p_change_ops => @change_ops::smallint[],
         p_change_versions => @change_versions::bigint[], p_change_payloads => @change_payloads::bytea[],
         p_change_scope_sets => @change_scope_sets::integer[], p_scope_sets => @scope_sets::text[],
         p_tombstone_commits => @tombstone_commits::integer[], p_tombstone_tables => @tombstone_tables::text[],
         p_tombstone_rows => @tombstone_rows::text[],
         p_cleared_tables => @cleared_tables::text[], p_cleared_rows => @cleared_rows::text[])::bigint as max_commit_seq;

-- PushRecordOutcomes records outcomes and binds new clients to their actor.
-- Guarantees: the first outcome of a commit stays (SQLSTATE 23505 when there is one
-- already), and so does the actor of a client (SY003). Locks: the caller's partition
-- lock.
-- name: PushRecordOutcomes :exec
select syncpg.sync_record_outcomes(
         p_partition => @partition::text, p_now => @now::bigint, p_schema_version => @schema_version::integer,
         p_client_ids => @client_ids::text[], p_commit_ids => @commit_ids::text[], p_statuses => @statuses::smallint[],
         p_commit_seqs => @commit_seqs::bigint[], p_results => @results::bytea[], p_details => @details::text[], p_outcome_ids => @outcome_ids::uuid[],
         p_new_clients => @new_clients::text[], p_new_actors => @new_actors::text[]);

-- PushReadLayouts reads the layouts of earlier schema versions, for the rows in stored
-- outcomes. Guarantees: none; a version that was never installed here is left out. Locks:
-- none.
-- name: PushReadLayouts :many
select l.layout from syncpg.sync_schema_layouts as l
 where l.partition = '' and l.schema_version = any(@schema_versions::integer[]);
