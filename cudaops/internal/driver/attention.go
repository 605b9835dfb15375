package driver

import "fmt"

// AttentionSpec describes attention over packed rows of heads, for every sequence and query head on its own,
//
//	y = softmax(s)·v,  lse = log Σ exp(s),  s = Scale·q·kᵀ
//
// Causal leaves out of s what is later than the query. q and y are [Batch·Seq, Heads·HeadDim], k and v
// [Batch·Seq, KVHeads·HeadDim], of Type float16 or bfloat16; query head h reads key-value head h/(Heads/KVHeads). lse is
// [Batch, Heads, Seq] of float32.
type AttentionSpec struct {
	Batch, Seq, Heads, KVHeads, HeadDim int
	Causal                              bool
	Scale                               float64
	Type                                DType
	Q, K, V, Y                          int // elements from one row to the next
}

// AttentionArgs is the operands of one run, aligned to 16 bytes. Y and LSE are written, and overlap nothing else.
type AttentionArgs struct {
	Q, K, V, Y, LSE Ptr
	Workspace       Ptr // aligned to 256 bytes
	WorkspaceSize   int
}

// Dnn is cuDNN.
type Dnn interface {
	Version() int    // 10000·major + 100·minor + patch
	Library() string // where it was found
	// PlanAttention prepares attention, which can take seconds, since cuDNN compiles. The plan gives the same bits for the same
	// operands. What cuDNN does not compute is an error with a [DnnStatus] that is NotSupported.
	PlanAttention(a AttentionSpec) (AttentionPlan, error)
}

// AttentionPlan is prepared attention.
type AttentionPlan interface {
	Workspace() int // the bytes that a run needs
	// Run enqueues it, which counts as one launch.
	Run(a AttentionArgs, s Stream) error
	Close() error
}

// Check refuses what makes no sense, and types that attention is not computed in.
func (a AttentionSpec) Check() error {
	detail := ""
	query, key := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	switch {
	case a.Batch < 1 || a.Seq < 1 || a.Heads < 1 || a.KVHeads < 1 || a.HeadDim < 1:
		detail = "a size is below 1"
	case a.Heads%a.KVHeads != 0:
		detail = fmt.Sprintf("%d query heads, want a multiple of the %d key-value heads", a.Heads, a.KVHeads)
	case a.Type != Float16 && a.Type != BFloat16:
		detail = fmt.Sprintf("elements of type %v, want float16 or bfloat16", a.Type)
	case a.Q < query || a.Y < query || a.K < key || a.V < key:
		detail = "rows lie closer together than they are long"
	default:
		return nil
	}
	return NewDnnError("cudnnBackendFinalize", DnnBadParam, fmt.Sprintf("%s: %+v", detail, a))
}

// CheckArgs refuses operands that do not go with a plan.
func (a AttentionSpec) CheckArgs(workspace int, x AttentionArgs) error {
	for _, p := range []Ptr{x.Q, x.K, x.V, x.Y, x.LSE} {
		if p == 0 || p%16 != 0 {
			return NewDnnError("cudnnBackendExecute", DnnBadParam, fmt.Sprintf("an operand is at %#x, want a multiple of 16", uint64(p)))
		}
	}
	if x.WorkspaceSize < workspace || x.Workspace%256 != 0 {
		return NewDnnError("cudnnBackendExecute", DnnBadParam, fmt.Sprintf("workspace of %d bytes at %#x, want %d at a multiple of 256",
			x.WorkspaceSize, uint64(x.Workspace), workspace))
	}
	return nil
}
