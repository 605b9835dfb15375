package cudaops

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// workspaceBytes is what cuBLASLt may use besides its operands. NVIDIA recommends 32 MiB for Hopper.
const workspaceBytes = 32 << 20

// matmuls plans a machine's matrix products: one plan for each shape.
type matmuls struct {
	m         *Machine
	plans     map[driver.MatmulSpec]driver.MatmulPlan
	workspace driver.Ptr
}

func newMatmuls(m *Machine) *matmuls {
	return &matmuls{m: m, plans: map[driver.MatmulSpec]driver.MatmulPlan{}}
}

func (b *matmuls) plan(spec driver.MatmulSpec) (driver.MatmulPlan, error) {
	spec, err := spec.Normal()
	if err != nil {
		return nil, err
	}
	if p := b.plans[spec]; p != nil {
		return p, nil
	}
	blas, err := b.m.device.ctx.Blas()
	if err != nil {
		return nil, err
	}
	if b.workspace == 0 {
		if b.workspace, err = b.m.device.ctx.Alloc(workspaceBytes); err != nil {
			return nil, fmt.Errorf("cuBLASLt's workspace: %w", err)
		}
		b.m.owned = append(b.m.owned, b.workspace)
	}
	p, err := blas.Plan(spec, workspaceBytes, 1)
	if err != nil {
		return nil, err
	}
	b.plans[spec] = p
	return p, nil
}

func (b *matmuls) close() error {
	var errs []error
	for _, p := range b.plans {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// product is d = alpha·op(a)·op(b) + beta·d, for row-major matrices without gaps; d's shape and a's give the sizes.
type product struct {
	d, a, b        *array
	transA, transB bool
	alpha, beta    float32
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p product) error {
	if p.alpha == 0 {
		p.alpha = 1
	}
	k := p.a.shape[1]
	if p.transA {
		k = p.a.shape[0]
	}
	spec := driver.MatmulSpec{M: p.d.shape[0], N: p.d.shape[1], K: k, TransA: p.transA, TransB: p.transB,
		A: p.a.elem.dtype(), B: p.b.elem.dtype(), D: p.d.elem.dtype(), Align: 4}
	for align := 256; align > 4; align /= 2 {
		if (p.a.at|p.b.at|p.d.at)%align == 0 {
			spec.Align = align
			break
		}
	}
	plan, err := c.m.blas.plan(spec)
	if err != nil {
		return err
	}
	m := c.m
	c.do(n, func() error {
		return plan.Run(0, driver.MatmulArgs{Alpha: p.alpha, Beta: p.beta, A: p.a.ptr(), B: p.b.ptr(), D: p.d.ptr(),
			Workspace: m.blas.workspace, WorkspaceSize: workspaceBytes}, m.stream)
	}, p.d, p.a, p.b)
	return nil
}
