package cudaops

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// TestMachineAgreesWithTapeMachine compares a model's training graph on a Machine and on Gorgonia's tape
// machine, for several batches. The Machine enqueues the first run, captures the second one and replays
// it from then on.
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

	require.Zero(t, log.Len(), log.String())
}

// plusOneOp is an op without a kernel.
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

// TestUnknownOp checks that an op without a kernel is computed on the host, with one warning, and that
// the error of WithStrict names it.
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

// stockGraph returns the graph of y = tanh(x·w) ⊙ x·w + 2·x·w. All its ops have kernels.
func stockGraph(t testing.TB) (g *gorgonia.ExprGraph, x, y *gorgonia.Node) {
	t.Helper()
	must := gorgonia.Must
	g = gorgonia.NewGraph()
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	x = randomNode(g, r, 1, "x", 3, 5)
	w := randomNode(g, r, 1, "w", 5, 4)
	h := must(gorgonia.Mul(x, w))
	two := must(gorgonia.Mul(h, gorgonia.NewConstant(float32(2))))
	y = must(gorgonia.Add(must(gorgonia.HadamardProd(must(gorgonia.Tanh(h)), h)), two))
	return g, x, y
}

// TestCapture checks that a graph without ops on the host is captured by the second run, and that replays
// copy only inputs.
func TestCapture(t *testing.T) {
	onEach(t, testCapture, exactly("fake", "float32"))
}

func testCapture(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	g, x, y := stockGraph(t)
	counter := counting(device)
	machine := openMachine(t, device, g, append(opts, WithStrict())...)
	for step := range 4 {
		fresh := make([]float32, 15)
		for i := range fresh {
			fresh[i] = float32(rand.NormFloat64())
		}
		require.NoError(t, gorgonia.Let(x, tensor.New(tensor.WithShape(3, 5),
			tensor.WithBacking(fresh))))
		counter.take()
		require.NoError(t, machine.RunAll())
		work := counter.take()
		if step > 0 { // one launch of a graph, and no copies except of inputs
			require.EqualValues(t, []int64{1, 0, 0},
				[]int64{int64(work.graphs), work.down.count, work.on.count}, step)
		}
		got := valueIn(t, machine, y)
		tape := gorgonia.NewTapeMachine(g)
		require.NoError(t, tape.RunAll())
		require.Less(t, distance(t, got, y.Value()), 1e-6, step)
		tape.Close()
	}
}

func TestMachineErrors(t *testing.T) {
	device, fakeDriver := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 1)
	newMachine := func(opts ...MachineOption) error {
		m, err := NewMachine(device, b.G, opts...)
		if err == nil {
			m.Close()
		}
		return err
	}

	double := gorgonia.NewGraph()
	gorgonia.NodeFromAny(double, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{1, 2})), gorgonia.WithName("x"))
	require.NoError(t, errOf(gorgonia.Square(double.AllNodes()[0])))
	_, doubleErr := NewMachine(device, double)
	for _, c := range []struct {
		err  error
		want string
	}{
		{newMachine(WithParams(b.Loss)), "WithParams"},
		{newMachine(WithOutputs(nil)), "WithOutputs"},
		{doubleErr, "float64"},
	} {
		require.ErrorContains(t, c.err, c.want)
	}

	g, x, y := stockGraph(t)
	fakeDriver.Fail("cuMemAlloc_v2", 1, gpu.OutOfMemory)
	fakeDriver.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
	require.ErrorIs(t, errOf(NewMachine(device, g)), gpu.OutOfMemory)
	m, err := NewMachine(device, g)
	require.NoError(t, err)
	for _, n := range []*gorgonia.Node{x, y} {
		require.ErrorContains(t, errOf(m.Value(n)), "has not run")
	}

	require.NoError(t, m.RunAll())
	var inner *gorgonia.Node
	for _, n := range g.AllNodes() {
		if fmt.Sprint(n.Op()) == "tanh" {
			inner = n
		}
	}

	require.ErrorContains(t, errOf(m.Value(inner)), "WithOutputs")
	require.Error(t, errOf(m.Value(b.Loss)), "Value accepted a node of another graph")
	require.ErrorContains(t, m.Upload(y), "not an input")
	require.NoError(t, errOf(m.Value(x)))
	require.NoError(t, errors.Join(m.Close(), m.Close()))
	require.Error(t, m.RunAll(), "a closed machine ran")
}

// TestArguments checks the errors for invalid arguments of every function.
func TestArguments(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	build := func(name string) (*gorgonia.ExprGraph, *gorgonia.Node, *gorgonia.Node) {
		g := gorgonia.NewGraph()
		w := floatNode(g, name, []float32{1, 2, 3, 4}, 2, 2)
		return g, w, gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
	}
	g, w, _ := build("w")
	_, foreign, foreignSum := build("w")
	owner, err := NewMachine(device, g, WithParams(w), WithLogger(nil))
	require.NoError(t, err)
	require.Same(t, slog.Default(), owner.config.variants.Logger)
	other, _, _ := build("v")
	for want, err := range map[string]error{
		"WithOutputs: node":             errOf(NewMachine(device, g, WithOutputs(foreignSum))),
		"WithParams: input w":           errOf(NewMachine(device, g, WithParams(foreign))),
		"WithSeparateClipping: input w": errOf(NewMachine(device, g, WithSeparateClipping(w))),
		"WithParamsOf: no input has the name": errOf(NewMachine(device, other,
			WithParamsOf(owner))),
		"WithMemory: got 0 bytes":             errOf(NewMachine(device, g, WithMemory(0))),
		"WithPrecision: got":                  errOf(NewMachine(device, g, WithPrecision(9))),
		"WithRanks: got -1 rounds":            errOf(NewMachine(device, g, WithRanks(&silent{}, -1))),
		"a node is nil":                       owner.Upload(nil),
		"no parameter has a gradient":         owner.SetOptimizer(wrapped{new(optim.AdamW)}, 1),
		"the optimizer is a nil *optim.AdamW": owner.SetOptimizer((*optim.AdamW)(nil), 1),
	} {
		require.ErrorContains(t, err, want)
	}

	same, _, _ := build("w")
	borrower, err := NewMachine(device, same, WithParamsOf(owner))
	require.NoError(t, err)
	memory, err := device.ctx.Alloc(256)
	require.NoError(t, err)
	require.ErrorContains(t, owner.Bind(w, uintptr(memory), 16), "another machine")
	require.NoError(t, borrower.Close())
	require.NoError(t, owner.Bind(w, uintptr(memory), 16))
	borrower, err = NewMachine(device, same, WithParamsOf(owner))
	require.NoError(t, err)
	require.NoError(t, owner.Close())
	require.ErrorContains(t, borrower.RunAll(), "WithParamsOf")
	require.NoError(t, errors.Join(borrower.Close(), device.ctx.Free(memory)))
}

// TestCloseKeptRefused checks that CloseKept fails without changing the machine if another machine or the
// program uses its parameters.
func TestCloseKeptRefused(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device))
	m := l.machine
	require.ErrorContains(t, m.Rank().GatherState(), "not one of several ranks")
	score, err := l.model.Graph(llm.ForLoss, 3)
	require.NoError(t, err)
	borrower, err := NewMachine(device, score.G, WithParamsOf(m))
	require.NoError(t, err)
	require.ErrorContains(t, errOf(m.CloseKept()), "another machine uses")
	require.NoError(t, errors.Join(borrower.Close(), l.step()))
	kept, err := m.CloseKept()
	require.NoError(t, errors.Join(err, kept.Close()))

	own := newLifetime(t, newAdamW)
	weight := own.batch.Params[0]
	m, err = NewMachine(device, own.batch.G, WithParams(own.batch.Params...))
	require.NoError(t, err)
	defer m.Close()
	values := weight.Value().Data().([]float32)
	require.NoError(t, errors.Join(m.Bind(weight, host{t, device.ctx}.place(values), 4*len(values)),
		m.SetOptimizer(own.optimizer, 1)))
	require.ErrorContains(t, errOf(m.CloseKept()), "is bound to memory of the program")
}

// TestUploadRefused checks that Upload copies no value if any value is invalid.
func TestUploadRefused(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device))
	defer l.machine.Close()
	p := l.batch.Params[0]
	before := valueIn(t, l.machine, p)
	clear(l.model.Params[0].Value.Float32s())
	l.batch.ids[2] = 19
	require.ErrorContains(t, l.machine.Upload(p, l.batch.IDs),
		"cudaops.Machine.Upload: Embedding: ids[2] is 19")
	after := valueIn(t, l.machine, p)
	require.Equal(t, flat(t, before), flat(t, after), "the preceding parameter was sent")
}

// TestDownloadSkips checks that Download without arguments skips unused and shared parameters.
func TestDownloadSkips(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	build := func() (g *gorgonia.ExprGraph, w, unused *gorgonia.Node) {
		g = gorgonia.NewGraph()
		w = floatNode(g, "w", []float32{1, 2}, 2)
		gorgonia.Must(gorgonia.Square(w))
		return g, w, floatNode(g, "unused", []float32{3}, 1)
	}

	g, w, unused := build()
	owner := openMachine(t, device, g, WithParams(w, unused))
	copy(w.Value().Data().([]float32), []float32{7, 7})
	require.NoError(t, owner.Download())
	require.Equal(t, []float32{1, 2}, flat(t, w.Value()))
	require.ErrorContains(t, owner.Download(w, unused), "unused (1) is not an input of the graph")
	g, w, unused = build()
	borrower := openMachine(t, device, g, WithParams(w, unused), WithParamsOf(owner))
	require.NoError(t, borrower.Download())
	require.ErrorContains(t, borrower.Download(w), "is not an input of the graph")
}

