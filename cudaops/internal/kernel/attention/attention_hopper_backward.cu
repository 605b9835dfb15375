// The backward pass of attention on Hopper's own instructions, for bf16 and f16: attention_mma.cu has the gradients and why
// two kernels form them, attention_hopper.cu the manner of working and what it needs.
//
// Where q and k have been turned by RoPE, the gradients are turned back before they are rounded: rope.cu has the mathematics.
// The first kernel also forms the statistics, which the second reads. Both form a tile's softmax while g·vᵀ is on the tensor
// cores, and leave the products that end in gradients running into the next tile.
#include "attention_hopper.cuh"

namespace attention {

using BackwardQ64 = Shape<64, 2, 128, 2, 3>;
using BackwardKV64 = Shape<64, 2, 64, 2, 6>;

#ifdef HOPPER

// Shared memory: the block's OwnTiles own tiles of Turns turns, results on their way out, Stages of two tiles and their
// statistics, then the barriers and, with documents, their reach.
template <class S, int OwnTiles, int StatsBytes> struct BackwardMemory {
  uint32_t own, out, tiles;
  Ring<S::Turns> turns;
  Ring<S::Stages> stages;
  Reach<S> reach;
  __device__ BackwardMemory(uint32_t base)
      : own(base), out(own + S::Turns * OwnTiles * S::OwnBytes), tiles(out + S::OwnBytes),
        turns{tiles + S::Stages * (2 * S::LoopBytes + StatsBytes)}, stages{turns.barriers + turns.bytes},
        reach{stages.barriers + stages.bytes} {}
  __device__ uint32_t ownFirst(int turn) const { return own + turns.slot(turn) * OwnTiles * S::OwnBytes; }
  __device__ uint32_t ownSecond(int turn) const { return ownFirst(turn) + S::OwnBytes; }
  __device__ uint32_t ownThird(int turn) const { return ownSecond(turn) + S::OwnBytes; }
  __device__ uint32_t first(int i) const { return tiles + stages.slot(i) * 2 * S::LoopBytes; }
  __device__ uint32_t second(int i) const { return first(i) + S::LoopBytes; }
  __device__ uint32_t stats(int i) const { return tiles + S::Stages * 2 * S::LoopBytes + stages.slot(i) * StatsBytes; }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      turns.init(S::WorkerThreads);
      stages.init(S::WorkerThreads);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
};

template <class S, class Docs>
__device__ inline void copyQ(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                             const TensorMap &g, const TensorMap &y, const BackwardMemory<S, 3, 0> &m, int works, int tiles) {
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.heads, tiles, p.causal);
    const int kvHead = w.head / (p.heads / p.kvHeads), n = keyTiles<S>(p, w.tile * S::Own + S::Own - 1);
    int begins[S::Workers];
    for (int wg = 0; wg < S::Workers; wg++) begins[wg] = docs.start(p, w.batch, w.tile * S::Own + 64 * wg) / S::Loop;
    m.turns.waitFree(turn);
    if constexpr (Docs::packed) m.reach.set(turn, begins);
    uint32_t barrier = m.turns.announce(turn, 3 * S::OwnBytes);
    copyTile<S::D, S::Own>(m.ownFirst(turn), q, barrier, w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.ownSecond(turn), g, barrier, w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.ownThird(turn), y, barrier, w.tile * S::Own, w.head, w.batch);
    for (int j = begins[0]; j < n; j++, i++) {
      barrier = m.stages.fill(i, 2 * S::LoopBytes);
      copyTile<S::D, S::Loop>(m.first(i), k, barrier, j * S::Loop, kvHead, w.batch);
      copyTile<S::D, S::Loop>(m.second(i), v, barrier, j * S::Loop, kvHead, w.batch);
    }
  }
}

