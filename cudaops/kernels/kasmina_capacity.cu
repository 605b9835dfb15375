// The kinds of blueprint that mix the features of a chunk, in layers whose slots have room for them. In a slot's row of width
// weights stand V [m, C] and U [C, m], with m = width / 2C. For the rows X [n, C] of a seed's chunk, a the slot's scale, α the
// seed's blending weight and f(z) = z (LowRank) or z·σ(z) (ChunkMLP),
//
//   Z = X·Vᵀ,  H = a·f(Z),  Y = X + α·H·Uᵀ
//
// and backward, with G the gradient of Y, clipped,
//
//   Q = α·G·U,  dZ = a·Q ⊙ f'(Z),  dX = G + dZ·V,  dV = dZᵀ·X,  dU = α·Gᵀ·H,  da = Σ Q ⊙ f(Z)
//
// The kernels of kasmina.cu and kasmina_backward.cu see such seeds as dormant: they measure, clip and pass through. These
// ones then write what is different. Blocks take (seed, part of the rows) from the list that the host keeps in the lattice's
// mirror, so that a captured graph serves whatever seeds are there; without any, they end at once. A block holds U and V in
// shared memory if they fit, and works on some rows at a time. Gradients are summed in registers over a part's rows, and
// over the parts and a slot's seeds in their order.
#include "common.cuh"

enum Kind : uint32_t { kLowRank = 4, kChunkMLP = 5 };

constexpr int kBlock = 256;

// Mixing describes a layer. state is the number of seeds in the list; the list, which is of seeds; of each, its kind in bits
// 0 to 7, whether it blends in bit 8 and learns in bit 9, and its slot from bit 16 on; and of each slot, where its seeds
// that learn begin in what follows: positions in the list.
struct Mixing {
  const uint32_t* state;
  const float* alpha;      // of each seed, as the others
  const float *low, *high; // clamp limits of the strict mode
  const float* limit;      // of a row's gradient norm; null for none
  const float *weights, *scales;
  int64_t rows;
  int seeds, slots, chunk, m, width;
  int tile, parts;  // rows at a time; parts of the rows
  int resident;     // U and V are copied to shared memory
  int strict;
  float eps;
  float large;  // rows of LowRank beyond it are evaluated scaled down

  __device__ int count() const { return int(state[0]); }
  __device__ const uint32_t* heads() const { return state + 1 + 2 * seeds; }
  __device__ const uint32_t* order() const { return heads() + slots + 1; }
  __device__ int64_t columns() const { return int64_t(seeds) * chunk; }
};

// Seed is a member of the list.
struct Seed {
  int seed, slot;
  uint32_t kind;
  bool blends, learns;
  float alpha, scale, low, high;

  __device__ Seed(const Mixing& l, int at) {
    uint32_t word = l.state[1 + l.seeds + at];
    seed = l.state[1 + at], slot = word >> 16, kind = word & 0xff, blends = word >> 8 & 1, learns = word >> 9 & 1;
    alpha = l.alpha[seed], scale = l.scales[slot];
    low = l.low[seed], high = l.high[seed];
  }
  // clamp is what the strict mode does to x; bites is whether the result does not depend on x.
  __device__ float clamp(float x, float eps) const {
    if (fabsf(x) < eps) x = 0;
    if (x < low) x = low;
    if (x > high) x = high;
    return x;
  }
  __device__ bool bites(float x, float eps) const { return fabsf(x) < eps || x < low || x > high; }
};

// Matrix is in shared or global memory: element (i, j) at p[i·step + j].
struct Matrix {
  float* p;
  int step;
  __device__ float& operator()(int i, int j) const { return p[i * step + j]; }
};

// Arena hands out shared memory. An odd step keeps the rows of a column in different banks.
struct Arena {
  float* next;
  __device__ Matrix matrix(int rows, int columns) {
    Matrix m{next, columns | 1};
    next += rows * m.step;
    return m;
  }
};

// ---- Products of small matrices by a block ----

// Tile is a thread's share of an I×J product: elements (i + u·down, j + v·across), 4×4 of them.
struct Tile {
  int i, j, down, across;
  __device__ Tile(int I, int J, int index) {
    down = (I + 3) / 4, across = (J + 3) / 4;
    i = index / across, j = index % across;
  }
  __device__ static int number(int I, int J) { return (I + 3) / 4 * ((J + 3) / 4); }
};

