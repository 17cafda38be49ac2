package main

import (
	"bytes"
	"encoding/base64"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/pullsvc/segment"
)

// TestSegmentFlags: what flags make, and which do not go together.
func TestSegmentFlags(t *testing.T) {
	t.Parallel()
	key := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("k"), 32))
	short := base64.StdEncoding.EncodeToString([]byte("short"))
	for _, tc := range []struct {
		name  string
		flags segmentFlags
		store any
		urls  any
		err   string
	}{
		{name: "nothing", flags: segmentFlags{Segments: "postgres"}},
		{name: "memory", flags: segmentFlags{Segments: "memory"}, store: &segment.Memory{}},
		{name: "s3", flags: segmentFlags{Segments: "s3", SegmentS3Bucket: "b", SegmentS3Secret: key, SegmentS3Region: "x"}, store: &segment.S3{}},
		{name: "s3 presigned", flags: segmentFlags{Segments: "s3", SegmentS3Bucket: "b", SegmentS3Secret: key, SegmentS3Region: "x", SegmentS3Presign: true}, store: &segment.S3{}, urls: &segment.S3{}},
		{name: "signed", flags: segmentFlags{Segments: "postgres", SegmentURLBase: "https://x/v1", SegmentURLKey: key, SegmentURLPreviousKey: key}, urls: &segment.Signer{}},
		{name: "bounds of builds", flags: segmentFlags{Segments: "postgres", ImageDir: ".", MaxBuilds: 7}},
		{name: "a negative bound", flags: segmentFlags{Segments: "postgres", MaxBuilds: -1}, err: "--max-builds is -1"},
		{name: "no directory", flags: segmentFlags{Segments: "postgres", ImageDir: "nowhere"}, err: "--image-dir: stat nowhere"},
		{name: "a file as directory", flags: segmentFlags{Segments: "postgres", ImageDir: "segments.go"}, err: "segments.go is no directory"},
		{name: "no key", flags: segmentFlags{Segments: "postgres", SegmentURLBase: "https://x/v1"}, err: "needed both"},
		{name: "no base", flags: segmentFlags{Segments: "postgres", SegmentURLKey: key}, err: "needed both"},
		{name: "a bad base", flags: segmentFlags{Segments: "postgres", SegmentURLBase: "x", SegmentURLKey: key}, err: `--segment-url-base is "x"; it must be an http or https URL`},
		{name: "a short key", flags: segmentFlags{Segments: "postgres", SegmentURLBase: "https://x", SegmentURLKey: short}, err: "--segment-url-key has 5 bytes"},
		{name: "a key that is none", flags: segmentFlags{Segments: "postgres", SegmentURLBase: "https://x", SegmentURLKey: "secret!"}, err: "--segment-url-key is no base64"},
		{name: "no bucket", flags: segmentFlags{Segments: "s3", SegmentS3Secret: key}, err: "needs --segment-s3-bucket"},
		{name: "a bucket for nothing", flags: segmentFlags{Segments: "postgres", SegmentS3Bucket: "b"}, err: "go with --segments=s3"},
		{name: "both kinds of URLs", flags: segmentFlags{Segments: "s3", SegmentS3Bucket: "b", SegmentS3Secret: key, SegmentS3Region: "x", SegmentS3Presign: true, SegmentURLBase: "https://x", SegmentURLKey: key}, err: "exclude each other"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.flags.SegmentTTL = time.Hour
			var cfg syncpg.Config
			err := tc.flags.configure(t.Context(), &cfg)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.NotContains(t, err.Error(), "secret!")
				return
			}
			require.NoError(t, err)
			require.IsType(t, tc.store, cfg.Segments)
			require.IsType(t, tc.urls, cfg.SegmentURLs)
			require.Equal(t, time.Hour, cfg.SegmentTTL)
			require.Equal(t, tc.flags.ImageDir, cfg.ImageDir)
			require.Equal(t, tc.flags.MaxBuilds, cfg.MaxBuilds)
		})
	}
}
