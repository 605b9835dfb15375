package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// ofTuning is the name of the group that tunes low-rank adapters of rank tunedRank on all linear layers,
// with scale 2.
const (
	ofTuning  = "finetune"
	tunedRank = 16
)

// tuned lists the models of the group: Llama-3.2-1B and Llama-3.1-8B, with random weights.
var tuned = []size{
	{"llama3.2-1B", llm.Config{Vocab: 128256, Dim: 2048, Layers: 16, Heads: 32, KVHeads: 8,
		FF: 8192, Seq: 4096, Base: 5e5, Traits: llm.Traits{Scaling: op.RoPEScaling{Factor: 32,
			LowFreq: 1, HighFreq: 4, Original: 8192}}}, 4, true},
	{"llama3.1-8B", llm.Config{Vocab: 128256, Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8,
		FF: 14336, Seq: 4096, Base: 5e5, Untied: true, Traits: llm.Traits{Scaling: op.RoPEScaling{
			Factor: 8, LowFreq: 1, HighFreq: 4, Original: 8192}}}, 2, true},
}

// tunings measures the chosen models of the group.
func (o options) tunings(device *cudaops.Device) error {
	if !o.has(ofTuning) {
		return nil
	}

	for _, s := range tuned {
		if !slices.Contains(o.models, s.name) {
			continue
		}
		if o.batch > 0 {
			s.batch = o.batch
		}
		if o.seq > 0 {
			s.config.Seq = o.seq
		}
		if err := s.tune(device, o); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}

	return nil
}

// tune measures the time of training steps with adapters.
func (s size) tune(device *cudaops.Device, o options) (err error) {
	start := time.Now()
	t, err := s.beginTuning(device, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.machine.Close()) }()

	for i := range warmUp {
		if err := t.step(); err != nil {
			return err
		}
		if i == 0 {
			fmt.Fprintf(os.Stderr, "%s: the first step was done after %.1f s\n", t.name,
				time.Since(start).Seconds())
		}
	}

	if err := t.time(o.steps); err != nil {
		return err
	}

	r, err := t.result(o)
	if err != nil {
		return err
	}

	r.Bench = t.name
	r.TFLOPs = rounded(r.TFLOPs*2/3, 1) // frozen weights have no gradients
	return emit(r)
}

// beginTuning prepares the training of adapters on random weights, which exist only on the device.
func (s size) beginTuning(device *cudaops.Device, o options) (*training, error) {
	c := s.config.Default()
	targets, err := c.MatchLayers(llm.AllLinear)
	if err != nil {
		return nil, err
	}

	c.Adapter = llm.LoRA{Rank: tunedRank, Alpha: 2 * tunedRank, Targets: targets}
	if err := c.Check(); err != nil {
		return nil, err
	}

	m, learned := llm.Outline(c), 0
	r := rand.New(rand.NewPCG(1, 2))
	for i, p := range slices.Collect(c.Specs()) {
		if !llm.IsAdapterParam(p.Name) {
			continue
		}
		x := make([]float32, tensor.Shape(p.Shape).TotalSize())
		for k := range x {
			x[k] = float32(p.Deviation * r.NormFloat64())
		}
		m.Params[i].Value = tensor.New(tensor.WithShape(p.Shape...), tensor.WithBacking(x))
		learned += len(x)
	}

	var graphOptions []llm.GraphOption
	if o.recompute {
		graphOptions = append(graphOptions, llm.WithRecompute())
	}
	if o.mlps > 0 {
		graphOptions = append(graphOptions, llm.WithRecomputedMLPs(o.mlps))
	}
	if o.pairs {
		graphOptions = append(graphOptions, llm.WithPreference(op.Preference{Kind: op.PreferenceSigmoid, Beta: 0.1}))
	}
	g, err := llm.BuildGraph(m, llm.ForTraining, s.batch, graphOptions...)
	if err != nil {
		return nil, err
	}

	base, err := o.packed(g.Frozen())
	if err != nil {
		return nil, err
	}
	frozen := slices.DeleteFunc(g.Frozen(), func(n *gorgonia.Node) bool { return base.Has(n.Name()) })
	opts := []cudaops.MachineOption{cudaops.WithParams(g.Learning...), cudaops.WithOutputs(g.Loss),
		cudaops.WithFrozen(randomWeights(), frozen...), cudaops.WithWeights(base),
		cudaops.WithPrecision(o.precision), cudaops.WithTuning(o.tune), cudaops.WithStrict()}
	if o.memory > 0 {
		opts = append(opts, cudaops.WithMemory(int(o.memory*(1<<30))))
	}
	machine, err := cudaops.NewMachine(device, g.G, opts...)
	if err != nil {
		return nil, err
	}

	opt, err := optim.NewAdamW(optim.WithLR(1e-4))
	if err == nil {
		err = machine.SetOptimizer(opt, o.clip)
	}
	if err != nil {
		return nil, errors.Join(err, machine.Close())
	}

	plan := machine.MemoryPlan()
	fmt.Fprintf(os.Stderr, "%s: planned %.2f GiB: %+v\n", s.name, float64(plan.Total())/(1<<30), plan)

	name := "finetune_" + s.name + "_lora16"
	if o.base != cpuops.BFloat16 {
		name += "_" + o.base.String()
	}
	if o.pairs {
		name += "_pairs"
	}
	return &training{size: s, name: name, params: learned, machine: machine,
		loss: g.Loss, next: s.batches(g)}, nil
}

