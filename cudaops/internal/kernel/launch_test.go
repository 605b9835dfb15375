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
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

// TestLargeCopies checks that a copy of more elements than a kernel can count is split in two.
func TestLargeCopies(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	require.NoError(t, k.Launch(0, layout.Copy{Y: p, X: p + 2, Dims: []int{65537, 32771},
		YStrides: []int{32771, 1}, XStrides: []int{32773, 1}, Size: 2}))
	var rows []int
	for _, op := range c.Trace {
		if op.Name != "" {
			rows = append(rows, op.Config.Grid.X)
		}
	}

	each := func(n int) int { return kernel.CeilDiv(n*32771, 4*256) }
	require.Equal(t, []int{each(32768), each(32769)}, rows)
}

// TestCopies checks that dimensions are merged and elements widened as far as both sides allow.
func TestCopies(t *testing.T) {
	k, ctx := fakeKernels(t)
	p, err := ctx.Alloc(1 << 20)
	require.NoError(t, err)
	for _, c := range []struct {
		dims, ys, xs []int
		size         int
		kernel       string // empty for a plain copy
		elements     int    // of the kernel's element size
	}{
		{[]int{4, 8}, []int{8, 1}, []int{8, 1}, 2, "", 0},
		{[]int{1, 1}, []int{7, 7}, []int{5, 5}, 4, "", 0},
		{[]int{3000, 1, 8}, []int{8, 8, 1}, []int{16, 3, 1}, 2, "copy_strided_16", 3000},
		{[]int{3000, 4, 6}, []int{24, 6, 1}, []int{48, 6, 1}, 2, "copy_strided_16", 9000},
		{[]int{3000, 6}, []int{6, 1}, []int{10, 1}, 2, "copy_strided_4", 9000},
		{[]int{3000, 7}, []int{7, 1}, []int{9, 1}, 2, "copy_strided_2", 21000},
		{[]int{3000, 8}, []int{8, 1}, []int{0, 1}, 8, "copy_strided_16", 12000},
		{[]int{3000, 9}, []int{9, 1}, []int{1, 3000}, 16, "copy_strided_16", 27000},
		{[]int{3000, 7}, []int{7, 1}, []int{1, 3000}, 4, "copy_strided_4", 21000},
		{[]int{9, 9}, []int{9, 1}, []int{1, 9}, 8, "copy_transposed_8", 0},
	} {
		ctx.Trace = nil
		require.NoError(t, k.Launch(0, layout.Copy{Y: p, X: p.Offset(1 << 16), Dims: c.dims,
			YStrides: c.ys, XStrides: c.xs, Size: c.size}))
		require.Len(t, ctx.Trace, 1)
		require.Equal(t, c.kernel, ctx.Trace[0].Name, "%+v", c)
		if c.elements > 0 {
			require.Equal(t, kernel.CeilDiv(c.elements, 4*256), ctx.Trace[0].Config.Grid.X)
		}
	}

	require.NoError(t, ctx.Free(p))
}

