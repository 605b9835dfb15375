// Package seed describes the seeds of a Kasmina layer for the machines: their state in a pass, the
// handling of extreme inputs, and the reduction of rows' figures.
package seed

import "github.com/kasmina-go/kasmina/blueprints"

// Stability determines how a layer handles extreme inputs.
type Stability uint8

// Stability modes. Adaptive scales a chunk row down by a power of two for the transform if its
// largest magnitude exceeds 10⁶. Fast computes the formulas unchanged. Strict replaces magnitudes
// below ε by 0 and clamps to each seed's limits.
const (
	Adaptive Stability = iota
	Fast
	Strict
)

// Reduction determines how the figures of a chunk's rows are combined.
type Reduction uint8

// Reductions, in the order of state.Reduction and kasmina_rows.cu: exact figures over all elements,
// the average of the rows' figures, and the largest of the rows' figures.
const (
	Exact Reduction = iota
	Mean
	Max
)

// Seed is the state of a seed in a pass. A seed with slot 0, or with neither Blend nor Learn, only
// watches its chunk.
type Seed struct {
	Kind         blueprints.Kind
	Slot         uint16
	Blend, Learn bool
	Alpha        float32 // α of the output, or in Training, where it is 1, of the gradients
	Low, High    float64 // clamp limits; 0 unless the mode is Strict
	Limit        float64 // maximum norm of a row's gradient, if the layer clips
}
