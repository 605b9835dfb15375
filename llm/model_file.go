package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// Save writes the model with its lattices to the safetensors file at path, replacing it in one
// step. A process killed at any moment leaves the old file or the new one. A model with a parameter
// that is not finite is refused with ErrDiverged, and the old file stays. While a trainer runs, it
// waits for the end of the present step, and the run for the file.
func (m *Model) Save(path string) error {
	if err := checkMade(m); err != nil {
		return fmt.Errorf("llm: saving the model: %w", err)
	}
	defer take(m)()
	tensors, metadata, err := tensorsOf(m)
	if err != nil {
		return err
	}
	return safetensors.Save(path, tensors, metadata)
}

// isFinite reports whether no number in a slice of them is NaN or infinite.
func isFinite(data any) bool {
	at, _ := modelfile.FirstNonFinite(data)
	return at < 0
}

// tensorsOf returns the model's parameters and lattices, sharing their memory, and its configuration.
func tensorsOf(m *Model) ([]safetensors.Tensor, map[string]string, error) {
	if err := checkMade(m); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the model: %w", err)
	}

	if err := settleParams(m); err != nil {
		return nil, nil, fmt.Errorf("llm: saving the model: %w", err)
	}

	config, err := json.Marshal(m.Config)
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving the configuration: %w", err)
	}

	var tensors []safetensors.Tensor
	add := func(name string, shape []int, data any) error {
		t, err := safetensors.New(name, shape, data)
		if err != nil {
			return fmt.Errorf("llm: saving the model: %w", err)
		}
		tensors = append(tensors, t)
		return nil
	}

	for _, p := range m.Params {
		if !isFinite(p.Value.Data()) {
			return nil, nil, fmt.Errorf("llm: saving the model: %w: parameter %s is not finite",
				ErrDiverged, p.Name)
		}
		if err := add(p.Name, p.Value.Shape(), p.Value.Data()); err != nil {
			return nil, nil, err
		}
	}

	for _, a := range m.Kasmina.Arrays() {
		if err := add(modelfile.LatticePrefix+a.Name, a.Shape, a.Data); err != nil {
			return nil, nil, err
		}
	}

	return tensors, map[string]string{"format": "pt", modelfile.ConfigKey: string(config)}, nil
}

// fileShapeOf is what a file of a model with parameters of a type holds.
func fileShapeOf(c Config, dt tensor.Dtype) modelfile.Shape {
	s := modelfile.Shape{Dtype: dt, Params: c.Parameters()}
	for _, block := range c.Origin().Kasmina {
		s.Lattices = append(s.Lattices, modelfile.Lattice{Name: strconv.Itoa(block), Seeds: c.Seeds,
			SlotWidth: c.KasminaWidth()})
	}
	for _, site := range c.Sites() {
		s.Lattices = append(s.Lattices, modelfile.Lattice{Name: site.String(),
			Seeds: c.Seeded(site)})
	}
	return s
}

// configIn returns the configuration in a file.
func configIn(f *modelfile.File) (Config, error) {
	var c Config
	text, ok := f.Metadata[modelfile.ConfigKey]
	if !ok {
		return c, f.Errorf("%w: it has no %q in its metadata, as this package's model files do",
			ErrArchitecture, modelfile.ConfigKey)
	}

	if len(text) <= modelfile.MaxConfig {
		// To grow step by step would take several times as much.
		c.Kasmina = make([]int, 0, strings.Count(text, ","))
	}

	if err := f.Decode(modelfile.ConfigKey, "the configuration",
		modelfile.MaxConfig, &c); err != nil {
		return c, err
	}

	if c.Kasmina = slices.Clip(c.Kasmina); len(c.Kasmina) == 0 {
		c.Kasmina = nil
	}

	if err := c.Check(); err != nil {
		return c, f.Errorf("%w", err)
	}

	return c, nil
}

