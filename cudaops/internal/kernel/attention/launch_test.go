package attention

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// TestAttentionShapesMatchSources checks that the launchers' shapes match the CUDA sources.
func TestAttentionShapesMatchSources(t *testing.T) {
	for pass, name := range []string{"Forward", "BackwardQ", "BackwardKV"} {
		for _, dim := range []int{64, 128} {
			m := mmaShapes[dim][pass]
			warps := m.threads / 32
			kerneltest.MatchSource(t, "attention_mma.cu",
				fmt.Sprintf("using %s%d = Shape<%d, %d, %d, %d, ", name, dim, dim, warps,
					m.own/warps/16, m.loop))
		}
	}

	match := func(unit, name string, dim int, h hopperShape) {
		kerneltest.MatchSource(t, unit+".cu", fmt.Sprintf("using %s%d = Shape<%d, %d, %d, %d, %d>;",
			name, dim, dim, h.workers, h.loop, h.turns, h.stages))
	}
	for dim, shape := range hopperShapes {
		match("attention_hopper", "Forward", dim, shape)
		fused := "attention_hopper_fused"
		if dim == 64 {
			fused += "64"
		}
		match(fused, "Fused", dim, fusedShapes[dim])
	}
}

// TestAttentionSections checks that evenSection chooses a number of heads whose data fits in the L2 cache and that
// balances the load of the multiprocessors.
func TestAttentionSections(t *testing.T) {
	for _, a := range []struct{ batch, heads, seq, dim int }{{32, 12, 1024, 64},
		{16, 16, 2048, 128}, {4, 16, 8192, 128}, {1, 3, 100, 64}} {
		k, _, _ := kerneltest.FakeGPU(t, 90, 227<<10)
		c := call{Queue: &kernel.Queue{Set: k}, Geometry: Geometry{Batch: a.batch, Seq: a.seq,
			Heads: a.heads, KVHeads: a.heads, HeadDim: a.dim, Causal: true},
			dtype: kerneltest.Bf16}
		heads, tiles := a.batch*a.heads, kernel.CeilDiv(a.seq, 128)
		for _, inTurns := range []bool{true, false} {
			limit, n := c.section(heads, 1), c.evenSection(heads, tiles, 1, inTurns)
			if n < 1 || n > limit || n < limit/2 || n != c.evenSection(heads, tiles, 1, inTurns) {
				t.Errorf("%+v: %d heads, %d fit", a, n, limit)
			}
			around := 0 // the work outside the loop, in halves of a step
			if !inTurns {
				around = 1
			}
			even := max(float64(heads*tiles*(tiles+1+around))/float64(k.Info.SMs),
				float64(2*tiles+around))
			require.LessOrEqual(t, float64(longest(heads, tiles, n, k.Info.SMs, inTurns)),
				1.04*even, inTurns)
		}
	}
}

// TestAttentionSectionVariants checks which numbers of heads are offered as variants of the fused
// backward pass.
func TestAttentionSectionVariants(t *testing.T) {
	k, _, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for _, c := range []struct {
		batch, seq, heads, kv, dim int
		causal                     bool
		want                       []string
	}{
		{4, 4096, 16, 8, 128, true, []string{"hopper", "hopper-8", "hopper-24", "mma",
			"plain"}},
		{2, 4096, 32, 8, 64, true, []string{"hopper", "hopper-8", "mma", "plain"}},
		{32, 1024, 12, 12, 64, true, []string{"hopper", "mma", "plain"}},
		{1, 1024, 4, 2, 128, true, []string{"hopper", "mma", "plain"}},
		{4, 4096, 16, 8, 128, false, []string{"hopper", "mma", "plain"}},
	} {
		q := kernel.Rows{Ptr: p, Stride: c.heads * c.dim}
		kv := kernel.Rows{Ptr: p, Stride: c.kv * c.dim}
		var got []string
		for _, w := range (Backward{Geometry: Geometry{Batch: c.batch, Seq: c.seq, Heads: c.heads,
			KVHeads: c.kv, HeadDim: c.dim, Causal: c.causal}, DQ: q, DK: kv, DV: kv, G: q, Q: q,
			K: kv, V: kv, Y: q, Type: kerneltest.Bf16}).Variants(k) {
			got = append(got, w.String())
		}
		require.Equal(t, c.want, got)
	}
}

