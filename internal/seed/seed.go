// Package seed is what every machine knows of a Kasmina layer's seeds. It has how a pass finds
// them, what it does about extreme inputs, and how the figures of rows become theirs.
package seed

import "github.com/kasmina-go/kasmina/blueprints"

// Stability is what a layer does about extreme inputs.
type Stability uint8

// The stability modes. Adaptive evaluates a chunk row whose largest magnitude passes 10⁶ scaled
// down by a power of two. Fast computes the formulas as they are. Strict zeroes what is smaller
// than ε and clamps to each seed's limits.
const (
	Adaptive Stability = iota
	Fast
	Strict
)

// Reduction is how the figures of a chunk's rows become those of the seed.
type Reduction uint8

// The reductions, in the order of state.Reduction and of kasmina_rows.cu: exact figures over all
// elements, the average of the rows' figures, the largest of them.
const (
	Exact Reduction = iota
	Mean
	Max
)

// Seed is a seed as a pass finds it. Slot 0, or neither Blend nor Learn, makes it one that only
// watches.
type Seed struct {
	Kind         blueprints.Kind
	Slot         uint16
	Blend, Learn bool
	Alpha        float32 // of the output; 1 in Training, where it is that of the gradients
	Low, High    float64 // clamp limits; 0 unless the mode is Strict
	Limit        float64 // largest norm of a row's gradient, where the layer clips
}
