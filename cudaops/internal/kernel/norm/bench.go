package norm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the norm and its backward pass, plain and with a residual.
func Bench(b *bench.B) {
	const t = gpu.BFloat16
	for _, shape := range [][2]int{{32768, 4096}, {32768, 768}, {16384, 1024}} {
		rows, d := shape[0], shape[1]
		n := rows * d
		name, size := fmt.Sprintf("_%dx%d", rows, d), float64(2*n)
		a := RMSNorm{Y: b.Alloc(n, t), Rstd: b.Normal(rows, gpu.Float32), X: b.Normal(n, t),
			W: b.Normal(d, gpu.Float32), Rows: rows, D: d, Eps: 1e-5, Type: t}
		back := RMSNormBackward{DX: b.Alloc(n, t), DW: b.Alloc(d, gpu.Float32), G: b.Normal(n, t),
			X: a.X, W: a.W, Rstd: a.Rstd, Rows: rows, D: d, Type: t}
		back.Workspace = b.Alloc(back.WorkspaceBytes(b.Info)/4, gpu.Float32)
		b.Moves("rmsnorm_fwd"+name, 2*size, a)
		b.Moves("rmsnorm_bwd"+name, 3*size, back)
		a.Sum, a.Residual = b.Alloc(n, t), b.Normal(n, t)
		back.Add = a.Residual
		b.Moves("add_rmsnorm_fwd"+name, 4*size, a)
		b.Moves("add_rmsnorm_bwd"+name, 4*size, back)
		b.Free()
	}
}
