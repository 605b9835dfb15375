package opcase

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaLayer has only a benchmark. The tests of package op and of cudaops check the layer in every
// stage of its seeds.
var kasminaLayer = &Op{
	Name: "Kasmina",
	Bench: &Bench{
		Shape: "rows, features, seeds", Small: []int{64, 32, 8}, Usual: []int{1024, 1024, 64},
		Check:    divides("a multiple of the seeds for features", 1, 2),
		Elements: product(3, 0, 1), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) { return kasminaCase(r, s[0], s[1], s[2]) },
	},
}

// kasminaCase returns a layer with all seeds grafting at α ½. The seeds cycle through the four kinds
// with one weight per feature.
func kasminaCase(r *rand.Rand, rows, d, seeds int) (Case, error) {
	lattice, err := state.NewLattice(seeds, d, state.WithoutGates())
	if err != nil {
		return Case{}, err
	}

	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
		blueprints.MLPExpansion, blueprints.ConvFilter}
	for s := range seeds {
		request := state.GerminationRequest{Slot: 1 + s, Kind: kinds[s%len(kinds)]}
		for _, step := range []func() error{
			func() error { return lattice.RequestGermination(s, request) },
			func() error { return lattice.Transition(s, state.Training) },
			func() error { return lattice.Transition(s, state.Grafting) },
			func() error { return lattice.SetAlpha(s, 0.5) },
		} {
			if err := step(); err != nil {
				return Case{}, err
			}
		}
	}

	return Case{In: []Input{Normal(r, rows, d), weight(r, seeds+1, d/seeds), Normal(r, seeds+1)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Kasmina(in[0], in[1], in[2], lattice)
		}}, nil
}
