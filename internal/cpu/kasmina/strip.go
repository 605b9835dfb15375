package kasmina

import (
	"math"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// The kernels in this file work on a strip: some rows of up to stripColumns columns of a float32 matrix. A vector holds
// neighbouring columns, whatever chunks they belong to, and what belongs to a column is in structs of arrays, whose layout the
// assembly knows.

const stripColumns = 256

// columnFigures sum up what has been seen of each column. Deviations are from the column's anchor, which is the same for the
// columns of a chunk. Sums are formed in float64, in which neither squares nor sums of float32 elements overflow, so that
// they are finite exactly where all elements are. Elsewhere nothing in a column has a meaning.
type columnFigures struct {
	sum, square       [stripColumns]float64 // of deviations, and of their squares
	anchor, low, high [stripColumns]float32
	dead              [stripColumns]int32
}

// columnRule says what becomes of each column. Forward, with the gate g and the neighbours to the left,
//
//	y = (on if x·g > 0, else off)·x + add + near·x[−1] + far·x[−2]
//
// and backward, for the gradient v of y, with the neighbours to the right,
//
//	dx = (on if x·g > 0, else off)·v + near·v[+1] + far·v[+2]
//
// Neighbours that are not of the column's chunk are masked out and never read.
type columnRule struct {
	on, off, gate, add, near, far [stripColumns]float32
	hasNear, hasFar               [stripColumns]int32           // all bits set, or none
	above                         [stripColumns]float32         // for columnSums
	leftNear, leftFar             [stripColumns]int32           // those of the forward pass, for columnSums
	form                          [stripColumns / 16]columnForm // of 16 columns each
	blends, learns                bool                          // some column is not the identity; some column has sums
	_                             [46]byte                      // to whole vectors
}

// columnForm says how much of a columnRule its columns take, so that they can be spared the rest.
type columnForm uint8

const (
	ruledForm  columnForm = 1 << iota // some column is not the identity, or has sums
	gatedForm                         // of some, on and off differ
	besideForm                        // some have neighbours
	acrossForm                        // and these are not all among the 16 columns
)

// columnSums are sums over rows of g·1 and g·x, where x·gate > above, and of g·x[−1] and g·x[−2].
type columnSums struct{ all, here, near, far [stripColumns]float32 }

// The norms of a strip's chunks: for each the sums of the deviations of its rows' norms from an anchor and of their squares,
// in lanes.
type stripNorms struct {
	anchor      [stripColumns / 4]float64
	sum, square [stripColumns / 4][passRows]float64
}

// stripKernels are these functions in the vectors of an instruction set.
type stripKernels struct {
	inputFigures          func(f *columnFigures, pack, x *float32, rows, stride, columns int, eps float32)
	gradientFigures       func(f *columnFigures, pack, x *float32, rows, stride, columns int)
	blendForward          func(y, x *float32, rule *columnRule, rows, stride, columns int) float32
	blendForwardStreamed  func(y, x *float32, rule *columnRule, rows, stride, columns int) float32
	blendBackward         func(dx, grad, x *float32, rule *columnRule, ahead *float32, rows, stride, columns int)
	blendBackwardStreamed func(dx, grad, x *float32, rule *columnRule, ahead *float32, rows, stride, columns int)
	blendSums             func(s *columnSums, rule *columnRule, grad, x *float32, rows, columns int)
	loadRows              func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)
	storeRows             func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)
	streamRows            func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)

	// blendBackward and blendSums in one, where there are registers enough; else nil.
	blendLearn, blendLearnStreamed func(dx, grad, x *float32, rule *columnRule, s *columnSums, ahead *float32, rows, stride, columns int)

	// inputFigures and blendForward in one, and gradientFigures and blendLearn, for passRows rows; nil where registers are few.
	// With chunks of vectors vectors, unless that is 0, backward also does what chunkNorms does. It counts them in counter, which
	// is as many.
	fusedForward, fusedForwardStreamed   func(y, x *float32, rule *columnRule, state *stripState, nextX *float32, ahead *fetch, stride, columns int, eps float32)
	fusedBackward, fusedBackwardStreamed func(dx, grad, x *float32, rule *columnRule, state *stripState, nextGrad, nextX *float32, ahead *fetch, stride, columns, vectors, counter int)

	chunkNorms func(n *stripNorms, x *float32, groups, chunk, chunks, stride int)
	storeFence func() // after what is written past the caches, before anybody may read it
}

// strips32 are the kernels in use, nil where plain Go is.
var strips32 *stripKernels

