package cudaops_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/runtest"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
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

// fakeMachine returns a machine that computes random runs on the fake driver, each on a new device.
func fakeMachine(t *testing.T, opts ...cudaops.MachineOption) runtest.Device {
	faults := []string{"cuMemAlloc", "cuMemAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync",
		"cuStreamSynchronize", "cuLaunchKernel"}
	return runtest.Device{
		Name:   t.Name(),
		Limits: runtest.Limits{Listening: true, Faults: faults},
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

// TestRandomRuns performs the random runs of package runtest on the fake driver.
func TestRandomRuns(t *testing.T) {
	plan := runtest.Plan{Usual: 2 * time.Second, Fixed: 4}

	for name, opts := range map[string][]cudaops.MachineOption{
		"float32":            nil,
		"bfloat16 gradients": {cudaops.NarrowGradients()},
	} {
		t.Run(name, func(t *testing.T) {
			runtest.Campaign(t, fakeMachine(t, opts...), *randomRuns, plan)
		})
	}
}
