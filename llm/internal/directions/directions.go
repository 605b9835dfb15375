// Package directions finds the dominant directions of gradients.
package directions

import (
	"math"
	"math/rand/v2"

	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// A Gradient holds the dominant directions of a weight's gradient.
type Gradient struct {
	Norm       float64     // sqrt(Σ g²/n) over its n numbers
	Sigma      []float64   // the largest singular values, in order
	Directions [][]float32 // unit right singular vector for each value
}

// extraDirections is the number of directions iterated in addition to the requested ones, and
// listenTurns is the number of multiplications by Gᵀ·G. Larger numbers bring the directions closer to
// the singular vectors.
const extraDirections, listenTurns = 8, 2

// Of returns up to rank dominant directions of an out×in gradient. Equal gradients give
// bit-identical directions. (Halko, Martinsson and Tropp, "Finding Structure with Randomness", 2011.)
func Of(gradient []float32, out, in, rank int) (h Gradient) {
	square := 0.0
	for _, g := range gradient {
		square += float64(g) * float64(g)
	}

	h.Norm = math.Sqrt(square / float64(max(1, len(gradient))))
	rank = min(rank, out, in)
	n := min(rank+extraDirections, out, in)
	if rank < 1 || !(square > 0) || math.IsInf(square, 0) {
		return h
	}

	r := rand.New(rand.NewPCG(uint64(out), uint64(in)))
	q, y := make([]float32, in*n), make([]float32, out*n) // columns are directions
	for i := range y {
		y[i] = float32(r.NormFloat64())
	}

	for turn := range listenTurns + 1 {
		if turn > 0 {
			gemm.Mul(false, false, out, n, in, 1, gradient, in, q, n, 0, y, n)
			Orthonormal(y, out, n)
		}
		gemm.Mul(true, false, in, n, out, 1, gradient, in, y, n, 0, q, n)
		Orthonormal(q, in, n)
	}

	gemm.Mul(false, false, out, n, in, 1, gradient, in, q, n, 0, y, n) // G·Q; its right singular vectors rotate Q
	values, vectors := Eigen(rowProducts(y, out, n), n)
	for k := range rank {
		if !(values[k] > 0) {
			break
		}
		d := make([]float32, in)
		for i := range d {
			sum := 0.0
			for j := range n {
				sum += float64(q[i*n+j]) * vectors[j*n+k]
			}
			d[i] = float32(sum)
		}
		h.Sigma, h.Directions = append(h.Sigma, math.Sqrt(values[k])), append(h.Directions, d)
	}

	return h
}

// Orthonormal makes the n columns of x orthonormal. It orthogonalizes each column against the earlier
// ones twice, to compensate for rounding. A column that depends on the earlier ones becomes 0.
func Orthonormal(x []float32, rows, n int) {
	column, other := make([]float64, rows), make([]float64, rows)
	read := func(c []float64, j int) {
		for i := range c {
			c[i] = float64(x[i*n+j])
		}
	}
	for j := range n {
		read(column, j)
		before := dot(column, column)
		for range 2 {
			for k := range j {
				read(other, k)
				along := dot(column, other)
				for i, v := range other {
					column[i] -= along * v
				}
			}
		}
		length, factor := dot(column, column), 0.0
		if length > 1e-12*before {
			factor = 1 / math.Sqrt(length)
		}
		for i, v := range column {
			x[i*n+j] = float32(factor * v)
		}
	}
}

func dot(a, b []float64) (sum float64) {
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

// rowProducts returns yᵀ·y for the n columns of y.
func rowProducts(y []float32, rows, n int) []float64 {
	p := make([]float64, n*n)
	for i := range rows {
		row := y[i*n:][:n]
		for j, a := range row {
			for k, b := range row {
				p[j*n+k] += float64(a) * float64(b)
			}
		}
	}
	return p
}

// Eigen returns the eigenvalues of a symmetric n×n matrix, the largest first, and the eigenvectors
// as the columns of a matrix. It overwrites a. (Jacobi, 1846.)
func Eigen(a []float64, n int) (values, vectors []float64) {
	v := make([]float64, n*n)
	for i := range n {
		v[i*n+i] = 1
	}

	const sweeps = 32 // enough for convergence in float64
	for range sweeps {
		for p := range n {
			for q := p + 1; q < n; q++ {
				rotateJacobi(a, v, n, p, q)
			}
		}
	}

	order := make([]int, n)
	for i := range order {
		order[i] = i
		for j := i; j > 0 && a[order[j]*n+order[j]] > a[order[j-1]*n+order[j-1]]; j-- {
			order[j], order[j-1] = order[j-1], order[j]
		}
	}

	values, vectors = make([]float64, n), make([]float64, n*n)
	for k, from := range order {
		values[k] = a[from*n+from]
		for i := range n {
			vectors[i*n+k] = v[i*n+from]
		}
	}

	return values, vectors
}

// rotateJacobi zeroes a[p][q] by rotating rows and columns p and q, and applies the rotation to v.
func rotateJacobi(a, v []float64, n, p, q int) {
	if a[p*n+q] == 0 {
		return
	}

	theta := (a[q*n+q] - a[p*n+p]) / (2 * a[p*n+q])
	t := 1 / (math.Abs(theta) + math.Hypot(theta, 1))
	if theta < 0 {
		t = -t
	}

	c := 1 / math.Hypot(t, 1)
	s := t * c
	for k := range n {
		x, y := a[k*n+p], a[k*n+q]
		a[k*n+p], a[k*n+q] = c*x-s*y, s*x+c*y
	}

	for k := range n {
		x, y := a[p*n+k], a[q*n+k]
		a[p*n+k], a[q*n+k] = c*x-s*y, s*x+c*y
		x, y = v[k*n+p], v[k*n+q]
		v[k*n+p], v[k*n+q] = c*x-s*y, s*x+c*y
	}
}
