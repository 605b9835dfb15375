package schulz_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/schulz"
)

// builder returns a builder with an empty program.
func builder(t *testing.T, activation gpu.DType) schulz.Builder {
	t.Helper()
	g := gorgonia.NewGraph()
	gorgonia.Must(gorgonia.Square(passtest.Node(g, "x", 2, 2)))
	r := passtest.New(t, g, lower.Options{Activation: activation})
	r.Program.Calls = nil
	return schulz.Builder{Program: r.Program, Chooser: r.Chooser, Activation: activation,
		Name: func(c *program.Call) *program.Call { c.Op = "NewtonSchulz"; return c }}
}

// TestIterate checks the products of an iteration in float32: the squares A = X·Xᵀ and B, and Y = a·X + B·X,
// which are as small as possible for a tall X too.
func TestIterate(t *testing.T) {
	for name, c := range map[string]struct {
		shape []int
		want  []string
	}{
		"wide": {[]int{2, 5}, []string{
			"NewtonSchulz program.Matmul w:float32[1,2,2] float32[1,2,5] float32[1,2,5]",
			"NewtonSchulz program.Matmul w:float32[1,2,2] float32[1,2,2] float32[1,2,2] float32[1,2,2]",
			"NewtonSchulz program.Matmul w:float32[1,2,5] float32[1,2,2] float32[1,2,5] float32[1,2,5]"}},
		"tall": {[]int{5, 2}, []string{
			"NewtonSchulz program.Matmul w:float32[1,2,2] float32[1,5,2] float32[1,5,2]",
			"NewtonSchulz program.Matmul w:float32[1,2,2] float32[1,2,2] float32[1,2,2] float32[1,2,2]",
			"NewtonSchulz program.Matmul w:float32[1,5,2] float32[1,5,2] float32[1,2,2] float32[1,5,2]"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := builder(t, gpu.Float32)
			it, err := b.Iterate(c.shape, 1, 2)
			require.NoError(t, err)
			b.Program.Calls = it.Calls
			require.Equal(t, append(c.want, c.want...), passtest.Calls(b.Program))
			require.Same(t, it.Result, it.Start, "two steps end where they began")

			it, err = b.Iterate(c.shape, 1, 3)
			require.NoError(t, err)
			require.Len(t, it.Calls, 9)
			require.NotSame(t, it.Result, it.Start)
		})
	}
}

// TestNarrowIterate checks that a program with 16-bit activations iterates in float16.
func TestNarrowIterate(t *testing.T) {
	it, err := builder(t, gpu.BFloat16).Iterate([]int{128, 256}, 2, 5)
	require.NoError(t, err)
	require.Equal(t, gpu.Float16, it.Start.Type)
	require.Equal(t, []int{2, 128, 256}, it.Result.Shape)
}

// TestGradient checks that the gradient repeats the steps and ends with the gradient of the normalization.
func TestGradient(t *testing.T) {
	b := builder(t, gpu.Float32)
	x, g := b.NewArray(gpu.Float32, 2, 5), b.NewArray(gpu.Float32, 2, 5)
	dx := b.Gradient(x, g, 2)
	require.Equal(t, x.Shape, dx.Shape)

	calls := passtest.Calls(b.Program)
	require.Len(t, calls, 1+3+2*8+1)
	require.Contains(t, calls[0], "normalize.Forward")
	require.Equal(t, "NewtonSchulz normalize.Backward w:float32[2,5] float32[2,5] float32[2,5]", calls[len(calls)-1])
}
