package llm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// newNetwork returns the lattices of the model's Kasmina layers and of its other sites. All except the
// lattice for depth get the given options.
func (m *Model) newNetwork(opts ...state.Option) (*state.Network, error) {
	layers := make([]state.Layer, len(m.Config.Kasmina))
	for i, block := range m.Config.Origin().Kasmina { // layers keep the numbers of the original blocks as their names
		l, err := m.newLattice(opts...)
		if err != nil {
			return nil, fmt.Errorf("llm: Kasmina layer after block %d: %w", block, err)
		}
		layers[i] = state.Layer{Name: strconv.Itoa(block), Lattice: l}
	}

	for _, site := range m.Config.Sites() {
		own := []state.Option{state.At(site)}
		if site != blueprints.Depth {
			own = append(own, opts...)
		}
		l, err := state.NewLattice(m.Config.Seeded(site), m.Config.Seeded(site), own...)
		if err != nil {
			return nil, fmt.Errorf("llm: the seeds of site %v: %w", site, err)
		}
		layers = append(layers, state.Layer{Name: site.String(), Lattice: l})
	}

	return state.NewNetwork(slotStore{m}, layers...)
}

func (m *Model) newLattice(opts ...state.Option) (*state.Lattice, error) {
	slots, width := m.Config.Slots, m.Config.KasminaWidth()
	l, err := state.NewLattice(m.Config.Seeds, m.Config.Dim,
		append([]state.Option{state.WithSlots(slots), state.WithWidth(width)}, opts...)...)
	if err == nil && l.Slots() != slots {
		err = fmt.Errorf("the options give it %d slots, want Config.Slots, %d", l.Slots(), slots)
	}

	if err == nil && l.Width() != width {
		err = fmt.Errorf("the options give its slots %d weights, want %d, as set by Config.SlotWidth",
			l.Width(), width)
	}

	return l, err
}

// loadLattices checks arrays of the lattices and returns a function that installs them in the model.
func (m *Model) loadLattices(arrays []state.Array) (install func(), err error) {
	install, err = m.Kasmina.Load(arrays)
	if errors.Is(err, state.ErrShape) {
		err = fmt.Errorf("%w: %w", ErrArchitecture, err)
	}
	return install, err
}

// Germinate plants a blueprint in a seed of Kasmina layer i, an index into Config.Kasmina. It sets
// the slot to the kind's identity start, unless a living seed shares the slot, and requests
// germination. Random weights depend only on the layer, the seed, the slot and the lattice's epoch.
// After an error, nothing has changed. Germinate is shorthand for m.Kasmina.Do with a single command.
func (m *Model) Germinate(i, seed int, r state.GerminationRequest) error {
	err := checkMade(m)
	if err == nil {
		err = m.Kasmina.Do(state.Command{Action: state.Germinate, Layer: i, Seed: seed, Request: r})
	}
	if err != nil {
		return fmt.Errorf("llm: Germinate: %w", err)
	}
	return nil
}

// slotStore gives the lattices access to the parameters in the slots of a model's Kasmina layers,
// wherever they currently reside. If the model is uninitialized, its methods return errZeroModel.
type slotStore struct{ Model *Model }

var (
	_ state.Places  = slotStore{}
	_ state.Rounder = slotStore{}
)

// check returns an error unless the slot exists.
func (s slotStore) check(layer, slot int) error {
	if err := checkMade(s.Model); err != nil {
		return err
	}
	if layers := len(s.Model.Config.Kasmina); layer < 0 || layer >= layers || slot < 0 ||
		slot >= s.Model.Config.Slots {
		return fmt.Errorf("llm: %w: slot %d of Kasmina layer %d, want a slot below %d of %d layers",
			state.ErrArgument, slot, layer, s.Model.Config.Slots, layers)
	}
	return nil
}

// Start draws random weights that depend only on the layer, the seed, the slot and the lattice's epoch,
// so that a resumed run draws the same ones. The network calls it while the lattice is locked, so that
// its epoch cannot change.
func (s slotStore) Start(g state.Germination) (p state.SlotParams, err error) {
	if err := s.check(g.Layer, g.Slot); err != nil {
		return p, err
	}

	width := s.Model.Config.KasminaWidth()
	w, a := make([]float64, 2*width), make([]float64, 2)
	draw := rand.NewPCG(uint64(g.Layer)<<32|uint64(uint32(g.Seed)),
		uint64(g.Slot)<<32|uint64(g.Epoch)).Uint64()
	if err := blueprints.Identity(g.Kind, 1, s.Model.Config.Dim/s.Model.Config.Seeds, draw, w,
		a); err != nil {
		return p, err
	}

	return state.SlotParams{Weights: w[width:], Scale: a[1]}, nil
}

// Round implements [state.Rounder].
func (s slotStore) Round(p state.SlotParams) state.SlotParams {
	if s.Model == nil || s.Model.Dtype() != tensor.Float32 {
		return p
	}

	rounded := state.SlotParams{Weights: make([]float64, len(p.Weights)), Scale: float64(float32(p.Scale))}
	for i, w := range p.Weights {
		rounded.Weights[i] = float64(float32(w))
	}
	return rounded
}

