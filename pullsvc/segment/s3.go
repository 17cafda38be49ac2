package segment

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/middleware"
	"golang.org/x/sync/errgroup"

	"github.com/syncpg/syncpg/ssp2"
)

const (
	s3Page        = 1000 // keys of a listing
	s3Parallel    = 16   // descriptions fetched at a time
	s3Name        = 1024 // bytes of a key, at most
	s3Described   = 1900 // bytes of a description in metadata, of which an object has 2 KiB
	metaExpiry    = "syncpg-expires"
	metaSegment   = "syncpg-segment"
	objectSuffix  = ".seg"
	indexSuffix   = ".json"
	contentBinary = "application/octet-stream"
)

// S3Config configures an [S3]. Client, Bucket and Secret are required.
type S3Config struct {
	// Client talks to the service; region, endpoint, credentials and path style are set on
	// it (s3.Options.BaseEndpoint and UsePathStyle, for others than AWS).
	Client *s3.Client
	// Bucket holds the objects. It must not be public.
	Bucket string
	// Prefix begins the key of every object: "segments/". Default: none.
	Prefix string
	// Secret names partitions in keys, which clients see in presigned URLs: 32 random
	// bytes at least, the same in all instances. With another secret what is stored is not
	// found again.
	Secret []byte
	// TTL is how long a segment lives after it was last stored. Default 24 h.
	TTL time.Duration
	// URLTTL is how long a presigned URL lives. Default and most: 15 min.
	URLTTL time.Duration
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
}

// S3 is a store in a bucket of an S3 service, which all servers with the same
// configuration share. It issues presigned URLs too (§5.4), to which clients go past the
// server.
//
// A segment is an object per scope digest and log epoch, under a key that ends in its id,
// and a small object that describes it, whose key says all of it, encrypted, so that Find
// needs no more than a listing. The expiry stands in the metadata; Find counts it from when
// the service says that the description was written. When a segment is put again just while its expired object is deleted, it may be
// lost; its client pulls again. A lifecycle rule of the bucket may delete objects earlier,
// or instead of DeleteExpired.
type S3 struct {
	client  *s3.Client
	presign *s3.PresignClient
	bucket  string
	prefix  string
	secret  []byte
	names   siv // hides descriptions in keys
	ttl     time.Duration
	urlTTL  time.Duration
	clock   func() time.Time

	passes sync.Mutex
	after  string // the key behind which the next pass of DeleteExpired goes on
}

