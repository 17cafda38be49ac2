package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// entry is one value of the file.
type entry struct {
	value string
	line  int
}

// parseFile reads a YAML file: one flat mapping of the known keys to scalars or to lists of scalars.
func parseFile(path string, text []byte, known []string) (map[string]entry, error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := dec.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: holds more than one YAML document", path)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil, nil
	}
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: must be a mapping of keys to values", path, root.Line)
	}
	file := map[string]entry{}
	var problems []error
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		at := fmt.Sprintf("%s:%d", path, key.Line)
		if !slices.Contains(known, key.Value) {
			problems = append(problems, fmt.Errorf("%s: unknown key %q%s", at, key.Value, didYouMean(key.Value, known)))
			continue
		}
		if first, ok := file[key.Value]; ok {
			problems = append(problems, fmt.Errorf("%s: key %q stands already in line %d", at, key.Value, first.line))
			continue
		}
		text, err := plain(value)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: key %q %w", at, key.Value, err))
			continue
		}
		file[key.Value] = entry{text, key.Line}
	}
	return file, errors.Join(problems...)
}

// plain returns a value as a flag would be given it. List items are parted by commas, with those inside escaped.
func plain(value *yaml.Node) (string, error) {
	switch {
	case value.Kind == yaml.AliasNode:
		return plain(value.Alias)
	case value.Kind == yaml.ScalarNode && value.Tag == "!!null":
		return "", errors.New("has no value")
	case value.Kind == yaml.ScalarNode:
		return value.Value, nil
	case value.Kind == yaml.SequenceNode:
		items := make([]string, len(value.Content))
		for i, item := range value.Content {
			if item.Kind != yaml.ScalarNode || item.Tag == "!!null" {
				return "", errors.New("must be a list of plain values")
			}
			items[i] = strings.ReplaceAll(item.Value, ",", `\,`)
		}
		return strings.Join(items, ","), nil
	}
	return "", errors.New("must be a plain value or a list")
}

// didYouMean proposes the known name that is closest to an unknown one, or lists what is known when none is close.
func didYouMean(name string, known []string) string {
	best, distance := "", len(strings.TrimPrefix(name, envPrefix))/3+1
	for _, k := range known {
		if d := editDistance(strings.ToLower(name), strings.ToLower(k)); d < distance {
			best, distance = k, d
		}
	}
	if best != "" {
		return fmt.Sprintf(", did you mean %s?", best)
	}
	all := slices.Clone(known)
	slices.Sort(all)
	return "; known are " + strings.Join(slices.Compact(all), ", ")
}

// editDistance is the number of single-byte edits between two short names.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
