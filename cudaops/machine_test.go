package cudaops

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	llmgraph "github.com/kasmina-go/kasmina/llm/graph"
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
	require.NoError(t, err)
	g, err := m.Graph(kind, 3)
	require.NoError(t, err)
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
		require.NoError(t, gorgonia.Let(node, tensor.New(tensor.WithShape(n),
			tensor.WithBacking(x))))
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
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, device.Close())
	})
	return device
}

// openMachine makes a machine that is closed when the test ends.
func openMachine(t testing.TB, device *Device, g *gorgonia.ExprGraph,
	opts ...MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, g, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// randomNode is an input of normal numbers.
func randomNode(g *gorgonia.ExprGraph, r *rand.Rand, deviation float64, name string,
	s ...int) *gorgonia.Node {
	x := make([]float32, opbase.Size(s))
	for i := range x {
		x[i] = float32(deviation * r.NormFloat64())
	}
	return floatNode(g, name, x, s...)
}

// rangeNode is an input of 0, 1, 2 and so on.
func rangeNode(g *gorgonia.ExprGraph, name string, s ...int) *gorgonia.Node {
	return floatNode(g, name, tensor.Range(tensor.Float32, 0, opbase.Size(s)).([]float32), s...)
}

// floatNode is an input of these numbers.
func floatNode(g *gorgonia.ExprGraph, name string, x []float32, s ...int) *gorgonia.Node {
	return gorgonia.NewTensor(g, tensor.Float32, len(s), gorgonia.WithName(name),
		gorgonia.WithShape(s...),
		gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
}

// intNode is an input of ids.
func intNode(g *gorgonia.ExprGraph, name string, ids []int) *gorgonia.Node {
	return gorgonia.NewVector(g, tensor.Int, gorgonia.WithName(name),
		gorgonia.WithShape(len(ids)),
		gorgonia.WithValue(tensor.New(tensor.WithShape(len(ids)), tensor.WithBacking(ids))))
}

// places are where tests run: on the fake driver, and on a GPU that stores activations in a type.
var places = map[string][]MachineOption{"fake": nil, "scaled": {scaledGradients}, "float32": nil,
	"float16": {WithPrecision(Float16)}, "bfloat16": {WithPrecision(BFloat16)}}

// onEach runs a test in some of the places, and tells it how far numbers may be off there.
func onEach(t *testing.T, test func(t *testing.T, device *Device, tolerance float64,
	opts ...MachineOption), tolerances map[string]float64) {
	for name, tolerance := range tolerances {
		t.Run(name, func(t *testing.T) {
			if name == "fake" || name == "scaled" {
				device, _, kernels := openFake(t, fake.Config{})
				test(t, device, tolerance, append([]MachineOption{kernels}, places[name]...)...)
				return
			}
			test(t, openGPU(t), tolerance, slices.Clone(places[name])...)
		})
	}
}

// exactly is places whose tests know how exact their numbers are.
func exactly(names ...string) map[string]float64 {
	tolerances := map[string]float64{}
	for _, name := range names {
		tolerances[name] = 0
	}
	return tolerances
}

// randomSeed is a seed that the test tells of.
func randomSeed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	return seed
}

// errOf is the error of a function of which nothing else is wanted.
func errOf(_ any, err error) error { return err }

// tapeMachine is Gorgonia's machine, which is closed when the test ends.
func tapeMachine(t testing.TB, g *gorgonia.ExprGraph, opts ...gorgonia.VMOpt) gorgonia.VM {
	tape := gorgonia.NewTapeMachine(g, opts...)
	t.Cleanup(func() { require.NoError(t, tape.Close()) })
	return tape
}

// logTo has a machine write its log into a text.
func logTo(w io.Writer) MachineOption { return WithLogger(slog.New(slog.NewTextHandler(w, nil))) }

// optimize gives a machine an optimiser.
func optimize(t testing.TB, m *Machine, newOptimizer func() (optim.Optimizer, error),
	maxNorm float64) optim.Optimizer {
	t.Helper()
	o, err := newOptimizer()
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, maxNorm))
	return o
}

// valueIn is a node's value in a machine.
func valueIn(t testing.TB, m *Machine, n *gorgonia.Node) gorgonia.Value {
	t.Helper()
	v, err := m.Value(n)
	require.NoError(t, err)
	return v
}

// TestMachineAgreesWithTapeMachine runs a model's training graph on both machines, on several
// batches. The machine runs the first as it is, records the second and replays it from then on.
func TestMachineAgreesWithTapeMachine(t *testing.T) {
	onEach(t, testAgainstTapeMachine, map[string]float64{
		"fake": 1e-5, "float32": 1e-4, "scaled": 1e-5, "bfloat16": 3e-2, "float16": 5e-3})
}

