// Copies from one layout to another: transposition, permutation, slices, concatenation, repetition.
// For every index of up to kDims dimensions,
//
//   y[Σ_k index_k·yStride_k] = x[Σ_k index_k·xStride_k]
//
// with strides in elements of 2, 4, 8 or 16 bytes. The type of the elements does not matter. The
// last dimension is the innermost. The host has merged dimensions and widened elements as far as
// the strides allow.
#include "common.cuh"

constexpr int kDims = 6, kThreads = 256, kUnroll = 4;

struct Layout {
  int64_t size[kDims], yStride[kDims], xStride[kDims];
};

// Launch: one thread for kUnroll elements that are a block's width apart. total is the product of
// all sizes and less than 2³¹.
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

// A tile's rows have at least 256 bytes, so that both sides move whole cache lines.
template <class T> constexpr int kTile = sizeof(T) == 2 ? 128 : 64;

// pairs reports whether rows of 2-byte elements can be moved two at a time.
__device__ __forceinline__ bool pairs(const void* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 4 == 0 && stride % 2 == 0;
}

template <class T> using Tile = T[kTile<T>][kTile<T> + (sizeof(T) == 2 ? 2 : 1)];  // an odd number of words per row avoids bank conflicts

// transposeTile moves a whole tile, one element or one pair at a time.
template <class Unit, class T>
__device__ __forceinline__ void transposeTile(T* y, const T* x, int64_t ys, int64_t xs, Tile<T>& tile) {
  constexpr int rows = kThreads / kWarp, edge = kTile<T>, each = sizeof(Unit) / sizeof(T), across = edge / each / kWarp;
  Unit v[edge / rows][across];
#pragma unroll
  for (int i = 0; i < edge / rows; i++)
#pragma unroll
    for (int j = 0; j < across; j++)
      v[i][j] = reinterpret_cast<const Unit*>(x + (threadIdx.y + i * rows) * xs)[threadIdx.x + j * kWarp];
#pragma unroll
  for (int i = 0; i < edge / rows; i++)
#pragma unroll
    for (int j = 0; j < across; j++)
      memcpy(&tile[threadIdx.y + i * rows][(threadIdx.x + j * kWarp) * each], &v[i][j], sizeof(Unit));
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.y; i < edge; i += rows)
#pragma unroll
    for (int j = 0; j < across; j++) {
      int unit = threadIdx.x + j * kWarp;
      T column[each];
#pragma unroll
      for (int k = 0; k < each; k++) column[k] = tile[unit * each + k][i];
      Unit u;
      memcpy(&u, column, sizeof(u));
      reinterpret_cast<Unit*>(y + i * ys)[unit] = u;
    }
}

// y[.., i, .., j] = x[.., j, .., i]: dimension 5 is contiguous in y and dimension 4 in x. A tile
// passes through shared memory. Launch: 32 by 8 threads; blockIdx.x counts tiles along dimension 5,
// blockIdx.y along dimension 4, and blockIdx.z the remaining dimensions.
template <class T> __device__ __forceinline__ void copyTransposed(T* y, const T* x, const Layout& l) {
  __shared__ Tile<T> tile;
  constexpr int rows = kThreads / kWarp, edge = kTile<T>;
  int64_t rest = blockIdx.z;
#pragma unroll
  for (int k = 3; k >= 0; k--) {
    int64_t index = rest % l.size[k];
    rest /= l.size[k];
    x += index * l.xStride[k], y += index * l.yStride[k];
  }
  int64_t a = int64_t(blockIdx.x) * edge, b = int64_t(blockIdx.y) * edge, xs = l.xStride[5], ys = l.yStride[4];
  x += a * xs + b, y += b * ys + a;
  int sizeA = min(int64_t(edge), l.size[5] - a), sizeB = min(int64_t(edge), l.size[4] - b);
  if (sizeA == edge && sizeB == edge) {
    if constexpr (sizeof(T) == 2)
      if (pairs(x, xs) && pairs(y, ys)) return transposeTile<uint32_t>(y, x, ys, xs, tile);
    return transposeTile<T>(y, x, ys, xs, tile);
  }
  for (int i = threadIdx.y; i < sizeA; i += rows)
    for (int j = threadIdx.x; j < sizeB; j += kWarp) tile[i][j] = x[i * xs + j];
  __syncthreads();
  for (int i = threadIdx.y; i < sizeB; i += rows)
    for (int j = threadIdx.x; j < sizeA; j += kWarp) y[i * ys + j] = tile[j][i];
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
