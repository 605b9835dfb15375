package llm

import (
	"math"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// BenchmarkDecode reports how fast a model of 124 million parameters continues a short text by 128 tokens,
// as it is and with compact weights.
func BenchmarkDecode(b *testing.B) {
	c := Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	if err != nil {
		b.Fatal(err)
	}
	greedy, err := sampler.New(sampler.Config{Vocab: c.Vocab})
	if err != nil {
		b.Fatal(err)
	}

	for _, name := range []string{"model", "f32", "bf16", "q8_0"} {
		b.Run(name, func(b *testing.B) {
			g, err := NewGenerator(m)
			if err != nil {
				b.Fatal(err)
			}
			var t cpuops.WeightType
			if t.UnmarshalText([]byte(name)) == nil {
				compact, err := m.Compact(t)
				if err != nil {
					b.Fatal(err)
				}
				g = compact.Generator()
			}
			defer g.Close()

			best := time.Duration(math.MaxInt64)
			for b.Loop() {
				const warm, n = 8, 128
				var from time.Time
				i := 0
				for _, err := range g.Generate(b.Context(), []int{1, 2, 3}, warm+n, greedy) {
					if err != nil {
						b.Fatal(err)
					}
					if i++; i == warm {
						from = time.Now()
					}
				}
				best = min(best, time.Since(from)/n)
			}
			b.ReportMetric(1/best.Seconds(), "tok/s")
		})
	}
}
