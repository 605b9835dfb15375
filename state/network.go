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

// Network holds the lattices of all Kasmina layers of a model. It addresses a seed by the number of
// its layer and its number within the layer.
//
// # Commands
//
// [Network.Submit] queues commands until the code that runs the model calls [Network.Apply], as a
// training loop does between its steps. [Network.Do] carries out commands at once. In both cases, the
// commands of one call take effect together, or not at all if any is rejected.
//
// Submit, Listen, Report, Arrays, Verify, Scrub, Open and Close may be called from any goroutine at
// any time. The same applies to Do if the slots provide a lock. Apply, StepEpoch, Load and the
// function it returns are reserved for the code that runs the model, between passes.
//
// # Parameters
//
// If the network was created with [Slots], it maintains the parameters in them. Germination sets a
// slot to the blueprint's identity start, unless another living seed shares the slot. The start of a
// grafting saves the weights and scale of the slot, and a rollback restores them, again unless
// another living seed shares the slot.
//
// Transitions requested from a lattice directly do not change parameters. If such a transition ends
// a grafting, the saved parameters are discarded.
type Network struct {
	layers []Layer
	slots  Slots
	outbox outbox.Outbox[Event]

	mu    sync.Mutex // held while commands are carried out; locked before the lattices
	queue queue
}

// Layer is a lattice with the name under which files store it.
type Layer struct {
	Name    string
	Lattice *Lattice
}

// Slots gives a network access to the parameters in the slots of its layers. The network calls its
// methods only between passes.
//
// If Slots also implements [sync.Locker], each call of Do acquires that lock before the network's own
// and thereby waits for the end of a pass that holds it. Callers of Apply and StepEpoch must already
// hold the lock.
type Slots interface {
	// Start returns the identity start of a blueprint without changing anything.
	Start(Germination) (SlotParams, error)
	// Read returns the current parameters of a slot.
	Read(layer, slot int) (SlotParams, error)
	// Write sets all of the given slots or, if it returns an error, no slot.
	Write([]SlotWrite) error
}

// Places is implemented by Slots that also know which blueprints seeds without slots can grow.
type Places interface {
	Slots
	// Fits returns an error if the seed cannot grow a blueprint of the given size.
	Fits(g Germination, size int) error
}

// Rounder is implemented by Slots that hold parameters in a narrower type than float64. Round returns the
// parameters that Read would return after a Write.
type Rounder interface {
	Slots
	Round(SlotParams) SlotParams
}

// Germination describes the planting of a blueprint in a slot.
type Germination struct {
	Layer, Seed, Slot int
	Kind              blueprints.Kind
	Epoch             int // the lattice's epoch
}

// SlotParams holds the parameters in a slot.
type SlotParams struct {
	Weights []float64
	Scale   float64
}

// SlotWrite is an assignment of parameters to a slot.
type SlotWrite struct {
	Layer, Slot int
	Params      SlotParams
}

// address identifies a seed, or a slot, by its layer and number.
type address struct{ layer, number int }

// NewNetwork returns a network of the given layers, in order. If slots is nil, the network does not
// touch parameters.
//
// It returns an error wrapping [ErrArgument] if a lattice is nil, if two layers share a lattice or a
// name, or if a name contains a dot.
func NewNetwork(slots Slots, layers ...Layer) (*Network, error) {
	n := &Network{layers: slices.Clone(layers), slots: slots}
	for i, a := range layers {
		if a.Lattice == nil {
			return nil, fmt.Errorf("state.NewNetwork: %w: the lattice of layer %d is nil",
				ErrArgument, i)
		}
		if strings.Contains(a.Name, ".") {
			return nil,
				fmt.Errorf("state.NewNetwork: %w: the name of layer %d is %q, which contains a "+
					"dot", ErrArgument, i, a.Name)
		}

		for j, b := range layers[:i] {
			if a.Lattice == b.Lattice || a.Name == b.Name {
				return nil,
					fmt.Errorf("state.NewNetwork: %w: layers %d and %d share a lattice or "+
						"the name %q", ErrArgument, j, i, a.Name)
			}
		}
	}

	for i, l := range layers {
		l.Lattice.outbox.Relay(&n.outbox, func(e *Event) { e.Layer = i })
	}
	return n, nil
}

// Layers returns the number of layers.
func (n *Network) Layers() int { return len(n.layers) }

// Seeds returns the number of seeds in all layers.
func (n *Network) Seeds() (seeds int) {
	for _, l := range n.layers {
		seeds += l.Lattice.Seeds()
	}
	return seeds
}

// Lattice returns the lattice of a layer, or nil if layer is out of range.
func (n *Network) Lattice(layer int) *Lattice {
	if layer < 0 || layer >= len(n.layers) {
		return nil
	}
	return n.layers[layer].Lattice
}

// Lattices returns an iterator over the layers' numbers and lattices.
func (n *Network) Lattices() iter.Seq2[int, *Lattice] {
	return func(yield func(int, *Lattice) bool) {
		for i, l := range n.layers {
			if !yield(i, l.Lattice) {
				return
			}
		}
	}
}

// Report returns the reports of all layers, in order.
func (n *Network) Report() []Report {
	reports := make([]Report, len(n.layers))
	for i, l := range n.layers {
		reports[i] = l.Lattice.Report()
	}
	return reports
}

// Listen registers f to be called with the events of all layers; see [Lattice.Listen].
func (n *Network) Listen(f func(Event)) (stop func(), err error) {
	return n.outbox.Listen(f), nil
}

