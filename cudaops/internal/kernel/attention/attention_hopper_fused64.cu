// The backward pass of attention for bf16 and f16 on Hopper, for head dimensions up to 64, in one
// kernel. attention_hopper_fused.cu describes the structure, and how blocks add up a tile of dq.
//
// Two warpgroups each have 64 of the block's 128 keys, with dk and dv in registers. They exchange
// no data; they only write ds to shared memory. A third warpgroup computes dq from the ds of both
// and hands it to the threads that add it to the sums. If no other block adds to the tile after
// this one, the warpgroup continues from the sums itself, undoes RoPE, and rounds dq.
//
// Products of the first two warpgroups start in this order: dv += p(i)·g and the next scores s(i+1)
// = k·qᵀ, which run while ds(i) is computed; then dk += ds(i)·q and dp(i+1) = v·gᵀ, which run
// during the exponentials of s(i+1).
#include "attention_hopper_fused.cuh"

namespace attention {

using Fused64 = Shape<64, 2, 64, 2, 4>;
constexpr int kFusedThreads = 512;

#ifdef HOPPER

constexpr int kWorkerRegisters = 208, kQueryRegisters = 72;  // for the third warpgroup; the copier gets the rest

// Shared memory: k and v for Turns turns, Stages tiles of q and g with their statistics, three
// tiles of ds, two of dq, outgoing results, the barriers, and the work item of each turn with the
// number of query tiles up to the last one that sees a key of the block.
template <class S> struct FusedMemory {
  static constexpr int DsBytes = S::Own * S::Loop * 2, DqBytes = S::Loop * S::D * 4, StatsBytes = 2 * S::Loop * 4;
  // Three threads take turns sending dq, so that one thread's wait for memory does not delay the
  // next two tiles.
  static constexpr int senders = 3, queryThreads = 128;
  uint32_t own, tiles, ds, dq, out, stats;
  Ring<S::Turns> turns;
  Ring<S::Stages> stages;
  Ring<3> dsRing;
  Ring<2> dqRing;  // used only for freed slots; filled slots have one barrier per sender
  uint32_t dqFilled, work;
  __device__ FusedMemory(uint32_t base)
      : own(base), tiles(own + S::Turns * 2 * S::OwnBytes), ds(tiles + S::Stages * 2 * S::LoopBytes), dq(ds + 3 * DsBytes),
        out(dq + 2 * DqBytes), stats(out + S::OwnBytes), turns{stats + S::Stages * StatsBytes}, stages{turns.barriers + turns.bytes},
        dsRing{stages.barriers + stages.bytes}, dqRing{dsRing.barriers + dsRing.bytes}, dqFilled(dqRing.barriers + dqRing.bytes),
        work(dqFilled + 8 * senders + 8) {}
  __device__ uint32_t k(int turn) const { return own + turns.slot(turn) * 2 * S::OwnBytes; }
  __device__ uint32_t v(int turn) const { return k(turn) + S::OwnBytes; }
  __device__ uint32_t qTile(int i) const { return tiles + stages.slot(i) * 2 * S::LoopBytes; }
  __device__ uint32_t gTile(int i) const { return qTile(i) + S::LoopBytes; }
  __device__ uint32_t statsOf(int i) const { return stats + stages.slot(i) * StatsBytes; }
  __device__ uint32_t dsTile(int i) const { return ds + i % 3 * DsBytes; }
  __device__ uint32_t dqTile(int i) const { return dq + i % 2 * DqBytes; }
  __device__ uint32_t filled(int i) const { return dqFilled + i % senders * 8; }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      turns.init(S::WorkerThreads + queryThreads + senders);
      stages.init(S::WorkerThreads);
      for (int i = 0; i < 3; i++) {
        barrierInit(dsRing.filled(i), S::WorkerThreads);
        barrierInit(dsRing.freed(i), queryThreads);
      }
      for (int i = 0; i < 2; i++) barrierInit(dqRing.freed(i), 1);
      for (int i = 0; i < senders; i++) barrierInit(filled(i), queryThreads);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  // The work item is stored per turn, like its keys and values. A batch of -1 marks the end of the
  // work.
  __device__ uint32_t workAt(int turn) const { return work + turns.slot(turn) * 16; }
  __device__ Work workOf(int turn) const {
    return {(int)loadWord(workAt(turn)), (int)loadWord(workAt(turn) + 4), (int)loadWord(workAt(turn) + 8)};
  }
  __device__ int tilesOf(int turn) const { return loadWord(workAt(turn) + 12); }
  __device__ void setWork(int turn, const Work &w, int queryTiles) const {
    storeWord(workAt(turn), w.batch);
    storeWord(workAt(turn) + 4, w.head);
    storeWord(workAt(turn) + 8, w.tile);
    storeWord(workAt(turn) + 12, queryTiles);
  }
};

template <class S, class Docs>
__device__ inline void copyFused(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                                 const TensorMap &g, const FusedMemory<S> &m, int works, int tiles) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    const int work = atomicAdd(sums.handedOut, 1);
    const Work w = schedule(min(work, works - 1), p, p.kvHeads, tiles, false);
    const int queryTiles = (docs.end(p, w.batch, w.tile * S::Own + S::Own - 1) + S::Loop - 1) / S::Loop;
    m.turns.waitFree(turn);
    m.setWork(turn, work < works ? w : Work{-1}, queryTiles);
    if (work >= works) {
      barrierArrive(m.turns.filled(turn));
      return;
    }
    const uint32_t barrier = m.turns.announce(turn, 2 * S::OwnBytes);
    copyTile<S::D, S::Own>(m.k(turn), k, barrier, w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.v(turn), v, barrier, w.tile * S::Own, w.head, w.batch);
    QueryWalk(p, queryTiles, w.tile * S::Own).walk(w.head, [&](int head, int tile) {
      const uint32_t barrier = m.stages.fill(i, 2 * S::LoopBytes + m.StatsBytes);
      copyTile<S::D, S::Loop>(m.qTile(i), q, barrier, tile * S::Loop, head, w.batch);
      copyTile<S::D, S::Loop>(m.gTile(i), g, barrier, tile * S::Loop, head, w.batch);
      const float *stats = statsOf(p, w.batch, head) + tile * S::Loop;
      copyBytes(m.statsOf(i), stats, m.StatsBytes / 2, barrier);
      copyBytes(m.statsOf(i) + m.StatsBytes / 2, stats + statsRows(p), m.StatsBytes / 2, barrier);
      i++;
    });
  }
}

