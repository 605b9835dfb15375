package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// flip inverts a bit of a seed's field.
func flip(c columns.Column, seed, bit int) {
	b := make([]byte, c.Width())
	c.Gather(b, len(b), seed, seed+1)
	b[bit/8] ^= 1 << (bit % 8)
	c.Scatter(b, len(b), seed, seed+1)
}

// TestVerifyFindsEveryBit checks that Verify finds any flipped bit of any field and names the seed,
// the field and the bit.
func TestVerifyFindsEveryBit(t *testing.T) {
	l := filled(t, 5)
	for _, c := range l.seeds.saved() {
		for seed := range l.n {
			for bit := range 8 * c.Width() {
				flip(c, seed, bit)
				want := fmt.Sprintf("seed %d does not match its checksum: bit %d of %s has "+
					"flipped (1 of 5", seed, bit, c.Name)
				if c.Name == crcName {
					want = fmt.Sprintf("seed %d does not match its checksum: bit %d of its "+
						"checksum has flipped (1 of 5", seed, bit)
				}
				if err := l.Verify(); !errors.Is(err, ErrCorrupt) ||
					!strings.Contains(err.Error(), want) {
					t.Fatalf("bit %d of %s of seed %d flipped: error %v", bit, c.Name, seed, err)
				}
				flip(c, seed, bit)
			}
		}
	}

	if err := l.Verify(); err != nil {
		t.Error(err)
	}

	l.seeds.stage[1], l.seeds.stage[4] = 99, 99
	err := l.Verify()
	if err == nil || !strings.Contains(err.Error(), "seed 1 ") ||
		!strings.Contains(err.Error(), "2 of 5") {
		t.Errorf("two bad seeds: error %v", err)
	}
}

// TestCorruptionIsNotSealedIn checks that passes leave a corrupt seed corrupt, and that every command
// that would change it is rejected.
func TestCorruptionIsNotSealedIn(t *testing.T) {
	l := filled(t, 4)
	l.seeds.stage[2] = uint8(Dormant)
	l.seal(0, 4)
	flip(columns.Column{Name: "slot", Array: &l.seeds.slot}, 2, 3)
	var p Pass
	l.Begin(&p, true)
	err := errors.Join(
		l.RecordHealth(&p, func(int) HealthSample {
			return HealthSample{Moments: Moments{Count: 1, Mean: 3}}
		}),
		l.RecordGradient(&p, func(int) GradientSample {
			return GradientSample{Norms: Moments{Count: 1, Mean: 3}}
		}))

	if err != nil {
		t.Fatal(err)
	}

	const want = "seed 2 does not match its checksum: bit 3 of slot has flipped"
	for name, command := range map[string]func() error{
		"Verify":     l.Verify,
		"Transition": func() error { return l.Transition(2, Germinated) },
		"Request":    func() error { return l.RequestGermination(2, GerminationRequest{Slot: 1}) },
		"Recycle":    func() error { return l.Recycle(2) },
		"SetAlpha":   func() error { return l.SetAlpha(2, 0.5) },
		"StepEpoch":  func() error { _, err := l.StepEpoch(Metrics{}); return err },
		"Unmarshal": func() error {
			data, err := l.MarshalBinary()
			return errors.Join(err, new(Lattice).UnmarshalBinary(data))
		},
	} {
		epoch := l.epoch
		if err := command(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), want) ||
			l.epoch != epoch {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestQuarantine checks that a quarantine resets corrupt seeds, both in memory and on loading, and
// no others.
func TestQuarantine(t *testing.T) {
	for _, load := range []bool{false, true} {
		l, err := NewLattice(5, 10, WithoutGates(), WithQuarantine())
		if err != nil {
			t.Fatal(err)
		}

		for seed := range 5 {
			if err := l.RequestGermination(seed, GerminationRequest{Slot: 1 + seed}); err != nil {
				t.Fatal(err)
			}
		}

		flip(columns.Column{Name: "alpha", Array: &l.seeds.alpha}, 3, 30)
		l.seeds.stage[1], l.seeds.kind[1] = 200, 77
		if load {
			data, err := l.MarshalBinary()
			if err == nil {
				l = &Lattice{}
				err = l.UnmarshalBinary(data)
			}
			if err == nil {
				err = l.Verify()
			}
			if err != nil {
				t.Fatal(err)
			}
		}

		var heard []Event
		if _, err := l.Listen(func(e Event) { heard = append(heard, e) }); err != nil {
			t.Fatal(err)
		}

		events, err := l.StepEpoch(Metrics{})
		if err != nil || len(events) != 2 || !slices.Equal(events, heard) {
			t.Fatalf("events %v, heard %v, error %v", events, heard, err)
		}

		for i, want := range []Event{{Quarantined, 0, 1, 0, 0, 0, 0,
			"more than one bit has changed"},
			{Quarantined, 0, 3, 0, 0, 0, 0, "bit 30 of alpha has flipped"}} {
			if events[i] != want {
				t.Errorf("event %+v, want %+v", events[i], want)
			}
		}

		for seed, s := range l.Report().Seeds {
			if want := seed != 1 && seed != 3; (s.Stage == Germinated) != want ||
				(s.Slot == 1+seed) != want {
				t.Errorf("seed %d is %v with slot %d", seed, s.Stage, s.Slot)
			}
		}

		if err := errors.Join(l.Verify(),
			l.RequestGermination(3, GerminationRequest{Slot: 4})); err != nil {
			t.Error(err)
		}
		if events, err := l.StepEpoch(Metrics{}); err != nil || len(events) > 0 {
			t.Errorf("events %v again, error %v", events, err)
		}
	}
}

// TestScrub checks that a scrub finds a seed that is corrupted while it runs.
func TestScrub(t *testing.T) {
	l := filled(t, 3000)
	ctx, cancel := context.WithCancel(context.Background())
	found := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		l.Scrub(ctx, time.Millisecond, func(err error) {
			select {
			case found <- err:
			// The scrub finds it every millisecond until this test has stopped it.
			default:
			}
		})
	})

	time.Sleep(5 * time.Millisecond)
	l.mu.Lock()
	flip(columns.Column{Name: "clips", Array: &l.seeds.clips}, 2500, 63)
	l.mu.Unlock()
	if err := <-found; !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(),
		"seed 2500 does not match its checksum: bit 63 of clips") {
		t.Error(err)
	}
	if q := l.Quarantine(); len(q) != 1 || q[0].Seed != 2500 {
		t.Errorf("quarantined %v", q)
	}

	cancel()
	wg.Wait()
	if err := l.Verify(); err != nil {
		t.Error(err)
	}
}