// Read returns the contents of a slot.
func (s slotStore) Read(layer, slot int) (p state.SlotParams, err error) {
	if err := s.check(layer, slot); err != nil {
		return p, err
	}

	if err := pull(s.Model, s.names(layer)...); err != nil {
		holderOf(s.Model).FailAlone(err)
		return p, err
	}

	weights, scales := s.params(layer)
	if s.Model.Dtype() == tensor.Float32 {
		return readSlot(weights.Float32s(), scales.Float32s(), slot), nil
	}

	return readSlot(weights.Float64s(), scales.Float64s(), slot), nil
}

// Write sets slots on the host and in the trainer's copy, and clears their optimizer state. After an error,
// nothing has changed, unless the trainer's copy cannot be restored. The model then cannot be used before its
// trainer resumes from a checkpoint.
func (s slotStore) Write(writes []state.SlotWrite) error {
	if err := checkMade(s.Model); err != nil {
		return err
	}

	s.Model.changes.Add(1)
	for _, w := range writes {
		if err := s.check(w.Layer, w.Slot); err != nil {
			return err
		}
		if want := s.Model.Config.KasminaWidth(); len(w.Params.Weights) != want || w.Slot < 1 ||
			w.Slot >= s.Model.Config.Slots {
			return fmt.Errorf("llm: %d weights for slot %d of Kasmina layer %d, want %d for a "+
				"slot from 1 to %d",
				len(w.Params.Weights), w.Slot, w.Layer, want, s.Model.Config.Slots-1)
		}
	}

	before := make([]state.SlotWrite, len(writes))
	var changed []string
	for i, w := range writes {
		p, err := s.Read(w.Layer, w.Slot)
		if err != nil {
			return err
		}
		before[i] = state.SlotWrite{Layer: w.Layer, Slot: w.Slot, Params: p}
		if names := s.names(w.Layer); !slices.Contains(changed, names[0]) {
			changed = append(changed, names...)
		}
	}

	s.set(writes)
	e := mirrorOf(s.Model)
	if e == nil {
		return nil
	}

	// The optimizer state of the slots belongs to their earlier contents. It is cleared last and all at once,
	// because it could not be restored after a failure.
	var ranges []ParamRange
	for _, w := range writes {
		ranges = append(ranges, s.ranges(w.Layer, w.Slot, w.Slot+1)...)
	}

	err := e.Push(changed...)
	if err == nil {
		err = e.Forget(ranges...)
	}

	if err == nil {
		return nil
	}

	holderOf(s.Model).FailAlone(err)
	s.set(before)
	if again := e.Push(changed...); again != nil {
		err = fmt.Errorf("%w; restoring the slots: %w", err, again)
		holderOf(s.Model).Spoil(err) // some slots may have the new contents where the model is trained
	}
	return err
}

// ranges returns the elements of the slots from ≤ i < to of a layer.
func (s slotStore) ranges(layer, from, to int) []ParamRange {
	names, width := s.names(layer), s.Model.Config.KasminaWidth()
	return []ParamRange{{names[0], from * width, to * width}, {names[1], from, to}}
}

// ForgetFrozen clears the optimizer state of slots that are no longer trained by any seed, so that an
// update without weight decay leaves them unchanged, bit for bit.
//
// learning lists, per layer, the slots that learned in the last step; it is nil if that is unknown.
// ForgetFrozen returns the slots that learn now. After an error, it has cleared nothing.
func (s slotStore) ForgetFrozen(e paramMirror, learning [][]bool) ([][]bool, error) {
	if err := checkMade(s.Model); err != nil {
		return nil, err
	}

	if e == nil {
		return nil, errors.New("llm: ForgetFrozen: the parameters are only on the host")
	}

	known, before := learning != nil, learning
	learning = make([][]bool, s.Model.Kasmina.Layers())
	copy(learning, before)
	var frozen []ParamRange
	for layer, l := range s.Model.Kasmina.Lattices() {
		if l.Site() != blueprints.Chunk {
			ranges, now, err := s.frozenPlanted(l, learning[layer], known)
			if err != nil {
				return nil, err
			}
			frozen, learning[layer] = append(frozen, ranges...), now
			continue
		}
		was, now := learning[layer], l.LearningSlots()
		ended := func(slot int) bool {
			return slot < len(now) && !now[slot] && (!known || was[slot])
		}
		for from := 0; from < len(now); from++ {
			to := from
			for ended(to) {
				to++
			}
			if to == from {
				continue
			}
			frozen = append(frozen, s.ranges(layer, from, to)...)
			from = to
		}
		learning[layer] = now
	}

	if len(frozen) == 0 {
		return learning, nil
	}
	if err := e.Forget(frozen...); err != nil {
		return nil, err
	}
	return learning, nil
}

