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

// Launch: a thread for kUnroll elements, a block's width apart; total is all sizes' product.
template <class T> __device__ __forceinline__ void copyStrided(T* y, const T* x, const Layout& l, int64_t total) {
  T v[kUnroll];
  int64_t to[kUnroll];
  int64_t first = int64_t(blockIdx.x) * kUnroll * kThreads + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    int64_t rest = first + u * kThreads, from = 0;
    to[u] = -1;
    if (rest >= total) continue;
    int64_t at = 0;
#pragma unroll
    for (int k = kDims - 1; k >= 0; k--) {
      int64_t size = l.size[k];
      if (size == 1) continue;  // the same for all threads
      int64_t index;
      if (total < (int64_t(1) << 31)) {  // division is several times faster in 32 bits
        unsigned r = rest, s = size;
        index = r % s, rest = r / s;
      } else {
        index = rest % size, rest /= size;
      }
      from += index * l.xStride[k], at += index * l.yStride[k];
    }
    v[u] = x[from];
    to[u] = at;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; u++)
    if (to[u] >= 0) y[to[u]] = v[u];
}

constexpr int kTile = 32;

// y[.., i, .., j] = x[.., j, .., i]: dimension 5 is contiguous in y and dimension 4 in x. A tile goes through shared memory,
// so that both sides move whole lines. Launch: 32 by 8 threads; blockIdx.x counts tiles along dimension 5, blockIdx.y along
// dimension 4, blockIdx.z the other dimensions.
template <class T> __device__ __forceinline__ void copyTransposed(T* y, const T* x, const Layout& l) {
  __shared__ T tile[kTile][kTile + (sizeof(T) == 2 ? 2 : 1)];
  int64_t rest = blockIdx.z;
#pragma unroll
  for (int k = 3; k >= 0; k--) {
    int64_t index = rest % l.size[k];
    rest /= l.size[k];
    x += index * l.xStride[k], y += index * l.yStride[k];
  }
  int64_t a = int64_t(blockIdx.x) * kTile, b = int64_t(blockIdx.y) * kTile;
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    int64_t da = a + threadIdx.y + i, db = b + threadIdx.x;
    if (da < l.size[5] && db < l.size[4]) tile[threadIdx.y + i][threadIdx.x] = x[da * l.xStride[5] + db];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTile; i += 8) {
    int64_t da = a + threadIdx.x, db = b + threadIdx.y + i;
    if (da < l.size[5] && db < l.size[4]) y[db * l.yStride[4] + da] = tile[threadIdx.x][threadIdx.y + i];
  }
}

#define DEFINE(name, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      copy_strided_##name(T* y, const T* x, const __grid_constant__ Layout l, int64_t total) {                \
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
