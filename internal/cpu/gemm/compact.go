package gemm

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// CompactType is the type of the weights of a [Compact].
type CompactType uint8

// The types.
const (
	// Float32 rounds nothing.
	Float32 CompactType = iota
	// BFloat16 takes 2 bytes per weight.
	BFloat16
	// Q8 is llama.cpp's q8_0: 32 neighbors in a row share a scale in float16, and each weight is a
	// multiple of the scale from -127 to 127. It takes 34 bytes per 32 weights.
	Q8
	// Float8 and NF4 are the formats of package quant. They are meant for products of many rows.
	Float8
	NF4
)

// format returns the format of package quant, or 0 for a type with panels.
func (t CompactType) format() quant.Format {
	switch t {
	case Float8:
		return quant.Float8
	case NF4:
		return quant.NF4
	}
	return 0
}

// Compact is a matrix of weights, [out, in], in a compact type or arranged for fast products, which with few
// rows take as long as reading the weights.
//
// A matrix of type Float8 or NF4 is a [quant.Matrix]. Of the other types, rows of the matrix are stored in
// panels of 32, in reading order of a product:
//
//   - Float32: for each of the neighbors in a row, the weights of all rows of the panel;
//   - BFloat16: for each pair of neighbors in a row, the pairs of all rows of the panel;
//   - Q8: for each block of 32 neighbors in a row, the scales of all rows, and then for each of the
//     neighbors the bytes of all rows.
//
// The last panel is filled with rows of zeros, and rows are filled with zeros up to a whole pair or block.
type Compact struct {
	Type    CompactType
	Out, In int
	data    []byte

	builder   *quant.Builder // Float8 and NF4, until Finish
	quantized *quant.Matrix  // Float8 and NF4, from Finish on
}

// Sizes of panels. The assembly depends on them.
const (
	compactLanes      = 32 // rows of a panel
	compactBlock      = 32 // weights that share a scale
	compactBlockBytes = compactLanes * (2 + compactBlock)
)

// NewCompact returns a matrix of zeros in memory of the slab. Set must be called for all rows, and then
// Finish.
func NewCompact(t CompactType, out, in int, slab *cpu.Slab) *Compact {
	w := &Compact{Type: t, Out: out, In: in}
	if f := t.format(); f != 0 {
		w.builder, _ = quant.NewBuilder(f, out, in) // the size is not negative
		return w
	}
	w.data = slab.Take(cpu.CeilDiv(out, compactLanes) * w.panelBytes())
	return w
}

// unit returns the number of neighbors in a row that are stored together.
func (w *Compact) unit() int {
	switch w.Type {
	case Float32:
		return 1
	case BFloat16:
		return 2
	}
	return compactBlock
}

// depth returns the number of weights of a stored row.
func (w *Compact) depth() int { return cpu.CeilDiv(w.In, w.unit()) * w.unit() }

// bytes returns the size of a panel's first k columns, which must be whole units.
func (w *Compact) bytes(k int) int {
	switch w.Type {
	case Float32:
		return 4 * compactLanes * k
	case BFloat16:
		return 2 * compactLanes * k
	}
	return k / compactBlock * compactBlockBytes
}

func (w *Compact) panelBytes() int { return w.bytes(w.depth()) }

// Bytes returns the size of the matrix.
func (w *Compact) Bytes() int {
	if w.quantized != nil {
		return w.quantized.Bytes()
	}
	return len(w.data)
}

// Finish makes the matrix ready for use after all rows have been set.
func (w *Compact) Finish() {
	if w.builder != nil {
		w.quantized, w.builder = w.builder.Matrix(), nil
	}
}

// Quantized returns the matrix of type Float8 or NF4, or nil for another type.
func (w *Compact) Quantized() *quant.Matrix { return w.quantized }

