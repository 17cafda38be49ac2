package pushsvc

import (
	"context"
	"slices"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/ssp2"
)

// note makes the events of what the requests are answered. They are made before the
// answer, after which the requests are the callers' again.
func (t *transaction) note() {
	if t.s.events == nil {
		return
	}
	for _, r := range t.requests {
		if r.resp == nil || r.resp.Reset {
			continue
		}
		r.noted = make([]events.Event, len(r.Commits))
		answered := make(map[string]bool, len(r.Commits))
		var queued []events.Event
		for i := range r.Commits {
			c := r.byID[r.Commits[i].ClientCommitID]
			r.noted[i] = outcomeEvent(c.outcome, events.Push{
				Partition: r.Partition, Actor: r.Actor, ClientID: r.ClientID, ClientCommitID: c.id,
				Operations: len(r.Commits[i].Operations), Replay: c.known || answered[c.id],
				RecordedAt: c.outcome.recordedAt(), OutcomeID: events.OutcomeID(c.outcome.id.Bytes),
			})
			if !answered[c.id] {
				queued = c.noteReactions(queued)
			}
			answered[c.id] = true
		}
		r.noted = append(r.noted, queued...)
	}
}

func outcomeEvent(o *outcome, about events.Push) events.Event {
	if o.status == ssp2.PushApplied {
		return events.PushApplied{Push: about, CommitSeq: o.seq}
	}
	first := func(status ssp2.OpStatus) int {
		return slices.IndexFunc(o.results, func(r ssp2.OpResult) bool { return r.Status == status })
	}
	if i := first(ssp2.OpConflict); i >= 0 {
		return events.PushConflicted{Push: about, Code: ssp2.Code(o.results[i].Code), OpIndex: o.results[i].OpIndex}
	}
	rejected := events.PushRejected{Push: about}
	if i := first(ssp2.OpError); i >= 0 {
		rejected.Code, rejected.OpIndex = ssp2.Code(o.results[i].Code), o.results[i].OpIndex
	}
	return rejected
}

// tell emits what was noted.
func (s *Service) tell(batch []*request) {
	for _, r := range batch {
		if len(r.noted) == 0 {
			continue
		}
		ctx := context.WithoutCancel(r.ctx) // the caller may be done
		for _, e := range r.noted {
			events.Emit(ctx, s.events, e)
		}
	}
}

// applySpan is apply within a span, of the request that waited longest.
func (t *transaction) applySpan(ctx context.Context) (err error) {
	ctx, span := trace.Start(ctx, "syncpg.push.apply")
	defer span.End(&err)
	return t.apply(ctx)
}
