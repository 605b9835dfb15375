package cudaops_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/modeltest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/runtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// tuning describes a model and the parameters to tune.
type tuning struct {
	adapter   llm.LoRA
	tuned     []string
	seeds     blueprints.Kind // kind of the new seeds after all blocks, if tuned names seeds
	traits    llm.Traits
	recompute bool
	mlps      int               // blocks whose MLPs are recomputed
	base      cpuops.WeightType // if it is not Float32, the model is loaded with LoadFrozen
}

// model returns a model with random weights to tune. It has the adapter unless that is zero.
func (s tuning) model(t *testing.T, c llm.Config) *llm.Model {
	t.Helper()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	if s.base != cpuops.Float32 {
		m, err = llm.LoadFrozen(t.Context(), s.base, c, modeltest.Weights{Model: m}, s.tuned...)
		require.NoError(t, err)
	}
	if slices.Equal(s.tuned, llm.SeedPatterns()) {
		m, err = llm.TuneSeeds(m, s.seeds, 4)
		require.NoError(t, err)
	}
	if !s.adapter.IsZero() {
		m, err = llm.Adapt(m, s.adapter, 3)
		require.NoError(t, err)
	}
	return m
}

// tuneMasked trains on sequences with different numbers of learned tokens, and returns the losses of the
// steps. If newEngine is nil, it trains on the CPU. The model gets the adapter unless that is zero.
func tuneMasked(t *testing.T, batch, accumulate int, s tuning, newEngine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (losses []float64) {
	t.Helper()
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12, Documents: true,
		Traits: s.traits}.Default()
	m := s.model(t, c)

	l, err := chatdata.NewLoader(shortSequences(), data.LoaderConfig{Batch: batch, Seq: c.Seq, Seed: 3})
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	require.NoError(t, err)
	tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 6, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(0.01), Clip: 1, Engine: newEngine, Tuned: s.tuned,
		Recompute: s.recompute, RecomputeMLPs: s.mlps})
	require.NoError(t, err)
	defer tr.Close()

	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			losses = append(losses, e.Loss)
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	return losses
}

// shortSequences returns sequences with different numbers of learned tokens.
func shortSequences() (all []chatdata.Sequence) {
	for i := range 20 {
		s := chatdata.Sequence{Line: i + 1}
		for j := range 4 + i%7 {
			s.IDs, s.Learn = append(s.IDs, (7*i+3*j)%64), append(s.Learn, j > i%3)
		}
		all = append(all, s)
	}
	return all
}

// TestMaskedStepsOnFake checks that a device has the losses of the CPU on batches with different
// numbers of targets.
func TestMaskedStepsOnFake(t *testing.T) {
	want := tuneMasked(t, 4, 1, tuning{}, nil)
	for _, batch := range []int{4, 2, 1} {
		got := tuneMasked(t, batch, 4/batch, tuning{},
			engine.Engine(cudaops.OpenFake(t), cudaops.Float32))
		require.InDeltaSlice(t, want, got, 1e-5, "batches of %d", batch)
	}
}

