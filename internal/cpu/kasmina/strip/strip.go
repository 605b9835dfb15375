// Package strip provides the float32 kernels of a Kasmina layer. They work on a strip, which is a
// number of rows of up to Columns columns of a matrix. A vector holds neighboring columns, whatever
// chunks they belong to. Per-column data is stored as structs of arrays, with a layout that the
// assembly depends on.
package strip

import (
	"math"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Columns is the maximum number of columns of a strip.
const Columns = 256

// PassRows is the number of rows that pass through all kernels before the next ones do. They are few
// enough to stay in the first-level cache.
const PassRows = 2 * NormRows

// Figures summarize each column. Deviations are relative to the column's anchor, which is the same
// for all columns of a chunk. Sums are formed in float64, where neither squares nor sums of float32
// elements overflow. They are therefore finite if and only if all elements are; if not, all figures
// of the column are meaningless.
type Figures struct {
	Sum, Square       [Columns]float64 // of deviations, and of squared deviations
	Anchor, Low, High [Columns]float32
	Dead              [Columns]int32
}

// Rule determines the result of each column. The forward pass computes, with the Gate g and the
// neighbors to the left,
//
//	y = (On if x·g > 0, else Off)·x + Add + Near·x[−1] + Far·x[−2]
//
// and the backward pass, for the gradient v of y and with the neighbors to the right,
//
//	dx = (On if x·g > 0, else Off)·v + Near·v[+1] + Far·v[+2]
//
// Neighbors outside the column's chunk are masked out.
type Rule struct {
	On, Off, Gate, Add, Near, Far [Columns]float32
	HasNear, HasFar               [Columns]int32     // all bits set, or none
	Above                         [Columns]float32   // used by Sums
	LeftNear, LeftFar             [Columns]int32     // neighbors of the forward pass, used by Sums
	Form                          [Columns / 16]Form // one per 16 columns
	// Blends: some column is not the identity. Learns: some column needs sums.
	Blends, Learns bool
	_              [46]byte // padding to whole vectors
}

// Take adds f to the forms of n columns, starting with the given one.
func (r *Rule) Take(f Form, column, n int) {
	for i := column / 16; i <= (column+n-1)/16; i++ {
		r.Form[i] |= f
	}
}

// Form describes which parts of a Rule 16 columns use, so that kernels can skip the rest.
type Form uint8

// Forms.
const (
	Ruled     Form = 1 << iota // some columns are not the identity, or need sums
	Gated                      // On and Off differ in some columns
	Neighbors                  // some columns have neighbors
	Across                     // some neighbors are not among the 16 columns
)

// Sums are the sums over rows of g and of g·x, for elements with x·Gate > Above, and of g·x[−1] and
// g·x[−2].
type Sums struct{ All, Here, Near, Far [Columns]float32 }

// Norms describe the row norms of a strip's chunks: for each chunk, sums, in lanes, of the
// deviations of its row norms from an anchor and of their squares.
type Norms struct {
	Anchor      [Columns / 4]float64
	Sum, Square [Columns / 4][PassRows]float64
}

// State accumulates over the rows of a strip of a tile.
type State struct {
	Seen  Figures
	Sums  Sums
	Norms Norms
}

// kernels are the functions of this package with the vectors of an instruction set.
type kernels struct {
	inputFigures         func(f *Figures, pack, x *float32, rows, stride, columns int, eps float32)
	gradientFigures      func(f *Figures, pack, x *float32, rows, stride, columns int)
	blendForward         func(y, x *float32, rule *Rule, rows, stride, columns int) float32
	blendForwardStreamed func(y, x *float32, rule *Rule, rows, stride, columns int) float32
	blendBackward        func(dx, grad, x *float32, rule *Rule, ahead *float32,
		rows, stride, columns int)
	blendBackwardStreamed func(dx, grad, x *float32, rule *Rule, ahead *float32,
		rows, stride, columns int)
	blendSums  func(s *Sums, rule *Rule, grad, x *float32, rows, columns int)
	loadRows   func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)
	storeRows  func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)
	streamRows func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

	// blendLearn combines blendBackward and blendSums. It is nil if there are too few registers.
	blendLearn, blendLearnStreamed func(dx, grad, x *float32, rule *Rule, s *Sums, ahead *float32,
		rows, stride, columns int)

	// fusedForward combines inputFigures and blendForward, and fusedBackward combines
	// gradientFigures and blendLearn, for PassRows rows. They are nil if there are too few
	// registers. If vectors is not 0, chunks consist of that many vectors and fusedBackward also
	// does the work of chunkNorms; counter must then equal vectors.
	fusedForward, fusedForwardStreamed func(y, x *float32, rule *Rule, state *State,
		nextX *float32, ahead *Fetch, stride, columns int, eps float32)
	fusedBackward, fusedBackwardStreamed func(dx, grad, x *float32, rule *Rule, state *State,
		nextGrad, nextX *float32, ahead *Fetch, stride, columns, vectors, counter int)

	chunkNorms func(n *Norms, x *float32, groups, chunk, chunks, stride int)
	storeFence func() // orders writes past the caches before later accesses
}

