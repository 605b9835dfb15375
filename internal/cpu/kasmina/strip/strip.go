// Package strip has the float32 kernels of a Kasmina layer. They work on a strip: some rows of up
// to Columns columns of a matrix. A vector holds neighbouring columns, whatever chunks they belong
// to. What belongs to a column is in structs of arrays, whose layout the assembly knows.
package strip

import (
	"math"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Columns is the most columns of a strip.
const Columns = 256

// PassRows is how many rows go through all kernels before the next ones do: few enough to stay in
// the first cache.
const PassRows = 2 * NormRows

// Figures sum up what has been seen of each column. Deviations are from the column's anchor, which
// is the same for the columns of a chunk. Sums are formed in float64, in which neither squares nor
// sums of float32 elements overflow, so that they are finite exactly where all elements are.
// Elsewhere nothing in a column has a meaning.
type Figures struct {
	Sum, Square       [Columns]float64 // of deviations, and of their squares
	Anchor, Low, High [Columns]float32
	Dead              [Columns]int32
}

// Rule says what becomes of each column. Forward, with the Gate g and the neighbours to the left,
//
//	y = (On if x·g > 0, else Off)·x + Add + Near·x[−1] + Far·x[−2]
//
// and backward, for the gradient v of y, with the neighbours to the right,
//
//	dx = (On if x·g > 0, else Off)·v + Near·v[+1] + Far·v[+2]
//
// Neighbours that are not of the column's chunk are masked out and never read.
type Rule struct {
	On, Off, Gate, Add, Near, Far [Columns]float32
	HasNear, HasFar               [Columns]int32     // all bits set, or none
	Above                         [Columns]float32   // for Sums
	LeftNear, LeftFar             [Columns]int32     // those of the forward pass, for Sums
	Form                          [Columns / 16]Form // of 16 columns each
	// some column is not the identity; some column has sums
	Blends, Learns bool
	_              [46]byte // to whole vectors
}

// Take adds f to the forms of n columns from the given one on.
func (r *Rule) Take(f Form, column, n int) {
	for i := column / 16; i <= (column+n-1)/16; i++ {
		r.Form[i] |= f
	}
}

// Form says how much of a Rule its columns take, so that they can be spared the rest.
type Form uint8

// The forms.
const (
	Ruled  Form = 1 << iota // some column is not the identity, or has sums
	Gated                   // of some, On and Off differ
	Beside                  // some have neighbours
	Across                  // and these are not all among the 16 columns
)

// Sums are sums over rows of g·1 and g·x, where x·Gate > Above, and of g·x[−1] and g·x[−2].
type Sums struct{ All, Here, Near, Far [Columns]float32 }

// Norms are those of a strip's chunks. For each they are the sums, in lanes, of the deviations of
// its rows' norms from an anchor, and of their squares.
type Norms struct {
	Anchor      [Columns / 4]float64
	Sum, Square [Columns / 4][PassRows]float64
}

// State is what is summed up over the rows of a strip of a tile.
type State struct {
	Seen  Figures
	Sums  Sums
	Norms Norms
}

// kernels are these functions in the vectors of an instruction set.
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

	// blendBackward and blendSums in one, where there are registers enough; else nil.
	blendLearn, blendLearnStreamed func(dx, grad, x *float32, rule *Rule, s *Sums, ahead *float32,
		rows, stride, columns int)

	// inputFigures and blendForward in one, and gradientFigures and blendLearn, for PassRows rows;
	// nil where registers are few. With chunks of vectors vectors, unless that is 0, backward also
	// does what chunkNorms does. It counts them in counter, which is as many.
	fusedForward, fusedForwardStreamed func(y, x *float32, rule *Rule, state *State,
		nextX *float32, ahead *Fetch, stride, columns int, eps float32)
	fusedBackward, fusedBackwardStreamed func(dx, grad, x *float32, rule *Rule, state *State,
		nextGrad, nextX *float32, ahead *Fetch, stride, columns, vectors, counter int)

	chunkNorms func(n *Norms, x *float32, groups, chunk, chunks, stride int)
	storeFence func() // after what is written past the caches, before anybody may read it
}

// kernels32 are the kernels in use, nil where plain Go is.
var kernels32 *kernels

func init() { cpu.OnISA(func(l cpu.ISA) { kernels32 = kernelsFor(l) }) }

// View is Rows rows of Columns columns that begin at index At of a matrix with the given Stride.
type View struct {
	At, Rows, Stride, Columns int
	// the first one's number among the tile's columns; rows of the tile above it
	From, Done int
	Edges      bool // chunks go on in other strips
}

// Pack holds the rows of a strip that are at work. In the matrix they are often a multiple of 4096
// bytes apart, and would drive each other out of the cache. Processors also take a load for one of
// what was just stored at the same place of another such row. There is room on either side of a row
// for neighbours that are masked out.
type Pack [PassRows*PackStride + PackRoom]float32

// The rows of a [Pack] begin with PackRoom columns of neighbours and are PackStride apart.
const (
	PackRoom   = 16
	PackStride = Columns + PackRoom
)

// at returns the index of column i of row r.
func (p *Pack) at(r, i int) int { return PackRoom + r*PackStride + i }

// Load fills the pack with the strip s of x. It brings what lies ahead elements ahead, if that is
// not 0, into the second cache.
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

// LoadEdges adds the neighbours, two on either side, that rows have in other strips of a tile of
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

// Streamed is the size, in elements, from which on a result is written past the caches. Most of it
// would not be there any more when it is needed, and they would first read what it overwrites.
var Streamed = 1 << 21

// streams reports whether the strip of y is written past the caches. Vectors must be aligned then.
func (s View) streams(y []float32) bool {
	return len(y) >= Streamed && s.Stride%16 == 0 && uintptr(unsafe.Pointer(&y[s.At]))%64 == 0
}

