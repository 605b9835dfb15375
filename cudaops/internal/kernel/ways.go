package kernel

import (
	"fmt"
	"slices"
)

// Way is one of the implementations of an op: a family of kernels and, where that can be chosen,
// how many warps or blocks it works with. The zero Way is the one that should be fastest.
type Way struct {
	Family string
	Size   int
}

func (w Way) String() string {
	if w.Size == 0 {
		return w.Family
	}
	return fmt.Sprintf("%s-%d", w.Family, w.Size)
}

// of returns w, or the first of the ways that take the arguments if w is zero.
func (w Way) Of(op string, ways []Way) (Way, error) {
	switch {
	case w == Way{}:
		return ways[0], nil
	case !slices.Contains(ways, w):
		return w, fmt.Errorf("kernels.%s: the way %v does not take the arguments, which %v do", op,
			w, ways)
	}
	return w, nil
}

// Tuned is a launch that can be done in several ways: what its Way is.
type Tuned interface {
	Shape() string   // for people, and to tell times apart
	Units() []string // where its kernels are
	Computes() bool  // arithmetic, not memory, bounds it
}
