package gemm

import (
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

//go:generate go -C ../asm run . -part gemm -pkg gemm -out ../gemm/gemm_amd64.s

// The kernels of gemm_amd64.s, which the program in internal/cpu/asm generates.

//go:noescape
func gemmTileAVX512F32(t *tile[float32])

//go:noescape
func gemmTileAVX512BF16(t *tile[float32])

//go:noescape
func gemmTileAVX512F64(t *tile[float64])

//go:noescape
func gemmDotAVX512F32(t *tile[float32])

//go:noescape
func gemmTileAVX2F32(t *tile[float32])

//go:noescape
func gemmTileAVX2F64(t *tile[float64])

//go:noescape
func gemmDotAVX2F32(t *tile[float32])

// packCopy copies rows × width dwords, at most two vectors wide, between memory with the given
// strides in bytes. It writes whole vectors.
//
//go:noescape
func packCopyAVX512(dst unsafe.Pointer, dstStride int, src unsafe.Pointer,
	srcStride, rows, width int)

//go:noescape
func packCopyAVX2(dst unsafe.Pointer, dstStride int, src unsafe.Pointer, srcStride, rows, width int)

// packTranspose sets dst[c·dstStride + r] = src[r·srcStride + c] for dwords, with at most one
// vector of rows and strides in bytes. It writes whole vectors.
//
//go:noescape
func packTransposeAVX512(dst unsafe.Pointer, dstStride int, src unsafe.Pointer,
	srcStride, rows, cols int)

//go:noescape
func packTransposeAVX2(dst unsafe.Pointer, dstStride int, src unsafe.Pointer,
	srcStride, rows, cols int)

// pairCopy interleaves rows 2r and 2r+1 of src into pairs of bfloat16 values and writes them to row r
// of dst, width pairs per row. pairTranspose writes elements 2c and 2c+1 of up to 16 rows to row c as
// pairs. Strides are in bytes. Both functions write whole vectors.
//
//go:noescape
func pairCopyAVX512(dst unsafe.Pointer, dstStride int, src unsafe.Pointer,
	srcStride, rows, width int)

//go:noescape
func pairTransposeAVX512(dst unsafe.Pointer, dstStride int, src unsafe.Pointer,
	srcStride, rows, cols int)

// fmaLoop runs n rounds of 12 independent multiply-adds of whole float32 vectors.
func fmaLoopAVX512(n int)
func fmaLoopAVX2(n int)

// useBF16 sets kernelsBF16 from the float32 kernels of AVX-512.
func useBF16(k32 kernels[float32]) {
	if !cpu.HasBF16() || cpu.Level() != cpu.AVX512 {
		return
	}

	k32.tile, k32.dot, k32.pairs = gemmTileAVX512BF16, nil, true
	k32.copy = func(dst []float32, ds int, src []float32, ss, rows, width int) {
		if pairs := rows / 2; pairs > 0 {
			pairCopyAVX512(unsafe.Pointer(&dst[0]), 4*ds, unsafe.Pointer(&src[0]), 4*ss, pairs,
				width)
		}
		if rows%2 == 1 {
			for i, v := range src[(rows-1)*ss:][:width] {
				dst[rows/2*ds+i] = lastPair(v)
			}
		}
	}

	k32.transpose = func(dst []float32, ds int, src []float32, ss, rows, cols int) {
		pairTransposeAVX512(unsafe.Pointer(&dst[0]), 4*ds, unsafe.Pointer(&src[0]), 4*ss, rows,
			cols)
	}
	kernelsBF16 = &k32
}

// kernelsFor returns the kernels of one instruction set.
func kernelsFor(l cpu.ISA) (kernels[float32], kernels[float64]) {
	k32, k64 := portableKernels[float32](), portableKernels[float64]()
	var pack func(dst unsafe.Pointer, dstStride int, src unsafe.Pointer, srcStride, rows, width int)
	switch l {
	case cpu.AVX512:
		k32 = kernels[float32]{mr: 14, nr: 32, lanes: 16, tile: gemmTileAVX512F32,
			dot: gemmDotAVX512F32, dotM: 4}
		k64 = kernels[float64]{mr: 14, nr: 16, lanes: 16, tile: gemmTileAVX512F64}
		k32.transpose = func(dst []float32, ds int, src []float32, ss, rows, cols int) {
			packTransposeAVX512(unsafe.Pointer(&dst[0]), 4*ds, unsafe.Pointer(&src[0]), 4*ss, rows,
				cols)
		}
		pack = packCopyAVX512
	case cpu.AVX2:
		k32 = kernels[float32]{mr: 6, nr: 16, lanes: 8, tile: gemmTileAVX2F32,
			dot: gemmDotAVX2F32, dotM: 2}
		k64 = kernels[float64]{mr: 6, nr: 8, lanes: 8, tile: gemmTileAVX2F64}
		k32.transpose = func(dst []float32, ds int, src []float32, ss, rows, cols int) {
			packTransposeAVX2(unsafe.Pointer(&dst[0]), 4*ds, unsafe.Pointer(&src[0]), 4*ss, rows,
				cols)
		}
		pack = packCopyAVX2
	default:
		return k32, k64
	}

	k32.copy = func(dst []float32, ds int, src []float32, ss, rows, width int) {
		pack(unsafe.Pointer(&dst[0]), 4*ds, unsafe.Pointer(&src[0]), 4*ss, rows, width)
	}
	k64.copy = func(dst []float64, ds int, src []float64, ss, rows, width int) {
		pack(unsafe.Pointer(&dst[0]), 8*ds, unsafe.Pointer(&src[0]), 8*ss, rows, 2*width)
	}
	k64.transpose = transposePanel[float64]
	return k32, k64
}

// fmaPeakLoop returns a loop of multiply-adds and its number of float32 operations per round.
func fmaPeakLoop() (flops int, run func(rounds int)) {
	switch cpu.Level() {
	case cpu.AVX512:
		return 12 * 2 * 16, fmaLoopAVX512
	case cpu.AVX2:
		return 12 * 2 * 8, fmaLoopAVX2
	}
	return 0, nil
}