// NewS3 returns a store. It does no I/O.
func NewS3(cfg S3Config) (*S3, error) {
	switch {
	case cfg.Client == nil:
		return nil, errors.New("segment: S3Config.Client is required")
	case cfg.Bucket == "":
		return nil, errors.New("segment: S3Config.Bucket is required")
	case len(cfg.Secret) < MinKeyBytes:
		return nil, fmt.Errorf("segment: S3Config.Secret has %d bytes; it must have %d at least", len(cfg.Secret), MinKeyBytes)
	case cfg.TTL < 0:
		return nil, fmt.Errorf("segment: S3Config.TTL is %v; it must be positive, or 0 for the default of %v", cfg.TTL, DefaultTTL)
	case cfg.URLTTL < 0 || cfg.URLTTL > MaxURLTTL:
		return nil, fmt.Errorf("segment: S3Config.URLTTL is %v; it must be positive and at most %v, or 0 for that", cfg.URLTTL, MaxURLTTL)
	}
	s := &S3{
		client: cfg.Client, presign: s3.NewPresignClient(cfg.Client), bucket: cfg.Bucket, prefix: cfg.Prefix,
		secret: bytes.Clone(cfg.Secret), ttl: cfg.TTL, urlTTL: cfg.URLTTL, clock: cfg.Clock,
	}
	var err error
	if s.names, err = newSIV(cfg.Secret, "syncpg segment s3 v1: description"); err != nil {
		return nil, err
	}
	if s.ttl == 0 {
		s.ttl = DefaultTTL
	}
	if s.urlTTL == 0 {
		s.urlTTL = DefaultURLTTL
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	return s, nil
}

// name hides a text in a key: a keyed hash, of which half is enough.
func (s *S3) name(use, text string) string {
	return hex.EncodeToString(mac(s.secret, []byte(use+"\x00"+text))[:16])
}

func (s *S3) partition(partition string) string {
	return s.prefix + s.name("partition", partition) + "/"
}

// holder is what leads to the objects of a segment for one digest, in any log epoch.
func (s *S3) holder(r Ref) string {
	return s.partition(r.Partition) + "s/" + strings.TrimPrefix(r.ID, idPrefix) + "/" + s.name("digest", r.ScopeDigest) + "/"
}

// object is the key of a segment's bytes: it ends in the segment's id, which §5.4 asks of
// what a presigned URL is for.
func (s *S3) object(r Ref) string {
	return s.holder(r) + s.name("epoch", r.LogEpoch) + "/" + strings.TrimPrefix(r.ID, idPrefix) + objectSuffix
}

// family is what leads to the descriptions of a key.
func (s *S3) family(k Key) string {
	return s.partition(k.Partition) + "k/" + s.name("key", fmt.Sprintf("%q %q %d %d %q", k.LogEpoch, k.Table, k.MediaType, k.SchemaVersion, k.ScopeDigest)) + "/"
}

// description is the key of a description, and says it where it is not too long. Newer pins
// come first in a listing, and the pages of a pin in their order.
func (s *S3) description(m Meta) string {
	family := s.family(m.Key)
	at := family + fmt.Sprintf("%016x-%08x-", uint64(1<<63-1)-uint64(m.AsOfCommitSeq), uint32(m.Page))
	said := "d" + base64.RawURLEncoding.EncodeToString(s.names.seal(m.pack(s.ttl), at))
	if len(at)+len(said)+len(indexSuffix) > s3Name {
		sum := sha256.Sum256(append(m.describe(), m.ID...))
		said = "h" + hex.EncodeToString(sum[:16])
	}
	return at + said + indexSuffix
}

// described reads a description from its key; false when it does not stand there.
func (s *S3) described(o *types.Object, k Key) (Meta, bool) {
	name, isIndex := strings.CutSuffix(aws.ToString(o.Key), indexSuffix)
	place := len(s.family(k)) + 16 + 1 + 8 + 1
	if !isIndex || len(name) <= place || name[place] != 'd' || o.LastModified == nil {
		return Meta{}, false
	}
	at, said := name[:place], name[place+1:]
	sealed, err := base64.RawURLEncoding.DecodeString(said)
	if err != nil {
		return Meta{}, false
	}
	packed, ours := s.names.open(sealed, at)
	if !ours {
		return Meta{}, false
	}
	m := Meta{Key: k}
	ttl, ok := m.unpack(packed)
	pin, badPin := strconv.ParseUint(at[place-26:place-10], 16, 64)
	page, badPage := strconv.ParseUint(at[place-9:place-1], 16, 32)
	if !ok || badPin != nil || badPage != nil {
		return Meta{}, false
	}
	m.AsOfCommitSeq, m.Page = int64(uint64(1<<63-1)-pin), int32(page)
	m.ExpiresAt = o.LastModified.Add(ttl).UnixMilli()
	return m, true
}

// pack renders what the rest of a description's key does not say.
func (m *Meta) pack(ttl time.Duration) []byte {
	id, _ := hex.DecodeString(strings.TrimPrefix(m.ID, idPrefix)) // a valid one
	b := binary.AppendUvarint(id, uint64(ttl.Milliseconds()))
	b = binary.AppendUvarint(b, uint64(m.RowCount))
	b = binary.AppendUvarint(b, uint64(m.ByteLength))
	for _, cursor := range []*string{m.RowCursor, m.NextRowCursor} {
		text := ""
		if cursor != nil {
			text = *cursor
		}
		b = append(binary.AppendUvarint(b, uint64(len(text))), text...)
	}
	return b
}

func (m *Meta) unpack(b []byte) (ttl time.Duration, ok bool) {
	if len(b) < sha256.Size {
		return 0, false
	}
	m.ID, b = idPrefix+hex.EncodeToString(b[:sha256.Size]), b[sha256.Size:]
	number := func() int64 {
		v, n := binary.Uvarint(b)
		if n <= 0 || v > math.MaxInt64 {
			b, v, n = nil, 0, 0
		}
		b = b[n:]
		return int64(v)
	}
	text := func() *string {
		n := number()
		if n > int64(len(b)) {
			b, n = nil, 0
		}
		c := string(b[:n])
		b = b[n:]
		return cursor(c)
	}
	ttl = time.Duration(number()) * time.Millisecond
	m.RowCount, m.ByteLength = number(), number()
	m.RowCursor, m.NextRowCursor = text(), text()
	return ttl, true
}

// Put implements [Store]. The service checks the hash of what it is sent.
func (s *S3) Put(ctx context.Context, m Meta, body io.Reader) error {
	if err := m.check(); err != nil {
		return err
	}
	m.ExpiresAt = s.clock().Add(s.ttl).UnixMilli()
	if err := s.put(ctx, m, body); err != nil {
		return fmt.Errorf("storing segment %s: %w", m.ID, err)
	}
	return nil
}

func (s *S3) put(ctx context.Context, m Meta, body io.Reader) error {
	key := s.object(m.ref())
	metadata := map[string]string{metaExpiry: strconv.FormatInt(m.ExpiresAt, 10)}
	described, err := renderDescription(m)
	if err != nil {
		return err
	}
	if metadata[metaSegment], err = renderMetadata(m, described); err != nil {
		return err
	}
	head, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &s.bucket, Key: &key})
	switch {
	case err == nil && aws.ToInt64(head.ContentLength) == m.ByteLength:
		_, err = s.client.CopyObject(ctx, &s3.CopyObjectInput{
			Bucket: &s.bucket, Key: &key, CopySource: aws.String((&url.URL{Path: s.bucket + "/" + key}).EscapedPath()),
			Metadata: metadata, MetadataDirective: types.MetadataDirectiveReplace, ContentType: aws.String(contentBinary),
		})
		if err != nil && !missing(err) {
			return fmt.Errorf("extending the object: %w", err)
		}
		if err == nil {
			break
		}
		fallthrough // it was deleted just now
	case missing(err):
		if err := s.upload(ctx, key, m, body, metadata); err != nil {
			return err
		}
	case err != nil:
		return fmt.Errorf("looking for the object: %w", err)
	default:
		return fmt.Errorf("the object has %d bytes instead of %d", aws.ToInt64(head.ContentLength), m.ByteLength)
	}
	if m.Page < 0 {
		return nil
	}
	index := s.description(m)
	if _, err := s.client.PutObject(ctx, &s3.PutObjectInput{
		Bucket: &s.bucket, Key: &index, Body: bytes.NewReader(described), ContentType: aws.String("application/json"),
		Metadata: map[string]string{metaExpiry: metadata[metaExpiry]},
	}); err != nil {
		return fmt.Errorf("putting the description: %w", err)
	}
	return nil
}

