package decode

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
)

// stepModel describes a model for testing the decoding of a token.
type stepModel struct {
	dim, ff, heads, kvHeads, headDim, layers, vocab, capacity, window int

	layerNorm, bias, headNorm, plusOne, postNorm, gelu, plain, turned, paged bool
}

// stepLaunches collects the launches that decode a token, and the arrays that they write.
type stepLaunches struct {
	g        *kerneltest.Rig
	t        gpu.DType
	launches []any
	results  map[string]*kerneltest.Buffer
	restore  []func() // restore the caches that a step updates
}

func (s *stepLaunches) add(launch any) { s.launches = append(s.launches, launch) }

func (s *stepLaunches) result(n int) gpu.Ptr {
	b := s.g.Alloc(n, s.t, 0)
	s.results[fmt.Sprintf("result %d of launch %d, a %d", len(s.results), len(s.launches), n)] = b
	return b.Ptr
}

// random returns n random numbers with standard deviation 1/√depth.
func (s *stepLaunches) random(n, depth int) gpu.Ptr {
	const different = 65537 // a prime, so that the rows of a matrix differ
	raw := kerneltest.Encode(scaled(s.g.Rand, min(n, different), depth), s.t)
	b := s.g.Alloc(n, s.t, 0)
	all := make([]byte, 0, b.Bytes())
	for len(all) < b.Bytes() {
		all = append(all, raw[:min(len(raw), b.Bytes()-len(all))]...)
	}
	s.g.Must(s.g.Ctx.CopyToDevice(b.Ptr, all, s.g.Stream))
	return b.Ptr
}

// factors returns n random float32 norm parameters with mean center.
func (s *stepLaunches) factors(n int, center float64) gpu.Ptr {
	x := make([]float64, n)
	for i := range x {
		x[i] = center + 0.1*s.g.Rand.NormFloat64()
	}
	b, _ := s.g.Upload(x, kerneltest.F32, 0)
	return b.Ptr
}

func (s *stepLaunches) norm(m stepModel, x gpu.Ptr, rows, d int) gpu.Ptr {
	y := s.result(rows * d)
	if m.layerNorm {
		stats := s.g.Alloc(rows*norm.LayerNormStats, kerneltest.F32, 0)
		s.add(norm.LayerNorm{Y: y, Stats: stats.Ptr, X: x, W: s.factors(d, 1), B: s.factors(d, 0), Rows: rows,
			D: d, Eps: 1e-5, Type: s.t})
		return y
	}

	w := s.factors(d, 1)
	if m.plusOne {
		one := s.g.Alloc(d, kerneltest.F32, 0)
		s.add(elementwise.Unary{Op: elementwise.AddScalar, P: 1, Y: one.Ptr, X: s.factors(d, 0), N: d,
			Type: kerneltest.F32})
		w = one.Ptr
	}
	rstd := s.g.Alloc(rows, kerneltest.F32, 0)
	s.add(norm.RMSNorm{Y: y, Rstd: rstd.Ptr, X: x, W: w, Rows: rows, D: d, Eps: 1e-5, Type: s.t})
	return y
}

func (s *stepLaunches) sum(a, b gpu.Ptr, n int) gpu.Ptr {
	y := s.result(n)
	s.add(elementwise.Binary{Op: elementwise.Add, Y: y, A: elementwise.Operand{Ptr: a},
		B: elementwise.Operand{Ptr: b, Repeat: 1, Period: n}, N: n, Type: s.t})
	return y
}

// product adds y = x·wᵀ, with a bias if the model has one. If c is not null, it also adds c, after a norm
// in models with postNorm.
func (s *stepLaunches) product(m stepModel, x, c gpu.Ptr, columns, d int) gpu.Ptr {
	y := s.result(columns)
	p := Product{Y: y, X: x, W: s.random(columns*d, d), Columns: columns, D: d, Type: s.t}
	if !m.bias && !m.postNorm {
		p.C = c
		s.add(p)
		return y
	}

	s.add(p)
	if m.bias {
		y = s.sum(y, s.random(columns, 1), columns)
	}
	if c != 0 && m.postNorm {
		y = s.norm(m, y, 1, columns)
	}
	if c != 0 {
		y = s.sum(c, y, columns)
	}
	return y
}

