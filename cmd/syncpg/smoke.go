package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/syncpg/syncpg/internal/smoke"
	"github.com/syncpg/syncpg/ssp2"
)

type smokeCmd struct {
	URL     string            `name:"url" required:"" placeholder:"URL" setting:"" help:"Address that the server is mounted at, without /sync."`
	Token   string            `name:"token" placeholder:"TOKEN" setting:"" help:"Bearer token to send. Default: dev:alice:smoke-<random>, which servers with development auth accept."`
	Header  []string          `name:"header" sep:"none" placeholder:"NAME: VALUE" help:"Header to send with every request; may be repeated. With a header Authorization no token is sent by default."`
	Schema  string            `name:"schema" placeholder:"FILE" setting:"" help:"Schema IR that the server serves. Default: the compiled-in sample of syncpg dev."`
	Table   string            `name:"table" placeholder:"NAME" help:"Table to write to. Default: the one with most types of columns."`
	Scope   map[string]string `name:"scope" mapsep:"none" placeholder:"VARIABLE=VALUE" help:"Value of a scope variable that the actor is allowed; may be repeated. Default: a made-up one."`
	Timeout time.Duration     `name:"timeout" default:"60s" help:"How long the whole run may take."`
	JSON    bool              `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*smokeCmd) Help() string {
	return `Acts as two clients, in wire versions 2 and 3: acquires the log epoch, pushes inserts, updates, a conflict, a ` +
		`replay and deletes, bootstraps, follows the log by pulls and over a socket, and compares what both clients end up ` +
		`with, rows, values and versions, with what was written. Stops at the first step that fails, with exit code 1.

It writes to one table, and to the parents its rows need, under scope values of its own, and only rows that are not ` +
		`there yet. It deletes them at the end. What stays is in the history of the partition's log (with the default ` +
		`token a partition of its own), and, when a step fails, the rows written until then.`
}

// smokeReport is what --json prints.
type smokeReport struct {
	URL   string      `json:"url"`
	OK    bool        `json:"ok"`
	Steps []smokeStep `json:"steps"`
}

type smokeStep struct {
	Wire   int     `json:"wire,omitempty"` // wire version, left out before the passes
	Name   string  `json:"name"`
	OK     bool    `json:"ok"`
	Millis float64 `json:"ms"`
	Detail string  `json:"detail,omitempty"`
	Error  string  `json:"error,omitempty"`
	Look   string  `json:"look,omitempty"`
}

// Run checks a server.
func (c *smokeCmd) Run(ctx context.Context, p *program) error {
	o, err := c.options()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	o.HTTP = &http.Client{Transport: transport}

	report := smokeReport{URL: o.URL, Steps: []smokeStep{}}
	start := time.Now()
	err = smoke.Run(ctx, o, func(s smoke.Step) {
		report.Steps = append(report.Steps, jsonStep(s))
		if !c.JSON {
			p.printStep(s)
		}
	})
	var failure *smoke.StepError
	if err != nil && !errors.As(err, &failure) {
		return usageError{err}
	}
	report.OK = err == nil
	switch {
	case c.JSON:
		if err := p.printJSON(report); err != nil {
			return err
		}
	case report.OK:
		p.printf("\n%s passed in %s\n", plural(len(report.Steps), "step"), duration(time.Since(start)))
	default:
		p.printf("\nfailed: %v\n", failure.Step.Err)
		if failure.Step.Look != "" {
			p.printf("next:   %s\n", failure.Step.Look)
		}
	}
	if !report.OK {
		return errReported
	}
	return nil
}

func (c *smokeCmd) options() (smoke.Options, error) {
	u, err := url.Parse(c.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return smoke.Options{}, usagef("--url must be an address such as http://127.0.0.1:8787")
	}
	s, _, err := loadSchema(c.Schema)
	if err != nil {
		return smoke.Options{}, err
	}
	o := smoke.Options{URL: strings.TrimRight(c.URL, "/"), Schema: s, Table: c.Table, Scopes: c.Scope, Header: http.Header{}}
	for _, h := range c.Header {
		name, value, ok := strings.Cut(h, ":")
		if !ok || strings.TrimSpace(name) == "" {
			return smoke.Options{}, usagef("--header must have the form \"NAME: VALUE\"")
		}
		o.Header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	token := c.Token
	if token == "" && o.Header.Get("Authorization") == "" {
		token = devTokenPrefix + "alice:smoke-" + strings.ToLower(rand.Text()[:8])
	}
	if token != "" {
		o.Header.Set("Authorization", "Bearer "+token)
	}
	return o, nil
}

func jsonStep(s smoke.Step) smokeStep {
	out := smokeStep{
		Wire: int(s.Wire), Name: s.Name, OK: s.Err == nil, Millis: float64(s.Took.Microseconds()) / 1000,
		Detail: s.Detail, Look: s.Look,
	}
	if s.Err != nil {
		out.Error = s.Err.Error()
	}
	return out
}

// stepNameWidth is that of the longest name of a step.
const stepNameWidth = 62

// printStep prints a step as soon as it is done.
func (p *program) printStep(s smoke.Step) {
	mark, wire := "✓", "  "
	if s.Err != nil {
		mark = "✗"
	}
	if s.Wire != ssp2.WireVersion(0) {
		wire = fmt.Sprintf("v%d", s.Wire)
	}
	line := fmt.Sprintf("%s %s  %-*s %8s  %s", mark, wire, stepNameWidth, s.Name, duration(s.Took), s.Detail)
	p.printf("%s\n", strings.TrimRight(line, " "))
}
