package graph

import "testing"

// TestLayerName checks the layer names derived from parameter names.
func TestLayerName(t *testing.T) {
	for name, want := range map[string]string{"model.layers.13.mlp.up_proj.weight": "model.layers.13", "lm_head.weight": "lm_head",
		"w": "w", "3": "3", "": "", "h.0.ln_1.weight": "h.0"} {
		if got := layerName(name); got != want {
			t.Errorf("%q is of layer %q, want %q", name, got, want)
		}
	}
}
