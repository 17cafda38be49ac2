package pullsvc

import (
	"context"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

// note makes the event of a subscription whose section was added to out.
func (p *Pull) note(out *pieces, sub *subscription) {
	if p.s.events == nil {
		return
	}
	served := events.PullServed{
		Partition: p.req.Partition, Actor: p.req.Actor, ClientID: p.req.ClientID,
		SubscriptionID: sub.req.ID, Table: sub.table.Name, Status: ssp2.SubActive,
		Commits: sub.commits, Changes: sub.changes,
		SegmentsInline: sub.inline, SegmentsExternal: sub.stored, Rows: sub.rows, Bytes: sub.bytes,
		NextCursor: sub.next,
	}
	switch sub.mode {
	case modeRevoked:
		served.Status = ssp2.SubRevoked
	case modeReset:
		served.Status = ssp2.SubReset
	case modeBootstrap:
		served.Bootstrap, served.NextCursor = true, sub.pin
	case modeWindow:
	}
	out.noted = append(out.noted, served)
	if len(out.buf) == 0 {
		out.out = len(out.noted)
	}
}

// tell emits the events of the sections that went out whole.
func (p *Pull) tell(ctx context.Context, out *pieces) {
	if out.out == 0 {
		return
	}
	ctx = context.WithoutCancel(ctx) // the client may have left since
	for _, served := range out.noted[:out.out] {
		events.Emit(ctx, p.s.events, served)
	}
}