// upload sends a body once, as a stream of known length and hash.
func (s *S3) upload(ctx context.Context, key string, m Meta, body io.Reader, metadata map[string]string) error {
	exact := &exactReader{r: body, left: m.ByteLength}
	hash := strings.TrimPrefix(m.ID, idPrefix)
	_, err := s.client.PutObject(ctx, &s3.PutObjectInput{
		Bucket: &s.bucket, Key: &key, Body: exact, ContentLength: &m.ByteLength,
		ContentType: aws.String(contentBinary), Metadata: metadata,
	}, func(o *s3.Options) {
		o.RetryMaxAttempts = 1 // a stream is read once
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.APIOptions = append(o.APIOptions, func(stack *middleware.Stack) error {
			return stack.Initialize.Add(middleware.InitializeMiddlewareFunc("syncpgPayloadHash",
				func(ctx context.Context, in middleware.InitializeInput, next middleware.InitializeHandler) (middleware.InitializeOutput, middleware.Metadata, error) {
					return next.HandleInitialize(v4.SetPayloadHash(ctx, hash), in)
				}), middleware.Before)
		})
	})
	if exact.err != nil {
		err = exact.err
	}
	if err != nil {
		return fmt.Errorf("putting the object: %w", err)
	}
	return nil
}

// exactReader passes on a body that must have the length it was said to have, and fails
// before its last byte otherwise, so that nothing of it is stored.
type exactReader struct {
	r    io.Reader
	left int64
	err  error
}

