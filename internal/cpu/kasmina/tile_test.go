package kasmina

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
)

// TestTiles checks that every element belongs to one tile, that tiles are aligned to multiples of
// their size, and that none is too large.
func TestTiles(t *testing.T) {
	for _, k := range []*Layer[float32]{
		{Rows: 1, Seeds: 1, Chunk: 1}, {Rows: 1000, Seeds: 1, Chunk: 3},
		{Rows: 70, Seeds: 3000, Chunk: 2}, {Rows: 300, Seeds: 2, Chunk: 5000},
	} {
		seen := make([]int, k.Rows*k.Seeds)
		rows, seeds := k.tile()
		k.partial = make([]figures.Chunk, k.blocks()*k.Seeds)
		tl := k.takeTile()
		for i := range k.blocks() * k.groups() {
			tl.moveTo(k, i)
			if tl.r0 != tl.block*rows || tl.s0%seeds != 0 || tl.r1-tl.r0 > tileRows ||
				tl.columns > max(tileStrips*strip.Columns, k.Chunk) {
				t.Errorf("tile of rows %d to %d and seeds %d to %d in block %d", tl.r0, tl.r1,
					tl.s0, tl.s1, tl.block)
			}
			for r := tl.r0; r < tl.r1; r++ {
				for s := tl.s0; s < tl.s1; s++ {
					seen[r*k.Seeds+s]++
				}
			}
		}

		for i, n := range seen {
			if n != 1 {
				t.Fatalf("%d rows of %d seeds: chunk %d is in %d tiles", k.Rows, k.Seeds, i, n)
			}
		}
	}
}
