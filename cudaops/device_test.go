package cudaops

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

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
	require.NoError(t, err)
	major, minor := d.ComputeCapability()
	if d.Name() != "B" || d.Ordinal() != 1 || major != 8 || minor != 9 {
		t.Errorf("got %s, GPU %d, %d.%d", d.Name(), d.Ordinal(), major, minor)
	}
	const want = "B (GPU 1, compute capability 8.9, 1.50 GiB, 66 multiprocessors, driver for " +
		"CUDA 13.0)"
	require.Equal(t, want, d.String())
	p, err := d.ctx.Alloc(1 << 20)
	require.NoError(t, err)
	if free, total, err := d.Memory(); err != nil || total != 3<<29 || total-free != 1<<20 {
		t.Errorf("Memory() = %d, %d, %v", free, total, err)
	}
	require.NoError(t, d.ctx.Free(p))
	for range 2 {
		require.NoError(t, d.Close())
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
		require.ErrorIs(t, err, errNotOpened, name)
	}
	require.Zero(t, d.Context(), "it has a context")
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
	require.ErrorIs(t, errOf(Open(withDriver(none))), ErrNoDevice)
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
		require.Equal(t, c.noDevice, errors.Is(err, ErrNoDevice), c.err)
		require.ErrorContains(t, err, c.say, c.err)
	}
}

// TestOpenHere opens what this machine has: a GPU, or the reason why there is none.
func TestOpenHere(t *testing.T) {
	d, err := Open()
	if err == nil {
		t.Log(d)
		require.NoError(t, d.Close())
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
		require.NoError(t, err)
		testInterop(t, owner, adopted, fakeOption)
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
	want := own.open(t, owner, opts...)
	defer want.Close()
	h := host{t, owner.ctx}
	stream, err := h.ctx.NewStream()
	for err == nil && stream <= 2 { // the fake driver counts from 1
		stream, err = h.ctx.NewStream()
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
			require.NoError(t, got.Bind(other.x, h.place(values), 4*len(values)))
		}
		before := adopted.ctx.Stats()
		require.NoError(t, got.RunAll())
		require.NoError(t, h.ctx.SyncStream(stream))
		sent := adopted.ctx.Stats().Sub(before).ToDevice.Bytes
		before = owner.ctx.Stats()
		require.NoError(t, want.RunAll())
		require.Equal(t, owner.ctx.Stats().Sub(before).ToDevice.Bytes-int64(4*len(values)), sent,
			run)
		for _, n := range []struct{ a, b *gorgonia.Node }{{own.loss, other.loss},
			{own.x.Deriv(), other.x.Deriv()},
			{own.weights.Deriv(), other.weights.Deriv()},
			{own.scales.Deriv(), other.scales.Deriv()}} {
			a, errA := want.Value(n.a)
			b, errB := got.Value(n.b)
			require.NoError(t, errors.Join(errA, errB))
			require.Equal(t, flat(t, b), flat(t, a), "run %d: %v differs", run, n.a)
			if n.b == other.x.Deriv() && !slices.Equal(h.read(dx, other.rows*other.dim),
				flat(t, a)) {
				t.Errorf("run %d: the gradient of x is not in the memory it was bound to", run)
			}
		}
	}
	require.NoError(t, errors.Join(got.Close(), adopted.Close()))
	if _, err := got.RunAll(), got.Bind(other.x, x, 4); err == nil ||
		!strings.Contains(err.Error(), "closed") {
		t.Errorf("Bind after Close: %v", err)
	}
	if _, _, err := got.Address(other.x); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("Address after Close: %v", err)
	}
	h.read(dx, 1) // the context, the stream and the memory live on
	require.NoError(t, h.ctx.SyncStream(stream))
	require.NoError(t, h.ctx.DestroyStream(stream))
}

