package cudaops

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// The products of this module's own of fakeKernels.

func (k *fakeKernels) SiLUProductWays(int, int, int, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) SiLUProduct(s gpu.Stream, a gemm.SiLUProduct) error {
	return k.launch(s, func(l *fake.Launch) {
		ab := floatsAt(l, a.AB, 2*a.Rows*a.F)
		cpu.Gemm(false, true, a.Rows, 2*a.F, a.D, 1, floatsAt(l, a.X, a.Rows*a.D), a.D, floatsAt(l, a.Weights, 2*a.F*a.D), a.D, 0, ab, 2*a.F)
		for i, h := range rowsAt(l, a.H, a.Rows, a.F, 0) {
			cpu.SiLUMul(h, ab[2*i*a.F:][:a.F], ab[(2*i+1)*a.F:][:a.F])
		}
	})
}

func (k *fakeKernels) SiLUProductBackward(s gpu.Stream, a gemm.SiLUProductBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		dh, ab, dab := make([]float32, a.Rows*a.F), floatsAt(l, a.AB, 2*a.Rows*a.F), floatsAt(l, a.DAB, 2*a.Rows*a.F)
		cpu.Gemm(false, false, a.Rows, a.F, a.D, 1, floatsAt(l, a.G, a.Rows*a.D), a.D, floatsAt(l, a.Down, a.D*a.F), a.F, 0, dh, a.F)
		h := make([]float32, a.Rows*a.F)
		if a.H != 0 {
			h = floatsAt(l, a.H, len(h))
		}
		for i := range a.Rows {
			left, right := 2*i*a.F, (2*i+1)*a.F
			cpu.SiLUMulBackward(h[i*a.F:][:a.F], dab[left:][:a.F], dab[right:][:a.F], dh[i*a.F:][:a.F], ab[left:][:a.F], ab[right:][:a.F])
		}
	})
}

func (k *fakeKernels) RoPEProductWays(gemm.RoPEProductShape, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) RoPEProduct(s gpu.Stream, a gemm.RoPEProduct) error {
	return k.launch(s, func(l *fake.Launch) {
		h := a.HeadDim / 2
		y, table := floatsAt(l, a.Y, a.Rows*a.Columns), floatsAt(l, a.Angles, gemm.RoPEAnglesLen(a.Seq, h))
		cos, sin := make([]float32, a.Seq*h), make([]float32, a.Seq*h)
		for i := range cos {
			at := gemm.RoPEAngleAt(i/h, i%h, h)
			cos[i], sin[i] = table[at], table[at+2]
		}
		cpu.Gemm(false, true, a.Rows, a.Columns, a.D, 1, operandAt(l, a.X, a.ScaleX, a.Rows, a.D), a.D,
			operandAt(l, a.Weights, a.ScaleWeights, a.Columns, a.D), a.D, 0, y, a.Columns)
		for i := range a.Rows {
			turned, at := y[i*a.Columns:][:a.Turned], i%a.Seq*h
			cpu.RoPE(turned, turned, cos[at:], sin[at:], 1, a.Turned/a.HeadDim, a.HeadDim, false)
		}
	})
}

func (k *fakeKernels) ProductWays(gemm.ProductShape, gpu.DType) []kernel.Way { return nil }

func (k *fakeKernels) Product(s gpu.Stream, a gemm.Product) error {
	return k.launch(s, func(l *fake.Launch) {
		y, c := floatsAt(l, a.Y, a.Rows*a.Columns), make([]float32, a.Rows*a.Columns)
		if a.C != 0 {
			copy(c, floatsAt(l, a.C, len(c)))
		}
		stride := a.Columns
		if a.TransW {
			stride = a.D
		}
		cpu.Gemm(false, a.TransW, a.Rows, a.Columns, a.D, 1, operandAt(l, a.X, a.ScaleX, a.Rows, a.D), a.D,
			operandAt(l, a.W, a.ScaleW, a.Columns, a.D), stride, 0, y, a.Columns)
		for i, v := range c {
			y[i] += v
		}
	})
}
