package kernels

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// AttentionShape is the geometry of attention over rows of heads, and how to compute it.
//
//	y = softmax(Scale·q·kᵀ)·v,  lse = log Σ exp(Scale·q·kᵀ)
//
// for every sequence and query head on its own; query head h reads key-value head h/(Heads/KVHeads). q, y and their
// gradients are [Batch·Seq, Heads·HeadDim], k, v and theirs [Batch·Seq, KVHeads·HeadDim]; lse is [Batch, Heads, Seq] of
// float32.
type AttentionShape struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool    // a position sees itself and those before it
	Scale                               float64 // 0 means 1/sqrt(HeadDim)
	Variant                             AttentionVariant
	// Cos and Sin are RoPE's tables, [Seq, HeadDim/2], by which q and k have been turned; null if they have not. The backward
	// pass then gives the gradients of what they were before.
	Cos, Sin gpu.Ptr
	// Documents is the table that [Kernels.AttentionDocuments] made of where documents begin that lie one behind the other in
	// the sequences, null if there are none: a position then sees only those of its own document up to itself. It needs Causal.
	Documents gpu.Ptr
}

// AttentionVariant is an implementation of attention.
type AttentionVariant int

// The variants. AttentionAuto is the fastest that takes the arguments.
const (
	AttentionAuto        AttentionVariant = iota
	AttentionPlain                        // float32 arithmetic, any argument
	AttentionMMA                          // tensor cores: 16 bits, HeadDim 8, 16, ... 128, rows aligned to 16 bytes, Scale > 0
	AttentionHopper                       // the same on compute capability 9.0 with its own instructions
	AttentionHopperFused                  // the same, with a backward pass in one kernel at any HeadDim
	attentionVariants
)

func (v AttentionVariant) String() string {
	if v < 0 || v >= attentionVariants {
		return fmt.Sprintf("AttentionVariant(%d)", int(v))
	}
	return [...]string{"auto", "plain", "mma", "hopper", "hopper-fused"}[v]
}

// attentionParams is attention::Params of attention.cuh.
type attentionParams struct {
	q, k, v, y, g, dq, dk, dv, lse, stats                                     gpu.Ptr
	qStride, kStride, vStride, yStride, gStride, dqStride, dkStride, dvStride int64
	batch, seq, heads, kvHeads, headDim, causal                               int32
	scale                                                                     float32
	section                                                                   int32
}

func (p *attentionParams) set(to *gpu.Ptr, stride *int64, r Rows) {
	*to, *stride = r.Ptr, int64(r.Stride)
}

// AttentionDocumentsBytes is the size of the table of documents.
func AttentionDocumentsBytes(batch, seq int) int { return 8 * batch * seq }

// AttentionDocuments makes the table of documents, of [AttentionDocumentsBytes], from starts, [batch, seq]: the position at which
// the document of each token begins. Query i sees the keys from starts[i] to i. Starts must not decrease; one that does, or
// lies behind its token, counts as the nearest that is possible.
func (k *Kernels) AttentionDocuments(s gpu.Stream, table gpu.Ptr, starts Ints, batch, seq int) error {
	if empty, err := checkSizes("AttentionDocuments", batch, seq); empty || err != nil {
		return err
	}
	name := "attention_document_table_i32"
	if starts.Wide {
		name = "attention_document_table_i64"
	}
	return k.launch(s, "attention", name, line(batch, 1024), args().Ptr(table).Ptr(starts.Ptr).Int32(seq))
}

// Attention computes y and lse. Strides may be those of a matrix in which q, k and v lie side by side.
func (k *Kernels) Attention(s gpu.Stream, a AttentionShape, y Rows, lse gpu.Ptr, q, key, value Rows,
	t gpu.DType) error {
	c, err := k.attention("Attention", a, t, a.queryRows(q, y), a.keyRows(key, value))
	if c == nil || err != nil {
		return err
	}
	p := c.params
	p.set(&p.q, &p.qStride, q)
	p.set(&p.k, &p.kStride, key)
	p.set(&p.v, &p.vStride, value)
	p.set(&p.y, &p.yStride, y)
	p.lse = lse
	return c.launch(k, s, attentionForward)
}

// attentionStatsTile is kStatsTile of attention.cuh.
const attentionStatsTile = 128

// AttentionStatsBytes is the size of the workspace that AttentionBackward needs: two statistics of every query and, where one
// kernel forms all gradients, dq in float32 and a counter for every tile of it.
func (k *Kernels) AttentionStatsBytes(a AttentionShape, t gpu.DType) int {
	n := 8 * a.Batch * a.Heads * a.statsRows()
	if t.Size() == 2 && a.HeadDim <= 128 && k.info.Capability() == 90 {
		sums, bytes := a.fusedSums()
		n += sums*(bytes+4) + 4
	}
	return n
}