// build adds the launches that decode the token at the given position.
func (m stepModel) build(s *stepLaunches, position int) (logits gpu.Ptr) {
	at := s.g.UploadInts([]int{position})
	x := s.result(m.dim)
	s.add(embedding.Forward{Y: x, IDs: s.g.UploadInts([]int{m.vocab - 1}), Table: s.random(m.vocab*m.dim, 1),
		Rows: 1, Vocab: m.vocab, D: m.dim, Type: s.t, TableType: s.t})
	if m.plusOne {
		y := s.result(m.dim)
		s.add(elementwise.Unary{Op: elementwise.MulScalar, P: 1.5, Y: y, X: x, N: m.dim, Type: s.t})
		x = y
	}

	qd, kd, half := m.heads*m.headDim, m.kvHeads*m.headDim, m.headDim/2
	var cos, sin gpu.Ptr
	if m.turned {
		cosines, sines := make([]float64, m.capacity*half), make([]float64, m.capacity*half)
		for i := range cosines {
			sines[i], cosines[i] = math.Sincos(float64(i))
		}
		c, _ := s.g.Upload(cosines, kerneltest.F32, 0)
		n, _ := s.g.Upload(sines, kerneltest.F32, 0)
		cos, sin = c.Ptr, n.Ptr
	}

	for range m.layers {
		h := s.norm(m, x, 1, m.dim)
		wide := s.product(m, h, 0, qd+2*kd, m.dim)
		size := s.t.Size()
		q, k, v := wide, wide.Offset(qd*size), wide.Offset((qd+kd)*size)
		if m.headNorm {
			each := m
			each.layerNorm = false
			q, k = s.norm(each, q, m.heads, m.headDim), s.norm(each, k, m.kvHeads, m.headDim)
		}

		g := Geometry{Heads: m.heads, KVHeads: m.kvHeads, HeadDim: m.headDim, Capacity: m.capacity,
			Window: m.window, Scale: 0.3}
		rows := m.capacity
		if m.paged {
			rows = (m.capacity + PageTokens - 1) / PageTokens * PageTokens
		}
		keys, before := s.g.Normal(rows*kd, s.t, 0)
		values, _ := s.g.Normal(rows*kd, s.t, 0)
		arrived, _ := s.g.Upload(make([]float64, g.Counters()), kerneltest.F32, 0)
		kept := kerneltest.Encode(before, s.t)
		s.restore = append(s.restore, func() {
			s.g.Must(s.g.Ctx.CopyToDevice(keys.Ptr, kept, s.g.Stream))
		})
		s.results[fmt.Sprint("keys ", len(s.launches))] = keys
		s.results[fmt.Sprint("values ", len(s.launches))] = values
		y := s.result(qd)
		attention := Attention{Geometry: g, Y: y, Q: q, K: k, V: v, Keys: keys.Ptr, Values: values.Ptr, Cos: cos,
			Sin: sin, Position: at, Arrived: arrived.Ptr, Type: s.t}
		if m.paged {
			table := append([]int{position}, s.g.Rand.Perm(rows/PageTokens)...)
			row := func(p gpu.Ptr) kernel.Rows { return kernel.Rows{Ptr: p, Stride: qd} }
			paged := Paged{Geometry: g, Y: y, Q: row(q), K: row(k), V: row(v), Keys: keys.Ptr, Values: values.Ptr,
				Cos: cos, Sin: sin, Table: s.g.UploadInts(table), Arrived: arrived.Ptr, Rows: 1,
				Columns: len(table), Type: s.t}
			paged.Parts = s.g.Alloc(paged.PartsBytes(s.g.Info)/4, kerneltest.F32, 0).Ptr
			s.add(paged)
		} else {
			attention.Parts = s.g.Alloc(g.PartsBytes(s.g.Info)/4, kerneltest.F32, 0).Ptr
			s.add(attention)
		}

		x = s.product(m, y, x, m.dim, qd)
		h = s.norm(m, x, 1, m.dim)
		if m.plain {
			h = s.product(m, h, 0, m.ff, m.dim)
			y := s.result(m.ff)
			s.add(elementwise.Unary{Op: elementwise.GELU, Y: y, X: h, N: m.ff, Type: s.t})
			h = y
		} else {
			y := s.result(m.ff)
			s.add(Gated{H: y, X: h, W: s.random(2*m.ff*m.dim, m.dim), F: m.ff, D: m.dim, GELU: m.gelu,
				Type: s.t})
			h = y
		}
		x = s.product(m, h, x, m.dim, m.ff)
	}

	// Like a graph, select rows with an embedding lookup.
	row := s.result(m.dim)
	s.add(embedding.Forward{Y: row, IDs: s.g.UploadInts([]int{0}), Table: x, Rows: 1, Vocab: 1, D: m.dim,
		Type: s.t, TableType: s.t})
	x = row

	plain := m
	plain.bias, plain.postNorm = false, false
	return s.product(plain, s.norm(m, x, 1, m.dim), 0, m.vocab, m.dim)
}

