// RMSNorm over the rows of x [rows, d], with weights w [d] in float32.
//
//   forward:   rstd = 1/sqrt(mean(x²) + eps),  y = x·rstd ⊙ w           first x ← x + residual, where there is one
//   backward:  dx = rstd·(g ⊙ w − n·mean(g ⊙ w ⊙ n)) + add,  dw = Σ_rows g ⊙ n,  n = x·rstd
//
// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) add is the gradient that reaches x past the norm.
//
// Forward reads and writes each element once: a warp holds a row in registers, all its loads in flight at once. Backward
// keeps a pack of columns in each thread and walks down the rows, so that dw adds up in registers; while it reduces one group
// of rows it loads the next. Blocks leave partial sums of dw, which a second kernel adds up in order. Rows that do not fit,
// or are not aligned to 16 bytes, take kernels that read them twice.
#include "common.cuh"

// ---- Forward ----

constexpr int kForwardWarps = 4;

// K packs a lane: rows of up to 32·K·kVec elements, d a multiple of kVec. Launch: a warp a row, kForwardWarps a block.
template <class T, int K>
__device__ __forceinline__ void forwardWarp(T* y, float* rstd, T* x, const T* residual, const float* w, int64_t rows, int d,
                                            float eps) {
  constexpr int N = kVec<T>;
  int64_t row = int64_t(blockIdx.x) * kForwardWarps + threadIdx.x / kWarp;
  int lane = threadIdx.x % kWarp;
  if (row >= rows) return;
  x += row * d, y += row * d;

  Pack<T, N> v[K];
#pragma unroll
  for (int k = 0; k < K; k++) {
    int i = (k * kWarp + lane) * N;
    v[k] = {};
    if (i < d) v[k] = loadOnce<N>(x + i);
  }
  if (residual) {
    residual += row * d;
#pragma unroll
    for (int k = 0; k < K; k++) {
      int i = (k * kWarp + lane) * N;
      if (i >= d) break;
      Pack<T, N> r = loadOnce<N>(residual + i);
#pragma unroll
      for (int j = 0; j < N; j++) v[k].set(j, v[k].get(j) + r.get(j));
      store(x + i, v[k]);
    }
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int j = 0; j < N; j++) sum += v[k].get(j) * v[k].get(j);
  float s = rsqrtf(warpReduce<Sum>(sum) / d + eps);
  if (rstd && lane == 0) rstd[row] = s;
#pragma unroll
  for (int k = 0; k < K; k++) {
    int i = (k * kWarp + lane) * N;
    if (i >= d) break;
    Pack<float, N> wk = load<N>(w + i);
#pragma unroll
    for (int j = 0; j < N; j++) v[k].set(j, v[k].get(j) * s * wk.v[j]);
    store(y + i, v[k]);
  }
}

// Any d. Launch: a block a row.
template <class T>
__device__ __forceinline__ void forwardAny(T* y, float* rstd, T* x, const T* residual, const float* w, int d, float eps) {
  int64_t row = blockIdx.x;
  x += row * d, y += row * d;
  float sum = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    T v = x[i];
    if (residual) x[i] = v = fromFloat<T>(toFloat(v) + toFloat(residual[row * d + i]));
    sum += toFloat(v) * toFloat(v);
  }
  float s = rsqrtf(blockReduce<Sum>(sum) / d + eps);
  if (rstd && threadIdx.x == 0) rstd[row] = s;
  for (int i = threadIdx.x; i < d; i += blockDim.x) y[i] = fromFloat<T>(toFloat(x[i]) * s * w[i]);
}

#define DEFINE_WARP(T, K)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kForwardWarps* kWarp)                                          \
      rmsnorm_warp##K##_##T(T* y, float* rstd, T* x, const T* residual, const float* w, int64_t rows, int d,  \
                            float eps) {                                                                      \
    forwardWarp<T, K>(y, rstd, x, residual, w, rows, d, eps);                                                 \
  }
#define DEFINE(T)                                                                                             \
  DEFINE_WARP(T, 2)                                                                                           \
  DEFINE_WARP(T, 4)                                                                                           \
  DEFINE_WARP(T, 8)                                                                                           \
  DEFINE_WARP(T, 16)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      rmsnorm_any_##T(T* y, float* rstd, T* x, const T* residual, const float* w, int d, float eps) {         \
    forwardAny(y, rstd, x, residual, w, d, eps);                                                              \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

// ---- Backward ----

constexpr int kStages = 4;  // rows on their way from memory at once, in each group of threads

