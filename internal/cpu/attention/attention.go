// Package attention computes softmax attention and its gradients, one tile of scores at a time.
package attention

import (
	"math"
	"sync"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Shape is the geometry of one call of attention over packed rows. q is [Batch·Seq, Heads·HeadDim];
// k and v are [Batch·Seq, KVHeads·HeadDim]. Query head h reads key-value head h/(Heads/KVHeads).
type Shape struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool
	Scale                               float64

	// Starts [Batch·Seq] holds the first position that each query of a causal attention sees. It
	// must not exceed the query's own position or decrease along a sequence. Nil means position 0.
	Starts []int
	// Window is the number of positions that a query of a causal attention sees, including its own;
	// 0 means all.
	Window int

	Stop *cpu.Stop // interrupts Forward
}

// sequence returns the geometry of sequence b. Sequences differ only in their Starts.
func (s Shape) sequence(b int) Shape {
	if s.Starts != nil {
		s.Starts = s.Starts[b*s.Seq:][:s.Seq]
	}
	return s
}

// start returns the first position that the query at position i of a causal attention sees.
func (s *Shape) start(i int) (from int) {
	if s.Starts != nil {
		from = s.Starts[i]
	}
	if s.Window > 0 {
		from = max(from, i-s.Window+1)
	}
	return from
}

// keys returns the range of keys that contains all keys seen by any of the nq queries from position
// i0 on.
func (s *Shape) keys(i0, nq int) (from, to int) {
	if s.Causal {
		return s.start(i0), i0 + nq
	}
	return 0, s.Seq
}

// seen returns the range, relative to j0, of keys that the query at position i sees among the nk
// keys from position j0 on.
func (s *Shape) seen(i, j0, nk int) (from, to int) {
	if !s.Causal {
		return 0, nk
	}
	to = max(0, min(nk, i-j0+1))
	return min(to, max(0, s.start(i)-j0)), to
}

// Sizes of tiles. The products of the backward pass and their operands stay in a core's
// second-level cache. Along the diagonal of a causal attention, queries are processed in strips
// that skip keys unseen by all their queries.
const (
	queryTile  = 128
	queryStrip = 32
	keyTile    = 256
	// scoreStride is the stride of a row of scores. A power of two would map columns to few sets of
	// a cache.
	scoreStride = keyTile + 16
)

// tiles is the working memory of one worker, independent of the sequence length.
type tiles[T cpu.Float] struct {
	p, dp []T // queryTile×keyTile, of stride scoreStride
	m, l  []T // running maximum and sum of each query
	d     []T // Σ output ⊙ output gradient of each query
}

var tiles32, tiles64 sync.Pool

// tilePool returns the pool of tiles for T.
func tilePool[T cpu.Float]() *sync.Pool {
	if _, ok := any(T(0)).(float32); ok {
		return &tiles32
	}
	return &tiles64
}

// getTiles returns tiles from the pool or new ones.
func getTiles[T cpu.Float]() *tiles[T] {
	if t, ok := tilePool[T]().Get().(*tiles[T]); ok {
		return t
	}
	n := queryTile * scoreStride
	return &tiles[T]{make([]T, n), make([]T, n), make([]T, queryTile),
		make([]T, queryTile), make([]T, queryTile)}
}

// Forward computes y = softmax(Scale·q·kᵀ)·v for every head, and the normalizers [Batch·Heads·Seq,
// 2] of all rows of scores.
//
// The normalizers of a row are its largest score m and l = Σ exp(score − m). The backward pass needs
// both, because float32 rounds m + log l by up to 0.03 for scores near 10⁶, which would make the
// probabilities wrong by 3%.
//
// Scores exist one tile at a time: the softmax is computed online, with a running maximum and sum for
// each query (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022). Forward returns early once s.Stop is triggered.
func Forward[T cpu.Float](y, normalizers, q, k, v []T, s Shape) {
	buf := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(buf)
	stride := transposedStride[T](s.Seq)
	kt := buf.Elements(s.Batch * s.KVHeads * s.HeadDim * stride)
	cpu.Spread(s.Batch*s.KVHeads, 1, transposedHeads[T]{kt, k, s, stride})
	blocks := cpu.CeilDiv(s.Seq, queryStrip)
	cpu.Spread(s.Batch*s.Heads*blocks, 1,
		forwardArgs[T]{y, normalizers, q, kt, v, s, blocks, stride})
}

