package run

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// WorkspaceBytes is what cuBLASLt may use besides its operands. NVIDIA recommends 32 MiB for
// Hopper.
const WorkspaceBytes = 32 << 20

// Plan is a product and cuBLASLt's variants to compute it, by their names.
type Plan struct {
	gpu.MatmulPlan
	Variants []string
}

// Plan plans a product that was not planned before, with at most so many of cuBLASLt's variants.
func (x *Executor) Plan(m gpu.MatmulSpec, variants int) (_ *Plan, err error) {
	if p := x.plans[m]; p != nil {
		return p, nil
	}

	if x.Workspace == 0 {
		if x.Workspace, err = x.Memory.Alloc(WorkspaceBytes, "cuBLASLt's workspace"); err != nil {
			return nil, err
		}
	}

	blas, err := x.Ctx.Blas()
	if err != nil {
		return nil, err
	}

	plan, err := blas.Plan(m, WorkspaceBytes, variants)
	if err != nil {
		return nil, err
	}

	p := &Plan{MatmulPlan: plan}
	for _, a := range plan.Algos() {
		p.Variants = append(p.Variants, strings.Trim(fmt.Sprint(a.ID), "[]"))
	}

	if x.plans == nil {
		x.plans = map[gpu.MatmulSpec]*Plan{}
	}

	x.plans[m] = p
	return p, nil
}

// product enqueues a product. The variant behind cuBLASLt's is this module's own.
func (x *Executor) product(m program.Matmul) error {
	p, a := x.plans[m.Spec], m.MatmulArgs
	if p == nil {
		return fmt.Errorf("the product %+v was not planned", m.Spec)
	}

	if m.Variant < len(p.Variants) {
		a.Workspace, a.WorkspaceSize = x.Workspace, WorkspaceBytes
		return p.Run(m.Variant, a, x.Stream)
	}

	own := OwnProduct(m.Spec)
	own.Y, own.X, own.W, own.ScaleX, own.ScaleW = a.D, a.A, a.B, a.ScaleA, a.ScaleB
	if m.Beta != 0 { // it is 1, and Alpha too
		own.C = cmp.Or(a.C, a.D)
	}

	return x.Kernels.Launch(x.Stream, own)
}

// OwnProduct is a product as the kernels of this module know it, without its operands.
func OwnProduct(m gpu.MatmulSpec) gemm.Product {
	return gemm.Product{Rows: m.M, Columns: m.N, D: m.K, TransW: m.TransB, Float8: m.Scaled(),
		Type: m.D}
}

// ForgetPlans drops the plans, for another program.
func (x *Executor) ForgetPlans() { clear(x.plans) }
