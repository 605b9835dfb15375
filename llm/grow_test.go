package llm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// growing makes a trainer follow a controller that is fast enough for a short run, and returns the list
// of its seed events.
func growing(t *testing.T, tr *Trainer) *[]string {
	t.Helper()
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{},
		2, tr.Model.Config.Seq)
	if err != nil {
		t.Fatal(err)
	}

	h := control.NewHeuristic(4, 1<<20)
	h.Patience, h.RampEpochs, h.Hunger = 3, 2, 0.01
	if err := tr.Grow(Growth{Controller: h, Validation: text}); err != nil {
		t.Fatal(err)
	}

	var events []string
	if _, err := tr.Model.Kasmina.Listen(func(e state.Event) {
		events = append(events, e.String())
	}); err != nil {
		t.Fatal(err)
	}

	return &events
}

// TestGrowResumes interrupts and resumes a run with a controller several times. It checks that the
// controller makes the same decisions as in an uninterrupted run, and that the models are equal bit for
// bit.
func TestGrowResumes(t *testing.T) {
	const steps = 45
	c := tiny()
	c.SlotWidth = 16
	fresh := func() *Trainer { return newTrainer(t, trainerOptions{config: c, steps: steps}) }
	straight := fresh()
	events := growing(t, straight)
	if err := straight.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	path := filepath.Join(t.TempDir(), "run.safetensors")
	var broken *Trainer
	var again []string
	for k, until := range []int{7, 16, 22, 31, steps} {
		broken = fresh()
		if k > 0 {
			if err := broken.Resume(t.Context(), path); err != nil {
				t.Fatal(err)
			}
		}
		part := growing(t, broken)
		broken.On(Checkpoint(broken, path, 0))
		ctx, cancel := context.WithCancel(context.Background())
		broken.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == until && until < steps {
				cancel()
			}
			return nil
		})
		if err := broken.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		cancel()
		again = append(again, *part...)
	}

	checkSame(t, straight, broken)
	if a, b := strings.Join(*events, "\n"), strings.Join(again, "\n"); a != b {
		t.Errorf("what happened:\n%s\nand with interruptions:\n%s", a, b)
	}

	for _, stage := range []string{"Training → Grafting", "Evaluating → "} {
		if !strings.Contains(strings.Join(again, "\n"), stage) {
			t.Errorf("nothing went from %s", stage)
		}
	}
}

// TestCommandsDuringTraining has eight goroutines send commands while a model trains. The race detector
// and the checksums detect errors.
func TestCommandsDuringTraining(t *testing.T) {
	randtest.Concurrent(t)
	// more than enough for the senders
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 20000})
	stop := make(chan struct{})
	var senders sync.WaitGroup
	var mu sync.Mutex
	done := map[bool]int{}
	for g := range 8 {
		senders.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 7))
			for {
				c := state.Command{Action: state.Action(1 + r.IntN(4)), Layer: r.IntN(2),
					Seed: r.IntN(4), To: state.Stage(r.IntN(11)), Alpha: r.Float64(),
					Request: state.GerminationRequest{Slot: 1 + r.IntN(4),
						Kind: blueprints.Kind(r.IntN(4))}}
				applied := tr.Model.Kasmina.Submit(c)
				tr.Model.Kasmina.Report()
				select {
				case err := <-applied:
					mu.Lock()
					done[err == nil]++
					mu.Unlock()
				case <-stop:
					return
				}
			}
		})
	}

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tr.On(func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		runtime.Gosched()
		mu.Lock()
		defer mu.Unlock()
		if e.Step >= 40 && done[true] >= 8 && done[false] >= 8 {
			cancel()
		}
		return nil
	})

	err := tr.Run(ctx)
	if errors.Is(err, context.Canceled) {
		err = nil
	}

	close(stop)
	senders.Wait()
	if err := errors.Join(err, tr.Model.Kasmina.Verify()); err != nil {
		t.Fatal(err)
	}

	if done[true] < 8 || done[false] < 8 {
		t.Errorf("%d commands were done and %d refused, want some of each", done[true], done[false])
	}
}