func testAgainstTapeMachine(t *testing.T, device *Device, tolerance float64,
	opts ...MachineOption) {
	seed := randomSeed(t)
	m, b := newBatch(t, llm.ForTraining, seed)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	machine := openMachine(t, device, b.G, append(opts, withCeilingBytes(1<<14),
		WithParams(b.Params...), WithOutputs(b.Loss), WithLogger(logger))...)
	_, same := newBatch(t, llm.ForTraining, seed)
	tape := tapeMachine(t, same.G)
	for step := range uint64(few(4, 2)) {
		b.draw(t, seed+step)
		same.draw(t, seed+step)
		tape.Reset()
		require.NoError(t, errors.Join(machine.RunAll(), tape.RunAll()))
		nodes, want := gorgonia.Nodes{b.Loss}, gorgonia.Nodes{same.Loss}
		for i, p := range b.Params {
			nodes, want = append(nodes, p.Deriv()), append(want, same.Params[i].Deriv())
		}
		for i, n := range nodes {
			v := valueIn(t, machine, n)
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
	require.Zero(t, log.Len(), log.String())
}

// profileRuns wants every task's time, the longest first.
func profileRuns(t *testing.T, machine *Machine) {
	t.Helper()
	require.NoError(t, machine.StartProfile())
	for range ProfileSteps {
		require.NoError(t, machine.RunAll())
	}
	profile, err := machine.Profile()
	require.NoError(t, err)
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
	require.Equal(t, len(machine.runner.Program.Calls), tasks)
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
	onEach(t, testUnknownOp, exactly("fake", "float32"))
}

func testUnknownOp(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	g, x, y := stockGraph(t)
	z, err := plusOne(y)
	if err == nil {
		z, err = gorgonia.Square(z)
	}
	require.NoError(t, err)
	var log bytes.Buffer
	machine := openMachine(t, device, g,
		append(opts, WithOutputs(y), logTo(&log))...)
	for range 3 {
		require.NoError(t, machine.RunAll())
		before := valueIn(t, machine, y)
		after := valueIn(t, machine, z)
		for i, v := range flat(t, before) {
			if got, want := flat(t, after)[i],
				(v+1)*(v+1); math.Abs(float64(got-want)) > 1e-5*float64(want) {
				t.Fatalf("(%v + 1)² is %v", v, got)
			}
		}
	}
	require.Equal(t, 1, strings.Count(log.String(), "\n"))
	require.Contains(t, log.String(), "PlusOne")
	require.ErrorContains(t, errOf(NewMachine(device, x.Graph(), append(opts, WithStrict())...)),
		"PlusOne")
}

// stockGraph is y = tanh(x·wᵀ) ⊙ x·wᵀ + 2·x·wᵀ, all of which has kernels.
func stockGraph(t testing.TB) (g *gorgonia.ExprGraph, x, y *gorgonia.Node) {
	t.Helper()
	must := gorgonia.Must
	g = gorgonia.NewGraph()
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	x = randomNode(g, r, 1, "x", 3, 5)
	w := randomNode(g, r, 1, "w", 5, 4)
	h := must(gorgonia.Mul(x, w))
	two := must(gorgonia.Mul(h, gorgonia.NewConstant(float32(2))))
	y = must(gorgonia.Add(must(gorgonia.HadamardProd(must(gorgonia.Tanh(h)), h)), two))
	return g, x, y
}

// TestCapture wants a graph without host nodes to be recorded at the second run, and nothing but
// inputs to be copied.
func TestCapture(t *testing.T) {
	onEach(t, testCapture, exactly("fake", "float32"))
}

func testCapture(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	g, x, y := stockGraph(t)
	machine := openMachine(t, device, g, append(opts, WithStrict())...)
	for step := range 4 {
		fresh := make([]float32, 15)
		for i := range fresh {
			fresh[i] = float32(rand.NormFloat64())
		}
		require.NoError(t, gorgonia.Let(x, tensor.New(tensor.WithShape(3, 5),
			tensor.WithBacking(fresh))))
		before := device.ctx.Stats()
		require.NoError(t, machine.RunAll())
		work := device.ctx.Stats().Sub(before)
		if step > 0 && (work.GraphLaunches != 1 || work.ToHost.Count != 0 ||
			work.OnDevice.Count != 0) {
			t.Errorf("step %d: %+v, want one launch of a graph and no copies but those of the "+
				"inputs", step, work)
		}
		got := valueIn(t, machine, y)
		tape := gorgonia.NewTapeMachine(g)
		require.NoError(t, tape.RunAll())
		require.Less(t, distance(t, got, y.Value()), 1e-6, step)
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
	require.NoError(t, errOf(gorgonia.Square(double.AllNodes()[0])))
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
		require.ErrorContains(t, c.err, c.want)
	}
	g, x, y := stockGraph(t)
	fakeDriver.Fail("cuMemAlloc_v2", 1, gpu.OutOfMemory)
	fakeDriver.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
	require.ErrorIs(t, errOf(NewMachine(device, g, fakeOption)), gpu.OutOfMemory)
	m, err := NewMachine(device, g, fakeOption)
	require.NoError(t, err)
	require.ErrorContains(t, errOf(m.Value(y)), "has not run")
	require.NoError(t, m.RunAll())
	var inner *gorgonia.Node
	for _, n := range g.AllNodes() {
		if fmt.Sprint(n.Op()) == "tanh" {
			inner = n
		}
	}
	require.ErrorContains(t, errOf(m.Value(inner)), "WithOutputs")
	require.Error(t, errOf(m.Value(b.Loss)), "the value of a node of another graph is no error")
	require.ErrorContains(t, m.Upload(y), "no input")
	require.NoError(t, errOf(m.Value(x)))
	require.NoError(t, errors.Join(m.Close(), m.Close()))
	require.Error(t, m.RunAll(), "a closed machine runs")
}

// TestTooLarge wants a graph that does not fit to be refused before anything is allocated for it.
func TestTooLarge(t *testing.T) {
	device, _, fakeOption := openFake(t,
		fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9,
			Memory: 33 << 20, SMs: 1}}})
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4096, 4096),
		gorgonia.WithName("x"))
	require.NoError(t, errOf(gorgonia.Square(x)))
	_, err := NewMachine(device, g, fakeOption)
	require.ErrorIs(t, err, gpu.OutOfMemory)
	require.Contains(t, fmt.Sprint(err), "128.00 MiB")
}

