package cpu

// Backward computes the gradients of Forward, given g, that of y, and the figures of g. A row of g is first scaled, for
// each seed, by min(1, limit/(‖g‖ + ε)) when there are limits. Then
//
//	dx = g                                  for seeds that do not blend
//	dx = (1 − α)·g + (∂t/∂x)ᵀ·αg            for those that do, 0 where the strict mode's clamp bites
//	dweights[slot] += Σ_rows (∂t/∂w)ᵀ·αg    for those that learn, with α = 1 for those that do not blend
//	dscales[slot]  += Σ_rows (∂t/∂a)·αg
//
// summed over seeds that share a slot. Slots of no learning seed get 0.
func (k *Kasmina[T]) Backward(dx, dweights, dscales, g, x, weights, scales []T) {
	k.prepare(weights, scales)
	k.prepareLearning()
	c, d := k.Chunk, k.Seeds*k.Chunk
	blocks := k.tiles(func(block, r0, r1, s0, s1 int, scratch []T) {
		seed := noSeed
		defer attribute(&seed)
		figures := k.partial[block*k.Seeds+s0 : block*k.Seeds+s1]
		for i := range figures {
			figures[i] = newFigures(k.Reduce)
		}
		active := k.active(s0, s1)
		dp, da := k.dp[block*k.learned:][:k.learned], k.da[block*len(k.learning):][:len(k.learning)]
		for i := range active {
			if s := &active[i]; s.Learn {
				clear(dp[s.at:][:s.size])
				da[s.learn] = 0
			}
		}
		for r := r0; r < r1; r++ {
			gr, dr := g[r*d:][s0*c:s1*c], dx[r*d:][s0*c:s1*c]
			copy(dr, gr)
			k.watchGradient(figures, dr, g, s0)
			for i := range active {
				s := &active[i]
				if s.mixes {
					continue
				}
				at := (s.Seed - s0) * c
				in := x[r*d+s.Seed*c:][:c]
				seed = s.Seed
				if s.Learn {
					da[s.learn] += k.blendBackward(dr[at:][:c], dp[s.at:][:s.size], in, s, scratch)
				} else {
					k.blendBackward(dr[at:][:c], scratch[3*c:][:s.size], in, s, scratch)
				}
				seed = noSeed
			}
		}
		for i := range active {
			if s := &active[i]; s.mixes {
				if s.Learn {
					da[s.learn] = k.mixBackward(dx, dp[s.at:][:s.size], x, r0, r1, s, scratch)
				} else {
					k.mixBackward(dx, nil, x, r0, r1, s, scratch)
				}
			}
		}
	})
	k.finish(blocks, g)
	k.reduceLearning(blocks, dweights, dscales)
}

