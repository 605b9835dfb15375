package llm

import (
	"math"
	"slices"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// BenchmarkTelemetry measures training steps of the model that examples/transformer trains by default: without telemetry, with
// all of it, and with that of every fourth step, in turn, and by how much the last two are slower. It takes the first quartile of
// each, in which what other programs do to the processor shows less.
func BenchmarkTelemetry(b *testing.B) {
	c := Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256, Kasmina: []int{0, 1, 2, 3}, Seeds: 16}
	tr := newTrainerOf(b, c.Default(), 8)
	modes := []state.Telemetry{{Mode: state.Off}, {Mode: state.Production}, {Mode: state.Sampling, Every: 4}}
	times := make([][]float64, len(modes))
	for b.Loop() {
		for i, mode := range modes {
			for _, l := range tr.Model.Kasmina.Lattices() {
				if err := l.SetTelemetry(mode); err != nil {
					b.Fatal(err)
				}
			}
			start := time.Now()
			for range 4 {
				if err := tr.step(); err != nil {
					b.Fatal(err)
				}
			}
			times[i] = append(times[i], time.Since(start).Seconds()/4)
		}
	}
	quartile := func(t []float64) float64 {
		slices.Sort(t)
		return t[len(t)/4]
	}
	off := quartile(times[0])
	b.ReportMetric(1000*off, "ms/step")
	b.ReportMetric(100*(quartile(times[1])/off-1), "%all")
	b.ReportMetric(100*(quartile(times[2])/off-1), "%sampled")
}

func newTrainerOf(b *testing.B, c Config, batch int) *Trainer {
	b.Helper()
	m, err := NewModel(c, tensor.Float32, 1, state.WithoutGates())
	if err != nil {
		b.Fatal(err)
	}
	loader, err := NewLoader(&memoryTokens{ids: make([]uint32, 50000), tokenizer: "bytes", vocabSize: 256, fingerprint: "zeros"},
		LoaderConfig{Batch: batch, Seq: c.Seq})
	if err != nil {
		b.Fatal(err)
	}
	optimizer, err := adamW()
	if err != nil {
		b.Fatal(err)
	}
	tr, err := NewTrainer(m, loader, optimizer, TrainConfig{Steps: math.MaxInt, Batch: batch, Schedule: optim.Constant(1e-4)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { tr.Close() })
	return tr
}
