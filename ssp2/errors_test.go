package ssp2_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// TestCatalogue writes the catalogue out once more, as §10.2 and the additions of
// this server have it.
func TestCatalogue(t *testing.T) {
	t.Parallel()

	want := []struct {
		code, category string
		retryable      bool
		action         string
		status         int
	}{
		{"operation.unknown", "not-found", false, "regenerateClient", 404},
		{"operation.forbidden", "forbidden", false, "checkPermissions", 403},
		{"operation.invalid_request", "invalid-request", false, "fixRequest", 400},
		{"operation.result_too_large", "invalid-request", false, "fixRequest", 400},
		{"operation.storage_unsupported", "internal", false, "inspectServer", 500},
		{"operation.query_failed", "internal", false, "inspectServer", 500},
		{"operation.execution_failed", "internal", false, "inspectServer", 500},
		{"sync.auth_required", "auth-required", true, "refreshAuth", 401},
		{"sync.auth_lease_required", "auth-required", true, "refreshAuth", 401},
		{"sync.auth_lease_revoked", "auth-required", true, "refreshAuth", 401},
		{"sync.forbidden", "forbidden", false, "checkPermissions", 403},
		{"sync.invalid_request", "invalid-request", false, "fixRequest", 400},
		{"sync.invalid_client_id", "invalid-request", false, "resetClientId", 400},
		{"sync.invalid_subscription", "invalid-request", false, "fixRequest", 400},
		{"sync.empty_commit", "invalid-request", false, "fixRequest", 400},
		{"sync.unknown_table", "schema-mismatch", false, "regenerateClient", 400},
		{"sync.row_missing", "not-found", false, "forceResync", 404},
		{"sync.version_conflict", "conflict", false, "resolveConflict", 409},
		{"sync.constraint_violation", "invalid-request", false, "fixRequest", 422},
		{"sync.missing_scopes", "internal", false, "inspectServer", 500},
		{"sync.crdt_merge_failed", "internal", false, "inspectServer", 500},
		{"sync.idempotency_cache_miss", "internal", true, "retryLater", 503},
		{"sync.too_many_operations", "invalid-request", false, "splitBatch", 413},
		{"sync.not_found", "not-found", false, "forceResync", 404},
		{"sync.segment_expired", "not-found", true, "retryLater", 404},
		{"sync.cursor_expired", "reset-required", false, "rebootstrap", 409},
		{"sync.scope_revoked", "scope-revoked", false, "checkPermissions", 403},
		{"sync.rate_limited", "rate-limited", true, "retryLater", 429},
		{"sync.schema_mismatch", "schema-mismatch", false, "regenerateClient", 409},
		{"sync.client_schema_unsupported", "schema-mismatch", false, "upgradeClient", 409},
		{"sync.client_wire_unsupported", "schema-mismatch", false, "upgradeClient", 409},
		{"sync.websocket_connection_limit", "rate-limited", true, "retryLater", 429},
		{"blob.not_found", "not-found", false, "fixRequest", 404},
		{"blob.forbidden", "forbidden", false, "checkPermissions", 403},
		{"blob.hash_mismatch", "invalid-request", false, "fixRequest", 400},
		{"blob.too_large", "invalid-request", false, "fixRequest", 413},

		{"sync.row_deleted", "not-found", false, "fixRequest", 404},
		{"sync.reference_violation", "invalid-request", false, "fixRequest", 422},
		{"sync.schema_not_ready", "internal", true, "retryLater", 503},
		{"sync.internal_error", "internal", true, "inspectServer", 500},
		{"sync.storage_unavailable", "internal", true, "retryLater", 503},
		{"sync.storage_stale_read", "internal", true, "retryLater", 503},
		{"sync.storage.scan_requires_scope", "internal", false, "inspectServer", 500},
		{"sync.storage.writer_fence_rejected", "internal", true, "retryLater", 503},
		{"sync.storage.physical_layout_mismatch", "internal", false, "inspectServer", 500},
		{"sync.storage.stored_layout_mismatch", "internal", false, "inspectServer", 500},
		{"sync.storage.prune_epoch_mismatch", "internal", false, "inspectServer", 500},
		{"sync.storage.partition_unregistered", "internal", false, "inspectServer", 500},
	}
	wanted := map[ssp2.Code]bool{}
	for _, w := range want {
		wanted[ssp2.Code(w.code)] = true
		t.Run(w.code, func(t *testing.T) {
			t.Parallel()
			info, ok := ssp2.Lookup(ssp2.Code(w.code))
			require.True(t, ok)
			require.Equal(t, ssp2.CodeInfo{
				Code: ssp2.Code(w.code), Category: ssp2.Category(w.category), Retryable: w.retryable,
				Action: ssp2.Action(w.action), HTTPStatus: w.status,
			}, info)

			e := ssp2.Errorf(info.Code, "message %d", 7)
			require.Equal(t, w.status, e.HTTPStatus())
			require.Equal(t, w.retryable, e.Retryable())
			require.Equal(t, &ssp2.ErrorFrame{
				Code: w.code, Message: "message 7", Category: w.category, Retryable: w.retryable, RecommendedAction: w.action,
			}, e.Frame())
		})
	}
	seen := map[ssp2.Code]bool{}
	for _, info := range ssp2.Codes() {
		require.False(t, seen[info.Code], "%s is there twice", info.Code)
		require.True(t, wanted[info.Code], "%s is not in this test", info.Code)
		seen[info.Code] = true
	}
	require.Len(t, seen, len(want))
}