func (e *exactReader) Read(p []byte) (int, error) {
	switch {
	case e.err != nil:
		return 0, e.err
	case e.left == 0:
		return 0, io.EOF
	}
	if int64(len(p)) > e.left {
		p = p[:e.left]
	}
	n, err := e.r.Read(p)
	if e.left -= int64(n); e.left == 0 {
		// The last bytes are passed on when nothing follows them.
		if e.err = atEnd(e.r); e.err != nil {
			return 0, e.err
		}
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		e.err = fmt.Errorf("reading the body: %w", err)
	}
	return n, e.err
}

// Open implements [Store]. It costs one request.
func (s *S3) Open(ctx context.Context, r Ref) (Meta, io.ReadCloser, error) {
	key := s.object(r)
	got, err := s.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &s.bucket, Key: &key})
	if missing(err) {
		return Meta{}, nil, s.why(ctx, r)
	}
	if err != nil {
		return Meta{}, nil, fmt.Errorf("opening segment %s: %w", r.ID, err)
	}
	m, err := readObject(got.Metadata, r.Partition)
	if err == nil && m.ExpiresAt <= s.clock().UnixMilli() {
		err = ErrExpired
	}
	if err == nil && aws.ToInt64(got.ContentLength) != m.ByteLength {
		err = fmt.Errorf("opening segment %s: it has %d bytes instead of %d", r.ID, aws.ToInt64(got.ContentLength), m.ByteLength)
	}
	if err != nil {
		_ = got.Body.Close()
		return Meta{}, nil, err
	}
	return m, &exactBody{body: got.Body, left: m.ByteLength}, nil
}

// why says why a segment is not there: the partition has it for other scopes, or for a log
// that is over.
func (s *S3) why(ctx context.Context, r Ref) error {
	for _, at := range []struct {
		prefix string
		err    error
	}{
		{s.holder(r), ErrExpired},
		{s.partition(r.Partition) + "s/" + strings.TrimPrefix(r.ID, idPrefix) + "/", ErrForbidden},
	} {
		list, err := s.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &s.bucket, Prefix: &at.prefix, MaxKeys: aws.Int32(1)})
		if err != nil {
			return fmt.Errorf("looking for segment %s: %w", r.ID, err)
		}
		if len(list.Contents) > 0 {
			return at.err
		}
	}
	return ErrNotFound
}

// exactBody is a body that fails when it ends before its length.
type exactBody struct {
	body io.ReadCloser
	left int64
}

func (b *exactBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	b.left -= int64(n)
	switch {
	case err == nil:
		return n, nil
	case err == io.EOF && b.left == 0:
		return n, io.EOF
	case err == io.EOF:
		return n, ErrCutShort
	}
	return n, fmt.Errorf("reading a segment: %w", err)
}

func (b *exactBody) Close() error {
	if err := b.body.Close(); err != nil {
		return fmt.Errorf("closing a segment: %w", err)
	}
	return nil
}

// Find implements [Store]. It costs a request for each thousand descriptions, and one for
// each that is too long for a key (rows with ids of hundreds of bytes), some at a time.
func (s *S3) Find(ctx context.Context, k Key) ([]Meta, error) {
	prefix := s.family(k)
	var found []Meta
	var long []string // keys
	list := s3.NewListObjectsV2Paginator(s.client, &s3.ListObjectsV2Input{Bucket: &s.bucket, Prefix: &prefix, MaxKeys: aws.Int32(s3Page)})
	for list.HasMorePages() && len(found)+len(long) < MaxFound {
		page, err := list.NextPage(ctx)
		if err != nil {
			return nil, fmt.Errorf("finding segments: %w", err)
		}
		for i := range page.Contents {
			if m, ok := s.described(&page.Contents[i], k); ok {
				found = append(found, m)
			} else {
				long = append(long, aws.ToString(page.Contents[i].Key))
			}
		}
	}
	read, err := s.readAll(ctx, long, k)
	if err != nil {
		return nil, fmt.Errorf("finding segments: %w", err)
	}
	// One that was stored as another page, or for another time, is there more than once.
	now := s.clock().UnixMilli()
	best := map[string]Meta{}
	for _, m := range append(found, read...) {
		if at := string(m.describe()) + m.ID; m.ExpiresAt > now && m.ExpiresAt > best[at].ExpiresAt {
			best[at] = m
		}
	}
	found = slices.Collect(maps.Values(best))
	Sort(found)
	return found[:min(len(found), MaxFound)], nil
}

