package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// productOp is the op of matrix products among the choices.
const productOp = "Matmul"

// workspaceBytes is what cuBLASLt may use besides its operands. NVIDIA recommends 32 MiB for Hopper.
const workspaceBytes = 32 << 20

// littleWorkspace is the most that a product gets for itself, so that all of it is set to zero once a run: counters, which cuBLASLt
// would set to zero in front of each product.
const littleWorkspace = 1 << 10

// matmuls plans a machine's matrix products: one plan for each shape, or where this module has ways of its own one for each addend.
type matmuls struct {
	m         *Machine
	plans     map[planKey]*planned
	workspace gpu.Ptr

	weights []kernels.QuantizeWeight // as they lie in the table; of float8
	table   *kernels.QuantizeTable
}

func newMatmuls(m *Machine) *matmuls {
	b := &matmuls{m: m, plans: map[planKey]*planned{}}
	if m.config.lone != nil {
		b.workspace = m.config.lone.workspace
	}
	return b
}

// planKey tells plans apart.
type planKey struct {
	gpu.MatmulSpec
	added addend
}

// addend is what a product adds to its sums.
type addend uint8

const (
	nothing addend = iota
	aMatrix        // as it is
	scaled         // as are the sums
)

// addendOf is that of a product with these factors.
func addendOf(alpha, beta float32) addend {
	switch {
	case alpha == 1 && beta == 0:
		return nothing
	case alpha == 1 && beta == 1:
		return aMatrix
	}
	return scaled
}

