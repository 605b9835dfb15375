// Kasmina forward: y from x, with the six health figures of every seed over its chunk of x, in one pass.
//
//   y = x + α(t(x) − x)     for seeds that blend, y = x for others; see kasmina.cuh
//   variance, mean, min, max, share of |x| < eps, |mean|/sqrt(variance + eps)
//
// NaN and Inf are counted and left out of the figures. A group of rows is on its way from memory while its numbers go once
// through registers: transform, and sums for the moments. A second kernel merges what the lanes leave, in order.
#include "kasmina.cuh"

constexpr int kInFlight = 4;  // rows of a thread at once
enum ForwardFigure { kMean, kLow = 4, kHigh, kDead, kForwardFigures };

// evaluate computes the outputs of a seed's elements v; x1 and x2 are the inputs before them, clamped already. All three and
// the result are scaled alike.
template <bool careful, int E>
__device__ __forceinline__ void evaluate(float (&y)[E], const float (&v)[E], float x1, float x2, const Seed<E>& s, float eps,
                                         float scale) {
  float x[E];
#pragma unroll
  for (int j = 0; j < E; j++) x[j] = s.input(v[j], eps);
#pragma unroll
  for (int j = 0; j < E; j++) {
    float before = j > 0 ? x[j > 0 ? j - 1 : 0] : x1, beforeThat = j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2;
    float sum = s.q[j] * scale;
    sum = addTerm<careful>(s.r2, beforeThat, sum);
    sum = addTerm<careful>(s.r1, before, sum);
    y[j] = addTerm<careful>(s.on(x[j], j) ? s.p[j] : s.off, x[j], sum);
  }
}

// Launch: blockDim.x threads cover N·blockDim.x columns, blockDim.y lanes a block; the lanes of all gridDim.y blocks share
// the rows. partial is [kForwardFigures, lanes, units]; bad [seeds] is added to.
template <class T, int N, int E, bool whole, bool watch>
__device__ __forceinline__ void forward(const Layer& l, T* y, const T* x, float* partial, uint32_t* bad) {
  constexpr int G = N / E;
  const int d = l.seeds * l.chunk, units = d / E;
  const int col = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (col >= d) return;
  const int64_t lane = int64_t(blockIdx.y) * blockDim.y + threadIdx.y, lanes = int64_t(gridDim.y) * blockDim.y;
  const int at = whole ? 0 : col % l.chunk;
  x += col, y += col;

  Seed<E> s[G];
  Running m[G];
  float low[G], high[G];
  int dead[G];
  uint32_t lost[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    s[g].init(l, col / l.chunk + g, at);
    m[g].k = 0;
    if (watch && lane < l.rows)
#pragma unroll
      for (int j = E - 1; j >= 0; j--) {
        float v = toFloat(x[lane * d + g * E + j]);
        if (finite(v)) m[g].k = v;
      }
    low[g] = INFINITY, high[g] = -INFINITY, dead[g] = 0, lost[g] = 0;
  }
  const bool halo = !whole && s[0].neighbours && s[0].blends;

  auto rows = [&](auto inFlight, int64_t row) {
    constexpr int U = decltype(inFlight)::value;
    Pack<T, N> v[U];
    float x1[U], x2[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const T* p = x + (row + u * lanes) * d;
      v[u] = loadColumns<N>(p);
      x1[u] = halo && at > 0 ? s[0].input(toFloat(p[-1]), l.eps) : 0;
      x2[u] = halo && at > 1 ? s[0].input(toFloat(p[-2]), l.eps) : 0;
    }
    float s1[G] = {}, s2[G] = {};
    uint32_t before[G];
#pragma unroll
    for (int g = 0; g < G; g++) before[g] = lost[g];
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int g = 0; g < G; g++) {
        float e[E], out[E], top = 0;
#pragma unroll
        for (int j = 0; j < E; j++) e[j] = v[u].get(g * E + j), top = maxNaN(top, fabsf(e[j]));
        if (!whole) top = maxNaN(top, maxNaN(fabsf(x1[u]), fabsf(x2[u])));
        if (top <= l.large) {
          evaluate<false>(out, e, x1[u], x2[u], s[g], l.eps, 1);
          if (watch)
#pragma unroll
            for (int j = 0; j < E; j++) {
              float dv = e[j] - m[g].k;
              s1[g] += dv, s2[g] = fmaf(dv, dv, s2[g]);
              low[g] = fminf(low[g], e[j]), high[g] = fmaxf(high[g], e[j]);
              dead[g] += fabsf(e[j]) < l.eps;
            }
        } else {  // NaN, Inf, or beyond what is safe to multiply
#pragma unroll
          for (int j = 0; j < E; j++) {
            if (!finite(e[j])) {
              lost[g]++;
            } else if (watch) {
              float dv = e[j] - m[g].k;
              s1[g] += dv, s2[g] = fmaf(dv, dv, s2[g]);
              low[g] = fminf(low[g], e[j]), high[g] = fmaxf(high[g], e[j]);
              dead[g] += fabsf(e[j]) < l.eps;
            }
          }
          int exp = 0;
          if (finite(top) && !s[g].strict) frexpf(top / l.large, &exp);
          float down = ldexpf(1, -exp), up = ldexpf(1, exp);
          float scaled[E];
#pragma unroll
          for (int j = 0; j < E; j++) scaled[j] = e[j] * down;
          evaluate<true>(out, scaled, x1[u] * down, x2[u] * down, s[g], l.eps, down);
#pragma unroll
          for (int j = 0; j < E; j++) out[j] *= up;
        }
        if (s[g].blends) setPart(v[u], g * E, out);
      }
      store(y + (row + u * lanes) * d, v[u]);
    }
    if (watch)
