// Command syncpg runs and looks after a sync server inside PostgreSQL. `syncpg --help` lists what it does.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/syncpg/syncpg/internal/config"
)

// Exit codes of the command.
const (
	exitOK     = 0
	exitFailed = 1 // what was asked for did not work, or a smoke step failed
	exitUsage  = 2 // the command line, the environment or the configuration file is wrong
	exitState  = 3 // the database is not in the state that was asked about or is needed
)

const description = `A sync server inside PostgreSQL, for clients that speak SSP2.

Settings come from flags, else from the environment, else from one YAML file (--config), else from defaults. The help ` +
	`of a flag names its variable; its key in the file is the name of the flag without dashes in front. Unknown keys and ` +
	`unknown SYNCPG_ variables are errors.

Exit codes: 0 done; 1 failed; 2 wrong usage or settings; 3 the database is not in the state that was asked about or is ` +
	`needed.`

// cli is the command line.
type cli struct {
	Config   string `name:"config" placeholder:"FILE" help:"YAML file with settings."`
	LogLevel string `name:"log-level" enum:"debug,info,warn,error" default:"info" setting:"" help:"What to log to stderr: debug, info, warn or error."`

	Dev     devCmd     `cmd:"" help:"Run a server with a database of its own, for development."`
	Serve   serveCmd   `cmd:"" help:"Run a server on a database that is there."`
	Migrate migrateCmd `cmd:"" help:"Bring the schema \"syncpg\" of a database to a version."`
	Schema  schemaCmd  `cmd:"" help:"Check or install the app's schema."`
	Seed    seedCmd    `cmd:"" help:"Write the commits of a file to a database, each at most once."`
	Prune   pruneCmd   `cmd:"" help:"Delete what no client needs of the log."`
	Epoch   epochCmd   `cmd:"" help:"Say that the log is another one."`
	Lease   leaseCmd   `cmd:"" help:"Show auth leases, and take them away."`
	Smoke   smokeCmd   `cmd:"" help:"Check a running server from outside."`
	Render  renderCmd  `cmd:"" help:"Show an SSP2 message or a rows segment as JSON."`
	Version versionCmd `cmd:"" help:"Show the version of this program."`
}

// program is what a command has to work with.
type program struct {
	stdin    io.Reader
	stdout   io.Writer
	stderr   io.Writer
	settings *config.Settings
	log      *slog.Logger
}

// printf writes to stdout. A reader that has gone away is not our concern.
func (p *program) printf(format string, args ...any) { _, _ = fmt.Fprintf(p.stdout, format, args...) }

// stateError is an error that ends the command with exitState.
type stateError struct{ error }

func (e stateError) Unwrap() error { return e.error }

// usageError is an error that ends the command with exitUsage.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// described is an error with a text of its own.
type described struct {
	text string
	err  error
}

func (e *described) Error() string { return e.text }
func (e *described) Unwrap() error { return e.err }

// errReported ends the command with exitFailed when everything has been said.
var errReported = errors.New("failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The second signal ends the process the hard way.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// exited carries an exit code out of kong, which ends the process after --help.
type exited struct{ code int }

// run is the command without the process around it.
func run(ctx context.Context, args, environ []string, stdin io.Reader, stdout, stderr io.Writer) (code int) {
	p := &program{stdin: stdin, stdout: stdout, stderr: stderr, settings: config.New(environ)}
	defer func() {
		switch v := recover().(type) {
		case nil:
		case exited:
			code = v.code
		default:
			panic(v)
		}
	}()
	var c cli
	parser, err := newParser(&c, p)
	if err != nil {
		panic(err) // The struct tags of cli are wrong.
	}
	if slices.Equal(args, []string{"--version"}) {
		args = []string{"version"} // what most programs understand
	}
	selected, err := parser.Parse(args)
	if err != nil {
		return p.usage(args, parser, p.settings.Explain(err))
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		panic(err) // The enum allows only levels.
	}
	p.log = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	selected.BindTo(ctx, (*context.Context)(nil))
	return p.report(ctx, selected, selected.Run(p))
}

func newParser(c *cli, p *program) (*kong.Kong, error) {
	parser, err := kong.New(
		c,
		kong.Name("syncpg"),
		kong.Description(description),
		kong.Writers(p.stdout, p.stderr),
		kong.Exit(func(code int) { panic(exited{code}) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 110, FlagsLast: true}),
		kong.ValueFormatter(flagHelp),
		kong.ExplicitGroups([]kong.Group{
			{Key: "auth", Title: "Authentication:"},
			{Key: "realtime", Title: "Realtime:"},
			{Key: "segments", Title: "Segments:"},
			{Key: "retention", Title: "Retention:"},
		}),
		p.settings.Options(),
	)
	if err != nil {
		return nil, fmt.Errorf("describe the command line: %w", err)
	}
	return parser, nil
}

// flagHelp adds the variables that set a flag to its help.
func flagHelp(v *kong.Value) string {
	names := config.Variables(v)
	if len(names) == 0 {
		return v.Help
	}
	return fmt.Sprintf("%s ($%s)", v.Help, strings.Join(names, ", $"))
}

// valueMissing is how the parser says that a flag ends the command line.
var valueMissing = regexp.MustCompile(`^(--\S+): expected .* but got "EOL" \(<EOL>\)$`)

// usage reports an error about the command line or the settings.
func (p *program) usage(args []string, parser *kong.Kong, err error) int {
	// Of what was typed only the names of commands are worth repeating.
	command := parser.Model.Node
	for _, arg := range args {
		child := childNamed(command, arg)
		if child == nil {
			break
		}
		command = child
	}
	text := valueMissing.ReplaceAllString(err.Error(), "$1 needs a value")
	_, _ = fmt.Fprintf(p.stderr, "syncpg: %s\nRun \"%s --help\" for how to use it.\n", text, command.FullPath())
	return exitUsage
}

func childNamed(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name {
			return child
		}
	}
	return nil
}

// report turns the end of a command into an exit code, and says what is to be said.
func (p *program) report(ctx context.Context, selected *kong.Context, err error) int {
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported):
		return exitFailed
	case errors.As(err, &usage):
		return p.usage(strings.Fields(selected.Command()), selected.Kong, err)
	}
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		err = errors.New("interrupted")
	}
	_, _ = fmt.Fprintf(p.stderr, "syncpg: %v\n", explain(err))
	if errors.As(err, new(stateError)) {
		return exitState
	}
	return exitFailed
}

// self is how the user can start this program again.
func self() string {
	path, err := os.Executable()
	if err != nil {
		return "syncpg"
	}
	// `go run` and `go test` build into a directory that is gone afterwards.
	if strings.Contains(path, string(filepath.Separator)+"go-build") {
		return "go run ./cmd/syncpg"
	}
	return os.Args[0]
}
