package op_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

// TestConstructorErrors checks that every constructor returns an error for each kind of bad argument. The
// error must name the op, the argument, the value given and the values accepted.
func TestConstructorErrors(t *testing.T) {
	g, other := gorgonia.NewGraph(), gorgonia.NewGraph()
	f64 := func(shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(fmt.Sprint(shape)))
	}
	f32 := func(shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(fmt.Sprint("f32", shape)))
	}
	ids := func(n int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(n),
			gorgonia.WithName(fmt.Sprint("ids", n)))
	}
	elsewhere := gorgonia.NewTensor(other, tensor.Float64, 1, gorgonia.WithShape(4),
		gorgonia.WithName("elsewhere"))
	attention := op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 2}
	with := func(change func(*op.AttentionConfig)) op.AttentionConfig {
		c := attention
		change(&c)
		return c
	}
	attend := func(q, k, v *gorgonia.Node, c op.AttentionConfig) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.Attention(q, k, v, c) }
	}
	documents := func(starts *gorgonia.Node, c op.AttentionConfig) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) {
			return op.DocumentAttention(f64(6, 8), f64(6, 4), f64(6, 4), starts, c)
		}
	}
	causal := with(func(c *op.AttentionConfig) { c.Causal = true })
	rope := func(x *gorgonia.Node, c op.RoPEConfig) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.RoPE(x, c) }
	}
	rms := func(x, w *gorgonia.Node, eps float64) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.RMSNorm(x, w, eps) }
	}
	layerNorm := func(x, w, b *gorgonia.Node, eps float64) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.LayerNorm(x, w, b, eps) }
	}
	linear := func(x, w *gorgonia.Node) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.Linear(x, w) }
	}
	mlp := func(x, gate, up, down *gorgonia.Node) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.SiLUMLP(x, gate, up, down) }
	}
	embed := func(i, table *gorgonia.Node) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.Embedding(i, table) }
	}
	ce := func(l, t *gorgonia.Node) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.CrossEntropy(l, t) }
	}
	lce := func(x, w, t *gorgonia.Node) func() (*gorgonia.Node, error) {
		return func() (*gorgonia.Node, error) { return op.LinearCrossEntropy(x, w, t) }
	}
	for name, c := range map[string]struct {
		build func() (*gorgonia.Node, error)
		want  string // words that the error must hold, separated by |
	}{
		"RMSNorm nil": {rms(nil, f64(4), 0), "RMSNorm|x is nil"},
		"RMSNorm rank": {rms(f64(2, 3, 4), f64(4), 0),
			"RMSNorm|x has shape (2, 3, 4)|2 dimensions"},
		"RMSNorm empty": {rms(f64(0, 4), f64(4), 0),
			"RMSNorm|x has shape (0, 4)|at least one element"},
		"Linear empty": {linear(f64(3, 4), f64(0, 4)),
			"Linear|w has shape (0, 4)|at least one element"},
		"CrossEntropy empty": {ce(f64(3, 0), ids(3)),
			"CrossEntropy|logits has shape (3, 0)|at least one element"},
		"RMSNorm weight": {rms(f64(3, 5), f64(4), 0), "RMSNorm|weight has shape (4)|(5)|(3, 5)"},
		"RMSNorm types":  {rms(f64(3, 4), f32(4), 0), "RMSNorm|weight|float32|x|float64"},
		"RMSNorm graphs": {rms(f64(3, 4), elsewhere, 0), "RMSNorm|weight|x|different graphs"},
		"LayerNorm weight": {layerNorm(f64(3, 5), f64(4), f64(5), 0),
			"LayerNorm|weight has shape (4)|(5)|(3, 5)"},
		"LayerNorm bias": {layerNorm(f64(3, 5), f64(5), f64(4), 0),
			"LayerNorm|bias has shape (4)|(5)|(3, 5)"},
		"LayerNorm types": {layerNorm(f64(3, 4), f64(4), f32(4), 0),
			"LayerNorm|bias|float32|x|float64"},
		"LayerNorm eps": {layerNorm(f64(3, 4), f64(4), f64(4), math.NaN()), "LayerNorm|eps|NaN"},
		"RMSNorm eps":   {rms(f64(3, 4), f64(4), -1), "RMSNorm|eps|-1"},
		"RMSNorm ints":  {rms(ids(4), f64(4), 0), "RMSNorm|x|int|float32 or float64"},
		"RoPE odd head": {rope(f64(6, 6), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 3}),
			"RoPE|HeadDim is 3|even"},
		"RoPE width": {rope(f64(6, 6), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4}),
			"RoPE|(6, 6)|8 features|Heads 2|HeadDim 4"},
		"RoPE rows": {rope(f64(7, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4}),
			"RoPE|7 rows|(7, 8)|Seq 3"},
		"RoPE zero config": {rope(f64(6, 8), op.RoPEConfig{}), "RoPE|Seq 0|positive"},
		"RoPE base": {rope(f64(6, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4, Base: -2}),
			"RoPE|Base|-2"},
		"RoPE scaling": {rope(f64(6, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
			Scaling: &op.RoPEScaling{}}), "RoPE|Factor|0|1"},
		"RoPE kinds of scaling": {rope(f64(6, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
			Scaling: &op.RoPEScaling{Factor: 2, LowFreq: 1, HighFreq: 4, BetaFast: 32, BetaSlow: 1,
				Original: 64}}), "RoPE|HighFreq is 4|BetaFast 32"},
		"RoPE YaRN": {rope(f64(6, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
			Scaling: &op.RoPEScaling{Factor: 2, BetaFast: 1, BetaSlow: 32, Original: 64}}),
			"RoPE|BetaSlow is 32|BetaFast 1"},
		"RoPE magnitude": {rope(f64(6, 8), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
			Scaling: &op.RoPEScaling{Factor: 2, Magnitude: 2}}), "RoPE|Magnitude is 2|YaRN"},
		"Attention window": {attend(f64(6, 8), f64(6, 4), f64(6, 4),
			with(func(c *op.AttentionConfig) {
				c.Window = 2
			})),
			"Attention|Window is 2|Causal is false"},
		"Attention negative window": {attend(f64(6, 8), f64(6, 4), f64(6, 4),
			with(func(c *op.AttentionConfig) {
				c.Window, c.Causal = -2, true
			})),
			"Attention|Window is -2|at least 1"},
		"RMSNorm heads": {func() (*gorgonia.Node, error) {
			return op.RMSNorm(f64(3, 5), f64(2), 0, op.EachHead())
		},
			"RMSNorm|(3, 5)|2 features"},
		"Bias": {func() (*gorgonia.Node, error) {
			return op.Bias(f64(3, 5), f64(4))
		}, "Bias|b has shape (4)|(5)|(3, 5)"},
		"RoPE rank": {rope(f64(6), op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4}),
			"RoPE|x has shape (6)|2 dimensions"},
		"Attention rank": {attend(f64(8), f64(6, 4), f64(6, 4), attention),
			"Attention|q has shape (8)"},
		"Attention q": {attend(f64(6, 9), f64(6, 4), f64(6, 4), attention),
			"Attention|q|(6, 9)|8 features"},
		"Attention k": {attend(f64(6, 8), f64(6, 8), f64(6, 4), attention),
			"Attention|k has shape (6, 8)|(6, 4)|q (6, 8)"},
		"Attention v rows": {attend(f64(6, 8), f64(6, 4), f64(3, 4), attention),
			"Attention|v has shape (3, 4)|(6, 4)"},
		"Attention rows": {attend(f64(7, 8), f64(7, 4), f64(7, 4), attention),
			"Attention|7 rows|Seq 3"},
		"Attention groups": {attend(f64(6, 8), f64(6, 6), f64(6, 6),
			with(func(c *op.AttentionConfig) {
				c.KVHeads = 3
			})), "Attention|Heads is 4|KVHeads 3"},
		"Attention types": {attend(f64(6, 8), f32(6, 4), f64(6, 4), attention),
			"Attention|k|float32|q|float64"},
		"Attention zero": {attend(f64(6, 8), f64(6, 4), f64(6, 4), op.AttentionConfig{}),
			"Attention|Seq 0|positive"},
		"DocumentAttention nil": {documents(nil, causal), "DocumentAttention|starts is nil"},
		"DocumentAttention type": {documents(f64(6), causal),
			"DocumentAttention|starts|float64|int"},
		"DocumentAttention rows": {documents(ids(2), causal),
			"DocumentAttention|starts has shape (2)|(6)|q (6, 8)"},
		"DocumentAttention graph": {documents(elsewhere, causal),
			"DocumentAttention|starts|q|different graphs"},
		"DocumentAttention full": {documents(ids(6), attention),
			"DocumentAttention|Causal is false|true"},
		"Linear rank": {linear(f64(3), f64(4, 3)), "Linear|x has shape (3)"},
		"Linear features": {linear(f64(2, 3), f64(4, 5)),
			"Linear|w has shape (4, 5)|(4, 3)|x (2, 3)"},
		"Linear types": {linear(f64(2, 3), f32(4, 3)), "Linear|w|float32|x|float64"},
		"SiLUMLP gate": {mlp(f64(2, 3), f64(5, 4), f64(5, 3), f64(3, 5)),
			"SiLUMLP|gate has shape (5, 4)|(5, 3)"},
		"SiLUMLP up": {mlp(f64(2, 3), f64(5, 3), f64(6, 3), f64(3, 5)),
			"SiLUMLP|up has shape (6, 3)|(5, 3)"},
		"SiLUMLP down": {mlp(f64(2, 3), f64(5, 3), f64(5, 3), f64(5, 3)),
			"SiLUMLP|down has shape (5, 3)|(3, 5)"},
		"Embedding floats": {embed(f64(3), f64(4, 5)), "Embedding|ids|float64|int"},
		"Embedding table":  {embed(ids(3), f64(4)), "Embedding|table has shape (4)|[V, D]"},
		"CrossEntropy rows": {ce(f64(3, 5), ids(4)),
			"CrossEntropy|targets has shape (4)|(3)|(3, 5)"},
		"CrossEntropy floats": {ce(f64(3, 5), f64(3)), "CrossEntropy|targets|float64|int"},
		"CrossEntropy rank":   {ce(f64(3), ids(3)), "CrossEntropy|logits has shape (3)"},
		"LinearCrossEntropy w": {lce(f64(3, 5), f64(7, 4), ids(3)),
			"LinearCrossEntropy|w has shape (7, 4)|(7, 5)|x (3, 5)"},
		"LinearCrossEntropy rows": {lce(f64(3, 5), f64(7, 5), ids(2)),
			"LinearCrossEntropy|targets has shape (2)|(3)"},
		"LinearCrossEntropy type": {lce(f64(3, 5), f32(7, 5), ids(3)),
			"LinearCrossEntropy|w|float32|x|float64"},
		"NewtonSchulz rank": {func() (*gorgonia.Node, error) { return op.NewtonSchulz(f64(3), 5) },
			"NewtonSchulz|x has shape (3)"},
		"NewtonSchulz steps": {func() (*gorgonia.Node, error) {
			return op.NewtonSchulz(f64(3, 4), 0)
		}, "NewtonSchulz|steps is 0"},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := c.build()
			if err == nil {
				t.Fatalf("no error, but a node of shape %v", n.Shape())
			}
			for _, word := range strings.Split(c.want, "|") {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
		})
	}
}

