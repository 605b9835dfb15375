// Package graft provides the ops that attach a seed's blueprint to a graph. An input of the graph,
// the matrix of controls, determines how strongly the blueprint contributes in the forward and
// backward direction. The caller may change it between runs, so a blueprint can progress from
// isolated training to its full contribution without a new graph.
//
// Start with [Blend] for a blueprint that adds to the host's activations, or with [LowRank] for a
// blueprint that adds to a weight. [Isolate] controls the gradients of the blueprint's input and
// parameters.
//
// The matrix of controls is [n, 4], with one row for each seed:
//
//	Forward   α, the factor on the blueprint's contribution to the output
//	Backward  factor on the gradient of the blueprint's output
//	Inward    factor on the gradient of the blueprint's input
//	Learning  factor on the gradients of the blueprint's parameters
//
// The controls of a seed in training are 0, 1, 0, 1. The output and all gradients upstream are then
// the same as without the blueprint, while its parameters learn as if α were 1. The controls of a
// grafted seed are α, α, 1, 1.
package graft

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Control is a column of the matrix of controls.
type Control int

// Columns of the matrix of controls.
const (
	Forward Control = iota
	Backward
	Inward
	Learning

	Controls = iota // the number of columns
)

// Row identifies a seed's row in the matrix of controls.
type Row struct {
	Of *gorgonia.Node // [n, Controls], of the same type as the nodes it controls
	At int            // the index of the row, from 0
}

// check returns an error unless the row exists and all nodes are in the same graph and of the same
// float type.
func (r Row) check(name string, args ...*gorgonia.Node) error {
	for i, n := range append(args, r.Of) {
		switch {
		case n == nil || n.Graph() == nil:
			return fmt.Errorf("graft.%s: argument %d is nil or in no graph", name, i)
		case n.Graph() != args[0].Graph():
			return fmt.Errorf("graft.%s: arguments 0 and %d are in different graphs", name, i)
		case n.Dtype() != tensor.Float32 && n.Dtype() != tensor.Float64:
			return fmt.Errorf("graft.%s: argument %d is of type %v, want float32 or float64", name,
				i, n.Dtype())
		case n.Dtype() != args[0].Dtype():
			return fmt.Errorf("graft.%s: argument %d is of type %v, and the first of type %v",
				name, i, n.Dtype(), args[0].Dtype())
		}
	}

	s := r.Of.Shape()
	if len(s) != 2 || s[1] != Controls || r.At < 0 || r.At >= s[0] {
		return fmt.Errorf("graft.%s: row %d of controls of shape %v, want a row of [n, %d]", name,
			r.At, s, Controls)
	}

	return nil
}

// control returns control c of a row of the matrix, which is argument i.
func control[T cpu.Float](in opbase.Args, i, row int, c Control) T {
	return opbase.Slice[T](in, i)[row*Controls+int(c)]
}

// scaled writes y = f·x. If f is 0, y is 0 even where x is NaN.
func scaled[T cpu.Float](y, x []T, f T) {
	switch f {
	case 0:
		clear(y)
	case 1:
		copy(y, x)
	default:
		cpu.Parallel(len(y), 1<<14, func(lo, hi int) {
			for i := lo; i < hi; i++ {
				y[i] = f * x[i]
			}
		})
	}
}

// BlendOp is the op that [Blend] applies.
type BlendOp struct {
	opbase.Base
	Row int
}

// Blend adds the output of a blueprint to the host's output:
//
//	y = x + Forward·t;  dx = g, dt = Backward·g
//
// x, t and y have the same shape. If Forward is 0, y equals x for any t, even NaN.
func Blend(x, t *gorgonia.Node, r Row) (*gorgonia.Node, error) {
	if err := r.check("Blend", x, t); err != nil {
		return nil, err
	}

	if !slices.Equal(x.Shape(), t.Shape()) {
		return nil, fmt.Errorf("graft.Blend: t has shape %v, want that of x, %v", t.Shape(),
			x.Shape())
	}

	o := &BlendOp{Row: r.At}
	in := gorgonia.Nodes{x, t, r.Of}
	opbase.Init(&o.Base, o, "Blend", fmt.Sprint("row=", r.At), in, x.Dtype(), x.Shape(),
		blend[float32], blend[float64])
	return gorgonia.ApplyOp(o, in...)
}