// readAll fetches descriptions, those that are still there.
func (s *S3) readAll(ctx context.Context, keys []string, k Key) ([]Meta, error) {
	read := make([]*Meta, len(keys))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(s3Parallel)
	for i := range keys {
		group.Go(func() (err error) {
			read[i], err = s.read(ctx, keys[i], k)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err //nolint:wrapcheck // ours
	}
	var all []Meta
	for _, m := range read {
		if m != nil {
			all = append(all, *m)
		}
	}
	return all, nil
}

// read fetches a description, nil when it is gone or is none of the key.
func (s *S3) read(ctx context.Context, key string, k Key) (*Meta, error) {
	got, err := s.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &s.bucket, Key: &key})
	if missing(err) {
		return nil, nil //nolint:nilnil // deleted meanwhile
	}
	if err != nil {
		return nil, fmt.Errorf("reading a description: %w", err)
	}
	defer func() { _ = got.Body.Close() }()
	text, err := io.ReadAll(got.Body)
	if err != nil {
		return nil, fmt.Errorf("reading a description: %w", err)
	}
	m, err := parseDescription(text, k.Partition)
	if err != nil || m.Key != k || m.check() != nil {
		return nil, nil //nolint:nilnil // none of ours
	}
	return &m, nil
}

// DeleteExpired implements [Store]. One call looks at up to a thousand objects; the next
// one goes on behind them. Of objects that were written less than the TTL ago it needs to
// know no more; of older ones it reads the expiry.
func (s *S3) DeleteExpired(ctx context.Context, limit int) (deleted int, more bool, err error) {
	s.passes.Lock()
	defer s.passes.Unlock()
	in := &s3.ListObjectsV2Input{Bucket: &s.bucket, Prefix: &s.prefix, MaxKeys: aws.Int32(s3Page)}
	if s.after != "" {
		in.StartAfter = &s.after
	}
	list, err := s.client.ListObjectsV2(ctx, in)
	if err != nil {
		return 0, false, fmt.Errorf("deleting expired segments: %w", err)
	}
	now := s.clock()
	for _, o := range list.Contents {
		key := aws.ToString(o.Key)
		if old := o.LastModified == nil || !o.LastModified.Add(s.ttl).After(now.Add(time.Minute)); old {
			gone, err := s.deleteExpired(ctx, key, now.UnixMilli())
			if err != nil {
				return deleted, false, fmt.Errorf("deleting expired segments: %w", err)
			}
			if gone && strings.HasSuffix(key, indexSuffix) {
				deleted++
			}
		}
		s.after = key
		if deleted >= limit {
			return deleted, true, nil
		}
	}
	if !aws.ToBool(list.IsTruncated) {
		s.after = ""
		return deleted, false, nil
	}
	return deleted, true, nil
}

// deleteExpired deletes an object whose time is over.
func (s *S3) deleteExpired(ctx context.Context, key string, now int64) (bool, error) {
	head, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &s.bucket, Key: &key})
	switch {
	case missing(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("looking at an object: %w", err)
	}
	expires, err := strconv.ParseInt(metadataOf(head.Metadata, metaExpiry), 10, 64)
	if err != nil || expires > now {
		return false, nil //nolint:nilerr // an object without expiry is none of ours
	}
	if _, err := s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.bucket, Key: &key}); err != nil {
		return false, fmt.Errorf("deleting an object: %w", err)
	}
	return true, nil
}

// SignURL implements [URLSigner] with a presigned URL of the service.
func (s *S3) SignURL(ctx context.Context, m Meta) (string, int64, error) {
	if err := m.check(); err != nil {
		return "", 0, err
	}
	key := s.object(m.ref())
	// The service counts the seconds of its life from one within which it was signed.
	expires := s.clock().Add(s.urlTTL).Unix() * 1000
	signed, err := s.presign.PresignGetObject(ctx, &s3.GetObjectInput{Bucket: &s.bucket, Key: &key}, s3.WithPresignExpires(s.urlTTL))
	if err != nil {
		return "", 0, fmt.Errorf("presigning segment %s: %w", m.ID, err)
	}
	return signed.URL, expires, nil
}

