package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/config"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
)

// originFlag says which pages may open sockets.
type originFlag struct {
	RealtimeOrigin []string `name:"realtime-origin" placeholder:"ORIGIN" setting:"" group:"realtime" help:"Web origin whose pages may open sockets, such as https://app.example.com; may be repeated. Default: the server's own only."`
}

// realtimeFlags are about GET /realtime.
type realtimeFlags struct {
	originFlag
	NoRealtime     bool   `name:"no-realtime" setting:"" group:"realtime" help:"Do not serve GET /realtime."`
	MaxConnections int    `name:"max-connections" placeholder:"N" setting:"" group:"realtime" help:"How many sockets may be open at a time. Default: 50000."`
	ListenURL      string `name:"listen-url" placeholder:"URL" setting:"" group:"realtime" help:"Database URL of the connection that listens for what other servers did. Needed when --database-url leads through a pooler in transaction mode. Default: --database-url."`
	PollOnly       bool   `name:"poll-only" setting:"" group:"realtime" help:"Do not listen: what other servers did is looked for every few seconds, and presence stays in the process."`
}

// apply puts the flags into the configuration of a server.
func (f realtimeFlags) apply(c *syncpg.Config) error {
	if f.PollOnly && f.ListenURL != "" {
		return usagef("--poll-only and --listen-url exclude each other")
	}
	if f.MaxConnections < 0 {
		return usagef("--max-connections is %d; it must be positive", f.MaxConnections)
	}
	c.DisableRealtime = f.NoRealtime
	c.Realtime = realtime.Options{Origins: f.RealtimeOrigin, MaxConnections: f.MaxConnections, PollOnly: f.PollOnly}
	if f.ListenURL == "" {
		return nil
	}
	listen, err := config.Connection(f.ListenURL)
	if err != nil {
		return usagef("--listen-url: %w", err)
	}
	if listen.RuntimeParams["application_name"] == "" {
		listen.RuntimeParams["application_name"] = fanout.ApplicationName
	}
	c.Realtime.Listen = func(ctx context.Context) (*pgx.Conn, error) {
		conn, err := pgx.ConnectConfig(ctx, listen.Copy())
		if err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		return conn, nil
	}
	return nil
}