// TestInvalidShapes launches with shapes that users could provide: sizes too large to count, seven
// dimensions that can't be merged, and no elements.
func TestInvalidShapes(t *testing.T) {
	k, ctx := fakeKernels(t)
	const s, huge = gpu.Stream(0), 1 << 31
	seven := tensor.Shape(slices.Repeat([]int{2}, 7)).CalcStrides()
	p, err := ctx.Alloc(1 << 10)
	require.NoError(t, err)
	empty, err := optimizer.NewTable(k.Ctx, func(int) (gpu.Ptr, error) { return p, nil }, nil)
	require.NoError(t, err)
	require.NoError(t, ctx.Free(p))
	ctx.Trace = nil
	for want, err := range map[string]error{
		"kernels: softmax_block_f32: 2147483648 elements, want at most": k.Launch(s,
			softmax.Forward{Rows: 1, N: huge}),
		"kernels: cross_entropy_forward_f32: a grid of 2147483648x1x1": k.Launch(s,
			crossentropy.Forward{
				Rows: huge, V: 1}),
		"kernels: quantize_columns_bf16: a grid of 1x65536x1 blocks": k.Launch(s, quantize.Columns{
			Rows: 8388481, D: 1, Type: kerneltest.Bf16}),
		"kernels.RoPE: 2000000000 rows of 8 heads": k.Launch(s, rope.Rotate{Rows: 2e9, Seq: 1,
			Heads: 8, HeadDim: 64}),
		"kernels.SiLUMul: 2147483647 rows of 3 elements": k.Launch(s, silu.Mul{Rows: huge - 1,
			F: 3}),
		"kernels.DecodeAttention: heads of 258 features": k.Launch(s, decode.Attention{
			Geometry: decode.Geometry{Heads: 1, KVHeads: 1, HeadDim: 258, Capacity: 1}}),
		"are 7 after merging, want at most 6": k.Launch(s, layout.Copy{Dims: slices.Repeat(
			[]int{2}, 7), YStrides: seven, XStrides: backwards(seven), Size: 4}),
		"unary_f8e4m3": k.Launch(s, elementwise.Unary{N: 1, Type: gpu.Float8E4M3}),
		"variant hopper does not accept the arguments; use one of [plain]": k.Launch(s,
			attention.Forward{Geometry: attention.Geometry{Batch: 1, Seq: 1, Heads: 1, KVHeads: 1,
				HeadDim: 3}, Variant: kernel.Variant{Family: "hopper"}}),
		"kernels.Reduce: nothing to reduce, [1, 0, 1]": k.Launch(s, reduce.Reduce{Op: reduce.Max,
			Outer: 1, Inner: 1}),
		"kernels.Kasmina: 2147483648 rows of 1 seeds": k.Launch(s,
			kasmina.Forward{Layer: kasmina.Layer{
				Rows: huge, Chunk: 4, State: kasmina.State{Seeds: 1}}}),
		"kernels.Kasmina: 1 rows of 1024 seeds of 1048576": k.Launch(s,
			kasmina.Backward{Layer: kasmina.Layer{
				Rows: 1, Chunk: 1 << 20, State: kasmina.State{Seeds: 1 << 10}}}),
		"weight 0 is 8388624x16, want at most 8388608x16777216": func() error {
			_, err := quantize.NewTable(k.Ctx, k.Ctx.Alloc, []quantize.Weight{{Rows: 1<<23 + 16,
				D: 16}})
			return err
		}(),
		"string is not a launch": k.Launch(s, "softmax"),
		"tensor 0: an address is not a multiple of 16": func() error {
			_, err := optimizer.NewTable(k.Ctx, k.Ctx.Alloc, []optimizer.Tensor{{Size: 1, Param: 4}})
			return err
		}(),
	} {
		require.ErrorContains(t, err, want)
	}

	for what, l := range map[string]kernel.Launch{
		"Binary":  elementwise.Binary{Op: elementwise.Add},
		"Softmax": softmax.Forward{N: 5},
		"Copy": layout.Copy{Dims: []int{3, 0}, YStrides: []int{1, 1}, XStrides: []int{1, 1},
			Size: 4},
		"a transposition": layout.Copy{Dims: []int{0, 9, 9}, YStrides: []int{81, 9, 1},
			XStrides: []int{81, 1, 9}, Size: 4},
		"rows": reduce.Reduce{Op: reduce.Sum, N: 9, Inner: 1}, "columns": reduce.Reduce{
			Op: reduce.Sum, Outer: 1, N: 9},
		"AdamW":      optimizer.Elementwise{Kernel: "AdamW", Table: empty},
		"AdamW8bit":  optimizer.Elementwise{Kernel: "AdamW8bit", Table: empty},
		"Lion":       optimizer.Elementwise{Kernel: "Lion", Table: empty},
		"Muon":       optimizer.Direction{Kernel: "Muon", Table: empty},
		"Muon's end": optimizer.Apply{Kernel: "Muon", Table: empty},
	} {
		require.NoError(t, k.Launch(s, l), what)
	}

	require.Len(t, ctx.Trace, 1, "the first step of a reduction of columns")
	requireFreed(t, ctx)
}

func backwards(s []int) []int {
	s = slices.Clone(s)
	slices.Reverse(s)
	return s
}

