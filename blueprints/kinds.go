package blueprints

import (
	"math"
	"math/rand/v2"
)

// builtin holds the built-in kinds, indexed by Kind.
var builtin = []*Blueprint{
	Residual: {
		Name:        "Residual",
		Layout:      "x + a·w: w[i] is added to feature i, a scales all of w",
		Identity:    func(w []float64, _ int, _ *rand.Rand) float64 { return fill(w, 0, 1) },
		Homogeneity: InXAndScale,
		F32:         residual[float32](),
		F64:         residual[float64](),
	},
	AttentionGate: {
		Name:   "AttentionGate",
		Layout: "a · x ⊙ softmax(w): w[i] is the logit of feature i's gate, a scales the result",
		Identity: func(w []float64, _ int, _ *rand.Rand) float64 {
			return fill(w, 0, float64(len(w)))
		},
		Homogeneity: InX,
		F32:         attentionGate[float32](),
		F64:         attentionGate[float64](),
	},
	MLPExpansion: {
		Name:   "MLPExpansion",
		Layout: "a · relu(x ⊙ w): w[i] multiplies feature i before the relu, a scales the result",
		// This is the identity where x ≥ 0.
		Identity:    func(w []float64, _ int, _ *rand.Rand) float64 { return fill(w, 1, 1) },
		Homogeneity: InX,
		F32:         mlpExpansion[float32](),
		F64:         mlpExpansion[float64](),
	},
	ConvFilter: {
		Name: "ConvFilter",
		Layout: "a · (w0·x[i] + w1·x[i−1] + w2·x[i−2]): only the first three weights are used, a " +
			"scales the result",
		Identity: func(w []float64, _ int, _ *rand.Rand) float64 {
			fill(w, 0, 1)
			w[0] = 1
			return 1
		},
		Homogeneity: InX,
		F32:         convFilter[float32](),
		F64:         convFilter[float64](),
	},
	LowRank: {
		Name:        "LowRank",
		Layout:      "x + a·U(V·x): V [m, C] and then U [C, m], a scales what is added",
		Size:        mixingSize,
		Parts:       mixingParts("V", "U"),
		Identity:    mixingIdentity,
		Homogeneity: InX,
		F32:         mixing(linear[float32]),
		F64:         mixing(linear[float64]),
	},
	ChunkMLP: {
		Name:     "ChunkMLP",
		Layout:   "x + a·W2·silu(W1·x): W1 [m, C] and then W2 [C, m], a scales what is added",
		Size:     mixingSize,
		Parts:    mixingParts("W1", "W2"),
		Identity: mixingIdentity,
		F32:      mixing(silu[float32]),
		F64:      mixing(silu[float64]),
	},
	Stack: {
		Name:   "Stack",
		Site:   Depth,
		Layout: "all blocks in order, size times over",
		Order:  stack,
	},
	Interleave: {
		Name:   "Interleave",
		Site:   Depth,
		Layout: "each block size times, one after the other",
		Order:  interleave,
	},
	NewBlocks: {
		Name:   "NewBlocks",
		Site:   Depth,
		Layout: "size new blocks after the last one, which start as the identity",
		Order:  appendBlocks,
	},
	LoRA: {
		Name:   "LoRA",
		Site:   Weight,
		Layout: "W + s·B·A: A [size, in] and B [out, size], s scales what is added",
	},
	Attention: {
		Name:   "Attention",
		Site:   Stream,
		Layout: "x + attention(norm(x)), of size heads, as the model's blocks have it",
	},
	Perceptron: {
		Name:   "Perceptron",
		Site:   Stream,
		Layout: "x + perceptron(norm(x)), of size hidden features, as the model's blocks have it",
	},
	Middle: {
		Name:   "Middle",
		Site:   Depth,
		Layout: "the first third of the blocks, the middle size times over, the last third",
		Order:  middle,
	},
}

// fill sets all elements of w to v and returns scale.
func fill(w []float64, v, scale float64) float64 {
	for i := range w {
		w[i] = v
	}
	return scale
}

// residual computes t = x + a·w, with gradients dx = g, dw = a·g and da = Σ g·w.
func residual[T Float]() Arithmetic[T] {
	return Arithmetic[T]{
		Forward: func(t, x, w []T, a T) {
			x, w = x[:len(t)], w[:len(t)]
			for i := range t {
				t[i] = x[i] + a*w[i]
			}
		},
		Backward: func(dx, dp, g, x, w []T, a T) (da float64) {
			dx, dp, w = dx[:len(g)], dp[:len(g)], w[:len(g)]
			for i, gi := range g {
				dx[i] = gi
				dp[i] += a * gi
				da += float64(gi) * float64(w[i])
			}
			return da
		},
	}
}

