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

// product plans a matrix product of some operands, in the way that is chosen for all products like
// it.
func (t *Chooser) product(m *program.Matmul, args []program.Arg) (*run.Plan, error) {
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
	j, err := t.productJob(p, args)
	if err != nil {
		return nil, err
	}
	p.Way, p.Choice, err = t.choose(j)
	return p, err
}

// ownWays lists the ways that this module has for a product of float8 which is worth timing, or for
// which a rule asks for one.
func (t *Chooser) ownWays(m gpu.MatmulSpec) []kernel.Way {
	if !m.Scaled() || m.Align < program.VectorBytes {
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

// productJob is a product as it is timed: where it adds a matrix, of one of its own.
func (t *Chooser) productJob(p *run.Plan, args []program.Arg) (job, error) {
	blas, err := t.x.Ctx.Blas()
	if err != nil {
		return job{}, err
	}
	m := p.Spec()
	params, shape := program.Matmul{Spec: m, Alpha: 1}, fmt.Sprintf("%+v", m)
	build := fmt.Sprintf("cuBLASLt %d, workspace %d", blas.Version(), run.WorkspaceBytes)
	if len(p.Own) > 0 {
		build += ", " + t.x.Kernels.Build(productUnit)
	}
	j := job{build: build, computes: true, tiny: !t.worthTiming(m.FLOPs()), product: p,
		Group: program.Group{Op: productOp}}
	var timed []program.Arg
	for _, a := range args {
		switch a.Field {
		case "C":
			continue
		case "D":
			a.Role, j.Results = program.Write, []*program.Array{a.Array}
			if p.Added == program.AMatrix {
				c := *a.Array
				c.Buffer = new(program.Buffer)
				timed, params.Beta = append(timed, program.Reads("C", &c)), 1
				shape += " with a matrix added"
			}
		}
		timed = append(timed, a)
	}
	if p.Added == program.Factors {
		shape += " scaled"
	}
	j.Shape = shape
	for _, name := range p.Ways() {
		j.Alternatives = append(j.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{{Params: params, Args: timed}}})
	}
	return j, nil
}
