package cudaops

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// batch is a model's graph and inputs for it.
type batch struct {
	*llm.Graph
	ids, targets []int
}

// few is n, and less in short mode: where compute-sanitizer watches a GPU, a launch takes it tens
// of milliseconds.
func few(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// newBatch is the graph of a small model. Odd seeds give it a perceptron of an odd size, whose
// matrices begin anywhere.
func newBatch(t testing.TB, kind llm.GraphKind, seed uint64) (*llm.Model, *batch) {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 18, Layers: few(2, 1), Heads: 3, KVHeads: 1, Seq: 6, FF: 64,
		Kasmina: []int{0}, Seeds: 6}.Default()
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
		if err := gorgonia.Let(node, tensor.New(tensor.WithShape(n),
			tensor.WithBacking(x))); err != nil {
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

// TestMachineAgreesWithTapeMachine runs a model's training graph on both machines, on several
// batches: the machine runs the first as it is, records the second and replays it from then on.
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
	t.Run("bfloat16", func(t *testing.T) {
		testAgainstTapeMachine(t, openGPU(t), 3e-2, WithPrecision(BFloat16))
	})
	t.Run("float16", func(t *testing.T) {
		testAgainstTapeMachine(t, openGPU(t), 5e-3, WithPrecision(Float16))
	})
}

func testAgainstTapeMachine(t *testing.T, device *Device, tolerance float64,
	opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	m, b := newBatch(t, llm.ForTraining, seed)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	machine, err := NewMachine(device, b.G, append(opts, withCeilingBytes(1<<14),
		WithParams(b.Params...), WithOutputs(b.Loss), WithLogger(logger))...)
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
	opbase.Init(&o.Base, o, "PlusOne", "", gorgonia.Nodes{x}, x.Dtype(), x.Shape(),
		computePlusOne[float32], computePlusOne[float64])
	return gorgonia.ApplyOp(o, x)
}

func computePlusOne[T float32 | float64](_ *plusOneOp, y []T, in opbase.Args) error {
	for i, v := range opbase.Slice[T](in, 0) {
		y[i] = v + 1
	}
	return nil
}

// TestUnknownOp wants an op without a kernel to be computed on the host, with one warning, or to be
// refused by name.
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
	machine, err := NewMachine(device, g,
		append(opts, WithOutputs(y), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
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
			if got, want := flat(t, after)[i],
				(v+1)*(v+1); math.Abs(float64(got-want)) > 1e-5*float64(want) {
				t.Fatalf("(%v + 1)² is %v", v, got)
			}
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 1 ||
		!strings.Contains(log.String(), "PlusOne") {
		t.Errorf("%d warnings, want one that names the op: %s", n, log.String())
	}
	if _, err := NewMachine(device, x.Graph(), append(opts, WithStrict())...); err == nil ||
		!strings.Contains(err.Error(), "PlusOne") {
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
	x = gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(3, 5), tensor.WithBacking(value(15))),
		gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(5, 4), tensor.WithBacking(value(20))),
		gorgonia.WithName("w"))
	h := must(gorgonia.Mul(x, w))
	two := must(gorgonia.Mul(h, gorgonia.NewConstant(float32(2))))
	y = must(gorgonia.Add(must(gorgonia.HadamardProd(must(gorgonia.Tanh(h)), h)), two))
	return g, x, y
}

// TestCapture wants a graph without host nodes to be recorded at the second run, and nothing but
// inputs to be copied.
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
		if err := gorgonia.Let(x, tensor.New(tensor.WithShape(3, 5),
			tensor.WithBacking(fresh))); err != nil {
			t.Fatal(err)
		}
		before := device.ctx.Stats()
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		work := device.ctx.Stats().Sub(before)
		if step > 0 && (work.GraphLaunches != 1 || work.ToHost.Count != 0 ||
			work.OnDevice.Count != 0) {
			t.Errorf("step %d: %+v, want one launch of a graph and no copies but those of the "+
				"inputs", step, work)
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
	gorgonia.NodeFromAny(double, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{1, 2})), gorgonia.WithName("x"))
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
	device, _, fakeOption := openFake(t,
		fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9,
			Memory: 33 << 20, SMs: 1}}})
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4096, 4096),
		gorgonia.WithName("x"))
	if _, err := gorgonia.Square(x); err != nil {
		t.Fatal(err)
	}
	_, err := NewMachine(device, g, fakeOption)
	if !errors.Is(err, gpu.OutOfMemory) || !strings.Contains(fmt.Sprint(err), "128.00 MiB") {
		t.Errorf("got %v, want an error that says how much is needed", err)
	}
}

