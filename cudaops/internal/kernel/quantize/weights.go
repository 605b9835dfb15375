package quantize

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Weight is a bfloat16 matrix X [Rows, D] to be stored as float8: its rows in Y and Scale, like
// [Rows], and its columns in Turned and TurnedScale, like [Columns]. Turned and TurnedScale may
// both be null. Rows, D and the addresses are multiples of 16. The layout matches Weight in
// quantize_weights.cu.
type Weight struct {
	X, Y, Scale, Turned, TurnedScale gpu.Ptr
	// offset in the table of the largest element of each row and column, and of the number of
	// strips searched
	largest int64
	Rows, D int32
}

// The rows, columns and threads of a block's strip; must match kRows, kStripColumns and kThreads in
// quantize_weights.cu.
const WeightRows, WeightColumns, WeightThreads = 128, 256, 256

// weightLead is the number of strips of a weight that are searched for their largest elements
// before the preceding weight is rounded. It is the number of strips that an H200 processes at
// once, which keeps the GPU busy while the last strips of the preceding weight are searched.
const weightLead = 512

// Table holds weights laid out on the device, so that one launch rounds them all: the weights,
// their strips, and their largest elements.
type Table struct {
	Weights         []Weight  // as passed to NewTable
	At              []gpu.Ptr // addresses of the weights, the strips and the largest elements
	blocks, largest int       // numbers of strips and of largest elements
}

// NewTable lays out weights. There must be at least one.
func NewTable(ctx gpu.Context, alloc kernel.Alloc, weights []Weight) (*Table, error) {
	rows, strips := slices.Clone(weights), WeightStrips(weights)
	t := &Table{Weights: weights, blocks: len(strips)}
	for i, w := range weights {
		if w.Rows > WeightRows<<16 || w.D > WeightColumns<<16 { // limit of a strip's fields
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d is %dx%d, want at most "+
				"%dx%d", i, w.Rows, w.D, WeightRows<<16, WeightColumns<<16)
		}
		rows[i].largest = int64(t.largest)
		t.largest += int(w.Rows + w.D + 16)
	}

	var err error
	if t.At, err = kernel.Upload(ctx, alloc, gpu.Bytes(rows), gpu.Bytes(strips),
		make([]byte, 4*t.largest)); err != nil {
		return nil, fmt.Errorf("kernels.NewQuantizeTable: %w", err)
	}

	return t, nil
}

// WeightStrip identifies a strip of a weight; the layout matches WeightStrip in
// quantize_weights.cu. Weight has the bit WeightRounds set if the strip is to be rounded rather
// than searched.
type WeightStrip struct {
	Weight      uint32
	Row, Column uint16
}

const WeightRounds = 1 << 31

// WeightStrips lists the strips of all weights. The strips that round a weight come after all those
// that search it for its largest elements, and after the first few that search the next weight. The
// kernel relies on this order.
func WeightStrips(weights []Weight) (strips []WeightStrip) {
	lead := 0 // number of this weight's strips already in the list
	for i := range weights {
		all, next := stripsOf(weights, i), stripsOf(weights, i+1)
		strips = append(strips, all[lead:]...)
		lead = min(weightLead, len(next))
		strips = append(strips, next[:lead]...)
		for _, strip := range slices.Backward(all) {
			strip.Weight |= WeightRounds
			strips = append(strips, strip)
		}
	}

	return strips
}

// stripsOf lists the strips of a weight. It returns nil for the index after the last one.
func stripsOf(weights []Weight, i int) (strips []WeightStrip) {
	if i == len(weights) {
		return nil
	}
	for r := range kernel.CeilDiv(int(weights[i].Rows), WeightRows) {
		for c := range kernel.CeilDiv(int(weights[i].D), WeightColumns) {
			strips = append(strips, WeightStrip{uint32(i), uint16(r), uint16(c)})
		}
	}
	return strips
}

// Weights rounds all weights of a table to float8.
type Weights struct{ Table *Table }

// Launch clears the table's largest elements and enqueues one kernel.
func (p Weights) Launch(q *kernel.Queue) {
	q.Fill(p.Table.At[2], 0, 4*p.Table.largest)
	q.Run("quantize_weights", "quantize_weights", kernel.Line(p.Table.blocks, WeightThreads),
		p.Table.At[0], p.Table.At[1], p.Table.At[2])
}
