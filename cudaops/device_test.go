package cudaops

import (
	"bytes"
	"errors"
	"fmt"
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

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/tune"
	"github.com/kasmina-go/kasmina/cudaops/internal/value"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

func TestOpenFake(t *testing.T) {
	f := fake.New(fake.Config{Devices: []gpu.DeviceInfo{
		{Name: "A", Major: 9, Memory: 1 << 30, SMs: 132}, {Name: "B", Major: 8, Minor: 9,
			Memory: 3 << 29, SMs: 66},
		{Name: "C", Major: 7, Minor: 5}}})
	d, err := Open(withDriver(f), WithOrdinal(1))
	if err != nil {
		t.Fatal(err)
	}
	major, minor := d.ComputeCapability()
	if d.Name() != "B" || d.Ordinal() != 1 || major != 8 || minor != 9 {
		t.Errorf("got %s, GPU %d, %d.%d", d.Name(), d.Ordinal(), major, minor)
	}
	const want = "B (GPU 1, compute capability 8.9, 1.50 GiB, 66 multiprocessors, driver for " +
		"CUDA 13.0)"
	if d.String() != want {
		t.Errorf("String() = %q, want %q", d, want)
	}
	p, err := d.ctx.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if free, total, err := d.Memory(); err != nil || total != 3<<29 || total-free != 1<<20 {
		t.Errorf("Memory() = %d, %d, %v", free, total, err)
	}
	if err := d.ctx.Free(p); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := d.Memory(); !errors.Is(err, gpu.ContextIsDestroyed) {
		t.Errorf("Memory after Close: %v", err)
	}
	for _, n := range []int{-1, 3} {
		if _, err := Open(withDriver(f), WithOrdinal(n)); err == nil ||
			errors.Is(err, ErrNoDevice) ||
			!strings.Contains(err.Error(), "there are 3") {
			t.Errorf("ordinal %d: %v", n, err)
		}
	}
	if _, err := Open(withDriver(f), WithOrdinal(2)); !errors.Is(err, ErrUnsupportedDevice) ||
		!strings.Contains(err.Error(), "C has compute capability 7.5") {
		t.Errorf("old GPU: %v", err)
	}
	f.Fail("cuDevicePrimaryCtxRetain", 1, gpu.OutOfMemory)
	if _, err := Open(withDriver(f)); !errors.Is(err, gpu.OutOfMemory) ||
		errors.Is(err, ErrNoDevice) {
		t.Errorf("failed context: %v", err)
	}
}

// TestZeroDevice wants a device that Open has not made refused wherever it is used.
func TestZeroDevice(t *testing.T) {
	var d Device
	g := gorgonia.NewGraph()
	_, _, memory := d.Memory()
	_, machine := NewMachine(&d, g)
	for name, err := range map[string]error{"Memory": memory,
		"NewMachine": machine, "Close": d.Close()} {
		if !errors.Is(err, errNotOpened) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d.Context() != 0 {
		t.Error("it has a context")
	}
}

// TestZeroMachine wants a machine that nobody has made to say who makes it.
func TestZeroMachine(t *testing.T) {
	var m Machine
	second := func(_ any, err error) error { return err }
	_, _, address := m.Address(nil)
	_, _, step := m.Step(nil)
	for name, err := range map[string]error{"Address": address, "Step": step,
		"Bind": m.Bind(nil, 0, 0), "RunAll": m.RunAll(), "SetOptimizer": m.SetOptimizer(nil, 0),
		"Update": second(m.Update()), "Forget": m.Forget(nil, 0, 0),
		"Contribute": m.Contribute(1, true), "GatherState": m.GatherState(),
		"DownloadOwn": second(m.DownloadOwn()), "DropGradients": m.DropGradients(),
		"NonFinite":    second(m.NonFinite()),
		"SetLossScale": m.SetLossScale(LossScale{}), "StartProfile": m.StartProfile(),
		"Profile": second(m.Profile()), "Monitor": second(m.Monitor()),
		"Value": second(m.Value(nil)), "Upload": m.Upload(), "Download": m.Download()} {
		require.ErrorContains(t, err, "Machine."+name+": the machine is a zero value")
	}
	require.Zero(t, m.Memory())
	require.Zero(t, m.Stream())
	require.Empty(t, m.Choices())
	require.Zero(t, m.LossScale())
	require.Equal(t, Float32, m.GradientPrecision())
	m.Reset()
	require.NoError(t, m.Close())
}

func TestOpenWithout(t *testing.T) {
	none := fake.New(fake.Config{Devices: []gpu.DeviceInfo{}})
	if _, err := Open(withDriver(none)); !errors.Is(err, ErrNoDevice) {
		t.Errorf("no GPU listed: %v", err)
	}
	for _, c := range []struct {
		err      error
		noDevice bool
		say      string
	}{
		{&gpu.NotFoundError{Library: "libcuda",
			Tried: []gpu.Attempt{{Place: "/usr/lib", Reason: "no such file"}},
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
		if errors.Is(err, ErrNoDevice) != c.noDevice || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%v: got %v", c.err, err)
		}
	}
}

// TestOpenHere opens what this machine has: a GPU, or the reason why there is none.
func TestOpenHere(t *testing.T) {
	d, err := Open()
	if err == nil {
		t.Log(d)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		return
	}
	if !errors.Is(err, ErrNoDevice) && !errors.Is(err, ErrUnsupportedDevice) {
		t.Errorf("neither a GPU nor a reason: %v", err)
	}
	t.Log(err)
}

// host is a program that has device memory of its own.
type host struct {
	t   *testing.T
	ctx gpu.Context
}

// place puts values into memory of the program's and returns where.
func (h host) place(values []float32) uintptr {
	h.t.Helper()
	p, err := h.ctx.Alloc(4 * len(values))
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := h.ctx.Free(p); err != nil {
			h.t.Error(err)
		}
	})
	h.write(uintptr(p), values)
	return uintptr(p)
}

func (h host) write(p uintptr, values []float32) {
	h.t.Helper()
	if err := h.ctx.CopyToDevice(gpu.Ptr(p), gpu.Bytes(values), 0); err != nil {
		h.t.Fatal(err)
	}
}

func (h host) read(p uintptr, n int) []float32 {
	h.t.Helper()
	values := make([]float32, n)
	if err := h.ctx.CopyToHost(gpu.Bytes(values), gpu.Ptr(p), 0); err != nil {
		h.t.Fatal(err)
	}
	return values
}

// TestInterop runs a Kasmina layer on a context, a stream and memory that somebody else holds,
// several times, so that what was captured is replayed on it, and compares the bits with those of a
// machine of its own.
func TestInterop(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		owner, f, fakeOption := openFake(t, fake.Config{})
		adopted, err := Open(withDriver(f), WithContext(owner.Context()))
		if err != nil {
			t.Fatal(err)
		}
		testInterop(t, owner, adopted, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) {
		owner := openGPU(t)
		adopted, err := Open(WithContext(owner.Context()))
		if err != nil {
			t.Fatal(err)
		}
		testInterop(t, owner, adopted)
	})
}

