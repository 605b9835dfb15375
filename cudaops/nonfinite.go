package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// NonFinite returns the first parameter whose gradient has an element that is NaN, infinite or so large that its square is, nil if
// there is none. It looks at the gradients of the last [Machine.Update], whether that was made or not, and after another run at those
// that the next one would apply: with [WithAccumulation] at the sums. It waits for the device.
func (m *Machine) NonFinite() (*gorgonia.Node, error) {
	p, err := m.nonFinite()
	if err != nil {
		return nil, fmt.Errorf("cudaops.Machine.NonFinite: %w", err)
	}
	return p, nil
}

func (m *Machine) nonFinite() (*gorgonia.Node, error) {
	x := m.optimizer
	if err := m.updatable(); err != nil {
		return nil, err
	}
	bad := map[*gorgonia.Node]bool{}
	first := func() *gorgonia.Node {
		if i := slices.IndexFunc(m.config.params, func(p *gorgonia.Node) bool { return bad[p] }); i >= 0 {
			return m.config.params[i]
		}
		return nil
	}
	if !x.looked {
		if _, err := m.launchSquares(x); err != nil {
			return nil, err
		}
	}
	at := x.squares
	for _, t := range x.tables() {
		squares := make([]float32, t.Chunks)
		if err := m.device.ctx.CopyToHost(gpu.Bytes(squares), at, m.stream); err != nil {
			return nil, err
		}
		at = at.Offset(4 * t.Chunks)
		of := slices.DeleteFunc(slices.Clone(x.states), func(p *paramState) bool { return p.rule.Muon != (t == x.muon) })
		for chunk, v := range squares {
			if v-v != 0 {
				bad[of[t.TensorOf(chunk)].input.node] = true
			}
		}
	}
	return first(), nil
}