// TestTuningOnFake checks that a device has the losses of the CPU when it tunes adapters or chosen
// parameters, with fused products and with separate ones.
func TestTuningOnFake(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12}.Default()
	all, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	some, err := c.MatchLayers("v_proj", "up_proj")
	require.NoError(t, err)
	last, err := c.LastBlocks(1)
	require.NoError(t, err)
	few, err := c.MatchLayers("q_proj", "v_proj", "gate_proj", "down_proj")
	require.NoError(t, err)
	plain := llm.Traits{PlainMLP: true, GELU: true}
	c.Traits = plain
	ungated, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	lora := llm.LoRA{Rank: 4, Alpha: 8, Targets: all}
	different := lora
	different.Alphas = map[string]float64{"model.layers.0.self_attn.k_proj": 3, "model.layers.1.mlp.up_proj": 5}
	different.Ranks = map[string]int{"model.layers.1.self_attn.q_proj": 3}
	for name, s := range randtest.Sample(t, 7, map[string]tuning{
		"recomputed":      {adapter: lora, recompute: true},
		"recomputed MLPs": {adapter: lora, mlps: 2},
		"recomputed MLPs of one block, biases, dropout": {adapter: llm.LoRA{Rank: 4, Alpha: 8, Dropout: 0.2, Targets: all}, mlps: 1,
			traits: llm.Traits{QKVBias: true}},
		"recomputed MLPs, post norms": {adapter: lora, mlps: 2, traits: llm.Traits{PostNorms: true, GELU: true}},
		"some layers":                 {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: few}},
		"different scales":            {adapter: different},
		"biases":                      {adapter: lora, traits: llm.Traits{QKVBias: true}},
		"norms of heads":              {adapter: lora, traits: llm.Traits{QKNorm: true}},
		"GELU":                        {adapter: lora, traits: llm.Traits{GELU: true, NormPlusOne: true}},
		"an ungated MLP":              {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: ungated}, traits: plain},
		"DoRA, recomputed":            {adapter: llm.LoRA{Rank: 4, Alpha: 4, Magnitude: true, Targets: all}, recompute: true},
		"LoRA":                        {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: all}},
		"rsLoRA":                      {adapter: llm.LoRA{Rank: 4, Alpha: 8, RankStabilized: true, Targets: all}},
		"DoRA":                        {adapter: llm.LoRA{Rank: 4, Alpha: 4, Magnitude: true, Targets: all}},
		"dropout":                     {adapter: llm.LoRA{Rank: 4, Alpha: 8, Dropout: 0.2, Targets: all}},
		"DoRA with dropout on some layers": {adapter: llm.LoRA{Rank: 4, Alpha: 8, Magnitude: true,
			Dropout: 0.2, Targets: some}},
		"NF4": {adapter: lora, base: cpuops.NF4},
		"NF4, recomputed, DoRA": {adapter: llm.LoRA{Rank: 4, Alpha: 4, Magnitude: true, Targets: all}, recompute: true,
			base: cpuops.NF4},
		"float8":                    {adapter: lora, base: cpuops.Float8},
		"float8 with dropout":       {adapter: llm.LoRA{Rank: 4, Alpha: 8, Dropout: 0.2, Targets: all}, base: cpuops.Float8},
		"NF4 on some layers":        {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: few}, base: cpuops.NF4},
		"NF4, different scales":     {adapter: different, base: cpuops.NF4},
		"NF4, an ungated MLP":       {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: ungated}, traits: plain, base: cpuops.NF4},
		"bfloat16":                  {adapter: lora, base: cpuops.BFloat16},
		"NF4, the last block":       {tuned: last, base: cpuops.NF4},
		"the last block":            {tuned: last},
		"seeds":                     {tuned: llm.SeedPatterns(), seeds: blueprints.LowRank},
		"seeds, recomputed":         {tuned: llm.SeedPatterns(), seeds: blueprints.ChunkMLP, recompute: true},
		"values and the embeddings": {tuned: []string{"*.v_proj.weight", "model.embed_tokens.weight"}},
	}, "LoRA", "NF4") {
		t.Run(name, func(t *testing.T) {
			want := tuneMasked(t, 2, 2, s, nil)
			for _, rule := range []string{"separate", "fused"} {
				got := tuneMasked(t, 2, 2, s,
					engine.Engine(cudaops.OpenFake(t), cudaops.Float32, cudaops.WithVariants(
						"ProductSum="+rule, "SiLUProduct*="+rule, "RoPEProduct="+rule,
						"RowProduct="+rule, "ColumnProduct="+rule, "NarrowProducts="+rule)))
				require.InDeltaSlice(t, want, got, 1e-5, rule)
			}
			require.Less(t, want[5], want[0])
		})
	}
}

