package kasmina

import (
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// In float32 and with exactly reduced figures, a tile is computed strip by strip. Elementwise
// blueprints are described by one rule for whole vectors of columns, regardless of the seeds that
// the columns belong to. Figures are computed per column and folded into the seeds' figures at the
// end of the tile.
//
// Everything else (kinds that mix features, registered kinds, the strict mode) is computed by row
// and seed, starting from the x or g that the strips have left in the result.

// ruleBuilding builds the rules of the strips for groups of seeds.
type ruleBuilding struct {
	k        *Layer[float32]
	backward bool
}

func (a *ruleBuilding) Span(lo, hi int) {
	k, c, strips, width := a.k, a.k.Chunk, a.k.strips(), a.k.stripWidth()
	_, seeds := k.tile()
	for group := lo; group < hi; group++ {
		s0, s1 := group*seeds, min(k.Seeds, (group+1)*seeds)
		rules := k.rules[group*strips:][:strips]
		for i := range rules {
			rules[i].Blends, rules[i].Learns, rules[i].Form = false, false, strip.Identity.Form
		}
		active := k.active(s0, s1)
		for i := range active {
			s := &active[i]
			blends, learns := s.Blend && s.alpha != 0, a.backward && s.Learn &&
				!(s.Blend && s.alpha == 0)
			if !s.ruled || !blends && !learns {
				continue
			}

			for j := 0; j < c; {
				at := (s.Index-s0)*c + j
				rule, column := &rules[at/width], at%width
				n := min(c-j, width-column)
				if !rule.Blends && !rule.Learns {
					*rule = strip.Identity
				}
				rule.Blends, rule.Learns = rule.Blends || blends, rule.Learns || learns
				setRule(rule, s, column, n, j, c, a.backward)
				j += n
			}
		}
	}
}

// setRule sets n columns of r, starting with the given one, to the rule of the chunk of s. They are
// features j to j+n−1 of its c features. With w, p and a as in package blueprints, and β = α if the
// seed blends, the kinds compute
//
//	Residual       x + βa·w
//	AttentionGate  (1 − β + βa·p)·x
//	MLPExpansion   (1 − β + βa·w)·x where x·w > 0, else (1 − β)·x
//	ConvFilter     (1 − β + βa·w0)·x + βa·w1·x[−1] + βa·w2·x[−2]
func setRule(r *strip.Rule, s *Seed[float32], column, n, j, c int, backward bool) {
	rest, gain := 1-float64(s.alpha), float64(s.alpha)*float64(s.scale)
	if !s.Blend {
		rest, gain = 1, 0
	}

	on, off, p := r.On[column:][:n], r.Off[column:][:n], s.p[j:]
	r.Take(strip.Ruled, column, n)
	switch s.Kind {
	case blueprints.Residual:
		if add := r.Add[column:][:n]; !backward {
			for i := range add {
				add[i] = float32(gain * float64(p[i]))
			}
		}
	case blueprints.AttentionGate:
		for i := range on {
			on[i] = float32(rest + gain*float64(p[i]))
			off[i] = on[i]
		}
	case blueprints.MLPExpansion:
		r.Take(strip.Gated, column, n)
		copy(r.Gate[column:][:n], p)
		for i := range on {
			on[i], off[i] = float32(rest+gain*float64(p[i])), float32(rest)
		}
		if above := r.Above[column:][:n]; backward {
			clear(above)
		}
	case blueprints.ConvFilter:
		r.Take(strip.Neighbors, column, n)
		w0, w1, w2 := taps(s.p)
		for i := range on {
			on[i] = float32(rest + gain*w0)
			off[i] = on[i]
			left, right := j+i, c-1-(j+i)
			if lane := (column + i) % 16; lane < min(left, 2) || backward &&
				15-lane < min(right, 2) {
				r.Take(strip.Across, column+i, 1)
			}
			if backward {
				r.LeftNear[column+i], r.LeftFar[column+i] = bits(left >= 1), bits(left >= 2)
				left = right
			}
			if s.Blend {
				r.Near[column+i], r.Far[column+i] = float32(gain*w1), float32(gain*w2)
				r.HasNear[column+i], r.HasFar[column+i] = bits(left >= 1), bits(left >= 2)
			}
		}
	}
}

// taps returns the first three weights, with 0 for missing ones.
func taps(w []float32) (w0, w1, w2 float64) {
	var t [3]float32
	copy(t[:], w)
	return float64(t[0]), float64(t[1]), float64(t[2])
}

// bits returns −1, with all bits set, or 0.
func bits(set bool) int32 {
	if set {
		return -1
	}
	return 0
}

// forwardStrips computes the strips of a tile of the forward pass.
func forwardStrips(k *Layer[float32], t *tile[float32], y, x []float32) {
	eps, folds, in, largest := ceil32(k.Eps), t.measured(k) || strip.Fuses(),
		&t.packs[0], float32(0)
	if folds {
		t.startAll(k, x)
	}

	t.passes(k, func(i int, s strip.View) {
		rule := &k.rules[t.first+i]
		switch {
		case folds && s.Fuses():
			t.fetch = ahead(t, s)
			rule.MeasureForward(y, x, s, &t.state[i], &t.fetch, eps)
			return
		case folds:
			t.state[i].Seen.AddInput(in, x, s, eps)
		default:
			in.Load(x, s, strip.PassRows*s.Stride)
			t.countBad(k, x, s)
		}

		if rule.Blends {
			in.LoadEdges(x, s, t.columns)
			largest = max(largest, rule.Forward(y, in, s))
		} else {
			in.Store(y, s)
		}
	})

	if folds {
		t.foldAll(k, x, k.Eps)
		largest = max(largest, t.largest)
	}

	strip.Fence()

	// The rules are valid up to this magnitude. Larger elements must be scaled down for the
	// transform, or are not finite.
	limit := float32(math.MaxFloat32)
	if k.Stability == seed.Adaptive {
		limit = adaptiveLimit
	}

	if largest > limit {
		forwardLarge(k, t, y, x, limit)
	}
}

// forwardLarge recomputes, individually, the chunk rows with an element beyond the limit.
func forwardLarge(k *Layer[float32], t *tile[float32], y, x []float32, limit float32) {
	for i := range t.active {
		s := &t.active[i]
		if !s.ruled || !s.Blend {
			continue
		}
		for r := t.r0; r < t.r1; r++ {
			at := r*t.stride + s.Index*k.Chunk
			if xr := x[at:][:k.Chunk]; exceeds(xr, limit) {
				k.blend(y[at:][:k.Chunk], xr, s, t.scratch)
			}
		}
	}
}

// exceeds reports whether any |x| is above the limit.
func exceeds(x []float32, limit float32) bool {
	for _, v := range x {
		if v > limit || v < -limit {
			return true
		}
	}
	return false
}

// backwardStrips computes the strips of a tile of the backward pass, and adds the gradients of the
// parameters to dp and da.
func backwardStrips(k *Layer[float32], t *tile[float32], dx, g, x, dp []float32, da []float64) {
	measured, normed := t.measured(k), 0
	folds := measured || strip.Fuses()
	if measured && strip.CanNorm(k.Chunk) {
		normed = (t.r1 - t.r0) / strip.NormRows * strip.NormRows
		t.startNorms(k, g)
	}

	if folds {
		t.startAll(k, g)
	}

	for i := range t.strips {
		if k.rules[t.first+i].Learns {
			t.state[i].Sums = strip.Sums{}
		}
	}

	grad, in := &t.packs[0], &t.packs[1]
	t.passes(k, func(i int, s strip.View) {
		rule, state, norms := &k.rules[t.first+i], &t.state[i], s.Done < normed
		computes := rule.Blends || rule.Learns
		switch {
		case folds && s.Fuses():
			vectors := 0
			switch {
			case norms && k.Chunk%16 == 0:
				vectors = k.Chunk / 16
			case norms:
				state.Norms.Add(g[s.At:], s.Stride, s.Rows, k.Chunk, s.Columns/k.Chunk)
			}
			t.fetch = ahead(t, s)
			rule.MeasureBackward(dx, g, x, s, state, &t.fetch, vectors)
			return
		case folds:
			state.Seen.AddGradient(grad, g, s)
		default:
			grad.Load(g, s, strip.PassRows*s.Stride)
			t.countBad(k, g, s)
		}

		if computes {
			ahead := 0
			if !rule.Blends {
				ahead = strip.PassRows * s.Stride
			}
			in.Load(x, s, ahead)
			in.LoadEdges(x, s, t.columns)
			grad.LoadEdges(g, s, t.columns)
		}

		if norms {
			state.Norms.Add(grad[strip.PackRoom:], strip.PackStride, s.Rows,
				k.Chunk, s.Columns/k.Chunk)
		}

		switch {
		case rule.Blends && rule.Learns:
			rule.Learn(dx, grad, in, s, x, &state.Sums)
		case rule.Blends:
			rule.Backward(dx, grad, in, s, x)
		default:
			if rule.Learns {
				state.Sums.Add(rule, grad, in, s)
			}
			grad.Store(dx, s)
		}
	})

	strip.Fence()
	for i := range t.strips {
		if k.rules[t.first+i].Learns {
			foldSums(k, t, t.strip(k, i, 0), &t.state[i].Sums, dp, da)
		}
	}

	if folds {
		t.foldAll(k, g, 0)
	}

	if measured {
		t.foldNorms(k, g, normed)
	}
}

// foldSums adds the gradients of the seeds' p and scales that result from the sums of a strip. With
// β = α if the seed blends and 1 otherwise, and Σ over rows,
//
//	Residual                     dp = βa·Σ g,           da = β·Σ w·Σ g
//	AttentionGate, MLPExpansion  dp = βa·Σ g·x,         da = β·Σ p·Σ g·x
//	ConvFilter                   dw[k] = βa·Σ g·x[−k],  da = β·Σ w[k]·Σ g·x[−k]
func foldSums(k *Layer[float32], t *tile[float32], s strip.View, sums *strip.Sums,
	dp []float32, da []float64) {
	c := k.Chunk
	active := k.active(t.s0+s.From/c, t.s0+(s.From+s.Columns-1)/c+1)
	for i := range active {
		a := &active[i]
		if !a.Learn || !a.ruled || a.Blend && a.Alpha == 0 {
			continue
		}

		beta := 1.0
		if a.Blend {
			beta = float64(a.Alpha)
		}
		start := (a.Index-t.s0)*c - s.From // may be in a strip to the left
		feature := max(0, -start)
		column := start + feature
		n := min(c-feature, s.Columns-column)
		dp := dp[a.at:][:a.size]
		var sum float64
		if a.Kind == blueprints.ConvFilter {
			for tap, v := range [][]float32{sums.Here[column:][:n], sums.Near[column:][:n],
				sums.Far[column:][:n]} {
				if tap < a.size {
					total := sum64(v)
					dp[tap] += float32(beta * float64(a.scale) * total)
					sum += float64(a.p[tap]) * total
				}
			}
		} else {
			v := sums.Here[column:][:n]
			if a.Kind == blueprints.Residual {
				v = sums.All[column:][:n]
			}
			dp, p := dp[feature:][:n], a.p[feature:][:n]
			for j, e := range v {
				dp[j] = float32(beta * float64(a.scale) * float64(e))
				sum += float64(p[j]) * float64(e)
			}
		}

		da[a.learn] += beta * sum
	}
}

// sum64 returns Σ v in float64.
func sum64(v []float32) (sum float64) {
	for _, e := range v {
		sum += float64(e)
	}
	return sum
}

// ceil32 returns the smallest float32 that is not below v. For float32 x, x < v and x < ceil32(v)
// are equivalent.
func ceil32(v float64) float32 {
	c := float32(v)
	if float64(c) < v {
		c = math.Nextafter32(c, float32(math.Inf(1)))
	}
	return c
}
