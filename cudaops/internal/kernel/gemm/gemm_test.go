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
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

func newHopperRig(t *testing.T) *kerneltest.Rig {
	g := kerneltest.NewRig(t)
	if g.Ctx.Device().Capability() != 90 {
		t.Skip("needs a GPU of compute capability 9.0")
	}
	return g
}

// scaled uploads n numbers of the normal distribution divided by √d, so that sums of d products are
// like those.
func scaledNormal(g *kerneltest.Rig, n, d int, t gpu.DType) (*kerneltest.Buffer, []float64) {
	x := make([]float64, n)
	for i := range x {
		x[i] = g.Rand.NormFloat64() / math.Sqrt(float64(d))
	}
	return g.Upload(x, t, 0)
}

func TestSiLUProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range [][3]int{{1, 8, 8}, {129, 136, 72}, {64, 128, 768},
		{515, 264, 1000}, {2100, 2056, 200}} {
		rows, f, d := s[0], s[1], s[2]
		types := []gpu.DType{kerneltest.Bf16, kerneltest.F16}
		if rows > 1000 { // which makes blocks take several tiles
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
					g.Must(SiLUProduct{H: h.Ptr, AB: ab.Ptr, X: x.Ptr, Weights: w.Ptr, Rows: rows,
						F: f, D: d, Type: dt}.Launch(g.Set, g.Stream))
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
					AB: ab.Ptr, Rows: rows, F: f, D: d, Type: dt}
				run = func() []float64 {
					g.Must(back.Launch(g.Set, g.Stream))
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
				g.Must(back.Launch(g.Set, g.Stream))
				if !slices.Equal(bits[rows*f:], g.Read(g.Bufs[len(g.Bufs)-1])) {
					g.Error("gradients differ without h")
				}
				back.DAB = ab.Ptr // in place
				g.Must(back.Launch(g.Set, g.Stream))
				if !slices.Equal(bits[rows*f:], g.Read(ab)) {
					g.Error("gradients differ in place")
				}
			})
		}
	}
}

// halves are the left and the right half of the rows of [a | b].
func halves(ab []float64, rows, f int) (a, b []float64) {
	for r := range rows {
		a = append(a, ab[2*r*f:][:f]...)
		b = append(b, ab[2*r*f+f:][:f]...)
	}
	return a, b
}

// refuses wants a launch refused after each change.
func refuses[T interface {
	Launch(*kernel.Set, gpu.Stream) error
}](t *testing.T, k *kernel.Set, ok T, changes map[string]func(*T)) {
	t.Helper()
	for what, change := range changes {
		a := ok
		change(&a)
		require.Error(t, a.Launch(k, 0), "capability %d, %s", k.Info.Capability(), what)
	}
}

// launched is the launches of a trace by kernel. Each must fit a multiprocessor's shared memory,
// and its grid clusters of so many blocks at least.
func launched(t *testing.T, c *fake.Context, cluster int) map[string][]gpu.LaunchConfig {
	t.Helper()
	names := map[string][]gpu.LaunchConfig{}
	for _, op := range c.Trace() {
		if op.Name == "" {
			continue
		}
		names[op.Name] = append(names[op.Name], op.Config)
		if op.Config.Shared > 227<<10 || op.Config.Cluster.X < cluster ||
			cluster > 0 && op.Config.Grid.X%op.Config.Cluster.X != 0 {
			t.Errorf("launched with %v", op.Config)
		}
	}
	return names
}

func TestSiLUProductRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := kerneltest.FakeAttention(t, capability, 227<<10)
		ok := SiLUProduct{H: p, AB: p, X: p, Weights: p, Rows: 3, F: 8, D: 16,
			Type: kerneltest.Bf16}
		for what, change := range map[string]func(a *SiLUProduct){
			"rows":    func(a *SiLUProduct) { a.Rows = -1 },
			"f":       func(a *SiLUProduct) { a.F = 12 },
			"d":       func(a *SiLUProduct) { a.D = 20 },
			"type":    func(a *SiLUProduct) { a.Type = kerneltest.F32 },
			"aligned": func(a *SiLUProduct) { a.H += 2 },
			"input":   func(a *SiLUProduct) { a.X += 8 },
			"way":     func(a *SiLUProduct) { a.Way = kernel.Way{Family: "fused", Size: 5} },
		} {
			a := ok
			change(&a)
			back := SiLUProductBackward{H: a.H, DAB: p, G: a.X, Down: p, AB: p, Rows: a.Rows,
				F: a.F, D: a.D, Type: a.Type, Way: a.Way}
			require.Error(t, a.Launch(k, 0), "capability %d, %s: no error", capability, what)
			require.Error(t, back.Launch(k, 0), "capability %d, %s: no error", capability, what)
			if back.H = 0; what != "aligned" && back.Launch(k, 0) == nil {
				t.Errorf("capability %d, %s: no error without h", capability, what)
			}
		}
		if takes := len(gateWays(k, 3, 8, 16, kerneltest.Bf16)) > 0; takes !=
			(capability == 90) || (ok.Launch(k, 0) == nil) != takes {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		launched(t, c, 2)
	}
}

// TestFiguresMatchSources wants the launchers' figures to be those of the kernels' sources.
func TestFiguresMatchSources(t *testing.T) {
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
