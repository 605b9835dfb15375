package choose

import (
	"fmt"
	"slices"

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
	if p := t.x.PlanOf(*m); p != nil {
		return p, nil
	}
	ways := 1
	if t.worthTiming(m.Spec.FLOPs()) {
		ways = productWays
	}
	p, err := t.x.Plan(*m, ways, t.ownWays(m))
	if err != nil {
		return nil, err
	}
	j, err := t.productJob(p, m, args)
	if err != nil {
		return nil, err
	}
	p.Way, p.Choice, err = t.choose(j)
	return p, err
}

// ownWays lists the ways that this module has for a product which is worth timing, or for which a
// rule asks for one. Sums that are multiplied by a factor have none.
func (t *Chooser) ownWays(m *program.Matmul) []kernel.Way {
	s := m.Spec
	if m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 || s.Batch > 1 || s.TransA || s.A != s.B ||
		!s.Scaled() && s.A != s.D || s.Align < program.VectorBytes {
		return nil
	}
	ways := t.Ways(gemm.Product{ProductShape: run.ProductShape(s), Type: s.D})
	asked := func(w kernel.Way) bool { return t.Rules.Ask(productOp, w.String()) }
	if !t.worthTiming(s.FLOPs()) && !slices.ContainsFunc(ways, asked) {
		return nil
	}
	return ways
}

// productOp is the op of matrix products among the choices.
const productOp = "Matmul"

// productJob is a product as it is timed: a matrix that it adds is one of its own. For cuBLASLt's
// ways it makes no difference, and they are known by the product without it.
func (t *Chooser) productJob(p *run.Plan, m *program.Matmul, args []program.Arg) (job, error) {
	blas, err := t.x.Ctx.Blas()
	if err != nil {
		return job{}, err
	}
	build := fmt.Sprintf("cuBLASLt %d, workspace %d", blas.Version(), run.WorkspaceBytes)
	if len(p.Own) > 0 {
		build += ", " + t.x.Kernels.Build()
	}
	j := job{build: build, tiny: !t.worthTiming(m.Spec.FLOPs()), product: p,
		Group: program.Group{Op: productOp, Shape: fmt.Sprintf("%+v", m.Spec)}}
	if m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 {
		j.Shape += " scaled"
	}
	args = slices.DeleteFunc(slices.Clone(args), func(a program.Arg) bool { return a.Field == "C" })
	for i, a := range args {
		if a.Field != "D" {
			continue
		}
		args[i].Role, j.Results = program.Write, []*program.Array{a.Array}
		if m.Beta != 0 {
			c := *a.Array
			c.Buffer = new(program.Buffer)
			args = append(args, program.Reads("C", &c))
		}
	}
	if len(p.Own) > 0 && m.Beta == 1 {
		j.Shape += " with a matrix added"
	}
	call := &program.Call{Params: *m, Args: args}
	for _, name := range p.Ways() {
		j.Alternatives = append(j.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{call}})
	}
	return j, nil
}
