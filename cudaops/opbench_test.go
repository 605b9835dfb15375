package cudaops_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/opbench"
)

// TestOpBench wants ops timed on a GPU beside the CPU, with the same results.
func TestOpBench(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, fakes := cudaops.OpenFake(t)
	for op, shape := range map[string][]int{"RMSNorm": {8, 16}, "Linear": {8, 16, 4}, "SiLUMLP": {8, 4, 6}, "Attention": {1, 8, 2, 1, 4},
		"LinearCrossEntropy": {8, 4, 10}, "Kasmina": {8, 12, 3}, "NewtonSchulz": {8, 12}, "Add": {8, 16}} {
		figures, err := opbench.Time(op, shape, opbench.Float32, opbench.OnGPU(device, fakes), opbench.WithSpan(0))
		require.NoError(t, err, op)
		n := 0
		for _, f := range figures {
			if f.Peer != "cuda" {
				continue
			}
			n++
			require.NoError(t, f.Err, op)
			require.Positive(t, f.Forward, op)
			require.GreaterOrEqual(t, f.Training, f.Forward, op)
			require.Less(t, f.Distance, 1e-5, "%s\n%s", op, opbench.Table(figures))
		}
		require.NotZero(t, n, op)
		t.Logf("%s\n%s", op, opbench.Table(figures))
	}
	figures, err := opbench.Time("Add", []int{8, 16}, opbench.Float64, opbench.OnGPU(device, fakes), opbench.WithSpan(0))
	require.NoError(t, err)
	require.ErrorContains(t, figures[len(figures)-2].Err, "a GPU has no float64")
}
