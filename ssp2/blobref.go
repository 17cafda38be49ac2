package ssp2

import (
	"bytes"
	"strconv"
	"unicode/utf8"
)

// BlobRef is the value of a blob_ref column (§5.9.1).
type BlobRef struct {
	BlobID     string // "sha256:" and 64 lowercase hex digits
	ByteLength int64  // 0 to [MaxSafeInteger]
	MediaType  *string
	Name       *string
}

// ValidBlobRef reports whether b is a canonical BlobRef document: the members
// blobId, byteLength, mediaType and name in this order, the last two optional,
// no white space, nothing else. Keys, blobId and byteLength have one spelling;
// the two optional strings may be escaped in any way JSON allows.
func ValidBlobRef(b []byte) bool {
	_, ok := scanBlobRef(b)
	return ok
}

// ParseBlobRef parses a canonical BlobRef document. Errors have the code
// sync.invalid_request.
func ParseBlobRef(b []byte) (BlobRef, error) {
	parts, ok := scanBlobRef(b)
	if !ok {
		return BlobRef{}, invalid("not a canonical BlobRef document")
	}
	ref := BlobRef{BlobID: string(parts.blobID), ByteLength: parts.byteLength}
	if parts.mediaType != nil {
		s := unquoteJSON(parts.mediaType)
		ref.MediaType = &s
	}
	if parts.name != nil {
		s := unquoteJSON(parts.name)
		ref.Name = &s
	}
	return ref, nil
}

// blobRefParts are the pieces of a valid document; strings are JSON literals.
type blobRefParts struct {
	blobID          []byte
	byteLength      int64
	mediaType, name []byte
}

func scanBlobRef(b []byte) (parts blobRefParts, ok bool) {
	rest, ok := bytes.CutPrefix(b, []byte(`{"blobId":"`))
	if !ok || len(rest) < blobIDLen || !validBlobID(rest[:blobIDLen]) {
		return parts, false
	}
	parts.blobID, rest = rest[:blobIDLen], rest[blobIDLen:]
	if rest, ok = bytes.CutPrefix(rest, []byte(`","byteLength":`)); !ok {
		return parts, false
	}
	end, ok := scanDigits(rest, 0)
	if !ok || end > len("9007199254740991") || (rest[0] == '0' && end > 1) {
		return parts, false
	}
	parts.byteLength, _ = strconv.ParseInt(string(rest[:end]), 10, 64)
	if !safeInteger(parts.byteLength) {
		return parts, false
	}
	rest = rest[end:]
	if after, found := bytes.CutPrefix(rest, []byte(`,"mediaType":`)); found {
		if parts.mediaType, rest, ok = cutString(after); !ok {
			return parts, false
		}
	}
	if after, found := bytes.CutPrefix(rest, []byte(`,"name":`)); found {
		if parts.name, rest, ok = cutString(after); !ok {
			return parts, false
		}
	}
	return parts, string(rest) == "}"
}

const blobIDLen = len("sha256:") + 64

// validBlobID checks the form of a content address (§5.1, §5.9.1).
func validBlobID(id []byte) bool {
	digits, ok := bytes.CutPrefix(id, []byte("sha256:"))
	if !ok || len(digits) != 64 {
		return false
	}
	for _, ch := range digits {
		if (ch < '0' || ch > '9') && (ch < 'a' || ch > 'f') {
			return false
		}
	}
	return true
}

// cutString takes a JSON string literal off the head of b.
func cutString(b []byte) (literal, rest []byte, ok bool) {
	end, ok := scanString(b, 0)
	if !ok || !utf8.Valid(b[:end]) {
		return nil, nil, false
	}
	return b[:end], b[end:], true
}

// AppendBlobRef appends the canonical document of ref. Errors have the code
// sync.invalid_request.
func AppendBlobRef(dst []byte, ref BlobRef) ([]byte, error) {
	switch {
	case !validBlobID([]byte(ref.BlobID)):
		return dst, invalid(`blobId is not "sha256:" and 64 lowercase hex digits`)
	case ref.ByteLength < 0 || ref.ByteLength > MaxSafeInteger:
		return dst, invalid("byteLength %d is not within 0 and 2^53−1", ref.ByteLength)
	}
	dst = append(append(dst, `{"blobId":"`...), ref.BlobID...)
	dst = strconv.AppendInt(append(dst, `","byteLength":`...), ref.ByteLength, 10)
	if ref.MediaType != nil {
		dst = AppendJSONString(append(dst, `,"mediaType":`...), *ref.MediaType)
	}
	if ref.Name != nil {
		dst = AppendJSONString(append(dst, `,"name":`...), *ref.Name)
	}
	return append(dst, '}'), nil
}
