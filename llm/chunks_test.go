package llm

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/state"
)

// atZero begins with weights of 0.
func atZero(w []float64, _ int, _ *rand.Rand) float64 {
	clear(w)
	return 1
}

// squareKind registers t(x) = x + w·x², as a graph or as arithmetic.
func squareKind(t *testing.T, name string, asGraph bool) blueprints.Kind {
	t.Helper()
	if k, ok := blueprints.ByName(name); ok {
		return k
	}
	b := blueprints.Blueprint{Name: name, Identity: atZero}
	if !asGraph {
		b.F32, b.F64 = squareOf[float32](), squareOf[float64]()
		k, err := blueprints.Register(b)
		require.NoError(t, err)
		return k
	}
	k, err := site.Register(b, func(x *gorgonia.Node, params gorgonia.Nodes,
		_ int) (*gorgonia.Node, error) {
		s, err := gorgonia.Square(x)
		if err != nil {
			return nil, err
		}
		if s, err = gorgonia.BroadcastHadamardProd(s, params[0], nil, []byte{0}); err != nil {
			return nil, err
		}
		return gorgonia.Add(x, s)
	})
	require.NoError(t, err)
	return k
}

func squareOf[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward: func(t, x, w []T, _ T) {
			for i, v := range x {
				t[i] = v + w[i]*v*v
			}
		},
		Backward: func(dx, dw, g, x, w []T, _ T) float64 {
			for i, v := range x {
				dx[i] = g[i] * (1 + 2*w[i]*v)
				dw[i] += g[i] * v * v
			}
			return 0
		}}
}

// squared trains a model in which seeds of chunks live with a kind, two of them in one slot, and
// returns its losses and what the lattice has measured of the chunks.
func squared(t *testing.T, kind blueprints.Kind, opts ...state.Option) (losses []float64,
	report state.Report) {
	t.Helper()
	c := tiny()
	c.Seeds, c.Slots = 4, 3
	tr := newTrainer(t, trainerOptions{config: c, steps: 12, dormant: true, lattice: opts})
	life := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized}
	tr.On(func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		losses = append(losses, e.Loss)
		if e.Step == 1 {
			for seed, slot := range map[int]int{0: 1, 2: 2, 3: 1} {
				if err := tr.Model.Germinate(0, seed, state.GerminationRequest{Slot: slot,
					Kind: kind}); err != nil {
					return err
				}
			}
		}
		if at := e.Step - 2; at >= 0 && at < len(life) {
			for _, seed := range []int{0, 2, 3} {
				if err := tr.Model.Kasmina.Do(move(seed, life[at])); err != nil {
					return err
				}
				if life[at] != state.Grafting {
					continue
				}
				if err := tr.Model.Kasmina.Do(state.Command{Action: state.SetAlpha, Seed: seed,
					Alpha: 0.5}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	require.NoError(t, tr.Run(context.Background()))
	return losses, tr.Model.Kasmina.Report()[0]
}

// TestChunkGraphs wants a kind of chunks that is a graph to do what the same kind does as arithmetic:
// to the losses, and to what is measured.
func TestChunkGraphs(t *testing.T) {
	want, wanted := squared(t, squareKind(t, "square, arithmetic", false))
	got, measured := squared(t, squareKind(t, "square, graph", true))
	require.InDeltaSlice(t, want, got, 1e-6)
	require.NotEqual(t, got[5], got[6])
	for i, s := range measured.Seeds {
		require.Equal(t, wanted.Seeds[i].Stage, s.Stage)
		require.InDelta(t, wanted.Seeds[i].Health.Variance, s.Health.Variance, 1e-6)
		require.InDelta(t, wanted.Seeds[i].Gradient.Norm, s.Gradient.Norm, 1e-6)
	}
	noisy, _ := squared(t, squareKind(t, "square, graph", true),
		state.WithAlphaNoise(0.5))
	again, _ := squared(t, squareKind(t, "square, graph", true),
		state.WithAlphaNoise(0.5))
	require.Equal(t, noisy, again)
	require.Equal(t, got[:3], noisy[:3])
	require.NotEqual(t, got, noisy)
}

// TestChunkGraphsThatCannotBe wants a graph that fails, and one that gives another shape, to cost the
// seed and not the run, and a kind that is a graph to be refused where no graph has it.
func TestChunkGraphsThatCannotBe(t *testing.T) {
	for name, build := range map[string]site.Build{
		"fails": func(*gorgonia.Node, gorgonia.Nodes, int) (*gorgonia.Node, error) {
			return nil, errors.New("no such graph")
		},
		"panics": func(x *gorgonia.Node, p gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
			return p[7], nil
		},
		"shape": func(x *gorgonia.Node, p gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
			return p[0], nil
		}} {
		t.Run(name, func(t *testing.T) {
			kind, ok := blueprints.ByName("chunk that " + name)
			if !ok {
				var err error
				kind, err = site.Register(blueprints.Blueprint{Name: "chunk that " + name,
					Identity: atZero}, build)
				require.NoError(t, err)
			}
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4,
				dormant: true})
			var told error
			tr.On(func(e Event) error {
				if e.Kind == Reshaped {
					told = e.Err
				}
				return nil
			})
			require.NoError(t, tr.Model.Germinate(0, 1, state.GerminationRequest{Slot: 1,
				Kind: kind}))
			require.NoError(t, tr.Model.Kasmina.Do(move(1, state.Training)))
			require.NoError(t, tr.Run(context.Background()))
			require.Error(t, told)
			require.Equal(t, state.Cancelled, tr.Model.Kasmina.Report()[0].Seeds[1].Stage)
		})
	}
	m, err := NewModel(tiny(), tensor.Float32, 1, state.WithoutGates())
	require.NoError(t, err)
	g, err := m.Graph(ForLoss, 1)
	require.NoError(t, err)
	require.NoError(t, m.Germinate(0, 1, state.GerminationRequest{Slot: 1,
		Kind: squareKind(t, "square, graph", true)}))
	require.NoError(t, m.Kasmina.Do(move(1, state.Training), move(1, state.Grafting)))
	r, err := graph.OnCPU(g, g.Loss)
	require.NoError(t, err)
	_, err = r.Run(data.Batch{Inputs: make([]int, m.Config.Seq),
		Targets: make([]int, m.Config.Seq), Count: m.Config.Seq})
	require.ErrorIs(t, err, blueprints.ErrInvalid)
	require.ErrorContains(t, err, "llm.Trainer adds it ahead of a step")
}
