//go:build cu

package cuinterop_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"gorgonia.org/cu"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/cuinterop"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

const (
	rows, seeds, chunk, slots = 37, 8, 5, 6
	dim                       = seeds * chunk
)

// layer is a graph of a Kasmina layer y of x and of the gradients of Σ y ⊙ g.
type layer struct {
	graph                    *gorgonia.ExprGraph
	x, weights, scales, g, y *gorgonia.Node
}

// newLayer returns a layer with seeds of several kinds and in several stages.
func newLayer(t *testing.T) *layer {
	t.Helper()
	l := &layer{graph: gorgonia.NewGraph()}
	matrix := func(name string, rows, cols int) *gorgonia.Node {
		return gorgonia.NewMatrix(l.graph, tensor.Float32, gorgonia.WithShape(rows, cols),
			gorgonia.WithName(name))
	}
	l.x, l.g, l.weights = matrix("x", rows, dim), matrix("g", rows, dim),
		matrix("weights", slots, chunk)
	l.scales = gorgonia.NewVector(l.graph, tensor.Float32, gorgonia.WithShape(slots),
		gorgonia.WithName("scales"))
	lattice := must[*state.Lattice](t)(state.NewLattice(seeds, dim, state.WithoutGates()))
	path := []state.Stage{state.Training, state.Grafting, state.Stabilization}
	for i := range seeds - 1 {
		ok(t, lattice.RequestGermination(i, state.GerminationRequest{Slot: 1 + i%(slots-1),
			Kind: blueprints.Kind(i % 4)}))
		for _, s := range path[:i%4] {
			ok(t, lattice.Transition(i, s))
		}
		if i%4 == 2 {
			ok(t, lattice.SetAlpha(i, 0.3))
		}
	}

	l.y = must[*gorgonia.Node](t)(op.Kasmina(l.x, l.weights, l.scales, lattice))
	sum := must[*gorgonia.Node](t)(gorgonia.Sum(must[*gorgonia.Node](t)(gorgonia.HadamardProd(l.y,
		l.g))))
	must[gorgonia.Nodes](t)(gorgonia.Grad(sum, l.x, l.weights, l.scales))
	return l
}

func (l *layer) inputs() gorgonia.Nodes { return gorgonia.Nodes{l.x, l.g, l.weights, l.scales} }

func (l *layer) outputs() gorgonia.Nodes {
	return gorgonia.Nodes{l.y, l.x.Deriv(), l.weights.Deriv(), l.scales.Deriv()}
}

// buffer is device memory allocated through gorgonia.org/cu.
type buffer struct {
	t     *testing.T
	at    cu.DevicePtr
	words int
}

func newBuffer(t *testing.T, n *gorgonia.Node) buffer {
	words := n.Shape().TotalSize()
	b := buffer{t, must[cu.DevicePtr](t)(cu.MemAlloc(int64(4 * words))), words}
	b.write(slices.Repeat([]float32{float32(math.NaN())}, words))
	return b
}

func (b buffer) bytes() int64 { return int64(4 * b.words) }

func (b buffer) write(values []float32) {
	b.t.Helper()
	ok(b.t, cu.MemcpyHtoD(b.at, unsafe.Pointer(&values[0]), b.bytes()))
}

func (b buffer) read() []float32 {
	b.t.Helper()
	values := make([]float32, b.words)
	ok(b.t, cu.MemcpyDtoH(unsafe.Pointer(&values[0]), b.at, b.bytes()))
	return values
}

