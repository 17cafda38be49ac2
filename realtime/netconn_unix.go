//go:build unix

package realtime

import (
	"errors"
	"syscall"
)

// giveNow gives the socket what it takes at once. It is called by RawConn.Write, and never
// wants to be called again.
func (n *netConn) giveNow(fd uintptr) bool {
	for {
		taken, err := syscall.Write(int(fd), n.given)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case errors.Is(err, syscall.EAGAIN):
		case err != nil:
			n.fault = err
		default:
			n.taken = taken
		}
		return true
	}
}
