package state

import (
	"fmt"
	"slices"
	"strings"
)

// Beside the arrays of its lattice, a layer in which seeds are being grafted has these: the seeds,
// one after the other, and the parameters that their slots had when grafting began.
const (
	keptSeeds   = "kept_seeds"   // uint32 [k]
	keptWeights = "kept_weights" // float64 [k, weights]
	keptScales  = "kept_scales"  // float64 [k]
)

// Arrays returns a copy of the network's complete state as named arrays: those of every lattice
// (see [Lattice.Arrays]), with the layer's name and a dot before their own, and what is kept of the
// slots of seeds that are being grafted.
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
				if stage, _ := l.at(seed); stage.grafted() {
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
	for seed, p := range kept {
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
