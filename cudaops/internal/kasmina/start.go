package kasmina

import (
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// start initializes slots of zeros to an identity start, as [op.Kasmina] does on the CPU. A slot is
// examined when a seed starts to compute with it.
func (l *layer) start() error {
	if l.WeightsInput == nil {
		return nil
	}

	pass, used := l.current().pass.Snapshot(), make([]bool, l.State.Slots)
	var scales []float32 // fetched once, when a slot is new
	for seed, stage := range pass.Stage {
		slot := int(pass.Slot[seed])
		if slot == 0 || slot >= len(used) || used[slot] || !(stage.Blends() || stage.Learns()) {
			continue
		}
		used[slot] = true
		if l.started != nil && l.started[slot] {
			continue
		}
		var err error
		if scales == nil {
			scales, err = l.read(l.ScalesInput, 0, len(used))
		}
		if err == nil && scales[slot] == 0 {
			err = l.fillSlot(pass.Kind[seed], seed, slot, scales[slot:slot+1])
		}
		if err != nil {
			return fmt.Errorf("%v: seed %d: %w", l.Op, seed, err)
		}
	}

	l.started = used
	return nil
}

// fillSlot initializes a slot with scale 0, unless its weights are already set.
func (l *layer) fillSlot(kind blueprints.Kind, seed, slot int, scale []float32) error {
	w, err := l.read(l.WeightsInput, slot*l.Width, l.Width)
	if err != nil {
		return err
	}
	if started, err := l.Op.Start(kind, seed, slot, w, scale); err != nil || !started {
		return err
	}
	return run.InOrder(
		func() error { return l.write(l.WeightsInput, slot*l.Width, w) },
		func() error { return l.write(l.ScalesInput, slot, scale) })
}

// read returns n current elements of an input, starting at from. If the input is sent before every run,
// the result aliases the host value.
func (l *layer) read(in *program.Input, from, n int) ([]float32, error) {
	if in.Sent() {
		value, err := run.HostMemory(in)
		if err != nil {
			return nil, err
		}
		return value[from : from+n], nil
	}
	x := make([]float32, n)
	return x, l.m.FetchFloats(in.Array.View(from, n), x)
}

// write stores elements returned by read in the input they came from.
func (l *layer) write(in *program.Input, from int, x []float32) error {
	ctx := l.m.Ctx
	if in.Sent() {
		return nil
	}
	if err := ctx.CopyToDevice(in.Array.Ptr().Offset(4*from), gpu.Bytes(x),
		l.m.Stream); err != nil {
		return err
	}
	return run.Joined(l.m.Inputs.Refresh(in), ctx.SyncStream(l.m.Stream))
}