func (m *Meta) ref() Ref {
	return Ref{Partition: m.Partition, LogEpoch: m.LogEpoch, ID: m.ID, ScopeDigest: m.ScopeDigest}
}

// storedDescription is a description as objects hold it: without its partition, whose id
// stays inside.
type storedDescription struct {
	LogEpoch      string         `json:"logEpoch"`
	Table         string         `json:"table"`
	MediaType     ssp2.MediaType `json:"mediaType"`
	SchemaVersion int32          `json:"schemaVersion"`
	ScopeDigest   string         `json:"scopeDigest"`
	ID            string         `json:"id"`
	AsOfCommitSeq int64          `json:"asOfCommitSeq"`
	RowCursor     *string        `json:"rowCursor,omitempty"`
	NextRowCursor *string        `json:"nextRowCursor,omitempty"`
	Page          int32          `json:"page"`
	RowCount      int64          `json:"rowCount"`
	ByteLength    int64          `json:"byteLength"`
	ExpiresAt     int64          `json:"expiresAt"`
}

func renderDescription(m Meta) ([]byte, error) {
	text, err := json.Marshal(storedDescription{
		LogEpoch: m.LogEpoch, Table: m.Table, MediaType: m.MediaType, SchemaVersion: m.SchemaVersion, ScopeDigest: m.ScopeDigest,
		ID: m.ID, AsOfCommitSeq: m.AsOfCommitSeq, RowCursor: m.RowCursor, NextRowCursor: m.NextRowCursor,
		Page: m.Page, RowCount: m.RowCount, ByteLength: m.ByteLength, ExpiresAt: m.ExpiresAt,
	})
	if err != nil {
		return nil, fmt.Errorf("describing the object: %w", err)
	}
	return text, nil
}

// renderMetadata renders a description as the metadata of an object: without its cursors, which
// opening it does not need, where they are too long for that.
func renderMetadata(m Meta, described []byte) (_ string, err error) {
	if base64.RawURLEncoding.EncodedLen(len(described)) > s3Described {
		m.RowCursor, m.NextRowCursor = nil, nil
		if described, err = renderDescription(m); err != nil {
			return "", err
		}
	}
	return base64.RawURLEncoding.EncodeToString(described), nil
}

func parseDescription(text []byte, partition string) (Meta, error) {
	var d storedDescription
	if err := json.Unmarshal(text, &d); err != nil {
		return Meta{}, fmt.Errorf("reading a description: %w", err)
	}
	return Meta{
		Key: Key{
			Partition: partition, LogEpoch: d.LogEpoch, Table: d.Table, MediaType: d.MediaType,
			SchemaVersion: d.SchemaVersion, ScopeDigest: d.ScopeDigest,
		},
		ID: d.ID, AsOfCommitSeq: d.AsOfCommitSeq, RowCursor: d.RowCursor, NextRowCursor: d.NextRowCursor,
		Page: d.Page, RowCount: d.RowCount, ByteLength: d.ByteLength, ExpiresAt: d.ExpiresAt,
	}, nil
}

// readObject reads the metadata of a segment's object.
func readObject(metadata map[string]string, partition string) (Meta, error) {
	text, err := base64.RawURLEncoding.DecodeString(metadataOf(metadata, metaSegment))
	if err != nil {
		return Meta{}, fmt.Errorf("reading the metadata of a segment: %w", err)
	}
	return parseDescription(text, partition)
}

// metadataOf finds a value whatever the case in which the service keeps names.
func metadataOf(metadata map[string]string, name string) string {
	for k, v := range metadata {
		if strings.EqualFold(k, name) {
			return v
		}
	}
	return ""
}

// missing says that there is no such object.
func missing(err error) bool {
	var api smithy.APIError
	return errors.As(err, &api) && (api.ErrorCode() == "NoSuchKey" || api.ErrorCode() == "NotFound")
}