// TestArguments gives every function what it must refuse, by an error that says what it is.
func TestArguments(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	build := func(name string) (*gorgonia.ExprGraph, *gorgonia.Node, *gorgonia.Node) {
		g := gorgonia.NewGraph()
		w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 2),
			tensor.WithBacking([]float32{1, 2, 3, 4})), gorgonia.WithName(name))
		return g, w, gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
	}
	g, w, _ := build("w")
	_, foreign, foreignSum := build("w")
	owner, err := NewMachine(device, g, fakeOption, WithParams(w), WithLogger(nil))
	if err != nil {
		t.Fatal(err)
	}
	if owner.config.logger != slog.Default() {
		t.Error("WithLogger(nil) does not stand for the default")
	}
	other, _, _ := build("v")
	for want, err := range map[string]error{
		"WithOutputs: node": make1(device, g, fakeOption,
			WithOutputs(foreignSum)),
		"WithParams: input w": make1(device, g, fakeOption, WithParams(foreign)),
		"an option is nil":    make1(device, g, fakeOption, nil),
		"WithParamsOf: no input has name": make1(device, other,
			fakeOption, WithParamsOf(owner)),
		"a node is nil":                       owner.Upload(nil),
		"no parameter has a gradient":         owner.SetOptimizer(wrapped{new(optim.AdamW)}, 1),
		"the optimiser is a nil *optim.AdamW": owner.SetOptimizer((*optim.AdamW)(nil), 1),
		"cudaops.Open: an option is nil":      open1(nil),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	same, _, _ := build("w")
	borrower, err := NewMachine(device, same, fakeOption, WithParamsOf(owner))
	if err != nil {
		t.Fatal(err)
	}
	memory, err := device.ctx.Alloc(256)
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Bind(w, uintptr(memory), 16); err == nil ||
		!strings.Contains(err.Error(), "another machine") {
		t.Errorf("binding a parameter that another machine uses: error %v", err)
	}
	if err := borrower.Close(); err != nil {
		t.Fatal(err)
	}
	if err := owner.Bind(w, uintptr(memory), 16); err != nil {
		t.Errorf("binding a parameter that another machine has used: %v", err)
	}
	if borrower, err = NewMachine(device, same, fakeOption, WithParamsOf(owner)); err != nil {
		t.Fatal(err)
	}
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	if err := borrower.RunAll(); err == nil || !strings.Contains(err.Error(), "WithParamsOf") {
		t.Errorf("the parameters' owner is closed: error %v", err)
	}
	if err := errors.Join(borrower.Close(), device.ctx.Free(memory)); err != nil {
		t.Fatal(err)
	}
}

// TestUploadRefused wants an upload of which a value cannot be sent to send none of the others.
func TestUploadRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	if err := l.open(device, fakeOption); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	p := l.batch.Params[0]
	before, err := l.machine.Value(p)
	if err != nil {
		t.Fatal(err)
	}
	clear(l.model.Params[0].Value.Float32s())
	l.batch.ids[2] = 19
	if err := l.machine.Upload(p, l.batch.IDs); err == nil || !strings.Contains(err.Error(),
		"cudaops.Machine.Upload: Embedding: ids[2] is 19") {
		t.Errorf("an id beyond the vocabulary: %v", err)
	}
	after, err := l.machine.Value(p)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(flat(t, after), flat(t, before)) {
		t.Error("the parameter ahead of it was sent")
	}
}

// wrapped is an optimiser that is no pointer.
type wrapped struct{ *optim.AdamW }

func make1(d *Device, g *gorgonia.ExprGraph, opts ...MachineOption) error {
	_, err := NewMachine(d, g, opts...)
	return err
}

func open1(opt DeviceOption) error {
	_, err := Open(opt)
	return err
}

