package suite

import (
	"fmt"
	"io"
	"strings"
)

// Summary is what several runs say together, scenario by scenario, in the order
// of the first run.
type Summary struct {
	Runs      int
	Scenarios []Scenario
}

// Scenario is one scenario over all runs.
type Scenario struct {
	Result     // of the first run in which it did not pass, else of the first run
	Passes int // runs in which it passed
}

// Summarize joins the results of several runs of the same catalogue.
func Summarize(runs [][]Result) Summary {
	summary := Summary{Runs: len(runs)}
	at := map[string]int{}
	for _, run := range runs {
		for _, result := range run {
			i, seen := at[result.Scenario]
			if !seen {
				i = len(summary.Scenarios)
				at[result.Scenario] = i
				summary.Scenarios = append(summary.Scenarios, Scenario{Result: result})
			}
			scenario := &summary.Scenarios[i]
			if result.Status == Passed {
				scenario.Passes++
			} else if scenario.Status == Passed {
				scenario.Result = result
			}
		}
	}
	return summary
}

// Count returns the number of scenarios that had the status in every run. One
// that passed only sometimes counts as failed.
func (s Summary) Count(status Status) int {
	count := 0
	for _, scenario := range s.Scenarios {
		if s.status(scenario) == status {
			count++
		}
	}
	return count
}

func (s Summary) status(scenario Scenario) Status {
	switch {
	case scenario.Passes == s.Runs:
		return Passed
	case scenario.Passes == 0 && scenario.Status == Skipped:
		return Skipped
	default:
		return Failed
	}
}

// WriteMarkdown writes the summary as a page. The same results give the same
// bytes. capabilities are those the host listed.
func (s Summary) WriteMarkdown(w io.Writer, capabilities []string) error {
	var page strings.Builder
	page.WriteString("# Conformance results\n\n")
	page.WriteString("Written by `make conformance`; do not edit. The scenarios are those of the protocol's own\n" +
		"repository, driven through the host in this directory by its TypeScript client over HTTP.\n\n")
	fmt.Fprintf(&page, "Runs: %d. Capabilities of the host: %s.\n\n", s.Runs, listOr(capabilities, "none"))
	fmt.Fprintf(&page, "**%d scenarios: %d pass in every run, %d fail, %d skipped.** "+
		"Skipped ones need a capability that the host does not list.\n\n",
		len(s.Scenarios), s.Count(Passed), s.Count(Failed), s.Count(Skipped))

	page.WriteString("| group | pass | fail | skipped |\n|---|---:|---:|---:|\n")
	for _, group := range s.groups() {
		part := Summary{Runs: s.Runs, Scenarios: s.inGroup(group)}
		fmt.Fprintf(&page, "| %s | %d | %d | %d |\n",
			group, part.Count(Passed), part.Count(Failed), part.Count(Skipped))
	}

	page.WriteString("\n| scenario | protocol | result | note |\n|---|---|---|---|\n")
	for _, scenario := range s.Scenarios {
		status := string(s.status(scenario))
		if scenario.Passes > 0 && scenario.Passes < s.Runs {
			status = fmt.Sprintf("%s (%d of %d runs pass)", Failed, scenario.Passes, s.Runs)
		}
		fmt.Fprintf(&page, "| %s | %s | %s | %s |\n",
			cell(scenario.Scenario), cell(scenario.Refs), status, cell(scenario.Note))
	}
	if _, err := io.WriteString(w, page.String()); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	return nil
}

// Regressions returns the scenarios that an earlier page lists as passed and that
// ran now without passing in every run.
func (s Summary) Regressions(page string) []string {
	passed := map[string]bool{}
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		if len(cells) >= 3 && cells[2] == string(Passed) {
			passed[strings.TrimPrefix(cells[0], "| ")] = true
		}
	}
	var lost []string
	for _, scenario := range s.Scenarios {
		if passed[scenario.Scenario] && s.status(scenario) != Passed {
			lost = append(lost, scenario.Scenario)
		}
	}
	return lost
}

func (s Summary) groups() []string {
	var groups []string
	seen := map[string]bool{}
	for _, scenario := range s.Scenarios {
		if group := groupOf(scenario); !seen[group] {
			seen[group] = true
			groups = append(groups, group)
		}
	}
	return groups
}

func (s Summary) inGroup(group string) []Scenario {
	var scenarios []Scenario
	for _, scenario := range s.Scenarios {
		if groupOf(scenario) == group {
			scenarios = append(scenarios, scenario)
		}
	}
	return scenarios
}

func groupOf(scenario Scenario) string {
	group, _, _ := strings.Cut(scenario.Scenario, "/")
	return group
}

func listOr(items []string, empty string) string {
	if len(items) == 0 {
		return empty
	}
	return "`" + strings.Join(items, "`, `") + "`"
}

// cell makes text safe inside a table: one line, no column separators.
func cell(text string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(text), " "), "|", `\|`)
}
