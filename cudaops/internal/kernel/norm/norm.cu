// RMSNorm over the rows of x [rows, d], with float32 weights w [d].
//
//   forward:   rstd = 1/sqrt(mean(x²) + eps),  y = x·rstd ⊙ w,  optionally for sum = x + residual instead of x
//   backward:  dx = rstd·(g ⊙ w − n·mean(g ⊙ w ⊙ n)) + add,  dw = Σ_rows g ⊙ n,  n = x·rstd
//
// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) add is the gradient that
// reaches x on a path around the norm.
//
// Each element is read and written once. In the forward pass, a few threads hold a row in
// registers. In the backward pass, each thread has a pack of columns with its weights and walks
// down the rows, while the next rows are copied to shared memory. dw therefore adds up in
// registers. Each block writes a partial sum, and a second kernel adds these up in order. A short
// row may instead belong to one warp, which then waits for no other warp, or to two warps. Rows
// that don't fit or are not aligned to 16 bytes take kernels that read them twice.
//
// In the forward pass, and when blocks walk down the rows, the last rows come first, because the
// cache still holds the rows that the preceding kernel wrote last. The next kernel, which starts
// with the first rows, finds those there in turn. If the preceding kernel ended with the first
// rows, the forward pass starts with these (ascending).
//
// Kernels named _float8 also store y or dx, as rounded to its type, as rows of float8 (float8.cuh).
#include "float8.cuh"
#include "held.cuh"
#include "overlap.cuh"

// ---- Forward ----

// A thread has P packs of a row. Few packs are better, because the rows that the GPU accesses at the
// same time are then closer together in memory.
//
// Launch: blockDim.x threads, whole warps, hold a row of up to blockDim.x·P·kVec elements, a multiple
// of kVec. A block has blockDim.y rows, and at most kHeld threads.
template <class T, int P, bool kAdd, bool kFloat8>
__device__ __forceinline__ void forwardHeld(f8* y8, float* scale8, T* y, float* rstd, T* sum, const T* x, const T* residual,
                                            const float* w, int64_t rows, int d, float eps, bool ascending) {
  constexpr int N = kVec<T>;
  int64_t row = int64_t(ascending ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * blockDim.y + threadIdx.y, start = row * d;
  auto at = [&](int k) { return int(k * blockDim.x + threadIdx.x) * N; };
  auto holds = [&](int k) { return row < rows && at(k) < d; };

  Pack<T, N> v[P], r[P];
#pragma unroll
  for (int k = 0; k < P; k++) {
    v[k] = {};
    if (!holds(k)) continue;
    v[k] = load<N>(x + start + at(k));
    if (kAdd) r[k] = load<N>(residual + start + at(k));
  }
  Pack<float, N> weights;
  if (P == 1 && holds(0)) weights = load<N>(w + at(0));  // with more packs there would not be enough registers
  float squares = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (kAdd && holds(k)) {
#pragma unroll
      for (int j = 0; j < N; j++) v[k].set(j, v[k].get(j) + r[k].get(j));
      store(sum + start + at(k), v[k]);
    }
#pragma unroll
    for (int j = 0; j < N; j++) squares = fmaf(v[k].get(j), v[k].get(j), squares);
  }
#pragma unroll
  for (int k = 0; k < P; k++) forget(v[k]);
  float s = rsqrtf(groupReduce<Sum>(squares) / d + eps);
  if (rstd && threadIdx.x == 0 && row < rows) rstd[row] = s;
  float most = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!holds(k)) continue;
    if (P > 1) weights = load<N>(w + at(k));
#pragma unroll
    for (int j = 0; j < N; j++) v[k].set(j, v[k].get(j) * s * weights.v[j]);
    if (kFloat8) forget(v[k]), most = largest(most, v[k]);
    store(y + start + at(k), v[k]);
  }
  if (!kFloat8) return;
  Scale scale(groupReduce<Largest>(most));
  if (threadIdx.x == 0 && row < rows) scale8[row] = scale.scale;
#pragma unroll
  for (int k = 0; k < P; k++)
    if (holds(k)) store(y8 + start + at(k), scale.round(v[k]));
}

