package op_test

import (
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// One pass in 128 is timed, forward and backward, unless the layer leaves no telemetry, and counts as one pass in every other
// respect.
func TestKasminaTiming(t *testing.T) {
	for name, c := range map[string]struct {
		mode  state.TelemetryMode
		opts  []op.KasminaOption
		timed int
	}{
		"production":        {state.Production, nil, 4},
		"debug":             {state.Debug, nil, 4},
		"off":               {state.Off, nil, 0},
		"without telemetry": {state.Production, []op.KasminaOption{op.WithoutTelemetry()}, 0},
	} {
		l, err := state.NewLattice(3, 12, state.WithTelemetry(state.Telemetry{Mode: c.mode}))
		if err != nil {
			t.Fatal(err)
		}
		k := newKasminaLayer(t, random(t), tensor.Float32, 400, 2, l, c.opts...)
		for range 130 {
			k.forward()
			k.backward()
		}
		r := l.Report()
		if r.Layer.Timed != c.timed || (r.Layer.Kernel > 0) != (c.timed > 0) || (r.Layer.Bandwidth > 0) != (c.timed > 0) || r.Layer.Overhead < 0 {
			t.Errorf("%s: %+v, want %d timed", name, r.Layer, c.timed)
		}
		if len(c.opts) == 0 && r.Step != 130 {
			t.Errorf("%s: %d passes are counted, want 130", name, r.Step)
		}
	}
}
