package cudaops

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

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

// TestInterop runs a Kasmina layer on a context, a stream and memory that somebody else holds, several times, so that what
// was captured is replayed on it, and compares the bits with those of a machine of its own.
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
		t.Errorf("context %#x and stream %#x, want %#x and %#x", adopted.Context(), got.Stream(), owner.Context(), stream)
	}
	poison := slices.Repeat([]float32{float32(math.NaN())}, other.rows*other.dim)
	x, dx := h.place(poison), h.place(poison)
	weights := h.place(flat(t, other.weights.Value()))
	for n, p := range map[*gorgonia.Node]uintptr{other.x: x, other.x.Deriv(): dx, other.weights: weights} {
		if err := got.Bind(n, p, 4*n.Shape().TotalSize()); err != nil {
			t.Fatal(err)
		}
		if at, bytes, err := got.Address(n); err != nil || at != p || bytes != 4*n.Shape().TotalSize() {
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
			t.Errorf("run %d sent %d bytes, want %d, all but x", run, sent, all-int64(4*len(values)))
		}
		for _, n := range []struct{ a, b *gorgonia.Node }{{own.loss, other.loss}, {own.x.Deriv(), other.x.Deriv()},
			{own.weights.Deriv(), other.weights.Deriv()}, {own.scales.Deriv(), other.scales.Deriv()}} {
			a, errA := want.Value(n.a)
			b, errB := got.Value(n.b)
			if err := errors.Join(errA, errB); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(flat(t, a), flat(t, b)) {
				t.Errorf("run %d: %v differs", run, n.a)
			}
			if n.b == other.x.Deriv() && !slices.Equal(h.read(dx, other.rows*other.dim), flat(t, a)) {
				t.Errorf("run %d: the gradient of x is not in the memory it was bound to", run)
			}
		}
	}
	if err := errors.Join(got.Close(), adopted.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := got.RunAll(), got.Bind(other.x, x, 4); err == nil || !strings.Contains(err.Error(), "closed") {
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
		if _, err := NewMachine(device, k.g, fakeOption, WithStream(s)); err == nil || !strings.Contains(err.Error(), "default stream") {
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
		if err := m.Bind(c.node, c.ptr, c.bytes); err == nil || !strings.Contains(err.Error(), c.want) {
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
	if err := m.Bind(k.weights, p, 4*k.weights.Shape().TotalSize()); err == nil || !strings.Contains(err.Error(), "WithParamsOf") {
		t.Errorf("a shared parameter: %v", err)
	}
}
