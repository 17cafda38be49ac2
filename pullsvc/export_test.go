package pullsvc

// Chains is how many chains a service remembers, those without users that are still being
// built included.
func (s *Service) Chains() int {
	sh := s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	n := len(sh.fresh) + len(sh.orphans)
	for _, of := range sh.pinned {
		n += len(of)
	}
	return n
}

// Used says whether a chain that clients may join has a user.
func (s *Service) Used() bool {
	sh := s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for _, c := range sh.fresh {
		if c.users > 0 {
			return true
		}
	}
	return false
}
