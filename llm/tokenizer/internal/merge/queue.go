package merge

import "slices"

// An entry is a merge that may come next. It is its rank, and below that where it is, so that the
// least entry is the next one.
type entry uint64

func (e entry) rank() int32 { return int32(e >> 32) }
func (e entry) at() int32   { return int32(uint32(e)) }

// A queue gives its entries in ascending order. Those behind all of a sorted list wait for their
// turn to be sorted too, and only what comes in between goes to a heap. So the merges of a run of
// one letter, of which one pass makes those of the next, are never moved.
type queue struct {
	sorted, later []entry
	between       heap
	at            int // the next one of sorted
}

// clear empties the queue, which is to get about so many entries.
func (q *queue) clear(n int) {
	*q = queue{sorted: slices.Grow(q.sorted[:0], n), later: slices.Grow(q.later[:0], n),
		between: q.between[:0]}
}

func (q *queue) push(e entry) {
	if q.at < len(q.sorted) && e < q.sorted[len(q.sorted)-1] {
		q.between.push(e)
		return
	}
	q.later = append(q.later, e)
}

// pop takes the least entry, if there is one.
func (q *queue) pop() (entry, bool) {
	if q.at == len(q.sorted) { // so nothing is in between
		if len(q.later) == 0 {
			return 0, false
		}
		q.sorted, q.later, q.at = q.later, q.sorted[:0], 0
		slices.Sort(q.sorted)
	}
	if len(q.between) == 0 || q.sorted[q.at] <= q.between[0] {
		q.at++
		return q.sorted[q.at-1], true
	}
	return q.between.pop(), true
}

// A heap has no entry i less than entry (i-1)/2. Package container/heap would allocate for each
// entry.
type heap []entry

func (q *heap) push(e entry) {
	*q = append(*q, e)
	all := *q
	at := len(all) - 1
	for at > 0 {
		parent := (at - 1) / 2
		if e >= all[parent] {
			break
		}
		all[at] = all[parent]
		at = parent
	}
	all[at] = e
}

func (q *heap) pop() entry {
	all := *q
	top, last := all[0], all[len(all)-1]
	all = all[:len(all)-1]
	*q = all
	if len(all) == 0 {
		return top
	}
	at := 0
	for {
		child := 2*at + 1
		if child >= len(all) {
			break
		}
		if child+1 < len(all) && all[child+1] < all[child] {
			child++
		}
		if all[child] >= last {
			break
		}
		all[at] = all[child]
		at = child
	}
	all[at] = last
	return top
}
