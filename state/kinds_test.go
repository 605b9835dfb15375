package state_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

func arithmetic[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward:  func(t, x, p []T, a T) { copy(t, x) },
		Backward: func(dx, dp, g, x, p []T, a T) float64 { copy(dx, g); return 0 },
	}
}

// register adds a blueprint, whose Identity may be nil; under -count it finds the one that is
// there.
func register(t *testing.T, b blueprints.Blueprint) blueprints.Kind {
	t.Helper()
	if k, ok := blueprints.ByName(b.Name); ok {
		return k
	}
	if b.Identity == nil {
		b.Identity = func([]float64, int, *rand.Rand) float64 { return 1 }
	}
	b.F32, b.F64 = arithmetic[float32](), arithmetic[float64]()
	k, err := blueprints.Register(b)
	require.NoError(t, err)
	return k
}

// otherProgram names, in the environment of this test's own program, the kinds to register, in
// order, and the lattice to load.
const otherProgram = "KASMINA_TEST_OTHER_PROGRAM"

// A lattice that one program has saved is loaded in others, which register their kinds in another
// order, more of them, or too few.
func TestKindsAcrossPrograms(t *testing.T) {
	if kinds, path, ok := strings.Cut(os.Getenv(otherProgram), "|"); ok {
		loadInOtherProgram(t, strings.Fields(kinds), path)
		return
	}
	l := lattice(t, 4, 8, state.WithoutGates())
	for seed, kind := range []blueprints.Kind{register(t, blueprints.Blueprint{Name: "Rose"}),
		register(t, blueprints.Blueprint{Name: "Tulip"}), blueprints.ConvFilter} {
		require.NoError(t, l.RequestGermination(seed,
			state.GerminationRequest{Slot: 1 + seed, Kind: kind}))
	}
	data, err := l.MarshalBinary()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "saved.lattice")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	for kinds, want := range map[string]string{
		"Rose Tulip":       "loaded as Rose Tulip ConvFilter Residual",
		"Tulip Daisy Rose": "loaded as Rose Tulip ConvFilter Residual",
		"Tulip Daisy":      `seed 0: unknown blueprint kind "Rose"`,
	} {
		command := exec.CommandContext(t.Context(), os.Args[0],
			"-test.run=^TestKindsAcrossPrograms$",
			"-test.v")
		command.Env = append(os.Environ(), otherProgram+"="+kinds+"|"+path)
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), want, "a program with the kinds %s", kinds)
	}
}

func loadInOtherProgram(t *testing.T, kinds []string, path string) {
	for _, name := range kinds {
		register(t, blueprints.Blueprint{Name: name})
	}
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	var l state.Lattice
	if err := l.UnmarshalBinary(data); err != nil {
		require.ErrorIs(t, err, blueprints.ErrUnknownKind)
		require.ErrorIs(t, err, state.ErrArgument)
		require.Zero(t, l.Seeds())
		t.Log(err)
		return
	}
	require.NoError(t, l.Verify())
	var names []string
	for _, s := range l.Report().Seeds {
		names = append(names, s.Kind.String())
	}
	t.Log("loaded as", strings.Join(names, " "))
	again, err := l.MarshalBinary() // as a program writes it whose own numbers these are
	require.NoError(t, err)
	require.NoError(t, new(state.Lattice).UnmarshalBinary(again))
}

// faulty is a strategy whose Check panics.
type faulty struct{ Boom bool }

func (faulty) Name() string { return "faulty" }
func (f faulty) Check() error {
	if f.Boom {
		panic("boom")
	}
	return nil
}
func (faulty) Advance(g graft.Progress) (float64, [2]float32, bool) { return 1, g.Memory, true }

var errRegisterFaulty = graft.Register[faulty]()

// nameless is a strategy that cannot say its name.
type nameless struct{ faulty }

func (nameless) Name() string { panic("boom") }

// brittle are slots of which one method panics.
type brittle struct {
	*memory
	method string
}

func (p brittle) Start(g state.Germination) (state.SlotParams, error) {
	if p.method == "Start" {
		panic("boom")
	}
	return p.memory.Start(g)
}

func (p brittle) Write(w []state.SlotWrite) error {
	if p.method == "Write" {
		panic("boom")
	}
	return p.memory.Write(w)
}

// Whatever of a user's panics while a seed germinates, the command is refused, and nothing of it or
// of those beside it remains.
func TestPanicsDoNotGerminate(t *testing.T) {
	require.NoError(t, errRegisterFaulty)
	size := register(t, blueprints.Blueprint{Name: "PanicInSize",
		Size: func(c, width int) int { panic("boom") }})
	parts := register(t, blueprints.Blueprint{Name: "PanicInParts",
		Parts: func(c, n int) []blueprints.Part { panic("boom") }})
	clash := register(t, blueprints.Blueprint{Name: "ClashingParts",
		Parts: func(c, n int) []blueprints.Part {
			return []blueprints.Part{{Name: "w", Shape: []int{1}}, {Name: "w", Shape: []int{n - 1}}}
		}})
	for what, c := range map[string]struct {
		method  string
		request state.GerminationRequest
		is      error
	}{
		"Size":  {"", state.GerminationRequest{Slot: 2, Kind: size}, blueprints.ErrPanic},
		"Parts": {"", state.GerminationRequest{Slot: 2, Kind: parts}, blueprints.ErrPanic},
		"clashing parts": {"", state.GerminationRequest{Slot: 2, Kind: clash},
			blueprints.ErrInvalid},
		"Check": {"", state.GerminationRequest{Slot: 2, Strategy: faulty{true}},
			blueprints.ErrPanic},
		"Start": {"Start", state.GerminationRequest{Slot: 2}, blueprints.ErrPanic},
		"Write": {"Write", state.GerminationRequest{Slot: 2}, blueprints.ErrPanic},
	} {
		m := &memory{slots: map[[2]int]state.SlotParams{}}
		n, err := state.NewNetwork(brittle{m, c.method},
			state.Layer{Name: "a",
				Lattice: lattice(t, 4, 8, state.WithoutGates(), state.WithWidth(2))})
		require.NoError(t, err)
		before := fmt.Sprint(n.Arrays())
		events := 0
		_, err = n.Listen(func(state.Event) { events++ })
		require.NoError(t, err)
		err = n.Do(state.Command{Action: state.SetAlpha, Seed: 3, Alpha: 0.5}, germinate(0, 0, 1),
			state.Command{Action: state.Germinate, Seed: 1, Request: c.request})
		require.ErrorIs(t, err, c.is, what)
		require.Equal(t, before, fmt.Sprint(n.Arrays()), what)
		require.Zero(t, events, what)
		require.Empty(t, m.slots, what)
		require.NoError(t, n.Verify(), what)
		require.NoError(t, n.Lattice(0).SetAlpha(0, 0.25), what) // nothing is left locked
	}
	l := lattice(t, 4, 8, state.WithoutGates(), state.WithWidth(2))
	require.ErrorIs(t, l.RequestGermination(0, state.GerminationRequest{Slot: 1, Kind: clash}),
		blueprints.ErrInvalid)
	require.ErrorIs(t, l.RequestGermination(0,
		state.GerminationRequest{Slot: 1, Strategy: nameless{}}), blueprints.ErrPanic)
	require.ErrorIs(t, graft.Register[nameless](), blueprints.ErrPanic)
	require.NoError(t,
		l.RequestGermination(0, state.GerminationRequest{Slot: 1, Strategy: &faulty{}}))
	require.NoError(t, l.Verify())
}
