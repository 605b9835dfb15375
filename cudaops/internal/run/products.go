package run

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// WorkspaceBytes is the size of the workspace that cuBLASLt may use. NVIDIA recommends 32 MiB for Hopper.
const WorkspaceBytes = 32 << 20

// Plan is a planned product, with the names of cuBLASLt's variants for it.
type Plan struct {
	gpu.MatmulPlan
	Variants []string
}

// Plan returns the plan of a product, with at most the given number of cuBLASLt's variants. Each product
// is planned only once.
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

// product enqueues a product. The variant that follows cuBLASLt's variants is this module's kernel.
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
	if m.Beta != 0 { // Beta and Alpha are both 1 here
		own.C = cmp.Or(a.C, a.D)
	}

	return x.Kernels.Launch(x.Stream, own)
}

// OwnProduct returns a product as a launch of this module's kernel, without operands.
func OwnProduct(m gpu.MatmulSpec) gemm.Product {
	return gemm.Product{Rows: m.M, Columns: m.N, D: m.K, TransW: m.TransB, Float8: m.Scaled(),
		Type: m.D}
}

// ClearPlans discards all plans, so that the executor can serve another program.
func (x *Executor) ClearPlans() { clear(x.plans) }
