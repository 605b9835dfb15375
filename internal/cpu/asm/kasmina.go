package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// The kernels for strips of a Kasmina layer work on a few rows of up to stripColumns columns, one vector
// of columns at a time. Per-column data stays in registers while the kernel iterates over the rows. In
// memory it is stored in structs of arrays, with one element per column, at these offsets; see package
// strip.
const (
	stripColumns = 256
	packStride   = stripColumns + 16
	array        = 4 * stripColumns
	figureSquare = 2 * array // the float64 sums are at offset 0
	figureAnchor = 4 * array
	figureLow    = 5 * array
	figureHigh   = 6 * array
	figureDead   = 7 * array

	ruleOn       = 0 * array
	ruleOff      = 1 * array
	ruleGate     = 2 * array
	ruleAdd      = 3 * array
	ruleNear     = 4 * array
	ruleFar      = 5 * array
	ruleHasNear  = 6 * array
	ruleHasFar   = 7 * array
	ruleAbove    = 8 * array
	ruleLeftNear = 9 * array
	ruleLeftFar  = 10 * array
	ruleForm     = 11 * array

	sumAll  = 0 * array
	sumHere = 1 * array
	sumNear = 2 * array
	sumFar  = 3 * array

	normSum    = 8 * stripColumns / 4 // the anchors are at offset 0
	normSquare = normSum + 16*stripColumns
)

const (
	magnitude    = 0x7fffffff // all bits except the sign
	notLessEqual = 6          // comparison that also holds for NaN
)

// strip emits body for every row of every vector of columns, with start before the first row of a vector
// and end after the last.
//
// R9 contains the number of rows, R8 the number of columns, and R10 the stride of the matrix in elements.
// R11 is the offset of the current row in packs, and R12 its offset in the matrix. arrays advance by a
// vector of float32 per vector of columns, and doubles by the corresponding vectors of float64.
//
// If some columns use neighbors, start returns one mask or vector per neighbor that selects these
// columns. Most vectors of columns use none and skip the loads, which would cross cache lines.
func (v isa) strip(arrays []GPPhysical, doubles []GPPhysical, start func() (users []Register),
	body func(masked, neighbours bool), end func()) {
	lanes := uint64(v.bytes / 4)
	rows := func(label string, masked, neighbours bool) {
		Label(label)
		body(masked, neighbours)
		ADDQ(U32(4*packStride), R11)
		ADDQ(R10, R12)
		DECQ(RCX)
		JNZ(LabelRef(label))
	}

	vector := func(label string, masked bool) {
		users := start()
		XORQ(R11, R11)
		XORQ(R12, R12)
		MOVQ(R9, RCX)
		if users == nil {
			rows(label, masked, false)
		} else {
			v.testAny(users)
			JZ(LabelRef(label + "Alone"))
			rows(label, masked, true)
			JMP(LabelRef(label + "End"))
			rows(label+"Alone", masked, false)
			Label(label + "End")
		}
		end()
	}

	SHLQ(Imm(2), R10)
	SUBQ(Imm(lanes), R8)
	JLT(LabelRef("tail"))
	Label("columns")
	vector("row", false)
	for _, p := range arrays {
		ADDQ(Imm(uint64(v.bytes)), p)
	}

	for _, p := range doubles {
		ADDQ(Imm(uint64(2*v.bytes)), p)
	}

	SUBQ(Imm(lanes), R8)
	JGE(LabelRef("columns"))
	Label("tail")
	ADDQ(Imm(lanes), R8)
	JZ(LabelRef("done"))
	v.setMask(R8)
	vector("tailRow", true)
	Label("done")
}

// loadSize loads the arguments common to all strip kernels.
func loadSize() {
	Load(Param("rows"), R9)
	Load(Param("columns"), R8)
}

// packed returns the current vector of the current row in a pack, and inMatrix the same in a matrix.
func packed(pack Register) Mem   { return Mem{Base: pack, Index: R11, Scale: 1} }
func inMatrix(base Register) Mem { return Mem{Base: base, Index: R12, Scale: 1} }

