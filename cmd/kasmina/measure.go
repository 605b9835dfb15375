package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// profileAfter is the number of warmup steps before --profile traces a step.
const profileAfter = 10

// engineOptions are the training options for the machine.
type engineOptions struct {
	gradients cudaops.Precision
	tune      cudaops.Tuning
	monitor   int
	profile   string
	memory    float64 // limit in GiB, or 0 for none
}

func (e *engineOptions) flags(c *cobra.Command) {
	f := c.Flags()
	f.TextVar(&e.gradients, "grad-precision", cudaops.Float32,
		"type of the gradients of weights on a GPU: f32, or bf16 to save memory with --precision bf16 or f8")
	f.TextVar(&e.tune, "tune", cudaops.TuneDefault,
		"how to find the fastest kernels on a GPU: off, cached, full, or default (off for f32, else cached)")
	f.IntVar(&e.monitor, "monitor", 0,
		"measure the time of each op in one of this many steps, and print a table at the end; 0 measures nothing")
	f.StringVar(&e.profile, "profile", "",
		"write a trace of one step on a GPU to this `file`, for ui.perfetto.dev, and print a summary")

	e.memoryFlag(c)
	completeFlag(c, "grad-precision", "f32", "bf16")
	completeFlag(c, "tune", "default", "off", "cached", "full")
}

// memoryFlag adds --memory.
func (e *engineOptions) memoryFlag(c *cobra.Command) {
	c.Flags().Float64Var(&e.memory, "memory", 0, "limit in `GiB` up to which the run uses more GPU memory than necessary to "+
		"save time (default: no limit)")
}

// mostMemory is the largest value of --memory, which is more than any GPU has.
const mostMemory = 1 << 20

// checkValues returns an error for values that are invalid in every run.
func (e *engineOptions) checkValues() error {
	if !(e.memory >= 0 && e.memory <= mostMemory) {
		return fmt.Errorf("--memory is %v, want 0 to %d GiB", e.memory, mostMemory)
	}
	if e.monitor < 0 || e.monitor == 1 {
		return fmt.Errorf("--monitor is %d, want 0, or at least 2", e.monitor)
	}
	if e.gradients != cudaops.Float32 && e.gradients != cudaops.BFloat16 {
		return fmt.Errorf("--grad-precision is %v, want f32 or bf16", e.gradients)
	}
	return nil
}

// check returns an error for options that do not fit the machines of the run.
func (e *engineOptions) check(c *cobra.Command, m machines) error {
	if unused := given(c, "grad-precision", "tune", "profile", "memory"); m.device == nil && len(unused) > 0 {
		return fmt.Errorf("%s no effect on a CPU: leave it out, or train on a GPU", have(unused))
	}
	if alone := given(c, "monitor", "profile"); m.team != nil && len(alone) > 0 {
		return fmt.Errorf("%s no effect with several processes: leave it out, or --gpus", have(alone))
	}
	if e.gradients == cudaops.BFloat16 && m.precision != cudaops.BFloat16 && m.precision != cudaops.Float8 {
		return errors.New("--grad-precision is bf16, which needs --precision bf16 or f8")
	}
	return nil
}

// engine returns the constructor of the engine for the machines of the run.
func (e *engineOptions) engine(m machines) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
	error) {
	options := []cudaops.MachineOption{cudaops.WithGradientPrecision(e.gradients),
		cudaops.WithTuning(e.tune)}
	if e.monitor > 0 {
		options = append(options, cudaops.WithMonitor(e.monitor))
	}
	if e.memory > 0 {
		options = append(options, cudaops.WithMemory(e.memoryBytes()))
	}

	switch {
	case m.device != nil && m.team != nil:
		return gpu.Parallel(m.device, m.precision, m.team, options...)
	case m.device != nil:
		return gpu.Engine(m.device, m.precision, options...)
	case m.team != nil:
		return m.team.Engine
	case e.monitor > 0:
		return llm.CPUEngine(cpuops.WithMonitor(e.monitor))
	}

	return nil
}

// memoryBytes returns the value of --memory in bytes.
func (e *engineOptions) memoryBytes() int { return max(1, int(e.memory*(1<<30))) }

// watch adds the callbacks that measure a run.
func (e *engineOptions) watch(c *cobra.Command, t *llm.Trainer) {
	if e.monitor > 0 {
		t.On(llm.Monitor(t, c.ErrOrStderr(), 0))
	}
	if e.profile != "" {
		t.On(llm.ProfileStep(t, c.ErrOrStderr(), e.profile, profileAfter))
	}
}