func blend[T cpu.Float](o *BlendOp, y []T, in opbase.Args) error {
	x, t := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1)
	f := control[T](in, 2, o.Row, Forward)
	if f == 0 {
		copy(y, x)
		return nil
	}

	cpu.Parallel(len(y), 1<<14, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			y[i] = x[i] + f*t[i]
		}
	})
	return nil
}

// DiffWRT reports that the op is differentiable in all inputs except the controls.
func (o *BlendOp) DiffWRT(int) []bool { return []bool{true, true, false} }

// SymDiff returns the gradients of x and t. The gradient of x is the output's gradient.
func (o *BlendOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}
	dt, err := scale(grad, Row{in[2], o.Row}, Backward, o)
	return gorgonia.Nodes{grad, dt, nil}, err
}

// ScaleOp computes y = c·x for a control c.
type ScaleOp struct {
	opbase.Base
	Row     int
	Control Control
}

// scale adds an op that multiplies the gradient g by a control.
func scale(g *gorgonia.Node, r Row, c Control, forward gorgonia.Op) (*gorgonia.Node, error) {
	o := &ScaleOp{Row: r.At, Control: c}
	in := gorgonia.Nodes{g, r.Of}
	opbase.Init(&o.Base, o, "GraftScale", fmt.Sprint("row=", r.At, " control=", int(c)), in,
		g.Dtype(), g.Shape(), scaleBy[float32], scaleBy[float64])
	o.Differentiates(forward)
	return gorgonia.ApplyOp(o, in...)
}

func scaleBy[T cpu.Float](o *ScaleOp, y []T, in opbase.Args) error {
	scaled(y, opbase.Slice[T](in, 0), control[T](in, 1, o.Row, o.Control))
	return nil
}

// IsolateOp is the op that [Isolate] applies.
type IsolateOp struct {
	opbase.Base
	Row     int
	Control Control
}

// Isolate returns x unchanged and multiplies its gradient by a control:
//
//	y = x;  dx = c·g
//
// Use the control Inward for the input of a blueprint, and Learning for its parameters.
func Isolate(x *gorgonia.Node, r Row, c Control) (*gorgonia.Node, error) {
	if err := r.check("Isolate", x); err != nil {
		return nil, err
	}

	if c < 0 || c >= Controls {
		return nil, fmt.Errorf("graft.Isolate: control %d, want 0 to %d", c, Controls-1)
	}

	o := &IsolateOp{Row: r.At, Control: c}
	in := gorgonia.Nodes{x, r.Of}
	opbase.Init(&o.Base, o, "Isolate", fmt.Sprint("row=", r.At, " control=", int(c)), in,
		x.Dtype(), x.Shape(), pass[float32], pass[float64])
	return gorgonia.ApplyOp(o, in...)
}

func pass[T cpu.Float](_ *IsolateOp, y []T, in opbase.Args) error {
	copy(y, opbase.Slice[T](in, 0))
	return nil
}

// DiffWRT reports that the op is differentiable in x.
func (o *IsolateOp) DiffWRT(int) []bool { return []bool{true, false} }

// SymDiff returns the gradient of x.
func (o *IsolateOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}
	dx, err := scale(grad, Row{in[1], o.Row}, o.Control, o)
	return gorgonia.Nodes{dx, nil}, err
}

// LowRankOp is the op that [LowRank] applies.
type LowRankOp struct {
	opbase.Base
	Row   int
	Scale float64
}

