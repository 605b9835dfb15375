package llm

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/data"
)

// TestWindows checks that decoding on machines with windows of fixed sizes gives the CPU's logits for any
// number of tokens, growing or shrinking, and that replaced machines are closed.
func TestWindows(t *testing.T) {
	c := Config{Vocab: 19, Dim: 8, Layers: 1, Heads: 2, Seq: 300}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	var open, made int
	windows := &Inference{Model: m, Make: func(g *Graph) (Machine, error) {
		r, err := runnerOnCPU(g, g.Outputs()...)
		open, made = open+1, made+1
		return counted{r.Machine, &open}, err
	}}
	cached := &Inference{Model: m}
	var tokens []int
	for i := range 300 {
		tokens = append(tokens, i*i%19)
	}

	for _, n := range []int{1, 127, 128, 129, 5, 257, 300} {
		next, err := windows.Decoder()
		require.NoError(t, err)
		got, err := next(t.Context(), tokens[:n])
		require.NoError(t, err)
		if next, err = cached.Decoder(); err == nil {
			want, err := next(t.Context(), tokens[:n])
			require.NoError(t, err)
			require.InDeltaSlice(t, want, got, 1e-5)
		}
		require.NoError(t, err)
		require.Equal(t, 2, open)
	}

	require.Equal(t, 4, made) // for one token, and for 128, 256 and 300 positions
	require.NoError(t, errors.Join(windows.Close(), cached.Close()))
	require.Zero(t, open)
}

// counted is a machine that decrements a count of open machines when it is closed.
type counted struct {
	Machine
	open *int
}

func (c counted) Close() error {
	*c.open--
	return c.Machine.Close()
}

// TestInferenceOf checks that the graphs of an outline match the model's except for their values, and that the
// owner of the values is closed last.
func TestInferenceOf(t *testing.T) {
	c := Config{Vocab: 19, Dim: 8, Layers: 1, Heads: 2, Seq: 12}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	closed := false
	open := 0
	i := InferenceOf(c, func(g *Graph) (Machine, error) {
		for j, p := range g.Params {
			require.Equal(t, m.Params[j].Name, p.Name())
			require.Equal(t, m.Params[j].Value.Shape(), p.Shape())
			if err := gorgonia.Let(p, m.Params[j].Value); err != nil {
				return nil, err
			}
		}
		r, err := runnerOnCPU(g)
		open++
		return counted{r.Machine, &open}, err
	}, func() error {
		require.Zero(t, open)
		closed = true
		return nil
	})

	b := data.Batch{Inputs: []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
		Targets: []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, Count: 12}
	got, err := i.Loss(b)
	require.NoError(t, err)
	want, err := (&Inference{Model: m}).Loss(b)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.NoError(t, i.Close())
	require.True(t, closed)

	c.Kasmina, c.Seeds = []int{0}, 2
	_, err = InferenceOf(c.Default(), nil, nil).Loss(b)
	require.ErrorContains(t, err, "an outline has no seeds")
	_, err = new(Inference).Loss(b)
	require.ErrorContains(t, err, "needs a Model")
}