// negativeZero is what can be added to any number, −0 included, without changing it.
var negativeZero = float32(math.Copysign(0, -1))

// Identity leaves columns as they are.
var Identity = func() (r Rule) {
	for i := range Columns {
		r.On[i], r.Off[i], r.Above[i] = 1, 1, -1
		r.Add[i], r.Near[i], r.Far[i] = negativeZero, negativeZero, negativeZero
	}
	return r
}()

// Fence makes what has been streamed visible before what is written later.
func Fence() {
	if kernels32 != nil {
		kernels32.storeFence()
	}
}

// noFigures are the figures of nothing, but for the anchors.
var noFigures = func() (f Figures) {
	for i := range Columns {
		f.Low[i], f.High[i] = math.MaxFloat32, -math.MaxFloat32
	}
	return f
}()

// Start makes f the figures of nothing, in columns columns.
func (f *Figures) Start(columns int) {
	clear(f.Sum[:columns])
	clear(f.Square[:columns])
	clear(f.Dead[:columns])
	copy(f.Low[:columns], noFigures.Low[:])
	copy(f.High[:columns], noFigures.High[:])
}

// AddInput adds the strip s of x, and which elements are smaller than eps. It leaves the strip in
// p.
func (f *Figures) AddInput(p *Pack, x []float32, s View, eps float32) {
	if k := kernels32; k != nil {
		k.inputFigures(f, &p[PackRoom], &x[s.At], s.Rows, s.Stride, s.Columns, eps)
		return
	}
	p.Load(x, s, 0)
	f.add(p, s, eps)
}

// AddGradient adds the strip s of g. It leaves the strip in p.
func (f *Figures) AddGradient(p *Pack, g []float32, s View) {
	if k := kernels32; k != nil {
		k.gradientFigures(f, &p[PackRoom], &g[s.At], s.Rows, s.Stride, s.Columns)
		return
	}
	p.Load(g, s, 0)
	f.add(p, s, 0)
}

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

// factor returns on or off for an element x of column i.
func (c *Rule) factor(i int, x float32) float32 {
	if x*c.Gate[i] <= 0 {
		return c.Off[i]
	}
	return c.On[i]
}

// Forward computes the strip s of y from x, and returns the largest |x| of those that are no NaN.
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

// Backward computes the strip s of dx from g and x, which is packed from input. It brings the next
// rows of that into the second cache.
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

// Add adds what a rule needs of g and x in the strip s.
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

// Learn is Backward and Add.
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

// ahead is where the next rows of x begin.
func (s View) ahead(x []float32) *float32 { return &x[min(s.At+PassRows*s.Stride, len(x)-1)] }

// Fetch says what a fused kernel brings into the second cache while it computes a strip. It brings
// as many lines of the rows that come next as the strip has vectors. They come in the order in
// which they are in memory, and not in that of the strip. Processors follow that order and fetch
// more by themselves. Offsets are in bytes, and a kernel fetches PassRows lines at a time.
type Fetch struct {
	At        int // offset of the first lines in a matrix
	Left, Run int // how often it fetches until the end of the row, and in a row
	Jump      int // offset of the next row from the end of one
}

// Fuses reports whether there are kernels for MeasureForward and MeasureBackward. They take no
// longer than those that form no figures, for all of them wait for memory. Where these are, nothing
// is gained by not measuring.
func Fuses() bool { return kernels32 != nil && kernels32.fusedForward != nil }

// Fuses reports whether MeasureForward and MeasureBackward compute the strip s.
func (s View) Fuses() bool { return Fuses() && s.Rows == PassRows }

// MeasureForward is AddInput and Forward in one, without a pack.
func (c *Rule) MeasureForward(y, x []float32, s View, t *State, f *Fetch, eps float32) {
	pass := kernels32.fusedForward
	if s.streams(y) {
		pass = kernels32.fusedForwardStreamed
	}
	pass(&y[s.At], &x[s.At], c, t, &x[0], f, s.Stride, s.Columns, eps)
}

// MeasureBackward is AddGradient and Learn in one, without packs. With chunks of vectors vectors,
// if that is not 0, it also adds norms.
func (c *Rule) MeasureBackward(dx, g, x []float32, s View, t *State, f *Fetch, vectors int) {
	pass := kernels32.fusedBackward
	if s.streams(dx) {
		pass = kernels32.fusedBackwardStreamed
	}
	pass(&dx[s.At], &g[s.At], &x[s.At], c, t, &g[0], &x[0], f, s.Stride,
		s.Columns, vectors, vectors)
}

// NormRows is how many rows [Norms.Add] takes at once.
const NormRows = 4

// CanNorm reports whether [Norms.Add] computes norms of chunks of c columns.
func CanNorm(c int) bool { return c%4 == 0 && c <= Columns }

// Add adds the norms of rows, which are stride elements apart, of chunks of c columns. Of rows rows
// those that are no group of NormRows are left out.
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

// Moments returns those of the norms of rows rows that Add has seen of chunk i.
func (n *Norms) Moments(i, rows int) figures.Moments {
	var sum, square float64
	for lane, d := range n.Sum[i] {
		sum += d
		square += n.Square[i][lane]
	}
	return figures.Shifted(n.Anchor[i], sum, square, rows)
}

// The assembly relies on these.
var (
	_ = [1]int{}[unsafe.Offsetof(Figures{}.Dead)-7*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Rule{}.Form)-11*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(State{}.Sums)-8*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Sums{}.Far)-3*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(State{}.Norms)-12*4*Columns]
	_ = [1]int{}[unsafe.Offsetof(Norms{}.Square)-(8+64)*Columns/4]
)
