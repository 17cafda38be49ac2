package main

import (
	"time"

	"github.com/syncpg/syncpg"
)

// leaseFlags turn auth leases on.
type leaseFlags struct {
	LeaseKey         string        `name:"lease-key" placeholder:"BASE64" setting:"" group:"auth" help:"Turn auth leases on: while --auth-header-scopes says outage, clients go on with what they were allowed last. It signs them, with 32 random bytes or more in base64, the same for all servers. Better in the environment or the file than here."`
	LeasePreviousKey string        `name:"lease-previous-key" placeholder:"BASE64" setting:"" group:"auth" help:"Another key whose leases are taken. Give the old one here for --lease-ttl when it is replaced."`
	LeaseTTL         time.Duration `name:"lease-ttl" placeholder:"DURATION" setting:"" group:"auth" help:"How long a lease is valid after the last round that refreshed it. Default: 15m."`
}

// leases puts auth leases into a configuration; outages says that there is a way to tell
// that scopes cannot be found out, without which no lease is ever asked for.
func (f leaseFlags) leases(outages bool, cfg *syncpg.Config) error {
	switch {
	case f.LeaseKey == "" && (f.LeasePreviousKey != "" || f.LeaseTTL != 0):
		return usagef("--lease-previous-key and --lease-ttl go with --lease-key")
	case f.LeaseKey == "":
		return nil
	case !outages:
		return usagef("--lease-key goes with --auth-header-scopes, which says when leases are needed")
	case f.LeaseTTL != 0 && f.LeaseTTL < time.Second:
		return usagef("--lease-ttl is %v; it must be at least a second", f.LeaseTTL)
	}
	key, err := decodeKey("--lease-key", f.LeaseKey)
	if err != nil {
		return err
	}
	previous, err := decodeKey("--lease-previous-key", f.LeasePreviousKey)
	if err != nil {
		return err
	}
	cfg.Leases = &syncpg.Leases{TTL: f.LeaseTTL, Keys: [][]byte{key}}
	if previous != nil {
		cfg.Leases.Keys = append(cfg.Leases.Keys, previous)
	}
	return nil
}