// TestArguments gives every function what it must refuse, by an error that says what it is.
func TestArguments(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	build := func(name string) (*gorgonia.ExprGraph, *gorgonia.Node, *gorgonia.Node) {
		g := gorgonia.NewGraph()
		w := floatNode(g, name, []float32{1, 2, 3, 4}, 2, 2)
		return g, w, gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
	}
	g, w, _ := build("w")
	_, foreign, foreignSum := build("w")
	owner, err := NewMachine(device, g, fakeOption, WithParams(w), WithLogger(nil))
	require.NoError(t, err)
	require.Same(t, slog.Default(), owner.config.logger)
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
		require.ErrorContains(t, err, want)
	}
	same, _, _ := build("w")
	borrower, err := NewMachine(device, same, fakeOption, WithParamsOf(owner))
	require.NoError(t, err)
	memory, err := device.ctx.Alloc(256)
	require.NoError(t, err)
	require.ErrorContains(t, owner.Bind(w, uintptr(memory), 16), "another machine")
	require.NoError(t, borrower.Close())
	require.NoError(t, owner.Bind(w, uintptr(memory), 16))
	if borrower, err = NewMachine(device, same, fakeOption, WithParamsOf(owner)); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, owner.Close())
	require.ErrorContains(t, borrower.RunAll(), "WithParamsOf")
	require.NoError(t, errors.Join(borrower.Close(), device.ctx.Free(memory)))
}

