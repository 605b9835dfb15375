// Package modelfile reads and writes safetensors files of models, of runs and of blueprints.
//
// Parameters are stored under their own names, as in the model files of other programs. The optimizer
// state, the arrays of the lattices and the state of parts are stored under prefixes, and everything else
// in the metadata.
package modelfile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/safetensors"
)

// Errors for invalid files. Package llm exports them too.
var (
	ErrArchitecture = errors.New("checkpoint of another architecture")
	ErrDiverged     = errors.New("training diverged")
)

// Prefixes of tensors, and keys of the metadata.
const (
	OptimizerPrefix = "optimizer."
	LatticePrefix   = "lattice."
	PartPrefix      = "part." // followed by a part's name and the name of its tensor

	ConfigKey   = "kasmina.config"
	TrainingKey = "kasmina.training"
	PlantedKey  = "kasmina.planted"
	OptionsKey  = "kasmina.options" // of the Kasmina layers
	NotesKey    = "kasmina.notes"
	BaseKey     = "kasmina.base"  // digest of the parameters that the file leaves out
	PartKey     = "kasmina.part." // followed by a part's name
)

// Limits of the JSON in a file's metadata, in bytes. Decoded, JSON takes up to forty times as much
// memory.
const (
	MaxConfig  = 512 << 10 // a configuration with the maximum number of Kasmina layers takes less
	MaxOptions = 4 << 10   // the options of the Kasmina layers
	MaxNotes   = 256 << 10 // the options of a program take some hundred bytes
	MaxRun     = 64 << 10  // the state of a run; its schedule takes some hundred bytes
	MaxPart    = 512 << 10 // the values of a part; growth stores configurations there
	MaxRule    = 1 << 10   // settings of the optimizer, for each parameter
)

// Limits for the other data of a model, in bytes. They are far above the actual sizes.
const (
	maxMoments     = 64      // of the optimizer, for each byte of a parameter; AdamW has two
	maxMomentsMore = 1 << 20 // plus this for all parameters: counts of steps
	maxSeedData    = 1 << 10 // of a lattice, for each seed; the actual size is some two hundred
	minSeedData    = 64      // minimum for each seed
	maxLatticeMore = 1 << 20 // plus this for each lattice: its header
)

// File is an open file with a valid header. Fits checks whether the file holds a model; call it before
// reading tensors.
type File struct {
	*safetensors.File
	Metadata map[string]string
	path     string
	names    []string // of all tensors, in data order
}

// Open opens the file at path.
func Open(path string) (*File, error) {
	file, err := safetensors.Open(path)
	if err != nil {
		return nil, fmt.Errorf("llm: %w", err)
	}
	return &File{file, file.Metadata(), path, file.Names()}, nil
}

// Errorf returns an error that names the file.
func (f *File) Errorf(format string, args ...any) error {
	return fmt.Errorf("llm: checkpoint %s: "+format, append([]any{f.path}, args...)...)
}

// Decode decodes a JSON value of at most limit bytes from the metadata.
func (f *File) Decode(key, what string, limit int, into any) error {
	text := f.Metadata[key]
	if len(text) > limit {
		return f.Errorf("%s: %d bytes of JSON, want at most %d", what, len(text), limit)
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return f.Errorf("%s: %w", what, err)
	}
	return nil
}

// With yields the names of the tensors with a prefix, in data order.
func (f *File) With(prefix string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, name := range f.names {
			if strings.HasPrefix(name, prefix) && !yield(name) {
				return
			}
		}
	}
}

// Shape describes the tensors that the file of a model must hold.
type Shape struct {
	Params   iter.Seq2[string, []int] // names and shapes
	Dtype    tensor.Dtype             // of the parameters
	Lattices []Lattice
}

// Lattice describes the stored state of a lattice.
type Lattice struct {
	Name      string
	Seeds     int
	SlotWidth int // weights of each slot
}

