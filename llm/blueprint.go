package llm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
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
	p, err := slots{m}.Read(layer, s.Slot)
	if err != nil {
		return fail(err)
	}
	if err := m.fileSlots().SaveBlueprint(path, s.Kind, p); err != nil {
		return fail(err)
	}
	return nil
}

// fileSlots are the slots of the Kasmina layers as files of blueprints know them.
func (m *Model) fileSlots() modelfile.Slots {
	return modelfile.Slots{Chunk: m.Config.Dim / m.Config.Seeds, Width: m.Config.slotWidth(),
		Dtype: m.Dtype()}
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
	if len(m.Config.Kasmina) == 0 {
		return c, fmt.Errorf("llm: ReadBlueprint: %s: the model has no Kasmina layers", path)
	}
	kind, p, err := m.fileSlots().ReadBlueprint(path)
	if err != nil {
		return c, fmt.Errorf("llm: ReadBlueprint: %w", err)
	}
	return state.Command{Action: state.Load, Layer: layer, Seed: seed, Kind: kind, Params: p}, nil
}
