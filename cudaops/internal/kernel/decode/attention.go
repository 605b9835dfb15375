// Package decode has the kernels that decode one token at a time: attention to a cache of earlier
// keys and values, and matrix products with a single row.
package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Attention attends from the token at Position, an int64 less than Capacity, to itself and the
// tokens before it. Keys and Values, [Capacity, KVHeads·HeadDim], are the cache. The launch first
// stores the token's own key K and value V in it:
//
//	Keys[p] = rotate(K),  Values[p] = V,  Y = softmax(Scale·rotate(Q)·Keysᵀ)·Values
//
// The softmax covers positions up to p, or only the last Window of those. Query head h reads
// key-value head h/(Heads/KVHeads).
//
// rotate applies RoPE with the tables Cos and Sin, [Capacity, HeadDim/2]. If these are null, it is
// the identity.
type Attention struct {
	Geometry
	Y, Q, K, V, Keys, Values gpu.Ptr
	Cos, Sin                 gpu.Ptr // float32; null without RoPE
	Position                 gpu.Ptr
	Parts                    gpu.Ptr // workspace of PartsBytes
	Arrived                  gpu.Ptr // Counters elements of uint32, zero before and after a launch
	Type                     gpu.DType
	Early                    bool // see Overlap; the launch also loads keys and values early
}

// Geometry holds the sizes and the scale of an Attention.
type Geometry struct {
	Heads, KVHeads, HeadDim, Capacity int
	Window                            int     // keys visible to the token, including its own; 0 means all
	Scale                             float64 // applied to the scores
}

// These constants must match decode_attention.cu.
const (
	threads   = 256
	elements  = 8
	minKeys   = 64
	maxSlices = 64 // limit on slices
	maxDim    = 32 * elements
)

// together returns the number of query heads that a block computes at once. They share a key-value
// head.
func (g Geometry) together() int {
	if g.Heads/g.KVHeads > 4 {
		return 8
	}
	return 4
}

// blocks returns the number of groups into which the query heads of a key-value head are divided.
func (g Geometry) blocks() int { return kernel.CeilDiv(g.Heads/g.KVHeads, g.together()) }

// lanes returns the number of lanes that share a key.
func (g Geometry) lanes() int {
	lanes := 8
	for lanes*elements < g.HeadDim {
		lanes *= 2
	}
	return lanes
}

// slices returns the largest number of slices into which the positions are divided. It is just
// large enough to keep the GPU busy.
func (g Geometry) slices(d gpu.DeviceInfo) int {
	return max(1, min(maxSlices, kernel.CeilDiv(g.Capacity, minKeys),
		kernel.CeilDiv(2*max(1, d.SMs), g.KVHeads*g.blocks())))
}

// PartsBytes returns the size of Parts in bytes.
func (g Geometry) PartsBytes(d gpu.DeviceInfo) int {
	return 4 * g.Heads * g.slices(d) * (g.HeadDim + 2)
}

// Counters returns the number of elements of Arrived.
func (g Geometry) Counters() int { return g.KVHeads * g.blocks() }

// packed reports whether the kernels can read 16 bytes at a time.
func (a Attention) packed() bool {
	return kernel.Packed(a.Type, a.HeadDim, a.Q, a.Keys, a.Values) && a.HeadDim%elements == 0
}

// Launch enqueues one kernel.
func (a Attention) Launch(q *kernel.Queue) {
	if a.HeadDim > maxDim {
		q.Err = fmt.Errorf("kernels.DecodeAttention: heads of %d features, want at most %d",
			a.HeadDim, maxDim)
	}

	if a.clustered(q.Info) {
		g := a.clusterHeads()
		q.Run("decode_cluster", fmt.Sprintf("decode_cluster_%d_%d%s", a.lanes(), g, kernel.Suffix(a.Type)),
			gpu.LaunchConfig{Grid: gpu.Dim{X: clusterBlocks, Y: a.KVHeads, Z: kernel.CeilDiv(a.Heads/a.KVHeads, g)},
				Block: gpu.Dim{X: threads}, Cluster: gpu.Dim{X: clusterBlocks}, Shared: a.clusterShared(),
				Overlap: true, MaxShared: true},
			a.args(0))
		return
	}

	slices := a.slices(q.Info)
	q.Run("decode_attention",
		fmt.Sprintf("decode_attention_%d_%d%s", a.lanes(), a.together(), kernel.Suffix(a.Type)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: slices, Y: a.KVHeads, Z: a.blocks()},
			Block: gpu.Dim{X: threads}, Overlap: true},
		a.args(slices))
}

// args returns the fields of struct Attention in decode_attention.cuh.
func (a Attention) args(slices int) kernel.Struct {
	return kernel.Struct{a.Q, a.K, a.V, a.Y, a.Keys, a.Values, a.Cos, a.Sin, a.Position, a.Parts, a.Arrived, a.Heads,
		a.KVHeads, a.HeadDim, a.Capacity, a.Window, slices, a.Scale, a.packed(), a.Early}
}

// clusterBlocks is the number of blocks of a cluster and must match decode_cluster.cu.
//
// Without clusters, up to 64 blocks divide the positions of a head. Fewer clusters than minClusters, or more than
// clusterKeys keys for each, would leave much of the GPU idle: from 1,024 to 8,192 keys, attention of Llama-3.2-1B in
// clusters becomes slower by about 20 µs, in which the memory could deliver six times as many keys.
const (
	clusterBlocks = 8
	minClusters   = 4
	clusterKeys   = 2048
)

// clustered reports whether the blocks of a head form a cluster.
func (a Attention) clustered(d gpu.DeviceInfo) bool {
	keys := a.Capacity
	if a.Window > 0 {
		keys = min(keys, a.Window)
	}
	return d.Overlaps() && (a.Type == gpu.BFloat16 || a.Type == gpu.Float16) && a.packed() && keys <= clusterKeys &&
		kernel.Aligned(a.K, a.V, a.Cos, a.Sin) && a.HeadDim%(2*elements) == 0 &&
		a.KVHeads*kernel.CeilDiv(a.Heads/a.KVHeads, a.clusterHeads()) >= minClusters && a.clusterShared() <= d.SharedPerBlock
}

// clusterHeads returns the number of query heads that a block of a cluster computes at once.
func (g Geometry) clusterHeads() int {
	if g.Heads == g.KVHeads {
		return 1
	}
	return g.together()
}

// clusterShared returns the size of struct Shared in decode_cluster.cu.
func (g Geometry) clusterShared() int {
	rounds, merged, heads := 8, g.clusterHeads(), g.clusterHeads()
	if g.lanes() == 8 {
		rounds = 4
	}
	if merged*g.lanes() > 128 {
		merged = 4
	}
	return rounds*2*16*threads + 4*(merged*threads/32+clusterBlocks*heads)*(2+g.lanes()*elements)
}