// TestRollbackOfAModel checks that a rollback restores the parameters of the slot to their values at the
// start of grafting.
func TestRollbackOfAModel(t *testing.T) {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 12, dt: dt})
		n := tr.Model.Kasmina
		// newTrainer puts seed 1 of each layer into Training, with slot 1.
		read := func() state.SlotParams {
			p, err := slotStore{Model: tr.Model}.Read(1, 1)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		var before, during, after state.SlotParams
		at := func(step int, f func() error) {
			tr.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == step {
					return f()
				}
				return nil
			})
		}
		at(4, func() error {
			before = read()
			return n.Do(state.Command{Action: state.Move, Layer: 1, Seed: 1, To: state.Grafting},
				state.Command{Action: state.SetAlpha, Layer: 1, Seed: 1, Alpha: 0.5})
		})
		at(8, func() error {
			during = read()
			err := n.Do(state.Command{Action: state.Move, Layer: 1, Seed: 1, To: state.RolledBack})
			after = read()
			return err
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		if same(before, during) || !same(before, after) {
			t.Errorf("%v: the slot was %v, then %v, and after the rollback %v", dt,
				before, during, after)
		}
	}
}

func same(a, b state.SlotParams) bool {
	if a.Scale != b.Scale || len(a.Weights) != len(b.Weights) {
		return false
	}
	for i := range a.Weights {
		if a.Weights[i] != b.Weights[i] {
			return false
		}
	}
	return true
}

func TestGrowErrors(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{},
		2, tr.Model.Config.Seq)
	if err != nil {
		t.Fatal(err)
	}

	h := control.NewHeuristic(1, 1)
	bad := control.NewHeuristic(1, 1)
	bad.Patience = 0
	for want, g := range map[string]Growth{
		"Patience is 0":           {Controller: bad, Validation: text},
		"the controller is nil":   {Validation: text},
		"Validation is nil, want": {Controller: h},
		"Every is -1":             {Controller: h, Validation: text, Every: -1},
	} {
		if err := tr.Grow(g); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestDepthNeedsNoText checks that a model with Kasmina layers can grow in depth without validation
// text, and that a controller that also plants on chunks is rejected without it.
func TestDepthNeedsNoText(t *testing.T) {
	c := tiny()
	c.Depth = 1
	tr := newTrainer(t, trainerOptions{config: c, steps: 200})
	tr.Config.Epoch = 1
	if len(c.Kasmina) == 0 {
		t.Fatal("the model has no Kasmina layers")
	}

	err := tr.Grow(Growth{Controller: control.Together(control.NewDepth(blueprints.Stack, 2),
		control.NewHeuristic(1, 1<<20))})
	if err == nil || !strings.Contains(err.Error(), "Validation is nil, want") {
		t.Errorf("got %v, want an error about the text", err)
	}

	for _, controller := range []state.Controller{control.NewDepth(blueprints.Stack, 2),
		&control.Schedule{Growths: []control.Planned{{Share: 0.5, Kind: blueprints.Stack, Size: 2}}}} {
		if err := tr.Grow(Growth{Controller: controller}); err != nil {
			t.Error(err)
		}
	}

	// A replay of a run without text has none either. The record says so, because it may contain
	// commands for other sites.
	record, err := ReadRecord(strings.NewReader(
		`{"step":1,"share":0,"command":{"action":"Germinate","layer":0,"seed":0,"slot":0,"kind":"Residual"},"unjudged":true}`))
	if err != nil {
		t.Fatal(err)
	}

	if err := tr.Grow(Growth{Replay: record}); err != nil {
		t.Error(err)
	}

	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, c.Seq)
	if err != nil {
		t.Fatal(err)
	}

	err = tr.Grow(Growth{Replay: record, Validation: text})
	if err == nil || !strings.Contains(err.Error(), "needs a nil Validation") {
		t.Errorf("got %v, want an error about the text of the recorded run", err)
	}
}

