package kasmina

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

func TestKasmina(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][4]int{ // rows, seeds, chunk, slots
		{67, 44, 4, 45}, {300, 88, 4, 7}, {129, 44, 1, 45}, {64, 44, 2, 9}, {31, 44, 3, 20},
		{7, 50, 5, 51}, {33, 44, 16, 45},
		{5, 44, 8, 12}, {3, 44, 1000, 45}, {1, 1, 1, 2}, {900, 2, 37, 3},
		{65, 1, 4096, 2}, {2, 3000, 4, 2000},
		{40, 5, 128, 6}, {37, 3, 512, 4}, {513, 2, 32, 3},
		// a chunk's threads are not a power of two
		{77, 12, 24, 5}, {61, 5, 40, 6}, {35, 16, 48, 17}, {130, 44, 56, 4}, {19, 2, 384, 3},
	}

	if testing.Short() {
		shapes = [][4]int{{67, 44, 4, 45}, {33, 44, 16, 20}, {9, 44, 3, 45}, {1327, 5, 48, 6}}
	} else {
		shapes = append(shapes, [4]int{1327, 5, 48, 6}, [4]int{2611, 3, 24, 4},
			[4]int{2, 100_000, 1, 65536}, [4]int{1, 100_000, 4, 3})
	}

	for i, s := range shapes {
		for j, dt := range kerneltest.StorageTypes {
			for _, stability := range []seed.Stability{seed.Fast, seed.Strict, seed.Adaptive} {
				n := i + j + int(stability)
				c := kasminaCase{rows: s[0], seeds: s[1], chunk: s[2], slots: s[3],
					dtype: dt, stability: stability,
					reduction: seed.Reduction((n + i) % 3), clip: n%2 == 0, telemetry: n%5 != 4,
					skew: n % 7 / 6, deviation: 1}
				g.Scope(c.String(), func(g *kerneltest.Rig) { newKasmina(g, c, nil).check() })
			}
		}
	}
}

// TestKasminaFewSeeds checks layers with many rows and few columns, where sums come from many
// lanes.
func TestKasminaFewSeeds(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][3]int{ // seeds, chunk, from
		{2, 48, 13}, {4, 24, 25}, {1, 12, 36}, {1, 256, 14}, {3, 4, 24}, {5, 7, 35}, {2, 384, 25},
		// warps with few needs: no x, no x but clipping, no relu, and nothing
		{4, 4, 2}, {4, 4, 2}, {4, 4, 13}, {2, 48, 2}, {2, 4, 0},
	}
	for i, s := range shapes {
		c := kasminaCase{rows: 32768, seeds: s[0], chunk: s[1], from: s[2], slots: 5,
			dtype: kerneltest.StorageTypes[(i+1)%3], stability: seed.Adaptive,
			clip: i%2 == 0, telemetry: true, deviation: 1}
		if testing.Short() {
			c.rows = 4099
		}
		g.Scope(c.String(), func(g *kerneltest.Rig) { newKasmina(g, c, nil).check() })
	}
}

// TestKasminaGrid checks how random layers are divided, and that the workspace is large enough. It
// needs no GPU.
func TestKasminaGrid(t *testing.T) {
	device := gpu.DeviceInfo{SMs: 132}
	for range kerneltest.Few(2000, 500) {
		l := Layer{Rows: 1 << rand.IntN(16), Chunk: 1 + rand.IntN(70),
			Type:  kerneltest.StorageTypes[rand.IntN(3)],
			State: State{Seeds: 1 + rand.IntN(100), Slots: 1}}
		if rand.IntN(3) > 0 {
			l.Chunk = 4 * (1 + rand.IntN(100))
		}
		use := usage{backward: rand.IntN(2) == 0, telemetry: rand.IntN(2) == 0,
			clip: rand.IntN(2) == 0}
		aligned := rand.IntN(2) == 0
		use.inPlace = use.backward && aligned && l.InPlace() && rand.IntN(2) == 0
		g := newGrid(device, l, aligned, use).divideRows(l, 1+rand.IntN(maxBlocks*device.SMs))
		space := Forward{Layer: l}.WorkspaceBytes(device)
		if use.backward {
			space = Backward{Layer: l, Clip: use.clip}.WorkspaceBytes(device)
		}
		var c kernel.Carve
		g.scratch(l, &c)
		require.LessOrEqual(t, int(c.At), space, "%v, %v", l, g)
		if g.across*g.down != blockThreads || g.shared() > 48<<10 {
			t.Fatalf("%+v %+v: %d bytes of shared memory", l, g, g.shared())
		}
		if use.inPlace && g.sharing == 0 {
			t.Fatalf("%+v %+v: a chunk's threads belong to several warps", l, g)
		}
		g.checkColumns(t, l)
	}
}