// TestKasminaInCuMemory runs a Kasmina layer forward and backward in a context, on a stream and in memory
// created with gorgonia.org/cu, and compares the bits against an ordinary machine.
func TestKasminaInCuMemory(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))

	ours := newLayer(t)
	own := must[*cudaops.Device](t)(cudaops.Open())
	defer closing(t, own)
	want := must[*cudaops.Machine](t)(cudaops.NewMachine(own, ours.graph,
		cudaops.WithOutputs(ours.outputs()...), cudaops.WithStrict()))
	defer closing(t, want)

	ctx := must[cu.CUContext](t)(must[cu.Device](t)(cu.GetDevice(0)).MakeContext(cu.SchedAuto))
	ok(t, ctx.Lock())
	defer func() { ok(t, errors.Join(ctx.Unlock(), ctx.Destroy())) }()
	stream := must[cu.Stream](t)(cu.MakeStream(cu.NonBlocking))
	theirs := newLayer(t)
	buffers := map[*gorgonia.Node]buffer{}
	for _, n := range append(theirs.inputs(), theirs.outputs()...) {
		buffers[n] = newBuffer(t, n)
	}

	device := must[*cudaops.Device](t)(cuinterop.Adopt(ctx))
	got := must[*cudaops.Machine](t)(cudaops.NewMachine(device, theirs.graph,
		cuinterop.WithStream(stream),
		cudaops.WithOutputs(theirs.outputs()...), cudaops.WithStrict()))
	for n, b := range buffers {
		ok(t, cuinterop.Bind(got, n, b.at, b.bytes()))
		if at, bytes, err := cuinterop.Memory(got, n); at != b.at ||
			bytes != b.bytes() || err != nil {
			t.Errorf("%v is at %v, %d bytes (%v), want %v, %d bytes", n, at,
				bytes, err, b.at, b.bytes())
		}
	}

	if cuinterop.Context(device) != ctx || cuinterop.Context(own) == ctx ||
		cuinterop.Stream(got) != stream {
		t.Error("the device's context or the machine's stream is not the one given")
	}

	for run := range 4 { // the second run is captured, the following ones replay it
		for i, n := range ours.inputs() {
			values := make([]float32, n.Shape().TotalSize())
			for i := range values {
				values[i] = float32(r.NormFloat64())
			}
			ok(t, gorgonia.Let(n, tensor.New(tensor.WithShape(n.Shape()...),
				tensor.WithBacking(values))))
			buffers[theirs.inputs()[i]].write(values)
		}
		ok(t, want.RunAll())
		wanted := make([][]float32, len(ours.outputs()))
		for i, n := range ours.outputs() {
			wanted[i] = must[gorgonia.Value](t)(want.Value(n)).Data().([]float32)
		}
		ok(t, cu.SetCurrentContext(ctx)) // the other machine has left its own context current
		ok(t, got.RunAll())
		ok(t, stream.Synchronize())
		for i, n := range theirs.outputs() {
			if values := buffers[n].read(); !same(values, wanted[i]) {
				t.Errorf("run %d: %v differs: %v, want %v", run, n, values[:4], wanted[i][:4])
			}
		}
	}

	x := buffers[theirs.x]
	for _, c := range []struct {
		at    cu.DevicePtr
		bytes int64
		want  string
	}{{x.at + 4, x.bytes(), "multiple of 256"}, {x.at, x.bytes() - 4, "want 5920"},
		{0, x.bytes(), "multiple of 256"}} {
		if err := cuinterop.Bind(got, theirs.x, c.at, c.bytes); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("Bind(%v, %d) = %v, want %q", c.at, c.bytes, err, c.want)
		}
	}

	if _, err := cudaops.NewMachine(device, theirs.graph,
		cuinterop.WithStream(cu.NoStream)); err == nil {
		t.Error("NewMachine accepted the default stream")
	}

	ok(t, errors.Join(got.Close(), device.Close()))
	if err := cuinterop.Bind(got, theirs.x, x.at, x.bytes()); err == nil {
		t.Error("Bind accepted a closed machine")
	}

	ok(t, cu.SetCurrentContext(ctx))
	buffers[theirs.y].read() // the program's memory is still valid
	for _, b := range buffers {
		ok(t, cu.MemFree(b.at))
	}

	ok(t, stream.Destroy())
}

// same reports whether a and b are bit-identical.
func same(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool {
		return math.Float32bits(x) == math.Float32bits(y)
	})
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		ok(t, err)
		return v
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	require.NoError(t, err)
}

func closing(t *testing.T, c interface{ Close() error }) {
	t.Helper()
	ok(t, c.Close())
}