func TestPrecisionText(t *testing.T) {
	for want, p := range map[string]Precision{"f32": Float32, "bf16": BFloat16,
		"f16": Float16, "f8": Float8} {
		text, err := p.MarshalText()
		if string(text) != want || p.String() != want || err != nil {
			t.Errorf("%d is %q and %v, %v, want %q", uint8(p), text, p, err, want)
		}
		var parsed Precision
		flags := flag.NewFlagSet("", flag.ContinueOnError)
		flags.TextVar(&parsed, "precision", Float32, "")
		if err := flags.Parse([]string{"-precision", want}); err != nil || parsed != p {
			t.Errorf("-precision %s is %v, %v", want, parsed, err)
		}
	}
	p := BFloat16
	if err := p.UnmarshalText([]byte("fp8")); err == nil || !strings.Contains(err.Error(),
		`"fp8"`) || p != BFloat16 {
		t.Errorf("%v, %v", p, err)
	}
	if _, err := Precision(9).MarshalText(); err == nil || Precision(9).String() != "Precision(9)" {
		t.Errorf("%v, %v", Precision(9), err)
	}
}

// TestCopiesOfAStep counts what goes between host and device in the steps of a growing model: ids
// and targets up, the loss and the norm of the gradients down, what the lattice wants to know of
// its seeds down, and nothing else.
func TestCopiesOfAStep(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testCopies(t, device, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testCopies(t, device, fakeOption, scaledGradients)
	})
	for name, p := range map[string]Precision{"float32": Float32,
		"bfloat16": BFloat16, "float16": Float16} {
		if testing.Short() && p != BFloat16 {
			continue
		}
		t.Run(name, func(t *testing.T) { testCopies(t, openGPU(t), WithPrecision(p)) })
	}
}

func testCopies(t *testing.T, device *Device, opts ...MachineOption) {
	l := newLifetime(t, newMuon)
	lattice := l.model.Kasmina.Lattice(0)
	if err := l.model.Germinate(0, 1, state.GerminationRequest{Slot: 1,
		Kind: blueprints.ConvFilter}); err != nil {
		t.Fatal(err)
	}
	for _, s := range []state.Stage{state.Training, state.Grafting} {
		if err := lattice.Transition(1, s); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.open(device, append(opts, WithStrict())...); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	rows, seeds := int64(l.batch.IDs.Shape()[0]), int64(lattice.Seeds())
	const loss, control = 4, 64
	up, down := gpu.Copies{Count: 2, Bytes: 2 * 8 * rows},
		gpu.Copies{Count: 2, Bytes: loss + control}
	with := func(c gpu.Copies, bytes int64) gpu.Copies {
		return gpu.Copies{Count: c.Count + 1, Bytes: c.Bytes + bytes}
	}
	stateBytes, alpha := int64(l.machine.runner.Program.Kasmina[0].State.Extent()), 0.0
	cases := []struct {
		name     string
		set      func() error
		up, down gpu.Copies
	}{
		{"a steady step", nil, up, with(down, 4*program.KasminaBins*seeds)},
		{"telemetry with histograms", func() error {
			return lattice.SetTelemetry(state.Telemetry{Mode: state.Debug})
		}, up,
			with(down, 4*program.KasminaWords*seeds)},
		{"telemetry off", func() error {
			return lattice.SetTelemetry(state.Telemetry{Mode: state.Off})
		}, up, with(down, 4*program.KasminaHealth*seeds)},
		{"a seed that changes", func() error {
			alpha += 0.1
			return lattice.SetAlpha(1, alpha)
		}, with(up, stateBytes), with(down, 4*program.KasminaHealth*seeds)},
		{"another learning rate", func() error {
			return l.optimizer.SetLR(l.optimizer.LR() / 2)
		}, with(up, control), with(down, 4*program.KasminaHealth*seeds)},
	}
	for _, c := range cases[:few(len(cases), 2)] {
		// Runs and updates are launched one by one at first and recorded at the second time.
		for i := range few(4, 3) {
			if c.set != nil {
				if err := c.set(); err != nil {
					t.Fatal(err)
				}
			}
			l.batch.draw(t, uint64(i))
			before := device.ctx.Stats()
			if err := l.step(); err != nil {
				t.Fatal(err)
			}
			work := device.ctx.Stats().Sub(before)
			if i > 1 && (work.ToDevice != c.up || work.ToHost != c.down ||
				work.OnDevice.Count != 0) {
				t.Errorf("%s copies %+v up, %+v down and %+v on the device, want %+v, %+v and none",
					c.name, work.ToDevice, work.ToHost,
					work.OnDevice, c.up, c.down)
			}
			if i > 1 && work.GraphLaunches != 2 {
				t.Errorf("%s launches %d graphs, want that of the run and that of the update",
					c.name, work.GraphLaunches)
			}
		}
	}
}

// TestModesAreCapturedApart wants runs that measure and runs that do not, in turn, to be replayed
// alike: neither makes the other be enqueued task by task again.
func TestModesAreCapturedApart(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLifetime(t, newMuon)
	if err := l.model.Kasmina.Lattice(0).SetTelemetry(state.Telemetry{Mode: state.Sampling,
		Every: 2}); err != nil {
		t.Fatal(err)
	}
	if err := l.open(device, fakeOption); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	for i := range 10 {
		l.batch.draw(t, uint64(i))
		before := device.ctx.Stats()
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if work := device.ctx.Stats().Sub(before); i > 3 && work.GraphLaunches != 2 {
			t.Errorf("step %d launches %d graphs, want that of the run and that of the update",
				i, work.GraphLaunches)
		}
	}
	if n := l.machine.runner.Recordings(); n != 2 {
		t.Errorf("%d kinds of runs are captured, want 2", n)
	}
}

// randomGraph is a graph of random ops over matrices [8, 8], which are also two sequences of four
// tokens with two heads of four.
type randomGraph struct {
	g        *gorgonia.ExprGraph
	r        *rand.Rand
	matrices gorgonia.Nodes
	weights  gorgonia.Nodes // parameters [8, 8]
	norm     *gorgonia.Node
	bias     *gorgonia.Node
	slots    *gorgonia.Node // of all Kasmina layers
	scales   *gorgonia.Node
}

const randomSide = 8

// steps makes nodes until one cannot be made.
type steps struct{ err error }

func (s *steps) do(f func() (*gorgonia.Node, error)) (n *gorgonia.Node) {
	if s.err == nil {
		n, s.err = f()
	}
	return n
}

func (s *steps) apply(f func(a, b *gorgonia.Node) (*gorgonia.Node, error), a,
	b *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) { return f(a, b) })
}

