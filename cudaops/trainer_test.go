package cudaops_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/opbench"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// withoutStep hides the engine's Step method, so that it is not an llm.Stepper.
type withoutStep struct{ llm.Engine }

// countingEngine is an engine that counts calls of Step.
type countingEngine struct {
	llm.Stepper
	steps int
}

func (w *countingEngine) Step(b data.Batch) (loss, norm float64, err error) {
	w.steps++
	return w.Stepper.Step(b)
}

// failingTokens is a token source with one read that fails.
type failingTokens struct {
	data.Tokens
	left int // number of the read that fails, counting down
}

var errReadFailed = errors.New("the disk is gone")

func (s *failingTokens) ReadTokens(dst []int, offset int64) error {
	if s.left--; s.left == 0 {
		return errReadFailed
	}
	return s.Tokens.ReadTokens(dst, offset)
}

// scenario is a training run and the events in it.
type scenario struct {
	accumulate int
	fails      int // number of the read that fails; 0 for none
	want       error
	says       string
	model      func(*llm.Model) // changes the model before the trainer is made
	prepare    func(r *run)
	event      func(r *run, e llm.Event) error
}

// run is a trainer in a scenario, with a log of its behavior.
type run struct {
	*llm.Trainer
	t      *testing.T
	cancel context.CancelFunc
	folder string
	log    []string
}

// record adds a line to the log. Everything in the log must be independent of the engine.
func (r *run) record(format string, args ...any) {
	r.log = append(r.log, fmt.Sprintf(format, args...))
}

func (r *run) lattice() *state.Lattice { return r.Model.Kasmina.Lattice(0) }

func check(t *testing.T, errs ...error) {
	t.Helper()
	require.NoError(t, errors.Join(errs...))
}

const batch = 2

// newRun returns a small model, and a loader and an optimizer to train it on a text that newRun writes to
// path. If fails is not 0, the read with this number fails.
func newRun(t *testing.T, path string, fails int) (*llm.Model, *data.Loader, optim.Optimizer) {
	t.Helper()
	config := llm.Config{Vocab: 256, Dim: 8, Layers: 1, Heads: 2, KVHeads: 1, FF: 12, Seq: 6,
		Kasmina: []int{0}, Seeds: 4}.Default()
	model, err := llm.NewModel(config, tensor.Float32, 5, state.WithoutGates())
	check(t, err)
	text := []byte(strings.Repeat(strings.Repeat("if err != nil { return err }\n", 2)+"Z := 1\n",
		15))
	check(t, os.WriteFile(path, text, 0o666))
	corpus, err := data.Open(path)
	check(t, err)
	tokens, err := data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{})
	check(t, err)
	loader, err := data.NewLoader(&failingTokens{tokens, fails}, data.LoaderConfig{Batch: batch,
		Seq: config.Seq, Seed: 1})
	check(t, err)
	optimizer, err := optim.NewAdamW(optim.WithLR(0.01))
	check(t, err)
	return model, loader, optimizer
}