// transposedStride returns the stride of the rows of a transposed head; a row holds one feature of
// seq positions.
func transposedStride[T cpu.Float](seq int) int {
	lanes := gemm.Lanes[T]()
	// Wide enough for whole vectors, but not a power of two.
	return (cpu.CeilDiv(seq, lanes) + 1) * lanes
}

// transposeHead writes the transpose of one head of a sequence: seq rows of x with stride xd.
func transposeHead[T cpu.Float](xt, x []T, stride, xd, seq, headDim int) {
	lanes := gemm.Lanes[T]()
	for i := 0; i < seq; i += lanes {
		gemm.TransposeLanes(xt[i:], stride, x[i*xd:], xd, min(lanes, seq-i), headDim)
	}
}

// transposedHeads are the arguments for transposing all heads.
type transposedHeads[T cpu.Float] struct {
	xt, x []T
	Shape
	stride int
}

func (s *transposedHeads[T]) Span(lo, hi int) {
	xd := s.KVHeads * s.HeadDim
	for head := lo; head < hi; head++ {
		b, h := head/s.KVHeads, head%s.KVHeads
		transposeHead(s.xt[head*s.HeadDim*s.stride:], s.x[b*s.Seq*xd+h*s.HeadDim:],
			s.stride, xd, s.Seq, s.HeadDim)
	}
}

// At computes the rows of a causal attention for consecutive positions of a single sequence, from
// position start on. q and y are [rows, Heads·HeadDim]; k and v hold the rows of all positions up to
// the last of these. Every row is bit-identical to the one computed by [Forward], provided the matrix
// products are.
func At[T cpu.Float](y, q, k, v []T, start, rows int, s Shape) {
	s.Batch, s.Seq, s.Causal = 1, start+rows, true
	first := start / queryStrip
	strips := (s.Seq-1)/queryStrip - first + 1
	cpu.Spread(s.Heads*strips, max(1, 1<<12/(s.Seq*s.HeadDim)),
		atArgs[T]{y, q, k, v, start, first, s})
}

// atArgs are the arguments of At. An item is a head of a strip of queries.
type atArgs[T cpu.Float] struct {
	y, q, k, v   []T
	start, first int // the first position, and the strip that contains it
	Shape
}

func (s atArgs[T]) Span(lo, hi int) {
	t := getTiles[T]()
	defer tilePool[T]().Put(t)
	var normalizers [2 * queryStrip]T
	qd, kd := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	for item := lo; item < hi; item++ {
		h, strip := item%s.Heads, s.first+item/s.Heads
		from, to := max(s.start, strip*queryStrip), min(s.Seq, (strip+1)*queryStrip)

		at, kv := (from-s.start)*qd+h*s.HeadDim, h/(s.Heads/s.KVHeads)*s.HeadDim
		k := matrix[T]{s.k[kv:], kd, true}
		t.forward(s.y[at:], normalizers[:], s.q[at:], k, s.v[kv:], qd, kd, from, to-from, s.Shape)
	}
}

// forwardArgs are the arguments of Forward.
type forwardArgs[T cpu.Float] struct {
	y, normalizers, q, kt, v []T // kt holds the transposed heads of k, one after the other
	Shape
	blocks, stride int
}

func (s *forwardArgs[T]) Span(lo, hi int) {
	group := s.Heads / s.KVHeads
	qd, kd, dh := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim
	t := getTiles[T]()
	defer tilePool[T]().Put(t)
	for task := lo; task < hi; task++ {
		// The longest causal rows of a head come first, so that all cores finish at about the same
		// time.
		head, block := task/s.blocks, s.blocks-1-task%s.blocks
		b, h := head/s.Heads, head%s.Heads
		i0 := block * queryStrip
		nq := min(queryStrip, s.Seq-i0)
		row := b*s.Seq + i0
		q, y := s.q[row*qd+h*dh:], s.y[row*qd+h*dh:]
		kt := matrix[T]{s.kt[(b*s.KVHeads+h/group)*dh*s.stride:], s.stride, false}
		t.forward(y, s.normalizers[2*(head*s.Seq+i0):][:2*nq], q, kt, s.v[b*s.Seq*kd+h/group*dh:], qd, kd,
			i0, nq, s.sequence(b))
	}
}

// matrix is kᵀ of one head, stored either transposed or as k.
type matrix[T cpu.Float] struct {
	x      []T
	stride int
	trans  bool // x holds k
}

// from returns the memory starting at column j.
func (m *matrix[T]) from(j int) []T {
	if m.trans {
		return m.x[j*m.stride:]
	}
	return m.x[j:]
}

