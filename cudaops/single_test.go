package cudaops

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/value"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// singleRunner runs a graph as a machine does that calls on each op alone, with its own memory in between: one allocation,
// in which values begin at any multiple of four bytes.
type singleRunner struct {
	t    *testing.T
	ops  *singleOps
	of   map[*gorgonia.Node]*singleOp
	at   map[*gorgonia.Node]gpu.Ptr
	next gpu.Ptr
}

func newSingleRunner(t *testing.T, device *Device, opts ...MachineOption) *singleRunner {
	t.Helper()
	config := machineConfig{kernels: func(ctx gpu.Context) (kernels.Launcher, error) { return kernels.New(ctx), nil }}
	for _, o := range opts {
		if err := o(&config); err != nil {
			t.Fatal(err)
		}
	}
	ops, err := newSingleOps(device, config.kernels)
	if err != nil {
		t.Fatal(err)
	}
	r := &singleRunner{t: t, ops: ops, of: map[*gorgonia.Node]*singleOp{}}
	memory, err := device.ctx.Alloc(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, l := range r.of {
			r.ok(l.close())
		}
		r.ok(ops.close())
		r.ok(device.ctx.Free(memory))
	})
	r.next = memory.Offset(4)
	return r
}

func (r *singleRunner) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// place returns memory for a node's value.
func (r *singleRunner) place(n *gorgonia.Node) gpu.Ptr {
	p := r.next
	r.next = p.Offset(8*program.Size(n.Shape()) + 4)
	if n.Dtype() == tensor.Int && p%8 != 0 {
		p = p.Offset(4)
	}
	r.at[n] = p
	return p
}

// run computes the whole graph.
func (r *singleRunner) run(g *gorgonia.ExprGraph) error {
	r.t.Helper()
	ctx, start := r.ops.device.ctx, r.next
	r.at = map[*gorgonia.Node]gpu.Ptr{}
	defer func() { r.next = start }()
	sorted, err := gorgonia.Sort(g)
	r.ok(err)
	for _, n := range slices.Backward(sorted) {
		p := r.place(n)
		if n.Value() != nil && (n.Op() == nil || opbase.IsConstant(n)) {
			stored := gpu.Float32
			if n.Dtype() == tensor.Int {
				stored = gpu.Int64
			}
			raw := make([]byte, program.Size(n.Shape())*stored.Size())
			r.ok(value.Encode(raw, stored, n.Value(), program.Size(n.Shape())))
			r.ok(ctx.CopyToDevice(p, raw, 0))
			continue
		}
		var operands []singleOperand
		var from []gpu.Ptr
		for _, c := range opbase.Children(n) {
			operands, from = append(operands, singleOperand{c.Dtype(), c.Shape()}), append(from, r.at[c])
		}
		l := r.of[n]
		if l == nil {
			l, err = r.ops.open(n.Op(), operands)
			if err != nil {
				r.t.Fatalf("%v: %v", n, err)
			}
			r.of[n] = l
		}
		r.ok(ctx.Memset32(p, math.Float32bits(float32(math.NaN())), program.Size(n.Shape()), 0))
		r.ok(ctx.SyncStream(0))
		if err := l.run(from, p); err != nil {
			return err
		}
	}
	return nil
}

func (r *singleRunner) value(n *gorgonia.Node) []float32 {
	x := make([]float32, program.Size(n.Shape()))
	r.ok(r.ops.device.ctx.CopyToHost(gpu.Bytes(x), r.at[n], 0))
	return x
}

// TestSingleOps runs every op of a model's training step alone, several times, and wants the whole graph's gradients.
func TestSingleOps(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testLoneModel(t, device, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) { testLoneModel(t, openGPU(t)) })
}

func testLoneModel(t *testing.T, device *Device, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	_, a := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	m, err := NewMachine(device, a.G, append(opts, WithOutputs(a.Loss))...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := newSingleRunner(t, device, opts...)
	for step := range uint64(few(3, 2)) {
		a.draw(t, seed+step)
		b.draw(t, seed+step)
		r.ok(m.RunAll())
		r.ok(r.run(b.G))
		for i, p := range a.Params {
			want, err := m.Value(p.Deriv())
			r.ok(err)
			got := tensor.New(tensor.WithShape(p.Shape()...), tensor.WithBacking(r.value(b.Params[i].Deriv())))
			if d := distance(t, got, want); !(d < 1e-5) {
				t.Errorf("step %d: the gradient of %s differs by %g", step, p.Name(), d)
			}
		}
	}
}

// TestSingleKasmina runs a layer's op and its backward op alone: they go by one snapshot of the lattice, as in a whole graph,
// and both their figures reach it.
func TestSingleKasmina(t *testing.T) {
	for name, c := range map[string]struct {
		lattice []state.Option
		layer   []op.KasminaOption
	}{
		"debug":    {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Debug})}},
		"sampling": {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Sampling, Every: 2, Share: 0.5})}},
		"strict":   {layer: []op.KasminaOption{op.WithStability(op.Strict), op.WithGradClip(1.5)}},
		"adaptive": {layer: []op.KasminaOption{op.WithAdaptiveGradClip(0.1)}},
	} {
		t.Run(name, func(t *testing.T) { testLoneKasmina(t, c.lattice, c.layer) })
	}
}

func testLoneKasmina(t *testing.T, lattice []state.Option, layer []op.KasminaOption) {
	device, _, fakeOption := openFake(t, fake.Config{})
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	a, b := newKasminaGraph(t, seed, lattice, layer...), newKasminaGraph(t, seed, lattice, layer...)
	m := a.open(t, device, fakeOption)
	defer m.Close()
	r := newSingleRunner(t, device, fakeOption)
	for step := range uint64(4) {
		outliers := func(x []float32) { // beyond the strict mode's limits, but not beyond those of the step after
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
			if got := r.value(theirs[i].Deriv()); !slices.Equal(got, flat(t, want)) {
				t.Errorf("step %d: the gradient of %s differs", step, n.Name())
			}
		}
	}
	sameReports(t, "in the end", b.lattice.Report(), a.lattice.Report())
}

func TestSingleRefusals(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	k := newKasminaGraph(t, 1, nil)
	r := newSingleRunner(t, device, fakeOption)
	if err := gorgonia.Let(k.g.ByName("targets")[0], tensor.New(tensor.WithBacking([]int{1, 7, 24, 0, 9, 5}))); err != nil {
		t.Fatal(err)
	}
	if err := r.run(k.g); err == nil || !strings.Contains(err.Error(), "is 24, want an id") {
		t.Errorf("a target outside the vocabulary: %v", err)
	}
	fresh := newKasminaGraph(t, 2, nil)
	for _, n := range fresh.g.AllNodes() {
		if o, ok := n.Op().(*op.KasminaGradOp); ok {
			var operands []singleOperand
			var from []gpu.Ptr
			for _, c := range opbase.Children(n) {
				operands, from = append(operands, singleOperand{c.Dtype(), c.Shape()}), append(from, r.next)
			}
			l, err := r.ops.open(o, operands)
			r.ok(err)
			defer l.close()
			if err := l.run(from, r.next); err == nil || !strings.Contains(err.Error(), "forward pass has not run") {
				t.Errorf("a backward op alone: %v", err)
			}
		}
	}
}
