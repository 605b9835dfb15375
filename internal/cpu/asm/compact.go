package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Offsets of the fields of gemm.strip. The tests of package gemm verify that they agree.
const (
	offStripM, offStripK   = 0, 8
	offStripX, offStripXS  = 16, 24
	offStripB              = 32
	offStripC, offStripCS  = 40, 48
	compactLanes           = 32 // columns of a panel of compact weights
	compactBlock           = 32 // elements along k that share a scale
	compactAhead           = 2048
	compactAheadOfTwo      = 1024             // in each of two panels
	compactStepsPerPass    = 4                // steps along k that are unrolled for 8-bit weights
	compactRowBytes        = 4 * compactLanes // of a row of B, except with 8-bit weights
	compactScaleBytes      = 2 * compactLanes
	compactBlockBytes      = compactScaleBytes + compactBlock*compactLanes
	compactWidestRowsAVX2  = 2 // with at most as many rows, AVX2 computes all columns of a panel at once
	compactPrefetchedBytes = 64
)

// compactRows returns the maximum number of rows of x that a kernel for compact weights takes.
func (v isa) compactRows() int {
	if v.bytes == 64 {
		return 8
	}
	return 6
}

// A compactKernel generates C += X·B for a panel of compact weights B and m rows of X and C.
//
// The sums of all rows and of the columns of a panel, or with AVX2 of half a panel, stay in registers.
// Weights are widened to float32 in registers, once for all rows.
type compactKernel struct {
	isa
	name  string
	m, nv int // rows, and vectors per row
	half  int // the half of the columns to compute, if nv vectors hold only half a panel
}

func (c *compactKernel) label(s string) string { return fmt.Sprintf("%s%dx%d", s, c.m, c.half) }

// acc returns the register that accumulates vector j of row i.
func (c *compactKernel) acc(i, j int) VecPhysical { return c.regs[i*c.nv+j] }

// free returns a register that accumulates nothing.
func (c *compactKernel) free(i int) VecPhysical { return c.regs[c.m*c.nv+i] }

// row returns the element of row i of X that is the given number of bytes after the current one.
func (c *compactKernel) row(i, bytes int) Mem {
	a := Mem{Base: []GPPhysical{R9, R10, R11}[i/3], Disp: bytes}
	if i%3 > 0 {
		a = a.Idx(RBX, uint8(i%3))
	}
	return a
}

// advance moves to later elements of X.
func (c *compactKernel) advance(bytes int) {
	for i := 0; i < c.m; i += 3 {
		ADDQ(Imm(uint64(bytes)), []GPPhysical{R9, R10, R11}[i/3])
	}
}

// eachOfC calls f with every vector of C.
func (c *compactKernel) eachOfC(f func(i, j int, m Mem)) {
	MOVQ(RDX, R12)
	for i := range c.m {
		for j := range c.nv {
			f(i, j, Mem{Base: R12, Disp: (c.half*c.nv + j) * c.bytes})
		}
		if i < c.m-1 {
			ADDQ(R8, R12)
		}
	}
}

// begin loads the operands. RAX becomes the number of elements along k.
func (c *compactKernel) begin() {
	for _, f := range []struct {
		off int
		to  GPPhysical
	}{{offStripK, RAX}, {offStripX, R9}, {offStripXS, RBX}, {offStripB, RSI}, {offStripC, RDX},
		{offStripCS, R8}} {
		MOVQ(Mem{Base: RDI, Disp: f.off}, f.to)
	}
	for i := 3; i < c.m; i += 3 {
		before, at := []GPPhysical{R9, R10}[i/3-1], []GPPhysical{R10, R11}[i/3-1]
		LEAQ(Mem{Base: before, Index: RBX, Scale: 2}, at)
		ADDQ(RBX, at)
	}
}

// halves returns the number of parts into which the columns of a panel are divided.
func (c *compactKernel) halves() int { return compactLanes * 4 / c.bytes / c.nv }

// prefetch fetches weights while the given number of bytes of B is processed. A kernel that processes the two
// halves of the columns one after the other finds B in the cache the second time. To use the memory all the
// time, it fetches the bytes that follow B, and distributes the fetches over both halves.
func (c *compactKernel) prefetch(bytes int) {
	if c.halves() == 1 {
		for at := 0; at < bytes; at += compactPrefetchedBytes {
			PREFETCHT0(Mem{Base: RSI, Disp: compactAhead + at})
		}
		return
	}

	for at := 0; at < bytes/2; at += compactPrefetchedBytes {
		PREFETCHT1(Mem{Base: R15, Disp: at})
	}
	ADDQ(Imm(uint64(bytes/2)), R15)
}

// end sets a register to the end of B, which has RAX elements along k.
func (c *compactKernel) end(to GPPhysical) {
	MOVQ(RAX, to)
	switch c.name {
	case "F32":
		SHLQ(U8(7), to)
	case "BF16":
		SHLQ(U8(6), to)
	default:
		SHLQ(U8(5), to) // 34 bytes per element
		LEAQ(Mem{Base: to, Index: RAX, Scale: 2}, to)
	}
	ADDQ(RSI, to)
}

