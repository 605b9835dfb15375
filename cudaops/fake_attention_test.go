package cudaops

import (
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

func (k *fakeKernels) Attention(s gpu.Stream, a attention.Geometry, y kernel.Rows, lse gpu.Ptr, q, key, v kernel.Rows, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out := denseRows(l, a, a.Heads, y)
		cpu.Attention(out, fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq), denseRows(l, a, a.Heads, q), denseRows(l, a, a.KVHeads, key),
			denseRows(l, a, a.KVHeads, v), cpuShape(l, a))
		spreadRows(l, a, a.Heads, y, out)
	})
}

func (k *fakeKernels) AttentionBackward(s gpu.Stream, a attention.Geometry, dq, dk, dv kernel.Rows, stats gpu.Ptr, g, q, key, v, y kernel.Rows,
	lse gpu.Ptr, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		rows := func(heads int, r kernel.Rows) []float32 { return denseRows(l, a, heads, r) }
		outQ, outK, outV := rows(a.Heads, dq), rows(a.KVHeads, dk), rows(a.KVHeads, dv)
		cpu.AttentionBackward(outQ, outK, outV, rows(a.Heads, g), rows(a.Heads, q), rows(a.KVHeads, key), rows(a.KVHeads, v), rows(a.Heads, y),
			fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq), cpuShape(l, a))
		if a.Cos != 0 {
			cos, sin := floatsAt(l, a.Cos, a.Seq*a.HeadDim/2), floatsAt(l, a.Sin, a.Seq*a.HeadDim/2)
			cpu.RoPE(outQ, outQ, cos, sin, a.Seq, a.Heads, a.HeadDim, true)
			cpu.RoPE(outK, outK, cos, sin, a.Seq, a.KVHeads, a.HeadDim, true)
		}
		spreadRows(l, a, a.Heads, dq, outQ)
		spreadRows(l, a, a.KVHeads, dk, outK)
		spreadRows(l, a, a.KVHeads, dv, outV)
	})
}

// denseRows is a copy of an operand of attention, without the gaps between its rows.
func denseRows(l *fake.Launch, a attention.Geometry, heads int, r kernel.Rows) []float32 {
	return slices.Concat(rowsAt(l, r.Ptr, a.Batch*a.Seq, heads*a.HeadDim, r.Stride)...)
}

// spreadRows writes a result of attention to where it belongs.
func spreadRows(l *fake.Launch, a attention.Geometry, heads int, r kernel.Rows, x []float32) {
	width := heads * a.HeadDim
	for i, row := range rowsAt(l, r.Ptr, a.Batch*a.Seq, width, r.Stride) {
		copy(row, x[i*width:])
	}
}

func cpuShape(l *fake.Launch, a attention.Geometry) cpu.AttentionShape {
	s := cpu.AttentionShape{Batch: a.Batch, Seq: a.Seq, Heads: a.Heads, KVHeads: a.KVHeads, HeadDim: a.HeadDim, Causal: a.Causal, Scale: a.Scale}
	if a.Documents != 0 {
		for _, start := range fake.Slice[int32](l, a.Documents, a.Batch*a.Seq) {
			s.Starts = append(s.Starts, int(start))
		}
	}
	return s
}

// AttentionDocuments leaves the ends out, which are the kernels' alone.
func (k *fakeKernels) AttentionDocuments(s gpu.Stream, table gpu.Ptr, starts kernel.Ints, batch, seq int) error {
	return k.launch(s, func(l *fake.Launch) {
		to := fake.Slice[int32](l, table, attention.DocumentsBytes(batch, seq)/4)
		for i, start := range fake.Slice[int64](l, starts.Ptr, batch*seq) {
			to[i] = int32(start)
		}
	})
}

func (k *fakeKernels) Normalize(s gpu.Stream, a normalize.Forward) error {
	return k.launch(s, func(l *fake.Launch) {
		floatsAt(l, a.Workspace, normalize.NormalizeWorkspace/4)
		x, y := floatsAt(l, a.X, a.N), floatsAt(l, a.Y, a.N)
		r := float32(1 / (math.Sqrt(cpu.SumSquares(x)) + 1e-7))
		for i, v := range x {
			y[i] = v * r
		}
	})
}

func (k *fakeKernels) TakesSymmetric(a gemm.SymmetricShape, _ gpu.DType) bool {
	return a.N%8 == 0 && a.Depth%8 == 0
}

func (k *fakeKernels) Symmetric(s gpu.Stream, a gemm.Symmetric) error {
	return k.launch(s, func(l *fake.Launch) {
		n, part, stride := a.N, a.N*a.Depth, a.Depth
		if a.Tall {
			stride = n
		}
		for b := range a.Batch {
			left, right := floatsAt(l, a.Left.Offset(4*b*part), part), floatsAt(l, a.Right.Offset(4*b*part), part)
			d := floatsAt(l, a.D.Offset(4*b*n*n), n*n)
			clear(d)
			if a.C != 0 {
				copy(d, floatsAt(l, a.C.Offset(4*b*n*n), n*n))
			}
			cpu.Gemm(a.Tall, !a.Tall, n, n, a.Depth, a.Alpha, left, stride, right, stride, a.Beta, d, n)
			for i := range n {
				d[i*n+i] += a.Delta
			}
		}
	})
}

func (k *fakeKernels) NormalizeBackward(s gpu.Stream, a normalize.Backward) error {
	return k.launch(s, func(l *fake.Launch) {
		floatsAt(l, a.Workspace, normalize.NormalizeWorkspace/4)
		x, g, dx := floatsAt(l, a.X, a.N), floatsAt(l, a.G, a.N), floatsAt(l, a.DX, a.N)
		norm, dot := math.Sqrt(cpu.SumSquares(x)), 0.0
		for i, v := range x {
			dot += float64(v) * float64(g[i])
		}
		r := norm + 1e-7
		for i, v := range x {
			dx[i] = float32(float64(g[i])/r - float64(v)*dot/(r*r*norm))
		}
	})
}
