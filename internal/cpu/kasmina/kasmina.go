// Package kasmina computes the forward and backward pass of a Kasmina layer, and the figures of its
// inputs and gradients.
package kasmina

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// adaptiveLimit is the magnitude above which the adaptive mode scales.
const adaptiveLimit = 1e6

// Seed is a seed with a blueprint that takes part in a pass.
type Seed[T cpu.Float] struct {
	// Seed determines whether the seed blends, y = x + α(t(x) − x) instead of y = x, and whether
	// its weights and scale learn.
	seed.Seed
	Index int

	slot             int
	alpha, low, high T
	rule             *blueprints.Arithmetic[T]
	homogeneity      blueprints.Homogeneity
	mixes            bool // the kind is computed for many rows at once
	ruled            bool // strips compute this seed
	size             int  // number of weights that the kind uses
	w, p             []T  // weights of the slot, and the p that rule derives from them
	scale            T
	learn            int // index among the learning seeds
	at               int // start of its gradients in dp
}

// Layer computes one layer. x is Rows × Seeds·Chunk, weights is Slots × Width and scales is Slots.
// Buffers are reused from pass to pass.
type Layer[T cpu.Float] struct {
	Rows, Seeds, Chunk, Slots, Width int

	Stability seed.Stability
	Eps       float64
	Active    []Seed[T] // set by Activate
	Measure   []bool    // for each seed, whether to compute its figures
	Reduce    seed.Reduction
	// Limit holds, for the backward pass, the maximum norm of a row's gradient for each seed; nil
	// means no limit.
	Limit []float64

	// Figures has one element per seed after a pass. For unmeasured seeds, only Bad and Clipped are
	// set.
	Figures []figures.Chunk

	partial  []figures.Chunk // by block of rows and seed
	measured bool            // at least one seed is measured
	columns  bool            // the pass is computed in strips
	prepared []T
	needs    int          // number of elements of scratch memory
	rules    []strip.Rule // for every strip of a row of tiles
	learning []int        // indices into Active
	learned  int          // number of elements of all learning seeds' p
	dp       []T          // by block of rows, the gradients of the learning seeds' p
	da       []float64    // by block of rows, the gradients of the learning seeds' scales
	heads    []int        // counting sort of the learning seeds by slot
	order    []int
	memory   sync.Pool // of *tile[T]
}

// RulePanic is the Value of the [cpu.Panic] of Forward and Backward if the rule of a seed panics.
type RulePanic struct {
	Seed  int
	Value any
}

// noSeed represents the seed while no rule runs.
const noSeed = -1

// attribute adds the seed to a passing panic. Code that runs rules defers it and keeps *seed up to
// date.
func attribute(seed *int) {
	r := recover()
	if r == nil {
		return
	}
	if *seed != noSeed {
		p := cpu.AsPanic(r)
		r = &cpu.Panic{Value: RulePanic{*seed, p.Value}, Stack: p.Stack}
	}
	panic(r)
}

// Activate adds seed i to Active, unless the seed only watches its chunk. Seeds must be added in
// order. It returns an error if the slot does not exist or if the kind is unknown or needs more than
// Width weights.
func (k *Layer[T]) Activate(i int, of seed.Seed) error {
	if of.Slot == 0 || !of.Blend && !of.Learn {
		return nil
	}

	s := Seed[T]{Seed: of, Index: i, slot: int(of.Slot), alpha: T(of.Alpha),
		low: T(of.Low), high: T(of.High)}

	// With α = 0 there is nothing to learn, whatever the value of t(x), even NaN.
	s.Learn = of.Learn && of.Alpha != 0
	b, err := blueprints.Lookup(s.Kind)
	if err != nil {
		return fmt.Errorf("seed %d: %w", i, err)
	}

	if s.size, err = blueprints.Size(s.Kind, k.Chunk, k.Width); err != nil {
		return fmt.Errorf("seed %d: %w", i, err)
	}

	if s.slot >= k.Slots {
		return fmt.Errorf("seed %d has slot %d, but weights has %d slots", i, s.slot, k.Slots)
	}

	s.rule, s.homogeneity = blueprints.For[T](b), b.Homogeneity
	s.mixes = s.Kind == blueprints.LowRank || s.Kind == blueprints.ChunkMLP
	k.Active = append(k.Active, s)
	return nil
}

