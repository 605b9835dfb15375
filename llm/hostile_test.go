package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// TestNil checks the errors for arguments that a program may have forgotten to set.
func TestNil(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	second := func(_ any, err error) error { return err }
	run := func(c Callback) error {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
		tr.On(c)
		return tr.Run(context.Background())
	}
	e := heldOut(t, 50, 1)
	for name, f := range map[string]func() error{
		"NewTrainer model": func() error {
			return second(NewTrainer(nil, tr.Loader, tr.Optimizer, tr.Config))
		},
		"NewTrainer loader": func() error {
			return second(NewTrainer(tr.Model, nil, tr.Optimizer, tr.Config))
		},
		"NewTrainer optimizer": func() error {
			return second(NewTrainer(tr.Model, tr.Loader, nil, tr.Config))
		},
		"Trainer.Evaluate":    func() error { _, _, err := tr.Evaluate(nil); return err },
		"callback":            func() error { return run(nil) },
		"Evaluate text":       func() error { return run(Evaluate(tr, nil, 1)) },
		"Evaluate quick text": func() error { return run(Evaluate(tr, e, 1, WithQuick(nil))) },
		"Generate sampler": func() error {
			g, err := NewGenerator(tr.Model)
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			return second(collect(g.Generate(t.Context(), []int{1}, 1, nil)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := f(); err == nil || !strings.Contains(err.Error(), "nil") {
				t.Errorf("got %v, want an error that says nil", err)
			}
		})
	}
}

// shifted is a tokenizer with ids outside the vocabulary of these tests' models.
type shifted struct{ tokenizer.Bytes }

func (shifted) Encode([]byte) []int { return []int{1, 300} }

func (shifted) Decode(ids []int) ([]byte, error) { return make([]byte, len(ids)), nil }

// TestCallbackArguments checks that a callback with invalid arguments fails the run before its first
// step.
func TestCallbackArguments(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file") // where a directory is expected
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	sample := func(prompt string, n int, c sampler.Config) func(*Trainer) Callback {
		return func(tr *Trainer) Callback {
			return SampleText(tr, tokenizer.Bytes{}, prompt, n, c, "", 0)
		}
	}
	for want, callback := range map[string]func(*Trainer) Callback{
		"Temperature is -1": sample("x", 3, sampler.Config{Temperature: -1}),
		"makes no token":    sample("", 3, sampler.Config{}),
		"for -1 tokens":     sample("x", -1, sampler.Config{}),
		"sequences of 7": func(tr *Trainer) Callback {
			e, err := data.NewEvaluation(texttest.Words(1, 50), tokenizer.Bytes{}, 1, 7)
			if err != nil {
				t.Fatal(err)
			}
			return Evaluate(tr, e, 0)
		},
		"held-out text: token 300 is outside": func(tr *Trainer) Callback {
			e, err := data.NewEvaluation(nil, shifted{}, 1, tr.Model.Config.Seq)
			require.NoError(t, err)
			return Evaluate(tr, e, 0)
		},
		"prompt: token 300 is outside": func(tr *Trainer) Callback {
			return SampleText(tr, shifted{}, "x", 3, sampler.Config{}, "", 0)
		},
		"SampleText: mkdir": func(tr *Trainer) Callback {
			return SampleText(tr, tokenizer.Bytes{}, "x", 3, sampler.Config{},
				filepath.Join(file, "sample.txt"), 0)
		},
		"SampleText: open": func(tr *Trainer) Callback {
			return SampleText(tr, tokenizer.Bytes{}, "x", 3, sampler.Config{},
				filepath.Dir(file), 0)
		},
	} {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 3})
		tr.On(callback(tr))
		if err := tr.Run(context.Background()); err == nil || tr.Step() != 0 ||
			strings.Count(err.Error(), want) != 1 {
			t.Errorf("after step %d: %v, want %q once at step 0", tr.Step(), err, want)
		}
	}
}

// TestSampleToDevice checks that a sample can be written to an existing file in a directory that
// allows no new files, such as /dev/stdout.
func TestSampleToDevice(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()

	defer w.Close()
	path := fmt.Sprintf("/dev/fd/%d", w.Fd()) // its directory allows no new files
	if _, err := os.Stat(path); err != nil {
		t.Skip("this system has no paths to open files:", err)
	}

	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	tr.On(SampleText(tr, tokenizer.Bytes{}, "x", 3, sampler.Config{}, path, 0))
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	b := make([]byte, 1)
	if _, err := r.Read(b); err != nil || b[0] != 'x' {
		t.Errorf("got %q, %v", b, err)
	}
}

// TestSampleToAPipe checks that writing to a pipe without a reader fails instead of blocking.
func TestSampleToAPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := exec.Command("mkfifo", path).Run(); err != nil {
		t.Skip("this system makes no pipes with names:", err)
	}
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	tr.On(SampleText(tr, tokenizer.Bytes{}, "0", 3, sampler.Config{}, path, 1))
	require.ErrorContains(t, tr.Run(t.Context()), path)
}

