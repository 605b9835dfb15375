package cudaops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// normChain is a loss behind norms of rows of d elements, each of the result of the one before, and their weights.
func normChain(t *testing.T, seed uint64, norms, rows, d int, shared bool) (loss *gorgonia.Node, weights gorgonia.Nodes) {
	t.Helper()
	g, r := gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 3))
	values := func(shape ...int) gorgonia.NodeConsOpt {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)))
	}
	y := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, d), gorgonia.WithName("x"), values(rows, d))
	for i := range norms {
		if i == 0 || !shared {
			weights = append(weights, gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(d), gorgonia.WithName(fmt.Sprintf("w%d", i)),
				values(d)))
		}
		var err error
		if y, err = op.RMSNorm(y, weights[len(weights)-1], 1e-5); err != nil {
			t.Fatal(err)
		}
	}
	target := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(rows), gorgonia.WithName("target"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(make([]int, rows)))))
	loss, err := op.CrossEntropy(y, target)
	if err == nil {
		_, err = gorgonia.Grad(loss, weights...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return loss, weights
}

// partsMemory is as much as is kept for later launches.
const partsMemory = 64 << 20

// TestSums wants what passes leave in parts to be added up together, but before a result is needed and without keeping too much, and the
// gradients of a tape machine.
func TestSums(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	pass := norm.RMSNormBackward{D: 1 << 20, Type: gpu.Float32} // whose parts take so many bytes a column
	each := pass.WorkspaceBytes(fake.New(fake.Config{}).Devices()[0]) / pass.D
	for _, c := range []struct {
		name           string
		norms, rows, d int
		shared         bool // all norms have the same weights, whose gradients are added up
		opts           []MachineOption
		launches       int
		compiled       bool // and not run
	}{
		{name: "all at once", norms: 5, rows: 4, d: 6, launches: 1},
		{name: "gathered", norms: 5, rows: 4, d: 6, launches: 1, opts: []MachineOption{WithAccumulation()}},
		{name: "added up", norms: 4, rows: 4, d: 6, shared: true, launches: 1},
		{name: "much memory", norms: 4, rows: 1, d: partsMemory/each/2 - 64, launches: 2, compiled: true},
		{name: "much memory each", norms: 3, rows: 1, d: partsMemory/each + 64, launches: 3, compiled: true},
	} {
		check := func(t *testing.T, device *Device, opts ...MachineOption) {
			loss, weights := normChain(t, seed, c.norms, c.rows, c.d, c.shared)
			m, err := NewMachine(device, loss.Graph(), append(append(opts, c.opts...), WithParams(weights...), WithOutputs(loss))...)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if got := tasksOf(m)["RMSNormWeightGrad"]; got != c.launches {
				t.Errorf("%d launches, want %d", got, c.launches)
			}
			if c.compiled {
				return
			}
			same, want := normChain(t, seed, c.norms, c.rows, c.d, c.shared)
			tape := gorgonia.NewTapeMachine(same.Graph())
			defer tape.Close()
			if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
				t.Fatal(err)
			}
			for i, w := range weights {
				if d := distance(t, gathered(t, m, w), want[i].Deriv().Value()); !(d < 1e-4) {
					t.Errorf("the gradient of weights %d differs by %.2g", i, d)
				}
			}
		}
		t.Run(c.name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			check(t, device, fakeOption, WithStrict())
		})
		if !c.compiled {
			t.Run(c.name+"/GPU", func(t *testing.T) { check(t, openGPU(t), WithStrict()) })
		}
	}
}

