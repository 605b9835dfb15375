package cudaops

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// kernelSet is what lowering asks of the kernels.
type kernelSet interface {
	Unary(s gpu.Stream, op kernels.UnaryOp, y, x gpu.Ptr, p float64, n int, t gpu.DType) error
	Binary(s gpu.Stream, op kernels.BinaryOp, y gpu.Ptr, a, b kernels.Operand, n int, t gpu.DType) error
	Attention(s gpu.Stream, a kernels.AttentionShape, y kernels.Rows, lse gpu.Ptr, q, k, v kernels.Rows, t gpu.DType) error
	AttentionBackward(s gpu.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats gpu.Ptr, g, q, k, v, y kernels.Rows,
		lse gpu.Ptr, t gpu.DType) error
	AttentionDocuments(s gpu.Stream, table gpu.Ptr, starts kernels.Ints, batch, seq int) error
	Cast(s gpu.Stream, y gpu.Ptr, yt gpu.DType, x gpu.Ptr, xt gpu.DType, n int) error
	Axpby(s gpu.Stream, y gpu.Ptr, yt gpu.DType, alpha float64, x gpu.Ptr, xt gpu.DType, beta float64, n int) error
	RMSNorm(s gpu.Stream, a kernels.RMSNorm) error
	RMSNormBackward(s gpu.Stream, a kernels.RMSNormBackward) error
	AddRMSNormParts(s gpu.Stream, left []kernels.RMSNormParts) error
	RMSNormWorkspace(d int, t gpu.DType) int
	AttentionStatsBytes(kernels.AttentionShape, gpu.DType) int
	RoPE(s gpu.Stream, a kernels.RoPE) error
	Quantize(s gpu.Stream, a kernels.Quantize) error
	QuantizeColumns(s gpu.Stream, a kernels.QuantizeColumns) error
	QuantizeColumnsWorkspace(rows, d int) int
	NewQuantizeTable(weights []kernels.QuantizeWeight) (*kernels.QuantizeTable, error)
	QuantizeWeights(s gpu.Stream, t *kernels.QuantizeTable) error
	SiLUMul(s gpu.Stream, a kernels.SiLUMul) error
	SiLUMulBackward(s gpu.Stream, a kernels.SiLUMulBackward) error
	SiLUProduct(s gpu.Stream, a kernels.SiLUProduct) error
	SiLUProductBackward(s gpu.Stream, a kernels.SiLUProductBackward) error
	RoPEProduct(s gpu.Stream, a kernels.RoPEProduct) error
	Product(s gpu.Stream, a kernels.Product) error
	Embedding(s gpu.Stream, a kernels.Embedding) error
	EmbeddingBackward(s gpu.Stream, a kernels.EmbeddingBackward) error
	CrossEntropyScale(s gpu.Stream, scale gpu.Ptr, targets kernels.Ints, rows int) error
	CrossEntropy(s gpu.Stream, a kernels.CrossEntropy) error
	CrossEntropyMean(s gpu.Stream, mean, losses, scale gpu.Ptr, rows int) error
	CrossEntropyBackward(s gpu.Stream, out gpu.Ptr, a kernels.CrossEntropy) error
	LinearCrossEntropy(s gpu.Stream, a kernels.LinearCrossEntropy) error
	LinearCrossEntropyWorkspace(a kernels.LinearCrossEntropyShape) int
	ScaleRows(s gpu.Stream, x, factors gpu.Ptr, rows, d int) error
	Normalize(s gpu.Stream, a kernels.Normalize) error
	NormalizeBackward(s gpu.Stream, a kernels.NormalizeBackward) error
	Symmetric(s gpu.Stream, a kernels.Symmetric) error
	Reduce(s gpu.Stream, a kernels.Reduce) error
	ReduceWorkspace(a kernels.Reduce) int
	Softmax(s gpu.Stream, y, x gpu.Ptr, rows, n int, t gpu.DType) error
	SoftmaxBackward(s gpu.Stream, dx, g, y gpu.Ptr, rows, n int, t gpu.DType) error
	Copy(s gpu.Stream, a kernels.Copy) error
	NewTable(tensors []kernels.OptimTensor) (*kernels.Table, error)
	GradSquares(s gpu.Stream, squares gpu.Ptr, t *kernels.Table) error
	GradNorm(s gpu.Stream, control, squares gpu.Ptr, count int, scale gpu.Ptr) error
	AdamW(s gpu.Stream, control gpu.Ptr, t *kernels.Table) error
	MuonDirection(s gpu.Stream, control, squares gpu.Ptr, t *kernels.Table, nesterov bool) error
	MuonApply(s gpu.Stream, control gpu.Ptr, t *kernels.Table) error
	KasminaForward(s gpu.Stream, f kernels.KasminaForward) error
	KasminaBackward(s gpu.Stream, b kernels.KasminaBackward) error
	MergeKasminaRecords(s gpu.Stream, left []kernels.KasminaRecords) error
	AddKasminaParts(s gpu.Stream, left []kernels.KasminaParts) error
	KasminaForwardWorkspace(l kernels.KasminaLayer) int
	KasminaBackwardWorkspace(l kernels.KasminaLayer, clip bool) int
	KasminaWideForward(s gpu.Stream, f kernels.KasminaForward, w kernels.KasminaWide) error
	KasminaWideBackward(s gpu.Stream, b kernels.KasminaBackward, w kernels.KasminaWide) error
	KasminaWideWorkspace(l kernels.KasminaLayer, w kernels.KasminaWide, backward bool) int
	RMSNormWays(a kernels.RMSNorm) ([]kernels.Way, error)
	RMSNormBackwardWays(a kernels.RMSNormBackward) ([]kernels.Way, error)
	AttentionVariants(a kernels.AttentionShape, t gpu.DType, rows ...kernels.Rows) []kernels.AttentionVariant
	SiLUProductWays(rows, f, d int, t gpu.DType) []kernels.Way
	LinearCrossEntropyWays(a kernels.LinearCrossEntropyShape, t gpu.DType) []kernels.Way
	RoPEProductWays(a kernels.RoPEProductShape, t gpu.DType) []kernels.Way
	ProductWays(a kernels.ProductShape, t gpu.DType) []kernels.Way
	TakesSymmetric(a kernels.SymmetricShape, t gpu.DType) bool
	Build(units ...string) string
	Close() error
}