// TestBorrowable checks which parameters that are divided among ranks another program can use, and that the error names
// the reason if it cannot: the type of the copy that each rank has, or the copy's address.
func TestBorrowable(t *testing.T) {
	w := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(4, 6), gorgonia.WithName("w"))
	values := &program.Array{Buffer: &program.Buffer{}, Type: gpu.Float32, Shape: []int{4, 6}}
	for _, c := range []struct {
		copied  gpu.DType
		at      int
		divided bool
		want    string
	}{
		{gpu.BFloat16, 0, false, ""},
		{gpu.Float16, 0, true, "in the other machine's precision"},
		{gpu.Float16, 8, true, "in the other machine's precision"},
		{gpu.BFloat16, 8, true, "does not start at a multiple of 16 bytes: give every parameter a multiple of 8 elements"},
	} {
		in := &program.Input{Node: w, Array: values, Copies: []program.Copy{{Array: &program.Array{Type: c.copied, At: c.at}}}}
		if c.divided {
			in.Part = &program.Part{}
		}
		p := &program.Program{Borrowed: []*program.Input{in}}
		require.NoError(t, borrowable(p, gpu.BFloat16), "no call reads the parameter")

		p.Calls = []*program.Call{{Args: []program.Arg{{Array: values}}}}
		err := borrowable(p, gpu.BFloat16)
		if c.want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, c.want)
		require.ErrorContains(t, err, "divided among ranks")
	}
}

// TestKept checks that machines made with WithKept continue with parameters and moments, whether the
// previous machine was closed before Kept or after it.
func TestKept(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(l.open(device), l.step(), l.step()))
	p := l.batch.Params[1]
	want, same := flat(t, valueIn(t, l.machine, p)), l.names()
	kept, err := l.machine.CloseKept()
	require.NoError(t, err)
	next := func(k *Kept) (*Machine, error) {
		return NewMachine(device, l.batch.G, WithParams(l.batch.Params...),
			WithOutputs(l.batch.Loss), WithKept(k, same))
	}
	for range 2 { // the first machine returns the memory when it is closed
		m, err := next(kept)
		require.NoError(t, err)
		require.NoError(t, m.SetOptimizer(l.optimizer, 1))
		require.Equal(t, want, flat(t, valueIn(t, m, p)))
		require.EqualValues(t, 2, m.optimizer.Params[0].Step)
		require.NoError(t, m.Close())
	}

	moved, err := next(kept) // returns the rest of the memory when it is closed
	require.NoError(t, err)
	bytes := 4 * p.Shape().TotalSize()
	own, err := device.ctx.Alloc(bytes)
	require.NoError(t, err)
	require.NoError(t, errors.Join(moved.Bind(p, uintptr(own), bytes), moved.Close(),
		device.ctx.Free(own)))
	late, err := next(kept)
	require.NoError(t, err)
	require.NoError(t, kept.Close())
	require.ErrorContains(t, late.SetOptimizer(l.optimizer, 1), "Kept was closed")
	require.Equal(t, want, flat(t, valueIn(t, late, p)))
	require.NoError(t, late.Close())
	require.ErrorContains(t, errOf(next(kept)), "nothing was kept")
}

// TestKeptTwice checks that memory which a machine has taken over and passed on with CloseKept no longer
// belongs to the first Kept.
func TestKeptTwice(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(l.open(device), l.step()))
	first, err := l.machine.CloseKept()
	require.NoError(t, err)
	require.NoError(t, l.open(device, WithKept(first, l.names())))
	second, err := l.machine.CloseKept()
	require.NoError(t, err)
	require.NoError(t, second.Close())
	require.ErrorContains(t, l.open(device, WithKept(first, l.names())), "nothing was kept")
	require.NoError(t, first.Close())
}

// TestKeptPassedOn checks that an optimizer does not silently start without moments after another machine
// has passed them on to a second Kept.
func TestKeptPassedOn(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(l.open(device), l.step()))
	first, err := l.machine.CloseKept()
	require.NoError(t, err)
	name := l.batch.Params[1].Name()
	next := func(names map[string]string) *Machine {
		return openMachine(t, device, l.batch.G, WithParams(l.batch.Params...),
			WithOutputs(l.batch.Loss), WithKept(first, names))
	}
	names := l.names()
	late, other := next(names), next(map[string]string{name: name})
	require.NoError(t, other.SetOptimizer(l.optimizer, 1))
	second, err := other.CloseKept()
	require.NoError(t, err)
	require.ErrorContains(t, late.SetOptimizer(l.optimizer, 1), "the moments of "+name)
	require.ErrorContains(t, l.open(device, WithKept(first, names)), "has passed "+name+" on")
	l.batch.Params = l.batch.Params[2:] // the remaining parameters can be used
	require.NoError(t, l.open(device, WithKept(first, names)))
	require.NoError(t, errors.Join(late.Close(), l.machine.Close(), second.Close(), first.Close()))
}

// wrapped is an optimizer that is not a pointer.
type wrapped struct{ *optim.AdamW }

func TestPrecisionText(t *testing.T) {
	for want, p := range map[string]Precision{"f32": Float32, "bf16": BFloat16,
		"f16": Float16, "f8": Float8} {
		text, err := p.MarshalText()
		require.NoError(t, err)
		require.Equal(t, []string{want, want}, []string{string(text), p.String()})
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

// TestCopiesOfAStep counts the copies between host and device in the steps of a growing model. Only ids
// and targets are copied to the device, and only the loss, the gradient norm and the lattice's
// measurements are copied back.
func TestCopiesOfAStep(t *testing.T) {
	onEach(t, testCopies, exactly("fake", "scaled", "float32", "bfloat16", "float16"))
}

// counted is a context that counts copies between host and device. Copies in a graph are counted when the
// graph is launched.
type counted struct {
	gpu.Context
	mu             sync.Mutex // inputs are sent concurrently
	work, captured traffic
	capturing      bool
	of             map[gpu.Graph]traffic
}

// copies holds a number of copies and their total size in bytes.
type copies struct{ count, bytes int64 }

func (c *copies) add(o copies) { c.count, c.bytes = c.count+o.count, c.bytes+o.bytes }

type traffic struct {
	up, down, on copies
	graphs       int
}

// counting makes machines that are opened on the device from now on use a counted context.
func counting(d *Device) *counted {
	c := &counted{Context: d.ctx, of: map[gpu.Graph]traffic{}}
	d.ctx = c
	return c
}

// take returns the traffic since the last call of take.
func (c *counted) take() traffic {
	c.mu.Lock()
	defer c.mu.Unlock()
	work := c.work
	c.work = traffic{}
	return work
}

func (c *counted) add(t traffic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	into := &c.work
	if c.capturing {
		into = &c.captured
	}
	into.up.add(t.up)
	into.down.add(t.down)
	into.on.add(t.on)
	into.graphs += t.graphs
}

func (c *counted) CopyToDevice(p gpu.Ptr, b []byte, s gpu.Stream) error {
	c.add(traffic{up: copies{1, int64(len(b))}})
	return c.Context.CopyToDevice(p, b, s)
}

func (c *counted) CopyToHost(b []byte, p gpu.Ptr, s gpu.Stream) error {
	c.add(traffic{down: copies{1, int64(len(b))}})
	return c.Context.CopyToHost(b, p, s)
}

func (c *counted) CopyOnDevice(to, from gpu.Ptr, n int, s gpu.Stream) error {
	c.add(traffic{on: copies{1, int64(n)}})
	return c.Context.CopyOnDevice(to, from, n, s)
}

func (c *counted) BeginCapture(s gpu.Stream) error {
	c.capturing, c.captured = true, traffic{graphs: 1}
	return c.Context.BeginCapture(s)
}

func (c *counted) EndCapture(s gpu.Stream) (gpu.Graph, error) {
	c.capturing = false
	g, err := c.Context.EndCapture(s)
	c.of[g] = c.captured
	return g, err
}

func (c *counted) LaunchGraph(g gpu.Graph, s gpu.Stream) error {
	c.add(c.of[g])
	return c.Context.LaunchGraph(g, s)
}

func testCopies(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	counter := counting(device)
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
	up := copies{2, 2 * 8 * rows}
	down := copies{3, loss + control + 4*program.KasminaWords*seeds}
	with := func(c copies, bytes int64) copies { return copies{c.count + 1, c.bytes + bytes} }
	stateBytes, alpha := int64(l.machine.runner.Program.Kasmina[0].Memory.Extent()), 0.0
	cases := []struct {
		name     string
		set      func() error
		up, down copies
	}{
		{"a steady step", nil, up, down},
		{"telemetry with histograms", func() error {
			return lattice.SetTelemetry(state.Telemetry{Mode: state.Debug})
		}, up, down},
		{"telemetry off", func() error {
			return lattice.SetTelemetry(state.Telemetry{Mode: state.Off})
		}, up, down},
		{"a seed that changes", func() error {
			alpha += 0.1
			return lattice.SetAlpha(1, alpha)
		}, with(up, stateBytes), down},
		{"another learning rate", func() error {
			return l.optimizer.SetLR(l.optimizer.LR() / 2)
		}, with(up, control), down},
	}

	for _, c := range cases[:few(len(cases), 2)] {
		// Runs and updates are enqueued at first, and captured the second time.
		for i := range few(4, 3) {
			if c.set != nil {
				require.NoError(t, c.set())
			}
			l.batch.draw(t, uint64(i))
			counter.take()
			require.NoError(t, l.step())
			if work := counter.take(); i > 1 { // one graph for the run and two for the update
				require.Equal(t, traffic{up: c.up, down: c.down, graphs: 3}, work, c.name)
			}
		}
	}
}

// TestModesCapturedSeparately checks that alternating runs with and without telemetry are both replayed,
// so that neither makes the other be enqueued again.
func TestModesCapturedSeparately(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newMuon)
	require.NoError(t, l.model.Kasmina.Lattice(0).SetTelemetry(state.Telemetry{Mode: state.Sampling,
		Every: 2}))
	counter := counting(device)
	require.NoError(t, l.open(device))
	defer l.machine.Close()
	for i := range 10 {
		l.batch.draw(t, uint64(i))
		counter.take()
		require.NoError(t, l.step())
		if work := counter.take(); i > 3 {
			require.Equal(t, 3, work.graphs, "step %d: the run's and the update's two parts", i)
		}
	}

	require.Len(t, l.machine.runner.Recorded, 2)
}

// randomGraph is a graph of random ops on matrices [8, 8]. A matrix also serves as two sequences of four
// tokens, with two heads of four features.
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

// steps adds nodes until the first error.
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

// pick returns a random matrix, with a preference for the latest ones.
func (b *randomGraph) pick() *gorgonia.Node {
	return b.matrices[max(b.r.IntN(len(b.matrices)), b.r.IntN(len(b.matrices)))]
}

func (b *randomGraph) weight() *gorgonia.Node { return b.weights[b.r.IntN(len(b.weights))] }

func (b *randomGraph) turned(x *gorgonia.Node) (*gorgonia.Node, error) {
	return op.RoPE(x, op.RoPEConfig{Seq: 4, Heads: 2, HeadDim: 4, Base: 100})
}

// attention returns attention on projections of a matrix x, plus x, or attention on three random
// matrices.
func (b *randomGraph) attention() (*gorgonia.Node, error) {
	var s steps
	x := b.pick()
	q, k, v := b.pick(), b.pick(), b.pick()
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

// halves swaps the upper and lower half of a matrix.
func (b *randomGraph) halves() (*gorgonia.Node, error) {
	var s steps
	x := b.pick()
	low := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(0, 4)) })
	high := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(4, 8)) })
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.Concat(0, high, low) }), s.err
}

