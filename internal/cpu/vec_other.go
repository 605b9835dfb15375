//go:build !amd64

package cpu

func expSub32(dst, src []float32, shift float32) float32 { return expSubPortable(dst, src, shift) }
func maximum32(x []float32) float32                      { return maximumPortable(x) }
func siluMul32(h, a, b []float32)                        { siluMulPortable(h, a, b) }
func siluMulBackward32(h, da, db, dh, a, b []float32)    { siluMulBackwardPortable(h, da, db, dh, a, b) }
func rowKernelsFor(isa) *rowKernels                      { return nil }
