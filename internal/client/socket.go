package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"

	"github.com/coder/websocket"

	"github.com/syncpg/syncpg/ssp2"
)

// ErrNoRealtime reports that the server has no realtime channel.
var ErrNoRealtime = errors.New("there is no /realtime here")

// deltaTag is the first byte of a message that is a delta (§8.7).
const deltaTag = 0x00

// maxDelta bounds a message of the server.
const maxDelta = 64 << 20

// Socket is the realtime channel of a client (§8). It takes deltas; the client's rounds go over HTTP all the same.
type Socket struct {
	client *Client
	ws     *websocket.Conn
	hello  hello
}

// hello is what a server says first (§8.1).
type hello struct {
	ProtocolVersion int    `json:"protocolVersion"`
	ClientID        string `json:"clientId"`
	RequiresSync    *bool  `json:"requiresSync"`
}

// Dial opens the channel, reads the greeting, and pulls when that asks for it. [ErrNoRealtime]: the server has none.
// The caller closes it.
func (c *Client) Dial(ctx context.Context) (*Socket, error) {
	address := c.cfg.URL + "/realtime?clientId=" + url.QueryEscape(c.cfg.ClientID)
	ws, res, err := websocket.Dial(ctx, address, &websocket.DialOptions{HTTPClient: c.http, HTTPHeader: c.cfg.Header})
	switch {
	case err == nil:
	case res == nil || res.StatusCode == http.StatusSwitchingProtocols:
		return nil, fmt.Errorf("open a socket: %w", err)
	case res.StatusCode == http.StatusNotFound || res.StatusCode == http.StatusMethodNotAllowed:
		return nil, ErrNoRealtime
	default:
		return nil, fmt.Errorf("open a socket: %w", refused(res))
	}
	ws.SetReadLimit(maxDelta)
	s := &Socket{client: c, ws: ws}
	if err := s.greet(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// refused reads the answer to a request that did not become a socket.
func refused(res *http.Response) error {
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, bodyExcerpt))
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	mediaType, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	return answeredError(res.Request, res, mediaType, text)
}

// Close ends the channel without waiting for the server.
func (s *Socket) Close() { _ = s.ws.CloseNow() }

func (s *Socket) greet(ctx context.Context) error {
	event, data, _, err := s.read(ctx)
	if err != nil {
		return fmt.Errorf("read the greeting: %w", err)
	}
	if event != "hello" || json.Unmarshal(data, &s.hello) != nil || s.hello.RequiresSync == nil {
		return protocolError("the first message on a socket is no hello (§8.1)")
	}
	if s.hello.ProtocolVersion != 1 || s.hello.ClientID != s.client.cfg.ClientID {
		return protocolError("the hello is of protocol %d for client %q", s.hello.ProtocolVersion, s.hello.ClientID)
	}
	if *s.hello.RequiresSync {
		return s.catchUp(ctx)
	}
	return nil
}

// Follow applies deltas until every subscription has reached a commit, and reports what they brought. When the server
// sends a wake-up instead (§8.3), it pulls; pulled reports that it did. Subscriptions that the commit does not concern get
// no delta, so name those that it does.
func (s *Socket) Follow(ctx context.Context, seq int64, ids ...string) (p Progress, pulled bool, err error) {
	behind := func(id string) bool {
		cursor, complete := s.client.Cursor(id)
		return !complete || cursor < seq
	}
	for slices.ContainsFunc(ids, behind) {
		event, _, delta, err := s.read(ctx)
		switch {
		case err != nil:
			return p, pulled, fmt.Errorf("wait for commit %d on the socket: %w", seq, err)
		case delta != nil:
			err = s.apply(ctx, delta, &p)
		case event == "sync":
			pulled = true
			err = s.catchUp(ctx)
		}
		if err != nil {
			return p, pulled, err
		}
	}
	return p, pulled, nil
}

// read returns the next event, or the next delta. Unknown messages are left out (§8.1, §8.7).
func (s *Socket) read(ctx context.Context) (event string, data json.RawMessage, delta []byte, err error) {
	for {
		kind, message, err := s.ws.Read(ctx)
		if err != nil {
			return "", nil, nil, err
		}
		if kind == websocket.MessageBinary {
			if len(message) > 0 && message[0] == deltaTag {
				return "", nil, message[1:], nil
			}
			continue
		}
		var m struct {
			Event string          `json:"event"`
			Data  json.RawMessage `json:"data"`
		}
		if err := json.Unmarshal(message, &m); err != nil {
			return "", nil, nil, protocolError("a control message that is no JSON object: %v", err)
		}
		return m.Event, m.Data, nil, nil
	}
}

// apply applies a delta like the answer to a pull, of the subscriptions that it has, and acknowledges it (§8.2).
func (s *Socket) apply(ctx context.Context, delta []byte, p *Progress) error {
	a := &answer{delta: true}
	if err := s.client.apply(ctx, ssp2.NewReader(bytes.NewReader(delta), ssp2.Limits{MaxMessageBytes: -1}), a); err != nil {
		return fmt.Errorf("apply a delta: %w", err)
	}
	p.add(a.progress)
	return s.ack(ctx, a.reached)
}

// catchUp pulls, and acknowledges what all subscriptions have then (§8.2).
func (s *Socket) catchUp(ctx context.Context) error {
	if _, err := s.client.CatchUp(ctx); err != nil {
		return err
	}
	floor := int64(-1)
	for _, sub := range s.client.subs {
		if sub.revoked || sub.pending() {
			continue
		}
		if floor < 0 || sub.cursor < floor {
			floor = sub.cursor
		}
	}
	if floor < 0 {
		return nil
	}
	return s.ack(ctx, floor)
}

func (s *Socket) ack(ctx context.Context, cursor int64) error {
	if err := s.ws.Write(ctx, websocket.MessageText, fmt.Appendf(nil, `{"type":"ack","cursor":%d}`, cursor)); err != nil {
		return fmt.Errorf("acknowledge: %w", err)
	}
	return nil
}
