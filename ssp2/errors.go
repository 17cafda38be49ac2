package ssp2

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Code is a protocol error code (§10.2). A code outside the catalogue is a host
// code (§6.7).
type Code string

// The codes of §10.2.
const (
	CodeOperationUnknown            Code = "operation.unknown"
	CodeOperationForbidden          Code = "operation.forbidden"
	CodeOperationInvalidRequest     Code = "operation.invalid_request"
	CodeOperationResultTooLarge     Code = "operation.result_too_large"
	CodeOperationStorageUnsupported Code = "operation.storage_unsupported"
	CodeOperationQueryFailed        Code = "operation.query_failed"
	CodeOperationExecutionFailed    Code = "operation.execution_failed"
	CodeAuthRequired                Code = "sync.auth_required"
	CodeAuthLeaseRequired           Code = "sync.auth_lease_required"
	CodeAuthLeaseRevoked            Code = "sync.auth_lease_revoked"
	CodeForbidden                   Code = "sync.forbidden"
	CodeInvalidRequest              Code = "sync.invalid_request"
	CodeInvalidClientID             Code = "sync.invalid_client_id"
	CodeInvalidSubscription         Code = "sync.invalid_subscription"
	CodeEmptyCommit                 Code = "sync.empty_commit"
	CodeUnknownTable                Code = "sync.unknown_table"
	CodeRowMissing                  Code = "sync.row_missing"
	CodeVersionConflict             Code = "sync.version_conflict"
	CodeConstraintViolation         Code = "sync.constraint_violation"
	CodeMissingScopes               Code = "sync.missing_scopes"
	CodeCRDTMergeFailed             Code = "sync.crdt_merge_failed"
	CodeIdempotencyCacheMiss        Code = "sync.idempotency_cache_miss"
	CodeTooManyOperations           Code = "sync.too_many_operations"
	CodeNotFound                    Code = "sync.not_found"
	CodeSegmentExpired              Code = "sync.segment_expired"
	CodeCursorExpired               Code = "sync.cursor_expired"
	CodeScopeRevoked                Code = "sync.scope_revoked"
	CodeRateLimited                 Code = "sync.rate_limited"
	CodeSchemaMismatch              Code = "sync.schema_mismatch"
	CodeClientSchemaUnsupported     Code = "sync.client_schema_unsupported"
	CodeClientWireUnsupported       Code = "sync.client_wire_unsupported"
	CodeWebSocketConnectionLimit    Code = "sync.websocket_connection_limit"
	CodeBlobNotFound                Code = "blob.not_found"
	CodeBlobForbidden               Code = "blob.forbidden"
	CodeBlobHashMismatch            Code = "blob.hash_mismatch"
	CodeBlobTooLarge                Code = "blob.too_large"
)

// The codes this server adds to §10.2.
const (
	// CodeRowDeleted: a wire version 3 upsert without a base version names a row
	// deleted inside the horizon.
	CodeRowDeleted Code = "sync.row_deleted"
	// CodeReferenceViolation: a declared reference names no parent, or a delete
	// is restricted by one.
	CodeReferenceViolation Code = "sync.reference_violation"
	// CodeSchemaNotReady: the stored schema is not the one this server runs, or
	// a backfill of it is not activated.
	CodeSchemaNotReady Code = "sync.schema_not_ready"
	// CodeStorageStaleRead: a read answered from behind a commit that this
	// request has already accepted.
	CodeStorageStaleRead Code = "sync.storage_stale_read"
	// CodeStorageUnavailable: the database cannot be reached, is overloaded or
	// gave the transaction up; the same request may succeed in a moment.
	CodeStorageUnavailable Code = "sync.storage_unavailable"
	// CodeInternalError: the server failed in a way it does not describe to a
	// client. Nothing of the request is known to be wrong.
	CodeInternalError Code = "sync.internal_error"

	CodeStorageScanRequiresScope      Code = "sync.storage.scan_requires_scope"
	CodeStorageWriterFenceRejected    Code = "sync.storage.writer_fence_rejected"
	CodeStoragePhysicalLayoutMismatch Code = "sync.storage.physical_layout_mismatch"
	CodeStorageStoredLayoutMismatch   Code = "sync.storage.stored_layout_mismatch"
	CodeStoragePruneEpochMismatch     Code = "sync.storage.prune_epoch_mismatch"
	CodeStoragePartitionUnregistered  Code = "sync.storage.partition_unregistered"
)

// Category is the coarse class of a code (§10.1).
type Category string

