package cudaops

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/state"
)

// Slots of zeros become the same identity starts on a device as on a CPU, when a seed begins to
// compute with them, whether weights and scales are parameters there, another machine's, or sent
// before every run, and if the layer is computed on the host.
func TestKasminaFreshWeights(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testFreshWeights(t, device, 1e-5, fakeOption)
	})
	t.Run("GPU", func(t *testing.T) { testFreshWeights(t, openGPU(t), 1e-5) })
}

func testFreshWeights(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	own, err := ownKind()
	require.NoError(t, err)
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	for _, kind := range []blueprints.Kind{blueprints.AttentionGate, blueprints.LowRank, own} {
		for _, params := range []bool{true, false} {
			a, b := freshGraph(t, seed, kind), freshGraph(t, seed, kind)
			with := append(opts[:len(opts):len(opts)], WithOutputs(a.loss, a.x.Deriv(), a.weights.Deriv()))
			if params {
				with = append(with, WithParams(a.weights, a.scales))
			}
			m, err := NewMachine(device, a.g, with...)
			require.NoError(t, err)
			tape := gorgonia.NewTapeMachine(b.g)
			for step := range uint64(4) {
				if step == 2 { // the others have begun before the first run
					a.germinate(t, kind)
					b.germinate(t, kind)
				}
				a.draw(t, seed+step, nil)
				b.draw(t, seed+step, nil)
				tape.Reset()
				require.NoError(t, m.RunAll())
				require.NoError(t, tape.RunAll())
				for i, n := range []*gorgonia.Node{a.loss, a.x.Deriv(), a.weights.Deriv()} {
					got, err := m.Value(n)
					require.NoError(t, err)
					want := []*gorgonia.Node{b.loss, b.x.Deriv(), b.weights.Deriv()}[i].Value()
					require.Less(t, distance(t, got, want), tolerance, "%v, parameters %v, step %d, value %d",
						kind, params, step, i)
				}
			}
			require.NoError(t, m.Download())
			require.Equal(t, b.weights.Value().Data(), a.weights.Value().Data(), "%v, parameters %v", kind,
				params)
			require.Equal(t, b.scales.Value().Data(), a.scales.Value().Data(), "%v, parameters %v", kind,
				params)
			require.NotZero(t, b.scales.Value().Data().([]float32)[5])
			require.NoError(t, m.Close())
			require.NoError(t, tape.Close())
		}
	}
}

// freshGraph is a graph with wide slots in which nothing is written.
func freshGraph(t *testing.T, seed uint64, kind blueprints.Kind) *kasminaGraph {
	k := newWideKasminaGraph(t, seed, 13, nil)
	require.NoError(t, gorgonia.Let(k.weights,
		tensor.New(tensor.WithShape(k.weights.Shape()...), tensor.Of(tensor.Float32))))
	require.NoError(t, gorgonia.Let(k.scales,
		tensor.New(tensor.WithShape(k.scales.Shape()...), tensor.Of(tensor.Float32))))
	return k
}

// germinate makes the last seed graft a kind in slot 5.
func (k *kasminaGraph) germinate(t *testing.T, kind blueprints.Kind) {
	require.NoError(t, k.lattice.RequestGermination(k.seeds-1,
		state.GerminationRequest{Slot: 5, Kind: kind}))
	require.NoError(t, k.lattice.Transition(k.seeds-1, state.Training))
	require.NoError(t, k.lattice.Transition(k.seeds-1, state.Grafting))
	require.NoError(t, k.lattice.SetAlpha(k.seeds-1, 0.7))
}