// stepModels covers the features of all model families, as well as odd sizes.
var stepModels = []stepModel{
	{dim: 64, ff: 96, heads: 4, kvHeads: 2, headDim: 16, layers: 1, vocab: 33, capacity: 40, turned: true},
	{dim: 768, ff: 2048, heads: 12, kvHeads: 12, headDim: 64, layers: 2, vocab: 1000, capacity: 1100, turned: true},
	{dim: 2048, ff: 8192, heads: 32, kvHeads: 8, headDim: 64, layers: 2, vocab: 5001, capacity: 1100, turned: true},
	{dim: 1024, ff: 14336, heads: 32, kvHeads: 8, headDim: 128, layers: 1, vocab: 77, capacity: 2100, turned: true},
	{dim: 896, ff: 1536, heads: 14, kvHeads: 2, headDim: 64, layers: 2, vocab: 301, capacity: 90, bias: true, turned: true},
	{dim: 768, ff: 3072, heads: 12, kvHeads: 12, headDim: 64, layers: 2, vocab: 501, capacity: 100, layerNorm: true,
		bias: true, plain: true},
	{dim: 512, ff: 1024, heads: 8, kvHeads: 4, headDim: 128, layers: 2, vocab: 100, capacity: 300, headNorm: true,
		turned: true},
	{dim: 640, ff: 2048, heads: 4, kvHeads: 1, headDim: 256, layers: 3, vocab: 500, capacity: 600, window: 50,
		headNorm: true, plusOne: true, postNorm: true, gelu: true, turned: true},
	{dim: 72, ff: 40, heads: 3, kvHeads: 3, headDim: 24, layers: 1, vocab: 5, capacity: 9, turned: true},
}

// TestStep checks that a Step computes the same results, within rounding, as the separate launches.
// Results are poisoned before every run, and repeated runs must agree bit for bit.
func TestStep(t *testing.T) {
	g := kerneltest.NewRig(t)
	if g.Info.Capability() != 90 {
		t.Skip("needs a GPU of compute capability 9.0")
	}

	for i, m := range stepModels {
		for _, dt := range kerneltest.StorageTypes {
			for _, lanes := range []bool{false, true} {
				if !g.Some() {
					continue
				}
				m.paged = g.Rand.IntN(2) == 0
				g.Scope(fmt.Sprintf("%d/%v/%v/%v", i, dt, lanes, m.paged), func(g *kerneltest.Rig) {
					position := []int{m.capacity - 1, m.capacity / 2, 0}[g.Rand.IntN(3)]
					compareStep(g, m, dt, position, lanes)
				})
			}
		}
	}
}