func (a AttentionShape) statsRows() int {
	return ceilDiv(a.Seq, attentionStatsTile) * attentionStatsTile
}

// AttentionBackward computes the gradients of q, k and v from that of y, g, and the forward pass's y and lse. stats is a
// workspace of [Kernels.AttentionStatsBytes], aligned to 256.
func (k *Kernels) AttentionBackward(s gpu.Stream, a AttentionShape, dq, dk, dv Rows, stats gpu.Ptr,
	g, q, key, value, y Rows, lse gpu.Ptr, t gpu.DType) error {
	c, err := k.attention("AttentionBackward", a, t, a.queryRows(dq, g, q, y), a.keyRows(dk, dv, key, value))
	if c == nil || err != nil {
		return err
	}
	p := c.params
	p.set(&p.q, &p.qStride, q)
	p.set(&p.k, &p.kStride, key)
	p.set(&p.v, &p.vStride, value)
	p.set(&p.y, &p.yStride, y)
	p.set(&p.g, &p.gStride, g)
	p.set(&p.dq, &p.dqStride, dq)
	p.set(&p.dk, &p.dkStride, dk)
	p.set(&p.dv, &p.dvStride, dv)
	p.lse, p.stats = lse, stats
	if !c.hopper() || c.Fused() { // otherwise the first kernel forms the statistics
		if err := c.launchStatistics(k, s); err != nil {
			return err
		}
	}
	if err := c.launchBackward(k, s); err != nil || a.Cos == 0 || c.turnsBack() {
		return err
	}
	turn := func(d Rows, heads int) error {
		return k.RoPE(s, RoPE{Y: d.Ptr, X: d.Ptr, Cos: a.Cos, Sin: a.Sin, Rows: a.Batch * a.Seq, Seq: a.Seq, Heads: heads, HeadDim: a.HeadDim,
			XStride: d.Stride, YStride: d.Stride, Inverse: true, Type: t})
	}
	if err := turn(dq, a.Heads); err != nil {
		return err
	}
	return turn(dk, a.KVHeads)
}

func (c *attentionCall) launchStatistics(k *Kernels, s gpu.Stream) error {
	l := line(c.Batch*c.Heads*c.statsRows()/attentionStatsTile, 256)
	var counters gpu.Ptr
	var n int
	if c.Fused() {
		_, counters, n = c.fusedWorkspace(c.params.stats)
	}
	return k.launch(s, "attention", "attention_stats"+c.suffix, l, args().Struct(c.params.bytes(), 8).Ptr(counters).Int32(n))
}

func (c *attentionCall) launchBackward(k *Kernels, s gpu.Stream) error {
	if c.Fused() {
		return c.launchFused(k, s)
	}
	if err := c.launch(k, s, attentionBackwardQ); err != nil {
		return err
	}
	return c.launch(k, s, attentionBackwardKV)
}

// turnsBack reports whether the variant's kernels can turn gradients back.
func (c *attentionCall) turnsBack() bool {
	return c.hopper() && c.HeadDim == c.hopperDim()
}

// operand is Rows with what they must hold.
type operand struct {
	Rows
	width int
}

func (a AttentionShape) queryRows(r ...Rows) []operand { return operands(r, a.Heads*a.HeadDim) }
func (a AttentionShape) keyRows(r ...Rows) []operand   { return operands(r, a.KVHeads*a.HeadDim) }

func operands(r []Rows, width int) []operand {
	o := make([]operand, len(r))
	for i, r := range r {
		o[i] = operand{r, width}
	}
	return o
}

// attentionCall is a checked call.
type attentionCall struct {
	AttentionShape // the variant chosen, the scale filled in
	suffix         string
	dtype          gpu.DType
	params         *attentionParams
}

