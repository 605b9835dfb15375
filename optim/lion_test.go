package optim_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// lionReference computes a step of Lion in float64, as defined in the paper.
func lionReference(p, g, m []float64, lr, beta1, beta2, decay float64) {
	for i := range p {
		sign := 0.0
		if c := beta1*m[i] + (1-beta1)*g[i]; c != 0 {
			sign = math.Copysign(1, c)
		}
		p[i] -= lr * (sign + decay*p[i])
		m[i] = beta2*m[i] + (1-beta2)*g[i]
	}
}

func newLion(t *testing.T) *optim.Lion {
	t.Helper()
	l, err := optim.NewLion(optim.WithLR(0.01), optim.WithBetas(0.8, 0.95),
		optim.WithWeightDecay(0.3), optim.WithGroup(optim.NameContains("slow"), optim.LRScale(0.25),
			optim.Betas(0.5, 0.75)))
	require.NoError(t, err)
	return l
}

// TestLion compares 30 steps with the reference in both types, for a matrix, a vector, which doesn't
// decay, and a group. Some gradients are zero, so that the moment alone determines the sign, which may be
// 0. Halfway through, a new optimizer takes over the state.
func TestLion(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 14)) // with random seeds, float32 might round to a different sign than float64
	const rows, cols = 9, 7
	type reference struct{ p, m []float64 }

	start := normals(r, rows, cols)
	got := []*param{newParam("w", start, rows, cols), newParam("norm", start[:cols], cols),
		newParam("slow", start, rows, cols), newParam("w32", narrow(start), rows, cols)}
	want := make([]reference, len(got))
	for i, p := range got {
		want[i] = reference{values(p), make([]float64, len(values(p)))}
	}

	o := newLion(t)
	for step := range 30 {
		if step == 15 {
			state := o.State()
			o = newLion(t)
			require.NoError(t, o.Declare(model(got...)))
			require.NoError(t, o.SetState(state))
			require.Equal(t, state, o.State())
		}
		for i, p := range got {
			g := normals(r, len(want[i].p))
			g[0] = 0 // in every step
			if step > 3 {
				g[1] = 0
			}
			for j, v := range g {
				setGradient(p, j, v)
			}
			if p.name == "w32" {
				for j := range g {
					g[j] = float64(float32(g[j]))
				}
			}

			lr, beta1, beta2, decay := 0.01, 0.8, 0.95, 0.3
			switch p.name {
			case "norm":
				decay = 0
			case "slow":
				lr, beta1, beta2 = 0.25*lr, 0.5, 0.75
			}
			lionReference(want[i].p, g, want[i].m, lr, beta1, beta2, decay)
		}
		require.NoError(t, o.Step(model(got...)))
	}

	for i, p := range got {
		tolerance := 1e-13
		if p.value.Dtype() == tensor.Float32 {
			tolerance = 1e-5
		}
		closeTo(t, p.name, values(p), want[i].p, tolerance)
		for _, x := range o.State() {
			if x.Name == p.name+".exp_avg" && tolerance < 1e-6 {
				closeTo(t, x.Name, x.Data.([]float64), want[i].m, tolerance)
			}
		}
	}

	for _, g := range got[0].gradient() {
		require.Zero(t, g, "a gradient after the step")
	}
}

// TestLionHugeGradient checks that moments stay finite and that Lion accepts its own state.
func TestLionHugeGradient(t *testing.T) {
	for kind, p := range huge() {
		o := newLion(t)
		for step := range 3 {
			fill(p, 1)
			big := math.MaxFloat32
			if kind[:7] == "float64" {
				big = math.MaxFloat64
			}
			setGradient(p, 3, big)
			setGradient(p, 4, -big)
			require.NoError(t, o.Step(model(p)), "%s, step %d", kind, step)
			requireOwnState(t, o, kind)
		}
	}
}

// TestLionRefuses checks that bad options and the states of other optimizers are rejected.
func TestLionRefuses(t *testing.T) {
	for want, opts := range map[string][]optim.LionOption{
		"optim.NewLion: WithLR: got 0":     {optim.WithLR(0)},
		"WithBetas: got 1":                 {optim.WithBetas(0.9, 1)},
		"WithWeightDecay: got -1":          {optim.WithWeightDecay(-1)},
		"an option is a zero value":        {optim.Option{}},
		"WithGroup: Betas: got 2, want a ": {optim.WithGroup(optim.Vectors, optim.Betas(0, 2))},
	} {
		_, err := optim.NewLion(opts...)
		require.ErrorContains(t, err, want)
	}

	for name, other := range both(t) {
		ps := small()
		require.NoError(t, other.Step(model(ps...)))
		o := newLion(t)
		err := o.SetState(other.State())
		require.ErrorContains(t, err, "but Lion keeps exp_avg: the state belongs to another", name)
		require.Empty(t, o.State())

		require.NoError(t, o.Step(model(ps...)))
		err = other.SetState(o.State())
		require.Error(t, err, name)
		require.True(t, strings.Contains(err.Error(), "there is no exp_avg_sq") ||
			strings.Contains(err.Error(), "but Muon keeps"), "%s: %v", name, err)
	}

	require.Error(t, newLion(t).SetLR(-1))
}
