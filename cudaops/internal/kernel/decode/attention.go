// Package decode computes what a single token takes that is decoded behind others: attention to
// what was kept of these, and products of one row.
package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Attention is that of the token at Position, one int64 below Capacity, to the tokens before it and
// itself. Keys and Values [Capacity, KVHeads·HeadDim] have what those before it left there, and get
// its own, K and V:
//
//	Keys[p] = turned(K),  Values[p] = V,  Y = softmax(Scale·turned(Q)·Keysᵀ)·Values
//
// for every query head h, which reads key-value head h/(Heads/KVHeads), over the positions up to p,
// or the last Window of them. What is turned has RoPE's rotation by tables [Capacity, HeadDim/2],
// or nothing where these are null.
type Attention struct {
	Geometry
	Y, Q, K, V, Keys, Values gpu.Ptr
	Cos, Sin                 gpu.Ptr // float32
	Position                 gpu.Ptr
	Parts                    gpu.Ptr // workspace, of PartsBytes
	Arrived                  gpu.Ptr // Counters of uint32, zero before and after
	Type                     gpu.DType
}

// Geometry is the sizes of an Attention.
type Geometry struct {
	Heads, KVHeads, HeadDim, Capacity int
	Window                            int     // 0 for all
	Scale                             float64 // of the scores
}

// Those of decode_attention.cu.
const (
	threads   = 256
	elements  = 8
	leastKeys = 64
	most      = 64 // slices
	mostDim   = 32 * elements
)

// together is how many heads that share a key-value head a block works on.
func (g Geometry) together() int {
	if g.Heads/g.KVHeads > 4 {
		return 8
	}
	return 4
}

// blocks is how many groups of heads a key-value head has.
func (g Geometry) blocks() int { return kernel.CeilDiv(g.Heads/g.KVHeads, g.together()) }

// slices is into how many parts positions are divided at most: as many as keep a GPU busy.
func (g Geometry) slices(d gpu.DeviceInfo) int {
	return max(1, min(most, kernel.CeilDiv(g.Capacity, leastKeys),
		kernel.CeilDiv(2*max(1, d.SMs), g.KVHeads*g.blocks())))
}

// PartsBytes is the size of Parts.
func (g Geometry) PartsBytes(d gpu.DeviceInfo) int {
	return 4 * g.Heads * g.slices(d) * (g.HeadDim + 2)
}

// Counters is the number of elements of Arrived.
func (g Geometry) Counters() int { return g.KVHeads * g.blocks() }

// Launch launches one kernel.
func (a Attention) Launch(q *kernel.Queue) {
	if a.HeadDim > mostDim {
		q.Err = fmt.Errorf("kernels.DecodeAttention: heads of %d features, want at most %d",
			a.HeadDim, mostDim)
	}

	lanes := 8
	for lanes*elements < a.HeadDim {
		lanes *= 2
	}

	packed := kernel.Packed(a.Type, a.HeadDim, a.Keys, a.Values) && a.HeadDim%elements == 0
	slices := a.slices(q.Info)
	q.Run("decode_attention",
		fmt.Sprintf("decode_attention_%d_%d%s", lanes, a.together(), kernel.Suffix(a.Type)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: slices, Y: a.KVHeads, Z: a.blocks()},
			Block: gpu.Dim{X: threads}, Overlap: true},
		kernel.Struct{a.Q, a.K, a.V, a.Y, a.Keys, a.Values, a.Cos, a.Sin, a.Position, a.Parts,
			a.Arrived, a.Heads, a.KVHeads, a.HeadDim, a.Capacity, a.Window, slices, a.Scale,
			packed})
}
