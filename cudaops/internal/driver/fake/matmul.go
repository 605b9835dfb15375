package fake

import (
	"cmp"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

type blas struct{ c *Context }

// Blas returns a cuBLASLt that computes in float64.
func (c *Context) Blas() (gpu.Blas, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.driver.config.NoBlas {
		return nil, &gpu.NotFoundError{Library: "the fake cuBLASLt", Help: "The configuration leaves it out."}
	}
	if err := c.begin("cublasLtCreate"); err != nil {
		return nil, err
	}
	return blas{c}, nil
}

func (b blas) Version() int  { return cmp.Or(b.c.driver.config.BlasVersion, 130000) }
func (blas) Library() string { return "fake" }

type plan struct {
	c     *Context
	spec  gpu.MatmulSpec
	algos []gpu.Algo
	last  int           // the way that ran last
	busy  time.Duration // on end
}

// Plan offers up to three ways, which differ in their workspace.
func (b blas) Plan(m gpu.MatmulSpec, workspace, want int) (gpu.MatmulPlan, error) {
	c := b.c
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cublasLtMatmulAlgoGetHeuristic"
	if err := c.begin(call); err != nil {
		return nil, err
	}
	m, err := m.Normal()
	if err != nil {
		return nil, err
	}
	if m.A != m.B || m.A > gpu.Float8E4M3 || m.D > gpu.BFloat16 {
		return nil, gpu.NewBlasError(call, gpu.BlasNotSupported, "the fake knows float32, float16, bfloat16 and float8e4m3")
	}
	if m.A == gpu.Float8E4M3 && !c.multipliesFloat8(m) {
		return nil, gpu.NewBlasError(call, gpu.BlasNotSupported, "the fake multiplies float8 where an H200 would")
	}
	p := &plan{c: c, spec: m}
	for i, need := range []int{1 << 20, 1 << 10, 0} {
		if need <= workspace && len(p.algos) < want {
			p.algos = append(p.algos, gpu.Algo{Workspace: need, Waves: 1, ID: [8]uint64{uint64(i)}})
		}
	}
	c.plans++
	return p, nil
}

// multipliesFloat8 reports whether cuBLASLt on the GPU that this pretends to be would.
func (c *Context) multipliesFloat8(m gpu.MatmulSpec) bool {
	return c.info.Capability() == 90 && !m.TransA && m.TransB && m.K%16 == 0 && m.N%8 == 0 && m.LDA%16 == 0 && m.LDB%16 == 0 &&
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
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cublasLtMatmul"
	if err := c.begin(call); err != nil {
		return err
	}
	if err := p.spec.Check(p.algos, algo, a); err != nil {
		return err
	}
	if a.C == 0 {
		a.C = a.D
	}
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
			p.compute(l, a)
			if p.algos[algo].Workspace > 0 && !p.counts(l, a) {
				p.spoil(l, a)
			}
			l.Took = p.took(algo, way)
		}, call, gpu.LaunchConfig{}, nil)
	})
}

// counts counts the run in the workspace, from zero, where it sets the counter unless that has been done. It reports whether it began there.
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
		view(l, a.D.Offset(i*p.spec.StrideD*p.spec.D.Size()), p.spec.D, p.spec.LDD, p.spec.M, p.spec.N).fill(p.spec.M, p.spec.N, math.NaN())
	}
}

// took is how long a run takes.
func (p *plan) took(algo int, way Way) time.Duration {
	if p.last != algo {
		p.last, p.busy = algo, 0
	}
	p.busy += way.Took
	if way.Tired > 0 && p.busy > 40*time.Millisecond {
		return way.Tired
	}
	return way.Took
}