// compact generates the kernel for one type of weights: a block of code for each number of rows.
func compact(v isa, name string, body func(*compactKernel)) {
	TEXT("compact"+name+v.name, attr.NOSPLIT, "func(s uintptr)")
	Load(Param("s"), RDI)
	MOVQ(Mem{Base: RDI, Disp: offStripM}, RAX)
	for m := v.compactRows(); m > 1; m-- {
		CMPQ(RAX, Imm(uint64(m)))
		JE(LabelRef(fmt.Sprintf("rows%dx0", m)))
	}
	if name == "BF16" {
		CMPQ(RAX, Imm(0))
		JE(LabelRef("twoPanels"))
	}
	for m := 1; m <= v.compactRows(); m++ {
		c := &compactKernel{isa: v, name: name, m: m, nv: compactLanes * 4 / v.bytes}
		if v.bytes == 32 && m > compactWidestRowsAVX2 {
			c.nv = 2
		}
		for c.half = range c.halves() {
			Label(c.label("rows"))
			c.begin()
			if c.halves() > 1 && c.half == 0 {
				c.end(R15)
			}
			body(c)
		}
		VZEROUPPER()
		RET()
	}
	if name == "BF16" {
		twoPanelsBF16(v)
	}
}

// twoPanelsBF16 generates the products of one row of X and two consecutive panels of weights in bfloat16. Twice as many
// sums hide the latency of the additions, and memory delivers two streams faster than one. The sums are those of the
// kernel for one panel.
func twoPanelsBF16(v isa) {
	c := &compactKernel{isa: v, name: "BF16", m: 1, nv: 2 * compactLanes * 4 / v.bytes}
	Label("twoPanels")
	c.begin()
	second := R14
	c.end(second) // the second panel follows the first
	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(m, c.acc(i, j)) })
	mask, x, w, part := c.regs[len(c.regs)-1], []VecPhysical{c.free(0), c.free(1)}, c.free(2), c.free(3)
	VMOVUPS(constant("highHalf", 0xffff0000), mask)

	Label("twoPanelsK")
	for at := 0; at < compactRowBytes; at += compactPrefetchedBytes {
		PREFETCHT0(Mem{Base: RSI, Disp: compactAheadOfTwo + at})
		PREFETCHT0(Mem{Base: second, Disp: compactAheadOfTwo + at})
	}
	VBROADCASTSS(c.row(0, 0), x[0])
	VBROADCASTSS(c.row(0, 4), x[1])
	for j := range c.nv {
		b := Mem{Base: RSI, Disp: j * c.bytes}
		if j >= c.nv/2 {
			b = Mem{Base: second, Disp: (j - c.nv/2) * c.bytes}
		}
		VMOVUPS(b, w)
		VPSLLD(Imm(16), w, part)
		VFMADD231PS(part, x[0], c.acc(0, j))
		if c.bytes == 64 {
			VPANDD(mask, w, part)
		} else {
			VPAND(mask, w, part)
		}
		VFMADD231PS(part, x[1], c.acc(0, j))
	}
	ADDQ(Imm(compactRowBytes), RSI)
	ADDQ(Imm(compactRowBytes), second)
	c.advance(8)
	SUBQ(Imm(2), RAX)
	JG(LabelRef("twoPanelsK"))
	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(c.acc(i, j), m) })
	VZEROUPPER()
	RET()
}

// compactF32 generates the products of weights in float32. A row of B holds the weights of an element.
func compactF32(c *compactKernel) {
	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(m, c.acc(i, j)) })
	Label(c.label("k"))
	c.prefetch(compactRowBytes)

	x, w := c.free(0), c.free(1)
	b := func(j int) Mem { return Mem{Base: RSI, Disp: (c.half*c.nv + j) * c.bytes} }
	if c.m == 1 {
		VBROADCASTSS(c.row(0, 0), x)
		for j := range c.nv {
			VFMADD231PS(b(j), x, c.acc(0, j))
		}
	} else if c.nv == 4 {
		for i := range c.m {
			VBROADCASTSS(c.row(i, 0), c.free(1+i))
		}
		for j := range c.nv {
			VMOVUPS(b(j), x)
			for i := range c.m {
				VFMADD231PS(x, c.free(1+i), c.acc(i, j))
			}
		}
	} else {
		second := c.free(2)
		VMOVUPS(b(0), w)
		VMOVUPS(b(1), second)
		for i := range c.m {
			VBROADCASTSS(c.row(i, 0), x)
			VFMADD231PS(w, x, c.acc(i, 0))
			VFMADD231PS(second, x, c.acc(i, 1))
		}
	}

	ADDQ(Imm(compactRowBytes), RSI)
	c.advance(4)
	DECQ(RAX)
	JNZ(LabelRef(c.label("k")))
	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(c.acc(i, j), m) })
}

