package hf

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// openGPU opens the GPU. Without a GPU it skips the test.
func openGPU(t *testing.T) *cudaops.Device {
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, device.Close()) })
	return device
}

// onGPU returns an inference with a model on the device.
func onGPU(d *cudaops.Device, m *llm.Model, p cudaops.Precision) *llm.Inference {
	return &llm.Inference{Model: m, Make: func(g *llm.Graph) (llm.Machine, error) {
		return cudaops.NewMachine(d, g.G, cudaops.WithPrecision(p), cudaops.WithStrict(),
			cudaops.WithTuning(cudaops.TuneOff), cudaops.WithParams(g.Params...),
			cudaops.WithOutputs(g.Outputs()...))
	}}
}

// bf16 holds the distances between transformers in bfloat16 and transformers in float32, as
// testdata/make.py measured them on a GPU.
type bf16 struct {
	Logits   float64 // of all logits, with weights and activations in bfloat16
	Losses   float64 // of the losses of ten steps, likewise
	Autocast float64 // of the losses of ten steps, with float32 master weights under autocast
}

func readBF16(t *testing.T) (all map[string]bf16) {
	text, err := os.ReadFile(filepath.Join("testdata", "bf16.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &all))
	return all
}

// TestAdapterLossesOnGPU is TestAdapterLosses on a GPU.
func TestAdapterLossesOnGPU(t *testing.T) {
	testAdapterLosses(t, gpu.Engine(openGPU(t), cudaops.Float32))
}

// TestPreferencesOnGPU is TestPreferences on a GPU.
func TestPreferencesOnGPU(t *testing.T) {
	testPreferences(t, gpu.Engine(openGPU(t), cudaops.Float32), 1e-4)
}

// TestOnGPU checks that logits and losses in float32 on a GPU agree with transformers, and that in
// bfloat16 they are as accurate as transformers in bfloat16.
func TestOnGPU(t *testing.T) {
	device, theirs := openGPU(t), readBF16(t)
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			g := readGolden(t, folder)
			m, err := open(t, folder).Load(t.Context())
			require.NoError(t, err)
			require.Less(t, offLogits(t, g, onGPU(device, m, cudaops.Float32)), 1e-4)
			losses := lossesOf(t, folder, g, gpu.Engine(device, cudaops.Float32))
			require.InEpsilonSlice(t, g.losses, losses, 1e-4)

			logits := offLogits(t, g, onGPU(device, m, cudaops.BFloat16))
			losses = lossesOf(t, folder, g, gpu.Engine(device, cudaops.BFloat16))
			off := distance(losses, g.losses)
			t.Logf("bfloat16 is off by %.2g (transformers %.2g), losses by %.2g (%.2g, %.2g)", logits,
				theirs[folder].Logits, off, theirs[folder].Losses, theirs[folder].Autocast)
			require.LessOrEqual(t, logits, theirs[folder].Logits)
			require.LessOrEqual(t, off, theirs[folder].Losses)
			// Autocast keeps the residual stream in float32, while this module uses bfloat16.
			require.LessOrEqual(t, off, 1.5*theirs[folder].Autocast)
		})
	}
}

// TestLoadOnGPU checks that weights loaded directly to the GPU give results bit-identical to weights
// copied through host memory.
func TestLoadOnGPU(t *testing.T) {
	device := openGPU(t)
	for _, folder := range folders {
		for _, p := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16} {
			t.Run(folder+"/"+p.String(), func(t *testing.T) {
				f, g := open(t, folder), readGolden(t, folder)
				m, err := f.Load(t.Context())
				require.NoError(t, err)
				want := offLogits(t, g, onGPU(device, m, p))
				i, err := gpu.Load(t.Context(), device, p, f.Config, f)
				require.NoError(t, err)
				require.Equal(t, want, offLogits(t, g, i)) // offLogits closes i
			})
		}
	}

	f := open(t, "llama2")
	c := f.Config
	c.Layers++
	_, err := gpu.Load(t.Context(), device, cudaops.BFloat16, c, f)
	require.ErrorContains(t, err, "there is no tensor")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = gpu.Load(ctx, device, cudaops.BFloat16, f.Config, f)
	require.ErrorIs(t, err, context.Canceled)
}

