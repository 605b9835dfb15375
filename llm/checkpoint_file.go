package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/state"
)

// checkpoint is an open file. Its header is sound; whether it holds what a model needs, fits says,
// and only then is anything read.
type checkpoint struct {
	*safetensors.File
	path     string
	names    []string // of all tensors, in data order
	metadata map[string]string
}

// Limits of the JSON in a file's metadata, in bytes. Decoded it takes up to forty times the memory,
// so it has to be small.
const (
	maxConfig = 512 << 10 // a Config with a Kasmina layer after each of maxLayers blocks has less
	maxNotes  = 256 << 10 // TrainConfig.Notes; options of a program have some hundred bytes
	maxRun    = 64 << 10  // the state of a run, of which the schedule has some hundred bytes,
	maxRule   = 1 << 10   // and what the optimiser does with each parameter
)

// Limits of the data that belong to a model, in bytes. They are far above what this package writes.
const (
	maxMoments     = 64      // of an optimiser, for each byte of a parameter; AdamW has two
	maxMomentsMore = 1 << 20 // and for all: counts of steps
	maxSeedData    = 1 << 10 // of a lattice, for each seed; it has some two hundred
	minSeedData    = 64      // and at least these
	maxLatticeMore = 1 << 20 // and for all: its header
)

func openCheckpoint(path string) (*checkpoint, error) {
	file, err := safetensors.Open(path)
	if err != nil {
		return nil, fmt.Errorf("llm: %w", err)
	}
	return &checkpoint{file, path, file.Names(), file.Metadata()}, nil
}

func (f *checkpoint) errorf(format string, args ...any) error {
	return fmt.Errorf("llm: checkpoint %s: "+format, append([]any{f.path}, args...)...)
}

// decode reads a value of the metadata, JSON of at most limit bytes.
func (f *checkpoint) decode(key, what string, limit int, into any) error {
	text := f.metadata[key]
	if len(text) > limit {
		return f.errorf("%s: %d bytes of JSON, want at most %d", what, len(text), limit)
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return f.errorf("%s: %w", what, err)
	}
	return nil
}

func (f *checkpoint) config() (Config, error) {
	var c Config
	text, ok := f.metadata[configKey]
	if !ok {
		return c, f.errorf("%w: it has no %q in its metadata, as this package's model files do",
			ErrArchitecture, configKey)
	}
	if len(text) <= maxConfig {
		c.Kasmina = make([]int, 0, strings.Count(text,
			",")) // to grow step by step would take several times as much
	}
	if err := f.decode(configKey, "the configuration", maxConfig, &c); err != nil {
		return c, err
	}
	if c.Kasmina = slices.Clip(c.Kasmina); len(c.Kasmina) == 0 {
		c.Kasmina = nil
	}
	if err := c.Check(); err != nil {
		return c, f.errorf("%w", err)
	}
	return c, nil
}

// with yields the names of the tensors with a prefix, in data order.
func (f *checkpoint) with(prefix string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, name := range f.names {
			if strings.HasPrefix(name, prefix) && !yield(name) {
				return
			}
		}
	}
}

// fits checks that the file holds the parameters of a model, lattices of about its size, and
// nothing that is not a model's.
func (f *checkpoint) fits(c Config, dt tensor.Dtype) error {
	want := safetensors.F32
	if dt == tensor.Float64 {
		want = safetensors.F64
	}
	params, bytes := 0, int64(0)
	for p := range c.params() {
		dtype, shape, err := f.Info(p.name)
		if err != nil {
			return f.errorf("%w: tensor %s is missing", ErrArchitecture, p.name)
		}
		if !slices.Equal(shape, p.shape) || dtype != want {
			return f.errorf("%w: tensor %s is %s of shape %v, the model's is %s of shape %v",
				ErrArchitecture, p.name, dtype, shape, want, p.shape)
		}
		params, bytes = params+1, bytes+f.Bytes(p.name)
	}
	return f.fitsRest(c, params, bytes)
}

