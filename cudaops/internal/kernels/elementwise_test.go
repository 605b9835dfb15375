package kernels

import (
	"fmt"
	"math"
	"testing"
)

// elementCounts has nothing, less than an access, ragged ends, exactly a block and several blocks.
var elementCounts = []int{1, 7, 1000, 2048, 4096, 3*4096 + 5}

var unaryReference = map[UnaryOp]func(a, p float64) float64{
	Identity:    func(a, _ float64) float64 { return a },
	Neg:         func(a, _ float64) float64 { return -a },
	Abs:         func(a, _ float64) float64 { return math.Abs(a) },
	Square:      func(a, _ float64) float64 { return a * a },
	Sqrt:        func(a, _ float64) float64 { return math.Sqrt(a) },
	InverseSqrt: func(a, _ float64) float64 { return 1 / math.Sqrt(a) },
	Inverse:     func(a, _ float64) float64 { return 1 / a },
	Exp:         func(a, _ float64) float64 { return math.Exp(a) },
	Log:         func(a, _ float64) float64 { return math.Log(a) },
	Tanh:        func(a, _ float64) float64 { return math.Tanh(a) },
	Sigmoid:     func(a, _ float64) float64 { return 1 / (1 + math.Exp(-a)) },
	SiLU:        func(a, _ float64) float64 { return a / (1 + math.Exp(-a)) },
	Relu:        func(a, _ float64) float64 { return max(a, 0) },
	AddScalar:   func(a, p float64) float64 { return a + p },
	MulScalar:   func(a, p float64) float64 { return a * p },
	SubFrom:     func(a, p float64) float64 { return p - a },
	DivideInto:  func(a, p float64) float64 { return p / a },
	PowScalar:   math.Pow,
	PowOf:       func(a, p float64) float64 { return math.Pow(p, a) },
	MaxScalar:   func(a, p float64) float64 { return max(a, p) },
	MinScalar:   func(a, p float64) float64 { return min(a, p) },
	Sign: func(a, _ float64) float64 {
		if a == 0 || a != a {
			return a
		}
		return math.Copysign(1, a)
	},
	Step:     func(a, _ float64) float64 { return one(a > 0) },
	Cube:     func(a, _ float64) float64 { return a * a * a },
	Expm1:    func(a, _ float64) float64 { return math.Expm1(a) },
	Log1p:    func(a, _ float64) float64 { return math.Log1p(a) },
	Log2:     func(a, _ float64) float64 { return math.Log2(a) },
	Sin:      func(a, _ float64) float64 { return math.Sin(a) },
	Cos:      func(a, _ float64) float64 { return math.Cos(a) },
	Softplus: func(a, _ float64) float64 { return math.Log1p(math.Exp(a)) },
	Gelu:     func(a, _ float64) float64 { return a / 2 * math.Erfc(-a/math.Sqrt2) },
	Ceil:     func(a, _ float64) float64 { return math.Ceil(a) },
	Floor:    func(a, _ float64) float64 { return math.Floor(a) },
}

var binaryReference = map[BinaryOp]func(a, b float64) float64{
	Add:          func(a, b float64) float64 { return a + b },
	Sub:          func(a, b float64) float64 { return a - b },
	Mul:          func(a, b float64) float64 { return a * b },
	Div:          func(a, b float64) float64 { return a / b },
	TanhGrad:     func(a, b float64) float64 { return (1 - a*a) * b },
	SigmoidGrad:  func(a, b float64) float64 { return a * (1 - a) * b },
	ReluGrad:     func(a, b float64) float64 { return one(a > 0) * b },
	Pow:          math.Pow,
	Maximum:      math.Max,
	Minimum:      math.Min,
	Less:         func(a, b float64) float64 { return one(a < b) },
	LessEqual:    func(a, b float64) float64 { return one(a <= b) },
	Greater:      func(a, b float64) float64 { return one(a > b) },
	GreaterEqual: func(a, b float64) float64 { return one(a >= b) },
	Equal:        func(a, b float64) float64 { return one(a == b) },
	NotEqual:     func(a, b float64) float64 { return one(a != b) },
}

