package graft

import "math/rand/v2"

// Noisy returns an α that is drawn evenly from α·(1 − width) to α·(1 + width), and at most 1. The
// same seed, epoch and step draw the same.
func Noisy(alpha, width float64, seed int, epoch uint32, step uint64) float64 {
	draw := rand.New(rand.NewPCG(step, uint64(epoch)<<32|uint64(uint32(seed)))).Float64()
	return min(1, alpha*(1+width*(2*draw-1)))
}
