// Package figures summarizes the elements of a seed's chunk in one pass. The figures are moments,
// extremes, counts of dead and non-finite elements, and histograms of magnitudes.
package figures

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Moments are the count and mean of numbers and the sum of their squared deviations from the mean.
// They are always merged (Chan, Golub and LeVeque, 1979) and never computed as a difference of
// large sums.
type Moments struct{ N, Mean, M2 float64 }

// Merge sets m to the moments of the union of the numbers of m and o.
func (m *Moments) Merge(o Moments) {
	if o.N == 0 {
		return
	}
	n := m.N + o.N
	d := o.Mean - m.Mean
	m.Mean += d * (o.N / n)
	m.M2 += o.M2 + d*d*(m.N*o.N/n)
	m.N = n
}

// Add adds v to the numbers (Welford, 1962).
func (m *Moments) Add(v float64) {
	m.N++
	d := v - m.Mean
	m.Mean += d / m.N
	m.M2 += d * (v - m.Mean)
}

// Variance returns the mean squared deviation.
func (m Moments) Variance() float64 {
	if m.N == 0 {
		return 0
	}
	return m.M2 / m.N
}

// Chunk summarizes one seed's chunk in a pass: its input in a forward pass, or its output gradient in
// a backward pass. NaN and Inf are counted in Bad and excluded from all other figures.
type Chunk struct {
	Moments  Moments // relative to the chunk's anchor until Finish
	Min, Max float64
	Dead     int // elements with |v| < ε
	Bad      int // number of NaN and Inf
	Norms    Moments
	Clipped  int             // number of rows with a clipped gradient
	Rows     [PerRow]float64 // unless the reduction is exact: sum or maximum of the rows' figures
}

// PerRow is the number of figures of a row.
const PerRow = 6

// Health returns variance, mean, minimum, maximum, dead ratio and the signal-to-noise ratio
// |mean|/sqrt(variance + ε).
func (f *Chunk) Health(reduce seed.Reduction, eps float64) [PerRow]float64 {
	if reduce != seed.Exact {
		return f.Rows
	}
	return Health(f.Moments, f.Min, f.Max, f.Dead, eps)
}

// Health returns the health figures for the given summary of a chunk.
func Health(m Moments, lo, hi float64, dead int, eps float64) [PerRow]float64 {
	if m.N == 0 {
		return [PerRow]float64{}
	}
	v := m.Variance()
	return [PerRow]float64{v, m.Mean, lo, hi, float64(dead) / m.N,
		math.Abs(m.Mean) / math.Sqrt(v+eps)}
}

// Gradient returns the norm, the variance and the largest magnitude.
func (f *Chunk) Gradient(reduce seed.Reduction) [3]float64 {
	if reduce != seed.Exact {
		return [3]float64(f.Rows[:3])
	}
	return Gradient(f.Moments, f.Min, f.Max)
}

// Gradient returns the gradient figures for the given summary of a chunk.
func Gradient(m Moments, lo, hi float64) [3]float64 {
	if m.N == 0 {
		return [3]float64{}
	}
	return [3]float64{Norm(m), m.Variance(), max(-lo, hi)}
}

// Norm returns the square root of the sum of the squared numbers.
func Norm(m Moments) float64 { return math.Sqrt(m.M2 + m.N*m.Mean*m.Mean) }

// New returns the summary of an empty chunk.
func New(reduce seed.Reduction) Chunk {
	f := Chunk{Min: math.Inf(1), Max: math.Inf(-1)}
	if reduce == seed.Max {
		for i := range f.Rows {
			f.Rows[i] = math.Inf(-1)
		}
	}
	return f
}

// AddRow adds the summary of one row. anchor is the anchor of the chunk.
func (f *Chunk) AddRow(row *Row, anchor float64) {
	m := row.Moments
	m.Mean += row.anchor - anchor
	f.Moments.Merge(m)
	f.Min, f.Max = min(f.Min, row.Low), max(f.Max, row.High)
	f.Dead += row.Dead
	f.Bad += row.Bad
}

// ReduceRow adds the figures of one row to Rows.
func (f *Chunk) ReduceRow(reduce seed.Reduction, row []float64) {
	for i, v := range row {
		if reduce == seed.Mean {
			f.Rows[i] += v
		} else {
			f.Rows[i] = max(f.Rows[i], v)
		}
	}
}

// Merge adds the summary of other rows of the same chunk.
func (f *Chunk) Merge(o *Chunk, reduce seed.Reduction) {
	f.Moments.Merge(o.Moments)
	f.Norms.Merge(o.Norms)
	f.Min, f.Max = min(f.Min, o.Min), max(f.Max, o.Max)
	f.Dead += o.Dead
	f.Bad += o.Bad
	f.Clipped += o.Clipped
	if reduce != seed.Exact {
		f.ReduceRow(reduce, o.Rows[:])
	}
}