// Any d. Launch: one block per row.
template <class T>
__device__ __forceinline__ void forwardAny(T* y, float* rstd, T* sum, const T* x, const T* residual, const float* w, int d,
                                           float eps) {
  int64_t row = blockIdx.x;
  x += row * d, y += row * d, sum += row * d;
  float squares = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    T v = x[i];
    if (residual) sum[i] = v = fromFloat<T>(toFloat(v) + toFloat(residual[row * d + i]));
    squares += toFloat(v) * toFloat(v);
  }
  float s = rsqrtf(blockReduce<Sum>(squares) / d + eps);
  if (rstd && threadIdx.x == 0) rstd[row] = s;
  const T* in = residual ? sum : x;
  for (int i = threadIdx.x; i < d; i += blockDim.x) y[i] = fromFloat<T>(toFloat(in[i]) * s * w[i]);
}

#define DEFINE_HELD(T, name, P, kAdd)                                                                         \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      name##P##_##T(T* y, float* rstd, T* sum, const T* x, const T* residual, const float* w, int64_t rows,   \
                    int d, float eps, int ascending) {                                                        \
    forwardHeld<T, P, kAdd, false>(nullptr, nullptr, y, rstd, sum, x, residual, w, rows, d, eps, ascending);  \
  }
#define DEFINE_FLOAT8(T, name, P, kAdd)                                                                       \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      name##P##_float8_##T(f8* y8, float* scale8, T* y, float* rstd, T* sum, const T* x, const T* residual,   \
                           const float* w, int64_t rows, int d, float eps, int ascending) {                   \
    forwardHeld<T, P, kAdd, true>(y8, scale8, y, rstd, sum, x, residual, w, rows, d, eps, ascending);         \
  }
#define DEFINE_ALL(T, DEFINE)                                                                                 \
  DEFINE(T, rmsnorm_held, 1, false)                                                                           \
  DEFINE(T, rmsnorm_held, 2, false)                                                                           \
  DEFINE(T, rmsnorm_held, 4, false)                                                                           \
  DEFINE(T, rmsnorm_add_held, 1, true)                                                                        \
  DEFINE(T, rmsnorm_add_held, 2, true)                                                                        \
  DEFINE(T, rmsnorm_add_held, 4, true)
#define DEFINE(T)                                                                                             \
  DEFINE_ALL(T, DEFINE_HELD)                                                                                  \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      rmsnorm_any_##T(T* y, float* rstd, T* sum, const T* x, const T* residual, const float* w, int d,        \
                      float eps) {                                                                            \
    forwardAny(y, rstd, sum, x, residual, w, d, eps);                                                         \
  }
FOR_STORAGE_TYPES(DEFINE)
DEFINE_ALL(bf16, DEFINE_FLOAT8)
DEFINE_ALL(f16, DEFINE_FLOAT8)
#undef DEFINE
#undef DEFINE_ALL
#undef DEFINE_FLOAT8
#undef DEFINE_HELD

// ---- Walking down the rows ----

constexpr int kStages = 3;  // rows in flight for each group of threads

// Walk is the position of a thread in a kernel that walks down the rows. Launch: blockDim.x
// threads, whole warps, hold a row of d elements, where d is a multiple of kVec and at most
// blockDim.x·kVec. A block has blockDim.y such groups, and at most 1024 threads; the number of
// blocks is arbitrary. Dynamic shared memory: kStages·16 bytes per thread and array.
template <class T> struct Walk {
  static constexpr int N = kVec<T>;
  using V = Pack<T, N>;

  int64_t row, blockRow, step;  // all threads of a block run the same number of rounds
  int d, col, threads, thread, warps, firstWarp, round = 0;
  bool active;
  V* slots;

  __device__ __forceinline__ Walk(int64_t rows, int d, uint4* shared)
      : d(d), slots(reinterpret_cast<V*>(shared)) {
    threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    warps = blockDim.x / kWarp, firstWarp = threadIdx.y * warps;
    col = threadIdx.x * N, active = col < d;
    step = int64_t(gridDim.x) * blockDim.y, blockRow = rows - 1 - int64_t(blockIdx.x) * blockDim.y, row = blockRow - threadIdx.y;
  }
  __device__ __forceinline__ bool more() const { return blockRow >= 0; }
  __device__ __forceinline__ bool here() const { return active && row >= 0; }
  __device__ __forceinline__ int64_t at() const { return row * d + col; }
  __device__ __forceinline__ void next() { row -= step, blockRow -= step, round++; }

  // fetch starts copying this thread's part of an array, some rounds ahead, or zeros past the last
  // row.
  __device__ __forceinline__ void fetch(int array, const T* x, int ahead) const {
    int64_t r = row - ahead * step;
    bool wanted = active && r >= 0;
    copyAsync(&slot(array, ahead), x + (wanted ? r * d + col : 0), wanted);
  }
  __device__ __forceinline__ V& slot(int array, int ahead = 0) const {
    return slots[(array * kStages + (round + ahead) % kStages) * threads + thread];
  }

  // reduce reduces over the threads that hold a row. It may be called once per round and Op. A
  // single barrier suffices, because consecutive rounds use different memory.
  template <class Op> __device__ __forceinline__ float reduce(float v) const {
    __shared__ float parts[2][kWarp];
    int lane = threadIdx.x % kWarp;
    v = warpReduce<Op>(v);
    if (lane == 0) parts[round % 2][thread / kWarp] = v;
    __syncthreads();
    return warpReduce<Op>(lane < warps ? parts[round % 2][firstWarp + lane] : Op::identity);
  }
};

