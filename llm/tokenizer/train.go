package tokenizer

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
)

// TrainBPE learns merges that compress the text. It repeatedly replaces the most frequent pair of
// neighboring tokens with a new token. Among equally frequent pairs, it prefers the lower ids.
// Training ends when the vocabulary reaches the given size, from 257 to 2^20, or when no pair occurs
// twice.
//
// The same text and size produce the same encoding, regardless of how the reader divides the text. The
// memory grows with the number of different pieces, but not with the length of the text.
//
// Unless progress is nil, TrainBPE calls it after each merge. An error from progress or a canceled
// context stops the training.
func TrainBPE(ctx context.Context, text io.Reader, vocab int,
	progress func(merges, total int) error) (*BPE, error) {
	if vocab < 257 || vocab > maxVocab {
		return nil, fmt.Errorf("tokenizer: TrainBPE: the vocabulary is %d, want 257 to %d: 256 "+
			"bytes, the end of a document, and merges", vocab, maxVocab)
	}

	merges, err := findMerges(ctx, text, vocab, cutter{nextPiece, maxPiece}, progress)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: TrainBPE: %w", err)
	}

	b, err := newBPE(merges)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: TrainBPE: %w", err)
	}

	return b, nil
}

// Merges returns the same merges as TrainBPE, as pairs of ids, for a different division into pieces:
// next returns the length of the first piece of a text. Ids below 256 are bytes, and merge i produces
// the id 256+i. A piece must not depend on more than the following 64 KiB. Package hf provides the
// divisions used by published models.
func Merges(ctx context.Context, text io.Reader, vocab int, next func(text []byte) int,
	progress func(merges, total int) error) ([][2]int, error) {
	if vocab < 257 || vocab > maxVocab {
		return nil, fmt.Errorf("tokenizer: Merges: the vocabulary is %d, want 257 to %d: 256 bytes, the "+
			"end of a document, and merges", vocab, maxVocab)
	}

	found, err := findMerges(ctx, text, vocab, cutter{next, 64 << 10}, progress)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: Merges: %w", err)
	}

	merges := make([][2]int, len(found))
	for i, m := range found {
		merges[i] = [2]int{int(m.left), int(m.right)}
	}

	return merges, nil
}

// cutter divides text into pieces. Each piece depends on a limited number of bytes.
type cutter struct {
	next  func(text []byte) int
	reach int
}

func findMerges(ctx context.Context, text io.Reader, vocab int, cut cutter,
	progress func(merges, total int) error) ([]pair, error) {
	t, err := newBPETrainer(ctx, text, cut)
	if err != nil {
		return nil, err
	}

	merges := make([]pair, 0, vocab-257)
	for len(merges) < cap(merges) {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		p, ok := t.mostFrequent()
		if !ok {
			break
		}
		t.merge(p, int32(256+len(merges)))
		merges = append(merges, p)
		if progress == nil {
			continue
		}
		if err := progress(len(merges), cap(merges)); err != nil {
			return nil, err
		}
	}

	return merges, nil
}

// A bpeTrainer counts pairs. A merge changes only the counts of neighboring pairs, and only words with
// the pair need to be visited.
type bpeTrainer struct {
	words []bpeWord
	pairs map[pair]*pairCount
	queue pairQueue
	fresh []*pairCount // pairs first seen during the current merge
}

// A bpeWord is a piece with its current tokens and its number of occurrences.
type bpeWord struct {
	ids   []int32
	count int64
}

type pairCount struct {
	pair
	count int64
	words []int32 // words with the pair; some may have lost it to another merge
}

// newBPETrainer counts the pieces of the text and their pairs of bytes.
func newBPETrainer(ctx context.Context, text io.Reader, cut cutter) (*bpeTrainer, error) {
	t := &bpeTrainer{pairs: map[pair]*pairCount{}}
	index := map[string]int{}
	err := readPieces(ctx, text, cut, func(piece []byte) {
		i, ok := index[string(piece)]
		if !ok {
			i = len(t.words)
			index[string(piece)] = i
			ids := make([]int32, len(piece))
			for j, c := range piece {
				ids[j] = int32(c)
			}
			t.words = append(t.words, bpeWord{ids: ids})
		}
		t.words[i].count++
	})
	if err != nil {
		return nil, err
	}

	for w, word := range t.words {
		for i := range word.ids[1:] {
			t.add(word.ids[i], word.ids[i+1], w)
		}
	}

	t.queueFresh()
	return t, nil
}