// forward computes at most one strip of nq rows of one head, starting at position i0.
func (t *tiles[T]) forward(y, normalizers, q []T, kt matrix[T], v []T, qd, kd, i0, nq int,
	s Shape) {
	dh := s.HeadDim
	_, keys := s.keys(i0, nq)
	firstKey, _ := s.keys(i0/queryStrip*queryStrip, nq) // for a single row, use the tiles of its strip
	for i := range nq {
		t.m[i], t.l[i] = T(math.Inf(-1)), 0
	}

	for j0 := firstKey; j0 < keys && !s.Stop.Asked(); j0 += keyTile {
		nk := min(keyTile, keys-j0)
		gemm.MulSerial(false, kt.trans, nq, nk, dh, T(s.Scale), q, qd, kt.from(j0),
			kt.stride, 0, t.p, scoreStride)
		for i := range nq {
			p := t.p[i*scoreStride:][:nk]
			from, to := s.seen(i0+i, j0, nk)
			clear(p[:from])
			clear(p[to:])
			if p = p[from:to]; len(p) == 0 {
				continue
			}

			m := max(t.m[i], vec.Max(p))
			sum := vec.ExpSub(p, p, m)
			if m != t.m[i] && j0 > firstKey {
				c := T(math.Exp(float64(t.m[i] - m)))
				t.l[i] *= c
				vec.Scale(y[i*qd:][:dh], c)
			}
			t.m[i] = m
			t.l[i] += sum
		}

		gemm.MulSerial(false, false, nq, dh, nk, 1, t.p, scoreStride, v[j0*kd:], kd,
			unless[T](j0 == firstKey), y, qd)
	}

	for i := range nq {
		vec.Scale(y[i*qd:][:dh], 1/t.l[i])
		normalizers[2*i], normalizers[2*i+1] = t.m[i], t.l[i]
	}
}

// Backward computes the gradients dq, dk and dv of the attention for the output gradient g, given
// the output y and the normalizers of the forward pass. Scores are recomputed tile by tile. With P
// the softmax and D = rowsum(g ⊙ y),
//
//	dv = Pᵀ·g,  dS = P ⊙ (g·vᵀ − D),  dq = Scale·dS·k,  dk = Scale·dSᵀ·q.
func Backward[T cpu.Float](dq, dk, dv, g, q, k, v, y, normalizers []T, s Shape) {
	// Each task handles a key-value head with all query heads that read it, so no two tasks write
	// the same element.
	cpu.Spread(s.Batch*s.KVHeads, 1,
		backwardArgs[T]{dq, dk, dv, g, q, k, v, y, normalizers, s})
}

// backwardArgs are the arguments of Backward.
type backwardArgs[T cpu.Float] struct {
	dq, dk, dv, g, q, k, v, y, normalizers []T
	Shape
}

// headGradient holds the operands of the backward pass of one query head. Matrices start at the
// first row of its sequence and the first column of the head, or of the key-value head that it
// reads.
type headGradient[T cpu.Float] struct {
	dq, dk, dv, g, q, k, v, y, normalizers []T
	kt, vt                                 []T  // transposes of k and v
	qd, kd, stride                         int  // strides of queries, of keys, and of kt and vt
	unset                                  bool // dk and dv have not been written yet
	Shape
}

func (s *backwardArgs[T]) Span(lo, hi int) {
	group := s.Heads / s.KVHeads
	qd, kd, dh := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim
	t, buf := getTiles[T](), cpu.GetBuffers[T]()
	defer tilePool[T]().Put(t)
	defer cpu.PutBuffers(buf)
	stride := transposedStride[T](s.Seq)
	both := buf.Elements(2 * dh * stride)
	kt, vt := both[:dh*stride], both[dh*stride:]
	for task := lo; task < hi; task++ {
		b, kvh := task/s.KVHeads, task%s.KVHeads
		kv := b*s.Seq*kd + kvh*dh
		transposeHead(kt, s.k[kv:], stride, kd, s.Seq, dh)
		transposeHead(vt, s.v[kv:], stride, kd, s.Seq, dh)
		for h := kvh * group; h < (kvh+1)*group; h++ {
			o := b*s.Seq*qd + h*dh
			t.backward(&headGradient[T]{s.dq[o:], s.dk[kv:], s.dv[kv:], s.g[o:], s.q[o:],
				s.k[kv:], s.v[kv:], s.y[o:],
				s.normalizers[2*(b*s.Heads+h)*s.Seq:], kt, vt, qd, kd, stride, h == kvh*group,
				s.sequence(b)})
		}
	}
}

