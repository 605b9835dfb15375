package main

import (
	"strings"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// over generates a function of n elements. pointers lists the names of its float32 slices, and
// scalars the names of the parameters that follow n. body receives the current vector of each slice
// and the scalars broadcast to all lanes, and may use all registers numbered used or higher.
func over(v isa, name, pointers, scalars, result string, start func(used int),
	body func(p []Mem, s []VecPhysical, used int, masked bool), end func()) {
	names, numbers := strings.Fields(pointers), strings.Fields(scalars)
	signature := "func(" + strings.Join(names, ", ") + " *float32, n int"
	if len(numbers) > 0 {
		signature += ", " + strings.Join(numbers, ", ") + " float32"
	}

	TEXT(name+v.name, attr.NOSPLIT, signature+") "+result)
	registers := []GPPhysical{RDI, RSI, RDX, R9, RBX, R10}[:len(names)]
	memory := make([]Mem, len(names))
	for i, p := range names {
		Load(Param(p), registers[i])
		memory[i] = Mem{Base: registers[i]}
	}

	Load(Param("n"), R8)
	for i, s := range numbers {
		c, err := Param(s).Resolve()
		if err != nil {
			panic(err)
		}
		VBROADCASTSS(c.Addr, v.regs[i])
	}

	if start != nil {
		start(len(numbers))
	}

	v.vectors(registers, func(masked bool) {
		body(memory, v.regs[:len(numbers)], len(numbers), masked)
	})
	if end != nil {
		end()
	}

	VZEROUPPER()
	RET()
}

// half returns the register for the lower half of r.
func (v isa) half(r VecPhysical) VecPhysical {
	if v.bytes == 64 {
		return r.AsY().(VecPhysical)
	}
	return r.AsX().(VecPhysical)
}

// upper moves the upper half of src to the lower half of dst.
func (v isa) upper(src, dst VecPhysical) {
	if v.bytes == 64 {
		VEXTRACTF64X4(Imm(1), src, v.half(dst))
		return
	}
	VEXTRACTF128(Imm(1), src, v.half(dst))
}

// addProducts adds a·b in float64 to the lanes of low and high. It clobbers a, b and the temporaries.
func (v isa) addProducts(a, b, low, high, t1, t2, t3 VecPhysical) {
	v.upper(a, t1)
	v.upper(b, t2)
	VCVTPS2PD(v.half(a), a)
	VCVTPS2PD(v.half(b), b)
	VFMADD231PD(a, b, low)
	VCVTPS2PD(v.half(t1), t1)
	VCVTPS2PD(v.half(t2), t3)
	VFMADD231PD(t1, t3, high)
}

// reduce64 sums the float64 lanes of a and b into the first lane of a.
func (v isa) reduce64(a, b VecPhysical) {
	VADDPD(b, a, a)
	if v.bytes == 64 {
		VEXTRACTF64X4(Imm(1), a, b.AsY())
		VADDPD(b.AsY(), a.AsY(), a.AsY())
	}
	VEXTRACTF128(Imm(1), a.AsY(), b.AsX())
	VADDPD(b.AsX(), a.AsX(), a.AsX())
	VPERMILPD(Imm(1), a.AsX(), b.AsX())
	VADDPD(b.AsX(), a.AsX(), a.AsX())
}

// rows generates the kernels that process one row or one block of elements.
func rows(v isa) {
	sums(v)
	products(v)
	elements(v)
	adamW(v)
}

// sums generates the kernels that return a sum over their elements.
func sums(v isa) {
	r := v.regs
	zero := func(registers ...VecPhysical) func(int) {
		return func(int) {
			for _, z := range registers {
				v.zero(z)
			}
		}
	}

	low, high := r[14], r[13]
	// Σ x² in float64.
	over(v, "sumSquares", "x", "", "float64", zero(low, high),
		func(p []Mem, _ []VecPhysical, _ int, masked bool) {
			v.load(p[0], r[0], masked)
			VMOVUPS(r[0], r[1])
			v.addProducts(r[0], r[1], low, high, r[2], r[3], r[4])
		}, func() {
			v.reduce64(low, high)
			Store(low.AsX(), ReturnIndex(0))
		})

	// Σ x in float64.
	over(v, "sum64", "x", "", "float64", zero(low, high),
		func(p []Mem, _ []VecPhysical, _ int, masked bool) {
			v.load(p[0], r[0], masked)
			v.upper(r[0], r[1])
			VCVTPS2PD(v.half(r[0]), r[0])
			VADDPD(r[0], low, low)
			VCVTPS2PD(v.half(r[1]), r[1])
			VADDPD(r[1], high, high)
		}, func() {
			v.reduce64(low, high)
			Store(low.AsX(), ReturnIndex(0))
		})

	// Σ (g·w)·x in float64.
	over(v, "dot3", "grad w x", "", "float64", zero(low, high),
		func(p []Mem, _ []VecPhysical, _ int, masked bool) {
			v.load(p[0], r[0], masked)
			v.load(p[1], r[1], masked)
			VMULPS(r[1], r[0], r[0])
			v.load(p[2], r[1], masked)
			v.addProducts(r[0], r[1], low, high, r[2], r[3], r[4])
		}, func() {
			v.reduce64(low, high)
			Store(low.AsX(), ReturnIndex(0))
		})

	// Σ a·b.
	over(v, "dotProduct", "a b", "", "float32", zero(r[0]),
		func(p []Mem, _ []VecPhysical, _ int, masked bool) {
			v.load(p[0], r[2], masked)
			v.load(p[1], r[3], masked)
			VFMADD231PS(r[2], r[3], r[0])
		}, func() {
			v.reduce(VADDPS)
			Store(r[0].AsX(), ReturnIndex(0))
		})

	// Σ (x − x), which is 0 if all of x is finite and NaN otherwise.
	over(v, "finite", "x", "", "float32", zero(r[0]),
		func(p []Mem, _ []VecPhysical, _ int, masked bool) {
			v.load(p[0], r[2], masked)
			VSUBPS(r[2], r[2], r[2])
			VADDPS(r[2], r[0], r[0])
		}, func() {
			v.reduce(VADDPS)
			Store(r[0].AsX(), ReturnIndex(0))
		})
}

// products generates the kernels that multiply several vectors.
func products(v isa) {
	r := v.regs
	// y = x·s·w.
	over(v, "mulScaled", "y x w", "s", "", nil, func(p []Mem, s []VecPhysical, u int, masked bool) {
		v.load(p[1], r[u], masked)
		v.load(p[2], r[u+1], masked)
		VMULPS(s[0], r[u], r[u])
		VMULPS(r[u+1], r[u], r[u])
		v.store(r[u], p[0], masked)
	}, nil)

	// dx = s·(g·w − x·m).
	over(v, "normGradient", "dx grad w x", "s m", "", nil,
		func(p []Mem, s []VecPhysical, u int, masked bool) {
			v.load(p[1], r[u], masked)
			v.load(p[2], r[u+1], masked)
			v.load(p[3], r[u+2], masked)
			VMULPS(r[u+1], r[u], r[u])
			VFNMADD231PS(s[1], r[u+2], r[u])
			VMULPS(s[0], r[u], r[u])
			v.store(r[u], p[0], masked)
		}, nil)

	// y += a·b·s.
	over(v, "addScaled", "y a b", "s", "", nil, func(p []Mem, s []VecPhysical, u int, masked bool) {
		v.load(p[1], r[u], masked)
		v.load(p[2], r[u+1], masked)
		v.load(p[0], r[u+2], masked)
		VMULPS(r[u+1], r[u], r[u])
		VFMADD231PS(s[0], r[u], r[u+2])
		v.store(r[u+2], p[0], masked)
	}, nil)

	// (ya, yb) = (xa·c − xb·s, xb·c + xa·s), s being sin times the sign.
	over(v, "rotate", "ya yb xa xb c s", "sign", "", nil,
		func(p []Mem, s []VecPhysical, u int, masked bool) {
			a, b, c, si, t := r[u], r[u+1], r[u+2], r[u+3], r[u+4]
			v.load(p[2], a, masked)
			v.load(p[3], b, masked)
			v.load(p[4], c, masked)
			v.load(p[5], si, masked)
			VMULPS(s[0], si, si)
			VMULPS(c, a, t)
			VFNMADD231PS(si, b, t)
			v.store(t, p[0], masked)
			VMULPS(c, b, t)
			VFMADD231PS(si, a, t)
			v.store(t, p[1], masked)
		}, nil)
}

// elements generates the kernels of one or two vectors.
func elements(v isa) {
	r := v.regs
	// y = a + b.
	over(v, "addVectors", "y a b", "", "", nil, func(p []Mem, _ []VecPhysical, u int, masked bool) {
		v.load(p[1], r[u], masked)
		v.load(p[2], r[u+1], masked)
		VADDPS(r[u+1], r[u], r[u])
		v.store(r[u], p[0], masked)
	}, nil)

	// y = x + s.
	over(v, "addNumber", "y x", "s", "", nil, func(p []Mem, s []VecPhysical, u int, masked bool) {
		v.load(p[1], r[u], masked)
		VADDPS(s[0], r[u], r[u])
		v.store(r[u], p[0], masked)
	}, nil)
	// x *= s.
	over(v, "scaleVector", "x", "s", "", nil, func(p []Mem, s []VecPhysical, u int, masked bool) {
		v.load(p[0], r[u], masked)
		VMULPS(s[0], r[u], r[u])
		v.store(r[u], p[0], masked)
	}, nil)
	// dp = p·(dp − d).
	over(v, "softmaxGradient", "dp p", "d", "", nil,
		func(p []Mem, s []VecPhysical, u int, masked bool) {
			v.load(p[0], r[u], masked)
			v.load(p[1], r[u+1], masked)
			VSUBPS(s[0], r[u], r[u])
			VMULPS(r[u+1], r[u], r[u])
			v.store(r[u], p[0], masked)
		}, nil)
}

// adamW generates AdamW's update. AdamW.Step of package vec documents the formula.
func adamW(v isa) {
	r := v.regs
	over(v, "adamW", "p grad m v", "keep rate root gain1 beta2 gain2 eps largest", "", nil,
		func(p []Mem, s []VecPhysical, u int, masked bool) {
			keep, rate, root, gain1, beta2, gain2, eps := s[0], s[1], s[2], s[3], s[4], s[5], s[6]
			largest := s[7]
			g, m, w, t := r[u], r[u+1], r[u+2], r[u+3]
			v.load(p[1], g, masked)

			// The square of a larger gradient could make the second moment infinite.
			v.zero(t)
			VSUBPS(largest, t, t)
			VMAXPS(g, t, g)
			VMINPS(g, largest, g)

			v.load(p[2], m, masked)
			VSUBPS(m, g, t)
			VFMADD231PS(gain1, t, m)
			v.store(m, p[2], masked)
			v.load(p[3], w, masked)
			VMULPS(beta2, w, w)
			VMULPS(g, g, t)
			VFMADD231PS(gain2, t, w)
			v.store(w, p[3], masked)
			v.zero(g)
			v.store(g, p[1], masked)
			VSQRTPS(w, w)
			VDIVPS(root, w, w)
			VADDPS(eps, w, w)
			VMULPS(rate, m, m)
			VDIVPS(w, m, m)
			v.load(p[0], t, masked)
			VFMSUB213PS(m, keep, t)
			v.store(t, p[0], masked)
		}, nil)
}
