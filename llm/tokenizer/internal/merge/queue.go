package merge

import "slices"

// An entry is a candidate for a merge. Its upper bits hold the rank and its lower bits the position,
// so that the smallest entry is the next merge.
type entry uint64

func (e entry) rank() int32 { return int32(e >> 32) }
func (e entry) at() int32   { return int32(uint32(e)) }

// A queue returns its entries in ascending order. It works through a sorted list. New entries that are
// larger than all entries of this list wait in another list, to be sorted later, and only other new
// entries go to a heap. In a run of equal letters, each pass produces the candidates for the next one,
// so no entry goes to the heap.
type queue struct {
	sorted, later []entry
	between       heap
	at            int // next entry of sorted
}

// clear removes all entries and prepares for about n new ones.
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

// pop removes and returns the smallest entry, if there is one.
func (q *queue) pop() (entry, bool) {
	if q.at == len(q.sorted) { // the heap is empty too
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

// A heap is ordered so that entry i is not less than entry (i-1)/2. Package container/heap would allocate
// memory for each entry.
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
