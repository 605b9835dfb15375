package driver_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestBadPTX(t *testing.T) {
	c := must[gpu.Context](t)(needGPU(t).Retain(0))
	_, err := c.LoadModule([]byte(strings.Replace(ptx, "fma.rn.f32", "fma.rn.f33", 1)))
	require.ErrorIs(t, err, gpu.InvalidPTX)
	t.Log(err)
	_, err = c.LoadModule([]byte("not a module"))
	require.Error(t, err)
	t.Log(err)
	ok(t, c.Close())
}

// TestFault stores to an invalid address. On a real GPU this destroys the context for the whole process,
// so the store happens in a subprocess.
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
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "--- PASS: TestFault/gpu")
		t.Logf("%s", out)
	})
}

func testFault(t *testing.T, c gpu.Context) {
	m := must[gpu.Module](t)(c.LoadModule([]byte(ptx)))
	poke := must[*gpu.Function](t)(c.Function(m, "poke"))
	one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 1}}
	ok(t, c.Launch(poke, one, 0, args(gpu.Ptr(0x40))))
	for _, err := range []error{c.SyncStream(0), second(c.Alloc(1)), c.SyncStream(0)} {
		var e *gpu.Error
		if !errors.As(err, &e) || !errors.Is(err, gpu.IllegalAddress) || !e.Sticky() ||
			!strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS (700)") ||
			!strings.Contains(err.Error(), "context is lost") {
			t.Errorf("got %v", err)
		}
		t.Log(err)
	}
}
