package cpu

import (
	"math"
	"sort"
)

// The work is cut into tiles of whole chunks and at most tileRows rows, whatever the number of cores. Sums are formed
// within a tile, in the element type where they are gradients, and then over the tiles of a seed in order.
const (
	tileColumns  = stripColumns
	tileElements = 1 << 16
	tileRows     = 256
)

// tile is rows r0 to r1 of seeds s0 to s1, with the memory of the goroutine that works on it.
type tile[T Float] struct {
	packs [2]pack // first, so that the vectors in what the strips use are aligned
	seen  columnFigures
	sums  columnSums
	norms stripNorms

	block, r0, r1, s0, s1 int
	stride, columns       int // of the whole matrix; of the tile
	strips                int // number of the tile's first strip among those of a row of tiles
	active                []KasminaSeed[T]
	figures               []ChunkFigures // of the seeds in these rows
	scratch               []T
}

// tile returns the size of tiles.
func (k *Kasmina[T]) tile() (rows, seeds int) {
	seeds = min(k.Seeds, max(1, tileColumns/k.Chunk))
	return min(k.Rows, max(1, min(tileRows, tileElements/(seeds*k.Chunk)))), seeds
}

// blocks returns how many tiles lie one below the other, and groups how many side by side.
func (k *Kasmina[T]) blocks() int {
	rows, _ := k.tile()
	return (k.Rows + rows - 1) / rows
}

func (k *Kasmina[T]) groups() int {
	_, seeds := k.tile()
	return (k.Seeds + seeds - 1) / seeds
}

// strips returns how many strips a tile has. All but the last are as wide as can be.
func (k *Kasmina[T]) strips() int {
	_, seeds := k.tile()
	return (seeds*k.Chunk + stripColumns - 1) / stripColumns
}

// tileGrain returns how many tiles are worth handing to a goroutine.
func (k *Kasmina[T]) tileGrain() int {
	rows, seeds := k.tile()
	return max(1, tileElements/4/(rows*seeds*k.Chunk))
}

// takeTile returns memory for a goroutine's tiles, to be put back into k.memory.
func (k *Kasmina[T]) takeTile() *tile[T] {
	t, _ := k.memory.Get().(*tile[T])
	if t == nil {
		t = new(tile[T])
	}
	t.scratch = grow(t.scratch, k.needs)
	return t
}

// moveTo makes t the i-th tile, with figures of nothing.
func (t *tile[T]) moveTo(k *Kasmina[T], i int) {
	rows, seeds := k.tile()
	groups := k.groups()
	block, group := i/groups, i%groups
	t.block, t.r0, t.r1 = block, block*rows, min(k.Rows, (block+1)*rows)
	t.s0, t.s1 = group*seeds, min(k.Seeds, (group+1)*seeds)
	t.stride, t.columns = k.Seeds*k.Chunk, (t.s1-t.s0)*k.Chunk
	t.strips = group * k.strips()
	t.active = k.active(t.s0, t.s1)
	t.figures = k.partial[block*k.Seeds+t.s0 : block*k.Seeds+t.s1]
	for s := range t.figures {
		t.figures[s] = newFigures(k.Reduce)
	}
}

// active returns the active seeds in [s0, s1).
func (k *Kasmina[T]) active(s0, s1 int) []KasminaSeed[T] {
	from := sort.Search(len(k.Active), func(i int) bool { return k.Active[i].Seed >= s0 })
	n := sort.Search(len(k.Active)-from, func(i int) bool { return k.Active[from+i].Seed >= s1 })
	return k.Active[from : from+n]
}

// passRows is how many rows go through all kernels before the next ones do: few enough to stay in the first cache.
const passRows = 2 * normRows

// strip returns the strip that begins at column j of the tile, above its first rows.
func (t *tile[T]) strip(k *Kasmina[T], j int) strip {
	return strip{from: j, columns: min(t.columns-j, stripColumns), at: t.r0*t.stride + t.s0*k.Chunk + j, stride: t.stride}
}

// advance moves s down to the next rows of the tile, and reports whether there are any.
func (t *tile[T]) advance(s *strip) bool {
	s.at += s.rows * s.stride
	s.done += s.rows
	s.rows = min(passRows, t.r1-t.r0-s.done)
	return s.rows > 0
}

// measured reports whether some seed of the tile is.
func (t *tile[T]) measured(k *Kasmina[T]) bool {
	for _, m := range k.Measure[t.s0:t.s1] {
		if m {
			return true
		}
	}
	return false
}

