// The backward pass of attention for bf16 and f16 on Hopper, for head dimensions above 64.
// attention_mma.cu has the formulas; attention_hopper.cu describes the structure and the
// requirements.
//
// A single kernel computes every score once, which takes five products instead of the seven that
// separate kernels for dq and for dk and dv would need. A block owns 128 keys and loops over the
// queries that see them, 64 at a time. Each of two warpgroups has 64 of the keys, with dk and dv in
// registers.
//
// The block's contribution to a tile of dq goes through shared memory and is added in float32 to
// the contributions of earlier blocks. Blocks add to a tile in the order of their keys, so the
// result does not depend on timing. Work is handed out in the same order and every block starts
// with the last queries, so the blocks of a head follow each other at a distance and seldom wait. A
// final kernel, which overlaps with this one, rounds dq and undoes RoPE.
//
// Products start in this order: dp(i) = v·gᵀ, dv += p(i)·g, and the next scores s(i+1) = k·qᵀ,
// which run while ds(i) is computed; then dk += ds(i)·q and dq(i) = ds(i)ᵀ·k, which run during the
// exponentials of s(i+1).
#include "attention_hopper_fused.cuh"
#include "overlap.cuh"

namespace attention {

using Fused96 = Shape<96, 2, 64, 1, 4>;
using Fused128 = Shape<128, 2, 64, 1, 3>;

#ifdef HOPPER

// Shared memory: k and v, Stages tiles of q, g and statistics, two tiles of ds, one of dq, the
// barriers, and the current work item. With documents there is also the number of query tiles up to
// the last one that sees a key of the block, and for each key the first later query that does not
// see it.
template <class S> struct FusedMemory {
  static constexpr int DsBytes = S::Own * S::Loop * 2, DqBytes = S::Loop * S::D * 4, StatsBytes = 2 * S::Loop * 4;
  uint32_t k, v, tiles, ds, dq, stats;
  Ring<1> turns;
  Ring<S::Stages> stages;
  uint32_t dqFilled, dqFreed, work;
  __device__ FusedMemory(uint32_t base)
      : k(base), v(k + S::OwnBytes), tiles(v + S::OwnBytes), ds(tiles + S::Stages * 2 * S::LoopBytes), dq(ds + 2 * DsBytes),
        stats(dq + DqBytes), turns{stats + S::Stages * StatsBytes}, stages{turns.barriers + turns.bytes},
        dqFilled(stages.barriers + stages.bytes), dqFreed(dqFilled + 8 * senders), work(dqFreed + 8) {}
  __device__ uint32_t qTile(int i) const { return tiles + stages.slot(i) * 2 * S::LoopBytes; }
  __device__ uint32_t gTile(int i) const { return qTile(i) + S::LoopBytes; }
  __device__ uint32_t statsOf(int i) const { return stats + stages.slot(i) * StatsBytes; }
  __device__ uint32_t dsTile(int i) const { return ds + i % 2 * DsBytes; }
  // Three threads take turns sending dq, so that one thread's wait for memory does not delay the
  // next two tiles.
  static constexpr int senders = 3;
  __device__ uint32_t filled(int i) const { return dqFilled + i % senders * 8; }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      barrierInit(turns.filled(0), 1);
      barrierInit(turns.freed(0), S::WorkerThreads + senders);
      stages.init(S::WorkerThreads);
      for (int i = 0; i < senders; i++) barrierInit(filled(i), S::WorkerThreads);
      barrierInit(dqFreed, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  __device__ int workOf(int turn) const {
    turns.wait(turn);
    return loadWord(work);
  }
  template <class Docs> __device__ int tilesOfWork(int all) const { return Docs::packed ? loadWord(work + 4) : all; }
  __device__ uint32_t endOf(int key) const { return work + 8 + key * 4; }
};

template <class S, class Docs>
__device__ inline void copyFused(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                                 const TensorMap &g, const FusedMemory<S> &m, int works, int tiles) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    const int work = atomicAdd(sums.handedOut, 1);
    int queryTiles = sums.tiles;
    if constexpr (Docs::packed) {
      const Work next = schedule(min(work, works - 1), p, p.kvHeads, tiles, false);
      queryTiles = (docs.end(p, next.batch, next.tile * S::Own + S::Own - 1) + S::Loop - 1) / S::Loop;
    }
    barrierWait(m.turns.freed(0), turn + 1 & 1);
    storeWord(m.work, work);
    if constexpr (Docs::packed) storeWord(m.work + 4, queryTiles);
    if (work >= works) {
      barrierArrive(m.turns.filled(0));
      return;
    }
    barrierExpect(m.turns.filled(0), 2 * S::OwnBytes);
    const Work w = schedule(work, p, p.kvHeads, tiles, false);
    copyTile<S::D, S::Own>(m.k, k, m.turns.filled(0), w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.v, v, m.turns.filled(0), w.tile * S::Own, w.head, w.batch);
    const QueryWalk walk(p, queryTiles, w.tile * S::Own);
#pragma unroll 1
    for (int h = 0; h < walk.group; h++)
#pragma unroll 1
      for (int t = 0; t < walk.count; t++, i++) {
        const int head = w.head * walk.group + h, i0 = (walk.last - t) * S::Loop;
        const uint32_t barrier = m.stages.fill(i, 2 * S::LoopBytes + m.StatsBytes);
        copyTile<S::D, S::Loop>(m.qTile(i), q, barrier, i0, head, w.batch);
        copyTile<S::D, S::Loop>(m.gTile(i), g, barrier, i0, head, w.batch);
        const float *stats = statsOf(p, w.batch, head) + i0;
        copyBytes(m.statsOf(i), stats, m.StatsBytes / 2, barrier);
        copyBytes(m.statsOf(i) + m.StatsBytes / 2, stats + statsRows(p), m.StatsBytes / 2, barrier);
      }
  }
}

