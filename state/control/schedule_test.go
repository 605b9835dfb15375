package control_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// TestScheduleGrowsAtItsShares runs a schedule of two growths over the epochs of a run. Each growth
// must start in the first epoch at or after its share and stay, and the schedule must stop when a
// growth has been rolled back.
func TestScheduleGrowsAtItsShares(t *testing.T) {
	s := &control.Schedule{Growths: []control.Planned{
		{Share: 0.1, Kind: blueprints.Stack, Size: 2},
		{Share: 0.25, Kind: blueprints.Middle, Size: 3},
	}}
	require.NoError(t, s.Check())
	r := state.Report{Site: blueprints.Depth, Seeds: []state.SeedReport{{Seed: 0}, {Seed: 1}}}
	started := map[blueprints.Kind]float64{}
	for epoch := 1; epoch <= 100; epoch++ {
		share := float64(epoch) / 100
		r.Epoch = epoch
		for i := range r.Seeds {
			r.Seeds[i].CanAdvance = epoch%2 == 0
		}
		r.Curve = append(r.Curve, state.Point{Epoch: epoch, Share: share, Loss: 3 - share})
		for _, c := range s.Decide([]state.Report{{Site: blueprints.Chunk}, r}) {
			require.Equal(t, 1, c.Layer)
			switch {
			case c.Action == state.Germinate:
				started[c.Request.Kind] = share
				r.Seeds[c.Seed].Stage = state.Germinated
			default:
				if from := r.Seeds[c.Seed].Stage; from == state.Evaluating || from == state.FineTuning {
					require.True(t, r.Seeds[c.Seed].CanAdvance)
				}
				require.Equal(t, r.Seeds[c.Seed].Stage.Next(), c.To)
				r.Seeds[c.Seed].Stage = c.To
			}
		}
	}

	require.Equal(t, map[blueprints.Kind]float64{blueprints.Stack: 0.1, blueprints.Middle: 0.25}, started)
	require.Equal(t, []state.Stage{state.Fossilized, state.Grafting},
		[]state.Stage{r.Seeds[0].Stage, r.Seeds[1].Stage})
	r.Seeds[0].Stage, r.Seeds[1].Stage = state.RolledBack, state.Dormant
	require.Empty(t, s.Decide([]state.Report{r}))
}

func TestScheduleRefuses(t *testing.T) {
	stack := func(shares ...float64) *control.Schedule {
		s := &control.Schedule{}
		for _, share := range shares {
			s.Growths = append(s.Growths, control.Planned{Share: share, Kind: blueprints.Stack, Size: 2})
		}
		return s
	}

	for want, s := range map[string]*control.Schedule{
		"Growths is empty":                                 {},
		"Growths[0].Share is 1":                            stack(1),
		"Growths[1].Share is 0.1, want 0.2 to less than 1": stack(0.2, 0.1),
		"Growths[0]: ":                                     {Growths: []control.Planned{{Kind: blueprints.Residual, Size: 2}}},
	} {
		err := s.Check()
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, want)
	}

	lattice, err := state.NewLattice(1, 4, state.At(blueprints.Depth))
	require.NoError(t, err)
	least, err := stack(0.5).LeastEpochs(lattice, 1)
	require.NoError(t, err)
	require.Equal(t, 2, least)
	_, err = stack(0.1, 0.2).LeastEpochs(lattice, 1)
	require.ErrorContains(t, err, "2 growths are planned, but there are 1 seeds in depth")
}