// TestTuningRanksOnFake checks that several ranks tune adapters as a single rank does, bit for bit, and that they can
// evaluate, generate text and save checkpoints meanwhile. Evaluations and generation read each adapter by itself, and
// training in float32 stacks adapters in copies, so that ranks divide the adapters themselves. The checkpoint of a
// process without a team differs only in the name of its engine.
func TestTuningRanksOnFake(t *testing.T) {
	c := llm.Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12, Documents: true, Untied: true}.Default()
	all, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	whole, err := c.MatchLayers(llm.AllLinear, "embed_tokens", "lm_head")
	require.NoError(t, err)
	lora := llm.LoRA{Rank: 4, Alpha: 8, Targets: all}
	for name, s := range randtest.Sample(t, 2, map[string]tuning{
		"LoRA":                   {adapter: lora},
		"DoRA, dropout":          {adapter: llm.LoRA{Rank: 4, Alpha: 8, Magnitude: true, Dropout: 0.2, Targets: all}},
		"embedding and output":   {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: whole}},
		"biases, norms of heads": {adapter: lora, traits: llm.Traits{QKVBias: true, QKNorm: true}},
		"NF4, recomputed":        {adapter: lora, base: cpuops.NF4, recompute: true},
		"float8":                 {adapter: lora, base: cpuops.Float8, mlps: 1},
		"seeds":                  {tuned: llm.SeedPatterns(), seeds: blueprints.LowRank},
		"all weights":            {traits: llm.Traits{QKVBias: true}},
	}, "LoRA") {
		t.Run(name, func(t *testing.T) {
			tune := func(ranks int) (metadata map[string]string, tensors []byte) {
				path := filepath.Join(t.TempDir(), "run.safetensors")
				models := make([]*llm.Model, max(1, ranks))
				for i := range models {
					models[i] = s.model(t, c)
				}

				if ranks == 0 {
					build := engine.Engine(cudaops.OpenFake(t), cudaops.Float32)
					require.NoError(t, s.tuneAndWatch(t.Context(), models[0], build, path))
				} else {
					require.NoError(t, errors.Join(fakeRanks(t, ranks, nil, func(rank int, build runtest.Build) error {
						return s.tuneAndWatch(t.Context(), models[rank], build, path)
					})...))
				}
				return readCheckpoint(t, path)
			}

			metadata, tensors := tune(1)
			metadata2, tensors2 := tune(2)
			require.Equal(t, metadata, metadata2)
			require.True(t, bytes.Equal(tensors, tensors2), "two ranks")

			alone, tensorsAlone := tune(0)
			const key = "kasmina.training"
			require.Contains(t, metadata[key], `"engine":"cuda f32, ranks"`)
			metadata[key] = strings.Replace(metadata[key], `"cuda f32, ranks"`, `"cuda f32"`, 1)
			require.Equal(t, metadata, alone)
			require.True(t, bytes.Equal(tensors, tensorsAlone), "no team")
		})
	}
}

// readCheckpoint returns the metadata of a checkpoint and the bytes of its tensors.
func readCheckpoint(t *testing.T, path string) (metadata map[string]string, tensors []byte) {
	t.Helper()
	f, err := safetensors.Open(path)
	require.NoError(t, err)
	metadata = f.Metadata()
	require.NoError(t, f.Close())

	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	return metadata, whole[8+binary.LittleEndian.Uint64(whole):]
}

// tuneAndWatch makes six steps with checkpoints at path, evaluations, and generated text.
func (s tuning) tuneAndWatch(ctx context.Context, m *llm.Model, build runtest.Build, path string) (err error) {
	l, err := chatdata.NewLoader(shortSequences(), data.LoaderConfig{Batch: 1, Seq: m.Config.Seq, Seed: 3})
	if err != nil {
		return err
	}
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	if err != nil {
		return err
	}
	tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 6, Batch: 1, Accumulate: 3, Clip: 1, Engine: build,
		Schedule: optim.Constant(0.01), Tuned: s.tuned, Recompute: s.recompute, RecomputeMLPs: s.mlps})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()

	held, err := data.NewEvaluation(bytes.Repeat([]byte("!&),.3"), 20), tokenizer.Bytes{}, 1, m.Config.Seq)
	if err != nil {
		return err
	}
	tr.On(llm.Evaluate(tr, held, 2))
	tr.On(llm.SampleText(tr, tokenizer.Bytes{}, "!", 3, sampler.Config{}, "", 2))
	tr.On(llm.Checkpoint(tr, path, 3))
	return tr.Run(ctx)
}

