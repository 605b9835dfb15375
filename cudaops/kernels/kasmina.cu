// Kasmina forward: y from x, with the six health figures of every seed over its chunk of x, in one pass.
//
//   y = x + α(t(x) − x)     for seeds that blend, y = x for others; see kasmina.cuh
//   variance, mean, min, max, share of |x| < eps, |mean|/sqrt(variance + eps)
//
// NaN and Inf are counted and left out of the figures. While rows are on their way from memory, those that have arrived go
// once through registers: transform, and sums for the moments; what 16-bit types can do two at a time is done so. A second
// kernel merges what the lanes leave, in order.
#include "kasmina.cuh"

enum ForwardFigure { kMean, kLow = 4, kHigh, kDead, kForwardFigures };

// Health is what a lane has seen of a seed's elements.
template <class T, int E> struct Health {
  static constexpr bool pairs = inPairs<T, E>;
  using V = Wide<T, E>;
  Running m;
  float s1, s2, dead;     // the first two of a group of rows
  V low, high, few, eps;  // few: dead ones of a group, so that it is exact

  __device__ __forceinline__ void init(float e) {
    dead = 0;
    if constexpr (pairs) {
      // |x| < eps if and only if |x| < eps rounded up to x's type
      T up = fromFloat<T>(e);
      if (toFloat(up) < e) *reinterpret_cast<uint16_t*>(&up) += 1;
      eps = V{up, up}, low = pairOf<T>(INFINITY), high = pairOf<T>(-INFINITY);
    } else {
      eps = e, low = INFINITY, high = -INFINITY;
    }
    clear();
  }
  __device__ __forceinline__ void clear() {
    s1 = s2 = 0;
    if constexpr (pairs) few = pairOf<T>(0);
    else few = 0;
  }
  // add takes in elements that are all finite: v, as they are stored, and their magnitudes.
  __device__ __forceinline__ void add(const float* v, const T* stored, const V* magnitude) {
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
        few = __hadd2(few, __hlt2(magnitude[j], eps));
      }
    } else {
#pragma unroll
      for (int j = 0; j < E; j++) low = fminf(low, v[j]), high = fmaxf(high, v[j]), few += magnitude[j] < eps ? 1.0f : 0.0f;
    }
  }
  __device__ __forceinline__ void addFinite(float v, float e) {
    float d = v - m.k;
    s1 += d, s2 = fmaf(d, d, s2), dead += fabsf(v) < e;
    if constexpr (pairs) low = __hmin2(low, pairOf<T>(v)), high = __hmax2(high, pairOf<T>(v));
    else low = fminf(low, v), high = fmaxf(high, v);
  }
  __device__ __forceinline__ void group(int n) {
    m.add(s1, s2, float(n));
    if constexpr (pairs) dead += __low2float(few) + __high2float(few);
    else dead += few;
    clear();
  }
  __device__ __forceinline__ void put(const Partials& out) const {
    out.put(kMean, m);
    out[kDead] = dead;
    if constexpr (pairs) {
      out[kLow] = fminf(__low2float(low), __high2float(low)), out[kHigh] = fmaxf(__low2float(high), __high2float(high));
    } else {
      out[kLow] = low, out[kHigh] = high;
    }
  }
};

// evaluate computes the outputs of a seed's inputs x; x1 and x2 are those before them, unless the chunk is whole. All are
// scaled alike.
template <bool careful, bool whole, int E>
__device__ __forceinline__ void evaluate(float (&y)[E], const float* x, float x1, float x2, const Seed<E>& s, float scale) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    float sum = s.q[j] * scale;
    if (!whole || j > 1) sum = addTerm<careful>(s.r2, j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, sum);
    if (!whole || j > 0) sum = addTerm<careful>(s.r1, j > 0 ? x[j > 0 ? j - 1 : 0] : x1, sum);
    float c = x[j] > 0 ? s.p[j] : s.u[j];
    y[j] = careful && x[j] != x[j] ? x[j] : addTerm<careful>(c, x[j], sum);  // NaN is never hidden
  }
}

