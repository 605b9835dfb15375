package gemm

import "github.com/kasmina-go/kasmina/internal/cpu"

// portableKernels returns the kernels in plain Go, which serve other platforms and older CPUs, and
// as the reference for tests of the assembly.
func portableKernels[T cpu.Float]() kernels[T] {
	const size = 4
	return kernels[T]{mr: size, nr: size, lanes: size, tile: func(t *tile[T]) {
		t.sweep(size, tilePortable[T])
	},
		copy: copyPanel[T], transpose: transposePanel[T]}
}

// tilePortable computes C = alpha·A·B + beta·C + D for a tile of at most 4×4. The sums of a full
// tile are sixteen variables, so that the compiler can keep them in registers.
func tilePortable[T cpu.Float](t *tile[T]) {
	var acc [4][4]T
	if t.m == 4 && t.n == 4 {
		acc = fullTile(t.k, t.a, t.rs, t.cs, t.b, t.bs)
	} else {
		for p := range t.k {
			b := t.b[p*t.bs : p*t.bs+t.n]
			for i := range t.m {
				a := t.a[i*t.rs+p*t.cs]
				for j, b := range b {
					acc[i][j] += a * b
				}
			}
		}
	}

	for i := range t.m {
		c := t.c[i*t.ldc : i*t.ldc+t.n]
		for j := range c {
			if t.beta == 0 {
				c[j] = t.alpha * acc[i][j]
			} else {
				c[j] = t.alpha*acc[i][j] + t.beta*c[j]
			}
			if t.d != nil {
				c[j] += t.d[i*t.ldd+j]
			}
		}
	}
}

// fullTile returns the sums of a 4×4 tile.
func fullTile[T cpu.Float](k int, a []T, rs, cs int, b []T, bs int) [4][4]T {
	var c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23, c30, c31, c32, c33 T
	for p := range k {
		v := b[p*bs : p*bs+4 : p*bs+4]
		b0, b1, b2, b3 := v[0], v[1], v[2], v[3]
		x := a[p*cs]
		c00, c01, c02, c03 = c00+x*b0, c01+x*b1, c02+x*b2, c03+x*b3
		x = a[p*cs+rs]
		c10, c11, c12, c13 = c10+x*b0, c11+x*b1, c12+x*b2, c13+x*b3
		x = a[p*cs+2*rs]
		c20, c21, c22, c23 = c20+x*b0, c21+x*b1, c22+x*b2, c23+x*b3
		x = a[p*cs+3*rs]
		c30, c31, c32, c33 = c30+x*b0, c31+x*b1, c32+x*b2, c33+x*b3
	}

	return [4][4]T{{c00, c01, c02, c03}, {c10, c11, c12, c13},
		{c20, c21, c22, c23}, {c30, c31, c32, c33}}
}

// copyPanel sets dst[r·ds + c] = src[r·ss + c] for rows × width elements.
func copyPanel[T cpu.Float](dst []T, ds int, src []T, ss, rows, width int) {
	for r := range rows {
		copy(dst[r*ds:r*ds+width], src[r*ss:r*ss+width])
	}
}

// transposePanel sets dst[c·ds + r] = src[r·ss + c] for rows × cols elements.
func transposePanel[T cpu.Float](dst []T, ds int, src []T, ss, rows, cols int) {
	for r := range rows {
		for c, x := range src[r*ss : r*ss+cols] {
			dst[c*ds+r] = x
		}
	}
}
