package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// fused generates a pass that combines figures and blend or, in the backward pass, figures, blend,
// blendSums and norms, for fusedRows rows.
//
// For each vector of columns, it reads the measured data (x forward, the gradient backward) of all rows
// into registers, adds them to the figures, computes the results in place, and finally stores them. The
// stores come last because processors mistake a load for a read of a recent store at the same offset in
// another page, and rows are often a multiple of the page size apart. Each cache line is read only once
// because such rows also evict each other from the first-level cache.
//
// The pass needs more registers than AVX2 provides.
type fused struct {
	isa
	backward, streamed bool

	out, x, value, rule, state, nextX, nextGrad Register // value is the gradient backward, and x forward
	columns, stride                             Register
	// offset of the vector of columns, and offset of its current row in matrices
	column, at Register
	// offset of the next prefetch, and the number of vectors that still prefetch in that row
	ahead, left Register
	chunk       Register // eight times the index of the chunk being normed

	row  [fusedRows]VecPhysical // rows of value, replaced by the results
	free []VecPhysical          // registers for temporary values within a vector of columns
	// 1.0 in float64, and the squared norms of the current chunk's rows so far
	one, norm VecPhysical
	eps       VecPhysical
	later     []func() // emits code to be placed after the main path
}

const (
	fusedRows  = 8
	stateSums  = 8 * array  // offset of the sums, which follow the figures
	stateNorms = 12 * array // offset of the norms, which follow the sums
)

// The forms of a vector of columns, by the parts of a rule that they need. A columnRule.form with bits
// beyond a form's requires formAny.
const (
	formNone   = 0 // the results equal the values
	formPlain  = 1 // on = off, and there are no neighbors
	formGated  = 3
	formBeside = 5 // on = off, and all neighbors are in the same vector
	formAny    = 15
)

// neighbour describes a neighbor of a column.
type neighbour struct {
	has  int // offset in the rule of the selection of columns that have it
	mask Register
	step int // distance in columns
}

// neighbours returns the neighbors in value that contribute to the result: to the left forward, and to
// the right backward. Backward, they are followed by the neighbors in x that need a gradient for their
// weight.
func (f *fused) neighbours() []neighbour {
	if !f.backward {
		return []neighbour{{ruleHasNear, K3, -1}, {ruleHasFar, K4, -2}}
	}
	return []neighbour{{ruleHasNear, K3, 1}, {ruleHasFar, K4, 2}, {ruleLeftNear, K5, -1},
		{ruleLeftFar, K6, -2}}
}

func fusedPass(v isa, backward, streamed bool) {
	f := &fused{isa: v, backward: backward, streamed: streamed,
		out: RDI, x: RBX, value: RBX, rule: RDX, state: R14, nextX: R9, nextGrad: R15,
		columns: R8, stride: R10, chunk: R11, at: R12, column: R13, ahead: RAX, left: RCX}
	name, signature := "fusedForward",
		"func(y, x, rule, state, nextX, ahead *float32, stride, columns int, eps float32)"
	if backward {
		name = "fusedBackward"
		signature = "func(dx, grad, x, rule, state, nextGrad, nextX, ahead *float32, stride, " +
			"columns, vectors, counter int)"
		f.value = RSI
	}

	if streamed {
		name += "Streamed"
	}

	TEXT(name+v.name, attr.NOSPLIT, signature)
	f.parameters()
	lanes := uint64(v.bytes / 4)
	SUBQ(Imm(lanes), f.columns)
	JLT(LabelRef("tail"))
	Label("columns")
	f.vector("vector", false)
	ADDQ(Imm(uint64(v.bytes)), f.column)
	SUBQ(Imm(lanes), f.columns)
	JGE(LabelRef("columns"))
	Label("tail")
	ADDQ(Imm(lanes), f.columns)
	JZ(LabelRef("done"))
	MOVQ(f.ahead, f.at) // setMask clobbers ahead, and left as well
	v.setMask(f.columns)
	MOVQ(f.at, f.ahead)
	MOVQ(U32(1), f.left)
	f.vector("tailVector", true)
	Label("done")
	VZEROUPPER()
	RET()
	for _, emit := range f.later {
		emit()
	}
}

