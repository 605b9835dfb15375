// Divides a tensor by its norm, and computes the gradient:
//
//   forward:   y = x / r,  r = ‖x‖ + 1e-7          backward:  dx = g / r − x·⟨g, x⟩ / (r²·‖x‖)
//
// This is the first step of the Newton-Schulz iteration. If ‖x‖ = 0, the second term is 0. y may be
// x, and dx may be g.
//
// normalize_sums computes partial sums of x·x and of g·x, one per block. Each block of the second
// kernel adds them all up in the same order, before processing its elements.
#include "common.cuh"

constexpr int kThreads = 256;

// forElements calls packs(i) for N elements at i if the pointers are aligned, and one(i) for single
// elements. Launch: blocks that loop over the elements.
template <int N, class Packs, class One>
__device__ __forceinline__ void forElements(int64_t n, bool vectors, Packs packs, One one) {
  int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  int64_t whole = vectors ? n / N : 0;
#pragma unroll 4
  for (int64_t i = thread; i < whole; i += threads) packs(i * N);
  for (int64_t i = whole * N + thread; i < n; i += threads) one(i);
}

// parts [2, gridDim.x] = Σ x·x and, unless g is null, Σ g·x. Launch: a few blocks per
// multiprocessor.
template <class T> __device__ __forceinline__ void sums(float* parts, const T* x, const T* g, int64_t n) {
  constexpr int N = kVec<T>;
  float xx = 0, gx = 0;
  forElements<N>(
      n, aligned16(x, g),
      [&](int64_t i) {
        Pack<T, N> v = load<N>(x + i), w = {};
        if (g) w = load<N>(g + i);
#pragma unroll
        for (int j = 0; j < N; j++) xx += v.get(j) * v.get(j), gx += v.get(j) * w.get(j);
      },
      [&](int64_t i) {
        float v = toFloat(x[i]);
        xx += v * v;
        if (g) gx += v * toFloat(g[i]);
      });
  xx = blockReduce<Sum>(xx);
  gx = blockReduce<Sum>(gx);
  if (threadIdx.x == 0) parts[blockIdx.x] = xx, parts[gridDim.x + blockIdx.x] = gx;
}

__device__ __forceinline__ float total(const float* parts, int count) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  return blockReduce<Sum>(sum);
}

constexpr float kEps = 1e-7f;

template <class Y, class X>
__device__ __forceinline__ void normalize(Y* y, const X* x, const float* parts, int count, int64_t n) {
  constexpr int N = kVec<X>;  // 16 bytes to read, and never more to write
  float inverse = 1.0f / (sqrtf(total(parts, count)) + kEps);
  forElements<N>(
      n, aligned16(y, x),
      [&](int64_t i) {
        Pack<X, N> v = load<N>(x + i);
        Pack<Y, N> out;
#pragma unroll
        for (int j = 0; j < N; j++) out.set(j, v.get(j) * inverse);
        store(y + i, out);
      },
      [&](int64_t i) { y[i] = fromFloat<Y>(toFloat(x[i]) * inverse); });
}

template <class T>
__device__ __forceinline__ void normalizeBackward(T* dx, const T* g, const T* x, const float* parts, int count, int64_t n) {
  constexpr int N = kVec<T>;
  float norm = sqrtf(total(parts, count)), dot = total(parts + count, count), r = norm + kEps;
  float pull = norm > 0 ? dot / r / r / norm : 0.0f;
  forElements<N>(
      n, aligned16(dx, g, x),
      [&](int64_t i) {
        Pack<T, N> v = load<N>(g + i), w = load<N>(x + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.set(j, v.get(j) / r - w.get(j) * pull);
        store(dx + i, v);
      },
      [&](int64_t i) { dx[i] = fromFloat<T>(toFloat(g[i]) / r - toFloat(x[i]) * pull); });
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      normalize_sums_##T(float* parts, const T* x, const T* g, int64_t n) {                                   \
    sums(parts, x, g, n);                                                                                     \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      normalize_backward_##T(T* dx, const T* g, const T* x, const float* parts, int count, int64_t n) {       \
    normalizeBackward(dx, g, x, parts, count, n);                                                             \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

#define DEFINE(Y, X)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      normalize_##Y##_##X(Y* y, const X* x, const float* parts, int count, int64_t n) {                       \
    normalize(y, x, parts, count, n);                                                                         \
  }
DEFINE(f32, f32)
DEFINE(bf16, bf16)
DEFINE(f16, f16)
DEFINE(bf16, f32)
DEFINE(f16, f32)
DEFINE(f16, bf16)
