package state_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// seedModel is a second, independent implementation of the specification of a seed.
type seedModel struct {
	stage    state.Stage
	slot     int
	kind     blueprints.Kind
	alpha    float64 // the seed's own α
	epochs   int
	embargo  int // first epoch of a possible Recycle
	ramp     graft.FixedRamp
	finished bool
	past     []state.Transition
}

// latticeModel predicts the effect of each command on a lattice.
type latticeModel struct {
	epoch int
	seeds []seedModel
}

const (
	modelSlots     = 9
	modelEmbargo   = 3
	modelMinEpochs = 2 // in Training, Grafting and Evaluating
)

func (m *latticeModel) move(seed int, to state.Stage) error {
	s := &m.seeds[seed]
	if !slices.Contains(table[s.stage], to) {
		return state.ErrTransition
	}

	least := map[state.Stage]int{state.Training: modelMinEpochs, state.Grafting: modelMinEpochs,
		state.Evaluating: modelMinEpochs}[s.stage]
	if to != state.RolledBack && s.epochs < least {
		return state.ErrGate
	}
	if s.stage == state.Training && to == state.Grafting || s.stage == state.Evaluating &&
		to != state.RolledBack ||
		s.stage == state.FineTuning && to == state.Fossilized {
		return state.ErrGate // nothing is reported that would open the gate
	}
	m.enter(s, to)
	return nil
}

func (m *latticeModel) enter(s *seedModel, to state.Stage) {
	s.past = append([]state.Transition{{Epoch: m.epoch, From: s.stage, To: to}}, s.past...)
	s.past = s.past[:min(4, len(s.past))]
	s.stage, s.epochs, s.finished = to, 0, false
	switch {
	case to == state.Germinated:
		s.alpha = 0
	case to == state.FineTuning:
		s.alpha = 1
	case to.Ended():
		s.alpha, s.embargo = 0, m.epoch+modelEmbargo
	}
}

func (m *latticeModel) do(c state.Command) error {
	s := &m.seeds[c.Seed]
	switch c.Action {
	case state.Germinate:
		switch {
		case s.stage != state.Dormant:
			return state.ErrTransition
		case c.Request.Slot < 1 || c.Request.Slot >= modelSlots ||
			c.Request.Strategy.Check() != nil || c.Request.Kind > 199:
			return state.ErrArgument
		}
		s.slot, s.kind, s.ramp = c.Request.Slot, c.Request.Kind,
			c.Request.Strategy.(graft.FixedRamp)
		m.enter(s, state.Germinated)
	case state.Move:
		return m.move(c.Seed, c.To)
	case state.Recycle:
		if !s.stage.Ended() {
			return state.ErrTransition
		}
		if m.epoch < s.embargo {
			return state.ErrEmbargo
		}
		s.slot, s.kind = 0, 0
		s.ramp = graft.FixedRamp{Epochs: 50, Target: 1}
		m.enter(s, state.Dormant)
	case state.SetAlpha:
		if !(c.Alpha >= 0 && c.Alpha <= 1) {
			return state.ErrArgument
		}
		s.alpha = float64(float32(c.Alpha))
	}

	return nil
}

func (m *latticeModel) endEpoch() {
	m.epoch++
	for i := range m.seeds {
		s := &m.seeds[i]
		if s.epochs < math.MaxUint16 {
			s.epochs++
		}
		if s.stage == state.Grafting && !s.finished {
			f := min(1, float64(s.epochs)/float64(s.ramp.Epochs))
			s.alpha = max(s.alpha, float64(float32(s.ramp.Target*f)))
			s.finished = s.epochs >= s.ramp.Epochs
		}
	}
}

// share returns the effective α of the output.
func (s *seedModel) share() float64 {
	switch s.stage {
	case state.Grafting, state.Stabilization, state.Evaluating:
		return s.alpha
	case state.FineTuning, state.Fossilized:
		return 1
	}
	return 0
}