func (b *randomGraph) perceptron() (*gorgonia.Node, error) {
	y, err := op.SiLUMLP(b.pick(), b.weight(), b.weight(), b.weight())
	if err == nil && b.r.IntN(2) == 0 {
		return gorgonia.Add(b.pick(), y)
	}
	return y, err
}

// recomputed returns a block that does not keep its intermediate results for the backward pass.
func (b *randomGraph) recomputed() (*gorgonia.Node, error) {
	return autodiff.Recompute(gorgonia.Nodes{b.pick(), b.weight(), b.norm},
		func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			var s steps
			h := s.do(func() (*gorgonia.Node, error) { return op.RMSNorm(in[0], in[2], 0.1) })
			h = s.apply(op.Linear, h, in[1])
			return s.apply(gorgonia.Add, s.do(func() (*gorgonia.Node, error) {
				return gorgonia.Tanh(h)
			}), in[0]), s.err
		})
}

// kasmina returns a layer with seeds in different stages.
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

	return op.Kasmina(b.pick(), b.slots, b.scales, l)
}

// grow adds a random op.
func (b *randomGraph) grow() (*gorgonia.Node, error) {
	var s steps
	x, y := b.pick(), b.pick()
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

// newRandomGraph returns a graph, its inputs of floats, its parameters, and the outputs to compare.
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

// TestRandomGraphs compares random graphs with the same graphs in a machine that keeps all values. In the
// latter, every node is computed separately and has its own memory.
func TestRandomGraphs(t *testing.T) {
	seed := randomSeed(t)
	r := rand.New(rand.NewPCG(seed, 8))
	for round := range few(50, 8) { // different graphs in each round
		device, _ := openFake(t, fake.Config{})
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
		opts := []MachineOption{WithParams(params...)}
		if r.IntN(3) == 0 {
			opts = append(opts, scaledGradients)
		}
		// Some ops may run on the host.
		rules := []string{"+ *=host", "A × B=host", "tanh*=host", "*Reshape*=host", "Repeat*=host",
			"T[[]*=host", "Concat*=host", "Softmax*=host"}
		host := WithVariants(rules[r.IntN(len(rules)):][:r.IntN(2)]...)
		m, err := NewMachine(device, b.g, append(opts, WithOutputs(outputs...), host,
			WithLogger(slog.New(slog.DiscardHandler)))...)
		require.NoError(t, err, round)
		every, err := NewMachine(device, b.g, append(opts, WithOutputs(results(b.g)...))...)
		require.NoError(t, err, round)
		for run := range 3 { // the second run is captured, the third one replays it
			fill()
			require.NoError(t, errors.Join(m.Upload(params...), every.Upload(params...), m.RunAll(),
				every.RunAll()), "round %d, run %d", round, run)
			for _, n := range outputs {
				got, err := m.Value(n)
				want, wantErr := every.Value(n)
				require.NoError(t, errors.Join(err, wantErr), "%v, %v", round, run)
				x, y := flat(t, got), flat(t, want)
				largest := max(slices.Max(y), -slices.Min(y))
				// Long chains amplify rounding errors, and some gradients consist only of rounding
				// errors.
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

// logitsOf returns the logits that a machine computes for some ids.
func logitsOf(t *testing.T, m *Machine, g *llm.Graph) []float32 {
	t.Helper()
	require.NoError(t, g.LetTokens([]int{3, 1, 4, 1, 5}))
	require.NoError(t, m.RunAll())
	v := valueIn(t, m, g.Logits)
	return v.Data().([]float32)
}

// valueless returns the graph of a model with parameters that have no value, and a function that reads
// them as numbers of type p.
func valueless(t *testing.T, m *llm.Model, kind llm.GraphKind, p Precision) (*llm.Graph,
	func(*gorgonia.Node, func([]byte, Precision) error) error) {
	g, err := m.Graph(kind, 1)
	require.NoError(t, err)
	bare, err := llm.BuildGraph(llm.Outline(m.Config), kind, 1)
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

// TestFrozen checks that freezing parameters saves memory and changes no bit of the results. It covers parameters with
// values, parameters read in several types, and parameters shared with another machine.
func TestFrozen(t *testing.T) {
	onEach(t, testFrozen, exactly("fake", "float32", "bfloat16"))
}

func testFrozen(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	for _, untied := range []bool{false, true} {
		c := llm.Config{Vocab: 24, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 8,
			Untied: untied, Traits: llm.Traits{QKNorm: untied, QKVBias: !untied}}.Default()
		m, err := llm.NewModel(c, tensor.Float32, 1)
		require.NoError(t, err)
		for _, x := range m.Params { // exact in bfloat16
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
		if !untied || of.config.Activation != gpu.Float32 { // only then are float32 masters saved
			require.Less(t, of.Memory(), plain.Memory())
		}
		for i := range m.Params {
			v := valueIn(t, of, g.Params[i])
			require.Equal(t, m.Params[i].Value.Data(), v.Data())
		}
		require.NoError(t, of.Download())
		for _, stored := range []Precision{Float32, BFloat16} {
			bare, read := valueless(t, m, llm.ForLogits, stored)
			owner := open(bare, WithFrozen(read, bare.Params...))
			require.Equal(t, want, logitsOf(t, owner, bare))
			require.Equal(t, of.Memory(), owner.Memory())
			borrowed, _ := valueless(t, m, llm.ForLogits, stored)
			sharing := open(borrowed, WithParamsOf(owner))
			require.Equal(t, want, logitsOf(t, sharing, borrowed))
			require.Equal(t, tasksOf(plain), tasksOf(sharing))
		}
	}
}

// TestFrozenErrors checks the errors when read provides too few or too many elements, or fails.
func TestFrozenErrors(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
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
		_, err := NewMachine(device, g.G, WithFrozen(func(n *gorgonia.Node,
			put func([]byte, Precision) error) error {
			return read(n, func(part []byte, _ Precision) error { return change(part, put) })
		}, g.Params...))
		require.ErrorContains(t, err, want)
	}

	g, _ := valueless(t, m, llm.ForLogits, Float32)
	for want, params := range map[string]gorgonia.Nodes{"has no value": g.Params,
		"is not an input": {g.Logits}} {
		require.ErrorContains(t, errOf(NewMachine(device, g.G,
			WithFrozen(nil, params...))), want)
	}
}

// TestDecoding compares the logits of machines that have key-value caches with logits computed on the CPU.
// The texts grow by one token or by many at a time, and past the initial capacity of the caches. The test
// also checks the errors of Keep.
func TestDecoding(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	for name, traits := range randtest.Sample(t, 2, map[string]llm.Traits{
		"llama": {}, "windows": {Blocks: []llm.Block{{Window: 7}, {}}}, "norms": {QKNorm: true},
		"biases": {QKVBias: true}, "gemma": {GELU: true, PostNorms: true, NormPlusOne: true},
		"without RoPE": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
		"gpt2": {QKVBias: true, OutBias: true, MLPBias: true, LayerNorm: true, PlainMLP: true, GELU: true,
			Positions: 1100, Blocks: []llm.Block{{NoRoPE: true}}},
		"olmo2": {QKNorm: true, WideQKNorm: true, PostNorms: true, NoPreNorms: true}, "scaled": {EmbedScale: 4},
	}, "llama") {
		t.Run(name, func(t *testing.T) {
			c := llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 1100,
				Traits: traits}
			m, err := llm.NewModel(c.Default(), tensor.Float32, 1)
			require.NoError(t, err)
			decode := func(newMachine func(*llm.Graph) (llm.Machine, error)) *llm.Decoding {
				d, err := llm.NewDecoding(m.Parts(), newMachine)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, d.Close()) })
				return d
			}
			var attention *Machine
			var cached *gorgonia.Node
			onGPU := decode(func(g *llm.Graph) (llm.Machine, error) {
				machine, err := NewMachine(device, g.G, WithStrict(),
					WithParams(g.Params...), WithOutputs(g.Outputs()...))
				if err == nil && g.Position != nil {
					attention = machine
					for n := range machine.runner.Program.Caches {
						cached = n
					}
				}
				return machine, err
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
				"not an attention":           attention.Keep(nil, attention, nil, nil),
				"pass it as values, too":     attention.Keep(cached, attention, cached, nil),
				"not part of the graph":      attention.Keep(cached, attention, nil, nil),
			} {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

// TestKeepFromFilledCache checks that Keep can copy a cache that Keep itself has filled, from a machine
// that has not run, and that it returns an error if the cache is empty.
func TestKeepFromFilledCache(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 1, Heads: 4, KVHeads: 2, Seq: 64}
	m, err := llm.NewModel(c.Default(), tensor.Float32, 1)
	require.NoError(t, err)
	var attentions []*Machine
	var cached gorgonia.Nodes
	for range 2 {
		d, err := llm.NewDecoding(m.Parts(), func(g *llm.Graph) (llm.Machine, error) {
			machine, err := NewMachine(device, g.G, WithParams(g.Params...), WithOutputs(g.Outputs()...))
			if err == nil && g.Position != nil {
				attentions = append(attentions, machine)
				cached = append(cached, slices.SortedFunc(maps.Keys(machine.runner.Program.Caches),
					func(a, b *gorgonia.Node) int { return cmp.Compare(a.ID(), b.ID()) })...)
			}
			return machine, err
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		if len(attentions) == 1 {
			_, err = d.Next(t.Context(), []int{1, 2, 3}) // another machine runs the prompt
		}
		require.NoError(t, err)
	}

	require.ErrorContains(t, attentions[0].Keep(cached[0], attentions[1], cached[1], cached[1]),
		"from has not run")
	require.NoError(t, attentions[1].Keep(cached[1], attentions[0], cached[0], cached[0]))
	from, to := attentions[0].runner.Program.Caches[cached[0]],
		attentions[1].runner.Program.Caches[cached[1]]
	want, err := device.ctx.(*fake.Context).Bytes(from.Keys.Ptr(), from.Keys.Extent())
	require.NoError(t, err)
	got, err := device.ctx.(*fake.Context).Bytes(to.Keys.Ptr(), to.Keys.Extent())
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// gatesFused makes the gates of perceptrons and their products one kernel, which can keep h from the
// forward pass for the backward pass.
var gatesFused = WithVariants("SiLUProduct*=fused")

// cardOf returns a fake GPU with the given number of bytes of memory and a small cache.
func cardOf(bytes int) fake.Config {
	info := smallCache("Card")
	info[0].Memory = uint64(bytes)
	return fake.Config{Devices: info}
}

// keepsH returns how many backward passes of a machine's perceptrons read h from the forward pass, and
// how many compute h again, according to its choices.
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

// trainWithGates trains a model of several layers for a few steps. It returns the machine, and the bits
// of losses and gradients.
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

// TestRoom checks that a machine spends memory to save time only as long as enough memory remains free,
// and that its results are bit-identical in either case.
func TestRoom(t *testing.T) {
	clearChoiceVariables(t)
	train := func(t *testing.T, bytes int, opts ...MachineOption) (*Machine, []string) {
		t.Helper()
		device, _ := openFake(t, cardOf(bytes))
		return trainWithGates(t, device, opts...)
	}
	const plenty = 1 << 30
	m, want := train(t, plenty)
	elements := 0
	for _, p := range m.config.Params {
		elements += p.Shape().TotalSize()
	}

	need := m.runner.Program.Arena + m.runner.Program.Resident() + 8*elements
	// size of a card on which another machine has already allocated the workspace
	least := int(float64(need+run.WorkspaceBytes) / (1 - roomLeft))
	kept, formed := keepsH(m) // on an empty card
	require.Equal(t, []int{1, 0}, []int{kept, formed})
	require.NotZero(t, m.runner.Program.Spent)
	held, spent := m.Memory(), m.runner.Program.Spent
	for what, c := range map[string]struct{ limit, kept, formed int }{
		"for all": {need, 1, 0}, "for some": {need - 1, 1, 1}, "for none": {need - spent, 0, 1}} {
		m, got := train(t, plenty, WithMemory(c.limit))
		kept, formed := keepsH(m)
		require.Equal(t, []int{c.kept, c.formed}, []int{kept, formed}, what)
		require.Equal(t, want, got, what)
		require.LessOrEqual(t, m.Memory()-m.runner.Program.Arena, held-need+c.limit, what)
	}

	for _, c := range []struct {
		what  string
		bytes int
		spent bool
	}{{"just enough", least + 64, true}, {"a little less", least - 64, false},
		{"little", need + run.WorkspaceBytes + 64<<10, false}} {
		m, got := train(t, c.bytes)
		kept, formed := keepsH(m)
		require.Equal(t, []bool{c.spent, !c.spent, c.spent},
			[]bool{kept > 0, formed > 0, m.runner.Program.Spent > 0}, c.what)
		require.NotEqual(t, c.spent, m.Memory() < held, "%s: the machine holds %d bytes, with h %d",
			c.what, m.Memory(), held)
		require.Len(t, m.runner.Program.Kasmina, 1, c.what)
		require.NotNil(t, m.runner.Program.Kasmina[0].WeightsInput, c.what)
		require.Equal(t, got, want, c.what)
	}

	// The second plan does not repeat the timing.
	m, _ = train(t, least-64, timedWithNewFile(t, 1), WithTuning(TuneCached))
	products := 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" {
			products++
			require.Equal(t, Measured, c.Source)
		}
	}

	require.NotZero(t, products, "no product was chosen")
	kept, _ = keepsH(m)
	require.Zero(t, kept, "the choices belong to a discarded plan")
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
		free, total, err = device.Memory()
		require.NoError(t, err)
		hog, err := device.ctx.Alloc(int(free - total/20))
		require.NoError(t, err)
		t.Cleanup(func() { // after closing the machines
			require.NoError(t, device.ctx.Free(hog))
		})
		less, got := trainWithGates(t, device, opts...)
		require.NotZero(t, m.runner.Program.Spent)
		require.Zero(t, less.runner.Program.Spent)
		require.Equal(t, got, want, "losses or gradients differ")
	})
}

func gradients(params gorgonia.Nodes) (all gorgonia.Nodes) {
	for _, p := range params {
		all = append(all, p.Deriv())
	}
	return all
}

// newBorrower returns a machine that computes gradients with the parameters of another machine.
func newBorrower(t *testing.T, device *Device, of *Machine, opts ...MachineOption) *Machine {
	t.Helper()
	b := newLifetime(t, newAdamW).batch
	m, err := NewMachine(device, b.G, append(opts, gatesFused, WithParamsOf(of),
		WithOutputs(append(gradients(b.Params), b.Loss)...))...)
	require.NoError(t, err)
	return m
}

// TestRoomShared checks that a machine that shares parameters and is planned twice releases them once.
func TestRoomShared(t *testing.T) {
	device, _ := openFake(t, cardOf(128<<20))
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device, gatesFused))
	free, _, err := device.Memory()
	require.NoError(t, err)
	hog, err := device.ctx.Alloc(int(free) - run.WorkspaceBytes - 4<<20)
	require.NoError(t, err)
	m := newBorrower(t, device, l.machine)
	require.Zero(t, m.runner.Program.Spent)
	require.Len(t, m.runner.Program.Borrowed, len(l.batch.Params))
	require.NoError(t, errors.Join(m.RunAll(), m.Close(), device.ctx.Free(hog)))
	for _, in := range l.machine.runner.Program.Inputs {
		require.Zero(t, in.Sharers, graph.Describe(in.Node))
	}

	require.NoError(t, l.machine.Close())
}

// TestBorrowedValues checks that a machine sees the values of shared parameters after the last update,
// even if the update is still in progress, and that it returns an error once the owner is closed.
func TestBorrowedValues(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, l.open(device))
	m := newBorrower(t, device, l.machine)
	lent := m.runner.Program.Borrowed[0]
	var borrowed *gorgonia.Node
	for n, a := range m.runner.Program.Values {
		if a == lent.Array {
			borrowed = n
		}
	}

	before := flat(t, valueIn(t, m, borrowed))
	for i := range uint64(3) {
		l.batch.draw(t, i)
		require.NoError(t, l.step())
		got := flat(t, valueIn(t, m, borrowed))
		require.NotEqual(t, before, got)
		require.Equal(t, flat(t, valueIn(t, l.machine, lent.Node)), got)
		before = got
	}

	require.NoError(t, l.machine.Close())
	require.ErrorContains(t, errOf(m.Value(borrowed)), "is closed")
	_, _, err := m.Address(borrowed)
	require.ErrorContains(t, err, "is closed")
	require.NoError(t, m.Close())
}

// TestRoomOfOptimizer checks that a machine spends memory only if there is also room for the optimizer's
// moments.
func TestRoomOfOptimizer(t *testing.T) {
	device, _ := openFake(t, cardOf(256<<20))
	newMachine := func(opts ...MachineOption) *Machine {
		b := newLifetime(t, newAdamW).batch
		m, err := NewMachine(device, b.G, append(opts, gatesFused, WithParams(b.Params...),
			WithOutputs(b.Loss))...)
		require.NoError(t, err)
		return m
	}

	m := newMachine()
	moments, _ := memoryToCome(m, m.runner.Program)
	need := m.Memory()
	require.NoError(t, m.Close())
	require.NotZero(t, m.runner.Program.Spent, "on an empty card")
	require.NotZero(t, moments)

	for name, want := range map[string]float64{"AdamW": 1, "Lion": 0.5, "AdamW8bit": 0.27} {
		o, err := optimizers[name]()
		require.NoError(t, err)
		m := newMachine(WithOptimizer(o.(optim.Rules)))
		own, _ := memoryToCome(m, m.runner.Program)
		require.InDelta(t, want, float64(own)/float64(moments), 0.03, name)
		require.NoError(t, m.SetOptimizer(o, 0))
		held := 0
		for _, p := range m.optimizer.Params {
			for _, a := range p.Moments {
				held += a.Extent()
			}
		}
		require.Equal(t, own, held, name)
		require.NoError(t, m.Close())
	}

	for left, want := range map[int]bool{3 * moments / 2: true, moments / 2: false} {
		free, total, err := device.Memory()
		require.NoError(t, err)
		hog, err := device.ctx.Alloc(int(free) - int(roomLeft*float64(total)) - need - left)
		require.NoError(t, err)
		m := newMachine()
		require.Equal(t, want, m.runner.Program.Spent > 0)
		require.NoError(t, errors.Join(m.Close(), device.ctx.Free(hog)))
	}
}

// TestRoomFails checks that errors between two attempts to plan a machine do not leak anything.
func TestRoomFails(t *testing.T) {
	for _, call := range []string{"cuMemGetInfo", "cuMemAlloc", "cuMemHostAlloc",
		"cublasLtMatmulAlgoGetHeuristic"} {
		met := 0
		for nth := 1; ; nth++ {
			// less than a tenth of the memory is free
			device, cuda := openFake(t, cardOf(run.WorkspaceBytes+3<<20))
			l := newLifetime(t, newAdamW)
			cuda.Fail(call, nth, gpu.OutOfMemory)
			err := l.open(device, gatesFused)
			if err == nil {
				require.Zero(t, l.machine.runner.Program.Spent, "there is room for h")
				require.NoError(t, l.machine.Close())
				break
			}
			met++
			require.ErrorIs(t, err, gpu.OutOfMemory, nth)
			require.ErrorContains(t, err, call, nth)
			if l.machine != nil {
				require.NoError(t, l.machine.Close(), "%v, %v", call, nth)
			}
			requireNoLeaks(t, device, "%v, %v", call, nth)
		}
		require.GreaterOrEqual(t, met, 2, call)
	}

	// If a graph does not fit in any case, the error has the numbers of the smallest plan.
	device, _ := openFake(t, cardOf(run.WorkspaceBytes+1<<10))
	err := newLifetime(t, newAdamW).open(device, gatesFused)
	require.ErrorIs(t, err, gpu.OutOfMemory)
	require.ErrorContains(t, err, "1.00 KiB are free")
}

// TestRoomRecomputed checks that recomputed blocks keep h only until their own backward pass.
func TestRoomRecomputed(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 6, Heads: 2, Seq: 8, FF: 64}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 1)
	require.NoError(t, err)
	g, err := model.Graph(llm.ForTraining, 2, llm.WithRecompute())
	require.NoError(t, err)
	m := newFuseMachine(t, device, g.G, g.Params, gorgonia.Nodes{g.Loss},
		[]MachineOption{gatesFused})
	var arena [2]int
	for i, room := range []int{0, math.MaxInt} {
		m.config.Room = room
		p, err := compile(m, g.G)
		require.NoError(t, err)
		require.Equal(t, room > 0, p.Spent > 0)
		arena[i] = p.Arena
	}

	require.LessOrEqual(t, arena[1], arena[0]+2*c.Seq*c.FF*4)
	t.Log(arena)
}

// newWideLifetime returns a model with products that this module's own kernels compute.
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

func TestOpenFake(t *testing.T) {
	f := fake.New(fake.Config{Devices: []gpu.DeviceInfo{
		{Name: "A", Major: 9, Memory: 1 << 30, SMs: 132}, {Name: "B", Major: 8, Minor: 9,
			Memory: 3 << 29, SMs: 66},
		{Name: "C", Major: 7, Minor: 5}}})
	d, err := Open(withDriver(f), WithOrdinal(1))
	require.NoError(t, err)
	major, minor := d.ComputeCapability()
	require.Equal(t, []any{"B", 1, 8, 9}, []any{d.Name(), d.Ordinal(), major, minor})
	const want = "B (GPU 1, compute capability 8.9, 1.50 GiB, 66 multiprocessors, driver for " +
		"CUDA 13.0)"
	require.Equal(t, want, d.String())
	p, err := d.ctx.Alloc(1 << 20)
	require.NoError(t, err)
	free, total, err := d.Memory()
	require.NoError(t, err)
	require.EqualValues(t, []uint64{3 << 29, 1 << 20}, []uint64{total, total - free})
	require.NoError(t, d.ctx.Free(p))
	for range 2 {
		require.NoError(t, d.Close())
	}

	_, _, err = d.Memory()
	require.ErrorIs(t, err, gpu.ContextIsDestroyed)
	for _, n := range []int{-1, 3} {
		err := errOf(Open(withDriver(f), WithOrdinal(n)))
		require.ErrorContains(t, err, "there are 3")
		require.NotErrorIs(t, err, ErrNoDevice)
	}

	err = errOf(Open(withDriver(f), WithOrdinal(2)))
	require.ErrorIs(t, err, ErrUnsupportedDevice)
	require.ErrorContains(t, err, "C has compute capability 7.5")
	f.Fail("cuDevicePrimaryCtxRetain", 1, gpu.OutOfMemory)
	err = errOf(Open(withDriver(f)))
	require.ErrorIs(t, err, gpu.OutOfMemory)
	require.NotErrorIs(t, err, ErrNoDevice)
}

func TestOpenErrors(t *testing.T) {
	for _, c := range []struct {
		err      error
		noDevice bool
		say      string
	}{
		{&gpu.NotFoundError{Library: "libcuda",
			Tried: []sharedlib.Attempt{{Place: "/usr/lib", Reason: "no such file"}},
			Help:  "Install it."}, true,
			"Install it.\nSearched, in this order:\n  /usr/lib: no such file"},
		{gpu.NewError("cuInit", gpu.NoDevice, "no CUDA-capable device is detected", ""), true,
			"CUDA_ERROR_NO_DEVICE"},
		{gpu.NewError("cuInit", gpu.StubLibrary, "", ""), true, "CUDA_ERROR_STUB_LIBRARY"},
		{gpu.NewError("cuInit", gpu.SystemDriverMismatch, "", ""), false,
			"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
	} {
		open := func(o *deviceOptions) { o.open = func() (gpu.Driver, error) { return nil, c.err } }
		_, err := Open(open)
		require.Equal(t, c.noDevice, errors.Is(err, ErrNoDevice), c.err)
		require.ErrorContains(t, err, c.say, c.err)
	}
}

// TestOpenHere opens the GPU of the computer that runs the test, or checks the error if it has none.
func TestOpenHere(t *testing.T) {
	d, err := Open()
	if err == nil {
		t.Log(d)
		require.NoError(t, d.Close())
		return
	}
	require.True(t, errors.Is(err, ErrNoDevice) || errors.Is(err, ErrUnsupportedDevice), err)
	t.Log(err)
}

// host is a program with its own device memory.
type host struct {
	t   *testing.T
	ctx gpu.Context
}

// place copies values to newly allocated memory of the program and returns its address.
func (h host) place(values []float32) uintptr {
	h.t.Helper()
	p, err := h.ctx.Alloc(4 * len(values))
	require.NoError(h.t, err)
	h.t.Cleanup(func() { require.NoError(h.t, h.ctx.Free(p)) })
	h.write(uintptr(p), values)
	return uintptr(p)
}

func (h host) write(p uintptr, values []float32) {
	h.t.Helper()
	require.NoError(h.t, h.ctx.CopyToDevice(gpu.Ptr(p), gpu.Bytes(values), 0))
}

func (h host) read(p uintptr, n int) []float32 {
	h.t.Helper()
	values := make([]float32, n)
	require.NoError(h.t, h.ctx.CopyToHost(gpu.Bytes(values), gpu.Ptr(p), 0))
	return values
}

// TestInterop runs a Kasmina layer in a context, on a stream and in memory of the program, and compares
// the bits against an ordinary machine. Several runs also cover capture and replay.
func TestInterop(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		owner, f := openFake(t, fake.Config{})
		adopted, err := Open(withDriver(f), WithContext(owner.Context()))
		require.NoError(t, err)
		adopted.kernels = owner.kernels
		testInterop(t, owner, adopted)
	})

	t.Run("GPU", func(t *testing.T) {
		owner := openGPU(t)
		adopted, err := Open(WithContext(owner.Context()))
		require.NoError(t, err)
		testInterop(t, owner, adopted)
	})
}

