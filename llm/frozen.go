package llm

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/memory"
)

// LoadFrozen reads a model for tuning with adapters, or for tuning the parameters that match one of the
// patterns (see [TrainConfig.Tuned]). All other matrices are frozen and converted during reading: linear
// layers to the given type, block by block, and the embedding and the output layer to bfloat16. Unless
// the type is float32, the model never exists in memory in float32.
//
// During training, products widen a few rows of a matrix at a time. All arithmetic remains in float32 or,
// on a GPU, in the engine's precision.
//
// LoadFrozen only loads models without seeds, and the loaded model cannot grow. Checkpoints of a run
// contain only the parameters that learn.
func LoadFrozen(ctx context.Context, t cpuops.WeightType, c Config, r WeightReader, tuned ...string) (*Model,
	error) {
	m, err := loadFrozen(ctx, t, c, r, tuned)
	if err != nil {
		return nil, fmt.Errorf("llm: LoadFrozen: %w", err)
	}
	return m, nil
}

func loadFrozen(ctx context.Context, t cpuops.WeightType, c Config, r WeightReader, tuned []string) (*Model,
	error) {
	if err := errors.Join(c.Check(), TrainConfig{Tuned: tuned}.checkTuned(c)); err != nil {
		return nil, err
	}
	if !c.Adapter.IsZero() || len(c.Lattices()) > 0 {
		return nil, errors.New("the configuration has adapters or seeds: load the model without, and add adapters " +
			"with Adapt")
	}

	m := &Model{Config: c, byName: map[string]int{}}
	specs := slices.Collect(c.Specs())
	types, bytes := make([]cpuops.WeightType, len(specs)), uint64(0)
	for i, p := range specs {
		types[i] = frozenType(t, p, tuned)
		bytes += uint64(float64(tensor.Shape(p.Shape).TotalSize()) * types[i].Bits() / 8)
	}
	if err := memory.Check("the parameters take", bytes); err != nil {
		return nil, err
	}

	for i, p := range specs {
		value, err := m.readParam(ctx, types[i], p, r)
		if err != nil {
			return nil, err
		}
		m.byName[p.Name] = len(m.Params)
		m.Params = append(m.Params, Param{p.Name, value})
	}

	var err error
	m.Kasmina, err = m.newNetwork()
	return m, err
}

// frozenType returns the type that LoadFrozen chooses for a parameter.
func frozenType(t cpuops.WeightType, p ParamSpec, tuned []string) cpuops.WeightType {
	switch {
	case len(p.Shape) != 2 || isSmall(p.Name) || len(tuned) > 0 && (learning{tuned: tuned}).includes(p.Name):
		return cpuops.Float32
	case t != cpuops.Float32 && (p.Name == embedName || p.Name == headName):
		return cpuops.BFloat16
	}
	return t
}

// readParam reads a parameter. It adds a matrix in a compact type to the model's Base, and returns the values
// of any other parameter.
func (m *Model) readParam(ctx context.Context, t cpuops.WeightType, p ParamSpec, r WeightReader) (*tensor.Dense,
	error) {
	read := func(put func([]float32) error) error { return readNumbers(ctx, r, p.Name, put) }
	if t != cpuops.Float32 {
		if m.Base == nil {
			m.Base = new(cpuops.Weights)
		}
		return nil, m.Base.Add(t, p.Name, p.Shape[0], p.Shape[1], read)
	}

	size := tensor.Shape(p.Shape).TotalSize()
	values := make([]float32, 0, size)
	err := read(func(part []float32) error {
		if len(part) > size-len(values) {
			return fmt.Errorf("%s has more than %d elements", p.Name, size)
		}
		values = append(values, part...)
		return nil
	})
	if err == nil && len(values) < size {
		err = fmt.Errorf("%s has %d elements, want %d", p.Name, len(values), size)
	}
	if err != nil {
		return nil, err
	}
	return tensor.New(tensor.WithShape(p.Shape...), tensor.WithBacking(values)), nil
}

// readNumbers passes the elements of a parameter to put, in order and in parts.
func readNumbers(ctx context.Context, r WeightReader, name string, put func([]float32) error) error {
	var values []float32
	return r.Read(ctx, name, func(part []byte, dtype string) error {
		var err error
		if values, err = widenPart(values, part, dtype); err != nil {
			return err
		}
		return put(values)
	})
}

