// Rotary position embedding. In every head of every row of x the pairs (i, i + h), h = headDim/2, turn by the angle whose
// cosine and sine stand at [position·h + i] of the tables, position = row mod seq:
//
//   y[i] = x[i]·cos − x[i+h]·sin,   y[i+h] = x[i+h]·cos + x[i]·sin
//
// With sign = −1 instead of 1 the angle is turned back, which is also the gradient. y may be x.
//
// A thread takes N neighbouring pairs in H heads that lie heads/H apart, so that it reads their cosines and sines once and has
// 2·H loads in flight.
#include "common.cuh"

constexpr int kThreads = 256;

// loadOf and storeOf: with one head a thread, half of what it reads are angles, which other heads read again. They stay in the
// L1 if what is read once passes it by, which pays together with stores that the L2 gives up first.
template <int H, int N, class T> __device__ __forceinline__ Pack<T, N> loadOf(const T* p) {
  if constexpr (H == 1 && sizeof(T) * N % 16 == 0) return loadOnce<N>(p);
  return load<N>(p);
}
template <int H, int N, class T> __device__ __forceinline__ void storeOf(T* p, const Pack<T, N>& v) {
  if constexpr (H == 1 && sizeof(T) * N == 16)
    __stcs(reinterpret_cast<uint4*>(p), reinterpret_cast<const uint4&>(v));
  else
    store(p, v);
}

// h a multiple of N, heads of H; for N above 1 all addresses are multiples of 16 bytes. Launch: a thread for each of
// rows·heads/H·h/N stretches of N pairs; fewer than 2³¹.
template <class T, int N, int H>
__device__ __forceinline__ void rotate(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows,
                                       int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  unsigned index = blockIdx.x * kThreads + threadIdx.x, perHead = h / N, perRow = heads / H * perHead;
  unsigned row = index / perRow, rest = index % perRow, i = rest % perHead * N;
  if (row >= rows) return;
  int64_t at = int64_t(rest / perHead) * 2 * h + i, apart = int64_t(heads / H) * 2 * h, angle = int64_t(row % seq) * h + i;
  x += row * xStride + at, y += row * yStride + at;
  Pack<T, N> first[H], second[H];
#pragma unroll
  for (int k = 0; k < H; k++) {
    first[k] = loadOf<H, N>(x + k * apart);
    second[k] = loadOf<H, N>(x + k * apart + h);
  }
  Pack<float, N> c = load<N>(cosines + angle), s = load<N>(sines + angle);
#pragma unroll
  for (int k = 0; k < H; k++) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      float a = first[k].get(j), b = second[k].get(j), sine = sign * s.v[j];
      first[k].set(j, a * c.v[j] - b * sine);
      second[k].set(j, b * c.v[j] + a * sine);
    }
    storeOf<H>(y + k * apart, first[k]);
    storeOf<H>(y + k * apart + h, second[k]);
  }
}

#define DEFINE_VARIANT(T, name, N, H)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      rope_##name##_##T(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows, \
                        int heads, int h, int seq, int64_t xStride, int64_t yStride) {                        \
    rotate<T, N, H>(y, x, cosines, sines, sign, rows, heads, h, seq, xStride, yStride);                       \
  }
#define DEFINE(T)                        \
  DEFINE_VARIANT(T, heads2, kVec<T>, 2)  \
  DEFINE_VARIANT(T, heads1, kVec<T>, 1)  \
  DEFINE_VARIANT(T, pairs, 1, 1)
FOR_STORAGE_TYPES(DEFINE)