// watchGradient takes one row of a tile, whose first seed is s0, into the tile's figures, and scales the chunks whose norm
// exceeds their limit.
func (k *Kasmina[T]) watchGradient(figures []ChunkFigures, gr, g []T, s0 int) {
	if !k.measured && k.Limit == nil && countBad(gr) == 0 {
		return
	}
	c := k.Chunk
	for i := range figures {
		v, f := gr[i*c:][:c], &figures[i]
		measure := k.Measure[s0+i]
		if !measure && k.Limit == nil {
			f.Bad += countBad(v)
			continue
		}
		row := scan(v, 0)
		m := row.absolute()
		length := norm(m)
		if measure {
			f.addRow(&row, anchorOf(g[(s0+i)*c]))
			if row.m.N > 0 {
				f.Norms.Add(length)
				if k.Reduce != ReduceExact {
					figures := gradient(m, row.lo, row.hi)
					f.reduceRow(k.Reduce, figures[:])
				}
			}
		} else {
			f.Bad += row.bad
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

// blendBackward replaces the gradient g of one chunk row of an active seed by that of its input x, adds the gradient of p
// to dp and returns that of the scale. scratch holds 3·Chunk elements.
func (k *Kasmina[T]) blendBackward(g, dp, x []T, s *KasminaSeed[T], scratch []T) (da float64) {
	c := len(x)
	in, dt, gt := x, scratch[:c], scratch[c:2*c]
	if k.Stability == StabilityStrict {
		in = scratch[2*c : 3*c]
		k.clamp(in, x, s)
	}
	switch {
	case !s.Blend:
		return s.rule.Backward(dt, dp, g, in, s.p, s.scale)
	case s.Alpha == 1:
		copy(gt, g)
		da = s.rule.Backward(g, dp, gt, in, s.p, s.scale)
	case s.Alpha != 0:
		for i, v := range g {
			gt[i] = s.Alpha * v
		}
		da = s.rule.Backward(dt, dp, gt, in, s.p, s.scale)
		for i, v := range dt {
			g[i] += v - gt[i]
		}
	}
	if k.Stability == StabilityStrict {
		for i, v := range x {
			if k.bites(v, s) {
				g[i] = 0
			}
		}
	}
	return da
}

// prepareLearning numbers the seeds that learn and readies their buffers.
func (k *Kasmina[T]) prepareLearning() {
	k.learning, k.learned = k.learning[:0], 0
	for i := range k.Active {
		if s := &k.Active[i]; s.Learn {
			s.learn, s.at = len(k.learning), k.learned
			k.learning = append(k.learning, i)
			k.learned += s.size
		}
	}
	rows, _ := k.tile()
	blocks := (k.Rows + rows - 1) / rows
	k.dp, k.da = grow(k.dp, blocks*k.learned), grow(k.da, blocks*len(k.learning))
}

// reduceLearning adds up the gradients of the parameters: over blocks of rows, then over the seeds of a slot in their order.
func (k *Kasmina[T]) reduceLearning(blocks int, dweights, dscales []T) {
	n := len(k.learning)
	Parallel(n, grain(4*blocks*k.learned/max(n, 1)), func(lo, hi int) {
		seed := noSeed
		defer attribute(&seed)
		for i := lo; i < hi; i++ {
			s := &k.Active[k.learning[i]]
			total := k.dp[s.at:][:s.size]
			for j := range total {
				var sum float64
				for b := range blocks {
					sum += float64(k.dp[b*k.learned+s.at+j])
				}
				total[j] = T(sum)
			}
			for b := 1; b < blocks; b++ {
				k.da[i] += k.da[b*n+i]
			}
			if s.rule.Finish != nil {
				seed = s.Seed
				s.rule.Finish(total, s.p)
				seed = noSeed
			}
		}
	})
	k.sortBySlot()
	Parallel(k.Slots, grain(4*k.Width), func(lo, hi int) {
		for slot := lo; slot < hi; slot++ {
			seeds := k.order[k.heads[slot]:k.heads[slot+1]]
			dw := dweights[slot*k.Width:][:k.Width]
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
			dscales[slot] = T(sum)
		}
	})
}

// sortBySlot orders the learning seeds by slot, those of a slot in their own order: slot s has order[heads[s]:heads[s+1]].
func (k *Kasmina[T]) sortBySlot() {
	k.heads, k.order = grow(k.heads, k.Slots+2), grow(k.order, len(k.learning))
	clear(k.heads)
	for _, i := range k.learning {
		k.heads[k.Active[i].Slot+2]++
	}
	for s := 2; s < len(k.heads); s++ {
		k.heads[s] += k.heads[s-1]
	}
	for i, a := range k.learning {
		at := &k.heads[k.Active[a].Slot+1]
		k.order[*at] = i
		*at++
	}
}

// Exponents returns the histogram of the magnitudes of x of every measured seed.
func (k *Kasmina[T]) Exponents(x []T) [][Exponents]uint32 {
	histograms := make([][Exponents]uint32, k.Seeds)
	d := k.Seeds * k.Chunk
	Parallel(k.Seeds, max(1, tileColumns/k.Chunk), func(lo, hi int) {
		for r := range k.Rows {
			for s := lo; s < hi; s++ {
				if k.Measure[s] {
					addExponents(&histograms[s], x[r*d+s*k.Chunk:][:k.Chunk])
				}
			}
		}
	})
	return histograms
}
