package optimizer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Tensor is a parameter, what an optimiser keeps for it, and how it treats it: Tensor of optim.cuh.
// Addresses are multiples of 16.
type Tensor struct {
	Param gpu.Ptr // float32
	Copy  gpu.Ptr // the parameter in CopyType, written with every update; may be null
	Grad  gpu.Ptr // of GradType
	// Other is another rank's contribution to the gradient, of the same type: the gradient is Grad
	// + Other, each sum rounded to float32. Null where Grad is all of it. A table has both kinds
	// never. What Muon updates has none.
	Other gpu.Ptr
	// Moments are in the order in which the kernel of package optim declares them, and null behind the
	// last.
	Moments [MaxMoments]gpu.Ptr
	// Direction is where Muon leaves the normalised update, and Result where it finds what matrix
	// products made of it; both are of DirectionType.
	Direction, Result gpu.Ptr

	Size         int
	LRScale      float64 // times the learning rate
	ShapeScale   float64 // Muon: times the rate of the update, not of the decay
	Decay        float64
	Beta1, Beta2 float64 // Muon's momentum is Beta1
	Step         int64   // updates so far

	CopyType, GradType, DirectionType gpu.DType

	FirstChunk, chunks int32 // of a Table
	Apart              bool  // its gradient is in the norm of those that are clipped apart
}

// MaxMoments is the largest number of moments that a kernel may have.
const MaxMoments = 4

// What optim.cuh says of chunks and updates.
const (
	threads     = 256
	rounds      = 16
	updateBytes = 6 * 4

	// Chunk is the elements of a Table's chunk; the last one of a tensor has what is left.
	Chunk = threads * 4 * rounds
)

// Table is tensors laid out on the device, so that one launch updates them all: the tensors, what a
// step works out for each, and their chunks.
type Table struct {
	Tensors []Tensor // as they were at first
	// Chunks is the blocks of a launch, and the float32 numbers of workspace that sums of squares
	// take.
	Chunks                   int
	tensors, updates, chunks gpu.Ptr
}

// NewTable lays out tensors one behind the other. What it says of them is fixed from then on, but
// for Step, which the device counts up. Without tensors nothing is launched.
func NewTable(ctx gpu.Context, alloc kernel.Alloc, tensors []Tensor) (*Table, error) {
	tensors, chunks := slices.Clone(tensors), 0
	for i := range tensors {
		tensors[i].FirstChunk = int32(chunks)
		chunks += kernel.CeilDiv(tensors[i].Size, Chunk)
	}
	return NewScattered(ctx, alloc, tensors, chunks)
}

// NewScattered is NewTable of so many chunks, of which tensors say where theirs are. Where they
// leave gaps it is for [GradSquares] alone: what is nobody's has the sum 0.
func NewScattered(ctx gpu.Context, alloc kernel.Alloc, tensors []Tensor, chunks int) (*Table,
	error) {
	t := &Table{Tensors: slices.Clone(tensors), Chunks: chunks}
	// chunks that are nobody's are of a tensor behind them that has no elements
	list := slices.Repeat([][2]int32{{int32(len(tensors))}}, chunks)
	for i := range t.Tensors {
		p := &t.Tensors[i]
		if !kernel.Aligned(append([]gpu.Ptr{p.Param, p.Copy, p.Grad, p.Other, p.Direction, p.Result},
			p.Moments[:]...)...) {
			return nil,
				fmt.Errorf("kernels.NewTable: tensor %d: an address is not a multiple of 16", i)
		}
		p.chunks = int32(kernel.CeilDiv(p.Size, Chunk))
		for j := range p.chunks {
			list[p.FirstChunk+j] = [2]int32{int32(i), j}
		}
	}
	rows := append(slices.Clip(t.Tensors), Tensor{})
	p, err := kernel.Upload(ctx, alloc, gpu.Bytes(rows), make([]byte, updateBytes*len(rows)),
		gpu.Bytes(list))
	if err != nil {
		return nil, fmt.Errorf("kernels.NewTable: %w", err)
	}
	t.tensors, t.updates, t.chunks = p[0], p[1], p[2]
	return t, nil
}

// Control is what a step has for all tensors, in device memory of ControlBytes, so that a captured
// step finds this step's figures there: Control of optim.cuh. The host writes the first part, of
// ControlSettings bytes, the kernels the second.
type Control struct {
	LR, Eps   float64
	MaxNorm   float64 // of all gradients together, and of those apart; 0 for no clipping
	GradScale float64 // what gradients are multiplied by first, besides 1/loss scale

	Skipped    bool    // a gradient was NaN or infinite, and nothing was changed
	Norm       float32 // of the gradients, scaled but not clipped
	Multiplier float32 // GradScale / loss scale, and what clipping adds to it
	Next       LossScale
	Apart      float32 // Multiplier of gradients that are clipped apart
}

// LossScale is what a loss is multiplied by, so that float16 holds its gradients, and how that
// fared. It counts the steps since it was last changed, and those that a gradient which was not
// finite made void. On the device it takes LossScaleBytes.
type LossScale struct {
	Scale         float32
	Good, Skipped int32
}

// LossScaleBytes is the size of a LossScale in device memory.
const LossScaleBytes = 12

