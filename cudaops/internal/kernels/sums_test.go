package kernels

import (
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestRMSNormPartsTogether wants launches that add up what many passes have left to give the bits of a launch each.
func TestRMSNormPartsTogether(t *testing.T) {
	g := newRig(t)
	shapes := [][2]int{{2003, 768}, {50, 32}, {333, 2048}, {700, 4099}, {1, 8}, {300, 4096}}
	var left []RMSNormParts
	var sums []*buffer
	var want [][]float64
	for i := range rmsNormPartsMost + 9 {
		rows, d := shapes[i%len(shapes)][0], shapes[i%len(shapes)][1]
		x, _ := g.normal(rows*d, bf16, 0)
		dy, _ := g.normal(rows*d, bf16, 0)
		w, _ := g.normal(d, f32, 0)
		rstd, _ := g.normal(rows, f32, 0)
		a := RMSNormBackward{DX: g.alloc(rows*d, bf16, 0).Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Rows: rows, D: d, Type: bf16, DWType: f32,
			Workspace: g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0).Ptr}
		if i%11 == 0 {
			a.DWType = bf16
		}
		single, dw := g.alloc(d, a.DWType, 0), g.alloc(d, a.DWType, 0)
		a.DW = single.Ptr
		g.must(g.RMSNormBackward(g.stream, a))
		want = append(want, g.read(single))
		a.DW, a.Parts = dw.Ptr, new(RMSNormParts)
		g.must(g.RMSNormBackward(g.stream, a))
		left, sums = append(left, *a.Parts), append(sums, dw)
	}
	left = append(left, RMSNormParts{}) // of a pass over no rows
	g.must(g.AddRMSNormParts(g.stream, left))
	for i, dw := range sums {
		if got := g.read(dw); !slices.Equal(got, want[i]) {
			t.Errorf("weights %d, of %d: their gradient differs", i, len(got))
		}
	}
}

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
