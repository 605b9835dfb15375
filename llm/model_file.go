package llm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// Save writes the model with its lattices to the safetensors file at path. The file is replaced
// atomically, so it is either the old one or the complete new one even if the process is killed. If a
// parameter is not finite, Save returns ErrDiverged and keeps the old file. While a trainer runs,
// Save waits for the end of the current step, and the run waits until the file is written.
func (m *Model) Save(path string) error {
	if err := checkMade(m); err != nil {
		return fmt.Errorf("llm: saving the model: %w", err)
	}
	if err := m.checkWhole("llm: saving the model"); err != nil {
		return err
	}
	defer take(m)()
	tensors, metadata, err := tensorsOf(m)
	if err != nil {
		return err
	}
	return safetensors.Save(path, tensors, metadata)
}

// isFinite reports whether a slice contains no NaN and no infinity.
func isFinite(data any) bool {
	at, _ := modelfile.FirstNonFinite(data)
	return at < 0
}

// tensorsOf returns the model's parameters and lattices, which share its memory, and the metadata with
// its configuration.
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
		if m.Base.Has(p.Name) { // only checkpoints leave these out
			continue
		}
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

	metadata := map[string]string{"format": "pt", modelfile.ConfigKey: string(config)}
	if len(m.Planted) > 0 {
		planted, err := json.Marshal(m.Planted)
		if err != nil {
			return nil, nil, fmt.Errorf("llm: saving the planted blueprints: %w", err)
		}
		metadata[modelfile.PlantedKey] = string(planted)
	}

	if m.KasminaOptions != (KasminaOptions{}) {
		options, err := json.Marshal(m.KasminaOptions)
		if err != nil {
			return nil, nil, fmt.Errorf("llm: saving the options of the Kasmina layers: %w", err)
		}
		metadata[modelfile.OptionsKey] = string(options)
	}

	return tensors, metadata, nil
}

