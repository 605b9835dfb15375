// The kinds of blueprint that mix the features of a chunk, for layers with slots wide enough for
// their weights. A slot's row of `width` weights holds V [m, C] and U [C, m], with m = width / 2C.
// X [n, C] are the rows of a seed's chunk, a is the slot's scale, and α is the seed's blending
// weight. f(z) is z (LowRank) or z·σ(z) (ChunkMLP).
//
//   Z = X·Vᵀ,  H = a·f(Z),  Y = X + α·H·Uᵀ
//
// In the backward pass, with G the clipped gradient of Y,
//
//   Q = α·G·U,  dZ = a·Q ⊙ f'(Z),  dX = G + dZ·V,  dV = dZᵀ·X,  dU = α·Gᵀ·H,  da = Σ Q ⊙ f(Z)
//
// The kernels of kasmina.cu and kasmina_backward.cu treat these seeds as dormant: they measure,
// clip and pass through. The kernels in this file then overwrite the parts that differ.
//
// Blocks take pairs of a seed and a part of the rows from the list that the host maintains in the
// lattice's mirror, so a captured graph works for any set of seeds. If the list is empty, blocks
// exit at once. A block keeps U and V in shared memory if they fit, and processes a few rows at a
// time. Gradients are summed in registers over the rows of a part, and then, in order, over the
// parts and the seeds of a slot.
#include "common.cuh"

enum Kind : uint32_t { kLowRank = 4, kChunkMLP = 5 };

constexpr int kBlock = 256;

// Mixing describes a layer. state holds the number of seeds in the list; the list of seeds; and for
// each seed a word with its kind in bits 0 to 7, whether it blends in bit 8, whether it learns in
// bit 9, and its slot from bit 16 on. The arrays heads and order follow: order holds list positions
// of seeds that learn, sorted by slot, and heads the start of each slot in order.
struct Mixing {
  const uint32_t* state;
  const float* alpha;      // per seed, like the arrays below
  const float *low, *high; // clamp limits of the strict mode
  const float* limit;      // on the norm of a row's gradient; null for none
  const float *weights, *scales;
  int64_t rows;
  int seeds, slots, chunk, m, width;
  int tile, parts;  // rows at a time; parts of the rows
  int strict;
  int vectors;  // whether chunks can be read and written 16 bytes at a time
  float eps;
  float large;  // rows of LowRank with larger x are scaled down for evaluation

  __device__ int count() const { return int(state[0]); }
  __device__ const uint32_t* heads() const { return state + 1 + 2 * seeds; }
  __device__ const uint32_t* order() const { return heads() + slots + 1; }
  __device__ int64_t columns() const { return int64_t(seeds) * chunk; }
};

// Seed is an entry of the list.
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
  // clamp is the transformation of x in strict mode. bites reports whether it changes x, so that no
  // gradient passes.
  __device__ float clamp(float x, float eps) const {
    if (fabsf(x) < eps) x = 0;
    if (x < low) x = low;
    if (x > high) x = high;
    return x;
  }
  __device__ bool bites(float x, float eps) const { return (fabsf(x) < eps && x != 0) || x < low || x > high; }
};

// Matrix is a matrix in shared memory, with element (i, j) at p[i·step + j]. Columns are padded
// with zeros to a multiple of four, and the step keeps consecutive rows at least 16 bytes apart in
// the banks.
struct Matrix {
  float* p;
  int step;
  __device__ __forceinline__ float& operator()(int i, int j) const { return p[i * step + j]; }
  __device__ __forceinline__ float4 four(int i, int j) const { return *reinterpret_cast<const float4*>(p + i * step + j); }
};

// Far is a matrix [rows, columns] in global memory, read as if it were padded with zeros.
struct Far {
  const float* p;
  int rows, columns;
  __device__ __forceinline__ float at(int i, int j) const { return i < rows && j < columns ? p[int64_t(i) * columns + j] : 0; }
  __device__ __forceinline__ float4 four(int i, int j) const { return {at(i, j), at(i, j + 1), at(i, j + 2), at(i, j + 3)}; }
};

