package round

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// OpenSegment opens a segment for an actor who asks for it by id, with the scopes that its
// subscription requested (§5.5). The host is asked on every call: a descriptor is no
// capability. The caller closes the body, whose errors after the first byte are not to be
// answered but to break the response off.
//
// Errors are as those of [Engine.Run] before the first byte: sync.forbidden when the actor
// does not hold just the scopes that the segment was built for, sync.segment_expired and
// sync.not_found otherwise. An actor who holds none of what it asks for is refused before
// anything is looked up, so it learns nothing of what there is.
func (e *Engine) OpenSegment(ctx context.Context, id Identity, segmentID string, requested map[string][]string) (segment.Meta, io.ReadCloser, error) {
	if err := gate.CheckIdentity(id.Partition, id.Actor); err != nil {
		return segment.Meta{}, nil, err
	}
	digest, err := e.authorize(ctx, ScopeRequest{Identity: id}, requested)
	if err != nil {
		return segment.Meta{}, nil, e.refused(ctx, id.Actor, segmentID, err)
	}
	m, body, err := e.open(ctx, id.Partition, segmentID, digest)
	return m, body, e.refused(ctx, id.Actor, segmentID, err)
}

// OpenSigned opens a segment for whoever has a token for it (§5.4). A token that does not
// grant it is sync.forbidden.
func (e *Engine) OpenSigned(ctx context.Context, segmentID, token string) (segment.Meta, io.ReadCloser, error) {
	claims, err := e.verify(token, segmentID)
	if err != nil {
		return segment.Meta{}, nil, e.refused(ctx, "", segmentID, err)
	}
	m, body, err := e.open(ctx, claims.Partition, segmentID, claims.ScopeDigest)
	return m, body, e.refused(ctx, "", segmentID, err)
}

func (e *Engine) verify(token, segmentID string) (segment.Claims, error) {
	err := segment.ErrToken
	if e.urls != nil {
		var claims segment.Claims
		if claims, err = e.urls.Verify(token, segmentID); err == nil {
			return claims, nil
		}
	}
	return segment.Claims{}, &ssp2.Error{Code: ssp2.CodeForbidden, Message: "the URL does not grant this segment, or not any more", Err: err}
}

// authorize returns the digest of the effective scopes (§3.2, §3.5). The table of the
// segment is not known yet, and need not be: scopes that are not its own variables have
// another digest.
func (e *Engine) authorize(ctx context.Context, req ScopeRequest, requested map[string][]string) (string, error) {
	if err := scope.ValidateAnyRequested(e.schema, requested); err != nil {
		return "", err
	}
	resolution, _, err := e.resolve(ctx, req)
	switch {
	case ssp2.CodeOf(err) == ssp2.CodeInvalidSubscription:
		// Of the host's answer, not of the request.
		return "", &ssp2.Error{Code: ssp2.CodeForbidden, Message: forbidden, Err: err}
	case err != nil:
		return "", err
	case resolution.Err != nil:
		return "", &ssp2.Error{Code: ssp2.CodeForbidden, Message: forbidden, Err: resolution.Err}
	}
	effective, active := resolution.Grants.Effective(requested)
	if !active {
		return "", &ssp2.Error{Code: ssp2.CodeForbidden, Message: forbidden}
	}
	return ssp2.ScopeDigest(effective), nil
}

const forbidden = "the requested scopes do not give this segment"

// open opens a segment of the partition's current log.
func (e *Engine) open(ctx context.Context, partition, segmentID, digest string) (segment.Meta, io.ReadCloser, error) {
	if e.segments == nil || !segment.ValidID(segmentID) {
		return segment.Meta{}, nil, ssp2.Errorf(ssp2.CodeNotFound, "there is no such segment")
	}
	epoch, err := e.gate.Enter(ctx, partition)
	if err != nil {
		return segment.Meta{}, nil, err
	}
	ref := segment.Ref{Partition: partition, LogEpoch: epoch.LogEpoch, ID: segmentID, ScopeDigest: digest}
	m, body, err := e.segments.Open(ctx, ref)
	if errors.Is(err, segment.ErrExpired) {
		// Of another log epoch, perhaps, than the one that is remembered.
		e.gate.Forget(partition)
		if epoch, err = e.gate.Enter(ctx, partition); err != nil {
			return segment.Meta{}, nil, err
		}
		if epoch.LogEpoch == ref.LogEpoch {
			return segment.Meta{}, nil, expired(segment.ErrExpired)
		}
		ref.LogEpoch = epoch.LogEpoch
		m, body, err = e.segments.Open(ctx, ref)
	}
	switch {
	case errors.Is(err, segment.ErrNotFound):
		return segment.Meta{}, nil, &ssp2.Error{Code: ssp2.CodeNotFound, Message: "there is no such segment", Err: err}
	case errors.Is(err, segment.ErrForbidden):
		return segment.Meta{}, nil, &ssp2.Error{Code: ssp2.CodeForbidden, Message: forbidden, Err: err}
	case errors.Is(err, segment.ErrExpired):
		return segment.Meta{}, nil, expired(err)
	case err != nil:
		return segment.Meta{}, nil, fmt.Errorf("opening a segment: %w", err)
	case subtle.ConstantTimeCompare([]byte(m.ScopeDigest), []byte(digest)) == 0 || m.Partition != partition:
		_ = body.Close()
		return segment.Meta{}, nil, &ssp2.Error{Code: ssp2.CodeForbidden, Message: forbidden}
	}
	return m, body, nil
}

func expired(err error) error {
	return &ssp2.Error{Code: ssp2.CodeSegmentExpired, Message: "the segment has expired; pull again for a fresh one", Err: err}
}

// refused logs why a download is refused, to nobody known when it was asked for by URL.
func (e *Engine) refused(ctx context.Context, actor, segmentID string, err error) error {
	if err == nil {
		return nil
	}
	level := slog.LevelDebug
	if info, _ := ssp2.Lookup(Failure(err).Code); info.Category == ssp2.CategoryInternal && ctx.Err() == nil {
		level = slog.LevelWarn
	}
	e.log.Log(ctx, level, "segment not served", "segment", segmentID, "actor", actor, "error", err)
	return err
}
