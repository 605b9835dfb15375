package llm

import (
	"math"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// needsOf returns, for each seed at a weight or in the stream, the root mean square of the gradients
// of the parameters it grows on:
//
//	sqrt(Σ g²/n)
//
// The sum runs over the n elements of the seed's weight or, for a seed in the stream, of the block
// before it. [optim.RememberedGradients] estimates the gradients g from the moments. Parameters
// without an estimate are ignored. The need is 0 for seeds without any other parameters, and for all
// seeds if the optimizer does not declare its rules.
//
// Sums follow the order of moments. Since [optim.Optimizer.State] sorts them by name, all ranks and
// all repetitions of a run obtain bit-identical sums.
func needsOf(c Config, site blueprints.Site, moments []optim.Tensor,
	optimizer optim.Optimizer) []float64 {
	needs := make([]float64, c.Seeded(site))
	rules, ok := optimizer.(optim.Rules)
	if !ok {
		return needs
	}

	gradients := optim.RememberedGradients(rules, moments)
	for seed := range needs {
		grows := growsOn(c, site, seed)
		squares, num := 0.0, 0.0
		for _, g := range gradients {
			if grows(g.Param) {
				squares, num = squares+g.Squares, num+float64(g.Count)
			}
		}
		if num > 0 {
			needs[seed] = math.Sqrt(squares / num)
		}
	}

	return needs
}

// growsOn returns a function that reports whether a seed grows on the named parameter.
func growsOn(c Config, site blueprints.Site, seed int) func(param string) bool {
	switch site {
	case blueprints.Weight:
		name := c.WeightName(c.Weights[seed])
		return func(param string) bool { return param == name }
	case blueprints.Stream:
		prefix := blockPrefix(c.Streams[seed])
		return func(param string) bool { return strings.HasPrefix(param, prefix) }
	}
	return func(string) bool { return false }
}

// measureNeeds records the needs of a lattice's dormant seeds. Seeds with a planted blueprint are
// measured themselves.
func measureNeeds(l *state.Lattice, needs []float64) error {
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
