package state_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// memory holds the parameters of a network's slots.
type memory struct {
	slots map[[2]int]state.SlotParams
	fail  error // returned by Write
}

func (m *memory) Start(g state.Germination) (state.SlotParams, error) {
	return state.SlotParams{Weights: []float64{float64(g.Kind), float64(g.Seed)},
		Scale: float64(g.Epoch)}, nil
}

func (m *memory) Read(layer, slot int) (state.SlotParams, error) {
	p := m.slots[[2]int{layer, slot}]
	return state.SlotParams{Weights: slices.Clone(p.Weights), Scale: p.Scale}, nil
}

func (m *memory) Write(writes []state.SlotWrite) error {
	if m.fail != nil {
		return m.fail
	}
	for _, w := range writes {
		m.slots[[2]int{w.Layer, w.Slot}] = state.SlotParams{Weights: slices.Clone(w.Params.Weights),
			Scale: w.Params.Scale}
	}
	return nil
}

func (m *memory) set(layer, slot int, v float64) {
	m.slots[[2]int{layer, slot}] = state.SlotParams{Weights: []float64{v, -v}, Scale: v / 2}
}

func (m *memory) is(layer, slot int, v float64) bool {
	return reflect.DeepEqual(m.slots[[2]int{layer, slot}],
		state.SlotParams{Weights: []float64{v, -v}, Scale: v / 2})
}

// network returns a network of two layers with 4 and 6 seeds, without gates and embargo.
func network(t testing.TB, opts ...state.Option) (*state.Network, *memory) {
	t.Helper()
	return networkOf(t, append([]state.Option{state.WithoutGates(), state.WithEmbargo(0)},
		opts...)...)
}

func networkOf(t testing.TB, opts ...state.Option) (*state.Network, *memory) {
	t.Helper()
	m := &memory{slots: map[[2]int]state.SlotParams{}}
	n, err := state.NewNetwork(m, state.Layer{Name: "a", Lattice: lattice(t, 4, 8, opts...)},
		state.Layer{Name: "b", Lattice: lattice(t, 6, 12, opts...)})
	if err != nil {
		t.Fatal(err)
	}
	return n, m
}

func germinate(layer, seed, slot int) state.Command {
	return state.Command{Action: state.Germinate, Layer: layer, Seed: seed,
		Request: state.GerminationRequest{Slot: slot, Kind: blueprints.ConvFilter}}
}

func move(layer, seed int, to ...state.Stage) (commands []state.Command) {
	for _, s := range to {
		commands = append(commands, state.Command{Action: state.Move,
			Layer: layer, Seed: seed, To: s})
	}
	return commands
}

func do(t testing.TB, n *state.Network, commands ...state.Command) {
	t.Helper()
	if err := n.Do(commands...); err != nil {
		t.Fatal(err)
	}
}

