// Command conformance serves the conformance control API, and runs the scenario
// catalogue of the protocol's own repository against it.
//
//	go run ./integration/conformance                 # serve until Ctrl-C
//	go run ./integration/conformance --runs 3        # run the catalogue, write RESULTS.md
//
// The catalogue and its driver are TypeScript and live outside this repository:
// SYNCPG_CATALOG is the module that exports the catalogue, SYNCPG_CONFORMANCE_DRIVER
// the directory with runner.test.ts, SYNCPG_BUN the bun executable. A run fails when
// a scenario that RESULTS.md lists as passed does not pass any more.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/syncpg/syncpg/integration/conformance/host"
	"github.com/syncpg/syncpg/integration/conformance/suite"
	"github.com/syncpg/syncpg/internal/devpg"
)

type options struct {
	Listen      string `default:"127.0.0.1:0"                                          help:"Address to serve on."`
	DatabaseURL string `env:"SYNCPG_CONFORMANCE_DATABASE_URL" name:"database-url"      help:"A Postgres server whose role may create databases. Without it, one is started."`
	Runs        int    `help:"Run the catalogue this many times and write the results. 0 only serves."`
	Only        string `env:"SYNCPG_ONLY"                                              help:"Only scenarios whose name contains this."`
	Results     string `default:"integration/conformance/RESULTS.md"                   help:"File the results are written to. Left alone when --only is set."`
	Bun         string `default:"bun"                         env:"SYNCPG_BUN"         help:"The bun executable."`
	Driver      string `env:"SYNCPG_CONFORMANCE_DRIVER"                                help:"Directory with runner.test.ts."`
	Catalog     string `env:"SYNCPG_CATALOG"                                           help:"Module that exports the catalogue."`
	Verbose     bool   `help:"Log what the servers under test say at level debug."`
}

func main() {
	var opts options
	kong.Parse(&opts, kong.Description("The conformance host and the scenario runner."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, opts)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, opts options) (err error) {
	if opts.Runs > 0 && (opts.Driver == "" || opts.Catalog == "") {
		return errors.New("set SYNCPG_CONFORMANCE_DRIVER to the directory with runner.test.ts and SYNCPG_CATALOG to the module that exports " +
			"the catalogue, both TypeScript from outside this repository, or serve only (--runs 0)")
	}
	level := slog.LevelWarn
	if opts.Verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	databaseURL := opts.DatabaseURL
	if databaseURL == "" {
		server, stop, err := startPostgres(ctx, log)
		if err != nil {
			return err
		}
		defer stop()
		databaseURL = server
	}
	h, err := host.New(ctx, host.Config{DatabaseURL: databaseURL, Logger: log})
	if err != nil {
		return fmt.Errorf("prepare the host: %w", err)
	}
	defer func() { err = errors.Join(err, h.Close(context.WithoutCancel(ctx))) }()

	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", opts.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: h.Handler(), ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	defer func() {
		err = errors.Join(err, server.Close())
		if serveErr := <-served; !errors.Is(serveErr, http.ErrServerClosed) {
			err = errors.Join(err, fmt.Errorf("serve: %w", serveErr))
		}
	}()

	url := "http://" + listener.Addr().String()
	fmt.Println(url)
	if opts.Runs == 0 {
		<-ctx.Done()
		return nil
	}
	return runCatalogue(ctx, opts, url)
}

// startPostgres starts a server that is thrown away afterwards.
func startPostgres(ctx context.Context, log *slog.Logger) (dsn string, stop func(), err error) {
	random := make([]byte, 8)
	if _, err := rand.Read(random); err != nil {
		return "", nil, fmt.Errorf("choose a data directory: %w", err)
	}
	// devpg makes the directory itself, for the account that the server gets.
	dir := filepath.Join(os.TempDir(), "syncpg-conformance-"+hex.EncodeToString(random))
	server, err := devpg.Start(ctx, devpg.Options{DataDir: dir, Logger: log})
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("start a Postgres server: %w", err), os.RemoveAll(dir))
	}
	return server.DSN("postgres"), func() {
		stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if err := errors.Join(server.Stop(stopCtx), os.RemoveAll(dir)); err != nil {
			log.Error("stop the Postgres server", "error", err)
		}
	}, nil
}

func runCatalogue(ctx context.Context, opts options, url string) error {
	var runs [][]suite.Result
	for n := range opts.Runs {
		results, err := suite.Run(ctx, suite.Options{
			Host: url, Bun: opts.Bun, Driver: opts.Driver, Catalog: opts.Catalog, Only: opts.Only,
			Output: os.Stderr,
		})
		if err != nil {
			return fmt.Errorf("run %d of %d: %w", n+1, opts.Runs, err)
		}
		runs = append(runs, results)
	}
	summary := suite.Summarize(runs)
	fmt.Printf("%d scenarios, %d runs: %d pass in every run, %d fail, %d skipped\n", len(summary.Scenarios),
		summary.Runs, summary.Count(suite.Passed), summary.Count(suite.Failed), summary.Count(suite.Skipped))
	before, err := os.ReadFile(opts.Results)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the earlier results: %w", err)
	}
	if opts.Only == "" {
		if err := writeResults(opts.Results, summary); err != nil {
			return err
		}
	}
	if lost := summary.Regressions(string(before)); len(lost) > 0 {
		return fmt.Errorf("passed before and no longer: %s", strings.Join(lost, ", "))
	}
	return nil
}

func writeResults(path string, summary suite.Summary) error {
	var page bytes.Buffer
	if err := summary.WriteMarkdown(&page, host.Capabilities()); err != nil {
		return err
	}
	if err := os.WriteFile(path, page.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	return nil
}
