package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// seenStatistics counts the products that form statistics, and the backward passes that begin with them. Variants of these may take the place
// of the kernels' own.
type seenStatistics struct {
	kernelSet
	variants         []kernels.AttentionVariant
	products, begins *int
}

func (k seenStatistics) AttentionVariants(a kernels.AttentionShape, t driver.DType, rows ...kernels.Rows) []kernels.AttentionVariant {
	if k.variants != nil {
		return slices.Clone(k.variants)
	}
	return k.kernelSet.AttentionVariants(a, t, rows...)
}

func (k seenStatistics) AttentionBackwardVariant(a kernels.AttentionShape, t driver.DType, rows ...kernels.Rows) (kernels.AttentionVariant, error) {
	if k.variants != nil {
		return k.variants[0], nil
	}
	return k.kernelSet.AttentionBackwardVariant(a, t, rows...)
}

func (k seenStatistics) AttentionGradProduct(s driver.Stream, a kernels.AttentionGradProduct) error {
	*k.products++
	return k.kernelSet.AttentionGradProduct(s, a)
}

func (k seenStatistics) AttentionBackward(s driver.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats driver.Ptr, g, q, key, v,
	y kernels.Rows, lse driver.Ptr, t driver.DType) error {
	if a.HasStatistics && a.Fused() {
		*k.begins++
	}
	return k.kernelSet.AttentionBackward(s, a, dq, dk, dv, stats, g, q, key, v, y, lse, t)
}

func (k seenStatistics) option(c *machineConfig) error {
	inner := c.kernels
	c.kernels = func(ctx driver.Context) (_ kernelSet, err error) {
		k := k
		k.kernelSet, err = inner(ctx)
		return k, err
	}
	return nil
}

// attentionLayer is a layer of attention, projections on both sides.
type attentionLayer struct {
	batch, d int
	op.AttentionConfig
	documents, recomputed bool
	attentions, uses      int // that are added up, and then linear layers of the sum
}

// graph returns such a layer of random numbers with its gradients.
func (p attentionLayer) graph(t *testing.T, seed uint64) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 4, 1.0/8)
	rows, wide, narrow := p.batch*p.Seq, p.Heads*p.HeadDim, p.KVHeads*p.HeadDim
	in := gorgonia.Nodes{matrix("x", rows, p.d), matrix("q", wide, p.d), matrix("k", narrow, p.d), matrix("v", narrow, p.d)}
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
		of = append(of[:len(of):len(of)], gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithName("starts"), gorgonia.WithShape(rows),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(starts)))))
	}
	layer := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		must := gorgonia.Must
		q, k, v := must(op.Linear(in[0], in[1])), must(op.Linear(in[0], in[2])), must(op.Linear(in[0], in[3]))
		q = must(op.RoPE(q, op.RoPEConfig{Seq: p.Seq, Heads: p.Heads, HeadDim: p.HeadDim}))
		k = must(op.RoPE(k, op.RoPEConfig{Seq: p.Seq, Heads: p.KVHeads, HeadDim: p.HeadDim}))
		add := func(a, b *gorgonia.Node) *gorgonia.Node {
			if a == nil {
				return b
			}
			return must(gorgonia.Add(a, b))
		}
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
	if err != nil {
		t.Fatal(err)
	}
	return g, in[1:], withGradients(t, y, matrix("with", rows, p.d), in)
}

// TestStatisticsWays wants the same values, whether the product that an attention's gradient comes of forms what its backward pass begins
// with or not, and it to do so where it can.
func TestStatisticsWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	type variants = []kernels.AttentionVariant
	check := func(t *testing.T, device *Device, p attentionLayer, v variants, tolerance float64, want int, opts ...MachineOption) {
		t.Helper()
		var values []gorgonia.Value
		for i, rule := range []string{"StatisticsProduct=separate", "StatisticsProduct=fused"} {
			var products, begins int
			g, params, keep := p.graph(t, seed)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays(rule),
				seenStatistics{variants: v, products: &products, begins: &begins}.option))
			values = valuesOf(t, m, keep, values, tolerance)
			if want := i * want; products != want || begins != want {
				t.Errorf("%+v, %v, %s: %d products, %d times made use of, want %d", p, v, rule, products, begins, want)
			}
			for range 2 { // recorded
				valuesOf(t, m, keep, values, tolerance)
			}
		}
	}
	small := attentionLayer{batch: 2, d: 40, attentions: 1, uses: 1,
		AttentionConfig: op.AttentionConfig{Seq: 6, Heads: 4, KVHeads: 2, HeadDim: 4, Causal: true}}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		for _, recomputed := range []bool{false, true} {
			p := small
			p.recomputed = recomputed
			check(t, device, p, nil, 1e-5, 1, fakeOption)
			check(t, device, p, variants{kernels.AttentionMMA}, 1e-5, 0, fakeOption)
			p.documents = true
			check(t, device, p, nil, 1e-5, 1, fakeOption)
			p.uses = 2 // the gradient is a sum
			check(t, device, p, nil, 1e-5, 0, fakeOption)
			p.attentions, p.uses = 2, 1 // and here that of two
			check(t, device, p, nil, 1e-5, 1, fakeOption)
		}
	})
	for _, headDim := range []int{64, 96, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			device := openGPU(t)
			hopper := device.info.Capability() == 90
			for i, seq := range []int{128, 384, 192} {
				p := attentionLayer{batch: 3, d: 520, attentions: 1, uses: 1, documents: i == 1, recomputed: i == 1,
					AttentionConfig: op.AttentionConfig{Seq: seq, Heads: 5, KVHeads: 5, HeadDim: headDim, Causal: true}}
				all := []variants{nil}
				if hopper && headDim == 64 {
					all = append(all, variants{kernels.AttentionHopperFused})
				}
				for _, v := range all {
					want := 0
					if hopper && seq%128 == 0 && (headDim == 128 || v != nil) {
						want = 1
					}
					check(t, device, p, v, 2e-2, want, WithPrecision(BFloat16), WithTuning(TuneOff))
				}
			}
		})
	}
}

