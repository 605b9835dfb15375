package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// batch is a model's graph and inputs for it.
type batch struct {
	*llm.Graph
	ids, targets []int
}

// few is n, and less in short mode: where compute-sanitizer watches a GPU, a launch takes it tens of milliseconds.
func few(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// newBatch is the graph of a small model. Odd seeds give it a perceptron of an odd size, whose matrices begin anywhere.
func newBatch(t testing.TB, kind llm.GraphKind, seed uint64) (*llm.Model, *batch) {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 18, Layers: few(2, 1), Heads: 3, KVHeads: 1, Seq: 6, FF: 64, Kasmina: []int{0}, Seeds: 6}.Default()
	if seed%2 == 1 {
		c.FF = 33
	}
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	g, err := m.Graph(kind, 3)
	if err != nil {
		t.Fatal(err)
	}
	b := &batch{Graph: g}
	b.draw(t, seed)
	return m, b
}

// draw gives the graph other ids and targets.
func (b *batch) draw(t testing.TB, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 3))
	n := b.IDs.Shape()[0]
	b.ids, b.targets = make([]int, n), make([]int, n)
	for i := range n {
		b.ids[i], b.targets[i] = r.IntN(19), r.IntN(19)
	}
	for node, x := range map[*gorgonia.Node][]int{b.IDs: b.ids, b.Targets: b.targets} {
		if err := gorgonia.Let(node, tensor.New(tensor.WithShape(n), tensor.WithBacking(x))); err != nil {
			t.Fatal(err)
		}
	}
}

func distance(t testing.TB, got, want gorgonia.Value) float64 {
	t.Helper()
	a, b := flat(t, got), flat(t, want)
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var diff, norm float64
	for i := range a {
		diff += float64(a[i]-b[i]) * float64(a[i]-b[i])
		norm += float64(b[i]) * float64(b[i])
	}
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}

func flat(t testing.TB, v gorgonia.Value) []float32 {
	t.Helper()
	switch x := v.Data().(type) {
	case []float32:
		return x
	case float32:
		return []float32{x}
	}
	t.Fatalf("a value of type %T", v.Data())
	return nil
}

// openGPU returns the GPU, and skips the test where there is none.
func openGPU(t testing.TB) *Device {
	t.Helper()
	device, err := Open()
	if errors.Is(err, ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	return device
}

// TestMachineAgreesWithTapeMachine runs a model's training graph on both machines, on several batches: the machine runs the
// first as it is, records the second and replays it from then on.
func TestMachineAgreesWithTapeMachine(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testAgainstTapeMachine(t, device, 1e-5, fakeOption)
	})
	t.Run("float32", func(t *testing.T) { testAgainstTapeMachine(t, openGPU(t), 1e-4) })
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testAgainstTapeMachine(t, device, 1e-5, fakeOption, scaledGradients)
	})
	t.Run("bfloat16", func(t *testing.T) { testAgainstTapeMachine(t, openGPU(t), 3e-2, WithPrecision(BFloat16)) })
	t.Run("float16", func(t *testing.T) { testAgainstTapeMachine(t, openGPU(t), 5e-3, WithPrecision(Float16)) })
}

