// LayerNorm over the rows of x [rows, d], with float32 weights w and biases b [d].
//
//   forward:   y = (x − mean(x))·s ⊙ w + b,  s = 1/sqrt(var(x) + eps)
//   backward:  dx = s·(g ⊙ w − mean(g ⊙ w) − n·mean(g ⊙ w ⊙ n)) + add,  dw = Σ_rows g ⊙ n,  db = Σ_rows g,
//              n = (x − mean(x))·s
//
// (Ba, Kiros and Hinton, "Layer Normalization", 2016.) add is the gradient that reaches x on a path
// around the norm.
//
// The mean is the sum of two floats. The first is the mean rounded to float. For numbers close to it,
// the difference from it is exact, and the second float is the mean of these differences. Rows with a
// mean of 10⁷ and a deviation of 1 are therefore as precise as those around 0. The variance is the
// mean square of x − first − second, and cannot be negative.
//
// In the forward pass, a few threads hold a row in registers, so that each element is read and
// written once. In the backward pass, a block goes over many rows. The sums for dw and db stay in
// registers until the end, when each block writes its own, and rmsnorm_weight_sum of norm.cu adds
// them up in order. Rows that are not aligned to 16 bytes, or too long, take kernels that read them
// several times.
#include "held.cuh"

constexpr int kStats = 3;  // per row: the two parts of the mean, and s

// SumOf<i> is a distinct Sum for each i, because groupReduce may be called only once per Op.
template <int i> struct SumOf : Sum {};

// ---- Forward ----

// Launch: blockDim.x threads, whole warps, hold a row of up to blockDim.x·P·kVec elements, a multiple of kVec. A block has
// blockDim.y rows, and at most kHeld threads.
template <class T, int P>
__device__ __forceinline__ void forwardHeld(T* y, float* stats, const T* x, const float* w, const float* b, int64_t rows, int d,
                                            float eps) {
  constexpr int N = kVec<T>;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, start = row * d;
  auto at = [&](int k) { return int(k * blockDim.x + threadIdx.x) * N; };
  auto holds = [&](int k) { return row < rows && at(k) < d; };

  float v[P][N] = {}, sum = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!holds(k)) continue;
    const Pack<T, N> p = load<N>(x + start + at(k));
#pragma unroll
    for (int j = 0; j < N; j++) sum += v[k][j] = p.get(j);
  }
  const float first = groupReduce<SumOf<0>>(sum) / d;

  sum = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!holds(k)) continue;
#pragma unroll
    for (int j = 0; j < N; j++) sum += v[k][j] -= first;
  }
  const float second = groupReduce<SumOf<1>>(sum) / d;

  float squares = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!holds(k)) continue;
#pragma unroll
    for (int j = 0; j < N; j++) {
      v[k][j] -= second;
      squares = fmaf(v[k][j], v[k][j], squares);
    }
  }
  const float s = rsqrtf(groupReduce<SumOf<2>>(squares) / d + eps);

  if (threadIdx.x == 0 && row < rows) {
    float* to = stats + row * kStats;
    to[0] = first, to[1] = second, to[2] = s;
  }
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!holds(k)) continue;
    const Pack<float, N> weights = load<N>(w + at(k)), biases = load<N>(b + at(k));
    Pack<T, N> p;
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, fmaf(v[k][j] * s, weights.v[j], biases.v[j]));
    store(y + start + at(k), p);
  }
}

// Any d. Launch: one block per row.
template <class T>
__device__ __forceinline__ void forwardAny(T* y, float* stats, const T* x, const float* w, const float* b, int d, float eps) {
  const int64_t row = blockIdx.x;
  x += row * d, y += row * d;
  float sum = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) sum += toFloat(x[i]);
  const float first = blockReduce<Sum>(sum) / d;

  sum = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) sum += toFloat(x[i]) - first;
  const float second = blockReduce<Sum>(sum) / d;

  float squares = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const float v = toFloat(x[i]) - first - second;
    squares = fmaf(v, v, squares);
  }
  const float s = rsqrtf(blockReduce<Sum>(squares) / d + eps);

  if (threadIdx.x == 0) {
    float* to = stats + row * kStats;
    to[0] = first, to[1] = second, to[2] = s;
  }
  for (int i = threadIdx.x; i < d; i += blockDim.x)
    y[i] = fromFloat<T>(fmaf((toFloat(x[i]) - first - second) * s, w[i], b[i]));
}