// magnitudes sets dst = |x|.
func (v isa) magnitudes(x, dst VecPhysical) {
	if v.bytes == 64 {
		VPANDD(constant("magnitude", magnitude), x, dst)
		return
	}
	VANDPS(constant("magnitude", magnitude), x, dst)
}

// figures generates a kernel that sums, in float64, the deviations of a column's elements from its anchor
// and their squares. It also finds the minimum and maximum of each column and, if dead is set, counts the
// elements with |x| < eps. It copies x to a pack, and prefetches the data 8 rows ahead into the
// second-level cache.
func figures(v isa, name string, dead bool) {
	signature := "func(f, pack, x *float32, rows, stride, columns int)"
	if dead {
		signature = "func(f, pack, x *float32, rows, stride, columns int, eps float32)"
	}

	TEXT(name+v.name, attr.NOSPLIT, signature)
	pack, px, ahead := RBX, RSI, R13
	m := newMeasure(v, dead)
	Load(Param("f"), m.f)
	MOVQ(m.f, m.wide)
	Load(Param("pack"), pack)
	Load(Param("x"), px)
	Load(Param("stride"), R10)
	loadSize()
	MOVQ(R10, ahead)
	SHLQ(Imm(5), ahead)
	ADDQ(px, ahead)
	if dead {
		VBROADCASTSS(parameter("eps"), m.eps)
	}

	v.strip([]GPPhysical{RDI, pack, px, ahead}, []GPPhysical{RDX}, m.load, func(masked, _ bool) {
		PREFETCHT1(inMatrix(ahead))
		v.load(inMatrix(px), m.x, masked)
		v.store(m.x, packed(pack), masked)
		m.add(inMatrix(px), masked)
	}, m.store)

	VZEROUPPER()
	RET()
}

// measure holds the registers for the figures of a vector of columns.
type measure struct {
	isa
	dead                           bool
	f, wide                        Register // pointers to the float32 and float64 figures
	sum, square, anchor, deviation [2]VecPhysical
	low, high, count, eps, x, t    VecPhysical
}

func newMeasure(v isa, dead bool) *measure {
	r := v.regs
	m := &measure{isa: v, dead: dead, f: RDI, wide: RDX,
		low: r[8], high: r[9], count: r[10], eps: r[11], x: r[12], t: r[13]}
	for i := range 2 {
		m.sum[i], m.square[i], m.anchor[i], m.deviation[i] = r[i], r[2+i], r[4+i], r[6+i]
	}
	return m
}

// load loads the figures accumulated so far.
func (m *measure) load() []Register {
	for i := range 2 {
		VMOVUPS(Mem{Base: m.wide, Disp: i * m.bytes}, m.sum[i])
		VMOVUPS(Mem{Base: m.wide, Disp: figureSquare + i*m.bytes}, m.square[i])
		VCVTPS2PD(Mem{Base: m.f, Disp: figureAnchor + i*m.bytes/2}, m.anchor[i])
	}

	VMOVUPS(Mem{Base: m.f, Disp: figureLow}, m.low)
	VMOVUPS(Mem{Base: m.f, Disp: figureHigh}, m.high)
	if m.dead {
		VMOVUPS(Mem{Base: m.f, Disp: figureDead}, m.count)
	}

	return nil
}

// add adds a row. Its elements are in x, and also in memory at src.
func (m *measure) add(src Mem, masked bool) {
	if masked {
		VCVTPS2PD(m.half(m.x), m.deviation[0])
		m.upper(m.x, m.t)
		VCVTPS2PD(m.half(m.t), m.deviation[1])
	} else {
		VCVTPS2PD(src, m.deviation[0])
		VCVTPS2PD(src.Offset(m.bytes/2), m.deviation[1])
	}

	for i, d := range m.deviation {
		VSUBPD(m.anchor[i], d, d)
		VADDPD(d, m.sum[i], m.sum[i])
		VFMADD231PD(d, d, m.square[i])
	}

	VMINPS(m.low, m.x, m.low) // with NaN as the first source, the result is the second
	VMAXPS(m.high, m.x, m.high)
	if !m.dead {
		return
	}

	m.magnitudes(m.x, m.t)
	if m.bytes == 64 {
		VCMPPS(Imm(1), m.eps, m.t, K2)
		VPADDD(constant("unit", 1), m.count, K2, m.count)
	} else {
		VCMPPS(Imm(1), m.eps, m.t, m.t)
		VPSUBD(m.t, m.count, m.count)
	}
}

