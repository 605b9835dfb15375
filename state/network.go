package state

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/internal/outbox"
)

// Network holds the lattices of all Kasmina layers of a model, and addresses a seed by its layer
// and its number in it.
//
// Commands come in two ways. Those of [Network.Submit] wait until whoever runs the model calls
// [Network.Apply], which a training loop does between its steps. [Network.Do] acts at once. Either
// way all commands of one call take effect together, or, when one is refused, none.
//
// Submit, Listen, Report, Arrays, Verify, Scrub, Open and Close may be called from any goroutine at
// any time. Do may be, too, where the slots have a lock. Apply, StepEpoch, Load and what it returns
// are for whoever runs the model, between passes.
//
// The network also looks after the parameters behind the slots, if it is given them. Germination
// sets a slot to the blueprint's identity start, unless a living seed shares it. The beginning of a
// grafting keeps the slot's weights and scale. A rollback puts them back, unless another living
// seed shares the slot. A transition that is asked of the lattice itself touches no parameters, and
// one that ends a grafting forgets what was kept.
type Network struct {
	layers []Layer
	slots  Slots
	outbox outbox.Outbox[Event]

	mu    sync.Mutex // held while commands are carried out, and taken before the lattices' locks
	queue queue
}

// Layer is a lattice under the name that it has in files.
type Layer struct {
	Name    string
	Lattice *Lattice
}

// Slots are the parameters behind the slots of a network's layers. The network calls them between
// passes only.
//
// Slots that are a [sync.Locker] too are locked by each Do, before the network itself. It waits for
// the end of a pass that holds their lock. Whoever calls Apply or StepEpoch holds it already.
type Slots interface {
	// Start returns the identity start of a blueprint. It changes nothing.
	Start(Germination) (SlotParams, error)
	Read(layer, slot int) (SlotParams, error)
	// Write sets all of the given slots, or on an error none.
	Write([]SlotWrite) error
}

// Places are Slots that know where the seeds sit which have no slots.
type Places interface {
	Slots
	// Fits returns an error if a blueprint of some size cannot grow there.
	Fits(g Germination, size int) error
}

// Germination is the planting of a blueprint in a slot.
type Germination struct {
	Layer, Seed, Slot int
	Kind              blueprints.Kind
	Epoch             int // of the lattice
}

// SlotParams are the parameters of a slot.
type SlotParams struct {
	Weights []float64
	Scale   float64
}

// SlotWrite is a slot and what shall be in it.
type SlotWrite struct {
	Layer, Slot int
	Params      SlotParams
}

// address is a seed's, or a slot's.
type address struct{ layer, number int }

// NewNetwork returns a network of the given layers, in order. slots may be nil: then nobody touches
// parameters. It returns an error when a lattice is nil or there twice, two layers have one name,
// or a name has a dot in it.
func NewNetwork(slots Slots, layers ...Layer) (*Network, error) {
	n := &Network{layers: slices.Clone(layers), slots: slots}
	for i, a := range layers {
		if a.Lattice == nil {
			return nil, fmt.Errorf("state.NewNetwork: %w: the lattice of layer %d is nil",
				ErrArgument, i)
		}
		if strings.Contains(a.Name, ".") {
			return nil,
				fmt.Errorf("state.NewNetwork: %w: the name of layer %d is %q, want one without a "+
					"dot", ErrArgument, i, a.Name)
		}
		for j, b := range layers[:i] {
			if a.Lattice == b.Lattice || a.Name == b.Name {
				return nil,
					fmt.Errorf("state.NewNetwork: %w: layers %d and %d have one lattice or one "+
						"name, %q", ErrArgument, j, i, a.Name)
			}
		}
	}
	for i, l := range layers {
		l.Lattice.outbox.Relay(&n.outbox, func(e *Event) { e.Layer = i })
	}
	return n, nil
}

// orNone returns n, and for nil one without layers.
func (n *Network) orNone() *Network {
	if n == nil {
		return new(Network)
	}
	return n
}

