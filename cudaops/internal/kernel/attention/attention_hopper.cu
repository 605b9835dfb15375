// The forward pass of flash attention for bf16 and f16 with Hopper's wgmma and bulk copies, after
// Shah et al., "FlashAttention-3", 2024. attention.cuh has the formulas.
//
// One thread copies tiles into shared memory a few steps ahead. Each of the block's other
// warpgroups owns 64 rows and multiplies them with every tile. Blocks are persistent and take work
// until none is left, so that the next tiles are already on their way while results are written. A
// warpgroup starts the next scores before the current product with v, and computes the softmax
// while the tensor cores are busy.
//
// Requirements: headDim is a multiple of 8 and at most D, pointers and strides are multiples of 16
// bytes, and scale > 0.
#include "attention_hopper.cuh"

namespace attention {

using Forward64 = Shape<64, 3, 128, 2, 3>;
using Forward96 = Shape<96, 2, 128, 2, 3>;
using Forward128 = Shape<128, 2, 128, 2, 2>;

#ifdef HOPPER

// Shared memory: q for Turns turns, outgoing results, Stages tiles of k and v, the barriers and,
// with documents, their reach.
template <class S> struct ForwardMemory {
  uint32_t q, y, k, v;
  Ring<S::Turns> qs;
  Ring<S::Stages> ks, vs;
  Reach<S> begins;
  __device__ ForwardMemory(uint32_t base)
      : q(base), y(q + S::Turns * S::OwnBytes), k(y + S::OwnBytes), v(k + S::Stages * S::LoopBytes),
        qs{v + S::Stages * S::LoopBytes}, ks{qs.barriers + qs.bytes}, vs{ks.barriers + ks.bytes},
        begins{vs.barriers + vs.bytes} {}
  __device__ uint32_t qTile(int turn) const { return q + qs.slot(turn) * S::OwnBytes; }
  __device__ uint32_t kTile(int i) const { return k + ks.slot(i) * S::LoopBytes; }
  __device__ uint32_t vTile(int i) const { return v + vs.slot(i) * S::LoopBytes; }
};

// firstQuery returns the first query of a tile. Tiles are aligned to the end of the sequence, so
// that the partial tile is the first one, which has the least work under a causal mask. Warpgroups
// with negative rows do nothing.
template <class S> __device__ inline int firstQuery(const Params &p, int tile, int tiles) {
  return (p.seq + 63) / 64 * 64 - (tiles - tile) * S::Own;
}

template <class S, class Docs>
__device__ inline void copyForward(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                                   const ForwardMemory<S> &m, int works, int tiles) {
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.heads, tiles, p.causal);
    const int i0 = firstQuery<S>(p, w.tile, tiles), kvHead = w.head / (p.heads / p.kvHeads), n = keyTiles<S>(p, i0 + S::Own - 1);
    int begins[S::Workers];
    for (int wg = 0; wg < S::Workers; wg++) begins[wg] = docs.start(p, w.batch, i0 + 64 * wg) / S::Loop;
    m.qs.waitFree(turn);
    if constexpr (Docs::packed) m.begins.set(turn, begins);
    uint32_t barrier = m.qs.announce(turn, S::OwnBytes);
    copyTile<S::D, S::Own>(m.qTile(turn), q, barrier, i0, w.head, w.batch);
    for (int j = begins[0]; j < n; j++, i++) {
      barrier = m.ks.fill(i, S::LoopBytes);
      copyTile<S::D, S::Loop>(m.kTile(i), k, barrier, j * S::Loop, kvHead, w.batch);
      barrier = m.vs.fill(i, S::LoopBytes);
      copyTile<S::D, S::Loop>(m.vTile(i), v, barrier, j * S::Loop, kvHead, w.batch);
    }
  }
}

// Softmax is the running softmax of the two rows of a thread.
struct Softmax {
  float top[2], sum[2];

