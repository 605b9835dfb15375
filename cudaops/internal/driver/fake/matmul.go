package fake

import (
	"cmp"
	"slices"

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
		float8 := b.c.info.Capability() == 90 && !m.TransA && m.TransB && m.K%16 == 0 &&
			m.N%8 == 0 && m.Align%16 == 0 // as on an H200
		if m.A != m.B || m.A > gpu.Float8E4M3 || m.D > gpu.BFloat16 || m.Scaled() && !float8 {
			return nil, gpu.NewError(call, gpu.BlasNotSupported, "",
				"the fake does not multiply these types, or not in this layout")
		}
		p := &plan{c: b.c, spec: m}
		for i, need := range []int{1 << 20, 1 << 10, 0} {
			if need <= workspace && len(p.algos) < want {
				p.algos = append(p.algos, gpu.Algo{Workspace: need, ID: [8]uint64{uint64(i)}})
			}
		}
		return p, nil
	})
}

func (p *plan) Algos() []gpu.Algo { return slices.Clone(p.algos) }

func (p *plan) Run(algo int, a gpu.MatmulArgs, s gpu.Stream) error {
	c := p.c
	const call = "cublasLtMatmul"
	if err := p.spec.Ready(c, p.algos, algo, &a, s); err != nil {
		return err
	}
	return c.watched(p.spec.Work(), s, call, func() error {
		way := c.driver.config.Ways[p.algos[algo].ID[0]]
		if way.Fails {
			return gpu.NewError(call, gpu.BlasNotSupported, "", "a way that fails")
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
	scaleA, scaleB := slices.Repeat([]float32{1}, m.M), slices.Repeat([]float32{1}, m.N)
	if m.Scaled() {
		scaleA, scaleB = Slice[float32](l, a.ScaleA, m.M), Slice[float32](l, a.ScaleB, m.N)
	}
	for i := range m.Batch {
		at := func(base gpu.Ptr, t gpu.DType, n int) []byte {
			return Slice[byte](l, base.Offset(i*n*t.Size()), n*t.Size())
		}
		d := at(a.D, m.D, m.M*m.N)
		left := numbers(at(a.A, m.A, m.M*m.K), m.A, m.M, m.K, m.TransA)
		right := numbers(at(a.B, m.B, m.N*m.K), m.B, m.N, m.K, !m.TransB)
		added := make([]float64, m.M*m.N)
		if a.Beta != 0 {
			added = numbers(at(a.C, m.D, m.M*m.N), m.D, m.M, m.N, false)
		}
		for j, add := range added {
			r, col := j/m.N, j%m.N
			sum, column := 0.0, right[col*m.K:]
			for k, v := range left[r*m.K:][:m.K] {
				sum += v * column[k]
			}
			added[j] = sum*float64(a.Alpha)*float64(scaleA[r])*float64(scaleB[col]) +
				float64(a.Beta)*add
		}
		gpu.Encode(d, m.D, added)
	}
}

// numbers decodes a matrix [rows, cols], which may be stored transposed.
func numbers(raw []byte, t gpu.DType, rows, cols int, transposed bool) []float64 {
	m := make([]float64, rows*cols)
	gpu.Decode(m, t, raw)
	if !transposed {
		return m
	}
	turned := make([]float64, len(m))
	for i := range turned {
		turned[i] = m[i%cols*rows+i/cols]
	}
	return turned
}
