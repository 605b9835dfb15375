// Flash attention for bf16 and f16 on the tensor cores of every GPU since Ampere (mma.sync).
// attention.cuh has the formulas.
//
// Scores exist only one tile at a time, in registers. In the forward pass a block owns a tile of
// queries and loops over the keys, with a running maximum and sum for each query (Dao,
// "FlashAttention-2", 2023). The backward pass recomputes the softmax P from the forward pass's
// normalizers. With Δ = Σ_d g·y,
//
//   dv = Pᵀ·g,  dS = P ⊙ (g·vᵀ − Δ),  dq = scale·dS·k,  dk = scale·dSᵀ·q.
//
// One kernel owns queries and computes dq. Another owns keys and computes dk and dv, from
// transposed scores, over all query heads that share the keys. The scores are therefore computed
// twice, but no atomics are needed, so results are bitwise reproducible, and dq needs no float32
// copy. Scores never leave their registers: the accumulator of one product is an operand of the
// next.
//
// While a tile is processed, the next one is copied asynchronously (cp.async). Requirements:
// headDim is a multiple of 8 and at most D, pointers and strides are aligned to 16 bytes, and
// scale > 0.
#include "attention.cuh"

namespace attention {

// Shape describes a kernel's tiles. A warp holds 16·M rows of the tile that the block owns. Shared
// memory holds Loop rows of the other operand at a time, and Step of those rows, the width of the
// score accumulator, are multiplied at once.
template <int D_, int Warps_, int M_, int Loop_, int Step_> struct Shape {
  static constexpr int D = D_, Warps = Warps_, M = M_, Loop = Loop_, Step = Step_;
  static constexpr int Threads = 32 * Warps, Own = 16 * M * Warps;
  static constexpr int OwnBytes = Own * D * 2, LoopBytes = Loop * D * 2;
};

// Launch: batch·heads·⌈seq/Own⌉ blocks of Threads. Shared memory: q, and two stages of k and v.
template <typename T, typename S, typename Docs> __device__ __forceinline__ void forward(const Params &p, const Docs &docs) {
  constexpr int D = S::D, M = S::M;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t qTile = sharedAddress(shared), stages = qTile + S::OwnBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 * M;
  const Work w = schedule(blockIdx.x, p, p.heads, (p.seq + S::Own - 1) / S::Own, p.causal);
  const int i0 = w.tile * S::Own, kvHead = w.head / (p.heads / p.kvHeads);
  const T *q = at<const T>(p.q, p.qStride, p.seq, w.batch, i0, w.head * p.headDim);
  const T *k = at<const T>(p.k, p.kStride, p.seq, w.batch, 0, kvHead * p.headDim);
  const T *v = at<const T>(p.v, p.vStride, p.seq, w.batch, 0, kvHead * p.headDim);
  const int keys = p.causal ? min(p.seq, i0 + S::Own) : p.seq;
  const int lastRow = min(i0 + row + 16 * M, p.seq) - 1;  // for this warp
  const auto starts = startsOf<M>(docs, p, w.batch, i0 + row);
  const float c = p.scale * kLog2e;

  auto fetch = [&](int j) {
    uint32_t stage = stages + j % 2 * 2 * S::LoopBytes;
    loadTile<T, D, S::Loop, S::Threads>(stage, k + (int64_t)j * S::Loop * p.kStride, p.kStride, p.seq - j * S::Loop, p.headDim);
    loadTile<T, D, S::Loop, S::Threads>(stage + S::LoopBytes, v + (int64_t)j * S::Loop * p.vStride, p.vStride,
                                        p.seq - j * S::Loop, p.headDim);
    copyCommit();
  };
  const int first = docs.start(p, w.batch, i0) / S::Loop;
  loadTile<T, D, S::Own, S::Threads>(qTile, q, p.qStride, p.seq - i0, p.headDim);
  fetch(first);

  Accumulator<M, D> y;
  y.clear();
  float top[M][2], sum[M][2];
#pragma unroll
  for (int m = 0; m < M; m++) top[m][0] = top[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;

  const int n = (keys + S::Loop - 1) / S::Loop;
  for (int j = first; j < n; j++) {
    copyWait<0>();
    __syncthreads();  // tile j has arrived, and all threads have read tile j-1
    if (j + 1 < n) fetch(j + 1);
    const uint32_t kTile = stages + j % 2 * 2 * S::LoopBytes, vTile = kTile + S::LoopBytes;
#pragma unroll
    for (int step = 0; step < S::Loop; step += S::Step) {
      const int j0 = j * S::Loop + step;
      if (j0 >= keys || (p.causal && j0 > lastRow)) break;
      if constexpr (Docs::packed)
        if (j0 + S::Step <= starts.lowest()) continue;
      Accumulator<M, S::Step> s;
      s.clear();
      s.template addNT<T, D>(qTile, row, kTile, step);
      if (j0 + S::Step > p.seq || (p.causal && j0 + S::Step - 1 > i0 + row)) hide(s, i0 + row, j0, p);
      hideBefore(s, j0, starts);
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // Without documents every query sees the first key, so top is finite after the first
          // step.
          float highest = top[m][half];
#pragma unroll
          for (int x = 0; x < S::Step / 8; x++) highest = fmaxf(highest, fmaxf(s.c[m][x][2 * half], s.c[m][x][2 * half + 1]));
          highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
          highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
          const float base = softmaxBase<Docs::packed>(highest);
          // The exact factor from the old base to the new one; rounding makes the base differ from
          // top·c.
          float zero = __fmul_rn(base, c), shrink = exp2Approx(__fmul_rn(top[m][half], c) - zero), total = 0;
          top[m][half] = highest;
#pragma unroll
          for (int x = 0; x < S::Step / 8; x++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) total += s.c[m][x][e] = exp2Approx(fmaf(s.c[m][x][e], c, -zero));
          sum[m][half] = sum[m][half] * shrink + total;
#pragma unroll
          for (int x = 0; x < D / 8; x++) y.c[m][x][2 * half] *= shrink, y.c[m][x][2 * half + 1] *= shrink;
        }
      y.template addNN<T>(s, vTile, step);
    }
  }

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = sum[m][half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      int i = i0 + row + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && i < p.seq)
        normalizerOf(p, w.batch, w.head, i) = normalizer(top[m][half], total, c, p.scale);
      sum[m][half] = 1 / total;
    }
  __syncwarp();  // the rows of q that this warp read make room for its rows of y
  y.template roundTo<T>(qTile, row, sum);
  __syncwarp();
  T *out = at<T>(p.y, p.yStride, p.seq, w.batch, i0 + row, w.head * p.headDim);
  storeRows<T, D, 16 * M>(qTile, row, out, p.yStride, p.seq - i0 - row, p.headDim);
}

