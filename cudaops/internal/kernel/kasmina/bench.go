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
			benchLayer(b, s.rows, s.seeds, stages)
			b.Free()
		}
	}
}

func benchLayer(b *bench.B, rows, seeds int, stages bool) {
	const chunk, t = 4, gpu.BFloat16
	slots, n := seeds+1, rows*seeds*chunk
	name := fmt.Sprintf("%dx%d_s%d", rows, seeds*chunk, seeds)
	if stages {
		name += "_stages"
	}
	l := Layer{X: b.Normal(n, t), Weights: b.Normal(slots*chunk, gpu.Float32),
		Scales: b.Normal(slots, gpu.Float32), State: State{Seeds: seeds, Slots: slots}, Rows: rows,
		Chunk: chunk, Eps: 1e-8, Stability: seed.Adaptive, Type: t}
	data := make([]byte, l.State.Bytes())
	b.Do(l.State.Encode(data, func(i int) seed.Seed { return benchSeed(b, i, stages) }))
	l.State.Ptr = b.Upload(data)
	counts := b.Zeros(3*seeds, gpu.Float32)
	forward := Forward{Layer: l, Y: b.Alloc(n, t), Bad: counts,
		Figures:   b.Alloc(ForwardFigures*seeds, gpu.Float32),
		Workspace: b.Alloc(Forward{Layer: l}.WorkspaceBytes(b.Info)/4, gpu.Float32)}
	backward := Backward{Layer: l, DX: b.Alloc(n, t), DWeights: b.Alloc(slots*chunk, gpu.Float32),
		DScales: b.Alloc(slots, gpu.Float32), G: b.Normal(n, t), Bad: counts.Offset(4 * seeds),
		Clipped: counts.Offset(8 * seeds), Figures: b.Alloc(BackwardFigures*seeds, gpu.Float32),
		Workspace: b.Alloc(Backward{Layer: l}.WorkspaceBytes(b.Info)/4, gpu.Float32)}
	size := 2 * float64(n)
	for _, telemetry := range []bool{false, true} {
		if forward.Telemetry, backward.Telemetry = telemetry, telemetry; telemetry {
			name += "_telemetry"
		}
		b.Moves("kasmina_fwd_"+name, 2*size, forward)
		b.Moves("kasmina_bwd_"+name, 3*size, backward)
	}
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
