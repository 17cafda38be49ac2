package reaction

import "time"

// Backoff is the delay after a failed attempt.
var Backoff = backoff

// ParseKey takes an idempotency key apart.
func ParseKey(partition, key string) (parts [3]string, ok bool) {
	id, ok := parseKey(partition, key)
	return [3]string{id.clientID, id.clientCommitID, id.key}, ok
}

// IdempotencyKey makes an idempotency key.
func IdempotencyKey(partition, clientID, clientCommitID, key string) string {
	return idempotencyKey(partition, identity{clientID, clientCommitID, key})
}

// SetTicks makes Run poll when the test says so, and tells the test the interval.
func (r *Runner) SetTicks(ticks <-chan time.Time, asked func(every time.Duration)) {
	r.ticks = func(every time.Duration) (<-chan time.Time, func()) {
		asked(every)
		return ticks, func() {}
	}
}

// SetPage sets how many due partitions one statement returns.
func (r *Runner) SetPage(n int) { r.page = n }