// backward computes dq of one query head, and adds to dk and dv of its key-value head.
func (t *tiles[T]) backward(h *headGradient[T]) {
	for i0 := 0; i0 < h.Seq; i0 += queryTile {
		nq := min(queryTile, h.Seq-i0)
		for i := range nq {
			at := (i0 + i) * h.qd
			t.d[i] = vec.Dot(h.g[at:][:h.HeadDim], h.y[at:][:h.HeadDim])
		}
		firstKey, keys := h.keys(i0, nq)
		for j0 := firstKey; j0 < keys; j0 += keyTile {
			nk := min(keyTile, keys-j0)
			for r := 0; r < nq; r += queryStrip {
				t.queryGradient(h, i0, r, min(queryStrip, nq-r), j0, nk, j0 == firstKey)
			}
			t.keyGradients(h, i0, nq, j0, nk)
		}
	}
}

// queryGradient computes P and dS for a strip of n queries and nk keys. The first query is number r
// of the tile that starts at position i0. The keys start at position j0 up to the last query's last
// key. It adds their contribution to dq or, with overwrite, sets dq to it.
func (t *tiles[T]) queryGradient(h *headGradient[T], i0, r, n, j0, nk int, overwrite bool) {
	lo, _ := h.seen(i0+r, j0, nk)
	_, hi := h.seen(i0+r+n-1, j0, nk)
	at := (i0 + r) * h.qd
	if lo < hi {
		p, dp := t.p[r*scoreStride+lo:], t.dp[r*scoreStride+lo:]
		gemm.MulSerial(false, false, n, hi-lo, h.HeadDim, T(h.Scale), h.q[at:], h.qd, h.kt[j0+lo:],
			h.stride, 0, p, scoreStride)
		gemm.MulSerial(false, false, n, hi-lo, h.HeadDim, 1, h.g[at:], h.qd, h.vt[j0+lo:],
			h.stride, 0, dp, scoreStride)
	}

	for i := r; i < r+n; i++ {
		p, dp := t.p[i*scoreStride:][:hi], t.dp[i*scoreStride:][:hi]
		from, to := h.seen(i0+i, j0, nk)
		clear(p[:from])
		clear(p[to:])
		clear(dp[:from])
		clear(dp[to:])
		p, dp = p[from:to], dp[from:to]
		vec.ExpSub(p, p, h.normalizers[2*(i0+i)])
		vec.Scale(p, 1/h.normalizers[2*(i0+i)+1])
		vec.SoftmaxGradient(dp, p, t.d[i])
	}

	switch {
	case lo < hi:
		gemm.MulSerial(false, false, n, h.HeadDim, hi-lo, T(h.Scale), t.dp[r*scoreStride+lo:],
			scoreStride, h.k[(j0+lo)*h.kd:], h.kd,
			unless[T](overwrite), h.dq[at:], h.qd)
	case overwrite: // the strip's queries see only later keys, which are added to dq
		for i := range n {
			clear(h.dq[at+i*h.qd:][:h.HeadDim])
		}
	}
}

// keyGradients adds the contributions of nq queries from position i0 on to dk and dv of nk keys from
// position j0 on. Keys at the positions of these queries receive contributions only from queries in
// the same strip or later ones.
func (t *tiles[T]) keyGradients(h *headGradient[T], i0, nq, j0, nk int) {
	for c, m := 0, 0; c < nk; c += m {
		r, unseen := 0, i0 == 0
		m = nk - c
		if past := j0 + c - i0; h.Causal && past < 0 {
			m = min(m, -past)
		} else if h.Causal {
			r, unseen = past/queryStrip*queryStrip, true
			m = min(m, r+queryStrip-past)
		}
		at, to, p, beta := (i0+r)*h.qd, (j0+c)*h.kd, r*scoreStride+c, unless[T](h.unset && unseen)
		gemm.MulSerial(true, false, m, h.HeadDim, nq-r, 1, t.p[p:], scoreStride, h.g[at:], h.qd,
			beta, h.dv[to:], h.kd)
		gemm.MulSerial(true, false, m, h.HeadDim, nq-r, T(h.Scale), t.dp[p:], scoreStride, h.q[at:],
			h.qd, beta, h.dk[to:], h.kd)
	}
}

// unless returns the beta of a product: 0 to overwrite the result, 1 to add to it.
func unless[T cpu.Float](overwrite bool) T {
	if overwrite {
		return 0
	}
	return 1
}
