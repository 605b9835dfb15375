package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// What is to be known of launches before they are made: the ways in which they can be, and the memory
// that they work in.

// Ways lists the ways that take a launch.
func (k *Kernels) Ways(params any) (ways []Way) {
	switch p := params.(type) {
	case RMSNorm:
		ways, _ = k.RMSNormWays(p) // an error comes back from the launch
	case RMSNormBackward:
		ways, _ = k.RMSNormBackwardWays(p)
	case Attention:
		for _, v := range k.AttentionVariants(p.shape(), p.Type, p.Y, p.Q, p.K, p.V) {
			if v != AttentionHopperFused { // whose forward pass is AttentionHopper's
				ways = append(ways, Way{Family: v.String()})
			}
		}
	case AttentionBackward:
		for _, v := range k.AttentionVariants(p.shape(), p.Type, p.DQ, p.DK, p.DV, p.G, p.Q, p.K, p.V, p.Y) {
			ways = append(ways, Way{Family: v.String()})
		}
	case SiLUProduct:
		ways = k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case SiLUProductBackward:
		ways = k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case RoPEProduct:
		ways = k.RoPEProductWays(p.RoPEProductShape, p.Type)
	case LinearCrossEntropy:
		ways = k.LinearCrossEntropyWays(p.LinearCrossEntropyShape, p.Type)
	case Symmetric:
		if k.TakesSymmetric(p.SymmetricShape, p.Type) {
			ways = []Way{{Family: "half"}}
		}
	case Product:
		ways = k.ProductWays(p.ProductShape, p.Type)
	}
	return ways
}

// variant is the attention that a way is.
func (w Way) variant() AttentionVariant {
	for v := range attentionVariants {
		if v.String() == w.Family {
			return v
		}
	}
	return AttentionAuto
}

func (a Attention) shape() AttentionShape {
	a.Variant = a.Way.variant()
	return a.AttentionShape
}

func (a AttentionBackward) shape() AttentionShape {
	a.Variant = a.Way.variant()
	return a.AttentionShape
}

// with is some words where they hold.
func with(holds bool, words string) string {
	if holds {
		return " " + words
	}
	return ""
}

// Shape is rows and columns, and what else the pass does.
func (a RMSNorm) Shape() string {
	return fmt.Sprintf("%dx%d %v%s%s", a.Rows, a.D, a.Type, with(a.Residual != 0, "with residual"), with(a.Y8 != 0, "and float8"))
}

// Shape is rows and columns, and what else the pass does.
func (a RMSNormBackward) Shape() string {
	return fmt.Sprintf("%dx%d %v%s%s", a.Rows, a.D, a.Type, with(a.Add != 0, "with sum"), with(a.DX8 != 0, "and float8"))
}

// describe is the geometry, and the distances of the matrices' rows.
func (a AttentionShape) describe(t gpu.DType, matrices ...Rows) string {
	s := fmt.Sprintf("%dx%d, %d of %d heads of %d, %v", a.Batch, a.Seq, a.Heads, a.KVHeads, a.HeadDim, t)
	s += with(a.Causal, "causal") + with(a.Cos != 0, "turned") + with(a.Documents != 0, "documents") +
		with(a.Scale != 0, fmt.Sprintf("scale %g", a.Scale))
	for _, m := range matrices {
		s += fmt.Sprintf(" %d", m.Stride)
	}
	return s
}

// Shape is the geometry of heads and rows.
func (a Attention) Shape() string { return a.describe(a.Type, a.Y, a.Q, a.K, a.V) }

// Shape is the geometry of heads and rows.
func (a AttentionBackward) Shape() string {
	return a.describe(a.Type, a.DQ, a.DK, a.DV, a.G, a.Q, a.K, a.V, a.Y)
}

// Shape is rows, F and D.
func (a SiLUProduct) Shape() string { return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) }

