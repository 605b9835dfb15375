package choose

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// product plans the product that a call is, if it is one. It is computed in the way that is chosen
// for all products like it.
func (t *Chooser) product(c *program.Call) (err error) {
	m, ok := c.Params.(program.Matmul)
	if !ok {
		return nil
	}
	if m.Spec, err = m.Spec.Normal(); err != nil {
		return err
	}
	ways := 1
	if t.worthTiming(m.Spec.FLOPs()) {
		ways = productWays
	}
	p, err := t.x.Plan(m.Spec, ways)
	if err != nil {
		return err
	}
	names, own := slices.Clone(p.Ways), t.ownWays(m)
	for _, w := range own {
		names = append(names, w.String())
	}
	m.Way, c.Choice, err = t.choose(productGroup(m, c.Args, names, len(own) > 0))
	c.Params = m
	return err
}

// productGroup is a product in its ways as it is timed: a matrix that it adds is one of its own. For
// cuBLASLt's ways that makes no difference, and they are known by the product without it.
func productGroup(m program.Matmul, args []program.Arg, ways []string, own bool) program.Group {
	g := program.Group{Op: productOp, Shape: fmt.Sprintf("%+v", m.Spec), FLOPs: m.Spec.FLOPs()}
	if m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 {
		g.Shape += " scaled"
	}
	if own && m.Beta == 1 {
		g.Shape += " with a matrix added"
	}
	args = slices.DeleteFunc(slices.Clone(args), func(a program.Arg) bool { return a.Field == "C" })
	for i, a := range args {
		if a.Field != "D" {
			continue
		}
		args[i].Role, g.Results = program.Write, []*program.Array{a.Array}
		if m.Beta != 0 {
			added := *a.Array
			added.Buffer = new(program.Buffer)
			args = append(args, program.Reads("C", &added))
		}
	}
	for i, name := range ways {
		m.Way = i
		g.Alternatives = append(g.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{{Params: m, Args: args}}})
	}
	return g
}

// ownWays lists the ways that this module has for a product which is worth timing, or for which a
// rule asks for one. Sums that are multiplied by a factor have none.
func (t *Chooser) ownWays(m program.Matmul) []kernel.Way {
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
