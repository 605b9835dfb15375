package run

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/value"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Fetch waits for the device and copies an array back as a value of type dt.
func (r *Runner) Fetch(a *program.Array, dt tensor.Dtype) (gorgonia.Value, error) {
	n := a.Extent()
	raw, err := r.Pieces.of(0, min(n, pieceBytes))
	if err != nil {
		return nil, err
	}
	if n <= len(raw) { // the logits of a token, which come back for each, or a loss
		err = r.land(raw, a.Ptr())
	} else {
		raw = make([]byte, n)
		err = r.bring(raw, a.Ptr())
	}
	if err != nil {
		return nil, err
	}
	r.State.On(Wait)
	return value.Decode(raw, a.Type, dt, a.Shape)
}

// FetchFloats copies the numbers of an array to dst, which has room for all, without a copy between
// where they are stored as float32.
func (r *Runner) FetchFloats(a *program.Array, dst []float32) error {
	if a.Type == gpu.Float32 && a.Extent() == 4*len(dst) {
		return r.bring(gpu.Bytes(dst), a.Ptr())
	}
	v, err := r.Fetch(a, tensor.Float32)
	if err != nil {
		return err
	}
	from, err := opbase.Flat(v)
	if err == nil {
		copy(dst, from.([]float32))
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
	if s := r.Program.Scaling; s != nil && s.Carried[n] {
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
	raw := make([]byte, p.Out.Extent())
	if err := value.Encode(raw, p.Out.Type, v, p.Out.Len()); err != nil {
		return err
	}
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
