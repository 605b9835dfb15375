package chatdata

import (
	"cmp"
	"math/bits"
	"slices"
)

// Pack distributes items of the given lengths over rows of the given size, so that few rows are
// needed. Each row is a list of indices into lengths. Items longer than a row are left out.
//
// Pack uses the best-fit decreasing algorithm, which places the longest remaining item in the fullest
// row with room for it. Equal lengths give equal rows.
func Pack(lengths []int, size int) (rows [][]int) {
	order := make([]int, 0, len(lengths))
	for i, n := range lengths {
		if n <= size {
			order = append(order, i)
		}
	}

	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(lengths[b], lengths[a]) })

	// free[room] lists the rows with exactly room free places. Bit room of occupied is set if there
	// are any.
	free := make([][]int, size+1)
	occupied := make([]uint64, size/64+1)
	for _, item := range order {
		n := lengths[item]
		room := nextBit(occupied, n)
		row := len(rows)
		if room < 0 {
			room = size
			rows = append(rows, nil)
		} else {
			last := len(free[room]) - 1
			row = free[room][last]
			free[room] = free[room][:last]
			if last == 0 {
				occupied[room/64] &^= 1 << (room % 64)
			}
		}

		rows[row] = append(rows[row], item)
		room -= n
		free[room] = append(free[room], row)
		occupied[room/64] |= 1 << (room % 64)
	}

	return rows
}

// nextBit returns the index of the first set bit at or after from, or -1.
func nextBit(words []uint64, from int) int {
	i := from / 64
	if i >= len(words) {
		return -1
	}

	word := words[i] >> (from % 64) << (from % 64)
	for word == 0 {
		if i++; i == len(words) {
			return -1
		}
		word = words[i]
	}

	return 64*i + bits.TrailingZeros64(word)
}
