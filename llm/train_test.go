package llm

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// tiny returns a small model with grouped queries and a Kasmina layer after each block.
func tiny() Config {
	return Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12,
		Kasmina: []int{0, 1}, Seeds: 4}.Default()
}

type trainerOptions struct {
	config     Config
	dt         tensor.Dtype
	steps      int
	accumulate int
	optimizer  func() (optim.Optimizer, error)
	recompute  bool
	clip       *float64 // nil for 1
	dormant    bool     // all seeds stay dormant
	lattice    []state.Option
	kasmina    KasminaOptions
	frozen     bool
	directed   bool
}

func adamW() (optim.Optimizer, error) { return optim.NewAdamW(optim.WithLR(0.01)) }

func muon() (optim.Optimizer, error) { return optim.NewMuon(optim.WithAdamW(optim.WithLR(0.01))) }

// newTrainer returns a trainer for a new model with seeds in various stages.
func newTrainer(t testing.TB, o trainerOptions) *Trainer {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}

	if o.dt == (tensor.Dtype{}) {
		o.dt = tensor.Float32
	}

	if o.optimizer == nil {
		o.optimizer = adamW
	}

	m, err := NewModel(o.config, o.dt, 7, append(o.lattice, state.WithoutGates())...)
	fail(err)
	m.KasminaOptions = o.kasmina
	for layer, l := range m.Kasmina.Lattices() {
		if l.Site() != blueprints.Chunk || o.dormant {
			continue
		}
		kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
			blueprints.MLPExpansion}
		if o.config.SlotWidth > 0 {
			kinds = []blueprints.Kind{blueprints.LowRank,
				blueprints.ConvFilter, blueprints.ChunkMLP}
		}
		for seed := 1; seed < l.Seeds(); seed++ {
			fail(m.Germinate(layer, seed, state.GerminationRequest{Slot: seed,
				Kind:     kinds[(seed-1)%len(kinds)],
				Strategy: graft.FixedRamp{Ramp: graft.Cosine, Epochs: 5, Target: 1}}))
			fail(l.Transition(seed, state.Training))
			if seed > 1 {
				fail(l.Transition(seed, state.Grafting))
			}
		}
	}

	const batch = 3
	tokens := make([]int, 0, 5000)
	for _, b := range texttest.Words(3, 5000) {
		tokens = append(tokens, int(b))
	}

	var text data.Tokens = &idTokens{ids: tokens, tokenizer: "bytes",
		vocab: 256, fingerprint: "words"}
	if o.config.Documents {
		text = endedTokens{text, '\n'}
	}

	loader, err := data.NewLoader(text, data.LoaderConfig{Batch: batch, Seq: o.config.Seq, Seed: 5})
	fail(err)
	optimizer, err := o.optimizer()
	fail(err)
	clip := 1.0
	if o.clip != nil {
		clip = *o.clip
	}

	trainer, err := NewTrainer(m, loader, optimizer, TrainConfig{Steps: o.steps, Batch: batch,
		Accumulate: o.accumulate,
		Schedule:   optim.Constant(optimizer.LR()), Clip: clip, Epoch: 3, Recompute: o.recompute,
		Frozen: o.frozen, Directed: o.directed})
	fail(err)
	t.Cleanup(func() { trainer.Close() })
	return trainer
}

func TestTrainingLearns(t *testing.T) {
	for name, o := range map[string]trainerOptions{
		"adamw":   {config: tiny(), steps: 60},
		"muon":    {config: tiny(), steps: 60, optimizer: muon},
		"float64": {config: tiny(), steps: 60, dt: tensor.Float64},
		"untied": {config: func() Config {
			c := tiny()
			c.Untied = true
			return c
		}(), steps: 60},
		"no Kasmina": {config: Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2,
			Seq: 12}.Default(), steps: 60},
		"accumulate":    {config: tiny(), steps: 60, accumulate: 2},
		"recomputation": {config: tiny(), steps: 60, recompute: true},
	} {
		t.Run(name, func(t *testing.T) {
			trainer := newTrainer(t, o)
			var first float64
			trainer.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == 1 {
					first = e.Loss
				}
				return nil
			})
			if err := trainer.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
			if last := trainer.Last(); math.Abs(first-math.Log(256)) > 0.3 ||
				last.Loss > first-1.5 || last.Step != o.steps {
				t.Errorf("loss went from %.3f (chance is %.3f) to %.3f in %d steps", first,
					math.Log(256), last.Loss, last.Step)
			}
		})
	}
}