// TestRunErrors checks the errors that depend on the values of operands.
func TestRunErrors(t *testing.T) {
	f := dense(tensor.Float64, make([]float64, 15), 3, 5)
	documents := func(starts, x *gorgonia.Node) (*gorgonia.Node, error) {
		return op.DocumentAttention(x, x, x, starts, op.AttentionConfig{Seq: 3, Heads: 1,
			HeadDim: 5, Causal: true})
	}
	for name, c := range map[string]struct {
		ids   []int
		build func(ids, x *gorgonia.Node) (*gorgonia.Node, error)
		want  string
	}{
		"id too large": {[]int{0, 3, 1}, op.Embedding, "ids[1] is 3|0 to 2"},
		"id negative":  {[]int{0, 2, -1}, op.Embedding, "ids[2] is -1|0 to 2"},
		"target too large": {[]int{0, 5, 1}, func(t, x *gorgonia.Node) (*gorgonia.Node, error) {
			return op.CrossEntropy(x, t)
		}, "targets[1] is 5|0 to 4"},
		"no target": {[]int{-1, -2, -1}, func(t, x *gorgonia.Node) (*gorgonia.Node, error) {
			return op.CrossEntropy(x, t)
		}, op.ErrNoTargets.Error()},
		"fused: too large": {[]int{0, 3, 1}, func(t, x *gorgonia.Node) (*gorgonia.Node, error) {
			return op.LinearCrossEntropy(x, x, t)
		}, "targets[1] is 3|0 to 2"},
		"start too large": {[]int{0, 2, 0}, documents,
			"starts[1] is 2|0, the start before it, to 1"},
		"start negative": {[]int{0, 0, -1}, documents,
			"starts[2] is -1|0, the start before it, to 2"},
		"start decreasing": {[]int{0, 1, 0}, documents,
			"starts[2] is 0|1, the start before it, to 2"},
		"fused: no target": {[]int{-1, -2, -1}, func(t, x *gorgonia.Node) (*gorgonia.Node, error) {
			return op.LinearCrossEntropy(x, x, t)
		}, op.ErrNoTargets.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			g := gorgonia.NewGraph()
			ids := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(3),
				gorgonia.WithName("ids"))
			if err := gorgonia.Let(ids, ints(c.ids)); err != nil {
				t.Fatal(err)
			}
			must(t)(c.build(ids, gorgonia.NodeFromAny(g, f, gorgonia.WithName("x"))))
			err := tryRun(g)
			if err == nil {
				t.Fatal("no error")
			}
			for _, word := range strings.Split(c.want, "|") {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
		})
	}
}