func TestInteropRefusals(t *testing.T) {
	device, f, fakeOption := openFake(t, fake.Config{})
	require.ErrorIs(t, errOf(Open(withDriver(f), WithContext(99))), gpu.InvalidContext)
	k := newKasminaGraph(t, 1, nil)
	for _, s := range []uintptr{0, 1, 2} {
		require.ErrorContains(t, errOf(NewMachine(device, k.g, fakeOption, WithStream(s))),
			"default stream")
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
		require.ErrorContains(t, m.Bind(c.node, c.ptr, c.bytes), c.want, "%v, %v, %v", c.node,
			c.ptr, c.bytes)
		if is, _, _ := m.Address(k.x); is != was {
			t.Errorf("Bind(%v, %#x, %d) moved x", c.node, c.ptr, c.bytes)
		}
	}
	openMachine(t, device, k.g, fakeOption, WithParamsOf(m))
	require.ErrorContains(t, m.Bind(k.weights, p, 4*k.weights.Shape().TotalSize()), "WithParamsOf")
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
		require.NoError(t, o(&config))
	}
	ops, err := newSingleOps(device, config.kernels)
	require.NoError(t, err)
	r := &singleRunner{t: t, ops: ops, of: map[*gorgonia.Node]*singleOp{}}
	memory, err := device.ctx.Alloc(8 << 20)
	require.NoError(t, err)
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
	onEach(t, testLoneModel, exactly("fake", "float32"))
}

func testLoneModel(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	seed := randomSeed(t)
	_, a := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	m := openMachine(t, device, a.G, append(opts, WithOutputs(a.Loss))...)
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
			require.Less(t, distance(t, got, want), 1e-5, "%v, %v", step, p.Name())
		}
	}
}

// TestSingleKasmina runs a layer's op and its backward op alone. They go by one snapshot of the
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
	seed := randomSeed(t)
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
			require.Equal(t, flat(t, want), r.value(theirs[i].Deriv()),
				"step %d: the gradient of %s differs", step, n.Name())
		}
	}
	sameReports(t, "in the end", b.lattice.Report(), a.lattice.Report())
}

func TestSingleRefusals(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	k := newKasminaGraph(t, 1, nil)
	r := newSingleRunner(t, device, fakeOption)
	require.NoError(t, gorgonia.Let(k.g.ByName("targets")[0],
		tensor.New(tensor.WithBacking([]int{1, 7, 24, 0, 9, 5}))))
	require.ErrorContains(t, r.run(k.g), "is 24, want an id")
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
			require.ErrorContains(t, l.run(from, r.next), "forward pass has not run")
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
						logTo(&log))
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

// lifetime is all that is done with a machine for the training of a model.
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

// call is a public call that talks to the GPU.
type call struct {
	name string
	make func() error
}

// calls is all of them. SetOptimizer comes last: when it fails the machine has none.
func (l *lifetime) calls() []call {
	m := l.machine
	return []call{
		{"RunAll", m.RunAll},
		{"Value", func() error { _, err := m.Value(l.batch.Loss); return err }},
		{"Update", func() error { _, err := m.Update(); return err }},
		{"Upload", func() error { return m.Upload(l.batch.Params...) }},
		{"Download", m.Download},
		{"StartProfile", m.StartProfile},
		{"SetOptimizer", func() error { return m.SetOptimizer(l.optimizer, 1) }},
	}
}

// profile is the steps of a profile.
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

