// Package attention has the kernels of multi-head attention with grouped keys, causal masks,
// sliding windows and packed documents: [Forward], [Backward], and the tables and statistics that
// they use. NOTES.md explains the kernels' structure and performance.
package attention

import (
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
)

// Geometry describes attention over rows of heads:
//
//	s = Scale·q·kᵀ,  m = max s,  l = Σ exp(s − m),  y = exp(s − m)/l·v
//
// Every sequence and query head is computed independently. Query head h reads key-value head
// h/(Heads/KVHeads). Queries, y and their gradients are [Batch·Seq, Heads·HeadDim]; k, v and their
// gradients are [Batch·Seq, KVHeads·HeadDim]. The normalizers m and log l are stored per query and
// head, as float32 of [Batch, Heads, Seq, 2].
type Geometry struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool    // a position sees only itself and earlier positions
	Scale                               float64 // 0 means 1/sqrt(HeadDim)
	// Cos and Sin are the RoPE tables, [Seq, HeadDim/2], used to rotate q and k, or null if these
	// are not rotated. With the tables, the backward pass returns gradients with respect to the
	// unrotated q and k.
	Cos, Sin gpu.Ptr
	// Documents is the table written by a launch of [Documents], or null if each sequence is a
	// single document without a window. With a table, a position sees only itself and earlier
	// positions of its own document. A table requires Causal.
	Documents gpu.Ptr
}

// The families of kernels. The Size of a variant is the number of heads that are worked on
// together; 0 lets the launch choose.
const (
	plain = "plain" // float32 arithmetic; takes any argument
	// mma uses tensor cores. It needs a 16-bit type, a HeadDim of 8, 16, ... 128, rows aligned to
	// 16 bytes, and Scale ≥ 0.
	mma    = "mma"
	Hopper = "hopper" // like mma, with instructions specific to compute capability 9.0
)

// variants returns the variants that accept the arguments, fastest first. rows lists all matrices.
func (a Geometry) variants(k *kernel.Set, t gpu.DType, rows ...kernel.Rows) []kernel.Variant {
	variants := []kernel.Variant{{Family: Hopper}, {Family: mma}, {Family: plain}}
	switch {
	case a.Scale < 0 || t.Size() != 2 || a.HeadDim%8 != 0 || a.HeadDim > 128 ||
		slices.ContainsFunc(rows, func(r kernel.Rows) bool {
			return r.Ptr%16 != 0 || r.Stride%8 != 0
		}):
		return variants[2:]
	case k.Info.Capability() != 90:
		return variants[1:]
	}

	return variants
}

// Documents writes a table of document boundaries, of [DocumentsBytes]. It can also describe a
// sliding window.
//
// Starts, [Batch, Seq], gives the first position of each token's document; query i sees the keys
// from Starts[i] to i. Starts must not decrease. A value that decreases or lies after its own token
// is replaced by the nearest valid one. Without Starts, each sequence is a single document.
//
// If Window is not 0, each query sees at most that many keys, including its own.
type Documents struct {
	Table              gpu.Ptr
	Starts             gpu.Ptr // int64, or null
	Batch, Seq, Window int
}

// DocumentsBytes returns the size of the table of documents in bytes.
func DocumentsBytes(batch, seq int) int { return 8 * batch * seq }

// Launch enqueues one kernel.
func (p Documents) Launch(q *kernel.Queue) {
	q.Run("attention", "attention_document_table_i64", kernel.Line(p.Batch, 1024),
		p.Table, p.Starts, p.Seq, min(p.Window, p.Seq))
}

// Forward computes Y and Normalizers from Q, K and V. The matrices may be columns of one larger
// matrix, so each has its own stride.
type Forward struct {
	Geometry
	Y, Q, K, V  kernel.Rows
	Normalizers gpu.Ptr
	Type        gpu.DType
	Variant     kernel.Variant
}

// Launch enqueues one kernel.
func (a Forward) Launch(q *kernel.Queue) {
	c := newCall(q, "Attention", a.Geometry, a.Type, a.Variant, a.Variants(q.Set))
	c.rows, c.normalizers = [8]kernel.Rows{a.Q, a.K, a.V, a.Y}, a.Normalizers
	c.launch(forward)
}

// Backward computes the gradients DQ, DK and DV from the gradient G of Y and from the forward
// pass's Y and Normalizers.
//
// Workspace has WorkspaceBytes bytes and is aligned to 256 bytes. HasStatistics promises that a
// [Statistics], or another kernel with the same effect, has already been launched on it; it is
// valid only for the family Hopper.
type Backward struct {
	Geometry
	DQ, DK, DV, G, Q, K, V, Y kernel.Rows
	Workspace, Normalizers    gpu.Ptr
	Type                      gpu.DType
	Variant                   kernel.Variant
	HasStatistics             bool
}

// Statistics prepares the Workspace of a [Backward] of the family Hopper. For every query and head
// it stores the exponent and correction factor that exponent.cuh derives from the normalizers, and
// Σ G·Y. It also clears the counters.
type Statistics struct {
	Geometry
	G, Y                   kernel.Rows
	Normalizers, Workspace gpu.Ptr
	Type                   gpu.DType
}

