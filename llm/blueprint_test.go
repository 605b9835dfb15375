package llm

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// A blueprint that one run has trained goes on, bit for bit, in a slot of another one that trains, sent there from another
// goroutine with the command that germinates the seed.
func TestBlueprintMovesBetweenRuns(t *testing.T) {
	dir := t.TempDir()
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for seed, kind := range map[int]blueprints.Kind{1: blueprints.LowRank, 2: blueprints.ConvFilter, 3: blueprints.ChunkMLP} {
			source := newTrainer(t, trainerOptions{config: roomy(), steps: 7, dt: dt})
			if err := source.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, kind.String())
			if err := source.Model.SaveBlueprint(path, 1, seed); err != nil {
				t.Fatal(err)
			}
			to := newTrainer(t, trainerOptions{config: roomy(), steps: 6, dt: dt})
			var done <-chan error
			to.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == 5 { // it takes effect behind the last update, before which slots decay
					submitted := make(chan struct{})
					go func() {
						defer close(submitted)
						load, err := to.Model.ReadBlueprint(path, 0, 0)
						if err != nil {
							t.Error(err)
						}
						plant := state.Command{Action: state.Germinate, Request: state.GerminationRequest{Slot: 4, Kind: kind}}
						done = to.Model.Kasmina.Submit(plant, load)
					}()
					<-submitted
				}
				return nil
			})
			if err := to.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			got, err := slots{to.Model}.Read(0, 4)
			if err != nil {
				t.Fatal(err)
			}
			want, err := slots{source.Model}.Read(1, seed)
			if err != nil {
				t.Fatal(err)
			}
			n, err := blueprints.Size(kind, 4, 18)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got.Weights[:n], want.Weights[:n]) || got.Scale != want.Scale {
				t.Errorf("%v in %v: slot is %v, want %v", kind, dt, got, want)
			}
			if stage, _ := to.Model.Kasmina.Lattice(0).Stage(0); stage != state.Germinated {
				t.Errorf("%v: the seed is %v, want Germinated", kind, stage)
			}
		}
	}
}