// readPieces reads the text in portions and calls f for its pieces. A piece depends on a limited number
// of bytes. As long as more bytes than that are available, the pieces are the same as for the whole text.
func readPieces(ctx context.Context, text io.Reader, cut cutter, f func(piece []byte)) error {
	buffer := make([]byte, 1<<20)
	have := 0
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := io.ReadFull(text, buffer[have:])
		last := err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		rest := buffer[:have+n]
		for len(rest) >= cut.reach || last && len(rest) > 0 {
			n := cut.next(rest)
			f(rest[:n])
			rest = rest[n:]
		}
		if last {
			return nil
		}
		have = copy(buffer, rest)
	}
}

// mostFrequent returns the pair to merge next, or false if no pair occurs twice.
func (t *bpeTrainer) mostFrequent() (pair, bool) {
	for len(t.queue) > 0 {
		// The counts of queued pairs only decrease, because new pairs contain a new token. Pairs with a
		// lower count can wait until they are first.
		top := &t.queue[0]
		if now := top.pairCount.count; top.count != now {
			top.count = now
			heap.Fix(&t.queue, 0)
			continue
		}
		if top.count < 2 {
			break
		}
		return heap.Pop(&t.queue).(queued).pair, true
	}

	return pair{}, false
}

// merge replaces p with id in all words.
func (t *bpeTrainer) merge(p pair, id int32) {
	for _, w := range t.pairs[p].words {
		ids := t.words[w].ids
		merged := ids[:0] // written before the position that is read next
		for i := 0; i < len(ids); i++ {
			if i+1 == len(ids) || ids[i] != p.left || ids[i+1] != p.right {
				merged = append(merged, ids[i])
				continue
			}
			if n := len(merged); n > 0 {
				t.remove(merged[n-1], p.left, int(w))
				t.add(merged[n-1], id, int(w))
			}
			if i+2 < len(ids) {
				t.remove(p.right, ids[i+2], int(w))
				t.add(id, ids[i+2], int(w))
			}
			merged = append(merged, id)
			i++
		}
		t.words[w].ids = merged
	}

	delete(t.pairs, p)
	t.queueFresh()
}

// add adds an occurrence of a pair in word w.
func (t *bpeTrainer) add(left, right int32, w int) {
	p := pair{left, right}
	c := t.pairs[p]
	if c == nil {
		c = &pairCount{pair: p}
		t.pairs[p] = c
		t.fresh = append(t.fresh, c)
	}

	c.count += t.words[w].count
	if n := len(c.words); n == 0 || c.words[n-1] != int32(w) {
		c.words = append(c.words, int32(w))
	}
}

// remove removes an occurrence of a pair in word w.
func (t *bpeTrainer) remove(left, right int32, w int) {
	t.pairs[pair{left, right}].count -= t.words[w].count
}

func (t *bpeTrainer) queueFresh() {
	for _, c := range t.fresh {
		if c.count > 1 {
			heap.Push(&t.queue, queued{c, c.count})
		}
	}
	t.fresh = t.fresh[:0]
}

// A pairQueue is a heap with the most frequent pair on top, according to the counts when the pairs were
// queued.
type pairQueue []queued

type queued struct {
	*pairCount
	count int64
}

func (q pairQueue) Len() int      { return len(q) }
func (q pairQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *pairQueue) Push(x any)   { *q = append(*q, x.(queued)) }

func (q pairQueue) Less(i, j int) bool {
	a, b := q[i], q[j]
	return cmp.Or(cmp.Compare(b.count, a.count), cmp.Compare(a.left, b.left),
		cmp.Compare(a.right, b.right)) < 0
}

func (q *pairQueue) Pop() any {
	last := len(*q) - 1
	top := (*q)[last]
	*q = slices.Delete(*q, last, last+1)
	return top
}
