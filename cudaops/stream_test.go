package cudaops

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// streamLayer is a layer of 12 seeds over 5 rows, half of whose seeds blend.
func streamLayer(t *testing.T, opts ...op.KasminaOption) (layer, x, weights *gorgonia.Node) {
	t.Helper()
	const rows, seeds, chunk = 5, 12, 4
	lattice, err := state.NewLattice(seeds, seeds*chunk, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	for i := range seeds / 2 {
		r := state.GerminationRequest{Slot: i + 1, Kind: blueprints.Kind(i % 4)}
		if err := lattice.RequestGermination(i, r); err != nil {
			t.Fatal(err)
		}
		for _, to := range []state.Stage{state.Training, state.Grafting} {
			if err := lattice.Transition(i, to); err != nil {
				t.Fatal(err)
			}
		}
		if err := lattice.SetAlpha(i, 0.6); err != nil {
			t.Fatal(err)
		}
	}
	seed := rand.Uint64()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("random seed %d", seed)
		}
	})
	r := rand.New(rand.NewPCG(seed, 0))
	random := func(n int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(r.NormFloat64())
		}
		return v
	}
	g := gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(random(rows*columns)))))
	}
	x, weights = matrix("x", rows, seeds*chunk), matrix("weights", seeds+1, chunk)
	scales := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(seeds+1), gorgonia.WithName("scales"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(seeds+1), tensor.WithBacking(random(seeds+1)))))
	if layer, err = op.Kasmina(x, weights, scales, lattice, opts...); err != nil {
		t.Fatal(err)
	}
	return layer, x, weights
}

// queueKernel stands for the kernel that stays: it computes 3x for all batches that wait, and ends as if it had been idle.
func queueKernel(l *fake.Launch) {
	const layer, ring, elements = 88, 80, 5 * 48
	l.Struct(layer, 8)
	r := l.Struct(ring, 8)
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(r[8*i:]) }
	host := func(at uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&at)) }
	depth := uint64(binary.LittleEndian.Uint32(r[64:]))
	control := (*[10]uint64)(host(word(0)))
	entries := unsafe.Slice((*[2]uint64)(host(word(1))), depth)
	done := unsafe.Slice((*uint64)(host(word(2))), depth)
	head := atomic.LoadUint64(&control[0])
	for k := word(6); k < head; k++ {
		x := unsafe.Slice((*float32)(host(entries[k%depth][0])), elements)
		y := unsafe.Slice((*float32)(host(entries[k%depth][1])), elements)
		for i, v := range x {
			y[i] = 3 * v
		}
		atomic.StoreUint64(&done[k%depth], k+1)
	}
	control[8] = head
	atomic.StoreUint64(&control[9], 2)
}

