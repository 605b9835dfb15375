package kernel_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/preference"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/sample"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

// TestEveryLaunch launches every type with a Launch method on a fake GPU, which compares the
// arguments with signatures.txt. It fails if the list below lacks a type.
func TestEveryLaunch(t *testing.T) {
	k, ctx, p := kerneltest.FakeGPU(t, 90, 227<<10)
	alloc := func(int) (gpu.Ptr, error) { return p, nil }
	table, err := optimizer.NewTable(k.Ctx, alloc, []optimizer.Tensor{{Size: 9, Param: p, Grad: p}})
	require.NoError(t, err)
	nf4 := quantize.NF4{Codes: p, Nested: p, Scales: p, Table: p}
	weights, err := quantize.NewTable(k.Ctx, alloc, []quantize.Weight{{X: p, Y: p, Scale: p, Rows: 16,
		D: 16}})
	require.NoError(t, err)

	const dt = gpu.BFloat16
	rows := kernel.Rows{Ptr: p, Stride: 64}
	geometry := attention.Geometry{Batch: 1, Seq: 128, Heads: 1, KVHeads: 1, HeadDim: 64,
		Causal: true}
	gate := gemm.Gate{Rows: 3, F: 8, D: 16, Type: dt}
	layer := kasmina.Layer{X: p, Weights: p, Scales: p, State: kasmina.State{Ptr: p, Seeds: 5,
		Slots: 3}, Rows: 9, Chunk: 4, Width: 4, Eps: 1e-8, Type: dt}

	launches := []kernel.Launch{
		attention.Documents{Table: p, Batch: 1, Seq: 9, Window: 3},
		attention.Forward{Geometry: geometry, Y: rows, Q: rows, K: rows, V: rows, Normalizers: p,
			Type: dt},
		attention.Backward{Geometry: geometry, DQ: rows, DK: rows, DV: rows, G: rows, Q: rows,
			K: rows, V: rows, Y: rows, Workspace: p, Normalizers: p, Type: dt},
		attention.Statistics{Geometry: geometry, G: rows, Y: rows, Normalizers: p, Workspace: p,
			Type: dt},
		crossentropy.Scale{Scale: p, Targets: p, Rows: 3},
		preference.Forward{Loss: p, Figures: p, Gradients: p, LogProbs: p, Reference: p, Answers: p, Workspace: p, Rows: 3},
		preference.Backward{DX: p, Gradients: p, Figures: p, Grad: p, Answers: p, Rows: 3},
		crossentropy.Forward{Logits: p, Losses: p, Targets: p, Rows: 3, V: 8, Type: dt},
		crossentropy.Mean{Mean: p, Losses: p, Scale: p, Rows: 3},
		crossentropy.Backward{Forward: crossentropy.Forward{Targets: p, Rows: 3, V: 8, Type: dt},
			Out: p},
		decode.Attention{Geometry: decode.Geometry{Heads: 8, KVHeads: 1, HeadDim: 64, Capacity: 9},
			Type: dt},
		decode.Paged{Geometry: decode.Geometry{Heads: 8, KVHeads: 1, HeadDim: 64, Capacity: 9}, Rows: 3,
			Columns: 2, Type: dt},
		decode.Paged{Geometry: decode.Geometry{Heads: 8, KVHeads: 1, HeadDim: 64, Capacity: 9}, Rows: 3,
			Columns: 2, Type: dt, Grouped: true},
		decode.Attention{Geometry: decode.Geometry{Heads: 8, KVHeads: 4, HeadDim: 64, Capacity: 9},
			Y: p, Q: p, K: p, V: p, Keys: p, Values: p, Position: p, Type: dt},
		decode.Paged{Geometry: decode.Geometry{Heads: 8, KVHeads: 2, HeadDim: 64, Capacity: 9}, Rows: 90,
			Columns: 2, Type: dt, Grouped: dt == gpu.BFloat16},
		decode.Product{Y: p, X: p, W: p, Columns: 3, D: 64, Type: dt},
		decode.Product{Y: p, X: p, W: p, Columns: 3, D: 64, Norm: decode.Norm{W: p}, Type: dt},
		decode.Gated{H: p, X: p, W: p, F: 3, D: 64, Type: dt},
		decode.Gated{H: p, X: p, W: p, F: 3, D: 64, Norm: decode.Norm{W: p}, Type: dt},
		decode.Product{Y: p, X: p, W: p, Columns: 3, D: 8, Type: dt},
		decode.RowsProduct{Y: p, X: p, W: p, Rows: 3, Columns: 3, D: 8, Type: dt},
		decode.PackedProduct{Y: p, X: p, Rows: 3, Columns: 3, D: 64, Type: dt},
		decode.PackedProduct{Y: p, X: p, Rows: 1, Columns: 3, D: 256, Type: dt},
		decode.PackedProduct{Y: p, X: p, Rows: 1, Columns: 3, D: 256, Norm: decode.Norm{W: p}, NF4: true, Type: dt},
		decode.NormRows{Y: p, X: p, W: p, Rows: 3, D: 8, Type: dt},
		decode.Gated{H: p, X: p, W: p, F: 3, D: 8, Type: dt},
		elementwise.Unary{Op: elementwise.Tanh, Y: p, X: p, N: 9, Type: dt},
		elementwise.Binary{Op: elementwise.Add, Y: p, A: elementwise.Operand{Ptr: p},
			B: elementwise.Operand{Ptr: p}, N: 9, Type: dt},
		elementwise.Cast{Y: p, YType: dt, X: p, N: 9},
		elementwise.Axpby{Y: p, YType: dt, X: p, N: 9, Alpha: 1},
		elementwise.Dropout{Y: p, X: p, Key: p, P: 0.1, N: 9, Type: dt},
		embedding.Forward{Y: p, IDs: p, Table: p, Rows: 3, Vocab: 9, D: 8, Type: dt},
		embedding.Backward{DT: p, IDs: p, G: p, Rows: 3, Vocab: 9, D: 8, Type: dt, Workspace: p},
		gemm.SiLUProduct{H: p, AB: p, X: p, Weights: p, Gate: gate},
		gemm.SiLUProductBackward{H: p, DAB: p, G: p, Down: p, AB: p, Gate: gate},
		gemm.RoPEProduct{Y: p, X: p, Weights: p, Angles: p, Rows: 6, Columns: 384, D: 464,
			Turned: 192, Seq: 3, HeadDim: 64, Type: dt},
		gemm.StatisticsProduct{G: p, X: p, W: p, Y: p, Normalizers: p, Workspace: p, Type: dt, D: 72,
			Geometry: geometry},
		gemm.LinearCrossEntropy{Terms: p, Scaled: p, Factors: p, Losses: p, X: p, W: p, Targets: p,
			Scale: p, Workspace: p, Rows: 3, V: 16, D: 512, Type: dt},
		gemm.ScaleRows{X: p, Factors: p, Rows: 3, D: 16},
		gemm.Product{Y: p, X: p, W: p, Type: dt, Rows: 6, Columns: 264, D: 72, TransW: true},
		gemm.ProductSum{Product: gemm.Product{Y: p, X: p, W: p, Type: dt, Rows: 6, Columns: 264, D: 72},
			Term: gemm.Term{X: p, W: p, D: 16}},
		gemm.RowProduct{Y: p, X: p, W: p, Rows: 6, Columns: 16, D: 72, Scale: 1, Type: dt},
		gemm.ColumnProduct{Y: p, X: p, V: p, Workspace: p, Rows: 6, Columns: 72, Narrow: 16, Type: dt},
		gemm.NarrowProducts{V: p, DW: p, X: p, W: p, U: p, Workspace: p, Rows: 6, Columns: 72, Narrow: 16,
			Type: dt},
		gemm.ScaledRows{Y: p, X: p, Factors: p, Rows: 6, Columns: 16, Type: dt},
		gemm.BlockDiagonal{Y: p, Blocks: [3]gpu.Ptr{p, p, 0}, Rows: [3]int{6, 8, 2}, Columns: [3]int{2, 3, 0}, Size: 4},
		gemm.Symmetric{D: p, Left: p, Right: p, Alpha: 1, Type: gpu.Float16, N: 264, Depth: 72,
			Batch: 2},
		kasmina.Forward{Layer: layer, Y: p, Telemetry: true, Figures: p, Bad: p, Workspace: p},
		kasmina.Stream{Layers: []kasmina.Layer{layer, layer}, Depth: 3, Control: p, Entries: p, Done: p,
			X: p, Y: p, Figures: p, Counts: p, Memory: p},
		kasmina.Backward{Layer: layer, DX: p, DWeights: p, DScales: p, G: p.Offset(256),
			Telemetry: true, Figures: p, Bad: p, Clipped: p, Workspace: p},
		layout.Copy{Y: p, X: p, Dims: []int{9, 9}, YStrides: []int{19, 1}, XStrides: []int{11, 1},
			Size: 2},
		normkernel.LayerNorm{Y: p, Stats: p, X: p, W: p, B: p, Rows: 3, D: 64, Type: dt},
		normkernel.LayerNormBackward{DX: p, DW: p, DB: p, G: p, X: p, W: p, Stats: p, Rows: 3, D: 64,
			Type: dt, Workspace: p},
		normkernel.RMSNorm{Y: p, X: p, W: p, Rows: 3, D: 8, Type: dt},
		normkernel.RMSNormBackward{DX: p, G: p, X: p, W: p, Rows: 3, D: 8, Type: dt, Workspace: p},
		normalize.Forward{Y: p, X: p, Workspace: p, N: 9, YType: dt},
		normalize.Backward{DX: p, G: p, X: p, Workspace: p, N: 9, Type: dt},
		optimizer.GradSquares{Squares: p, Table: table},
		optimizer.GradNorm{Control: p, Squares: p, Count: 3},
		optimizer.Elementwise{Kernel: "AdamW", Control: p, Table: table},
		optimizer.Elementwise{Kernel: "AdamW8bit", Control: p, Table: table},
		optimizer.Elementwise{Kernel: "Lion", Control: p, Table: table},
		optimizer.Direction{Kernel: "Muon", Control: p, Squares: p, Table: table},
		optimizer.Apply{Kernel: "Muon", Control: p, Table: table},
		quantize.Rows{Y: p, Scale: p, X: p, Rows: 3, D: 8, Type: dt},
		quantize.WidenFloat8{Y: p, Codes: p, Scales: p, Rows: 3, D: 8, Type: dt},
		quantize.WidenNF4{Y: p, Codes: p, Nested: p, Scales: p, Table: p, N: 24, Type: dt},
		quantize.Float8NF4{NF4: nf4, Y: p, Factors: p, Rows: 16, D: 32},
		quantize.Float8Columns{NF4: nf4, Y: p, Factors: p, Rows: 16, D: 32, Stride: 16},
		quantize.Float8Columns{NF4: quantize.NF4{Codes: p}, Y: p, Factors: p, Rows: 16, D: 32, Stride: 16},
		quantize.Columns{Y: p, Scale: p, X: p, Rows: 3, D: 8, Type: dt, Workspace: p},
		quantize.Weights{Table: weights},
		reduce.Reduce{Op: reduce.Sum, Y: p, X: p, Outer: 1, N: 9, Inner: 8, XType: dt},
		rope.Rotate{Y: p, X: p, Rows: 3, Seq: 3, Heads: 1, HeadDim: 6, Type: dt},
		sample.Feed{IDs: p, From: p, Tokens: p, Rows: 3},
		sample.Tokens{Tokens: p, Logits: p, IDs: p, Rules: p, Entries: p, State: p, Rows: 3, N: 50257, Type: dt},
		silu.Mul{H: p, AB: p, Rows: 3, F: 8, Type: dt},
		silu.MulBackward{DAB: p, DH: p, AB: p, Rows: 3, F: 8, Type: dt},
		softmax.Forward{Y: p, X: p, Rows: 3, N: 8, Type: dt},
		softmax.Backward{DX: p, G: p, Y: p, Rows: 3, N: 8, Type: dt},
	}

	missing := launchTypes(t)
	for _, l := range launches {
		ctx.Trace = nil
		require.NoError(t, k.Launch(0, l), "%T %+v", l, l)
		require.NotEmpty(t, ctx.Trace, "%T %+v", l, l)
		delete(missing, strings.TrimPrefix(reflect.TypeOf(l).String(), "*"))
	}

	require.Empty(t, missing, "launches that this test does not check; add them to its list")
}

