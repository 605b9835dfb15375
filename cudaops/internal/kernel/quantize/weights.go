package quantize

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Weight is a bfloat16 matrix X [Rows, D]. Its rows are to be in Y and Scale as float8, as of
// [Rows]. Its columns are to be in Turned and TurnedScale, as of [Columns], both of which may be
// null. Rows and D are multiples of 16, and so are addresses. It is Weight of quantize_weights.cu.
type Weight struct {
	X, Y, Scale, Turned, TurnedScale gpu.Ptr
	// where the table has the largest of each row and column, and how many strips were looked at
	most    int64
	Rows, D int32
}

// The strip of a block, kRows and kStripColumns of quantize_weights.cu, and its threads.
const WeightRows, WeightColumns, WeightThreads = 128, 256, 256

// weightLead is how many strips of a weight are searched for their largest numbers before the
// weight ahead of it is rounded. It is as many as an H200 works on at once. So it has something to
// do while the last strips of that one are looked at.
const weightLead = 512

// Table is weights laid out on the device, so that one call is for all: the weights, their strips,
// and the largest numbers of all.
type Table struct {
	Weights      []Weight  // as they were given
	At           []gpu.Ptr // where all that is
	blocks, most int       // strips, and largest numbers
}

// NewTable lays out weights, of which there is one at least.
func NewTable(ctx gpu.Context, alloc kernel.Alloc, weights []Weight) (*Table, error) {
	rows, strips := slices.Clone(weights), WeightStrips(weights)
	t := &Table{Weights: weights, blocks: len(strips)}
	for i, w := range weights {
		if w.Rows > WeightRows<<16 || w.D > WeightColumns<<16 { // which strips cannot count
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d is %dx%d, want at most "+
				"%dx%d", i, w.Rows, w.D, WeightRows<<16, WeightColumns<<16)
		}
		rows[i].most = int64(t.most)
		t.most += int(w.Rows + w.D + 16)
	}

	var err error
	if t.At, err = kernel.Upload(ctx, alloc, gpu.Bytes(rows), gpu.Bytes(strips),
		make([]byte, 4*t.most)); err != nil {
		return nil, fmt.Errorf("kernels.NewQuantizeTable: %w", err)
	}

	return t, nil
}

// WeightStrip is WeightStrip of quantize_weights.cu: a weight, with weightRounds if the strip is
// one that rounds.
type WeightStrip struct {
	Weight      uint32
	Row, Column uint16
}

const WeightRounds = 1 << 31

// WeightStrips lists the strips of all weights. Those that round a weight come behind those that
// look for its largest numbers, and for the first few of the next one's. The kernel relies on that.
func WeightStrips(weights []Weight) (strips []WeightStrip) {
	lead := 0 // how many of this weight's are in the list already
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

// stripsOf lists the strips of a weight, none behind the last one.
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

// Weights makes the float8 of a table's weights.
type Weights struct{ Table *Table }

// Launch clears the table's largest numbers and launches a kernel.
func (p Weights) Launch(q *kernel.Queue) {
	q.Fill(p.Table.At[2], 0, 4*p.Table.most)
	q.Run("quantize_weights", "quantize_weights", kernel.Line(p.Table.blocks, WeightThreads),
		p.Table.At[0], p.Table.At[1], p.Table.At[2])
}