// sendFused runs in each of the three threads that add dq to the sums. The first block of a tile
// stores its contribution, later blocks wait for their turn and add theirs, and the last block
// finishes the tile.
template <class S, class Docs>
__device__ inline void sendFused(const Params &p, const Docs &docs, const FusedMemory<S> &m, int sender) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    m.turns.wait(turn);
    const Work w = m.workOf(turn);
    const int queryTiles = m.tilesOf(turn);
    m.turns.release(turn);
    if (w.batch < 0) return;
    QueryWalk(p, queryTiles, w.tile * S::Own).walk(w.head, [&](int head, int tile) {
      const int n = i++;
      if (n % m.senders != sender) return;
      const int64_t at = sums.index(p, w.batch, head, tile);
      float *to = sums.sums + at * sums.size;
      const bool adds = !sums.finishes(p, w, tile);
      const int before = sums.before(p, docs, w, tile);
      if (adds) {
        sums.wait(at, before);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // the turn was observed by an ordinary load, but a bulk copy follows
      }
      barrierWait(m.filled(n), n / m.senders & 1);
      if (adds && before == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(m.dqTile(n)), "r"(m.DqBytes)
                     : "memory");
      else if (adds)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(m.dqTile(n)),
                     "r"(m.DqBytes)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      m.dqRing.release(n);
      if (!adds) return;
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // after this, ordinary stores need no fence
      storeRelease(sums.added + at, before + 1);
    });
  }
}