// ---- Backward ----

// floats and rounded convert a pack two elements at a time, which takes fewer instructions.
template <class T, int N> __device__ __forceinline__ Pack<float, N> floats(const Pack<T, N>& p) {
  Pack<float, N> f;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const float2 two = Pairs<T>::floats(pair(p, i));
    f.v[2 * i] = two.x, f.v[2 * i + 1] = two.y;
  }
  return f;
}
__device__ __forceinline__ void roundTwo(float2& to, float a, float b) { to = make_float2(a, b); }
__device__ __forceinline__ void roundTwo(__nv_bfloat162& to, float a, float b) { to = __floats2bfloat162_rn(a, b); }
__device__ __forceinline__ void roundTwo(__half2& to, float a, float b) { to = __floats2half2_rn(a, b); }
template <class T, int N> __device__ __forceinline__ Pack<T, N> rounded(const Pack<float, N>& f) {
  Pack<T, N> p;
#pragma unroll
  for (int i = 0; i < N / 2; i++) roundTwo(reinterpret_cast<typename Pairs<T>::Word*>(&p)[i], f.v[2 * i], f.v[2 * i + 1]);
  return p;
}

// gradient returns s·(g·w − x·m) + add. Multiply-adds are explicit so that all kernels round alike.
__device__ __forceinline__ float gradient(float g, float w, float x, float s, float m, float add) {
  return fmaf(s, fmaf(g, w, -(x * m)), add);
}

// put stores the N sums of a thread's columns, four at a time.
template <int N> __device__ __forceinline__ void put(const float (&sum)[N], float* to) {
#pragma unroll
  for (int j = 0; j < N; j += 4) *reinterpret_cast<float4*>(to + j) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
}

// leaveSums adds up the rows of sums [blockDim.y, d], which the block's threads have written, and
// stores the result in the block's row of partial.
__device__ __forceinline__ void leaveSums(float* partial, const float* sums, int d) {
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < d; i += blockDim.x * blockDim.y) {
    float sum = 0;
#pragma unroll 8
    for (int y = 0; y < blockDim.y; y++) sum += sums[y * d + i];
    partial[int64_t(blockIdx.x) * d + i] = sum;
  }
}

