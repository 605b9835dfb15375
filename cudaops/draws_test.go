package cudaops

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// samplings lists settings that use all parts of a rule.
var samplings = []sampler.Config{
	{}, {Temperature: 1, Seed: 3}, {Temperature: 0.7, TopK: 5, TopP: 0.8, Seed: 4},
	{Temperature: 2, MinP: 0.05, Repetition: 1.3, Presence: 0.2, Frequency: 0.1, Seed: 5},
	{Repetition: 2, Bias: map[int]float64{3: 1.5, 7: math.Inf(-1)}},
	{Temperature: 1, LogProbs: true, Top: 2, Seed: 6}, // on the host
}

// inferences returns two inferences for the same model on a fake device, of which only one draws tokens there.
func inferences(t *testing.T, device *Device) (drawing, plain *llm.Inference, c llm.Config) {
	m, err := llm.NewModel(llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 60}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	inference := func(draws bool) *llm.Inference {
		g, read := valueless(t, m, llm.ForLogits, Float32)
		owner, err := NewMachine(device, g.G, WithFrozen(read, g.Params...))
		require.NoError(t, err)
		i := llm.InferenceOf(m.Config, func(g *llm.Graph) (llm.Machine, error) {
			opts := []MachineOption{WithStrict(), WithParamsOf(owner), WithOutputs(g.Outputs()...)}
			if g.Draws {
				opts = append(opts, WithDraws(g.Logits, g.IDs))
			}
			return NewMachine(device, g.G, opts...)
		}, owner.Close)
		i.DrawsOnDevice = draws
		return i
	}
	return inference(true), inference(false), m.Config
}

// onHost returns n tokens that follow a prompt, drawn by the host.
func onHost(t *testing.T, i interface {
	Decoder() (func(context.Context, []int) (any, error), error)
}, c sampler.Config, prompt []int, n int) []int {
	s, err := sampler.New(c)
	require.NoError(t, err)
	s.Observe(prompt...)
	next, err := i.Decoder()
	require.NoError(t, err)
	tokens := slices.Clone(prompt)
	for range n {
		logits, err := next(t.Context(), tokens)
		require.NoError(t, err)
		id, err := sampler.Draw(s, logits.([]float32))
		require.NoError(t, err)
		tokens = append(tokens, id)
	}
	return tokens[len(prompt):]
}

// TestDraws checks that a device draws the tokens that the host draws, while being one step ahead. Texts are changed,
// cut off and continued by other samplers in between.
func TestDraws(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	drawing, plain, _ := inferences(t, device)
	prompt := []int{3, 1, 4, 1, 5}
	for _, c := range samplings {
		want := onHost(t, plain, c, prompt, 40)
		draw, err := drawing.Drawer()
		require.NoError(t, err)
		s, err := sampler.New(c)
		require.NoError(t, err)
		s.Observe(prompt...)
		tokens := slices.Clone(prompt)
		for i := range 40 {
			id, err := draw(t.Context(), tokens, s, i == 39)
			require.NoError(t, err)
			require.Equal(t, want[i], id, "token %d of %+v", i, c)
			tokens = append(tokens, id)
		}
	}

	// The device guesses wrong.
	draw, err := drawing.Drawer()
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 2))
	tokens := slices.Clone(prompt)
	for range 60 {
		switch r.IntN(3) {
		case 0:
			tokens = append(tokens[:max(2, len(tokens)-r.IntN(4))], r.IntN(19))
		case 1:
			tokens = tokens[:max(2, len(tokens)-r.IntN(9))]
		}
		if len(tokens) > 50 {
			tokens = tokens[:10]
		}
		c := samplings[r.IntN(len(samplings))]
		s, err := sampler.New(c)
		require.NoError(t, err)
		s.Observe(tokens...)
		want := onHost(t, plain, c, tokens, 3)
		for i := range 3 {
			id, err := draw(t.Context(), tokens, s, false)
			require.NoError(t, err)
			require.Equal(t, want[i], id)
			tokens = append(tokens, id)
		}
	}

	require.NoError(t, drawing.Close())
	require.NoError(t, plain.Close())
	requireNoLeaks(t, device)
}

var _ sync.Mutex
