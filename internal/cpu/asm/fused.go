package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// A fused pass is figures and blend in one, and backward blendSums too, for fusedRows rows. Forward it reads the matrix, whose
// elements it needs once, and backward packs, since norms are formed of one of them. It takes more registers than AVX2 has.
//
// Forward it stores the rows of a vector of columns together, after the loads of all of them: a load is taken for one of what
// was just stored at the same place of another page, and rows often are that far apart.
type fused struct {
	isa
	backward, streamed bool

	out, x, value, rule, state, nextX, nextGrad Register // value is g backward, and x forward
	columns, stride                             Register
	column, inPack, at                          Register // offsets of the vector of columns, and of the current row's in packs and matrices
	ahead, left                                 Register // offset of what to fetch, and how many more vectors of columns fetch in that row

	figures, sums, rules, beside []kept // what belongs to columns, the last for those with neighbours
	sum, square, anchor          [2]VecPhysical
	deviation                    [2]VecPhysical
	low, high, count             VecPhysical
	on, off, gate, above, add    VecPhysical
	shares                       [2]VecPhysical // of the neighbours
	totals                       [4]VecPhysical
	top, eps, none, t            VecPhysical // none is 0
	vx, vv                       VecPhysical // elements of x and value
	result                       [fusedRows]VecPhysical
}

const (
	fusedRows = 8
	stateSums = 8 * array // where the sums lie behind the figures
)

// kept is a vector that stays in a register while rows pass.
type kept struct {
	memory   Mem
	register VecPhysical
}

// neighbourMasks say which columns have the neighbours of blend and, for backward, those of blendSums.
var neighbourMasks = []struct {
	at int
	k  Register
}{{ruleHasNear, K3}, {ruleHasFar, K4}, {ruleLeftNear, K5}, {ruleLeftFar, K6}}

func fusedPass(v isa, backward, streamed bool) {
	f := &fused{isa: v, backward: backward, streamed: streamed,
		out: RDI, x: RBX, value: RBX, rule: RDX, state: R14, nextX: R9, nextGrad: R15,
		columns: R8, stride: R10, inPack: R11, at: R12, column: R13, ahead: RAX, left: RCX}
	name, signature := "fusedForward", "func(y, x, rule, state, nextX, ahead *float32, stride, columns int, eps float32) float32"
	if backward {
		name, signature = "fusedBackward", "func(dx, grad, x, rule, state, nextGrad, nextX, ahead *float32, stride, columns int)"
		f.value = RSI
	}
	if streamed {
		name += "Streamed"
	}
	TEXT(name+v.name, attr.NOSPLIT, signature)
	f.parameters()
	f.assign()
	SHLQ(Imm(2), f.stride)
	XORQ(f.column, f.column)
	Load(Param("ahead"), f.at)
	MOVQ(Mem{Base: f.at}, f.ahead)
	MOVQ(Mem{Base: f.at, Disp: 8}, f.left)
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
	MOVQ(f.ahead, f.at) // which setMask clobbers, and left too
	v.setMask(f.columns)
	MOVQ(f.at, f.ahead)
	MOVQ(U32(1), f.left)
	f.vector("tailVector", true)
	Label("done")
	if backward {
		VZEROUPPER()
		RET()
		return
	}
	VMOVAPS(f.top, v.regs[0])
	v.reduce(VMAXPS)
	VZEROUPPER()
	Store(v.regs[0].AsX(), ReturnIndex(0))
	RET()
}

func (f *fused) parameters() {
	for _, p := range []struct {
		name string
		reg  Register
	}{{"x", f.x}, {"rule", f.rule}, {"state", f.state}, {"nextX", f.nextX}, {"stride", f.stride}, {"columns", f.columns}} {
		Load(Param(p.name), p.reg)
	}
	if f.backward {
		Load(Param("dx"), f.out)
		Load(Param("grad"), f.value)
		Load(Param("nextGrad"), f.nextGrad)
	} else {
		Load(Param("y"), f.out)
	}
}