// TestPackedFloat8OnFake compares losses with products in float8 that read packed weights directly with those whose
// base holds the same numbers as float32. Before the first update, the operands of all forward products are equal for
// float8. For NF4, rows that share a block of weights may have larger scales.
func TestPackedFloat8OnFake(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, FF: 96, Seq: 64}.Default()
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	some, err := c.MatchLayers("q_proj", "down_proj")
	require.NoError(t, err)
	tokens := make([]int, 2*c.Seq)
	for i := range tokens {
		tokens[i] = i * i / 3 % 64
	}

	for name, s := range randtest.Sample(t, 2, map[string]struct {
		base cpuops.WeightType
		lora llm.LoRA
		mlps int
		near float64 // tolerance of the first loss
	}{
		"float8":                  {cpuops.Float8, llm.LoRA{Rank: 4, Alpha: 8, Targets: targets}, 0, 1e-6},
		"NF4":                     {cpuops.NF4, llm.LoRA{Rank: 4, Alpha: 8, Targets: targets}, 0, 1e-4},
		"float8, recomputed MLPs": {cpuops.Float8, llm.LoRA{Rank: 4, Alpha: 8, Targets: targets}, 1, 1e-6},
		"NF4, some layers":        {cpuops.NF4, llm.LoRA{Rank: 4, Alpha: 8, Targets: some}, 2, 1e-4},
		"float8, DoRA":            {cpuops.Float8, llm.LoRA{Rank: 4, Alpha: 8, Magnitude: true, Targets: targets}, 0, 1e-6},
	}, "NF4") {
		t.Run(name, func(t *testing.T) {
			m, err := llm.NewModel(c, tensor.Float32, 7)
			require.NoError(t, err)
			frozen, err := llm.LoadFrozen(t.Context(), s.base, c, modeltest.Weights{Model: m})
			require.NoError(t, err)
			for _, name := range frozen.Base.Names() {
				_, rows, width, _ := frozen.Base.Matrix(name)
				values := make([]float32, rows*width)
				require.NoError(t, frozen.Base.Rows(name, values, 0, rows))
				copy(m.Param(name).Data().([]float32), values)
			}

			losses := func(m *llm.Model, opts ...cudaops.MachineOption) (all []float64) {
				adapted, err := llm.Adapt(m, s.lora, 3)
				require.NoError(t, err)
				o, err := optim.NewAdamW(optim.WithLR(0.01))
				require.NoError(t, err)
				g, err := llm.TrainConfig{Batch: 2, Accumulate: 1, RecomputeMLPs: s.mlps}.Graph(adapted)
				require.NoError(t, err)
				opts = append(opts, cudaops.WithParams(g.Learning...), cudaops.WithOutputs(g.Loss))
				if g.Base != nil {
					opts = append(opts, cudaops.WithWeights(g.Base))
				}
				machine, err := cudaops.NewMachine(cudaops.OpenFake(t), g.G, append(opts,
					cudaops.WithFrozen(floats(g), slices.DeleteFunc(g.Frozen(), func(n *gorgonia.Node) bool {
						typ, _, _, _ := g.Base.Matrix(n.Name())
						return typ == s.base
					})...))...)
				require.NoError(t, err)
				defer func() { require.NoError(t, machine.Close()) }()
				require.NoError(t, machine.SetOptimizer(o, 0))
				batch := data.Batch{Inputs: tokens, Targets: append(tokens[1:len(tokens):len(tokens)], 5), Count: len(tokens)}
				for range 6 {
					require.NoError(t, g.Let(batch))
					require.NoError(t, machine.RunAll())
					loss, _, err := machine.Step(g.Loss)
					require.NoError(t, err)
					all = append(all, loss)
				}
				return all
			}

			exactly, want := losses(m), losses(m, cudaops.Float8Products())
			got := losses(frozen, cudaops.Float8Products())
			require.InDelta(t, want[0], got[0], s.near)
			require.NotEqual(t, exactly[0], got[0])
			require.InDeltaSlice(t, exactly, got, 0.05)
			require.Less(t, got[5], got[0]-0.05)
		})
	}
}

