// The parts of RoPE:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/rope.go
//   - GPU: cudaops/internal/lower/project.go,
//     cudaops/internal/kernel/rope
//   - test cases and benchmark: internal/opcase/rope.go

package op

import (
	"errors"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// RoPEConfig describes the layout of the input of [RoPE] and the rotation angles.
type RoPEConfig struct {
	Seq     int     // positions in a sequence; sequences follow one another in the rows
	Heads   int     // heads in a row
	HeadDim int     // features of a head, even
	Base    float64 // base of the angles' geometric series; 0 means 10000
	// Scaling adapts the angles to contexts longer than those the model was first trained on; nil for
	// none.
	Scaling *RoPEScaling
}

// RoPEScaling lowers the frequencies of RoPE for contexts longer than those the model was first
// trained on. The zero value changes nothing. There are three kinds:
//
//   - Linear, with only Factor set: every frequency is divided by Factor (Chen et al., "Extending
//     Context Window of Large Language Models via Position Interpolation", 2023).
//   - Llama 3.1, with HighFreq set: pairs that make at least HighFreq turns over Original positions
//     keep their frequency, the frequency of pairs that make at most LowFreq turns is divided by
//     Factor, and frequencies in between are interpolated.
//   - YaRN, with BetaFast set: the limits are the pair indices, as real numbers, that make BetaFast
//     and BetaSlow turns. Pairs below the first limit keep their frequency, and the frequency of pairs
//     beyond the second is divided by Factor. In between, the frequency is interpolated linearly in the
//     pair index. Cosines and sines are multiplied by Magnitude (Peng et al., "YaRN: Efficient Context
//     Window Extension of Large Language Models", 2023).
type RoPEScaling struct {
	Factor   float64 // at least 1
	LowFreq  float64 `json:",omitempty"`
	HighFreq float64 `json:",omitempty"`
	// Original is the context length of the first training. The linear kind does not use it.
	Original int `json:",omitempty"`

	BetaFast float64 `json:",omitempty"` // turns; 32 in published models
	BetaSlow float64 `json:",omitempty"` // turns; 1 in published models
	// Unrounded keeps the two limits of YaRN as real numbers. Otherwise the first is rounded down and
	// the second up.
	Unrounded bool `json:",omitempty"`
	// Magnitude is YaRN's factor on the cosines and sines, and thus on queries and keys; 0 means
	// 0.1·ln(Factor) + 1.
	Magnitude float64 `json:",omitempty"`
}

// Check returns an error that names the first invalid field. The zero value is valid.
func (s RoPEScaling) Check() error {
	yarn, llama3 := s.BetaFast != 0 || s.BetaSlow != 0, s.LowFreq != 0 || s.HighFreq != 0
	switch {
	case s == RoPEScaling{}:
	case !(s.Factor >= 1) || math.IsInf(s.Factor, 0):
		return fmt.Errorf("Scaling.Factor is %v, want a finite number of at least 1", s.Factor)
	case yarn && llama3:
		return fmt.Errorf("Scaling.HighFreq is %v and BetaFast %v, want one of them to be 0",
			s.HighFreq, s.BetaFast)
	case llama3 && (!(s.LowFreq >= 0) || !(s.HighFreq > s.LowFreq) || math.IsInf(s.HighFreq, 0) ||
		s.Original < 1):
		return fmt.Errorf("Scaling.LowFreq is %v, HighFreq %v and Original %d, want 0 ≤ LowFreq "+
			"< HighFreq and a positive Original", s.LowFreq, s.HighFreq,
			s.Original)
	case yarn && (!(s.BetaSlow > 0) || !(s.BetaFast >= s.BetaSlow) || math.IsInf(s.BetaFast, 0) ||
		s.Original < 1):
		return fmt.Errorf("Scaling.BetaSlow is %v, BetaFast %v and Original %d, want 0 < "+
			"BetaSlow ≤ BetaFast and a positive Original", s.BetaSlow, s.BetaFast,
			s.Original)
	case !(s.Magnitude >= 0) || math.IsInf(s.Magnitude, 0):
		return fmt.Errorf("Scaling.Magnitude is %v, want a finite number of at least 0",
			s.Magnitude)
	case !yarn && (s.Magnitude != 0 || s.Unrounded):
		return fmt.Errorf("Scaling.Magnitude is %v and Unrounded %v, which are for YaRN: set "+
			"BetaFast and BetaSlow too", s.Magnitude, s.Unrounded)
	}

	return nil
}

// RoPEOp is the op that [RoPE] applies. With Inverse set it computes the gradient.
type RoPEOp struct {
	opbase.Base
	Config  RoPEConfig
	Inverse bool

	cos, sin opbase.Aux
}

// RoPE rotates pairs of features of every head by angles proportional to the position, so that the
// product of a query and a key depends on their distance:
//
//	(x[i], x[i+h]) → (x[i]·cos θ − x[i+h]·sin θ, x[i+h]·cos θ + x[i]·sin θ),  θ = position · Base^(−2i/HeadDim)
//
// for i < h = HeadDim/2. This is the half-split layout of Llama's published weights. x is [rows,
// Heads·HeadDim] of float32 or float64. Row r has position r mod Seq, so rows must be a multiple of
// Seq. (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.)
func RoPE(x *gorgonia.Node, c RoPEConfig) (*gorgonia.Node, error) {
	const name = "RoPE"
	ax := arg{"x", x}
	if err := checkFloats(name, ax); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, Heads·HeadDim]"); err != nil {
		return nil, err
	}

	c.Base = c.base()

	// The gradient is built later, so a copy protects it from changes by the caller in the meantime.
	if c.Scaling != nil {
		s := *c.Scaling
		c.Scaling = &s
	}

	if err := c.check(); err != nil {
		return nil, fmt.Errorf("op.%s: %w", name, err)
	}

	if err := checkHeads(name, ax, c.Seq, "Heads", c.Heads, c.HeadDim); err != nil {
		return nil, err
	}

	return newRoPE(x, c, false)
}

