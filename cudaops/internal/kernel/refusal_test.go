package kernel_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

func TestRefusals(t *testing.T) {
	k, ctx := fakeKernels(t)
	const s, huge, fp8 = gpu.Stream(0), 1 << 31, gpu.Float8E4M3
	seven := tensor.Shape(slices.Repeat([]int{2}, 7)).CalcStrides()
	table := func(tensors ...optimizer.Tensor) error {
		_, err := optimizer.NewTable(k, tensors)
		return err
	}
	for want, err := range map[string]error{
		"kernels.Fill: elements are of type float8e4m3": elementwise.Fill(k, s, 0, 0, 1, fp8),
		"kernels.Fill: a size is negative": elementwise.Fill(k, s, 0,
			0, -1, kerneltest.F32),
		"kernels.Cast: elements are of type float8e4m3": elementwise.Cast{Y: 0,
			YType: kerneltest.F32, X: 0, XType: fp8, N: 1}.Launch(k, s),
		"kernels.Unary: there is no function": elementwise.Unary{Op: 1000, Y: 0, X: 0,
			P: 0, N: 1, Type: kerneltest.F32}.Launch(k, s),
		"kernels.Binary: there is no function": elementwise.Binary{Op: -1, Y: 0,
			A: elementwise.Operand{}, B: elementwise.Operand{}, N: 1,
			Type: kerneltest.F32}.Launch(k, s),
		"kernels.Binary: a size is negative": elementwise.Binary{Op: elementwise.Add,
			Y: 0, A: elementwise.Operand{Period: -1}, B: elementwise.Operand{}, N: 1,
			Type: kerneltest.F32}.Launch(k, s),
		"kernels.RMSNorm: a size is above": normkernel.RMSNorm{Rows: huge,
			D: 1}.Launch(k, s),
		"kernels.RMSNorm: a Residual is given": normkernel.RMSNorm{Rows: 1, D: 1,
			Residual: 256}.Launch(k, s),
		"kernels.RMSNormBackward: elements are of type": normkernel.RMSNormBackward{Rows: 1,
			D: 1, DWType: fp8}.Launch(k, s),
		"kernels.RoPE: head dimension 3": rope.Rotate{Rows: 1, Seq: 1, Heads: 1,
			HeadDim: 3}.Launch(k, s),
		"kernels.RoPE: 2000000000 rows of 8 heads": rope.Rotate{Rows: 2e9, Seq: 1,
			Heads: 8, HeadDim: 64}.Launch(k, s),
		"kernels.DecodeAttention: 2 and 0 heads of 3 features": decode.Attention{
			Geometry: decode.Geometry{Heads: 2, HeadDim: 3, Capacity: 1}}.Launch(k, s),
		"kernels.DecodeAttention: 3 heads for 2 of keys": decode.Attention{
			Geometry: decode.Geometry{Heads: 3, KVHeads: 2, HeadDim: 4, Capacity: 1}}.Launch(k, s),
		"kernels.DecodeAttention: 1 heads for 1 of keys, of 258": decode.Attention{
			Geometry: decode.Geometry{Heads: 1, KVHeads: 1, HeadDim: 258, Capacity: 1}}.Launch(k, s),
		"kernels.DecodeAttention: elements are of type": decode.Attention{Type: fp8}.Launch(k, s),
		"kernels.DecodeProduct: a size is negative": decode.Product{Columns: -1,
			D: 1}.Launch(k, s),
		"kernels.DecodeGated: elements are of type": decode.Gated{Type: fp8}.Launch(k, s),
		"kernels.SiLUMul: 2147483647 rows of 3 elements": silu.Mul{Rows: huge - 1,
			F: 3}.Launch(k, s),
		"kernels.SiLUMul: of float8 rows and their scales": silu.Mul{Rows: 1, F: 1,
			Type: kerneltest.Bf16, H8: 256}.Launch(k, s),
		"kernels.SiLUMul: elements are of type float32": silu.Mul{Rows: 1, F: 1, H8: 256,
			Scale8: 256}.Launch(k, s),
		"kernels.SiLUMul: H is null": silu.Mul{Rows: 1, F: 1, GELU: true,
			Type: kerneltest.Bf16, H8: 256, Scale8: 256}.Launch(k, s),
		"kernels.AttentionDocuments: a window of 0 and": attention.Documents{Batch: 1,
			Seq: 1}.Launch(k, s),
		"kernels.AttentionDocuments: a window of -1": attention.Documents{Batch: 1, Seq: 1,
			Window: -1}.Launch(k, s),
		"kernels.SiLUMulBackward: DB is 256 bytes behind": silu.MulBackward{Rows: 1, F: 8,
			Type: kerneltest.Bf16, DB: 256, DAB8: 256, Scale8: 256}.Launch(k, s),
		"kernels.RMSNorm: of float8 rows and their scales": normkernel.RMSNorm{Rows: 1, D: 1,
			Type: kerneltest.Bf16, Scale8: 256}.Launch(k, s),
		"kernels.RMSNormBackward: elements are of type flo": normkernel.RMSNormBackward{Rows: 1,
			D: 1, DX8: 256, Scale8: 256}.Launch(k, s),
		"kernels.Quantize: elements are of type float8e4m3": quantize.Rows{Type: fp8}.Launch(k, s),
		"kernels.Quantize: a size is negative": quantize.Rows{Rows: 1, D: 1,
			XStride: -1}.Launch(k, s),
		"kernels.QuantizeColumns: a size is above": quantize.Columns{Rows: huge,
			D: 1}.Launch(k, s),
		"kernels.QuantizeColumns: 8388481 rows, want": quantize.Columns{Rows: 8388481,
			D: 1}.Launch(k, s),
		"kernels.Embedding: rows are float32 and the table": embedding.Forward{TableType: kerneltest.Bf16}.Launch(k, s),
		"kernels.EmbeddingBackward: the gradient of":        embedding.Backward{DTType: kerneltest.Bf16}.Launch(k, s),
		"kernels.CrossEntropy: a size is above": crossentropy.Forward{Rows: 1,
			V: huge}.Launch(k, s),
		"kernels.Softmax: a size is negative": softmax.Forward{Y: 0, X: 0, Rows: -1,
			N: 2, Type: kerneltest.F32}.Launch(k, s),
		"kernels.Reduce: there is no reduction": reduce.Reduce{Op: "mean"}.Launch(k, s),
		"kernels.Reduce: nothing to reduce": reduce.Reduce{Op: reduce.Sum, Outer: 1,
			Inner: 1}.Launch(k, s),
		"kernels.Reduce: from float16 to bfloat16": reduce.Reduce{Op: reduce.Sum,
			YType: kerneltest.Bf16, XType: kerneltest.F16}.Launch(k, s),
		"are 7 after merging, want at most 6": layout.Copy{Dims: slices.Repeat(
			[]int{2}, 7), YStrides: seven, XStrides: backwards(seven), Size: 4}.Launch(k, s),
		"kernels.Copy: elements of 3 bytes": layout.Copy{Dims: []int{1},
			YStrides: []int{1}, XStrides: []int{1}, Size: 3}.Launch(k, s),
		"kernels.Copy: dimensions [1], strides [] and []": layout.Copy{Dims: []int{1},
			Size: 4}.Launch(k, s),
		"kernels.NewTable: no tensors": table(),
		"kernels.NewTable: tensor 1 has 0 elements": table(optimizer.Tensor{Size: 1},
			optimizer.Tensor{}),
		"kernels.NewTable: tensor 0: an address is not": table(optimizer.Tensor{Size: 1,
			Param: 4}),
		"kernels.NewTable: elements are of type float8e4m3": table(optimizer.Tensor{Size: 1,
			GradType: fp8}),
	} {
		require.ErrorContains(t, err, want)
	}
	require.Empty(t, ctx.Trace())
	free, total, err := ctx.MemInfo()
	require.NoError(t, err)
	require.Equal(t, total, free)
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
		"Fill": elementwise.Fill(k, s, 0, 0, 0, kerneltest.F32),
		"Binary": elementwise.Binary{Op: elementwise.Add, Y: 0, A: elementwise.Operand{},
			B: elementwise.Operand{}, N: 0, Type: kerneltest.F32}.Launch(k, s),
		"RMSNorm": normkernel.RMSNorm{D: 4}.Launch(k, s), "RoPE": rope.Rotate{Seq: 1, Heads: 1,
			HeadDim: 2}.Launch(k, s),
		"SiLUMul":         silu.Mul{F: 4}.Launch(k, s),
		"Embedding":       embedding.Forward{Vocab: 3, D: 1}.Launch(k, s),
		"Quantize":        quantize.Rows{D: 3}.Launch(k, s),
		"QuantizeColumns": quantize.Columns{Rows: 3}.Launch(k, s),
		"SiLUMul with H8": silu.Mul{F: 4, Type: kerneltest.Bf16, H8: 256, Scale8: 256}.Launch(k, s),
		"CrossEntropy":    crossentropy.Forward{V: 3}.Launch(k, s), "Softmax": softmax.Forward{Y: 0,
			X: 0, Rows: 0, N: 5, Type: kerneltest.F32}.Launch(k, s),
		"Copy": layout.Copy{Dims: []int{3, 0}, YStrides: []int{1, 1}, XStrides: []int{1, 1},
			Size: 4}.Launch(k, s),
	} {
		require.NoError(t, err, what)
	}
	require.Empty(t, ctx.Trace())
}

