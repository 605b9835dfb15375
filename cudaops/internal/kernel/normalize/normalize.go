package normalize

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Forward computes Y = X/(‖X‖ + 1e-7) over N elements, with which the Newton-Schulz iteration
// begins. The types are equal, or X is float32, or Y float16. Y may be X. Workspace is memory of
// NormalizeWorkspace bytes.
type Forward struct {
	Y, X, Workspace gpu.Ptr
	N               int
	YType, XType    gpu.DType
}

// NormalizeWorkspace is the bytes of workspace that Forward takes: a sum for each of normalizeParts
// blocks.
const (
	NormalizeWorkspace = 4 * normalizeParts
	normalizeParts     = 512
)

// Launch launches two kernels.
func (a Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	blocks := kernel.CeilDiv(a.N, 4*256)
	parts := min(normalizeParts, blocks)
	if err := k.Enqueue(s, "normalize", "normalize_sums"+kernel.Suffix(a.XType),
		kernel.Line(parts, 256), a.Workspace, a.X, int64(a.N)); err != nil {
		return err
	}
	return k.Enqueue(s, "normalize", "normalize"+kernel.Suffixes(a.YType, a.XType),
		kernel.Line(min(8*k.Info.SMs, blocks), 256), a.Y, a.X, a.Workspace, parts, int64(a.N))
}
