package llm

import (
	"math"
	"slices"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// BenchmarkTelemetry measures training steps of the model that examples/transformer trains by default: without telemetry, with
// all of it, and with that of every fourth step, in turn, and by how much the last two take longer. Of every round it forms the
// ratios, of the time by the clock and of the processor's time, in which other programs show less, and reports the median.
func BenchmarkTelemetry(b *testing.B) {
	c := Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256, Kasmina: []int{0, 1, 2, 3}, Seeds: 16}
	tr := newTrainerOf(b, c.Default(), 8)
	modes := []state.Telemetry{{Mode: state.Off}, {Mode: state.Production}, {Mode: state.Sampling, Every: 4}}
	const steps = 4
	measure := func(mode state.Telemetry) (took [2]float64) {
		for _, l := range tr.Model.Kasmina.Lattices() {
			if err := l.SetTelemetry(mode); err != nil {
				b.Fatal(err)
			}
		}
		start, used := time.Now(), processor.Time(b)
		for range steps {
			if err := tr.step(); err != nil {
				b.Fatal(err)
			}
		}
		return [2]float64{time.Since(start).Seconds() / steps, (processor.Time(b) - used).Seconds() / steps}
	}
	measure(modes[0])
	var off []float64
	var ratios [3][2][]float64
	for round := 0; b.Loop(); round++ {
		var took [3][2]float64
		for i := range modes { // in another order every round
			at := (i + round) % len(modes)
			took[at] = measure(modes[at])
		}
		off = append(off, took[0][0])
		for mode := range modes {
			for clock := range took[0] {
				ratios[mode][clock] = append(ratios[mode][clock], took[mode][clock]/took[0][clock])
			}
		}
	}
	median := func(v []float64) float64 {
		slices.Sort(v)
		return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
	}
	b.ReportMetric(1000*median(off), "ms/step")
	for i, name := range []string{"%all", "%sampled"} {
		b.ReportMetric(100*(median(ratios[i+1][0])-1), name)
		b.ReportMetric(100*(median(ratios[i+1][1])-1), name+"-cpu")
	}
}

func newTrainerOf(b *testing.B, c Config, batch int) *Trainer {
	b.Helper()
	m, err := NewModel(c, tensor.Float32, 1, state.WithoutGates())
	if err != nil {
		b.Fatal(err)
	}
	loader, err := data.NewLoader(&idTokens{ids: make([]int, 50000), tokenizer: "bytes", vocab: 256, fingerprint: "zeros"},
		data.LoaderConfig{Batch: batch, Seq: c.Seq})
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
