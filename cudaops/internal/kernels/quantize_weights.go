package kernels

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// QuantizeWeight is a bfloat16 matrix X [Rows, D], where its rows are to be as float8, Y and Scale as of [Quantize], and where its
// columns, Turned and TurnedScale as Y and Scale of [QuantizeColumns], both of which may be null. Rows and D are multiples of 16, and
// so are addresses.
type QuantizeWeight struct {
	X, Y, Scale, Turned, TurnedScale driver.Ptr
	Rows, D                          int
}

// deviceWeight is Weight of quantize_weights.cu.
type deviceWeight struct {
	x, y, scale, turned, turnedScale, most driver.Ptr
	rows, d                                int32
}

// The tile of a block, kTileRows and kTileColumns of quantize_weights.cu, and its threads.
const weightRows, weightColumns, weightThreads = 128, 64, 256

// QuantizeTable is weights laid out on the device, so that one call is for all. Its memory is its own.
type QuantizeTable struct {
	ctx            driver.Context
	weights, tiles driver.Ptr
	most           driver.Ptr // the largest of each row and column
	mostBytes      int
	blocks         int
	Bytes          int // of its memory
}

// NewQuantizeTable lays out weights.
func (k *Kernels) NewQuantizeTable(weights []QuantizeWeight) (*QuantizeTable, error) {
	if len(weights) == 0 {
		return nil, errors.New("kernels.NewQuantizeTable: no weights")
	}
	rows := make([]deviceWeight, len(weights))
	var tiles []byte
	t := &QuantizeTable{ctx: k.ctx}
	for i, w := range weights {
		tall, wide := ceilDiv(w.Rows, weightRows), ceilDiv(w.D, weightColumns)
		switch {
		case w.Rows < 16 || w.D < 16 || w.Rows%16 != 0 || w.D%16 != 0 || tall > 1<<16 || wide > 1<<16:
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d is %dx%d, want multiples of 16, at most %dx%d", i, w.Rows, w.D,
				weightRows<<16, weightColumns<<16)
		case w.X == 0 || w.Y == 0 || w.Scale == 0 || (w.Turned == 0) != (w.TurnedScale == 0):
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d lacks an address: %+v", i, w)
		case !aligned(w.X, w.Y, w.Scale, w.Turned, w.TurnedScale):
			return nil, fmt.Errorf("kernels.NewQuantizeTable: weight %d: an address is not a multiple of 16", i)
		}
		rows[i] = deviceWeight{w.X, w.Y, w.Scale, w.Turned, w.TurnedScale, driver.Ptr(t.mostBytes), int32(w.Rows), int32(w.D)}
		t.mostBytes += 4 * (w.Rows + w.D)
		for r := range tall {
			for c := range wide {
				tiles = binary.LittleEndian.AppendUint32(tiles, uint32(i))
				tiles = binary.LittleEndian.AppendUint16(tiles, uint16(r))
				tiles = binary.LittleEndian.AppendUint16(tiles, uint16(c))
			}
		}
	}
	t.blocks = len(tiles) / 8
	err := func() (err error) {
		if t.most, err = k.ctx.Alloc(t.mostBytes); err != nil {
			return err
		}
		for i := range rows {
			rows[i].most += t.most
		}
		raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(rows))), len(rows)*int(unsafe.Sizeof(rows[0])))
		if t.weights, err = k.ctx.Alloc(len(raw)); err != nil {
			return err
		}
		if t.tiles, err = k.ctx.Alloc(len(tiles)); err != nil {
			return err
		}
		t.Bytes = t.mostBytes + len(raw) + len(tiles)
		return errors.Join(k.ctx.CopyToDevice(t.weights, raw, 0), k.ctx.CopyToDevice(t.tiles, tiles, 0), k.ctx.SyncStream(0))
	}()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("kernels.NewQuantizeTable: %w", err), t.Free())
	}
	return t, nil
}

// Free gives the table's memory back.
func (t *QuantizeTable) Free() error {
	var errs []error
	for _, p := range []*driver.Ptr{&t.weights, &t.tiles, &t.most} {
		if *p != 0 {
			errs = append(errs, t.ctx.Free(*p))
		}
		*p = 0
	}
	t.Bytes = 0
	return errors.Join(errs...)
}

// QuantizeWeights clears the table's largest numbers and launches two kernels.
func (k *Kernels) QuantizeWeights(s driver.Stream, t *QuantizeTable) error {
	if err := k.ctx.Memset8(t.most, 0, t.mostBytes, s); err != nil {
		return err
	}
	for _, name := range []string{"quantize_weights_largest", "quantize_weights"} {
		if err := k.launch(s, "quantize_weights", name, line(t.blocks, weightThreads), args().Ptr(t.weights).Ptr(t.tiles)); err != nil {
			return err
		}
	}
	return nil
}