// TestCommandsAreAtomic checks that commands given together take effect together or not at all, and
// that listeners receive only events that happened.
func TestCommandsAreAtomic(t *testing.T) {
	n, m := network(t)
	var heard []string
	if _, err := n.Listen(func(e state.Event) {
		heard = append(heard, fmt.Sprint(e.Layer, e.Seed, e.To))
	}); err != nil {
		t.Fatal(err)
	}

	do(t, n, append(append([]state.Command{germinate(1, 5, 2)}, move(1, 5, state.Training)...),
		germinate(0, 0, 2))...)
	if want := []string{"0 0 Germinated", "1 5 Germinated",
		"1 5 Training"}; !slices.Equal(sorted(heard), want) {
		t.Errorf("heard %v, want %v", heard, want)
	}

	if p := m.slots[[2]int{1, 2}]; !slices.Equal(p.Weights, []float64{3, 5}) {
		t.Errorf("slot 2 of layer 1 starts at %v", p)
	}

	before, slots := fmt.Sprint(n.Arrays()), fmt.Sprint(m.slots)
	heard = nil
	bad := errors.New("disk on fire")
	for text, commands := range map[string][]state.Command{
		"command 3 of 3, layer 0, seed 1: move to Fossilized: state.Transition: transition not allowed: seed 1 cannot go from Training to Fossilized": append(
			[]state.Command{germinate(0, 1, 3)}, move(0, 1, state.Training, state.Fossilized)...),
		"layer 0: state.Recycle: transition not allowed": {{Action: state.Recycle, Layer: 0,
			Seed: 1}},
		"state.Move: no such seed: the layer is 2": move(2, 0, state.Training),
		"state.Move: no such seed: seed is 6":      move(1, 6, state.Training),
		"the action is Action(0)":                  {{Layer: 1}},
		"layer 1: state.SetAlpha: invalid argument: seed 5: alpha is 2": {germinate(0, 2, 1),
			{Action: state.SetAlpha, Layer: 1, Seed: 5, Alpha: 0.25},
			{Action: state.SetAlpha, Layer: 1, Seed: 5, Alpha: 2}},
		bad.Error(): {germinate(0, 1, 3)},
	} {
		m.fail = bad
		if err := n.Do(commands...); err == nil || !strings.Contains(strings.Replace(err.Error(),
			"layer 1: command 3 of 3, layer 1, seed 5: set α to 2: ", "layer 1: ", 1), text) {
			t.Errorf("got %v, want %q", err, text)
		}
		m.fail = nil
		if fmt.Sprint(n.Arrays()) != before || fmt.Sprint(m.slots) != slots || len(heard) > 0 {
			t.Errorf("%s: something has changed; heard %v", text, heard)
		}
		if err := n.Verify(); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}

// TestRollbackRestoresTheSlot checks that a rollback restores the slot's parameters from before the
// grafting, unless another living seed shares the slot.
func TestRollbackRestoresTheSlot(t *testing.T) {
	for _, saved := range []bool{false, true} {
		n, m := network(t)
		do(t, n, germinate(0, 1, 2), germinate(0, 2, 3), germinate(0, 3, 3), germinate(1, 0, 2))
		for _, at := range [][2]int{{0, 1}, {0, 2}, {0, 3}, {1, 0}} {
			do(t, n, move(at[0], at[1], state.Training)...)
		}
		for i, slot := range [][2]int{{0, 2}, {0, 3}, {1, 2}} {
			m.set(slot[0], slot[1], float64(1+i))
		}
		do(t, n, slices.Concat(move(0, 1, state.Grafting), move(0, 2, state.Grafting),
			move(1, 0, state.Grafting))...)
		for i, slot := range [][2]int{{0, 2}, {0, 3}, {1, 2}} {
			m.set(slot[0], slot[1], float64(11+i))
		}
		if saved {
			arrays := n.Arrays()
			n2, m2 := network(t)
			install, err := n2.Load(arrays)
			if err != nil {
				t.Fatal(err)
			}
			install()
			if fmt.Sprint(n2.Arrays()) != fmt.Sprint(arrays) {
				t.Error("what was loaded is not what was saved")
			}
			m2.slots = m.slots
			n, m = n2, m2
		}

		do(t, n, move(0, 1, state.Stabilization, state.Evaluating, state.RolledBack)...)
		if !m.is(0, 2, 1) || !m.is(1, 2, 13) {
			t.Errorf("after the rollback of seed 1 of layer 0 the slots are %v", m.slots)
		}

		do(t, n, move(0, 2, state.RolledBack)...)
		if !m.is(0, 3, 12) {
			t.Errorf("slot 3 is shared, and was put back to %v", m.slots[[2]int{0, 3}])
		}

		do(t, n, move(1, 0, state.Stabilization, state.Evaluating,
			state.FineTuning, state.Fossilized)...)
		if names := arrayNames(n); slices.Contains(names, "a.kept_seeds") ||
			slices.Contains(names, "b.kept_seeds") {
			t.Errorf("something is kept: %v", names)
		}
		if s := n.Report()[0].Seeds[1]; s.Stage != state.RolledBack || s.Alpha != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// TestSavedParametersEndWithTheGrafting checks that parameters saved for a rollback are dropped
// when the grafting ends, whoever ends it, so that no later grafting restores them.
func TestSavedParametersEndWithTheGrafting(t *testing.T) {
	life := []state.Stage{state.Training, state.Grafting}
	for name, end := range map[string]func(l *state.Lattice) error{
		"rolled back": func(l *state.Lattice) error {
			return errors.Join(l.Transition(1, state.RolledBack), l.Recycle(1))
		},
		"culled": func(l *state.Lattice) error {
			return errors.Join(l.Transition(1, state.Stabilization),
				l.Transition(1, state.Evaluating), l.Transition(1, state.Culled), l.Recycle(1))
		},
		"loaded": func(l *state.Lattice) error {
			fresh, err := state.NewLattice(4, 8, state.WithoutGates())
			return errors.Join(err, l.SetArrays(fresh.Arrays()))
		},
	} {
		n, m := network(t)
		do(t, n, append([]state.Command{germinate(0, 1, 2)}, move(0, 1, life...)...)...)
		l := n.Lattice(0)
		if err := end(l); err != nil {
			t.Fatal(name, err)
		}
		if names := arrayNames(n); slices.Contains(names, "a.kept_seeds") {
			t.Errorf("%s: something is kept: %v", name, names)
		}
		if err := l.RequestGermination(1, state.GerminationRequest{Slot: 3}); err != nil {
			t.Fatal(name, err)
		}

		for _, to := range life {
			if err := l.Transition(1, to); err != nil {
				t.Fatal(name, err)
			}
		}

		m.set(0, 3, 7)
		do(t, n, move(0, 1, state.RolledBack)...)
		if !m.is(0, 3, 7) {
			t.Errorf("%s: slot 3 was put back to what slot 2 was: %v", name, m.slots)
		}
	}
}

// TestRefusedCommandsKeepSavedParameters checks that rejected commands do not change the parameters
// saved for a rollback.
func TestRefusedCommandsKeepSavedParameters(t *testing.T) {
	n, m := network(t)
	do(t, n, append([]state.Command{germinate(0, 1, 2)}, move(0, 1, state.Training)...)...)
	m.set(0, 2, 1)
	do(t, n, move(0, 1, state.Grafting)...)
	m.set(0, 2, 11)
	before := fmt.Sprint(n.Arrays())
	if n.Do(append(move(0, 1, state.RolledBack), germinate(0, 1, 1))...) == nil ||
		n.Do(append(move(0, 1, state.Stabilization), move(0, 2, state.Grafting)...)...) == nil {
		t.Fatal("no error")
	}

	if after := fmt.Sprint(n.Arrays()); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}

	if do(t, n, move(0, 1, state.RolledBack)...); !m.is(0, 2, 1) {
		t.Errorf("after the rollback the slot is %v", m.slots)
	}
}

func arrayNames(n *state.Network) (names []string) {
	for _, a := range n.Arrays() {
		names = append(names, a.Name)
	}
	return names
}

// TestSharedSlotsStartOnce checks that a seed joins a slot with a living seed without changing its
// parameters, and that a slot without living seeds starts afresh.
func TestSharedSlotsStartOnce(t *testing.T) {
	n, m := network(t)
	do(t, n, germinate(0, 0, 1))
	m.set(0, 1, 5)
	do(t, n, germinate(0, 1, 1))
	if !m.is(0, 1, 5) {
		t.Errorf("the second seed of a slot has reset it to %v", m.slots)
	}

	do(t, n, append(move(0, 0, state.Cancelled), move(0, 1, state.Cancelled)...)...)
	do(t, n, germinate(0, 2, 1))
	if m.is(0, 1, 5) {
		t.Error("a slot that nobody lives in has not been reset")
	}
}

func TestSubmittedCommandsWait(t *testing.T) {
	n, _ := network(t)
	first, second := n.Submit(germinate(0, 0, 1)), n.Submit(move(0, 0, state.Fossilized)...)
	if s := n.Report()[0].Seeds[0].Stage; s != state.Dormant {
		t.Errorf("before Apply the seed is %v", s)
	}

	n.Apply()
	if err := <-first; err != nil {
		t.Error(err)
	}

	if err := <-second; !errors.Is(err, state.ErrTransition) {
		t.Errorf("got %v", err)
	}

	if s := n.Report()[0].Seeds[0].Stage; s != state.Germinated {
		t.Errorf("after Apply the seed is %v", s)
	}
}

// TestNetworkEpoch checks that an epoch ends in all layers or in none.
func TestNetworkEpoch(t *testing.T) {
	n, _ := network(t)
	before := fmt.Sprint(n.Arrays())
	for text, m := range map[string][]state.Metrics{
		"metrics of 1 layers, want 2": {{}},
		"layer 1: state.StepEpoch": {{Loss: 1, Seeds: []state.SeedMetrics{{Seed: 1}}},
			{Seeds: []state.SeedMetrics{{Seed: 6}}}},
	} {
		if _, err := n.StepEpoch(m); err == nil || !strings.Contains(err.Error(), text) ||
			fmt.Sprint(n.Arrays()) != before {
			t.Errorf("got %v, want %q", err, text)
		}
	}

	do(t, n, append([]state.Command{germinate(1, 3, 1)},
		move(1, 3, state.Training, state.Culled)...)...)
	events, err := n.StepEpoch(make([]state.Metrics, 2))
	if err != nil || len(events) != 1 || events[0].Layer != 1 || events[0].Seed != 3 ||
		n.Lattice(0).Epoch() != 1 || n.Lattice(1).Epoch() != 1 {
		t.Errorf("%v, %v", events, err)
	}

	if n.Seeds() != 10 || n.Layers() != 2 || n.Lattice(2) != nil || n.Lattice(-1) != nil {
		t.Error("the network is not the one that was made")
	}
}

// TestListen checks that listeners receive all events in order, may act on them, and receive none
// after stopping.
func TestListen(t *testing.T) {
	n, _ := network(t)
	var heard []string
	stop, err := n.Listen(func(e state.Event) {
		heard = append(heard, e.String())
		if e.To == state.Germinated {
			if err := n.Do(move(e.Layer, e.Seed, state.Training)...); err != nil {
				t.Error(err)
			}
			if err := n.Lattice(1-e.Layer).Transition(3, state.Germinated); err != nil &&
				e.Seed != 3 {
				t.Error(err)
			}
		}
	})

	if err != nil {
		t.Fatal(err)
	}

	do(t, n, germinate(0, 1, 1))
	want := []string{"epoch 0, layer 0, seed 1: Dormant → Germinated",
		"epoch 0, layer 0, seed 1: Germinated → Training",
		"epoch 0, layer 1, seed 3: Dormant → Germinated",
		"epoch 0, layer 1, seed 3: Germinated → Training",
		"epoch 0, layer 0, seed 3: Dormant → Germinated",
		"epoch 0, layer 0, seed 3: Germinated → Training"}

	if !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}

	stop()
	do(t, n, germinate(0, 0, 1))
	if len(heard) != len(want) {
		t.Errorf("heard %q after stopping", heard[len(want):])
	}
}

func TestNewNetworkErrors(t *testing.T) {
	l := lattice(t, 2, 4)
	for text, layers := range map[string][]state.Layer{
		"layer 1 is nil":              {{Name: "a", Lattice: l}, {Name: "b"}},
		"layers 0 and 1":              {{Name: "a", Lattice: l}, {Name: "b", Lattice: l}},
		`the name "a"`:                {{Name: "a", Lattice: l}, {Name: "a", Lattice: lattice(t, 2, 4)}},
		`"a.b", which contains a dot`: {{Name: "a.b", Lattice: l}},
	} {
		if _, err := state.NewNetwork(nil, layers...); !errors.Is(err, state.ErrArgument) ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
	}
}

func find(arrays []state.Array, name string) *state.Array {
	return &arrays[slices.IndexFunc(arrays, func(a state.Array) bool { return a.Name == name })]
}

func TestLoadErrors(t *testing.T) {
	n, m := network(t, state.WithSlots(5), state.WithWidth(2))
	m.set(1, 1, 3)
	do(t, n, append([]state.Command{germinate(1, 3, 1)},
		move(1, 3, state.Training, state.Grafting)...)...)
	other, _ := network(t, state.WithSlots(9))
	for text, change := range map[string]func([]state.Array) []state.Array{
		`layer "b": seed state is corrupt: array "header"`: func(a []state.Array) []state.Array {
			return slices.DeleteFunc(a, func(a state.Array) bool {
				return strings.HasPrefix(a.Name, "b.")
			})
		},
		"arrays of 3 layers, want 2": func(a []state.Array) []state.Array {
			return append(a, state.Array{Name: "c.header"})
		},
		`array "kept_seeds" is a []int`: func(a []state.Array) []state.Array {
			find(a, "b.kept_seeds").Data = []int{3}
			return a
		},
		`layer "b": seed state is corrupt: array "kept_seeds" names seed 6 of 6`: func(a []state.Array) []state.Array {
			find(a, "b.kept_seeds").Data = []uint32{6}
			return a
		},
		`array "kept_seeds" names seed 3 twice`: func(a []state.Array) []state.Array {
			find(a, "b.kept_seeds").Data = []uint32{3, 3}
			find(a, "b.kept_weights").Data = make([]float64, 4)
			find(a, "b.kept_scales").Data = make([]float64, 2)
			return a
		},
		`array "kept_weights" has 3 weights for seed 3, want 2`: func(a []state.Array) []state.Array {
			find(a, "b.kept_weights").Data = make([]float64, 3)
			return a
		},
		"have 1 seeds, 2 weights and 0 scales": func(a []state.Array) []state.Array {
			return slices.DeleteFunc(a, func(a state.Array) bool {
				return a.Name == "b.kept_scales"
			})
		},
		"lattice has a different shape: the saved lattice has 9 slots, this one 5": func([]state.Array) []state.Array {
			return other.Arrays()
		},
	} {
		fresh, _ := network(t, state.WithSlots(5), state.WithWidth(2))
		before := fmt.Sprint(fresh.Arrays())
		if _, err := fresh.Load(change(n.Arrays())); err == nil ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
		if fmt.Sprint(fresh.Arrays()) != before {
			t.Errorf("%s: something has changed", text)
		}
	}
}

// TestMute checks that passes that begin while a seed is muted treat it as dormant.
func TestMute(t *testing.T) {
	l := lattice(t, 3, 6, state.WithoutGates())
	send(t, l, 1, state.FineTuning)
	before := bytesOf(t, l)
	var p state.Pass
	for _, muted := range []bool{true, false} {
		if err := l.Mute(1, muted); err != nil {
			t.Fatal(err)
		}
		want, alpha := state.FineTuning, float32(1)
		if muted {
			want, alpha = state.Dormant, 0
		}
		if l.Begin(&p, false); p.Stage[1] != want || p.Alpha[1] != alpha {
			t.Errorf("muted %v: the seed is %v at α = %v", muted, p.Stage[1], p.Alpha[1])
		}
		if s, _ := l.Stage(1); s != state.FineTuning || bytesOf(t, l) != before {
			t.Errorf("muted %v: the state says %v", muted, s)
		}
	}

	if err := l.Mute(3, true); !errors.Is(err, state.ErrSeed) {
		t.Errorf("got %v", err)
	}
}

// TestNetworkFromEightGoroutines runs commands, passes, epochs, reports and a scrub at once. The
// race detector and the checksums detect interference.
func TestNetworkFromEightGoroutines(t *testing.T) {
	n, _ := network(t)
	if _, err := n.Listen(func(e state.Event) { _ = e.String() }); err != nil {
		t.Fatal(err)
	}

	ctx := t.Context()
	go n.Scrub(ctx, time.Millisecond, func(layer int, err error) {
		t.Errorf("layer %d: %v", layer, err)
	})

	var senders sync.WaitGroup
	for g := range 8 {
		senders.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 100 {
				commands := []state.Command{randomCommand(r), randomCommand(r)}
				if done := n.Submit(commands...); r.IntN(4) == 0 {
					<-done
				}
			}
		})
	}

	over := make(chan struct{})
	go func() { senders.Wait(); close(over) }()
	for running := true; running; {
		select {
		case <-over:
			running = false
		default:
		}
		for _, l := range n.Lattices() {
			pass(t, l, true, state.HealthSample{Moments: state.Moments{Count: 1}},
				state.GradientSample{})
		}
		n.Apply()
		if _, err := n.StepEpoch(make([]state.Metrics, 2)); err != nil {
			t.Error(err)
		}
		n.Report()
	}

	if err := n.Verify(); err != nil {
		t.Error(err)
	}
}