// setKeys and addKeys compute c (64×64) = A·Bᵀ and c += A·Bᵀ for 16 columns of A, in registers, and
// of B.
#define DEFINE_KEYS(function, m, add, T, name)                                                        \
  __device__ inline void function(float (&c)[8][4], const uint32_t (&x)[4], uint64_t y, T) {          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " REGISTERS_32         \
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                    \
                 : OUTPUTS_32(m)                                                                      \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(add), "n"(0));             \
  }
DEFINE_KEYS(setKeys, "=f", 0, bf16, "bf16")
DEFINE_KEYS(addKeys, "+f", 1, bf16, "bf16")
DEFINE_KEYS(setKeys, "=f", 0, f16, "f16")
DEFINE_KEYS(addKeys, "+f", 1, f16, "f16")

// startKeys starts c = A·Bᵀ, for A in registers and a tile B of 64 rows and columns.
template <typename T> __device__ inline void startKeys(Accumulator<1, 64> &c, const Operand<64> &a, uint32_t bTile) {
  const Descriptor b(bTile, 16);
  setKeys(c.c[0], a.r[0], b.plus(0), T());
#pragma unroll
  for (int k = 1; k < 4; k++) addKeys(c.c[0], a.r[k], b.plus(k * 32), T());
}

// workQueries runs in the warpgroup that computes dq.
template <typename T, class S, class Docs>
__device__ inline void workQueries(const Params &p, const Docs &docs, const Angles &angles, const FusedMemory<S> &m) {
  constexpr int D = S::D;
  const Sums<S> sums(p);
  const int warp = uniform(threadIdx.x / 32 % 4);
  Accumulator<1, D> dq;
  for (int turn = 0, i = 0;; turn++) {
    m.turns.wait(turn);
    const Work w = m.workOf(turn);
    if (uniform(w.batch) < 0) return;
    QueryWalk(p, uniform(m.tilesOf(turn)), w.tile * S::Own).walk(w.head, [&](int head, int tile) {
      const bool finishes = sums.finishes(p, w, tile);
      const int before = finishes ? sums.before(p, docs, w, tile) : 0;
      if (before > 0) {  // continue from the sums of the other blocks
        const int64_t index = sums.index(p, w.batch, head, tile);
        sums.wait(index, before);
        const float4 *from = (const float4 *)(sums.sums + index * sums.size) + threadIdx.x % 128;
#pragma unroll
        for (int x = 0; x < D / 8; x++) *(float4 *)dq.c[0][x] = from[x * 128];
      } else {
        dq.clear();
      }
      m.dsRing.wait(i);
      hold(dq);
      productsBegin();
      const Descriptor a(m.dsTile(i), 16), b(m.k(turn), 16);
#pragma unroll
      for (int k = 0; k < S::Own / 16; k++) addSS<1, 1>(dq.c[0], a.plus(k * 2048), b.plus(k * 2048), T());
      productsCommit();
      productsWait<0>();
      hold(dq);
      m.dsRing.release(i);
      m.dqRing.waitFree(i);
      const uint32_t to = m.dqTile(i);
      if (!finishes) {
        const uint32_t at = to + threadIdx.x % 128 * 16;
#pragma unroll
        for (int x = 0; x < D / 8; x++)
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + x * 2048), "f"(dq.c[0][x][0]), "f"(dq.c[0][x][1]),
                       "f"(dq.c[0][x][2]), "f"(dq.c[0][x][3])
                       : "memory");
        fenceAsync();
      } else {
        const int row = tile * S::Loop + 16 * warp;
        turnBack(dq, angles, row, p.seq);
        const float factors[1][2] = {{p.scale, p.scale}};
        dq.template roundTo<T>(to, 16 * warp, factors);
        __syncwarp();
        T *result = at<T>(p.dq, p.dqStride, p.seq, w.batch, row, head * p.headDim);
        storeRows<T, D, 16>(to, 16 * warp, result, p.dqStride, p.seq - row, p.headDim);
      }
      barrierArrive(m.filled(i));
      i++;
    });
    m.turns.release(turn);
  }
}

