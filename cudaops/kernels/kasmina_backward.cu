// Kasmina backward: the gradients of x, weights and scales from g, that of y, with figures of g for every seed.
//
//   g ← g·min(1, limit/(‖g‖ + eps))                     for each row and seed, when there are limits
//   dx = (1 − α)·g + (∂t/∂x)ᵀ·αg                         for seeds that blend, g for others
//   dweights[slot] = Σ_seeds Σ_rows (∂t/∂w)ᵀ·βg          for seeds that learn: β = α, or 1 in Training
//   dscales[slot]  = Σ_seeds Σ_rows (∂t/∂a)·βg
//   norm, variance and largest magnitude of g before clipping, and moments of the norms of its rows
//
// The sums over rows that all this takes are few, whatever the kind: of g·m for each column, where m is 1 for Residual, x for
// AttentionGate and ConvFilter and x where the relu is open for MLPExpansion, and of g[i]·x[i−1] and g[i]·x[i−2] for each seed.
// What is made of them, softmax's own gradient included, is linear and comes after the sums. Lanes leave theirs in sums
// [lanes, columns + 2·units]; they are added up in order, over lanes and then over the seeds of a slot.
#include "kasmina.cuh"

constexpr int kInFlight = 2;              // rows of a thread at once
constexpr float kLargestSquared = 1e18f;  // of a gradient whose squares are summed up in float32
enum GradientFigure { kMean, kTop = 4, kNorms, kGradientFigures = 9 };

// squares is the sum of squares of the finite elements, and how many those are.
template <int E> __device__ __forceinline__ double squares(const float (&g)[E], int& n) {
  double sum = 0;
  n = 0;
#pragma unroll
  for (int j = 0; j < E; j++)
    if (finite(g[j])) sum += double(g[j]) * g[j], n++;
  return sum;
}