// TestFloat8AdapterGradients checks that the gradients of adapters whose matrices are not zero differ little between
// products in float8 and in float32.
func TestFloat8AdapterGradients(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, FF: 96, Seq: 64}.Default()
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	m, err = llm.Adapt(m, llm.LoRA{Rank: 16, Alpha: 32, Targets: targets}, 3)
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 2))
	for _, p := range m.Params {
		if strings.HasSuffix(p.Name, "lora_B.weight") {
			for i := range p.Value.Data().([]float32) {
				p.Value.Data().([]float32)[i] = float32(0.05 * r.NormFloat64())
			}
		}
	}

	tokens := make([]int, 2*c.Seq)
	for i := range tokens {
		tokens[i] = r.IntN(c.Vocab)
	}
	gradients := func(opts ...cudaops.MachineOption) map[string][]float32 {
		g, err := m.Graph(llm.ForTraining, 2)
		require.NoError(t, err)
		outputs := gorgonia.Nodes{g.Loss}
		for _, p := range g.Learning {
			outputs = append(outputs, p.Deriv())
		}
		machine, err := cudaops.NewMachine(cudaops.OpenFake(t), g.G, append(opts, cudaops.WithParams(g.Learning...),
			cudaops.WithFrozen(nil, g.Frozen()...), cudaops.WithOutputs(outputs...))...)
		require.NoError(t, err)
		defer func() { require.NoError(t, machine.Close()) }()
		require.NoError(t, g.Let(data.Batch{Inputs: tokens, Targets: append(tokens[1:len(tokens):len(tokens)], 5),
			Count: len(tokens)}))
		require.NoError(t, machine.RunAll())
		all := map[string][]float32{}
		for _, p := range g.Learning {
			v, err := machine.Value(p.Deriv())
			require.NoError(t, err)
			all[p.Name()] = slices.Clone(v.Data().([]float32))
		}
		return all
	}

	got := gradients(cudaops.Float8Products())
	for name, want := range gradients() {
		difference, size := 0.0, 0.0
		for i, v := range want {
			difference += math.Pow(float64(v-got[name][i]), 2)
			size += math.Pow(float64(v), 2)
		}
		require.NotZero(t, size, name)
		require.Less(t, math.Sqrt(difference/size), 0.15, name)
		require.NotZero(t, difference, name)
	}
}

// floats returns a function for WithFrozen that reads the parameters of a graph as float32.
func floats(g *llm.Graph) func(*gorgonia.Node, func([]byte, cudaops.Precision) error) error {
	return func(n *gorgonia.Node, put func([]byte, cudaops.Precision) error) error {
		_, rows, width, ok := g.Base.Matrix(n.Name())
		if !ok {
			return put(safetensors.Memory(n.Value().Data().([]float32)), cudaops.Float32)
		}
		values := make([]float32, rows*width)
		if err := g.Base.Rows(n.Name(), values, 0, rows); err != nil {
			return err
		}
		return put(safetensors.Memory(values), cudaops.Float32)
	}
}

