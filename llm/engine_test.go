package llm

import (
	"errors"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/allocs"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// TestAllocations wants a steady training step on the CPU, gradients, clipping and update, not to allocate more for a larger
// model, with Kasmina layers in every block.
func TestAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip("counting allocations needs a process without the race detector")
	}
	for name, fresh := range map[string]func() (optim.Optimizer, error){
		"AdamW": func() (optim.Optimizer, error) { return optim.NewAdamW() },
		"Muon":  func() (optim.Optimizer, error) { return optim.NewMuon() },
	} {
		for _, layers := range []int{2, 24} {
			c := Config{Vocab: 64, Dim: 32, Layers: layers, Heads: 2, Seq: 32, Kasmina: blocks(layers), Seeds: 4}.Default()
			m, err := NewModel(c, tensor.Float32, 1)
			if err != nil {
				t.Fatal(err)
			}
			o, err := fresh()
			if err != nil {
				t.Fatal(err)
			}
			e, err := newHost(m, o, TrainConfig{Batch: 2, Accumulate: 1})
			if err != nil {
				t.Fatal(err)
			}
			ids := make([]int, 2*c.Seq)
			step := func() {
				if _, err := e.Gradients(data.Batch{Inputs: ids, Targets: ids}); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Update(); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 { // until a layer's history holds as many reports as it keeps
				step()
			}
			n := allocs.PerRun(10, step)
			t.Logf("%s, %d layers: %v allocations", name, layers, n)
			if n > 50 {
				t.Errorf("a step of a model of %d layers with %s makes %v allocations, want at most 50", layers, name, n)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// mirrored is an engine that notes what it is told to take from the host.
type mirrored struct {
	Engine
	pushed [][]string
	fail   error
	pull   func() // brings its parameters to the host
	closed int
}

func (m *mirrored) Pull(params ...string) error {
	if m.pull != nil {
		m.pull()
	}
	return m.Engine.Pull(params...)
}

func (m *mirrored) Close() error {
	m.closed++
	return m.Engine.Close()
}

func (m *mirrored) Push(params ...string) error {
	m.pushed = append(m.pushed, params)
	return m.fail
}

// TestSlotsReachTheEngine wants an engine to hear of the slots that commands write, once a layer, and where it cannot take them
// those on the host to be as before.
func TestSlotsReachTheEngine(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	m, e := tr.Model, &mirrored{Engine: tr.engine}
	tr.engine = e
	act := func(a state.Action, layer, seed int, to state.Stage, slot int) state.Command {
		return state.Command{Action: a, Layer: layer, Seed: seed, To: to,
			Request: state.GerminationRequest{Slot: slot, Kind: blueprints.AttentionGate}}
	}
	commands := []state.Command{
		act(state.Move, 0, 1, state.Cancelled, 0), act(state.Germinate, 0, 0, 0, 1),
		act(state.Move, 1, 1, state.Cancelled, 0), act(state.Germinate, 1, 0, 0, 1),
		act(state.Move, 1, 2, state.RolledBack, 0), // which restores slot 2
	}
	before := bitsOf(m.Param(blockPrefix(1) + kasminaWeights))
	e.fail = errors.New("no room")
	if err := m.Kasmina.Do(commands...); !errors.Is(err, e.fail) {
		t.Errorf("error %v", err)
	}
	if !slices.Equal(before, bitsOf(m.Param(blockPrefix(1)+kasminaWeights))) {
		t.Error("slots that the engine has not taken have changed")
	}
	e.fail, e.pushed = nil, nil
	if err := m.Kasmina.Do(commands...); err != nil {
		t.Fatal(err)
	}
	if want := [][]string{slices.Concat(slots{m}.names(0), slots{m}.names(1))}; !reflect.DeepEqual(e.pushed, want) {
		t.Errorf("pushed %v, want %v", e.pushed, want)
	}
}

// TestResumeThatTheEngineCannotTake wants a trainer whose engine has not taken a checkpoint to say so, to do nothing with it, to leave the
// model the file's, whatever the engine has, and to go on once a Resume has succeeded.
func TestResumeThatTheEngineCannotTake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	straight := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	straight.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			return straight.Save(path)
		}
		return nil
	})
	if err := straight.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	e := &mirrored{Engine: tr.engine, fail: errors.New("no room")}
	tr.engine = e
	tr.On(func(e Event) error { t.Errorf("step %d of a trainer that cannot be used", e.Step); return nil })
	eval, err := data.NewEvaluation([]byte("some held-out words"), tokenizer.Bytes{}, 1, tr.Model.Config.Seq)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"Run":      func() error { return tr.Run(t.Context()) },
		"Save":     func() error { return tr.Save(path) },
		"Evaluate": func() error { _, _, err := tr.Evaluate(eval); return err },
	} {
		if err := tr.Resume(t.Context(), path); !errors.Is(err, e.fail) {
			t.Fatalf("Resume: error %v", err)
		}
		if err := f(); !errors.Is(err, e.fail) || !strings.Contains(err.Error(), "another Resume") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	e.pull = func() { t.Error("the model is asked for where it is not") }
	if err := tr.Resume(t.Context(), path+"x"); err == nil {
		t.Error("a checkpoint that is not there is resumed from")
	}
	model := filepath.Join(t.TempDir(), "model")
	if err := tr.Model.Save(model); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, model} {
		m, err := LoadModel(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range m.Params {
			if !slices.Equal(bitsOf(p.Value), bitsOf(tr.Model.Params[i].Value)) {
				t.Errorf("%s is not that of the file", p.Name)
			}
		}
	}
	e.fail, e.pull, tr.callbacks = nil, nil, nil
	if err := tr.Resume(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkSame(t, straight, tr)
}

// TestAnotherTrainer wants a model's next trainer to begin with what the one before has made of the model, wherever that is, and that one
// to go on when its engine has taken what the other has made of it, and not before, until it is closed.
func TestAnotherTrainer(t *testing.T) {
	first := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	e := &mirrored{Engine: first.engine}
	first.engine = e
	norm := first.Model.Param(normName)
	e.pull = func() { norm.Float32s()[0] = 7 }
	path := filepath.Join(t.TempDir(), "model.safetensors")
	if err := first.Save(path); err != nil {
		t.Fatal(err)
	}
	norm.Float32s()[0] = 1 // as it is on the host until it is asked for
	c, seen := first.Config, float32(0)
	c.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		seen = m.Param(normName).Float32s()[0]
		return newHost(m, o, c)
	}
	second, err := NewTrainer(first.Model, first.Loader, first.Optimizer, c)
	if err != nil || seen != 7 {
		t.Fatalf("the second engine sees %v, error %v", seen, err)
	}
	defer second.Close()
	e.pull = func() { t.Error("the model is asked for where it is no more") }
	if err := second.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.fail = errors.New("no room")
	save := func() error { return first.Save(path) }
	for name, f := range map[string]func() error{"Run": func() error { return first.Run(t.Context()) }, "Save": save, "Save again": save} {
		if err := f(); !errors.Is(err, e.fail) {
			t.Errorf("%s: error %v, want %v", name, err, e.fail)
		}
	}
	if err := second.Save(path); err != nil || norm.Float32s()[0] == 7 {
		t.Errorf("the second trainer has lost the model: error %v", err)
	}
	e.fail, e.pull, e.pushed = nil, nil, nil
	if err := errors.Join(first.Run(t.Context()), second.Resume(t.Context(), path)); err != nil ||
		len(e.pushed) != 1 || len(e.pushed[0]) > 0 || first.Step() != 2 {
		t.Errorf("the first engine takes %v and is at step %d, error %v", e.pushed, first.Step(), err)
	}
	e.pull = func() { t.Error("the model is asked for where it is no more after a Resume") }
	if err := errors.Join(first.Close(), first.Close()); err != nil || e.closed != 1 {
		t.Errorf("the first engine is closed %d times, error %v", e.closed, err)
	}
	for name, f := range map[string]func() error{
		"Run": func() error { return first.Run(t.Context()) }, "Save": save, "Resume": func() error { return first.Resume(t.Context(), path) },
	} {
		if err := f(); !errors.Is(err, errClosed) {
			t.Errorf("%s: error %v, want %v", name, err, errClosed)
		}
	}
}

// blocks returns 0 to n−1.
func blocks(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}