// Layers returns the number of layers.
func (n *Network) Layers() int { return len(n.orNone().layers) }

// Seeds returns the number of seeds in all layers.
func (n *Network) Seeds() (seeds int) {
	n = n.orNone()
	for _, l := range n.layers {
		seeds += l.Lattice.Seeds()
	}
	return seeds
}

// Lattice returns a layer's lattice, or nil when there is no such layer.
func (n *Network) Lattice(layer int) *Lattice {
	n = n.orNone()
	if layer < 0 || layer >= len(n.layers) {
		return nil
	}
	return n.layers[layer].Lattice
}

// Lattices yields the layers' lattices with their numbers.
func (n *Network) Lattices() iter.Seq2[int, *Lattice] {
	n = n.orNone()
	return func(yield func(int, *Lattice) bool) {
		for i, l := range n.layers {
			if !yield(i, l.Lattice) {
				return
			}
		}
	}
}

// Report returns the reports of all layers.
func (n *Network) Report() []Report {
	n = n.orNone()
	reports := make([]Report, len(n.layers))
	for i, l := range n.layers {
		reports[i] = l.Lattice.Report()
	}
	return reports
}

// Listen makes f hear of the events of all layers; see [Lattice.Listen].
func (n *Network) Listen(f func(Event)) (stop func(), err error) {
	n = n.orNone()
	if f == nil {
		return nil, fmt.Errorf("state.Listen: %w: f is nil, want a function", ErrArgument)
	}
	return n.outbox.Listen(f), nil
}