// sendFused runs in each of the three threads that add dq to the sums. The first block of a tile
// stores its contribution; later blocks wait for their turn and add theirs. See Sums::before for
// the order.
template <class S, class Docs>
__device__ inline void sendFused(const Params &p, const Docs &docs, const FusedMemory<S> &m, int works, int tiles, int sender) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    const int work = m.workOf(turn), queryTiles = m.template tilesOfWork<Docs>(sums.tiles);
    barrierArrive(m.turns.freed(0));
    if (work >= works) return;
    const Work w = schedule(work, p, p.kvHeads, tiles, false);
    const QueryWalk walk(p, queryTiles, w.tile * S::Own);
#pragma unroll 1
    for (int h = 0; h < walk.group; h++)
#pragma unroll 1
      for (int t = 0; t < walk.count; t++, i++) {
        if (i % m.senders != sender) continue;
        const int64_t at = sums.index(p, w.batch, w.head * walk.group + h, walk.last - t);
        float *to = sums.sums + at * sums.size;
        const int before = sums.before(p, docs, w, walk.last - t);
        sums.wait(at, before);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // the turn was observed by an ordinary load, but a bulk copy follows
        barrierWait(m.filled(i), i / m.senders & 1);
        if (before == 0)
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(m.dq), "r"(m.DqBytes)
                       : "memory");
        else
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(m.dq),
                       "r"(m.DqBytes)
                       : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        barrierArrive(m.dqFreed);
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // after this, ordinary stores need no fence
        storeRelease(sums.added + at, sums.finishes(p, w, walk.last - t) ? sums.complete : before + 1);
      }
  }
}

