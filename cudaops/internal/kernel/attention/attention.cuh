// Definitions shared by the attention kernels: parameters, the order of work, and masks.
//
//   s = scale·q·kᵀ,  m = max s,  l = Σ exp(s − m),  y = exp(s − m)/l · v
//
// Every sequence b and query head h is computed independently; query head h reads key-value head
// h/(heads/kvHeads). Element d of head h at position t of sequence b is x[(b·seq + t)·stride +
// h·headDim + d]. The normalizers (m, log l) are [batch, heads, seq].
//
// A normalizer is stored as two numbers because their sum would be inexact. For scores near 10⁶ the
// sum would be off by up to 0.03, and the probabilities in the backward pass would be wrong by 3%.
#pragma once
#include "exponent.cuh"
#include "mma.cuh"

namespace attention {

using namespace tile;

// The launcher fills in Params. Strides count elements from one row to the next. Fields that a
// kernel does not mention are unused.
struct Params {
  const void *q, *k, *v;
  void *y;
  const void *g;         // gradient of y
  void *dq, *dk, *dv;
  float2 *normalizers;   // m and log l of every query
  float *stats;          // statistics for the backward pass; see statsOf
  int64_t qStride, kStride, vStride, yStride, gStride, dqStride, dkStride, dvStride;
  int batch, seq, heads, kvHeads, headDim, causal;
  float scale;
  int section;           // heads scheduled together, so that their keys and values stay in L2
};

// Documents gives access to the document boundaries of packed sequences. Query i sees the keys from
// start[i] to i, where start does not decrease and start[i] <= i. end[j] is the first query after
// key j that does not see it, or seq if all do. The table holds start for every sequence and then
// end; attention.cu writes it. If Packed is false, nothing is read and the checks are compiled
// away.
template <bool Packed> struct Documents {
  static constexpr bool packed = Packed;
  const int *table;

  // Rows outside the sequence are discarded; they get the bounds of the first or last row.
  __device__ int start(const Params &p, int batch, int query) const {
    if constexpr (Packed) return table[(int64_t)batch * p.seq + max(min(query, p.seq - 1), 0)];
    return 0;
  }
  __device__ int end(const Params &p, int batch, int key) const {
    if constexpr (Packed) return table[((int64_t)p.batch + batch) * p.seq + min(key, p.seq - 1)];
    return p.seq;
  }
};

// Bounds holds the bounds of a lane's accumulator rows. The loads have a long latency, so the
// warp's lowest and highest bounds are computed only where they are needed.
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

// startsOf and endsOf return the bounds of a warp's rows, beginning at the given query or key.
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

// Work is tile `tile` of head `head` of sequence `batch`, processed by one thread block.
struct Work {
  int batch, head, tile;
};

// schedule returns the index-th piece of work. Work is handed out one section of heads at a time
// and, within a section, tile by tile. With lastFirst, for causal masks, the tiles with the longest
// loops come first, so that no long tile is left for the end.
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

// The statistics of a head are three arrays of statsRows numbers: h, Σ_d g·y, and ρ. exponent.cuh
// defines h and ρ. Rows without a query have h = 0, a sum of 0, and ρ = 1.
constexpr int kStatsTile = 128;
__device__ inline int statsRows(const Params &p) { return (p.seq + kStatsTile - 1) / kStatsTile * kStatsTile; }
__device__ inline float *statsOf(const Params &p, int batch, int head) {
  return p.stats + ((int64_t)batch * p.heads + head) * 3 * statsRows(p);
}

// hide masks the scores of keys that do not exist or come after the query. query and key are the
// row and column of the accumulator's corner.
template <int M, int N> __device__ inline void hide(Accumulator<M, N> &s, int query, int key, const Params &p) {
  const int lane = threadIdx.x % 32, first = key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = query + 16 * m + 8 * half + lane / 4;
      const int seen = (p.causal ? min(i + 1, p.seq) : p.seq) - first;  // number of visible columns, from the lane's first one on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= seen) s.c[m][n][2 * half + e] = -INFINITY;
    }
}

// hideBefore masks the scores of keys that precede the query's document. key is the key of column
// 0.
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &s, int key, const Bounds<M> &starts) {
  if (key >= starts.highest()) return;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int before = starts.of[m][half] - key - threadIdx.x % 4 * 2;  // hidden columns, from the lane's first one on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e < before) s.c[m][n][2 * half + e] = -INFINITY;
    }
}
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &, int, const NoBounds &) {}

// dropBehind clears the probabilities of queries after the end of a key's document. Rows are keys;
// query is the query of column 0.
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

// normalizerOf returns a reference to the normalizer of a query.
__device__ inline float2 &normalizerOf(const Params &p, int batch, int head, int query) {
  return p.normalizers[((int64_t)batch * p.heads + head) * p.seq + query];
}

// normalizer returns the normalizer of a query from its largest q·k, top, and the sum of 2^(q·k·c −
// top·c), with c = scale·log₂e. Because of rounding, top·c differs from m·log₂e, which matters when
// both are large, so the result corrects for the difference.
__device__ inline float2 normalizer(float top, float sum, float c, float scale) {
  constexpr float kLn2 = 0.693147181f;
  const float m = top * scale;
  return {m, logf(sum) - kLn2 * fmaf(m, kLog2e, -__fmul_rn(top, c))};
}

// softmaxBase returns the number subtracted from the scores of a row before exponentiation, its
// highest score so far. With documents, a row may not have seen any key yet; exponentials of −∞
// must then be zero rather than NaN.
template <bool Packed> __device__ inline float softmaxBase(float highest) {
  return Packed && highest == -INFINITY ? 0 : highest;
}

}  // namespace attention