// Launch: blockDim.x threads cover N·blockDim.x columns, blockDim.y lanes a block, kThreads in all; the lanes of all gridDim.y
// blocks share the rows. partial is [kForwardFigures, lanes, units], or null in the strict mode without figures; bad [seeds]
// is added to. Dynamic shared memory, unless N is 1: kStages·kThreads·16 bytes.
template <class T, int N, int E, bool whole, Mode mode>
__device__ __forceinline__ void forward(const Layer& l, T* y, const T* x, float* partial, uint32_t* bad) {
  constexpr int G = N / E;
  extern __shared__ uint4 shared[];
  const bool watch = mode == kWatch || mode == kStrict && partial;
  const int d = l.seeds * l.chunk, units = d / E;
  Lane lane(N);
  if (!lane.find(d)) return;
  const int col = lane.col, seed = col / l.chunk, at = whole ? 0 : col % l.chunk, count = lane.rows(l.rows);
  const int64_t step = lane.count * d;
  x += lane.index * d + col, y += lane.index * d + col;
  Rows<T, N, 1> rows(shared, step, count);
  rows.p[0] = x;
  rows.start();

  Neighbours<T, N> neighbours(lane, at, l.chunk);
  const float large = greatest<T>(l.large);
  Seed<E> s[G];
  Health<T, E> h[G];
  int lost[G], counted[G] = {};  // non-finite elements, and those of them that are already in m
#pragma unroll
  for (int g = 0; g < G; g++) {
    s[g].init(l, seed + g, at);
    s[g].bySign();
    h[g].init(l.eps), lost[g] = 0;
    if (watch && count > 0)
#pragma unroll
      for (int j = E - 1; j >= 0; j--) {
        float v = toFloat(x[g * E + j]);
        if (finite(v)) h[g].m.k = v;
      }
  }

  auto row = [&](auto n, int u) {
    Pack<T, N> in[1];
    rows.template next<decltype(n)::value>(u, in);
    Pack<T, N>& v = in[0];
    float x1 = 0, x2 = 0, e[N];
    if (!whole) neighbours.before(v, x, x1, x2);
    unpack(e, v, 0);
    Magnitudes<T, N> magnitudes(v);
    bool fine = magnitudes.within(large);
    if (!whole) fine = fine && fabsf(x1) <= large && fabsf(x2) <= large;
    if (mode != kStrict && fine) {
#pragma unroll
      for (int g = 0; g < G; g++) {
        if (watch) h[g].add(e + g * E, v.v + g * E, magnitudes.v + g * (magnitudes.words / G));
        float out[E];
        evaluate<false, whole>(out, e + g * E, x1, x2, s[g], 1);
        if (s[g].blends) setPart(v, g * E, out);
      }
    } else {  // NaN, Inf, or beyond what is safe to multiply; or the strict mode
#pragma unroll
      for (int g = 0; g < G; g++) {
        float top = maxNaN(fabsf(x1), fabsf(x2)), out[E], b1 = x1, b2 = x2;
#pragma unroll
        for (int j = 0; j < E; j++) {
          float& v = e[g * E + j];
          top = maxNaN(top, fabsf(v));
          if (!finite(v)) lost[g]++;
          else if (watch) h[g].addFinite(v, l.eps);
        }
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
        evaluate<true, whole>(out, e + g * E, b1 * down, b2 * down, s[g], down);
#pragma unroll
        for (int j = 0; j < E; j++) out[j] *= up;
        if (s[g].blends) setPart(v, g * E, out);
      }
    }
    store(y, v);
    x += step, y += step;
  };
  auto group = [&](int n) {
    if (watch)
#pragma unroll
      for (int g = 0; g < G; g++) h[g].group(n * E - lost[g] + counted[g]), counted[g] = lost[g];
  };
  walk<Rows<T, N, 1>::ahead>(count, row, group);

#pragma unroll
  for (int g = 0; g < G; g++) {
    if (lost[g] > 0) atomicAdd(bad + seed + g, uint32_t(lost[g]));  // of integers, so in any order
    if (watch) h[g].put({partial, lane.count * units, lane.index * units + col / E + g});
  }
}

// merge turns the partials into figures [8, seeds]: the six, and mean and variance once more, for those whose six are
// replaced by another reduction. Launch: kMergeThreads, blockDim.x seeds a block and blockDim.y, a power of two, for each.
__device__ __forceinline__ void merge(float* figures, float* partial, int lanes, int units, int seeds, float eps) {
  struct Share {
    Sums m;
    float low, high, dead;
  };
  __shared__ Share shared[kMergeThreads];
  int seed = blockIdx.x * blockDim.x + threadIdx.x, each = units / seeds;
  Share h{{}, INFINITY, -INFINITY, 0};
  double pivot = 0;
  if (seed < seeds) {
    Partials p{partial, int64_t(lanes) * units, int64_t(seed) * each};
    pivot = p[kMean];
#pragma unroll 4
    for (int i = threadIdx.y; i < lanes * each; i += blockDim.y) {
      p.at = int64_t(i / each) * units + int64_t(seed) * each + i % each;
      h.m.add(p, kMean, pivot);
      h.low = fminf(h.low, p[kLow]), h.high = fmaxf(h.high, p[kHigh]), h.dead += p[kDead];
    }
  }
  auto mine = [&](int y) -> Share& { return shared[y * blockDim.x + threadIdx.x]; };
  mine(threadIdx.y) = h;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    Share& a = mine(threadIdx.y);
    const Share& b = mine(threadIdx.y + half);
    a.m.add(b.m);
    a.low = fminf(a.low, b.low), a.high = fmaxf(a.high, b.high), a.dead += b.dead;
  }
  if (seed >= seeds || threadIdx.y > 0) return;
  h = mine(0);
  Moments m = h.m.moments(pivot);
  bool any = m.n > 0;
  double v = m.variance();
  const float out[8] = {float(v),
                        float(m.mean),
                        any ? h.low : 0,
                        any ? h.high : 0,
                        any ? float(h.dead / m.n) : 0,
                        any ? float(fabs(m.mean) / sqrt(v + eps)) : 0,
                        float(m.mean),
                        float(v)};
  for (int i = 0; i < 8; i++) figures[int64_t(i) * seeds + seed] = out[i];
}

#define DEFINE_MODE(mode, name, T, N, E, whole)                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                   \
      kasmina_forward_##name##_##T(Layer l, T* y, const T* x, float* partial, uint32_t* bad) {                \
    forward<T, N, E, whole, mode>(l, y, x, partial, bad);                                                     \
  }
#define DEFINE_SHAPE(shape, T, N, E, whole)            \
  DEFINE_MODE(kWatch, watch_##shape, T, N, E, whole)   \
  DEFINE_MODE(kQuiet, quiet_##shape, T, N, E, whole)   \
  DEFINE_MODE(kStrict, strict_##shape, T, N, E, whole)
#define DEFINE(T) FOR_SHAPES(DEFINE_SHAPE, T)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_SHAPE
#undef DEFINE_MODE

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    kasmina_merge(float* figures, float* partial, int lanes, int units, int seeds, float eps) {
  merge(figures, partial, lanes, units, seeds, eps);
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
