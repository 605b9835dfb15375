package softmax

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Launch computes y = exp(x − max) / Σ exp(x − max) for each of rows rows of n elements. y may be
// x.
func (p Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	return softmax(k, s, "Softmax", "softmax", []gpu.Ptr{p.Y, p.X}, p.Rows, p.N, p.Type)
}

// Launch computes dx = y ⊙ (g − Σ g ⊙ y) for each row, from the output y of Forward and its
// gradient g. The memory of dx may be that of either.
func (p Backward) Launch(k *kernel.Set, s gpu.Stream) error {
	return softmax(k, s, "SoftmaxBackward", "softmax_backward", []gpu.Ptr{p.DX, p.G, p.Y}, p.Rows,
		p.N, p.Type)
}

func softmax(k *kernel.Set, s gpu.Stream, op, name string, ps []gpu.Ptr, rows,
	n int, t gpu.DType) error {
	suf, err := kernel.Suffix(op, t)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckInts(op, rows, n); empty || err != nil {
		return err
	}
	l := kernel.Args()
	for _, p := range ps {
		l.Ptr(p)
	}
	if n <= 1024 && kernel.Packed(t, n, ps...) {
		return k.Enqueue(s, "softmax", name+"_warp"+suf, kernel.Line(kernel.CeilDiv(rows, 4), 128),
			l.Int64(int64(rows)).Int32(n))
	}
	for _, packs := range []int{2, 4} { // a thread, of rows that a block holds
		if threads := kernel.CeilDiv(n, 32*packs*kernel.Vector(t)) * 32; threads <= 512 &&
			kernel.Packed(t, n, ps...) {
			return k.Enqueue(s, "softmax", fmt.Sprintf("%s_held%d%s", name, packs, suf),
				kernel.Line(rows, threads), l.Int32(n))
		}
	}
	return k.Enqueue(s, "softmax", name+"_block"+suf,
		kernel.Line(rows, kernel.LongRowThreads(n, t)), l.Int32(n))
}

// Forward computes Y of X, Rows of N elements.
type Forward struct {
	Y, X    gpu.Ptr
	Rows, N int
	Type    gpu.DType
}

// Backward computes DX from Forward's Y and its gradient G.
type Backward struct {
	DX, G, Y gpu.Ptr
	Rows, N  int
	Type     gpu.DType
}