// TestStatisticsInPlace wants no statistics of a product whose place a Kasmina layer's backward pass has taken: it is the gradient of the
// layer's result, not of the attention's.
func TestStatisticsInPlace(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	const seq, heads, headDim, seeds, d = 6, 4, 4, 4, 40
	var values []gorgonia.Value
	for _, rule := range []string{"StatisticsProduct=separate", "StatisticsProduct=fused"} {
		lattice, err := state.NewLattice(seeds, heads*headDim, state.WithoutGates())
		for s := range seeds {
			err = errors.Join(err, lattice.RequestGermination(s, state.GerminationRequest{Slot: 1 + s, Kind: blueprints.AttentionGate}),
				lattice.Transition(s, state.Training), lattice.Transition(s, state.Grafting), lattice.SetAlpha(s, 0.5))
		}
		if err != nil {
			t.Fatal(err)
		}
		g, must := gorgonia.NewGraph(), gorgonia.Must
		matrix := randomMatrices(g, 1, 5, 1)
		in := gorgonia.Nodes{matrix("q", 2*seq, heads*headDim), matrix("k", 2*seq, heads*headDim), matrix("v", 2*seq, heads*headDim),
			matrix("weights", 1+seeds, heads*headDim/seeds), matrix("o", d, heads*headDim)}
		scales := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("scales"), gorgonia.WithShape(1+seeds),
			gorgonia.WithValue(tensor.New(tensor.WithBacking([]float32{1, 2, 3, 4, 5}))))
		y := must(op.Attention(in[0], in[1], in[2], op.AttentionConfig{Seq: seq, Heads: heads, KVHeads: heads, HeadDim: headDim}))
		y = must(op.Kasmina(y, in[3], scales, lattice))
		y = must(gorgonia.Mul(y, must(gorgonia.Transpose(in[4], 1, 0))))
		keep := withGradients(t, y, matrix("with", 2*seq, d), in)
		var products, begins int
		m := newFuseMachine(t, device, g, in, keep, []MachineOption{fakeOption, WithWays(rule),
			seenStatistics{products: &products, begins: &begins}.option})
		if n := inPlaceTasks(m); n != 1 {
			t.Errorf("%s: %d tasks are in place, want 1", rule, n)
		}
		values = valuesOf(t, m, keep, values, 1e-5)
		if products != 0 || begins != 0 {
			t.Errorf("%s: %d products, %d times made use of, want none", rule, products, begins)
		}
	}
}

// TestStatisticsChoices wants the way of an attention's backward pass told by the pass alone, although the product asks for it too.
func TestStatisticsChoices(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	p := attentionLayer{batch: 2, d: 5, attentions: 1, uses: 1, AttentionConfig: op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}
	g, params, keep := p.graph(t, 1)
	var products, begins int
	m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, WithWays("StatisticsProduct=fused"),
		seenStatistics{variants: []kernels.AttentionVariant{kernels.AttentionHopperFused, kernels.AttentionMMA},
			products: &products, begins: &begins}.option})
	if err := m.RunAll(); err != nil || products != 1 {
		t.Fatalf("%d products: %v", products, err)
	}
	told := 0
	for _, task := range m.program.tasks {
		m.tuner.used = nil
		if err := task.run(); err != nil {
			t.Fatal(err)
		}
		for _, c := range m.tuner.used {
			if m.tuner.made[c].Op == "AttentionBackward" {
				if told++; !isOp[*op.AttentionGradOp](task.node) {
					t.Errorf("%v tells it", task.node.Op())
				}
			}
		}
	}
	if told != 1 {
		t.Errorf("it is told %d times", told)
	}
}

// TestStatisticsTuned wants the product timed with the statistics behind it where it is worth timing, and no other, and both ways to give
// the same in the timer's memory as well. Rules about an attention's passes are none about it.
func TestStatisticsTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, p attentionLayer, least float64, want int, opts ...MachineOption) {
		t.Helper()
		var log bytes.Buffer
		g, params, keep := p.graph(t, 1)
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, append(opts, private, WithTuning(TuneCached),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "StatisticsProduct" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if timed != want || bytes.Contains(log.Bytes(), []byte("StatisticsProduct")) {
			t.Errorf("least %g: %d timed, want %d; log %q", least, timed, want, log.String())
		}
	}
	for least, want := range map[float64]int{1: 1, 1e9: 0} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		p := attentionLayer{batch: 2, d: 5, attentions: 1, uses: 1, AttentionConfig: op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}
		check(t, device, p, least, want, fakeOption, WithWays("Attention*=mma"))
	}
	for _, headDim := range []int{64, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			device, want := openGPU(t), 0
			if device.info.Capability() == 90 {
				want = 1
			}
			p := attentionLayer{batch: 3, d: 520, attentions: 1, uses: 1,
				AttentionConfig: op.AttentionConfig{Seq: 256, Heads: 5, KVHeads: 5, HeadDim: headDim, Causal: true}}
			check(t, device, p, 1, want, WithPrecision(BFloat16))
		})
	}
}
