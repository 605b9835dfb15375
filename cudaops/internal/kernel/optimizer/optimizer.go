// Package optimizer has the kernels that update parameters. A [Table] lays out many tensors, so
// that a single launch updates them all. A step computes the norm of all gradients with
// [GradSquares] and [GradNorm], and then runs [Elementwise], or [Direction] and [Apply] around
// Muon's iteration.
package optimizer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Tensor describes a parameter, its gradient and optimizer state, and the constants of its update.
// Its layout matches Tensor in optim.cuh. Addresses are multiples of 16.
type Tensor struct {
	Param gpu.Ptr // float32
	Copy  gpu.Ptr // the parameter in CopyType, updated too; may be null
	Grad  gpu.Ptr // of GradType

	// Other is another rank's contribution to the gradient, of the same type, or null. The gradient
	// is then Grad + Other, rounded to float32. Either all tensors of a table have one or none has,
	// and no tensor of a kernel for whole matrices has one.
	Other gpu.Ptr

	// Moments has the kernel's moments in the order of package optim's declarations.
	Moments [MaxMoments]gpu.Ptr

	// A kernel for whole matrices writes the normalized update to Direction, and reads the
	// orthogonalized one from Result. Both have the type DirectionType.
	Direction, Result gpu.Ptr

	Size         int
	LRScale      float64 // times the learning rate
	ShapeScale   float64 // Muon: times the rate of the update, not of the decay
	Decay        float64
	Beta1, Beta2 float64 // Beta1 is the momentum of Muon
	Step         int64   // updates so far

	CopyType, GradType, DirectionType gpu.DType

	FirstChunk, chunks int32 // of a Table
	Apart              bool  // the gradient is clipped separately
}

// MaxMoments is the largest number of moments that a kernel may have.
const MaxMoments = 4

// These constants must match optim.cuh.
const (
	threads     = 256
	rounds      = 16
	updateBytes = 6 * 4

	// Chunk is the number of elements of a chunk. The last chunk of a tensor may be smaller.
	Chunk = threads * 4 * rounds
)

// Table holds tensors laid out on the device for launches that update them all: the tensors, their
// constants for the current step, and their chunks.
type Table struct {
	Tensors []Tensor // as passed to NewTable

	// Chunks is the number of blocks of a launch, and of float32 numbers that sums of squares take.
	Chunks                   int
	tensors, updates, chunks gpu.Ptr
}

// NewTable lays out tensors with consecutive chunks. From then on their descriptions are fixed,
// except Step, which the device increments. If there are no tensors, launches do nothing.
func NewTable(ctx gpu.Context, alloc kernel.Alloc, tensors []Tensor) (*Table, error) {
	tensors, chunks := slices.Clone(tensors), 0
	for i := range tensors {
		tensors[i].FirstChunk = int32(chunks)
		chunks += kernel.CeilDiv(tensors[i].Size, Chunk)
	}
	return NewScattered(ctx, alloc, tensors, chunks)
}

