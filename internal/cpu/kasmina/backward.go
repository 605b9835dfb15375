package kasmina

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Backward computes the gradients of Forward for the gradient g of y, and the figures of g. With
// limits, a row of g is first scaled, for each seed, by min(1, limit/(‖g‖ + ε)). Then
//
//	dx = g                                  for seeds that do not blend
//	dx = (1 − α)·g + (∂t/∂x)ᵀ·αg            for seeds that blend; 0 where the strict mode clamps
//	dweights[slot] += Σ_rows (∂t/∂w)ᵀ·αg    for seeds that learn, with α = 1 if they do not blend
//	dscales[slot]  += Σ_rows (∂t/∂a)·αg
//
// summed over the seeds of each slot. Slots without a learning seed get 0.
func (k *Layer[T]) Backward(dx, dweights, dscales, g, x, weights, scales []T) {
	k.prepare(weights, scales, true)
	k.prepareLearning()
	cpu.Spread(k.blocks()*k.groups(), k.tileGrain(), backwardPass[T]{k, dx, g, x})
	cpu.Spread(k.Seeds, 64, finishing[T]{k, g})
	k.reduceLearning(dweights, dscales)
}

// backwardPass computes tiles of the backward pass.
type backwardPass[T cpu.Float] struct {
	k        *Layer[T]
	dx, g, x []T
}

func (p *backwardPass[T]) Span(lo, hi int) {
	k, seed := p.k, noSeed
	defer attribute(&seed)
	t := k.takeTile()
	for i := lo; i < hi; i++ {
		t.moveTo(k, i)
		dp, da := k.dp[t.block*k.learned:][:k.learned],
			k.da[t.block*len(k.learning):][:len(k.learning)]
		for j := range t.active {
			if s := &t.active[j]; s.Learn {
				clear(dp[s.at:][:s.size])
				da[s.learn] = 0
			}
		}

		if k.columns {
			p := any(p).(*backwardPass[float32])
			backwardStrips(p.k, any(t).(*tile[float32]), p.dx, p.g, p.x, any(dp).([]float32), da)
		} else {
			k.backwardRows(t, p.dx, p.g)
		}

		for j := range t.active {
			if s := &t.active[j]; !s.ruled {
				seed = s.Index
				k.backwardSeed(t, p.dx, p.x, s, dp, da)
				seed = noSeed
			}
		}
	}

	k.memory.Put(t)
}

// backwardRows copies a tile of g, clipped, and computes its figures row by row.
func (k *Layer[T]) backwardRows(t *tile[T], dx, g []T) {
	for r := t.r0; r < t.r1; r++ {
		at := r*t.stride + t.s0*k.Chunk
		dr := dx[at:][:t.columns]
		copy(dr, g[at:])
		k.watchGradient(t.figures, dr, g, t.s0)
	}
}

// backwardSeed replaces, in a tile of dx, the output gradient of one seed by the input gradient,
// and adds the gradients of its parameters. It works row by row, or on all rows for kinds that mix
// features.
func (k *Layer[T]) backwardSeed(t *tile[T], dx, x []T, s *Seed[T], dp []T, da []float64) {
	c := k.Chunk
	var gradients []T
	if s.Learn {
		gradients = dp[s.at:][:s.size]
	}

	if s.mixes {
		d := k.mixBackward(dx, gradients, x, t.r0, t.r1, s, t.scratch)
		if s.Learn {
			da[s.learn] = d
		}
		return
	}

	if !s.Learn {
		gradients = t.scratch[3*c:][:s.size] // discarded
	}

	for r := t.r0; r < t.r1; r++ {
		at := r*t.stride + s.Index*c
		d := k.blendBackward(dx[at:][:c], gradients, x[at:][:c], s, t.scratch)
		if s.Learn {
			da[s.learn] += d
		}
	}
}

// watchGradient adds one row of a tile with first seed s0 to the tile's figures, and scales the
// chunks with a norm above their limit.
func (k *Layer[T]) watchGradient(partial []figures.Chunk, gr, g []T, s0 int) {
	if !k.measured && k.Limit == nil && vec.Finite(gr) {
		return
	}

	c := k.Chunk
	for i := range partial {
		v, f := gr[i*c:][:c], &partial[i]
		measure := k.Measure[s0+i]
		if !measure && k.Limit == nil {
			f.Bad += figures.CountBad(v)
			continue
		}

		row := figures.Scan(v, 0)
		m := row.Absolute()
		length := figures.Norm(m)
		if measure {
			f.AddRow(&row, figures.Anchor(g[(s0+i)*c]))
			if row.Moments.N > 0 {
				f.Norms.Add(length)
				if k.Reduce != seed.Exact {
					reduced := figures.Gradient(m, row.Low, row.High)
					f.ReduceRow(k.Reduce, reduced[:])
				}
			}
		} else {
			f.Bad += row.Bad
		}

		if k.Limit == nil {
			continue
		}

		if by := k.Limit[s0+i] / (length + k.Eps); by < 1 {
			f.Clipped++
			for j := range v {
				v[j] *= T(by)
			}
		}
	}
}

