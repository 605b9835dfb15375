// The backward pass of attention on Hopper's own instructions at head dimension 64 in one kernel, for bf16 and f16:
// attention_hopper_fused.cu has the manner of working, and in what order the blocks add up a tile's dq. Here the last of them finishes
// the tile instead of adding: it reads the sums, adds its own part, turns back by RoPE's angles and rounds.
//
// A tile has 128 queries, so that products read shared memory less often and groups meet half as often: a group has the scores of its
// 64 keys with all of them, and forms dq of 64 of them with the keys of both. ds of these 64 queries lies in memory that only this
// group's product for dq reads, and dq leaves from there.
//
// Products, in the order in which they are started: s(i+1) = k·qᵀ, and dk += ds(i)·q, which runs during the exponentials of s(i+1);
// dp(i+1) = v·gᵀ; dv += p(i+1)·g and dq(i) = ds(i)ᵀ·k, which run while ds(i+1) is formed. A group's other waits are the other's
// time for products: nothing holds them to the same step but ds, which either has to give the other within a step.
#include "attention_hopper.cuh"

namespace attention {

using Fused64 = Shape<64, 2, 128, 2, 3>;  // stages of q; of g there is one less
constexpr int kFusedTile = 128;           // queries

#ifdef HOPPER

// A tile of queries of a head, counted over all sequences.
struct QueryTile {
  int tile, head, flags;
  static constexpr int kLastOfWork = 1;  // the next tile is that of other keys
  static constexpr int kFinishes = 2;    // the other blocks have added, or will have, what they have to the tile's dq
};

__device__ inline int loadAcquire(const int *p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline void storeRelease(int *p, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The workspace after the statistics: the sums of every tile's dq, as the registers of products hold them; then how many
// blocks have added to each; then how much work has been handed out. The numbers must begin as zeros, the sums need not.
template <class S> struct Sums {
  static_assert(S::Loop == kFusedTile, "");
  float *sums;
  int *added, *handedOut;
  int tiles;  // of one head
  static constexpr int size = kFusedTile * S::D;
  __device__ Sums(const Params &p) : tiles((p.seq + kFusedTile - 1) / kFusedTile) {
    const int64_t heads = (int64_t)p.batch * p.heads;
    sums = p.stats + heads * 2 * statsRows(p);
    added = (int *)(sums + heads * tiles * size);
    handedOut = added + heads * tiles;
  }
  // How many blocks add to a tile's dq before that of a tile of keys: those that have keys which the tile's queries see follow each
  // other, from the one with the first query's first key on.
  template <class Docs> __device__ static int before(const Params &p, const Docs &docs, int batch, int keys, int queries) {
    return keys - docs.start(p, batch, queries * kFusedTile) / S::Own;
  }
  __device__ void wait(int64_t at, int before) const {
    while (loadAcquire(added + at) < before) {
    }
  }
  __device__ int64_t index(const QueryTile &t) const { return (int64_t)t.head * tiles + t.tile; }
};

// Shared memory: k and v of Turns turns, Stages of q and of g with their statistics, two ds, which dq takes the place of, results on
// their way out, then the barriers and the work of each turn. With documents, also the tiles of queries up to the last that sees one
// of a turn's keys.
template <class S> struct FusedMemory {
  static constexpr int DsBytes = S::Own * S::Loop * 2, StatsBytes = S::Loop * 4, GStages = S::Stages - 1;
  static_assert(DsBytes == S::Loop * S::D * 4, "dq takes the place of ds");
  uint32_t own, qTiles, gTiles, ds, out, lse, delta;
  Ring<S::Turns> turns;
  Ring<S::Stages> qStages;
  Ring<GStages> gStages;
  Ring<2> dq;
  uint32_t work, tileWords;
  __device__ FusedMemory(uint32_t base)
      : own(base), qTiles(own + S::Turns * 2 * S::OwnBytes), gTiles(qTiles + S::Stages * S::LoopBytes),
        ds(gTiles + GStages * S::LoopBytes), out(ds + 2 * DsBytes), lse(out + S::OwnBytes), delta(lse + S::Stages * StatsBytes),
        turns{delta + GStages * StatsBytes}, qStages{turns.barriers + turns.bytes}, gStages{qStages.barriers + qStages.bytes},
        dq{gStages.barriers + gStages.bytes}, work(dq.barriers + dq.bytes), tileWords(work + S::Turns * 16) {}
  __device__ uint32_t k(int turn) const { return own + turns.slot(turn) * 2 * S::OwnBytes; }
  __device__ uint32_t v(int turn) const { return k(turn) + S::OwnBytes; }
  __device__ uint32_t qTile(int i) const { return qTiles + qStages.slot(i) * S::LoopBytes; }
  __device__ uint32_t gTile(int i) const { return gTiles + gStages.slot(i) * S::LoopBytes; }
  __device__ uint32_t lseOf(int i) const { return lse + qStages.slot(i) * StatsBytes; }
  __device__ uint32_t deltaOf(int i) const { return delta + gStages.slot(i) * StatsBytes; }
  __device__ uint32_t dsTile(int i) const { return ds + i % 2 * DsBytes; }
  // ds and then dq of the 64 queries of a group: panels of ds have a row for each of the block's keys.
  __device__ uint32_t dsPanel(int i, int panel) const { return dsTile(i) + panel * (S::Own * 128); }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int turn = 0; turn < S::Turns; turn++) {
        barrierInit(turns.filled(turn), 1);
        barrierInit(turns.freed(turn), S::WorkerThreads + 2);  // with the two that send dq away
      }
      qStages.init(S::WorkerThreads);
      gStages.init(S::WorkerThreads);
      for (int i = 0; i < 2; i++) {
        barrierInit(dq.filled(i), S::WorkerThreads);
        barrierInit(dq.freed(i), 1);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  // The work of a turn lies with its keys and values; a batch of -1 says that there is no more.
  __device__ uint32_t workAt(int turn) const { return work + turns.slot(turn) * 16; }
  __device__ Work workOf(int turn) const {
    return {(int)loadWord(workAt(turn)), (int)loadWord(workAt(turn) + 4), (int)loadWord(workAt(turn) + 8)};
  }
  __device__ void setWork(int turn, const Work &w) const {
    storeWord(workAt(turn), w.batch);
    storeWord(workAt(turn) + 4, w.head);
    storeWord(workAt(turn) + 8, w.tile);
  }
  // What the workers have to know of a tile, until its dq is on its way: there is room for one more than for q.
  __device__ uint32_t tileAt(int i) const { return tileWords + i % (S::Stages + 1) * 12; }
  __device__ QueryTile tileOf(int i) const {
    return {(int)loadWord(tileAt(i)), (int)loadWord(tileAt(i) + 4), (int)loadWord(tileAt(i) + 8)};
  }
  __device__ void setTile(int i, const QueryTile &t) const {
    storeWord(tileAt(i), t.tile);
    storeWord(tileAt(i) + 4, t.head);
    storeWord(tileAt(i) + 8, t.flags);
  }
};

// The tiles of queries that see a key of the block's, from the last to the first, for one query head of the group after another.
template <class Docs, class Do>
__device__ inline void walkQueries(const Params &p, const Docs &docs, const Work &w, int queryTiles, Do visit) {
  const int end = docs.end(p, w.batch, w.tile * kFusedTile + kFusedTile - 1), group = p.heads / p.kvHeads;
  const int last = (end + kFusedTile - 1) / kFusedTile - 1, first = p.causal ? w.tile : 0;
#pragma unroll 1
  for (int h = 0; h < group; h++)
#pragma unroll 1
    for (int t = last; t >= first; t--) {
      int flags = h == group - 1 && t == first ? QueryTile::kLastOfWork : 0;
      if (w.tile == (p.causal ? t : queryTiles - 1)) flags |= QueryTile::kFinishes;
      visit(QueryTile{t, w.batch * p.heads + w.head * group + h, flags});
    }
}

template <class S, class Docs>
__device__ inline void copyFused(const Params &p, const Docs &docs, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                                 const TensorMap &g, const FusedMemory<S> &m, int works, int tiles) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    const int work = atomicAdd(sums.handedOut, 1);
    const Work w = schedule(min(work, works - 1), p, p.kvHeads, tiles, false);
    m.turns.waitFree(turn);
    m.setWork(turn, work < works ? w : Work{-1});
    if (work >= works) {
      barrierArrive(m.turns.filled(turn));
      return;
    }
    uint32_t barrier = m.turns.announce(turn, 2 * S::OwnBytes);
    copyTile<S::D, S::Own>(m.k(turn), k, barrier, w.tile * S::Own, w.head, w.batch);
    copyTile<S::D, S::Own>(m.v(turn), v, barrier, w.tile * S::Own, w.head, w.batch);
    walkQueries(p, docs, w, sums.tiles, [&](const QueryTile &tile) {
      const int i0 = tile.tile * S::Loop, head = tile.head - w.batch * p.heads;
      const float *stats = statsOf(p, 0, tile.head) + i0;
      m.qStages.waitFree(i);
      m.setTile(i, tile);
      barrier = m.qStages.announce(i, S::LoopBytes + m.StatsBytes);
      copyTile<S::D, S::Loop>(m.qTile(i), q, barrier, i0, head, w.batch);
      copyBytes(m.lseOf(i), stats, m.StatsBytes, barrier);
      barrier = m.gStages.fill(i, S::LoopBytes + m.StatsBytes);
      copyTile<S::D, S::Loop>(m.gTile(i), g, barrier, i0, head, w.batch);
      copyBytes(m.deltaOf(i), stats + statsRows(p), m.StatsBytes, barrier);
      i++;
    });
  }
}

// What one of the two threads does that add dq to the sums, each every second tile: a tile's first block writes, the others add when
// their turn has come, but for the last, which finishes the tile.
template <class S, class Docs>
__device__ inline void sendFused(const Params &p, const Docs &docs, const FusedMemory<S> &m, int odd) {
  const Sums<S> sums(p);
  for (int turn = 0, i = 0;; turn++) {
    m.turns.wait(turn);
    const Work w = m.workOf(turn);
    barrierArrive(m.turns.freed(turn));
    if (w.batch < 0) return;
    walkQueries(p, docs, w, sums.tiles, [&](const QueryTile &tile) {
      if (i++ % 2 != odd) return;
      const int64_t at = sums.index(tile);
      float *to = sums.sums + at * sums.size;
      const bool adds = !(tile.flags & QueryTile::kFinishes);
      const int before = sums.before(p, docs, w.batch, w.tile, tile.tile);
      if (adds) sums.wait(at, before);
      asm volatile("fence.proxy.async;" ::: "memory");
      m.dq.wait(i - 1);
      const uint32_t from = m.dsTile(i - 1);
      if (adds && before == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(m.DsBytes) : "memory");
      else if (adds)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(m.DsBytes)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      barrierArrive(m.dq.freed(i - 1));
      if (!adds) return;
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
      storeRelease(sums.added + at, before + 1);
    });
  }
}

// Writes columns 16·k... of a warp's rows, in a product's layout, into a tile of 64 columns; the address is that of this lane's
// chunk for k = 0.
__device__ inline void storeColumns(const uint32_t (&v)[4], uint32_t address, int k) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address ^ k * 32), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