// addProduct adds Σ_k a[i·ai + k·ak]·b[j·bj + k·bk] to a tile's elements, over k from first on in steps.
__device__ __forceinline__ void addProduct(float (&sum)[4][4], const Tile& t, const float* a, int ai, int ak, const float* b, int bj,
                                           int bk, int I, int J, int first, int K, int step) {
  int ia[4], jb[4];
#pragma unroll
  for (int u = 0; u < 4; u++) ia[u] = min(t.i + u * t.down, I - 1) * ai, jb[u] = min(t.j + u * t.across, J - 1) * bj;
#pragma unroll 4
  for (int k = first; k < K; k += step) {
    float x[4], y[4];
#pragma unroll
    for (int u = 0; u < 4; u++) x[u] = a[ia[u] + k * ak], y[u] = b[jb[u] + k * bk];
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
      for (int v = 0; v < 4; v++) sum[u][v] = fmaf(x[u], y[v], sum[u][v]);
  }
}

// each calls f(i, j, sum) for a tile's elements.
template <class F> __device__ __forceinline__ void each(const float (&sum)[4][4], const Tile& t, int I, int J, F f) {
#pragma unroll
  for (int u = 0; u < 4; u++)
#pragma unroll
    for (int v = 0; v < 4; v++)
      if (int i = t.i + u * t.down, j = t.j + v * t.across; i < I && j < J) f(i, j, sum[u][v]);
}

// product calls f(i, j, Σ_k a[i·ai + k·ak]·b[j·bj + k·bk]) for every element. A thread has the same elements of every product
// of the same shape.
template <class F>
__device__ __forceinline__ void product(const float* a, int ai, int ak, const float* b, int bj, int bk, int I, int J, int K, F f) {
  for (int index = threadIdx.x; index < Tile::number(I, J); index += kBlock) {
    Tile t(I, J, index);
    float sum[4][4] = {};
    addProduct(sum, t, a, ai, ak, b, bj, bk, I, J, 0, K, 1);
    each(sum, t, I, J, f);
  }
}

// ---- Passes ----

// weightsOf gives V and U of a slot.
__device__ __forceinline__ void weightsOf(Matrix& v, Matrix& u, Arena& arena, const Mixing& l, int slot) {
  float* row = const_cast<float*>(l.weights) + int64_t(slot) * l.width;
  int c = l.chunk, m = l.m;
  v = {row, c}, u = {row + m * c, m};
  if (!l.resident) return;
  v = arena.matrix(m, c), u = arena.matrix(c, m);
  for (int i = threadIdx.x; i < m * c; i += kBlock) {
    v(i / c, i % c) = row[i];
    u(i / m, i % m) = row[m * c + i];
  }
}

// activation is f(z) of a kind and its derivative.
__device__ __forceinline__ float activation(uint32_t kind, float z, float& slope) {
  if (kind == kLowRank) {
    slope = 1;
    return z;
  }
  float e = expf(-fabsf(z)), big = 1 / (1 + e), small = e * big;  // of σ(z) and 1 − σ(z)
  float on = z < 0 ? small : big, off = z < 0 ? big : small;
  slope = on * fmaf(z, off, 1);
  return z * on;
}

template <class T> __device__ __forceinline__ void mix(const Mixing& l, T* y, const T* x) {
  extern __shared__ float memory[];
  const int c = l.chunk, m = l.m, items = l.count() * l.parts;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Seed s(l, item / l.parts);
    if (!s.blends) continue;
    __syncthreads();  // the last item's readers are done
    Arena arena{memory};
    Matrix v, u;
    weightsOf(v, u, arena, l, s.slot);
    Matrix in = arena.matrix(l.tile, c), h = arena.matrix(l.tile, m);
    float* down = arena.next;
    const bool scales = s.kind == kLowRank && l.large < INFINITY;
    for (int64_t first = int64_t(item % l.parts) * l.tile; first < l.rows; first += int64_t(l.parts) * l.tile) {
      const int n = int(min(int64_t(l.tile), l.rows - first));
      const int64_t at = first * l.columns() + int64_t(s.seed) * c;
      for (int i = threadIdx.x; i < n * c; i += kBlock) {
        int r = i / c, j = i % c;
        float value = toFloat(x[at + r * l.columns() + j]);
        in(r, j) = l.strict ? s.clamp(value, l.eps) : value;
      }
      __syncthreads();
      if (scales) {
        for (int r = threadIdx.x; r < n; r += kBlock) {
          float top = 0;
          for (int j = 0; j < c; j++) top = fmaxf(top, fabsf(in(r, j)));
          int by = 0;
          if (top > l.large && top < INFINITY) frexpf(top / l.large, &by);
          down[r] = ldexpf(1, -by);
          if (by)
            for (int j = 0; j < c; j++) in(r, j) *= down[r];
        }
        __syncthreads();
      }
      product(in.p, in.step, 1, v.p, v.step, 1, n, m, c, [&](int r, int k, float z) {
        float slope;
        h(r, k) = s.scale * activation(s.kind, z, slope);
      });
      __syncthreads();
      product(h.p, h.step, 1, u.p, u.step, 1, n, c, m, [&](int r, int j, float added) {
        float value = in(r, j);
        if (s.alpha != 0) value = fmaf(s.alpha, added, value);  // else t(x), NaN included, has no part in the result
        y[at + r * l.columns() + j] = fromFloat<T>(scales ? value / down[r] : value);
      });
      __syncthreads();
    }
  }
}

