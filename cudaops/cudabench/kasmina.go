package cudabench

import (
	"fmt"

	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/state"
)

// kasmina measures layers in which each seed has a slot of its own and the four kinds take turns: all seeds in grafting, or
// ("stages") all stages in turn; with exact telemetry or without.
func kasmina(b *bench) {
	for _, s := range []struct{ rows, seeds int }{{32768, 1024}, {1024, 1000}, {64, 1000}} {
		for _, stages := range []bool{false, true} {
			newKasmina(b, s.rows, s.seeds, stages).measure()
			b.free()
		}
	}
}

// kasminaLayer is a layer with its operands.
type kasminaLayer struct {
	*bench
	kasminakernel.Layer
	name                  string // what follows the pass
	elements              int
	y, g, dx, dw, ds      gpu.Ptr
	health, gradient, bad gpu.Ptr // bad: three counts of each seed
	forwardWork, backWork gpu.Ptr
}

func newKasmina(b *bench, rows, seeds int, stages bool) *kasminaLayer {
	const chunk = 4
	slots, n := seeds+1, rows*seeds*chunk
	l := &kasminaLayer{bench: b, elements: n, name: fmt.Sprintf("%dx%d_s%d", rows, seeds*chunk, seeds)}
	if stages {
		l.name += "_stages"
	}
	l.Layer = kasminakernel.Layer{X: b.normal(n, bf16), Weights: b.normal(slots*chunk, f32), Scales: b.normal(slots, f32),
		State: kasminakernel.State{Seeds: seeds, Slots: slots}, Rows: rows, Chunk: chunk, Eps: 1e-8,
		Stability: kasminakernel.Adaptive, Type: bf16}
	data := make([]byte, l.State.Bytes())
	b.do(l.State.Encode(data, func(i int) kasminakernel.Seed { return b.seed(i, stages) }))
	l.State.Ptr = b.upload(data)
	l.y, l.g, l.dx = b.alloc(n, bf16), b.normal(n, bf16), b.alloc(n, bf16)
	l.dw, l.ds = b.alloc(slots*chunk, f32), b.alloc(slots, f32)
	l.health, l.gradient = b.alloc(kasminakernel.ForwardFigures*seeds, f32), b.alloc(kasminakernel.BackwardFigures*seeds, f32)
	l.bad = b.floats(make([]float32, 3*seeds))
	l.forwardWork = b.alloc(kasminakernel.ForwardWorkspace(b.Set, l.Layer)/4, f32)
	l.backWork = b.alloc(kasminakernel.BackwardWorkspace(b.Set, l.Layer, false)/4, f32)
	return l
}

// seed is what a layer's seed i does.
func (b *bench) seed(i int, stages bool) kasminakernel.Seed {
	const kinds = 4
	stage, kind := state.Grafting, i%kinds
	if stages {
		all := int(state.RolledBack) + 1
		stage, kind = state.Stage(i%all), i/all%kinds
	}
	s := kasminakernel.Seed{Kind: uint8(kind), Slot: uint16(i + 1), Blend: stage.Blends(), Learn: stage.Learns(), Alpha: 1}
	if stage == state.Grafting || stage == state.Stabilization || stage == state.Evaluating {
		s.Alpha = b.random.Float32()
	}
	return s
}

func (l *kasminaLayer) measure() {
	size := 2 * float64(l.elements)
	for _, telemetry := range []bool{false, true} {
		name := l.name
		if telemetry {
			name += "_telemetry"
		}
		l.time(Measurement{Name: "kasmina_fwd_" + name, Bytes: 2 * size}, func() error {
			return kasminakernel.Forward{Layer: l.Layer, Y: l.y, Telemetry: telemetry,
				Figures: l.health, Bad: l.bad, Workspace: l.forwardWork}.Launch(l.Set, l.stream)
		})
		l.time(Measurement{Name: "kasmina_bwd_" + name, Bytes: 3 * size}, func() error {
			return kasminakernel.Backward{Layer: l.Layer, DX: l.dx, DWeights: l.dw,
				DScales: l.ds, G: l.g, Telemetry: telemetry, Figures: l.gradient, Bad: l.bad.Offset(4 * l.State.Seeds),
				Clipped: l.bad.Offset(8 * l.State.Seeds), Workspace: l.backWork}.Launch(l.Set, l.stream)
		})
	}
}