// parameters loads the arguments and initializes the persistent registers.
func (f *fused) parameters() {
	for _, p := range []struct {
		name string
		reg  Register
	}{{"x", f.x}, {"rule", f.rule}, {"state", f.state}, {"nextX", f.nextX}, {"stride", f.stride},
		{"columns", f.columns}} {
		Load(Param(p.name), p.reg)
	}

	copy(f.row[:], f.regs)
	f.one, f.norm, f.eps, f.free = f.regs[fusedRows], f.regs[fusedRows+1],
		f.regs[fusedRows+1], f.regs[fusedRows+2:]
	VBROADCASTSD(doubleOne(), f.one)
	if f.backward {
		Load(Param("dx"), f.out)
		Load(Param("grad"), f.value)
		Load(Param("nextGrad"), f.nextGrad)
		XORQ(f.chunk, f.chunk)
		f.zero(f.norm)
	} else {
		Load(Param("y"), f.out)
		VBROADCASTSS(parameter("eps"), f.eps)
	}

	SHLQ(Imm(2), f.stride)
	XORQ(f.column, f.column)
	Load(Param("ahead"), f.at)
	MOVQ(Mem{Base: f.at}, f.ahead)
	MOVQ(Mem{Base: f.at, Disp: 8}, f.left)
}

var doubleOneData *Mem

func doubleOne() Mem {
	if doubleOneData == nil {
		m := GLOBL("doubleOne", rodata)
		DATA(0, F64(1))
		doubleOneData = &m
	}
	return *doubleOneData
}

// ofColumn returns the current vector of columns in an array of the rule or the state.
func (f *fused) ofColumn(base Register, disp int) Mem {
	return Mem{Base: base, Index: f.column, Scale: 1, Disp: disp}
}

// inMatrix returns the current vector of columns in the current row of a matrix.
func (f *fused) inMatrix(base Register) Mem { return Mem{Base: base, Index: f.at, Scale: 1} }

// take allocates registers and loads them from memory.
func (f *fused) take(free *[]VecPhysical, from ...Mem) []VecPhysical {
	taken := (*free)[:len(from)]
	*free = (*free)[len(from):]
	for i, m := range from {
		VMOVUPS(m, taken[i])
	}
	return taken
}

func put(registers []VecPhysical, to []Mem) {
	for i, m := range to {
		VMOVUPS(registers[i], m)
	}
}

// toRow sets at to the current vector of columns in a row.
func (f *fused) toRow(r int) {
	if r == 0 {
		MOVQ(f.column, f.at)
		return
	}
	LEAQ(Mem{Base: f.column, Index: f.stride, Scale: uint8(r)}, f.at)
}

// vector emits the code for a vector of columns.
func (f *fused) vector(label string, masked bool) {
	if f.backward && !masked {
		CMPQ(parameter("vectors"), Imm(0))
		JEQ(LabelRef(label + "Normless"))
		f.figures(label+"Norms", masked, true)
		JMP(LabelRef(label + "Blend"))
		Label(label + "Normless")
	}

	f.figures(label, masked, false)
	Label(label + "Blend")
	forms := []int{formNone, formPlain, formGated, formBeside}
	if masked {
		forms = forms[:1]
	}

	MOVQ(f.column, f.at)
	SHRQ(Imm(6), f.at)
	MOVBQZX(Mem{Base: f.rule, Index: f.at, Scale: 1, Disp: ruleForm}, f.at)
	for _, form := range forms {
		CMPQ(f.at, Imm(uint64(form)))
		JEQ(LabelRef(fmt.Sprint(label, "Form", form)))
	}

	f.blend(formAny, masked)
	for _, form := range forms {
		JMP(LabelRef(label + "End"))
		Label(fmt.Sprint(label, "Form", form))
		f.blend(form, masked)
	}

	Label(label + "End")
	DECQ(f.left)
	JNZ(LabelRef(label + "SameRow"))
	Load(Param("ahead"), f.at)
	MOVQ(Mem{Base: f.at, Disp: 16}, f.left)
	ADDQ(Mem{Base: f.at, Disp: 24}, f.ahead)
	Label(label + "SameRow")
}

