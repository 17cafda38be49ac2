package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/syncpg/syncpg/ssp2"
)

type renderCmd struct {
	File    string `arg:"" placeholder:"FILE" help:"File with the message or segment; - is standard input."`
	Compact bool   `name:"compact" help:"Print the rendering as it is defined, in one line without spaces."`
}

// Help explains the command.
func (*renderCmd) Help() string {
	return "Prints the debug rendering of the protocol (§11): for people, never for programs. The input is the body of a " +
		"request or response, or a rows segment, uncompressed."
}

// Run renders one file.
func (c *renderCmd) Run(p *program) error {
	var in []byte
	var err error
	if c.File == "-" {
		in, err = io.ReadAll(p.stdin)
	} else {
		in, err = os.ReadFile(c.File)
	}
	if err != nil {
		return fmt.Errorf("read the input: %w", err)
	}
	out, err := ssp2.Render(in)
	if err != nil {
		return fmt.Errorf("%w%s", err, renderHint(in))
	}
	if !c.Compact {
		var pretty bytes.Buffer
		if err := json.Indent(&pretty, out, "", "  "); err != nil {
			return fmt.Errorf("indent the rendering: %w", err)
		}
		out = pretty.Bytes()
	}
	if _, err := fmt.Fprintf(p.stdout, "%s\n", out); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// renderHint recognizes what is often given instead of a message.
func renderHint(in []byte) string {
	for _, known := range []struct{ magic, hint string }{
		{"\x1f\x8b", "the input is compressed with gzip: decompress it first"},
		{"\x28\xb5\x2f\xfd", "the input is compressed with zstd: decompress it first"},
		{"SQLite format 3", "the input is an SQLite image"},
		{"{", "the input is JSON, such as an error of the server"},
	} {
		if bytes.HasPrefix(in, []byte(known.magic)) {
			return "; " + known.hint
		}
	}
	return ""
}
