package llm

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/state"
)

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
