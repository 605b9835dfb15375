package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Offsets of the fields of gemm.tile. The tests of package gemm verify that they agree.
const (
	offM, offN, offK   = 0, 8, 16
	offA, offRS, offCS = 24, 48, 56
	offB, offBS        = 64, 88
	offC, offLDC       = 96, 120
	offD, offLDD       = 128, 152
	offPanel           = 160
	offNext            = 168
	offStride, offStep = 192, 200
	offJump, offLeft   = 208, 216
	offAlpha           = 224
)

// fetchSteps is gemm.gemmFetchSteps. After every fetchSteps steps along k, a tile's code prefetches a row
// of C and two lines of A.
const fetchSteps = 16

// sweep is the stack memory of a tile's code. It holds the number of remaining columns of C, pointers to
// the current columns of B, C and D, and the prefetch state: the next row of C with its stride, and the
// lines of A described at gemm.fetch.
type sweep struct {
	local                                          Mem // contains all other fields
	n, b, c, d, row, ldc, next, stride, step, left Mem
}

// tile generates C = alpha·A·B + beta·C + D for m ≤ mr rows of C, one panel of two vectors after another.
//
// There is a separate block of code for every m, with one or two vectors per row, so that the whole tile
// of C stays in registers. Elements of A are read individually, through a row and a column stride, and
// broadcast; the same code therefore serves packed, plain and transposed A.
func tile(v isa, e elem) {
	lanes := v.bytes / e.size
	TEXT("gemmTile"+v.name+e.name, attr.NOSPLIT, "func(t uintptr)")
	at := newSweep()
	Load(Param("t"), RDI)
	at.begin(e)
	Label("panel")
	at.lines()
	MOVQ(at.c, RAX)
	MOVQ(RAX, at.row)
	MOVQ(at.n, R8)
	MOVL(U32(2*lanes), EAX)
	CMPQ(R8, RAX)
	CMOVQGT(RAX, R8)
	v.maskOfLast(lanes, e)
	groups := at.operands(v, e)
	CMPQ(R8, Imm(uint64(lanes)))
	MOVQ(Mem{Base: RDI, Disp: offM}, R8)
	JLE(LabelRef("narrow"))
	choose(v.mr, 2)
	Label("narrow")
	choose(v.mr, 1)
	for nv := 2; nv >= 1; nv-- {
		for m := v.mr; m >= 1; m-- {
			tileBlock(v, e, m, nv, groups, at)
		}
	}

	Label("next")
	SUBQ(Imm(uint64(2*lanes)), at.n)
	JLE(LabelRef("done"))
	MOVQ(Mem{Base: RDI, Disp: offPanel}, RAX)
	SHLQ(e.shift(), RAX)
	ADDQ(RAX, at.b)
	MOVQ(Mem{Base: RDI, Disp: offJump}, RAX)
	ADDQ(RAX, at.next)
	ADDQ(Imm(uint64(2*v.bytes)), at.c)
	CMPQ(at.d, Imm(0))
	JE(LabelRef("panel"))
	ADDQ(Imm(uint64(2*v.bytes)), at.d)
	JMP(LabelRef("panel"))
	Label("done")
	VZEROUPPER()
	RET()
}

// newSweep allocates the memory of a sweep.
func newSweep() (at sweep) {
	at.local = AllocLocal(80)
	for i, m := range []*Mem{&at.n, &at.b, &at.c, &at.d, &at.row, &at.ldc, &at.next,
		&at.stride, &at.step, &at.left} {
		*m = at.local.Offset(8 * i)
	}
	return at
}

// begin copies the fields that change from panel to panel from the tile at RDI, and computes the stride
// of C in bytes.
func (at sweep) begin(e elem) {
	for _, f := range []struct {
		field int
		to    Mem
	}{{offN, at.n}, {offB, at.b}, {offC, at.c}, {offD, at.d},
		{offNext, at.next}, {offStride, at.stride}, {offStep, at.step}, {offLeft, at.left}} {
		MOVQ(Mem{Base: RDI, Disp: f.field}, RAX)
		MOVQ(RAX, f.to)
	}

	MOVQ(Mem{Base: RDI, Disp: offLDC}, RAX)
	SHLQ(e.shift(), RAX)
	MOVQ(RAX, at.ldc)
}

