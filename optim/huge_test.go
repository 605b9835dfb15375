package optim_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/optim"
)

// fill sets all elements of a gradient.
func fill(p *param, g float64) {
	switch x := p.grad.(*tensor.Dense).Data().(type) {
	case []float32:
		for i := range x {
			x[i] = float32(g)
		}
	case []float64:
		for i := range x {
			x[i] = g
		}
	}
}

// values returns the elements of a parameter.
func values(p *param) []float64 {
	switch x := p.value.Data().(type) {
	case []float32:
		v := make([]float64, len(x))
		for i := range x {
			v[i] = float64(x[i])
		}
		return v
	case []float64:
		return slices.Clone(x)
	}

	return nil
}

// huge returns parameters of both types, vectors for AdamW and matrices that Muon updates itself.
func huge() map[string]*param {
	ones32, ones64 := slices.Repeat([]float32{1}, 70), slices.Repeat([]float64{1}, 70)
	return map[string]*param{
		"float32 vector": newParam("norm", slices.Clone(ones32), 70),
		"float64 vector": newParam("norm", slices.Clone(ones64), 70),
		"float32 matrix": newParam("w", ones32, 10, 7),
		"float64 matrix": newParam("w", ones64, 10, 7),
	}
}

// TestHugeGradient checks that after one huge gradient the moments are finite and decay: later steps
// regain their usual size, and the optimizer accepts its own state.
func TestHugeGradient(t *testing.T) {
	const steps, lr = 2500, 0.01
	for _, big := range randtest.SampleOf(t, 3, []float64{math.MaxFloat32, 1e15, 1e19, 1e20, -1e25, 1e38,
		-math.MaxFloat32, 1e160, -math.MaxFloat64}) {
		adamw, err := optim.NewAdamW(optim.WithLR(lr), optim.WithBetas(0.7, 0.7),
			optim.WithWeightDecay(0))
		require.NoError(t, err)
		muon, err := optim.NewMuon(optim.WithLR(lr), optim.WithMomentum(0.7),
			optim.WithAdamW(optim.WithBetas(0.7, 0.7)))
		require.NoError(t, err)
		for optimizer, o := range map[string]optim.Optimizer{"AdamW": adamw, "Muon": muon} {
			for kind, p := range huge() {
				if kind[:7] == "float32" && math.Abs(big) > math.MaxFloat32 {
					continue
				}
				if err := o.SetState(nil); err != nil {
					t.Fatal(err)
				}
				o.(interface{ Drop(names ...string) }).Drop("norm", "w")

				what := fmt.Sprintf("%s, %s, a gradient of %g", optimizer, kind, big)
				var before, after []float64
				for step := range steps {
					fill(p, 1)
					if step == 0 {
						setGradient(p, 3, big)
						setGradient(p, 4, -big)
					}
					if step == 1 { // the largest possible change of sign
						setGradient(p, 3, -big)
					}
					before = values(p)
					require.NoError(t, o.Step([]gorgonia.ValueGrad{p}), what)
					if step < 3 {
						requireOwnState(t, o, what)
					}
				}
				after = values(p)
				requireOwnState(t, o, what)
				for i := range after {
					moved := math.Abs(before[i]-after[i]) / math.Abs(before[0]-after[0])
					require.InDelta(t, 1, moved, 0.01, "%s: element %d", what, i)
				}
				require.NotEqual(t, before[0], after[0], what)
			}
		}
	}
}

func setGradient(p *param, i int, g float64) {
	switch x := p.grad.(*tensor.Dense).Data().(type) {
	case []float32:
		x[i] = float32(g)
	case []float64:
		x[i] = g
	}
}

// requireOwnState checks that an optimizer's state is finite, and that the optimizer accepts it.
func requireOwnState(t *testing.T, o optim.Optimizer, what string) {
	t.Helper()
	state := o.State()
	for _, s := range state {
		finite := true
		switch x := s.Data.(type) {
		case []float32:
			finite = !slices.ContainsFunc(x, func(v float32) bool { return v-v != 0 })
		case []float64:
			finite = !slices.ContainsFunc(x, func(v float64) bool { return v-v != 0 })
		}
		require.True(t, finite, "%s: %s is %v", what, s.Name, s.Data)
	}

	require.NoError(t, o.SetState(state), what)
	require.Equal(t, state, o.State(), what)
}

// TestStateOfAnyBetas checks that an optimizer with any valid betas accepts every state that its own
// steps produce, even if gradients are zero until the mean of squares, or both means, have vanished.
func TestStateOfAnyBetas(t *testing.T) {
	r := freshRand(t)
	for _, betas := range [][2]float64{{0.9, 0.5}, {0.9, 0.7}, {0.95, 0.8}, {0.9, 0}, {0, 0.9},
		{0, 0}, {0.99, 0.95}, {0.999, 0.1}, {0.999999, 0.5}, {r.Float64(), r.Float64()}} {
		adamw, err := optim.NewAdamW(optim.WithLR(1e-30), optim.WithBetas(betas[0], betas[1]))
		require.NoError(t, err)
		muon, err := optim.NewMuon(optim.WithLR(1e-30), optim.WithMomentum(betas[0]),
			optim.WithAdamW(optim.WithBetas(betas[0], betas[1])))
		require.NoError(t, err)
		for i, o := range []optim.Optimizer{adamw, muon} {
			name, ps := []string{"AdamW", "Muon"}[i], small()
			for step := range 2500 {
				for _, p := range ps {
					fill(p, 0)
				}
				if step < 3 || r.IntN(500) == 0 {
					for _, p := range ps {
						setGradient(p, 1, r.NormFloat64())
					}
				}
				require.NoError(t, o.Step(model(ps...)))
				if step%100 == 0 || step < 10 {
					requireOwnState(t, o, fmt.Sprintf("%s, betas %v, step %d", name, betas, step))
				}
			}
		}
	}
}
