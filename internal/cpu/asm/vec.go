package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// consts are float32 constants broadcast to whole vectors in read-only data, created on first use.
var consts = map[string]Mem{}

func constant(name string, bits uint32) Mem {
	m, ok := consts[name]
	if !ok {
		m = GLOBL(name, rodata)
		for i := range 16 {
			DATA(4*i, U32(bits))
		}
		consts[name] = m
	}
	return m
}

const (
	oneBits     = 0x3f800000
	signBits    = 0x80000000
	minusInf    = 0xff800000
	expHigh     = 0x42b20000 // 89: exp is infinite from 88.73 on
	expLow      = 0xc2d10000 // −104.5: exp is zero below −103.98
	log2eBits   = 0x3fb8aa3b
	ln2Bits     = 0x3f317218 // log 2 rounded to float32
	ln2RestBits = 0xb102e308 // log 2 − ln2Bits
)

// expPoly contains the coefficients of 1 + r + Σ c[i]·r^(6−i), starting with r⁶. It is the best
// approximation of exp(r) for |r| ≤ log(2)/2, with a relative error of 3.8e-9, found by Lawson's
// iteration.
var expPoly = []uint32{0x3ab5121a, 0x3c091cf1, 0x3d2aac79, 0x3e2aaa49, 0x3efffffe, oneBits, oneBits}

var expNames = []string{"exp6", "exp5", "exp4", "exp3", "exp2", "one", "one"}

// expRange holds the limits of exp's argument in registers. VMINPS and VMAXPS preserve a NaN only in the
// second operand, and only the second operand may be in memory.
type expRange struct{ high, low VecPhysical }

func (v isa) expRange(high, low VecPhysical) expRange {
	VMOVUPS(constant("expHigh", expHigh), high)
	VMOVUPS(constant("expLow", expLow), low)
	return expRange{high, low}
}

// exp emits p = exp(x), clobbering x, n and tmp. It uses exp(x) = 2ⁿ·exp(r) with n = round(x·log2 e) and
// r = x − n·log 2. Two multiply-adds compute r accurately to the last bit.
func (v isa) exp(lim expRange, x, p, n, tmp VecPhysical) {
	VMINPS(x, lim.high, x)
	VMAXPS(x, lim.low, x)
	VMULPS(constant("log2e", log2eBits), x, n)
	if v.bytes == 64 {
		VRNDSCALEPS(Imm(8), n, n)
	} else {
		VROUNDPS(Imm(8), n, n)
	}

	VFNMADD231PS(constant("ln2", ln2Bits), n, x)
	VFNMADD231PS(constant("ln2Rest", ln2RestBits), n, x)
	VMOVUPS(constant(expNames[0], expPoly[0]), p)
	for i := 1; i < len(expPoly); i++ {
		VFMADD213PS(constant(expNames[i], expPoly[i]), x, p)
	}

	if v.bytes == 64 {
		VSCALEFPS(n, p, p)
		return
	}

	// 2ⁿ is split into two factors, since n exceeds the exponent range of normal numbers.
	VCVTPS2DQ(n, n)
	VPSRAD(Imm(1), n, tmp)
	VPSUBD(tmp, n, n)
	for _, half := range []VecPhysical{n, tmp} {
		VPADDD(constant("bias", 127), half, half)
		VPSLLD(Imm(23), half, half)
		VMULPS(half, p, p)
	}
}

// sigmoid emits s = σ(a) = 1/(1+exp(−a)) and rest = 1 − σ(a), without overflow or cancellation: with e
// = exp(−|a|), the larger is 1/(1+e) and the smaller e/(1+e). It preserves a and clobbers n and tmp.
func (v isa) sigmoid(lim expRange, a, s, rest, n, tmp VecPhysical) {
	if v.bytes == 64 {
		VPORD(constant("sign", signBits), a, tmp)
	} else {
		VORPS(constant("sign", signBits), a, tmp)
	}

	e := rest
	v.exp(lim, tmp, e, n, s)
	VMOVUPS(constant("one", oneBits), n)
	VADDPS(n, e, s)
	VDIVPS(s, n, tmp)
	VMULPS(tmp, e, n)
	// tmp = 1/(1+e) and n = e/(1+e). For a < 0, s is n.
	if v.bytes == 64 {
		VPXORD(s, s, s)
		VCMPPS(Imm(1), s, a, K2)
		VMOVUPS(tmp, s)
		VMOVAPS(n, K2, s)
		VMOVUPS(n, rest)
		VMOVAPS(tmp, K2, rest)
	} else {
		VBLENDVPS(a, n, tmp, s)
		VBLENDVPS(a, tmp, n, rest)
	}
}

// vectors emits body in a loop over whole vectors, and again, masked, for the remaining elements. The
// emitted code advances pointers. R8 contains the number of elements.
func (v isa) vectors(pointers []GPPhysical, body func(masked bool)) {
	lanes := v.bytes / 4
	SUBQ(Imm(uint64(lanes)), R8)
	JLT(LabelRef("tail"))
	Label("loop")
	body(false)
	for _, p := range pointers {
		ADDQ(Imm(uint64(v.bytes)), p)
	}

	SUBQ(Imm(uint64(lanes)), R8)
	JGE(LabelRef("loop"))
	Label("tail")
	ADDQ(Imm(uint64(lanes)), R8)
	JZ(LabelRef("done"))
	v.setMask(R8)
	body(true)
	Label("done")
}