// train runs a scenario on a fake device. If ahead is true, the engine performs each step in one call.
func (s scenario) train(t *testing.T, oneCall bool) (r *run, steps int) {
	t.Helper()
	r = &run{t: t, folder: t.TempDir()}
	model, loader, optimizer := newRun(t, filepath.Join(r.folder, "text"), s.fails)
	if s.model != nil {
		s.model(model)
	}

	device := cudaops.OpenFake(t)
	newEngine := engine.Engine(device, cudaops.Float32)
	var seen *countingEngine
	c := llm.TrainConfig{Steps: 12, Batch: batch, Accumulate: max(1, s.accumulate), Clip: 1,
		Epoch:    5,
		Schedule: func(step int) float64 { return 0.001 * float64(1+step) }}
	c.Engine = func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		e, err := newEngine(m, o, c)
		if err != nil || !oneCall {
			return withoutStep{e}, err
		}
		seen = &countingEngine{Stepper: e.(llm.Stepper)}
		return seen, nil
	}

	var err error
	r.Trainer, err = llm.NewTrainer(model, loader, optimizer, c)
	check(t, err)
	for seed, to := range map[int]state.Stage{1: state.Grafting, 2: state.Training} {
		check(t, model.Germinate(0, seed, state.GerminationRequest{Slot: seed,
			Kind: blueprints.AttentionGate}), r.lattice().Transition(seed, state.Training))
		if to == state.Grafting {
			check(t, r.lattice().Transition(seed, to), r.lattice().SetAlpha(seed, 0.5))
		}
	}

	if s.prepare != nil {
		s.prepare(r)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.cancel = cancel
	r.On(func(e llm.Event) error {
		r.record("%d: step %d, loss %x, norm %x, rate %x, held-out loss %x, loader %+v", e.Kind,
			e.Step, e.Loss, e.GradNorm, e.LearningRate,
			e.ValLoss, r.Loader.State())
		b, err := r.lattice().MarshalBinary()
		r.record("lattice %x", b)
		if err != nil || s.event == nil {
			return err
		}
		return s.event(r, e)
	})

	if err := r.Run(ctx); !errors.Is(err, s.want) || (err == nil) != (s.want == nil) ||
		!strings.Contains(fmt.Sprint(err), s.says) {
		t.Errorf("the run ends with %v, want %v", err, s.want)
	} else {
		r.record("the run ends with %v", err)
	}

	r.finish()
	if seen != nil {
		steps = seen.steps
	}

	return r, steps
}

// finish records the state at the end of the run.
func (r *run) finish() {
	r.t.Helper()
	r.record("loader %+v, rate %x", r.Loader.State(), r.Optimizer.LR())
	check(r.t, r.Close())
	for _, p := range r.Model.Params {
		r.record("%s %x", p.Name, p.Value.Float32s())
	}

	for _, s := range r.Optimizer.State() {
		r.record("%s %x", s.Name, s.Data)
	}

	b, err := r.lattice().MarshalBinary()
	check(r.t, err)
	r.record("lattice %x", b)
	files, err := filepath.Glob(filepath.Join(r.folder, "*.safetensors"))
	check(r.t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		check(r.t, err)
		r.record("%s %x", filepath.Base(f), b)
	}
}

// overflowAt sets a model's weights so that the loss is finite, but gradients of batches with the given
// token are infinite. In silu(gate) ⊙ up, gate is 0, and up is so large for this token alone that its
// product with the gradient from down overflows.
func overflowAt(token int) func(*llm.Model) {
	return func(m *llm.Model) {
		of := func(name string) (x []float32, columns int) {
			p := m.Param(name)
			return p.Float32s(), p.Shape()[1]
		}
		embed, dim := of("model.embed_tokens.weight")
		for i := 0; i < len(embed); i += dim {
			embed[i] = 0
		}
		embed[token*dim] = 1
		o, _ := of("model.layers.0.self_attn.o_proj.weight")
		clear(o[:dim])
		gate, _ := of("model.layers.0.mlp.gate_proj.weight")
		clear(gate)
		up, _ := of("model.layers.0.mlp.up_proj.weight")
		clear(up)
		for i := 0; i < len(up); i += dim {
			up[i] = 1e38
		}
		down, _ := of("model.layers.0.mlp.down_proj.weight")
		for i := range down {
			down[i] = 1e5
		}
	}
}

