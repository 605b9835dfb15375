package attention

import (
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
)

// Geometry is the geometry of attention over rows of heads.
//
//	s = Scale·q·kᵀ,  m = max s,  l = Σ exp(s − m),  y = exp(s − m)/l·v
//
// for every sequence and query head on its own. Query head h reads key-value head
// h/(Heads/KVHeads). Queries, y and their gradients are [Batch·Seq, Heads·HeadDim], k, v and theirs
// [Batch·Seq, KVHeads·HeadDim]. The normalizers, m and log l of every query and head, are [Batch,
// Heads, Seq, 2] of float32.
type Geometry struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool    // a position sees itself and those before it
	Scale                               float64 // 0 means 1/sqrt(HeadDim)
	// Cos and Sin are RoPE's tables, [Seq, HeadDim/2], by which q and k have been turned; null if
	// they have not. The backward pass then gives the gradients of what they were before.
	Cos, Sin gpu.Ptr
	// Documents is the table that a launch of [Documents] made of where documents begin that lie
	// one behind the other in the sequences, null if there are none. A position then sees only
	// those of its own document up to itself. It needs Causal. A window is such a table too.
	Documents gpu.Ptr
}

// The families of kernels. A variant's size is how many heads are worked on together; 0 leaves that to
// a rule.
const (
	plain = "plain" // float32 arithmetic, any argument
	// tensor cores: 16 bits, HeadDim 8, 16, ... 128, rows aligned to 16 bytes, Scale > 0
	mma    = "mma"
	Hopper = "hopper" // the same on compute capability 9.0 with its own instructions
)

// variants lists the variants that take the arguments, of which rows are all matrices, the fastest first.
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

// Documents makes the table of documents, of [DocumentsBytes], from starts, [Batch, Seq]: the
// position at which the document of each token begins. Query i sees the keys from starts[i] to i.
// Starts must not decrease; one that does, or lies behind its token, counts as the nearest that is
// possible. Without starts a sequence is one document. A window hides all but so many keys, the
// query's own included, from each query; 0 hides none.
type Documents struct {
	Table              gpu.Ptr
	Starts             gpu.Ptr // of int64, null for none
	Batch, Seq, Window int
}

// DocumentsBytes is the size of the table of documents.
func DocumentsBytes(batch, seq int) int { return 8 * batch * seq }

// Launch launches one kernel.
func (p Documents) Launch(q *kernel.Queue) {
	q.Run("attention", "attention_document_table_i64", kernel.Line(p.Batch, 1024),
		p.Table, p.Starts, p.Seq, min(p.Window, p.Seq))
}

// Forward computes Y and Normalizers of Q, K and V. Strides may be those of a matrix in which Q, K and V
// lie side by side.
type Forward struct {
	Geometry
	Y, Q, K, V  kernel.Rows
	Normalizers gpu.Ptr
	Type        gpu.DType
	Variant     kernel.Variant
}

// Launch launches one kernel.
func (a Forward) Launch(q *kernel.Queue) {
	c := begin(q, "Attention", a.Geometry, a.Type, a.Variant, a.Variants(q.Set))
	c.rows, c.normalizers = [8]kernel.Rows{a.Q, a.K, a.V, a.Y}, a.Normalizers
	c.launch(forward)
}

// Backward computes the gradients DQ, DK and DV from that of Y, G, and the forward pass's Y and
// Normalizers. Workspace is memory of WorkspaceBytes, aligned to 256. With HasStatistics a [Statistics] has
// been launched on it, or what does the same: that is for the family hopper alone.
type Backward struct {
	Geometry
	DQ, DK, DV, G, Q, K, V, Y kernel.Rows
	Workspace, Normalizers    gpu.Ptr
	Type                      gpu.DType
	Variant                   kernel.Variant
	HasStatistics             bool
}

// Statistics leaves in the Workspace of a [Backward] of the family hopper what that begins with: for
// every query and head, what exponent.cuh makes of the normalizers, and Σ G·Y. It also sets the
// counters to zero.
type Statistics struct {
	Geometry
	G, Y                   kernel.Rows
	Normalizers, Workspace gpu.Ptr
	Type                   gpu.DType
}

// Launch launches one kernel.
func (a Statistics) Launch(q *kernel.Queue) {
	c := call{Queue: q, Geometry: a.Geometry, Variant: kernel.Variant{Family: Hopper},
		dtype: a.Type, normalizers: a.Normalizers, stats: a.Workspace}
	c.rows[3], c.rows[4] = a.Y, a.G
	c.launchStatistics()
}

// StatisticsTile is kStatsTile of attention.cuh.
const StatisticsTile = 128

// WorkspaceBytes is the size of Workspace: three statistics of every query. Where one kernel forms all
// gradients it also has dq in float32 and a counter for every tile of it.
func (a Backward) WorkspaceBytes(d gpu.DeviceInfo) int {
	if a.Type.Size() == 2 && a.HeadDim <= 128 && d.Capability() == 90 {
		var c kernel.Carve
		a.fusedParts(&c)
		return int(c.At)
	}
	return a.statsBytes()
}

