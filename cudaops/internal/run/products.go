package run

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// WorkspaceBytes is what cuBLASLt may use besides its operands. NVIDIA recommends 32 MiB for
// Hopper.
const WorkspaceBytes = 32 << 20

// planKey tells plans apart.
type planKey struct {
	gpu.MatmulSpec
	alpha, beta float32
}

func keyOf(m program.Matmul) planKey { return planKey{m.Spec, m.Alpha, m.Beta} }

// Plan is a product and the way to compute it: one of cuBLASLt's, or behind them of this module's
// own.
type Plan struct {
	gpu.MatmulPlan
	BLAS   []string // cuBLASLt's ways
	Own    []kernel.Way
	Way    int // chosen, among both
	Choice *optime.Choice
}

// Ways are the names of all ways.
func (p *Plan) Ways() []string {
	names := append([]string{}, p.BLAS...)
	for _, w := range p.Own {
		names = append(names, w.String())
	}
	return names
}

// PlanOf returns the plan of a product, whose Spec is a normal one, if it was made. There is one for
// each shape and its factors, since what adds a matrix may be fastest in another way.
func (x *Executor) PlanOf(m program.Matmul) *Plan { return x.plans[keyOf(m)] }

// Plan plans a product, with at most so many of cuBLASLt's ways and those of this module's own.
func (x *Executor) Plan(m program.Matmul, ways int, own []kernel.Way) (_ *Plan, err error) {
	if x.Workspace == 0 {
		if x.Workspace, err = x.Memory.Alloc(WorkspaceBytes, "cuBLASLt's workspace"); err != nil {
			return nil, err
		}
	}
	blas, err := x.Ctx.Blas()
	if err != nil {
		return nil, err
	}
	plan, err := blas.Plan(m.Spec, WorkspaceBytes, ways)
	if err != nil {
		return nil, err
	}
	p := &Plan{MatmulPlan: plan, Own: own}
	for _, a := range plan.Algos() {
		p.BLAS = append(p.BLAS, strings.Trim(fmt.Sprint(a.ID), "[]"))
	}
	if x.plans == nil {
		x.plans = map[planKey]*Plan{}
	}
	x.plans[keyOf(m)] = p
	return p, nil
}

// product enqueues a product in the chosen way.
func (x *Executor) product(m program.Matmul) error {
	p := x.PlanOf(m)
	if p == nil {
		return fmt.Errorf("the product %+v was not planned", m.Spec)
	}
	a := m.MatmulArgs
	a.C = cmp.Or(a.C, a.D)
	if p.Way < len(p.BLAS) {
		a.Workspace, a.WorkspaceSize = x.Workspace, WorkspaceBytes
		return p.Run(p.Way, a, x.Stream)
	}
	own := gemm.Product{ProductShape: ProductShape(p.Spec()), Y: a.D, X: a.A, W: a.B,
		ScaleX: a.ScaleA, ScaleW: a.ScaleB, Type: p.Spec().D}
	if m.Beta != 0 { // it is 1, and Alpha too
		own.C = a.C
	}
	return x.Kernels.Launch(x.Stream, own)
}

// ProductShape is what the kernels of this module know of a product.
func ProductShape(m gpu.MatmulSpec) gemm.ProductShape {
	return gemm.ProductShape{Rows: m.M, Columns: m.N, D: m.K, TransW: m.TransB,
		Float8: m.Scaled()}
}

// ForgetPlans drops the plans, for another program.
func (x *Executor) ForgetPlans() error {
	var errs []error
	for _, p := range x.plans {
		errs = append(errs, p.Close())
	}
	clear(x.plans)
	return errors.Join(errs...)
}
