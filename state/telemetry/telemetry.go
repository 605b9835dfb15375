// Package telemetry has what is measured of seeds: when, in which figures, and how the figures of
// several passes become one. All of it is pure: package state keeps the figures of seeds.
package telemetry

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Mode says when figures are collected.
type Mode uint8

// The telemetry modes.
const (
	Production Mode = iota // every pass, every seed
	Sampling               // every n-th pass, or a share of the seeds, or both
	Debug                  // as Production, with a histogram of every seed's activations
	Off                    // nothing; NaN and Inf are still counted
)

var modeNames = [...]string{"Production", "Sampling", "Debug", "Off"}

// String returns the mode's name.
func (m Mode) String() string { return enum.Name(m, "TelemetryMode", modeNames[:]) }

// ModeByName returns the mode with the given name.
func ModeByName(name string) (Mode, error) {
	i := slices.Index(modeNames[:], name)
	if i < 0 {
		return 0, fmt.Errorf("the telemetry mode is %.40q, want one of %q", name, modeNames)
	}
	return Mode(i), nil
}

// Reduction says how the figures of a chunk's rows become those of the seed.
type Reduction uint8

// The reductions.
const (
	// the exact figures over all rows × C elements, by merging partial moments
	Hierarchical = Reduction(seed.Exact)
	MeanOfRows   = Reduction(seed.Mean) // the average of the figures of the rows
	MaxOfRows    = Reduction(seed.Max)  // the largest figure of any row
)

var reductionNames = [...]string{"Hierarchical", "MeanOfRows", "MaxOfRows"}

// String returns the reduction's name.
func (r Reduction) String() string { return enum.Name(r, "Reduction", reductionNames[:]) }

// ReductionByName returns the reduction with the given name.
func ReductionByName(name string) (Reduction, error) {
	i := slices.Index(reductionNames[:], name)
	if i < 0 {
		return 0, fmt.Errorf("the telemetry reduction is %.40q, want one of %q", name,
			reductionNames)
	}
	return Reduction(i), nil
}

// Config says what is measured.
type Config struct {
	Mode      Mode      `json:"mode"`
	Reduction Reduction `json:"reduction"`
	// Sampling: measure every n-th pass; 0 and 1 mean every pass
	Every int `json:"every"`
	// Sampling: measure this share of the seeds, in turn; 0 and 1 mean all
	Share float64 `json:"share"`
}

// String describes the configuration in a few words.
func (c Config) String() string {
	s := fmt.Sprintf("in mode %v", c.Mode)
	if c.Mode == Sampling && c.Every > 1 {
		s += fmt.Sprintf(", one pass in %d", c.Every)
	}
	if c.Mode == Sampling && c.Share > 0 && c.Share < 1 {
		s += fmt.Sprintf(", %.3g of the seeds", c.Share)
	}
	if c.Reduction != Hierarchical {
		s += fmt.Sprintf(", reduced by %v", c.Reduction)
	}
	return s
}

// Check returns an error unless the fields are in range.
func (c Config) Check() error {
	switch {
	case int(c.Mode) >= len(modeNames):
		return fmt.Errorf("telemetry Mode is %d, want Production, Sampling, Debug or Off", c.Mode)
	case int(c.Reduction) >= len(reductionNames):
		return fmt.Errorf("telemetry Reduction is %d, want Hierarchical, MeanOfRows or MaxOfRows",
			c.Reduction)
	case c.Every < 0:
		return fmt.Errorf("telemetry Every is %d, want at least 0", c.Every)
	case !(c.Share >= 0 && c.Share <= 1):
		return fmt.Errorf("telemetry Share is %v, want a number from 0 to 1", c.Share)
	}
	return nil
}