func realKernels(ctx gpu.Context) (kernelSet, error) { return kernels.New(ctx), nil }

// lowering turns a node, whose inputs are arrays already, into tasks, and returns its value.
type lowering func(c *compiler, n *gorgonia.Node, in []*array) (*array, error)

// ownOp is what the compiler knows of an op of this module.
type ownOp struct {
	lower  lowering
	scaled linearity // nil for an op that is not linear in anything
}

// ownOps holds the ops of this module by type. An op and its gradient stand here both or neither: what one leaves for the other
// is on the device.
var ownOps map[reflect.Type]ownOp

func init() {
	ownOps = map[reflect.Type]ownOp{
		reflect.TypeFor[*opbase.PartOp]():               {lowerPart, in(0)},
		reflect.TypeFor[*op.RMSNormOp]():                {lowerRMSNorm, nil},
		reflect.TypeFor[*op.RMSNormGradOp]():            {lowerRMSNormGrad, in(3)},
		reflect.TypeFor[*op.RoPEOp]():                   {lowerRoPE, in(0)},
		reflect.TypeFor[*op.SiLUMLPOp]():                {lowerSiLUMLP, nil},
		reflect.TypeFor[*op.SiLUMLPGradOp]():            {lowerSiLUMLPGrad, in(5)},
		reflect.TypeFor[*op.EmbeddingOp]():              {lowerEmbedding, nil},
		reflect.TypeFor[*op.EmbeddingGradOp]():          {lowerEmbeddingGrad, in(1)},
		reflect.TypeFor[*op.CrossEntropyOp]():           {lowerCrossEntropy, nil},
		reflect.TypeFor[*op.CrossEntropyGradOp]():       {lowerCrossEntropyGrad, in(3)},
		reflect.TypeFor[*op.LinearCrossEntropyOp]():     {lowerLinearCrossEntropy, nil},
		reflect.TypeFor[*op.LinearCrossEntropyGradOp](): {lowerLinearCrossEntropyGrad, in(4)},
		reflect.TypeFor[*op.LinearOp]():                 {lowerLinear, inOne},
		reflect.TypeFor[*op.LinearGradOp]():             {lowerLinearGrad, in(2)},
		reflect.TypeFor[*op.AttentionOp]():              {lowerAttention, nil},
		reflect.TypeFor[*op.AttentionGradOp]():          {lowerAttentionGrad, inLast},
		reflect.TypeFor[*op.NewtonSchulzOp]():           {lowerNewtonSchulz, nil},
		reflect.TypeFor[*op.NewtonSchulzGradOp]():       {lowerNewtonSchulzGrad, in(1)},
		reflect.TypeFor[*op.KasminaOp]():                {lowerKasmina, nil},
		reflect.TypeFor[*op.KasminaGradOp]():            {lowerKasminaGrad, in(4)},
		reflect.TypeFor[*autodiff.RecomputeOp]():        {lowerRecompute, nil},
		reflect.TypeFor[*autodiff.RecomputeGradOp]():    {lowerRecomputeGrad, inRecomputed},
	}
}

