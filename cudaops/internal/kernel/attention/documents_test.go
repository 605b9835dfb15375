package attention

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
)

// documents returns the table of the case's documents on the GPU, or null if it has none.
func (c attentionCase) documents(g *kerneltest.Rig) gpu.Ptr {
	if c.starts == nil {
		return 0
	}

	n := c.Batch * c.Seq
	starts, table := g.Alloc(2*n, kerneltest.F32, 0),
		g.Alloc(DocumentsBytes(c.Batch, c.Seq)/4, kerneltest.F32, 0)
	wide := make([]int64, n)
	for i, v := range c.starts {
		wide[i] = int64(v)
	}

	g.Must(g.Ctx.CopyToDevice(starts.Ptr, gpu.Bytes(wide), g.Stream))
	g.Must(g.Launch(g.Stream, Documents{Table: table.Ptr, Starts: starts.Ptr, Batch: c.Batch,
		Seq: c.Seq, Window: c.window}))
	return table.Ptr
}

// TestAttentionWindowsTable checks that a window produces the same table as the starts it implies,
// both with documents and for whole sequences.
func TestAttentionWindowsTable(t *testing.T) {
	g := kerneltest.NewRig(t)
	table := func(c attentionCase) []int32 {
		raw := make([]byte, DocumentsBytes(c.Batch, c.Seq))
		g.Must(g.Ctx.CopyToHost(raw, c.documents(g), g.Stream))
		return gpu.View[int32](raw)
	}
	for i, seq := range []int{1, 33, 1024, 2500, 63, 1025} {
		c := attentionCase{Geometry: Geometry{Batch: 1 + i%3, Seq: seq},
			window: 1 + g.Rand.IntN(seq+9)}
		c.starts = startsOf(c.Batch, seq, cuts(g.Rand)[[]string{"one", "long"}[i%2]])
		want := attentionCase{Geometry: c.Geometry}
		for j, start := range c.starts {
			want.starts = append(want.starts, max(start, int32(j%seq-c.window+1)))
		}
		require.Equal(t, table(want), table(c), "seq %d, window %d: other bounds than of starts",
			seq, c.window)
		if i%2 > 0 {
			continue
		}
		alone := g.Alloc(DocumentsBytes(c.Batch, seq)/4, kerneltest.F32, 0)
		g.Must(g.Launch(g.Stream, Documents{Table: alone.Ptr, Batch: c.Batch, Seq: seq,
			Window: c.window}))
		raw := make([]byte, DocumentsBytes(c.Batch, seq))
		g.Must(g.Ctx.CopyToHost(raw, alone.Ptr, g.Stream))
		require.Equal(t, table(want), gpu.View[int32](raw),
			"seq %d, window %d without documents: other bounds than of starts", seq, c.window)
	}
}

// packedReference computes attention and its gradients from their definitions, for queries i that
// see keys starts[i] to i.
func packedReference(y, normalizers, dq, dk, dv, dy, q, k, v []float64, starts []int32,
	s cpuattention.Shape) {
	queryWidth, keyWidth, dim := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim
	dot := func(a, b []float64) (sum float64) {
		for i, v := range a {
			sum += v * b[i]
		}
		return sum
	}

	add := func(to []float64, f float64, x []float64) {
		for i, v := range x {
			to[i] += f * v
		}
	}
	p := make([]float64, s.Seq)
	for b := range s.Batch {
		for h := range s.Heads {
			kv := h / (s.Heads / s.KVHeads)
			queryRow := func(x []float64, i int) []float64 {
				return x[(b*s.Seq+i)*queryWidth+h*dim:][:dim]
			}
			keyRow := func(x []float64, j int) []float64 {
				return x[(b*s.Seq+j)*keyWidth+kv*dim:][:dim]
			}
			for i := range s.Seq {
				first, qi, yi, gi := int(starts[b*s.Seq+i]), queryRow(q, i),
					queryRow(y, i), queryRow(dy, i)
				top, sum := math.Inf(-1), 0.0
				for j := first; j <= i; j++ {
					p[j] = s.Scale * dot(qi, keyRow(k, j))
					top = max(top, p[j])
				}
				for j := first; j <= i; j++ {
					sum += math.Exp(p[j] - top)
				}
				at := 2 * ((b*s.Heads+h)*s.Seq + i)
				normalizers[at], normalizers[at+1] = top, sum
				for j := first; j <= i; j++ {
					p[j] = math.Exp(p[j]-top) / sum
					add(yi, p[j], keyRow(v, j))
				}
				delta := dot(gi, yi)
				for j := first; j <= i; j++ {
					ds := s.Scale * p[j] * (dot(gi, keyRow(v, j)) - delta)
					add(queryRow(dq, i), ds, keyRow(k, j))
					add(keyRow(dk, j), ds, qi)
					add(keyRow(dv, j), p[j], gi)
				}
			}
		}
	}
}

