package optim_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

func newAdamW8bit(t *testing.T) *optim.AdamW8bit {
	t.Helper()
	a, err := optim.NewAdamW8bit(optim.WithLR(0.01), optim.WithWeightDecay(0.1))
	require.NoError(t, err)
	return a
}

// TestAdamW8bitKernels checks which parameters have 8-bit moments, and how much memory these take.
func TestAdamW8bitKernels(t *testing.T) {
	a := newAdamW8bit(t)
	for name, c := range map[string]struct {
		shape []int
		want  string
	}{
		"small":              {[]int{4095}, "AdamW"},
		"large":              {[]int{64, 64}, "AdamW8bit"},
		"model.embed_tokens": {[]int{64, 64}, "AdamW"},
	} {
		require.Equal(t, c.want, a.Rule(name, c.shape).Kernel.Name, name)
	}

	const n = 1_000_003
	require.Equal(t, 2*n+2*4*((n+255)/256), a.Rule("w", []int{n}).Kernel.Bytes(n, 4))

	adamw, err := optim.NewAdamW()
	require.NoError(t, err)
	shapes := func(yield func(string, []int) bool) {
		_ = yield("w", []int{1000, 1000}) && yield("norm", []int{1000}) &&
			yield("embed", []int{100, 1000})
	}
	require.Equal(t, 8*(1_000_000+1000+100_000), optim.MomentBytes(adamw, shapes, 4))
	require.Equal(t, 2*1_000_000+2*4*3907+8*(1000+100_000),
		optim.MomentBytes(a, shapes, 4))

	all, err := optim.NewAdamW8bit(optim.WithFloatMomentsFor(optim.NameContains("head")))
	require.NoError(t, err)
	require.Equal(t, "AdamW8bit", all.Rule("embed", []int{64, 64}).Kernel.Name)
}

// TestAdamW8bitNearAdamW checks that after 30 steps moments and parameters are close to AdamW's, and
// that a run restored from a state saved halfway continues bit for bit.
func TestAdamW8bitNearAdamW(t *testing.T) {
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		r := freshRand(t)
		start := normals(r, 97, 53)
		newParams := func() []*param {
			if dtype == tensor.Float32 {
				return []*param{newParam("w", narrow(start), 97, 53), newParam("b", narrow(start[:53]), 53)}
			}
			return []*param{newParam("w", start, 97, 53), newParam("b", start[:53], 53)}
		}
		floats, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0.1))
		require.NoError(t, err)
		eight, straight := newAdamW8bit(t), newAdamW8bit(t)
		want, got, other := newParams(), newParams(), newParams()
		for step := range 30 {
			for i := range want {
				g := normals(r, len(values(want[i])))
				for j, v := range g {
					setGradient(want[i], j, v)
					setGradient(got[i], j, v)
					setGradient(other[i], j, v)
				}
			}
			if step == 15 {
				saved := eight.State()
				eight = newAdamW8bit(t)
				require.NoError(t, eight.SetState(saved))
				require.Equal(t, saved, eight.State())
			}
			require.NoError(t, floats.Step(model(want...)))
			require.NoError(t, eight.Step(model(got...)))
			require.NoError(t, straight.Step(model(other...)))
		}
		require.Equal(t, straight.State(), eight.State())
		require.Equal(t, values(other[0]), values(got[0]))
		require.Equal(t, values(want[1]), values(got[1]), "small parameters have floats")
		closeTo(t, "parameter", values(got[0]), values(want[0]), 0.02)

		of := func(o optim.Rules, state []optim.Tensor) []optim.Gradients {
			return optim.RememberedGradients(o, state)
		}
		a, b := of(floats, floats.State()), of(eight, eight.State())
		require.Len(t, b, 2)
		for i := range a {
			require.Equal(t, a[i].Param, b[i].Param)
			require.Equal(t, a[i].Count, b[i].Count)
			require.InEpsilon(t, a[i].Squares, b[i].Squares, 0.01)
		}
	}
}