func testInterop(t *testing.T, owner, adopted *Device, opts ...MachineOption) {
	seed := randomSeed(t)
	own, other := newKasminaGraph(t, seed, nil), newKasminaGraph(t, seed, nil)
	ofOwner, ofAdopted := counting(owner), counting(adopted)
	want := own.open(t, owner, opts...)
	defer want.Close()
	h := host{t, owner.ctx}
	stream, err := h.ctx.NewStream(false)
	for err == nil && stream <= 2 { // the fake driver numbers streams from 1
		stream, err = h.ctx.NewStream(false)
	}

	require.NoError(t, err)
	got := other.open(t, adopted, append(opts, WithStream(uintptr(stream)))...)
	require.Equal(t, owner.Context(), adopted.Context())
	require.Equal(t, uintptr(stream), got.Stream())
	poison := slices.Repeat([]float32{float32(math.NaN())}, other.rows*other.dim)
	x, dx := h.place(poison), h.place(poison)
	weights := h.place(flat(t, other.weights.Value()))
	for n, p := range map[*gorgonia.Node]uintptr{other.x: x, other.x.Deriv(): dx,
		other.weights: weights} {
		require.NoError(t, got.Bind(n, p, 4*n.Shape().TotalSize()))
		at, bytes, err := got.Address(n)
		require.NoError(t, err)
		require.Equal(t, []any{p, 4 * n.Shape().TotalSize()}, []any{at, bytes})
	}

	for run := range uint64(4) {
		own.draw(t, seed+run, nil)
		values := flat(t, own.x.Value())
		h.write(x, values)
		if run == 3 { // the next run must read x from another address
			h.write(x, poison)
			require.NoError(t, got.Bind(other.x, h.place(values), 4*len(values)))
		}
		ofAdopted.take()
		require.NoError(t, got.RunAll())
		require.NoError(t, h.ctx.SyncStream(stream))
		ofOwner.take()
		require.NoError(t, want.RunAll())
		require.Equal(t, ofOwner.take().up.bytes-int64(4*len(values)), ofAdopted.take().up.bytes, run)
		for _, n := range []struct{ a, b *gorgonia.Node }{{own.loss, other.loss},
			{own.x.Deriv(), other.x.Deriv()},
			{own.weights.Deriv(), other.weights.Deriv()},
			{own.scales.Deriv(), other.scales.Deriv()}} {
			a, errA := want.Value(n.a)
			b, errB := got.Value(n.b)
			require.NoError(t, errors.Join(errA, errB))
			require.Equal(t, flat(t, b), flat(t, a), "run %d: %v differs", run, n.a)
			if n.b == other.x.Deriv() { // the gradient is in the memory given to Bind
				require.Equal(t, flat(t, a), h.read(dx, other.rows*other.dim), run)
			}
		}
	}

	require.NoError(t, errors.Join(got.Close(), adopted.Close()))
	require.ErrorContains(t, got.RunAll(), "closed")
	require.ErrorContains(t, got.Bind(other.x, x, 4), "closed")
	_, _, err = got.Address(other.x)
	require.ErrorContains(t, err, "closed")
	h.read(dx, 1) // the context, the stream and the memory are still valid
	require.NoError(t, h.ctx.SyncStream(stream))
	require.NoError(t, h.ctx.DestroyStream(stream))
}

