package hf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// seedsType is the peft_type of chunk seeds. PEFT does not know it and returns an error.
const seedsType = "KASMINA_SEEDS"

// seedsConfig is the adapter_config.json of chunk seeds.
type seedsConfig struct {
	Base     string      `json:"base_model_name_or_path"`
	Layers   []seedLayer `json:"kasmina_layers"`
	PEFTType string      `json:"peft_type"`
	TaskType string      `json:"task_type"`
}

// A seedLayer describes the seeds after a block in an adapter_config.json.
type seedLayer struct {
	Block  int         `json:"block"`
	Chunks int         `json:"chunks"`
	Seeds  []chunkSeed `json:"seeds"`
}

type chunkSeed struct {
	Chunk int     `json:"chunk"`
	Kind  string  `json:"kind"`
	Alpha float64 `json:"alpha"`
	Scale float64 `json:"scale"`
}

// seedTensor returns the name of the tensor with the weights of a seed.
func seedTensor(block, chunk int) string { return fmt.Sprintf("layers.%d.chunks.%d", block, chunk) }

// readSeeds reads the seeds that the configuration describes.
func (c adapterConfig) readSeeds(ctx context.Context, f *safetensors.File, dt tensor.Dtype) (*llm.Adapter, error) {
	a, rest := &llm.Adapter{}, map[string]bool{}
	for _, name := range f.Names() {
		rest[name] = true
	}

	for _, l := range c.Layers {
		next := llm.SeedLayer{Block: l.Block, Chunks: l.Chunks}
		for _, s := range l.Seeds {
			name := seedTensor(l.Block, s.Chunk)
			if !rest[name] {
				return nil, fmt.Errorf("%s has no tensor %s, or %s names it twice", adapterWeightsName, name, adapterConfigName)
			}
			delete(rest, name)
			_, shape, err := f.Info(name)
			if err != nil {
				return nil, err
			}
			if len(shape) != 1 || shape[0] < 1 {
				return nil, fmt.Errorf("%s has the shape %v, want a vector", name, shape)
			}
			w := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
			if err := readAdapterTensor(ctx, f, name, w); err != nil {
				return nil, err
			}
			next.Seeds = append(next.Seeds, llm.ChunkSeed{Chunk: s.Chunk, Kind: s.Kind, Alpha: s.Alpha, Scale: s.Scale, Weights: w})
		}
		a.Seeds = append(a.Seeds, next)
	}

	for _, name := range slices.Sorted(maps.Keys(rest)) {
		return nil, fmt.Errorf("%s has the tensor %.200s, which belongs to no seed of %s", adapterWeightsName, name,
			adapterConfigName)
	}
	return a, nil
}

// seedsOf returns the configuration and the tensors of a model's chunk seeds.
func seedsOf(ctx context.Context, base string, m *llm.Model) (c seedsConfig, all []safetensors.Source, err error) {
	a, err := m.SeedAdapter()
	if err != nil {
		return c, nil, err
	}

	c = seedsConfig{Base: base, PEFTType: seedsType, TaskType: "CAUSAL_LM"}
	for _, l := range a.Seeds {
		next := seedLayer{Block: l.Block, Chunks: l.Chunks}
		for _, s := range l.Seeds {
			if math.IsNaN(s.Scale) || math.IsInf(s.Scale, 0) {
				return c, nil, fmt.Errorf("%w: the scale of the seed at chunk %d after block %d is %v", llm.ErrDiverged, s.Chunk,
					l.Block, s.Scale)
			}
			next.Seeds = append(next.Seeds, chunkSeed{s.Chunk, s.Kind, s.Alpha, s.Scale})
			name := seedTensor(l.Block, s.Chunk)
			all = append(all, safetensors.Source{Name: name, DType: safetensors.F32, Shape: []int{s.Weights.DataSize()},
				Write: func(w io.Writer) error { return writeFloats(ctx, w, name, float32sOf(s.Weights)) }})
		}
		c.Layers = append(c.Layers, next)
	}
	return c, all, nil
}

// checkSeeds returns an error unless SaveAdapter can save the seeds of a model.
func checkSeeds(c llm.Config) error {
	if len(c.Weights)+len(c.Streams)+c.Depth > 0 {
		return errors.New("the model has seeds at weights, in the stream or in depth: SavePretrained writes whole models")
	}
	return nil
}