// TestAdamW8bitHuge checks that moments stay finite after huge gradients, and that the optimizer accepts
// its own state.
func TestAdamW8bitHuge(t *testing.T) {
	for _, big := range []float64{1e-300, 1e-30, 1e30, math.MaxFloat32, math.MaxFloat64} {
		p := newParam("w", make([]float64, 5000), 5000)
		o := newAdamW8bit(t)
		for range 3 {
			setGradient(p, 3, big)
			setGradient(p, 4999, -big)
			require.NoError(t, o.Step(model(p)))
			own := o.State()
			require.NoError(t, o.SetState(own))
			require.Equal(t, own, o.State())
		}
	}
}

// TestAdamW8bitForget checks that forgotten elements have no momentum, and that all other elements keep
// theirs.
func TestAdamW8bitForget(t *testing.T) {
	p := newParam("w", make([]float64, 5000), 5000)
	o := newAdamW8bit(t)
	for i := range 5000 {
		setGradient(p, i, 1+float64(i%7))
	}

	require.NoError(t, o.Step(model(p)))
	before := values(p)
	require.NoError(t, o.Forget("w", 100, 700))
	require.NoError(t, o.Step(model(p)))
	for i, v := range values(p) {
		moved := v != before[i]*(1-0.01*0)
		require.Equal(t, i < 100 || i >= 700, moved, "element %d", i)
	}
}

// TestAdamW8bitRefuses checks that incomplete or corrupted states, states of another optimizer, and
// bad options are rejected.
func TestAdamW8bitRefuses(t *testing.T) {
	p := newParam("w", make([]float64, 5000), 5000)
	setGradient(p, 3, 1)
	o := newAdamW8bit(t)
	require.NoError(t, o.Step(model(p)))
	find := func(state []optim.Tensor, field string) *optim.Tensor {
		i := slices.IndexFunc(state, func(x optim.Tensor) bool { return x.Name == "w."+field })
		return &state[i]
	}
	for want, change := range map[string]func(s []optim.Tensor) []optim.Tensor{
		"there is no exp_avg_codes": func(s []optim.Tensor) []optim.Tensor {
			return slices.DeleteFunc(s, func(x optim.Tensor) bool { return x.Name == "w.exp_avg_codes" })
		},
		"exp_avg_codes holds a []float64, want []uint8": func(s []optim.Tensor) []optim.Tensor {
			find(s, "exp_avg_codes").Data = make([]float64, 5000)
			return s
		},
		"exp_avg_scales holds a []uint8, want []float32": func(s []optim.Tensor) []optim.Tensor {
			find(s, "exp_avg_scales").Data = make([]uint8, 20)
			return s
		},
		"exp_avg_sq_scales is -1 at element 2, want a scale": func(s []optim.Tensor) []optim.Tensor {
			find(s, "exp_avg_sq_scales").Data.([]float64)[2] = -1
			return s
		},
		"exp_avg_sq_scales is NaN at element 0": func(s []optim.Tensor) []optim.Tensor {
			find(s, "exp_avg_sq_scales").Data.([]float64)[0] = math.NaN()
			return s
		},
		"of shape [19], unlike": func(s []optim.Tensor) []optim.Tensor {
			x := find(s, "exp_avg_scales")
			x.Shape, x.Data = []int{19}, make([]float64, 19)
			return s
		},
	} {
		fresh := newAdamW8bit(t)
		err := fresh.SetState(change(o.State()))
		require.ErrorContains(t, err, want)
		require.Empty(t, fresh.State())
	}

	floats, err := optim.NewAdamW()
	require.NoError(t, err)
	require.ErrorContains(t, floats.SetState(o.State()), "another optimizer")
	require.NoError(t, floats.Step(model(p)))
	require.ErrorContains(t, newAdamW8bit(t).SetState(floats.State()), "but AdamW8bit keeps")

	for want, opt := range map[string]optim.AdamW8bitOption{
		"optim.NewAdamW8bit: WithLR: got 0":              optim.WithLR(0),
		"WithMin8bitSize: got 0, want at least 1":        optim.WithMin8bitSize(0),
		"optim.NewAdamW8bit: WithBetas: got 1":           optim.WithBetas(0.9, 1),
		"optim.NewAdamW8bit: WithEps: got 0, want a fin": optim.WithEps(0),
	} {
		_, err := optim.NewAdamW8bit(opt)
		require.ErrorContains(t, err, want)
	}

	require.Error(t, o.SetLR(-1))
}
