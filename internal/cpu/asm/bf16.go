package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Go's assembler does not know AVX512-BF16, so its instructions are written as bytes. (Intel, "Software Developer's Manual",
// volume 2: EVEX encoding.)

// evex emits dst = op(b, a) for three ZMM registers and an opcode of the map 0F38, with the mandatory prefix pp: 2 for F3, 3 for
// F2.
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

// dpbf16 emits dst += a₀·b₀ + a₁·b₁ for the pairs of bfloat16 in the dwords of a and b (VDPBF16PS).
func dpbf16(a, b, dst Op) {
	evex(2, 0x52, a.(VecPhysical), b.(VecPhysical), dst.(VecPhysical))
}

// toBF16 emits dst = the 16 floats of low and then those of high as bfloat16, rounded to nearest even (VCVTNE2PS2BF16).
func toBF16(low, high, dst VecPhysical) { evex(3, 0x72, low, high, dst) }

// pairs generates the conversions of float32 to dwords of two bfloat16, the first in the lower half: pairRow of neighbours in
// one row, pairRows of elements that stand one below the other. n is the number of dwords.
func pairs() {
	v := avx512
	TEXT("pairRow"+v.name, attr.NOSPLIT, "func(dst *uint32, src *float32, n int)")
	Load(Param("dst"), RDI)
	Load(Param("src"), RSI)
	Load(Param("n"), R8)
	// A whole vector of dwords is two of floats; a masked one has its pairs in one or both.
	Label("loop")
	CMPQ(R8, Imm(16))
	JLT(LabelRef("tail"))
	VMOVUPS(Mem{Base: RSI}, Z0)
	VMOVUPS(Mem{Base: RSI, Disp: 64}, Z1)
	toBF16(Z0, Z1, Z2)
	VMOVUPS(Z2, Mem{Base: RDI})
	ADDQ(Imm(128), RSI)
	ADDQ(Imm(64), RDI)
	SUBQ(Imm(16), R8)
	JMP(LabelRef("loop"))
	Label("tail")
	TESTQ(R8, R8)
	JZ(LabelRef("done"))
	MOVQ(R8, R9)
	v.setMask(R9) // K1: the dwords to write
	VXORPS(Z0.AsY(), Z0.AsY(), Z0.AsY())
	VXORPS(Z1.AsY(), Z1.AsY(), Z1.AsY())
	MOVL(U32(1), EAX) // K2: 2·n floats, the first 16 of them here, K3 the rest
	MOVQ(R8, RCX)
	ADDQ(RCX, RCX)
	SHLQ(CL, RAX)
	DECQ(RAX)
	KMOVW(EAX, K2)
	SHRQ(Imm(16), RAX)
	KMOVW(EAX, K3)
	VMOVUPS_Z(Mem{Base: RSI}, K2, Z0)
	VMOVUPS_Z(Mem{Base: RSI, Disp: 64}, K3, Z1)
	toBF16(Z0, Z1, Z2)
	VMOVUPS(Z2, K1, Mem{Base: RDI})
	Label("done")
	VZEROUPPER()
	RET()

	TEXT("pairRows"+v.name, attr.NOSPLIT, "func(dst *uint32, first, second *float32, n int)")
	Load(Param("dst"), RDI)
	Load(Param("first"), RSI)
	Load(Param("second"), RDX)
	Load(Param("n"), R8)
	v.vectors([]GPPhysical{RDI, RSI, RDX}, func(masked bool) {
		v.load(Mem{Base: RSI}, Z0, masked)
		v.load(Mem{Base: RDX}, Z1, masked)
		toBF16(Z0, Z1, Z2)
		VPMOVZXWD(Y2, Z0)
		VEXTRACTI64X4(Imm(1), Z2, Y3)
		VPMOVZXWD(Y3, Z1)
		VPSLLD(Imm(16), Z1, Z1)
		VPORD(Z1, Z0, Z0)
		v.store(Z0, Mem{Base: RDI}, masked)
	})
	VZEROUPPER()
	RET()
}