// checkColumns checks that each column, in each of the rows that a block processes at once, belongs
// to exactly one thread. It divides columns like Lane in kasmina_feed.cuh. It also checks that the
// threads of a chunk belong to one warp if they compute its norm.
func (g grid) checkColumns(t *testing.T, l Layer) {
	t.Helper()
	d := l.State.Seeds * l.Chunk
	times := make([]int, kernel.CeilDiv(d, g.perThread))
	begun := make([]int, g.down) // the warp where the row's current chunk starts
	for i := range g.tiles * blockThreads {
		tile, thread := i/blockThreads, i%blockThreads
		x, y := thread%g.across, thread/g.across
		at := tile*g.across + x
		wide := min(g.across, 32)
		column, idle := at/wide*g.used+at%wide, at%wide >= g.used
		if column *= g.perThread; idle || column >= d {
			continue
		}
		if column%l.Chunk == 0 {
			begun[y] = thread / 32
		}
		if times[column/g.perThread]++; g.use.joined() && g.sharing > 0 &&
			thread/32 != begun[y] {
			t.Fatalf("%+v %+v: thread %d of tile %d has column %d, whose chunk begins in warp %d",
				l, g, thread, tile, column, begun[y])
		}
	}

	for i, n := range times {
		if n != g.down {
			t.Fatalf("%+v %+v: column %d has %d threads, want %d", l, g, i*g.perThread, n, g.down)
		}
	}
}

// TestKasminaLateBlocks checks layers with more rows than the blocks in flight take in turn.
func TestKasminaLateBlocks(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, s := range [][3]int{{1411, 300, 4}, {1533, 80, 16}, {1330, 50, 3}} {
		for j, c := range []kasminaCase{{telemetry: true, clip: true}, {}}[:kerneltest.Few(2, 1)] {
			c.rows, c.seeds, c.chunk, c.slots, c.deviation = s[0], s[1], s[2], 50, 1
			c.dtype, c.stability = kerneltest.StorageTypes[(i+j)%3], seed.Adaptive
			g.Scope(c.String(), func(g *kerneltest.Rig) {
				small := kernel.New(g.Ctx) // a GPU with a single multiprocessor has few blocks in flight
				small.Info.SMs = 1
				defer func() { g.Must(small.Close()) }()
				g.Set = small
				r := newKasmina(g, c, nil)
				grid := newGrid(g.Info, r.layer, true,
					usage{telemetry: c.telemetry}).divideRows(r.layer, maxBlocks)
				require.NotZero(t, grid.late)
				r.check()
			})
		}
	}
}

// TestKasminaForeignKinds gives every other seed that blends or learns a kind that other kernels
// evaluate, and checks that these seeds are measured and clipped but otherwise left alone.
func TestKasminaForeignKinds(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, chunk := range []int{4, 16, 3, 4096} {
		for _, stability := range []seed.Stability{seed.Fast, seed.Strict, seed.Adaptive} {
			c := kasminaCase{rows: 45, seeds: 44, chunk: chunk, slots: 20,
				dtype: kerneltest.StorageTypes[i%3], stability: stability,
				clip: i%2 == 0, telemetry: true, deviation: 1}
			g.Scope(c.String(), func(g *kerneltest.Rig) {
				r := newKasmina(g, c, nil)
				words := readWords(g, &kerneltest.Buffer{Ptr: r.layer.State.Ptr, N: c.seeds,
					Dtype: kerneltest.F32})
				for s := range r.states {
					if words[s] != 0 && s%2 == 0 {
						words[s] = words[s]&^0xff | uint32(kinds+
							g.Rand.IntN(256-kinds))
						r.states[s].Slot = noSlot
					}
				}
				g.Must(g.Ctx.CopyToDevice(r.layer.State.Ptr, gpu.Bytes(words), g.Stream))
				r.check()
			})
		}
	}
}

