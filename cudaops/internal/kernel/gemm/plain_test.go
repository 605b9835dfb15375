package gemm

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// TestProductRefusals wants arguments that the kernel does not take to be refused, and others to be launched.
func TestProductRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := kerneltest.FakeAttention(t, capability, 227<<10)
		ok := Product{Y: p, X: p, W: p, C: p, ScaleX: p, ScaleW: p, Type: kerneltest.Bf16,
			ProductShape: ProductShape{Rows: 6, Columns: 256, D: 400}}
		for what, change := range map[string]func(a *Product){
			"columns":         func(a *Product) { a.Columns = 264 },
			"d":               func(a *Product) { a.D = 408 },
			"a small d":       func(a *Product) { a.D = 384 },
			"type":            func(a *Product) { a.Type = kerneltest.F16 },
			"rows":            func(a *Product) { a.Rows = -1 },
			"result":          func(a *Product) { a.Y += 8 },
			"input":           func(a *Product) { a.X += 2 },
			"weights":         func(a *Product) { a.W += 8 },
			"added":           func(a *Product) { a.C += 4 },
			"way":             func(a *Product) { a.Way = kernel.Way{Family: "hopper", Size: 64} },
			"no factors":      func(a *Product) { a.ScaleX = 0 },
			"no factors of W": func(a *Product) { a.ScaleW = 0 },
			"factors":         func(a *Product) { a.ScaleW += 4 },
		} {
			a := ok
			change(&a)
			if a.Launch(k, 0) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		c.ClearTrace()
		takes := len(ProductWays(k, ok.ProductShape, kerneltest.Bf16)) == 1
		if takes != (capability == 90) {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		names := map[string]bool{}
		for _, ok.C = range []gpu.Ptr{0, p} {
			if takes != (ok.Launch(k, 0) == nil) {
				t.Errorf("capability %d: takes %+v: %v", capability, ok, !takes)
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
		if want := map[bool]int{true: 2}[takes]; len(names) != want {
			t.Errorf("capability %d: launched %v, want %d kernels", capability, names, want)
		}
		ok.Rows = 0
		if err := ok.Launch(k, 0); err != nil {
			t.Errorf("no rows: %v", err)
		}
	}
}
