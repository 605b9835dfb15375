package opcase

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var rope = &Op{
	Name: "RoPE",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, c := range []op.RoPEConfig{
			{Seq: 1, Heads: 1, HeadDim: 2},
			{Seq: 5, Heads: 3, HeadDim: 6, Base: 500},
			{Seq: 9, Heads: 2, HeadDim: 8, Scaling: &op.RoPEScaling{Factor: 4}},
			{Seq: 7, Heads: 1, HeadDim: 16, Scaling: &op.RoPEScaling{Factor: 8, LowFreq: 1,
				HighFreq: 4, Original: 64}},
			{Seq: 7, Heads: 1, HeadDim: 16, Scaling: &op.RoPEScaling{Factor: 4, BetaFast: 32,
				BetaSlow: 1, Original: 2048}},
			{Seq: 7, Heads: 2, HeadDim: 12, Base: 300, Scaling: &op.RoPEScaling{Factor: 3,
				BetaFast: 9, BetaSlow: 2, Original: 70, Unrounded: true, Magnitude: 1.5}},
			{Seq: 7, Heads: 2, HeadDim: 4, Scaling: &op.RoPEScaling{Factor: 3, BetaFast: 9,
				BetaSlow: 9, Original: 5}},
		} {
			cases = append(cases, ropeCase(r, 3, c))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "batch, positions, heads, head size",
		Small: []int{2, 16, 3, 8}, Usual: []int{4, 256, 4, 64},
		Check: func(shape []int) error {
			if shape[3]%2 != 0 {
				return errors.New("want an even head size")
			}
			return nil
		},
		Elements: product(4, 0, 1, 2, 3), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return ropeCase(r, s[0], op.RoPEConfig{Seq: s[1], Heads: s[2], HeadDim: s[3],
				Base: 10000}), nil
		},
	},
}

func ropeCase(r *rand.Rand, batch int, c op.RoPEConfig) Case {
	config := fmt.Sprintf("%d positions, %d heads of %d", c.Seq, c.Heads, c.HeadDim)
	if c.Scaling != nil {
		config += fmt.Sprintf(", scaled %+v", *c.Scaling)
	}
	return Case{Config: config, In: []Input{Normal(r, batch*c.Seq, c.Heads*c.HeadDim)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.RoPE(in[0], c) },
		Want:  func(in []Input) []float64 { return refRoPE(in[0].Values, c) }}
}

// refRoPE rotates features i and i+HeadDim/2 of each head, which form pair i, by an angle proportional to the
// position.
func refRoPE(x []float64, c op.RoPEConfig) []float64 {
	base := c.Base
	if base == 0 {
		base = 10000
	}

	y := make([]float64, len(x))
	rowLen, half := c.Heads*c.HeadDim, c.HeadDim/2
	for i := range x {
		row, feature := i/rowLen, i%c.HeadDim
		position, pair := row%c.Seq, feature%half

		frequency, magnitude := refFrequency(pair, c.HeadDim, base, c.Scaling)
		sin, cos := math.Sincos(float64(position) * frequency)
		sin, cos = magnitude*sin, magnitude*cos

		if feature < half {
			y[i] = x[i]*cos - x[i+half]*sin
		} else {
			y[i] = x[i]*cos + x[i-half]*sin
		}
	}

	return y
}

// refFrequency returns the angle per position of a pair of features, and the factor on its cosine and
// sine.
func refFrequency(pair, headDim int, base float64, s *op.RoPEScaling) (f, magnitude float64) {
	f = math.Pow(base, -2*float64(pair)/float64(headDim))
	if s == nil {
		return f, 1
	}

	if s.BetaFast > 0 {
		slowed, magnitude := refYaRN(pair, headDim, base, *s)
		return f*(1-slowed) + f*slowed/s.Factor, magnitude
	}

	// Without HighFreq, all positions are interpolated linearly. With it, as in Llama 3, only long
	// wavelengths are, and medium ones in part.
	wavelength := 2 * math.Pi / f
	switch {
	case s.HighFreq == 0 || wavelength > float64(s.Original)/s.LowFreq:
		f /= s.Factor
	case wavelength > float64(s.Original)/s.HighFreq:
		smooth := (float64(s.Original)/wavelength - s.LowFreq) / (s.HighFreq - s.LowFreq)
		f = (1-smooth)*f/s.Factor + smooth*f
	}

	return f, 1
}

// refYaRN returns the share of a pair's frequency that is divided by the factor, and the factor on
// cosines and sines. The share rises from 0 to 1 between the wavelengths Original/BetaFast and
// Original/BetaSlow.
func refYaRN(pair, headDim int, base float64, s op.RoPEScaling) (slowed, magnitude float64) {
	// pairWith returns the fractional number of the pair that makes the given number of turns in Original
	// positions.
	pairWith := func(turns float64) float64 {
		return float64(headDim) / 2 * math.Log(float64(s.Original)/turns/2/math.Pi) / math.Log(base)
	}

	first, last := pairWith(s.BetaFast), pairWith(s.BetaSlow)
	if !s.Unrounded {
		first, last = math.Floor(first), math.Ceil(last)
	}

	first, last = max(first, 0), min(last, float64(headDim-1))
	if first == last {
		last += 0.001 // avoids a division by zero below
	}

	if magnitude = s.Magnitude; magnitude == 0 {
		magnitude = 1 + math.Log(s.Factor)/10
	}

	return min(1, max(0, (float64(pair)-first)/(last-first))), magnitude
}
