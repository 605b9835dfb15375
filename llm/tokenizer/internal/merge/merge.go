// Package merge merges neighboring tokens within a piece of text, as byte-pair encodings do, and caches
// the results.
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

// A Table holds merges with their ranks, using open addressing. A map would take three times as much
// memory. The hash has a random key, so that a file cannot make all pairs collide.
type Table struct {
	slots []slot // the length is a power of two, and at most half of the slots are used
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

// Find returns the rank of a pair, or None, and the merged token.
func (t *Table) Find(left, right int32) (rank, id int32) {
	s := t.slot(left, right)
	return s.rank, s.id
}

// Add adds a merge. It returns the previous rank of the pair, or None.
func (t *Table) Add(left, right, rank, id int32) (before int32) {
	s := t.slot(left, right)
	before = s.rank
	*s = slot{left, right, id, rank}
	return before
}

// slot returns the slot of a pair, or the free slot where it would be added.
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

// A Merger merges the tokens of pieces. It is not safe for concurrent use.
type Merger struct {
	table *Table
	next  []step // for few tokens: next[i] is the merge of tokens i and i+1

	symbols []symbol // for many tokens
	queue   queue
}

// NewMerger returns a merger for a table.
func NewMerger(t *Table) *Merger { return &Merger{table: t} }

type step struct{ rank, id int32 }

// few is the largest number of tokens that Merge handles by searching all pairs for the next merge. The
// search takes quadratic time, but is the fastest method for nearly all pieces.
const few = 48

// Merge repeatedly merges the pair with the lowest rank, the leftmost one if there are several. It
// replaces the tokens with the result. The time for n tokens is O(n log n).
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

// A symbol is a token in a linked list of the remaining tokens.
type symbol struct {
	id         int32 // gone after merging with the previous symbol
	prev, next int32
}

const gone = -1

// mergeMany implements Merge with a queue of candidates. Outdated candidates are skipped when they are
// removed from the queue.
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
		if left.prev >= 0 { // first, so that a run of merges queues the next ones in order
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

// push queues the merge of a symbol with the next one.
func (m *Merger) push(at int32) {
	left := m.symbols[at]
	if rank, _ := m.table.Find(left.id, m.symbols[left.next].id); rank != None {
		m.queue.push(entry(rank)<<32 | entry(at))
	}
}