// ---- Backward ----

// Row holds the values that the gradients of a row's elements have in common.
struct Row {
  float first, second, s;  // the row's statistics
  float mean, along;       // mean(g ⊙ w), and s²·mean(g ⊙ w ⊙ (x − mean(x)))

  __device__ __forceinline__ explicit Row(const float* stats) : first(stats[0]), second(stats[1]), s(stats[2]) {}
  __device__ __forceinline__ float centered(float x) const { return x - first - second; }
  __device__ __forceinline__ float gradient(float g, float w, float x, float add) const {
    return fmaf(s, fmaf(g, w, -mean) - centered(x) * along, add);
  }
};

// reduceTwo adds up two numbers over the blockDim.x threads that hold a row. It may be called once
// per round. A single barrier suffices, because consecutive rounds use different memory.
__device__ __forceinline__ float2 reduceTwo(float a, float b, int round) {
  __shared__ float2 parts[2][kHeld / kWarp];
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, first = threadIdx.y * warps;
  a = warpReduce<Sum>(a), b = warpReduce<Sum>(b);
  if (warps == 1) return make_float2(a, b);
  float2* of = parts[round % 2] + first;
  if (lane == 0) of[threadIdx.x / kWarp] = make_float2(a, b);
  __syncthreads();
  const float2 mine = lane < warps ? of[lane] : make_float2(0, 0);
  return make_float2(warpReduce<Sum>(mine.x), warpReduce<Sum>(mine.y));
}

// leaveSums adds up the sums that the block's threads hold for their columns, and stores the totals in the block's row of
// partial [blocks, d].
template <int P, int N> __device__ __forceinline__ void leaveSums(float* partial, const float (&sums)[P][N], float* shared, int d) {
  __syncthreads();  // all threads have read the previous contents of shared
#pragma unroll
  for (int k = 0; k < P; k++) {
    const int at = int(k * blockDim.x + threadIdx.x) * N;
    if (at >= d) continue;
#pragma unroll
    for (int j = 0; j < N; j++) shared[threadIdx.y * d + at + j] = sums[k][j];
  }
  __syncthreads();

  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < d; i += blockDim.x * blockDim.y) {
    float sum = 0;
    for (int y = 0; y < blockDim.y; y++) sum += shared[y * d + i];
    partial[int64_t(blockIdx.x) * d + i] = sum;
  }
}

// Launch: threads as in forwardHeld, any number of blocks, and dynamic shared memory of
// blockDim.y·d floats.
template <class T, int P>
__device__ __forceinline__ void backwardHeld(T* dx, float* weights, float* biases, const T* g, const T* x, const float* w,
                                             const float* stats, const T* add, int64_t rows, int d) {
  constexpr int N = kVec<T>;
  extern __shared__ float shared[];
  auto at = [&](int k) { return int(k * blockDim.x + threadIdx.x) * N; };

  Pack<float, N> wc[P] = {};
#pragma unroll
  for (int k = 0; k < P; k++)
    if (at(k) < d) wc[k] = load<N>(w + at(k));
  float dw[P][N] = {}, db[P][N] = {};

  // All threads of a block must run the same number of rounds, since they synchronize in reduceTwo.
  int round = 0;
  for (int64_t least = int64_t(blockIdx.x) * blockDim.y; least < rows; least += int64_t(gridDim.x) * blockDim.y, round++) {
    const int64_t row = least + threadIdx.y, start = row * d;
    auto here = [&](int k) { return row < rows && at(k) < d; };
    Row r(stats + (row < rows ? row : least) * kStats);
    Pack<T, N> xr[P], gr[P];
    float mean = 0, along = 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
      if (!here(k)) continue;
      xr[k] = load<N>(x + start + at(k)), gr[k] = load<N>(g + start + at(k));
#pragma unroll
      for (int j = 0; j < N; j++) {
        const float gw = gr[k].get(j) * wc[k].v[j];
        mean += gw;
        along = fmaf(gw, r.centered(xr[k].get(j)), along);
      }
    }
    const float2 sums = reduceTwo(mean, along, round);
    r.mean = sums.x / d, r.along = sums.y / d * r.s * r.s;

#pragma unroll
    for (int k = 0; k < P; k++) {
      if (!here(k)) continue;
      Pack<T, N> more = {}, result;
      if (add) more = load<N>(add + start + at(k));
#pragma unroll
      for (int j = 0; j < N; j++) {
        const float gj = gr[k].get(j), xj = xr[k].get(j);
        dw[k][j] = fmaf(gj, r.centered(xj) * r.s, dw[k][j]);
        db[k][j] += gj;
        result.set(j, r.gradient(gj, wc[k].v[j], xj, add ? more.get(j) : 0.0f));
      }
      store(dx + start + at(k), result);
    }
  }

  leaveSums<P, N>(weights, dw, shared, d);
  leaveSums<P, N>(biases, db, shared, d);
}

