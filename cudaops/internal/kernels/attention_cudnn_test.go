package kernels

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
)

// dnnCases are odd lengths, ratios of heads, and head dimensions that are padded or not.
func dnnCases(short bool) []attentionCase {
	var cases []attentionCase
	add := func(t driver.DType, b, seq, h, kv, d int, causal, packed, turned bool) {
		a := AttentionShape{Batch: b, Seq: seq, Heads: h, KVHeads: kv, HeadDim: d, Causal: causal, Variant: AttentionCuDNN}
		cases = append(cases, attentionCase{AttentionShape: a, dtype: t, packed: packed, turned: turned})
	}
	add(bf16, 2, 129, 4, 2, 64, true, true, true)
	add(f16, 1, 65, 4, 2, 128, false, false, false)
	if short {
		return cases
	}
	add(bf16, 2, 200, 6, 1, 96, true, true, true)
	add(bf16, 1, 7, 2, 2, 64, true, false, true)
	add(f16, 1, 1000, 4, 2, 128, true, true, false)
	add(bf16, 3, 64, 2, 2, 8, false, true, false)
	return cases
}

// needDnn skips the test where there is no cuDNN.
func (g *rig) needDnn() {
	g.Helper()
	if g.DnnVersion() == 0 {
		_, err := g.ctx.Dnn()
		reason, _, _ := strings.Cut(fmt.Sprint(err), "\n")
		g.Skip(reason)
	}
}

// TestDnnAttention is of cuDNN's forward pass, and of the backward pass of other kernels by what that leaves.
func TestDnnAttention(t *testing.T) {
	g := newRig(t)
	g.needDnn()
	for _, c := range dnnCases(testing.Short()) {
		g.scope(c.String(), c.check)
	}
}

func TestDnnAttentionRepeatsBits(t *testing.T) {
	g := newRig(t)
	g.needDnn()
	for _, dim := range []int{64, 128}[:few(2, 1)] {
		g.scope(fmt.Sprint(dim), func(g *rig) {
			a := AttentionShape{Batch: 3, Seq: few(1500, 300), Heads: 6, KVHeads: 3, HeadDim: dim, Causal: true, Variant: AttentionCuDNN}
			r := attentionCase{AttentionShape: a, dtype: bf16, packed: true}.benchmark(g)
			r.forward()
			first := g.read(r.y)
			for run := range 2 {
				r.forward()
				if distance(g.read(r.y), first) != 0 {
					g.Errorf("run %d gives other bits", run+1)
				}
			}
		})
	}
}

// TestDnnAttentionSpeed is the forward part of TestAttentionSpeed with cuDNN beside the kernels that are picked without it.
func TestDnnAttentionSpeed(t *testing.T) {
	if !benchmark {
		t.Skip("a benchmark: set KASMINA_GPU_BENCH")
	}
	g := newRig(t)
	g.needDnn()
	for _, s := range [][4]int{{32, 1024, 12, 64}, {16, 1024, 16, 64}, {8, 2048, 16, 128}, {4, 8192, 16, 128}} {
		for _, v := range []AttentionVariant{AttentionAuto, AttentionCuDNN} {
			a := AttentionShape{Batch: s[0], Seq: s[1], Heads: s[2], KVHeads: s[2], HeadDim: s[3], Causal: true, Variant: v}
			c := attentionCase{AttentionShape: a, dtype: bf16, packed: true}
			g.scope(c.String(), func(g *rig) {
				start := time.Now()
				r := c.benchmark(g)
				r.forward()
				g.must(g.ctx.SyncStream(g.stream))
				planned := time.Since(start)
				for start = time.Now(); time.Since(start) < 300*time.Millisecond; {
					r.forward()
					g.must(g.ctx.SyncStream(g.stream))
				}
				flops := 4 * float64(a.Batch*a.Heads*a.HeadDim) * float64(a.Seq*a.Seq) / 2
				took := g.time([]func(){r.forward}).Seconds()
				g.Logf("%8.1f µs %5.0f TFLOP/s   ready after %v", took*1e6, flops/took/1e12, planned.Round(time.Millisecond))
			})
		}
	}
}

