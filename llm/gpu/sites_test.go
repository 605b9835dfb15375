package gpu_test

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// randomTokens is a source of n random tokens.
type randomTokens struct {
	ids   []int
	vocab int
}

func newRandomTokens(n, vocab int) randomTokens {
	r := rand.New(rand.NewPCG(1, 2))
	x := randomTokens{make([]int, n), vocab}
	for i := range x.ids {
		x.ids[i] = r.IntN(1 + r.IntN(vocab)) // makes tokens unequally frequent
	}
	return x
}

func (x randomTokens) Len() int64          { return int64(len(x.ids)) }
func (x randomTokens) VocabSize() int      { return x.vocab }
func (x randomTokens) Tokenizer() string   { return "random" }
func (x randomTokens) Fingerprint() string { return "random" }
func (x randomTokens) ReadTokens(dst []int, offset int64) error {
	copy(dst, x.ids[offset:])
	return nil
}

// siteModel returns a small model with seeds on all its linear layers and in the stream.
func siteModel() llm.Config {
	c := llm.Config{Vocab: 256, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, Seq: 32, Untied: true}
	c = c.Default()
	c.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down", "head")
	c.Streams = []int{0, 0, 1}
	return c
}

// siteTrainer returns a trainer for a new model on the device, or on the CPU if device is nil.
func siteTrainer(t *testing.T, device *cudaops.Device, p cudaops.Precision, c llm.Config, steps,
	batch int, keeps ...bool) *llm.Trainer {
	t.Helper()
	return trainerOf(t, device, p, c, llm.TrainConfig{Steps: steps, Batch: batch}, keeps...)
}

// trainerOf completes the configuration of a trainer of a new model.
func trainerOf(t *testing.T, device *cudaops.Device, p cudaops.Precision, c llm.Config,
	config llm.TrainConfig, keeps ...bool) *llm.Trainer {
	t.Helper()
	m := must[*llm.Model](t)(llm.NewModel(c, tensor.Float32, 3, state.WithoutGates()))
	loader := must[*data.Loader](t)(data.NewLoader(newRandomTokens(1<<16, c.Vocab),
		data.LoaderConfig{Batch: config.Batch, Seq: c.Seq, Seed: 1}))
	o := must[*optim.AdamW](t)(optim.NewAdamW(optim.WithGroup(optim.NameContains("kasmina"),
		optim.Decay(0))))
	config.Clip, config.Schedule = 1, optim.Constant(1e-3)
	if device != nil {
		config.Engine = gpu.Engine(device, p)
	}

	if newEngine := config.Engine; len(keeps) > 0 && !keeps[0] {
		config.Engine = func(m *llm.Model, o optim.Optimizer,
			c llm.TrainConfig) (llm.Engine, error) {
			e, err := newEngine(m, o, c)
			if err != nil {
				return nil, err
			}
			return byHost{e.(llm.Stepper)}, nil
		}
	}

	tr := must[*llm.Trainer](t)(llm.NewTrainer(m, loader, o, config))
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	return tr
}

// toStage moves seeds of a layer to their next stage.
func toStage(m *llm.Model, layer int, seeds []int, size int, to state.Stage) error {
	var all []state.Command
	for _, seed := range seeds {
		c := state.Command{Layer: layer, Seed: seed}
		if to == state.Training {
			c.Action = state.Germinate
			c.Request = state.GerminationRequest{Kind: blueprints.LoRA, Size: size}
			switch m.Kasmina.Lattice(layer).Site() {
			case blueprints.Stream:
				c.Request.Kind = []blueprints.Kind{blueprints.Attention,
					blueprints.Perceptron}[seed%2]
			case blueprints.Depth:
				c.Request.Kind = blueprints.Stack
			}
			all = append(all, c)
		}
		c.Action, c.To = state.Move, to
		all = append(all, c)
		if to == state.Grafting && m.Kasmina.Lattice(layer).Site() != blueprints.Depth {
			c.Action, c.Alpha = state.SetAlpha, 0.3
			all = append(all, c)
		}
	}

	return m.Kasmina.Do(all...)
}