// prepare binds the active seeds to the parameters and prepares the buffers.
func (k *Layer[T]) prepare(weights, scales []T, backward bool) {
	rows, _ := k.tile()
	prepared := 0
	k.needs = 4 * k.Chunk
	_, single := any(k).(*Layer[float32])
	k.columns = single && k.Reduce == seed.Exact && !(backward && k.Limit != nil)
	for i := range k.Active {
		s := &k.Active[i]
		s.w, s.scale = weights[s.slot*k.Width:][:s.size:s.size], scales[s.slot]
		if s.p = s.w; s.rule.Prepare != nil {
			prepared += s.size
		}
		s.ruled = k.columns && k.Stability != seed.Strict && s.Kind <= blueprints.ConvFilter
		if s.mixes {
			k.needs = max(k.needs, mixingScratch(rows, k.Chunk, s.size))
		} else {
			k.needs = max(k.needs, 3*k.Chunk+s.size)
		}
	}

	k.prepared = grow(k.prepared, prepared)
	for i, next := 0, 0; i < len(k.Active); i++ {
		if s := &k.Active[i]; s.rule.Prepare != nil {
			s.p = k.prepared[next:][:s.size:s.size]
			next += s.size
		}
	}

	cpu.Spread(len(k.Active), cpu.Grain(64*k.Chunk), preparation[T]{k}) // may compute exponentials
	k.measured = slices.Contains(k.Measure, true)
	k.partial = grow(k.partial, k.blocks()*k.Seeds)
	k.Figures = grow(k.Figures, k.Seeds)
	if k.columns {
		k.rules = grow(k.rules, k.groups()*k.strips())
		cpu.Spread(k.groups(), 1, ruleBuilding{any(k).(*Layer[float32]), backward})
	}
}

// preparation computes p for the active seeds.
type preparation[T cpu.Float] struct{ k *Layer[T] }

func (p *preparation[T]) Span(lo, hi int) {
	seed := noSeed
	defer attribute(&seed)
	for i := lo; i < hi; i++ {
		if s := &p.k.Active[i]; s.rule.Prepare != nil {
			seed = s.Index
			s.rule.Prepare(s.p, s.w)
		}
	}
}

// grow returns n elements with undefined contents, reusing s's memory if possible.
func grow[E any](s []E, n int) []E {
	if cap(s) < n {
		return make([]E, n)
	}
	return s[:n]
}

// Forward computes y and the figures of x:
//
//	y = x + α(t(x) − x)
//
// for active seeds that blend, with x clamped first in the strict mode. For other seeds, y = x.
func (k *Layer[T]) Forward(y, x, weights, scales []T) {
	k.prepare(weights, scales, false)
	cpu.Spread(k.blocks()*k.groups(), k.tileGrain(), forwardPass[T]{k, y, x})
	cpu.Spread(k.Seeds, 64, finishing[T]{k, x})
}

// forwardPass computes tiles of the forward pass.
type forwardPass[T cpu.Float] struct {
	k    *Layer[T]
	y, x []T
}

func (p *forwardPass[T]) Span(lo, hi int) {
	k, seed := p.k, noSeed
	defer attribute(&seed)
	t := k.takeTile()
	for i := lo; i < hi; i++ {
		t.moveTo(k, i)
		if k.columns {
			p := any(p).(*forwardPass[float32])
			forwardStrips(p.k, any(t).(*tile[float32]), p.y, p.x)
		} else {
			k.forwardRows(t, p.y, p.x)
		}

		for j := range t.active {
			s := &t.active[j]
			if !s.Blend || s.ruled {
				continue
			}
			seed = s.Index
			if s.mixes {
				k.mix(p.y, p.x, t.r0, t.r1, s, t.scratch)
			} else {
				for r := t.r0; r < t.r1; r++ {
					at := r*t.stride + s.Index*k.Chunk
					k.blend(p.y[at:][:k.Chunk], p.x[at:][:k.Chunk], s, t.scratch)
				}
			}
			seed = noSeed
		}
	}

	k.memory.Put(t)
}

