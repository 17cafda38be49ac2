-- Partitions: identity of the log and the serve gate.

-- PartitionOpen returns a partition's log epoch and creates the partition when it
-- is new; an empty epoch says that it is new and the schema is being moved to another
-- version. Guarantees: one epoch per partition, whoever comes first; refreshes the
-- last-seen time at most once a minute; does not wait for a bump. Locks: of a new partition
-- advisory (0x73796e63, 2), shared and tried; the registry row, only when it
-- writes. Must be a transaction of its own.
-- name: PartitionOpen :one
select p.log_epoch::text as log_epoch, p.epoch_required::boolean as epoch_required
  from syncpg.sync_open_partition(p_partition => @partition::text, p_log_epoch => @log_epoch::text, p_now => @now::bigint)
       as p(log_epoch, epoch_required);

-- PartitionHold says whether a partition may be created: the schema is not being moved to
-- another version, nor before the transaction ends. Locks: advisory (0x73796e63, 2), shared
-- and tried.
-- name: PartitionHold :one
select pg_catalog.pg_try_advisory_xact_lock_shared(1937337955, 2)::boolean as held;

-- PartitionCreate creates a partition unless it is there. Guarantees: the epoch of
-- whoever came first stays; it fits into any transaction. Locks: the rows it inserts;
-- waits for a transaction that is inserting the same. PartitionHold goes before it.
-- name: PartitionCreate :exec
with registered as (
  insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms)
  values (@partition::text, @log_epoch::text, @now::bigint, @now::bigint)
  on conflict (partition) do nothing
)
insert into syncpg.sync_partitions (partition) values (@partition::text)
on conflict (partition) do nothing;
