package segment

import "time"

// WaitWith replaces the timer of a janitor that has not started.
func (j *Janitor) WaitWith(wait func(time.Duration) (<-chan time.Time, func() bool)) { j.wait = wait }
