package decode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
)

// Step runs a list of launches that decode one token, usually a whole model, in a single kernel. Each of
// the kernel's blocks stays on its multiprocessor, so it can prefetch weights while it waits for other
// blocks. NOTES.md describes the kernel.
//
// The launches are values of type [Product], [Gated], [Attention], [Paged] with a single row,
// [embedding.Forward], [norm.RMSNorm], [norm.LayerNorm], [elementwise.Unary] or [elementwise.Binary].
// Check reports whether the kernel supports them.
//
// The kernel does not write the Rstd and Stats of norms. If an elementwise op adds 1 to the weights of a
// norm, the kernel adds the 1 within the norm and does not write the sum either.
type Step struct {
	Launches []any
	Table    gpu.Ptr // TableBytes bytes that contain Encode's result
	Arrived  gpu.Ptr // two uint32, zero before and after a launch
	Lanes    bool    // lanes copy the weights, instead of the copy engine
}

// These constants must match decode_step.cu.
const (
	opBytes, weightsBytes = 128, 32
	opPointers, opSizes   = 11, 7
	rowPacks              = 4 // of a norm, per thread
	togetherHeads         = 4
	mergedBytes           = 18 << 10 // shared memory of attention
	stepWarps, pieceBytes = 8, 4096
)

// The kinds of ops, in the order of decode_step.cu.
const (
	opProduct = iota
	opGated
	opAttention
	opEmbedding
	opRMSNorm
	opLayerNorm
	opAdd
	opGELU
	opMulScalar
	opAddScalar
)

// The flags of ops.
const (
	flagWait = 1 << iota
	flagFirstHeld
	flagSecondHeld
	flagGELU
	flagPlusOne
	flagPacked
	flagPaged
)

// op is one operation in the kernel's table.
type op struct {
	p           [opPointers]gpu.Ptr
	kind, flags int
	n           [opSizes]int
	f           float64
}

// weights describes the rows of a product. An item is two rows that a warp multiplies at once.
type weights struct {
	first       gpu.Ptr
	apart, step int // bytes from an item's first row to its second, and to the next item's first
	items       int
	bytes       int // of a row
	odd         bool
}

// region is a range of device memory.
type region struct{ from, to gpu.Ptr }

func (r region) overlaps(others []region) bool {
	for _, o := range others {
		if r.from < o.to && o.from < r.to {
			return true
		}
	}
	return false
}

func overlap(some, others []region) bool {
	for _, r := range some {
		if r.overlaps(others) {
			return true
		}
	}
	return false
}

// program is a Step translated to the kernel's operations.
type program struct {
	device  gpu.DeviceInfo
	t       gpu.DType
	ops     []op
	weights []weights
	held    int // bytes of the longest vector

	// the memory read and written since the last op that waits
	read, written []region
	// the vector in shared memory, or the zero region
	inHeld region
	// the original weights of norms, keyed by the result of adding 1 to them
	plusOne map[gpu.Ptr]gpu.Ptr
}

// errUnsupported reports launches that the kernel does not support.
var errUnsupported = errors.New("the kernel of a Step does not support it")

// Supports reports whether the kernel of a Step may support launches of l's type on a device. Check also
// considers their sizes and operands.
func Supports(l any, d gpu.DeviceInfo) bool {
	if d.Capability() != 90 {
		return false
	}
	switch l.(type) {
	case Product, Gated, Attention, Paged, embedding.Forward, norm.RMSNorm, norm.LayerNorm,
		elementwise.Unary, elementwise.Binary:
		return true
	}
	return false
}

// Check returns an error if the kernel does not support the launches. The addresses may be placeholders,
// but must have the alignment of the real ones and show which launches use the same memory.
func (s Step) Check(d gpu.DeviceInfo) error {
	p, err := s.program(d)
	if err == nil && p.slots() < 2 {
		err = fmt.Errorf("vectors of %d bytes leave no room for weights: %w", p.held, errUnsupported)
	}
	return err
}

// TableBytes returns the maximum size of the table for n launches.
func TableBytes(n int) int { return n * (opBytes + weightsBytes) }

// Counters is the number of elements of Step.Arrived.
const Counters = 2