func randomCommand(r *rand.Rand) state.Command {
	return state.Command{Action: state.Action(1 + r.IntN(5)), Layer: r.IntN(2), Seed: r.IntN(4),
		To: state.Stage(r.IntN(stages)), Alpha: r.Float64(),
		Request: state.GerminationRequest{Slot: 1 + r.IntN(3), Kind: blueprints.Kind(r.IntN(4))}}
}

// TestNoSeeds checks the errors of commands for a lattice without seeds and a network without
// layers.
func TestNoSeeds(t *testing.T) {
	var l state.Lattice
	if err := l.Transition(0, state.Germinated); !errors.Is(err, state.ErrSeed) ||
		!strings.Contains(err.Error(), "the lattice has no seeds") {
		t.Errorf("a lattice without seeds: %v", err)
	}

	n, err := state.NewNetwork(nil)
	if err != nil {
		t.Fatal(err)
	}

	if err := n.Do(state.Command{Action: state.Recycle}); !errors.Is(err, state.ErrSeed) ||
		!strings.Contains(err.Error(), "there are no layers") {
		t.Errorf("a network without layers: %v", err)
	}
}

// TestSubmitAlwaysAnswers checks that commands submitted before or after Close get an answer.
func TestSubmitAlwaysAnswers(t *testing.T) {
	n, _ := network(t)
	before := n.Submit(germinate(0, 0, 1))
	n.Close()
	require.ErrorIs(t, <-before, state.ErrClosed)
	require.ErrorIs(t, <-n.Submit(germinate(0, 0, 1)), state.ErrClosed)
	n.Apply()
	require.Equal(t, state.Dormant, n.Report()[0].Seeds[0].Stage)
	n.Open()
	after := n.Submit(germinate(0, 0, 1))
	n.Apply()
	require.NoError(t, <-after)
	require.Equal(t, state.Germinated, n.Report()[0].Seeds[0].Stage)
}

