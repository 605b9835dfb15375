package stream

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// chain is a chain of layers on a GPU, with batches for a stream and for launches.
type chain struct {
	*kerneltest.Rig
	*Kernel
	layers []kasmina.Layer
	depth  int
	x, y   []byte // pinned batches of the stream
	own    gpu.Stream

	between [2]gpu.Ptr
	figures []gpu.Ptr
	bad     []gpu.Ptr
	work    []gpu.Ptr
}

type chainCase struct {
	rows  int
	seeds []int // of each layer
	dim   int
	depth int
	dtype gpu.DType
}

func (c chainCase) String() string {
	return fmt.Sprintf("%dx%d %v depth=%d %v", c.rows, c.dim, c.seeds, c.depth, c.dtype)
}

func newChain(g *kerneltest.Rig, c chainCase, idle time.Duration) *chain {
	g.Helper()
	r := &chain{Rig: g, depth: c.depth}
	n := c.rows * c.dim
	for range 2 {
		r.between[0], r.between[1] = r.between[1], g.Alloc(n, c.dtype, 0).Ptr
	}

	for _, seeds := range c.seeds {
		chunk, slots := c.dim/seeds, seeds/2+2
		w, _ := g.Normal(slots*chunk, kerneltest.F32, 0)
		s, _ := g.Normal(slots, kerneltest.F32, 0)
		l := kasmina.Layer{Weights: w.Ptr, Scales: s.Ptr, Rows: c.rows, Chunk: chunk, Width: chunk,
			State: kasmina.State{Seeds: seeds, Slots: slots}, Eps: 1e-8, Stability: seed.Adaptive,
			Type: c.dtype}
		l.State.Ptr = g.Alloc(l.State.Bytes()/4, kerneltest.F32, 0).Ptr
		r.layers = append(r.layers, l)
		r.figures = append(r.figures, g.Alloc(kasmina.ForwardFigures*seeds, kerneltest.F32, 0).Ptr)
		r.bad = append(r.bad, g.Alloc(seeds, kerneltest.F32, 0).Ptr)
		r.work = append(r.work, g.Alloc(kasmina.Forward{Layer: l}.WorkspaceBytes(g.Info)/4,
			kerneltest.F32, 0).Ptr)
	}

	var err error
	r.own, err = g.Ctx.NewStream(false)
	g.Must(err)
	r.setStates()

	batch := kasmina.Stream{Layers: r.layers}.BatchBytes()
	r.x, err = g.Ctx.AllocHost(batch * c.depth)
	g.Must(err)
	r.y, err = g.Ctx.AllocHost(batch * c.depth)
	g.Must(err)
	x, err := g.Ctx.PinnedAddress(r.x)
	g.Must(err)
	y, err := g.Ctx.PinnedAddress(r.y)
	g.Must(err)
	r.Kernel, err = New(g.Ctx, g.Set, r.own, Config{Layers: r.layers, Depth: c.depth, Idle: idle, X: x,
		Y: y})
	g.Must(err)
	return r
}

// setStates gives all seeds random states. The kernel must be stopped.
func (r *chain) setStates() {
	r.Helper()
	for _, l := range r.layers {
		raw := make([]byte, l.State.Bytes())
		r.Must(l.State.Encode(raw, func(int) seed.Seed {
			return seed.Seed{Kind: blueprints.Kind(r.Rand.IntN(4)),
				Slot: uint16(r.Rand.IntN(l.State.Slots)), Blend: r.Rand.IntN(3) > 0,
				Alpha: r.Rand.Float32()}
		}))
		r.Must(r.Ctx.CopyToDevice(l.State.Ptr, raw, r.own))
	}
	r.Must(r.Ctx.SyncStream(r.own))
}

func (r *chain) close() {
	r.Helper()
	r.Must(r.Kernel.Close())
	r.Must(r.Ctx.FreeHost(r.x))
	r.Must(r.Ctx.FreeHost(r.y))
	r.Must(r.Ctx.DestroyStream(r.own))
}

// place returns the bytes of a batch in x or y.
func (r *chain) place(of []byte, batch uint64) []byte {
	l, step := r.layers[0], len(of)/r.depth
	return of[int(batch%uint64(r.depth))*step:][:l.Rows*l.State.Seeds*l.Chunk*l.Type.Size()]
}

// draw writes random elements to the next batch, including extreme ones if extreme is set.
func (r *chain) draw(extreme bool) {
	l := r.layers[0]
	v := make([]float64, l.Rows*l.State.Seeds*l.Chunk)
	for i := range v {
		v[i] = r.Rand.NormFloat64()
		switch {
		case !extreme || r.Rand.IntN(500) > 0:
		case r.Rand.IntN(2) == 0:
			v[i] = math.NaN()
		default:
			v[i] = 3e4
		}
	}
	copy(r.place(r.x, r.Next()), kerneltest.Encode(v, l.Type))
	for i := range r.place(r.y, r.Next()) {
		r.place(r.y, r.Next())[i] = 0xff
	}
}