// TestUploadRefused wants an upload of which a value cannot be sent to send none of the others.
func TestUploadRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device, fakeOption))
	defer l.machine.Close()
	p := l.batch.Params[0]
	before := valueIn(t, l.machine, p)
	clear(l.model.Params[0].Value.Float32s())
	l.batch.ids[2] = 19
	require.ErrorContains(t, l.machine.Upload(p, l.batch.IDs),
		"cudaops.Machine.Upload: Embedding: ids[2] is 19")
	after := valueIn(t, l.machine, p)
	require.Equal(t, flat(t, before), flat(t, after), "the parameter ahead of it was sent")
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
		require.NoError(t, flags.Parse([]string{"-precision", want}), want)
		require.Equal(t, p, parsed, want)
	}
	p := BFloat16
	require.ErrorContains(t, p.UnmarshalText([]byte("fp8")), `"fp8"`)
	require.Equal(t, BFloat16, p)
	require.Error(t, errOf(Precision(9).MarshalText()))
	require.Equal(t, "Precision(9)", Precision(9).String())
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
	require.NoError(t, l.model.Germinate(0, 1, state.GerminationRequest{Slot: 1,
		Kind: blueprints.ConvFilter}))
	for _, s := range []state.Stage{state.Training, state.Grafting} {
		require.NoError(t, lattice.Transition(1, s))
	}
	require.NoError(t, l.open(device, append(opts, WithStrict())...))
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
				require.NoError(t, c.set())
			}
			l.batch.draw(t, uint64(i))
			before := device.ctx.Stats()
			require.NoError(t, l.step())
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
	require.NoError(t, l.model.Kasmina.Lattice(0).SetTelemetry(state.Telemetry{Mode: state.Sampling,
		Every: 2}))
	require.NoError(t, l.open(device, fakeOption))
	defer l.machine.Close()
	for i := range 10 {
		l.batch.draw(t, uint64(i))
		before := device.ctx.Stats()
		require.NoError(t, l.step())
		if work := device.ctx.Stats().Sub(before); i > 3 && work.GraphLaunches != 2 {
			t.Errorf("step %d launches %d graphs, want that of the run and that of the update",
				i, work.GraphLaunches)
		}
	}
	require.Equal(t, 2, l.machine.runner.Recordings())
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
		ids[i] = intNode(b.g, name, values)
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
	seed := randomSeed(t)
	r := rand.New(rand.NewPCG(seed, 8))
	for round := range few(50, 8) { // other graphs in each run
		device, _, fakeOption := openFake(t, fake.Config{})
		b, inputs, params, outputs, err := newRandomGraph(r)
		require.NoError(t, err)
		fill := func() {
			t.Helper()
			for _, n := range inputs {
				x := make([]float32, opbase.Size(n.Shape()))
				for i := range x {
					x[i] = 0.25 * float32(r.NormFloat64())
				}
				require.NoError(t, gorgonia.Let(n, tensor.New(tensor.WithShape(n.Shape()...),
					tensor.WithBacking(x))))
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
		require.NoError(t, err, round)
		every, err := NewMachine(device, b.g, append(opts, WithOutputs(results(b.g)...))...)
		require.NoError(t, err, round)
		for run := range 3 { // the second is captured, the third replayed
			fill()
			if err := errors.Join(m.Upload(params...), every.Upload(params...), m.RunAll(),
				every.RunAll()); err != nil {
				t.Fatalf("round %d, run %d: %v", round, run, err)
			}
			for _, n := range outputs {
				got, err := m.Value(n)
				want, wantErr := every.Value(n)
				require.NoError(t, errors.Join(err, wantErr), "%v, %v", round, run)
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
		require.NoError(t, errors.Join(m.Close(), every.Close()))
	}
}

// logitsOf are those of a graph for some ids.
func logitsOf(t *testing.T, m *Machine, g *llm.Graph) []float32 {
	t.Helper()
	require.NoError(t, g.LetTokens([]int{3, 1, 4, 1, 5}))
	require.NoError(t, m.RunAll())
	v, err := m.Value(g.Logits)
	require.NoError(t, err)
	return v.Data().([]float32)
}

// valueless returns the graph of a model with parameters that have no value, and a function that
// reads them in a type.
func valueless(t *testing.T, m *llm.Model, kind llm.GraphKind, p Precision) (*llm.Graph,
	func(*gorgonia.Node, func([]byte, Precision) error) error) {
	g, err := m.Graph(kind, 1)
	require.NoError(t, err)
	bare, err := llmgraph.Build(llmgraph.Outline(m.Config), kind, 1)
	require.NoError(t, err)
	values := map[string][]float32{}
	for i, n := range g.Params {
		require.Equal(t, n.Name(), bare.Params[i].Name())
		require.Equal(t, n.Shape(), bare.Params[i].Shape())
		require.Nil(t, bare.Params[i].Value())
		values[n.Name()] = n.Value().Data().([]float32)
	}
	return bare, func(n *gorgonia.Node, put func([]byte, Precision) error) error {
		var all []byte
		for _, v := range values[n.Name()] {
			if p == Float32 {
				all = binary.LittleEndian.AppendUint32(all, math.Float32bits(v))
			} else {
				all = binary.LittleEndian.AppendUint16(all, uint16(half.NewBFloat16(v)))
			}
		}
		for len(all) > 0 {
			n := min(len(all), 40)
			if err := put(all[:n], p); err != nil {
				return err
			}
			all = all[n:]
		}
		return nil
	}
}

// TestFrozen wants frozen parameters to give the same bits in less memory, from values and from
// what is read, in one type and another, and another machine to share them.
func TestFrozen(t *testing.T) {
	onEach(t, testFrozen, exactly("fake", "float32", "bfloat16"))
}

func testFrozen(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	for _, untied := range []bool{false, true} {
		c := llm.Config{Vocab: 24, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 8,
			Untied: untied, Traits: llm.Traits{QKNorm: untied, QKVBias: !untied}}.Default()
		m, err := llm.NewModel(c, tensor.Float32, 1)
		require.NoError(t, err)
		for _, x := range m.Params { // that can be read in bfloat16 without another rounding
			for i, v := range x.Value.Float32s() {
				x.Value.Float32s()[i] = half.NewBFloat16(v).Float32()
			}
		}
		open := func(g *llm.Graph, more ...MachineOption) *Machine {
			machine, err := NewMachine(device, g.G, append(append(more, opts...), WithStrict(),
				WithTuning(TuneOff))...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, machine.Close()) })
			return machine
		}
		g, err := m.Graph(llm.ForLogits, 1)
		require.NoError(t, err)
		plain := open(g, WithParams(g.Params...))
		want := logitsOf(t, plain, g)
		of := open(g, WithFrozen(nil, g.Params...))
		require.Equal(t, want, logitsOf(t, of, g))
		if !untied || of.options.Activation != gpu.Float32 { // copies of which there are in float32
			require.Less(t, of.Memory(), plain.Memory())
		}
		for i := range m.Params {
			v, err := of.Value(g.Params[i])
			require.NoError(t, err)
			require.Equal(t, m.Params[i].Value.Data(), v.Data())
		}
		require.NoError(t, of.Download())
		for _, stored := range []Precision{Float32, BFloat16} {
			bare, read := valueless(t, m, llm.ForLogits, stored)
			owner := open(bare, WithFrozen(read, bare.Params...))
			require.Equal(t, want, logitsOf(t, owner, bare))
			require.Equal(t, of.Memory(), owner.Memory())
			beside, _ := valueless(t, m, llm.ForLogits, stored)
			sharing := open(beside, WithParamsOf(owner))
			require.Equal(t, want, logitsOf(t, sharing, beside))
			require.Equal(t, tasksOf(plain), tasksOf(sharing))
		}
	}
}

// TestFrozenErrors wants what is read to be as much as there is.
func TestFrozenErrors(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	m, err := llm.NewModel(llm.Config{Vocab: 24, Dim: 16, Layers: 1, Heads: 2, Seq: 8}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	broken := errors.New("the disk is gone")
	for want, change := range map[string]func([]byte, func([]byte, Precision) error) error{
		"elements of": func(part []byte, put func([]byte, Precision) error) error { return nil },
		"more than its": func(part []byte, put func([]byte, Precision) error) error {
			return errors.Join(put(part, Float32), put(part, Float32))
		},
		"no number of elements": func(part []byte, put func([]byte, Precision) error) error {
			return put(part[:3], Float32)
		},
		"numbers of type f8": func(part []byte, put func([]byte, Precision) error) error {
			return put(part, Float8)
		},
		broken.Error(): func([]byte, func([]byte, Precision) error) error { return broken },
	} {
		g, read := valueless(t, m, llm.ForLogits, Float32)
		_, err := NewMachine(device, g.G, fakeOption, WithFrozen(func(n *gorgonia.Node,
			put func([]byte, Precision) error) error {
			return read(n, func(part []byte, _ Precision) error { return change(part, put) })
		}, g.Params...))
		require.ErrorContains(t, err, want)
	}
	g, _ := valueless(t, m, llm.ForLogits, Float32)
	_, err = NewMachine(device, g.G, fakeOption, WithFrozen(nil, g.Params...))
	require.ErrorContains(t, err, "has no value")
	_, err = NewMachine(device, g.G, fakeOption, WithFrozen(nil, g.Logits))
	require.ErrorContains(t, err, "is no input")
}

// TestDecoding wants machines that keep keys and values to have the logits that the CPU has, of
// texts that grow by one token or by many, and beyond what is kept at first; and refusals of what
// fits no cache.
func TestDecoding(t *testing.T) {
	device, _, kernels := openFake(t, fake.Config{})
	for name, traits := range map[string]llm.Traits{
		"llama": {}, "windows": {Blocks: []llm.Block{{Window: 7}, {}}}, "norms": {QKNorm: true},
		"biases": {QKVBias: true}, "gemma": {GELU: true, PostNorms: true, NormPlusOne: true},
		"without RoPE": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			c := llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 1100,
				Traits: traits}
			m, err := llm.NewModel(c.Default(), tensor.Float32, 1)
			require.NoError(t, err)
			decode := func(make func(*llmgraph.Graph) (llmgraph.Machine, error)) *llmgraph.Decoding {
				d, err := llmgraph.NewDecoding(m.Parts(), make)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, d.Close()) })
				return d
			}
			var attention *Machine
			var cached *gorgonia.Node
			onGPU := decode(func(g *llmgraph.Graph) (llmgraph.Machine, error) {
				made, err := NewMachine(device, g.G, kernels, WithStrict(),
					WithParams(g.Params...), WithOutputs(g.Outputs()...))
				if err == nil && g.Position != nil {
					attention = made
					for n := range made.runner.Program.Kept {
						cached = n
					}
				}
				return made, err
			})
			onCPU := decode(nil)
			var tokens []int
			for i := range c.Seq {
				tokens = append(tokens, i*i%19)
			}
			for _, n := range []int{1, 2, 3, 20, 21, 22, 140, 141, 1022, 1023, 1024, 1025, 1026, 5, 6,
				1100} {
				want, err := onCPU.Next(t.Context(), tokens[:n])
				require.NoError(t, err)
				got, err := onGPU.Next(t.Context(), tokens[:n])
				require.NoError(t, err)
				require.InDeltaSlice(t, want, got, 1e-5, n)
			}
			for want, err := range map[string]error{
				"want a machine on the same": attention.Keep(cached, nil, nil, nil),
				"no attention":               attention.Keep(nil, attention, nil, nil),
				"not part of the graph":      attention.Keep(cached, attention, nil, nil),
			} {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

// gatesFused makes one kernel of the gates of perceptrons and their products, which can keep h from
// the forward pass.
var gatesFused = WithWays("SiLUProduct*=fused")

// cardOf is a fake card with so many bytes, and a small cache.
func cardOf(bytes int) fake.Config {
	info := smallCache("Card")
	info[0].Memory = uint64(bytes)
	return fake.Config{Devices: info}
}

// keepsH reports how many backward passes of a machine's perceptrons go without forming h, as its
// choices have it.
func keepsH(m *Machine) (kept, formed int) {
	for _, c := range m.Choices() {
		switch {
		case c.Op != "SiLUProductBackward":
		case strings.HasSuffix(c.Shape, "without h"):
			kept++
		default:
			formed++
		}
	}
	return kept, formed
}

// trainWithGates trains a model of several layers for a few steps, and returns the machine and the
// bits of losses and gradients.
func trainWithGates(t *testing.T, device *Device, opts ...MachineOption) (m *Machine,
	seen []string) {
	t.Helper()
	l := newWideLifetime(t)
	require.NoError(t, l.open(device, append(opts, gatesFused)...))
	t.Cleanup(func() {
		require.NoError(t, l.machine.Close())
	})
	for range 4 {
		require.NoError(t, l.step())
		for _, n := range append(gorgonia.Nodes{l.batch.Loss}, gradients(l.batch.Params)...) {
			v := valueIn(t, l.machine, n)
			seen = append(seen, string(gpu.Bytes(flat(t, v))))
		}
	}
	return l.machine, seen
}

// TestRoom wants memory taken to save time up to where too little would be left, and the same bits
// with and without.
func TestRoom(t *testing.T) {
	ownChoices(t)
	train := func(t *testing.T, bytes int, opts ...MachineOption) (*Machine, []string) {
		t.Helper()
		device, _, fakeOption := openFake(t, cardOf(bytes))
		return trainWithGates(t, device, append(opts, fakeOption)...)
	}
	const plenty = 1 << 30
	m, want := train(t, plenty)
	elements := 0
	for _, p := range m.config.Params {
		elements += p.Shape().TotalSize()
	}
	need := m.runner.Program.Arena + m.runner.Program.Resident() + 8*elements
	// of a card for which the workspace is taken before
	least := int(float64(need+run.WorkspaceBytes) / (1 - roomLeft))
	if kept, formed := keepsH(m); kept != 1 || formed != 0 || !m.runner.Program.Roomy {
		t.Errorf("on an empty card: %d perceptrons without h, %d with, spent %v", kept, formed,
			m.runner.Program.Roomy)
	}
	held, spent := m.Memory(), m.runner.Program.Spent
	for what, c := range map[string]struct{ limit, kept, formed int }{
		"for all": {need, 1, 0}, "for some": {need - 1, 1, 1}, "for none": {need - spent, 0, 1}} {
		m, got := train(t, plenty, WithMemory(c.limit))
		kept, formed := keepsH(m)
		if kept != c.kept || formed != c.formed || !slices.Equal(want, got) {
			t.Errorf("memory %s: there are perceptrons without h %d, with %d, equal bits %v", what,
				kept, formed, slices.Equal(want, got))
		}
		if m.Memory()-m.runner.Program.Arena > held-need+c.limit {
			t.Errorf("memory %s: the machine holds %d bytes", what, m.Memory())
		}
	}
	for _, c := range []struct {
		what  string
		bytes int
		spent bool
	}{{"just enough", least + 64, true}, {"a little less", least - 64, false},
		{"little", need + run.WorkspaceBytes + 64<<10, false}} {
		m, got := train(t, c.bytes)
		if kept, formed := keepsH(m); kept > 0 != c.spent || formed > 0 == c.spent ||
			m.runner.Program.Roomy != c.spent {
			t.Errorf("%s: %d perceptrons without h, %d with, spent %v", c.what, kept, formed,
				m.runner.Program.Roomy)
		}
		require.NotEqual(t, c.spent, m.Memory() < held, "%s: the machine holds %d bytes, with h %d",
			c.what, m.Memory(), held)
		// the reports, a layer, and what starts its slots
		require.Equal(t, 3, len(m.runner.Attendants), c.what)
		require.Equal(t, got, want, c.what)
	}
	// Nothing is timed again for a second plan.
	private := timedFrom(1, filepath.Join(t.TempDir(), "tune.json"))
	m, _ = train(t, least-64, private, WithTuning(TuneCached))
	products := 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" {
			if products++; c.Source != Measured {
				t.Errorf("%+v", c)
			}
		}
	}
	require.NotZero(t, products, "the choices lack those of products")
	if kept, _ := keepsH(m); kept > 0 {
		t.Error("the choices are those of a plan that was dropped")
	}
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		if device.info.Capability() != 90 {
			t.Skip("needs a GPU of compute capability 9.0")
		}
		free, total, err := device.Memory()
		require.NoError(t, err)
		if free < total-total/10 {
			t.Skip("needs a GPU that no other process uses")
		}
		opts := []MachineOption{WithPrecision(BFloat16), WithTuning(TuneOff)}
		m, want := trainWithGates(t, device, opts...)
		if free, total, err = device.Memory(); err != nil {
			t.Fatal(err)
		}
		hog, err := device.ctx.Alloc(int(free - total/20))
		require.NoError(t, err)
		t.Cleanup(func() { // behind the machines
			require.NoError(t, device.ctx.Free(hog))
		})
		less, got := trainWithGates(t, device, opts...)
		require.True(t, m.runner.Program.Roomy)
		require.False(t, less.runner.Program.Roomy)
		require.Equal(t, got, want, "losses or gradients differ")
	})
}

