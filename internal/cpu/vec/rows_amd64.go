package vec

import "github.com/kasmina-go/kasmina/internal/cpu"

//go:generate go -C ../asm run . -part rows -pkg vec -out ../vec/rows_amd64.s

// The kernels of rows_amd64.s, which the program in internal/cpu/asm generates.

//go:noescape
func sumSquaresAVX512(x *float32, n int) float64

//go:noescape
func sum64AVX512(x *float32, n int) float64

//go:noescape
func dot3AVX512(grad, w, x *float32, n int) float64

//go:noescape
func dotProductAVX512(a, b *float32, n int) float32

//go:noescape
func finiteAVX512(x *float32, n int) float32

//go:noescape
func mulScaledAVX512(y, x, w *float32, n int, s float32)

//go:noescape
func normGradientAVX512(dx, grad, w, x *float32, n int, s float32, m float32)

//go:noescape
func addScaledAVX512(y, a, b *float32, n int, s float32)

//go:noescape
func rotateAVX512(ya, yb, xa, xb, c, s *float32, n int, sign float32)

//go:noescape
func addVectorsAVX512(y, a, b *float32, n int)

//go:noescape
func addNumberAVX512(y, x *float32, n int, s float32)

//go:noescape
func scaleVectorAVX512(x *float32, n int, s float32)

//go:noescape
func softmaxGradientAVX512(dp, p *float32, n int, d float32)

//go:noescape
func adamWAVX512(p, grad, m, v *float32, n int, keep float32, rate float32, root float32,
	gain1 float32, beta2 float32, gain2 float32, eps float32, largest float32)

//go:noescape
func sumSquaresAVX2(x *float32, n int) float64

//go:noescape
func sum64AVX2(x *float32, n int) float64

//go:noescape
func dot3AVX2(grad, w, x *float32, n int) float64

//go:noescape
func dotProductAVX2(a, b *float32, n int) float32

//go:noescape
func finiteAVX2(x *float32, n int) float32

//go:noescape
func mulScaledAVX2(y, x, w *float32, n int, s float32)

//go:noescape
func normGradientAVX2(dx, grad, w, x *float32, n int, s float32, m float32)

//go:noescape
func addScaledAVX2(y, a, b *float32, n int, s float32)

//go:noescape
func rotateAVX2(ya, yb, xa, xb, c, s *float32, n int, sign float32)

//go:noescape
func addVectorsAVX2(y, a, b *float32, n int)

//go:noescape
func addNumberAVX2(y, x *float32, n int, s float32)

//go:noescape
func scaleVectorAVX2(x *float32, n int, s float32)

//go:noescape
func softmaxGradientAVX2(dp, p *float32, n int, d float32)

//go:noescape
func adamWAVX2(p, grad, m, v *float32, n int, keep float32, rate float32, root float32,
	gain1 float32, beta2 float32, gain2 float32, eps float32, largest float32)

var kernelsAVX512 = kernels{
	expSub:          expSubAVX512,
	maximum:         maximumAVX512,
	siluMul:         siluMulAVX512,
	siluMulBackward: siluMulBackwardAVX512,
	sumSquares:      sumSquaresAVX512,
	sum64:           sum64AVX512,
	dot3:            dot3AVX512,
	dotProduct:      dotProductAVX512,
	finite:          finiteAVX512,
	mulScaled:       mulScaledAVX512,
	normGradient:    normGradientAVX512,
	addScaled:       addScaledAVX512,
	rotate:          rotateAVX512,
	addVectors:      addVectorsAVX512,
	addNumber:       addNumberAVX512,
	scaleVector:     scaleVectorAVX512,
	softmaxGradient: softmaxGradientAVX512,
	adamW:           adamWAVX512,
}

var kernelsAVX2 = kernels{
	expSub:          expSubAVX2,
	maximum:         maximumAVX2,
	siluMul:         siluMulAVX2,
	siluMulBackward: siluMulBackwardAVX2,
	sumSquares:      sumSquaresAVX2,
	sum64:           sum64AVX2,
	dot3:            dot3AVX2,
	dotProduct:      dotProductAVX2,
	finite:          finiteAVX2,
	mulScaled:       mulScaledAVX2,
	normGradient:    normGradientAVX2,
	addScaled:       addScaledAVX2,
	rotate:          rotateAVX2,
	addVectors:      addVectorsAVX2,
	addNumber:       addNumberAVX2,
	scaleVector:     scaleVectorAVX2,
	softmaxGradient: softmaxGradientAVX2,
	adamW:           adamWAVX2,
}

func kernelsFor(l cpu.ISA) *kernels {
	switch l {
	case cpu.AVX512:
		return &kernelsAVX512
	case cpu.AVX2:
		return &kernelsAVX2
	}
	return nil
}