// TestErrNoTargets checks that a loss without targets returns ErrNoTargets.
func TestErrNoTargets(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, dense(tensor.Float64, make([]float64, 4), 2, 2),
		gorgonia.WithName("x"))
	loss := must(t)(op.CrossEntropy(x, gorgonia.NodeFromAny(g, ints([]int{-1, -1}),
		gorgonia.WithName("t"))))
	o := loss.Op()
	if _, err := o.Do(x.Value(), ints([]int{-1, -1})); !errors.Is(err, op.ErrNoTargets) {
		t.Errorf("got %v, want ErrNoTargets", err)
	}

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	err := machine.RunAll()
	require.ErrorIs(t, op.RunError(err), op.ErrNoTargets)
}

// TestRunError checks that errors.Is finds the errors that ops wrap, for all machines and for both run
// methods of Gorgonia's own.
func TestRunError(t *testing.T) {
	build := func() *gorgonia.ExprGraph {
		g := gorgonia.NewGraph()
		input := func(name string, v float64, shape ...int) *gorgonia.Node {
			values := slices.Repeat([]float64{v}, tensor.Shape(shape).TotalSize())
			return gorgonia.NodeFromAny(g, dense(tensor.Float64, values, shape...),
				gorgonia.WithName(name))
		}
		y := must(t)(op.Kasmina(input("x", math.NaN(), 2, 4), input("w", 1, 2, 2), input("a", 1, 2),
			newLattice(t, 4, []seedSetting{{"Dormant", "Residual", 0, 0},
				{"Dormant", "Residual", 0, 0}}),
			op.StopOnNonFinite()))
		must(t)(gorgonia.Sum(y))
		return g
	}

	for name, newMachine := range map[string]func(*gorgonia.ExprGraph) gorgonia.VM{
		"tape": func(g *gorgonia.ExprGraph) gorgonia.VM { return gorgonia.NewTapeMachine(g) },
		// LispMachine continues after an error on another goroutine, unless it only runs forward.
		"lisp": func(g *gorgonia.ExprGraph) gorgonia.VM {
			return gorgonia.NewLispMachine(g, gorgonia.ExecuteFwdOnly())
		},
	} {
		machine := newMachine(build())
		err := machine.RunAll()
		require.NoError(t, machine.Close())
		found := op.RunError(err)
		require.ErrorIs(t, found, op.ErrNonFinite, name)
		require.EqualError(t, found, err.Error())
		var context interface{ Node() *gorgonia.Node }
		require.ErrorAs(t, found, &context, name)
		require.NotNil(t, context.Node(), name)
		require.ErrorIs(t, op.RunError(fmt.Errorf("a step: %w", err)), op.ErrNonFinite, name)
		require.ErrorIs(t, op.RunError(found), op.ErrNonFinite, name)
	}

	plain := errors.New("plain")
	require.Same(t, plain, op.RunError(plain))
	require.NoError(t, op.RunError(nil))
}

