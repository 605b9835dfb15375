package program

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/op"
)

// KasminaLayer is a Kasmina op together with its replays and its backward op. All share one lattice.
type KasminaLayer struct {
	kasmina.Layer // operand addresses are null
	Op            *op.KasminaOp
	Node          string // the first node of the layer, for error messages
	Memory        *Array // the seeds' state, laid out as described by kasmina.State
	First         int    // index of the layer's first seed among the seeds of all layers
	Forward       bool   // the graph contains the op itself, not only replays or the backward op
	Backward      bool   // the graph contains the backward op
	// Inputs that hold the blueprints' weights and scales. When a seed starts to use a slot that is still
	// zero, the slot is initialized to an identity start. Both are nil if weights and scales are not
	// inputs of the graph.
	WeightsInput, ScalesInput *Input
}

// Clips reports whether the backward pass clips gradients.
func (l *KasminaLayer) Clips() bool {
	return l.Op.Config.GradClip > 0 || l.Op.Config.AdaptiveClip > 0
}

// KasminaPass is the forward or backward pass of a layer. The telemetry that it collects varies from run
// to run. So does the processor that computes it: as long as a seed has a kind of blueprint without a
// kernel, the pass runs on the host.
type KasminaPass struct {
	Layer  *KasminaLayer
	Node   *gorgonia.Node
	Replay bool // collects no telemetry

	// The launch is Backward if Grad is set, and otherwise Forward. Package kasmina adds the telemetry
	// options of the current run.
	Grad     bool
	Forward  kasmina.Forward
	Backward kasmina.Backward

	GradCopy *Array // copy of the gradient that an in-place backward pass overwrites, used by runs that only measure time
}

// HostOp is the Params of a call that the host computes using the node's own op. Its operands are copied
// from the device, and its result is copied back.
type HostOp struct {
	Node *gorgonia.Node
	In   []*Array
	Out  *Array
}

// Offsets of the arrays in a layer's report, in words per seed. The counts come first: non-finite
// elements of x and of g, clipped rows, and a slot for counts to ignore, such as a replay's. They are
// followed by the telemetry and the histograms.
const (
	KasminaBadX = iota
	KasminaBadG
	KasminaClipped
	KasminaIgnored
	KasminaHealth
	KasminaGradient = KasminaHealth + kasmina.ForwardFigures
	KasminaBins     = KasminaGradient + kasmina.BackwardFigures
	KasminaWords    = KasminaBins + kasmina.Bins
)

// ReportOffset returns the offset, in words, of one of the layer's arrays within the report of all
// layers.
func (l *KasminaLayer) ReportOffset(word int) int {
	return KasminaWords*l.First + word*l.State.Seeds
}