// some is a matrix, more often one of the latest.
func (b *randomGraph) some() *gorgonia.Node {
	return b.matrices[max(b.r.IntN(len(b.matrices)), b.r.IntN(len(b.matrices)))]
}

func (b *randomGraph) weight() *gorgonia.Node { return b.weights[b.r.IntN(len(b.weights))] }

func (b *randomGraph) turned(x *gorgonia.Node) (*gorgonia.Node, error) {
	return op.RoPE(x, op.RoPEConfig{Seq: 4, Heads: 2, HeadDim: 4, Base: 100})
}

// attention is of projections of x, and added to it, or of any matrices.
func (b *randomGraph) attention() (*gorgonia.Node, error) {
	var s steps
	x := b.some()
	q, k, v := b.some(), b.some(), b.some()
	projected := b.r.IntN(3) > 0
	if projected {
		q, k, v = s.apply(op.Linear, x, b.weight()), s.apply(op.Linear, x, b.weight()),
			s.apply(op.Linear, x, b.weight())
	}
	if b.r.IntN(3) > 0 {
		q, k = s.do(func() (*gorgonia.Node, error) {
			return b.turned(q)
		}), s.do(func() (*gorgonia.Node, error) { return b.turned(k) })
	}
	y := s.do(func() (*gorgonia.Node, error) {
		return op.Attention(q, k, v, op.AttentionConfig{Seq: 4, Heads: 2, KVHeads: 2, HeadDim: 4,
			Causal: b.r.IntN(2) == 0})
	})
	if projected {
		y = s.apply(gorgonia.Add, s.apply(op.Linear, y, b.weight()), x)
	}
	return y, s.err
}

// halves exchanges the halves of a matrix.
func (b *randomGraph) halves() (*gorgonia.Node, error) {
	var s steps
	x := b.some()
	low := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(0, 4)) })
	high := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(4, 8)) })
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.Concat(0, high, low) }), s.err
}

func (b *randomGraph) perceptron() (*gorgonia.Node, error) {
	y, err := op.SiLUMLP(b.some(), b.weight(), b.weight(), b.weight())
	if err == nil && b.r.IntN(2) == 0 {
		return gorgonia.Add(b.some(), y)
	}
	return y, err
}