// compactBF16 generates the products of weights in bfloat16. Dword c of a row of B holds the weights of
// elements 2k and 2k+1 for column c. A bfloat16 number is the upper half of a float32.
func compactBF16(c *compactKernel) {
	at := c.half * c.nv * c.bytes
	and := func(a, b, dst Op) { VPAND(a, b, dst) }
	if c.bytes == 64 {
		and = func(a, b, dst Op) { VPANDD(a, b, dst) }
	}

	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(m, c.acc(i, j)) })
	mask := c.regs[len(c.regs)-1]
	VMOVUPS(constant("highHalf", 0xffff0000), mask)
	Label(c.label("k"))
	c.prefetch(compactRowBytes)

	if c.nv == 4 {
		// Few rows: the elements of X stay in registers while vectors of B pass.
		x := func(i, k int) VecPhysical { return c.free(2*i + k) }
		w, part := c.free(2*c.m), c.free(2*c.m+1)
		for i := range c.m {
			VBROADCASTSS(c.row(i, 0), x(i, 0))
			VBROADCASTSS(c.row(i, 4), x(i, 1))
		}
		for j := range c.nv {
			VMOVUPS(Mem{Base: RSI, Disp: at + j*c.bytes}, w)
			VPSLLD(Imm(16), w, part)
			for i := range c.m {
				VFMADD231PS(part, x(i, 0), c.acc(i, j))
			}
			and(mask, w, part)
			for i := range c.m {
				VFMADD231PS(part, x(i, 1), c.acc(i, j))
			}
		}
	} else {
		w, x := []VecPhysical{c.free(0), c.free(1)}, c.free(2)
		for k := range 2 {
			for j := range c.nv {
				b := Mem{Base: RSI, Disp: at + j*c.bytes}
				if k == 0 {
					VMOVUPS(b, w[j])
					VPSLLD(Imm(16), w[j], w[j])
				} else {
					and(b, mask, w[j])
				}
			}
			for i := range c.m {
				VBROADCASTSS(c.row(i, 4*k), x)
				for j := range c.nv {
					VFMADD231PS(w[j], x, c.acc(i, j))
				}
			}
		}
	}

	ADDQ(Imm(compactRowBytes), RSI)
	c.advance(8)
	SUBQ(Imm(2), RAX)
	JG(LabelRef(c.label("k")))
	c.eachOfC(func(i, j int, m Mem) { VMOVUPS(c.acc(i, j), m) })
}

// compactQ8 generates the products of 8-bit weights. A block of B holds the scales of its columns in
// float16, followed by a row of bytes for each of its elements along k. The sums of a block are scaled
// once.
func compactQ8(c *compactKernel) {
	column := c.half * c.nv * c.bytes / 4 // the first one
	Label(c.label("block"))
	for i := range c.m {
		for j := range c.nv {
			c.zero(c.acc(i, j))
		}
	}

	MOVQ(RSI, R13) // the scales
	ADDQ(Imm(compactScaleBytes), RSI)
	MOVL(U32(compactBlock/compactStepsPerPass), R14L)
	Label(c.label("k"))
	c.prefetch(compactStepsPerPass * compactLanes)

	for k := range compactStepsPerPass {
		b := func(j int) Mem {
			return Mem{Base: RSI, Disp: k*compactLanes + column + j*c.bytes/4}
		}
		if c.nv == 4 {
			x, w := func(i int) VecPhysical { return c.free(i) }, func(j int) VecPhysical {
				return c.free(c.m + j)
			}
			for i := range c.m {
				VBROADCASTSS(c.row(i, 4*k), x(i))
			}
			for j := range c.nv {
				VPMOVSXBD(b(j), w(j))
				VCVTDQ2PS(w(j), w(j))
				for i := range c.m {
					VFMADD231PS(w(j), x(i), c.acc(i, j))
				}
			}
			continue
		}

		w, x := []VecPhysical{c.free(0), c.free(1)}, c.free(2)
		for j := range c.nv {
			VPMOVSXBD(b(j), w[j])
			VCVTDQ2PS(w[j], w[j])
		}
		for i := range c.m {
			VBROADCASTSS(c.row(i, 4*k), x)
			for j := range c.nv {
				VFMADD231PS(w[j], x, c.acc(i, j))
			}
		}
	}

	ADDQ(Imm(compactStepsPerPass*compactLanes), RSI)
	c.advance(4 * compactStepsPerPass)
	DECL(R14L)
	JNZ(LabelRef(c.label("k")))

	for j := range c.nv {
		VCVTPH2PS(Mem{Base: R13, Disp: 2*column + j*c.bytes/2}, c.free(j))
	}
	c.eachOfC(func(i, j int, m Mem) {
		VFMADD213PS(m, c.free(j), c.acc(i, j))
		VMOVUPS(c.acc(i, j), m)
	})
	SUBQ(Imm(compactBlock), RAX)
	JG(LabelRef(c.label("block")))
}
