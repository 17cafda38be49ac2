package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsconfig "github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/pullsvc/segment"
)

// segmentFlags say where bootstrap segments are kept and how clients get them.
type segmentFlags struct {
	Segments              string        `name:"segments" enum:"postgres,memory,s3" default:"postgres" setting:"" group:"segments" help:"Where segments are kept: postgres (all servers of the database share them), memory (of this process, if it is the only one) or s3."`
	SegmentTTL            time.Duration `name:"segment-ttl" default:"24h" setting:"" group:"segments" help:"How long a segment is kept after it was last stored."`
	SegmentURLBase        string        `name:"segment-url-base" placeholder:"URL" setting:"" group:"segments" help:"URL under which clients, or a CDN, reach this server. With it and --segment-url-key clients that can do so fetch segments by signed URL, without authentication."`
	SegmentURLKey         string        `name:"segment-url-key" placeholder:"BASE64" setting:"" group:"segments" help:"Key that signs URLs: 32 random bytes or more in base64, the same for all servers. Better in the environment or the file than here."`
	SegmentURLPreviousKey string        `name:"segment-url-previous-key" placeholder:"BASE64" setting:"" group:"segments" help:"Key that signed until lately, still taken. Give the old one here for 15 minutes when it is replaced."`
	SegmentS3Bucket       string        `name:"segment-s3-bucket" placeholder:"NAME" setting:"" group:"segments" help:"Bucket of --segments=s3. Credentials are found as the AWS tools find them."`
	SegmentS3Prefix       string        `name:"segment-s3-prefix" placeholder:"PREFIX" setting:"" group:"segments" help:"What the keys of objects begin with."`
	SegmentS3Region       string        `name:"segment-s3-region" placeholder:"NAME" setting:"" group:"segments" help:"Region of the bucket, if the AWS configuration does not say."`
	SegmentS3Endpoint     string        `name:"segment-s3-endpoint" placeholder:"URL" setting:"" group:"segments" help:"Endpoint of another S3 service than that of AWS."`
	SegmentS3PathStyle    bool          `name:"segment-s3-path-style" setting:"" group:"segments" help:"Name the bucket in the path, as most other services want it."`
	SegmentS3Secret       string        `name:"segment-s3-secret" placeholder:"BASE64" setting:"" group:"segments" help:"Names partitions in keys of objects: 32 random bytes or more in base64, the same for all servers."`
	SegmentS3Presign      bool          `name:"segment-s3-presign" setting:"" group:"segments" help:"Let clients that can do so fetch segments from the bucket, by presigned URL."`
	ImageDir              string        `name:"image-dir" placeholder:"DIR" setting:"" group:"segments" help:"Directory in which SQLite images of tables are built, for clients that take them, with up to 2 GiB each. Default: the one for temporary files."`
	MaxBuilds             int           `name:"max-builds" placeholder:"N" setting:"" group:"segments" help:"How many images may be built at a time, each with a connection of the pool; further clients get rows instead. Also how many builds go on when their clients have left. Default: 4."`
}

// configure puts store and signer into a configuration.
func (f *segmentFlags) configure(ctx context.Context, cfg *syncpg.Config) error {
	if f.SegmentTTL <= 0 {
		return usagef("--segment-ttl must be positive")
	}
	cfg.SegmentTTL = f.SegmentTTL
	if f.MaxBuilds < 0 {
		return usagef("--max-builds is %d; it must be positive", f.MaxBuilds)
	}
	if f.ImageDir != "" {
		// Otherwise the first client that takes an image would find out, and get rows for ever.
		if info, err := os.Stat(f.ImageDir); err != nil {
			return usagef("--image-dir: %w", err)
		} else if !info.IsDir() {
			return usagef("--image-dir: %s is no directory", f.ImageDir)
		}
	}
	cfg.ImageDir, cfg.MaxBuilds = f.ImageDir, f.MaxBuilds
	if err := f.store(ctx, cfg); err != nil {
		return err
	}
	return f.signer(cfg)
}

func (f *segmentFlags) store(ctx context.Context, cfg *syncpg.Config) error {
	if f.Segments != "s3" && (f.SegmentS3Bucket != "" || f.SegmentS3Presign) {
		return usagef("--segment-s3-bucket and --segment-s3-presign go with --segments=s3")
	}
	switch f.Segments {
	case "memory":
		store, err := segment.NewMemory(segment.MemoryConfig{TTL: f.SegmentTTL})
		if err != nil {
			return err
		}
		cfg.Segments = store
	case "s3":
		store, err := f.s3(ctx)
		if err != nil {
			return err
		}
		cfg.Segments = store
		if f.SegmentS3Presign {
			cfg.SegmentURLs = store
		}
	}
	return nil
}

func (f *segmentFlags) s3(ctx context.Context) (*segment.S3, error) {
	if f.SegmentS3Bucket == "" || f.SegmentS3Secret == "" {
		return nil, usagef("--segments=s3 needs --segment-s3-bucket and --segment-s3-secret")
	}
	secret, err := decodeKey("--segment-s3-secret", f.SegmentS3Secret)
	if err != nil {
		return nil, err
	}
	var options []func(*awsconfig.LoadOptions) error
	if f.SegmentS3Region != "" {
		options = append(options, awsconfig.WithRegion(f.SegmentS3Region))
	}
	account, err := awsconfig.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("read the AWS configuration: %w", err)
	}
	store, err := segment.NewS3(segment.S3Config{
		Client: s3.NewFromConfig(account, func(o *s3.Options) {
			o.UsePathStyle = f.SegmentS3PathStyle
			if f.SegmentS3Endpoint != "" {
				o.BaseEndpoint = aws.String(f.SegmentS3Endpoint)
			}
		}),
		Bucket: f.SegmentS3Bucket, Prefix: f.SegmentS3Prefix, Secret: secret, TTL: f.SegmentTTL,
	})
	if err != nil {
		return nil, usagef("%w", err)
	}
	return store, nil
}

func (f *segmentFlags) signer(cfg *syncpg.Config) error {
	if f.SegmentURLBase == "" && f.SegmentURLKey == "" && f.SegmentURLPreviousKey == "" {
		return nil
	}
	switch {
	case f.SegmentURLBase == "" || f.SegmentURLKey == "":
		return usagef("--segment-url-base and --segment-url-key are needed both")
	case cfg.SegmentURLs != nil:
		return usagef("--segment-url-base and --segment-s3-presign exclude each other")
	}
	key, err := decodeKey("--segment-url-key", f.SegmentURLKey)
	if err != nil {
		return err
	}
	previous, err := decodeKey("--segment-url-previous-key", f.SegmentURLPreviousKey)
	if err != nil {
		return err
	}
	signer, err := segment.NewSigner(segment.SignerConfig{BaseURL: f.SegmentURLBase, Key: key, PreviousKey: previous})
	if err != nil {
		return usagef("--segment-url-base is %q; it must be an http or https URL without user, query and fragment, such as https://sync.example.com", f.SegmentURLBase)
	}
	cfg.SegmentURLs = signer
	return nil
}

// decodeKey reads the key of a flag, nil for none.
func decodeKey(flag, text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	key, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, usagef("%s is no base64", flag) // its text stays out of logs
	}
	if len(key) < segment.MinKeyBytes {
		return nil, usagef("%s has %d bytes; it must have %d at least", flag, len(key), segment.MinKeyBytes)
	}
	return key, nil
}