// kernels32 are the kernels in use, or nil for plain Go.
var kernels32 *kernels

func init() { cpu.OnISA(func(l cpu.ISA) { kernels32 = kernelsFor(l) }) }

// View is a strip: Rows rows of Columns columns, starting at index At of a matrix with the given
// Stride.
type View struct {
	At, Rows, Stride, Columns int
	// From is the number of the first column within the tile, and Done the number of rows of the
	// tile above the strip.
	From, Done int
	Edges      bool // chunks extend into other strips
}

// Pack holds the rows of a strip that are being processed. In the matrix, rows are often a multiple
// of 4096 bytes apart: they would evict each other from the cache, and processors would mistake
// loads for reads of recent stores to other rows. On both sides of a row, there is room for
// neighbors that are masked out.
type Pack [PassRows*PackStride + PackRoom]float32

// Rows of a [Pack] start after PackRoom columns for neighbors and are PackStride apart.
const (
	PackRoom   = 16
	PackStride = Columns + PackRoom
)

// at returns the index of column i in row r.
func (p *Pack) at(r, i int) int { return PackRoom + r*PackStride + i }

// Load copies the strip s of x into the pack. If ahead is not 0, it also prefetches the memory that
// is ahead elements further into the second-level cache.
func (p *Pack) Load(x []float32, s View, ahead int) {
	if k := kernels32; k != nil {
		move := k.storeRows
		if ahead > 0 {
			move = k.loadRows
		}
		move(&p[PackRoom], &x[s.At], s.Rows, PackStride, s.Stride, s.Columns, 4*ahead)
		return
	}

	for r := range s.Rows {
		copy(p[p.at(r, 0):][:s.Columns], x[s.At+r*s.Stride:])
	}
}

// LoadEdges adds the neighbors, two on either side, that rows have in other strips of a tile with
// the given width.
func (p *Pack) LoadEdges(x []float32, s View, width int) {
	if !s.Edges {
		return
	}

	for r := range s.Rows {
		if left := p.at(r, 0); s.From > 0 {
			copy(p[left-2:left], x[s.At+r*s.Stride-2:])
		}
		if right := s.Columns; s.From+right < width {
			n := min(2, width-s.From-right)
			copy(p[p.at(r, right):][:n], x[s.At+r*s.Stride+right:])
		}
	}
}

// Store writes the pack to the strip s of y.
func (p *Pack) Store(y []float32, s View) {
	if k := kernels32; k != nil {
		move := k.storeRows
		if s.streams(y) {
			move = k.streamRows
		}
		move(&y[s.At], &p[PackRoom], s.Rows, s.Stride, PackStride, s.Columns, 0)
		return
	}

	for r := range s.Rows {
		copy(y[s.At+r*s.Stride:][:s.Columns], p[p.at(r, 0):])
	}
}

// Streamed is the minimum size, in elements, of results that are written past the caches. Most of
// such a result would be evicted from the caches before it is needed, and writing through them would
// first read the memory to be overwritten.
var Streamed = 1 << 21

// streams reports whether the strip of y is written past the caches, which requires aligned
// vectors.
func (s View) streams(y []float32) bool {
	return len(y) >= Streamed && s.Stride%16 == 0 && uintptr(unsafe.Pointer(&y[s.At]))%64 == 0
}

// negativeZero can be added to any number, including −0, without changing it.
var negativeZero = float32(math.Copysign(0, -1))

// Identity is the rule that doesn't change any column.
var Identity = func() (r Rule) {
	for i := range Columns {
		r.On[i], r.Off[i], r.Above[i] = 1, 1, -1
		r.Add[i], r.Near[i], r.Far[i] = negativeZero, negativeZero, negativeZero
	}
	return r
}()

// Fence makes streamed writes visible before later ones.
func Fence() {
	if kernels32 != nil {
		kernels32.storeFence()
	}
}