__device__ __host__ constexpr int padded(int n) { return (n + 3) / 4 * 4; }

// Arena allocates shared memory.
struct Arena {
  float* next;
  __device__ Matrix matrix(int rows, int columns) {
    Matrix m{next, padded(columns) + 4};
    next += rows * m.step;
    return m;
  }
};

// fill clears the padding columns.
__device__ __forceinline__ void fill(const Matrix& m, int rows, int columns) {
  int more = padded(columns) - columns;
  for (int i = threadIdx.x; i < rows * more; i += kBlock) m(i / more, columns + i % more) = 0;
}

// ---- Products of small matrices by a block ----

// A thread's share of an I×J product is a tile of 4×4 elements. If a factor is contiguous along k,
// the tile's rows or columns are a quarter of the matrix apart, so that adjacent threads read
// adjacent rows. Otherwise they are consecutive.
enum Form {
  kDot,    // Σ_k a(i, k)·b(j, k)
  kRows,   // Σ_k a(i, k)·b(k, j)
  kOuter,  // Σ_k a(k, i)·b(k, j)
};

struct Tile {
  int i, j, down, across;
  __device__ __forceinline__ Tile(int I, int J, int index) {
    down = (I + 3) / 4, across = (J + 3) / 4;
    i = index / across, j = index - i * across;
  }
  __device__ __forceinline__ static int number(int I, int J) { return ((I + 3) / 4) * ((J + 3) / 4); }
  template <Form form> __device__ __forceinline__ int row(int u) const { return form == kOuter ? 4 * i + u : i + u * down; }
  template <Form form> __device__ __forceinline__ int column(int v) const { return form == kDot ? j + v * across : 4 * j + v; }
};

__device__ __forceinline__ void spread(float (&x)[4], float4 v) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }

// addProduct adds a tile's elements of a product over K. For kOuter, the product starts at `first`
// and advances by `step`.
template <Form form, class A, class B>
__device__ __forceinline__ void addProduct(float (&sum)[4][4], const Tile& t, const A& a, const B& b, int I, int J, int K, int first = 0,
                                           int step = 1) {
  if constexpr (form == kOuter) {
#pragma unroll 4
    for (int k = first; k < K; k += step) {
      float x[4], y[4];
      spread(x, a.four(k, 4 * t.i)), spread(y, b.four(k, 4 * t.j));
#pragma unroll
      for (int u = 0; u < 4; u++)
#pragma unroll
        for (int v = 0; v < 4; v++) sum[u][v] = fmaf(x[u], y[v], sum[u][v]);
    }
  } else {
    int ia[4], jb[4];
#pragma unroll
    for (int u = 0; u < 4; u++) ia[u] = min(t.row<form>(u), I - 1), jb[u] = min(t.column<form>(u), J - 1);
#pragma unroll 1
    for (int k = 0; k < K; k += 4) {
      float x[4][4], y[4][4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        spread(x[u], a.four(ia[u], k));
        spread(y[u], form == kDot ? b.four(jb[u], k) : b.four(k + u, 4 * t.j));
      }
#pragma unroll
      for (int l = 0; l < 4; l++)
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
          for (int v = 0; v < 4; v++) sum[u][v] = fmaf(x[u][l], form == kDot ? y[v][l] : y[l][v], sum[u][v]);
    }
  }
}

// each calls f(i, j, sum) for the elements of a tile.
template <Form form, class F> __device__ __forceinline__ void each(const float (&sum)[4][4], const Tile& t, int I, int J, F f) {
#pragma unroll
  for (int u = 0; u < 4; u++)
#pragma unroll
    for (int v = 0; v < 4; v++)
      if (int i = t.row<form>(u), j = t.column<form>(v); i < I && j < J) f(i, j, sum[u][v]);
}

