package kasmina

import (
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// The kinds that mix the features of a chunk, LowRank and ChunkMLP, are computed for all rows of a
// tile together. With the rows X [n, C], the matrices V [m, C] and U [C, m], and f the identity or
// silu,
//
//	Z = X·Vᵀ,  H = a·f(Z),  Y = X + α·H·Uᵀ

// mixingScratch returns the number of elements of memory for n rows: in the backward pass two
// arrays of n·c and four of n·m elements.
func mixingScratch(n, c, size int) int { return 2*n*c + 4*n*(size/(2*c)) }

// take returns the first n elements of the scratch memory and removes them from it.
func take[T cpu.Float](scratch *[]T, n int) []T {
	s := (*scratch)[:n:n]
	*scratch = (*scratch)[n:]
	return s
}

// matrices returns V and U of a seed that mixes features, or their gradients, and m.
func (s *Seed[T]) matrices(p []T, c int) (v, u []T, m int) {
	m = s.size / (2 * c)
	return p[:m*c], p[m*c:], m
}

// mix computes rows [r0, r1) of y for a seed that blends.
func (k *Layer[T]) mix(y, x []T, r0, r1 int, s *Seed[T], scratch []T) {
	c, d, n := k.Chunk, k.Seeds*k.Chunk, r1-r0
	at := r0*d + s.Index*c
	v, u, m := s.matrices(s.w, c)
	in, out := take(&scratch, n*c), take(&scratch, n*c)
	for r := range n {
		xr, row := x[at+r*d:][:c], in[r*c:][:c]
		switch {
		case k.Stability == seed.Strict:
			k.clamp(row, xr, s)
		case k.Stability == seed.Adaptive:
			down := k.shrink(xr, s)
			for i, e := range xr {
				row[i] = down * e
			}
		default:
			copy(row, xr)
		}
	}

	if s.alpha != 0 { // otherwise t(x) does not affect the result, even if it is NaN
		z, h, scale := take(&scratch, n*m), take(&scratch, n*m), take(&scratch, n*m)
		gemm.MulSerial(false, true, n, m, c, 1, in, c, v, c, 0, z, m)
		for i := range scale {
			scale[i] = s.scale
		}
		if s.Kind == blueprints.ChunkMLP {
			vec.SiLUMul(h, z, scale)
		} else {
			for i, e := range z {
				h[i] = s.scale * e
			}
		}
		gemm.MulSerial(false, true, n, c, m, 1, h, m, u, m, 0, out, c)
	}

	for r := range n {
		yr, row, by := y[at+r*d:][:c], in[r*c:][:c], out[r*c:][:c]
		up := T(1)
		if k.Stability == seed.Adaptive {
			up = 1 / k.shrink(x[at+r*d:][:c], s)
		}
		for i, e := range row {
			if s.alpha != 0 {
				e += s.alpha * by[i]
			}
			yr[i] = up * e
		}
	}
}

// mixBackward replaces, in rows [r0, r1) of dx, the output gradient g of a seed by the gradient of
// its input x. Unless dp is nil, it adds the gradient of the weights to dp. It returns the gradient
// of the scale. With G = α·g, or g if the seed does not blend,
//
//	Q = G·U,  dZ = a·Q ⊙ f'(Z),  dx = g + dZ·V,  dV = dZᵀ·X,  dU = Gᵀ·H,  da = Σ Q ⊙ f(Z)
func (k *Layer[T]) mixBackward(dx, dp, x []T, r0, r1 int, s *Seed[T], scratch []T) (da float64) {
	c, d, n := k.Chunk, k.Seeds*k.Chunk, r1-r0
	at := r0*d + s.Index*c
	if s.alpha != 0 {
		v, u, m := s.matrices(s.w, c)
		in, g := take(&scratch, n*c), take(&scratch, n*c)
		for r := range n {
			xr, row, gr := x[at+r*d:][:c], in[r*c:][:c], g[r*c:][:c]
			if copy(row, xr); k.Stability == seed.Strict {
				k.clamp(row, xr, s)
			}
			for i, e := range dx[at+r*d:][:c] {
				gr[i] = s.alpha * e
			}
		}

		z, h, q, dz := take(&scratch, n*m), take(&scratch, n*m),
			take(&scratch, n*m), take(&scratch, n*m)
		gemm.MulSerial(false, true, n, m, c, 1, in, c, v, c, 0, z, m)
		gemm.MulSerial(false, false, n, m, c, 1, g, c, u, m, 0, q, m)
		da = s.hidden(h, dz, q, z)
		if s.Blend {
			gemm.MulSerial(false, false, n, c, m, 1, dz, m, v, c, 1, dx[at:], d)
		}
		if dp != nil {
			dv, du, _ := s.matrices(dp, c)
			gemm.MulSerial(true, false, m, c, n, 1, dz, m, in, c, 1, dv, c)
			gemm.MulSerial(true, false, c, m, n, 1, g, c, h, m, 1, du, m)
		}
	}

	if s.Blend && k.Stability == seed.Strict {
		for r := range n {
			dr := dx[at+r*d:][:c]
			for i, e := range x[at+r*d:][:c] {
				if k.bites(e, s) {
					dr[i] = 0
				}
			}
		}
	}

	return da
}

// hidden computes h = a·f(z) and dz = a·q ⊙ f'(z), and returns Σ q ⊙ f(z). It overwrites z with the
// terms of the sum.
func (s *Seed[T]) hidden(h, dz, q, z []T) (da float64) {
	if s.Kind == blueprints.ChunkMLP {
		for i := range dz {
			dz[i] = s.scale
		}
		vec.SiLUMulBackward(h, dz, z, q, z, dz)
	} else {
		for i, e := range z {
			h[i], dz[i], z[i] = s.scale*e, s.scale*q[i], q[i]*e
		}
	}

	for _, e := range z {
		da += float64(e)
	}

	return da
}