// base returns Base, or its default if it is 0.
func (c RoPEConfig) base() float64 {
	if c.Base == 0 {
		return 10000
	}
	return c.Base
}

func (c RoPEConfig) check() error {
	switch {
	case c.Seq < 1 || c.Heads < 1 || c.HeadDim < 1:
		return fmt.Errorf("config: Seq %d, Heads %d and HeadDim %d must all be positive",
			c.Seq, c.Heads, c.HeadDim)
	case c.Seq > maxAngles/c.HeadDim:
		return fmt.Errorf("config: Seq %d × HeadDim %d are too many angles, want at most %d", c.Seq,
			c.HeadDim, maxAngles)
	case c.HeadDim%2 != 0:
		return fmt.Errorf("config: HeadDim is %d, want an even number: features turn in pairs",
			c.HeadDim)
	case !(c.Base > 1) || math.IsInf(c.Base, 0):
		return fmt.Errorf("config: Base is %v, want a finite number above 1", c.Base)
	}

	if c.Scaling == nil {
		return nil
	}

	if *c.Scaling == (RoPEScaling{}) {
		return errors.New("config: Scaling.Factor is 0, want a finite number of at least 1")
	}

	if err := c.Scaling.Check(); err != nil {
		return fmt.Errorf("config: %w", err)
	}

	return nil
}

// frequency returns the angle between the rotations of pair i at successive positions.
func (c RoPEConfig) frequency(i int) float64 {
	f := math.Pow(c.Base, -2*float64(i)/float64(c.HeadDim))
	s := c.Scaling
	if s == nil {
		return f
	}

	if s.BetaFast > 0 {
		low, high := c.turning(s.BetaFast), c.turning(s.BetaSlow)
		if !s.Unrounded {
			low, high = math.Floor(low), math.Ceil(high)
		}
		low, high = max(low, 0), min(high, float64(c.HeadDim-1))
		if low == high { // as in the training of published models
			high += 1e-3
		}
		slowed := min(1, max(0, (float64(i)-low)/(high-low)))
		return (1-slowed)*f + slowed*f/s.Factor
	}

	if s.HighFreq == 0 {
		return f / s.Factor
	}

	turns := float64(s.Original) * f / (2 * math.Pi)
	keep := min(1, max(0, (turns-s.LowFreq)/(s.HighFreq-s.LowFreq)))
	return keep*f + (1-keep)*f/s.Factor
}

