package model

import (
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/graph"
)

// Grown returns the parameters of m when it grows to next. Those that the model keeps
// share their memory with before, unless they are copied; those that are new start as NewModel has
// them, but for what writes to the residual stream, which is 0: so a new block is the identity.
// That is the last norm where there is one, since the gradient of a norm of 0 is without bounds.
func Grown(m *Model, g arch.Grown, next arch.Config) []graph.Param {
	var params []graph.Param
	var copies []int
	taken := map[string]bool{}
	for p := range next.Specs() {
		from := g.Source(p.Name)
		own := graph.Param{Name: p.Name}
		switch {
		case from == "":
			own.Value = newParam(m.Dtype(), p.Shape, p.Fresh(uint64(g.Step), len(params)))
		case taken[from]:
			own.Value = m.Params[m.byName[from]].Value
			copies = append(copies, len(params))
		default:
			own.Value = m.Params[m.byName[from]].Value
		}
		taken[from] = true
		params = append(params, own)
	}
	parallel.Each(len(copies), func(i int) {
		p := &params[copies[i]]
		p.Value = p.Value.Clone().(*tensor.Dense)
	})
	return params
}

// Become gives a model another configuration and its parameters.
func Become(m *Model, c arch.Config, params []graph.Param) {
	m.Config, m.Params, m.byName = c, params, make(map[string]int, len(params))
	for i, p := range params {
		m.byName[p.Name] = i
	}
	m.shape++
	m.changes.Add(1)
}
