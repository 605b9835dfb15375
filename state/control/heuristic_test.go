package control_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

type (
	seed  = state.SeedReport
	rules = control.Heuristic
)

// slots holds the parameters of a network's slots.
type slots map[[2]int]state.SlotParams

func (m slots) Start(g state.Germination) (state.SlotParams, error) {
	return state.SlotParams{Weights: []float64{float64(g.Kind)}}, nil
}

func (m slots) Read(layer, slot int) (state.SlotParams, error) {
	return m[[2]int{layer, slot}], nil
}

func (m slots) Write(writes []state.SlotWrite) error {
	for _, w := range writes {
		m[[2]int{w.Layer, w.Slot}] = w.Params
	}
	return nil
}

// networkOf returns a network of two layers with 4 and 6 seeds.
func networkOf(t *testing.T, opts ...state.Option) (*state.Network, slots) {
	t.Helper()
	a, err := state.NewLattice(4, 8, opts...)
	require.NoError(t, err)
	b, err := state.NewLattice(6, 12, opts...)
	require.NoError(t, err)
	m := slots{}
	n, err := state.NewNetwork(m, state.Layer{Name: "a", Lattice: a},
		state.Layer{Name: "b", Lattice: b})
	require.NoError(t, err)
	return n, m
}

// measure runs a pass that measures random figures in a lattice.
func measure(t *testing.T, r *rand.Rand, l *state.Lattice) {
	t.Helper()
	v, norm := make([]float64, l.Seeds()), make([]float64, l.Seeds())
	dead := make([]float64, l.Seeds())
	for i := range v {
		v[i], dead[i], norm[i] = r.ExpFloat64(), r.Float64(), r.ExpFloat64()
	}

	var p state.Pass
	l.Begin(&p, true)
	require.NoError(t, errors.Join(
		l.RecordHealth(&p, func(i int) state.HealthSample {
			h := state.Health{Variance: v[i], Min: -v[i], Max: 9 * v[i], DeadRatio: dead[i]}
			return state.HealthSample{Health: h, Moments: state.Moments{Count: 8, Variance: v[i]}}
		}),
		l.RecordGradient(&p, func(i int) state.GradientSample {
			return state.GradientSample{Gradient: state.Gradient{Norm: norm[i]},
				Norms: state.Moments{Count: 4, Mean: 1}}
		})))
}

// healthy returns the report of a healthy layer with 4 seeds over 8 features and slots of 8
// weights.
func healthy() state.Report {
	r := state.Report{Epoch: 5, Hidden: 8, Slots: 5, SlotParameters: 9, Seeds: make([]seed, 4)}
	for i := range r.Seeds {
		r.Seeds[i] = seed{Seed: i, CanAdvance: true, Health: state.Health{Variance: 1, Min: -3,
			Max: 3}, Gradient: state.Gradient{Norm: 1}}
	}
	return r
}

func heuristic(maxActive, maxParameters int) *rules {
	h := control.NewHeuristic(maxActive, maxParameters)
	h.Hunger, h.PerEpoch = 1.5, 100
	return h
}

