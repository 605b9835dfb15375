package kasmina

import (
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/seed"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
	"github.com/kasmina-go/kasmina/state"
)

// Bench times layers in which each seed has a slot of its own and the four kinds take turns. All
// seeds are in grafting or, with "stages", in all stages in turn; with exact telemetry or without.
func Bench(b *bench.B) {
	for _, s := range []struct{ rows, seeds int }{{32768, 1024}, {1024, 1000}, {64, 1000}} {
		for _, stages := range []bool{false, true} {
			newBenchLayer(b, s.rows, s.seeds, stages).measure()
			b.Free()
		}
	}
}

// benchLayer is a layer with its operands.
type benchLayer struct {
	*bench.B
	Layer
	name                  string // what follows the pass
	elements              int
	y, g, dx, dw, ds      gpu.Ptr
	health, gradient, bad gpu.Ptr // bad: three counts of each seed
	forwardWork, backWork gpu.Ptr
}

func newBenchLayer(b *bench.B, rows, seeds int, stages bool) *benchLayer {
	const chunk = 4
	slots, n := seeds+1, rows*seeds*chunk
	l := &benchLayer{B: b, elements: n, name: fmt.Sprintf("%dx%d_s%d", rows, seeds*chunk, seeds)}
	if stages {
		l.name += "_stages"
	}
	l.Layer = Layer{X: b.Normal(n, gpu.BFloat16), Weights: b.Normal(slots*chunk, gpu.Float32),
		Scales: b.Normal(slots, gpu.Float32),
		State:  State{Seeds: seeds, Slots: slots}, Rows: rows, Chunk: chunk, Eps: 1e-8,
		Stability: seed.Adaptive, Type: gpu.BFloat16}
	data := make([]byte, l.State.Bytes())
	b.Do(l.State.Encode(data, func(i int) seed.Seed { return benchSeed(b, i, stages) }))
	l.State.Ptr = b.Upload(data)
	l.y, l.g, l.dx = b.Alloc(n, gpu.BFloat16), b.Normal(n, gpu.BFloat16), b.Alloc(n, gpu.BFloat16)
	l.dw, l.ds = b.Alloc(slots*chunk, gpu.Float32), b.Alloc(slots, gpu.Float32)
	l.health, l.gradient = b.Alloc(ForwardFigures*seeds, gpu.Float32),
		b.Alloc(BackwardFigures*seeds, gpu.Float32)
	l.bad = b.Floats(make([]float32, 3*seeds))
	l.forwardWork = b.Alloc(Forward{Layer: l.Layer}.WorkspaceBytes(b.Info)/4, gpu.Float32)
	l.backWork = b.Alloc(Backward{Layer: l.Layer}.WorkspaceBytes(b.Info)/4, gpu.Float32)
	return l
}

// benchSeed is what a layer's seed i does.
func benchSeed(b *bench.B, i int, stages bool) seed.Seed {
	const kinds = 4
	stage, kind := state.Grafting, i%kinds
	if stages {
		all := int(state.RolledBack) + 1
		stage, kind = state.Stage(i%all), i/all%kinds
	}
	s := seed.Seed{Kind: blueprints.Kind(kind), Slot: uint16(i + 1), Blend: stage.Blends(),
		Learn: stage.Learns(), Alpha: 1}
	if stage == state.Grafting || stage == state.Stabilization || stage == state.Evaluating {
		s.Alpha = b.Random.Float32()
	}
	return s
}

func (l *benchLayer) measure() {
	size := 2 * float64(l.elements)
	for _, telemetry := range []bool{false, true} {
		name := l.name
		if telemetry {
			name += "_telemetry"
		}
		l.Time(bench.Measurement{Name: "kasmina_fwd_" + name, Bytes: 2 * size}, func() error {
			return Forward{Layer: l.Layer, Y: l.y, Telemetry: telemetry,
				Figures: l.health, Bad: l.bad, Workspace: l.forwardWork}.Launch(l.Set, l.Stream)
		})
		l.Time(bench.Measurement{Name: "kasmina_bwd_" + name, Bytes: 3 * size}, func() error {
			return Backward{Layer: l.Layer, DX: l.dx, DWeights: l.dw,
				DScales: l.ds, G: l.g, Telemetry: telemetry, Figures: l.gradient,
				Bad:     l.bad.Offset(4 * l.State.Seeds),
				Clipped: l.bad.Offset(8 * l.State.Seeds), Workspace: l.backWork}.Launch(l.Set,
				l.Stream)
		})
	}
}
