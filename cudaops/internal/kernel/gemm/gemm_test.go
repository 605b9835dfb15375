package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// newHopperRig returns a rig for kernels that need the Hopper architecture, and skips the test on other GPUs.
func newHopperRig(t *testing.T) *kerneltest.Rig {
	g := kerneltest.NewRig(t)
	if g.Ctx.Device().Capability() != 90 {
		t.Skip("needs a GPU of compute capability 9.0")
	}
	return g
}

// scaledNormal uploads n normally distributed numbers divided by √d, so that sums of d products
// have the same size as their terms.
func scaledNormal(g *kerneltest.Rig, n, d int, t gpu.DType) (*kerneltest.Buffer, []float64) {
	x := make([]float64, n)
	for i := range x {
		x[i] = g.Rand.NormFloat64() / math.Sqrt(float64(d))
	}
	return g.Upload(x, t, 0)
}

// TestSiLUProduct compares the fused product and gate with float64 references, forward and backward, and checks that
// the results of the backward pass are bit-identical with h, without h and in place.
func TestSiLUProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range [][3]int{{1, 8, 8}, {129, 136, 72}, {64, 128, 768},
		{515, 264, 1000}, {2100, 2056, 200}} {
		rows, f, d := s[0], s[1], s[2]
		types := []gpu.DType{kerneltest.Bf16, kerneltest.F16}
		if rows > 1000 { // each block computes several tiles
			types = types[:1]
			if testing.Short() {
				continue
			}
		}
		for _, dt := range types {
			g.Scope(fmt.Sprintf("%dx%dx%d/%v", rows, f, d, dt), func(g *kerneltest.Rig) {
				x, xr := g.Normal(rows*d, dt, 0)
				w, wr := scaledNormal(g, 2*f*d, d, dt)
				h, ab := g.Alloc(rows*f, dt, 0), g.Alloc(2*rows*f, dt, 0)
				run := func() []float64 {
					g.Must(g.Launch(g.Stream, SiLUProduct{H: h.Ptr, AB: ab.Ptr, X: x.Ptr,
						Weights: w.Ptr, Gate: Gate{Rows: rows, F: f, D: d, Type: dt}}))
					return append(g.Read(h), g.Read(ab)...)
				}
				bits := run()
				want, wantH := make([]float64, 2*rows*f), make([]float64, rows*f)
				cpugemm.Mul(false, true, rows, 2*f, d, 1, xr, d, wr, d, 0, want, 2*f)
				a, b := halves(want, rows, f)
				layer.SiLUMul(wantH, a, b)
				g.Near("a, b", ab, want, kerneltest.Forward(dt))
				g.Near("h", h, wantH, kerneltest.Forward(dt))
				if !slices.Equal(bits, run()) {
					g.Error("results differ from run to run")
				}

				dy, dyr := g.Normal(rows*d, dt, 0)
				down, downr := scaledNormal(g, d*f, d, dt)
				dh, da, db := make([]float64, rows*f), make([]float64, rows*f),
					make([]float64, rows*f)
				cpugemm.Mul(false, false, rows, f, d, 1, dyr, d, downr, f, 0, dh, f)
				a, b = halves(g.Read(ab), rows, f)
				layer.SiLUMulBackward(wantH, da, db, dh, a, b)
				for r := range rows {
					copy(want[2*r*f:], da[r*f:][:f])
					copy(want[2*r*f+f:], db[r*f:][:f])
				}
				h2, dab := g.Alloc(rows*f, dt, 0), g.Alloc(2*rows*f, dt, 0)
				back := SiLUProductBackward{H: h2.Ptr, DAB: dab.Ptr, G: dy.Ptr, Down: down.Ptr,
					AB: ab.Ptr, Gate: Gate{Rows: rows, F: f, D: d, Type: dt}}
				run = func() []float64 {
					g.Must(g.Launch(g.Stream, back))
					return append(g.Read(h2), g.Read(dab)...)
				}
				wantBits := bits[:rows*f]
				bits = run()
				if !slices.Equal(bits[:rows*f], wantBits) {
					g.Error("h differs from that of the forward pass")
				}
				g.Near("da, db", dab, want, kerneltest.Backward(dt))
				if !slices.Equal(bits, run()) {
					g.Error("gradients differ from run to run")
				}
				back.H, back.DAB = 0, g.Alloc(2*rows*f, dt, 0).Ptr
				g.Must(g.Launch(g.Stream, back))
				if !slices.Equal(bits[rows*f:], g.Read(g.Bufs[len(g.Bufs)-1])) {
					g.Error("gradients differ without h")
				}
				back.DAB = ab.Ptr // in place
				g.Must(g.Launch(g.Stream, back))
				if !slices.Equal(bits[rows*f:], g.Read(ab)) {
					g.Error("gradients differ in place")
				}
			})
		}
	}
}