// Verify verifies all lattices. Its error names the layer of the first corrupt seed; see
// [Lattice.Verify].
func (n *Network) Verify() error {
	n = n.orNone()
	for i, l := range n.layers {
		if err := l.Lattice.Verify(); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	return nil
}

// Scrub runs [Lattice.Scrub] on all layers until the context ends. found may be called from several
// goroutines at once. One that shall put corrupt seeds into quarantine submits a Quarantine
// command. Or it leaves that to the end of the epoch of lattices that are made [WithQuarantine].
func (n *Network) Scrub(ctx context.Context, period time.Duration,
	found func(layer int, err error)) error {
	n = n.orNone()
	if err := checkScrub(ctx, period); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for i, l := range n.layers {
		wg.Go(func() {
			// Its error would be that of the arguments.
			_ = l.Lattice.Scrub(ctx, period, func(err error) {
				if found != nil {
					found(i, err)
				}
			})
		})
	}
	wg.Wait()
	return nil
}

// StepEpoch ends an epoch in all layers, with the metrics of each; see [Lattice.StepEpoch]. It
// reads the parameters of the blueprints that train and adds them to the metrics. On an error
// nothing has changed.
func (n *Network) StepEpoch(m []Metrics) ([]Event, error) {
	n = n.orNone()
	if len(m) != len(n.layers) {
		return nil, fmt.Errorf("state.StepEpoch: %w: there are metrics of %d layers, want %d",
			ErrArgument, len(m), len(n.layers))
	}
	defer n.lock()()
	m, err := n.withParameters(m)
	if err != nil {
		return nil, err
	}
	found := make([][]columns.Fault, len(n.layers))
	for i, l := range n.layers {
		var err error
		if found[i], err = l.Lattice.canStep(m[i]); err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
	}
	var all []Event
	for i, l := range n.layers {
		for _, e := range l.Lattice.stepEpoch(m[i], found[i]) {
			e.Layer = i
			all = append(all, e)
		}
	}
	return all, nil
}

// withParameters returns the metrics with the parameters of all blueprints that train, if the
// network has their slots.
func (n *Network) withParameters(metrics []Metrics) ([]Metrics, error) {
	if n.slots == nil {
		return metrics, nil
	}
	all := slices.Clone(metrics)
	for i, layer := range n.layers {
		s := layer.Lattice.seeds
		if s == nil {
			continue
		}
		at := map[int]int{}
		for k, sm := range all[i].Seeds {
			at[sm.Seed] = k
		}
		own := slices.Clone(all[i].Seeds)
		for seed, stage := range s.stage {
			if Stage(stage) != Training || s.slot[seed] == 0 ||
				layer.Lattice.config.Site != blueprints.Chunk {
				continue
			}
			p, err := n.slots.Read(i, int(s.slot[seed]))
			if err != nil {
				return nil, fmt.Errorf("state.StepEpoch: layer %d: the slot of seed %d: %w", i,
					seed, err)
			}
			k, ok := at[seed]
			if !ok {
				k = len(own)
				own = append(own,
					SeedMetrics{Seed: seed, TrainingError: math.NaN(), Unscored: true})
			}
			if own[k].Parameters == nil {
				own[k].Parameters = append(slices.Clone(p.Weights), p.Scale)
			}
		}
		all[i].Seeds = own
	}
	return all, nil
}

// lock locks the network and its lattices. It returns what unlocks them and then tells of what has
// happened.
func (n *Network) lock() (unlock func()) {
	release := n.lockQuietly()
	return func() {
		release()
		n.deliver()
	}
}

// lockQuietly is lock whose caller tells of what has happened.
func (n *Network) lockQuietly() (unlock func()) {
	n.mu.Lock()
	for _, l := range n.layers {
		l.Lattice.mu.Lock()
	}
	return func() {
		for _, l := range n.layers {
			l.Lattice.release()
		}
		n.mu.Unlock()
	}
}

// deliver tells of what has happened, unless that is held back.
func (n *Network) deliver() {
	for _, l := range n.layers {
		l.Lattice.outbox.Deliver()
	}
}

// HoldEvents keeps the events of the network and its lattices back until tell is called. A caller
// that holds a lock which listeners may want, too, calls tell once it has unlocked it.
func (n *Network) HoldEvents() (tell func()) {
	n = n.orNone()
	n.hold(1)
	return sync.OnceFunc(func() {
		n.hold(-1)
		n.deliver()
	})
}

func (n *Network) hold(more int) {
	n.outbox.Hold(more)
	for _, l := range n.layers {
		l.Lattice.outbox.Hold(more)
	}
}

// A layer in which seeds are being grafted has more than the arrays of its lattice. It has the
// seeds, one after the other, and the parameters that their slots had when grafting began.
const (
	keptSeeds   = "kept_seeds"   // uint32 [k]
	keptWeights = "kept_weights" // float64 [k, weights]
	keptScales  = "kept_scales"  // float64 [k]
)

// Arrays returns a copy of the network's complete state as named arrays. They are those of every
// lattice (see [Lattice.Arrays]), with the layer's name and a dot before their own. What is kept of
// the slots of seeds that are being grafted is among them.
func (n *Network) Arrays() (all []Array) {
	n = n.orNone()
	defer n.lock()()
	for i, layer := range n.layers {
		for _, a := range append(layer.Lattice.arrays(), n.keptArrays(i)...) {
			a.Name = layer.Name + "." + a.Name
			all = append(all, a)
		}
	}
	return all
}

func (n *Network) keptArrays(layer int) []Array {
	var seeds []uint32
	kept := n.layers[layer].Lattice.kept
	for seed := range kept {
		seeds = append(seeds, uint32(seed))
	}
	if len(seeds) == 0 {
		return nil
	}
	slices.Sort(seeds)
	var weights, scales []float64
	for _, seed := range seeds {
		p := kept[int(seed)]
		weights, scales = append(weights, p.Weights...), append(scales, p.Scale)
	}
	k := len(seeds)
	return []Array{{keptSeeds, []int{k}, seeds}, {keptWeights, []int{k, len(weights) / k}, weights},
		{keptScales, []int{k}, scales}}
}

// Load checks arrays as [Network.Arrays] returns them, in any order, and returns what makes them
// the network's contents. It returns an error as [Lattice.SetArrays] does, which names the layer,
// and changes nothing itself.
func (n *Network) Load(arrays []Array) (install func(), err error) {
	n = n.orNone()
	byLayer := map[string][]Array{}
	for _, a := range arrays {
		layer, own, _ := strings.Cut(a.Name, ".")
		a.Name = own
		byLayer[layer] = append(byLayer[layer], a)
	}
	if len(byLayer) > len(n.layers) {
		return nil, fmt.Errorf("state.Load: %w: there are arrays of %d layers, want %d",
			ErrArgument, len(byLayer), len(n.layers))
	}
	images, kept := make([]*image, len(n.layers)), make([]map[int]SlotParams, len(n.layers))
	for i, layer := range n.layers {
		var own []Array
		var err error
		if kept[i], own, err = takeKept(byLayer[layer.Name]); err == nil {
			images[i], err = fromArrays(own)
		}
		if err == nil {
			err = layer.Lattice.takes(images[i])
		}
		if err == nil {
			err = checkKept(kept[i], images[i])
		}
		if err != nil {
			return nil, fmt.Errorf("state.Load: layer %q: %w", layer.Name, err)
		}
	}
	return func() {
		defer n.lock()()
		for i, layer := range n.layers {
			l := layer.Lattice
			l.install(images[i])
			for seed, p := range kept[i] {
				// unless it was corrupt, and is a new one
				if stage, _ := l.at(seed); stage.Grafted() {
					l.kept[seed] = p
				}
			}
		}
	}, nil
}

// takes is adapt for callers that do not hold the lock.
func (l *Lattice) takes(img *image) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.adapt(img)
}