// scale [rows, seeds] holds the factors that clip, where a chunk is not whole in a thread; null for none. Launch: as forward.
template <class T, int N, int E, bool whole, bool watch>
__device__ __forceinline__ void backward(const Layer& l, T* dx, const T* g, const T* x, const float* scale, float* sums,
                                         float* partial, uint32_t* bad, uint32_t* clipped) {
  constexpr int G = N / E;
  const int d = l.seeds * l.chunk, units = d / E;
  const int col = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (col >= d) return;
  const int64_t lane = int64_t(blockIdx.y) * blockDim.y + threadIdx.y, lanes = int64_t(gridDim.y) * blockDim.y;
  const int at = whole ? 0 : col % l.chunk, seed = col / l.chunk;
  x += col, g += col, dx += col;

  Seed<E> s[G];
  bool residual[G];
  float limit[G];
  Running m[G], norms[G];
  float top[G], acc[N] = {}, d1[G] = {}, d2[G] = {};
  uint32_t lost[G] = {}, clips[G] = {};
#pragma unroll
  for (int k = 0; k < G; k++) {
    s[k].init(l, seed + k, at);
    residual[k] = Word{l.word[seed + k]}.kind() == kResidual;
    limit[k] = whole && l.limit ? l.limit[seed + k] : INFINITY;
    m[k].k = norms[k].k = top[k] = 0;
    if (watch && lane < l.rows) {
      float first[E];
#pragma unroll
      for (int j = 0; j < E; j++) first[j] = toFloat(g[lane * d + k * E + j]);
#pragma unroll
      for (int j = E - 1; j >= 0; j--)
        if (finite(first[j])) m[k].k = first[j];
      int n;
      if (whole) norms[k].k = float(sqrt(squares(first, n)));
    }
  }
  const bool left = !whole && s[0].neighbours && at > 0, left2 = !whole && s[0].neighbours && at > 1;
  const bool right = !whole && s[0].neighbours && at + E < l.chunk, right2 = !whole && s[0].neighbours && at + E + 1 < l.chunk;

  auto rows = [&](auto inFlight, int64_t row) {
    constexpr int U = decltype(inFlight)::value;
    Pack<T, N> gv[U], xv[U];
    float x1[U], x2[U], g1[U], g2[U], by[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      int64_t r = row + u * lanes;
      const T *pg = g + r * d, *px = x + r * d;
      gv[u] = loadColumns<N>(pg), xv[u] = loadColumns<N>(px);
      x1[u] = left ? s[0].input(toFloat(px[-1]), l.eps) : 0;
      x2[u] = left2 ? s[0].input(toFloat(px[-2]), l.eps) : 0;
      g1[u] = right ? toFloat(pg[N]) : 0;
      g2[u] = right2 ? toFloat(pg[N + 1]) : 0;
      by[u] = !whole && scale ? scale[r * l.seeds + seed] : 1;
    }
    float s1[G] = {}, s2[G] = {}, n1[G] = {}, n2[G] = {};
    int seen[G] = {}, normed[G] = {};
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int k = 0; k < G; k++) {
        float ge[E], most = 0, factor = by[u];
#pragma unroll
        for (int j = 0; j < E; j++) ge[j] = gv[u].get(k * E + j), most = maxNaN(most, fabsf(ge[j]));
        const bool fine = most <= kLargestSquared;

        float norm = 0;
        int n = E;
        if (fine) {
          if (watch) {
#pragma unroll
            for (int j = 0; j < E; j++) {
              float dv = ge[j] - m[k].k;
              s1[k] += dv, s2[k] = fmaf(dv, dv, s2[k]);
            }
            top[k] = fmaxf(top[k], most);
          }
          if (whole) {
            float q = 0;
#pragma unroll
            for (int j = 0; j < E; j++) q = fmaf(ge[j], ge[j], q);
            norm = sqrtf(q);
          }
        } else {
          norm = float(sqrt(squares(ge, n)));
          lost[k] += E - n;
          if (watch)
#pragma unroll
            for (int j = 0; j < E; j++)
              if (finite(ge[j])) {
                float dv = ge[j] - m[k].k;
                s1[k] += dv, s2[k] = fmaf(dv, dv, s2[k]), top[k] = fmaxf(top[k], fabsf(ge[j]));
              }
        }
        seen[k] += n;
        if (whole && watch && n > 0) {
          float dv = norm - norms[k].k;
          n1[k] += dv, n2[k] = fmaf(dv, dv, n2[k]), normed[k]++;
        }
        if (whole) {
          float f = limit[k] / (norm + l.eps);
          if (f < 1) factor = f, clips[k]++;
        }
        const bool clip = factor != 1;
#pragma unroll
        for (int j = 0; j < E; j++) ge[j] *= factor;

        float xe[E], out[E];
#pragma unroll
        for (int j = 0; j < E; j++) xe[j] = s[k].input(xv[u].get(k * E + j), l.eps);
#pragma unroll
        for (int j = 0; j < E; j++) {
          bool on = s[k].on(xe[j], j);
          float c = on ? s[k].p[j] : s[k].off;
          float after = j + 1 < E ? ge[j + 1 < E ? j + 1 : 0] : g1[u] * factor;
          float afterThat = j + 2 < E ? ge[j + 2 < E ? j + 2 : 0] : (j + 1 < E ? g1[u] : g2[u]) * factor;
          if (s[k].neighbours) {  // else the coefficients are 0, and what they multiply may be NaN
            out[j] = fmaf(c, ge[j], fmaf(s[k].r1, after, s[k].r2 * afterThat));
            float before = j > 0 ? xe[j > 0 ? j - 1 : 0] : x1[u];
            float beforeThat = j > 1 ? xe[j > 1 ? j - 2 : 0] : j > 0 ? x1[u] : x2[u];
            d1[k] = fmaf(ge[j], before, d1[k]), d2[k] = fmaf(ge[j], beforeThat, d2[k]);
          } else {
            out[j] = c * ge[j];
          }
          acc[k * E + j] = fmaf(ge[j], residual[k] ? 1.0f : on ? xe[j] : 0.0f, acc[k * E + j]);
        }
        if (s[k].strict)
#pragma unroll
          for (int j = 0; j < E; j++)
            if (s[k].bites(xv[u].get(k * E + j), l.eps)) out[j] = 0;
#pragma unroll
        for (int j = 0; j < E; j++) out[j] = s[k].blends ? out[j] : ge[j];
        if (s[k].blends || clip) setPart(gv[u], k * E, out);
      }
      store(dx + (row + u * lanes) * d, gv[u]);
    }
    if (watch)
