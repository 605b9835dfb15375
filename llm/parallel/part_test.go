package parallel_test

import (
	"bytes"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/state"
)

// TestEMAOfRanks checks that every rank has the same moving average as a single process.
func TestEMAOfRanks(t *testing.T) {
	s := setup{config: small(), accumulate: 3, steps: 12, commands: true}
	averageOf := func(train func(setup) error) *llm.Model {
		e, err := llm.NewEMA(0.9)
		require.NoError(t, err)
		own := s
		own.more = func(tr *llm.Trainer) { require.NoError(t, tr.Use(e)) }
		require.NoError(t, train(own))
		m, err := e.Model()
		require.NoError(t, err)
		return m
	}

	want := averageOf(func(own setup) error { return own.train(t.Context(), -1, 1, nil) })

	const size = 2
	var mu sync.Mutex
	got := map[int]*llm.Model{}
	errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) (err error) {
		m := averageOf(func(own setup) error { return own.train(t.Context(), rank, size, team.Engine) })
		mu.Lock()
		defer mu.Unlock()
		got[rank] = m
		return nil
	})

	for _, err := range errs {
		require.NoError(t, err)
	}

	for rank := range size {
		require.Equal(t, want.Config, got[rank].Config)
		for i, p := range want.Params {
			require.Equal(t, p.Value.Data(), got[rank].Params[i].Value.Data(), "rank %d: %s", rank, p.Name)
		}
	}
}

// idle is a controller that never issues commands.
type idle struct{}

func (idle) Decide([]state.Report) []state.Command { return nil }

// TestStopAtAnotherRank checks that stopping a run at rank 1 makes all ranks return ErrStopped, and
// that rank 0's log records the reason.
func TestStopAtAnotherRank(t *testing.T) {
	const size = 2
	s := setup{config: small(), accumulate: 3, steps: 50}
	var record bytes.Buffer
	errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
		own := s
		own.config.Kasmina, own.config.Seeds, own.config.SlotWidth = nil, 0, 0
		own.more = func(tr *llm.Trainer) {
			g := llm.Growth{Controller: idle{}}
			if rank == 0 {
				g.Record = &record
			}
			require.NoError(t, tr.Grow(g))
			tr.On(func(e llm.Event) error {
				if rank == 1 && e.Kind == llm.StepEnd && e.Step == 4 {
					return tr.Stop("enough for rank 1")
				}
				return nil
			})
		}
		return own.train(t.Context(), rank, size, team.Engine)
	})

	for _, err := range errs {
		require.ErrorIs(t, err, llm.ErrStopped)
		require.ErrorContains(t, err, "enough for rank 1")
	}

	require.Contains(t, record.String(), `"asked":"stop","why":"enough for rank 1"`)
}