// statsBytes is the size of the statistics of all queries and heads.
func (a Geometry) statsBytes() int { return 12 * a.Batch * a.Heads * a.statsRows() }

func (a Geometry) statsRows() int {
	return kernel.CeilDiv(a.Seq, StatisticsTile) * StatisticsTile
}

// Launch launches the statistics' kernel, unless HasStatistics, and those of the gradients.
func (a Backward) Launch(q *kernel.Queue) {
	c := begin(q, "AttentionBackward", a.Geometry, a.Type, a.Variant, a.Variants(q.Set))
	c.rows = [8]kernel.Rows{a.Q, a.K, a.V, a.Y, a.G, a.DQ, a.DK, a.DV}
	c.normalizers, c.stats = a.Normalizers, a.Workspace
	turnsBack := c.Family == Hopper && c.HeadDim == c.hopperDim() // in its own kernels
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

// call is a launch whose variant is chosen and whose scale is filled in.
type call struct {
	*kernel.Queue
	Geometry
	kernel.Variant
	dtype              gpu.DType
	rows               [8]kernel.Rows // q, k, v and y, the gradient of y, and those of q, k and v
	normalizers, stats gpu.Ptr
}

// begin chooses the variant: the given one, of which the size may be any, or the fastest.
func begin(q *kernel.Queue, op string, a Geometry, t gpu.DType, w kernel.Variant,
	variants []kernel.Variant) *call {
	c := &call{Queue: q, Geometry: a, dtype: t, Variant: w}
	if w.Family == "" {
		c.Family = variants[0].Family
	} else if !slices.Contains(variants, kernel.Variant{Family: w.Family}) {
		c.Err = fmt.Errorf("kernels.%s: the variant %v does not take the arguments, which %v do", op, w,
			variants)
	}

	if a.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}

	return c
}

// params is attention::Params of attention.cuh, for sections of so many heads.
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

// pass is one of attention's kernels.
type pass int

const (
	forward pass = iota
	backwardQ
	backwardKV
)

func (p pass) String() string { return [...]string{"forward", "backward_q", "backward_kv"}[p] }

// mmaShape is a Shape of attention_mma.cu.
type mmaShape struct{ threads, own, loop int }

var mmaShapes = map[int][3]mmaShape{ // by the head dimension that they are made for, then by pass
	64:  {{128, 128, 64}, {128, 128, 64}, {128, 128, 64}},
	128: {{128, 128, 64}, {128, 128, 32}, {256, 128, 32}},
}

// shared is the shared memory of a block: its own tiles and two stages of those that it walks over.
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
	heads, others := c.Batch*c.Heads, 1 // blocks own rows of one kind of head and read others
	if p == backwardKV {
		heads, others = c.Batch*c.KVHeads, c.Heads/c.KVHeads
	}

	if c.Family == plain {
		l := kernel.Line(heads*kernel.CeilDiv(c.Seq, 64)*kernel.CeilDiv(c.HeadDim, 128), 256)
		c.run("attention", fmt.Sprint("attention_plain_", p), l, c.params(0))
		return
	}

	if c.Family == Hopper { // whose backward pass is another
		c.launchHopper(heads, others)
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
		c.params(c.section(heads, others)))
}

// run launches a kernel or, where there are documents, the one of the same family that takes their
// table last.
func (c *call) run(unit, name string, l gpu.LaunchConfig, args ...any) {
	if c.Documents != 0 {
		name, args = name+"_documents", append(args, c.Documents)
	}
	c.Run(unit, name+kernel.Suffix(c.dtype), l, args...)
}

// section is how many heads are worked on together. What their blocks read over and over should fit
// in L2 with room to spare.
func (c *call) section(heads, others int) int {
	each := 2 * c.Seq * c.HeadDim * c.dtype.Size() * others
	return min(max(c.Info.L2*5/8/each, 1), heads)
}

// describe is the geometry, and the distances of the matrices' rows.
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

// Tuning is that of [kernel.Tuned].
func (a Forward) Tuning() (op, shape string) {
	return "Attention", a.describe(a.Type, a.Y, a.Q, a.K, a.V)
}

// Tuning is that of [kernel.Tuned].
func (a Backward) Tuning() (op, shape string) {
	return "AttentionBackward", a.describe(a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
}

// Variants lists the variants that take the launch.
func (a Forward) Variants(k *kernel.Set) []kernel.Variant {
	return a.Geometry.variants(k, a.Type, a.Y, a.Q, a.K, a.V)
}

// sections are those that are timed beside the rule's, where the cache alone would hold fewer heads
// than fusedSection.
var sections = []int{8, 24, 48}

// Variants lists the variants that take the launch.
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

// SetWay implements [kernel.Tuned].
func (a *Forward) SetVariant(w kernel.Variant) { a.Variant = w }

// SetWay implements [kernel.Tuned].
func (a *Backward) SetVariant(w kernel.Variant) { a.Variant = w }

// WorkspaceField implements [kernel.Workspaced].
func (a *Backward) WorkspaceField() *gpu.Ptr { return &a.Workspace }