// TestTrainerSteps checks that a trainer behaves the same, bit for bit, whether its engine performs a
// step in one call or in several calls with waits between them, whatever happens in the run.
func TestTrainerSteps(t *testing.T) {
	after := func(step int, f func(r *run) error) func(*run, llm.Event) error {
		return func(r *run, e llm.Event) error {
			if e.Kind != llm.StepEnd || e.Step != step {
				return nil
			}
			return f(r)
		}
	}

	explode := func(r *run) {
		r.Config.Schedule = func(step int) float64 { return []float64{0.001, 1e30}[min(step/2, 1)] }
	}
	errCallback := errors.New("the callback fails")
	freeze := func(r *run) { r.Config.Schedule = optim.Constant(0) }
	scenarios := map[string]scenario{
		"plain":    {},
		"gathered": {accumulate: 3},
		"a seed that changes": {event: after(3, func(r *run) error {
			return r.lattice().SetAlpha(1, 0.75)
		})},
		"a command": {event: after(3, func(r *run) error {
			r.Model.Kasmina.Submit(state.Command{Action: state.Germinate, Seed: 3,
				Request: state.GerminationRequest{Slot: 3, Kind: blueprints.MLPExpansion}})
			return nil
		})},
		"sampled telemetry": {prepare: func(r *run) {
			check(r.t, r.lattice().SetTelemetry(state.Telemetry{Mode: state.Sampling, Every: 2}))
		}},
		"a loader that moves": {event: after(3, func(r *run) error {
			s := r.Loader.State()
			s.Next = 0
			return r.Loader.SetState(s)
		})},
		"evaluations, samples and checkpoints": {prepare: func(r *run) {
			text, err := data.NewEvaluation([]byte("if x := y(); x != nil {\n"),
				tokenizer.Bytes{}, 2, 6)
			check(r.t, err)
			r.On(llm.Evaluate(r.Trainer, text, 2), llm.SampleText(r.Trainer, tokenizer.Bytes{},
				"if", 5, sampler.Config{}, "", 3),
				llm.Checkpoint(r.Trainer, filepath.Join(r.folder, "a.safetensors"), 4))
			r.On(func(e llm.Event) error {
				if e.Kind == llm.Saved || e.Kind == llm.Sampled {
					b, err := os.ReadFile(e.Path)
					r.record("%s %x %v", e.Text, b, err != nil)
				}
				return nil
			})
		}},
		"cancelled": {want: context.Canceled, prepare: func(r *run) {
			r.On(llm.Checkpoint(r.Trainer, filepath.Join(r.folder, "a.safetensors"), 0))
		}, event: after(6, func(r *run) error { r.cancel(); return nil })},
		"a callback that fails": {want: errCallback, event: after(4, func(*run) error {
			return errCallback
		})},
		"a batch that cannot be read": {want: errReadFailed,
			fails: 2*6 + 1, says: "step 7: "},
		"gathered batches that cannot be read": {want: errReadFailed, accumulate: 2, fails: 4*3 + 3},
		"a loss that is not finite": {want: llm.ErrDiverged, prepare: explode,
			says: "step 4: training diverged: the loss is NaN"},
		"gathered ones": {want: llm.ErrDiverged, prepare: explode, accumulate: 2},
		"gradients that overflow": {want: llm.ErrDiverged, model: overflowAt('Z'), prepare: freeze,
			says: "the gradient norm is not finite: the first gradient that is not finite is in " +
				"parameter"},
		"gathered gradients of which the first overflow": {want: llm.ErrDiverged,
			model: overflowAt('Z'), prepare: freeze, accumulate: 4,
			says: "the gradient norm is not finite: the first gradient that is not finite is in " +
				"parameter"},
	}

	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			want, _ := s.train(t, false)
			got, steps := s.train(t, true)
			require.NotZero(t, steps, want.log)
			for i, line := range want.log {
				if i >= len(got.log) || strings.ReplaceAll(got.log[i], got.folder,
					"") != strings.ReplaceAll(line, want.folder, "") {
					t.Fatalf("line %d of %d and %d: got %.300q, want %.300q", i, len(got.log),
						len(want.log),
						slices.Concat(got.log, []string{"nothing"})[min(i, len(got.log))], line)
				}
			}
		})
	}
}

