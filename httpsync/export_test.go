package httpsync

// Negotiate is negotiate, for tests.
func Negotiate(lines []string) string { return string(negotiate(lines)) }

// Compress puts a body through n encoders of a coding, as many responses at once would, and
// returns them, in use, and what came out.
func Compress(c string, body []byte, n int) (inUse []any, packed int64) {
	out := &length{}
	for range n {
		e := encoders[coding(c)].get(out)
		for at := 0; at < len(body); at += writeStep {
			_, _ = e.Write(body[at:min(at+writeStep, len(body))])
		}
		_ = e.Flush()
		inUse = append(inUse, e)
	}
	return inUse, out.n
}

// length counts what is written.
type length struct{ n int64 }

func (l *length) Write(p []byte) (int, error) {
	l.n += int64(len(p))
	return len(p), nil
}
