package kasmina

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// mixedLayer returns a layer with seeds of all stages and kinds. Of every eight seeds, three are
// inactive, one learns without blending, two blend and learn, and two only blend. All are measured.
func mixedLayer[T cpu.Float](tb testing.TB, rows, seeds, chunk, slots int) *Layer[T] {
	k := &Layer[T]{Rows: rows, Seeds: seeds, Chunk: chunk, Slots: slots, Width: chunk,
		Stability: seed.Adaptive, Eps: 1e-8, Measure: make([]bool, seeds)}
	for s := range seeds {
		k.Measure[s] = true
		stage := s % 8
		if stage < 3 {
			continue
		}
		err := k.Activate(s, seed.Seed{Slot: uint16(1 + s%(slots-1)),
			Kind: blueprints.Kind(s / 8 % 4), Blend: stage > 3, Learn: stage < 6,
			Alpha: float32(stage-2) / 5})
		if err != nil {
			tb.Fatal(err)
		}
	}

	return k
}

// BenchmarkBandwidth reports the bytes per second that a pass must move: x and y, or x, g and dx.
// It compares them with two copies on the same cores, one of 128 MiB, which exceeds all caches
// (%memory), and one of the size of y, which a large cache can hold (%copy). Each result is the
// best of many runs, which alternate.
func BenchmarkBandwidth(b *testing.B) {
	from, to := make([]float32, 1<<25), make([]float32, 1<<25)
	for i := range from { // otherwise all pages would map to one
		from[i] = float32(i)
	}

	parallelCopy := func(dst, src []float32) time.Duration {
		start := time.Now()
		cpu.Parallel(len(dst), 1<<18, func(lo, hi int) { copy(dst[lo:hi], src[lo:hi]) })
		return time.Since(start)
	}
	for _, s := range []struct{ rows, seeds, chunk int }{
		{1024, 256, 16}, {1024, 1024, 4}, {1024, 64, 64}, {4096, 256, 16}, {1024, 4, 1024},
		{1024, 4096 / 12, 12},
	} {
		k := mixedLayer[float32](b, s.rows, s.seeds, s.chunk, 64)
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
				copied, large, passed, i := time.Hour, time.Hour, time.Hour, 0
				for b.Loop() {
					copied = min(copied, parallelCopy(y, x))
					start := time.Now()
					pass.run()
					passed = min(passed, time.Since(start))
					if i++; i%10 == 1 {
						large = min(large, parallelCopy(to, from))
					}
				}

				speed := float64(pass.bytes*n) / passed.Seconds()
				b.ReportMetric(speed/1e9, "GB/s")
				b.ReportMetric(100*speed*copied.Seconds()/float64(8*n), "%copy")
				b.ReportMetric(100*speed*large.Seconds()/float64(8*len(to)), "%memory")
			})
		}
	}
}