// TestPackedWeightsOnFake checks that a device holds frozen weights in fewer bytes, and that a machine for
// evaluation shares them and has the losses of the CPU.
func TestPackedWeightsOnFake(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 64, Layers: 2, Heads: 2, KVHeads: 1, FF: 512, Seq: 12}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	tokens := make([]int, 12)
	for i := range tokens {
		tokens[i] = 7 * i % 64
	}
	batch := data.Batch{Inputs: tokens, Targets: append(tokens[1:len(tokens):len(tokens)], 5), Count: len(tokens)}

	held := map[cpuops.WeightType]uint64{}
	for _, typ := range []cpuops.WeightType{cpuops.BFloat16, cpuops.Float8, cpuops.NF4} {
		frozen, err := llm.LoadFrozen(t.Context(), typ, c, modeltest.Weights{Model: m})
		require.NoError(t, err)
		adapted, err := llm.Adapt(frozen, llm.LoRA{Rank: 2, Alpha: 4, Targets: targets}, 3)
		require.NoError(t, err)
		o, err := optim.NewAdamW(optim.WithLR(0.01))
		require.NoError(t, err)
		device := cudaops.OpenFake(t)
		free, _, err := device.Memory()
		require.NoError(t, err)
		config := llm.TrainConfig{Steps: 1, Batch: 1, Accumulate: 1, Schedule: optim.Constant(0.01)}
		e, err := engine.Engine(device, cudaops.Float32)(adapted, o, config)
		require.NoError(t, err)
		now, _, err := device.Memory()
		require.NoError(t, err)
		const workspace = 32 << 20 // of matrix products
		held[typ] = free - now - workspace

		got, err := e.Loss(batch)
		require.NoError(t, err)
		after, _, err := device.Memory()
		require.NoError(t, err)
		require.Less(t, now-after, uint64(1<<15), "the machine for evaluation has its own weights or runs")
		want, err := (&llm.Inference{Model: adapted}).Loss(batch)
		require.NoError(t, err)
		require.InDelta(t, want, got, 1e-5)
		require.NoError(t, e.Close())
	}
	require.Less(t, held[cpuops.NF4], held[cpuops.Float8])
	require.Less(t, held[cpuops.Float8], held[cpuops.BFloat16])
}

// TestSharedRuns checks that a machine that evaluates a model in the memory of the training machine's runs has the
// same loss as one with its own memory, does not change the training, and takes no values for those of the other
// machine.
func TestSharedRuns(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 32, Layers: 2, Heads: 2, KVHeads: 1, Seq: 24}.Default()
	tokens := make([]int, 24)
	for i := range tokens {
		tokens[i] = 7 * i % 64
	}
	batch := data.Batch{Inputs: tokens, Targets: append(tokens[1:len(tokens):len(tokens)], 5), Count: len(tokens)}
	train := func(device *cudaops.Device, opts ...cudaops.MachineOption) (losses []float64) {
		m, err := llm.NewModel(c, tensor.Float32, 7)
		require.NoError(t, err)
		g, err := m.Graph(llm.ForTraining, 1)
		require.NoError(t, err)
		e, err := m.Graph(llm.ForLoss, 1)
		require.NoError(t, err)
		trains, err := cudaops.NewMachine(device, g.G, cudaops.WithParams(g.Params...), cudaops.WithOutputs(g.Loss))
		require.NoError(t, err)
		defer func() { require.NoError(t, trains.Close()) }()
		o, err := optim.NewAdamW(optim.WithLR(0.01))
		require.NoError(t, err)
		require.NoError(t, trains.SetOptimizer(o, 1))
		evaluates, err := cudaops.NewMachine(device, e.G, append(opts, cudaops.WithParamsOf(trains),
			cudaops.WithOutputs(e.Loss))...)
		require.NoError(t, err)
		defer func() { require.NoError(t, evaluates.Close()) }()
		value := func(m *cudaops.Machine, n *gorgonia.Node) float64 {
			v, err := m.Value(n)
			require.NoError(t, err)
			return float64(v.Data().(float32))
		}

		for range 3 {
			require.NoError(t, g.Let(batch))
			require.NoError(t, trains.RunAll())
			if len(losses) > 0 && len(opts) > 0 {
				_, err = evaluates.Value(e.Loss)
				require.ErrorContains(t, err, "another machine has run in the same memory")
			}
			losses = append(losses, value(trains, g.Loss))
			_, err := trains.Update()
			require.NoError(t, err)
			require.NoError(t, e.Let(batch))
			require.NoError(t, evaluates.RunAll())
			losses = append(losses, value(evaluates, e.Loss))
			if len(opts) > 0 {
				_, err = trains.Value(g.Loss)
				require.ErrorContains(t, err, "another machine has run in the same memory")
				_, err = trains.Update()
				require.ErrorContains(t, err, "another machine has run in the same memory")
			}
		}
		return losses
	}

	device := cudaops.OpenFake(t)
	require.Equal(t, train(device), train(device, cudaops.WithSharedRuns()))
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	g, err := m.Graph(llm.ForLoss, 1)
	require.NoError(t, err)
	_, err = cudaops.NewMachine(device, g.G, cudaops.WithSharedRuns())
	require.ErrorContains(t, err, "WithSharedRuns requires WithParamsOf")
}