  // step turns scores into exponentials. Sums relative to the previous maxima must be multiplied by
  // shrink. Without documents every query sees the first key, so top is finite after the first
  // step.
  template <bool Packed, int N> __device__ void step(Accumulator<1, N> &s, float c, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float highest = top[half];
#pragma unroll
      for (int x = 0; x < N / 8; x++) highest = fmaxf(highest, fmaxf(s.c[0][x][2 * half], s.c[0][x][2 * half + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      // The exact factor from the old base to the new one; rounding makes the base differ from
      // top·c.
      const float zero = __fmul_rn(softmaxBase<Packed>(highest), c);
      shrink[half] = exp2Approx(__fmul_rn(top[half], c) - zero);
      top[half] = highest;
      float total = 0;
#pragma unroll
      for (int x = 0; x < N / 8; x++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) total += s.c[0][x][e] = exp2Approx(fmaf(s.c[0][x][e], c, -zero));
      sum[half] = sum[half] * shrink[half] + total;
    }
  }
};

template <typename T, class S, class Docs>
__device__ inline void workForward(const Params &p, const Docs &docs, const ForwardMemory<S> &m, int works, int tiles) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  // Warpgroups start their products one after another, so that the softmax of one overlaps with the
  // products of the next.
  auto waitTurn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
  auto passTurn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % S::Workers) : "memory"); };
  auto skipTile = [&](int i) {  // a tile that only other warpgroups' queries see
    waitTurn();
    passTurn();
    m.ks.wait(i);
    m.ks.release(i);
    m.vs.wait(i);
    m.vs.release(i);
  };
  if (group == S::Workers - 1) passTurn();
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.heads, tiles, p.causal);
    const int i0 = firstQuery<S>(p, w.tile, tiles), row = i0 + 64 * group, own = row + 16 * warp;  // first rows of the block, warpgroup and warp
    const int n = keyTiles<S>(p, i0 + S::Own - 1), mine = row >= 0 ? keyTiles<S>(p, row + 63) : 1;
    Accumulator<1, N> s;
    Accumulator<1, D> y;
    Operand<N> e;
    Softmax softmax = {{-INFINITY, -INFINITY}, {0, 0}};
    float shrink[2];
    y.clear();
    const auto starts = startsOf<1>(docs, p, w.batch, own);
    auto hideTile = [&](int j) {
      if (j * N + N > p.seq || (p.causal && j * N + N - 1 > own)) hide(s, own, j * N, p);
      hideBefore(s, j * N, starts);
    };

    m.qs.wait(turn);
    int first = 0, begin = 0;  // first tiles of the block and the warpgroup
    if constexpr (Docs::packed) {
      first = m.begins.get(turn, 0), begin = m.begins.get(turn, group);
      for (int j = first; j < begin; j++, i++) skipTile(i);
    }
    m.ks.wait(i);
    waitTurn();
    productsBegin();
    startNT<T, D, S::Own>(s, m.qTile(turn), 64 * group, m.kTile(i));
    productsCommit();
    passTurn();
    productsWait<0>();
    hold(s);
    m.ks.release(i);
    if (mine == begin + 1) m.qs.release(turn);
    hideTile(begin);
    softmax.template step<Docs::packed>(s, c, shrink);
    e.set(s, T());
    m.vs.wait(i);
    for (int j = begin + 1; j < mine; j++) {
      const int next = i + j - begin, now = next - 1;
      m.ks.wait(next);
      waitTurn();
      hold(s);
      hold(y);
      productsBegin();
      startNT<T, D, S::Own>(s, m.qTile(turn), 64 * group, m.kTile(next));
      productsCommit();
      startNN<T, D>(y, e, m.vTile(now));
      productsCommit();
      passTurn();
      productsWait<1>();
      hold(s);
      m.ks.release(next);
      if (j == mine - 1) m.qs.release(turn);
      hideTile(j);
      softmax.template step<Docs::packed>(s, c, shrink);
      hold(s);
      // The assembler would move a wait for products before the exponentials, but it can't cross
      // this loop.
      m.vs.wait(next);
      productsWait<0>();
      hold(y);
      m.vs.release(now);
#pragma unroll
      for (int x = 0; x < D / 8; x++)
#pragma unroll
        for (int f = 0; f < 4; f++) y.c[0][x][f] *= shrink[f / 2];
      e.set(s, T());
    }
    const int last = i + mine - begin - 1;
    hold(y);
    productsBegin();
    startNN<T, D>(y, e, m.vTile(last));
    productsCommit();
    productsWait<0>();
    hold(y);
    m.vs.release(last);
    for (int j = last + 1; j < i + n - begin; j++) skipTile(j);
    i += n - begin;

    float factor[1][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = softmax.sum[half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      int t = own + 8 * half + lane / 4;
      if (lane % 4 == 0 && t >= 0 && t < p.seq)
        normalizerOf(p, w.batch, w.head, t) = normalizer(softmax.top[half], total, c, p.scale);
      factor[0][half] = 1 / total;
    }
    __syncwarp();  // the previous results have been read
    y.template roundTo<T>(m.y, 64 * group + 16 * warp, factor);
    __syncwarp();
    if (row >= 0) {
      T *out = at<T>(p.y, p.yStride, p.seq, w.batch, own, w.head * p.headDim);
      storeResult<T, D, 16>(m.y, 64 * group + 16 * warp, out, p.yStride, p.seq - own, p.headDim);
    }
  }
}

template <typename T, class S, class Docs>
__device__ inline void forward(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardMemory<S> m(sharedAddress(shared));
  const int tiles = (p.seq + S::Own - 1) / S::Own, works = p.batch * p.heads * tiles;
  if (threadIdx.x == 0) {
    m.qs.init(S::WorkerThreads);
    m.ks.init(S::WorkerThreads);
    m.vs.init(S::WorkerThreads);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    giveRegisters<S::CopierRegisters>();
    if (threadIdx.x == 0) copyForward<S>(p, docs, q, k, v, m, works, tiles);
  } else {
    takeRegisters<S::WorkerRegisters>();
    workForward<T, S>(p, docs, m, works, tiles);
  }
}

#endif  // HOPPER
}  // namespace attention

// Launch: as many blocks of Threads as there are multiprocessors. Dynamic shared memory: (Turns +
// 1)·OwnBytes + Stages·(2·LoopBytes + 32) + 16·Turns, plus 16·Turns with documents.
#define FORWARD(D, T)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(attention::Forward##D::Threads, 1) attention_hopper_forward_##D##_##T(   \
      const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
      const __grid_constant__ TensorMap v) {                                                                            \
    BODY(forward<T, attention::Forward##D>(p, attention::Documents<false>(), q, k, v));                                 \
  }                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(attention::Forward##D::Threads, 1)                                       \
      attention_hopper_forward_##D##_documents_##T(                                                                     \
          const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q,                             \
          const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const int *table) {                 \
    BODY(forward<T, attention::Forward##D>(p, attention::Documents<true>{table}, q, k, v));                             \
  }
#define KERNELS(T) FORWARD(64, T) FORWARD(96, T) FORWARD(128, T)
KERNELS(bf16)
KERNELS(f16)
