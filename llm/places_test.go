package llm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
)

// TestLattices checks the names of all lattices and seeds, and that the seeds at the weights of a block form a group.
func TestLattices(t *testing.T) {
	c := Config{Layers: 3, Kasmina: []int{0, 2}, Streams: []int{1}, Depth: 2}
	c.Weights = c.WeightSites("q", "down", "head")
	require.Equal(t, []Lattice{{Name: "block 0"}, {Name: "block 2"},
		{Name: "weights", Site: blueprints.Weight, Group: 2,
			Places: []string{"block 0, q", "block 0, down", "block 1, q", "block 1, down",
				"block 2, q", "block 2, down", "head"}},
		{Name: "stream", Site: blueprints.Stream, Places: []string{"after block 1"}},
		{Name: "depth", Site: blueprints.Depth}}, c.Lattices())
	require.Empty(t, Config{Layers: 3}.Lattices())
}
