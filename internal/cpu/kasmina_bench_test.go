package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
)

// mixedKasmina returns a layer whose seeds are in all situations that stages and kinds make: of every eight, three take no
// part, one learns beside its chunk, two blend and learn and two only blend. All are measured.
func mixedKasmina[T Float](tb testing.TB, rows, seeds, chunk, slots int) *Kasmina[T] {
	k := &Kasmina[T]{Rows: rows, Seeds: seeds, Chunk: chunk, Slots: slots, Width: chunk, Stability: StabilityAdaptive, Eps: 1e-8, Measure: make([]bool, seeds)}
	for s := range seeds {
		k.Measure[s] = true
		stage := s % 8
		if stage < 3 {
			continue
		}
		err := k.Activate(KasminaSeed[T]{Seed: s, Slot: s % slots, Kind: blueprints.Kind(s / 8 % 4), Blend: stage > 3, Learn: stage < 6, Alpha: T(stage-2) / 5})
		if err != nil {
			tb.Fatal(err)
		}
	}
	return k
}

// BenchmarkKasminaBandwidth reports the bytes that a pass must move, a second: x and y, or x, g and dx, and its share of what
// a copy of the same size reaches on the same cores. Each is the best of many runs, and they take turns.
func BenchmarkKasminaBandwidth(b *testing.B) {
	for _, s := range []struct{ rows, seeds, chunk int }{
		{1024, 256, 16}, {1024, 1024, 4}, {1024, 64, 64}, {4096, 256, 16}, {1024, 4, 1024}, {1024, 4096 / 12, 12},
	} {
		k := mixedKasmina[float32](b, s.rows, s.seeds, s.chunk, 64)
		n := s.rows * s.seeds * s.chunk
		r := rand.New(rand.NewPCG(1, 2))
		random := func(n int) []float32 {
			v := make([]float32, n)
			for i := range v {
				v[i] = float32(r.NormFloat64())
			}
			return v
		}
		x, g, y := random(n), random(n), random(n)
		weights, scales := random(k.Slots*k.Width), random(k.Slots)
		dw, da := make([]float32, len(weights)), make([]float32, len(scales))
		for name, pass := range map[string]struct {
			bytes int
			run   func()
		}{
			"forward":  {8, func() { k.Forward(y, x, weights, scales) }},
			"backward": {12, func() { k.Backward(y, dw, da, g, x, weights, scales) }},
		} {
			b.Run(fmt.Sprintf("%s/%dx%dx%d", name, s.rows, s.seeds, s.chunk), func(b *testing.B) {
				copied, passed := time.Hour, time.Hour
				b.ReportAllocs()
				for b.Loop() {
					start := time.Now()
					Parallel(n, 1<<16, func(lo, hi int) { copy(y[lo:hi], x[lo:hi]) })
					half := time.Now()
					pass.run()
					copied, passed = min(copied, half.Sub(start)), min(passed, time.Since(half))
				}
				speed, limit := float64(pass.bytes*n)/passed.Seconds(), float64(8*n)/copied.Seconds()
				b.ReportMetric(speed/1e9, "GB/s")
				b.ReportMetric(100*speed/limit, "%copy")
			})
		}
	}
}
