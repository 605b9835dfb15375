package program

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/op"
)

// KasminaLayer is a Kasmina op with its replays and its backward op, which share one lattice.
type KasminaLayer struct {
	kasmina.Layer // without addresses
	Op            *op.KasminaOp
	Memory        *Array // kasmina.State
	First         int    // seed of the layer, among those of all layers
	Forward       bool   // the graph has the op itself, not replays or the backward op alone
	Backward      bool   // the graph has the backward op
	// weights and scales, of which slots of zeros become identity starts when a seed begins to use
	// them; nil where they are not inputs of the graph
	OfWeights, OfScales *Input
}

// Clips is whether the backward pass clips gradients.
func (l *KasminaLayer) Clips() bool {
	return l.Op.Config.GradClip > 0 || l.Op.Config.AdaptiveClip > 0
}

// KasminaPass is the forward or backward pass of a layer. What it measures changes from run to run,
// and so does where it is computed: on the host while a seed has a kind without a kernel.
type KasminaPass struct {
	Layer  *KasminaLayer
	Node   *gorgonia.Node
	Replay bool // measures nothing

	// The launch is Backward if Grad is set, otherwise Forward. Package kasmina adds what the run
	// under way measures.
	Grad     bool
	Forward  kasmina.Forward
	Backward kasmina.Backward

	Spare *Array // a copy of what such a pass replaces, for runs of it that nobody reads
}

// HostOp is the Params of a call that the host computes, between two copies, with the node's own
// op.
type HostOp struct {
	Node *gorgonia.Node
	In   []*Array
	Out  *Array
}

// Where the arrays of a layer's report begin, in words for each seed. There are counts of
// non-finite x and g, of clipped rows, and of what a replay counts, which nobody reads. Then come
// figures and histograms.
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

// Place is where an array of the layer's report is, in words, in the report of all layers.
func (l *KasminaLayer) Place(word int) int {
	return KasminaWords*l.First + word*l.State.Seeds
}
