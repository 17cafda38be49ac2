-- Clients of the realtime channel: what their last pull left, and what they acknowledged.

-- RealtimeReadClient returns what a connection begins with. Guarantees: always one row;
-- actor_id is empty for a client that does not exist, cursor -1 when it has none. Locks:
-- none.
-- name: RealtimeReadClient :one
select coalesce(r.actor_id, '')::text as actor_id, coalesce(r.wire_version, 0)::smallint as wire_version,
       coalesce(r.cursor, -1)::bigint as cursor, coalesce(r.subscriptions, '')::text as subscriptions,
       coalesce(r.max_commit_seq, 0)::bigint as max_commit_seq
  from syncpg.sync_read_client(p_partition => @partition::text, p_client_id => @client_id::text)
       as r(actor_id, wire_version, cursor, subscriptions, max_commit_seq);

-- RealtimeRecordAcks moves the cursors of clients (partitions[i], client_ids[i]) to what
-- they acknowledged at at_ms[i]. Guarantees: a cursor never goes back, nor past the log,
-- and one that a pull recorded later stays; a client of another actor, or without a cursor,
-- is left alone. A crash may lose it. Locks: the clients' rows, in the order of the
-- arguments. It must be a transaction of its own.
-- name: RealtimeRecordAcks :exec
select syncpg.sync_record_acks(
         p_partitions => @partitions::text[], p_client_ids => @client_ids::text[], p_actor_ids => @actor_ids::text[],
         p_cursors => @cursors::bigint[], p_at_ms => @at_ms::bigint[])::integer as recorded;
