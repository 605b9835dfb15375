// Package plan places the intermediate results of a computation in one block of memory. Each result is
// needed only during certain steps, and results that are needed at different times may overlap.
package plan

import (
	"cmp"
	"slices"
)

// Interval is a piece of memory that is needed from step First to step Last, inclusive.
type Interval struct {
	Bytes, First, Last int
	Offset             int // set by Pack and Fit
}

// Align rounds bytes up to a multiple of the alignment.
func Align(bytes, alignment int) int { return (bytes + alignment - 1) / alignment * alignment }

// Pack gives every interval an offset in one arena, a multiple of the alignment, and returns the
// size of the arena. Intervals that are needed at the same time do not overlap.
//
// Large intervals are placed first, each at the lowest offset that is free for as long as it is
// needed (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020,
// greedy by size). For graphs of language models, the arena exceeds the maximum needed in any step by
// a few percent.
func Pack(all []*Interval, alignment int) (total int) {
	order := slices.Clone(all)
	slices.SortStableFunc(order, func(a, b *Interval) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.First, b.First))
	})
	var placed []*Interval // by offset
	for _, v := range order {
		Fit(v, placed, alignment)
		placed = Insert(placed, v)
		total = max(total, v.Offset+Align(v.Bytes, alignment))
	}

	return total
}

// Fit gives an interval the lowest offset that is free for as long as it is needed. placed holds
// the other intervals, ordered by offset.
func Fit(v *Interval, placed []*Interval, alignment int) {
	v.Offset = 0
	for _, p := range placed {
		if p.Last < v.First || v.Last < p.First {
			continue
		}
		if v.Offset+Align(v.Bytes, alignment) <= p.Offset {
			break
		}
		v.Offset = max(v.Offset, p.Offset+Align(p.Bytes, alignment))
	}
}

// Insert adds an interval to placed, which is ordered by offset.
func Insert(placed []*Interval, v *Interval) []*Interval {
	i, _ := slices.BinarySearchFunc(placed, v.Offset, func(p *Interval, offset int) int {
		return cmp.Compare(p.Offset, offset)
	})
	return slices.Insert(placed, i, v)
}