// cuts returns functions that divide sequences into documents. Given the start of the document of
// token i-1, they return the start of the document of token i.
func cuts(r *rand.Rand) map[string]func(i int, last int32) int32 {
	window := int32(1 + r.IntN(150))
	return map[string]func(i int, last int32) int32{
		"one":     at(func(int) bool { return false }),
		"tokens":  at(func(int) bool { return true }),
		"short":   at(func(int) bool { return r.IntN(5) == 0 }),
		"long":    at(func(int) bool { return r.IntN(70) == 0 }),
		"borders": at(func(i int) bool { return (i+1)%64 < 3 && r.IntN(2) == 0 }),
		// Not documents, but the kernels must handle any nondecreasing starts.
		"window": func(i int, _ int32) int32 { return max(0, int32(i)-window) },
	}
}

// at returns a function for cuts that starts a document wherever cut is true.
func at(cut func(i int) bool) func(i int, last int32) int32 {
	return func(i int, last int32) int32 {
		if cut(i) {
			return int32(i)
		}
		return last
	}
}

// startsOf returns the starts of all sequences, each divided independently.
func startsOf(batch, seq int, cut func(i int, last int32) int32) []int32 {
	starts := make([]int32, 0, batch*seq)
	for range batch {
		last := int32(0)
		for i := range seq {
			if i > 0 {
				last = cut(i, last)
			}
			starts = append(starts, last)
		}
	}

	return starts
}

// attentionDocumentCases returns cases with documents of every kind for every kernel.
func attentionDocumentCases(r *rand.Rand, short bool) map[string]attentionCase {
	type family struct {
		variant string
		dtype   gpu.DType
		dim     int
	}
	families := []family{{plain, kerneltest.F32, 40}, {plain, kerneltest.Bf16, 130}}
	for _, v := range []string{Hopper, mma} {
		families = append(families, family{v, kerneltest.Bf16, 64}, family{v, kerneltest.Bf16, 128},
			family{v, kerneltest.F16, 96}, family{v, kerneltest.Bf16, 8})
	}

	// head dimensions smaller than the kernel's, which then does not undo RoPE
	families = append(families, family{Hopper, kerneltest.F16, 8}, family{Hopper, kerneltest.Bf16, 80})
	lengths := []int{1, 64, 130, 333, 1000}
	if short {
		lengths = []int{65, 200}
	}

	cases := map[string]attentionCase{}
	for i, f := range families {
		for j, seq := range lengths {
			for name, cut := range cuts(r) {
				batch, kv := 1+(i+j)%2, 1+j%2
				a := Geometry{Batch: batch, Seq: seq, Heads: kv * (1 + i%2), KVHeads: kv,
					HeadDim: f.dim, Causal: true}
				c := attentionCase{a, kernel.Variant{Family: f.variant}, f.dtype, j%2 == 0, 0, (i+j)%2 == 0 && seq > 1,
					startsOf(batch, seq, cut), 0, 0}
				cases[fmt.Sprintf("%v-%s", c, name)] = c
			}
		}
	}

	return cases
}

func TestAttentionDocuments(t *testing.T) {
	g := kerneltest.NewRig(t)
	cases := attentionDocumentCases(g.Rand, testing.Short())
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		if c := cases[name]; runs(g, c.variant) {
			g.Scope(name, c.check)
		}
	}
}

// TestAttentionDocumentsTable checks that the table matches a scan over the queries, even if the
// starts are invalid.
func TestAttentionDocumentsTable(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, seq := range []int{1, 31, 1024, 1025, 2500, 1, 63, 1023} {
		batch := 1 + i%3
		starts := startsOf(batch, seq, cuts(g.Rand)["short"])
		for i := range starts {
			if g.Rand.IntN(4) == 0 {
				starts[i] = g.Rand.Int32() >> g.Rand.IntN(32) * (1 - 2*g.Rand.Int32N(2))
			}
		}
		c := attentionCase{Geometry: Geometry{Batch: batch, Seq: seq}, starts: starts}
		raw := make([]byte, DocumentsBytes(batch, seq))
		g.Must(g.Ctx.CopyToHost(raw, c.documents(g), g.Stream))
		want := make([]int32, batch*seq, 2*batch*seq)
		for b := range batch {
			largest := int32(0)
			for i, v := range starts[b*seq:][:seq] {
				largest = max(largest, v)
				want[b*seq+i] = min(largest, int32(i))
			}
		}
		for b := range batch {
			of := want[b*seq:][:seq]
			for j := range seq {
				end := slices.IndexFunc(of, func(v int32) bool { return v > int32(j) })
				if end < 0 {
					end = seq
				}
				want = append(want, int32(end))
			}
		}
		if got := gpu.View[int32](raw); !slices.Equal(got, want) {
			i := slices.IndexFunc(got, func(int32) bool { return true })
			for i < len(got) && got[i] == want[i] {
				i++
			}
			t.Errorf("seq %d: element %d is %d, want %d", seq, i, got[i], want[i])
		}
	}
}