// TestHeuristicDiagnosis checks that the problem of a chunk determines the blueprint and its
// grafting strategy.
func TestHeuristicDiagnosis(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(s *seed, h *rules)
		kind     blueprints.Kind
		strategy string // empty if nothing germinates
		why      string
	}{
		"healthy": {func(*seed, *rules) {}, 0, "", ""},
		"hungry": {func(s *seed, _ *rules) { s.Gradient.Norm = 2 },
			blueprints.ChunkMLP, "PerformanceLinked", "hungry (1.33 times"},
		"hungry, only": {func(s *seed, h *rules) {
			s.Gradient.Norm, h.Capacity = 2, []blueprints.Kind{99, blueprints.LowRank}
		}, blueprints.LowRank, "PerformanceLinked", ""},
		"hungry, poor": {func(s *seed, h *rules) { s.Gradient.Norm, h.Capacity = 2, nil },
			blueprints.Residual, "PerformanceLinked", ""},
		"starving": {func(s *seed, _ *rules) { s.Gradient.Norm = 9 },
			blueprints.ChunkMLP, "GradNormGated", "hungry (6.00 times"},
		"dead": {func(s *seed, _ *rules) { s.Health.DeadRatio = 0.9 },
			blueprints.Residual, "PerformanceLinked", "dead (1.80 times"},
		"silent": {func(s *seed, _ *rules) { s.Health.Variance = 0.05 },
			blueprints.AttentionGate, "PerformanceLinked", "silent (2.00 times"},
		"spiky": {func(s *seed, _ *rules) { s.Health.Max = 60 },
			blueprints.AttentionGate, "PerformanceLinked", "spiky (2.00 times"},
		"drifting": {func(s *seed, _ *rules) { s.Health.DeadRatio, s.Drift = 0.9, 0.2 },
			blueprints.Residual, "DriftControlled", ""},
		"constant": {func(s *seed, _ *rules) { s.Health.Variance = 0 }, 0, "", ""},
		"unmeasured": {func(s *seed, _ *rules) { s.Gradient.Norm, s.Health = 9, state.Health{} },
			0, "", ""},
		"too early": {func(s *seed, h *rules) { s.Gradient.Norm, h.Begin = 2, 6 }, 0, "", ""},
		"too late":  {func(s *seed, h *rules) { s.Gradient.Norm, h.End = 2, 5 }, 0, "", ""},
		"no room": {func(s *seed, h *rules) { s.Gradient.Norm, h.MaxActive = 2, 0 },
			0, "", ""},
		"no money": {func(s *seed, h *rules) { s.Gradient.Norm, h.MaxParameters = 2, 8 },
			0, "", ""},
	} {
		h, r := heuristic(4, 100), healthy()
		c.change(&r.Seeds[2], h)
		commands := h.Decide([]state.Report{healthy(), r})
		if c.strategy == "" {
			if len(commands) > 0 {
				t.Errorf("%s: %v", name, commands)
			}
			continue
		}

		if len(commands) != 1 {
			t.Errorf("%s: %v", name, commands)
			continue
		}

		got := commands[0]
		if got.Action != state.Germinate || got.Layer != 1 || got.Seed != 2 ||
			got.Request.Slot != 1 || got.Request.Kind != c.kind ||
			got.Request.Strategy.Name() != c.strategy || got.Request.Strategy.Check() != nil ||
			!strings.Contains(got.Why, c.why) {
			t.Errorf("%s: %v, %+v", name, got, got.Request)
		}
	}
}

// TestHeuristicMoves checks the commands for a blueprint at each point of a successful life, and at
// its possible ends.
func TestHeuristicMoves(t *testing.T) {
	for name, c := range map[string]struct {
		life seed
		want string
	}{
		"germinated":    {seed{Stage: state.Germinated, CanAdvance: true}, "move to Training"},
		"trained":       {seed{Stage: state.Training, CanAdvance: true}, "move to Grafting"},
		"still ramping": {seed{Stage: state.Grafting, CanAdvance: true}, ""},
		"grafted": {seed{Stage: state.Grafting, CanAdvance: true, RampFinished: true},
			"move to Stabilization"},
		"stable": {seed{Stage: state.Stabilization, CanAdvance: true}, "move to Evaluating"},
		"good":   {seed{Stage: state.Evaluating, CanAdvance: true}, "move to FineTuning"},
		"bad": {seed{Stage: state.Evaluating, CanCull: true},
			"move to Culled, because the model is better without it"},
		"undecided": {seed{Stage: state.Evaluating, EpochsInStage: 200}, ""},
		"too long": {seed{Stage: state.Evaluating, EpochsInStage: 201},
			"move to RolledBack, because 201 epochs"},
		"stuck ramp": {seed{Stage: state.Grafting, CanAdvance: true, EpochsInStage: 201},
			"move to RolledBack"},
		"unteachable": {seed{Stage: state.Training, EpochsInStage: 201},
			"move to Cancelled, because it has not learned"},
		"tuned":         {seed{Stage: state.FineTuning, CanAdvance: true}, "move to Fossilized"},
		"fossil":        {seed{Stage: state.Fossilized, EpochsInStage: 999}, ""},
		"under embargo": {seed{Stage: state.Culled, EpochsInStage: 999}, ""},
		"recyclable":    {seed{Stage: state.RolledBack, CanRecycle: true}, "recycle"},
	} {
		r := healthy()
		c.life.Seed = 3
		r.Seeds[3] = c.life
		commands := heuristic(1, 100).Decide([]state.Report{r})
		if c.want == "" && len(commands) == 0 {
			continue
		}
		if len(commands) != 1 || c.want == "" || !strings.HasPrefix(commands[0].String(),
			"layer 0, seed 3: "+c.want) {
			t.Errorf("%s: %v, want %q", name, commands, c.want)
		}
	}
}

