// Dropout:
//
//   y[i] = x[i]·scale if mix(key + i) >> 11 ≥ threshold, otherwise 0
//   key = mix(number) ^ salt
//
// mix is the output function of SplitMix64, as in package splitmix, so that the masks are those of the
// CPU. number is read from memory, because captured runs use a different one in every step.
//
// Launch: one thread for every kElements elements, which are a block's width apart.
#include "common.cuh"

constexpr int kThreads = 256, kElements = 8;

__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

template <class T>
__device__ __forceinline__ void run(T* y, const T* x, const uint64_t* number, uint64_t salt, uint64_t threshold, float scale, int64_t n) {
  const uint64_t key = mix(*number) ^ salt;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kElements) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kElements; k++) {
    const int64_t i = first + k * kThreads;
    if (i < n) y[i] = mix(key + i) >> 11 >= threshold ? fromFloat<T>(toFloat(x[i]) * scale) : fromFloat<T>(0.0f);
  }
}

#define DEFINE(T)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads) dropout_##T(T* y, const T* x, const uint64_t* number,      \
                                                                     uint64_t salt, uint64_t threshold, float scale, \
                                                                     int64_t n) {                                    \
    run(y, x, number, salt, threshold, scale, n);                                                                   \
  }
FOR_STORAGE_TYPES(DEFINE)
