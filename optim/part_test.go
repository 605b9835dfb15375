package optim

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// paramNode is a parameter with a gradient.
type paramNode struct {
	*gorgonia.Node
	grad *tensor.Dense
}

func (h paramNode) Grad() (gorgonia.Value, error) { return h.grad, nil }

// partModel is a model with a parameter of several blocks, a vector, and matrices for Muon.
func partModel(r *rand.Rand, dt tensor.Dtype) (model []gorgonia.ValueGrad) {
	g := gorgonia.NewGraph()
	fill := func(shape []int) *tensor.Dense {
		d := tensor.New(tensor.WithShape(shape...), tensor.Of(dt))
		for i := range d.Size() {
			switch x := d.Data().(type) {
			case []float32:
				x[i] = float32(r.NormFloat64())
			case []float64:
				x[i] = r.NormFloat64()
			}
		}
		return d
	}

	for _, p := range []struct {
		name  string
		shape []int
	}{{"embed", []int{2*PartGrain/16 + 5, 16}}, {"norm", []int{7}}, {"a", []int{9, 5}},
		{"b", []int{6, 11}}} {
		n := gorgonia.NodeFromAny(g, fill(p.shape), gorgonia.WithName(p.name))
		model = append(model, paramNode{n, fill(p.shape)})
	}

	return model
}

// TestPartsHaveTheBitsOfTheWhole checks that several processes that each update a part have, together,
// the same values and moments as a single process that updates everything.
func TestPartsHaveTheBitsOfTheWhole(t *testing.T) {
	makers := map[string]func() (Partial, error){
		"AdamW": func() (Partial, error) {
			return NewAdamW(WithGroup(NameContains("norm"), LRScale(0.5)))
		},
		"Muon": func() (Partial, error) { return NewMuon() },
		"Lion": func() (Partial, error) { return NewLion(WithWeightDecay(0.1)) },
		"AdamW8bit": func() (Partial, error) {
			return NewAdamW8bit(WithMin8bitSize(40), WithFloatMomentsFor(NameContains("b")))
		},
	}

	shares := [][]Part{
		{{"embed", PartGrain, 2 * PartGrain}, {"a", 0, 45}},
		{{"embed", 0, PartGrain}, {"embed", 2 * PartGrain, 2*PartGrain + 80}},
		{{"b", 0, 66}, {"norm", 0, 7}},
	}
	for name, newOptimizer := range makers {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			seed := randtest.Seed(t)
			same := func() []gorgonia.ValueGrad {
				return partModel(rand.New(rand.NewPCG(seed, 2)), dt)
			}
			whole := same()
			one, err := newOptimizer()
			require.NoError(t, err)
			require.Nil(t, one.Moments("embed"))
			ranks, models := []Partial{}, [][]gorgonia.ValueGrad{}
			for range shares {
				o, err := newOptimizer()
				require.NoError(t, err)
				ranks, models = append(ranks, o), append(models, same())
			}
			for step := range 3 {
				r := rand.New(rand.NewPCG(seed, uint64(step)))
				for i, p := range partModel(r, dt) {
					for _, m := range append(slices.Clone(models), whole) {
						tensor.Copy(m[i].(paramNode).grad, p.(paramNode).grad)
					}
				}
				require.NoError(t, one.Step(whole))
				for k, parts := range shares {
					require.NoError(t, ranks[k].StepParts(models[k], parts))
				}
			}
			for k, parts := range shares {
				for _, part := range parts {
					i := slices.IndexFunc(whole, func(v gorgonia.ValueGrad) bool {
						return v.(paramNode).Name() == part.Name
					})
					require.Equal(t, slice(whole[i].Value().Data(), part),
						slice(models[k][i].Value().Data(), part), "%s %v", name, part)
					kernel := one.Rule(part.Name, whole[i].Value().Shape()).Kernel
					for m, want := range one.Moments(part.Name) {
						moment := kernel.Moments[m]
						require.Equal(t, moment.Slice(want, part),
							moment.Slice(ranks[k].Moments(part.Name)[m], part))
						for other, o := range ranks {
							if other != k { // copy the moment to the other ranks' memory
								copyPart(moment, o.Moments(part.Name)[m], want, part)
							}
						}
					}
				}
			}
			for _, o := range ranks {
				require.Equal(t, one.State(), o.State())
			}
		}
	}
}

func copyPart(m Moment, to, from any, p Part) {
	reflect.Copy(reflect.ValueOf(m.Slice(to, p)), reflect.ValueOf(m.Slice(from, p)))
}

func TestPartsThatCannotBe(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	muon, err := NewMuon()
	require.NoError(t, err)
	for _, c := range []struct {
		part Part
		want string
	}{
		{Part{"none", 0, 1}, "no parameter"},
		{Part{"embed", 1, PartGrain}, "multiples"},
		{Part{"embed", 0, PartGrain + 1}, "multiples"},
		{Part{"embed", 0, 1 << 30}, "multiples"},
		{Part{"a", 0, 0}, "whole matrix"},
	} {
		model := partModel(r, tensor.Float32)
		before := model[0].Value().(*tensor.Dense).Clone().(*tensor.Dense)
		require.ErrorContains(t, muon.StepParts(model, []Part{{"embed", 0, PartGrain}, c.part}),
			c.want)
		require.Equal(t, before.Data(), model[0].Value().Data())
		require.Empty(t, muon.State())
	}

	model := partModel(r, tensor.Float32)
	g := model[0].(paramNode).grad.Float32s()
	g[PartGrain+3] = float32(math.NaN())
	require.ErrorContains(t, muon.StepParts(model, []Part{{"embed", PartGrain, 2 * PartGrain}}),
		"element 16387")
	require.NoError(t, muon.StepParts(model, []Part{{"embed", 0, PartGrain}}), "outside the part")
	model[0].Value().Data().([]float32)[2] = math.MaxFloat32
	for i := range PartGrain {
		g[i] = -1
	}

	require.NoError(t, muon.SetLR(1e38))
	require.ErrorIs(t, muon.StepParts(model, []Part{{"embed", 0, PartGrain}}), ErrOverflow)
}
