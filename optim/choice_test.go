package optim_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/optim"
)

// TestChoices checks that every optimizer with a name can be created, accepts the options common to all
// optimizers, and makes a step.
func TestChoices(t *testing.T) {
	names := optim.ChoiceNames()
	require.Equal(t, "adamw", names[0])
	require.Len(t, optim.Choices(), len(names))
	for i, name := range names {
		c, err := optim.ByName(name)
		require.NoError(t, err)
		require.Equal(t, name, c.Name)
		require.Equal(t, name, optim.Choices()[i].Name)
		require.Positive(t, c.Rate)

		o, err := c.New(0.25, optim.WithGroup(optim.NameContains("w"), optim.Decay(0.5)))
		require.NoError(t, err)
		require.Equal(t, 0.25, o.LR(), name)
		require.Equal(t, 0.5, o.Rule("w", []int{3, 2}).Decay, name)

		p := newParam("w", []float64{1, 2, 3, 4, 5, 6}, 3, 2)
		setGradient(p, 1, 0.5)
		require.NoError(t, o.Step(model(p)))
		require.NotEqual(t, 2.0, values(p)[1], name)

		_, err = c.New(-1)
		require.ErrorContains(t, err, "-1", name)
	}

	_, err := optim.ByName("none")
	require.ErrorContains(t, err, `"none"`)
	require.ErrorContains(t, err, "adamw, muon")
	_, err = optim.Choice{}.New(1)
	require.ErrorContains(t, err, "zero value")
}

// TestChoiceSettings checks the initial settings of the choices.
func TestChoiceSettings(t *testing.T) {
	for name, want := range map[string]struct{ lrScale, decay, beta1, beta2 float64 }{
		"adamw": {1, 0.1, 0.9, 0.95},
		"muon":  {0.15, 0.1, 0.9, 0.95}, // for an embedding, which AdamW updates
		"lion":  {1, 0.5, 0.95, 0.98},

		"adamw8bit": {1, 0.1, 0.9, 0.95},
	} {
		c, err := optim.ByName(name)
		require.NoError(t, err)
		o, err := c.New(0.5)
		require.NoError(t, err)
		r := o.Rule("embed", []int{64, 128})
		require.InDelta(t, want.lrScale, r.LRScale, 1e-12, name)
		require.Equal(t, []float64{want.decay, want.beta1, want.beta2},
			[]float64{r.Decay, r.Beta1, r.Beta2}, name)
	}
}
