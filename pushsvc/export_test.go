package pushsvc

import (
	"context"
	"runtime"
)

// WaitQueued returns when n requests wait for the partition, or ctx ends.
func (s *Service) WaitQueued(ctx context.Context, partition string, n int) {
	for ctx.Err() == nil {
		s.queues.mu.Lock()
		q := s.queues.byPartition[partition]
		waiting := q != nil && len(q.waiting) >= n
		s.queues.mu.Unlock()
		if waiting {
			return
		}
		runtime.Gosched()
	}
}

// PlanAtMost changes how many bytes of rows and outcomes are written at a time.
func (s *Service) PlanAtMost(bytes int64) { s.maxPlannedBytes = bytes }

// AdmitAtMost changes how many bytes of rows and outcomes an admission reads.
func (s *Service) AdmitAtMost(bytes int64) { s.maxAdmittedBytes = bytes }

// CommitAtMost changes how many bytes of rows a commit writes.
func (s *Service) CommitAtMost(bytes int64) { s.maxCommitBytes = bytes }

// ReadAheadAtMost changes how many children, by one reference, and how many bytes of them
// are read before a commit needs them.
func (s *Service) ReadAheadAtMost(rows int, bytes int64) {
	s.maxAheadRows, s.maxAheadBytes = rows, bytes
}