// takeKept returns what is kept of a layer's slots, by seed, and the other arrays.
func takeKept(arrays []Array) (kept map[int]SlotParams, own []Array, err error) {
	var seeds []uint32
	var weights, scales []float64
	found := 0
	for _, a := range arrays {
		ok := true
		switch a.Name {
		case keptSeeds:
			seeds, ok = a.Data.([]uint32)
		case keptWeights:
			weights, ok = a.Data.([]float64)
		case keptScales:
			scales, ok = a.Data.([]float64)
		default:
			own = append(own, a)
			continue
		}
		if found++; !ok {
			return nil, nil, fmt.Errorf("%w: array %q is a %T", ErrCorrupt, a.Name, a.Data)
		}
	}
	k := len(seeds)
	if found != 0 && found != 3 || len(scales) != k || k > 0 && len(weights)%k != 0 ||
		k == 0 && len(weights) > 0 {
		return nil, nil,
			fmt.Errorf("%w: the arrays of kept slots have %d seeds, %d weights and %d scales",
				ErrCorrupt, k, len(weights), len(scales))
	}
	kept = make(map[int]SlotParams, k)
	for i, seed := range seeds {
		at, width := int(seed), len(weights)/k
		if _, twice := kept[at]; twice {
			return nil, nil, fmt.Errorf("%w: array %q names seed %d twice",
				ErrCorrupt, keptSeeds, seed)
		}
		kept[at] = SlotParams{weights[i*width:][:width:width], scales[i]}
	}
	return kept, own, nil
}

// checkKept returns an error unless what is kept of a layer's slots is of seeds that it has, and
// fits slots.
func checkKept(kept map[int]SlotParams, img *image) error {
	for _, seed := range slices.Sorted(maps.Keys(kept)) {
		p := kept[seed]
		switch width := img.config.Width; {
		case seed >= img.n:
			return fmt.Errorf("%w: array %q names seed %d of %d", ErrCorrupt,
				keptSeeds, seed, img.n)
		case width > 0 && len(p.Weights) != width:
			return fmt.Errorf("%w: array %q has %d for seed %d, and slots have %d", ErrCorrupt,
				keptWeights, len(p.Weights), seed, width)
		case slices.ContainsFunc(append(p.Weights[:len(p.Weights):len(p.Weights)], p.Scale),
			func(v float64) bool {
				return !finite(v)
			}):
			return fmt.Errorf("%w: what is kept of the slot of seed %d is not finite", ErrCorrupt,
				seed)
		}
	}
	return nil
}
