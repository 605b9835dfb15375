package modelfile

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/state"
)

// A blueprint's file holds the arrays of blueprints.Parts and "scale", of shape [1]. Its metadata names
// the kind and the number of features of a chunk.
const (
	KindKey  = "kasmina.blueprint"
	ChunkKey = "kasmina.chunk"

	scaleName = "scale"
)

// Slots describes the slots of a model.
type Slots struct {
	Chunk int          // features of a chunk
	Width int          // weights of a slot
	Dtype tensor.Dtype // of the parameters
}

// parts returns the arrays that hold a blueprint's weights.
func (s Slots) parts(k blueprints.Kind) ([]blueprints.Part, error) {
	n, err := blueprints.Size(k, s.Chunk, s.Width)
	if err != nil {
		return nil, err
	}
	return blueprints.Parts(k, s.Chunk, n)
}

// SaveBlueprint writes a blueprint with the contents of its slot to a file.
func (s Slots) SaveBlueprint(path string, k blueprints.Kind, p state.SlotParams) error {
	parts, err := s.parts(k)
	if err != nil {
		return err
	}

	tensors := []safetensors.Tensor{{Name: scaleName, DType: safetensors.F64, Shape: []int{1},
		Data: []float64{p.Scale}}}
	for _, part := range parts {
		n := tensor.Shape(part.Shape).TotalSize()
		tensors = append(tensors, safetensors.Tensor{Name: part.Name, DType: safetensors.F64,
			Shape: part.Shape, Data: p.Weights[:n]})
		p.Weights = p.Weights[n:]
	}

	return safetensors.Save(path, tensors,
		map[string]string{KindKey: k.String(), ChunkKey: strconv.Itoa(s.Chunk)})
}

// ReadBlueprint reads a blueprint's file.
func (s Slots) ReadBlueprint(path string) (blueprints.Kind, state.SlotParams, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return 0, state.SlotParams{}, err
	}
	defer f.Close()
	kind, p, err := s.read(f)
	if err != nil {
		return 0, state.SlotParams{}, fmt.Errorf("%s: %w", path, err)
	}
	return kind, p, nil
}

func (s Slots) read(f *safetensors.File) (kind blueprints.Kind, p state.SlotParams, err error) {
	metadata := f.Metadata()
	if metadata[KindKey] == "" {
		return 0, p, fmt.Errorf("%w: it holds no blueprint: Model.SaveBlueprint writes one",
			blueprints.ErrUnknownKind)
	}

	kind, ok := blueprints.ByName(metadata[KindKey])
	if !ok {
		return 0, p, fmt.Errorf("%w %.100q: register it under this name with blueprints.Register",
			blueprints.ErrUnknownKind, metadata[KindKey])
	}

	if metadata[ChunkKey] != strconv.Itoa(s.Chunk) {
		return 0, p, fmt.Errorf("%w: it is for chunks of %.100q features, and the model's have %d",
			ErrArchitecture, metadata[ChunkKey], s.Chunk)
	}

	parts, err := s.parts(kind)
	if err != nil {
		return 0, p, err
	}

	parts = append(parts, blueprints.Part{Name: scaleName, Shape: []int{1}})
	if err := s.fits(f, kind, parts); err != nil {
		return 0, p, err
	}

	var all []float64
	for _, part := range parts {
		x, err := s.numbers(f, part.Name)
		if err != nil {
			return 0, p, err
		}
		all = append(all, x...)
	}

	n := len(all) - 1
	return kind, state.SlotParams{Weights: all[:n], Scale: all[n]}, nil
}

// fits checks that a file holds the parts of a blueprint and nothing else.
func (s Slots) fits(f *safetensors.File, kind blueprints.Kind, parts []blueprints.Part) error {
	if n := len(f.Names()); n != len(parts) {
		return fmt.Errorf("%w: it has %d tensors, want %d for a %v", ErrArchitecture, n,
			len(parts), kind)
	}

	for _, part := range parts {
		switch dtype, shape, err := f.Info(part.Name); {
		case err != nil:
			return fmt.Errorf("%w: a %v has a tensor %q, which is missing", ErrArchitecture, kind,
				part.Name)
		case !slices.Equal(shape, part.Shape):
			return fmt.Errorf("%w: tensor %q has shape %v, want %v, as slots of %d weights hold",
				ErrArchitecture, part.Name, shape, part.Shape, s.Width)
		case dtype != safetensors.F32 && dtype != safetensors.F64:
			return fmt.Errorf("%w: tensor %q is of type %s, want F32 or F64", ErrArchitecture,
				part.Name, dtype)
		}
	}

	return nil
}

// numbers returns the values of a part. It returns an error if the model's type cannot represent one.
func (s Slots) numbers(f *safetensors.File, part string) ([]float64, error) {
	x, err := f.Tensor(context.Background(), part) // small, so never canceled
	if err != nil {
		return nil, err
	}

	data, ok := x.Data.([]float64)
	if !ok {
		for _, v := range x.Data.([]float32) {
			data = append(data, float64(v))
		}
	}

	largest := math.MaxFloat64
	if s.Dtype == tensor.Float32 {
		largest = math.MaxFloat32
	}

	for i, v := range data {
		if !(math.Abs(v) <= largest) {
			return nil, fmt.Errorf("element %d of tensor %q is %v, want a number that the "+
				"model's %v holds", i, part, v, s.Dtype)
		}
	}

	return data, nil
}
