// Kasmina forward: y from x, with the six health figures of every seed over its chunk of x, in one pass.
//
//   y = x + α(t(x) − x)     for seeds that blend, y = x for others; see kasmina.cuh
//   variance, mean, min, max, share of |x| < eps, |mean|/sqrt(variance + eps)
//
// NaN and Inf are counted and left out of the figures. A batch of rows goes once through registers: transform, and sums for
// the moments; what 16-bit types can do two at a time is done so. What the warp's seeds do not need is left out: a warp whose
// seeds are all dormant copies and measures. Rows with NaN, Inf or numbers too large to multiply, and the strict mode, take a
// careful way, row by row. The lanes' figures are merged in order: by a second kernel, or where a block has all rows of its
// seeds, by the block.
#include "kasmina_feed.cuh"

// Health is what a lane has seen of a seed's elements.
template <class T, int E> struct Health {
  static constexpr bool pairs = inPairs<T, E>;
  using V = Wide<T, E>;
  Running m;
  float dead, s1, s2;      // s1, s2: of a group of rows, over v − k and its square
  V low, high, few, eps;  // few: dead ones of a group, so that it is exact

  __device__ __forceinline__ void init(float e) {
    dead = s1 = s2 = 0;
    if constexpr (pairs) {
      // |x| < eps if and only if |x| < eps rounded up to x's type
      T up = fromFloat<T>(e);
      if (toFloat(up) < e) *reinterpret_cast<uint16_t*>(&up) += 1;
      eps = V{up, up}, low = pairOf<T>(INFINITY), high = pairOf<T>(-INFINITY), few = pairOf<T>(0);
    } else {
      few = 0, eps = e, low = INFINITY, high = -INFINITY;
    }
  }
  // add takes in elements that are all finite: v, and as they are stored. A group of them ends with merge.
  __device__ __forceinline__ void add(const float* v, const T* stored) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float d = v[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2);
    }
    if constexpr (pairs) {
      const V* raw = reinterpret_cast<const V*>(stored);
#pragma unroll
      for (int j = 0; j < E / 2; j++) {
        low = __hmin2(low, raw[j]), high = __hmax2(high, raw[j]);
        few = __hadd2(few, __hlt2(__habs2(raw[j]), eps));
      }
    } else {
#pragma unroll
      for (int j = 0; j < E; j++) low = fminf(low, v[j]), high = fmaxf(high, v[j]), few += fabsf(v[j]) < eps ? 1.0f : 0.0f;
    }
  }
  __device__ __forceinline__ void merge(int n) {
    m.add(s1, s2, float(n));
    if constexpr (pairs) dead += __low2float(few) + __high2float(few), few = pairOf<T>(0);
    else dead += few, few = 0;
    s1 = s2 = 0;
  }
  // addRow takes in elements any of which may be NaN or Inf, and returns how many are.
  __device__ __forceinline__ int addRow(const float* v, float e) {
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
  __device__ __forceinline__ void put(float4* to) const {
    to[0] = record(m);
    if constexpr (pairs)
      to[1] = {fminf(__low2float(low), __high2float(low)), fmaxf(__low2float(high), __high2float(high)), dead, 0};
    else to[1] = {low, high, dead, 0};
  }
};

// evaluate computes the outputs of a seed's inputs x; x1 and x2 are those before them, unless the chunk is whole. All are
// scaled alike. taps is whether any seed has r1 or r2.
template <bool careful, bool whole, bool taps, int E>
__device__ __forceinline__ void evaluate(float (&y)[E], const float* x, float x1, float x2, const Seed<E>& s, float scale) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    float sum = s.q[j] * scale;
    if (taps && (!whole || j > 1)) sum = addTerm<careful>(s.r2, j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, sum);
    if (taps && (!whole || j > 0)) sum = addTerm<careful>(s.r1, j > 0 ? x[j > 0 ? j - 1 : 0] : x1, sum);
    float c = x[j] > 0 ? s.p[j] : s.u[j];
    y[j] = careful && x[j] != x[j] ? x[j] : addTerm<careful>(c, x[j], sum);  // NaN is never hidden
  }
}