// halves returns the left and right halves of the rows of [a | b].
func halves(ab []float64, rows, f int) (a, b []float64) {
	for r := range rows {
		a = append(a, ab[2*r*f:][:f]...)
		b = append(b, ab[2*r*f+f:][:f]...)
	}
	return a, b
}

// TestLaunches checks that every kernel of the family is launched with the parameters it takes, in
// clusters of two, and within the shared memory of a multiprocessor.
func TestLaunches(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	turned := RoPEProduct{Y: p, X: p, Weights: p, Angles: p, Rows: 6, Columns: 384, D: 464,
		Turned: 192, Seq: 3, Type: kerneltest.Bf16}
	launches := []kernel.Launch{
		SiLUProduct{H: p, AB: p, X: p, Weights: p,
			Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.Bf16}},
		LinearCrossEntropy{Terms: p, Scaled: p, Factors: p, Losses: p, X: p, W: p,
			Targets: p, Scale: p, Workspace: p, Rows: 3, V: 16, D: 512, Type: kerneltest.Bf16},
		ScaleRows{X: p, Factors: p, Rows: 3, D: 16},
		NarrowProducts{V: p, DW: p, X: p, W: p, U: p, Workspace: p, Rows: 70, Columns: 520, Narrow: 16,
			Type: kerneltest.Bf16, DWType: kerneltest.F32},
		NarrowProducts{V: p, DW: p, X: p, W: p, U: p, Workspace: p, Scaled: p, Factors: p, Rows: 70,
			Columns: 520, Narrow: 48, Type: kerneltest.F16, DWType: kerneltest.Bf16},
		ScaledRows{Y: p, X: p, Factors: p, Rows: 6, Columns: 16, Type: kerneltest.F32},
		BlockDiagonal{Y: p, Blocks: [3]gpu.Ptr{p, p, 0}, Rows: [3]int{6, 8, 2}, Columns: [3]int{2, 3, 0},
			Size: 2, Back: true},
		ColumnProduct{Y: p, X: p, V: p, Workspace: p, Rows: 70, Columns: 520, Narrow: 72,
			Type: kerneltest.Bf16, YType: kerneltest.F32},
	}

	for i, maybe := range []gpu.Ptr{0, p} {
		term := Term{maybe, maybe, 16 * i}
		turned.Term = term
		launches = append(launches,
			RowProduct{Y: p, X: p, W: p, Rows: 70, Columns: 72, D: 136, TransW: i > 0, Scale: 2,
				Type: kerneltest.F16},
			ProductSum{Product: Product{Y: p, X: p, W: p, C: maybe, Type: kerneltest.Bf16,
				Rows: 6, Columns: 264, D: 72, TransW: i > 0}, Term: term},
			SiLUProduct{H: p, AB: p, X: p, Weights: p, Term: term,
				Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.F16}},
			StatisticsProduct{G: p, X: p, W: p, Y: p, Normalizers: p, Workspace: p, Type: kerneltest.F16,
				D: 72, Term: term, Geometry: attention.Geometry{Batch: 1, Seq: 128, Heads: 3, KVHeads: 3,
					HeadDim: 64}},
			SiLUProductBackward{H: maybe, DAB: p, G: p, Down: p, AB: p, Term: term,
				Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.F16}},
			Product{Y: p, X: p, W: p, C: maybe, ScaleX: p, ScaleW: p, Type: kerneltest.Bf16,
				Rows: 6, Columns: 256, D: 400, TransW: true, Float8: true},
			Product{Y: p, X: p, W: p, C: maybe, Type: kerneltest.Bf16,
				Rows: 6, Columns: 264, D: 72, TransW: true},
			Product{Y: p, X: p, W: p, C: maybe, Type: kerneltest.F16,
				Rows: 6, Columns: 264, D: 72},
			Symmetric{D: p, Left: p, Right: p, C: maybe, Alpha: 1, Type: kerneltest.F16,
				N: 264, Depth: 72, Batch: 2, Tall: i > 0})
		for _, turned.HeadDim = range []int{64, 96, 128} {
			if turned.Float8 = i > 0; turned.Float8 && turned.HeadDim == 96 {
				continue
			}
			turned.ScaleX, turned.ScaleWeights = maybe, maybe
			launches = append(launches, turned)
		}
	}

	for _, dim := range []int{64, 128} {
		for _, dtype := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			launches = append(launches, StatisticsProduct{G: p, X: p, W: p, Y: p, Normalizers: p,
				Workspace: p, Type: dtype, D: 72, Geometry: attention.Geometry{Batch: 1, Seq: 128,
					Heads: 3, KVHeads: 3, HeadDim: dim}})
		}
	}

	for _, l := range launches {
		require.NoError(t, k.Launch(0, l), "%+v", l)
	}

	count := 0
	for name, all := range launched(c) {
		for _, l := range all {
			count++
			require.LessOrEqual(t, l.Shared, 227<<10, name)
			if l.Cluster.X > 0 {
				require.Equal(t, 2, l.Cluster.X, name)
				require.Zero(t, l.Grid.X%2, name)
			}
		}
	}

	require.Equal(t, len(launches)+2+1+2*2, count, "the output layer's loss has three kernels, "+
		"the product of columns two, and both narrow products three")
	for _, dim := range []int{64, 128} {
		require.LessOrEqual(t, turnedTiles[dim].stages, float8MinDepth/(2*gemmDepth)+1)
	}
}