// TestKasminaIllConditioned checks the figures of data that differ only in their last digits.
func TestKasminaIllConditioned(t *testing.T) {
	g := kerneltest.NewRig(t)
	for reduction := range seed.Max + 1 {
		for _, chunk := range []int{4, 16, 3} {
			c := kasminaCase{rows: 1111, seeds: 44, chunk: chunk, slots: 45, dtype: kerneltest.F32,
				stability: seed.Fast, reduction: reduction,
				telemetry: true, mean: 1e4, deviation: 1e-2}
			g.Scope(c.String(), func(g *kerneltest.Rig) {
				newKasmina(g, c, nil).checkFiguresAlone()
			})
		}
	}
}

// TestKasminaPivots checks the figures of data that make it hard to find a pivot. Either one of the
// elements that some lanes read first, in the last rows, is an outlier that accounts for most of
// the variance. Or these elements are not finite, and are followed by data that differ only in
// their last digits.
func TestKasminaPivots(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, dt := range kerneltest.StorageTypes {
		for _, chunk := range []int{4, 16, 3} {
			for place := range 3 {
				c := kasminaCase{rows: 516, seeds: 44, chunk: chunk, slots: 45, dtype: dt,
					stability: seed.Fast, telemetry: true, deviation: 1}
				// `first` starts a lane, with batches of two rows and of four
				columns, first := c.seeds*chunk, c.rows-4
				g.Scope(fmt.Sprintf("%v outlier %d", c, place), func(g *kerneltest.Rig) {
					newKasmina(g, c, func(i int, v float64) float64 {
						row, column := i/columns-first, i%chunk
						if chunk == 3 && row == place && column == place || chunk > 3 &&
							row == 0 && column == place {
							return 1000 + v
						}
						return v
					}).checkFiguresAlone()
				})
				if c.mean, c.deviation = 1e4, 1e-2; dt != kerneltest.F32 {
					c.mean, c.deviation = 100, 1
				}
				g.Scope(fmt.Sprintf("%v not finite %d", c, place), func(g *kerneltest.Rig) {
					newKasmina(g, c, func(i int, v float64) float64 {
						if row := i/columns - first; 0 <= row && row <= place {
							return []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[place]
						}
						return v
					}).checkFiguresAlone()
				})
			}
		}
	}
}

// TestKasminaExtremes checks NaN, Inf and very large numbers. NaN and Inf are counted and excluded
// from the figures, large numbers are scaled down for evaluation, and elements that don't blend
// keep their bits.
func TestKasminaExtremes(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, dt := range kerneltest.StorageTypes {
		// rows, seeds, chunk
		for _, s := range [][3]int{{130, 44, 4}, {130, 44, 16}, {130, 44, 5}, {1301, 10, 24}} {
			c := kasminaCase{rows: s[0], seeds: s[1], chunk: s[2], slots: 45, dtype: dt,
				stability: seed.Adaptive, telemetry: true,
				from: g.Rand.IntN(44), deviation: 1}
			large := map[gpu.DType]float64{kerneltest.F32: 1e15, kerneltest.Bf16: 1e15,
				kerneltest.F16: 4e3}[dt]
			g.Scope(fmt.Sprintf("large %v", c), func(g *kerneltest.Rig) {
				newKasmina(g, c, func(i int, v float64) float64 {
					if i%29 == 0 {
						return large * v / 4
					}
					return v
				}).check()
			})
			g.Scope(fmt.Sprintf("not finite %v", c), func(g *kerneltest.Rig) {
				r := newKasmina(g, c, func(i int, v float64) float64 {
					switch i % 71 {
					case 0:
						return math.NaN()
					case 13:
						return math.Inf(1)
					case 40:
						return math.Inf(-1)
					}
					return v
				})
				r.refer()
				r.launchForward()
				r.launchBackward()
				r.checkFigures(1e-6)
				r.checkCounts(1)
				r.checkNonFinite()
				r.checkInPlace(1)
			})
		}
	}
}

