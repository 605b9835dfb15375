package driver

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// poison fills the matrices of D, but not what lies between their rows, and the workspace of an algorithm.
func (p *blasPlan) poison(algo int, a gpu.MatmulArgs, s gpu.Stream) error {
	m, size := p.spec, p.spec.D.Size()
	if n := p.algos[algo].Workspace; n > 0 {
		if err := p.fill(a.Workspace, n, n, 1, s); err != nil {
			return err
		}
	}
	for i := 0; i < m.Batch && a.Overwrites(); i++ {
		if err := p.fill(a.D.Offset(i*m.StrideD*size), m.LDD*size, m.N*size, m.M, s); err != nil {
			return err
		}
	}
	return nil
}

// fill fills rows of so many bytes, each at a distance of pitch bytes from the one before it, with NaN of any of the types.
func (p *blasPlan) fill(at gpu.Ptr, pitch, bytes, rows int, s gpu.Stream) error {
	c := p.b.ctx
	if pitch == bytes { // as one row, for each of which initcheck takes long
		return c.call(&c.MemsetD8Async, uintptr(at), 0xff, uintptr(rows*bytes), uintptr(s))
	}
	return c.call(&c.MemsetD2D8Async, uintptr(at), uintptr(pitch), 0xff, uintptr(bytes), uintptr(rows), uintptr(s))
}
