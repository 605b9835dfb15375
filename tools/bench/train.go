package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// size is a model and its batch.
type size struct {
	name      string
	config    llm.Config
	batch     int
	published bool // the shape of a published model
}

// sizes lists models with Llama 2's blocks, and published shapes: Llama-3.2-1B, Qwen3-1.7B, and the
// first six blocks of Mistral-7B with sequences longer than its window.
var sizes = []size{
	{"llama124M", llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024},
		32, false},
	{"llama350M", llm.Config{Vocab: 50304, Dim: 1024, Layers: 24, Heads: 16, FF: 2816, Seq: 1024},
		16, false},
	{"llama925M", llm.Config{Vocab: 50304, Dim: 2048, Layers: 16, Heads: 16, FF: 5632, Seq: 2048},
		8, false},
	{"llama3.2-1B", llm.Config{Vocab: 128256, Dim: 2048, Layers: 16, Heads: 32, KVHeads: 8,
		FF: 8192, Seq: 4096, Base: 5e5, Traits: llm.Traits{Scaling: op.RoPEScaling{Factor: 32,
			LowFreq: 1, HighFreq: 4, Original: 8192}}}, 4, true},
	{"qwen3-1.7B", llm.Config{Vocab: 151936, Dim: 2048, Layers: 28, Heads: 16, KVHeads: 8,
		HeadDim: 128, FF: 6144, Seq: 4096, Base: 1e6, Eps: 1e-6,
		Traits: llm.Traits{QKNorm: true}}, 4, true},
	{"mistral-7B-6blocks", llm.Config{Vocab: 32000, Dim: 4096, Layers: 6, Heads: 32, KVHeads: 8,
		FF: 14336, Seq: 8192, Untied: true,
		Traits: llm.Traits{Blocks: []llm.Block{{Window: 4096}}}}, 2, true},
}

// A variant trains a model in a particular way. A group of measurements selects it.
type variant struct {
	group, suffix string // suffix of the line's name
	model         string // "" trains every chosen model
	how           []llm.GraphOption
	float8        bool // overrides the precision option
	// type of the gradients of weights; BFloat16 needs products of bfloat16 or float8, and overrides
	// the precision option
	gradients cudaops.Precision
	seeds     int // seeds of the Kasmina layer after each block; half of them blend
	telemetry state.Telemetry
}

// variants lists the plain model, float8 products, bfloat16 gradients, and blocks computed again in
// the backward pass. The last variants compare Kasmina layers, without telemetry and with all of it,
// with a model that has no such layers.
var variants = []variant{
	{group: "train"},
	{group: ofPublished},
	{group: "train-f8", suffix: "_f8", float8: true},
	{group: "train-bf16-gradients", suffix: "_bf16_gradients", gradients: cudaops.BFloat16},
	{group: "recompute", suffix: "_recompute", how: []llm.GraphOption{llm.WithRecompute()}},
	{group: inTurns, suffix: "_without_kasmina", model: "llama124M"},
	{group: inTurns, suffix: "_kasmina", model: "llama124M", seeds: 16,
		telemetry: state.Telemetry{Mode: state.Off}},
	{group: inTurns, suffix: "_kasmina_telemetry", model: "llama124M", seeds: 16,
		telemetry: state.Telemetry{Mode: state.Production}},
}

// trains reports whether the variant trains a model.
func (o options) trains(s size, v variant) bool {
	return slices.Contains(o.models, s.name) && o.has(v.group) &&
		s.published == (v.group == ofPublished) && (v.model == "" || v.model == s.name)
}

// trainings returns the variants to measure with a model. Variants in one group run alternately.
func (o options) trainings(s size) (all [][]variant) {
	for _, v := range variants {
		if !o.trains(s, v) {
			continue
		}
		if n := len(all); n > 0 && v.group == inTurns && all[n-1][0].group == inTurns {
			all[n-1] = append(all[n-1], v)
		} else {
			all = append(all, []variant{v})
		}
	}

	return all
}

// ofPublished is the name of the group with published shapes.
const ofPublished = "train-published"

// warmUp is the number of untimed runs at the start, which load kernels and record the graph.
const warmUp = 5

// A warm GPU is slower by more than the variants of this group differ. They therefore exist at the
// same time, and alternate after this many steps.
const (
	inTurns = "train-kasmina"
	turn    = 10
)

// model returns a new model with the variant's seeds.
func (s size) model(v variant) (*llm.Model, error) {
	c := s.config
	if v.seeds > 0 {
		c.Seeds = v.seeds
		for block := range c.Layers {
			c.Kasmina = append(c.Kasmina, block)
		}
	}

	m, err := llm.NewModel(c.Default(), tensor.Float32, 1, state.WithoutGates())
	if err != nil {
		return nil, err
	}

	for i, l := range m.Kasmina.Lattices() {
		err := l.SetTelemetry(v.telemetry)
		for seed := 0; seed < v.seeds; seed += 2 {
			r := state.GerminationRequest{Slot: 1 + seed, Kind: blueprints.Kind((i + seed/2) % 4)}
			err = errors.Join(err, m.Germinate(i, seed, r), l.Transition(seed, state.Training),
				l.Transition(seed, state.Grafting),
				l.SetAlpha(seed, 0.5))
		}
		if err != nil {
			return nil, err
		}
	}

	return m, nil
}