// Verify verifies all lattices. An error names the first corrupt layer; see [Lattice.Verify].
func (n *Network) Verify() error {
	for i, l := range n.layers {
		if err := l.Lattice.Verify(); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	return nil
}

// Scrub runs [Lattice.Scrub] on all layers until ctx is done. found may be called from several
// goroutines at once.
//
// To quarantine the corrupt seeds, found can submit a Quarantine command. Lattices created with
// [WithQuarantine] reset them at the end of the epoch.
func (n *Network) Scrub(ctx context.Context, period time.Duration,
	found func(layer int, err error)) error {
	if err := checkScrub(ctx, period); err != nil {
		return err
	}

	var wg sync.WaitGroup
	for i, l := range n.layers {
		wg.Go(func() {
			// Only invalid arguments cause errors, and these were checked above.
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

// StepEpoch ends an epoch in all layers; see [Lattice.StepEpoch]. m holds the metrics of each layer.
// If the network has slots, it adds the parameters of blueprints in Training to the metrics. After an
// error, no layer has changed.
func (n *Network) StepEpoch(m []Metrics) ([]Event, error) {
	if len(m) != len(n.layers) {
		return nil, fmt.Errorf("state.StepEpoch: %w: got metrics of %d layers, want %d",
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

// withParameters returns a copy of the metrics that includes the parameters of all blueprints in
// Training. Without slots, it returns the metrics unchanged.
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

// lock locks the network and its lattices. The returned function unlocks them and then delivers the
// queued events.
func (n *Network) lock() (unlock func()) {
	release := n.lockQuietly()
	return func() {
		release()
		n.deliver()
	}
}

// lockQuietly is like lock, except that its caller delivers the events.
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

// deliver calls the listeners with all queued events, unless they are held back.
func (n *Network) deliver() {
	for _, l := range n.layers {
		l.Lattice.outbox.Deliver()
	}
}

// HoldEvents holds back the events of the network and its lattices until deliver is called. It is
// meant for callers that hold a lock needed by listeners, which call deliver after unlocking.
func (n *Network) HoldEvents() (deliver func()) {
	n.hold(1)
	return sync.OnceFunc(func() {
		n.hold(-1)
		n.deliver()
	})
}

// hold adds to the number of callers that hold events back.
func (n *Network) hold(more int) {
	n.outbox.Hold(more)
	for _, l := range n.layers {
		l.Lattice.outbox.Hold(more)
	}
}

// If k seeds of a layer are being grafted, these arrays follow the arrays of its lattice. They hold
// the numbers of the seeds, and the parameters that their slots had when grafting began.
const (
	keptSeeds   = "kept_seeds"   // uint32 [k]
	keptWeights = "kept_weights" // float64 [k, weights]
	keptScales  = "kept_scales"  // float64 [k]
)

// Arrays returns a copy of the network's complete state as named arrays: the arrays of every
// lattice (see [Lattice.Arrays]) and the saved parameters of slots with seeds being grafted. The
// name of each array starts with the name of its layer and a dot.
func (n *Network) Arrays() (all []Array) {
	defer n.lock()()
	for i, layer := range n.layers {
		for _, a := range append(layer.Lattice.arrays(), n.keptArrays(i)...) {
			a.Name = layer.Name + "." + a.Name
			all = append(all, a)
		}
	}
	return all
}

// keptArrays returns the saved slot parameters of a layer, ordered by seed, or nil if there are
// none.
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

// Load checks arrays as returned by [Network.Arrays], in any order, and returns a function that
// makes them the network's contents. Load itself changes nothing. It returns the same errors as
// [Lattice.SetArrays], with the name of the layer.
func (n *Network) Load(arrays []Array) (install func(), err error) {
	byLayer := map[string][]Array{}
	for _, a := range arrays {
		layer, own, _ := strings.Cut(a.Name, ".")
		a.Name = own
		byLayer[layer] = append(byLayer[layer], a)
	}

	if len(byLayer) > len(n.layers) {
		return nil, fmt.Errorf("state.Load: %w: got arrays of %d layers, want %d",
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
			err = layer.Lattice.checkImage(images[i])
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
				// A corrupt seed has been reset, so there is nothing to roll back.
				if stage, _ := l.at(seed); stage.Grafted() {
					l.kept[seed] = p
				}
			}
		}
	}, nil
}

// checkImage acquires the lock and calls adapt.
func (l *Lattice) checkImage(img *image) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.adapt(img)
}

// takeKept separates the saved slot parameters, keyed by seed, from the lattice's own arrays.
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
			fmt.Errorf("%w: the arrays of saved slot parameters have %d seeds, %d weights and %d scales",
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

// checkKept returns an error unless the saved slot parameters belong to seeds of the lattice, have
// the width of its slots and are finite.
func checkKept(kept map[int]SlotParams, img *image) error {
	for _, seed := range slices.Sorted(maps.Keys(kept)) {
		p := kept[seed]
		switch width := img.config.Width; {
		case seed >= img.n:
			return fmt.Errorf("%w: array %q names seed %d of %d", ErrCorrupt,
				keptSeeds, seed, img.n)
		case width > 0 && len(p.Weights) != width:
			return fmt.Errorf("%w: array %q has %d weights for seed %d, want %d", ErrCorrupt,
				keptWeights, len(p.Weights), seed, width)
		case slices.ContainsFunc(append(p.Weights[:len(p.Weights):len(p.Weights)], p.Scale),
			func(v float64) bool {
				return !finite(v)
			}):
			return fmt.Errorf("%w: the saved slot parameters of seed %d are not finite", ErrCorrupt,
				seed)
		}
	}

	return nil
}
