package main

import (
	"fmt"
	"runtime/debug"

	"github.com/syncpg/syncpg/migrations"
)

type versionCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// versionInfo is what the command prints as JSON.
type versionInfo struct {
	Version    string `json:"version"`
	Revision   string `json:"revision,omitempty"`
	Go         string `json:"go"`
	Wires      []int  `json:"wireVersions"`
	Migrations int    `json:"migrations"` // version of the schema "syncpg" that the program brings
}

// Run shows the version.
func (c *versionCmd) Run(p *program) error {
	m, err := migrations.New(nil, migrations.Options{})
	if err != nil {
		return err
	}
	info := versionInfo{Version: "unknown", Wires: []int{1, 2, 3}, Migrations: len(m.List())}
	if build, ok := debug.ReadBuildInfo(); ok {
		info.Version, info.Go = build.Main.Version, build.GoVersion
		for _, s := range build.Settings {
			if s.Key == "vcs.revision" {
				info.Revision = s.Value
			}
		}
	}
	if c.JSON {
		return p.printJSON(info)
	}
	rows := [][]string{{"syncpg", info.Version}}
	if info.Revision != "" {
		rows = append(rows, []string{"revision", info.Revision})
	}
	rows = append(rows, []string{"go", info.Go}, []string{"wire versions", "1, 2, 3"},
		[]string{"migrations", fmt.Sprintf("up to version %d", info.Migrations)})
	return table(p.stdout, "", rows)
}