// store writes the figures back.
func (m *measure) store() {
	for i := range 2 {
		VMOVUPS(m.sum[i], Mem{Base: m.wide, Disp: i * m.bytes})
		VMOVUPS(m.square[i], Mem{Base: m.wide, Disp: figureSquare + i*m.bytes})
	}
	VMOVUPS(m.low, Mem{Base: m.f, Disp: figureLow})
	VMOVUPS(m.high, Mem{Base: m.f, Disp: figureHigh})
	if m.dead {
		VMOVUPS(m.count, Mem{Base: m.f, Disp: figureDead})
	}
}

// selected loads the selection of columns that have a neighbor into mask register k with AVX-512, and
// otherwise into vector r.
func (v isa) selected(src Mem, k Register, r VecPhysical) Register {
	VMOVUPS(src, r)
	if v.bytes == 64 {
		VPTESTMD(r, r, k)
		return k
	}
	return r
}

// testAny sets the zero flag if no mask or vector selects any column. It clobbers K7 or, with AVX2, the
// penultimate vector register.
func (v isa) testAny(selected []Register) {
	if v.bytes == 64 {
		any := selected[0]
		for _, k := range selected[1:] {
			KORW(any, k, K7)
			any = K7
		}
		KORTESTW(any, any)
		return
	}

	any := selected[0]
	last := v.regs[14]
	for _, r := range selected[1:] {
		VORPS(any, r, last)
		any = last
	}

	VPTEST(any, any)
}

// loadSelected loads the selected lanes, and zeros elsewhere.
func (v isa) loadSelected(src Mem, selected Register, dst VecPhysical) {
	if v.bytes == 64 {
		VMOVUPS_Z(src, selected, dst)
		return
	}
	VMASKMOVPS(src, selected, dst)
}

// blend generates the kernel that applies the rule of a strip. The forward version computes, with v =
// x and neighbors to the left,
//
//	y = (on if x·gate > 0, else off)·v + add + near·v[∓1] + far·v[∓2]
//
// and returns the largest |x|. The backward version omits add, v is the gradient, and the neighbors
// are to the right.
//
// v and x are packs, and y is in a matrix. If streamed is set, y must be aligned and is written past
// the caches. The backward version also prefetches data ahead in the matrix into the second-level
// cache, since it has cycles to spare.
func blend(v isa, backward, streamed bool) {
	name := "blendForward"
	if backward {
		name = "blendBackward"
	}

	if streamed {
		name += "Streamed"
	}

	r := v.regs
	b := &blendRow{isa: v, backward: backward, streamed: streamed,
		py: RDI, pv: RSI, px: RSI, rule: RDX, ahead: R13,
		on: r[0], off: r[1], gate: r[2], add: r[3], near: r[4], far: r[5],
		x: r[8], c: r[9], t: r[10], zero: r[11], top: r[12], value: r[8], step: -4}
	arrays := []GPPhysical{RDI, RSI, RDX}
	if backward {
		b.px, b.value, b.step = RBX, r[13], 4
		arrays = append(arrays, RBX, R13)
	}

	b.parameters(name)
	v.zero(b.zero)
	v.zero(b.top)
	v.strip(arrays, nil, b.loadRule, b.emit, func() {})
	if backward {
		VZEROUPPER()
		RET()
		return
	}

	VMOVAPS(b.top, r[0])
	v.reduce(VMAXPS)
	VZEROUPPER()
	Store(r[0].AsX(), ReturnIndex(0))
	RET()
}

// blendRow holds the registers of blend, and emits the code for one row.
type blendRow struct {
	isa
	backward, streamed            bool
	py, pv, px, rule, ahead       Register
	on, off, gate, add, near, far VecPhysical
	x, c, t, zero, top            VecPhysical
	value                         VecPhysical // v in the formula
	step                          int         // bytes to the near neighbor
	hasNear, hasFar               Register
}

