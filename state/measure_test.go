package state_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// TestTakenFiguresAreThoseOfPasses: batches whose passes leave their figures elsewhere, and which
// are taken in later in order, make the lattice that the passes themselves would have made.
func TestTakenFiguresAreThoseOfPasses(t *testing.T) {
	const seeds, batches = 70, 5
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	here, there := lattice(t, seeds, 4*seeds, state.WithHistory(3)),
		lattice(t, seeds, 4*seeds, state.WithHistory(3))
	for _, l := range []*state.Lattice{here, there} {
		require.NoError(t,
			l.SetTelemetry(state.Telemetry{Mode: state.Sampling, Every: 2, Share: 0.3}))
	}
	for range 2 {
		measured := make([]state.Measured, batches)
		for _, b := range r.Perm(batches) { // whatever rank computes it, whenever
			record := b != 2 // as a layer without telemetry that has met a NaN
			h, g := make([]state.HealthSample, seeds), make([]state.GradientSample, seeds)
			for i := range h {
				m := state.Moments{Count: 1 + float64(r.IntN(9)), Mean: r.NormFloat64(),
					Variance: r.ExpFloat64()}
				h[i] = state.HealthSample{Health: state.Health{Mean: m.Mean, Variance: m.Variance},
					Moments: m, NonFinite: r.IntN(2)}
				g[i] = state.GradientSample{Gradient: state.Gradient{Norm: m.Mean * m.Mean},
					Norms: m, Clipped: r.IntN(3)}
			}
			there.Defer(&measured[b], b)
			before := bytesOf(t, there)
			p := passWith(t, there, record, func(i int) state.HealthSample {
				return h[i]
			}, func(i int) state.GradientSample { return g[i] })
			require.EqualValues(t, here.Report().Step+b, p.Step)
			require.Equal(t, before, bytesOf(t, there), "a pass has changed the lattice")
		}
		there.Defer(nil, 0)
		for b, m := range measured {
			passWith(t, here, b != 2, func(i int) state.HealthSample {
				return m.Health[i]
			}, func(i int) state.GradientSample { return m.Gradient[i] })
			require.NoError(t, there.Take(m))
		}
		require.Equal(t, bytesOf(t, here), bytesOf(t, there))
		require.Equal(t, here.History(), there.History())
	}
	require.NoError(t, there.Verify())
	require.NoError(t, there.Take(state.Measured{}))
	require.ErrorIs(t, there.Take(state.Measured{Health: make([]state.HealthSample, seeds-1)}),
		state.ErrArgument)
	require.Equal(t, bytesOf(t, here), bytesOf(t, there))
}

// TestDeferredHistogramsAreCopies: the samples' memory is the layer's, and used again.
func TestDeferredHistogramsAreCopies(t *testing.T) {
	l := lattice(t, 1, 4)
	var h state.Histogram
	h[3] = 7
	var m state.Measured
	l.Defer(&m, 0)
	pass(t, l, true, state.HealthSample{Histogram: &h}, state.GradientSample{})
	h[3] = 0
	require.EqualValues(t, 7, m.Health[0].Histogram[3])
}

// TestSharedCommands: what is submitted to one of two networks takes effect in both, in one order,
// and the one that submitted it has the answer.
func TestSharedCommands(t *testing.T) {
	plant := func(seed int) state.Command {
		return state.Command{Action: state.Germinate, Seed: seed,
			Request: state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}}
	}
	nets := make([]*state.Network, 2)
	for i := range nets {
		n, err := state.NewNetwork(nil, state.Layer{Name: "l", Lattice: lattice(t, 3, 6)})
		require.NoError(t, err)
		nets[i] = n
	}
	require.Equal(t, nets[0].Digest(), nets[1].Digest())
	good, twice := nets[1].Submit(plant(2)), nets[1].Submit(plant(0))
	first := nets[0].Submit(plant(0))
	var queued [2][][]state.Command
	for i, n := range nets { // what ranks hand over
		require.ErrorContains(t,
			n.ApplyShared(func(own [][]state.Command) ([][]state.Command, int, error) {
				queued[i] = own
				return nil, 0, errors.New("rank 1 died")
			}), "rank 1 died")
	}
	for _, answer := range []<-chan error{good, twice, first} {
		require.ErrorContains(t, <-answer, "rank 1 died")
	}
	for i, list := range queued {
		for _, commands := range list {
			nets[i].Submit(commands...)
		}
	}
	good, twice = nets[1].Submit(plant(1)), nets[1].Submit(plant(1))
	all := append(append(queued[0], queued[1]...), []state.Command{plant(1)},
		[]state.Command{plant(1)})
	for i, n := range nets {
		require.NoError(t,
			n.ApplyShared(func(own [][]state.Command) ([][]state.Command, int, error) {
				return all, []int{0, len(queued[0])}[i], nil
			}))
	}
	require.NoError(t, <-good)
	require.ErrorIs(t, <-twice, state.ErrTransition)
	for _, n := range nets {
		for seed := range 3 {
			stage, err := n.Lattice(0).Stage(seed)
			require.NoError(t, err)
			require.Equal(t, state.Germinated, stage)
		}
	}
	require.Equal(t, nets[0].Digest(), nets[1].Digest())
	require.NoError(t,
		nets[0].Obey(state.Command{Action: state.Move, Seed: 1, To: state.Cancelled}))
	require.NotEqual(t, nets[0].Digest(), nets[1].Digest())
	require.Error(t, nets[0].Obey(state.Command{Action: state.Move, Seed: 1, To: state.Fossilized}))
}