// TestHeuristicOnANetwork checks on random measurements that every command is allowed, that budgets
// hold, and that seeds reach all possible ends. One network in some hundreds fills up with fossils
// before its seeds have met all ends.
func TestHeuristicOnANetwork(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	reached := map[state.Stage]int{}
	ends := []state.Stage{state.Fossilized, state.Culled, state.RolledBack, state.Dormant}
	missing := func(s state.Stage) bool { return reached[s] == 0 }
	for networks := 0; networks == 0 || networks < 10 && slices.ContainsFunc(ends,
		missing); networks++ {
		growAtRandom(t, r, reached)
	}

	if slices.ContainsFunc(ends, missing) {
		t.Errorf("seeds became %v, want some to reach each of %v", reached, ends)
	}
}

// growAtRandom lets a heuristic control a network with random measurements, and counts the final
// stages of its seeds.
func growAtRandom(t *testing.T, r *rand.Rand, reached map[state.Stage]int) {
	t.Helper()
	thresholds := state.DefaultThresholds()
	clear(thresholds.MinEpochs[:])
	n, m := networkOf(t, state.WithThresholds(thresholds), state.WithSlots(4), state.WithWidth(8))
	h := control.NewHeuristic(3, 6*9)
	h.Patience, h.RampEpochs = 20, 4
	if _, err := n.Listen(func(e state.Event) { reached[e.To]++ }); err != nil {
		t.Fatal(err)
	}

	for range 600 {
		metrics := make([]state.Metrics, 2)
		for layer, l := range n.Lattices() {
			metrics[layer].Loss = 1 + r.Float64()
			measure(t, r, l)
			for s := range l.Seeds() {
				metrics[layer].Seeds = append(metrics[layer].Seeds,
					state.SeedMetrics{Seed: s, TrainingError: math.NaN(), Performance: -1,
						Compared: true, Without: -1 - 0.1*r.NormFloat64(),
						Stability: math.Sqrt(r.Float64())})
			}
		}

		for at, p := range m { // blueprints learn
			m[at] = state.SlotParams{Weights: p.Weights, Scale: p.Scale + 0.01}
		}
		if _, err := n.StepEpoch(metrics); err != nil {
			t.Fatal(err)
		}

		for _, c := range h.Decide(n.Report()) {
			if err := n.Do(c); err != nil {
				t.Fatal(err)
			}
		}

		active, living := 0, 0
		for _, report := range n.Report() {
			var slots []int
			for _, s := range report.Seeds {
				if s.Stage > state.Dormant && !s.Stage.Ended() {
					living++
					if s.Stage != state.Fossilized {
						active++
					}
					slots = append(slots, s.Slot)
				}
			}
			slices.Sort(slots)
			if len(slices.Compact(slices.Clone(slots))) != len(slots) {
				t.Fatalf("slots %v", slots)
			}
		}

		if active > 3 || living > 6 {
			t.Fatalf("%d seeds are active and %d living, want at most 3 and 6", active, living)
		}
	}
}

func TestDryRun(t *testing.T) {
	var out strings.Builder
	r := healthy()
	r.Seeds[1].Health.DeadRatio = 1
	if commands := control.DryRun(heuristic(1, 100),
		&out).Decide([]state.Report{r}); len(commands) > 0 {
		t.Errorf("it would do %v", commands)
	}

	want := "would do: layer 0, seed 1: germinate Residual in slot 1, to be grafted by " +
		"PerformanceLinked, because its place is dead (2.00 times the limit)\n"
	if out.String() != want {
		t.Errorf("it says %q, want %q", out.String(), want)
	}
}