func TestInteropRefusals(t *testing.T) {
	device, f := openFake(t, fake.Config{})
	require.ErrorIs(t, errOf(Open(withDriver(f), WithContext(99))), gpu.InvalidContext)
	k := newKasminaGraph(t, 1, nil)
	for _, s := range []uintptr{0, 1, 2} {
		require.ErrorContains(t, errOf(NewMachine(device, k.g, WithStream(s))),
			"default stream")
	}

	m := k.open(t, device)
	defer m.Close()
	targets := k.g.ByName("targets")[0]
	p := host{t, device.ctx}.place(make([]float32, k.rows*k.dim))
	full := 4 * k.rows * k.dim
	for _, c := range []struct {
		node  *gorgonia.Node
		ptr   uintptr
		bytes int
		want  string
	}{
		{nil, p, full, "not part of the graph"},
		{k.x, 0, full, "want a multiple of 256"},
		{k.x, p + 4, full, "want a multiple of 256"},
		{k.x, p, full - 4, "want 576"},
		{targets, p, 8 * k.rows, "holds targets of CrossEntropy"},
		{gorgonia.NewScalar(gorgonia.NewGraph(), tensor.Float32), p, 4, "not part of the graph"},
	} {
		was, _, _ := m.Address(k.x)
		require.ErrorContains(t, m.Bind(c.node, c.ptr, c.bytes), c.want, "%v, %v, %v", c.node,
			c.ptr, c.bytes)
		is, _, _ := m.Address(k.x)
		require.Equal(t, was, is, "Bind(%v, %#x, %d) moved x", c.node, c.ptr, c.bytes)
	}

	openMachine(t, device, k.g, WithParamsOf(m))
	require.ErrorContains(t, m.Bind(k.weights, p, 4*k.weights.Shape().TotalSize()), "WithParamsOf")
}