// TestLearningRateOfNaN checks that a schedule that returns NaN fails the run before a parameter changes.
func TestLearningRateOfNaN(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 3})
	tr.Config.Schedule = optim.Constant(math.NaN())
	if err := tr.Run(context.Background()); err == nil || tr.Step() != 0 ||
		!strings.Contains(err.Error(), "step 1: TrainConfig.Schedule: ") {
		t.Errorf("after step %d: %v", tr.Step(), err)
	}
	if err := tr.driver.probe(); err != nil {
		t.Error(err)
	}
}

// smallCheckpoint returns the contents of a checkpoint of a small run.
func smallCheckpoint(t testing.TB) ([]safetensors.Tensor, map[string]string) {
	t.Helper()
	c := Config{Vocab: 3, Dim: 4, Layers: 1, Heads: 2, Seq: 2, FF: 1,
		Kasmina: []int{0}, Seeds: 2}.Default()
	tr := smallTrainer(t, c)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	if err := tr.Save(path); err != nil {
		t.Fatal(err)
	}

	tensors, metadata, err := safetensors.Load(path)
	if err != nil {
		t.Fatal(err)
	}

	return tensors, metadata
}

func smallTrainer(t testing.TB, c Config) *Trainer {
	t.Helper()
	m, err := NewModel(c, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}

	l, err := data.NewLoader(&idTokens{ids: []int{0, 1, 2, 1, 0}, vocab: 3},
		data.LoaderConfig{Batch: 1, Seq: 2})
	if err != nil {
		t.Fatal(err)
	}

	o, err := optim.NewAdamW()
	if err != nil {
		t.Fatal(err)
	}

	tr, err := NewTrainer(m, l, o, TrainConfig{Steps: 2, Batch: 1, Schedule: optim.Constant(0.1)})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestHostileConfig checks that files with valid checksums are rejected before anything is allocated
// if their configuration needs more memory than the computer has.
func TestHostileConfig(t *testing.T) {
	tensors, metadata := smallCheckpoint(t)
	whole := metadata[modelfile.ConfigKey]
	for what, edit := range map[string][2]string{
		"ff":     {`"ff":1`, `"ff":16777216`},
		"layers": {`"layers":1`, `"layers":16777216`},
		"vocab":  {`"vocab":3`, `"vocab":4611686018427387904`},
		"overflow": {`"heads":2,"kv_heads":2,"head_dim":2`,
			`"heads":4294967296,"kv_heads":4294967296,"head_dim":4294967296`},
		"slots": {`"slots":3`, `"slots":65536`},
		"seeds": {`"seeds":2`, `"seeds":4`},
	} {
		t.Run(what, func(t *testing.T) {
			metadata[modelfile.ConfigKey] = strings.Replace(whole, edit[0], edit[1], 1)
			if metadata[modelfile.ConfigKey] == whole {
				t.Fatalf("%s has no %s", whole, edit[0])
			}
			path := filepath.Join(t.TempDir(), "m.safetensors")
			if err := safetensors.Save(path, tensors, metadata); err != nil {
				t.Fatal(err)
			}
			if _, err := LoadModel(t.Context(), path); err == nil {
				t.Error("no error")
			}
		})
	}
}

// TestLatticeOfOtherSlots checks that a lattice is rejected if the number of slots in its header
// differs from the model's. Otherwise a seed with a higher slot would index outside the weights.
func TestLatticeOfOtherSlots(t *testing.T) {
	tensors, metadata := smallCheckpoint(t)
	l, err := state.NewLattice(2, 4, state.WithSlots(9))
	if err != nil {
		t.Fatal(err)
	}

	for _, a := range l.Arrays() {
		for i, x := range tensors {
			if x.Name == "lattice.0."+a.Name {
				if tensors[i], err = safetensors.New(x.Name, a.Shape, a.Data); err != nil {
					t.Fatal(err)
				}
			}
		}
	}

	path := filepath.Join(t.TempDir(), "m.safetensors")
	if err := safetensors.Save(path, tensors, metadata); err != nil {
		t.Fatal(err)
	}

	if _, err := LoadModel(t.Context(), path); !errors.Is(err, ErrArchitecture) ||
		!strings.Contains(err.Error(), "the saved lattice has 9 slots, this one 3") {
		t.Errorf("got %v", err)
	}
}

// FuzzLoad passes files with valid checksums, but with altered metadata and one altered tensor, to
// LoadModel, ReadNotes and Resume.
func FuzzLoad(f *testing.F) {
	tensors, metadata := smallCheckpoint(f)
	c := Config{Vocab: 3, Dim: 4, Layers: 1, Heads: 2, Seq: 2, FF: 1,
		Kasmina: []int{0}, Seeds: 2}.Default()
	f.Add(metadata[modelfile.ConfigKey], metadata[modelfile.TrainingKey],
		metadata[modelfile.NotesKey], uint8(0), []byte(nil))
	f.Add(strings.Replace(metadata[modelfile.ConfigKey], `"ff":1`, `"ff":1000000000000000`, 1), "{",
		"[]", uint8(3), []byte{1})
	f.Add(metadata[modelfile.ConfigKey], strings.Replace(metadata[modelfile.TrainingKey],
		`"steps":2`, `"steps":-9`, 1), "", uint8(20), []byte{0, 0, 128, 127})
	f.Fuzz(func(t *testing.T, config, training, notes string, which uint8, data []byte) {
		altered := append([]safetensors.Tensor(nil), tensors...)
		if len(data) > 0 {
			x, err := safetensors.New(altered[int(which)%len(altered)].Name, []int{len(data)}, data)
			if err != nil {
				t.Fatal(err)
			}
			altered[int(which)%len(altered)] = x
		}
		path := filepath.Join(t.TempDir(), "m.safetensors")
		if err := safetensors.Save(path, altered, map[string]string{modelfile.ConfigKey: config,
			modelfile.TrainingKey: training, modelfile.NotesKey: notes}); err != nil {
			return // not valid as a JSON string
		}
		info, err := os.Stat(path)
		require.NoError(t, err)
		var m *Model
		bounded.Run(t, info.Size(), func() { m, err = LoadModel(t.Context(), path) })
		if err == nil {
			if err := m.Save(path + "2"); err != nil && !errors.Is(err, ErrDiverged) {
				t.Error(err)
			}
			os.Remove(path + "2")
		}
		bounded.Run(t, info.Size(), func() { _, _ = ReadNotes(path) })
		checkRefusal(t, smallTrainer(t, c), path, info.Size())
	})
}

// TestModelLargerThanMemory checks that NewModel rejects parameters that do not fit into memory
// before it allocates them.
func TestModelLargerThanMemory(t *testing.T) {
	if memory.Check("", 180<<30) == nil {
		t.Skip("it is not known how much memory this computer has, or it is enough")
	}
	c := Config{Vocab: 1 << 14, Dim: 1 << 14, Layers: 15, Heads: 128, Seq: 8}.Default()
	if _, err := NewModel(c, tensor.Float32, 1); err == nil || !strings.Contains(err.Error(),
		"NewModel: the parameters take 181.1 GiB") {
		t.Errorf("got %v", err)
	}
}

// TestZeroValues checks that what uses a model, and methods that read and write files, return errors for
// uninitialized values that name the constructor.
func TestZeroValues(t *testing.T) {
	second := func(_ any, err error) error { return err }
	var m Model
	for name, err := range map[string]error{
		"needs a Graph and a Machine": second(Runner{}.Run(data.Batch{})),
		"Runner needs a Graph":        second(Runner{}.Next(t.Context(), []int{1})),
		"an Inference needs a Model":  second(new(Inference).Loss(data.Batch{})),
		"from NewModel or LoadModel":  second((&Inference{Model: &m}).Decoder()),
		"needs a Model from NewModel": second(NewGenerator(&m)),
	} {
		require.ErrorContains(t, err, name)
	}

	_, err := NewTrainer(&m, new(data.Loader), nil, TrainConfig{})
	require.ErrorContains(t, err, "the model is nil or its zero value")
	for _, m := range []*Model{nil, &m} {
		_, read := m.ReadBlueprint("file", 0, 0)
		for name, err := range map[string]error{
			"saving the model":   m.Save("file"),
			"Germinate":          m.Germinate(0, 0, state.GerminationRequest{}),
			"SaveBlueprint":      m.SaveBlueprint("file", 0, 0),
			"ReadBlueprint: the": m.LoadBlueprint("file", 0, 0), "ReadBlueprint": read,
		} {
			require.ErrorContains(t, err, name)
			require.ErrorIs(t, err, errZeroModel)
		}
	}

	require.NoError(t, new(Inference).Close())
	var c Config
	_, _, shape := c.StreamShape(blueprints.Attention, 1)
	for want, err := range map[string]error{
		"no heads":             shape,
		"one from Model.Graph": new(Graph).Let(data.Batch{}),
		"from Model.Graph":     Runner{}.Let(data.Batch{}),
		"for logits":           new(Graph).LetTokens([]int{1}),
		"the graph is nil":     second(runnerOnCPU(nil)),
		"the optimizer is":     second(newCPUEngine(nil, nil, nil, 0)),
	} {
		require.ErrorContains(t, err, want)
	}

	require.Zero(t, c.KasminaWidth())
	require.NoError(t, c.Knows(nil))
	require.Empty(t, (layout{Config: c}).GrowStream(Grown{}).Streams)
	require.Empty(t, c.StreamOrder(3))
}

// TestNoEngine checks the error for an engine factory that returns neither an engine nor an error.
func TestNoEngine(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	for _, none := range []Engine{nil, (*cpuEngine)(nil)} {
		c := tr.Config
		c.Engine = func(*Model, optim.Optimizer, TrainConfig) (Engine, error) { return none, nil }
		_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
		require.ErrorContains(t, err, "neither an engine nor an error")
	}
}
