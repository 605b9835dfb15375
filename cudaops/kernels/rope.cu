// Rotary position embedding. In every head of every row of x the pairs (i, i + h), h = headDim/2, turn by the angle whose
// cosine and sine stand at [position·h + i] of the tables, position = row mod seq:
//
//   y[i] = x[i]·cos − x[i+h]·sin,   y[i+h] = x[i+h]·cos + x[i]·sin
//
// With sign = −1 instead of 1 the angle is turned back, which is also the gradient. y may be x.
//
// A thread takes N neighbouring pairs, read as one access in either half, in H heads that lie heads/H apart, so that it
// reads its cosines and sines once and has 2·H loads in flight.
#include "common.cuh"

constexpr int kThreads = 256;

// heads a multiple of H, h a multiple of N; rows·heads·h/(N·H) < 2³¹. With N > 1 all addresses are multiples of 16 bytes.
// xStride and yStride are elements from one row to the next. Launch: a thread for each N pairs in H heads.
template <class T, int N, int H>
__device__ __forceinline__ void rotate(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows,
                                       int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  unsigned index = blockIdx.x * kThreads + threadIdx.x;
  unsigned perHead = h / N, perRow = heads / H * perHead;
  unsigned row = index / perRow, rest = index % perRow, head = rest / perHead, i = rest % perHead * N;
  if (row >= rows) return;
  x += row * xStride + head * 2 * h + i;
  y += row * yStride + head * 2 * h + i;
  int64_t apart = heads / H * 2 * h;

  Pack<T, N> a[H], b[H];
#pragma unroll
  for (int k = 0; k < H; k++) a[k] = load<N>(x + k * apart), b[k] = load<N>(x + k * apart + h);
  Pack<float, N> c = load<N>(cosines + row % seq * h + i), s = load<N>(sines + row % seq * h + i);
#pragma unroll
  for (int k = 0; k < H; k++) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      float u = a[k].get(j), v = b[k].get(j), sj = sign * s.v[j];
      a[k].set(j, u * c.v[j] - v * sj);
      b[k].set(j, v * c.v[j] + u * sj);
    }
    store(y + k * apart, a[k]);
    store(y + k * apart + h, b[k]);
  }
}

#define DEFINE_VARIANT(T, name, N, H)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      rope_##name##_##T(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows, \
                        int heads, int h, int seq, int64_t xStride, int64_t yStride) {                        \
    rotate<T, N, H>(y, x, cosines, sines, sign, rows, heads, h, seq, xStride, yStride);                       \
  }
#define DEFINE(T)                          \
  DEFINE_VARIANT(T, heads4, kVec<T>, 4)    \
  DEFINE_VARIANT(T, heads1, kVec<T>, 1)    \
  DEFINE_VARIANT(T, pairs, 1, 1)
FOR_STORAGE_TYPES(DEFINE)