template <typename T, class S, class Docs>
__device__ inline void workFused(const Params &p, const Docs &docs, const Angles &angles, const FusedMemory<S> &m, int works,
                                 int tiles) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  const uint32_t dsAt = chunkAt<64>(0, 64 * group + 16 * warp + lane % 16, lane / 16);
  const int queryTiles = (p.seq + N - 1) / N;
  auto meet = [] { asm volatile("bar.sync 1, 256;" ::: "memory"); };
  // dk needs the ds of the warpgroup's own keys, dq the ds of both warpgroups. Barriers alternate
  // between tiles, because one warpgroup may be ahead.
  auto meetGroup = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
  auto tellOther = [&](int i) { asm volatile("bar.arrive %0, 256;" ::"r"(4 + i % 2 * 2 + 1 - group) : "memory"); };
  auto hearOther = [&](int i) { asm volatile("bar.sync %0, 256;" ::"r"(4 + i % 2 * 2 + group) : "memory"); };
  for (int turn = 0, i = 0, work; (work = uniform(m.workOf(turn))) < works; turn++) {
    const Work w = schedule(work, p, p.kvHeads, tiles, false);
    const int j0 = w.tile * S::Own, own = j0 + 64 * group + 16 * warp;  // first rows of the block and the warp
    const QueryWalk walk(p, Docs::packed ? uniform(m.template tilesOfWork<Docs>(0)) : queryTiles, j0);
    if constexpr (Docs::packed) {  // too many for registers; a warp reads only its own entries
      if (lane < 16) storeWord(m.endOf(own - j0 + lane), docs.end(p, w.batch, own + lane));
      __syncwarp();
    }
    const int first = i, n = i + walk.steps();
    int t = walk.last;
    Accumulator<1, D> dk, dv;
    // Two accumulators alternate between tiles. One holds the scores, dp and dq of tile i in turn,
    // while the other goes from dq of the preceding tile to the scores of the next one. Scores and
    // dp are transposed: rows are keys, columns are queries. Each warpgroup computes 64 columns of
    // dq.
    //
    // With 96 columns, half of the second warpgroup's columns come from the memory after k and are
    // meaningless. A narrower product for that warpgroup would need a branch, and the assembler
    // does not let products run across one.
    Accumulator<1, N> even, odd;
    Operand<N> e;
    dk.clear();
    dv.clear();
    auto sendDq = [&](int i, const Accumulator<1, N> &dq) {
      barrierWait(m.dqFreed, i + 1 & 1);
      const uint32_t to = m.dq + (group * (N * 64) + threadIdx.x % 128 * 4) * 4;
#pragma unroll
      for (int x = 0; x < N / 8; x++) {
        if (D < 128 && 64 * group + 8 * x >= D) break;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + x * 2048), "f"(dq.c[0][x][0]), "f"(dq.c[0][x][1]),
                     "f"(dq.c[0][x][2]), "f"(dq.c[0][x][3])
                     : "memory");
      }
    };
    auto tellSender = [&](int i) {  // called while products run, since the fence waits for the stores
      fenceAsync();
      barrierArrive(m.filled(i));
    };

    // Returns zero in a way that the compiler can't see through. It then computes addresses where
    // they are needed instead of keeping them all in registers.
    auto zero = [](int i) { return i >> 30; };
    auto startScores = [&](int i, Accumulator<1, N> &s) {
      m.stages.wait(i);
      productsBegin();
      startNT<T, D, S::Own>(s, m.k + zero(i), 64 * group, m.qTile(i));
      productsCommit();
    };
    // Statistics are read while waiting for products, because shared memory has a long latency
    // while products read their operands.
    float h[N / 8][2];  // for the next tile's queries
    auto loadExponents = [&](int i) {
#pragma unroll
      for (int x = 0; x < N / 8; x++) loadPair(h[x], m.statsOf(i) + lane % 4 * 8 + x * 32);
    };
    // Computes the probabilities of tile i, with queries from i0 on, from its finished scores.
    auto formProbabilities = [&](int i, int i0, Accumulator<1, N> &s) {
      hold(s);
      // For a query that does not exist, q, g and the statistics are zeros, so it contributes
      // nothing.
#pragma unroll
      for (int x = 0; x < N / 8; x++)
#pragma unroll
        for (int f = 0; f < 4; f++) s.c[0][x][f] = exp2Approx(fmaf(s.c[0][x][f], c, -h[x][f % 2]));
      correct(s, h, [&] {
        return statsOf(p, w.batch, w.head * walk.group + (i - first) / walk.count) + 2 * statsRows(p) + i0;
      });
      if ((p.causal && i0 < own + 15) || own + 15 >= p.seq) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int key = own + 8 * half + lane / 4;
          const int hidden = (key >= p.seq ? p.seq + N : p.causal ? key : 0) - i0 - lane % 4 * 2;  // counted from the lane's first query
#pragma unroll
          for (int x = 0; x < N / 8; x++)
#pragma unroll
            for (int f = 0; f < 2; f++)
              if (8 * x + f < hidden) s.c[0][x][2 * half + f] = 0;
        }
      }
      if constexpr (Docs::packed)
        if (i0 + N > (int)loadWord(m.endOf(own - j0)))
          dropBehind(s, i0, Bounds<1>([&](int row) { return (int)loadWord(m.endOf(own - j0 + row)); }));
      e.set(s, T());
    };
    // dp starts at −Σ_d g·y.
    auto beginDp = [&](int i, Accumulator<1, N> &dp) {
      const uint32_t stats = m.statsOf(i) + m.StatsBytes / 2 + lane % 4 * 8;
#pragma unroll
      for (int x = 0; x < N / 8; x++) {
        float delta[2];
        loadPair(delta, stats + x * 32);
#pragma unroll
        for (int f = 0; f < 4; f++) dp.c[0][x][f] = -delta[f % 2];
      }
      hold(dp);
    };
    // Computes everything that follows the probabilities of tile i and, if there is a next tile,
    // its probabilities.
    auto step = [&](auto more, Accumulator<1, N> &now, Accumulator<1, N> &other) {
      Accumulator<1, N> &dp = now, &dq = now;
      productsBegin();
      startNT<T, D, S::Own, N, true>(dp, m.v + zero(i), 64 * group, m.gTile(i));
      productsCommit();
      startNN<T, D>(dv, e, m.gTile(i));
      productsCommit();
      if (i > first) {
        m.stages.release(i - 1);
        sendDq(i - 1, other);
      }
      if constexpr (more.value) {
        startScores(i + 1, other);
        if (i > first) tellSender(i - 1);
        productsWait<2>();
      } else {
        if (i > first) tellSender(i - 1);
        productsWait<1>();
      }
      hold(dp);
#pragma unroll
      for (int k = 0; k < N / 16; k++) {
        uint32_t ds[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 probability = unpack(e.r[k][j], T());
          const float *d = &dp.c[0][2 * k + j / 2][j % 2 * 2];
          ds[j] = pack(probability.x * d[0], probability.y * d[1], T());
        }
        storeColumns(ds, m.dsTile(i) + dsAt, k);
      }
      fenceAsync();
      tellOther(i);
      meetGroup();
      hold(dk);
      productsBegin();
      startNN<T, D>(dk, m.dsTile(i), 64 * group, m.qTile(i));
      productsCommit();
      hearOther(i);
      startTN<T, D, S::Own>(dq, m.dsTile(i), m.k + zero(i) + group * S::Own * 128);
      productsCommit();
      if constexpr (more.value) {
        loadExponents(i + 1);
        productsWait<2>();
        t = t > walk.last - walk.count + 1 ? t - 1 : walk.last;
        formProbabilities(i + 1, t * N, other);
        beginDp(i + 1, other);
        m.stages.wait(i + 1);  // long since complete, but keeps the compiler from moving a wait for products before the exponentials
      }
      productsWait<0>();
      hold(dk);
      hold(dv);
      hold(dq);
    };
    startScores(i, even);
    loadExponents(i);
    productsWait<0>();
    formProbabilities(i, t * N, even);
    if (walk.steps() % 2) {
      beginDp(i, even);
    } else {
      beginDp(i, odd);
      step(Constant<true>(), odd, even);
      i++;
    }
    while (i + 1 < n) {
      step(Constant<true>(), even, odd);
      i++;
      step(Constant<true>(), odd, even);
      i++;
    }
    step(Constant<false>(), even, odd);
    i++;
    m.turns.release(turn);
    m.stages.release(i - 1);
    sendDq(i - 1, even);
    tellSender(i - 1);
    // Results go through the memory of ds, once neither warpgroup needs it anymore.
    meet();
    const float scale[1][2] = {{p.scale, p.scale}}, one[1][2] = {{1, 1}};
    const int outRow = 64 * group + 16 * warp;
    dv.template roundTo<T>(m.ds, outRow, one);
    __syncwarp();
    T *dvOut = at<T>(p.dv, p.dvStride, p.seq, w.batch, own, w.head * p.headDim);
    storeResult<T, D, 16>(m.ds, outRow, dvOut, p.dvStride, p.seq - own, p.headDim);
    turnBack(dk, angles, own, p.seq);
    __syncwarp();
    dk.template roundTo<T>(m.ds, outRow, scale);
    __syncwarp();
    T *dkOut = at<T>(p.dk, p.dkStride, p.seq, w.batch, own, w.head * p.headDim);
    storeResult<T, D, 16>(m.ds, outRow, dkOut, p.dkStride, p.seq - own, p.headDim);
    meet();
  }
}

