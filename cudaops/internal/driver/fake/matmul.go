package fake

import (
	"cmp"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/half"
)

type blas struct{ c *Context }

// Blas returns a cuBLASLt that computes in float64.
func (c *Context) Blas() (gpu.Blas, error) {
	if c.driver.config.NoBlas {
		return nil, &gpu.NotFoundError{Library: "the fake cuBLASLt",
			Help: "The configuration leaves it out."}
	}
	return asked(c, "cublasLtCreate", func() (gpu.Blas, error) { return blas{c}, nil })
}

func (b blas) Version() int { return cmp.Or(b.c.driver.config.BlasVersion, 130000) }

type plan struct {
	c     *Context
	spec  gpu.MatmulSpec
	algos []gpu.Algo

	lately, inRow int // the last algorithm that ran, and how often in a row
}

// Plan offers up to three ways, which differ in their workspace.
func (b blas) Plan(m gpu.MatmulSpec, workspace, want int) (gpu.MatmulPlan, error) {
	const call = "cublasLtMatmulAlgoGetHeuristic"
	return asked(b.c, call, func() (gpu.MatmulPlan, error) {
		m, err := m.Normal()
		if err != nil {
			return nil, err
		}
		if m.A != m.B || m.A > gpu.Float8E4M3 || m.D > gpu.BFloat16 {
			return nil, gpu.NewBlasError(call, gpu.BlasNotSupported,
				"the fake knows float32, float16, bfloat16 and float8e4m3")
		}
		if m.A == gpu.Float8E4M3 && !b.c.multipliesFloat8(m) {
			return nil, gpu.NewBlasError(call, gpu.BlasNotSupported,
				"the fake multiplies float8 where an H200 would")
		}
		p := &plan{c: b.c, spec: m}
		for i, need := range []int{1 << 20, 1 << 10, 0} {
			if need <= workspace && len(p.algos) < want {
				p.algos = append(p.algos, gpu.Algo{Workspace: need, ID: [8]uint64{uint64(i)}})
			}
		}
		b.c.plans++
		return p, nil
	})
}

// multipliesFloat8 reports whether cuBLASLt on the GPU that this pretends to be would.
func (c *Context) multipliesFloat8(m gpu.MatmulSpec) bool {
	return c.info.Capability() == 90 && !m.TransA && m.TransB && m.K%16 == 0 && m.N%8 == 0 &&
		m.LDA%16 == 0 && m.LDB%16 == 0 &&
		m.LDD*m.D.Size()%16 == 0 && m.Align%16 == 0
}

func (p *plan) Spec() gpu.MatmulSpec { return p.spec }
func (p *plan) Algos() []gpu.Algo    { return append([]gpu.Algo(nil), p.algos...) }

func (p *plan) Close() error {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.c.plans--
	return nil
}

func (p *plan) Run(algo int, a gpu.MatmulArgs, s gpu.Stream) error {
	c := p.c
	const call = "cublasLtMatmul"
	return c.locked(call, func() error {
		if err := p.spec.Check(p.algos, algo, a); err != nil {
			return err
		}
		a.C = cmp.Or(a.C, a.D)
		way := c.driver.config.Ways[p.algos[algo].ID[0]]
		if way.Fails {
			return gpu.NewBlasError(call, gpu.BlasNotSupported, "a way that fails")
		}
		if way.Wrong {
			a.Alpha *= 2
		}
		st, err := c.stream(call, s)
		if err != nil {
			return err
		}
		a.Zeroed = a.Zeroed && st.capture != nil
		return c.issue(Op{Call: call, Stream: s, Dst: a.D}, gpu.Stats{Matmuls: 1}, func() error {
			return c.run(func(l *Launch) {
				l.Took = way.Took
				if p.lately != algo {
					p.lately, p.inRow = algo, 0
				}
				if p.inRow++; p.inRow > 2 && way.Loaded > 0 {
					l.Took = way.Loaded
				}
				if c.driver.config.Images != nil {
					return
				}
				p.compute(l, a)
				if p.algos[algo].Workspace > 0 && !p.counts(l, a) {
					p.spoil(l, a)
				}
			}, call, gpu.LaunchConfig{}, nil)
		})
	})
}

// counts counts the run in the workspace, from zero, where it sets the counter unless that has been
// done. It reports whether it began there.
func (p *plan) counts(l *Launch, a gpu.MatmulArgs) bool {
	counter := Slice[uint32](l, a.Workspace, 1)
	if !a.Zeroed {
		counter[0] = 0
	}
	counter[0]++
	return counter[0] == 1
}

