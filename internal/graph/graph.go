// Package graph is how the machines read a Gorgonia graph. It tells what is asked of a run, which
// values outlive it, in which order nodes are computed, and what nodes and ops are called.
package graph

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
)

// Asked is what is asked of the runs of a graph, beside the nodes that no other one needs.
type Asked struct {
	Params  gorgonia.Nodes // inputs that are parameters
	Outputs gorgonia.Nodes // nodes whose values shall outlive a run
}

// AddParams is the option WithParams of a machine.
func (a *Asked) AddParams(params ...*gorgonia.Node) error {
	for i, n := range params {
		if n == nil || n.Op() != nil {
			return fmt.Errorf("WithParams: node %d is no input", i)
		}
	}
	a.Params = append(a.Params, params...)
	return nil
}

// AddOutputs is the option WithOutputs of a machine.
func (a *Asked) AddOutputs(outputs ...*gorgonia.Node) error {
	if slices.Contains(outputs, nil) {
		return errors.New("WithOutputs: a node is nil")
	}
	a.Outputs = append(a.Outputs, outputs...)
	return nil
}

// Within returns an error unless all that is named is in the graph.
func (a *Asked) Within(g *gorgonia.ExprGraph) error {
	all := map[*gorgonia.Node]bool{}
	for _, n := range g.AllNodes() {
		all[n] = true
	}
	for _, option := range []struct {
		name  string
		nodes gorgonia.Nodes
	}{{"WithParams", a.Params}, {"WithOutputs", a.Outputs}} {
		for _, n := range option.nodes {
			if !all[n] {
				return fmt.Errorf("%s: %s is not in the graph that the machine is made for", option.name,
					Describe(n))
			}
		}
	}
	return nil
}

// Gradients returns the parameters by the node of their gradient, which several can share.
func (a *Asked) Gradients() map[*gorgonia.Node]gorgonia.Nodes {
	of := map[*gorgonia.Node]gorgonia.Nodes{}
	for _, p := range a.Params {
		if d := p.Deriv(); d != nil {
			of[d] = append(of[d], p)
		}
	}
	return of
}

// Results returns what is computed for its own sake: outputs, and what no node needs. Behind these
// are the gradients of parameters, which may stand there already.
func (a *Asked) Results(g *gorgonia.ExprGraph) (results, gradients gorgonia.Nodes) {
	used := map[*gorgonia.Node]bool{}
	for _, n := range g.AllNodes() {
		for _, child := range Children(n) {
			used[child] = true
		}
	}
	results = slices.Clone(a.Outputs)
	for _, n := range g.AllNodes() {
		if n.Op() != nil && !used[n] {
			results = append(results, n)
		}
	}
	for _, p := range a.Params {
		if d := p.Deriv(); d != nil {
			gradients = append(gradients, d)
		}
	}
	return results, gradients
}

// Order returns the nodes that the results, of one graph, depend on, and these, each behind its
// inputs.
func Order(results ...*gorgonia.Node) (gorgonia.Nodes, error) {
	if len(results) == 0 {
		return nil, nil
	}
	return orderOf(results[0].Graph().ExactSubgraphRoots(results...))
}

// OrderOfAll returns the nodes of a graph, each behind its inputs.
func OrderOfAll(g *gorgonia.ExprGraph) (gorgonia.Nodes, error) { return orderOf(g) }

func orderOf(g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
	sorted, err := gorgonia.Sort(g)
	if err != nil {
		return nil, fmt.Errorf("sorting the graph: %w", err)
	}
	slices.Reverse(sorted) // Gorgonia sorts from results to inputs
	return sorted, nil
}