// TestEveryCallFails makes each call of CUDA fail, the first of its kind and some later ones, in
// the life of a machine, and wants an error that names it, nothing to be left behind, and the
// device to serve the next machine.
func TestEveryCallFails(t *testing.T) {
	seed := randomSeed(t)
	r := rand.New(rand.NewPCG(seed, 6))
	for _, call := range []string{"cuMemAlloc", "cuMemHostAlloc", "cuMemGetInfo", "cuStreamCreate",
		"cuEventCreate", "cuEventRecord",
		"cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
		"cuMemsetD8Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture", "cuStreamEndCapture",
		"cuGraphInstantiateWithFlags", "cuGraphLaunch",
		"cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"} {
		t.Run(call, func(t *testing.T) {
			var status error = gpu.OutOfMemory
			if strings.HasPrefix(call, "cublas") {
				status = gpu.BlasNotSupported
			}
			met := 0
			for nth := 1; nth < 5 || !testing.Short(); nth += 1 + r.IntN(2*nth) {
				device, cuda, fakeOption := openFake(t, fake.Config{})
				l, opts := newLifetime(t, newMuon),
					[]MachineOption{fakeOption, withCeilingBytes(1 << 12)}
				cuda.Fail(call, nth, status)
				err := l.open(device, opts...)
				for i := 0; i < 3 && err == nil; i++ {
					err = l.step()
				}
				if err == nil && strings.HasPrefix(call, "cuEvent") {
					err = l.profile()
				}
				if err == nil {
					// which may meet the call
					if err := l.machine.Close(); err != nil && !errors.Is(err, status) {
						t.Error(err)
					}
					break // there are no more of them
				}
				met++
				require.ErrorIs(t, err, status, nth)
				require.ErrorContains(t, err, call, nth)
				require.True(t, strings.HasPrefix(err.Error(), "cudaops."), nth)
				if l.machine != nil {
					require.NoError(t, l.machine.Close(), nth)
				}
				require.Empty(t, device.ctx.Context.(*fake.Context).Leaks(), nth)
				if nth > 1 { // the device is as it was
					continue
				}
				again := newLifetime(t, newAdamW)
				if err := errors.Join(again.open(device, fakeOption), again.step(),
					again.machine.Close()); err != nil {
					t.Errorf("the next machine: %v", err)
				}
			}
			require.NotZero(t, met, "the machine never makes this call")
		})
	}
}

// TestRetry makes calls of CUDA fail in a machine's runs, and wants the same machine to compute
// what it should when it is asked again.
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
		t.Fatal("it goes on failing")
		return 0
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	plain := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(plain.open(device, fakeOption), plain.machine.RunAll()))
	want := value(t, plain)
	for _, call := range []string{"cuMemHostAlloc", "cuEventCreate", "cuEventRecord",
		"cuEventSynchronize", "cuModuleGetFunction",
		"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD32Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture",
		"cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cublasLtMatmul"} {
		for _, nth := range []int{1, 2 + r.IntN(8)} {
			device, cuda, fakeOption := openFake(t, fake.Config{})
			l := newLifetime(t, newAdamW)
			require.NoError(t, l.open(device, fakeOption, WithMonitor(2)))
			cuda.Fail(call, nth, gpu.OutOfMemory)
			for run := range 5 {
				err := l.machine.RunAll()
				for try := 0; err != nil && try < 3; try++ {
					require.ErrorIs(t, err, gpu.OutOfMemory, "%s, call %d: %v", call, nth, err)
					if enqueues := call == "cuLaunchKernel" || call == "cublasLtMatmul"; enqueues &&
						run == 0 && l.machine.runner.Now().Loaded {
						t.Fatalf("%s, call %d: what a capture needs counts as loaded", call, nth)
					}
					err = l.machine.RunAll()
				}
				require.NoError(t, err, "%s, call %d: %v", call, nth, err)
				require.Equal(t, want, value(t, l), "%v, %v, %v", call, nth, run)
			}
			// which may meet the call
			if err := l.machine.Close(); err != nil && !errors.Is(err, gpu.OutOfMemory) {
				t.Errorf("%s, call %d: Close: %v", call, nth, err)
			}
		}
	}
	require.NoError(t, plain.machine.Close())
}

// TestOutOfMemory wants an error that says what asked for how much and what is free, and a device
// that still works.
func TestOutOfMemory(t *testing.T) {
	wants := func(t *testing.T, err error, say ...string) {
		t.Helper()
		for _, s := range say {
			require.ErrorIs(t, err, gpu.OutOfMemory)
			require.ErrorContains(t, err, s)
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t,
			fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9,
				Memory: 33 << 20, SMs: 1}}})
		wants(t, squareOf(device, 4096, fakeOption), "128.00 MiB", "33.00 MiB are free")
		// A machine that fits, with an optimiser that does not.
		l := newLifetime(t, newAdamW)
		require.NoError(t, l.open(device, fakeOption))
		defer l.machine.Close()
		free, _, err := device.Memory()
		require.NoError(t, err)
		hog, err := device.ctx.Alloc(int(free))
		require.NoError(t, err)
		bigger := newLifetime(t, newMuon)
		err = l.machine.SetOptimizer(bigger.optimizer, 1)
		wants(t, err, "SetOptimizer: allocating", "for Muon's directions",
			"asked for", "of 33.00 MiB free")
		require.ErrorContains(t, errOf(l.machine.Update()), "no optimiser")
		require.NoError(t,
			errors.Join(device.ctx.Free(hog), l.machine.SetOptimizer(l.optimizer, 1), l.step()))
	})
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		before := device.ctx.Stats()
		wants(t, squareOf(device, 1<<20), "the graph needs 8.00 TiB of device memory", "are free")
		_, total, err := device.Memory()
		require.NoError(t, err)
		_, err = device.ctx.Alloc(int(total))
		wants(t, err, gpu.Size(total)+" asked for", "free")
		if held := device.ctx.Stats().Sub(before); held.DeviceBytes != 0 || held.HostBytes != 0 {
			t.Errorf("%d bytes of device memory and %d of host memory are left behind",
				held.DeviceBytes, held.HostBytes)
		}
		l := newLifetime(t, newAdamW)
		require.NoError(t, errors.Join(l.open(device), l.step(), l.machine.Close()))
	})
}

