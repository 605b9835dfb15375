package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// ownLife is what becomes of a seed with a registered kind, and where its layer is computed then.
var ownLife = []struct {
	to     state.Stage
	onHost bool
}{{state.Dormant, false}, {state.Germinated, false}, {state.Training, true}, {state.Grafting, true}, {state.FineTuning, true},
	{state.RolledBack, false}}

// live moves a seed on in a life of the given kind.
func live(l *state.Lattice, seed int, to state.Stage, kind blueprints.Kind) error {
	switch to {
	case state.Dormant:
		return nil
	case state.Germinated:
		return l.RequestGermination(seed, state.GerminationRequest{Slot: 3, Kind: kind})
	case state.Grafting:
		return errors.Join(l.Transition(seed, to), l.SetAlpha(seed, 0.7))
	case state.FineTuning:
		return errors.Join(l.Transition(seed, state.Stabilization), l.Transition(seed, state.Evaluating), l.Transition(seed, to))
	}
	return l.Transition(seed, to)
}

// TestKasminaMovesToHost wants a layer in which a registered kind starts to train in mid run to be
// computed on the host from then on, after one warning that names the kind, and on the device again
// when the kind is gone: as right and as well reported as on the CPU, with runs captured on the
// device before and after.
func TestKasminaMovesToHost(t *testing.T) {
	for _, width := range []int{3, 13} {
		for name, layer := range map[string][]op.KasminaOption{
			"default": {op.WithGradClip(0.05)}, "strict": {op.WithStability(op.Strict)}, "adaptive": {op.WithAdaptiveGradClip(0.1)},
		} {
			t.Run(fmt.Sprintf("%s/%d", name, width), func(t *testing.T) {
				device, _, fakeOption := openFake(t, fake.Config{})
				testKasminaMovesToHost(t, device, width, layer, fakeOption)
				testKasminaMovesToHost(t, device, width, layer, fakeOption, scaledGradients)
				testKasminaMovesToHost(t, device, width, layer, fakeOption, WithMonitor(2))
			})
		}
	}
	t.Run("GPU", func(t *testing.T) { testKasminaMovesToHost(t, openGPU(t), 3, nil) })
}

func testKasminaMovesToHost(t *testing.T, device *Device, width int, layer []op.KasminaOption, opts ...MachineOption) {
	kind, err := ownKind()
	require.NoError(t, err)
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	a, b := newWideKasminaGraph(t, seed, width, nil, layer...), newWideKasminaGraph(t, seed, width, nil, layer...)
	var log bytes.Buffer
	m := a.open(t, device, append(opts, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
	defer m.Close()
	tape := gorgonia.NewTapeMachine(b.g)
	defer tape.Close()
	for _, c := range ownLife {
		for step := range uint64(3) {
			at := fmt.Sprintf("%v, step %d", c.to, step)
			for _, k := range []*kasminaGraph{a, b} {
				k.draw(t, seed+step, nil)
				if step == 0 {
					require.NoError(t, live(k.lattice, k.seeds-1, c.to, kind))
				}
			}
			tape.Reset()
			before := device.ctx.Stats()
			require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()), at)
			captured := device.ctx.Stats().Sub(before).GraphLaunches > 0
			require.Equal(t, c.onHost, m.runner.OnHost(), at)
			require.Equal(t, !c.onHost && (step > 0 || c.to != state.Dormant), captured, at)
			nodes := gorgonia.Nodes{a.loss, a.x.Deriv(), a.weights.Deriv(), a.scales.Deriv()}
			for i, want := range (gorgonia.Nodes{b.loss, b.x.Deriv(), b.weights.Deriv(), b.scales.Deriv()}) {
				v, err := m.Value(nodes[i])
				require.NoError(t, err)
				require.Less(t, distance(t, v, want.Value()), 1e-4, "%s: value %d", at, i)
			}
			sameReports(t, at, a.lattice.Report(), b.lattice.Report())
		}
	}
	sameReports(t, "history", a.lattice.History(), b.lattice.History())
	require.Equal(t, 1, strings.Count(log.String(), "has no kernel"), log.String())
	require.Contains(t, log.String(), `machine test's own`)
}
