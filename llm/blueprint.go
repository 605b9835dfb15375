package llm

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

// A blueprint's file is a safetensors file that holds the arrays of blueprints.Parts, "scale" of
// shape [1], and in its metadata the name of the kind and the number of features of a chunk.
const (
	kindKey   = "kasmina.blueprint"
	chunkKey  = "kasmina.chunk"
	scaleName = "scale"
)

// SaveBlueprint writes the blueprint of a seed of a Kasmina layer, counted as in Config.Kasmina, to
// the safetensors file at path: the weights and the scale of its slot as they are now. It is an
// error when the seed has none, or its blueprint's life is over. While a trainer runs it waits for
// the end of the present step.
func (m *Model) SaveBlueprint(path string, layer, seed int) error {
	fail := func(err error) error {
		return fmt.Errorf("llm: SaveBlueprint: layer %d, seed %d: %w", layer, seed, err)
	}
	if err := m.made(); err != nil {
		return fail(err)
	}
	defer m.take()()
	l := m.Kasmina.Lattice(layer)
	if l == nil || seed < 0 || seed >= l.Seeds() {
		return fail(state.ErrSeed)
	}
	s := l.Report().Seeds[seed]
	if s.Slot == 0 || s.Stage.Ended() { // whose slot may be another's by now
		return fail(fmt.Errorf("it is %v and has no slot", s.Stage))
	}
	parts, err := m.parts(s.Kind)
	if err != nil {
		return fail(err)
	}
	p, err := slots{m}.Read(layer, s.Slot)
	if err != nil {
		return fail(err)
	}
	tensors := []safetensors.Tensor{{Name: scaleName, DType: safetensors.F64, Shape: []int{1},
		Data: []float64{p.Scale}}}
	for _, part := range parts {
		n := elements(part.Shape)
		tensors = append(tensors, safetensors.Tensor{Name: part.Name, DType: safetensors.F64,
			Shape: part.Shape, Data: p.Weights[:n]})
		p.Weights = p.Weights[n:]
	}
	metadata := map[string]string{kindKey: s.Kind.String(),
		chunkKey: strconv.Itoa(m.Config.Dim / m.Config.Seeds)}
	if err := safetensors.Save(path, tensors, metadata); err != nil {
		return fail(err)
	}
	return nil
}

// parts are the arrays of a blueprint's weights in this model's slots.
func (m *Model) parts(k blueprints.Kind) ([]blueprints.Part, error) {
	c := m.Config.Dim / m.Config.Seeds
	n, err := blueprints.Size(k, c, m.Config.slotWidth())
	if err != nil {
		return nil, err
	}
	return blueprints.Parts(k, c, n)
}

func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// LoadBlueprint sets the slot of a seed's blueprint to what the safetensors file at path holds, as
// [Model.SaveBlueprint] writes it; other programs may write its numbers as float32 too. While a
// trainer runs it waits for the end of the present step; to go on meanwhile, submit what
// [Model.ReadBlueprint] returns. On an error nothing has changed: a damaged file, numbers that are
// not finite, another kind than the seed's or than that of a seed that shares the slot, another
// shape than this model's slots hold, or a seed that is dormant or frozen for good.
func (m *Model) LoadBlueprint(path string, layer, seed int) error {
	c, err := m.ReadBlueprint(path, layer, seed)
	if err != nil {
		return err
	}
	if err := m.Kasmina.Do(c); err != nil {
		return fmt.Errorf("llm: LoadBlueprint: %s: %w", path, err)
	}
	return nil
}

// ReadBlueprint reads the file that [Model.LoadBlueprint] does and returns the command that sets a
// seed's slot to it, for m.Kasmina.Submit, alone or behind the command that germinates the seed,
// while training runs.
func (m *Model) ReadBlueprint(path string, layer, seed int) (c state.Command, err error) {
	if err := m.made(); err != nil {
		return c, fmt.Errorf("llm: ReadBlueprint: %w", err)
	}
	f, err := safetensors.Open(path)
	if err != nil {
		return c, fmt.Errorf("llm: ReadBlueprint: %w", err)
	}
	defer f.Close()
	fail := func(format string, args ...any) (state.Command, error) {
		return state.Command{}, fmt.Errorf("llm: ReadBlueprint: %s: "+format,
			append([]any{path}, args...)...)
	}
	metadata := f.Metadata()
	kind, ok := blueprints.ByName(metadata[kindKey])
	if !ok {
		return fail("%w: its metadata have %.100q for %s, want the name of a kind",
			blueprints.ErrUnknownKind, metadata[kindKey], kindKey)
	}
	if len(m.Config.Kasmina) == 0 {
		return fail("the model has no Kasmina layers")
	}
	if chunk := m.Config.Dim / m.Config.Seeds; metadata[chunkKey] != strconv.Itoa(chunk) {
		return fail("%w: it is for chunks of %.100q features, and the model's have %d",
			ErrArchitecture, metadata[chunkKey], chunk)
	}
	parts, err := m.parts(kind)
	if err != nil {
		return fail("%w", err)
	}
	all, err := m.readParts(f, kind, append(parts, blueprints.Part{Name: scaleName,
		Shape: []int{1}}))
	if err != nil {
		return fail("%w", err)
	}
	n := len(all) - 1
	return state.Command{Action: state.Load, Layer: layer, Seed: seed, Kind: kind,
		Params: state.SlotParams{Weights: all[:n], Scale: all[n]}}, nil
}

// readParts returns the numbers of the parts of a blueprint's file, one behind the other. It reads
// none before all are known to fit.
func (m *Model) readParts(f *safetensors.File, kind blueprints.Kind,
	parts []blueprints.Part) (all []float64, err error) {
	if n := len(f.Names()); n != len(parts) {
		return nil, fmt.Errorf("%w: it has %d tensors, want %d for a %v", ErrArchitecture, n,
			len(parts), kind)
	}
	for _, part := range parts {
		switch dtype, shape, err := f.Info(part.Name); {
		case err != nil:
			return nil, fmt.Errorf("%w: a %v has a tensor %q, which is missing", ErrArchitecture,
				kind, part.Name)
		case !slices.Equal(shape, part.Shape):
			return nil, fmt.Errorf("%w: tensor %q has shape %v, want %v, as slots of %d weights "+
				"hold", ErrArchitecture, part.Name, shape, part.Shape, m.Config.slotWidth())
		case dtype != safetensors.F32 && dtype != safetensors.F64:
			return nil, fmt.Errorf("%w: tensor %q is of type %s, want F32 or F64", ErrArchitecture,
				part.Name, dtype)
		}
	}
	largest := math.MaxFloat64
	if m.Dtype() == tensor.Float32 {
		largest = math.MaxFloat32
	}
	for _, part := range parts {
		x, err := f.Tensor(context.Background(), part.Name) // which is small
		if err != nil {
			return nil, err
		}
		data, ok := x.Data.([]float64)
		if !ok {
			data = widened(x.Data.([]float32))
		}
		for i, v := range data {
			if !(math.Abs(v) <= largest) {
				return nil, fmt.Errorf("element %d of tensor %q is %v, want a number that the "+
					"model's %v holds", i, part.Name, v, m.Dtype())
			}
		}
		all = append(all, data...)
	}
	return all, nil
}

func widened(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}