// launched returns the launches of a trace by kernel.
func launched(c *fake.Context) map[string][]gpu.LaunchConfig {
	names := map[string][]gpu.LaunchConfig{}
	for _, op := range c.Trace {
		if op.Name != "" {
			names[op.Name] = append(names[op.Name], op.Config)
		}
	}
	return names
}

// takes checks that the kernels accept the operation ok, on compute capability 9.0 only, and do not accept it after any of
// the changes.
func takes[T interface {
	Variants(*kernel.Set) []kernel.Variant
}](t *testing.T, ok T, changes ...func(*T)) {
	t.Helper()
	for _, capability := range []int{89, 90} {
		k, _, _ := kerneltest.FakeGPU(t, capability, 227<<10)
		require.Equal(t, capability == 90, len(ok.Variants(k)) == 1, "%T", ok)
		for i, change := range changes {
			a := ok
			change(&a)
			require.Empty(t, a.Variants(k), "%T, change %d", ok, i)
		}
	}
}

// TestVariants checks which shapes and types each operation of the family accepts.
func TestVariants(t *testing.T) {
	takes(t, SiLUProduct{Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.Bf16}},
		func(a *SiLUProduct) { a.F = 12 }, func(a *SiLUProduct) { a.D = 20 },
		func(a *SiLUProduct) { a.Type = kerneltest.F32 })
	takes(t, Product{Rows: 6, Columns: 264, D: 72, Type: kerneltest.F16},
		func(a *Product) { a.Columns = 260 }, func(a *Product) { a.D = 76 },
		func(a *Product) { a.Type = kerneltest.F32 })
	takes(t, ProductSum{Product: Product{Rows: 6, Columns: 264, D: 72, Type: kerneltest.F16},
		Term: Term{D: 16}}, func(a *ProductSum) { a.Columns = 260 }, func(a *ProductSum) { a.Term.D = 12 },
		func(a *ProductSum) { a.Float8 = true })
	takes(t, SiLUProduct{Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.Bf16}, Term: Term{D: 8}},
		func(a *SiLUProduct) { a.Term.D = 4 })
	takes(t, SiLUProductBackward{Gate: Gate{Rows: 3, F: 8, D: 16, Type: kerneltest.Bf16}, Term: Term{D: 8}},
		func(a *SiLUProductBackward) { a.Term.D = 4 })
	takes(t, RowProduct{Rows: 6, Columns: 48, D: 72, Type: kerneltest.F16},
		func(a *RowProduct) { a.Columns = 12 }, func(a *RowProduct) { a.D = 76 },
		func(a *RowProduct) { a.Columns = 264 }, func(a *RowProduct) { a.Type = kerneltest.F32 })
	takes(t, ColumnProduct{Rows: 6, Columns: 48, Narrow: 8, Type: kerneltest.F16, YType: kerneltest.F32},
		func(a *ColumnProduct) { a.Columns = 12 }, func(a *ColumnProduct) { a.Narrow = 12 },
		func(a *ColumnProduct) { a.YType = kerneltest.F16 }, func(a *ColumnProduct) { a.Type = kerneltest.F32 })
	takes(t, Product{Rows: 6, Columns: 256, D: 400, TransW: true, Float8: true,
		Type: kerneltest.Bf16}, func(a *Product) { a.TransW = false },
		func(a *Product) { a.Columns = 264 }, func(a *Product) { a.D = 408 },
		func(a *Product) { a.D = 384 }, func(a *Product) { a.Type = kerneltest.F16 })
	takes(t, LinearCrossEntropy{Rows: 3, V: 16, D: 512, Type: kerneltest.Bf16},
		func(a *LinearCrossEntropy) { a.V = 12 }, func(a *LinearCrossEntropy) { a.D = 516 },
		func(a *LinearCrossEntropy) { a.Type = kerneltest.F16 })
	takes(t, Symmetric{N: 264, Depth: 72, Batch: 2, Type: kerneltest.F16},
		func(a *Symmetric) { a.N = 260 }, func(a *Symmetric) { a.Depth = 20 },
		func(a *Symmetric) { a.Type = kerneltest.Bf16 })
	takes(t, RoPEProduct{Rows: 6, Columns: 288, D: 456, Turned: 192, Seq: 3, HeadDim: 96,
		Type: kerneltest.Bf16},
		func(a *RoPEProduct) { a.Columns = 260 }, func(a *RoPEProduct) { a.D = 500 },
		func(a *RoPEProduct) { a.HeadDim = 32 }, func(a *RoPEProduct) { a.Float8, a.D = true, 464 },
		func(a *RoPEProduct) { a.Type = kerneltest.F32 })
	takes(t, RoPEProduct{Rows: 6, Columns: 256, D: 464, Turned: 128, Seq: 3, HeadDim: 64,
		Float8: true, Type: kerneltest.Bf16},
		func(a *RoPEProduct) { a.D = 384 }, func(a *RoPEProduct) { a.Type = kerneltest.F16 })
	takes(t, StatisticsProduct{D: 264, Type: kerneltest.Bf16, Geometry: attention.Geometry{Batch: 3,
		Seq: 128, Heads: 3, KVHeads: 1, HeadDim: 64}},
		func(a *StatisticsProduct) { a.Seq = 192 }, func(a *StatisticsProduct) { a.HeadDim = 96 },
		func(a *StatisticsProduct) { a.Scale = -1 }, func(a *StatisticsProduct) { a.D = 268 },
		func(a *StatisticsProduct) { a.Type = kerneltest.F32 })
}