// dq. Launch: batch·heads·⌈seq/Own⌉ blocks of Threads. Shared memory: q and g, and two stages of k and v.
template <typename T, typename S, typename Docs> __device__ __forceinline__ void backwardQ(const Params &p, const Docs &docs) {
  constexpr int D = S::D, M = S::M;
  static_assert(S::Own <= kStatsTile, "the statistics of all rows of the tile exist");
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t qTile = sharedAddress(shared), gTile = qTile + S::OwnBytes, stages = gTile + S::OwnBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 * M;
  const Work w = schedule(blockIdx.x, p, p.heads, (p.seq + S::Own - 1) / S::Own, p.causal);
  const int i0 = w.tile * S::Own, kvHead = w.head / (p.heads / p.kvHeads);
  const T *q = at<const T>(p.q, p.qStride, p.seq, w.batch, i0, w.head * p.headDim);
  const T *g = at<const T>(p.g, p.gStride, p.seq, w.batch, i0, w.head * p.headDim);
  const T *k = at<const T>(p.k, p.kStride, p.seq, w.batch, 0, kvHead * p.headDim);
  const T *v = at<const T>(p.v, p.vStride, p.seq, w.batch, 0, kvHead * p.headDim);
  const int keys = p.causal ? min(p.seq, i0 + S::Own) : p.seq;
  const int lastRow = min(i0 + row + 16 * M, p.seq) - 1;
  const auto starts = startsOf<M>(docs, p, w.batch, i0 + row);
  const float c = p.scale * kLog2e;

  auto fetch = [&](int j) {
    uint32_t stage = stages + j % 2 * 2 * S::LoopBytes;
    loadTile<T, D, S::Loop, S::Threads>(stage, k + (int64_t)j * S::Loop * p.kStride, p.kStride, p.seq - j * S::Loop, p.headDim);
    loadTile<T, D, S::Loop, S::Threads>(stage + S::LoopBytes, v + (int64_t)j * S::Loop * p.vStride, p.vStride,
                                        p.seq - j * S::Loop, p.headDim);
    copyCommit();
  };
  loadTile<T, D, S::Own, S::Threads>(qTile, q, p.qStride, p.seq - i0, p.headDim);
  const int first = docs.start(p, w.batch, i0) / S::Loop;
  loadTile<T, D, S::Own, S::Threads>(gTile, g, p.gStride, p.seq - i0, p.headDim);
  fetch(first);

  float3 stats[M][2];  // h, ρ and ρ·Δ
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = i0 + row + 16 * m + 8 * half + lane / 4;
      const float *of = statsOf(p, w.batch, w.head) + i;
      const float rho = of[2 * statsRows(p)];
      stats[m][half] = {of[0], rho, rho * of[statsRows(p)]};
    }
  Accumulator<M, D> dq;
  dq.clear();
  const int n = (keys + S::Loop - 1) / S::Loop;
  for (int j = first; j < n; j++) {
    copyWait<0>();
    __syncthreads();  // tile j has arrived, and all threads have read tile j-1
    if (j + 1 < n) fetch(j + 1);
    const uint32_t kTile = stages + j % 2 * 2 * S::LoopBytes, vTile = kTile + S::LoopBytes;
#pragma unroll
    for (int step = 0; step < S::Loop; step += S::Step) {
      const int j0 = j * S::Loop + step;
      if (j0 >= keys || (p.causal && j0 > lastRow)) break;
      if constexpr (Docs::packed)
        if (j0 + S::Step <= starts.lowest()) continue;
      Accumulator<M, S::Step> s, ds;
      s.clear();
      s.template addNT<T, D>(qTile, row, kTile, step);
      if (j0 + S::Step > p.seq || (p.causal && j0 + S::Step - 1 > i0 + row)) hide(s, i0 + row, j0, p);
      hideBefore(s, j0, starts);
      ds.clear();
      ds.template addNT<T, D>(gTile, row, vTile, step);
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int x = 0; x < S::Step / 8; x++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float3 t = stats[m][e / 2];
            ds.c[m][x][e] = exp2Approx(fmaf(s.c[m][x][e], c, -t.x)) * fmaf(t.y, ds.c[m][x][e], -t.z);
          }
      dq.template addNN<T>(ds, kTile, step);
    }
  }
  float scale[M][2];