// Bytes is the loss scale as it lies in device memory.
func (s LossScale) Bytes() []byte { return gpu.Bytes([]LossScale{s}) }

// ControlBytes is the size of a control block, of which the host writes the first ControlSettings
// bytes.
const (
	ControlBytes    = 64
	ControlSettings = 32
)

// Bytes is the control block as it lies in device memory.
func (c Control) Bytes() []byte { return gpu.Bytes([]Control{c}) }

// DecodeControl is the control block as a step leaves it.
func DecodeControl(b []byte) Control {
	c := make([]Control, 1)
	copy(gpu.Bytes(c), b)
	return c[0]
}

// GradSquares sets Squares [Table.Chunks], float32, to sums of squares of the gradients, one for
// each chunk.
type GradSquares struct {
	Squares gpu.Ptr
	Table   *Table
}

// Launch launches one kernel.
func (p GradSquares) Launch(q *kernel.Queue) {
	q.Run("optim", p.Table.kernel("optim_squares"),
		kernel.Line(p.Table.Chunks, threads), p.Squares, p.Table.tensors, p.Table.chunks)
}

// GradNorm finishes a control block. It gets the norm of the gradients from Count sums of squares,
// which may be of several tables. It gets whether the step is skipped, and what clipping multiplies
// gradients by. With a count of 0 the norm is 0 and nothing is clipped or skipped. Scale is a
// LossScale that the gradients carry: they are divided by it, and it is moved on for the next step.
// Null means that they carry none. Apart is a byte for each sum, which is not 0 where the sum is of
// gradients apart. Null means that none is.
type GradNorm struct {
	Control, Squares, Scale, Apart gpu.Ptr
	Count                          int
}

// Launch launches one kernel.
func (p GradNorm) Launch(q *kernel.Queue) {
	q.Run("optim", "optim_control", kernel.Line(1, 1024), p.Control, p.Squares,
		p.Count, p.Scale, p.Apart)
}

// Implemented reports whether GPUs have a kernel of package optim, given its name. They do if there is a
// unit with that name in lower case.
func Implemented(name string) bool { return kernel.HasUnit(unit(name)) }

// unit returns the unit that implements a kernel of package optim.
func unit(name string) string { return strings.ToLower(name) }

// Elementwise applies a kernel of package optim that computes each element by itself. It counts a step
// of all of the table's tensors, and updates their parameters, moments and copies by a control block
// that GradNorm has finished.
//
// The unit has the functions UNIT_begin, UNIT and UNIT_of_two: see adamw.cu.
type Elementwise struct {
	Kernel  string // its name
	Control gpu.Ptr
	Table   *Table
}

// Launch launches two kernels.
func (p Elementwise) Launch(q *kernel.Queue) {
	u := unit(p.Kernel)
	p.Table.begin(q, u, p.Control)
	q.Run(u, p.Table.kernel(u), kernel.Line(p.Table.Chunks*rounds, threads),
		p.Control, p.Table.updates, p.Table.tensors, p.Table.chunks)
}

// begin counts a step, and works out what follows from it for each tensor.
func (t *Table) begin(q *kernel.Queue, unit string, control gpu.Ptr) {
	q.Run(unit, unit+"_begin", kernel.Cover(len(t.Tensors), threads, threads), control,
		t.updates, t.tensors, len(t.Tensors))
}

// kernel is the name of one that reads the table's gradients.
func (t *Table) kernel(name string) string {
	if len(t.Tensors) > 0 && t.Tensors[0].Other != 0 {
		return name + "_of_two"
	}
	return name
}

// Direction is the first half of a kernel of package optim that updates whole matrices. It updates the
// table's momenta and leaves u/(‖u‖ + 1e-7) in every tensor's Direction. Here u is the momentum or, with
// Nesterov, the gradient advanced by it. Squares is workspace of Table.Chunks float32.
//
// The unit has the functions UNIT_begin, UNIT_momentum, UNIT_direction and UNIT_apply: see muon.cu.
type Direction struct {
	Kernel           string // its name
	Control, Squares gpu.Ptr
	Table            *Table
	Nesterov         bool
}

// Launch launches three kernels.
func (p Direction) Launch(q *kernel.Queue) {
	u, c := unit(p.Kernel), kernel.Line(p.Table.Chunks, threads)
	p.Table.begin(q, u, p.Control)
	q.Run(u, u+"_momentum", c, p.Squares, p.Control, p.Table.updates, p.Table.tensors,
		p.Table.chunks, p.Nesterov)
	q.Run(u, u+"_direction", c, p.Squares, p.Control, p.Table.tensors, p.Table.chunks, p.Nesterov)
}

// Apply is the second half. It updates the table's parameters and copies from every tensor's Result,
// which matrix products have made of its Direction.
type Apply struct {
	Kernel  string
	Control gpu.Ptr
	Table   *Table
}

// Launch launches one kernel.
func (p Apply) Launch(q *kernel.Queue) {
	u := unit(p.Kernel)
	q.Run(u, u+"_apply", kernel.Line(p.Table.Chunks, threads), p.Control, p.Table.updates,
		p.Table.tensors, p.Table.chunks)
}