func init() { cpu.OnISA(func() { strips32 = fastStrips() }) }

// strip is rows rows of columns columns that begin at index at of a matrix with the given stride.
type strip struct {
	at, rows, stride, columns int
	from, done                int  // the first one's number among the tile's columns; rows of the tile above it
	edges                     bool // chunks go on in other strips
}

// pack holds the rows of a strip that are at work. In the matrix they are often a multiple of 4096 bytes apart: there they
// would drive each other out of the cache, and processors take a load for one of what was just stored at the same place of
// another such row. There is room on either side of a row for neighbours that are masked out.
type pack [passRows*packStride + packRoom]float32

const (
	packRoom   = 16
	packStride = stripColumns + packRoom
)

// at returns the index of column i of row r.
func (p *pack) at(r, i int) int { return packRoom + r*packStride + i }

// load fills the pack with the strip s of x. It brings what lies ahead elements ahead, if that is not 0, into the second cache.
func (p *pack) load(x []float32, s strip, ahead int) {
	if k := strips32; k != nil {
		move := k.storeRows
		if ahead > 0 {
			move = k.loadRows
		}
		move(&p[packRoom], &x[s.at], s.rows, packStride, s.stride, s.columns, 4*ahead)
		return
	}
	for r := range s.rows {
		copy(p[p.at(r, 0):][:s.columns], x[s.at+r*s.stride:])
	}
}

// loadEdges adds the neighbours, two on either side, that rows have in other strips of a tile of the given width.
func (p *pack) loadEdges(x []float32, s strip, width int) {
	if !s.edges {
		return
	}
	for r := range s.rows {
		if left := p.at(r, 0); s.from > 0 {
			copy(p[left-2:left], x[s.at+r*s.stride-2:])
		}
		if right := s.columns; s.from+right < width {
			n := min(2, width-s.from-right)
			copy(p[p.at(r, right):][:n], x[s.at+r*s.stride+right:])
		}
	}
}

// store writes the pack to the strip s of y.
func (p *pack) store(y []float32, s strip) {
	if k := strips32; k != nil {
		move := k.storeRows
		if s.streams(y) {
			move = k.streamRows
		}
		move(&y[s.at], &p[packRoom], s.rows, s.stride, packStride, s.columns, 0)
		return
	}
	for r := range s.rows {
		copy(y[s.at+r*s.stride:][:s.columns], p[p.at(r, 0):])
	}
}

// streamed is the size, in elements, from which on a result is written past the caches: most of it would not be there any
// more when it is needed, and they would first read what it overwrites.
var streamed = 1 << 21

// streams reports whether the strip of y is written past the caches. Vectors must be aligned then.
func (s strip) streams(y []float32) bool {
	return len(y) >= streamed && s.stride%16 == 0 && uintptr(unsafe.Pointer(&y[s.at]))%64 == 0
}

// negativeZero is what can be added to any number, −0 included, without changing it.
var negativeZero = float32(math.Copysign(0, -1))

// identityRule leaves columns as they are.
var identityRule = func() (r columnRule) {
	for i := range stripColumns {
		r.on[i], r.off[i], r.above[i] = 1, 1, -1
		r.add[i], r.near[i], r.far[i] = negativeZero, negativeZero, negativeZero
	}
	return r
}()

// fence makes what has been streamed visible before what is written later.
func fence() {
	if strips32 != nil {
		strips32.storeFence()
	}
}

// noFigures are the figures of nothing, but for the anchors.
var noFigures = func() (f columnFigures) {
	for i := range stripColumns {
		f.low[i], f.high[i] = math.MaxFloat32, -math.MaxFloat32
	}
	return f
}()

// start makes f the figures of nothing, in columns columns.
func (f *columnFigures) start(columns int) {
	clear(f.sum[:columns])
	clear(f.square[:columns])
	clear(f.dead[:columns])
	copy(f.low[:columns], noFigures.low[:])
	copy(f.high[:columns], noFigures.high[:])
}

// addInput adds the strip s of x, and which elements are smaller than eps. It leaves the strip in p.
func (f *columnFigures) addInput(p *pack, x []float32, s strip, eps float32) {
	if k := strips32; k != nil {
		k.inputFigures(f, &p[packRoom], &x[s.at], s.rows, s.stride, s.columns, eps)
		return
	}
	p.load(x, s, 0)
	f.add(p, s, eps)
}

// addGradient adds the strip s of g. It leaves the strip in p.
func (f *columnFigures) addGradient(p *pack, g []float32, s strip) {
	if k := strips32; k != nil {
		k.gradientFigures(f, &p[packRoom], &g[s.at], s.rows, s.stride, s.columns)
		return
	}
	p.load(g, s, 0)
	f.add(p, s, 0)
}