// Set converts and stores rows from the given one on. The first row must be a multiple of 32, or of 64 for
// NF4, and so must be the number of rows unless they are the matrix's last. Set returns an error if a weight
// exceeds the range of the type.
func (w *Compact) Set(row int, values []float32) error {
	rows := len(values) / max(1, w.In)
	if row%compactLanes != 0 || rows*w.In != len(values) || row+rows > w.Out ||
		rows%compactLanes != 0 && row+rows != w.Out {
		panic("gemm: Compact.Set: the rows are not whole panels of the matrix")
	}

	if w.builder != nil {
		return w.builder.Set(row, values)
	}

	panels := cpu.CeilDiv(rows, compactLanes)
	errs := make([]error, panels)
	cpu.Parallel(panels, 1, func(lo, hi int) {
		for p := lo; p < hi; p++ {
			first := p * compactLanes
			errs[p] = w.setPanel(row/compactLanes+p, values[first*w.In:min(rows, first+compactLanes)*w.In])
		}
	})
	for p, err := range errs {
		if err != nil {
			return fmt.Errorf("rows %d to %d: %w", row+p*compactLanes, row+min(rows, (p+1)*compactLanes)-1, err)
		}
	}
	return nil
}

func (w *Compact) setPanel(p int, values []float32) error {
	panel := w.panel(p)
	for lane := 0; len(values) > 0; lane++ {
		row := values[:w.In]
		values = values[w.In:]
		fits := true
		switch w.Type {
		case Float32:
			fits = setFloat32(panel[4*lane:], row)
		case BFloat16:
			fits = setBF16(panel[4*lane:], row)
		default:
			for b := 0; len(row) > 0 && fits; b++ {
				n := min(compactBlock, len(row))
				fits = setBlock(panel[b*compactBlockBytes:], lane, row[:n])
				row = row[n:]
			}
		}
		if !fits {
			return fmt.Errorf("a weight is not finite or too large for %v", w.Type)
		}
	}
	return nil
}

// panel returns the memory of a panel.
func (w *Compact) panel(p int) []byte {
	n := w.panelBytes()
	return w.data[p*n : (p+1)*n : (p+1)*n]
}

// String returns the type's name.
func (t CompactType) String() string {
	switch t {
	case Float32:
		return "f32"
	case BFloat16:
		return "bf16"
	case Q8:
		return "q8_0"
	case Float8:
		return "f8"
	case NF4:
		return "nf4"
	}
	return fmt.Sprintf("CompactType(%d)", uint8(t))
}

// setFloat32 stores a row, with its first element at the start of to.
func setFloat32(to []byte, row []float32) (fits bool) {
	for i, x := range row {
		bits := math.Float32bits(x)
		if bits&0x7f800000 == 0x7f800000 {
			return false
		}
		binary.LittleEndian.PutUint32(to[4*compactLanes*i:], bits)
	}
	return true
}

// setBF16 stores a row, with its first pair at the start of to.
func setBF16(to []byte, row []float32) (fits bool) {
	for len(row) > 0 {
		a, b := half.NewBFloat16(row[0]), half.BFloat16(0)
		if len(row) > 1 {
			b = half.NewBFloat16(row[1])
		}
		if a&0x7f80 == 0x7f80 || b&0x7f80 == 0x7f80 {
			return false
		}
		binary.LittleEndian.PutUint32(to, uint32(a)|uint32(b)<<16)
		row, to = row[min(2, len(row)):], to[min(4*compactLanes, len(to)):]
	}
	return true
}

// setBlock stores at most 32 neighbors of the given row of a panel. Weights are rounded as in llama.cpp: the
// largest one becomes ±127.
func setBlock(to []byte, lane int, x []float32) (fits bool) {
	// The bits of magnitudes are in the order of the magnitudes, and infinity and NaN have the largest.
	magnitude := uint32(0)
	for _, v := range x {
		magnitude = max(magnitude, math.Float32bits(v)&0x7fffffff)
	}

	scale, inverse := math.Float32frombits(magnitude)/127, float32(0)
	bits, fits := half.Narrow(scale, false)
	if scale > 0 {
		inverse = 1 / scale
	}
	if math.IsInf(float64(inverse), 0) { // all weights are nearly zero
		inverse = 0
	}

	binary.LittleEndian.PutUint16(to[2*lane:], bits)
	to = to[2*compactLanes+lane:]
	for i, v := range x {
		scaled := float64(v * inverse)
		to[i*compactLanes] = byte(int32(scaled + math.Copysign(0.5, scaled)))
	}
	return fits
}