// LoadModel reads a model from a file that Model.Save or Trainer.Save wrote, its lattices included. What
// they were made with (gates, telemetry, history) is in the file too. A damaged file is an error
// that says where. So is one with a parameter that is not finite (ErrDiverged) or with
// tensors that such a model does not have (ErrArchitecture). Whatever the file says,
// memory is taken for what it holds. When the context ends, so does the reading.
func LoadModel(ctx context.Context, path string) (*Model, error) {
	if ctx == nil {
		return nil, fmt.Errorf("llm: LoadModel: %w", errNoContext)
	}

	f, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	c, err := configIn(f)
	if err != nil {
		return nil, err
	}

	dt := tensor.Float32
	if d, _, err := f.Info(embedName); err == nil && d == safetensors.F64 {
		dt = tensor.Float64
	}

	// Before memory for a model is taken, the file must hold one: a configuration can ask for any
	// amount.
	if err := f.Fits(fileShapeOf(c, dt)); err != nil {
		return nil, err
	}

	m, err := buildModel(c, dt, nil)
	if err != nil {
		return nil, f.Errorf("%w", err)
	}

	for _, p := range m.Params {
		if err := f.Parameter(ctx, p.Name, p.Value.Data()); err != nil {
			return nil, err
		}
	}

	install, err := m.latticesOf(ctx, f)
	if err != nil {
		return nil, err
	}

	for _, prefix := range []string{modelfile.OptimizerPrefix, modelfile.PartPrefix} {
		for name := range f.With(prefix) {
			if err := f.Verify(ctx, name); err != nil {
				return nil, f.Errorf("%w", err)
			}
		}
	}

	install()
	return m, nil
}

// latticesOf checks those of a file that fits m, and returns what makes them m's.
func (m *Model) latticesOf(ctx context.Context, f *modelfile.File) (install func(), err error) {
	var arrays []state.Array
	for name := range f.With(modelfile.LatticePrefix) {
		x, err := f.Tensor(ctx, name)
		if err != nil {
			return nil, f.Errorf("%w", err)
		}
		arrays = append(arrays, state.Array{Name: strings.TrimPrefix(name, modelfile.LatticePrefix),
			Shape: x.Shape,
			Data:  x.Data})
	}

	if install, err = m.loadLattices(arrays); err != nil {
		return nil, f.Errorf("%w", err)
	}

	return install, nil
}

// paramsIn reads the parameters of a configuration, under a prefix.
func paramsIn(ctx context.Context, m *Model, f *modelfile.File, c Config,
	prefix string) ([]Param, error) {
	var params []Param
	for p := range c.Specs() {
		value := newParamValue(m.Dtype(), p.Shape, nil)
		if err := f.Parameter(ctx, prefix+p.Name, value.Data()); err != nil {
			return nil, err
		}
		params = append(params, Param{Name: p.Name, Value: value})
	}
	return params, nil
}

// contentsIn reads the parameters and lattices of a file of a configuration, and returns what makes
// them m's. Where the blocks are those that m has, its parameters stay where they are.
func contentsIn(ctx context.Context, m *Model, f *modelfile.File,
	c Config) (read []Param, load func(),
	err error) {
	install, err := m.latticesOf(ctx, f)
	if err != nil {
		return nil, nil, err
	}

	if read, err = paramsIn(ctx, m, f, c, ""); err != nil {
		return nil, nil, err
	}

	return read, func() {
		if m.Config.SameBlocks(c) {
			for i, p := range m.Params {
				copyNumbers(p.Value, read[i].Value)
			}
			m.Config.Grown = c.Grown // the same blocks may have come from blueprints of other sizes
		} else {
			c.KasminaOptions = m.Config.KasminaOptions
			become(m, c, read)
		}
		install()
	}, nil
}

// copyNumbers copies the numbers of a tensor to one of the same type and size, if none is nil.
func copyNumbers(to, from *tensor.Dense) {
	if to == nil || from == nil || to.Dtype() != from.Dtype() {
		return
	}
	switch from.Dtype() {
	case tensor.Float32:
		copy(to.Float32s(), from.Float32s())
	case tensor.Float64:
		copy(to.Float64s(), from.Float64s())
	}
}