// LowRank adds the product of two narrow matrices to a weight:
//
//	y = w + Forward·scale·b·a
//	dw = g,  da = k·bᵀ·g,  db = k·g·aᵀ,  k = Backward·Learning·scale
//
// w and y are [out, in], b is [out, r], and a is [r, in]. scale must be finite. If Forward is 0, y
// equals w for any a and b. (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
// 2021.)
//
// Forming the sum of the weights takes out·in·r operations, whereas x·aᵀ·bᵀ would take
// rows·(in+out)·r. If the weight is trained too, its gradient g is already available when the
// gradients of a and b are computed.
func LowRank(w, a, b *gorgonia.Node, r Row, scale float64) (*gorgonia.Node, error) {
	const name = "LowRank"
	if err := r.check(name, w, a, b); err != nil {
		return nil, err
	}

	ws, as, bs := w.Shape(), a.Shape(), b.Shape()
	if len(ws) != 2 || len(as) != 2 || len(bs) != 2 || bs[0] != ws[0] || as[1] != ws[1] ||
		as[0] != bs[1] {
		return nil, fmt.Errorf("graft.LowRank: w has shape %v, a %v and b %v, want [out, in], "+
			"[r, in] and [out, r]", ws, as, bs)
	}

	if scale-scale != 0 {
		return nil, fmt.Errorf("graft.LowRank: scale is %v, want a finite number", scale)
	}

	o := &LowRankOp{Row: r.At, Scale: scale}
	in := gorgonia.Nodes{w, a, b, r.Of}
	opbase.Init(&o.Base, o, name, fmt.Sprint("row=", r.At, " scale=", scale), in, w.Dtype(), ws,
		lowRank[float32], lowRank[float64])
	return gorgonia.ApplyOp(o, in...)
}

func lowRank[T cpu.Float](o *LowRankOp, y []T, in opbase.Args) error {
	a := o.InputShape(1)
	AddLowRank(y, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2), a[0],
		float64(control[T](in, 3, o.Row, Forward))*o.Scale)
	return nil
}

// AddLowRank computes y = w + factor·b·a, where a has r rows, with the same arithmetic as the op.
// Merging a blueprint into its weight is therefore bit-identical to the op.
func AddLowRank[T cpu.Float](y, w, a, b []T, r int, factor float64) {
	copy(y, w)
	if factor == 0 || r == 0 {
		return
	}
	in, out := len(a)/r, len(b)/r
	gemm.Mul(false, false, out, in, r, T(factor), b, r, a, in, 1, y, in)
}

// DiffWRT reports that the op is differentiable in all inputs except the controls.
func (o *LowRankOp) DiffWRT(int) []bool { return []bool{true, true, true, false} }

// SymDiff returns the gradients of w, a and b. The gradient of w is the output's gradient.
func (o *LowRankOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &LowRankGradOp{Forward: o}
	inputs := gorgonia.Nodes{in[1], in[2], in[3], grad}
	shapes := []tensor.Shape{in[1].Shape(), in[2].Shape()}
	opbase.Init(&b.Base, b, "LowRankGrad", o.String(), inputs, grad.Dtype(),
		tensor.Shape{opbase.PackedSize(shapes...)}, lowRankGrad[float32], lowRankGrad[float64])
	b.Differentiates(o)
	packed, err := gorgonia.ApplyOp(b, inputs...)
	if err != nil {
		return nil, err
	}

	d, err := opbase.Unpack(packed, shapes...)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{grad, d[0], d[1], nil}, nil
}

// LowRankGradOp computes the packed gradients [da | db] from a, b, the controls and the output's
// gradient.
type LowRankGradOp struct {
	opbase.Base
	Forward *LowRankOp
}

func lowRankGrad[T cpu.Float](o *LowRankGradOp, d []T, args opbase.Args) error {
	a, b, g := opbase.Slice[T](args, 0), opbase.Slice[T](args, 1), opbase.Slice[T](args, 3)
	row := o.Forward.Row
	k := control[T](args, 2, row, Backward) * control[T](args, 2, row, Learning) *
		T(o.Forward.Scale)
	if k == 0 {
		clear(d)
		return nil
	}

	r, in, out := o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[0]
	gemm.Mul(true, false, r, in, out, k, b, r, g, in, 0, d[:len(a)], in)
	gemm.Mul(false, true, out, r, in, k, g, in, a, in, 0, d[len(a):], r)
	return nil
}
