package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// PageTokens is the number of tokens in a page; see kvcache.PageTokens.
const PageTokens = 64

// Paged attends from the tokens of several sequences to themselves and the tokens before them. Table, an
// int64 [Rows, Columns], holds for each row the position of its token, less than Capacity, and the pages of
// its sequence. A row with a negative position gets zeros.
//
// Keys and Values, [pages, PageTokens, KVHeads·HeadDim], are the cache. The launch first stores the rows'
// own keys K and values V in it, and then computes [Attention] for every row.
type Paged struct {
	Geometry
	Y, Keys, Values gpu.Ptr
	Q, K, V         kernel.Rows
	Cos, Sin        gpu.Ptr // float32; null without RoPE
	Table           gpu.Ptr
	Parts           gpu.Ptr // workspace of PartsBytes
	Arrived         gpu.Ptr // Counters elements of uint32, zero before and after a launch
	Rows, Columns   int
	Type            gpu.DType
	Early           bool // see Overlap
	Grouped         bool // attend on the tensor cores, which CanGroup must allow
}

// These constants must match decode_grouped.cu.
const (
	groupedWarps  = 4
	groupedKeys   = 64
	groupedHeads  = 16
	groupedStages = 3
)

// CanGroup reports whether the tensor cores can compute the attention.
func (a Paged) CanGroup() bool {
	return (a.Type == gpu.BFloat16 || a.Type == gpu.Float16) && (a.HeadDim == 64 || a.HeadDim == 128) &&
		a.Heads/a.KVHeads <= groupedHeads
}

// rowSlices returns the largest number of slices into which the positions of a row are divided. Several
// slices even out the work of sequences of different lengths.
func (a Paged) rowSlices(d gpu.DeviceInfo) int {
	if a.Grouped {
		blocks := 4 // on a multiprocessor
		if a.HeadDim > 64 {
			blocks = 2
		}
		return max(1, min(maxSlices, kernel.CeilDiv(a.Capacity, minKeys),
			kernel.CeilDiv(blocks*max(1, d.SMs), a.Rows*a.KVHeads)))
	}
	const atLeast = 2
	return max(1, min(maxSlices, kernel.CeilDiv(a.Capacity, minKeys),
		max(atLeast, kernel.CeilDiv(2*max(1, d.SMs), a.Rows*a.KVHeads*a.blocks()))))
}

// PartsBytes returns the size of Parts in bytes.
func (a Paged) PartsBytes(d gpu.DeviceInfo) int {
	return 4 * a.Rows * a.Heads * a.rowSlices(d) * (a.HeadDim + 2)
}

// Counters returns the number of elements of Arrived.
func (a Paged) Counters() int { return a.Rows * a.Geometry.Counters() }

// chunkRows must match kRows in decode_chunk.cu.
const chunkRows = 64

// chunk returns the number of tokens of a prompt whose attention one block computes, or 0. Only passes with more rows
// than texts have such chunks.
func (a Paged) chunk() int {
	if !a.Grouped || a.Rows <= MostRows {
		return 0
	}
	heads := 1
	for heads < a.Heads/a.KVHeads {
		heads *= 2
	}
	return chunkRows / heads
}

// Launch enqueues two or three kernels.
func (a Paged) Launch(q *kernel.Queue) {
	if a.HeadDim > maxDim {
		q.Err = fmt.Errorf("kernels.DecodePaged: heads of %d features, want at most %d", a.HeadDim, maxDim)
	}

	vector := kernel.Vector(a.Type)
	packed := kernel.Packed(a.Type, a.HeadDim, a.Q.Ptr, a.Keys, a.Values) && a.HeadDim%elements == 0 &&
		a.Q.Stride%vector == 0
	slices := a.rowSlices(q.Info)
	args := kernel.Struct{a.Q.Ptr, a.K.Ptr, a.V.Ptr, a.Y, a.Keys, a.Values, a.Cos, a.Sin, a.Table, a.Parts,
		a.Arrived, a.Heads, a.KVHeads, a.HeadDim, a.Capacity, a.Window, slices, a.Scale, packed, a.Rows,
		a.Columns, a.Q.Stride, a.K.Stride, a.V.Stride, a.Early}
	c := kernel.Line(a.Rows, threads)
	c.Overlap = true
	q.Run("decode_paged", "decode_append"+kernel.Suffix(a.Type), c, args)
	if a.Grouped {
		chunk := a.chunk()
		args := kernel.Struct{args, chunk}
		tiles := groupedStages * 2 * groupedKeys * a.HeadDim * 2
		if chunk > 0 {
			q.Run("decode_chunk", fmt.Sprintf("decode_chunk_%d%s", a.HeadDim, kernel.Suffix(a.Type)),
				gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.Rows, chunk), Y: a.KVHeads},
					Block: gpu.Dim{X: 32 * groupedWarps}, Shared: tiles, Overlap: true}, args)
		}
		q.Run("decode_grouped", fmt.Sprintf("decode_grouped_%d%s", a.HeadDim, kernel.Suffix(a.Type)),
			gpu.LaunchConfig{Grid: gpu.Dim{X: slices, Y: a.KVHeads, Z: a.Rows}, Block: gpu.Dim{X: 32 * groupedWarps},
				Shared: tiles, Overlap: true}, args)
		return
	}
	q.Run("decode_paged", fmt.Sprintf("decode_paged_%d_%d%s", a.lanes(), a.together(), kernel.Suffix(a.Type)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: slices, Y: a.KVHeads * a.blocks(), Z: a.Rows},
			Block: gpu.Dim{X: threads}, Overlap: true}, args)
}