// TestOlderFixture checks that a file of schema 2, written by the program of that time, loads with
// its contents, and that it is saved in the current schema.
func TestOlderFixture(t *testing.T) {
	data, err := os.ReadFile("testdata/schema2.lattice")
	if err != nil {
		t.Fatal(err)
	}

	var l Lattice
	if err := errors.Join(l.UnmarshalBinary(data), l.Verify()); err != nil {
		t.Fatal(err)
	}

	r := l.Report()
	if r.Epoch != 2 || r.Step != 2 || len(r.Seeds) != 6 || l.Hidden() != 24 || l.Slots() != 7 ||
		l.config.Embargo != 3 || l.config.Gates {
		t.Errorf("%+v, %+v", r, l.config)
	}

	for i, want := range []struct {
		stage Stage
		kind  blueprints.Kind
	}{{Dormant, 0}, {Training, blueprints.AttentionGate}, {Grafting, blueprints.ConvFilter},
		{Fossilized, blueprints.MLPExpansion},
		{Culled, blueprints.Residual}, {Evaluating, blueprints.Residual}} {
		s, v := r.Seeds[i], float64(i+1)/8
		health := Health{Variance: v, Mean: -v, Min: -2 * v, Max: 3 * v,
			DeadRatio: v / 4, SNR: 0.5}
		if s.Stage != want.stage || s.Kind != want.kind || s.Health != health ||
			s.Gradient != (Gradient{Norm: 0.25, Variance: 0.125, Max: 0.5}) ||
			s.NonFiniteX != 2*(i%2) || s.Clips != 2*i {
			t.Errorf("seed %d is %+v", i, s)
		}
		if l.seeds.runMean[i] != -v || l.seeds.runCount[i] != 64 {
			t.Errorf("seed %d: running moments %v, %v", i, l.seeds.runMean[i], l.seeds.runCount[i])
		}
		if past, err := l.Transitions(i); err != nil || past != nil {
			t.Errorf("seed %d remembers %v, error %v", i, past, err)
		}
	}

	cosine := 0.75 * (1 - math.Cos(math.Pi*2/8)) / 2
	if s := r.Seeds[2]; math.Abs(s.Alpha-cosine) > 1e-7 || s.Performance != -1.5 ||
		s.Stability != 0.875 || s.Delta != 0.5 || s.Improvement != 0.25 {
		t.Errorf("%+v", s)
	}
	if e := l.evidence(2); e.TrainingError != 0.125 || e.Errors != 2 ||
		e.ErrorRate != 1.0/8 || !e.LossFalling {
		t.Errorf("%+v", e)
	}
	if !reflect.DeepEqual(l.strategies[l.seeds.strategy[5]].Strategy,
		graft.FixedRamp{Ramp: graft.Sigmoid, Epochs: 4, Target: 1}) {
		t.Error(l.strategies)
	}
	if err := l.Recycle(4); !errors.Is(err, ErrEmbargo) {
		t.Error(err)
	}

	again, err := l.MarshalBinary()
	if err != nil || !strings.Contains(string(again[:40]), fmt.Sprintf(`"schema":%d`, Schema)) {
		t.Errorf("%q, %v", again[:40], err)
	}
}

