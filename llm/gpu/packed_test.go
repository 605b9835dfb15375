package gpu_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/modeltest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// TestPackedTextsOnGPU continues texts greedily with linear layers in float8 and NF4, one text alone and several
// together, so that products have 1 to 12 rows. With these sizes, some products of one row stream their weights and
// others do not. The CPU then computes the logits of each text with the rounded weights in float32. At each position, its
// logit of the GPU's token must be the largest one, except for the error of activations with 16 bits.
func TestPackedTextsOnGPU(t *testing.T) {
	device := open(t)
	base, err := llm.NewModel(llm.Config{Vocab: 101, Dim: 256, Layers: 3, Heads: 8, KVHeads: 2, FF: 320, Seq: 600}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	for _, p := range base.Params { // large weights, so that rounding them changes tokens
		if len(p.Value.Shape()) == 2 {
			for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
				x[i] *= 5
			}
		}
	}

	for _, typ := range []cpuops.WeightType{cpuops.Float8, cpuops.NF4} {
		for _, precision := range []cudaops.Precision{cudaops.BFloat16, cudaops.Float16} {
			t.Run(fmt.Sprint(typ, precision), func(t *testing.T) {
				packed, err := llm.PackLayers(t.Context(), typ, base.Config, modeltest.Weights{Model: base})
				require.NoError(t, err)
				rounded, err := llm.NewModelFrom(base.Config, tensor.Float32, func(p llm.Param) error {
					_, rows, _, ok := packed.Matrix(p.Name)
					if !ok {
						copy(p.Value.Float32s(), base.Param(p.Name).Float32s())
						return nil
					}
					return packed.Rows(p.Name, p.Value.Float32s(), 0, rows)
				})
				require.NoError(t, err)
				loaded, err := gpu.Load(t.Context(), device, precision, base.Config, modeltest.Weights{Model: base},
					cudaops.WithWeights(packed))
				require.NoError(t, err)

				prompt := func(i int) []int { return []int{3, i, 5, 7*i + 1} }
				greedy := func(g *llm.Generator, i, n int) ([]int, error) {
					s, err := sampler.New(sampler.Config{Vocab: base.Config.Vocab})
					if err != nil {
						return nil, err
					}
					text := prompt(i)
					for id, err := range g.Generate(t.Context(), prompt(i), n, s) {
						if err != nil {
							return nil, err
						}
						text = append(text, id)
					}
					return text, nil
				}
				alone, err := greedy(llm.GeneratorOf(base.Config, loaded.Decoder), 0, 512)
				require.NoError(t, err)
				b, err := gpu.NewBatcher(device, precision, base.Config, loaded, llm.BatcherOptions{Texts: 12, Rows: 48,
					Tokens: 12 * 192})
				require.NoError(t, err)
				texts := make([][]int, 12)
				var running sync.WaitGroup
				for i := range texts {
					running.Go(func() {
						var err error
						texts[i], err = greedy(b.Generator(), i, 20+10*i)
						assert.NoError(t, err)
					})
				}
				running.Wait()
				require.NoError(t, b.Close())

				onCPU := &llm.Inference{Model: rounded}
				defer onCPU.Close()
				for i, text := range append(texts, alone) {
					next, err := onCPU.Decoder()
					require.NoError(t, err)
					start := len(prompt(i % len(texts)))
					differ := 0
					for n := start; n < len(text); n++ {
						values, err := next(t.Context(), text[:n])
						require.NoError(t, err)
						logits := values.([]float32)
						best := slices.Max(logits)
						gap := (best - logits[text[n]]) / (best - slices.Min(logits))
						require.Less(t, gap, float32(0.05), "text %d, token %d", i, n)
						if gap > 0 {
							differ++
						}
					}
					require.LessOrEqual(t, differ, 3+(len(text)-start)/20, "text %d", i)
				}
			})
		}
	}
}