// checkNonFinite checks that elements that don't blend keep their bits, and that results are not
// finite where they should not be.
func (r *kasminaRun) checkNonFinite() {
	r.Helper()
	y, dx := r.Read(r.y), r.Read(r.dx)
	for i := range y {
		s := r.states[i/r.chunk%r.seeds]
		if bits := math.Float64bits; s.Slot == noSlot || !s.Blend {
			if bits(y[i]) != bits(r.xr[i]) && y[i] == y[i] ||
				bits(dx[i]) != bits(r.gr[i]) && dx[i] == dx[i] {
				r.Fatalf("element %d: y %v of %v, dx %v of %v, where nothing blends", i, y[i],
					r.xr[i], dx[i], r.gr[i])
			}
		} else if finite(y[i]) && !finite(r.wantY[i]) && s.Kind != blueprints.ConvFilter &&
			!finite(r.xr[i]) ||
			finite(r.wantY[i]) && !finite(y[i]) {
			r.Fatalf("element %d: y is %v of %v, want %v (%+v)", i, y[i], r.xr[i], r.wantY[i], s)
		}
	}
}

func finite(v float64) bool { return v-v == 0 }

// TestKasminaState checks the encoding of seeds. It needs no GPU.
func TestKasminaState(t *testing.T) {
	st := State{Seeds: 5, Slots: 4}
	raw := make([]byte, st.Bytes())
	seeds := []seed.Seed{
		{Kind: 1, Slot: 3, Learn: true, Alpha: 1}, {Kind: 9, Slot: 0, Blend: true},
		{Kind: 2, Slot: 1, Learn: true, Blend: true},
		{Kind: 3, Slot: 3, Learn: true}, {Kind: 9, Slot: 2},
	}
	encode := func() error { return st.Encode(raw, func(i int) seed.Seed { return seeds[i] }) }
	for range 2 { // the second time over existing contents
		require.NoError(t, encode())
	}

	words := gpu.View[uint32](raw)
	require.Equal(t, []uint32{1 | 2<<8 | 3<<16, 0, 2 | 3<<8 | 1<<16, 3 | 2<<8 | 3<<16, 0},
		words[:5])
	require.Equal(t, []uint32{0, 0, 1, 1, 3, 2, 0, 3}, words[25:33])
	seeds[4].Blend = true
	var kind *KindError
	require.ErrorAs(t, encode(), &kind)
	seeds[4] = seed.Seed{Slot: 4, Blend: true}
	require.ErrorContains(t, encode(), "seed 4 has slot 4")
}

// TestKasminaLaunches launches passes of every kind on the fake driver, which checks the arguments.
func TestKasminaLaunches(t *testing.T) {
	k, _, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for i, chunk := range []int{4, 16, 3, 4096} {
		for _, stability := range []seed.Stability{seed.Fast, seed.Strict} {
			for reduction := range seed.Max + 1 {
				l := Layer{X: p, Weights: p, Scales: p, State: State{Ptr: p, Seeds: 5, Slots: 3},
					Rows: 90, Chunk: chunk, Eps: 1e-8, Stability: stability,
					Type: kerneltest.StorageTypes[i%3]}
				f := Forward{Layer: l, Y: p, Telemetry: i%2 == 0, Reduction: reduction, Figures: p,
					Bad: p, Histogram: p, Workspace: p}
				b := Backward{Layer: l, DX: p, DWeights: p, DScales: p, G: p.Offset(256),
					Clip: i%2 == 0, Telemetry: i > 1, Reduction: reduction, Figures: p, Bad: p,
					Clipped: p, Workspace: p}
				l.State.Wide, l.Width = true, 9*chunk
				wide, wideBack := f, b
				wide.Layer, wideBack.Layer = l, l
				for _, launch := range []kernel.Launch{f, b, wide, wideBack} {
					require.NoError(t, k.Launch(0, launch), "%+v", launch)
				}
			}
		}
	}
}
