package kernels

import (
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestKasminaEndsTogether wants launches that end many passes over different layers to give the bits of those that end one.
func TestKasminaEndsTogether(t *testing.T) {
	g := newRig(t)
	cases := []kasminaCase{
		{rows: 1500, seeds: 16, chunk: 48, slots: 17, dtype: bf16, telemetry: true},
		{rows: 1500, seeds: 16, chunk: 48, slots: 17, dtype: bf16},
		{rows: 1100, seeds: 200, chunk: 4, slots: 3, dtype: bf16, telemetry: true},
		{rows: 64, seeds: 40, chunk: 8, slots: 9, dtype: bf16, telemetry: true}, // in tiles
		{rows: 3, seeds: 5, chunk: 7, slots: 2, dtype: f32, telemetry: true},
		{rows: 130, seeds: 2, chunk: 520, slots: 4, dtype: f16, telemetry: true}, // norms take another pass, and the ends are made at once
		{rows: 1200, seeds: 3, chunk: 64, slots: 300, dtype: bf16, telemetry: true, clip: true},
		{rows: 90, seeds: 6, chunk: 16, slots: 5, dtype: f32, telemetry: true, reduction: KasminaMax},
	}
	var records []KasminaRecords
	var parts []KasminaParts
	var runs []*kasminaRun
	var want [][][]float64
	results := func(r *kasminaRun) [][]float64 {
		return [][]float64{g.read(r.health), g.read(r.gradient), g.read(r.dw), g.read(r.ds), g.read(r.y), g.read(r.dx)}
	}
	for i := range kasminaSumsMost + 5 {
		c := cases[i%len(cases)]
		c.from, c.deviation = i, 1
		r := g.newKasmina(c, nil)
		f, b := r.forwardPass(), r.backwardPass()
		f.Reduction = c.reduction
		g.must(g.KasminaForward(g.stream, f))
		g.must(g.KasminaBackward(g.stream, b))
		runs, want = append(runs, r), append(want, results(r))
		for _, x := range []*buffer{r.health, r.gradient, r.dw, r.ds} {
			g.must(g.Fill(g.stream, x.Ptr, -3, x.n, gpu.Float32))
		}
		f.Records, b.Parts = &KasminaRecords{Seeds: -1}, &KasminaParts{Units: -1}
		g.must(g.KasminaForward(g.stream, f))
		g.must(g.KasminaBackward(g.stream, b))
		records, parts = append(records, *f.Records), append(parts, *b.Parts)
		if later := f.Records.Seeds > 0; later != (c.rows > 64 && c.telemetry && c.reduction == KasminaExact || c.rows == 3) {
			t.Errorf("%v: %d seeds are left to be merged", c, f.Records.Seeds)
		}
		if later := b.Parts.Units > 0; later != (c.chunk != 520 && c.reduction == KasminaExact) {
			t.Errorf("%v: %d units are left to be added up", c, b.Parts.Units)
		}
	}
	g.must(g.MergeKasminaRecords(g.stream, append(records, KasminaRecords{})))
	g.must(g.AddKasminaParts(g.stream, append(parts, KasminaParts{})))
	for i, r := range runs {
		for j, got := range results(r) {
			if j < 2 && !r.telemetry { // no figures: what was there
				continue
			}
			if !slices.Equal(got, want[i][j]) {
				t.Errorf("%v: result %d differs", r.kasminaCase, j)
			}
		}
	}
}