// TestAccumulation checks that two batches of three sequences give the same step as one batch of six.
func TestAccumulation(t *testing.T) {
	c := tiny()
	m, err := NewModel(c, tensor.Float64, 1)
	if err != nil {
		t.Fatal(err)
	}

	text := texttest.Words(9, 6*c.Seq+1)
	batch := func(lo, hi int) data.Batch {
		b := zeroBatch((hi - lo) * c.Seq)
		for i := range b.Inputs {
			b.Inputs[i], b.Targets[i] = int(text[lo*c.Seq+i]), int(text[lo*c.Seq+i+1])
		}
		return b
	}

	gradients := func(sequences int, opts ...GraphOption) []gorgonia.ValueGrad {
		g, err := m.Graph(ForTraining, sequences, opts...)
		if err != nil {
			t.Fatal(err)
		}
		machine := gorgonia.NewTapeMachine(g.G, gorgonia.BindDualValues(g.Params...))
		defer machine.Close()
		for lo := 0; lo < 6; lo += sequences {
			machine.Reset()
			if err := errors.Join(g.Let(batch(lo, lo+sequences)), machine.RunAll()); err != nil {
				t.Fatal(err)
			}
		}
		return gorgonia.NodesToValueGrads(g.Params)
	}

	whole, halves := gradients(6), gradients(3, withLossShare(2))
	for i, w := range whole {
		a, _ := w.Grad()
		b, _ := halves[i].Grad()
		for j, v := range a.Data().([]float64) {
			if d := math.Abs(v - b.Data().([]float64)[j]); d > 1e-12 {
				t.Fatalf("%s[%d]: %v in one batch, %v in two", m.Params[i].Name, j, v,
					b.Data().([]float64)[j])
			}
		}
	}
}

// TestEvaluationLeavesNoTrace checks that evaluating, sampling and saving do not affect a run, and that
// callbacks receive the events.
func TestEvaluationLeavesNoTrace(t *testing.T) {
	var got [2]*Trainer
	var kinds []EventKind
	dir := t.TempDir()
	for i := range got {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
		got[i] = tr
		if i == 1 {
			e, err := data.NewEvaluation(texttest.Words(4, 100), tokenizer.Bytes{},
				2, tr.Model.Config.Seq)
			if err != nil {
				t.Fatal(err)
			}
			tr.On(Evaluate(tr, e, 3), Checkpoint(tr, filepath.Join(dir, "m.safetensors"), 4),
				SampleText(tr, tokenizer.Bytes{}, "func ", 20, sampler.Config{Temperature: 1},
					filepath.Join(dir, "sub", "s.txt"), 0),
				func(e Event) error { kinds = append(kinds, e.Kind); return nil })
		}
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
	}

	checkSame(t, got[0], got[1])
	want := []EventKind{RunStart, Chosen, StepEnd, StepEnd, EpochEnd, EvalEnd,
		StepEnd, Saved, StepEnd,
		StepEnd, EpochEnd, EvalEnd, Saved, Sampled, StepEnd, RunEnd}
	if !slices.Equal(kinds, want) {
		t.Errorf("events %v, want %v", kinds, want)
	}

	last := got[1].Last()
	if !(last.ValBPB > 0 && last.ValBPB < 8.5) ||
		math.Abs(last.ValLoss/math.Ln2-last.ValBPB) > 1e-9 {
		t.Errorf("validation loss %v nats, %v bits per byte", last.ValLoss, last.ValBPB)
	}

	if text, err := os.ReadFile(filepath.Join(dir, "sub", "s.txt")); err != nil ||
		len(text) != 25 || !strings.HasPrefix(string(text), "func ") {
		t.Errorf("sample %q, %v", text, err)
	}
}