// Row writes a row of the matrix to y, which has In elements.
func (w *Compact) Row(y []float32, row int) {
	y = y[:w.In]
	if w.quantized != nil {
		w.quantized.Decode(y, row, row+1)
		return
	}

	panel, lane := w.panel(row/compactLanes), row%compactLanes
	switch w.Type {
	case Float32:
		for i := range y {
			y[i] = math.Float32frombits(binary.LittleEndian.Uint32(panel[4*(i*compactLanes+lane):]))
		}
		return
	case BFloat16:
		for i := range y {
			y[i] = half.BFloat16(binary.LittleEndian.Uint16(panel[i/2*4*compactLanes+4*lane+i%2*2:])).Float32()
		}
		return
	}

	for len(y) > 0 {
		scale := float32(half.Float16(binary.LittleEndian.Uint16(panel[2*lane:])).Float64())
		block := panel[2*compactLanes+lane:]
		n := min(compactBlock, len(y))
		for i := range y[:n] {
			y[i] = scale * float32(int8(block[i*compactLanes]))
		}
		y, panel = y[n:], panel[compactBlockBytes:]
	}
}

// Expand writes all rows of the matrix to y.
func (w *Compact) Expand(y []float32) { w.Rows(y, 0, w.Out) }

// Rows writes rows [from, to) of the matrix to y.
func (w *Compact) Rows(y []float32, from, to int) {
	if w.quantized != nil {
		w.quantized.Decode(y, from, to)
		return
	}
	cpu.Parallel(to-from, 16, func(lo, hi int) {
		for row := lo; row < hi; row++ {
			w.Row(y[row*w.In:], from+row)
		}
	})
}

// widened is the number of weights that are widened together, so that they stay in a cache until a product
// has read them.
const widened = 1 << 19

// eachPart widens the matrix part by part, and calls f with the first row of each part and its rows.
func (w *Compact) eachPart(stop *cpu.Stop, f func(row, rows int, part []float32)) {
	buf := cpu.GetBuffers[float32]()
	defer cpu.PutBuffers(buf)
	rows := min(w.Out, max(64, widened/max(1, w.In)/64*64))
	part := buf.Elements(rows * w.In)
	for row := 0; row < w.Out && !stop.Asked(); row += rows {
		rows := min(rows, w.Out-row)
		w.Rows(part, row, row+rows)
		f(row, rows, part[:rows*w.In])
	}
}

// InputGrad computes dx = dy·w, the gradient of Linear's x for the gradient dy of its y. It returns early if
// stop requests it.
func (w *Compact) InputGrad(stop *cpu.Stop, dx, dy []float32, rows int) {
	beta := float32(0)
	w.eachPart(stop, func(row, n int, part []float32) {
		Mul(false, false, rows, w.In, n, 1, dy[row:], w.Out, part, w.In, beta, dx, w.In)
		beta = 1
	})
}

// linearInParts computes y = x·wᵀ for a matrix without panels.
func (w *Compact) linearInParts(stop *cpu.Stop, y, x []float32, rows int) {
	w.eachPart(stop, func(row, n int, part []float32) {
		Mul(false, true, rows, n, w.In, 1, x, w.In, part, w.In, 0, y[row:], w.Out)
	})
}

// compactKernels multiplies by compact weights with one instruction set.
type compactKernels struct {
	byType [3]func(*strip)
	rows   int     // maximum number of rows of a strip
	once   int     // with at most as many rows, weights are read only once
	two    [3]bool // whether the kernel of a type multiplies one row by two panels if strip.m is 0
}

// strip describes the work of a kernel: C += X·B for m rows of X and C, a panel B of 32 columns and k
// elements, in whole units. xs and cs are the strides of X and C in bytes. The assembly depends on the
// offsets of the fields.
type strip struct {
	m, k int
	x    *float32
	xs   int
	b    *byte
	c    *float32
	cs   int
}

var compactWith compactKernels

func init() { cpu.OnISA(func(l cpu.ISA) { compactWith = compactKernelsFor(l) }) }

const (
	// compactRows is the number of rows of X that a core multiplies by a part of a panel before it
	// continues with the next part. Together they fit in the second-level cache.
	compactRows = 128
	// compactDepth is the number of elements along k of such a part, which stays in the first-level
	// cache.
	compactDepth = 256
	// compactSpan is the number of bytes of weights that make a span of work.
	compactSpan = 32 << 10
	// compactLongSpan is that number for a few rows, which wait for memory most of the time. Each core reads
	// consecutive panels, because memory delivers the first bytes of a span slowly.
	compactLongSpan = 288 << 10
	// compactSpansPerCore is the number of spans that each core gets at least, so that all finish at the same
	// time.
	compactSpansPerCore = 4
)