// TestHashes checks that ops with different configurations remain different nodes.
func TestHashes(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(6, 8), gorgonia.WithName("x"))
	w := gorgonia.NewTensor(g, tensor.Float64, 1, gorgonia.WithShape(8), gorgonia.WithName("w"))
	starts := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(6),
		gorgonia.WithName("starts"))
	half := gorgonia.NewTensor(g, tensor.Float64, 1, gorgonia.WithShape(4),
		gorgonia.WithName("half"))
	square := gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(8, 6),
		gorgonia.WithName("square"))
	build := []func() (*gorgonia.Node, error){
		func() (*gorgonia.Node, error) { return op.RMSNorm(x, w, 1e-5) },
		func() (*gorgonia.Node, error) { return op.RMSNorm(x, w, 1e-6) },
		func() (*gorgonia.Node, error) { return op.RMSNorm(x, w, 1e-6, op.WeightPlusOne()) },
		func() (*gorgonia.Node, error) { return op.RMSNorm(x, half, 1e-6, op.EachHead()) },
		func() (*gorgonia.Node, error) { return op.Bias(x, w) },
		func() (*gorgonia.Node, error) { return op.SiLUMLP(x, x, x, square) },
		func() (*gorgonia.Node, error) { return op.GELUMLP(x, x, x, square) },
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
				Scaling: &op.RoPEScaling{Factor: 2, BetaFast: 32, BetaSlow: 1, Original: 64}})
		},
		func() (*gorgonia.Node, error) {
			return op.Attention(x, x, x, op.AttentionConfig{Seq: 3, Heads: 2, HeadDim: 4,
				Causal: true, Window: 2})
		},
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4})
		},
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 6, Heads: 2, HeadDim: 4})
		},
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 3, Heads: 4, HeadDim: 2})
		},
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4, Base: 100})
		},
		func() (*gorgonia.Node, error) {
			return op.RoPE(x, op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4,
				Scaling: &op.RoPEScaling{Factor: 2}})
		},
		func() (*gorgonia.Node, error) {
			return op.Attention(x, x, x, op.AttentionConfig{Seq: 3, Heads: 2, HeadDim: 4})
		},
		func() (*gorgonia.Node, error) {
			return op.Attention(x, x, x, op.AttentionConfig{Seq: 3, Heads: 2,
				HeadDim: 4, Causal: true})
		},
		func() (*gorgonia.Node, error) {
			return op.Attention(x, x, x, op.AttentionConfig{Seq: 3, Heads: 2, HeadDim: 4, Scale: 2})
		},
		func() (*gorgonia.Node, error) {
			return op.DocumentAttention(x, x, x, starts, op.AttentionConfig{Seq: 3, Heads: 2,
				HeadDim: 4, Causal: true})
		},
		func() (*gorgonia.Node, error) { return op.NewtonSchulz(x, 4) },
		func() (*gorgonia.Node, error) { return op.NewtonSchulz(x, 5) },
	}

	seen := map[*gorgonia.Node]int{}
	hashes := map[uint32]int{}
	for i, b := range build {
		n := must(t)(b())
		if j, ok := seen[n]; ok {
			t.Errorf("ops %d and %d became one node", j, i)
		}
		if j, ok := hashes[n.Op().Hashcode()]; ok {
			t.Errorf("ops %d and %d have the same hash", j, i)
		}
		seen[n], hashes[n.Op().Hashcode()] = i, i
		if again := must(t)(b()); again != n {
			t.Errorf("op %d applied twice makes two nodes", i)
		}
	}
}

