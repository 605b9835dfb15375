// The forward pass of a Kasmina layer: a block of the kernels in kasmina.cu, for these and for the
// kernel in kasmina_stream.cu, and the merging of the records that blocks leave.
#pragma once
#include "kasmina_feed.cuh"


// The same operations for numbers and for pairs of numbers. nearer returns the smaller magnitude,
// with either sign.
__device__ __forceinline__ __nv_bfloat162 minNaN(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmin2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 maxNaN(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __half2 minNaN(__half2 a, __half2 b) { return __hmin2_nan(a, b); }
__device__ __forceinline__ __half2 maxNaN(__half2 a, __half2 b) { return __hmax2_nan(a, b); }

__device__ __forceinline__ float magnitude(float v) { return fabsf(v); }
__device__ __forceinline__ __nv_bfloat162 magnitude(__nv_bfloat162 v) { return __habs2(v); }
__device__ __forceinline__ __half2 magnitude(__half2 v) { return __habs2(v); }

__device__ __forceinline__ float nearer(float a, float b) { return fminf(fabsf(a), fabsf(b)); }
#if __CUDA_ARCH__ >= 860
template <class V> __device__ __forceinline__ V nearer(V a, V b) {
  const uint32_t &p = reinterpret_cast<uint32_t&>(a), &q = reinterpret_cast<uint32_t&>(b);
  uint32_t r;
  if constexpr (__is_same(V, __half2)) asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(q));
  else asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(q));
  return reinterpret_cast<V&>(r);
}
#else
template <class V> __device__ __forceinline__ V nearer(V a, V b) { return __hmin2(__habs2(a), __habs2(b)); }
#endif

__device__ __forceinline__ bool atMost(float v, float limit) { return v <= limit; }
__device__ __forceinline__ bool atMost(__nv_bfloat162 v, float limit) { return __hble2(v, pairOf<bf16>(limit)); }
__device__ __forceinline__ bool atMost(__half2 v, float limit) { return __hble2(v, pairOf<f16>(limit)); }

// Health accumulates a lane's statistics of a seed's elements.
template <class T, int E> struct Health {
  static constexpr bool pairs = inPairs<T, E>;
  using V = Wide<T, E>;
  Running m;
  float dead, s1, s2;       // s1, s2: sums over a group of rows of v − k and its square
  V low, high, few, eps;    // few: dead elements of a group, a number small enough to be exact
  V below, above, nearest;  // of a batch: minimum, maximum and least magnitude

  __device__ __forceinline__ void init(float e) {
    dead = s1 = s2 = 0;
    if constexpr (pairs) {
      // |x| < eps if and only if |x| is less than eps rounded up to x's type
      T up = fromFloat<T>(e);
      if (toFloat(up) < e) *reinterpret_cast<uint16_t*>(&up) += 1;
      eps = V{up, up}, low = pairOf<T>(INFINITY), high = pairOf<T>(-INFINITY), few = pairOf<T>(0);
    } else {
      few = 0, eps = e, low = INFINITY, high = -INFINITY;
    }
  }
  // item returns item i of n(B) of the seed in a batch, in the type used for comparisons.
  static __host__ __device__ constexpr int n(int B) { return B * (pairs ? E / 2 : E); }
  template <class P> __device__ static __forceinline__ V item(const P* x, int at, int i) {
    if constexpr (pairs) return reinterpret_cast<const V*>(&x[i / n(1)].v[at])[i % n(1)];
    else return x[i / n(1)].get(at + i % n(1));
  }
  // survey finds the extremes of a batch, from element `at` on of each pack. It returns an upper
  // bound of the magnitudes, or NaN if any element is NaN.
  template <int B, class P> __device__ __forceinline__ V survey(const P* x, int at) {
    below = above = nearest = item(x, at, 0);
#pragma unroll
    for (int i = 1; i < n(B); i++) {
      V v = item(x, at, i);
      below = minNaN(below, v), above = maxNaN(above, v), nearest = nearer(nearest, v);
    }
    nearest = magnitude(nearest);
    return maxNaN(above, -below);
  }
  // add includes the extremes of a surveyed batch with only finite elements. merge ends a group of
  // such batches.
  __device__ __forceinline__ void add() { low = minNaN(low, below), high = maxNaN(high, above); }
  // live reports whether no magnitude in a batch, given the least one, is less than eps.
  __device__ __forceinline__ bool live(V least) const {
    if constexpr (pairs) return __hbge2(least, eps);
    else return least >= eps;
  }
  template <int B, class P> __device__ __forceinline__ void countDead(const P* x, int at) {
#pragma unroll
    for (int i = 0; i < n(B); i++) {
      if constexpr (pairs) few = __hadd2(few, __hlt2(magnitude(item(x, at, i)), eps));
      else few += magnitude(item(x, at, i)) < eps ? 1.0f : 0.0f;
    }
  }
  // addRow adds the elements of a row of the batch to the moments.
  __device__ __forceinline__ void addRow(const float (&v)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float d = v[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2);
    }
  }
  __device__ __forceinline__ void merge(int n) {
    m.add(s1, s2, float(n));
    if constexpr (pairs) dead += __low2float(few) + __high2float(few), few = pairOf<T>(0);
    else dead += few, few = 0;
    s1 = s2 = 0;
  }
  // addCarefully adds elements that may be NaN or Inf, and returns how many are.
  __device__ __forceinline__ int addCarefully(const float* v, float e) {
    float s1 = 0, s2 = 0;
    int n = 0;
#pragma unroll
    for (int j = 0; j < E; j++) {
      if (!finite(v[j])) continue;
      float d = v[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2), dead += fabsf(v[j]) < e, n++;
      if constexpr (pairs) low = __hmin2(low, pairOf<T>(v[j])), high = __hmax2(high, pairOf<T>(v[j]));
      else low = fminf(low, v[j]), high = fmaxf(high, v[j]);
    }
    m.add(s1, s2, float(n));
    return E - n;
  }
  // put writes the record of unit i of kThreads·G to two arrays, in the layout of Records.
  template <int G> __device__ __forceinline__ void put(float4* to, int i) const {
    float4* rest = to + kThreads * G;
    to[i] = record(m);
    if constexpr (pairs)
      rest[i] = {fminf(__low2float(low), __high2float(low)), fmaxf(__low2float(high), __high2float(high)), dead, 0};
    else rest[i] = {low, high, dead, 0};
  }
};

