package strip

import "github.com/kasmina-go/kasmina/internal/cpu"

//go:generate go -C ../../asm run . -part kasmina -pkg strip -out ../kasmina/strip/strip_amd64.s

// The kernels of strip_amd64.s, which the program in internal/cpu/asm generates.

//go:noescape
func inputFiguresAVX512(f *Figures, pack, x *float32, rows, stride, columns int, eps float32)

//go:noescape
func gradientFiguresAVX512(f *Figures, pack, x *float32, rows, stride, columns int)

//go:noescape
func blendForwardAVX512(y, x *float32, rule *Rule, rows, stride, columns int) float32

//go:noescape
func blendForwardStreamedAVX512(y, x *float32, rule *Rule, rows, stride, columns int) float32

//go:noescape
func blendBackwardAVX512(dx, grad, x *float32, rule *Rule, ahead *float32,
	rows, stride, columns int)

//go:noescape
func blendBackwardStreamedAVX512(dx, grad, x *float32, rule *Rule, ahead *float32,
	rows, stride, columns int)

//go:noescape
func blendSumsAVX512(s *Sums, rule *Rule, grad, x *float32, rows, columns int)

//go:noescape
func loadRowsAVX512(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func storeRowsAVX512(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func streamRowsAVX512(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func inputFiguresAVX2(f *Figures, pack, x *float32, rows, stride, columns int, eps float32)

//go:noescape
func gradientFiguresAVX2(f *Figures, pack, x *float32, rows, stride, columns int)

//go:noescape
func blendForwardAVX2(y, x *float32, rule *Rule, rows, stride, columns int) float32

//go:noescape
func blendForwardStreamedAVX2(y, x *float32, rule *Rule, rows, stride, columns int) float32

//go:noescape
func blendBackwardAVX2(dx, grad, x *float32, rule *Rule, ahead *float32, rows, stride, columns int)

//go:noescape
func blendBackwardStreamedAVX2(dx, grad, x *float32, rule *Rule, ahead *float32,
	rows, stride, columns int)

//go:noescape
func blendSumsAVX2(s *Sums, rule *Rule, grad, x *float32, rows, columns int)

//go:noescape
func loadRowsAVX2(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func storeRowsAVX2(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func streamRowsAVX2(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

//go:noescape
func blendLearnAVX512(dx, grad, x *float32, rule *Rule, s *Sums, ahead *float32,
	rows, stride, columns int)

//go:noescape
func blendLearnStreamedAVX512(dx, grad, x *float32, rule *Rule, s *Sums, ahead *float32,
	rows, stride, columns int)

//go:noescape
func fusedForwardAVX512(y, x *float32, rule *Rule, state *State, nextX *float32, ahead *Fetch,
	stride, columns int, eps float32)

//go:noescape
func fusedForwardStreamedAVX512(y, x *float32, rule *Rule, state *State, nextX *float32,
	ahead *Fetch, stride, columns int, eps float32)

//go:noescape
func fusedBackwardAVX512(dx, grad, x *float32, rule *Rule, state *State, nextGrad, nextX *float32,
	ahead *Fetch, stride, columns, vectors, counter int)

//go:noescape
func fusedBackwardStreamedAVX512(dx, grad, x *float32, rule *Rule, state *State, nextGrad,
	nextX *float32, ahead *Fetch, stride, columns, vectors, counter int)

//go:noescape
func chunkNormsAVX2(n *Norms, x *float32, groups, chunk, chunks, stride int)

func storeFenceAMD64()

var kernelsAVX512 = kernels{
	inputFigures:          inputFiguresAVX512,
	gradientFigures:       gradientFiguresAVX512,
	blendForward:          blendForwardAVX512,
	blendForwardStreamed:  blendForwardStreamedAVX512,
	blendBackward:         blendBackwardAVX512,
	blendBackwardStreamed: blendBackwardStreamedAVX512,
	blendSums:             blendSumsAVX512,
	loadRows:              loadRowsAVX512,
	storeRows:             storeRowsAVX512,
	streamRows:            streamRowsAVX512,
	blendLearn:            blendLearnAVX512,
	blendLearnStreamed:    blendLearnStreamedAVX512,
	fusedForward:          fusedForwardAVX512,
	fusedForwardStreamed:  fusedForwardStreamedAVX512,
	fusedBackward:         fusedBackwardAVX512,
	fusedBackwardStreamed: fusedBackwardStreamedAVX512,
	chunkNorms:            chunkNormsAVX2,
	storeFence:            storeFenceAMD64,
}

var kernelsAVX2 = kernels{
	inputFigures:          inputFiguresAVX2,
	gradientFigures:       gradientFiguresAVX2,
	blendForward:          blendForwardAVX2,
	blendForwardStreamed:  blendForwardStreamedAVX2,
	blendBackward:         blendBackwardAVX2,
	blendBackwardStreamed: blendBackwardStreamedAVX2,
	blendSums:             blendSumsAVX2,
	loadRows:              loadRowsAVX2,
	storeRows:             storeRowsAVX2,
	streamRows:            streamRowsAVX2,
	chunkNorms:            chunkNormsAVX2,
	storeFence:            storeFenceAMD64,
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