func (f *columnFigures) add(p *pack, s strip, eps float32) {
	for r := range s.rows {
		for i, v := range p[p.at(r, 0):][:s.columns] {
			d := float64(v) - float64(f.anchor[i])
			f.sum[i] += d
			f.square[i] += d * d
			if v < f.low[i] {
				f.low[i] = v
			}
			if v > f.high[i] {
				f.high[i] = v
			}
			if -eps < v && v < eps {
				f.dead[i]++
			}
		}
	}
}

// factor returns on or off for an element x of column i.
func (c *columnRule) factor(i int, x float32) float32 {
	if x*c.gate[i] <= 0 {
		return c.off[i]
	}
	return c.on[i]
}

// forward computes the strip s of y from x, and returns the largest |x| of those that are no NaN.
func (c *columnRule) forward(y []float32, x *pack, s strip) (top float32) {
	if k := strips32; k != nil {
		blend := k.blendForward
		if s.streams(y) {
			blend = k.blendForwardStreamed
		}
		return blend(&y[s.at], &x[packRoom], c, s.rows, s.stride, s.columns)
	}
	for r := range s.rows {
		for i := range s.columns {
			at := x.at(r, i)
			v := x[at]
			e := c.factor(i, v)*v + c.add[i]
			if c.hasNear[i] != 0 {
				e += c.near[i] * x[at-1]
			}
			if c.hasFar[i] != 0 {
				e += c.far[i] * x[at-2]
			}
			y[s.at+r*s.stride+i] = e
			if v = max(v, -v); v > top {
				top = v
			}
		}
	}
	return top
}

// backward computes the strip s of dx from g and x, which is packed from input. It brings the next rows of that into the second
// cache.
func (c *columnRule) backward(dx []float32, g, x *pack, s strip, input []float32) {
	if k := strips32; k != nil {
		blend := k.blendBackward
		if s.streams(dx) {
			blend = k.blendBackwardStreamed
		}
		blend(&dx[s.at], &g[packRoom], &x[packRoom], c, s.ahead(input), s.rows, s.stride, s.columns)
		return
	}
	for r := range s.rows {
		for i := range s.columns {
			at := x.at(r, i)
			e := c.factor(i, x[at]) * g[at]
			if c.hasNear[i] != 0 {
				e += c.near[i] * g[at+1]
			}
			if c.hasFar[i] != 0 {
				e += c.far[i] * g[at+2]
			}
			dx[s.at+r*s.stride+i] = e
		}
	}
}

// add adds what a rule needs of g and x in the strip s.
func (t *columnSums) add(c *columnRule, g, x *pack, s strip) {
	if k := strips32; k != nil {
		k.blendSums(t, c, &g[packRoom], &x[packRoom], s.rows, s.columns)
		return
	}
	for r := range s.rows {
		for i := range s.columns {
			at := x.at(r, i)
			v, gi := x[at], g[at]
			if !(v*c.gate[i] <= c.above[i]) {
				t.all[i] += gi
				t.here[i] += gi * v
			}
			if c.leftNear[i] != 0 {
				t.near[i] += gi * x[at-1]
			}
			if c.leftFar[i] != 0 {
				t.far[i] += gi * x[at-2]
			}
		}
	}
}

// learn is backward and add.
func (c *columnRule) learn(dx []float32, g, x *pack, s strip, input []float32, t *columnSums) {
	k := strips32
	if k == nil || k.blendLearn == nil {
		t.add(c, g, x, s)
		c.backward(dx, g, x, s, input)
		return
	}
	blend := k.blendLearn
	if s.streams(dx) {
		blend = k.blendLearnStreamed
	}
	blend(&dx[s.at], &g[packRoom], &x[packRoom], c, t, s.ahead(input), s.rows, s.stride, s.columns)
}

// ahead is where the next rows of x begin.
func (s strip) ahead(x []float32) *float32 { return &x[min(s.at+passRows*s.stride, len(x)-1)] }

// fetch says what a fused kernel brings into the second cache while it computes a strip: of the rows that come next as many
// lines as the strip has vectors, in the order in which they are in memory, and not in that of the strip. Processors follow
// that order and fetch more by themselves. Offsets are in bytes, and a kernel fetches passRows lines at a time.
type fetch struct {
	at        int // offset of the first lines in a matrix
	left, run int // how often it fetches until the end of the row, and in a row
	jump      int // offset of the next row from the end of one
}

