package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// panelParams loads the parameters common to all packing functions: dst and its stride, src and its
// stride, and rows.
func panelParams() {
	Load(Param("dst"), RDI)
	Load(Param("dstStride"), RDX)
	Load(Param("src"), RSI)
	Load(Param("srcStride"), RBX)
	Load(Param("rows"), R8)
}

// copyPanel generates a copy of rows × width dwords with strides in bytes, where width is at most two
// vectors.
func copyPanel(v isa) {
	lanes := v.bytes / 4
	TEXT("packCopy"+v.name, attr.NOSPLIT,
		"func(dst *byte, dstStride int, src *byte, srcStride, rows, width int)")
	panelParams()
	Load(Param("width"), R9)
	MOVQ(R9, R10)
	CMPQ(R9, Imm(uint64(lanes)))
	JLE(LabelRef("mask"))
	SUBQ(Imm(uint64(lanes)), R10)
	Label("mask")
	v.setMask(R10)
	CMPQ(R9, Imm(uint64(2*lanes)))
	JE(LabelRef("full"))
	CMPQ(R9, Imm(uint64(lanes)))
	JLE(LabelRef("narrow"))
	loop := func(name string, nv int, masked bool) {
		Label(name)
		for j := range nv {
			v.load(Mem{Base: RSI, Disp: j * v.bytes}, v.regs[j], masked && j == nv-1)
		}
		ADDQ(RBX, RSI)
		for j := range nv {
			// Store the whole vector: packed panels have room for it, and masked stores are slow.
			VMOVUPS(v.regs[j], Mem{Base: RDI, Disp: j * v.bytes})
		}
		ADDQ(RDX, RDI)
		DECQ(R8)
		JNZ(LabelRef(name))
		VZEROUPPER()
		RET()
	}

	loop("wide", 2, true)
	loop("narrow", 1, true)
	loop("full", 2, false)
}

// transpose generates dst[c·dstStride + r] = src[r·srcStride + c] for rows ≤ lanes and any number of
// columns, in squares of lanes × lanes. Strides are in bytes. Rows of dst are always whole vectors; the
// lanes after the last row repeat it.
func transpose(v isa) {
	lanes := v.bytes / 4
	TEXT("packTranspose"+v.name, attr.NOSPLIT,
		"func(dst *byte, dstStride int, src *byte, srcStride, rows, cols int)")
	panelParams()
	Load(Param("cols"), R9)
	square := func(masked bool) {
		MOVQ(RSI, R10)
		for i := range lanes {
			v.load(Mem{Base: R10}, v.regs[i], masked)
			if i < lanes-1 {
				LEAQ(Mem{Base: R10, Index: RBX, Scale: 1}, R11)
				CMPQ(R8, Imm(uint64(i+1)))
				CMOVQGT(R11, R10)
			}
		}
		for c, r := range v.shuffle() {
			VMOVUPS(r, Mem{Base: RDI})
			if masked {
				DECQ(R9)
				JZ(LabelRef("done"))
			}
			if c < lanes-1 || !masked {
				ADDQ(RDX, RDI)
			}
		}
	}

	SUBQ(Imm(uint64(lanes)), R9)
	JLT(LabelRef("tail"))
	Label("loop")
	square(false)
	ADDQ(Imm(uint64(v.bytes)), RSI)
	SUBQ(Imm(uint64(lanes)), R9)
	JGE(LabelRef("loop"))
	Label("tail")
	ADDQ(Imm(uint64(lanes)), R9)
	JZ(LabelRef("done"))
	MOVQ(R9, R10)
	v.setMask(R10)
	square(true)
	Label("done")
	VZEROUPPER()
	RET()
}

// shuffle transposes the square in the first half of the registers and returns the registers of its
// columns in order. It interleaves pairs and then groups of four rows within 128-bit lanes, and then
// transposes the lanes as blocks.
func (v isa) shuffle() []VecPhysical {
	n := v.bytes / 4
	rows, tmp := v.regs[:n], v.regs[n:2*n]
	for i := 0; i < n; i += 2 {
		VUNPCKLPS(rows[i+1], rows[i], tmp[i])
		VUNPCKHPS(rows[i+1], rows[i], tmp[i+1])
	}

	// u(g, c), lane L contains rows 4g to 4g+3 of column 4L+c.
	u := func(g, c int) VecPhysical { return rows[4*g+c] }
	for g := range n / 4 {
		t := tmp[4*g : 4*g+4]
		VUNPCKLPD(t[2], t[0], u(g, 0))
		VUNPCKHPD(t[2], t[0], u(g, 1))
		VUNPCKLPD(t[3], t[1], u(g, 2))
		VUNPCKHPD(t[3], t[1], u(g, 3))
	}

	cols := make([]VecPhysical, n)
	for c := range 4 {
		if n == 8 {
			VPERM2F128(Imm(0x20), u(1, c), u(0, c), tmp[c])
			VPERM2F128(Imm(0x31), u(1, c), u(0, c), tmp[4+c])
			cols[c], cols[4+c] = tmp[c], tmp[4+c]
			continue
		}
		VSHUFF32X4(Imm(0x44), u(1, c), u(0, c), tmp[0])
		VSHUFF32X4(Imm(0x44), u(3, c), u(2, c), tmp[1])
		VSHUFF32X4(Imm(0xee), u(1, c), u(0, c), tmp[2])
		VSHUFF32X4(Imm(0xee), u(3, c), u(2, c), tmp[3])
		VSHUFF32X4(Imm(0x88), tmp[1], tmp[0], u(0, c))
		VSHUFF32X4(Imm(0xdd), tmp[1], tmp[0], u(1, c))
		VSHUFF32X4(Imm(0x88), tmp[3], tmp[2], u(2, c))
		VSHUFF32X4(Imm(0xdd), tmp[3], tmp[2], u(3, c))
		for l := range 4 {
			cols[4*l+c] = u(l, c)
		}
	}

	return cols
}
