// Rotary position embedding. In every head of every row of x, the pairs (i, i + h), h = headDim/2,
// are rotated by an angle. Its cosine and sine are at [position·h + i] of the tables, where
// position = row mod seq:
//
//   y[i] = x[i]·cos − x[i+h]·sin,   y[i+h] = x[i+h]·cos + x[i]·sin
//
// A sign of −1 instead of 1 rotates in the opposite direction, which is also the gradient. y may be
// x.
//
// If a head is a power of two of 16-byte packs, up to a warp, a lane has one pack in each of H
// heads, and gets the other elements of its pairs from another lane. The memory accesses in flight
// are then as compact as possible. Otherwise a thread has both elements of N pairs in heads that
// are heads/H apart, and reads their cosines and sines once.
//
// The last rows come first, because the cache still holds the rows that the preceding kernel wrote
// last. The next kernel starts with the first rows.
#include "common.cuh"

constexpr int kThreads = 128;

// loadNow and storeNow load and store 16 bytes in one access, in the order of the source. The
// compiler would otherwise move the loads of a second head after the arithmetic of the first, and
// split some stores.
template <int N, class T> __device__ __forceinline__ Pack<T, N> loadNow(const T* p) {
  if constexpr (sizeof(T) * N == 16) {
    Pack<T, N> r;
    uint4& u = reinterpret_cast<uint4&>(r);
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p) : "memory");
    return r;
  }
  return load<N>(p);
}
template <int N, class T> __device__ __forceinline__ void storeNow(T* p, const Pack<T, N>& v) {
  if constexpr (sizeof(T) * N == 16) {
    const uint4& u = reinterpret_cast<const uint4&>(v);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(u.x), "r"(u.y), "r"(u.z), "r"(u.w) : "memory");
  } else {
    store(p, v);
  }
}

// threadIndex returns the thread's index, with blocks in reverse order.
__device__ __forceinline__ unsigned threadIndex() { return (gridDim.x - 1 - blockIdx.x) * kThreads + threadIdx.x; }

// h must be a multiple of N and heads a multiple of H; if N is greater than 1, all addresses must
// be aligned to 16 bytes. Launch: one thread for each of rows·heads/H·h/N groups of N pairs,
// fewer than 2³¹.
template <class T, int N, int H>
__device__ __forceinline__ void rotate(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows,
                                       int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  unsigned index = threadIndex(), perHead = h / N, perRow = heads / H * perHead;
  unsigned row = index / perRow, rest = index % perRow, i = rest % perHead * N;
  if (row >= rows) return;
  int64_t at = int64_t(rest / perHead) * 2 * h + i, apart = int64_t(heads / H) * 2 * h, angle = int64_t(row % seq) * h + i;
  x += row * xStride + at, y += row * yStride + at;
  Pack<T, N> first[H], second[H];
#pragma unroll
  for (int k = 0; k < H; k++) {
    first[k] = loadNow<N>(x + k * apart);
    second[k] = loadNow<N>(x + k * apart + h);
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
    storeNow(y + k * apart, first[k]);
    storeNow(y + k * apart + h, second[k]);
  }
}

// The same if 2·h/N is a power of two and at most kWarp. Launch: one thread for each of
// rows·heads/H·2·h/N packs.
template <class T, int H>
__device__ __forceinline__ void exchange(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows,
                                         int heads, int h, int seq, int64_t xStride, int64_t yStride) {
  constexpr int N = kVec<T>, words = 4;
  const unsigned half = h / N, perRow = heads / H * 2 * half;
  unsigned index = threadIndex(), row = index / perRow, rest = index % perRow;
  const bool here = row < rows, second = rest & half;
  if (!here) row = 0;
  int64_t at = int64_t(rest) * N, apart = int64_t(heads / H) * 2 * h;
  x += row * xStride + at, y += row * yStride + at;
  Pack<T, N> v[H];
#pragma unroll
  for (int k = 0; k < H; k++) v[k] = loadNow<N>(x + k * apart);
  int64_t angle = int64_t(row % seq) * h + (rest & (half - 1)) * N;
  Pack<float, N> c = load<N>(cosines + angle), s = load<N>(sines + angle);
#pragma unroll
  for (int j = 0; j < N; j++) s.v[j] *= second ? sign : -sign;
#pragma unroll
  for (int k = 0; k < H; k++) {
    Pack<T, N> other;
#pragma unroll
    for (int i = 0; i < words; i++)
      reinterpret_cast<unsigned*>(&other)[i] = __shfl_xor_sync(kAllLanes, reinterpret_cast<unsigned*>(&v[k])[i], half);
#pragma unroll
    for (int j = 0; j < N; j++) v[k].set(j, v[k].get(j) * c.v[j] + other.get(j) * s.v[j]);
    if (here) storeNow(y + k * apart, v[k]);
  }
}

#define DEFINE_VARIANT(T, name, turn)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      rope_##name##_##T(T* y, const T* x, const float* cosines, const float* sines, float sign, int64_t rows, \
                        int heads, int h, int seq, int64_t xStride, int64_t yStride) {                        \
    turn(y, x, cosines, sines, sign, rows, heads, h, seq, xStride, yStride);                                  \
  }
#define DEFINE(T)                                           \
  DEFINE_VARIANT(T, exchange4, (exchange<T, 4>))            \
  DEFINE_VARIANT(T, heads2, (rotate<T, kVec<T>, 2>))        \
  DEFINE_VARIANT(T, heads1, (rotate<T, kVec<T>, 1>))        \
  DEFINE_VARIANT(T, pairs, (rotate<T, 1, 1>))
FOR_STORAGE_TYPES(DEFINE)
