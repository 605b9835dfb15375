package llm

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
)

// A layout determines a model's parameters. It consists of the architecture and the blueprints
// planted at weights and in the stream.
//
// It inherits the methods of [Config], except for those redeclared here to account for planted
// blueprints.
type layout struct {
	Config
	Planted []Planted // in the order of comparePlanted
}

// layout returns the layout of the model's parameters.
func (m *Model) layout() layout { return layout{m.Config, m.Planted} }

// comparePlanted defines the order of planted blueprints.
func comparePlanted(a, b Planted) int {
	return cmp.Or(cmp.Compare(a.Site, b.Site), cmp.Compare(a.Seed, b.Seed))
}

// Check returns an error that names the first field with an invalid value, or the first blueprint that
// cannot grow where it is planted.
func (l layout) Check() error {
	if err := l.Config.Check(); err != nil {
		return err
	}

	for i, p := range l.Planted {
		if i > 0 && comparePlanted(l.Planted[i-1], p) >= 0 {
			return fmt.Errorf("llm: planted blueprint %d is out of order: seed %d of site %v", i, p.Seed,
				p.Site)
		}
		if _, err := l.SeedParams(p); err != nil {
			return fmt.Errorf("llm: planted blueprint %d: %w", i, err)
		}
	}

	return nil
}

// Specs yields the parameters in the model's order of use, followed by the parameters of planted
// blueprints.
func (l layout) Specs() iter.Seq[ParamSpec] {
	return func(yield func(ParamSpec) bool) {
		for s := range l.Config.Specs() {
			if !yield(s) {
				return
			}
		}
		for _, p := range l.Planted {
			specs, _ := l.SeedParams(p) // Check has already validated Planted
			for _, s := range specs {
				if !yield(s) {
					return
				}
			}
		}
	}
}

// Parameters yields the names and shapes of the parameters in the order of Specs.
func (l layout) Parameters() iter.Seq2[string, []int] { return parametersOf(l.Specs()) }

// Tensors returns the number of parameter tensors.
func (l layout) Tensors() (n int) {
	for range l.Specs() {
		n++
	}
	return n
}

// FLOPs is like [Config.FLOPs], and also counts blueprints in the stream. Blueprints at weights are
// not counted, because their operations occur once per step, regardless of the number of tokens.
func (l layout) FLOPs() float64 {
	if !l.Adapter.IsZero() { // which excludes blueprints
		return l.Config.FLOPs()
	}

	flops := l.forwardFLOPs()
	for _, p := range l.Planted {
		if p.Site != blueprints.Stream {
			continue
		}
		specs, _ := l.SeedParams(p) // Check has already validated Planted
		for _, s := range specs {
			if len(s.Shape) == 2 {
				flops += float64(s.Shape[0]) * float64(s.Shape[1])
			}
		}
		if p.Kind == blueprints.Attention.String() {
			flops += float64(p.Size*l.HeadDim) * l.seen(l.Streams[p.Seed])
		}
	}
	return 6 * flops
}

// SameBlocks reports whether two layouts of the same origin have the same parameters.
func (l layout) SameBlocks(other layout) bool {
	return l.Config.SameBlocks(other.Config) && slices.Equal(l.Planted, other.Planted)
}

// Plant returns the layout with p planted.
func (l layout) Plant(p Planted) layout {
	l.Planted = append(slices.Clone(l.Planted), p)
	slices.SortFunc(l.Planted, comparePlanted)
	return l
}

// Uproot returns the layout without the blueprint of a seed.
func (l layout) Uproot(site blueprints.Site, seed int) layout {
	l.Planted = slices.DeleteFunc(slices.Clone(l.Planted), func(p Planted) bool {
		return p.Site == site && p.Seed == seed
	})
	if len(l.Planted) == 0 {
		l.Planted = nil
	}
	return l
}

// PlantedAt returns the blueprint planted at a seed.
func (l layout) PlantedAt(site blueprints.Site, seed int) (p Planted, ok bool) {
	i := slices.IndexFunc(l.Planted, func(p Planted) bool {
		return p.Site == site && p.Seed == seed
	})
	if i < 0 {
		return p, false
	}
	return l.Planted[i], true
}

// Grow returns the layout after a growth of the stack of blocks.
func (l layout) Grow(g Grown) layout {
	l.Config = l.Config.Grow(g)
	return l
}

// GrowStream returns the layout after the blueprint of a stream seed has become a block. Later stream seeds
// at the same place move after the new block.
func (l layout) GrowStream(g Grown) layout {
	if g.Seed < 0 || g.Seed >= len(l.Streams) {
		return l // no such seed
	}

	before := l.Streams[g.Seed]
	next := l.Grow(g).Uproot(blueprints.Stream, g.Seed)
	for i, b := range l.Streams {
		if b == before && i > g.Seed {
			next.Streams[i]++
		}
	}

	return next
}
