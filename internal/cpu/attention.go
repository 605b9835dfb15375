package cpu

import (
	"math"
	"sync"
)

// AttentionShape is the geometry of one call of attention over packed rows: q is [Batch·Seq, Heads·HeadDim], k and v are
// [Batch·Seq, KVHeads·HeadDim], and query head h reads key-value head h/(Heads/KVHeads).
type AttentionShape struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool
	Scale                               float64

	// Starts [Batch·Seq] is the first position that each query of a causal attention sees, at most its own, nil for 0. Along a
	// sequence it never decreases.
	Starts []int
}

// sequence returns the geometry of sequence b, whose Starts alone differ from those of the others.
func (s AttentionShape) sequence(b int) AttentionShape {
	if s.Starts != nil {
		s.Starts = s.Starts[b*s.Seq:][:s.Seq]
	}
	return s
}

// keys returns the range of keys outside which none of the nq queries from position i0 on sees any.
func (s *AttentionShape) keys(i0, nq int) (from, to int) {
	switch {
	case s.Starts != nil:
		return s.Starts[i0], i0 + nq
	case s.Causal:
		return 0, i0 + nq
	}
	return 0, s.Seq
}

// seen returns which of the nk keys from position j0 on the query at position i sees, counted from j0.
func (s *AttentionShape) seen(i, j0, nk int) (from, to int) {
	to = nk
	if s.Causal {
		to = max(0, min(nk, i-j0+1))
	}
	if s.Starts != nil {
		from = min(to, max(0, s.Starts[i]-j0))
	}
	return from, to
}

// Tiles of queries and keys: their product, four operands and the accumulator stay in a core's second-level cache.
const (
	queryTile = 64
	keyTile   = 64
)

// tiles is the memory that one worker needs, whatever the sequence length.
type tiles[T Float] struct {
	p, dp []T // queryTile×keyTile
	m, l  []T // running maximum and sum of a query
	d     []T // Σ output ⊙ its gradient of a query
}

var tiles32, tiles64 sync.Pool

func tilePool[T Float]() *sync.Pool {
	if _, ok := any(T(0)).(float32); ok {
		return &tiles32
	}
	return &tiles64
}

func getTiles[T Float]() *tiles[T] {
	if t, ok := tilePool[T]().Get().(*tiles[T]); ok {
		return t
	}
	n := queryTile * keyTile
	return &tiles[T]{make([]T, n), make([]T, n), make([]T, queryTile), make([]T, queryTile), make([]T, queryTile)}
}

// Attention computes y = softmax(Scale·q·kᵀ)·v for every head, and the log-sum-exp of every row of scores, lse
// [Batch·Heads·Seq]. Scores exist a tile at a time: the softmax is formed online, with a running maximum and sum a query.
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.)
func Attention[T Float](y, lse, q, k, v []T, s AttentionShape) {
	blocks := (s.Seq + queryTile - 1) / queryTile
	parallel(s.Batch*s.Heads*blocks, 1, attention[T]{y, lse, q, k, v, s, blocks})
}

// AttentionAt computes one row of a causal attention of a single sequence, that of the given position: q and y are
// [Heads·HeadDim], k and v have the rows of all positions up to it. The row has the bits that [Attention] gives it, as long as
// the products of matrices have them.
func AttentionAt[T Float](y, q, k, v []T, position int, s AttentionShape) {
	s.Batch, s.Seq, s.Causal = 1, position+1, true
	parallel(s.Heads, max(1, 1<<12/(s.Seq*s.HeadDim)), attentionAt[T]{y, q, k, v, position, s})
}

type attentionAt[T Float] struct {
	y, q, k, v []T
	position   int
	AttentionShape
}

func (s attentionAt[T]) span(lo, hi int) {
	t := getTiles[T]()
	defer tilePool[T]().Put(t)
	var lse [1]T
	for h := lo; h < hi; h++ {
		kv := h / (s.Heads / s.KVHeads) * s.HeadDim
		at := h * s.HeadDim
		t.forward(s.y[at:], lse[:], s.q[at:], s.k[kv:], s.v[kv:], s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.position, 1, s.AttentionShape)
	}
}

type attention[T Float] struct {
	y, lse, q, k, v []T
	AttentionShape
	blocks int
}

func (s *attention[T]) span(lo, hi int) {
	group := s.Heads / s.KVHeads
	qd, kd, dh := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim
	t := getTiles[T]()
	defer tilePool[T]().Put(t)
	for task := lo; task < hi; task++ {
		// The longest causal rows come first, so that the cores finish together.
		block, head := s.blocks-1-task/(s.Batch*s.Heads), task%(s.Batch*s.Heads)
		b, h := head/s.Heads, head%s.Heads
		i0 := block * queryTile
		nq := min(queryTile, s.Seq-i0)
		row := b*s.Seq + i0
		q, y := s.q[row*qd+h*dh:], s.y[row*qd+h*dh:]
		kv := b*s.Seq*kd + h/group*dh
		t.forward(y, s.lse[head*s.Seq+i0:][:nq], q, s.k[kv:], s.v[kv:], qd, kd, i0, nq, s.sequence(b))
	}
}

