package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Launcher launches kernels: [Kernels], or what stands in for it in tests.
type Launcher interface {
	// Launch enqueues what a structure of this package says.
	Launch(s gpu.Stream, params any) error
	// Ways lists the ways that take a launch, the one that should be fastest first and the plain one,
	// whose result counts as right, last. It is empty where there is nothing to choose.
	Ways(params any) []Way
	NewTable(tensors []OptimTensor) (*Table, error)
	NewQuantizeTable(weights []QuantizeWeight) (*QuantizeTable, error)
	// Build tells one build of some units from another.
	Build(units ...string) string
	Close() error
}

// Tuned is a launch that can be done in several ways: what its Way is.
type Tuned interface {
	Shape() string   // for people, and to tell times apart
	Units() []string // where its kernels are
	Computes() bool  // arithmetic, not memory, bounds it
}

// Launch enqueues what a structure says.
func (k *Kernels) Launch(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case Unary:
		return k.Unary(s, p.Op, p.Y, p.X, p.P, p.N, p.Type)
	case Binary:
		return k.Binary(s, p.Op, p.Y, p.A, p.B, p.N, p.Type)
	case Cast:
		return k.Cast(s, p.Y, p.YType, p.X, p.XType, p.N)
	case Axpby:
		return k.Axpby(s, p.Y, p.YType, p.Alpha, p.X, p.XType, p.Beta, p.N)
	case Softmax:
		return k.Softmax(s, p.Y, p.X, p.Rows, p.N, p.Type)
	case SoftmaxBackward:
		return k.SoftmaxBackward(s, p.DX, p.G, p.Y, p.Rows, p.N, p.Type)
	case Attention:
		return k.Attention(s, p.shape(), p.Y, p.LSE, p.Q, p.K, p.V, p.Type)
	case AttentionBackward:
		return k.AttentionBackward(s, p.shape(), p.DQ, p.DK, p.DV, p.Stats, p.G, p.Q, p.K, p.V, p.Y, p.LSE, p.Type)
	case AttentionDocuments:
		return k.AttentionDocuments(s, p.Table, p.Starts, p.Batch, p.Seq)
	case CrossEntropyScale:
		return k.CrossEntropyScale(s, p.Scale, p.Targets, p.Rows)
	case CrossEntropy:
		return k.CrossEntropy(s, p)
	case CrossEntropyMean:
		return k.CrossEntropyMean(s, p.Mean, p.Losses, p.Scale, p.Rows)
	case CrossEntropyBackward:
		return k.CrossEntropyBackward(s, p.Out, p.CrossEntropy)
	case LinearCrossEntropy:
		return k.LinearCrossEntropy(s, p)
	case ScaleRows:
		return k.ScaleRows(s, p.X, p.Factors, p.Rows, p.D)
	case RMSNorm:
		return k.RMSNorm(s, p)
	case RMSNormBackward:
		return k.RMSNormBackward(s, p)
	case SumRMSNormParts:
		return k.AddRMSNormParts(s, values(p.All))
	case RoPE:
		return k.RoPE(s, p)
	case Embedding:
		return k.Embedding(s, p)
	case EmbeddingBackward:
		return k.EmbeddingBackward(s, p)
	case Reduce:
		return k.Reduce(s, p)
	case Copy:
		return k.Copy(s, p)
	}
	return k.launchMore(s, params)
}

// launchMore is Launch for products, optimisers and Kasmina layers.
func (k *Kernels) launchMore(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case SiLUMul:
		return k.SiLUMul(s, p)
	case SiLUMulBackward:
		return k.SiLUMulBackward(s, p)
	case SiLUProduct:
		return k.SiLUProduct(s, p)
	case SiLUProductBackward:
		return k.SiLUProductBackward(s, p)
	case RoPEProduct:
		return k.RoPEProduct(s, p)
	case Product:
		return k.Product(s, p)
	case Quantize:
		return k.Quantize(s, p)
	case QuantizeColumns:
		return k.QuantizeColumns(s, p)
	case QuantizeWeights:
		return k.QuantizeWeights(s, p.Table)
	case Normalize:
		return k.Normalize(s, p)
	case NormalizeBackward:
		return k.NormalizeBackward(s, p)
	case Symmetric:
		return k.Symmetric(s, p)
	case GradSquares:
		return k.GradSquares(s, p.Squares, p.Table)
	case GradNorm:
		return k.GradNorm(s, p.Control, p.Squares, p.Count, p.Scale)
	case AdamW:
		return k.AdamW(s, p.Control, p.Table)
	case MuonDirection:
		return k.MuonDirection(s, p.Control, p.Squares, p.Table, p.Nesterov)
	case MuonApply:
		return k.MuonApply(s, p.Control, p.Table)
	case KasminaForward:
		return k.KasminaForward(s, p)
	case KasminaBackward:
		return k.KasminaBackward(s, p)
	case KasminaWideForward:
		return k.KasminaWideForward(s, p.KasminaForward, p.KasminaWide)
	case KasminaWideBackward:
		return k.KasminaWideBackward(s, p.KasminaBackward, p.KasminaWide)
	case MergeKasminaRecords:
		return k.MergeKasminaRecords(s, values(p.All))
	case SumKasminaParts:
		return k.AddKasminaParts(s, values(p.All))
	}
	return fmt.Errorf("kernels: there is no launch of a %T", params)
}

func values[T any](all []*T) []T {
	v := make([]T, len(all))
	for i, p := range all {
		v[i] = *p
	}
	return v
}
