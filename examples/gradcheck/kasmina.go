package main

import (
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// Three seeds have three features each. The first two share slot 1, so their gradients must be added.
// Slots are wide enough for two hidden features, and have one extra weight that no blueprint uses.
const (
	rows, seeds, chunk = 4, 3, 3
	slots, width       = 3, 2*2*chunk + 1
	alpha              = 0.375 // exact in the float32 of the lattice
)

var slotOf = [seeds]int{1, 1, 2}

// pathTo holds the transitions that lead to each stage from Germinated.
var pathTo = map[state.Stage][]state.Stage{
	state.Germinated:    {},
	state.Training:      {state.Training},
	state.Grafting:      {state.Training, state.Grafting},
	state.Stabilization: {state.Training, state.Grafting, state.Stabilization},
	state.Evaluating:    {state.Training, state.Grafting, state.Stabilization, state.Evaluating},
	state.FineTuning: {state.Training, state.Grafting, state.Stabilization,
		state.Evaluating, state.FineTuning},
	state.Fossilized: {state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized},
	state.Culled:     {state.Training, state.Culled},
	state.Cancelled:  {state.Cancelled},
	state.RolledBack: {state.Training, state.Grafting, state.RolledBack},
}

// mode is a stability mode with inputs that trigger it. Large inputs come with a small cost, because
// rounding would otherwise hide the gradients.
type mode struct {
	op.Stability
	size float64 // size of the inputs
}

var modes = []mode{{op.Fast, 1}, {op.Adaptive, 1}, {op.Adaptive, 1 << 22}, {op.Strict, 1}}

// kasminaChecks returns a check for each stage and kind, each in several stability modes.
func kasminaChecks(modes []mode) []check {
	var checks []check
	for stage := state.Dormant; stage <= state.RolledBack; stage++ {
		for _, kind := range blueprints.KindsAt(blueprints.Chunk) {
			checks = append(checks, check{"Kasmina", stage.String() + ", " + kind.String(),
				func(r *rand.Rand) ([]autodiff.CheckReport, error) {
					var reports []autodiff.CheckReport
					for _, m := range modes {
						report, err := checkKasmina(r, stage, kind, m)
						if err != nil {
							return nil, err
						}
						reports = append(reports, report)
					}
					return reports, nil
				}})
		}
	}

	return checks
}

func checkKasmina(r *rand.Rand, stage state.Stage, kind blueprints.Kind,
	m mode) (autodiff.CheckReport, error) {
	x, weights, scales, cost := kasminaInputs(r, m)
	differences := func(stage state.Stage) (autodiff.CheckReport, error) {
		lattice, err := latticeIn(stage, kind)
		if err != nil {
			return autodiff.CheckReport{}, err
		}
		in := &inputs{Rand: r, g: gorgonia.NewGraph()}
		nodes := gorgonia.Nodes{in.values("x", x, rows, seeds*chunk),
			in.values("weights", weights, slots, width), in.values("scales", scales, slots)}
		if m.Stability == op.Strict {
			if err := observe(lattice, nodes); err != nil {
				return autodiff.CheckReport{}, err
			}
		}
		y, err := op.Kasmina(nodes[0], nodes[1], nodes[2], lattice, op.WithStability(m.Stability),
			op.WithEpsilon(epsilon), op.WithoutTelemetry())
		if err != nil {
			return autodiff.CheckReport{}, err
		}
		weighted, err := gorgonia.HadamardProd(y, in.constant("weights of the cost",
			cost, rows, seeds*chunk))
		if err != nil {
			return autodiff.CheckReport{}, err
		}
		sum, err := gorgonia.Sum(weighted)
		if err != nil {
			return autodiff.CheckReport{}, err
		}
		return autodiff.CheckGradients(sum, nodes, autodiff.WithSamples(0))
	}

	report, err := differences(stage)
	if err != nil {
		return report, err
	}

	switch stage {
	case state.Training:
		// The output is x, but the parameters learn as if it were t(x), so compare them with the
		// differences of a fully blended seed.
		blended, err := differences(state.FineTuning)
		if err != nil {
			return report, err
		}
		for i := 1; i < len(report.Inputs); i++ {
			for j := range report.Inputs[i].Elements {
				e := &report.Inputs[i].Elements[j]
				e.Numeric = blended.Inputs[i].Elements[j].Numeric
				e.RelError = difference(e.Analytic, e.Numeric, blended.Inputs[i].Floor)
			}
		}
	case state.Evaluating, state.Fossilized:
		// The output depends on the parameters, but they are frozen.
		for i := 1; i < len(report.Inputs); i++ {
			for j := range report.Inputs[i].Elements {
				e := &report.Inputs[i].Elements[j]
				e.Numeric = 0
				e.RelError = difference(e.Analytic, 0, 0)
			}
		}
	}

	return report, nil
}

func difference(a, b, floor float64) float64 {
	if a == b {
		return 0
	}
	return math.Abs(a-b) / max(math.Abs(a), math.Abs(b), floor)
}

// latticeIn returns a lattice with all seeds in the given stage.
func latticeIn(stage state.Stage, kind blueprints.Kind) (*state.Lattice, error) {
	l, err := state.NewLattice(seeds, seeds*chunk, state.WithoutGates())
	if err != nil || stage == state.Dormant {
		return l, err
	}

	for seed := range seeds {
		if err := l.RequestGermination(seed, state.GerminationRequest{Slot: slotOf[seed],
			Kind: kind}); err != nil {
			return nil, err
		}
		for _, next := range pathTo[stage] {
			if err := l.Transition(seed, next); err != nil {
				return nil, err
			}
		}
		if stage.Blends() {
			if err := l.SetAlpha(seed, alpha); err != nil {
				return nil, err
			}
		}
	}

	return l, nil
}

// epsilon is far above the default, so that the strict mode's zeroing of small inputs is visible in
// differences.
const epsilon = 0.125

// kasminaInputs returns values at a distance from every kink: relu's, the jump at ±epsilon, and the
// limits of the strict mode. Two features of the last row far exceed those limits.
func kasminaInputs(r *rand.Rand, m mode) (x, weights, scales, cost []float64) {
	draw := func(n int, size float64) []float64 {
		v := make([]float64, n)
		for i := range v {
			v[i] = math.Copysign(size*(0.25+r.Float64()), r.Float64()-0.5)
		}
		return v
	}

	const features = seeds * chunk
	x, weights, scales, cost = draw(rows*features, m.size), draw(slots*width, 1), draw(slots, 1),
		draw(rows*features, 1/m.size)
	if m.Stability == op.Strict {
		x[1], x[features+4] = 0.03, -0.05
		x[(rows-1)*features+2], x[(rows-1)*features+6] = 40, -40
	}

	return x, weights, scales, cost
}

// observe runs a layer once with telemetry on inputs of ordinary size. Their statistics become the limits
// of the strict mode.
func observe(l *state.Lattice, like gorgonia.Nodes) error {
	in := &inputs{g: gorgonia.NewGraph()}
	ordinary := make([]float64, rows*seeds*chunk)
	for i := range ordinary {
		ordinary[i] = math.Cos(float64(i))
	}

	weights := slices.Clone(like[1].Value().Data().([]float64))
	scales := slices.Clone(like[2].Value().Data().([]float64))
	_, err := op.Kasmina(in.values("x", ordinary, rows, seeds*chunk),
		in.values("weights", weights, slots, width), in.values("scales", scales, slots), l)
	if err != nil {
		return err
	}

	vm := gorgonia.NewTapeMachine(in.g)
	defer vm.Close()
	return vm.RunAll()
}
