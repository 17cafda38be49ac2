package httpsync

import (
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// coding is a content coding of a response.
type coding string

const (
	identity coding = ""
	gzipped  coding = "gzip"
	zstded   coding = "zstd"
)

// negotiate chooses the coding of a response from the Accept-Encoding lines of
// its request (RFC 9110 §12.5.3): the highest weight, and of equal ones the one
// that compresses best. A client that names none, or refuses all, gets none.
func negotiate(lines []string) coding {
	weights := map[string]float64{}
	for element := range strings.SplitSeq(strings.Join(lines, ","), ",") {
		name, params, _ := strings.Cut(element, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name == "x-gzip" {
			name = string(gzipped)
		}
		if name != "" {
			weights[name] = weight(params)
		}
	}
	best, highest := identity, 0.0
	for _, c := range []coding{zstded, gzipped} {
		q, named := weights[string(c)]
		if !named {
			q = weights["*"]
		}
		if q > highest {
			best, highest = c, q
		}
	}
	if weights["identity"] > highest {
		return identity
	}
	return best
}

// weight reads the q parameter of an element; one that cannot be read counts as
// a refusal.
func weight(params string) float64 {
	for p := range strings.SplitSeq(params, ";") {
		name, value, _ := strings.Cut(p, "=")
		if strings.EqualFold(strings.TrimSpace(name), "q") {
			q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil || !(q >= 0 && q <= 1) {
				return 0
			}
			return q
		}
	}
	return 1
}

// encoder compresses a response.
type encoder interface {
	io.WriteCloser
	Flush() error
	Reset(w io.Writer)
}

// compressions counts the responses that are being compressed.
type compressions struct {
	most  int64 // negative: any number
	under atomic.Int64
}

// begin says whether one more may be compressed, which ends with end.
func (c *compressions) begin() bool {
	if n := c.under.Add(1); c.most >= 0 && n > c.most {
		c.end()
		return false
	}
	return true
}

func (c *compressions) end() { c.under.Add(-1) }

// encoderPool keeps the encoders of a coding between responses.
type encoderPool struct {
	pool sync.Pool
	make func() encoder
}

func (p *encoderPool) get(w io.Writer) encoder {
	e, ok := p.pool.Get().(encoder)
	if !ok {
		e = p.make()
	}
	e.Reset(w)
	return e
}

// put takes an encoder back, whatever state it is in.
func (p *encoderPool) put(e encoder) {
	e.Reset(nil) // the pool must not keep the response alive
	p.pool.Put(e)
}

var encoders = map[coding]*encoderPool{
	gzipped: {make: func() encoder {
		z, err := gzip.NewWriterLevel(nil, gzip.BestSpeed)
		if err != nil {
			panic(err) // the level is a constant
		}
		return z
	}},
	zstded: {make: func() encoder {
		z, err := zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithEncoderConcurrency(1), // compresses in the goroutine that writes
			// What a response in flight holds follows from it: 1 MiB, where a window of 1 MiB
			// takes 1.7 and packs segments no better. See BenchmarkEncoders.
			zstd.WithWindowSize(256<<10),
			zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic(err) // the options are constants
		}
		return z
	}},
}
