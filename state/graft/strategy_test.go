package graft_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
)

// halt is a strategy like one that a user might define. It leaves α unchanged.
type halt struct{ Reason string }

func (halt) Name() string { return fmt.Sprint("halt", runs) }
func (halt) Check() error { return nil }
func (halt) Advance(p graft.Progress) (float64, [2]float32, bool) {
	return p.Alpha, p.Memory, true
}

var runs int // number of runs of TestRegister in this process, because each needs a new name

// nameless is a strategy without a name.
type nameless struct{ halt }

func (nameless) Name() string { return "" }

// TestRegister checks that a name can be registered once, and only for types that are neither
// pointers nor interfaces.
func TestRegister(t *testing.T) {
	runs++
	_, err := graft.NewEntry(halt{"unknown yet"})
	require.ErrorIs(t, err, graft.ErrUnknown)
	require.NoError(t, graft.Register[halt]())
	require.ErrorContains(t, graft.Register[halt](), `" of graft_test.halt is empty or taken`)
	require.ErrorContains(t, graft.Register[*halt](), "want a type that holds its parameters")
	require.ErrorContains(t, graft.Register[graft.Strategy](), "want a type that holds")
	require.ErrorContains(t, graft.Register[nameless](), "is empty or taken")
}

// TestEntry checks that saving and loading an entry restores its strategy, and that invalid strategies and parameters are
// rejected.
func TestEntry(t *testing.T) {
	given := &graft.FixedRamp{Epochs: 4, Target: 1}
	entry, err := graft.NewEntry(given)
	require.NoError(t, err)
	require.Equal(t, *given, entry.Strategy)
	loaded, err := entry.Saved.Load()
	require.NoError(t, err)
	require.Equal(t, entry, loaded)
	_, err = graft.NewEntry((*graft.FixedRamp)(nil))
	require.ErrorContains(t, err, "nil *graft.FixedRamp")
	_, err = graft.NewEntry(graft.FixedRamp{})
	require.ErrorContains(t, err, "Epochs is 0")
	for _, params := range []string{"[1]", `{"epochs": 0, "target": 1}`} {
		_, err = graft.Saved{Name: "FixedRamp", Params: []byte(params)}.Load()
		require.ErrorContains(t, err, `strategy "FixedRamp"`)
	}
}

// TestNoStrategy checks the errors for nil strategies.
func TestNoStrategy(t *testing.T) {
	_, err := graft.NewEntry(nil)
	require.ErrorContains(t, err, "the strategy is nil")
	require.NotErrorIs(t, err, blueprints.ErrPanic)
	_, err = graft.NewEntry((*graft.FixedRamp)(nil))
	require.ErrorContains(t, err, "the strategy is a nil *graft.FixedRamp")
}