// packed returns random weights for the linear layers in float8 or NF4, or nil if o.base is bfloat16. All blocks share
// the same weights, so that the host encodes only one block.
func (o options) packed(frozen gorgonia.Nodes) (*cpuops.Weights, error) {
	if o.base == cpuops.BFloat16 {
		return nil, nil
	}

	const numbers = 1<<20 + 7
	drawn, r := make([]float32, numbers), rand.New(rand.NewPCG(3, 4))
	for i := range drawn {
		drawn[i] = float32(0.02 * r.NormFloat64())
	}

	base, first := new(cpuops.Weights), map[string]string{} // names by the part after the number of the block
	for _, n := range frozen {
		if !strings.Contains(n.Name(), "_proj.weight") {
			continue
		}

		parts := strings.SplitN(n.Name(), ".", 4) // model.layers.0.mlp.up_proj.weight
		if of := first[parts[3]]; of != "" {
			if err := base.Alias(n.Name(), of); err != nil {
				return nil, err
			}
			continue
		}
		first[parts[3]] = n.Name()

		err := base.Add(o.base, n.Name(), n.Shape()[0], n.Shape()[1], func(put func([]float32) error) error {
			for left := n.Shape().TotalSize(); left > 0; {
				part := drawn[:min(left, numbers)]
				if err := put(part); err != nil {
					return err
				}
				left -= len(part)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}

	return base, nil
}

// randomWeights returns a function for [cudaops.WithFrozen]. Norms are 1, and other weights are normal
// numbers with a standard deviation of 0.02, which repeat.
func randomWeights() func(n *gorgonia.Node, put func([]byte, cudaops.Precision) error) error {
	const numbers = 1<<20 + 7
	drawn, ones := make([]byte, 0, 2*numbers), make([]byte, 0, 2*numbers)
	r := rand.New(rand.NewPCG(3, 4))
	for range numbers {
		drawn = binary.LittleEndian.AppendUint16(drawn, uint16(half.NewBFloat16(float32(0.02*r.NormFloat64()))))
		ones = binary.LittleEndian.AppendUint16(ones, uint16(half.NewBFloat16(1)))
	}

	return func(n *gorgonia.Node, put func([]byte, cudaops.Precision) error) error {
		from := drawn
		if strings.Contains(n.Name(), "norm") {
			from = ones
		}
		for left := 2 * n.Shape().TotalSize(); left > 0; {
			part := from[:min(left, len(from))]
			if err := put(part, cudaops.BFloat16); err != nil {
				return err
			}
			left -= len(part)
		}
		return nil
	}
}
