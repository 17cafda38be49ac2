package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/events/prometheus"
)

// observeFlags say who is told what a server does.
type observeFlags struct {
	MetricsListen string `name:"metrics-listen" placeholder:"ADDRESS" setting:"" help:"Address to serve GET /metrics on, for Prometheus, to whoever reaches it. Default: nowhere."`
	LogEvents     bool   `name:"log-events" setting:"" help:"Log what happens, such as every request, pushed commit and answered subscription, at level info; at debug also what servers tell each other. Names partitions, actors and clients."`
}

// observer takes the events of a server.
type observer struct {
	sink events.Sink // nil: nobody is told
	url  string      // of the metrics, "" for none
	stop func()
}

// observe begins to listen for who reads metrics, until stop.
func (f observeFlags) observe(ctx context.Context, p *program) (*observer, error) {
	o := &observer{stop: func() {}}
	if f.LogEvents {
		o.sink = events.Slog(p.log)
	}
	if f.MetricsListen == "" {
		return o, nil
	}
	registry := prom.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics, err := prometheus.New(registry)
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", f.MetricsListen)
	if err != nil {
		return nil, listenError(err, "--metrics-listen")
	}
	o.sink = events.Multi(metrics, o.sink)
	o.url = "http://" + l.Addr().String() + "/metrics"
	o.stop = serveMetrics(p, l, metrics.Handler())
	return o, nil
}

// metricsTimeout bounds a request for metrics.
const metricsTimeout = 10 * time.Second

// serveMetrics serves until stop is called.
func serveMetrics(p *program, l net.Listener, h http.Handler) (stop func()) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", h)
	server := &http.Server{
		Handler: mux, ReadTimeout: metricsTimeout, WriteTimeout: metricsTimeout, IdleTimeout: idleTimeout,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("metrics are served no more", "error", fmt.Errorf("serve: %w", err))
		}
	}()
	return func() {
		_ = server.Close()
		<-ended
	}
}