// fitsRest is fits for what is no parameter. Of those there are so many, with so many bytes.
func (f *checkpoint) fitsRest(c Config, params int, bytes int64) error {
	var moments int64
	lattices := map[string]int64{}
	for _, name := range f.names {
		switch own, isLattice := strings.CutPrefix(name, latticePrefix); {
		case isLattice:
			layer, _, _ := strings.Cut(own, ".")
			lattices[layer] += f.Bytes(name)
		case strings.HasPrefix(name, optimizerPrefix):
			moments += f.Bytes(name)
		default:
			params--
		}
	}
	if params < 0 {
		return f.errorf("%w: it has %d tensors that are none of the model's, such as %.100q",
			ErrArchitecture, -params, f.stranger(c))
	}
	if limit := maxMoments*bytes + maxMomentsMore; moments > limit {
		return f.errorf("%w: %d bytes are the optimiser's, which is too much for %d bytes of "+
			"parameters: "+
			"want at most %d", ErrArchitecture,
			moments, bytes, limit)
	}
	for _, block := range c.Kasmina {
		n, seeds := lattices[strconv.Itoa(block)], int64(c.Seeds)
		// While a seed is grafted, what its slot had before is there too, as float64.
		least := seeds * minSeedData
		most := seeds*(maxSeedData+8*int64(c.slotWidth()+1)) + maxLatticeMore
		if n < least || n > most {
			return f.errorf("%w: the lattice of layer %q has %d bytes, want %d to %d for %d seeds",
				ErrArchitecture, strconv.Itoa(block), n, least, most, seeds)
		}
	}
	return nil
}

// stranger returns the first tensor that is none of a model's.
func (f *checkpoint) stranger(c Config) string {
	known := map[string]bool{}
	for p := range c.params() {
		known[p.name] = true
	}
	for _, name := range f.names {
		if !known[name] && !strings.HasPrefix(name, latticePrefix) && !strings.HasPrefix(name,
			optimizerPrefix) {
			return name
		}
	}
	return ""
}

// parameter reads a parameter, all of whose numbers must be finite, into a slice that fits it.
func (f *checkpoint) parameter(ctx context.Context, name string, data any) error {
	if err := f.Read(ctx, name, data); err != nil {
		return f.errorf("%w", err)
	}
	at, value := -1, 0.0
	switch x := data.(type) {
	case []float32:
		if at = cpu.FirstNonFinite(x); at >= 0 {
			value = float64(x[at])
		}
	case []float64:
		if at = cpu.FirstNonFinite(x); at >= 0 {
			value = x[at]
		}
	}
	if at >= 0 {
		return f.errorf("%w: parameter %s is %v at element %d: go on from an older checkpoint",
			ErrDiverged, name, value, at)
	}
	return nil
}

// lattices checks those of a file that fits m, and returns what makes them m's.
func (f *checkpoint) lattices(ctx context.Context, m *Model) (install func(), err error) {
	var arrays []state.Array
	for name := range f.with(latticePrefix) {
		x, err := f.Tensor(ctx, name)
		if err != nil {
			return nil, f.errorf("%w", err)
		}
		arrays = append(arrays, state.Array{Name: strings.TrimPrefix(name, latticePrefix),
			Shape: x.Shape,
			Data:  x.Data})
	}
	if install, err = m.loadLattices(arrays); err != nil {
		return nil, f.errorf("%w", err)
	}
	return install, nil
}

// model reads the parameters and lattices of a file that fits m, and returns what makes them m's.
func (f *checkpoint) model(ctx context.Context, m *Model) (load func(), err error) {
	install, err := f.lattices(ctx, m)
	if err != nil {
		return nil, err
	}
	read := make([]any, len(m.Params))
	for i, p := range m.Params {
		if read[i] = make([]float32, p.Value.Size()); p.Value.Dtype() == tensor.Float64 {
			read[i] = make([]float64, p.Value.Size())
		}
		if err := f.parameter(ctx, p.Name, read[i]); err != nil {
			return nil, err
		}
	}
	return func() {
		for i, p := range m.Params {
			switch x := read[i].(type) {
			case []float32:
				copy(p.Value.Float32s(), x)
			case []float64:
				copy(p.Value.Float64s(), x)
			}
		}
		install()
	}, nil
}