// singleRunner runs a graph op by op, each as a singleOp, and stores the values in one allocation, at
// addresses that are multiples of only four bytes. Gorgonia's CUDA machine does the same.
type singleRunner struct {
	t      *testing.T
	device *Device
	of     map[*gorgonia.Node]*singleOp
	at     map[*gorgonia.Node]gpu.Ptr
	next   gpu.Ptr
}

func newSingleRunner(t *testing.T, device *Device) *singleRunner {
	t.Helper()
	r := &singleRunner{t: t, device: device, of: map[*gorgonia.Node]*singleOp{}}
	memory, err := device.ctx.Alloc(8 << 20)
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, l := range r.of {
			r.ok(l.m.Close())
		}
		r.ok(device.ctx.Free(memory))
	})

	r.next = memory.Offset(4)
	return r
}

func (r *singleRunner) ok(err error) {
	r.t.Helper()
	require.NoError(r.t, err)
}

// place returns memory for a node's value.
func (r *singleRunner) place(n *gorgonia.Node) gpu.Ptr {
	p := r.next
	r.next = p.Offset(8*opbase.Size(n.Shape()) + 4)
	if n.Dtype() == tensor.Int && p%8 != 0 {
		p = p.Offset(4)
	}
	r.at[n] = p
	return p
}

// run computes the whole graph.
func (r *singleRunner) run(g *gorgonia.ExprGraph) error {
	r.t.Helper()
	ctx, start := r.device.ctx, r.next
	r.at = map[*gorgonia.Node]gpu.Ptr{}
	defer func() { r.next = start }()
	sorted, err := gorgonia.Sort(g)
	r.ok(err)
	for _, n := range slices.Backward(sorted) {
		p := r.place(n)
		if n.Value() != nil && (n.Op() == nil || graph.IsConstant(n)) {
			flat, err := opbase.Flat(n.Value())
			r.ok(err)
			raw, ok := flat.([]int)
			if ok {
				r.ok(ctx.CopyToDevice(p, gpu.Bytes(raw), 0))
			} else {
				r.ok(ctx.CopyToDevice(p, gpu.Bytes(flat.([]float32)), 0))
			}
			continue
		}
		var from []gpu.Ptr
		for _, c := range graph.Children(n) {
			from = append(from, r.at[c])
		}
		l := r.of[n]
		if l == nil {
			l, err = newSingleOp(r.device, n.Op(), graph.Children(n))
			require.NoError(r.t, err, n)
			r.of[n] = l
		}
		r.ok(ctx.Memset8(p, 0xff, 4*opbase.Size(n.Shape()), 0)) // NaN
		r.ok(ctx.SyncStream(0))
		if err := l.run(from, p); err != nil {
			return err
		}
	}

	return nil
}

func (r *singleRunner) value(n *gorgonia.Node) []float32 {
	x := make([]float32, opbase.Size(n.Shape()))
	r.ok(r.device.ctx.CopyToHost(gpu.Bytes(x), r.at[n], 0))
	return x
}

// TestSingleOps runs every op of a model's training step as a singleOp, several times, and compares the
// gradients with a machine for the whole graph.
func TestSingleOps(t *testing.T) {
	onEach(t, testSingleModel, exactly("fake", "float32"))
}

func testSingleModel(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	seed := randomSeed(t)
	_, a := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	m := openMachine(t, device, a.G, append(opts, WithOutputs(a.Loss))...)
	r := newSingleRunner(t, device)
	for step := range uint64(few(3, 2)) {
		a.draw(t, seed+step)
		b.draw(t, seed+step)
		r.ok(m.RunAll())
		r.ok(r.run(b.G))
		for i, p := range a.Params {
			want, err := m.Value(p.Deriv())
			r.ok(err)
			got := tensor.New(tensor.WithShape(p.Shape()...),
				tensor.WithBacking(r.value(b.Params[i].Deriv())))
			require.Less(t, distance(t, got, want), 1e-5, "%v, %v", step, p.Name())
		}
	}
}

// TestSingleKasmina runs a layer's op and its backward op separately. Both must use the same snapshot of
// the lattice, as in a whole graph, and the lattice must receive the measurements of both.
func TestSingleKasmina(t *testing.T) {
	for name, c := range map[string]struct {
		lattice []state.Option
		layer   []op.KasminaOption
	}{
		"debug": {lattice: []state.Option{state.WithTelemetry(
			state.Telemetry{Mode: state.Debug})}},
		"sampling": {lattice: []state.Option{state.WithTelemetry(
			state.Telemetry{Mode: state.Sampling, Every: 2, Share: 0.5})}},
		"strict":   {layer: []op.KasminaOption{op.WithStability(op.Strict), op.WithGradClip(1.5)}},
		"adaptive": {layer: []op.KasminaOption{op.WithAdaptiveGradClip(0.1)}},
	} {
		t.Run(name, func(t *testing.T) { testSingleKasmina(t, c.lattice, c.layer) })
	}
}

func testSingleKasmina(t *testing.T, lattice []state.Option, layer []op.KasminaOption) {
	device, _ := openFake(t, fake.Config{})
	seed := randomSeed(t)
	a, b := newKasminaGraph(t, seed, lattice, layer...), newKasminaGraph(t, seed, lattice, layer...)
	m := a.open(t, device)
	defer m.Close()
	r := newSingleRunner(t, device)
	for step := range uint64(4) {
		// above strict mode's limits for this step, but not for the next one
		outliers := func(x []float32) {
			for i := 0; step > 0 && i < len(x); i += 5 {
				x[i] *= 30
			}
		}
		a.draw(t, seed+step, outliers)
		b.draw(t, seed+step, outliers)
		r.ok(m.RunAll())
		r.ok(r.run(b.g))
		theirs := gorgonia.Nodes{b.x, b.weights, b.scales}
		for i, n := range []*gorgonia.Node{a.x, a.weights, a.scales} {
			want, err := m.Value(n.Deriv())
			r.ok(err)
			require.Equal(t, flat(t, want), r.value(theirs[i].Deriv()),
				"step %d: the gradient of %s differs", step, n.Name())
		}
	}

	sameReports(t, "in the end", b.lattice.Report(), a.lattice.Report())
}

func TestSingleRefusals(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	k := newKasminaGraph(t, 1, nil)
	r := newSingleRunner(t, device)
	require.NoError(t, gorgonia.Let(k.g.ByName("targets")[0],
		tensor.New(tensor.WithBacking([]int{1, 7, 24, 0, 9, 5}))))
	require.ErrorContains(t, r.run(k.g), "is 24, want an id")
	fresh := newKasminaGraph(t, 2, nil)
	for _, n := range fresh.g.AllNodes() {
		if o, ok := n.Op().(*op.KasminaGradOp); ok {
			var from []gpu.Ptr
			for range graph.Children(n) {
				from = append(from, r.next)
			}
			l, err := newSingleOp(r.device, o, graph.Children(n))
			r.ok(err)
			defer l.m.Close()
			require.ErrorContains(t, l.run(from, r.next), "forward pass has not run")
		}
	}
}

// cards lists GPUs of all compute capabilities with machine code in the kernels. The tests give them a
// small cache because timing overwrites it.
var cards = []gpu.DeviceInfo{
	{Name: "A100", Major: 8, SMs: 108, SharedPerBlock: 163 << 10},
	{Name: "L40S", Major: 8, Minor: 9, SMs: 142, SharedPerBlock: 99 << 10},
	{Name: "H200", Major: 9, SMs: 132, SharedPerBlock: 227 << 10},
	{Name: "B200", Major: 10, SMs: 148, SharedPerBlock: 227 << 10},
}

const hopper = 2 // index in cards

// openBinaries returns a device with the given card. Its kernels do nothing, but they exist only if their
// unit has a binary with them, and they check the sizes of their arguments.
func openBinaries(t *testing.T, card gpu.DeviceInfo) *Device {
	t.Helper()
	card.Memory, card.L2 = 1<<30, 1<<16
	device, err := Open(withDriver(fake.New(fake.Config{Devices: []gpu.DeviceInfo{card},
		Images: kerneltest.Kernels})))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, device.Close()) })
	return device
}

// launch runs a machine three times, with updates, so that its work is enqueued, captured and replayed.
func launch(t *testing.T, m *Machine) {
	t.Helper()
	for range 3 {
		require.NoError(t, m.RunAll())
		if m.optimizer == nil {
			continue
		}
		// the memory is uninitialized
		if _, err := m.Update(); !errors.Is(err, ErrNonFinite) {
			require.NoError(t, err)
		}
	}

	require.NoError(t, m.Close())
}