// The product of two tiles' rows, which the four lanes that have parts of a row share. What does not exist is zero.
template <typename T, int D, int Rows> __device__ inline float dotRows(uint32_t a, uint32_t b, int row) {
  const int lane = threadIdx.x % 32;
  float sum = 0;
#pragma unroll
  for (int x = 0; x < D / 32; x++) {
    const int chunk = lane % 4 + 4 * x;
    const uint32_t at = chunk / 8 * Rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16;
    Pack<T, 8> u, v;
    loadWords((uint32_t *)&u, a + at);
    loadWords((uint32_t *)&v, b + at);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(u.get(e), v.get(e), sum);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  return sum + __shfl_xor_sync(kAllLanes, sum, 2);
}

template <typename T, class S, class Docs>
__device__ inline void workQ(const Params &p, const Docs &docs, const Angles &angles, const BackwardMemory<S, 3, 0> &m, int works,
                             int tiles) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  auto skipTile = [&](int i) {  // which only another group's queries see
    m.stages.wait(i);
    m.stages.release(i);
  };
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.heads, tiles, p.causal);
    const int i0 = w.tile * S::Own, row = i0 + 64 * group, own = row + 16 * warp;  // first rows: block, group, warp
    const auto starts = startsOf<1>(docs, p, w.batch, own);
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = own + 8 * half + lane / 4;
      lse[half] = t < p.seq ? p.lse[((int64_t)w.batch * p.heads + w.head) * p.seq + t] * kLog2e : 0;
    }
    Accumulator<1, D> dq;
    Accumulator<1, N> s, ds;
    Operand<N> e;
    dq.clear();
    m.turns.wait(turn);
    int first = 0, begin = 0;  // tile: the block's, the group's
    if constexpr (Docs::packed) first = m.reach.get(turn, 0), begin = m.reach.get(turn, group);
    const int n = keyTiles<S>(p, i0 + S::Own - 1), mine = row < p.seq ? keyTiles<S>(p, row + 63) : begin + 1;
    static_assert(S::Own == kStatsTile, "there is room for the statistics of all rows of the tile, and all are formed");
#pragma unroll
    for (int half = 0; half < 2; half++) {
      delta[half] = dotRows<T, D, S::Own>(m.ownThird(turn), m.ownSecond(turn), own - i0 + 8 * half + lane / 4);
      float *stats = statsOf(p, w.batch, w.head) + own + 8 * half + lane / 4;
      if (lane % 4 == 0) stats[0] = lse[half], stats[statsRows(p)] = delta[half];
    }
    for (int j = first; j < begin; j++, i++) skipTile(i);
    for (int j = begin; j < mine; j++, i++) {
      m.stages.wait(i);
      hold(s);
      hold(ds);
      productsBegin();
      startNT<T, D, S::Own>(s, m.ownFirst(turn), 64 * group, m.first(i));
      productsCommit();
      startNT<T, D, S::Own>(ds, m.ownSecond(turn), 64 * group, m.second(i));
      productsCommit();
      productsWait<1>();
      hold(s);
      hold(dq);
      if (j > begin) m.stages.release(i - 1);
      if (j * N + N > p.seq || (p.causal && j * N + N - 1 > own)) hide(s, own, j * N, p);
      hideBefore(s, j * N, starts);
#pragma unroll
      for (int x = 0; x < N / 8; x++)
#pragma unroll
        for (int f = 0; f < 4; f++) s.c[0][x][f] = exp2Approx(fmaf(s.c[0][x][f], c, -lse[f / 2]));
      hold(s);
      m.stages.wait(i);  // long past; but no wait for products moves ahead of the exponentials across it
      productsWait<0>();
      hold(ds);
#pragma unroll
      for (int x = 0; x < N / 8; x++)
#pragma unroll
        for (int f = 0; f < 4; f++) ds.c[0][x][f] = s.c[0][x][f] * (ds.c[0][x][f] - delta[f / 2]);
      e.set(ds, T());
      productsBegin();
      startNN<T, D>(dq, e, m.first(i));
      productsCommit();
    }
    fenceAsync();
    m.turns.release(turn);
    const TurnBack<D> turnBack(angles, own, p.seq);
    productsWait<0>();
    hold(dq);
    m.stages.release(i - 1);
    for (int j = mine; j < n; j++, i++) skipTile(i);
    const float factor[1][2] = {{p.scale, p.scale}};
    turnBack.turn(dq);
    __syncwarp();  // the previous results have been read
    dq.template roundTo<T>(m.out, 64 * group + 16 * warp, factor);
    __syncwarp();
    T *out = at<T>(p.dq, p.dqStride, p.seq, w.batch, own, w.head * p.headDim);
    storeRows<T, D, 16>(m.out, 64 * group + 16 * warp, out, p.dqStride, p.seq - own, p.headDim);
  }
}

// The tiles of queries before `end` that see a key of the block's: `count` from `first` on, for each query head of the group.
template <class S> struct QueryTiles {
  int first, count, n;
  __device__ QueryTiles(const Params &p, int j0, int end)
      : first(p.causal ? j0 / S::Loop : 0), count((end + S::Loop - 1) / S::Loop - first), n(p.heads / p.kvHeads * count) {}
};

template <class S> constexpr int kStatsBytes = 2 * S::Loop * sizeof(float);

