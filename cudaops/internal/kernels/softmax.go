package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Softmax computes y = exp(x − max) / Σ exp(x − max) for each of rows rows of n elements. y may be x.
func (k *Kernels) Softmax(s gpu.Stream, y, x gpu.Ptr, rows, n int, t gpu.DType) error {
	return k.softmax(s, "Softmax", "softmax", []gpu.Ptr{y, x}, rows, n, t)
}

// SoftmaxBackward computes dx = y ⊙ (g − Σ g ⊙ y) for each row, from the output y of Softmax and its gradient g. dx may be
// either of them.
func (k *Kernels) SoftmaxBackward(s gpu.Stream, dx, g, y gpu.Ptr, rows, n int, t gpu.DType) error {
	return k.softmax(s, "SoftmaxBackward", "softmax_backward", []gpu.Ptr{dx, g, y}, rows, n, t)
}

func (k *Kernels) softmax(s gpu.Stream, op, name string, ps []gpu.Ptr, rows, n int, t gpu.DType) error {
	suf, err := suffix(op, t)
	if err != nil {
		return err
	}
	if empty, err := checkInts(op, rows, n); empty || err != nil {
		return err
	}
	l := args()
	for _, p := range ps {
		l.Ptr(p)
	}
	if n <= 1024 && packed(t, n, ps...) {
		return k.launch(s, "softmax", name+"_warp"+suf, line(ceilDiv(rows, 4), 128), l.Int64(int64(rows)).Int32(n))
	}
	for _, packs := range []int{2, 4} { // a thread, of rows that a block holds
		if threads := ceilDiv(n, 32*packs*vector(t)) * 32; threads <= 512 && packed(t, n, ps...) {
			return k.launch(s, "softmax", fmt.Sprintf("%s_held%d%s", name, packs, suf), line(rows, threads), l.Int32(n))
		}
	}
	return k.launch(s, "softmax", name+"_block"+suf, line(rows, longRowThreads(n, t)), l.Int32(n))
}

// Softmax computes Y of X, Rows of N elements.
type Softmax struct {
	Y, X    gpu.Ptr
	Rows, N int
	Type    gpu.DType
}

// SoftmaxBackward computes DX from Softmax's Y and its gradient G.
type SoftmaxBackward struct {
	DX, G, Y gpu.Ptr
	Rows, N  int
	Type     gpu.DType
}
