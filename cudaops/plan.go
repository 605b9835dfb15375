package cudaops

import (
	"cmp"
	"maps"
	"slices"
)

// alignment of everything in the arena: what cudaMalloc gives, and what cuBLASLt's fastest algorithms ask for.
const alignment = 256

func align(bytes int) int { return (bytes + alignment - 1) / alignment * alignment }

// interval is a piece of memory that is needed from step first to step last, both included.
type interval struct {
	bytes, first, last int
	offset             int // set by pack
}

// pack gives every interval an offset in one arena such that no two that are needed at the same time overlap, and returns
// the arena's size. Large ones are placed first, each at the lowest offset that is free for as long as it is needed: on
// the graphs of language models this stays within a few per cent of the most that is needed at any one step.
// (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, greedy by size.)
func pack(all []*interval) (total int) {
	order := slices.Clone(all)
	slices.SortStableFunc(order, func(a, b *interval) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.first, b.first))
	})
	var placed []*interval // by offset
	for _, v := range order {
		v.offset = 0
		for _, p := range placed {
			if p.last < v.first || v.last < p.first {
				continue
			}
			if v.offset+align(v.bytes) <= p.offset {
				break
			}
			v.offset = max(v.offset, p.offset+align(p.bytes))
		}
		i, _ := slices.BinarySearchFunc(placed, v.offset, func(p *interval, offset int) int { return cmp.Compare(p.offset, offset) })
		placed = slices.Insert(placed, i, v)
		total = max(total, v.offset+align(v.bytes))
	}
	return total
}

// peak returns the most memory that the intervals need at any one step: a lower bound of what pack can reach.
func peak(all []*interval) int {
	steps := map[int]int{}
	for _, v := range all {
		steps[v.first] += align(v.bytes)
		steps[v.last+1] -= align(v.bytes)
	}
	most, now := 0, 0
	for _, s := range slices.Sorted(maps.Keys(steps)) {
		now += steps[s]
		most = max(most, now)
	}
	return most
}