#pragma unroll
  for (int m = 0; m < M; m++) scale[m][0] = scale[m][1] = p.scale;
  __syncwarp();  // the rows of q that this warp read make room for its rows of dq
  dq.template roundTo<T>(qTile, row, scale);
  __syncwarp();
  T *out = at<T>(p.dq, p.dqStride, p.seq, w.batch, i0 + row, w.head * p.headDim);
  storeRows<T, D, 16 * M>(qTile, row, out, p.dqStride, p.seq - i0 - row, p.headDim);
}

// dk and dv. Launch: batch·kvHeads·⌈seq/Own⌉ blocks of Threads. Shared memory: k and v, and two stages of q, g and stats.
template <typename T, typename S, typename Docs> __device__ __forceinline__ void backwardKV(const Params &p, const Docs &docs) {
  constexpr int D = S::D, M = S::M;
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int stageBytes = 2 * S::LoopBytes + 3 * S::Loop * sizeof(float);
  const uint32_t kTile = sharedAddress(shared), vTile = kTile + S::OwnBytes, stages = vTile + S::OwnBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 * M;
  const Work w = schedule(blockIdx.x, p, p.kvHeads, (p.seq + S::Own - 1) / S::Own, false);
  const int j0 = w.tile * S::Own, group = p.heads / p.kvHeads;
  const T *k = at<const T>(p.k, p.kStride, p.seq, w.batch, j0, w.head * p.headDim);
  const T *v = at<const T>(p.v, p.vStride, p.seq, w.batch, j0, w.head * p.headDim);
  const float c = p.scale * kLog2e;
  // All tiles of queries that see a key of the block, one query head after another.
  const int first = p.causal ? j0 / S::Loop : 0, queries = docs.end(p, w.batch, j0 + S::Own - 1);
  const int tiles = (queries + S::Loop - 1) / S::Loop - first, n = group * tiles;
  const auto ends = endsOf<M>(docs, p, w.batch, j0 + row);

  auto fetch = [&](int it) {
    uint32_t stage = stages + it % 2 * stageBytes;
    int head = w.head * group + it / tiles, i0 = (first + it % tiles) * S::Loop, rows = p.seq - i0;
    const T *q = at<const T>(p.q, p.qStride, p.seq, w.batch, i0, head * p.headDim);
    const T *g = at<const T>(p.g, p.gStride, p.seq, w.batch, i0, head * p.headDim);
    loadTile<T, D, S::Loop, S::Threads>(stage, q, p.qStride, rows, p.headDim);
    loadTile<T, D, S::Loop, S::Threads>(stage + S::LoopBytes, g, p.gStride, rows, p.headDim);
    static_assert(S::Loop <= S::Threads, "a thread copies the statistics of one query");
    if (threadIdx.x < S::Loop) {
      const float *stats = statsOf(p, w.batch, head) + i0 + threadIdx.x;
#pragma unroll
      for (int i = 0; i < 3; i++)
        copyAsync<4>(stage + 2 * S::LoopBytes + (i * S::Loop + threadIdx.x) * 4, stats + i * statsRows(p), true);
    }
    copyCommit();
  };
  loadTile<T, D, S::Own, S::Threads>(kTile, k, p.kStride, p.seq - j0, p.headDim);
  loadTile<T, D, S::Own, S::Threads>(vTile, v, p.vStride, p.seq - j0, p.headDim);
  fetch(0);

  Accumulator<M, D> dk, dv;
  dk.clear();
  dv.clear();
  for (int it = 0; it < n; it++) {
    copyWait<0>();
    __syncthreads();  // tile `it` has arrived, and all threads have read the preceding tile
    if (it + 1 < n) fetch(it + 1);
    const uint32_t qTile = stages + it % 2 * stageBytes, gTile = qTile + S::LoopBytes, statsRow = gTile + S::LoopBytes;
    const int i0 = (first + it % tiles) * S::Loop;
#pragma unroll
    for (int step = 0; step < S::Loop; step += S::Step) {
      const int i = i0 + step;
      if (i >= p.seq) break;
      if constexpr (Docs::packed)
        if (i >= ends.highest()) break;
      if (p.causal && i + S::Step <= j0 + row) continue;  // all of these queries come before this warp's keys
      Accumulator<M, S::Step> pt, ds;  // transposed: rows are keys, columns are queries
      pt.clear();
      pt.template addNT<T, D>(kTile, row, qTile, step);
      // For a query that does not exist, q, g and the statistics are zeros, so it contributes
      // nothing. A key that does not exist affects only its own row, which is not stored.
      const uint32_t stats = statsRow + (step + lane % 4 * 2) * 4;  // for two neighboring queries
      const bool diagonal = p.causal && i < j0 + row + 16 * M - 1;
#pragma unroll
      for (int x = 0; x < S::Step / 8; x++) {
        float h[2], rho[2];
        loadPair(h, stats + x * 32);
        loadPair(rho, stats + (2 * S::Loop + 8 * x) * 4);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float t = rho[e % 2] * exp2Approx(fmaf(pt.c[m][x][e], c, -h[e % 2]));
            int key = j0 + row + 16 * m + lane / 4 + e / 2 * 8, query = i + 8 * x + lane % 4 * 2 + e % 2;
            pt.c[m][x][e] = diagonal && key > query ? 0 : t;
          }
      }
      dropBehind(pt, i, ends);
      dv.template addNN<T>(pt, gTile, step);
      ds.clear();
      ds.template addNT<T, D>(vTile, row, gTile, step);
#pragma unroll
      for (int x = 0; x < S::Step / 8; x++) {
        float delta[2];
        loadPair(delta, stats + (S::Loop + 8 * x) * 4);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int e = 0; e < 4; e++) ds.c[m][x][e] = pt.c[m][x][e] * (ds.c[m][x][e] - delta[e % 2]);
      }
      dk.template addNN<T>(ds, qTile, step);
    }
  }
  float scale[M][2], one[M][2];
