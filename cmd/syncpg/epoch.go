package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/retention"
)

type epochCmd struct {
	Rotate epochRotateCmd `cmd:"" help:"Tell clients that a backup was restored."`
}

type epochRotateCmd struct {
	databaseFlags
	whichFlags
	Yes  bool `name:"yes" short:"y" help:"Do not ask."`
	JSON bool `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*epochRotateCmd) Help() string {
	return `After a backup was restored, the log is another one than clients remember: they may know commits that are not there any ` +
		`more, and the same numbers will be given to others. A new log epoch tells them. They drop their rows, keep what they ` +
		`have not pushed, and begin anew; no work of theirs is lost. Clients of wire version 1 cannot be told and are refused ` +
		`from now on.

Stop all servers first, restore, run this with --all, start the servers. With --all, all or no partitions get a new epoch, ` +
		`and those that the backup does not know yet refuse wire version 1 too. --partition is for a database where only that ` +
		`partition was restored.`
}

// rotated is what `epoch rotate` prints as JSON.
type rotated struct {
	Partitions int64 `json:"partitions"`
	Clients    int64 `json:"clients"`
}

// Run rotates epochs.
func (c *epochRotateCmd) Run(ctx context.Context, p *program) error {
	if err := c.check(); err != nil {
		return err
	}
	pool, s, err := c.retention(ctx, p, retention.Config{})
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := c.confirm(p); err != nil {
		return err
	}
	var done rotated
	if c.All {
		r, err := s.RotateEpochs(ctx)
		if err != nil {
			return err
		}
		done = rotated{r.Partitions, r.Clients}
	} else {
		for _, partition := range c.Partition {
			r, err := s.RotateEpoch(ctx, partition)
			if err != nil {
				return noPartition(partition, err)
			}
			done.Partitions++
			done.Clients += r.Clients
		}
	}
	if c.JSON {
		return p.printJSON(done)
	}
	p.printf("%s: new log epoch; %s will begin anew\n", plural(int(done.Partitions), "partition"), plural(int(done.Clients), "client"))
	return nil
}

// errNotConfirmed ends the command when the answer was not yes.
var errNotConfirmed = errors.New("nothing was changed: answer yes, or give --yes")

func (c *epochRotateCmd) confirm(p *program) error {
	if c.Yes {
		return nil
	}
	which := "EVERY partition"
	if !c.All {
		which = fmt.Sprintf("%q", c.Partition)
	}
	_, _ = fmt.Fprintf(p.stderr, "All clients of %s will drop their rows and begin anew; those of wire version 1 are refused from now on.\n"+
		"Are the servers stopped, and is this wanted? [yes/no] ", which)
	line, _ := bufio.NewReader(p.stdin).ReadString('\n') // what cannot be read is no yes
	if strings.TrimSpace(line) != "yes" {
		return errNotConfirmed
	}
	return nil
}