func gradients(params gorgonia.Nodes) (all gorgonia.Nodes) {
	for _, p := range params {
		all = append(all, p.Deriv())
	}
	return all
}

// newBorrower is a machine that computes gradients with the parameters of another one.
func newBorrower(t *testing.T, device *Device, of *Machine, opts ...MachineOption) *Machine {
	t.Helper()
	b := newLifetime(t, newAdamW).batch
	m, err := NewMachine(device, b.G, append(opts, gatesFused, WithParamsOf(of),
		WithOutputs(append(gradients(b.Params), b.Loss)...))...)
	require.NoError(t, err)
	return m
}

// TestRoomShared wants a machine that borrows parameters, and is planned twice, to give them back
// once.
func TestRoomShared(t *testing.T) {
	device, _, fakeOption := openFake(t, cardOf(128<<20))
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device, fakeOption, gatesFused))
	free, _, err := device.Memory()
	require.NoError(t, err)
	hog, err := device.ctx.Alloc(int(free) - run.WorkspaceBytes - 4<<20)
	require.NoError(t, err)
	m := newBorrower(t, device, l.machine, fakeOption)
	require.False(t, m.runner.Program.Roomy)
	require.Len(t, m.borrowed, len(l.batch.Params))
	require.NoError(t, errors.Join(m.RunAll(), m.Close(), device.ctx.Free(hog)))
	for _, in := range l.machine.runner.Program.Inputs {
		require.False(t, l.machine.inputs.Shared(in), graph.Describe(in.Node))
	}
	require.NoError(t, l.machine.Close())
}