#pragma unroll
      for (int g = 0; g < G; g++) m[g].add(s1[g], s2[g], float(int(U * E + before[g] - lost[g])));
  };

  int64_t row = lane;
  for (; row + (kInFlight - 1) * lanes < l.rows; row += kInFlight * lanes) rows(Int<kInFlight>{}, row);
  for (; row < l.rows; row += lanes) rows(Int<1>{}, row);

#pragma unroll
  for (int g = 0; g < G; g++) {
    if (lost[g] > 0) atomicAdd(bad + col / l.chunk + g, lost[g]);  // of integers, so in any order
    if (watch) {
      Partials out{partial, lanes * units, lane * units + col / E + g};
      out.put(kMean, m[g]);
      out[kLow] = low[g], out[kHigh] = high[g], out[kDead] = dead[g];
    }
  }
}

// merge turns the partials into figures [8, seeds]: the six, and mean and variance once more, for those whose six are
// replaced by another reduction. Launch: 256 threads, blockDim.x seeds a block and blockDim.y, a power of two, for each.
__device__ __forceinline__ void merge(float* figures, float* partial, int lanes, int units, int seeds, float eps) {
  struct Health {
    Moments m;
    float low, high;
    double dead;
  };
  __shared__ Health shared[256];
  int seed = blockIdx.x * blockDim.x + threadIdx.x, each = units / seeds;
  Health h{{}, INFINITY, -INFINITY, 0};
  if (seed < seeds)
    for (int64_t i = threadIdx.y; i < int64_t(lanes) * each; i += blockDim.y) {
      Partials p{partial, int64_t(lanes) * units, i / each * units + int64_t(seed) * each + i % each};
      h.m.merge(p.moments(kMean));
      h.low = fminf(h.low, p[kLow]), h.high = fmaxf(h.high, p[kHigh]), h.dead += p[kDead];
    }
  auto mine = [&](int y) -> Health& { return shared[y * blockDim.x + threadIdx.x]; };
  mine(threadIdx.y) = h;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    Health& a = mine(threadIdx.y);
    const Health& b = mine(threadIdx.y + half);
    a.m.merge(b.m);
    a.low = fminf(a.low, b.low), a.high = fmaxf(a.high, b.high), a.dead += b.dead;
  }
  if (seed >= seeds || threadIdx.y > 0) return;
  h = mine(0);
  bool any = h.m.n > 0;
  double v = h.m.variance();
  const float out[8] = {float(v),
                        float(h.m.mean),
                        any ? h.low : 0,
                        any ? h.high : 0,
                        any ? float(h.dead / h.m.n) : 0,
                        any ? float(fabs(h.m.mean) / sqrt(v + eps)) : 0,
                        float(h.m.mean),
                        float(v)};
  for (int i = 0; i < 8; i++) figures[int64_t(i) * seeds + seed] = out[i];
}

#define DEFINE_SHAPE(shape, T, N, E, whole)                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                        \
      kasmina_forward_##shape##_##T(Layer l, T* y, const T* x, float* partial, uint32_t* bad) {               \
    forward<T, N, E, whole, true>(l, y, x, partial, bad);                                                     \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                        \
      kasmina_forward_quiet_##shape##_##T(Layer l, T* y, const T* x, float* partial, uint32_t* bad) {         \
    forward<T, N, E, whole, false>(l, y, x, partial, bad);                                                    \
  }
#define DEFINE(T) FOR_SHAPES(DEFINE_SHAPE, T)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_SHAPE

extern "C" __global__ void __launch_bounds__(256)
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