// gathered is the gradient of a parameter, with WithAccumulation as added up over the runs.
func gathered(t *testing.T, m *Machine, p *gorgonia.Node) gorgonia.Value {
	t.Helper()
	var v gorgonia.Value
	var err error
	if sum := m.runner.Program.Sums[p]; sum != nil {
		v, err = m.runner.Fetch(sum, tensor.Float32)
	} else {
		v, err = m.Value(p.Deriv())
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestKasminaSumsGathered wants the gradients of slots before they are added to those of other runs.
func TestKasminaSumsGathered(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	telemetry, seeds := []state.Telemetry{{Mode: state.Production}, {Mode: state.Off}}, []int{8, 4}
	chain, same := newKasminaChain(t, 1, telemetry, seeds), newKasminaChain(t, 1, telemetry, seeds)
	m, err := NewMachine(device, chain.loss.Graph(), fakeOption, WithStrict(), WithAccumulation(), WithParams(chain.params...))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tape := gorgonia.NewTapeMachine(same.loss.Graph())
	defer tape.Close()
	if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
		t.Fatal(err)
	}
	for i, p := range chain.params {
		if d := distance(t, gathered(t, m, p), same.params[i].Deriv().Value()); !(d < 1e-4) {
			t.Errorf("the gradient of %s differs by %.2g", p.Name(), d)
		}
	}
}

// TestKasminaSumsTwice wants two backward passes of one layer not to be ended by one launch, which would write figures of both to one
// place in any order.
func TestKasminaSumsTwice(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	chain := newKasminaChain(t, 1, []state.Telemetry{{Mode: state.Production}}, []int{8})
	g := gradientsOfLayers(chain.loss.Graph())[0]
	var layer *gorgonia.Node
	for _, n := range chain.loss.Graph().AllNodes() {
		if isOp[*op.KasminaOp](n) {
			layer = n
		}
	}
	again, err := layer.Op().(gorgonia.SDOp).SymDiff(opbase.Children(layer), layer, gorgonia.Must(gorgonia.Add(g, g)))
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMachine(device, chain.loss.Graph(), fakeOption, WithParams(chain.params...), WithOutputs(again[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if n := tasksOf(m); n["KasminaGrad"] != 2 || n["KasminaWeightGrad"] != 2 {
		t.Errorf("%v", n)
	}
}

// summing counts launches that finish Kasmina passes, by how many passes have left something.
type summing struct {
	kernels.Launcher
	figures, gradients map[int]int
}

func (k *summing) Launch(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case kasmina.MergeRecords:
		k.figures[len(p.All)-count(values(p.All), kasmina.Records{})]++
	case kasmina.SumParts:
		k.gradients[len(p.All)-count(values(p.All), kasmina.Parts{})]++
	}
	return k.Launcher.Launch(s, params)
}

func count[E comparable](all []E, e E) (n int) {
	for _, a := range all {
		if a == e {
			n++
		}
	}
	return n
}

// TestKasminaSums wants the ends of all Kasmina passes to be made together, as far as they measure, but by each pass where a monitor
// times it.
func TestKasminaSums(t *testing.T) {
	production, off := state.Telemetry{Mode: state.Production}, state.Telemetry{Mode: state.Off}
	seeds := []int{8, 4, 2}
	for name, c := range map[string]struct {
		telemetry []state.Telemetry
		figures   int // passes that leave some
		opts      []MachineOption
	}{
		"production":     {[]state.Telemetry{production, production, production}, 3, nil},
		"some":           {[]state.Telemetry{production, off, production}, 2, nil},
		"off":            {[]state.Telemetry{off, off, off}, 0, nil},
		"with a monitor": {[]state.Telemetry{production, production, off}, 2, []MachineOption{WithMonitor(2)}},
	} {
		device, _, fakeOption := openFake(t, fake.Config{})
		k, chain := &summing{figures: map[int]int{}, gradients: map[int]int{}}, newKasminaChain(t, 1, c.telemetry, seeds)
		wrap := withKernels(func(inner kernels.Launcher) kernels.Launcher { k.Launcher = inner; return k })
		m, err := NewMachine(device, chain.loss.Graph(), append(c.opts, fakeOption, WithParams(chain.params...), wrap)...)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if n := tasksOf(m); n["KasminaFigures"] != 1 || n["KasminaWeightGrad"] != 1 {
			t.Errorf("%s: %v", name, n)
		}
		for range 5 {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
		}
		figures, gradients := k.figures[c.figures], k.gradients[len(seeds)]
		if figures < 2 || gradients < 2 { // a run as it is, and a capture
			t.Errorf("%s: %d launches for figures of %d passes, %d for gradients of %d", name, figures, c.figures, gradients, len(seeds))
		}
		var apart [2]int
		if c.opts != nil {
			apart = [2]int{k.figures[0], k.gradients[0]}
			if apart != [2]int{1, 1} {
				t.Errorf("%s: launches for nothing: %v", name, apart)
			}
		}
		if n := len(k.figures) + len(k.gradients); n != 2+apart[0]+apart[1] {
			t.Errorf("%s: launches for other numbers of passes: %v, %v", name, k.figures, k.gradients)
		}
	}
}