func (s slotStore) set(writes []state.SlotWrite) {
	for _, w := range writes {
		weights, scales := s.params(w.Layer)
		if s.Model.Dtype() == tensor.Float32 {
			writeSlot(weights.Float32s(), scales.Float32s(), w.Slot, w.Params)
		} else {
			writeSlot(weights.Float64s(), scales.Float64s(), w.Slot, w.Params)
		}
	}
}

// names returns the names of the weights and the scales of a Kasmina layer.
func (s slotStore) names(layer int) []string {
	p := blockPrefix(s.Model.Config.Kasmina[layer])
	return []string{p + kasminaWeights, p + kasminaScales}
}

func (s slotStore) params(layer int) (weights, scales *tensor.Dense) {
	names := s.names(layer)
	return s.Model.Param(names[0]), s.Model.Param(names[1])
}

func readSlot[T float32 | float64](weights, scales []T, slot int) state.SlotParams {
	width := len(weights) / len(scales)
	p := state.SlotParams{Weights: make([]float64, width), Scale: float64(scales[slot])}
	for i, v := range weights[slot*width:][:width] {
		p.Weights[i] = float64(v)
	}
	return p
}

func writeSlot[T float32 | float64](weights, scales []T, slot int, p state.SlotParams) {
	width := len(weights) / len(scales)
	for i, v := range p.Weights {
		weights[slot*width+i] = T(v)
	}
	scales[slot] = T(p.Scale)
}

// SaveBlueprint writes the current weights and scale of a seed's slot to the safetensors file at
// path. The layer is an index into Config.Kasmina. It is an error if the seed has no blueprint, or
// one at the end of its life. While a trainer runs, SaveBlueprint waits for the end of the current
// step.
func (m *Model) SaveBlueprint(path string, layer, seed int) error {
	fail := func(err error) error {
		return fmt.Errorf("llm: SaveBlueprint: layer %d, seed %d: %w", layer, seed, err)
	}
	if err := checkMade(m); err != nil {
		return fail(err)
	}
	defer take(m)()

	l := m.Kasmina.Lattice(layer)
	if l == nil || seed < 0 || seed >= l.Seeds() {
		return fail(state.ErrSeed)
	}

	if l.Site() != blueprints.Chunk {
		return fail(fmt.Errorf("a blueprint at site %v has no slot", l.Site()))
	}

	s := l.Report().Seeds[seed]
	if s.Slot == 0 || s.Stage.Ended() { // another seed may own the slot by now
		return fail(fmt.Errorf("it is %v and has no slot", s.Stage))
	}

	p, err := slotStore{m}.Read(layer, s.Slot)
	if err != nil {
		return fail(err)
	}

	if err := m.fileSlots().SaveBlueprint(path, s.Kind, p); err != nil {
		return fail(err)
	}

	return nil
}

// fileSlots describes the slots of the Kasmina layers to package modelfile.
func (m *Model) fileSlots() modelfile.Slots {
	return modelfile.Slots{Chunk: m.Config.Dim / m.Config.Seeds, Width: m.Config.KasminaWidth(),
		Dtype: m.Dtype()}
}

// LoadBlueprint sets a seed's slot to the weights and scale in the safetensors file at path, as written
// by [Model.SaveBlueprint]. Files of other programs may use float32 for a model in float64.
//
// While a trainer runs, LoadBlueprint waits for the end of the current step. To continue without waiting,
// submit the command that [Model.ReadBlueprint] returns.
//
// LoadBlueprint rejects corrupted files, non-finite numbers, and weights with shapes that differ from
// the model's slots. The seed and all other living seeds that share the slot must have the same kind as
// the file, and no such seed may be permanently frozen. The seed must have a living blueprint on a chunk.
// After an error, nothing has changed.
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

// ReadBlueprint reads a file for [Model.LoadBlueprint] and returns the command that sets a seed's slot to
// its contents. Pass the command to m.Kasmina.Submit while training runs, alone or after the command that
// germinates the seed.
func (m *Model) ReadBlueprint(path string, layer, seed int) (c state.Command, err error) {
	if err := checkMade(m); err != nil {
		return c, fmt.Errorf("llm: ReadBlueprint: %w", err)
	}

	done := take(m)
	layers, slots := len(m.Config.Kasmina), m.fileSlots()
	done()
	if layers == 0 {
		return c, fmt.Errorf("llm: ReadBlueprint: %s: the model has no Kasmina layers", path)
	}

	kind, p, err := slots.ReadBlueprint(path)
	if err != nil {
		return c, fmt.Errorf("llm: ReadBlueprint: %w", err)
	}

	return state.Command{Action: state.Load, Layer: layer, Seed: seed, Kind: kind, Params: p}, nil
}

// Lock and Unlock implement the locking of state.Network.Do.
func (s slotStore) Lock() { s.Model.turn.Lock() }
func (s slotStore) Unlock() {
	if s.Model != nil {
		s.Model.turn.Unlock()
	}
}
