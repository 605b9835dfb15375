package cudaops

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// statisticsCount counts products that compute statistics, and backward passes that start with them.
type statisticsCount struct{ products, begun int }

// statisticsLauncher is a launcher that counts statistics. If back is not nil, backward passes have these
// variants.
type statisticsLauncher struct {
	run.Launcher
	back  []kernel.Variant
	count *statisticsCount
}

// withStatistics counts a machine's statistics and, on the fake driver, sets the variants of backward
// passes.
func withStatistics(count *statisticsCount, back ...string) MachineOption {
	return withKernels(func(k run.Launcher) run.Launcher {
		s := statisticsLauncher{Launcher: k, count: count}
		for _, family := range back {
			s.back = append(s.back, kernel.Variant{Family: family})
		}
		return s
	})
}

func (k statisticsLauncher) Variants(params any) []kernel.Variant {
	if k.back != nil {
		switch params.(type) {
		case attention.Backward:
			return k.back
		case gemm.StatisticsProduct:
			return []kernel.Variant{{Family: "fused"}}
		}
	}
	return k.Launcher.Variants(params)
}

func (k statisticsLauncher) Launch(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case gemm.StatisticsProduct:
		k.count.products++
	case attention.Backward:
		if p.HasStatistics {
			k.count.begun++
		}
	}
	return k.Launcher.Launch(s, params)
}

// attentionLayer describes a layer of attention with projections before and after it.
type attentionLayer struct {
	batch, d int
	op.AttentionConfig
	documents, recomputed bool
	attentions, uses      int // numbers of attentions that are added, and of linear layers that read the sum
}

// graph returns a graph of the layer with random numbers, its parameters, and its results and gradients.
func (p attentionLayer) graph(t *testing.T, seed uint64) (*gorgonia.ExprGraph, gorgonia.Nodes,
	gorgonia.Nodes) {
	t.Helper()
	g, must := gorgonia.NewGraph(), gorgonia.Must
	matrix := randomMatrices(g, seed, 4, 1.0/8)
	rows, wide, narrow := p.batch*p.Seq, p.Heads*p.HeadDim, p.KVHeads*p.HeadDim
	in := gorgonia.Nodes{matrix("x", rows, p.d), matrix("q", wide, p.d), matrix("k", narrow, p.d),
		matrix("v", narrow, p.d)}
	for i := range p.uses {
		in = append(in, matrix(fmt.Sprint("o", i), p.d, wide))
	}

	of := in
	if p.documents {
		starts := make([]int, rows)
		for i := range starts {
			if i%p.Seq >= p.Seq/3 {
				starts[i] = p.Seq / 3
			}
		}
		of = append(of[:len(of):len(of)], gorgonia.NewTensor(g, tensor.Int, 1,
			gorgonia.WithName("starts"), gorgonia.WithShape(rows),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(starts)))))
	}

	add := func(a, b *gorgonia.Node) *gorgonia.Node {
		if a == nil {
			return b
		}
		return must(gorgonia.Add(a, b))
	}

	layer := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		turn := func(n *gorgonia.Node, heads int) *gorgonia.Node {
			return must(op.RoPE(n, op.RoPEConfig{Seq: p.Seq, Heads: heads, HeadDim: p.HeadDim}))
		}
		q, k := turn(must(op.Linear(in[0], in[1])), p.Heads), turn(must(op.Linear(in[0], in[2])),
			p.KVHeads)
		v := must(op.Linear(in[0], in[3]))
		var y, out *gorgonia.Node
		for i := range p.attentions {
			c := p.AttentionConfig
			c.Scale = 1 / float64(2+i)
			if p.documents {
				y = add(y, must(op.DocumentAttention(q, k, v, in[len(in)-1], c)))
			} else {
				y = add(y, must(op.Attention(q, k, v, c)))
			}
		}
		for i := range p.uses {
			out = add(out, must(op.Linear(y, in[4+i])))
		}
		return out, nil
	}

	apply := func(in gorgonia.Nodes, b blockFunc) (*gorgonia.Node, error) { return b(in) }
	if p.recomputed {
		apply = autodiff.Recompute
	}

	y, err := apply(of, layer)
	require.NoError(t, err)
	return g, in[1:], withGradients(t, y, matrix("with", rows, p.d), in)
}