// A training holds a model on the device and the times of its steps on random tokens.
type training struct {
	size
	name    string // of the result
	params  int
	machine *cudaops.Machine
	loss    *gorgonia.Node
	next    func() error
	last    float64 // loss
	times   []time.Duration
}

// begin returns a training that has made its untimed steps.
func (s size) begin(device *cudaops.Device, v variant, o options) (t *training, err error) {
	m, err := s.model(v)
	if err != nil {
		return nil, err
	}

	g, err := m.Graph(llm.ForTraining, s.batch, v.how...)
	if err != nil {
		return nil, err
	}

	precision := o.precision
	switch {
	case v.float8:
		precision = cudaops.Float8
	case v.gradients == cudaops.BFloat16 && precision != cudaops.Float8: // the only other type that allows them
		precision = cudaops.BFloat16
	}

	opts := []cudaops.MachineOption{cudaops.WithParams(g.Params...), cudaops.WithOutputs(g.Loss),
		cudaops.WithPrecision(precision),
		cudaops.WithGradientPrecision(v.gradients), cudaops.WithTuning(o.tune),
		cudaops.WithStrict()}
	if o.monitor > 0 {
		opts = append(opts, cudaops.WithMonitor(o.monitor))
	}

	machine, err := cudaops.NewMachine(device, g.G, opts...)
	if err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			err = errors.Join(err, machine.Close())
		}
	}()

	opt, err := newOptimizer(o.muon)
	if err != nil {
		return nil, err
	}

	if err := machine.SetOptimizer(opt, o.clip); err != nil {
		return nil, err
	}

	t = &training{size: s, name: s.name + v.suffix, params: m.NumParams(), machine: machine,
		loss: g.Loss, next: s.batches(g)}
	for range warmUp {
		if err := t.step(); err != nil {
			return nil, err
		}
	}

	return t, nil
}

// step computes the loss and gradients of the next batch, updates the parameters, and waits for the
// loss.
func (t *training) step() (err error) {
	if err := errors.Join(t.next(), t.machine.RunAll()); err != nil {
		return err
	}
	t.last, _, err = t.machine.Step(t.loss)
	return err
}

// time makes and times steps.
func (t *training) time(steps int) error {
	for range steps {
		start := time.Now()
		if err := t.step(); err != nil {
			return err
		}
		t.times = append(t.times, time.Since(start))
	}
	return nil
}

// result returns the measurement of a timed training, and writes its profile and op times if the
// options ask for them.
func (t *training) result(o options) (r result, err error) {
	if o.profile != "" {
		if err := profile(t.machine, t.step, o.traceFile(t.name)); err != nil {
			return r, err
		}
	}

	if o.monitor > 0 {
		ops, err := t.machine.Monitor()
		if err != nil {
			return r, err
		}
		fmt.Fprint(os.Stderr, optime.Table(ops))
	}

	took, err := median(t.times)
	if err != nil {
		return r, err
	}

	r = t.trained("train_"+t.name, took, t.params)
	r.Loss, r.PeakGiB = t.last, rounded(float64(t.machine.Memory())/(1<<30), 2)
	return r, nil
}

// train measures the variants of a model, one after the other or alternately.
func (s size) train(device *cudaops.Device, variants []variant, o options) (err error) {
	var all []*training
	defer func() {
		for _, t := range all {
			err = errors.Join(err, t.machine.Close())
		}
	}()

	for _, v := range variants {
		t, err := s.begin(device, v, o)
		if v.float8 && errors.Is(err, cudaops.ErrUnsupportedPrecision) {
			fmt.Fprintf(os.Stderr, "skipping %s%s: %v\n", s.name, v.suffix, err)
			continue
		}
		if err != nil {
			return fmt.Errorf("%s%s: %w", s.name, v.suffix, err)
		}
		all = append(all, t)
	}

	left := o.steps
	if len(all) > 1 {
		// The first step after a pause does not count, since the clock rate is still high.
		left += turn
	}

	for ; left > 0; left -= turn {
		for _, t := range all {
			if err := t.time(min(left, turn)); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			if left > o.steps {
				t.times = nil
			}
		}
	}

	for _, t := range all {
		r, err := t.result(o)
		if err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		if err := emit(r); err != nil {
			return err
		}
	}

	return nil
}

// trained returns the result for a training step.
func (s size) trained(name string, took time.Duration, params int) result {
	c := s.config.Default()
	tokens := float64(s.batch * c.Seq)
	r := measured(name, took, 0, tokens*c.FLOPs())
	r.Params, r.TokensPS = params, rounded(tokens/took.Seconds(), 0)
	return r
}