// A file that does not fit is refused with what is wrong, and changes nothing.
func TestBlueprintErrors(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: roomy(), steps: 3})
	m := tr.Model
	dir := t.TempDir()
	good := filepath.Join(dir, "good")
	if err := m.SaveBlueprint(good, 0, 1); err != nil { // a LowRank
		t.Fatal(err)
	}
	tensors, metadata, err := safetensors.Load(good)
	if err != nil {
		t.Fatal(err)
	}
	file := func(change func(tensors []safetensors.Tensor, metadata map[string]string) []safetensors.Tensor) string {
		path := filepath.Join(t.TempDir(), "file")
		meta := map[string]string{modelfile.KindKey: metadata[modelfile.KindKey], modelfile.ChunkKey: metadata[modelfile.ChunkKey]}
		if err := safetensors.Save(path, change(slices.Clone(tensors), meta), meta); err != nil {
			t.Fatal(err)
		}
		return path
	}
	with := func(name string, shape []int, data any) string {
		return file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor {
			for i, x := range all {
				if x.Name == name {
					if all[i], err = safetensors.New(name, shape, data); err != nil {
						t.Fatal(err)
					}
				}
			}
			return all
		})
	}
	named := func(key, value string) string {
		return file(func(all []safetensors.Tensor, meta map[string]string) []safetensors.Tensor {
			meta[key] = value
			return all
		})
	}
	damaged := filepath.Join(dir, "damaged")
	raw, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)-3] ^= 4
	if err := os.WriteFile(damaged, raw, 0o666); err != nil {
		t.Fatal(err)
	}
	// Seed 0 shares slot 3 with seed 3, which is a ChunkMLP; seed 2 is fossilized.
	for _, to := range []state.Stage{state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized} {
		if err := m.Kasmina.Do(state.Command{Action: state.Move, Layer: 0, Seed: 2, To: to}); err != nil {
			t.Fatal(err)
		}
	}
	conv := filepath.Join(dir, "conv")
	if err := m.SaveBlueprint(conv, 0, 2); err != nil {
		t.Fatal(err)
	}
	shared := newTrainer(t, trainerOptions{config: roomy(), steps: 3}).Model
	if err := shared.Germinate(0, 0, state.GerminationRequest{Slot: 3, Kind: blueprints.LowRank}); err != nil {
		t.Fatal(err)
	}
	inf := slices.Repeat([]float64{math.Inf(1)}, 8)
	for name, c := range map[string]struct {
		m           *Model
		path        string
		layer, seed int
		want        string
	}{
		"no file":       {m, filepath.Join(dir, "none"), 0, 1, "none"},
		"damaged":       {m, damaged, 0, 1, "tensor"},
		"no kind":       {m, named(modelfile.KindKey, "Best"), 0, 1, `"Best"`},
		"another chunk": {m, named(modelfile.ChunkKey, "8"), 0, 1, `chunks of "8" features, and the model's have 4`},
		"another rank":  {m, with("V", []int{3, 4}, make([]float64, 12)), 0, 1, `"V" has shape [3 4], want [2 4], as slots of 18`},
		"integers":      {m, with("U", []int{4, 2}, make([]int64, 8)), 0, 1, `"U" is of type I64`},
		"infinite":      {m, with("U", []int{4, 2}, inf), 0, 1, "+Inf"},
		"too large":     {m, with("scale", []int{1}, []float64{1e300}), 0, 1, "1e+300"},
		"a tensor more": {m, file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor { return all[:2] }), 0, 1, "2 tensors, want 3"},
		"another name": {m, file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor {
			all[0].Name = "X"
			return all
		}), 0, 1, "missing"},
		"another kind":     {m, good, 0, 3, "seed 3, whose slot it is, has a ChunkMLP, not a LowRank"},
		"a shared slot":    {shared, good, 0, 0, "seed 3, whose slot it is, has a ChunkMLP"},
		"dormant":          {m, good, 0, 0, "it is Dormant"},
		"fossilized":       {m, conv, 0, 2, "seed 2, whose slot it is, is frozen for good"},
		"no such layer":    {m, good, 2, 0, "layer is 2"},
		"no such seed":     {m, good, 0, 4, "seed is 4"},
		"a narrower model": {newTrainer(t, trainerOptions{config: tiny(), steps: 1}).Model, good, 0, 1, "LowRank needs 8 weights"},
	} {
		before := slices.Clone(c.m.Param(blockPrefix(0) + kasminaWeights).Float32s())
		err := c.m.LoadBlueprint(c.path, c.layer, c.seed)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, c.want)
		}
		if !slices.Equal(before, c.m.Param(blockPrefix(0)+kasminaWeights).Float32s()) {
			t.Errorf("%s: the refused file has changed weights", name)
		}
	}
	if err := m.SaveBlueprint(filepath.Join(dir, "x"), 0, 0); err == nil || !strings.Contains(err.Error(), "seed 0: it is Dormant") {
		t.Errorf("saving a dormant seed: %v", err)
	}
	for _, at := range [][2]int{{0, -1}, {0, 4}, {2, 0}} {
		if err := m.SaveBlueprint(filepath.Join(dir, "x"), at[0], at[1]); !errors.Is(err, state.ErrSeed) {
			t.Errorf("saving seed %d of layer %d: %v", at[1], at[0], err)
		}
	}
	// The slot of a blueprint whose life is over may be another's.
	if err := shared.Kasmina.Do(state.Command{Action: state.Move, Layer: 0, Seed: 3, To: state.RolledBack}); err != nil {
		t.Fatal(err)
	}
	if err := shared.SaveBlueprint(filepath.Join(dir, "x"), 0, 3); err == nil || !strings.Contains(err.Error(), "seed 3: it is RolledBack") {
		t.Errorf("saving a blueprint that has been rolled back: %v", err)
	}
	if err := m.LoadBlueprint(with("V", []int{2, 4}, make([]float32, 8)), 0, 1); err != nil {
		t.Errorf("float32 in the file: %v", err)
	}
}

// roomy is tiny with slots that have room for rank 2.
func roomy() Config {
	c := tiny()
	c.SlotWidth = 18
	return c
}

// Blueprints with capacity train, and a run of them that was interrupted goes on bit for bit.
func TestCapacityResumes(t *testing.T) {
	o := trainerOptions{config: roomy(), steps: 30}
	whole, first := newTrainer(t, o), newTrainer(t, o)
	start := slices.Clone(whole.Model.Param(blockPrefix(0) + kasminaWeights).Float32s())
	if err := whole.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	w := whole.Model.Param(blockPrefix(0) + kasminaWeights)
	for slot, used := range map[int]int{1: 16, 2: 4, 3: 16} { // LowRank, ConvFilter, ChunkMLP
		for i := range used {
			if at := slot*18 + i; w.Float32s()[at] == start[at] && (slot != 2 || i < 3) {
				t.Errorf("weight %d of slot %d has not learned", i, slot)
			}
		}
	}
	path := filepath.Join(t.TempDir(), "run.safetensors")
	first.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 11 {
			return errors.Join(first.Save(path), errors.New("killed"))
		}
		return nil
	})
	if err := first.Run(t.Context()); err == nil {
		t.Fatal("the first run was not interrupted")
	}
	second := newTrainer(t, o)
	if err := second.Resume(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := second.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkSame(t, second, whole)
	narrow := newTrainer(t, trainerOptions{config: tiny(), steps: 30})
	if err := narrow.Resume(t.Context(), path); !errors.Is(err, ErrArchitecture) ||
		!strings.Contains(err.Error(), "SlotWidth is 0 here and 18 there") {
		t.Errorf("got %v", err)
	}
}