// HealthSums merge records.
struct HealthSums {
  Sums m;
  float low = INFINITY, high = -INFINITY;
  double dead = 0;
  __device__ __forceinline__ void add(const HealthSums& o) {
    m.add(o.m), low = fminf(low, o.low), high = fmaxf(high, o.high), dead += o.dead;
  }
};

// mergeHealth turns records [lanes, units], two float4 each, into figures [8, seeds]: the six, and mean and variance once more
// for those whose six are replaced by another reduction. share threads merge those of a seed, of each units; i is the thread's
// number, and first the seed of the first threads, whose units begin at records. Launch: kMergeThreads a block.
__device__ __forceinline__ void mergeHealth(float* figures, const float4* records, int lanes, int units, int each, int first,
                                            int seeds, int share, int i, float eps) {
  HealthSums h;
  const int nth = i / share, seed = first + nth;
  double pivot = 0;
  if (seed < seeds) {
    records += 2 * int64_t(nth) * each;
    pivot = records->x;
#pragma unroll 4
    for (int p = i % share; p < lanes * each; p += share) {
      const float4* r = records + 2 * (each == 1 ? int64_t(p) * units : int64_t(p / each) * units + p % each);
      float4 m = r[0], o = r[1];
      h.m.add(m, pivot);
      h.low = fminf(h.low, o.x), h.high = fmaxf(h.high, o.y), h.dead += o.z;
    }
  }
  addOver(h, share, i);
  if (seed >= seeds || i % share > 0) return;
  const Moments m = h.m.moments(pivot);
  const bool any = m.n > 0;
  const float v = float(m.variance()), mean = float(m.mean);
  const float out[8] = {v, mean, any ? h.low : 0, any ? h.high : 0, any ? float(h.dead) / float(m.n) : 0,
                        any ? fabsf(mean) / sqrtf(v + eps) : 0, mean, v};
#pragma unroll
  for (int f = 0; f < 8; f++) figures[int64_t(f) * seeds + seed] = out[f];
}

