package driver_test

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestBadPTX(t *testing.T) {
	c := must[gpu.Context](t)(needGPU(t).Retain(0))
	_, err := c.LoadModule([]byte(strings.Replace(ptx, "fma.rn.f32", "fma.rn.f33", 1)))
	require.ErrorIs(t, err, gpu.InvalidPTX)
	require.ErrorContains(t, err, "line 28")
	require.ErrorContains(t, err, "fma")
	t.Log(err)
	if _, err := c.LoadModule([]byte("not a module")); err == nil {
		t.Error("loaded nonsense")
	} else {
		t.Log(err)
	}
	ok(t, c.Close())
}

// TestFault stores to a bad address. On a GPU that loses the context for the whole process, so it
// happens in another.
func TestFault(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		testFault(t, must[gpu.Context](t)(fake.New(fake.Config{Kernels: fakeKernels}).Retain(0)))
	})
	t.Run("gpu", func(t *testing.T) {
		const variable = "KASMINA_TEST_FAULT"
		d := needGPU(t)
		if os.Getenv(variable) != "" {
			testFault(t, must[gpu.Context](t)(d.Retain(0)))
			return
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestFault$/^gpu$", "-test.v")
		cmd.Env = append(os.Environ(), variable+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err)
		require.Contains(t, string(out), "--- PASS: TestFault/gpu")
		t.Logf("%s", out)
	})
}

func testFault(t *testing.T, c gpu.Context) {
	m := must[gpu.Module](t)(c.LoadModule([]byte(ptx)))
	poke := must[*gpu.Function](t)(c.Function(m, "poke"))
	one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 1}}
	ok(t, c.Launch(poke, one, 0, new(gpu.Args).Ptr(0x40)))
	for _, err := range []error{c.Synchronize(), second(c.Alloc(1)), c.SyncStream(0)} {
		var e *gpu.Error
		if !errors.As(err, &e) || !errors.Is(err, gpu.IllegalAddress) || !e.Sticky() ||
			!strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS (700)") ||
			!strings.Contains(err.Error(), "context is lost") {
			t.Errorf("got %v", err)
		}
		t.Log(err)
	}
}

// The benchmarks say what a call costs, and what the alternatives would.
func BenchmarkCalls(b *testing.B) {
	c := must[gpu.Context](b)(needGPU(b).Retain(0))
	m := must[gpu.Module](b)(c.LoadModule([]byte(ptx)))
	f := must[*gpu.Function](b)(c.Function(m, "axpy"))
	s := must[gpu.Stream](b)(c.NewStream())
	e := must[gpu.Event](b)(c.NewEvent(false))
	args := new(gpu.Args).Ptr(0).Ptr(0).Ptr(0).Float32(1).Int32(0)
	one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 32}}
	launch := func() error { return c.Launch(f, one, s, args) }
	ok(b, errors.Join(c.BeginCapture(s)))
	for range 100 {
		ok(b, launch())
	}
	g := must[*gpu.Graph](b)(c.EndCapture(s))

	loop := func(do func() error) func(b *testing.B) {
		return func(b *testing.B) {
			var spent time.Duration
			for left := b.N; left > 0; left -= 512 { // a full queue would time the GPU instead
				start := time.Now()
				for range min(left, 512) {
					require.NoError(b, do())
				}
				spent += time.Since(start)
				ok(b, c.SyncStream(s))
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/call")
		}
	}
	query := func() error { _, err := c.EventDone(e); return err }
	b.Run("query", loop(query))
	b.Run("launch", loop(launch))
	b.Run("launch-graph-of-100", loop(func() error { return c.LaunchGraph(g, s) }))
	b.Run("parallel-query", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				require.NoError(b, query())
			}
		})
	})

	// The alternative: one thread that makes all calls.
	calls, results := make(chan func() error), make(chan error)
	go func() {
		runtime.LockOSThread()
		for do := range calls {
			results <- do()
		}
	}()
	handOver := func(do func() error) func() error {
		return func() error { calls <- do; return <-results }
	}
	b.Run("query-on-dedicated-thread", loop(handOver(query)))
	b.Run("launch-on-dedicated-thread", loop(handOver(launch)))
	close(calls)
	ok(b, errors.Join(c.DestroyGraph(g), c.DestroyEvent(e), c.DestroyStream(s),
		c.UnloadModule(m), c.Close()))
}
