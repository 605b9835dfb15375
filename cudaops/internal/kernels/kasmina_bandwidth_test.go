package kernels

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// largeKasmina is a layer for measuring, whose rows repeat.
func (g *rig) largeKasmina(c kasminaCase) *kasminaRun {
	g.Helper()
	few := c
	few.rows = min(c.rows, 64)
	r := g.newKasmina(few, nil)
	r.rows, r.layer.Rows = c.rows, c.rows
	for _, b := range []**buffer{&r.x, &r.g, &r.y, &r.dx} {
		one := *b
		*b = g.alloc(one.n/few.rows*c.rows, c.dtype, 0)
		for at := 0; at < (*b).bytes(); at += one.bytes() {
			g.must(g.ctx.CopyOnDevice((*b).Offset(at), one.Ptr, one.bytes(), g.stream))
		}
	}
	r.layer.X = r.x.Ptr
	r.forwardSpace = g.alloc(g.KasminaForwardWorkspace(r.layer)/4, f32, 0)
	r.backwardSpace = g.alloc(g.KasminaBackwardWorkspace(r.layer, c.clip)/4, f32, 0)
	return r
}

// TestKasminaBandwidth runs every family on several sets of arrays in turn.
func TestKasminaBandwidth(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := newRig(t)
	for _, c := range []kasminaCase{
		{rows: 32768, seeds: 1024, chunk: 4, slots: 1025, dtype: bf16},
		{rows: 32768, seeds: 256, chunk: 16, slots: 257, dtype: bf16},
		{rows: 32768, seeds: 1024, chunk: 4, slots: 1025, dtype: f32},
		{rows: 32768, seeds: 16, chunk: 48, slots: 17, dtype: bf16},
		{rows: 32768, seeds: 2, chunk: 384, slots: 3, dtype: bf16},
		{rows: 64, seeds: 1000, chunk: 4, slots: 1001, dtype: bf16},
	} {
		c.deviation, c.stability = 1, KasminaAdaptive
		for _, c.telemetry = range []bool{true, false} {
			g.scope(fmt.Sprintf("%dx%dx%d %v telemetry=%v", c.rows, c.seeds, c.chunk, c.dtype, c.telemetry), func(g *rig) {
				runs := []*kasminaRun{g.largeKasmina(c), g.largeKasmina(c)}
				n := c.rows * c.seeds * c.chunk * c.dtype.Size()
				name := map[bool]string{false: "forward ", true: "backward "}
				measure := func(backward bool, arrays int, launch func(r *kasminaRun, f KasminaFamily)) {
					for _, f := range g.KasminaFamilies(runs[0].layer, backward, c.telemetry) {
						var each []func()
						for _, r := range runs {
							each = append(each, func() { launch(r, f) })
						}
						g.bench(name[backward]+f.String(), arrays*n, each)
					}
					if backward || c.telemetry && c.rows > kasminaTileRows { // tiles merge at once
						each := []func(){runs[0].mergeOnly(backward), runs[1].mergeOnly(backward)}
						g.Logf("%-40s %9.1f µs", name[backward]+"merging", g.time(each).Seconds()*1e6)
					}
				}
				measure(false, 2, func(r *kasminaRun, f KasminaFamily) {
					r.forwardFamily = f
					r.forwardOnly()
				})
				measure(true, 3, func(r *kasminaRun, f KasminaFamily) {
					r.backwardFamily = f
					r.launchBackward()
				})
			})
		}
	}
}

// forwardOnly leaves out the histogram.
func (r *kasminaRun) forwardOnly() { r.must(r.KasminaForward(r.stream, r.forwardPass())) }

func (r *kasminaRun) forwardPass() KasminaForward {
	return KasminaForward{KasminaLayer: r.in(r.forwardFamily), Y: r.y.Ptr, Telemetry: r.telemetry, Figures: r.health.Ptr,
		Bad: r.count(0), Workspace: r.forwardSpace.Ptr}
}

// mergeOnly is what comes behind the first family's kernel.
func (r *kasminaRun) mergeOnly(backward bool) func() {
	suf, err := suffix("", r.dtype)
	r.must(err)
	r.forwardFamily, r.backwardFamily = KasminaAuto, KasminaAuto
	use, space, others := kasminaUse{telemetry: r.telemetry}, r.forwardSpace, []gpu.Ptr{r.y.Ptr}
	if backward {
		use, space, others = kasminaUse{true, r.telemetry, r.clip, false}, r.backwardSpace, []gpu.Ptr{r.dx.Ptr, r.g.Ptr}
	}
	p, err := r.kasminaPass(r.stream, r.layer, suf, use, space.Ptr, others...)
	r.must(err)
	if backward {
		left := []KasminaParts{p.parts(r.backwardPass())}
		return func() { r.must(r.AddKasminaParts(r.stream, left)) }
	}
	left := []KasminaRecords{p.left(r.forwardPass())}
	return func() { r.must(r.MergeKasminaRecords(r.stream, left)) }
}
