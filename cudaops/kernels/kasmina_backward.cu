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
  static constexpr bool pairs = inPairs<T, E>;
  Running m, norms;
  float s1, s2, n1, n2, normed;  // of a group of rows
  Wide<T, E> top;

  __device__ __forceinline__ void init() {
    if constexpr (pairs) top = pairOf<T>(0);
    else top = 0;
    clear();
  }
  __device__ __forceinline__ void clear() { s1 = s2 = n1 = n2 = normed = 0; }
  __device__ __forceinline__ void add(const float* g, const Wide<T, E>* magnitude) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float d = g[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2);
    }
#pragma unroll
    for (int j = 0; j < (pairs ? E / 2 : E); j++) {
      if constexpr (pairs) top = __hmax2(top, magnitude[j]);
      else top = fmaxf(top, magnitude[j]);
    }
  }
  __device__ __forceinline__ void addFinite(float g) {
    float d = g - m.k;
    s1 += d, s2 = fmaf(d, d, s2);
    if constexpr (pairs) top = __hmax2(top, pairOf<T>(fabsf(g)));
    else top = fmaxf(top, fabsf(g));
  }
  __device__ __forceinline__ void addNorm(float norm) {
    float d = norm - norms.k;
    n1 += d, n2 = fmaf(d, d, n2), normed++;
  }
  __device__ __forceinline__ void group(int n) {
    m.add(s1, s2, float(n)), norms.add(n1, n2, normed);
    clear();
  }
  __device__ __forceinline__ void put(const Partials& out) const {
    out.put(kMean, m), out.put(kNorms, norms);
    if constexpr (pairs) out[kTop] = fmaxf(__low2float(top), __high2float(top));
    else out[kTop] = top;
  }
};

__device__ __forceinline__ float squareRoot(float v) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// differentiate gives what reaches a seed's inputs x from the gradients g, and adds to the sums over rows. g1 and g2 are
// the gradients behind, x1 and x2 the inputs before, unless the chunk is whole. For Residual, whose sums are of g alone, x
// is 1.
template <bool careful, bool whole, int E>
__device__ __forceinline__ void differentiate(float (&dx)[E], float* acc, float& d1, float& d2, const float* g, const float* x,
                                              float g1, float g2, float x1, float x2, const Seed<E>& s) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    bool on = s.on(x[j], j);
    float sum = 0;
    if (!whole || j + 2 < E) sum = addTerm<careful>(s.r2, j + 2 < E ? g[j + 2 < E ? j + 2 : 0] : j + 1 < E ? g1 : g2, sum);
    if (!whole || j + 1 < E) sum = addTerm<careful>(s.r1, j + 1 < E ? g[j + 1 < E ? j + 1 : 0] : g1, sum);
    dx[j] = addTerm<careful>(on ? s.p[j] : s.off, g[j], sum);
    if (!whole || j > 0) d1 = fmaf(g[j], j > 0 ? x[j > 0 ? j - 1 : 0] : x1, d1);
    if (!whole || j > 1) d2 = fmaf(g[j], j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, d2);
    acc[j] = fmaf(g[j], on ? x[j] : 0.0f, acc[j]);
  }
}

// ones makes E elements of a pack 1, from element at on, if wanted.
template <int E, class T, int N> __device__ __forceinline__ void ones(Pack<T, N>& v, int at, bool wanted) {
  if constexpr (inPairs<T, E>) {
    const Pair<T> one = pairOf<T>(1);
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      uint32_t& word = *reinterpret_cast<uint32_t*>(&v.v[at + j]);
      word = wanted ? *reinterpret_cast<const uint32_t*>(&one) : word;
    }
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) v.v[at + j] = wanted ? fromFloat<T>(1) : v.v[at + j];
  }
}

