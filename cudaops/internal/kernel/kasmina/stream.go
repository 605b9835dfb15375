package kasmina

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Stream is a kernel that stays on the GPU and computes the forward passes of a chain of layers for one
// batch after another, as the host announces them in a ring in pinned memory. It only has to be launched
// again after it has ended. Its results are bit-identical to those of [Forward].
//
// The host writes x of batch k to X and then the batch's [Word] to Entries, at k modulo Depth. Once Done
// there is 2(k + 1), Y and, if requested, Figures are set. If it is 2(k + 1) + 1, Counts are set as well.
// The place may be reused after that.
type Stream struct {
	Layers []Layer // X is ignored; all have the same rows, features and type
	Depth  int     // places in the ring
	First  uint64  // the first batch of this launch
	Idle   time.Duration

	Control gpu.Ptr // pinned; a [StreamControl]
	Entries gpu.Ptr // pinned; Depth words
	Done    gpu.Ptr // pinned; Depth words
	X, Y    gpu.Ptr // Depth batches, BatchBytes apart
	// [ForwardFigures, Seeds] of float32 for each layer, for each place in the ring
	Figures gpu.Ptr
	// pinned; the numbers of NaN and Inf elements, for each seed of each layer and each place in the ring
	Counts gpu.Ptr
	Memory gpu.Ptr // MemoryBytes bytes
}

// StreamControl is Control of kasmina_stream.cu.
type StreamControl struct {
	Consumed uint64 // the first batch that the kernel has not taken, once it has ended
	Ended    uint64 // 0 while the kernel runs
}

// Word returns the entry that announces a batch. With watched, its figures are computed.
func Word(batch uint64, watched bool) uint64 { return 4*(batch+1) + uint64(kernel.Bit(watched)) }

// StopWord returns the entry in place of a batch that makes the kernel end.
func StopWord(batch uint64) uint64 { return 4*(batch+1) + 2 }

const (
	// MaxStreamLayers is the maximum number of layers of a [Stream].
	MaxStreamLayers = 16
	// streamBlocks is the number of blocks that fit a multiprocessor, according to the launch bounds.
	streamBlocks = 2
	// streamSpare is the number of blocks that still fit the GPU while a stream runs.
	streamSpare = 4
)

// streamGrid describes how a stream is divided.
type streamGrid struct {
	grid
	teams, members int
	seeds          int // of all layers
}

// BatchBytes returns the distance from one batch to the next in X and Y.
func (s Stream) BatchBytes() int {
	l := s.Layers[0]
	return kernel.CeilDiv(l.Rows*l.State.Seeds*l.Chunk*l.Type.Size(), 256) * 256
}

// Seeds returns the number of seeds of all layers.
func (s Stream) Seeds() (n int) {
	for _, l := range s.Layers {
		n += l.State.Seeds
	}
	return n
}

// Check returns an error that says why no kernel can compute the stream on a device, or nil.
func (s Stream) Check(d gpu.DeviceInfo) error {
	if len(s.Layers) == 0 || len(s.Layers) > MaxStreamLayers {
		return fmt.Errorf("%d layers, want 1 to %d", len(s.Layers), MaxStreamLayers)
	}

	first := s.Layers[0]
	for i, l := range s.Layers {
		switch {
		case l.Rows != first.Rows || l.State.Seeds*l.Chunk != first.State.Seeds*first.Chunk ||
			l.Type != first.Type:
			return fmt.Errorf("layers 0 and %d differ in rows, features or type", i)
		case l.Rows < 1 || l.State.Seeds*l.Chunk < 1:
			return errors.New("batches are empty")
		case l.Stability == seed.Strict:
			return fmt.Errorf("layer %d is in strict mode, whose limits depend on the preceding batch", i)
		case streamShape(l) != streamShape(first):
			return fmt.Errorf("chunks of %d and %d features take different kernels", first.Chunk, l.Chunk)
		case l.Rows > math.MaxInt32 || l.State.Seeds*l.Chunk > math.MaxInt32/4:
			return errors.New("batches are too large")
		}
	}

	g := s.divide(d, streamBlocks*d.SMs, streamBlocks*d.SMs)
	if g.teams == 0 {
		return fmt.Errorf("a batch of %d rows of %d features takes %d blocks, and at most %d fit the GPU",
			first.Rows, first.State.Seeds*first.Chunk, g.members, streamBlocks*d.SMs-1-streamSpare)
	}

	return nil
}

// streamShape returns the kernel for a layer of aligned batches.
func streamShape(l Layer) string {
	return newGrid(gpu.DeviceInfo{}, l, true, usage{telemetry: true}).shape
}

// divide divides a stream, given how many blocks of an ordinary launch and of the stream's kernel run at
// once. The blocks of a team correspond to the blocks of an ordinary launch with telemetry.
func (s Stream) divide(d gpu.DeviceInfo, ordinary, resident int) (g streamGrid) {
	l := s.Layers[0]
	g.grid = newGrid(d, l, true, usage{telemetry: true}).divideRows(l, min(ordinary, maxBlocks*d.SMs))
	g.members = g.tiles * g.rowParts()
	g.teams = min((resident-1-streamSpare)/g.members, s.Depth)
	g.seeds = s.Seeds()
	return g
}