// TestViews gives an op a transposed matrix, a slice of a larger matrix, and a column-major matrix.
func TestViews(t *testing.T) {
	r := random(t)
	data := normal(r, 12)
	w := dense(tensor.Float64, normal(r, 8), 2, 4)
	plain := dense(tensor.Float64, data, 3, 4)
	flipped := dense(tensor.Float64, make([]float64, 12), 4, 3)
	for i := range 3 {
		for j := range 4 {
			flipped.Set(j*3+i, data[i*4+j])
		}
	}

	if err := flipped.T(); err != nil {
		t.Fatal(err)
	}

	large := dense(tensor.Float64, normal(r, 30), 5, 6)
	for i := range 3 {
		for j := range 4 {
			if err := large.SetAt(data[i*4+j], i+1, j+2); err != nil {
				t.Fatal(err)
			}
		}
	}

	slice, err := large.Slice(gorgonia.S(1, 4), gorgonia.S(2, 6))
	if err != nil {
		t.Fatal(err)
	}

	columns := tensor.New(tensor.WithShape(3, 4), tensor.Of(tensor.Float64), tensor.AsFortran(nil))
	for i := range 3 {
		for j := range 4 {
			if err := columns.SetAt(data[i*4+j], i, j); err != nil {
				t.Fatal(err)
			}
		}
	}

	g := gorgonia.NewGraph()
	x := gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(3, 4), gorgonia.WithName("x"))
	y := must(t)(op.Linear(x, gorgonia.NodeFromAny(g, w, gorgonia.WithName("w"))))
	want, err := y.Op().Do(plain, w)
	if err != nil {
		t.Fatal(err)
	}

	for name, v := range map[string]gorgonia.Value{"transposed": flipped,
		"slice": slice.(*tensor.Dense), "column-major": columns} {
		got, err := y.Op().Do(v, w)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d := distance(floats(t, got), floats(t, want)); d != 0 {
			t.Errorf("%s: differs by %.2g", name, d)
		}
	}
}