// TestScoreOnGPU compares the scores of continuations of different lengths with the CPU's.
func TestScoreOnGPU(t *testing.T) {
	device := openGPU(t)
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			f := open(t, folder)
			m, err := f.Load(t.Context())
			require.NoError(t, err)
			var texts []llm.Continuation
			for n := 2; n <= f.Config.Seq+1; n += 3 {
				tokens := make([]int, n)
				for i := range tokens {
					tokens[i] = (7*i + i*i + n) % f.Config.Vocab
				}
				texts = append(texts, llm.Continuation{Tokens: tokens, Scored: 1 + n/3})
			}

			onDevice, err := gpu.Load(t.Context(), device, cudaops.Float32, f.Config, f)
			require.NoError(t, err)
			defer onDevice.Close()
			onCPU := &llm.Inference{Model: m}
			defer onCPU.Close()
			got, err := onDevice.Score(t.Context(), texts)
			require.NoError(t, err)
			want, err := onCPU.Score(t.Context(), texts)
			require.NoError(t, err)
			for i := range texts {
				require.InDelta(t, want[i].LogProb, got[i].LogProb, 1e-3)
				require.Equal(t, want[i].Greedy, got[i].Greedy)
			}
		})
	}
}

// TestTextOnGPU checks that greedy text from a GPU, which caches keys and values, equals the CPU's. One
// text starts from a short prompt and continues past the end of the window, another starts from a long
// prompt.
func TestTextOnGPU(t *testing.T) {
	device := openGPU(t)
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			f := open(t, folder)
			m, err := f.Load(t.Context())
			require.NoError(t, err)
			onDevice, err := gpu.Load(t.Context(), device, cudaops.Float32, f.Config, f)
			require.NoError(t, err)
			defer onDevice.Close()
			onCPU := &llm.Inference{Model: m}
			defer onCPU.Close()
			greedy := func(i *llm.Inference, prompt []int, n int) (text []int) {
				s, err := sampler.New(sampler.Config{Vocab: f.Config.Vocab})
				require.NoError(t, err)
				for id, err := range llm.GeneratorOf(f.Config, i.Decoder).Generate(t.Context(), prompt, n, s) {
					require.NoError(t, err)
					text = append(text, id)
				}
				return text
			}
			long := make([]int, f.Config.Seq-9)
			for i := range long {
				long[i] = (7*i + i*i) % f.Config.Vocab
			}
			for _, prompt := range [][]int{{1}, long[:11], long} {
				n := min(f.Config.Seq-len(prompt)+3, 200)
				require.Equal(t, greedy(onCPU, prompt, n), greedy(onDevice, prompt, n))
			}
		})
	}
}

