package optimizer

import (
	"errors"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the gradients' norm and AdamW over all parameters of a model of 350 million, with
// gradients of float32 and of bfloat16.
func Bench(b *bench.B) {
	const d, layers, ff, vocab = 1024, 24, 2816, 50304
	sizes := []int{vocab * d, d}
	for range layers {
		sizes = append(sizes, d, d*d, d*d, d*d, d*d, d, ff*d, ff*d, ff*d)
	}
	var tensors []Tensor
	total := 0
	for _, n := range sizes {
		total += n
		t := Tensor{Param: b.Normal(n, gpu.Float32), Grad: b.Normal(n, gpu.Float32),
			GradType: gpu.Float32, First: b.Alloc(n, gpu.Float32),
			Second: b.Alloc(n, gpu.Float32), Copy: b.Alloc(n, gpu.BFloat16), CopyType: gpu.BFloat16,
			Size: n, LRScale: 1, Decay: 0.01, Beta1: 0.9, Beta2: 0.999}
		if b.Err == nil {
			b.Do(errors.Join(b.Ctx.Memset8(t.First, 0, 4*n, b.Stream),
				b.Ctx.Memset8(t.Second, 0, 4*n, b.Stream)))
		}
		tensors = append(tensors, t)
	}
	if b.Err != nil {
		return
	}
	benchAdamW(b, tensors, total, gpu.Float32, "")
	for i, n := range sizes {
		tensors[i].Grad, tensors[i].GradType = b.Normal(n, gpu.BFloat16), gpu.BFloat16
	}
	benchAdamW(b, tensors, total, gpu.BFloat16, "_bf16_gradients")
}

// benchAdamW is Bench with gradients of one type, of tensors with so many elements in all.
func benchAdamW(b *bench.B, tensors []Tensor, total int, gradients gpu.DType, suffix string) {
	if b.Err != nil {
		return
	}
	table, err := NewTable(b.Set, tensors)
	if err != nil {
		b.Do(err)
		return
	}
	defer func() { b.Do(errors.Join(b.Ctx.SyncStream(b.Stream), table.Free())) }()
	squares := b.Alloc(table.Chunks, gpu.Float32)
	control := b.Upload(Control{LR: 3e-4, Eps: 1e-8, GradScale: 1, MaxNorm: 1,
		SkipNonFinite: true}.Bytes())
	b.Time(bench.Measurement{Name: "gradnorm_llama350M" + suffix,
		Bytes: float64(gradients.Size() * total)}, func() error {
		return errors.Join(GradSquares{Squares: squares, Table: table}.Launch(b.Set, b.Stream),
			GradNorm{Control: control, Squares: squares, Count: table.Chunks,
				Scale: 0}.Launch(b.Set, b.Stream))
	})
	// Parameter and moments are read and written, the gradient is read and the parameter in
	// bfloat16 written.
	b.Time(bench.Measurement{Name: "adamw_llama350M" + suffix,
		Bytes: float64((2*3*4 + 2 + gradients.Size()) * total)}, func() error {
		return AdamW{Control: control, Table: table}.Launch(b.Set, b.Stream)
	})
}
