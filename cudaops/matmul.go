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
	beside    []lane       // for products beside another
	fork      driver.Event // where those begin
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
	ctx := b.m.device.ctx
	for _, l := range b.beside {
		if l.stream != 0 {
			errs = append(errs, ctx.SyncStream(l.stream), ctx.DestroyStream(l.stream))
		}
		if l.done != 0 {
			errs = append(errs, ctx.DestroyEvent(l.done))
		}
	}
	if b.fork != 0 {
		errs = append(errs, ctx.DestroyEvent(b.fork))
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

// matmul adds matrix products, none of which needs the result of another. They run side by side: while the last blocks of
// one are at work, the multiprocessors that are done begin with the next.
func (c *compiler) matmul(n *gorgonia.Node, products ...product) error {
	var runs []func(lane) error
	var touched []*array
	for _, p := range products {
		run, err := c.m.blas.product(p)
		if err != nil {
			return err
		}
		runs, touched = append(runs, run), append(touched, p.d, p.a, p.b, p.c)
	}
	if err := c.m.blas.open(len(runs) - 1); err != nil {
		return err
	}
	c.do(n, func() error { return c.m.blas.sideBySide(runs) }, touched...)
	return nil
}

// lane is a stream for products, with the workspace that those on it use one after the other.
type lane struct {
	stream    driver.Stream
	workspace driver.Ptr
	done      driver.Event // of a lane beside the machine's own
}

// main is the lane that is the machine's own stream.
func (b *matmuls) main() lane { return lane{stream: b.m.stream, workspace: b.workspace} }

// open makes sure that there are n lanes beside the machine's own.
func (b *matmuls) open(n int) error {
	ctx := b.m.device.ctx
	var err error
	if n > 0 && b.fork == 0 {
		if b.fork, err = ctx.NewEvent(false); err != nil {
			return err
		}
	}
	for len(b.beside) < n {
		b.beside = append(b.beside, lane{}) // which close frees, also half made
		l := &b.beside[len(b.beside)-1]
		if l.workspace, err = b.m.alloc(workspaceBytes, "cuBLASLt's workspace"); err != nil {
			return err
		}
		if l.stream, err = ctx.NewStream(); err != nil {
			return err
		}
		if l.done, err = ctx.NewEvent(false); err != nil {
			return err
		}
	}
	return nil
}

// sideBySide enqueues products: the first on the machine's stream, each other on a lane of its own, all between what is on
// the stream before and after.
func (b *matmuls) sideBySide(runs []func(lane) error) error {
	ctx, main := b.m.device.ctx, b.main()
	beside := b.beside[:len(runs)-1]
	if len(beside) > 0 {
		if err := ctx.Record(b.fork, main.stream); err != nil {
			return err
		}
	}
	for _, l := range beside {
		if err := ctx.Wait(l.stream, b.fork); err != nil {
			return err
		}
	}
	err := runs[0](main)
	for i, l := range beside { // joined also after an error: a capture must not end before
		err = errors.Join(err, runs[i+1](l), ctx.Record(l.done, l.stream), ctx.Wait(main.stream, l.done))
	}
	return err
}

// product plans a product and returns what enqueues it.
func (b *matmuls) product(p product) (func(lane) error, error) {
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
	return func(l lane) error {
		return plan.run(driver.MatmulArgs{Alpha: p.alpha, Beta: p.beta, A: p.a.ptr(), B: p.b.ptr(), C: p.c.ptr(), D: p.d.ptr(),
			Workspace: l.workspace, WorkspaceSize: workspaceBytes}, l.stream)
	}, nil
}
