package cudaops

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// grafted is the training graph of a model of two blocks, each with a Kasmina layer behind it, half of whose seeds blend.
func grafted(t *testing.T, seed uint64, opts ...llm.GraphOption) *batch {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 64, Layers: 2, Heads: 2, Seq: 33, Kasmina: []int{0, 1}, Seeds: 8}.Default()
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range m.Kasmina.Lattices() {
		for s := 0; s < c.Seeds; s += 2 {
			r := state.GerminationRequest{Slot: 1 + s, Kind: blueprints.Kind((i + s/2) % 4)}
			err := errors.Join(m.Germinate(i, s, r), l.Transition(s, state.Training), l.Transition(s, state.Grafting), l.SetAlpha(s, 0.5))
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	g, err := m.Graph(llm.ForTraining, 4, opts...)
	if err != nil {
		t.Fatal(err)
	}
	b := &batch{Graph: g}
	b.draw(t, seed)
	return b
}

// gradientsOfLayers are the nodes that Kasmina layers' backward passes read as the gradients of their results.
func gradientsOfLayers(g *gorgonia.ExprGraph) (all gorgonia.Nodes) {
	for _, n := range g.AllNodes() {
		if isOp[*op.KasminaGradOp](n) {
			all = append(all, opbase.Children(n)[4])
		}
	}
	return all
}

func inPlaceTasks(m *Machine) (n int) {
	for _, t := range m.runner.Program.Calls {
		if p, ok := t.Params.(program.KasminaPass); ok && p.InPlace {
			n++
		}
	}
	return n
}

// TestKasminaInPlace wants the gradient of a layer's input where that of its result was, which nothing else reads, unless it was asked
// for; and the same bits in either place, and beside a monitor, which runs the pass more than once.
func TestKasminaInPlace(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		compareInPlace(t, device, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) { compareInPlace(t, openGPU(t), WithPrecision(BFloat16), WithTuning(TuneOff)) })
}

func compareInPlace(t *testing.T, device *Device, opts ...MachineOption) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	type way struct {
		name string
		kept func(*gorgonia.ExprGraph) gorgonia.Nodes
		opts []MachineOption
		want int // tasks in place
	}
	none := func(*gorgonia.ExprGraph) gorgonia.Nodes { return nil }
	var want [][]float32
	for _, w := range []way{{"in place", none, nil, 2}, {"kept", gradientsOfLayers, nil, 0},
		{"with a monitor", none, []MachineOption{WithMonitor(3)}, 2}} {
		b := grafted(t, seed)
		m := newFuseMachine(t, device, b.G, b.Params, append(gorgonia.Nodes{b.Loss}, w.kept(b.G)...), append(w.opts, opts...))
		if n := inPlaceTasks(m); n != w.want {
			t.Errorf("%s: %d tasks are in place, want %d", w.name, n, w.want)
		}
		var got [][]float32
		for step := range uint64(7) {
			b.draw(t, seed+step)
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			for _, p := range b.Params {
				v, err := m.Value(p.Deriv())
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, append([]float32(nil), flat(t, v)...))
			}
		}
		if want == nil {
			want = got
			continue
		}
		for i := range got {
			for j, v := range got[i] {
				if math.Float32bits(v) != math.Float32bits(want[i][j]) {
					t.Fatalf("%s: in step %d the gradient of %v is %v at %d, in place %v", w.name, i/len(b.Params), b.Params[i%len(b.Params)], v, j,
						want[i][j])
				}
			}
		}
	}
}

// TestKasminaReplaced wants no value of a gradient that another one has replaced, though the memory lasts.
func TestKasminaReplaced(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	b := grafted(t, 1)
	keep, replaced := gorgonia.Nodes{b.Loss}, gradientsOfLayers(b.G)
	for _, n := range b.G.AllNodes() {
		if o, ok := n.Op().(*opbase.PartOp); ok && o.Offset == 0 && isOp[*op.KasminaGradOp](opbase.Children(n)[0]) {
			keep = append(keep, n)
		}
	}
	m := newFuseMachine(t, device, b.G, b.Params, keep, []MachineOption{fakeOption})
	if n := inPlaceTasks(m); n != len(replaced) || len(keep) != 1+n {
		t.Fatalf("%d tasks are in place, of %d, and %d values kept", n, len(replaced), len(keep))
	}
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for _, n := range keep {
		if _, err := m.Value(n); err != nil {
			t.Error(err)
		}
	}
	for _, n := range replaced {
		if v, err := m.Value(n); err == nil {
			t.Errorf("%v, which another gradient has replaced, is given as %v", n, v.Shape())
		}
	}
}

// TestKasminaElsewhere has gradients that something else reads too, or that are not in the arena.
func TestKasminaElsewhere(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	open := func(g *gorgonia.ExprGraph, params gorgonia.Nodes, keep ...*gorgonia.Node) *Machine {
		t.Helper()
		return newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption})
	}
	k := newKasminaGraph(t, 1, nil)
	if m := open(k.g, gorgonia.Nodes{k.weights, k.scales}, k.loss); inPlaceTasks(m) > 0 {
		t.Error("chunks of 3 columns are in place")
	}
	b := grafted(t, 1)
	g := gradientsOfLayers(b.G)[0]
	twice, err := gorgonia.Add(g, g)
	if err != nil {
		t.Fatal(err)
	}
	if m := open(b.G, b.Params, b.Loss, twice); inPlaceTasks(m) != 1 {
		t.Errorf("%d layers are in place, of two of whose gradients one is read by a sum", inPlaceTasks(m))
	}
}

// directions counts norms by the end of their input that they begin with.
type directions struct {
	kernels.Launcher
	ascending, descending int
}

func (k *directions) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(norm.RMSNorm); ok && a.Ascending {
		k.ascending++
	} else if ok {
		k.descending++
	}
	return k.Launcher.Launch(s, params)
}

// TestNormsBehindKasmina wants norms to begin where what came before them ended: behind a layer with the first rows.
func TestNormsBehindKasmina(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	k := &directions{}
	b := grafted(t, 1)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, []MachineOption{fakeOption,
		withKernels(func(inner kernels.Launcher) kernels.Launcher { k.Launcher = inner; return k })})
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	// Two in each block, of which the second is of a sum, and a last one.
	if runs := k.ascending / 2; runs == 0 || k.ascending != 2*runs || k.descending != 3*runs {
		t.Errorf("%d norms begin with the first rows, %d with the last", k.ascending, k.descending)
	}
}