// NewScattered is like NewTable, but for a given number of chunks, where each tensor's chunks start
// at its FirstChunk. A table with gaps may be used only with [GradSquares], which sets the sums of
// the chunks in the gaps to 0.
func NewScattered(ctx gpu.Context, alloc kernel.Alloc, tensors []Tensor, chunks int) (*Table,
	error) {
	t := &Table{Tensors: slices.Clone(tensors), Chunks: chunks}
	// Chunks in gaps belong to an extra tensor without elements.
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

// Control is the control block of a step, in the layout of Control in optim.cuh. It is stored in
// ControlBytes of device memory, so that a captured step finds its current values there. The host
// writes the first ControlSettings bytes, and the kernels write the rest.
type Control struct {
	LR, Eps   float64
	MaxNorm   float64 // limit on the gradients' norm; 0 for no clipping
	GradScale float64 // factor of the gradients, in addition to 1/loss scale

	Skipped    bool    // a gradient was NaN or infinite, and nothing changed
	Norm       float32 // of the gradients, scaled but not clipped
	Multiplier float32 // GradScale / loss scale, times the clipping factor
	Next       LossScale
	Apart      float32 // Multiplier of gradients that are clipped separately
}

// LossScale is the factor of the loss that lets float16 hold its gradients. It counts the steps
// since its last change, and the steps that were skipped because a gradient was not finite. In
// device memory it takes LossScaleBytes.
type LossScale struct {
	Scale         float32
	Good, Skipped int32
}

// LossScaleBytes is the size of a LossScale in device memory.
const LossScaleBytes = 12

// Bytes returns the loss scale in its device format.
func (s LossScale) Bytes() []byte { return gpu.Bytes([]LossScale{s}) }

// Sizes of a control block, and of its first part, which the host writes.
const (
	ControlBytes    = 64
	ControlSettings = 32
)

// Bytes returns the control block in its device format.
func (c Control) Bytes() []byte { return gpu.Bytes([]Control{c}) }

// DecodeControl decodes a control block.
func DecodeControl(b []byte) Control {
	c := make([]Control, 1)
	copy(gpu.Bytes(c), b)
	return c[0]
}

// GradSquares computes the sum of the squared gradients of each chunk, as [Table.Chunks] float32
// numbers at Squares.
type GradSquares struct {
	Squares gpu.Ptr
	Table   *Table
}

// Launch enqueues one kernel.
func (p GradSquares) Launch(q *kernel.Queue) {
	q.Run("optim", p.Table.kernel("optim_squares"),
		kernel.Line(p.Table.Chunks, threads), p.Squares, p.Table.tensors, p.Table.chunks)
}

// GradNorm completes a control block. From Count sums of squares, of one table or several, it
// computes the norm of the gradients, whether the step is skipped, and the factor for clipping the
// gradients. If Count is 0, the norm is 0 and nothing is clipped or skipped.
//
// Scale is the LossScale that the gradients were computed with, or null. GradNorm divides them by
// it and updates it for the next step. Apart has a byte for each sum, which is not 0 if the sum
// belongs to gradients that are clipped separately. If it is null, all are clipped together.
type GradNorm struct {
	Control, Squares, Scale, Apart gpu.Ptr
	Count                          int
}

// Launch enqueues one kernel.
func (p GradNorm) Launch(q *kernel.Queue) {
	q.Run("optim", "optim_control", kernel.Line(1, 1024), p.Control, p.Squares,
		p.Count, p.Scale, p.Apart)
}

// Implemented reports whether GPUs implement the kernel of package optim with the given name, in a
// unit with that name in lower case.
func Implemented(name string) bool { return kernel.HasUnit(unit(name)) }

// unit returns the unit that implements a kernel of package optim.
func unit(name string) string { return strings.ToLower(name) }

// Elementwise applies a kernel of package optim that updates each element, or each block of
// elements, independently. It counts a step of all tensors in the table, and updates their
// parameters, moments and copies according to a control block that GradNorm has completed.
//
// The unit must have the functions UNIT_begin, UNIT and UNIT_of_two, as in adamw.cu.
type Elementwise struct {
	Kernel  string // its name
	Control gpu.Ptr
	Table   *Table
}

// Launch enqueues two kernels.
func (p Elementwise) Launch(q *kernel.Queue) {
	u := unit(p.Kernel)
	p.Table.begin(q, u, p.Control)
	q.Run(u, p.Table.kernel(u), kernel.Line(p.Table.Chunks*rounds, threads),
		p.Control, p.Table.updates, p.Table.tensors, p.Table.chunks)
}

// begin counts a step and computes each tensor's constants for it.
func (t *Table) begin(q *kernel.Queue, unit string, control gpu.Ptr) {
	q.Run(unit, unit+"_begin", kernel.Cover(len(t.Tensors), threads, threads), control,
		t.updates, t.tensors, len(t.Tensors))
}

// kernel returns the name of the variant of a kernel that reads the table's gradients.
func (t *Table) kernel(name string) string {
	if len(t.Tensors) > 0 && t.Tensors[0].Other != 0 {
		return name + "_of_two"
	}
	return name
}

// Direction is the first half of a kernel of package optim that updates whole matrices. It updates
// the momentum of every tensor in the table and writes u/(‖u‖ + 1e-7) to the tensor's Direction.
// The update u is the momentum or, with Nesterov, the gradient advanced by it. Squares is a
// workspace of Table.Chunks float32 numbers.
//
// The unit must have the functions UNIT_begin, UNIT_momentum, UNIT_direction and UNIT_apply, as in
// muon.cu.
type Direction struct {
	Kernel           string // its name
	Control, Squares gpu.Ptr
	Table            *Table
	Nesterov         bool
}

// Launch enqueues three kernels.
func (p Direction) Launch(q *kernel.Queue) {
	u, c := unit(p.Kernel), kernel.Line(p.Table.Chunks, threads)
	p.Table.begin(q, u, p.Control)
	q.Run(u, u+"_momentum", c, p.Squares, p.Control, p.Table.updates, p.Table.tensors,
		p.Table.chunks, p.Nesterov)
	q.Run(u, u+"_direction", c, p.Squares, p.Control, p.Table.tensors, p.Table.chunks, p.Nesterov)
}

// Apply is the second half. It updates parameters and copies from every tensor's Result, which
// matrix products have computed from its Direction.
type Apply struct {
	Kernel  string
	Control gpu.Ptr
	Table   *Table
}

// Launch enqueues one kernel.
func (p Apply) Launch(q *kernel.Queue) {
	u := unit(p.Kernel)
	q.Run(u, u+"_apply", kernel.Line(p.Table.Chunks, threads), p.Control, p.Table.updates,
		p.Table.tensors, p.Table.chunks)
}
