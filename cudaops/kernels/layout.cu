// Copies from one layout to another: transposition, permutation, slices, concatenation, repetition. For every index of
// up to kDims dimensions
//
//   y[Σ_k index_k·yStride_k] = x[Σ_k index_k·xStride_k]
//
// with strides in elements of 2, 4, 8 or 16 bytes; what the elements are does not matter. The last dimension is the
// innermost; the host has merged dimensions and widened elements as far as the strides allow.
#include "common.cuh"

constexpr int kDims = 6, kThreads = 256, kUnroll = 4;

struct Layout {
  int64_t size[kDims], yStride[kDims], xStride[kDims];
};

// Launch: a thread for kUnroll elements, a block's width apart; total is all sizes' product, below 2³¹.
template <class T> __device__ __forceinline__ void copyStrided(T* y, const T* x, const Layout& l, unsigned total) {
  T v[kUnroll];
  int64_t to[kUnroll];
  unsigned first = blockIdx.x * kUnroll * kThreads + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    unsigned rest = first + u * kThreads;
    to[u] = -1;
    if (rest >= total) continue;
    int64_t from = 0, at = 0;
#pragma unroll
    for (int k = kDims - 1; k >= 0; k--) {
      unsigned size = l.size[k];
      if (size == 1) continue;  // the same for all threads
      unsigned index = rest % size;
      rest /= size;
      from += index * l.xStride[k], at += index * l.yStride[k];
    }
    v[u] = x[from];
    to[u] = at;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; u++)
    if (to[u] >= 0) y[to[u]] = v[u];
}

constexpr int kTile = 64;

// pairs reports whether rows of two-byte elements can be moved two at a time.
__device__ __forceinline__ bool pairs(const void* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 4 == 0 && stride % 2 == 0;
}

// y[.., i, .., j] = x[.., j, .., i]: dimension 5 is contiguous in y and dimension 4 in x. A tile goes through shared memory,
// so that both sides move whole lines. Launch: 32 by 8 threads; blockIdx.x counts tiles along dimension 5, blockIdx.y along
// dimension 4, blockIdx.z the other dimensions.
template <class T> __device__ __forceinline__ void copyTransposed(T* y, const T* x, const Layout& l) {
  constexpr int rows = kThreads / kWarp;
  __shared__ T tile[kTile][kTile + (sizeof(T) == 2 ? 2 : 1)];  // an odd number of words, so that columns spread over the banks
  int64_t rest = blockIdx.z;
#pragma unroll
  for (int k = 3; k >= 0; k--) {
    int64_t index = rest % l.size[k];
    rest /= l.size[k];
    x += index * l.xStride[k], y += index * l.yStride[k];
  }
  int64_t a = int64_t(blockIdx.x) * kTile, b = int64_t(blockIdx.y) * kTile;
  x += a * l.xStride[5] + b, y += b * l.yStride[4] + a;
  int sizeA = min(int64_t(kTile), l.size[5] - a), sizeB = min(int64_t(kTile), l.size[4] - b);
  if (sizeof(T) == 2 && sizeA == kTile && sizeB == kTile && pairs(x, l.xStride[5]) && pairs(y, l.yStride[4])) {
    uint32_t v[kTile / rows];
#pragma unroll
    for (int i = 0; i < kTile / rows; i++)
      v[i] = reinterpret_cast<const uint32_t*>(x + (threadIdx.y + i * rows) * l.xStride[5])[threadIdx.x];
#pragma unroll
    for (int i = 0; i < kTile / rows; i++)
      reinterpret_cast<uint32_t*>(tile[threadIdx.y + i * rows])[threadIdx.x] = v[i];
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < kTile; i += rows) {
      uint16_t low, high;
      memcpy(&low, &tile[2 * threadIdx.x][i], 2), memcpy(&high, &tile[2 * threadIdx.x + 1][i], 2);
      reinterpret_cast<uint32_t*>(y + i * l.yStride[4])[threadIdx.x] = low | uint32_t(high) << 16;
    }
    return;
  }
  if (sizeA == kTile && sizeB == kTile) {
    T v[kTile / rows][2];
#pragma unroll
    for (int i = 0; i < kTile / rows; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) v[i][j] = x[(threadIdx.y + i * rows) * l.xStride[5] + threadIdx.x + j * kWarp];
#pragma unroll
    for (int i = 0; i < kTile / rows; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) tile[threadIdx.y + i * rows][threadIdx.x + j * kWarp] = v[i][j];
  } else {
    for (int i = threadIdx.y; i < sizeA; i += rows)
      for (int j = threadIdx.x; j < sizeB; j += kWarp) tile[i][j] = x[i * l.xStride[5] + j];
  }
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.y; i < sizeB; i += rows)
    for (int j = threadIdx.x; j < sizeA; j += kWarp) y[i * l.yStride[4] + j] = tile[j][i];
}

#define DEFINE(name, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      copy_strided_##name(T* y, const T* x, const __grid_constant__ Layout l, unsigned total) {               \
    copyStrided(y, x, l, total);                                                                              \
  }
DEFINE(2, uint16_t)
DEFINE(4, uint32_t)
DEFINE(8, uint2)
DEFINE(16, uint4)
#undef DEFINE

#define DEFINE(name, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      copy_transposed_##name(T* y, const T* x, const __grid_constant__ Layout l) {                            \
    copyTransposed(y, x, l);                                                                                  \
  }
DEFINE(2, uint16_t)
DEFINE(4, uint32_t)
DEFINE(8, uint2)