func TestCodesIsACopy(t *testing.T) {
	t.Parallel()

	ssp2.Codes()[0].Retryable = true
	require.False(t, ssp2.Codes()[0].Retryable)
}

func TestHostCodeIsOpaque(t *testing.T) {
	t.Parallel()

	_, ok := ssp2.Lookup("booking.full")
	require.False(t, ok)
	e := ssp2.Errorf("booking.full", "no room")
	require.Equal(t, 500, e.HTTPStatus())
	require.False(t, e.Retryable())
	require.Equal(t, "internal", e.Frame().Category)
	require.Equal(t, "inspectServer", e.Frame().RecommendedAction)
}

func TestErrorKeepsItsCause(t *testing.T) {
	t.Parallel()

	e := &ssp2.Error{Code: ssp2.CodeNotFound, Message: "no such segment", Err: io.ErrClosedPipe}
	require.ErrorIs(t, e, io.ErrClosedPipe)
	require.Equal(t, "sync.not_found: no such segment: io: read/write on closed pipe", e.Error())
	require.Equal(t, "sync.not_found: gone", ssp2.Errorf(ssp2.CodeNotFound, "gone").Error())
	require.NotContains(t, string(ssp2.AppendErrorJSON(nil, e)), "pipe", "the cause stays behind")

	require.Equal(t, ssp2.CodeNotFound, ssp2.CodeOf(fmt.Errorf("serve: %w", e)))
	require.Empty(t, ssp2.CodeOf(io.EOF))
	require.Empty(t, ssp2.CodeOf(nil))
}

func TestErrorFrameRoundTrip(t *testing.T) {
	t.Parallel()

	e := &ssp2.Error{Code: ssp2.CodeRowMissing, Message: "gone", Details: `{"a":1}`, Err: errors.New("cause")}
	back := e.Frame().Err()
	require.Equal(t, &ssp2.Error{Code: ssp2.CodeRowMissing, Message: "gone", Details: `{"a":1}`}, back)

	bad := &ssp2.Error{Code: ssp2.CodeRowMissing, Message: "a\xffb", Details: "{"}
	require.Nil(t, bad.Frame().Details)
	_, err := ssp2.AppendFrame(nil, ssp2.WireV1, bad.Frame())
	require.NoError(t, err, "an ERROR frame can always be written")
}

func TestAppendErrorJSON(t *testing.T) {
	t.Parallel()

	e := &ssp2.Error{Code: ssp2.CodeRateLimited, Message: `slow "down" <&>`, Details: `{"afterMs":5}`}
	require.Equal(t,
		`x{"code":"sync.rate_limited","category":"rate-limited","retryable":true,"recommendedAction":"retryLater",`+
			`"message":"slow \"down\" <&>","details":{"afterMs":5}}`,
		string(ssp2.AppendErrorJSON([]byte("x"), e)))

	body := ssp2.AppendErrorJSON(nil, &ssp2.Error{Code: "a", Message: "b\xff", Details: "{"})
	require.True(t, json.Valid(body))
	require.NotContains(t, string(body), "details")
}
