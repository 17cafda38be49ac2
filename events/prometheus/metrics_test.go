package prometheus_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/events/prometheus"
	"github.com/syncpg/syncpg/ssp2"
)

func scrape(t *testing.T, m *prometheus.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	require.Equal(t, http.StatusOK, w.Code)
	return w.Body.String()
}

func TestEventsBecomeMetrics(t *testing.T) {
	t.Parallel()
	push := events.Push{Partition: "secret", Actor: "secret", ClientID: "secret", ClientCommitID: "secret", Operations: 3}
	replay := push
	replay.Replay = true
	delivery := events.Delivery{Partition: "secret", IdempotencyKey: "secret", Type: "mail", LeaseOwner: "secret"}
	session := events.Session{Partition: "secret", Actor: "secret", ClientID: "secret", SessionID: "secret"}
	for _, c := range []struct {
		name string
		emit []events.Event
		want []string
	}{
		{
			"request",
			[]events.Event{
				events.RequestHandled{Partition: "secret", WireVersion: 2, Duration: 1500 * time.Millisecond, BytesReceived: 10, BytesSent: 20},
				events.RequestHandled{WireVersion: 3, Code: ssp2.CodeForbidden},
				events.RequestHandled{WireVersion: 3, Code: "shop.closed"},
			},
			[]string{
				`syncpg_request_duration_seconds_sum{code="ok",wire="2"} 1.5`,
				`syncpg_request_duration_seconds_bucket{code="ok",wire="2",le="1.024"} 0`,
				`syncpg_request_duration_seconds_bucket{code="ok",wire="2",le="2.048"} 1`,
				`syncpg_request_duration_seconds_count{code="sync.forbidden",wire="3"} 1`,
				`syncpg_request_duration_seconds_count{code="host",wire="3"} 1`,
				`syncpg_request_received_bytes_total 10`,
				`syncpg_request_sent_bytes_total 20`,
			},
		},
		{
			"push",
			[]events.Event{
				events.PushApplied{Push: push},
				events.PushApplied{Push: replay},
				events.PushRejected{Push: push, Code: "shop.closed"},
				events.PushRejected{Push: push, Code: "shop.gone"},
				events.PushRejected{Push: replay, Code: "shop.closed"},
				events.PushConflicted{Push: push, Code: ssp2.CodeVersionConflict},
			},
			[]string{
				`syncpg_push_commits_total{outcome="applied",replay="false"} 1`,
				`syncpg_push_commits_total{outcome="applied",replay="true"} 1`,
				`syncpg_push_commits_total{outcome="rejected",replay="false"} 2`,
				`syncpg_push_commits_total{outcome="conflicted",replay="false"} 1`,
				`syncpg_push_operations_total 3`,
				`syncpg_push_rejections_total{code="host"} 2`,
				`syncpg_push_rejections_total{code="sync.version_conflict"} 1`,
			},
		},
		{
			"pull",
			[]events.Event{
				events.PullServed{SubscriptionID: "secret", Status: ssp2.SubActive, Bootstrap: true, SegmentsInline: 1, SegmentsExternal: 2, SegmentsReused: 3, Rows: 100, Bytes: 1000},
				events.PullServed{Status: ssp2.SubActive, Commits: 2, Changes: 5, Bytes: 50},
				events.PullServed{Status: ssp2.SubRevoked},
				events.PullServed{Status: ssp2.SubReset},
			},
			[]string{
				`syncpg_pull_subscriptions_total{mode="bootstrap",status="active"} 1`,
				`syncpg_pull_subscriptions_total{mode="incremental",status="active"} 1`,
				`syncpg_pull_subscriptions_total{mode="incremental",status="revoked"} 1`,
				`syncpg_pull_subscriptions_total{mode="incremental",status="reset"} 1`,
				`syncpg_pull_commits_total 2`, `syncpg_pull_changes_total 5`,
				`syncpg_pull_segments_total{origin="inline"} 1`, `syncpg_pull_segments_total{origin="external"} 2`,
				`syncpg_pull_segments_total{origin="reused"} 3`,
				`syncpg_pull_segment_rows_total 100`, `syncpg_pull_sent_bytes_total 1050`,
			},
		},
		{
			"segments",
			[]events.Event{
				events.SegmentServed{Partition: "secret", Actor: "secret", SegmentID: "secret", Table: "secret", MediaType: ssp2.MediaRows, Bytes: 100, BytesSent: 40, Duration: time.Second},
				events.SegmentServed{MediaType: ssp2.MediaSQLite, BytesSent: 7, Broken: true, Duration: 2 * time.Second},
				events.SegmentServed{MediaType: ssp2.MediaSQLite, NotModified: true},
				events.SegmentServed{Code: ssp2.CodeForbidden},
				events.SegmentServed{Code: "shop.closed"},
			},
			[]string{
				`syncpg_segment_duration_seconds_sum{lane="rows",result="sent"} 1`,
				`syncpg_segment_duration_seconds_sum{lane="image",result="broken"} 2`,
				`syncpg_segment_duration_seconds_count{lane="image",result="not_modified"} 1`,
				`syncpg_segment_duration_seconds_count{lane="none",result="sync.forbidden"} 1`,
				`syncpg_segment_duration_seconds_count{lane="none",result="host"} 1`,
				`syncpg_segment_sent_bytes_total{lane="rows"} 40`,
				`syncpg_segment_sent_bytes_total{lane="image"} 7`,
			},
		},
		{
			"reactions",
			[]events.Event{
				events.ReactionQueued{Partition: "secret", Type: "mail"},
				events.ReactionStarted{Delivery: delivery},
				events.ReactionCompleted{Delivery: delivery, Duration: time.Second},
				events.ReactionRetried{Delivery: delivery, Duration: 2 * time.Second, Code: "secret"},
				events.ReactionDeadLettered{Delivery: delivery, Duration: 3 * time.Second, Code: "secret"},
				events.ReactionPruneCompleted{RemovedCompleted: 4, RemovedDeadLetters: 5},
			},
			[]string{
				`syncpg_reaction_queued_total{type="mail"} 1`, `syncpg_reaction_started_total{type="mail"} 1`,
				`syncpg_reaction_duration_seconds_sum{result="completed",type="mail"} 1`,
				`syncpg_reaction_duration_seconds_sum{result="retried",type="mail"} 2`,
				`syncpg_reaction_duration_seconds_sum{result="dead_lettered",type="mail"} 3`,
				`syncpg_reaction_removed_total{state="completed"} 4`, `syncpg_reaction_removed_total{state="dead_letter"} 5`,
			},
		},
		{
			"realtime, pruning, resolver",
			[]events.Event{
				events.RealtimeConnected{Session: session},
				events.RealtimeConnected{Session: session},
				events.RealtimeDisconnected{Session: session},
				events.RealtimeDeltaSent{Session: session, Bytes: 7},
				events.RealtimeWakeSent{Session: session, Reason: ssp2.WakeResetRequired},
				events.Pruned{RemovedCommits: 9},
				events.ResolverFailed{Outage: true},
				events.ResolverFailed{},
			},
			[]string{
				`syncpg_realtime_connections 1`, `syncpg_realtime_deltas_total 1`, `syncpg_realtime_delta_bytes_total 7`,
				`syncpg_realtime_wakes_total{reason="reset-required"} 1`, `syncpg_prune_commits_total 9`,
				`syncpg_resolver_failures_total{kind="outage"} 1`, `syncpg_resolver_failures_total{kind="error"} 1`,
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m, err := prometheus.New(nil)
			require.NoError(t, err)
			for _, e := range c.emit {
				m.Emit(t.Context(), e)
			}
			text := scrape(t, m)
			for _, line := range c.want {
				require.Contains(t, text, line+"\n")
			}
			require.NotContains(t, text, "secret")
		})
	}
}