// Fits checks that the file holds the parameters of a model, lattices of a plausible size, and no unknown
// tensors.
func (f *File) Fits(s Shape) error {
	want := safetensors.F32
	if s.Dtype == tensor.Float64 {
		want = safetensors.F64
	}

	params, bytes := 0, int64(0)
	for name, shape := range s.Params {
		dtype, have, err := f.Info(name)
		if err != nil {
			return f.Errorf("%w: tensor %s is missing", ErrArchitecture, name)
		}
		if !slices.Equal(have, shape) || dtype != want {
			return f.Errorf("%w: tensor %s is %s of shape %v, the model's is %s of shape %v",
				ErrArchitecture, name, dtype, have, want, shape)
		}
		params, bytes = params+1, bytes+f.Bytes(name)
	}

	return f.fitsRest(s, params, bytes)
}

// fitsRest checks the tensors that are not parameters. The arguments params and bytes are the number of
// parameters and their total size.
func (f *File) fitsRest(s Shape, params int, bytes int64) error {
	var moments int64              // bytes of the optimizer state and the state of parts
	lattices := map[string]int64{} // bytes by layer
	others := 0                    // tensors that are neither; they should be the parameters
	for _, name := range f.names {
		switch own, isLattice := strings.CutPrefix(name, LatticePrefix); {
		case isLattice:
			layer, _, _ := strings.Cut(own, ".")
			lattices[layer] += f.Bytes(name)
		case isRunState(name):
			moments += f.Bytes(name)
		default:
			others++
		}
	}

	// Fits has found all parameters, so any further tensors are unknown.
	if others > params {
		return f.Errorf("%w: it has %d tensors that do not belong to the model, such as %.100q",
			ErrArchitecture, others-params, f.firstUnknown(s))
	}

	if limit := maxMoments*bytes + maxMomentsMore; moments > limit {
		return f.Errorf("%w: the optimizer state takes %d bytes, too many for %d bytes of "+
			"parameters: want at most %d", ErrArchitecture, moments, bytes, limit)
	}

	for _, layer := range s.Lattices {
		n, seeds := lattices[layer.Name], int64(layer.Seeds)
		// While a seed is grafted, the lattice also holds the previous contents of its slot as float64: the
		// weights and their scale.
		least := seeds * minSeedData
		most := seeds*(maxSeedData+8*int64(layer.SlotWidth+1)) + maxLatticeMore
		if n < least || n > most {
			return f.Errorf("%w: the lattice of layer %q has %d bytes, want %d to %d for %d seeds",
				ErrArchitecture, layer.Name, n, least, most, seeds)
		}
	}

	return nil
}

// isRunState reports whether a tensor belongs to the run's state rather than to the model.
func isRunState(name string) bool {
	return strings.HasPrefix(name, OptimizerPrefix) || strings.HasPrefix(name, PartPrefix)
}

// firstUnknown returns the name of the first tensor that does not belong to the model, a lattice or the run's
// state.
func (f *File) firstUnknown(s Shape) string {
	known := map[string]bool{}
	for name := range s.Params {
		known[name] = true
	}
	for _, name := range f.names {
		if !known[name] && !strings.HasPrefix(name, LatticePrefix) && !isRunState(name) {
			return name
		}
	}
	return ""
}

// Parameter reads a parameter into a slice of the right size. All its values must be finite.
func (f *File) Parameter(ctx context.Context, name string, data any) error {
	if err := f.Read(ctx, name, data); err != nil {
		return f.Errorf("%w", err)
	}
	if at, value := FirstNonFinite(data); at >= 0 {
		return f.Errorf("%w: parameter %s is %v at element %d: resume from an older checkpoint",
			ErrDiverged, name, value, at)
	}
	return nil
}

// FirstNonFinite returns the index and the value of the first NaN or infinity in a []float32 or
// []float64, or −1 if all values are finite or the data is of another type.
func FirstNonFinite(data any) (at int, value float64) {
	switch x := data.(type) {
	case []float32:
		if at := array.FirstNonFinite(x); at >= 0 {
			return at, float64(x[at])
		}
	case []float64:
		if at := array.FirstNonFinite(x); at >= 0 {
			return at, x[at]
		}
	}

	return -1, 0
}