// spanPanels returns the number of panels that make a span of work.
func (p *compactProducts) spanPanels(panelBytes int) int {
	least := max(1, compactSpan/panelBytes)
	if p.rows > compactWith.once {
		return least
	}
	n := max(least, min(compactLongSpan/panelBytes, p.panels/(compactSpansPerCore*runtime.GOMAXPROCS(0))))
	if p.two && n > 1 {
		n -= n % 2
	}
	return n
}

// A CompactProduct is a product with a compact matrix. Y is [rows, W.Out].
type CompactProduct struct {
	Y []float32
	W *Compact
}

// Linear computes y = x·wᵀ for the given number of rows of x. It returns early if stop requests it.
//
// Every element of y is summed in the same order for any number of cores and, unless the type is Float8 or
// NF4, of rows.
func (w *Compact) Linear(stop *cpu.Stop, y, x []float32, rows int) {
	CompactLinear(stop, x, rows, CompactProduct{y, w})
}

// CompactLinear computes Y = x·Wᵀ, as [Compact.Linear] does, for at most three matrices of the same type and
// width. Computing them together takes less time than one after the other.
func CompactLinear(stop *cpu.Stop, x []float32, rows int, products ...CompactProduct) {
	if rows <= 0 {
		return
	}

	first := products[0].W
	if first.Type.format() != 0 {
		for _, q := range products {
			q.W.linearInParts(stop, q.Y, x, rows)
		}
		return
	}

	p := compactProducts{stop: stop, x: x, rows: rows, width: first.depth(),
		kernel: compactWith.byType[first.Type], two: rows == 1 && compactWith.two[first.Type]}
	checkMatrix(x, rows, first.In, first.In)
	for i, q := range products {
		if q.W.Type != first.Type || q.W.In != first.In {
			panic("gemm: CompactLinear: the matrices differ in type or width")
		}
		checkMatrix(q.Y, rows, q.W.Out, q.W.Out)
		p.panels += cpu.CeilDiv(q.W.Out, compactLanes)
		p.products[i], p.ends[i] = q, p.panels
	}

	if p.width != first.In { // x needs zeros for the zeros that fill the rows of W
		buf := cpu.GetBuffers[float32]()
		defer cpu.PutBuffers(buf)
		p.x = buf.Elements(rows * p.width)
		for i := range rows {
			row := p.x[i*p.width:][:p.width]
			clear(row[copy(row, x[i*first.In:][:first.In]):])
		}
	}

	// A few rows read the weights once, so that nothing needs to stay in a cache.
	p.part = p.width
	if rows > compactWith.once {
		p.part = min(p.width, compactDepth)
	}

	cpu.Spread(p.panels, p.spanPanels(first.panelBytes()), p)
}

// compactProducts holds the arguments of CompactLinear. An index of a span is a panel. The panels of all
// matrices are numbered consecutively.
type compactProducts struct {
	stop        *cpu.Stop
	products    [3]CompactProduct
	ends        [3]int // of the panels of each matrix
	panels      int
	x           []float32
	rows, width int // of x
	part        int // elements along k that stay in the first-level cache
	kernel      func(*strip)
	two         bool // whether to multiply by two panels at once
}

// strips holds strips of past calls, because a call through a pointer to a kernel moves its argument to
// the heap.
var strips = sync.Pool{New: func() any { return new(strip) }}

func (p *compactProducts) Span(lo, hi int) {
	s := strips.Get().(*strip)
	for from := 0; from < p.rows; from += compactRows {
		to := min(p.rows, from+compactRows)
		i, start := 0, 0
		for panel := lo; panel < hi && !p.stop.Asked(); panel++ {
			for panel >= p.ends[i] {
				start = p.ends[i]
				i++
			}
			q := &p.products[i]
			if p.two && panel+1 < hi && (panel+2-start)*compactLanes <= q.W.Out {
				p.twoPanels(s, q, panel-start)
				panel++
				continue
			}
			p.panel(s, q, panel-start, from, to)
		}
	}
	s.x, s.b, s.c = nil, nil, nil
	strips.Put(s)
}

// panel computes the columns of a panel for rows [from, to).
func (p *compactProducts) panel(s *strip, q *CompactProduct, panel, from, to int) {
	column, out := panel*compactLanes, q.W.Out
	if columns := out - column; columns < compactLanes {
		p.lastPanel(s, q, columns, from, to)
		return
	}

	y := q.Y[from*out+column:]
	for i := range to - from {
		clear(y[i*out:][:compactLanes])
	}
	p.strips(s, y, out, q.W.panel(panel), q.W, from, to)
}