// The categories of §10.2.
const (
	CategoryAuthRequired   Category = "auth-required"
	CategoryConflict       Category = "conflict"
	CategoryForbidden      Category = "forbidden"
	CategoryInternal       Category = "internal"
	CategoryInvalidRequest Category = "invalid-request"
	CategoryNotFound       Category = "not-found"
	CategoryRateLimited    Category = "rate-limited"
	CategoryResetRequired  Category = "reset-required"
	CategorySchemaMismatch Category = "schema-mismatch"
	CategoryScopeRevoked   Category = "scope-revoked"
)

// Action is what a client should do about a code (§10.1).
type Action string

// The recommended actions of §10.1.
const (
	ActionCheckPermissions Action = "checkPermissions"
	ActionFixRequest       Action = "fixRequest"
	ActionForceResync      Action = "forceResync"
	ActionInspectServer    Action = "inspectServer"
	ActionRebootstrap      Action = "rebootstrap"
	ActionRefreshAuth      Action = "refreshAuth"
	ActionRegenerateClient Action = "regenerateClient"
	ActionResetClientID    Action = "resetClientId"
	ActionResolveConflict  Action = "resolveConflict"
	ActionRetryLater       Action = "retryLater"
	ActionSplitBatch       Action = "splitBatch"
	ActionUpgradeClient    Action = "upgradeClient"
)

// CodeInfo is what the catalogue fixes for a code.
type CodeInfo struct {
	Code      Code
	Category  Category
	Retryable bool // may the same request succeed later without change
	Action    Action
	// HTTPStatus is the status of a response whose whole answer is this error
	// (§1.1). Codes that only ever appear inside a message have the status their
	// category would get.
	HTTPStatus int
}

// catalogue is never written to.
var catalogue = [...]CodeInfo{
	{CodeOperationUnknown, CategoryNotFound, false, ActionRegenerateClient, 404},
	{CodeOperationForbidden, CategoryForbidden, false, ActionCheckPermissions, 403},
	{CodeOperationInvalidRequest, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeOperationResultTooLarge, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeOperationStorageUnsupported, CategoryInternal, false, ActionInspectServer, 500},
	{CodeOperationQueryFailed, CategoryInternal, false, ActionInspectServer, 500},
	{CodeOperationExecutionFailed, CategoryInternal, false, ActionInspectServer, 500},
	{CodeAuthRequired, CategoryAuthRequired, true, ActionRefreshAuth, 401},
	{CodeAuthLeaseRequired, CategoryAuthRequired, true, ActionRefreshAuth, 401},
	{CodeAuthLeaseRevoked, CategoryAuthRequired, true, ActionRefreshAuth, 401},
	{CodeForbidden, CategoryForbidden, false, ActionCheckPermissions, 403},
	{CodeInvalidRequest, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeInvalidClientID, CategoryInvalidRequest, false, ActionResetClientID, 400},
	{CodeInvalidSubscription, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeEmptyCommit, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeUnknownTable, CategorySchemaMismatch, false, ActionRegenerateClient, 400},
	{CodeRowMissing, CategoryNotFound, false, ActionForceResync, 404},
	{CodeRowDeleted, CategoryNotFound, false, ActionFixRequest, 404},
	{CodeVersionConflict, CategoryConflict, false, ActionResolveConflict, 409},
	{CodeConstraintViolation, CategoryInvalidRequest, false, ActionFixRequest, 422},
	{CodeReferenceViolation, CategoryInvalidRequest, false, ActionFixRequest, 422},
	{CodeMissingScopes, CategoryInternal, false, ActionInspectServer, 500},
	{CodeCRDTMergeFailed, CategoryInternal, false, ActionInspectServer, 500},
	{CodeIdempotencyCacheMiss, CategoryInternal, true, ActionRetryLater, 503},
	{CodeTooManyOperations, CategoryInvalidRequest, false, ActionSplitBatch, 413},
	{CodeNotFound, CategoryNotFound, false, ActionForceResync, 404},
	{CodeSegmentExpired, CategoryNotFound, true, ActionRetryLater, 404},
	{CodeCursorExpired, CategoryResetRequired, false, ActionRebootstrap, 409},
	{CodeScopeRevoked, CategoryScopeRevoked, false, ActionCheckPermissions, 403},
	{CodeRateLimited, CategoryRateLimited, true, ActionRetryLater, 429},
	{CodeSchemaMismatch, CategorySchemaMismatch, false, ActionRegenerateClient, 409},
	{CodeClientSchemaUnsupported, CategorySchemaMismatch, false, ActionUpgradeClient, 409},
	{CodeClientWireUnsupported, CategorySchemaMismatch, false, ActionUpgradeClient, 409},
	{CodeWebSocketConnectionLimit, CategoryRateLimited, true, ActionRetryLater, 429},
	{CodeSchemaNotReady, CategoryInternal, true, ActionRetryLater, 503},
	{CodeStorageStaleRead, CategoryInternal, true, ActionRetryLater, 503},
	{CodeStorageUnavailable, CategoryInternal, true, ActionRetryLater, 503},
	{CodeInternalError, CategoryInternal, true, ActionInspectServer, 500},
	{CodeStorageScanRequiresScope, CategoryInternal, false, ActionInspectServer, 500},
	{CodeStorageWriterFenceRejected, CategoryInternal, true, ActionRetryLater, 503},
	{CodeStoragePhysicalLayoutMismatch, CategoryInternal, false, ActionInspectServer, 500},
	{CodeStorageStoredLayoutMismatch, CategoryInternal, false, ActionInspectServer, 500},
	{CodeStoragePruneEpochMismatch, CategoryInternal, false, ActionInspectServer, 500},
	{CodeStoragePartitionUnregistered, CategoryInternal, false, ActionInspectServer, 500},
	{CodeBlobNotFound, CategoryNotFound, false, ActionFixRequest, 404},
	{CodeBlobForbidden, CategoryForbidden, false, ActionCheckPermissions, 403},
	{CodeBlobHashMismatch, CategoryInvalidRequest, false, ActionFixRequest, 400},
	{CodeBlobTooLarge, CategoryInvalidRequest, false, ActionFixRequest, 413},
}

