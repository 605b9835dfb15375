package cudaops

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// slowKasmina is kernels whose passes take as long as they are told, and longer with telemetry.
type slowKasmina struct {
	kernels.Launcher
	fake                         *fakeKernels
	forward, backward, telemetry time.Duration
}

func (k *slowKasmina) Launch(s gpu.Stream, params any) error {
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}
	took, measures := time.Duration(0), false
	switch p := params.(type) {
	case kasmina.Forward:
		took, measures = k.forward, p.Telemetry
	case kasmina.Backward:
		took, measures = k.backward, p.Telemetry
	default:
		return nil
	}
	if measures {
		took += k.telemetry
	}
	return k.fake.launch(s, func(l *fake.Launch) { l.Took = took })
}

// TestKasminaTiming wants a machine with a monitor to tell the lattice what its passes take and what telemetry costs, and all
// else to be as without: the same bits, figures and counts.
func TestKasminaTiming(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	for _, mode := range []state.TelemetryMode{state.Production, state.Off} {
		opts := []state.Option{state.WithTelemetry(state.Telemetry{Mode: mode})}
		var graphs [2]*kasminaGraph
		var machines [2]*Machine
		for i := range graphs {
			device, _, fakeOption := openFake(t, fake.Config{})
			slow := withKernels(func(k kernels.Launcher) kernels.Launcher {
				return &slowKasmina{Launcher: k, fake: fakeOf(k), forward: 2 * time.Millisecond,
					backward: 4 * time.Millisecond, telemetry: 300 * time.Microsecond}
			})
			graphs[i] = newKasminaGraph(t, seed, opts, op.WithGradClip(0.05))
			more := []MachineOption{fakeOption, slow, WithMonitor(3)}
			machines[i] = graphs[i].open(t, device, more[:2+i]...)
			defer machines[i].Close()
		}
		for step := range uint64(30) {
			for i, m := range machines {
				graphs[i].draw(t, seed+step, func(x []float32) { x[5] = float32(math.NaN()) })
				if err := m.RunAll(); err != nil {
					t.Fatal(err)
				}
				if _, err := m.Value(graphs[i].loss); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, n := range [][2]*node{{graphs[0].x.Deriv(), graphs[1].x.Deriv()}, {graphs[0].weights.Deriv(), graphs[1].weights.Deriv()}} {
			var bits [2][]float32
			for i, m := range machines {
				v, err := m.Value(n[i])
				if err != nil {
					t.Fatal(err)
				}
				bits[i] = flat(t, v)
			}
			for i, v := range bits[0] {
				if math.Float32bits(v) != math.Float32bits(bits[1][i]) {
					t.Fatalf("%v: element %d is %v, with a monitor %v", n[0], i, v, bits[1][i])
				}
			}
		}
		plain, timed := graphs[0].lattice.Report(), graphs[1].lattice.Report()
		sameReports(t, "with a monitor", timed, plain)
		if plain.Layer.Clips == 0 || plain.Layer.Errors == 0 || plain.Layer.Timed != 0 {
			t.Errorf("%v: without a monitor: %+v", mode, plain.Layer)
		}
		if l := timed.Layer; mode == state.Off {
			if l.Timed != 0 {
				t.Errorf("without telemetry: %+v", l)
			}
			continue
		}
		k := graphs[1]
		// x and y, the gradients of both, and x again of the seeds that are neither dormant nor Residual.
		bytes, perRun := 4*float64(k.rows*(4*k.dim+5*k.chunk)), (6 * time.Millisecond).Seconds()
		l := timed.Layer
		if l.Timed < 2 || l.Timed != 2*machines[1].monitor.Samples() || math.Abs(l.Kernel.Seconds()/(perRun/2)-1) > 0.01 || math.Abs(l.Overhead-10) > 0.1 ||
			math.Abs(l.Bandwidth/(bytes/perRun)-1) > 0.01 {
			t.Errorf("%+v, want a kernel's time of %v s, 10 %% of overhead and %v bytes/s", l, perRun/2, bytes/perRun)
		}
	}
}