// Launch enqueues one kernel.
func (s Step) Launch(q *kernel.Queue) {
	p, err := s.program(q.Info)
	if err != nil {
		q.Err = errors.Join(q.Err, fmt.Errorf("kernels.DecodeStep: %w", err))
		return
	}

	name := "decode_step_bulk"
	if s.Lanes {
		name = "decode_step_lanes"
	}
	slots := p.slots()
	q.Run("decode_step", name+kernel.Suffix(p.t), gpu.LaunchConfig{Grid: gpu.Dim{X: q.Info.SMs},
		Block: gpu.Dim{X: 32 * stepWarps}, Shared: p.shared(slots), Cooperative: true},
		s.Table, len(p.ops), len(p.weights), s.Arrived, slots, p.heldBytes())
}

// heldBytes returns the size of the shared memory that vectors and attention share.
func (p *program) heldBytes() int { return kernel.CeilDiv(max(p.held, mergedBytes), 128) * 128 }

// slotBytes is the shared memory that one slot takes in the rings of all warps, including the barriers.
const slotBytes = stepWarps * (2*pieceBytes + 8)

// shared returns the dynamic shared memory of a launch.
func (p *program) shared(slots int) int {
	const ops = 4
	return slots*slotBytes + p.heldBytes() + weightsBytes*len(p.weights) + ops*opBytes
}

// slots returns the number of slots of each warp's ring. The kernel needs 2 or 3.
func (p *program) slots() int {
	const static = 256 // shared memory of reductions
	return min(3, (p.device.SharedPerBlock-static-p.shared(0))/slotBytes)
}

// Encode returns the contents of Table.
func (s Step) Encode(d gpu.DeviceInfo) ([]byte, error) {
	p, err := s.program(d)
	if err != nil {
		return nil, err
	}

	b, le := make([]byte, 0, TableBytes(len(s.Launches))), binary.LittleEndian
	for _, o := range p.ops {
		for _, a := range o.p {
			b = le.AppendUint64(b, uint64(a))
		}
		b = le.AppendUint32(le.AppendUint32(b, uint32(o.kind)), uint32(o.flags))
		for _, n := range o.n {
			b = le.AppendUint32(b, uint32(n))
		}
		b = le.AppendUint32(b, math.Float32bits(float32(o.f)))
	}

	for _, w := range p.weights {
		b = le.AppendUint64(le.AppendUint64(b, uint64(w.first)), uint64(w.apart))
		for _, n := range []int{w.step, w.items, w.bytes, int(kernel.Bit(w.odd))} {
			b = le.AppendUint32(b, uint32(n))
		}
	}

	return b, nil
}

// program translates the launches into operations. It drops additions of 1 to the weights of a norm,
// which the norm computes instead.
func (s Step) program(d gpu.DeviceInfo) (*program, error) {
	p := &program{device: d, t: -1, plusOne: map[gpu.Ptr]gpu.Ptr{}}
	factors := map[gpu.Ptr]bool{}
	for _, l := range s.Launches {
		if n, ok := l.(norm.RMSNorm); ok {
			factors[n.W] = true
		}
	}

	for i, l := range s.Launches {
		var err error
		switch l := l.(type) {
		case Product:
			err = p.product(l)
		case Gated:
			err = p.gated(l)
		case Attention:
			err = p.attention(l)
		case Paged:
			err = p.paged(l)
		case embedding.Forward:
			err = p.embedding(l)
		case norm.RMSNorm:
			err = p.rmsNorm(l)
		case norm.LayerNorm:
			err = p.layerNorm(l)
		case elementwise.Unary:
			if l.Op == elementwise.AddScalar && l.P == 1 && l.Type == gpu.Float32 && factors[l.Y] {
				p.plusOne[l.Y] = l.X
				continue
			}
			err = p.unary(l)
		case elementwise.Binary:
			err = p.binary(l)
		default:
			err = errUnsupported
		}
		if err != nil {
			return nil, fmt.Errorf("launch %d, a %T: %w", i, l, err)
		}
	}

	if p.t < 0 {
		return nil, errUnsupported
	}

	return p, nil
}

// typed reports whether t is the type of all launches so far and rows of n elements at the given
// addresses can be moved 16 bytes at a time. The first call sets the type.
func (p *program) typed(t gpu.DType, n int, at ...gpu.Ptr) bool {
	if p.t < 0 {
		p.t = t
	}
	return p.t == t && n > 0 && kernel.Packed(t, n, at...)
}