// squareOf opens a machine for the square of a matrix n by n.
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

// TestLibrariesMissing wants an error that says where was searched. A graph without products needs
// no cuBLASLt.
func TestLibrariesMissing(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{NoBlas: true})
	l := newLifetime(t, newAdamW)
	err := l.open(device, fakeOption)
	var missing *gpu.NotFoundError
	require.True(t, errors.As(err, &missing))
	require.ErrorContains(t, err, missing.Error())
	require.Empty(t, device.ctx.Context.(*fake.Context).Leaks())
	require.NoError(t, squareOf(device, 8, fakeOption))
	t.Run("libcuda", func(t *testing.T) {
		runChild(t, "libcuda", "KASMINA_LIBCUDA="+t.TempDir())
	})
	t.Run("libcublasLt", func(t *testing.T) {
		openGPU(t)
		runChild(t, "libcublasLt", "KASMINA_LIBCUBLASLT="+t.TempDir())
	})
}

// TestLostContext wants clear errors from every call once the GPU's context is lost, and Close to
// come to an end.
func TestLostContext(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, cuda, fakeOption := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		require.NoError(t, errors.Join(l.open(device, fakeOption), l.step(), l.step()))
		cuda.Fail("cuGraphLaunch", 1, gpu.LaunchFailed)
		l.checkLost(t, device, gpu.LaunchFailed, fakeOption)
	})
	t.Run("closed", func(t *testing.T) { // the device before the machine, against the rules
		device, _, fakeOption := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		require.NoError(t, errors.Join(l.open(device, fakeOption), l.step()))
		require.ErrorContains(t, device.Close(), "still alive")
		l.checkLost(t, device, gpu.ContextIsDestroyed, fakeOption)
	})
	for _, fault := range []string{"trap", "poke"} {
		t.Run(fault, func(t *testing.T) {
			openGPU(t)
			runChild(t, fault)
		})
	}
}

// checkLost makes every call on a machine whose context is lost, or is by the first of them.
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
	check("RunAll", errors.Join(l.machine.RunAll(), device.ctx.Synchronize()))
	for _, c := range l.calls() {
		check(c.name, c.make())
	}
	_, err := NewMachine(device, l.batch.G, opts...)
	check("NewMachine", err)
	check("Close", l.machine.Close())
	require.NoError(t, l.machine.Close())
	for _, c := range l.calls() {
		require.ErrorContains(t, c.make(), "closed", c.name)
	}
}

// faults is kernels that lose the context.
const faults = `.version 7.0
.target sm_80
.address_size 64
.visible .entry trap() { trap; ret; }
.visible .entry poke() { .reg .b64 %at; .reg .b32 %v; mov.u64 %at, 64; mov.u32 %v, 1; st.global.u32 [%at], %v; ret; }
`

// child is the variable that tells this test binary what to do as a child of itself: what it does
// cannot be undone.
const child = "KASMINA_TEST_CHILD"

func runChild(t *testing.T, task string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(append(os.Environ(), child+"="+task), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(out), "--- PASS: TestChild")
	t.Logf("%s", out)
}

func TestChild(t *testing.T) {
	task := os.Getenv(child)
	switch task {
	case "":
		return // this is no child
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
