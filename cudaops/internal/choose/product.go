package choose

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// product plans a matrix product, in the way that is chosen for all products like it.
func (t *Chooser) product(m *program.Matmul) (*run.Plan, error) {
	var err error
	if m.Spec, err = m.Spec.Normal(); err != nil {
		return nil, err
	}
	if p := t.x.Products.Find(*m); p != nil {
		return p, nil
	}
	own := t.ownWays(m.Spec)
	forAll := len(own) == 0
	if m.Added() == program.Factors {
		own = nil // there are no kernels for them
	}
	ways := 1
	if t.worthTiming(m.Spec.FLOPs()) {
		ways = productWays
	}
	p, err := t.x.Products.Make(*m, ways, own, forAll)
	if err != nil {
		return nil, err
	}
	j, err := t.productJob(p)
	if err != nil {
		return nil, err
	}
	p.Way, p.Choice, err = t.choose(j)
	return p, err
}

// ownWays lists the ways that this module has for a product of float8 which is worth timing, or for
// which a rule asks for one.
func (t *Chooser) ownWays(m gpu.MatmulSpec) []kernel.Way {
	whole := gpu.MatmulSpec{M: m.M, N: m.N, K: m.K, TransB: true, A: gpu.Float8E4M3,
		B: gpu.Float8E4M3, D: m.D,
		Scaling: gpu.ScaledRows, FastAccumulation: true, Align: m.Align}
	if whole, err := whole.Normal(); err != nil || m != whole || m.Align < program.VectorBytes {
		return nil
	}
	ways := t.Ways(gemm.Product{ProductShape: run.ProductShape(m), Type: m.D})
	asked := func(w kernel.Way) bool { return t.Rules.Ask(productOp, w.String()) }
	if !t.worthTiming(m.FLOPs()) && !slices.ContainsFunc(ways, asked) {
		return nil
	}
	return ways
}

// productOp is the op of matrix products among the choices.
const productOp = "Matmul"

// productJob is a product as it is timed: of operands of its own.
func (t *Chooser) productJob(p *run.Plan) (job, error) {
	blas, err := t.x.Ctx.Blas()
	if err != nil {
		return job{}, err
	}
	m := p.Spec()
	a, b, d := operands(m)
	params := program.Matmul{Spec: m, Alpha: 1}
	args := []program.Arg{program.Reads("A", a), program.Reads("B", b), program.Writes("D", d)}
	shape := fmt.Sprintf("%+v", m)
	if m.Scaling != gpu.Unscaled {
		args = append(args, program.Reads("ScaleA", operand(gpu.Float32, m.M)),
			program.Reads("ScaleB", operand(gpu.Float32, m.N)))
	}
	switch p.Added {
	case program.AMatrix:
		params.Beta = 1
		args = append(args, program.Reads("C", operand(m.D, m.M, m.N)))
		shape += " with a matrix added"
	case program.Factors:
		shape += " scaled"
	}
	build := fmt.Sprintf("cuBLASLt %d, workspace %d", blas.Version(), run.WorkspaceBytes)
	if len(p.Own) > 0 {
		build += ", " + t.x.Kernels.Build(productUnit)
	}
	j := job{build: build, computes: true, tiny: !t.worthTiming(m.FLOPs()), product: p,
		Group: program.Group{Op: productOp, Shape: shape, Results: []*program.Array{d}}}
	for _, name := range p.Ways() {
		j.Alternatives = append(j.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{{Params: params, Args: args}}})
	}
	return j, nil
}

// operand is an array in a buffer of its own.
func operand(t gpu.DType, shape ...int) *program.Array {
	a := &program.Array{Buffer: &program.Buffer{}, Type: t, Shape: shape}
	a.Bytes = a.Extent()
	return a
}

// operands are A, B and D of a product, with the gaps between rows and matrices.
func operands(m gpu.MatmulSpec) (a, b, d *program.Array) {
	rowsA, _, rowsB, _ := m.Stored()
	return operand(m.A, (m.Batch-1)*m.StrideA+rowsA*m.LDA),
		operand(m.B, (m.Batch-1)*m.StrideB+rowsB*m.LDB),
		operand(m.D, (m.Batch-1)*m.StrideD+m.M*m.LDD)
}
