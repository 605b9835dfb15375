package cudabench

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
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
		return b.Binary(b.stream, kernels.Add, z, kernels.Operand{Ptr: x}, kernels.Operand{Ptr: y}, n, bf16)
	})
	b.time(Measurement{Name: "add_row_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return b.Binary(b.stream, kernels.Add, z, kernels.Operand{Ptr: x}, kernels.Operand{Ptr: row, Period: 4096}, n, bf16)
	})
	b.time(Measurement{Name: "tanh_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return b.Unary(b.stream, kernels.Tanh, z, x, 0, n, bf16)
	})
	wide := b.normal(n, f32)
	b.time(Measurement{Name: "cast_32768x4096", Bytes: (4 + 2) * n}, func() error {
		return b.Cast(b.stream, z, bf16, wide, f32, n)
	})
}

func softmax(b *bench) {
	const rows, n = 32768, 4096
	const size = 2 * rows * n
	x, g := b.normal(rows*n, bf16), b.normal(rows*n, bf16)
	y, dx := b.alloc(rows*n, bf16), b.alloc(rows*n, bf16)
	b.time(Measurement{Name: "softmax_fwd_32768x4096", Bytes: 2 * size}, func() error {
		return b.Softmax(b.stream, y, x, rows, n, bf16)
	})
	b.time(Measurement{Name: "softmax_bwd_32768x4096", Bytes: 3 * size}, func() error {
		return b.SoftmaxBackward(b.stream, dx, g, y, rows, n, bf16)
	})
}

func reductions(b *bench) {
	const rows, n = 32768, 4096
	x, y := b.normal(rows*n, bf16), b.alloc(rows, f32)
	for _, r := range []struct {
		name string
		kernels.Reduce
	}{
		{"sum_32768x4096", kernels.Reduce{Outer: 1, N: rows * n, Inner: 1}},
		{"sum_rows_32768x4096", kernels.Reduce{Outer: rows, N: n, Inner: 1}},
		{"sum_columns_32768x4096", kernels.Reduce{Outer: 1, N: rows, Inner: n}},
	} {
		a := r.Reduce
		a.Op, a.Y, a.X, a.YType, a.XType = kernels.Sum, y, x, f32, bf16
		a.Workspace = b.alloc(b.ReduceWorkspace(a)/4, f32)
		b.time(Measurement{Name: r.name, Bytes: 2 * rows * n}, func() error { return b.Reduce(b.stream, a) })
	}
}

func transposition(b *bench) {
	const rows, n = 32768, 4096
	x, y := b.normal(rows*n, bf16), b.alloc(rows*n, bf16)
	b.time(Measurement{Name: "transpose_32768x4096", Bytes: 2 * 2 * rows * n}, func() error {
		return b.Copy(b.stream, kernels.Copy{Y: y, X: x, Dims: []int{n, rows}, YStrides: []int{rows, 1}, XStrides: []int{1, n},
			Size: gpu.BFloat16.Size()})
	})
}
