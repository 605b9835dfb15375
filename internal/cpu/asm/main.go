// Command asm generates the amd64 assembly of the packages in internal/cpu. It is a separate module, so
// that the library doesn't depend on avo. Run it with `go generate ./internal/cpu/...` from the
// repository root.
package main

import (
	"flag"
	"log"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func main() {
	part := flag.String("part", "gemm", "what to generate: gemm, compact, vec, rows or kasmina")
	flag.Parse()
	ConstraintExpr("amd64")
	switch *part {
	case "gemm":
		for _, v := range []isa{avx512, avx2} {
			for _, e := range []elem{f32, f64} {
				tile(v, e)
			}
			dot(v)
			transpose(v)
			copyPanel(v)
			fmaLoop(v)
		}
		tile(avx512, bf16)
		pairCopy()
		pairTranspose()
	case "compact":
		for _, v := range []isa{avx512, avx2} {
			compact(v, "F32", compactF32)
			compact(v, "BF16", compactBF16)
			compact(v, "Q8", compactQ8)
		}
	case "vec":
		for _, v := range []isa{avx512, avx2} {
			expSub(v)
			maximum(v)
			siluMul(v)
			siluMulBackward(v)
		}
	case "rows":
		for _, v := range []isa{avx512, avx2} {
			rows(v)
		}
	case "kasmina":
		for _, v := range []isa{avx512, avx2} {
			figures(v, "inputFigures", true)
			figures(v, "gradientFigures", false)
			for _, streamed := range []bool{false, true} {
				blend(v, false, streamed)
				blend(v, true, streamed)
			}
			blendSums(v)
			moveRows(v, fetching)
			moveRows(v, plain)
			moveRows(v, streaming)
		}
		for _, streamed := range []bool{false, true} {
			blendLearn(avx512, streamed)
			fusedPass(avx512, false, streamed)
			fusedPass(avx512, true, streamed)
		}
		chunkNorms()
		storeFence()
	default:
		log.Fatalf("unknown -part %q", *part)
	}

	Generate()
}

// isa describes an instruction set to the generators: its vector registers and the dimensions of the
// largest GEMM tiles. A tile has mr rows of two vectors each, which must fit in the registers along with
// two vectors of B and a broadcast element of A.
type isa struct {
	name  string
	bytes int
	regs  []VecPhysical
	mr    int
	dotM  int
}

var (
	avx512 = isa{name: "AVX512", bytes: 64, mr: 14, dotM: 4, regs: []VecPhysical{
		Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z8, Z9, Z10, Z11, Z12, Z13, Z14, Z15,
		Z16, Z17, Z18, Z19, Z20, Z21, Z22, Z23, Z24, Z25, Z26, Z27, Z28, Z29, Z30, Z31}}
	avx2 = isa{name: "AVX2", bytes: 32, mr: 6, dotM: 2, regs: []VecPhysical{
		Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9, Y10, Y11, Y12, Y13, Y14, Y15}}
)

// mask returns the register that selects the valid lanes of a partial vector: K1 with AVX-512, and the
// last vector register with AVX2.
func (v isa) mask() Register {
	if v.bytes == 64 {
		return K1
	}
	return v.regs[15]
}

// elem is an element type, with the instructions that depend on it.
type elem struct {
	name      string
	size      int
	one       uint64 // bits of 1.0
	broadcast func(...Op)
	fma       func(...Op) // fma(x, y, z): z += x·y
	mul       func(...Op)
	add       func(...Op)
	dot       func(x, y, z Op) // z += x·y along k, if different from fma
}

var (
	f32 = elem{"F32", 4, 0x3f800000, VBROADCASTSS, VFMADD231PS, VMULPS, VADDPS, nil}
	f64 = elem{"F64", 8, 0x3ff0000000000000, VBROADCASTSD, VFMADD231PD, VMULPD, VADDPD, nil}
	// bf16 is f32, except that each element of A and B is a pair of bfloat16 numbers adjacent along
	// k.
	bf16 = elem{"BF16", 4, 0x3f800000, VBROADCASTSS, VFMADD231PS, VMULPS, VADDPS, dpbf16}
)

// shift returns log2 of the element's size, for converting strides from elements to bytes.
func (e elem) shift() Constant { return U8(uint8(e.size/4 + 1)) }

// setMask makes v.mask select the first count dwords of a vector. It clobbers count, CX and AX.
func (v isa) setMask(count Register) {
	if v.bytes == 64 {
		MOVQ(count, RCX)
		MOVL(U32(1), EAX)
		SHLQ(CL, RAX)
		DECQ(RAX)
		KMOVW(EAX, K1)
		return
	}

	// The table contains eight dwords of ones followed by eight of zeros. A vector that starts count
	// dwords before the zeros is the mask.
	LEAQ(maskTable().Offset(32), RAX)
	SHLQ(U8(2), count)
	SUBQ(count, RAX)
	VMOVUPS(Mem{Base: RAX}, v.mask())
}

const rodata = attr.RODATA | attr.NOPTR

var maskData *Mem

func maskTable() Mem {
	if maskData == nil {
		m := GLOBL("laneMask", rodata)
		for i := range 8 {
			DATA(4*i, U32(0xffffffff))
		}
		for i := range 8 {
			DATA(32+4*i, U32(0))
		}
		maskData = &m
	}

	return *maskData
}

// load loads a vector. If masked is set, it loads only the lanes in v.mask, and zeros elsewhere.
func (v isa) load(src Mem, dst Register, masked bool) {
	switch {
	case !masked:
		VMOVUPS(src, dst)
	case v.bytes == 64:
		VMOVUPS_Z(src, K1, dst)
	default:
		VMASKMOVPS(src, v.mask(), dst)
	}
}

// store stores a vector or, if masked is set, only the lanes in v.mask.
func (v isa) store(src Register, dst Mem, masked bool) {
	switch {
	case !masked:
		VMOVUPS(src, dst)
	case v.bytes == 64:
		VMOVUPS(src, K1, dst)
	default:
		VMASKMOVPS(src, v.mask(), dst)
	}
}

func (v isa) zero(r Register) {
	if v.bytes == 64 {
		VPXORD(r, r, r)
	} else {
		VXORPS(r, r, r)
	}
}