// attentionGate computes t = a·x ⊙ p with p = softmax(w). Its gradients are dx = a·g ⊙ p, dp = a·g
// ⊙ x and da = Σ g·x·p. The gradient of the softmax, dw = p ⊙ (dp − Σ dp·p), is linear in dp, so
// Finish computes it once from the sum over all rows.
func attentionGate[T Float]() Arithmetic[T] {
	return Arithmetic[T]{
		Prepare: softmax[T],
		Forward: func(t, x, p []T, a T) {
			x, p = x[:len(t)], p[:len(t)]
			for i := range t {
				t[i] = a * p[i] * x[i]
			}
		},
		Backward: func(dx, dp, g, x, p []T, a T) (da float64) {
			dx, dp, x, p = dx[:len(g)], dp[:len(g)], x[:len(g)], p[:len(g)]
			for i, gi := range g {
				dx[i] = a * p[i] * gi
				dp[i] += a * gi * x[i]
				da += float64(gi) * float64(x[i]) * float64(p[i])
			}
			return da
		},
		Finish: func(dp, p []T) {
			var dot float64
			for i, v := range dp {
				dot += float64(v) * float64(p[i])
			}
			for i := range dp {
				dp[i] = T(float64(p[i]) * (float64(dp[i]) - dot))
			}
		},
	}
}

// softmax computes p[i] = exp(w[i] − max w) / Σ exp(w[j] − max w), with the sum in float64.
func softmax[T Float](p, w []T) {
	top := math.Inf(-1)
	for _, v := range w {
		top = max(top, float64(v))
	}

	var sum float64

	// Exponentials dominate the running time, so the first 64 (often all of them) are kept instead
	// of being computed twice.
	var first [64]float64
	for i, v := range w {
		e := math.Exp(float64(v) - top)
		if sum += e; i < len(first) {
			first[i] = e
		}
	}

	for i := range min(len(w), len(first)) {
		p[i] = T(first[i] / sum)
	}

	for i := len(first); i < len(w); i++ {
		p[i] = T(math.Exp(float64(w[i])-top) / sum)
	}
}

// mlpExpansion computes t = a·relu(x ⊙ w). Where x·w > 0, its gradients are dx = a·g·w, dw = a·g·x
// and da = Σ g·x·w; elsewhere they are 0.
func mlpExpansion[T Float]() Arithmetic[T] {
	return Arithmetic[T]{
		Forward: func(t, x, w []T, a T) {
			x, w = x[:len(t)], w[:len(t)]
			for i := range t {
				t[i] = a * max(x[i]*w[i], 0)
			}
		},
		Backward: func(dx, dp, g, x, w []T, a T) (da float64) {
			dx, dp, x, w = dx[:len(g)], dp[:len(g)], x[:len(g)], w[:len(g)]
			for i, gi := range g {
				if x[i]*w[i] <= 0 {
					dx[i] = 0
					continue
				}
				dx[i] = a * gi * w[i]
				dp[i] += a * gi * x[i]
				da += float64(gi) * float64(x[i]) * float64(w[i])
			}
			return da
		},
	}
}

// convFilter computes t[i] = a·Σₖ w[k]·x[i−k] for k = 0, 1, 2 with i−k ≥ 0. Its gradients are dx[i]
// = a·Σₖ w[k]·g[i+k] with i+k < C, dw[k] = a·Σᵢ g[i]·x[i−k] and da = Σᵢ g[i]·t[i]/a. A chunk of one
// or two features uses one or two taps.
func convFilter[T Float]() Arithmetic[T] {
	return Arithmetic[T]{
		Forward: func(t, x, w []T, a T) {
			w0, w1, w2 := taps(w)
			x = x[:len(t)]
			var x1, x2 T
			for i, x0 := range x {
				t[i] = a * (w0*x0 + w1*x1 + w2*x2)
				x1, x2 = x0, x1
			}
		},
		Backward: func(dx, dp, g, x, w []T, a T) (da float64) {
			w0, w1, w2 := taps(w)
			dx, x = dx[:len(g)], x[:len(g)]
			var g1, g2 T
			for i := len(g) - 1; i >= 0; i-- {
				dx[i] = a * (w0*g[i] + w1*g1 + w2*g2)
				g1, g2 = g[i], g1
			}

			var d [3]float64 // Σᵢ g[i]·x[i−k]
			var x1, x2 float64
			for i, gi := range g {
				x0, gi := float64(x[i]), float64(gi)
				d[0] += gi * x0
				d[1] += gi * x1
				d[2] += gi * x2
				x1, x2 = x0, x1
			}

			for k := range min(len(dp), len(d)) {
				dp[k] += T(float64(a) * d[k])
				da += float64(w[k]) * d[k]
			}

			return da
		},
	}
}

// taps returns the first three weights, or 0 if w is shorter.
func taps[T Float](w []T) (w0, w1, w2 T) {
	switch len(w) {
	case 0:
	case 1:
		w0 = w[0]
	case 2:
		w0, w1 = w[0], w[1]
	default:
		w0, w1, w2 = w[0], w[1], w[2]
	}
	return w0, w1, w2
}