// forward computes nq rows of one head, whose first is position i0.
func (t *tiles[T]) forward(y, lse, q, k, v []T, qd, kd, i0, nq int, s AttentionShape) {
	dh := s.HeadDim
	first, keys := s.keys(i0, nq)
	for i := range nq {
		t.m[i], t.l[i] = T(math.Inf(-1)), 0
		clear(y[i*qd:][:dh])
	}
	for j0 := first; j0 < keys; j0 += keyTile {
		nk := min(keyTile, keys-j0)
		GemmSerial(false, true, nq, nk, dh, T(s.Scale), q, qd, k[j0*kd:], kd, 0, t.p, keyTile)
		for i := range nq {
			p := t.p[i*keyTile:][:nk]
			from, to := s.seen(i0+i, j0, nk)
			clear(p[:from])
			clear(p[to:])
			if p = p[from:to]; len(p) == 0 {
				continue
			}
			m := max(t.m[i], Max(p))
			sum := ExpSub(p, p, m)
			if m != t.m[i] {
				c := T(math.Exp(float64(t.m[i] - m)))
				t.l[i] *= c
				scale(y[i*qd:][:dh], c)
				t.m[i] = m
			}
			t.l[i] += sum
		}
		GemmSerial(false, false, nq, dh, nk, 1, t.p, keyTile, v[j0*kd:], kd, 1, y, qd)
	}
	for i := range nq {
		scale(y[i*qd:][:dh], 1/t.l[i])
		lse[i] = t.m[i] + T(math.Log(float64(t.l[i])))
	}
}

// AttentionBackward computes the gradients dq, dk and dv of [Attention] for the output gradient g, from the forward
// pass's output y and lse. Scores are computed again, tile by tile; with P the softmax and D = rowsum(g ⊙ y),
//
//	dv = Pᵀ·g,  dS = P ⊙ (g·vᵀ − D),  dq = Scale·dS·k,  dk = Scale·dSᵀ·q.
func AttentionBackward[T Float](dq, dk, dv, g, q, k, v, y, lse []T, s AttentionShape) {
	// One task is a key-value head with all query heads that read it: no two tasks write the same element.
	parallel(s.Batch*s.KVHeads, 1, attentionBackward[T]{dq, dk, dv, g, q, k, v, y, lse, s})
}

type attentionBackward[T Float] struct {
	dq, dk, dv, g, q, k, v, y, lse []T
	AttentionShape
}

func (s *attentionBackward[T]) span(lo, hi int) {
	group := s.Heads / s.KVHeads
	qd, kd, dh := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim
	t := getTiles[T]()
	defer tilePool[T]().Put(t)
	for task := lo; task < hi; task++ {
		b, kvh := task/s.KVHeads, task%s.KVHeads
		kv := b*s.Seq*kd + kvh*dh
		for r := range s.Seq {
			clear(s.dk[kv+r*kd:][:dh])
			clear(s.dv[kv+r*kd:][:dh])
		}
		for h := kvh * group; h < (kvh+1)*group; h++ {
			o := b*s.Seq*qd + h*dh
			t.backward(s.dq[o:], s.dk[kv:], s.dv[kv:], s.g[o:], s.q[o:], s.k[kv:], s.v[kv:], s.y[o:], s.lse[(b*s.Heads+h)*s.Seq:],
				qd, kd, s.sequence(b))
		}
	}
}

// backward computes dq of one query head and adds to dk and dv of the head it reads.
func (t *tiles[T]) backward(dq, dk, dv, g, q, k, v, y, lse []T, qd, kd int, s AttentionShape) {
	dh := s.HeadDim
	for i0 := 0; i0 < s.Seq; i0 += queryTile {
		nq := min(queryTile, s.Seq-i0)
		first, keys := s.keys(i0, nq)
		qi, gi, dqi := q[i0*qd:], g[i0*qd:], dq[i0*qd:]
		for i := range nq {
			t.d[i] = dot(gi[i*qd:][:dh], y[(i0+i)*qd:][:dh])
			clear(dqi[i*qd:][:dh])
		}
		for j0 := first; j0 < keys; j0 += keyTile {
			nk := min(keyTile, keys-j0)
			kj, vj := k[j0*kd:], v[j0*kd:]
			GemmSerial(false, true, nq, nk, dh, T(s.Scale), qi, qd, kj, kd, 0, t.p, keyTile)
			GemmSerial(false, true, nq, nk, dh, 1, gi, qd, vj, kd, 0, t.dp, keyTile)
			for i := range nq {
				p, dp := t.p[i*keyTile:][:nk], t.dp[i*keyTile:][:nk]
				from, to := s.seen(i0+i, j0, nk)
				clear(p[:from])
				clear(p[to:])
				clear(dp[:from])
				clear(dp[to:])
				p, dp = p[from:to], dp[from:to]
				ExpSub(p, p, lse[i0+i])
				softmaxGradient(dp, p, t.d[i])
			}
			GemmSerial(true, false, nk, dh, nq, 1, t.p, keyTile, gi, qd, 1, dv[j0*kd:], kd)
			GemmSerial(false, false, nq, dh, nk, T(s.Scale), t.dp, keyTile, kj, kd, 1, dqi, qd)
			GemmSerial(true, false, nk, dh, nq, T(s.Scale), t.dp, keyTile, qi, qd, 1, dk[j0*kd:], kd)
		}
	}
}
