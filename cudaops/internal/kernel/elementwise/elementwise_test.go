package elementwise

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// elementCounts has less than an access, ragged ends, exactly one block, and several blocks.
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
	AddScalar:   func(a, p float64) float64 { return a + p },
	MulScalar:   func(a, p float64) float64 { return a * p },
	GELU:        func(a, _ float64) float64 { return a / 2 * (1 + math.Tanh(geluAngle(a))) },
	SubFrom:     func(a, p float64) float64 { return p - a },
	DivideInto:  func(a, p float64) float64 { return p / a },
	PowScalar:   math.Pow,
	PowOf:       func(a, p float64) float64 { return math.Pow(p, a) },
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
	Ceil:     func(a, _ float64) float64 { return math.Ceil(a) },
	Floor:    func(a, _ float64) float64 { return math.Floor(a) },
}

var binaryReference = map[BinaryOp]func(a, b float64) float64{
	Add: func(a, b float64) float64 { return a + b },
	Sub: func(a, b float64) float64 { return a - b },
	Mul: func(a, b float64) float64 { return a * b },
	Div: func(a, b float64) float64 { return a / b },
	GELUGradient: func(a, b float64) float64 {
		tanh := math.Tanh(geluAngle(b))
		slope := math.Sqrt(2/math.Pi) * (1 + 3*0.044715*b*b)
		return a * ((1+tanh)/2 + b/2*(1-tanh*tanh)*slope)
	},
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

// geluAngle returns the argument of tanh in the approximation of GELU.
func geluAngle(a float64) float64 { return math.Sqrt(2/math.Pi) * (a + 0.044715*a*a*a) }

func one(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// wantsPositive reports whether a function should be tested only with positive arguments.
func wantsPositive(op UnaryOp) bool {
	return op == Sqrt || op == InverseSqrt || op == Inverse || op == Log || op == Log1p ||
		op == Log2 || op == DivideInto ||
		op == PowScalar
}

func TestUnary(t *testing.T) {
	g := kerneltest.NewRig(t)
	for op := range UnaryOp(len(unaryReference)) {
		f := unaryReference[op]
		for _, dt := range kerneltest.StorageTypes {
			for i, n := range elementCounts {
				g.Scope(fmt.Sprintf("%d/%v/%d", op, dt, n), func(g *kerneltest.Rig) {
					x := make([]float64, n)
					for i := range x {
						if x[i] = 2 * g.Rand.NormFloat64(); wantsPositive(op) {
							x[i] = 0.1 + math.Abs(x[i])
						}
					}
					in, x := g.Upload(x, dt, i%3)
					_, p := g.Upload([]float64{0.5 + g.Rand.Float64()}, dt, 0)
					y := in // in place or not
					if i%2 == 0 {
						y = g.Alloc(n, dt, i%3)
					}
					g.Must(g.Launch(g.Stream, Unary{Op: op, Y: y.Ptr, X: in.Ptr, P: p[0], N: n,
						Type: dt}))
					want := make([]float64, n)
					for i, v := range x {
						want[i] = f(v, p[0])
					}
					g.Near("y", y, want, kerneltest.Forward(dt))
				})
			}
		}
	}
}

func TestBinary(t *testing.T) {
	t.Run("odd", func(t *testing.T) { testBinary(kerneltest.NewRig(t), 13, 331) })
	t.Run("even", func(t *testing.T) { testBinary(kerneltest.NewRig(t), 24, 512) })
	t.Run("ragged", func(t *testing.T) { testBinary(kerneltest.NewRig(t), 7, 1000) })
	t.Run("short rows", func(t *testing.T) { testBinary(kerneltest.NewRig(t), 611, 8) })
}

func testBinary(g *kerneltest.Rig, rows, cols int) {
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

	for op := range BinaryOp(len(binaryReference)) {
		for _, dt := range kerneltest.StorageTypes {
			for i, sa := range shapes {
				for j, sb := range shapes {
					if i*j != 0 && i != j || !g.Some() { // at least one operand is full, or both are alike
						continue
					}
					g.Scope(fmt.Sprintf("%d/%v/%d-%d", op, dt, i, j), func(g *kerneltest.Rig) {
						xa, xb := make([]float64, size(sa)), make([]float64, size(sb))
						for i := range xa {
							if xa[i] = float64(g.Rand.IntN(9)-4) / 4; op == Pow {
								xa[i] = 0.1 + g.Rand.Float64()
							}
						}
						for i := range xb {
							switch xb[i] = float64(g.Rand.IntN(9)-4) / 4; {
							case op == Div:
								xb[i] = 0.1 + g.Rand.Float64()
							case op == GELUGradient && xb[i] == -0.75:
								xb[i] = -0.5 // the gradient is 0 near -0.75, so rounding errors dominate
							}
						}
						skew := g.Rand.IntN(2)
						ba, xa := g.Upload(xa, dt, skew)
						bb, xb := g.Upload(xb, dt, skew)
						sa.Ptr, sb.Ptr = ba.Ptr, bb.Ptr
						y := g.Alloc(n, dt, skew)
						g.Must(g.Launch(g.Stream, Binary{Op: op, Y: y.Ptr, A: sa, B: sb, N: n,
							Type: dt}))
						want := make([]float64, n)
						for k := range want {
							want[k] = binaryReference[op](xa[at(sa, k)], xb[at(sb, k)])
						}
						g.Near("y", y, want, kerneltest.Forward(dt))
					})
				}
			}
		}
	}
}

func TestCastAxpby(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, yt := range kerneltest.StorageTypes {
		for _, xt := range kerneltest.StorageTypes {
			for i, n := range elementCounts {
				g.Scope(fmt.Sprintf("%v-%v/%d", yt, xt, n), func(g *kerneltest.Rig) {
					x, xr := g.Normal(n, xt, i%2)
					y := g.Alloc(n, yt, i%2)
					g.Must(g.Launch(g.Stream, Cast{Y: y.Ptr, YType: yt, X: x.Ptr, XType: xt, N: n}))
					g.Near("cast", y, kerneltest.Decode(kerneltest.Encode(xr, yt), yt), 0)

					y, want := g.Normal(n, yt, i%2)
					g.Must(g.Launch(g.Stream, Axpby{Y: y.Ptr, YType: yt, Alpha: 0.25, X: x.Ptr,
						XType: xt, Beta: 3, N: n}))
					for i, v := range xr {
						want[i] = 0.25*v + 3*want[i]
					}
					g.Near("axpby", y, want, max(kerneltest.Forward(yt), 1e-6))

					y = g.Alloc(n, yt, i%2)
					g.Must(g.Launch(g.Stream, Axpby{Y: y.Ptr, YType: yt, Alpha: -2, X: x.Ptr,
						XType: xt, Beta: 0, N: n}))
					for i, v := range xr {
						want[i] = -2 * v
					}
					g.Near("axpby over NaN", y, want, kerneltest.Forward(yt))
				})
			}
		}
	}
}