// TestTrainersInTurn checks that two trainers with the same model, loader and optimizer together train as
// one trainer would alone. The other trainer may also evaluate the model in the middle of a run.
func TestTrainersInTurn(t *testing.T) {
	device := cudaops.OpenFake(t)
	for name, engine := range map[string]func(*llm.Model, optim.Optimizer,
		llm.TrainConfig) (llm.Engine, error){
		"cpu":  nil,
		"cuda": engine.Engine(device, cudaops.Float32),
	} {
		turns := func(order ...int) []string {
			r := &run{t: t, folder: t.TempDir()}
			model, loader, optimizer := newRun(t, filepath.Join(r.folder, "text"), 0)
			held, err := data.NewEvaluation([]byte("if err == nil"),
				tokenizer.Bytes{}, 1, model.Config.Seq)
			check(t, err)
			var all [2]*llm.Trainer
			for i := range all {
				all[i], err = llm.NewTrainer(model, loader, optimizer,
					llm.TrainConfig{Steps: 100, Batch: batch, Clip: 1, Epoch: 100,
						Schedule: optim.Constant(0.01), Engine: engine})
				check(t, err)
			}
			for _, i := range order {
				ctx, cancel := context.WithCancel(t.Context())
				all[i].On(func(e llm.Event) error {
					if e.Kind != llm.StepEnd || ctx.Err() != nil {
						return nil
					}
					loss, _, err := all[order[1]].Evaluate(held)
					if e.Step%3 == 0 {
						cancel()
					}
					r.record("loss %x, held-out loss %x", e.Loss, loss)
					return err
				})
				require.ErrorIs(t, all[i].Run(ctx), context.Canceled, name)
			}
			check(t, all[1].Close())
			r.Trainer = all[0]
			r.finish()
			return r.log
		}
		want, got := turns(0, 0, 0), turns(0, 1, 0)
		for i := range want {
			require.Equal(t, got[i], want[i], name)
		}
	}
}

// TestTrainerLogsVariants checks that the log of a run on a GPU lists the variants of its ops.
func TestTrainerLogsVariants(t *testing.T) {
	device := cudaops.OpenFake(t)
	folder := t.TempDir()
	model, loader, optimizer := newRun(t, filepath.Join(folder, "text"), 0)
	c := llm.TrainConfig{Steps: 2, Batch: batch, Epoch: 5, Schedule: optim.Constant(0),
		Engine: engine.Engine(device, cudaops.Float32)}
	tr, err := llm.NewTrainer(model, loader, optimizer, c)
	check(t, err)
	defer tr.Close()
	var chosen [][]optime.Choice
	tr.On(runlog.JSON(filepath.Join(folder, "log.jsonl")), func(e llm.Event) error {
		if e.Kind == llm.Chosen {
			chosen = append(chosen, e.Choices)
		}
		return nil
	})

	check(t, tr.Run(t.Context()))
	log, err := os.ReadFile(filepath.Join(folder, "log.jsonl"))
	check(t, err)
	if len(chosen) != 1 || len(chosen[0]) == 0 || strings.Count(string(log),
		`"source":"rule"`) != len(chosen[0]) {
		t.Errorf("got choices %v\n%s", chosen, log)
	}
}

// TestTrainerOwnKind compares the losses on a GPU and on a CPU while a seed of a registered kind
// germinates, trains, grafts and is rolled back.
func TestTrainerOwnKind(t *testing.T) {
	kind, err := cudaops.OwnKind()
	require.NoError(t, err)
	life := map[int][]state.Command{
		2: {{Action: state.Germinate, Request: state.GerminationRequest{Slot: 3, Kind: kind}},
			{Action: state.Move, To: state.Training}},
		5: {{Action: state.Move, To: state.Grafting}, {Action: state.SetAlpha, Alpha: 0.75}},
		8: {{Action: state.Move, To: state.RolledBack}},
	}

	losses := func(engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
		error)) (all []float64) {
		model, loader, optimizer := newRun(t, filepath.Join(t.TempDir(), "text"), 0)
		c := llm.TrainConfig{Steps: 12, Batch: batch, Clip: 1, Epoch: 5,
			Schedule: optim.Constant(0.02), Engine: engine}
		tr, err := llm.NewTrainer(model, loader, optimizer, c)
		require.NoError(t, err)
		tr.On(func(e llm.Event) error {
			if e.Kind != llm.StepEnd {
				return nil
			}
			all = append(all, e.Loss)
			var commands []state.Command
			for _, command := range life[e.Step] {
				command.Seed = 3
				commands = append(commands, command)
			}
			return model.Kasmina.Do(commands...)
		})
		require.NoError(t, tr.Run(t.Context()))
		require.NoError(t, tr.Close())
		return all
	}

	device := cudaops.OpenFake(t)
	want, got := losses(nil), losses(engine.Engine(device, cudaops.Float32))
	require.InDeltaSlice(t, want, got, 1e-4)
	require.Len(t, got, 12)
}