func testInterop(t *testing.T, owner, adopted *Device, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	own, other := newKasminaGraph(t, seed, nil), newKasminaGraph(t, seed, nil)
	want := own.open(t, owner, opts...)
	defer want.Close()
	h := host{t, owner.ctx}
	stream, err := h.ctx.NewStream()
	for err == nil && stream <= 2 { // the fake driver counts from 1
		stream, err = h.ctx.NewStream()
	}
	if err != nil {
		t.Fatal(err)
	}
	got := other.open(t, adopted, append(opts, WithStream(uintptr(stream)))...)
	if adopted.Context() != owner.Context() || got.Stream() != uintptr(stream) {
		t.Errorf("context %#x and stream %#x, want %#x and %#x", adopted.Context(), got.Stream(),
			owner.Context(), stream)
	}
	poison := slices.Repeat([]float32{float32(math.NaN())}, other.rows*other.dim)
	x, dx := h.place(poison), h.place(poison)
	weights := h.place(flat(t, other.weights.Value()))
	for n, p := range map[*gorgonia.Node]uintptr{other.x: x, other.x.Deriv(): dx,
		other.weights: weights} {
		if err := got.Bind(n, p, 4*n.Shape().TotalSize()); err != nil {
			t.Fatal(err)
		}
		if at, bytes, err := got.Address(n); err != nil || at != p ||
			bytes != 4*n.Shape().TotalSize() {
			t.Errorf("Address = %#x, %d, %v, want %#x", at, bytes, err, p)
		}
	}
	for run := range uint64(4) {
		own.draw(t, seed+run, nil)
		values := flat(t, own.x.Value())
		h.write(x, values)
		if run == 3 { // the next run shall read it from elsewhere
			h.write(x, poison)
			if err := got.Bind(other.x, h.place(values), 4*len(values)); err != nil {
				t.Fatal(err)
			}
		}
		before := adopted.ctx.Stats()
		if err := got.RunAll(); err != nil {
			t.Fatal(err)
		}
		if err := h.ctx.SyncStream(stream); err != nil {
			t.Fatal(err)
		}
		sent := adopted.ctx.Stats().Sub(before).ToDevice.Bytes
		before = owner.ctx.Stats()
		if err := want.RunAll(); err != nil {
			t.Fatal(err)
		}
		if all := owner.ctx.Stats().Sub(before).ToDevice.Bytes; sent != all-int64(4*len(values)) {
			t.Errorf("run %d sent %d bytes, want %d, all but x", run, sent,
				all-int64(4*len(values)))
		}
		for _, n := range []struct{ a, b *gorgonia.Node }{{own.loss, other.loss},
			{own.x.Deriv(), other.x.Deriv()},
			{own.weights.Deriv(), other.weights.Deriv()},
			{own.scales.Deriv(), other.scales.Deriv()}} {
			a, errA := want.Value(n.a)
			b, errB := got.Value(n.b)
			if err := errors.Join(errA, errB); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(flat(t, a), flat(t, b)) {
				t.Errorf("run %d: %v differs", run, n.a)
			}
			if n.b == other.x.Deriv() && !slices.Equal(h.read(dx, other.rows*other.dim),
				flat(t, a)) {
				t.Errorf("run %d: the gradient of x is not in the memory it was bound to", run)
			}
		}
	}
	if err := errors.Join(got.Close(), adopted.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := got.RunAll(), got.Bind(other.x, x, 4); err == nil ||
		!strings.Contains(err.Error(), "closed") {
		t.Errorf("Bind after Close: %v", err)
	}
	if _, _, err := got.Address(other.x); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("Address after Close: %v", err)
	}
	h.read(dx, 1) // the context, the stream and the memory live on
	if err := h.ctx.SyncStream(stream); err != nil {
		t.Error(err)
	}
	if err := h.ctx.DestroyStream(stream); err != nil {
		t.Error(err)
	}
}

