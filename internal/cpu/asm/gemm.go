package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Offsets of the fields of cpu.gemmTile; the package's tests hold the two together.
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

// fetchSteps is cpu.gemmFetchSteps: every so many steps along k a tile's code fetches a row of C
// and two lines of A.
const fetchSteps = 16

// sweep is where a tile's code keeps how many columns of C are left, where those of B, C and D
// begin, and what it fetches: the next row of C with its stride, and A's lines as in cpu.gemmFetch.
type sweep struct{ n, b, c, d, row, ldc, next, stride, step, left Mem }

// tile generates C = alpha·A·B + beta·C + D for m ≤ mr rows of C, panel after panel of two vectors.
// Every m has its own block of code with one or two vectors a row, so that all of C's tile stays in
// registers. A is read element by element and broadcast, through a row and a column stride, so that
// packed, plain and transposed A serve alike.
func tile(v isa, e elem) {
	lanes := v.bytes / e.size
	TEXT("gemmTile"+v.name+e.name, attr.NOSPLIT, "func(t uintptr)")
	local := AllocLocal(80)
	var at sweep
	for i, m := range []*Mem{&at.n, &at.b, &at.c, &at.d, &at.row, &at.ldc, &at.next,
		&at.stride, &at.step, &at.left} {
		*m = local.Offset(8 * i)
	}
	Load(Param("t"), RDI)
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
	Label("panel")
	DECQ(at.left)
	JGE(LabelRef("fetch"))
	// With nothing left to fetch, a line of the stack is, which costs nothing.
	LEAQ(local, RAX)
	MOVQ(RAX, at.next)
	XORQ(RAX, RAX)
	MOVQ(RAX, at.stride)
	MOVQ(RAX, at.step)
	Label("fetch")
	MOVQ(at.c, RAX)
	MOVQ(RAX, at.row)
	MOVQ(at.n, R8)
	MOVL(U32(2*lanes), EAX)
	CMPQ(R8, RAX)
	CMOVQGT(RAX, R8)
	// The mask covers the last vector: n lanes, or n − lanes when there are two.
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
	// R9 = lanes missing from the last vector's full width, in dwords: zero means that C needs no
	// mask.
	SUBQ(Imm(uint64(v.bytes/4)), R9)
	MOVQ(R9, R13)

	MOVQ(Mem{Base: RDI, Disp: offK}, RAX)
	MOVQ(Mem{Base: RDI, Disp: offRS}, RBX)
	MOVQ(Mem{Base: RDI, Disp: offCS}, RCX)
	MOVQ(at.b, RSI)
	MOVQ(Mem{Base: RDI, Disp: offBS}, RDX)
	SHLQ(e.shift(), RBX)
	SHLQ(e.shift(), RCX)
	SHLQ(e.shift(), RDX)
	// Pointers to A's rows 0, 3, 6, …; the two rows after each are reached by index.
	groups := []GPPhysical{R9, R10, R11, R12, R15}[:(v.mr+2)/3]
	MOVQ(Mem{Base: RDI, Disp: offA}, groups[0])
	for i := 1; i < len(groups); i++ {
		LEAQ(Mem{Base: groups[i-1], Index: RBX, Scale: 2}, groups[i])
		ADDQ(RBX, groups[i])
	}
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

// choose jumps to the block for R8 rows, the largest first: whole tiles are the common case.
func choose(mr, nv int) {
	for m := mr; m > 1; m-- {
		CMPQ(R8, Imm(uint64(m)))
		JE(LabelRef(fmt.Sprintf("tile%dx%d", m, nv)))
	}
	JMP(LabelRef(fmt.Sprintf("tile1x%d", nv)))
}

func tileBlock(v isa, e elem, m, nv int, groups []GPPhysical, at sweep) {
	name := fmt.Sprintf("tile%dx%d", m, nv)
	acc := func(i, j int) VecPhysical { return v.regs[i*nv+j] }
	// With AVX2 the last register is the mask.
	free := v.regs[2*v.mr:]
	bvec, elemA := free[:2], free[2]
	each := func(f func(i, j int)) {
		for i := range m {
			for j := range nv {
				f(i, j)
			}
		}
	}

	Label(name)
	each(func(i, j int) { v.zero(acc(i, j)) })
	MOVQ(at.next, R8)
	Label(name + "fetch")
	MOVQ(at.row, R14)
	for j := 0; j < nv*v.bytes; j += 64 {
		PREFETCHT0(Mem{Base: R14, Disp: j})
	}
	ADDQ(at.ldc, R14)
	MOVQ(R14, at.row)
	PREFETCHT1(Mem{Base: R8})
	MOVQ(at.stride, R14)
	PREFETCHT1(Mem{Base: R8, Index: R14, Scale: 1})
	ADDQ(at.step, R8)
	MOVL(U32(fetchSteps), R14L)
	CMPQ(RAX, R14)
	CMOVQLT(RAX, R14)
	SUBQ(R14, RAX)
	Label(name + "k")
	for j := range nv {
		v.load(Mem{Base: RSI, Disp: j * v.bytes}, bvec[j], j == nv-1)
	}
	ADDQ(RDX, RSI)
	for i := range m {
		a := Mem{Base: groups[i/3]}
		if i%3 > 0 {
			a = a.Idx(RBX, uint8(i%3))
		}
		e.broadcast(a, elemA)
		for j := range nv {
			if e.dot != nil {
				e.dot(bvec[j], elemA, acc(i, j))
				continue
			}
			e.fma(bvec[j], elemA, acc(i, j))
		}
		if i%3 == 2 || i == m-1 {
			ADDQ(RCX, groups[i/3])
		}
	}
	DECQ(R14)
	JNZ(LabelRef(name + "k"))
	TESTQ(RAX, RAX)
	JNZ(LabelRef(name + "fetch"))

	MOVQ(at.c, R8)
	MOVQ(at.ldc, R9)
	// Most products have alpha = 1 and beta = 0 or 1.
	if e.size == 4 {
		CMPL(Mem{Base: RDI, Disp: offAlpha}, Imm(e.one))
	} else {
		MOVQ(Imm(e.one), RAX)
		CMPQ(Mem{Base: RDI, Disp: offAlpha}, RAX)
	}
	JE(LabelRef(name + "beta"))
	e.broadcast(Mem{Base: RDI, Disp: offAlpha}, bvec[0])
	each(func(i, j int) { e.mul(bvec[0], acc(i, j), acc(i, j)) })

	Label(name + "beta")
	beta := Mem{Base: RDI, Disp: offAlpha + e.size}
	if e.size == 4 {
		MOVL(beta, EAX)
		ADDL(EAX, EAX)
	} else {
		MOVQ(beta, RAX)
		ADDQ(RAX, RAX)
	}
	JZ(LabelRef(name + "d"))
	e.broadcast(beta, bvec[0])
	MOVQ(R8, R10)
	edges(name+"C", func(masked bool) {
		v.eachOfTile(m, nv, masked, R10, R9, func(i, j int, c Mem, masked bool) {
			v.load(c, bvec[1], masked)
			e.fma(bvec[0], bvec[1], acc(i, j))
		})
	})
	Label(name + "d")
	MOVQ(at.d, R10)
	TESTQ(R10, R10)
	JZ(LabelRef(name + "store"))
	MOVQ(Mem{Base: RDI, Disp: offLDD}, R11)
	SHLQ(e.shift(), R11)
	edges(name+"D", func(masked bool) {
		v.eachOfTile(m, nv, masked, R10, R11, func(i, j int, d Mem, masked bool) {
			v.load(d, bvec[1], masked)
			e.add(bvec[1], acc(i, j), acc(i, j))
		})
	})
	Label(name + "store")
	edges(name+"S", func(masked bool) {
		v.eachOfTile(m, nv, masked, R8, R9, func(i, j int, c Mem, masked bool) {
			v.store(acc(i, j), c, masked)
		})
	})
	JMP(LabelRef("next"))
}

// edges emits body for tiles whose last vectors are whole, and masked for others, which R13 ≠ 0
// tells.
func edges(name string, body func(masked bool)) {
	TESTQ(R13, R13)
	JNZ(LabelRef(name + "masked"))
	body(false)
	JMP(LabelRef(name + "end"))
	Label(name + "masked")
	body(true)
	Label(name + "end")
}

// eachOfTile calls f for each vector of a tile in a matrix at base with a stride in bytes, and
// moves base along.
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

// dot generates the same tile for few rows when B is transposed: C[i,j] = alpha·Σ A[i,·]·B[j,·] +
// beta·C[i,j], with both rows contiguous, m ≤ dotM and n ≤ 4. Nothing needs packing, which matters
// when each element of B is used m times only. A lane sums every lanes-th term; lanes are added at
// the end.
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
	// Rows of B past the last are read as the last one again, and not stored.
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

func dotBlock(v isa, e elem, m int, a, b []GPPhysical) {
	name := fmt.Sprintf("dot%d", m)
	acc := func(i, j int) VecPhysical { return v.regs[4*i+j] }
	free := v.regs[4*v.dotM:]
	avec, bvec := free[:m], free[v.dotM]
	step := func(masked bool) {
		for i := range m {
			v.load(Mem{Base: a[i], Index: R12, Scale: 1}, avec[i], masked)
		}
		for j := range 4 {
			v.load(Mem{Base: b[j], Index: R12, Scale: 1}, bvec, masked)
			for i := range m {
				e.fma(bvec, avec[i], acc(i, j))
			}
		}
	}
	Label(name)
	for i := range 4 * m {
		v.zero(v.regs[i])
	}
	CMPQ(R12, RAX)
	JE(LabelRef(name + "tail"))
	Label(name + "k")
	step(false)
	ADDQ(Imm(uint64(v.bytes)), R12)
	CMPQ(R12, RAX)
	JNE(LabelRef(name + "k"))
	Label(name + "tail")
	TESTQ(R13, R13)
	JZ(LabelRef(name + "sum"))
	step(true)

	Label(name + "sum")
	// Add a zmm's upper half to its lower, then pairs across: lane j of row i's xmm becomes the sum
	// of acc(i, j). The upper registers exist as zmm only, short of AVX-512VL.
	if v.bytes == 64 {
		for i := range 4 * m {
			VSHUFF64X2(Imm(0x4e), v.regs[i], v.regs[i], bvec)
			VADDPS(bvec, v.regs[i], v.regs[i])
		}
	}
	for i := range m {
		y := func(j int) VecPhysical { return acc(i, j).AsY().(VecPhysical) }
		VHADDPS(y(1), y(0), y(0))
		VHADDPS(y(3), y(2), y(2))
		VHADDPS(y(2), y(0), y(0))
		VEXTRACTF128(Imm(1), y(0), y(1).AsX())
		VADDPS(y(1).AsX(), y(0).AsX(), y(0).AsX())
	}
	// Row 0 needs its other three registers no more.
	mask, alpha, old := v.regs[1].AsX(), v.regs[2].AsX(), v.regs[3].AsX()
	MOVQ(Mem{Base: RDI, Disp: offN}, RCX)
	LEAQ(maskTable().Offset(32), RAX)
	SHLQ(U8(2), RCX)
	SUBQ(RCX, RAX)
	VMOVUPS(Mem{Base: RAX}, mask)
	VBROADCASTSS(Mem{Base: RDI, Disp: offAlpha}, alpha)
	for i := range m {
		VMULPS(alpha, acc(i, 0).AsX(), acc(i, 0).AsX())
	}
	MOVQ(Mem{Base: RDI, Disp: offC}, R8)
	MOVQ(Mem{Base: RDI, Disp: offLDC}, R9)
	SHLQ(e.shift(), R9)
	beta := Mem{Base: RDI, Disp: offAlpha + e.size}
	MOVL(beta, EAX)
	ADDL(EAX, EAX)
	JZ(LabelRef(name + "store"))
	VBROADCASTSS(beta, alpha)
	MOVQ(R8, R10)
	for i := range m {
		VMASKMOVPS(Mem{Base: R10}, mask, old)
		VFMADD231PS(alpha, old, acc(i, 0).AsX())
		if i < m-1 {
			ADDQ(R9, R10)
		}
	}
	Label(name + "store")
	for i := range m {
		VMASKMOVPS(acc(i, 0).AsX(), mask, Mem{Base: R8})
		if i < m-1 {
			ADDQ(R9, R8)
		}
	}
	VZEROUPPER()
	RET()
}

// fmaLoop generates n rounds of twelve independent multiply-adds: the ceiling that a product is
// measured against.
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
