package cpu

// RoPE rotates the pairs (i, i+h) of every head, h = headDim/2, by the angle whose cosine and sine stand at
// [position·h + i] in the tables: (a, b) becomes (a·cos − b·sin, b·cos + a·sin). x and y are rows×(heads·headDim), row r has
// position r mod seq. With inverse the rotation is undone, which is also its gradient.
func RoPE[T Float](y, x, cos, sin []T, seq, heads, headDim int, inverse bool) {
	d, h := heads*headDim, headDim/2
	sign := T(1)
	if inverse {
		sign = -1
	}
	Parallel(len(x)/d, grain(4*d), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			c, s := cos[r%seq*h:][:h], sin[r%seq*h:][:h]
			for o := r * d; o < (r+1)*d; o += headDim {
				xa, xb, ya, yb := x[o:][:h], x[o+h:][:h], y[o:][:h], y[o+h:][:h]
				for i, a := range xa {
					b, si := xb[i], sign*s[i]
					ya[i] = a*c[i] - b*si
					yb[i] = b*c[i] + a*si
				}
			}
		}
	})
}