// TestRandomCommands sends many random commands (most are rejected) and checks after each that the
// lattice is in the predicted state. All checksums must match at the end.
func TestRandomCommands(t *testing.T) {
	commands := 20_000 // drawn differently in each run
	if randtest.Long() {
		commands = 500_000
	}

	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	thresholds := state.DefaultThresholds()
	clear(thresholds.MinEpochs[:])
	for _, s := range []state.Stage{state.Training, state.Grafting, state.Evaluating} {
		thresholds.MinEpochs[s] = modelMinEpochs
	}

	const seeds = 12
	options := []state.Option{state.WithThresholds(thresholds), state.WithSlots(modelSlots),
		state.WithEmbargo(modelEmbargo)}
	open := lattice(t, seeds, 2*seeds, options...)
	free := lattice(t, seeds, 2*seeds, append(options, state.WithoutGates())...)
	for _, l := range []*state.Lattice{open, free} {
		testRandomCommands(t, r, l, l == free, commands/2)
	}
}

func testRandomCommands(t *testing.T, r *rand.Rand, l *state.Lattice, free bool, commands int) {
	n, err := state.NewNetwork(nil, state.Layer{Name: "x", Lattice: l})
	if err != nil {
		t.Fatal(err)
	}

	m := &latticeModel{seeds: make([]seedModel, l.Seeds())}
	for i := range m.seeds {
		m.seeds[i].ramp = graft.FixedRamp{Epochs: 50, Target: 1}
	}

	var seen revisions
	for k := range commands {
		seen.check(t, l)
		if r.IntN(8) == 0 {
			if _, err := l.StepEpoch(state.Metrics{}); err != nil {
				t.Fatal(err)
			}
			m.endEpoch()
			continue
		}
		c := anyCommand(r, m)
		want := m.allow(c, free)
		if got := n.Do(c); (got == nil) != (want == nil) || want != nil && !errors.Is(got, want) {
			t.Fatalf("command %d, %v of a seed in %v: error %v, want %v", k, c,
				m.seeds[c.Seed].stage, got, want)
		}
		if k%64 == 0 || k == commands-1 {
			compareWithModel(t, l, m)
		}
	}
}

// revisions checks that the revision of a lattice changes with its seeds.
type revisions struct {
	snapshot state.Pass
	revision uint64
}

func (r *revisions) check(t *testing.T, l *state.Lattice) {
	t.Helper()
	var now state.Pass
	revision := l.Revision()
	l.Begin(&now, false)
	same := slices.Equal(now.Stage, r.snapshot.Stage) && slices.Equal(now.Slot, r.snapshot.Slot) &&
		slices.Equal(now.Kind, r.snapshot.Kind) && slices.Equal(now.Alpha, r.snapshot.Alpha)
	if !same && r.snapshot.Stage != nil && revision == r.revision {
		t.Fatalf("the seeds have changed, but the revision is still %d", revision)
	}
	r.snapshot, r.revision = now, revision
}

// TestRevision checks which calls change the revision of a lattice.
func TestRevision(t *testing.T) {
	l := lattice(t, 2, 4, state.WithoutGates())
	last := l.Revision()
	changed := func() bool {
		defer func() { last = l.Revision() }()
		return l.Revision() != last
	}

	var p state.Pass
	l.Begin(&p, true)
	if err := l.RecordHealth(&p, func(int) state.HealthSample { return state.HealthSample{} }); err != nil ||
		changed() {
		t.Errorf("recording a pass changes the revision, or fails: %v", err)
	}

	for name, change := range map[string]func() error{
		"telemetry": func() error { return l.SetTelemetry(state.Telemetry{Mode: state.Off}) },
		"muted":     func() error { return l.Mute(1, true) },
		"unmuted":   func() error { return l.Mute(1, false) },
		"loaded": func() error {
			data, err := l.MarshalBinary()
			if err != nil {
				return err
			}
			return l.UnmarshalBinary(data)
		},
		"repaired": func() error {
			l.Quarantine()
			return nil
		},
	} {
		if err := change(); err != nil || !changed() {
			t.Errorf("%s: the revision has not changed, or an error: %v", name, err)
		}
	}
}

// allow is like do, but without gates it ignores rejections that only gates would cause.
func (m *latticeModel) allow(c state.Command, free bool) error {
	err := m.do(c)
	if free && errors.Is(err, state.ErrGate) {
		m.enter(&m.seeds[c.Seed], c.To)
		return nil
	}
	return err
}