// noFigures are the figures of no elements, except for the anchors.
var noFigures = func() (f Figures) {
	for i := range Columns {
		f.Low[i], f.High[i] = math.MaxFloat32, -math.MaxFloat32
	}
	return f
}()

// Start resets f, except for the anchors, in the given number of columns.
func (f *Figures) Start(columns int) {
	clear(f.Sum[:columns])
	clear(f.Square[:columns])
	clear(f.Dead[:columns])
	copy(f.Low[:columns], noFigures.Low[:])
	copy(f.High[:columns], noFigures.High[:])
}

// AddInput adds the strip s of x, counting elements with a magnitude below eps as dead, and stores the
// strip in p.
func (f *Figures) AddInput(p *Pack, x []float32, s View, eps float32) {
	if k := kernels32; k != nil {
		k.inputFigures(f, &p[PackRoom], &x[s.At], s.Rows, s.Stride, s.Columns, eps)
		return
	}
	p.Load(x, s, 0)
	f.add(p, s, eps)
}

// AddGradient adds the strip s of g, and stores the strip in p.
func (f *Figures) AddGradient(p *Pack, g []float32, s View) {
	if k := kernels32; k != nil {
		k.gradientFigures(f, &p[PackRoom], &g[s.At], s.Rows, s.Stride, s.Columns)
		return
	}
	p.Load(g, s, 0)
	f.add(p, s, 0)
}

// add adds the strip in p.
func (f *Figures) add(p *Pack, s View, eps float32) {
	for r := range s.Rows {
		for i, v := range p[p.at(r, 0):][:s.Columns] {
			d := float64(v) - float64(f.Anchor[i])
			f.Sum[i] += d
			f.Square[i] += d * d
			if v < f.Low[i] {
				f.Low[i] = v
			}
			if v > f.High[i] {
				f.High[i] = v
			}
			if -eps < v && v < eps {
				f.Dead[i]++
			}
		}
	}
}

// factor returns On or Off for an element x of column i.
func (c *Rule) factor(i int, x float32) float32 {
	if x*c.Gate[i] <= 0 {
		return c.Off[i]
	}
	return c.On[i]
}

// Forward computes the strip s of y from x, and returns the largest |x| among those that are not
// NaN.
func (c *Rule) Forward(y []float32, x *Pack, s View) (top float32) {
	if k := kernels32; k != nil {
		blend := k.blendForward
		if s.streams(y) {
			blend = k.blendForwardStreamed
		}
		return blend(&y[s.At], &x[PackRoom], c, s.Rows, s.Stride, s.Columns)
	}

	for r := range s.Rows {
		for i := range s.Columns {
			at := x.at(r, i)
			v := x[at]
			e := c.factor(i, v)*v + c.Add[i]
			if c.HasNear[i] != 0 {
				e += c.Near[i] * x[at-1]
			}
			if c.HasFar[i] != 0 {
				e += c.Far[i] * x[at-2]
			}
			y[s.At+r*s.Stride+i] = e
			if v = max(v, -v); v > top {
				top = v
			}
		}
	}

	return top
}

// Backward computes the strip s of dx from g and x, which was packed from input. It prefetches the
// next rows of input into the second-level cache.
func (c *Rule) Backward(dx []float32, g, x *Pack, s View, input []float32) {
	if k := kernels32; k != nil {
		blend := k.blendBackward
		if s.streams(dx) {
			blend = k.blendBackwardStreamed
		}
		blend(&dx[s.At], &g[PackRoom], &x[PackRoom], c, s.ahead(input), s.Rows, s.Stride, s.Columns)
		return
	}

	for r := range s.Rows {
		for i := range s.Columns {
			at := x.at(r, i)
			e := c.factor(i, x[at]) * g[at]
			if c.HasNear[i] != 0 {
				e += c.Near[i] * g[at+1]
			}
			if c.HasFar[i] != 0 {
				e += c.Far[i] * g[at+2]
			}
			dx[s.At+r*s.Stride+i] = e
		}
	}
}

// Add adds the terms that rule c needs of g and x in the strip s.
func (t *Sums) Add(c *Rule, g, x *Pack, s View) {
	if k := kernels32; k != nil {
		k.blendSums(t, c, &g[PackRoom], &x[PackRoom], s.Rows, s.Columns)
		return
	}

	for r := range s.Rows {
		for i := range s.Columns {
			at := x.at(r, i)
			v, gi := x[at], g[at]
			if !(v*c.Gate[i] <= c.Above[i]) {
				t.All[i] += gi
				t.Here[i] += gi * v
			}
			if c.LeftNear[i] != 0 {
				t.Near[i] += gi * x[at-1]
			}
			if c.LeftFar[i] != 0 {
				t.Far[i] += gi * x[at-2]
			}
		}
	}
}

