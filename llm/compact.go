package llm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/half"
)

// CompactModel is a model for inference on a CPU, with matrices in float32, bfloat16 or q8_0. It takes
// half the memory of a [Model] in bfloat16 and about a quarter in q8_0, and it generates text faster,
// because most of the time for a token is spent reading the weights.
//
// All other values and all arithmetic remain in float32. A [Batcher] computes the same logits for a text,
// bit for bit, no matter how many other texts it continues at the same time.
//
// A compact model cannot be trained or grow. It may be used by multiple goroutines concurrently.
type CompactModel struct {
	parts   ModelParts
	weights *cpuops.Weights
}

// WeightReader reads the parameters of a model by name, like hf.Folder. Read passes the elements of a
// parameter to put, in order and in parts, as little-endian numbers of type float32, float16 or bfloat16.
type WeightReader interface {
	Read(ctx context.Context, name string, put func(part []byte, dtype string) error) error
}

// LoadCompact reads a model and converts its matrices to the given type while reading. Unless the type is
// float32, the whole model is never in memory in float32.
func LoadCompact(ctx context.Context, t cpuops.WeightType, c Config, r WeightReader) (*CompactModel, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("llm: LoadCompact: %w", err)
	}
	if t == cpuops.Float8 || t == cpuops.NF4 {
		return nil, fmt.Errorf("llm: LoadCompact: with matrices of type %v, single tokens would be slow: use q8_0, or "+
			"LoadFrozen to tune the model", t)
	}

	m, err := newCompactModel(t, c, func(name string, put func([]float32) error) error {
		return readNumbers(ctx, r, name, put)
	})
	if err != nil {
		return nil, fmt.Errorf("llm: LoadCompact: %w", err)
	}
	return m, nil
}

// Compact returns a copy of the model in its current state, with matrices of the given type. It returns
// an error if the model has seeds or its parameters are not float32.
func (m *Model) Compact(t cpuops.WeightType) (*CompactModel, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: Compact: %w", err)
	}
	defer done()

	if err := m.checkWhole("llm: Compact"); err != nil {
		return nil, err
	}
	if m.Dtype() != tensor.Float32 {
		return nil, fmt.Errorf("llm: Compact: the parameters are of type %v, want float32", m.Dtype())
	}
	if len(m.Config.Kasmina)+len(m.Planted) > 0 {
		return nil, errors.New("llm: Compact: the model has seeds: use the model that Plain returns")
	}

	values := map[string][]float32{}
	for _, p := range m.Params {
		values[p.Name] = p.Value.Float32s()
	}
	c, err := newCompactModel(t, m.Config, func(name string, put func([]float32) error) error {
		return put(values[name])
	})
	if err != nil {
		return nil, fmt.Errorf("llm: Compact: %w", err)
	}
	return c, nil
}

// newCompactModel builds a model with matrices of type t. It calls read for each parameter; read must
// pass the parameter's values to put.
func newCompactModel(t cpuops.WeightType, c Config, read func(name string, put func([]float32) error) error) (
	*CompactModel, error) {
	m := &CompactModel{Outline(c), new(cpuops.Weights)}

	// A small graph for logits has the same parameters as all other graphs.
	g, err := BuildGraph(m.parts, ForLogits, 1, WithWindow(1))
	if err != nil {
		return nil, err
	}

	for i, n := range g.Params {
		shape, size := n.Shape(), n.Shape().TotalSize()
		if cpuops.CanBeCompact(g.G, n) {
			own := t
			if isSmall(n.Name()) {
				own = cpuops.Float32
			}
			err := m.weights.Add(own, n.Name(), shape[0], shape[1], func(put func([]float32) error) error {
				return read(n.Name(), put)
			})
			if err != nil {
				return nil, err
			}
			continue
		}

		values := make([]float32, 0, size)
		err := read(n.Name(), func(part []float32) error {
			if len(part) > size-len(values) {
				return fmt.Errorf("%s has more than %d elements", n.Name(), size)
			}
			values = append(values, part...)
			return nil
		})
		if err == nil && len(values) < size {
			err = fmt.Errorf("%s has %d elements, want %d", n.Name(), len(values), size)
		}
		if err != nil {
			return nil, err
		}
		m.parts.Params[i].Value = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values))
	}

	return m, nil
}

// isSmall reports whether a parameter belongs to an adapter or is the table of positions. Rounding such
// small parameters would save little memory.
func isSmall(param string) bool { return param == PositionsName || IsAdapterParam(param) }

// widenPart converts little-endian numbers to float32. It reuses the memory of to if that is large
// enough.
func widenPart(to []float32, part []byte, dtype string) ([]float32, error) {
	size := 2
	if dtype == "float32" {
		size = 4
	}
	to = append(to[:0], make([]float32, len(part)/size)...)

	switch dtype {
	case "float32":
		for i := range to {
			to[i] = math.Float32frombits(binary.LittleEndian.Uint32(part[4*i:]))
		}
	case "bfloat16":
		for i := range to {
			to[i] = half.BFloat16(binary.LittleEndian.Uint16(part[2*i:])).Float32()
		}
	case "float16":
		for i := range to {
			to[i] = float32(half.Float16(binary.LittleEndian.Uint16(part[2*i:])).Float64())
		}
	default:
		return nil, fmt.Errorf("the weights are of dtype %.40q, want float32, float16 or bfloat16", dtype)
	}
	return to, nil
}

// Config returns the model's configuration.
func (m *CompactModel) Config() Config { return m.parts.Config }

// WithSeeds returns a model that shares the memory of m and applies the chunk seeds of an adapter to all texts. They
// replace any seeds that m has from an earlier call.
func (m *CompactModel) WithSeeds(a *Adapter) (*CompactModel, error) {
	if err := a.fits(m.parts.Config, m.parts.dtype()); err != nil {
		return nil, fmt.Errorf("llm: WithSeeds: %w", err)
	}
	if !a.LoRA.IsZero() {
		return nil, errors.New("llm: WithSeeds: the adapter is a low-rank adapter: load the model with it")
	}
	next := &CompactModel{m.parts, m.weights}
	next.parts.Seeds = a.Seeds
	return next, nil
}

// Bytes returns the size of the model's parameters in memory.
func (m *CompactModel) Bytes() int {
	n := m.weights.Bytes()
	for _, p := range m.parts.Params {
		if p.Value != nil {
			n += int(p.Value.MemSize())
		}
	}
	return n
}

// machine returns a machine for a graph of the model.
func (m *CompactModel) machine(g *Graph) (Machine, error) {
	return cpuops.NewMachine(g.G, cpuops.WithOutputs(g.Outputs()...), cpuops.WithWeights(m.weights))
}

// Inference returns an inference for losses, scores and generation.
func (m *CompactModel) Inference() *Inference {
	return &Inference{Make: m.machine, outline: &m.parts, compact: m}
}

// Generator returns a generator. A model's generators may be used concurrently, but [NewCompactBatcher]
// is faster for multiple texts.
func (m *CompactModel) Generator() *Generator {
	i := m.Inference()
	return &Generator{config: m.parts.Config, decoder: i.Decoder, close: i.Close}
}