// TestTextsOnGPU checks that greedy texts that a GPU continues together equal those that the CPU continues
// alone.
func TestTextsOnGPU(t *testing.T) {
	device := openGPU(t)
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			f := open(t, folder)
			m, err := f.Load(t.Context())
			require.NoError(t, err)
			loaded, err := gpu.Load(t.Context(), device, cudaops.Float32, f.Config, f)
			require.NoError(t, err)
			b, err := gpu.NewBatcher(device, cudaops.Float32, f.Config, loaded, llm.BatcherOptions{Texts: 8,
				Rows: 40, Tokens: max(f.Config.Seq, 512)})
			require.NoError(t, err)
			defer b.Close()
			onCPU := &llm.Inference{Model: m}
			defer onCPU.Close()
			greedy := func(g *llm.Generator, prompt []int, n int) (text []int, err error) {
				s, err := sampler.New(sampler.Config{Vocab: f.Config.Vocab})
				if err != nil {
					return nil, err
				}
				for id, err := range g.Generate(t.Context(), prompt, n, s) {
					if err != nil {
						return nil, err
					}
					text = append(text, id)
				}
				return text, nil
			}

			texts, errs := make([][]int, 8), make([]error, 8)
			prompt := func(i int) (tokens []int) {
				for j := range min(3+17*i, f.Config.Seq-5) {
					tokens = append(tokens, (7*j+j*j+i%3)%f.Config.Vocab)
				}
				return tokens
			}
			length := func(i int) int { return min(f.Config.Seq-len(prompt(i)), 60) }
			var all sync.WaitGroup
			for i := range texts {
				all.Go(func() { texts[i], errs[i] = greedy(b.Generator(), prompt(i), length(i)) })
			}
			all.Wait()
			for i, text := range texts {
				require.NoError(t, errs[i])
				want, err := greedy(llm.GeneratorOf(f.Config, onCPU.Decoder), prompt(i), length(i))
				require.NoError(t, err)
				require.Equal(t, want, text)
			}
		})
	}
}

// TestChosenAdaptersOnGPU checks that greedy texts with different adapters, which a GPU continues together, equal those
// of the CPU.
func TestChosenAdaptersOnGPU(t *testing.T) {
	device := openGPU(t)
	f := open(t, "tiny")
	var adapters []*llm.Adapter
	r := rand.New(rand.NewPCG(3, 4))
	for _, magnitude := range []bool{false, true} {
		targets, err := f.Config.MatchLayers(llm.AllLinear)
		require.NoError(t, err)
		a, err := llm.NewAdapter(f.Config, llm.LoRA{Rank: 4, Alpha: 8, Targets: targets, Magnitude: magnitude}, tensor.Float32)
		require.NoError(t, err)
		for _, p := range a.Params {
			for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
				x[i] = float32(0.3 + r.NormFloat64()*0.2)
			}
		}
		adapters = append(adapters, a)
	}
	base, err := f.Load(t.Context())
	require.NoError(t, err)
	for _, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP} {
		m, err := llm.TuneSeeds(base, kind, 5)
		require.NoError(t, err)
		for _, p := range m.Params {
			if llm.IsSeedParam(p.Name) {
				for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
					x[i] = float32(r.NormFloat64() * 0.3)
				}
			}
		}
		a, err := m.SeedAdapter()
		require.NoError(t, err)
		adapters = append(adapters, a)
	}

	loaded, err := gpu.LoadAdapted(t.Context(), device, cudaops.Float32, f.Config, f, adapters)
	require.NoError(t, err)
	o := llm.BatcherOptions{Texts: 6, Rows: 40, Tokens: 1024}
	onGPU, err := gpu.NewBatcher(device, cudaops.Float32, f.Config, loaded, o)
	require.NoError(t, err)
	defer onGPU.Close()
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	o.Adapters = adapters
	onCPU, err := llm.NewBatcher(m, o)
	require.NoError(t, err)
	defer onCPU.Close()

	greedy := func(b *llm.Batcher, k int) (text []int) {
		g := b.Generator()
		if n := 1 + len(adapters); k%n > 0 {
			var err error
			if g, err = b.Adapted(k%n - 1); !assert.NoError(t, err) {
				return nil
			}
		}
		s, err := sampler.New(sampler.Config{Vocab: f.Config.Vocab})
		assert.NoError(t, err)
		for id, err := range g.Generate(t.Context(), []int{1, 5 + k, 9}, 50, s) {
			assert.NoError(t, err)
			text = append(text, id)
		}
		return text
	}
	var all sync.WaitGroup
	for k := range 10 {
		all.Go(func() { assert.Equal(t, greedy(onCPU, k), greedy(onGPU, k), "text %d", k) })
	}
	all.Wait()
}
