package segment_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

// fakeTime is a testClock as the fake service wants it.
type fakeTime struct{ *testClock }

func (c fakeTime) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// requests counts the requests that a client sends, by what they do.
type requests struct {
	http.RoundTripper
	mu   sync.Mutex
	sent map[string]int
}

func (r *requests) RoundTrip(req *http.Request) (*http.Response, error) {
	what := req.Method
	if req.URL.Query().Get("list-type") != "" {
		what = "LIST"
	}
	r.mu.Lock()
	r.sent[what]++
	r.mu.Unlock()
	return r.RoundTripper.RoundTrip(req)
}

// taken returns what was counted, and begins anew.
func (r *requests) taken() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	sent := r.sent
	r.sent = map[string]int{}
	return sent
}

// bucket is a bucket of an S3 service in this process.
func bucket(t *testing.T, clock *testClock) (*s3.Client, *http.Client) {
	t.Helper()
	backend := s3mem.New(s3mem.WithTimeSource(fakeTime{clock}))
	require.NoError(t, backend.CreateBucket("segments"))
	server := httptest.NewServer(gofakes3.New(backend, gofakes3.WithTimeSource(fakeTime{clock}), gofakes3.WithTimeSkewLimit(0)).Server())
	t.Cleanup(server.Close)
	client := server.Client()
	return s3.New(s3.Options{
		Region: "eu-central-1", BaseEndpoint: &server.URL, UsePathStyle: true, HTTPClient: client,
		Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
	}), client
}

func newS3(t *testing.T, clock *testClock) (*segment.S3, *s3.Client, *http.Client) {
	t.Helper()
	client, plain := bucket(t, clock)
	s, err := segment.NewS3(segment.S3Config{
		Client: client, Bucket: "segments", Prefix: "pre/fix/", Secret: []byte(strings.Repeat("s", 32)), TTL: ttl, Clock: clock.Now,
	})
	require.NoError(t, err)
	return s, client, plain
}

func s3Store(t *testing.T, clock *testClock) segment.Store {
	t.Helper()
	s, _, _ := newS3(t, clock)
	return s
}

// TestS3Keys: they embed the segment's id, and tell nothing of partition and epoch.
func TestS3Keys(t *testing.T) {
	t.Parallel()
	s, client, _ := newS3(t, newClock())
	m := describe("body", "digest")
	m.Partition, m.LogEpoch = "partition-id", "epoch-id"
	put(t, s, m, "body")
	list, err := client.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String("segments")})
	require.NoError(t, err)
	require.Len(t, list.Contents, 2)
	embedded := 0
	for _, o := range list.Contents {
		require.True(t, strings.HasPrefix(*o.Key, "pre/fix/"), *o.Key)
		require.NotContains(t, *o.Key, "partition-id")
		require.NotContains(t, *o.Key, "epoch-id")
		if strings.Contains(*o.Key, strings.TrimPrefix(m.ID, "sha256:")) {
			embedded++
			got, err := client.GetObject(t.Context(), &s3.GetObjectInput{Bucket: aws.String("segments"), Key: o.Key})
			require.NoError(t, err)
			stored, err := io.ReadAll(got.Body)
			require.NoError(t, err)
			require.Equal(t, "body", string(stored), "stored as it is addressed (§5.8)")
			for _, v := range got.Metadata {
				require.NotContains(t, v, "partition-id")
			}
		}
	}
	require.Equal(t, 1, embedded)
}

// TestS3Requests: finding costs a listing, however many segments there are to a thousand;
// those that are described by rows of very long ids are fetched.
func TestS3Requests(t *testing.T) {
	t.Parallel()
	s, _, client := newS3(t, newClock())
	counted := &requests{RoundTripper: client.Transport, sent: map[string]int{}}
	client.Transport = counted
	page := func(pin int64, index int32, from, next *string) segment.Meta {
		m := describe("body", "d")
		m.AsOfCommitSeq, m.Page, m.RowCursor, m.NextRowCursor = pin, index, from, next
		put(t, s, m, "body")
		return m
	}
	page(1, 0, nil, new("4:someone"))
	require.Equal(t, map[string]int{"HEAD": 1, "PUT": 2}, counted.taken())
	for i := range int32(30) {
		page(1, i+1, new(fmt.Sprint("4:some", i)), new(fmt.Sprint("4:some", i+1)))
	}
	m := page(2, 0, nil, nil)
	counted.taken()
	require.Len(t, find(t, s, m.Key), 32)
	require.Equal(t, map[string]int{"LIST": 1}, counted.taken())

	long := page(2, 1, new("2:id"+strings.Repeat("x", 700)), nil)
	counted.taken()
	found := find(t, s, m.Key)
	require.Len(t, found, 33)
	require.Equal(t, map[string]int{"LIST": 1, "GET": 1}, counted.taken())
	require.Equal(t, long.RowCursor, found[1].RowCursor)
	require.Equal(t, int32(1), found[1].Page)
}