// life moves all seeds through their stages, seeds in the stream two steps later than seeds at
// weights. In the end, one seed of each site is rolled back, and all remaining seeds are fossilized.
func life(tr *llm.Trainer, folder string) {
	stages := []state.Stage{state.Training, state.Grafting, state.Stabilization,
		state.Evaluating, state.FineTuning}
	tr.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		for layer, l := range tr.Model.Kasmina.Lattices() {
			var all []int
			for seed := range l.Seeds() {
				all = append(all, seed)
			}
			at := e.Step - 1 - 2*layer
			var err error
			switch {
			case at >= 0 && at < len(stages):
				err = toStage(tr.Model, layer, all, 2, stages[at])
			case at == len(stages):
				if err = toStage(tr.Model, layer, all[1:], 2, state.Fossilized); err == nil {
					err = toStage(tr.Model, layer, all[:1], 2, state.RolledBack)
				}
			}
			if err != nil {
				return err
			}
		}
		if folder == "" {
			return nil
		}
		return tr.Save(checkpointAt(folder, e.Step))
	})
}

// TestSitesOnGPU checks that blueprints at weights and in the stream have the same losses on a GPU as on
// a CPU throughout their lives.
func TestSitesOnGPU(t *testing.T) {
	device := open(t)
	for p, tolerance := range map[cudaops.Precision]float64{cudaops.Float32: 1e-4,
		cudaops.BFloat16: 3e-2} {
		t.Run(p.String(), func(t *testing.T) {
			var all [2][]float64
			var end [2]llm.Config
			for i, d := range []*cudaops.Device{nil, device} {
				tr := siteTrainer(t, d, p, siteModel(), 12, 4)
				life(tr, "")
				all[i] = losses(t, tr)
				end[i] = tr.Model.Config
				require.Empty(t, tr.Model.Planted)
			}
			t.Log(all)
			require.InDeltaSlice(t, all[0], all[1], tolerance)
			require.Equal(t, end[0], end[1])
			require.Equal(t, 4, end[1].Layers) // two blocks have grown in the stream
		})
	}
}

// TestSitesResumeOnGPU checks that resuming such a run after any step reproduces an uninterrupted run
// bit for bit.
func TestSitesResumeOnGPU(t *testing.T) {
	device := open(t)
	folder := t.TempDir()
	const steps = 11
	whole := siteTrainer(t, device, cudaops.BFloat16, siteModel(), steps, 4)
	life(whole, folder)
	require.NoError(t, whole.Run(t.Context()))
	want := saved(t, whole)
	for step := 1; step < steps; step++ {
		tr := siteTrainer(t, device, cudaops.BFloat16, siteModel(), steps, 4)
		require.NoError(t, tr.Resume(t.Context(), checkpointAt(folder, step)))
		life(tr, filepath.Join(t.TempDir()))
		require.NoError(t, tr.Run(t.Context()))
		require.Equal(t, want, saved(t, tr), "from step %d", step)
	}
}

// TestSitesPace measures by how much seeds at weights and in the stream slow down the steps of a model of
// 124 million parameters, and how long planting and merging them takes.
func TestSitesPace(t *testing.T) {
	device := open(t)
	if testing.Short() {
		t.Skip("takes a minute")
	}

	const rank = 16
	c := llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, Seq: 1024}.Default()
	// pace runs a model and moves the seeds of one site to the given stages after the given steps.
	pace := func(name string, c llm.Config, site blueprints.Site,
		stages map[int][]state.Stage) {
		tr := siteTrainer(t, device, cudaops.BFloat16, c, 1<<20, 16)
		defer tr.Close()
		layer, seeds := tr.Model.LayerAt(site), []int{}
		for i := range c.Seeded(site) {
			seeds = append(seeds, i)
		}
		size := map[blueprints.Site]int{blueprints.Weight: rank, blueprints.Stream: 12}[site]
		var took []time.Duration
		var texts []string
		last := time.Now()
		tr.On(func(e llm.Event) error {
			if e.Kind == llm.Reshaped {
				texts = append(texts, e.Text)
			}
			if e.Kind != llm.StepEnd {
				return nil
			}
			took = append(took, time.Since(last))
			for _, stage := range stages[e.Step] {
				if err := toStage(tr.Model, layer, seeds, size, stage); err != nil {
					return err
				}
			}
			if e.Step == 40 {
				tr.Stop("paced")
			}
			last = time.Now()
			return nil
		})
		_ = tr.Run(t.Context())
		require.Len(t, took, 40)
		timed := slices.Sorted(slices.Values(took[10:]))
		fmt.Printf("pace: %-34s median %7.3f ms, least %7.3f, of %d steps; first step %.2f s; %q\n",
			name, ms(timed[len(timed)/2]), ms(timed[0]), len(timed), took[0].Seconds(), texts)
	}

	qv, every, stream := c, c, c
	qv.Weights = c.WeightSites("q", "v")
	every.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	stream.Streams = []int{5}
	training := []state.Stage{state.Training}
	grafting := []state.Stage{state.Training, state.Grafting}
	for range 2 {
		pace("plain", c, blueprints.Weight, nil)
		pace("84 dormant at weights", every, blueprints.Weight, nil)
		pace("q and v, training", qv, blueprints.Weight, map[int][]state.Stage{2: training})
		pace("q and v, grafting", qv, blueprints.Weight, map[int][]state.Stage{2: grafting})
		pace("all weights, training", every, blueprints.Weight, map[int][]state.Stage{2: training})
		pace("an Attention in the stream, training", stream, blueprints.Stream,
			map[int][]state.Stage{2: training})
	}

	pace("all weights, to the end", every, blueprints.Weight, map[int][]state.Stage{2: grafting,
		5: {state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized}})
	pace("in the stream, to the end", stream, blueprints.Stream, map[int][]state.Stage{2: grafting,
		5: {state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized}})
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// byHost hides that an engine can keep its parameters on the device, so that they pass through the host
// when another engine follows.
type byHost struct{ llm.Stepper }