// reduce combines the lanes of regs[0] into one with op, folding halves. It clobbers regs[1].
func (v isa) reduce(op func(...Op)) {
	a, b := v.regs[0], v.regs[1]
	if v.bytes == 64 {
		VEXTRACTF64X4(Imm(1), a, b.AsY())
		op(b.AsY(), a.AsY(), a.AsY())
	}

	VEXTRACTF128(Imm(1), a.AsY(), b.AsX())
	op(b.AsX(), a.AsX(), a.AsX())
	VPERMILPS(Imm(0x0e), a.AsX(), b.AsX())
	op(b.AsX(), a.AsX(), a.AsX())
	VPERMILPS(Imm(1), a.AsX(), b.AsX())
	op(b.AsX(), a.AsX(), a.AsX())
}

// expSub generates dst = exp(src − shift), returning the sum of dst. Each lane sums every lanes-th
// element.
func expSub(v isa) {
	TEXT("expSub"+v.name, attr.NOSPLIT, "func(dst, src *float32, n int, shift float32) float32")
	Load(Param("dst"), RDI)
	Load(Param("src"), RSI)
	Load(Param("n"), R8)
	shift, err := Param("shift").Resolve()
	if err != nil {
		panic(err)
	}

	r := v.regs
	sum, x, p, n, tmp, sub := r[0], r[1], r[2], r[3], r[4], r[5]
	v.zero(sum)
	VBROADCASTSS(shift.Addr, sub)
	lim := v.expRange(r[6], r[7])
	v.vectors([]GPPhysical{RDI, RSI}, func(masked bool) {
		v.load(Mem{Base: RSI}, x, masked)
		VSUBPS(sub, x, x)
		v.exp(lim, x, p, n, tmp)
		v.store(p, Mem{Base: RDI}, masked)
		switch {
		case masked && v.bytes == 64:
			VADDPS(p, sum, K1, sum)
		case masked:
			VANDPS(v.mask(), p, p)
			VADDPS(p, sum, sum)
		default:
			VADDPS(p, sum, sum)
		}
	})

	v.reduce(VADDPS)
	VZEROUPPER()
	Store(sum.AsX(), ReturnIndex(0))
	RET()
}

// maximum generates the maximum of n elements.
func maximum(v isa) {
	TEXT("maximum"+v.name, attr.NOSPLIT, "func(src *float32, n int) float32")
	Load(Param("src"), RSI)
	Load(Param("n"), R8)
	best, x := v.regs[0], v.regs[1]
	VMOVUPS(constant("minusInf", minusInf), best)
	v.vectors([]GPPhysical{RSI}, func(masked bool) {
		v.load(Mem{Base: RSI}, x, masked)
		switch {
		case masked && v.bytes == 64:
			VMAXPS(x, best, K1, best)
		case masked:
			VBLENDVPS(v.mask(), x, best, x)
			VMAXPS(x, best, best)
		default:
			VMAXPS(x, best, best)
		}
	})

	v.reduce(VMAXPS)
	VZEROUPPER()
	Store(best.AsX(), ReturnIndex(0))
	RET()
}

// siluMul generates h = a·σ(a)·b.
func siluMul(v isa) {
	TEXT("siluMul"+v.name, attr.NOSPLIT, "func(h, a, b *float32, n int)")
	Load(Param("h"), RDI)
	Load(Param("a"), RSI)
	Load(Param("b"), RDX)
	Load(Param("n"), R8)
	r := v.regs
	a, b, s := r[0], r[1], r[2]
	lim := v.expRange(r[6], r[7])
	v.vectors([]GPPhysical{RDI, RSI, RDX}, func(masked bool) {
		v.load(Mem{Base: RSI}, a, masked)
		v.load(Mem{Base: RDX}, b, masked)
		v.sigmoid(lim, a, s, r[3], r[4], r[5])
		VMULPS(a, s, s)
		VMULPS(b, s, s)
		v.store(s, Mem{Base: RDI}, masked)
	})

	VZEROUPPER()
	RET()
}

// siluMulBackward generates h = silu(a)·b, db = g·silu(a) and da = g·b·σ(a)·(1 + a·(1−σ(a))) for
// the gradient g of h.
func siluMulBackward(v isa) {
	TEXT("siluMulBackward"+v.name, attr.NOSPLIT, "func(h, da, db, dh, a, b *float32, n int)")
	h, da, db, dh, pa, pb := RDI, RBX, RDX, R9, RSI, R10
	Load(Param("h"), h)
	Load(Param("da"), da)
	Load(Param("db"), db)
	Load(Param("dh"), dh)
	Load(Param("a"), pa)
	Load(Param("b"), pb)
	Load(Param("n"), R8)
	r := v.regs
	a, b, s, g, silu, d := r[0], r[1], r[2], r[3], r[4], r[5]
	lim := v.expRange(r[6], r[7])
	v.vectors([]GPPhysical{h, da, db, dh, pa, pb}, func(masked bool) {
		v.load(Mem{Base: pa}, a, masked)
		v.sigmoid(lim, a, s, d, r[3], r[4])
		v.load(Mem{Base: pb}, b, masked)
		v.load(Mem{Base: dh}, g, masked)
		VMULPS(s, a, silu)
		VFMADD213PS(constant("one", oneBits), a, d)
		VMULPS(s, d, d)
		VMULPS(b, d, d)
		VMULPS(g, d, d)
		v.store(d, Mem{Base: da}, masked)
		VMULPS(silu, g, g)
		v.store(g, Mem{Base: db}, masked)
		VMULPS(b, silu, silu)
		v.store(silu, Mem{Base: h}, masked)
	})

	VZEROUPPER()
	RET()
}