// TestStatisticsVariants checks the fusion of two steps: the product that computes the gradient of an
// attention's result can also compute the statistics that the attention's backward pass starts with. The
// values must be the same with and without the fusion, which must happen whenever possible.
func TestStatisticsVariants(t *testing.T) {
	clearChoiceVariables(t)
	seed := randomSeed(t)
	check := func(t *testing.T, device *Device, p attentionLayer, tolerance float64, want int,
		back []string, opts ...MachineOption) {
		t.Helper()
		var values []gorgonia.Value
		for i, variant := range []string{"separate", "fused"} {
			var count statisticsCount
			g, params, keep := p.graph(t, seed)
			m := newFuseMachine(t, device, g, params, keep, append(opts,
				WithVariants("StatisticsProduct="+variant), withStatistics(&count, back...)))
			runs := 1
			if tolerance > 0 {
				values = valuesOf(t, m, keep, values, tolerance)
			} else {
				launch(t, m)
				runs = 2
			}
			require.Equal(t, statisticsCount{i * want * runs, want * runs}, count, "%+v, %v, %s", p, back,
				variant)
			if want > 0 {
				require.Equal(t, variant, variantOf(m, "StatisticsProduct"))
			}
			for range 2 { // recorded
				if tolerance > 0 {
					valuesOf(t, m, keep, values, tolerance)
				}
			}
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		for _, recomputed := range []bool{false, true} {
			p := attentionLayer{batch: 2, d: 40, attentions: 1, uses: 1, recomputed: recomputed,
				AttentionConfig: op.AttentionConfig{Seq: 6, Heads: 4, KVHeads: 2, HeadDim: 4,
					Causal: true}}
			variants := []string{"hopper", "mma"}
			check(t, device, p, 1e-5, 1, variants)
			check(t, device, p, 1e-5, 0, []string{"mma", "hopper"})
			check(t, device, p, 1e-5, 0, []string{"plain"})
			p.documents = true
			check(t, device, p, 1e-5, 1, variants)
			p.uses = 2 // the gradient is a sum
			check(t, device, p, 1e-5, 0, variants)
			p.attentions, p.uses = 2, 1 // here it is the gradient of two attentions
			check(t, device, p, 1e-5, 1, variants)
		}
	})

	for _, headDim := range []int{64, 96, 128} {
		for i, seq := range []int{128, 384, 192} {
			p := attentionLayer{batch: 3, d: 520, attentions: 1, uses: 1, documents: i == 1,
				recomputed: i == 1, AttentionConfig: op.AttentionConfig{Seq: seq, Heads: 5,
					KVHeads: 5, HeadDim: headDim, Causal: true}}
			want := 0
			if seq%128 == 0 && headDim != 96 {
				want = 1
			}
			t.Run(fmt.Sprintf("launched/%d, %d", headDim, seq), func(t *testing.T) {
				check(t, openBinaries(t, cards[hopper]), p, 0, want, nil, WithPrecision(BFloat16),
					WithTuning(TuneOff))
			})
			t.Run(fmt.Sprintf("bfloat16/%d, %d", headDim, seq), func(t *testing.T) {
				device := openGPU(t)
				if device.info.Capability() != 90 {
					want = 0
				}
				check(t, device, p, 2e-2, want, nil, WithPrecision(BFloat16), WithTuning(TuneOff))
			})
		}
	}
}