// parameters starts the function and loads its arguments.
func (b *blendRow) parameters(name string) {
	if b.backward {
		TEXT(name+b.name, attr.NOSPLIT,
			"func(dx, grad, x, rule, ahead *float32, rows, stride, columns int)")
		Load(Param("ahead"), b.ahead)
		Load(Param("dx"), b.py)
		Load(Param("grad"), b.pv)
	} else {
		TEXT(name+b.name, attr.NOSPLIT,
			"func(y, x, rule *float32, rows, stride, columns int) float32")
		Load(Param("y"), b.py)
	}

	Load(Param("x"), b.px)
	Load(Param("rule"), b.rule)
	Load(Param("stride"), R10)
	loadSize()
}

// loadRule loads the rule of a vector of columns, and returns the selections of columns that use
// neighbors.
func (b *blendRow) loadRule() []Register {
	VMOVUPS(Mem{Base: b.rule, Disp: ruleOn}, b.on)
	VMOVUPS(Mem{Base: b.rule, Disp: ruleOff}, b.off)
	VMOVUPS(Mem{Base: b.rule, Disp: ruleGate}, b.gate)
	if !b.backward {
		VMOVUPS(Mem{Base: b.rule, Disp: ruleAdd}, b.add)
	}

	VMOVUPS(Mem{Base: b.rule, Disp: ruleNear}, b.near)
	VMOVUPS(Mem{Base: b.rule, Disp: ruleFar}, b.far)
	b.hasNear = b.selected(Mem{Base: b.rule, Disp: ruleHasNear}, K3, b.regs[6])
	b.hasFar = b.selected(Mem{Base: b.rule, Disp: ruleHasFar}, K4, b.regs[7])
	return []Register{b.hasNear, b.hasFar}
}

// emit computes the results of a row.
func (b *blendRow) emit(masked, neighbours bool) {
	c, t := b.c, b.t
	b.load(packed(b.px), b.x, masked)
	VMULPS(b.gate, b.x, t)
	b.choose(b.zero, t, b.on, b.off, c)
	if b.backward {
		PREFETCHT1(inMatrix(b.ahead))
		b.load(packed(b.pv), b.value, masked)
		VMULPS(b.value, c, c)
	} else {
		VFMADD213PS(b.add, b.value, c)
	}

	if neighbours {
		b.loadSelected(packed(b.pv).Offset(b.step), b.hasNear, t)
		VFMADD231PS(t, b.near, c)
		b.loadSelected(packed(b.pv).Offset(2*b.step), b.hasFar, t)
		VFMADD231PS(t, b.far, c)
	}

	if b.streamed && !masked {
		VMOVNTPS(c, inMatrix(b.py))
	} else {
		b.store(c, inMatrix(b.py), masked)
	}

	if !b.backward {
		b.magnitudes(b.x, t)
		VMAXPS(b.top, t, b.top) // a NaN in t is ignored
	}
}

// choose sets dst = on where t > least or t is NaN, and off elsewhere. It clobbers t.
func (v isa) choose(least, t, on, off, dst VecPhysical) {
	if v.bytes == 64 {
		VCMPPS(Imm(notLessEqual), least, t, K2)
		VBLENDMPS(on, off, K2, dst)
		return
	}
	VCMPPS(Imm(notLessEqual), least, t, t)
	VBLENDVPS(t, on, off, dst)
}