// Launch: see Walk; three arrays with add, otherwise two, and at least blockDim.y·d floats. Each
// block writes a row of partial [blocks, d].
template <class T, bool kFloat8>
__device__ __forceinline__ void backwardRows(f8* dx8, float* scale8, T* dx, float* partial, const T* g, const T* x,
                                             const float* w, const float* rstd, const T* add, int64_t rows, int d) {
  constexpr int N = kVec<T>;
  extern __shared__ uint4 shared[];
  releaseNext();
  Walk<T> walk(rows, d, shared);
  auto fetch = [&](int ahead) {
    walk.fetch(0, x, ahead);
    walk.fetch(1, g, ahead);
    if (add) walk.fetch(2, add, ahead);
    commitAsync();
  };
  auto rstdOf = [&](int64_t row) { return row >= 0 ? rstd[row] : 0.0f; };
  for (int i = 0; i < kStages - 1; i++) fetch(i);
  Pack<float, N> wc = {};
  if (walk.active) wc = load<N>(w + walk.col);
  float dw[N] = {}, nextRstd = rstdOf(walk.row);
  for (; walk.more(); walk.next()) {
    fetch(kStages - 1);
    float s = nextRstd;
    nextRstd = rstdOf(walk.row - walk.step);
    awaitAsync<kStages - 1>();
    const Pack<float, N> xr = floats(walk.slot(0)), gr = floats(walk.slot(1));
    float dot = 0;
#pragma unroll
    for (int j = 0; j < N; j++) dot = fmaf(gr.v[j] * wc.v[j], xr.v[j], dot);
    float m = walk.template reduce<Sum>(dot) / d * s * s;
    Pack<float, N> more = {};
    if (add) more = floats(walk.slot(2));
#pragma unroll
    for (int j = 0; j < N; j++) {
      dw[j] = fmaf(gr.v[j], xr.v[j] * s, dw[j]);
      more.v[j] = gradient(gr.v[j], wc.v[j], xr.v[j], s, m, more.v[j]);
    }
    Pack<T, N> result = rounded<T>(more);
    if (kFloat8) forget(result);
    if (walk.here()) store(dx + walk.at(), result);
    if (!kFloat8) continue;
    Scale scale(walk.template reduce<Largest>(walk.here() ? largest(0, result) : 0));
    if (threadIdx.x == 0 && walk.row >= 0) scale8[walk.row] = scale.scale;
    if (walk.here()) store(dx8 + walk.at(), scale.round(result));
  }
  awaitAsync<0>();

  __syncthreads();
  if (walk.active) put(dw, reinterpret_cast<float*>(shared) + threadIdx.y * d + walk.col);
  leaveSums(partial, reinterpret_cast<const float*>(shared), d);
}

// Processes rows of up to W·P·32·kVec elements. Each row belongs to W warps, and a lane holds P of
// its packs. With one warp, reductions are shuffles, and a row's warp waits for no other warp. With
// two warps, they also take a barrier of the block, so that all its warps must run the same number
// of rounds. Consecutive rows of a block are a grid apart, so that all blocks have work in the last
// round.
//
// Launch: W·kWarp threads by several rows, at most kOwn<P> warps; the number of blocks is
// arbitrary. Dynamic shared memory: kOwnStages·P·512 bytes per warp and array, with three arrays if
// there is an add and two otherwise, and at least blockDim.y·d floats. Each block writes a row of
// partial [blocks, d].
constexpr int kOwnStages = 2;                          // rows in flight per warp
template <int P> constexpr int kOwn = P > 3 ? 12 : 16;  // leaves enough registers for the sums and weights of P packs

// ownReduce reduces over the W warps of a row. It may be called once per round and Op. A single
// barrier suffices, because consecutive rounds use different memory.
template <class Op, int W> __device__ __forceinline__ float ownReduce(float v, int round) {
  v = warpReduce<Op>(v);
  if constexpr (W > 1) {
    __shared__ float parts[kOwnStages][kOwn<1>];
    float* of = parts[round] + threadIdx.y * W;
    if (threadIdx.x % kWarp == 0) of[threadIdx.x / kWarp] = v;
    __syncthreads();  // a barrier for the row's warps alone is no faster, and compute-sanitizer's racecheck can't follow it
    v = of[0];
#pragma unroll
    for (int i = 1; i < W; i++) v = Op::merge(v, of[i]);
  }
  return v;
}

