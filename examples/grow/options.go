package main

import (
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

type options struct {
	device, data, out string
	model             llm.Config
	train             llm.TrainConfig
	lr                float64
	seed              uint64
	runs              int
	scrub             time.Duration
	dryRun            bool
	thresholds        state.Thresholds
	embargo           int
	every             int // epochs from one comparison of blueprints to the next
	controller        *control.Heuristic
}

func parse(args []string, stderr io.Writer) (o options, err error) {
	var rank int
	o.train.Epoch = 4
	f := flag.NewFlagSet("grow", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.device, "device", "auto", "cpu, cuda (an NVIDIA GPU) or auto: the GPU if there is one")
	f.StringVar(&o.data, "data", "", "file or folder to learn from (default: the Go source tree)")
	f.StringVar(&o.out, "out", filepath.Join("runs", "grow"), "folder for models, logs and pictures")
	f.Uint64Var(&o.seed, "seed", 1, "random seed of parameters and data order")
	f.IntVar(&o.runs, "runs", 1, "how often to compare, with one random seed after the other")
	f.DurationVar(&o.scrub, "scrub", time.Minute, "verify the checksums of all seeds once in so long while a run goes on; 0 for never")
	f.BoolVar(&o.dryRun, "dry-run", false, "print what the controller would do, and do nothing")
	f.IntVar(&o.train.Steps, "steps", 2000, "optimiser steps")
	f.IntVar(&o.train.Batch, "batch", 16, "sequences in a batch")
	f.Float64Var(&o.lr, "lr", 6e-3, "peak learning rate")
	f.IntVar(&o.model.Layers, "layers", 2, "blocks, each with a Kasmina layer behind it")
	f.IntVar(&o.model.Dim, "dim", 48, "features of the residual stream")
	f.IntVar(&o.model.Heads, "heads", 4, "attention heads")
	f.IntVar(&o.model.FF, "ff", 32, "hidden features of the perceptrons: few, so that there is something to grow for")
	f.IntVar(&o.model.Seq, "seq", 64, "bytes in a sequence")
	f.IntVar(&o.model.Seeds, "seeds", 3, "seeds of each Kasmina layer")
	f.IntVar(&rank, "rank", 96, "hidden features of a blueprint with capacity")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("%q is not an option", f.Arg(0))
	case o.runs < 1:
		return o, fmt.Errorf("-runs is %d, want at least 1", o.runs)
	case o.scrub < 0:
		return o, fmt.Errorf("-scrub is %v, want at least 0", o.scrub)
	case rank < 1:
		return o, fmt.Errorf("-rank is %d, want at least 1", rank)
	case o.train.Batch < 1:
		return o, fmt.Errorf("-batch is %d, want at least 1", o.train.Batch)
	case o.train.Steps < 1:
		return o, fmt.Errorf("-steps is %d, want at least 1", o.train.Steps)
	case o.model.Seeds < 1 || o.model.Dim < 1 || o.model.Dim%o.model.Seeds != 0:
		return o, fmt.Errorf("-seeds is %d, want a divisor of -dim, %d", o.model.Seeds, o.model.Dim)
	case !slices.Contains([]string{"auto", "cpu", "cuda"}, o.device):
		return o, fmt.Errorf("-device is %q, want auto, cpu or cuda", o.device)
	}
	o.model.Vocab = tokenizer.Bytes{}.VocabSize()
	for i := range o.model.Layers {
		o.model.Kasmina = append(o.model.Kasmina, i)
	}
	o.model.SlotWidth = 2 * rank * o.model.Dim / o.model.Seeds
	o.model = o.model.Default()
	o.plan()
	return o, o.model.Check()
}

// plan sizes the lives of the blueprints by the epochs of the run, which is short: the thresholds
// that a lattice has otherwise are for runs of thousands of epochs.
func (o *options) plan() {
	epochs := o.train.Steps / o.train.Epoch
	part := func(of int) int { return max(1, epochs/of) }
	o.every = part(20)
	t := &o.thresholds
	*t = state.DefaultThresholds()
	clear(t.MinEpochs[:])
	t.MinEpochs[state.Training], t.MinEpochs[state.Grafting] = 2, part(20)
	// Most of the run: a fossilized blueprint learns no more, while the model around it does. It is
	// planted at the end of epoch Begin, trains from the next on, and then comes what leads here.
	before := part(50) + 1 + t.MinEpochs[state.Training] + part(20) + part(40) + part(20)
	fineTuning := max(1, min(epochs*3/5, epochs-before))
	t.MinEpochs[state.Stabilization], t.MinEpochs[state.Evaluating] = part(40), part(20)
	t.MinEpochs[state.FineTuning] = fineTuning
	t.Stability, t.FossilStable, t.Improvement, t.CullDelta = 0.7, 0.7, 0.001, -0.002
	o.embargo = part(20)
	c := control.NewHeuristic(o.model.Layers*o.model.Seeds, o.model.Layers*o.model.Seeds*(o.model.SlotWidth+1))
	c.Begin, c.End, c.PerEpoch = part(50), epochs*2/3, 2
	c.Patience, c.RampEpochs, c.Hunger = fineTuning+part(10), part(20), 0.5
	o.controller = c
}
