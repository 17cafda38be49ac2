package retention

import (
	"context"
	"fmt"

	"github.com/syncpg/syncpg/db"
)

// Rotation is a log epoch that was replaced.
type Rotation struct {
	PreviousEpoch, LogEpoch string
	// Clients is how many clients' cursors were deleted with it.
	Clients int64
}

// RotateEpoch gives a partition a new log epoch (§2.1): clients of wire version 1 are
// refused from now on, and every other one drops its rows, keeps its outbox and bootstraps
// again. It is part of restoring a backup, after which [Service.RotateEpochs] is right
// unless only this partition was restored. From its return on, no process applies a push or
// answers a pull under the old epoch. The error is sync.storage.partition_unregistered (an
// *ssp2.Error) when there is no such partition, or one of the database.
func (s *Service) RotateEpoch(ctx context.Context, partition string) (Rotation, error) {
	row, err := call[db.RetentionRotateEpochRow](ctx, s.pool, rotateEpoch, partition)
	if err != nil {
		return Rotation{}, fmt.Errorf("rotating a log epoch: %w", err)
	}
	if s.cfg.Gate != nil {
		s.cfg.Gate.Forget(partition)
	}
	if row.LogEpoch == "" {
		return Rotation{}, unregistered(partition)
	}
	return Rotation{PreviousEpoch: row.PreviousEpoch, LogEpoch: row.LogEpoch, Clients: row.Clients}, nil
}

// Rotations is what [Service.RotateEpochs] did.
type Rotations struct {
	Partitions int64
	Clients    int64 // whose cursors were deleted
}

// RotateEpochs gives every partition a new log epoch, as [Service.RotateEpoch] does, in one
// transaction. Partitions that are made from now on refuse wire version 1 too: the restored
// backup may be older than they are, while their clients are not. Pushes wait for it, and
// what holds the lock of one partition holds it up, so stop the traffic first.
func (s *Service) RotateEpochs(ctx context.Context) (Rotations, error) {
	row, err := call[db.RetentionRotateEpochsRow](ctx, s.pool, rotateEpochs, s.cfg.Clock().UnixMilli())
	if err != nil {
		return Rotations{}, fmt.Errorf("rotating the log epochs: %w", err)
	}
	if s.cfg.Gate != nil {
		s.cfg.Gate.ForgetAll()
	}
	return Rotations{Partitions: row.Partitions, Clients: row.Clients}, nil
}
