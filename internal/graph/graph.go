// Package graph provides the machines' view of a Gorgonia graph: the requested results, the values
// that outlive a run, the order of computation, and the names of nodes and ops.
package graph

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
)

// Asked holds the parameters and outputs declared to a machine. Runs also compute nodes that no other
// node needs.
type Asked struct {
	Params  gorgonia.Nodes // inputs that are parameters
	Outputs gorgonia.Nodes // nodes with values that must outlive a run
}

// AddParams implements the machine option WithParams.
func (a *Asked) AddParams(params ...*gorgonia.Node) error {
	for i, n := range params {
		if n == nil || n.Op() != nil {
			return fmt.Errorf("WithParams: node %d is not an input", i)
		}
	}
	a.Params = append(a.Params, params...)
	return nil
}

// AddOutputs implements the machine option WithOutputs.
func (a *Asked) AddOutputs(outputs ...*gorgonia.Node) error {
	if slices.Contains(outputs, nil) {
		return errors.New("WithOutputs: a node is nil")
	}
	a.Outputs = append(a.Outputs, outputs...)
	return nil
}

// Within returns an error unless all declared nodes are in the graph.
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

// Gradients returns the parameters keyed by gradient node, which several parameters can share.
func (a *Asked) Gradients() map[*gorgonia.Node]gorgonia.Nodes {
	of := map[*gorgonia.Node]gorgonia.Nodes{}
	for _, p := range a.Params {
		if d := p.Deriv(); d != nil {
			of[d] = append(of[d], p)
		}
	}
	return of
}

// Byproduct is implemented by ops that extract one of several values that an op computes together. Such a
// value is no result of a graph only because nothing uses it.
type Byproduct interface{ Byproduct() }

// Results returns the nodes that must be computed. The results are the outputs and all nodes without a
// dependent node, but not a [Byproduct], unless it is the derivative of a node.
// The gradients are the gradients of parameters, and may be results as well.
func (a *Asked) Results(g *gorgonia.ExprGraph) (results, gradients gorgonia.Nodes) {
	used, derivative := map[*gorgonia.Node]bool{}, map[*gorgonia.Node]bool{}
	for _, n := range g.AllNodes() {
		for _, child := range Children(n) {
			used[child] = true
		}
		if d := n.Deriv(); d != nil {
			derivative[d] = true
		}
	}

	results = slices.Clone(a.Outputs)
	for _, n := range g.AllNodes() {
		_, part := n.Op().(Byproduct)
		if n.Op() != nil && !used[n] && (!part || derivative[n]) {
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

// Order returns the results, which belong to one graph, and all nodes that they depend on, each
// after its inputs.
func Order(results ...*gorgonia.Node) (gorgonia.Nodes, error) {
	if len(results) == 0 {
		return nil, nil
	}
	return orderOf(results[0].Graph().ExactSubgraphRoots(results...))
}

// OrderOfAll returns all nodes of a graph, each after its inputs.
func OrderOfAll(g *gorgonia.ExprGraph) (gorgonia.Nodes, error) { return orderOf(g) }

// orderOf sorts the nodes of a graph.
func orderOf(g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
	sorted, err := gorgonia.Sort(g)
	if err != nil {
		return nil, fmt.Errorf("sorting the graph: %w", err)
	}
	slices.Reverse(sorted) // Gorgonia sorts from results to inputs
	return sorted, nil
}
