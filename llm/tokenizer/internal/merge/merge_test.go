package merge

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// naive merges as Merge documents, examining every pair each time.
func naive(t *Table, tokens []int32) []int32 {
	tokens = slices.Clone(tokens)
	for {
		best, at, into := int32(None), 0, int32(0)
		for i := 0; i+1 < len(tokens); i++ {
			if rank, id := t.Find(tokens[i], tokens[i+1]); rank < best {
				best, at, into = rank, i, id
			}
		}
		if best == None {
			return tokens
		}
		tokens[at] = into
		tokens = slices.Delete(tokens, at+1, at+2)
	}
}

func TestMerge(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		letters := int32(1 + r.IntN(4))
		n := r.IntN(40)
		table := NewTable(n)
		for i := range int32(n) {
			known := letters + i
			table.Add(r.Int32N(known), r.Int32N(known), int32(r.IntN(1000)*64)+i, known)
		}
		m := NewMerger(table)
		for _, length := range []int{0, 1, 2, 3, few, few + 1, 200} {
			tokens := make([]int32, length)
			for i := range tokens {
				tokens[i] = r.Int32N(letters)
			}
			want := naive(table, tokens)
			require.True(t, slices.Equal(want, m.Merge(tokens)))
		}
	}
}

func TestTable(t *testing.T) {
	table := NewTable(3)
	require.EqualValues(t, None, table.Add(1, 2, 7, 3))
	require.EqualValues(t, 7, table.Add(1, 2, 8, 4))
	rank, id := table.Find(1, 2)
	require.EqualValues(t, 8, rank)
	require.EqualValues(t, 4, id)
	rank, _ = table.Find(2, 1)
	require.EqualValues(t, None, rank)
}

func TestCache(t *testing.T) {
	var c Cache
	for i := range 3 * maxCached {
		piece := fmt.Append(nil, i)
		_, ok := c.Find(piece)
		require.False(t, ok, "%s has tokens before they were added", piece)
		c.Add(piece, []int32{int32(i), 1})
		tokens, ok := c.Find(piece)
		require.True(t, ok)
		require.Equal(t, []int32{int32(i), 1}, tokens)
	}

	require.LessOrEqual(t, len(c.spans), maxCached)
	long := make([]byte, maxCachedPiece+1)
	c.Add(long, []int32{1})
	_, ok := c.Find(long)
	require.False(t, ok)
}