// streamMemory holds the addresses of a stream's parts of Memory. Those up to end are zero at launch.
type streamMemory struct {
	closing, published, arrived, bad, spoiled, finished, end gpu.Ptr
	scratch, records                                         gpu.Ptr
	softmax                                                  []gpu.Ptr // by layer; null if threads compute it
}

func (s Stream) memory(g streamGrid, c *kernel.Carve) (m streamMemory) {
	m.closing = c.Take(8)
	m.published = c.Take(8 * s.Depth)
	m.arrived = c.Take(4 * g.teams)
	m.bad = c.Take(4 * s.Depth * g.seeds)
	m.spoiled = c.Take(4 * s.Depth)
	m.finished = c.Take(4 * s.Depth)
	m.end = c.At
	m.scratch = c.Take(2 * s.BatchBytes() * g.teams)
	m.records = c.Take(forwardRecord * g.rowParts() * g.units * len(s.Layers) * g.teams)
	for _, l := range s.Layers {
		var gates gpu.Ptr
		if l.Chunk/g.perThread > 32 {
			gates = c.Take(8 * l.State.Slots)
		}
		m.softmax = append(m.softmax, gates)
	}
	return m
}

// MemoryBytes returns the size of Memory.
func (s Stream) MemoryBytes(d gpu.DeviceInfo) (bytes int) {
	// The number of blocks of an ordinary launch depends on how many run at once. Fewer blocks per team
	// allow more teams.
	for blocks := d.SMs; blocks <= maxBlocks*d.SMs; blocks += d.SMs {
		var c kernel.Carve
		s.memory(s.divide(d, blocks, streamBlocks*d.SMs), &c)
		bytes = max(bytes, int(c.At))
	}
	return bytes
}

// sync reports whether a thread reads what other threads have written to the values between layers.
func (g streamGrid) sync() bool { return g.shape != "quad" }

// Launch enqueues the kernel. The launch is cooperative: if its blocks don't fit the GPU at once, it
// returns an error with the status CooperativeTooLarge.
func (s Stream) Launch(q *kernel.Queue) {
	if err := s.Check(q.Info); err != nil {
		q.Err = fmt.Errorf("kernels.Stream: %w", err)
		return
	}

	l := s.Layers[0]
	shape := newGrid(q.Info, l, true, usage{telemetry: true})
	block := kernel.Line(1, blockThreads)
	block.Shared = shape.shared()
	ordinary := q.Resident("kasmina", "kasmina_forward_watch_"+shape.shape+kernel.Suffix(l.Type), block)

	name := "kasmina_stream_" + shape.shape + kernel.Suffix(l.Type)
	block.Shared = forwardRecord * blockThreads * max(1, shape.perThread/shape.each)
	resident := q.Resident("kasmina_stream", name, block)
	if q.Err != nil {
		return
	}

	g := s.divide(q.Info, ordinary, min(resident, streamBlocks*q.Info.SMs))
	if g.teams == 0 {
		q.Err = gpu.NewError("cuLaunchKernel", gpu.CooperativeTooLarge, "", fmt.Sprintf("a batch takes "+
			"%d blocks, and the GPU has room for %d", g.members, resident-1-streamSpare))
		return
	}

	from := kernel.Carve{At: s.Memory}
	m := s.memory(g, &from)
	q.Fill(s.Memory, 0, int(m.end-s.Memory))
	for i, l := range s.Layers {
		if m.softmax[i] != 0 {
			q.Run("kasmina", "kasmina_softmax", kernel.Cover(l.State.Slots, 8, 256), m.softmax[i],
				l.Weights, l.State.Slots, l.Chunk)
		}
	}

	c := kernel.Grid(g.teams*g.members+1, 1, g.across, g.down)
	c.Shared, c.Cooperative = block.Shared, true
	q.Run("kasmina_stream", name, c, s.queue(g, m), s.stages(g, m))
}

// queue returns a Queue of kasmina_stream.cu.
func (s Stream) queue(g streamGrid, m streamMemory) kernel.Struct {
	return kernel.Struct{s.Control, s.Entries, s.Done, s.X, s.Y, s.Figures, s.Counts, m.closing,
		m.published, m.bad, m.spoiled, m.finished, m.arrived, m.scratch, m.records, int64(s.First),
		s.Idle.Nanoseconds(), int64(s.BatchBytes()), s.Depth, len(s.Layers), g.seeds, g.units, g.tiles,
		g.rowParts(), g.teams, kernel.Bit(g.sync()), g.share()}
}

// stages returns Stages of kasmina_stream.cu.
func (s Stream) stages(g streamGrid, m streamMemory) (all kernel.Struct) {
	seeds := 0
	for i := range MaxStreamLayers {
		l := s.Layers[min(i, len(s.Layers)-1)]
		p := pass{Layer: l, grid: g.grid}
		all = append(all, l.fields(m.softmax[min(i, len(s.Layers)-1)], false), seeds, p.merging())
		seeds += l.State.Seeds
	}
	return all
}
