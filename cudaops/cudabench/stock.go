package cudabench

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	elementwisekernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	softmaxkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

// stock measures the kernels behind Gorgonia's own ops.
func stock(b *bench) {
	for _, measure := range []func(*bench){elementwise, softmax, reductions, transposition} {
		measure(b)
		b.free()
	}
}

func elementwise(b *bench) {
	const n = 1 << 27
	x, y, z, row := b.normal(n, bf16), b.normal(n, bf16), b.alloc(n, bf16), b.normal(4096, bf16)
	b.time(Measurement{Name: "add_32768x4096", Bytes: 3 * 2 * n}, func() error {
		return elementwisekernel.Binary{Op: elementwisekernel.Add, Y: z, A: elementwisekernel.Operand{Ptr: x}, B: elementwisekernel.Operand{Ptr: y}, N: n, Type: bf16}.Launch(b.Set, b.stream)
	})
	b.time(Measurement{Name: "add_row_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return elementwisekernel.Binary{Op: elementwisekernel.Add, Y: z, A: elementwisekernel.Operand{Ptr: x}, B: elementwisekernel.Operand{Ptr: row, Period: 4096}, N: n, Type: bf16}.Launch(b.Set, b.stream)
	})
	b.time(Measurement{Name: "tanh_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return elementwisekernel.Unary{Op: elementwisekernel.Tanh, Y: z, X: x, P: 0, N: n, Type: bf16}.Launch(b.Set, b.stream)
	})
	wide := b.normal(n, f32)
	b.time(Measurement{Name: "cast_32768x4096", Bytes: (4 + 2) * n}, func() error {
		return elementwisekernel.Cast{Y: z, YType: bf16, X: wide, XType: f32, N: n}.Launch(b.Set, b.stream)
	})
}

func softmax(b *bench) {
	const rows, n = 32768, 4096
	const size = 2 * rows * n
	x, g := b.normal(rows*n, bf16), b.normal(rows*n, bf16)
	y, dx := b.alloc(rows*n, bf16), b.alloc(rows*n, bf16)
	b.time(Measurement{Name: "softmax_fwd_32768x4096", Bytes: 2 * size}, func() error {
		return softmaxkernel.Forward{Y: y, X: x, Rows: rows, N: n, Type: bf16}.Launch(b.Set, b.stream)
	})
	b.time(Measurement{Name: "softmax_bwd_32768x4096", Bytes: 3 * size}, func() error {
		return softmaxkernel.Backward{DX: dx, G: g, Y: y, Rows: rows, N: n, Type: bf16}.Launch(b.Set, b.stream)
	})
}

func reductions(b *bench) {
	const rows, n = 32768, 4096
	x, y := b.normal(rows*n, bf16), b.alloc(rows, f32)
	for _, r := range []struct {
		name string
		reduce.Reduce
	}{
		{"sum_32768x4096", reduce.Reduce{Outer: 1, N: rows * n, Inner: 1}},
		{"sum_rows_32768x4096", reduce.Reduce{Outer: rows, N: n, Inner: 1}},
		{"sum_columns_32768x4096", reduce.Reduce{Outer: 1, N: rows, Inner: n}},
	} {
		a := r.Reduce
		a.Op, a.Y, a.X, a.YType, a.XType = reduce.Sum, y, x, f32, bf16
		a.Workspace = b.alloc(reduce.ReduceWorkspace(b.Set, a)/4, f32)
		b.time(Measurement{Name: r.name, Bytes: 2 * rows * n}, func() error { return a.Launch(b.Set, b.stream) })
	}
}

func transposition(b *bench) {
	const rows, n = 32768, 4096
	x, y := b.normal(rows*n, bf16), b.alloc(rows*n, bf16)
	b.time(Measurement{Name: "transpose_32768x4096", Bytes: 2 * 2 * rows * n}, func() error {
		return layout.Copy{Y: y, X: x, Dims: []int{n, rows}, YStrides: []int{rows, 1}, XStrides: []int{1, n},
			Size: gpu.BFloat16.Size()}.Launch(b.Set, b.stream)
	})
}
