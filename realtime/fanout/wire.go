package fanout

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A notification is a text of less than 8000 bytes. The first byte says what it is:
//
//	(empty)  look at the watched partitions; what `notify syncpg` sends
//	c        commits: a JSON array of [partition, newest seq]
//	e        log epochs that were rotated: a JSON array of partitions, empty for all; sent by
//	         the rotation itself, see 007_retention.sql
//	a        ask: the instance that is to say everything it knows, empty for all
//	b        beat: instance, newest number
//	p        a piece of a presence message: instance, number, piece, pieces, JSON
//
// Fields are separated by a space. What is not understood is ignored, since a later
// version may have sent it.
const (
	kindCommits = 'c'
	kindEpochs  = 'e'
	kindAsk     = 'a'
	kindBeat    = 'b'
	kindPiece   = 'p'
	// maxPayload is what Postgres takes, with room to spare.
	maxPayload = 7900
	// maxPieces bounds what a message is put together from.
	maxPieces = 1024
)

// pair is a partition and its newest commit.
type pair struct {
	partition string
	seq       int64
}

func (p pair) MarshalJSON() ([]byte, error) {
	return json.Marshal([]any{p.partition, p.seq}) //nolint:wrapcheck // a method of the encoder
}

func (p *pair) UnmarshalJSON(b []byte) error {
	fields := []any{&p.partition, &p.seq}
	if err := json.Unmarshal(b, &fields); err != nil {
		return err //nolint:wrapcheck // a method of the decoder
	}
	if len(fields) < 2 {
		return errors.New("a commit without a seq")
	}
	return nil
}

// commitPayloads returns the notifications that tell of commits, or that they are too
// many: then it is one that makes everybody look.
func commitPayloads(pairs []pair, most int) []string {
	var payloads []string
	var b strings.Builder
	for _, p := range pairs {
		text, err := p.MarshalJSON()
		if err != nil || len(text)+3 > maxPayload {
			return []string{""}
		}
		if b.Len() > 0 && b.Len()+len(text)+2 > maxPayload {
			b.WriteByte(']')
			payloads = append(payloads, b.String())
			b.Reset()
		}
		if len(payloads) == most {
			return []string{""}
		}
		if b.Len() == 0 {
			b.WriteString("c[")
		} else {
			b.WriteByte(',')
		}
		b.Write(text)
	}
	if b.Len() > 0 {
		b.WriteByte(']')
		payloads = append(payloads, b.String())
	}
	return payloads
}

// message is one of the numbered messages in which an instance tells of its presence.
type message struct {
	// Begin: what is known of the instance begins anew with this message. End: what was
	// known of it and has not been told again since is not any more.
	Begin   bool    `json:"begin,omitempty"`
	End     bool    `json:"end,omitempty"`
	Entries []entry `json:"entries"`
}

// entry is a document, or its end.
type entry struct {
	Partition string          `json:"p"`
	ScopeKey  string          `json:"s"`
	ActorID   string          `json:"a"`
	ClientID  string          `json:"c"`
	Version   int64           `json:"v"`           // of the document, per instance
	Doc       json.RawMessage `json:"d,omitempty"` // none: it is gone
}

func (e *entry) key() PresenceKey {
	return PresenceKey{Partition: e.Partition, ScopeKey: e.ScopeKey, ActorID: e.ActorID, ClientID: e.ClientID}
}

// pieces returns the notifications that carry a message.
func pieces(instance string, number int64, m *message) ([]string, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("writing presence: %w", err)
	}
	var cut []string
	for text := string(body); text != ""; {
		n := min(len(text), maxPayload-100)
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		cut = append(cut, text[:n])
		text = text[n:]
	}
	for i := range cut {
		cut[i] = fmt.Sprintf("p%s %d %d %d %s", instance, number, i+1, len(cut), cut[i])
	}
	return cut, nil
}

func askPayload(instance string) string { return string(rune(kindAsk)) + instance }

func beatPayload(instance string, number int64) string {
	return fmt.Sprintf("b%s %d", instance, number)
}

// fields cuts a text at its first n spaces, all but the first and the last into numbers.
func fields(text string, n int) (head string, numbers []int64, rest string, ok bool) {
	head, rest, ok = strings.Cut(text, " ")
	for range n - 1 {
		var field string
		field, rest, ok = strings.Cut(rest, " ")
		if !ok {
			return "", nil, "", false
		}
		number, err := strconv.ParseInt(field, 10, 64)
		if err != nil || number < 1 {
			return "", nil, "", false
		}
		numbers = append(numbers, number)
	}
	return head, numbers, rest, ok && head != ""
}