// lines counts down the panels that prefetch lines of A. After the last, it redirects the prefetches to a
// line of the stack, which is free.
func (at sweep) lines() {
	DECQ(at.left)
	JGE(LabelRef("fetch"))
	LEAQ(at.local, RAX)
	MOVQ(RAX, at.next)
	XORQ(RAX, RAX)
	MOVQ(RAX, at.stride)
	MOVQ(RAX, at.step)
	Label("fetch")
}

// maskOfLast sets the mask for the last vector of R8 columns: all columns if there is one vector, or the
// columns after the first vector if there are two. It sets R13 to minus the number of missing lanes, in
// dwords, so that zero means that C needs no mask.
func (v isa) maskOfLast(lanes int, e elem) {
	MOVQ(R8, R9)
	CMPQ(R8, Imm(uint64(lanes)))
	JLE(LabelRef("mask"))
	SUBQ(Imm(uint64(lanes)), R9)
	Label("mask")
	if e.size == 8 {
		ADDQ(R9, R9)
	}

	MOVQ(R9, R13)
	v.setMask(R13)
	SUBQ(Imm(uint64(v.bytes/4)), R9)
	MOVQ(R9, R13)
}

// operands loads the number of steps along k into RAX, the strides of A into RBX and RCX, and B with its
// stride into RSI and RDX. Strides are in bytes. It returns pointers to rows 0, 3, 6, … of A; the two
// rows that follow each are addressed with an index.
func (at sweep) operands(v isa, e elem) []GPPhysical {
	MOVQ(Mem{Base: RDI, Disp: offK}, RAX)
	MOVQ(Mem{Base: RDI, Disp: offRS}, RBX)
	MOVQ(Mem{Base: RDI, Disp: offCS}, RCX)
	MOVQ(at.b, RSI)
	MOVQ(Mem{Base: RDI, Disp: offBS}, RDX)
	SHLQ(e.shift(), RBX)
	SHLQ(e.shift(), RCX)
	SHLQ(e.shift(), RDX)
	groups := []GPPhysical{R9, R10, R11, R12, R15}[:(v.mr+2)/3]
	MOVQ(Mem{Base: RDI, Disp: offA}, groups[0])
	for i := 1; i < len(groups); i++ {
		LEAQ(Mem{Base: groups[i-1], Index: RBX, Scale: 2}, groups[i])
		ADDQ(RBX, groups[i])
	}

	return groups
}

// choose jumps to the block for R8 rows. It tests the largest block first, since whole tiles are the
// common case.
func choose(mr, nv int) {
	for m := mr; m > 1; m-- {
		CMPQ(R8, Imm(uint64(m)))
		JE(LabelRef(fmt.Sprintf("tile%dx%d", m, nv)))
	}
	JMP(LabelRef(fmt.Sprintf("tile1x%d", nv)))
}

// block generates the code for tiles of m rows and nv vectors.
type block struct {
	isa
	elem
	label  string
	m, nv  int
	groups []GPPhysical // pointers to groups of rows of A
	at     sweep
	bvec   []VecPhysical // a row of B; free once the products are summed
	elemA  VecPhysical
}

func tileBlock(v isa, e elem, m, nv int, groups []GPPhysical, at sweep) {
	free := v.regs[2*v.mr:] // with AVX2 the last register is the mask
	t := &block{isa: v, elem: e, label: fmt.Sprintf("tile%dx%d", m, nv), m: m, nv: nv,
		groups: groups, at: at, bvec: free[:2], elemA: free[2]}
	Label(t.label)
	t.products()
	MOVQ(at.c, R8)
	MOVQ(at.ldc, R9)
	t.scale()
	t.addC()
	t.addD()
	edges(t.label+"S", func(masked bool) {
		v.eachOfTile(m, nv, masked, R8, R9, func(i, j int, c Mem, masked bool) {
			v.store(t.acc(i, j), c, masked)
		})
	})
	JMP(LabelRef("next"))
}

// acc returns the register that accumulates vector j of row i.
func (t *block) acc(i, j int) VecPhysical { return t.regs[i*t.nv+j] }

// each calls f for every vector of the tile.
func (t *block) each(f func(i, j int)) {
	for i := range t.m {
		for j := range t.nv {
			f(i, j)
		}
	}
}