func TestInteropRefusals(t *testing.T) {
	device, f, fakeOption := openFake(t, fake.Config{})
	if _, err := Open(withDriver(f), WithContext(99)); !errors.Is(err, gpu.InvalidContext) {
		t.Errorf("an unknown context: %v", err)
	}
	k := newKasminaGraph(t, 1, nil)
	for _, s := range []uintptr{0, 1, 2} {
		if _, err := NewMachine(device, k.g, fakeOption, WithStream(s)); err == nil ||
			!strings.Contains(err.Error(), "default stream") {
			t.Errorf("stream %d: %v", s, err)
		}
	}
	m := k.open(t, device, fakeOption)
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
		if err := m.Bind(c.node, c.ptr, c.bytes); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("Bind(%v, %#x, %d) = %v, want %q", c.node, c.ptr, c.bytes, err, c.want)
		}
		if is, _, _ := m.Address(k.x); is != was {
			t.Errorf("Bind(%v, %#x, %d) moved x", c.node, c.ptr, c.bytes)
		}
	}
	other, err := NewMachine(device, k.g, fakeOption, WithParamsOf(m))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := m.Bind(k.weights, p, 4*k.weights.Shape().TotalSize()); err == nil ||
		!strings.Contains(err.Error(), "WithParamsOf") {
		t.Errorf("a shared parameter: %v", err)
	}
}

// singleRunner runs a graph as a machine does that calls on each op alone, with its own memory in
// between: one allocation, in which values begin at any multiple of four bytes.
type singleRunner struct {
	t    *testing.T
	ops  *singleOps
	of   map[*gorgonia.Node]*singleOp
	at   map[*gorgonia.Node]gpu.Ptr
	next gpu.Ptr
}

func newSingleRunner(t *testing.T, device *Device, opts ...MachineOption) *singleRunner {
	t.Helper()
	config := machineConfig{kernels: func(ctx gpu.Context) (run.Launcher, error) {
		return run.NewLauncher(ctx), nil
	}}
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
	ctx, start := r.ops.device.ctx, r.next
	r.at = map[*gorgonia.Node]gpu.Ptr{}
	defer func() { r.next = start }()
	sorted, err := gorgonia.Sort(g)
	r.ok(err)
	for _, n := range slices.Backward(sorted) {
		p := r.place(n)
		if n.Value() != nil && (n.Op() == nil || graph.IsConstant(n)) {
			stored := gpu.Float32
			if n.Dtype() == tensor.Int {
				stored = gpu.Int64
			}
			raw := make([]byte, opbase.Size(n.Shape())*stored.Size())
			r.ok(value.Encode(raw, stored, n.Value(), opbase.Size(n.Shape())))
			r.ok(ctx.CopyToDevice(p, raw, 0))
			continue
		}
		var operands []singleOperand
		var from []gpu.Ptr
		for _, c := range graph.Children(n) {
			operands, from = append(operands, singleOperand{c.Dtype(), c.Shape()}),
				append(from, r.at[c])
		}
		l := r.of[n]
		if l == nil {
			l, err = r.ops.open(n.Op(), operands)
			if err != nil {
				r.t.Fatalf("%v: %v", n, err)
			}
			r.of[n] = l
		}
		r.ok(ctx.Memset32(p, math.Float32bits(float32(math.NaN())), opbase.Size(n.Shape()), 0))
		r.ok(ctx.SyncStream(0))
		if err := l.run(from, p); err != nil {
			return err
		}
	}
	return nil
}

