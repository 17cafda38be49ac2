package realtime_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// RaceFor is the environment variable that makes the test below go on for a time, such as
// 30s, instead of a number of steps.
const RaceFor = "SYNCPG_REALTIME_RACE_FOR"

// sea is a log that many clients push to, behind a hub.
type sea struct {
	w  *world
	mu sync.Mutex // of the log; held while the hub is told, as a fanout does

	seq  int64
	orgs map[string][]int64 // seqs by org
}

func (s *sea) commit(org string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	s.w.fan.mu.Lock()
	s.w.fan.seqs["acme"] = s.seq
	s.w.fan.mu.Unlock()
	s.orgs[org] = append(s.orgs[org], s.seq)
	s.w.hub.Commits("acme", s.seq-1, []fanout.Commit{{Seq: s.seq, ActorID: "x", Changes: []fanout.Change{change("d", org, "f")}}})
	return s.seq
}

// between returns the commits of an org after one seq and before another.
func (s *sea) between(org string, from, to int64) []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []int64
	for _, seq := range s.orgs[org] {
		if seq > from && seq < to {
			found = append(found, seq)
		}
	}
	return found
}

// run is a round: commits of the request's subscriptions, then the pull of them.
func (s *sea) run(_ context.Context, id round.Identity, req *ssp2.Request, out round.Writer) error {
	var frames []ssp2.Frame
	for i := range req.Commits {
		seq := s.commit(req.Commits[i].Operations[0].RowID)
		frames = append(frames, &ssp2.PushResult{
			ClientCommitID: req.Commits[i].ClientCommitID, Status: ssp2.PushApplied, CommitSeq: &seq,
			Results: []ssp2.OpResult{{Status: ssp2.OpApplied}},
		})
	}
	s.mu.Lock()
	head := s.seq
	s.mu.Unlock()
	type stored struct {
		ID     string        `json:"id"`
		Table  string        `json:"table"`
		Scopes ssp2.ScopeMap `json:"scopes"`

		SchemaVersion int32 `json:"schemaVersion"`
	}
	var list []stored
	for _, sub := range req.Subscriptions {
		list = append(list, stored{sub.ID, sub.Table, sub.Scopes, req.Header.SchemaVersion})
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	s.w.store.mu.Lock()
	s.w.store.clients[req.Header.ClientID] = db.RealtimeReadClientRow{
		ActorID: id.Actor, WireVersion: int16(req.WireVersion), Cursor: head, Subscriptions: string(text), MaxCommitSeq: head,
	}
	s.w.store.mu.Unlock()
	return answer(out, req.WireVersion, append(frames, pulled(req, head)...)...)
}

// swimmer is a client that checks that it misses nothing.
type swimmer struct {
	sea    *sea
	name   string
	org    string // of the rounds to come
	on     string // registered
	c      *client
	cursor int64
	behind bool // it was told to pull
	deltas int
}

// take handles one message and reports whether it ended a round.
func (s *swimmer) take(r received) error {
	switch {
	case r.err != nil:
		return r.err
	case r.delta != nil:
		m, err := ssp2.DecodeMessage(r.delta)
		if err != nil {
			return err
		}
		seq := m.Frames[len(m.Frames)-1].(*ssp2.SubEnd).NextCursor
		if missed := s.sea.between(s.on, s.cursor, seq); len(missed) > 0 {
			return fmt.Errorf("%s got delta %d over a gap: at %d it missed %v", s.name, seq, s.cursor, missed)
		}
		s.cursor = max(s.cursor, seq)
		s.deltas++
	case r.event != nil:
		if _, ok := r.event.(*ssp2.Wake); ok {
			s.behind = true
		}
	}
	return nil
}

// drain handles what has arrived.
func (s *swimmer) drain() error {
	for {
		select {
		case r, open := <-s.c.incoming:
			if !open {
				return fmt.Errorf("%s was closed", s.name)
			}
			if err := s.take(r); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// round runs one, with a push or without.
func (s *swimmer) round(push bool, id int) error {
	request, err := ssp2.DecodeRequest(pullRequest(s.name, orgSub(s.org)))
	if err != nil {
		return err
	}
	if push {
		request.Commits = []ssp2.PushCommit{{ClientCommitID: strconv.Itoa(id), Operations: []ssp2.Operation{
			{Table: "docs", RowID: s.org, Op: ssp2.OpUpsert, Payload: []byte{1}},
		}}}
	}
	b, err := ssp2.AppendMessage(nil, request.Message())
	if err != nil {
		return err
	}
	s.behind = false
	s.c.chunk(b)
	var response []byte
	for {
		r := s.c.next()
		if r.chunk == nil {
			if err := s.take(r); err != nil {
				return err
			}
			continue
		}
		response = append(response, r.chunk...)
		m, err := ssp2.DecodeMessage(response)
		if err != nil {
			continue
		}
		end, ok := m.Frames[len(m.Frames)-1].(*ssp2.SubEnd)
		if !ok {
			return fmt.Errorf("%s: %s", s.name, statusOf(m))
		}
		s.cursor, s.on = end.NextCursor, s.org
		s.c.send(&ssp2.Ack{Cursor: s.cursor})
		return nil
	}
}

// connect begins a connection, and pulls when it is told to.
func (s *swimmer) connect() error {
	c, _, err := s.sea.w.dial(s.name, "ada") //nolint:bodyclose // the library has read it
	if err != nil {
		return err
	}
	s.c = c
	hello, ok := c.next().event.(*ssp2.Hello)
	if !ok {
		return fmt.Errorf("%s: no hello", s.name)
	}
	if hello.RequiresSync {
		return s.round(false, 0)
	}
	return nil
}

// TestManyClientsAtRandom connect, push, acknowledge, register anew and disconnect. Nobody
// gets a delta over a gap, everybody converges, and nothing is left of anybody.
func TestManyClientsAtRandom(t *testing.T) {
	t.Parallel()
	clients, steps := 200, 15
	var until time.Time
	if long := os.Getenv(RaceFor); long != "" {
		d, err := time.ParseDuration(long)
		require.NoError(t, err)
		until, steps = time.Now().Add(d), 1<<30
	}
	w := newWorld(t, realtime.Options{MaxUnacked: 4})
	s := &sea{w: w, orgs: map[string][]int64{}}
	w.engine.run = s.run
	var group sync.WaitGroup
	var deltas, failed atomic.Int64
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for i := range clients {
		group.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			me := &swimmer{sea: s, name: fmt.Sprintf("c%d", i), org: fmt.Sprintf("o%d", i%10)}
			err := me.connect()
			for step := 0; step < steps && err == nil && failed.Load() == 0 && (until.IsZero() || time.Now().Before(until)); step++ {
				switch random.IntN(8) {
				case 0:
					err = me.round(true, step)
				case 1:
					err = me.round(false, step)
				case 2: // another org; what it has of the old one does not count
					me.org = fmt.Sprintf("o%d", random.IntN(10))
					err = me.round(false, step)
				case 3:
					me.c.send(&ssp2.PresencePublish{ScopeKey: "org:" + me.org, Doc: []byte(`{}`)})
				case 4:
					me.c.close()
					err = me.connect()
				case 5:
					s.commit(me.org)
				default:
					if err = me.drain(); err == nil && me.behind {
						err = me.round(false, step)
					}
					me.c.send(&ssp2.Ack{Cursor: me.cursor})
				}
			}
			// Behind its last messages nothing is under way to it.
			if err == nil {
				err = me.round(false, steps)
			}
			if err != nil {
				failed.Add(1)
				t.Error(err)
			}
			deltas.Add(int64(me.deltas))
		})
	}
	group.Wait()
	t.Logf("%d commits, %d deltas", s.seq, deltas.Load())
	require.Positive(t, deltas.Load())
	require.NotContains(t, w.logged.String(), "panic")
	connections, _, _, _ := w.hub.Counts()
	require.LessOrEqual(t, connections, 2*clients)
	w.settleAt(clients)
}
