package program

import (
	"cmp"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Matmul is the Params of a matrix product D = Alpha·op(A)·op(B) + Beta·C. Where C is null it is D.
type Matmul struct {
	Spec           gpu.MatmulSpec
	Alpha, Beta    float32
	A, B, C, D     gpu.Ptr
	ScaleA, ScaleB gpu.Ptr
	Workspace      gpu.Ptr // that is zero when a run begins; null for that of all products
	WorkspaceBytes int
}

// Addend is what a product adds to its sums.
type Addend uint8

// The addends.
const (
	Nothing Addend = iota
	AMatrix        // as it is
	Factors        // and sums or matrix are multiplied by factors
)

// Added is what the product adds.
func (m Matmul) Added() Addend {
	switch {
	case m.Alpha == 1 && m.Beta == 0:
		return Nothing
	case m.Alpha == 1 && m.Beta == 1:
		return AMatrix
	}
	return Factors
}

// Operands is the product's operands as cuBLASLt takes them.
func (m Matmul) Operands() gpu.MatmulArgs {
	return gpu.MatmulArgs{Alpha: m.Alpha, Beta: m.Beta, A: m.A, B: m.B, C: cmp.Or(m.C, m.D), D: m.D,
		ScaleA: m.ScaleA, ScaleB: m.ScaleB, Workspace: m.Workspace, WorkspaceSize: m.WorkspaceBytes,
		Zeroed: m.Workspace != 0}
}