// Launch enqueues one kernel.
func (a Statistics) Launch(q *kernel.Queue) {
	c := call{Queue: q, Geometry: a.Geometry, Variant: kernel.Variant{Family: Hopper},
		dtype: a.Type, normalizers: a.Normalizers, stats: a.Workspace}
	c.rows[3], c.rows[4] = a.Y, a.G
	c.launchStatistics()
}

// StatisticsTile must match kStatsTile in attention.cuh.
const StatisticsTile = 128

// WorkspaceBytes returns the size of Workspace. It holds three statistics per query and head. The
// fused backward pass also needs a float32 copy of dq and one counter per tile of dq.
func (a Backward) WorkspaceBytes(d gpu.DeviceInfo) int {
	if a.Type.Size() == 2 && a.HeadDim <= 128 && d.Capability() == 90 {
		var c kernel.Carve
		a.fusedParts(&c)
		return int(c.At)
	}
	return a.statsBytes()
}

// statsBytes returns the size of the statistics of all queries and heads.
func (a Geometry) statsBytes() int { return 12 * a.Batch * a.Heads * a.statsRows() }

func (a Geometry) statsRows() int {
	return kernel.CeilDiv(a.Seq, StatisticsTile) * StatisticsTile
}

// Launch enqueues the kernels that compute the gradients, preceded by the statistics kernel unless
// HasStatistics is set.
func (a Backward) Launch(q *kernel.Queue) {
	c := newCall(q, "AttentionBackward", a.Geometry, a.Type, a.Variant, a.Variants(q.Set))
	c.rows = [8]kernel.Rows{a.Q, a.K, a.V, a.Y, a.G, a.DQ, a.DK, a.DV}
	c.normalizers, c.stats = a.Normalizers, a.Workspace
	turnsBack := c.Family == Hopper && c.HeadDim == c.hopperDim() // whether the kernels below undo RoPE themselves
	if !turnsBack {
		c.Cos, c.Sin = 0, 0
	}

	if !a.HasStatistics {
		c.launchStatistics()
	}

	if c.Family == Hopper {
		c.launchFused()
	} else {
		c.launch(backwardQ)
		c.launch(backwardKV)
	}

	if a.Cos != 0 && !turnsBack {
		turn := rope.Rotate{Cos: a.Cos, Sin: a.Sin, Rows: a.Batch * a.Seq, Seq: a.Seq,
			HeadDim: a.HeadDim, Inverse: true, Type: a.Type}
		for i, d := range []kernel.Rows{a.DQ, a.DK} {
			turn.Y, turn.X, turn.XStride, turn.YStride = d.Ptr, d.Ptr, d.Stride, d.Stride
			turn.Heads = []int{a.Heads, a.KVHeads}[i]
			turn.Launch(q)
		}
	}
}

// A call is a launch with its variant chosen and its scale filled in.
type call struct {
	*kernel.Queue
	Geometry
	kernel.Variant
	dtype              gpu.DType
	rows               [8]kernel.Rows // q, k, v, y, g, dq, dk, dv
	normalizers, stats gpu.Ptr
}

// newCall returns a call of the given variant, or of the fastest one if none is given. Any size is
// accepted.
func newCall(q *kernel.Queue, op string, a Geometry, t gpu.DType, w kernel.Variant,
	variants []kernel.Variant) *call {
	c := &call{Queue: q, Geometry: a, dtype: t, Variant: w}
	if w.Family == "" {
		c.Family = variants[0].Family
	} else if !slices.Contains(variants, kernel.Variant{Family: w.Family}) {
		c.Err = fmt.Errorf("kernels.%s: variant %v does not accept the arguments; use one of %v", op, w,
			variants)
	}

	if a.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}

	return c
}

// params returns attention::Params of attention.cuh, with the given number of heads per section.
func (c *call) params(section int) (p kernel.Struct) {
	for _, r := range c.rows {
		p = append(p, r.Ptr)
	}
	p = append(p, c.normalizers, c.stats)
	for _, r := range c.rows {
		p = append(p, int64(r.Stride))
	}
	return append(p, c.Batch, c.Seq, c.Heads, c.KVHeads, c.HeadDim, c.Causal, c.Scale, section)
}

func (c *call) launchStatistics() {
	l := kernel.Line(c.Batch*c.Heads*c.statsRows()/StatisticsTile, 256)
	var counters gpu.Ptr
	var n int
	if c.Family == Hopper {
		counters, n = c.Counters(c.stats)
	}
	c.Run("attention", "attention_stats"+kernel.Suffix(c.dtype), l, c.params(0), counters, n)
}

// A pass identifies a kernel of the families plain and mma.
type pass int

const (
	forward pass = iota
	backwardQ
	backwardKV
)

func (p pass) String() string { return [...]string{"forward", "backward_q", "backward_kv"}[p] }

// mmaShape mirrors a Shape of attention_mma.cu.
type mmaShape struct{ threads, own, loop int }