template <class S, class Docs>
__device__ inline void copyKV(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                              const TensorMap &g, const BackwardMemory<S, 2, kStatsBytes<S>> &m, int works, int tiles) {
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.kvHeads, tiles, false);
    int ends[S::Workers];
    for (int wg = 0; wg < S::Workers; wg++) ends[wg] = docs.end(p, w.batch, w.tile * S::Own + 64 * wg + 63);
    m.turns.waitFree(turn);
    if constexpr (Docs::packed) m.reach.set(turn, ends);
    uint32_t barrier = m.turns.announce(turn, 2 * S::OwnBytes);
    copyTile<S::D, S::Own>(m.ownFirst(turn), k, barrier, w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.ownSecond(turn), v, barrier, w.tile * S::Own, w.head, w.batch);
    const QueryTiles<S> queries(p, w.tile * S::Own, ends[S::Workers - 1]);
    for (int j = 0; j < queries.n; j++, i++) {
      const int head = w.head * (p.heads / p.kvHeads) + j / queries.count, i0 = (queries.first + j % queries.count) * S::Loop;
      barrier = m.stages.fill(i, 2 * S::LoopBytes + kStatsBytes<S>);
      copyTile<S::D, S::Loop>(m.first(i), q, barrier, i0, head, w.batch);
      copyTile<S::D, S::Loop>(m.second(i), g, barrier, i0, head, w.batch);
      const float *stats = statsOf(p, w.batch, head) + i0;
      copyBytes(m.stats(i), stats, kStatsBytes<S> / 2, barrier);
      copyBytes(m.stats(i) + kStatsBytes<S> / 2, stats + statsRows(p), kStatsBytes<S> / 2, barrier);
    }
  }
}

template <typename T, class S, class Docs>
__device__ inline void workKV(const Params &p, const Docs &docs, const Angles &angles,
                              const BackwardMemory<S, 2, kStatsBytes<S>> &m, int works, int tiles) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  for (int turn = 0, i = 0, work; (work = workOf(turn)) < works; turn++) {
    const Work w = schedule(work, p, p.kvHeads, tiles, false);
    const int j0 = w.tile * S::Own, row = j0 + 64 * group, own = row + 16 * warp;  // first rows: block, group, warp
    const auto ends = endsOf<1>(docs, p, w.batch, own);
    Accumulator<1, D> dk, dv;
    Accumulator<1, N> s, ds;  // transposed: a row is a key, a column a query
    Operand<N> e, f;
    dk.clear();
    dv.clear();
    bool busy = false;  // products with tile i - 1 may still be running
    auto finish = [&] {
      hold(dk);
      hold(dv);
      if (busy) {
        fenceAsync();
        m.stages.release(i - 1);
      }
      busy = false;
    };
    m.turns.wait(turn);
    int end = p.seq, groupEnd = p.seq;  // of the queries that see a key of the block's, of the group's
    if constexpr (Docs::packed) end = m.reach.get(turn, S::Workers - 1), groupEnd = m.reach.get(turn, group);
    const QueryTiles<S> queries(p, j0, end);
    for (int j = 0, t = queries.first; j < queries.n; j++, i++) {
      const int i0 = t * S::Loop;
      t = t + 1 < queries.first + queries.count ? t + 1 : queries.first;
      m.stages.wait(i);
      // No query sees a key of this group's.
      if (row >= p.seq || (p.causal && i0 + N <= row) || (Docs::packed && i0 >= groupEnd)) {
        productsWait<0>();
        finish();
        m.stages.release(i);
        continue;
      }
      hold(s);
      productsBegin();
      startNT<T, D, S::Own>(s, m.ownFirst(turn), 64 * group, m.first(i));
      productsCommit();
      productsWait<0>();
      hold(s);
      finish();
      hold(ds);
      productsBegin();  // only now: registers would not suffice for all products of two tiles at once
      startNT<T, D, S::Own>(ds, m.ownSecond(turn), 64 * group, m.second(i));
      productsCommit();
      // A query that does not exist is all zeros, g and statistics included, and adds nothing. A key that does not exist
      // only spoils its own row, which is not stored.
      const bool diagonal = p.causal && i0 < own + 15;
      const uint32_t stats = m.stats(i) + lane % 4 * 8;
#pragma unroll
      for (int x = 0; x < N / 8; x++) {
        float lse[2];
        loadPair(lse, stats + x * 32);
#pragma unroll
        for (int f = 0; f < 4; f++) s.c[0][x][f] = exp2Approx(fmaf(s.c[0][x][f], c, -lse[f % 2]));
      }
      if (diagonal) {
        const int before = own + lane / 4 - i0 - lane % 4 * 2;  // queries before the first key, from the lane's first on
#pragma unroll
        for (int x = 0; x < N / 8; x++)
#pragma unroll
          for (int f = 0; f < 4; f++)
            if (8 * x + f % 2 < before + f / 2 * 8) s.c[0][x][f] = 0;
      }
      dropBehind(s, i0, ends);
      e.set(s, T());
      productsBegin();
      startNN<T, D>(dv, e, m.second(i));
      productsCommit();
      productsWait<1>();
      hold(ds);
#pragma unroll
      for (int x = 0; x < N / 8; x++) {
        float delta[2];
        loadPair(delta, stats + kStatsBytes<S> / 2 + x * 32);
#pragma unroll
        for (int f = 0; f < 4; f++) ds.c[0][x][f] = s.c[0][x][f] * (ds.c[0][x][f] - delta[f % 2]);
      }
      f.set(ds, T());
      productsBegin();
      startNN<T, D>(dk, f, m.first(i));
      productsCommit();
      busy = true;
    }
    m.turns.release(turn);
    const TurnBack<D> turnBack(angles, own, p.seq);
    productsWait<0>();
    finish();
    const float scale[1][2] = {{p.scale, p.scale}}, one[1][2] = {{1, 1}};
    const int outRow = 64 * group + 16 * warp;
    __syncwarp();  // the previous results have been read
    dv.template roundTo<T>(m.out, outRow, one);
    __syncwarp();
    T *dvOut = at<T>(p.dv, p.dvStride, p.seq, w.batch, own, w.head * p.headDim);
    storeRows<T, D, 16>(m.out, outRow, dvOut, p.dvStride, p.seq - own, p.headDim);
    turnBack.turn(dk);
    __syncwarp();
    dk.template roundTo<T>(m.out, outRow, scale);
    __syncwarp();
    T *dkOut = at<T>(p.dk, p.dkStride, p.seq, w.batch, own, w.head * p.headDim);
    storeRows<T, D, 16>(m.out, outRow, dkOut, p.dkStride, p.seq - own, p.headDim);
  }
}