// TestAttentionPicksVariants checks which kernels are launched on GPUs of several generations, for several head dimensions
// and types.
func TestAttentionPicksVariants(t *testing.T) {
	for _, gpu := range []struct {
		capability, shared int
		unit               string
	}{
		{80, 163 << 10, "attention_mma"}, {89, 99 << 10, "attention_mma"},
		{90, 227 << 10, "attention_hopper"},
	} {
		k, c, p := kerneltest.FakeGPU(t, gpu.capability, gpu.shared)
		for _, dim := range []int{40, 64, 72, 96, 104, 128, 136} {
			a := Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 2, HeadDim: dim, Causal: true}
			q, kv := kernel.Rows{Ptr: p, Stride: 4 * dim}, kernel.Rows{Ptr: p, Stride: 2 * dim}
			for _, dt := range kerneltest.StorageTypes {
				c.Trace = nil
				require.NoError(t, attend(k, 0, a, kernel.Variant{}, q, p, q, kv, kv, dt))
				require.NoError(t, attendBackward(k, 0, a, kernel.Variant{}, q, kv, kv, p, q, q, kv, kv,
					q, p, dt))
				unit, size := gpu.unit, "_64"
				if dim > 64 {
					size = "_128"
				}
				if unit == "attention_hopper" {
					size = fmt.Sprintf("_%d", a.hopperDim())
				}
				if dim > 128 || dt == kerneltest.F32 {
					unit, size = "attention_plain", ""
				}
				suf := kernel.Suffix(dt)
				want := []string{unit + "_forward" + size, "attention_stats", unit + "_backward_q" +
					size, unit + "_backward_kv" + size}
				if unit == "attention_hopper" {
					want = []string{want[0], want[1], unit + "_backward_fused" + size,
						unit + "_backward_round" + size}[:4-int(kernel.Bit(dim <= 64))]
				}
				launches := slices.DeleteFunc(c.Trace, func(op fake.Op) bool {
					return op.Name == ""
				})
				for i, op := range launches {
					if i >= len(want) || op.Name != want[i]+suf {
						t.Fatalf("capability %d, head dimension %d: launch %d is %s, want %q",
							gpu.capability, dim, i, op.Name, want)
					}
					require.Equal(t, strings.Contains(op.Name, "_backward_round"),
						op.Config.Overlap, op.Name)
					if op.Config.Shared > gpu.shared {
						t.Errorf("%s takes %d bytes of shared memory, capability %d has %d",
							op.Name, op.Config.Shared, gpu.capability, gpu.shared)
					}
				}
				require.Equal(t, len(want), len(launches))
			}
		}
	}
}

// TestAttentionHasStatistics checks that a backward pass with HasStatistics skips the statistics
// kernel, and that a separate Statistics launch is the same as the one it replaces.
func TestAttentionHasStatistics(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for _, dim := range []int{64, 96, 128} {
		rows := kernel.Rows{Ptr: p, Stride: 4 * dim}
		back := Backward{Geometry: Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 4, HeadDim: dim},
			DQ: rows, DK: rows, DV: rows, G: rows, Q: rows, K: rows, V: rows, Y: rows,
			Normalizers: p,
			Workspace:   p, Type: kerneltest.Bf16, Variant: kernel.Variant{Family: Hopper}}
		trace := func(launches ...kernel.Launch) []fake.Op {
			c.Trace = nil
			for _, l := range launches {
				require.NoError(t, k.Launch(0, l))
			}
			return slices.DeleteFunc(c.Trace, func(op fake.Op) bool { return op.Name == "" })
		}
		alone := trace(back)
		back.HasStatistics = true
		require.Equal(t, len(alone)-1, len(trace(back)))
		separate := trace(Statistics{Geometry: back.Geometry, G: rows, Y: rows,
			Normalizers: p, Workspace: p,
			Type: back.Type}, back)
		require.Equal(t, len(alone), len(separate))
		for i := range alone {
			require.Equal(t, alone[i].Name, separate[i].Name)
			require.Equal(t, alone[i].Config, separate[i].Config)
		}
	}
}