// TestSwapPace measures how long it takes to replace the engine of a model of 124 million parameters
// when its graph changes, and where that time goes, both with parameters that stay on the device and
// with parameters that pass through the host. The log contains the time of each part. As a check, the
// test also compares the three steps after the swap with three later ones.
func TestSwapPace(t *testing.T) {
	device := open(t)
	if testing.Short() {
		t.Skip("takes minutes")
	}

	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stdout,
		&slog.HandlerOptions{Level: slog.LevelDebug})))
	defer slog.SetDefault(before)
	c := llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, Seq: 1024}.Default()
	deep, weights, stream := c, c, c
	deep.Layers, deep.Depth = 3, 1
	weights.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	stream.Streams = []int{5}
	begin := []state.Stage{state.Training, state.Grafting}
	last := []state.Stage{state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized}
	for round := range 3 { // the timings of kernel variants are part of the first round
		for _, keeps := range []bool{true, false} {
			if round != 1 && !keeps {
				continue
			}
			how := map[bool]string{true: "kept", false: "by the host"}[keeps]
			swapPace(t, device, how+", depth", deep, blueprints.Depth, keeps,
				map[int][]state.Stage{8: begin, 16: {state.RolledBack}})
			swapPace(t, device, how+", 84 weights", weights, blueprints.Weight, keeps,
				map[int][]state.Stage{8: begin[:1], 16: begin[1:], 24: last})
			swapPace(t, device, how+", stream", stream, blueprints.Stream, keeps,
				map[int][]state.Stage{8: begin[:1], 16: begin[1:], 24: last})
		}
	}
}

// swapPace runs a model and moves the seeds of one site to the given stages after the given steps. These
// steps must be 8 apart.
func swapPace(t *testing.T, device *cudaops.Device, name string, c llm.Config, site blueprints.Site,
	keeps bool, stages map[int][]state.Stage) {
	t.Helper()
	tr := siteTrainer(t, device, cudaops.BFloat16, c, 33, 16, keeps)
	layer, seeds := tr.Model.LayerAt(site), []int{}
	for i := range c.Seeded(site) {
		seeds = append(seeds, i)
	}

	size := map[blueprints.Site]int{blueprints.Weight: 16, blueprints.Stream: 12,
		blueprints.Depth: 4}[site]
	var took []time.Duration
	last := time.Now()
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.Reshaped {
			fmt.Printf("swap: %s: %s\n", name, e.Text)
		}
		if e.Kind != llm.StepEnd {
			return nil
		}
		took = append(took, time.Since(last))
		last = time.Now()
		for _, stage := range stages[e.Step] {
			if err := toStage(tr.Model, layer, seeds, size, stage); err != nil {
				return err
			}
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.Len(t, took, 33)
	for _, at := range []int{8, 16, 24} {
		timed := slices.Sorted(slices.Values(took[at+3 : at+8]))
		var after time.Duration
		for _, d := range took[at : at+3] {
			after += d
		}
		fmt.Printf("swap: %s: after step %d %.0f ms beyond three steps of %.1f ms\n", name, at,
			ms(after-3*timed[2]), ms(timed[2]))
	}

	require.NoError(t, tr.Close())
}
