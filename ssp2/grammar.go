package ssp2

// grammar checks the order of the frames of one message (§1.5, §1.6).
type grammar struct {
	kind   Kind
	header bool // the header frame was seen

	// request
	push, pull bool

	// response
	body     bool // something other than LEASE and unknown frames followed the header
	lease    bool
	result   *PushResult // the last one
	details  bool        // it has its companion
	section  bool        // a SUB_START was seen
	open     bool        // a subscription is open
	commits  bool        // it has a COMMIT
	segments bool        // it has a segment
	failed   bool        // ERROR was seen
}

// admit checks what the type of a frame alone says, before its payload is read.
func (g *grammar) admit(t FrameType) error {
	first := FrameReqHeader
	if g.kind == KindResponse {
		first = FrameRespHeader
	}
	kind := t.kind()
	switch {
	case kind != 0 && kind != g.kind:
		return invalid("%v: not a frame of a %v", t, g.kind)
	case g.failed:
		return invalid("%v after ERROR: only END may follow", t)
	case !g.header && t != first:
		return invalid("%v: a %v begins with %v", t, g.kind, first)
	case g.header && t == first:
		return invalid("%v: a second one", t)
	}
	return nil
}

// next takes the next frame.
func (g *grammar) next(f Frame) error {
	t := f.FrameType()
	if err := g.admit(t); err != nil {
		return err
	}
	switch f := f.(type) {
	case *RequestHeader, *ResponseHeader:
		g.header = true
	case *PushCommit:
		if g.pull {
			return invalid("%v after PULL_HEADER", t)
		}
		g.push = true
	case *PullHeader:
		if g.pull {
			return invalid("%v: a second one", t)
		}
		g.pull = true
	case *Subscription:
		if !g.pull {
			return invalid("%v without a PULL_HEADER", t)
		}
	case *Lease:
		if g.lease || g.body {
			return invalid("%v: at most one, directly behind RESP_HEADER", t)
		}
		g.lease = true
	case *PushResult:
		if g.section {
			return invalid("%v after SUB_START", t)
		}
		g.body, g.result, g.details = true, f, false
	case *PushResultDetails:
		return g.companion(f)
	case *SubStart:
		if g.open {
			return invalid("%v inside an open subscription", t)
		}
		g.body, g.section, g.open, g.commits, g.segments = true, true, true, false, false
	case *Commit:
		if !g.open || g.segments {
			return invalid("%v outside a subscription or next to its segments", t)
		}
		g.commits = true
	case *SegmentRef, *SegmentInline:
		if !g.open || g.commits {
			return invalid("%v outside a subscription or next to its commits", t)
		}
		g.segments = true
	case *SubEnd:
		if !g.open {
			return invalid("%v without a SUB_START", t)
		}
		g.open = false
	case *ErrorFrame:
		g.failed = true
	}
	return nil
}

// companion checks PUSH_RESULT_DETAILS against the result before it (§6.3.1).
func (g *grammar) companion(f *PushResultDetails) error {
	t := f.FrameType()
	switch {
	case g.section || g.result == nil || g.details:
		return invalid("%v: not directly behind its PUSH_RESULT", t)
	case g.result.Status != PushRejected || g.result.ClientCommitID != f.ClientCommitID:
		return invalid("%v: the PUSH_RESULT before it is not the rejection of this commit", t)
	}
	failed := make(map[int32]bool)
	for i := range g.result.Results {
		if r := &g.result.Results[i]; r.Status == OpError {
			failed[r.OpIndex] = true
		}
	}
	for _, entry := range f.Entries {
		if !failed[entry.OpIndex] {
			return invalid("%v: opIndex %d is not an error of the PUSH_RESULT", t, entry.OpIndex)
		}
	}
	g.details = true
	return nil
}

// end takes END.
func (g *grammar) end() error {
	switch {
	case !g.header:
		return invalid("END: the message has no header frame")
	case g.kind == KindRequest && !g.push && !g.pull:
		return invalid("END: a request needs a PUSH_COMMIT or a PULL_HEADER")
	case g.open && !g.failed:
		return invalid("END: the last subscription has no SUB_END")
	}
	return nil
}