// Launch: blockDim.x threads cover N·blockDim.x columns, blockDim.y lanes a block, kThreads in all; the lanes of all gridDim.y
// blocks share the rows. records is [lanes, units] of two float4, or null in the strict mode without figures; bad [seeds] is
// added to. alone: gridDim.y is 1 and N·blockDim.x columns are whole chunks; figures are written, records not.
template <class T, int N, int E, bool whole, Mode mode, class Feed, bool alone>
__device__ __forceinline__ void forward(const Layer& l, T* y, const Source<T, 1>& src, const Share& share, float4* records,
                                        float* figures, uint32_t* bad) {
  constexpr int G = N / E, B = Feed::B, group = 8 / B;  // batches from one merging to the next
  extern __shared__ __align__(128) uint4 shared[];
  const T* x = src.p[0];
  const bool watch = mode == kWatch || mode == kStrict && records;
  const int d = l.seeds * l.chunk, units = d / E;
  Lane lane(N);
  const bool here = lane.find(d);
  if (!here && !alone) return;
  Health<T, E> h[G];
#pragma unroll
  for (int g = 0; g < G; g++) h[g].init(l.eps);
  const int seed = lane.col / l.chunk, at = whole ? 0 : lane.col % l.chunk;
  if (here) {
    const Work<B> work(lane, share, l.rows, d);
    Feed feed(shared, src, lane, work);
    const Neighbours<T, N> neighbours(lane, at, l.chunk);
    const float large = greatest<T>(l.large);
    Pack<T, N> top{};
    if (watch && work.any()) top = load<N>(x + work.start());
    Seed<E> s[G];
    int lost[G] = {};  // elements that are NaN or Inf
    bool blends = false, taps = false;
#pragma unroll
    for (int g = 0; g < G; g++) {
      s[g].init(l, seed + g, at);
      s[g].bySign();
      blends = blends || s[g].blends, taps = taps || s[g].r1 != 0 || s[g].r2 != 0;
#pragma unroll
      for (int j = E - 1; j >= 0; j--)
        if (watch && finite(top.get(g * E + j))) h[g].m.k = top.get(g * E + j);
    }
    const int terms = __any_sync(lane.peers, taps) ? 2 : __any_sync(lane.peers, blends);

    auto slowRow = [&](int64_t row) {
      Pack<T, N> v = load<N>(x + row);
      float x1 = 0, x2 = 0, e[N];
      if (!whole) neighbours.loadBefore(x + row, x1, x2);
      unpack(e, v, 0);
#pragma unroll
      for (int g = 0; g < G; g++) {
        float top = maxNaN(fabsf(x1), fabsf(x2)), out[E], b1 = x1, b2 = x2;
        if (watch) {
          lost[g] += h[g].addRow(e + g * E, l.eps);
        } else {
#pragma unroll
          for (int j = 0; j < E; j++) lost[g] += !finite(e[g * E + j]);
        }
#pragma unroll
        for (int j = 0; j < E; j++) top = maxNaN(top, fabsf(e[g * E + j]));
        int exp = 0;
        if (mode == kStrict) {
          Strict strict(l, seed + g, s[g].active);
#pragma unroll
          for (int j = 0; j < E; j++) e[g * E + j] = strict(e[g * E + j]);
          b1 = at > 0 ? strict(x1) : 0, b2 = at > 1 ? strict(x2) : 0;
        } else if (finite(top)) {
          frexpf(fmaxf(top / l.large, 0.5f), &exp);  // an exponent of 0 where the scale need not change
        }
        float down = ldexpf(1, -exp), up = ldexpf(1, exp);
#pragma unroll
        for (int j = 0; j < E; j++) e[g * E + j] *= down;
        evaluate<true, whole, true>(out, e + g * E, b1 * down, b2 * down, s[g], down);
#pragma unroll
        for (int j = 0; j < E; j++) out[j] *= up;
        if (s[g].blends) setPart(v, g * E, out);
      }
      store(y + row, v);
    };
    // Of a batch without extremes; needs says what its seeds do: nothing, no taps, all.
    auto fast = [&](auto needs, Pack<T, N>* v, const float* x1, const float* x2) {
      constexpr int need = decltype(needs)::value;
#pragma unroll
      for (int g = 0; g < G; g++) {
#pragma unroll
        for (int u = 0; u < B; u++) {
          float e[E], out[E];
          unpack(e, v[u], g * E);
          if (watch) h[g].add(e, v[u].v + g * E);
          if (need > 0) {
            evaluate<false, whole, (need > 1)>(out, e, x1[u], x2[u], s[g], 1);
            setPartIf(s[g].blends, v[u], g * E, out);
          }
        }
      }
    };
    int pending = 0;  // batches not merged yet
    auto flush = [&] {
      if (watch)
#pragma unroll
        for (int g = 0; g < G; g++) h[g].merge(pending * (B * E));
      pending = 0;
    };
    int64_t row = work.place(work.row);
#pragma unroll 1
    for (int i = 0; i < work.batches; i++, row += work.step()) {
      bool fine = false;
      Pack<T, N> v[1][B];
      if (mode != kStrict) {
        float x1[B] = {}, x2[B] = {};
        feed.next(v, row);
        Magnitudes<T, N> most(v[0]);
        if (!whole && terms > 1)
#pragma unroll
          for (int u = 0; u < B; u++) {
            neighbours.before(v[0][u], x + row + int64_t(u) * d, x1[u], x2[u]);
            most.take(x1[u]), most.take(x2[u]);
          }
        fine = most.within(large);
        if (fine) {
          if (terms == 2) fast(Int<2>{}, v[0], x1, x2);
          else if (terms == 1) fast(Int<1>{}, v[0], x1, x2);
          else fast(Int<0>{}, v[0], x1, x2);
        }
      }
      if (fine) {
#pragma unroll
        for (int u = 0; u < B; u++) store(y + row + int64_t(u) * d, v[0][u]);
        if (++pending == group) flush();
      } else {
        flush();
#pragma unroll 1
        for (int u = 0; u < B; u++) slowRow(row + int64_t(u) * d);
      }
    }
    flush();
#pragma unroll 1
    for (int u = 0; u < work.singles; u++) slowRow(work.place(work.rest + u));
#pragma unroll
    for (int g = 0; g < G; g++)
      if (lost[g] > 0) atomicAdd(bad + seed + g, uint32_t(lost[g]));  // of integers, so in any order
  }
  if (!watch) return;
  if constexpr (alone) {
    __shared__ float4 own[kThreads * G * 2];
    const int wide = blockDim.x * G, each = whole ? 1 : l.chunk / E, first = blockIdx.x * wide / each;
#pragma unroll
    for (int g = 0; g < G; g++) h[g].put(own + 2 * (threadIdx.y * wide + threadIdx.x * G + g));
    __syncthreads();
    mergeHealth(figures, own, blockDim.y, wide, each, first, l.seeds, kThreads * each / wide, Lane::inBlock(), l.eps);
  } else {
#pragma unroll
    for (int g = 0; g < G; g++) h[g].put(records + 2 * (lane.index * units + lane.col / E + g));
  }
}

