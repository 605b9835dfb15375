package kernels

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu"
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
			for _, dtype := range []gpu.DType{bf16, f16} {
				g.scope(fmt.Sprintf("%+v/%v", s, dtype), func(g *rig) { testProduct(g, s, dtype) })
			}
		}
	}
}

func testProduct(g *rig, s ProductShape, dtype gpu.DType) {
	g.Helper()
	n := s.Rows * s.Columns
	x, xr := g.normal(s.Rows*s.D, dtype, 0)
	w, wr := g.scaled(s.Columns*s.D, s.D, dtype)
	c, cr := g.normal(n, dtype, 0)
	stride := s.Columns
	if s.TransW {
		stride = s.D
	}
	alone := make([]float64, n)
	cpu.Gemm(false, s.TransW, s.Rows, s.Columns, s.D, 1, xr, s.D, wr, stride, 0, alone, s.Columns)
	plus, twice := slices.Clone(alone), decode(encode(alone, dtype), dtype)
	for i, v := range cr {
		plus[i] += v
		twice[i] += v
	}
	twice = decode(encode(twice, dtype), dtype)
	a := Product{X: x.Ptr, W: w.Ptr, ProductShape: s, Type: dtype}
	ways := g.ProductWays(s, dtype)
	if len(ways) == 0 {
		g.Fatal("no way takes it")
	}
	for _, a.Way = range ways {
		for what, want := range map[string][]float64{"alone": alone, "plus": plus, "in place": plus} {
			var bits []float64
			for range 2 {
				y := g.alloc(n, dtype, 0)
				a.Y, a.C = y.Ptr, 0
				switch what {
				case "plus":
					a.C = c.Ptr
				case "in place":
					y, _ = g.upload(cr, dtype, 0)
					a.Y, a.C = y.Ptr, y.Ptr
				}
				g.must(g.Product(g.stream, a))
				g.near(fmt.Sprint(a.Way, " ", what), y, want, forward(dtype))
				got := g.read(y)
				if e, of := distance(got, want), distance(twice, want); what != "alone" && n > 10000 && !(e < 0.95*of) {
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
		k, c, p := fakeAttention(t, capability, 227<<10)
		ok := Product{Y: p, X: p, W: p, C: p, Type: bf16, ProductShape: ProductShape{Rows: 6, Columns: 256, D: 264}}
		for what, change := range map[string]func(a *Product){
			"rows":    func(a *Product) { a.Rows = -1 },
			"columns": func(a *Product) { a.Columns = 260 },
			"d":       func(a *Product) { a.D = 268 },
			"type":    func(a *Product) { a.Type = f32 },
			"result":  func(a *Product) { a.Y += 8 },
			"input":   func(a *Product) { a.X += 2 },
			"weights": func(a *Product) { a.W += 8 },
			"added":   func(a *Product) { a.C += 4 },
			"way":     func(a *Product) { a.Way = Way{Family: "hopper", Size: 64} },
			"factors": func(a *Product) { a.ScaleX, a.ScaleW = p, p },
		} {
			a := ok
			change(&a)
			if k.Product(0, a) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		ok8 := Product{Y: p, X: p, W: p, C: p, ScaleX: p, ScaleW: p, Type: bf16,
			ProductShape: ProductShape{Rows: 6, Columns: 256, D: 400, TransW: true, Float8: true}}
		for what, change := range map[string]func(a *Product){
			"columns":         func(a *Product) { a.Columns = 264 },
			"d":               func(a *Product) { a.D = 408 },
			"a small d":       func(a *Product) { a.D = 384 },
			"type":            func(a *Product) { a.Type = f16 },
			"weights":         func(a *Product) { a.TransW = false },
			"no factors":      func(a *Product) { a.ScaleX = 0 },
			"no factors of W": func(a *Product) { a.ScaleW = 0 },
			"factors":         func(a *Product) { a.ScaleW += 4 },
		} {
			a := ok8
			change(&a)
			if k.Product(0, a) == nil {
				t.Errorf("capability %d, float8, %s: no error", capability, what)
			}
		}
		c.ClearTrace()
		takes := len(k.ProductWays(ok.ProductShape, bf16)) == 1
		if takes != (capability == 90) {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		names := map[string]bool{}
		for _, ok.TransW = range []bool{false, true} {
			for _, ok.C = range []gpu.Ptr{0, p} {
				for _, ok.Type = range []gpu.DType{bf16, f16} {
					if takes != (k.Product(0, ok) == nil) {
						t.Errorf("capability %d: takes %+v: %v", capability, ok, !takes)
					}
				}
			}
		}
		for _, ok8.C = range []gpu.Ptr{0, p} {
			if takes != (k.Product(0, ok8) == nil) {
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
		if err := k.Product(0, ok); err != nil {
			t.Errorf("no rows: %v", err)
		}
	}
}

// TestProductSpeed compares with cuBLASLt, in the fastest of its ways.
func TestProductSpeed(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to run it")
	}
	g := newHopperRig(t)
	for _, s := range []ProductShape{{Rows: 32768, Columns: 768, D: 768, TransW: true}, {Rows: 32768, Columns: 768, D: 2304},
		{Rows: 16384, Columns: 1024, D: 1024, TransW: true}, {Rows: 16384, Columns: 1024, D: 1024}, {Rows: 16384, Columns: 1024, D: 2816, TransW: true},
		{Rows: 16384, Columns: 1024, D: 5632}, {Rows: 16384, Columns: 2048, D: 2048, TransW: true}, {Rows: 16384, Columns: 2048, D: 11264}} {
		g.scope(fmt.Sprintf("%+v", s), func(g *rig) {
			x, w := g.random(s.Rows*s.D), g.random(s.Columns*s.D)
			y, c := g.random(s.Rows*s.Columns), g.random(s.Rows*s.Columns)
			show := func(what string, run func()) {
				took := g.time([]func(){run}).Seconds()
				g.Logf("%-16s %8.1f µs %6.0f TFLOP/s", what, took*1e6, 2*float64(s.Rows)*float64(s.Columns)*float64(s.D)/took/1e12)
			}
			show("cuBLASLt", g.fastestProduct(gpu.MatmulSpec{M: s.Rows, N: s.Columns, K: s.D, TransB: s.TransW, A: bf16, B: bf16, D: bf16}, x, w, y))
			for _, way := range g.ProductWays(s, bf16) {
				a := Product{Y: y, X: x, W: w, ProductShape: s, Type: bf16, Way: way}
				show(way.String(), func() { g.must(g.Product(g.stream, a)) })
				a.C = c
				show(way.String()+" plus", func() { g.must(g.Product(g.stream, a)) })
			}
		})
	}
}