// blendSums generates a kernel that computes the sums needed for the gradients of weights, per column: of
// g and g·x over rows with x·gate > above, and of g·x[−1] and g·x[−2] over all rows.
func blendSums(v isa) {
	TEXT("blendSums"+v.name, attr.NOSPLIT, "func(s, rule, grad, x *float32, rows, columns int)")
	ps, rule, pg, px := RDI, RDX, RSI, RBX
	Load(Param("s"), ps)
	Load(Param("rule"), rule)
	Load(Param("grad"), pg)
	Load(Param("x"), px)
	XORQ(R10, R10)
	loadSize()
	r := v.regs
	sums := []VecPhysical{r[0], r[1], r[2], r[3]}
	all, here, near, far := r[0], r[1], r[2], r[3]
	gate, above, x, g, t := r[4], r[5], r[8], r[9], r[10]
	var leftNear, leftFar Register
	v.strip([]GPPhysical{ps, rule, pg, px}, nil, func() []Register {
		for i, s := range sums {
			VMOVUPS(Mem{Base: ps, Disp: i * array}, s)
		}
		VMOVUPS(Mem{Base: rule, Disp: ruleGate}, gate)
		VMOVUPS(Mem{Base: rule, Disp: ruleAbove}, above)
		leftNear = v.selected(Mem{Base: rule, Disp: ruleLeftNear}, K3, r[6])
		leftFar = v.selected(Mem{Base: rule, Disp: ruleLeftFar}, K4, r[7])
		return []Register{leftNear, leftFar}
	}, func(masked, neighbours bool) {
		v.load(packed(px), x, masked)
		v.load(packed(pg), g, masked)
		if neighbours {
			v.loadSelected(packed(px).Offset(-4), leftNear, t)
			VFMADD231PS(t, g, near)
			v.loadSelected(packed(px).Offset(-8), leftFar, t)
			VFMADD231PS(t, g, far)
		}
		VMULPS(gate, x, t)
		if v.bytes == 64 {
			VCMPPS(Imm(notLessEqual), above, t, K2)
			VADDPS(g, all, K2, all)
			VFMADD231PS(x, g, K2, here)
			return
		}
		VCMPPS(Imm(notLessEqual), above, t, t)
		VANDPS(t, g, g)
		VADDPS(g, all, all)
		VFMADD231PS(x, g, here)
	}, func() {
		for i, s := range sums {
			VMOVUPS(s, Mem{Base: ps, Disp: i * array})
		}
	})

	VZEROUPPER()
	RET()
}

// blendLearn generates a combination of blendBackward and blendSums. It needs more registers than
// AVX2 provides.
func blendLearn(v isa, streamed bool) {
	name := "blendLearn"
	if streamed {
		name += "Streamed"
	}

	TEXT(name+v.name, attr.NOSPLIT,
		"func(dx, grad, x, rule, s, ahead *float32, rows, stride, columns int)")
	r := v.regs
	b := &learnRow{
		blendRow: blendRow{isa: v, streamed: streamed,
			py: RDI, pv: RSI, px: RBX, rule: RDX, ahead: R13,
			on: r[0], off: r[1], gate: r[2], near: r[3], far: r[4],
			x: r[10], value: r[11], c: r[13], t: r[14], zero: r[16]},
		sums: R15, above: r[5], totals: r[6:10], product: r[12],
		neighbours: []neighbour{{ruleHasNear, K3, 1}, {ruleHasFar, K4, 2},
			{ruleLeftNear, K5, -1}, {ruleLeftFar, K6, -2}}}

	Load(Param("dx"), b.py)
	Load(Param("grad"), b.pv)
	Load(Param("x"), b.px)
	Load(Param("rule"), b.rule)
	Load(Param("s"), b.sums)
	Load(Param("ahead"), b.ahead)
	Load(Param("stride"), R10)
	loadSize()
	v.zero(b.zero)
	v.strip([]GPPhysical{RDI, RSI, RBX, RDX, R15, R13}, nil, b.loadRule, b.emit, func() {
		for i, total := range b.totals {
			VMOVUPS(total, Mem{Base: b.sums, Disp: i * array})
		}
	})
	VZEROUPPER()
	RET()
}

// learnRow holds the registers of blendLearn, and emits the code for one row.
type learnRow struct {
	blendRow
	sums           Register
	above, product VecPhysical
	totals         []VecPhysical
	neighbours     []neighbour // neighbors in the gradient, followed by neighbors in x
}

