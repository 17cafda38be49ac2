-- Looking after the log: pruning, compaction, log epochs. A batch is a transaction of its
-- own, in READ COMMITTED.

-- RetentionPlanPrune returns up to where a partition's log could be pruned (§4.6), and
-- why not further. Guarantees: always one row; log_epoch is empty for a partition that
-- does not exist, least_cursor -1 when no client counts. Locks: none.
-- name: RetentionPlanPrune :one
select coalesce(p.log_epoch, '')::text as log_epoch,
       coalesce(p.max_commit_seq, 0)::bigint as max_commit_seq,
       coalesce(p.horizon_seq, 0)::bigint as horizon_seq,
       coalesce(p.active_clients, 0)::bigint as active_clients,
       coalesce(p.least_cursor, -1)::bigint as least_cursor,
       coalesce(p.target_seq, 0)::bigint as target_seq
  from syncpg.sync_plan_prune(p_partition => @partition::text, p_active_since => sqlc.narg('active_since')::bigint,
         p_older_than => sqlc.narg('older_than')::bigint, p_keep => @keep::bigint)
       as p(log_epoch, max_commit_seq, horizon_seq, active_clients, least_cursor, target_seq);

-- RetentionPruneLog advances the horizon of a partition by one batch and deletes what is
-- at or below it. Guarantees: horizon and deletion are one; no cursor that counts, no
-- commit that is kept and no other epoch's log is passed, decided under the lock.
-- Locks: the partition, for the batch.
-- name: RetentionPruneLog :one
select p.busy::boolean as busy,
       coalesce(p.log_epoch, '')::text as log_epoch,
       coalesce(p.previous_seq, 0)::bigint as previous_seq,
       coalesce(p.horizon_seq, 0)::bigint as horizon_seq,
       p.commits::bigint as commits, p.changes::bigint as changes, p.tombstones::bigint as tombstones,
       p.waited_for::boolean as waited_for
  from syncpg.sync_prune_log(p_partition => @partition::text, p_log_epoch => @log_epoch::text,
         p_active_since => sqlc.narg('active_since')::bigint, p_older_than => sqlc.narg('older_than')::bigint,
         p_keep => @keep::bigint, p_limit => @batch::integer, p_alone => @alone::boolean)
       as p(busy, log_epoch, previous_seq, horizon_seq, commits, changes, tombstones, waited_for);

-- RetentionCompactLog deletes superseded changes of one stretch of a partition's log.
-- Guarantees: of every row under every set of scopes the newest change stays. Locks: none
-- that a push or a pull waits for.
-- name: RetentionCompactLog :one
select p.busy::boolean as busy,
       coalesce(p.log_epoch, '')::text as log_epoch,
       coalesce(p.compacted_seq, 0)::bigint as compacted_seq,
       p.changes::bigint as changes, p.finished::boolean as finished
  from syncpg.sync_compact_log(p_partition => @partition::text, p_log_epoch => @log_epoch::text,
         p_after => @after::bigint, p_older_than => @older_than::bigint, p_limit => @batch::integer, p_alone => @alone::boolean)
       as p(busy, log_epoch, compacted_seq, changes, finished);

-- RetentionListPartitions returns partitions whose log holds more than so many commits,
-- in byte order. Locks: none.
-- name: RetentionListPartitions :many
select p.partition::text as partition
  from syncpg.sync_list_prunable_partitions(p_after => @after::text, p_more_than => @more_than::bigint, p_limit => @batch::integer)
       as p(partition);

-- RetentionRotateEpoch gives a partition a new log epoch (§2.1). Guarantees: from its
-- commit on no push is applied and no pull answered under the old one; log_epoch is empty
-- for a partition that does not exist. Locks: the partition, its registry row, its clients.
-- name: RetentionRotateEpoch :one
select coalesce(e.previous_epoch, '')::text as previous_epoch,
       coalesce(e.log_epoch, '')::text as log_epoch,
       e.clients::bigint as clients
  from syncpg.sync_rotate_epoch(p_partition => @partition::text) as e(previous_epoch, log_epoch, clients);

-- RetentionRotateEpochs does so for every partition, and for those that do not exist yet.
-- Guarantees: all or none. Locks: the registry against new partitions, all partitions.
-- name: RetentionRotateEpochs :one
select e.partitions::bigint as partitions, e.clients::bigint as clients
  from syncpg.sync_rotate_epochs(p_now => @now::bigint) as e(partitions, clients);