// assign gives out the vector registers and sets those that stay.
func (f *fused) assign() {
	r := f.regs
	take := func(all ...*VecPhysical) {
		for _, v := range all {
			*v, r = r[0], r[1:]
		}
	}
	for i := range 2 {
		take(&f.sum[i], &f.square[i], &f.anchor[i], &f.deviation[i], &f.shares[i])
	}
	take(&f.low, &f.high, &f.on, &f.off, &f.gate, &f.none, &f.t, &f.vx)
	for i := range f.result {
		take(&f.result[i])
	}
	ofState, ofRule := func(disp int) Mem { return f.ofColumn(f.state, disp) }, func(disp int) Mem { return f.ofColumn(f.rule, disp) }
	for i := range 2 {
		wide := Mem{Base: f.state, Index: f.column, Scale: 2, Disp: i * f.bytes}
		f.figures = append(f.figures, kept{wide, f.sum[i]}, kept{wide.Offset(figureSquare), f.square[i]})
		f.beside = append(f.beside, kept{ofRule(ruleNear + i*array), f.shares[i]})
	}
	f.figures = append(f.figures, kept{ofState(figureLow), f.low}, kept{ofState(figureHigh), f.high})
	f.rules = []kept{{ofRule(ruleOn), f.on}, {ofRule(ruleOff), f.off}, {ofRule(ruleGate), f.gate}}
	f.zero(f.none)
	if f.backward {
		take(&f.vv, &f.above, &f.totals[0], &f.totals[1], &f.totals[2], &f.totals[3])
		f.rules = append(f.rules, kept{ofRule(ruleAbove), f.above})
		f.sums = []kept{{ofState(stateSums + sumAll), f.totals[0]}, {ofState(stateSums + sumHere), f.totals[1]}}
		f.beside = append(f.beside, kept{ofState(stateSums + sumNear), f.totals[2]}, kept{ofState(stateSums + sumFar), f.totals[3]})
		return
	}
	f.vv = f.vx
	take(&f.count, &f.add, &f.top, &f.eps)
	f.rules = append(f.rules, kept{ofRule(ruleAdd), f.add})
	f.figures = append(f.figures, kept{ofState(figureDead), f.count})
	f.zero(f.top)
	eps, err := Param("eps").Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(eps.Addr, f.eps)
}

// ofColumn is the current vector of columns in an array, inMatrix and here the current row's in a matrix and in an input.
func (f *fused) ofColumn(base Register, disp int) Mem {
	return Mem{Base: base, Index: f.column, Scale: 1, Disp: disp}
}

func (f *fused) inMatrix(base Register) Mem { return Mem{Base: base, Index: f.at, Scale: 1} }

func (f *fused) here(base Register) Mem {
	if f.backward {
		return Mem{Base: base, Index: f.inPack, Scale: 1}
	}
	return f.inMatrix(base)
}

func read(all []kept) {
	for _, k := range all {
		VMOVUPS(k.memory, k.register)
	}
}

func write(all []kept) {
	for _, k := range all {
		VMOVUPS(k.register, k.memory)
	}
}

// vector emits a vector of columns: with neighbours if some of its columns have any, and else without.
func (f *fused) vector(label string, masked bool) {
	for i, a := range f.anchor {
		VCVTPS2PD(f.ofColumn(f.state, figureAnchor+i*f.bytes/2), a)
	}
	read(f.figures)
	read(f.sums)
	read(f.rules)
	MOVQ(f.column, f.inPack)
	MOVQ(f.column, f.at)
	SHRQ(Imm(6), f.at)
	CMPB(Mem{Base: f.rule, Index: f.at, Scale: 1, Disp: ruleBeside}, Imm(0))
	MOVQ(f.column, f.at)
	JEQ(LabelRef(label + "Alone"))
	for _, m := range neighbourMasks {
		f.selected(f.ofColumn(f.rule, m.at), m.k, f.t)
	}
	read(f.beside)
	f.rows(masked, true)
	if f.backward {
		write(f.beside[2:])
	}
	JMP(LabelRef(label + "End"))
	Label(label + "Alone")
	f.rows(masked, false)
	Label(label + "End")
	write(f.figures)
	write(f.sums)
	DECQ(f.left)
	JNZ(LabelRef(label + "SameRow"))
	Load(Param("ahead"), f.at)
	MOVQ(Mem{Base: f.at, Disp: 16}, f.left)
	ADDQ(Mem{Base: f.at, Disp: 24}, f.ahead)
	Label(label + "SameRow")
}