// linearCrossEntropy times an output layer with its loss and gradients.
func linearCrossEntropy(device *cudaops.Device) (err error) {
	const rows, dim, vocab = 16384, 2048, 50304
	random := rand.New(rand.NewPCG(2, 2))
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, normal(random, 1, rows, dim), gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, normal(random, 0.02, vocab, dim), gorgonia.WithName("w"))
	targets := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(rows),
		gorgonia.WithName("targets"))
	loss, err := op.LinearCrossEntropy(x, w, targets)
	if err != nil {
		return err
	}

	if _, err := gorgonia.Grad(loss, x, w); err != nil {
		return err
	}

	machine, err := cudaops.NewMachine(device, g, cudaops.WithParams(x, w),
		cudaops.WithOutputs(loss),
		cudaops.WithPrecision(cudaops.BFloat16), cudaops.WithStrict())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()

	if err := letTokens(random, vocab, targets); err != nil {
		return err
	}

	var times []time.Duration
	for i := range warmUp + 15 {
		start := time.Now()
		if _, err := computed(machine, loss); err != nil {
			return err
		}
		if i >= warmUp {
			times = append(times, time.Since(start))
		}
	}

	took, err := median(times)
	if err != nil {
		return err
	}

	// Bytes of the parameter, its bfloat16 copy, and the gradient, which is summed in float32.
	const operands = dim * (rows*(4+2+2) + vocab*(4+2+4))
	r := measured("linear_ce_fwdbwd_16384x2048x50304", took, 0, 6*rows*dim*vocab)
	r.ExtraGiB = rounded(float64(machine.Memory()-operands)/(1<<30), 3)
	return emit(r)
}

// normal returns a matrix of normal numbers with the given deviation. It repeats about a hundred
// thousand distinct numbers.
func normal(r *rand.Rand, deviation float64, rows, columns int) *tensor.Dense {
	x := make([]float32, rows*columns)
	n := min(len(x), 1<<17-1) // odd, so that rows differ
	for i := range x[:n] {
		x[i] = float32(deviation * r.NormFloat64())
	}
	for done := n; done < len(x); {
		done += copy(x[done:], x[:done])
	}
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
}

// profile profiles a step, writes its trace and prints its table.
func profile(m *cudaops.Machine, step func() error, path string) error {
	if err := m.StartProfile(); err != nil {
		return err
	}

	for range cudaops.ProfileSteps {
		if err := step(); err != nil {
			return err
		}
	}

	p, err := m.Profile()
	if err != nil {
		return err
	}

	f, err := os.Create(path)
	if err != nil {
		return err
	}

	fmt.Fprint(os.Stderr, p.Table())
	return errors.Join(p.WriteTrace(f), f.Close())
}

// traceFile returns the path of the trace of a training.
func (o options) traceFile(training string) string {
	trainings := 0
	for _, s := range sizes {
		for _, variants := range o.trainings(s) {
			trainings += len(variants)
		}
	}

	if trainings == 1 {
		return o.profile
	}

	extension := filepath.Ext(o.profile)
	return strings.TrimSuffix(o.profile, extension) + "-" + training + extension
}

func newOptimizer(muon bool) (optim.Optimizer, error) {
	if muon {
		return optim.NewMuon(optim.WithLR(0.002))
	}
	return optim.NewAdamW(optim.WithLR(3e-4))
}

// batches returns a function that gives a graph the next of a few random batches.
func (s size) batches(g *llm.Graph) func() error {
	random := rand.New(rand.NewPCG(1, 1))
	var drawn [4]data.Batch
	for i := range drawn {
		drawn[i] = data.Batch{Inputs: randomTokens(random, s.config.Vocab, g.IDs),
			Targets: randomTokens(random, s.config.Vocab, g.Targets)}
		if g.Answers != nil {
			drawn[i].Answers, drawn[i].Reference = make([]int, len(drawn[i].Inputs)), make([]float64, len(drawn[i].Inputs))
			for row := range drawn[i].Answers {
				drawn[i].Answers[row] = row * 8 * s.batch / len(drawn[i].Answers) // eight answers in each sequence
			}
		}
	}

	i := 0
	return func() error {
		i++
		return g.Let(drawn[i%len(drawn)])
	}
}

// computed runs the graph and returns the loss.
func computed(m *cudaops.Machine, loss *gorgonia.Node) (float64, error) {
	if err := m.RunAll(); err != nil {
		return 0, err
	}
	return value(m, loss)
}

func value(m *cudaops.Machine, loss *gorgonia.Node) (float64, error) {
	v, err := m.Value(loss)
	if err != nil {
		return 0, err
	}
	return float64(v.Data().(float32)), nil
}

// letTokens sets ids and targets to random tokens.
func letTokens(r *rand.Rand, vocab int, nodes ...*gorgonia.Node) error {
	for _, n := range nodes {
		x := randomTokens(r, vocab, n)
		if err := gorgonia.Let(n, tensor.New(tensor.WithShape(len(x)),
			tensor.WithBacking(x))); err != nil {
			return err
		}
	}
	return nil
}

// randomTokens returns random token ids as a value for a node.
func randomTokens(r *rand.Rand, vocab int, n *gorgonia.Node) []int {
	x := make([]int, n.Shape()[0])
	for i := range x {
		x[i] = r.IntN(vocab)
	}
	return x
}
