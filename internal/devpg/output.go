package devpg

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
)

// tailLines is how much of the server's output an error shows.
const tailLines = 20

// output receives what a server program prints: it passes whole lines on to a logger and keeps the last of them.
type output struct {
	log *slog.Logger

	mu   sync.Mutex
	part []byte
	tail []string
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.part = append(o.part, p...)
	for {
		line, rest, ok := bytes.Cut(o.part, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		text := strings.TrimRight(string(line), "\r")
		o.part = rest
		if text == "" {
			continue
		}
		o.log.Debug("postgres", "line", text)
		o.tail = append(o.tail, text)
		if len(o.tail) > tailLines {
			o.tail = o.tail[len(o.tail)-tailLines:]
		}
	}
}

// String returns the last lines that were printed.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Join(o.tail, "\n")
}
