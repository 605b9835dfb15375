package kernels

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// ErrKasminaKind is what [KasminaState.Encode] fails with for a kind of blueprint that the kernels do not know.
var ErrKasminaKind = errors.New("the kind has no kernel")

// kasminaKinds are Residual, AttentionGate, MLPExpansion and ConvFilter.
const kasminaKinds = 4

// KasminaStability is what the kernels do about extreme inputs.
type KasminaStability int

// The stability modes. Strict zeroes what is smaller than Eps and clamps to each seed's limits; Adaptive evaluates what is
// larger than 10⁶ scaled down by a power of two.
const (
	KasminaFast KasminaStability = iota
	KasminaStrict
	KasminaAdaptive
)

// KasminaReduction is how the figures of rows become those of a seed.
type KasminaReduction int

// The reductions, in the order of kasmina_rows.cu: exact figures over all elements, the rows' average, the rows' largest.
const (
	KasminaExact KasminaReduction = iota
	KasminaMean
	KasminaMax
	kasminaReductions
)

// The rows of the arrays that figures are left in.
const (
	KasminaHealth          = 0 // six: variance, mean, min, max, dead ratio, signal-to-noise ratio
	KasminaMoments         = 6 // mean and variance of all finite elements, whatever the reduction
	KasminaForwardFigures  = 8
	KasminaGradient        = 0 // three: norm, variance, largest magnitude
	KasminaNorms           = 3 // mean and variance of the rows' norms, and the number of rows with a finite element
	KasminaBackwardFigures = 6
	KasminaBins            = 40 // of a histogram; see kasmina_rows.cu
)

// KasminaSeed is what a pass needs to know of a seed. Slot 0, or neither Blend nor Learn, makes it one that only watches.
type KasminaSeed struct {
	Kind         uint8
	Slot         uint16
	Blend, Learn bool
	Alpha        float32 // of the output; 1 for one that learns without blending
	Low, High    float32 // clamp limits of the strict mode
	Limit        float32 // largest norm of a row's gradient
}

// KasminaState is a lattice on the device: one array a field, one behind the other.
type KasminaState struct {
	Ptr          driver.Ptr
	Seeds, Slots int
}

// The fields' arrays have Seeds words, up to the last, order; heads, of Slots + 1 words, comes before it.
const kasminaFields = 5

// Bytes is the size of the state.
func (k KasminaState) Bytes() int { return 4 * (kasminaFields*k.Seeds + k.Slots + 1 + k.Seeds) }

func (k KasminaState) field(i int) driver.Ptr { return k.Ptr.Offset(4 * i * k.Seeds) }
func (k KasminaState) heads() driver.Ptr      { return k.field(kasminaFields) }
func (k KasminaState) order() driver.Ptr      { return k.heads().Offset(4 * (k.Slots + 1)) }

// Encode writes the seeds as the state's bytes. It fails, and names the seed, for a kind without a kernel (the error wraps
// [ErrKasminaKind]) and for a slot that does not exist.
func (k KasminaState) Encode(dst []byte, seed func(i int) KasminaSeed) error {
	words := driver.View[uint32](dst[:k.Bytes()])
	field := func(i int) []uint32 { return words[i*k.Seeds:][:k.Seeds] }
	heads := words[kasminaFields*k.Seeds:][:k.Slots+1]
	order := words[kasminaFields*k.Seeds+k.Slots+1:]
	clear(heads)
	clear(order)
	for i := range k.Seeds {
		s := seed(i)
		for f, v := range [...]float32{s.Alpha, s.Low, s.High, s.Limit} {
			field(f + 1)[i] = math.Float32bits(v)
		}
		if field(0)[i] = 0; s.Slot == 0 || !s.Blend && !s.Learn {
			continue
		}
		if s.Kind >= kasminaKinds {
			return fmt.Errorf("seed %d has kind %d: %w", i, s.Kind, ErrKasminaKind)
		}
		if int(s.Slot) >= k.Slots {
			return fmt.Errorf("seed %d has slot %d, but there are %d slots", i, s.Slot, k.Slots)
		}
		field(0)[i] = uint32(s.Kind) | bit(s.Blend)<<8 | bit(s.Learn)<<9 | uint32(s.Slot)<<16
		if s.Learn {
			heads[s.Slot]++
		}
	}
	// A counting sort: heads holds where each slot's seeds begin once they have been placed from the last to the first.
	sum := uint32(0)
	for i := range heads {
		sum += heads[i]
		heads[i] = sum
	}
	for i := k.Seeds - 1; i >= 0; i-- {
		if w := field(0)[i]; w>>9&1 != 0 {
			heads[w>>16]--
			order[heads[w>>16]] = uint32(i)
		}
	}
	return nil
}

