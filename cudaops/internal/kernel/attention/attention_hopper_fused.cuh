// Definitions shared by the fused backward passes in attention_hopper_fused.cu and
// attention_hopper_fused64.cu: the loop over queries, the sums of dq, and the counters that
// synchronize blocks.
#pragma once
#include "attention_hopper.cuh"

namespace attention {

constexpr int kFusedTile = 64;  // queries

#ifdef HOPPER

__device__ inline int loadAcquire(const int *p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline void storeRelease(int *p, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Sums is the part of the workspace after the statistics. It has the partial sums of every tile of
// dq, in the layout of the product's registers; the number of blocks that have added to each tile,
// or `complete` once all have, in kernels that report this to another kernel; and the number of
// work items handed out. The numbers must start at zero, but the sums need not be initialized.
template <class S> struct Sums {
  static_assert(S::Loop == kFusedTile, "");
  float *sums;
  int *added, *handedOut;
  int tiles;  // per head
  static constexpr int size = kFusedTile * S::D, complete = 1 << 30;
  __device__ Sums(const Params &p) : tiles((p.seq + kFusedTile - 1) / kFusedTile) {
    const int64_t heads = (int64_t)p.batch * p.heads;
    sums = p.stats + heads * 3 * statsRows(p);
    added = (int *)(sums + heads * tiles * size);
    handedOut = added + heads * tiles;
  }
  __device__ int64_t index(const Params &p, int batch, int head, int tile) const {
    return ((int64_t)batch * p.heads + head) * tiles + tile;
  }
  // before returns the number of blocks that add to a tile of queries before the block of w. The
  // blocks that hold visible keys add in consecutive order, starting with the first key of the
  // first query.
  template <class Docs> __device__ static int before(const Params &p, const Docs &docs, const Work &w, int tile) {
    return w.tile - docs.start(p, w.batch, tile * kFusedTile) / S::Own;
  }
  // finishes reports whether w's block is the last to add to a tile.
  __device__ bool finishes(const Params &p, const Work &w, int tile) const {
    return w.tile == (p.causal ? tile : tiles - 1) * kFusedTile / S::Own;
  }
  __device__ void wait(int64_t at, int before) const {
    while (loadAcquire(added + at) < before) {
    }
  }
};

// QueryWalk visits, among the first `tiles` tiles of queries, the ones that see a key of the block.
// It goes from the last to the first, for one query head of the group after another.
struct QueryWalk {
  int count, last, group;
  __device__ QueryWalk(const Params &p, int tiles, int j0)
      : count(tiles - (p.causal ? j0 / kFusedTile : 0)), last(tiles - 1), group(p.heads / p.kvHeads) {}
  __device__ int steps() const { return group * count; }
  // walk calls visit(head, tile) for each tile.
  template <class Visit> __device__ void walk(int kvHead, Visit visit) const {
#pragma unroll 1
    for (int h = 0; h < group; h++)
#pragma unroll 1
      for (int t = 0; t < count; t++) visit(kvHead * group + h, last - t);
  }
};

// correct multiplies probabilities by the ρ of their queries, the columns, if some ρ differs from
// 1. The last bit of h indicates this. This is rare, so ρ is not copied to shared memory: rho()
// returns the address of the tile's first ρ in global memory.
template <int N, class Rho> __device__ inline void correct(Accumulator<1, N> &s, const float (&h)[N / 8][2], Rho rho) {
  uint32_t bits = 0;
#pragma unroll
  for (int x = 0; x < N / 8; x++) bits |= __float_as_uint(h[x][0]) | __float_as_uint(h[x][1]);
  if (!__any_sync(kAllLanes, bits & 1)) return;
  const float *of = rho() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int x = 0; x < N / 8; x++) {
    const float2 r = *(const float2 *)(of + 8 * x);
#pragma unroll
    for (int f = 0; f < 4; f++) s.c[0][x][f] *= f % 2 ? r.y : r.x;
  }
}

// storeColumns writes columns 16·k... of a warp's rows, in the layout of a product, to a tile of 64
// columns. address belongs to this lane's chunk for k = 0.
__device__ inline void storeColumns(const uint32_t (&v)[4], uint32_t address, int k) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address ^ k * 32), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ inline float2 unpack(uint32_t v, bf16) { return __bfloat1622float2(*(__nv_bfloat162 *)&v); }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

template <bool Value> struct Constant {
  static constexpr bool value = Value;
};

#endif  // HOPPER
}  // namespace attention