// products accumulates A·B along k in the registers. Every fetchSteps steps it prefetches data for the
// next tile.
func (t *block) products() {
	t.each(func(i, j int) { t.zero(t.acc(i, j)) })
	MOVQ(t.at.next, R8)
	Label(t.label + "fetch")
	MOVQ(t.at.row, R14)
	for j := 0; j < t.nv*t.bytes; j += 64 {
		PREFETCHT0(Mem{Base: R14, Disp: j})
	}

	ADDQ(t.at.ldc, R14)
	MOVQ(R14, t.at.row)
	PREFETCHT1(Mem{Base: R8})
	MOVQ(t.at.stride, R14)
	PREFETCHT1(Mem{Base: R8, Index: R14, Scale: 1})
	ADDQ(t.at.step, R8)
	MOVL(U32(fetchSteps), R14L)
	CMPQ(RAX, R14)
	CMOVQLT(RAX, R14)
	SUBQ(R14, RAX)
	Label(t.label + "k")
	t.step()
	DECQ(R14)
	JNZ(LabelRef(t.label + "k"))
	TESTQ(RAX, RAX)
	JNZ(LabelRef(t.label + "fetch"))
}

// step adds the products of one step along k.
func (t *block) step() {
	for j := range t.nv {
		t.load(Mem{Base: RSI, Disp: j * t.bytes}, t.bvec[j], j == t.nv-1)
	}

	ADDQ(RDX, RSI)
	for i := range t.m {
		a := Mem{Base: t.groups[i/3]}
		if i%3 > 0 {
			a = a.Idx(RBX, uint8(i%3))
		}
		t.broadcast(a, t.elemA)
		for j := range t.nv {
			if t.dot != nil {
				t.dot(t.bvec[j], t.elemA, t.acc(i, j))
				continue
			}
			t.fma(t.bvec[j], t.elemA, t.acc(i, j))
		}
		if i%3 == 2 || i == t.m-1 {
			ADDQ(RCX, t.groups[i/3])
		}
	}
}

// scale multiplies by alpha, with a fast path for alpha = 1, the most common case.
func (t *block) scale() {
	if t.size == 4 {
		CMPL(Mem{Base: RDI, Disp: offAlpha}, Imm(t.one))
	} else {
		MOVQ(Imm(t.one), RAX)
		CMPQ(Mem{Base: RDI, Disp: offAlpha}, RAX)
	}
	JE(LabelRef(t.label + "beta"))
	t.broadcast(Mem{Base: RDI, Disp: offAlpha}, t.bvec[0])
	t.each(func(i, j int) { t.mul(t.bvec[0], t.acc(i, j), t.acc(i, j)) })
	Label(t.label + "beta")
}

// addC adds beta·C, unless beta is 0.
func (t *block) addC() {
	beta := Mem{Base: RDI, Disp: offAlpha + t.size}
	if t.size == 4 {
		MOVL(beta, EAX)
		ADDL(EAX, EAX)
	} else {
		MOVQ(beta, RAX)
		ADDQ(RAX, RAX)
	}

	JZ(LabelRef(t.label + "d"))
	t.broadcast(beta, t.bvec[0])
	MOVQ(R8, R10)
	edges(t.label+"C", func(masked bool) {
		t.eachOfTile(t.m, t.nv, masked, R10, R9, func(i, j int, c Mem, masked bool) {
			t.load(c, t.bvec[1], masked)
			t.fma(t.bvec[0], t.bvec[1], t.acc(i, j))
		})
	})

	Label(t.label + "d")
}

// addD adds D if it is present.
func (t *block) addD() {
	MOVQ(t.at.d, R10)
	TESTQ(R10, R10)
	JZ(LabelRef(t.label + "store"))
	MOVQ(Mem{Base: RDI, Disp: offLDD}, R11)
	SHLQ(t.shift(), R11)
	edges(t.label+"D", func(masked bool) {
		t.eachOfTile(t.m, t.nv, masked, R10, R11, func(i, j int, d Mem, masked bool) {
			t.load(d, t.bvec[1], masked)
			t.add(t.bvec[1], t.acc(i, j), t.acc(i, j))
		})
	})

	Label(t.label + "store")
}

