package kasmina_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kasmina"
	kernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

const seeds, rows, dim = 2, 3, 8

// layer is a Kasmina layer with its backward pass on a fake GPU.
type layer struct {
	*passtest.Rig
	*kasmina.Layers
	lattice *state.Lattice
}

func newLayer(t *testing.T, telemetry state.Telemetry) *layer {
	t.Helper()
	g := gorgonia.NewGraph()
	lattice, err := state.NewLattice(seeds, dim, state.WithoutGates(), state.WithTelemetry(telemetry))
	require.NoError(t, err)
	weights, scales := passtest.Node(g, "weights", 3, dim/seeds), passtest.Node(g, "scales", 3)
	y, err := op.Kasmina(gorgonia.Must(gorgonia.Tanh(passtest.Node(g, "x", rows, dim))), weights,
		scales, lattice, op.WithGradClip(1))
	require.NoError(t, err)
	loss := gorgonia.Must(op.CrossEntropy(y, passtest.Ints(g, "targets", 1, 0, 4)))
	_, err = gorgonia.Grad(loss, weights, scales)
	require.NoError(t, err)

	l := &layer{Rig: passtest.New(t, g, lower.Options{Asked: graph.Asked{
		Params: gorgonia.Nodes{weights, scales}}}), lattice: lattice}
	l.Layers, err = kasmina.New(&kasmina.Runtime{Runner: l.Runner, Warn: func(string) {}})
	require.NoError(t, err)
	l.Runner.Pass = l.Layers.Run
	return l
}

// run enqueues the passes of a run and returns their launches.
func (l *layer) run(t *testing.T) (forward kernel.Forward, backward kernel.Backward) {
	t.Helper()
	l.Launches = nil
	require.NoError(t, l.Before())
	for _, c := range l.Program.Calls {
		if p, ok := c.Params.(*program.KasminaPass); ok {
			require.NoError(t, l.Layers.Run(c, p))
		}
	}
	require.Len(t, l.Launches, 2)
	return l.Launches[0].(kernel.Forward), l.Launches[1].(kernel.Backward)
}

// count writes counts of clipped rows to the report on the device, as a backward pass does.
func (l *layer) count(t *testing.T, b kernel.Backward, clipped ...uint32) {
	t.Helper()
	require.NoError(t, l.Ctx.CopyToDevice(b.Clipped, gpu.Bytes(clipped), l.Runner.Stream))
	require.NoError(t, l.Ctx.SyncStream(l.Runner.Stream))
}

func (l *layer) clips() (clips []int) {
	for _, s := range l.lattice.Report().Seeds {
		clips = append(clips, s.Clips)
	}
	return clips
}

// TestPasses checks that passes collect the telemetry that the lattice requests, and write it to the
// layer's report.
func TestPasses(t *testing.T) {
	for mode, want := range map[state.TelemetryMode]struct{ telemetry, histogram bool }{
		state.Off: {}, state.Production: {true, false}, state.Debug: {true, true},
	} {
		l := newLayer(t, state.Telemetry{Mode: mode})
		f, b := l.run(t)
		require.Equal(t, want.telemetry, f.Telemetry, mode)
		require.Equal(t, want.telemetry, b.Telemetry, mode)
		require.Equal(t, want.histogram, f.Histogram != 0, mode)
		require.True(t, b.Clip, mode)

		reports := l.Program.Reports.Ptr()
		at := func(word int) gpu.Ptr { return reports.Offset(4 * word * seeds) }
		require.Equal(t, at(program.KasminaBadX), f.Bad)
		require.Equal(t, at(program.KasminaHealth), f.Figures)
		require.Equal(t, at(program.KasminaBadG), b.Bad)
		require.Equal(t, at(program.KasminaClipped), b.Clipped)
		require.Equal(t, at(program.KasminaGradient), b.Figures)
		require.NoError(t, l.After())
	}
}

// TestReports checks that Flush delivers the counts added since the previous run to the lattice.
func TestReports(t *testing.T) {
	l := newLayer(t, state.Telemetry{Mode: state.Off})
	_, b := l.run(t)
	l.count(t, b, 3, 0)
	require.NoError(t, l.After())
	require.Equal(t, []int{0, 0}, l.clips(), "the report has not been received")
	require.NoError(t, l.Flush())
	require.Equal(t, []int{3, 0}, l.clips())

	l.run(t)
	l.count(t, b, 4, 2) // the device's counts accumulate
	require.NoError(t, l.After())
	require.NoError(t, l.Flush())
	require.Equal(t, []int{4, 2}, l.clips())
}

// TestUnreportedRun checks that counts of a run that fails before its report don't reach the lattice.
func TestUnreportedRun(t *testing.T) {
	l := newLayer(t, state.Telemetry{Mode: state.Off})
	_, b := l.run(t)
	l.count(t, b, 1, 1)
	require.NoError(t, l.After())

	l.run(t) // simulates a failure after the passes: After is not called
	l.count(t, b, 5, 1)

	l.run(t)
	l.count(t, b, 5, 3)
	require.NoError(t, l.After())
	require.NoError(t, l.Flush())
	require.Equal(t, []int{1, 3}, l.clips())
}

// TestState checks that a lattice's state is sent before the first run and after each change, but not
// otherwise.
func TestState(t *testing.T) {
	l := newLayer(t, state.Telemetry{Mode: state.Off})
	sent := func() (n int) {
		l.Ctx.Trace = nil
		require.NoError(t, l.Before())
		for _, op := range l.Ctx.Trace {
			if op.Call == "cuMemcpyHtoDAsync" {
				n++
			}
		}
		require.NoError(t, l.After())
		return n
	}

	require.Equal(t, 1, sent())
	require.Zero(t, sent())

	require.NoError(t, l.lattice.RequestGermination(0, state.GerminationRequest{Slot: 1,
		Kind: blueprints.Residual}))
	for _, s := range []state.Stage{state.Training, state.Grafting} {
		require.NoError(t, l.lattice.Transition(0, s))
	}

	require.NotZero(t, sent())
	require.Zero(t, sent())
}

// TestAppendMode checks that runs with different telemetry have different modes.
func TestAppendMode(t *testing.T) {
	l := newLayer(t, state.Telemetry{Mode: state.Off})
	mode := func() string {
		require.NoError(t, l.Before())
		defer func() { require.NoError(t, l.After()) }()
		return string(l.AppendMode(nil))
	}
	off := mode()
	require.Equal(t, off, mode())
	require.NoError(t, l.lattice.SetTelemetry(state.Telemetry{Mode: state.Debug}))
	require.NotEqual(t, off, mode())
	require.False(t, l.OnHost())
}