// launchTypes returns the types with a Launch method in all families, as package.Type.
func launchTypes(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*/*.go")
	require.NoError(t, err)
	types := map[string]bool{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || path.Dir(filepath.ToSlash(name)) == "build" {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil || f.Name.Name != "Launch" || file.Name.Name == "kerneltest" {
				continue
			}
			receiver := f.Recv.List[0].Type
			if star, ok := receiver.(*ast.StarExpr); ok {
				receiver = star.X
			}
			types[file.Name.Name+"."+receiver.(*ast.Ident).Name] = true
		}
	}

	require.Greater(t, len(types), 40)
	return types
}

// TestChangedSignatures checks that a launch is rejected once the signature of its kernel has changed:
// by one more parameter, one of another size, or a number of another kind.
func TestChangedSignatures(t *testing.T) {
	changes := map[string]func(params []gpu.Param) []gpu.Param{
		"one more": func(params []gpu.Param) []gpu.Param {
			return append(params, gpu.Param{Offset: 32, Size: 8, Kind: gpu.Integer})
		},
		"another size": func(params []gpu.Param) []gpu.Param { params[4].Size = 4; return params },
		"another kind": func(params []gpu.Param) []gpu.Param {
			params[3].Kind = gpu.Integer
			return params
		},
		"as it is": func(params []gpu.Param) []gpu.Param { return params },
	}

	for what, change := range changes {
		ctx, err := fake.New(fake.Config{Images: func(image []byte, capability int) (
			map[string][]gpu.Param, error) {
			all, err := kerneltest.Kernels(image, capability)
			all = maps.Clone(all)
			all["unary_f32"] = change(slices.Clone(all["unary_f32"]))
			return all, err
		}}).Retain(0)
		require.NoError(t, err)
		p, err := ctx.Alloc(1 << 10)
		require.NoError(t, err)

		err = kernel.New(ctx).Launch(0, elementwise.Unary{Op: elementwise.Tanh, Y: p, X: p, N: 9})
		if what == "as it is" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, "cuLaunchKernel(unary_f32)", what)
	}
}