func (f *fused) rows(masked, neighbours bool) {
	for _, c := range f.result {
		f.load(f.here(f.value), f.vv, masked)
		if f.backward {
			f.load(f.here(f.x), f.vx, masked)
		}
		f.blend(c)
		f.addFigures(masked)
		if neighbours {
			f.addNeighbours(c)
		}
		PREFETCHT1(Mem{Base: f.nextX, Index: f.ahead, Scale: 1})
		if f.backward {
			f.put(c, masked)
			ADDQ(U32(4*packStride), f.inPack)
			PREFETCHT1(Mem{Base: f.nextGrad, Index: f.ahead, Scale: 1})
		}
		ADDQ(Imm(64), f.ahead)
		ADDQ(f.stride, f.at)
	}
	if f.backward {
		return
	}
	for i := range f.result {
		SUBQ(f.stride, f.at)
		f.put(f.result[fusedRows-1-i], masked)
	}
}

// put stores a result.
func (f *fused) put(c VecPhysical, masked bool) {
	if f.streamed && !masked {
		VMOVNTPS(c, f.inMatrix(f.out))
		return
	}
	f.store(c, f.inMatrix(f.out), masked)
}

// blend sets c to what becomes of the current row but for its neighbours. It adds to the sums of the gradients of weights and,
// forward, to top and to the number of dead elements.
func (f *fused) blend(c VecPhysical) {
	VMULPS(f.gate, f.vx, f.t)
	f.choose(f.none, f.t, f.on, f.off, c)
	if f.backward {
		VCMPPS(Imm(notLessEqual), f.above, f.t, K2)
		VMULPS(f.vv, c, c)
		VADDPS(f.vv, f.totals[0], K2, f.totals[0])
		VFMADD231PS(f.vx, f.vv, K2, f.totals[1])
		return
	}
	VFMADD213PS(f.add, f.vx, c)
	f.magnitudes(f.vx, f.t)
	VCMPPS(Imm(1), f.eps, f.t, K2)
	VPADDD(constant("unit", 1), f.count, K2, f.count)
	VMAXPS(f.top, f.t, f.top) // a NaN in t loses
}

// addFigures adds the current row of value to its figures.
func (f *fused) addFigures(masked bool) {
	d := f.deviation
	if masked {
		f.upper(f.vv, f.t)
		VCVTPS2PD(f.half(f.vv), d[0])
		VCVTPS2PD(f.half(f.t), d[1])
	} else {
		VCVTPS2PD(f.here(f.value), d[0])
		VCVTPS2PD(f.here(f.value).Offset(f.bytes/2), d[1])
	}
	for i := range d {
		VSUBPD(f.anchor[i], d[i], d[i])
		VADDPD(d[i], f.sum[i], f.sum[i])
		VFMADD231PD(d[i], d[i], f.square[i])
	}
	VMINPS(f.vv, f.low, f.low)
	VMAXPS(f.vv, f.high, f.high)
}

// addNeighbours adds those of the current row, to the left forward and to the right backward, and backward what blendSums
// needs of those of x to the left.
func (f *fused) addNeighbours(c VecPhysical) {
	step := -4
	if f.backward {
		step = 4
	}
	for i, m := range neighbourMasks[:2] {
		f.loadSelected(f.here(f.value).Offset((i+1)*step), m.k, f.t)
		VFMADD231PS(f.t, f.shares[i], c)
	}
	if !f.backward {
		return
	}
	for i, m := range neighbourMasks[2:] {
		f.loadSelected(f.here(f.x).Offset(-4*(i+1)), m.k, f.t)
		VFMADD231PS(f.t, f.vv, f.totals[2+i])
	}
}