// row returns the memory of n elements.
func (p *program) row(at gpu.Ptr, n int) region { return region{at, at.Offset(n * p.t.Size())} }

// operand describes an operand of n elements. If the operand is in shared memory, it returns the given
// flag, and otherwise the memory to read.
func (p *program) operand(at gpu.Ptr, n, flag int) (reads []region, flags int) {
	switch r := p.row(at, n); {
	case at == 0:
		return nil, 0
	case r == p.inHeld:
		return nil, flag
	default:
		return []region{r}, 0
	}
}

// add appends an op with the given reads and writes in addition to its weights. held is the vector in
// shared memory after the op. The op waits for other blocks if its memory conflicts with earlier ops.
func (p *program) add(o op, reads, writes []region, held region) error {
	if overlap(reads, writes) {
		return fmt.Errorf("it overwrites an operand: %w", errUnsupported)
	}

	if overlap(reads, p.written) || overlap(writes, p.written) || overlap(writes, p.read) {
		o.flags |= flagWait
		p.read, p.written = nil, nil
	}

	p.read, p.written = append(p.read, reads...), append(p.written, writes...)
	p.ops, p.inHeld = append(p.ops, o), held
	p.held = max(p.held, int(held.to-held.from))
	return nil
}

// vector appends an op with a result y of n elements. Every block computes the entire result.
func (p *program) vector(o op, y gpu.Ptr, n int, reads []region, more ...region) error {
	o.p[0], o.n[0] = y, n
	r := p.row(y, n)
	return p.add(o, reads, append(more, r), r)
}

func (p *program) product(l Product) error {
	if !p.typed(l.Type, l.D, l.X, l.W) {
		return errUnsupported
	}

	bytes := l.D * l.Type.Size()
	p.weights = append(p.weights, weights{first: l.W, apart: bytes, step: 2 * bytes,
		items: kernel.CeilDiv(l.Columns, 2), bytes: bytes, odd: l.Columns%2 != 0})
	reads, flags := p.operand(l.X, l.D, flagFirstHeld)
	if l.C != 0 {
		reads = append(reads, p.row(l.C, l.Columns))
	}

	return p.add(op{p: [opPointers]gpu.Ptr{l.Y, l.X, l.C}, kind: opProduct, flags: flags,
		n: [opSizes]int{l.Columns, l.D}}, reads, []region{p.row(l.Y, l.Columns)}, p.row(l.X, l.D))
}

func (p *program) gated(l Gated) error {
	if !p.typed(l.Type, l.D, l.X, l.W) {
		return errUnsupported
	}

	bytes := l.D * l.Type.Size()
	p.weights = append(p.weights, weights{first: l.W, apart: l.F * bytes, step: bytes, items: l.F,
		bytes: bytes})
	reads, flags := p.operand(l.X, l.D, flagFirstHeld)
	if l.GELU {
		flags |= flagGELU
	}

	return p.add(op{p: [opPointers]gpu.Ptr{l.H, l.X}, kind: opGated, flags: flags,
		n: [opSizes]int{l.F, l.D}}, reads, []region{p.row(l.H, l.F)}, p.row(l.X, l.D))
}

func (p *program) paged(l Paged) error {
	if l.Rows != 1 {
		return errUnsupported
	}
	slices := l.rowSlices(p.device)
	return p.attend(Attention{Geometry: l.Geometry, Y: l.Y, Q: l.Q.Ptr, K: l.K.Ptr, V: l.V.Ptr, Keys: l.Keys,
		Values: l.Values, Cos: l.Cos, Sin: l.Sin, Position: l.Table, Parts: l.Parts, Arrived: l.Arrived,
		Type: l.Type}, slices, flagPaged)
}

func (p *program) attention(l Attention) error { return p.attend(l, l.slices(p.device), 0) }

