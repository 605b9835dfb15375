package kasmina

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/value"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// A Kasmina layer on the host. A kind of blueprint that somebody has registered has no kernel.
// While a seed of a layer works with such a kind, the op itself computes the layer's passes,
// between two copies, and tells the lattice what it measures. Ahead of each run the layer's state
// decides: with the last such seed gone, the layer is back on the device. What was captured of runs
// there waits for that, since runs that the host takes part in cannot be captured.

// choose decides where the run under way computes the layer, by what became of encoding its state.
func (l *layer) choose(err error) error {
	var kind *kasminakernel.KindError
	switch m := l.m; {
	case err == nil:
		l.hosted = false
		return nil
	case !errors.As(err, &kind):
		return err
	case m.Strict:
		return fmt.Errorf("%w, and WithStrict forbids computing it on the host", err)
	}
	l.hosted = true
	l.m.Warn(fmt.Sprintf("the kind of blueprint %q has no kernel: Kasmina layers in which a seed works "+
		"with it are computed on the host, which waits for the device and copies their values there and back", blueprints.Kind(kind.Kind)))
	return nil
}

// passOnHost computes a node of a layer with its op, from what it reads (nil where it only comes behind
// that) to the parts of its result. As all that is computed on the host it sees gradients without the
// loss scale.
func (m *Machine) passOnHost(n *gorgonia.Node, in []*program.Array, out ...*program.Array) error {
	args := make(opbase.Args, len(in))
	for i, a := range in {
		if a == nil {
			continue
		}
		v, err := m.HostOperand(n, i, a)
		if err != nil {
			return err
		}
		if args[i], err = opbase.Flat(v); err != nil {
			return err
		}
	}
	result := make([]float32, program.Size(n.Shape()))
	scale := m.Carried(n)
	err := n.Op().(interface{ Shared() *opbase.Base }).Shared().Run(result, args)
	if err := unlessScaled(err, scale); err != nil {
		return err
	}
	for i := range result {
		result[i] *= scale
	}
	for _, a := range out {
		raw := make([]byte, a.Extent())
		value.EncodeFloats(raw, a.Type, result[:a.Len()])
		if err := m.Ctx.CopyToDevice(a.Ptr(), raw, m.Stream); err != nil {
			return err
		}
		result = result[a.Len():]
	}
	return nil
}
