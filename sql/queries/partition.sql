-- Partitions: identity of the log and the serve gate.

-- PartitionOpen returns a partition's log epoch and creates the partition when it
-- is new. Guarantees: one epoch per partition, whoever comes first; refreshes the
-- last-seen time at most once a minute. Locks: the registry row, only when it
-- writes. Must be a transaction of its own.
-- name: PartitionOpen :one
select p.log_epoch::text as log_epoch, p.epoch_required::boolean as epoch_required
  from syncpg.sync_open_partition(p_partition => @partition::text, p_log_epoch => @log_epoch::text, p_now => @now::bigint)
       as p(log_epoch, epoch_required);
