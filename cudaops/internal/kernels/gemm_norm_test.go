package kernels

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// normWorkspace returns one for all sizes up to these.
func (g *rig) normWorkspace(rows, columns int) driver.Ptr {
	n := (ProductNormWorkspace(rows, columns) + 3) / 4
	b, _ := g.upload(make([]float64, n), f32, 0)
	return b.Ptr
}

// TestProductNorm compares with float64. All launches share a workspace, and some leave multiprocessors to others.
func TestProductNorm(t *testing.T) {
	g := newHopperRig(t)
	shared := g.normWorkspace(9000, 2700)
	for i, s := range [][3]int{{1, 8, 8}, {5, 264, 136}, {130, 1000, 264}, {257, 256, 768}, {300, 776, 1096}, {2100, 2600, 840}, {1030, 2048, 640},
		{5700, 768, 72}, {8440, 1000, 72}, {8443, 2048, 40}} {
		if testing.Short() && s[0]*s[1] > 4e5 {
			continue
		}
		for _, dtype := range []driver.DType{bf16, f16} {
			if s[0] > 5000 && (i%2 == 0) == (dtype == bf16) {
				continue
			}
			g.scope(fmt.Sprintf("%v/%v", s, dtype), func(g *rig) { testProductNorm(g, s[0], s[1], s[2], dtype, shared) })
		}
	}
}

func testProductNorm(g *rig, rows, columns, d int, dtype driver.DType, workspace driver.Ptr) {
	g.Helper()
	n := rows * columns
	x, xr := g.normal(rows*d, dtype, 0)
	w, wr := g.scaled(columns*d, d, dtype)
	c, sum := g.normal(n, dtype, 0)
	weight, weights := g.normal(columns, f32, 0)
	for i := range min(3, rows) { // rows of other sizes
		for j := range columns {
			sum[i*columns+j] *= []float64{1e3, 1e-3, 0}[i]
		}
		for j := range d {
			xr[i*d+j] *= []float64{1e3, 1e-3, 0}[i]
		}
	}
	raw, rawX := encode(sum, dtype), encode(xr, dtype)
	xr = decode(rawX, dtype)
	g.must(g.ctx.CopyToDevice(x.Ptr, rawX, g.stream))
	want := decode(raw, dtype)
	cpu.Gemm(false, true, rows, columns, d, 1, xr, d, wr, d, 1, want, columns)
	a := ProductNorm{X: x.Ptr, W: w.Ptr, G: weight.Ptr, Rows: rows, Columns: columns, D: d, Eps: 1e-5, Type: dtype, Workspace: workspace}
	defer g.Leave(0)
	for _, a.Way = range normWays {
		var bits [3][]float64
		for run := range 4 {
			g.Leave(run % 2 * LateMultiprocessors)
			g.must(g.ctx.CopyToDevice(c.Ptr, raw, g.stream))
			s, y, rstd := g.alloc(n, dtype, 0), g.alloc(n, dtype, 0), g.alloc(rows, f32, 0)
			if a.C = c.Ptr; run == 3 {
				s = c
			}
			a.Sum, a.Y, a.Rstd = s.Ptr, y.Ptr, rstd.Ptr
			g.must(g.ProductNorm(g.stream, a))
			got := [3][]float64{g.read(s), g.read(y), g.read(rstd)}
			if run == 0 {
				g.near(fmt.Sprint(a.Way, " sum"), s, want, forward(dtype))
				g.nearRows(fmt.Sprint(a.Way, " sum"), got[0], want, columns)
				wantY, wantR := make([]float64, n), make([]float64, rows)
				cpu.RMSNorm(wantY, wantR, got[0], weights, a.Eps)
				g.near(fmt.Sprint(a.Way, " y"), y, wantY, forward(dtype))
				for i, want := range wantR {
					if e := math.Abs(got[2][i]/want - 1); !(e <= 1e-6) {
						g.Fatalf("%v rstd of row %d: relative error %.3g", a.Way, i, e)
					}
				}
				bits = got
				continue
			}
			for i, what := range []string{"sum", "y", "rstd"} {
				if !slices.Equal(bits[i], got[i]) {
					g.Errorf("%v %s: results differ from run to run", a.Way, what)
				}
			}
		}
	}
}