// edges emits body twice: unmasked for tiles with full vectors, and masked for the remaining tiles, where
// R13 is not zero.
func edges(name string, body func(masked bool)) {
	TESTQ(R13, R13)
	JNZ(LabelRef(name + "masked"))
	body(false)
	JMP(LabelRef(name + "end"))
	Label(name + "masked")
	body(true)
	Label(name + "end")
}

// eachOfTile calls f for each vector of a tile in a matrix that starts at base and has the given stride
// in bytes. The emitted code advances base.
func (v isa) eachOfTile(m, nv int, masked bool, base, stride Register,
	f func(i, j int, at Mem, masked bool)) {
	for i := range m {
		for j := range nv {
			f(i, j, Mem{Base: base, Disp: j * v.bytes}, masked && j == nv-1)
		}
		if i < m-1 {
			ADDQ(stride, base)
		}
	}
}

// dot generates a similar tile with few rows for a transposed B: C[i,j] = alpha·Σ A[i,·]·B[j,·] +
// beta·C[i,j], with contiguous rows, m ≤ dotM and n ≤ 4. It needs no packing, which would be expensive
// given that each element of B is used only m times. Each lane sums every lanes-th term; the lanes are
// added at the end.
func dot(v isa) {
	e := f32
	lanes := v.bytes / e.size
	TEXT("gemmDot"+v.name+e.name, attr.NOSPLIT, "func(t uintptr)")
	Load(Param("t"), RDI)
	MOVQ(Mem{Base: RDI, Disp: offK}, R13)
	ANDQ(Imm(uint64(lanes-1)), R13)
	MOVQ(R13, R8)
	v.setMask(R8)

	a := []GPPhysical{RBX, RCX, RDX, RSI}[:v.dotM]
	b := []GPPhysical{R8, R9, R10, R11}
	MOVQ(Mem{Base: RDI, Disp: offRS}, RAX)
	SHLQ(e.shift(), RAX)
	MOVQ(Mem{Base: RDI, Disp: offA}, a[0])
	for i := 1; i < v.dotM; i++ {
		LEAQ(Mem{Base: a[i-1], Index: RAX, Scale: 1}, a[i])
	}

	// Rows after the last row of B are replaced by the last row, and their results are not stored.
	MOVQ(Mem{Base: RDI, Disp: offBS}, RAX)
	SHLQ(e.shift(), RAX)
	MOVQ(Mem{Base: RDI, Disp: offB}, b[0])
	MOVQ(Mem{Base: RDI, Disp: offN}, R12)
	for j := 1; j < 4; j++ {
		LEAQ(Mem{Base: b[j-1], Index: RAX, Scale: 1}, b[j])
		CMPQ(R12, Imm(uint64(j)))
		CMOVQLE(b[j-1], b[j])
	}

	MOVQ(Mem{Base: RDI, Disp: offK}, RAX)
	SUBQ(R13, RAX)
	SHLQ(e.shift(), RAX) // bytes in whole vectors
	XORQ(R12, R12)
	for m := v.dotM; m > 1; m-- {
		CMPQ(Mem{Base: RDI, Disp: offM}, Imm(uint64(m)))
		JE(LabelRef(fmt.Sprintf("dot%d", m)))
	}

	for m := 1; m <= v.dotM; m++ {
		dotBlock(v, e, m, a, b)
	}
}

// dotRows generates the dot products of m rows of A with four rows of B.
type dotRows struct {
	isa
	elem
	label string
	m     int
	a, b  []GPPhysical
	avec  []VecPhysical
	bvec  VecPhysical
}

func dotBlock(v isa, e elem, m int, a, b []GPPhysical) {
	free := v.regs[4*v.dotM:]
	d := &dotRows{isa: v, elem: e, label: fmt.Sprintf("dot%d", m), m: m, a: a, b: b,
		avec: free[:m], bvec: free[v.dotM]}
	Label(d.label)
	for i := range 4 * m {
		v.zero(v.regs[i])
	}

	CMPQ(R12, RAX)
	JE(LabelRef(d.label + "tail"))
	Label(d.label + "k")
	d.step(false)
	ADDQ(Imm(uint64(v.bytes)), R12)
	CMPQ(R12, RAX)
	JNE(LabelRef(d.label + "k"))
	Label(d.label + "tail")
	TESTQ(R13, R13)
	JZ(LabelRef(d.label + "sum"))
	d.step(true)

	Label(d.label + "sum")
	d.sumLanes()
	d.finish()
	VZEROUPPER()
	RET()
}