// ahead returns what to fetch while s is computed: what tile.passes has after it, or if that is in another tile s once more.
func ahead(t *tile[float32], s strip) fetch {
	const columns = passRows * 16 // in passRows lines
	at, done, rows := s.at, s.done+passRows, t.r1-t.r0
	switch {
	case done%bandRows != 0 && done < rows:
		at += passRows * t.stride
	case s.from+s.columns < t.columns:
		at += s.columns - s.done%bandRows*t.stride
	case done < rows:
		at += passRows*t.stride - s.from
	}
	run := (s.columns + columns - 1) / columns
	return fetch{at: 4 * at, left: run, run: run, jump: 4 * (t.stride - run*columns)}
}

// fuses reports whether there are kernels for measureForward and measureBackward. They take no longer than those that form
// no figures, for all of them wait for memory: where these are, nothing is gained by not measuring.
func fuses() bool { return strips32 != nil && strips32.fusedForward != nil }

// fuses reports whether measureForward and measureBackward compute the strip s.
func (s strip) fuses() bool { return fuses() && s.rows == passRows }

// measureForward is addInput and forward in one, without a pack.
func (c *columnRule) measureForward(y, x []float32, s strip, t *stripState, f *fetch, eps float32) {
	pass := strips32.fusedForward
	if s.streams(y) {
		pass = strips32.fusedForwardStreamed
	}
	pass(&y[s.at], &x[s.at], c, t, &x[0], f, s.stride, s.columns, eps)
}

// measureBackward is addGradient and learn in one, without packs. With chunks of vectors vectors, if that is not 0, it also
// adds norms.
func (c *columnRule) measureBackward(dx, g, x []float32, s strip, t *stripState, f *fetch, vectors int) {
	pass := strips32.fusedBackward
	if s.streams(dx) {
		pass = strips32.fusedBackwardStreamed
	}
	pass(&dx[s.at], &g[s.at], &x[s.at], c, t, &g[0], &x[0], f, s.stride, s.columns, vectors, vectors)
}

// normRows is how many rows add takes at once.
const normRows = 4

// canNorm reports whether add computes norms of chunks of c columns.
func canNorm(c int) bool { return c%4 == 0 && c <= stripColumns }

// add adds the norms of rows, which are stride elements apart, of chunks of c columns. Of rows rows those that are no group
// of normRows are left out.
func (n *stripNorms) add(g []float32, stride, rows, c, chunks int) {
	if k := strips32; k != nil {
		k.chunkNorms(n, &g[0], rows/normRows, c, chunks, stride)
		return
	}
	for r := range rows / normRows * normRows {
		for i := range chunks {
			d := math.Sqrt(cpu.Squares(g[r*stride+i*c:][:c])) - n.anchor[i]
			n.sum[i][r%normRows] += d
			n.square[i][r%normRows] += d * d
		}
	}
}

// moments returns those of the norms of rows rows that add has seen of chunk i.
func (n *stripNorms) moments(i, rows int) Moments {
	var sum, square float64
	for lane, d := range n.sum[i] {
		sum += d
		square += n.square[i][lane]
	}
	return shifted(n.anchor[i], sum, square, rows)
}

// shifted returns the moments of n numbers, given the sums of their deviations from an anchor and of the squares of these.
// It loses no more than a factor of n in precision if the anchor is one of the numbers.
func shifted(anchor, sum, square float64, n int) Moments {
	if n == 0 {
		return Moments{}
	}
	mean := sum / float64(n)
	return Moments{float64(n), anchor + mean, max(0, square-sum*mean)}
}

// ceil32 returns the smallest float32 that is no less than v: x < v and x < ceil32(v) are the same for float32 x.
func ceil32(v float64) float32 {
	c := float32(v)
	if float64(c) < v {
		c = math.Nextafter32(c, float32(math.Inf(1)))
	}
	return c
}

// The assembly relies on these.
var (
	_ = [1]int{}[unsafe.Offsetof(columnFigures{}.dead)-7*4*stripColumns]
	_ = [1]int{}[unsafe.Offsetof(columnRule{}.form)-11*4*stripColumns]
	_ = [1]int{}[unsafe.Offsetof(stripState{}.sums)-8*4*stripColumns]
	_ = [1]int{}[unsafe.Offsetof(columnSums{}.far)-3*4*stripColumns]
	_ = [1]int{}[unsafe.Offsetof(stripState{}.norms)-12*4*stripColumns]
	_ = [1]int{}[unsafe.Offsetof(stripNorms{}.square)-(8+64)*stripColumns/4]
)
