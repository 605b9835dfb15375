// Package modelfile reads and writes safetensors files of models, of runs and of blueprints.
//
// Parameters stand under their own names, as in the model files of other programs. The state of the
// optimiser and the arrays of the lattices stand under prefixes, all else in the metadata.
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

// Errors of files, which package llm has too.
var (
	ErrArchitecture = errors.New("checkpoint of another architecture")
	ErrDiverged     = errors.New("training diverged")
)

// Prefixes of tensors, and keys of the metadata.
const (
	OptimizerPrefix = "optimizer."
	LatticePrefix   = "lattice."
	PartPrefix      = "part." // followed by a part's name and the name of its tensor

	// Tensors that older versions wrote, whose state of growth this version cannot read.
	BeforePrefix = "before."
	TwinPrefix   = "twin."

	ConfigKey   = "kasmina.config"
	TrainingKey = "kasmina.training"
	NotesKey    = "kasmina.notes"
	PartKey     = "kasmina.part." // followed by a part's name
)

// Limits of the JSON in a file's metadata, in bytes. Decoded it takes up to forty times the memory,
// so it has to be small.
const (
	MaxConfig = 512 << 10 // a configuration with as many Kasmina layers as it can have has less
	MaxNotes  = 256 << 10 // options of a program have some hundred bytes
	MaxRun    = 64 << 10  // the state of a run, of which the schedule has some hundred bytes,
	MaxPart   = 512 << 10 // the values of a part; those of growth contain configurations
	MaxRule   = 1 << 10   // and what the optimiser does with each parameter
)

// Limits of the data that belong to a model, in bytes. They are far above what is written.
const (
	maxMoments     = 64      // of an optimiser, for each byte of a parameter; AdamW has two
	maxMomentsMore = 1 << 20 // and for all: counts of steps
	maxSeedData    = 1 << 10 // of a lattice, for each seed; it has some two hundred
	minSeedData    = 64      // and at least these
	maxLatticeMore = 1 << 20 // and for all: its header
)

// File is an open file. Its header is sound; whether it holds what a model needs, Fits says, and
// only then is anything read.
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

// Decode reads a value of the metadata, JSON of at most limit bytes.
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

// Shape is what a file must hold for a model.
type Shape struct {
	Params   iter.Seq2[string, []int] // names and shapes
	Dtype    tensor.Dtype             // of the parameters
	Lattices []Lattice
}

// Lattice is what a file holds of one.
type Lattice struct {
	Name      string
	Seeds     int
	SlotWidth int // weights of each slot
}

// Fits checks that the file holds the parameters of a model, lattices of about its size, and
// nothing that is not a model's.
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

// fitsRest is Fits for what is no parameter. Of those there are so many, with so many bytes.
func (f *File) fitsRest(s Shape, params int, bytes int64) error {
	var moments int64
	lattices := map[string]int64{}
	for _, name := range f.names {
		switch own, isLattice := strings.CutPrefix(name, LatticePrefix); {
		case isLattice:
			layer, _, _ := strings.Cut(own, ".")
			lattices[layer] += f.Bytes(name)
		case beside(name):
			moments += f.Bytes(name)
		default:
			params--
		}
	}

	if params < 0 {
		return f.Errorf("%w: it has %d tensors that are none of the model's, such as %.100q",
			ErrArchitecture, -params, f.stranger(s))
	}

	if limit := maxMoments*bytes + maxMomentsMore; moments > limit {
		return f.Errorf("%w: %d bytes are the optimiser's, which is too much for %d bytes of "+
			"parameters: want at most %d", ErrArchitecture, moments, bytes, limit)
	}

	for _, layer := range s.Lattices {
		n, seeds := lattices[layer.Name], int64(layer.Seeds)
		// While a seed is grafted, what its slot had before is there too, as float64.
		least := seeds * minSeedData
		most := seeds*(maxSeedData+8*int64(layer.SlotWidth+1)) + maxLatticeMore
		if n < least || n > most {
			return f.Errorf("%w: the lattice of layer %q has %d bytes, want %d to %d for %d seeds",
				ErrArchitecture, layer.Name, n, least, most, seeds)
		}
	}

	return nil
}

// beside reports whether a tensor is of what a run keeps beside its model.
func beside(name string) bool {
	return slices.ContainsFunc([]string{OptimizerPrefix, PartPrefix, BeforePrefix, TwinPrefix},
		func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// stranger returns the first tensor that is none of a model's.
func (f *File) stranger(s Shape) string {
	known := map[string]bool{}
	for name := range s.Params {
		known[name] = true
	}
	for _, name := range f.names {
		if !known[name] && !strings.HasPrefix(name, LatticePrefix) && !beside(name) {
			return name
		}
	}
	return ""
}

// Parameter reads a parameter, all of whose numbers must be finite, into a slice that fits it.
func (f *File) Parameter(ctx context.Context, name string, data any) error {
	if err := f.Read(ctx, name, data); err != nil {
		return f.Errorf("%w", err)
	}
	if at, value := FirstNonFinite(data); at >= 0 {
		return f.Errorf("%w: parameter %s is %v at element %d: go on from an older checkpoint",
			ErrDiverged, name, value, at)
	}
	return nil
}

// FirstNonFinite returns where the first NaN or infinity in a []float32 or []float64 is, and which,
// or −1. Other data has none.
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
