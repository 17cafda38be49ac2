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