#pragma unroll
  for (int m = 0; m < M; m++) scale[m][0] = scale[m][1] = p.scale, one[m][0] = one[m][1] = 1;
  __syncwarp();  // the rows of k and v that this warp read make room for its rows of dk and dv
  dk.template roundTo<T>(kTile, row, scale);
  dv.template roundTo<T>(vTile, row, one);
  __syncwarp();
  const int rows = p.seq - j0 - row;
  T *dkRow = at<T>(p.dk, p.dkStride, p.seq, w.batch, j0 + row, w.head * p.headDim);
  T *dvRow = at<T>(p.dv, p.dvStride, p.seq, w.batch, j0 + row, w.head * p.headDim);
  storeRows<T, D, 16 * M>(kTile, row, dkRow, p.dkStride, rows, p.headDim);
  storeRows<T, D, 16 * M>(vTile, row, dvRow, p.dvStride, rows, p.headDim);
}

// mmaShapes on the host must match these shapes. No block needs more than the 99 KiB of shared
// memory available on sm_89.
using Forward64 = Shape<64, 4, 2, 64, 64>;
using Forward128 = Shape<128, 4, 2, 64, 64>;
using BackwardQ64 = Shape<64, 4, 2, 64, 32>;
using BackwardQ128 = Shape<128, 4, 2, 32, 32>;
using BackwardKV64 = Shape<64, 4, 2, 64, 32>;
using BackwardKV128 = Shape<128, 8, 1, 32, 32>;

}  // namespace attention

#define KERNEL(name, body, S, T, blocks)                                                             \
  extern "C" __global__ void __launch_bounds__(attention::S::Threads, blocks) name##_##T(            \
      const __grid_constant__ attention::Params p) {                                                 \
    attention::body<T, attention::S>(p, attention::Documents<false>());                              \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(attention::S::Threads, blocks) name##_documents_##T(  \
      const __grid_constant__ attention::Params p, const int *table) {                               \
    attention::body<T, attention::S>(p, attention::Documents<true>{table});                          \
  }
#define KERNELS(T)                                                                                   \
  KERNEL(attention_mma_forward_64, forward, Forward64, T, 2)                                         \
  KERNEL(attention_mma_forward_128, forward, Forward128, T, 2)                                       \
  KERNEL(attention_mma_backward_q_64, backwardQ, BackwardQ64, T, 2)                                  \
  KERNEL(attention_mma_backward_q_128, backwardQ, BackwardQ128, T, 2)                                \
  KERNEL(attention_mma_backward_kv_64, backwardKV, BackwardKV64, T, 2)                               \
  KERNEL(attention_mma_backward_kv_128, backwardKV, BackwardKV128, T, 1)
KERNELS(bf16)
KERNELS(f16)