// anyCommand favors transitions that the table allows, because uniformly drawn ones would leave
// most stages unvisited.
func anyCommand(r *rand.Rand, m *latticeModel) state.Command {
	c := state.Command{Seed: r.IntN(len(m.seeds)), Action: state.Action(1 + r.IntN(4)),
		To: state.Stage(r.IntN(stages + 1))}
	if next := table[m.seeds[c.Seed].stage]; len(next) > 0 && r.IntN(2) == 0 {
		c.Action, c.To = state.Move, next[r.IntN(len(next))]
	}

	if c.Action == state.Move && m.seeds[c.Seed].stage == state.Dormant &&
		c.To == state.Germinated {
		c.Action = state.Germinate
	}

	c.Alpha = r.Float64()*1.1 - 0.05
	c.Request = state.GerminationRequest{Slot: r.IntN(modelSlots+2) - 1,
		Kind:     blueprints.Kind(r.IntN(4)),
		Strategy: graft.FixedRamp{Epochs: r.IntN(6), Target: float64(1+r.IntN(4)) / 4}}
	if r.IntN(20) == 0 {
		c.Request.Kind = 200
	}
	return c
}

func compareWithModel(t *testing.T, l *state.Lattice, m *latticeModel) {
	t.Helper()
	if err := l.Verify(); err != nil {
		t.Fatal(err)
	}

	report := l.Report()
	if report.Epoch != m.epoch {
		t.Fatalf("epoch %d, want %d", report.Epoch, m.epoch)
	}

	for i, got := range report.Seeds {
		want := &m.seeds[i]
		past, err := l.Transitions(i)
		if err != nil {
			t.Fatal(err)
		}
		if got.Stage != want.stage || got.Slot != want.slot || got.Kind != want.kind ||
			got.EpochsInStage != want.epochs ||
			math.Abs(got.Alpha-want.share()) > 1e-7 || got.RampFinished != want.finished ||
			!slices.Equal(past, want.past) ||
			got.CanRecycle != (want.stage.Ended() && m.epoch >= want.embargo) {
			t.Fatalf("seed %d is %+v after %v, want %+v", i, got, past, *want)
		}
	}
}

// TestStrategiesAreFed checks that measurements reach the strategies: drift delays one, the
// gradient norm delays another, and performance accelerates a third.
func TestStrategiesAreFed(t *testing.T) {
	l := lattice(t, 4, 8, state.WithoutGates())
	for seed, s := range []graft.Strategy{
		graft.DriftControlled{Epochs: 10, Target: 1, Threshold: 0.25, Pause: 2},
		graft.GradNormGated{Epochs: 10, Target: 1, Low: 0.5, High: 2},
		graft.PerformanceLinked{Epochs: 10, Target: 1, Gain: 1, MaxSpeed: 8},
		graft.FixedRamp{Epochs: 10, Target: 1},
	} {
		if err := l.RequestGermination(seed, state.GerminationRequest{Slot: 1,
			Strategy: s}); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(l.Transition(seed, state.Training),
			l.Transition(seed, state.Grafting)); err != nil {
			t.Fatal(err)
		}
	}

	mean := 1.0
	for epoch, want := range [][4]float64{{0.1, 0.1, 0.1, 0.1}, {0.2, 0.1, 0.3, 0.2},
		{0.2, 0.2, 0.7, 0.3}, {0.2, 0.3, 0.8, 0.4}, {0.3, 0.4, 0.9, 0.5}} {
		norm := 1.0
		if epoch == 1 {
			norm = 3
		}
		if epoch == 2 {
			mean = 4
		}
		pass(t, l, true,
			state.HealthSample{Moments: state.Moments{Count: 8, Mean: mean, Variance: 0.01}},
			state.GradientSample{Gradient: state.Gradient{Norm: norm},
				Norms: state.Moments{Count: 1, Mean: norm}})
		if _, err := l.StepEpoch(state.Metrics{Seeds: []state.SeedMetrics{{Seed: 2,
			Performance: math.Min(float64(epoch), 2)}}}); err != nil {
			t.Fatal(err)
		}

		for seed, s := range l.Report().Seeds {
			if math.Abs(s.Alpha-want[seed]) > 1e-6 {
				t.Errorf("epoch %d: α of seed %d is %v, want %v (drift %v)", epoch, seed,
					s.Alpha, want[seed], s.Drift)
			}
		}
	}
}