// Learn combines Backward and Add.
func (c *Rule) Learn(dx []float32, g, x *Pack, s View, input []float32, t *Sums) {
	k := kernels32
	if k == nil || k.blendLearn == nil {
		t.Add(c, g, x, s)
		c.Backward(dx, g, x, s, input)
		return
	}

	blend := k.blendLearn
	if s.streams(dx) {
		blend = k.blendLearnStreamed
	}

	blend(&dx[s.At], &g[PackRoom], &x[PackRoom], c, t, s.ahead(input), s.Rows, s.Stride, s.Columns)
}

// ahead returns the start of the next rows of x.
func (s View) ahead(x []float32) *float32 { return &x[min(s.At+PassRows*s.Stride, len(x)-1)] }

// Fetch describes the memory that a fused kernel prefetches into the second-level cache while it
// computes a strip: as many lines of the following rows as the strip has vectors, in the order of
// memory rather than of the strip, because processors recognize this order and prefetch more by
// themselves. Offsets are in bytes. A kernel prefetches PassRows lines at a time.
type Fetch struct {
	At        int // offset of the first lines in a matrix
	Left, Run int // number of prefetches until the end of the row, and in a full row
	Jump      int // offset from the end of a row to the next row
}

// Fuses reports whether kernels for MeasureForward and MeasureBackward exist. They are memory-bound
// and take no longer than kernels that compute no figures, so where they exist, skipping figures
// would save nothing.
func Fuses() bool { return kernels32 != nil && kernels32.fusedForward != nil }

// Fuses reports whether MeasureForward and MeasureBackward can compute the strip s.
func (s View) Fuses() bool { return Fuses() && s.Rows == PassRows }

// MeasureForward combines AddInput and Forward, without a pack.
func (c *Rule) MeasureForward(y, x []float32, s View, t *State, f *Fetch, eps float32) {
	pass := kernels32.fusedForward
	if s.streams(y) {
		pass = kernels32.fusedForwardStreamed
	}
	pass(&y[s.At], &x[s.At], c, t, &x[0], f, s.Stride, s.Columns, eps)
}

// MeasureBackward combines AddGradient and Learn, without packs. If vectors is not 0, chunks
// consist of that many vectors and norms are added too.
func (c *Rule) MeasureBackward(dx, g, x []float32, s View, t *State, f *Fetch, vectors int) {
	pass := kernels32.fusedBackward
	if s.streams(dx) {
		pass = kernels32.fusedBackwardStreamed
	}
	pass(&dx[s.At], &g[s.At], &x[s.At], c, t, &g[0], &x[0], f, s.Stride,
		s.Columns, vectors, vectors)
}

// NormRows is the number of rows that [Norms.Add] processes at once.
const NormRows = 4

// CanNorm reports whether [Norms.Add] supports chunks of c columns.
func CanNorm(c int) bool { return c%4 == 0 && c <= Columns }

// Add adds the row norms of chunks of c columns. Rows are stride elements apart; those beyond the
// last full group of NormRows are ignored.
func (n *Norms) Add(g []float32, stride, rows, c, chunks int) {
	if k := kernels32; k != nil {
		k.chunkNorms(n, &g[0], rows/NormRows, c, chunks, stride)
		return
	}

	for r := range rows / NormRows * NormRows {
		for i := range chunks {
			d := math.Sqrt(vec.SumSquares(g[r*stride+i*c:][:c])) - n.Anchor[i]
			n.Sum[i][r%NormRows] += d
			n.Square[i][r%NormRows] += d * d
		}
	}
}

// Moments returns the moments of the norms of chunk i over the given number of added rows.
func (n *Norms) Moments(i, rows int) figures.Moments {
	var sum, square float64
	for lane, d := range n.Sum[i] {
		sum += d
		square += n.Square[i][lane]
	}
	return figures.Shifted(n.Anchor[i], sum, square, rows)
}

// The assembly depends on these offsets.
var (
	_ = [1]int{}[unsafe.Offsetof(Figures{}.Dead)-7*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Rule{}.Form)-11*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(State{}.Sums)-8*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Sums{}.Far)-3*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(State{}.Norms)-12*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Norms{}.Square)-(8+64)*Columns/4]
)