// TestLaunches launches every kernel with a distinct parameter list. The fake driver reads the
// parameters from the binaries, so missing or additional arguments are errors.
func TestLaunches(t *testing.T) {
	k, ctx := fakeKernels(t)
	p, err := ctx.Alloc(4 << 20)
	require.NoError(t, err)
	ids := p
	alloc := func(int) (gpu.Ptr, error) { return p, nil }
	table, err := optimizer.NewTable(k.Ctx, alloc, []optimizer.Tensor{{Size: 9, Param: p, Grad: p}})
	require.NoError(t, err)
	two, err := optimizer.NewScattered(k.Ctx, alloc, []optimizer.Tensor{{Size: 9, Grad: p,
		Other: p, FirstChunk: 1}}, 3)
	require.NoError(t, err)
	weights, err := quantize.NewTable(k.Ctx, alloc, []quantize.Weight{{X: p, Y: p, Scale: p, Rows: 16,
		D: 16}})
	require.NoError(t, err)
	for _, dt := range kerneltest.StorageTypes {
		launches := []kernel.Launch{
			crossentropy.Scale{Scale: p, Targets: ids, Rows: 3},
			crossentropy.Mean{Mean: p, Losses: p, Scale: p, Rows: 3},
			optimizer.GradSquares{Squares: p, Table: table},
			optimizer.GradSquares{Squares: p, Table: two},
			optimizer.GradNorm{Control: p, Squares: p, Count: 3},
			optimizer.Elementwise{Kernel: "AdamW", Control: p, Table: table},
			optimizer.Elementwise{Kernel: "AdamW", Control: p, Table: two},
			optimizer.Direction{Kernel: "Muon", Control: p, Squares: p, Table: table},
			optimizer.Apply{Kernel: "Muon", Control: p, Table: table}, quantize.Weights{Table: weights},
			elementwise.Unary{Op: elementwise.Tanh, Y: p, X: p, N: 9, Type: dt},
			elementwise.Binary{Op: elementwise.Add, Y: p, A: elementwise.Operand{Ptr: p},
				B: elementwise.Operand{Ptr: p, Period: 8}, N: 80, Type: dt},
			elementwise.Cast{Y: p, YType: dt, X: p, N: 9},
			elementwise.Axpby{Y: p, YType: dt, X: p, N: 9, Alpha: 1},
			normalize.Forward{Y: p, X: p, Workspace: p, N: 9, YType: dt},
			normalize.Backward{DX: p, G: p, X: p, Workspace: p, N: 9, Type: dt},
			decode.Attention{Geometry: decode.Geometry{Heads: 8, KVHeads: 1, HeadDim: 64,
				Capacity: 9}, Type: dt},
			rope.Rotate{Y: p, X: p, Rows: 3, Seq: 3, Heads: 1, HeadDim: 6, Type: dt},
			rope.Rotate{Y: p, X: p, Rows: 3, Seq: 3, Heads: 3, HeadDim: 64, Type: dt},
			rope.Rotate{Y: p, X: p, Rows: 3, Seq: 3, Heads: 4, HeadDim: 64, Type: dt},
			layout.Copy{Y: p, X: p, Dims: []int{9, 9}, YStrides: []int{9, 1},
				XStrides: []int{1, 9}, Size: dt.Size()},
			layout.Copy{Y: p, X: p, Dims: []int{9, 9}, YStrides: []int{19, 1},
				XStrides: []int{11, 1}, Size: dt.Size()},
		}
		for _, n := range []int{7, 256, 2048, 8192, 1 << 16} { // with and without packs, and various numbers of packs
			launches = append(launches, softmax.Forward{Y: p, X: p, Rows: 3, N: n, Type: dt},
				softmax.Backward{DX: p, G: p, Y: p, Rows: 3, N: n, Type: dt},
				crossentropy.Forward{Logits: p, Losses: p, Targets: ids, Rows: 3, V: n, Type: dt},
				crossentropy.Forward{Logits: p, Losses: p, Targets: ids, Scale: p, Rows: 3, V: n,
					Type: dt},
				crossentropy.Backward{Forward: crossentropy.Forward{Targets: ids, Rows: 3, V: n,
					Type: dt}, Out: p},
				embedding.Forward{Y: p, IDs: ids, Table: p, Rows: 3, Vocab: 9, D: n, Type: dt},
				embedding.Backward{DT: p, IDs: ids, G: p, Rows: 3, Vocab: 9, D: n, Type: dt,
					Workspace: p},
				reduce.Reduce{Op: reduce.Sum, Y: p, X: p, Outer: 1, N: 9, Inner: n, XType: dt},
				reduce.Reduce{Op: reduce.Max, Y: p, X: p, Outer: 1, N: n, Inner: 1, XType: dt},
				decode.Product{Y: p, X: p, W: p, Columns: 3, D: n, Type: dt},
				decode.Gated{H: p, X: p, W: p, F: 3, D: n, Type: dt},
				normkernel.RMSNorm{Y: p, X: p, W: p, Rows: 3, D: n, Type: dt},
				normkernel.RMSNorm{Y: p, X: p, W: p, Residual: p, Sum: p, Rows: 3, D: n, Type: dt},
				normkernel.RMSNormBackward{DX: p, G: p, X: p, W: p, Rows: 3, D: n, Type: dt,
					Workspace: p},
				normkernel.LayerNorm{Y: p, Stats: p, X: p, W: p, B: p, Rows: 3, D: n, Type: dt},
				normkernel.LayerNormBackward{DX: p, DW: p, DB: p, G: p, X: p, W: p, Stats: p,
					Rows: 3, D: n, Type: dt, Workspace: p},
				silu.Mul{H: p, AB: p, Rows: 3, F: n, Type: dt},
				silu.MulBackward{DAB: p, DH: p, AB: p, Rows: 3, F: n, GELU: true, Type: dt},
				quantize.Rows{Y: p, Scale: p, X: p, Rows: 3, D: n, Type: dt},
				quantize.WidenFloat8{Y: p, Codes: p, Scales: p, Rows: 3, D: n, Type: dt},
				quantize.WidenNF4{Y: p, Codes: p, Nested: p, Scales: p, Table: p, N: 3 * n, Type: dt},
				quantize.Columns{Y: p, Scale: p, X: p, Rows: 3, D: n, Type: dt, Workspace: p})
		}
		for _, l := range launches {
			ctx.Trace = nil
			require.NoError(t, k.Launch(0, l), "%T %+v", l, l)
			require.NotEmpty(t, ctx.Trace, "%T %+v", l, l)
		}
	}

	require.NoError(t, ctx.Free(p))
	requireFreed(t, ctx)
}

