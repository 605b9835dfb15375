// Package kasmina has the kernels of a Kasmina layer. [Forward] and [Backward] evaluate the seeds
// of a lattice, which is stored on the device as a [State], and measure their figures. NOTES.md
// explains the kernels' structure and performance.
package kasmina

import (
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/seed"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// KindError is the error that [State.Encode] returns for a kind of blueprint that has no kernel.
type KindError struct {
	Seed int
	Kind blueprints.Kind
}

func (e *KindError) Error() string {
	return fmt.Sprintf("seed %d has kind %d: the kind has no kernel", e.Seed, e.Kind)
}

// kinds is the number of pointwise kinds: Residual, AttentionGate, MLPExpansion and ConvFilter.
const kinds = 4

// Rows of the figures arrays, and their sizes.
const (
	Health         = 0 // six rows: variance, mean, min, max, dead ratio, signal-to-noise ratio
	Moments        = 6 // mean and variance of all finite elements, whatever the reduction
	ForwardFigures = 8
	Gradient       = 0 // three rows: norm, variance, largest magnitude
	// mean and variance of the norms of rows, and the number of rows with a finite element
	Norms           = 3
	BackwardFigures = 6
	Bins            = 40 // bins of a histogram; see kasmina_rows.cu
)

// State is a lattice of seeds on the device, stored as one array per field, consecutively. In a
// wide state, slots have more weights than a chunk has features, and the list of seeds that mix
// features follows the arrays.
type State struct {
	Ptr          gpu.Ptr
	Seeds, Slots int
	Wide         bool
}

// The field arrays have Seeds words each. The array heads, with Slots + 1 words, and the array
// order, with Seeds words, follow them. The list starts with the number of its seeds;
// kasmina_capacity.cu describes the rest.
const fieldCount = 5

// Bytes returns the size of the state in bytes.
func (k State) Bytes() int {
	bytes := int(k.List() - k.Ptr)
	if k.Wide {
		bytes += 4 * (1 + 2*k.Seeds + k.Slots + 1 + k.Seeds)
	}
	return bytes
}

func (k State) field(i int) gpu.Ptr { return k.Ptr.Offset(4 * i * k.Seeds) }
func (k State) heads() gpu.Ptr      { return k.field(fieldCount) }
func (k State) order() gpu.Ptr      { return k.heads().Offset(4 * (k.Slots + 1)) }

// List returns the address of the list of seeds that mix features.
func (k State) List() gpu.Ptr { return k.order().Offset(4 * k.Seeds) }

// Mixes reports whether a seed's blueprint mixes the features of a chunk. Such seeds are dormant in
// the field arrays and are listed separately. Only wide slots have room for their weights.
func Mixes(s seed.Seed) bool {
	return s.Slot != 0 && (s.Blend || s.Learn) && (s.Kind == blueprints.LowRank ||
		s.Kind == blueprints.ChunkMLP)
}

// Encode writes the seeds to dst in the state's format. It returns a [*KindError] for a kind
// without a kernel, and an error that names the seed for a slot that does not exist.
func (k State) Encode(dst []byte, at func(i int) seed.Seed) error {
	words := gpu.View[uint32](dst[:k.Bytes()])
	clear(words)
	take := func(n int) (part []uint32) {
		part, words = words[:n], words[n:]
		return part
	}
	var fields [fieldCount][]uint32
	for f := range fields {
		fields[f] = take(k.Seeds)
	}

	heads, order := take(k.Slots+1), take(k.Seeds)
	mixing := 0
	for i := range k.Seeds {
		s := at(i)
		for f, v := range [...]float64{float64(s.Alpha), s.Low, s.High, s.Limit} {
			fields[f+1][i] = math.Float32bits(float32(v))
		}
		switch {
		case s.Slot == 0 || !s.Blend && !s.Learn:
		case s.Kind >= kinds && !Mixes(s):
			return &KindError{i, s.Kind}
		case int(s.Slot) >= k.Slots:
			return fmt.Errorf("seed %d has slot %d, but there are %d slots", i, s.Slot, k.Slots)
		case !Mixes(s):
			fields[0][i] = word(s)
		case k.Wide:
			s.Learn = s.Learn && s.Alpha != 0 // with α = 0 the weights have no gradient
			words[1+mixing], words[1+k.Seeds+mixing] = uint32(i), word(s)
			mixing++
		}
	}

	sortBySlot(heads, order, fields[0])
	if k.Wide {
		take(1)[0] = uint32(mixing)
		states := take(2 * k.Seeds)[k.Seeds:]
		sortBySlot(take(k.Slots+1), words, states[:mixing])
	}

	return nil
}

// word encodes a seed that is not dormant for the kernels.
func word(s seed.Seed) uint32 {
	return uint32(s.Kind) | kernel.Bit(s.Blend)<<8 | kernel.Bit(s.Learn)<<9 | uint32(s.Slot)<<16
}

// sortBySlot sorts the indices of the words that learn by slot, so that the seeds of slot s start
// at order[heads[s]]. heads and order must be zero.
func sortBySlot(heads, order, words []uint32) {
	learns := func(w uint32) bool { return w>>9&1 != 0 }
	for _, w := range words {
		if learns(w) {
			heads[w>>16]++
		}
	}

	sum := uint32(0)
	// First set heads to the end of each slot. Inserting the indices in reverse then moves it to
	// the start.
	for i := range heads {
		sum += heads[i]
		heads[i] = sum
	}

	for i, w := range slices.Backward(words) {
		if learns(w) {
			heads[w>>16]--
			order[heads[w>>16]] = uint32(i)
		}
	}
}

// Layer describes a Kasmina layer: X [Rows, Seeds·Chunk] of the given type, and float32 Weights
// [Slots, Width] and Scales [Slots], with Seeds and Slots as in State. Width exceeds Chunk if the
// state is wide; otherwise it is ignored and Chunk is used.
type Layer struct {
	X, Weights, Scales gpu.Ptr
	State              State
	Rows, Chunk, Width int
	Eps                float64
	Stability          seed.Stability
	Type               gpu.DType
}

// Forward computes Y = X + α(t(X) − X) for seeds that blend and Y = X for other seeds, and the
// figures of X.
type Forward struct {
	Layer
	Y         gpu.Ptr
	Telemetry bool // if false, only Bad is updated
	Reduction seed.Reduction
	Figures   gpu.Ptr // [ForwardFigures, Seeds] of float32
	Bad       gpu.Ptr // [Seeds] of uint32; the number of NaN and Inf elements is added
	Histogram gpu.Ptr // [Seeds, Bins] of uint32, or null
	Workspace gpu.Ptr // WorkspaceBytes bytes
}

// Backward computes the gradients of X, Weights and Scales from the gradient G of Y, and the
// figures of G. DWeights and DScales are set to 0 for slots without a learning seed.
//
// DX may be G if [Layer.InPlace] holds and all arrays are aligned to 16 bytes. Elements that would
// not change are then not written.
type Backward struct {
	Layer
	DX, DWeights, DScales, G gpu.Ptr
	Clip                     bool // clip gradients to the seeds' limits
	Telemetry                bool
	Reduction                seed.Reduction
	Figures                  gpu.Ptr // [BackwardFigures, Seeds] of float32
	// [Seeds] of uint32; the numbers of NaN and Inf elements, and of clipped rows, are added
	Bad, Clipped gpu.Ptr
	Workspace    gpu.Ptr // WorkspaceBytes bytes
}

// InPlace reports whether the gradient of X can overwrite the gradient of Y. This is safe if the
// threads that share a chunk, with 16 bytes of a row each, belong to one warp: they have then all
// read a row before any thread writes to it.
func (l Layer) InPlace() bool {
	n := kernel.Vector(l.Type)
	return l.Chunk == 4 && l.State.Seeds*l.Chunk%n == 0 || l.Chunk%n == 0 && l.Chunk/n <= 32
}

// mode returns the name of the kernel's Mode in kasmina.cuh.
func (l Layer) mode(telemetry bool) string {
	switch {
	case l.Stability == seed.Strict:
		return "strict"
	case telemetry:
		return "watch"
	}
	return "quiet"
}

// fields returns a Layer of kasmina.cuh.
func (l Layer) fields(softmax gpu.Ptr, clip bool) kernel.Struct {
	limit, large := l.bounds(clip)
	return kernel.Struct{l.State.field(0), l.State.field(1), l.State.field(2), l.State.field(3),
		limit, l.Weights, l.Scales, softmax, int64(l.Rows), l.State.Seeds, l.Chunk, l.Eps, large}
}

// bounds returns the limits of gradient norms, or null without clipping, and the magnitude above
// which x is scaled down.
func (l Layer) bounds(clip bool) (limit gpu.Ptr, large float64) {
	large = math.MaxFloat32
	if l.Stability == seed.Adaptive {
		large = 1e6
	}
	if clip {
		limit = l.State.field(4)
	}
	return limit, large
}

// pass is a forward or backward pass during its launch.
type pass struct {
	*kernel.Queue
	Layer
	grid
	scratch
	mixing
	unit, name string // of the main kernel
	layer      kernel.Struct
}

// newPass prepares the launch of a pass's main kernel. arrays lists the pass's arrays other than X.
func newPass(q *kernel.Queue, l Layer, use usage, work gpu.Ptr, arrays ...gpu.Ptr) *pass {
	if l.Rows > math.MaxInt32 || l.State.Seeds*l.Chunk > math.MaxInt32/4 { // the kernels count in 32 bits
		q.Err = fmt.Errorf("kernels.Kasmina: %d rows of %d seeds of %d columns are too many",
			l.Rows, l.State.Seeds, l.Chunk)
	}

	p := &pass{Queue: q, Layer: l, unit: "kasmina", name: "kasmina_forward_"}
	if use.backward {
		p.unit, p.name = "kasmina_backward", "kasmina_backward_"
	}

	g := newGrid(q.Info, l, kernel.Aligned(append(arrays, l.X)...), use)
	p.name += l.mode(use.telemetry) + "_" + g.shape + kernel.Suffix(l.Type)
	c := kernel.Line(1, blockThreads)
	c.Shared = g.shared()
	p.grid = g.divideRows(l, min(q.Resident(p.unit, p.name, c), maxBlocks*q.Info.SMs))
	from := kernel.Carve{At: work}
	p.scratch = p.grid.scratch(l, &from)
	if l.State.Wide {
		p.narrow(&from)
	}

	p.layer = p.fields(p.gates, use.clip)
	if p.gates != 0 {
		p.Run("kasmina", "kasmina_softmax", kernel.Cover(l.State.Slots, 8, 256),
			p.gates, p.Weights, l.State.Slots, l.Chunk)
	}

	return p
}

// main launches the pass's main kernel over the whole layer. The kernel's first arguments are the
// layer, the Share, and two arrays. It overlaps with the preceding kernel and waits for it itself.
func (p *pass) main(y, x gpu.Ptr, args ...any) {
	c := kernel.Grid(p.tiles, p.rowParts(), p.across, p.down)
	c.Shared, c.Overlap = p.shared(), true
	p.Run(p.unit, p.name, c, append([]any{p.layer, p.share(), y, x}, args...)...)
}

// measureRows launches a kernel of kasmina_rows.cu.
func (p *pass) measureRows(name string, r seed.Reduction, args ...any) {
	p.Run("kasmina_rows", name+kernel.Suffix(p.Type),
		kernel.Grid(p.rows.tiles, p.rows.blocks, blockThreads, 1),
		append(args, p.rows.across, p.rows.lanes, int(r))...)
}

func (p *pass) mergeRows(figures gpu.Ptr, r seed.Reduction, count, norms int) {
	p.Run("kasmina_rows", "kasmina_rows_merge", kernel.Cover(p.State.Seeds, 4, 128), figures,
		p.partial, p.rows.parts(), p.State.Seeds, int(r), count, norms)
}

// merging returns the number of threads that merge the records of a seed, so that no thread has
// many.
func (p *pass) merging() int {
	records := 4 // limit per thread
	if p.use.backward {
		records = 2
	}
	return min(max(powerOfTwo(p.rowParts()*p.units/p.State.Seeds/records), 8), mergeThreads)
}

// mergers returns the number of blocks that merge records.
func (p *pass) mergers() int {
	return kernel.CeilDiv(p.State.Seeds, mergeThreads/p.merging())
}

// finish launches a kernel that combines the results of a pass's blocks. It overlaps with the
// preceding kernel on GPUs that support this, and waits for it itself.
func (p *pass) finish(name string, c gpu.LaunchConfig, args ...any) {
	c.Overlap = true
	p.Run(p.unit, name, c, kernel.Struct(args))
}

// sumUp computes the gradients of slots, and figures, from the sums and records of a backward pass.
// The first kernel combines the blocks, and the second one the seeds of each slot.
func (p *pass) sumUp(dweights, dscales, figures gpu.Ptr) {
	st, seeds := p.State, p.State.Seeds
	columns := seeds*p.Chunk + 2*p.units
	adding, merging := kernel.CeilDiv(columns, 32), 0
	if p.use.telemetry {
		merging = p.mergers()
	}

	p.finish("kasmina_gather", kernel.Line(adding+merging, mergeThreads), p.total, p.sums,
		figures, p.records, int64(columns), adding, p.rowParts(), p.units, seeds, p.merging(),
		p.sharing > 0)
	p.finish("kasmina_slots", kernel.Grid(st.Slots, kernel.CeilDiv(p.Chunk, 32), 32,
		min(max(powerOfTwo(seeds/st.Slots), 4), 32)), st.field(0), st.field(1), p.Weights, p.Scales,
		p.total, st.heads(), st.order(), dweights, dscales, seeds, p.Chunk, p.units)
}

// Launch enqueues a kernel that computes Y and records for the figures and, with telemetry, another
// kernel that merges the records. If a chunk takes more than 32 threads, a small kernel runs first
// to prepare the softmax. If slots are wide, weights are first copied to a compact array, and a
// kernel for the kinds that mix features runs last.
func (f Forward) Launch(q *kernel.Queue) {
	p := newPass(q, f.Layer, usage{telemetry: f.Telemetry}, f.Workspace, f.Y)
	if q.Err != nil {
		return
	}

	p.main(f.Y, f.X, p.records, f.Bad)
	if f.Telemetry {
		p.finish("kasmina_merge", kernel.Line(p.mergers(), mergeThreads), f.Figures,
			p.records, p.rowParts(), p.units, p.State.Seeds, p.merging(), p.Eps)
	}

	if f.Histogram != 0 {
		p.Fill(f.Histogram, 0, 4*Bins*p.State.Seeds)
		tiles := kernel.CeilDiv(p.State.Seeds*p.Chunk, 256)
		p.Run("kasmina_rows", "kasmina_histogram"+kernel.Suffix(p.Type),
			kernel.Grid(tiles, min(p.Rows, max(1, 8*p.Info.SMs/tiles)), 256, 1), f.Histogram, p.X,
			int64(p.Rows), p.State.Seeds, p.Chunk)
	}

	if f.Telemetry && f.Reduction != seed.Exact {
		p.measureRows("kasmina_rows_health", f.Reduction, p.layer, f.X, p.partial)
		p.mergeRows(f.Figures, f.Reduction, 6, -1)
	}

	if p.m > 0 {
		p.mix("kasmina_mix", p.mixFields(f.Weights, kernel.Packed(f.Type, f.Chunk, f.X, f.Y),
			false), f.Y, f.X)
	}
}

// Launch enqueues a kernel that computes DX, sums over rows, and records for the figures. A second
// kernel combines the blocks, and a third one the seeds of each slot. If a chunk's threads don't
// fit in a warp, norms and clipping take an additional pass over G. If slots are wide, the
// additional kernels of Forward run too, and then a kernel that adds up the gradients of slots.
func (b Backward) Launch(q *kernel.Queue) {
	use := usage{true, b.Telemetry, b.Clip, b.DX == b.G}
	p := newPass(q, b.Layer, use, b.Workspace, b.DX, b.G)
	if q.Err != nil {
		return
	}

	byRow := b.Telemetry && (b.Reduction != seed.Exact || p.sharing == 0) || p.scale != 0
	if byRow {
		p.measureRows("kasmina_rows_gradient", b.Reduction, p.fields(p.gates, p.scale != 0), b.G,
			p.partial, p.scale, b.Clipped)
	}

	p.main(b.DX, b.G, b.X, p.sharing, p.scale, p.sums, p.records, b.Bad, b.Clipped)
	dweights, dscales := b.DWeights, b.DScales
	if b.State.Wide {
		dweights, dscales = p.dweights, p.dscales
	}

	p.sumUp(dweights, dscales, b.Figures)
	if byRow && b.Telemetry {
		norms := Norms
		if p.sharing > 0 {
			norms = -1
		}
		p.mergeRows(b.Figures, b.Reduction, 3, norms)
	}

	if b.State.Wide {
		layer := p.mixFields(b.Weights, kernel.Packed(b.Type, b.Chunk, b.X, b.G, b.DX), b.Clip)
		if p.m > 0 {
			p.mix("kasmina_mix_backward", layer, b.DX, b.G, b.X, p.partialWeights, p.partialScales)
		}
		p.Run(mixUnit, "kasmina_mix_slots",
			kernel.Grid(b.State.Slots, kernel.CeilDiv(b.Width, mixThreads), mixThreads, 1), layer,
			b.DWeights, b.DScales, dweights, dscales, p.partialWeights, p.partialScales)
	}
}