func (r *singleRunner) value(n *gorgonia.Node) []float32 {
	x := make([]float32, opbase.Size(n.Shape()))
	r.ok(r.ops.device.ctx.CopyToHost(gpu.Bytes(x), r.at[n], 0))
	return x
}

// TestSingleOps runs every op of a model's training step alone, several times, and wants the whole
// graph's gradients.
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
			got := tensor.New(tensor.WithShape(p.Shape()...),
				tensor.WithBacking(r.value(b.Params[i].Deriv())))
			if d := distance(t, got, want); !(d < 1e-5) {
				t.Errorf("step %d: the gradient of %s differs by %g", step, p.Name(), d)
			}
		}
	}
}

// TestSingleKasmina runs a layer's op and its backward op alone: they go by one snapshot of the
// lattice, as in a whole graph, and both their figures reach it.
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
		// beyond the strict mode's limits, but not beyond those of the step after
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
	if err := gorgonia.Let(k.g.ByName("targets")[0],
		tensor.New(tensor.WithBacking([]int{1, 7, 24, 0, 9, 5}))); err != nil {
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
			for _, c := range graph.Children(n) {
				operands, from = append(operands, singleOperand{c.Dtype(), c.Shape()}),
					append(from, r.next)
			}
			l, err := r.ops.open(o, operands)
			r.ok(err)
			defer l.close()
			if err := l.run(from, r.next); err == nil || !strings.Contains(err.Error(),
				"forward pass has not run") {
				t.Errorf("a backward op alone: %v", err)
			}
		}
	}
}

// cards is GPUs of the compute capabilities that the units have machine code for. Their cache is
// small, since timing overwrites it.
var cards = []gpu.DeviceInfo{
	{Name: "A100", Major: 8, SMs: 108, SharedPerBlock: 163 << 10, SharedPerSM: 164 << 10},
	{Name: "L40S", Major: 8, Minor: 9, SMs: 142, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10},
	{Name: "H200", Major: 9, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10},
	{Name: "B200", Major: 10, SMs: 148, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10},
}

const hopper = 2 // in cards

// openBinaries returns a device on which kernels do nothing, but exist only if the binary of their
// unit has them, and take only the arguments that they have there.
func openBinaries(t *testing.T, card gpu.DeviceInfo) *Device {
	t.Helper()
	card.Memory, card.L2, card.RegistersPerSM, card.ThreadsPerSM = 1<<30, 1<<16, 65536, 1536
	device, err := Open(withDriver(fake.New(fake.Config{Devices: []gpu.DeviceInfo{card},
		Images: kerneltest.Kernels})))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, device.Close()) })
	return device
}

// launch runs what a machine has to do as it is, recorded and replayed, with updates behind it.
func launch(t *testing.T, m *Machine) {
	t.Helper()
	for range 3 {
		require.NoError(t, m.RunAll())
		if m.optimizer == nil {
			continue
		}
		// of memory that nothing has written
		if _, err := m.Update(); !errors.Is(err, ErrNonFinite) {
			require.NoError(t, err)
		}
	}
	require.NoError(t, m.Close())
}

// TestModelFitsBinaries launches the kernels of models in training, and of their updates, in every
// precision, on every card that has machine code: in all ways, since each is timed.
func TestModelFitsBinaries(t *testing.T) {
	for i, card := range cards {
		for _, p := range []Precision{Float32, Float16, BFloat16, Float8} {
			if p == Float8 && i != hopper {
				continue
			}
			t.Run(fmt.Sprint(card.Name, " ", p), func(t *testing.T) {
				device := openBinaries(t, card)
				var log bytes.Buffer
				timed := func(c *machineConfig) error {
					c.tuning, c.tuneLeast, c.tunePath = tune.Full, 1,
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
						WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
					require.NoError(t, err)
					rule, err := of.newOptimizer()
					require.NoError(t, err)
					require.NoError(t, m.SetOptimizer(rule, 1))
					launch(t, m)
				}
				require.NotRegexp(t, "cuModule|cuLaunch|cuFunc|kernels[.:]", log.String(),
					"a way that cannot be launched is left out with a warning")
			})
		}
	}
}

// TestKasminaFitsBinaries launches the kernels of layers with narrow and wide slots, with all
// telemetry and samples of it.
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
			device, r := openBinaries(t, cards[hopper]), rand.New(rand.NewPCG(1, 1))
			for _, c := range stockCases(r) {
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
