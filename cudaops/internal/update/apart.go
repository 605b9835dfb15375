package update

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
)

// flag tells the device which sums of squares are of gradients that are clipped apart: in the order
// in which the update adds them up. The last, of the loss, is of none.
func (x *Optimizer) flag() (err error) {
	if !slices.ContainsFunc(x.Params, func(p *Param) bool { return p.Apart }) {
		return nil
	}
	flags := make([]byte, 0, x.sums())
	for _, p := range x.Params {
		flag := byte(0)
		if p.Apart {
			flag = 1
		}
		flags = append(flags,
			slices.Repeat([]byte{flag}, kernel.CeilDiv(p.Grad.Len(), optimizer.OptimChunk))...)
	}
	flags = append(flags, 0)
	if x.apart, err = x.memory.Alloc(len(flags), "the optimiser"); err != nil {
		return err
	}
	return x.m.Ctx.CopyToDevice(x.apart, flags, x.m.Stream)
}