#pragma unroll
      for (int k = 0; k < G; k++) {
        m[k].add(s1[k], s2[k], float(seen[k]));
        if (whole) norms[k].add(n1[k], n2[k], float(normed[k]));
      }
  };

  int64_t row = lane;
  for (; row + (kInFlight - 1) * lanes < l.rows; row += kInFlight * lanes) rows(Int<kInFlight>{}, row);
  for (; row < l.rows; row += lanes) rows(Int<1>{}, row);

  float* mine = sums + lane * (d + 2 * units);
  store(mine + col, *reinterpret_cast<Pack<float, N>*>(acc));
#pragma unroll
  for (int k = 0; k < G; k++) {
    int unit = col / E + k;
    mine[d + unit] = d1[k], mine[d + units + unit] = d2[k];
    if (lost[k] > 0) atomicAdd(bad + seed + k, lost[k]);  // of integers, so in any order
    if (clips[k] > 0) atomicAdd(clipped + seed + k, clips[k]);
    if (watch) {
      Partials out{partial, lanes * units, lane * units + unit};
      out.put(kMean, m[k]);
      out[kTop] = top[k];
      out.put(kNorms, norms[k]);
    }
  }
}

// total[i] = Σ_lanes sums[lane, i]. Launch: 32 columns a block, 32 by 32 threads.
__device__ __forceinline__ void addLanes(float* total, const float* sums, int lanes, int64_t columns) {
  __shared__ float tile[kWarp][kWarp + 1];
  int64_t i = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (i < columns)
    for (int b = threadIdx.y; b < lanes; b += kWarp) sum += sums[b * columns + i];
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warpReduce<Sum>(tile[threadIdx.x][threadIdx.y]);
  i = int64_t(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && i < columns) total[i] = sum;
}

// Figures [6, seeds] from the partials: norm, variance, largest magnitude; mean, variance and number of the rows' norms, if
// whole. Launch: as kasmina_merge.
__device__ __forceinline__ void merge(float* figures, float* partial, int lanes, int units, int seeds, int whole) {
  struct Gradient {
    Moments m, norms;
    float top;
  };
  __shared__ Gradient shared[256];
  int seed = blockIdx.x * blockDim.x + threadIdx.x, each = units / seeds;
  Gradient h{{}, {}, 0};
  if (seed < seeds)
    for (int64_t i = threadIdx.y; i < int64_t(lanes) * each; i += blockDim.y) {
      Partials p{partial, int64_t(lanes) * units, i / each * units + int64_t(seed) * each + i % each};
      h.m.merge(p.moments(kMean));
      if (whole) h.norms.merge(p.moments(kNorms));
      h.top = fmaxf(h.top, p[kTop]);
    }
  auto mine = [&](int y) -> Gradient& { return shared[y * blockDim.x + threadIdx.x]; };
  mine(threadIdx.y) = h;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    Gradient& a = mine(threadIdx.y);
    const Gradient& b = mine(threadIdx.y + half);
    a.m.merge(b.m), a.norms.merge(b.norms), a.top = fmaxf(a.top, b.top);
  }
  if (seed >= seeds || threadIdx.y > 0) return;
  h = mine(0);
  const float out[6] = {float(h.m.norm()),       float(h.m.variance()),     h.top,
                        float(h.norms.mean), float(h.norms.variance()), float(h.norms.n)};
  for (int i = 0; i < (whole ? 6 : 3); i++) figures[int64_t(i) * seeds + seed] = out[i];
}