// turning returns the pair index, as a real number, that makes the given number of turns over
// Original positions.
func (c RoPEConfig) turning(turns float64) float64 {
	return float64(c.HeadDim) * math.Log(float64(c.Scaling.Original)/(2*math.Pi*turns)) /
		(2 * math.Log(c.Base))
}

// magnitude returns the factor on cosines and sines.
func (c RoPEConfig) magnitude() float64 {
	s := c.Scaling
	switch {
	case s == nil || s.BetaFast == 0:
		return 1
	case s.Magnitude == 0:
		return 0.1*math.Log(s.Factor) + 1
	}
	return s.Magnitude
}

func newRoPE(x *gorgonia.Node, c RoPEConfig, inverse bool) (*gorgonia.Node, error) {
	o := &RoPEOp{Config: c, Inverse: inverse}
	config := fmt.Sprintf("seq=%d heads=%d headDim=%d base=%v inverse=%v", c.Seq, c.Heads,
		c.HeadDim, c.Base, inverse)
	if c.Scaling != nil {
		config += fmt.Sprintf(" scaling=%+v", *c.Scaling)
	}
	opbase.Init(&o.Base, o, "RoPE", config, gorgonia.Nodes{x}, x.Dtype(), x.Shape(),
		rope[float32], rope[float64])
	return gorgonia.ApplyOp(o, x)
}

// tables returns the cosines and sines, which it computes when the op first runs. On a GPU, that
// never happens.
func tables[T cpu.Float](o *RoPEOp) (cos, sin []T) {
	n := o.Config.Seq * o.Config.HeadDim / 2
	t, have := o.cos.Len()
	cos, sin = opbase.AuxSlice[T](&o.cos, n), opbase.AuxSlice[T](&o.sin, n)
	if have != n || t != o.Dtype() {
		o.Config.fill(0, o.Config.Seq, func(i int, c, s float64) { cos[i], sin[i] = T(c), T(s) })
	}
	return cos, sin
}

// fill calls set with the cosine and sine of the angle of pair i at position from + p, for every
// pair and the given number of positions. index is p·HeadDim/2 + i.
func (c RoPEConfig) fill(from, positions int, set func(index int, cos, sin float64)) {
	h, m := c.HeadDim/2, c.magnitude()
	for i := range h {
		f := c.frequency(i)
		for p := range positions {
			sin, cos := math.Sincos(float64(from+p) * f)
			set(p*h+i, m*cos, m*sin)
		}
	}
}

// maxAngles is the maximum of Seq × HeadDim, at which a float64 table takes 4 GiB.
const maxAngles = 1 << 30

// Tables returns the cosines and sines of all angles, multiplied by YaRN's magnitude, as two tables
// [Seq, HeadDim/2]. It ignores Heads. The tables are nil if [RoPE] would reject the config.
func (c RoPEConfig) Tables() (cos, sin []float64) { return c.Angles(0, c.Seq) }

// Angles returns rows of [RoPEConfig.Tables] for the given number of positions, starting at from.
func (c RoPEConfig) Angles(from, positions int) (cos, sin []float64) {
	c.Base, c.Heads = c.base(), 1
	if c.check() != nil {
		return nil, nil
	}
	n := positions * c.HeadDim / 2
	cos, sin = make([]float64, n), make([]float64, n)
	c.fill(from, positions, func(i int, x, y float64) { cos[i], sin[i] = x, y })
	return cos, sin
}

func rope[T cpu.Float](o *RoPEOp, y []T, in opbase.Args) error {
	c := o.Config
	cos, sin := tables[T](o)
	layer.RoPE(y, opbase.Slice[T](in, 0), cos, sin, c.Seq, c.Heads, c.HeadDim, o.Inverse)
	return nil
}

// DiffWRT reports that the op is differentiable.
func (o *RoPEOp) DiffWRT(int) []bool { return []bool{true} }

// SymDiff returns the gradient of x, which is the output's gradient rotated by the negative angles.
func (o *RoPEOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	dx, err := newRoPE(grad, o.Config, !o.Inverse)
	if err != nil {
		return nil, err
	}
	return gorgonia.Nodes{dx}, nil
}
