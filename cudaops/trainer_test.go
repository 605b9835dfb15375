package cudaops_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// waiting is an engine that is not known to be an llm.Stepper.
type waiting struct{ llm.Engine }

// watched is an engine that counts the steps that it makes in one call.
type watched struct {
	llm.Stepper
	steps int
}

func (w *watched) Step(b data.Batch) (loss, norm float64, err error) {
	w.steps++
	return w.Stepper.Step(b)
}

// stumbling is tokens that cannot be read at one time.
type stumbling struct {
	data.Tokens
	left int // reads until then
}

var errStumbled = errors.New("the disk is gone")

func (s *stumbling) ReadTokens(dst []int, offset int64) error {
	if s.left--; s.left == 0 {
		return errStumbled
	}
	return s.Tokens.ReadTokens(dst, offset)
}

// scenario is a run of training, and what happens in it.
type scenario struct {
	accumulate int
	fails      int // the read of a sequence that fails; 0 for none
	want       error
	says       string
	model      func(*llm.Model) // before the trainer is made
	prepare    func(r *run)
	event      func(r *run, e llm.Event) error
}

// run is a trainer in a scenario, and what became of it.
type run struct {
	*llm.Trainer
	t      *testing.T
	cancel context.CancelFunc
	folder string
	log    []string
}

// note writes down what nobody may see change.
func (r *run) note(format string, args ...any) { r.log = append(r.log, fmt.Sprintf(format, args...)) }

func (r *run) lattice() *state.Lattice { return r.Model.Kasmina.Lattice(0) }

func check(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

const batch = 2

// newRun returns a small model and what it is trained with on a text, which it writes: the read of a sequence of the given number fails,
// of 0 none.
func newRun(t *testing.T, path string, fails int) (*llm.Model, *data.Loader, optim.Optimizer) {
	t.Helper()
	config := llm.Config{Vocab: 256, Dim: 8, Layers: 1, Heads: 2, KVHeads: 1, FF: 12, Seq: 6, Kasmina: []int{0}, Seeds: 4}.Default()
	model, err := llm.NewModel(config, tensor.Float32, 5, state.WithoutGates())
	check(t, err)
	text := []byte(strings.Repeat(strings.Repeat("if err != nil { return err }\n", 2)+"Z := 1\n", 15))
	check(t, os.WriteFile(path, text, 0o666))
	corpus, err := data.Open(path)
	check(t, err)
	tokens, err := data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{})
	check(t, err)
	loader, err := data.NewLoader(&stumbling{tokens, fails}, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: 1})
	check(t, err)
	optimizer, err := optim.NewAdamW(optim.WithLR(0.01))
	check(t, err)
	return model, loader, optimizer
}

// train runs a scenario on a device of the fake driver.
func (s scenario) train(t *testing.T, ahead bool) (r *run, steps int) {
	t.Helper()
	r = &run{t: t, folder: t.TempDir()}
	model, loader, optimizer := newRun(t, filepath.Join(r.folder, "text"), s.fails)
	if s.model != nil {
		s.model(model)
	}
	device, fakes := cudaops.OpenFake(t)
	make := gpu.Engine(device, cudaops.Float32, fakes)
	var seen *watched
	c := llm.TrainConfig{Steps: 12, Batch: batch, Accumulate: max(1, s.accumulate), Clip: 1, Epoch: 5,
		Schedule: func(step int) float64 { return 0.001 * float64(1+step) }}
	c.Engine = func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		e, err := make(m, o, c)
		if err != nil || !ahead {
			return waiting{e}, err
		}
		seen = &watched{Stepper: e.(llm.Stepper)}
		return seen, nil
	}
	var err error
	r.Trainer, err = llm.NewTrainer(model, loader, optimizer, c)
	check(t, err)
	for seed, to := range map[int]state.Stage{1: state.Grafting, 2: state.Training} {
		check(t, model.Germinate(0, seed, state.GerminationRequest{Slot: seed, Kind: blueprints.AttentionGate}), r.lattice().Transition(seed, state.Training))
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
		r.note("%d: step %d, loss %x, norm %x, rate %x, held-out loss %x, loader %+v", e.Kind, e.Step, e.Loss, e.GradNorm, e.LearningRate,
			e.ValLoss, r.Loader.State())
		b, err := r.lattice().MarshalBinary()
		r.note("lattice %x", b)
		if err != nil || s.event == nil {
			return err
		}
		return s.event(r, e)
	})
	if err := r.Run(ctx); !errors.Is(err, s.want) || (err == nil) != (s.want == nil) || !strings.Contains(fmt.Sprint(err), s.says) {
		t.Errorf("the run ends with %v, want %v", err, s.want)
	} else {
		r.note("the run ends with %v", err)
	}
	r.finish()
	if seen != nil {
		steps = seen.steps
	}
	return r, steps
}

// finish notes what is left of the run.
func (r *run) finish() {
	r.t.Helper()
	r.note("loader %+v, rate %x", r.Loader.State(), r.Optimizer.LR())
	check(r.t, r.Close())
	for _, p := range r.Model.Params {
		r.note("%s %x", p.Name, p.Value.Float32s())
	}
	for _, s := range r.Optimizer.State() {
		r.note("%s %x", s.Name, s.Data)
	}
	b, err := r.lattice().MarshalBinary()
	check(r.t, err)
	r.note("lattice %x", b)
	files, err := filepath.Glob(filepath.Join(r.folder, "*.safetensors"))
	check(r.t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		check(r.t, err)
		r.note("%s %x", filepath.Base(f), b)
	}
}

// overflowAt makes the loss of a model finite, and gradients infinite of batches with a token: in silu(gate) ⊙ up, gate is 0, and up is
// so large for that token alone that its product with what comes back from down overflows.
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

