// Attention for tokens of several sequences. Each token attends to itself and to the earlier tokens of its
// sequence. Pages contain the cached keys and values; see decode_attention.cuh.
//
// Row r of the table contains a token's position and its sequence's pages. decode_append first stores the
// rotated keys and the values of all rows. Afterwards, the rows can be computed in any order, even if
// they belong to the same sequence.
#include "common.cuh"
#include "decode_attention.cuh"
#include "decode_paged.cuh"

constexpr int kThreads = 256;

// Launch: one block per row.
template <class T> __device__ __forceinline__ void append(const Paged& a) {
  await(a);
  const int64_t* row = a.table + int64_t(blockIdx.x) * a.columns;
  const int64_t position = row[0];
  if (position < 0 || position >= a.capacity) return;
  const int width = a.kvHeads * a.dim;
  const int64_t to = PagedRows<false>(row + 1)(position) * width;
  const float *cosines = a.cosines, *sines = a.sines;
  if (cosines) cosines += position * (a.dim / 2), sines += position * (a.dim / 2);
  const T* k = static_cast<const T*>(a.k) + int64_t(blockIdx.x) * a.keyStride;
  const T* v = static_cast<const T*>(a.v) + int64_t(blockIdx.x) * a.valueStride;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const int head = i / a.dim * a.dim;
    static_cast<T*>(a.keys)[to + i] = fromFloat<T>(turned(k + head, i - head, a.dim, cosines, sines));
    static_cast<T*>(a.values)[to + i] = v[i];
  }
}

// Launch: kThreads threads, [slices, kvHeads · groups of G query heads, rows] blocks.
template <class T, int L, int G> __device__ __forceinline__ void attendPaged(const Paged& a) {
  __shared__ SharedOf<L, G, (G * L > 128 ? 4 : G), kThreads> shared;
  await(a);
  const int r = blockIdx.z, groups = gridDim.y / a.kvHeads, size = a.heads * a.dim;
  const int64_t* row = a.table + int64_t(r) * a.columns;
  const int64_t position = row[0];
  T* y = static_cast<T*>(a.y) + int64_t(r) * size;
  if (position < 0 || position >= a.capacity) {
    if (blockIdx.x == 0 && blockIdx.y == 0)
      for (int i = threadIdx.x; i < size; i += kThreads) y[i] = fromFloat<T>(0);
    return;
  }
  const Attention one{static_cast<const T*>(a.q) + int64_t(r) * a.queryStride, nullptr, nullptr, y, a.keys, a.values,
                      a.cosines, a.sines, nullptr, a.parts + int64_t(r) * a.heads * a.slices * (a.dim + 2),
                      a.arrived + int64_t(r) * groups * a.kvHeads, a.heads, a.kvHeads, a.dim, a.capacity, a.window,
                      a.slices, a.scale, a.packed};
  int keys;
  const int slices = slicesOf(int(position) + 1 - firstVisible(one, position), a.slices, &keys);
  if (int(blockIdx.x) >= slices) return;
  if (a.early && int(blockIdx.y) < a.kvHeads) fetchSlice<T, kThreads>(one, position, blockIdx.y, blockIdx.x, keys, PagedRows<false>(row + 1));
  attend<T>(one, shared, position, blockIdx.y % a.kvHeads, blockIdx.y / a.kvHeads, blockIdx.x, slices, keys,
            PagedRows<false>(row + 1));
}

#define DEFINE_LANES(T, L)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_paged_##L##_4_##T(Paged a) { attendPaged<T, L, 4>(a); } \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_paged_##L##_8_##T(Paged a) { attendPaged<T, L, 8>(a); }
#define DEFINE(T)                                                                                     \
  DEFINE_LANES(T, 8) DEFINE_LANES(T, 16) DEFINE_LANES(T, 32)                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_append_##T(Paged a) { append<T>(a); }
FOR_STORAGE_TYPES(DEFINE)
