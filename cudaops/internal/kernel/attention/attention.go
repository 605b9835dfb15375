package attention

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
)

// Geometry is the geometry of attention over rows of heads, and how to compute it.
//
//	y = softmax(Scale·q·kᵀ)·v,  lse = log Σ exp(Scale·q·kᵀ)
//
// for every sequence and query head on its own. Query head h reads key-value head
// h/(Heads/KVHeads). Queries, y and their gradients are [Batch·Seq, Heads·HeadDim], k, v and theirs
// [Batch·Seq, KVHeads·HeadDim]. The log-sum-exp lse is [Batch, Heads, Seq] of float32.
type Geometry struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool    // a position sees itself and those before it
	Scale                               float64 // 0 means 1/sqrt(HeadDim)
	Variant                             Variant
	Section                             int // heads that are worked on together; 0 leaves it to a rule
	// Cos and Sin are RoPE's tables, [Seq, HeadDim/2], by which q and k have been turned; null if
	// they have not. The backward pass then gives the gradients of what they were before.
	Cos, Sin gpu.Ptr
	// Documents is the table that [AttentionDocuments] made of where documents begin that lie one
	// behind the other in the sequences, null if there are none. A position then sees only those of
	// its own document up to itself. It needs Causal. A window is such a table too.
	Documents gpu.Ptr
}

// Variant is an implementation of attention.
type Variant int

// The variants. Auto is the fastest that takes the arguments.
const (
	Auto  Variant = iota
	Plain         // float32 arithmetic, any argument
	// tensor cores: 16 bits, HeadDim 8, 16, ... 128, rows aligned to 16 bytes, Scale > 0
	MMA
	Hopper // the same on compute capability 9.0 with its own instructions
	attentionVariants
)

func (v Variant) String() string {
	if v < 0 || v >= attentionVariants {
		return fmt.Sprintf("AttentionVariant(%d)", int(v))
	}
	return [...]string{"auto", "plain", "mma", "hopper"}[v]
}

// attentionParams is attention::Params of attention.cuh.
type attentionParams struct {
	q, k, v, y, g, dq, dk, dv, lse, stats                                     gpu.Ptr
	qStride, kStride, vStride, yStride, gStride, dqStride, dkStride, dvStride int64
	batch, seq, heads, kvHeads, headDim, causal                               int32
	scale                                                                     float32
	section                                                                   int32
}

func (p *attentionParams) set(to *gpu.Ptr, stride *int64, r kernel.Rows) {
	*to, *stride = r.Ptr, int64(r.Stride)
}

// DocumentsBytes is the size of the table of documents.
func DocumentsBytes(batch, seq int) int { return 8 * batch * seq }

// Launch makes the table of documents, of [DocumentsBytes], from starts, [batch, seq]: the position
// at which the document of each token begins. Query i sees the keys from starts[i] to i. Starts
// must not decrease; one that does, or lies behind its token, counts as the nearest that is
// possible. Without starts a sequence is one document. A window hides all but so many keys, the
// query's own included, from each query; 0 hides none.
func (p Documents) Launch(k *kernel.Set, s gpu.Stream) error {
	if empty, err := kernel.CheckSizes("AttentionDocuments", p.Batch, p.Seq); empty || err != nil {
		return err
	}
	if p.Window < 0 || p.Starts.Ptr == 0 && p.Window == 0 {
		return fmt.Errorf("kernels.AttentionDocuments: a window of %d and starts at %#x, want "+
			"one of them", p.Window, p.Starts.Ptr)
	}
	name := "attention_document_table_i32"
	if p.Starts.Wide {
		name = "attention_document_table_i64"
	}
	return k.Enqueue(s, "attention", name, kernel.Line(p.Batch, 1024),
		kernel.Args().Ptr(p.Table).Ptr(p.Starts.Ptr).Int32(p.Seq).Int32(min(p.Window, p.Seq)))
}

// Launch enqueues the forward pass. Strides may be those of a matrix in which Q, K and V lie side
// by side.
func (a Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	g := a.by(a.Way)
	c, err := attention(k, "Attention", g, a.Type, g.queryRows(a.Q, a.Y), g.keyRows(a.K, a.V))
	if c == nil || err != nil {
		return err
	}
	c.params.setForward(a.Q, a.K, a.V, a.Y)
	c.params.lse = a.LSE
	return c.launch(k, s, attentionForward)
}

// setForward sets what both passes read or write.
func (p *attentionParams) setForward(q, key, value, y kernel.Rows) {
	p.set(&p.q, &p.qStride, q)
	p.set(&p.k, &p.kStride, key)
	p.set(&p.v, &p.vStride, value)
	p.set(&p.y, &p.yStride, y)
}