// Slot is the seeds of a slot that learn: order[heads[slot]] to order[heads[slot + 1] − 1], in their order. total holds the
// sums over rows. Launch: gridDim.x slots, gridDim.y tiles of 32 columns; 32 columns by up to 32 seeds at once a block.
__device__ __forceinline__ void gatherSlot(const Layer& l, float* dweights, float* dscales, const float* total, const int* heads,
                                           const int* order, int units) {
  __shared__ double dw[kWarp][kWarp], da[kWarp];
  const int slot = blockIdx.x, lane = threadIdx.x, c = l.chunk, col = blockIdx.y * kWarp + lane, each = units / l.seeds;
  const int64_t d = int64_t(l.seeds) * c;
  const float* w = l.weights + int64_t(slot) * c;
  auto warpSum = [](double v) {
    for (int k = kWarp / 2; k > 0; k /= 2) v += __shfl_xor_sync(kAllLanes, v, k);
    return v;
  };
  double top = -INFINITY, by = 0;  // of the slot's softmax
  for (int i = lane; i < c; i += kWarp) top = fmax(top, double(w[i]));
  for (int k = kWarp / 2; k > 0; k /= 2) top = fmax(top, __shfl_xor_sync(kAllLanes, top, k));
  for (int i = lane; i < c; i += kWarp) by += exp(double(w[i]) - top);
  by = 1 / warpSum(by);

  double weight = 0, scale = 0;  // scale: of this lane alone
  for (int i = heads[slot] + threadIdx.y; i < heads[slot + 1]; i += blockDim.y) {
    int seed = order[i];
    Kind kind = Word{l.word[seed]}.kind();
    double beta = l.alpha[seed], a = l.scales[slot];
    if (beta == 0) continue;
    const float *sum = total + int64_t(seed) * c, *tap1 = total + d + int64_t(seed) * each, *tap2 = tap1 + units;
    if (kind == kConvFilter) {
      double taps[3] = {};
      for (int j = lane; j < c; j += kWarp) taps[0] += sum[j];
      for (int j = lane; j < each; j += kWarp) taps[1] += tap1[j], taps[2] += tap2[j];
#pragma unroll
      for (int k = 0; k < 3; k++) {
        taps[k] = warpSum(taps[k]);
        if (k >= c) continue;
        if (col == k) weight += beta * a * taps[k];
        if (lane == 0) scale += beta * w[k] * taps[k];
      }
      continue;
    }
    double dot = 0;
    for (int j = lane; j < c; j += kWarp) dot += sum[j] * (kind == kAttentionGate ? exp(w[j] - top) * by : double(w[j]));
    scale += beta * dot;
    if (kind == kAttentionGate) dot = warpSum(dot);
    if (col >= c) continue;
    if (kind == kAttentionGate) weight += beta * a * exp(w[col] - top) * by * (sum[col] - dot);
    else weight += beta * a * sum[col];
  }
  scale = warpSum(scale);
  dw[threadIdx.y][lane] = weight;
  if (lane == 0) da[threadIdx.y] = scale;
  __syncthreads();
  if (threadIdx.y > 0) return;
  for (int k = 1; k < blockDim.y; k++) weight += dw[k][lane], scale += da[k];
  if (col < c) dweights[int64_t(slot) * c + col] = float(weight);
  if (col == 0) dscales[slot] = float(scale);
}

#define DEFINE_SHAPE(shape, T, N, E, whole)                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                         \
      kasmina_backward_##shape##_##T(Layer l, T* dx, const T* g, const T* x, const float* scale, float* sums,  \
                                     float* partial, uint32_t* bad, uint32_t* clipped) {                       \
    backward<T, N, E, whole, true>(l, dx, g, x, scale, sums, partial, bad, clipped);                           \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                         \
      kasmina_backward_quiet_##shape##_##T(Layer l, T* dx, const T* g, const T* x, const float* scale,         \
                                           float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {    \
    backward<T, N, E, whole, false>(l, dx, g, x, scale, sums, partial, bad, clipped);                          \
  }
#define DEFINE(T) FOR_SHAPES(DEFINE_SHAPE, T)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_SHAPE

extern "C" __global__ void __launch_bounds__(1024) kasmina_total(float* total, const float* sums, int lanes, int64_t columns) {
  addLanes(total, sums, lanes, columns);
}

extern "C" __global__ void __launch_bounds__(256)
    kasmina_gradient_merge(float* figures, float* partial, int lanes, int units, int seeds, int whole) {
  merge(figures, partial, lanes, units, seeds, whole);
}

extern "C" __global__ void __launch_bounds__(1024)
    kasmina_slots(Layer l, float* dweights, float* dscales, const float* total, const int* heads, const int* order, int units) {
  gatherSlot(l, dweights, dscales, total, heads, order, units);
}