// TestS3KeysAreNotTaken: what lies in the bucket under a key that says something else, or
// was made for another place, is not found.
func TestS3KeysAreNotTaken(t *testing.T) {
	t.Parallel()
	s, client, _ := newS3(t, newClock())
	m := describe("body", "d")
	put(t, s, m, "body")
	other := m
	other.ScopeDigest = "d2"
	put(t, s, other, "body")
	keys := func() (all []string) {
		list, err := client.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String("segments")})
		require.NoError(t, err)
		for _, o := range list.Contents {
			if strings.HasSuffix(*o.Key, ".json") {
				all = append(all, *o.Key)
			}
		}
		return all
	}
	described := keys()
	require.Len(t, described, 2)
	require.NotContains(t, described[0], strings.TrimPrefix(m.ID, "sha256:"), "keys of descriptions tell nothing")
	cut := func(key string) (family, rest string) {
		at := strings.LastIndex(key, "/") + 1
		return key[:at], key[at:]
	}
	family, rest := cut(described[0])
	otherFamily, others := cut(described[1])
	got, err := client.GetObject(t.Context(), &s3.GetObjectInput{Bucket: aws.String("segments"), Key: &described[0]})
	require.NoError(t, err)
	described0, err := io.ReadAll(got.Body)
	require.NoError(t, err)
	text := string(described0)
	require.Contains(t, text, m.ID)
	pin, said := rest[:17], rest[17:]
	for _, key := range []string{
		otherFamily + "x.json",               // what is read tells that it is of another
		family + others,                      // of another family
		family + pin + "00000005" + said[8:], // as another page
		family + "7ffffffffffffff0-" + said,  // of another pin
		family + rest[:len(rest)-9] + "A.json",
		family + pin + "00000000-d.json",
		family + "x.json",
		family + "x",
	} {
		for _, content := range []string{"{}", text, strings.Replace(text, "sha256:", "sha1:", 1), "nonsense"} {
			if content == text && strings.HasPrefix(key, family) {
				continue // a copy of the description, in its place
			}
			_, err := client.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String("segments"), Key: aws.String(key), Body: strings.NewReader(content)})
			require.NoError(t, err)
			for _, m := range []segment.Meta{m, other} {
				found := find(t, s, m.Key)
				require.Len(t, found, 1, key)
				require.Equal(t, m.ScopeDigest, found[0].ScopeDigest)
			}
		}
		_, err := client.DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: aws.String("segments"), Key: aws.String(key)})
		require.NoError(t, err)
	}
}

// TestS3OtherTTL: instances of another configuration leave what lives longer alone, and find
// it as long as it lives.
func TestS3OtherTTL(t *testing.T) {
	t.Parallel()
	clock := newClock()
	short, client, _ := newS3(t, clock)
	long, err := segment.NewS3(segment.S3Config{
		Client: client, Bucket: "segments", Prefix: "pre/fix/", Secret: []byte(strings.Repeat("s", 32)), TTL: 3 * ttl, Clock: clock.Now,
	})
	require.NoError(t, err)
	m := describe("body", "d")
	put(t, long, m, "body")
	m.ExpiresAt = clock.Now().Add(3 * ttl).UnixMilli()
	clock.advance(ttl / 2)
	put(t, short, describe("other", "d"), "other")
	for range 2 {
		require.Contains(t, find(t, short, m.Key), m)
		clock.advance(ttl)
		deleteAll(t, short, 10)
		opens(t, short, m, "body")
	}
	require.Equal(t, []segment.Meta{m}, find(t, short, m.Key))

	// Of the two ends that a segment was given, the later one counts where it is found.
	put(t, short, m, "body")
	m.ExpiresAt = clock.Now().Add(ttl).UnixMilli()
	require.Equal(t, []segment.Meta{m}, find(t, short, m.Key))
	put(t, long, m, "body")
	m.ExpiresAt = clock.Now().Add(3 * ttl).UnixMilli()
	put(t, short, m, "body")
	require.Equal(t, []segment.Meta{m}, find(t, short, m.Key))
}

// TestS3OtherLength: an object that has not the length of its segment is not opened.
func TestS3OtherLength(t *testing.T) {
	t.Parallel()
	s, client, _ := newS3(t, newClock())
	m := describe("body", "d")
	put(t, s, m, "body")
	list, err := client.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String("segments")})
	require.NoError(t, err)
	for _, o := range list.Contents {
		if !strings.HasSuffix(*o.Key, ".seg") {
			continue
		}
		head, err := client.HeadObject(t.Context(), &s3.HeadObjectInput{Bucket: aws.String("segments"), Key: o.Key})
		require.NoError(t, err)
		for _, body := range []string{"bod", "body and more"} {
			_, err = client.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String("segments"), Key: o.Key, Body: strings.NewReader(body), Metadata: head.Metadata})
			require.NoError(t, err)
			_, _, err = s.Open(t.Context(), ref(m))
			require.ErrorContains(t, err, "instead of 4")
		}
	}
}

// TestS3URL: a presigned URL gives the bytes to whoever has it, is bound to the one object,
// and lives as long as it says.
func TestS3URL(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s, _, client := newS3(t, clock)
	m := describe("body", "d")
	put(t, s, m, "body")
	signed, expires, err := s.SignURL(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, clock.Now().Add(15*time.Minute).UnixMilli(), expires)
	u, err := url.Parse(signed)
	require.NoError(t, err)
	require.Contains(t, u.Path, strings.TrimPrefix(m.ID, "sha256:"))
	require.Equal(t, "900", u.Query().Get("X-Amz-Expires"))
	require.NotEmpty(t, u.Query().Get("X-Amz-Signature"))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, signed, nil)
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, "body", string(body))
}

func TestS3Config(t *testing.T) {
	t.Parallel()
	client, _ := bucket(t, newClock())
	secret := []byte(strings.Repeat("s", 32))
	for name, cfg := range map[string]segment.S3Config{
		"Client": {Bucket: "b", Secret: secret},
		"Bucket": {Client: client, Secret: secret},
		"Secret": {Client: client, Bucket: "b", Secret: secret[:31]},
		"TTL":    {Client: client, Bucket: "b", Secret: secret, TTL: -1},
		"URLTTL": {Client: client, Bucket: "b", Secret: secret, URLTTL: time.Hour},
	} {
		_, err := segment.NewS3(cfg)
		require.ErrorContains(t, err, "S3Config."+name)
	}
}