// attentionStatsTile is kStatsTile of attention.cuh.
const attentionStatsTile = 128

// WorkspaceBytes is the size of Stats: two statistics of every query. Where one kernel forms all
// gradients it also has dq in float32 and a counter for every tile of it.
func (a Backward) WorkspaceBytes(d gpu.DeviceInfo) int {
	n := 8 * a.Batch * a.Heads * a.statsRows()
	if a.Type.Size() == 2 && a.HeadDim <= 128 && d.Capability() == 90 {
		sums, bytes := a.fusedSums()
		n += sums*(bytes+4) + 4
	}
	return n
}

func (a Geometry) statsRows() int {
	return kernel.CeilDiv(a.Seq, attentionStatsTile) * attentionStatsTile
}

// Launch enqueues the backward pass: the gradients of Q, K and V from that of Y, G, and the forward
// pass's Y and LSE. Stats is aligned to 256.
func (a Backward) Launch(k *kernel.Set, s gpu.Stream) error {
	geo := a.by(a.Way)
	c, err := attention(k, "AttentionBackward", geo, a.Type, geo.queryRows(a.DQ, a.G, a.Q, a.Y),
		geo.keyRows(a.DK, a.DV, a.K, a.V))
	if c == nil || err != nil {
		return err
	}
	p := c.params
	p.setForward(a.Q, a.K, a.V, a.Y)
	p.set(&p.g, &p.gStride, a.G)
	p.set(&p.dq, &p.dqStride, a.DQ)
	p.set(&p.dk, &p.dkStride, a.DK)
	p.set(&p.dv, &p.dvStride, a.DV)
	p.lse, p.stats = a.LSE, a.Stats
	if err := c.launchStatistics(k, s); err != nil {
		return err
	}
	if err := c.launchBackward(k, s); err != nil || a.Cos == 0 || c.turnsBack() {
		return err
	}
	turn := func(d kernel.Rows, heads int) error {
		return rope.Rotate{Y: d.Ptr, X: d.Ptr, Cos: a.Cos, Sin: a.Sin, Rows: a.Batch * a.Seq,
			Seq: a.Seq, Heads: heads, HeadDim: a.HeadDim,
			XStride: d.Stride, YStride: d.Stride, Inverse: true, Type: a.Type}.Launch(k, s)
	}
	if err := turn(a.DQ, a.Heads); err != nil {
		return err
	}
	return turn(a.DK, a.KVHeads)
}

func (c *attentionCall) launchStatistics(k *kernel.Set, s gpu.Stream) error {
	l := kernel.Line(c.Batch*c.Heads*c.statsRows()/attentionStatsTile, 256)
	var counters gpu.Ptr
	var n int
	if c.Variant == Hopper {
		_, counters, n = c.fusedWorkspace(c.params.stats)
	}
	return k.Enqueue(s, "attention", "attention_stats"+c.suffix, l,
		kernel.Args().Struct(c.params.bytes(), 8).Ptr(counters).Int32(n))
}

func (c *attentionCall) launchBackward(k *kernel.Set, s gpu.Stream) error {
	if c.Variant == Hopper {
		return c.launchFused(k, s)
	}
	if err := c.launch(k, s, attentionBackwardQ); err != nil {
		return err
	}
	return c.launch(k, s, attentionBackwardKV)
}

// turnsBack reports whether the variant's kernels can turn gradients back.
func (c *attentionCall) turnsBack() bool {
	return c.Variant == Hopper && c.HeadDim == c.hopperDim()
}

// operand is Rows with what they must hold.
type operand struct {
	kernel.Rows
	width int
}

func (a Geometry) queryRows(r ...kernel.Rows) []operand { return operands(r, a.Heads*a.HeadDim) }
func (a Geometry) keyRows(r ...kernel.Rows) []operand   { return operands(r, a.KVHeads*a.HeadDim) }

func operands(r []kernel.Rows, width int) []operand {
	o := make([]operand, len(r))
	for i, r := range r {
		o[i] = operand{r, width}
	}
	return o
}

// attentionCall is a checked call.
type attentionCall struct {
	Geometry // the variant chosen, the scale filled in
	suffix   string
	dtype    gpu.DType
	params   *attentionParams
}

