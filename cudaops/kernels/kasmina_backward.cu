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

constexpr float kLargestSquared = 1e18f;  // of a gradient whose squares are summed up in float32
enum GradientFigure { kMean, kTop = 4, kNorms, kGradientFigures = 9 };

// Seen is what a lane has seen of a seed's gradients.
template <class T, int E> struct Seen {
  Running m, norms;
  float s1, s2, n, n1, n2, normed;  // of a group of rows
  Most<T, E> top;

  __device__ __forceinline__ void init() {
    if constexpr (inPairs<T, E>) top = pairOf<T>(0);
    else top = 0;
    clear();
  }
  __device__ __forceinline__ void clear() { s1 = s2 = n = n1 = n2 = normed = 0; }
  __device__ __forceinline__ void add(const float (&g)[E], Most<T, E> most) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float d = g[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2);
    }
    n += E;
    if constexpr (inPairs<T, E>) top = __hmax2(top, most);
    else top = fmaxf(top, most);
  }
  __device__ __forceinline__ void addFinite(float g) {
    float d = g - m.k;
    s1 += d, s2 = fmaf(d, d, s2), n++;
    if constexpr (inPairs<T, E>) top = __hmax2(top, pairOf<T>(fabsf(g)));
    else top = fmaxf(top, fabsf(g));
  }
  __device__ __forceinline__ void addNorm(float norm) {
    float d = norm - norms.k;
    n1 += d, n2 = fmaf(d, d, n2), normed++;
  }
  __device__ __forceinline__ void group() {
    m.add(s1, s2, n), norms.add(n1, n2, normed);
    clear();
  }
  __device__ __forceinline__ void put(const Partials& out) const {
    out.put(kMean, m), out.put(kNorms, norms);
    if constexpr (inPairs<T, E>) out[kTop] = fmaxf(__low2float(top), __high2float(top));
    else out[kTop] = top;
  }
};

__device__ __forceinline__ float squareRoot(float v) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// differentiate gives what reaches a seed's inputs x from the gradients g, and adds to the sums over rows. g1 and g2 are
// the gradients behind, x1 and x2 the inputs before, unless the chunk is whole.
template <bool careful, bool whole, int E>
__device__ __forceinline__ void differentiate(float (&dx)[E], float* acc, float& d1, float& d2, const float (&g)[E],
                                              const float (&x)[E], float g1, float g2, float x1, float x2, const Seed<E>& s,
                                              bool residual) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    bool on = s.on(x[j], j);
    float sum = 0;
    if (!whole || j + 2 < E) sum = addTerm<careful>(s.r2, j + 2 < E ? g[j + 2 < E ? j + 2 : 0] : j + 1 < E ? g1 : g2, sum);
    if (!whole || j + 1 < E) sum = addTerm<careful>(s.r1, j + 1 < E ? g[j + 1 < E ? j + 1 : 0] : g1, sum);
    dx[j] = addTerm<careful>(on ? s.p[j] : s.off, g[j], sum);
    if (!whole || j > 0) d1 = fmaf(g[j], j > 0 ? x[j > 0 ? j - 1 : 0] : x1, d1);
    if (!whole || j > 1) d2 = fmaf(g[j], j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, d2);
    acc[j] = fmaf(g[j], residual ? 1.0f : on ? x[j] : 0.0f, acc[j]);
  }
}