template <typename T, class S, class Docs>
__device__ inline void workKeys(const Params &p, const Docs &docs, const Angles &angles, const FusedMemory<S> &m) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  const int outRow = 64 * group + 16 * warp;
  const uint32_t dsAt = chunkAt<64>(0, outRow + lane % 16, lane / 16);
  for (int turn = 0, i = 0;; turn++) {
    m.turns.wait(turn);
    const Work w = m.workOf(turn);
    if (uniform(w.batch) < 0) return;
    const int own = uniform(w.tile) * S::Own + outRow;
    const QueryWalk walk(p, uniform(m.tilesOf(turn)), uniform(w.tile) * S::Own);
    const auto ends = endsOf<1>(docs, p, w.batch, own);
    const int n = i + walk.steps();
    int t = walk.last;
    Accumulator<1, D> dk, dv;
    Accumulator<1, N> s, dp;  // transposed: rows are keys, columns are queries
    Operand<N> e, ds;
    Operand<D> keys;  // k in registers, so that products don't read it from shared memory for every tile
#pragma unroll
    for (int x = 0; x < D / 16; x++) loadMatrices(keys.r[x], chunkAt<D>(m.k(turn), outRow + lane % 16, 2 * x + lane / 16));
    dk.clear();
    dv.clear();
    auto startScores = [&](int i) {
      m.stages.wait(i);
      productsBegin();
      startKeys<T>(s, keys, m.qTile(i));
      productsCommit();
    };
    float h[N / 8][2];  // for the next tile's queries; loaded while waiting for its scores
    auto loadExponents = [&](int i) {
#pragma unroll
      for (int x = 0; x < N / 8; x++) loadPair(h[x], m.statsOf(i) + lane % 4 * 8 + x * 32);
    };
    // Computes the probabilities of tile i, with queries from i0 on, from its finished scores.
    auto formProbabilities = [&](int i, int i0) {
      hold(s);
      // For a query that does not exist, q, g and the statistics are zeros, so it contributes
      // nothing.
#pragma unroll
      for (int x = 0; x < N / 8; x++)
#pragma unroll
        for (int f = 0; f < 4; f++) s.c[0][x][f] = exp2Approx(fmaf(s.c[0][x][f], c, -h[x][f % 2]));
      correct(s, h, [&] {
        const int step = i - n + walk.steps();
        return statsOf(p, w.batch, w.head * walk.group + step / walk.count) + 2 * statsRows(p) + i0;
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
      dropBehind(s, i0, ends);
      e.set(s, T());
    };
    // dp starts at −Σ_d g·y, which is loaded as soon as its registers are free, because shared
    // memory has a long latency while products read their operands.
    auto beginDp = [&](int i, int x) {
      float delta[2];
      loadPair(delta, m.statsOf(i) + m.StatsBytes / 2 + lane % 4 * 8 + x * 32);
#pragma unroll
      for (int f = 0; f < 4; f++) dp.c[0][x][f] = -delta[f % 2];
    };
    auto startDp = [&](int i) {
      hold(dp);
      productsBegin();
      // i >> 30 is zero, but the compiler can't know this. It then computes addresses where they
      // are needed instead of keeping them all in registers.
      startNT<T, D, S::Own, N, true>(dp, m.v(turn) + (i >> 30), 64 * group, m.gTile(i));
      productsCommit();
    };
    // Turns the scores of tile i, with queries from i0 on, into probabilities, and waits for its
    // dp.
    auto takeScores = [&](int i, int i0) {
      formProbabilities(i, i0);
      m.stages.wait(i);  // long since complete, but keeps the compiler from moving a wait for products before the exponentials
      productsWait<0>();
      hold(dp);
      hold(dk);
      hold(dv);
    };
    auto step = [&](auto more) {
      productsBegin();
      startNN<T, D>(dv, e, m.gTile(i));
      productsCommit();
      if constexpr (more.value) startScores(i + 1);
      m.dsRing.waitFree(i);
#pragma unroll
      for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 probability = unpack(e.r[k][j], T());
          const float *d = &dp.c[0][2 * k + j / 2][j % 2 * 2];
          ds.r[k][j] = pack(probability.x * d[0], probability.y * d[1], T());
        }
        storeColumns(ds.r[k], m.dsTile(i) + dsAt, k);
        if constexpr (more.value) beginDp(i + 1, 2 * k), beginDp(i + 1, 2 * k + 1);
      }
      hold(dk);
      productsBegin();
      startNN<T, D>(dk, ds, m.qTile(i));
      productsCommit();
      if constexpr (more.value) startDp(i + 1);
      fenceAsync();  // placed while products run, since it waits for the stores
      barrierArrive(m.dsRing.filled(i));
      if constexpr (more.value) {
        loadExponents(i + 1);
        productsWait<2>();
        t = t > walk.last - walk.count + 1 ? t - 1 : walk.last;
        takeScores(i + 1, t * N);
        m.stages.release(i);
      }
    };
    startScores(i);
#pragma unroll
    for (int x = 0; x < N / 8; x++) beginDp(i, x);
    startDp(i);
    loadExponents(i);
    productsWait<1>();
    takeScores(i, t * N);
    for (; i + 1 < n; i++) step(Constant<true>());
    step(Constant<false>());
    i++;
    m.turns.release(turn);
    // A warp writes and reads only its own rows of the results.
    const float scale[1][2] = {{p.scale, p.scale}}, one[1][2] = {{1, 1}};
    productsWait<1>();
    hold(dv);
    __syncwarp();  // the previous results have been read
    dv.template roundTo<T>(m.out, outRow, one);
    __syncwarp();
    T *dvOut = at<T>(p.dv, p.dvStride, p.seq, w.batch, own, w.head * p.headDim);
    storeRows<T, D, 16>(m.out, outRow, dvOut, p.dvStride, p.seq - own, p.headDim);
    const TurnBack<D> turnBack(angles, own, p.seq);
    productsWait<0>();
    hold(dk);
    m.stages.release(i - 1);
    turnBack.turn(dk);
    __syncwarp();
    dk.template roundTo<T>(m.out, outRow, scale);
    __syncwarp();
    T *dkOut = at<T>(p.dk, p.dkStride, p.seq, w.batch, own, w.head * p.headDim);
    storeRows<T, D, 16>(m.out, outRow, dkOut, p.dkStride, p.seq - own, p.headDim);
  }
}

