package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/runtest"
	"github.com/kasmina-go/kasmina/llm/gpu"
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

	ranks := 0
	if second, err := cudaops.Open(cudaops.WithOrdinal(1)); err == nil {
		defer second.Close()
		ranks = 2
	}

	for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16, cudaops.Float16,
		cudaops.Float8} {
		t.Run(p.String(), func(t *testing.T) {
			if p == cudaops.Float16 { // float16 supports only a single GPU
				ranks = 0
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
			runtest.Campaign(t, m, f, runtest.Plan{Usual: usual})
		})
	}
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
