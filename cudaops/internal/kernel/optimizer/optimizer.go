package optimizer

import (
	"encoding/binary"
	"errors"
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
	// Other is another rank's contribution to the gradient, of the same type: the gradient is Grad +
	// Other, each sum rounded to float32. Null where Grad is all of it. A table has both kinds never.
	// What Muon updates has none.
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
	ctx                      gpu.Context
	tensors, updates, chunks gpu.Ptr
	count                    int
	of                       []int // the tensor of each chunk, in order
	two                      bool  // gradients are sums of two contributions
	// Chunks is the blocks of a launch, and the float32 numbers of workspace that sums of squares
	// take.
	Chunks int
	Bytes  int // of its memory
}

// NewTable lays out tensors. What it says of them is fixed from then on, but for Step, which the
// device counts up.
func NewTable(k *kernel.Set, tensors []Tensor) (*Table, error) {
	if len(tensors) == 0 {
		return nil, errors.New("kernels.NewTable: no tensors")
	}
	var at []int
	chunks := 0
	for _, t := range tensors {
		at = append(at, chunks)
		chunks += kernel.CeilDiv(t.Size, OptimChunk)
	}
	return layOut(k, tensors, at, chunks)
}

// NewScattered is NewTable for [GradSquares] alone: of so many chunks, those of tensor number i are
// at[i] and those behind it. What is nobody's has the sum 0.
func NewScattered(k *kernel.Set, tensors []Tensor, at []int, chunks int) (*Table, error) {
	// whose second chunk is behind its end
	nothing := Tensor{Size: 4, Param: 16, Grad: 16, First: 16, Second: 16}
	if len(tensors) > 0 {
		nothing.Other = tensors[0].Other
	}
	return layOut(k, append(slices.Clip(tensors), nothing), append(slices.Clip(at), -1), chunks)
}

// layOut lays out tensors whose chunks begin at some of so many. A negative one stands for all
// chunks that are nobody's, of which none is within the tensor.
func layOut(k *kernel.Set, tensors []Tensor, at []int, chunks int) (*Table, error) {
	rows := make([]deviceTensor, len(tensors))
	of, index := slices.Repeat([]int{nobody}, chunks), slices.Repeat([]int{1}, chunks)
	for i, t := range tensors {
		if t.Size < 1 {
			return nil, fmt.Errorf("kernels.NewTable: tensor %d has %d elements", i, t.Size)
		}
		if (t.Other != 0) != (tensors[0].Other != 0) {
			return nil, fmt.Errorf("kernels.NewTable: tensor %d: gradients are sums of two "+
				"contributions, or none is", i)
		}
		if !kernel.Aligned(t.Param, t.Copy, t.Grad, t.Other, t.First, t.Second, t.Direction,
			t.Result) {
			return nil,
				fmt.Errorf("kernels.NewTable: tensor %d: an address is not a multiple of 16", i)
		}
		for _, dt := range []gpu.DType{t.CopyType, t.GradType, t.DirectionType} {
			if _, err := kernel.Suffix("NewTable", dt); err != nil {
				return nil, err
			}
		}
		n := kernel.CeilDiv(t.Size, OptimChunk)
		rows[i] = deviceTensor{t.Param, t.Copy, t.Grad, t.Other, t.First, t.Second, t.Direction, t.Result,
			int64(t.Size), t.LRScale,
			t.ShapeScale, t.Decay, t.Beta1, t.Beta2, t.Step, int32(t.CopyType), int32(t.GradType),
			int32(t.DirectionType),
			int32(at[i]), int32(n), one(t.Apart)}
		if at[i] < 0 {
			continue
		}
		for j := range n {
			of[at[i]+j], index[at[i]+j] = i, j
		}
	}
	var list []byte
	for c, i := range of {
		if i == nobody {
			i = len(tensors) - 1
		}
		list = binary.LittleEndian.AppendUint32(list, uint32(i))
		list = binary.LittleEndian.AppendUint32(list, uint32(index[c]))
	}
	t := &Table{ctx: k.Ctx, count: len(rows), of: of, two: tensors[0].Other != 0, Chunks: chunks}
	for _, part := range []struct {
		at    *gpu.Ptr
		bytes []byte
	}{{&t.tensors, kernel.TableBytes(rows)}, {&t.updates, make([]byte, updateBytes*len(rows))},
		{&t.chunks, list}} {
		var err error
		t.Bytes += len(part.bytes)
		if *part.at, err = k.Ctx.Alloc(len(part.bytes)); err == nil {
			err = k.Ctx.CopyToDevice(*part.at, part.bytes, 0)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("kernels.NewTable: %w", err), t.Free())
		}
	}
	return t, nil
}

