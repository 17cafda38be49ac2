//go:build unix

package devpg

import "testing"

// SetElsewhere replaces the directories for clusters that cannot be where root asks for them.
func SetElsewhere(t *testing.T, dirs ...string) {
	t.Helper()
	old := elsewhere
	t.Cleanup(func() { elsewhere = old })
	elsewhere = dirs
}
