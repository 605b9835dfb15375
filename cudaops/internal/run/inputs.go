package run

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/params"
)

// Inputs sends the values of a program's inputs to the device, and keeps the data derived from them up to
// date.
type Inputs struct {
	*Executor
	Contiguous bool // parameters are contiguous in memory
	of         *program.Program
	read       Reader
	staging    map[*program.Input][]byte // pinned buffers for values sent before every run
	table      *quantize.Table           // float8 weights; nil if there are none
}

// NewInputs allocates pinned memory for the inputs of a program. The reader supplies the frozen inputs
// that have no value.
func NewInputs(x *Executor, p *program.Program, read Reader) (*Inputs, error) {
	s := &Inputs{Executor: x, of: p, read: read, staging: map[*program.Input][]byte{}}
	for _, in := range p.Inputs {
		if in.Constant {
			continue
		}
		var err error
		if s.staging[in], err = x.Memory.AllocHost(max(1, in.Array.Extent())); err != nil {
			return nil, err
		}
	}

	return s, nil
}

// Find returns the input that corresponds to node n, or nil.
func (s *Inputs) Find(n *gorgonia.Node) *program.Input {
	if i := slices.IndexFunc(s.of.Inputs, func(in *program.Input) bool { return in.Node == n }); i >= 0 {
		return s.of.Inputs[i]
	}
	return nil
}

// SendAll copies the values of all inputs except constants and parameters to the device before a run.
func (s *Inputs) SendAll() error {
	for _, in := range s.of.Inputs {
		if in.Sent() {
			raw, stored, err := hostValue(in)
			if err != nil {
				return err
			}
			staging := s.staging[in][:in.Array.Extent()]
			convert(staging, in.Array.Type, raw, stored)
			if err := s.Ctx.CopyToDevice(in.Array.Ptr(), staging, s.Stream); err != nil {
				return err
			}
		}
		if in.Sent() || in.Bound {
			if err := s.Refresh(in); err != nil {
				return err
			}
		}
	}

	return s.Quantize(func(in *program.Input) bool { return in.Bound })
}

// SendSome copies the values of the given inputs to the device and waits. If from returns device memory
// for an input, the value is copied from there, unless that memory already belongs to the input. If any
// of the remaining inputs lacks a valid value, SendSome returns an error without sending their values.
func (s *Inputs) SendSome(inputs []*program.Input, from func(*program.Input) *KeptParam) error {
	var all []source
	for _, in := range inputs {
		kept, to := from(in), in.Array
		if kept == nil {
			some, err := s.sourcesOf(in)
			if err != nil {
				return err
			}
			all = append(all, some...)
		} else if to.Ptr() != kept.Value {
			if err := s.Ctx.CopyOnDevice(to.Ptr(), kept.Value, to.Extent(), s.Stream); err != nil {
				return err
			}
		}
	}

	errs := []error{s.transfer(len(all), func(i int, pinned []byte) error {
		if err := s.send(all[i], pinned); err != nil {
			return fmt.Errorf("%s: %w", graph.Describe(all[i].node), err)
		}
		return nil
	})} // after a failed transfer, the values that did arrive still count

	for _, in := range inputs {
		errs = append(errs, s.Refresh(in))
	}

	sent := func(in *program.Input) bool { return slices.Contains(inputs, in) }
	return Joined(append(errs, s.Quantize(sent), s.Ctx.SyncStream(s.Stream))...)
}

// hostValue returns the memory of an input's value and the type of its elements, or an error if the value
// cannot be sent.
func hostValue(in *program.Input) (raw []byte, stored gpu.DType, err error) {
	v := in.Node.Value()
	if v == nil {
		return nil, 0, noValue(in)
	}
	if raw, stored, err = hostElements(v, in.Array); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", graph.Describe(in.Node), err)
	}
	return raw, stored, check(in, raw)
}

// HostMemory returns the memory of a float input's value, so that the caller can modify it.
func HostMemory(in *program.Input) ([]float32, error) {
	if in.Node.Value() == nil {
		return nil, noValue(in)
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

func noValue(in *program.Input) error {
	return fmt.Errorf("%s has no value: bind one with gorgonia.Let", graph.Describe(in.Node))
}

// check validates ids as the ops would on the CPU.
func check(in *program.Input, ids []byte) error {
	for _, r := range in.IDs {
		if err := r.Check(gpu.View[int64](ids)); err != nil {
			return err
		}
	}
	return nil
}

// CheckIDs validates ids that are on the device.
func (s *Inputs) CheckIDs(in *program.Input) error {
	if len(in.IDs) == 0 {
		return nil
	}
	ids := s.staging[in][:in.Array.Extent()]
	if err := errors.Join(s.Ctx.CopyToHost(ids, in.Array.Ptr(), s.Stream),
		s.Ctx.SyncStream(s.Stream)); err != nil {
		return err
	}
	return check(in, ids)
}

// Refresh updates the copies of an input in other types.
func (s *Inputs) Refresh(in *program.Input) error {
	for _, c := range in.Copies {
		if c.Convert == nil {
			continue
		}
		if err := s.Call(c.Convert); err != nil {
			return err
		}
	}
	return nil
}

// Quantize quantizes the float8 weights again if any of their inputs has changed. The copies of the
// inputs in other types must be up to date. All weights are quantized in a single pass, which takes
// little longer than a pass over a few.
func (s *Inputs) Quantize(changed func(*program.Input) bool) error {
	if !slices.ContainsFunc(s.of.Weights, func(w *program.QuantizedWeight) bool {
		return slices.ContainsFunc(w.Inputs, changed)
	}) {
		return nil
	}

	var all []quantize.Weight
	for _, w := range s.of.Weights {
		k := quantize.Weight{X: w.Array.Ptr(), Rows: int32(w.Array.Shape[0]),
			D: int32(w.Array.Shape[1])}
		k.Y, k.Scale = w.Rows.Values.Ptr(), w.Rows.Scales.Ptr()
		if w.Transposed.Values != nil {
			k.Turned, k.TurnedScale = w.Transposed.Values.Ptr(), w.Transposed.Scales.Ptr()
		}
		all = append(all, k)
	}

	if s.table == nil || !slices.Equal(all, s.table.Weights) { // a bound weight may have a new address
		alloc := s.Memory.For("float8's weights")
		if old := s.table; old != nil { // reuse the old table's memory once no launch reads it
			alloc = func(int) (gpu.Ptr, error) { return old.At[0], s.Ctx.SyncStream(s.Stream) }
		}
		var err error
		if s.table, err = quantize.NewTable(s.Ctx, alloc, all); err != nil {
			return err
		}
	}

	return s.Launch(quantize.Weights{Table: s.table})
}
