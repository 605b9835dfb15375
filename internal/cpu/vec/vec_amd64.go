package vec

//go:generate go -C ../asm run . -part vec -pkg vec -out ../vec/vec_amd64.s

// The kernels of vec_amd64.s, which the program in internal/cpu/asm generates.

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