// loadRule loads the rule and the sums of a vector of columns, and returns the selections of columns that
// use neighbors.
func (b *learnRow) loadRule() (users []Register) {
	for _, f := range []struct {
		at  int
		reg VecPhysical
	}{{ruleOn, b.on}, {ruleOff, b.off}, {ruleGate, b.gate}, {ruleNear, b.near}, {ruleFar, b.far},
		{ruleAbove, b.above}} {
		VMOVUPS(Mem{Base: b.rule, Disp: f.at}, f.reg)
	}

	for i, total := range b.totals {
		VMOVUPS(Mem{Base: b.sums, Disp: i * array}, total)
	}

	for _, n := range b.neighbours {
		users = append(users, b.selected(Mem{Base: b.rule, Disp: n.has}, n.mask, b.t))
	}

	return users
}

// emit computes the results of a row, and adds the row to the sums.
func (b *learnRow) emit(masked, neighbours bool) {
	x, g, c, t := b.x, b.value, b.c, b.t
	PREFETCHT1(inMatrix(b.ahead))
	b.load(packed(b.px), x, masked)
	b.load(packed(b.pv), g, masked)
	VMULPS(b.gate, x, b.product)
	b.choose(b.zero, b.product, b.on, b.off, c)
	VMULPS(g, c, c)
	VCMPPS(Imm(notLessEqual), b.above, b.product, K2)
	VADDPS(g, b.totals[0], K2, b.totals[0])
	VFMADD231PS(x, g, K2, b.totals[1])
	if neighbours {
		for i, n := range b.neighbours[:2] {
			b.loadSelected(packed(b.pv).Offset(4*n.step), n.mask, t)
			VFMADD231PS(t, []VecPhysical{b.near, b.far}[i], c)
		}
		for i, n := range b.neighbours[2:] {
			b.loadSelected(packed(b.px).Offset(4*n.step), n.mask, t)
			VFMADD231PS(t, g, b.totals[2+i])
		}
	}

	if b.streamed && !masked {
		VMOVNTPS(c, inMatrix(b.py))
	} else {
		b.store(c, inMatrix(b.py), masked)
	}
}

// chunkNorms generates a kernel that computes, for every chunk, the sums of the deviations of its row
// norms from the chunk's anchor and of their squares. There are four float64 lanes, and lane i sums every
// fourth row, starting with row i. The number of rows is 4·groups, rows are stride elements apart, and
// chunk is a multiple of 4. Since the natural vector contains four rows, there is only an AVX2 version.
func chunkNorms() {
	TEXT("chunkNormsAVX2", attr.NOSPLIT,
		"func(n *float64, x *float32, groups, chunk, chunks, stride int)")
	anchors, sums, px, chunk, chunks, stride, stride3 := RDI, RDX, RSI, R8, R9, R10, R12
	rows, at := R11, R13
	Load(Param("n"), anchors)
	LEAQ(Mem{Base: anchors, Disp: normSum}, sums)
	Load(Param("x"), px)
	Load(Param("stride"), stride)
	SHLQ(Imm(2), stride)
	Load(Param("chunk"), chunk)
	Load(Param("chunks"), chunks)
	LEAQ(Mem{Base: stride, Index: stride, Scale: 2}, stride3)
	SHRQ(Imm(2), chunk)
	p := []VecPhysical{Y0, Y1, Y2, Y3}
	x, low, high, sum, square, anchor := Y4, Y5, Y6, Y7, Y8, Y9
	Label("chunk")
	VBROADCASTSD(Mem{Base: anchors}, anchor)
	VMOVUPD(Mem{Base: sums}, sum)
	VMOVUPD(Mem{Base: sums, Disp: normSquare - normSum}, square)
	MOVQ(px, rows)
	Load(Param("groups"), RCX)
	Label("group")
	for _, r := range p {
		VXORPD(r, r, r)
	}

	MOVQ(rows, at)
	MOVQ(chunk, RAX)
	Label("column")
	for i, m := range []Mem{{Base: at}, {Base: at, Index: stride, Scale: 1},
		{Base: at, Index: stride, Scale: 2}, {Base: at, Index: stride3, Scale: 1}} {
		VCVTPS2PD(m, x)
		VFMADD231PD(x, x, p[i])
	}

	ADDQ(Imm(16), at)
	DECQ(RAX)
	JNZ(LabelRef("column"))
	addLanes(p, low, high, x)
	VSQRTPD(x, x)
	VSUBPD(anchor, x, x)
	VADDPD(x, sum, sum)
	VFMADD231PD(x, x, square)
	LEAQ(Mem{Base: rows, Index: stride, Scale: 4}, rows)
	DECQ(RCX)
	JNZ(LabelRef("group"))
	VMOVUPD(sum, Mem{Base: sums})
	VMOVUPD(square, Mem{Base: sums, Disp: normSquare - normSum})
	ADDQ(Imm(8), anchors)
	ADDQ(Imm(64), sums)
	MOVQ(chunk, RAX)
	SHLQ(Imm(4), RAX)
	ADDQ(RAX, px)
	DECQ(chunks)
	JNZ(LabelRef("chunk"))
	VZEROUPPER()
	RET()
}