// figures loads the rows and adds them to the figures and, if norms is set, to the norms of their
// chunk. It subtracts by multiplying by 1, because the code is dominated by additions and the
// multiply-add units have more time to spare.
func (f *fused) figures(label string, masked, norms bool) {
	var memory []Mem
	for i := range 2 {
		wide := Mem{Base: f.state, Index: f.column, Scale: 2, Disp: i * f.bytes}
		memory = append(memory, wide, wide.Offset(figureSquare))
	}

	memory = append(memory, f.ofColumn(f.state, figureLow), f.ofColumn(f.state, figureHigh))
	free := f.free
	totals := f.take(&free, memory...)
	low, high := totals[4], totals[5]
	anchor, d, t, least := free[:2], free[2:4], free[4], free[5]
	tree := rowSums{t: t, free: free[5:]}
	for i, a := range anchor {
		VCVTPS2PD(f.ofColumn(f.state, figureAnchor+i*f.bytes/2), a)
	}

	f.toRow(0)
	for r, x := range f.row {
		f.load(f.inMatrix(f.value), x, masked)
		if masked {
			f.upper(x, t)
			VCVTPS2PD(f.half(x), d[0])
			VCVTPS2PD(f.half(t), d[1])
		} else {
			VCVTPS2PD(f.inMatrix(f.value), d[0])
			VCVTPS2PD(f.inMatrix(f.value).Offset(f.bytes/2), d[1])
		}
		if norms {
			tree.add(d)
		}
		for i := range d {
			VFMSUB213PD(anchor[i], f.one, d[i])
			VADDPD(d[i], totals[2*i], totals[2*i])
			VFMADD231PD(d[i], d[i], totals[2*i+1])
		}
		VMINPS(low, x, low) // with NaN as the first source, the result is the second
		VMAXPS(high, x, high)
		PREFETCHT1(Mem{Base: f.nextX, Index: f.ahead, Scale: 1})
		if f.backward {
			PREFETCHT1(Mem{Base: f.nextGrad, Index: f.ahead, Scale: 1})
		} else {
			before := least
			if r == 0 {
				before = f.eps
			}
			VRANGEPS(Imm(leastMagnitude), x, before, least)
		}
		ADDQ(Imm(64), f.ahead)
		ADDQ(f.stride, f.at)
	}

	put(totals, memory)
	if norms {
		f.addNorms(label, tree.total(), free[5:])
	}

	if !f.backward {
		f.countDead(label, least, t)
	}
}

const leastMagnitude = 0b1010 // operand of VRANGEPS: select the smaller magnitude and clear its sign

// countDead counts the elements smaller than eps. The smallest magnitude shows whether there are any, and
// in most tensors there rarely are.
func (f *fused) countDead(label string, least, t VecPhysical) {
	VCMPPS(Imm(1), f.eps, least, K2)
	KORTESTW(K2, K2)
	JNZ(LabelRef(label + "Dead"))
	Label(label + "Alive")
	f.later = append(f.later, func() {
		Label(label + "Dead")
		count := f.ofColumn(f.state, figureDead)
		VMOVUPS(count, least)
		for _, x := range f.row {
			f.magnitudes(x, t)
			VCMPPS(Imm(1), f.eps, t, K2)
			VPADDD(constant("unit", 1), least, K2, least)
		}
		VMOVUPS(least, count)
		JMP(LabelRef(label + "Alive"))
	})
}

