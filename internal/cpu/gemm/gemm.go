// Package gemm multiplies matrices with the blocking of BLIS, using vector instructions or plain
// Go. On request, it rounds operands to bfloat16.
package gemm

import (
	"os"
	"runtime"
	"sync"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Mul computes C = alpha·op(A)·op(B) + beta·C for row-major matrices, where op(X) is X or Xᵀ
// (transA, transB). op(A) is m×k, op(B) is k×n and C is m×n. lda, ldb and ldc are the strides
// between stored rows.
//
// With beta = 0, the previous contents of C are ignored, even if they are NaN. With alpha = 0 or k
// = 0, A and B are not read. C must not overlap A or B. The work is spread over all cores.
func Mul[T cpu.Float](transA, transB bool, m, n, k int, alpha T, a []T, lda int, b []T, ldb int,
	beta T, c []T, ldc int) {
	multiply(true, operands[T]{transA, transB, m, n, k, alpha, a, lda, b, ldb,
		beta, c, ldc, nil, nil})
}

// MulSerial is like Mul, but runs on the calling goroutine only, for callers that already use every
// core. The results are bit-identical.
func MulSerial[T cpu.Float](transA, transB bool, m, n, k int, alpha T, a []T, lda int, b []T,
	ldb int, beta T, c []T, ldc int) {
	multiply(false, operands[T]{transA, transB, m, n, k, alpha, a, lda, b, ldb,
		beta, c, ldc, nil, nil})
}

// The product is blocked as in BLIS (van Zee and van de Geijn, 2015). op(B) is copied into panels
// of nr columns, in the innermost kernel's reading order. The cores then compute blocks of C. Each
// block advances along k in steps of gemmKC and sweeps mr rows of op(A) at a time over the panels.
// The rows stay in the L1 cache (they are packed if they otherwise would not), and the panels stay
// in L2.
//
// Every element of C is summed along k in an order that depends only on the shape, so the number of
// cores and the resulting blocks do not affect the result.
const (
	gemmKC = 256 // steps along k in a packed panel, each an element or a pair
	// gemmNC is the number of columns of op(B) swept per block. gemmKC·gemmNC float32 take 512 KiB,
	// half of a typical L2 cache.
	gemmNC     = 512
	gemmPacked = 1 << 20 // maximum number of elements of op(B) packed at a time
	gemmSmall  = 1 << 17 // products with fewer multiplications stay on one core

	// gemmFetchSteps is the number of steps along k between two prefetches. The assembly depends on
	// it.
	gemmFetchSteps = 16
)

// tile describes the work of a kernel: C = alpha·A·B + beta·C + D for m×n elements of C.
//
// Element (i, p) of A is a[i·rs + p·cs]. Row p of panel j of B starts at b[j·panel + p·bs]. Row i
// of C starts at c[i·ldc], and row i of D, unless it is nil, at d[i·ldd]. For the dot kernel,
// column j of B starts at b[j·bs], cs is 1 and D is nil. The assembly depends on the offsets of the
// fields.
type tile[T cpu.Float] struct {
	m, n, k     int
	a           []T
	rs, cs      int
	b           []T
	bs          int
	c           []T
	ldc         int
	d           []T
	ldd         int
	panel       int
	fetch       fetch[T]
	alpha, beta T
}

// fetch describes the memory a kernel prefetches into the second-level cache for the next tile. At
// panel p < panels and step gemmFetchSteps·s along k, these are two lines, p·jump + s·step and p·jump
// + s·step + stride bytes after next. Processors predict further reads within a row, but not reads of
// other rows.
type fetch[T cpu.Float] struct {
	next               []T
	stride, step, jump int
	panels             int
}

// sweep computes t panel by panel, in panels of nr columns, with a kernel for a single panel.
func (t *tile[T]) sweep(nr int, kernel func(*tile[T])) {
	n, b, c, d := t.n, t.b, t.c, t.d
	for at := 0; at < n; at += nr {
		t.n, t.b, t.c = min(nr, n-at), b[at/nr*t.panel:], c[at:]
		if d != nil {
			t.d = d[at:]
		}
		kernel(t)
	}
}

// kernels is the innermost arithmetic for one element type and instruction set.
type kernels[T cpu.Float] struct {
	mr, nr int            // maximum number of rows of a tile of C, and the number of columns of a panel
	lanes  int            // maximum number of rows for transpose; at least mr, and a divisor of nr
	tile   func(*tile[T]) // any number of columns; k > 0
	pairs  bool           // panels consist of bfloat16 pairs, adjacent along k

	// copy and transpose fill a panel: dst[r·ds + c] = src[r·ss + c], and dst[c·ds + r] = src[r·ss
	// + c]. With pairs, element (r, c) of src is part of the pair of row r/2, or column c/2, and a
	// missing neighbor is zero. Both may write beyond width or rows, up to a multiple of lanes.
	copy      func(dst []T, ds int, src []T, ss, rows, width int)
	transpose func(dst []T, ds int, src []T, ss, rows, cols int)

	// dot, if not nil, computes a tile of at most dotM rows and four columns, reading the rows of A
	// and of Bᵀ in place.
	dot  func(*tile[T])
	dotM int
}

// steps returns the number of steps along k for k elements.
func (kn *kernels[T]) steps(k int) int {
	if kn.pairs {
		return (k + 1) / 2
	}
	return k
}

// deepest returns the number of elements along k in gemmKC steps.
func (kn *kernels[T]) deepest() int {
	if kn.pairs {
		return 2 * gemmKC
	}
	return gemmKC
}

// gemmEngine holds the kernels, and the working memory of past products so that the steady state
// allocates nothing.
type gemmEngine[T cpu.Float] struct {
	kernels kernels[T]
	jobs    sync.Pool // *job[T]
	scratch sync.Pool // *scratch[T]
}

var (
	engine32 gemmEngine[float32]
	engine64 gemmEngine[float64]
)

func init() {
	cpu.OnISA(func(l cpu.ISA) {
		engine32.kernels, engine64.kernels = kernelsFor(l)
		useBF16(engine32.kernels)
	})
	rounding.Store(os.Getenv("KASMINA_CPU_BF16") == "1" && kernelsBF16 != nil)
}

// engine returns the engine for T.
func engine[T cpu.Float]() *gemmEngine[T] {
	if e, ok := any(&engine32).(*gemmEngine[T]); ok {
		return e
	}
	return any(&engine64).(*gemmEngine[T])
}

// operands are the arguments of a product.
type operands[T cpu.Float] struct {
	transA, transB bool
	m, n, k        int
	alpha          T
	a              []T
	lda            int
	b              []T
	ldb            int
	beta           T
	c              []T
	ldc            int
	d              []T // nil, or an m×n matrix of stride n to add
	stop           *cpu.Stop
}

// job is a product in progress.
type job[T cpu.Float] struct {
	operands[T]
	kn *kernels[T]

	// The current part of op(B): rows [p0, p0+depth) and columns [j0, j0+width), copied to packed
	// unless B is read in place.
	p0, depth, j0, width int
	packed               []T
	inPlace              bool

	mb, nb   int  // rows and columns of C per block
	fetching bool // the product is so large that its operands may not be in the caches

	// The methods that run on several cores, bound only once.
	packSpan, blockSpan, dotSpan func(lo, hi int)
}

// scratch is the working memory of one goroutine.
type scratch[T cpu.Float] struct {
	panel []T // mr rows of op(A), column by column
	tile  tile[T]
}

// multiply computes g after checking the bounds of its matrices.
func multiply[T cpu.Float](parallel bool, g operands[T]) {
	if g.m <= 0 || g.n <= 0 {
		return
	}

	checkMatrix(g.c, g.m, g.n, g.ldc)
	if g.d != nil {
		checkMatrix(g.d, g.m, g.n, g.n)
	}

	if g.k <= 0 || g.alpha == 0 {
		g.scaleC()
		return
	}

	if g.transA {
		checkMatrix(g.a, g.k, g.m, g.lda)
	} else {
		checkMatrix(g.a, g.m, g.k, g.lda)
	}

	if g.transB {
		checkMatrix(g.b, g.n, g.k, g.ldb)
	} else {
		checkMatrix(g.b, g.k, g.n, g.ldb)
	}

	if parallel && rounded(&g) {
		return
	}

	e := engine[T]()
	run(e.take(&e.kernels), g, parallel)
}

// take returns an idle job.
func (e *gemmEngine[T]) take(kn *kernels[T]) *job[T] {
	j, _ := e.jobs.Get().(*job[T])
	if j == nil {
		j = new(job[T])
		j.packSpan, j.blockSpan, j.dotSpan = j.packPanels, j.blocks, j.dots
	}
	j.kn = kn
	return j
}

// run computes g with j and then releases j.
func run[T cpu.Float](j *job[T], g operands[T], parallel bool) {
	j.operands = g
	workers := 1
	if parallel && g.m*g.n*g.k >= gemmSmall {
		workers = runtime.GOMAXPROCS(0)
	}
	j.run(workers)
	j.operands = operands[T]{} // do not retain the caller's memory
	engine[T]().jobs.Put(j)
}

// checkMatrix panics with an index out of range if a rows×cols matrix of stride ld does not fit in
// x. The assembly does not check bounds.
func checkMatrix[T cpu.Float](x []T, rows, cols, ld int) {
	if ld < cols {
		panic("gemm: stride of a matrix is less than its width")
	}
	_ = x[(rows-1)*ld+cols-1]
}

// scaleC computes C = beta·C + D.
func (g *operands[T]) scaleC() {
	for i := range g.m {
		row := g.c[i*g.ldc : i*g.ldc+g.n]
		for j := range row {
			var d T
			if g.d != nil {
				d = g.d[i*g.n+j]
			}
			if g.beta == 0 {
				row[j] = d
			} else {
				row[j] = T(g.beta*row[j]) + d // the conversion forces rounding before the addition
			}
		}
	}
}

// run computes the product with the given number of workers.
func (j *job[T]) run(workers int) {
	spread := func(n, grain int, f func(lo, hi int)) {
		if workers == 1 {
			f(0, n)
		} else {
			cpu.Parallel(n, grain, f)
		}
	}

	if j.kn.dot != nil && !j.transA && j.transB && j.m <= gemmDotRows {
		spread(j.n, max(16, gemmSmall/4/(j.m*j.k)&^3), j.dotSpan)
		return
	}

	nr := j.kn.nr
	j.fetching = workers > 1
	j.inPlace = !j.kn.pairs && !j.transB && (j.m <= j.kn.mr || j.m <= gemmInPlace &&
		alignedRows(j.b, j.ldb))
	kc := j.kn.deepest()
	cols := min(j.n, max(2*gemmNC, gemmPacked/j.k/nr*nr))
	depth := min(j.k, max(kc, gemmPacked/cols/kc*kc))
	for j.j0 = 0; j.j0 < j.n; j.j0 += cols {
		j.width = min(cols, j.n-j.j0)
		j.split(workers)
		for j.p0 = 0; j.p0 < j.k; j.p0 += depth {
			j.depth = min(depth, j.k-j.p0)
			if !j.inPlace {
				panels := cpu.CeilDiv(j.width, nr)
				if size := panels * nr * j.kn.steps(j.depth); size > len(j.packed) {
					j.packed = make([]T, size)
				}
				spread(panels, max(1, 1<<14/(nr*j.depth)), j.packSpan)
			}
			spread(cpu.CeilDiv(j.m, j.mb)*cpu.CeilDiv(j.width, j.nb), 1, j.blockSpan)
		}
	}
}

// gemmDotRows is the largest m for which A·Bᵀ is computed as dot products. With more rows, these cost
// more than transposing B into panels, because lanes must be added up and B's rows are read once for
// every few rows of A.
const gemmDotRows = 32

// gemmInPlace is the largest m for which B is read in place if each of its rows is aligned to a cache
// line. With so few rows, copying an element of B costs more than reading it out of order. With at
// most mr rows, that holds for any alignment.
const gemmInPlace = 768

// alignedRows reports whether all rows of x are aligned to cache lines.
func alignedRows[T cpu.Float](x []T, ld int) bool {
	const line = 64
	return uintptr(unsafe.Pointer(unsafe.SliceData(x)))%line == 0 &&
		uintptr(ld)*unsafe.Sizeof(x[0])%line == 0
}

// split chooses the blocks of C: about four per core, so that a core delayed by other work hardly
// delays the result. Blocks have at least two tiles of rows and at most gemmNC columns.
func (j *job[T]) split(workers int) {
	nr := j.kn.nr

	// even returns the width of the given number of blocks.
	even := func(blocks int) int { return cpu.CeilDiv(cpu.CeilDiv(j.width, blocks), nr) * nr }
	j.mb, j.nb = j.m, even(cpu.CeilDiv(j.width, gemmNC))
	if workers == 1 {
		return
	}

	want := 4 * workers
	j.mb = cpu.CeilDiv(j.m, max(1, min(want, j.m/(2*j.kn.mr))))
	j.nb = min(j.nb, even(cpu.CeilDiv(want, cpu.CeilDiv(j.m, j.mb))))
}

// packPanels packs panels [lo, hi) of op(B). All panels of the first gemmKC rows precede the panels
// of the following rows.
func (j *job[T]) packPanels(lo, hi int) {
	nr, lanes := j.kn.nr, j.kn.lanes
	padded := cpu.CeilDiv(j.width, nr) * nr
	for q := lo; q < hi && !j.stop.Asked(); q++ {
		col, w := j.j0+q*nr, min(nr, j.width-q*nr)
		for p := 0; p < j.depth; p += j.kn.deepest() {
			kc := min(j.kn.deepest(), j.depth-p)
			dst := j.packed[j.kn.steps(p)*padded+q*nr*j.kn.steps(kc):]
			row := j.p0 + p
			if !j.transB {
				j.kn.copy(dst, nr, j.b[row*j.ldb+col:], j.ldb, kc, w)
				continue
			}
			for h := 0; h < w; h += lanes {
				j.kn.transpose(dst[h:], nr, j.b[(col+h)*j.ldb+row:], j.ldb, min(lanes, w-h), kc)
			}
		}
	}
}

// blocks computes blocks [lo, hi) of C, numbered along the rows, so that the cores divide C by rows
// as other kernels do.
func (j *job[T]) blocks(lo, hi int) {
	pool := &engine[T]().scratch
	s, _ := pool.Get().(*scratch[T])
	if s == nil {
		s = new(scratch[T])
	}

	if size := j.kn.lanes * gemmKC; len(s.panel) < size {
		s.panel = make([]T, size)
	}

	across := cpu.CeilDiv(j.width, j.nb)
	for t := lo; t < hi; t++ {
		j.block(s, t/across*j.mb, t%across*j.nb)
	}

	s.tile = tile[T]{}
	pool.Put(s)
}

// block adds the product with the current part of op(B) to the block of C with first row i0 and
// first column j0 + c0.
func (j *job[T]) block(s *scratch[T], i0, c0 int) {
	t := &s.tile
	i1, c1 := min(i0+j.mb, j.m), min(c0+j.nb, j.width)
	nr := j.kn.nr
	padded := cpu.CeilDiv(j.width, nr) * nr
	t.ldc, t.alpha = j.ldc, j.alpha
	for p := 0; p < j.depth; p += j.kn.deepest() {
		kc := min(j.kn.deepest(), j.depth-p)
		t.k = j.kn.steps(kc)
		t.beta, t.d, t.ldd = 1, nil, j.n
		if j.p0+p == 0 {
			t.beta = j.beta
		}
		last := j.p0+p+kc == j.k
		for i := i0; i < i1; i += t.m {
			// Rows are divided evenly among the fewest possible tiles, because a narrow last tile
			// would run at a fraction of the speed.
			t.m = cpu.CeilDiv(i1-i, cpu.CeilDiv(i1-i, j.kn.mr))
			j.rowsOfA(s, i, j.p0+p, kc)
			t.n = c1 - c0
			if j.fetching {
				t.fetch = j.next(i, t.m, i0, i1, p)
			}
			if j.inPlace {
				t.b, t.bs, t.panel = j.b[(j.p0+p)*j.ldb+j.j0+c0:], j.ldb, nr
			} else {
				t.b, t.bs, t.panel = j.packed[j.kn.steps(p)*padded+c0*t.k:], nr, nr*t.k
			}

			t.c = j.c[i*j.ldc+j.j0+c0:]
			if j.d != nil && last {
				t.d = j.d[i*j.n+j.j0+c0:]
			}
			if j.stop.Asked() {
				return
			}
			j.kn.tile(t)
		}
	}
}

// rowsOfA points the tile to t.m rows of op(A) from row i on, and to kc columns from column p on.
// Rows of A can be read in place, unless they evict each other from the L1 cache. Columns cannot,
// because the tile needs only a part of each cache line. They are packed if they will be swept over
// enough columns of C.
func (j *job[T]) rowsOfA(s *scratch[T], i, p, kc int) {
	t := &s.tile
	switch {
	case j.kn.pairs || j.nb > gemmSweep && (j.transA || conflicting[T](j.lda)):
		j.packRowsOfA(s, i, p, kc)
	case j.transA:
		t.a, t.rs, t.cs = j.a[p*j.lda+i:], 1, j.lda
	default:
		t.a, t.rs, t.cs = j.a[i*j.lda+p:], j.lda, 1
	}
}

// next returns the memory to prefetch while a tile is computed. The tile has m rows of A from row i
// on and columns from p on, in a block of rows [i0, i1). The next memory is in the rows below;
// after the last rows, in the block's next columns; and at the end of the block, in the next block.
func (j *job[T]) next(i, m, i0, i1, p int) fetch[T] {
	const line = 64
	if i += m; i >= i1 {
		if i, p = i0, p+j.kn.deepest(); p >= j.depth {
			i, p = i1, 0
		}
	}

	if i >= j.m {
		return fetch[T]{}
	}

	kc := min(j.kn.deepest(), j.depth-p)
	size, times := int(unsafe.Sizeof(T(0))), cpu.CeilDiv(j.kn.steps(kc), gemmFetchSteps)
	stride := size * j.lda

	// Most of the m columns are in lines that the previous tile has read, the last one least
	// likely.
	if j.transA {
		return fetch[T]{j.a[(j.p0+p)*j.lda+min(i+m, j.m)-1:], stride, 2 * stride,
			2 * stride * times, cpu.CeilDiv(kc, 2*times)}
	}

	rows := j.a[i*j.lda+j.p0+p:]
	if size*kc > line*times {
		return fetch[T]{rows, line, 2 * line, stride, m}
	}

	return fetch[T]{rows, stride, line, 2 * stride, cpu.CeilDiv(m, 2)}
}

// conflicting reports whether rows with stride ld start at nearly the same offset in a page. Such
// rows share few sets of an L1 cache.
func conflicting[T cpu.Float](ld int) bool {
	const page = 4096
	past := ld * int(unsafe.Sizeof(T(0))) % page
	return min(past, page-past) < page/16
}

// packRowsOfA copies the rows of the tile to the panel of s.
func (j *job[T]) packRowsOfA(s *scratch[T], i, p, kc int) {
	t, lanes := &s.tile, j.kn.lanes
	if j.transA {
		j.kn.copy(s.panel, lanes, j.a[p*j.lda+i:], j.lda, kc, t.m)
	} else {
		j.kn.transpose(s.panel, lanes, j.a[i*j.lda+p:], j.lda, t.m, kc)
	}
	t.a, t.rs, t.cs = s.panel, 1, lanes
}

// gemmSweep is the maximum width of blocks of C with unpacked rows of op(A): packing these would
// cost more than it saves.
const gemmSweep = 64

// dots computes columns [lo, hi) of C = alpha·A·Bᵀ + beta·C + D as dot products.
func (j *job[T]) dots(lo, hi int) {
	pool := &engine[T]().scratch
	s, _ := pool.Get().(*scratch[T])
	if s == nil {
		s = new(scratch[T])
	}

	t := &s.tile
	t.k, t.rs, t.cs, t.bs, t.ldc, t.alpha, t.beta = j.k, j.lda, 1, j.ldb, j.ldc, j.alpha, j.beta
	for c := lo; c < hi; c += 4 {
		t.n = min(4, hi-c)
		t.b = j.b[c*j.ldb:]
		for i := 0; i < j.m; i += t.m {
			t.m = min(j.kn.dotM, j.m-i)
			t.a, t.c = j.a[i*j.lda:], j.c[i*j.ldc+c:]
			j.kn.dot(t)
		}
		if j.d == nil {
			continue
		}

		for i := range j.m {
			for q := c; q < c+t.n; q++ {
				j.c[i*j.ldc+q] += j.d[i*j.n+q]
			}
		}
	}

	s.tile = tile[T]{}
	pool.Put(s)
}

// Lanes returns the maximum number of rows for [TransposeLanes].
func Lanes[T cpu.Float]() int { return engine[T]().kernels.lanes }

// TransposeLanes sets dst[c·ds + r] = src[r·ss + c] for rows × cols elements. It may write beyond
// rows, up to Lanes.
func TransposeLanes[T cpu.Float](dst []T, ds int, src []T, ss, rows, cols int) {
	engine[T]().kernels.transpose(dst, ds, src, ss, rows, cols)
}
