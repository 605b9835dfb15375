package cpu

// SiLUMul computes h = silu(a) ⊙ b with silu(a) = a/(1+exp(−a)).
func SiLUMul[T Float](h, a, b []T) {
	Parallel(len(h), grain(4), func(lo, hi int) { siluMul(h[lo:hi], a[lo:hi], b[lo:hi]) })
}

// SiLUMulBackward computes h as SiLUMul does, and from the gradient dh of h those of a and b:
//
//	da = dh ⊙ b ⊙ σ(a)(1 + a(1−σ(a))),  db = dh ⊙ silu(a).
//
// da may be the memory of dh, since each element is read before it is written.
func SiLUMulBackward[T Float](h, da, db, dh, a, b []T) {
	Parallel(len(h), grain(8), func(lo, hi int) {
		siluMulBackward(h[lo:hi], da[lo:hi], db[lo:hi], dh[lo:hi], a[lo:hi], b[lo:hi])
	})
}
