// Package prometheus turns events into Prometheus metrics. They carry no partition,
// actor, client or row: every label takes few values, whatever clients send.
package prometheus

import (
	"context"
	"fmt"
	"net/http"
	"strconv"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

// hostCode stands for all codes that are not of the catalogue: the host makes them up,
// so their number has no bound.
const hostCode = "host"

// Metrics is an [events.Sink] that counts. Durations are in seconds, sizes in bytes.
type Metrics struct {
	registry *prom.Registry

	requestSeconds  *prom.HistogramVec
	requestReceived prom.Counter
	requestSent     prom.Counter

	pushCommits    *prom.CounterVec
	pushRejections *prom.CounterVec
	pushOperations prom.Counter

	pullSubscriptions *prom.CounterVec
	pullCommits       prom.Counter
	pullChanges       prom.Counter
	pullSegments      *prom.CounterVec
	pullRows          prom.Counter
	pullSent          prom.Counter

	segmentSeconds *prom.HistogramVec
	segmentSent    *prom.CounterVec

	reactionQueued  *prom.CounterVec
	reactionStarted *prom.CounterVec
	reactionSeconds *prom.HistogramVec
	reactionRemoved *prom.CounterVec

	pruneCommits     prom.Counter
	resolverFailures *prom.CounterVec
	leases           *prom.CounterVec

	realtimeConnections prom.Gauge
	realtimeDeltas      prom.Counter
	realtimeSent        prom.Counter
	realtimeWakes       *prom.CounterVec
}

// New returns metrics that are registered in reg; nil: in a registry of their own. It
// fails when reg has metrics of these names already.
func New(reg *prom.Registry) (*Metrics, error) {
	if reg == nil {
		reg = prom.NewRegistry()
	}
	m := &Metrics{registry: reg}
	var collectors []prom.Collector
	counter := func(name, help string) prom.Counter {
		c := prom.NewCounter(prom.CounterOpts{Name: name, Help: help})
		collectors = append(collectors, c)
		return c
	}
	counters := func(name, help string, labels ...string) *prom.CounterVec {
		c := prom.NewCounterVec(prom.CounterOpts{Name: name, Help: help}, labels)
		collectors = append(collectors, c)
		return c
	}
	seconds := func(name, help string, buckets []float64, labels ...string) *prom.HistogramVec {
		h := prom.NewHistogramVec(prom.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		collectors = append(collectors, h)
		return h
	}

	m.requestSeconds = seconds("syncpg_request_duration_seconds",
		"Time of a sync round, by wire version and by the code it failed with, ok when it did not.",
		prom.ExponentialBuckets(0.001, 2, 14), "wire", "code")
	m.requestReceived = counter("syncpg_request_received_bytes_total", "Bytes of requests.")
	m.requestSent = counter("syncpg_request_sent_bytes_total", "Bytes of responses.")

	m.pushCommits = counters("syncpg_push_commits_total",
		"Pushed commits that have an outcome, by outcome; replay says whether it stood already.", "outcome", "replay")
	m.pushRejections = counters("syncpg_push_rejections_total",
		"New rejections and conflicts, by code; host stands for every code of the host's own.", "code")
	m.pushOperations = counter("syncpg_push_operations_total", "Operations of newly applied commits.")

	m.pullSubscriptions = counters("syncpg_pull_subscriptions_total",
		"Answered subscriptions, by status and by whether with segments (bootstrap) or commits (incremental).", "status", "mode")
	m.pullCommits = counter("syncpg_pull_commits_total", "Commits sent to subscriptions.")
	m.pullChanges = counter("syncpg_pull_changes_total", "Changes sent to subscriptions.")
	m.pullSegments = counters("syncpg_pull_segments_total",
		"Segments given to subscriptions, by origin: inline, external (built to be downloaded), reused (found in the store).", "origin")
	m.pullRows = counter("syncpg_pull_segment_rows_total", "Rows of segments given to subscriptions.")
	m.pullSent = counter("syncpg_pull_sent_bytes_total", "Bytes of commits and inline segments sent to subscriptions.")

	m.segmentSeconds = seconds("syncpg_segment_duration_seconds",
		"Time of a segment's download, by lane (rows, image, none when it was refused) and by result: sent, not_modified, broken, or the code it was refused with.",
		prom.ExponentialBuckets(0.001, 4, 10), "lane", "result")
	m.segmentSent = counters("syncpg_segment_sent_bytes_total", "Bytes of segments sent, as they were compressed, by lane.", "lane")

	m.reactionQueued = counters("syncpg_reaction_queued_total", "Reactions stored with their commits, by type.", "type")
	m.reactionStarted = counters("syncpg_reaction_started_total", "Deliveries started, by type.", "type")
	m.reactionSeconds = seconds("syncpg_reaction_duration_seconds",
		"Time of a reaction's handler, by type and by result: completed, retried, dead_lettered.",
		prom.ExponentialBuckets(0.001, 4, 10), "type", "result")
	m.reactionRemoved = counters("syncpg_reaction_removed_total", "Finished reactions deleted by retention, by state.", "state")

	m.pruneCommits = counter("syncpg_prune_commits_total", "Commits removed from logs.")
	m.resolverFailures = counters("syncpg_resolver_failures_total", "Failures of the host's scope resolver, by kind: error, outage.", "kind")
	m.leases = counters("syncpg_lease_consultations_total", "Auth leases that were to stand in for the resolver, by outcome: valid, missing, expired, revoked, other_actor, tampered.", "outcome")

	m.realtimeConnections = prom.NewGauge(prom.GaugeOpts{Name: "syncpg_realtime_connections", Help: "Open realtime connections."})
	collectors = append(collectors, m.realtimeConnections)
	m.realtimeDeltas = counter("syncpg_realtime_deltas_total", "Commits sent as deltas.")
	m.realtimeSent = counter("syncpg_realtime_delta_bytes_total", "Bytes of deltas.")
	m.realtimeWakes = counters("syncpg_realtime_wakes_total", "Wake-ups sent, by reason.", "reason")

	for i, c := range collectors {
		if err := reg.Register(c); err != nil {
			for _, registered := range collectors[:i] {
				reg.Unregister(registered)
			}
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return m, nil
}

// Handler serves everything in the registry in the exposition format of Prometheus,
// usually at /metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Emit counts an event. Events that it does not know are passed over.
func (m *Metrics) Emit(_ context.Context, e events.Event) {
	switch e := e.(type) {
	case events.RequestHandled:
		code := "ok"
		if e.Code != "" {
			code = label(e.Code)
		}
		m.requestSeconds.WithLabelValues(strconv.Itoa(int(e.WireVersion)), code).Observe(e.Duration.Seconds())
		m.requestReceived.Add(float64(e.BytesReceived))
		m.requestSent.Add(float64(e.BytesSent))
	case events.PushApplied:
		m.countPush("applied", e.Push)
		if !e.Replay {
			m.pushOperations.Add(float64(e.Operations))
		}
	case events.PushRejected:
		m.countPush("rejected", e.Push)
		m.countRejection(e.Push, e.Code)
	case events.PushConflicted:
		m.countPush("conflicted", e.Push)
		m.countRejection(e.Push, e.Code)
	case events.PullServed:
		m.countPull(e)
	case events.SegmentServed:
		m.countSegment(e)
	case events.ReactionQueued:
		m.reactionQueued.WithLabelValues(e.Type).Inc()
	case events.ReactionStarted:
		m.reactionStarted.WithLabelValues(e.Type).Inc()
	case events.ReactionCompleted:
		m.reactionSeconds.WithLabelValues(e.Type, "completed").Observe(e.Duration.Seconds())
	case events.ReactionRetried:
		m.reactionSeconds.WithLabelValues(e.Type, "retried").Observe(e.Duration.Seconds())
	case events.ReactionDeadLettered:
		m.reactionSeconds.WithLabelValues(e.Type, "dead_lettered").Observe(e.Duration.Seconds())
	case events.ReactionPruneCompleted:
		m.reactionRemoved.WithLabelValues("completed").Add(float64(e.RemovedCompleted))
		m.reactionRemoved.WithLabelValues("dead_letter").Add(float64(e.RemovedDeadLetters))
	case events.Pruned:
		m.pruneCommits.Add(float64(e.RemovedCommits))
	case events.ResolverFailed:
		kind := "error"
		if e.Outage {
			kind = "outage"
		}
		m.resolverFailures.WithLabelValues(kind).Inc()
	case events.LeaseConsulted:
		m.leases.WithLabelValues(string(e.Outcome)).Inc()
	case events.RealtimeConnected:
		m.realtimeConnections.Inc()
	case events.RealtimeDisconnected:
		m.realtimeConnections.Dec()
	case events.RealtimeDeltaSent:
		m.realtimeDeltas.Inc()
		m.realtimeSent.Add(float64(e.Bytes))
	case events.RealtimeWakeSent:
		m.realtimeWakes.WithLabelValues(string(e.Reason)).Inc()
	}
}

func (m *Metrics) countPush(outcome string, p events.Push) {
	m.pushCommits.WithLabelValues(outcome, strconv.FormatBool(p.Replay)).Inc()
}

func (m *Metrics) countRejection(p events.Push, code ssp2.Code) {
	if !p.Replay {
		m.pushRejections.WithLabelValues(label(code)).Inc()
	}
}

func (m *Metrics) countPull(e events.PullServed) {
	status := "active"
	switch e.Status {
	case ssp2.SubRevoked:
		status = "revoked"
	case ssp2.SubReset:
		status = "reset"
	case ssp2.SubActive:
	}
	mode := "incremental"
	if e.Bootstrap {
		mode = "bootstrap"
	}
	m.pullSubscriptions.WithLabelValues(status, mode).Inc()
	m.pullCommits.Add(float64(e.Commits))
	m.pullChanges.Add(float64(e.Changes))
	m.pullSegments.WithLabelValues("inline").Add(float64(e.SegmentsInline))
	m.pullSegments.WithLabelValues("external").Add(float64(e.SegmentsExternal))
	m.pullSegments.WithLabelValues("reused").Add(float64(e.SegmentsReused))
	m.pullRows.Add(float64(e.Rows))
	m.pullSent.Add(float64(e.Bytes))
}

func (m *Metrics) countSegment(e events.SegmentServed) {
	lane, result := "none", "sent"
	switch e.MediaType {
	case ssp2.MediaRows:
		lane = "rows"
	case ssp2.MediaSQLite:
		lane = "image"
	}
	switch {
	case e.Code != "":
		result = label(e.Code)
	case e.Broken:
		result = "broken"
	case e.NotModified:
		result = "not_modified"
	}
	m.segmentSeconds.WithLabelValues(lane, result).Observe(e.Duration.Seconds())
	m.segmentSent.WithLabelValues(lane).Add(float64(e.BytesSent))
}

// label returns a code as the value of a label.
func label(code ssp2.Code) string {
	if _, known := ssp2.Lookup(code); known {
		return string(code)
	}
	return hostCode
}