// rowSums is a tree that sums the squares of a vector of columns in each of fusedRows rows, in float64.
// It contains partial sums of rows, at most one per level.
type rowSums struct {
	t     VecPhysical
	free  []VecPhysical
	parts []VecPhysical
	level []int
}

// add adds row d.
func (s *rowSums) add(d []VecPhysical) {
	q := s.free[0]
	s.free = s.free[1:]
	VMULPD(d[0], d[0], q)
	VFMADD231PD(d[1], d[1], q)
	s.parts, s.level = append(s.parts, q), append(s.level, 0)
	for n := len(s.parts); n > 1 && s.level[n-1] == s.level[n-2]; n-- {
		a, b := s.parts[n-2], s.parts[n-1]
		if s.level[n-1] == 0 {
			VUNPCKLPD(b, a, s.t)
			VUNPCKHPD(b, a, a)
		} else {
			VSHUFF64X2(Imm(0x88), b, a, s.t) // blocks 0 and 2 of both
			VSHUFF64X2(Imm(0xdd), b, a, a)
		}
		VADDPD(s.t, a, a)
		s.free = append([]VecPhysical{b}, s.free...)
		s.parts, s.level = s.parts[:n-1], s.level[:n-1]
		s.level[n-2]++
	}
}

// total returns the sums, one row per lane, once all rows have been added.
func (s *rowSums) total() VecPhysical { return s.parts[0] }

// addNorms adds squares to the squared norms of the chunk's rows. When the chunk is complete, it adds the
// norms to their sums.
func (f *fused) addNorms(label string, squares VecPhysical, free []VecPhysical) {
	VADDPD(squares, f.norm, f.norm)
	DECQ(parameter("counter"))
	JNZ(LabelRef(label + "SameChunk"))
	MOVQ(parameter("vectors"), f.at)
	MOVQ(f.at, parameter("counter"))
	norms := Mem{Base: f.state, Index: f.chunk, Scale: 8, Disp: stateNorms}
	memory := []Mem{norms.Offset(normSum), norms.Offset(normSquare)}
	sums := f.take(&free, memory...)
	t := free[0]
	VSQRTPD(f.norm, f.norm)
	VBROADCASTSD(Mem{Base: f.state, Index: f.chunk, Scale: 1, Disp: stateNorms}, t)
	VSUBPD(t, f.norm, f.norm)
	VADDPD(f.norm, sums[0], sums[0])
	VFMADD231PD(f.norm, f.norm, sums[1])
	put(sums, memory)
	f.zero(f.norm)
	ADDQ(Imm(8), f.chunk)
	Label(label + "SameChunk")
}

// blending emits the computation of results in one form, and holds the registers for it.
type blending struct {
	*fused
	form                int
	masked              bool
	gated, beside       bool // whether the form has a gate, and neighbors
	on, off, gate, none VecPhysical
	above, add          VecPhysical
	x, t, c             VecPhysical
	next, shares        []VecPhysical // neighbors of the row, and their factors
	totals              []VecPhysical // backward: sums for the gradients of weights
	sums                []Mem         // memory of totals
}

// blend computes the results of the rows in their registers, and stores them. In the backward pass it
// also adds to the sums for the gradients of weights.
func (f *fused) blend(form int, masked bool) {
	f.toRow(fusedRows)
	if form == formNone {
		f.storeUp(masked)
		return
	}

	b := blending{fused: f, form: form, masked: masked,
		gated: form == formGated || form == formAny, beside: form == formBeside || form == formAny}
	b.begin()
	walks := f.backward || form == formAny
	for i := range f.row {
		if walks {
			SUBQ(f.stride, f.at)
		}
		b.result(f.row[fusedRows-1-i])
	}

	if f.backward {
		put(b.totals, b.sums)
	}

	if walks {
		f.storeDown(masked)
	} else {
		f.storeUp(masked)
	}
}

