package pgtest

import "context"

// NewCluster returns a cluster that is not shared and not connected to.
func NewCluster(dsn string) *Cluster { return &Cluster{dsn: dsn} }

// DropLeftovers drops databases of runs long ago.
func (c *Cluster) DropLeftovers(ctx context.Context) error { return c.dropLeftovers(ctx) }