// TestRoPETables checks that the tables are nil for configs that RoPE rejects, and use RoPE's default
// base.
func TestRoPETables(t *testing.T) {
	for _, c := range []op.RoPEConfig{{Seq: -1, Heads: 1, HeadDim: 4},
		{Seq: 4, Heads: 1, HeadDim: -4},
		{Seq: -2, HeadDim: -2}, {Seq: 4, HeadDim: 3},
		{Seq: 4}, {HeadDim: 4}, {}, {Seq: math.MaxInt, HeadDim: math.MaxInt - 1},
		{Seq: 1 << 40, HeadDim: 2}, {Seq: 4, HeadDim: 4, Base: -3},
		{Seq: 4, HeadDim: 4, Base: math.NaN()}, {Seq: 4, HeadDim: 4, Scaling: &op.RoPEScaling{}}} {
		cos, sin := c.Tables()
		require.Nil(t, cos, "%+v", c)
		require.Nil(t, sin, "%+v", c)
	}

	cos, sin := op.RoPEConfig{Seq: 3, Heads: -1, HeadDim: 4}.Tables()
	explicitCos, explicitSin := op.RoPEConfig{Seq: 3, HeadDim: 4, Base: 10000}.Tables()
	require.Len(t, cos, 6)
	require.Equal(t, explicitCos, cos)
	require.Equal(t, explicitSin, sin)
}