// Codes returns the whole catalogue, in its own order, as a copy.
func Codes() []CodeInfo { return slices.Clone(catalogue[:]) }

// Lookup returns what the catalogue says of a code, and false for a code that it
// does not hold.
func Lookup(code Code) (CodeInfo, bool) {
	for i := range catalogue {
		if catalogue[i].Code == code {
			return catalogue[i], true
		}
	}
	return CodeInfo{}, false
}

// describe is Lookup for any code: a host code is opaque to the client runtime
// and gets the class of a permanent internal failure.
func describe(code Code) CodeInfo {
	if info, ok := Lookup(code); ok {
		return info
	}
	return CodeInfo{code, CategoryInternal, false, ActionInspectServer, 500}
}

// Error is a protocol error: a code of the catalogue, a message that is safe to
// show to a client, and optionally a JSON object of details and the cause,
// which never crosses the wire.
type Error struct {
	Code    Code
	Message string
	Details string // raw JSON object, "" for none
	Err     error  // cause, for logs only
}

// Errorf makes an Error. Its message crosses the wire: keep causes out of it and
// in Err.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Error returns code, message and cause, for logs.
func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// HTTPStatus returns the status of the catalogue, 500 for a host code.
func (e *Error) HTTPStatus() int { return describe(e.Code).HTTPStatus }

// Retryable reports what the catalogue says of the code, false for a host code.
func (e *Error) Retryable() bool { return describe(e.Code).Retryable }

// Frame returns the error as an ERROR frame (§1.6). The cause stays behind, and
// so do details that are not a JSON document.
func (e *Error) Frame() *ErrorFrame {
	info := describe(e.Code)
	f := &ErrorFrame{
		Code:              string(e.Code),
		Message:           strings.ToValidUTF8(e.Message, "\uFFFD"),
		Category:          string(info.Category),
		Retryable:         info.Retryable,
		RecommendedAction: string(info.Action),
	}
	if e.Details != "" && ValidJSON([]byte(e.Details)) {
		f.Details = &e.Details
	}
	return f
}

// AppendErrorJSON appends the JSON body of an error answered over HTTP (§10.1).
// The cause stays behind, and so do details that are not a JSON document.
func AppendErrorJSON(dst []byte, e *Error) []byte {
	info := describe(e.Code)
	dst = AppendJSONString(append(dst, `{"code":`...), string(e.Code))
	dst = AppendJSONString(append(dst, `,"category":`...), string(info.Category))
	dst = strconv.AppendBool(append(dst, `,"retryable":`...), info.Retryable)
	dst = AppendJSONString(append(dst, `,"recommendedAction":`...), string(info.Action))
	dst = AppendJSONString(append(dst, `,"message":`...), e.Message)
	if e.Details != "" && ValidJSON([]byte(e.Details)) {
		dst = append(append(dst, `,"details":`...), e.Details...)
	}
	return append(dst, '}')
}

// CodeOf returns the code of the first [*Error] in err's chain, and "" when
// there is none.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}