// product calls f(i, j, sum) for every element of a product. A thread gets the same elements every
// time.
template <Form form, class A, class B, class F>
__device__ __forceinline__ void product(const A& a, const B& b, int I, int J, int K, F f) {
  for (int index = threadIdx.x; index < Tile::number(I, J); index += kBlock) {
    Tile t(I, J, index);
    float sum[4][4] = {};
    addProduct<form>(sum, t, a, b, I, J, K);
    each<form>(sum, t, I, J, f);
  }
}

// ---- Passes ----

// Weights holds V and U of a slot, in shared memory if they fit.
template <bool near> struct Weights;

template <> struct Weights<true> {
  Matrix v, u;
  __device__ __forceinline__ Weights(Arena& arena, const Mixing& l, int slot) {
    const int c = l.chunk, m = l.m, rows = padded(m), columns = padded(c);
    const float* row = l.weights + int64_t(slot) * l.width;
    v = arena.matrix(rows, c), u = arena.matrix(columns, m);
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * columns; i += kBlock) {
      int k = i / columns, j = i - k * columns;
      v(k, j) = k < m && j < c ? __ldg(row + k * c + j) : 0;
      j = i / rows, k = i - j * rows;
      u(j, k) = k < m && j < c ? __ldg(row + m * c + j * m + k) : 0;
    }
  }
};

template <> struct Weights<false> {
  Far v, u;
  __device__ __forceinline__ Weights(Arena&, const Mixing& l, int slot) {
    const float* row = l.weights + int64_t(slot) * l.width;
    v = {row, l.m, l.chunk}, u = {row + l.m * l.chunk, l.chunk, l.m};
  }
};

// Rows describes n rows of a seed's chunk in a tensor. The functions take the address of the first
// element.
template <class T> struct Rows {
  int64_t columns;  // of the tensor
  int n, c;
  bool vectors;  // whether 16 bytes can be moved at a time

  // loadPacks is load with N elements per access and several accesses in flight.
  template <int N, class F> __device__ __forceinline__ void loadPacks(const T* from, F f) const {
    constexpr int batch = N > 1 ? 2 : 4;
    const int per = c / N, all = n * per;
    for (int first = threadIdx.x; first < all; first += batch * kBlock) {
      Pack<T, N> v[batch];
#pragma unroll
      for (int u = 0; u < batch; u++)
        if (int i = first + u * kBlock; i < all) v[u] = ::load<N>(from + i / per * columns + i % per * N);
#pragma unroll
      for (int u = 0; u < batch; u++)
        if (int i = first + u * kBlock; i < all)
#pragma unroll
          for (int k = 0; k < N; k++) f(i / per, i % per * N + k, v[u].get(k));
    }
  }
  // load calls f(row, column, value) for every element.
  template <class F> __device__ __forceinline__ void load(const T* from, F f) const {
    if (vectors) loadPacks<kVec<T>>(from, f);
    else loadPacks<1>(from, f);
  }
  template <int N> __device__ __forceinline__ void storePacks(T* to, const Matrix& m) const {
    const int per = c / N, all = n * per;
    for (int i = threadIdx.x; i < all; i += kBlock) {
      Pack<T, N> v;
#pragma unroll
      for (int k = 0; k < N; k++) v.set(k, m(i / per, i % per * N + k));
      ::store(to + i / per * columns + i % per * N, v);
    }
  }
  __device__ __forceinline__ void store(T* to, const Matrix& m) const {
    if (vectors) storePacks<kVec<T>>(to, m);
    else storePacks<1>(to, m);
  }
};

// activation returns f(z) for a kind, and its derivative.
__device__ __forceinline__ float activation(uint32_t kind, float z, float& slope) {
  if (kind == kLowRank) {
    slope = 1;
    return z;
  }
  float e = expf(-fabsf(z)), big = 1 / (1 + e), small = e * big;  // for σ(z) and 1 − σ(z)
  float on = z < 0 ? small : big, off = z < 0 ? big : small;
  slope = on * fmaf(z, off, 1);
  return z * on;
}

