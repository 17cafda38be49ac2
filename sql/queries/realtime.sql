-- Realtime across processes: reading the log for sockets, notifications.

-- RealtimeReadNews returns the commits of the partitions (partitions[i]) after
-- seqs[i]. Guarantees: one snapshot; in the order of the arguments, then of the log; a
-- commit comes whole, as a row without row_id and then its changes, or not at all; a
-- partition that was looked at ends with a row without commit_seq. Locks: none.
-- name: RealtimeReadNews :many
select n.ord::integer as ord, coalesce(n.commit_seq, 0)::bigint as commit_seq, coalesce(n.created_at_ms, 0)::bigint as created_at_ms,
       coalesce(n.actor_id, '')::text as actor_id, coalesce(n.bytes, 0)::bigint as bytes,
       coalesce(n.table_name, '')::text as table_name, coalesce(n.row_id, '')::text as row_id, coalesce(n.op, 0)::smallint as op,
       coalesce(n.row_version, 0)::bigint as row_version, n.scopes::text[] as scopes, n.payload::bytea as payload,
       coalesce(n.max_commit_seq, 0)::bigint as max_commit_seq, coalesce(n.horizon_seq, 0)::bigint as horizon_seq,
       coalesce(n.log_epoch, '')::text as log_epoch, coalesce(n.schema_version, 0)::integer as schema_version
  from syncpg.sync_read_news(
         p_partitions => @partitions::text[], p_seqs => @seqs::bigint[],
         p_max_behind => @max_behind::bigint, p_max_commits => @max_commits::integer,
         p_commit_bytes => @commit_bytes::bigint, p_max_bytes => @max_bytes::bigint)
       as n(ord, commit_seq, created_at_ms, actor_id, bytes, table_name, row_id, op, row_version, scopes, payload,
            max_commit_seq, horizon_seq, log_epoch, schema_version);

-- RealtimeFindNews returns which of the partitions are not as they were: the newest
-- commit was seqs[i], the epoch epochs[i], the installed schema version
-- schema_version. Guarantees: one snapshot. Locks: none.
-- name: RealtimeFindNews :many
select n.ord::integer as ord
  from syncpg.sync_find_news(
         p_partitions => @partitions::text[], p_seqs => @seqs::bigint[], p_epochs => @epochs::text[],
         p_schema_version => @schema_version::integer)
       as n(ord);

-- RealtimeNotify sends notifications to all processes, in order. Guarantees: all or
-- none. Locks: at its commit the queue of the database, which every notifying
-- transaction waits for; so it must be a transaction of its own.
-- name: RealtimeNotify :exec
select pg_notify('syncpg', p.payload)
  from (select u.payload from unnest(@payloads::text[]) with ordinality as u(payload, ord) order by u.ord) as p;

-- RealtimeListen makes the session receive notifications. Guarantees: those of every
-- transaction that commits after it. Locks: none that outlast it.
-- name: RealtimeListen :exec
listen syncpg;