// compute is the definition of MatmulSpec, sum by sum.
func (p *plan) compute(l *Launch, a gpu.MatmulArgs) {
	m := p.spec
	for i := range m.Batch {
		at := func(base gpu.Ptr, t gpu.DType, stride, ld, rows, cols int) matrix {
			return view(l, base.Offset(i*stride*t.Size()), t, ld, rows, cols)
		}
		rowsA, colsA, rowsB, colsB := m.M, m.K, m.K, m.N
		if m.TransA {
			rowsA, colsA = colsA, rowsA
		}
		if m.TransB {
			rowsB, colsB = colsB, rowsB
		}
		A, B := at(a.A, m.A, m.StrideA, m.LDA, rowsA, colsA), at(a.B, m.B, m.StrideB, m.LDB, rowsB, colsB)
		D := at(a.D, m.D, m.StrideD, m.LDD, m.M, m.N)
		var C, bias matrix
		if a.Beta != 0 {
			C = at(a.C, m.D, m.StrideD, m.LDD, m.M, m.N)
		}
		if a.Bias != 0 {
			bias = view(l, a.Bias, m.D, m.N, 1, m.N)
		}
		if gpu.Poison && a.Overwrites() {
			D.fill(m.M, m.N, math.NaN())
		}
		scaleA, scaleB := factors(l, m.Scaling, a.ScaleA, m.M), factors(l, m.Scaling, a.ScaleB, m.N)
		for r := range m.M {
			for col := range m.N {
				sum := 0.0
				for k := range m.K {
					sum += A.of(m.TransA, r, k) * B.of(m.TransB, k, col)
				}
				sum *= float64(a.Alpha) * scaleA(r) * scaleB(col)
				if a.Beta != 0 {
					sum += float64(a.Beta) * C.of(false, r, col)
				}
				if a.Bias != 0 {
					sum += bias.of(false, 0, col)
				}
				D.set(r, col, activate(m.Epilogue, sum))
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

func activate(e gpu.Epilogue, x float64) float64 {
	switch e &^ gpu.Bias {
	case gpu.ReLU:
		return max(x, 0)
	case gpu.GELU:
		return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	return x
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
		return float64(math.Float32frombits(uint32(m.u16[i]) << 16))
	case gpu.Float8E4M3:
		return float64(gpu.FromE4M3(m.u8[i]))
	default:
		return fromHalf(m.u16[i])
	}
}

func (m matrix) set(r, c int, v float64) {
	switch i := r*m.ld + c; m.t {
	case gpu.Float32:
		m.f32[i] = float32(v)
	case gpu.BFloat16:
		m.u16[i] = toBrain(float32(v))
	default:
		m.u16[i] = toHalf(v)
	}
}

func (m matrix) fill(rows, cols int, v float64) {
	for r := range rows {
		for c := range cols {
			m.set(r, c, v)
		}
	}
}

// toBrain rounds to bfloat16, to even.
func toBrain(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// fromHalf is the value of a float16: 1 bit of sign, 5 of exponent, 10 of mantissa.
func fromHalf(h uint16) float64 {
	exponent, mantissa := int(h>>10&31), float64(h&1023)/1024
	var v float64
	switch exponent {
	case 0:
		v = math.Ldexp(mantissa, -14)
	case 31:
		v = math.Inf(1)
		if mantissa != 0 {
			v = math.NaN()
		}
	default:
		v = math.Ldexp(1+mantissa, exponent-15)
	}
	if h>>15 != 0 {
		return -v
	}
	return v
}

// toHalf rounds to float16, to even.
func toHalf(v float64) uint16 {
	sign := uint16(math.Float64bits(v)>>48) & 0x8000
	v = math.Abs(v)
	switch {
	case v != v:
		return 0x7e00
	case v >= 65520:
		return sign | 0x7c00
	case v == 0:
		return sign
	}
	_, e := math.Frexp(v) // v = f·2^e with f in [0.5, 1)
	e = max(e-1, -14)
	steps := uint16(math.RoundToEven(math.Ldexp(v, 10-e))) // in units of the last place; 1024 and more are normal
	return sign | (steps + uint16(e+14)<<10)
}