func testAgainstTapeMachine(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	m, b := newBatch(t, llm.ForTraining, seed)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	machine, err := NewMachine(device, b.G, append(opts, withCeilingBytes(1<<14), WithParams(b.Params...), WithOutputs(b.Loss), WithLogger(logger))...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	_, same := newBatch(t, llm.ForTraining, seed)
	tape := gorgonia.NewTapeMachine(same.G)
	defer tape.Close()
	for step := range uint64(few(4, 2)) {
		b.draw(t, seed+step)
		same.draw(t, seed+step)
		tape.Reset()
		if err := errors.Join(machine.RunAll(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		nodes, want := gorgonia.Nodes{b.Loss}, gorgonia.Nodes{same.Loss}
		for i, p := range b.Params {
			nodes, want = append(nodes, p.Deriv()), append(want, same.Params[i].Deriv())
		}
		for i, n := range nodes {
			v, err := machine.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			if d := distance(t, v, want[i].Value()); !(d < tolerance) {
				name := "loss"
				if i > 0 {
					name = "gradient of " + m.Params[i-1].Name
				}
				t.Errorf("step %d: %s differs by %.2g", step, name, d)
			}
		}
	}
	if !testing.Short() {
		profileRuns(t, machine)
	}
	if log.Len() > 0 {
		t.Errorf("warnings: %s", log.String())
	}
}

// profileRuns wants every task's time, the longest first.
func profileRuns(t *testing.T, machine *Machine) {
	t.Helper()
	if err := machine.StartProfile(); err != nil {
		t.Fatal(err)
	}
	for range ProfileSteps {
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	profile, err := machine.Profile()
	if err != nil {
		t.Fatal(err)
	}
	tasks := 0
	times := profile.Ops()
	for i, o := range times {
		if o.Op != "Copies" && o.Op != "Workspaces" { // which are no tasks of the program
			tasks += o.Tasks
		}
		if i > 0 && o.Time > times[i-1].Time {
			t.Errorf("%s took %v, after %v", o.Op, o.Time, times[max(0, i-1)])
		}
	}
	if tasks != len(machine.runner.Program.Calls) {
		t.Errorf("the profile has %d tasks of %d", tasks, len(machine.runner.Program.Calls))
	}
}

// plusOneOp is an op that the machine does not know.
type plusOneOp struct{ opbase.Base }

func plusOne(x *gorgonia.Node) (*gorgonia.Node, error) {
	o := &plusOneOp{}
	opbase.Init(&o.Base, o, "PlusOne", "", gorgonia.Nodes{x}, x.Dtype(), x.Shape(), computePlusOne[float32], computePlusOne[float64])
	return gorgonia.ApplyOp(o, x)
}

func computePlusOne[T float32 | float64](_ *plusOneOp, y []T, in opbase.Args) error {
	for i, v := range opbase.Slice[T](in, 0) {
		y[i] = v + 1
	}
	return nil
}

// TestUnknownOp wants an op without a kernel to be computed on the host, with one warning, or to be refused by name.
func TestUnknownOp(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testUnknownOp(t, device, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) { testUnknownOp(t, openGPU(t)) })
}

func testUnknownOp(t *testing.T, device *Device, opts ...MachineOption) {
	g, x, y := stockGraph(t)
	z, err := plusOne(y)
	if err == nil {
		z, err = gorgonia.Square(z)
	}
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	machine, err := NewMachine(device, g, append(opts, WithOutputs(y), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	for range 3 {
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		before, err := machine.Value(y)
		if err != nil {
			t.Fatal(err)
		}
		after, err := machine.Value(z)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range flat(t, before) {
			if got, want := flat(t, after)[i], (v+1)*(v+1); math.Abs(float64(got-want)) > 1e-5*float64(want) {
				t.Fatalf("(%v + 1)² is %v", v, got)
			}
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "PlusOne") {
		t.Errorf("%d warnings, want one that names the op: %s", n, log.String())
	}
	if _, err := NewMachine(device, x.Graph(), append(opts, WithStrict())...); err == nil || !strings.Contains(err.Error(), "PlusOne") {
		t.Errorf("got %v, want an error that names the op", err)
	}
}

// stockGraph is y = tanh(x·wᵀ) ⊙ x·wᵀ + 2·x·wᵀ, all of which has kernels.
func stockGraph(t testing.TB) (g *gorgonia.ExprGraph, x, y *gorgonia.Node) {
	t.Helper()
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
		return n
	}
	g = gorgonia.NewGraph()
	value := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rand.NormFloat64())
		}
		return x
	}
	x = gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(3, 5), tensor.WithBacking(value(15))), gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(5, 4), tensor.WithBacking(value(20))), gorgonia.WithName("w"))
	h := must(gorgonia.Mul(x, w))
	two := must(gorgonia.Mul(h, gorgonia.NewConstant(float32(2))))
	y = must(gorgonia.Add(must(gorgonia.HadamardProd(must(gorgonia.Tanh(h)), h)), two))
	return g, x, y
}

// TestCapture wants a graph without host nodes to be recorded at the second run, and nothing but inputs to be copied.
func TestCapture(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testCapture(t, device, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) { testCapture(t, openGPU(t)) })
}

