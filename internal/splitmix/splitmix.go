// Package splitmix mixes the bits of a word, for random orders and hash tables.
package splitmix

// Mix is the output function of SplitMix64: a bijection of 64-bit words with every output bit
// depending on every input bit (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014).
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
