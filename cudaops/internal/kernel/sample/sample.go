// Package sample has the kernels that draw tokens from logits, as package internal/cpu/sampling defines it,
// and feed them to the next step of a model.
package sample

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
)

// Tokens draws a token from every row of Logits [Rows, N], by one rule for each row. It stores −1 for a row
// without a rule, and where [sampling.Drawer.Draw] would return an error.
type Tokens struct {
	Tokens  gpu.Ptr // int64 [Rows]
	Logits  gpu.Ptr
	IDs     gpu.Ptr // int64, which the rules refer to
	Rules   gpu.Ptr // int64 [Rows, RuleWords]
	Entries gpu.Ptr // int64 [entries, EntryWords]
	State   gpu.Ptr // StateBytes, zero before and after a launch
	Rows, N int
	Type    gpu.DType
}

// Feed sets IDs[i] to Tokens[From[i]], unless From[i] is negative.
type Feed struct {
	IDs, From, Tokens gpu.Ptr // int64
	Rows              int
}

// These constants must match sample.cu.
const (
	threads    = 1024
	bins       = 2048
	mostBlocks = 64
	histograms = 3

	// RuleWords and EntryWords are the sizes of an encoded rule and an encoded entry, in int64s.
	RuleWords  = 16
	EntryWords = 2
)

// mostElements is the largest number of logits of a block. They stay in its shared memory.
const mostElements = 16 * threads

// fewElements is the number of logits below which more blocks don't save time.
const fewElements = 2 * threads

// StateBytes returns the size of State.
func StateBytes(rows int) int {
	return rows * (8 + 4*4 + mostBlocks*(8+4+4) + histograms*bins*(8+4))
}

// Launch enqueues one kernel.
func (a Tokens) Launch(q *kernel.Queue) {
	if a.N > mostBlocks*mostElements {
		q.Err = fmt.Errorf("kernels.Sample: a vocabulary of %d tokens, want at most %d", a.N, mostBlocks*mostElements)
		return
	}

	name := "sample" + kernel.Suffix(a.Type)
	config := func(most int) gpu.LaunchConfig {
		return gpu.LaunchConfig{Block: gpu.Dim{X: threads}, Shared: 4*most + bins*(8+4), Cooperative: true}
	}
	blocks := a.blocks(q.Resident("sample", name, config(mostElements)))
	most := a.most(blocks)
	c := config(most)
	c.Grid = gpu.Dim{X: blocks, Y: max(1, min(a.Rows, q.Resident("sample", name, config(mostElements))/blocks))}
	q.Run("sample", name, c, a.Tokens, a.Logits, a.IDs, a.Rules, a.Entries, a.State, a.Rows, a.N, most)
}

// blocks returns the number of blocks for each row on a GPU that runs a given number at the same time.
func (a Tokens) blocks(resident int) int {
	least := kernel.CeilDiv(a.N, mostElements)
	return max(least, min(mostBlocks, resident/max(1, a.Rows), kernel.CeilDiv(a.N, fewElements)))
}

// most returns the number of logits of a block.
func (a Tokens) most(blocks int) int {
	return kernel.CeilDiv(kernel.CeilDiv(a.N, blocks), threads) * threads
}

// Launch enqueues one kernel.
func (a Feed) Launch(q *kernel.Queue) {
	q.Run("sample", "sample_feed", kernel.Line(1, threads), a.IDs, a.From, a.Tokens, a.Rows)
}

// The kinds of rules.
const (
	kindNone   = -1
	kindGreedy = 0
	kindDraw   = 1
)

// None encodes the absence of a rule.
func None(words []int64) {
	clear(words)
	words[0] = kindNone
}

// Encode encodes a rule. entries is the index of the rule's first entry. If the rule has a pending token,
// this token is in the given row of IDs; a rule may have at most one.
func Encode(words []int64, r *sampling.Rule, entries, row int) {
	words[0] = kindDraw
	if r.Greedy {
		words[0] = kindGreedy
	}
	words[1], words[2] = int64(r.Uniform), int64(r.TopK)
	words[3], words[4] = int64(r.TopP), int64(r.MinWeight)
	words[5] = int64(r.Vocab)
	words[6] = pair(math.Float32bits(r.Scale), math.Float32bits(r.Repetition))
	words[7] = pair(math.Float32bits(r.Presence), math.Float32bits(r.Frequency))
	words[8], words[9] = int64(entries), int64(len(r.Entries))
	words[10] = -1
	if len(r.Pending) > 0 {
		words[10] = int64(row)
	}
}

// EncodeEntry encodes an entry.
func EncodeEntry(words []int64, e sampling.Entry) {
	words[0] = pair(uint32(e.ID)|kernel.Bit(e.Occurred)<<31, uint32(e.Drawn))
	words[1] = pair(math.Float32bits(e.Bias), 0)
}

// Decode returns the rule encoded in words, or false if words encode no rule. ids holds the contents of
// IDs.
func Decode(words, entries, ids []int64) (r sampling.Rule, ok bool) {
	if words[0] == kindNone {
		return r, false
	}

	low := func(w int64) float32 { return math.Float32frombits(uint32(w)) }
	high := func(w int64) float32 { return math.Float32frombits(uint32(w >> 32)) }
	r = sampling.Rule{Greedy: words[0] == kindGreedy, Uniform: uint64(words[1]), TopK: int(words[2]),
		TopP: uint64(words[3]), MinWeight: uint64(words[4]), Vocab: int(words[5]), Scale: low(words[6]),
		Repetition: high(words[6]), Presence: low(words[7]), Frequency: high(words[7])}
	for i := range int(words[9]) {
		e := entries[(int(words[8])+i)*EntryWords:][:EntryWords]
		r.Entries = append(r.Entries, sampling.Entry{ID: int(uint32(e[0]) &^ (1 << 31)), Occurred: e[0]>>31&1 == 1,
			Drawn: int(uint32(e[0] >> 32)), Bias: low(e[1])})
	}
	if words[10] >= 0 {
		r.Pending = []int{int(ids[words[10]])}
	}
	return r, true
}

// pair returns a word with two halves, the lower one first.
func pair(low, high uint32) int64 { return int64(high)<<32 | int64(low) }