// evaluate computes the outputs of a seed for inputs x. x1 and x2 are the preceding inputs, unless
// the chunk is whole. All inputs are scaled alike. `need` covers at least the seed's own need and
// is not kNothing.
template <bool careful, bool whole, Need need, int E>
__device__ __forceinline__ void evaluate(float (&y)[E], const float* x, float x1, float x2, const Seed<E>& s, float scale) {
  constexpr bool taps = need == kTaps;
#pragma unroll
  for (int j = 0; j < E; j++) {
    float sum = s.q[j] * scale;
    if (taps && (!whole || j > 1)) sum = addTerm<careful>(s.r2, j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, sum);
    if (taps && (!whole || j > 0)) sum = addTerm<careful>(s.r1, j > 0 ? x[j > 0 ? j - 1 : 0] : x1, sum);
    float c = need == kLinear || x[j] > 0 ? s.p[j] : s.u[j];
    y[j] = careful && x[j] != x[j] ? x[j] : addTerm<careful>(c, x[j], sum);  // NaN is never hidden
  }
}

// Records locates the records [parts, units]: the moments, and separately the rest of each record.
struct Records {
  const float4 *moments, *rest;
  int parts, units, apart;  // apart: float4 elements from one unit to the next
};

// addApart is addOver for groups that consist of every apart-th thread of a block of kMergeThreads.
// apart is a power of two, at most `most`.
template <int most, class S> __device__ __forceinline__ void addApart(S& s, int apart, int i) {
  constexpr int warps = kMergeThreads / kWarp;
  __shared__ alignas(S) char room[warps * most * sizeof(S)];
  S* of = reinterpret_cast<S*>(room);
#pragma unroll 1
  for (int k = kWarp / 2; k >= apart; k /= 2) {
    S o;
#pragma unroll
    for (int w = 0; w < int(sizeof(S)) / 4; w++)
      reinterpret_cast<uint32_t*>(&o)[w] = __shfl_xor_sync(kAllLanes, reinterpret_cast<const uint32_t*>(&s)[w], k);
    s.add(o);
  }
  if (i % kWarp < apart) of[i / kWarp * apart + i % kWarp] = s;
  __syncthreads();
  if (i >= apart) return;
#pragma unroll 1
  for (int w = 1; w < warps; w++) s.add(of[w * apart + i]);
}

