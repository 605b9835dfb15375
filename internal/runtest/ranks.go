package runtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// CPU returns the device for runs on this computer's processors.
func CPU() Device {
	return Device{Name: "CPU", Ranks: cpuRanks,
		Open: func() (*Session, error) { return &Session{Engine: llm.CPUEngine()}, nil },
		Limits: Limits{Float64: true, Bases: []string{"bf16", "f8", "nf4", "q8_0"}, Adapters: true, Optimizer: true,
			Ranks: 3, Listening: true}}
}

// patience is a generous time for the ranks of one process to connect.
const patience = 100 * time.Second

// secret authenticates the ranks of all teams in this process.
const secret = "the secret of the ranks of random runs"

// teams counts the teams of this process, so that each gets its own name.
var teams atomic.Int64

// cpuRanks calls f for every rank of a team within this process.
func cpuRanks(ranks int, f func(rank int, build Build) error) []error {
	return Ranks(context.Background(), ranks, func(ctx context.Context, w *comm.World) error {
		team, err := parallel.Join(ctx, w)
		if err != nil {
			return err
		}
		err = f(w.Rank(), team.Engine)
		return errors.Join(err, team.Close(err))
	})
}

// Ranks starts a goroutine for each rank, connects the ranks to a world, and calls join in each goroutine. It returns
// the error of each rank.
func Ranks(ctx context.Context, ranks int, join func(context.Context, *comm.World) error) []error {
	errs := make([]error, ranks)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		err = l.Close()
	}
	if err != nil {
		errs[0] = err
		return errs
	}

	port := l.Addr().(*net.TCPAddr).Port
	name := fmt.Sprintf("runtest %d %d", os.Getpid(), teams.Add(1))
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() {
			w, err := comm.Join(ctx, comm.Place{Rank: r, Size: ranks, LocalRank: r, LocalSize: ranks,
				MasterAddr: "127.0.0.1", MasterPort: port, Run: name, Secret: secret},
				comm.Options{Timeout: patience})
			if err == nil {
				err = join(ctx, w)
			}
			errs[r] = err
		})
	}

	wg.Wait()
	return errs
}
