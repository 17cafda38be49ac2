// Package suite runs the scenario catalogue of the protocol's own repository
// against a conformance host and writes down which scenarios pass.
//
// The catalogue is a TypeScript module that lives outside this repository; the
// driver that connects it to a host is a directory of TypeScript files. Both
// are run by bun.
package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Options says where the parts of a run are.
type Options struct {
	Host    string    // base URL of the conformance host
	Bun     string    // the bun executable
	Driver  string    // directory with runner.test.ts
	Catalog string    // module that exports the catalogue and its client driver
	Only    string    // run only scenarios whose name contains this; "" runs all
	Output  io.Writer // what the runner prints; nil discards it
}

// Status is the outcome of one scenario in one run.
type Status string

// The outcomes of a scenario.
const (
	Passed  Status = "pass"
	Failed  Status = "fail"
	Skipped Status = "skipped"
)

// Result is one scenario in one run.
type Result struct {
	Scenario string // "group/what-it-shows"
	Refs     string // the sections of the protocol text it rests on
	Status   Status
	Note     string // why it failed, or which capabilities it lacks
}

// ErrNoResults is returned when the runner ended without reporting a scenario.
var ErrNoResults = errors.New("the scenario runner reported nothing")

// Run runs the catalogue once. Failing scenarios are results, not an error; an
// error means that the runner itself did not work.
func Run(ctx context.Context, opts Options) ([]Result, error) {
	catalog, err := filepath.Abs(opts.Catalog)
	if err != nil {
		return nil, fmt.Errorf("find the catalogue: %w", err)
	}
	dir, err := os.MkdirTemp("", "syncpg-conformance-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the report: %w", err)
	}
	defer os.RemoveAll(dir)
	report := filepath.Join(dir, "junit.xml")

	cmd := exec.CommandContext(ctx, opts.Bun, "test", "./runner.test.ts",
		"--reporter=junit", "--reporter-outfile="+report)
	cmd.Dir = opts.Driver
	cmd.Env = append(os.Environ(),
		"SYNCPG_CONFORMANCE_HOST="+opts.Host,
		"SYNCPG_CATALOG="+catalog,
		"SYNCPG_ONLY="+opts.Only,
	)
	var tail bytes.Buffer
	output := opts.Output
	if output == nil {
		output = &tail
	}
	cmd.Stdout, cmd.Stderr = output, output
	runErr := cmd.Run()
	var exit *exec.ExitError
	if runErr != nil && !errors.As(runErr, &exit) {
		return nil, fmt.Errorf("start the scenario runner: %w", runErr)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("run the scenarios: %w", ctx.Err())
	}
	file, err := os.Open(report)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrNoResults, strings.TrimSpace(tail.String()))
	}
	defer file.Close()
	return ParseJUnit(file)
}
