package llm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
)

// Lattice describes the locations of a lattice's seeds for display.
type Lattice struct {
	Name string          `json:"name"` // such as "block 3" or "weight"
	Site blueprints.Site `json:"site"`
	// Places lists the seeds' locations, such as "block 3, q", unless their numbers suffice.
	Places []string `json:"places,omitempty"`
	// Group is the number of consecutive seeds that belong to the same block. It is 0 if seeds
	// belong to no block, or each to a different one.
	Group int `json:"group,omitempty"`
}

// Lattices describes the lattices of a model, in order: Kasmina layers, weights, stream, depth.
func (c Config) Lattices() (all []Lattice) {
	for _, block := range c.Kasmina {
		all = append(all, Lattice{Name: blockName(block), Site: blueprints.Chunk})
	}

	if len(c.Weights) > 0 {
		l := Lattice{Name: "weights", Site: blueprints.Weight}
		for i, w := range c.Weights {
			place := blockName(w.Block) + ", " + w.Layer
			if w.Layer == headLayer {
				place = headLayer
			}
			l.Places = append(l.Places, place)
			if l.Group == 0 && i > 0 && w.Block != c.Weights[i-1].Block {
				l.Group = i
			}
		}
		all = append(all, l)
	}

	if len(c.Streams) > 0 {
		l := Lattice{Name: "stream", Site: blueprints.Stream}
		for _, block := range c.Streams {
			l.Places = append(l.Places, "after "+blockName(block))
		}
		all = append(all, l)
	}

	if c.Depth > 0 {
		all = append(all, Lattice{Name: "depth", Site: blueprints.Depth})
	}

	return all
}

func blockName(i int) string { return fmt.Sprintf("block %d", i) }
