package attention

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// attentionCase is a case of attention, computed both on the GPU and, in float64, on the CPU.
type attentionCase struct {
	Geometry
	variant kernel.Variant
	dtype   gpu.DType
	packed  bool    // q, k and v are columns of one matrix, as are dq, dk and dv
	skew    int     // elements past alignment
	turned  bool    // rotated by RoPE, which the backward pass undoes
	starts  []int32 // position of each token's document; nil for none
	window  int     // used only by the table of documents
	alike   float64 // approximate size of a query's equal scores; 0 for random scores
}

func (c attentionCase) String() string {
	kind := "full"
	if c.Causal {
		kind = "causal"
	}

	if c.starts != nil {
		kind += "-documents"
	}

	if c.packed {
		kind += "-packed"
	}

	return fmt.Sprintf("%v-%v-%s-b%dt%dh%d-%dd%d+%d", c.variant, c.dtype, kind, c.Batch, c.Seq,
		c.Heads, c.KVHeads, c.HeadDim,
		c.skew)
}

// matrix is a set of rows in a buffer, possibly with other columns around them that must not
// change.
type matrix struct {
	kernel.Rows
	buf          *kerneltest.Buffer
	first, width int // columns
	rows         int
}

// matrices returns matrices of the given widths. They are columns of one buffer, followed by a few
// unused columns, if the case is packed; otherwise each has its own buffer.
func (c attentionCase) matrices(g *kerneltest.Rig, unused int, widths ...int) []matrix {
	rows := c.Batch * c.Seq
	parts := make([]matrix, len(widths))
	if !c.packed {
		for i, w := range widths {
			b := g.Alloc(rows*w, c.dtype, c.skew)
			parts[i] = matrix{kernel.Rows{Ptr: b.Ptr, Stride: w}, b, 0, w, rows}
		}
		return parts
	}

	stride := unused
	for _, w := range widths {
		stride += w
	}

	b := g.Alloc(rows*stride, c.dtype, c.skew)
	first := 0
	for i, w := range widths {
		parts[i] = matrix{kernel.Rows{Ptr: b.Ptr.Offset(first * c.dtype.Size()), Stride: stride}, b,
			first, w, rows}
		first += w
	}

	return parts
}

// fill writes normally distributed numbers and returns them as rounded.
func (m matrix) fill(g *kerneltest.Rig) []float64 {
	all := g.Read(m.buf)
	for r := range m.rows {
		for j := range m.width {
			all[r*m.Stride+m.first+j] = g.Rand.NormFloat64()
		}
	}
	return m.write(g, all)
}

// write writes the whole buffer and returns the matrix as rounded.
func (m matrix) write(g *kerneltest.Rig, all []float64) []float64 {
	x := make([]float64, m.rows*m.width)
	raw := kerneltest.Encode(all, m.buf.Dtype)
	g.Must(g.Ctx.CopyToDevice(m.buf.Ptr, raw, g.Stream))
	all = kerneltest.Decode(raw, m.buf.Dtype)
	for r := range m.rows {
		copy(x[r*m.width:], all[r*m.Stride+m.first:][:m.width])
	}
	return x
}

// near fails the test unless ‖got − want‖ ≤ tol.
func (m matrix) near(g *kerneltest.Rig, what string, want []float64, tol float64) {
	g.Helper()
	all, got := g.Read(m.buf), make([]float64, m.rows*m.width)
	for r := range m.rows {
		copy(got[r*m.width:], all[r*m.Stride+m.first:][:m.width])
		if last := all[r*m.Stride+m.Stride-1]; m.Stride > m.width && last == last {
			g.Errorf("%s: a kernel wrote outside the rows", what)
			break
		}
	}

	diff := make([]float64, len(got))
	for i := range got {
		diff[i] = got[i] - want[i]
	}

	if e := kerneltest.Norm(diff); !(e <= tol) {
		g.Errorf("%s: off by %.3g in norm, want at most %.3g", what, e, tol)
	}
}

func (c attentionCase) check(g *kerneltest.Rig) { c.compare(g, true) }