// TestJudge checks how seeds are judged: a seed in Evaluating by the model's loss with it and without it,
// a seed in Training by the change in loss with its blueprint at full strength, and other seeds by the
// loss alone. Judging must not change the seeds.
func TestJudge(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 12})
	growing(t, tr)
	tr.growth.options.Controller = control.DryRun(tr.growth.options.Controller, io.Discard)
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	move := func(to state.Stage) state.Command {
		return state.Command{Action: state.Move, Layer: 1, Seed: 2, To: to}
	}
	if err := tr.Model.Kasmina.Do(move(state.Stabilization), move(state.Evaluating)); err != nil {
		t.Fatal(err)
	}

	l := tr.Model.Kasmina.Lattice(1)
	score := func(muted bool) (losses []float64, performance float64) {
		if err := l.Mute(2, muted); err != nil {
			t.Fatal(err)
		}
		for b := range tr.growth.options.Validation.Batches() {
			loss, err := tr.driver.loss(b)
			if err != nil {
				t.Fatal(err)
			}
			losses, performance = append(losses, loss), performance-loss
		}
		return losses, performance / float64(len(losses))
	}

	without, off := score(true)
	with, on := score(false)
	agree := 0.0
	for i := range with {
		if (without[i] > with[i]) == (on > off) {
			agree++
		}
	}

	metrics := make([]state.Metrics, 2)
	if _, err := tr.growth.judge().Add(metrics); err != nil {
		t.Fatal(err)
	}

	again, _ := score(false)
	judged := map[int]state.SeedMetrics{}
	for _, m := range metrics[1].Seeds {
		judged[m.Seed] = m
	}

	if m := judged[2]; !m.Compared || math.Abs(m.Performance-on) > 1e-12 ||
		math.Abs(m.Without-off) > 1e-12 || on == off ||
		m.Stability != agree/float64(len(with)) || m.Trials != len(with) || m.Errors != 0 {
		t.Errorf("seed 2 is judged %+v, want %v with it and %v without, stability %v", m, on, off,
			agree/float64(len(with)))
	}

	if m := judged[3]; m.Compared || math.Abs(m.Performance-on) > 1e-12 {
		t.Errorf("seed 3, which is being grafted, is judged %+v, want %v", m, on)
	}

	if err := l.Probe(1, true); err != nil {
		t.Fatal(err)
	}

	_, tried := score(false)
	if err := l.Probe(1, false); err != nil {
		t.Fatal(err)
	}

	if m := judged[1]; !m.Unscored || math.Abs(m.TrainingError-(on-tried)) > 1e-12 || on == tried ||
		m.Trials != len(with) {
		t.Errorf("seed 1, which trains, is judged %+v, want the training error %v", m, on-tried)
	}

	if len(judged) != 3 || !slices.Equal(with, again) {
		t.Errorf("judged are %v; the losses were %v and are %v", judged, with, again)
	}
}

// lossy is an engine that returns the given loss for any text.
type lossy struct {
	Engine
	loss float64
}

func (l lossy) Loss(data.Batch) (float64, error) { return l.loss, nil }

// TestGrowThroughHugeLosses checks that huge validation losses neither stop a run nor improve a
// seed's score. If the loss is not finite, the governor must roll back the grafted seeds.
func TestGrowThroughHugeLosses(t *testing.T) {
	for _, loss := range []float64{65503, 65520, 1e9, math.MaxFloat32, math.Inf(1), math.NaN()} {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 12})
		growing(t, tr)
		tr.growth.options.Controller = control.DryRun(tr.growth.options.Controller, io.Discard)
		engine := tr.driver.engine
		tr.driver.engine = lossy{engine, loss}
		if err := tr.Run(t.Context()); err != nil {
			t.Errorf("validation losses of %v: %v", loss, err)
		}
		stage, err := tr.Model.Kasmina.Lattice(1).Stage(2)
		require.NoError(t, err)
		require.Equal(t, loss-loss != 0, stage == state.RolledBack, "losses of %v: %v", loss, stage)
		if stage == state.RolledBack {
			tr = newTrainer(t, trainerOptions{config: tiny(), steps: 12})
			growing(t, tr)
			tr.driver.engine = lossy{tr.driver.engine, loss}
		}
		tr.growth.twin = nil // so that seeds are muted for the comparison
		move := state.Command{Action: state.Move, Layer: 1, Seed: 2, To: state.Stabilization}
		then := move
		then.To = state.Evaluating
		if err := tr.Model.Kasmina.Do(move, then); err != nil {
			t.Fatal(err)
		}
		metrics := make([]state.Metrics, 2)
		if _, err := tr.growth.judge().Add(metrics); err != nil {
			t.Fatal(err)
		}
		for _, m := range metrics[1].Seeds {
			if m.Unscored { // the seed is in Training
				if finite := loss-loss == 0; m.TrainingError > 0 == finite {
					t.Errorf("validation losses of %v: seed %d has the training error %v", loss,
						m.Seed, m.TrainingError)
				}
				continue
			}
			if m.Performance > -65503 || m.Compared != (m.Seed == 2) || m.Compared &&
				m.Without != m.Performance {
				t.Errorf("validation losses of %v: seed %d is judged %+v", loss, m.Seed, m)
			}
		}
		if n := len(metrics[1].Seeds); n != 3 {
			t.Errorf("validation losses of %v: %d seeds are judged, want 3", loss, n)
		}
	}
}