// TestProductNormNotFinite wants what the product and the norm give one after the other.
func TestProductNormNotFinite(t *testing.T) {
	g := newHopperRig(t)
	const rows, columns, d = 300, 520, 200
	x, _ := g.normal(rows*d, bf16, 0)
	w, _ := g.scaled(columns*d, d, bf16)
	_, c := g.normal(rows*columns, bf16, 0)
	for row, v := range map[int]float64{3: math.NaN(), 17: math.Inf(1), 130: math.Inf(-1), 299: 3e38} {
		c[row*columns+g.rand.IntN(columns)] = v
	}
	added, _ := g.upload(c, bf16, 0)
	weight, _ := g.normal(columns, f32, 0)
	s, y, rstd := g.alloc(rows*columns, bf16, 0), g.alloc(rows*columns, bf16, 0), g.alloc(rows, f32, 0)
	g.must(g.Product(g.stream, Product{Y: s.Ptr, X: x.Ptr, W: w.Ptr, C: added.Ptr, Type: bf16,
		ProductShape: ProductShape{Rows: rows, Columns: columns, D: d, TransW: true}}))
	g.must(g.RMSNorm(g.stream, RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: s.Ptr, W: weight.Ptr, Rows: rows, D: columns, Eps: 1e-6, Type: bf16}))
	s2, y2, rstd2 := g.alloc(rows*columns, bf16, 0), g.alloc(rows*columns, bf16, 0), g.alloc(rows, f32, 0)
	g.must(g.ProductNorm(g.stream, ProductNorm{Y: y2.Ptr, Rstd: rstd2.Ptr, Sum: s2.Ptr, X: x.Ptr, W: w.Ptr, C: added.Ptr, G: weight.Ptr,
		Rows: rows, Columns: columns, D: d, Eps: 1e-6, Type: bf16, Workspace: g.normWorkspace(rows, columns)}))
	g.near("sum", s2, g.read(s), 0)
	g.near("y", y2, g.read(y), 1e-3)
	g.near("rstd", rstd2, g.read(rstd), 1e-6)
}

func TestProductNormRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := fakeAttention(t, capability, 227<<10)
		ok := ProductNorm{Y: p, Rstd: p, Sum: p, X: p, W: p, C: p, G: p, Workspace: p, Type: bf16, Rows: 600, Columns: 256, D: 264}
		for what, change := range map[string]func(a *ProductNorm){
			"rows":      func(a *ProductNorm) { a.Rows = -1 },
			"columns":   func(a *ProductNorm) { a.Columns = 252 },
			"clusters":  func(a *ProductNorm) { a.Columns = 264 }, // of which there is one
			"d":         func(a *ProductNorm) { a.D = 268 },
			"type":      func(a *ProductNorm) { a.Type = f32 },
			"result":    func(a *ProductNorm) { a.Y += 8 },
			"sum":       func(a *ProductNorm) { a.Sum += 2 },
			"rstd":      func(a *ProductNorm) { a.Rstd += 4 },
			"input":     func(a *ProductNorm) { a.X += 2 },
			"weights":   func(a *ProductNorm) { a.W += 8 },
			"added":     func(a *ProductNorm) { a.C += 4 },
			"none":      func(a *ProductNorm) { a.C = 0 },
			"norm":      func(a *ProductNorm) { a.G += 4 },
			"workspace": func(a *ProductNorm) { a.Workspace = 0 },
			"way":       func(a *ProductNorm) { a.Way = Way{"hopper", 64} },
		} {
			a := ok
			change(&a)
			if k.ProductNorm(0, a) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		c.ClearTrace()
		for _, ok.Type = range []driver.DType{bf16, f16} {
			if err := k.ProductNorm(0, ok); (err == nil) != (capability == 90) {
				t.Errorf("capability %d: %v", capability, err)
			}
		}
		names := map[string]bool{}
		for _, op := range c.Trace() {
			if op.Name == "" {
				continue
			}
			if names[op.Name] = true; op.Config.Shared > 227<<10 || op.Config.Cluster.X != 2 || op.Config.Grid.X%2 != 0 {
				t.Errorf("launched with %v", op.Config)
			}
		}
		if want := map[int]int{90: 2}[capability]; len(names) != want {
			t.Errorf("capability %d: launched %v, want %d kernels", capability, names, want)
		}
		if ok.Rows = 0; k.ProductNorm(0, ok) != nil {
			t.Error("no rows: an error")
		}
	}
}

