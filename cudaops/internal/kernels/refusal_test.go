package kernels

import (
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestRefusals(t *testing.T) {
	k, ctx := fakeKernels(t)
	const s, huge, fp8 = gpu.Stream(0), 1 << 31, gpu.Float8E4M3
	seven := contiguous(slices.Repeat([]int{2}, 7))
	table := func(tensors ...OptimTensor) error { _, err := k.NewTable(tensors); return err }
	for want, err := range map[string]error{
		"kernels.Fill: elements are of type float8e4m3":     k.Fill(s, 0, 0, 1, fp8),
		"kernels.Fill: a size is negative":                  k.Fill(s, 0, 0, -1, f32),
		"kernels.Cast: elements are of type float8e4m3":     k.Cast(s, 0, f32, 0, fp8, 1),
		"kernels.Unary: there is no function":               k.Unary(s, 1000, 0, 0, 0, 1, f32),
		"kernels.Binary: there is no function":              k.Binary(s, -1, 0, Operand{}, Operand{}, 1, f32),
		"kernels.Binary: a size is negative":                k.Binary(s, Add, 0, Operand{Period: -1}, Operand{}, 1, f32),
		"kernels.RMSNorm: a size is above":                  k.RMSNorm(s, RMSNorm{Rows: huge, D: 1}),
		"kernels.RMSNorm: a Residual is given":              k.RMSNorm(s, RMSNorm{Rows: 1, D: 1, Residual: 256}),
		"kernels.RMSNormBackward: elements are of type":     k.RMSNormBackward(s, RMSNormBackward{Rows: 1, D: 1, DWType: fp8}),
		"kernels.RoPE: head dimension 3":                    k.RoPE(s, RoPE{Rows: 1, Seq: 1, Heads: 1, HeadDim: 3}),
		"kernels.RoPE: 2000000000 rows of 8 heads":          k.RoPE(s, RoPE{Rows: 2e9, Seq: 1, Heads: 8, HeadDim: 64}),
		"kernels.SiLUMul: 2147483647 rows of 3 elements":    k.SiLUMul(s, SiLUMul{Rows: huge - 1, F: 3}),
		"kernels.SiLUMul: of float8 rows and their scales":  k.SiLUMul(s, SiLUMul{Rows: 1, F: 1, Type: bf16, H8: 256}),
		"kernels.SiLUMul: elements are of type float32":     k.SiLUMul(s, SiLUMul{Rows: 1, F: 1, H8: 256, Scale8: 256}),
		"kernels.SiLUMulBackward: DB is 256 bytes behind":   k.SiLUMulBackward(s, SiLUMulBackward{Rows: 1, F: 8, Type: bf16, DB: 256, DAB8: 256, Scale8: 256}),
		"kernels.RMSNorm: of float8 rows and their scales":  k.RMSNorm(s, RMSNorm{Rows: 1, D: 1, Type: bf16, Scale8: 256}),
		"kernels.RMSNormBackward: elements are of type flo": k.RMSNormBackward(s, RMSNormBackward{Rows: 1, D: 1, DX8: 256, Scale8: 256}),
		"kernels.Quantize: elements are of type float8e4m3": k.Quantize(s, Quantize{Type: fp8}),
		"kernels.Quantize: a size is negative":              k.Quantize(s, Quantize{Rows: 1, D: 1, XStride: -1}),
		"kernels.QuantizeColumns: a size is above":          k.QuantizeColumns(s, QuantizeColumns{Rows: huge, D: 1}),
		"kernels.QuantizeColumns: 8388481 rows, want":       k.QuantizeColumns(s, QuantizeColumns{Rows: 8388481, D: 1}),
		"kernels.Embedding: rows are float32 and the table": k.Embedding(s, Embedding{TableType: bf16}),
		"kernels.EmbeddingBackward: the gradient of":        k.EmbeddingBackward(s, EmbeddingBackward{DTType: bf16}),
		"kernels.CrossEntropy: a size is above":             k.CrossEntropy(s, CrossEntropy{Rows: 1, V: huge}),
		"kernels.Softmax: a size is negative":               k.Softmax(s, 0, 0, -1, 2, f32),
		"kernels.Reduce: there is no reduction":             k.Reduce(s, Reduce{Op: "mean"}),
		"kernels.Reduce: nothing to reduce":                 k.Reduce(s, Reduce{Op: Sum, Outer: 1, Inner: 1}),
		"kernels.Reduce: from float16 to bfloat16":          k.Reduce(s, Reduce{Op: Sum, YType: bf16, XType: f16}),
		"are 7 after merging, want at most 6":               k.Copy(s, Copy{Dims: slices.Repeat([]int{2}, 7), YStrides: seven, XStrides: backwards(seven), Size: 4}),
		"kernels.Copy: elements of 3 bytes":                 k.Copy(s, Copy{Dims: []int{1}, YStrides: []int{1}, XStrides: []int{1}, Size: 3}),
		"kernels.Copy: dimensions [1], strides [] and []":   k.Copy(s, Copy{Dims: []int{1}, Size: 4}),
		"kernels.NewTable: no tensors":                      table(),
		"kernels.NewTable: tensor 1 has 0 elements":         table(OptimTensor{Size: 1}, OptimTensor{}),
		"kernels.NewTable: tensor 0: an address is not":     table(OptimTensor{Size: 1, Param: 4}),
		"kernels.NewTable: elements are of type float8e4m3": table(OptimTensor{Size: 1, GradType: fp8}),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	if n := ctx.Stats().Launches; n != 0 {
		t.Errorf("%d kernels were launched", n)
	}
	if n := ctx.Stats().DeviceBytes; n != 0 {
		t.Errorf("%d bytes are still allocated", n)
	}
}

func backwards(s []int) []int {
	s = slices.Clone(s)
	slices.Reverse(s)
	return s
}

// TestNothingToDo gives empty arrays, for which no kernel may be launched.
func TestNothingToDo(t *testing.T) {
	k, ctx := fakeKernels(t)
	const s = gpu.Stream(0)
	for what, err := range map[string]error{
		"Fill":    k.Fill(s, 0, 0, 0, f32),
		"Binary":  k.Binary(s, Add, 0, Operand{}, Operand{}, 0, f32),
		"RMSNorm": k.RMSNorm(s, RMSNorm{D: 4}), "RoPE": k.RoPE(s, RoPE{Seq: 1, Heads: 1, HeadDim: 2}),
		"SiLUMul": k.SiLUMul(s, SiLUMul{F: 4}), "Embedding": k.Embedding(s, Embedding{Vocab: 3, D: 1}),
		"Quantize": k.Quantize(s, Quantize{D: 3}), "QuantizeColumns": k.QuantizeColumns(s, QuantizeColumns{Rows: 3}),
		"SiLUMul with H8": k.SiLUMul(s, SiLUMul{F: 4, Type: bf16, H8: 256, Scale8: 256}),
		"CrossEntropy":    k.CrossEntropy(s, CrossEntropy{V: 3}), "Softmax": k.Softmax(s, 0, 0, 0, 5, f32),
		"Copy": k.Copy(s, Copy{Dims: []int{3, 0}, YStrides: []int{1, 1}, XStrides: []int{1, 1}, Size: 4}),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := ctx.Stats().Launches; n != 0 {
		t.Errorf("%d kernels were launched", n)
	}
}

// TestFaults has the driver fail in every call that a launch makes.
func TestFaults(t *testing.T) {
	for _, call := range []string{"cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncSetAttribute",
		"cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernel"} {
		d := fake.New(fake.Config{AnyKernel: true})
		ctx, err := d.Retain(0)
		if err != nil {
			t.Fatal(err)
		}
		d.Fail(call, 1, gpu.NotSupported)
		k := New(ctx)
		a := RMSNormBackward{Rows: 4096, D: 8192, Type: f16, Workspace: 256}
		if err := k.RMSNormBackward(0, a); err == nil || !strings.Contains(err.Error(), call) {
			t.Errorf("%s fails: got %v", call, err)
		}
		if err := k.RMSNormBackward(0, a); err != nil {
			t.Errorf("after %s failed once: %v", call, err)
		}
	}
}

// TestFloat8Launches counts kernels: one where rows are held in registers, and for rows of any length the one that stores them as
// float8 behind the op's own.
func TestFloat8Launches(t *testing.T) {
	k, ctx := fakeKernels(t)
	for _, d := range []int{768, 1024, 2048, 2304, 2816, 3072, 5632, 6144, 7, 20000} {
		held := d%8 == 0 && d <= 16384
		norm := RMSNorm{Rows: 5, D: d, Type: bf16, Y8: 256, Scale8: 256}
		normBackward := RMSNormBackward{Rows: 5, D: d, Type: bf16, DX8: 256, Scale8: 256}
		gate := SiLUMul{Rows: 5, F: d, Type: bf16, H8: 256, Scale8: 256}
		gateBackward := SiLUMulBackward{Rows: 5, F: d, GradStride: 2 * d, Type: bf16, DB: gpu.Ptr(2 * d), DAB8: 256, Scale8: 256}
		for what, c := range map[string]struct {
			launch      func() error
			held, other int
		}{
			"Quantize":        {func() error { return k.Quantize(0, Quantize{Rows: 5, D: d, Type: bf16}) }, 1, 1},
			"RMSNorm":         {func() error { return k.RMSNorm(0, norm) }, 1, 2},
			"RMSNormBackward": {func() error { return k.RMSNormBackward(0, normBackward) }, 2, 4},
			"SiLUMul":         {func() error { return k.SiLUMul(0, gate) }, 1, 1},
			"SiLUMulBackward": {func() error { return k.SiLUMulBackward(0, gateBackward) }, 1, 2},
		} {
			want := c.other
			if held {
				want = c.held
			}
			before := ctx.Stats().Launches
			if err := c.launch(); err != nil {
				t.Errorf("%s, %d columns: %v", what, d, err)
			}
			if n := ctx.Stats().Launches - before; int(n) != want {
				t.Errorf("%s, %d columns: %d kernels, want %d", what, d, n, want)
			}
		}
	}
}