// TestOpBench checks that opbench times ops on a GPU as well as the CPU, with the same results.
func TestOpBench(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	device := cudaops.OpenFake(t)
	for _, o := range opcase.All {
		if o.Bench == nil {
			continue
		}
		op := o.Name
		figures, err := opbench.Time(op, o.Bench.Small, opbench.Float32, opbench.OnGPU(device),
			opbench.WithSpan(0))
		require.NoError(t, err, op)
		n := 0
		for _, f := range figures {
			if f.Peer != "cuda" {
				continue
			}
			n++
			require.NoError(t, f.Err, op)
			require.Positive(t, f.Forward, op)
			require.GreaterOrEqual(t, f.Training, f.Forward, op)
			require.Less(t, f.Distance, 1e-5, "%s\n%s", op, opbench.Table(figures))
		}
		require.NotZero(t, n, op)
		t.Logf("%s\n%s", op, opbench.Table(figures))
	}

	figures, err := opbench.Time("Add", []int{8, 16}, opbench.Float64, opbench.OnGPU(device),
		opbench.WithSpan(0))
	require.NoError(t, err)
	require.ErrorContains(t, figures[len(figures)-2].Err, "a GPU does not support float64")
}

// families maps published model families to their traits.
var families = map[string]llm.Traits{
	"Llama 3.1": {Scaling: op.RoPEScaling{Factor: 8, LowFreq: 1, HighFreq: 4, Original: 16}},
	"Qwen2": {QKVBias: true, Scaling: op.RoPEScaling{Factor: 4, BetaFast: 32,
		BetaSlow: 1, Original: 16},
		Blocks: []llm.Block{{}, {Window: 5}}},
	"Qwen3":   {QKNorm: true},
	"Mistral": {Blocks: []llm.Block{{Window: 7}}},
	"SmolLM3": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
	"Gemma 3": {QKNorm: true, NormPlusOne: true, PostNorms: true, GELU: true,
		EmbedScale: 4, AttentionScale: 0.3,
		Blocks: []llm.Block{{Window: 5, Base: 100}, {}}},
	"OLMo 2": {QKNorm: true, WideQKNorm: true, PostNorms: true, NoPreNorms: true},
	"GPT-2": {LayerNorm: true, GELU: true, PlainMLP: true, QKVBias: true, OutBias: true,
		MLPBias: true, Positions: 14, Blocks: []llm.Block{{NoRoPE: true}}},
}

// TestFamilies trains models with the traits of each family for several steps, and compares the losses
// with a CPU. Some models have documents or recomputed blocks. No op may run on the host.
func TestFamilies(t *testing.T) {
	for name, traits := range families {
		for variant := range 3 {
			t.Run(fmt.Sprint(name, variant), func(t *testing.T) {
				c := llm.Config{Vocab: 19, Dim: 12, Layers: 2, Heads: 4, KVHeads: 2,
					HeadDim: 4, FF: 10, Seq: 12,
					Documents: variant > 0, Traits: traits}.Default()
				device := cudaops.OpenFake(t)
				want := familyLosses(t, c, variant == 2, llm.CPUEngine())
				got := familyLosses(t, c, variant == 2, engine.Engine(device, cudaops.Float32,
					cudaops.WithStrict()))
				require.InEpsilonSlice(t, want, got, 1e-4)
				require.Less(t, want[len(want)-1], want[0]-0.1)
			})
		}
	}
}

// familyLosses returns the losses of several steps on one batch.
func familyLosses(t *testing.T, c llm.Config, recompute bool,
	build func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) (all []float64) {
	m, err := llm.NewModel(c, tensor.Float32, 4)
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	require.NoError(t, err)
	const sequences = 2
	e, err := build(m, o, llm.TrainConfig{Batch: sequences, Recompute: recompute})
	require.NoError(t, err)
	defer e.Close()
	r := rand.New(rand.NewPCG(5, 5))
	var b data.Batch
	for i := range sequences * c.Seq {
		b.Inputs, b.Targets = append(b.Inputs, r.IntN(c.Vocab)), append(b.Targets, r.IntN(c.Vocab))
		b.Starts = append(b.Starts, i%c.Seq/8*8)
		b.Count++
	}

	for range 8 {
		loss, err := e.Gradients(b)
		require.NoError(t, err)
		_, err = e.Update()
		require.NoError(t, err)
		all = append(all, loss)
	}

	return all
}

