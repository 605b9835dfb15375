package cudaops_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// numbers is a text of random tokens.
type numbers struct{}

const numbersVocab = 16

func (numbers) Len() int64          { return 1 << 12 }
func (numbers) VocabSize() int      { return numbersVocab }
func (numbers) Tokenizer() string   { return "numbers" }
func (numbers) Fingerprint() string { return "numbers" }
func (numbers) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		r := rand.New(rand.NewPCG(1, uint64(offset)+uint64(i)))
		dst[i] = r.IntN(1 + r.IntN(numbersVocab))
	}
	return nil
}

// growing trains a model that grows at all sites, and of which some is taken back, on a fake
// device.
// It returns all that there is of the run. Engines that keep take over what is on the device.
func growing(t *testing.T, keeps bool, o func() optim.Optimizer) (log []string) {
	t.Helper()
	device, fakes := cudaops.OpenFake(t)
	c := llm.Config{Vocab: numbersVocab, Dim: 8, Layers: 2, Heads: 2, KVHeads: 1, FF: 12, Seq: 6,
		Untied: true, Depth: 2}.Default()
	c.Weights = c.WeightSites("q", "v", "up", "head")
	c.Streams = []int{0, 1}
	m, err := llm.NewModel(c, tensor.Float32, 5, state.WithoutGates(), state.WithEmbargo(0))
	require.NoError(t, err)
	loader, err := data.NewLoader(numbers{}, data.LoaderConfig{Batch: 2, Seq: c.Seq, Seed: 1})
	require.NoError(t, err)
	config := llm.TrainConfig{Steps: 30, Batch: 2, Clip: 1, Epoch: 1, Schedule: optim.Constant(1e-2)}
	config.Engine = engine.Engine(device, cudaops.Float32, fakes)
	if !keeps {
		plain := config.Engine
		config.Engine = func(m *llm.Model, o optim.Optimizer,
			c llm.TrainConfig) (llm.Engine, error) {
			e, err := plain(m, o, c)
			return waiting{e}, err
		}
	}
	tr, err := llm.NewTrainer(m, loader, o(), config)
	require.NoError(t, err)
	note := func(format string, args ...any) { log = append(log, fmt.Sprintf(format, args...)) }
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.Reshaped {
			require.NoError(t, e.Err)
		}
		if e.Kind != llm.StepEnd {
			return nil
		}
		note("step %d, loss %x, norm %x, parameters %d", e.Step, e.Loss, e.GradNorm, e.Params)
		return growthAt(m, e.Step)
	})
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, tr.Close())
	for _, p := range m.Params {
		note("%s %x", p.Name, p.Value.Float32s())
	}
	for _, s := range tr.Optimizer.State() {
		note("%s %x", s.Name, s.Data)
	}
	return log
}

// growthAt lets seeds of all sites grow, each in steps of its own.
func growthAt(m *llm.Model, step int) error {
	kinds := map[blueprints.Site][]blueprints.Kind{blueprints.Weight: {blueprints.LoRA},
		blueprints.Stream: {blueprints.Attention, blueprints.Perceptron},
		blueprints.Depth:  {blueprints.Stack, blueprints.Interleave}}
	start := map[blueprints.Site]int{blueprints.Weight: 2, blueprints.Stream: 4,
		blueprints.Depth: 14}
	stages := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized}
	for layer, l := range m.Kasmina.Lattices() {
		for seed := range l.Seeds() {
			at := step - start[l.Site()] - seed%2
			if l.Site() == blueprints.Depth {
				at = step - start[l.Site()] - 8*seed
			}
			if at < 0 || at >= len(stages) {
				continue
			}
			c := state.Command{Layer: layer, Seed: seed, Action: state.Move, To: stages[at]}
			if at == 0 {
				all := kinds[l.Site()]
				if err := m.Kasmina.Do(state.Command{Layer: layer, Seed: seed,
					Action: state.Germinate, Request: state.GerminationRequest{
						Kind: all[seed%len(all)], Size: 2}}); err != nil {
					return err
				}
			}
			deep, last := l.Site() == blueprints.Depth, at == len(stages)-1
			switch {
			case last && (seed == 0) == deep:
				c.To = state.RolledBack
			case deep && at > 3:
				continue // its gates ask for what the model has gained
			}
			if err := m.Kasmina.Do(c); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestSwapsKeepBits wants a run whose engines leave parameters and moments on the device to the
// next ones to have the bits of one in which these travel by the host.
func TestSwapsKeepBits(t *testing.T) {
	for name, o := range map[string]func() optim.Optimizer{
		"AdamW": func() optim.Optimizer {
			o, err := optim.NewAdamW()
			require.NoError(t, err)
			return o
		},
		"Muon": func() optim.Optimizer {
			o, err := optim.NewMuon()
			require.NoError(t, err)
			return o
		}} {
		t.Run(name, func(t *testing.T) {
			want, got := growing(t, false, o), growing(t, true, o)
			for i := range min(len(want), len(got)) {
				require.Equal(t, want[i], got[i])
			}
			require.Len(t, got, len(want))
		})
	}
}