// TestModelFitsBinaries launches the kernels of models in training, with their updates, in every
// precision, on every card and in all variants, since each variant is timed.
func TestModelFitsBinaries(t *testing.T) {
	for i, card := range cards {
		precisions := []Precision{BFloat16, Float32, Float16}
		if i == hopper {
			precisions = append([]Precision{Float8}, precisions...)
		}
		for _, p := range randtest.SampleOf(t, 1, precisions) {
			t.Run(fmt.Sprint(card.Name, " ", p), func(t *testing.T) {
				device := openBinaries(t, card)
				var log bytes.Buffer
				timed := func(c *machineConfig) error {
					c.variants.Mode, c.variants.MinFLOPs, c.variants.Path = choose.Full, 1,
						filepath.Join(t.TempDir(), "tune.json")
					return nil
				}
				_, larger := float8Model(t, llm.ForTraining, 1, 128)
				for _, of := range []struct {
					*batch
					newOptimizer func() (optim.Optimizer, error)
				}{{grafted(t, 1), newAdamW}, {larger, newMuon}} {
					m, err := NewMachine(device, of.G, WithPrecision(p), WithParams(of.Params...),
						WithOutputs(of.Loss), timed,
						logTo(&log))
					require.NoError(t, err)
					rule, err := of.newOptimizer()
					require.NoError(t, err)
					require.NoError(t, m.SetOptimizer(rule, 1))
					launch(t, m)
				}
				require.NotRegexp(t, "cuModule|cuLaunch|cuFunc|kernels[.:]", log.String(),
					"a variant that cannot be launched is left out with a warning")
			})
		}
	}
}

// TestKasminaFitsBinaries launches the kernels of layers with narrow and wide slots, with full and with
// sampled telemetry.
func TestKasminaFitsBinaries(t *testing.T) {
	device := openBinaries(t, cards[hopper])
	for name, mode := range map[string]state.Telemetry{
		"all": {Mode: state.Debug}, "sampled": {Mode: state.Sampling, Every: 2, Share: 0.5},
	} {
		for _, width := range []int{3, 24} {
			t.Run(fmt.Sprint(name, " ", width), func(t *testing.T) {
				k := newWideKasminaGraph(t, 1, width, []state.Option{state.WithTelemetry(mode)})
				launch(t, k.open(t, device))
			})
		}
	}
}

// TestStockFitsBinaries launches the kernels of Gorgonia's own ops.
func TestStockFitsBinaries(t *testing.T) {
	for _, p := range []Precision{Float32, BFloat16} {
		t.Run(fmt.Sprint(p), func(t *testing.T) {
			device := openBinaries(t, cards[hopper])
			for _, c := range stockCases() {
				graph, err := c.graph(tensor.Float32, !c.constant)
				require.NoError(t, err)
				results := gorgonia.Nodes{graph.out}
				if !c.constant {
					results = append(results, derivatives(graph.in)...)
				}
				var values [][]float64
				for _, s := range c.shapes {
					values = append(values, make([]float64, opbase.Size(s)))
				}
				require.NoError(t,
					graph.let(values, make([]float64, opbase.Size(graph.out.Shape()))))
				m, err := NewMachine(device, graph.g, WithPrecision(p), WithStrict(),
					WithOutputs(results...))
				require.NoError(t, err, c.name)
				launch(t, m)
			}
		})
	}
}

// lifetime is the life of a machine that trains a model.
type lifetime struct {
	model     *llm.Model
	batch     *batch
	optimizer optim.Optimizer
	machine   *Machine
}

func newLifetime(t *testing.T, newOptimizer func() (optim.Optimizer, error)) *lifetime {
	t.Helper()
	model, b := newBatch(t, llm.ForTraining, 2)
	o, err := newOptimizer()
	require.NoError(t, err)
	return &lifetime{model: model, batch: b, optimizer: o}
}

func (l *lifetime) open(device *Device, opts ...MachineOption) (err error) {
	if l.machine, err = NewMachine(device, l.batch.G, append(opts, WithParams(l.batch.Params...),
		WithOutputs(l.batch.Loss))...); err != nil {
		return err
	}
	return l.machine.SetOptimizer(l.optimizer, 1)
}

// names maps the name of each parameter to itself.
func (l *lifetime) names() map[string]string {
	names := map[string]string{}
	for _, p := range l.batch.Params {
		names[p.Name()] = p.Name()
	}
	return names
}

func (l *lifetime) step() error {
	if err := l.machine.RunAll(); err != nil {
		return err
	}
	if _, err := l.machine.Value(l.batch.Loss); err != nil {
		return err
	}
	_, err := l.machine.Update()
	return err
}

// call is a public call that uses the GPU.
type call struct {
	name string
	do   func() error
}

// calls returns all calls. SetOptimizer is last because the machine has no optimizer if it fails.
func (l *lifetime) calls() []call {
	m := l.machine
	return []call{
		{"RunAll", m.RunAll},
		{"Value", func() error { _, err := m.Value(l.batch.Loss); return err }},
		{"Update", func() error { _, err := m.Update(); return err }},
		{"Upload", func() error { return m.Upload(l.batch.Params...) }},
		{"Download", func() error { return m.Download() }},
		{"StartProfile", m.StartProfile},
		{"SetOptimizer", func() error { return m.SetOptimizer(l.optimizer, 1) }},
	}
}

// profile runs the steps of a profile.
func (l *lifetime) profile() error {
	err := l.machine.StartProfile()
	for i := 0; i < ProfileSteps && err == nil; i++ {
		err = l.step()
	}
	if err == nil {
		_, err = l.machine.Profile()
	}
	return err
}

// TestEveryCallFails makes each CUDA call in the life of a machine fail, the first of its kind and some
// later ones. It checks that the error names the call, that nothing leaks, and that the device can be
// used for another machine.
func TestEveryCallFails(t *testing.T) {
	seed := randomSeed(t)
	for _, call := range randtest.SampleOf(t, 8, []string{"cuMemAlloc", "cuMemHostAlloc", "cuMemGetInfo", "cuStreamCreate",
		"cuEventCreate", "cuEventRecord",
		"cuModuleLoadData", "cuModuleGetFunction", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
		"cuMemsetD8Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture", "cuStreamEndCapture",
		"cuGraphInstantiateWithFlags", "cuGraphLaunch",
		"cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"}) {
		t.Run(call, func(t *testing.T) {
			var status error = gpu.OutOfMemory
			if strings.HasPrefix(call, "cublas") {
				status = gpu.BlasNotSupported
			}
			met, r := 0, rand.New(rand.NewPCG(seed, 6))
			for nth := 1; nth < 5 || !testing.Short(); nth += 1 + r.IntN(2*nth) {
				device, cuda := openFake(t, fake.Config{})
				l, opts := newLifetime(t, newMuon),
					[]MachineOption{withCeilingBytes(1 << 12)}
				cuda.Fail(call, nth, status)
				err := l.open(device, opts...)
				for i := 0; i < 3 && err == nil; i++ {
					err = l.step()
				}
				if err == nil && strings.HasPrefix(call, "cuEvent") {
					err = l.profile()
				}
				if err == nil {
					// which may meet the failing call
					if err := l.machine.Close(); err != nil {
						require.ErrorIs(t, err, status)
					}
					break // no further calls of this kind
				}
				met++
				require.ErrorIs(t, err, status, nth)
				require.ErrorContains(t, err, call, nth)
				require.True(t, strings.HasPrefix(err.Error(), "cudaops."), nth)
				if l.machine != nil {
					require.NoError(t, l.machine.Close(), nth)
				}
				requireNoLeaks(t, device, nth)
				if nth > 1 { // the device does not depend on nth
					continue
				}
				again := newLifetime(t, newAdamW)
				require.NoError(t, errors.Join(again.open(device), again.step(),
					again.machine.Close()), "the next machine")
			}
			require.NotZero(t, met, "the machine never makes this call")
		})
	}
}

// TestRetry makes CUDA calls fail during runs, and checks that the machine computes the right results
// when it runs again.
func TestRetry(t *testing.T) {
	seed := randomSeed(t)
	r := rand.New(rand.NewPCG(seed, 7))
	value := func(t *testing.T, l *lifetime) float32 {
		t.Helper()
		for range 3 {
			v, err := l.machine.Value(l.batch.Loss)
			if err == nil {
				return flat(t, v)[0]
			}
			require.ErrorIs(t, err, gpu.OutOfMemory)
		}
		t.Fatal("Value keeps failing")
		return 0
	}

	device, _ := openFake(t, fake.Config{})
	plain := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(plain.open(device), plain.machine.RunAll()))
	want := value(t, plain)
	for _, call := range []string{"cuMemHostAlloc", "cuEventCreate", "cuEventRecord",
		"cuEventSynchronize", "cuModuleGetFunction",
		"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD32Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture",
		"cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cublasLtMatmul"} {
		for _, nth := range []int{1, 2 + r.IntN(8)} {
			device, cuda := openFake(t, fake.Config{})
			l := newLifetime(t, newAdamW)
			require.NoError(t, l.open(device, WithMonitor(2)))
			cuda.Fail(call, nth, gpu.OutOfMemory)
			for run := range 5 {
				err := l.machine.RunAll()
				for try := 0; err != nil && try < 3; try++ {
					require.ErrorIs(t, err, gpu.OutOfMemory, "%s, call %d: %v", call, nth, err)
					if enqueues := call == "cuLaunchKernel" || call == "cublasLtMatmul"; enqueues &&
						run == 0 && l.machine.runner.Current.Loaded {
						t.Fatalf("%s, call %d: kernels count as loaded before a run has loaded them", call, nth)
					}
					err = l.machine.RunAll()
				}
				require.NoError(t, err, "%s, call %d: %v", call, nth, err)
				require.Equal(t, want, value(t, l), "%v, %v, %v", call, nth, run)
			}
			// which may meet the failing call
			if err := l.machine.Close(); err != nil && !errors.Is(err, gpu.OutOfMemory) {
				t.Errorf("%s, call %d: Close: %v", call, nth, err)
			}
		}
	}

	require.NoError(t, plain.machine.Close())
}