// TestSitesOnFake runs blueprints at weights and in the stream through all stages on a device, and
// compares the losses and the final model against a CPU.
func TestSitesOnFake(t *testing.T) {
	train := func(device func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
		error)) (losses []float64, m *llm.Model) {
		m, loader, optimizer := newSitedRun(t)
		tr, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Steps: 9, Batch: batch,
			Clip: 1, Schedule: optim.Constant(0.01), Engine: device})
		check(t, err)
		stages := []state.Stage{state.Training, state.Training, state.Grafting,
			state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized}
		tr.On(func(e llm.Event) error {
			if e.Kind != llm.StepEnd {
				return nil
			}
			losses = append(losses, e.Loss)
			if e.Step > len(stages) {
				return nil
			}
			for layer, l := range m.Kasmina.Lattices() {
				for seed := range l.Seeds() {
					if err := step(m, layer, seed, stages[e.Step-1]); err != nil {
						return err
					}
				}
			}
			return nil
		})
		check(t, tr.Run(t.Context()), tr.Close())
		return losses, m
	}

	want, plain := train(nil)
	device := cudaops.OpenFake(t)
	got, same := train(engine.Engine(device, cudaops.Float32))
	require.InDeltaSlice(t, want, got, 1e-5)
	require.Equal(t, plain.Config, same.Config)
	require.Equal(t, 3, same.Config.Layers)
	for i, p := range plain.Params {
		require.InDeltaSlice(t, p.Value.Float32s(), same.Params[i].Value.Float32s(), 2e-4, p.Name)
	}
}

// newSitedRun is like newRun, but the model has seeds at weights and in the stream.
func newSitedRun(t *testing.T) (*llm.Model, *data.Loader, optim.Optimizer) {
	_, loader, optimizer := newRun(t, filepath.Join(t.TempDir(), "text"), 0)
	c := llm.Config{Vocab: 256, Dim: 8, Layers: 1, Heads: 2, KVHeads: 1, FF: 12, Seq: 6}.Default()
	c.Weights, c.Streams = c.WeightSites("q", "k", "gate", "down", "head"), []int{0, 0}
	m, err := llm.NewModel(c, tensor.Float32, 5, state.WithoutGates())
	check(t, err)
	return m, loader, optimizer
}

// step moves a seed at a weight or in the stream to the next stage.
func step(m *llm.Model, layer, seed int, to state.Stage) error {
	stage, err := m.Kasmina.Lattice(layer).Stage(seed)
	if err != nil || stage == to {
		return err
	}

	c := state.Command{Action: state.Germinate, Layer: layer, Seed: seed,
		Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}}
	if m.Kasmina.Lattice(layer).Site() == blueprints.Stream {
		c.Request.Kind = []blueprints.Kind{blueprints.Attention, blueprints.Perceptron}[seed]
	}

	commands := []state.Command{{Action: state.Move, Layer: layer, Seed: seed, To: to}}
	switch to {
	case state.Training:
		commands = slices.Insert(commands, 0, c)
	case state.Grafting:
		commands = append(commands, state.Command{Action: state.SetAlpha, Layer: layer, Seed: seed,
			Alpha: 0.3})
	}

	return m.Kasmina.Do(commands...)
}

// numbers is a token source of random tokens.
type numbers struct{}

const numbersVocab = 16

func (numbers) Len() int64          { return 1 << 12 }
func (numbers) VocabSize() int      { return numbersVocab }
func (numbers) Tokenizer() string   { return "numbers" }
func (numbers) Fingerprint() string { return "numbers" }
func (numbers) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		r := rand.New(rand.NewPCG(1, uint64(offset)+uint64(i)))
		dst[i] = r.IntN(1 + r.IntN(numbersVocab))
	}
	return nil
}