// twoPanels computes the columns of a panel and the next one for a single row.
func (p *compactProducts) twoPanels(s *strip, q *CompactProduct, panel int) {
	y := q.Y[panel*compactLanes:][:2*compactLanes]
	clear(y)
	s.m, s.k, s.x, s.b, s.c = 0, p.width, &p.x[0], &q.W.panel(panel)[0], &y[0]
	p.kernel(s)
}

// lastPanel is panel for a panel with fewer columns than kernels write.
func (p *compactProducts) lastPanel(s *strip, q *CompactProduct, columns, from, to int) {
	buf := cpu.GetBuffers[float32]()
	defer cpu.PutBuffers(buf)
	y := buf.Elements((to - from) * compactLanes)
	clear(y)
	out := q.W.Out
	p.strips(s, y, compactLanes, q.W.panel(out/compactLanes), q.W, from, to)
	for i := range to - from {
		copy(q.Y[(from+i+1)*out-columns:][:columns], y[i*compactLanes:])
	}
}

// strips adds the products of rows [from, to) with a panel to y, in strips of at most compactWith.rows.
func (p *compactProducts) strips(s *strip, y []float32, stride int, panel []byte, w *Compact, from, to int) {
	s.xs, s.cs = 4*p.width, 4*stride
	if to-from == 1 && p.part == p.width { // the most frequent case
		s.m, s.k, s.x, s.b, s.c = 1, p.width, &p.x[from*p.width], &panel[0], &y[0]
		p.kernel(s)
		return
	}

	for k := 0; k < p.width; k += p.part {
		s.k = min(p.part, p.width-k)
		s.b = &panel[w.bytes(k)]
		for i := from; i < to; i += s.m {
			s.m = cpu.CeilDiv(to-i, cpu.CeilDiv(to-i, compactWith.rows))
			s.x, s.c = &p.x[i*p.width+k], &y[(i-from)*stride]
			p.kernel(s)
		}
	}
}

// portableCompact returns the kernels in plain Go.
func portableCompact() compactKernels {
	return compactKernels{[...]func(*strip){stripFloat32, stripBF16, stripQ8}, 4, 1, [3]bool{}}
}

// rows returns the elements along k of row i of X, and row i of C.
func (s *strip) rows(i int) (x, c []float32) {
	at := func(p *float32, bytes, n int) []float32 {
		return unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(p), bytes)), n)
	}
	return at(s.x, i*s.xs, s.k), at(s.c, i*s.cs, compactLanes)
}

func stripFloat32(s *strip) {
	b := unsafe.Slice((*float32)(unsafe.Pointer(s.b)), compactLanes*s.k)
	for i := range s.m {
		x, c := s.rows(i)
		for k, x := range x {
			for j, w := range b[k*compactLanes:][:compactLanes] {
				c[j] += x * w
			}
		}
	}
}

func stripBF16(s *strip) {
	b := unsafe.Slice(s.b, 2*compactLanes*s.k)
	for i := range s.m {
		x, c := s.rows(i)
		for k := 0; k < s.k; k += 2 {
			row, x0, x1 := b[2*compactLanes*k:][:4*compactLanes], x[k], x[k+1]
			for j := range c[:compactLanes] {
				pair := binary.LittleEndian.Uint32(row[4*j:])
				c[j] += x0 * math.Float32frombits(pair<<16)
				c[j] += x1 * math.Float32frombits(pair&0xffff0000)
			}
		}
	}
}

func stripQ8(s *strip) {
	b := unsafe.Slice(s.b, s.k/compactBlock*compactBlockBytes)
	for i := range s.m {
		x, c := s.rows(i)
		for k := 0; k < s.k; k += compactBlock {
			block := b[k/compactBlock*compactBlockBytes:][:compactBlockBytes]
			var sums [compactLanes]float32
			for n, x := range x[k:][:compactBlock] {
				for j, q := range block[(2+n)*compactLanes:][:compactLanes] {
					sums[j] += x * float32(int8(q))
				}
			}
			for j, sum := range sums {
				c[j] += float32(half.Float16(binary.LittleEndian.Uint16(block[2*j:])).Float64()) * sum
			}
		}
	}
}