template <class T, int N> using PlainRows = Direct<T, N, 1, 4>;
template <class T, int N> using TileRows = Early<T, N, 1, 2>;
template <class T, int N> using RingRows = Ring<T, N, 1, 4>;
template <class T, int N> using BulkRows = Bulk<T, N, 1, 4>;

#define DEFINE_FORWARD(family, mode, name, shape, T, N, E, whole, feed, alone)                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                \
      kasmina_forward_##family##_##name##_##shape##_##T(Layer l, Share share, T* y, const T* x,            \
                                                        float4* records, float* figures, uint32_t* bad) {  \
    forward<T, N, E, whole, mode, feed<T, N>, alone>(l, y, {{x}, {}}, share, records, figures, bad);       \
  }
#define DEFINE_BULK(mode, name, shape, T, N, E, whole)                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                              \
      kasmina_forward_bulk_##name##_##shape##_##T(Layer l, Share share, T* y, const T* x,                                \
                                                  const __grid_constant__ TensorMap map, float4* records, float* figures, \
                                                  uint32_t* bad) {                                                       \
    forward<T, N, E, whole, mode, BulkRows<T, N>, false>(l, y, {{x}, {&map}}, share, records, figures, bad);             \
  }
#define DEFINE_PLAIN(shape, T, N, E, whole)                                                             \
  DEFINE_FORWARD(plain, kWatch, watch, shape, T, N, E, whole, PlainRows, false)              \
  DEFINE_FORWARD(plain, kQuiet, quiet, shape, T, N, E, whole, PlainRows, false)              \
  DEFINE_FORWARD(plain, kStrict, strict, shape, T, N, E, whole, PlainRows, false)
#define DEFINE_WIDE(shape, T, N, E, whole)                                                              \
  DEFINE_FORWARD(tile, kWatch, watch, shape, T, N, E, whole, TileRows, true)                \
  DEFINE_FORWARD(ring, kWatch, watch, shape, T, N, E, whole, RingRows, false)                    \
  DEFINE_FORWARD(ring, kQuiet, quiet, shape, T, N, E, whole, RingRows, false)                    \
  DEFINE_BULK(kWatch, watch, shape, T, N, E, whole)                                                     \
  DEFINE_BULK(kQuiet, quiet, shape, T, N, E, whole)
#define DEFINE(T) FOR_SHAPES(DEFINE_PLAIN, T) FOR_WIDE_SHAPES(DEFINE_WIDE, T)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_WIDE
#undef DEFINE_PLAIN
#undef DEFINE_BULK
#undef DEFINE_FORWARD

// Launch: kMergeThreads/share seeds a block; it may overlap with the kernel before it.
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    kasmina_merge(float* figures, const float4* records, int lanes, int units, int seeds, int share, float eps) {
  awaitPrevious();
  const int each = units / seeds, first = blockIdx.x * (kMergeThreads / share);
  mergeHealth(figures, records + 2 * int64_t(first) * each, lanes, units, each, first, seeds, share, threadIdx.x, eps);
}

// Of each slot, max(w) and 1/Σexp(w − max w). Launch: a warp a slot, 8 a block.
extern "C" __global__ void __launch_bounds__(256) kasmina_softmax(float* out, const float* weights, int slots, int chunk) {
  int slot = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (slot >= slots) return;
  const float* w = weights + int64_t(slot) * chunk;
  float top = -INFINITY, sum = 0;
  for (int i = lane; i < chunk; i += kWarp) top = fmaxf(top, w[i]);
  top = warpReduce<Max>(top);
  for (int i = lane; i < chunk; i += kWarp) sum += expf(w[i] - top);
  sum = warpReduce<Sum>(sum);
  if (lane == 0) out[2 * slot] = top, out[2 * slot + 1] = 1 / sum;
}