// TestHoldEvents checks that held events are delivered later, in order, and once.
func TestHoldEvents(t *testing.T) {
	n, _ := network(t)
	var heard []int
	_, err := n.Listen(func(e state.Event) { heard = append(heard, e.Seed) })
	require.NoError(t, err)
	release, again := n.HoldEvents(), n.HoldEvents()
	require.NoError(t, n.Do(germinate(0, 1, 1)))
	require.NoError(t, n.Lattice(0).Transition(1, state.Training))
	require.NoError(t, n.Do(germinate(0, 2, 2)))
	release()
	release()
	require.Empty(t, heard)
	again()
	require.Equal(t, []int{1, 1, 2}, heard)
}

// lockedSlots records whether its lock is held when it is used.
type lockedSlots struct {
	state.Slots
	sync.Mutex
	t *testing.T
}

func (s *lockedSlots) Write(w []state.SlotWrite) error {
	require.False(s.t, s.TryLock(), "the slots are written to without their lock")
	return s.Slots.Write(w)
}

// TestSlotsWithALock checks that Do holds the lock of the slots, and that listeners are called
// without it.
func TestSlotsWithALock(t *testing.T) {
	layers, m := network(t)
	s := &lockedSlots{Slots: m, t: t}
	n, err := state.NewNetwork(s, state.Layer{Name: "0", Lattice: layers.Lattice(0)},
		state.Layer{Name: "1", Lattice: layers.Lattice(1)})
	require.NoError(t, err)
	heard := false
	_, err = n.Listen(func(state.Event) {
		s.Lock() // would block forever if Do still held the lock
		heard = true
		s.Unlock()
	})
	require.NoError(t, err)
	require.NoError(t, n.Do(germinate(0, 0, 1)))
	require.True(t, heard)
}