// checkSame checks that every parameter, every seed and the whole optimizer state of two trainers are
// bit-identical.
func checkSame(t *testing.T, a, b *Trainer) {
	t.Helper()
	for i, p := range a.Model.Params {
		if !slices.Equal(bitsOf(p.Value), bitsOf(b.Model.Params[i].Value)) {
			t.Errorf("parameter %s differs", p.Name)
		}
	}

	for i, l := range a.Model.Kasmina.Lattices() {
		x, y := l.Arrays(), b.Model.Kasmina.Lattice(i).Arrays()
		if len(x) != len(y) || len(x) < 10 {
			t.Errorf("lattice %d has %d arrays, and %d", i, len(x), len(y))
			continue
		}
		for j := range x {
			if x[j].Name != y[j].Name || !sameBits(x[j].Data, y[j].Data) {
				t.Errorf("lattice %d: %s and %s differ: %v, %v", i, x[j].Name,
					y[j].Name, x[j].Data, y[j].Data)
			}
		}
	}

	x, y := a.Optimizer.State(), b.Optimizer.State()
	if len(x) != len(y) || len(x) == 0 {
		t.Fatalf("the optimizer state has %d tensors, and %d", len(x), len(y))
	}

	for i := range x {
		if x[i].Name != y[i].Name || !sameBits(x[i].Data, y[i].Data) {
			t.Errorf("optimizer's %s and %s differ", x[i].Name, y[i].Name)
		}
	}

	if a.Loader.State() != b.Loader.State() || a.Step() != b.Step() {
		t.Errorf("loaders at %+v and %+v, steps %d and %d", a.Loader.State(),
			b.Loader.State(), a.Step(), b.Step())
	}
}

func bitsOf(d *tensor.Dense) []uint64 {
	var bits []uint64
	switch x := d.Data().(type) {
	case []float32:
		for _, v := range x {
			bits = append(bits, uint64(math.Float32bits(v)))
		}
	case []float64:
		for _, v := range x {
			bits = append(bits, math.Float64bits(v))
		}
	}

	return bits
}

// sameBits compares slices element by element; NaNs are compared by their bits.
func sameBits(a, b any) bool {
	switch x := a.(type) {
	case []float32:
		y, ok := b.([]float32)
		return ok && slices.EqualFunc(x, y, func(p, q float32) bool {
			return math.Float32bits(p) == math.Float32bits(q)
		})
	case []float64:
		y, ok := b.([]float64)
		return ok && slices.EqualFunc(x, y, func(p, q float64) bool {
			return math.Float64bits(p) == math.Float64bits(q)
		})
	case []uint8:
		y, ok := b.([]uint8)
		return ok && slices.Equal(x, y)
	case []uint16:
		y, ok := b.([]uint16)
		return ok && slices.Equal(x, y)
	case []uint32:
		y, ok := b.([]uint32)
		return ok && slices.Equal(x, y)
	case []uint64:
		y, ok := b.([]uint64)
		return ok && slices.Equal(x, y)
	case []int64:
		y, ok := b.([]int64)
		return ok && slices.Equal(x, y)
	}

	return false
}

// TestNaN sets a parameter to NaN during a run. Training must stop with an error that names the step and
// the parameter, and keep the parameters and the checkpoint of the last good step.
func TestNaN(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	const poisoned = "model.layers.1.mlp.up_proj.weight"
	tr.On(Checkpoint(tr, path, 4), func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			tr.Model.Param(poisoned).Float32s()[17] = float32(math.NaN())
		}
		return nil
	})

	err := tr.Run(context.Background())
	if !errors.Is(err, ErrDiverged) {
		t.Fatalf("got %v, want ErrDiverged", err)
	}

	for _, word := range []string{"step 6", poisoned, "value", "NaN", "checkpoint"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}

	if tr.Step() != 5 {
		t.Errorf("the trainer is at step %d, want 5", tr.Step())
	}

	again := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	if err := again.Resume(t.Context(), path); err != nil || again.Step() != 4 {
		t.Errorf("the checkpoint of step 4 gives step %d, %v", again.Step(), err)
	}

	if err := again.Run(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestNaNInGradient makes only a gradient infinite, as an infinite activation can do while the loss stays
// finite.
func TestNaNInGradient(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	before := bitsOf(tr.Model.Params[0].Value)
	b, err := tr.Loader.Next()
	if err != nil {
		t.Fatal(err)
	}

	if _, err := tr.driver.engine.Gradients(b); err != nil { // allocates the gradients, without a step
		t.Fatal(err)
	}

	g, err := tr.driver.engine.(*cpuEngine).ValueGrads()[3].Grad()
	if err != nil {
		t.Fatal(err)
	}

	g.Data().([]float32)[0] = float32(math.Inf(1))
	err = tr.Run(context.Background())
	if !errors.Is(err, ErrDiverged) || !strings.Contains(err.Error(), tr.Model.Params[3].Name) ||
		!strings.Contains(err.Error(), "gradient") {
		t.Fatalf("got %v, want ErrDiverged in the gradient of %s", err, tr.Model.Params[3].Name)
	}

	if !slices.Equal(bitsOf(tr.Model.Params[0].Value), before) {
		t.Error("the step that failed has changed parameters")
	}
}

func TestInterrupt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	ctx, cancel := context.WithCancel(context.Background())
	tr.On(Checkpoint(tr, path, 0), func(e Event) error {
		if e.Kind == StepEnd && e.Step == 3 {
			cancel()
		}
		return nil
	})

	if err := tr.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}

	again := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	if err := again.Resume(t.Context(), path); err != nil || again.Step() != 3 {
		t.Errorf("resumed at step %d, %v, want 3", again.Step(), err)
	}
}

