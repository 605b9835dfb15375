// Package telemetry defines the figures measured on seeds, the settings that determine when they are
// measured, and the arithmetic that combines the figures of several passes. All functions are pure;
// package state holds the figures of seeds.
package telemetry

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Mode determines when figures are collected.
type Mode uint8

// Telemetry modes.
const (
	Production Mode = iota // every pass, every seed
	Sampling               // every n-th pass, or a share of the seeds, or both
	Debug                  // Production, plus a histogram of every seed's activations
	Off                    // nothing is measured; NaN and Inf are still counted
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

// Reduction determines how the figures of a chunk's rows are combined.
type Reduction uint8

// Reductions of rows.
const (
	// Hierarchical computes the exact figures over all rows × C elements, by merging partial
	// moments.
	Hierarchical = Reduction(seed.Exact)
	MeanOfRows   = Reduction(seed.Mean) // average of the rows' figures
	MaxOfRows    = Reduction(seed.Max)  // largest of the rows' figures
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

// Config configures telemetry.
type Config struct {
	Mode      Mode      `json:"mode"`
	Reduction Reduction `json:"reduction"`
	// Every makes mode Sampling measure only every n-th pass, where n is Every. 0 and 1 mean every
	// pass.
	Every int `json:"every"`
	// Share makes mode Sampling measure only this share of the seeds in a pass, with all seeds
	// taking turns. 0 and 1 mean all seeds.
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

// Check returns an error that names the first field out of range.
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

// Watches reports whether a seed's figures are collected in the given pass. The seeds sampled in a
// pass are spread evenly over the lattice and shift by one share from pass to pass, so that every
// seed gets its turn.
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

// Health holds six figures of a seed's input chunk before any clamp. Non-finite elements are excluded
// and counted separately. In a state.Report, Variance and DeadRatio are as precise as float32,
// whereas the other figures have the precision (2⁻⁹) and range of bfloat16.
type Health struct {
	Variance  float64 // mean squared deviation from the mean
	Mean      float64
	Min, Max  float64
	DeadRatio float64 // fraction of elements with |x| < ε
	SNR       float64 // signal-to-noise ratio |mean|/sqrt(variance + ε)
}

// Gradient holds three figures of the gradient of a seed's output chunk before any clipping. In a
// state.Report, Norm is as precise as float32, whereas the others have the precision (2⁻⁹) and range
// of bfloat16.
type Gradient struct {
	Norm     float64 // square root of the sum of squares
	Variance float64
	Max      float64 // largest magnitude
}

// Moments are the count, mean and variance (mean squared deviation from the mean) of a set of
// numbers.
type Moments struct{ Count, Mean, Variance float64 }

// Valid reports whether these moments are possible for a set of finite numbers.
func (m Moments) Valid() bool {
	return m.Count >= 0 && m.Variance >= 0 && m.Count-m.Count == 0 &&
		m.Mean-m.Mean == 0 && m.Variance-m.Variance == 0
}

// Merge returns the moments of the union of two sets of numbers (Chan, Golub and LeVeque, "Updating
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

// HistogramBins is the number of bins of a histogram of activations. Bin i counts elements with
// 2^(i−24) ≤ |x| < 2^(i−23); bin 0 includes all smaller ones and the last bin all larger ones.
const HistogramBins = 40

// Histogram counts elements by their magnitude; see [HistogramBins].
type Histogram [HistogramBins]uint32

// HealthSample is the measurement of one seed in a forward pass.
type HealthSample struct {
	Health Health // reduced according to state.Pass.Telemetry
	// Moments of all finite elements, regardless of the reduction; Count 0 if not measured.
	Moments   Moments
	NonFinite int        // number of NaN and Inf elements
	Histogram *Histogram // in mode Debug; otherwise nil. It is copied.
}

// GradientSample is the measurement of one seed in a backward pass.
type GradientSample struct {
	Gradient  Gradient // reduced according to state.Pass.Telemetry
	Norms     Moments  // moments of the rows' gradient norms; Count 0 if not measured
	NonFinite int
	Clipped   int // number of rows with a clipped gradient
}

// Drift returns the relative change of a chunk's moments: the change of its root mean square or of
// its mean, whichever is larger, divided by the former root mean square.
func Drift(mean0, variance0, mean1, variance1 float64) float64 {
	rms0, rms1 := math.Sqrt(mean0*mean0+variance0), math.Sqrt(mean1*mean1+variance1)
	if rms0 == 0 {
		return 0
	}
	return math.Max(math.Abs(rms1-rms0), math.Abs(mean1-mean0)) / rms0
}

// Timing is the measured time of one run of a layer, forward or backward. The code that runs the
// layer decides how often it measures this time.
type Timing struct {
	Kernel    time.Duration // duration of the layer's arithmetic
	Telemetry time.Duration // additional time for telemetry and the lattice's bookkeeping
	Bytes     int64         // minimum number of bytes read and written by the arithmetic, assuming empty caches
}