// forwardRows copies a tile and computes its figures row by row.
func (k *Layer[T]) forwardRows(t *tile[T], y, x []T) {
	for r := t.r0; r < t.r1; r++ {
		at := r*t.stride + t.s0*k.Chunk
		xr := x[at:][:t.columns]
		copy(y[at:], xr)
		k.watchInput(t.figures, xr, x, t.s0)
	}
}

// watchInput adds one row of a tile with first seed s0 to the tile's figures.
func (k *Layer[T]) watchInput(partial []figures.Chunk, xr, x []T, s0 int) {
	if !k.measured && vec.Finite(xr) {
		return
	}

	c := k.Chunk
	for i := range partial {
		v, f := xr[i*c:][:c], &partial[i]
		if !k.Measure[s0+i] {
			f.Bad += figures.CountBad(v)
			continue
		}
		row := figures.Scan(v, k.Eps)
		f.AddRow(&row, figures.Anchor(x[(s0+i)*c]))
		if k.Reduce != seed.Exact && row.Moments.N > 0 {
			h := figures.Health(row.Absolute(), row.Low, row.High, row.Dead, k.Eps)
			f.ReduceRow(k.Reduce, h[:])
			f.Norms.N++ // counts the rows
		}
	}
}

// finishing merges the figures of v over all blocks of rows, in order.
type finishing[T cpu.Float] struct {
	k *Layer[T]
	v []T
}

func (p *finishing[T]) Span(lo, hi int) {
	k := p.k
	for s := lo; s < hi; s++ {
		f := &k.Figures[s]
		*f = k.partial[s]
		for b := 1; b < k.blocks(); b++ {
			f.Merge(&k.partial[b*k.Seeds+s], k.Reduce)
		}
		f.Finish(k.Reduce, figures.Anchor(p.v[s*k.Chunk]))
	}
}

// blend computes one chunk row of a seed that blends. scratch has 2·Chunk elements.
func (k *Layer[T]) blend(y, x []T, s *Seed[T], scratch []T) {
	c := len(x)
	t, in, scale, up := scratch[:c], x, s.scale, T(1)
	switch k.Stability {
	case seed.Strict:
		in = scratch[c : 2*c]
		k.clamp(in, x, s)
	case seed.Adaptive:
		if down := k.shrink(x, s); down != 1 {
			in = scratch[c : 2*c]
			for i, v := range x {
				in[i] = v * down
			}
			up = 1 / down
			if s.homogeneity == blueprints.InXAndScale {
				scale *= down
			}
		}
	}

	switch s.alpha {
	case 0: // t(x) does not affect the result, even if it is NaN
		t = in
	case 1:
		s.rule.Forward(t, in, s.p, scale)
	default:
		s.rule.Forward(t, in, s.p, scale)
		for i, v := range in {
			t[i] = v + s.alpha*(t[i]-v)
		}
	}

	if up == 1 {
		copy(y, t)
		return
	}

	for i, v := range t {
		y[i] = v * up
	}
}

// shrink returns the power of two, at most 1, that scales the largest magnitude of x to
// adaptiveLimit or below. It returns 1 for transforms that cannot be scaled and for rows that
// contain Inf or NaN, which no scale can repair.
func (k *Layer[T]) shrink(x []T, s *Seed[T]) T {
	var top float64
	for _, v := range x {
		if a := math.Abs(float64(v)); a > top {
			top = a
		}
	}

	if !(top > adaptiveLimit) || top-top != 0 || s.homogeneity == blueprints.NotHomogeneous {
		return 1
	}

	_, exp := math.Frexp(top / adaptiveLimit)
	return T(math.Ldexp(1, -exp))
}

// clamp writes x with elements below ε set to 0 and the remaining elements clamped to the seed's
// limits.
func (k *Layer[T]) clamp(out, x []T, s *Seed[T]) {
	for i, v := range x {
		if math.Abs(float64(v)) < k.Eps {
			v = 0
		}
		if v < s.low {
			v = s.low
		}
		if v > s.high {
			v = s.high
		}
		out[i] = v
	}
}

// bites reports whether clamp changes v, so that no gradient passes. A value of 0 is unchanged unless
// 0 is outside the limits.
func (k *Layer[T]) bites(v T, s *Seed[T]) bool {
	return v != 0 && math.Abs(float64(v)) < k.Eps || v < s.low || v > s.high
}