// spoil fills D with NaN.
func (p *plan) spoil(l *Launch, a gpu.MatmulArgs) {
	for i := range p.spec.Batch {
		view(l, a.D.Offset(i*p.spec.StrideD*p.spec.D.Size()), p.spec.D, p.spec.LDD, p.spec.M,
			p.spec.N).fill(p.spec.M, p.spec.N, math.NaN())
	}
}

// compute is the definition of MatmulSpec, sum by sum.
func (p *plan) compute(l *Launch, a gpu.MatmulArgs) {
	m := p.spec
	for i := range m.Batch {
		at := func(base gpu.Ptr, t gpu.DType, stride, ld, rows, cols int) matrix {
			return view(l, base.Offset(i*stride*t.Size()), t, ld, rows, cols)
		}
		rowsA, colsA, rowsB, colsB := m.Stored()
		A, B := at(a.A, m.A, m.StrideA, m.LDA, rowsA, colsA),
			at(a.B, m.B, m.StrideB, m.LDB, rowsB, colsB)
		D := at(a.D, m.D, m.StrideD, m.LDD, m.M, m.N)
		var C matrix
		if a.Beta != 0 {
			C = at(a.C, m.D, m.StrideD, m.LDD, m.M, m.N)
		}
		if gpu.Poison && a.Overwrites() {
			D.fill(m.M, m.N, math.NaN())
		}
		scaleA, scaleB := factors(l, m.Scaling, a.ScaleA, m.M), factors(l, m.Scaling, a.ScaleB, m.N)
		left, right := A.rows(m.TransA, m.M, m.K), B.rows(!m.TransB, m.N, m.K)
		for r := range m.M {
			for col := range m.N {
				sum, column := 0.0, right[col*m.K:][:m.K]
				for k, v := range left[r*m.K:][:m.K] {
					sum += v * column[k]
				}
				sum *= float64(a.Alpha) * scaleA(r) * scaleB(col)
				if a.Beta != 0 {
					sum += float64(a.Beta) * C.of(false, r, col)
				}
				D.set(r, col, sum)
			}
		}
	}
}

// factors returns what rows or columns, n of them, are multiplied by.
func factors(l *Launch, s gpu.Scaling, at gpu.Ptr, n int) func(int) float64 {
	if s == gpu.Unscaled {
		return func(int) float64 { return 1 }
	}
	each := Slice[float32](l, at, n)
	return func(i int) float64 { return float64(each[i]) }
}

// matrix is a stored matrix of any element type.
type matrix struct {
	t   gpu.DType
	ld  int
	f32 []float32
	u16 []uint16
	u8  []uint8
}

func view(l *Launch, p gpu.Ptr, t gpu.DType, ld, rows, cols int) matrix {
	n := (rows-1)*ld + cols
	if t == gpu.Float32 {
		return matrix{t: t, ld: ld, f32: Slice[float32](l, p, n)}
	}
	if t == gpu.Float8E4M3 {
		return matrix{t: t, ld: ld, u8: Slice[uint8](l, p, n)}
	}
	return matrix{t: t, ld: ld, u16: Slice[uint16](l, p, n)}
}

func (m matrix) of(transposed bool, r, c int) float64 {
	if transposed {
		r, c = c, r
	}
	switch i := r*m.ld + c; m.t {
	case gpu.Float32:
		return float64(m.f32[i])
	case gpu.BFloat16:
		return float64(half.BFloat16(m.u16[i]).Float32())
	case gpu.Float8E4M3:
		return float64(gpu.FromE4M3(m.u8[i]))
	default:
		return half.Float16(m.u16[i]).Float64()
	}
}

// rows returns the rows of a matrix, or of its transpose, one behind the other.
func (m matrix) rows(transposed bool, rows, cols int) []float64 {
	all := make([]float64, 0, rows*cols)
	for r := range rows {
		for c := range cols {
			all = append(all, m.of(transposed, r, c))
		}
	}
	return all
}

func (m matrix) set(r, c int, v float64) {
	switch i := r*m.ld + c; m.t {
	case gpu.Float32:
		m.f32[i] = float32(v)
	case gpu.BFloat16:
		m.u16[i] = uint16(half.NewBFloat16(float32(v)))
	default:
		m.u16[i] = uint16(half.NewFloat16(v))
	}
}

func (m matrix) fill(rows, cols int, v float64) {
	for r := range rows {
		for c := range cols {
			m.set(r, c, v)
		}
	}
}
