package kasmina

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// largeKasmina is a layer for measuring, whose rows repeat.
func largeKasmina(g *kerneltest.Rig, c kasminaCase) *kasminaRun {
	g.Helper()
	few := c
	few.rows = min(c.rows, 64)
	r := newKasmina(g, few, nil)
	r.rows, r.layer.Rows = c.rows, c.rows
	for _, b := range []**kerneltest.Buffer{&r.x, &r.g, &r.y, &r.dx} {
		one := *b
		*b = g.Alloc(one.N/few.rows*c.rows, c.dtype, 0)
		for at := 0; at < (*b).Bytes(); at += one.Bytes() {
			g.Must(g.Ctx.CopyOnDevice((*b).Offset(at), one.Ptr, one.Bytes(), g.Stream))
		}
	}
	r.layer.X = r.x.Ptr
	r.forwardSpace = g.Alloc(ForwardWorkspace(g.Set, r.layer)/4, kerneltest.F32, 0)
	r.backwardSpace = g.Alloc(BackwardWorkspace(g.Set, r.layer, c.clip)/4, kerneltest.F32, 0)
	return r
}

// TestKasminaBandwidth runs every family on several sets of arrays in turn.
func TestKasminaBandwidth(t *testing.T) {
	if !kerneltest.Benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := kerneltest.NewRig(t)
	for _, c := range []kasminaCase{
		{rows: 32768, seeds: 1024, chunk: 4, slots: 1025, dtype: kerneltest.Bf16},
		{rows: 32768, seeds: 256, chunk: 16, slots: 257, dtype: kerneltest.Bf16},
		{rows: 32768, seeds: 1024, chunk: 4, slots: 1025, dtype: kerneltest.F32},
		{rows: 32768, seeds: 16, chunk: 48, slots: 17, dtype: kerneltest.Bf16},
		{rows: 32768, seeds: 2, chunk: 384, slots: 3, dtype: kerneltest.Bf16},
		{rows: 64, seeds: 1000, chunk: 4, slots: 1001, dtype: kerneltest.Bf16},
	} {
		c.deviation, c.stability = 1, Adaptive
		for _, c.telemetry = range []bool{true, false} {
			g.Scope(fmt.Sprintf("%dx%dx%d %v telemetry=%v", c.rows, c.seeds, c.chunk, c.dtype, c.telemetry), func(g *kerneltest.Rig) {
				runs := []*kasminaRun{largeKasmina(g, c), largeKasmina(g, c)}
				n := c.rows * c.seeds * c.chunk * c.dtype.Size()
				name := map[bool]string{false: "forward ", true: "backward "}
				measure := func(backward bool, arrays int, launch func(r *kasminaRun, f Family)) {
					for _, f := range Families(g.Set, runs[0].layer, backward, c.telemetry) {
						var each []func()
						for _, r := range runs {
							each = append(each, func() { launch(r, f) })
						}
						g.Bench(name[backward]+f.String(), arrays*n, each)
					}
					if backward || c.telemetry && c.rows > kasminaTileRows { // tiles merge at once
						each := []func(){runs[0].mergeOnly(backward), runs[1].mergeOnly(backward)}
						g.Logf("%-40s %9.1f µs", name[backward]+"merging", g.Time(each).Seconds()*1e6)
					}
				}
				measure(false, 2, func(r *kasminaRun, f Family) {
					r.forwardFamily = f
					r.forwardOnly()
				})
				measure(true, 3, func(r *kasminaRun, f Family) {
					r.backwardFamily = f
					r.launchBackward()
				})
			})
		}
	}
}

// forwardOnly leaves out the histogram.
func (r *kasminaRun) forwardOnly() { r.Must(r.forwardPass().Launch(r.Set, r.Stream)) }

func (r *kasminaRun) forwardPass() Forward {
	return Forward{Layer: r.in(r.forwardFamily), Y: r.y.Ptr, Telemetry: r.telemetry, Figures: r.health.Ptr,
		Bad: r.count(0), Workspace: r.forwardSpace.Ptr}
}

// mergeOnly is what comes behind the first family's kernel.
func (r *kasminaRun) mergeOnly(backward bool) func() {
	suf, err := kernel.Suffix("", r.dtype)
	r.Must(err)
	r.forwardFamily, r.backwardFamily = Auto, Auto
	use, space, others := kasminaUse{telemetry: r.telemetry}, r.forwardSpace, []gpu.Ptr{r.y.Ptr}
	if backward {
		use, space, others = kasminaUse{true, r.telemetry, r.clip, false}, r.backwardSpace, []gpu.Ptr{r.dx.Ptr, r.g.Ptr}
	}
	p, err := newKasminaPass(r.Set, r.Stream, r.layer, suf, use, space.Ptr, others...)
	r.Must(err)
	if backward {
		left := []Parts{p.parts(r.backwardPass())}
		return func() { r.Must(addParts(r.Set, r.Stream, left)) }
	}
	left := []Records{p.left(r.forwardPass())}
	return func() { r.Must(mergeRecords(r.Set, r.Stream, left)) }
}