// TestInterruptBetweenCallbacks cancels the context at the end of a step, before the callbacks that take
// time. These must skip their work, later callbacks must still receive the event, the state must be
// saved, and Run must return an error.
func TestInterruptBetweenCallbacks(t *testing.T) {
	for _, at := range []int{3, 6} { // during the run and at its last step
		dir := t.TempDir()
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
		ctx, cancel := context.WithCancel(context.Background())
		var kinds []EventKind
		tr.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == at {
				cancel()
			}
			return nil
		}, Evaluate(tr, heldOut(t, 100, 2), at), SampleText(tr, tokenizer.Bytes{}, "x", 5,
			sampler.Config{}, filepath.Join(dir, "s"), at),
			func(e Event) error {
				if e.Step == at {
					kinds = append(kinds, e.Kind)
				}
				return nil
			}, Checkpoint(tr, filepath.Join(dir, "m"), 0))
		if err := tr.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("step %d: got %v, want context.Canceled", at, err)
		}
		want := []EventKind{EpochEnd, StepEnd, Interrupted, Saved, RunEnd}
		if at == 6 {
			want = []EventKind{EpochEnd, StepEnd, Saved, Interrupted, Saved, RunEnd}
		}
		if !slices.Equal(kinds, want) {
			t.Errorf("step %d: events %v, want %v", at, kinds, want)
		}
		if _, err := os.Stat(filepath.Join(dir, "s")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a sample was written after the interrupt: %v", err)
		}
		again := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
		if err := again.Resume(t.Context(), filepath.Join(dir, "m")); err != nil ||
			again.Step() != at {
			t.Errorf("resumed at step %d, %v, want %d", again.Step(), err, at)
		}
	}
}

// TestRunEndReachesAll checks that every callback receives RunEnd and Interrupted, even if an earlier one
// fails.
func TestRunEndReachesAll(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	first, second := errors.New("first"), errors.New("second")
	seen := 0
	tr.On(func(e Event) error {
		if e.Kind == RunEnd || e.Kind == Interrupted {
			return first
		}
		return nil
	}, func(e Event) error {
		if e.Kind == RunEnd || e.Kind == Interrupted {
			seen++
			return second
		}
		return nil
	})

	if err := tr.Run(ctx); seen != 2 || !errors.Is(err, first) || !errors.Is(err, second) ||
		!errors.Is(err, context.Canceled) {
		t.Errorf("the second callback saw %d of 2 events, and the run returned %v", seen, err)
	}
}

// TestRunTokens checks that RunTokens counts only the tokens of the current call of Run.
func TestRunTokens(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 5, accumulate: 2})
	stop := errors.New("stop")
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 3 {
			return stop
		}
		return nil
	})

	for _, steps := range []int64{3, 2} {
		if err := tr.Run(context.Background()); err != nil && !errors.Is(err, stop) {
			t.Fatal(err)
		}
		if got, want := tr.Last().RunTokens, steps*3*12*2; got != want {
			t.Errorf("%d tokens in %d steps of 2 batches of 3 sequences of 12, want %d", got, steps,
				want)
		}
	}
}

