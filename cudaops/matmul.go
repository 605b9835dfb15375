package cudaops

import (
	"errors"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// workspaceBytes is what cuBLASLt may use besides its operands. NVIDIA recommends 32 MiB for Hopper.
const workspaceBytes = 32 << 20

// matmuls plans a machine's matrix products: one plan for each shape.
type matmuls struct {
	m         *Machine
	plans     map[driver.MatmulSpec]*planned
	pending   []pending // to be timed
	workspace driver.Ptr
}

func newMatmuls(m *Machine) *matmuls {
	b := &matmuls{m: m, plans: map[driver.MatmulSpec]*planned{}}
	if m.config.lone != nil {
		b.workspace = m.config.lone.workspace
	}
	return b
}

func (b *matmuls) plan(spec driver.MatmulSpec) (*planned, error) {
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
		if b.workspace, err = b.m.alloc(workspaceBytes, "cuBLASLt's workspace"); err != nil {
			return nil, err
		}
	}
	ways := 1
	if b.worthTiming(spec) {
		ways = tuneWays
	}
	plan, err := blas.Plan(spec, workspaceBytes, ways)
	if err != nil {
		return nil, err
	}
	p := &planned{MatmulPlan: plan}
	b.plans[spec] = p
	if ways > 1 {
		b.choose(p, b.key(blas, spec))
	}
	return p, nil
}

func (b *matmuls) close() error {
	var errs []error
	for _, p := range b.plans {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// product is d = alpha·op(a)·op(b) + beta·c, for row-major matrices without gaps; d's shape and a's give the sizes. A zero
// alpha counts as 1, and c is d where it is nil.
type product struct {
	d, a, b, c     *array
	transA, transB bool
	alpha, beta    float32
}

// plus is the product with another matrix added, if there is one.
func (p product) plus(add *array) product {
	if add != nil {
		p.c, p.beta = add, 1
	}
	return p
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p product) error {
	run, err := c.m.blas.product(p)
	if err == nil {
		c.do(n, run, p.d, p.a, p.b, p.c)
	}
	return err
}

// product plans a product and returns what enqueues it.
func (b *matmuls) product(p product) (func() error, error) {
	if p.alpha == 0 {
		p.alpha = 1
	}
	if p.c == nil {
		p.c = p.d
	}
	k := p.a.shape[1]
	if p.transA {
		k = p.a.shape[0]
	}
	spec := driver.MatmulSpec{M: p.d.shape[0], N: p.d.shape[1], K: k, TransA: p.transA, TransB: p.transB,
		A: p.a.elem.dtype(), B: p.b.elem.dtype(), D: p.d.elem.dtype(), Align: 256}
	for spec.Align > 2 && (p.a.at|p.b.at|p.c.at|p.d.at)%spec.Align != 0 {
		spec.Align /= 2
	}
	plan, err := b.plan(spec)
	if err != nil {
		return nil, err
	}
	return func() error {
		return plan.run(driver.MatmulArgs{Alpha: p.alpha, Beta: p.beta, A: p.a.ptr(), B: p.b.ptr(), C: p.c.ptr(), D: p.d.ptr(),
			Workspace: b.workspace, WorkspaceSize: workspaceBytes}, b.m.stream)
	}, nil
}