// dx for any d. Launch: one block per row.
template <class T>
__device__ __forceinline__ void backwardAny(T* dx, const T* g, const T* x, const float* w, const float* stats, const T* add,
                                            int d) {
  const int64_t row = blockIdx.x;
  x += row * d, g += row * d, dx += row * d;
  Row r(stats + row * kStats);
  float mean = 0, along = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const float gw = toFloat(g[i]) * w[i];
    mean += gw;
    along = fmaf(gw, r.centered(toFloat(x[i])), along);
  }
  r.mean = blockReduce<Sum>(mean) / d;
  r.along = blockReduce<Sum>(along) / d * r.s * r.s;

  for (int i = threadIdx.x; i < d; i += blockDim.x)
    dx[i] = fromFloat<T>(r.gradient(toFloat(g[i]), w[i], toFloat(x[i]), add ? toFloat(add[row * d + i]) : 0.0f));
}

// Partial sums of dw and db for any d, over the rows blockIdx.y, blockIdx.y + gridDim.y, ...
// Launch: one thread per column.
template <class T>
__device__ __forceinline__ void weightAny(float* weights, float* biases, const T* g, const T* x, const float* stats, int64_t rows,
                                          int d) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= d) return;
  float dw = 0, db = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const Row r(stats + row * kStats);
    const float gi = toFloat(g[row * d + i]);
    dw = fmaf(gi, r.centered(toFloat(x[row * d + i])) * r.s, dw);
    db += gi;
  }
  weights[int64_t(blockIdx.y) * d + i] = dw;
  biases[int64_t(blockIdx.y) * d + i] = db;
}

#define DEFINE_HELD(T, P)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      layernorm_held##P##_##T(T* y, float* stats, const T* x, const float* w, const float* b, int64_t rows,   \
                              int d, float eps) {                                                             \
    forwardHeld<T, P>(y, stats, x, w, b, rows, d, eps);                                                       \
  }
#define DEFINE_BACKWARD(T, P)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      layernorm_backward_held##P##_##T(T* dx, float* weights, float* biases, const T* g, const T* x,          \
                                       const float* w, const float* stats, const T* add, int64_t rows,        \
                                       int d) {                                                               \
    backwardHeld<T, P>(dx, weights, biases, g, x, w, stats, add, rows, d);                                    \
  }
#define DEFINE(T)                                                                                             \
  DEFINE_HELD(T, 1)                                                                                           \
  DEFINE_HELD(T, 2)                                                                                           \
  DEFINE_HELD(T, 4)                                                                                           \
  DEFINE_BACKWARD(T, 1)                                                                                       \
  DEFINE_BACKWARD(T, 2)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      layernorm_any_##T(T* y, float* stats, const T* x, const float* w, const float* b, int d, float eps) {   \
    forwardAny(y, stats, x, w, b, d, eps);                                                                    \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      layernorm_backward_any_##T(T* dx, const T* g, const T* x, const float* w, const float* stats,           \
                                 const T* add, int d) {                                                       \
    backwardAny(dx, g, x, w, stats, add, d);                                                                  \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      layernorm_weight_any_##T(float* weights, float* biases, const T* g, const T* x, const float* stats,     \
                               int64_t rows, int d) {                                                         \
    weightAny(weights, biases, g, x, stats, rows, d);                                                         \
  }
FOR_STORAGE_TYPES(DEFINE)
