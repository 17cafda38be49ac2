package suite

import (
	"encoding/xml"
	"fmt"
	"io"
	"regexp"
	"strings"
)

type junitSuite struct {
	Suites []junitSuite `xml:"testsuite"`
	Cases  []junitCase  `xml:"testcase"`
}

type junitCase struct {
	Name    string        `xml:"name,attr"`
	Failure *junitMessage `xml:"failure"`
	Error   *junitMessage `xml:"error"`
	Skipped *struct{}     `xml:"skipped"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
}

// hostURL matches what changes from run to run in a failure.
var hostURL = regexp.MustCompile(`https?://[^\s/]+(/instances/[^\s/]+)?`)

// notSupported matches the answer of a host to a call for a missing feature.
var notSupported = regexp.MustCompile(`\{"code":"host\.not_supported".*"message":"([^"]*)"\}`)

// ParseJUnit reads the report of one run. The scenarios come in the order in
// which they ran. A report without a scenario is ErrNoResults.
func ParseJUnit(r io.Reader) ([]Result, error) {
	var root junitSuite
	if err := xml.NewDecoder(r).Decode(&root); err != nil {
		return nil, fmt.Errorf("read the report of the scenario runner: %w", err)
	}
	results := root.results(nil)
	if len(results) == 0 {
		return nil, ErrNoResults
	}
	return results, nil
}

func (s junitSuite) results(into []Result) []Result {
	for _, c := range s.Cases {
		into = append(into, c.result())
	}
	for _, nested := range s.Suites {
		into = nested.results(into)
	}
	return into
}

// result splits the label "name (refs) needs a, b" that the runner gives.
func (c junitCase) result() Result {
	name, rest, _ := strings.Cut(c.Name, " (")
	refs, note, _ := strings.Cut(rest, ")")
	result := Result{Scenario: name, Refs: refs, Status: Passed}
	failure := c.Failure
	if failure == nil {
		failure = c.Error
	}
	switch {
	case c.Skipped != nil:
		result.Status = Skipped
		result.Note = strings.TrimSpace(note)
	case failure != nil:
		result.Status = Failed
		result.Note = failureNote(failure.Message)
	}
	return result
}

// maxNote bounds a note, in bytes.
const maxNote = 240

// failureNote says why a scenario failed, in words that are the same in every
// run that fails alike.
func failureNote(message string) string {
	if match := notSupported.FindStringSubmatch(message); match != nil {
		return match[1]
	}
	note := strings.TrimSpace(hostURL.ReplaceAllString(message, ""))
	if len(note) > maxNote {
		note = strings.ToValidUTF8(note[:maxNote], "") + "…"
	}
	return note
}