// TestOutOfMemory checks that the error names the purpose, the size and the free memory, and that the
// device still works.
func TestOutOfMemory(t *testing.T) {
	wants := func(t *testing.T, err error, say ...string) {
		t.Helper()
		for _, s := range say {
			require.ErrorIs(t, err, gpu.OutOfMemory)
			require.ErrorContains(t, err, s)
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t,
			fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9,
				Memory: 33 << 20, SMs: 1}}})
		wants(t, squareOf(device, 4096), "128.00 MiB", "33.00 MiB are free")
		// a machine that fits, with an optimizer that does not
		l := newLifetime(t, newAdamW)
		require.NoError(t, l.open(device))
		defer l.machine.Close()
		free, _, err := device.Memory()
		require.NoError(t, err)
		hog, err := device.ctx.Alloc(int(free))
		require.NoError(t, err)
		bigger := newLifetime(t, newMuon)
		err = l.machine.SetOptimizer(bigger.optimizer, 1)
		wants(t, err, "SetOptimizer: allocating", "for the directions of Muon",
			"requested", "of 33.00 MiB free")
		require.ErrorContains(t, errOf(l.machine.Update()), "no optimizer")
		require.NoError(t,
			errors.Join(device.ctx.Free(hog), l.machine.SetOptimizer(l.optimizer, 1), l.step()))
	})

	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		wants(t, squareOf(device, 1<<20), "the graph needs 8.00 TiB of device memory", "are free")
		_, total, err := device.Memory()
		require.NoError(t, err)
		_, err = device.ctx.Alloc(int(total))
		wants(t, err, gpu.Size(total)+" requested", "free")
		l := newLifetime(t, newAdamW)
		require.NoError(t, errors.Join(l.open(device), l.step(), l.machine.Close()))
	})
}

// squareOf opens and closes a machine for the square of an n×n matrix.
func squareOf(device *Device, n int, opts ...MachineOption) error {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(n, n), gorgonia.WithName("x"))
	if _, err := gorgonia.Square(x); err != nil {
		return err
	}
	m, err := NewMachine(device, g, opts...)
	if err == nil {
		err = m.Close()
	}
	return err
}

// TestLibrariesMissing checks that the error lists the places searched, and that a graph without matrix
// products does not need cuBLASLt.
func TestLibrariesMissing(t *testing.T) {
	device, _ := openFake(t, fake.Config{NoBlas: true})
	l := newLifetime(t, newAdamW)
	err := l.open(device)
	var missing *gpu.NotFoundError
	require.True(t, errors.As(err, &missing))
	require.ErrorContains(t, err, missing.Error())
	requireNoLeaks(t, device)
	require.NoError(t, squareOf(device, 8))
	t.Run("libcuda", func(t *testing.T) {
		runChild(t, "libcuda", "KASMINA_LIBCUDA="+t.TempDir())
	})
	t.Run("libcublasLt", func(t *testing.T) {
		openGPU(t)
		runChild(t, "libcublasLt", "KASMINA_LIBCUBLASLT="+t.TempDir())
	})
}

// TestLostContext checks that every call returns a clear error once the GPU's context is lost, and that
// Close returns.
func TestLostContext(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, cuda := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		require.NoError(t, errors.Join(l.open(device), l.step(), l.step()))
		cuda.Fail("cuGraphLaunch", 1, gpu.LaunchFailed)
		l.checkLost(t, device, gpu.LaunchFailed)
	})

	t.Run("closed", func(t *testing.T) { // the device is closed before the machine, which is not allowed
		device, _ := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		require.NoError(t, errors.Join(l.open(device), l.step()))
		require.ErrorContains(t, device.Close(), "still alive")
		l.checkLost(t, device, gpu.ContextIsDestroyed)
	})

	for _, fault := range []string{"trap", "poke"} {
		t.Run(fault, func(t *testing.T) {
			openGPU(t)
			runChild(t, fault)
		})
	}
}

// checkLost makes every call on a machine with a context that is lost, or becomes lost in the first call.
func (l *lifetime) checkLost(t *testing.T, device *Device, status gpu.Status,
	opts ...MachineOption) {
	t.Helper()
	check := func(name string, err error) {
		t.Helper()
		var e *gpu.Error
		if !errors.As(err, &e) || !e.Sticky() || status != 0 && !errors.Is(err, status) ||
			e.Call == "" ||
			!strings.Contains(err.Error(), e.Call+": CUDA_ERROR_") || !strings.Contains(err.Error(),
			"context is lost") || len(err.Error()) > 600 {
			t.Errorf("%s: %v, want a short error that names the call and says that the context "+
				"is lost", name, err)
		}
	}

	check("RunAll", errors.Join(l.machine.RunAll(), device.ctx.SyncStream(l.machine.runner.Stream)))
	for _, c := range l.calls() {
		check(c.name, c.do())
	}

	_, err := NewMachine(device, l.batch.G, opts...)
	check("NewMachine", err)
	check("Close", l.machine.Close())
	require.NoError(t, l.machine.Close())
	for _, c := range l.calls() {
		require.ErrorContains(t, c.do(), "closed", c.name)
	}
}

// faults contains kernels that make the context unusable.
const faults = `.version 7.0
.target sm_80
.address_size 64
.visible .entry trap() { trap; ret; }
.visible .entry poke() { .reg .b64 %at; .reg .b32 %v; mov.u64 %at, 64; mov.u32 %v, 1; st.global.u32 [%at], %v; ret; }
`

// child is the environment variable that selects a task for a child process of the test binary. The tasks
// run in a child because they make the GPU's context unusable.
const child = "KASMINA_TEST_CHILD"

func runChild(t *testing.T, task string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(append(os.Environ(), child+"="+task), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "--- PASS: TestChild")
	t.Logf("%s", out)
}

func TestChild(t *testing.T) {
	task := os.Getenv(child)
	switch task {
	case "":
		return // not a child process
	case "libcuda":
		_, err := Open()
		require.ErrorIs(t, err, ErrNoDevice)
		require.Contains(t, fmt.Sprint(err), os.Getenv("KASMINA_LIBCUDA"))
		t.Log(err)
		return
	}

	device, err := Open()
	require.NoError(t, err)
	l := newLifetime(t, newAdamW)
	err = l.open(device)
	if task == "libcublasLt" {
		var missing *gpu.NotFoundError
		require.True(t, errors.As(err, &missing))
		require.ErrorContains(t, err, os.Getenv("KASMINA_LIBCUBLASLT"))
		t.Log(err)
		return
	}

	require.NoError(t, errors.Join(err, l.step(), l.step()))
	module, err := device.ctx.LoadModule([]byte(faults))
	require.NoError(t, err)
	kernel, err := device.ctx.Function(module, task)
	require.NoError(t, err)
	one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 1}}
	require.NoError(t, device.ctx.Launch(kernel, one, l.machine.runner.Stream, new(gpu.Args)))
	l.checkLost(t, device, 0)
	t.Log(device.Close())
}

// TestBatches continues several texts on a device at the same time, with few pages and several kinds of
// attention, and compares all logits with those of a batcher on the CPU. A batcher must leave no memory
// behind.
func TestBatches(t *testing.T) {
	randtest.Concurrent(t)
	device, _ := openFake(t, fake.Config{})
	for name, traits := range randtest.Sample(t, 2, map[string]llm.Traits{
		"llama": {}, "windows": {Blocks: []llm.Block{{Window: 7}, {}}}, "norms": {QKNorm: true},
		"biases": {QKVBias: true}, "gemma": {GELU: true, PostNorms: true, NormPlusOne: true},
		"gpt2": {QKVBias: true, OutBias: true, MLPBias: true, LayerNorm: true, PlainMLP: true, GELU: true,
			Positions: 100, Blocks: []llm.Block{{NoRoPE: true}}},
	}, "llama") {
		t.Run(name, func(t *testing.T) {
			c := llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 100,
				Traits: traits}
			m, err := llm.NewModel(c.Default(), tensor.Float32, 1)
			require.NoError(t, err)
			g, read := valueless(t, m, llm.ForLogits, Float32)
			owner, err := NewMachine(device, g.G, WithFrozen(read, g.Params...))
			require.NoError(t, err)

			steps := 0
			i := llm.InferenceOf(m.Config, func(g *llm.Graph) (llm.Machine, error) {
				m, err := NewMachine(device, g.G, WithStrict(), WithParamsOf(owner), WithOutputs(g.Outputs()...))
				if err == nil && g.IDs.Shape()[0] == 1 {
					steps++
				}
				return m, err
			}, owner.Close)
			onGPU, err := i.NewBatcher(llm.BatcherOptions{Texts: 3, Rows: 20, Tokens: 5 * 64})
			require.NoError(t, err)
			onCPU, err := llm.NewBatcher(m, llm.BatcherOptions{Rows: 128})
			require.NoError(t, err)

			var texts sync.WaitGroup
			for i := range 5 {
				texts.Go(func() {
					got, err := onGPU.Decoder()
					if err != nil {
						t.Error(err)
						return
					}
					want, err := onCPU.Decoder()
					if err != nil {
						t.Error(err)
						return
					}
					tokens := make([]int, 55+8*i)
					for j := range tokens {
						tokens[j] = (j*j + i%2) % 19
					}
					for range 12 {
						x, err := got(t.Context(), tokens)
						if err != nil {
							t.Error(err)
							return
						}
						y, err := want(t.Context(), tokens)
						if err != nil {
							t.Error(err)
							return
						}
						for j, v := range y.([]float32) {
							if d := v - x.([]float32)[j]; !(d < 1e-5 && d > -1e-5) {
								t.Errorf("text %d after %d tokens: logit %d is off by %g", i, len(tokens), j, d)
								return
							}
						}
						tokens = append(tokens, (7*len(tokens)+i)%19)
					}
				})
			}
			texts.Wait()
			require.NoError(t, onGPU.Close())
			require.NoError(t, onCPU.Close())
			require.Positive(t, steps)
			requireNoLeaks(t, device)
		})
	}
}