// fakeDnn is kernels on a fake GPU of which only cuDNN computes anything.
func fakeDnn(t *testing.T) *rig {
	c, err := fake.New(fake.Config{AnyKernel: true, Dnn: true}).Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	g := &rig{T: t, Kernels: New(c), ctx: c, rand: rand.New(rand.NewPCG(seed, 0))}
	if g.stream, err = c.NewStream(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
		g.free(0)
		g.must(g.Close())
		g.must(c.DestroyStream(g.stream))
		g.must(c.Close()) // which knows of all that is still alive
	})
	return g
}

// TestDnnArguments has the fake cuDNN compute what the real one is asked for.
func TestDnnArguments(t *testing.T) {
	g := fakeDnn(t)
	for _, c := range dnnCases(true) {
		for _, c.Scale = range []float64{0, 0.3} {
			c.turned, c.Seq = false, 33 // the fake takes its time
			g.scope(fmt.Sprint(c, c.Scale), func(g *rig) { c.compare(g, false) })
		}
	}
}

func TestDnnRefusals(t *testing.T) {
	g := fakeDnn(t)
	a := AttentionShape{Batch: 1, Seq: 300, Heads: 4, KVHeads: 2, HeadDim: 64, Causal: true, Variant: AttentionCuDNN}
	p := g.alloc(1<<20, f32, 0).Ptr
	q, kv := Rows{p, 256}, Rows{p, 128}
	g.must(g.Attention(g.stream, a, q, p, q, kv, kv, bf16))
	g.must(g.PlanDnnAttention(a, bf16, q, q, kv, kv))
	documents := a
	documents.Documents = p
	for name, err := range map[string]error{
		"float32":         g.Attention(g.stream, a, q, p, q, kv, kv, f32),
		"an address":      g.Attention(g.stream, a, q, p, Rows{p + 2, 256}, kv, kv, bf16),
		"documents":       g.Attention(g.stream, documents, q, p, q, kv, kv, bf16),
		"a gradient":      g.AttentionBackward(g.stream, a, q, kv, kv, p, q, q, kv, kv, q, p, bf16),
		"the plan's type": g.PlanDnnAttention(a, f32, q, q, kv, kv),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// greedyDnn is a context whose cuDNN wants too much workspace.
type greedyDnn struct{ driver.Context }

func (c greedyDnn) Dnn() (driver.Dnn, error) {
	d, err := c.Context.Dnn()
	return greedyPlans{d}, err
}

type greedyPlans struct{ driver.Dnn }

func (d greedyPlans) PlanAttention(a driver.AttentionSpec) (driver.AttentionPlan, error) {
	p, err := d.Dnn.PlanAttention(a)
	return greedyPlan{p}, err
}

type greedyPlan struct{ driver.AttentionPlan }

func (greedyPlan) Workspace() int { return dnnBytes + 1 }

// TestDnnWorkspace wants a plan that needs more workspace than there is to be refused at once, and let go.
func TestDnnWorkspace(t *testing.T) {
	g := fakeDnn(t) // which would know of a plan that is left
	k := New(greedyDnn{g.ctx})
	a := AttentionShape{Batch: 1, Seq: 10, Heads: 1, KVHeads: 1, HeadDim: 64, Variant: AttentionCuDNN}
	r := Rows{g.alloc(640, f32, 0).Ptr, 64}
	for _, err := range []error{k.PlanDnnAttention(a, bf16, r, r, r, r), k.Attention(g.stream, a, r, r.Ptr, r, r, r, bf16)} {
		if err == nil || !strings.Contains(err.Error(), "needs 65537 bytes of workspace") {
			t.Errorf("error %v", err)
		}
	}
	g.must(k.Close())
}

func TestDnnMissing(t *testing.T) {
	k, _, p := fakeAttention(t, 90, 227<<10)
	a := AttentionShape{Batch: 1, Seq: 10, Heads: 1, KVHeads: 1, HeadDim: 64, Variant: AttentionCuDNN}
	if v := k.DnnVersion(); v != 0 {
		t.Errorf("version %d", v)
	}
	r := Rows{p, 64}
	if err := k.Attention(0, a, r, p, r, r, r, bf16); err == nil || !strings.Contains(err.Error(), "was not found") {
		t.Errorf("error %v", err)
	}
}