func TestHeuristicCheck(t *testing.T) {
	if err := control.NewHeuristic(3, 100).Check(); err != nil {
		t.Error(err)
	}

	for name, change := range map[string]func(*rules){
		"Hunger": func(h *rules) {
			h.Hunger = 0
		}, "Spike": func(h *rules) { h.Spike = math.Inf(1) },
		"Patience": func(h *rules) {
			h.Patience = 0
		}, "RampEpochs": func(h *rules) { h.RampEpochs = 1 << 16 },
		"MaxActive is -1, want at least 0": func(h *rules) { h.MaxActive = -1 },
	} {
		h := control.NewHeuristic(3, 100)
		if change(h); h.Check() == nil || !strings.Contains(h.Check().Error(), name) {
			t.Errorf("%s: %v", name, h.Check())
		}
	}
}

// TestLeastEpochs checks the minimum duration of a life, and the error for a controller without the
// patience for it.
func TestLeastEpochs(t *testing.T) {
	l, err := state.NewLattice(2, 4)
	require.NoError(t, err)
	h := control.NewHeuristic(1, 100)
	n, err := h.LeastEpochs(l, 1)
	require.NoError(t, err)
	require.Equal(t, 1+1+100+50+20+30+50, n)
	h.RampEpochs, h.Begin = 400, 9
	n, err = h.LeastEpochs(l, 40)
	require.NoError(t, err)
	require.Equal(t, 9+1+100+100+20+40+50, n)
	h.Patience = 98
	_, err = h.LeastEpochs(l, 1)
	require.ErrorContains(t, err,
		"Patience of 98 epochs ends before the gate out of Training can open, after 100")
	free, err := state.NewLattice(2, 4, state.WithoutGates())
	require.NoError(t, err)
	n, err = h.LeastEpochs(free, 1)
	require.NoError(t, err)
	require.Zero(t, n)
}

// TestDryRunChecks checks that a dry run fails the check if its controller does.
func TestDryRunChecks(t *testing.T) {
	for _, c := range []state.Controller{nil, &control.Heuristic{}} {
		check, ok := control.DryRun(c, nil).(interface{ Check() error })
		require.True(t, ok)
		require.ErrorIs(t, check.Check(), state.ErrArgument)
	}
}

// TestTogether checks that combined controllers decide as each would alone, receive everything that
// a trainer offers them, and fail the check if one does.
func TestTogether(t *testing.T) {
	depth, seeds := control.NewDepth(blueprints.Stack, 2), control.NewHeuristic(1, 100)
	both := control.Together(depth, seeds)
	require.Implements(t, (*interface{ Check() error })(nil), both)
	require.NoError(t, both.(interface{ Check() error }).Check())
	unwell := healthy()
	unwell.Seeds[1].Health.DeadRatio = 1
	late := state.Report{Site: blueprints.Depth, Seeds: make([]state.SeedReport, 1)}
	for i := range 9 {
		late.Curve = append(late.Curve, state.Point{Epoch: i, Share: 0.06 * float64(i+1), Loss: 1})
	}

	late.Curve[8].Share = depth.End
	reports := []state.Report{unwell, late}
	want := append(depth.Decide(reports), seeds.Decide(reports)...)
	require.Len(t, want, 4)
	require.Equal(t, want, both.Decide(reports))
	planner := both.(interface {
		LeastEpochs(*state.Lattice, int) (int, error)
	})
	l, err := state.NewLattice(2, 4)
	require.NoError(t, err)
	n, err := planner.LeastEpochs(l, 1)
	require.NoError(t, err)
	alone, err := seeds.LeastEpochs(l, 1)
	require.NoError(t, err)
	require.Equal(t, alone, n)
	asked := 0
	both.(interface {
		Parameters(func(layer, seed int, kind blueprints.Kind, size int) int)
	}).Parameters(func(int, int, blueprints.Kind, int) int { asked++; return 101 })
	err = both.(interface{ Affords([]state.Report) error }).Affords([]state.Report{
		{Site: blueprints.Stream, Seeds: make([]state.SeedReport, 1)}})
	require.ErrorIs(t, err, state.ErrArgument)
	require.Positive(t, asked)
	for _, c := range []state.Controller{control.Together(), control.Together(depth, nil),
		control.Together(depth, &control.Heuristic{})} {
		require.ErrorIs(t, c.(interface{ Check() error }).Check(), state.ErrArgument)
	}
}