// compare compares the forward pass with float64 and, if both is set, the backward pass as well.
func (c attentionCase) compare(g *kerneltest.Rig, both bool) {
	queryWidth, keyWidth, rows := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim, c.Batch*c.Seq
	in := c.matrices(g, 8, queryWidth, keyWidth, keyWidth)
	d := c.matrices(g, 8, queryWidth, keyWidth, keyWidth)
	out := c.matrices(g, 8, queryWidth)[0]
	grad := c.matrices(g, 8, queryWidth)[0]
	normalizers, stats := g.Alloc(2*rows*c.Heads, kerneltest.F32, 0),
		g.Alloc(Backward{Geometry: c.Geometry, Type: c.dtype}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
	q, k, v, dy := in[0].fill(g), in[1].fill(g), in[2].fill(g), grad.fill(g)
	if c.alike > 0 {
		q, k = c.makeAlike(g, in[0], in[1])
	}

	a := c.Geometry
	var cosines, sines []float64
	if c.turned { // any numbers will do as angles
		tables := attentionCase{Geometry: Geometry{Batch: 1, Seq: c.Seq},
			dtype: kerneltest.F32}.matrices(g, 0, c.HeadDim/2, c.HeadDim/2)
		cosines, sines = tables[0].fill(g), tables[1].fill(g)
		a.Cos, a.Sin = tables[0].Ptr, tables[1].Ptr
	}

	a.Documents = c.documents(g)
	g.Must(attend(g.Set, g.Stream, a, c.variant, out.Rows, normalizers.Ptr, in[0].Rows,
		in[1].Rows, in[2].Rows, c.dtype))
	if both {
		g.Must(attendBackward(g.Set, g.Stream, a, c.variant, d[0].Rows, d[1].Rows, d[2].Rows, stats.Ptr,
			grad.Rows, in[0].Rows, in[1].Rows,
			in[2].Rows, out.Rows, normalizers.Ptr, c.dtype))
	}

	y, pairs := make([]float64, len(q)), make([]float64, 2*rows*c.Heads)
	dq, dk, dv := make([]float64, len(q)), make([]float64, len(k)), make([]float64, len(v))
	c.reference(y, pairs, dq, dk, dv, dy, q, k, v)
	// The rounding error of a score is proportional to the score and becomes the relative error of
	// its exponential.
	spread := max(1, math.Abs(a.Scale)*math.Sqrt(float64(a.HeadDim))/4)
	out.near(g, "y", y, kerneltest.Forward(c.dtype)*spread*kerneltest.Norm(y))
	// Normalizers near zero retain the rounding error of the scores they are computed from. If all
	// scores of a query are alike, rounding moves part of m into log l.
	for i := range pairs[:len(pairs)/2] {
		pairs[2*i+1] = math.Log(pairs[2*i+1])
	}

	if c.alike == 0 {
		g.Near("normalizers", normalizers, pairs,
			1e-6*(1+math.Sqrt(float64(len(pairs)))/kerneltest.Norm(pairs)))
	}

	if !both {
		return
	}

	if c.turned {
		layer.RoPE(dq, dq, cosines, sines, a.Seq, a.Heads, a.HeadDim, true)
		layer.RoPE(dk, dk, cosines, sines, a.Seq, a.KVHeads, a.HeadDim, true)
	}

	// With a single key, dq and dk are zero except for rounding.
	for i, want := range [][]float64{dq, dk, dv} {
		size := kerneltest.Norm(want)
		if a.Seq == 1 || c.starts != nil || c.alike > 0 {
			size = max(size, kerneltest.Norm(dv))
		}
		if c.alike > 0 && i == 0 {
			// dq sums keys times differences that cancel. The remainder is the rounding error of
			// each difference, and of y, which determines their mean.
			size = 2 * alikeKey * kerneltest.Norm(dv)
		}
		d[i].near(g, [...]string{"dq", "dk", "dv"}[i], want,
			kerneltest.Backward(c.dtype)*spread*size)
	}
}

// reference computes the expected results in float64, without RoPE.
func (c attentionCase) reference(y, normalizers, dq, dk, dv, dy, q, k, v []float64) {
	s := cpuattention.Shape{Batch: c.Batch, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Causal: c.Causal,
		Scale: c.Scale}
	if s.Scale == 0 {
		s.Scale = 1 / math.Sqrt(float64(c.HeadDim))
	}

	if c.starts != nil {
		packedReference(y, normalizers, dq, dk, dv, dy, q, k, v, c.starts, s)
		return
	}

	cpuattention.Forward(y, normalizers, q, k, v, s)
	cpuattention.Backward(dq, dk, dv, dy, q, k, v, y, normalizers, s)
}

// attentionCases returns cases with odd lengths, lengths one more and one less than the tiles,
// various ratios of heads, and head dimensions for every kernel, padded or not. In short mode, the
// plain kernels get one length and one head dimension per type.
func attentionCases(short bool) []attentionCase {
	var cases []attentionCase
	add := func(v string, t gpu.DType, b, seq, h, kv, d int, causal, packed bool, skew int) {
		a := Geometry{Batch: b, Seq: seq, Heads: h, KVHeads: kv, HeadDim: d, Causal: causal}
		turned := d%2 == 0 && seq > 1 && (seq/2+len(cases)/2)%2 == 0
		cases = append(cases, attentionCase{a, kernel.Variant{Family: v}, t, packed, skew, turned, nil,
			0, 0})
	}

	lengths := []int{1, 7, 64, 65, 127, 129, 200}
	if short {
		lengths = []int{1, 65, 129}
	}

	for s, t := range kerneltest.StorageTypes {
		for i, n := range lengths {
			for j, d := range []int{64, 128, 96, 8} {
				for _, causal := range []bool{false, true} {
					h := 1 + (i+j)%3
					kv := 1 + j%2*(h-1)
					if t != kerneltest.F32 {
						add(mma, t, 2, n, h, kv, d, causal, (i+j)%2 == 0, 0)
						add(Hopper, t, 2, n, h, kv, d, causal, (i+j)%2 == 1, 0)
					}
					if short && (n != 65 || j != s || causal != (s == 0)) {
						continue
					}
					add(plain, t, 2, n, h, kv, d+j, causal, (i+j)%2 == 1, j)
				}
			}
		}
	}

	// more tiles than multiprocessors, some only partly filled with queries
	add(Hopper, kerneltest.Bf16, 8, 260, 12, 12, 64, true, false, 0)
	add(Hopper, kerneltest.Bf16, 8, 130, 12, 12, 128, true, false, 0)
	if short {
		return cases
	}

	for _, v := range []string{Hopper, mma, plain} {
		add(v, kerneltest.Bf16, 1, 1000, 3, 1, 64, true, true, 0)
		add(v, kerneltest.Bf16, 1, 1000, 4, 2, 128, true, true, 0)
		add(v, kerneltest.Bf16, 1, 1000, 2, 2, 128, false, false, 0)
	}

	add(plain, kerneltest.F32, 1, 130, 2, 1, 256, true, false, 0)
	add(plain, kerneltest.Bf16, 1, 70, 2, 1, 200, true, true, 0)
	return cases
}

// runs reports whether the GPU supports the variant.
func runs(g *kerneltest.Rig, w kernel.Variant) bool {
	return g.Ctx.Device().Capability() == 90 || w.Family != Hopper
}

func TestAttention(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, c := range attentionCases(testing.Short()) {
		if !runs(g, c.variant) {
			continue
		}
		g.Scope(c.String(), c.check)
	}
}

// TestAttentionScale checks widely separated scores, a negative scale, and a scale that makes all
// scores nearly equal.
func TestAttentionScale(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, scale := range []float64{5, -1, 1e-3} {
		for _, dt := range []gpu.DType{kerneltest.F32, kerneltest.Bf16} {
			if testing.Short() && dt == kerneltest.F32 && scale != 5 {
				continue
			}
			a := Geometry{Batch: 1, Seq: kerneltest.Few(150, 70), Heads: 2, KVHeads: 1, HeadDim: 64,
				Causal: true, Scale: scale}
			g.Scope(fmt.Sprintf("%v/%v", dt, scale),
				attentionCase{a, kernel.Variant{}, dt, false, 0, false, nil, 0, 0}.check)
		}
	}
}

// TestAttentionShift checks that attention to identical keys is the mean of the values, with
// matching gradients, however large the scores are. This requires the forward and backward passes
// to subtract exactly the same numbers before exponentiation.
func TestAttentionShift(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, size := range []float64{10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 3e7} {
		for _, c := range []struct {
			family string
			dtype  gpu.DType
			dim    int
		}{
			{plain, kerneltest.F32, 64}, {plain, kerneltest.Bf16, 72}, {mma, kerneltest.Bf16, 64},
			{mma, kerneltest.F16, 128}, {Hopper, kerneltest.Bf16, 64}, {Hopper, kerneltest.F16, 64},
			{Hopper, kerneltest.Bf16, 96}, {Hopper, kerneltest.Bf16, 128},
			{Hopper, kerneltest.F16, 128},
		} {
			for _, packed := range []bool{false, true} {
				a := attentionCase{Geometry: Geometry{Batch: 2, Seq: 200, Heads: 2, KVHeads: 1,
					HeadDim: c.dim, Causal: true, Scale: 1}, variant: kernel.Variant{Family: c.family},
					dtype: c.dtype, alike: size}
				if !runs(g, a.variant) || testing.Short() && packed != (c.dim == 64) {
					continue
				}
				if c.dtype == kerneltest.F16 && size > 1e6 { // dk would overflow float16
					continue
				}
				if packed {
					a.starts = startsOf(a.Batch, a.Seq, cuts(g.Rand)["long"])
				}
				g.Scope(fmt.Sprintf("%v-%v-%d-%g-%v", c.family, c.dtype, c.dim, size, packed), a.check)
			}
		}
	}
}

// alikeKey is the value of every element of the keys in makeAlike.
const alikeKey = 32

// makeAlike makes all keys identical, and gives each query scores of about the size c.alike with
// random signs.
func (c attentionCase) makeAlike(g *kerneltest.Rig, queries, keys matrix) (q, k []float64) {
	all := g.Read(queries.buf)
	for r := range queries.rows {
		v := c.alike * (1 + g.Rand.Float64()) / float64(alikeKey*c.HeadDim)
		if g.Rand.IntN(2) == 0 {
			v = -v
		}
		for j := range queries.width {
			all[r*queries.Stride+queries.first+j] = v
		}
	}

	q = queries.write(g, all)
	all = g.Read(keys.buf)
	for r := range keys.rows {
		for j := range keys.width {
			all[r*keys.Stride+keys.first+j] = alikeKey
		}
	}

	return q, keys.write(g, all)
}

func TestAttentionRepeatsBits(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, c := range []struct {
		seq, dim int
		causal   bool
		family   string
	}{
		{kerneltest.Few(321, 70), 64, true, plain}, {321, 64, true, mma}, {321, 64, true, ""},
		{2600, 64, true, ""}, {2601, 64, true, ""}, {700, 64, false, ""}, {2600, 128, true, ""},
		{2501, 128, true, ""}, {320, 64, true, ""}, {700, 120, false, ""},
	} {
		g.Scope(fmt.Sprintf("%v-s%dd%d", c.family, c.seq, c.dim), func(g *kerneltest.Rig) {
			a := Geometry{Batch: 3, Seq: c.seq, Heads: 6, KVHeads: kerneltest.Few(2, 6),
				HeadDim: c.dim, Causal: c.causal}
			one := attentionCase{Geometry: a, dtype: kerneltest.Bf16}
			if c.seq%2 == 1 {
				one.starts = startsOf(a.Batch, a.Seq, cuts(g.Rand)["long"])
			}
			variant := kernel.Variant{Family: c.family}
			r := one.benchmark(g, &variant)
			var first [4][]float64
			for run := range kerneltest.Few(3, 2) {
				variant.Size = 2 * run // results must not depend on the order of the heads
				r.forward()
				r.backward()
				for i, b := range []*kerneltest.Buffer{r.y, r.dq, r.dk, r.dv} {
					got := g.Read(b)
					if run == 0 {
						first[i] = got
					} else if kerneltest.Distance(got, first[i]) != 0 {
						g.Errorf("array %d differs on run %d", i, run)
					}
				}
			}
		})
	}
}

// attentionRun holds the launches and results of one set of arrays.
type attentionRun struct {
	forward, backward func()
	y, dq, dk, dv     *kerneltest.Buffer
}

// fillTiles fills a buffer with copies of at most a million random numbers. Drawing them all would
// take longer than the tests.
func fillTiles(g *kerneltest.Rig, b *kerneltest.Buffer) {
	tile, _ := g.Normal(min(b.N, 1<<20), b.Dtype, 0)
	for i := 0; i < b.N; i += tile.N {
		size := min(tile.N, b.N-i) * b.Dtype.Size()
		g.Must(g.Ctx.CopyOnDevice(b.Ptr.Offset(i*b.Dtype.Size()), tile.Ptr, size, g.Stream))
	}
}

func (c attentionCase) benchmark(g *kerneltest.Rig, variant *kernel.Variant) attentionRun {
	queryWidth, keyWidth := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	in := c.matrices(g, 0, queryWidth, keyWidth, keyWidth)
	d := c.matrices(g, 0, queryWidth, keyWidth, keyWidth)
	y, dy := c.matrices(g, 0, queryWidth)[0], c.matrices(g, 0, queryWidth)[0]
	for _, m := range append(in, dy) {
		fillTiles(g, m.buf)
	}

	r := attentionRun{y: y.buf, dq: d[0].buf, dk: d[1].buf, dv: d[2].buf}
	normalizers, stats := g.Alloc(2*c.Batch*c.Seq*c.Heads, kerneltest.F32, 0),
		g.Alloc(Backward{Geometry: c.Geometry, Type: c.dtype}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
	a := c.Geometry
	if c.turned {
		angles := g.Alloc(c.Seq*c.HeadDim, kerneltest.F32, 0)
		fillTiles(g, angles)
		a.Cos, a.Sin = angles.Ptr, angles.Ptr.Offset(4*c.Seq*c.HeadDim/2)
	}

	a.Documents = c.documents(g)
	r.forward = func() {
		g.Must(attend(g.Set, g.Stream, a, *variant, y.Rows, normalizers.Ptr, in[0].Rows,
			in[1].Rows, in[2].Rows, c.dtype))
	}
	r.backward = func() {
		g.Must(attendBackward(g.Set, g.Stream, a, *variant, d[0].Rows, d[1].Rows, d[2].Rows, stats.Ptr,
			dy.Rows, in[0].Rows, in[1].Rows,
			in[2].Rows, y.Rows, normalizers.Ptr, c.dtype))
	}
	return r
}
