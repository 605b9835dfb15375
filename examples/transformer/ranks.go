package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// launchRanks starts a process a GPU where that is this one's part: with -gpus, and on a node of
// Kubeflow Trainer with several GPUs.
func launchRanks(args []string, stdout, stderr io.Writer) (launched bool, err error) {
	var o options
	f := o.flags(io.Discard)
	if f.Parse(args) != nil || o.gpus < 0 {
		return false, nil // which is told later
	}
	job, err := launch.ForGPUs(o.gpus, args, os.Getenv)
	if job == nil || err != nil {
		return false, err
	}
	job.Stdout, job.Stderr = stdout, stderr
	return true, launch.Run(context.Background(), *job)
}

// joinRanks meets the other processes of the run, if there are any. The world is nil where there
// are none.
func joinRanks(ctx context.Context, o options, stderr io.Writer) (*comm.World, error) {
	waiting := func(text string) { fmt.Fprintf(os.Stderr, "waiting   %s\n", text) }
	w, err := parallel.MeetWith(ctx, os.Getenv, o.train.Accumulate,
		comm.Options{Facts: o.facts(), Waiting: waiting})
	if err != nil || w == nil {
		return nil, err
	}
	if o.profile != "" || o.monitor > 0 {
		return nil, w.Blame(errors.New("-profile and -monitor are for one process"))
	}
	if w.Rank() == 0 {
		fmt.Fprintf(stderr, "ranks     %d processes, by the variables of %s\n", w.Size(),
			w.Place().Source)
	}
	return w, nil
}

// facts are the options on which ranks must agree: all but paths, which may differ from host to
// host.
func (o options) facts() (all []comm.Fact) {
	for name, value := range o.train.Notes {
		if !slices.Contains(pathOptions, name) {
			all = append(all, comm.Fact{Name: "-" + name, Value: value})
		}
	}
	slices.SortFunc(all, func(a, b comm.Fact) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// exitCode is the program's.
func exitCode(err error) int {
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	return comm.ExitCode(err)
}

// claim is llm.ClaimFolder at rank 0.
func claim(team *parallel.Team, dir string) (release func() error, err error) {
	if team.First() {
		return llm.ClaimFolder(dir)
	}
	return func() error { return nil }, nil
}
