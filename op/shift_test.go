package op_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
)

// shifts lists constants that are added to logits and scores without changing any probability.
var shifts = []float64{0, 100, -1e4, 1e5, 1e6, -1e7, 1e8}

// runOn runs a graph on Gorgonia's machine or on cpuops, and returns the values of nodes.
func runOn(t *testing.T, machine string, nodes ...*gorgonia.Node) [][]float64 {
	t.Helper()
	values := make([][]float64, len(nodes))
	if machine == "tape" {
		held := make([]gorgonia.Value, len(nodes))
		for i, n := range nodes {
			gorgonia.Read(n, &held[i])
		}
		vm := gorgonia.NewTapeMachine(nodes[0].Graph())
		require.NoError(t, vm.RunAll())
		for i, v := range held {
			values[i] = floats(t, v)
		}
		require.NoError(t, vm.Close())
		return values
	}

	m, err := cpuops.NewMachine(nodes[0].Graph(), cpuops.WithOutputs(nodes...))
	require.NoError(t, err)
	require.NoError(t, m.RunAll())
	for i, n := range nodes {
		v, err := m.Value(n)
		require.NoError(t, err)
		values[i] = floats(t, v)
	}

	require.NoError(t, m.Close())
	return values
}

// eachShift runs a test with equal logits or scores for each shift, on both machines and in both types.
func eachShift(t *testing.T, test func(t *testing.T, machine string, dt tensor.Dtype, at float64)) {
	for _, machine := range []string{"tape", "cpuops"} {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			for _, at := range shifts {
				t.Run(fmt.Sprintf("%s/%v/%g", machine, dt, at), func(t *testing.T) {
					test(t, machine, dt, at)
				})
			}
		}
	}
}

// repeated returns a slice of n copies of x.
func repeated(x float64, n int) []float64 {
	s := make([]float64, n)
	for i := range s {
		s[i] = x
	}
	return s
}

// nearAll checks that numbers are within 1e-6·size of the wanted numbers.
func nearAll(t *testing.T, what string, want, got []float64, size float64) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for i := range want {
		require.InDelta(t, want[i], got[i], 1e-6*size, "%s: element %d of %v", what, i, got)
	}
}

// TestCrossEntropyShift checks that equal logits have the loss log V and the gradient 1/V − [target],
// whatever their value.
func TestCrossEntropyShift(t *testing.T) {
	const rows, v = 3, 5
	targets := []int{0, -1, 4}
	eachShift(t, func(t *testing.T, machine string, dt tensor.Dtype, at float64) {
		g := gorgonia.NewGraph()
		logits := gorgonia.NodeFromAny(g, dense(dt, repeated(at, rows*v), rows, v),
			gorgonia.WithName("logits"))
		loss := must(t)(op.CrossEntropy(logits, gorgonia.NodeFromAny(g, ints(targets),
			gorgonia.WithName("targets"))))
		grads, err := gorgonia.Grad(loss, logits)
		require.NoError(t, err)

		want := make([]float64, rows*v)
		for r, target := range targets {
			for i := range v {
				if target >= 0 {
					want[r*v+i] = 1.0 / v / 2 // the mean is taken over two rows
				}
			}
			if target >= 0 {
				want[r*v+target] -= 0.5
			}
		}
		got := runOn(t, machine, loss, grads[0])
		nearAll(t, "loss", []float64{math.Log(v)}, got[0], 1)
		nearAll(t, "gradient", want, got[1], 1)
	})
}