// growing trains a model on a fake device. The model grows at all sites, and undoes a part of its growth.
// If keeps is true, each engine takes over the state that its predecessor has on the device. growing
// returns a log of the complete run.
func growing(t *testing.T, keeps bool, o func() optim.Optimizer) (log []string) {
	t.Helper()
	device := cudaops.OpenFake(t)
	c := llm.Config{Vocab: numbersVocab, Dim: 8, Layers: 2, Heads: 2, KVHeads: 1, FF: 12, Seq: 6,
		Untied: true, Depth: 2}.Default()
	c.Weights = c.WeightSites("q", "v", "up", "head")
	c.Streams = []int{0, 1}
	m, err := llm.NewModel(c, tensor.Float32, 5, state.WithoutGates(), state.WithEmbargo(0))
	require.NoError(t, err)
	loader, err := data.NewLoader(numbers{}, data.LoaderConfig{Batch: 2, Seq: c.Seq, Seed: 1})
	require.NoError(t, err)
	config := llm.TrainConfig{Steps: 30, Batch: 2, Clip: 1, Epoch: 1, Schedule: optim.Constant(1e-2)}
	config.Engine = engine.Engine(device, cudaops.Float32)
	if !keeps {
		plain := config.Engine
		config.Engine = func(m *llm.Model, o optim.Optimizer,
			c llm.TrainConfig) (llm.Engine, error) {
			e, err := plain(m, o, c)
			return withoutStep{e}, err
		}
	}

	tr, err := llm.NewTrainer(m, loader, o(), config)
	require.NoError(t, err)
	record := func(format string, args ...any) { log = append(log, fmt.Sprintf(format, args...)) }
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.Reshaped {
			require.NoError(t, e.Err)
		}
		if e.Kind != llm.StepEnd {
			return nil
		}
		record("step %d, loss %x, norm %x, parameters %d", e.Step, e.Loss, e.GradNorm, e.Params)
		return growthAt(m, e.Step)
	})

	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, tr.Close())
	for _, p := range m.Params {
		record("%s %x", p.Name, p.Value.Float32s())
	}

	for _, s := range tr.Optimizer.State() {
		record("%s %x", s.Name, s.Data)
	}

	return log
}

// growthAt advances the seeds of all sites, each at its own steps.
func growthAt(m *llm.Model, step int) error {
	kinds := map[blueprints.Site][]blueprints.Kind{blueprints.Weight: {blueprints.LoRA},
		blueprints.Stream: {blueprints.Attention, blueprints.Perceptron},
		blueprints.Depth:  {blueprints.Stack, blueprints.Interleave}}
	start := map[blueprints.Site]int{blueprints.Weight: 2, blueprints.Stream: 4,
		blueprints.Depth: 14}
	stages := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized}
	for layer, l := range m.Kasmina.Lattices() {
		for seed := range l.Seeds() {
			at := step - start[l.Site()] - seed%2
			if l.Site() == blueprints.Depth {
				at = step - start[l.Site()] - 8*seed
			}
			if at < 0 || at >= len(stages) {
				continue
			}
			c := state.Command{Layer: layer, Seed: seed, Action: state.Move, To: stages[at]}
			if at == 0 {
				all := kinds[l.Site()]
				if err := m.Kasmina.Do(state.Command{Layer: layer, Seed: seed,
					Action: state.Germinate, Request: state.GerminationRequest{
						Kind: all[seed%len(all)], Size: 2}}); err != nil {
					return err
				}
			}
			deep, last := l.Site() == blueprints.Depth, at == len(stages)-1
			switch {
			case last && (seed == 0) == deep:
				c.To = state.RolledBack
			case deep && at > 3:
				continue // the gates of depth seeds require a gain
			}
			if err := m.Kasmina.Do(c); err != nil {
				return err
			}
		}
	}

	return nil
}