// addLanes sets lane i of dst to the sum of the lanes of p[i], for four registers p. It clobbers p, low
// and high.
func addLanes(p []VecPhysical, low, high, dst VecPhysical) {
	for i := 0; i < 4; i += 2 {
		VUNPCKLPD(p[i+1], p[i], low)
		VUNPCKHPD(p[i+1], p[i], high)
		VADDPD(low, high, p[i])
	}
	VPERM2F128(Imm(0x20), p[2], p[0], low)
	VPERM2F128(Imm(0x31), p[2], p[0], high)
	VADDPD(low, high, dst)
}

// parameter returns the memory operand of a parameter.
func parameter(name string) Mem {
	p, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return p.Addr
}

// The variants of moveRows.
const (
	fetching = "loadRows" // prefetches the source into the second-level cache
	plain    = "storeRows"
	// writes to an aligned destination past the caches
	streaming = "streamRows"
)

// moveRows generates a kernel that copies rows. ahead is the distance in bytes to data that will be
// copied some time later.
func moveRows(v isa, way string) {
	TEXT(way+v.name, attr.NOSPLIT,
		"func(dst, src *float32, rows, dstStride, srcStride, columns, ahead int)")
	dst, src, rows, dstStride, srcStride, ahead, toDst, toSrc := RDI, RSI, R9,
		R10, R12, RBX, R11, R13
	Load(Param("dst"), dst)
	Load(Param("src"), src)
	Load(Param("rows"), rows)
	Load(Param("dstStride"), dstStride)
	Load(Param("srcStride"), srcStride)
	Load(Param("columns"), R8)
	Load(Param("ahead"), ahead)
	SHLQ(Imm(2), dstStride)
	SHLQ(Imm(2), srcStride)
	lanes := uint64(v.bytes / 4)
	x := v.regs[0]
	MOVQ(R8, RDX)
	ANDQ(I32(-int(lanes)), RDX) // columns in whole vectors
	SUBQ(RDX, R8)
	JZ(LabelRef("row"))
	v.setMask(R8)
	MOVL(U32(1), R8L)
	Label("row")
	MOVQ(dst, toDst)
	MOVQ(src, toSrc)
	MOVQ(RDX, RCX)
	TESTQ(RCX, RCX)
	JZ(LabelRef("rest"))
	Label("vector")
	if way == fetching {
		PREFETCHT1(Mem{Base: toSrc, Index: ahead, Scale: 1})
	}

	VMOVUPS(Mem{Base: toSrc}, x)
	if way == streaming {
		VMOVNTPS(x, Mem{Base: toDst})
	} else {
		VMOVUPS(x, Mem{Base: toDst})
	}

	ADDQ(Imm(uint64(v.bytes)), toSrc)
	ADDQ(Imm(uint64(v.bytes)), toDst)
	SUBQ(Imm(lanes), RCX)
	JNZ(LabelRef("vector"))
	Label("rest")
	TESTQ(R8, R8)
	JZ(LabelRef("next"))
	v.load(Mem{Base: toSrc}, x, true)
	v.store(x, Mem{Base: toDst}, true)
	Label("next")
	ADDQ(dstStride, dst)
	ADDQ(srcStride, src)
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// storeFence generates a function that orders streamed stores before later ones.
func storeFence() {
	TEXT("storeFenceAMD64", attr.NOSPLIT, "func()")
	SFENCE()
	RET()
}
