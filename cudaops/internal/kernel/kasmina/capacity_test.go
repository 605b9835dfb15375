package kasmina

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// spread scales the weights so that normally distributed inputs give results of about the same
// size.
func (r *kasminaRun) spread() {
	for i := range r.weights {
		r.weights[i] = float64(float32(r.weights[i] / math.Sqrt(float64(r.chunk))))
	}
	raw := make([]float32, len(r.weights))
	for i, v := range r.weights {
		raw[i] = float32(v)
	}
	r.Must(r.Ctx.CopyToDevice(r.layer.Weights, gpu.Bytes(raw), r.Stream))
}

// TestKasminaCapacity checks lattices of all stages and kinds, with slots that have room for some
// hidden features and some unused weights. Some of the chunks and hidden features fill whole tiles and
// others do not, and the weights of some shapes are too large for shared memory.
func TestKasminaCapacity(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][5]int{ // rows, seeds, chunk, slots, width
		{67, 66, 4, 67, 8}, {300, 66, 16, 7, 200}, {129, 66, 1, 20, 2}, {64, 66, 3, 9, 29},
		{1, 66, 5, 67, 35}, {1000, 12, 64, 13, 2048},
		{33, 66, 128, 20, 8192}, {40, 33, 37, 34, 37*14 + 5}, {9, 22, 1000, 23, 4000},
		{5, 66, 130, 67, 2 * 130 * 40}, {600, 2, 8, 3, 9},
		{2, 3000, 4, 2000, 24}, {257, 1, 32, 2, 2 * 32 * 32},
	}

	if testing.Short() {
		shapes = shapes[:4]
	}

	for i, s := range shapes {
		for j, dt := range kerneltest.StorageTypes {
			for _, stability := range []seed.Stability{seed.Fast, seed.Strict, seed.Adaptive} {
				n := i + j + int(stability)
				c := kasminaCase{rows: s[0], seeds: s[1], chunk: s[2], slots: s[3], width: s[4],
					dtype: dt, stability: stability,
					reduction: seed.Reduction((n + i) % 3), clip: n%2 == 0, telemetry: n%5 != 4,
					skew: n % 7 / 6, deviation: 1}
				g.Scope(c.String(), func(g *kerneltest.Rig) {
					r := newKasmina(g, c, nil)
					r.spread()
					r.check()
				})
			}
		}
	}
}

// TestKasminaCapacityExtremes checks very large numbers, which the adaptive mode scales down for
// evaluation where it can, and weights of NaN, which must not affect anything at α = 0.
func TestKasminaCapacityExtremes(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, dt := range []gpu.DType{kerneltest.F32, kerneltest.Bf16} {
		for _, chunk := range []int{4, 16, 5} {
			c := kasminaCase{rows: 130, seeds: 66, chunk: chunk, slots: 67, width: 6 * chunk,
				dtype: dt, stability: seed.Adaptive, telemetry: true,
				deviation: 1}
			g.Scope(fmt.Sprintf("large %v", c), func(g *kerneltest.Rig) {
				r := newKasmina(g, c, func(i int, v float64) float64 {
					if i%29 == 0 {
						return 1e15 * v
					}
					return v
				})
				r.spread()
				r.check()
			})
			g.Scope(fmt.Sprintf("NaN %v", c), func(g *kerneltest.Rig) {
				r := newKasmina(g, c, nil)
				spoiled := make([]float32, c.slots*c.width)
				for i := range spoiled {
					spoiled[i] = float32(math.NaN())
				}
				g.Must(g.Ctx.CopyToDevice(r.layer.Weights, gpu.Bytes(spoiled), g.Stream))
				r.refer()
				r.launchForward()
				r.launchBackward()
				y, dx := r.Read(r.y), r.Read(r.dx)
				for i := range y {
					s := r.states[i/chunk%c.seeds]
					mixes := Mixes(s) && s.Blend && s.Alpha != 0
					if Mixes(s) && (math.IsNaN(y[i]) != mixes || math.IsNaN(dx[i]) != mixes) {
						g.Fatalf("element %d of seed %+v: y is %v and dx %v", i, s, y[i], dx[i])
					}
				}
			})
		}
	}
}

// TestKasminaMixing checks how Encode lists seeds that mix features. It needs no GPU.
func TestKasminaMixing(t *testing.T) {
	const mlp, rank = blueprints.ChunkMLP, blueprints.LowRank
	seeds := []seed.Seed{
		{Kind: 1, Slot: 3, Learn: true, Alpha: 1}, {Kind: mlp, Slot: 3, Blend: true, Learn: true,
			Alpha: 0.5}, {Kind: rank, Slot: 2},
		{Kind: rank, Blend: true, Alpha: 1}, {Kind: rank, Slot: 1, Learn: true, Alpha: 1},
		{Kind: mlp, Slot: 3, Blend: true, Learn: true},
		{Kind: mlp, Slot: 3, Learn: true, Alpha: 1},
	}

	st := State{Seeds: len(seeds), Slots: 4, Wide: true}
	raw := make([]byte, st.Bytes())
	for range 2 { // the second time over existing contents
		require.NoError(t, st.Encode(raw, func(i int) seed.Seed { return seeds[i] }))
	}

	words := gpu.View[uint32](raw)
	require.Equal(t, []uint32{1 | 2<<8 | 3<<16, 0, 0, 0, 0, 0, 0}, words[:7],
		"seeds that mix features are dormant")
	words = gpu.View[uint32](raw[st.List():])
	require.Equal(t, []uint32{4, 1, 4, 5, 6, 0, 0, 0}, words[:8])
	if want := []uint32{5 | 3<<8 | 3<<16, 4 | 2<<8 | 1<<16, 5 | 1<<8 | 3<<16,
		5 | 2<<8 | 3<<16}; !slices.Equal(words[8:12], want) {
		t.Errorf("words are %x, want %x", words[8:12], want)
	}

	require.Equal(t, []uint32{0, 0, 1, 1, 3, 1, 0, 3, 0, 0, 0, 0}, words[15:])
	seeds[1].Slot = 4
	require.Error(t, st.Encode(raw, func(i int) seed.Seed { return seeds[i] }))
}
