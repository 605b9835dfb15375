// Softmax over rows of n elements, and its gradient.
//
//   forward:   y = exp(x − max) / Σ exp(x − max)         backward:  dx = y ⊙ (g − Σ g ⊙ y)
//
// y may be x, and dx may be g or y. An aligned row is held in registers: by a warp if it has up to
// 1024 elements, and otherwise by a block. A row that is not aligned or too long takes a block that
// reads it again from the cache.
#include "rows.cuh"

constexpr int kRowsPerBlock = 4, kPerLane = 32;

// WarpRow is a row in a warp's registers; its length is a multiple of kVec. Launch: one warp per
// row, kRowsPerBlock rows per block.
template <class T> struct WarpRow {
  static constexpr int N = kVec<T>;
  int64_t row;
  int lane, n;
  __device__ __forceinline__ explicit WarpRow(int n)
      : row(int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp), lane(threadIdx.x % kWarp), n(n) {}
  __device__ __forceinline__ int at(int k) const { return (k * kWarp + lane) * N; }

  __device__ __forceinline__ void read(float (&v)[kPerLane], const T* x, float outside) const {
#pragma unroll
    for (int k = 0; k < kPerLane / N; k++) {
      Pack<T, N> p;
      if (at(k) < n) p = load<N>(x + row * n + at(k));
#pragma unroll
      for (int j = 0; j < N; j++) v[k * N + j] = at(k) < n ? p.get(j) : outside;
    }
  }
  __device__ __forceinline__ void write(T* y, const float (&v)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane / N; k++) {
      if (at(k) >= n) break;
      Pack<T, N> p;
#pragma unroll
      for (int j = 0; j < N; j++) p.set(j, v[k * N + j]);
      store(y + row * n + at(k), p);
    }
  }
};

template <class T> __device__ __forceinline__ void softmaxWarp(T* y, const T* x, int64_t rows, int n) {
  WarpRow<T> r(n);
  if (r.row >= rows) return;
  float v[kPerLane], max = -INFINITY, sum = 0;
  r.read(v, x, -INFINITY);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) max = Max::merge(max, v[k]);
  Shifted<T> e(warpReduce<Max>(max));
#pragma unroll
  for (int k = 0; k < kPerLane; k++) sum += v[k] = e.exp(v[k]);
  float inverse = 1.0f / warpReduce<Sum>(sum);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) v[k] *= inverse;
  r.write(y, v);
}

template <class T> __device__ __forceinline__ void backwardWarp(T* dx, const T* g, const T* y, int64_t rows, int n) {
  WarpRow<T> r(n);
  if (r.row >= rows) return;
  float vg[kPerLane], vy[kPerLane], dot = 0;
  r.read(vg, g, 0);
  r.read(vy, y, 0);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) dot += vg[k] * vy[k];
  dot = warpReduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) vy[k] *= vg[k] - dot;
  r.write(dx, vy);
}

// HeldRow is a row in a block's registers, with P packs per thread. Launch: one block per row; its
// length is a multiple of kVec and at most blockDim.x·P·kVec.
template <class T, int P> struct HeldRow {
  static constexpr int N = kVec<T>;
  int n;
  __device__ __forceinline__ int at(int k) const { return int(k * blockDim.x + threadIdx.x) * N; }

  __device__ __forceinline__ void read(Pack<T, N> (&v)[P], const T* x, float outside) const {
    x += int64_t(blockIdx.x) * n;
#pragma unroll
    for (int k = 0; k < P; k++) {
      if (at(k) < n)
        v[k] = load<N>(x + at(k));
      else
#pragma unroll
        for (int j = 0; j < N; j++) v[k].set(j, outside);
    }
  }
  __device__ __forceinline__ void write(T* y, const Pack<T, N> (&v)[P]) const {
    y += int64_t(blockIdx.x) * n;
#pragma unroll
    for (int k = 0; k < P; k++)
      if (at(k) < n) store(y + at(k), v[k]);
  }
};

