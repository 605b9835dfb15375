package cudaops

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

// shiftedInputs creates inputs of a graph in one type.
type shiftedInputs struct {
	g  *gorgonia.ExprGraph
	dt tensor.Dtype
}

func (s *shiftedInputs) of(name string, x []float64, shape ...int) *gorgonia.Node {
	var data any = x
	if s.dt == tensor.Float32 {
		narrow := make([]float32, len(x))
		for i, v := range x {
			narrow[i] = float32(v)
		}
		data = narrow
	}
	return gorgonia.NodeFromAny(s.g, tensor.New(tensor.WithShape(shape...),
		tensor.WithBacking(data)), gorgonia.WithName(name))
}

// shiftedLosses maps names to graphs with equal logits or scores. Each function returns the nodes that a
// test compares.
var shiftedLosses = map[string]func(s *shiftedInputs, at float64) gorgonia.Nodes{
	"CrossEntropy": func(s *shiftedInputs, at float64) gorgonia.Nodes {
		logits := s.of("logits", slices.Repeat([]float64{at}, 4*8), 4, 8)
		loss := gorgonia.Must(op.CrossEntropy(logits, intNode(s.g, "targets", []int{0, -1, 3, 7})))
		return append(gorgonia.Nodes{loss}, gradientsOf(loss, logits)...)
	},
	"LinearCrossEntropy": func(s *shiftedInputs, at float64) gorgonia.Nodes {
		x := s.of("x", slices.Repeat([]float64{at}, 4*8), 4, 8)
		w := s.of("w", slices.Repeat([]float64{0.125}, 16*8), 16, 8)
		loss := gorgonia.Must(op.LinearCrossEntropy(x, w, intNode(s.g, "targets", []int{0, -1, 3, 15})))
		// The gradient of x is zero except for rounding.
		return gorgonia.Nodes{loss, gradientsOf(loss, x, w)[1]}
	},
	"Attention": func(s *shiftedInputs, at float64) gorgonia.Nodes { return shiftedAttention(s, at, 0) },
	"Attention with a window": func(s *shiftedInputs, at float64) gorgonia.Nodes {
		return shiftedAttention(s, at, 5)
	},
}

func shiftedAttention(s *shiftedInputs, at float64, window int) gorgonia.Nodes {
	const rows, seq, heads, dim = 80, 40, 2, 64
	values := make([]float64, rows*dim)
	for i := range values {
		values[i] = float64(i*i%7) - 3 + float64(i/dim%5)/2
	}

	q := s.of("q", slices.Repeat([]float64{at / dim}, rows*heads*dim), rows, heads*dim)
	k := s.of("k", slices.Repeat([]float64{1}, rows*dim), rows, dim)
	v := s.of("v", values, rows, dim)
	y := gorgonia.Must(op.Attention(q, k, v, op.AttentionConfig{Seq: seq, Heads: heads, KVHeads: 1,
		HeadDim: dim, Scale: 1, Causal: true, Window: window}))
	d := gradientsOf(gorgonia.Must(gorgonia.Sum(y)), q, k, v)
	return gorgonia.Nodes{y, d[1], d[2]} // dq is zero except for rounding
}

func gradientsOf(loss *gorgonia.Node, wrt ...*gorgonia.Node) gorgonia.Nodes {
	d, err := gorgonia.Grad(loss, wrt...)
	if err != nil {
		panic(err)
	}
	return d
}

// toFloat32 rounds a float64 value to float32.
func toFloat32(v gorgonia.Value) gorgonia.Value {
	switch x := v.Data().(type) {
	case float64:
		return gorgonia.NewF32(float32(x))
	case []float64:
		narrow := make([]float32, len(x))
		for i, e := range x {
			narrow[i] = float32(e)
		}
		return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(narrow))
	}

	return v
}

// TestShift checks losses, attention and their gradients against float64 when all logits or scores are
// equal, and large.
func TestShift(t *testing.T) {
	for name, build := range shiftedLosses {
		for _, at := range []float64{0, 100, -1e4, 1e5, 1e6, -1e7, 3e7} {
			t.Run(fmt.Sprintf("%s/%g", name, at), func(t *testing.T) {
				onEach(t, func(t *testing.T, device *Device, tolerance float64,
					opts ...MachineOption) {
					exact := build(&shiftedInputs{gorgonia.NewGraph(), tensor.Float64}, at)
					require.NoError(t, tapeMachine(t, exact[0].Graph()).RunAll())

					nodes := build(&shiftedInputs{gorgonia.NewGraph(), tensor.Float32}, at)
					m := openMachine(t, device, nodes[0].Graph(), append(opts, WithStrict(),
						WithOutputs(nodes...))...)
					require.NoError(t, m.RunAll())
					for i, n := range nodes {
						require.Less(t, distance(t, valueIn(t, m, n), toFloat32(exact[i].Value())), tolerance,
							"node %d", i)
					}
				}, map[string]float64{"fake": 1e-5, "float32": 1e-5, "bfloat16": 1e-2})
			})
		}
	}
}
