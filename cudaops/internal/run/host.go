package run

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Fetch waits for the device and copies an array back as a value of type dt.
func (r *Runner) Fetch(a *program.Array, dt tensor.Dtype) (gorgonia.Value, error) {
	switch {
	case dt == tensor.Float32 && a.Type != gpu.Int64:
		x := make([]float32, a.Len())
		err := r.FetchFloats(a, x)
		return opbase.ValueOf(x, a.Shape), err
	case dt == tensor.Int && a.Type == gpu.Int64:
		x := make([]int, a.Len())
		err := r.bring(gpu.Bytes(x), a.Ptr())
		return opbase.ValueOf(x, a.Shape), err
	}
	return nil, fmt.Errorf("cannot make a %v of what is stored as %v", dt, a.Type)
}

// FetchFloats copies the numbers of an array to dst, which has room for all.
func (r *Runner) FetchFloats(a *program.Array, dst []float32) error {
	if a.Type == gpu.Float32 {
		return r.bring(gpu.Bytes(dst)[:a.Extent()], a.Ptr())
	}
	raw := make([]byte, a.Extent())
	err := r.bring(raw, a.Ptr())
	if err == nil {
		gpu.Decode(dst[:a.Len()], a.Type, raw)
	}
	return err
}

// HostOperand is what the host is given of input i of a node, which is a: without the loss scale.
func (r *Runner) HostOperand(n *gorgonia.Node, i int, a *program.Array) (gorgonia.Value, error) {
	v, err := r.Fetch(a, graph.Children(n)[i].Dtype())
	if err == nil && r.Program.Scaling.Carries(n, i) {
		v, err = Divided(v, r.Scale.Carried)
	}
	return v, err
}

// Carried is the scale that the value of a node carries, 1 where it carries none.
func (r *Runner) Carried(n *gorgonia.Node) float32 {
	if r.Program.Scaling.Carried[n] {
		return r.Scale.Carried
	}
	return 1
}

// OnTheHost computes a node with its op's own Do, between two copies.
func (r *Runner) OnTheHost(p program.HostOp) error {
	values := make([]gorgonia.Value, len(p.In))
	for i, a := range p.In {
		v, err := r.HostOperand(p.Node, i, a)
		if err != nil {
			return err
		}
		values[i] = v
	}
	v, err := p.Node.Op().Do(values...)
	if err != nil {
		return err
	}
	if scale := r.Carried(p.Node); scale != 1 {
		if v, err = Divided(v, 1/scale); err != nil {
			return err
		}
	}
	from, stored, err := elements(v, p.Out)
	if err != nil {
		return err
	}
	raw := make([]byte, p.Out.Extent())
	convert(raw, p.Out.Type, from, stored)
	return r.Ctx.CopyToDevice(p.Out.Ptr(), raw, r.Stream)
}

// Divided returns a value whose floats are those of v divided; by a power of two this is exact.
func Divided(v gorgonia.Value, by float32) (gorgonia.Value, error) {
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil, err
	}
	x, ok := flat.([]float32)
	if !ok {
		return nil, fmt.Errorf("a value that carries the loss scale is a %v, want float32",
			v.Dtype())
	}
	y := make([]float32, len(x))
	for i, e := range x {
		y[i] = e / by
	}
	return opbase.ValueOf(y, v.Shape().Clone()), nil
}
