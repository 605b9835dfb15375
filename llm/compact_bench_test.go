package llm

import (
	"math"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// eachGenerator runs f with generators of a model of 124 million parameters: one of the model itself, and one of
// its compact form in each type of weights.
func eachGenerator(b *testing.B, f func(b *testing.B, g *Generator)) {
	c := Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
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
			f(b, g)
		})
	}
}

// generate continues a prompt of the given length by first+n tokens, and returns the time that the last n took.
func generate(b *testing.B, g *Generator, prompt, first, n int) time.Duration {
	b.Helper()
	greedy, err := sampler.New(sampler.Config{Vocab: g.config.Vocab})
	if err != nil {
		b.Fatal(err)
	}

	from, i := time.Now(), 0
	for _, err := range g.Generate(b.Context(), make([]int, prompt), first+n, greedy) {
		if err != nil {
			b.Fatal(err)
		}
		if i++; i == first {
			from = time.Now()
		}
	}
	return time.Since(from)
}

// BenchmarkDecode reports how fast a short text is continued by 128 tokens.
func BenchmarkDecode(b *testing.B) {
	eachGenerator(b, func(b *testing.B, g *Generator) {
		const n = 128
		best := time.Duration(math.MaxInt64)
		for b.Loop() {
			best = min(best, generate(b, g, 3, 8, n))
		}
		b.ReportMetric(n/best.Seconds(), "tok/s")
	})
}

// BenchmarkPrefill reports how fast a prompt of 512 tokens is read.
func BenchmarkPrefill(b *testing.B) {
	eachGenerator(b, func(b *testing.B, g *Generator) {
		const n = 512
		best := time.Duration(math.MaxInt64)
		for b.Loop() {
			best = min(best, generate(b, g, n, 0, 1))
		}
		b.ReportMetric(n/best.Seconds(), "tok/s")
	})
}
