package judge

import (
	"math"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// Needs returns, for each seed at a weight or in the stream, how large the gradients are of what it
// sits on. They are taken for each parameter of it:
//
//	sqrt(Σ g²/n)
//
// over the n numbers of the weight, or of the block in front of the seed in the stream. g are the
// gradients as the optimiser remembers them. It is 0 of what the optimiser remembers nothing of.
func Needs(c arch.Config, site blueprints.Site, remembered []optim.Tensor) []float64 {
	squares, sizes := map[string]float64{}, map[string]float64{}
	for _, x := range remembered {
		dot := strings.LastIndexByte(x.Name, '.')
		sum, n, ok := gradients(x.Name[dot+1:], x.Data)
		if name := x.Name[:dot]; ok {
			squares[name], sizes[name] = sum, n
		}
	}
	needs := make([]float64, c.Seeded(site))
	for seed := range needs {
		of := func(string) bool { return false }
		switch site {
		case blueprints.Weight:
			name := c.WeightName(c.Weights[seed])
			of = func(p string) bool { return p == name }
		case blueprints.Stream:
			prefix := arch.BlockPrefix(c.Streams[seed])
			of = func(p string) bool { return strings.HasPrefix(p, prefix) }
		}
		sum, n := 0.0, 0.0
		for p, s := range squares {
			if of(p) {
				sum, n = sum+s, n+sizes[p]
			}
		}
		if n > 0 {
			needs[seed] = math.Sqrt(sum / n)
		}
	}
	return needs
}

// gradients returns the sum of the squares of the gradients that a moment of an optimiser tells of,
// and how many they are. AdamW has the mean of the squares, Muon the mean.
func gradients(field string, data any) (sum, n float64, ok bool) {
	square := func(v float64) float64 { return v * v }
	switch field {
	case "exp_avg_sq":
		square = func(v float64) float64 { return v }
	case "momentum_buffer":
	default:
		return 0, 0, false
	}
	switch x := data.(type) {
	case []float32:
		for _, v := range x {
			sum += square(float64(v))
		}
		n = float64(len(x))
	case []float64:
		for _, v := range x {
			sum += square(v)
		}
		n = float64(len(x))
	}
	return sum, n, n > 0
}

// Measure leaves in a lattice what its dormant seeds need. Those that have something planted are
// measured themselves.
func Measure(l *state.Lattice, needs []float64) error {
	var pass state.Pass
	l.Begin(&pass, true)
	return l.RecordGradient(&pass, func(seed int) state.GradientSample {
		g := state.GradientSample{Gradient: state.Gradient{Norm: needs[seed], Max: needs[seed]}}
		if needs[seed] > 0 && pass.Stage[seed] == state.Dormant {
			g.Norms = state.Moments{Count: 1, Mean: needs[seed]}
		}
		return g
	})
}