// TestRoomOfOptimizer wants a machine to leave room for the moments that another one on the device
// will have, whether it borrows that one's parameters or not, until that one has them or is closed.
func TestRoomOfOptimizer(t *testing.T) {
	for _, c := range []struct {
		what  string
		other func(t *testing.T, device *Device, first *Machine, opt MachineOption) *Machine
	}{
		{"a borrower", func(t *testing.T, device *Device, first *Machine,
			opt MachineOption) *Machine {
			return newBorrower(t, device, first, opt)
		}},
		{"one with parameters of its own", func(t *testing.T, device *Device, _ *Machine,
			opt MachineOption) *Machine {
			b := newLifetime(t, newAdamW).batch
			m, err := NewMachine(device, b.G, opt, gatesFused,
				WithParams(b.Params...), WithOutputs(b.Loss))
			require.NoError(t, err)
			return m
		}},
	} {
		t.Run(c.what, func(t *testing.T) { testRoomOfOptimizer(t, c.other) })
	}
}

func testRoomOfOptimizer(t *testing.T, other func(*testing.T, *Device, *Machine,
	MachineOption) *Machine) {
	device, cuda, fakeOption := openFake(t, cardOf(256<<20))
	l := newLifetime(t, newAdamW)
	first := newFuseMachine(t, device, l.batch.G, l.batch.Params, gorgonia.Nodes{l.batch.Loss},
		[]MachineOption{fakeOption, gatesFused})
	m := other(t, device, first, fakeOption)
	need, moments := m.Memory()+momentsToCome(m), momentsToCome(first)
	if err := m.Close(); err != nil || !m.runner.Program.Roomy || moments == 0 {
		t.Fatalf("spent %v on an empty card, error %v", m.runner.Program.Roomy, err)
	}
	nothing := func() error { return nil }
	set := func() error { return first.SetOptimizer(l.optimizer, 1) }
	for _, c := range []struct {
		what string
		left int // beside what the machine takes, with an optimiser
		do   func() error
		want bool
	}{
		{"room for both", 3 * moments / 2, nothing, true},
		{"none for moments", moments / 2, nothing, false},
		{"which are there", moments / 2, set, true},
		{"which are let go of", moments / 2, func() error {
			cuda.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
			if err := set(); !errors.Is(err, gpu.OutOfMemory) {
				return fmt.Errorf("SetOptimizer: %w", err)
			}
			return nil
		}, false},
	} {
		require.NoError(t, c.do())
		free, total, err := device.Memory()
		require.NoError(t, err)
		hog, err := device.ctx.Alloc(int(free) - int(roomLeft*float64(total)) - need - c.left)
		require.NoError(t, err)
		m := other(t, device, first, fakeOption)
		require.Equal(t, c.want, m.runner.Program.Roomy, c.what)
		require.NoError(t, errors.Join(m.Close(), device.ctx.Free(hog)))
	}
	require.Equal(t, int64(moments), device.expected.Load())
	require.NoError(t, first.Close())
	require.Zero(t, device.expected.Load())
}