// TestConstantsMatchSources checks that the launchers' constants match the CUDA sources.
func TestConstantsMatchSources(t *testing.T) {
	for source, figures := range map[string][]string{
		"gemm_hopper.cuh": {fmt.Sprintf("kRows = %d, kDepth = %d, kWorkers = 2, kCluster = %d;",
			gemmRows, gemmDepth, gemmCluster), "kPanel = 16 * 128;"},
		"gemm_hopper.cu": {fmt.Sprintf("kColumns = %d, kStages = %d;", gateColumns, gateStages),
			"kWarpBytes = 2 * kPanel;", fmt.Sprintf("kParts = %d,", gateParts)},
		"gemm_hopper_loss.cu": {fmt.Sprintf("kColumns = %d, kStages = %d, kParts = %d,",
			lossColumns, lossStages, lossParts),
			fmt.Sprintf("kLossRows = %d;", lossRows), fmt.Sprintf("kLossWarps = %d;", lossWarps)},
		"gemm_hopper_plain.cu": {fmt.Sprintf("kColumns = %d, kStages = %d,",
			plainColumns, plainStages),
			"Memory<kColumns, kStages, 2 * kPanel>;"},
		"gemm_hopper_narrow.cu": {fmt.Sprintf("kSide = %d,", narrowSide),
			fmt.Sprintf("kRowsStages = %d, kColumnsStages = %d, kColumnsPanels = %d;", narrowRowsStages,
				narrowColumnsStages, narrowColumnsPanels),
			fmt.Sprintf("kBothStages = %d;", bothStages), fmt.Sprintf("kBothPanels = %d / N;", bothSums)},
		"gemm_hopper_stats.cu": {fmt.Sprintf("kColumns = %d, kStages = %d,",
			statsColumns, statsStages), "Memory<kColumns, kStages, 2 * kPanel>;"},
		"gemm_symmetric.cu": {fmt.Sprintf("kColumns = %d, kStages = %d;",
			symmetricColumns, symmetricStages)},
		"gemm_hopper_rope.cu": {fmt.Sprintf("Memory<Columns, Columns == 256 ? %d : %d,",
			turnedTiles[128].stages, turnedTiles[96].stages),
			fmt.Sprintf("kPanelRows = %d,", turnedRows),
			fmt.Sprintf("run<T, 64, %d>", turnedTiles[64].columns),
			fmt.Sprintf("run<T, 96, %d>", turnedTiles[96].columns),
			fmt.Sprintf("run<T, 128, %d>", turnedTiles[128].columns)},
	} {
		kerneltest.MatchSource(t, source, figures...)
	}
}
