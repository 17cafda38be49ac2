package config

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// envPrefix begins the name of every variable of ours.
const envPrefix = "SYNCPG_"

// fileFlag is the flag that names the YAML file.
const fileFlag = "config"

// settingTag marks a flag that environment and file can set.
const settingTag = "setting"

// Settings resolves the flags of one run. It is not for concurrent use.
type Settings struct {
	env    map[string]string
	path   string // of the file, "" for none
	file   map[string]entry
	loaded bool
	origin map[string]origin // by flag name
}

// origin is where the value of a flag came from that is not on the command line.
type origin struct {
	file  bool   // the file, not the environment
	place string // the variable, or file and line
}

// New returns the settings of a process with this environment ("NAME=value" entries, as of os.Environ).
func New(environ []string) *Settings {
	s := &Settings{env: make(map[string]string, len(environ)), origin: map[string]origin{}}
	for _, kv := range environ {
		if name, value, ok := strings.Cut(kv, "="); ok && value != "" {
			s.env[name] = value
		}
	}
	return s
}

// Options returns what makes kong use the settings.
func (s *Settings) Options() kong.Option {
	return kong.OptionFunc(func(k *kong.Kong) error {
		return errors.Join(
			kong.Resolvers(s).Apply(k),
			// Before a flag is resolved, so that what is wrong with the file does not read as wrong with a flag.
			kong.WithBeforeResolve(s.load).Apply(k),
		)
	})
}

// Validate implements kong.Resolver. Keys and variables have been checked when the sources were read.
func (s *Settings) Validate(*kong.Application) error { return nil }

// Resolve implements kong.Resolver: the value of a flag that is not on the command line.
func (s *Settings) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	for _, name := range Variables(flag.Value) {
		if value, ok := s.env[name]; ok {
			s.origin[flag.Name] = origin{place: name}
			return value, nil
		}
	}
	if !isSetting(flag.Value) {
		return nil, nil
	}
	if e, ok := s.file[flag.Name]; ok {
		s.origin[flag.Name] = origin{file: true, place: fmt.Sprintf("%s:%d", s.path, e.line)}
		return e.value, nil
	}
	return nil, nil
}

var flagInMessage = regexp.MustCompile(`--([a-z][a-z0-9-]*)`)

// Explain adds to an error about a flag where the flag's value came from, when that was not the command line.
func (s *Settings) Explain(err error) error {
	m := flagInMessage.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	o, ok := s.origin[m[1]]
	if !ok {
		return err
	}
	return fmt.Errorf("%w (value from %s)", err, o.place)
}

// Variables returns the names of the environment variables that set a flag, in the order they are asked. It is empty for
// a flag of the command line only.
func Variables(flag *kong.Value) []string {
	if flag.Name != fileFlag && !isSetting(flag) {
		return nil
	}
	names := []string{variable(flag.Name)}
	if more := flag.Tag.Get(settingTag); more != "" {
		names = append(names, strings.Split(more, ",")...)
	}
	return names
}

func isSetting(flag *kong.Value) bool { return flag.Tag.Has(settingTag) }

func variable(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// load checks the environment and reads the file. Kong calls it once for every element of the command line.
func (s *Settings) load(ctx *kong.Context) error {
	if s.loaded {
		return nil
	}
	s.loaded = true
	flags := allFlags(ctx.Model.Node)
	if err := s.checkEnv(flags); err != nil {
		return err
	}
	s.path = s.env[variable(fileFlag)]
	for _, p := range ctx.Path {
		if p.Flag != nil && p.Flag.Name == fileFlag {
			s.path = fmt.Sprint(ctx.FlagValue(p.Flag))
		}
	}
	if s.path == "" {
		return nil
	}
	text, err := os.ReadFile(s.path)
	if err != nil {
		return fmt.Errorf("read the configuration file: %w", err)
	}
	var known []string
	for _, f := range flags {
		if isSetting(f.Value) {
			known = append(known, f.Name)
		}
	}
	s.file, err = parseFile(s.path, text, known)
	return err
}

func allFlags(node *kong.Node) []*kong.Flag {
	flags := slices.Clone(node.Flags)
	for _, child := range node.Children {
		flags = append(flags, allFlags(child)...)
	}
	return flags
}

// otherVariables are read by parts of the project that are not flags of the command.
var otherVariables = []*regexp.Regexp{
	regexp.MustCompile(`^SYNCPG_PG_BIN$`),
	regexp.MustCompile(`^SYNCPG_TEST_`),
}

// serviceLink matches what Kubernetes puts into every container for a service that is named syncpg….
var serviceLink = regexp.MustCompile(`^SYNCPG(_.+)?_(SERVICE_(HOST|PORT)(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)

func (s *Settings) checkEnv(flags []*kong.Flag) error {
	known := map[string]bool{}
	var names []string
	for _, f := range flags {
		for _, name := range Variables(f.Value) {
			if !known[name] {
				known[name] = true
				names = append(names, name)
			}
		}
	}
	var problems []error
	for name, value := range s.env {
		if !strings.HasPrefix(name, envPrefix) || known[name] || serviceLink.MatchString(name) ||
			(strings.HasSuffix(name, "_PORT") && strings.Contains(value, "://")) ||
			slices.ContainsFunc(otherVariables, func(re *regexp.Regexp) bool { return re.MatchString(name) }) {
			continue
		}
		problems = append(problems, fmt.Errorf("unknown environment variable %s%s", name, didYouMean(name, names)))
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}