// TestProductNormWays wants it offered where the tiles of a row can be worked on at once in no more turns than others, also on fewer
// multiprocessors.
func TestProductNormWays(t *testing.T) {
	for _, s := range []struct {
		sms, rows, columns int
		takes              bool
	}{{132, 16384, 2048, true}, {132, 16384, 1024, true}, {132, 32768, 768, false}, // 64 clusters take 6 turns, 63 take 7
		{132, 256 * 21, 768, true}, {132, 1, 8, true}, {132, 256, 256 * 64, true}, {132, 256, 256*64 + 8, false}, {80, 16384, 2048, false}, {10, 256, 1024, false}} {
		ctx, err := fake.New(fake.Config{AnyKernel: true, Devices: []driver.DeviceInfo{{Name: "Fake", Major: 9, Memory: 1 << 30, SMs: s.sms, L2: 40 << 20,
			ThreadsPerSM: 2048, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10}}}).Retain(0)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(New(ctx).ProductNormWays(s.rows, s.columns, 264, bf16)) == 1; got != s.takes {
			t.Errorf("%+v: %v", s, got)
		}
	}
}

// TestProductNormSpeed compares with the product and the norm one after the other, at the clock that the card's power allows.
func TestProductNormSpeed(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to run it")
	}
	g := newHopperRig(t)
	for _, s := range [][3]int{{32768, 768, 768}, {32768, 768, 2048}, {16384, 1024, 1024}, {16384, 1024, 2816}, {16384, 2048, 2048}, {16384, 2048, 5632}} {
		rows, columns, d := s[0], s[1], s[2]
		g.scope(fmt.Sprint(s), func(g *rig) {
			x, w, c := g.random(rows*d), g.random(columns*d), g.random(rows*columns)
			y, sum := g.random(rows*columns), g.random(rows*columns)
			weight, _ := g.normal(columns, f32, 0)
			rstd := g.alloc(rows, f32, 0)
			p := Product{Y: sum, X: x, W: w, C: c, Type: bf16, ProductShape: ProductShape{Rows: rows, Columns: columns, D: d, TransW: true}}
			n := RMSNorm{Y: y, Rstd: rstd.Ptr, X: sum, W: weight.Ptr, Rows: rows, D: columns, Eps: 1e-5, Type: bf16}
			a := ProductNorm{Y: y, Rstd: rstd.Ptr, Sum: sum, X: x, W: w, C: c, G: weight.Ptr, Rows: rows, Columns: columns, D: d, Eps: 1e-5,
				Type: bf16, Workspace: g.normWorkspace(rows, columns)}
			show := func(what string, run func()) {
				n := 1 + int(0.01/g.time([]func(){run}).Seconds())
				took := g.clock(func() {
					for range n {
						run()
					}
				}).Seconds() / float64(n)
				g.Logf("%-20s %8.1f µs", what, took*1e6)
			}
			for _, left := range []int{0, LateMultiprocessors} {
				g.Leave(left)
				for range 2 {
					show(fmt.Sprint("product, left ", left), func() { g.must(g.Product(g.stream, p)) })
					show("product and norm", func() { g.must(g.Product(g.stream, p)); g.must(g.RMSNorm(g.stream, n)) })
					show("fused", func() { g.must(g.ProductNorm(g.stream, a)) })
				}
			}
			g.Leave(0)
		})
	}
}