// TestBytesOfASeed checks that a seed takes at most 112 bytes in addition to its statistics, that
// is, the measured figures and the moments derived from them.
func TestBytesOfASeed(t *testing.T) {
	l, err := NewLattice(1, 1)
	if err != nil {
		t.Fatal(err)
	}

	statistics := 0
	for _, c := range l.seeds.columns() {
		if slices.Contains([]string{"variance", "mean", "min", "max", "dead_ratio", "snr",
			"grad_norm", "grad_variance", "grad_max", "drift",
			"step_mean", "step_variance", "step_count", "run_mean", "run_variance", "run_count",
			"epoch_mean", "epoch_variance",
			"norm_mean", "norm_variance", "norm_count"}, c.Name) {
			statistics += c.Width()
		}
	}

	all := columns.RowWidth(l.seeds.saved())
	t.Logf("%d bytes a seed, %d of them statistics", all, statistics)
	if all-statistics > 112 || statistics == 0 {
		t.Errorf("%d bytes a seed without its statistics, want at most 112", all-statistics)
	}
}

// TestWithTransitions checks that a seed remembers its last transitions, as many as requested.
func TestWithTransitions(t *testing.T) {
	for _, n := range []int{0, 1, 3} {
		l, err := NewLattice(2, 8, WithTransitions(n), WithoutGates())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.RequestGermination(1, GerminationRequest{Slot: 1}); err != nil {
			t.Fatal(err)
		}

		for _, to := range []Stage{Training, Grafting, Stabilization} {
			if err := l.Transition(1, to); err != nil {
				t.Fatal(err)
			}
		}

		past, err := l.Transitions(1)
		if err != nil || len(past) != n {
			t.Errorf("of 4 transitions %d are remembered, %v, want %d", len(past), err, n)
			continue
		}

		if n > 0 && past[0].To != Stabilization {
			t.Errorf("the latest transition is to %v, want Stabilization", past[0].To)
		}
	}

	if _, err := NewLattice(2, 8, WithTransitions(256)); err == nil {
		t.Error("256 transitions are accepted, want at most 255")
	}
}