// TestFaults makes each driver call of a launch fail, and checks that nothing is enqueued after the
// failure.
func TestFaults(t *testing.T) {
	for _, call := range []string{"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
		"cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernel"} {
		d := fake.New(fake.Config{Images: kerneltest.Kernels})
		ctx, err := d.Retain(0)
		require.NoError(t, err)
		d.Fail(call, 1, gpu.NotSupported)
		k := kernel.New(ctx)
		a := normkernel.RMSNormBackward{Rows: 4096, D: 8192, Type: kerneltest.F16, Workspace: 256}
		require.ErrorContains(t, k.Launch(0, a), call)
		require.Empty(t, ctx.(*fake.Context).Trace, call)
		require.NoError(t, k.Launch(0, a), call)
	}
}

// TestFloat8Launches counts kernels. If rows are held in registers, the op's kernel also stores
// float8. For arbitrary rows another kernel does so afterwards.
func TestFloat8Launches(t *testing.T) {
	k, ctx := fakeKernels(t)
	for _, d := range []int{768, 1024, 2048, 2304, 2816, 3072, 5632, 6144, 7, 20000} {
		held := d%8 == 0 && d <= 16384
		norm := normkernel.RMSNorm{Rows: 5, D: d, Type: kerneltest.Bf16, Y8: 256, Scale8: 256}
		normBackward := normkernel.RMSNormBackward{Rows: 5, D: d, Type: kerneltest.Bf16,
			DX8: 256, Scale8: 256}
		normFrozen := normBackward
		normBackward.DW = 256
		gate := silu.Mul{Rows: 5, F: d, Type: kerneltest.Bf16, H8: 256, Scale8: 256}
		gateBackward := silu.MulBackward{Rows: 5, F: d, Type: kerneltest.Bf16,
			DAB8: 256, Scale8: 256}
		for what, c := range map[string]struct {
			launch      func() error
			held, other int
		}{
			"Quantize": {func() error {
				return k.Launch(0, quantize.Rows{Rows: 5, D: d, Type: kerneltest.Bf16})
			}, 1, 1},
			"RMSNorm":         {func() error { return k.Launch(0, norm) }, 1, 2},
			"RMSNormBackward": {func() error { return k.Launch(0, normBackward) }, 2, 4},
			"without DW":      {func() error { return k.Launch(0, normFrozen) }, 1, 2},
			"SiLUMul":         {func() error { return k.Launch(0, gate) }, 1, 1},
			"SiLUMulBackward": {func() error { return k.Launch(0, gateBackward) }, 1, 2},
		} {
			want := c.other
			if held {
				want = c.held
			}
			ctx.Trace = nil
			require.NoError(t, c.launch(), "%v, %v", what, d)
			require.Len(t, ctx.Trace, want, "%v, %v", what, d)
		}
	}
}

// fakeKernels returns the kernels on a fake GPU that does not execute them.
func fakeKernels(t *testing.T) (*kernel.Set, *fake.Context) {
	t.Helper()
	ctx, err := fake.New(fake.Config{Images: kerneltest.Kernels}).Retain(0)
	require.NoError(t, err)
	k := kernel.New(ctx)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return k, ctx.(*fake.Context)
}

// requireFreed checks that all memory has been freed.
func requireFreed(t *testing.T, ctx gpu.Context) {
	t.Helper()
	free, total, err := ctx.MemInfo()
	require.NoError(t, err)
	require.Equal(t, total, free)
}
