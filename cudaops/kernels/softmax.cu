// Softmax over rows of n elements, and its gradient.
//
//   forward:   y = exp(x − max) / Σ exp(x − max)         backward:  dx = y ⊙ (g − Σ g ⊙ y)
//
// y may be x, dx may be g or y. Launch: a warp a row, four rows a block, for rows of up to 1024 elements, which it holds in
// registers; else a block of 512 threads a row, which finds it in the cache the second and third time.
#include "common.cuh"

constexpr int kRowsPerBlock = 4, kThreads = 512, kPerLane = 32;

template <class T> __device__ __forceinline__ void softmaxWarp(T* y, const T* x, int64_t rows, int n) {
  int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  int lane = threadIdx.x % kWarp;
  if (row >= rows) return;
  x += row * n, y += row * n;
  float v[kPerLane], max = -INFINITY, sum = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    v[k] = k * kWarp + lane < n ? toFloat(x[k * kWarp + lane]) : -INFINITY;
    max = Max::merge(max, v[k]);
  }
  max = warpReduce<Max>(max);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    if (k * kWarp >= n) break;
    v[k] = expf(v[k] - max);
    sum += v[k];
  }
  float inverse = 1.0f / warpReduce<Sum>(sum);
#pragma unroll
  for (int k = 0; k < kPerLane; k++)
    if (k * kWarp + lane < n) y[k * kWarp + lane] = fromFloat<T>(v[k] * inverse);
}

template <class T> __device__ __forceinline__ void softmaxBlock(T* y, const T* x, int n) {
  int64_t row = blockIdx.x;
  x += row * n, y += row * n;
  float max = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) max = Max::merge(max, toFloat(x[i]));
  max = blockReduce<Max>(max);
  for (int i = threadIdx.x; i < n; i += kThreads) sum += expf(toFloat(x[i]) - max);
  float inverse = 1.0f / blockReduce<Sum>(sum);
  for (int i = threadIdx.x; i < n; i += kThreads) y[i] = fromFloat<T>(expf(toFloat(x[i]) - max) * inverse);
}

template <class T> __device__ __forceinline__ void backwardWarp(T* dx, const T* g, const T* y, int64_t rows, int n) {
  int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  int lane = threadIdx.x % kWarp;
  if (row >= rows) return;
  dx += row * n, g += row * n, y += row * n;
  float vg[kPerLane], vy[kPerLane], dot = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    bool in = k * kWarp + lane < n;
    vg[k] = in ? toFloat(g[k * kWarp + lane]) : 0.0f;
    vy[k] = in ? toFloat(y[k * kWarp + lane]) : 0.0f;
    dot += vg[k] * vy[k];
  }
  dot = warpReduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < kPerLane; k++)
    if (k * kWarp + lane < n) dx[k * kWarp + lane] = fromFloat<T>(vy[k] * (vg[k] - dot));
}

template <class T> __device__ __forceinline__ void backwardBlock(T* dx, const T* g, const T* y, int n) {
  int64_t row = blockIdx.x;
  dx += row * n, g += row * n, y += row * n;
  float dot = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) dot += toFloat(g[i]) * toFloat(y[i]);
  dot = blockReduce<Sum>(dot);
  for (int i = threadIdx.x; i < n; i += kThreads) dx[i] = fromFloat<T>(toFloat(y[i]) * (toFloat(g[i]) - dot));
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarp)                                          \
      softmax_warp_##T(T* y, const T* x, int64_t rows, int n) {                                               \
    softmaxWarp(y, x, rows, n);                                                                               \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) softmax_block_##T(T* y, const T* x, int n) {         \
    softmaxBlock(y, x, n);                                                                                    \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarp)                                          \
      softmax_backward_warp_##T(T* dx, const T* g, const T* y, int64_t rows, int n) {                         \
    backwardWarp(dx, g, y, rows, n);                                                                          \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      softmax_backward_block_##T(T* dx, const T* g, const T* y, int n) {                                      \
    backwardBlock(dx, g, y, n);                                                                               \
  }
FOR_STORAGE_TYPES(DEFINE)
