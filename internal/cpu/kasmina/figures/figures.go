// Package figures sums up what a pass sees of a seed's chunk: moments, extremes, elements that are
// dead or not finite, and histograms of magnitudes.
package figures

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Moments are the count and mean of numbers and the sum of their squared deviations from it. They
// are only ever merged (Chan, Golub and LeVeque 1979), never formed as a difference of large sums.
type Moments struct{ N, Mean, M2 float64 }

// Merge makes m the moments of the numbers of m and o together.
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

// Add makes v one of m's numbers (Welford 1962).
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

// Chunk sum up what a pass has seen of one seed's chunk: its input in a forward pass, its output's
// gradient in a backward pass. Elements that are NaN or Inf are counted in Bad and left out of
// everything else.
type Chunk struct {
	Moments  Moments // relative to the chunk's anchor until finished
	Min, Max float64
	Dead     int // elements with |v| < ε
	Bad      int // NaN and Inf
	Norms    Moments
	Clipped  int             // rows whose gradient was clipped
	Rows     [PerRow]float64 // sum, or maximum, of the rows' figures, unless the reduction is exact
}

const PerRow = 6

// Health returns variance, mean, minimum, maximum, dead ratio and signal-to-noise ratio
// |mean|/sqrt(variance + ε).
func (f *Chunk) Health(reduce seed.Reduction, eps float64) [PerRow]float64 {
	if reduce != seed.Exact {
		return f.Rows
	}
	return Health(f.Moments, f.Min, f.Max, f.Dead, eps)
}

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

func Gradient(m Moments, lo, hi float64) [3]float64 {
	if m.N == 0 {
		return [3]float64{}
	}
	return [3]float64{Norm(m), m.Variance(), max(-lo, hi)}
}

// Norm is the square root of the sum of squares of the numbers of m.
func Norm(m Moments) float64 { return math.Sqrt(m.M2 + m.N*m.Mean*m.Mean) }

// New are the figures of nothing.
func New(reduce seed.Reduction) Chunk {
	f := Chunk{Min: math.Inf(1), Max: math.Inf(-1)}
	if reduce == seed.Max {
		for i := range f.Rows {
			f.Rows[i] = math.Inf(-1)
		}
	}
	return f
}

// AddRow adds what was seen in one row of the chunk, whose anchor is given.
func (f *Chunk) AddRow(row *Row, anchor float64) {
	m := row.Moments
	m.Mean += row.anchor - anchor
	f.Moments.Merge(m)
	f.Min, f.Max = min(f.Min, row.Low), max(f.Max, row.High)
	f.Dead += row.Dead
	f.Bad += row.Bad
}

// ReduceRow takes one row's figures into Rows.
func (f *Chunk) ReduceRow(reduce seed.Reduction, row []float64) {
	for i, v := range row {
		if reduce == seed.Mean {
			f.Rows[i] += v
		} else {
			f.Rows[i] = max(f.Rows[i], v)
		}
	}
}

// Merge adds the figures of other rows of the same chunk.
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

// Finish makes the figures absolute, with rows the number of rows that Rows sums up.
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

// Row is what was seen in one row of a chunk.
type Row struct {
	// one of the values, or 0: deviations from it keep their precision where values share leading
	// digits
	anchor    float64
	Moments   Moments // the mean is relative to the anchor
	Low, High float64
	Dead, Bad int
}

// Scan looks at one row of a chunk. Branches in its loops are all but never taken; sums run in four
// lanes, which do not wait for each other.
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

// scanFinite is scan for a row with NaN or Inf in it, or with deviations that overflow.
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

// Absolute returns the moments with the true mean.
func (s *Row) Absolute() Moments {
	return Moments{s.Moments.N, s.anchor + s.Moments.Mean, s.Moments.M2}
}

// CountBad returns how many elements are NaN or Inf.
func CountBad[T cpu.Float](v []T) (n int) {
	for _, e := range v {
		if e-e != 0 {
			n++
		}
	}
	return n
}

// Anchor returns an anchor, given an element.
func Anchor[T cpu.Float](e T) float64 {
	if e-e != 0 {
		return 0
	}
	return float64(e)
}

// Exponents is the length of a histogram of magnitudes: bin i counts 2^(i−24) ≤ |v| < 2^(i−23), bin
// 0 everything smaller too, the last bin everything larger.
const Exponents = 40

// AddExponents counts the finite elements of v by their magnitude.
func AddExponents[T cpu.Float](h *[Exponents]uint32, v []T) {
	for _, e := range v {
		exp := int(math.Float64bits(float64(e))>>52&0x7ff) - 1023
		if exp != 1024 {
			h[min(max(exp+24, 0), Exponents-1)]++
		}
	}
}

// Shifted returns the moments of n numbers, given the sums of their deviations from an anchor and
// of the squares of these. It loses no more than a factor of n in precision if the anchor is one of
// the numbers.
func Shifted(anchor, sum, square float64, n int) Moments {
	if n == 0 {
		return Moments{}
	}
	mean := sum / float64(n)
	return Moments{float64(n), anchor + mean, max(0, square-sum*mean)}
}