// Watches reports whether a seed's figures are collected in the given pass. The sampled seeds of
// one pass are spread evenly over the lattice. They move on by one share from pass to pass, so that
// all get their turn.
func (c Config) Watches(seed int, step uint64) bool {
	switch c.Mode {
	case Off:
		return false
	case Sampling:
		if c.Every > 1 && step%uint64(c.Every) != 0 {
			return false
		}
		if c.Share > 0 && c.Share < 1 {
			const unit = 1 << 32
			share, turn := max(1, uint64(c.Share*unit)), step/uint64(max(1, c.Every))
			return (uint64(seed)+turn)*share%unit < share
		}
	}
	return true
}

// Health are the six figures of a seed's input chunk, before any clamp. Non-finite elements are
// counted, not included. In a state.Report, Variance and DeadRatio have float32 precision and the
// others that of a bfloat16, 2⁻⁹, over the same range.
type Health struct {
	Variance  float64 // mean squared deviation from the mean
	Mean      float64
	Min, Max  float64
	DeadRatio float64 // share of elements with |x| < ε
	SNR       float64 // signal-to-noise ratio |mean|/sqrt(variance + ε)
}

// Gradient are the three figures of the gradient of a seed's output chunk, before any clipping. In
// a state.Report, Norm has float32 precision and the others that of a bfloat16, 2⁻⁹, over the same
// range.
type Gradient struct {
	Norm     float64 // square root of the sum of squares
	Variance float64
	Max      float64 // largest magnitude
}

// Moments sum up numbers: how many, their mean, and the mean squared deviation from it.
type Moments struct{ Count, Mean, Variance float64 }

// Valid reports whether numbers can have these moments.
func (m Moments) Valid() bool {
	return m.Count >= 0 && m.Variance >= 0 && m.Count-m.Count == 0 &&
		m.Mean-m.Mean == 0 && m.Variance-m.Variance == 0
}

// Merge returns the moments of the numbers of m and n together (Chan, Golub and LeVeque, "Updating
// Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
func (m Moments) Merge(n Moments) Moments {
	if n.Count == 0 {
		return m
	}
	if m.Count == 0 {
		return n
	}
	count := m.Count + n.Count
	f, d := n.Count/count, n.Mean-m.Mean
	return Moments{count, m.Mean + d*f, m.Variance*(1-f) + n.Variance*f + d*d*f*(1-f)}
}

// HistogramBins is the length of a histogram of activations. Bin i counts the elements with
// 2^(i−24) ≤ |x| < 2^(i−23); bin 0 also holds all smaller ones and the last bin all larger ones.
const HistogramBins = 40

// Histogram counts elements by their magnitude; see [HistogramBins].
type Histogram [HistogramBins]uint32

// HealthSample is what a forward pass has measured of one seed.
type HealthSample struct {
	Health Health // reduced as state.Pass.Telemetry says
	// of all finite elements, whatever the reduction; Count 0 when not measured
	Moments   Moments
	NonFinite int        // elements that are NaN or Inf
	Histogram *Histogram // in mode Debug; nil otherwise. It is copied.
}

// GradientSample is what a backward pass has measured of one seed.
type GradientSample struct {
	Gradient  Gradient // reduced as state.Pass.Telemetry says
	Norms     Moments  // of the rows' gradient norms; Count 0 when not measured
	NonFinite int
	Clipped   int // rows whose gradient was clipped
}

// Drift is the relative change of a chunk's moments. It is the change of its root mean square or of
// its mean, whichever is larger, relative to the former root mean square.
func Drift(mean0, variance0, mean1, variance1 float64) float64 {
	rms0, rms1 := math.Sqrt(mean0*mean0+variance0), math.Sqrt(mean1*mean1+variance1)
	if rms0 == 0 {
		return 0
	}
	return math.Max(math.Abs(rms1-rms0), math.Abs(mean1-mean0)) / rms0
}

// Timing is what was measured of the time that one run of a layer took, forward or backward. Who
// executes the layer may measure it as seldom as it likes.
type Timing struct {
	Kernel    time.Duration // of the layer's arithmetic alone
	Telemetry time.Duration // by how much telemetry and the lattice's bookkeeping prolong it
	Bytes     int64         // read and written by the arithmetic at least, if caches hold nothing
}
