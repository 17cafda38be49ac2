package pullsvc

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

// recordAge is how old the record of a client that pulls may become: retention
// takes a client for gone when its record is old (§4.6).
const recordAge = time.Minute

// maxAttempts bounds how often the record is written anew when another pull of the
// same client was faster, which is an error where sessions default to a stricter
// isolation level than READ COMMITTED.
const maxAttempts = 4

// sqlStateReplaced is raised for the record of a pull whose log epoch is over (004_pull.sql).
const sqlStateReplaced = "SY006"

// subscriptionList renders the subscriptions of a pull as the client's record keeps
// them for realtime (§8.1): a JSON array of id, schema version, table and requested scopes.
func subscriptionList(version int32, subs []ssp2.Subscription) []byte {
	b := []byte{'['}
	for i := range subs {
		if i > 0 {
			b = append(b, ',')
		}
		b = ssp2.AppendJSONString(append(b, `{"id":`...), subs[i].ID)
		b = strconv.AppendInt(append(b, `,"schemaVersion":`...), int64(version), 10)
		b = ssp2.AppendJSONString(append(b, `,"table":`...), subs[i].Table)
		b = ssp2.AppendCanonicalScopes(append(b, `,"scopes":`...), subs[i].Scopes)
		b = append(b, '}')
	}
	return append(b, ']')
}

// cursor is the least cursor the active subscriptions will have (§4.5), nil when
// none is active. A window that is yet to be read counts with the cursor it has.
func (p *Pull) cursor() *int64 {
	var least *int64
	for _, sub := range p.subs {
		var c int64
		switch {
		case sub.mode == modeRevoked || sub.mode == modeReset:
			continue
		case sub.shared && sub.resume == nil:
			c = p.gate.HorizonSeq // segments of any pin from there on may answer
		case sub.mode == modeBootstrap && sub.answered:
			c = sub.pin
		case sub.mode == modeBootstrap:
			c = p.gate.MaxCommitSeq
		case sub.answered:
			c = sub.next
		default:
			c = sub.req.Cursor
		}
		if least == nil || c < *least {
			least = &c
		}
	}
	return least
}

// record writes the client's record if it changed or is getting old. A record whose
// cursor or age is all that changed need not survive a crash: an older one only
// keeps more of the log.
func (p *Pull) record(ctx context.Context) error {
	now := p.s.clock().UnixMilli()
	cursor := p.cursor()
	params := db.PullRecordClientParams{
		Partition: p.req.Partition, LogEpoch: p.LogEpoch, ClientID: p.req.ClientID, ActorID: p.req.Actor,
		WireVersion: int16(p.req.WireVersion), Cursor: cursor, Now: now,
	}
	due := p.req.Lease != nil && p.req.Lease.Due()
	known := p.gate.ClientActor != "" && p.gate.SameSubscriptions && p.gate.ClientWireVersion == params.WireVersion
	switch {
	case !known:
		list := string(p.list)
		params.Subscriptions = &list
	case p.gate.sameCursor(cursor) && now-p.gate.ClientUpdatedAtMs < recordAge.Milliseconds() && !due:
		return nil
	default:
		params.Relaxed = true
	}
	for attempt := 1; ; attempt++ {
		actor, err := p.write(ctx, params, due)
		switch {
		case err == nil && actor != p.req.Actor:
			return errOtherActor()
		case err == nil:
			if !known && p.s.listed != nil {
				p.s.listed(p.req.Partition, p.req.ClientID, p.version)
			}
			return nil
		case pgtx.SQLState(err) == sqlStateReplaced:
			return errReplaced()
		case attempt == maxAttempts || !pgtx.Retryable(err):
			return fmt.Errorf("recording the client: %w", err)
		}
	}
}

// write writes the record, and the auth lease if it is due, in one transaction and one
// round trip. What is lost of a lease in a crash is its last refresh.
func (p *Pull) write(ctx context.Context, params db.PullRecordClientParams, due bool) (actor string, err error) {
	if !due {
		return db.New(p.s.pool).PullRecordClient(ctx, params)
	}
	batch := &pgx.Batch{}
	batch.Queue(db.PullRecordClient, params.Partition, params.LogEpoch, params.ClientID, params.ActorID, params.WireVersion,
		params.Cursor, params.Subscriptions, params.Now, params.Relaxed).QueryRow(func(row pgx.Row) error {
		return row.Scan(&actor)
	})
	p.req.Lease.Queue(batch, params.Relaxed)
	err = p.s.pool.SendBatch(ctx, batch).Close()
	return actor, err //nolint:wrapcheck // wrapped by record
}

func errOtherActor() error {
	return ssp2.Errorf(ssp2.CodeInvalidClientID, "this client id belongs to another actor")
}

// countChanges returns at most how many changes a subscription has after a seq; over most
// it may be any such number.
func (s *Service) countChanges(ctx context.Context, partition string, sub *subscription, from int64, most int32) (int64, error) {
	n, err := db.New(s.pool).PullCountChanges(ctx, db.PullCountChangesParams{
		Partition: partition, TableName: sub.table.Name, Scopes: sub.scopes, FromSeq: from, MaxChanges: most,
	})
	if err != nil {
		return 0, fmt.Errorf("counting changes: %w", err)
	}
	return n, nil
}
