package update_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// enqueue lowers the gradients of a linear layer with a bias, and returns the launches of an update of
// its parameters.
func enqueue(t *testing.T, o optim.Rules, options lower.Options, loss bool) []any {
	t.Helper()
	g := gorgonia.NewGraph()
	params := gorgonia.Nodes{passtest.Node(g, "weight", 8, 4), passtest.Node(g, "bias", 8)}
	y := gorgonia.Must(op.Bias(gorgonia.Must(op.Linear(passtest.Node(g, "x", 3, 4), params[0])),
		params[1]))
	cost := gorgonia.Must(op.CrossEntropy(y, passtest.Ints(g, "targets", 1, 0, 4)))
	_, err := gorgonia.Grad(cost, params...)
	require.NoError(t, err)
	options.Asked = graph.Asked{Params: params, Outputs: gorgonia.Nodes{cost}}
	r := passtest.New(t, g, options)

	var all []*update.Param
	for _, in := range r.Program.Inputs {
		if slices.Contains(params, in.Node) {
			all = append(all, &update.Param{Input: in, Grad: r.Program.Values[in.Node.Deriv()],
				Rule: o.Rule(in.Node.Name(), in.Node.Shape())})
		}
	}

	activation := options.Activation
	x, err := update.New(update.Runtime{Runner: r.Runner, Chooser: r.Chooser, Activation: activation,
		Kept: func(*program.Input) *run.KeptParam { return nil }}, o, all, 1, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, x.Close()) }()

	var at *program.Array
	if loss {
		at = r.Program.Values[cost]
	}

	r.Launches = nil
	require.NoError(t, x.Enqueue(at, run.Unobserved{}))
	require.NoError(t, r.Ctx.SyncStream(r.Runner.Stream))
	return r.Launches
}

// TestUpdate enqueues updates, and compares their launches: the squares of the gradients, a product
// with the loss if there is one, the norm, and the kernels of the optimizer.
func TestUpdate(t *testing.T) {
	adamW, err := optim.NewAdamW()
	require.NoError(t, err)
	lion, err := optim.NewLion()
	require.NoError(t, err)

	const squares, norm, each = "optimizer.GradSquares", "optimizer.GradNorm",
		"optimizer.Elementwise"
	require.Equal(t, []string{squares, norm, each},
		passtest.Types(enqueue(t, adamW, lower.Options{}, false)))
	require.Equal(t, []string{squares, "elementwise.Unary", norm, each},
		passtest.Types(enqueue(t, adamW, lower.Options{}, true)))

	launches := enqueue(t, lion, lower.Options{}, false)
	require.Equal(t, []string{squares, norm, each}, passtest.Types(launches))
	require.Equal(t, "Lion", launches[2].(optimizer.Elementwise).Kernel)
}

// TestUpdateOfMatrices enqueues an update by Muon. It must orthogonalize the matrix by products
// between two kernels, and update the bias with AdamW.
func TestUpdateOfMatrices(t *testing.T) {
	muon, err := optim.NewMuon()
	require.NoError(t, err)
	types := passtest.Types(enqueue(t, muon, lower.Options{}, false))
	require.Equal(t, []string{"optimizer.GradSquares", "optimizer.GradNorm"}, types[:2])
	require.Contains(t, types, "optimizer.Elementwise")
	require.Less(t, slices.Index(types, "optimizer.Direction"), slices.Index(types, "optimizer.Apply"))
}

// TestUpdateOfNarrowParameters enqueues an update of parameters that runs read in bfloat16. The kernel
// of the optimizer writes those copies too, so that nothing else is launched.
func TestUpdateOfNarrowParameters(t *testing.T) {
	adamW, err := optim.NewAdamW()
	require.NoError(t, err)
	require.Equal(t, []string{"optimizer.GradSquares", "optimizer.GradNorm", "optimizer.Elementwise"},
		passtest.Types(enqueue(t, adamW, lower.Options{Activation: gpu.BFloat16}, false)))
}
