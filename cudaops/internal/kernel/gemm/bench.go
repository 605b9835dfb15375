package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
)

// Bench times five steps of Muon's iteration, in the way that should be the fastest.
func Bench(b *bench.B) {
	const t = gpu.Float16
	for _, s := range [][2]int{{768, 3072}, {2048, 2048}, {2048, 8192}} {
		m, n := s[0], s[1] // m ≤ n
		it := NewtonSchulz{Rows: m, Columns: n, Batch: 1, Steps: 5, Type: t,
			X: [2]gpu.Ptr{b.Alloc(m*n, t), b.Alloc(m*n, t)}, Together: NewtonSchulzTogether(m, n)}
		for i := range it.Squares {
			it.Squares[i] = b.Alloc(m*m, t)
		}
		begin := normalize.Forward{Y: it.X[0], X: b.Normal(m*n, gpu.BFloat16), N: m * n, YType: t,
			Workspace: b.Alloc(normalize.NormalizeWorkspace/4, gpu.Float32), XType: gpu.BFloat16}
		gram := b.Plan(gpu.MatmulSpec{M: m, N: m, K: n, TransB: true, A: t, B: t, D: t})
		square := b.Plan(gpu.MatmulSpec{M: m, N: m, K: m, A: t, B: t, D: t})
		wide := b.Plan(gpu.MatmulSpec{M: m, N: n, K: m, A: t, B: t, D: t})
		b.Time(bench.Measurement{Name: fmt.Sprintf("newton_schulz5_%dx%d", m, n),
			FLOPs: 5 * 2 * float64(m) * float64(m) * float64(2*n+m)}, func() {
			b.Launch(begin)
			if it.Together > 0 && len((Symmetric{SymmetricShape: it.gram(), Type: t}).Ways(b.Set)) > 0 {
				it.Run(func(a Symmetric) { b.Launch(a) },
					func(y, q, x gpu.Ptr) { wide(gpu.MatmulArgs{Alpha: 1, A: q, B: x, D: y}) })
				return
			}
			x, y, a, p := it.X[0], it.X[1], it.Squares[0], it.Squares[1]
			for range it.Steps {
				gram(gpu.MatmulArgs{Alpha: 1, A: x, B: x, D: a})
				square(gpu.MatmulArgs{Alpha: SchulzC, Beta: SchulzB, A: a, B: a, C: a, D: p})
				wide(gpu.MatmulArgs{Alpha: 1, Beta: SchulzA, A: p, B: x, C: x, D: y})
				x, y = y, x
			}
		})
		b.Free()
	}
}