// TestEmptyDryRun checks that a dry run without a controller or reports commands nothing.
func TestEmptyDryRun(t *testing.T) {
	require.Empty(t, control.DryRun(nil, nil).Decide([]state.Report{{}}))
	require.Empty(t, control.DryRun(control.NewHeuristic(1, 1), nil).Decide(nil))
}

// TestNoController checks that unconfigured controllers and nil lattices are errors.
func TestNoController(t *testing.T) {
	l, err := state.NewLattice(2, 4)
	require.NoError(t, err)
	for _, c := range []interface {
		state.Controller
		Check() error
		LeastEpochs(l *state.Lattice, every int) (int, error)
	}{&control.Heuristic{}, &control.Depth{}} {
		require.ErrorIs(t, c.Check(), state.ErrArgument)
		_, err := c.LeastEpochs(l, 1)
		require.ErrorIs(t, err, state.ErrArgument)
		c.Decide([]state.Report{{}, l.Report()})
	}

	_, err = control.NewHeuristic(1, 1).LeastEpochs(nil, 1)
	require.ErrorContains(t, err, "the lattice is nil")
	_, err = control.NewDepth(blueprints.Stack, 2).LeastEpochs(nil, 1)
	require.ErrorContains(t, err, "the lattice is nil")
}

// TestHeuristicPlaces checks AtRandom, with different seeds for different numbers, and AllAtOnce.
func TestHeuristicPlaces(t *testing.T) {
	planted := func(where control.Where, random uint64, most int) (places [][2]int) {
		h := heuristic(most, 1000)
		h.PerEpoch, h.Where, h.Random = 2, where, random
		require.NoError(t, h.Check())
		for _, c := range h.Decide([]state.Report{healthy(), healthy()}) {
			require.Equal(t, state.Germinate, c.Action)
			require.Equal(t, blueprints.ChunkMLP, c.Request.Kind)
			places = append(places, [2]int{c.Layer, c.Seed})
		}
		return places
	}

	require.Empty(t, planted(control.Unhealthiest, 1, 8))
	require.Len(t, planted(control.AllAtOnce, 1, 8), 8)
	require.Len(t, planted(control.AllAtOnce, 1, 5), 5)
	require.Equal(t, planted(control.AtRandom, 1, 8), planted(control.AtRandom, 1, 8))
	others := map[string]bool{}
	for random := range uint64(8) {
		places := planted(control.AtRandom, random, 8)
		require.Len(t, places, 2)
		others[fmt.Sprint(places)] = true
	}

	require.Greater(t, len(others), 2)
	h := heuristic(1, 1)
	h.Where = "everywhere"
	require.ErrorContains(t, h.Check(), `Where is "everywhere"`)
}

// TestHeuristicElsewhere checks that the heuristic plants a LoRA at the weight with the largest
// gradient, and a Perceptron in the stream, within the budget of parameters.
func TestHeuristicElsewhere(t *testing.T) {
	at := func(site blueprints.Site, needs ...float64) state.Report {
		r := state.Report{Epoch: 5, Site: site, Hidden: len(needs)}
		for i, n := range needs {
			r.Seeds = append(r.Seeds, seed{Seed: i, Gradient: state.Gradient{Norm: n}})
		}
		return r
	}

	h := heuristic(10, 100)
	h.Hunger, h.Rank, h.Features = 1.2, 3, 20
	h.Parameters(func(layer, _ int, kind blueprints.Kind, size int) int {
		require.Equal(t, [][2]any{{blueprints.LoRA, 3}, {blueprints.Perceptron, 20}}[layer],
			[2]any{kind, size})
		return 40
	})
	var got []string
	for _, c := range h.Decide([]state.Report{at(blueprints.Weight, 1, 0, 1, 4, 1),
		at(blueprints.Stream, 1, 1, 2, 1)}) {
		got = append(got, c.String())
	}

	require.Equal(t, []string{
		"layer 0, seed 3: germinate LoRA of size 3, because its place is hungry (3.33 times the limit)",
		"layer 1, seed 2: germinate Perceptron of size 20, because its place is hungry (1.67 times the limit)",
	}, got)
	h.MaxParameters = 40
	require.Len(t, h.Decide([]state.Report{at(blueprints.Weight, 1, 9, 1, 4)}), 1)
}