// attention checks the arguments and chooses the variant. It returns nil when there is nothing to
// do.
func attention(k *kernel.Set, op string, a Geometry, t gpu.DType, queries,
	keys []operand) (*attentionCall, error) {
	suf, err := kernel.Suffix(op, t)
	if err != nil {
		return nil, err
	}
	if empty, err := kernel.CheckSizes(op, a.Batch, a.Seq, a.Heads, a.KVHeads, a.HeadDim); empty ||
		err != nil {
		return nil, err
	}
	if a.Heads%a.KVHeads != 0 {
		return nil,
			fmt.Errorf("kernels.%s: %d query heads, want a multiple of the %d key-value heads",
				op, a.Heads, a.KVHeads)
	}
	if a.Scale == 0 {
		a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}
	all := append(queries, keys...)
	for _, o := range all {
		if o.Stride < o.width {
			return nil, fmt.Errorf("kernels.%s: rows of %d elements are %d apart",
				op, o.width, o.Stride)
		}
	}
	if a.Documents != 0 && !a.Causal {
		return nil, fmt.Errorf("kernels.%s: documents need a causal mask", op)
	}
	tensorCores := a.Scale > 0 && t.Size() == 2 && a.HeadDim%8 == 0 && a.HeadDim <= 128
	for _, o := range all {
		tensorCores = tensorCores && o.Ptr%16 == 0 && o.Stride%8 == 0
	}
	hopper := k.Info.Capability() == 90
	switch v := a.Variant; {
	case v < 0 || v >= attentionVariants:
		return nil, fmt.Errorf("kernels.%s: there is no variant %d", op, v)
	case v == Auto && !tensorCores:
		a.Variant = Plain
	case v == Auto && hopper:
		a.Variant = Hopper
	case v == Auto:
		a.Variant = MMA
	case v != Plain && !tensorCores:
		return nil,
			fmt.Errorf("kernels.%s: the variant %v takes 16-bit types, a head dimension that is "+
				"a multiple of 8 up to 128, pointers and strides aligned to 16 bytes and a "+
				"positive scale; given %v and %+v",
				op, v, t, a)
	case v == Hopper && !hopper:
		return nil,
			fmt.Errorf("kernels.%s: the variant %v runs on compute capability 9.0, this GPU has "+
				"%.1f", op, v,
				float64(k.Info.Capability())/10)
	}
	p := &attentionParams{batch: int32(a.Batch), seq: int32(a.Seq), heads: int32(a.Heads),
		kvHeads: int32(a.KVHeads),
		headDim: int32(a.HeadDim), scale: float32(a.Scale)}
	if a.Causal {
		p.causal = 1
	}
	return &attentionCall{a, suf, t, p}, nil
}

// attentionPass is one of attention's kernels.
type attentionPass int

const (
	attentionForward attentionPass = iota
	attentionBackwardQ
	attentionBackwardKV
)

var attentionPassNames = [...]string{"forward", "backward_q", "backward_kv"}

// mmaShape is a Shape of attention_mma.cu.
type mmaShape struct{ threads, own, loop int }

var mmaShapes = map[int][3]mmaShape{ // by the head dimension that they are made for, then by pass
	64:  {{128, 128, 64}, {128, 128, 64}, {128, 128, 64}},
	128: {{128, 128, 64}, {128, 128, 32}, {256, 128, 32}},
}

// shared is the shared memory of a block: its own tiles and two stages of those that it walks over.
func (m mmaShape) shared(pass attentionPass, dim int) int {
	own, stats := 2, 0
	switch pass {
	case attentionForward:
		own = 1
	case attentionBackwardKV:
		stats = 8 * m.loop
	}
	return 2*dim*(own*m.own+2*2*m.loop) + 2*stats
}

func (c *attentionCall) launch(k *kernel.Set, s gpu.Stream, pass attentionPass) error {
	heads, others := c.Batch*c.Heads, 1 // blocks own rows of one kind of head and read others
	if pass == attentionBackwardKV {
		heads, others = c.Batch*c.KVHeads, c.Heads/c.KVHeads
	}
	name := "_" + attentionPassNames[pass]
	if c.Variant == Plain {
		l := kernel.Line(heads*kernel.CeilDiv(c.Seq, 64)*kernel.CeilDiv(c.HeadDim, 128), 256)
		return c.run(k, s, "attention", "attention_plain"+name, l,
			kernel.Args().Struct(c.params.bytes(), 8))
	}
	if c.Variant == Hopper { // whose backward pass is another
		return c.launchHopper(k, s, heads, others)
	}
	dim := 64
	if c.HeadDim > 64 {
		dim = 128
	}
	m := mmaShapes[dim][pass]
	tiles := kernel.CeilDiv(c.Seq, m.own)
	c.params.section = int32(c.section(k, heads, others))
	l := kernel.Line(heads*tiles, m.threads)
	l.Shared = m.shared(pass, dim)
	return c.run(k, s, "attention_mma", fmt.Sprintf("attention_mma%s_%d", name, dim), l,
		kernel.Args().Struct(c.params.bytes(), 8))
}

