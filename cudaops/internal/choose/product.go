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
	ways := 1
	if t.worthTiming(m.Spec.FLOPs()) {
		ways = productWays
	}
	p, err := t.x.Products.Make(*m, ways, t.ownWays(m.Spec))
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

// productJob is a product as it is timed: without what is added to it.
func (t *Chooser) productJob(p *run.Plan, args []program.Arg) (job, error) {
	blas, err := t.x.Ctx.Blas()
	if err != nil {
		return job{}, err
	}
	m := p.Spec()
	build := fmt.Sprintf("cuBLASLt %d, workspace %d", blas.Version(), run.WorkspaceBytes)
	if len(p.Own) > 0 {
		build += ", " + t.x.Kernels.Build(productUnit)
	}
	j := job{build: build, tiny: !t.worthTiming(m.FLOPs()), product: p,
		Group: program.Group{Op: productOp, Shape: fmt.Sprintf("%+v", m)}}
	args = slices.DeleteFunc(slices.Clone(args), func(a program.Arg) bool { return a.Field == "C" })
	for i, a := range args {
		if a.Field == "D" {
			args[i].Role, j.Results = program.Write, []*program.Array{a.Array}
		}
	}
	timed := &program.Call{Params: program.Matmul{Spec: m, Alpha: 1}, Args: args}
	for _, name := range p.Ways() {
		j.Alternatives = append(j.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{timed}})
	}
	return j, nil
}
