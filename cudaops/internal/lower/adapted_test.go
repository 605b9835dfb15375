package lower_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/place"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/llm"
)

// TestTuningProgram checks the calls and the memory of programs that tune adapters on all linear layers of
// published models: every adapter is part of the products of its layer, no weight has a gradient or a
// second copy, and activations are kept only if the backward pass reads them.
func TestTuningProgram(t *testing.T) {
	for name, s := range map[string]struct {
		config llm.Config
		batch  int
		most   float64 // GiB
	}{
		"Llama-3.2-1B": {llm.Config{Vocab: 128256, Dim: 2048, Layers: 16, Heads: 32, KVHeads: 8, FF: 8192,
			Seq: 4096}, 4, 15.8},
		"Llama-3.1-8B": {llm.Config{Vocab: 128256, Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8, FF: 14336,
			Seq: 4096, Untied: true}, 2, 39.2},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.config.Default()
			targets, err := c.MatchLayers(llm.AllLinear)
			require.NoError(t, err)
			c.Adapter = llm.LoRA{Rank: 16, Alpha: 32, Targets: targets}
			g, err := llm.BuildGraph(llm.Outline(c), llm.ForTraining, s.batch)
			require.NoError(t, err)
			p := lowerFused(t, g, nil)

			calls := map[string]int{}
			for _, c := range p.Calls {
				calls[fmt.Sprintf("%T", c.Params)]++
			}
			n := c.Layers
			require.Equal(t, map[string]int{
				"*embedding.Forward":        1,
				"*norm.RMSNorm":             2*n + 1,
				"*norm.RMSNormBackward":     2 * n, // the embeddings have no gradient
				"*attention.Forward":        n,
				"*attention.Backward":       n,
				"*attention.Statistics":     n,
				"*gemm.RoPEProduct":         n,
				"*gemm.SiLUProduct":         n,
				"*gemm.SiLUProductBackward": n,
				"*gemm.ProductSum":          2*n + 3*n - 1,
				"*gemm.RowProduct":          4 * n,
				"*gemm.ColumnProduct":       4 * n,
				"*gemm.NarrowProducts":      4 * n,
				"*gemm.BlockDiagonal":       2 * 2 * n,
				"*crossentropy.Scale":       1,
				"*crossentropy.Mean":        1,
			}, without(calls, "*gemm.LinearCrossEntropy", "*gemm.ScaleRows", "*program.Matmul"))
			require.Equal(t, calls["*gemm.LinearCrossEntropy"], calls["*program.Matmul"],
				"the output layer has one product for each chunk's gradient, and none for the weight's")

			size := float64(p.Arena+p.Resident()) / (1 << 30)
			require.Less(t, size, s.most)
			require.Greater(t, size, s.most-0.5)
		})
	}
}

// TestPackedTuningProgram checks the memory of programs that tune adapters next to frozen weights of Llama-3.1-8B
// in float8 and NF4, and that products in float8 read no widened weights.
func TestPackedTuningProgram(t *testing.T) {
	matrices := map[string]*quant.Matrix{}
	for name, s := range randtest.Sample(t, 2, map[string]struct {
		format     quant.Format
		float8     bool
		batch, seq int
		opts       []llm.GraphOption
		most       float64 // GiB, without the optimizer's moments, which take 0.31
	}{
		"float8":                 {quant.Float8, true, 2, 4096, []llm.GraphOption{llm.WithRecomputedMLPs(12)}, 29},
		"NF4":                    {quant.NF4, true, 2, 4096, []llm.GraphOption{llm.WithRecomputedMLPs(28)}, 18.4},
		"NF4, bfloat16 products": {quant.NF4, false, 2, 4096, []llm.GraphOption{llm.WithRecomputedMLPs(28)}, 18.4},
		"NF4, one text":          {quant.NF4, false, 1, 2048, []llm.GraphOption{llm.WithRecompute()}, 7.6},
	}) {
		t.Run(name, func(t *testing.T) {
			c := llm.Config{Vocab: 128256, Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8, FF: 14336, Seq: s.seq,
				Untied: true}.Default()
			targets, err := c.MatchLayers(llm.AllLinear)
			require.NoError(t, err)
			c.Adapter = llm.LoRA{Rank: 16, Alpha: 32, Targets: targets}
			g, err := llm.BuildGraph(llm.Outline(c), llm.ForTraining, s.batch, s.opts...)
			require.NoError(t, err)
			p := lowerFused(t, g, func(o *lower.Options) {
				o.Float8 = s.float8
				o.Packed = func(n *gorgonia.Node) *quant.Matrix {
					if !strings.Contains(n.Name(), "_proj.weight") {
						return nil
					}
					key := fmt.Sprint(s.format, n.Shape()) // layers may share a matrix of zeros here
					if matrices[key] == nil {
						b, err := quant.NewBuilder(s.format, n.Shape()[0], n.Shape()[1])
						require.NoError(t, err)
						matrices[key] = b.Matrix()
					}
					return matrices[key]
				}
			})

			calls := map[string]int{}
			for _, c := range p.Calls {
				calls[c.Op]++
			}
			if s.float8 {
				require.Zero(t, calls["Widen"])
			}
			size := float64(p.Arena+p.Resident()) / (1 << 30)
			t.Logf("%.2f GiB: %.2f for a run, %v", size, float64(p.Arena)/(1<<30), calls)
			require.Less(t, size, s.most)
		})
	}
}