// TestAttentionWorkspace checks that the counters are at the end of the fused backward pass's
// workspace, and that the statistics kernel clears them all.
func TestAttentionWorkspace(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for _, x := range []struct{ seq, dim, tile int }{{1, 72, 64}, {64, 72, 64}, {100, 72, 64},
		{129, 72, 64}, {128, 64, 64}, {129, 40, 64}} {
		seq := x.seq
		a := Geometry{Batch: 1, Seq: seq, Heads: 4, KVHeads: 2, HeadDim: x.dim, Causal: true}
		q, kv := kernel.Rows{Ptr: p, Stride: 4 * x.dim}, kernel.Rows{Ptr: p, Stride: 2 * x.dim}
		c.Trace = nil
		require.NoError(t, attendBackward(k, 0, a, kernel.Variant{}, q, kv, kv, p, q, q, kv, kv, q, p,
			kerneltest.Bf16))
		tiles, zeroed := 4*kernel.CeilDiv(seq, x.tile), 0
		for _, op := range c.Trace {
			if op.Name != "attention_stats_bf16" {
				continue
			}
			at := gpu.Ptr(binary.LittleEndian.Uint64(op.Args[len(op.Args)-12:]))
			zeroed = int(binary.LittleEndian.Uint32(op.Args[len(op.Args)-4:]))
			back := Backward{Geometry: a, Type: kerneltest.Bf16}
			require.Equal(t, back.WorkspaceBytes(k.Info),
				kernel.CeilDiv(int(at-p)+4*zeroed, 256)*256, seq)
			require.LessOrEqual(t, zeroed, op.Config.Grid.X*op.Config.Block.X, seq)
		}
		require.Equal(t, tiles+1, zeroed, seq)
	}
}

// TestAttentionFused64 checks that for head dimension 64 the fused backward pass is one kernel
// after the statistics, with and without documents.
func TestAttentionFused64(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for _, dim := range []int{40, 64} {
		a := Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 2, HeadDim: dim, Causal: true}
		q, kv := kernel.Rows{Ptr: p, Stride: 4 * dim}, kernel.Rows{Ptr: p, Stride: 2 * dim}
		for _, table := range []gpu.Ptr{0, p} {
			a.Documents = table
			c.Trace = nil
			require.NoError(t, attend(k, 0, a, kernel.Variant{}, q, p, q, kv, kv, kerneltest.Bf16))
			require.NoError(t, attendBackward(k, 0, a, kernel.Variant{}, q, kv, kv, p, q, q, kv, kv, q, p,
				kerneltest.Bf16))
			want := []string{"attention_hopper_forward_64_bf16", "attention_stats_bf16",
				"attention_hopper_backward_fused_64_bf16"}
			if table != 0 {
				want[0], want[2] = "attention_hopper_forward_64_documents_bf16",
					"attention_hopper_backward_fused_64_documents_bf16"
			}
			var launches []string
			for _, op := range c.Trace {
				if op.Name == "" {
					continue
				}
				launches = append(launches, op.Name)
				require.LessOrEqual(t, op.Config.Shared, 227<<10, op.Name)
			}
			require.Equal(t, want, launches, dim)
		}
	}
}

// TestAttentionDocumentsLaunches checks that, with documents, every kernel that reads keys or
// queries is replaced by the variant that takes the table of documents.
func TestAttentionDocumentsLaunches(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	table := p.Offset(4096)
	for _, dim := range []int{40, 64, 96, 128, 136} {
		for _, v := range []string{plain, mma, Hopper} {
			if v != plain && dim > 128 {
				continue
			}
			a := Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 2, HeadDim: dim, Causal: true,
				Documents: table}
			q, kv := kernel.Rows{Ptr: p, Stride: 4 * dim}, kernel.Rows{Ptr: p, Stride: 2 * dim}
			c.Trace = nil
			require.NoError(t, k.Launch(0, Documents{Table: table, Starts: p, Batch: 2,
				Seq: 100}))
			require.NoError(t, attend(k, 0, a, kernel.Variant{Family: v}, q, p, q, kv, kv, kerneltest.Bf16))
			require.NoError(t, attendBackward(k, 0, a, kernel.Variant{Family: v}, q, kv, kv, p, q, q, kv, kv, q, p,
				kerneltest.Bf16))
			for _, op := range c.Trace {
				if op.Name == "" {
					continue
				}
				reads := strings.Contains(op.Name, "forward") || strings.Contains(op.Name,
					"backward") && !strings.Contains(op.Name, "round")
				require.Equal(t, strings.HasSuffix(op.Name, "_documents_bf16"), reads,
					"%v, head dimension %d: launches %s", v, dim, op.Name)
				require.LessOrEqual(t, op.Config.Shared, 227<<10, op.Name)
			}
		}
	}
}