// TestStatisticsInPlace checks that no statistics are computed by a product if the backward pass of a
// Kasmina layer has overwritten its result. The product is then the gradient of the layer's result, not
// of the attention's.
func TestStatisticsInPlace(t *testing.T) {
	clearChoiceVariables(t)
	device, _ := openFake(t, fake.Config{})
	const seq, heads, headDim, seeds, d = 6, 4, 4, 4, 40
	lattice, err := state.NewLattice(seeds, heads*headDim, state.WithoutGates())
	require.NoError(t, err)
	for s := range seeds {
		require.NoError(t, lattice.RequestGermination(s,
			state.GerminationRequest{Slot: 1 + s, Kind: blueprints.AttentionGate}))
		require.NoError(t, lattice.Transition(s, state.Training))
		require.NoError(t, lattice.Transition(s, state.Grafting))
		require.NoError(t, lattice.SetAlpha(s, 0.5))
	}

	g, must := gorgonia.NewGraph(), gorgonia.Must
	matrix := randomMatrices(g, 1, 5, 1)
	in := gorgonia.Nodes{matrix("q", 2*seq, heads*headDim), matrix("k", 2*seq, heads*headDim),
		matrix("v", 2*seq, heads*headDim), matrix("weights", 1+seeds, heads*headDim/seeds),
		matrix("o", d, heads*headDim)}
	scales := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("scales"),
		gorgonia.WithShape(1+seeds),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float32{1, 2, 3, 4, 5}))))
	y := must(op.Attention(in[0], in[1], in[2], op.AttentionConfig{Seq: seq, Heads: heads,
		KVHeads: heads, HeadDim: headDim}))
	y = must(op.Kasmina(y, in[3], scales, lattice))
	y = must(gorgonia.Mul(y, must(gorgonia.Transpose(in[4], 1, 0))))
	keep := withGradients(t, y, matrix("with", 2*seq, d), in)
	var count statisticsCount
	m := newFuseMachine(t, device, g, in, keep, []MachineOption{
		WithVariants("StatisticsProduct=fused"), withStatistics(&count, "hopper", "mma")})
	require.Equal(t, 1, inPlaceTasks(m))
	require.NoError(t, m.RunAll())
	require.Zero(t, count)
}

// TestStatisticsReshaped checks that no statistics are computed by a product that has a different shape
// from the attention's result, even though the gradient is in the same memory.
func TestStatisticsReshaped(t *testing.T) {
	clearChoiceVariables(t)
	device, _ := openFake(t, fake.Config{})
	const seq, heads, headDim, d = 6, 4, 4, 40
	var values []gorgonia.Value
	for _, variant := range []string{"separate", "fused"} {
		g, must := gorgonia.NewGraph(), gorgonia.Must
		matrix := randomMatrices(g, 1, 4, 1)
		in := gorgonia.Nodes{matrix("q", 2*seq, heads*headDim), matrix("k", 2*seq, heads*headDim),
			matrix("v", 2*seq, heads*headDim), matrix("o", d, heads*headDim/2)}
		y := must(op.Attention(in[0], in[1], in[2], op.AttentionConfig{Seq: seq, Heads: heads,
			KVHeads: heads, HeadDim: headDim}))
		y = must(gorgonia.Reshape(y, tensor.Shape{4 * seq, heads * headDim / 2}))
		y = must(op.Linear(y, in[3]))
		keep := withGradients(t, y, matrix("with", 4*seq, d), in)
		var count statisticsCount
		m := newFuseMachine(t, device, g, in, keep, []MachineOption{
			WithVariants("StatisticsProduct=" + variant), withStatistics(&count, "hopper", "mma")})
		values = valuesOf(t, m, keep, values, 1e-5)
		require.Zero(t, count)
	}
}

// TestStatisticsTuned checks that the product is timed together with the statistics that follow it if it
// is worth timing, that no other product is, and that both variants give the same results in the timer's
// memory.
func TestStatisticsTuned(t *testing.T) {
	clearChoiceVariables(t)
	check := func(t *testing.T, device *Device, p attentionLayer, least float64, want int,
		opts ...MachineOption) {
		t.Helper()
		g, params, keep := p.graph(t, 1)
		requireTimed(t, device, g, params, keep, least, want, []string{"StatisticsProduct"}, opts...)
	}

	for least, want := range map[float64]int{1: 1, 1e9: 0} {
		var count statisticsCount
		device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
		check(t, device, attentionLayer{batch: 2, d: 5, attentions: 1, uses: 1,
			AttentionConfig: op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}},
			least, want, withStatistics(&count, "hopper", "mma"), WithVariants("Attention*=hopper"))
	}

	for _, headDim := range []int{64, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			device, want := openGPU(t), 0
			if device.info.Capability() == 90 {
				want = 1
			}
			check(t, device, attentionLayer{batch: 3, d: 520, attentions: 1, uses: 1,
				AttentionConfig: op.AttentionConfig{Seq: 256, Heads: 5, KVHeads: 5,
					HeadDim: headDim, Causal: true}}, 1, want, WithPrecision(BFloat16),
				WithVariants("Attention*=hopper"))
		})
	}
}
