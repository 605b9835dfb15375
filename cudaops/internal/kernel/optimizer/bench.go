package optimizer

import (
	"errors"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the gradients' norm and AdamW over all parameters of a model of 350 million.
func Bench(b *bench.B) {
	const d, layers, ff, vocab = 1024, 24, 2816, 50304
	sizes := []int{vocab * d, d}
	for range layers {
		sizes = append(sizes, d, d*d, d*d, d*d, d*d, d, ff*d, ff*d, ff*d)
	}
	var tensors []Tensor
	total := 0.0
	for _, n := range sizes {
		total += float64(n)
		tensors = append(tensors, Tensor{Param: b.Normal(n, gpu.Float32),
			Grad: b.Normal(n, gpu.Float32), GradType: gpu.Float32, First: b.Zeros(n, gpu.Float32),
			Second: b.Zeros(n, gpu.Float32), Copy: b.Alloc(n, gpu.BFloat16), CopyType: gpu.BFloat16,
			Size: n, LRScale: 1, Decay: 0.01, Beta1: 0.9, Beta2: 0.999})
	}
	table, err := NewTable(b.Ctx, tensors)
	b.Do(err)
	defer func() { b.Do(errors.Join(b.Ctx.SyncStream(b.Stream), table.Free())) }()
	squares := b.Alloc(table.Chunks, gpu.Float32)
	control := b.Upload(Control{LR: 3e-4, Eps: 1e-8, GradScale: 1, MaxNorm: 1,
		SkipNonFinite: true}.Bytes())
	b.Moves("gradnorm_llama350M", 4*total, GradSquares{Squares: squares, Table: table},
		GradNorm{Control: control, Squares: squares, Count: table.Chunks})
	// Parameter and moments are read and written, the gradient is read and the parameter in
	// bfloat16 written.
	b.Moves("adamw_llama350M", (2*3*4+2+4)*total, AdamW{Control: control, Table: table})
}