template <typename T, class S, class Docs>
__device__ inline void backwardFused(const Params &p, const Docs &docs, const Angles &angles, const TensorMap &q, const TensorMap &k,
                                     const TensorMap &v, const TensorMap &g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const FusedMemory<S> m(sharedAddress(shared));
  const int tiles = (p.seq + S::Own - 1) / S::Own, works = p.batch * p.kvHeads * tiles;
  m.init();
  if (threadIdx.x < 128) {
    giveRegisters<S::CopierRegisters>();
    if (threadIdx.x == 0) copyFused<S>(p, docs, q, k, v, g, m, works, tiles);
    if (threadIdx.x > 0 && threadIdx.x % 32 == 0) sendFused<S>(p, docs, m, threadIdx.x / 32 - 1);
  } else if (threadIdx.x < 384) {
    takeRegisters<kWorkerRegisters>();
    workKeys<T, S>(p, docs, angles, m);
  } else {
    giveRegisters<kQueryRegisters>();
    workQueries<T, S>(p, docs, angles, m);
  }
}

#endif  // HOPPER
}  // namespace attention

// Launch: as many blocks of 512 threads as there are multiprocessors, after the statistics. Dynamic
// shared memory: (2·Turns + 1)·OwnBytes + Stages·(2·LoopBytes + 8·Loop + 16) + 6·Own·Loop +
// 8·Loop·D + 32·Turns + 112.
#define FUSED(D, T)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(attention::kFusedThreads, 1) attention_hopper_backward_fused_##D##_##T(  \
      const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g, const float *cosines, const float *sines) { \
    BODY(backwardFused<T, attention::Fused##D>(p, attention::Documents<false>(), {cosines, sines}, q, k, v, g));            \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(attention::kFusedThreads, 1)                                             \
      attention_hopper_backward_fused_##D##_documents_##T(                                                                  \
          const __grid_constant__ attention::Params p, const __grid_constant__ TensorMap q,                                 \
          const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap g,    \
          const float *cosines, const float *sines, const int *table) {                                                     \
    BODY(backwardFused<T, attention::Fused##D>(p, attention::Documents<true>{table}, {cosines, sines}, q, k, v, g));        \
  }
#define KERNELS(T) FUSED(64, T)
KERNELS(bf16)
KERNELS(f16)
