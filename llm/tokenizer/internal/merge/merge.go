// Package merge merges neighbouring tokens, which is what byte-pair encodings do inside a piece of
// text, and remembers the pieces that it met.
package merge

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"

	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// None is the rank of pairs that are not merged.
const None = math.MaxInt32

// A Table holds the merges: which pairs of tokens become one, and which is merged first. It finds
// them by open addressing, as a map takes three times the memory. The key of its hash is random, or
// a file could be made whose pairs all collide.
type Table struct {
	slots []slot // their number is a power of two, of which at most half are taken
	key   uint64
}

type slot struct {
	left, right int32
	id          int32
	rank        int32 // None if the slot is free
}

// NewTable returns a table with room for n merges.
func NewTable(n int) *Table {
	t := &Table{slots: make([]slot, 1<<bits.Len(uint(2*n))), key: rand.Uint64()}
	for i := range t.slots {
		t.slots[i].rank = None
	}
	return t
}

// Find returns the rank of a pair's merge, None if there is none, and the token that it makes.
func (t *Table) Find(left, right int32) (rank, id int32) {
	s := t.slot(left, right)
	return s.rank, s.id
}

// Add enters a merge, and returns the rank that the pair had before, or None.
func (t *Table) Add(left, right, rank, id int32) (before int32) {
	s := t.slot(left, right)
	before = s.rank
	*s = slot{left, right, id, rank}
	return before
}

// slot returns where a pair is, or would be.
func (t *Table) slot(left, right int32) *slot {
	mask := uint64(len(t.slots) - 1)
	at := splitmix.Mix(uint64(uint32(left))<<32|uint64(uint32(right))^t.key) & mask
	for {
		s := &t.slots[at]
		if s.rank == None || s.left == left && s.right == right {
			return s
		}
		at = (at + 1) & mask
	}
}

// A Merger merges the tokens of pieces. It is for one goroutine.
type Merger struct {
	table *Table
	next  []step // next[i] is the merge of tokens i and i+1, while they are few

	symbols []symbol // while they are many
	queue   queue
}

// NewMerger returns a merger by a table.
func NewMerger(t *Table) *Merger { return &Merger{table: t} }

type step struct{ rank, id int32 }

// few is how many tokens are merged by looking for the next merge among all neighbours. That is
// quadratic, but the fastest for nearly all pieces.
const few = 48

// Merge merges, again and again, the pair of the lowest rank, the leftmost where it occurs twice.
// The result is in the place of the tokens. For n tokens it takes time in O(n log n).
func (m *Merger) Merge(tokens []int32) []int32 {
	if len(tokens) < 2 {
		return tokens
	}
	if len(tokens) > few {
		return m.mergeMany(tokens)
	}
	m.next = m.next[:0]
	for i := range tokens[1:] {
		m.next = append(m.next, m.find(tokens, i))
	}
	for {
		best, at := int32(None), 0
		for i := range m.next {
			if m.next[i].rank < best {
				best, at = m.next[i].rank, i
			}
		}
		if best == None {
			return tokens
		}
		tokens[at] = m.next[at].id
		tokens = slices.Delete(tokens, at+1, at+2)
		m.next = slices.Delete(m.next, at, at+1)
		if at > 0 {
			m.next[at-1] = m.find(tokens, at-1)
		}
		if at < len(m.next) {
			m.next[at] = m.find(tokens, at)
		}
	}
}

func (m *Merger) find(tokens []int32, at int) step {
	rank, id := m.table.Find(tokens[at], tokens[at+1])
	return step{rank, id}
}

// A symbol is a token of a list in which merged ones are skipped.
type symbol struct {
	id         int32 // gone when it was merged into the one before it
	prev, next int32
}

const gone = -1

// mergeMany is Merge with a queue of the merges that may come next. An entry whose pair is no more
// is left in it, and dropped when it comes up.
func (m *Merger) mergeMany(tokens []int32) []int32 {
	m.symbols = slices.Grow(m.symbols[:0], len(tokens))
	m.queue.clear(len(tokens))
	for i, id := range tokens {
		m.symbols = append(m.symbols, symbol{id, int32(i - 1), int32(i + 1)})
	}
	for i := range tokens[1:] {
		m.push(int32(i))
	}
	for {
		e, ok := m.queue.pop()
		if !ok {
			break
		}
		left := &m.symbols[e.at()]
		if left.id == gone || int(left.next) == len(tokens) {
			continue
		}
		right := &m.symbols[left.next]
		rank, id := m.table.Find(left.id, right.id)
		if rank != e.rank() {
			continue
		}
		left.id, left.next, right.id = id, right.next, gone
		if left.prev >= 0 { // first, so that a run of merges queues others in their order
			m.push(left.prev)
		}
		if int(left.next) < len(tokens) {
			m.symbols[left.next].prev = e.at()
			m.push(e.at())
		}
	}
	kept := tokens[:0]
	for at := 0; at < len(m.symbols); at = int(m.symbols[at].next) {
		kept = append(kept, m.symbols[at].id)
	}
	return kept
}

// push queues the merge of the symbol at a place and the next one.
func (m *Merger) push(at int32) {
	left := m.symbols[at]
	if rank, _ := m.table.Find(left.id, m.symbols[left.next].id); rank != None {
		m.queue.push(entry(rank)<<32 | entry(at))
	}
}