// TestRoomFails wants errors between one plan and the next to leave nothing behind.
func TestRoomFails(t *testing.T) {
	for _, call := range []string{"cuMemGetInfo", "cuMemAlloc", "cuMemHostAlloc",
		"cublasLtMatmulAlgoGetHeuristic"} {
		met := 0
		for nth := 1; ; nth++ {
			// less than a tenth is left
			device, cuda, fakeOption := openFake(t, cardOf(run.WorkspaceBytes+3<<20))
			l := newLifetime(t, newAdamW)
			cuda.Fail(call, nth, gpu.OutOfMemory)
			err := l.open(device, fakeOption, gatesFused)
			if err == nil {
				require.False(t, l.machine.runner.Program.Roomy, "there is room for h")
				require.NoError(t, l.machine.Close())
				break
			}
			met++
			require.ErrorIs(t, err, gpu.OutOfMemory, nth)
			require.ErrorContains(t, err, call, nth)
			if l.machine != nil {
				require.NoError(t, l.machine.Close(), "%v, %v", call, nth)
			}
			require.Empty(t, device.ctx.Context.(*fake.Context).Leaks(), "%v, %v",
				call, nth)
		}
		require.GreaterOrEqual(t, met, 2, call)
	}
	// The error of a graph that fits in no way has the figures of the plan that needs least.
	device, _, fakeOption := openFake(t, cardOf(run.WorkspaceBytes+1<<10))
	err := newLifetime(t, newAdamW).open(device, fakeOption, gatesFused)
	require.ErrorIs(t, err, gpu.OutOfMemory)
	require.ErrorContains(t, err, "1.00 KiB are free")
}

