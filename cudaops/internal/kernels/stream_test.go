package kernels

import (
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// streamRig is a stream with batches to compute, all different, and what a launch makes of each.
type streamRig struct {
	*rig
	*KasminaStream
	x, y   []gpu.Ptr
	want   [][]float64
	n      int
	stream gpu.Stream // of the kernel that stays; the rig's is for everything else
}

func newStreamRig(t *testing.T, rows, seeds, chunk, batches int, dt gpu.DType, c KasminaStreamConfig) *streamRig {
	t.Helper()
	g := newRig(t)
	run := g.newKasmina(kasminaCase{rows: rows, seeds: seeds, chunk: chunk, slots: seeds + 1, deviation: 1, stability: KasminaAdaptive, dtype: dt}, nil)
	s := &streamRig{rig: g, n: rows * seeds * chunk}
	for range batches {
		x, _ := g.normal(s.n, dt, 0)
		y := g.alloc(s.n, dt, 0)
		g.must(g.KasminaForward(g.stream, KasminaForward{KasminaLayer: withX(run.layer, x.Ptr), Y: y.Ptr, Bad: run.counts.Ptr, Workspace: run.forwardSpace.Ptr}))
		s.want = append(s.want, g.read(y))
		g.must(g.ctx.Memset8(y.Ptr, 0xff, y.bytes(), g.stream))
		s.x, s.y = append(s.x, x.Ptr), append(s.y, y.Ptr)
	}
	g.must(g.ctx.SyncStream(g.stream))
	var err error
	s.stream, err = g.ctx.NewStream()
	g.must(err)
	s.KasminaStream, err = g.NewKasminaStream(s.stream, run.layer, c)
	g.must(err)
	t.Cleanup(func() {
		_, err := s.KasminaStream.Close()
		g.must(errors.Join(err, g.ctx.DestroyStream(s.stream)))
	})
	return s
}

func withX(l KasminaLayer, x gpu.Ptr) KasminaLayer {
	l.X = x
	return l
}

// check wants batch i to be as a launch made it.
func (s *streamRig) check(i int, dt gpu.DType) {
	s.Helper()
	got := s.read(&buffer{Ptr: s.y[i], n: s.n, dtype: dt})
	if d := distance(got, s.want[i]); !(d < 1e-6) {
		s.Errorf("batch %d differs by %.2g from that of a launch", i, d)
	}
}

func TestStream(t *testing.T) {
	for _, c := range []struct {
		rows, seeds, chunk, depth int
		dt                        gpu.DType
	}{
		{64, 1000, 4, 16, bf16}, {7, 36, 4, 3, f32}, {13, 11, 3, 5, f32}, {1, 5, 7, 2, f16}, {64, 1000, 4, 1, f16},
	} {
		t.Run(fmt.Sprintf("%dx%dx%d_%v", c.rows, c.seeds, c.chunk, c.dt), func(t *testing.T) {
			const batches, laps = 20, 5
			s := newStreamRig(t, c.rows, c.seeds, c.chunk, batches, c.dt, KasminaStreamConfig{Depth: c.depth, Idle: 50 * time.Millisecond, Blocks: 2})
			var last uint64
			for range laps {
				for i := range batches {
					k, err := s.Submit(s.x[i], s.y[i])
					s.must(err)
					last = k
				}
			}
			if last != batches*laps-1 {
				t.Errorf("the last batch is %d, want %d", last, batches*laps-1)
			}
			for k := range last + 1 {
				s.must(s.Wait(k))
			}
			for i := range batches {
				s.check(i, c.dt)
			}
		})
	}
}

// TestStreamEnds wants the kernel to end by itself when its feeder falls silent, and the next batch to start it again.
func TestStreamEnds(t *testing.T) {
	const idle = 20 * time.Millisecond
	s := newStreamRig(t, 64, 100, 4, 3, f32, KasminaStreamConfig{Depth: 4, Idle: idle, Blocks: 1})
	for round := range 3 {
		starts := s.Starts() + 1
		var before time.Time
		for i := range s.x {
			now := time.Now()
			k, err := s.Submit(s.x[i], s.y[i])
			s.must(err)
			s.must(s.Wait(k))
			// Silent, or off a GPU that others use too, for so long that the kernel may have ended.
			fell := i > 0 && time.Since(before) > idle/2
			before = now
			s.check(i, f32)
			n := s.Starts()
			if fell && n == starts+1 {
				starts = n
			}
			if n != starts {
				t.Errorf("round %d, batch %d: the kernel was started %d times, want %d", round, i, n, starts)
			}
		}
		deadline := time.Now().Add(20 * time.Second)
		for {
			running, err := s.Running()
			s.must(err)
			if !running {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("round %d: the kernel still runs 20 seconds after its last batch, want %v", round, idle)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// TestStreamPinned wants batches in pinned memory to be computed without a copy.
func TestStreamPinned(t *testing.T) {
	s := newStreamRig(t, 64, 1000, 4, 1, f32, KasminaStreamConfig{Depth: 4, Idle: 50 * time.Millisecond, Blocks: 2})
	host, err := s.ctx.AllocHost(8 * s.n)
	s.must(err)
	defer func() { s.must(s.ctx.FreeHost(host)) }()
	x, y := host[:4*s.n], host[4*s.n:]
	s.must(s.ctx.CopyToHost(x, s.x[0], s.rig.stream))
	s.must(s.ctx.SyncStream(s.rig.stream))
	at := func(b []byte) gpu.Ptr { return gpu.Ptr(uintptr(unsafe.Pointer(&b[0]))) }
	for range 50 {
		clear(y)
		k, err := s.Submit(at(x), at(y))
		s.must(err)
		s.must(s.Wait(k))
		got := make([]float64, s.n)
		for i, v := range gpu.View[float32](y) {
			got[i] = float64(v)
		}
		if d := distance(got, s.want[0]); !(d < 1e-6) {
			t.Fatalf("it differs by %.2g from what a launch makes", d)
		}
	}
}

// TestStreamRefused needs no GPU.
func TestStreamRefused(t *testing.T) {
	k, _ := fakeKernels(t)
	good := KasminaLayer{State: KasminaState{Seeds: 8, Slots: 2}, Rows: 4, Chunk: 4, Type: f32}
	config := KasminaStreamConfig{Depth: 2, Idle: time.Millisecond, Blocks: 1}
	for name, c := range map[string]struct {
		layer  KasminaLayer
		config KasminaStreamConfig
	}{
		"rows":   {KasminaLayer{State: good.State, Chunk: 4, Type: f32}, config},
		"strict": {KasminaLayer{State: good.State, Rows: 4, Chunk: 4, Type: f32, Stability: KasminaStrict}, config},
		"depth":  {good, KasminaStreamConfig{Idle: time.Millisecond, Blocks: 1}},
		"idle":   {good, KasminaStreamConfig{Depth: 1, Blocks: 1}},
		"blocks": {good, KasminaStreamConfig{Depth: 1, Idle: time.Millisecond}},
	} {
		if _, err := k.NewKasminaStream(0, c.layer, c.config); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
