package kasmina

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/state"
)

// start writes the identity start to slots of zeros, as [op.Kasmina] does on a CPU. It looks
// at a slot when a seed begins to compute with it.
type start struct {
	program.KasminaStart
	m          *Machine
	pass       state.Pass
	seen, used []bool // of each slot: a seed computed with it before, and does so now
}

func newStart(m *Machine, k program.KasminaStart) *start {
	slots := k.Op.InputShape(1)[0]
	return &start{KasminaStart: k, m: m, seen: make([]bool, slots), used: make([]bool, slots)}
}

// before looks at the slots that seeds begin to use.
func (s *start) before() error {
	s.Op.Lattice.Begin(&s.pass, false)
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
				scales, err = s.read(s.Scales, 0, len(s.used))
			}
			if err == nil && scales[slot] == 0 {
				err = s.fill(seed, slot, scales[slot:slot+1])
			}
			if err != nil {
				return fmt.Errorf("%v: seed %d: %w", s.Op, seed, err)
			}
		}
		s.used[slot] = true
	}
	s.seen, s.used = s.used, s.seen
	return nil
}

// fill writes a slot whose scale is 0, if there is nothing in it.
func (s *start) fill(seed, slot int, scale []float32) error {
	width := s.Weights.Array.Len() / s.Scales.Array.Len()
	w, err := s.read(s.Weights, slot*width, width)
	if err != nil {
		return err
	}
	if started, err := s.Op.Start(s.pass.Kind[seed], seed, slot, w, scale); err != nil || !started {
		return err
	}
	return run.InTurn(
		func() error { return s.write(s.Weights, slot*width, w) },
		func() error { return s.write(s.Scales, slot, scale) })
}

// read returns n elements of an input, from the one that is given, as they are now. Of a value that
// is sent before every run they are its own memory.
func (s *start) read(in *program.Input, from, n int) ([]float32, error) {
	if in.Sent() {
		value, err := hostMemory(in)
		if err != nil {
			return nil, err
		}
		return value[from : from+n], nil
	}
	x := make([]float32, n)
	return x, s.m.FetchFloats(in.Array.View(from, n), x)
}

// write sends elements that read has returned to where they are from.
func (s *start) write(in *program.Input, from int, x []float32) error {
	ctx := s.m.Ctx
	if in.Sent() {
		return nil
	}
	if err := ctx.CopyToDevice(in.Array.Ptr().Offset(4*from), gpu.Bytes(x),
		s.m.Stream); err != nil {
		return err
	}
	return run.Joined(s.m.Inputs.Refresh(in), ctx.SyncStream(s.m.Stream))
}

// hostMemory returns the memory of an input's value.
func hostMemory(in *program.Input) ([]float32, error) {
	if in.Node.Value() == nil {
		return nil, fmt.Errorf("%s has no value: bind one with gorgonia.Let",
			graph.Describe(in.Node))
	}
	memory, err := params.Memory(in.Node.Value())
	if err != nil {
		return nil, fmt.Errorf("%s: its value %w", graph.Describe(in.Node), err)
	}
	x, ok := memory.([]float32)
	if !ok || len(x) != in.Array.Len() {
		return nil, fmt.Errorf("%s has a value of type %v and shape %v", graph.Describe(in.Node),
			in.Node.Value().Dtype(), in.Node.Value().Shape())
	}
	return x, nil
}
