// The parts of SiLUMLP and GELUMLP:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/silu.go, internal/cpu/layer/gelu.go
//   - GPU: cudaops/internal/lower/mlp.go,
//     cudaops/internal/kernel/silu,
//     cudaops/internal/kernel/gemm
//   - test cases and benchmark: internal/opcase/mlp.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// SiLUMLPOp is the op that [SiLUMLP] applies, and [GELUMLP] if GELU is set.
type SiLUMLPOp struct {
	opbase.Base
	GELU bool

	// x·gateᵀ and x·upᵀ, which the backward op reuses, and memory for their product
	a, b, h opbase.Aux
}

// SiLUMLP is the gated two-layer MLP of Llama:
//
//	y = (silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ,  silu(a) = a/(1+exp(−a))
//
// x is [rows, D], gate and up are [F, D], down is [D, F], and y is [rows, D]. All are float32 or
// all are float64. (Shazeer, "GLU Variants Improve Transformer", 2020.)
func SiLUMLP(x, gate, up, down *gorgonia.Node) (*gorgonia.Node, error) {
	return gatedMLP("SiLUMLP", false, x, gate, up, down)
}

// GELUMLP is the gated two-layer MLP of Gemma. It is [SiLUMLP] with the tanh approximation of GELU as
// its gate:
//
//	y = (gelu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ,  gelu(a) = a/2·(1 + tanh(√(2/π)·(a + 0.044715·a³)))
//
// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.)
func GELUMLP(x, gate, up, down *gorgonia.Node) (*gorgonia.Node, error) {
	return gatedMLP("GELUMLP", true, x, gate, up, down)
}

func gatedMLP(name string, gelu bool, x, gate, up, down *gorgonia.Node) (*gorgonia.Node, error) {
	ax, ag, au, ad := arg{"x", x}, arg{"gate", gate}, arg{"up", up}, arg{"down", down}
	if err := checkFloats(name, ax, ag, au, ad); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	if err := checkDims(name, ag, 2, "[F, D]"); err != nil {
		return nil, err
	}

	d, f := x.Shape()[1], gate.Shape()[0]
	if err := checkShape(name, ag, fmt.Sprintf("[F, D] with the D of x %v", x.Shape()), f,
		d); err != nil {
		return nil, err
	}

	if err := checkShape(name, au, fmt.Sprintf("the shape of gate, for x %v", x.Shape()), f,
		d); err != nil {
		return nil, err
	}

	if err := checkShape(name, ad, fmt.Sprintf("[D, F] for gate %v", gate.Shape()), d,
		f); err != nil {
		return nil, err
	}

	o := &SiLUMLPOp{GELU: gelu}
	o.Owns(&o.a, &o.b, &o.h)
	in := gorgonia.Nodes{x, gate, up, down}
	opbase.Init(&o.Base, o, name, "", in, x.Dtype(), x.Shape(), siluMLP[float32], siluMLP[float64])
	return gorgonia.ApplyOp(o, in...)
}

// dims returns rows, D and F.
func (o *SiLUMLPOp) dims() (n, d, f int) {
	return o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[0]
}

func siluMLP[T cpu.Float](o *SiLUMLPOp, y []T, in opbase.Args) error {
	n, d, f := o.dims()
	a, b, h := opbase.AuxSlice[T](&o.a, n*f), opbase.AuxSlice[T](&o.b, n*f),
		opbase.AuxSlice[T](&o.h, n*f)
	mul := layer.SiLUMul[T]
	if o.GELU {
		mul = layer.GELUMul[T]
	}

	product := func(y, x []T, weight, width, out int) {
		if w := in.CompactWeights(weight); w != nil {
			w.Linear(o.Stop(), any(y).([]float32), any(x).([]float32), n)
			return
		}
		gemm.LinearUntil(o.Stop(), y, x, opbase.Slice[T](in, weight), n, width, out)
	}
	x := opbase.Slice[T](in, 0)
	if gate, up := in.CompactWeights(1), in.CompactWeights(2); gate != nil && up != nil && gate.Type == up.Type {
		gemm.CompactLinear(o.Stop(), any(x).([]float32), n, gemm.CompactProduct{Y: any(a).([]float32), W: gate},
			gemm.CompactProduct{Y: any(b).([]float32), W: up})
	} else {
		product(a, x, 1, d, f)
		product(b, x, 2, d, f)
	}
	mul(h, a, b)
	product(y, h, 3, f, d)
	return nil
}

// ReadsCompact reports that the op can read compact weights.
func (o *SiLUMLPOp) ReadsCompact(input int) bool { return input > 0 }

// DiffWRT reports that the op is differentiable in all inputs.
func (o *SiLUMLPOp) DiffWRT(int) []bool { return []bool{true, true, true, true} }

// SymDiff returns the gradients of x, gate, up and down.
func (o *SiLUMLPOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}
	b := &SiLUMLPGradOp{Forward: o}
	b.Owns(&b.da, &b.db)
	return backward(&b.Base, b, o.gradName(), o, gorgonia.Nodes{in[0], in[1], in[2],
		in[3], output, grad}, 4,
		siluMLPGrad[float32], siluMLPGrad[float64])
}

func (o *SiLUMLPOp) gradName() string {
	if o.GELU {
		return "GELUMLPGrad"
	}
	return "SiLUMLPGrad"
}

// SiLUMLPGradOp computes the packed gradients [dx | dgate | dup | ddown] from x, gate, up, down,
// the forward output and its gradient.
type SiLUMLPGradOp struct {
	opbase.Base
	Forward *SiLUMLPOp
	da, db  opbase.Aux
}

func siluMLPGrad[T cpu.Float](o *SiLUMLPGradOp, out []T, in opbase.Args) error {
	x, gate, up, down := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2),
		opbase.Slice[T](in, 3)
	g := opbase.Slice[T](in, 5)
	fw := o.Forward
	n, d, f := fw.dims()
	a, b, h := opbase.AuxSlice[T](&fw.a, n*f), opbase.AuxSlice[T](&fw.b, n*f),
		opbase.AuxSlice[T](&fw.h, n*f)
	da, db := opbase.AuxSlice[T](&o.da, n*f), opbase.AuxSlice[T](&o.db, n*f)
	dx, rest := out[:n*d], out[n*d:]
	dgate, dup, ddown := rest[:f*d], rest[f*d:2*f*d], rest[2*f*d:]

	gemm.Mul(false, false, n, f, d, 1, g, d, down, f, 0, da, f) // dh = g·down
	mulBackward := layer.SiLUMulBackward[T]
	if fw.GELU {
		mulBackward = layer.GELUMulBackward[T]
	}

	mulBackward(h, da, db, da, a, b)
	gemm.Mul(true, false, d, f, n, 1, g, d, h, f, 0, ddown, f)
	gemm.Mul(true, false, f, d, n, 1, da, f, x, d, 0, dgate, d)
	gemm.Mul(true, false, f, d, n, 1, db, f, x, d, 0, dup, d)
	gemm.Mul(false, false, n, d, f, 1, da, f, gate, d, 0, dx, d)
	gemm.Mul(false, false, n, d, f, 1, db, f, up, d, 1, dx, d)
	return nil
}