// TestTrainerSteps wants a trainer whose engine makes a step in one call to do, to tell and to leave behind the same as one that
// waits in between, bit for bit, whatever happens in the run.
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
		"plain":               {},
		"gathered":            {accumulate: 3},
		"a seed that changes": {event: after(3, func(r *run) error { return r.lattice().SetAlpha(1, 0.75) })},
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
			text, err := data.NewEvaluation([]byte("if x := y(); x != nil {\n"), tokenizer.Bytes{}, 2, 6)
			check(r.t, err)
			r.On(llm.Evaluate(r.Trainer, text, 2), llm.SampleText(r.Trainer, tokenizer.Bytes{}, "if", 5, sampler.Config{}, "", 3),
				llm.Checkpoint(r.Trainer, filepath.Join(r.folder, "a.safetensors"), 4))
			r.On(func(e llm.Event) error {
				if e.Kind == llm.Saved || e.Kind == llm.Sampled {
					b, err := os.ReadFile(e.Path)
					r.note("%s %x %v", e.Text, b, err != nil)
				}
				return nil
			})
		}},
		"cancelled": {want: context.Canceled, prepare: func(r *run) {
			r.On(llm.Checkpoint(r.Trainer, filepath.Join(r.folder, "a.safetensors"), 0))
		}, event: after(6, func(r *run) error { r.cancel(); return nil })},
		"a callback that fails":                {want: errCallback, event: after(4, func(*run) error { return errCallback })},
		"a batch that cannot be read":          {want: errStumbled, fails: 2*6 + 1, says: "step 7: "},
		"gathered batches that cannot be read": {want: errStumbled, accumulate: 2, fails: 4*3 + 3},
		"a loss that is not finite":            {want: llm.ErrDiverged, prepare: explode, says: "step 4: training diverged: the loss is NaN"},
		"gathered ones":                        {want: llm.ErrDiverged, prepare: explode, accumulate: 2},
		"gradients that overflow": {want: llm.ErrDiverged, model: overflowAt('Z'), prepare: freeze,
			says: "the gradient norm is not finite: the first gradient that is not finite is in parameter"},
		"gathered gradients of which the first overflow": {want: llm.ErrDiverged, model: overflowAt('Z'), prepare: freeze, accumulate: 4,
			says: "the gradient norm is not finite: the first gradient that is not finite is in parameter"},
	}
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			want, _ := s.train(t, false)
			got, steps := s.train(t, true)
			if steps == 0 {
				t.Errorf("no step is made in one call: %.200s", want.log)
			}
			for i, line := range want.log {
				if i >= len(got.log) || strings.ReplaceAll(got.log[i], got.folder, "") != strings.ReplaceAll(line, want.folder, "") {
					t.Fatalf("line %d of %d and %d: got %.300q, want %.300q", i, len(got.log), len(want.log), slices.Concat(got.log, []string{"nothing"})[min(i, len(got.log))], line)
				}
			}
		})
	}
}

// TestTrainersInTurn wants two trainers of a model, with one loader and one optimiser, to make of it together what one of them makes
// alone, also when the other is only asked for a loss amid a run.
func TestTrainersInTurn(t *testing.T) {
	device, fakes := cudaops.OpenFake(t)
	for name, engine := range map[string]func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error){
		"cpu":  nil,
		"cuda": gpu.Engine(device, cudaops.Float32, fakes),
	} {
		turns := func(order ...int) []string {
			r := &run{t: t, folder: t.TempDir()}
			model, loader, optimizer := newRun(t, filepath.Join(r.folder, "text"), 0)
			held, err := data.NewEvaluation([]byte("if err == nil"), tokenizer.Bytes{}, 1, model.Config.Seq)
			check(t, err)
			var all [2]*llm.Trainer
			for i := range all {
				all[i], err = llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Steps: 100, Batch: batch, Clip: 1, Epoch: 100,
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
					r.note("loss %x, held-out loss %x", e.Loss, loss)
					return err
				})
				if err := all[i].Run(ctx); !errors.Is(err, context.Canceled) {
					t.Fatalf("%s: the run ends with %v", name, err)
				}
			}
			check(t, all[1].Close())
			r.Trainer = all[0]
			r.finish()
			return r.log
		}
		want, got := turns(0, 0, 0), turns(0, 1, 0)
		for i := range want {
			if want[i] != got[i] {
				t.Fatalf("%s: two trainers make %.100s, one %.100s", name, got[i], want[i])
			}
		}
	}
}

// TestTrainerTellsWays wants the log of a run on a GPU to say how its ops are computed.
func TestTrainerTellsWays(t *testing.T) {
	device, fakes := cudaops.OpenFake(t)
	folder := t.TempDir()
	model, loader, optimizer := newRun(t, filepath.Join(folder, "text"), 0)
	c := llm.TrainConfig{Steps: 2, Batch: batch, Epoch: 5, Schedule: optim.Constant(0), Engine: gpu.Engine(device, cudaops.Float32, fakes)}
	tr, err := llm.NewTrainer(model, loader, optimizer, c)
	check(t, err)
	defer tr.Close()
	var told [][]llm.Choice
	tr.On(runlog.JSON(filepath.Join(folder, "log.jsonl")), func(e llm.Event) error {
		if e.Kind == llm.Chosen {
			told = append(told, e.Choices)
		}
		return nil
	})
	check(t, tr.Run(t.Context()))
	log, err := os.ReadFile(filepath.Join(folder, "log.jsonl"))
	check(t, err)
	if len(told) != 1 || len(told[0]) == 0 || strings.Count(string(log), `"source":"rule"`) != len(told[0]) {
		t.Errorf("told %v\n%s", told, log)
	}
}