func TestLinearCrossEntropyShift(t *testing.T) {
	const rows, d, v = 3, 4, 5
	targets := []int{0, -1, 4}
	eachShift(t, func(t *testing.T, machine string, dt tensor.Dtype, at float64) {
		g := gorgonia.NewGraph()
		x := gorgonia.NodeFromAny(g, dense(dt, repeated(at, rows*d), rows, d),
			gorgonia.WithName("x"))
		w := gorgonia.NodeFromAny(g, dense(dt, repeated(1.0/d, v*d), v, d), gorgonia.WithName("w"))
		loss := must(t)(op.LinearCrossEntropy(x, w, gorgonia.NodeFromAny(g, ints(targets),
			gorgonia.WithName("targets"))))
		grads, err := gorgonia.Grad(loss, x, w)
		require.NoError(t, err)

		dw := make([]float64, v*d)
		for i := range dw { // Σ over the two rows of (1/V − [target])·x/2
			dw[i] = at / v
			if token := i / d; token == targets[0] || token == targets[2] {
				dw[i] -= at / 2
			}
		}
		got := runOn(t, machine, loss, grads[0], grads[1])
		nearAll(t, "loss", []float64{math.Log(v)}, got[0], 1)
		nearAll(t, "dx", make([]float64, rows*d), got[1], 1)
		nearAll(t, "dw", dw, got[2], math.Abs(at)+1)
	})
}

// TestAttentionShift checks that equal scores give the mean of the values, whatever the scores are. The
// mean is taken over all positions, over the positions up to the query, or over the query's document.
func TestAttentionShift(t *testing.T) {
	const seq, heads, dim = 6, 2, 3
	starts := []int{0, 0, 2, 2, 2, 5}
	for _, kind := range []string{"full", "causal", "documents"} {
		t.Run(kind, func(t *testing.T) {
			eachShift(t, func(t *testing.T, machine string, dt tensor.Dtype, at float64) {
				g := gorgonia.NewGraph()
				input := func(name string, x []float64) *gorgonia.Node {
					return gorgonia.NodeFromAny(g, dense(dt, x, seq, len(x)/seq),
						gorgonia.WithName(name))
				}
				values := make([]float64, seq*dim)
				for i := range values {
					values[i] = float64(i*i%7) - 3
				}
				q := input("q", repeated(at/dim, seq*heads*dim))
				k := input("k", repeated(1, seq*dim))
				v := input("v", values)
				c := op.AttentionConfig{Seq: seq, Heads: heads, KVHeads: 1, HeadDim: dim, Scale: 1,
					Causal: kind != "full"}
				var y *gorgonia.Node
				if kind == "documents" {
					y = must(t)(op.DocumentAttention(q, k, v, gorgonia.NodeFromAny(g, ints(starts),
						gorgonia.WithName("starts")), c))
				} else {
					y = must(t)(op.Attention(q, k, v, c))
				}
				grads, err := gorgonia.Grad(must(t)(gorgonia.Sum(y)), q, k, v)
				require.NoError(t, err)

				// With p the probability of a seen key and s the sum of a key's values, a query
				// adds p to dv, and p·(s − mean of s)·q to dk.
				wantY, dk, dv := make([]float64, seq*heads*dim), make([]float64, seq*dim),
					make([]float64, seq*dim)
				for i := range seq {
					from, to := 0, seq
					if kind != "full" {
						to = i + 1
					}
					if kind == "documents" {
						from = starts[i]
					}
					p, mean := 1/float64(to-from), 0.0
					sum := func(j int) (s float64) {
						for _, e := range values[j*dim:][:dim] {
							s += e
						}
						return s
					}
					for j := from; j < to; j++ {
						mean += p * sum(j)
					}
					for j := from; j < to; j++ {
						for e := range dim {
							for h := range heads {
								wantY[(i*heads+h)*dim+e] += p * values[j*dim+e]
							}
							dv[j*dim+e] += heads * p
							dk[j*dim+e] += heads * p * (sum(j) - mean) * at / dim
						}
					}
				}
				got := runOn(t, machine, y, grads[0], grads[1], grads[2])
				nearAll(t, "y", wantY, got[0], 3)
				nearAll(t, "dq", make([]float64, seq*heads*dim), got[1], 3)
				nearAll(t, "dk", dk, got[2], 9*math.Abs(at)+9)
				nearAll(t, "dv", dv, got[3], heads*seq)
			})
		})
	}
}