// parts calls f for every seed with columns in s: n features from the given one on, in n columns of s from the given one on.
func (t *tile[T]) parts(k *Kasmina[T], s strip, f func(seed, column, feature, n int)) {
	c := k.Chunk
	for j := 0; j < s.columns; {
		seed, feature := (s.from+j)/c, (s.from+j)%c
		n := min(c-feature, s.columns-j)
		f(t.s0+seed, j, feature, n)
		j += n
	}
}

// anchor returns that of a seed in this tile of v.
func (t *tile[T]) anchor(k *Kasmina[T], v []T, seed int) float64 {
	return anchorOf(v[t.r0*t.stride+seed*k.Chunk])
}

// start readies the figures of a strip of v.
func (t *tile[T]) start(k *Kasmina[T], v []T, s strip) {
	t.seen.start(s.columns)
	t.parts(k, s, func(seed, column, _, n int) {
		anchor := float32(t.anchor(k, v, seed))
		for i := range t.seen.anchor[column:][:n] {
			t.seen.anchor[column+i] = anchor
		}
	})
}

// fold adds the figures of a strip of v to those of its seeds.
func (t *tile[T]) fold(k *Kasmina[T], v []T, s strip, eps float64) {
	t.parts(k, s, func(seed, column, feature, n int) {
		f := &t.figures[seed-t.s0]
		var sum, square float64
		var dead int32
		low, high := t.seen.low[column], t.seen.high[column]
		for i := column; i < column+n; i++ {
			sum += t.seen.sum[i]
			square += t.seen.square[i]
			dead += t.seen.dead[i]
			if l := t.seen.low[i]; l < low {
				low = l
			}
			if h := t.seen.high[i]; h > high {
				high = h
			}
		}
		if sum-sum != 0 {
			t.scanRows(k, f, v, seed, feature, n, eps)
			return
		}
		if k.Measure[seed] {
			f.Moments.Merge(shifted(t.anchor(k, v, seed)-anchorOf(v[seed*k.Chunk]), sum, square, n*(t.r1-t.r0)))
			f.Min, f.Max = min(f.Min, float64(low)), max(f.Max, float64(high))
			f.Dead += int(dead)
		}
	})
}

// scanRows adds n features of a chunk to its figures, NaN and Inf among them.
func (t *tile[T]) scanRows(k *Kasmina[T], f *ChunkFigures, v []T, seed, feature, n int, eps float64) {
	for r := t.r0; r < t.r1; r++ {
		row := scan(v[r*t.stride+seed*k.Chunk+feature:][:n], eps)
		if k.Measure[seed] {
			f.addRow(&row, anchorOf(v[seed*k.Chunk]))
		} else {
			f.Bad += row.bad
		}
	}
}

// countBad counts NaN and Inf where nothing is measured.
func (t *tile[T]) countBad(k *Kasmina[T], v []T, s strip) {
	for r := range s.rows {
		row := v[s.at+r*s.stride:][:s.columns]
		if finite(row) {
			continue
		}
		t.parts(k, s, func(seed, column, _, n int) { t.figures[seed-t.s0].Bad += countBad(row[column:][:n]) })
	}
}

// rowNorm returns the norm of n features of a seed in a row of g.
func (t *tile[T]) rowNorm(k *Kasmina[T], g []T, row, seed int) float64 {
	return math.Sqrt(squares(g[row*t.stride+seed*k.Chunk:][:k.Chunk]))
}

// startNorms readies the norms of a strip of g.
func (t *tile[T]) startNorms(k *Kasmina[T], g []T) {
	for i := range t.s1 - t.s0 {
		t.norms.anchor[i] = t.rowNorm(k, g, t.r0, t.s0+i)
		t.norms.sum[i], t.norms.square[i] = [normRows]float64{}, [normRows]float64{}
	}
}

// foldNorms adds the norms of the rows of g to the figures of the seeds. Those of the first rows are in t.norms.
func (t *tile[T]) foldNorms(k *Kasmina[T], g []T, rows int) {
	for seed := t.s0; seed < t.s1; seed++ {
		f := &t.figures[seed-t.s0]
		switch {
		case !k.Measure[seed]:
		case f.Bad > 0:
			for r := t.r0; r < t.r1; r++ {
				if row := scan(g[r*t.stride+seed*k.Chunk:][:k.Chunk], 0); row.m.N > 0 {
					f.Norms.Add(norm(row.absolute()))
				}
			}
		default:
			if rows > 0 {
				f.Norms.Merge(t.norms.moments(seed-t.s0, rows))
			}
			for r := t.r0 + rows; r < t.r1; r++ {
				f.Norms.Add(t.rowNorm(k, g, r, seed))
			}
		}
	}
}