// TestCommandsAreJSON checks that every command survives a round trip through JSON.
func TestCommandsAreJSON(t *testing.T) {
	for _, c := range []Command{
		{Action: Germinate, Layer: 1, Seed: 2, Why: "it is \"hungry\"",
			Request: GerminationRequest{Slot: 3,
				Kind: blueprints.ConvFilter, Strategy: graft.GradNormGated{Epochs: 9,
					Target: 0.5, High: 3}}},
		{Action: Germinate, Request: GerminationRequest{Kind: blueprints.Stack, Size: 4}},
		{Action: Move, Seed: 5, To: RolledBack},
		{Action: Recycle, Layer: 4},
		{Action: SetAlpha, Alpha: 0.3},
		{Action: Quarantine},
		{Action: Load, Kind: blueprints.LowRank,
			Params: SlotParams{Weights: []float64{1, -0.1}, Scale: 2}},
		{Action: Measure, Layer: 1, Why: "to save time",
			Telemetry: Telemetry{Mode: Sampling, Reduction: MaxOfRows, Every: 3, Share: 0.25}},
		{Action: Measure},
	} {
		text, err := json.Marshal(c)
		require.NoError(t, err)
		var again Command
		require.NoError(t, json.Unmarshal(text, &again), "%s", text)
		require.Equal(t, c, again, "%s", text)
	}

	for _, bad := range []string{`{}`, `{"action":"Grow"}`, `{"action":"Move","to":"Away"}`,
		`{"action":"Move","seed":-1,"to":"Culled"}`,
		`{"action":"Germinate","kind":"None"}`,
		`{"action":"Germinate","kind":"Stack","strategy":{"name":"no"}}`, `[]`,
		`{"action":"Measure"}`, `{"action":"Measure","telemetry":{"mode":"Loud"}}`,
		`{"action":"Measure","telemetry":{"mode":"TelemetryMode(4)"}}`,
		`{"action":"Measure","telemetry":{"mode":"Off","reduction":"None"}}`,
		`{"action":"Measure","telemetry":{"mode":"Sampling","every":-1}}`} {
		require.Error(t, json.Unmarshal([]byte(bad), &Command{}), bad)
	}
}

func depthLattice(t *testing.T, seeds int) *Lattice {
	t.Helper()
	l, err := NewLattice(seeds, seeds, At(blueprints.Depth))
	require.NoError(t, err)
	return l
}

// TestDepthSeed checks that seeds in depth go through all stages, one seed at a time.
func TestDepthSeed(t *testing.T) {
	l := depthLattice(t, 2)
	stack := GerminationRequest{Kind: blueprints.Stack, Size: 4}
	for _, bad := range []GerminationRequest{
		{Kind: blueprints.Stack}, {Kind: blueprints.Stack, Size: -1},
		{Kind: blueprints.LowRank, Size: 1},
		{Kind: blueprints.Stack, Size: 4, Slot: 1}, {Kind: 255, Size: 1},
	} {
		require.ErrorIs(t, l.RequestGermination(0, bad), ErrArgument, "%+v", bad)
	}

	require.NoError(t, l.RequestGermination(0, stack))
	require.NoError(t,
		l.RequestGermination(1, GerminationRequest{Kind: blueprints.NewBlocks, Size: 1}))
	for _, to := range []Stage{Training, Grafting} {
		require.NoError(t, l.Transition(0, to))
	}

	require.NoError(t, l.Transition(1, Training))
	require.ErrorIs(t, l.Transition(1, Grafting), ErrTransition)
	for _, to := range []Stage{Stabilization, Evaluating} {
		require.NoError(t, l.Transition(0, to))
	}

	require.ErrorIs(t, l.Transition(0, FineTuning), ErrGate)
	score := SeedMetrics{Seed: 0, TrainingError: 0, Performance: -2, Without: -2.1,
		Compared: true, Stability: 1}
	_, err := l.StepEpoch(Metrics{Loss: 2, Share: 0.5, Seeds: []SeedMetrics{score}})
	require.NoError(t, err)
	require.NoError(t, l.Transition(0, FineTuning))
	_, err = l.StepEpoch(Metrics{Loss: 1.9, Share: 0.6, Seeds: []SeedMetrics{score}})
	require.NoError(t, err)
	require.NoError(t, l.Transition(0, Fossilized))
	require.NoError(t, l.Transition(1, Grafting))
	r := l.Report()
	require.Equal(t, 4, r.Seeds[0].Size)
	require.Equal(t, []Point{{Epoch: 1, Share: 0.5, Loss: 2}, {Epoch: 2, Share: 0.6, Loss: 1.9}},
		r.Curve)
	data, err := l.MarshalBinary()
	require.NoError(t, err)
	again := depthLattice(t, 2)
	require.NoError(t, again.UnmarshalBinary(data))
	require.Equal(t, r.Curve, again.Report().Curve)
	require.Equal(t, r.Seeds[0], again.Report().Seeds[0])
	chunks, err := NewLattice(2, 2)
	require.NoError(t, err)
	require.ErrorIs(t, chunks.UnmarshalBinary(data), ErrShape)
	require.ErrorIs(t, chunks.RequestGermination(0, stack), ErrArgument)
}
