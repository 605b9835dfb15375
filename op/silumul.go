// The parts of SiLUMul and GELUMul:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/silu.go, internal/cpu/layer/gelu.go
//   - GPU: cudaops/internal/lower/mlp.go,
//     cudaops/internal/kernel/silu
//   - test cases and benchmark: internal/opcase/silumul.go

package op

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// SiLUMulOp is the op that [SiLUMul] applies, and [GELUMul] if GELU is set.
type SiLUMulOp struct {
	opbase.Base
	GELU bool
}

// SiLUMul is the gate of Llama's MLP:
//
//	y = silu(a) ⊙ b,  silu(a) = a/(1+exp(−a))
//
// a, b and y are [rows, F], float32 or float64. [SiLUMLP] computes the whole MLP in one op. Use
// SiLUMul if the MLP's linear layers use adapters or frozen weights.
func SiLUMul(a, b *gorgonia.Node) (*gorgonia.Node, error) { return gateMul("SiLUMul", false, a, b) }

// GELUMul is the gate of Gemma's MLP. It is [SiLUMul] with the tanh approximation of GELU:
//
//	y = gelu(a) ⊙ b,  gelu(a) = a/2·(1 + tanh(√(2/π)·(a + 0.044715·a³)))
func GELUMul(a, b *gorgonia.Node) (*gorgonia.Node, error) { return gateMul("GELUMul", true, a, b) }

func gateMul(name string, gelu bool, a, b *gorgonia.Node) (*gorgonia.Node, error) {
	aa, ab := arg{"a", a}, arg{"b", b}
	if err := checkFloats(name, aa, ab); err != nil {
		return nil, err
	}

	if err := checkDims(name, aa, 2, "[rows, F]"); err != nil {
		return nil, err
	}

	if err := checkShape(name, ab, "that of a", a.Shape()...); err != nil {
		return nil, err
	}

	o := &SiLUMulOp{GELU: gelu}
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{a, b}, a.Dtype(), a.Shape(),
		siluMul[float32], siluMul[float64])
	return gorgonia.ApplyOp(o, a, b)
}

func siluMul[T cpu.Float](o *SiLUMulOp, y []T, in opbase.Args) error {
	mul := layer.SiLUMul[T]
	if o.GELU {
		mul = layer.GELUMul[T]
	}
	mul(y, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1))
	return nil
}

// DiffWRT reports that the op is differentiable in a and b.
func (o *SiLUMulOp) DiffWRT(int) []bool { return []bool{true, true} }

// SymDiff returns the gradients of a and b.
func (o *SiLUMulOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	name := "SiLUMulGrad"
	if o.GELU {
		name = "GELUMulGrad"
	}

	b := &SiLUMulGradOp{Forward: o}
	b.Owns(&b.h)
	return backward(&b.Base, b, name, o, gorgonia.Nodes{in[0], in[1], grad}, 2,
		siluMulGrad[float32], siluMulGrad[float64])
}

// SiLUMulGradOp computes the packed gradients [da | db] from a, b and the output's gradient.
type SiLUMulGradOp struct {
	opbase.Base
	Forward *SiLUMulOp

	h opbase.Aux // the output, which is computed again
}

func siluMulGrad[T cpu.Float](o *SiLUMulGradOp, out []T, in opbase.Args) error {
	a, b, g := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	mulBackward := layer.SiLUMulBackward[T]
	if o.Forward.GELU {
		mulBackward = layer.GELUMulBackward[T]
	}
	mulBackward(opbase.AuxSlice[T](&o.h, len(a)), out[:len(a)], out[len(a):], g, a, b)
	return nil
}