func TestStreamQueue(t *testing.T) {
	d := fake.New(fake.Config{AnyKernel: true, Kernels: map[string]fake.Kernel{"kasmina_stream_quad_f32": queueKernel}})
	device, err := Open(withDriver(d))
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	layer, _, _ := streamLayer(t)
	s, err := OpenStream(device, layer, StreamConfig{Depth: 3, Idle: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if s.Way() != "persistent" {
		t.Errorf("the way of a small layer is %s", s.Way())
	}
	x, y := make([]float32, 5*48), make([]float32, 5*48)
	for k := range uint64(20) {
		for i := range x {
			x[i] = float32(k) + float32(i)
		}
		var last uint64
		for range 1 + k%3 { // so many on their way at once
			if last, err = s.Submit(x); err != nil {
				t.Fatal(err)
			}
		}
		if k%3 == 2 {
			if _, err := s.Submit(x); err == nil || !strings.Contains(err.Error(), "has not been waited for") {
				t.Errorf("a fourth batch in a stream of depth 3: %v", err)
			}
		}
		for b := last - k%3; b <= last; b++ {
			if err := s.Wait(b, y); err != nil {
				t.Fatal(err)
			}
			for i := range y {
				if y[i] != 3*x[i] {
					t.Fatalf("batch %d, element %d: %v, want %v", b, i, y[i], 3*x[i])
				}
			}
		}
		if err := s.Wait(last, y); err == nil {
			t.Error("a batch can be waited for twice")
		}
		if k == 9 {
			if err := s.Refresh(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := s.Submit(x[1:]); err == nil || !strings.Contains(err.Error(), "want 240") {
		t.Errorf("a short batch: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.Submit(x); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("after Close: %v", err)
	}
	if leaks := device.ctx.Context.(*fake.Context).Leaks(); len(leaks) > 0 {
		t.Errorf("left: %v", leaks)
	}
}

// TestStreamLost wants a context that is lost while a batch is on its way to be an error, not a wait without end.
func TestStreamLost(t *testing.T) {
	d := fake.New(fake.Config{AnyKernel: true, Kernels: map[string]fake.Kernel{
		"kasmina_stream_quad_f32": func(l *fake.Launch) { l.Fault(gpu.IllegalAddress, "a test") }}})
	device, err := Open(withDriver(d))
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	layer, _, _ := streamLayer(t)
	s, err := OpenStream(device, layer, StreamConfig{})
	if err != nil {
		t.Fatal(err)
	}
	x := make([]float32, 5*48)
	k, err := s.Submit(x)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(k, x); !errors.Is(err, gpu.IllegalAddress) {
		t.Errorf("Wait: %v", err)
	}
	if err := s.Close(); !errors.Is(err, gpu.IllegalAddress) {
		t.Errorf("Close: %v", err)
	}
}

// TestStreamRefreshFails wants a refresh that is refused to change nothing, and one that fails on the device to leave a stream that
// says so, in both ways, and that a later refresh mends.
func TestStreamRefreshFails(t *testing.T) {
	for _, way := range []string{persistentWay, launchesWay} {
		d := fake.New(fake.Config{AnyKernel: true, Kernels: map[string]fake.Kernel{"kasmina_stream_quad_f32": queueKernel}})
		device, err := Open(withDriver(d))
		if err != nil {
			t.Fatal(err)
		}
		layer, _, _ := streamLayer(t)
		lattice := layer.Op().(*op.KasminaOp).Lattice
		s, err := OpenStream(device, layer, StreamConfig{Way: way, Idle: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		x := make([]float32, 5*48)
		batch := func() error {
			k, err := s.Submit(x)
			if err == nil {
				err = s.Wait(k, x)
			}
			return err
		}
		if err := errors.Join(lattice.RequestGermination(7, state.GerminationRequest{Slot: 8, Kind: blueprints.LowRank}),
			lattice.Transition(7, state.Training), lattice.Transition(7, state.Grafting)); err != nil {
			t.Fatal(err)
		}
		if err := s.Refresh(); err == nil || err.Error() != "cudaops.Stream.Refresh: seed 7 has a blueprint with capacity, which has no stream" {
			t.Errorf("%s: a blueprint with capacity: %v", way, err)
		}
		if err := batch(); err != nil {
			t.Errorf("%s: after a refresh that was refused: %v", way, err)
		}
		if err := lattice.Transition(7, state.RolledBack); err != nil {
			t.Fatal(err)
		}
		for _, call := range []string{"cuMemcpyHtoDAsync", "cuStreamSynchronize"} { // the second where it ends the kernel
			d.Fail(call, 1, gpu.OutOfMemory)
			if err := s.Refresh(); !errors.Is(err, gpu.OutOfMemory) {
				t.Errorf("%s: %s fails: %v", way, call, err)
			}
			if err := batch(); err == nil || !strings.Contains(err.Error(), "cudaops.Stream.Submit: the last refresh failed") {
				t.Errorf("%s: after a refresh of which %s failed: %v", way, call, err)
			}
			if err := errors.Join(s.Refresh(), batch()); err != nil {
				t.Errorf("%s: after a refresh that was made: %v", way, err)
			}
		}
		if err := errors.Join(s.Close(), device.Close()); err != nil {
			t.Errorf("%s: %v", way, err)
		}
	}
}

// TestStreamSubmitFails wants batches behind one that could not be handed over to be computed, each by its own number.
func TestStreamSubmitFails(t *testing.T) {
	d := fake.New(fake.Config{AnyKernel: true, Kernels: map[string]fake.Kernel{"kasmina_stream_quad_f32": queueKernel}})
	device, err := Open(withDriver(d))
	if err != nil {
		t.Fatal(err)
	}
	layer, _, _ := streamLayer(t)
	s, err := OpenStream(device, layer, StreamConfig{Depth: 3, Idle: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	x, y := make([]float32, 5*48), make([]float32, 5*48)
	d.Fail("cuLaunchKernel", 1, gpu.OutOfMemory)
	if _, err := s.Submit(x); !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("a launch that fails: %v", err)
	}
	for k := range uint64(14) {
		if k == 7 {
			for running := true; running; time.Sleep(time.Millisecond) { // until it is idle
				if running, err = s.kernel.Running(); err != nil {
					t.Fatal(err)
				}
			}
			d.Fail("cuStreamSynchronize", 1, gpu.OutOfMemory)
			if _, err := s.Submit(x); !errors.Is(err, gpu.OutOfMemory) {
				t.Errorf("a kernel that ended and cannot be waited for: %v", err)
			}
		}
		x[0] = float32(k)
		batch, err := s.Submit(x)
		if err == nil {
			err = s.Wait(batch, y)
		}
		if err != nil || batch != k || y[0] != 3*x[0] {
			t.Fatalf("batch %d: got number %d and %v, %v", k, batch, y[0], err)
		}
	}
	if err := errors.Join(s.Close(), device.Close()); err != nil {
		t.Error(err)
	}
}

func TestStreamRefused(t *testing.T) {
	device, d, _ := openFake(t, fake.Config{AnyKernel: true})
	layer, x, _ := streamLayer(t)
	strict, _, _ := streamLayer(t, op.WithStability(op.Strict))
	for _, call := range []string{"cuMemAlloc", "cuMemHostAlloc", "cuMemcpyHtoDAsync"} {
		d.Fail(call, 1, gpu.OutOfMemory)
		if s, err := OpenStream(device, layer, StreamConfig{}); !errors.Is(err, gpu.OutOfMemory) || s != nil {
			t.Errorf("%s fails: got %v, %v", call, s, err)
		}
	}
	for name, c := range map[string]struct {
		d     *Device
		layer *gorgonia.Node
		c     StreamConfig
		want  string
	}{
		"device": {nil, layer, StreamConfig{}, "nil"},
		"layer":  {device, x, StreamConfig{}, "no Kasmina layer"},
		"depth":  {device, layer, StreamConfig{Depth: -1}, "above 0"},
		"way":    {device, layer, StreamConfig{Way: "fast"}, "persistent"},
		"strict": {device, strict, StreamConfig{}, "strict"},
	} {
		if _, err := OpenStream(c.d, c.layer, c.c); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one about %q", name, err, c.want)
		}
	}
}

// TestStreamComputes wants both ways to compute what the CPU does, and changed weights to count after Refresh.
func TestStreamComputes(t *testing.T) {
	device := openGPU(t)
	for _, way := range []string{"persistent", "launches"} {
		layer, x, weights := streamLayer(t)
		s, err := OpenStream(device, layer, StreamConfig{Way: way})
		if err != nil {
			t.Fatal(err)
		}
		in, got := x.Value().Data().([]float32), make([]float32, x.Shape().TotalSize())
		for round := range 2 {
			vm := gorgonia.NewTapeMachine(x.Graph())
			if err := errors.Join(vm.RunAll(), vm.Close()); err != nil {
				t.Fatal(err)
			}
			k, err := s.Submit(in)
			if err == nil {
				err = s.Wait(k, got)
			}
			if err != nil {
				t.Fatal(err)
			}
			var diff, norm float64
			for i, want := range layer.Value().Data().([]float32) {
				diff, norm = diff+math.Pow(float64(got[i]-want), 2), norm+float64(want)*float64(want)
			}
			if !(math.Sqrt(diff/norm) < 1e-6) {
				t.Errorf("%s, round %d: differs by %.2g from the CPU", way, round, math.Sqrt(diff/norm))
			}
			w := weights.Value().Data().([]float32)
			for i := range w {
				w[i] = -w[i] / 2
			}
			if err := s.Refresh(); err != nil {
				t.Fatal(err)
			}
		}
		in[7] = float32(math.NaN())
		k, err := s.Submit(in)
		if err == nil {
			err = s.Wait(k, got)
		}
		if err != nil || got[7] == got[7] {
			t.Errorf("%s: NaN became %v, %v", way, got[7], err)
		}
		if err := s.Close(); !errors.Is(err, op.ErrNonFinite) || !strings.Contains(fmt.Sprint(err), "1 elements") {
			t.Errorf("%s: Close: %v, want one NaN", way, err)
		}
	}
}