template <class T, int P, int W, bool kFloat8>
__device__ __forceinline__ void backwardOwn(f8* dx8, float* scale8, T* dx, float* partial, const T* g, const T* x,
                                            const float* w, const float* rstd, const T* add, int64_t rows, int d) {
  constexpr int N = kVec<T>;
  using V = Pack<T, N>;
  extern __shared__ uint4 shared[];
  releaseNext();
  const int arrays = add ? 3 : 2;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t row = int64_t(threadIdx.y) * gridDim.x + blockIdx.x;
  int64_t least = W > 1 ? blockIdx.x : row;  // the smallest of the rows that wait for one another
  V* slots = reinterpret_cast<V*>(shared) + threadIdx.y * (kOwnStages * arrays * P * W * kWarp) + threadIdx.x;
  auto slot = [&](int stage, int array, int k) { return slots + ((stage * arrays + array) * P + k) * (W * kWarp); };
  auto at = [&](int k) { return int(k * W * kWarp + threadIdx.x) * N; };
  auto here = [&](int k) { return row < rows && at(k) < d; };
  auto fetch = [&](int stage, int64_t r) {
    auto copy = [&](int array, const T* from) {
#pragma unroll
      for (int k = 0; k < P; k++) {
        bool wanted = r < rows && at(k) < d;
        copyAsync(slot(stage, array, k), from + (wanted ? r * d + at(k) : 0), wanted);
      }
    };
    copy(0, x), copy(1, g);
    if (add) copy(2, add);
    commitAsync();
  };
  auto rstdOf = [&](int64_t r) { return r < rows ? rstd[r] : 0.0f; };
  for (int i = 0; i < kOwnStages - 1; i++) fetch(i, row + i * step);
  Pack<float, N> wc[P] = {};
#pragma unroll
  for (int k = 0; k < P; k++)
    if (at(k) < d) wc[k] = load<N>(w + at(k));
  float dw[P][N] = {}, nextRstd = rstdOf(row);
  int now = 0, last = kOwnStages - 1;  // stage of this row, and stage of the row being fetched
#pragma unroll 1
  for (; least < rows; row += step, least += step) {
    fetch(last, row + (kOwnStages - 1) * step);
    const float s = nextRstd;
    nextRstd = rstdOf(row + step);
    awaitAsync<kOwnStages - 1>();
    V xr[P], gr[P];
    float dot = 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
      xr[k] = *slot(now, 0, k), gr[k] = *slot(now, 1, k);
      const Pack<float, N> xk = floats(xr[k]), gk = floats(gr[k]);
#pragma unroll
      for (int j = 0; j < N; j++) dot = fmaf(gk.v[j] * wc[k].v[j], xk.v[j], dot);
      forget(xr[k]), forget(gr[k]);
    }
    const float m = ownReduce<Sum, W>(dot, now) / d * s * s;
    float most = 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
      const Pack<float, N> xk = floats(xr[k]), gk = floats(gr[k]);
      Pack<float, N> more = {};
      if (add) more = floats(*slot(now, 2, k));
#pragma unroll
      for (int j = 0; j < N; j++) {
        dw[k][j] = fmaf(gk.v[j], xk.v[j] * s, dw[k][j]);
        more.v[j] = gradient(gk.v[j], wc[k].v[j], xk.v[j], s, m, more.v[j]);
      }
      xr[k] = rounded<T>(more);
      if (!here(k)) continue;
      if (kFloat8) forget(xr[k]), most = largest(most, xr[k]);
      store(dx + row * d + at(k), xr[k]);
    }
    if constexpr (kFloat8) {
      Scale scale(ownReduce<Largest, W>(most, now));
      if (threadIdx.x == 0 && row < rows) scale8[row] = scale.scale;
#pragma unroll
      for (int k = 0; k < P; k++)
        if (here(k)) store(dx8 + row * d + at(k), scale.round(xr[k]));
    }
    last = now, now = now + 1 == kOwnStages ? 0 : now + 1;
  }
  awaitAsync<0>();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < P; k++)
    if (at(k) < d) put(dw[k], reinterpret_cast<float*>(shared) + threadIdx.y * d + at(k));
  leaveSums(partial, reinterpret_cast<const float*>(shared), d);
}

// dx for any d. Launch: one block per row.
template <class T>
__device__ __forceinline__ void backwardAny(T* dx, const T* g, const T* x, const float* w, const float* rstd, const T* add,
                                            int d) {
  int64_t row = blockIdx.x;
  x += row * d, g += row * d, dx += row * d;
  float dot = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) dot += toFloat(g[i]) * w[i] * toFloat(x[i]);
  float s = rstd[row], m = blockReduce<Sum>(dot) / d * s * s;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    float v = s * (toFloat(g[i]) * w[i] - toFloat(x[i]) * m);
    dx[i] = fromFloat<T>(add ? v + toFloat(add[row * d + i]) : v);
  }
}

// Partial sums of dw for any d, over the rows blockIdx.y, blockIdx.y + gridDim.y, ... Launch: one
// thread per column.
template <class T>
__device__ __forceinline__ void weightAny(float* partial, const T* g, const T* x, const float* rstd, int64_t rows, int d) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= d) return;
  float sum = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    sum += toFloat(g[row * d + i]) * (toFloat(x[row * d + i]) * rstd[row]);
  partial[int64_t(blockIdx.y) * d + i] = sum;
}