// one is 1 for true.
func one(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

// nobody stands for the tensor of a chunk that is of none.
const nobody = -1

// TensorOf is the number of the tensor that a chunk is a part of, −1 for one of none.
func (t *Table) TensorOf(chunk int) int { return t.of[chunk] }

// Free gives the table's memory back.
func (t *Table) Free() error {
	err := errors.Join(t.ctx.Free(t.tensors), t.ctx.Free(t.updates), t.ctx.Free(t.chunks))
	t.tensors, t.updates, t.chunks, t.Bytes = 0, 0, 0, 0
	return err
}

// Steps reads how many updates each tensor has had, once the stream's work is done.
func (t *Table) Steps(s gpu.Stream) ([]int64, error) {
	rows := make([]deviceTensor, t.count)
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
func (s LossScale) Bytes() []byte {
	b := binary.LittleEndian.AppendUint32(nil, math.Float32bits(s.Scale))
	b = binary.LittleEndian.AppendUint32(b, uint32(s.Good))
	return binary.LittleEndian.AppendUint32(b, uint32(s.Skipped))
}

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
	skip := uint32(0)
	if c.SkipNonFinite {
		skip = 1
	}
	return binary.LittleEndian.AppendUint32(b, skip)[:ControlBytes]
}

// DecodeControl is the control block as a step leaves it.
func DecodeControl(b []byte) Control {
	f := func(i int) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(b[i:])) }
	w := func(i int) uint32 { return binary.LittleEndian.Uint32(b[i:]) }
	next := LossScale{math.Float32frombits(w(48)), int32(w(52)), int32(w(56))}
	return Control{f(0), f(8), f(16), f(24), w(32) != 0, w(36) != 0, math.Float32frombits(w(40)),
		next}
}

// Launch sets squares [t.Chunks], float32, to sums of squares of the gradients, one for each chunk.
func (p GradSquares) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "optim", p.Table.kernel("optim_squares"), kernel.Line(p.Table.Chunks, optimThreads),
		kernel.Args().Ptr(p.Squares).Ptr(p.Table.tensors).Ptr(p.Table.chunks))
}

// Launch finishes a control block. It gets the norm of the gradients from count sums of squares,
// which may be of several tables. It gets whether the step is skipped, and what clipping multiplies
// gradients by. With a count of 0 the norm is 0 and nothing is clipped or skipped. Scale is a
// LossScale that the gradients carry: they are divided by it, and it is moved on for the next step.
// Null means that they carry none. apart is a byte for each sum, which is not 0 where the sum is of
// gradients apart. Null means that none is.
func (p GradNorm) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "optim", "optim_control", kernel.Line(1, 1024),
		kernel.Args().Ptr(p.Control).Ptr(p.Squares).Int32(p.Count).Ptr(p.Scale).Ptr(p.Apart))
}

// Launch counts a step of all of the table's tensors. By a control block that GradNorm has finished
// it works out their figures of this step, and updates parameters, moments and copies. Two kernels.
func (p AdamW) Launch(k *kernel.Set, s gpu.Stream) error {
	if err := begin(k, s, "adamw", p.Control, p.Table); err != nil {
		return err
	}
	return k.Enqueue(s, "adamw", p.Table.kernel("adamw"), kernel.Line(p.Table.Chunks*optimRounds, optimThreads),
		p.Table.args(p.Control))
}

func begin(k *kernel.Set, s gpu.Stream, unit string, control gpu.Ptr, t *Table) error {
	l := kernel.Args().Ptr(control).Ptr(t.updates).Ptr(t.tensors).Int32(t.count)
	return k.Enqueue(s, unit, unit+"_begin",
		kernel.Line(kernel.CeilDiv(t.count, optimThreads), optimThreads), l)
}

// kernel is the name of one that reads the table's gradients.
func (t *Table) kernel(name string) string {
	if t.two {
		return name + "_of_two"
	}
	return name
}

// args is the arguments of a kernel over all chunks.
func (t *Table) args(control gpu.Ptr) *gpu.Args {
	return kernel.Args().Ptr(control).Ptr(t.updates).Ptr(t.tensors).Ptr(t.chunks)
}

// Launch updates the table's momenta and leaves u/(‖u‖ + 1e-7) in every tensor's Direction. Here u
// is the momentum or, with nesterov, the gradient advanced by it. Squares is workspace of t.Chunks
// float32. Three kernels.
func (p MuonDirection) Launch(k *kernel.Set, s gpu.Stream) error {
	if err := begin(k, s, "muon", p.Control, p.Table); err != nil {
		return err
	}
	n := 0
	if p.Nesterov {
		n = 1
	}
	l := kernel.Args().Ptr(p.Squares).Ptr(p.Control).Ptr(p.Table.updates).Ptr(p.Table.tensors).Ptr(
		p.Table.chunks).Int32(n)
	if err := k.Enqueue(s, "muon", "muon_momentum", kernel.Line(p.Table.Chunks, optimThreads),
		l); err != nil {
		return err
	}
	l = kernel.Args().Ptr(p.Squares).Ptr(p.Control).Ptr(p.Table.tensors).Ptr(
		p.Table.chunks).Int32(n)
	return k.Enqueue(s, "muon", "muon_direction", kernel.Line(p.Table.Chunks, optimThreads), l)
}

// Launch updates the table's parameters and copies from every tensor's Result.
func (p MuonApply) Launch(k *kernel.Set, s gpu.Stream) error {
	return k.Enqueue(s, "muon", "muon_apply", kernel.Line(p.Table.Chunks, optimThreads),
		p.Table.args(p.Control))
}

// GradSquares sets Squares to sums of squares of a table's gradients, one for each chunk.
type GradSquares struct {
	Squares gpu.Ptr
	Table   *Table
}

// GradNorm finishes a control block from Count sums of squares.
type GradNorm struct {
	Control, Squares, Scale, Apart gpu.Ptr
	Count                          int
}

// AdamW updates a table's tensors.
type AdamW struct {
	Control gpu.Ptr
	Table   *Table
}

// MuonDirection updates momenta and leaves directions. Squares is workspace of Table.Chunks
// float32.
type MuonDirection struct {
	Control, Squares gpu.Ptr
	Table            *Table
	Nesterov         bool
}

// MuonApply updates a table's tensors from every tensor's Result.
type MuonApply struct {
	Control gpu.Ptr
	Table   *Table
}
