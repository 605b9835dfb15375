package kasmina

import (
	"math"
	"sort"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// The work is divided into tiles of whole chunks and at most tileRows rows, regardless of the number
// of cores. Sums are formed first within a tile (for gradients, in the element type) and then over a
// seed's tiles, in order.
//
// A tile consists of several strips. A band of rows is computed for all strips before the next
// band, so that much of each memory page is read at a time. The per-column data of a strip stays in
// the first-level cache while its part of a band is processed.
const (
	tileStrips   = 4
	bandRows     = 32
	tileElements = 1 << 18
	tileRows     = 256
)

// tile is rows [r0, r1) of seeds [s0, s1), with the working memory of a goroutine.
type tile[T cpu.Float] struct {
	packs [2]strip.Pack // first, to align the vectors in the strips' data
	state []strip.State
	fetch strip.Fetch

	block, r0, r1, s0, s1 int
	stride, columns       int // of the whole matrix; of the tile
	width                 int // width of the strips, except that the last may be narrower
	strips                int // number of strips
	first                 int // number of the first strip within a row of tiles
	active                []Seed[T]
	figures               []figures.Chunk // of the tile's seeds, over the tile's rows
	largest               float32         // largest magnitude except NaN, after all figures have been folded
	scratch               []T
}

// tile returns the maximum size of tiles.
func (k *Layer[T]) tile() (rows, seeds int) {
	seeds = min(k.Seeds, max(1, tileStrips*k.stripWidth()/k.Chunk))
	return min(k.Rows, max(1, min(tileRows, tileElements/(seeds*k.Chunk)))), seeds
}

// blocks returns the number of rows of tiles.
func (k *Layer[T]) blocks() int {
	rows, _ := k.tile()
	return (k.Rows + rows - 1) / rows
}

// groups returns the number of columns of tiles.
func (k *Layer[T]) groups() int {
	_, seeds := k.tile()
	return (k.Seeds + seeds - 1) / seeds
}

// stripWidth returns the width of strips, which consist of whole chunks if a chunk fits.
func (k *Layer[T]) stripWidth() int {
	if k.Chunk > strip.Columns {
		return strip.Columns
	}
	return strip.Columns / k.Chunk * k.Chunk
}

// strips returns the maximum number of strips of a tile.
func (k *Layer[T]) strips() int {
	_, seeds := k.tile()
	return (seeds*k.Chunk + k.stripWidth() - 1) / k.stripWidth()
}

// tileGrain returns the number of tiles worth handing to a goroutine.
func (k *Layer[T]) tileGrain() int {
	rows, seeds := k.tile()
	return max(1, tileElements/4/(rows*seeds*k.Chunk))
}

// takeTile returns the working memory of a goroutine, to be returned to k.memory.
func (k *Layer[T]) takeTile() *tile[T] {
	t, _ := k.memory.Get().(*tile[T])
	if t == nil {
		t = new(tile[T])
	}
	t.scratch, t.state = grow(t.scratch, k.needs), grow(t.state, k.strips())
	return t
}

// moveTo sets t to the i-th tile and resets its figures.
func (t *tile[T]) moveTo(k *Layer[T], i int) {
	rows, seeds := k.tile()
	groups := k.groups()
	block, group := i/groups, i%groups
	t.block, t.r0, t.r1 = block, block*rows, min(k.Rows, (block+1)*rows)
	t.s0, t.s1 = group*seeds, min(k.Seeds, (group+1)*seeds)
	t.stride, t.columns = k.Seeds*k.Chunk, (t.s1-t.s0)*k.Chunk
	t.width = k.stripWidth()
	t.strips, t.first = (t.columns+t.width-1)/t.width, group*k.strips()
	t.active = k.active(t.s0, t.s1)
	t.figures = k.partial[block*k.Seeds+t.s0 : block*k.Seeds+t.s1]
	none := figures.New(k.Reduce)
	for s := range t.figures {
		t.figures[s] = none
	}
}

// active returns the active seeds in [s0, s1).
func (k *Layer[T]) active(s0, s1 int) []Seed[T] {
	from := sort.Search(len(k.Active), func(i int) bool { return k.Active[i].Index >= s0 })
	n := sort.Search(len(k.Active)-from, func(i int) bool { return k.Active[from+i].Index >= s1 })
	return k.Active[from : from+n]
}

// strip returns the part of the i-th strip below the first top rows of the tile: strip.PassRows
// rows, or the remaining ones.
func (t *tile[T]) strip(k *Layer[T], i, top int) strip.View {
	j := i * t.width
	return strip.View{
		From: j, Columns: min(t.columns-j, t.width), At: (t.r0+top)*t.stride + t.s0*k.Chunk + j,
		Stride: t.stride,
		Done:   top, Rows: min(strip.PassRows, t.r1-t.r0-top), Edges: k.Chunk > t.width,
	}
}

// passes calls f for all parts of strip.PassRows rows, in the order of computation: s is a part of
// strip i.
func (t *tile[T]) passes(k *Layer[T], f func(i int, s strip.View)) {
	rows := t.r1 - t.r0
	for band := 0; band < rows; band += bandRows {
		for i := range t.strips {
			for top := band; top < min(band+bandRows, rows); top += strip.PassRows {
				f(i, t.strip(k, i, top))
			}
		}
	}
}

// measured reports whether any seed of the tile is measured.
func (t *tile[T]) measured(k *Layer[T]) bool {
	for _, m := range k.Measure[t.s0:t.s1] {
		if m {
			return true
		}
	}
	return false
}

// parts calls f for every seed with columns in s: n features starting with feature, in n columns of
// s starting with column.
func (t *tile[T]) parts(k *Layer[T], s strip.View, f func(seed, column, feature, n int)) {
	c := k.Chunk
	for j := 0; j < s.Columns; {
		seed, feature := (s.From+j)/c, (s.From+j)%c
		n := min(c-feature, s.Columns-j)
		f(t.s0+seed, j, feature, n)
		j += n
	}
}

// anchor returns the anchor of a seed in this tile of v.
func (t *tile[T]) anchor(k *Layer[T], v []T, seed int) float64 {
	return figures.Anchor(v[t.r0*t.stride+seed*k.Chunk])
}

// start resets the figures of a strip of v.
func (t *tile[T]) start(k *Layer[T], v []T, s strip.View, seen *strip.Figures) {
	seen.Start(s.Columns)
	t.parts(k, s, func(seed, column, _, n int) {
		anchor := float32(t.anchor(k, v, seed))
		for i := range seen.Anchor[column:][:n] {
			seen.Anchor[column+i] = anchor
		}
	})
}

// startAll resets the figures of all strips of v.
func (t *tile[T]) startAll(k *Layer[T], v []T) {
	t.largest = 0
	for i := range t.strips {
		t.start(k, v, t.strip(k, i, 0), &t.state[i].Seen)
	}
}

// foldAll adds the figures of all strips of v to the seeds' figures.
func (t *tile[T]) foldAll(k *Layer[T], v []T, eps float64) {
	for i := range t.strips {
		t.fold(k, v, t.strip(k, i, 0), &t.state[i].Seen, eps)
	}
}

// fold adds the figures of a strip of v to the figures of its seeds.
func (t *tile[T]) fold(k *Layer[T], v []T, s strip.View, seen *strip.Figures, eps float64) {
	t.parts(k, s, func(seed, column, feature, n int) {
		f := &t.figures[seed-t.s0]
		sums, squares, deads := seen.Sum[column:][:n], seen.Square[column:][:n],
			seen.Dead[column:][:n]
		lows, highs := seen.Low[column:][:n], seen.High[column:][:n]
		var sum, square float64
		var dead int32
		low, high := lows[0], highs[0]
		for i, d := range sums {
			sum += d
			square += squares[i]
			dead += deads[i]
			if l := lows[i]; l < low {
				low = l
			}
			if h := highs[i]; h > high {
				high = h
			}
		}

		t.largest = max(t.largest, -low, high)
		if sum-sum != 0 {
			t.scanRows(k, f, v, seed, feature, n, eps)
			return
		}

		if k.Measure[seed] {
			f.Moments.Merge(figures.Shifted(t.anchor(k, v, seed)-figures.Anchor(v[seed*k.Chunk]),
				sum, square, n*(t.r1-t.r0)))
			f.Min, f.Max = min(f.Min, float64(low)), max(f.Max, float64(high))
			f.Dead += int(dead)
		}
	})
}

// scanRows adds n features of a chunk to its figures, row by row, handling NaN and Inf.
func (t *tile[T]) scanRows(k *Layer[T], f *figures.Chunk, v []T, seed, feature, n int,
	eps float64) {
	for r := t.r0; r < t.r1; r++ {
		row := figures.Scan(v[r*t.stride+seed*k.Chunk+feature:][:n], eps)
		if k.Measure[seed] {
			f.AddRow(&row, figures.Anchor(v[seed*k.Chunk]))
		} else {
			f.Bad += row.Bad
		}
	}
}

// countBad counts NaN and Inf if nothing is measured.
func (t *tile[T]) countBad(k *Layer[T], v []T, s strip.View) {
	for r := range s.Rows {
		row := v[s.At+r*s.Stride:][:s.Columns]
		if vec.Finite(row) {
			continue
		}
		t.parts(k, s, func(seed, column, _, n int) {
			t.figures[seed-t.s0].Bad += figures.CountBad(row[column:][:n])
		})
	}
}

// rowNorm returns the norm of a seed's chunk in a row of g.
func (t *tile[T]) rowNorm(k *Layer[T], g []T, row, seed int) float64 {
	return math.Sqrt(vec.SumSquares(g[row*t.stride+seed*k.Chunk:][:k.Chunk]))
}

// norms returns the place where the norms of a seed are accumulated. Strips must consist of whole
// chunks.
func (t *tile[T]) norms(k *Layer[T], seed int) (n *strip.Norms, i int) {
	each := t.width / k.Chunk
	return &t.state[(seed-t.s0)/each].Norms, (seed - t.s0) % each
}

// startNorms resets the norms of the chunks of g.
func (t *tile[T]) startNorms(k *Layer[T], g []T) {
	for seed := t.s0; seed < t.s1; seed++ {
		n, i := t.norms(k, seed)
		n.Anchor[i] = t.rowNorm(k, g, t.r0, seed)
		n.Sum[i], n.Square[i] = [strip.PassRows]float64{}, [strip.PassRows]float64{}
	}
}

// foldNorms adds the row norms of g to the figures of the seeds. The strips have already
// accumulated the norms of the first rows rows.
func (t *tile[T]) foldNorms(k *Layer[T], g []T, rows int) {
	for seed := t.s0; seed < t.s1; seed++ {
		f := &t.figures[seed-t.s0]
		switch {
		case !k.Measure[seed]:
		case f.Bad > 0:
			for r := t.r0; r < t.r1; r++ {
				if row := figures.Scan(g[r*t.stride+seed*k.Chunk:][:k.Chunk],
					0); row.Moments.N > 0 {
					f.Norms.Add(figures.Norm(row.Absolute()))
				}
			}
		default:
			if rows > 0 {
				n, i := t.norms(k, seed)
				f.Norms.Merge(n.Moments(i, rows))
			}
			for r := t.r0 + rows; r < t.r1; r++ {
				f.Norms.Add(t.rowNorm(k, g, r, seed))
			}
		}
	}
}

// ahead returns the memory to prefetch while s is computed: the part that follows in the order of
// tile.passes, or s itself if that part belongs to another tile.
func ahead(t *tile[float32], s strip.View) strip.Fetch {
	const columns = strip.PassRows * 16 // in strip.PassRows lines
	at, done, rows := s.At, s.Done+strip.PassRows, t.r1-t.r0
	switch {
	case done%bandRows != 0 && done < rows:
		at += strip.PassRows * t.stride
	case s.From+s.Columns < t.columns:
		at += s.Columns - s.Done%bandRows*t.stride
	case done < rows:
		at += strip.PassRows*t.stride - s.From
	}

	run := (s.Columns + columns - 1) / columns
	return strip.Fetch{At: 4 * at, Left: run, Run: run, Jump: 4 * (t.stride - run*columns)}
}