#if __CUDA_ARCH__ == 890  // multiprocessors with 1536 threads
constexpr int kSumBlocks = 1;
#else
constexpr int kSumBlocks = 2;
#endif

// dw[i] = Σ_k partial[k, i] for partial [count, d]. Launch: 32 columns per block, 32 by 32 threads.
// It may overlap with the preceding kernel.
extern "C" __global__ void __launch_bounds__(1024, kSumBlocks)
    rmsnorm_weight_sum(float* dw, const float* partial, int count, int d) {
  constexpr int U = 8;  // loads at once
  __shared__ float tile[kWarp][kWarp + 1];
  awaitPrevious();
  int i = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0;
  const int64_t step = int64_t(kWarp) * d;
  const float* at = partial + int64_t(threadIdx.y) * d + i;
  const int left = i < d ? count - threadIdx.y : 0;
#pragma unroll 1
  for (int b = 0; b < left; b += U * kWarp) {
    float v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = b + u * kWarp < left ? at[u * step] : 0;
#pragma unroll
    for (int u = 0; u < U; u++) sum += v[u];
    at += U * step;
  }
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warpReduce<Sum>(tile[threadIdx.x][threadIdx.y]);
  i = blockIdx.x * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && i < d) dw[i] = sum;
}

// backwardPass is backwardOwn, or backwardRows if P is 0.
template <class T, int P, int W, bool kFloat8, class... Args> __device__ __forceinline__ void backwardPass(Args... args) {
  if constexpr (P > 0)
    backwardOwn<T, P, W, kFloat8>(args...);
  else
    backwardRows<T, kFloat8>(args...);
}

#define DEFINE_PASS(T, name, P, W, threads)                                                                   \
  extern "C" __global__ void __launch_bounds__(threads)                                                       \
      name##_##T(T* dx, float* partial, const T* g, const T* x, const float* w, const float* rstd,            \
                 const T* add, int64_t rows, int d) {                                                         \
    backwardPass<T, P, W, false>((f8*)nullptr, (float*)nullptr, dx, partial, g, x, w, rstd, add, rows, d);    \
  }
#define DEFINE_FLOAT8(T, name, P, W, threads)                                                                 \
  extern "C" __global__ void __launch_bounds__(threads)                                                       \
      name##_float8_##T(f8* dx8, float* scale8, T* dx, float* partial, const T* g, const T* x,                \
                        const float* w, const float* rstd, const T* add, int64_t rows, int d) {               \
    backwardPass<T, P, W, true>(dx8, scale8, dx, partial, g, x, w, rstd, add, rows, d);                       \
  }
#define DEFINE_ALL(T, DEFINE)                                                                                 \
  DEFINE(T, rmsnorm_backward, 0, 0, 1024)                                                                     \
  DEFINE(T, rmsnorm_backward_own1, 1, 1, kOwn<1>* kWarp)                                                      \
  DEFINE(T, rmsnorm_backward_own2, 2, 1, kOwn<2>* kWarp)                                                      \
  DEFINE(T, rmsnorm_backward_own3, 3, 1, kOwn<3>* kWarp)                                                      \
  DEFINE(T, rmsnorm_backward_own4, 4, 1, kOwn<4>* kWarp)                                                      \
  DEFINE(T, rmsnorm_backward_pair3, 3, 2, kOwn<3>* kWarp)                                                     \
  DEFINE(T, rmsnorm_backward_pair4, 4, 2, kOwn<4>* kWarp)
#define DEFINE(T)                                                                                             \
  DEFINE_ALL(T, DEFINE_PASS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      rmsnorm_backward_any_##T(T* dx, const T* g, const T* x, const float* w, const float* rstd,              \
                               const T* add, int d) {                                                         \
    backwardAny(dx, g, x, w, rstd, add, d);                                                                   \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      rmsnorm_weight_any_##T(float* partial, const T* g, const T* x, const float* rstd, int64_t rows, int d) { \
    weightAny(partial, g, x, rstd, rows, d);                                                                  \
  }
FOR_STORAGE_TYPES(DEFINE)
DEFINE_ALL(bf16, DEFINE_FLOAT8)
DEFINE_ALL(f16, DEFINE_FLOAT8)