template <typename T, class S, class Docs>
__device__ inline void backwardQ(const Params &p, const Docs &docs, const Angles &angles, const TensorMap &q, const TensorMap &k,
                                 const TensorMap &v, const TensorMap &g, const TensorMap &y) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardMemory<S, 3, 0> m(sharedAddress(shared));
  const int tiles = (p.seq + S::Own - 1) / S::Own, works = p.batch * p.heads * tiles;
  m.init();
  if (threadIdx.x < 128) {
    giveRegisters<S::CopierRegisters>();
    if (threadIdx.x == 0) copyQ<S>(p, docs, q, k, v, g, y, m, works, tiles);
  } else {
    takeRegisters<S::WorkerRegisters>();
    workQ<T, S>(p, docs, angles, m, works, tiles);
  }
}

template <typename T, class S, class Docs>
__device__ inline void backwardKV(const Params &p, const Docs &docs, const Angles &angles, const TensorMap &q, const TensorMap &k,
                                  const TensorMap &v, const TensorMap &g, const TensorMap &) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardMemory<S, 2, kStatsBytes<S>> m(sharedAddress(shared));
  const int tiles = (p.seq + S::Own - 1) / S::Own, works = p.batch * p.kvHeads * tiles;
  m.init();
  if (threadIdx.x < 128) {
    giveRegisters<S::CopierRegisters>();
    if (threadIdx.x == 0) copyKV<S>(p, docs, q, k, v, g, m, works, tiles);
  } else {
    takeRegisters<S::WorkerRegisters>();
    workKV<T, S>(p, docs, angles, m, works, tiles);
  }
}

#endif  // HOPPER
}  // namespace attention

// Launch: as many blocks of Threads as there are multiprocessors; kv after q, which forms the statistics. Dynamic shared
// memory: (2·Turns + 1)·OwnBytes + Stages·(2·LoopBytes + 16) + 16·Turns and, for q, Turns·OwnBytes, for kv, 8·Loop·Stages;
// with documents 16·Turns more.
#define BACKWARD(kernel, body, S, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(attention::S::Threads, 1) attention_hopper_backward_##kernel##_##T(         \
      const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g, const __grid_constant__ TensorMap y,       \
      const float *cosines, const float *sines) {                                                                          \
    BODY(body<T, attention::S>(p, attention::Documents<false>(), {cosines, sines}, q, k, v, g, y));                        \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(attention::S::Threads, 1)                                                   \
      attention_hopper_backward_##kernel##_documents_##T(                                                                  \
          const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q,                                \
          const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g,   \
          const __grid_constant__ TensorMap y, const float *cosines, const float *sines, const int *table) {               \
    BODY(body<T, attention::S>(p, attention::Documents<true>{table}, {cosines, sines}, q, k, v, g, y));                    \
  }
#define KERNELS(T)                                \
  BACKWARD(q_64, backwardQ, BackwardQ64, T)       \
  BACKWARD(kv_64, backwardKV, BackwardKV64, T)
KERNELS(bf16)
KERNELS(f16)