// TestLoadIntoSlots checks that parameters are loaded into the slot of a living seed, together with
// its germination or later, and change nothing else. If they do not fit, all commands of the call are
// rejected.
func TestLoadIntoSlots(t *testing.T) {
	n, m := network(t, state.WithSlots(5), state.WithWidth(2))
	load := func(seed int, kind blueprints.Kind, scale float64, w ...float64) state.Command {
		return state.Command{Action: state.Load, Layer: 1, Seed: seed, Kind: kind,
			Params: state.SlotParams{Weights: w, Scale: scale}}
	}
	const conv = blueprints.ConvFilter
	do(t, n, germinate(1, 3, 1), load(3, conv, 2, 4, -4))
	if !m.is(1, 1, 4) {
		t.Fatalf("the slot holds %v", m.slots)
	}

	do(t, n, append(move(1, 3, state.Training, state.Grafting), load(3, conv, 3, 6, -6))...)
	if stage, _ := n.Lattice(1).Stage(3); stage != state.Grafting || !m.is(1, 1, 6) {
		t.Fatalf("the seed is %v and the slot holds %v", stage, m.slots)
	}

	do(t, n, germinate(1, 0, 2), germinate(1, 1, 1))
	do(t, n, move(1, 0, state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized)...)
	other := germinate(1, 2, 3)
	other.Request.Kind = blueprints.Residual
	do(t, n, other)
	share := germinate(1, 4, 3)
	do(t, n, share)
	for text, c := range map[string]state.Command{
		"seed 5: it is Dormant":                   load(5, conv, 1, 1, 2),
		"seed 0 uses the same slot and is fossil": load(0, conv, 1, 1, 2),
		"seed 2 uses the same slot and has a Res": load(4, conv, 1, 1, 2),
		"has a ConvFilter, not a Residual":        load(3, blueprints.Residual, 1, 1, 2),
		"LowRank needs 4 weights":                 load(3, blueprints.LowRank, 1, 1, 2, 3, 4),
		"3 weights, want 2":                       load(3, conv, 1, 1, 2, 3),
		"parameter 1 is NaN":                      load(3, conv, 1, 1, math.NaN()),
		"parameter 2 is +Inf":                     load(3, conv, math.Inf(1), 1, 2),
		"seed is 6":                               load(6, conv, 1, 1, 2),
	} {
		lattice, slots := fmt.Sprint(n.Arrays()), fmt.Sprint(m.slots)
		alpha := state.Command{Action: state.SetAlpha, Layer: 1, Seed: 3, Alpha: 0.75}
		if err := n.Do(alpha, load(3, conv, 9, 9, 9), c); err == nil ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
		if fmt.Sprint(n.Arrays()) != lattice || fmt.Sprint(m.slots) != slots {
			t.Errorf("%s: something has changed", text)
		}
	}

	m.fail = errors.New("no room")
	if err := n.Do(load(3, conv, 1, 1, 2)); !errors.Is(err, m.fail) {
		t.Errorf("got %v, want %v", err, m.fail)
	}

	slotless, err := state.NewNetwork(nil,
		state.Layer{Name: "a", Lattice: lattice(t, 2, 4, state.WithoutGates())})
	if err != nil {
		t.Fatal(err)
	}

	do(t, slotless, germinate(0, 0, 1))
	if err := slotless.Do(state.Command{Action: state.Load, Kind: conv,
		Params: state.SlotParams{Weights: []float64{1, 2}}}); !errors.Is(err, state.ErrArgument) {
		t.Errorf("a network without slots: %v", err)
	}
}