// TestRoomRecomputed wants blocks that are computed again to keep h no longer than for their own
// backward pass.
func TestRoomRecomputed(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 6, Heads: 2, Seq: 8, FF: 64}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 1)
	require.NoError(t, err)
	g, err := model.Graph(llm.ForTraining, 2, llm.WithRecompute())
	require.NoError(t, err)
	m := newFuseMachine(t, device, g.G, g.Params, gorgonia.Nodes{g.Loss},
		[]MachineOption{fakeOption, gatesFused})
	arena := map[bool]int{}
	for _, roomy := range []bool{false, true} {
		m.options.Roomy = roomy
		p, err := compile(m, g.G)
		require.NoError(t, err)
		require.Equal(t, roomy, p.Roomy)
		arena[roomy] = p.Arena
	}
	require.LessOrEqual(t, arena[true], arena[false]+2*c.Seq*c.FF*4)
	t.Log(arena)
}

// newWideLifetime trains a model whose products kernels of this module take.
func newWideLifetime(t *testing.T, how ...llm.GraphOption) *lifetime {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 48, Layers: 3, Heads: 3, KVHeads: 1, Seq: 8, FF: 136,
		Kasmina: []int{1}, Seeds: 6}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 2, state.WithoutGates())
	require.NoError(t, err)
	g, err := model.Graph(llm.ForTraining, 3, how...)
	require.NoError(t, err)
	o, err := newAdamW()
	require.NoError(t, err)
	l := &lifetime{model: model, batch: &batch{Graph: g}, optimizer: o}
	l.batch.draw(t, 2)
	return l
}
