package fake

import (
	"bytes"
	"cmp"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
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
	return c.watched(p.spec.Work(), s, call, func() error {
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
		return c.issue(Op{Call: call, Stream: s}, func() error {
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
				Slice[byte](l, a.Workspace, p.algos[algo].Workspace)
				p.compute(l, a)
			}, call, gpu.LaunchConfig{}, nil)
		})
	})
}

// compute is the definition of MatmulSpec, sum by sum.
func (p *plan) compute(l *Launch, a gpu.MatmulArgs) {
	m := p.spec
	rowsA, colsA, rowsB, colsB := m.Stored()
	scaleA, scaleB := factors(l, m.Scaled(), a.ScaleA, m.M), factors(l, m.Scaled(), a.ScaleB, m.N)
	for i := range m.Batch {
		rows := func(base gpu.Ptr, t gpu.DType, stride, ld, rows, cols int) [][]byte {
			return rowsAt(l, base.Offset(i*stride*t.Size()), ld*t.Size(), rows, cols*t.Size())
		}
		d := rows(a.D, m.D, m.StrideD, m.LDD, m.M, m.N)
		if gpu.Poison && a.Overwrites() {
			for _, row := range d {
				copy(row, bytes.Repeat([]byte{0xff}, len(row)))
			}
		}
		left := numbers(rows(a.A, m.A, m.StrideA, m.LDA, rowsA, colsA), m.A, m.TransA)
		right := numbers(rows(a.B, m.B, m.StrideB, m.LDB, rowsB, colsB), m.B, !m.TransB)
		var added [][]float64
		if a.Beta != 0 {
			added = numbers(rows(a.C, m.D, m.StrideD, m.LDD, m.M, m.N), m.D, false)
		}
		sums := make([]float64, m.N)
		for r, row := range d {
			for col := range sums {
				sum, column := 0.0, right[col]
				for k, v := range left[r] {
					sum += v * column[k]
				}
				sum *= float64(a.Alpha) * scaleA(r) * scaleB(col)
				if a.Beta != 0 {
					sum += float64(a.Beta) * added[r][col]
				}
				sums[col] = sum
			}
			gpu.Encode(row, m.D, sums)
		}
	}
}

// factors returns what rows or columns, n of them, are multiplied by.
func factors(l *Launch, scaled bool, at gpu.Ptr, n int) func(int) float64 {
	if !scaled {
		return func(int) float64 { return 1 }
	}
	each := Slice[float32](l, at, n)
	return func(i int) float64 { return float64(each[i]) }
}

// rowsAt is the rows of a matrix, pitch bytes from one to the next.
func rowsAt(l *Launch, p gpu.Ptr, pitch, rows, bytes int) [][]byte {
	all := Slice[byte](l, p, (rows-1)*pitch+bytes)
	found := make([][]byte, rows)
	for r := range found {
		found[r] = all[r*pitch:][:bytes]
	}
	return found
}

// numbers decodes a matrix, and transposes it where asked for.
func numbers(rows [][]byte, t gpu.DType, transpose bool) [][]float64 {
	m := make([][]float64, len(rows))
	for r := range rows {
		m[r] = make([]float64, len(rows[r])/t.Size())
		gpu.Decode(m[r], t, rows[r])
	}
	if !transpose {
		return m
	}
	columns := make([][]float64, len(m[0]))
	for c := range columns {
		columns[c] = make([]float64, len(m))
		for r := range m {
			columns[c][r] = m[r][c]
		}
	}
	return columns
}
