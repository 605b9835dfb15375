package graph

import (
	"strings"

	"gorgonia.org/gorgonia"
)

// Layers tells the layer of a node, for errors and profiles. A node that reads a parameter is of
// the layer that the parameter's name tells. Any other node is of the layer of that input which is
// computed last. So an attention is where its queries are projected, and a sum of gradients where
// the last of them comes from.
type Layers struct {
	// IsParam reports whether an input is a parameter.
	IsParam func(n *gorgonia.Node) bool

	places map[*gorgonia.Node]place
}

// place is where a node stands.
type place struct {
	layer string
	order int  // among the nodes, as they are computed
	param bool // the node is a parameter
}

// Add adds nodes, each of which stands behind its inputs.
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

// Of returns the layer of a node, which is empty where no name tells it. No node is nil.
func (l *Layers) Of(n *gorgonia.Node) string { return l.places[n].layer }

// Join has an input of a graph within a node stand where the node outside does.
func (l *Layers) Join(within, outside *gorgonia.Node) { l.places[within] = l.places[outside] }

// layerName is the layer that a parameter's name tells: model.layers.3 of
// model.layers.3.mlp.up_proj.weight, and lm_head of lm_head.weight.
func layerName(param string) string {
	parts := strings.Split(param, ".")
	for i, p := range parts {
		if p != "" && strings.Trim(p, "0123456789") == "" && i > 0 {
			return strings.Join(parts[:i+1], ".")
		}
	}
	return strings.Join(parts[:max(1, len(parts)-1)], ".")
}