// share is how many threads share a chunk and form its norm, a power of two, or 0 where they do not; then scale
// [rows, seeds] holds the factors that clip, or is null for none. partial [kGradientFigures, lanes, units] may be null in the
// strict mode. Launch: as forward, with twice the shared memory.
template <class T, int N, int E, bool whole, Mode mode>
__device__ __forceinline__ void backward(const Layer& l, T* dx, const T* g, const T* x, int share, const float* scale,
                                         float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {
  constexpr int G = N / E;
  extern __shared__ uint4 shared[];
  const bool watch = mode == kWatch || mode == kStrict && partial;
  const int d = l.seeds * l.chunk, units = d / E;
  Lane lane(N);
  if (!lane.find(d)) return;
  const int col = lane.col, seed = col / l.chunk, at = whole ? 0 : col % l.chunk, count = lane.rows(l.rows);
  const int64_t step = lane.count * d;
  x += lane.index * d + col, g += lane.index * d + col, dx += lane.index * d + col;
  Rows<T, N, 2> rows(shared, step, count);
  rows.p[0] = g, rows.p[1] = x;
  rows.start();

  Neighbours<T, N> neighbours(lane, at, l.chunk);
  const bool norm = whole || share > 0, leads = at == 0;
  const float large = greatest<T>(kLargestSquared);
  Seed<E> s[G];
  Seen<T, E> h[G];
  bool residual[G];
  float acc[N] = {}, d1[G] = {}, d2[G] = {};
  int lost[G] = {}, counted[G] = {};  // non-finite elements, and those of them that are already in m
  uint32_t clips[G] = {};
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

  auto row = [&](auto n, int u) {
    Pack<T, N> in[2];
    rows.template next<decltype(n)::value>(u, in);
    Pack<T, N>&gv = in[0], &xv = in[1], strictX;
    float x1 = 0, x2 = 0, g1 = 0, g2 = 0, rowScale = 1;
    if (!whole) {
      neighbours.before(xv, x, x1, x2);
      neighbours.behind(gv, g, g1, g2);
      if (scale) rowScale = *scale, scale += lane.count * l.seeds;
    }
    if (mode == kStrict) strictX = xv;
#pragma unroll
    for (int k = 0; k < G; k++) ones<E>(xv, k * E, residual[k]);
    float ge[N], xe[N];
    unpack(ge, gv, 0);
    unpack(xe, xv, 0);
    Magnitudes<T, N> magnitudes(gv);
    bool fine = magnitudes.within(large);
    if (!whole) fine = fine && fabsf(g1) <= large && fabsf(g2) <= large;
#pragma unroll
    for (int k = 0; k < G; k++) {
      bool huge = false, some = true;
      float by = rowScale;
      if (fine) {
        if (watch) h[k].add(ge + k * E, magnitudes.v + k * (magnitudes.words / G));
      } else {
        some = false;
#pragma unroll
        for (int j = 0; j < E; j++) {
          float v = ge[k * E + j];
          if (!finite(v)) {
            lost[k]++;
            continue;
          }
          some = true, huge = huge || fabsf(v) > kLargestSquared;
          if (watch) h[k].addFinite(v);
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
          for (int j = 0; j < E; j++) q = fmaf(ge[k * E + j], ge[k * E + j], q);
        } else {
#pragma unroll
          for (int j = 0; j < E; j++)
            if (finite(ge[k * E + j])) q = fmaf(ge[k * E + j] * down, ge[k * E + j] * down, q);
        }
        if (together) q = sumOver(q, share, lane.peers);
        float length = squareRoot(q);
        if (huge) length /= down;
        if (watch && leads && any) h[k].addNorm(length);
        if (l.limit) {
          by = fminf(l.limit[seed + k] / (length + l.eps), 1.0f);
          clips[k] += leads && by < 1;
        }
      }
      if (by < 1) {
#pragma unroll
        for (int j = 0; j < E; j++) ge[k * E + j] *= by;
      }
      float out[E], b1 = x1, b2 = x2;
      if (mode == kStrict) {
        Strict strict(l, seed + k, s[k].active);
#pragma unroll
        for (int j = 0; j < E; j++)
          if (!residual[k]) xe[k * E + j] = strict(xe[k * E + j]);
        b1 = at > 0 ? strict(x1) : 0, b2 = at > 1 ? strict(x2) : 0;
      }
      const float *gk = ge + k * E, *xk = xe + k * E;
      if (fine) differentiate<false, whole>(out, acc + k * E, d1[k], d2[k], gk, xk, g1 * by, g2 * by, b1, b2, s[k]);
      else differentiate<true, whole>(out, acc + k * E, d1[k], d2[k], gk, xk, g1 * by, g2 * by, b1, b2, s[k]);
      if (mode == kStrict) {
        Strict strict(l, seed + k, s[k].active);
#pragma unroll
        for (int j = 0; j < E; j++)
          if (strict.bites(strictX.get(k * E + j))) out[j] = 0;
      }
      if (by < 1) {
#pragma unroll
        for (int j = 0; j < E; j++) out[j] = s[k].blends ? out[j] : gk[j];
      }
      if (s[k].blends || by < 1) setPart(gv, k * E, out);
    }
    store(dx, gv);
    x += step, g += step, dx += step;
  };
  auto group = [&](int n) {
    if (watch)
#pragma unroll
      for (int k = 0; k < G; k++) h[k].group(n * E - lost[k] + counted[k]), counted[k] = lost[k];
  };
  walk<Rows<T, N, 2>::ahead>(count, row, group);

  float* mine = sums + lane.index * (d + 2 * units);
  store(mine + col, *reinterpret_cast<Pack<float, N>*>(acc));
#pragma unroll
  for (int k = 0; k < G; k++) {
    int unit = col / E + k;
    mine[d + unit] = d1[k], mine[d + units + unit] = d2[k];
    if (lost[k] > 0) atomicAdd(bad + seed + k, uint32_t(lost[k]));  // of integers, so in any order
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
  __shared__ Share shared[kMergeThreads];
  int seed = blockIdx.x * blockDim.x + threadIdx.x, each = units / seeds;
  Share h{{}, {}, 0};
  double pivot = 0, middle = 0;
  if (seed < seeds) {
    Partials p{partial, int64_t(lanes) * units, int64_t(seed) * each};
    pivot = p[kMean], middle = p[kNorms];
#pragma unroll 4
    for (int i = threadIdx.y; i < lanes * each; i += blockDim.y) {
      p.at = int64_t(i / each) * units + int64_t(seed) * each + i % each;
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
  float top = -INFINITY, by = 0;  // of the slot's softmax, from the first seed on that needs it
  auto softmax = [&](int i) { return expf(w[i] - top) * by; };

  double weight = 0, scale = 0;  // scale: of this lane alone
  for (int i = heads[slot] + threadIdx.y; i < heads[slot + 1]; i += blockDim.y) {
    int seed = order[i];
    Word word{l.word[seed]};
    Kind kind = word.kind();
    double beta = l.alpha[seed], a = l.scales[slot];
    if (beta == 0 || !word.known()) continue;
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
    if (kind == kAttentionGate && by == 0) {
      for (int j = lane; j < c; j += kWarp) top = fmaxf(top, w[j]);
      top = warpReduce<Max>(top);
      float exps = 0;
      for (int j = lane; j < c; j += kWarp) exps += expf(w[j] - top);
      by = 1 / warpReduce<Sum>(exps);
    }
    double dot = 0;
    for (int j = lane; j < c; j += kWarp) dot += double(sum[j]) * (kind == kAttentionGate ? softmax(j) : w[j]);
    scale += beta * dot;
    if (kind == kAttentionGate) dot = warpSum(dot);
    if (col >= c) continue;
    if (kind == kAttentionGate) weight += beta * a * softmax(col) * (sum[col] - dot);
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

#define DEFINE_MODE(mode, name, T, N, E, whole)                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                     \
      kasmina_backward_##name##_##T(Layer l, T* dx, const T* g, const T* x, int share, const float* scale,      \
                                    float* sums, float* partial, uint32_t* bad, uint32_t* clipped) {            \
    backward<T, N, E, whole, mode>(l, dx, g, x, share, scale, sums, partial, bad, clipped);                     \
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

extern "C" __global__ void __launch_bounds__(1024) kasmina_total(float* total, const float* sums, int lanes, int64_t columns) {
  addLanes(total, sums, lanes, columns);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    kasmina_gradient_merge(float* figures, float* partial, int lanes, int units, int seeds, int norms) {
  merge(figures, partial, lanes, units, seeds, norms);
}

extern "C" __global__ void __launch_bounds__(1024)
    kasmina_slots(Layer l, float* dweights, float* dscales, const float* total, const int* heads, const int* order, int units) {
  gatherSlot(l, dweights, dscales, total, heads, order, units);
}