// TestFaults has the driver fail in every call that a launch makes.
func TestFaults(t *testing.T) {
	for _, call := range []string{"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
		"cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernel"} {
		d := fake.New(fake.Config{Images: kerneltest.Kernels})
		ctx, err := d.Retain(0)
		require.NoError(t, err)
		d.Fail(call, 1, gpu.NotSupported)
		k := kernel.New(ctx)
		a := normkernel.RMSNormBackward{Rows: 4096, D: 8192, Type: kerneltest.F16, Workspace: 256}
		require.ErrorContains(t, a.Launch(k, 0), call)
		require.NoError(t, a.Launch(k, 0), call)
	}
}

// TestFloat8Launches counts kernels: one where rows are held in registers, and for rows of any
// length the one that stores them as float8 behind the op's own.
func TestFloat8Launches(t *testing.T) {
	k, ctx := fakeKernels(t)
	for _, d := range []int{768, 1024, 2048, 2304, 2816, 3072, 5632, 6144, 7, 20000} {
		held := d%8 == 0 && d <= 16384
		norm := normkernel.RMSNorm{Rows: 5, D: d, Type: kerneltest.Bf16, Y8: 256, Scale8: 256}
		normBackward := normkernel.RMSNormBackward{Rows: 5, D: d, Type: kerneltest.Bf16,
			DX8: 256, Scale8: 256}
		gate := silu.Mul{Rows: 5, F: d, Type: kerneltest.Bf16, H8: 256, Scale8: 256}
		gateBackward := silu.MulBackward{Rows: 5, F: d, GradStride: 2 * d, Type: kerneltest.Bf16,
			DB: gpu.Ptr(2 * d), DAB8: 256, Scale8: 256}
		for what, c := range map[string]struct {
			launch      func() error
			held, other int
		}{
			"Quantize": {func() error {
				return quantize.Rows{Rows: 5, D: d, Type: kerneltest.Bf16}.Launch(k, 0)
			}, 1, 1},
			"RMSNorm":         {func() error { return norm.Launch(k, 0) }, 1, 2},
			"RMSNormBackward": {func() error { return normBackward.Launch(k, 0) }, 2, 4},
			"SiLUMul":         {func() error { return gate.Launch(k, 0) }, 1, 1},
			"SiLUMulBackward": {func() error { return gateBackward.Launch(k, 0) }, 1, 2},
		} {
			want := c.other
			if held {
				want = c.held
			}
			ctx.ClearTrace()
			require.NoError(t, c.launch(), "%v, %v", what, d)
			require.Len(t, ctx.Trace(), want, "%v, %v", what, d)
		}
	}
}

// fakeKernels launches on a fake GPU, where the kernels of the binaries exist and do nothing.
func fakeKernels(t *testing.T) (*kernel.Set, *fake.Context) {
	t.Helper()
	ctx, err := fake.New(fake.Config{Images: kerneltest.Kernels}).Retain(0)
	require.NoError(t, err)
	k := kernel.New(ctx)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return k, ctx.(*fake.Context)
}
