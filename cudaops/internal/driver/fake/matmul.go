package fake

import (
	"cmp"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

type blas struct{ c *Context }

// Blas returns a cuBLASLt that computes in float64.
func (c *Context) Blas() (gpu.Blas, error) {
	if c.driver.config.NoBlas {
		return nil, &gpu.NotFoundError{Library: "the fake cuBLASLt",
			Help: "The configuration leaves it out."}
	}
	return lockedResult(c, "cublasLtCreate", func() (gpu.Blas, error) { return blas{c}, nil })
}

func (b blas) Version() int { return cmp.Or(b.c.driver.config.BlasVersion, 130000) }

type plan struct {
	c     *Context
	spec  gpu.MatmulSpec
	algos []gpu.Algo

	lastAlgo, repeats int // last algorithm used, and the number of consecutive runs with it
	runs              int // total number of runs
}

// Plan offers up to three variants with different workspace sizes.
func (b blas) Plan(m gpu.MatmulSpec, workspace, want int) (gpu.MatmulPlan, error) {
	return lockedResult(b.c, "cublasLtMatmulAlgoGetHeuristic", func() (gpu.MatmulPlan, error) {
		m, err := m.Normal()
		if err != nil {
			return nil, err
		}
		float8 := b.c.info.Capability() == 90 && !m.TransA && m.TransB && m.K%16 == 0 &&
			m.N%8 == 0 && m.Align%16 == 0 // the limits of an H200
		if m.A != m.B || m.A > gpu.Float8E4M3 || m.D > gpu.BFloat16 || m.Scaled() && !float8 {
			return nil, refused(gpu.BlasNotSupported,
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
		variant := c.driver.config.Variants[p.algos[algo].ID[0]]
		if variant.Fails {
			return refused(gpu.BlasNotSupported, "a variant that fails")
		}
		if variant.Wrong {
			a.Alpha *= 2
		}
		c.issue(s, Op{Call: call}, func() error {
			return c.run(func(l *Launch) {
				l.Took = variant.Took
				if p.lastAlgo != algo {
					p.lastAlgo, p.repeats = algo, 0
				}
				p.runs++
				if p.repeats++; p.repeats > 2 && variant.Loaded > 0 {
					l.Took = variant.Loaded + time.Duration(p.runs)*variant.Warms
				}
				if c.driver.config.Images != nil {
					return
				}
				l.checkRange(a.Workspace, p.algos[algo].Workspace)
				p.compute(l, a)
			}, gpu.LaunchConfig{}, nil)
		})
		return nil
	})
}

// compute computes the product as defined by MatmulSpec, in float64.
func (p *plan) compute(l *Launch, a gpu.MatmulArgs) {
	m := p.spec
	strideA, strideB := m.K, m.N
	if m.TransA {
		strideA = m.M
	}

	if m.TransB {
		strideB = m.K
	}

	for i := range m.Batch {
		at := func(base gpu.Ptr, t gpu.DType, n int) []byte {
			return Slice[byte](l, base.Offset(i*n*t.Size()), n*t.Size())
		}
		numbers := func(base gpu.Ptr, t gpu.DType, n int) []float64 {
			x := make([]float64, n)
			gpu.Decode(x, t, at(base, t, n))
			return x
		}
		left, right := numbers(a.A, m.A, m.M*m.K), numbers(a.B, m.B, m.N*m.K)
		if m.Scaled() { // rows of both operands have length K
			scale(left, Slice[float32](l, a.ScaleA, m.M))
			scale(right, Slice[float32](l, a.ScaleB, m.N))
		}
		sums := numbers(a.C, m.D, m.M*m.N)
		gemm.Mul(m.TransA, m.TransB, m.M, m.N, m.K, float64(a.Alpha), left, strideA,
			right, strideB, float64(a.Beta), sums, m.N)
		gpu.Encode(at(a.D, m.D, len(sums)), m.D, sums)
	}
}

// scale multiplies each row by its scale.
func scale(x []float64, factors []float32) {
	for i := range x {
		x[i] *= float64(factors[i*len(factors)/len(x)])
	}
}