// d a multiple of kVec, at most blockDim.x·kVec. Launch: blockDim.x threads, whole warps, hold a row; blockDim.y such groups
// a block, at most 1024 threads; any number of blocks, each of which writes a row of partial [blocks, d].
// Dynamic shared memory: kStages·3·16 bytes a thread (2 instead of 3 without add), and at least blockDim.y·d floats.
template <class T>
__device__ __forceinline__ void backwardRows(T* dx, float* partial, const T* g, const T* x, const float* w,
                                             const float* rstd, const T* add, int64_t rows, int d) {
  constexpr int N = kVec<T>;
  using V = Pack<T, N>;
  __shared__ float dots[2][kWarp];
  extern __shared__ uint4 shared[];
  int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, firstWarp = threadIdx.y * warps, warp = thread / kWarp;
  int col = threadIdx.x * N;
  bool active = col < d;
  auto slot = [&](int array, int stage) {
    return reinterpret_cast<V*>(shared) + (array * kStages + stage) * threads + thread;
  };

  int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t blockRow = int64_t(blockIdx.x) * blockDim.y;  // all threads run the same number of rounds
  int64_t row = blockRow + threadIdx.y;
  auto fetch = [&](int64_t row, int stage) {  // each thread fetches what it will itself read
    bool wanted = active && row < rows;
    int64_t at = wanted ? row * d + col : 0;
    copyAsync(slot(0, stage), x + at, wanted);
    copyAsync(slot(1, stage), g + at, wanted);
    if (add) copyAsync(slot(2, stage), add + at, wanted);
    commitAsync();
  };
  for (int i = 0; i < kStages - 1; i++) fetch(row + i * step, i);

  Pack<float, N> wc = {};
  if (active) wc = load<N>(w + col);
  float dw[N] = {};
  float nextRstd = row < rows ? rstd[row] : 0.0f;
  for (int round = 0; blockRow < rows; round++, blockRow += step, row += step) {
    int stage = round % kStages;
    fetch(row + (kStages - 1) * step, (round + kStages - 1) % kStages);
    float s = nextRstd;
    nextRstd = row + step < rows ? rstd[row + step] : 0.0f;
    awaitAsync<kStages - 1>();
    V xr = *slot(0, stage), gr = *slot(1, stage);
    float dot = 0;
#pragma unroll
    for (int j = 0; j < N; j++) dot += gr.get(j) * wc.v[j] * xr.get(j);
    dot = warpReduce<Sum>(dot);
    if (lane == 0) dots[round % 2][warp] = dot;
    __syncthreads();
    dot = warpReduce<Sum>(lane < warps ? dots[round % 2][firstWarp + lane] : 0.0f);
    float m = dot / d * s * s;
#pragma unroll
    for (int j = 0; j < N; j++) {
      float gj = gr.get(j), xj = xr.get(j);
      dw[j] += gj * (xj * s);
      xr.set(j, s * (gj * wc.v[j] - xj * m) + (add ? slot(2, stage)->get(j) : 0.0f));
    }
    if (active && row < rows) store(dx + row * d + col, xr);
  }
  awaitAsync<0>();

  float* sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  if (active)
#pragma unroll
    for (int j = 0; j < N; j++) sums[threadIdx.y * d + col + j] = dw[j];
  __syncthreads();
  for (int i = thread; i < d; i += threads) {
    float sum = 0;
    for (int y = 0; y < blockDim.y; y++) sum += sums[y * d + i];
    partial[int64_t(blockIdx.x) * d + i] = sum;
  }
}

// dx for any d. Launch: a block a row.
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

// Partial sums of dw for any d, over the rows blockIdx.y, blockIdx.y + gridDim.y, ... Launch: a thread a column.
template <class T>
__device__ __forceinline__ void weightAny(float* partial, const T* g, const T* x, const float* rstd, int64_t rows, int d) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= d) return;
  float sum = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    sum += toFloat(g[row * d + i]) * (toFloat(x[row * d + i]) * rstd[row]);
  partial[int64_t(blockIdx.y) * d + i] = sum;
}

// dw[i] = Σ_blocks partial[block, i]. Launch: 32 columns a block, 32 by 32 threads.
template <class T>
__device__ __forceinline__ void weightSum(T* dw, const float* partial, int blocks, int d) {
  __shared__ float tile[kWarp][kWarp + 1];
  int i = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0;
  if (i < d)
    for (int b = threadIdx.y; b < blocks; b += kWarp) sum += partial[int64_t(b) * d + i];
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warpReduce<Sum>(tile[threadIdx.x][threadIdx.y]);
  i = blockIdx.x * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && i < d) dw[i] = fromFloat<T>(sum);
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(1024)                                                          \
      rmsnorm_backward_##T(T* dx, float* partial, const T* g, const T* x, const float* w, const float* rstd,  \
                           const T* add, int64_t rows, int d) {                                               \
    backwardRows(dx, partial, g, x, w, rstd, add, rows, d);                                                   \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      rmsnorm_backward_any_##T(T* dx, const T* g, const T* x, const float* w, const float* rstd,              \
                               const T* add, int d) {                                                         \
    backwardAny(dx, g, x, w, rstd, add, d);                                                                   \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      rmsnorm_weight_any_##T(float* partial, const T* g, const T* x, const float* rstd, int64_t rows, int d) { \
    weightAny(partial, g, x, rstd, rows, d);                                                                  \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(1024)                                                          \
      rmsnorm_weight_sum_##T(T* dw, const float* partial, int blocks, int d) {                                \
    weightSum(dw, partial, blocks, d);                                                                        \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
