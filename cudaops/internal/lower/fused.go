package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// What a kernel does with the result of a product, or one kernel with both: the latter saves a pass over
// memory, the former has the fastest product. The chooser decides.

// fusion is a product and what is done with its result, in one call or in several.
type fusion struct {
	one     *program.Call // whose Params are kernels.Tuned
	several []*program.Call
}

// either adds a fusion's one call, or the several, and reports whether it was the one.
func (c *compiler) either(f fusion) (fused bool, err error) {
	way, choice, err := c.chooseWay(f)
	if err != nil {
		return false, err
	}
	if way == nil {
		c.Calls = append(c.Calls, f.several...)
		return false, nil
	}
	f.one.Params, f.one.Choice = program.WithWay(f.one.Params, *way), choice
	c.Add(f.one)
	return true, nil
}

// chooseWay returns the way of the one call, nil for the several.
func (c *compiler) chooseWay(f fusion) (*kernel.Way, int, error) {
	for _, a := range f.one.Args {
		if a.At%VectorBytes != 0 {
			return nil, 0, nil
		}
	}
	tuned := f.one.Bind(f.one.Params, (*program.Array).StandIn).(kernel.Tuned)
	ways := c.o.Ways(tuned)
	if len(ways) == 0 {
		return nil, 0, nil
	}
	g := Group{Op: f.one.Name(), Shape: tuned.Shape(), Units: tuned.Units(), FLOPs: f.one.FLOPs, Optional: true,
		Alternatives: []Alternative{{"separate", f.several}}}
	for _, a := range f.one.Args {
		if a.Role == program.Write {
			g.Results = append(g.Results, a.Array)
		}
	}
	for _, w := range ways {
		one := *f.one
		one.Params = program.WithWay(one.Params, w)
		g.Alternatives = append(g.Alternatives, Alternative{w.String(), []*program.Call{&one}})
	}
	i, choice, err := c.o.Choose(g)
	if i == 0 || err != nil {
		return nil, 0, err
	}
	return &ways[i-1], choice, nil
}

// fusedCall is a call in place of a product and what is done with its result.
func (c *compiler) fusedCall(n *gorgonia.Node, p product, params any, args ...program.Arg) *program.Call {
	one := c.newCall(n, params, args...)
	one.FLOPs, one.Float8 = p.flops(), p.scaleA != nil
	return one
}
