package lower

import (
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/opbase"
)

// The layer of a node, for profiles. A node that reads a parameter is of the layer that the
// parameter's name tells; any other node is of that of its input which is computed last. So an
// attention is where its queries are projected, and a sum of gradients where the last of them comes
// from.

// place is where a node stands.
type place struct {
	layer string
	order int  // among the nodes, as they are computed
	param bool // the node is a parameter
}

// placeAll gives nodes their places. They are sorted from results to inputs.
func (c *compiler) placeAll(sorted gorgonia.Nodes) {
	for _, n := range slices.Backward(sorted) {
		if _, done := c.layers[n]; done {
			continue
		}
		if n.Op() == nil {
			if slices.Contains(c.o.Params, n) || c.o.sharedParam(n) != nil {
				c.layers[n] = place{layer: layerName(n.Name()), param: true}
			}
			continue
		}
		var from place
		for _, child := range opbase.Children(n) {
			p := c.layers[child]
			if p.param && !from.param || p.param == from.param && p.order > from.order {
				from = p
			}
		}
		c.layers[n] = place{layer: from.layer, order: len(c.layers) + 1}
	}
}

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
