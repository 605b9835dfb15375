package graft

import "math/rand/v2"

// Noisy returns a random α drawn uniformly between α·(1 − width) and α·(1 + width), limited to 1.
// The draw depends only on seed, epoch and step.
func Noisy(alpha, width float64, seed int, epoch uint32, step uint64) float64 {
	draw := rand.New(rand.NewPCG(step, uint64(epoch)<<32|uint64(uint32(seed)))).Float64()
	return min(1, alpha*(1+width*(2*draw-1)))
}