template <typename T, class S, class Docs>
__device__ inline void backwardFused(const Params &p, const Docs &docs, const Angles &angles, const TensorMap &q, const TensorMap &k,
                                     const TensorMap &v, const TensorMap &g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  releaseNext();
  const FusedMemory<S> m(sharedAddress(shared));
  const int tiles = (p.seq + S::Own - 1) / S::Own, works = p.batch * p.kvHeads * tiles;
  m.init();
  if (threadIdx.x < 128) {
    giveRegisters<S::CopierRegisters>();
    if (threadIdx.x == 0) copyFused<S>(p, docs, q, k, v, g, m, works, tiles);
    if (threadIdx.x > 0 && threadIdx.x % 32 == 0) sendFused<S>(p, docs, m, works, tiles, threadIdx.x / 32 - 1);
  } else {
    takeRegisters<S::WorkerRegisters>();
    workFused<T, S>(p, docs, angles, m, works, tiles);
  }
}

// roundSums computes dq of a tile for two heads, which share their angles: the sums, times the
// scale, rotated back. A block waits for the sums of its own tile rather than for the end of the
// preceding kernel, and so uses multiprocessors that have run out of work there.
template <typename T, class S> __device__ inline void roundSums(const Params &p, const Angles &angles) {
  constexpr int D = S::D;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Sums<S> sums(p);
  const int pairs = (p.heads + 1) / 2, second = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  const int tile = blockIdx.x % sums.tiles, head = blockIdx.x / sums.tiles % pairs * 2 + second;
  const int batch = blockIdx.x / sums.tiles / pairs, own = tile * S::Loop + 16 * warp;
  if (blockIdx.x == gridDim.x - 1) awaitPrevious();  // the next kernel may then rely on both kernels having finished
  if (head == p.heads) return;
  const uint32_t out = sharedAddress(shared) + second * S::LoopBytes;
  const int64_t index = sums.index(p, batch, head, tile);
  sums.wait(index, sums.complete);
  const float4 *from = (const float4 *)(sums.sums + index * sums.size) + threadIdx.x % 128;
  Accumulator<1, D> dq;
#pragma unroll
  for (int x = 0; x < D / 8; x++) *(float4 *)dq.c[0][x] = from[x * 128];
  turnBack(dq, angles, own, p.seq);
  const float scale[1][2] = {{p.scale, p.scale}};
  dq.template roundTo<T>(out, 16 * warp, scale);
  __syncwarp();
  T *to = at<T>(p.dq, p.dqStride, p.seq, batch, own, head * p.headDim);
  storeResult<T, D, 16>(out, 16 * warp, to, p.dqStride, p.seq - own, p.headDim);
}