// recomputed is a block whose results are not kept for the backward pass.
func (b *randomGraph) recomputed() (*gorgonia.Node, error) {
	return autodiff.Recompute(gorgonia.Nodes{b.some(), b.weight(), b.norm},
		func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			var s steps
			h := s.do(func() (*gorgonia.Node, error) { return op.RMSNorm(in[0], in[2], 0.1) })
			h = s.apply(op.Linear, h, in[1])
			return s.apply(gorgonia.Add, s.do(func() (*gorgonia.Node, error) {
				return gorgonia.Tanh(h)
			}), in[0]), s.err
		})
}

// kasmina is a layer of seeds that watch, learn and blend.
func (b *randomGraph) kasmina() (*gorgonia.Node, error) {
	l, err := state.NewLattice(4, randomSide, state.WithoutGates())
	if err != nil {
		return nil, err
	}
	for seed, path := range [][]state.Stage{{}, {state.Training},
		{state.Training, state.Grafting}} {
		err = errors.Join(err, l.RequestGermination(seed,
			state.GerminationRequest{Slot: 1 + b.r.IntN(3), Kind: blueprints.Kind(b.r.IntN(4))}))
		for _, stage := range path {
			err = errors.Join(err, l.Transition(seed, stage))
		}
	}
	if err = errors.Join(err, l.SetAlpha(2, 0.5)); err != nil {
		return nil, err
	}
	return op.Kasmina(b.some(), b.slots, b.scales, l)
}

// grow adds a random op.
func (b *randomGraph) grow() (*gorgonia.Node, error) {
	var s steps
	x, y := b.some(), b.some()
	switch b.r.IntN(15) {
	case 0:
		return gorgonia.Add(x, y)
	case 1:
		return gorgonia.Sub(x, y)
	case 2:
		return gorgonia.HadamardProd(s.do(func() (*gorgonia.Node, error) {
			return gorgonia.Tanh(x)
		}), y)
	case 3:
		return gorgonia.Tanh(x)
	case 4:
		return op.Linear(x, b.weight())
	case 5:
		return gorgonia.Add(s.apply(op.Linear, x, b.weight()), y)
	case 6:
		return op.RMSNorm(s.apply(gorgonia.Add, x, y), b.norm, 0.1)
	case 7:
		return b.perceptron()
	case 8:
		return b.attention()
	case 9:
		turned := s.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, 1, 0) })
		return s.apply(gorgonia.Mul, turned, s.do(func() (*gorgonia.Node, error) {
			return gorgonia.SoftMax(y)
		})), s.err
	case 10:
		long := s.do(func() (*gorgonia.Node, error) {
			return gorgonia.Reshape(x, tensor.Shape{4, 16})
		})
		return gorgonia.Reshape(s.apply(gorgonia.Add, long, long),
			tensor.Shape{randomSide, randomSide})
	case 11:
		return b.halves()
	case 12:
		return gorgonia.BroadcastAdd(x, b.bias, nil, []byte{0})
	case 13:
		return b.kasmina()
	}
	return b.recomputed()
}

