package graph

import (
	"strings"

	"gorgonia.org/gorgonia"
)

// Layers determines the layers of nodes, for errors and profiles. A node that reads a parameter
// belongs to the layer named in the parameter's name, while any other node belongs to the layer of
// its last computed input. For example, attention belongs to the layer that projects its queries, and
// a sum of gradients to the layer of its last term.
type Layers struct {
	// IsParam reports whether an input is a parameter.
	IsParam func(n *gorgonia.Node) bool

	places map[*gorgonia.Node]place
}

// place is the position of a node.
type place struct {
	layer string
	order int  // position in the order of computation
	param bool // the node is a parameter
}

// Add adds nodes, which must follow their inputs.
func (l *Layers) Add(sorted gorgonia.Nodes) {
	if l.places == nil {
		l.places = map[*gorgonia.Node]place{}
	}

	for _, n := range sorted {
		if _, done := l.places[n]; done {
			continue
		}

		if n.Op() == nil {
			if l.IsParam(n) {
				l.places[n] = place{layer: layerName(n.Name()), param: true}
			}
			continue
		}

		var from place
		for _, child := range Children(n) {
			p := l.places[child]
			if p.param && !from.param || p.param == from.param && p.order > from.order {
				from = p
			}
		}

		l.places[n] = place{layer: from.layer, order: len(l.places) + 1}
	}
}

// Of returns the layer of a node, or "" if no name determines it. n may be nil.
func (l *Layers) Of(n *gorgonia.Node) string { return l.places[n].layer }

// Join gives an input of an inner graph the place of the corresponding outer node.
func (l *Layers) Join(within, outside *gorgonia.Node) { l.places[within] = l.places[outside] }

// layerName returns the layer in a parameter's name: "model.layers.3" for
// model.layers.3.mlp.up_proj.weight, and "lm_head" for lm_head.weight.
func layerName(param string) string {
	parts := strings.Split(param, ".")
	for i, p := range parts {
		if p != "" && strings.Trim(p, "0123456789") == "" && i > 0 {
			return strings.Join(parts[:i+1], ".")
		}
	}
	return strings.Join(parts[:max(1, len(parts)-1)], ".")
}