// TestAttentionUndoesRoPE checks that RoPE kernels follow the backward pass only if its own kernels
// can't undo the rotation.
func TestAttentionUndoesRoPE(t *testing.T) {
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for _, dim := range []int{40, 64, 72, 96, 128, 136} {
		for _, turned := range []bool{false, true} {
			a := Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 2, HeadDim: dim, Causal: true}
			if turned {
				a.Cos, a.Sin = p, p
			}
			c.Trace = nil
			q, kv := kernel.Rows{Ptr: p, Stride: 4 * dim}, kernel.Rows{Ptr: p, Stride: 2 * dim}
			require.NoError(t, attendBackward(k, 0, a, kernel.Variant{}, q, kv, kv, p, q, q, kv, kv, q, p,
				kerneltest.Bf16))
			after := 0
			for _, op := range c.Trace {
				if strings.HasPrefix(op.Name, "rope_") {
					after++
				}
			}
			want := 0
			if turned && dim != 64 && dim != 96 && dim != 128 {
				want = 2
			}
			if after != want {
				t.Errorf("head dimension %d, turned %v: %d launches of RoPE, want %d",
					dim, turned, after, want)
			}
		}
	}
}

// TestAttentionPoisonsSums checks that, with gpu.Poison, the sums of the fused backward pass are
// poisoned before the copy engine stores them.
func TestAttentionPoisonsSums(t *testing.T) {
	before := gpu.Poison
	defer func() { gpu.Poison = before }()
	k, c, p := kerneltest.FakeGPU(t, 90, 227<<10)
	a := Geometry{Batch: 2, Seq: 100, Heads: 4, KVHeads: 2, HeadDim: 128, Causal: true}
	q, kv := kernel.Rows{Ptr: p, Stride: 4 * a.HeadDim}, kernel.Rows{Ptr: p, Stride: 2 * a.HeadDim}
	for _, poison := range []bool{false, true} {
		gpu.Poison = poison
		c.Trace = nil
		require.NoError(t, attendBackward(k, 0, a, kernel.Variant{}, q, kv, kv, p, q, q, kv, kv, q, p,
			kerneltest.Bf16))
		trace := c.Trace
		fused := slices.IndexFunc(trace, func(op fake.Op) bool {
			return op.Name == "attention_hopper_backward_fused_128_bf16"
		})
		filled := slices.IndexFunc(trace[:max(fused, 0)], func(op fake.Op) bool {
			return op.Call == "cuMemsetD8Async"
		})
		require.Equal(t, poison, filled >= 0, "launch %d of the fused pass, memset %d", fused, filled)
		if poison { // the kernel computes these offsets without alignment; see Sums in attention_hopper_fused.cuh
			tile := fusedShapes[128].loop
			sums := 4 * 128 * tile * a.Batch * a.Heads * kernel.CeilDiv(a.Seq, tile)
			require.EqualValues(t, sums, trace[filled].Bytes)
			dq, _, _ := a.fusedParts(&kernel.Carve{})
			require.EqualValues(t, 12*a.Batch*a.Heads*a.statsRows(), dq)
		}
	}
}

// attend launches a forward pass.
func attend(k *kernel.Set, s gpu.Stream, a Geometry, w kernel.Variant, y kernel.Rows, normalizers gpu.Ptr, q,
	key, value kernel.Rows, t gpu.DType) error {
	return k.Launch(s, Forward{Geometry: a, Y: y, Q: q, K: key, V: value, Normalizers: normalizers, Type: t,
		Variant: w})
}

// attendBackward launches a backward pass.
func attendBackward(k *kernel.Set, s gpu.Stream, a Geometry, w kernel.Variant, dq, dk, dv kernel.Rows,
	stats gpu.Ptr, g, q, key, value, y kernel.Rows, normalizers gpu.Ptr, t gpu.DType) error {
	return k.Launch(s, Backward{Geometry: a, DQ: dq, DK: dk, DV: dv, G: g, Q: q, K: key, V: value,
		Y: y, Workspace: stats, Normalizers: normalizers, Type: t, Variant: w})
}