// PackLayers reads the linear layers of a model's blocks and converts them to the given type during reading. A
// machine takes them by an option, such as cudaops.WithWeights.
func PackLayers(ctx context.Context, t cpuops.WeightType, c Config, r WeightReader) (*cpuops.Weights, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("llm: PackLayers: %w", err)
	}

	packed := new(cpuops.Weights)
	for p := range c.Specs() {
		if len(p.Shape) != 2 || isSmall(p.Name) || p.Name == embedName || p.Name == headName || IsAdapterParam(p.Name) {
			continue
		}
		err := packed.Add(t, p.Name, p.Shape[0], p.Shape[1], func(put func([]float32) error) error {
			return readNumbers(ctx, r, p.Name, put)
		})
		if err != nil {
			return nil, fmt.Errorf("llm: PackLayers: %w", err)
		}
	}
	return packed, nil
}

// weight returns the values of a parameter, copied if the parameter is in the model's Base. It returns
// nil if the model lacks the parameter.
func (m *Model) weight(name string) *tensor.Dense {
	_, rows, width, ok := m.Base.Matrix(name)
	if !ok {
		return m.Param(name)
	}

	values := make([]float32, rows*width)
	_ = m.Base.Rows(name, values, 0, rows) // the rows exist
	return tensor.New(tensor.WithShape(rows, width), tensor.WithBacking(values))
}

// sizeOf returns the number of elements of a parameter.
func (m *Model) sizeOf(p Param) int {
	if _, rows, width, ok := m.Base.Matrix(p.Name); ok {
		return rows * width
	}
	return p.Value.Size()
}

// checkWhole returns an error if the model has a Base. purpose names the operation that does not support
// one.
func (m *Model) checkWhole(purpose string) error {
	if m.Base == nil {
		return nil
	}
	return fmt.Errorf("%s: the model holds frozen matrices in a compact type: load it without LoadFrozen", purpose)
}

// checkBaseFrozen returns an error if a parameter in the model's Base learns.
func (t *Trainer) checkBaseFrozen() error {
	for _, name := range t.Model.Base.Names() {
		if typ, _, _, _ := t.Model.Base.Matrix(name); t.Config.Learns(name) {
			return fmt.Errorf("llm: NewTrainer: %s learns, but the model holds it as %v: add adapters with Adapt, or "+
				"pass the names of the parameters that learn to LoadFrozen", name, typ)
		}
	}
	return nil
}

// hashMatrix hashes the name, the type, the shape and the numbers of a matrix in the model's Base.
func (m *Model) hashMatrix(h hash.Hash, name string) {
	t, rows, width, _ := m.Base.Matrix(name)
	fmt.Fprintln(h, name, t, rows, width)
	step := max(1, 1<<18/width)
	values := make([]float32, step*width)
	for row := 0; row < rows; row += step {
		n := min(step, rows-row)
		_ = m.Base.Rows(name, values, row, row+n) // the rows exist
		hashNumbers(h, values[:n*width])
	}
}

// cpuOptions returns the options of a CPU machine for the graph, with its Base.
func (g *Graph) cpuOptions(opts ...cpuops.Option) []cpuops.Option {
	if g.Base == nil {
		return opts
	}
	return append(opts, cpuops.WithWeights(g.Base))
}

// BaseType returns the type of the linear layers in the model's Base, or Float32 if the model has no
// Base.
func (m *Model) BaseType() cpuops.WeightType {
	for _, name := range m.Base.Names() {
		if t, _, _, _ := m.Base.Matrix(name); name != embedName && name != headName {
			return t
		}
	}
	return cpuops.Float32
}

// Rebase returns base with the parameters that m has learned. m may differ from base only by adapters and
// the values of some parameters.
//
// Rebase overwrites base's values of all parameters that are not in m's Base. The result shares the memory of
// base and of m's adapters; without adapters, it is base itself.
//
// Adapters trained on a quantized Base are best merged into the original weights, before quantization.
func (m *Model) Rebase(base *Model) (*Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: Rebase: %w", err)
	}
	defer done()

	next := base
	if !m.Config.Adapter.IsZero() {
		a := &Adapter{LoRA: m.Config.Adapter}
		for _, p := range m.Params {
			if IsAdapterParam(p.Name) {
				a.Params = append(a.Params, p)
			}
		}
		if next, err = base.Attach(a); err != nil {
			return nil, fmt.Errorf("llm: Rebase: %w", err)
		}
	}

	for _, p := range m.Params {
		to := next.Param(p.Name)
		switch {
		case IsAdapterParam(p.Name) || m.Base.Has(p.Name):
		case to == nil || !to.Shape().Eq(p.Value.Shape()) || to.Dtype() != p.Value.Dtype():
			return nil, fmt.Errorf("llm: Rebase: the other model has no parameter %s of shape %v", p.Name,
				p.Value.Shape())
		default:
			copyNumbers(to, p.Value)
		}
	}
	return next, nil
}