func bit(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// KasminaLayer is a layer: X [Rows, Seeds·Chunk] of the given type, Weights [Slots, Chunk] and Scales [Slots] of float32,
// with Seeds and Slots those of the state.
type KasminaLayer struct {
	X, Weights, Scales driver.Ptr
	State              KasminaState
	Rows, Chunk        int
	Eps                float64
	Stability          KasminaStability
	Type               driver.DType
}

// KasminaForward computes Y = X + α(t(X) − X) for seeds that blend and Y = X for the others, and the figures of X.
type KasminaForward struct {
	KasminaLayer
	Y         driver.Ptr
	Telemetry bool // else only Bad is counted
	Reduction KasminaReduction
	Figures   driver.Ptr // [KasminaForwardFigures, Seeds] of float32
	Bad       driver.Ptr // [Seeds] of uint32: elements that are NaN or Inf are added to it
	Histogram driver.Ptr // [Seeds, KasminaBins] of uint32, or null
	Workspace driver.Ptr // of [Kernels.KasminaForwardWorkspace] bytes
}

// KasminaBackward computes the gradients of X, Weights and Scales from G, that of Y, and the figures of G. DWeights and
// DScales of slots of no seed that learns become 0.
type KasminaBackward struct {
	KasminaLayer
	DX, DWeights, DScales, G driver.Ptr
	Clip                     bool // by the seeds' limits
	Telemetry                bool
	Reduction                KasminaReduction
	Figures                  driver.Ptr // [KasminaBackwardFigures, Seeds] of float32
	Bad, Clipped             driver.Ptr // [Seeds] of uint32: NaN and Inf, and rows clipped, are added to them
	Workspace                driver.Ptr // of [Kernels.KasminaBackwardWorkspace] bytes
}

// What kasmina.cu and kasmina_backward.cu leave in partials, and RowPartial of kasmina_rows.cu in bytes.
const (
	kasminaForwardPartials  = 7
	kasminaBackwardPartials = 9
	kasminaRowPartial       = 72
	kasminaThreads          = 256
	kasminaBlocks           = 4 // a multiprocessor at most
	kasminaMergeThreads     = 512
	kasminaRowBlocks        = 128 // of kasmina_rows.cu at most
)

// kasminaGrid is how a layer is cut up for a launch.
type kasminaGrid struct {
	shape        string // of FOR_SHAPES in kasmina.cuh
	perThread    int    // columns
	units        int
	share        int // threads that share a chunk, if a power of two within a warp, else 0
	tiles        int // blocks for the columns of a row
	across, down int // threads of a block
	rowBlocks    int
	rowLanes     int // of kasmina_rows.cu: lanes that share a row of a chunk
	rowTiles     int
	rowParts     int
}

func (g kasminaGrid) whole() bool { return g.shape == "quad" }

// shared is the dynamic shared memory for so many arrays: kStages·kThreads·16 of kasmina.cuh.
func (g kasminaGrid) shared(arrays int) int {
	if g.perThread == 1 {
		return 0
	}
	return arrays * 8 * kasminaThreads * 16
}
func (g kasminaGrid) lanes() int { return g.rowBlocks * g.down }

// kasminaGrid cuts up a layer with at most so many blocks in flight.
func (k *Kernels) kasminaGrid(l KasminaLayer, blocks int, aligned bool) kasminaGrid {
	d, n := l.State.Seeds*l.Chunk, vector(l.Type)
	g := kasminaGrid{shape: "single", perThread: 1, units: d}
	switch {
	case aligned && l.Chunk == 4 && d%n == 0:
		g.shape, g.perThread, g.units = "quad", n, l.State.Seeds
	case aligned && l.Chunk%n == 0:
		g.shape, g.perThread, g.units = "part", n, d/n
	}
	if g.share = max(1, l.Chunk/g.perThread); g.share > 32 || g.share&(g.share-1) != 0 {
		g.share = 0
	}
	threads := ceilDiv(d, g.perThread)
	g.across = min(kasminaThreads, powerOfTwo(threads))
	g.down = kasminaThreads / g.across
	g.tiles = ceilDiv(threads, g.across)
	g.rowBlocks = min(max(1, blocks/g.tiles), ceilDiv(l.Rows, g.down), 1<<16-1)
	g.rowLanes = min(32, powerOfTwo(l.Chunk/2+1))
	g.rowTiles = ceilDiv(l.State.Seeds, kasminaThreads/g.rowLanes)
	g.rowParts = min(l.Rows, kasminaRowBlocks, max(1, 8*k.sms/g.rowTiles))
	return g
}

// powerOfTwo is the least that is not less than n.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(max(n, 1)-1)) }

// carve hands out pieces of a workspace.
type carve struct{ at driver.Ptr }

func (c *carve) take(bytes int) driver.Ptr {
	p := c.at
	c.at = c.at.Offset((bytes + 255) / 256 * 256)
	return p
}

// kasminaScratch is the workspace of a pass; what it does not need is null.
type kasminaScratch struct {
	gates, partial, rows, sums, total, scale driver.Ptr
	bytes                                    int
}

func (g kasminaGrid) scratch(l KasminaLayer, at driver.Ptr, backward, clip bool) (s kasminaScratch) {
	c := carve{at}
	if !g.whole() {
		s.gates = c.take(8 * l.State.Slots)
	}
	columns := l.State.Seeds*l.Chunk + 2*g.units
	s.rows = c.take(kasminaRowPartial * g.rowParts * l.State.Seeds)
	if !backward {
		s.partial = c.take(4 * kasminaForwardPartials * g.lanes() * g.units)
	} else {
		s.partial = c.take(4 * kasminaBackwardPartials * g.lanes() * g.units)
		s.sums, s.total = c.take(4*g.lanes()*columns), c.take(4*columns)
		if clip && g.share == 0 {
			s.scale = c.take(4 * l.Rows * l.State.Seeds)
		}
	}
	s.bytes = int(c.at - at)
	return s
}

// KasminaForwardWorkspace is the bytes of workspace that a forward pass takes.
func (k *Kernels) KasminaForwardWorkspace(l KasminaLayer) int {
	return k.kasminaWorkspace(l, false, false)
}

// KasminaBackwardWorkspace is the bytes of workspace that a backward pass takes.
func (k *Kernels) KasminaBackwardWorkspace(l KasminaLayer, clip bool) int {
	return k.kasminaWorkspace(l, true, clip)
}

func (k *Kernels) kasminaWorkspace(l KasminaLayer, backward, clip bool) (bytes int) {
	for _, aligned := range []bool{false, true} {
		g := k.kasminaGrid(l, kasminaBlocks*k.sms, aligned)
		bytes = max(bytes, g.scratch(l, 0, backward, clip).bytes)
	}
	return bytes
}

// check returns the name's ending of the kernels for a layer.
func (l KasminaLayer) check(op string, r KasminaReduction) (suf string, empty bool, err error) {
	if suf, err = suffix(op, l.Type); err != nil {
		return "", false, err
	}
	if l.Stability < KasminaFast || l.Stability > KasminaAdaptive || r < 0 || r >= kasminaReductions {
		return "", false, fmt.Errorf("kernels.%s: there is no stability mode %d or no reduction %d", op, l.Stability, r)
	}
	if int64(l.State.Seeds)*int64(l.Chunk) > math.MaxInt32/4 {
		return "", false, fmt.Errorf("kernels.%s: %d seeds of %d columns are too many", op, l.State.Seeds, l.Chunk)
	}
	empty, err = checkSizes(op, l.Rows, l.State.Seeds, l.Chunk, l.State.Slots)
	return suf, empty, err
}

// mode is the variant of a kernel, as kasmina.cuh has it.
func (l KasminaLayer) mode(telemetry bool) string {
	switch {
	case l.Stability == KasminaStrict:
		return "strict"
	case telemetry:
		return "watch"
	}
	return "quiet"
}

// bytes is Layer of kasmina.cuh.
func (l KasminaLayer) bytes(softmax driver.Ptr, clip bool) []byte {
	large := float32(math.MaxFloat32)
	if l.Stability == KasminaAdaptive {
		large = 1e6
	}
	var limit driver.Ptr
	if clip {
		limit = l.State.field(4)
	}
	a := args().Ptr(l.State.field(0)).Ptr(l.State.field(1)).Ptr(l.State.field(2)).Ptr(l.State.field(3)).Ptr(limit).
		Ptr(l.Weights).Ptr(l.Scales).Ptr(softmax).Int64(int64(l.Rows)).Int32(l.State.Seeds).Int32(l.Chunk).
		Float32(float32(l.Eps)).Float32(large)
	return a.Packed()
}

// kasminaPass is a pass about to be launched.
type kasminaPass struct {
	*Kernels
	driver.Stream
	KasminaLayer
	kasminaGrid
	kasminaScratch
	suf    string
	memory int // dynamic and shared
	layer  []byte
}

// kasminaPass prepares the launch of the kernel that the name begins with.
func (k *Kernels) kasminaPass(s driver.Stream, l KasminaLayer, unit, name, suf string, ok, backward, clip bool, work driver.Ptr) (*kasminaPass, string, error) {
	p := &kasminaPass{Kernels: k, Stream: s, KasminaLayer: l, suf: suf}
	name += "_" + k.kasminaGrid(l, 1, ok).shape + suf
	arrays := 1 + int(bit(backward))
	blocks, err := k.resident(unit, name, kasminaThreads, k.kasminaGrid(l, 1, ok).shared(arrays))
	if err != nil {
		return nil, "", err
	}
	p.kasminaGrid = k.kasminaGrid(l, min(blocks, kasminaBlocks*k.sms), ok)
	p.memory = p.shared(arrays)
	p.kasminaScratch = p.kasminaGrid.scratch(l, work, backward, clip)
	p.layer = l.bytes(p.gates, clip)
	if p.gates != 0 {
		a := args().Ptr(p.gates).Ptr(l.Weights).Int32(l.State.Slots).Int32(l.Chunk)
		err = k.launch(s, "kasmina", "kasmina_softmax", line(ceilDiv(l.State.Slots, 8), 256), a)
	}
	return p, name, err
}

func (p *kasminaPass) args() *driver.Args { return args().Struct(p.layer, 8) }

// main launches a kernel over the whole layer.
func (p *kasminaPass) main(unit, name string, a *driver.Args) error {
	return p.launch(p.Stream, unit, name, driver.LaunchConfig{
		Grid:   driver.Dim{X: p.tiles, Y: p.rowBlocks},
		Block:  driver.Dim{X: p.across, Y: p.down},
		Shared: p.memory,
	}, a)
}

// merge launches a kernel that merges partials: each seed's by so many threads that none has many.
func (p *kasminaPass) merge(unit, name string, figures driver.Ptr, last func(*driver.Args)) error {
	parts := p.lanes() * p.units / p.State.Seeds
	down := min(max(powerOfTwo(parts/2), kasminaMergeThreads/16), kasminaMergeThreads)
	across := kasminaMergeThreads / down
	a := args().Ptr(figures).Ptr(p.partial).Int32(p.lanes()).Int32(p.units).Int32(p.State.Seeds)
	last(a)
	return p.launch(p.Stream, unit, name, driver.LaunchConfig{
		Grid:  driver.Dim{X: ceilDiv(p.State.Seeds, across)},
		Block: driver.Dim{X: across, Y: down},
	}, a)
}

// measureRows launches a kernel of kasmina_rows.cu.
func (p *kasminaPass) measureRows(name string, a *driver.Args, r KasminaReduction) error {
	return p.launch(p.Stream, "kasmina_rows", name+p.suf, driver.LaunchConfig{
		Grid:  driver.Dim{X: p.rowTiles, Y: p.rowParts},
		Block: driver.Dim{X: kasminaThreads},
	}, a.Int32(p.rowLanes).Int32(int(r)))
}

func (p *kasminaPass) mergeRows(figures driver.Ptr, r KasminaReduction, count, norms int) error {
	a := args().Ptr(figures).Ptr(p.rows).Int32(p.rowParts).Int32(p.State.Seeds).Int32(int(r)).Int32(count).Int32(norms)
	return p.launch(p.Stream, "kasmina_rows", "kasmina_rows_merge", line(ceilDiv(p.State.Seeds, 128), 128), a)
}

// KasminaForward launches a kernel for Y and partial figures, and with telemetry one that merges them; a tiny one before
// them where a chunk does not lie within a thread.
func (k *Kernels) KasminaForward(s driver.Stream, f KasminaForward) error {
	suf, empty, err := f.check("KasminaForward", f.Reduction)
	if empty || err != nil {
		return err
	}
	p, name, err := k.kasminaPass(s, f.KasminaLayer, "kasmina", "kasmina_forward_"+f.mode(f.Telemetry), suf, aligned(f.X, f.Y), false, false, f.Workspace)
	if err != nil {
		return err
	}
	if !f.Telemetry {
		p.partial = 0
	}
	if err := p.main("kasmina", name, p.args().Ptr(f.Y).Ptr(f.X).Ptr(p.partial).Ptr(f.Bad)); err != nil {
		return err
	}
	if f.Histogram != 0 {
		if err := p.histogram(f.Histogram); err != nil {
			return err
		}
	}
	if !f.Telemetry {
		return nil
	}
	if err := p.merge("kasmina", "kasmina_merge", f.Figures, func(a *driver.Args) { a.Float32(float32(f.Eps)) }); err != nil {
		return err
	}
	if f.Reduction == KasminaExact {
		return nil
	}
	if err := p.measureRows("kasmina_rows_health", p.args().Ptr(f.X).Ptr(p.rows), f.Reduction); err != nil {
		return err
	}
	return p.mergeRows(f.Figures, f.Reduction, 6, -1)
}

func (p *kasminaPass) histogram(bins driver.Ptr) error {
	if err := p.ctx.Memset32(bins, 0, KasminaBins*p.State.Seeds, p.Stream); err != nil {
		return err
	}
	tiles := ceilDiv(p.State.Seeds*p.Chunk, 256)
	return p.launch(p.Stream, "kasmina_rows", "kasmina_histogram"+p.suf, driver.LaunchConfig{
		Grid:  driver.Dim{X: tiles, Y: min(p.Rows, max(1, 8*p.sms/tiles))},
		Block: driver.Dim{X: 256},
	}, args().Ptr(bins).Ptr(p.X).Int64(int64(p.Rows)).Int32(p.State.Seeds).Int32(p.Chunk))
}

// KasminaBackward launches a kernel for DX and partial sums, and three small ones that add those up: over rows, over the
// seeds of a slot, and the figures. Where a chunk's threads are not a power of two within a warp, norms and clipping take one
// more pass over G.
func (k *Kernels) KasminaBackward(s driver.Stream, b KasminaBackward) error {
	suf, empty, err := b.check("KasminaBackward", b.Reduction)
	if err != nil {
		return err
	}
	if empty {
		return errors.Join(k.Fill(s, b.DWeights, 0, b.State.Slots*b.Chunk, driver.Float32),
			k.Fill(s, b.DScales, 0, b.State.Slots, driver.Float32))
	}
	p, name, err := k.kasminaPass(s, b.KasminaLayer, "kasmina_backward", "kasmina_backward_"+b.mode(b.Telemetry), suf, aligned(b.DX, b.G, b.X), true, b.Clip, b.Workspace)
	if err != nil {
		return err
	}
	byRow := b.Telemetry && (b.Reduction != KasminaExact || p.share == 0) || p.scale != 0
	if byRow {
		l := args().Struct(b.KasminaLayer.bytes(p.gates, p.scale != 0), 8)
		if err := p.measureRows("kasmina_rows_gradient", l.Ptr(b.G).Ptr(p.rows).Ptr(p.scale).Ptr(b.Clipped), b.Reduction); err != nil {
			return err
		}
	}
	if !b.Telemetry {
		p.partial = 0
	}
	a := p.args().Ptr(b.DX).Ptr(b.G).Ptr(b.X).Int32(p.share).Ptr(p.scale).Ptr(p.sums).Ptr(p.partial).Ptr(b.Bad).Ptr(b.Clipped)
	if err := p.main("kasmina_backward", name, a); err != nil {
		return err
	}
	if err := p.addUp(b); err != nil || !b.Telemetry {
		return err
	}
	if err := p.merge("kasmina_backward", "kasmina_gradient_merge", b.Figures, func(a *driver.Args) { a.Int32(int(bit(p.share > 0))) }); err != nil {
		return err
	}
	if !byRow {
		return nil
	}
	norms := KasminaNorms
	if p.share > 0 {
		norms = -1
	}
	return p.mergeRows(b.Figures, b.Reduction, 3, norms)
}

// addUp makes the gradients of weights and scales of the lanes' sums.
func (p *kasminaPass) addUp(b KasminaBackward) error {
	columns := p.State.Seeds*p.Chunk + 2*p.units
	err := p.launch(p.Stream, "kasmina_backward", "kasmina_total", driver.LaunchConfig{
		Grid:  driver.Dim{X: ceilDiv(columns, 32)},
		Block: driver.Dim{X: 32, Y: 32},
	}, args().Ptr(p.total).Ptr(p.sums).Int32(p.lanes()).Int64(int64(columns)))
	if err != nil {
		return err
	}
	down := min(max(powerOfTwo(p.State.Seeds/p.State.Slots), 4), 32)
	return p.launch(p.Stream, "kasmina_backward", "kasmina_slots", driver.LaunchConfig{
		Grid:  driver.Dim{X: p.State.Slots, Y: ceilDiv(p.Chunk, 32)},
		Block: driver.Dim{X: 32, Y: down},
	}, p.args().Ptr(b.DWeights).Ptr(b.DScales).Ptr(p.total).Ptr(p.State.heads()).Ptr(p.State.order()).Int32(p.units))
}