template <class T, int P> __device__ __forceinline__ void softmaxHeld(T* y, const T* x, int n) {
  constexpr int N = kVec<T>;
  HeldRow<T, P> r{n};
  Pack<T, N> v[P];
  float e[P * N], max = -INFINITY, sum = 0;
  r.read(v, x, -INFINITY);
#pragma unroll
  for (int k = 0; k < P; k++)
#pragma unroll
    for (int j = 0; j < N; j++) max = Max::merge(max, v[k].get(j));
  Shifted<T> shifted(blockReduce<Max>(max));
#pragma unroll
  for (int k = 0; k < P; k++)
#pragma unroll
    for (int j = 0; j < N; j++) sum += e[k * N + j] = shifted.exp(v[k].get(j));
  float inverse = 1.0f / blockReduce<Sum>(sum);
#pragma unroll
  for (int k = 0; k < P; k++)
#pragma unroll
    for (int j = 0; j < N; j++) v[k].set(j, e[k * N + j] * inverse);
  r.write(y, v);
}

template <class T, int P> __device__ __forceinline__ void backwardHeld(T* dx, const T* g, const T* y, int n) {
  constexpr int N = kVec<T>;
  HeldRow<T, P> r{n};
  Pack<T, N> vg[P], vy[P];
  float dot = 0;
  r.read(vg, g, 0);
  r.read(vy, y, 0);
#pragma unroll
  for (int k = 0; k < P; k++)
#pragma unroll
    for (int j = 0; j < N; j++) dot += vg[k].get(j) * vy[k].get(j);
  dot = blockReduce<Sum>(dot);
#pragma unroll
  for (int k = 0; k < P; k++)
#pragma unroll
    for (int j = 0; j < N; j++) vy[k].set(j, vy[k].get(j) * (vg[k].get(j) - dot));
  r.write(dx, vy);
}

// Launch: one block per row.
template <class T> __device__ __forceinline__ void softmaxBlock(T* y, const T* x, int n) {
  x += int64_t(blockIdx.x) * n, y += int64_t(blockIdx.x) * n;
  RowSum<T> s;
  forRow(x, n, [&](int, auto p) { s.add(p); });
  s.reduce();
  float inverse = 1.0f / s.sum;
  Shifted<T> e(s.max);
  bool together = aligned16(y);
  forRow(x, n, [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, e.exp(p.get(j)) * inverse);
    put(y + i, p, together);
  });
}

template <class T> __device__ __forceinline__ void backwardBlock(T* dx, const T* g, const T* y, int n) {
  int64_t row = blockIdx.x;
  dx += row * n, g += row * n, y += row * n;
  bool together = aligned16(dx, g);
  float dot = 0;
  forRow(y, n, [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
    Pack<T, N> q = fetch<N>(g + i, together);
#pragma unroll
    for (int j = 0; j < N; j++) dot += p.get(j) * q.get(j);
  });
  dot = blockReduce<Sum>(dot);
  forRow(y, n, [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
    Pack<T, N> q = fetch<N>(g + i, together);
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, p.get(j) * (q.get(j) - dot));
    put(dx + i, p, together);
  });
}

#define DEFINE_HELD(T, P)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads) softmax_held##P##_##T(T* y, const T* x, int n) {     \
    softmaxHeld<T, P>(y, x, n);                                                                               \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      softmax_backward_held##P##_##T(T* dx, const T* g, const T* y, int n) {                                  \
    backwardHeld<T, P>(dx, g, y, n);                                                                          \
  }
#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarp)                                          \
      softmax_warp_##T(T* y, const T* x, int64_t rows, int n) {                                               \
    softmaxWarp(y, x, rows, n);                                                                               \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarp)                                          \
      softmax_backward_warp_##T(T* dx, const T* g, const T* y, int64_t rows, int n) {                         \
    backwardWarp(dx, g, y, rows, n);                                                                          \
  }                                                                                                           \
  DEFINE_HELD(T, 2)                                                                                           \
  DEFINE_HELD(T, 4)                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) softmax_block_##T(T* y, const T* x, int n) {         \
    softmaxBlock(y, x, n);                                                                                    \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      softmax_backward_block_##T(T* dx, const T* g, const T* y, int n) {                                      \
    backwardBlock(dx, g, y, n);                                                                               \
  }
FOR_STORAGE_TYPES(DEFINE)
