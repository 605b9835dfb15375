package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// ranksJob returns the job of a training command that starts one process per GPU: with --gpus, and on a
// node of Kubeflow Trainer with several GPUs. args is the whole command line of c. It returns nil if this
// process trains by itself, or if the number of GPUs is invalid, which the training reports.
func ranksJob(c *cobra.Command, args []string) (*launch.Job, error) {
	gpus, err := c.Flags().GetInt("gpus")
	if err != nil || gpus < 0 {
		return nil, err
	}

	job, err := launch.ForGPUs(gpus, args, os.Getenv)
	if err != nil || job == nil {
		return job, err
	}
	return job, checkJob(c, gpus)
}

// checkJob returns an error for options that do not allow several processes, so that none is started.
func checkJob(c *cobra.Command, gpus int) error {
	// Without --accumulate, a run that is continued takes the value from before.
	if n, err := c.Flags().GetInt("accumulate"); err == nil && c.Flags().Changed("accumulate") && n >= 1 && n < gpus {
		return fmt.Errorf("--gpus: with --accumulate %d, a step leaves nothing to do for some of %d processes: give --accumulate %d, "+
			"or a multiple of it", n, gpus, gpus)
	}
	if grows, err := c.Flags().GetBool("grow-rank"); err == nil && grows {
		return errGrowRankProcesses
	}
	return nil
}

// ownOptions lists the options that may differ between ranks: paths on each host, and options that only
// rank 0 uses.
var ownOptions = []string{"model", "tokenizer", "data", "cache", "out", "gpus", "board", "board-control", "tensorboard",
	"quiet", "help"}

// facts returns the options that must be the same on all ranks.
func facts(c *cobra.Command) (all []comm.Fact) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(ownOptions, f.Name) {
			all = append(all, comm.Fact{Name: "--" + f.Name, Value: f.Value.String()})
		}
	})
	slices.SortFunc(all, func(a, b comm.Fact) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// machines holds the resources of a process: its device and its connection to the other ranks.
type machines struct {
	world     *comm.World // nil for a single process
	team      *parallel.Team
	device    *cudaops.Device // nil for the CPU
	precision cudaops.Precision
}

// meet joins the other processes of the run, if there are any, opens the device, and silences all processes
// but one. It returns an error for options that have no effect on these processes.
func (o *trainOptions) meet(c *cobra.Command) (m machines, err error) {
	waiting := func(text string) { fmt.Fprintf(c.ErrOrStderr(), "waiting   %s\n", text) }
	m.world, err = parallel.MeetWith(c.Context(), os.Getenv, o.train.Accumulate,
		comm.Options{Deadline: o.deadline, Facts: facts(c), Waiting: waiting})
	if err != nil {
		if o.gpus > 1 {
			err = fmt.Errorf("--gpus: %w", err)
		}
		return m, err
	}

	if m.world != nil && m.world.Rank() == 0 {
		fmt.Fprintf(c.ErrOrStderr(), "ranks     %d processes, according to the variables of %s\n", m.world.Size(),
			m.world.Place().Source)
	}

	if m.device, m.precision, err = o.openFor(m.world, c.ErrOrStderr()); err != nil {
		// Tell the other ranks, which would otherwise wait for this one.
		if m.world != nil {
			err = m.world.Blame(err)
			m.world.Close() // does not wait, and adds nothing to the error
		}
		return m, err
	}

	if m.team, err = gpu.Team(c.Context(), m.world, m.device); err != nil {
		return m, errors.Join(err, m.close(nil))
	}

	if !m.team.First() {
		c.SetOut(io.Discard)
		c.SetErr(io.Discard)
	}

	if err := o.checkProcesses(c, m); err != nil {
		return m, errors.Join(err, m.close(err))
	}

	return m, nil
}

// atFirst calls f on rank 0 only and returns its error on all ranks.
func (m machines) atFirst(f func() error) (err error) {
	if m.team.First() { // a nil team is a single process, which is rank 0
		err = f()
	}
	if m.team != nil {
		err = m.team.Agree(err)
	}
	return err
}

// facts describes the machines in the log of the run.
func (m machines) facts() map[string]string {
	all := map[string]string{"device": "the CPU", "precision": m.precision.String(),
		"processes": "1"}
	if m.device != nil {
		all["device"] = m.device.String()
	}
	if m.team != nil {
		all["processes"] = strconv.Itoa(m.team.Size())
	}
	return all
}

// close disconnects from the other ranks, reporting a failure to them, and frees the device.
func (m machines) close(failure error) (err error) {
	if m.team != nil {
		err = m.team.Close(failure)
	}
	if m.device != nil {
		err = errors.Join(err, m.device.Close())
	}
	return err
}