// plan plans a product. Kernels of this module compute some, but no scaled ones.
func (b *matmuls) plan(spec gpu.MatmulSpec, added addend) (*planned, error) {
	spec, err := spec.Normal()
	if err != nil {
		return nil, err
	}
	own := b.own(spec)
	switch {
	case len(own) == 0:
		added = nothing // for cuBLASLt all are the same
	case added == scaled:
		own = nil
	}
	key := planKey{spec, added}
	if p := b.plans[key]; p != nil {
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
	p := &planned{MatmulPlan: plan, m: b.m, added: added, own: own}
	for _, a := range plan.Algos() {
		p.ways = append(p.ways, strings.Trim(fmt.Sprint(a.ID), "[]"))
	}
	b.plans[key] = p
	if p.way, err = b.m.tuner.choose(p.job(b, blas)); err != nil {
		return nil, err
	}
	p.choice = b.m.tuner.last()
	return p, nil
}

// productUnits are where the kernels for products are.
var productUnits = []string{"gemm_hopper_plain"}

// own lists the ways that this module has for a product, not a scaled one, which is worth timing, or for which a rule asks for one.
func (b *matmuls) own(m gpu.MatmulSpec) []kernels.Way {
	shape := productShape(m)
	whole := gpu.MatmulSpec{M: m.M, N: m.N, K: m.K, TransB: m.TransB, A: m.D, B: m.D, D: m.D, Align: m.Align}
	if shape.Float8 {
		whole.A, whole.B, whole.Scaling, whole.FastAccumulation = gpu.Float8E4M3, gpu.Float8E4M3, gpu.ScaledRows, true
	}
	if whole, err := whole.Normal(); err != nil || m != whole || m.Align < vectorBytes {
		return nil
	}
	ways := b.m.k.ProductWays(shape, m.D)
	if !b.worthTiming(m) && !slices.ContainsFunc(names(ways), func(way string) bool { return b.m.tuner.rules.Ask(productOp, way) }) {
		return nil
	}
	return ways
}

// productShape is what the kernels of this module know of a product.
func productShape(m gpu.MatmulSpec) kernels.ProductShape {
	return kernels.ProductShape{Rows: m.M, Columns: m.N, D: m.K, TransW: m.TransB, Float8: m.Scaling == gpu.ScaledRows}
}

const (
	// tuneLeast is the multiplications and additions from which on a product is worth timing.
	tuneLeast = 1e9
	// tuneWays is how many ways are timed, of those that cuBLASLt thinks the fastest.
	tuneWays = 12
)

// worthTiming reports whether the machine's tuning is for such a product.
func (b *matmuls) worthTiming(m gpu.MatmulSpec) bool {
	return b.m.tuner.on() && flops(m) >= b.m.config.tuneLeast
}

// flops is the multiplications and additions of a product.
func flops(m gpu.MatmulSpec) float64 {
	return 2 * float64(m.M) * float64(m.N) * float64(m.K) * float64(m.Batch)
}

// planned is a product and the way to compute it: one of cuBLASLt's, or behind them of this module's own.
type planned struct {
	gpu.MatmulPlan
	m      *Machine
	added  addend
	ways   []string // cuBLASLt's
	own    []kernels.Way
	way    int
	choice int // of the tuner
}

// run enqueues the product.
func (p *planned) run(a gpu.MatmulArgs, s gpu.Stream) error { return p.runIn(p.way, a, s) }

func (p *planned) runIn(way int, a gpu.MatmulArgs, s gpu.Stream) error {
	if way < len(p.ways) {
		return p.Run(way, a, s)
	}
	m := p.Spec()
	product := kernels.Product{Y: a.D, X: a.A, W: a.B, ScaleX: a.ScaleA, ScaleW: a.ScaleB, Type: m.D, Way: p.own[way-len(p.ways)],
		ProductShape: productShape(m)}
	if p.added == aMatrix {
		product.C = cmp.Or(a.C, a.D)
	}
	return p.m.k.Product(s, product)
}

// workspace is what the product's way needs.
func (p *planned) workspace() int {
	if p.way >= len(p.ways) {
		return 0
	}
	return p.Algos()[p.way].Workspace
}

// job is the product as the tuner sees it.
func (p *planned) job(b *matmuls, blas gpu.Blas) job {
	spec := p.Spec()
	j := job{op: productOp, computes: true, tiny: !b.worthTiming(spec), ways: append(slices.Clone(p.ways), names(p.own)...),
		shape: fmt.Sprintf("%+v", spec) + plural(p.added == aMatrix, "with a matrix added") + plural(p.added == scaled, "scaled"),
		build: fmt.Sprintf("cuBLASLt %d, workspace %d", blas.Version(), workspaceBytes)}
	if len(p.own) > 0 {
		j.build += ", " + b.m.k.Build(productUnits...)
	}
	types := []gpu.DType{spec.A, spec.B, spec.D}
	for i, bytes := range operandBytes(spec) {
		j.arguments = append(j.arguments, argument{bytes: bytes, elem: elemOfType(types[i]), role: []role{reads, reads, writes}[i]})
	}
	if spec.Scaling != gpu.Unscaled {
		j.arguments = append(j.arguments, numbers(reads, spec.M, gpu.Float32), numbers(reads, spec.N, gpu.Float32))
	}
	if p.added == aMatrix {
		j.arguments = append(j.arguments, numbers(reads, spec.M*spec.N, spec.D))
	}
	j.run = func(way int, memory []gpu.Ptr) error {
		a := gpu.MatmulArgs{Alpha: 1, A: memory[0], B: memory[1], C: memory[2], D: memory[2], Workspace: b.workspace,
			WorkspaceSize: workspaceBytes}
		if spec.Scaling != gpu.Unscaled {
			a.ScaleA, a.ScaleB = memory[3], memory[4]
		}
		if p.added == aMatrix {
			a.C, a.Beta = memory[len(memory)-1], 1
		}
		return p.runIn(way, a, b.m.stream)
	}
	return j
}

// operandBytes is the memory of A, B and D.
func operandBytes(m gpu.MatmulSpec) [3]int {
	rowsA, rowsB := m.M, m.K
	if m.TransA {
		rowsA = m.K
	}
	if m.TransB {
		rowsB = m.N
	}
	return [3]int{((m.Batch-1)*m.StrideA + rowsA*m.LDA) * m.A.Size(), ((m.Batch-1)*m.StrideB + rowsB*m.LDB) * m.B.Size(),
		((m.Batch-1)*m.StrideD + m.M*m.LDD) * m.D.Size()}
}

// elemOfType is the elem that is stored as dt.
func elemOfType(dt gpu.DType) elem {
	for _, e := range []elem{float16s, bfloat16s, float8s} {
		if e.dtype() == dt {
			return e
		}
	}
	return float32s
}

// again drops the plans, for another program.
func (b *matmuls) again() error {
	var errs []error
	for _, p := range b.plans {
		errs = append(errs, p.Close())
	}
	clear(b.plans)
	return errors.Join(errs...)
}

func (b *matmuls) close() error { return errors.Join(b.freeTable(), b.again()) }

// product is d = alpha·op(a)·op(b) + beta·c, for row-major matrices without gaps; d's shape and a's give the sizes. A zero
// alpha counts as 1, and c is d where it is nil. Operands of float8 have a factor for each row of op(a) and each column of op(b).
type product struct {
	d, a, b, c     *array
	scaleA, scaleB *array
	transA, transB bool
	alpha, beta    float32
	batch          int // so many products, of matrices one behind the other; 0 counts as 1
}

// repeated is a batch of the product.
func (p product) repeated(batch int) product {
	p.batch = batch
	return p
}

// plus is the product with another matrix added, if there is one.
func (p product) plus(add *array) product {
	if add != nil {
		p.c, p.beta = add, 1
	}
	return p
}

// depth is how many products are added up for an element.
func (p product) depth() int {
	if p.transA {
		return p.a.shape[0]
	}
	return p.a.shape[1]
}

// flops is the multiplications and additions of all products of a batch.
func (p product) flops() float64 {
	return 2 * float64(max(1, p.batch)) * float64(p.d.len()) * float64(p.depth())
}

// spec is the product as cuBLASLt sees it.
func (p product) spec() gpu.MatmulSpec {
	at := p.a.at | p.b.at | p.d.at
	if p.c != nil {
		at |= p.c.at
	}
	spec := gpu.MatmulSpec{M: p.d.shape[0], N: p.d.shape[1], K: p.depth(), TransA: p.transA, TransB: p.transB,
		A: p.a.elem.dtype(), B: p.b.elem.dtype(), D: p.d.elem.dtype(), Align: 256}
	if p.scaleA != nil {
		spec.Scaling, spec.FastAccumulation = gpu.ScaledRows, true
	}
	if p.batch > 1 {
		spec.Batch, spec.StrideA, spec.StrideB, spec.StrideD = p.batch, p.a.len(), p.b.len(), p.d.len()
	}
	for spec.Align > 2 && at%spec.Align != 0 {
		spec.Align /= 2
	}
	return spec
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p product) error {
	run, err := c.m.blas.product(p, c.zeros)
	if err == nil {
		c.do(n, run, p.d, p.a, p.b, p.c, p.scaleA, p.scaleB)
		c.computes(p.flops())
		t := &c.tasks[len(c.tasks)-1]
		t.float8 = p.scaleA != nil
	}
	return err
}

// product plans a product and returns what enqueues it. Where cuBLASLt needs only a little workspace,
// that is a piece of what zeros gives, unless this is nil: what is returned then is for a single place in a run.
func (b *matmuls) product(p product, zeros func(bytes int) *array) (run func() error, err error) {
	if p.alpha == 0 {
		p.alpha = 1
	}
	if p.c == nil {
		p.c = p.d
	}
	plan, err := b.plan(p.spec(), addendOf(p.alpha, p.beta))
	if err != nil {
		return nil, err
	}
	var little *array
	if bytes := plan.workspace(); bytes > 0 && bytes <= littleWorkspace && zeros != nil {
		little = zeros(bytes)
	}
	return func() error {
		b.m.tuner.use(plan.choice)
		a := gpu.MatmulArgs{Alpha: p.alpha, Beta: p.beta, A: p.a.ptr(), B: p.b.ptr(), C: p.c.ptr(), D: p.d.ptr(),
			Workspace: b.workspace, WorkspaceSize: workspaceBytes}
		if little != nil {
			a.Workspace, a.WorkspaceSize, a.Zeroed = little.ptr(), little.extent(), true
		}
		if p.scaleA != nil {
			a.ScaleA, a.ScaleB = p.scaleA.ptr(), p.scaleB.ptr()
		}
		return plan.run(a, b.m.stream)
	}, nil
}