// TestScrubPeriod checks that a period of 0 is an error rather than a hang.
func TestScrubPeriod(t *testing.T) {
	l := lattice(t, 2, 4)
	n, err := state.NewNetwork(nil, state.Layer{Name: "a", Lattice: l})
	require.NoError(t, err)
	for _, n := range []*state.Network{n, {}} {
		require.ErrorIs(t, n.Scrub(t.Context(), 0, nil), state.ErrArgument)
	}
	require.ErrorIs(t, l.Scrub(t.Context(), -1, nil), state.ErrArgument)
}

// TestZeroNetworkAnswers checks that a network without layers rejects commands at once, because no
// Apply may follow.
func TestZeroNetworkAnswers(t *testing.T) {
	var zero state.Network
	done := zero.Submit(state.Command{Action: state.Recycle})
	require.Len(t, done, 1, "it would never answer")
	require.ErrorIs(t, <-done, state.ErrSeed)
	require.NoError(t, <-zero.Submit())
	require.ErrorIs(t, zero.Do(state.Command{Action: state.Recycle}), state.ErrSeed)
	require.Empty(t, zero.Report())
	require.Zero(t, zero.Layers()+zero.Seeds())
	require.Nil(t, zero.Lattice(0))
	require.NoError(t, zero.Verify())
	require.Empty(t, zero.Arrays())
	for range zero.Lattices() {
		t.Error("a lattice in an empty network")
	}

	_, err := zero.StepEpoch([]state.Metrics{{}})
	require.ErrorIs(t, err, state.ErrArgument)
	zero.HoldEvents()()
	zero.Apply()
	zero.Open()
	zero.Close()
}

// TestPanickingListener checks that every channel of Submit receives an answer even if a listener
// panics.
func TestPanickingListener(t *testing.T) {
	n, _ := network(t)
	_, err := n.Listen(func(state.Event) { panic("a listener") })
	require.NoError(t, err)
	command := state.Command{Action: state.Germinate, Request: state.GerminationRequest{Slot: 1,
		Kind: blueprints.Residual}}
	first, second := n.Submit(command), n.Submit(command)
	require.PanicsWithValue(t, "a listener", n.Apply)
	require.NoError(t, <-first)
	require.ErrorContains(t, <-second, "a listener panicked")
}
