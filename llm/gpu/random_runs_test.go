package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/runtest"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/op"
)

var randomRuns = runtest.AddFlags()

// TestRandomRuns makes random runs on a GPU in each precision, as package runtest does on the CPU, and on
// two GPUs if available.
func TestRandomRuns(t *testing.T) {
	device := open(t)
	usual := 20 * time.Second
	if testing.Short() {
		usual = 5 * time.Second
	}

	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float16,
		cudaops.Float8} {
		t.Run(p.String(), func(t *testing.T) { randomRunsOn(t, device, p, runtest.Plan{Usual: usual}) })
	}
}

// TestRandomRanks makes random runs on two GPUs. Each must equal the same run on one GPU, and so must a run
// that is resumed on one GPU or two.
func TestRandomRanks(t *testing.T) {
	gpus(t)
	device := open(t)
	plan := runtest.Plan{Usual: 20 * time.Second, Change: onTwoGPUs}
	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float8} {
		t.Run(p.String(), func(t *testing.T) { randomRunsOn(t, device, p, plan) })
	}
}

// onTwoGPUs changes a case to a run on two GPUs, and omits the properties that need only one.
func onTwoGPUs(c *runtest.Case) bool {
	c.Ranks, c.Train.Accumulate = 2, max(2, c.Train.Accumulate)
	c.Kasmina.Stability, c.Kasmina.AdaptiveClip = op.Adaptive, 0
	c.Resumes, c.Replay, c.Callbacks, c.Fault = nil, false, nil, nil
	return !c.Train.Frozen
}

// randomRunsOn makes random runs in a precision.
func randomRunsOn(t *testing.T, device *cudaops.Device, p cudaops.Precision, plan runtest.Plan) {
	ranks := 0
	if second, err := cudaops.Open(cudaops.WithOrdinal(1)); err == nil {
		require.NoError(t, second.Close())
		if p != cudaops.Float16 { // float16 supports only a single GPU
			ranks = 2
		}
	}

	m := runtest.Device{Name: p.String() + " on " + device.Name(), RanksDiffer: true,
		Limits: runtest.Limits{Listening: true, Ranks: ranks},
		Open: func() (*runtest.Session, error) {
			return &runtest.Session{Engine: gpu.Engine(device, p)}, nil
		},
		Ranks: func(n int, f func(rank int, build runtest.Build) error) []error {
			return teamOfGPUs(t.Context(), n, p, f)
		}}
	f := *randomRuns
	if f.Parallel == 0 {
		f.Parallel = 1 // allocations of one run would invalidate the captures of another
	}

	runtest.Campaign(t, m, f, plan)
}

// teamOfGPUs calls f for every rank of a team. Each rank is a goroutine with its own GPU.
func teamOfGPUs(ctx context.Context, n int, p cudaops.Precision,
	f func(rank int, build runtest.Build) error) []error {
	errs := make([]error, n)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		err = l.Close()
	}
	if err != nil {
		errs[0] = err
		return errs
	}

	port := l.Addr().(*net.TCPAddr).Port
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = rankOnGPU(ctx, r, n, port, p, f) })
	}

	wg.Wait()
	return errs
}

func rankOnGPU(ctx context.Context, rank, n, port int, p cudaops.Precision,
	f func(rank int, build runtest.Build) error) (err error) {
	device, err := cudaops.Open(cudaops.WithOrdinal(rank))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()

	name := fmt.Sprintf("random runs %d", port)
	w, err := comm.Join(ctx, comm.Place{Rank: rank, Size: n, LocalRank: rank, LocalSize: n,
		MasterAddr: "127.0.0.1", MasterPort: port, Run: name, Secret: "the secret of the ranks of random runs"},
		comm.Options{Timeout: time.Minute})
	if err != nil {
		return err
	}

	team, err := gpu.Join(ctx, w, device)
	if err != nil {
		return err
	}

	err = f(rank, gpu.Parallel(device, p, team))
	return errors.Join(err, team.Close(err))
}