// run launches a kernel or, where there are documents, the one of the same family that takes their
// table last.
func (c *attentionCall) run(k *kernel.Set, s gpu.Stream, unit, name string,
	l gpu.LaunchConfig, a *gpu.Args) error {
	if c.Documents != 0 {
		name += "_documents"
		a.Ptr(c.Documents)
	}
	return k.Enqueue(s, unit, name+c.suffix, l, a)
}

// section is how many heads are worked on together. What their blocks read over and over should fit
// in L2 with room to spare.
func (c *attentionCall) section(k *kernel.Set, heads, others int) int {
	each := 2 * c.Seq * c.HeadDim * c.dtype.Size() * others
	return min(max(k.Info.L2*5/8/each, 1), heads)
}

func (p *attentionParams) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// Forward computes Y and LSE of Q, K and V.
type Forward struct {
	Geometry
	Y, Q, K, V kernel.Rows
	LSE        gpu.Ptr
	Type       gpu.DType
	Way        kernel.Way
}

// Backward computes DQ, DK and DV. Stats is memory of WorkspaceBytes.
type Backward struct {
	Geometry
	DQ, DK, DV, G, Q, K, V, Y kernel.Rows
	Stats, LSE                gpu.Ptr
	Type                      gpu.DType
	Way                       kernel.Way
}

// Documents makes the table of documents.
type Documents struct {
	Table              gpu.Ptr
	Starts             kernel.Ints // its address is null for none
	Batch, Seq, Window int
}

// variantOf is the attention that a way is.
func variantOf(w kernel.Way) Variant {
	for v := range attentionVariants {
		if v.String() == w.Family {
			return v
		}
	}
	return Auto
}

// by is the attention computed in a way, whose size is a section; no way leaves it as it is.
func (a Geometry) by(w kernel.Way) Geometry {
	if w != (kernel.Way{}) {
		a.Variant, a.Section = variantOf(w), w.Size
	}
	return a
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

// Shape is the geometry of heads and rows.
func (a Forward) Shape() string { return a.describe(a.Type, a.Y, a.Q, a.K, a.V) }

// Shape is the geometry of heads and rows.
func (a Backward) Shape() string {
	return a.describe(a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
}

// Tuning is that of [kernel.Tuned].
func (a Forward) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "Attention", Units: attentionUnits, Computes: true}
}

// Tuning is that of [kernel.Tuned].
func (a Backward) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "AttentionBackward", Units: attentionUnits, Computes: true}
}

var attentionUnits = []string{"attention", "attention_mma", "attention_hopper",
	"attention_hopper_fused", "attention_hopper_fused64"}

// Variants lists the variants that take the arguments, of which rows are all matrices, the fastest
// first.
func Variants(k *kernel.Set, a Geometry, t gpu.DType, rows ...kernel.Rows) []Variant {
	variants := []Variant{Plain}
	if !a.tensorCores(t, rows) {
		return variants
	}
	variants = []Variant{MMA, Plain}
	if k.Info.Capability() == 90 {
		variants = []Variant{Hopper, MMA, Plain}
	}
	return variants
}

// tensorCores reports whether the variants that use these take the arguments.
func (a Geometry) tensorCores(t gpu.DType, rows []kernel.Rows) bool {
	return a.Scale >= 0 && t.Size() == 2 && a.HeadDim%8 == 0 && a.HeadDim <= 128 &&
		!slices.ContainsFunc(rows, func(r kernel.Rows) bool {
			return r.Ptr%16 != 0 || r.Stride%8 != 0
		})
}

// Ways lists the ways that take the launch.
func (a Forward) Ways(k *kernel.Set) (ways []kernel.Way) {
	for _, v := range Variants(k, a.Geometry, a.Type, a.Y, a.Q, a.K, a.V) {
		ways = append(ways, kernel.Way{Family: v.String()})
	}
	return ways
}

// sections are those that are timed beside the rule's, where the cache alone would hold fewer heads
// than fusedSection.
var sections = []int{8, 24, 48}

// bySection adds the same way with other sections.
func (a Backward) bySection(k *kernel.Set, w kernel.Way) (ways []kernel.Way) {
	ways = []kernel.Way{w}
	c := attentionCall{Geometry: a.by(w), dtype: a.Type}
	if !a.Causal || c.Variant != Hopper {
		return ways
	}
	heads := a.Batch * a.KVHeads
	if c.section(k, heads, c.sharers()) >= min(fusedSection, heads) {
		return ways
	}
	for _, n := range sections {
		if n < heads {
			ways = append(ways, kernel.Way{Family: w.Family, Size: n})
		}
	}
	return ways
}

// Ways lists the ways that take the launch.
func (a Backward) Ways(k *kernel.Set) (ways []kernel.Way) {
	for _, v := range Variants(k, a.Geometry, a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y) {
		ways = append(ways, a.bySection(k, kernel.Way{Family: v.String()})...)
	}
	return ways
}
