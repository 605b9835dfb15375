package gemm

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
)

// Bench times five steps of Muon's iteration.
func Bench(b *bench.B) {
	for _, s := range [][2]int{{768, 3072}, {2048, 2048}, {2048, 8192}} {
		m, n := s[0], s[1] // m ≤ n
		it := NewtonSchulz{Rows: m, Columns: n, Batch: 1, Steps: 5, Type: gpu.Float16,
			X: [2]gpu.Ptr{b.Alloc(m*n, gpu.Float16), b.Alloc(m*n, gpu.Float16)}}
		for i := range it.Squares {
			it.Squares[i] = b.Alloc(m*m, gpu.Float16)
		}
		g, workspace := b.Normal(m*n, gpu.BFloat16),
			b.Alloc(normalize.NormalizeWorkspace/4, gpu.Float32)
		measure := func(suffix string, run func() error) {
			b.Time(bench.Measurement{Name: fmt.Sprintf("newton_schulz5_%dx%d%s", m, n, suffix),
				FLOPs: 5 * 2 * float64(m) * float64(m) * float64(2*n+m)}, func() error {
				return errors.Join(normalize.Forward{Y: it.X[0], X: g, Workspace: workspace,
					N: m * n, YType: gpu.Float16,
					XType: gpu.BFloat16}.Launch(b.Set, b.Stream), run())
			})
		}
		wide := b.Plan(gpu.MatmulSpec{M: m, N: n, K: m, A: gpu.Float16,
			B: gpu.Float16, D: gpu.Float16})
		suffix := func(int) string { return "" }
		if TakesSymmetric(b.Set, it.Shapes()[0], gpu.Float16) {
			usual := NewtonSchulzTogether(m, n)
			suffix = func(together int) string {
				if together == usual {
					return ""
				}
				return map[int]string{0: "_by_products", 1: "_by_symmetry", 3: "_by_gram"}[together]
			}
			for _, it.Together = range []int{1, 3} {
				measure(suffix(it.Together), func() error {
					return it.Run(func(a Symmetric) error {
						return a.Launch(b.Set, b.Stream)
					}, func(y, q, x gpu.Ptr) error {
						return wide(gpu.MatmulArgs{Alpha: 1, A: q, B: x, D: y})
					})
				})
			}
		}
		gram := b.Plan(gpu.MatmulSpec{M: m, N: m, K: n, TransB: true, A: gpu.Float16,
			B: gpu.Float16, D: gpu.Float16})
		square := b.Plan(gpu.MatmulSpec{M: m, N: m, K: m, A: gpu.Float16,
			B: gpu.Float16, D: gpu.Float16})
		measure(suffix(0), func() (err error) {
			x, y, a, p := it.X[0], it.X[1], it.Squares[0], it.Squares[1]
			for range it.Steps {
				err = errors.Join(err, gram(gpu.MatmulArgs{Alpha: 1, A: x, B: x, D: a}),
					square(gpu.MatmulArgs{Alpha: SchulzC, Beta: SchulzB, A: a, B: a, C: a, D: p}),
					wide(gpu.MatmulArgs{Alpha: 1, Beta: SchulzA, A: p, B: x, C: x, D: y}))
				x, y = y, x
			}
			return err
		})
		b.Free()
	}
}