// HealthSums merges records.
struct HealthSums {
  Sums m;
  float low = INFINITY, high = -INFINITY;
  double dead = 0, pivot = 0;
  __device__ __forceinline__ void add(const HealthSums& o) {
    m.add(o.m), low = fminf(low, o.low), high = fmaxf(high, o.high), dead += o.dead;
  }
  // gather adds up the records of `each` units from `first` on, using `share` threads, a power of
  // two. These are adjacent threads or, if apart is not 1, every apart-th thread of a block of
  // kMergeThreads. The first thread gets the result. All threads of the block must call it with
  // their numbers i. A thread reads `early` records at once.
  template <int early, int most = 1>
  __device__ __forceinline__ void gather(const Records& r, int first, int each, int share, int i, int apart = 1) {
    const int all = r.parts * each, step = each == 1 ? share : share / each, over = each == 1 ? 0 : share % each;
    int p = i / apart & share - 1, unit = 0, part = p;
    if (each > 1) unit = p % each, part = p / each;
    float4 lead = {};
    if (p < all) lead = r.moments[first * r.apart];
#pragma unroll 1
    do {
      float4 moments[early], rest[early];
#pragma unroll
      for (int k = 0; k < early; k++) {
        const int64_t at = (int64_t(part) * r.units + first + unit) * r.apart;
        moments[k] = {}, rest[k] = {INFINITY, -INFINITY, 0, 0};
        if (p < all) moments[k] = r.moments[at], rest[k] = r.rest[at];
        p += share, part += step, unit += over;
        if (unit >= each) unit -= each, part++;
      }
      if (lead.w == 0 && all > 0) lead.x = pivotOf(r.moments + first * r.apart, r.parts, int64_t(r.units) * r.apart);
      pivot = lead.x;
#pragma unroll
      for (int k = 0; k < early; k++) {
        m.add(moments[k], pivot);
        low = fminf(low, rest[k].x), high = fmaxf(high, rest[k].y), dead += rest[k].z;
      }
    } while (p < all);
    if (most == 1 || apart == 1) addOver(*this, share, i);
    else addApart<most>(*this, apart, i);
  }
  // put writes the figures [8, seeds] of a seed: the six health figures, and then mean and variance
  // again, because another reduction may replace the first six.
  __device__ __forceinline__ void put(float* figures, int seed, int seeds, float eps) const {
    const double by = inverse(m.n), d = m.d * by, m2 = m.d2 - m.d * d;
    const bool any = m.n > 0;
    const float v = any ? float(m2 < INFINITY ? fmax(m2, 0.0) * by : INFINITY) : 0, mean = any ? float(pivot + d) : 0;
    const float out[8] = {v, mean, any ? low : 0, any ? high : 0, any ? float(dead * by) : 0,
                          any ? fabsf(mean) * rsqrtf(v + eps) : 0, mean, v};
#pragma unroll
    for (int f = 0; f < 8; f++) figures[int64_t(f) * seeds + seed] = out[f];
  }
};

// Counts adds the numbers of NaN and Inf elements to an array [seeds].
struct Counts {
  uint32_t* bad;
  __device__ __forceinline__ void add(int seed, int n) const { atomicAdd(bad + seed, uint32_t(n)); }
};