// attend appends an attention with at most the given number of slices. No other op may use its cache.
func (p *program) attend(l Attention, slices, flags int) error {
	if p.typed(l.Type, 1); p.t != l.Type || l.HeadDim > maxDim {
		return errUnsupported
	}

	if l.packed() {
		flags |= flagPacked
	}

	qd, kd := l.Heads*l.HeadDim, l.KVHeads*l.HeadDim
	reads := []region{p.row(l.Q, qd), p.row(l.K, kd), p.row(l.V, kd)}
	groups := kernel.CeilDiv(l.Heads/l.KVHeads, togetherHeads)
	slices = min(slices, max(1, p.device.SMs/(l.KVHeads*groups)))
	return p.add(op{kind: opAttention, flags: flags, p: [opPointers]gpu.Ptr{l.Y, l.Q, l.K, l.V,
		l.Keys, l.Values, l.Cos, l.Sin, l.Position, l.Parts, l.Arrived}, n: [opSizes]int{l.Heads,
		l.KVHeads, l.HeadDim, l.Capacity, l.Window, slices}, f: l.Scale}, reads,
		[]region{p.row(l.Y, qd)}, region{})
}

func (p *program) embedding(l embedding.Forward) error {
	if !p.typed(l.Type, l.D, l.Y, l.Table) || l.TableType != l.Type || l.Rows != 1 {
		return errUnsupported
	}

	// The table may be an earlier result: graphs also use lookups to select rows of activations.
	return p.vector(op{kind: opEmbedding, p: [opPointers]gpu.Ptr{1: l.IDs, 2: l.Table},
		n: [opSizes]int{1: l.Vocab}}, l.Y, l.D, []region{p.row(l.Table, l.Vocab*l.D)})
}

func (p *program) rmsNorm(l norm.RMSNorm) error {
	if !p.typed(l.Type, l.D, l.Y, l.Sum, l.X, l.Residual) || l.Y8 != 0 ||
		l.D > rowPacks*threads*kernel.Vector(l.Type) || l.Rows > 1 && l.Residual != 0 {
		return errUnsupported
	}

	n := l.Rows * l.D
	reads, first := p.operand(l.X, n, flagFirstHeld)
	more, second := p.operand(l.Residual, n, flagSecondHeld)
	o := op{kind: opRMSNorm, flags: first | second, n: [opSizes]int{1: l.D}, f: l.Eps}
	if w, ok := p.plusOne[l.W]; ok {
		l.W, o.flags = w, o.flags|flagPlusOne
	}

	o.p = [opPointers]gpu.Ptr{1: l.X, 2: l.Residual, 3: l.W, 4: l.Sum}
	var sum []region
	if l.Sum != 0 {
		sum = []region{p.row(l.Sum, n)}
	}

	return p.vector(o, l.Y, n, append(reads, more...), sum...)
}

func (p *program) layerNorm(l norm.LayerNorm) error {
	if !p.typed(l.Type, l.D, l.Y, l.X) || l.Rows != 1 ||
		l.D > rowPacks*threads*kernel.Vector(l.Type) {
		return errUnsupported
	}
	reads, flags := p.operand(l.X, l.D, flagFirstHeld)
	return p.vector(op{kind: opLayerNorm, flags: flags, p: [opPointers]gpu.Ptr{1: l.X, 3: l.W, 5: l.B},
		n: [opSizes]int{1: l.D}, f: l.Eps}, l.Y, l.D, reads)
}

func (p *program) unary(l elementwise.Unary) error {
	kind, ok := map[elementwise.UnaryOp]int{elementwise.GELU: opGELU,
		elementwise.MulScalar: opMulScalar, elementwise.AddScalar: opAddScalar}[l.Op]
	if !ok || !p.typed(l.Type, l.N, l.Y, l.X) {
		return errUnsupported
	}
	reads, flags := p.operand(l.X, l.N, flagFirstHeld)
	return p.vector(op{kind: kind, flags: flags, p: [opPointers]gpu.Ptr{1: l.X}, f: l.P}, l.Y, l.N,
		reads)
}

func (p *program) binary(l elementwise.Binary) error {
	full := func(o elementwise.Operand) bool {
		return o.Repeat <= 1 && (o.Period == 0 || o.Period == l.N)
	}
	if l.Op != elementwise.Add || !p.typed(l.Type, l.N, l.Y, l.A.Ptr, l.B.Ptr) || !full(l.A) ||
		!full(l.B) {
		return errUnsupported
	}
	reads, first := p.operand(l.A.Ptr, l.N, flagFirstHeld)
	more, second := p.operand(l.B.Ptr, l.N, flagSecondHeld)
	return p.vector(op{kind: opAdd, flags: first | second, p: [opPointers]gpu.Ptr{1: l.A.Ptr,
		2: l.B.Ptr}}, l.Y, l.N, append(reads, more...))
}
