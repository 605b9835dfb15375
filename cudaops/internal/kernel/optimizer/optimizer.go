package optimizer

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Tensor is a parameter, what an optimiser keeps for it, and how it treats it. Addresses are
// multiples of 16.
type Tensor struct {
	Param gpu.Ptr // float32
	Copy  gpu.Ptr // the parameter in CopyType, written with every update; may be null
	Grad  gpu.Ptr // of GradType
	// Other is another rank's contribution to the gradient, of the same type: the gradient is Grad
	// + Other, each sum rounded to float32. Null where Grad is all of it. A table has both kinds
	// never. What Muon updates has none.
	Other  gpu.Ptr
	First  gpu.Ptr // float32: AdamW's first moment, Muon's momentum
	Second gpu.Ptr // float32: AdamW's second moment
	// Direction is where Muon leaves the normalised update, and Result where it finds what matrix
	// products made of it; both are of DirectionType.
	Direction, Result gpu.Ptr

	Size         int
	LRScale      float64 // times the learning rate
	ShapeScale   float64 // Muon: times the rate of the update, not of the decay
	Decay        float64
	Beta1, Beta2 float64 // Muon's momentum is Beta1
	Step         int64   // updates so far
	Apart        bool    // its gradient is in the norm of those that are clipped apart

	CopyType, GradType, DirectionType gpu.DType
}

// deviceTensor is Tensor of optim.cuh.
type deviceTensor struct {
	param, copy, grad, other, first, second, direction, result gpu.Ptr
	size                                                       int64
	lrScale, shapeScale, decay, beta1, beta2                   float64
	step                                                       int64
	copyType, gradType, directionType                          int32
	firstChunk, chunks                                         int32
	apart                                                      int32
}

// What optim.cuh says of chunks and updates.
const (
	optimThreads = 256
	optimRounds  = 16
	updateBytes  = 6 * 4

	// OptimChunk is the elements of a Table's chunk; the last one of a tensor has what is left.
	OptimChunk = optimThreads * 4 * optimRounds
)

// Table is tensors laid out on the device, so that one launch updates them all. Its memory is its
// own.
type Table struct {
	Tensors                  []Tensor // as they were at first
	ctx                      gpu.Context
	tensors, updates, chunks gpu.Ptr // tensors begin its memory
	of                       []int   // the tensor of each chunk, in order
	two                      bool    // gradients are sums of two contributions
	// Chunks is the blocks of a launch, and the float32 numbers of workspace that sums of squares
	// take.
	Chunks int
	Bytes  int // of its memory
}

// NewTable lays out tensors, of which there is one at least. What it says of them is fixed from
// then on, but for Step, which the device counts up.
func NewTable(ctx gpu.Context, tensors []Tensor) (*Table, error) {
	var at []int
	chunks := 0
	for _, t := range tensors {
		at = append(at, chunks)
		chunks += kernel.CeilDiv(t.Size, OptimChunk)
	}
	return layOut(ctx, tensors, at, chunks)
}

// NewScattered is NewTable for [GradSquares] alone: of so many chunks, those of tensor number i are
// at[i] and those behind it. What is nobody's has the sum 0.
func NewScattered(ctx gpu.Context, tensors []Tensor, at []int, chunks int) (*Table, error) {
	// whose second chunk is behind its end
	nothing := Tensor{Size: 4, Param: 16, Grad: 16, First: 16, Second: 16}
	if len(tensors) > 0 {
		nothing.Other = tensors[0].Other
	}
	return layOut(ctx, append(slices.Clip(tensors), nothing), append(slices.Clip(at), -1), chunks)
}

// layOut lays out tensors whose chunks begin at some of so many. A negative one stands for all
// chunks that are nobody's, of which none is within the tensor.
func layOut(ctx gpu.Context, tensors []Tensor, at []int, chunks int) (*Table, error) {
	rows := make([]deviceTensor, len(tensors))
	t := &Table{Tensors: tensors, ctx: ctx, of: slices.Repeat([]int{nobody}, chunks),
		two: tensors[0].Other != 0, Chunks: chunks}
	list := slices.Repeat([][2]int32{{int32(len(tensors) - 1), 1}}, chunks)
	for i, p := range tensors {
		if !kernel.Aligned(p.Param, p.Copy, p.Grad, p.Other, p.First, p.Second, p.Direction,
			p.Result) {
			return nil,
				fmt.Errorf("kernels.NewTable: tensor %d: an address is not a multiple of 16", i)
		}
		n := kernel.CeilDiv(p.Size, OptimChunk)
		rows[i] = deviceTensor{p.Param, p.Copy, p.Grad, p.Other, p.First, p.Second, p.Direction,
			p.Result, int64(p.Size), p.LRScale, p.ShapeScale, p.Decay, p.Beta1, p.Beta2, p.Step,
			int32(p.CopyType), int32(p.GradType), int32(p.DirectionType), int32(at[i]), int32(n),
			int32(kernel.Bit(p.Apart))}
		for j := 0; j < n && at[i] >= 0; j++ {
			t.of[at[i]+j], list[at[i]+j] = i, [2]int32{int32(i), int32(j)}
		}
	}
	parts, bytes, err := kernel.Upload(ctx, kernel.TableBytes(rows),
		make([]byte, updateBytes*len(rows)), kernel.TableBytes(list))
	if err != nil {
		return nil, fmt.Errorf("kernels.NewTable: %w", err)
	}
	t.tensors, t.updates, t.chunks, t.Bytes = parts[0], parts[1], parts[2], bytes
	return t, nil
}

// nobody stands for the tensor of a chunk that is of none.
const nobody = -1

