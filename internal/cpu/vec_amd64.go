package cpu

import (
	"unsafe"
)

//go:generate go -C asm run . -part vec -pkg cpu -out ../vec_amd64.s

// The kernels of vec_amd64.s, which the program in asm/ writes.

//go:noescape
func expSubAVX512(dst, src *float32, n int, shift float32) float32

//go:noescape
func expSubAVX2(dst, src *float32, n int, shift float32) float32

//go:noescape
func maximumAVX512(src *float32, n int) float32

//go:noescape
func maximumAVX2(src *float32, n int) float32

//go:noescape
func siluMulAVX512(h, a, b *float32, n int)

//go:noescape
func siluMulAVX2(h, a, b *float32, n int)

//go:noescape
func siluMulBackwardAVX512(h, da, db, dh, a, b *float32, n int)

//go:noescape
func siluMulBackwardAVX2(h, da, db, dh, a, b *float32, n int)

func expSub32(dst, src []float32, shift float32) float32 {
	switch level {
	case avx512:
		return expSubAVX512(unsafe.SliceData(dst), unsafe.SliceData(src), len(src), shift)
	case avx2:
		return expSubAVX2(unsafe.SliceData(dst), unsafe.SliceData(src), len(src), shift)
	}
	return expSubPortable(dst, src, shift)
}

func maximum32(x []float32) float32 {
	switch level {
	case avx512:
		return maximumAVX512(unsafe.SliceData(x), len(x))
	case avx2:
		return maximumAVX2(unsafe.SliceData(x), len(x))
	}
	return maximumPortable(x)
}

func siluMul32(h, a, b []float32) {
	switch level {
	case avx512:
		siluMulAVX512(unsafe.SliceData(h), unsafe.SliceData(a), unsafe.SliceData(b), len(h))
	case avx2:
		siluMulAVX2(unsafe.SliceData(h), unsafe.SliceData(a), unsafe.SliceData(b), len(h))
	default:
		siluMulPortable(h, a, b)
	}
}

func siluMulBackward32(h, da, db, dh, a, b []float32) {
	switch level {
	case avx512:
		siluMulBackwardAVX512(unsafe.SliceData(h), unsafe.SliceData(da), unsafe.SliceData(db), unsafe.SliceData(dh),
			unsafe.SliceData(a), unsafe.SliceData(b), len(h))
	case avx2:
		siluMulBackwardAVX2(unsafe.SliceData(h), unsafe.SliceData(da), unsafe.SliceData(db), unsafe.SliceData(dh),
			unsafe.SliceData(a), unsafe.SliceData(b), len(h))
	default:
		siluMulBackwardPortable(h, da, db, dh, a, b)
	}
}