template <class T, bool near> __device__ __forceinline__ void mix(const Mixing& l, T* y, const T* x) {
  extern __shared__ float4 memory[];
  const int c = l.chunk, m = l.m, items = l.count() * l.parts;
  const int64_t columns = l.columns();
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Seed s(l, item / l.parts);
    if (!s.blends) continue;
    __syncthreads();  // all threads are done with the preceding item
    Arena arena{reinterpret_cast<float*>(memory)};
    const Weights<near> w(arena, l, s.slot);
    const Matrix in = arena.matrix(l.tile, c), h = arena.matrix(l.tile, m);
    float* down = arena.next;
    fill(in, l.tile, c), fill(h, l.tile, m);
    for (int64_t first = int64_t(item % l.parts) * l.tile; first < l.rows; first += int64_t(l.parts) * l.tile) {
      const int n = int(min(int64_t(l.tile), l.rows - first));
      const int64_t at = first * columns + int64_t(s.seed) * c;
      const Rows<T> rows{columns, n, c, l.vectors != 0};
      bool beyond = false;
      rows.load(x + at, [&](int r, int j, float value) {
        in(r, j) = l.strict ? s.clamp(value, l.eps) : value;
        beyond |= fabsf(value) > l.large;
      });
      const bool scaled = __syncthreads_or(s.kind == kLowRank && beyond);
      if (scaled) {
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
      product<kDot>(in, w.v, n, m, c, [&](int r, int k, float z) {
        float slope;
        h(r, k) = s.scale * activation(s.kind, z, slope);
      });
      __syncthreads();
      product<kDot>(h, w.u, n, c, m, [&](int r, int j, float added) {
        float value = in(r, j);
        if (s.alpha != 0) value = fmaf(s.alpha, added, value);  // otherwise t(x) must not affect the result, even if it is NaN
        in(r, j) = scaled ? value / down[r] : value;
      });
      __syncthreads();
      rows.store(y + at, in);
      __syncthreads();
    }
  }
}

// clip scales down the rows of g with norms above the limit.
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

// put stores a thread's tile of a gradient [I, J]. Each of `groups` groups of threads has part of
// the sums.
__device__ __forceinline__ void put(float* out, const float (&sum)[4][4], float* shared, int I, int J, int group, int groups) {
  __syncthreads();
  Tile t(I, J, threadIdx.x % Tile::number(I, J));
  if (group < groups) each<kOuter>(sum, t, I, J, [&](int i, int j, float v) { shared[group * I * J + i * J + j] = v; });
  __syncthreads();
  for (int i = threadIdx.x; i < I * J; i += kBlock) {
    float total = 0;
    for (int k = 0; k < groups; k++) total += shared[k * I * J + i];
    out[i] = total;
  }
}