// Finish converts the figures from relative to absolute ones, and sums of rows to means.
func (f *Chunk) Finish(reduce seed.Reduction, anchor float64) {
	rows := f.Norms.N
	f.Moments.Mean += anchor
	if f.Moments.N == 0 {
		f.Moments, f.Min, f.Max = Moments{}, 0, 0
	}

	for i := range f.Rows {
		switch {
		case rows == 0:
			f.Rows[i] = 0
		case reduce == seed.Mean:
			f.Rows[i] /= rows
		}
	}
}

// Row summarizes one row of a chunk.
type Row struct {
	// anchor is one of the values, or 0. Deviations from it retain their precision even if the values
	// share leading digits.
	anchor    float64
	Moments   Moments // the mean is relative to the anchor
	Low, High float64
	Dead, Bad int
}

// Scan summarizes one row of a chunk. Branches in its loops are rarely taken, and sums use four
// independent lanes.
func Scan[T cpu.Float](v []T, eps float64) Row {
	s := Row{anchor: Anchor(v[0])}
	k, first := s.anchor, float64(v[0])
	lo, hi := first, first
	var s0, s1, s2, s3 float64
	lanes := len(v) &^ 3
	for i := 0; i < lanes; i += 4 {
		q := v[i : i+4 : i+4]
		s0 += float64(q[0]) - k
		s1 += float64(q[1]) - k
		s2 += float64(q[2]) - k
		s3 += float64(q[3]) - k
	}

	for _, e := range v[lanes:] {
		s0 += float64(e) - k
	}

	sum := (s0 + s1) + (s2 + s3)
	if sum-sum != 0 {
		return scanFinite(v, eps)
	}

	for _, e := range v {
		e := float64(e)
		if e < lo {
			lo = e
		}
		if e > hi {
			hi = e
		}
		if math.Abs(e) < eps {
			s.Dead++
		}
	}

	s.Low, s.High = lo, hi
	s.Moments.N = float64(len(v))
	s.Moments.Mean = sum / s.Moments.N
	s0, s1, s2, s3 = 0, 0, 0, 0
	for i := 0; i < lanes; i += 4 {
		q := v[i : i+4 : i+4]
		d0, d1 := float64(q[0])-k-s.Moments.Mean, float64(q[1])-k-s.Moments.Mean
		d2, d3 := float64(q[2])-k-s.Moments.Mean, float64(q[3])-k-s.Moments.Mean
		s0 += d0 * d0
		s1 += d1 * d1
		s2 += d2 * d2
		s3 += d3 * d3
	}

	for _, e := range v[lanes:] {
		d := float64(e) - k - s.Moments.Mean
		s0 += d * d
	}

	s.Moments.M2 = (s0 + s1) + (s2 + s3)
	return s
}

// scanFinite is like Scan, for rows that contain NaN or Inf or have overflowing deviations.
func scanFinite[T cpu.Float](v []T, eps float64) Row {
	s := Row{Low: math.Inf(1), High: math.Inf(-1)}
	for _, e := range v {
		e := float64(e)
		if e-e != 0 {
			s.Bad++
			continue
		}
		s.Moments.Add(e)
		s.Low, s.High = min(s.Low, e), max(s.High, e)
		if math.Abs(e) < eps {
			s.Dead++
		}
	}

	return s
}

// Absolute returns the moments with an absolute mean.
func (s *Row) Absolute() Moments {
	return Moments{s.Moments.N, s.anchor + s.Moments.Mean, s.Moments.M2}
}

// CountBad returns the number of elements that are NaN or Inf.
func CountBad[T cpu.Float](v []T) (n int) {
	for _, e := range v {
		if e-e != 0 {
			n++
		}
	}
	return n
}

// Anchor returns the anchor for a given element.
func Anchor[T cpu.Float](e T) float64 {
	if e-e != 0 {
		return 0
	}
	return float64(e)
}

// Exponents is the length of a histogram of magnitudes. Bin i counts 2^(i−24) ≤ |v| < 2^(i−23); bin
// 0 includes everything smaller and the last bin everything larger.
const Exponents = 40

// AddExponents adds the finite elements of v to a histogram of magnitudes.
func AddExponents[T cpu.Float](h *[Exponents]uint32, v []T) {
	for _, e := range v {
		exp := int(math.Float64bits(float64(e))>>52&0x7ff) - 1023
		if exp != 1024 {
			h[min(max(exp+24, 0), Exponents-1)]++
		}
	}
}

// Shifted returns the moments of n numbers from the sums of their deviations from an anchor and of
// the squared deviations. If the anchor is one of the numbers, it loses at most a factor of n in
// precision.
func Shifted(anchor, sum, square float64, n int) Moments {
	if n == 0 {
		return Moments{}
	}
	mean := sum / float64(n)
	return Moments{float64(n), anchor + mean, max(0, square-sum*mean)}
}