// acc returns the register that accumulates the product of row i of A and row j of B.
func (d *dotRows) acc(i, j int) VecPhysical { return d.regs[4*i+j] }

// step adds the products of one vector of each row.
func (d *dotRows) step(masked bool) {
	for i := range d.m {
		d.load(Mem{Base: d.a[i], Index: R12, Scale: 1}, d.avec[i], masked)
	}
	for j := range 4 {
		d.load(Mem{Base: d.b[j], Index: R12, Scale: 1}, d.bvec, masked)
		for i := range d.m {
			d.fma(d.bvec, d.avec[i], d.acc(i, j))
		}
	}
}

// sumLanes adds the upper half of each ZMM register to its lower half, then adds lanes pairwise across
// registers: lane j of row i's XMM register becomes the sum of acc(i, j). Without AVX-512VL, the upper 16
// registers are accessible only as ZMM.
func (d *dotRows) sumLanes() {
	if d.bytes == 64 {
		for i := range 4 * d.m {
			VSHUFF64X2(Imm(0x4e), d.regs[i], d.regs[i], d.bvec)
			VADDPS(d.bvec, d.regs[i], d.regs[i])
		}
	}

	for i := range d.m {
		y := func(j int) VecPhysical { return d.acc(i, j).AsY().(VecPhysical) }
		VHADDPS(y(1), y(0), y(0))
		VHADDPS(y(3), y(2), y(2))
		VHADDPS(y(2), y(0), y(0))
		VEXTRACTF128(Imm(1), y(0), y(1).AsX())
		VADDPS(y(1).AsX(), y(0).AsX(), y(0).AsX())
	}
}

// finish multiplies the sums by alpha, adds beta·C and stores the result. It reuses three registers that
// row 0 no longer needs.
func (d *dotRows) finish() {
	mask, alpha, old := d.regs[1].AsX(), d.regs[2].AsX(), d.regs[3].AsX()
	MOVQ(Mem{Base: RDI, Disp: offN}, RCX)
	LEAQ(maskTable().Offset(32), RAX)
	SHLQ(U8(2), RCX)
	SUBQ(RCX, RAX)
	VMOVUPS(Mem{Base: RAX}, mask)
	VBROADCASTSS(Mem{Base: RDI, Disp: offAlpha}, alpha)
	for i := range d.m {
		VMULPS(alpha, d.acc(i, 0).AsX(), d.acc(i, 0).AsX())
	}

	MOVQ(Mem{Base: RDI, Disp: offC}, R8)
	MOVQ(Mem{Base: RDI, Disp: offLDC}, R9)
	SHLQ(d.shift(), R9)
	beta := Mem{Base: RDI, Disp: offAlpha + d.size}
	MOVL(beta, EAX)
	ADDL(EAX, EAX)
	JZ(LabelRef(d.label + "store"))
	VBROADCASTSS(beta, alpha)
	MOVQ(R8, R10)
	for i := range d.m {
		VMASKMOVPS(Mem{Base: R10}, mask, old)
		VFMADD231PS(alpha, old, d.acc(i, 0).AsX())
		if i < d.m-1 {
			ADDQ(R9, R10)
		}
	}

	Label(d.label + "store")
	for i := range d.m {
		VMASKMOVPS(d.acc(i, 0).AsX(), mask, Mem{Base: R8})
		if i < d.m-1 {
			ADDQ(R9, R8)
		}
	}
}

// fmaLoop generates n rounds of twelve independent multiply-adds, which measure the peak performance that
// products are compared with.
func fmaLoop(v isa) {
	TEXT("fmaLoop"+v.name, attr.NOSPLIT, "func(n int)")
	Load(Param("n"), RAX)
	for _, r := range v.regs[:14] {
		v.zero(r)
	}

	Label("loop")
	for _, r := range v.regs[:12] {
		VFMADD231PS(v.regs[12], v.regs[13], r)
	}

	DECQ(RAX)
	JNZ(LabelRef("loop"))
	VZEROUPPER()
	RET()
}