// clip scales the rows of g whose norm exceeds the limit.
__device__ __forceinline__ void clip(const Matrix& g, int n, int c, float limit, float eps) {
  for (int r = threadIdx.x; r < n; r += kBlock) {
    double sum = 0;
    for (int j = 0; j < c; j++)
      if (double e = g(r, j); fabs(e) < INFINITY) sum += e * e;
    float by = limit / (float(sqrt(sum)) + eps);
    if (by < 1)
      for (int j = 0; j < c; j++) g(r, j) *= by;
  }
}

// put writes a thread's tile of a gradient [I, J], of which groups of threads have parts of the sums, to memory.
__device__ __forceinline__ void put(float* out, const float (&sum)[4][4], float* shared, int I, int J, int group, int groups) {
  __syncthreads();
  Tile t(I, J, threadIdx.x % Tile::number(I, J));
  if (group < groups) each(sum, t, I, J, [&](int i, int j, float v) { shared[group * I * J + i * J + j] = v; });
  __syncthreads();
  for (int i = threadIdx.x; i < I * J; i += kBlock) {
    float total = 0;
    for (int k = 0; k < groups; k++) total += shared[k * I * J + i];
    out[i] = total;
  }
}

// mixBackward writes dx of seeds that blend, and of those that learn partial sums: dweights [parts, seeds, 2mC] and dscales
// [parts, seeds] by their position in the list.
template <class T>
__device__ __forceinline__ void mixBackward(const Mixing& l, T* dx, const T* g, const T* x, float* dweights, float* dscales) {
  extern __shared__ float memory[];
  const int c = l.chunk, m = l.m, items = l.count() * l.parts;
  const int tiles = Tile::number(m, c), groups = max(1, min(kBlock / tiles, l.tile / 8)), group = threadIdx.x / tiles;
  const bool kept = tiles <= kBlock;  // sums are in registers; else in memory
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int position = item / l.parts, part = item % l.parts;
    const Seed s(l, position);
    __syncthreads();
    Arena arena{memory};
    Matrix v, u;
    weightsOf(v, u, arena, l, s.slot);
    float* shared = arena.next;
    Matrix in = arena.matrix(l.tile, c), gs = arena.matrix(l.tile, c), h = arena.matrix(l.tile, m), dz = arena.matrix(l.tile, m);
    float* dv = dweights + (int64_t(part) * l.seeds + position) * 2 * m * c;
    float* du = dv + m * c;
    float sumV[4][4] = {}, sumU[4][4] = {}, da = 0;
    bool begun = false;
    for (int64_t first = int64_t(part) * l.tile; first < l.rows; first += int64_t(l.parts) * l.tile, begun = true) {
      const int n = int(min(int64_t(l.tile), l.rows - first));
      const int64_t at = first * l.columns() + int64_t(s.seed) * c;
      for (int i = threadIdx.x; i < n * c; i += kBlock) {
        int r = i / c, j = i % c;
        float value = toFloat(x[at + r * l.columns() + j]);
        in(r, j) = l.strict ? s.clamp(value, l.eps) : value;
        gs(r, j) = toFloat(g[at + r * l.columns() + j]);
      }
      __syncthreads();
      if (l.limit) {
        clip(gs, n, c, l.limit[s.seed], l.eps);
        __syncthreads();
      }
      if (s.alpha != 0) {  // else t(x), NaN included, has no part in anything
        product(in.p, in.step, 1, v.p, v.step, 1, n, m, c, [&](int r, int k, float z) { h(r, k) = z; });
        product(gs.p, gs.step, 1, u.p, 1, u.step, n, m, c, [&](int r, int k, float q) {
          float slope, f = activation(s.kind, h(r, k), slope);
          q *= s.alpha;
          da = fmaf(q, f, da);
          dz(r, k) = s.scale * q * slope;
          h(r, k) = s.alpha * s.scale * f;
        });
        __syncthreads();
      }
      auto out = [&](int r, int j, float added) {
        int64_t to = at + r * l.columns() + j;
        float value = gs(r, j);
        if (s.alpha != 0) value += added;
        if (l.strict && s.bites(toFloat(x[to]), l.eps)) value = 0;
        dx[to] = fromFloat<T>(value);
      };
      if (s.blends) product(dz.p, dz.step, 1, v.p, 1, v.step, n, c, s.alpha != 0 ? m : 0, out);
      if (s.learns && kept && group < groups) {
        addProduct(sumV, Tile(m, c, threadIdx.x % tiles), dz.p, 1, dz.step, in.p, 1, in.step, m, c, group, n, groups);
        addProduct(sumU, Tile(c, m, threadIdx.x % tiles), gs.p, 1, gs.step, h.p, 1, h.step, c, m, group, n, groups);
      } else if (s.learns && !kept) {
        auto add = [&](float* to, float sum) { *to = begun ? *to + sum : sum; };
        product(dz.p, 1, dz.step, in.p, 1, in.step, m, c, n, [&](int k, int j, float sum) { add(dv + k * c + j, sum); });
        product(gs.p, 1, gs.step, h.p, 1, h.step, c, m, n, [&](int j, int k, float sum) { add(du + j * m + k, sum); });
      }
      __syncthreads();
    }
    if (!s.learns) continue;
    if (kept) {
      put(dv, sumV, shared, m, c, group, groups);
      put(du, sumU, shared, c, m, group, groups);
    }
    da = blockReduce<Sum>(da);
    if (threadIdx.x == 0) dscales[int64_t(part) * l.seeds + position] = da;
  }
}

