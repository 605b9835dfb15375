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
	"time"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// rankDeadline is how long a rank may be silent before all end. A save of a large model or the
// choice of a GPU's kernels may take minutes.
const rankDeadline = 15 * time.Minute

// launchRanks starts a process a GPU where that is this one's part: with -gpus, and on a node of
// Kubeflow Trainer with several GPUs.
func launchRanks(args []string, stdout, stderr io.Writer) (launched bool, err error) {
	var o options
	f := o.flags(io.Discard)
	if f.Parse(args) != nil {
		return false, nil // which is told later
	}
	node, perNode, found, err := launch.NodeFromEnvironment(os.Getenv)
	if err != nil {
		return false, err
	}
	if perNode = cmp.Or(o.gpus, perNode); perNode < 2 {
		return false, nil
	}
	if os.Getenv("RANK") != "" {
		return false, nil // somebody has launched this one
	}
	if place, err := comm.FromEnvironment(os.Getenv); err == nil && place.Size > 1 && !found {
		return false, fmt.Errorf("-gpus %d: %s has started a process for each GPU: leave -gpus out",
			o.gpus, place.Source)
	}
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	return true, launch.Run(context.Background(), launch.Job{Path: self, Args: args,
		PerNode: perNode, Node: node,
		Stdout: stdout, Stderr: stderr})
}

// joinRanks meets the other processes of the run, if there are any. The world is nil where there
// are none.
func joinRanks(ctx context.Context, o options, stderr io.Writer) (*comm.World, error) {
	place, err := comm.FromEnvironment(os.Getenv)
	if err != nil || place.Size == 1 {
		return nil, err
	}
	if o.train.Accumulate < place.Size {
		return nil, fmt.Errorf("a step of -accumulate %d batches leaves nothing to do for some "+
			"of %d processes: give -accumulate %d, or a multiple of it", o.train.Accumulate,
			place.Size, place.Size)
	}
	if o.profile != "" || o.monitor > 0 {
		return nil, errors.New("-profile and -monitor are for one process")
	}
	binary, err := comm.Binary()
	if err != nil {
		return nil, err
	}
	w, err := comm.Join(ctx, place, comm.Options{Deadline: rankDeadline,
		Facts: append([]comm.Fact{binary}, o.facts()...)})
	if err != nil {
		return nil, err
	}
	if place.Rank == 0 {
		fmt.Fprintf(stderr, "ranks     %d processes, started by %s\n", place.Size, place.Source)
	}
	return w, nil
}

// teamOf connects the processes of a run, by their GPUs or, without, by their CPUs. It is nil for a
// process that runs alone.
func teamOf(ctx context.Context, w *comm.World, device *cudaops.Device) (*parallel.Team, error) {
	if w == nil {
		return nil, nil
	}
	own := "the CPU"
	if device != nil {
		own = "a GPU"
	}
	all, err := w.Gather(ctx, "device", []byte(own))
	if err != nil {
		return nil, err
	}
	for r, other := range all {
		if string(other) != string(all[0]) {
			return nil, fmt.Errorf("rank 0 would train on %s and rank %d on %s: give -device",
				all[0], r, other)
		}
	}
	switch {
	case device != nil:
		return gpu.Join(ctx, w, device)
	case w.Place().LocalSize != w.Size():
		return nil,
			w.Blame(fmt.Errorf(
				"%d processes on several hosts: CPUs train together on one host alone",
				w.Size()))
	}
	return parallel.Join(ctx, w)
}

// ordinal is the GPU of a process, among those that it sees.
func ordinal(w *comm.World) (int, error) {
	if w == nil {
		return 0, nil
	}
	visible, err := cudaops.Count()
	if err != nil {
		return 0, err
	}
	return w.Place().Device(visible)
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

// one reports whether this process alone writes files and tells the user: the only one, or rank 0.
func one(team *parallel.Team) bool { return team == nil || team.Rank() == 0 }

// exitCode is the program's.
func exitCode(err error) int {
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	return comm.ExitCode(err)
}

// inTurn calls f at rank 0 first, and then at the others, which find what it has left in the cache.
func inTurn(team *parallel.Team, f func() error) error {
	if team == nil {
		return f()
	}
	var err error
	if one(team) {
		err = f()
	}
	if err := team.Agree(err); err != nil || one(team) {
		return err
	}
	return f()
}

// claim is llm.ClaimFolder at rank 0.
func claim(team *parallel.Team, dir string) (release func() error, err error) {
	if one(team) {
		return llm.ClaimFolder(dir)
	}
	return func() error { return nil }, nil
}