// begin allocates registers, and loads the persistent ones.
func (b *blending) begin() {
	free := b.free
	ofRule := func(disp int) Mem { return b.ofColumn(b.rule, disp) }
	ofState := func(disp int) Mem { return b.ofColumn(b.state, disp) }
	b.on = b.take(&free, ofRule(ruleOn))[0]
	if b.gated {
		r := b.take(&free, ofRule(ruleOff), ofRule(ruleGate))
		b.off, b.gate, b.none, free = r[0], r[1], free[0], free[1:]
		b.zero(b.none)
	}

	b.sums = []Mem{ofState(stateSums + sumAll), ofState(stateSums + sumHere)}
	switch {
	case !b.backward:
		b.add = b.take(&free, ofRule(ruleAdd))[0]
	case b.gated:
		b.above = b.take(&free, ofRule(ruleAbove))[0]
	}

	b.t, b.c, b.next = free[0], free[1], free[2:4]
	free = free[4:]
	if b.backward {
		b.x, free = free[0], free[1:]
	}

	if b.beside {
		for _, n := range b.neighbours() {
			b.selected(ofRule(n.has), n.mask, b.t)
		}
		b.shares = b.take(&free, ofRule(ruleNear), ofRule(ruleFar))
		if b.backward {
			b.sums = append(b.sums, ofState(stateSums+sumNear), ofState(stateSums+sumFar))
		}
	}

	if b.backward {
		b.totals = b.take(&free, b.sums...)
	}
}

// result replaces a row of measured values with results.
func (b *blending) result(row VecPhysical) {
	factor, x := b.on, row
	if b.backward {
		x = b.x
		b.load(b.inMatrix(b.fused.x), x, b.masked)
	}

	if b.gated {
		factor = b.c
		VMULPS(b.gate, x, b.t)
		b.choose(b.none, b.t, b.on, b.off, factor)
	}

	switch {
	case b.backward && b.gated:
		VCMPPS(Imm(notLessEqual), b.above, b.t, K2)
		VADDPS(row, b.totals[0], K2, b.totals[0])
		VFMADD231PS(x, row, K2, b.totals[1])
	case b.backward:
		VADDPS(row, b.totals[0], b.totals[0])
		VFMADD231PS(x, row, b.totals[1])
	}

	if b.beside {
		all := b.neighbours()
		for j, n := range all[:2] {
			b.shifted(b.form, b.value, row, n, b.next[j])
		}
		for j, n := range all[2:] {
			b.shifted(b.form, b.fused.x, x, n, b.t)
			VFMADD231PS(b.t, row, b.totals[2+j])
		}
	}

	if b.backward {
		VMULPS(factor, row, row)
	} else {
		VFMADD213PS(b.add, factor, row)
	}

	for j, s := range b.shares {
		VFMADD231PS(b.next[j], s, row)
	}
}

// shifted sets dst to a neighbor of row, which is both in a register and in the matrix. Columns without
// this neighbor become 0.
func (f *fused) shifted(form int, matrix Register, row VecPhysical, n neighbour, dst VecPhysical) {
	if form == formAny {
		f.loadSelected(f.inMatrix(matrix).Offset(4*n.step), n.mask, dst)
		return
	}
	VALIGND_Z(Imm(uint64(16+n.step)%16), row, row, n.mask, dst)
}

// storeUp stores the rows from the last to the first, starting with at one row past the last. storeDown
// stores them from the first to the last.
func (f *fused) storeUp(masked bool) {
	for i := range f.row {
		SUBQ(f.stride, f.at)
		f.storeRow(f.row[fusedRows-1-i], masked)
	}
}

func (f *fused) storeDown(masked bool) {
	for _, row := range f.row {
		f.storeRow(row, masked)
		ADDQ(f.stride, f.at)
	}
}

func (f *fused) storeRow(row VecPhysical, masked bool) {
	if f.streamed && !masked {
		VMOVNTPS(row, f.inMatrix(f.out))
		return
	}
	f.store(row, f.inMatrix(f.out), masked)
}