// TestGrowHasTime checks that thresholds that cannot be met in the planned steps are rejected with
// the number of steps needed, and that a run that follows the advice grafts a blueprint in the same
// number of steps.
func TestGrowHasTime(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	trainer := func(opts ...state.Option) *Trainer {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 150})
		tr.Model, err = NewModel(tiny(), tensor.Float32, 7, opts...)
		require.NoError(t, err)
		tr.driver.engine, err = CPUEngine()(tr.Model, tr.Optimizer, tr.Config)
		require.NoError(t, err)
		hold(tr.Model, holder{tr})
		return tr
	}

	h := control.NewHeuristic(4, 1<<20)
	h.Hunger = 0.01
	err = trainer().Grow(Growth{Controller: h, Validation: text})
	require.ErrorContains(t, err,
		"150 steps are 50 epochs of 3, and a blueprint needs 252 to be fossilized: plan at least 756 steps")
	require.ErrorContains(t, err, "Within(50)")
	require.NotContains(t, err.Error(), "Growth.Every")
	err = trainer().Grow(Growth{Controller: h, Validation: text, Every: 40})
	require.ErrorContains(t, err, "compare more often than once in 40 epochs (Growth.Every)")
	thresholds := state.DefaultThresholds().Within(50)
	tr := trainer(state.WithThresholds(thresholds))
	h.RampEpochs = thresholds.MinEpochs[state.Grafting]
	require.NoError(t, tr.Grow(Growth{Controller: h, Validation: text}))
	grafted := 0
	_, err = tr.Model.Kasmina.Listen(func(e state.Event) {
		if e.Kind == state.StageChanged && e.To == state.Grafting {
			grafted++
		}
	})
	require.NoError(t, err)
	require.NoError(t, tr.Run(t.Context()))
	require.NotZero(t, grafted)
	tr = trainer(state.WithThresholds(thresholds))
	tr.Config.Steps, tr.Config.Budget = math.MaxInt32, Budget{Tokens: 60 * int64(tr.last.StepTokens)}
	require.ErrorContains(t, tr.Grow(Growth{Controller: h, Validation: text}),
		"60 steps are 20 epochs of 3")
	h.Patience = 3
	require.ErrorContains(t, trainer(state.WithThresholds(thresholds)).Grow(Growth{Controller: h,
		Validation: text}), "raise Patience")
}

// withoutDecay creates optimizers without weight decay, which change parameters only by gradients and
// moments.
var withoutDecay = map[string]func() (optim.Optimizer, error){
	"adamw": func() (optim.Optimizer, error) {
		return optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
	},
	"muon": func() (optim.Optimizer, error) {
		return optim.NewMuon(optim.WithLR(0.01), optim.WithWeightDecay(0),
			optim.WithAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0)))
	},
}

