package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Go's assembler doesn't support AVX512-BF16, so these instructions are emitted as bytes. See Intel,
// "Software Developer's Manual", volume 2, EVEX encoding.

// evex emits dst = op(b, a) for three ZMM registers and an opcode in map 0F38. The mandatory prefix pp is
// 2 for F3 and 3 for F2.
func evex(pp, opcode byte, a, b, dst VecPhysical) {
	d, v, m := number(dst), number(b), number(a)
	not := func(bit byte) byte { return ^bit & 1 }
	emit(0x62,
		not(d>>3)<<7|not(m>>4)<<6|not(m>>3)<<5|not(d>>4)<<4|2,
		(^v&15)<<3|1<<2|pp,
		2<<5|not(v>>4)<<3,
		opcode,
		3<<6|(d&7)<<3|m&7)
}

func number(r VecPhysical) byte { return byte(r.PhysicalIndex()) }

func emit(code ...byte) {
	for _, b := range code {
		Instruction(&ir.Instruction{Opcode: "BYTE", Operands: []Op{U8(b)}})
	}
}

// dpbf16 emits dst += a₀·b₀ + a₁·b₁ for the bfloat16 pairs in the dwords of a and b (VDPBF16PS).
func dpbf16(a, b, dst Op) {
	evex(2, 0x52, a.(VecPhysical), b.(VecPhysical), dst.(VecPhysical))
}

// toBF16 converts the 16 floats of low, followed by those in high, to bfloat16, rounded to nearest even
// (VCVTNE2PS2BF16).
func toBF16(low, high, dst VecPhysical) { evex(3, 0x72, low, high, dst) }

// pairCopy generates the packing of vertically adjacent rows. Dword c of row r of dst is the pair of
// elements c of rows 2r and 2r+1 of src. width is at most two vectors. Strides are in bytes.
func pairCopy() {
	v := avx512
	lanes := uint64(v.bytes / 4)
	TEXT("pairCopy"+v.name, attr.NOSPLIT,
		"func(dst *byte, dstStride int, src *byte, srcStride, rows, width int)")
	panelParams()
	Load(Param("width"), R9)
	VMOVUPS(interleave(), Z31)
	MOVQ(R9, R10)
	CMPQ(R9, Imm(lanes))
	JLE(LabelRef("mask"))
	SUBQ(Imm(lanes), R10)
	Label("mask")
	v.setMask(R10)
	CMPQ(R9, Imm(lanes))
	JLE(LabelRef("narrow"))
	loop := func(name string, nv int) {
		Label(name)
		for j := range nv {
			masked := j == nv-1
			v.load(Mem{Base: RSI, Disp: j * v.bytes}, v.regs[2*j], masked)
			v.load(Mem{Base: RSI, Index: RBX, Scale: 1, Disp: j * v.bytes}, v.regs[2*j+1], masked)
		}
		LEAQ(Mem{Base: RSI, Index: RBX, Scale: 2}, RSI)
		for j := range nv {
			toBF16(v.regs[2*j], v.regs[2*j+1], v.regs[4])
			VPERMW(v.regs[4], Z31, v.regs[4])
			VMOVUPS(v.regs[4], Mem{Base: RDI, Disp: j * v.bytes})
		}
		ADDQ(RDX, RDI)
		DECQ(R8)
		JNZ(LabelRef(name))
		VZEROUPPER()
		RET()
	}

	loop("wide", 2)
	loop("narrow", 1)
}

// interleave returns the VPERMW indices that pair words i and 16+i in dword i.
func interleave() Mem {
	m := GLOBL("interleave", rodata)
	for i := range 16 {
		DATA(4*i, U32(uint32(i|(16+i)<<16)))
	}
	return m
}

// pairTranspose generates the packing of horizontally adjacent elements. Dword r of row c of dst is the
// pair of elements 2c and 2c+1 of row r of src. It proceeds in squares, with at most one vector of rows.
// A missing last element counts as zero. Strides are in bytes. Rows of dst are always whole vectors; the
// lanes after the last row repeat it.
func pairTranspose() {
	v := avx512
	lanes := v.bytes / 4
	TEXT("pairTranspose"+v.name, attr.NOSPLIT,
		"func(dst *byte, dstStride int, src *byte, srcStride, rows, cols int)")
	panelParams()
	Load(Param("cols"), R9)
	square := func(masked bool) {
		MOVQ(RSI, R10)
		for i := range lanes {
			low, high := v.regs[i], v.regs[lanes+i]
			if masked {
				VMOVUPS_Z(Mem{Base: R10}, K2, low)
				VMOVUPS_Z(Mem{Base: R10, Disp: v.bytes}, K3, high)
			} else {
				VMOVUPS(Mem{Base: R10}, low)
				VMOVUPS(Mem{Base: R10, Disp: v.bytes}, high)
			}
			toBF16(low, high, low)
			if i < lanes-1 {
				LEAQ(Mem{Base: R10, Index: RBX, Scale: 1}, R11)
				CMPQ(R8, Imm(uint64(i+1)))
				CMOVQGT(R11, R10)
			}
		}
		for c, r := range v.shuffle() {
			VMOVUPS(r, Mem{Base: RDI})
			if masked {
				SUBQ(Imm(2), R9)
				JLE(LabelRef("done"))
			}
			if c < lanes-1 || !masked {
				ADDQ(RDX, RDI)
			}
		}
	}

	SUBQ(Imm(uint64(2*lanes)), R9)
	JLT(LabelRef("tail"))
	Label("loop")
	square(false)
	ADDQ(Imm(uint64(2*v.bytes)), RSI)
	SUBQ(Imm(uint64(2*lanes)), R9)
	JGE(LabelRef("loop"))
	Label("tail")
	ADDQ(Imm(uint64(2*lanes)), R9)
	JZ(LabelRef("done"))
	// K2 and K3 select the remaining elements in the first and the second vector.
	MOVQ(R9, RCX)
	MOVL(U32(1), EAX)
	SHLQ(CL, RAX)
	DECQ(RAX)
	KMOVW(EAX, K2)
	SHRQ(Imm(16), RAX)
	KMOVW(EAX, K3)
	square(true)
	Label("done")
	VZEROUPPER()
	RET()
}