func TestNamesOfMetrics(t *testing.T) {
	t.Parallel()
	registry := prom.NewRegistry()
	other := prom.NewCounter(prom.CounterOpts{Name: "host_total"})
	registry.MustRegister(other)
	m, err := prometheus.New(registry)
	require.NoError(t, err)
	m.Emit(t.Context(), hostEvent{})
	text := scrape(t, m)
	require.Contains(t, text, "host_total", "the handler serves the whole registry")
	ours := regexp.MustCompile(`(?m)^# TYPE (syncpg_\S+) (\S+)$`).FindAllStringSubmatch(text, -1)
	require.NotEmpty(t, ours)
	for _, match := range ours {
		require.Regexp(t, `^syncpg_[a-z]+_[a-z_]+$`, match[1])
		if match[2] == "counter" {
			require.True(t, strings.HasSuffix(match[1], "_total"), match[1])
		}
	}
	require.Equal(t, len(ours)+1, strings.Count(text, "# HELP"))
}

type hostEvent struct{}

func (hostEvent) EventName() string { return "host.event" }

func TestMetricsAreRegisteredOnce(t *testing.T) {
	t.Parallel()
	registry := prom.NewRegistry()
	clash := prom.NewCounterVec(prom.CounterOpts{Name: "syncpg_realtime_wakes_total", Help: "Wake-ups sent, by reason."}, []string{"reason"})
	registry.MustRegister(clash)
	_, err := prometheus.New(registry)
	require.Error(t, err)
	registry.Unregister(clash)
	_, err = prometheus.New(registry)
	require.NoError(t, err, "what failed left nothing behind")
	_, err = prometheus.New(registry)
	require.ErrorAs(t, err, new(prom.AlreadyRegisteredError))
}

func TestMetricsAreSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	m, err := prometheus.New(nil)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 100 {
				events.Emit(t.Context(), m, events.ReactionQueued{Type: fmt.Sprint("t", i%2)})
			}
		})
	}
	wg.Wait()
	require.Contains(t, scrape(t, m), `syncpg_reaction_queued_total{type="t1"} 400`)
}
