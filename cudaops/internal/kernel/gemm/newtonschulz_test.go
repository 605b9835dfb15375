package gemm

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestNewtonSchulzRun checks the order and the operands of the products that Run requests, by computing them on the
// CPU in float64.
func TestNewtonSchulzRun(t *testing.T) {
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	for _, s := range [][2]int{{5, 5}, {4, 11}, {11, 4}} {
		for steps := 1; steps <= 8; steps++ {
			for together := 1; together <= 3; together++ {
				rows, columns, n := s[0], s[1], min(s[0], s[1])
				x := make([]float64, rows*columns)
				for i := range x {
					x[i] = r.NormFloat64()
				}
				want := make([]float64, len(x))
				optimizer.NewtonSchulz(want, x, rows, columns, steps)
				array.ScaleBy(x, 1/(math.Sqrt(array.SumSquares(x))+1e-7))
				a := NewtonSchulz{X: [2]gpu.Ptr{1, 2}, Squares: [4]gpu.Ptr{3, 4, 5, 6}, Rows: rows,
					Columns: columns, Batch: 1,
					Steps: steps, Together: together}
				memory := map[gpu.Ptr][]float64{1: x, 2: make([]float64, len(x))}
				for _, p := range a.Squares {
					memory[p] = make([]float64, n*n)
				}
				applied := 0
				a.Run(func(p Symmetric) {
					if p.D == p.Left || p.D == p.Right || p.D == p.C {
						t.Fatalf("%+v is computed in place", p)
					}
					d := memory[p.D]
					if p.C == 0 {
						clear(d)
					} else {
						copy(d, memory[p.C])
					}
					stride := p.Depth
					if p.Tall {
						stride = n
					}
					cpugemm.Mul(p.Tall, !p.Tall, n, n, p.Depth, p.Alpha, memory[p.Left], stride,
						memory[p.Right], stride, p.Beta, d, n)
					for i := range n {
						d[i*n+i] += p.Delta
					}
				}, func(y, q, x gpu.Ptr) {
					applied++
					if rows > columns {
						cpugemm.Mul(false, false, rows, n, n, 1, memory[x], n,
							memory[q], n, 0, memory[y], n)
					} else {
						cpugemm.Mul(false, false, n, columns, n, 1, memory[q], n, memory[x],
							columns, 0, memory[y], columns)
					}
				})
				require.Less(t, kerneltest.Distance(memory[a.X[a.Segments()%2]], want), 1e-5,
					"%v, %v, %v, %v", rows, columns, steps, together)
				require.Equal(t, a.Segments(), applied, "%v, %v, %v, %v", rows, columns, steps,
					together)
			}
		}
	}
}

const productSpace = 32 << 20 // workspace of cuBLASLt

// planned returns a function that computes a product with the first of cuBLASLt's plans.
func planned(g *kerneltest.Rig, spec gpu.MatmulSpec, a, b, d gpu.Ptr) func(gpu.MatmulArgs) error {
	g.Helper()
	blas, err := g.Ctx.Blas()
	g.Must(err)
	plan, err := blas.Plan(spec, productSpace, 1)
	g.Must(err)
	space := g.Alloc(productSpace/4, kerneltest.F32, 0)
	return func(a gpu.MatmulArgs) error {
		a.Workspace, a.WorkspaceSize = space.Ptr, productSpace
		return plan.Run(0, a, g.Stream)
	}
}

// applied returns a function that computes the product with X for NewtonSchulz.Run.
func applied(g *kerneltest.Rig, a NewtonSchulz) func(y, q, x gpu.Ptr) {
	g.Helper()
	tall := a.Rows > a.Columns
	spec := gpu.MatmulSpec{M: a.Rows, N: a.Columns, K: min(a.Rows, a.Columns), A: kerneltest.F16,
		B: kerneltest.F16, D: kerneltest.F16, Batch: a.Batch}
	first, second := a.Squares[0], a.X[0]
	if tall {
		first, second = second, first
	}

	run := planned(g, spec, first, second, a.X[1])
	return func(y, q, x gpu.Ptr) {
		args := gpu.MatmulArgs{Alpha: 1, A: q, B: x, D: y}
		if tall {
			args.A, args.B = x, q
		}
		g.Must(run(args))
	}
}