// newRandomGraph returns a graph, its inputs that hold numbers, its parameters, and some of its
// nodes.
func newRandomGraph(r *rand.Rand) (b *randomGraph, inputs, params,
	outputs gorgonia.Nodes, err error) {
	const d, vocab = randomSide, 19
	b = &randomGraph{g: gorgonia.NewGraph(), r: r}
	input := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(b.g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	ids := make([]*gorgonia.Node, 2)
	for i, name := range []string{"ids", "targets"} {
		values := make([]int, d)
		for j := range values {
			values[j] = r.IntN(vocab)
		}
		ids[i] = gorgonia.NewVector(b.g, tensor.Int, gorgonia.WithShape(d), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(d), tensor.WithBacking(values))))
	}
	table, x := input("table", vocab, d), input("x", d, d)
	b.norm, b.bias = input("norm", d), input("bias", d)
	b.slots, b.scales = input("slots", 4, 2), input("scales", 4)
	b.weights = gorgonia.Nodes{input("a", d, d), input("b", d, d), input("c", d, d)}
	params = append(gorgonia.Nodes{table, b.norm, b.bias, b.slots, b.scales}, b.weights...)
	var s steps
	b.matrices = gorgonia.Nodes{x, s.apply(op.Embedding, ids[0], table)}
	for range 3 + r.IntN(20) {
		b.matrices = append(b.matrices, s.do(b.grow))
		if s.err != nil {
			return nil, nil, nil, nil, s.err
		}
	}
	last := s.do(func() (*gorgonia.Node, error) {
		return op.RMSNorm(b.matrices[len(b.matrices)-1], b.norm, 0.1)
	})
	cost := s.do(func() (*gorgonia.Node, error) {
		return op.LinearCrossEntropy(last, table, ids[1])
	})
	if s.err != nil {
		return nil, nil, nil, nil, s.err
	}
	needed := map[*gorgonia.Node]bool{}
	var need func(n *gorgonia.Node)
	need = func(n *gorgonia.Node) {
		if !needed[n] {
			needed[n] = true
			for _, child := range graph.Children(n) {
				need(child)
			}
		}
	}
	need(cost)
	params = slices.DeleteFunc(params, func(p *gorgonia.Node) bool { return !needed[p] })
	if _, err := gorgonia.Grad(cost, params...); err != nil {
		return nil, nil, nil, nil, err
	}
	outputs = gorgonia.Nodes{cost}
	for _, n := range b.matrices[2:] {
		if r.IntN(4) == 0 && !slices.Contains(outputs, n) {
			outputs = append(outputs, n)
		}
	}
	return b, append(gorgonia.Nodes{x, b.norm, b.bias, b.slots, b.scales, table}, b.weights...),
		params, append(outputs, derivatives(params)...), nil
}

// TestRandomGraphs compares random graphs, whose nodes share memory and are computed together, with
// the same ones of which every node is asked for, so that each is computed by itself and keeps its
// memory.
func TestRandomGraphs(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 8))
	for round := range few(100, 8) {
		device, _, fakeOption := openFake(t, fake.Config{})
		b, inputs, params, outputs, err := newRandomGraph(r)
		if err != nil {
			t.Fatal(err)
		}
		fill := func() {
			t.Helper()
			for _, n := range inputs {
				x := make([]float32, opbase.Size(n.Shape()))
				for i := range x {
					x[i] = 0.25 * float32(r.NormFloat64())
				}
				if err := gorgonia.Let(n, tensor.New(tensor.WithShape(n.Shape()...),
					tensor.WithBacking(x))); err != nil {
					t.Fatal(err)
				}
			}
		}
		fill()
		opts := []MachineOption{fakeOption, WithParams(params...)}
		if r.IntN(3) == 0 {
			opts = append(opts, scaledGradients)
		}
		// Also where the host computes some.
		rules := []string{"+ *=host", "A × B=host", "tanh*=host", "*Reshape*=host", "Repeat*=host",
			"T[[]*=host", "Concat*=host", "Softmax*=host"}
		host := WithWays(rules[r.IntN(len(rules)):][:r.IntN(2)]...)
		m, err := NewMachine(device, b.g, append(opts, WithOutputs(outputs...), host,
			WithLogger(slog.New(slog.DiscardHandler)))...)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		every, err := NewMachine(device, b.g, append(opts, WithOutputs(results(b.g)...))...)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for run := range 3 { // the second is captured, the third replayed
			fill()
			if err := errors.Join(m.Upload(params...), every.Upload(params...), m.RunAll(),
				every.RunAll()); err != nil {
				t.Fatalf("round %d, run %d: %v", round, run, err)
			}
			for _, n := range outputs {
				got, err := m.Value(n)
				want, wantErr := every.Value(n)
				if err := errors.Join(err, wantErr); err != nil {
					t.Fatalf("round %d, run %d: %v", round, run, err)
				}
				x, y := flat(t, got), flat(t, want)
				largest := max(slices.Max(y), -slices.Min(y))
				// long chains make much of rounding, and some gradients are nothing but what it
				// leaves of zero
				for i := range x {
					if math.Abs(float64(x[i]-y[i])) > 0.05*float64(largest)+1e-3 ||
						(x[i] != x[i]) != (y[i] != y[i]) {
						t.Fatalf("round %d, run %d: element %d of %s is %v, want %v", round, run, i,
							graph.Describe(n), x[i], y[i])
					}
				}
			}
		}
		if err := errors.Join(m.Close(), every.Close()); err != nil {
			t.Fatal(err)
		}
	}
}