var mmaShapes = map[int][3]mmaShape{ // by the largest head dimension, then by pass
	64:  {{128, 128, 64}, {128, 128, 64}, {128, 128, 64}},
	128: {{128, 128, 64}, {128, 128, 32}, {256, 128, 32}},
}

// shared returns the shared memory of a block: its own tiles and two stages of the tiles in the
// loop.
func (m mmaShape) shared(p pass, dim int) int {
	own, stats := 2, 0
	switch p {
	case forward:
		own = 1
	case backwardKV:
		stats = 12 * m.loop
	}
	return 2*dim*(own*m.own+2*2*m.loop) + 2*stats
}

func (c *call) launch(p pass) {
	heads, readHeads := c.Batch*c.Heads, 1 // a block owns rows of one kind of head and loops over the other kind
	if p == backwardKV {
		heads, readHeads = c.Batch*c.KVHeads, c.Heads/c.KVHeads
	}

	if c.Family == plain {
		l := kernel.Line(heads*kernel.CeilDiv(c.Seq, 64)*kernel.CeilDiv(c.HeadDim, 128), 256)
		c.run("attention", fmt.Sprint("attention_plain_", p), l, c.params(0))
		return
	}

	if c.Family == Hopper { // forward only; the backward pass is launchFused
		c.launchHopper(heads, readHeads)
		return
	}

	dim := 64
	if c.HeadDim > 64 {
		dim = 128
	}

	m := mmaShapes[dim][p]
	l := kernel.Line(heads*kernel.CeilDiv(c.Seq, m.own), m.threads)
	l.Shared = m.shared(p, dim)
	c.run("attention_mma", fmt.Sprintf("attention_mma_%v_%d", p, dim), l,
		c.params(c.section(heads, readHeads)))
}

// run enqueues a kernel. With documents it enqueues the variant that takes their table as its last
// argument.
func (c *call) run(unit, name string, l gpu.LaunchConfig, args ...any) {
	if c.Documents != 0 {
		name, args = name+"_documents", append(args, c.Documents)
	}
	c.Run(unit, name+kernel.Suffix(c.dtype), l, args...)
}

// section returns the number of heads that are worked on together. The rows that their blocks read
// repeatedly should fit in L2 with room to spare.
func (c *call) section(heads, readHeads int) int {
	each := 2 * c.Seq * c.HeadDim * c.dtype.Size() * readHeads
	return min(max(c.Info.L2*5/8/each, 1), heads)
}

// describe formats the geometry and the strides of the matrices as a key for tuning.
func (a Geometry) describe(t gpu.DType, matrices ...kernel.Rows) string {
	s := fmt.Sprintf("%dx%d, %d of %d heads of %d, %v", a.Batch, a.Seq, a.Heads,
		a.KVHeads, a.HeadDim, t)
	s += kernel.With(a.Causal, "causal") + kernel.With(a.Cos != 0, "turned") +
		kernel.With(a.Documents != 0, "documents") +
		kernel.With(a.Scale != 0, fmt.Sprintf("scale %g", a.Scale))
	for _, m := range matrices {
		s += fmt.Sprintf(" %d", m.Stride)
	}
	return s
}

// Tuning implements [kernel.Tuned].
func (a Forward) Tuning() (op, shape string) {
	return "Attention", a.describe(a.Type, a.Y, a.Q, a.K, a.V)
}

// Tuning implements [kernel.Tuned].
func (a Backward) Tuning() (op, shape string) {
	return "AttentionBackward", a.describe(a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
}

// Variants returns the variants that accept the launch, fastest first.
func (a Forward) Variants(k *kernel.Set) []kernel.Variant {
	return a.Geometry.variants(k, a.Type, a.Y, a.Q, a.K, a.V)
}

// sections are the numbers of heads that are timed as alternatives when fewer heads than
// fusedSection fit in the cache.
var sections = []int{8, 24, 48}

// Variants returns the variants that accept the launch, fastest first.
func (a Backward) Variants(k *kernel.Set) []kernel.Variant {
	variants := a.Geometry.variants(k, a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
	c := call{Queue: &kernel.Queue{Set: k}, Geometry: a.Geometry, dtype: a.Type}
	heads := a.Batch * a.KVHeads
	if variants[0].Family != Hopper || !a.Causal ||
		c.section(heads, c.sharers()) >= min(fusedSection, heads) {
		return variants
	}

	at := 1
	for _, n := range sections {
		if n < heads {
			variants = slices.Insert(variants, at, kernel.Variant{Family: Hopper, Size: n})
			at++
		}
	}

	return variants
}

// SetVariant sets the variant chosen by tuning.
func (a *Forward) SetVariant(w kernel.Variant) { a.Variant = w }

// SetVariant sets the variant chosen by tuning.
func (a *Backward) SetVariant(w kernel.Variant) { a.Variant = w }

// WorkspaceField implements [kernel.Workspaced].
func (a *Backward) WorkspaceField() *gpu.Ptr { return &a.Workspace }