// forward computes one block of a grid. Launch: blockDim.x threads cover N·blockDim.x columns, with
// blockDim.y lanes per block and kThreads threads in all; the lanes of all block.down blocks share
// the rows. Shared memory: the feed's and, with figures, at least 32·G bytes per thread. records is
// [block.down, units] of two float4; it may be null in strict mode without figures. Integers count
// NaN and Inf, so the order does not matter.
//
// The results don't depend on the feed, nor on whether the block is one of a launch (Own) or one
// that a block of another kernel computes (Part), which may follow other blocks at once.
template <class T, int N, int E, bool whole, Mode mode, class Feed, class Block, class Bad>
__device__ __forceinline__ void forward(const Layer& l, T* y, const Source<T, 1>& src, const Share& share, float4* records,
                                        const Bad& bad, const Block& block) {
  constexpr int G = N / E, B = Feed::B, group = 8 / B;  // batches between merges
  extern __shared__ __align__(128) uint4 shared[];
  const T* x = src.p[0];
  const bool watch = mode == kWatch || mode == kStrict && records;
  const int d = l.seeds * l.chunk, units = d / E;
  if (Block::launched) releaseNext();
  Lane lane(N, share, block);
  const bool here = lane.find(d);
  Health<T, E> h[G];
#pragma unroll
  for (int g = 0; g < G; g++) h[g].init(l.eps);
  const int seed = lane.col / (whole ? E : l.chunk), at = whole ? 0 : lane.col % l.chunk;
  if (here) {
    const Work<B> work(lane, share, int(l.rows), d);
    State<E> states[G];
#pragma unroll
    for (int g = 0; g < G; g++) states[g].begin(l, seed + g);
    if (Block::launched && (whole || !l.softmax) && share.late > block.y() * blockDim.y) work.template prefetch<2>(x, lane);
    if (Block::launched && (whole || !l.softmax)) awaitPrevious();  // it may have written x; with a softmax kernel in between, x is complete
    Feed feed(shared, src, lane, work, true);
    const Neighbours<T, N> neighbours(lane, at, l.chunk, whole);
    const float large = greatest<T>(l.large);
    Pivots<T, N, E> pivots;
    if (watch) pivots.fetch(x, work);
#pragma unroll
    for (int g = 0; g < G; g++) states[g].template finish<whole>(l, at);
    if (Block::launched) awaitPrevious();  // it computed l.softmax; the compiler must not delay loads beyond this point
    Seed<E> s[G];
    Need most = kNothing;
#pragma unroll
    for (int g = 0; g < G; g++) {
      s[g].template init<whole>(l, states[g]);
      s[g].bySign();
      most = greater(most, needOf(s[g].word, s[g].blends));
    }
    if (watch) {
      float k[G];
      pivots.find(k, x, work);
#pragma unroll
      for (int g = 0; g < G; g++) h[g].m.k = k[g];
    }
    most = mostOf(most, lane.peers);

    auto slowRow = [&](int64_t row) {
      Pack<T, N> v = load<N>(x + row);
      float x1 = 0, x2 = 0, e[N];
      if (!whole) neighbours.loadBefore(x + row, x1, x2);
      unpack(e, v, 0);
#pragma unroll
      for (int g = 0; g < G; g++) {
        float top = maxNaN(fabsf(x1), fabsf(x2)), out[E], b1 = x1, b2 = x2;
        int lost = 0;  // elements that are NaN or Inf
        if (watch) {
          lost = h[g].addCarefully(e + g * E, l.eps);
        } else {
#pragma unroll
          for (int j = 0; j < E; j++) lost += !finite(e[g * E + j]);
        }
        if (lost > 0) bad.add(seed + g, lost);
#pragma unroll
        for (int j = 0; j < E; j++) top = maxNaN(top, fabsf(e[g * E + j]));
        int exp = 0;
        if (mode == kStrict) {
          Strict strict(l, seed + g, s[g].active);
#pragma unroll
          for (int j = 0; j < E; j++) e[g * E + j] = strict(e[g * E + j]);
          b1 = at > 0 ? strict(x1) : 0, b2 = at > 1 ? strict(x2) : 0;
        } else if (finite(top)) {
          frexpf(fmaxf(top / l.large, 0.5f), &exp);  // an exponent of 0 if no scaling is needed
        }
        float down = ldexpf(1, -exp), up = ldexpf(1, exp);
#pragma unroll
        for (int j = 0; j < E; j++) e[g * E + j] *= down;
        evaluate<true, whole, kTaps>(out, e + g * E, b1 * down, b2 * down, s[g], down);
#pragma unroll
        for (int j = 0; j < E; j++) out[j] *= up;
        if (s[g].blends) setPart(v, g * E, out);
      }
      store(y + row, v);
    };
    // For a batch without extreme values.
    auto fast = [&](auto needs, Pack<T, N>* v, const float* x1, const float* x2) {
      constexpr Need need = Need(decltype(needs)::value);
#pragma unroll
      for (int g = 0; g < G; g++) {
#pragma unroll
        for (int u = 0; u < B; u++) {
          float e[E], out[E];
          unpack(e, v[u], g * E);
          if (watch) h[g].addRow(e);
          if constexpr (need > kNothing) {
            evaluate<false, whole, need>(out, e, x1[u], x2[u], s[g], 1);
            setPartIf(s[g].blends, v[u], g * E, out);
          }
        }
      }
    };
    int pending = 0;  // batches not yet merged
    auto flush = [&] {
      if (watch)
#pragma unroll
        for (int g = 0; g < G; g++) h[g].merge(pending * (B * E));
      pending = 0;
    };
    int64_t row = work.place(work.row);
#pragma unroll 1
    for (int i = 0; i <= work.batches; i++, row -= work.step()) {  // the last iteration handles the single rows
      const bool full = i < work.batches;
      bool fine = false;
      Pack<T, N> v[1][B];
      if (mode != kStrict && full) {
        float x1[B] = {}, x2[B] = {};
        feed.next(v, row);
        float near = 0;  // largest magnitude among the neighbors
        if (!whole && most == kTaps) {
#pragma unroll
          for (int u = 0; u < B; u++) neighbours.before(v[0][u], x + row + int64_t(u) * d, x1[u], x2[u]);
          if (__builtin_expect(neighbours.crosses, 0))
#pragma unroll
            for (int u = 0; u < B; u++) neighbours.crossBefore(x + row + int64_t(u) * d, x1[u], x2[u]);
#pragma unroll
          for (int u = 0; u < B; u++) near = maxNaN(near, maxNaN(fabsf(x1[u]), fabsf(x2[u])));
        }
        fine = near <= large;
        if (watch) {
          auto greatest = h[0].template survey<B>(v[0], 0), least = h[0].nearest;
#pragma unroll
          for (int g = 1; g < G; g++)
            greatest = maxNaN(greatest, h[g].template survey<B>(v[0], g * E)), least = nearer(least, h[g].nearest);
          fine = atMost(greatest, large) && fine;
          if (fine) {
#pragma unroll
            for (int g = 0; g < G; g++) h[g].add();
            if (__builtin_expect(!h[0].live(magnitude(least)), 0))
#pragma unroll
              for (int g = 0; g < G; g++) h[g].template countDead<B>(v[0], g * E);
          }
        } else {
          fine = Magnitudes<T, N>(v[0]).within(large) && fine;
        }
        if (fine) {
          if (most == kTaps) fast(Int<kTaps>{}, v[0], x1, x2);
          else if (most == kRelu) fast(Int<kRelu>{}, v[0], x1, x2);
          else if (most == kLinear) fast(Int<kLinear>{}, v[0], x1, x2);
          else fast(Int<kNothing>{}, v[0], x1, x2);
#pragma unroll
          for (int u = 0; u < B; u++) storeWhole(y + row + int64_t(u) * d, v[0][u]);
          if (++pending == group) flush();
        }
      }
      if (__builtin_expect(!fine, 0)) {
        flush();
#pragma unroll 1
        for (int u = 0; u < (full ? B : work.singles); u++) slowRow(full ? row + int64_t(u) * d : work.place(work.single(u)));
      }
    }
    feed.finish();
  }
  if (!watch) return;
  float4* own = reinterpret_cast<float4*>(shared);
  const int wide = blockDim.x * G, i = Lane::inBlock();
  if (Feed::shared) __syncthreads();  // all threads have read the rows they fetched
#pragma unroll
  for (int g = 0; g < G; g++) h[g].template put<G>(own, threadIdx.y * wide + threadIdx.x * G + g);
  __syncthreads();
  const Records lanes{own, own + kThreads * G, int(blockDim.y), wide, 1};
  // Other blocks are still running, so few warps merge, with up to 8 lanes per thread, and the rest
  // exit.
  const int team = max(int(blockDim.y) / 8, 1);
  for (int n = i >> __ffs(team) - 1; n < wide; n += kThreads) {  // more than one iteration only if team is 1
    HealthSums sums;
    sums.template gather<4>(lanes, n, 1, team, i);
    if ((i & team - 1) > 0) continue;
    const int unit = block.x() * wide + n;
    if (unit >= units) continue;
    float4* to = records + 2 * (int64_t(block.y()) * units + unit);
    to[0] = sums.m.record(sums.pivot), to[1] = {sums.low, sums.high, float(sums.dead), 0};
  }
}