func one(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// wantsPositive is whether a function is only compared where its argument is positive.
func wantsPositive(op UnaryOp) bool {
	return op == Sqrt || op == InverseSqrt || op == Inverse || op == Log || op == Log1p || op == Log2 || op == DivideInto ||
		op == PowScalar
}

func TestUnary(t *testing.T) {
	g := newRig(t)
	for op := range unaryOps {
		f := unaryReference[op]
		for _, dt := range storageTypes {
			for i, n := range elementCounts {
				g.scope(fmt.Sprintf("%d/%v/%d", op, dt, n), func(g *rig) {
					x := make([]float64, n)
					for i := range x {
						if x[i] = 2 * g.rand.NormFloat64(); wantsPositive(op) {
							x[i] = 0.1 + math.Abs(x[i])
						}
					}
					in, x := g.upload(x, dt, i%3)
					p, pr := g.upload([]float64{0.5 + g.rand.Float64()}, dt, 0)
					y := in // in place, or not
					if i%2 == 0 {
						y = g.alloc(n, dt, i%3)
					}
					if i < 3 {
						g.must(g.Unary(g.stream, op, y.Ptr, in.Ptr, pr[0], n, dt))
					} else {
						g.must(g.UnaryAt(g.stream, op, y.Ptr, in.Ptr, p.Ptr, n, dt))
					}
					want := make([]float64, n)
					for i, v := range x {
						want[i] = f(v, pr[0])
					}
					g.near("y", y, want, forward(dt))
				})
			}
		}
	}
}

func TestBinary(t *testing.T) {
	t.Run("odd", func(t *testing.T) { testBinary(newRig(t), 13, 331) })
	t.Run("even", func(t *testing.T) { testBinary(newRig(t), 24, 512) })
	t.Run("ragged", func(t *testing.T) { testBinary(newRig(t), 7, 1000) })
	t.Run("short rows", func(t *testing.T) { testBinary(newRig(t), 611, 8) })
}

func testBinary(g *rig, rows, cols int) {
	n := rows * cols
	shapes := []Operand{{}, {Period: 1}, {Period: cols}, {Repeat: cols, Period: rows}}
	at := func(o Operand, i int) int {
		if o.Period == 0 {
			return i
		}
		return i / max(o.Repeat, 1) % o.Period
	}
	size := func(o Operand) int {
		if o.Period == 0 {
			return n
		}
		return o.Period
	}
	for op := range binaryOps {
		for _, dt := range storageTypes {
			for i, sa := range shapes {
				for j, sb := range shapes {
					if i*j != 0 && i != j || !g.some() { // one of them full, or both alike
						continue
					}
					g.scope(fmt.Sprintf("%d/%v/%d-%d", op, dt, i, j), func(g *rig) {
						xa, xb := make([]float64, size(sa)), make([]float64, size(sb))
						for i := range xa {
							if xa[i] = float64(g.rand.IntN(9)-4) / 4; op == Pow {
								xa[i] = 0.1 + g.rand.Float64()
							}
						}
						for i := range xb {
							if xb[i] = float64(g.rand.IntN(9)-4) / 4; op == Div {
								xb[i] = 0.1 + g.rand.Float64()
							}
						}
						skew := g.rand.IntN(2)
						ba, xa := g.upload(xa, dt, skew)
						bb, xb := g.upload(xb, dt, skew)
						sa.Ptr, sb.Ptr = ba.Ptr, bb.Ptr
						y := g.alloc(n, dt, skew)
						g.must(g.Binary(g.stream, op, y.Ptr, sa, sb, n, dt))
						want := make([]float64, n)
						for k := range want {
							want[k] = binaryReference[op](xa[at(sa, k)], xb[at(sb, k)])
						}
						g.near("y", y, want, forward(dt))
					})
				}
			}
		}
	}
}

func TestCastAxpbyFill(t *testing.T) {
	g := newRig(t)
	for _, yt := range storageTypes {
		for _, xt := range storageTypes {
			for i, n := range elementCounts {
				g.scope(fmt.Sprintf("%v-%v/%d", yt, xt, n), func(g *rig) {
					x, xr := g.normal(n, xt, i%2)
					y := g.alloc(n, yt, i%2)
					g.must(g.Cast(g.stream, y.Ptr, yt, x.Ptr, xt, n))
					g.near("cast", y, decode(encode(xr, yt), yt), 0)

					g.must(g.Fill(g.stream, y.Ptr, -1.5, n, yt))
					g.must(g.Axpby(g.stream, y.Ptr, yt, 0.25, x.Ptr, xt, 3, n))
					want := make([]float64, n)
					for i, v := range xr {
						want[i] = 0.25*v - 4.5
					}
					g.near("axpby", y, want, max(forward(yt), 1e-6))

					y = g.alloc(n, yt, i%2)
					g.must(g.Axpby(g.stream, y.Ptr, yt, -2, x.Ptr, xt, 0, n))
					for i, v := range xr {
						want[i] = -2 * v
					}
					g.near("axpby over NaN", y, want, forward(yt))
				})
			}
		}
	}
}