// TestEvaluationReadsCopies checks that an evaluation next to training reads the copies of adapters in the type of
// activations, although its products differ from those of training. Ranks divide the float32 values, so that no rank
// has all of them.
func TestEvaluationReadsCopies(t *testing.T) {
	c := llm.Config{Vocab: 512, Dim: 256, Layers: 2, Heads: 4, KVHeads: 2, FF: 512, Seq: 128}.Default()
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	c.Adapter = llm.LoRA{Rank: 16, Alpha: 32, Targets: targets}
	training, err := llm.BuildGraph(llm.Outline(c), llm.ForTraining, 2)
	require.NoError(t, err)
	owner := lowerFused(t, training, nil)

	for _, kind := range []llm.GraphKind{llm.ForLoss, llm.ForLogits} {
		g, err := llm.BuildGraph(llm.Outline(c), kind, 2)
		require.NoError(t, err)
		p := lowerFused(t, g, func(o *lower.Options) {
			o.Shared, o.SharedParams = owner, append(training.Learning, training.Frozen()...)
			o.Params, o.Frozen, o.Outputs = nil, nil, g.Outputs()
		})

		divided := 0
		for _, in := range p.Borrowed {
			if len(in.Copies) == 0 {
				continue
			}
			divided++
			for _, call := range p.Calls {
				require.False(t, call.Touches(in.Array.Buffer), "%s: %T reads %s", call.Op, call.Params, in.Node.Name())
			}
		}
		require.GreaterOrEqual(t, divided, 2*2*7)
	}
}

func without(calls map[string]int, names ...string) map[string]int {
	rest := map[string]int{}
	for name, n := range calls {
		rest[name] = n
	}
	for _, name := range names {
		delete(rest, name)
	}
	return rest
}

// lowerFused lowers and places a graph for a GPU of compute capability 9.0, in bfloat16 and with all fused
// kernels, without allocating memory.
func lowerFused(t *testing.T, g *llm.Graph, change func(*lower.Options)) *program.Program {
	t.Helper()
	ctx, err := fake.New(fake.Config{Images: kerneltest.Kernels}).Retain(0)
	require.NoError(t, err)
	set := kernel.New(ctx)
	x := &run.Executor{Ctx: ctx, Kernels: set, Memory: &run.Memory{Ctx: ctx}}
	t.Cleanup(func() { require.NoError(t, run.Joined(x.Memory.Close(), set.Close())) })

	rules, err := variantrule.Parse([]string{"ProductSum=hopper-256", "SiLUProduct*=fused", "RoPEProduct=fused",
		"LinearCrossEntropy=fused", "RowProduct=narrow", "ColumnProduct=narrow", "NarrowProducts=narrow"})
	require.NoError(t, err)
	warn := func(message string) { t.Error(message) }
	o := lower.Options{Device: ctx.Device(), Activation: gpu.BFloat16, Gradient: gpu.Float32,
		Frozen: g.Frozen(), Strict: true, Warn: warn, OnHost: func(string) bool { return false },
		Chooser: choose.New(x, choose.Config{Mode: choose.Off, Rules: rules, Device: ctx.Device(),
			Logger: slog.New(slog.DiscardHandler), Warn: warn})}
	o.Params, o.Outputs = append(g.Learning, g.Frozen()...), append(o.Outputs, g.Loss)
	if change != nil {
		change(&o)
	}
	p, lasting, err := lower.Lower(g.G, o)
	require.NoError(t, err)

	var kept []*program.Array
	for _, n := range lasting {
		kept = append(kept, p.Values[n])
	}
	place.Arena(p, kept)
	return p
}
