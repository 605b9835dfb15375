package cudaops_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/runtest"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

var randomRuns = runtest.AddFlags()

// scope is a test that runs its cleanups when it is closed, and that panics on failure to end the current
// case.
type scope struct {
	testing.TB
	cleanups []func()
}

func (s *scope) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *scope) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func (s *scope) FailNow() { panic("the test has failed") }

func (s *scope) close() {
	for _, f := range s.cleanups {
		defer f()
	}
	s.cleanups = nil
}

// fakeMachine returns a machine that computes random runs on the fake driver, each on a new device. The fake kernels
// of adapters support no options for gradients.
func fakeMachine(t *testing.T, opts ...cudaops.MachineOption) runtest.Device {
	faults := []string{"cuMemAlloc", "cuMemAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync",
		"cuStreamSynchronize", "cuLaunchKernel"}
	return runtest.Device{
		Name: t.Name(),
		Limits: runtest.Limits{Bases: []string{"bf16", "f8", "nf4"}, Adapters: len(opts) == 0, Listening: true, Ranks: 3,
			Faults: faults},
		RanksDiffer: true,
		Ranks: func(n int, f func(rank int, build runtest.Build) error) []error {
			return fakeRanks(t, n, opts, f)
		},
		Open: func() (*runtest.Session, error) {
			s := &scope{TB: t}
			device, driver := cudaops.OpenFakeDriver(s)
			return &runtest.Session{
				Engine: engine.Engine(device, cudaops.Float32, opts...),
				Fail: func(op string, at int) func() bool {
					driver.Fail(op, at, gpu.OutOfMemory)
					return func() bool {
						happened := driver.Pending(op) == 0
						driver.Cancel(op)
						return happened
					}
				},
				Close: func() error {
					cudaops.RequireNoLeaks(s, device)
					s.close()
					return nil
				},
			}, nil
		},
	}
}

// fakeRanks calls f for every rank of a team. Each rank is a goroutine with its own fake device.
func fakeRanks(t *testing.T, n int, opts []cudaops.MachineOption, f func(rank int, build runtest.Build) error) []error {
	return runtest.Ranks(t.Context(), n, func(ctx context.Context, w *comm.World) error {
		s := &scope{TB: t}
		device := cudaops.OpenFake(s)
		group, err := cudaops.FakeGroup(ctx, w, device)
		if err != nil {
			return errors.Join(w.Blame(err), w.Close())
		}

		team := parallel.On(w, group)
		err = f(w.Rank(), engine.Parallel(device, cudaops.Float32, team, opts...))
		err = errors.Join(err, team.Close(err))
		if err == nil {
			cudaops.RequireNoLeaks(s, device)
		}
		s.close()
		return err
	})
}

// TestRandomRuns performs the random runs of package runtest on the fake driver.
func TestRandomRuns(t *testing.T) {
	plan := runtest.Plan{Usual: 500 * time.Millisecond, Fixed: 2, Long: 4}
	eachGradientType(t, func(t *testing.T, m runtest.Device) { runtest.Campaign(t, m, *randomRuns, plan) })
}

// TestRandomFailures performs random runs with one failing operation each, such as an allocation or a copy.
func TestRandomFailures(t *testing.T) {
	eachGradientType(t, func(t *testing.T, m runtest.Device) {
		plan := runtest.Plan{Usual: 500 * time.Millisecond, Fixed: 1, Failing: true,
			Change: func(c *runtest.Case) bool { return runtest.OnlyFault(c, m) }}
		runtest.Campaign(t, m, *randomRuns, plan)
	})
}

// TestRandomRanks performs random runs on several ranks, each with a fake device. Each run must equal the same
// run on one rank, and so must a run that another number of ranks resumes.
func TestRandomRanks(t *testing.T) {
	eachGradientType(t, func(t *testing.T, m runtest.Device) {
		plan := runtest.Plan{Usual: 500 * time.Millisecond, Fixed: 1, Long: 4,
			Change: func(c *runtest.Case) bool { return runtest.OnlyRanks(c, m) }}
		runtest.Campaign(t, m, *randomRuns, plan)
	})
}

// TestRanksSaveWithoutOptimizer checks that ranks can save a frozen model before anything that learns has been planted.
func TestRanksSaveWithoutOptimizer(t *testing.T) {
	c, err := runtest.Parse(`{"seed":1,"model":{"vocab":40,"dim":8,"layers":1,"heads":2,"ff":8,"seq":8,
		"weights":[{"block":0,"layer":"q"}]},
		"train":{"steps":4,"batch":1,"accumulate":2,"epoch":2,"frozen":true},
		"optimizer":{"lr":0.03},"text":{"tokens":1000},"ranks":2,
		"orders":[{"step":0,"commands":[
			{"action":"Germinate","layer":0,"seed":0,"kind":"LoRA","size":1},
			{"action":"Move","layer":0,"seed":0,"to":"Training"}]}]}`)
	require.NoError(t, err)

	r := runtest.Check(c, fakeMachine(t), t.TempDir())
	require.NoError(t, r.Skipped)
	require.Contains(t, r.Checked, runtest.OnRanks)
	require.Nil(t, r.Failure)
}

// TestRanksStopEarly checks that EarlyStopping stops ranks after the evaluation that decides it, and not a step later,
// when they exchange their requests to stop.
func TestRanksStopEarly(t *testing.T) {
	c, err := runtest.Parse(`{"seed":347793216584,"model":{"vocab":40,"dim":8,"layers":1,"heads":2,"ff":12,"seq":10},
		"train":{"steps":5,"batch":2,"accumulate":3,"clip":1,"epoch":3},
		"optimizer":{"lr":0.03},"text":{"tokens":1000},"parts":{"patience":1},"ranks":2}`)
	require.NoError(t, err)

	r := runtest.Check(c, fakeMachine(t), t.TempDir())
	require.NoError(t, r.Skipped)
	require.Contains(t, r.Checked, runtest.OnRanks)
	require.Nil(t, r.Failure)
}

// eachGradientType calls test for machines with each type of gradients, or one of them unless tests are long.
func eachGradientType(t *testing.T, test func(t *testing.T, m runtest.Device)) {
	for name, opts := range randtest.Sample(t, 1, map[string][]cudaops.MachineOption{
		"float32":            nil,
		"bfloat16 gradients": {cudaops.NarrowGradients()},
	}) {
		t.Run(name, func(t *testing.T) { test(t, fakeMachine(t, opts...)) })
	}
}