// share is how many threads share a chunk and form its norm, a power of two, or 0 where they do not; then scale
// [rows, seeds] holds the factors that clip, or is null for none. Launch: as forward, with twice the shared memory.
template <class T, int N, int E, bool whole, bool watch>
__device__ __forceinline__ void backward(const Layer& l, T* dx, const T* g, const T* x, int share, const float* scale,
                                         float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {
  constexpr int G = N / E;
  extern __shared__ uint4 shared[];
  const int d = l.seeds * l.chunk, units = d / E;
  Lane lane(N);
  if (!lane.find(d)) return;
  const int col = lane.col, seed = col / l.chunk, at = whole ? 0 : col % l.chunk, count = lane.rows(l.rows);
  const int64_t step = lane.count * d;
  x += lane.index * d + col, g += lane.index * d + col, dx += lane.index * d + col;
  Neighbours<T, N> neighbours(lane, at, l.chunk);
  const bool norm = whole || share > 0, leads = at == 0;
  const float large = greatest<T>(kLargestSquared);

  Seed<E> s[G];
  Seen<T, E> h[G];
  bool residual[G];
  float acc[N] = {}, d1[G] = {}, d2[G] = {};
  uint32_t lost[G] = {}, clips[G] = {};
#pragma unroll
  for (int k = 0; k < G; k++) {
    s[k].init(l, seed + k, at);
    h[k].init();
    residual[k] = Word{l.word[seed + k]}.kind() == kResidual;
    if (watch && count > 0) {
      float q = 0;
#pragma unroll
      for (int j = E - 1; j >= 0; j--) {
        float v = toFloat(g[k * E + j]);
        if (finite(v)) h[k].m.k = v, q = fmaf(v, v, q);
      }
      if (!whole && share > 1) q = sumOver(q, share, lane.peers);
      if (q <= FLT_MAX) h[k].norms.k = squareRoot(q);
    }
  }
  if (scale) scale += lane.index * l.seeds + seed;

  Rows<T, N, 2> rows(shared, step, count);
  rows.p[0] = g, rows.p[1] = x;
  rows.start();
  auto row = [&](auto n, int u) {
    Pack<T, N> in[2];
    rows.template next<decltype(n)::value>(u, in);
    Pack<T, N>&gv = in[0], &xv = in[1];
    float x1 = 0, x2 = 0, g1 = 0, g2 = 0, by = 1;
    if (!whole) {
      neighbours.before(xv, x, x1, x2);
      neighbours.behind(gv, g, g1, g2);
      if (scale) by = *scale, scale += lane.count * l.seeds;
    }
#pragma unroll
    for (int k = 0; k < G; k++) {
      float ge[E], xe[E], out[E];
      unpack(ge, gv, k * E);
      unpack(xe, xv, k * E);
      Most<T, E> most = mostOf<E>(gv, k * E);
      bool fine = within<T, E>(most, large), huge = false, some = true;
      if (!whole) fine = fine && fabsf(g1) <= large && fabsf(g2) <= large;
      if (fine) {
        if (watch) h[k].add(ge, most);
      } else {
        some = false;
#pragma unroll
        for (int j = 0; j < E; j++) {
          if (!finite(ge[j])) {
            lost[k]++;
            continue;
          }
          some = true, huge = huge || fabsf(ge[j]) > kLargestSquared;
          if (watch) h[k].addFinite(ge[j]);
        }
      }
      if (norm && (watch || l.limit)) {
        const bool together = !whole && share > 1;  // with the threads that share the chunk
        bool any = some;
        if (together && __any_sync(lane.peers, !fine)) {
          huge = __any_sync(lane.peers, huge);
          any = sumOver(some, share, lane.peers) > 0;
        }
        float q = 0, down = huge ? 0x1p-66f : 1;
        if (fine && !huge) {
#pragma unroll
          for (int j = 0; j < E; j++) q = fmaf(ge[j], ge[j], q);
        } else {
#pragma unroll
          for (int j = 0; j < E; j++)
            if (finite(ge[j])) q = fmaf(ge[j] * down, ge[j] * down, q);
        }
        if (together) q = sumOver(q, share, lane.peers);
        float length = squareRoot(q) / down;
        if (watch && leads && any) h[k].addNorm(length);
        if (l.limit) {
          by = fminf(l.limit[seed + k] / (length + l.eps), 1.0f);
          clips[k] += leads && by < 1;
        }
      }
      if (by < 1) {
#pragma unroll
        for (int j = 0; j < E; j++) ge[j] *= by;
      }
      float xs[E], x1s = x1, x2s = x2;
#pragma unroll
      for (int j = 0; j < E; j++) xs[j] = xe[j];
      if (l.strict) {
        Strict strict(l, seed + k, s[k].active);
#pragma unroll
        for (int j = 0; j < E; j++) xs[j] = strict(xe[j]);
        x1s = at > 0 ? strict(x1) : 0, x2s = at > 1 ? strict(x2) : 0;
      }
      if (fine) differentiate<false, whole>(out, acc + k * E, d1[k], d2[k], ge, xs, g1 * by, g2 * by, x1s, x2s, s[k], residual[k]);
      else differentiate<true, whole>(out, acc + k * E, d1[k], d2[k], ge, xs, g1 * by, g2 * by, x1s, x2s, s[k], residual[k]);
      if (l.strict) {
        Strict strict(l, seed + k, s[k].active);
#pragma unroll
        for (int j = 0; j < E; j++)
          if (strict.bites(xe[j])) out[j] = 0;
      }
      if (s[k].blends) setPart(gv, k * E, out);
      else if (by < 1) setPart(gv, k * E, ge);
    }
    store(dx, gv);
    x += step, g += step, dx += step;
  };
  auto group = [&] {
    if (watch)
#pragma unroll
      for (int k = 0; k < G; k++) h[k].group();
  };
  walk<Rows<T, N, 2>::ahead>(count, row, group);

  float* mine = sums + lane.index * (d + 2 * units);
  store(mine + col, *reinterpret_cast<Pack<float, N>*>(acc));
#pragma unroll
  for (int k = 0; k < G; k++) {
    int unit = col / E + k;
    mine[d + unit] = d1[k], mine[d + units + unit] = d2[k];
    if (lost[k] > 0) atomicAdd(bad + seed + k, lost[k]);  // of integers, so in any order
    if (clips[k] > 0) atomicAdd(clipped + seed + k, clips[k]);
    if (watch) h[k].put({partial, lane.count * units, lane.index * units + unit});
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

// Figures [6, seeds] from the partials: norm, variance, largest magnitude; if there are norms, their mean, variance and
// number. Launch: as kasmina_merge.
__device__ __forceinline__ void merge(float* figures, float* partial, int lanes, int units, int seeds, int norms) {
  struct Share {
    Sums m, norms;
    float top;
  };
  __shared__ Share shared[256];
  int seed = blockIdx.x * blockDim.x + threadIdx.x, each = units / seeds;
  Share h{{}, {}, 0};
  double pivot = 0, middle = 0;
  if (seed < seeds) {
    Partials p{partial, int64_t(lanes) * units, int64_t(seed) * each};
    pivot = p[kMean], middle = p[kNorms];
    for (int lane = threadIdx.y; lane < lanes; lane += blockDim.y)
#pragma unroll 4
      for (int k = 0; k < each; k++) {
        p.at = int64_t(lane) * units + int64_t(seed) * each + k;
        h.m.add(p, kMean, pivot), h.norms.add(p, kNorms, middle);
        h.top = fmaxf(h.top, p[kTop]);
      }
  }
  auto mine = [&](int y) -> Share& { return shared[y * blockDim.x + threadIdx.x]; };
  mine(threadIdx.y) = h;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    Share& a = mine(threadIdx.y);
    const Share& b = mine(threadIdx.y + half);
    a.m.add(b.m), a.norms.add(b.norms), a.top = fmaxf(a.top, b.top);
  }
  if (seed >= seeds || threadIdx.y > 0) return;
  h = mine(0);
  Moments m = h.m.moments(pivot), n = h.norms.moments(middle);
  const float out[6] = {float(m.norm()), float(m.variance()), h.top, float(n.mean), float(n.variance()), float(n.n)};
  for (int i = 0; i < (norms ? 6 : 3); i++) figures[int64_t(i) * seeds + seed] = out[i];
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
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                         \
      kasmina_backward_##shape##_##T(Layer l, T* dx, const T* g, const T* x, int share, const float* scale,    \
                                     float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {                       \
    backward<T, N, E, whole, true>(l, dx, g, x, share, scale, sums, partial, bad, clipped);                           \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                         \
      kasmina_backward_quiet_##shape##_##T(Layer l, T* dx, const T* g, const T* x, int share, const float* scale, \
                                           float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {    \
    backward<T, N, E, whole, false>(l, dx, g, x, share, scale, sums, partial, bad, clipped);                          \
  }
#define DEFINE(T) FOR_SHAPES(DEFINE_SHAPE, T)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_SHAPE

extern "C" __global__ void __launch_bounds__(1024) kasmina_total(float* total, const float* sums, int lanes, int64_t columns) {
  addLanes(total, sums, lanes, columns);
}

extern "C" __global__ void __launch_bounds__(256)
    kasmina_gradient_merge(float* figures, float* partial, int lanes, int units, int seeds, int norms) {
  merge(figures, partial, lanes, units, seeds, norms);
}

extern "C" __global__ void __launch_bounds__(1024)
    kasmina_slots(Layer l, float* dweights, float* dscales, const float* total, const int* heads, const int* order, int units) {
  gatherSlot(l, dweights, dscales, total, heads, order, units);
}
