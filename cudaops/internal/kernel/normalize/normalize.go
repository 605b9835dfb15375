package normalize

import (
	"fmt"

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

// NormalizeWorkspace is the bytes of workspace that Forward and its backward pass take: two sums
// for each of normalizeParts blocks.
const (
	NormalizeWorkspace = 2 * 4 * normalizeParts
	normalizeParts     = 512
)

// Launch launches two kernels.
func (a Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	name, err := kernel.Suffixes("Normalize", "normalize", a.YType, a.XType)
	if err != nil {
		return err
	}
	if a.YType != a.XType && a.XType != gpu.Float32 && a.YType != gpu.Float16 {
		return fmt.Errorf("kernels.Normalize: from %v to %v, want one type, from float32 or to "+
			"float16", a.XType, a.YType)
	}
	if empty, err := kernel.CheckSizes("Normalize", a.N); empty || err != nil {
		return err
	}
	return normalize(k, s, name, kernel.Args().Ptr(a.Y).Ptr(a.X), a.Workspace, a.X, 0, a.N, a.XType)
}

// Backward computes the gradient DX = G/r − X·⟨G, X⟩/(r²·‖X‖), r = ‖X‖ + 1e-7, of [Normalize]'s X
// from that of its Y. DX may be G.
type Backward struct {
	DX, G, X, Workspace gpu.Ptr
	N                   int
	Type                gpu.DType
}

// Launch launches two kernels.
func (a Backward) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("NormalizeBackward", a.Type)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckSizes("NormalizeBackward", a.N); empty || err != nil {
		return err
	}
	l := kernel.Args().Ptr(a.DX).Ptr(a.G).Ptr(a.X)
	return normalize(k, s, "normalize_backward"+suf, l, a.Workspace, a.X, a.G, a.N, a.Type)
}

func normalize(k *kernel.Set, s gpu.Stream, name string, l *gpu.Args, parts, x, g gpu.Ptr,
	n int, xt gpu.DType) error {
	suf, err := kernel.Suffix(name, xt)
	if err != nil {
		return err
	}
	blocks := min(normalizeParts, kernel.CeilDiv(n, 4*256))
	sums := kernel.Args().Ptr(parts).Ptr(x).Ptr(g).Int64(int64(n))
	if err := k.Enqueue(s, "normalize", "normalize_sums"+suf,
		kernel.Line(blocks, 256), sums); err != nil {
		return err
	}
	return k.Enqueue(s, "normalize", name, kernel.Line(min(8*k.Info.SMs, kernel.CeilDiv(n, 4*256)),
		256), l.Ptr(parts).Int32(blocks).Int64(int64(n)))
}
