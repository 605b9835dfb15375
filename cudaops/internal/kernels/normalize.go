package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Normalize computes Y = X/(‖X‖ + 1e-7) over N elements, with which the Newton-Schulz iteration begins. The types are equal,
// or X is float32, or Y float16. Y may be X. Workspace is memory of NormalizeWorkspace bytes.
type Normalize struct {
	Y, X, Workspace gpu.Ptr
	N               int
	YType, XType    gpu.DType
}

// NormalizeWorkspace is the bytes of workspace that Normalize and its backward pass take: two sums for each of
// normalizeParts blocks.
const (
	NormalizeWorkspace = 2 * 4 * normalizeParts
	normalizeParts     = 512
)

// Normalize launches two kernels.
func (k *Kernels) Normalize(s gpu.Stream, a Normalize) error {
	name, err := suffixes("Normalize", "normalize", a.YType, a.XType)
	if err != nil {
		return err
	}
	if a.YType != a.XType && a.XType != gpu.Float32 && a.YType != gpu.Float16 {
		return fmt.Errorf("kernels.Normalize: from %v to %v, want one type, from float32 or to float16", a.XType, a.YType)
	}
	if empty, err := checkSizes("Normalize", a.N); empty || err != nil {
		return err
	}
	return k.normalize(s, name, args().Ptr(a.Y).Ptr(a.X), a.Workspace, a.X, 0, a.N, a.XType)
}

// NormalizeBackward computes the gradient DX = G/r − X·⟨G, X⟩/(r²·‖X‖), r = ‖X‖ + 1e-7, of [Kernels.Normalize]'s X from that
// of its Y. DX may be G.
type NormalizeBackward struct {
	DX, G, X, Workspace gpu.Ptr
	N                   int
	Type                gpu.DType
}

// NormalizeBackward launches two kernels.
func (k *Kernels) NormalizeBackward(s gpu.Stream, a NormalizeBackward) error {
	suf, err := suffix("NormalizeBackward", a.Type)
	if err != nil {
		return err
	}
	if empty, err := checkSizes("NormalizeBackward", a.N); empty || err != nil {
		return err
	}
	l := args().Ptr(a.DX).Ptr(a.G).Ptr(a.X)
	return k.normalize(s, "normalize_backward"+suf, l, a.Workspace, a.X, a.G, a.N, a.Type)
}

func (k *Kernels) normalize(s gpu.Stream, name string, l *gpu.Args, parts, x, g gpu.Ptr, n int, xt gpu.DType) error {
	suf, err := suffix(name, xt)
	if err != nil {
		return err
	}
	blocks := min(normalizeParts, ceilDiv(n, 4*256))
	sums := args().Ptr(parts).Ptr(x).Ptr(g).Int64(int64(n))
	if err := k.launch(s, "normalize", "normalize_sums"+suf, line(blocks, 256), sums); err != nil {
		return err
	}
	return k.launch(s, "normalize", name, line(min(8*k.info.SMs, ceilDiv(n, 4*256)), 256), l.Ptr(parts).Int32(blocks).Int64(int64(n)))
}