func testCapture(t *testing.T, device *Device, opts ...MachineOption) {
	g, x, y := stockGraph(t)
	machine, err := NewMachine(device, g, append(opts, WithStrict())...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	for step := range 4 {
		fresh := make([]float32, 15)
		for i := range fresh {
			fresh[i] = float32(rand.NormFloat64())
		}
		if err := gorgonia.Let(x, tensor.New(tensor.WithShape(3, 5), tensor.WithBacking(fresh))); err != nil {
			t.Fatal(err)
		}
		before := device.ctx.Stats()
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		work := device.ctx.Stats().Sub(before)
		if step > 0 && (work.GraphLaunches != 1 || work.ToHost.Count != 0 || work.OnDevice.Count != 0) {
			t.Errorf("step %d: %+v, want one launch of a graph and no copies but those of the inputs", step, work)
		}
		got, err := machine.Value(y)
		if err != nil {
			t.Fatal(err)
		}
		tape := gorgonia.NewTapeMachine(g)
		if err := tape.RunAll(); err != nil {
			t.Fatal(err)
		}
		if d := distance(t, got, y.Value()); !(d < 1e-6) {
			t.Errorf("step %d: differs by %.2g", step, d)
		}
		tape.Close()
	}
}

func TestMachineErrors(t *testing.T) {
	device, fakeDriver, fakeOption := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 1)
	newMachine := func(opts ...MachineOption) error {
		m, err := NewMachine(device, b.G, append(opts, fakeOption)...)
		if err == nil {
			m.Close()
		}
		return err
	}
	double := gorgonia.NewGraph()
	gorgonia.NodeFromAny(double, tensor.New(tensor.WithShape(2), tensor.WithBacking([]float64{1, 2})), gorgonia.WithName("x"))
	if _, err := gorgonia.Square(double.AllNodes()[0]); err != nil {
		t.Fatal(err)
	}
	_, doubleErr := NewMachine(device, double, fakeOption)
	_, nilErr := NewMachine(nil, b.G)
	for _, c := range []struct {
		err  error
		want string
	}{
		{newMachine(WithParams(b.Loss)), "WithParams"},
		{newMachine(WithOutputs(nil)), "WithOutputs"},
		{doubleErr, "float64"},
		{nilErr, "nil"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("got %v, want an error that says %q", c.err, c.want)
		}
	}
	g, x, y := stockGraph(t)
	fakeDriver.Fail("cuMemAlloc_v2", 1, gpu.OutOfMemory)
	fakeDriver.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
	if _, err := NewMachine(device, g, fakeOption); !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("got %v, want out of memory", err)
	}
	m, err := NewMachine(device, g, fakeOption)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Value(y); err == nil || !strings.Contains(err.Error(), "has not run") {
		t.Errorf("a value before the first run: %v", err)
	}
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	var inner *gorgonia.Node
	for _, n := range g.AllNodes() {
		if fmt.Sprint(n.Op()) == "tanh" {
			inner = n
		}
	}
	if _, err := m.Value(inner); err == nil || !strings.Contains(err.Error(), "WithOutputs") {
		t.Errorf("a value that is not kept: %v", err)
	}
	if _, err := m.Value(b.Loss); err == nil {
		t.Error("the value of a node of another graph is no error")
	}
	if err := m.Upload(y); err == nil || !strings.Contains(err.Error(), "no input") {
		t.Errorf("an upload of what is no input: %v", err)
	}
	if _, err := m.Value(x); err != nil {
		t.Errorf("the value of an input: %v", err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	if err := m.RunAll(); err == nil {
		t.Error("a closed machine runs")
	}
}

// TestTooLarge wants a graph that does not fit to be refused before anything is allocated for it.
func TestTooLarge(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9, Memory: 33 << 20, SMs: 1}}})
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4096, 4096), gorgonia.WithName("x"))
	if _, err := gorgonia.Square(x); err != nil {
		t.Fatal(err)
	}
	_, err := NewMachine(device, g, fakeOption)
	if !errors.Is(err, gpu.OutOfMemory) || !strings.Contains(fmt.Sprint(err), "128.00 MiB") {
		t.Errorf("got %v, want an error that says how much is needed", err)
	}
}
