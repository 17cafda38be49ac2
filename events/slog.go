package events

import (
	"context"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"unicode"
)

// Slog returns a sink that logs every event: its name is the message, each field an
// attribute in snake case. Dead letters and failures of the resolver are warnings, what
// comes many times a second or says that nothing happened (FanoutNotified, FanoutHeard,
// FanoutRead, FanoutPolled) is for debugging, all others have the level info. A nil logger
// gives a nil sink.
func Slog(l *slog.Logger) Sink {
	if l == nil {
		return nil
	}
	return logSink{l}
}

type logSink struct{ log *slog.Logger }

func (s logSink) Emit(ctx context.Context, e Event) {
	level := slog.LevelInfo
	switch e.(type) {
	case ReactionDeadLettered, ResolverFailed:
		level = slog.LevelWarn
	case FanoutNotified, FanoutHeard, FanoutRead, FanoutPolled:
		level = slog.LevelDebug
	}
	if s.log.Enabled(ctx, level) {
		s.log.LogAttrs(ctx, level, e.EventName(), attributes(e)...)
	}
}

// field is an exported field of a type of event.
type field struct {
	name  string
	index []int
}

// fields remembers the []field of every type of event.
var fields sync.Map

func attributes(e Event) []slog.Attr {
	v := reflect.ValueOf(e)
	if v.Kind() != reflect.Struct {
		return []slog.Attr{slog.Any("event", e)}
	}
	list := fieldsOf(v.Type())
	attrs := make([]slog.Attr, len(list))
	for i, f := range list {
		attrs[i] = slog.Any(f.name, v.FieldByIndex(f.index).Interface())
	}
	return attrs
}

func fieldsOf(t reflect.Type) []field {
	if list, ok := fields.Load(t); ok {
		return list.([]field) //nolint:forcetypeassert // nothing else is stored
	}
	var list []field
	for _, f := range reflect.VisibleFields(t) {
		if f.IsExported() && !f.Anonymous {
			list = append(list, field{snakeCase(f.Name), f.Index})
		}
	}
	fields.Store(t, list)
	return list
}

// snakeCase turns ClientCommitID into client_commit_id.
func snakeCase(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		if unicode.IsUpper(r) && i > 0 && (unicode.IsLower(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