// sumSlot makes the gradients of one slot: those of the kinds that use chunk weights, and the partial sums. Launch: gridDim.x
// slots, gridDim.y tiles of kBlock weights.
__device__ __forceinline__ void sumSlot(const Mixing& l, float* dweights, float* dscales, const float* narrow, const float* narrowScales,
                                        const float* partial, const float* partialScales) {
  const int slot = blockIdx.x, j = blockIdx.y * kBlock + threadIdx.x, size = 2 * l.m * l.chunk;
  const int begin = l.heads()[slot], end = l.heads()[slot + 1];
  if (j < l.width) {
    double sum = j < l.chunk ? narrow[int64_t(slot) * l.chunk + j] : 0;
    if (j < size)
      for (int i = begin; i < end; i++) {
        const float* p = partial + int64_t(l.order()[i]) * size + j;
#pragma unroll 4
        for (int part = 0; part < l.parts; part++) sum += p[int64_t(part) * l.seeds * size];
      }
    dweights[int64_t(slot) * l.width + j] = float(sum);
  }
  if (blockIdx.y > 0) return;
  __shared__ double share[kBlock];
  double sum = 0;
  for (int i = begin; i < end; i++)
    for (int part = threadIdx.x; part < l.parts; part += kBlock) sum += partialScales[int64_t(part) * l.seeds + l.order()[i]];
  share[threadIdx.x] = sum;
  for (int half = kBlock / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) share[threadIdx.x] += share[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dscales[slot] = float(narrowScales[slot] + share[0]);
}

#define DEFINE(T)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kBlock) kasmina_mix_##T(Mixing l, T* y, const T* x) { mix(l, y, x); } \
  extern "C" __global__ void __launch_bounds__(kBlock, 2)                                                            \
      kasmina_mix_backward_##T(Mixing l, T* dx, const T* g, const T* x, float* dweights, float* dscales) {           \
    mixBackward(l, dx, g, x, dweights, dscales);                                                                     \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

extern "C" __global__ void __launch_bounds__(kBlock)
    kasmina_mix_slots(Mixing l, float* dweights, float* dscales, const float* narrow, const float* narrowScales, const float* partial,
                      const float* partialScales) {
  sumSlot(l, dweights, dscales, narrow, narrowScales, partial, partialScales);
}

// narrow[slot, i] = wide[slot, i] for i < chunk.
extern "C" __global__ void __launch_bounds__(kBlock) kasmina_narrow(float* narrow, const float* wide, int64_t n, int chunk, int width) {
  for (int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x; i < n; i += int64_t(gridDim.x) * kBlock)
    narrow[i] = wide[i / chunk * width + i % chunk];
}
