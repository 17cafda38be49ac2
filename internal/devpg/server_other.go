//go:build !unix

package devpg

import "context"

// Server is a running PostgreSQL server.
type Server struct{}

// Start fails with [ErrUnsupported] on this platform.
func Start(context.Context, Options) (*Server, error) { return nil, ErrUnsupported }

// StopLeftover fails with [ErrUnsupported] on this platform.
func StopLeftover(context.Context, string) error { return ErrUnsupported }

// EnsureDatabase fails with [ErrUnsupported] on this platform.
func (*Server) EnsureDatabase(context.Context, string) error { return ErrUnsupported }

// DSN returns nothing on this platform.
func (*Server) DSN(string) string { return "" }

// SocketDSN returns nothing on this platform.
func (*Server) SocketDSN(string) string { return "" }

// DataDir returns nothing on this platform.
func (*Server) DataDir() string { return "" }

// PID returns nothing on this platform.
func (*Server) PID() int { return 0 }

// Binaries returns nothing on this platform.
func (*Server) Binaries() Binaries { return Binaries{} }

// Done returns a channel that never closes on this platform.
func (*Server) Done() <-chan struct{} { return nil }

// Stop does nothing on this platform.
func (*Server) Stop(context.Context) error { return nil }