// TestKeepNeedsOptimizer checks that an engine cannot be kept while its machine has no optimizer, and can
// be kept again once it has one.
func TestKeepNeedsOptimizer(t *testing.T) {
	device, cuda := cudaops.OpenFakeDriver(t)
	m, _, o := newRun(t, filepath.Join(t.TempDir(), "text"), 0)
	e, err := engine.Engine(device, cudaops.Float32)(m, o, llm.TrainConfig{Batch: batch})
	require.NoError(t, err)
	k := e.(llm.Keeper)
	require.True(t, k.CanKeep())
	cuda.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
	require.ErrorIs(t, e.Push(), cudaops.ErrOutOfMemory)
	require.False(t, k.CanKeep())
	_, err = k.Keep()
	require.ErrorContains(t, err, "the machine has no optimizer")
	require.NoError(t, e.Push())
	require.True(t, k.CanKeep())
	kept, err := k.Keep()
	require.NoError(t, err)
	require.NoError(t, kept.Close())
}

// TestKeepSameBits checks that a run is bit-identical whether engines pass parameters and moments on
// within the device or through the host.
func TestKeepSameBits(t *testing.T) {
	for name, o := range map[string]func() optim.Optimizer{
		"AdamW": func() optim.Optimizer {
			o, err := optim.NewAdamW()
			require.NoError(t, err)
			return o
		},
		"Muon": func() optim.Optimizer {
			o, err := optim.NewMuon()
			require.NoError(t, err)
			return o
		}} {
		t.Run(name, func(t *testing.T) {
			want, got := growing(t, false, o), growing(t, true, o)
			for i := range min(len(want), len(got)) {
				require.Equal(t, want[i], got[i])
			}
			require.Len(t, got, len(want))
		})
	}
}

// newVM returns a machine on the GPU if there is one, and otherwise one on the CPU.
func newVM(g *gorgonia.ExprGraph) (vm gorgonia.VM, closeDevice func() error, err error) {
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		vm, err = cpuops.NewMachine(g)
		return vm, func() error { return nil }, err
	} else if err != nil {
		return nil, nil, err
	}

	if vm, err = cudaops.NewMachine(device, g); err != nil {
		return nil, nil, errors.Join(err, device.Close())
	}

	return vm, device.Close, nil
}

// This program runs on computers with and without a GPU.
func Example() {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(512, 256),
		gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(256),
		gorgonia.WithInit(gorgonia.Ones()))
	y, err := op.RMSNorm(x, w, 1e-5)
	if err != nil {
		log.Fatal(err)
	}

	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y))))

	vm, closeDevice, err := newVM(g)
	if err != nil {
		log.Fatal(err)
	}
	defer closeDevice()

	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		log.Fatal(err)
	}

	value := cost.Value() // set by the machine on the CPU; on a GPU, Value copies it
	if m, ok := vm.(*cudaops.Machine); ok {
		if value, err = m.Value(cost); err != nil {
			log.Fatal(err)
		}
	}

	fmt.Println(value)
}

// This example trains a layer with weights, gradients and optimizer on the GPU. A step copies its batch
// to the device. Value copies the loss to the host when needed; WithOutputs makes the machine keep it.
func ExampleMachine_SetOptimizer() {
	device, err := cudaops.Open()
	if err != nil {
		log.Fatal(err)
	}
	defer device.Close()

	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(64, 128),
		gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(32, 128),
		gorgonia.WithInit(gorgonia.GlorotN(1)))
	y, err := op.Linear(x, w)
	if err != nil {
		log.Fatal(err)
	}

	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		log.Fatal(err)
	}

	machine, err := cudaops.NewMachine(device, g, cudaops.WithParams(w), cudaops.WithOutputs(loss),
		cudaops.WithPrecision(cudaops.BFloat16))
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()

	optimizer, err := optim.NewAdamW(optim.WithLR(1e-3))
	if err != nil {
		log.Fatal(err)
	}

	// gradients with a norm above 1 are scaled down
	if err := machine.SetOptimizer(optimizer, 1); err != nil {
		log.Fatal(err)
	}

	for range 100 {
		if err := machine.RunAll(); err != nil { // after gorgonia.Let(x, batch)
			log.Fatal(err)
		}
		if _, err := machine.Update(); err != nil {
			log.Fatal(err)
		}
	}

	value, err := machine.Value(loss)
	if err != nil {
		log.Fatal(err)
	}

	if err := machine.Download(); err != nil { // copy the weights into their nodes
		log.Fatal(err)
	}

	fmt.Println(value, w.Value())
}