// check compares a batch that is done with launches: output, figures and counts, bit for bit.
func (r *chain) check(batch uint64, watched bool) {
	r.Helper()
	x := r.between[0]
	r.Must(r.Ctx.CopyToDevice(x, r.place(r.x, batch), r.Rig.Stream))
	for i, l := range r.layers {
		seeds := l.State.Seeds
		l.X = x
		x = r.between[(i+1)%2]
		r.Must(r.Ctx.Memset8(r.bad[i], 0, 4*seeds, r.Rig.Stream))
		r.Must(r.Launch(r.Rig.Stream, kasmina.Forward{Layer: l, Y: x, Telemetry: watched,
			Figures: r.figures[i], Bad: r.bad[i], Workspace: r.work[i]}))

		bad, figures := make([]uint32, seeds), make([]float32, kasmina.ForwardFigures*seeds)
		r.Must(r.Ctx.CopyToHost(gpu.Bytes(bad), r.bad[i], r.Rig.Stream))
		counts := r.Counts(batch, i)
		if counts == nil {
			counts = make([]uint32, seeds)
		}
		require.Equal(r, bad, counts, "batch %d, layer %d: NaN and Inf", batch, i)
		if !watched {
			continue
		}
		r.Must(r.Ctx.CopyToHost(gpu.Bytes(figures), r.figures[i], r.Rig.Stream))
		require.Equal(r, gpu.View[uint32](gpu.Bytes(figures)),
			gpu.View[uint32](gpu.Bytes(r.Figures(batch, i))), "batch %d, layer %d: figures", batch, i)
	}

	y := make([]byte, len(r.place(r.y, batch)))
	r.Must(r.Ctx.CopyToHost(y, x, r.Rig.Stream))
	got := r.place(r.y, batch)
	for i := range y {
		if y[i] != got[i] {
			r.Fatalf("batch %d: byte %d of y is %#x, want %#x", batch, i, got[i], y[i])
		}
	}
}

// run computes batches, in groups of random size that are in flight together, and compares them.
func (r *chain) run(batches int) {
	r.Helper()
	for end := r.Next() + uint64(batches); r.Next() < end; {
		var watched []bool
		first := r.Next()
		for range 1 + r.Rand.IntN(r.depth) {
			r.draw(r.Rand.IntN(4) == 0)
			watched = append(watched, r.Rand.IntN(2) == 0)
			_, err := r.Submit(watched[len(watched)-1])
			r.Must(err)
		}
		for i := range watched {
			batch := first + uint64(i)
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			r.Must(r.Wait(ctx, batch))
			cancel()
		}
		// Launches need room, so the kernel must end before they run on a small GPU.
		r.Must(r.Stop(context.Background()))
		for i, w := range watched {
			r.check(first+uint64(i), w)
		}
	}
}

var chainCases = []chainCase{
	{64, []int{1000}, 4000, 16, kerneltest.Bf16},
	{64, []int{1000, 1000, 1000, 1000}, 4000, 16, kerneltest.Bf16},
	{7, []int{36, 36}, 144, 3, kerneltest.F32},
	{13, []int{16, 16, 16}, 64, 5, kerneltest.F16},
	{33, []int{4, 8, 16}, 384, 4, kerneltest.Bf16}, // chunks of whole accesses
	{13, []int{11, 33, 11}, 99, 5, kerneltest.F32}, // chunks of any size
	{1, []int{5, 5}, 35, 2, kerneltest.F16},        // a single row
	{300, []int{10, 10}, 40, 1, kerneltest.F32},    // many rows
	{16, []int{1, 2}, 2048, 4, kerneltest.F32},     // with kernels for the softmax
	{64, []int{100, 100, 100, 100, 100, 100, 100, 100}, 400, 8, kerneltest.Bf16},
}

// TestBits compares streams with launches, bit for bit, while the states of all seeds change.
func TestBits(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, c := range chainCases {
		g.Scope(c.String(), func(g *kerneltest.Rig) {
			r := newChain(g, c, 50*time.Millisecond)
			defer r.close()
			for range kerneltest.Few(3, 2) {
				r.run(kerneltest.Few(40, 4))
				r.setStates()
			}
		})
	}
}

// TestIdle checks that the kernel ends by itself when no batch arrives, and that the next batch launches
// it again.
func TestIdle(t *testing.T) {
	g := kerneltest.NewRig(t)
	const idle = 5 * time.Millisecond
	r := newChain(g, chainCases[3], idle)
	defer r.close()
	for round := range 3 {
		r.draw(false)
		batch, err := r.Submit(true)
		r.Must(err)
		r.Must(r.Wait(context.Background(), batch))
		require.Equal(t, round+1, r.Launches())

		start := time.Now()
		for done := false; !done; {
			if done, err = r.Ctx.EventDone(r.ended); err != nil || time.Since(start) > 20*time.Second {
				t.Fatalf("the kernel still runs after %v: %v", time.Since(start), err)
			}
		}
		r.check(batch, true)
	}
}

// TestManyInFlight keeps the ring full, so that the blocks of a team work on different batches.
func TestManyInFlight(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, layers := range [][]int{{1000}, {1000, 1000}, {100, 250}} {
		c := chainCase{64, layers, 4000, 64, kerneltest.Bf16}
		g.Scope(c.String(), func(g *kerneltest.Rig) {
			r := newChain(g, c, 50*time.Millisecond)
			defer r.close()
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			depth := uint64(c.depth)
			watched := func(batch uint64) bool { return batch/500%2 == 1 && batch%7 == 0 }
			for n := range uint64(kerneltest.Few(5000, 300)) {
				if n >= depth {
					r.Must(r.Wait(ctx, n-depth))
				} else {
					r.draw(false)
				}
				_, err := r.Submit(watched(n))
				r.Must(err)
			}
			r.Must(r.Stop(ctx))
			for batch := r.Next() - depth; batch < r.Next(); batch++ {
				r.check(batch, watched(batch))
			}
			require.Equal(r, 1, r.Launches())
		})
	}
}
