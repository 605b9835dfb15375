// Attention from a single token to itself and the cached keys and values of the tokens before it, as a
// kernel of its own: see decode_attention.cuh.
#include "common.cuh"
#include "decode_attention.cuh"
#include "overlap.cuh"

constexpr int kThreads = 256;

// Launch: kThreads threads, [slices, kvHeads, ⌈heads/kvHeads/G⌉] blocks.
template <class T, int L, int G> __device__ __forceinline__ void attendSlice(const Attention& a) {
  __shared__ SharedOf<L, G, (G * L > 128 ? 4 : G), kThreads> shared;
  if (a.early) {
    // The preceding kernel may still change the position, in which case these loads are wasted but harmless.
    const int64_t position = __ldcg(a.position);
    if (blockIdx.z == 0 && position >= 0 && position < a.capacity) {
      int keys;
      const int slices = slicesOf(int(position) + 1 - firstVisible(a, position), a.slices, &keys);
      if (int(blockIdx.x) < slices) fetchSlice<T, kThreads>(a, position, blockIdx.y, blockIdx.x, keys, Rows());
    }
    releaseNext();
  }
  awaitPrevious();
  if (!a.early) releaseNext();
  const int64_t position = __ldcg(a.position);
  if (position < 0 || position >= a.capacity) return;  // the host rejects such positions
  int keys;
  const int slices = slicesOf(int(position) + 1 - firstVisible(a, position), a.slices, &keys);
  if (int(blockIdx.x) < slices) attend<T>(a, shared, position, blockIdx.y, blockIdx.z, blockIdx.x, slices, keys);
}

#define DEFINE_HEADS(T, L, G) \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_attention_##L##_##G##_##T(Attention a) { attendSlice<T, L, G>(a); }
#define DEFINE_LANES(T, L) DEFINE_HEADS(T, L, 4) DEFINE_HEADS(T, L, 8)
#define DEFINE(T) DEFINE_LANES(T, 8) DEFINE_LANES(T, 16) DEFINE_LANES(T, 32)
FOR_STORAGE_TYPES(DEFINE)