template <int Value> struct Constant {
  static constexpr int value = Value;
};

template <typename T, class S, class Docs>
__device__ inline void workFused(const Params &p, const Docs &docs, const Angles &angles, const FusedMemory<S> &m) {
  constexpr int D = S::D, N = S::Loop;
  const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const float c = p.scale * kLog2e;
  const uint32_t dsAt = chunkAt<64>(0, 64 * group + 16 * warp + lane % 16, lane / 16);
  // dq takes ds of the keys of both groups. Barriers of tiles take turns, as one group may be ahead.
  auto meetGroup = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
  auto tellOther = [&](int i) { asm volatile("bar.arrive %0, 256;" ::"r"(4 + i % 2 * 2 + 1 - group) : "memory"); };
  auto hearOther = [&](int i) { asm volatile("bar.sync %0, 256;" ::"r"(4 + i % 2 * 2 + group) : "memory"); };
  // Zero, which the compiler does not know: it then forms addresses where they are needed, instead of keeping them all.
  auto zero = [](int i) { return i >> 30; };
  int turn = 0, i = 0, own = 0;        // own: the warp's first key
  auto ends = endsOf<1>(docs, p, 0, 0);
  Accumulator<1, D> dk, dv, dq;  // of keys, of keys, of the group's 64 queries
  Accumulator<1, N> s, dp;       // transposed: a row is a key, a column a query
  Operand<64> e[2], ds;          // probabilities; ds of the first 64 queries, that of the others takes the place of e[1]
  auto startScores = [&](int turn, int i) {
    m.qStages.wait(i);
    productsBegin();
    startNT<T, D, S::Own>(s, m.k(turn) + zero(i), 64 * group, m.qTile(i));
    productsCommit();
  };
  auto startKeys = [&] {
    hold(dk);
    productsBegin();
    startNN<T, D>(dk, ds, m.qTile(i));
    startNN<T, D>(dk, e[1], m.qTile(i) + 64 * 128);
    productsCommit();
  };
  // The probabilities of tile i, whose scores are ready.
  auto formProbabilities = [&](int i) {
    hold(s);
    const int i0 = uniform(m.tileOf(i).tile) * N;
    const uint32_t stats = m.lseOf(i) + lane % 4 * 8;
    // A query that does not exist is all zeros, g and statistics included, and adds nothing.
#pragma unroll
    for (int x = 0; x < N / 8; x++) {
      float lse[2];
      loadPair(lse, stats + x * 32);
#pragma unroll
      for (int f = 0; f < 4; f++) s.c[0][x][f] = exp2Approx(fmaf(s.c[0][x][f], c, -lse[f % 2]));
    }
    if ((p.causal && i0 < own + 15) || own + 15 >= p.seq) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int key = own + 8 * half + lane / 4;
        const int hidden = (key >= p.seq ? p.seq + N : p.causal ? key : 0) - i0 - lane % 4 * 2;  // from the lane's first query on
#pragma unroll
        for (int x = 0; x < N / 8; x++)
#pragma unroll
          for (int f = 0; f < 2; f++)
            if (8 * x + f < hidden) s.c[0][x][2 * half + f] = 0;
      }
    }
    dropBehind(s, i0, ends);
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        e[k / 4].r[k % 4][j] = pack(s.c[0][2 * k + j / 2][j % 2 * 2], s.c[0][2 * k + j / 2][j % 2 * 2 + 1], T());
  };
  auto startDp = [&](int turn, int i) {
    m.gStages.wait(i);  // and of no wait for products, which would move ahead of the exponentials
    productsWait<0>();
    productsBegin();
    startNT<T, D, S::Own>(dp, m.v(turn) + zero(i), 64 * group, m.gTile(i));
    productsCommit();
  };
  auto startValues = [&](int i) {
    hold(dv);
    productsBegin();
    startNN<T, D>(dv, e[0], m.gTile(i));
    startNN<T, D>(dv, e[1], m.gTile(i) + 64 * 128);
    productsCommit();
  };
  auto startQueries = [&] {
    hearOther(i);
    productsBegin();
    startTN<T, D, S::Own>(dq, m.dsPanel(i, group), m.k(turn) + zero(i));
    productsCommit();
  };
  // ds of tile i, whose dp is ready, while other products are under way.
  auto formDs = [&](auto pending, int i) {
    hold(dp);
    m.dq.waitFree(i);
    const uint32_t stats = m.deltaOf(i) + lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
      if (k == 4) productsWait<pending.value>();
      uint32_t(&to)[4] = k < 4 ? ds.r[k % 4] : e[1].r[k % 4];
      float delta[2][2];
      loadPair(delta[0], stats + 2 * k * 32);
      loadPair(delta[1], stats + (2 * k + 1) * 32);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 probability = unpack(e[k / 4].r[k % 4][j], T());
        const float *d = &dp.c[0][2 * k + j / 2][j % 2 * 2];
        to[j] = pack(probability.x * (d[0] - delta[j / 2][0]), probability.y * (d[1] - delta[j / 2][1]), T());
      }
      storeColumns(to, m.dsPanel(i, k / 4) + dsAt, k % 4);
    }
    fenceAsync();
    tellOther(i);
    productsWait<0>();
    hold(dv);
    hold(dk);
    hold(dq);
    m.gStages.release(i);
    meetGroup();  // all have read what dq takes the place of
  };
  // dq of a tile that no other block adds to any more: the sums and this block's part, times the scale, turned back.
  auto finishDq = [&](const QueryTile &tile, uint32_t panel) {
    const Sums<S> sums(p);
    const int batch = tile.head / p.heads, row = tile.tile * N + 64 * group + 16 * warp;
    const int64_t index = sums.index(tile);
    const int before = sums.before(p, docs, batch, p.causal ? tile.tile : sums.tiles - 1, tile.tile);
    if (before > 0) {
      sums.wait(index, before);
      const float4 *from = (const float4 *)(sums.sums + index * sums.size + group * (64 * D)) + threadIdx.x % 128;
#pragma unroll
      for (int x = 0; x < D / 8; x++) {
        const float4 v = from[x * 128];
        dq.c[0][x][0] += v.x, dq.c[0][x][1] += v.y, dq.c[0][x][2] += v.z, dq.c[0][x][3] += v.w;
      }
    }
    turnBack(dq, angles, row, p.seq);
    const float factors[1][2] = {{p.scale, p.scale}};
    dq.template roundTo<T>(panel, 16 * warp, factors);
    __syncwarp();
    T *to = at<T>(p.dq, p.dqStride, p.seq, batch, row, tile.head % p.heads * p.headDim);
    storeResult<T, D, 16>(panel, 16 * warp, to, p.dqStride, p.seq - row, p.headDim);
  };
  auto sendDq = [&](int i) {
    const uint32_t panel = m.dsPanel(i, group);
    const QueryTile tile = m.tileOf(i);
    if (tile.flags & QueryTile::kFinishes) {
      finishDq(tile, panel);
    } else {
      const uint32_t to = panel + threadIdx.x % 128 * 16;
#pragma unroll
      for (int x = 0; x < D / 8; x++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + x * 2048), "f"(dq.c[0][x][0]), "f"(dq.c[0][x][1]),
                     "f"(dq.c[0][x][2]), "f"(dq.c[0][x][3])
                     : "memory");
      fenceAsync();
    }
    barrierArrive(m.dq.filled(i));
  };
  // A warp writes and reads only its own rows of the results.
  auto store = [&](const Accumulator<1, D> &d, float factor, void *to, int64_t stride) {
    const float factors[1][2] = {{factor, factor}};
    const int outRow = 64 * group + 16 * warp;
    const Work w = m.workOf(turn);
    const int row = w.tile * S::Own + outRow;
    __syncwarp();
    d.template roundTo<T>(m.out, outRow, factors);
    __syncwarp();
    storeResult<T, D, 16>(m.out, outRow, at<T>(to, stride, p.seq, w.batch, row, w.head * p.headDim), stride, p.seq - row, p.headDim);
  };
  auto storeKeys = [&] {
    turnBack(dk, angles, m.workOf(turn).tile * S::Own + 64 * group + 16 * warp, p.seq);
    store(dk, p.scale, p.dk, p.dkStride);
  };
  for (;; turn++, i++) {
    m.turns.wait(turn);
    const Work w = m.workOf(turn);
    if (uniform(w.batch) < 0) return;
    own = uniform(w.tile) * S::Own + 64 * group + 16 * warp;
    ends = endsOf<1>(docs, p, w.batch, own);
    const int first = i;
    dk.clear();
    dv.clear();
    startScores(turn, i);
    productsWait<0>();
    formProbabilities(i);
    startDp(turn, i);
    startValues(i);
    productsWait<1>();
    formDs(Constant<0>(), i);
    for (; !(uniform(m.tileOf(i).flags) & QueryTile::kLastOfWork); i++) {
      startScores(turn, i + 1);
      startKeys();
      if (i > first) sendDq(i - 1);
      productsWait<1>();
      formProbabilities(i + 1);
      startDp(turn, i + 1);
      m.qStages.release(i);
      startValues(i + 1);
      startQueries();
      productsWait<2>();
      formDs(Constant<1>(), i + 1);
    }
    startKeys();
    if (i > first) sendDq(i - 1);
    startQueries();
    store(dv, 1, p.dv, p.dvStride);
    productsWait<0>();
    hold(dk);
    hold(dq);
    m.qStages.release(i);
    meetGroup();
    sendDq(i);
    storeKeys();
    m.turns.release(turn);
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
    if (threadIdx.x == 32) sendFused<S>(p, docs, m, 0);
    if (threadIdx.x == 64) sendFused<S>(p, docs, m, 1);
  } else {
    takeRegisters<S::WorkerRegisters>();
    workFused<T, S>(p, docs, angles, m);
  }
}

#endif  // HOPPER
}  // namespace attention

// Launch: as many blocks of Threads as there are multiprocessors, after the statistics and before the rounding of dq. Dynamic
// shared memory: (2·Turns + 1)·OwnBytes + (2·Stages - 1)·(LoopBytes + 4·Loop + 16) + 2·Own·Loop·2 + 24·Turns + 32.
// The rounding: a block of 256 threads for every 64 queries of every two heads, and the shared memory of their results.
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
  }
#define KERNELS(T) FUSED(64, T)
KERNELS(bf16)
KERNELS(f16)
