package gpu_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/runtest"
	"github.com/kasmina-go/kasmina/llm/gpu"
)

var randomRuns = runtest.AddFlags()

// TestRandomRuns makes random runs on a GPU in each precision, as package runtest does on the CPU, and on
// two GPUs if available.
func TestRandomRuns(t *testing.T) {
	plan := runtest.Plan{Usual: 20 * time.Second}
	if testing.Short() {
		plan.Usual = 5 * time.Second
	}

	device := open(t)
	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float16,
		cudaops.Float8} {
		t.Run(p.String(), func(t *testing.T) { randomRunsOn(t, machineOf(t, device, p), plan) })
	}
}

// TestRandomRanks makes random runs on two GPUs. Each must equal the same run on one GPU, and so must a run
// that is resumed on one GPU or two.
func TestRandomRanks(t *testing.T) {
	gpus(t)
	device := open(t)
	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float8} {
		t.Run(p.String(), func(t *testing.T) {
			m := machineOf(t, device, p)
			randomRunsOn(t, m, runtest.Plan{Usual: 20 * time.Second,
				Change: func(c *runtest.Case) bool { return runtest.OnlyRanks(c, m) }})
		})
	}
}

func randomRunsOn(t *testing.T, m runtest.Device, plan runtest.Plan) {
	f := *randomRuns
	if f.Parallel == 0 {
		f.Parallel = 1 // allocations of one run would invalidate the captures of another
	}
	runtest.Campaign(t, m, f, plan)
}

// machineOf describes a GPU in a precision, and a second one if available.
func machineOf(t *testing.T, device *cudaops.Device, p cudaops.Precision) runtest.Device {
	m := runtest.Device{Name: p.String() + " on " + device.Name(), RanksDiffer: true,
		Limits: runtest.Limits{Bases: []string{"bf16", "f8", "nf4"}, Adapters: true, Listening: true},
		Open: func() (*runtest.Session, error) {
			return &runtest.Session{Engine: gpu.Engine(device, p)}, nil
		},
		Ranks: func(n int, f func(rank int, build runtest.Build) error) []error {
			return teamOfGPUs(t.Context(), n, p, f)
		}}

	visible, err := cudaops.Count()
	require.NoError(t, err)
	if visible > 1 && p != cudaops.Float16 { // float16 supports only a single GPU
		m.Limits.Ranks = 2
	}
	return m
}

// teamOfGPUs calls f for every rank of a team. Each rank is a goroutine with its own GPU.
func teamOfGPUs(ctx context.Context, n int, p cudaops.Precision,
	f func(rank int, build runtest.Build) error) []error {
	return runtest.Ranks(ctx, n, func(ctx context.Context, w *comm.World) (err error) {
		device, err := cudaops.Open(cudaops.WithOrdinal(w.Rank()))
		if err != nil {
			return errors.Join(w.Blame(err), w.Close())
		}
		defer func() { err = errors.Join(err, device.Close()) }()

		team, err := gpu.Join(ctx, w, device)
		if err != nil {
			return err
		}
		err = f(w.Rank(), gpu.Parallel(device, p, team))
		return errors.Join(err, team.Close(err))
	})
}
