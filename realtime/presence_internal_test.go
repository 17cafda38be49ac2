package realtime

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// TestPresenceThatWaitsCollapses: a client that reads slowly sees the newest of every peer, and
// each of them come before it changes or leaves (§8.6.2). Events are of peers a and b, in the
// order in which they happened: it joins (+), has another document (=), leaves (-).
func TestPresenceThatWaitsCollapses(t *testing.T) {
	t.Parallel()
	kinds := map[byte]ssp2.PresenceKind{'+': ssp2.PresenceJoin, '=': ssp2.PresenceUpdate, '-': ssp2.PresenceLeave}
	for happened, seen := range map[string]string{
		"a+1 a=2 a=3":          "a+3",
		"a+1 a-":               "",
		"a+1 a=2 a- a+3":       "a+3",
		"a=1 a=2":              "a=2",
		"a=1 a-":               "a-",
		"a- a+1":               "a- a+1",
		"a- a+1 a=2 a-":        "a-",
		"a=1 a- a+2 a=3":       "a- a+3",
		"a=1 a+2":              "a=1 a+2", // the key was lost in between
		"a+1 b+1 a=2 b- a=3":   "a+3",
		"b=1 a+1 b=2 a=2 b-":   "b- a+2",
		"a+1 other:a+1 a=2 b-": "a+2 other:a+1 b-",
	} {
		c := &conn{hub: &Hub{}, writing: true}
		for ev := range strings.FieldsSeq(happened) {
			key, what := "key", ev
			if k, rest, ok := strings.Cut(ev, ":"); ok {
				key, what = k, rest
			}
			c.show(newPresenceEvent(key, peer{client: what[:1]}, kinds[what[1]], []byte(what[2:]), 0))
		}
		var queued []string
		for _, it := range c.queue {
			s := fmt.Sprintf("%s%s%s", it.event.peer.client, map[ssp2.PresenceKind]string{
				ssp2.PresenceJoin: "+", ssp2.PresenceUpdate: "=", ssp2.PresenceLeave: "-",
			}[it.event.kind], it.event.doc)
			if it.event.key != "key" {
				s = it.event.key + ":" + s
			}
			queued = append(queued, s)
		}
		require.Equal(t, seen, strings.Join(queued, " "), happened)
	}
}
