// Package normalize has the kernels that divide an array by its norm, and compute the gradient.
package normalize

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Forward computes Y = X/(‖X‖ + 1e-7) over N elements, the first step of the Newton-Schulz
// iteration. The types are equal, or X is float32, or Y is float16. Y may be X. Workspace has
// WorkspaceBytes bytes.
type Forward struct {
	Y, X, Workspace gpu.Ptr
	N               int
	YType, XType    gpu.DType
}

// WorkspaceBytes is the size of Workspace for Forward and Backward: two sums for each of maxParts
// blocks.
const (
	WorkspaceBytes = 2 * 4 * maxParts
	maxParts       = 512
)

// Launch enqueues two kernels.
func (a Forward) Launch(q *kernel.Queue) {
	normalize(q, "normalize"+kernel.Suffix(a.YType, a.XType), a.Workspace, a.X, 0, a.N,
		a.XType, a.Y, a.X)
}

// Backward computes the gradient DX = G/r − X·⟨G, X⟩/(r²·‖X‖) of X in [Forward], where r = ‖X‖ +
// 1e-7 and G is the gradient of Y. DX may be G.
type Backward struct {
	DX, G, X, Workspace gpu.Ptr
	N                   int
	Type                gpu.DType
}

// Launch enqueues two kernels.
func (a Backward) Launch(q *kernel.Queue) {
	normalize(q, "normalize_backward"+kernel.Suffix(a.Type), a.Workspace, a.X, a.G, a.N,
		a.Type, a.DX, a.G, a.X)
}

func normalize(q *kernel.Queue, name string, parts, x, g gpu.Ptr, n int, xt gpu.DType,
	args ...any) {
	blocks := min(maxParts, kernel.CeilDiv(n, 4*256))
	q.Run("normalize", "normalize_sums"+kernel.Suffix(xt), kernel.Line(blocks, 256), parts, x, g,
		int64(n))
	q.Run("normalize", name, kernel.Line(min(8*q.Info.SMs, kernel.CeilDiv(n, 4*256)), 256),
		append(args, parts, blocks, int64(n))...)
}