// TestEpochs checks that an epoch of the lattices takes Config.Epoch steps.
func TestEpochs(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	tr.On(func(e Event) error {
		if got, want := tr.Model.Kasmina.Lattice(0).Epoch(),
			e.Step/3; e.Kind == StepEnd && got != want {
			t.Errorf("after step %d, %d epochs have ended, want %d", e.Step, got, want)
		}
		return nil
	})

	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// normSpy is an optimizer that records the norms of the gradients it receives, separately for the model's
// own parameters and for blueprints.
type normSpy struct {
	optim.Optimizer
	norm, seeds float64
}

func (s *normSpy) Step(model []gorgonia.ValueGrad) (err error) {
	var groups [2][]gorgonia.ValueGrad
	for _, p := range model {
		i := 0
		if strings.Contains(p.(interface{ Name() string }).Name(), "kasmina") {
			i = 1
		}
		groups[i] = append(groups[i], p)
	}

	if s.norm, err = autodiff.GlobalNorm(groups[0]); err != nil {
		return err
	}

	if s.seeds, err = autodiff.GlobalNorm(groups[1]); err != nil {
		return err
	}

	return s.Optimizer.Step(model)
}

// TestClip checks that the gradients passed to the optimizer have at most the norm Clip, separately for
// blueprints and for the rest, and that events report the norm before clipping.
func TestClip(t *testing.T) {
	for _, clip := range []float64{0.01, 1e6, 0} {
		s := &normSpy{}
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 3, clip: &clip,
			optimizer: func() (_ optim.Optimizer, err error) {
				s.Optimizer, err = adamW()
				return s, err
			}})
		tr.On(func(e Event) error {
			if e.Kind != StepEnd {
				return nil
			}
			want := e.GradNorm
			if clip > 0 {
				want = min(want, clip)
			}
			if e.GradNorm < 0.1 || math.Abs(s.norm-want) > 1e-4*want {
				t.Errorf("Clip %v: a gradient of norm %v became one of %v, want %v", clip,
					e.GradNorm, s.norm, want)
			}
			if clip == 0.01 {
				require.InEpsilon(t, clip, s.seeds, 1e-3)
			} else {
				require.Greater(t, s.seeds, 0.1)
			}
			return nil
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEvaluateCountsTargets checks that the score does not depend on how the text is divided into
// batches.
func TestEvaluateCountsTargets(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 20, dt: tensor.Float64})
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	want, _, err := tr.Evaluate(heldOut(t, 12*4+5, 1))
	if err != nil {
		t.Fatal(err)
	}

	for _, batch := range []int{2, 3, 7} {
		if got, _, err := tr.Evaluate(heldOut(t, 12*4+5, batch)); err != nil ||
			math.Abs(got-want) > 1e-12*want {
			t.Errorf("in batches of %d: %v nats per token, %v, want %v", batch, got, err, want)
		}
	}
}

// TestQuickEvaluation checks that the quick text is scored before the last step, and the whole text at
// the last step.
func TestQuickEvaluation(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	whole, quick := heldOut(t, 100, 2), heldOut(t, 50, 2)
	scored := 0
	tr.On(Evaluate(tr, whole, 2, WithQuick(quick)), func(e Event) error {
		if e.Kind != EvalEnd {
			return nil
		}
		scored++
		text := whole
		if e.Step < 4 {
			text = quick
		}
		if want, _, err := tr.Evaluate(text); err != nil || e.ValLoss != want {
			t.Errorf("step %d: loss %v, want %v, %v", e.Step, e.ValLoss, want, err)
		}
		return nil
	})

	if err := tr.Run(context.Background()); err != nil || scored != 2 {
		t.Errorf("%d evaluations, want 2; %v", scored, err)
	}
}

// TestConfigReachesTheModel checks that the loss depends on fields that do not affect any shape.
func TestConfigReachesTheModel(t *testing.T) {
	loss := func(change func(*Config)) float64 {
		c := tiny()
		c.Seq = 12
		change(&c)
		tr := newTrainer(t, trainerOptions{config: c, steps: 30, dt: tensor.Float64})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		return tr.Last().Loss
	}

	usual := loss(func(*Config) {})
	for name, change := range map[string]func(*Config){"Base": func(c *Config) { c.Base = 10 }, "Eps": func(c *Config) { c.Eps = 0.1 }} {
		if got := loss(change); math.Abs(got-usual) < 1e-9 {
			t.Errorf("another %s gives the loss %v all the same", name, got)
		}
	}
}

// TestGerminateErrors checks that a rejected request changes neither the seed nor the slot.
func TestGerminateErrors(t *testing.T) {
	m, err := NewModel(tiny(), tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}

	w := m.Param(blockPrefix(0) + kasminaWeights).Float32s()
	w[2*4] = 7
	if err := m.Germinate(0, 1, state.GerminationRequest{Slot: 1}); err != nil {
		t.Fatal(err)
	}

	before, seeds := slices.Clone(w), m.Kasmina.Lattice(0).Report().Seeds
	for name, c := range map[string]struct {
		seed int
		r    state.GerminationRequest
	}{
		"slot 0":          {0, state.GerminationRequest{Slot: 0}},
		"a slot too many": {0, state.GerminationRequest{Slot: 5}},
		"an unknown kind": {0, state.GerminationRequest{Slot: 2, Kind: 200}},
		"a seed too many": {4, state.GerminationRequest{Slot: 2}},
		"a seed in use":   {1, state.GerminationRequest{Slot: 2}},
		"a ramp of 0":     {0, state.GerminationRequest{Slot: 2, Strategy: graft.FixedRamp{}}},
		"a negative slot": {0, state.GerminationRequest{Slot: -1}},
	} {
		if err := m.Germinate(0, c.seed, c.r); err == nil ||
			!strings.Contains(err.Error(), "layer 0") {
			t.Errorf("%s: got %v", name, err)
		}
		if !slices.Equal(w, before) || !slices.Equal(m.Kasmina.Lattice(0).Report().Seeds, seeds) {
			t.Errorf("%s: the refused request changed something", name)
		}
	}
}

func TestNewModelWithOtherSlots(t *testing.T) {
	if _, err := NewModel(tiny(), tensor.Float32, 1, state.WithSlots(100)); err == nil ||
		!strings.Contains(err.Error(), "100 slots, want Config.Slots, 5") {
		t.Errorf("got %v", err)
	}
}

func TestCallbackError(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	full := errors.New("disk full")
	ended := false
	tr.On(func(e Event) error {
		if e.Kind == RunEnd {
			ended = errors.Is(e.Err, full)
			return nil
		}
		if e.Step == 2 {
			return full
		}
		return nil
	})

	if err := tr.Run(context.Background()); !errors.Is(err, full) || tr.Step() != 2 || !ended {
		t.Errorf("got %v at step %d, RunEnd seen with it: %v", err, tr.Step(), ended)
	}
}

// TestGenerateWindow checks that a token depends only on the tokens in the window, and that a long prompt
// is truncated at the start.
func TestGenerateWindow(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	g, err := NewGenerator(tr.Model)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()

	draw := func(prompt []int) []int {
		s, err := sampler.New(sampler.Config{Temperature: 1, Seed: 3})
		if err != nil {
			t.Fatal(err)
		}
		out, err := collect(g.Generate(t.Context(), prompt, 9, s))
		if err != nil {
			t.Fatal(err)
		}
		return out
	}

	long := tokenizer.Bytes{}.Encode(texttest.Words(8, 30))
	if a, b := draw(long), draw(long[30-tr.Model.Config.Seq:]); !slices.Equal(a, b) {
		t.Errorf("%v after the whole prompt, %v after what fits the window", a, b)
	}

	if a, b := draw(long[:3]), draw(long[:3]); !slices.Equal(a, b) || len(a) != 9 {
		t.Errorf("%v and %v from the same seed, want 9 tokens", a, b)
	}
}

// TestCheckpointPlace checks that an unwritable checkpoint path fails the run before its first step, and
// that checking a writable one creates no stray files.
func TestCheckpointPlace(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	for path, want := range map[string]string{
		filepath.Join(file, "c"):                 "file",
		t.TempDir():                              "is a folder",
		"":                                       `the path is ""`,
		filepath.Join(dir, "new", "folder", "c"): "",
	} {
		trainer := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
		trainer.On(Checkpoint(trainer, path, 0))
		err := trainer.Run(context.Background())
		if want == "" {
			if files, _ := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
				t.Errorf("%v, and %v is left", err, files)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) || trainer.Step() != 0 {
			t.Errorf("%s: %v after %d steps, want an error with %q before the first", path,
				err, trainer.Step(), want)
		}
	}
}
