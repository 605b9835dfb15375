package kasmina

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// TestKasminaEndsTogether wants launches that end many passes over different layers to give the
// bits of those that end one.
func TestKasminaEndsTogether(t *testing.T) {
	g := kerneltest.NewRig(t)
	cases := []kasminaCase{
		{rows: 1500, seeds: 16, chunk: 48, slots: 17, dtype: kerneltest.Bf16, telemetry: true},
		{rows: 1500, seeds: 16, chunk: 48, slots: 17, dtype: kerneltest.Bf16},
		{rows: 1100, seeds: 200, chunk: 4, slots: 3, dtype: kerneltest.Bf16, telemetry: true},
		{rows: 64, seeds: 40, chunk: 8, slots: 9, dtype: kerneltest.Bf16, telemetry: true},
		{rows: 3, seeds: 5, chunk: 7, slots: 2, dtype: kerneltest.F32, telemetry: true},
		// norms take another pass, and the ends are made at once
		{rows: 130, seeds: 2, chunk: 520, slots: 4, dtype: kerneltest.F16, telemetry: true},
		{rows: 1200, seeds: 3, chunk: 64, slots: 300, dtype: kerneltest.Bf16,
			telemetry: true, clip: true},
		{rows: 90, seeds: 6, chunk: 16, slots: 5, dtype: kerneltest.F32,
			telemetry: true, reduction: seed.Max},
	}
	var records []Records
	var parts []Parts
	var runs []*kasminaRun
	var want [][][]float64
	results := func(r *kasminaRun) [][]float64 {
		return [][]float64{g.Read(r.health), g.Read(r.gradient), g.Read(r.dw), g.Read(r.ds),
			g.Read(r.y), g.Read(r.dx)}
	}
	for i := range kasminaSumsMost + 5 {
		c := cases[i%len(cases)]
		c.from, c.deviation = i, 1
		r := newKasmina(g, c, nil)
		f, b := r.forwardPass(), r.backwardPass()
		f.Reduction = c.reduction
		g.Must(f.Launch(g.Set, g.Stream))
		g.Must(b.Launch(g.Set, g.Stream))
		runs, want = append(runs, r), append(want, results(r))
		for _, x := range []*kerneltest.Buffer{r.health, r.gradient, r.dw, r.ds} {
			g.Must(elementwise.Fill(g.Set, g.Stream, x.Ptr, -3, x.N, gpu.Float32))
		}
		f.Records, b.Parts = &Records{Seeds: -1}, &Parts{Units: -1}
		g.Must(f.Launch(g.Set, g.Stream))
		g.Must(b.Launch(g.Set, g.Stream))
		records, parts = append(records, *f.Records), append(parts, *b.Parts)
		require.Equal(t, c.telemetry && c.reduction == seed.Exact, f.Records.Seeds > 0,
			f.Records.Seeds)
		require.Equal(t, c.chunk != 520 && c.reduction == seed.Exact, b.Parts.Units > 0,
			b.Parts.Units)
	}
	g.Must(mergeRecords(g.Set, g.Stream, append(records, Records{})))
	g.Must(addParts(g.Set, g.Stream, append(parts, Parts{})))
	for i, r := range runs {
		for j, got := range results(r) {
			if j < 2 && !r.telemetry { // no figures: what was there
				continue
			}
			require.Equal(t, want[i][j], got, r.kasminaCase)
		}
	}
}
