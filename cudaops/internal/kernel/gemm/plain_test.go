package gemm

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// TestProduct compares with float64, and wants the matrix that is added to be added before anything is rounded.
func TestProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []ProductShape{{Rows: 1, Columns: 8, D: 8}, {Rows: 5, Columns: 264, D: 136}, {Rows: 130, Columns: 1000, D: 264},
		{Rows: 257, Columns: 256, D: 768}, {Rows: 300, Columns: 776, D: 1096}, {Rows: 2100, Columns: 2600, D: 840}} { // the last has several tiles a block
		if testing.Short() && s.Rows*s.Columns > 1e6 {
			continue
		}
		for _, s.TransW = range []bool{false, true} {
			for _, dtype := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
				g.Scope(fmt.Sprintf("%+v/%v", s, dtype), func(g *kerneltest.Rig) { testProduct(g, s, dtype) })
			}
		}
	}
}

func testProduct(g *kerneltest.Rig, s ProductShape, dtype gpu.DType) {
	g.Helper()
	n := s.Rows * s.Columns
	x, xr := g.Normal(s.Rows*s.D, dtype, 0)
	w, wr := scaledNormal(g, s.Columns*s.D, s.D, dtype)
	c, cr := g.Normal(n, dtype, 0)
	stride := s.Columns
	if s.TransW {
		stride = s.D
	}
	alone := make([]float64, n)
	cpugemm.Mul(false, s.TransW, s.Rows, s.Columns, s.D, 1, xr, s.D, wr, stride, 0, alone, s.Columns)
	plus, twice := slices.Clone(alone), kerneltest.Decode(kerneltest.Encode(alone, dtype), dtype)
	for i, v := range cr {
		plus[i] += v
		twice[i] += v
	}
	twice = kerneltest.Decode(kerneltest.Encode(twice, dtype), dtype)
	a := Product{X: x.Ptr, W: w.Ptr, ProductShape: s, Type: dtype}
	ways := ProductWays(g.Set, s, dtype)
	if len(ways) == 0 {
		g.Fatal("no way takes it")
	}
	for _, a.Way = range ways {
		for what, want := range map[string][]float64{"alone": alone, "plus": plus, "in place": plus} {
			var bits []float64
			for range 2 {
				y := g.Alloc(n, dtype, 0)
				a.Y, a.C = y.Ptr, 0
				switch what {
				case "plus":
					a.C = c.Ptr
				case "in place":
					y, _ = g.Upload(cr, dtype, 0)
					a.Y, a.C = y.Ptr, y.Ptr
				}
				g.Must(a.Launch(g.Set, g.Stream))
				g.Near(fmt.Sprint(a.Way, " ", what), y, want, kerneltest.Forward(dtype))
				got := g.Read(y)
				if e, of := kerneltest.Distance(got, want), kerneltest.Distance(twice, want); what != "alone" && n > 10000 && !(e < 0.95*of) {
					g.Errorf("%v %s: relative error %.3g, want less than that of a result that is rounded twice, %.3g", a.Way, what, e, of)
				}
				if bits == nil {
					bits = got
				} else if !slices.Equal(bits, got) {
					g.Errorf("%v %s: results differ from run to run", a.Way, what)
				}
			}
		}
	}
}

func TestProductRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := kerneltest.FakeAttention(t, capability, 227<<10)
		ok := Product{Y: p, X: p, W: p, C: p, Type: kerneltest.Bf16, ProductShape: ProductShape{Rows: 6, Columns: 256, D: 264}}
		for what, change := range map[string]func(a *Product){
			"rows":    func(a *Product) { a.Rows = -1 },
			"columns": func(a *Product) { a.Columns = 260 },
			"d":       func(a *Product) { a.D = 268 },
			"type":    func(a *Product) { a.Type = kerneltest.F32 },
			"result":  func(a *Product) { a.Y += 8 },
			"input":   func(a *Product) { a.X += 2 },
			"weights": func(a *Product) { a.W += 8 },
			"added":   func(a *Product) { a.C += 4 },
			"way":     func(a *Product) { a.Way = kernel.Way{Family: "hopper", Size: 64} },
			"factors": func(a *Product) { a.ScaleX, a.ScaleW = p, p },
		} {
			a := ok
			change(&a)
			if a.Launch(k, 0) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		ok8 := Product{Y: p, X: p, W: p, C: p, ScaleX: p, ScaleW: p, Type: kerneltest.Bf16,
			ProductShape: ProductShape{Rows: 6, Columns: 256, D: 400, TransW: true, Float8: true}}
		for what, change := range map[string]func(a *Product){
			"columns":         func(a *Product) { a.Columns = 264 },
			"d":               func(a *Product) { a.D = 408 },
			"a small d":       func(a *Product) { a.D = 384 },
			"type":            func(a *Product) { a.Type = kerneltest.F16 },
			"weights":         func(a *Product) { a.TransW = false },
			"no factors":      func(a *Product) { a.ScaleX = 0 },
			"no factors of W": func(a *Product) { a.ScaleW = 0 },
			"factors":         func(a *Product) { a.ScaleW += 4 },
		} {
			a := ok8
			change(&a)
			if a.Launch(k, 0) == nil {
				t.Errorf("capability %d, float8, %s: no error", capability, what)
			}
		}
		c.ClearTrace()
		takes := len(ProductWays(k, ok.ProductShape, kerneltest.Bf16)) == 1
		if takes != (capability == 90) {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		names := map[string]bool{}
		for _, ok.TransW = range []bool{false, true} {
			for _, ok.C = range []gpu.Ptr{0, p} {
				for _, ok.Type = range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
					if takes != (ok.Launch(k, 0) == nil) {
						t.Errorf("capability %d: takes %+v: %v", capability, ok, !takes)
					}
				}
			}
		}
		for _, ok8.C = range []gpu.Ptr{0, p} {
			if takes != (ok8.Launch(k, 0) == nil) {
				t.Errorf("capability %d: takes %+v: %v", capability, ok8, !takes)
			}
		}
		for _, op := range c.Trace() {
			if op.Name == "" {
				continue
			}
			if names[op.Name] = true; op.Config.Shared > 227<<10 || op.Config.Cluster.X < 2 || op.Config.Grid.X%op.Config.Cluster.X != 0 {
				t.Errorf("launched with %v", op.Config)
			}
		}
		if want := map[bool]int{true: 10}[takes]; len(names) != want {
			t.Errorf("capability %d: launched %v, want %d kernels", capability, names, want)
		}
		ok.Rows = 0
		if err := ok.Launch(k, 0); err != nil {
			t.Errorf("no rows: %v", err)
		}
	}
}