// mixBackward writes dx for seeds that blend. For seeds that learn it writes partial sums, indexed
// by position in the list: dweights [parts, seeds, 2mC] and dscales [parts, seeds].
template <class T, bool near>
__device__ __forceinline__ void mixBackward(const Mixing& l, T* dx, const T* g, const T* x, float* dweights, float* dscales) {
  extern __shared__ float4 memory[];
  const int c = l.chunk, m = l.m, items = l.count() * l.parts;
  const int64_t columns = l.columns();
  const int tiles = Tile::number(m, c), groups = max(1, min(kBlock / tiles, l.tile / 8)), group = threadIdx.x / tiles;
  const bool kept = tiles <= kBlock;  // sums are in registers rather than in memory
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int position = item / l.parts, part = item % l.parts;
    const Seed s(l, position);
    __syncthreads();
    Arena arena{reinterpret_cast<float*>(memory)};
    const Weights<near> w(arena, l, s.slot);
    float* shared = arena.next;
    const Matrix in = arena.matrix(l.tile, c), gs = arena.matrix(l.tile, c), h = arena.matrix(l.tile, m), dz = arena.matrix(l.tile, m);
    fill(in, l.tile, c), fill(gs, l.tile, c), fill(h, l.tile, m), fill(dz, l.tile, m);
    float* dv = dweights + (int64_t(part) * l.seeds + position) * 2 * m * c;
    float* du = dv + m * c;
    float sumV[4][4] = {}, sumU[4][4] = {}, da = 0;
    bool begun = false;
    for (int64_t first = int64_t(part) * l.tile; first < l.rows; first += int64_t(l.parts) * l.tile, begun = true) {
      const int n = int(min(int64_t(l.tile), l.rows - first));
      const int64_t at = first * columns + int64_t(s.seed) * c;
      const Rows<T> rows{columns, n, c, l.vectors != 0};
      rows.load(x + at, [&](int r, int j, float value) { in(r, j) = l.strict ? s.clamp(value, l.eps) : value; });
      rows.load(g + at, [&](int r, int j, float value) { gs(r, j) = value; });
      __syncthreads();
      if (l.limit) {
        clip(gs, n, c, l.limit[s.seed], l.eps);
        __syncthreads();
      }
      if (s.alpha != 0) {  // otherwise t(x) must not affect anything, even if it is NaN
        product<kDot>(in, w.v, n, m, c, [&](int r, int k, float z) { h(r, k) = z; });
        __syncthreads();
        product<kRows>(gs, w.u, n, m, c, [&](int r, int k, float q) {
          float slope, f = activation(s.kind, h(r, k), slope);
          q *= s.alpha;
          da = fmaf(q, f, da);
          dz(r, k) = s.scale * q * slope;
          h(r, k) = s.alpha * s.scale * f;
        });
        __syncthreads();
      }
      if (s.learns && kept && group < groups) {
        addProduct<kOuter>(sumV, Tile(m, c, threadIdx.x % tiles), dz, in, m, c, n, group, groups);
        addProduct<kOuter>(sumU, Tile(c, m, threadIdx.x % tiles), gs, h, c, m, n, group, groups);
      } else if (s.learns && !kept) {
        auto add = [&](float* to, float sum) { *to = begun ? *to + sum : sum; };
        product<kOuter>(dz, in, m, c, n, [&](int k, int j, float sum) { add(dv + k * c + j, sum); });
        product<kOuter>(gs, h, c, m, n, [&](int j, int k, float sum) { add(du + j * m + k, sum); });
      }
      __syncthreads();
      if (!s.blends) continue;
      product<kRows>(dz, w.v, n, c, s.alpha != 0 ? m : 0, [&](int r, int j, float added) {
        float& value = gs(r, j);
        if (s.alpha != 0) value += added;
        if (l.strict && s.bites(toFloat(x[at + r * columns + j]), l.eps)) value = 0;
      });
      __syncthreads();
      rows.store(dx + at, gs);
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

// sumSlot computes the gradients of a slot by adding the partial sums to the gradients of the
// pointwise kinds. Launch: gridDim.x slots and gridDim.y tiles of kBlock weights.
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

// Kernels with `far` in their names read weights from global memory.
#define DEFINE_PLACE(T, place, near)                                                                                \
  extern "C" __global__ void __launch_bounds__(kBlock, 2) kasmina_mix_##place##_##T(Mixing l, T* y, const T* x) {   \
    mix<T, near>(l, y, x);                                                                                          \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kBlock, 2)                                                           \
      kasmina_mix_backward_##place##_##T(Mixing l, T* dx, const T* g, const T* x, float* dweights, float* dscales) { \
    mixBackward<T, near>(l, dx, g, x, dweights, dscales);                                                           \
  }
#define DEFINE(T) DEFINE_PLACE(T, near, true) DEFINE_PLACE(T, far, false)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_PLACE

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
