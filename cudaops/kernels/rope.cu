// Rotary position embedding. In every head of every row of x the pairs (i, i + h), h = headDim/2, turn by the angle whose
// cosine and sine stand at [position·h + i] of the tables, position = row mod seq:
//
//   y[i] = x[i]·cos − x[i+h]·sin,   y[i+h] = x[i+h]·cos + x[i]·sin
//
// With sign = −1 instead of 1 the angle is turned back, which is also the gradient. y may be x.
//
// A thread takes N neighbouring elements of one half, in H heads that lie heads/H apart, so that it reads its cosines and sines
// once and has H loads in flight. Where h/N threads are a power of two, the two halves of a head are neighbours in a warp, which
// reads and writes without gaps and hands each element to its partner's thread.
#include "common.cuh"

constexpr int kThreads = 256;

// Place is the position of a thread's first element in x and y, and of its angle in the tables.
struct Place {
  bool inside;
  int64_t x, y, angle, apart;  // apart: from one of the thread's heads to the next
};

// Launch: a thread for each of rows·heads/H·perHead stretches of N elements; fewer than 2³¹.
template <int N, int H>
__device__ __forceinline__ Place place(int64_t rows, int heads, int h, int seq, int64_t xStride, int64_t yStride, int perHead) {
  unsigned index = blockIdx.x * kThreads + threadIdx.x, perRow = heads / H * perHead;
  unsigned row = index / perRow, rest = index % perRow, head = rest / perHead, i = rest % perHead * N;
  int64_t at = int64_t(head) * 2 * h + i;
  return {row < rows, row * xStride + at, row * yStride + at, int64_t(row % seq) * h + i % h, int64_t(heads / H) * 2 * h};
}

// heads a multiple of H, h/N a power of two and at most 16. All addresses are multiples of 16 bytes. Launch: see place, with
// 2·h/N threads a head.
template <class T, int H>
__device__ __forceinline__ void rotatePacks(T* y, const T* x, const float* cosines, const float* sines, float sign,
                                            int64_t rows, int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  constexpr int N = kVec<T>, words = 4;
  Place p = place<N, H>(rows, heads, h, seq, xStride, yStride, 2 * h / N);
  int partner = h / N;
  bool second = threadIdx.x & partner;
  union Exchange {
    Pack<T, N> pack;
    unsigned word[words];
    __device__ Exchange() {}
  };
  Exchange own[H], other[H];
  Pack<float, N> c = {}, s = {};
  if (p.inside) {
#pragma unroll
    for (int k = 0; k < H; k++) own[k].pack = load<N>(x + p.x + k * p.apart);
    c = load<N>(cosines + p.angle), s = load<N>(sines + p.angle);
  }
  if (!second) sign = -sign;
#pragma unroll
  for (int k = 0; k < H; k++) {
#pragma unroll
    for (int w = 0; w < words; w++) other[k].word[w] = __shfl_xor_sync(kAllLanes, own[k].word[w], partner);
#pragma unroll
    for (int j = 0; j < N; j++)
      own[k].pack.set(j, own[k].pack.get(j) * c.v[j] + sign * other[k].pack.get(j) * s.v[j]);
    if (p.inside) store(y + p.y + k * p.apart, own[k].pack);
  }
}

// Any h and alignment. Launch: see place, with h threads a head, one for each pair.
template <class T>
__device__ __forceinline__ void rotatePairs(T* y, const T* x, const float* cosines, const float* sines, float sign,
                                            int64_t rows, int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  Place p = place<1, 1>(rows, heads, h, seq, xStride, yStride, h);
  if (!p.inside) return;
  float a = toFloat(x[p.x]), b = toFloat(x[p.x + h]), c = cosines[p.angle], s = sign * sines[p.angle];
  y[p.y] = fromFloat<T>(a * c - b * s);
  y[p.y + h] = fromFloat<T>(b * c + a * s);
}

#define DEFINE_VARIANT(T, name, rotate)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      rope_##name##_##T(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows, \
                        int heads, int h, int seq, int64_t xStride, int64_t yStride) {                        \
    rotate(y, x, cosines, sines, sign, rows, heads, h, seq, xStride, yStride);                                \
  }
#define DEFINE(T)                                     \
  DEFINE_VARIANT(T, heads4, (rotatePacks<T, 4>))      \
  DEFINE_VARIANT(T, heads1, (rotatePacks<T, 1>))      \
  DEFINE_VARIANT(T, pairs, rotatePairs<T>)
FOR_STORAGE_TYPES(DEFINE)