// Shape is rows, F and D.
func (a SiLUProductBackward) Shape() string {
	return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) + with(a.KeepsH, "without h")
}

// Shape is the product's sizes, and what is turned.
func (a RoPEProduct) Shape() string {
	return fmt.Sprintf("%dx%dx%d, %d turned of %d, sequences of %d, %v", a.RoPEProductShape.Rows, a.Columns, a.D,
		a.Turned, a.HeadDim, a.Seq, a.Type) + with(a.Float8, "of float8")
}

// Shape is rows, vocabulary and features.
func (a LinearCrossEntropy) Shape() string {
	return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.V, a.D, a.Type)
}

// Units are where the kernels are.
func (a RMSNorm) Units() []string             { return []string{"norm"} }
func (a RMSNormBackward) Units() []string     { return []string{"norm"} }
func (a Attention) Units() []string           { return attentionUnits }
func (a AttentionBackward) Units() []string   { return attentionUnits }
func (a SiLUProduct) Units() []string         { return []string{"gemm_hopper", "silu"} }
func (a SiLUProductBackward) Units() []string { return []string{"gemm_hopper", "silu"} }
func (a RoPEProduct) Units() []string         { return []string{"gemm_hopper_rope", "rope"} }
func (a LinearCrossEntropy) Units() []string  { return []string{"gemm_hopper_loss", "crossentropy"} }

var attentionUnits = []string{"attention", "attention_mma", "attention_hopper", "attention_hopper_backward",
	"attention_hopper_fused", "attention_hopper_fused64"}

// Computes reports whether arithmetic bounds the launch.
func (a RMSNorm) Computes() bool             { return false }
func (a RMSNormBackward) Computes() bool     { return false }
func (a Attention) Computes() bool           { return true }
func (a AttentionBackward) Computes() bool   { return true }
func (a SiLUProduct) Computes() bool         { return true }
func (a SiLUProductBackward) Computes() bool { return true }
func (a RoPEProduct) Computes() bool         { return true }
func (a LinearCrossEntropy) Computes() bool  { return true }

// sized is kernels of a device that only say how much memory they would take there.
func sized(d gpu.DeviceInfo) *Kernels { return &Kernels{info: d} }

// WorkspaceBytes is the size of Workspace.
func (a RMSNormBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).RMSNormWorkspace(a.D, a.Type)
}

// WorkspaceBytes is the size of Stats.
func (a AttentionBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).AttentionStatsBytes(a.AttentionShape, a.Type)
}

// WorkspaceBytes is the size of Workspace.
func (a EmbeddingBackward) WorkspaceBytes(gpu.DeviceInfo) int {
	return EmbeddingWorkspace(a.Rows, a.Vocab, a.D)
}

// WorkspaceBytes is the size of Workspace.
func (a QuantizeColumns) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).QuantizeColumnsWorkspace(a.Rows, a.D)
}

// WorkspaceBytes is the size of Workspace.
func (a LinearCrossEntropy) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).LinearCrossEntropyWorkspace(a.LinearCrossEntropyShape)
}

// WorkspaceBytes is the size of Workspace.
func (a Reduce) WorkspaceBytes(d gpu.DeviceInfo) int { return sized(d).ReduceWorkspace(a) }

// WorkspaceBytes is the size of Workspace.
func (f KasminaForward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).KasminaForwardWorkspace(f.KasminaLayer)
}

// WorkspaceBytes is the size of Workspace.
func (b KasminaBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).KasminaBackwardWorkspace(b.KasminaLayer, b.Clip)
}

// WorkspaceBytes is the size of KasminaWide's Workspace.
func (f KasminaWideForward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).KasminaWideWorkspace(f.KasminaLayer, f.KasminaWide, false)
}

// WorkspaceBytes is the size of KasminaWide's Workspace.
func (b KasminaWideBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).KasminaWideWorkspace(b.KasminaLayer, b.KasminaWide, true)
}