// TensorOf is the number of the tensor that a chunk is a part of, −1 for one of none.
func (t *Table) TensorOf(chunk int) int { return t.of[chunk] }

// Free gives the table's memory back.
func (t *Table) Free() error {
	err := t.ctx.Free(t.tensors)
	t.tensors, t.Bytes = 0, 0
	return err
}

// Steps reads how many updates each tensor has had, once the stream's work is done.
func (t *Table) Steps(s gpu.Stream) ([]int64, error) {
	rows := make([]deviceTensor, len(t.Tensors))
	if err := t.ctx.CopyToHost(kernel.TableBytes(rows), t.tensors, s); err != nil {
		return nil, err
	}
	if err := t.ctx.SyncStream(s); err != nil {
		return nil, err
	}
	steps := make([]int64, len(rows))
	for i, r := range rows {
		steps[i] = r.step
	}
	return steps, nil
}

// Control is what a step has for all tensors, in device memory of ControlBytes, so that a captured
// step finds this step's figures there. The host writes the first part ([Control.Bytes]), the
// kernels the second.
type Control struct {
	LR, Eps       float64
	MaxNorm       float64 // of all gradients together, and of those apart; 0 for no clipping
	GradScale     float64 // what gradients are multiplied by first, besides 1/loss scale
	SkipNonFinite bool    // change nothing in a step with a gradient that is NaN or infinite

	Skipped bool
	Norm    float32 // of the gradients, scaled but not clipped
	Next    LossScale
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
func (s LossScale) Bytes() []byte { return kernel.TableBytes([]LossScale{s}) }

// ControlBytes is the size of a control block, of which the host writes the first ControlSettings
// bytes.
const (
	ControlBytes    = 64
	ControlSettings = 36
)

// Bytes is the control block as the host writes it.
func (c Control) Bytes() []byte {
	b := make([]byte, 0, ControlBytes)
	for _, v := range []float64{c.LR, c.Eps, c.MaxNorm, c.GradScale} {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
	}
	return binary.LittleEndian.AppendUint32(b, kernel.Bit(c.SkipNonFinite))[:ControlBytes]
}

// DecodeControl is the control block as a step leaves it.
func DecodeControl(b []byte) Control {
	f := func(i int) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(b[i:])) }
	w := func(i int) uint32 { return binary.LittleEndian.Uint32(b[i:]) }
	next := LossScale{math.Float32frombits(w(48)), int32(w(52)), int32(w(56))}
	return Control{f(0), f(8), f(16), f(24), w(32) != 0, w(36) != 0, math.Float32frombits(w(40)),
		next}
}

// GradSquares sets Squares [Table.Chunks], float32, to sums of squares of the gradients, one for
// each chunk.
type GradSquares struct {
	Squares gpu.Ptr
	Table   *Table
}

// Launch launches one kernel.
func (p GradSquares) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "optim", p.Table.kernel("optim_squares"),
		kernel.Line(p.Table.Chunks, optimThreads), p.Squares, p.Table.tensors, p.Table.chunks)
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
func (p GradNorm) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "optim", "optim_control", kernel.Line(1, 1024), p.Control, p.Squares,
		p.Count, p.Scale, p.Apart)
}

// AdamW counts a step of all of the table's tensors. By a control block that GradNorm has finished
// it works out their figures of this step, and updates parameters, moments and copies.
type AdamW struct {
	Control gpu.Ptr
	Table   *Table
}

// Launch launches two kernels.
func (p AdamW) Launch(k *kernel.Set, s gpu.Stream) error {
	if err := begin(k, s, "adamw", p.Control, p.Table); err != nil {
		return err
	}
	return k.Enqueue(s, "adamw", p.Table.kernel("adamw"),
		kernel.Line(p.Table.Chunks*optimRounds, optimThreads), p.Control, p.Table.updates,
		p.Table.tensors, p.Table.chunks)
}

func begin(k *kernel.Set, s gpu.Stream, unit string, control gpu.Ptr, t *Table) error {
	return k.Enqueue(s, unit, unit+"_begin",
		kernel.Line(kernel.CeilDiv(len(t.Tensors), optimThreads), optimThreads), control, t.updates,
		t.tensors, len(t.Tensors))
}

// kernel is the name of one that reads the table's gradients.
func (t *Table) kernel(name string) string {
	if t.two {
		return name + "_of_two"
	}
	return name
}

// MuonDirection updates the table's momenta and leaves u/(‖u‖ + 1e-7) in every tensor's Direction.
// Here u is the momentum or, with Nesterov, the gradient advanced by it. Squares is workspace of
// Table.Chunks float32.
type MuonDirection struct {
	Control, Squares gpu.Ptr
	Table            *Table
	Nesterov         bool
}

// Launch launches three kernels.
func (p MuonDirection) Launch(k *kernel.Set, s gpu.Stream) error {
	if err := begin(k, s, "muon", p.Control, p.Table); err != nil {
		return err
	}
	c := kernel.Line(p.Table.Chunks, optimThreads)
	if err := k.Enqueue(s, "muon", "muon_momentum", c, p.Squares, p.Control, p.Table.updates,
		p.Table.tensors, p.Table.chunks, p.Nesterov); err != nil {
		return err
	}
	return k.Enqueue(s, "muon", "muon_direction", c, p.Squares, p.Control, p.Table.tensors,
		p.Table.chunks, p.Nesterov)
}

// MuonApply updates the table's parameters and copies from every tensor's Result.
type MuonApply struct {
	Control gpu.Ptr
	Table   *Table
}

// Launch launches one kernel.
func (p MuonApply) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "muon", "muon_apply", kernel.Line(p.Table.Chunks, optimThreads), p.Control,
		p.Table.updates, p.Table.tensors, p.Table.chunks)
}