// lower adds the tasks of a node.
func (c *compiler) lower(n *gorgonia.Node) error {
	if n.Type() == nil { // a statement, which has no value
		return errors.New("gorgonia.Read and gorgonia.Set are for Gorgonia's machines: in place of Read, name the node with WithOutputs " +
			"and ask Machine.Value for it")
	}
	if dt := n.Dtype(); dt != tensor.Float32 && dt != tensor.Int {
		return fmt.Errorf("it is of type %v; on the GPU a graph's floats are float32, and its integers int", dt)
	}
	nodes := opbase.Children(n)
	if len(nodes) == 0 && n.Op() == nil || n.Value() != nil && opbase.IsConstant(n) {
		return c.input(n)
	}
	f := ownOps[reflect.TypeOf(n.Op())].lower
	if f == nil {
		f = stock(n)
		if f != nil && c.m.tuner.rules.OnHost(fmt.Sprint(n.Op())) {
			f = (*compiler).onHostByRule
		}
	}
	if f == nil {
		f = (*compiler).onHost
	}
	out, err := f(c, n, c.operands(n))
	if err != nil {
		return err
	}
	c.values[n] = out
	return nil
}

// input gives a node whose value comes from the host a place on the device.
func (c *compiler) input(n *gorgonia.Node) error {
	if shared := c.m.config.share.param(n); shared != nil {
		c.values[n] = shared.array
		c.inputOf[shared.array.block], c.sources[shared.array.block] = shared, []*input{shared}
		if !slices.Contains(c.m.borrowed, shared) {
			shared.sharers++
			c.m.borrowed = append(c.m.borrowed, shared)
		}
		return nil
	}
	a := c.newResident(elemOf(n.Dtype()), n.Shape()...)
	c.values[n] = a
	in := &input{node: n, array: a, constant: opbase.IsConstant(n)}
	for _, p := range c.m.config.params {
		in.constant = in.constant || p == n
	}
	c.inputs = append(c.inputs, in)
	c.inputOf[a.block], c.sources[a.block] = in, []*input{in}
	return nil
}

// lowerPart views a tensor of a packed result.
func lowerPart(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	offset := n.Op().(*opbase.PartOp).Offset
	if len(in[0].parts) == 0 {
		return c.aligned(n, in[0].view(offset, n.Shape()...)), nil
	}
	for _, p := range in[0].parts {
		if offset == 0 {
			return p, nil
		}
		offset -= p.len()
	}
	return nil, fmt.Errorf("no part of the packed result begins at element %d", n.Op().(*opbase.PartOp).Offset)
}