// TestFrozenSlots checks that a slot remains unchanged, bit for bit, from the step when its last seed
// stops learning for any reason, because momentum no longer affects it. A run resumed from that step
// must be bit-identical.
func TestFrozenSlots(t *testing.T) {
	const layer, seed, slot, frozenAt, steps = 1, 1, 1, 5, 12
	for name, optimizer := range withoutDecay {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run.safetensors")
			var seen []state.SlotParams
			run := func(tr *Trainer) *Trainer {
				tr.On(func(e Event) error {
					if e.Kind != StepEnd {
						return nil
					}
					p, err := slotStore{Model: tr.Model}.Read(layer, slot)
					seen = append(seen, p)
					if e.Step == frozenAt { // bypasses the network
						err = errors.Join(err, tr.Model.Kasmina.Lattice(layer).Transition(seed,
							state.Culled), tr.Save(path))
					}
					return err
				})
				if err := tr.Run(context.Background()); err != nil {
					t.Fatal(err)
				}
				return tr
			}
			straight := run(newTrainer(t, trainerOptions{config: tiny(), steps: steps,
				optimizer: optimizer}))
			for i, p := range seen[1:] {
				if step := i + 2; same(p, seen[i]) != (step > frozenAt) {
					t.Errorf("step %d: the slot is %v after %v", step, p, seen[i])
				}
			}
			resumed := newTrainer(t, trainerOptions{config: tiny(), steps: steps,
				optimizer: optimizer})
			if err := resumed.Resume(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			checkSame(t, straight, run(resumed))
		})
	}
}

// TestNewBlueprintWithoutMomentum checks that the optimizer state of a slot is cleared when another
// blueprint takes it over.
func TestNewBlueprintWithoutMomentum(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	width := tr.Model.Config.KasminaWidth()
	// live counts the nonzero elements of the optimizer state of slot 1 in a layer.
	live := func(layer int) (n int) {
		for _, s := range tr.Optimizer.State() {
			x, ok := s.Data.([]float32)
			p := blockPrefix(tr.Model.Config.Kasmina[layer])
			switch {
			case !ok:
				continue
			case strings.HasPrefix(s.Name, p+kasminaWeights):
				x = x[width : 2*width]
			case strings.HasPrefix(s.Name, p+kasminaScales):
				x = x[1:2]
			default:
				continue
			}
			for _, v := range x {
				if v != 0 {
					n++
				}
			}
		}
		return n
	}

	if live(0) == 0 || live(1) == 0 {
		t.Fatal("a slot that learns has no optimizer state")
	}

	n := tr.Model.Kasmina
	err := n.Do(state.Command{Action: state.Move, Layer: 1, Seed: 1, To: state.Culled},
		state.Command{Action: state.Germinate, Layer: 1, Seed: 0,
			Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ConvFilter}},
		state.Command{Action: state.Move, Layer: 1, Seed: 0, To: state.Training})
	if err != nil {
		t.Fatal(err)
	}

	if live(1) != 0 || live(0) == 0 {
		t.Errorf("the optimizer state of the new blueprint's slot has %d nonzero elements, the other layer's %d",
			live(1), live(0))
	}
}

// TestCommandsTogether checks that commands given together leave the same lattices, including the saved parameters
// of slots, as the same commands given one after another.
func TestCommandsTogether(t *testing.T) {
	commands := []state.Command{{Action: state.Germinate, Seed: 1,
		Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ChunkMLP}},
		{Action: state.Move, Seed: 1, To: state.Training}, {Action: state.Move, Seed: 1, To: state.Grafting}}
	c := tiny()
	c.SlotWidth = 16
	arrays := func(do func(m *Model) error) []state.Array {
		m, err := NewModel(c, tensor.Float32, 7, state.WithoutGates())
		require.NoError(t, err)
		require.NoError(t, do(m))
		return m.Kasmina.Arrays()
	}

	together := arrays(func(m *Model) error { return m.Kasmina.Do(commands...) })
	apart := arrays(func(m *Model) (err error) {
		for _, c := range commands {
			err = errors.Join(err, m.Kasmina.Do(c))
		}
		return err
	})
	require.Equal(t, len(apart), len(together))
	for i := range apart {
		require.Equal(t, fmt.Sprint(apart[i]), fmt.Sprint(together[i])) // as text, because NaN differs from itself
	}
}
