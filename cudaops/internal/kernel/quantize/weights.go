package quantize

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Weight is a bfloat16 matrix X [Rows, D]. Its rows are to be in Y and Scale as float8, as of
// [Rows]. Its columns are to be in Turned and TurnedScale, as of [Columns], both of which may be
// null. Rows and D are multiples of 16, and so are addresses.
type Weight struct {
	X, Y, Scale, Turned, TurnedScale gpu.Ptr
	Rows, D                          int
}

// deviceWeight is Weight of quantize_weights.cu.
type deviceWeight struct {
	x, y, scale, turned, turnedScale, most gpu.Ptr
	rows, d                                int32
}

// The strip of a block, kRows and kStripColumns of quantize_weights.cu, and its threads.
const WeightRows, WeightColumns, WeightThreads = 128, 256, 256

// weightLead is how many strips of a weight are searched for their largest numbers before the
// weight ahead of it is rounded. It is as many as an H200 works on at once. So it has something to
// do while the last strips of that one are looked at.
const weightLead = 512

// Table is weights laid out on the device, so that one call is for all. Its memory is its own.
type Table struct {
	Weights         []Weight
	ctx             gpu.Context
	weights, strips gpu.Ptr // weights begins their memory
	// the largest of each row and column, and the strips of each weight that have been looked at
	most      gpu.Ptr
	mostBytes int
	blocks    int
	Bytes     int // of its memory
}

// NewTable lays out weights, of which there is one at least.
func NewTable(ctx gpu.Context, weights []Weight) (*Table, error) {
	rows := make([]deviceWeight, len(weights))
	t := &Table{Weights: weights, ctx: ctx}
	for i, w := range weights {
		if w.Rows > WeightRows<<16 || w.D > WeightColumns<<16 { // which strips cannot count
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d is %dx%d, want at most "+
				"%dx%d", i, w.Rows, w.D, WeightRows<<16, WeightColumns<<16)
		}
		rows[i] = deviceWeight{w.X, w.Y, w.Scale, w.Turned, w.TurnedScale, gpu.Ptr(t.mostBytes),
			int32(w.Rows), int32(w.D)}
		t.mostBytes += 4 * (w.Rows + w.D + 16)
	}
	strips := WeightStrips(weights)
	t.blocks = len(strips)
	var err error
	if t.most, err = ctx.Alloc(t.mostBytes); err != nil {
		return nil, fmt.Errorf("kernels.NewQuantizeTable: %w", err)
	}
	for i := range rows {
		rows[i].most += t.most
	}
	at, bytes, err := kernel.Upload(ctx, gpu.Bytes(rows), gpu.Bytes(strips))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("kernels.NewQuantizeTable: %w", err),
			t.ctx.Free(t.most))
	}
	t.weights, t.strips, t.Bytes = at[0], at[1], bytes+t.mostBytes
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
	for r := range kernel.CeilDiv(weights[i].Rows, WeightRows) {
		for c := range kernel.CeilDiv(weights[i].D, WeightColumns) {
			strips = append(strips, WeightStrip{uint32(i), uint16(r), uint16(c)})
		}
	}
	return strips
}

// Free gives the table's memory back.
func (t *Table) Free() error {
	err := errors.Join(t.ctx.Free(t.weights), t.ctx.Free(t.most))
	t.weights, t.most, t.Bytes = 0, 0, 0
	return err
}

// Weights makes the float8 of a table's weights.
type Weights struct{ Table *Table }

// Launch clears the table's largest numbers and launches a kernel.
func (p Weights) Launch(k *kernel.Set, s gpu.Stream) error {
	q := k.On(s)
	q.Fill(p.Table.most, 0, p.Table.mostBytes)
	q.Run("quantize_weights", "quantize_weights", kernel.Line(p.Table.blocks, WeightThreads),
		p.Table.weights, p.Table.strips)
	return q.Err
}