// blendBackward replaces the output gradient g of one chunk row of an active seed by the gradient
// of its input x. It adds the gradient of p to dp and returns the gradient of the scale. scratch
// has 3·Chunk elements.
func (k *Layer[T]) blendBackward(g, dp, x []T, s *Seed[T], scratch []T) (da float64) {
	c := len(x)
	in, dt, gt := x, scratch[:c], scratch[c:2*c]
	if k.Stability == seed.Strict {
		in = scratch[2*c : 3*c]
		k.clamp(in, x, s)
	}

	switch {
	case !s.Blend:
		return s.rule.Backward(dt, dp, g, in, s.p, s.scale)
	case s.alpha == 1:
		copy(gt, g)
		da = s.rule.Backward(g, dp, gt, in, s.p, s.scale)
	case s.alpha != 0:
		for i, v := range g {
			gt[i] = s.alpha * v
		}
		da = s.rule.Backward(dt, dp, gt, in, s.p, s.scale)
		for i, v := range dt {
			g[i] += v - gt[i]
		}
	}

	if k.Stability == seed.Strict {
		for i, v := range x {
			if k.bites(v, s) {
				g[i] = 0
			}
		}
	}

	return da
}

// prepareLearning numbers the learning seeds and prepares their buffers.
func (k *Layer[T]) prepareLearning() {
	k.learning, k.learned = k.learning[:0], 0
	for i := range k.Active {
		if s := &k.Active[i]; s.Learn {
			s.learn, s.at = len(k.learning), k.learned
			k.learning = append(k.learning, i)
			k.learned += s.size
		}
	}
	blocks := k.blocks()
	k.dp, k.da = grow(k.dp, blocks*k.learned), grow(k.da, blocks*len(k.learning))
}

// reduceLearning adds up the gradients of the parameters: over blocks of rows, then over the seeds
// of a slot in their order.
func (k *Layer[T]) reduceLearning(dweights, dscales []T) {
	n := len(k.learning)
	cpu.Spread(n, cpu.Grain(8*k.blocks()*k.learned/max(n, 1)), kasminaLearned[T]{k})
	k.sortBySlot()
	cpu.Spread(k.Slots, cpu.Grain(16*k.Width), kasminaSlots[T]{k, dweights, dscales})
}

// kasminaLearned adds up the gradients of learning seeds over blocks of rows.
type kasminaLearned[T cpu.Float] struct{ k *Layer[T] }

func (p *kasminaLearned[T]) Span(lo, hi int) {
	k, seed := p.k, noSeed
	defer attribute(&seed)
	blocks, n := k.blocks(), len(k.learning)
	for i := lo; i < hi; i++ {
		s := &k.Active[k.learning[i]]
		total := k.dp[s.at:][:s.size]
		for j := range total {
			var sum float64
			for at := s.at + j; at < len(k.dp); at += k.learned {
				sum += float64(k.dp[at])
			}
			total[j] = T(sum)
		}

		for b := 1; b < blocks; b++ {
			k.da[i] += k.da[b*n+i]
		}
		if s.rule.Finish != nil {
			seed = s.Index
			s.rule.Finish(total, s.p)
			seed = noSeed
		}
	}
}

// kasminaSlots adds up the gradients of slots over their seeds.
type kasminaSlots[T cpu.Float] struct {
	k                 *Layer[T]
	dweights, dscales []T
}

func (p *kasminaSlots[T]) Span(lo, hi int) {
	k := p.k
	for slot := lo; slot < hi; slot++ {
		seeds := k.order[k.heads[slot]:k.heads[slot+1]]
		dw := p.dweights[slot*k.Width:][:k.Width]
		for j := range dw {
			var sum float64
			for _, i := range seeds {
				if s := &k.Active[k.learning[i]]; j < s.size {
					sum += float64(k.dp[s.at+j])
				}
			}
			dw[j] = T(sum)
		}
		var sum float64
		for _, i := range seeds {
			sum += k.da[i]
		}
		p.dscales[slot] = T(sum)
	}
}

// sortBySlot sorts the learning seeds by slot, and within a slot by their order. The seeds of slot
// s are order[heads[s]:heads[s+1]].
func (k *Layer[T]) sortBySlot() {
	k.heads, k.order = grow(k.heads, k.Slots+2), grow(k.order, len(k.learning))
	clear(k.heads)
	for _, i := range k.learning {
		k.heads[k.Active[i].slot+2]++
	}

	for s := 2; s < len(k.heads); s++ {
		k.heads[s] += k.heads[s-1]
	}

	for i, a := range k.learning {
		at := &k.heads[k.Active[a].slot+1]
		k.order[*at] = i
		*at++
	}
}

// Exponents returns a histogram of the magnitudes of x for every measured seed.
func (k *Layer[T]) Exponents(x []T) [][figures.Exponents]uint32 {
	histograms := make([][figures.Exponents]uint32, k.Seeds)
	d := k.Seeds * k.Chunk
	cpu.Parallel(k.Seeds, max(1, strip.Columns/k.Chunk), func(lo, hi int) {
		for r := range k.Rows {
			for s := lo; s < hi; s++ {
				if k.Measure[s] {
					figures.AddExponents(&histograms[s], x[r*d+s*k.Chunk:][:k.Chunk])
				}
			}
		}
	})

	return histograms
}