// TestMemoryPlanOnFake compares the memory that a machine plans with the memory that the driver has given it after
// training steps and evaluations, in different configurations. Both leave out the workspace.
func TestMemoryPlanOnFake(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 32, Layers: 2, Heads: 2, KVHeads: 1, FF: 256, Seq: 48, Documents: true}.Default()
	targets, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	last, err := c.LastBlocks(1)
	require.NoError(t, err)
	lora := llm.LoRA{Rank: 4, Alpha: 8, Targets: targets}
	dora := lora
	dora.Magnitude = true
	for name, s := range map[string]struct {
		tuning
		accumulate int
	}{
		"all":               {tuning{}, 1},
		"all, accumulated":  {tuning{}, 2},
		"all, recomputed":   {tuning{recompute: true}, 1},
		"LoRA":              {tuning{adapter: lora}, 1},
		"LoRA, accumulated": {tuning{adapter: lora}, 2},
		"DoRA":              {tuning{adapter: dora}, 1},
		"LoRA, bfloat16":    {tuning{adapter: lora, base: cpuops.BFloat16}, 1},
		"LoRA, float8":      {tuning{adapter: lora, base: cpuops.Float8}, 1},
		"LoRA, NF4":         {tuning{adapter: lora, base: cpuops.NF4, recompute: true}, 2},
		"last block, NF4":   {tuning{tuned: last, base: cpuops.NF4}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := s.model(t, c)

			sequence := chatdata.Sequence{Line: 1}
			for j := range 40 {
				sequence.IDs, sequence.Learn = append(sequence.IDs, 3*j%64), append(sequence.Learn, j > 2)
			}
			l, err := chatdata.NewLoader([]chatdata.Sequence{sequence, sequence, sequence, sequence},
				data.LoaderConfig{Batch: 2, Seq: c.Seq, Seed: 3})
			require.NoError(t, err)
			o, err := optim.NewAdamW(optim.WithLR(0.01))
			require.NoError(t, err)

			device := cudaops.OpenFake(t)
			before, _, err := device.Memory()
			require.NoError(t, err)
			tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 2, Batch: 2, Accumulate: s.accumulate,
				Schedule: optim.Constant(0.01), Clip: 1, Engine: engine.Engine(device, cudaops.Float32), Tuned: s.tuned,
				Recompute: s.recompute})
			require.NoError(t, err)
			defer func() { require.NoError(t, tr.Close()) }()

			plan, ok := tr.MemoryPlan()
			require.True(t, ok)
			held, err := chatdata.NewLoader([]chatdata.Sequence{sequence, sequence}, data.LoaderConfig{Batch: 2, Seq: c.Seq})
			require.NoError(t, err)
			rows, err := held.Next()
			require.NoError(t, err)
			evaluation, err := data.NewPackedEvaluation(rows, 80, 2, c.Seq)
			require.NoError(t, err)
			evaluations := 0
			tr.On(llm.Evaluate(tr, evaluation, 1), func(e llm.Event) error {
				if e.Kind == llm.EvalEnd {
					evaluations++
				}
				return nil
			})
			require.NoError(t, tr.Run(t.Context()))
			require.Equal(t, 2, evaluations)
			after, _, err := device.Memory()
			require.NoError(t, err)
			planned, counted := plan.Total()-plan.Workspace, int(before-after)-plan.Workspace
			require.InEpsilon(t, counted, planned, 0.05, "%+v, and the driver counts %d", plan, counted)
		})
	}
}