#endif  // HOPPER
}  // namespace attention

// Launch: as many blocks of Threads as there are multiprocessors, after the statistics and before
// the rounding of dq. Dynamic shared memory: 2·OwnBytes + Stages·(2·LoopBytes + 8·Loop + 16) +
// 2·Own·Loop·2 + Loop·D·4 + 56, plus 4·Own with documents.
//
// The rounding kernel is launched with a block of 256 threads for every tile of 64 queries of every
// two heads, and shared memory for their results. It may overlap with the preceding kernel.
#define FUSED(D, T)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(attention::Fused##D::Threads, 1) attention_hopper_backward_fused_##D##_##T(  \
      const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g, const float *cosines, const float *sines) { \
    BODY(backwardFused<T, attention::Fused##D>(p, attention::Documents<false>(), {cosines, sines}, q, k, v, g));            \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(attention::Fused##D::Threads, 1)                                             \
      attention_hopper_backward_fused_##D##_documents_##T(                                                                  \
          const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q,                                 \
          const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g,    \
          const float *cosines, const float *sines, const int *table) {                                                     \
    BODY(backwardFused<T, attention::Fused##D>(p, attention::Documents<true>{table}, {cosines, sines}, q, k, v, g));        \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) attention_hopper_backward_round_##D##_##T(                              \
      const __grid_constant__ attention::Params p, const float *cosines, const float *sines) {                             \
    BODY(roundSums<T, attention::Fused##D>(p, {cosines, sines}));                                                          \
  }
#define KERNELS(T) FUSED(96, T) FUSED(128, T)
KERNELS(bf16)
KERNELS(f16)