template <class T, int N> using PlainRows = Direct<T, N, 1, 4>;

// Left is the input of the merging kernel: the records of a pass.
struct Left {
  float* figures;
  const float4* records;  // two per element of [parts, units]
  int parts, units, seeds, share;
  float eps;
};

constexpr int kMergeAcross = 32;

// mergeFigures merges the records of the seeds that belong to one of the blocks, which have
// kMergeThreads/share seeds each, at most kMergeAcross. i is the thread's number in its block of
// kMergeThreads. Unless `put` is set, it reads no records and writes nothing.
__device__ __forceinline__ void mergeFigures(const Left& l, int block, int i, bool put) {
  // If a seed is one unit, adjacent threads read the records of adjacent seeds, to access
  // contiguous memory.
  const int each = l.units / l.seeds, share = l.share, across = kMergeThreads / share, apart = each == 1 ? across : 1;
  const int place = i & share * apart - 1;
  const int seed = block * across + (apart > 1 ? i % apart : i / share), shown = min(seed, l.seeds - 1);
  HealthSums sums;
  sums.gather<4, kMergeAcross>({l.records, l.records + 1, put ? l.parts : 0, l.units, 2}, shown * each, each, share, i, apart);
  if (put && seed < l.seeds && place < apart) sums.put(l.figures, seed, l.seeds, l.eps);
}