func compareStep(g *kerneltest.Rig, m stepModel, dt gpu.DType, position int, lanes bool) {
	s := &stepLaunches{g: g, t: dt, results: map[string]*kerneltest.Buffer{}}
	m.build(s, position)
	for _, l := range s.launches {
		g.Must(g.Launch(g.Stream, l))
	}
	want := map[string][]float64{}
	for name, b := range s.results {
		want[name] = g.Read(b)
	}

	step := Step{Launches: s.launches, Lanes: lanes}
	g.Must(step.Check(g.Info))
	table, err := step.Encode(g.Info)
	g.Must(err)
	step.Table = g.Alloc(TableBytes(len(s.launches)), gpu.Uint8, 0).Ptr
	g.Must(g.Ctx.CopyToDevice(step.Table, table, g.Stream))
	arrived, _ := g.Upload(make([]float64, Counters), kerneltest.F32, 0)
	step.Arrived = arrived.Ptr

	var first map[string][]float64
	for run := range 4 {
		for name, b := range s.results {
			if name[0] == 'r' {
				g.Must(g.Ctx.Memset8(b.Ptr, 0xff, b.Bytes(), g.Stream))
			}
		}
		for _, restore := range s.restore {
			restore()
		}
		g.Must(g.Launch(g.Stream, step))

		got := map[string][]float64{}
		for name, b := range s.results {
			got[name] = g.Read(b)
			tolerance := kerneltest.Forward(dt) * float64(5+10*m.layers)
			if e := kerneltest.Distance(got[name], want[name]); !(e <= tolerance+kerneltest.Lost(want[name], dt)) {
				g.Errorf("%s at position %d: relative error %.3g, want at most %.3g", name, position, e, tolerance)
			}
		}
		if run == 0 {
			first = got
		}
		for name := range got {
			if !slices.Equal(got[name], first[name]) {
				g.Errorf("run %d: %s has different bits", run, name)
			}
		}
		if g.Failed() {
			return
		}
	}
}

// TestStepWaits checks that an op waits for other blocks exactly if it reads memory written since the
// last wait, or overwrites memory that another block may still be reading or writing.
func TestStepWaits(t *testing.T) {
	const d = gpu.Ptr(1 << 20)
	x, h, y, z, w := d, 2*d, 3*d, 4*d, 5*d
	s := Step{Launches: []any{
		embedding.Forward{Y: x, IDs: w, Table: w, Rows: 1, Vocab: 9, D: 64},
		norm.RMSNorm{Y: h, X: x, W: w, Rows: 1, D: 64}, // from shared memory
		Product{Y: y, X: h, W: w, Columns: 9, D: 64},
		Product{Y: z, X: h, W: w, Columns: 64, D: 64, C: x}, // block 0 wrote x: wait
		Product{Y: y + 512, X: h, W: w, Columns: 9, D: 64},
		norm.RMSNorm{Y: h + 512, X: z, W: w, Rows: 1, D: 64},              // wait
		Product{Y: z, X: h + 512, W: w, Columns: 64, D: 64},               // overwrites an operand: wait
		elementwise.Unary{Op: elementwise.GELU, Y: y + 1024, X: z, N: 64}, // wait
		Product{Y: z + 512, X: y + 1024, W: w, Columns: 64, D: 64},
		embedding.Forward{Y: y + 2048, IDs: w, Table: z + 512, Rows: 1, Vocab: 1, D: 64}, // wait
	}}
	p, err := s.program(gpu.DeviceInfo{Major: 9, SMs: 4, SharedPerBlock: 227 << 10})
	require.NoError(t, err)
	var flags []int
	for _, o := range p.ops {
		flags = append(flags, o.flags)
	}
	require.Equal(t, []int{0, flagFirstHeld, flagFirstHeld, flagWait | flagFirstHeld, flagFirstHeld, flagWait,
		flagWait | flagFirstHeld, flagWait, flagFirstHeld, flagWait}, flags)

	s.Launches = []any{elementwise.Unary{Op: elementwise.GELU, Y: x, X: x, N: 64}}
	require.ErrorIs(t, s.Check(gpu.DeviceInfo{Major: 9, SharedPerBlock: 227 << 10}), errUnsupported)
}
