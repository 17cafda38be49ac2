package main

import (
	"bytes"
	"encoding/base64"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
)

// TestLeaseFlags: what flags make, and which do not go together.
func TestLeaseFlags(t *testing.T) {
	t.Parallel()
	first, second := bytes.Repeat([]byte("1"), 32), bytes.Repeat([]byte("2"), 40)
	text := base64.StdEncoding.EncodeToString
	for _, tc := range []struct {
		name  string
		flags leaseFlags
		deaf  bool // nothing says that there is an outage
		want  *syncpg.Leases
		err   string
	}{
		{name: "off", flags: leaseFlags{}},
		{name: "on", flags: leaseFlags{LeaseKey: text(first)}, want: &syncpg.Leases{Keys: [][]byte{first}}},
		{name: "all", flags: leaseFlags{text(first), text(second), time.Hour}, want: &syncpg.Leases{TTL: time.Hour, Keys: [][]byte{first, second}}},
		{name: "for nothing", flags: leaseFlags{LeaseKey: text(first)}, deaf: true, err: "goes with --auth-header-scopes"},
		{name: "a life without a key", flags: leaseFlags{LeaseTTL: time.Hour}, err: "go with --lease-key"},
		{name: "an old key alone", flags: leaseFlags{LeasePreviousKey: text(first)}, err: "go with --lease-key"},
		{name: "a short life", flags: leaseFlags{LeaseKey: text(first), LeaseTTL: time.Millisecond}, err: "--lease-ttl is 1ms"},
		{name: "a negative life", flags: leaseFlags{LeaseKey: text(first), LeaseTTL: -time.Hour}, err: "--lease-ttl is -1h"},
		{name: "a short key", flags: leaseFlags{LeaseKey: text([]byte("short"))}, err: "--lease-key has 5 bytes"},
		{name: "an old key that is none", flags: leaseFlags{LeaseKey: text(first), LeasePreviousKey: "secret!"}, err: "--lease-previous-key is no base64"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var cfg syncpg.Config
			err := tc.flags.leases(!tc.deaf, &cfg)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.NotContains(t, err.Error(), "secret!")
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.want, cfg.Leases)
		})
	}
}