// Starts differ from seed to seed, from layer to layer and from one planting to the next, and are the same in every run.
func TestCapacityStarts(t *testing.T) {
	plant := func() (all [][]float32) {
		m, err := NewModel(roomy(), tensor.Float32, 1, state.WithoutGates(), state.WithEmbargo(0))
		if err != nil {
			t.Fatal(err)
		}
		for layer, l := range m.Kasmina.Lattices() {
			for range 2 {
				for seed := range l.Seeds() {
					r := state.GerminationRequest{Slot: 1 + seed, Kind: blueprints.LowRank}
					if err := errors.Join(m.Germinate(layer, seed, r), l.Transition(seed, state.Cancelled), l.Recycle(seed)); err != nil {
						t.Fatal(err)
					}
					w := m.Param(blockPrefix(layer) + kasminaWeights).Float32s()[(1+seed)*18:][:18]
					all = append(all, slices.Clone(w))
				}
				if _, err := l.StepEpoch(state.Metrics{}); err != nil {
					t.Fatal(err)
				}
			}
		}
		return all
	}
	first, second := plant(), plant()
	for i, w := range first {
		if !slices.Equal(w, second[i]) {
			t.Errorf("start %d differs from model to model", i)
		}
		for j := range i {
			if slices.Equal(w, first[j]) {
				t.Errorf("starts %d and %d are the same", i, j)
			}
		}
	}
}

func TestCapacityErrors(t *testing.T) {
	c := tiny()
	c.SlotWidth = 3
	if _, err := NewModel(c, tensor.Float32, 1); err == nil || !strings.Contains(err.Error(), "Config.SlotWidth is 3, want Dim/Seeds, 4") {
		t.Errorf("got %v", err)
	}
	if _, err := NewModel(tiny(), tensor.Float32, 1, state.WithWidth(9)); err == nil || !strings.Contains(err.Error(), "9 weights, want 4") {
		t.Errorf("got %v", err)
	}
	m, err := NewModel(tiny(), tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	w := m.Param(blockPrefix(0) + kasminaWeights).Float32s()
	w[9] = 7
	before := slices.Clone(w)
	err = m.Germinate(0, 1, state.GerminationRequest{Slot: 2, Kind: blueprints.LowRank})
	if stage, _ := m.Kasmina.Lattice(0).Stage(1); !errors.Is(err, blueprints.ErrWidth) || stage != state.Dormant || !slices.Equal(w, before) {
		t.Errorf("got %v, stage %v, weights %v", err, stage, w)
	}
}

// A lattice that was saved before slots had a width of their own takes the model's; one of another width, or with a seed
// whose blueprint does not fit, is refused.
func TestCapacityOfLattices(t *testing.T) {
	tensors, metadata := smallCheckpoint(t)
	for name, c := range map[string]struct {
		opts []state.Option
		kind blueprints.Kind
		is   error
	}{
		"older":       {nil, blueprints.Residual, nil},
		"the same":    {[]state.Option{state.WithWidth(2)}, blueprints.Residual, nil},
		"wider":       {[]state.Option{state.WithWidth(4)}, blueprints.Residual, ErrArchitecture},
		"not fitting": {nil, blueprints.ChunkMLP, blueprints.ErrWidth},
	} {
		l, err := state.NewLattice(2, 4, append(c.opts, state.WithSlots(3))...)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.RequestGermination(0, state.GerminationRequest{Slot: 1, Kind: c.kind}); err != nil {
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
		m, err := LoadModel(t.Context(), path)
		if !errors.Is(err, c.is) {
			t.Errorf("%s: got %v, want %v", name, err, c.is)
		}
		if err == nil && m.Kasmina.Lattice(0).Width() != 2 {
			t.Errorf("%s: the lattice has a width of %d, want 2", name, m.Kasmina.Lattice(0).Width())
		}
	}
}