// fileShapeOf returns the tensors that the file of a model with parameters of type dt must contain.
func fileShapeOf(c layout, dt tensor.Dtype) modelfile.Shape {
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

// layoutIn returns the layout of the model stored in a file.
func layoutIn(f *modelfile.File) (layout, error) {
	var c layout
	text, ok := f.Metadata[modelfile.ConfigKey]
	if !ok {
		return c, f.Errorf("%w: it has no %q in its metadata, which every model file of this package has",
			ErrArchitecture, modelfile.ConfigKey)
	}

	if len(text) <= modelfile.MaxConfig {
		// Growing the slice step by step would take several times the memory.
		c.Kasmina = make([]int, 0, strings.Count(text, ","))
	}

	// Older versions stored these settings in the configuration. They are now settings of a run, options of the model,
	// or stored under PlantedKey.
	var moved struct {
		Frozen         json.RawMessage `json:"frozen"`
		Directed       json.RawMessage `json:"directed"`
		KasminaOptions json.RawMessage `json:"kasmina_options"`
		Planted        json.RawMessage `json:"planted"`
	}
	if err := errors.Join(f.Decode(modelfile.ConfigKey, "the configuration", modelfile.MaxConfig, &c.Config),
		f.Decode(modelfile.ConfigKey, "the configuration", modelfile.MaxConfig, &moved)); err != nil {
		return c, err
	}

	if moved.Frozen != nil || moved.Directed != nil || moved.KasminaOptions != nil ||
		moved.Planted != nil {
		return c, f.Errorf("%w: it was written by an older version, whose configurations contained "+
			"frozen, directed, kasmina_options or planted: continue with that version", ErrArchitecture)
	}

	if c.Kasmina = slices.Clip(c.Kasmina); len(c.Kasmina) == 0 {
		c.Kasmina = nil
	}

	if _, ok := f.Metadata[modelfile.PlantedKey]; ok {
		if err := f.Decode(modelfile.PlantedKey, "the planted blueprints", modelfile.MaxConfig,
			&c.Planted); err != nil {
			return c, err
		}
	}

	if err := c.Check(); err != nil {
		return c, f.Errorf("%w", err)
	}

	return c, nil
}

// kasminaOptionsIn returns the options of the Kasmina layers stored in a file.
func kasminaOptionsIn(f *modelfile.File) (o KasminaOptions, err error) {
	if _, ok := f.Metadata[modelfile.OptionsKey]; !ok {
		return o, nil
	}
	if err := f.Decode(modelfile.OptionsKey, "the options of the Kasmina layers", modelfile.MaxOptions,
		&o); err != nil {
		return o, err
	}
	if err := o.check(); err != nil {
		return o, f.Errorf("%w", err)
	}
	return o, nil
}

// LoadModel reads a model and its lattices from a file written by Model.Save or Trainer.Save. The
// settings of the lattices (gates, telemetry, history) are taken from the file.
//
// LoadModel returns an error that locates the corruption in a corrupted file, ErrDiverged if a
// parameter is not finite, and ErrArchitecture if the tensors do not match the configuration. It
// allocates memory only for tensors actually in the file, whatever the configuration claims. Reading
// stops when ctx is done.
func LoadModel(ctx context.Context, path string) (*Model, error) {
	f, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	c, err := layoutIn(f)
	if err != nil {
		return nil, err
	}

	dt := tensor.Float32
	if d, _, err := f.Info(embedName); err == nil && d == safetensors.F64 {
		dt = tensor.Float64
	}

	if f.Metadata[modelfile.BaseKey] != "" {
		return nil, f.Errorf("it has only the parameters that a run has trained, and not the model that they belong " +
			"to: resume the run, or load its result")
	}

	// A configuration can claim any size, so check that the file contains the tensors before
	// allocating memory.
	if err := f.Fits(fileShapeOf(c, dt)); err != nil {
		return nil, err
	}

	options, err := kasminaOptionsIn(f)
	if err != nil {
		return nil, err
	}

	m, err := buildModel(c, dt, nil)
	if err != nil {
		return nil, f.Errorf("%w", err)
	}
	m.KasminaOptions = options

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

// latticesOf checks that the lattices in a file fit m, and returns a function that installs them.
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

// paramsIn reads the parameters of a configuration, stored with the given prefix. Parameters for which omits
// returns true are taken from m instead.
func paramsIn(ctx context.Context, m *Model, f *modelfile.File, c layout,
	prefix string, omits func(param string) bool) ([]Param, error) {
	var params []Param
	for p := range c.Specs() {
		if omits(p.Name) {
			params = append(params, Param{Name: p.Name, Value: m.Param(p.Name)})
			continue
		}
		value := newParamValue(m.Dtype(), p.Shape, nil)
		if err := f.Parameter(ctx, prefix+p.Name, value.Data()); err != nil {
			return nil, err
		}
		params = append(params, Param{Name: p.Name, Value: value})
	}
	return params, nil
}

// contentsIn reads the parameters and lattices of a file with configuration c, and returns a function
// that installs them in m. If m already has the same blocks, its parameters keep their memory. Parameters
// that the file omits stay as they are in m.
func contentsIn(ctx context.Context, m *Model, f *modelfile.File, c layout,
	omits func(param string) bool) (read []Param, load func(), err error) {
	install, err := m.latticesOf(ctx, f)
	if err != nil {
		return nil, nil, err
	}

	if read, err = paramsIn(ctx, m, f, c, "", omits); err != nil {
		return nil, nil, err
	}

	return read, func() {
		if m.layout().SameBlocks(c) {
			for i, p := range m.Params {
				copyNumbers(p.Value, read[i].Value)
			}
			// Blueprints of other sizes can lead to the same blocks, and ranks can have grown to the same ranks.
			m.Config.Grown, m.Config.Adapter = c.Grown, c.Adapter
		} else {
			become(m, c, read)
		}
		install()
	}, nil
}

// copyNumbers copies the values of a tensor to another of the same type and size. It does nothing if
// either is nil.
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
