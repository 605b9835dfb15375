package cudaops

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaStart writes the identity start to slots of zeros, as [op.Kasmina] does on a CPU. It looks
// at a slot when a seed begins to compute with it.
type kasminaStart struct {
	m               *Machine
	op              *op.KasminaOp
	weights, scales *array
	ofWeights       *input
	ofScales        *input
	pass            state.Pass
	seen, used      []bool // of each slot: a seed computed with it before, and does so now
}

// startsSlots makes the machine look at a layer's slots before its runs, where weights and scales
// are inputs of the graph.
func (c *compiler) startsSlots(o *op.KasminaOp, weights, scales *array) {
	w, s := c.inputOf[weights.block], c.inputOf[scales.block]
	if o.Replaying || w == nil || s == nil || weights.elem != float32s || scales.elem != float32s {
		return
	}
	slots := o.InputShape(1)[0]
	c.m.attendants = append(c.m.attendants, &kasminaStart{m: c.m, op: o, weights: weights,
		scales: scales, ofWeights: w, ofScales: s,
		seen: make([]bool, slots), used: make([]bool, slots)})
}

func (s *kasminaStart) before() error {
	s.op.Lattice.Begin(&s.pass, false)
	clear(s.used)
	var scales []float32 // read once, if a slot is new
	for seed, stage := range s.pass.Stage {
		slot := int(s.pass.Slot[seed])
		if slot == 0 || slot >= len(s.used) || !(stage.Blends() || stage.Learns()) {
			continue
		}
		if !s.seen[slot] && !s.used[slot] {
			var err error
			if scales == nil {
				scales, err = s.read(s.ofScales, s.scales, 0, len(s.used))
			}
			if err == nil && scales[slot] == 0 {
				err = s.start(seed, slot)
			}
			if err != nil {
				return fmt.Errorf("%v: seed %d: %w", s.op, seed, err)
			}
		}
		s.used[slot] = true
	}
	s.seen, s.used = s.used, s.seen
	return nil
}

// start writes a slot whose scale is 0, if there is nothing in it.
func (s *kasminaStart) start(seed, slot int) error {
	width := s.weights.len() / s.scales.len()
	w, err := s.read(s.ofWeights, s.weights, slot*width, width)
	if err != nil {
		return err
	}
	a := []float32{0}
	started, err := s.op.Start(s.pass.Kind[seed], seed, slot, w, a)
	if err != nil || !started {
		return err
	}
	if err := s.write(s.ofWeights, s.weights, slot*width, w); err != nil {
		return err
	}
	return s.write(s.ofScales, s.scales, slot, a)
}

// sent reports whether an input's value goes to the device before every run.
func (in *input) sent() bool { return !in.constant && !in.bound }

// read returns n elements of an input, from the one that is given, where they are now.
func (s *kasminaStart) read(in *input, a *array, from, n int) ([]float32, error) {
	x := make([]float32, n)
	if in.sent() {
		value, err := hostMemory(in)
		if err != nil {
			return nil, err
		}
		copy(x, value[from:])
		return x, nil
	}
	ctx := s.m.device.ctx
	if err := ctx.CopyToHost(gpu.Bytes(x), a.ptr().Offset(4*from), s.m.stream); err != nil {
		return nil, err
	}
	return x, ctx.SyncStream(s.m.stream)
}

// write is read the other way round.
func (s *kasminaStart) write(in *input, a *array, from int, x []float32) error {
	if in.sent() {
		value, err := hostMemory(in)
		if err == nil {
			copy(value[from:], x)
		}
		return err
	}
	ctx := s.m.device.ctx
	if err := ctx.CopyToDevice(a.ptr().Offset(4*from), gpu.Bytes(x), s.m.stream); err != nil {
		return err
	}
	return joined(in.refresh(), ctx.SyncStream(s.m.stream))
}

// hostMemory returns the memory of an input's value.
func hostMemory(in *input) ([]float32, error) {
	if in.node.Value() == nil {
		return nil, fmt.Errorf("%s has no value: bind one with gorgonia.Let", describe(in.node))
	}
	memory, err := params.Memory(in.node.Value())
	if err != nil {
		return nil, fmt.Errorf("%s: its value %w", describe(in.node), err)
	}
	x, ok := memory.([]float32)
	if !ok || len(x) != in.array.len() {
		return nil, fmt.Errorf("%s has a value of type %v and shape %v", describe(in.node),
			in.node.Value().Dtype(), in.node.Value().Shape())
	}
	return x, nil
}

func (s *kasminaStart) appendMode(b []byte) []byte { return b }
func (s *kasminaStart) after() error               { return nil }
func (s *kasminaStart) settle() error              { return nil }
func (s *kasminaStart) close() error               { return nil }