// TestNewtonSchulz checks that the error is less than half the error of the same iteration in
// bfloat16 with float32 sums, for several kinds of matrices.
func TestNewtonSchulz(t *testing.T) {
	g := newHopperRig(t)
	shapes, steps := [][3]int{{264, 264, 1}, {136, 520, 2}, {520, 136, 2}, {392, 1544, 1}}, 5
	kinds := map[string]func(*rand.Rand, int, int) []float64{"normal": normalMatrix,
		"rank 1": rankOne, "rank n over 8": lowRank,
		"spread": spreadMatrix}
	if testing.Short() { // racecheck takes about a second per product
		shapes, steps = [][3]int{{200, 136, 1}, {136, 152, 2}}, 2
		maps.DeleteFunc(kinds, func(name string, _ func(*rand.Rand, int, int) []float64) bool {
			return name != "normal"
		})
	}

	for _, s := range shapes {
		rows, columns, batch := s[0], s[1], s[2]
		for name, matrix := range kinds {
			g.Scope(fmt.Sprintf("%dx%d %s", rows, columns, name), func(g *kerneltest.Rig) {
				size, n := rows*columns, min(rows, columns)
				var values []float64
				for range batch {
					x := matrix(g.Rand, rows, columns)
					array.ScaleBy(x, 1/(math.Sqrt(array.SumSquares(x))+1e-7))
					values = append(values, x...)
				}
				x, _ := g.Upload(values, kerneltest.F16, 0)
				for together := 1; together <= min(3, steps); together++ {
					a := NewtonSchulz{Rows: rows, Columns: columns, Batch: batch, Steps: steps,
						Together: together, Type: kerneltest.F16}
					ends := [2]*kerneltest.Buffer{g.Alloc(batch*size, kerneltest.F16, 0),
						g.Alloc(batch*size, kerneltest.F16, 0)}
					a.X = [2]gpu.Ptr{ends[0].Ptr, ends[1].Ptr}
					var bits []float64
					for i := range a.Squares {
						a.Squares[i] = g.Alloc(batch*n*n, kerneltest.F16, 0).Ptr
					}
					apply := applied(g, a)
					for range 2 {
						g.Must(g.Ctx.CopyOnDevice(a.X[0], x.Ptr, 2*batch*size, g.Stream))
						a.Run(func(p Symmetric) { g.Must(g.Launch(g.Stream, p)) }, apply)
						got := g.Read(ends[a.Segments()%2])
						if bits == nil {
							bits = got
						} else if !slices.Equal(bits, got) {
							g.Error("results differ from run to run")
						}
					}
					for b := range batch {
						one, want := values[b*size:][:size], make([]float64, size)
						optimizer.NewtonSchulz(want, one, rows, columns, steps)
						coarse := kerneltest.Distance(coarseNewtonSchulz(one, rows, columns, steps),
							want)
						e := kerneltest.Distance(bits[b*size:][:size], want)
						g.Logf("%d steps together: relative error %.3g, in bfloat16 %.3g", together,
							e, coarse)
						if !(e < coarse/2) {
							g.Errorf("%d steps together: relative error %.3g, in bfloat16 it is "+
								"%.3g", together, e, coarse)
						}
					}
				}
			})
		}
	}
}

func normalMatrix(r *rand.Rand, rows, columns int) []float64 {
	x := make([]float64, rows*columns)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

func productOf(r *rand.Rand, rows, columns, rank int) []float64 {
	x := make([]float64, rows*columns)
	cpugemm.Mul(false, false, rows, columns, rank, 1, normalMatrix(r, rows, rank), rank,
		normalMatrix(r, rank, columns), columns, 0, x, columns)
	return x
}

func rankOne(r *rand.Rand, rows, columns int) []float64 { return productOf(r, rows, columns, 1) }
func lowRank(r *rand.Rand, rows, columns int) []float64 {
	return productOf(r, rows, columns, min(rows, columns)/8)
}

// spreadMatrix returns a matrix with rows and columns of very different sizes, and therefore
// singular values from 1 to about 1e-6.
func spreadMatrix(r *rand.Rand, rows, columns int) []float64 {
	x := normalMatrix(r, rows, columns)
	for i := range x {
		x[i] *= math.Pow(10,
			-4*float64(i/columns)/float64(rows)-2*float64(i%columns)/float64(columns))
	}
	return x
}

// coarseNewtonSchulz runs the iteration with rounding to bfloat16 after every product.
func coarseNewtonSchulz(x []float64, rows, columns, steps int) []float64 {
	round := func(x []float64) []float64 {
		return kerneltest.Decode(kerneltest.Encode(x, kerneltest.Bf16), kerneltest.Bf16)
	}
	n, tall := min(rows, columns), rows > columns
	x = round(x)
	for range steps {
		gram, next := make([]float64, n*n), slices.Clone(x)
		cpugemm.Mul(tall, !tall, n, n, max(rows, columns), 1, x, columns, x, columns, 0, gram, n)
		gram = round(gram)
		poly := slices.Clone(gram)
		cpugemm.Mul(false, false, n, n, n, SchulzC, gram, n, gram, n, SchulzB, poly, n)
		poly = round(poly)
		if tall {
			cpugemm.Mul(false, false, rows, n, n, 1, x, n, poly, n, SchulzA, next, n)
		} else {
			cpugemm.Mul(false, false, n, columns, n, 1, poly, n, x, columns, SchulzA, next, columns)
		}
		x = round(next)
	}

	return x
}
