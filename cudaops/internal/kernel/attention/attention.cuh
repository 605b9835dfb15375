// What the attention kernels share: parameters, the order of work, and masks.
//
//   s = scale·q·kᵀ,  m = max s,  l = Σ exp(s − m),  y = exp(s − m)/l · v
//
// for every sequence b and query head h on its own; query head h reads key-value head h/(heads/kvHeads). Element d of
// head h at position t of sequence b is x[(b·seq + t)·stride + h·headDim + d]; the normalizers (m, log l) are [batch, heads, seq].
//
// A normalizer is two numbers because their sum is not exact: of scores near 10⁶ it is off by up to 0.03, which makes the
// probabilities of the backward pass wrong by 3 %.
#pragma once
#include "exponent.cuh"
#include "mma.cuh"

namespace attention {

using namespace tile;

// The launcher fills it; strides are in elements from one row to the next. Those that a kernel does not name are unused.
struct Params {
  const void *q, *k, *v;
  void *y;
  const void *g;         // gradient of y
  void *dq, *dk, *dv;
  float2 *normalizers;   // m and log l of every query
  float *stats;          // what the backward pass reads of every query; statsOf finds it
  int64_t qStride, kStride, vStride, yStride, gStride, dqStride, dkStride, dvStride;
  int batch, seq, heads, kvHeads, headDim, causal;
  float scale;
  int section;           // heads whose blocks are scheduled together, so that their keys and values stay in L2
};

// Documents that lie one behind the other in a sequence: query i sees the keys from start[i] on, itself the last. start does not
// decrease, and start[i] <= i; end[j] is the first query behind key j that does not see it, seq if all do. The table has start
// of every sequence, then end; attention.cu makes it. Without documents nothing is read and nothing is compiled.
template <bool Packed> struct Documents {
  static constexpr bool packed = Packed;
  const int *table;

  // Rows outside the sequence, of which nothing is kept, have the bounds of its first or last.
  __device__ int start(const Params &p, int batch, int query) const {
    if constexpr (Packed) return table[(int64_t)batch * p.seq + max(min(query, p.seq - 1), 0)];
    return 0;
  }
  __device__ int end(const Params &p, int batch, int key) const {
    if constexpr (Packed) return table[((int64_t)p.batch + batch) * p.seq + min(key, p.seq - 1)];
    return p.seq;
  }
};

// The bounds of the rows of an accumulator of which a lane has parts. They come from far: the lowest and the highest of the warp's
// are found where they are needed, so that nobody waits before.
template <int M> struct Bounds {
  int of[M][2];
  template <class Of> __device__ explicit Bounds(Of bound) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) of[m][half] = bound(16 * m + 8 * half + threadIdx.x % 32 / 4);
  }
  __device__ int lowest() const { return __shfl_sync(kAllLanes, of[0][0], 0); }
  __device__ int highest() const { return __shfl_sync(kAllLanes, of[M - 1][1], 31); }
};
struct NoBounds {};

// Those of a warp's rows from a query or key on.
template <int M, bool Packed>
__device__ inline auto startsOf(const Documents<Packed> &docs, const Params &p, int batch, int query) {
  if constexpr (Packed)
    return Bounds<M>([&](int row) { return docs.start(p, batch, query + row); });
  else
    return NoBounds();
}
template <int M, bool Packed>
__device__ inline auto endsOf(const Documents<Packed> &docs, const Params &p, int batch, int key) {
  if constexpr (Packed)
    return Bounds<M>([&](int row) { return docs.end(p, batch, key + row); });
  else
    return NoBounds();
}

// Work is tile `tile` of head `head` of sequence `batch`, which one thread block does.
struct Work {
  int batch, head, tile;
};

// Work is handed out a section of the heads at a time. Within a section it goes tile by tile. Under
// a causal mask the tiles with the longest loops come first, so that no long one is left for the
// end.
__device__ inline Work schedule(int index, const Params &p, int heads, int tiles, bool lastFirst) {
  int perSection = p.section * tiles, first = index / perSection * p.section, r = index % perSection;
  int n = min(p.section, p.batch * heads - first);
  int tile = r / n, head = first + r % n;
  return {head / heads, head % heads, lastFirst ? tiles - 1 - tile : tile};
}

template <typename T>
__device__ inline T *at(const void *base, int64_t stride, int seq, int batch, int row, int column) {
  return (T *)base + ((int64_t)batch * seq + row) * stride + column;
}

// The statistics of a head: statsRows of h, a multiple of 128, then as many of Σ_d g·y, and as many of ρ; Exponent says what h and ρ
// are. Where there is no query, h and the sum are zero, and ρ is one.
constexpr int kStatsTile = 128;
__device__ inline int statsRows(const Params &p) { return (p.seq + kStatsTile - 1) / kStatsTile * kStatsTile; }
__device__ inline float *statsOf(const Params &p, int batch, int head) {
  return p.stats + ((int64_t)batch * p.heads + head) * 3 * statsRows(p);
}

// Hides scores of keys that do not exist or come after the query. Row and column are those of the accumulator's corner.
template <int M, int N> __device__ inline void hide(Accumulator<M, N> &s, int query, int key, const Params &p) {
  const int lane = threadIdx.x % 32, first = key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = query + 16 * m + 8 * half + lane / 4;
      const int seen = (p.causal ? min(i + 1, p.seq) : p.seq) - first;  // of the columns from the lane's first on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= seen) s.c[m][n][2 * half + e] = -INFINITY;
    }
}

// Hides scores of keys before the queries' documents; column 0 is that key.
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &s, int key, const Bounds<M> &starts) {
  if (key >= starts.highest()) return;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int before = starts.of[m][half] - key - threadIdx.x % 4 * 2;  // columns from the lane's first on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e < before) s.c[m][n][2 * half + e] = -INFINITY;
    }
}
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &, int, const NoBounds &) {}

// Makes probabilities zero, rows of which are keys, of queries behind the keys' documents; column 0 is that query.
template <int M, int N> __device__ inline void dropBehind(Accumulator<M, N> &s, int query, const Bounds<M> &ends) {
  if (query + N <= ends.lowest()) return;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int seen = ends.of[m][half] - query - threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= seen) s.c[m][n][2 * half + e] = 0;
    }
}
template <int M, int N> __device__ inline void dropBehind(Accumulator<M, N> &, int, const NoBounds &) {}

// Where the normalizer of a query is.
__device__ inline float2 &normalizerOf(const Params &p, int batch, int head, int query) {
  return p.normalizers[((int64_t)batch * p.heads + head) * p.seq + query];
}

// The normalizer of a query whose highest q·k is top, from the sum of 2^(q·k·c − top·c), with c = scale·log₂e. Rounding makes top·c
// another number than m·log₂e, which matters where both are large.
__device__ inline float2 normalizer(float top, float sum, float c, float scale) {
  constexpr float kLn2 = 0.693147181f;
  const float m = top * scale;
  return {m, logf(sum) - kLn2 * fmaf(m, kLog2e, -__fmul_rn(top, c))};
}

// What exponentials of a row are taken relative to: its highest score so far. With documents that may be none yet, and the
// exponentials of nothing must be zero.
template <bool Packed> __device__ inline float softmaxBase(float highest) {
  return Packed && highest == -INFINITY ? 0 : highest;
}

}  // namespace attention