// attention checks the arguments and chooses the variant. It returns nil when there is nothing to do.
func (k *Kernels) attention(op string, a AttentionShape, t gpu.DType, queries, keys []operand) (*attentionCall, error) {
	suf, err := suffix(op, t)
	if err != nil {
		return nil, err
	}
	if empty, err := checkSizes(op, a.Batch, a.Seq, a.Heads, a.KVHeads, a.HeadDim); empty || err != nil {
		return nil, err
	}
	if a.Heads%a.KVHeads != 0 {
		return nil, fmt.Errorf("kernels.%s: %d query heads, want a multiple of the %d key-value heads", op, a.Heads, a.KVHeads)
	}
	if a.Scale == 0 {
		a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}
	all := append(queries, keys...)
	for _, o := range all {
		if o.Stride < o.width {
			return nil, fmt.Errorf("kernels.%s: rows of %d elements are %d apart", op, o.width, o.Stride)
		}
	}
	if a.Documents != 0 && !a.Causal {
		return nil, fmt.Errorf("kernels.%s: documents need a causal mask", op)
	}
	tensorCores := a.Scale > 0 && t.Size() == 2 && a.HeadDim%8 == 0 && a.HeadDim <= 128
	for _, o := range all {
		tensorCores = tensorCores && o.Ptr%16 == 0 && o.Stride%8 == 0
	}
	hopper := k.info.Capability() == 90
	switch v := a.Variant; {
	case v < 0 || v >= attentionVariants:
		return nil, fmt.Errorf("kernels.%s: there is no variant %d", op, v)
	case v == AttentionAuto && !tensorCores:
		a.Variant = AttentionPlain
	case v == AttentionAuto && hopper:
		a.Variant = AttentionHopper
	case v == AttentionAuto:
		a.Variant = AttentionMMA
	case v != AttentionPlain && !tensorCores:
		return nil, fmt.Errorf("kernels.%s: the variant %v takes 16-bit types, a head dimension that is a multiple of 8 up to 128, "+
			"pointers and strides aligned to 16 bytes and a positive scale; given %v and %+v", op, v, t, a)
	case (v == AttentionHopper || v == AttentionHopperFused) && !hopper:
		return nil, fmt.Errorf("kernels.%s: the variant %v runs on compute capability 9.0, this GPU has %.1f", op, v,
			float64(k.info.Capability())/10)
	}
	p := &attentionParams{batch: int32(a.Batch), seq: int32(a.Seq), heads: int32(a.Heads), kvHeads: int32(a.KVHeads),
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

func (c *attentionCall) launch(k *Kernels, s gpu.Stream, pass attentionPass) error {
	heads, others := c.Batch*c.Heads, 1 // blocks own rows of one kind of head and read others
	if pass == attentionBackwardKV {
		heads, others = c.Batch*c.KVHeads, c.Heads/c.KVHeads
	}
	name := "_" + attentionPassNames[pass]
	if c.Variant == AttentionPlain {
		l := line(heads*ceilDiv(c.Seq, 64)*ceilDiv(c.HeadDim, 128), 256)
		return c.run(k, s, "attention", "attention_plain"+name, l, args().Struct(c.params.bytes(), 8))
	}
	if c.hopper() {
		h := hopperShapes[c.hopperDim()][pass]
		c.params.section = int32(c.evenSection(k, heads, ceilDiv(c.Seq, 64*h.workers), others, inTurns))
		return c.launchHopper(k, s, pass, c.hopperDim(), h)
	}
	dim := 64
	if c.HeadDim > 64 {
		dim = 128
	}
	m := mmaShapes[dim][pass]
	tiles := ceilDiv(c.Seq, m.own)
	c.params.section = int32(c.section(k, heads, others))
	l := line(heads*tiles, m.threads)
	l.Shared = m.shared(pass, dim)
	return c.run(k, s, "attention_mma", fmt.Sprintf("attention_mma%s_%d", name, dim), l, args().Struct(c.params.bytes(), 8))
}

// run launches a kernel or, where there are documents, the one of the same family that takes their table last.
func (c *attentionCall) run(k *Kernels, s gpu.Stream, unit, name string, l gpu.LaunchConfig, a *gpu.Args) error {
	if c.Documents != 0 {
		name += "_documents"
		a.Ptr(c.Documents)
	}
	return k.launch(s, unit, name+c.suffix, l, a)
}

// section is how many heads are worked on together. What their blocks read over and over should fit in L2 with room to spare.
func (c *attentionCall) section(k *Kernels, heads, others int) int {
	each := 2 * c.Seq * c.HeadDim * c.dtype.Size() * others
	return min(max(k.info.L2*5/8/each, 1), heads)
}

func (p *attentionParams) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// Attention computes Y and LSE of Q, K and V.
type Attention struct {
	AttentionShape
	Y, Q, K, V Rows
	LSE        gpu.Ptr
	Type       gpu.DType
	Way        Way
}

// AttentionBackward computes DQ, DK and DV. Stats is memory of WorkspaceBytes.
type AttentionBackward struct {
	AttentionShape
	DQ, DK, DV, G, Q, K, V, Y Rows
	Stats, LSE                gpu.Ptr
	Type                      gpu.DType
	Way                       Way
}

// AttentionDocuments makes the table of documents.
type AttentionDocuments struct {
	Table      gpu.Ptr
	Starts     Ints
	Batch, Seq int
}

// variantOf is the attention that a way is.
func variantOf(w Way) AttentionVariant {
	for v := range attentionVariants {
		if v.String() == w.Family {
			return v
		}
	}
	return AttentionAuto
}

// shape is that of [Tuned].
func (a Attention) shape() AttentionShape {
	a.Variant = variantOf(a.Way)
	return a.AttentionShape
}

// shape is that of [Tuned].
func (a AttentionBackward) shape() AttentionShape {
	a.Variant = variantOf(a.Way)
	return a.AttentionShape
}

// describe is the geometry, and the distances of the matrices' rows.
func (a AttentionShape) describe(t gpu.DType, matrices ...Rows) string {
	s := fmt.Sprintf("%dx%d, %d of %d heads of %d, %v", a.Batch, a.Seq, a.Heads, a.KVHeads, a.HeadDim, t)
	s += with(a.Causal, "causal") + with(a.Cos != 0, "turned") + with(a.Documents != 0, "documents") +
		with(a.Scale != 0, fmt.Sprintf("scale %g", a.Scale))
	for _, m := range matrices {
		s += fmt.Sprintf(" %d", m.Stride)
	}
	return s
}

// Shape is the geometry of heads and rows.
func (a Attention) Shape() string { return a.describe(a.Type, a.Y, a.Q, a.K, a.V) }

// Shape is the geometry of heads and rows.
func (a AttentionBackward) Shape() string {
	return a.describe(a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
}

// Units is that of [Tuned].
func (a Attention) Units() []string { return attentionUnits }

// Units is that of [Tuned].
func (a AttentionBackward) Units() []string { return attentionUnits }

var attentionUnits = []string{"attention", "attention_mma", "attention_hopper", "attention_hopper_backward",
	"attention_hopper_fused", "attention_hopper_fused64"}

// Computes is that of [Tuned].
func (a Attention) Computes() bool { return true }

// Computes is that of [Tuned].
func (a AttentionBackward) Computes() bool { return true }

// WorkspaceBytes is the size of Stats.
func (a AttentionBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).AttentionStatsBytes(a.AttentionShape, a.Type)
}

// AttentionVariants lists the variants that take the arguments, of which rows are all matrices, the fastest first.
func (k *Kernels) AttentionVariants(a AttentionShape, t gpu.DType, rows ...Rows) []AttentionVariant {
	variants := []AttentionVariant{AttentionPlain}
	if !a.tensorCores(t, rows) {
		return variants
	}
	variants = []AttentionVariant{AttentionMMA, AttentionPlain}
	if k.info.Capability() == 90 {
		variants = []AttentionVariant{AttentionHopper, AttentionMMA, AttentionPlain}
		if a.HeadDim <= 64 { // above, AttentionHopper is the same
			variants = slices.Insert(variants, 1, AttentionHopperFused)
		}
	}
	return variants
}

// tensorCores reports whether the variants that use these take the arguments.
func (a AttentionShape) tensorCores(t gpu.DType, rows []Rows) bool {
	return a.Scale >= 0 && t.Size() == 2 && a.HeadDim%8 == 0 && a.HeadDim <= 128 &&
		!slices.ContainsFunc(rows, func(r Rows) bool { return r.Ptr%16 != 0 || r.Stride%8 != 0 })
}

// Launch enqueues the forward pass.
func (a Attention) Launch(k *Kernels, s gpu.Stream) error {
	return k.Attention(s, a.shape(), a.Y, a.LSE, a.Q, a.K, a.V, a.Type)
}

// Launch enqueues the backward pass.
func (a AttentionBackward) Launch(k *Kernels, s gpu.Stream) error {
	return k.AttentionBackward(s, a.shape(), a.DQ, a.DK, a.DV, a.Stats, a.G, a.Q, a.K, a.V, a.Y, a.LSE, a.Type)
}

// Ways lists the ways that take the launch.
func (a Attention) Ways(k *Kernels) (ways []Way) {
	for _, v := range k.AttentionVariants(a.shape(), a.Type, a.Y, a.Q, a.K, a.V) {
		if v != AttentionHopperFused { // whose forward pass is AttentionHopper's
			ways = append(ways, Way{Family: v.String()})
		}
	}
	return ways
}

// Ways lists the ways that take the launch.
func (a AttentionBackward) Ways(k *Kernels) (ways []Way) {
	for _, v := range k.AttentionVariants(a.shape(), a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y) {
		ways = append(ways, Way{Family: v.String()})
	}
	return ways
}
