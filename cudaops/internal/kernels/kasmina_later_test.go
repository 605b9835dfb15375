package kernels

import (
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// TestKasminaLater wants a pass whose tail runs on another stream to give the bits of a whole one, although x and g are gone by then.
func TestKasminaLater(t *testing.T) {
	newRig(t).scope("layers", func(g *rig) {
		side, err := g.ctx.NewStream()
		g.must(err)
		defer func() { g.must(g.ctx.DestroyStream(side)) }()
		for _, c := range []kasminaCase{
			{rows: 500, seeds: 16, chunk: 48, slots: 5, dtype: bf16, telemetry: true},
			{rows: 500, seeds: 16, chunk: 64, slots: 5, dtype: bf16, telemetry: true},
			{rows: 4001, seeds: 12, chunk: 4, slots: 3, dtype: f32, stability: KasminaAdaptive, telemetry: true, clip: true},
			{rows: 777, seeds: 9, chunk: 7, slots: 20, dtype: f32, stability: KasminaStrict, telemetry: true},
			{rows: 3000, seeds: 16, chunk: 48, slots: 5, dtype: bf16},
			{rows: 300, seeds: 8, chunk: 16, slots: 5, dtype: f32, telemetry: true, reduction: KasminaMax},
			{rows: 300, seeds: 8, chunk: 16, width: 40, slots: 5, dtype: f32, telemetry: true},
		} {
			c.deviation = 1
			r := g.newKasmina(c, nil)
			for _, family := range g.KasminaFamilies(r.layer, true, c.telemetry, r.dx.Ptr, r.g.Ptr) {
				r.forwardFamily, r.backwardFamily = KasminaAuto, family
				if slices.Contains(g.KasminaFamilies(r.layer, false, c.telemetry, r.y.Ptr), family) {
					r.forwardFamily = family
				}
				want, _ := r.ended(g.stream, 0)
				got, tails := r.ended(g.stream, side)
				for i := range want {
					if !slices.Equal(want[i], got[i]) {
						g.Errorf("%v, family %v: result %d has other bits", c, family, i)
					}
				}
				if whole := c.reduction != KasminaExact || c.width > 0; !whole && tails == 0 {
					g.Errorf("%v, family %v: nothing is left for later", c, family)
				}
			}
		}
	})
}

// ended makes both passes, with their tails on a stream of their own if there is one, and returns all that tails write, and how many
// there were. Afterwards x and g are as before.
func (r *kasminaRun) ended(main, side driver.Stream) (results [][]float64, tails int) {
	r.Helper()
	var left []KasminaTail
	f, b := r.forwardPass(), r.backwardPass()
	f.Reduction = r.reduction
	if side != 0 {
		f.Later = func(tail KasminaTail) { left = append(left, tail) }
		b.Later = f.Later
	}
	all := []*buffer{r.dw, r.ds}
	if r.telemetry {
		all = append(all, r.health, r.gradient)
	}
	for _, o := range all {
		r.must(r.ctx.Memset8(o.Ptr, 0xff, o.bytes(), main))
	}
	if r.width > 0 {
		r.must(r.KasminaWideForward(main, f, r.wide[0]))
		r.must(r.KasminaWideBackward(main, b, r.wide[1]))
	} else {
		r.must(r.KasminaForward(main, f))
		r.must(r.KasminaBackward(main, b))
	}
	kept := map[*buffer][]byte{}
	for _, o := range []*buffer{r.x, r.g} {
		kept[o] = make([]byte, o.bytes())
		r.must(r.ctx.CopyToHost(kept[o], o.Ptr, main))
		r.must(r.ctx.Memset8(o.Ptr, 0xff, o.bytes(), main))
	}
	r.must(r.ctx.SyncStream(main))
	for _, tail := range left {
		r.must(tail(side))
	}
	r.must(r.ctx.SyncStream(side))
	for o, raw := range kept {
		r.must(r.ctx.CopyToDevice(o.Ptr, raw, main))
	}
	for _, o := range all {
		results = append(results, r.read(o))
	}
	return results, len(left)
}
